"""The page of `graph_classification`: words and tables, made from its result alone."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import xarray as xr

from etdyn.report import Report
from studies import graph_classification_figures as figures
from studies.graph_classification_models import NETWORKS, title

Cells = tuple[tuple[str, ...], list[tuple[str, ...]]]

TITLE = "Graph classification: does a descent tell graphs apart?"
QUESTION = (
    "The Energy Transformer is published as a strong classifier of graphs. How accurate is it when "
    "the test graphs take no part in any choice, next to networks made for graphs that are trained "
    "by the same code on the same folds? How much does the published notebooks' protocol add? And "
    "is what is read out an equilibrium of the energy, or a stage of the way there?"
)
LIMITS = (
    "One seed of folds and weights: deviations are over folds, which share training graphs, so "
    "they are no confidence intervals. Sizes, dropout and learning rates are the same on every "
    "data set and were not searched per model and set. The forests and regressions train on the "
    "validation graphs too, as they have no epochs to choose. Only the Energy Transformer and the "
    "graph transformer see edge features and positions; GIN and GCN, as published, do not. "
    "The read-out takes raw states, which keep growing under the published dynamics, and was "
    "trained at the horizon only: accuracy beyond it tells where the descent goes, not how well a "
    "classifier trained there would do. Seconds are those of one run on a shared machine."
)


def config_of(result: xr.DataTree) -> dict[str, Any]:
    """What was run."""
    config: dict[str, Any] = json.loads(result.attrs["etdyn_config"])["study"]
    return config


def percent(values: xr.DataArray) -> str:
    """Mean and standard deviation over folds."""
    return f"{100 * float(values.mean()):.1f} ± {100 * float(values.std(ddof=1)):.1f}"


# --- words --------------------------------------------------------------------------------------


def protocol(result: xr.DataTree) -> list[str]:
    """How it was measured."""
    config, sets = config_of(result), result["sets"].to_dataset()
    described = "; ".join(
        f"{name}: {int(one['graphs'])} graphs of {int(one['classes'])} classes, "
        f"{float(one['nodes']):.1f} nodes and {float(one['edges']) / 2:.1f} edges a graph, "
        f"{int(one['node_features'])} features a node and {int(one['edge_features'])} an edge"
        for name in sets["data"].values
        for one in [sets.sel(data=name)]
    )
    et = config["et"]
    return [
        f"Data: {described}. The superpixel digits are made here and are no benchmark.",
        f"Nested cross-validation in {config['folds']} stratified folds (seed {config['seed']}). "
        "In each, a tenth of the other graphs, stratified, is the inner validation, by which the "
        "epoch is chosen; features are scaled by the training graphs; the test fold is scored "
        "once. Every network is trained by the same loop: AdamW with warm-up and cosine, averaged "
        f"weights, batches of {config['batch']} graphs, at most "
        f"{', '.join(map(str, config['epochs']))} epochs, patience "
        f"{', '.join(map(str, config['patience']))}. Every model has the same folds.",
        f"The Energy Transformer has {et['blocks']} blocks of {et['steps']} step(s) of "
        f"{et['step']:g}, {et['heads']} heads and {et['memories']} memories on tokens of "
        f"{et['dim']} features. A CLS token is joined to all nodes; edge weights come from the "
        "first tokens by a map that does not see how the nodes are numbered, and walk return "
        "probabilities stand for the Laplacian's eigenvectors, so that nothing depends on the "
        "numbering.",
    ]  # fmt: skip


def competition(result: xr.DataTree) -> str:
    """Who is how accurate, and how the Energy Transformer stands to GIN."""
    scores, said, near = result["scores"].to_dataset(), [], 0
    models = {str(m) for m in scores["model"].values}
    for name in scores["data"].values:
        one = scores["test_accuracy"].sel(data=name)
        best = str(one.mean("fold").idxmax("model").values)
        words = (
            f"On {name} the best mean is that of {title(best)}, {percent(one.sel(model=best))} %"
        )
        if "et" in models and best != "et":
            words += f"; the Energy Transformer has {percent(one.sel(model='et'))} %"
        for other in ("gin", "graph_transformer"):
            if {"et", other} <= models:
                text, good = against(one, other)
                words += f", {text}"
                near += good and other == "gin"
        said.append(words + ".")
    if {"et", "gin"} <= models:
        said.append(
            f"The Energy Transformer is within one standard deviation of GIN, or better, on {near} "
            f"of {scores.sizes['data']} data set(s)."
        )
    return " ".join([*said, *constant(result)])


def constant(result: xr.DataTree) -> list[str]:
    """Which networks do not beat a constant answer, so that nothing else about them counts."""
    scores, sets = result["scores"].to_dataset(), result["sets"].to_dataset()
    at_most = scores["test_accuracy"].mean("fold") <= sets["majority"]
    found = [
        f"{title(str(model))} on {name}"
        for name in scores["data"].values
        for model in scores["model"].values
        if str(model) in NETWORKS and bool(at_most.sel(data=name, model=model))
    ]
    return [f"NO BETTER THAN NAMING THE LARGEST CLASS: {', '.join(found)}."] if found else []


def cut_short(result: xr.DataTree) -> str:
    """Which networks were still getting better when the epochs ended."""
    scores, unfinished, all_of = result["scores"].to_dataset(), [], 0
    for name in scores["data"].values:
        for model in scores["model"].values:
            one = scores.sel(data=name, model=model)
            if str(model) not in NETWORKS:
                continue
            all_of += 1
            if float(one["best_epoch"].mean()) > 0.8 * float(one["epochs"].max()):
                unfinished.append(f"{title(str(model))} on {name}")
    if not unfinished:
        return f"None of {all_of} trainings of a network was cut short by the epochs."
    return (
        f"CUT SHORT: with so few epochs the chosen one lies, in the mean over folds, in the last "
        f"fifth for {', '.join(unfinished)}; longer training would help there."
    )


def against(accuracy: xr.DataArray, other: str) -> tuple[str, bool]:
    """The Energy Transformer next to another, fold by fold; and whether it is near or better."""
    theirs = accuracy.sel(model=other)
    gap = 100 * (accuracy.sel(model="et") - theirs)
    mean, spread = float(gap.mean()), 100 * float(theirs.std(ddof=1))
    if mean >= 0:
        verdict = "at least as good as"
    else:
        verdict = "within one standard deviation of" if mean >= -spread else "BEHIND"
    return (
        f"{verdict} {title(other)} ({percent(theirs)} %; difference fold by fold {mean:+.1f} ± "
        f"{float(gap.std(ddof=1)):.1f} points)"
    ), mean >= -spread


def warning(result: xr.DataTree) -> str:
    """What the published protocol would have said."""
    leak, scores = result["leak"].to_dataset(), result["scores"].to_dataset()
    said = [
        "NOT A RESULT. The numbers that the authors' notebooks print for the TU data sets were "
        "computed on graphs that the model was trained on (ET section 2.4, defect 13). Trained on "
        "all graphs, for all epochs, and scored on the same:"
    ]
    for name in leak["data"].values:
        for model in leak["model"].values:
            cell = {"data": name, "model": model}
            published = 100 * float(leak["published"].sel(cell))
            honest = 100 * float(scores["test_accuracy"].sel(cell).mean())
            said.append(
                f"{title(str(model))} on {name} {published:.1f} % instead of {honest:.1f} %, "
                f"{published - honest:+.1f} points;"
            )
    return " ".join(said).removesuffix(";") + "."


def following(name: str, group: xr.Dataset) -> str:
    """What the blocks do beyond their steps."""
    horizon, last, graphs = group.attrs["horizon"], group.isel(block=-1), group.sizes["graph"]
    far = float(group["time"][-1])
    falls = group["energy"].isel(step=-1) < group["energy"].isel(step=0)
    part = share_of_fall(group)
    accuracy = {
        when: 100 * float(values.mean())
        for when, values in {
            "model": last["euler_correct"].sel(run=horizon),
            "flow": last["flow_correct"].sel(time=horizon),
            "flow far": last["flow_correct"].isel(time=-1),
            "Euler far": last["euler_correct"].isel(run=-1),
            "rest": group["rest_correct"],
        }.items()
    }
    error = 100 * float(last["euler_correct"].sel(run=horizon).std()) / math.sqrt(graphs)
    beyond = max(abs(accuracy[k] - accuracy["model"]) for k in ("flow far", "Euler far"))
    verdict = (
        "what is read out is a stage of the descent, not its end"
        if beyond > 2 * error
        else "the decision hardly depends on where along the descent it is read"
    )
    resting = group["rest_converged"]
    commonest = float(np.bincount(group["label"]).max()) / graphs
    return (
        f"On {graphs} test graphs of {name} the energy falls in {int(falls.sum())} of {falls.size} "
        f"passes of a graph through a block. The {group.attrs['steps']} step(s) of "
        f"{group.attrs['alpha']:g} of a block gain, in the mean over graphs, "
        + ", ".join(f"{100 * v:.0f} % (block {b})" for b, v in zip(
            group["block"].values, part, strict=True))
        + f" of the fall that its flow reaches at t = {far:g}. There the last block's residual is "
        f"{float(last['flow_imbalance'].isel(time=-1).median()):.2g} of the force (median over "
        f"graphs; {float(last['flow_imbalance'].isel(time=0).median()):.2g} at its start). "
        f"Accuracy of the read-out: {accuracy['model']:.1f} % for the model (standard error "
        f"{error:.1f}; {100 * commonest:.1f} % are of one class), "
        f"{accuracy['flow']:.1f} % for the last block's flow at that horizon, "
        f"{accuracy['flow far']:.1f} % at t = {far:g} and {accuracy['Euler far']:.1f} % for Euler "
        f"there, {accuracy['rest']:.1f} % at the leaky flow's equilibrium: {verdict}. "
        f"`find_equilibrium` brought {int(resting.sum())} of {graphs} graphs below a residual of "
        f"{group.attrs['tight']:g}, in {float(group['rest_evaluations'].median()):.0f} evaluations "
        f"(median; at most {int(group['rest_evaluations'].max())}). Renumbering the nodes of every "
        f"test graph at random moves the logits by at most {float(group['logit_change']):.1e}, "
        f"where their standard deviation is {float(group['logit_spread']):.2g}, and changes "
        f"{int(group['changed'])} predicted classes."
    )  # fmt: skip


def share_of_fall(group: xr.Dataset) -> np.ndarray[Any, Any]:
    """The fall of the energy within the model's steps over that of the flow, `(block,)`."""
    model = (group["energy"].isel(step=-1) - group["energy"].isel(step=0)).mean("graph")
    flow = (group["flow_energy"].isel(time=-1) - group["flow_energy"].isel(time=0)).mean("graph")
    return np.asarray(model / flow)


