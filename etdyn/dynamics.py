"""The laws of motion of a token configuration: what each adds to the pair (Lagrangian, force).

A dynamics has no parameters. It says how x becomes g, what the velocity is, which energy falls
and how fast, and in which clock. `System` passes it the Lagrangian and the interaction.
"""

from abc import ABC, abstractmethod
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from etdyn.lagrangians import Lagrangian, LayerNorm

__all__ = ["DYNAMICS", "Dynamics"]

L = TypeVar("L", bound=Lagrangian)


class Dynamics(ABC, Generic[L]):
    """One law of motion; states and forces are `(batch, token, feature)`."""

    name: str

    def activation(self, lagrangian: L, x: Tensor) -> Tensor:
        """g of the state x."""
        return lagrangian.activation(x)

    def prepare(self, lagrangian: L, x: Tensor) -> Tensor:
        """Bring a start, or the result of a discrete step, onto the state space."""
        return x

    def target(self, lagrangian: L, x: Tensor, force: Tensor) -> Tensor:
        """Where the self-consistency map sends x: the force."""
        return force

    def neuron_energy(self, lagrangian: L, x: Tensor) -> Tensor | None:
        """What the Lyapunov function has beyond E(g), `(batch, token)`; None: nothing."""
        return None

    def clock_rate(self, lagrangian: L, x: Tensor) -> Tensor:
        """dtau/dt of the intrinsic clock, `(batch, token)`."""
        return lagrangian.clock_rate(x)

    def elapsed_clock(self, lagrangian: L, x0: Tensor, x1: Tensor, dt: Tensor | float) -> Tensor:
        """tau of a straight step from x0 to x1 that takes dt, `(batch, token)`."""
        return lagrangian.elapsed_clock(x0, x1, dt)

    def imbalance(self, lagrangian: L, x: Tensor, force: Tensor) -> Tensor:
        """What vanishes at equilibrium and nowhere else, shape of x."""
        return lagrangian.tangent(x, force)

    @abstractmethod
    def velocity(self, lagrangian: L, x: Tensor, force: Tensor) -> Tensor:
        """dx/dt, given force = -grad_g E at g(x)."""

    def activation_velocity(self, lagrangian: L, x: Tensor, v: Tensor) -> Tensor:
        """dg/dt = M v of the velocity v."""
        return lagrangian.metric(x, v)

    def dissipation(self, lagrangian: L, x: Tensor, force: Tensor) -> Tensor:
        """Exact -d(energy)/dt = v.Mv, `(batch,)`."""
        v = self.velocity(lagrangian, x, force)
        return (v * lagrangian.metric(x, v)).sum((1, 2))


class Published(Dynamics[Lagrangian]):
    """dx/dt = -grad_g E(g(x)), Hoover et al. 2023, equation 1.

    dE/dt = -f.Mf (ET-F11). There is no fixed point in x: tokens drift while g converges.
    """

    name = "et"

    def velocity(self, lagrangian: Lagrangian, x: Tensor, force: Tensor) -> Tensor:
        """The force."""
        return force


class Leaky(Dynamics[Lagrangian]):
    """dx/dt = -x - grad_g E(g(x)), the hierarchical associative memory (ET-F30).

    The Lyapunov function is E + sum(x.g - L), and its slope -v.Mv. Euler with step 1 is the
    self-consistency map x -> force(x).
    """

    name = "leaky"

    def velocity(self, lagrangian: Lagrangian, x: Tensor, force: Tensor) -> Tensor:
        """Force minus x."""
        return force - x

    def imbalance(self, lagrangian: Lagrangian, x: Tensor, force: Tensor) -> Tensor:
        """P (force - x)."""
        return lagrangian.imbalance(x, force)

    def neuron_energy(self, lagrangian: Lagrangian, x: Tensor) -> Tensor | None:
        """x.g - L."""
        return lagrangian.legendre(x)


class Sphere(Dynamics[LayerNorm]):
    """dg/dtau = -P grad_g E(g): gradient descent on a product of spheres, in its own clock.

    The state x has mean 0 and standard deviation 1 and carries g = gamma x + delta; between
    steps any positive scale and any mean mean the same (ET section 1.5, A-F5).
    """

    name = "sphere"

    @staticmethod
    def _std(lagrangian: LayerNorm, x: Tensor) -> Tensor:
        return lagrangian.centre(x).square().mean(-1, keepdim=True).sqrt()

    def activation(self, lagrangian: LayerNorm, x: Tensor) -> Tensor:
        """g = gamma (x - mean) / std + delta, without eps."""
        y = lagrangian.centre(x)
        return lagrangian.gamma * (y / self._std(lagrangian, x)) + lagrangian.delta

    def prepare(self, lagrangian: LayerNorm, x: Tensor) -> Tensor:
        """x at mean 0 and standard deviation 1; a constant token raises `ValueError`."""
        return lagrangian.normalise(x)

    def target(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """The direction of the force; a token that no force turns stays."""
        return lagrangian.normalise(torch.where(lagrangian.flat(force), x, force))

    def clock_rate(self, lagrangian: LayerNorm, x: Tensor) -> Tensor:
        """One."""
        return torch.ones_like(x[..., 0])

    def elapsed_clock(
        self, lagrangian: LayerNorm, x0: Tensor, x1: Tensor, dt: Tensor | float
    ) -> Tensor:
        """dt."""
        return torch.ones_like(x0[..., 0]) * dt

    def velocity(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """(std/gamma) P force, so that g moves by P force."""
        return self._std(lagrangian, x) / lagrangian.gamma * lagrangian.tangent(x, force)

    def activation_velocity(self, lagrangian: LayerNorm, x: Tensor, v: Tensor) -> Tensor:
        """(gamma/std) P v."""
        return lagrangian.gamma / self._std(lagrangian, x) * lagrangian.tangent(x, v)

    def dissipation(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """|P force|^2, `(batch,)`."""
        return lagrangian.tangent(x, force).square().sum((1, 2))


DYNAMICS: dict[str, Dynamics[Any]] = {d.name: d for d in (Published(), Leaky(), Sphere())}
