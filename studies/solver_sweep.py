"""Which solver, at which tolerance or step, in which precision?

Every method that is installed runs at every step size or tolerance, in float64 and float32, on
every task, against a reference that checks itself: errors in g, evaluations, relative times.

    python -m studies.solver_sweep --help
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import sys
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
import xarray as xr
from torch import Tensor
from tqdm import tqdm

import etdyn as ed
from etdyn import store
from etdyn.analysis.convergence import line
from etdyn.analysis.labels import flags, labelled
from etdyn.analysis.precision import reference_solution, work_precision
from etdyn.checks import bad, check_choice, check_count
from etdyn.report import format_table
from etdyn.solve import Method, Solution, Status, available_methods
from studies import solver_sweep_page as page
from studies.solver_sweep_tasks import TASKS, Task

SHIPPED = Path(__file__).parent.parent / "data" / "digits"
DTYPES = ("float64", "float32")
HARDER = 0.1  # the hard sample's scale: its clock, gamma / sigma, is ten times faster

STATUSES = {s.name: int(s) for s in Status} | {"REFUSED": 100, "RAISED": 101, "NOT_RUN": 102}
Outcome: Any = IntEnum("Outcome", STATUSES)  # type: ignore[misc]  # mypy wants a literal


@dataclass(frozen=True)
class Config:
    """Compare all methods at all settings, in two precisions, on several tasks."""

    name: str = "default"
    """Of the run; results go to runs/solver_sweep/<name>/."""
    runs: Path = Path("runs")
    """Where results go."""
    model: Path = SHIPPED
    """The trained model of the task `digits`."""
    tasks: tuple[str, ...] = ("digits", "softmax", "relu", "graph")
    """Flows to solve: digits, the trained model; softmax and relu, random systems; graph, one with
    attention over the edges of a graph."""
    methods: tuple[str, ...] = ()
    """Methods by name; none means all that are available."""
    dtypes: tuple[str, ...] = DTYPES
    """Precisions, float64 among them."""
    samples: int = 2
    """Held-out images, or random starts: one batch."""
    steps_per_horizon: tuple[int, ...] = (6, 12, 24, 48, 96)
    """Steps of the fixed-step methods, the published 12 among them."""
    tolerances: tuple[float, ...] = (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
    """rtol and atol of the adaptive methods; as many as there are step sizes."""
    max_steps: int = 600
    """Attempted steps of one solve."""
    dear: int = 400
    """Evaluations in one cell after which a method's finer settings are not run."""
    repeats: int = 3
    """Timed solves of a cell, for the median."""
    seed: int = 0
    """Of masks and random systems."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        for name in ("samples", "max_steps", "dear", "repeats", "threads"):
            check_count(name, getattr(self, name))
        for name, known in {
            "tasks": tuple(TASKS), "methods": available_methods(), "dtypes": DTYPES,
        }.items():  # fmt: skip
            for value in getattr(self, name):
                check_choice(name, value, known)
        if not self.tasks:
            raise bad("tasks", "at least one", self.tasks)
        if "float64" not in self.dtypes:
            raise bad("dtypes", "float64 among them", self.dtypes)
        steps, tolerances = np.array(self.steps_per_horizon), np.array(self.tolerances)
        if len(steps) < 3 or not (np.diff(steps, prepend=0) > 0).all():
            raise bad("steps_per_horizon", "three or more increasing counts", steps.tolist())
        falling = (np.diff(tolerances, prepend=1, append=0) < 0).all()
        if len(tolerances) != len(steps) or not falling:
            raise bad("tolerances", f"{len(steps)} decreasing numbers between 1 and 0, one for "
                      "each of steps_per_horizon", tolerances.tolist())  # fmt: skip

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / "solver_sweep" / self.name

    @property
    def solvers(self) -> tuple[str, ...]:
        """The methods that are compared."""
        return self.methods or available_methods()

    def record(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return asdict(self) | {"runs": str(self.runs), "model": str(self.model)}


# --- measurement -------------------------------------------------------------------------------


@dataclass
class Bench:
    """A task in one precision, with its reference."""

    config: Config
    task: Task
    dtype: torch.dtype
    reference: Solution

    def __post_init__(self) -> None:
        self.system = copy.deepcopy(self.task.system).to(self.dtype)

    def method(self, solver: str, setting: int) -> Method:
        """A method at one of its settings; correctors converge to rounding of the dtype."""
        if solver in available_methods(fixed_step=True):
            fine = 50 * torch.finfo(self.dtype).eps
            step = self.task.horizon / self.config.steps_per_horizon[setting]
            return Method(solver, step, rtol=fine, atol=fine)
        tolerance = self.config.tolerances[setting]
        return Method(solver, rtol=tolerance, atol=tolerance)

    def limit(self, solver: str) -> int:
        """max_steps, which scipy_solver counts in evaluations, six a step."""
        return self.config.max_steps * (6 if solver == "scipy_solver" else 1)

    def baseline(self) -> float:
        """Seconds of the published model in float64."""
        task, euler = self.task, Method("euler", self.task.step)
        run = ed.solve(task.system, task.x0, self.reference.t, euler, gradient=None)
        return run.stats.seconds

    def row(self, solver: str, bar: tqdm[Any]) -> xr.Dataset:
        """One method at all of its settings, until one is too dear."""
        cells: list[dict[str, Any]] = []
        baselines, too_dear = [], ""
        for k in range(len(self.config.tolerances)):
            baselines.append(self.baseline())
            if too_dear:
                cells.append(self.empty(Outcome["NOT_RUN"], too_dear))
            else:
                cells.append(self.cell(self.method(solver, k)))
                too_dear = self.too_dear(cells[-1])
            bar.update()
        found = {name: np.array([cell[name] for cell in cells]) for name in cells[0]}
        methods = [self.method(solver, k) for k in range(len(cells))]
        each = ("setting", "sample")
        data = {
            "error": labelled(each, found["error"], "distance in g, worst token"),
            "status": flags(each, found["status"], Outcome),
            "evaluations": labelled(each, found["evaluations"], "forces per sample"),
            "unconverged": labelled("setting", found["unconverged"], "correctors that gave up"),
            "seconds": ("setting", found["seconds"], {"units": "s", "long_name": "a solve's time"}),
            "baseline_seconds": ((), float(np.median(baselines)),
                                 {"units": "s", "long_name": "the published Euler's time"}),
            "step_or_rtol": labelled("setting", [m.step or m.rtol for m in methods],
                                     "step size or relative tolerance"),
            "reason": ("setting", found["reason"], {"long_name": "why a cell was not computed"}),
            "agreement": labelled((), self.reference.config["agreement"], "of two references"),
        }  # fmt: skip
        return xr.Dataset(data | self.hard(solver))

    def too_dear(self, cell: dict[str, Any]) -> str:
        """Why finer settings are not run; empty where they are."""
        if (cell["status"] == Status.MAX_STEPS).any():
            return "a coarser setting ran out of steps"
        if np.mean(cell["evaluations"]) > self.config.dear:
            return f"a coarser setting took more than {self.config.dear} evaluations"
        return ""

    def cell(self, method: Method) -> dict[str, Any]:
        """One solve: its errors and costs, or why there are none."""
        start = self.task.x0.to(self.dtype)
        try:
            found = work_precision(
                self.system, start, {method.name: [method]}, self.reference,
                repeats=self.config.repeats, max_steps=self.limit(method.name),
            ).isel(solver=0, setting=0)  # fmt: skip
        except (ValueError, TypeError) as problem:
            return self.empty(Outcome["REFUSED"], str(problem))
        except Exception as problem:  # a sweep outlives what a solver may raise
            return self.empty(Outcome["RAISED"], f"{type(problem).__name__}: {problem}")
        names = ("error", "status", "evaluations", "unconverged", "seconds")
        return {name: found[name].to_numpy() for name in names} | {"reason": ""}

    def empty(self, outcome: IntEnum, reason: str) -> dict[str, Any]:
        """A cell that was not computed."""
        samples = self.config.samples
        return {
            "error": np.full(samples, np.nan), "status": np.full(samples, int(outcome)),
            "evaluations": np.zeros(samples, int), "unconverged": 0, "seconds": np.nan,
            "reason": reason,
        }  # fmt: skip

    def hard(self, solver: str) -> dict[str, Any]:
        """The same batch with a hard last sample, at the published step's setting, in float64."""
        setting = self.config.steps_per_horizon.index(round(self.task.horizon / self.task.step))
        counts = np.full(self.config.samples, np.nan)
        start = harder(self.task.x0).to(self.dtype)
        if self.dtype == torch.float64:
            with contextlib.suppress(Exception):  # the reason stands in the cell without it
                run = ed.solve(self.system, start, self.reference.t, self.method(solver, setting),
                               gradient=None, max_steps=self.limit(solver),
                               throw=False)  # fmt: skip
                if run.failure is None:
                    counts[:] = run.stats.evaluations
        return {
            "hard_evaluations": labelled("sample", counts, "forces beside a hard sample"),
            "hard_setting": labelled((), setting, "index of the setting beside a hard sample"),
        }


