"""What every stepper owes: its order, a sample's independence, honest counts, clear refusals."""

import numpy as np
import pytest
import torch

from etdyn import System
from etdyn.interactions import Energy
from etdyn.solve.descent import GuardedEuler
from etdyn.solve.discrete_gradient import DiscreteGradient
from etdyn.solve.implicit import MatrixFreeMidpoint
from etdyn.solve.inner import InnerMethod
from etdyn.solve.langevin import MirrorLangevin

DYNAMICS = ["et", "leaky", "sphere"]
ORDERS = [(GuardedEuler, 1), (DiscreteGradient, 2), (MatrixFreeMidpoint, 2)]
STEPPERS = [stepper for stepper, _ in ORDERS]


def run(stepper, system, x, h, steps):
    """Every sample's own number of steps of its own size."""
    x, k = x.clone(), 0
    while bool((steps > k).any()):
        rows = (steps > k).nonzero().flatten()
        report = stepper.step(system, x[rows], h[rows])
        assert not report.shrunk.any() and not report.failed.any()
        x[rows], k = report.x, k + 1
    return x


def reference(system, x, time, steps=300):
    """The classical Runge-Kutta method, order 4."""
    h, v = time / steps, system.velocity
    for _ in range(steps):
        a = v(0, x)
        b = v(0, x + h / 2 * a)
        c = v(0, x + h / 2 * b)
        x = system.prepare(x + h / 6 * (a + 2 * b + 2 * c + v(0, x + h * c)))
    return x


def slope(stepper, case, time, counts):
    """The log-log slope in the step of the error, the RMS over samples, and the finest error."""
    system, steps = case.system, torch.tensor(counts)
    start = system.prepare(case.x)
    exact = reference(system, start, time)
    h = time / steps.double()
    samples = len(start)
    starts = start.repeat(len(counts), 1, 1)
    end = run(
        stepper, system, starts, h.repeat_interleave(samples), steps.repeat_interleave(samples)
    )
    error = (end.reshape(len(counts), *start.shape) - exact).flatten(1).norm(dim=1) / exact.norm()
    return np.polyfit(h.log().numpy(), error.log().numpy(), 1)[0], float(error[-1])


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize(("stepper", "order"), ORDERS)
@torch.no_grad()
def test_the_error_falls_with_the_order_where_the_energy_is_smooth(
    make_case, stepper, order, dynamics
):
    case = make_case(dynamics=dynamics, hopfield="softmax", weights=1.5, eps=1e-2, seed=3)
    found, error = slope(stepper(), case, 0.5, [8, 16, 32, 64])
    assert abs(found - order) < 0.2
    assert error < 10.0 ** (-order)


@pytest.mark.parametrize("stepper", [DiscreteGradient, MatrixFreeMidpoint])
@torch.no_grad()
def test_relu_memories_leave_the_order_near_two(make_case, stepper):
    """A kink that a step crosses costs O(h^2) once, as much as all the smooth rest."""
    case = make_case(hopfield="relu", weights=1.5, eps=1e-2, batch=16)
    found, _ = slope(stepper(), case, 0.5, [8, 16, 32, 64])
    assert abs(found - 2) < 0.4


@pytest.mark.parametrize("stepper", STEPPERS)
@torch.no_grad()
def test_steps_on_the_sphere_stay_there(make_case, stepper):
    case = make_case(dynamics="sphere", batch=4)
    x = case.system.prepare(case.x)
    for h in (1e-3, 0.3, 10.0):
        x = stepper().step(case.system, x, torch.full((4,), h, dtype=x.dtype)).x
        assert x.mean(-1).abs().max() < 1e-15
        assert (x.square().mean(-1) - 1).abs().max() < 4e-15


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("stepper", STEPPERS)
@torch.no_grad()
def test_a_sample_does_not_depend_on_its_neighbours(make_case, close, stepper, dynamics):
    """Also where the samples have masks of their own, and leave the inner solve one by one."""
    case = make_case(dynamics=dynamics, batch=5, tokens=4, seed=4)
    tokens = torch.ones(5, 4, dtype=torch.bool)
    tokens[1, 3] = tokens[2, 0] = tokens[4, 1] = False
    keys = case.mask(5, 4, 4)
    system, x = case.system.masked(tokens, keys), case.system.prepare(case.x)
    h = torch.tensor([1e-3, 0.1, 1.0, 30.0, 1e3], dtype=x.dtype)
    together = stepper().step(system, x, h)
    assert torch.equal(together.x[~tokens], x[~tokens]) or dynamics == "sphere"
    close(together.x[~tokens], x[~tokens], 1e-14)
    for k in range(5):
        one = slice(k, k + 1)
        alone = case.system.masked(tokens[one], keys[one])
        report = stepper().step(alone, x[one], h[one])
        assert torch.equal(report.taken, together.taken[one])
        close(report.x, together.x[one], 1e-11)


