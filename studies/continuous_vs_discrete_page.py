"""The page of `continuous_vs_discrete`: words, tables and figures, made from its result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from etdyn import plots
from etdyn.report import Report

DYNAMICS = ("et", "leaky", "sphere")
KINDS = ("masked", "open", "CLS")
BASELINE_HEADER = ("held-out masked-patch error", "error")

QUESTION = (
    "The Energy Transformer is published as a dozen Euler steps on a gradient flow. How far is "
    "that discrete model from the flow, token by token; is the difference one of time or of path; "
    "and what do both do when they run on, up to twenty times the horizon of training?"
)
LIMITS = (
    "One small model on one small data set, trained as the discrete model and not as the flow. "
    "The intrinsic clock is a mean over tokens, each of which has its own. Energies of the leaky "
    "dynamics include the term x.g - L and so do not compare with the others; the figures show "
    "the interaction energy. The reference is itself a computation, and the memories' kinks "
    "(relu) limit the order at which it converges; its measured distance from a run at 100 times "
    "the tolerance stands in the table's caption and in reference_distance of the result."
)


def findings(result: xr.DataTree, record: dict[str, Any]) -> str:
    """What was found, with every number taken from the result."""
    et = result["et"].to_dataset()
    trained = at_trained_step(et)
    horizon, far = et.attrs["training_horizon"], int(et["horizon"][-1])
    small = et.sel(step_size=slice(0, et.attrs["training_step"] * 1.001), horizon=1)
    small = small if small.sizes["step_size"] > 1 else et.sel(horizon=1)
    gaps = small["euler_distance"].sel(kind="masked").median("sample")
    slope = np.polyfit(np.log(small["step_size"]), np.log(gaps), 1)[0]
    flow_error = et["flow_error"].mean("sample")
    best = float(flow_error["time"][int(flow_error.to_numpy().argmin())])
    near, end = trained.sel(horizon=1), trained.sel(horizon=far)
    d, at_clock, to_path = (
        {k: float(near[name].sel(kind=k).median("sample")) for k in KINDS}
        for name in ("euler_distance", "euler_distance_at_equal_clock", "euler_distance_to_path")
    )
    lag = float(near["euler_nearest_time"].median("sample"))
    others = []
    for name in ("leaky", "sphere"):
        group = result[name].to_dataset()
        error, rises = group["flow_error"].mean("sample"), at_trained_step(group)["euler_rises"]
        first, last = error.sel(time=horizon, method="nearest"), error[-1]
        others.append(
            f"the {name} flow has an error of {first:.3f} at t = {horizon:g} and {last:.3f} at "
            f"t = {far * horizon:g}, and its Euler run with the trained step raises the energy in "
            f"{float(rises.sel(horizon=far).mean()):.1f} steps an image"
        )
    baseline = record["baselines"]
    return (
        f"The model reaches a masked-patch error of "
        f"{next(v for k, v in baseline.items() if k.startswith('Energy')):.3f} on all held-out "
        f"images (Gaussian conditional mean {baseline['Gaussian conditional mean']:.3f}). At the "
        f"trained step of {et.attrs['training_step']:g} it ends its horizon t = {horizon:g} at a "
        f"median distance in g of {d['masked']:.3f} (masked), {d['open']:.3f} (open) and "
        f"{d['CLS']:.3f} (CLS) from the flow, where 2 would be antipodal; for masked tokens the "
        f"distance falls as step^{slope:.2f} below the trained step. At equal intrinsic clock it "
        f"is {at_clock['masked']:.3f}, {at_clock['open']:.3f} and {at_clock['CLS']:.3f}. The "
        f"flow comes nearest to the Euler model's last state at t = {lag:.2g} (median), where "
        f"{to_path['masked']:.3f}, {to_path['open']:.3f} and {to_path['CLS']:.3f} remain: of the "
        f"masked tokens' distance {1 - to_path['masked'] / d['masked']:.0%} is a difference in "
        "time and the rest one of path. "
        f"On the followed images the discrete model's error is "
        f"{float(near['euler_error'].mean()):.3f} and the flow's "
        f"{float(flow_error.sel(time=horizon, method='nearest')):.3f} at the horizon; the flow is "
        f"best at t = {best:.2g} ({float(flow_error.min()):.3f}). At {far} times the horizon they "
        f"are {float(end['euler_error'].mean()):.3f} and {float(flow_error[-1]):.3f}, while the "
        f"energy goes on falling: the trained reconstruction is a stage of the descent, not its "
        f"end. Over all step sizes up to {float(et['step_size'].max()):g} the Euler runs of the "
        f"published dynamics raise the energy in {int(et['euler_rises'].isel(horizon=-1).sum())} "
        f"steps altogether. From the same start {others[0]}; {others[1]}."
    )


def rows_of(values: dict[str, float]) -> list[tuple[str, str]]:
    """Name and number, as a table has them."""
    return [(name, f"{value:.4f}") for name, value in values.items()]


def at_trained_step(group: xr.Dataset) -> xr.Dataset:
    """The Euler run whose step size is nearest the trained one."""
    return group.sel(step_size=group.attrs["training_step"], method="nearest")


def protocol(result: xr.DataTree, record: dict[str, Any]) -> str:
    """How it was measured."""
    et, study = result["et"].to_dataset(), record["study"]
    uncertainty = float(et["reference_distance"].sel(horizon=1).max())
    return (
        f"The first {et.sizes['sample']} held-out digits, half of the patches hidden (seed "
        f"{study['seed']}), in float64. The reference is dopri5 at rtol = atol = "
        f"{study['tolerance']:g} on the largest per-sample error; a run at 100 times the tolerance "
        f"differs from it by at most {uncertainty:.1e} in g at the training horizon (published "
        "dynamics). Euler runs have the step sizes of the table and end at "
        f"{', '.join(map(str, study['horizons']))} training horizons. Distance: root mean square "
        "over tokens of |g - g_flow| / (gamma sqrt(D)), at equal time, at equal intrinsic clock, "
        "and to the nearest saved state on the flow's path. The clock is the mean over tokens of "
        "the integral of gamma/sigma dt, exact along Euler's straight steps. An energy "
        "rise is more than 1e-12 of the energy in one step."
    )


def table(result: xr.DataTree) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The short table: every step size of the published dynamics, one of the others."""
    header = (
        "dynamics, step", "masked", "open", "CLS", "masked, equal clock", "masked, to path",
        "E - E(flow)", "error", "flow", "error, far", "flow, far", "rises",
    )  # fmt: skip
    rows = []
    for name in DYNAMICS:
        group = result[name].to_dataset()
        steps = [float(a) for a in group["step_size"]]
        for step in steps if name == "et" else [float(at_trained_step(group)["step_size"])]:
            run = group.sel(step_size=step)
            near, far = run.sel(horizon=1), run.isel(horizon=-1)
            flow = group.sel(time=[group.attrs["training_horizon"], group["time"][-1]],
                             method="nearest").mean("sample")  # fmt: skip
            gaps = [float(near["euler_distance"].sel(kind=k).median("sample")) for k in KINDS]
            gaps += [
                float(near[f"euler_distance_{name}"].sel(kind="masked").median("sample"))
                for name in ("at_equal_clock", "to_path")
            ]
            rows.append((
                f"{name} {step:.4g}", *(f"{gap:.4f}" for gap in gaps),
                f"{float(near['euler_energy'].mean()) - float(flow['flow_energy'][0]):+.1f}",
                f"{float(near['euler_error'].mean()):.4f}", f"{float(flow['flow_error'][0]):.4f}",
                f"{float(far['euler_error'].mean()):.4f}", f"{float(flow['flow_error'][1]):.4f}",
                f"{float(far['euler_rises'].mean()):.1f}",
            ))  # fmt: skip
    return header, rows