def harder(x0: Tensor) -> Tensor:
    """The batch with its last sample shrunk."""
    scale = torch.ones_like(x0[:, :1, :1])
    scale[-1] = HARDER
    return x0 * scale


def sweep(config: Config, tasks: dict[str, Task]) -> xr.Dataset:
    """All rows, those of an interrupted run read from where it left them."""
    provenance = store.provenance("etdyn.solver_sweep.row/1", config.record(), torch.empty(0))
    rows: dict[tuple[str, str, str], xr.Dataset] = {}
    cells = len(config.tolerances) * len(config.dtypes) * len(config.solvers)
    with tqdm(total=cells * len(tasks)) as bar:
        for name, task in tasks.items():
            reference: Solution | None = None
            for dtype in config.dtypes:
                for solver in config.solvers:
                    path = config.folder / "rows" / f"{name}-{dtype}-{solver}.zarr"
                    row = left_over(path, provenance)
                    if row is None:
                        bar.set_description(f"{name} reference")
                        reference = reference or reference_solution(
                            task.system, task.x0, [0.0, task.horizon], task.agreement
                        )
                        bar.set_description(f"{name} {dtype} {solver}")
                        bench = Bench(config, task, getattr(torch, dtype), reference)
                        row = bench.row(solver, bar).assign_attrs(provenance)
                        ed.save(row, path)
                    else:
                        bar.update(len(config.tolerances))
                    rows[name, dtype, solver] = row
    return joined(rows, config)


