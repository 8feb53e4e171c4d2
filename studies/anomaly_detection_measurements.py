"""What `anomaly_detection` measures beside scores: the trained flow, energies without labels."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

import etdyn as ed
from etdyn.solve import iterate
from etdyn.systems import System
from etdyn.tasks.anomaly import NodeClassifier, graph_system
from etdyn.tasks.detection import NodeSplit
from etdyn.tasks.node_baselines import node_table
from etdyn.tasks.node_completion import (
    CompletionRecipe,
    NodeCompletion,
    fit_completion,
    node_scores,
)
from etdyn.tasks.node_data import NodeData

TOLERANCE = 1e-5  # of the flow, relative; and of the residual at equilibrium, to the force
EVALUATIONS = 400  # that the search for an equilibrium may take


@torch.no_grad()
def follow(model: NodeClassifier, data: NodeData, split: NodeSplit, horizons: float) -> xr.Dataset:
    """The trained model's flow and its Euler steps, in float64, far beyond the training horizon.

    Returns:
        Dataset over `time`, `step` and `relation`: energies less their zero-weight part and
        residual, each a node, and the test ROC-AUC that the head reads out of the states there;
        and the same at the equilibrium to which the flow's end leads.
    """
    model = copy.deepcopy(model).double().eval()
    first = model.start(data.features.double())
    systems = [model.system.on(graph) for graph in data.graphs]
    horizon = model.step * model.steps
    times = np.unique(np.append(
        np.geomspace(horizon / 30, horizons * horizon, 25), [0.0, horizon]
    ).round(12))  # fmt: skip
    flows = [
        ed.solve(system, first, times.tolist(), rtol=TOLERANCE, atol=TOLERANCE, gradient=None)
        for system in systems
    ]
    count = math.ceil(horizons * model.steps)
    runs = [_euler(system, first, model.step, count) for system in systems]
    reader = _Reader(model, first, data, split)
    parts = {
        "flow": ("time", [list(flow.x) for flow in flows]),
        "euler": ("step", runs),
    }
    found: dict[str, Any] = {}
    for name, (dim, states) in parts.items():
        found[f"{name}_roc_auc"] = (dim, [reader(list(ends)) for ends in zip(*states, strict=True)])
        rows = [[_observe(system, x) for x in path]
                for system, path in zip(systems, states, strict=True)]  # fmt: skip
        for quantity in rows[0][0]:
            values = [[row[quantity] for row in path] for path in rows]
            found[f"{name}_{quantity}"] = (("relation", dim), values)
    found |= _rest(systems, [flow.x[-1] for flow in flows], reader)
    coords = {"time": times, "step": np.arange(count + 1), "relation": np.arange(len(systems))}
    attrs = {
        "training_horizon": horizon,
        "training_steps": model.steps,
        "step_size": model.step,
        "tolerance": TOLERANCE,
    }
    return xr.Dataset(found, coords, attrs)


def _euler(system: System, x0: Tensor, step: float, count: int) -> list[Tensor]:
    x = system.prepare(x0)
    return [x, *iterate(system, x, step, count)]


class _Reader:
    """The test ROC-AUC of the head's answer to states, one of every relation."""

    def __init__(
        self, model: NodeClassifier, first: Tensor, data: NodeData, split: NodeSplit
    ) -> None:
        self.model, self.first, self.test = model, first, split.test
        self.labels = data.labels[split.test].numpy(force=True)

    def __call__(self, ends: list[Tensor]) -> float:
        from sklearn.metrics import roc_auc_score  # noqa: PLC0415 (slow to import)

        logits = self.model.decode(self.first, ends)[self.test]
        return float(roc_auc_score(self.labels, (logits[:, 1] - logits[:, 0]).numpy(force=True)))


def _observe(system: System, x: Tensor) -> dict[str, float]:
    """A node's share of the energies, and its mean residual."""
    nodes = x.shape[1]
    parts = {name: float(value) / nodes for name, value in
             system.energies(x, relative=True).items() if name != "lagrangian"}  # fmt: skip
    return {
        "energy": sum(parts.values()),
        **{f"energy_{name}": value for name, value in parts.items()},
        "residual": float(system.residual(x)) / math.sqrt(nodes),
    }


def _rest(systems: list[System], starts: list[Tensor], reader: _Reader) -> dict[str, Any]:
    """Equilibria from the flows' ends."""
    found, ends = [], []
    for system, x in zip(systems, starts, strict=True):
        leaky = system.with_dynamics("leaky")
        tol = TOLERANCE * float(leaky.force(x).norm())
        rest = ed.find_equilibrium(leaky, x, tol=tol, max_evaluations=EVALUATIONS)
        ends.append(rest.x)
        found.append({
            "converged": bool(rest.converged[0]),
            "evaluations": int(rest.evaluations[0]),
            "residual": float(rest.residual[0]) / math.sqrt(x.shape[1]),
            "energy": _observe(system, rest.x)["energy"],
            "alignment": _alignment(system, rest.x),
        })  # fmt: skip
    columns = {f"rest_{name}": ("relation", [row[name] for row in found]) for name in found[0]}
    return columns | {"rest_roc_auc": ((), reader(ends))}


def _alignment(system: System, x: Tensor) -> float:
    """Length of the mean direction of all nodes in g: 1 if all agree, 0 if they balance."""
    y = x - x.mean(-1, keepdim=True)
    return float((y / y.norm(dim=-1, keepdim=True)).mean(1).norm())


# --- without labels ----------------------------------------------------------------------------


def without_labels(data: NodeData, seeds: int, recipe: CompletionRecipe) -> xr.Dataset:
    """ROC-AUC and average precision, over all labelled nodes, of scores that saw no label.

    Energies and completion errors of an Energy Transformer that completes hidden features, its
    energies before that training, and scikit-learn's isolation forest.

    Returns:
        Dataset over `score` and `seed`.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score  # noqa: PLC0415

    known = (data.labels >= 0).numpy(force=True)
    y = data.labels.numpy(force=True)[known]
    rows = [_scores(data, seed, recipe) for seed in range(seeds)]
    kept = [{name: score.numpy(force=True)[known] for name, score in row.items()} for row in rows]
    names = list(kept[0])
    measures = {"roc_auc": roc_auc_score, "average_precision": average_precision_score}
    columns = {
        name: (("score", "seed"), [[float(f(y, row[score])) for row in kept] for score in names])
        for name, f in measures.items()
    }
    coords = {"score": np.array(names, dtype=str), "seed": np.arange(seeds)}
    return xr.Dataset(columns, coords, {"anomaly_share": float(y.mean())})


def _scores(data: NodeData, seed: int, recipe: CompletionRecipe) -> dict[str, Tensor]:
    from sklearn.ensemble import IsolationForest  # noqa: PLC0415 (slow to import)

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = NodeCompletion(graph_system(), data.features.shape[1])
    fresh = node_scores(model, data, seed=seed)["energy"]
    fit_completion(model, data, recipe, seed)
    found = node_scores(model, data, seed=seed) | {"energy, untrained": fresh}
    for name, neighbours in (("isolation forest", False), ("isolation forest + neighbours", True)):
        table = node_table(data, neighbours)
        forest = IsolationForest(random_state=seed).fit(table)
        found[name] = torch.from_numpy(-forest.score_samples(table))
    return found
