"""Explicit steps that never raise the energy, and the step size up to which that is a theorem."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from etdyn.checks import check_count, check_positive
from etdyn.lagrangians import LayerNorm
from etdyn.solve.steppers import Stepper, StepReport, move, settle
from etdyn.systems import System

__all__ = ["GuardedEuler", "descent_bound"]


@torch.no_grad()
def descent_bound(system: System, x: Tensor) -> Tensor:
    """The Euler step up to which the energy provably does not rise, `(batch,)`. One evaluation.

    With w = |v - mean(v)| / sqrt(D), so that sigma stays above sigma - h w along the step, and
    the least over tokens of

        et      h = sigma / (gamma h+/2 + w)                  infinite where h+ = 0
        leaky   the smaller root of (1 - h)(sigma - h w) = h gamma h+/2;   1 where h+ = 0
        sphere  h = 2 / (h+ + f_r / R), f_r the outward part of the force;  infinite if negative

    Proof, with f = -grad E, dg = g+ - g: E+ - E <= -f.dg + h+ |dg|^2/2. et: f = dx/h, and
    dx.dg >= (sigma_min/gamma) |dg|^2 as M <= gamma/sigma. leaky: f = x + dx/h, and
    L*(g+) - L*(g) <= x+.dg by convexity, so V+ - V <= -(1/h - 1) dx.dg + h+ |dg|^2/2. sphere: a
    token turns by theta with tan theta = h |Pf|/R, so -f.dg = R f_r (1 - cos) - R |Pf| sin and
    |dg|^2 = 2 R^2 (1 - cos), where 1 - cos <= sin tan / 2. Where the curvature of the
    interaction is not known, or g is no layer norm of x, zero. Source: ET-F20.
    """
    system.check(x)
    x = system._stand_in(x)
    force = system.force(x)
    return _bound(system, x, force, system._law.velocity(system.lagrangian, x, force))


def _bound(system: System, x: Tensor, force: Tensor, v: Tensor) -> Tensor:
    lagrangian = system.lagrangian
    if not isinstance(lagrangian, LayerNorm):
        return torch.zeros_like(x[:, 0, 0])
    top = system.interaction.curvature_bound(x.shape[1])
    top = torch.as_tensor(top, dtype=x.dtype, device=x.device).reshape(-1, 1)
    gamma, root = lagrangian.gamma, math.sqrt(lagrangian.dim)
    if system.dynamics == "sphere":
        y = lagrangian.centre(x)
        rate = top + (y * force).sum(-1) / y.square().sum(-1).sqrt() / (gamma * root)
        steps = torch.where(rate > 0, 2 / rate, torch.inf)
    else:
        sigma, w = lagrangian.sigma(x), lagrangian.centre(v).square().sum(-1).sqrt() / root
        if system.dynamics == "et":
            steps = torch.where(top > 0, sigma / (gamma * top / 2 + w), torch.inf)
        else:
            b = sigma + w + gamma * top / 2
            steps = 2 * sigma / (b + (b * b - 4 * w * sigma).clamp(min=0).sqrt())
            steps = torch.where(top > 0, steps, 1)
    absent = system.keep(torch.ones_like(steps)) == 0
    return steps.masked_fill(absent, torch.inf).amin(1)


class GuardedEuler(Stepper):
    """Euler whose step is halved, per sample, until the Lyapunov function does not rise. Order 1.

    What may not rise is `system.energy`: E, or E + x.g - L for the leaky dynamics. A step is
    halved down to `descent_bound`, where the descent is a theorem; an energy without such a bound
    is searched below it too. Two evaluations, and one more for every halving.
    Source: ET-F20; backtracking as in Armijo 1966.

    Args:
        slack: roundings of the energy that do not count as a rise.
        halvings: after which a step fails.

    Raises:
        ValueError, TypeError: an argument out of range.
    """

    name = "guarded_euler"

    def __init__(self, slack: float = 8.0, halvings: int = 60) -> None:
        check_positive("slack", slack, zero=True)
        check_count("halvings", halvings, least=0)
        self.slack, self.halvings = float(slack), halvings

    def step(self, system: System, x: Tensor, h: Tensor) -> StepReport:
        """See `Stepper`. Differentiable, with the steps taken as constants."""
        self.check(system, x, h)
        start, x = x, system._stand_in(x)
        energy, force = system.potential.energy_and_force(system.activation(x), relative=True)
        neuron = system._law.neuron_energy(system.lagrangian, x)
        before = energy if neuron is None else energy + system.keep(neuron).sum(1)
        v = system.keep(system._law.velocity(system.lagrangian, x, force))
        taken, evaluations = self._search(system, x, h, before=before, force=force, v=v)
        moved = settle(system, taken > 0, move(system, x, taken, v), start)
        return StepReport.explicit(moved, h, taken, evaluations)

    @torch.no_grad()
    def _search(
        self, system: System, x: Tensor, h: Tensor, *, before: Tensor, force: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The steps that do not raise the energy (0: none), and evaluations per sample."""
        taken = h.clone()
        spent = torch.ones(len(x), dtype=torch.int64, device=x.device)
        rows, floor = torch.arange(len(x), device=x.device), None
        for _ in range(self.halvings + 1):
            after = self._energy(system.select(rows), x[rows], taken[rows], v[rows])
            spent[rows] += 1
            size = torch.maximum(before[rows].abs(), after.abs())
            limit = before[rows] + self.slack * torch.finfo(x.dtype).eps * size
            rows = rows[~(after <= limit)]
            if not len(rows):
                return taken, spent
            floor = _bound(system, x, force, v) if floor is None else floor
            half = taken[rows] / 2
            taken[rows] = torch.where(taken[rows] > floor[rows], half.maximum(floor[rows]), half)
        taken[rows] = 0
        return taken, spent

    @staticmethod
    def _energy(system: System, x: Tensor, h: Tensor, v: Tensor) -> Tensor:
        """After the step, without the zero-weight constant, which would cost digits."""
        parts = system.energies(move(system, x, h, v), relative=True)
        return torch.stack(list(parts.values())).sum(0)
