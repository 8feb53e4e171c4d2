"""Per-sample adaptive integration: tolerance, independence, cost and failure."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.integrate import RK23, RK45, solve_ivp
from torchdiffeq import odeint

import etdyn as ed
from etdyn.solve.batched import integrate_batched
from etdyn.solve.solution import Status
from etdyn.solve.tableaus import TABLEAUS

PAIRS = pytest.mark.parametrize("tableau", TABLEAUS.values(), ids=TABLEAUS)
DOPRI5 = TABLEAUS["dopri5"]
TIMES = torch.linspace(0, 2, 9, dtype=torch.float64)


def saturating(t, x, index=None):
    return 1 - x * x


def riccati(t, x, index=None):
    return -t.reshape(-1, 1, 1) * x * x


EXACT = {
    saturating: lambda t, x0: (t + x0.atanh()).tanh(),
    riccati: lambda t, x0: 1 / (1 / x0 + t * t / 2),
}
PROBLEMS = pytest.mark.parametrize("field", EXACT, ids=lambda f: f.__name__)


def start(batch=4, token=3, feature=5):
    g = torch.Generator().manual_seed(batch)
    return 0.2 + 0.6 * torch.rand(batch, token, feature, generator=g, dtype=torch.float64)


def run(field, x0, times=TIMES, tableau=DOPRI5, **options):
    defaults = {"rtol": 1e-8, "atol": 1e-10, "max_steps": 20_000}
    return integrate_batched(field, x0, times, tableau, **{**defaults, **options})


def relaxing(rates):
    """x' = rate (cos t - x) with the rate of every sample: stiff where it is large."""

    def field(t, x, index):
        return rates[index].reshape(-1, 1, 1) * (t.cos().reshape(-1, 1, 1) - x)

    return field


def slope(sizes, errors):
    return np.polyfit(np.log(sizes), np.log(errors), 1)[0]


class Watched:
    """A velocity that notes who was evaluated when."""

    def __init__(self, field, batch):
        self.field, self.counts = field, torch.zeros(batch, dtype=torch.int64)
        self.sizes, self.times = [], []

    def __call__(self, t, x, index):
        assert t.shape == index.shape == x.shape[:1]
        self.counts += torch.bincount(index, minlength=len(self.counts))
        self.sizes.append(len(index))
        self.times.append(t.clone())
        return self.field(t, x, index)


@pytest.mark.parametrize(("name", "theirs"), [("dopri5", RK45), ("bosh3", RK23)])
def test_first_step_is_hairers(name, theirs):
    x0 = start(1, 1, 5)
    x0[0, 0, 0] = 0.0
    for scale, end in ((1.0, 2.0), (1e4, 2.0), (1e-9, 0.1)):

        def field(t, x, index, scale=scale):
            return scale * riccati(t + 1, x)

        def flat(t, y, scale=scale):
            return -scale * (t + 1) * y * y

        ours = run(field, x0, [0.0, end], TABLEAUS[name], rtol=1e-3, atol=1e-6, max_steps=1)
        step = theirs(flat, 0.0, x0[0, 0].numpy(), end, rtol=1e-3, atol=1e-6).h_abs
        assert float(ours.steps[0, -1, 1]) == pytest.approx(step, rel=1e-12)


@PAIRS
def test_one_step_has_the_stability_function_of_the_tableau(tableau):
    g = np.random.default_rng(0)
    z = torch.from_numpy(g.uniform(-4, 1, 20) + 1j * g.uniform(-4, 4, 20))
    matrix = torch.view_as_real(torch.stack([z, 1j * z], -1)).mT  # [[re, -im], [im, re]]
    x0 = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64).repeat(20, 1, 1)
    result = run(
        lambda t, x, i: x @ matrix[i].mT, x0, [0.0, 1.0], tableau, atol=1e9, first_step=1.0
    )
    assert result.accepted.tolist() == [1] * 20
    assert not bool(result.rejected.any())
    a = np.array([[*row, *[0.0] * (tableau.stages - len(row))] for row in tableau.a])
    ones = np.ones(tableau.stages)
    for value, got in zip(z.numpy(), result.x[-1, :, 0].numpy(), strict=True):
        solved = np.linalg.solve(np.eye(len(a)) - value * a, ones)
        want = 1 + value * np.array(tableau.b) @ solved
        np.testing.assert_allclose(
            got, [want.real, want.imag], rtol=0, atol=1e-12 * abs(want) + 1e-13
        )


