"""Adaptive integration in which every sample has its own time, step, status and end.

One stiff sample costs the others nothing (A-F10): the velocity is evaluated on the samples still
on their way, and what one sample does never depends on another. The bookkeeping of the steps is
float64 on the host and the states stay on their device, so that an attempted step synchronises
once, when the errors come back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etdyn.checks import bad, check_count, check_finite, check_positive, check_tensor
from etdyn.interactions import take
from etdyn.solve import tableaus
from etdyn.solve.solution import Status
from etdyn.solve.tableaus import Floats, Tableau

__all__ = ["BatchedResult", "integrate_batched"]

Velocity = Callable[[Tensor, Tensor, Tensor], Tensor]
Stop = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

BROKEN_LIMIT = 10  # attempts in a row that may meet NaN or infinity
ULPS = 10  # a step below this many units in the last place of t is DT_MIN
STRETCH = 1.01  # a step that would stop just short of the end goes all the way
KEPT_STEPS = 20


@dataclass(frozen=True)
class BatchedResult:
    """What `integrate_batched` returns; every tensor is on the device of x0.

    Attributes:
        x: `(time, batch, token, feature)`, dtype of x0; NaN at save times after `t_end`.
        x_end: `(batch, token, feature)`, the last accepted state, always finite.
        t_end: float64 `(batch,)`, its time: the last of `times`, or where the stop was met or
            before the failure.
        status: int8 `(batch,)`, values of `Status`.
        evaluations: int64 `(batch,)`: one at the start, one more to choose the first step, and
            stages - 1 for every attempted step.
        accepted, rejected: int64 `(batch,)`, steps.
        replayed: int64 `(batch,)`, evaluations repeated because another sample met NaN while a
            graph was recorded; zero without gradients, not part of `evaluations`.
        steps: float64 `(batch, 20, 4)`, the last attempted steps, oldest first, as (t, step,
            error, accepted); NaN in front where there were fewer.
    """

    x: Tensor
    x_end: Tensor
    t_end: Tensor
    status: Tensor
    evaluations: Tensor
    accepted: Tensor
    rejected: Tensor
    replayed: Tensor
    steps: Tensor


def integrate_batched(
    velocity: Velocity,
    x0: Tensor,
    times: Tensor | Sequence[float],
    tableau: Tableau,
    *,
    rtol: float,
    atol: float,
    max_steps: int,
    first_step: float | None = None,
    min_step: float = 0.0,
    stop: Stop | None = None,
    tokens: Tensor | None = None,
) -> BatchedResult:
    """Integrate dx/dt = velocity(t, x) from times[0] to times[-1], every sample on its own.

    A step is accepted when the RMS over token and feature of error / scale is at most 1, with
    scale = atol + rtol max(|x|, |x1|). No evaluation lies outside [times[0], times[-1]].
    Differentiable by autograd through the accepted steps; their sizes are constants.

    Args:
        velocity: f(t, x, index) for some of the samples: t float64 `(b,)`, x `(b, token,
            feature)`, index int64 `(b,)` their positions in x0; returns the shape and dtype of x.
        x0: `(batch, token, feature)`, floating.
        times: `(time,)`, at least two, increasing; the states there come from the interpolant.
        tableau: one of `TABLEAUS`.
        rtol, atol: tolerances; rtol at least 50 eps of the dtype of x0, atol >= 0.
        max_steps: attempted steps of each sample.
        first_step: of every sample; None chooses by Hairer's algorithm, for one evaluation.
        min_step: a sample whose step falls below this, or below 10 ulp of t, ends with DT_MIN.
        stop: (t, x, velocity, index) -> bool `(b,)`, called without gradient at the start and
            after every accepted step, on the samples that took it. Where true the sample ends
            there with EQUILIBRIUM.
        tokens: bool `(batch or 1, token)`, which tokens the RMS is over; None is all.

    Returns:
        BatchedResult. A sample that failed has MAX_STEPS, NONFINITE (NaN or infinity that ten
        smaller steps, or steps down to DT_MIN, could not avoid) or DT_MIN; the others go on.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: Hairer, Norsett, Wanner, Solving ODEs I, II.4 (control, first step) and II.6 (dense
    output); Gustafsson 1991, ACM TOMS 17, 533 (PI control).
    """
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        got = x0.dtype if isinstance(x0, Tensor) else type(x0).__name__
        raise TypeError(f"x0: expected a tensor of floating dtype, got {got}")
    check_tensor("x0", x0, (None, None, None), x0)
    check_finite("x0", x0)
    check_positive("rtol", rtol)
    check_positive("atol", atol, zero=True)
    if rtol < 50 * torch.finfo(x0.dtype).eps:
        least = 50 * torch.finfo(x0.dtype).eps
        raise bad("rtol", f"at least {least:.2g}, which {x0.dtype} can carry", rtol)
    check_count("max_steps", max_steps)
    check_positive("first_step", 1.0 if first_step is None else first_step)
    check_positive("min_step", min_step, zero=True)
    run = _Integration(velocity, x0, _grid(times), tableau, stop, tokens=tokens, rtol=rtol,
                       atol=atol)  # fmt: skip
    if len(x0):
        run.start(first_step)
    while run.retire(max_steps, min_step):
        run.attempt()
    return run.result()


class _Rows:
    """Rows that arrive in any order; kept apart until the end while autograd needs them."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self.out = like.new_full((rows, *like.shape[1:]), torch.nan)
        self.pieces: list[tuple[Tensor, Tensor]] = []

    def put(self, slots: Ints, x: Tensor) -> None:
        where = torch.from_numpy(slots).to(x.device)
        if torch.is_grad_enabled():
            self.pieces.append((where, x))
        else:
            self.out.index_copy_(0, where, x)

    def tensor(self) -> Tensor:
        if not self.pieces:
            return self.out
        where, x = zip(*self.pieces, strict=True)
        return self.out.index_copy(0, torch.cat(where), torch.cat(x))


