"""Integration in which every sample has its own time, step and end: the batched methods."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etdyn.solve.batched import BatchedResult, integrate_batched
from etdyn.solve.methods import Method
from etdyn.solve.observables import Recorder
from etdyn.solve.progress import TimeBar
from etdyn.solve.solution import Failure, Solution, Stats, Status, first_failure
from etdyn.solve.stopping import Stop
from etdyn.solve.tableaus import TABLEAUS
from etdyn.systems import System

__all__ = ["PerSample"]

_REASONS = {
    Status.MAX_STEPS: "max_steps used",
    Status.NONFINITE: "the velocity is NaN or infinite",
    Status.DT_MIN: "the step fell below what the time can resolve",
}


@dataclass(frozen=True)
class PerSample:
    """One solve by a batched method."""

    system: System
    method: Method
    max_steps: int
    stop: Stop | None
    bar: TimeBar

    def solve(self, recorder: Recorder, x0: Tensor, times: Tensor) -> Solution:
        """Integrate every sample from times[0] until it ends."""
        result = integrate_batched(
            self._velocity, x0, times.cpu(), TABLEAUS[self.method.name.removeprefix("batched_")],
            rtol=self.method.rtol, atol=self.method.atol, max_steps=self.max_steps,
            stop=None if self.stop is None else self._arrived, tokens=self.system._tokens,
            **self.method.options,
        )  # fmt: skip
        for x in result.x:
            recorder.add(x)
        x, saved = recorder.result()
        status = result.status.cpu()
        if self.stop is not None:
            status = torch.where(status == Status.FINISHED, int(Status.MAX_TIME), status)
        stats = Stats(result.evaluations.cpu(), 0, result.accepted.cpu(), result.rejected.cpu())
        return Solution(
            times.cpu(), x, status.to(torch.int8), stats, self.system, failure=_failure(result),
            saved=saved, ends=(result.t_end.cpu(), result.x_end),
        )  # fmt: skip

    def _velocity(self, t: Tensor, x: Tensor, index: Tensor) -> Tensor:
        self.bar.reach(float(t.min()))
        return self.system.select(index).velocity(t, x)

    def _arrived(self, t: Tensor, x: Tensor, velocity: Tensor, index: Tensor) -> Tensor:
        assert self.stop is not None
        return self.stop.arrived(self.system.select(index), x)


def _failure(result: BatchedResult) -> Failure | None:
    def steps(sample: int) -> tuple[tuple[float, float], ...]:
        return tuple((t, h) for t, h, _, good in result.steps[sample].tolist() if good == 1)

    return first_failure(result.status, result.t_end, _REASONS, steps)
