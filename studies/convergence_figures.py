"""The figures of `convergence`, drawn from its result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from etdyn import plots
from etdyn.plots_contributions import contribution_rows
from studies.convergence_numbers import (
    RUNS,
    correlations,
    group,
    horizon_of,
    record_of,
    same_state,
    straight,
    supported,
    unstable,
)

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DYNAMICS = ("published", "leaky", "sphere")
CAPTIONS = {
    "task": "Error and tokens in log-time s = log(1 + t), mean and quartiles over images. Left: "
    "masked-patch error of the published flow and its Euler steps as far as they were run, and of "
    "the leaky flow, which is the same in log-time; diamond: at equilibrium. Right: rank "
    "correlation of error and energy along the run of every image (a dot each, bar: median), up to "
    "the training horizon and beyond it; 1: the error falls whenever the energy does.",
    "pictures": "Held-out digits. Hidden (blue) patches are filled in along the leaky flow at "
    "log-time s, first at the training horizon, and at equilibrium; visible ones stay.",
    "modules": "What each module did to held-out digits in a step of the published discrete model, "
    "decoded: the path integral of the decoder's slope along the force, so that attention, "
    "Hopfield network and a remainder of rounding add up to the change of the image. Hidden "
    "patches are blue; every row has its own scale.",
    "variables": "The published flow, mean and quartiles over images. Left: root mean square "
    "over tokens of |dx/dt| and of |x|/t. Middle: the residual and the whole gradient. Right: how "
    "fast g moves, per unit of time and per unit of log-time, over all tokens.",
    "clocks": "Energy, without its constant at zero weights, mean and quartiles over images. Left: "
    "in time. Middle: in log-time, from the training horizon on; grey lines: equilibria. "
    "Right: in the intrinsic clock.",
    "decay": "Left: energy above the equilibrium of every image along the leaky flow; colour and "
    "dash: which equilibrium it is; thick: the supported windows. Middle: from random starts near "
    "equilibria, in units in which theory has slope -1. Right: fitted over predicted rate; filled: "
    "supported, open: straight, but the slowest modes hold less than half of the gap; band: 5 %.",
    "equilibria": "Left: shares of all starts with 95 % Wilson intervals. Middle: all eigenvalues "
    "kappa of the lowest equilibria. Right: how often two masks of one image (dots: images, bar: "
    "mean and standard error) and two images end in the same state, up to the tokens' order.",
    "clusters": "Tokens along the leaky flow, which is the published one in log-time, mean and "
    "quartiles over images. Clusters: single linkage within 10 degrees. Last: share of images "
    "whose state has directions of negative kappa, and how many: near saddles slow is not done.",
}  # fmt: skip


def draw_variables(result: xr.DataTree) -> Figure:
    """What of the published flow settles and what does not."""
    data = group(result, "published").isel(time=slice(1, None))
    data = data.sel(time=slice(1e-2, None))
    figure, axes = plots.panels(3)
    left, middle, right = axes[0]
    plots.band(left, data["speed"], "time", label="speed |dx/dt|", style=0)
    plots.band(left, data["length"] / data["time"], "time", label="|x| / t", style=1)
    left.set(ylabel="of a token, per unit of time", yscale="log")
    plots.band(middle, data["force"], "time", label="gradient |grad E|", style=1)
    plots.band(middle, data["residual"], "time", label="residual |P grad E|", style=0)
    middle.set(yscale="log")
    moved = data["activation_speed"]
    plots.band(right, moved, "time", label="|dg/dt|", style=0)
    plots.band(right, moved * data["time"], "time", label="|dg/d log t|", style=1)
    right.set(yscale="log")
    for ax in axes[0]:
        ax.set(xscale="log", xlabel="time t")
        plots.mark(ax, horizon_of(result), "training horizon")
        plots.legend(ax)
    return figure


def draw_clocks(result: xr.DataTree) -> Figure:
    """Energy in three clocks."""
    flows = {name: group(result, name) for name in (*DYNAMICS, "euler")}
    published, leaky = flows["published"], flows["leaky"]
    figure, axes = plots.panels(3)
    time, log_time, clock = axes[0]
    plots.band(time, published["energy"].isel(time=slice(1, None)), "time", label="flow", style=0)
    steps = flows["euler"].isel(time=slice(1, None))["energy"].mean("sample")
    time.plot(steps["time"], steps, "--", color=plots.COLOURS[1], label="Euler steps")
    time.set(xscale="log", xlabel="time t", ylabel="energy E")
    plots.mark(time, horizon_of(result), "training horizon")
    plots.band(log_time, leaky["energy"], "time", label="leaky", style=2)
    same = published.assign_coords(time=np.log1p(published["time"]))["energy"]
    plots.band(log_time, same, "time", label="published", style=1, width=2.4)
    for value in group(result, "equilibria")["relative_energy"].values:
        log_time.axhline(value, color="#888888", linewidth=0.6)
    bottom = float(group(result, "equilibria")["relative_energy"].min())
    top = float(published["energy"].sel(time=horizon_of(result), method="nearest").mean())
    margin = 0.05 * (top - bottom)  # the first fall is in the other panels
    log_time.set(xlabel="log-time s = log(1 + t)", ylim=(bottom - margin, top + margin))
    for k, name in enumerate(DYNAMICS):
        flow = flows[name].isel(time=slice(1, None))
        tau = flow["clock"].mean("sample").values
        energy = flow["energy"].assign_coords(clock=("time", tau))
        plots.band(clock, energy, "clock", label=name, style=k, width=3.2 - k)
    clock.set(xscale="log", xlabel="intrinsic clock tau", xlim=(1e-2, None))
    for ax in axes[0]:
        plots.legend(ax)
    return figure


def draw_decay(result: xr.DataTree) -> Figure:
    """The gap along the flow, near equilibria, and the rates."""
    figure, axes = plots.panels(3, height=3.2)
    images, close, ratio = axes[0]
    _image_gaps(images, result)
    for k, name in enumerate(("near_leaky", "near_sphere")):
        fit = group(result, name)
        for i, rate in enumerate(fit["predicted"].values):
            gap = fit["gap"].isel(sample=i)
            seen = gap.where(gap > 1e-9)
            law = name.removeprefix("near_") if i == 0 else None
            close.plot(rate * fit["time"], seen, color=plots.COLOURS[k], linewidth=0.9,
                       linestyle=plots.DASHES[k], label=law)  # fmt: skip
    guide = np.array([0.0, 23.0])
    close.plot(guide, 100 * np.exp(-guide), color="#000000", linewidth=1.5, linestyle=":",
               label="slope -1")  # fmt: skip
    close.set(yscale="log", xlabel="clock x predicted rate", ylabel="energy above equilibrium",
              xlim=(0, 25))  # fmt: skip
    _ratios(ratio, result)
    plots.legend(images)
    plots.legend(close)
    return figure


def _image_gaps(ax: Axes, result: xr.DataTree) -> None:
    fit = group(result, "rates")
    label = group(result, "ends")["arrived"].sel(flow="leaky").values
    good, shown = supported(fit), set()
    for i in np.argsort(label, kind="stable"):
        k = label[i]
        gap, time = fit["gap"].isel(sample=i), fit["time"]
        style: Any = {"color": plots.COLOURS[k % 7], "linestyle": plots.DASHES[k % 7]}
        name = None if k in shown else f"state {k}"
        shown.add(k)
        ax.plot(time, gap.where(gap > 1e-9), linewidth=0.8, label=name, **style)
        if good[i]:
            start, end = (float(fit[f"window_{n}"][i]) for n in ("start", "end"))
            ax.plot(time, gap.where((time >= start) & (time <= end)), linewidth=3, alpha=0.5,
                    color=style["color"])  # fmt: skip
    ax.set(yscale="log", xlabel="log-time s", ylabel="energy above equilibrium")


def _ratios(ax: Axes, result: xr.DataTree) -> None:
    names = {"rates": "images", "near_leaky": "near,\nleaky", "near_sphere": "near,\nsphere"}
    ax.axhspan(0.95, 1.05, color="#888888", alpha=0.2, linewidth=0)
    for k, name in enumerate(names):
        fit = group(result, name)
        good, ratio = supported(fit), 1 + fit["deviation"].values
        for chosen, face in ((good, plots.COLOURS[k]), (straight(fit) & ~good, "none")):
            x = k + np.linspace(-0.25, 0.25, len(ratio))[chosen]
            ax.plot(x, ratio[chosen], MARKERS[k], color=plots.COLOURS[k], markerfacecolor=face)
        count = f"{int(straight(fit).sum())} of {len(ratio)}\nstraight"
        ax.annotate(count, (k, 0.97), xycoords=("data", "axes fraction"), ha="center", va="top",
                    fontsize=7)  # fmt: skip
    low, high = ax.get_ylim()
    ax.set(ylabel="fitted / predicted rate", ylim=(min(low, 0.9), max(high, 1.1) + 0.08))
    ax.set_xticks(range(len(names)), names.values())
    ax.set_xlim(-0.5, len(names) - 0.5)


def draw_equilibria(result: xr.DataTree) -> Figure:
    """Basins, spectra and masks."""
    ends, found = group(result, "ends"), group(result, "equilibria")
    figure, axes = plots.panels(3, height=3.2)
    basins, spectra, masks = axes[0]
    for k, way in enumerate(ends["way"].values):
        part = ends.sel(way=way)
        values, bound = part["fraction"].values, part["interval"].values
        spread = np.abs(bound.T - values)
        x = np.arange(len(values)) + 0.16 * (2 * k - 1)
        basins.errorbar(x, values, spread, capsize=2, fmt=MARKERS[k], color=plots.COLOURS[k],
                        label=_way(result, way))  # fmt: skip
    basins.set(xlabel="equilibrium, by energy", ylabel="share of starts", ylim=(0, None))
    basins.set_xticks(range(found.sizes["equilibrium"]))
    for k, kappa in enumerate(found["kappa"].values):
        spectra.plot(np.arange(1, len(kappa) + 1), kappa, color=plots.COLOURS[k % 7],
                     linestyle=plots.DASHES[k % 7], label=f"state {k}", linewidth=1.1)  # fmt: skip
    spectra.set(xscale="log", xlabel="mode", ylabel="kappa")
    for k, way in enumerate(ends["way"].values):
        one, two = same_state(ends, way)
        colour: Any = {"color": plots.COLOURS[k]}
        masks.plot(np.full(len(one), k - 0.12), one, MARKERS[k], markerfacecolor="none", **colour)
        error = one.std(ddof=1) / len(one) ** 0.5 if len(one) > 1 else np.nan
        masks.errorbar(k, one.mean(), error, fmt="_", markersize=14, capsize=3, **colour)
        masks.plot(k + 0.15, two, "x", markersize=7, **colour)
        masks.annotate(" images", (k + 0.17, two), va="center", fontsize=7)
    masks.set_xticks(range(ends.sizes["way"]), [_way(result, way) for way in ends["way"].values])
    masks.set(ylabel="pairs in the same state", ylim=(0, 1.02), xlim=(-0.5, 1.6))
    plots.legend(basins)
    plots.legend(spectra)
    return figure


def _way(result: xr.DataTree, way: str) -> str:
    head = record_of(result)["study"]["head_start"]
    return {"at once": "at once", "flow first": f"flow to s = {head:g}"}[str(way)]


def draw_task(result: xr.DataTree) -> Figure:
    """The error in log-time, and whether it follows the energy."""
    figure, axes = plots.panels(2, height=3.2)
    error, ranks = axes[0]
    data = {name: group(result, name) for name in RUNS}
    leaky = data["leaky"].sel(time=slice(1e-2, None))
    plots.band(error, leaky["error"], "time", label="leaky flow", style=0)
    for k, name in ((2, "published"), (1, "euler")):
        run = data[name].isel(time=slice(1, None))
        mean = run["error"].mean("sample")
        error.plot(np.log1p(run["time"]), mean, color=plots.COLOURS[k], linestyle=plots.DASHES[k],
                   label={"published": "published flow", "euler": "Euler steps"}[name])  # fmt: skip
    rest = group(result, "rates")["error"].values
    low, high = np.quantile(rest, (0.25, 0.75))
    spread = np.maximum([[rest.mean() - low], [high - rest.mean()]], 0)
    error.errorbar(1.3 * leaky["time"].values[-1], rest.mean(), spread, fmt="D", capsize=3,
                   color=plots.COLOURS[3], label="equilibrium")  # fmt: skip
    error.axhline(record_of(result)["mean_error"], color="#555555", linewidth=0.9,
                  linestyle=plots.DASHES[3], label="mean of every position")  # fmt: skip
    plots.mark(error, np.log1p(horizon_of(result)), "training horizon")
    error.set(xscale="log", xlim=(1e-2, None), ylim=(0, None), xlabel="log-time s = log(1 + t)",
              ylabel="masked-patch error")  # fmt: skip
    for k, name in enumerate(RUNS):
        for j, values in enumerate(correlations(result, name)):
            x = 3 * j + k + np.linspace(-0.25, 0.25, len(values))
            ranks.plot(x, values, MARKERS[k], color=plots.COLOURS[(0, 1, 2)[k]], markersize=3,
                       label=name if j == 0 else None)  # fmt: skip
            ranks.plot(3 * j + k + np.array([-0.35, 0.35]), [np.nanmedian(values)] * 2,
                       color="#000000", linewidth=1.8)  # fmt: skip
    ranks.axhline(0, color="#888888", linewidth=0.8)
    ranks.set_xticks([1, 4], ["up to the training horizon", "beyond"])
    ranks.set(ylabel="rank correlation of error and energy", ylim=(-1.05, 1.05))
    plots.legend(error)
    plots.legend(ranks)
    return figure


def draw_clusters(result: xr.DataTree) -> Figure:
    """How the tokens gather, and the saddles on the way."""
    leaky = group(result, "leaky")
    shown = leaky.sel(time=slice(1e-2, None))
    figure, axes = plots.panels(2, rows=2, height=2.4)
    cosine, rank, count, index = axes.ravel()
    for ax, (name, label) in zip(
        (cosine, rank, count),
        {"mean_cosine": "mean cosine of pairs of tokens", "effective_rank": "effective rank",
         "clusters": "clusters of tokens"}.items(), strict=True,
    ):  # fmt: skip
        plots.band(ax, shown[name], "time", label="leaky flow", style=0)
        ax.set(xscale="log", xlabel="log-time s", ylabel=label)
        plots.mark(ax, np.log1p(horizon_of(result)), "training horizon")
    number, most = unstable(leaky), leaky.sizes["mode"]
    for k in range(1, most + 1):
        word = f"{k} or more unstable"
        index.plot(leaky["look"], (number >= k).mean("sample"), color=plots.COLOURS[k - 1],
                   linestyle=plots.DASHES[k - 1], marker=MARKERS[k - 1], label=word)  # fmt: skip
    index.set(xscale="log", xlabel="log-time s", ylabel="share of images", ylim=(-0.03, 1.03))
    plots.legend(cosine)
    plots.legend(index)
    return figure


def draw_pictures(result: xr.DataTree) -> Figure:
    """Completions for the eye."""
    pixels = group(result, "pictures")["pixels"]
    return plots.image_rows({str(row): pixels.sel(row=row).values for row in pixels["row"].values})


def draw_modules(result: xr.DataTree) -> Figure:
    """State and contribution of every module, early and late."""
    data = group(result, "modules")
    return contribution_rows(data, {name: data[name].to_numpy() for name in ("given", "true")})