def draw_beyond(result: xr.DataTree, record: dict[str, Any]) -> Figure:
    """Error and energy of flow and trained Euler run against time."""
    et = result["et"].to_dataset()
    run, horizon = at_trained_step(et), et.attrs["training_horizon"]
    ends = horizon * et["horizon"]
    figure, axes = plots.panels(2)
    error, energy = axes[0]
    after = et.sel(time=slice(horizon / 30, None))
    plots.quartile_band(error, after["flow_error"], "time", label="flow", style=0)
    error.plot(ends, run["euler_error"].median("sample"), "s", color=plots.COLOURS[1],
               label=f"Euler, step {et.attrs['training_step']:g}")  # fmt: skip
    for k, name in enumerate(("Gaussian conditional mean", "mean of every position")):
        error.axhline(record["baselines"][name], color="#555555", linewidth=0.9,
                      linestyle=plots.DASHES[k + 1], label=name)  # fmt: skip
    error.set(xscale="log", xlabel="flow time t", ylabel="masked-patch error", ylim=(0, None))
    for k, term in enumerate(("", "_attention", "_hopfield")):
        label = "energy" if not term else term[1:]
        plots.quartile_band(energy, after[f"flow_energy{term}"], "time", label=f"{label}, flow",
                            style=k)  # fmt: skip
        energy.plot(ends, run[f"euler_energy{term}"].median("sample"), "s",
                    color=plots.COLOURS[k], markerfacecolor="none")  # fmt: skip
    energy.set(xscale="log", xlabel="flow time t", ylabel="energy (squares: Euler)")
    for ax in (error, energy):
        plots.mark(ax, horizon, "training horizon")
        plots.legend(ax)
    return figure


