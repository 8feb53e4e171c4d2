"""The laws of motion of a token configuration: what each adds to the pair (Lagrangian, force).

A dynamics has no parameters. It says how x becomes g, what the velocity is, which energy falls
and how fast, and in which clock. `System` passes it the Lagrangian and the interaction.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from etdyn.lagrangians import LayerNorm

__all__ = ["DYNAMICS", "Dynamics"]


class Dynamics(ABC):
    """One law of motion; states and forces are `(batch, token, feature)`."""

    name: str

    def activation(self, lagrangian: LayerNorm, x: Tensor) -> Tensor:
        """g of the state x."""
        return lagrangian.activation(x)

    def prepare(self, lagrangian: LayerNorm, x: Tensor) -> Tensor:
        """Bring a start, or the result of a discrete step, onto the state space."""
        return x

    def target(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """Where the self-consistency map sends x: the force."""
        return force

    def neuron_energy(self, lagrangian: LayerNorm, x: Tensor) -> Tensor | None:
        """What the Lyapunov function has beyond E(g), `(batch, token)`; None: nothing."""
        return None

    def clock_rate(self, lagrangian: LayerNorm, x: Tensor) -> Tensor:
        """dtau/dt = gamma/sigma, `(batch, token)`: tau is the clock of the sphere dynamics."""
        return lagrangian.gamma / lagrangian.sigma(x)

    def elapsed_clock(
        self, lagrangian: LayerNorm, x0: Tensor, x1: Tensor, dt: Tensor | float
    ) -> Tensor:
        """tau of a straight step from x0 to x1 that takes dt, exactly, `(batch, token)`.

        Along it sigma^2 = A s^2 + 2 B s + sigma_0^2 in the share s of the step, so that
        tau = gamma dt log(1 + (sqrt(A) (sigma_1 - sigma_0) + A) / (sqrt(A) sigma_0 + B)) / sqrt(A).
        """
        y0, dy = lagrangian.centre(x0), lagrangian.centre(x1 - x0)
        sigma0, sigma1 = lagrangian.sigma(x0), lagrangian.sigma(x1)
        root = dy.square().mean(-1).sqrt()
        tiny = 1e-6 * sigma0  # so small a step leaves sigma as it is
        a = root.maximum(tiny)
        b = (y0 * dy).mean(-1)
        moving = torch.log1p((a * (sigma1 - sigma0) + a * a) / (a * sigma0 + b)) / a
        share = torch.where(root > tiny, moving, 2 / (sigma0 + sigma1))
        return lagrangian.gamma * dt * share

    @abstractmethod
    def velocity(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """dx/dt, given force = -grad_g E at g(x)."""

    def activation_velocity(self, lagrangian: LayerNorm, x: Tensor, v: Tensor) -> Tensor:
        """dg/dt = M v of the velocity v."""
        return lagrangian.metric(x, v)

    def dissipation(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """Exact -d(energy)/dt = v.Mv, `(batch,)`."""
        v = self.velocity(lagrangian, x, force)
        return (v * lagrangian.metric(x, v)).sum((1, 2))


class Published(Dynamics):
    """dx/dt = -grad_g E(g(x)), Hoover et al. 2023, equation 1.

    dE/dt = -f.Mf (ET-F11). There is no fixed point in x: tokens drift while g converges.
    """

    name = "et"

    def velocity(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """The force."""
        return force


class Leaky(Dynamics):
    """dx/dt = -x - grad_g E(g(x)), the hierarchical associative memory (ET-F30).

    The Lyapunov function is E + sum(x.g - L), and its slope -v.Mv. Euler with step 1 is the
    self-consistency map x -> force(x).
    """

    name = "leaky"

    def velocity(self, lagrangian: LayerNorm, x: Tensor, force: Tensor) -> Tensor:
        """Force minus x."""
        return force - x

    def neuron_energy(self, lagrangian: LayerNorm, x: Tensor) -> Tensor | None:
        """x.g - L."""
        return lagrangian.legendre(x)


class Sphere(Dynamics):
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


DYNAMICS: dict[str, Dynamics] = {d.name: d for d in (Published(), Leaky(), Sphere())}
