"""The figures of `graph_classification`, from its result alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etdyn import plots
from studies.graph_classification_models import title

CAPTIONS = {
    "accuracy": (
        "Accuracy on the test folds of nested cross-validation: every fold (small dots), mean and "
        "standard deviation. Dotted line: always the largest class. Crosses are a WARNING, not a "
        "result: the same model trained and scored on the same graphs, as in the published "
        "notebooks."
    ),
    "descent": (
        "{name}: blocks of the trained model run on beyond their {steps} step(s), on test graphs, "
        "in float64. Left: how far the flow of every block brings its energy down, per token, mean "
        "and quartiles over graphs; squares: Euler at the trained step. Middle: residual over "
        "force, the same. Right: accuracy of the read-out of the last block's state, with its "
        "standard error; horizontal: at the leaky flow's equilibrium."
    ),
}


def draw_accuracy(result: xr.DataTree) -> Figure:
    """One panel a data set, one line a model."""
    scores = result["scores"].to_dataset()
    models, names = [str(m) for m in scores["model"].values], scores["data"].values
    columns = min(2, len(names))
    height = 1.1 + 0.26 * len(models)
    figure, axes = plots.panels(columns, math.ceil(len(names) / columns), height)
    for ax, name in zip(axes.ravel(), names, strict=False):
        _accuracies(ax, result, str(name), models)
    for ax in axes.ravel()[len(names) :]:
        ax.remove()
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2,
                  frameon=False)  # fmt: skip
    return figure


def _accuracies(ax: Axes, result: xr.DataTree, name: str, models: list[str]) -> None:
    accuracy = 100 * result["scores"].to_dataset()["test_accuracy"].sel(data=name)
    mean, spread = accuracy.mean("fold"), accuracy.std("fold", ddof=1)
    rows = np.arange(len(models))[::-1]
    for row, model in zip(rows, models, strict=True):
        folds = accuracy.sel(model=model)
        ax.plot(folds, np.full(folds.size, row), ".", color="#999999", markersize=4)
    ours = [model == "et" for model in models]
    for chosen, colour, mark in ((ours, 1, "D"), ([not o for o in ours], 0, "o")):
        ax.errorbar(mean[chosen], rows[chosen], xerr=spread[chosen], fmt=mark, capsize=2,
                    color=plots.COLOURS[colour], markersize=5)  # fmt: skip
    if "leak" in result.children:
        leak = 100 * result["leak"].to_dataset()["published"].sel(data=name)
        places = [rows[models.index(str(m))] for m in leak["model"].values]
        ax.plot(leak, places, "x", color="#000000", label="WARNING: scored on training graphs")
    share = float(result["sets"].to_dataset()["majority"].sel(data=name))
    ax.axvline(100 * share, color="#555555", linestyle=":", linewidth=0.9, label="largest class")
    ax.set(yticks=rows, yticklabels=[title(m) for m in models], title=name,
           xlabel="test accuracy (%)", ylim=(-0.6, len(models) - 0.4))  # fmt: skip


def draw_descent(group: xr.Dataset) -> Figure:
    """Energy, imbalance and accuracy of the blocks of one data set's model."""
    figure, axes = plots.panels(3)
    falling, turning, reading = axes[0]
    for k, block in enumerate(group["block"].values):
        one = group.sel(block=block)
        _over_time(falling, one, "energy", k, f"block {block}")
        _over_time(turning, one, "imbalance", k, f"block {block}")
    falling.set(ylabel="change of energy per token")
    turning.set(ylabel="residual / force", ylim=(0, None))
    _reading(reading, group)
    for ax in axes[0]:
        plots.mark(ax, group.attrs["horizon"], "training horizon")
        ax.set(xscale="log", xlabel="flow time t of the block")
        plots.legend(ax)
    return figure


def _over_time(ax: Axes, one: xr.Dataset, name: str, style: int, label: str) -> None:
    flow, euler = one[f"flow_{name}"], one[f"euler_{name}"]
    if name == "energy":
        flow, euler = (
            (part - part.isel({dim: 0})) / one["tokens"]
            for part, dim in ((flow, "time"), (euler, "run"))
        )
    later = flow.isel(time=slice(1, None)).rename(graph="sample")
    plots.band(ax, later, "time", label=label, style=style)
    euler = euler.isel(run=slice(1, None)).mean("graph")
    ax.plot(euler["run"], euler, "s", color=plots.COLOURS[style], markerfacecolor="none")


def _reading(ax: Axes, group: xr.Dataset) -> None:
    last = group.isel(block=-1)
    for k, (kind, dim, label) in enumerate((("flow", "time", "flow"), ("euler", "run", "Euler"))):
        right: Any = last[f"{kind}_correct"].isel({dim: slice(1, None)})
        share = 100 * right.mean("graph")
        error = 100 * right.std("graph") / math.sqrt(right.sizes["graph"])
        ax.errorbar(share[dim], share, yerr=error, color=plots.COLOURS[k], capsize=2,
                    linestyle=plots.DASHES[k], marker="os"[k], label=label)  # fmt: skip
    ax.axhline(100 * float(last["rest_correct"].mean()), color="#555555", linewidth=0.9,
               linestyle=plots.DASHES[2], label="leaky equilibrium")  # fmt: skip
    ax.set(ylabel="accuracy of the read-out (%)", ylim=(0, 105))