class Counted(Energy):
    """Counts the samples of every evaluation."""

    name = "counted"

    def __init__(self, inner):
        super().__init__()
        self.inner, self.count = inner, 0

    def energy_and_force(self, g, relative=False):
        self.count += len(g)
        return self.inner.energy_and_force(g, relative)

    def hvp(self, g, u):
        self.count += len(g)
        return self.inner.hvp(g, u)


@pytest.mark.parametrize("dynamics", DYNAMICS)
@pytest.mark.parametrize("stepper", STEPPERS)
@torch.no_grad()
def test_evaluations_are_those_made_and_an_easy_sample_pays_for_none_of_a_hard_one(
    make_case, stepper, dynamics
):
    case = make_case(batch=4, weights=3.0, spread=0.3, seed=1)
    case.system.attention.key.copy_(-case.system.attention.query)
    counted = Counted(case.system.interaction)
    system = System(case.system.lagrangian, counted, dynamics)
    h = torch.tensor([1e-3, 1e-3, 3.0, 1e3], dtype=torch.float64)
    report = stepper().step(system, system.prepare(case.x), h)
    assert int(report.evaluations.sum()) == counted.count
    assert report.evaluations[:2].max() < 16
    if stepper in (DiscreteGradient, MatrixFreeMidpoint):
        assert report.evaluations[2:].min() > 16
        assert (report.inner_method >= InnerMethod.PICARD).all()
        assert 0 < report.inner_residual.max() < 1e-13


@pytest.mark.parametrize("stepper", [GuardedEuler, DiscreteGradient, MatrixFreeMidpoint])
@torch.no_grad()
def test_a_broken_sample_fails_alone_and_stays_where_it_was(make_case, stepper):
    case = make_case(batch=3)
    case.x[1, 0, 0] = torch.nan
    h = torch.ones(3, dtype=torch.float64)
    report = stepper().step(case.system, case.x, h)
    assert report.failed.tolist() == [False, True, False]
    assert report.taken.tolist() == [1.0, 0.0, 1.0]
    assert not report.shrunk[1]
    assert torch.equal(report.x[1].nan_to_num(7.0), case.x[1].nan_to_num(7.0))
    assert torch.isfinite(report.x[[0, 2]]).all()


@pytest.mark.parametrize("stepper", [GuardedEuler])
def test_explicit_steps_are_differentiable(make_case, close, stepper):
    case = make_case()
    x, h = case.x.requires_grad_(), torch.full((2,), 0.1, dtype=torch.float64)
    weight = case.randn(*x.shape)
    (stepper().step(case.system, x, h).x * weight).sum().backward()
    v = case.randn(*x.shape)
    moved = [x.detach() + s * 1e-6 * v for s in (1, -1)]
    moved = [m + 0.1 * case.system.velocity(0, m) for m in moved]
    close((x.grad * v).sum(), ((moved[0] - moved[1]) * weight).sum() / 2e-6, 1e-7)


@pytest.mark.parametrize("stepper", STEPPERS)
@torch.no_grad()
def test_single_precision_works_to_its_own_rounding(make_case, stepper):
    case = make_case(hopfield="softmax", batch=3)
    h = torch.tensor([1e-2, 0.3, 10.0], dtype=torch.float64)
    double = stepper().step(case.system, case.x, h)
    single = stepper().step(case.system.float(), case.x.float(), h.float())
    assert single.x.dtype == single.taken.dtype == torch.float32
    assert not single.failed.any()
    assert (single.x - double.x).abs().max() < 1e-3 * double.x.abs().max()


EVERY = [*(s() for s in STEPPERS), MirrorLangevin(0.1)]


@pytest.mark.parametrize("stepper", EVERY, ids=lambda s: s.name)
@pytest.mark.parametrize(
    ("h", "error", "match"),
    [
        (0.1, TypeError, "h: expected a torch.Tensor, got float"),
        (torch.full((3,), 0.1, dtype=torch.float64), ValueError, r"h: expected shape \(2\)"),
        (torch.full((2,), 0.1), TypeError, "h: expected dtype torch.float64"),
        (torch.tensor([0.1, 0.0], dtype=torch.float64), ValueError, "h: expected finite steps > 0"),
        (torch.tensor([0.1, torch.nan], dtype=torch.float64), ValueError, "h: expected finite"),
    ],
)
def test_a_wrong_step_is_refused(make_case, stepper, h, error, match):
    case = make_case()
    with pytest.raises(error, match=match):
        stepper.step(case.system, case.x, h)
    with pytest.raises(ValueError, match="x: expected shape"):
        stepper.step(case.system, case.x[0], torch.full((2,), 0.1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: GuardedEuler(slack=-1.0), "slack"),
        (lambda: GuardedEuler(halvings=-1), "halvings"),
        (lambda: DiscreteGradient(tol=0.0), "tol"),
        (lambda: MatrixFreeMidpoint(halvings=-1), "halvings"),
        (lambda: MirrorLangevin(0.0), "temperature"),
    ],
)
def test_wrong_options_are_refused(build, match):
    with pytest.raises(ValueError, match=match):
        build()
