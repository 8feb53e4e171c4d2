"""Systems whose motion is known exactly: what solvers are tested and taught on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from scipy.optimize import brentq
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_finite, check_positive, check_tensor
from etdyn.couplings import LinearCoupling
from etdyn.energies import Attention, Hopfield
from etdyn.interactions import Energy
from etdyn.lagrangians import IsingSpin, LayerNorm, Quadratic
from etdyn.systems import System

__all__ = [
    "KnownEquilibria",
    "LinearEnergy",
    "Problem",
    "QuadraticEnergy",
    "anisotropic_well",
    "curie_weiss",
    "linear",
    "linear_flow",
    "single_memory",
    "two_tokens",
]


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


@dataclass(frozen=True)
class KnownEquilibria:
    """A system whose equilibria are known, with what is exact about each.

    Attributes:
        system: in float64.
        states: `(equilibrium, token, feature)`, by rising energy.
        energies: `(equilibrium,)`, E there.
        exponents: `(equilibrium, mode)`, ascending: minus the eigenvalues of the flow's Jacobian
            on the directions that g can follow; a negative one is an unstable direction.
    """

    system: System
    states: Tensor
    energies: Tensor
    exponents: Tensor


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

    def curvature_bound(self, tokens: int) -> float:
        """Zero."""
        return 0.0

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """-sum v.g `(batch,)` and v; without weights the energy is zero, so `relative` is idle."""
        force = self.keep(self.v.expand_as(g))
        return -(force * g).sum((1, 2)), force

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(u)


class QuadraticEnergy(Energy):
    """E = 1/2 g.A g over all tokens and features, A symmetric.

    Args:
        matrix: A, floating `(token, feature, token, feature)`; the parameter `matrix`. Masks of
            pairs are ignored, those of tokens are not.

    Raises:
        ValueError: not symmetric.
    """

    name = "quadratic"

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        if matrix.ndim != 4 or not torch.equal(matrix, matrix.permute(2, 3, 0, 1)):
            raise bad("matrix", "a symmetric (token, feature, token, feature) tensor",
                      f"shape {tuple(matrix.shape)}")  # fmt: skip
        self.matrix = nn.Parameter(matrix.detach().clone())

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """1/2 g.A g `(batch,)` and -A g."""
        force = -self.hvp(g, g)
        return -(force * g).sum((1, 2)) / 2, force

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """A u; the symmetric part of A, to which its gradient keeps."""
        a = (self.matrix + self.matrix.permute(2, 3, 0, 1)) / 2
        return self.keep(torch.einsum("iajb,njb->nia", a, self.keep(u)))


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


def anisotropic_well(rates: Tensor, start: Tensor) -> Problem:
    """Independent directions, each with its own rate: E = 1/2 sum rates x^2, g = x.

    x(t) = exp(-rates t) start; the exponents are the rates, of either sign.

    Args:
        rates: float64 `(token, feature)`.
        start: float64 `(batch, token, feature)`.
    """
    energy = QuadraticEnergy(torch.diag(rates.flatten()).reshape(*rates.shape, *rates.shape))
    system = System(Quadratic(rates.shape[1]).double(), energy)
    system.check(start, "start")
    return Problem(system, start, lambda t: torch.exp(-rates * t) * start)


def linear_flow(couplings: Tensor, start: Tensor) -> Problem:
    """dx/dt = (J - 1) x without an energy, with the exact x(t) = expm((J - 1) t) start.

    Args:
        couplings: J, float64 `(token, token)`; its eigenvalues minus one are those of the flow.
        start: float64 `(batch, token, feature)`.
    """
    system = System(Quadratic(start.shape[2]).double(), LinearCoupling(couplings), "leaky")
    system.check(start, "start")
    leaky = couplings - torch.eye(len(couplings), dtype=couplings.dtype)
    return Problem(system, start, lambda t: torch.matrix_exp(leaky * t) @ start)


def curie_weiss(spins: int, beta: float) -> KnownEquilibria:
    """Ising spins that all pull on each other: dx/dt = m - x, m the mean of tanh(beta x).

    E = -N m^2 / 2. Equilibria are x = m = tanh(beta m): 0, and for beta > 1 a pair +-m (S-B6).
    Exponents: 1 - beta (1 - m^2) for the common mode, and N - 1 times 1.

    Args:
        spins: N >= 2.
        beta: inverse temperature > 0; the critical one is 1.
    """
    check_count("spins", spins, least=2)
    check_positive("beta", beta)
    matrix = torch.full((spins, 1, spins, 1), -1 / spins, dtype=torch.float64)
    system = System(IsingSpin(1, beta).double(), QuadraticEnergy(matrix), "leaky")
    means = [0.0]
    if beta > 1:
        # the root lies above the expansion's, m^2 < 3 (beta - 1) / beta^3
        low = 0.5 * min(1.0, math.sqrt(3 * (beta - 1) / beta**3))
        m = brentq(lambda m: math.tanh(beta * m) - m, low, 1.0, xtol=1e-15, rtol=1e-15)
        means = [m, -m, 0.0]
    m = torch.tensor(means, dtype=torch.float64)
    exponents = torch.ones(len(m), spins, dtype=torch.float64)
    exponents[:, 0] -= beta * (1 - m.square())
    states = m[:, None, None].expand(-1, spins, 1).clone()
    return KnownEquilibria(system, states, -spins * m.square() / 2, exponents.sort(1).values)


def two_tokens(strengths: Tensor, dynamics: str = "sphere", gamma: float = 1.0) -> KnownEquilibria:
    """Two tokens that attend to each other: E = -g1.B g2, exactly (ET-F7), B positive.

    B = sum_k b_k u_k u_k^T with orthonormal u_k of zero sum. Equilibria are g1 = g2 = R u_k, and
    their mirror images, with E = -b_k R^2: the strongest is the minimum, the k-th strongest a
    saddle of index k - 1. Over j != k the exponents are

        sphere  b_k -+ b_j             leaky (eps 0)  1 -+ b_j / b_k

    Args:
        strengths: b, float64 `(D - 1,)`, positive and distinct, D >= 3.
        dynamics: "sphere", "leaky", or "et", which has the leaky exponents in log t.
        gamma: of the layer norm; R = gamma sqrt(D).
    """
    dim, order = len(strengths) + 1, strengths.argsort(descending=True)
    check_count("dim", dim, least=3)
    basis = torch.zeros(dim - 1, dim, dtype=torch.float64)  # Helmert's
    for k in range(1, dim):
        basis[k - 1, :k], basis[k - 1, k] = 1.0, -float(k)
        basis[k - 1] /= math.sqrt(k * (k + 1))
    attention = Attention(dim, heads=1, head_dim=dim - 1).double()
    with torch.no_grad():
        for weight in (attention.query, attention.key):
            weight.copy_((strengths / 2).sqrt()[:, None] * basis)
    lagrangian = LayerNorm(dim, eps=0.0).double()
    lagrangian.set_gamma(gamma)
    b, u = strengths[order], basis[order]
    others = torch.stack([torch.cat([b[:k], b[k + 1 :]]) for k in range(len(b))])
    exponents = torch.cat([b[:, None] - others, b[:, None] + others], 1).sort(1).values
    if dynamics != "sphere":
        exponents = exponents / b[:, None]
    radius = gamma * math.sqrt(dim)
    scale = math.sqrt(dim) if dynamics == "sphere" else radius * b[:, None]
    states = (scale * u)[:, None, :].repeat(1, 2, 1)
    system = System(lagrangian, attention, dynamics)
    return KnownEquilibria(system, states, -b * radius**2, exponents)
