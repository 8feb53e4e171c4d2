"""Integration with one time and one step for the whole batch, by torchdiffeq."""

from __future__ import annotations

import torch
from torch import Tensor
from torchdiffeq import odeint_adjoint

from etdyn.solve.engine import Ended, Field, adjoint_options, grid, solver_options, states
from etdyn.solve.methods import Method
from etdyn.solve.observables import Recorder
from etdyn.solve.solution import Failure, Solution, Status

__all__ = ["solve_together"]


def solve_together(
    field: Field,
    recorder: Recorder,
    x0: Tensor,
    times: Tensor,
    *,
    method: Method,
    backsolve: bool,
) -> Solution:
    """Integrate from times[0]; `backsolve`: for torchdiffeq's adjoint gradient.

    An early end keeps every saved time before it and the last accepted state.
    """
    run = _backsolve if backsolve else _run
    reached, end = run(field, recorder, x0, times, method)
    field.backward_pass = True
    x, saved = recorder.result()
    done = Status.FINISHED if field.stop is None else Status.MAX_TIME
    status = torch.full((len(x0),), done, dtype=torch.int8)
    solution = Solution(reached.cpu(), x, status, field.stats, field.system, saved=saved)
    if end is not None:
        _mark(solution, end, field)
    return solution


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
            evaluations.append(int(field.stats.evaluations))
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


def _mark(solution: Solution, end: Ended, field: Field) -> None:
    """Statuses, and for a failure where and why."""
    everyone = tuple(range(len(solution.status)))
    solution.status.fill_(Status.INTERRUPTED)
    solution.status[list(end.samples or everyone)] = end.status
    if end.status == Status.EQUILIBRIUM:
        return
    at = float(solution.t[-1])
    steps = tuple(step for step in field.steps if step[0] < at)
    solution.failure = Failure(at, end.samples or everyone, end.reason, steps)
