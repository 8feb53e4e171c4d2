"""torchdiffeq's solvers, driven one save time at a time, so that nothing computed is lost.

What is set right on the way (A-F11, A-F13): errors are measured as the largest per-sample RMS over
the tokens that exist, so that neither a batch nor padding dilutes a hard sample; fixed-step grids
meet every save time; no evaluation lies beyond the end; a NaN in a trial step rejects it instead
of making the next step zero.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchdiffeq._impl.misc import _check_inputs
from torchdiffeq._impl.odeint import SOLVERS

from etdyn.checks import bad
from etdyn.solve.methods import Method
from etdyn.solve.progress import TimeBar
from etdyn.solve.solution import Stats, Status
from etdyn.solve.stopping import Stop
from etdyn.systems import System

__all__ = ["Ended", "Field", "solver_options", "states"]

_MOST_RETRIES = 25  # of a step that meets NaN; each is a fifth of the last


class Ended(Exception):  # noqa: N818  # a signal out of a solver's loop, not an error
    """The solve ends here: why, and which samples are the reason (none: all of them)."""

    def __init__(self, status: Status, reason: str, samples: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.reason, self.samples = status, reason, samples


class Field(nn.Module):
    """The right-hand side as torchdiffeq sees it; counts, and stops what cannot go on."""

    def __init__(
        self, system: System, method: Method, max_steps: int, stop: Stop | None, bar: TimeBar
    ) -> None:
        super().__init__()
        self.system, self.max_steps, self.stop, self.bar = system, max_steps, stop, bar
        reports = "callback_step" in method.callbacks
        self.stats = Stats() if reports else Stats(accepted=None, rejected=None)
        self.backward_pass = False
        self.restart()
        self.can_reject = "callback_reject_step" in method.callbacks
        # torchdiffeq warns about callbacks that a solver does not call, so set no others.
        for name in method.callbacks:
            setattr(self, name, getattr(self, "_" + name))

    def restart(self) -> None:
        """Forget a run, but not what never changes."""
        none = None if self.stats.accepted is None else 0
        self.stats.evaluations, self.stats.accepted, self.stats.rejected = 0, none, none
        self.attempts = 0
        self.retries = 0  # rejected steps since the last accepted one
        self.started = False
        self.steps: deque[tuple[float, float]] = deque(maxlen=20)  # the last accepted ones
        self.stats.at_save_times.clear()
        self.broken: Ended | None = None

    last: tuple[Tensor, Tensor]
    """The latest accepted time and state."""
    arrived: Tensor
    """Which samples meet the stop there."""

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        """The velocity."""
        v = self.system.velocity(t, x)
        if self.backward_pass:
            self.stats.backward += 1
        else:
            self.stats.evaluations += 1
            if self.stats.accepted is None and self.stats.evaluations > self.max_steps:
                raise Ended(Status.MAX_STEPS, f"max_steps = {self.max_steps} evaluations used")
        broken = _broken_samples(v)
        if not broken:
            self.started = True
            return v
        self.broken = Ended(Status.NONFINITE, "the velocity is NaN or infinite", broken)
        if not (self.started and self.can_reject):
            raise self.broken
        # A NaN would make torchdiffeq's next step zero; a huge velocity makes it reject this one.
        return torch.full_like(v, torch.finfo(v.dtype).max ** 0.5)

    def reach(self, t: Tensor, x: Tensor) -> None:
        """A new state at time t: end the solve where it is not finite, or has arrived."""
        if broken := _broken_samples(x):
            raise Ended(Status.NONFINITE, "the state is NaN or infinite", broken)
        self.last = (t, x)
        self.bar.reach(float(t))
        if self.stop is None:
            return
        with torch.no_grad():
            arrived = self.stop.arrived(self.system, x)
        self.stats.evaluations += 1
        self.arrived = arrived
        if self.stop.met(arrived):
            samples = tuple(arrived.nonzero().flatten().tolist())
            raise Ended(Status.EQUILIBRIUM, f"{self.stop} is met", samples)

    def _callback_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        t = t.detach()
        if self.retries == 0 and self.attempts > 0:
            self.reach(t, x)
        moves = bool(t + dt > t)
        if self.broken is not None and (self.retries > _MOST_RETRIES or not moves):
            raise self.broken
        self.broken = None
        if self.attempts >= self.max_steps:
            raise Ended(Status.MAX_STEPS, f"max_steps = {self.max_steps} used")
        if not moves:
            raise Ended(Status.DT_MIN, f"the step fell to {float(dt):.3g}")
        self.attempts += 1
        if not self.can_reject:
            self._callback_accept_step(t, x, dt)

    def _callback_accept_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        self.retries = 0
        self.steps.append((float(t.detach()), float(dt.detach())))
        self.stats.accepted = (self.stats.accepted or 0) + 1

    def _callback_reject_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        self.retries += 1
        self.stats.rejected = (self.stats.rejected or 0) + 1


def states(field: Field, x0: Tensor, times: Tensor, method: Method) -> Iterator[Tensor]:
    """Yield the states at times[1:] as they are reached; `Ended` when it goes no further."""
    options = solver_options(field.system, method, times)
    _, func, _, t, rtol, atol, _, options, _, _ = _check_inputs(
        field, x0, times, method.rtol, method.atol, method.name, options, None, SOLVERS
    )
    solver = SOLVERS[method.name](func=func, y0=x0, rtol=rtol, atol=atol, **options)
    if method.fixed_step:
        yield from _fixed_steps(field, solver, func, times, method)
    elif not method.differentiable:
        yield from _scipy_states(field, solver, times)
    else:
        t = times.to(solver.dtype)
        solver._before_integrate(t)
        for end in t[1:]:
            yield solver._advance(end)


def solver_options(system: System, method: Method, times: Tensor) -> dict[str, Any]:
    """The options that torchdiffeq's solver gets, the user's and ours."""

    def largest_rms(x: Tensor) -> Tensor:
        return system.token_mean(x.square().mean(-1)).max().sqrt()

    options: dict[str, Any] = dict(method.options)
    if method.multistep:
        options.setdefault("max_order", 5)  # 12, the library's default, diverges (A-F13)
        options.setdefault("max_iters", 20)  # 4 may not converge, and then it drops its history
    elif not method.fixed_step and method.differentiable:
        options["norm"] = largest_rms
        options["step_t"] = times[-1:]
    return options


def grid(method: Method, times: Tensor) -> Tensor:
    """Times of the steps: every save interval cut into equal steps of at most `method.step`."""
    step, pieces = method.step, [times[:1]]
    assert step is not None
    for a, b in itertools.pairwise(times.tolist()):
        ratio = abs(b - a) / step
        if method.multistep and abs(ratio - round(ratio)) > 1e-9 * ratio:
            raise bad(
                "times", f"intervals that are multiples of step = {step}, "
                f"which the multistep method {method.name!r} needs", b - a,
            )  # fmt: skip
        ends = torch.linspace(a, b, method.pieces(b - a) + 1, dtype=times.dtype)[1:]
        pieces.append(ends.to(times.device))
    return torch.cat(pieces)


def _fixed_steps(
    field: Field, solver: Any, func: Any, times: Tensor, method: Method
) -> Iterator[Tensor]:
    x, steps = solver.y0, grid(method, times)
    ends = iter(times[1:])
    end = next(ends)
    for t0, t1 in itertools.pairwise(steps):
        func.callback_step(t0, x, t1 - t0)
        if method.multistep:
            change = _adams_change(field, solver, func, (t0, t1), x)
        else:
            change, _ = solver._step_func(func, t0, t1 - t0, t1, x)
        x = x + change
        if t1 == end:
            yield x
            end = next(ends, end)


def _adams_change(
    field: Field, solver: Any, func: Any, span: tuple[Tensor, Tensor], x: Tensor
) -> Tensor:
    """One Adams step, whose corrector says by a warning that it gave up."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        t0, t1 = span
        change: Tensor = solver._step_func(func, t0, t1 - t0, t1, x)[0]
    for other in caught:
        if "did not converge" in str(other.message):
            field.stats.unconverged += 1
        else:
            warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    return change


def _scipy_states(field: Field, solver: Any, times: Tensor) -> Iterator[Tensor]:
    with warnings.catch_warnings():
        # torchdiffeq passes min_step to every method of scipy's
        warnings.filterwarnings("ignore", message="The following arguments have no effect")
        found = solver.integrate(times)
    for t, x in zip(times[1:], found[1:], strict=False):
        field.reach(t, x)
        yield x
    if len(found) < len(times):
        raise Ended(Status.DT_MIN, f"scipy gave up after {len(found)} of {len(times)} times")


def _broken_samples(x: Tensor) -> tuple[int, ...]:
    finite = torch.isfinite(x)
    if bool(finite.all()):
        return ()
    return tuple((~finite).flatten(1).any(1).nonzero().flatten().tolist())
