"""`solve` with our own steppers: counts, statuses, save times, stops, gradients, noise."""

import pytest
import torch

import etdyn as ed
from etdyn.problems import LinearEnergy
from etdyn.solve import iterate
from etdyn.solve.methods import STEPPERS

NAMES = list(STEPPERS)


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
@pytest.mark.parametrize("name", NAMES)
def test_save_times_are_met_and_steps_counted(make_case, close, name, dynamics):
    case = make_case(dynamics=dynamics, weights=0.2)
    times = [0.0, 0.1, 0.35]
    found = ed.solve(case.system, case.x, times, name, step=0.05, gradient=None)
    assert found.status.tolist() == [ed.Status.FINISHED] * 2
    assert found.t_end.tolist() == [0.35] * 2
    assert found.stats.accepted.tolist() == [7, 7] and found.stats.shrunk.tolist() == [0, 0]
    assert found.stats.rejected is None
    straight = ed.solve(case.system, case.x, [0.0, 0.35], name, step=0.05, gradient=None)
    close(found.x[-1], straight.x[-1], 1e-10)
    ds = found.to_xarray()
    assert ds["shrunk"].values.tolist() == [0, 0]
    if name == "guarded_euler":
        assert found.stats.inner is None
        assert found.stats.evaluations.tolist() == [14, 14]
    else:
        assert found.stats.inner.residual.max() < 1e-12
        assert found.stats.inner.methods.sum(1).tolist() == [7, 7]


@pytest.mark.parametrize("name", NAMES)
def test_a_sample_does_not_depend_on_its_neighbours(make_case, close, name):
    case = make_case(dynamics="leaky", batch=4, weights=1.5)
    together = ed.solve(case.system, case.x, [0.0, 3.0], name, step=1.0, gradient=None)
    for k in range(4):
        alone = ed.solve(case.system, case.x[k : k + 1], [0.0, 3.0], name, step=1.0, gradient=None)
        close(together.x[-1, k], alone.x[-1, 0], 1e-10)
        assert together.stats.evaluations[k] == alone.stats.evaluations[0]


def test_a_step_that_would_raise_the_energy_is_shrunk_and_counted():
    """ET-F24 with steps far too large."""
    generator = torch.Generator().manual_seed(0)
    system = ed.EnergyTransformer(12, 1, 12, 2, "leaky").double()
    with torch.no_grad():
        system.attention.query.copy_(4 * torch.eye(12)[None])
        system.attention.key.copy_(-4 * torch.eye(12)[None])
    x = torch.randn(3, 8, 12, generator=generator, dtype=torch.float64)
    times = torch.arange(6.0) * 4
    plain = ed.descend(system, x, 4.0, 5, gradient=None).to_xarray()
    assert (plain["energy"].diff("time") > 1e-9).any()
    guarded = ed.solve(system, x, times, "guarded_euler", step=4.0, gradient=None)
    assert (guarded.stats.shrunk > 0).all()
    assert (guarded.stats.accepted > 5).all(), "each goes on to the save time"
    assert (guarded.to_xarray()["energy"].diff("time") <= 1e-9).all()
    falling = ed.solve(system, x, times, "discrete_gradient", step=4.0, gradient=None)
    assert (falling.to_xarray()["energy"].diff("time") <= 1e-9).all()


def test_max_steps_and_broken_samples_are_statuses(make_case):
    case = make_case(batch=3, hopfield="power", power=5)
    few = ed.solve(case.system, case.x, [0.0, 1.0, 2.0], "discrete_gradient", step=0.25,
                   max_steps=6, gradient=None, throw=False)  # fmt: skip
    assert few.status.tolist() == [ed.Status.MAX_STEPS] * 3
    assert few.t_end.tolist() == pytest.approx([1.5] * 3)
    assert few.failure.samples == (0, 1, 2) and len(few.failure.steps) == 6
    assert torch.isfinite(few.x[:2]).all() and few.x[2].isnan().all()
    with pytest.raises(ed.SolveError, match="MAX_STEPS"):
        ed.solve(case.system, case.x, [0.0, 1.0], "guarded_euler", step=0.01, max_steps=2,
                 gradient=None)  # fmt: skip
    x = case.x.clone()
    x[1] = 1e200
    for name in NAMES:
        bad = ed.solve(case.system, x, [0.0, 1.0], name, step=0.5, gradient=None, throw=False)
        assert bad.status.tolist() == [ed.Status.FINISHED, ed.Status.NONFINITE, ed.Status.FINISHED]
        assert bad.t_end.tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("name", NAMES)