def findings(result: xr.DataTree) -> list[str]:
    """The result in words: accuracy, the warning, and the descent on every data set."""
    said = [competition(result), cut_short(result)]
    if "leak" in result.children:
        said.append(warning(result))
    return said + [following(name, group) for name, group in descents(result).items()]


def descents(result: xr.DataTree) -> dict[str, xr.Dataset]:
    """Every data set's, by name."""
    if "descent" not in result.children:
        return {}
    return {str(name): node.to_dataset() for name, node in result["descent"].children.items()}


# --- tables -------------------------------------------------------------------------------------


def accuracy_table(result: xr.DataTree) -> Cells:
    """Mean and deviation of every model on every data set."""
    scores, sets = result["scores"].to_dataset(), result["sets"].to_dataset()
    names = scores["data"].values
    rows: list[tuple[str, ...]] = [
        ("largest class", "nothing", *(f"{100 * float(v):.1f}" for v in sets["majority"]))
    ]
    for model in scores["model"].values:
        one = scores["test_accuracy"].sel(model=model)
        views = str(scores["sees"].sel(model=model).values)
        rows.append((title(str(model)), views, *(percent(one.sel(data=n)) for n in names)))
    return ("model", "sees, beside node features", *(f"{n} (%)" for n in names)), rows


def cost_table(result: xr.DataTree) -> Cells:
    """What a fold of every model costs."""
    scores = result["scores"].to_dataset()
    rows: list[tuple[str, ...]] = []
    for name in scores["data"].values:
        for model in scores["model"].values:
            one = scores.sel(data=name, model=model).mean("fold")
            network = str(model) in NETWORKS
            numbers = (
                f"{float(one['parameters']):,.0f}", f"{float(one['epochs']):.0f}",
                f"{float(one['best_epoch']):.0f}", f"{float(one['saved_bytes']) / 2**20:.1f}",
                f"{100 * float(one['validation_accuracy']):.1f}",
                f"{100 * float(one['train_accuracy']):.1f}",
            )  # fmt: skip
            cells = numbers if network else ("",) * len(numbers)
            rows.append((f"{name}, {title(str(model))}", f"{float(one['seconds']):.1f}", *cells))
    header = (
        "data, model", "seconds", "parameters", "epochs", "chosen", "MiB a batch", "validation (%)",
        "training (%)",
    )  # fmt: skip
    return header, rows


