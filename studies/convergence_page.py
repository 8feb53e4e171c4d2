"""The page of `convergence`: words and tables, made from its result alone."""

from __future__ import annotations

import numpy as np
import xarray as xr

from etdyn.analysis.convergence import FitStatus
from etdyn.report import Report
from studies import convergence_figures as figures
from studies.convergence_numbers import (
    MAJORITY,
    correlations,
    decades,
    group,
    horizon_of,
    record_of,
    same_state,
    spread,
    straight,
    supported,
    unstable,
)

AT = 1e4  # a time at which the published flow is looked at
QUESTION = (
    "Does a trained Energy Transformer converge: in which variable, how fast, to how many "
    "equilibria; and does the error of its task follow the energy, beyond the steps that it was "
    "trained for?"
)
LIMITS = (
    "One small model on one small data set. Equilibria are told apart up to the order of the "
    "tokens, which all play the same part once their positions are in the start: two masks that "
    "end in the same state need not end with the same tokens in the same cluster. Basins are "
    "those of a search, at once or after a stretch of the flow; the flow itself was followed for a "
    "few images only, and where it had not arrived the search was asked for the rest. A state that "
    "no start reached is not in the list. The way past a saddle amplifies errors of the solver: "
    "how far a run at ten times the tolerance differs stands in the protocol. Curvature on the way "
    "is that of the leaky flow where it has not arrived, with as many directions as were computed. "
    "Rank correlations of two quantities that both move slowly have few independent points; "
    "they tell the direction and no significance."
)


def findings(result: xr.DataTree) -> tuple[str, ...]:
    """What was found, a paragraph each; every number from the result."""
    return (_variable(result), _speed(result), _ends(result), _task(result), _modules(result),
            _gathering(result))  # fmt: skip


def _modules(result: xr.DataTree) -> str:
    data = group(result, "modules")
    parts = data["contribution"].drop_sel(part="remainder")
    size = (parts**2).mean([d for d in parts.dims if d not in ("step", "part")]) ** 0.5
    first, last = size.isel(step=0), size.isel(step=-1)
    rest = np.abs(data["contribution"].sel(part="remainder")).max()
    change = np.abs(data["change"]).max()
    early, late = (float(s.sel(part="hopfield") / s.sel(part="attention")) for s in (first, last))
    return (
        f"Which module: in step {int(data['step'][0]) + 1} the Hopfield network changes the pixels "
        f"{early:.1f} times as much as attention (root mean square), in step "
        f"{int(data['step'][-1]) + 1} {late:.1f} times, when both have fallen to "
        f"{100 * float(last.sum() / first.sum()):.0f} % of what they did at first. The parts add "
        f"up to the change of the image but for {float(rest / change):.0e} of it."
    )


def _variable(result: xr.DataTree) -> str:
    data, horizon = group(result, "published"), horizon_of(result)
    first, last = data.sel(time=horizon, method="nearest"), data.isel(time=-1)
    t = float(last["time"])
    moved = [float((d["activation_speed"] * d["time"]).mean()) for d in (first, last)]
    left = float((last["residual"] / last["force"]).mean())
    ratio = float((last["length"] / last["time"] / last["speed"]).mean())
    arrived = left < 1e-3
    return (
        f"In which variable: not in x. From the training horizon t = {horizon:g} to t = {t:.2g} "
        f"the speed |dx/dt| of a token goes from {float(first['speed'].mean()):.0f} to "
        f"{float(last['speed'].mean()):.0f} and stays there, and its length is {ratio:.3f} times "
        f"speed times time: tokens run away at constant speed. |dg/dt| falls to "
        f"{float(last['activation_speed'].mean()):.1e}, but as 1/t, because x grows: per unit of "
        f"log-time g moves by {moved[0]:.1f} at the horizon and by {moved[1]:.2f} at the end. The "
        f"residual |P grad E| falls from {float(first['residual'].mean()):.0f} to "
        f"{float(last['residual'].mean()):.1f}, {100 * left:.2g} % of the gradient: in g the flow "
        + ("has converged. " if arrived else "converges, and has not yet converged. ")
        + f"Its energy rose in {int(data['rises'].sum())} of "
        f"{data.sizes['sample'] * (data.sizes['time'] - 1)} intervals."
    )


