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
    "that discrete model from the flow, token by token; is it behind in time or off the path; and "
    "what do both do when they run on, far beyond the horizon of training?"
)
LIMITS = (
    "One small model on one small data set, trained as the discrete model and not as the flow. "
    "The intrinsic clock is a mean over tokens, each of which has its own. Energies of the leaky "
    "dynamics include the term x.g - L and so do not compare with the others; the figures show "
    "the interaction energy. The reference is itself a computation, and the memories' kinks "
    "(relu) limit the order at which it converges; its distance from a run at 100 times the "
    "tolerance stands in the protocol, and for every horizon in `reference_distance` of the result."
)


def findings(result: xr.DataTree, record: dict[str, Any]) -> str:
    """What was found, with every number taken from the result; means over images."""
    et = result["et"].to_dataset()
    trained = at_trained_step(et)
    step, horizon = float(trained["step_size"]), et.attrs["training_horizon"]
    far = int(et["horizon"][-1])
    flow_error = et["flow_error"].mean("sample")
    best = float(flow_error["time"][int(flow_error.to_numpy().argmin())])
    near, end = trained.sel(horizon=1).mean("sample"), trained.sel(horizon=far).mean("sample")
    lists = {
        name: ", ".join(f"{float(near[name].sel(kind=k)):.3f} ({k})" for k in KINDS)
        for name in ("euler_distance", "euler_distance_at_equal_clock", "euler_distance_to_path")
    }
    others = []
    for name in ("leaky", "sphere"):
        group = result[name].to_dataset()
        error, rises = group["flow_error"].mean("sample"), at_trained_step(group)["euler_rises"]
        others.append(
            f"the {name} flow has an error of "
            f"{float(error.sel(time=horizon, method='nearest')):.3f} at t = {horizon:g} and "
            f"{float(error[-1]):.3f} at t = {far * horizon:g}, and its Euler run with step "
            f"{step:g} raises the energy in {float(rises.sel(horizon=far).mean()):.0f} of its "
            f"{far * round(horizon / step)} steps"
        )
    baseline = record["baselines"]
    worse = float(flow_error[-1]) > 1.2 * float(flow_error.min())
    return (
        f"The model reaches a masked-patch error of "
        f"{next(v for k, v in baseline.items() if k.startswith('Energy')):.3f} on all held-out "
        f"images (PSNR {record['psnr']:.1f} dB; Gaussian conditional mean "
        f"{baseline['Gaussian conditional mean']:.3f}). Its step {step:g} ends the horizon "
        f"t = {horizon:g} at a distance in g from the flow of {lists['euler_distance']}, where 2 "
        f"would be antipodal{slope_below(et, step)}. At equal intrinsic clock the distance is "
        f"{lists['euler_distance_at_equal_clock']}. The flow comes nearest to the model's last "
        f"state at t = {float(near['euler_nearest_time']):.2g}, at "
        f"{lists['euler_distance_to_path']}: the discrete model is behind the flow, and off its "
        "path by what remains. On the "
        f"followed images its error is {float(near['euler_error']):.3f} and the flow's "
        f"{float(flow_error.sel(time=horizon, method='nearest')):.3f} at the horizon; the flow is "
        f"best at t = {best:.2g} ({float(flow_error.min()):.3f}). At {far} times the horizon they "
        f"are {float(end['euler_error']):.3f} and {float(flow_error[-1]):.3f}, while the energy "
        f"goes on falling"
        + (": the reconstruction is a stage of the descent, not its end. " if worse else ". ")
        + f"Over all step sizes up to {float(et['step_size'].max()):g} the Euler runs of the "
        f"published dynamics raise the energy in {int(et['euler_rises'].isel(horizon=-1).sum())} "
        f"steps altogether. From the same start {others[0]}; {others[1]}."
    )


def slope_below(et: xr.Dataset, step: float) -> str:
    """How the masked tokens' distance falls with the step, where two steps tell."""
    small = et.sel(step_size=slice(0, step * 1.001), horizon=1)
    if small.sizes["step_size"] < 2:
        return ""
    gaps = small["euler_distance"].sel(kind="masked").mean("sample")
    order = np.polyfit(np.log(small["step_size"]), np.log(gaps), 1)[0]
    return f"; for masked tokens it falls as step^{order:.2f} below this step"


def rows_of(values: dict[str, float]) -> list[tuple[str, str]]:
    """Name and number, as a table has them."""
    return [(name, f"{value:.4f}") for name, value in values.items()]


def at_trained_step(group: xr.Dataset) -> xr.Dataset:
    """The Euler run whose step size is nearest the trained one."""
    return group.sel(step_size=group.attrs["training_step"], method="nearest")