def test_starting_at_equilibrium_stops_at_once(make_case, name):
    case = make_case(dynamics="leaky", weights=1.5)
    rest = ed.find_equilibrium(case.system, case.x).x
    x = torch.stack([rest[0], case.x[1]])
    stop = ed.Stop(1e-6)
    found = ed.solve(case.system, x, [0.0, 200.0], name, step=0.5, stop=stop, gradient=None)
    assert found.status.tolist() == [ed.Status.EQUILIBRIUM] * 2
    assert found.t_end[0] == 0 < found.t_end[1] < 200
    assert found.stats.evaluations[0] == 0


def test_gradient_passes_the_guarded_step_and_no_implicit_one(make_case, close):
    case = make_case(weights=0.2)
    case.system.requires_grad_()
    x = case.x.clone().requires_grad_()
    through = ed.solve(case.system, x, [0.0, 0.5], "guarded_euler", step=0.1).x[-1]
    plain = ed.descend(case.system, x, 0.1, 5).x[-1]
    close(through, plain, 1e-13)
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), [x, case.system.attention.query])
                      for y in (through, plain)), strict=True):  # fmt: skip
        close(a, b, 1e-12)
    for name in ("discrete_gradient", "matrix_free_midpoint"):
        with pytest.raises(ValueError, match="gradient"):
            ed.solve(case.system, x, [0.0, 0.5], name, step=0.1)
    with pytest.raises(ValueError, match="gradient"):
        ed.solve(case.system, x, [0.0, 0.5], "guarded_euler", step=0.1, gradient="backsolve")


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"name": "discrete_gradient"}, "step"),
        ({"name": "discrete_gradient", "step": 0.1, "options": {"slack": 1.0}}, "halvings, tol"),
        ({"name": "guarded_euler", "step": 0.1, "options": {"halvings": -1}}, "halvings"),
        ({"name": "mirror_langevin", "step": 0.1}, "temperature"),
        ({"name": "mirror_langevin", "step": 0.1, "options": {"temperature": -1.0}}, "temperature"),
    ],
)
def test_options_are_checked_when_the_method_is_made(options, match):
    with pytest.raises((ValueError, TypeError), match=match):
        ed.Method(**options)


def test_noise_by_name_repeats_with_its_seed_and_samples_the_gibbs_measure():
    """One token on the sphere in a linear energy: the mean of cos is that of von Mises, Fisher."""
    v = torch.tensor([[1.0, -1.0, 0.0]], dtype=torch.float64) / 2**0.5
    lagrangian = ed.LayerNorm(3).double()
    lagrangian.set_gamma(1.0)
    system = ed.System(lagrangian, LinearEnergy(v), "sphere")
    x = torch.randn(2000, 1, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def cosines(seed):
        method = ed.Method("mirror_langevin", 0.04, options={"temperature": 1.0, "seed": seed})
        end = ed.solve(system, x, [0.0, 20.0], method, gradient=None).x[-1]
        return (system.activation(end)[:, 0] @ v[0]).detach() / 3**0.5

    first = cosines(3)
    assert torch.equal(first, cosines(3)) and not torch.equal(first, cosines(4))
    kappa = torch.tensor(3**0.5, dtype=torch.float64)  # on the circle: I1/I0
    exact = torch.special.i1(kappa) / torch.special.i0(kappa)
    assert abs(first.mean() - exact) < 4 * first.std() / 2000**0.5


def test_iterate_takes_a_step_for_every_sample(make_case, close):
    for dynamics in ("et", "leaky", "sphere"):
        case = make_case(dynamics=dynamics, batch=3)
        x, steps = case.system.prepare(case.x), torch.tensor([0.01, 0.5, 3.0]).double()
        *_, together = iterate(case.system, x, steps, 20)
        for k, h in enumerate(steps.tolist()):
            *_, alone = iterate(case.system, x[k : k + 1], h, 20)
            close(together[k], alone[0], 1e-12)