def _speed(result: xr.DataTree) -> str:
    rates, early = group(result, "rates"), group(result, "published_rates")
    good, line = supported(rates), straight(rates)
    s, horizon = float(rates["time"][-1]), float(group(result, "published")["time"][-1])
    gap = rates["gap"].sel(time=[np.log1p(AT / 10), np.log1p(AT)], method="nearest")
    fall = -np.diff(np.log10(gap.values), axis=0)[0]
    short, curved = (rates["status"].values == k for k in (FitStatus.SHORT, FitStatus.CURVED))
    faster = curved & (np.nan_to_num(rates["slow_share"].values) < MAJORITY)
    off = np.flatnonzero(line & ~good)
    count = rates.sizes["sample"]
    words = (
        f"How fast: as a power of time, and so slowly that by t = {horizon:.2g} "
        f"{int(straight(early).sum())} of {count} images show the exponent. The least kappa of "
        f"their equilibria is {float(rates['predicted'].min()) / 2:.3f} to "
        f"{float(rates['predicted'].max()) / 2:.3f}; with the exponents 2 kappa the gap takes "
        f"{np.floor(decades(rates).min()):.0f} to {np.ceil(decades(rates).max()):.0f} decades of "
        f"time to fall by three, the least from which a rate is fitted; from t = {AT / 10:g} to "
        f"{AT:g} it falls by {spread(fall)} decades. In log-time, on the leaky flow at eps = 0 to "
        f"s = {s:g}, that is t = 1e{s / np.log(10):.0f}, {int(good.sum())} of {count} images have "
        f"a window that supports a fit"
    )
    if good.any():
        worst = np.abs(rates["deviation"].values[good]).max()
        words += f", and differ from 2 kappa_min by at most {100 * worst:.2g} %"
    words += (
        f". {int(short.sum())} have not come down by three decades; {int(curved.sum())} have "
        f"halves that differ: in {int(faster.sum())} of these faster modes hold most of the gap "
        "in mid-window, on its way to rounding, and in the others modes still take over from "
        "each other."
    )
    for i in off:
        words += (
            f" Image {i} has a straight window with {float(rates['rate'][i]):.3f} instead of "
            f"{float(rates['predicted'][i]):.3f}, which is no contradiction: its slowest modes "
            f"hold {float(rates['slow_share'][i]):.1g} of the gap there."
        )
    return words + " " + _near(result)


def _near(result: xr.DataTree) -> str:
    parts = []
    for name, law in (("near_leaky", "2 kappa_min"), ("near_sphere", "2 lambda_min")):
        fit = group(result, name)
        good = supported(fit)
        words = f"{int(good.sum())} of {len(good)} on the {name.removeprefix('near_')} flow"
        if good.any():
            worst = 100 * np.abs(fit["deviation"].values[good]).max()
            words += f" support a fit and are within {worst:.2g} % of {law}"
        parts.append(words)
    return (
        "From random starts near the equilibria the decay is exponential: " + "; ".join(parts) + "."
    )


def _ends(result: xr.DataTree) -> str:
    ends, found = group(result, "ends"), group(result, "equilibria")
    head = record_of(result)["study"]["head_start"]
    label, arrived = ends["label"], ends["arrived"]
    once, first = (label.sel(way=w) for w in ("at once", "flow first"))
    images = arrived.sizes["sample"]
    by_flow = arrived.sel(flow="leaky").values
    agree = [int((way.values[:images] == by_flow).sum()) for way in (first, once)]
    alike = int((arrived.sel(flow="sphere").values == by_flow).sum())
    by_image, between = same_state(ends, "flow first")
    top = [f"{float(v):.2f} (95 %: {float(lo):.2f} to {float(hi):.2f})" for v, (lo, hi) in
           zip(ends["fraction"].sel(way="flow first"), ends["interval"].sel(way="flow first"),
               strict=True)]  # fmt: skip
    saddles = int((found["index"] > 0).sum())
    within = by_image.mean()
    error = by_image.std(ddof=1) / len(by_image) ** 0.5 if len(by_image) > 1 else np.nan
    more = within - between > 2 * error
    return (
        f"To how many: {found.sizes['equilibrium']} states, up to the order of tokens, from "
        f"{ends.sizes['start']} starts, {saddles} of them saddles; {int((label < 0).sum())} "
        f"searches failed. Kappa lies between {float(found['lowest'].min()):.3f} and "
        f"{float(found['highest'].max()):.3f}. After log-time {head:g} of the flow the shares are, "
        f"by energy, {', '.join(top)}. A search at once ends elsewhere for "
        f"{100 * float((once.values != first.values).mean()):.0f} % of the starts: its first long "
        f"steps cross basins. On the {images} images that the leaky flow was followed, {agree[0]} "
        f"end alike with the head start and {agree[1]} at once; {alike} with the sphere flow, "
        f"which has the same equilibria and other basins. Two masks of one image end in the same "
        f"state in {within:.2f} +- {error:.2f} of all pairs (mean and standard error over "
        f"{len(by_image)} images), two images in {between:.2f}: "
        + (
            "the image decides in part. "
            if more
            else "no difference that so few images establish. "
        )
        + _saddles(result)
    )


