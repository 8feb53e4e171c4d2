"""Systems whose motion is known exactly: what solvers are tested and taught on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_finite, check_positive, check_tensor
from etdyn.energies import Energy, Hopfield
from etdyn.lagrangians import LayerNorm
from etdyn.systems import System

__all__ = ["LinearEnergy", "Problem", "linear", "single_memory"]


@dataclass(frozen=True)
class Problem:
    """A system, a start and the exact motion from there.

    Attributes:
        system: under the published dynamics, in float64.
        start: `(batch, token, feature)`, the state at t = 0.
        exact: t >= 0 -> the state at t, shape of `start`.
    """

    system: System
    start: Tensor
    exact: Callable[[float], Tensor]


class LinearEnergy(Energy):
    """E = -sum v.g: the same force v whatever the state (ET-F15).

    Args:
        v: the force, `(token, feature)` or `(1, feature)` for every token alike; the parameter.
    """

    name = "linear"

    def __init__(self, v: Tensor) -> None:
        super().__init__()
        if v.ndim != 2:
            raise bad("v", "shape (token, feature)", f"shape {tuple(v.shape)}")
        self.v = nn.Parameter(v.detach().clone())
        self._tokens: Tensor | None = None

    def _set_masks(self, tokens: Tensor | None, keys: Tensor | None) -> None:
        self._tokens = tokens

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """-sum v.g `(batch,)` and v; without weights the energy is zero, so `relative` is idle."""
        force = self.v.expand_as(g)
        if self._tokens is not None:
            force = force.masked_fill(~self._tokens.unsqueeze(-1), 0.0)
        return -(force * g).sum((1, 2)), force

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(u)


def linear(v: Tensor, start: Tensor) -> Problem:
    """Constant force: x(t) = start + v t, which every solver meets to rounding (ET-F15).

    Args:
        v: float64 `(token, feature)`, finite.
        start: float64 `(batch, token, feature)`.

    Raises:
        ValueError, TypeError: wrong shapes or dtypes, NaN or infinity.
    """
    energy = LinearEnergy(v)
    lagrangian = LayerNorm(v.shape[1]).double()
    check_tensor("v", v, (None, None), lagrangian.delta)
    check_tensor("start", start, (None, *v.shape), lagrangian.delta)
    check_finite("v", v.unsqueeze(0))
    check_finite("start", start)
    return Problem(System(lagrangian, energy), start, lambda t: start + v * t)


def single_memory(
    dim: int = 8,
    *,
    overlap: float = 0.1,
    offset: float = 1.0,
    strength: float = 1.0,
    gamma: float = 1.0,
    eps: float = 1e-5,
) -> Problem:
    """One token that turns to one memory xi, orthogonal to the vector of ones (ET-F14).

    The state is x = a xi/|xi| + b e with e a unit vector orthogonal to xi and to the ones. Its
    part b stays, and with k^2 = b^2 + D eps and R = gamma sqrt(D)

        da/dt = R |xi|^2 a / sqrt(a^2 + k^2)
        sqrt(a^2 + k^2) - k asinh(k / a) = R |xi|^2 t + const

    is inverted for a in float64. The angle to xi falls as b / (R |xi|^2 t).

    Args:
        dim: D >= 3.
        overlap, offset: a > 0 at the start, and b >= 0.
        strength: |xi| > 0.
        gamma, eps: of the layer norm, > 0 and >= 0; delta is zero.

    Returns:
        Problem with one sample of one token, `(1, 1, dim)`.

    Raises:
        ValueError, TypeError: an argument out of range; `exact` at t < 0.

    Source: ET spec, fact F14; interaction of Hoover et al. 2023, equation 5 with M = 1.
    """
    check_count("dim", dim, least=3)
    check_positive("overlap", overlap)
    check_positive("offset", offset, zero=True)
    check_positive("strength", strength)
    lagrangian = LayerNorm(dim, eps).double()
    lagrangian.set_gamma(gamma)
    # the first two vectors of the Helmert basis: zero sum, unit length, orthogonal
    xi, e = torch.zeros(2, dim, dtype=torch.float64)
    xi[:2] = torch.tensor([1.0, -1.0], dtype=torch.float64) / math.sqrt(2)
    e[:3] = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64) / math.sqrt(6)
    network = Hopfield(dim, memories=1, kind="relu").double()
    with torch.no_grad():
        network.memories.copy_(strength * xi)
    k = math.hypot(offset, math.sqrt(dim * eps))
    rate = gamma * math.sqrt(dim) * strength**2

    def clock(a: float) -> float:
        return math.hypot(a, k) - k * math.asinh(k / a)

    def exact(t: float) -> Tensor:
        check_positive("t", t, zero=True)
        target = clock(overlap) + rate * t
        far = overlap + rate * t  # da/dt <= rate
        bracket = overlap, far * (1 + 1e-12)
        a = brentq(lambda a: clock(a) - target, *bracket, xtol=1e-15 * overlap, rtol=1e-15)
        state: Tensor = a * xi + offset * e
        return state.reshape(1, 1, dim)

    return Problem(System(lagrangian, network), exact(0.0), exact)
