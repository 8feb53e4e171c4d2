"""`solve`: the flow of a System through torchdiffeq, validated, counted and never thrown away.

torchdiffeq's own habits that are set right here (A-F11, A-F13): errors are measured as the
largest per-sample RMS, so that a batch does not dilute a hard sample; fixed-step grids meet every
save time; the step limit counts the whole solve; and a failure ends with a status, its time, the
sample and every state until then.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torchdiffeq import odeint, odeint_adjoint
from tqdm import tqdm

from etdyn.checks import bad, check_choice, check_count, check_finite
from etdyn.solve.methods import Method
from etdyn.solve.solution import Failure, Solution, SolveError, Stats, Status, describe_system
from etdyn.systems import System

__all__ = ["solve"]


def solve(
    system: System,
    x0: Tensor,
    times: Tensor | Sequence[float],
    method: str | Method = "dopri5",
    *,
    step: float | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-8,
    gradient: str | None = "direct",
    max_steps: int = 100_000,
    throw: bool = True,
    progress: bool | str = False,
) -> Solution:
    """Integrate dx/dt = system.velocity(t, x) from times[0] and save the states at `times`.

    Args:
        system: what moves.
        x0: start, `(batch, token, feature)`; under the sphere dynamics it is normalised first.
        times: increasing flow times, at least two; the first is the start's.
        method: a name from `available_methods()`, or a `Method`, which carries its own step,
            tolerances and options.
        step: of a fixed-step method.
        rtol, atol: of an adaptive one; the error is the largest per-sample RMS.
        gradient: "direct" differentiates the solver's own operations; "backsolve" integrates the
            adjoint equation backwards with constant memory, and restarts from the saved states,
            so save times must be dense where the flow contracts (A-F9); None keeps no graph.
        max_steps: attempted steps in the whole solve (for scipy_solver: evaluations).
        throw: raise `SolveError` on NONFINITE, DT_MIN and MAX_STEPS.
        progress: show a bar of the flow time; a string is its label.

    Returns:
        Solution. After a failure `t` and `x` hold every saved time before it and the last
        accepted state.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
        SolveError: see throw.
    """
    if isinstance(method, str):
        method = Method(method, step, rtol, atol)
    elif step is not None:
        raise bad("step", "none beside a Method, which has its own", step)
    if gradient is not None:
        check_choice("gradient", gradient, ("direct", "backsolve"))
    check_count("max_steps", max_steps)
    system.check(x0, "x0")
    check_finite("x0", x0)
    grid = _check_times(times).to(x0.device)
    needs = gradient is not None and torch.is_grad_enabled() and _wants_gradient(system, x0)
    if needs and not method.differentiable:
        raise bad("gradient", f"None (no gradient passes through {method.name!r})", gradient)
    field = _Field(system, method, max_steps)
    began = time.perf_counter()
    with torch.set_grad_enabled(needs), _Bar(progress, grid) as field.bar:
        x, reached, stop = _run(field, system.prepare(x0), grid, method, gradient)
    field.stats.seconds = time.perf_counter() - began
    field.backward_pass = True
    solution = Solution(
        reached.cpu(), x, torch.zeros(len(x0), dtype=torch.int8), field.stats, system,
        {
            "method": method.describe(),
            "gradient": gradient,
            "max_steps": max_steps,
            "system": describe_system(system),
        },
    )  # fmt: skip
    if stop is not None:
        solution.status.fill_(Status.INTERRUPTED if stop.samples else stop.status)
        solution.status[list(stop.samples)] = stop.status
        samples = stop.samples or tuple(range(len(x0)))
        solution.failure = Failure(float(reached[-1]), samples, stop.reason)
        if throw:
            raise SolveError(solution)
    return solution


class _Stop(Exception):  # noqa: N818  # a signal out of torchdiffeq's loop, not an error
    def __init__(self, status: Status, reason: str, samples: tuple[int, ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.reason, self.samples = status, reason, samples


class _Bar:
    """Progress in flow time."""

    def __init__(self, progress: bool | str, times: Tensor) -> None:
        label = progress if isinstance(progress, str) else "solve"
        self.start, self.end = float(times[0]), float(times[-1])
        layout = "{desc}: {percentage:3.0f}%|{bar}| t = {n:.3g} of {total:.3g} [{elapsed}]"
        self.bar = tqdm(
            total=self.end - self.start, desc=label, disable=not progress, bar_format=layout
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def reach(self, t: float) -> None:
        """Move to flow time t."""
        if not self.bar.disable:
            self.bar.update(max(0.0, min(t, self.end) - self.start - self.bar.n))


class _Field(nn.Module):
    """The right-hand side as torchdiffeq sees it; counts, and stops what cannot go on."""

    def __init__(self, system: System, method: Method, max_steps: int) -> None:
        super().__init__()
        self.system, self.max_steps = system, max_steps
        reports = "callback_step" in method.callbacks
        self.stats = Stats() if reports else Stats(accepted=None, rejected=None)
        self.last: tuple[Tensor, Tensor] | None = None
        self.attempts = 0
        self.bar: _Bar | None = None
        self.backward_pass = self.replay = False
        # torchdiffeq warns about callbacks that a solver does not call, so set no others.
        for name in method.callbacks:
            setattr(self, name, getattr(self, "_" + name))
        self.can_reject = "callback_reject_step" in method.callbacks
        self.broken: _Stop | None = None
        self.retries = 0  # rejected steps since the last accepted one

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        v = self.system.velocity(t, x)
        if self.backward_pass:
            self.stats.backward += 1
        elif not self.replay:
            self.stats.evaluations += 1
            if self.stats.accepted is None and self.stats.evaluations > self.max_steps:
                raise _Stop(Status.MAX_STEPS, f"max_steps = {self.max_steps} evaluations used")
        broken = _broken_samples(v)
        if not broken:
            return v
        self.broken = _Stop(Status.NONFINITE, "the velocity is NaN or infinite", broken)
        if self.last is None or not self.can_reject:
            raise self.broken
        # A NaN would make torchdiffeq's next step zero; a huge velocity makes it reject this one.
        return torch.full_like(v, torch.finfo(v.dtype).max ** 0.5)

    def _callback_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        if broken := _broken_samples(x):
            raise _Stop(Status.NONFINITE, "the state is NaN or infinite", broken)
        t = t.detach()
        self.last = (t, x)
        if self.replay:
            return
        if self.bar is not None:
            self.bar.reach(float(t))
        if self.broken is not None and (self.retries > 25 or not bool(t + dt > t)):
            raise self.broken
        self.broken = None
        if self.attempts >= self.max_steps:
            raise _Stop(Status.MAX_STEPS, f"max_steps = {self.max_steps} used")
        if not bool(t + dt > t):
            raise _Stop(Status.DT_MIN, f"the step fell to {float(dt):.3g}")
        self.attempts += 1
        if not self.can_reject and self.stats.accepted is not None:
            self.stats.accepted += 1

    def _callback_accept_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        self.retries = 0
        self.stats.accepted = (self.stats.accepted or 0) + (not self.replay)

    def _callback_reject_step(self, t: Tensor, x: Tensor, dt: Tensor) -> None:
        self.retries += 1
        self.stats.rejected = (self.stats.rejected or 0) + (not self.replay)


def _run(
    field: _Field, x0: Tensor, times: Tensor, method: Method, gradient: str | None
) -> tuple[Tensor, Tensor, _Stop | None]:
    """States, the times they belong to, and why it ended early (None: it did not)."""
    try:
        return (
            _integrate(field, x0, times, times[-1:], method=method, gradient=gradient),
            times,
            None,
        )
    except _Stop as stop:
        # Steps do not depend on the save times ahead, so a second run up to the last accepted
        # time gives the same states, this time to keep.
        reason = stop
    if field.last is None or not bool(field.last[0] > times[0]):
        return x0.unsqueeze(0), times[:1], reason
    good, state = field.last[0], field.last[1].detach()
    field.replay = True
    kept = torch.cat([times[times < good], good.reshape(1)])
    x = _integrate(field, x0, kept, times[-1:], method=method, gradient=gradient)
    if gradient != "direct":
        x[-1] = state
    return x, kept, reason


def _integrate(
    field: _Field, x0: Tensor, times: Tensor, end: Tensor, *, method: Method, gradient: str | None
) -> Tensor:
    options: dict[str, Any] = dict(method.options)
    if method.fixed_step:
        options["grid_constructor"] = _Grid(method)
        if method.multistep:
            options.setdefault("max_order", 5)  # 12, the library's default, diverges (A-F13)
    elif method.differentiable:
        options["norm"] = _largest_rms
        options["step_t"] = end  # no evaluation beyond it
    arguments: dict[str, Any] = {
        "method": method.name, "rtol": method.rtol, "atol": method.atol, "options": options,
    }  # fmt: skip
    if gradient == "backsolve" and torch.is_grad_enabled():
        adjoint = {k: v for k, v in options.items() if k != "step_t"}
        if not method.fixed_step:
            adjoint["norm"] = "seminorm"
        x: Tensor = odeint_adjoint(field, x0, times, adjoint_options=adjoint, **arguments)
    else:
        x = odeint(field, x0, times, **arguments)
    if len(x) < len(times):
        raise _Stop(Status.DT_MIN, f"scipy gave up after {len(x)} of {len(times)} times")
    if broken := _broken_samples(x[-1]):
        raise _Stop(Status.NONFINITE, "the state is NaN or infinite", broken)
    return x


class _Grid:
    """Times of the steps: every save interval cut into equal steps of at most `method.step`."""

    def __init__(self, method: Method) -> None:
        self.method = method

    def __call__(self, func: object, x0: Tensor, times: Tensor) -> Tensor:
        step = self.method.step
        assert step is not None
        pieces = [times[:1]]
        for a, b in zip(times[:-1].tolist(), times[1:].tolist(), strict=True):
            ratio = abs(b - a) / step
            count = max(1, math.ceil(ratio * (1 - 1e-12)))
            if self.method.multistep and abs(ratio - round(ratio)) > 1e-9 * ratio:
                raise bad(
                    "times", f"intervals that are multiples of step = {step}, "
                    f"which the multistep method {self.method.name!r} needs", b - a,
                )  # fmt: skip
            pieces.append(torch.linspace(a, b, count + 1, dtype=times.dtype)[1:].to(times.device))
        return torch.cat(pieces)


def _largest_rms(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(1).max().sqrt()


def _broken_samples(x: Tensor) -> tuple[int, ...]:
    finite = torch.isfinite(x)
    if bool(finite.all()):
        return ()
    return tuple((~finite).flatten(1).any(1).nonzero().flatten().tolist())


def _check_times(times: Tensor | Sequence[float]) -> Tensor:
    grid = torch.as_tensor(times, dtype=torch.float64).detach()
    if grid.ndim != 1 or len(grid) < 2:
        raise bad("times", "at least two times in one dimension", f"shape {tuple(grid.shape)}")
    if not bool(torch.isfinite(grid).all()):
        raise bad("times", "finite times", "NaN or infinity")
    if not bool((grid[1:] > grid[:-1]).all()):
        raise bad("times", "strictly increasing times", grid.tolist())
    return grid


def _wants_gradient(system: System, x0: Tensor) -> bool:
    return x0.requires_grad or any(p.requires_grad for p in system.parameters())