def _saddles(result: xr.DataTree) -> str:
    leaky = group(result, "leaky")
    number, end = unstable(leaky), leaky.sizes["mode"]
    last = number.isel(look=-1).values
    half = number["look"].values[(number > 0).mean("sample").values >= 0.5]
    residual = leaky["residual"].sel(time=number["look"][-1], method="nearest").values
    until = f"; until s = {half[-1]:.3g} at least half of the images do" if len(half) else ""
    slow = np.where(last > 0, residual, np.nan)
    words = f"On the way the flow passes saddles{until}. At s = {number['look'].values[-1]:.3g} "
    words += f"{int((last > 0).sum())} of {len(last)} states have unstable directions"
    if (last > 0).any():
        words += f" (up to {last.max()}, of {end} computed), with residuals from "
        words += f"{np.nanmin(slow):.1g} to {np.nanmax(slow):.1g}"
    return words + "."


def _task(result: xr.DataTree) -> str:
    data, record = group(result, "published"), record_of(result)
    best = data["error"].argmin("time").values
    every = np.arange(data.sizes["sample"])
    energy, bottom = data["energy"].values, group(result, "rates")["bottom"].values
    share = (energy[0] - energy[best, every]) / (energy[0] - bottom)
    before, after = correlations(result, "published")
    steps, far = correlations(result, "euler"), correlations(result, "leaky")[1]
    end = float(group(result, "leaky")["time"][-1])
    at = data["error"].sel(time=horizon_of(result), method="nearest")
    rest = group(result, "rates")["error"].values
    follows = np.nanmedian(after) > 0
    return (
        f"The task: the error of the published flow is best at t = "
        f"{spread(data['time'].values[best])}, when {100 * np.nanmedian(share):.0f} % of the way "
        f"down in energy is done; it is {float(data['error'].min('time').mean()):.3f} there, "
        f"{float(at.mean()):.3f} at the training horizon, "
        f"{float(data['error'].isel(time=-1).mean()):.3f} at t = {float(data['time'][-1]):.2g} and "
        f"{np.nanmean(rest):.3f} at equilibrium (means over images; the mean of every position "
        f"has {record['mean_error']:.3f}). Up to the horizon error and energy fall together, with "
        f"a rank correlation over time of {spread(before)} along the flow and {spread(steps[0])} "
        f"along the Euler steps; beyond it the correlation is {spread(after)} and "
        f"{spread(steps[1])}, and to log-time {end:g} on the leaky flow {spread(far)}: "
        + ("the error follows the energy. " if follows else "the error rises while the energy "
           "falls. ")
        + "The completion is "
        + ("worse" if np.nanmean(rest) > record["mean_error"] else "better")
        + f" at equilibrium than the mean of every position, in "
        f"{int((rest > record['mean_error']).sum())} of {len(rest)} images."
    )  # fmt: skip


def _gathering(result: xr.DataTree) -> str:
    leaky, found = group(result, "leaky"), group(result, "equilibria")
    marks = (0.0, np.log1p(horizon_of(result)), float(leaky["time"][-1]))
    rows = [leaky.sel(time=s, method="nearest").mean("sample") for s in marks]
    ranks = ", ".join(f"{float(row['effective_rank']):.1f}" for row in rows)
    counts = ", ".join(f"{float(row['clusters']):.1f}" for row in rows)
    final = sorted({int(k) for k in found["clusters"].values})
    collapsed = final[-1] <= 2
    return (
        f"Tokens: at the start, the horizon and the end of the leaky flow there are {counts} "
        f"clusters of {leaky.sizes['token']} tokens, and their effective rank is {ranks} (means "
        f"over images). The equilibria have {' or '.join(map(str, final))} clusters"
        + (": the tokens collapse. " if collapsed else ". ")
        + f"Their tokens overlap with the nearest memory by {float(found['overlap'].min()):.2f} to "
        f"{float(found['overlap'].max()):.2f} (cosine): they are "
        + ("stored memories." if float(found["overlap"].min()) > 0.95 else "no stored memories.")
    )


