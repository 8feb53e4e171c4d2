"""`compare`: runs of the same samples side by side, and what differs sample by sample."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from scipy import stats

from etdyn import store
from etdyn.analysis.distance import activation_distance
from etdyn.checks import bad, check_choice
from etdyn.report import format_table
from etdyn.solve.solution import Solution, Status
from etdyn.systems import System

__all__ = ["compare", "comparison_table"]

USUAL = ("energy", "interaction_energy", "residual")
SAME_TIME = 1e-9  # relative to the last time: k * step and linspace differ by roundings

Array = NDArray[np.float64]


def compare(
    runs: Mapping[str, Solution | xr.Dataset],
    baseline: str | None = None,
    quantities: Sequence[str] | None = None,
    along: str = "time",
    confidence: float = 0.95,
) -> xr.Dataset:
    """Put runs of the same samples side by side, with paired differences from a baseline.

    At every time that the runs have in common, and for each quantity q and run, the differences
    q[run] - q[baseline] of the n samples finite in both give

        mean    Student's t interval, exact for normal differences. No bootstrap: at the few
                samples of a batch its percentiles cover less than they say.
        median  order statistics by the binomial law of signs, which cover with `confidence` or
                more whatever the distribution; NaN where n is too small (below 6 at 0.95)

    A sample that ended, in failure or early, is NaN from there on, and `samples` says how many are
    left; a mean over those left says nothing about those that failed.

    Args:
        runs: at least two, by name: Solutions of `solve` and `descend`, or their datasets.
        baseline: name of the run that the others are compared with; None: the first.
        quantities: variables (time, sample) of `Solution.to_xarray`; None: those of energy,
            interaction_energy and residual that every run has. "energy" is another function under
            another dynamics; interaction_energy is not.
        along: "time", at common save times; or "clock", at equal values of the intrinsic clock
            (mean over tokens), per sample and linear between save times, for runs of different
            dynamics. The coordinate time is then that clock.
        confidence: of the intervals, in (0, 1).

    Returns:
        Dataset (schema "etdyn.comparison/1") with dims run, time, sample: the quantities;
        `distance`, in g and units of the radius of g, from the baseline, mean over tokens (along
        "time", where both have states and the baseline is a Solution, else NaN); `evaluations`,
        `status`, `t_end` of every run and sample; and with dim quantity: `difference`,
        `mean_difference`, `mean_low`, `mean_high`, `median_difference`, `median_low`,
        `median_high`, `samples`.

    Raises:
        ValueError, TypeError: fewer than two runs, another number of samples or other starts, no
            common time, an unknown name, energies relative in one run and not in another.
    """
    if not isinstance(runs, Mapping) or len(runs) < 2:
        got = f"{len(runs)}" if isinstance(runs, Mapping) else type(runs).__name__
        raise bad("runs", "at least two runs by name", got)
    check_choice("along", along, ("time", "clock"))
    if not 0 < confidence < 1:
        raise bad("confidence", "a number between 0 and 1", confidence)
    names = list(runs)
    baseline = names[0] if baseline is None else baseline
    check_choice("baseline", baseline, tuple(names))
    table = {name: _read(name, run) for name, run in runs.items()}
    starts_checked = _check_samples(table)
    wanted = _choose(table, quantities)
    aligned = _at_times if along == "time" else _at_clocks
    time, values = aligned(table, wanted)
    if along == "time":
        values["distance"] = _distances(table, time, baseline)
    result = _dataset(table, time, values, along)
    base = names.index(baseline)
    result = result.assign(_paired({q: values[q] for q in wanted}, base, confidence))
    config = {"baseline": baseline, "quantities": list(wanted), "along": along,
              "confidence": confidence, "starts_checked": starts_checked,
              "runs": {name: run.config for name, run in table.items()}}  # fmt: skip
    result.attrs = store.provenance(
        "etdyn.comparison/1", config, torch.zeros(0, dtype=torch.float64)
    )
    return result.assign_coords(run=np.array(names, dtype=object),
                                quantity=np.array(wanted, dtype=object))  # fmt: skip


def comparison_table(comparison: xr.Dataset, time: float | None = None) -> str:
    """The paired differences at one time, as a table for the terminal.

    Args:
        comparison: what `compare` returns.
        time: the nearest one is shown; None: the last.

    Returns:
        A line for each quantity and run: n, mean and median with their intervals, evaluations.
    """
    at = comparison.isel(time=-1) if time is None else comparison.sel(time=time, method="nearest")
    baseline = json.loads(comparison.attrs["etdyn_config"])["baseline"]
    rows = []
    for quantity in at.quantity.values:
        for run in at.run.values[at.run.values != baseline]:
            cell = at.sel(quantity=quantity, run=run)
            mean, median = (
                f"{float(cell[a]):.4g} [{float(cell[b]):.4g}, {float(cell[c]):.4g}]"
                for a, b, c in (
                    ("mean_difference", "mean_low", "mean_high"),
                    ("median_difference", "median_low", "median_high"),
                )
            )
            cost = f"{float(cell.evaluations.mean()):.0f}"
            rows.append(
                [f"{quantity}: {run} - {baseline}", str(int(cell.samples)), mean, median, cost]
            )
    head = [f"at {float(at.time):.6g}", "n", "mean", "median", "evaluations"]
    return format_table(head, rows)


@dataclass(frozen=True)
class _Run:
    """One run as a dataset, and its system where it is known."""

    data: xr.Dataset
    system: System | None
    config: dict[str, Any]


def _read(name: str, run: Solution | xr.Dataset) -> _Run:
    if isinstance(run, Solution):
        data, system = run.to_xarray(), run.system
    elif isinstance(run, xr.Dataset) and "etdyn_config" in run.attrs:
        data, system = run, None
    else:
        got = "a Dataset of another kind" if isinstance(run, xr.Dataset) else type(run).__name__
        raise TypeError(f"runs[{name!r}]: expected a Solution or the dataset of one, got {got}")
    config = json.loads(data.attrs["etdyn_config"])
    if not {"time", "sample"} <= set(data.dims) or "status" not in data:
        raise bad(f"runs[{name!r}]", "the dataset of a Solution", f"dims {tuple(data.dims)}")
    return _Run(data, system, config)


def _check_samples(table: dict[str, _Run]) -> bool:
    """Raise unless every run has the same samples; whether all starts were there to be compared."""
    (first, reference), *others = table.items()
    sphere = any(_dynamics(run) == "sphere" for run in table.values())
    relative = reference.config.get("relative_energies")
    for name, run in others:
        labels, expected = (r.data.sample.values.tolist() for r in (run, reference))
        if labels != expected:
            raise bad(f"runs[{name!r}]", f"the samples {expected} of {first!r}", labels)
        if run.config.get("relative_energies") != relative:
            raise bad(
                f"runs[{name!r}]", f"energies with relative={relative} as in {first!r}", "not"
            )
        if "x" in run.data and "x" in reference.data:
            a, b = (_start(r, sphere) for r in (run, reference))
            eps = max(np.finfo(r.data.x.dtype).eps for r in (run, reference))
            if a.shape != b.shape or np.abs(a - b).max() > 8 * eps * np.abs(b).max():
                raise bad(
                    f"runs[{name!r}]", f"the starts of {first!r}", "other states at the start"
                )
    return all("x" in run.data for run in table.values())


def _dynamics(run: _Run) -> str | None:
    found: str | None = (run.config.get("system") or {}).get("dynamics")
    return found


def _start(run: _Run, sphere: bool) -> Array:
    """The first states; normalised where a run on the sphere has normalised its own."""
    first = run.data.x.isel(time=0).transpose("sample", "token", "feature")
    x: Array = first.values.astype(np.float64)
    if sphere:
        x = x - x.mean(-1, keepdims=True)
        x /= np.maximum(np.sqrt((x * x).mean(-1, keepdims=True)), np.finfo(np.float64).tiny)
    return x


def _choose(table: dict[str, _Run], quantities: Sequence[str] | None) -> tuple[str, ...]:
    if isinstance(quantities, str):
        raise TypeError("quantities: expected a sequence of names, got a string")
    if quantities is None:
        return tuple(q for q in USUAL if all(q in run.data for run in table.values()))
    for quantity in quantities:
        for name, run in table.items():
            if quantity not in run.data or set(run.data[quantity].dims) != {"time", "sample"}:
                raise bad("quantities", f"variables (time, sample) of every run, {name!r} too",
                          repr(quantity))  # fmt: skip
    return tuple(quantities)


def _at_times(table: dict[str, _Run], wanted: Sequence[str]) -> tuple[Array, dict[str, Array]]:
    """Times that every run has which has not ended; NaN in those that have."""
    time = _common_times([run.data.time.values for run in table.values()])
    values = {q: np.stack([_pick(run, time, q) for run in table.values()]) for q in wanted}
    return time, values


def _common_times(grids: list[Array]) -> Array:
    slack = SAME_TIME * max(float(np.abs(grid).max()) for grid in grids)
    times = np.sort(np.concatenate(grids))
    times = times[np.r_[True, np.diff(times) > slack]]
    has = np.stack([np.abs(times[:, None] - grid).min(1) <= slack for grid in grids])
    over = np.stack([times > grid[-1] + slack for grid in grids])
    common: Array = times[(has | over).all(0) & (has.sum(0) >= 2)]
    if len(common) < 2:
        raise bad("runs", "save times in common after the start", f"only {common.tolist()}")
    return common


def _pick(run: _Run, time: Array, name: str) -> Array:
    """(time, sample, ...) at these times; NaN after the end of the run, or of a sample."""
    grid = run.data.time.values
    slack = SAME_TIME * max(float(np.abs(time).max()), float(np.abs(grid).max()))
    nearest = np.abs(time[:, None] - grid).argmin(1)
    there = np.abs(time - grid[nearest]) <= slack
    column = run.data[name].transpose("time", "sample", ...).values
    values: Array = column[nearest].astype(np.float64)
    values[~there] = np.nan
    return values


def _at_clocks(table: dict[str, _Run], wanted: Sequence[str]) -> tuple[Array, dict[str, Array]]:
    """As many clock values as the shortest run has times, up to the least that a sample reaches."""
    for name, run in table.items():
        if "clock" not in run.data:
            raise bad("along", f"'time', as {name!r} has no variable `clock`", "'clock'")
    clocks = [run.data.clock.transpose("time", "sample").values for run in table.values()]
    last = min(float(np.nanmin(np.nanmax(clock, 0))) for clock in clocks)
    if not last > 0:
        raise bad("runs", "clocks that advance in every sample", f"one that ends at {last:.3g}")
    grid = np.linspace(0.0, last, min(len(clock) for clock in clocks))
    values: dict[str, Array] = {}
    for q in wanted:
        curves = [run.data[q].transpose("time", "sample").values for run in table.values()]
        values[q] = np.stack([_resample(c, v, grid) for c, v in zip(clocks, curves, strict=True)])
    return grid, values


def _resample(clock: Array, values: Array, grid: Array) -> Array:
    columns = []
    for c, v in zip(clock.T, values.T, strict=True):
        live = np.isfinite(c) & np.isfinite(v)
        columns.append(np.interp(grid, c[live], v[live]))
    return np.stack(columns, 1)


@torch.no_grad()
def _distances(table: dict[str, _Run], time: Array, baseline: str) -> Array:
    """Mean over tokens of the distance in g from the baseline, as its system sees both."""
    base = table[baseline]
    size = (len(time), base.data.sizes["sample"])
    if base.system is None or "x" not in base.data:
        return np.full((len(table), *size), np.nan)
    reference = torch.from_numpy(_pick(base, time, "x")).to(base.system.lagrangian.like)
    rows = []
    for run in table.values():
        row = np.full(size, np.nan)
        for k, x in enumerate(_pick(run, time, "x") if "x" in run.data else ()):
            here = torch.from_numpy(x).to(reference)
            gap = activation_distance(base.system, here, reference[k])
            row[k] = base.system.token_mean(gap).double().cpu().numpy()
        rows.append(row)
    return np.stack(rows)


def _dataset(
    table: dict[str, _Run], time: Array, values: dict[str, Array], along: str
) -> xr.Dataset:
    dims, first = ("run", "time", "sample"), next(iter(table.values())).data
    longer = {"distance": "distance in g from the baseline, in radii"}
    data: dict[str, Any] = {
        q: (dims, v, {"units": "1", "long_name": longer.get(q, q.replace("_", " "))})
        for q, v in values.items()
    }
    counts = np.stack([_evaluations(run) for run in table.values()])
    data["evaluations"] = (dims[::2], counts, {"units": "1", "long_name": "forces per sample"})
    status = np.stack([run.data.status.values for run in table.values()])
    data["status"] = (dims[::2], status, {
        "long_name": "how the sample ended", "flag_values": [int(s) for s in Status],
        "flag_meanings": " ".join(s.name for s in Status),
    })  # fmt: skip
    ends = np.stack([run.data.t_end.values for run in table.values()])
    data["t_end"] = (dims[::2], ends, {"units": "1", "long_name": "last flow time of a sample"})
    name = "flow time" if along == "time" else "intrinsic clock"
    coords = {"time": ("time", time, {"units": "1", "long_name": name}),
              "sample": first.sample.values}  # fmt: skip
    return xr.Dataset(data, coords)


def _evaluations(run: _Run) -> Array:
    """Of every sample; a batch that is solved together has one number for all."""
    count = (
        run.data.evaluations if "evaluations" in run.data else run.config["stats"]["evaluations"]
    )
    return np.broadcast_to(np.asarray(count, dtype=np.float64), run.data.sizes["sample"])


def _paired(values: dict[str, Array], base: int, confidence: float) -> dict[str, Any]:
    """Differences and their intervals over samples."""
    table = np.stack(list(values.values()))
    with np.errstate(invalid="ignore"):  # infinite minus infinite
        difference = table - table[:, base : base + 1]
    difference[~np.isfinite(difference)] = np.nan
    ordered = np.sort(difference, -1)  # NaN last
    count = np.isfinite(difference).sum(-1)
    some = np.maximum(count, 1)
    total = np.where(np.isfinite(difference), difference, 0.0)
    mean = np.where(count > 0, total.sum(-1) / some, np.nan)
    squares = np.where(np.isfinite(difference), (difference - mean[..., None]) ** 2, 0.0).sum(-1)
    free = np.maximum(count - 1, 1)
    half = stats.t.ppf((1 + confidence) / 2, free) * np.sqrt(squares / free / some)
    half = np.where(count > 1, half, np.nan)
    # the k-th smallest and the k-th largest enclose the median unless fewer than k lie on a side
    k = stats.binom.ppf((1 - confidence) / 2, count, 0.5).astype(int)
    inside = k >= 1

    def nth(index: NDArray[np.int64]) -> Array:
        within = index.clip(0, ordered.shape[-1] - 1)  # where it is not, it is not used
        picked: Array = np.take_along_axis(ordered, within[..., None], -1)[..., 0]
        return picked

    median = (nth((count - 1) // 2) + nth(count // 2)) / 2
    columns = {
        "mean_difference": (mean, "mean of the paired differences"),
        "mean_low": (mean - half, "lower end of the t interval of the mean"),
        "mean_high": (mean + half, "upper end of the t interval of the mean"),
        "median_difference": (
            np.where(count > 0, median, np.nan),
            "median of the paired differences",
        ),
        "median_low": (np.where(inside, nth(k - 1), np.nan), "lower end of the sign interval"),
        "median_high": (np.where(inside, nth(count - k), np.nan), "upper end of the sign interval"),
        "samples": (count, "samples finite in both runs"),
    }
    dims = ("quantity", "run", "time")
    result: dict[str, Any] = {
        name: (dims, v, {"units": "1", "long_name": text}) for name, (v, text) in columns.items()
    }
    text = "paired difference from the baseline"
    result["difference"] = ((*dims, "sample"), difference, {"units": "1", "long_name": text})
    return result