# --- accuracy ---


@PAIRS
@PROBLEMS
def test_error_follows_the_tolerance(tableau, field):
    x0, errors, tolerances = start(), [], np.logspace(-4, -8, 5)
    exact = torch.stack([EXACT[field](t, x0) for t in TIMES])
    for tolerance in tolerances:
        result = run(field, x0, tableau=tableau, rtol=tolerance, atol=tolerance)
        errors.append(float((result.x - exact).abs().max()))
    assert slope(tolerances, errors) == pytest.approx(1, abs=0.2)
    assert (np.array(errors) < 10 * tolerances).all()
    assert (np.array(errors) > 1e-3 * tolerances).all()


@pytest.mark.parametrize(("name", "theirs"), [("dopri5", "RK45"), ("bosh3", "RK23")])
def test_agrees_with_scipy_and_torchdiffeq(name, theirs):
    def field(t, x, index=None):  # an undamped pendulum, driven
        q, p = x.unbind(-1)
        return torch.stack([p, t.cos().reshape(-1, 1) - q.sin()], -1)

    x0 = torch.tensor([[[0.5, 0.0]], [[-1.0, 1.5]]], dtype=torch.float64)
    times = torch.linspace(0, 5, 21, dtype=torch.float64)
    ours = run(field, x0, times, TABLEAUS[name], rtol=1e-8, atol=1e-8)
    both = odeint(lambda t, x: field(t.expand(2), x), x0, times, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ours.x, both, rtol=0, atol=5e-7)
    for sample in range(2):

        def flat(t, x):
            return field(torch.tensor([t]), torch.from_numpy(x).reshape(1, 1, 2)).numpy().ravel()

        scipy = solve_ivp(
            flat, (0, 5), x0[sample].ravel(), theirs, times.numpy(), rtol=1e-8, atol=1e-8
        )
        np.testing.assert_allclose(ours.x[:, sample, 0], scipy.y.T, rtol=0, atol=5e-7)
        assert int(ours.evaluations[sample]) == pytest.approx(scipy.nfev, rel=0.1)


def test_energy_transformer_agrees_with_the_shared_step_solver():
    torch.manual_seed(0)
    system = ed.EnergyTransformer(8, 2, 4, 16, dynamics="leaky", hopfield="softmax").double()
    x0 = torch.randn(4, 6, 8, dtype=torch.float64)
    tokens = torch.ones(4, 6, dtype=torch.bool)
    tokens[1, 4:] = tokens[2, 1:] = False

    def field(t, x, index):
        return system.masked(tokens=tokens[index]).velocity(t, x)

    with torch.no_grad():
        ours = run(field, x0, rtol=1e-9, atol=1e-11)
        theirs = ed.solve(
            system.masked(tokens=tokens), x0, TIMES, method="dopri5", rtol=1e-9, atol=1e-11
        )
    torch.testing.assert_close(ours.x, theirs.x, rtol=0, atol=1e-8)


# --- every sample on its own ---


def test_a_stiff_sample_costs_the_others_nothing():
    rates = torch.tensor([1.0, 2.0, 200.0, 0.1], dtype=torch.float64)
    calm = torch.tensor([0, 1, 3])
    x0 = start()
    watched = Watched(relaxing(rates), 4)
    mixed = run(watched, x0)
    alone = run(relaxing(rates[calm]), x0[calm])
    torch.testing.assert_close(mixed.x[:, calm], alone.x, rtol=1e-12, atol=1e-15)
    for name in ("evaluations", "accepted", "rejected", "t_end", "status"):
        assert torch.equal(getattr(mixed, name)[calm], getattr(alone, name))
    assert mixed.evaluations[2] > 3 * mixed.evaluations[0]
    # each pays for itself, and leaves when it is there
    assert torch.equal(watched.counts, mixed.evaluations)
    assert sum(watched.sizes) == int(mixed.evaluations.sum())
    assert watched.sizes == sorted(watched.sizes, reverse=True)
    assert watched.sizes[-1] == 1
    assert mixed.status.dtype == torch.int8 and not bool(mixed.status.any())


