"""Order, tolerance and stability function of every method that `solve` offers."""

import cmath
import math

import numpy as np
import pytest
import torch
from torchdiffeq._impl.odeint import SOLVERS

import etdyn as ed
from etdyn.problems import anisotropic_well, linear_flow
from etdyn.solve.methods import STEPPERS
from etdyn.solve.tableaus import TABLEAUS

ORDERS = {
    "euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4,
    "explicit_adams": 4, "implicit_adams": 5, "fixed_adams": 5,
}  # fmt: skip
ADAPTIVE = list(ed.available_methods(False))


class Field(ed.System):
    """Any right-hand side f(t, x), feature by feature."""

    def __init__(self, f):
        super().__init__(ed.LayerNorm(2), ed.Hopfield(2, 1))
        self.f = f
        self.double()

    def velocity(self, t, x):
        return self.f(t, x)


# x' = 1 - x^2 and x' = -t x^2, smooth, with exact solutions
PROBLEMS = {
    "autonomous": (lambda t, x: 1 - x * x, lambda t, x0: math.tanh(t + math.atanh(x0))),
    "non-autonomous": (lambda t, x: -t * x * x, lambda t, x0: 1 / (t * t / 2 + 1 / x0)),
}
STARTS = (0.1, 0.5)


def error(method, problem, end=1.5):
    f, exact = PROBLEMS[problem]
    x0 = torch.tensor(STARTS, dtype=torch.float64).reshape(1, 1, 2)
    found = ed.solve(Field(f), x0, [0.0, end], method, gradient=None)
    wanted = torch.tensor([exact(end, s) for s in STARTS], dtype=torch.float64)
    return float((found.x[-1, 0, 0] - wanted).abs().max())


def slope(sizes, errors):
    return float(np.polyfit(np.log(sizes), np.log(errors), 1)[0])


def test_every_fixed_step_method_has_a_known_order():
    assert set(ORDERS) == set(ed.available_methods(True)) - set(STEPPERS)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ORDERS)
def test_order(name, problem):
    counts = [64, 128, 256] if ORDERS[name] < 4 else [24, 48, 96]
    sizes = [1.5 / n for n in counts]
    errors = [error(ed.Method(name, step=h, rtol=1e-13, atol=1e-15), problem) for h in sizes]
    assert min(errors) > 1e-14
    assert slope(sizes, errors) == pytest.approx(ORDERS[name], abs=0.2)


@pytest.mark.parametrize("problem", PROBLEMS)
@pytest.mark.parametrize("name", ADAPTIVE)
def test_error_follows_the_tolerance_over_four_decades(name, problem):
    start = -3 if name in ("adaptive_heun", "fehlberg2") else -4
    tolerances = [10.0**k for k in range(start, start - 5, -1)]
    errors = [error(ed.Method(name, rtol=t, atol=t / 100), problem) for t in tolerances]
    assert errors[0] < 100 * tolerances[0]
    assert slope(tolerances, errors) == pytest.approx(1.0, abs=0.35)


def stability_function(name, z):
    """R(z) from the tableau."""
    simple = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}
    if name in simple:
        return sum(z**k / math.factorial(k) for k in range(simple[name] + 1))
    if name.startswith("batched_"):
        tableau = TABLEAUS[name.removeprefix("batched_")]
        rows, b = [list(row) for row in tableau.a], list(tableau.b)
    else:
        tableau = SOLVERS[name].tableau
        rows, b = [[], *[row.tolist() for row in tableau.beta]], tableau.c_sol.tolist()
    stages = []
    for row in rows:
        stages.append(1 + z * sum(a * k for a, k in zip(row, stages, strict=False)))
    return 1 + z * sum(w * k for w, k in zip(b, stages, strict=False))


ONE_STEP = [
    n
    for n in ed.available_methods()
    if "adams" not in n and n != "scipy_solver" and n not in STEPPERS
]


@pytest.mark.parametrize("name", ONE_STEP)
def test_one_step_is_the_tableaus_stability_function(name):
    for k in range(20):
        z = cmath.rect(0.2 + 0.15 * k, 2.4 * k)
        turn = torch.tensor([[z.real, -z.imag], [z.imag, z.real]], dtype=torch.float64)
        system = Field(lambda t, x, turn=turn: x @ turn.T)
        if name in ORDERS:
            method = ed.Method(name, step=1.0)
        else:
            method = ed.Method(name, rtol=1e9, options={"first_step": 1.0})
        x0 = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
        found = ed.solve(system, x0, [0.0, 1.0], method, gradient=None)
        assert int(torch.as_tensor(found.stats.accepted)) == 1
        wanted = stability_function(name, z)
        assert abs(complex(*found.x[-1, 0, 0].tolist()) - wanted) < 1e-13 * max(1, abs(wanted))


def steppers_answer(name, z):
    return 1 + z if name == "guarded_euler" else (1 + z / 2) / (1 - z / 2)


@pytest.mark.parametrize("name", STEPPERS)
def test_one_step_of_a_stepper_is_its_stability_function(name):
    """On x' = z x; those that need an energy on real z, which is all that a gradient flow has."""
    for k in range(20):
        z = cmath.rect(0.2 + 0.15 * k, 2.4 * k)
        if name != "matrix_free_midpoint":
            z = complex(-abs(z), 0.0)  # an energy that falls
        turn = torch.tensor([[z.real, -z.imag], [z.imag, z.real]], dtype=torch.float64)
        x0 = torch.tensor([[[1.0], [0.0]]], dtype=torch.float64)
        if z.imag:
            system = linear_flow(turn + torch.eye(2).double(), x0).system  # leaky: J - 1 = z
        else:
            system = anisotropic_well(-z.real * torch.ones(2, 1).double(), x0).system
        found = ed.solve(system, x0, [0.0, 1.0], ed.Method(name, step=1.0), gradient=None)
        if name == "guarded_euler" and abs(1 + z) > 1:  # such a step would raise the energy
            assert int(found.stats.shrunk) > 0
            continue
        assert int(found.stats.accepted) == 1 and int(found.stats.shrunk) == 0
        wanted = steppers_answer(name, z)
        assert abs(complex(*found.x[-1, 0, :, 0].tolist()) - wanted) < 1e-12 * max(1, abs(wanted))


@pytest.mark.parametrize("name", STEPPERS)
def test_order_of_a_stepper(name):
    x0 = torch.tensor([[[1.0, -0.5]]], dtype=torch.float64)
    problem = anisotropic_well(torch.tensor([[1.0, 0.4]]).double(), x0)
    sizes, wanted = [1.5 / n for n in (64, 128, 256)], problem.exact(1.5)
    errors = []
    for h in sizes:
        found = ed.solve(problem.system, x0, [0.0, 1.5], name, step=h, gradient=None)
        errors.append(float((found.x[-1] - wanted).abs().max()))
    order = 1 if name == "guarded_euler" else 2
    assert slope(sizes, errors) == pytest.approx(order, abs=0.2)
