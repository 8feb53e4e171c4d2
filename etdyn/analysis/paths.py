"""The chain rule along a step: what each part of the velocity does to a decoded state.

integral over the step of J_D(x(t)) v_i(t) dt,     D the decoder, v_i a part of the velocity
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.func import jvp, vmap

from etdyn.checks import bad, check_count
from etdyn.solve.solution import Solution
from etdyn.systems import System

__all__ = ["CHUNK", "OUTPUTS", "Decode", "Leg", "Rates", "decoded", "integrate", "legs", "numbers"]

Decode = Callable[[Tensor], Tensor]
Rates = Callable[[Tensor], Tensor]

# What the dims of a decoded sample are called, by their number: one score, scores, scores of every
# token, an image.
OUTPUTS: dict[int, tuple[str, ...]] = {
    0: (),
    1: ("output",),
    2: ("token", "output"),
    3: ("channel", "row", "column"),
}
CHUNK = 64  # parts pushed through the decoder at once
_NODES, _WEIGHTS = (values.tolist() for values in np.polynomial.legendre.leggauss(8))


@dataclass(frozen=True)
class Leg:
    """The way from a saved state to the next: the cubic with these ends and end velocities.

    On the discrete model it is the straight step before noise and before the sphere's
    normalisation, and `euler`: forces are those at x0 all the way.
    """

    system: System
    x0: Tensor
    x1: Tensor  # as saved
    end: Tensor  # of the path
    v0: Tensor
    v1: Tensor
    dt: float
    euler: bool

    def at(self, s: float) -> Tensor:
        """x at the share s of the time."""
        blend = s * s * (3 - 2 * s)
        bow = s * (1 - s) * ((1 - s) * self.v0 - s * self.v1)
        return torch.lerp(self.x0, self.end, blend) + self.dt * bow

    def slope(self, s: float) -> Tensor:
        """dx/ds."""
        bow = (1 - s) * (1 - 3 * s) * self.v0 + s * (3 * s - 2) * self.v1
        return 6 * s * (1 - s) * (self.end - self.x0) + self.dt * bow


def numbers(solution: Solution, steps: Sequence[int] | None) -> list[int]:
    """The steps that are asked for, k from x[k] to x[k + 1]; None: all.

    Raises:
        ValueError, TypeError: a solution without its states, a step out of range.
    """
    last = len(solution.t) - 1
    if len(solution.x) != len(solution.t) or last < 1:
        raise bad("solution", "the states at two times or more", f"{len(solution.x)} states")
    if steps is None:
        return list(range(last))
    if len(steps) == 0:
        raise bad("steps", "at least one", "none")
    for k in steps:
        check_count("steps", k, least=0)
        if k >= last:
            raise bad("steps", f"numbers below {last}", k)
    return [int(k) for k in steps]


def legs(solution: Solution, steps: Sequence[int] | None) -> Iterator[Leg]:
    """The ways of the steps that are asked for; see `numbers`."""
    system, states = solution.system, solution.x.detach()
    euler = solution.config.get("method", {}).get("name") == "descend"
    for k in numbers(solution, steps):
        x0, x1, dt = states[k], states[k + 1], float(solution.t[k + 1] - solution.t[k])
        v0 = system.velocity(0.0, x0)
        if euler:
            yield Leg(system, x0, x1, x0 + dt * v0, v0, v0, dt, euler)
        else:
            yield Leg(system, x0, x1, x1, v0, system.velocity(0.0, x1), dt, euler)


def decoded(decode: Decode, x: Tensor) -> Tensor:
    """D(x), without a graph.

    Raises:
        ValueError, TypeError: not a tensor `(batch, ...)` of one to four dims.
    """
    out = decode(x)
    if not isinstance(out, Tensor):
        raise TypeError(f"decode: expected to return a tensor, got {type(out).__name__}")
    if out.ndim - 1 not in OUTPUTS or len(out) != len(x):
        raise bad("decode", f"an output ({len(x)}, ...) of one to four dims", tuple(out.shape))
    return out.detach()


def integrate(
    leg: Leg,
    decode: Decode,
    rates: Rates,
    span: tuple[float, float] = (0.0, 1.0),
    halvings: int = 12,
) -> Tensor:
    """The integral of J_D v_i dt for every part i, over a span of shares of the leg's time.

    Eight Gauss points. They push dx/ds through the decoder as well, whose integral is known,
    D(x(b)) - D(x(a)), and where they miss it by more than rounding the interval is halved: a
    token turns fast where the step takes it past zero length.

    Args:
        leg: the way.
        decode: D, differentiable.
        rates: x to the parts of the velocity there, `(part, batch, token, feature)`.
        span: from, to; 0 and 1 is the whole.
        halvings: at most so many, one in another.

    Returns:
        `(part, batch, ...)`.
    """

    def onto(x: Tensor) -> Tensor:
        return decode(leg.system.prepare(x))  # the path of a step on the sphere leaves it

    a, b = span
    before, after = decoded(onto, leg.at(a)), decoded(onto, leg.at(b))
    total, size = torch.zeros_like(before), torch.maximum(before.abs(), after.abs())
    for p, weight in zip(_NODES, _WEIGHTS, strict=True):
        s = (a + b + (b - a) * p) / 2
        x = leg.at(s)
        velocities = rates(leg.x0 if leg.euler else x)
        directions = torch.cat([leg.dt * velocities, leg.slope(s).unsqueeze(0)])
        moved = _pushforward(onto, x, directions) * ((b - a) / 2 * weight)
        total, size = total + moved, size + moved[-1].abs()
    gap = (total[-1] - (after - before)).abs()
    gap, size = (v.reshape(len(v), -1).amax(1) for v in (gap, size))
    missed = gap > 256 * torch.finfo(gap.dtype).eps * size  # false for NaN, after a sample's end
    if halvings == 0 or not bool(missed.any()):
        return total[:-1]
    halves = (a, (a + b) / 2), ((a + b) / 2, b)
    first, second = (integrate(leg, decode, rates, half, halvings - 1) for half in halves)
    return first + second


def _pushforward(decode: Decode, x: Tensor, directions: Tensor) -> Tensor:
    """J_D(x) v for every direction v, `(part, batch, ...)`."""

    def push(v: Tensor) -> Tensor:
        moved: Tensor = jvp(decode, (x,), (v,))[1]
        return moved

    pushed: Tensor = vmap(push, chunk_size=CHUNK)(directions)
    return pushed.detach()