@PAIRS
@settings(max_examples=6, deadline=None, derandomize=True)
@given(powers=st.lists(st.floats(-2, 2), min_size=2, max_size=5))
def test_a_sample_does_not_see_its_neighbours(tableau, powers):
    rates, x0 = 10.0 ** torch.tensor(powers, dtype=torch.float64), start(len(powers))
    watched = Watched(relaxing(rates), len(powers))
    together = run(watched, x0, tableau=tableau, rtol=1e-4)
    assert torch.equal(watched.counts, together.evaluations)
    attempts = together.accepted + together.rejected
    assert torch.equal(together.evaluations, 2 + attempts * (tableau.stages - 1))
    for n in range(len(powers)):
        alone = run(relaxing(rates[n : n + 1]), x0[n : n + 1], tableau=tableau, rtol=1e-4)
        torch.testing.assert_close(together.x[:, n], alone.x[:, 0], rtol=1e-12, atol=1e-13)
        assert together.evaluations[n] == alone.evaluations[0]


@PAIRS
def test_times_stay_inside_and_the_ends_are_exact(tableau):
    x0, g = start(), np.random.default_rng(0)
    field = relaxing(torch.tensor([1e-5, 1.0, 2.0, 5.0], dtype=torch.float64))
    for _ in range(12):  # lengths and offsets that do not round kindly
        times = np.sort(g.standard_normal(3) * 3).tolist()
        watched = Watched(field, 4)
        result = run(watched, x0, times, tableau, rtol=0.1, atol=0.1)
        seen = torch.cat(watched.times)
        assert float(seen.min()) == times[0]
        assert float(seen.max()) == times[-1]
        assert torch.equal(result.x[0], x0)
        assert torch.equal(result.x[-1], result.x_end)
        assert bool((result.t_end == times[-1]).all())


def test_save_times_change_no_step():
    x0 = start()
    few = run(riccati, x0, [0.0, 2.0])
    many = run(riccati, x0, torch.linspace(0, 2, 501, dtype=torch.float64))
    assert torch.equal(few.evaluations, many.evaluations)
    assert torch.equal(few.x_end, many.x_end)
    # the end of a step is its last stage, not a rounding of the interpolant
    step = few.steps[0, -3]
    at_steps = run(riccati, x0[:1], [0.0, float(step[0]), 2.0])
    there = run(riccati, x0[:1], [0.0, float(step[0])])
    torch.testing.assert_close(at_steps.x[1], there.x_end, rtol=1e-15, atol=0)


def test_log_of_the_last_steps():
    rates = torch.tensor([100.0, 0.5, 60.0, 90.0], dtype=torch.float64)
    result = run(relaxing(rates), start(), rtol=1e-5, atol=1e-5)
    for n in range(4):
        steps = result.steps[n][~result.steps[n].isnan().any(1)]
        attempts = int(result.accepted[n] + result.rejected[n])
        assert len(steps) == min(20, attempts)
        t, h, error, accepted = steps.unbind(1)
        assert torch.equal(accepted, (error <= 1).double())
        torch.testing.assert_close(t[1:], t[:-1] + h[:-1] * accepted[:-1], rtol=1e-14, atol=0)
        assert float(t[-1] + h[-1]) == 2.0


# --- stopping ---


def test_stop_ends_each_sample_at_its_own_time():
    x0 = start()
    x0[1] = 0.0
    asked = torch.zeros(4, dtype=torch.int64)

    def at_rest(t, x, velocity, index):
        assert not torch.is_grad_enabled() and not velocity.requires_grad
        asked[index] += 1
        return velocity.square().sum((1, 2)).sqrt() < 1e-3

    rates = torch.tensor([1.0, 1.0, 10.0, 0.1], dtype=torch.float64, requires_grad=True)

    def decaying(t, x, index):
        return -rates[index].reshape(-1, 1, 1) * x

    times = torch.linspace(0, 12, 25, dtype=torch.float64)
    watched = Watched(decaying, 4)
    result = run(watched, x0, times, rtol=1e-7, stop=at_rest)
    assert result.status.tolist() == [*[Status.EQUILIBRIUM] * 3, Status.FINISHED]
    assert result.evaluations[1] == 1
    assert torch.equal(watched.counts, result.evaluations)
    assert torch.equal(asked, 1 + result.accepted)
    for n in range(4):
        end, size = float(result.t_end[n]), float(x0[n].norm())
        saved = ~result.x[:, n].isnan().flatten(1).any(1)
        assert torch.equal(saved, times <= end)
        if n in (0, 2):
            rate = rates[n].item()
            assert rate * size * math.exp(-rate * end) < 1.001e-3
            assert end - float(result.steps[n, -1, 1]) < math.log(rate * size / 1e-3) / rate
    assert result.t_end[1] == 0.0
    everyone = run(decaying, torch.zeros_like(x0), times, stop=at_rest)
    assert everyone.evaluations.tolist() == [1] * 4


