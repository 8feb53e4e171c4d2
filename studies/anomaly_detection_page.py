"""The page of `anomaly_detection`: words, tables and figures, made from its result alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from etdyn import plots
from etdyn.report import Report

ET, FOREST, GCN = "Energy Transformer", "random forest + neighbours", "GCN"
HEADER = ("model", "ROC-AUC", "average precision", "Macro-F1", "parameters", "seconds", "saved MB")

QUESTION = (
    "An Energy Transformer on a graph moves every node down an energy that couples it to its "
    "neighbours. Does that descent tell which nodes do not belong, as well as models that were "
    "made for graphs or for tables; is what it learned a stage of the descent or its end; and "
    "does the energy point at anomalies when no label was ever seen?"
)
LIMITS = (
    "Published numbers on these graphs use other splits, features or relations and do not compare. "
    "Networks have one recipe and, but for the Energy Transformer, one untuned configuration. "
    "The energy of a node is its share as a query plus that of its memories; what it pulls as a "
    "key is counted with its neighbours. Scores of several seeds share the graph and most nodes, "
    "so their deviation says how much splits and weights matter, not how another graph would do. "
    "Seconds are wall time on a shared machine. 'Saved' is what one training step keeps for its "
    "backward pass."
)


def spread(values: xr.DataArray) -> str:
    """Mean and standard deviation over seeds."""
    mean, one = f"{float(values.mean('seed')):.3f}", values.sizes["seed"] == 1
    return mean if one else f"{mean} ± {float(values.std('seed', ddof=1)):.3f}"


def table(result: xr.DataTree, share: float) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Every model at one share, best ROC-AUC first."""
    scores = result["scores"].to_dataset().sel(share=share)
    order = np.argsort(-scores["roc_auc"].mean("seed").to_numpy())
    rows = []
    for model in scores["model"].to_numpy()[order]:
        row = scores.sel(model=model)
        size, saved = float(row["parameters"][0]), float(row["saved_bytes"].mean()) / 2**20
        told = (spread(row[name]) for name in ("roc_auc", "average_precision", "macro_f1"))
        rows.append((
            str(model), *told,
            "-" if np.isnan(size) else f"{size:.0f}", f"{float(row['seconds'].mean()):.1f}",
            "-" if np.isnan(saved) else f"{saved:.1f}",
        ))  # fmt: skip
    return (f"{100 * share:g} % for training", *HEADER[1:]), rows


