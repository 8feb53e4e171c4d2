"""Implicit steps without a matrix: what they share, and the implicit midpoint rule.

Every scheme here is written for the mean force q of a step: a closed form says where q takes the
state, and the scheme says which force the state would then have felt. q stays bounded for every
step size, which x+ does not, so the same tolerance and the same guesses serve h = 1e-3 and 1e3.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from etdyn.checks import check_count, check_positive
from etdyn.lagrangians import Lagrangian
from etdyn.solve.inner import Equation, Found, fixed_point
from etdyn.solve.krylov import Image
from etdyn.solve.steppers import Stepper, StepReport, settle
from etdyn.systems import System

__all__ = ["ImplicitStepper", "MatrixFreeMidpoint", "StepEquation"]


@dataclass(frozen=True)
class StepEquation(Equation):
    """The equation q = Q(q) of one implicit step of h `(batch,)` from x.

    `force` is -grad_g E at x, the first guess of the mean force q.
    """

    system: System
    x: Tensor
    h: Tensor
    force: Tensor

    @abstractmethod
    def end(self, q: Tensor) -> Tensor:
        """x+ under the mean force q."""

    def felt(self, q: Tensor) -> Tensor:
        """The state other than x whose force is in Q(q)."""
        return self.end(q)

    def with_step(self, h: Tensor) -> Self:
        """The same start with another step."""
        return replace(self, h=h)

    @property
    def scale(self) -> Tensor:
        """|force|, which a reversed force may cancel in the mean."""
        return self.force.flatten(1).square().sum(1).sqrt()

    @cached_property
    def curvature(self) -> Tensor:
        """h+ of the interaction, `(batch, 1, 1)`."""
        bound = self.system.interaction.curvature_bound(self.x.shape[1])
        bound = torch.as_tensor(bound, dtype=self.x.dtype, device=self.x.device)
        return bound.expand(len(self.x))[:, None, None]

    def relaxation(self, q: Tensor) -> Tensor:
        """1 / (1 + h h+ gamma / (2 sigma)), or a quarter where h+ is not known.

        The force is felt where `felt` says. There g follows q at the rate h gamma / (2 sigma) in
        the midpoint rule; in the discrete gradient it is twice the rate and half the force. So in
        directions in which E curves upwards, Q' lies between 0 and -h h+ gamma / (2 sigma).
        """
        rate = self.system._law.clock_rate(self.lagrangian, self.felt(q)).unsqueeze(-1)
        known = 1 / (1 + 0.5 * self.curvature * self.step * rate)
        return torch.where(self.curvature.isinf(), 0.25, known)

    @property
    def lagrangian(self) -> Lagrangian:
        """Of the system."""
        return self.system.lagrangian

    def metric(self, x: Tensor, v: Tensor) -> Tensor:
        """dg where x moves by v."""
        return self.system._law.activation_velocity(self.lagrangian, x, v)

    @property
    def step(self) -> Tensor:
        """h as it multiplies states."""
        return self.h[:, None, None]


class ImplicitStepper(Stepper, ABC):
    """A step that solves an equation; where that fails, the step is halved.

    The inner solve is Picard iteration with Anderson mixing while the residual falls, the same
    with shorter steps where that stalls, and Newton-Krylov last. If all fail, the step is solved
    with h/2, whose mean force is the guess for another attempt at h; only if that fails too is
    h/2 what is taken.

    Not differentiable: the result keeps no graph.

    Args:
        tol: of the inner residual, relative to the larger of the mean force and the force at x;
            None is 256 roundings of the dtype (6e-14 in float64).
        halvings: how often a step may be halved before it fails.
    """

    def __init__(self, tol: float | None = None, halvings: int = 20) -> None:
        if tol is not None:
            check_positive("tol", tol)
        check_count("halvings", halvings, least=0)
        self.tol, self.halvings = tol, halvings

    @abstractmethod
    def equation(self, system: System, x: Tensor, h: Tensor) -> StepEquation:
        """The equation of a step. One evaluation."""

    @torch.no_grad()
    def step(self, system: System, x: Tensor, h: Tensor) -> StepReport:
        """See `Stepper`."""
        self.check(system, x, h)
        start, x = x, system.prepare(system._stand_in(x))
        tol = 256 * torch.finfo(x.dtype).eps if self.tol is None else self.tol
        equation = self.equation(system, x, h)
        found, taken = self._solve(equation, equation.force, tol, self.halvings)
        moved = system.prepare(equation.with_step(taken).end(found.q))
        good = found.converged & torch.isfinite(moved).flatten(1).all(1)
        return StepReport(
            x=settle(system, good, moved, start),
            taken=torch.where(good, taken, 0),
            evaluations=found.evaluations + 1,
            shrunk=good & (taken < h),
            failed=~good,
            inner_residual=found.residual,
            inner_method=found.method,
        )

    def _solve(
        self, equation: StepEquation, guess: Tensor, tol: float, halvings: int
    ) -> tuple[Found, Tensor]:
        """What was found, and the steps it was found for."""
        found, taken = fixed_point(equation, guess, tol), equation.h.clone()
        bad = (~found.converged).nonzero().flatten()
        if not len(bad) or not halvings:
            return found, taken
        whole = equation.at(bad)
        half, reached = self._solve(whole.with_step(whole.h / 2), guess[bad], tol, halvings - 1)
        up = (half.converged & (reached == whole.h / 2)).nonzero().flatten()
        if len(up):
            again = fixed_point(whole.at(up), half.q[up], tol).after(half.at(up))
            reached[up] = torch.where(again.converged, whole.h[up], reached[up])
            half.put(up, again.otherwise(half.at(up)))
        found.put(bad, half.after(found.at(bad)))
        taken[bad] = reached
        return found, taken


class MatrixFreeMidpoint(ImplicitStepper):
    """Implicit midpoint: x+ = x + h v(xm), the velocity in the middle; order 2, symmetric.

        et      xm = (x + x+)/2,  v = f(xm)
        leaky   the same with v = f(xm) - xm, so xm = (x + h/2 f) / (1 + h/2)
        sphere  xm = normalise(x + x+): the spherical midpoint method, which stays on the sphere

    Exchanging x, x+ and h, -h leaves each line as it is; a symmetric consistent one-step method
    has even order, so order 2. Large steps can raise the energy (leaky: they do). The equation is
    solved for f(xm), without a matrix.
    Source: Hairer, Lubich, Wanner 2006, II.1.2 and V.1; McLachlan, Modin, Verdier 2014 (sphere).
    """

    name = "matrix_free_midpoint"

    def equation(self, system: System, x: Tensor, h: Tensor) -> StepEquation:
        """See `ImplicitStepper`."""
        return _MIDPOINTS[system.dynamics](system, x, h, system.force(x))


@dataclass(frozen=True)
class _Midpoint(StepEquation):
    """The published dynamics."""

    def middle(self, q: Tensor) -> Tensor:
        return self.x + 0.5 * self.step * q

    def felt(self, q: Tensor) -> Tensor:
        return self.middle(q)

    def activation_derivative(self, q: Tensor, middle: Tensor, v: Tensor) -> Tensor:
        """dg(middle)/dq v."""
        return self.metric(middle, 0.5 * self.step * v)

    def end(self, q: Tensor) -> Tensor:
        return 2 * self.middle(q) - self.x

    def image(self, q: Tensor) -> Image:
        middle = self.middle(q)
        g = self.system.activation(middle)
        return _MidpointImage(self.system.interaction.force(g), self, q, middle, g)


@dataclass(frozen=True)
class _LeakyMidpoint(_Midpoint):
    def middle(self, q: Tensor) -> Tensor:
        half = 0.5 * self.step
        return self.x + half / (1 + half) * (q - self.x)

    def activation_derivative(self, q: Tensor, middle: Tensor, v: Tensor) -> Tensor:
        half = 0.5 * self.step
        return self.metric(middle, half / (1 + half) * v)


@dataclass(frozen=True)
class _SphereMidpoint(_Midpoint):
    def _push(self, q: Tensor) -> Tensor:
        lagrangian = self.system.layer_norm
        return 0.5 * self.step / lagrangian.gamma * lagrangian.centre(q)

    def middle(self, q: Tensor) -> Tensor:
        w = self.x + self._push(q)
        return torch.where((w * self.x).sum(-1, keepdim=True) < 0, -w, w)

    def activation_derivative(self, q: Tensor, middle: Tensor, v: Tensor) -> Tensor:
        w = self.x + self._push(q)
        sign = (w * self.x).sum(-1, keepdim=True).sign()
        return sign * self.metric(middle, self._push(v))

    def end(self, q: Tensor) -> Tensor:
        return reflect(self.x, self.x + self._push(q))


@dataclass(frozen=True)
class _MidpointImage(Image):
    equation: _Midpoint
    q: Tensor
    middle: Tensor
    g: Tensor

    def derivative(self, v: Tensor) -> Tensor:
        u = self.equation.activation_derivative(self.q, self.middle, v)
        return self.equation.system.interaction.force_jvp(self.g, u)


def reflect(x: Tensor, w: Tensor) -> Tensor:
    """x mirrored at the line along w, per token: 2 (w.x) w / |w|^2 - x, as long as x.

    For w = x + p/2 it solves x+ - x = P p with P the projection off the middle x + x+: it lies
    along w, since x+ + x = 2 (w.x)/|w|^2 w and x+ - x = p - (...) w.
    """
    size = w.square().sum(-1, keepdim=True).clamp(min=torch.finfo(w.dtype).tiny)
    return 2 * (w * x).sum(-1, keepdim=True) / size * w - x


_MIDPOINTS: dict[str, type[_Midpoint]] = {
    "et": _Midpoint, "leaky": _LeakyMidpoint, "sphere": _SphereMidpoint,
}  # fmt: skip