# --- failure ---


def breaking(kind):
    """x' = -x, except in sample 1; what it ends with there, the latest time, options."""
    special, status, latest, more = {
        "nan": (lambda t, x: torch.where(t > 0.3, torch.nan, -x), Status.NONFINITE, 0.3, {}),
        "nan at once": (lambda t, x: x * torch.nan, Status.NONFINITE, 0.0, {}),
        "nan off the start": (
            lambda t, x: torch.where(t > 0, torch.nan, x), Status.NONFINITE, 0.0,
            {"first_step": 0.1},
        ),
        "blow-up": (lambda t, x: x * x, Status.DT_MIN, 5.1, {}),
        "stiff": (lambda t, x: -1e4 * (x - t.cos()), Status.MAX_STEPS, 1.0, {"max_steps": 60}),
        "small steps": (
            lambda t, x: -1e4 * (x - t.cos()), Status.DT_MIN, 1.0, {"min_step": 1e-3}
        ),
    }[kind]  # fmt: skip

    def field(t, x, index):
        return torch.where((index == 1).reshape(-1, 1, 1), special(t.reshape(-1, 1, 1), x), -x)

    return field, status, latest, more


@pytest.mark.parametrize(
    "kind",
    [
        "nan",
        "nan at once",
        "nan off the start",
        "blow-up",
        "stiff",
        "small steps",
    ],
)
def test_failure_of_one_sample_leaves_the_others_alone(kind):
    field, status, latest, more = breaking(kind)
    times = torch.linspace(0, 6, 13, dtype=torch.float64)
    x0, others = start(), torch.tensor([0, 2, 3])
    watched = Watched(field, 4)
    result = run(watched, x0, times, rtol=1e-6, **more)
    alone = run(lambda t, x, i: -x, x0[others], times, rtol=1e-6, **more)
    assert result.status.tolist() == [0, status, 0, 0]
    torch.testing.assert_close(result.x[:, others], alone.x, rtol=1e-12, atol=1e-15, equal_nan=True)
    assert torch.equal(result.evaluations[others], alone.evaluations)
    assert torch.equal(watched.counts, result.evaluations)
    end = float(result.t_end[1])
    assert end <= latest
    assert bool(result.x_end.isfinite().all())
    assert torch.equal(~result.x[:, 1].isnan().flatten(1).any(1), times <= end)
    assert int(result.evaluations[1]) < 4000
    if kind == "nan":
        assert end == pytest.approx(0.3, rel=1e-13)
        _, h, _, accepted = result.steps[1].unbind(1)
        recovered = (accepted[:-2] < accepted[1:-1]).nonzero().flatten()
        assert len(recovered) > 1
        assert bool((h[recovered + 2] <= h[recovered + 1]).all())  # no growth right after
    if kind == "nan at once":
        assert result.evaluations[1] == 1
    if kind == "nan off the start":
        assert result.rejected[1] == 10
        assert bool(result.steps[1, -10:, 2].isnan().all())
    if kind == "blow-up":
        assert end == pytest.approx(float(1 / x0[1].max()), rel=1e-6)
    if kind == "stiff":
        assert int(result.accepted[1] + result.rejected[1]) == 60


# --- gradients ---


class Net(torch.nn.Module):
    """tanh(x W) - x sqrt(c_i - t): NaN in sample i once t > c_i."""

    def __init__(self, breaks):
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.weight = torch.nn.Parameter(torch.randn(5, 5, generator=g, dtype=torch.float64))
        self.breaks = torch.tensor(breaks, dtype=torch.float64)

    def forward(self, t, x, index):
        return torch.tanh(x @ self.weight) - x * (self.breaks[index] - t).sqrt().reshape(-1, 1, 1)


def gradients(net, x0, solve):
    x0 = x0.clone().requires_grad_()
    x = solve(x0)
    loss = (x * torch.linspace(0.5, 1.5, len(x), dtype=x.dtype).reshape(-1, 1, 1, 1)).square().sum()
    return torch.autograd.grad(loss, (x0, net.weight))