def leak_table(result: xr.DataTree) -> Cells:
    """The published protocol next to the honest one."""
    leak, scores = result["leak"].to_dataset(), result["scores"].to_dataset()
    rows: list[tuple[str, ...]] = []
    for name in leak["data"].values:
        for model in leak["model"].values:
            cell = {"data": name, "model": model}
            published, honest = leak["published"].sel(cell), scores["test_accuracy"].sel(cell)
            rows.append((
                f"{name}, {title(str(model))}", f"{100 * float(published):.1f}", percent(honest),
                f"{100 * float(published - honest.mean()):+.1f}",
            ))  # fmt: skip
    return ("data, model", "NOT HELD OUT (%)", "held out (%)", "inflation (points)"), rows


def report(result: xr.DataTree) -> Report:
    """The page: question, protocol, result, warning, limits."""
    made = Report(TITLE)
    made.text("Question", QUESTION)
    made.text("Protocol", *protocol(result))
    made.text("Result: accuracy", competition(result), cut_short(result))
    made.figure("accuracy", figures.draw_accuracy(result), figures.CAPTIONS["accuracy"])
    made.table(
        "Test accuracy, mean and standard deviation over the outer folds. Sums, means and counts: "
        "of node features, and the numbers of nodes and edges.", *accuracy_table(result),
    )  # fmt: skip
    made.table(
        "Means over folds. Epochs: run, and chosen by validation. MiB: what one training batch "
        "keeps for the backward pass. The last two columns are accuracies.", *cost_table(result),
    )  # fmt: skip
    if "leak" in result.children:
        made.text("WARNING: the published protocol", warning(result))
        made.table("Trained and scored on the same graphs, and nested.", *leak_table(result))
    for number, (name, group) in enumerate(descents(result).items()):
        made.text(f"Result: descent on {name}", following(name, group))
        caption = figures.CAPTIONS["descent"].format(name=name, steps=group.attrs["steps"])
        key = "descent" if number == 0 else f"descent_{number + 1}"
        made.figure(key, figures.draw_descent(group), caption)
    made.text("Limits", LIMITS)
    return made