def draw_distance(result: xr.DataTree) -> Figure:
    """Distance and error against step size."""
    et = result["et"].to_dataset()
    near = et.sel(horizon=1)
    figure, axes = plots.panels(2, rows=2, height=2.6)
    *distances, right = axes.ravel()
    names = {"": "at equal time", "_at_equal_clock": "at equal clock", "_to_path": "to the path"}
    for ax, (name, title) in zip(distances, names.items(), strict=True):
        for k, kind in enumerate(KINDS):
            values = near[f"euler_distance{name}"].sel(kind=kind)
            plots.quartile_band(ax, values, "step_size", label=kind, style=k)
        first = float(near[f"euler_distance{name}"].sel(kind="masked").median("sample")[0])
        plots.slope_guide(ax, et["step_size"][:3].to_numpy(), first / 1.5, 1)
        plots.plain_log(ax)
        ax.set(xlabel="step size", title=f"distance {title}", ylabel="distance in g")
    for k, horizon in enumerate(et["horizon"].to_numpy()):
        runs = et["euler_error"].sel(horizon=horizon).median("sample")
        right.plot(et["step_size"], runs, color=plots.COLOURS[k], linestyle=plots.DASHES[k],
                   marker="o", label=f"{horizon} x {et.attrs['training_horizon']:g}")  # fmt: skip
        end = horizon * et.attrs["training_horizon"]
        limit = et["flow_error"].sel(time=end, method="nearest").median("sample")
        right.plot(et["step_size"][0] / 1.6, limit, "<", color=plots.COLOURS[k])
    right.set(xscale="log", xlabel="step size (arrows: flow)", ylabel="masked-patch error",
              title="error at several horizons")  # fmt: skip
    for ax in axes.ravel():
        plots.mark(ax, et.attrs["training_step"], "trained step")
        plots.legend(ax)
    return figure


def draw_dynamics(result: xr.DataTree) -> Figure:
    """Energy, error and residual of the three flows in the intrinsic clock."""
    figure, axes = plots.panels(3)
    labels = {
        "flow_interaction_energy": "interaction energy E(g)",
        "flow_error": "masked-patch error",
        "flow_residual": "residual |P grad E|",
    }
    for ax, (name, label) in zip(axes[0], labels.items(), strict=True):
        for k, dynamics in enumerate(DYNAMICS):
            group = result[dynamics].to_dataset().isel(time=slice(1, None))
            clock = group["flow_clock"].median("sample")
            values = group[name].assign_coords(clock=("time", clock.to_numpy()))
            plots.quartile_band(ax, values, "clock", label=dynamics, style=k, width=3.2 - k)
        ax.set(xscale="log", xlabel="intrinsic clock", ylabel=label)
    axes[0][2].set_yscale("log")
    plots.legend(axes[0][0])
    return figure


def report(
    result: xr.DataTree, gallery: dict[str, np.ndarray[Any, Any]], record: dict[str, Any]
) -> Report:
    """The page: question, protocol, result, limits."""
    made = Report("Continuous versus discrete: the Energy Transformer and its flow")
    made.text("Question", QUESTION)
    made.text("Protocol", protocol(result, record))
    made.text("Result", findings(result, record))
    made.figure("beyond_training", draw_beyond(result, record),
        "The published dynamics far beyond its training horizon. Lines: the flow, median and "
        "quartiles over images; squares: the discrete model at its trained step.")  # fmt: skip
    made.figure("completions", plots.image_rows(gallery),
        "Ten held-out digits. Hidden patches are filled in; visible ones stay.")  # fmt: skip
    made.figure("distance", draw_distance(result),
        "Distance of the Euler model from the flow at the training horizon, median and quartiles, "
        "and the error that the step size causes. Vertical line: the trained step.")  # fmt: skip
    made.figure("dynamics", draw_dynamics(result),
        "Three dynamics from the same start, in the intrinsic clock in which the sphere dynamics "
        "is written. The published one slows down as its tokens grow.")  # fmt: skip
    made.table(
        "All held-out images, half of the patches hidden, masks fixed by seed. Error: mean "
        "squared error over the variance of all training pixels.",
        BASELINE_HEADER, rows_of(record["baselines"]),
    )  # fmt: skip
    far = int(result["et"].to_dataset()["horizon"][-1])
    made.table(
        "Euler against flow. Columns 2 to 6: median distance in g at the training horizon; "
        f"errors at 1 and {far} training horizons, means over images; rises: steps that raise the "
        "energy, mean over images.", *table(result),
    )  # fmt: skip
    made.text("Limits", LIMITS)
    return made
