"""The discrete gradient in activation space: the energy falls for every step size.

A discrete gradient Dbar E(g, g+) is consistent with grad E and satisfies, exactly,

    Dbar E . (g+ - g) = E(g+) - E(g)

so that a step along -Dbar E changes the energy by a product that convexity gives a sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etdyn.interactions import Energy
from etdyn.lagrangians import LayerNorm
from etdyn.solve.implicit import ImplicitStepper, StepEquation
from etdyn.solve.krylov import Image
from etdyn.systems import System

__all__ = ["DiscreteGradient", "discrete_gradient"]

ROUNDINGS = 16  # of the energy, or of what cancels in it, below which a difference is noise


class DiscreteGradient(ImplicitStepper):
    """A step along the mean force q = -Dbar E(g, g+): dissipative for every h > 0, order 2.

        et      x+ = x + h q
        leaky   x+ = x + h (q - (1 - w) X - w x+),   w = h / (2 + h)
                X = (sigma+ x + sigma x+) / (sigma + sigma+), its mean (mean(x) + mean(x+)) / 2
        sphere  x+ = normalise(a x + h q'/gamma),    a = sqrt(1 + z^2) - z
                z = h q.x / (2 gamma D),  q' = q - mean(q)

    Dbar E is Gonzalez' correction of the mean of the two end gradients (`discrete_gradient`),
    rather than of the gradient in the middle: energy and force are then wanted at the same
    point, so that an inner iteration costs one evaluation and not two.

    Law. With dg = g+ - g, E(g+) - E(g) = -q.dg to rounding, and
    - et: q.dg = (x+ - x).dg / h >= 0, since g is the gradient of a convex function.
    - leaky: X.dg = L*(g+) - L*(g): with u = g - delta, L* is a function of |u|^2 alone, whose
      secant times (u + u+) is X up to its mean, and dg has no mean. By convexity x+.dg is no
      less. So V = E + L* has V(g+) - V(g) <= -(x+ - x).dg / h <= 0.
    - sphere: h q'/gamma = b x+ - a x, where b is the length divided out, and a, b > 0, so that
      q.dg is the sum over tokens of (a + b) gamma^2 |x+ - x|^2 / (2 h) >= 0.

    Order 2. Dbar E is symmetric in g and g+, thus a mean force to O(h^2). leaky: X and the part w
    are means to O(h^2) as well; for a linear force the step is the (0, 2) Pade approximant,
    x+ = x / (1 + h + h^2/2), which forgets x as h grows. sphere: x+.x > 0 and the turn is
    tan(theta) = a |P q| h / (gamma |x|), which a = 1 - z + O(z^2) makes that of the spherical
    midpoint to O(h^3). As h grows, all three tend to g+ = the activation of q.

    Existence. q and X are bounded and depend continuously on x+ (eps > 0), so that x+ is a fixed
    point of a continuous map into a ball, and exists for every h (Brouwer). That the inner solver
    finds it is not a theorem: see `StepReport.shrunk`.

    Needs an energy, and under "leaky" a LayerNorm; `TypeError` without.

    Source: A-F8; Gonzalez 1996; McLachlan, Quispel, Robidoux 1999; L* from ET section 1.1.
    """

    name = "discrete_gradient"

    def equation(self, system: System, x: Tensor, h: Tensor) -> StepEquation:
        """See `ImplicitStepper`."""
        g = system.activation(x)
        energy, force = system.potential.energy_and_force(g, relative=True)
        return _EQUATIONS[system.dynamics](system, x, h, force, g, energy)


def discrete_gradient(interaction: Energy, g: Tensor, g_next: Tensor) -> Tensor:
    """Dbar E(g, g+) = (grad E(g) + grad E(g+)) / 2 + c dg,  shape of g. Two evaluations.

        c = (E(g+) - E(g) - (grad E(g) + grad E(g+)).dg / 2) / |dg|^2,  dg = g+ - g

    Per sample, Dbar E . dg = E(g+) - E(g) to rounding of E. Where c is nothing but such rounding
    (dg -> 0) it is zero. Source: Gonzalez 1996, with the mean of the end gradients as its base.
    """
    energies, forces = zip(
        *(interaction.energy_and_force(p, relative=True) for p in (g, g_next)), strict=True
    )
    return -_secant(energies, forces, g, g_next)[0]


def _secant(
    energies: tuple[Tensor, Tensor], forces: tuple[Tensor, Tensor], g: Tensor, g_next: Tensor
) -> tuple[Tensor, Tensor]:
    """-Dbar E, and its c `(batch,)`."""
    dg = g_next - g
    mean = 0.5 * (forces[0] + forces[1])
    gap = energies[1] - energies[0] + _dot(mean, dg)
    info = torch.finfo(gap.dtype)
    # continuous, where dropping small gaps would make the inner iteration jump
    size = (forces[0] * g).abs().sum((1, 2))  # of what may cancel in E
    size = torch.stack([energies[0].abs(), energies[1].abs(), size]).amax(0)
    noise = ROUNDINGS * info.eps * size
    gap = gap.sign() * (gap.abs() - noise).clamp(min=0)
    c = gap / _dot(dg, dg).clamp(min=info.tiny)
    return mean - c[:, None, None] * dg, c


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum((1, 2))


@dataclass(frozen=True)
class _Published(StepEquation):
    g: Tensor
    energy: Tensor

    def end(self, q: Tensor) -> Tensor:
        return self.x + self.step * q

    def activation_derivative(self, q: Tensor, end: Tensor, v: Tensor) -> Tensor:
        """dg(x+)/dq v."""
        return self.metric(end, self.step * v)

    def image(self, q: Tensor) -> Image:
        end = self.end(q)
        g = self.system.activation(end)
        energy, force = self.system.potential.energy_and_force(g, relative=True)
        value, c = _secant((self.energy, energy), (self.force, force), self.g, g)
        return _Image(value, self, q, end, g, force, c)


@dataclass(frozen=True)
class _Image(Image):
    equation: _Published
    q: Tensor
    end: Tensor
    g: Tensor
    force: Tensor
    c: Tensor

    def derivative(self, v: Tensor) -> Tensor:
        start, dg = self.equation, self.g - self.equation.g
        u = start.activation_derivative(self.q, self.end, v)
        hu = start.system.potential.hvp(self.g, u)
        d_gap = 0.5 * (_dot(start.force - self.force, u) - _dot(hu, dg))
        size = _dot(dg, dg).clamp(min=torch.finfo(v.dtype).tiny)
        d_c = torch.where(self.c == 0, 0, (d_gap - 2 * self.c * _dot(dg, u)) / size)
        return -0.5 * hu - self.c[:, None, None] * u - d_c[:, None, None] * dg


@dataclass(frozen=True)
class _Leaky(_Published):
    """With s = sigma+, y+ = (a + b s) / (c + s): one unknown per token is left."""

    @property
    def lagrangian(self) -> LayerNorm:
        return self.system.layer_norm

    @property
    def weights(self) -> tuple[Tensor, Tensor]:
        """h (1 - w) and 1 + h w."""
        h = self.step
        return 2 * h / (2 + h), 1 + h * h / (2 + h)

    @property
    def sigma(self) -> Tensor:
        return self.lagrangian.sigma(self.x).unsqueeze(-1)

    def end(self, q: Tensor) -> Tensor:
        lagrangian, sigma, h = self.lagrangian, self.sigma, self.step
        mean, late = self.weights
        y = lagrangian.centre(self.x)
        push = y + h * lagrangian.centre(q)
        a, b, c = sigma * push / late, (push - mean * y) / late, sigma * (1 + mean / late)
        s = _solve_sigma(a, b, c, sigma, lagrangian.eps)
        level, pull = ((v - lagrangian.centre(v)) for v in (self.x, q))
        level = ((1 - mean / 2) * level + h * pull) / (late + mean / 2)
        return self.x + self.system.keep((a + b * s) / (c + s) + level - self.x)

    def activation_derivative(self, q: Tensor, end: Tensor, v: Tensor) -> Tensor:
        """The equation differentiated: alpha v+ + beta (y+.v+) = h v, solved for v+."""
        lagrangian, sigma = self.lagrangian, self.sigma
        y, y_end = lagrangian.centre(self.x), lagrangian.centre(end)
        s = lagrangian.sigma(end).unsqueeze(-1)
        mean, late = self.weights
        alpha = late + mean * sigma / (sigma + s)
        beta = mean * sigma * (y - y_end) / (sigma + s).square() / (lagrangian.dim * s)
        hv = self.step * lagrangian.centre(v)
        along = (y_end * hv).sum(-1, keepdim=True)
        along = along / (alpha + (y_end * beta).sum(-1, keepdim=True))
        return self.metric(end, (hv - beta * along) / alpha)


def _solve_sigma(a: Tensor, b: Tensor, c: Tensor, guess: Tensor, eps: float) -> Tensor:
    """s > 0 with s^2 = |a + b s|^2 / (D (c + s)^2) + eps, per token: Newton in a bracket.

    (a + b s) / (c + s) runs from a/c to b on a straight line, so the longer of the two bounds s.
    """
    aa, ab, bb = ((u * v).mean(-1, keepdim=True) for u, v in ((a, a), (a, b), (b, b)))
    low = torch.full_like(c, eps).sqrt()
    high = (torch.maximum(aa / c.square(), bb) + eps).sqrt()
    s = guess.maximum(low).minimum(high)
    for _ in range(100):
        square, scale = aa + s * (2 * ab + bb * s), c + s
        value = square / scale.square() + eps - s * s
        slope = 2 * ((ab + bb * s) / scale.square() - square / scale.pow(3) - s)
        low, high = torch.where(value > 0, s, low), torch.where(value > 0, high, s)
        new = s - value / slope
        new = torch.where((new >= low) & (new <= high), new, 0.5 * (low + high))
        still = (new - s).abs() <= 2 * torch.finfo(s.dtype).eps * s
        s = new
        if bool(still.all()):
            break
    return s


@dataclass(frozen=True)
class _Sphere(_Published):
    def _lift(self, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """a x + h q'/gamma, a, and sqrt(1 + z^2)."""
        lagrangian = self.system.layer_norm
        push = self.step / lagrangian.gamma * lagrangian.centre(q)
        z = 0.5 * (push * self.x).mean(-1, keepdim=True)
        root = (1 + z * z).sqrt()
        a = torch.where(z > 0, 1 / (root + z), root - z)  # without cancellation
        return a * self.x + push, a, root

    def end(self, q: Tensor) -> Tensor:
        lift, _, _ = self._lift(q)
        return lift / lift.square().mean(-1, keepdim=True).sqrt()

    def activation_derivative(self, q: Tensor, end: Tensor, v: Tensor) -> Tensor:
        lift, a, root = self._lift(q)
        lagrangian = self.system.layer_norm
        push = self.step / lagrangian.gamma * lagrangian.centre(v)
        d_a = -a / root * 0.5 * (push * self.x).mean(-1, keepdim=True)
        return self.metric(lift, d_a * self.x + push)


_EQUATIONS: dict[str, type[_Published]] = {
    "et": _Published, "leaky": _Leaky, "sphere": _Sphere,
}  # fmt: skip
