"""The stability functions of one-step methods, measured on the code that runs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from etdyn.checks import bad
from etdyn.couplings import Coupling
from etdyn.lagrangians import Quadratic
from etdyn.solve.flow import solve
from etdyn.solve.implicit import MatrixFreeMidpoint
from etdyn.solve.methods import STEPPERS, Method, available_methods
from etdyn.solve.solution import Status
from etdyn.systems import System

__all__ = ["real_limit", "stability_function"]

ANY_STEP = 1e9  # tolerance under which an adaptive method takes the step it is given
COARSE, LONGEST = 0.01, 100.0  # spacing and end of the search for the real limit
ROUNDING = 1e-12


class _TestEquation(Coupling):
    """x' = z x with complex x and z, as the features (Re x, Im x, Re z, Im z) of one token.

    z rides along in the state, where nothing moves it, so that every sample has its own.
    """

    name = "test_equation"

    def force(self, g: Tensor) -> Tensor:
        """(Re zx, Im zx, 0, 0)."""
        return _product(g, g)

    def force_jvp(self, g: Tensor, u: Tensor) -> Tensor:
        """(Re d(zx), Im d(zx), 0, 0)."""
        return _product(g, u) + _product(u, g)


def _product(z: Tensor, x: Tensor) -> Tensor:
    re, im, a, b = x[..., 0], x[..., 1], z[..., 2], z[..., 3]
    none = torch.zeros_like(re)
    return torch.stack([a * re - b * im, b * re + a * im, none, none], -1)


@torch.no_grad()
def stability_function(method: str, z: Tensor) -> Tensor:
    """R(z): by what one step of size 1 multiplies x of x' = z x; measured in one real step.

    |R(h lambda)| <= 1 says that steps of h keep a mode with the eigenvalue lambda of the flow's
    Jacobian. Flows with an energy have real ones (ET-F12).

    Args:
        method: a one-step method of `solve` by name. Of an embedded pair the step is meant that
            the integration goes on with.
        z: complex128, any shape.

    Returns:
        complex128, shape of z; NaN where an implicit step could not be solved.

    Raises:
        ValueError: a method without R: multistep, noisy, guarded by an energy (those step as Euler
            or not at all), or scipy's; the discrete gradient, which needs an energy and so a
            real z (there, where the energy is a parabola, it is the implicit midpoint rule).
        TypeError: z is not complex128.

    Source: Hairer, Wanner, Solving ODEs II, IV.2; anchors F13.
    """
    if not isinstance(z, Tensor) or z.dtype != torch.complex128:
        raise TypeError(f"z: expected a complex128 tensor, got {getattr(z, 'dtype', type(z))}")
    chosen = _one_step(method)
    flat = z.flatten()
    one, none = torch.ones_like(flat.real), torch.zeros_like(flat.real)
    x = torch.stack([one, none, flat.real, flat.imag], -1).unsqueeze(1)
    system = System(Quadratic(4).double(), _TestEquation()).to(z.device)
    found = solve(system, x, [0.0, 1.0], chosen, gradient=None, max_steps=len(x) + 1, throw=False)
    end = found.x_end[:, 0].masked_fill((found.status != Status.FINISHED)[:, None], torch.nan)
    return torch.complex(end[:, 0], end[:, 1]).reshape(z.shape)


def _one_step(name: str) -> Method:
    """The method as it takes one step of size 1, whatever its error."""
    without = {*STEPPERS, "mirror_langevin", "scipy_solver"} - {MatrixFreeMidpoint.name}
    if name not in available_methods() or name in without:
        offered = [n for n in available_methods() if n not in without and "adams" not in n]
        raise bad("method", "a one-step method with an R(z): " + ", ".join(offered), repr(name))
    if name in available_methods(True):
        chosen = Method(name, step=1.0)
        if chosen.multistep:
            raise bad("method", "a one-step method: R(z) is of one step", repr(name))
        return chosen
    return Method(name, rtol=ANY_STEP, options={"first_step": 1.0})


def real_limit(method: str) -> float:
    """The largest r such that |R(-s)| <= 1 for all 0 < s <= r, to 1e-12; infinite beyond 100.

    Where Euler is limited to 2 / lambda_max, this method is to r / lambda_max, as the Jacobian of
    a flow with an energy has real eigenvalues (ET-F12).

    Args:
        method: as in `stability_function`.
    """

    def grows(s: Tensor) -> Tensor:
        z = torch.complex(-s, torch.zeros_like(s))
        return stability_function(method, z).abs() > 1 + ROUNDING

    grid = torch.arange(1, round(LONGEST / COARSE) + 1, dtype=torch.float64) * COARSE
    beyond = grid[grows(grid)]
    if not len(beyond):
        return math.inf
    high, low = beyond[:1], beyond[:1] - COARSE
    while float(high - low) > ROUNDING * float(high):
        middle = (low + high) / 2
        low, high = (low, middle) if bool(grows(middle)) else (middle, high)
    return float(high)
