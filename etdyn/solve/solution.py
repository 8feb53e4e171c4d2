"""What a solver returns: times, states, a status for every sample, and what it cost."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.checks import bad
from etdyn.solve.inner import InnerReport
from etdyn.systems import System

__all__ = [
    "BacksolveReport",
    "Failure",
    "GradientError",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "first_failure",
]


class Status(IntEnum):
    """How the integration of one sample ended."""

    FINISHED = 0  # the last time was reached
    MAX_STEPS = 1  # the step limit came first
    NONFINITE = 2  # the velocity or the state became NaN or infinite
    DT_MIN = 3  # the step fell below what the time can resolve
    INTERRUPTED = 4  # healthy, ended by another sample of its batch
    EQUILIBRIUM = 5  # the stop was met
    MAX_TIME = 6  # the last time was reached, the stop was not
    CONVERGED = 7  # an equilibrium solver met its tolerance


_MEANINGS = " ".join(s.name for s in Status)


class GradientError(RuntimeError):
    """A gradient that cannot be trusted, and so is not returned."""


@dataclass
class BacksolveReport:
    """What a backsolve did; complete once autograd has run.

    Attributes:
        anchors: states from which the backward pass started.
        drift: largest relative distance of a state integrated backwards from the stored one.
        probes: evaluations for the fastest rate, in the forward pass.
        rate: largest fastest rate met, per unit of flow time.
    """

    anchors: int = 0
    drift: float = 0.0
    probes: int = 0
    rate: float = 0.0


@dataclass
class Stats:
    """What a solve cost. One evaluation is one force per sample.

    Batched methods and steppers count for every sample: int64 `(batch,)` instead of a number.

    `backward` counts evaluations of the backsolve gradient and grows while autograd runs; the
    direct gradient makes none. `unconverged` counts implicit Adams steps whose corrector gave up:
    such a solution needs a smaller step. `shrunk` counts steps that a stepper had to shorten, and
    `inner` how it solved its equations. `at_save_times` holds the evaluations until each saved
    time. A method that does not report its steps has `None` there.
    """

    evaluations: int | Tensor = 0
    backward: int = 0
    accepted: int | Tensor | None = 0
    rejected: int | Tensor | None = 0
    unconverged: int = 0
    seconds: float = 0.0
    at_save_times: list[int] = field(default_factory=list)
    backsolve: BacksolveReport | None = None
    shrunk: Tensor | None = None
    inner: InnerReport | None = None


@dataclass(frozen=True)
class Failure:
    """Where and why a solve ended early: flow time, samples at fault, and the reason.

    `steps` are the last accepted steps, (time, size), as far as the method reports them.
    """

    time: float
    samples: tuple[int, ...]
    reason: str
    steps: tuple[tuple[float, float], ...] = ()


def first_failure(
    status: Tensor,
    t_end: Tensor,
    reasons: Mapping[Status, str],
    steps: Callable[[int], tuple[tuple[float, float], ...]],
) -> Failure | None:
    """The first failure in time, with all samples that failed in the same way.

    status, t_end: `(batch,)`; reasons: of the statuses that are failures; steps: the last accepted
    ones of a sample.
    """
    failed = [k for k, s in enumerate(status.tolist()) if s in reasons]
    if not failed:
        return None
    first = min(failed, key=lambda k: float(t_end[k]))
    how = Status(int(status[first]))
    same = tuple(k for k in failed if int(status[k]) == how)
    return Failure(float(t_end[first]), same, reasons[how], steps(first))


class SolveError(RuntimeError):
    """A solve ended with a bad status; `solution` holds everything computed until then."""

    def __init__(self, solution: Solution) -> None:
        assert solution.failure is not None
        names = sorted({Status(s).name for s in solution.status.tolist()})
        super().__init__(
            f"{'/'.join(names)} at t = {solution.failure.time:.6g} in samples "
            f"{list(solution.failure.samples)}: {solution.failure.reason}. The exception's "
            "`solution` ends at the last good state; throw=False returns it instead."
        )
        self.solution = solution

    def __reduce__(self) -> tuple[type[SolveError], tuple[Solution]]:
        return SolveError, (self.solution,)


@dataclass
class Solution:
    """A trajectory and how it came about.

    Attributes:
        t: float64 `(time,)`, dimensionless flow time.
        x: `(time, batch, token, feature)`, the states at `t`; only the last one,
            `(1, batch, token, feature)`, where observables were saved instead.
        saved: observables by name, `(time, ...)`, where they were asked for.
        status: int8 `(batch,)`, values of `Status`.
        stats: what it cost.
        system: what moved; the observables of `to_xarray` come from it.
        config: method, system and arguments, as JSON can hold them.
        failure: where and why, when it ended early.
        ends: `t_end` and `x_end` where samples end each at its own time (batched methods).
    """

    t: Tensor
    x: Tensor
    status: Tensor
    stats: Stats
    system: System
    config: dict[str, Any] = field(default_factory=dict)
    failure: Failure | None = None
    saved: dict[str, Tensor] = field(default_factory=dict)
    ends: tuple[Tensor, Tensor] | None = None

    @property
    def t_end(self) -> Tensor:
        """Every sample's last time, float64 `(batch,)`."""
        return self.t[-1].expand(len(self.status)) if self.ends is None else self.ends[0]

    @property
    def x_end(self) -> Tensor:
        """Every sample's last state, `(batch, token, feature)`."""
        return self.x[-1] if self.ends is None else self.ends[1]

    @torch.no_grad()
    def to_xarray(self, states: bool = True, relative: bool = False) -> xr.Dataset:
        """The trajectory as a labelled dataset (schema "etdyn.solution/1").

        Args:
            states: keep x; without, only the observables stay.
            relative: energies without their zero-weight constant.

        Returns:
            Dataset with dims time, sample, token, feature and variables `x`, `energy`,
            `energy_<term>`, `interaction_energy`, `dissipation`, `residual`, `clock` (the mean
            over tokens of the intrinsic time tau, on straight paths between saved states),
            `status`. All are dimensionless. No energies where there are none.
        """
        values = self._saved_arrays() if self.saved else self._observables(relative)
        dims = ("time", "sample", "token", "feature")
        data: dict[str, Any] = {n: (dims[: v.ndim], v, {"units": "1"}) for n, v in values.items()}
        data["status"] = (
            ("sample",),
            self.status.cpu().numpy(),
            {"flag_values": [int(s) for s in Status], "flag_meanings": _MEANINGS},
        )
        data["t_end"] = (("sample",), self.t_end.numpy(), {"units": "1"})
        for name in ("evaluations", "accepted", "rejected", "shrunk"):
            if isinstance(count := getattr(self.stats, name), Tensor):
                data[name] = (("sample",), count.numpy())
        if states and not self.saved:
            data["x"] = (dims, self.x.detach().cpu().numpy(), {"units": "1"})
        attrs = store.provenance("etdyn.solution/1", self._config(relative), self.x)
        coords = {
            "time": ("time", self.t.numpy(), {"units": "1", "long_name": "flow time"}),
            "sample": np.arange(self.x.shape[1]),
        }
        return xr.Dataset(data, coords, attrs)

    def _saved_arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays = {}
        for name, value in self.saved.items():
            if value.ndim > 4 or value.shape[:2] != (len(self.t), len(self.status)):
                raise bad(
                    "save", "observables (batch[, token[, feature]])", f"{name!r} of other shape"
                )
            arrays[name] = value.detach().cpu().numpy()
        return arrays

    def _observables(self, relative: bool) -> dict[str, npt.NDArray[Any]]:
        columns: dict[str, list[Tensor]] = {}
        clock = torch.zeros_like(self.x[0, :, 0, 0])
        for k, x in enumerate(self.x.detach()):
            if k > 0:
                dt = float(self.t[k] - self.t[k - 1])
                gained = self.system.elapsed_clock(self.x[k - 1].detach(), x, dt)
                clock = clock + self.system.token_mean(gained)
            for name, value in (self._observe(x, relative) | {"clock": clock}).items():
                columns.setdefault(name, []).append(value)
        return {name: torch.stack(column).cpu().numpy() for name, column in columns.items()}

    def save(self, path: str | os.PathLike[str], states: bool = True) -> None:
        """Write `to_xarray(states)` to a zarr store, atomically; read it with `etdyn.load`."""
        store.save(self.to_xarray(states), path)

    def _observe(self, x: Tensor, relative: bool) -> dict[str, Tensor]:
        values = {"residual": self.system.residual(x)}
        if not self.system.has_energy:
            return values
        terms = self.system.energies(x, relative)
        return {
            "energy": torch.stack(list(terms.values())).sum(0),
            **{f"energy_{name}": value for name, value in terms.items()},
            "interaction_energy": self.system.interaction_energy(x, relative),
            "dissipation": self.system.dissipation(x),
            **values,
        }

    def _config(self, relative: bool) -> dict[str, Any]:
        config = {**self.config, "relative_energies": relative, "stats": _plain(vars(self.stats))}
        if self.failure is not None:
            config["failure"] = vars(self.failure)
        return config


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.tolist()
        if isinstance(value, InnerReport):
            return value.describe()
        return vars(value) if isinstance(value, BacksolveReport) else value

    return {k: plain(v) for k, v in values.items()}


def describe_system(system: System) -> dict[str, Any]:
    """A system as JSON can hold it: class, dynamics, arguments where it knows them, parts, masks.

    The parts are as `print` shows them, a graph with its numbers of nodes and edges.
    """
    return {
        "class": type(system).__name__,
        "dynamics": system.dynamics,
        "config": getattr(system, "config", None),
        "lagrangian": repr(system.lagrangian),
        "interaction": {name: repr(term) for name, term in system.interaction.terms().items()},
        "masks": system.masks,
    }