def protocol(result: xr.DataTree, record: dict[str, Any]) -> str:
    """How it was measured."""
    et, study = result["et"].to_dataset(), record["study"]
    gaps = {name: result[name].to_dataset()["reference_distance"] for name in DYNAMICS}
    uncertainty = "; ".join(
        f"{name}: {float(gap.sel(horizon=1).max()):.0e} and {float(gap[-1].max()):.0e}"
        for name, gap in gaps.items()
    )
    return (
        f"The first {et.sizes['sample']} held-out digits, half of the patches hidden (seed "
        f"{study['seed']}), in float64. The reference is dopri5 at rtol = atol = "
        f"{study['tolerance']:g} on the largest per-sample error; a run at 100 times the tolerance "
        f"differs from it in g, at the first and the last horizon, by at most {uncertainty}. "
        "Euler runs have the step sizes of the table and end at "
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
        "energy gap", "error", "flow", "error, far", "flow, far", "rises",
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
            gaps = [float(near["euler_distance"].sel(kind=k).mean("sample")) for k in KINDS]
            gaps += [
                float(near[f"euler_distance_{name}"].sel(kind="masked").mean("sample"))
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
    plots.band(error, after["flow_error"], "time", label="flow", style=0)
    error.plot(ends, run["euler_error"].mean("sample"), "s", color=plots.COLOURS[1],
               label=f"Euler, step {float(run['step_size']):g}")  # fmt: skip
    for k, name in enumerate(("Gaussian conditional mean", "mean of every position")):
        error.axhline(record["baselines"][name], color="#555555", linewidth=0.9,
                      linestyle=plots.DASHES[k + 1], label=name)  # fmt: skip
    error.set(xscale="log", xlabel="flow time t", ylabel="masked-patch error", ylim=(0, None))
    for k, term in enumerate(("", "_attention", "_hopfield")):
        label = "energy" if not term else term[1:]
        plots.band(energy, after[f"flow_energy{term}"], "time", label=f"{label}, flow",
                            style=k)  # fmt: skip
        energy.plot(ends, run[f"euler_energy{term}"].mean("sample"), "s",
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
            plots.band(ax, values, "step_size", label=kind, style=k)
        first = float(near[f"euler_distance{name}"].sel(kind="masked").mean("sample")[0])
        plots.slope_guide(ax, et["step_size"][:3].to_numpy(), first / 1.5, 1)
        plots.plain_log(ax)
        ax.set(xlabel="step size", title=f"distance {title}", ylabel="distance in g")
    for k, horizon in enumerate(et["horizon"].to_numpy()):
        runs = et["euler_error"].sel(horizon=horizon).mean("sample")
        right.plot(et["step_size"], runs, color=plots.COLOURS[k], linestyle=plots.DASHES[k],
                   marker="o", label=f"{horizon} x {et.attrs['training_horizon']:g}")  # fmt: skip
        end = horizon * et.attrs["training_horizon"]
        limit = et["flow_error"].sel(time=end, method="nearest").mean("sample")
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
            clock = group["flow_clock"].mean("sample")
            values = group[name].assign_coords(clock=("time", clock.to_numpy()))
            plots.band(ax, values, "clock", label=dynamics, style=k, width=3.2 - k)
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
        "The published dynamics far beyond its training horizon. Lines and bands: the flow, mean "
        "and quartiles over images; squares: the discrete model at its trained step, mean. "
        "Horizontal lines: the baselines on all held-out images.")  # fmt: skip
    made.figure("completions", plots.image_rows(gallery),
        "Held-out digits. Hidden (blue) patches are filled in; visible ones stay.")  # fmt: skip
    made.figure("distance", draw_distance(result),
        "Distance of the Euler model from the flow at the training horizon, mean and quartiles, "
        "and the error that the step size causes. Arrows: the flow's own error.")  # fmt: skip
    made.figure("dynamics", draw_dynamics(result),
        "Three dynamics from the same start, mean and quartiles over images, in the intrinsic "
        "clock in which the sphere dynamics is written; the published one lies on the leaky one "
        "and gets less far, for it slows down as its tokens grow.")  # fmt: skip
    made.table(
        "All held-out images, half of the patches hidden, masks fixed by seed. Error: mean "
        "squared error over the variance of all training pixels.",
        BASELINE_HEADER, rows_of(record["baselines"]),
    )  # fmt: skip
    far = int(result["et"].to_dataset()["horizon"][-1])
    made.table(
        "Euler against flow, means over images. Columns 2 to 6: distance in g at the training "
        "horizon, at equal time, at equal clock, and to the nearest point of the flow's path. "
        "Energy gap: that of the Euler run above the flow there. Errors at 1 and (far) "
        f"{far} training horizons. Rises: steps of the whole run that raise the energy.",
        *table(result),
    )  # fmt: skip
    made.text("Limits", LIMITS)
    return made
