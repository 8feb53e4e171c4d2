"""The figures of `solver_sweep`, and how its result is read."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etdyn import plots

ORDERS = {
    "euler": 1, "guarded_euler": 1, "midpoint": 2, "heun2": 2, "heun3": 3, "rk4": 4,
    "explicit_adams": 4, "discrete_gradient": 2, "matrix_free_midpoint": 2,
}  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P")
FAMILIES = ("fixed step", "multistep, implicit", "adaptive, shared step", "adaptive, per sample")


def record_of(result: xr.Dataset) -> dict[str, Any]:
    """The configuration."""
    record: dict[str, Any] = json.loads(result.attrs["etdyn_config"])
    return record


def strings(array: xr.DataArray) -> list[str]:
    """As a list."""
    return [str(value) for value in array.to_numpy()]


def worst(result: xr.Dataset) -> xr.DataArray:
    """Error of the worst sample; NaN where any failed."""
    return result["error"].max("sample", skipna=False)


def cost(result: xr.Dataset) -> xr.DataArray:
    """Evaluations per sample, mean over samples."""
    return result["evaluations"].mean("sample")


def agreement(result: xr.Dataset, task: str) -> float:
    """How far the two references of a task are apart."""
    return float(result["agreement"].sel(task=task).max())


def number(value: float) -> str:
    """Two digits, powers of ten where that is shorter."""
    if 0.01 <= abs(value) < 1e4:
        return f"{value:.2g}" if abs(value) < 100 else f"{value:.0f}"
    return f"{value:.1e}".replace("e-0", "e-")


def published(result: xr.Dataset, task: str) -> xr.Dataset | None:
    """The published Euler model in float64; None where euler is not among the methods."""
    step = record_of(result)["tasks"][task]["step"]
    if "euler" not in strings(result["solver"]):
        return None
    row = result.sel(task=task, dtype="float64", solver="euler")
    at = int(np.abs(row["step_or_rtol"].to_numpy() - step).argmin())
    return row.isel(setting=at).assign_coords(at=at)


def draw_work(result: xr.Dataset, task: str) -> Figure:
    """Error against evaluations and against time, a column for every family of methods."""
    cells = result.sel(task=task, dtype="float64")
    figure, axes = plots.panels(len(FAMILIES), rows=2, height=3.1)
    prices = {
        "evaluations per sample": cost(cells),
        "time / time of published Euler": cells["relative_time"],
    }
    low = min(agreement(result, task), np.nanmin(cells["error"].to_numpy())) / 2
    for row, (label, price) in zip(axes, prices.items(), strict=True):
        values = price.to_numpy()[price.to_numpy() > 0]
        for ax, name in zip(row, FAMILIES, strict=True):
            few = cells["solver"].to_numpy()[cells["family"].to_numpy() == name]
            frontier(ax, cells["error"].median("sample", skipna=False), price)
            ax.axhspan(low, agreement(result, task), color="#DDDDDD", linewidth=0)
            for k, solver in enumerate(few.tolist()):
                curve(ax, cells.sel(solver=solver), price.sel(solver=solver), solver, k)
            ax.set(xscale="log", yscale="log", ylim=(low, 20), xlabel=label,
                   xlim=(values.min() / 1.5, values.max() * 1.5))  # fmt: skip
            ax.tick_params(labelleft=ax is row[0])
            star(ax, result, task, price)
        row[0].set_ylabel("error in g at the horizon")
    for ax, name in zip(axes[0], FAMILIES, strict=True):
        ax.set_title(name)
        if ax.get_legend_handles_labels()[1]:
            ax.legend(fontsize=6, frameon=False, loc="lower left", handlelength=2.6)
    return figure


def star(ax: Axes, result: xr.Dataset, task: str, price: xr.DataArray) -> None:
    """The published Euler model."""
    euler = published(result, task)
    if euler is not None:
        where = price.sel(solver="euler").to_numpy()[euler["at"].item()]
        ax.plot(where, euler["error"].median(), "*", color="#000000", markersize=9, zorder=5)


def curve(ax: Axes, cells: xr.Dataset, price: xr.DataArray, label: str, style: int) -> None:
    """One method: the median and the range of its error, crosses where it failed."""
    colour, dash = plots.COLOURS[style % 7], plots.DASHES[style % 7]
    good = np.isfinite(worst(cells).to_numpy())
    error = cells["error"].transpose("setting", "sample").to_numpy()[good]
    x = price.to_numpy()[good]
    ax.plot(x, np.median(error, 1), color=colour, linestyle=dash, marker=MARKERS[style % 6],
            markersize=3, linewidth=1.3, label=label)  # fmt: skip
    ax.fill_between(x, error.min(1), error.max(1), color=colour, alpha=0.12, linewidth=0)
    failed = price.to_numpy()[~good]
    failed = failed[np.isfinite(failed) & (failed > 0)]
    ax.plot(failed, np.full(len(failed), 6.0 / 1.4**style), "x", color=colour, markersize=5)


def frontier(ax: Axes, error: xr.DataArray, price: xr.DataArray) -> None:
    """The least error that any method reaches for at most this price."""
    pairs = np.stack([price.to_numpy().ravel(), error.to_numpy().ravel()], 1)
    pairs = pairs[np.isfinite(pairs).all(1)]
    pairs = pairs[pairs[:, 0].argsort()]
    ax.step(pairs[:, 0], np.minimum.accumulate(pairs[:, 1]), where="post", color="#BBBBBB",
            linewidth=3, zorder=0)  # fmt: skip


def draw_orders(result: xr.Dataset) -> Figure:
    """Orders of the fixed-step methods and responses of the adaptive ones."""
    slope = result["slope"].sel(dtype="float64")
    adaptive = np.array([f.startswith("adaptive") for f in strings(result["family"])])
    figure, axes = plots.panels(2, height=3.6)
    for ax, chosen, label in zip(
        axes[0], (~adaptive, adaptive),
        ("order: slope of log error over log step", "response: slope of log error over log rtol"),
        strict=True,
    ):  # fmt: skip
        dots(ax, slope.isel(solver=chosen), label)
    names = np.array(strings(result["solver"]))[~adaptive]
    known = [(ORDERS[n], k) for k, n in enumerate(names) if n in ORDERS]
    if known:
        axes[0][0].plot(*zip(*known, strict=True), "|", color="#000000", markersize=11,
                        label="theory, smooth", zorder=0)  # fmt: skip
    axes[0][1].axvline(1, color="#888888", linewidth=0.9, label="proportional to rtol")
    for ax in axes[0]:
        plots.legend(ax)
    return figure


def dots(ax: Axes, slope: xr.DataArray, label: str) -> None:
    """Median and range over samples, a mark for every task."""
    solvers, tasks = strings(slope["solver"]), strings(slope["task"])
    for k, task in enumerate(tasks):
        values = slope.sel(task=task).transpose("solver", "sample").to_numpy()
        middle = np.array([np.median(v) if np.isfinite(v).all() else np.nan for v in values])
        reach = np.abs(np.stack([values.min(1), values.max(1)]) - middle)
        y = np.arange(len(solvers)) + 0.22 * (k - (len(tasks) - 1) / 2)
        ax.errorbar(middle, y, xerr=reach, fmt=MARKERS[k % 6], color=plots.COLOURS[k], markersize=4,
                    linewidth=1, label=task)  # fmt: skip
    ax.set(yticks=range(len(solvers)), yticklabels=solvers, xlabel=label, xlim=(0, None))
    ax.invert_yaxis()


def draw_precision(result: xr.Dataset) -> Figure:
    """The least error of every method in both precisions."""
    tasks, solvers = strings(result["task"]), strings(result["solver"])
    least = worst(result).min("setting")
    figure, axes = plots.panels(len(tasks), height=4.0)
    for ax, task in zip(axes[0], tasks, strict=True):
        for dtype, face, mark in (("float64", None, "o"), ("float32", "none", "s")):
            if dtype in strings(result["dtype"]):
                ax.plot(least.sel(task=task, dtype=dtype), range(len(solvers)), mark,
                        color=plots.COLOURS[0 if face is None else 1], markerfacecolor=face,
                        label=dtype)  # fmt: skip
        ax.set(xscale="log", title=task, xlabel="least error in g, worst sample",
               yticks=range(len(solvers)))  # fmt: skip
        ax.set_yticklabels(solvers if ax is axes[0][0] else [])
        left = min(agreement(result, task), float(least.sel(task=task).min())) / 3
        ax.axvspan(left, agreement(result, task), color="#DDDDDD", linewidth=0)
        ax.set_xlim(left, None)
        ax.axvline(2.0**-23, color="#888888", linewidth=0.9, linestyle="--", label="eps of float32")
        ax.invert_yaxis()
    plots.legend(axes[0][0])
    return figure
