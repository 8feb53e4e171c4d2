"""The self-consistency map x -> force(x) of a batch, its safeguard, and Anderson mixing.

The published and the leaky flow have the same equilibria in g, the fixed points of this map. On
the sphere the map is followed by a normalisation; there F is the force without its mean, and
z = c x, with c the standard deviation of F per token, stands for x, so that z = F(z) at an
equilibrium under every dynamics.

What falls under the map is the energy of the leaky flow, E + sum(x.g - L), not E: with eps = 0.1
in the layer norm E alone rises in a few percent of the steps. A step eta of the map is an Euler
step of that flow, and lowers its energy for small eta (ET-F30); near a minimum that means
eta < 2 / kappa_max (ET-F23).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from etdyn.lagrangians import LayerNorm
from etdyn.solve.krylov import Image
from etdyn.solve.rows import Rows
from etdyn.systems import System

__all__ = ["Accelerated", "Anderson", "Point", "Relaxation", "evaluate"]

SETTLED = 0.02  # relative change of g in a step, below which leaps start
PATIENCE = 8  # good steps before a longer one is tried
ESCAPES = 4  # lengths tried to leave a saddle
BLIND = 2.0**-6  # share of `damping` above which, without an energy, F - x may not grow
WORST_GROWTH = 4.0  # of |F(x) - x|^2 in an accelerated step along which the energy is flat


@dataclass(frozen=True)
class Point(Image):
    """One evaluation of every sample: states are `(batch, token, feature)`, scalars `(batch,)`.

    `value` is the map F of z; `velocity` = F - z, `momentum` = M velocity, and `speed2` their
    product, the dissipation of the leaky flow. `merit` is the energy that must not rise, zero
    where there is none. `anchor` is x with absent tokens replaced, `scale` is c.
    """

    system: System
    x: Tensor
    anchor: Tensor
    z: Tensor
    scale: Tensor
    g: Tensor
    energy: Tensor
    merit: Tensor
    residual: Tensor
    velocity: Tensor
    momentum: Tensor
    speed2: Tensor

    def metric(self, v: Tensor) -> Tensor:
        """M v, with M = dg/dz."""
        return _metric(self.system, self.anchor, self.scale, v)

    @property
    def size(self) -> Tensor:
        """|F| over the tokens that exist, `(batch,)`."""
        return _norm(self.system.keep(self.value))

    def derivative(self, v: Tensor) -> Tensor:
        """dF/dz v, the derivative of the force along M v. One evaluation."""
        pull = self.system.interaction.force_jvp(self.g, self.metric(v))
        return LayerNorm.centre(pull) if self.system.dynamics == "sphere" else pull

    def converged(self, tol: float) -> Tensor:
        """Whether the residual is at most tol however it is rounded, and x = force(x), `(batch,)`.

        The second to half the digits of the dtype: the mean and the length of a token, to which
        the residual is blind, follow the residual one evaluation later.
        """
        size = self.size
        eps = torch.finfo(size.dtype).eps
        small = self.residual <= (tol - eps * size).clamp(min=0.5 * tol)
        if self.system.dynamics == "sphere":
            return small
        consistent: Tensor = _norm(self.velocity) <= (eps**0.5 * size).clamp(min=tol)
        return small & consistent

    def finite(self) -> Tensor:
        """Whether energy and force are finite, `(batch,)`."""
        return torch.isfinite(self.merit + self.speed2 + self.residual)

    def unless(self, worse: Tensor, new: Point) -> Point:
        """These samples where `worse`, the others of `new`."""
        mixed: dict[str, Any] = {
            name: torch.where(_wide(worse, old), old, getattr(new, name))
            for name, old in vars(self).items()
            if isinstance(old, Tensor)
        }
        return replace(self, **mixed)


def evaluate(system: System, x: Tensor) -> Point:
    """Everything that one force tells about the state x of a leaky or sphere system."""
    lagrangian = system.lagrangian
    g, anchor = system.keep(system.activation(x)), system._stand_in(x)
    if system.has_energy:
        energy, force = system.potential.energy_and_force(g)
    else:
        energy, force = torch.full_like(x[:, 0, 0], torch.nan), system.interaction.force(g)
    if system.dynamics == "sphere":
        size = force.abs().amax(-1, keepdim=True)
        force = LayerNorm.centre(force)
        scale = force.square().mean(-1, keepdim=True).sqrt()
        moves = scale > 4 * torch.finfo(x.dtype).eps * size  # else the force has no direction
        scale = torch.where(moves, scale, torch.ones_like(scale))
        z, merit = scale * x, energy
    else:
        moves = torch.ones_like(x[..., :1], dtype=torch.bool)
        if system._tokens is not None:
            moves = moves & system._tokens.unsqueeze(-1)
        scale = torch.ones_like(x[..., :1])
        z, merit = x, energy + lagrangian.legendre(anchor).sum(1)
    target = torch.where(moves, force, z)
    velocity = target - z
    momentum = _metric(system, anchor, scale, velocity)
    return Point(
        target, system, x, anchor, z, scale, g, energy,
        merit if system.has_energy else torch.zeros_like(energy),
        _norm(system.keep(system._law.imbalance(lagrangian, anchor, force))),
        velocity, momentum, (velocity * momentum).sum((1, 2)),
    )  # fmt: skip


def _metric(system: System, anchor: Tensor, scale: Tensor, v: Tensor) -> Tensor:
    if system.dynamics == "sphere":
        return system.layer_norm.gamma / scale * system.lagrangian.tangent(anchor, v)
    return system.lagrangian.metric(anchor, v)


def _norm(v: Tensor) -> Tensor:
    return v.flatten(1).square().sum(1).sqrt()


def _wide(per_sample: Tensor, like: Tensor) -> Tensor:
    return per_sample.reshape(-1, *[1] * (like.ndim - 1))


class Relaxation:
    """The damped map: z <- z + eta (F(z) - z), with eta found per sample.

    A step that raises the energy is undone and eta halved; where the energy is flat to rounding,
    so is a step that turns the velocity round and lengthens it (an eigenvalue of 1 - eta (I + HM)
    below -1). After good steps eta grows back towards `damping`, less often each time.

    Args:
        start: where the search starts.
        damping: the largest eta.
    """

    def __init__(self, start: Point, damping: float) -> None:
        self.damping = damping
        self.eta = torch.full_like(start.merit, damping)
        self.streak = torch.zeros_like(start.merit, dtype=torch.int64)
        self.patience = torch.full_like(self.streak, PATIENCE)
        self.leaps = torch.zeros_like(start.merit, dtype=torch.bool)

    def keep(self, rows: Tensor) -> None:
        """Forget the other samples; rows: bool `(batch,)`."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor | Rows):
                setattr(self, name, value.at(rows) if isinstance(value, Rows) else value[rows])

    def propose(self, point: Point, left: Tensor) -> tuple[Tensor, Tensor]:
        """The next z, and what finding it cost of the evaluations `left`, `(batch,)`.

        `leaps` says for which samples it is more than a step of the map.
        """
        self.leaps = torch.zeros_like(self.leaps)
        return point.z + _wide(self.eta, point.z) * point.velocity, torch.zeros_like(left)

    def worse(self, old: Point, new: Point) -> Tensor:
        """Which samples must go back, `(batch,)`."""
        slack = 64 * torch.finfo(old.merit.dtype).eps * old.merit.abs()
        rise = new.merit - old.merit
        flat = rise.abs() <= slack
        reversed_ = (new.velocity * old.momentum).sum((1, 2)) < 0
        longer = torch.where(self.leaps, self._too_long(old, new), new.speed2 > old.speed2)
        wrong = reversed_ | self.leaps
        if not old.system.has_energy:  # nothing but the residual tells a bad step
            wrong = wrong | (self.eta > BLIND * self.damping)
        return ~new.finite() | (rise > slack) | (flat & longer & wrong)

    def _too_long(self, old: Point, new: Point) -> Tensor:
        return new.speed2 > WORST_GROWTH * old.speed2

    def learn(self, old: Point, new: Point, worse: Tensor) -> None:
        """Adapt eta to how the proposal went."""
        short = worse & ~self.leaps
        self.streak = torch.where(short, 0, self.streak + (~worse & ~self.leaps))
        longer = (self.streak >= self.patience) & (self.eta < self.damping)
        self.patience = torch.where(short, (2 * self.patience).clamp(max=1024), self.patience)
        self.streak = torch.where(longer, 0, self.streak)
        grown = (2 * self.eta).clamp(max=self.damping)
        self.eta = torch.where(longer, grown, torch.where(short, self.eta / 2, self.eta))


