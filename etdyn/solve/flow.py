"""`solve`: the flow of a System through torchdiffeq, validated and counted."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor
from torchdiffeq import odeint_adjoint

from etdyn.checks import bad, check_choice, check_count, check_finite
from etdyn.solve.engine import Ended, Field, adjoint_options, grid, solver_options, states
from etdyn.solve.methods import Method
from etdyn.solve.observables import Observable, Recorder
from etdyn.solve.progress import TimeBar
from etdyn.solve.solution import Failure, Solution, SolveError, Status, describe_system
from etdyn.solve.stopping import Stop
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
    stop: Stop | None = None,
    save: Sequence[Observable] | None = None,
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
        stop: end at equilibrium, tested after every accepted step (scipy_solver: at save times).
        save: observables to keep at the save times instead of the states, by name (see
            `named_observables`) or as functions of (system, x); they appear in `Solution.saved`.
        max_steps: attempted steps in the whole solve (for scipy_solver: evaluations).
        throw: raise `SolveError` on NONFINITE, DT_MIN and MAX_STEPS.
        progress: show a bar of the flow time; a string is its label.

    Returns:
        Solution. After an early end `t` and `x` hold every saved time before it and the last
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
    when = _check_times(times).to(x0.device)
    method.check_precision(x0.dtype)
    needs = gradient is not None and torch.is_grad_enabled() and _wants_gradient(system, x0)
    if needs and not method.differentiable:
        raise bad("gradient", f"None (no gradient passes through {method.name!r})", gradient)
    for name, value in (("stop", stop), ("save", save)):
        if needs and gradient == "backsolve" and value is not None:
            raise bad(name, 'none with gradient="backsolve"', value)
    recorder = Recorder(system, save)
    began = time.perf_counter()
    with torch.set_grad_enabled(needs), TimeBar(progress, when) as bar:
        field = Field(system, method, max_steps, stop, bar)
        run = _backsolve if needs and gradient == "backsolve" else _run
        reached, end = run(field, recorder, system.prepare(x0), when, method)
    field.stats.seconds = time.perf_counter() - began
    field.backward_pass = True
    status = torch.full((len(x0),), Status.FINISHED if stop is None else Status.MAX_TIME)
    config = {
        "method": method.describe(),
        "gradient": gradient,
        "stop": None if stop is None else vars(stop),
        "max_steps": max_steps,
        "system": describe_system(system),
    }
    x, saved = recorder.result()
    solution = Solution(
        reached.cpu(), x, status.to(torch.int8), field.stats, system, config, saved=saved
    )
    return solution if end is None else _end_early(solution, end, field, throw)


def _run(
    field: Field, recorder: Recorder, x0: Tensor, times: Tensor, method: Method
) -> tuple[Tensor, Ended | None]:
    """Fill the recorder; the times that it holds, and why it ended early (None: it did not)."""
    evaluations = field.stats.at_save_times
    try:
        field.reach(times[0], x0)
        recorder.add(x0)
        evaluations.append(0)
        for x in states(field, x0, times, method):
            recorder.add(x)
            evaluations.append(field.stats.evaluations)
        field.reach(times[-1], x)
    except Ended as end:
        t, x = field.last
        if recorder.count == 0:
            recorder.add(x)
        while recorder.count > 1 and bool(times[recorder.count - 1] > t):
            recorder.drop(x)  # a save time that a broken step reached
        reached = times[: recorder.count]
        if bool(t > reached[-1]):
            recorder.add(x)
            reached = torch.cat([reached, t.reshape(1)])
        return reached, end
    return times, None


def _backsolve(
    field: Field, recorder: Recorder, x0: Tensor, times: Tensor, method: Method
) -> tuple[Tensor, Ended | None]:
    """The same through torchdiffeq's adjoint, which keeps no graph."""
    forward, backward = solver_options(method, times), adjoint_options(method, times)
    if method.fixed_step:
        for options in (forward, backward):
            options["grid_constructor"] = lambda func, x, t: grid(method, t)
    try:
        found = odeint_adjoint(
            field, x0, times, method=method.name, rtol=method.rtol, atol=method.atol,
            options=forward, adjoint_options=backward,
        )  # fmt: skip
        field.reach(times[-1], found[-1])
    except Ended:
        field.restart()
        with torch.no_grad():  # again, to have what comes before the failure
            return _run(field, recorder, x0, times, method)
    for x in found:
        recorder.add(x)
    return times, None


def _end_early(solution: Solution, end: Ended, field: Field, throw: bool) -> Solution:
    """Statuses, and for a failure where and why."""
    everyone = tuple(range(len(solution.status)))
    solution.status.fill_(Status.INTERRUPTED)
    solution.status[list(end.samples or everyone)] = end.status
    if end.status == Status.EQUILIBRIUM:
        return solution
    samples = end.samples or everyone
    at = float(solution.t[-1])
    steps = tuple(step for step in field.steps if step[0] < at)
    solution.failure = Failure(at, samples, end.reason, steps)
    if throw:
        raise SolveError(solution)
    return solution


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