def variations(result: xr.DataTree) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What was tried, in the order of the configuration."""
    tried = result["variations"].to_dataset()
    rows = [
        (str(name), *(f"{float(tried[score].sel(variation=name).mean()):.3f}"
                      for score in ("validation_roc_auc", "roc_auc")),
         f"{float(tried['seconds'].sel(variation=name).mean()):.1f}")
        for name in tried["variation"].to_numpy()
    ]  # fmt: skip
    return ("changed", "validation ROC-AUC", "test ROC-AUC", "seconds"), rows


def against(result: xr.DataTree, other: str) -> str:
    """How the Energy Transformer stands to a model, at every share, paired by seed."""
    scores = result["scores"].to_dataset()["roc_auc"]
    if other not in scores["model"]:
        return ""
    told = []
    for share in scores["share"].to_numpy():
        gap = (scores.sel(model=ET) - scores.sel(model=other)).sel(share=share)
        wins = int((gap > 0).sum())
        told.append(
            f"{float(gap.mean()):+.3f} at {100 * share:g} % (ahead in {wins} of {gap.size} seeds)"
        )
    return f"Against {other} its ROC-AUC differs by " + " and ".join(told) + ". "


def findings(result: xr.DataTree, record: dict[str, Any]) -> str:
    """What was found, with every number taken from the result."""
    scores = result["scores"].to_dataset()["roc_auc"]
    first = scores.isel(share=0)
    best = str(first["model"].to_numpy()[int(first.mean("seed").to_numpy().argmax())])
    own = ", ".join(
        f"{spread(scores.sel(model=ET, share=share))} with {100 * share:g} %"
        for share in scores["share"].to_numpy()
    )
    most = f"With {100 * float(first['share']):g} % the best of all is "
    lead = most + ("the Energy Transformer. " if best == ET else f"{best}. ")
    return (
        f"Test ROC-AUC of the Energy Transformer, mean and deviation over {scores.sizes['seed']} "
        f"seeds: {own} of the labelled nodes for training. {lead}"
        + against(result, FOREST) + against(result, GCN) + beyond(result) + unlabelled(result)
    )  # fmt: skip


def beyond(result: xr.DataTree) -> str:
    """What happens past the training horizon."""
    run = result["descent"].to_dataset()
    horizon = run.attrs["training_horizon"]
    flow, euler = run["flow_roc_auc"], run["euler_roc_auc"]
    at = float(flow.sel(time=horizon, method="nearest"))
    rises = int((run["euler_energy"].diff("step") > 1e-12 * abs(run["euler_energy"][0, 0])).sum())
    top = float(run["time"][int(flow.to_numpy().argmax())])
    rest = bool(run["rest_converged"].all())
    return (
        f"Read out along the flow of the first trained model, the ROC-AUC is {float(flow[0]):.3f} "
        f"at the start, {at:.3f} at the training horizon t = {horizon:g} "
        f"({float(euler[run.attrs['training_steps']]):.3f} after the {run.attrs['training_steps']} "
        f"Euler steps), best at t = {top:.2g} ({float(flow.max()):.3f}) and "
        f"{float(flow[-1]):.3f} at t = {float(run['time'][-1]):g}. Its Euler steps raise the "
        f"energy {rises} times in {run.sizes['step'] - 1}. From there the equilibrium search "
        f"{'converges' if rest else 'does not converge'} in "
        f"{int(run['rest_evaluations'].max())} evaluations, to a residual of "
        f"{float(run['rest_residual'].max()):.1e} a node, where the nodes' directions have a mean "
        f"of length {float(run['rest_alignment'].max()):.2f} and the ROC-AUC is "
        f"{float(run['rest_roc_auc']):.3f}. "
    )


def unlabelled(result: xr.DataTree) -> str:
    """The scores that saw no label."""
    scores = result["without_labels"].to_dataset()["roc_auc"]
    told = [f"{score}: {spread(scores.sel(score=score))}" for score in scores["score"].to_numpy()]
    return "Without any label the ROC-AUC is, " + "; ".join(told) + "."


def protocol(result: xr.DataTree, record: dict[str, Any]) -> str:
    """How it was measured."""
    study, scores = record["study"], result["scores"].to_dataset()
    origin = (
        "This graph was made by us so that the study runs without a download, and is no benchmark. "
        if record["made_by_us"] else ""
    )  # fmt: skip
    shares = " and ".join(f"{100 * share:g} %" for share in scores["share"].to_numpy())
    model = study["model"]
    return (
        f"{record['data']}. {origin}Labelled nodes are split at random, stratified, anew for each "
        f"of {scores.sizes['seed']} seeds: {shares} for training, a third of the rest for "
        "validation, two thirds for the test; unlabelled nodes are in the graph and in no part. "
        "Every model sees the same features: those of the data and the logarithm of each node's "
        "degree, standardised, and as ranks. Networks are trained on the whole graph with cross "
        f"entropy weighted by class, AdamW, {study['recipe']['epochs']} epochs at most; the "
        "running average of the weights with the best validation ROC-AUC is scored once on the "
        "test nodes, and Macro-F1 has the threshold that is best in validation. Forests and "
        "regressions choose their leaf and their penalty there. The Energy Transformer has "
        f"{model['steps']} Euler steps of {model['step']:g} ({model['dynamics']}), dim "
        f"{model['dim']}, {model['heads']} head(s) of {model['head_dim']} and "
        f"{model['memories']} memories; its head sees the first and the last activations. "
        "Variations are judged by validation. The flow is dopri5 at rtol "
        f"{result['descent'].attrs['tolerance']:g} in float64."
    )


def draw_scores(result: xr.DataTree) -> Figure:
    """ROC-AUC of every model, seed and share."""
    scores = result["scores"].to_dataset()["roc_auc"]
    figure, axes = plots.panels(scores.sizes["share"], height=3.2)
    order = np.argsort(scores.isel(share=0).mean("seed").to_numpy())
    names = scores["model"].to_numpy()[order]
    for ax, share in zip(axes[0], scores["share"].to_numpy(), strict=True):
        for k, model in enumerate(names):
            values = scores.sel(share=share, model=model).to_numpy()
            colour = plots.COLOURS[1] if model == ET else plots.COLOURS[0]
            ax.plot(values, np.full(values.size, k), "o", color=colour, alpha=0.5)
            ax.plot(values.mean(), k, "|", color="#000000", markersize=14)
        labels = names if ax is axes[0][0] else [""] * len(names)
        ax.set_yticks(range(len(names)), labels)
        ax.set(xlabel="test ROC-AUC", title=f"{100 * share:g} % for training")
    return figure


def draw_descent(result: xr.DataTree) -> Figure:
    """Energy, residual and ROC-AUC along the flow and the Euler steps, first relation."""
    run = result["descent"].to_dataset()
    figure, axes = plots.panels(3)
    late, step = run.isel(time=slice(1, None)), run.attrs["step_size"]
    steps = run.isel(step=slice(1, None))
    clock = steps["step"] * step
    for k, term in enumerate(("", "_attention", "_hopfield")):
        if f"flow_energy{term}" not in run:
            continue
        axes[0][0].plot(late["time"], late[f"flow_energy{term}"][0], color=plots.COLOURS[k],
                        linestyle=plots.DASHES[k], label=term[1:] or "energy")  # fmt: skip
    axes[0][0].plot(clock, steps["euler_energy"][0], "s", color=plots.COLOURS[0],
                    markerfacecolor="none", label="energy, Euler")  # fmt: skip
    axes[0][1].plot(late["time"], late["flow_residual"][0], color=plots.COLOURS[0], label="flow")
    axes[0][1].plot(clock, steps["euler_residual"][0], "s", color=plots.COLOURS[1],
                    markerfacecolor="none", label="Euler")  # fmt: skip
    axes[0][1].set_yscale("log")
    axes[0][2].plot(late["time"], late["flow_roc_auc"], color=plots.COLOURS[0], label="flow")
    axes[0][2].plot(clock, steps["euler_roc_auc"], "s", color=plots.COLOURS[1],
                    markerfacecolor="none", label="Euler")  # fmt: skip
    axes[0][2].axhline(float(run["rest_roc_auc"]), color="#555555", linewidth=0.9,
                       linestyle=":", label="equilibrium from the flow's end")  # fmt: skip
    for ax, label in zip(
        axes[0], ("energy a node", "residual a node", "test ROC-AUC"), strict=True
    ):
        ax.set(xscale="log", xlabel="flow time t", ylabel=label)
        plots.mark(ax, run.attrs["training_horizon"], "training horizon")
        plots.legend(ax)
    return figure


def draw_unlabelled(result: xr.DataTree) -> Figure:
    """ROC-AUC of the scores that saw no label."""
    scores = result["without_labels"].to_dataset()["roc_auc"]
    figure, axes = plots.panels(1, height=2.6)
    for k, score in enumerate(scores["score"].to_numpy()):
        values = scores.sel(score=score).to_numpy()
        axes[0][0].plot(values, np.full(values.size, k), "o", color=plots.COLOURS[0], alpha=0.5)
        axes[0][0].plot(values.mean(), k, "|", color="#000000", markersize=14)
    axes[0][0].set_yticks(range(scores.sizes["score"]), scores["score"].to_numpy())
    axes[0][0].axvline(0.5, color="#888888", linewidth=0.9, linestyle=(0, (4, 2)))
    axes[0][0].set(xlabel="ROC-AUC over all labelled nodes (dashed: chance)")
    return figure


def report(result: xr.DataTree, record: dict[str, Any]) -> Report:
    """The page: question, protocol, result, limits."""
    made = Report("Anomaly detection by descending an energy on a graph")
    made.text("Question", QUESTION)
    made.text("Protocol", protocol(result, record))
    made.text("Result", findings(result, record))
    made.figure("scores", draw_scores(result),
        "Test ROC-AUC of every model; dots are seeds, bars their mean.")  # fmt: skip
    for share in result["scores"].to_dataset()["share"].to_numpy():
        made.table("Mean ± standard deviation over seeds.", *table(result, float(share)))
    made.figure("descent", draw_descent(result),
        "The first trained model's flow (lines) and its Euler steps (squares) beyond the training "
        "horizon, on the first relation: energies a node less their zero-weight part, residual "
        "|P grad E| over the root of the number of nodes, what the head reads out.")  # fmt: skip
    made.table("What was tried: the Energy Transformer with one thing changed, means over "
               f"{result['variations'].to_dataset().sizes['seed']} seeds.",
               *variations(result))  # fmt: skip
    made.figure("without_labels", draw_unlabelled(result),
        "Scores that saw no label. Energies are those of a model trained to complete hidden "
        "features; untrained: before that training.")  # fmt: skip
    made.text("Limits", LIMITS)
    return made
