"""R(z) of the methods that run, against their tableaus and known intervals."""

import math

import pytest
import torch
from torchdiffeq._impl.odeint import SOLVERS

import etdyn as ed
from etdyn.analysis.stability_function import real_limit, stability_function
from etdyn.solve.tableaus import TABLEAUS

TAYLOR = {"euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4}
ONE_STEP = [
    n
    for n in ed.available_methods()
    if "adams" not in n and n not in ("scipy_solver", "guarded_euler", "discrete_gradient")
]
# Hairer, Wanner, Solving ODEs II, IV.2; of the third order, the real root of R(-s) = -1
KNOWN = {
    "euler": 2.0, "midpoint": 2.0, "heun2": 2.0, "heun3": 2.5127453266, "bosh3": 2.5127453266,
    "rk4": 2.7852935634, "dopri5": 3.3065678926, "batched_dopri5": 3.3065678926,
    "matrix_free_midpoint": math.inf,
}  # fmt: skip


def points():
    """20 complex z on a spiral."""
    k = torch.arange(20, dtype=torch.float64)
    return torch.polar(0.2 + 0.15 * k, 2.4 * k)


def from_tableau(name, z):
    if name in TAYLOR:
        return sum(z**k / math.factorial(k) for k in range(TAYLOR[name] + 1))
    if name == "matrix_free_midpoint":
        return (1 + z / 2) / (1 - z / 2)
    if name.startswith("batched_"):
        tableau = TABLEAUS[name.removeprefix("batched_")]
        rows, b = tableau.a, tableau.b
    else:
        tableau = SOLVERS[name].tableau
        rows, b = [[], *(row.tolist() for row in tableau.beta)], tableau.c_sol.tolist()
    stages = []
    for row in rows:
        stages.append(1 + z * sum(a * k for a, k in zip(row, stages, strict=False)))
    return 1 + z * sum(w * k for w, k in zip(b, stages, strict=False))


@pytest.mark.parametrize("name", ONE_STEP)
def test_f13_one_real_step_has_the_tableaus_stability_function(close, name):
    z = points().reshape(4, 5)
    found, wanted = stability_function(name, z), from_tableau(name, z)
    assert found.shape == z.shape
    close(torch.view_as_real(found), torch.view_as_real(wanted), 1e-13)


@pytest.mark.parametrize("name", KNOWN)
def test_the_real_limit_is_the_known_one(name):
    assert real_limit(name) == pytest.approx(KNOWN[name], abs=1e-9)


@pytest.mark.parametrize(
    "name", ["explicit_adams", "guarded_euler", "discrete_gradient", "scipy_solver", "none"]
)
def test_methods_without_one_are_refused(name):
    with pytest.raises(ValueError, match="method: expected a one-step method"):
        stability_function(name, points())


def test_z_must_be_complex():
    with pytest.raises(TypeError, match="z: expected a complex128 tensor"):
        stability_function("rk4", torch.ones(2, dtype=torch.float64))