@dataclass(frozen=True)
class _Step:
    """One attempted step of some samples: times on the host, the rest on the device."""

    t: Floats
    h: Floats
    t1: Floats
    x0: Tensor
    x1: Tensor
    stages: list[Tensor]
    h_device: Tensor


class _Integration:
    """The state of all samples; arrays of length `batch`, tensors of the active samples only."""

    def __init__(
        self, velocity: Velocity, x0: Tensor, times: Floats, tableau: Tableau, stop: Stop | None,
        *, tokens: Tensor | None, **tolerances: float,
    ) -> None:  # fmt: skip
        batch = len(x0)
        self.velocity, self.times, self.tableau, self.stop = velocity, times, tableau, stop
        self.tokens, self.tolerances = tokens, tolerances
        self.x = self.k = x0
        self.index = np.arange(batch)
        self.rows = self._device(self.index)
        self.t, self.h = np.full(batch, times[0]), np.full(batch, np.inf)
        self.before = np.full(batch, tableaus.LEAST_ERROR)
        self.held, self.met = np.zeros(batch, bool), np.zeros(batch, bool)
        self.status = np.full(batch, -1, np.int8)
        counts = np.zeros((6, batch), np.int64)
        self.evaluations, self.accepted, self.rejected = counts[:3]
        self.replayed, self.broken, self.saved = counts[3:]
        self.log = np.full((batch, KEPT_STEPS, 4), np.nan)
        self.saves = _Rows(len(times) * batch, x0)
        self.ends = _Rows(batch, x0)

    def _device(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(self.x.device)

    def start(self, first_step: float | None) -> None:
        """Evaluate once, leave out what is broken or at equilibrium, and choose the steps."""
        self.saves.put(self.index, self.x)
        self.saved += 1
        t = self._device(self.t.copy())
        self.k = self.velocity(t, self.x, self.rows)
        check_tensor("velocity", self.k, tuple(self.x.shape), self.x)
        self.evaluations += 1
        broken = ~torch.isfinite(self.k).flatten(1).all(1).cpu().numpy()
        self.broken[broken] = BROKEN_LIMIT
        if self.retire() and broken.any() and self.k.requires_grad:
            self.k = self.velocity(t[self.rows], self.x, self.rows)
            self.replayed[self.index] += 1
        self._test_stop(self.index, self.x, self.k)
        span = float(self.times[-1] - self.times[0])
        self.h[:] = np.inf if first_step is None else min(first_step, span)
        if self.retire() and first_step is None:
            t0, end = self.times[[0, -1]]

            def trial(h: Floats, x: Tensor) -> Tensor:
                return self.velocity(self._device(np.minimum(t0 + h, end)), x, self.rows)

            self.evaluations[self.index] += 1
            self.h[self.index] = tableaus.first_steps(
                self.tableau, trial, self.x, self.k, longest=span,
                tokens=take(self.tokens, self.rows), **self.tolerances,
            )  # fmt: skip

    def retire(self, max_steps: float = np.inf, min_step: float = 0.0) -> bool:
        """Take the samples out that have ended; whether any is left."""
        i = self.index
        t, broken = self.t[i], self.broken[i]
        small = self.h[i] < np.maximum(min_step, ULPS * np.spacing(np.abs(t)))
        ends: list[tuple[Bools, int]] = [  # what comes first wins
            (self.met[i], Status.EQUILIBRIUM),
            (t == self.times[-1], Status.FINISHED),
            ((broken >= BROKEN_LIMIT) | (small & (broken > 0)), Status.NONFINITE),
            (small, Status.DT_MIN),
            (self.accepted[i] + self.rejected[i] >= max_steps, Status.MAX_STEPS),
        ]
        self.status[i] = np.select([c for c, _ in ends], [int(s) for _, s in ends], -1)
        gone = self.status[i] >= 0
        if gone.any():
            self.ends.put(i[gone], self.x[self._device(np.flatnonzero(gone))])
            keep = self._device(np.flatnonzero(~gone))
            self.index, self.x, self.k = i[~gone], self.x[keep], self.k[keep]
            self.rows = self._device(self.index)
        return bool(self.index.size)

    def attempt(self) -> None:
        """One step of every active sample, accepted or not."""
        i, end = self.index, self.times[-1]
        t, h, left = self.t[i], self.h[i], end - self.t[i]
        last = STRETCH * h >= left
        h = np.where(last, left, h)
        t1 = np.where(last, end, t + h)
        step = self._take(t, h, t1)
        self.evaluations[i] += self.tableau.stages - 1
        error = tableaus.error_ratio(
            self.tableau, step.x0, step.x1, step.stages, h=step.h_device,
            tokens=take(self.tokens, self.rows), **self.tolerances,
        )  # fmt: skip
        good = error <= 1
        attempts = self.accepted[i] + self.rejected[i]
        self.log[i, attempts % KEPT_STEPS] = np.stack([t, h, error, good], 1)
        self._control(i, h, error, good)
        if good.any():
            self._advance(step, good, bool(np.isnan(error).any()))

    def _take(self, t: Floats, h: Floats, t1: Floats, subset: Tensor | None = None) -> _Step:
        """Step all active samples, or some."""
        x, k, rows = self.x, self.k, self.rows
        if subset is not None:
            x, k, rows = x[subset], k[subset], rows[subset]
        c = np.array(self.tableau.c)[:, None]
        times = self._device(np.where(c == 1, t1, np.minimum(t + c * h, t1))).unbind()
        h_device = self._device(h).to(x.dtype)

        def field(t: Tensor, x: Tensor) -> Tensor:
            return self.velocity(t, x, rows)

        x1, stages = tableaus.rk_step(self.tableau, field, times, x=x, k=k, h=h_device)
        return _Step(t, h, t1, x, x1, stages, h_device)

    def _control(self, i: Ints, h: Floats, error: Floats, good: Bools) -> None:
        self.h[i] = h * tableaus.step_factor(self.tableau, error, self.before[i], self.held[i])
        self.before[i] = np.where(good, np.fmax(error, tableaus.LEAST_ERROR), self.before[i])
        self.held[i] = ~good
        self.broken[i] = np.where(np.isnan(error), self.broken[i] + 1, 0)
        self.accepted[i] += good
        self.rejected[i] += ~good

    def _advance(self, step: _Step, good: Bools, broken: bool) -> None:
        """Move the samples that took the step, save what lies in it, ask whether to stop."""
        taken = np.flatnonzero(good)
        rows, i = self._device(taken), self.index[taken]
        local = taken
        # 0 * NaN is NaN: a broken sample in the graph would spoil the gradients of parameters
        if broken and step.x1.requires_grad:
            step = self._take(step.t[taken], step.h[taken], step.t1[taken], rows)
            self.replayed[i] += self.tableau.stages - 1
            local = np.arange(len(taken))
        self._save(step, local, i)
        self.t[i] = step.t1[local]
        x1, k1 = step.x1, step.stages[-1]
        if len(local) < len(x1):
            x1, k1 = x1[rows], k1[rows]
        if len(taken) == len(good):
            self.x, self.k = x1, k1
        else:
            self.x = self.x.index_copy(0, rows, x1)
            self.k = self.k.index_copy(0, rows, k1)
        self._test_stop(i, x1, k1)

    def _save(self, step: _Step, local: Ints, i: Ints) -> None:
        """Interpolate sample i[n], row local[n] of the step, at the save times in its step."""
        past = np.searchsorted(self.times, step.t1[local], side="right")
        count = past - self.saved[i]
        if not count.any():
            return
        pair = np.repeat(np.arange(len(i)), count)
        slot = np.arange(len(pair)) + (past - np.cumsum(count))[pair]
        row = local[pair]
        theta = (self.times[slot] - step.t[row]) / step.h[row]
        rows = self._device(row)
        stages = [k[rows] for k in step.stages]
        x = tableaus.interpolate(self.tableau, step.x0[rows], stages, step.h[row], theta)
        at_end = self._device(self.times[slot] == step.t1[row]).reshape(-1, 1, 1)
        x = torch.where(at_end, step.x1[rows], x)
        self.saves.put(slot * len(self.t) + i[pair], x)
        self.saved[i] = past

    @torch.no_grad()
    def _test_stop(self, i: Ints, x: Tensor, k: Tensor) -> None:
        if self.stop is None or not len(i):
            return
        met = self.stop(self._device(self.t[i]), x.detach(), k.detach(), self._device(i))
        check_tensor("stop", met, (len(i),), like=x.new_empty(0, dtype=torch.bool))
        self.met[i] = met.cpu().numpy()

    def result(self) -> BatchedResult:
        order = (self.accepted + self.rejected)[:, None] + np.arange(KEPT_STEPS)
        steps = np.take_along_axis(self.log, (order % KEPT_STEPS)[..., None], 1)
        x = self.saves.tensor().reshape(len(self.times), len(self.t), *self.x.shape[1:])
        arrays = (self.t, self.status, self.evaluations, self.accepted, self.rejected)
        rest = map(self._device, (*arrays, self.replayed, steps))
        return BatchedResult(x, self.ends.tensor(), *rest)


def _grid(times: Tensor | Sequence[float]) -> Floats:
    grid: Floats = torch.as_tensor(times, dtype=torch.float64).detach().cpu().numpy()
    if grid.ndim != 1 or len(grid) < 2:
        raise bad("times", "at least two times in one dimension", f"shape {grid.shape}")
    if not (np.isfinite(grid).all() and (np.diff(grid) > 0).all()):
        raise bad("times", "finite, strictly increasing times", grid.tolist())
    return grid