@PAIRS
def test_gradients_agree_with_torchdiffeq(tableau):
    net, x0, times = Net([4.0, 5.0]), start(2), TIMES / 4
    every = torch.arange(2)

    def theirs(x0):
        return odeint(lambda t, x: net(t, x, every), x0, times, rtol=1e-10, atol=1e-12)

    tolerance = 1e-8 if tableau.name == "bosh3" else 1e-10
    ours = gradients(net, x0, lambda x0: run(net, x0, times, tableau, rtol=tolerance, atol=1e-12).x)
    for got, want in zip(ours, gradients(net, x0, theirs), strict=True):
        assert float((got - want).abs().max() / want.abs().max()) < 1e-6


def test_gradients_of_samples_that_leave_or_break():
    net, x0 = Net([4.0, 0.7, 90.0, -1.0]), start(4)
    options = {"rtol": 1e-6, "first_step": 1.0}

    def stop(t, x, velocity, index):
        return (index == 2) & (t > 1)

    result = run(net, x0, stop=stop, **options)
    assert result.status.tolist() == [
        Status.FINISHED, Status.NONFINITE, Status.EQUILIBRIUM, Status.NONFINITE
    ]  # fmt: skip
    assert int(result.rejected[0]) + int(result.rejected[2]) > 0

    def healthy(x0):
        r = run(net, x0, stop=stop, **options)
        return torch.cat([r.x[:, :1], r.x_end[None, 2:3].expand(len(TIMES), -1, -1, -1)], 1)

    def first(x0):
        return run(net, x0[:1], **options).x

    def third(x0):
        r = run(lambda t, x, i: net(t, x, i + 2), x0[2:3], stop=lambda t, *_: t > 1, **options)
        return r.x_end.expand(len(TIMES), -1, -1, -1)

    together = gradients(net, x0, healthy)
    apart = [sum(g) for g in zip(*(gradients(net, x0, f) for f in (first, third)), strict=True)]
    for got, want in zip(together, apart, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-13)
    assert bool((result.replayed[[0, 2]] > 0).all())
    with torch.no_grad():
        assert not bool(run(net, x0, stop=stop, **options).replayed.any())


def test_no_graph_where_none_is_wanted():
    net = Net([4.0, 5.0])
    with torch.no_grad():
        without = run(net, start(2))
    kept = run(net, start(2))
    assert not without.x.requires_grad and kept.x.requires_grad and kept.x_end.requires_grad
    assert torch.equal(without.x, kept.x)
    assert torch.equal(without.x_end, kept.x_end)


# --- dtypes and input ---


def test_float32_states():
    x0, seen = start().float(), []

    def field(t, x, index):
        assert x.dtype == torch.float32
        seen.append(t.dtype)
        return saturating(t, x)

    result = run(field, x0, rtol=1e-5, atol=1e-6)
    assert set(seen) == {torch.float64}
    assert result.x.dtype == result.x_end.dtype == torch.float32
    exact = torch.stack([EXACT[saturating](t, x0.double()) for t in TIMES])
    torch.testing.assert_close(result.x.double(), exact, rtol=0, atol=1e-5)
    with pytest.raises(ValueError, match=r"rtol: expected at least 6e-06"):
        run(field, x0, rtol=5e-6)
    with pytest.raises(TypeError, match="velocity: expected dtype"):
        run(lambda t, x, i: x * t.reshape(-1, 1, 1), x0, rtol=1e-5)


def test_nothing_to_do():
    result = run(saturating, start()[:0])
    assert result.x.shape == (9, 0, 3, 5) and result.status.shape == (0,)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("times", {"times": [0.0]}),
        ("times", {"times": [0.0, 0.0]}),
        ("times", {"times": [0.0, math.nan]}),
        ("rtol", {"rtol": 1e-15}),
        ("atol", {"atol": -1.0}),
        ("max_steps", {"max_steps": 0}),
        ("first_step", {"first_step": 0.0}),
        ("min_step", {"min_step": -1.0}),
        ("stop", {"stop": lambda t, x, v, i: t > 1, "x0": start()[:, 0]}),
        ("stop", {"stop": lambda t, x, v, i: t}),
        ("velocity", {"field": lambda t, x, i: x[:, :1]}),
        ("x0", {"x0": start() * math.inf}),
        ("x0", {"x0": start().long()}),
    ],
)
def test_wrong_input_is_named(name, more):
    arguments = {"field": saturating, "x0": start(), **more}
    with pytest.raises(
        (ValueError, TypeError), match=f"^{name}: expected" if "x0" not in more else "^x0: expected"
    ):
        run(**arguments)