def left_over(path: Path, provenance: dict[str, Any]) -> xr.Dataset | None:
    """A row that an interrupted run of the same code and configuration measured."""
    if not path.exists():
        return None
    row = ed.load(path)
    same = ("etdyn_config", "versions", "git_revision")
    fits = all(row.attrs[key] == provenance[key] for key in same)
    return row if fits and isinstance(row, xr.Dataset) else None


def joined(rows: dict[tuple[str, str, str], xr.Dataset], config: Config) -> xr.Dataset:
    """One dataset of all rows, dims task, dtype, solver, setting and sample; with slopes."""
    axes = (config.tasks, config.dtypes, config.solvers)
    first = next(iter(rows.values()))
    data: dict[str, Any] = {}
    for name, variable in first.data_vars.items():
        stacked = np.array([[[rows[t, d, s][name].to_numpy() for s in axes[2]] for d in axes[1]]
                            for t in axes[0]])  # fmt: skip
        data[str(name)] = (("task", "dtype", "solver", *variable.dims), stacked, variable.attrs)
    coords = dict(zip(("task", "dtype", "solver"), map(list, axes), strict=True))
    result = xr.Dataset(data, {**coords, "sample": np.arange(config.samples)})
    result["family"] = ("solver", [family(s) for s in config.solvers])
    result["relative_time"] = (result["seconds"] / result["baseline_seconds"]).assign_attrs(
        units="1", long_name="time over that of the published Euler model in float64"
    )
    result["slope"] = slopes(result)
    return result


def family(solver: str) -> str:
    """How a method steps."""
    method = Method(solver, 0.1 if solver in available_methods(fixed_step=True) else None)
    if method.per_sample:
        return "adaptive, per sample"
    if not method.fixed_step:
        return "adaptive, shared step"
    plain = method.differentiable and not method.multistep
    return "fixed step" if plain else "multistep, implicit"


def slopes(result: xr.Dataset) -> xr.DataArray:
    """Slope of log error over log setting, from the three finest settings that tell one.

    Errors must be above ten agreements, and below `FAR`, where they saturate.
    """
    error = result["error"]
    error = error.where((error > 10 * result["agreement"]) & (error < page.FAR))

    def fit(errors: Any, settings: Any) -> float:
        good = np.flatnonzero(np.isfinite(errors))[-3:]
        if len(good) < 3:
            return float("nan")
        return line(np.log(settings[good]), np.log(errors[good]))[0]

    found: xr.DataArray = xr.apply_ufunc(
        fit, error, result["step_or_rtol"], input_core_dims=[["setting"]] * 2, vectorize=True
    )
    return found.assign_attrs(units="1", long_name="order, or response to the tolerance")


def main(config: Config) -> None:
    """Run the study and write its report."""
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    tasks = {name: TASKS[name](config.model, config.samples, config.seed) for name in config.tasks}
    for name, task in tasks.items():
        steps = round(task.horizon / task.step)
        if steps not in config.steps_per_horizon:
            raise bad("steps_per_horizon", f"{steps}, the published steps of {name}, among them",
                      config.steps_per_horizon)  # fmt: skip
    result = sweep(config, tasks)
    about = {
        name: {"about": task.about, "horizon": task.horizon, "step": task.step,
               "asked_agreement": task.agreement}
        for name, task in tasks.items()
    }  # fmt: skip
    record = {"study": config.record(), "tasks": about, "hard_scale": HARDER}
    result.attrs = store.provenance("etdyn.study.solver_sweep/1", record, tasks[config.tasks[0]].x0)
    print("\n" + format_table(*page.recommendations(result)) + "\n")
    path = page.report(result).write(config.folder, record, xr.DataTree(result))
    shutil.rmtree(config.folder / "rows")
    print("\n".join(page.findings(result)))
    print(f"\nreport: {path}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, TypeError) as problem:
        sys.exit(f"error: {problem}")