def protocol(result: xr.DataTree) -> str:
    """How it was measured."""
    study, leaky = record_of(result)["study"], group(result, "leaky")
    data = group(result, "published")
    shared = min(data.sizes["time"], leaky.sizes["time"])
    gap = np.abs(data["energy"].values[:shared] - leaky["energy"].values[:shared]).max()
    scale = float(np.abs(leaky["energy"].isel(time=-1)).mean())
    rough = leaky["tolerance_error"].values
    starts = study["single"] + study["repeated"] * study["masks"] + study["random"]
    return (
        f"The first {study['images']} held-out digits, half of the patches hidden (seed "
        f"{study['seed']}), in float64. The published flow has the trained eps and ends at t = "
        f"{study['published']:g}, its Euler run at {study['horizons']} training horizons. The "
        f"leaky flow at eps = 0 is the published one in log-time s = log(1 + t) (ET-F27) and ends "
        f"at s = {study['log_time']:g}; where both were run their energies differ by at most "
        f"{gap:.2g} of about {scale:.0f}. The sphere flow ends at tau = {study['sphere']:g}. All "
        f"by dopri5 with steps of its own for every image, rtol {study['tolerance']:g} (sphere "
        "and head starts: ten times that, near equilibria a tenth); at ten times the tolerance "
        f"the leaky energies differ by at most {rough.max():.2g}, by {np.median(rough):.1g} in "
        "the median. Energies are without their constant at zero weights. The limit energy of a "
        "fit is that of the equilibrium on the sphere, found from the end of the flow; a window "
        "is the last fall of the gap by three decades above rounding, and supports a fit if its "
        "two halves agree to 1 % and the slowest modes, those within 1 % of kappa_min, hold at "
        f"least half of the gap in its middle. Survey: {starts} starts, {study['single']} images "
        f"with a mask each, {study['repeated']} images with {study['masks']} masks each, "
        f"{study['random']} random, led to an equilibrium by Anderson mixing, at once and after "
        f"log-time {study['head_start']:g} of the flow. Error: mean squared error of hidden "
        "patches over the variance of all pixels."
    )


def states(result: xr.DataTree) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of equilibria."""
    header = ("state", "energy", "index", "kappa least", "kappa largest", "lambda least",
              "clusters", "mean cosine", "overlap", "at once", "flow first", "95 %")  # fmt: skip
    found, ends = group(result, "equilibria"), group(result, "ends")
    rows: list[tuple[str, ...]] = []
    for k in range(found.sizes["equilibrium"]):
        one, share = found.isel(equilibrium=k), ends.isel(equilibrium=k)
        low, high = share["interval"].sel(way="flow first").values
        once, first = share["fraction"].values
        rows.append((
            str(k), f"{float(one['relative_energy']):.2f}", str(int(one["index"])),
            f"{float(one['lowest']):.4f}", f"{float(one['highest']):.4f}",
            f"{float(one['sphere_lowest']):.3f}", str(int(one["clusters"])),
            f"{float(one['mean_cosine']):.3f}", f"{float(one['overlap']):.2f}",
            f"{once:.3f}", f"{first:.3f}", f"{low:.3f} to {high:.3f}",
        ))  # fmt: skip
    return header, rows


def fits(result: xr.DataTree) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The table of the images' rates."""
    header = ("image", "state", "window", "decades", "2 kappa_min", "fitted", "deviation",
              "slow share", "supports a fit", "error at equilibrium")  # fmt: skip
    rates, label = group(result, "rates"), group(result, "ends")["arrived"].sel(flow="leaky").values
    good = supported(rates)
    rows: list[tuple[str, ...]] = []
    for i in range(rates.sizes["sample"]):
        one = rates.isel(sample=i)
        window = f"{float(one['window_start']):.0f} to {float(one['window_end']):.0f}"
        known, fitted = np.isfinite(float(one["window_start"])), np.isfinite(float(one["rate"]))
        rows.append((
            str(i), str(label[i]), window if known else "-", f"{float(one['window_decades']):.1f}",
            f"{float(one['predicted']):.4f}", f"{float(one['rate']):.4f}" if fitted else "-",
            f"{100 * float(one['deviation']):+.2f} %" if fitted else "-",
            f"{float(one['slow_share']):.2g}" if known else "-",
            "yes" if good[i] else "no: " + FitStatus(int(one["status"])).name.lower()
            .replace("_", " ").replace("fitted", "other modes"),
            f"{float(one['error']):.3f}",
        ))  # fmt: skip
    return header, rows


def report(result: xr.DataTree) -> Report:
    """The page: question, protocol, result, limits."""
    made = Report("Convergence: where a trained Energy Transformer goes, and how fast")
    made.text("Question", QUESTION)
    made.text("Protocol", protocol(result))
    made.text("Result", *findings(result))
    for name in (
        "task",
        "pictures",
        "modules",
        "variables",
        "clocks",
        "decay",
        "equilibria",
        "clusters",
    ):
        made.figure(name, getattr(figures, f"draw_{name}")(result), figures.CAPTIONS[name])
    made.table(
        "States by energy (without its constant at zero weights), up to the order of tokens. "
        "Index: unstable directions. Overlap: largest cosine of a token with a memory. Last three "
        "columns: shares of the starts, searched at once and after a stretch of the flow, with the "
        "latter's 95 % Wilson interval.",
        *states(result),
    )  # fmt: skip
    made.table(
        "Rates of the images on the leaky flow, window in log-time. Decades: by which the gap "
        "falls in the window, or in all. Slow share: of the gap in the slowest modes, "
        "mid-window. Short: less than three decades; curved: the halves of the window differ by "
        "more than 1 %; other modes: straight, and not in the slowest ones.",
        *fits(result),
    )  # fmt: skip
    made.text("Limits", LIMITS)
    return made
