"""`solve` with our own steppers: every sample steps on its own, and shortened steps are counted."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etdyn.solve.inner import InnerReport
from etdyn.solve.methods import Method
from etdyn.solve.observables import Recorder
from etdyn.solve.progress import TimeBar
from etdyn.solve.solution import Failure, Solution, Stats, Status, first_failure
from etdyn.solve.steppers import Stepper
from etdyn.solve.stopping import Stop
from etdyn.systems import System

__all__ = ["Stepping"]

KEPT_STEPS = 20  # last accepted steps that a failure shows
_REASONS = {
    Status.MAX_STEPS: "max_steps used",
    Status.NONFINITE: "the velocity is NaN or infinite",
    Status.DT_MIN: "no step, however short, solved the stepper's equation or lowered the energy",
}


@dataclass(frozen=True)
class Stepping:
    """One solve by a stepper.

    Every save interval is cut into equal steps of at most `method.step`. Where a step had to be
    shorter, its sample goes on from there with steps of at most that size.
    """

    system: System
    method: Method
    max_steps: int
    stop: Stop | None
    bar: TimeBar

    def solve(self, recorder: Recorder, x0: Tensor, times: Tensor) -> Solution:
        """Step every sample from times[0] until it ends."""
        run, when = _Run(self, x0, self.method.stepper(x0.device)), times.tolist()
        run.look()
        recorder.add(x0)
        for end in when[1:]:
            run.advance(end)
            gone = (run.t < end).to(x0.device)
            recorder.add(run.x.masked_fill(gone[:, None, None], torch.nan))
            self.bar.reach(end)
        run.status[run.going] = Status.FINISHED if self.stop is None else Status.MAX_TIME
        x, saved = recorder.result()
        stats = Stats(
            run.evaluations.cpu(), 0, run.accepted.cpu(), None, shrunk=run.shrunk.cpu(),
            inner=run.inner if bool(run.inner.methods[:, 1:].any()) else None,
        )  # fmt: skip
        return Solution(
            times.cpu(), x, run.status.to(torch.int8).cpu(), stats, self.system,
            failure=run.failure(), saved=saved, ends=(run.t.cpu(), run.x),
        )  # fmt: skip


class _Run:
    """The samples of a batch: where each one is, and what it has cost."""

    def __init__(self, job: Stepping, x0: Tensor, stepper: Stepper) -> None:
        batch, device = len(x0), x0.device
        self.job, self.stepper, self.x = job, stepper, x0
        self.t = torch.full((batch,), float(job.bar.start), dtype=torch.float64)
        self.status = torch.full((batch,), int(Status.INTERRUPTED))
        self.going = torch.ones(batch, dtype=torch.bool)
        self.evaluations, self.accepted, self.shrunk = torch.zeros(
            3, batch, dtype=torch.int64, device=device
        ).unbind()
        self.inner = InnerReport.empty(batch)
        self.last: list[list[tuple[float, float]]] = [[] for _ in range(batch)]

    def look(self) -> None:
        """End the samples that meet the stop."""
        stop, rows = self.job.stop, self.going.nonzero().flatten()
        if stop is None or not len(rows):
            return
        with torch.no_grad():
            index = rows.to(self.x.device)
            arrived = stop.arrived(self.job.system.select(index), self.x[index]).cpu()
        self.end(rows[arrived], Status.EQUILIBRIUM)

    def end(self, rows: Tensor, status: Status) -> None:
        """These samples stay where they are."""
        self.status[rows] = int(status)
        self.going[rows] = False

    def advance(self, end: float) -> None:
        """Every sample that still goes to the time `end`, or to its own end before."""
        if not bool(self.going.any()):
            return
        span = end - float(self.t[self.going][0])  # where they go on, they are together
        nominal = span / self.job.method.pieces(span)
        while len(rows := (self.going & (self.t < end)).nonzero().flatten()):
            out = rows[self.accepted.cpu()[rows] >= self.job.max_steps]
            if len(out):
                self.end(out, Status.MAX_STEPS)
                continue
            self.step(rows, end, nominal)
            self.look()

    def step(self, rows: Tensor, end: float, nominal: float) -> None:
        """One step of these samples, onto `end` where that is a rounding away."""
        left = end - self.t[rows]
        h = torch.where(left <= nominal * (1 + 1e-9), left, nominal)
        index = rows.to(self.x.device)
        local = self.job.system.select(index)
        report = self.stepper.step(local, self.x[index], h.to(self.x))
        self.x = self.x.index_copy(0, index, report.x)
        taken = report.taken.double().cpu()
        whole = ~report.shrunk.cpu() & (taken > 0)
        moved = torch.where(whole, h, taken)  # h in full precision, so that ends are met exactly
        self.t[rows] = torch.where(whole & (h == left), end, self.t[rows] + moved)
        self.evaluations[index] += report.evaluations
        self.accepted[index] += ~report.failed
        self.shrunk[index] += report.shrunk
        self.inner.note(rows, report.inner_residual, report.inner_method)
        for k, size in zip(rows.tolist(), moved.tolist(), strict=True):
            self.last[k] = [*self.last[k][1 - KEPT_STEPS :], (float(self.t[k]) - size, size)]
        failed = report.failed.cpu()
        if bool(failed.any()):
            force = local.force(self.x[index].detach()).flatten(1)
            broken = ~torch.isfinite(force).all(1).cpu()
            self.end(rows[failed & broken], Status.NONFINITE)
            self.end(rows[failed & ~broken], Status.DT_MIN)

    def failure(self) -> Failure | None:
        """What ended the first sample that failed."""
        return first_failure(
            self.status, self.t, _REASONS, lambda k: tuple(s for s in self.last[k] if s[1] > 0)
        )
