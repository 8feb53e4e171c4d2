"""Integration with one time and one step for the whole batch, by torchdiffeq."""

from __future__ import annotations

import torch
from torch import Tensor

from etdyn.solve.backsolve import AnchorLog, BacksolveReport, backsolve
from etdyn.solve.checkpointing import StepLog, replay
from etdyn.solve.engine import Ended, Field, solver_options, states
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
    gradient: str | None,
) -> Solution:
    """Integrate from times[0]; `gradient` as in `solve`, None where none is wanted.

    An early end keeps every saved time before it and the last accepted state. "checkpoint" and
    "backsolve" integrate without a graph first, and hang their gradient on what came out.
    """
    if gradient in (None, "direct"):
        reached, end = _run(field, recorder, x0, times, method)
        x, saved = recorder.result()
        field.backward_pass = True
    else:
        hang = _checkpoint if gradient == "checkpoint" else _backsolve
        x, reached, end = hang(field, recorder, x0, times, method)
        saved = {}
    status = torch.full((len(x0),), Status.FINISHED, dtype=torch.int8)
    if field.stop is not None and end is None:
        status = torch.where(field.arrived.cpu(), int(Status.EQUILIBRIUM), int(Status.MAX_TIME))
        status = status.to(torch.int8)
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
        del evaluations[len(reached) :]
        evaluations += [int(field.stats.evaluations)] * (len(reached) - len(evaluations))
        return reached, end
    return times, None


def _checkpoint(
    field: Field, recorder: Recorder, x0: Tensor, times: Tensor, method: Method
) -> tuple[Tensor, Tensor, Ended | None]:
    """States, their times and why it ended, with the gradient of a replay in segments."""
    log = StepLog(method)
    log.attach(field)
    with torch.no_grad():
        reached, end = _run(field, recorder, x0, times, method)
    x, _ = recorder.result()
    if len(reached) == 1:
        return x0.unsqueeze(0), reached, end
    field.backward_pass = True
    options = solver_options(field.system, method, times)
    x = replay(field, x0, reached, method, log, options=options, expected=x)
    return x, reached, end


def _backsolve(
    field: Field, recorder: Recorder, x0: Tensor, times: Tensor, method: Method
) -> tuple[Tensor, Tensor, Ended | None]:
    """The same with the gradient of the adjoint equation, restarted at anchors."""
    report = field.stats.backsolve = BacksolveReport()
    anchors = AnchorLog(field.system.velocity, method, report=report)
    anchors.attach(field)
    with torch.no_grad():
        reached, end = _run(field, recorder, x0, times, method)
    x, _ = recorder.result()
    if len(reached) == 1:
        return x0.unsqueeze(0), reached, end
    field.stats.evaluations += report.probes
    field.backward_pass = True
    x = backsolve(
        field, x0, reached, x, method=method, anchors=anchors, max_steps=field.max_steps,
        report=report,
    )  # fmt: skip
    return x, reached, end


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