class Accelerated(Relaxation, ABC):
    """The map until it settles near a minimum, then leaps, taken back where they do not descend.

    A sample has settled when g changes by less than `SETTLED` in a step and the last step saw
    positive curvature, dz.M(I + HM)dz > 0: near a saddle the map escapes along a direction of
    negative curvature, while whatever resembles Newton's method is drawn in.
    """

    def __init__(self, start: Point, damping: float) -> None:
        super().__init__(start, damping)
        self.bent = torch.zeros_like(self.leaps)  # the last step saw positive curvature
        self.settled = torch.zeros_like(self.leaps)
        self.leapt = torch.zeros_like(self.leaps)  # since the start or the last escape
        self.origin = start.z.clone()  # where the first of these leaps left
        self.escape = torch.zeros_like(start.z)  # a pending step off a saddle
        self.escaping = torch.zeros_like(self.leaps)
        self.tries = torch.zeros_like(self.streak)

    def propose(self, point: Point, left: Tensor) -> tuple[Tensor, Tensor]:
        """Leaps where settled, escapes where one is pending, else the map."""
        z, spent = super().propose(point, left)
        leaps = self.ready(left) & ~self.escaping
        rows = leaps.nonzero().flatten()
        if len(rows):
            first = rows[~self.leapt[rows]]
            self.origin[first] = point.z[first]
            z[rows], spent[rows] = self.leap(point, rows)
        z = torch.where(_wide(self.escaping, z), point.z + self.escape, z)
        self.leaps = leaps | self.escaping
        return z, spent

    def ready(self, left: Tensor) -> Tensor:
        """Which samples may leap, `(batch,)`."""
        return self.settled

    @abstractmethod
    def leap(self, point: Point, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The proposals z of these samples, and what they cost."""

    def learn(self, old: Point, new: Point, worse: Tensor) -> None:
        """Decide who has settled."""
        super().learn(old, new, worse)
        dz = new.z - old.z
        self.bent = ((new.velocity - old.velocity) * new.metric(dz)).sum((1, 2)) < 0
        change = _norm(new.g - old.g) / (self.eta * _norm(old.g))
        self.settled = torch.where(worse, self.settled, self.bent & (change < SETTLED))
        self.leapt = (self.leapt | (self.leaps & ~worse)) & ~self.escaping
        self.tries -= self.escaping.long()
        self.escaping = self.escaping & worse & (self.tries > 0)
        self.escape = self.escape / 4

    def leave(self, rows: Tensor, step: Tensor) -> None:
        """Next, step off the saddle at which these samples are, or a part of it, downhill."""
        self.escape[rows] = step
        self.escaping[rows] = True
        self.tries[rows] = ESCAPES


@dataclass(frozen=True)
class _Memory(Rows):
    """The last differences of z and of the velocity, zero where there are none yet."""

    dz: Tensor
    dv: Tensor
    count: Tensor

    @classmethod
    def empty(cls, z: Tensor, size: int) -> Self:
        """For states like z."""
        room = z.new_zeros(len(z), size, z[0].numel())
        return cls(room, room.clone(), torch.zeros(len(z), dtype=torch.int64, device=z.device))

    def update(self, dz: Tensor, dv: Tensor, good: Tensor, forget: Tensor) -> None:
        """Store where `good`, clear where `forget`; in place."""
        rows = good.nonzero().flatten()
        slot = self.count[rows] % self.dz.shape[1]
        self.dz[rows, slot], self.dv[rows, slot] = dz[rows].flatten(1), dv[rows].flatten(1)
        self.count[rows] += 1
        for value in (self.dz, self.dv, self.count):
            value[forget] = 0


class Anderson(Accelerated):
    """Anderson mixing (type II) of the last `memory` steps.

        z+ = z + eta v - (dZ + eta dV) w,    w = argmin |v - dV w|,    v = F(z) - z

    with the columns of dV scaled to length one and a ridge, so that w stays bounded where they
    are dependent. A leap that is taken back empties the memory.
    """

    def __init__(self, start: Point, damping: float, memory: int) -> None:
        super().__init__(start, damping)
        self.memory = _Memory.empty(start.z, memory)

    def ready(self, left: Tensor) -> Tensor:
        """Settled, with something to mix."""
        return self.settled & (self.memory.count > 0)

    def leap(self, point: Point, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed state."""
        memory, v, z = self.memory.at(rows), point.velocity[rows], point.z[rows]
        eta = self.eta[rows]
        size = memory.dv.square().sum(2, keepdim=True).sqrt()
        size = torch.where(size > 0, size, torch.ones_like(size))
        unit = memory.dv / size
        ridge = max(1e-10, 10 * torch.finfo(v.dtype).eps)
        gram = unit @ unit.mT + ridge * torch.eye(unit.shape[1], dtype=v.dtype, device=v.device)
        w = torch.linalg.solve(gram, unit @ v.flatten(1).unsqueeze(2)) / size
        back = ((memory.dz + _wide(eta, unit) * memory.dv) * w).sum(1)
        return z + _wide(eta, z) * v - back.reshape(z.shape), torch.zeros_like(rows)

    def learn(self, old: Point, new: Point, worse: Tensor) -> None:
        """Remember good steps; forget everything after a bad leap or near a saddle."""
        escaping = self.escaping
        super().learn(old, new, worse)
        forget = torch.where(worse, self.leaps, ~self.bent) | escaping
        self.memory.update(new.z - old.z, new.velocity - old.velocity, ~worse & ~forget, forget)
