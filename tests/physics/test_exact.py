"""Solvers on systems whose motion is known exactly (ET-F13 to ET-F15)."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn import Method, available_methods, descend, solve
from etdyn.problems import LinearEnergy, linear, single_memory

ORDERS = {"euler": (1, 64), "midpoint": (2, 16), "heun2": (2, 16), "heun3": (3, 8), "rk4": (4, 4)}
SETTINGS = {
    "dim": st.integers(3, 20),
    "overlap": st.floats(1e-3, 10),
    "offset": st.floats(0, 10),
    "strength": st.floats(0.1, 3),
    "gamma": st.floats(0.1, 3),
    "eps": st.sampled_from([1e-8, 1e-5, 1e-2, 1.0]),
}


def along_memory(problem, x):
    """a, the component along xi, and what is orthogonal to it."""
    xi = problem.system.hopfield.memories[0].detach()
    unit = xi / xi.norm()
    a = x @ unit
    return a, x - a.unsqueeze(-1) * unit


@given(settings=st.fixed_dictionaries(SETTINGS), t=st.floats(0, 100))
def test_et_f14_exact_state_obeys_the_implicit_relation(close, settings, t):
    problem = single_memory(**settings)
    k = math.sqrt(settings["offset"] ** 2 + settings["dim"] * settings["eps"])
    rate = settings["gamma"] * math.sqrt(settings["dim"]) * settings["strength"] ** 2

    def clock(x):
        a = float(along_memory(problem, x)[0])
        root = math.sqrt(a * a + k * k)
        return root + k * math.log(a / (k + root))

    begin, end = clock(problem.start), clock(problem.exact(t))
    size = abs(begin) + abs(end) + k * (1 + abs(math.log(k)))
    assert abs(end - begin - rate * t) <= 1e-14 * size
    rest = along_memory(problem, problem.exact(t))[1]
    close(rest, along_memory(problem, problem.start)[1], 1e-15, scale=problem.exact(t))
    close(problem.start.sum(), 0, 1e-15, scale=problem.start.abs().max())


@given(settings=st.fixed_dictionaries(SETTINGS), t=st.floats(0.1, 10))
def test_et_f14_exact_state_moves_with_the_velocity(close, settings, t):
    problem = single_memory(**settings)
    velocity = problem.system.velocity(t, problem.exact(t)).detach()
    h = 0.01 * min(t, float(problem.exact(t).norm() / velocity.norm()), 1 / settings["strength"])
    x = [problem.exact(t + k * h) for k in (-2, -1, 1, 2)]
    difference = (x[0] - 8 * x[1] + 8 * x[2] - x[3]) / (12 * h)
    close(difference, velocity, 1e-5, scale=1e-9 * problem.exact(t) / h)


def test_et_f14_angle_falls_as_one_over_time():
    problem = single_memory(dim=8, overlap=0.1, offset=1.0, strength=1.5, gamma=0.7)
    a, rest = along_memory(problem, problem.exact(1e8))
    rate = 0.7 * math.sqrt(8) * 1.5**2
    assert float(rest.norm() / a) * rate * 1e8 == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("method", ORDERS)
def test_et_f14_fixed_step_methods_converge_at_their_order(method):
    """The slope of log error over log step, between steps halved three times."""
    order, coarse = ORDERS[method]
    problem = single_memory(dim=6, overlap=0.5, offset=1.0)
    exact = problem.exact(2.0)
    errors = []
    for count in (2 * coarse, 4 * coarse, 8 * coarse, 16 * coarse):
        x = solve(
            problem.system, problem.start, [0.0, 2.0], method, step=2 / count, gradient=None
        ).x
        errors.append(math.log2((x[-1] - exact).norm()))
    slopes = [a - b for a, b in pairwise(errors)]
    assert slopes[-1] == pytest.approx(order, abs=0.1), slopes
    assert abs(slopes[-1] - order) < abs(slopes[0] - order) + 0.02, "the slope settles"


def test_et_f13_descent_is_euler_and_converges_at_order_one():
    problem = single_memory(dim=6, overlap=0.5, offset=1.0)
    error = []
    for steps in (128, 256, 512):
        x = descend(problem.system, problem.start, 2 / steps, steps).x[-1].detach()
        error.append(math.log2((x - problem.exact(2.0)).norm()))
    assert error[0] - error[1] == pytest.approx(1, abs=0.02)
    assert error[1] - error[2] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("method", ["dopri5", "dopri8", "bosh3", "adaptive_heun"])
def test_et_f14_adaptive_methods_meet_their_tolerance(method, close):
    """The error is no more than the tolerance a step (fehlberg2's own estimate is too kind)."""
    problem = single_memory(dim=6, overlap=0.1, offset=1.0)
    times = torch.linspace(0, 5, 6, dtype=torch.float64)
    exact = torch.stack([problem.exact(float(t)) for t in times])
    for tolerance in (1e-3, 1e-5):
        solution = solve(
            problem.system, problem.start, times, method, rtol=tolerance, atol=tolerance,
            gradient=None,
        )  # fmt: skip
        close(solution.x, exact, tolerance * solution.stats.accepted)


@pytest.mark.parametrize("method", available_methods())
def test_et_f15_constant_force_is_met_exactly_by_every_method(make_case, close, method):
    case = make_case()
    problem = linear(case.randn(*case.x.shape[1:]), case.x)
    # the tolerance is idle where every step is exact; it keeps the first steps few
    step = 0.25 if method in available_methods(fixed_step=True) else None
    options = {"solver": "RK45"} if method == "scipy_solver" else {}
    times = [0.0, 0.5, 1.5, 4.0]
    with torch.no_grad():
        x = solve(problem.system, problem.start, times, Method(method, step, options=options)).x
    close(x, torch.stack([problem.exact(t) for t in times]), 1e-13)


def test_et_f15_constant_force_is_met_exactly_by_the_discrete_model(make_case, close):
    case = make_case()
    problem = linear(case.randn(*case.x.shape[1:]), case.x)
    solution = descend(problem.system, problem.start, 0.25, 16)
    close(solution.x, torch.stack([problem.exact(float(t)) for t in solution.t]), 1e-14)


def test_linear_energy_is_linear(make_case, close):
    case = make_case()
    v = case.randn(5, 8)
    energy, g, present = LinearEnergy(v), case.randn(2, 5, 8), case.token_mask()
    close(energy.energy(g), -torch.einsum("ntd,td->n", g, v))
    close(energy.force(g), v.expand(2, -1, -1), 0)
    assert (energy.hvp(g, g) == 0).all()
    masked = energy.masked(tokens=present)
    close(masked.force(g), v * present[..., None], 0)
    close(masked.energy(g), -torch.einsum("ntd,td,nt->n", g, v, present.double()))


def test_problems_refuse_wrong_arguments():
    for name, value in (
        ("dim", 2), ("overlap", 0.0), ("offset", -1.0), ("strength", 0.0), ("gamma", 0.0),
        ("eps", -1.0),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            single_memory(**{name: value})
    with pytest.raises(ValueError, match="t:"):
        single_memory().exact(-1.0)
    v = torch.zeros(3, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="start"):
        linear(v, torch.zeros(1, 2, 4, dtype=torch.float64))
    with pytest.raises(TypeError, match="v"):
        linear(v.float(), torch.zeros(1, 3, 4, dtype=torch.float64))
    with pytest.raises(ValueError, match="v"):
        linear(v * torch.nan, torch.zeros(1, 3, 4, dtype=torch.float64))
