"""The figures of `step_size`, drawn from its result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from scipy.stats import binomtest

from etdyn import plots
from studies.step_size_numbers import DYNAMICS, RUNGS, overflowed, rung

MARKERS = ("o", "s", "^", "D", "v")
CONTROL = "eight tokens that repel each other"
SHOWN = (0.1, 1.0, 10.0, 100.0)  # step sizes, over the trained one, of lines
CAPTIONS = {
    "limits": "Left: what theory guarantees and predicts, and what is measured, over the images: "
    "median, least and largest. Right: measured against predicted limits at every equilibrium; "
    "the published dynamics of the trained model has none.",
    "control": "The control under the published dynamics, means over its starts, which agree. "
    "Left: by what one step multiplies a deviation along its top mode. Right: energy rises after "
    "a kick, and how many steps ET-F23 calls unstable.",
    "map": "The trained model under three dynamics. Top: share of the steps so far that raised "
    "the energy, mean over images. Middle: residual |P grad E|. Bottom: masked-patch error. Dashed "
    "lines: least and largest predicted limit of the images' equilibria. Hatched, if anywhere: "
    "overflow.",
    "ends": "Shares of images whose energy rose at any step, that end in a 2-cycle, that overflow; "
    "diamonds: whose last state belongs to another attractor than the flow's (95 % Wilson "
    "intervals).",
    "first_step": "The first step of the published dynamics, means over images and tokens of a "
    "kind. Left: how far g turns, over the length of the step; solid: the model's starts, "
    "dashed: the same, shrunk; stars: the trained step. Right: the decrease of the energy over "
    "what its slope at the start promises, mean and quartiles.",
    "training": "The published dynamics beyond the step and count of its training. Left: error, "
    "mean over images, with the best count at every step size. Middle and right: the error along "
    "runs at four step sizes, against horizon and count; mean and quartiles.",
    "energy": "Left: error against energy along runs of the published dynamics (means over images; "
    "time runs to the right). Right: rank correlations per image; boxes: quartiles, whiskers: "
    "1.5 times their distance at most.",
}


def draw_limits(result: xr.DataTree) -> Figure:
    """The ladder of limits, and measured against predicted ones."""
    figure, axes = plots.panels(2, height=3.4)
    ladder, against = axes[0]
    for k, law in enumerate(DYNAMICS):
        for row, name in enumerate(RUNGS):
            values = rung(result, law, name)
            y, finite = -row - 0.22 * (k - 1), values[np.isfinite(values)]
            style: Any = {"color": plots.COLOURS[k], "label": law if row == 0 else None}
            if len(finite):
                middle = np.median(finite)
                spread = [[middle - finite.min()], [finite.max() - middle]]
                ladder.errorbar(middle, y, xerr=spread, marker=MARKERS[k], capsize=2, **style)
            else:
                ladder.annotate("none", (1, y), (-2, 0), ("axes fraction", "data"),
                    "offset points", color=style["color"], ha="right", va="center",
                    fontsize=7)  # fmt: skip
    step = result["map/et"].attrs["step"]
    ladder.set(xscale="log", xlabel="step size, in each dynamics' own time",
               yticks=-np.arange(len(RUNGS)), yticklabels=list(RUNGS))  # fmt: skip
    plots.mark(ladder, step, "trained step (et)")
    ladder.legend(fontsize=7, frameon=False, loc="lower left")
    systems = 0
    for system, name in (("limits", "trained"), ("control", "control")):
        for law in DYNAMICS:
            group = result[f"{system}/{law}"].to_dataset()
            if np.isfinite(group["linear"]).any():
                against.plot(
                    group["linear"], group["limit"], MARKERS[systems % 5], markersize=6,
                    color=plots.COLOURS[systems % 7], markerfacecolor="none",
                    label=f"{name}, {law}",
                )  # fmt: skip
                systems += 1
    ends = np.array([0.05, 3.0])
    against.plot(ends, ends, color="#888888", linewidth=0.8, label="equal")
    plots.plain_log(against)
    against.set(xlabel="predicted limit", ylabel="measured limit")
    plots.legend(against)
    return figure


def draw_control(result: xr.DataTree) -> Figure:
    """The control under the published dynamics: multiplier of a mode, rises after a kick."""
    figure, axes = plots.panels(2)
    left, right = axes[0]
    found = result["multiplier"].to_dataset()
    size = found["step_size"]
    left.axhspan(-1, 1, color="#DDDDDD", alpha=0.5, label="stable", linewidth=0)
    left.plot(size, found["predicted"].mean("sample"), color=plots.COLOURS[0], label="ET-F23")
    left.plot(size, found["measured"].mean("sample"), "o", color=plots.COLOURS[1],
              markerfacecolor="none", label="measured")  # fmt: skip
    edge = float(result["control/et"].to_dataset()["linear"].mean())
    plots.mark(left, edge, f"2 / (kappa - 2) = {edge:.3g}")
    left.set(xscale="log", xlabel="step over scale, h / c", ylabel="multiplier of the top mode")
    kicked = result["transient"].to_dataset()
    h = kicked["step_size"]
    right.step(h, kicked["predicted"].mean("sample"), where="mid", color=plots.COLOURS[0],
               label="ET-F23")  # fmt: skip
    right.plot(h, kicked["rises"].mean("sample"), "o", color=plots.COLOURS[1],
               markerfacecolor="none", label="measured")  # fmt: skip
    right.set(xscale="log", xlabel="step size (c = 1 at the start)",
              ylabel="energy rises in all steps")  # fmt: skip
    for ax in (left, right):
        plots.legend(ax)
    return figure


def draw_map(result: xr.DataTree) -> Figure:
    """Rises, residual and task error over step size and step count, for every dynamics."""
    figure, axes = plots.panels(3, rows=3, height=2.3)
    for column, law in enumerate(DYNAMICS):
        found = result[f"map/{law}"].to_dataset()
        taken = found.isel(step=slice(1, None))
        rows: tuple[tuple[xr.DataArray, dict[str, Any]], ...] = (
            ((taken["rises"] / taken["step"]).mean("sample"), {"vmin": 0, "vmax": 0.5}),
            (taken["residual"].median("sample"), {"norm": LogNorm(1, 300)}),
            (taken["error"].mean("sample", skipna=False), {"vmin": 0.2, "vmax": 0.7}),
        )
        for row, (values, scale) in enumerate(rows):
            ax = axes[row][column]
            mesh = heat(ax, values, scale)
            overlay(ax, result, law, taken)
            if column == len(DYNAMICS) - 1:
                names = ("rises per step", "residual, median", "error, mean")
                beyond = ("max", "both", "both")[row]
                figure.colorbar(mesh, ax=axes[row], label=names[row], extend=beyond)
        axes[0][column].set_title(law, fontsize=9)
        axes[2][column].set_xlabel("step size")
    for row in range(3):
        axes[row][0].set_ylabel("steps taken")
    axes[0][0].legend(fontsize=6, loc="lower left")
    return figure


def heat(ax: Axes, values: xr.DataArray, scale: dict[str, Any]) -> Any:
    """A map over step size and step; hatched where a run has overflowed."""
    ax.grid(visible=False)
    ax.patch.set(hatch="///", edgecolor="#888888")
    values = values.transpose("step", "step_size")
    mesh = ax.pcolormesh(values["step_size"], values["step"], values, cmap="cividis",
                         shading="nearest", rasterized=True, **scale)  # fmt: skip
    ax.set(xscale="log", yscale="log")
    return mesh


def overlay(ax: Axes, result: xr.DataTree, law: str, found: xr.Dataset) -> None:
    """The trained model, or the predicted limit."""
    limits = rung(result, law, "predicted limit, rest")
    if law == "et":
        ax.plot(found.attrs["step"], found.attrs["steps"], "*", color="white", markersize=11,
                markeredgecolor="black", label="as trained")  # fmt: skip
    if np.isfinite(limits).any():
        for limit in (limits.min(), limits.max()):
            ax.axvline(limit, color="white", linewidth=2.2)
            ax.axvline(limit, color="black", linewidth=0.9, linestyle="--")
    ax.set(ylim=(0.9, int(found["step"][-1])))


def draw_ends(result: xr.DataTree) -> Figure:
    """How the runs of the map end: rises, 2-cycles, other attractors."""
    figure, axes = plots.panels(3, height=3.1)
    for ax, law in zip(axes[0], DYNAMICS, strict=True):
        found = result[f"map/{law}"].to_dataset()
        size = found["step_size"]
        rises = (found["rises"].isel(step=-1) > 0).mean("sample")
        shares = {"energy rose": rises, "2-cycle": found["period2"].mean("sample"),
                  "overflow": overflowed(found).mean("sample")}  # fmt: skip
        for k, (name, share) in enumerate(shares.items()):
            ax.plot(size, share, color=plots.COLOURS[k], linestyle=plots.DASHES[k], label=name)
        label = found["attractor"]
        away, known = (label > 0).sum("followed").values, (label >= 0).sum("followed").values
        for x, n, of in zip(label["followed_size"].values, away, known, strict=True):
            if of:
                low, high = binomtest(int(n), int(of)).proportion_ci(method="wilson")
                ax.errorbar(x, n / of, yerr=[[n / of - low], [high - n / of]], marker="D",
                    color="black", markerfacecolor="none", linewidth=0.8,
                    label="another attractor" if x == label["followed_size"][0] else None,
                )  # fmt: skip
        limits = rung(result, law, "predicted limit, rest")
        if np.isfinite(limits).any():
            plots.mark(ax, float(limits.min()), "predicted limit")
        ax.set(xscale="log", xlabel="step size", title=law, ylim=(-0.03, 1.03))
    axes[0][0].set_ylabel("share of images")
    handles, labels = axes[0][1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    return figure


def draw_training(result: xr.DataTree, ridge: np.ndarray[Any, Any]) -> Figure:
    """The error of the published dynamics over step size and count, and along both.

    ridge: the best number of steps at every step size.
    """
    figure, axes = plots.panels(3, height=3.1)
    whole, horizons, counts = axes[0]
    found = result["scored"].to_dataset()
    taken = found.isel(step=slice(1, None))
    size, step, steps = found["step_size"], found.attrs["step"], found.attrs["steps"]
    mesh = heat(whole, taken["error"].mean("sample"), {"vmin": 0.18, "vmax": 0.5})
    figure.colorbar(mesh, ax=whole, label="error, mean", extend="both")
    whole.plot(size, ridge, color="white", linewidth=2.6)
    whole.plot(size, ridge, color="black", linewidth=1.1, label="best count")
    whole.plot(size, step * steps / size, color="white", linestyle="--", linewidth=1.2,
               label="trained horizon")  # fmt: skip
    overlay(whole, result, "et", taken)
    whole.set(xlabel="step size", ylabel="steps taken", ylim=(0.9, int(taken["step"][-1])))
    legend = whole.legend(fontsize=6, loc="lower left", facecolor="#777777", framealpha=0.8)
    for words in legend.get_texts():
        words.set_color("white")
    for k, share in enumerate(SHOWN):
        row = taken.sel(step_size=share * step, method="nearest")
        line = row["error"].assign_coords(horizon=row["time"])
        name = f"step {float(row['step_size']):.3g}"
        plots.band(horizons, line, "horizon", label=name, style=k)
        plots.band(counts, line, "step", label=name, style=k)
    plots.mark(horizons, step * steps, "as trained")
    plots.mark(counts, steps, "as trained")
    for ax, name in ((horizons, "horizon: step size x steps"), (counts, "steps taken")):
        ax.set(xscale="log", xlabel=name, ylabel="masked-patch error", ylim=(0.1, 0.75))
    handles, labels = horizons.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=7, frameon=False)
    return figure


def draw_first(result: xr.DataTree) -> Figure:
    """The first step: how far it turns tokens, and what it keeps of the promised descent."""
    figure, axes = plots.panels(2)
    turn, kept = axes[0]
    found = result["first_step"].to_dataset()
    step = result["map/et"].attrs["step"]
    for k, kind in enumerate(found["kind"].values):
        for scale, dash in enumerate(("-", "--")):
            part = found.isel(scale=scale).sel(kind=kind).mean("sample")
            style: Any = {"color": plots.COLOURS[k], "linestyle": dash, "marker": MARKERS[k]}
            turn.plot(part["displacement"], part["turn"], markevery=9, markerfacecolor="none",
                      label=f"{kind}, sigma {float(part['sigma']):.2g}", **style)  # fmt: skip
            here = part.sel(step_size=step, method="nearest")
            turn.plot(here["displacement"], here["turn"], "*", color=plots.COLOURS[k],
                      markersize=11, markeredgecolor="black")  # fmt: skip
    plots.mark(turn, 1.0, "as long as the token")
    turn.set(xscale="log", xlabel="length of the step over that of the token",
             ylabel="turn of g (2: antipodal)")  # fmt: skip
    for scale in range(found.sizes["scale"]):
        part = found.isel(scale=scale)
        sigma = float(part["sigma"].sel(kind="masked").mean())
        plots.band(kept, part["decrease_ratio"], "step_size", style=scale,
                   label=f"masked sigma {sigma:.2g}")  # fmt: skip
    plots.mark(kept, step, "trained step")
    kept.set(xscale="log", xlabel="step size", ylabel="decrease of E / promised by slope",
             ylim=(0, 1.02))  # fmt: skip
    for ax in (turn, kept):
        plots.legend(ax)
    return figure


def draw_energy(result: xr.DataTree, correlations: dict[str, np.ndarray[Any, Any]]) -> Figure:
    """Error against energy along the runs, and rank correlations per image."""
    figure, axes = plots.panels(2, height=3.1)
    path, ranks = axes[0]
    found = result["scored"].to_dataset()
    for k, share in enumerate(SHOWN):
        run = found.sel(step_size=share * found.attrs["step"], method="nearest")
        energy, error = run["energy"].mean("sample"), run["error"].mean("sample")
        path.plot(energy, error, color=plots.COLOURS[k], linestyle=plots.DASHES[k],
                  label=f"step {float(run['step_size']):.3g}")  # fmt: skip
        for count, marker in ((found.attrs["steps"], "o"), (found.sizes["step"] - 1, "s")):
            path.plot(energy[count], error[count], marker, color=plots.COLOURS[k],
                      label=f"after {count} steps" if k == len(SHOWN) - 1 else None)  # fmt: skip
    path.invert_xaxis()
    path.set(xlabel="energy, mean over images (descending)", ylabel="masked-patch error, mean",
             ylim=(0.1, 0.75))  # fmt: skip
    plots.legend(path)
    ranks.boxplot(list(correlations.values()), orientation="horizontal", widths=0.5,
                  medianprops={"color": "black"}, flierprops={"markersize": 3})  # fmt: skip
    ranks.set(yticks=range(1, len(correlations) + 1), yticklabels=list(correlations),
              xlim=(-1.05, 1.05), xlabel="rank correlation of energy and error")  # fmt: skip
    ranks.invert_yaxis()
    plots.mark(ranks, 0.0, "none")
    return figure
