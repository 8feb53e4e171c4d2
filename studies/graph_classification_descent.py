"""Where a trained graph classifier's descent goes when it is not stopped after T steps."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor, nn

import etdyn as ed
from etdyn.analysis.labels import flags, labelled
from etdyn.datasets import GraphSet
from etdyn.solve import Solution, Status, iterate
from etdyn.systems import System
from etdyn.tasks import GraphClassifier, GraphData
from etdyn.tasks.graph_training import predict

Array = npt.NDArray[Any]
EARLY = 3  # halvings of the training horizon before its end
TOLERANCE = 1e-6  # of the flow
TIGHT = 1e-8  # of the equilibria's residual


@dataclass(frozen=True)
class Trained:
    """The model of one fold, the graphs scaled for it, and the rows of its test graphs."""

    model: GraphClassifier
    data: GraphData
    test: Tensor


def renumbered(graphs: GraphSet, seed: int) -> GraphSet:
    """The same graphs with the nodes of each in another order."""
    rng = torch.Generator().manual_seed(seed)
    features, edges = [], []
    for rows, ends in zip(graphs.features, graphs.edges, strict=True):
        new = torch.randperm(len(rows), generator=rng)
        features.append(rows[new.argsort()])
        edges.append(new[ends])
    return GraphSet(
        features, edges, graphs.edge_features, graphs.labels, graphs.name, graphs.classes
    )


def invariance(model: nn.Module, data: GraphData, moved: GraphData, rows: Tensor) -> xr.Dataset:
    """How far logits move when nodes are renumbered, in float32 from the raw graph on."""
    here, there = (predict(model, part, rows) for part in (data, moved))
    changed = here.argmax(1) != there.argmax(1)
    return xr.Dataset({
        "logit_change": labelled((), float((here - there).abs().max()), "largest change of logits"),
        "logit_spread": labelled((), float(here.std()), "standard deviation of all logits"),
        "changed": labelled((), int(changed.sum()), "graphs whose predicted class changed"),
    })  # fmt: skip


def descent(trained: Trained, follow: int, doublings: int, evaluations: int) -> xr.Dataset:
    """Every block run on beyond its T steps, and the last one to equilibrium, in float64.

    Args:
        trained: its model is left as it is found, in float32.
        follow: at most so many test graphs, drawn at random: files list graphs class by class.
        doublings: of the training horizon T alpha.
        evaluations: at most, of the search for an equilibrium.

    Returns:
        Dataset over block, step (of the model), time (of the flow), run (of Euler), and graph.
    """
    model = copy.deepcopy(trained.model).double().requires_grad_(False)
    order = torch.randperm(len(trained.test), generator=torch.Generator().manual_seed(0))
    rows = trained.test[order[:follow]].sort().values
    batch = trained.data.batch(rows, padded=True).double()
    horizon = model.steps * model.step
    runs = np.concatenate([[0], 2 ** np.arange(doublings + 1)])
    times = horizon * np.concatenate([[0.0], 2.0 ** np.arange(-EARLY, doublings + 1)])

    def correct(_: System, x: Tensor) -> Tensor:
        """Which graphs the read-out classifies correctly when it is given this state."""
        logits: Tensor = model.read_out(x, batch)
        return logits.argmax(1) == batch.labels

    save = (energy, imbalance, correct)
    solutions, parts = model.solutions(batch), []
    for block in solutions:
        steps = torch.stack([energy(block.system, x) for x in block.x])
        parts.append({
            "energy": labelled(("step", "graph"), steps, "energy E(g) of the model"),
            **_flow(block, times, save), **_euler(block, runs * model.steps, model.step, save),
        })  # fmt: skip
    found = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    coords = {
        "block": np.arange(1, len(parts) + 1), "step": np.arange(model.steps + 1),
        "time": times, "run": runs * horizon, "graph": rows.numpy(),
    }  # fmt: skip
    found |= _equilibria(solutions[-1], evaluations, correct)
    found["label"] = labelled("graph", batch.labels, "class")
    found["tokens"] = labelled("graph", batch.sizes + 1, "nodes and CLS")
    attrs = {"horizon": horizon, "alpha": model.step, "steps": model.steps, "tight": TIGHT}
    return xr.Dataset(found, coords, attrs)


def energy(system: System, x: Tensor) -> Tensor:
    """E(g), `(graph,)`."""
    return system.interaction_energy(x)


def imbalance(system: System, x: Tensor) -> Tensor:
    """The residual over the force, `(graph,)`: 1 before it turns, 0 at equilibrium."""
    force = system.keep(system.force(x)).square().sum((1, 2)).sqrt()
    return system.residual(x) / force


NAMES = {
    "energy": "energy E(g)",
    "imbalance": "residual |P grad E| over |grad E|",
    "correct": "classified correctly by the read-out",
}
Save = tuple[Callable[[System, Tensor], Tensor], ...]


def _flow(block: Solution, times: Array, save: Save) -> dict[str, Any]:
    """From the block's start."""
    flow = ed.solve(
        block.system, block.x[0], times.tolist(), rtol=TOLERANCE, atol=TOLERANCE, gradient=None,
        save=save,
    )  # fmt: skip
    return {
        f"flow_{name}": labelled(("time", "graph"), values, f"{NAMES[name]}, flow")
        for name, values in flow.saved.items()
    }


def _euler(block: Solution, counts: Array, step: float, save: Save) -> dict[str, Any]:
    """At the trained step from the block's start, seen after these numbers of steps."""
    start = block.x[0]
    states = itertools.chain([start], iterate(block.system, start, step, int(counts[-1])))
    seen = [[of(block.system, x) for of in save] for k, x in enumerate(states) if k in counts]
    return {
        f"euler_{of.__name__}": labelled(
            ("run", "graph"), torch.stack(values), f"{NAMES[of.__name__]}, Euler"
        )
        for of, values in zip(save, zip(*seen, strict=True), strict=True)
    }


def _equilibria(
    block: Solution, evaluations: int, correct: Callable[[System, Tensor], Tensor]
) -> dict[str, Any]:
    """Where the leaky flow of the last block rests, sought from where the model ends."""
    system = block.system.with_dynamics("leaky")
    found = ed.find_equilibrium(system, block.x[-1], tol=TIGHT, max_evaluations=evaluations)
    assert found.energy is not None
    values = {
        "energy": (found.energy, "energy E(g)"),
        "residual": (found.residual, "residual |P grad E|"),
        "imbalance": (imbalance(system, found.x), NAMES["imbalance"]),
        "converged": (found.converged, "whether the residual fell below the tolerance"),
        "evaluations": (found.evaluations, "evaluations"),
        "correct": (correct(system, found.x), NAMES["correct"]),
    }
    made = {
        f"rest_{n}": labelled("graph", v, f"at equilibrium: {t}") for n, (v, t) in values.items()
    }
    return made | {"rest_status": flags("graph", found.status, Status)}


def _joined(parts: list[Any]) -> Any:
    """The same variable of every block."""
    dims, _, attrs = parts[0]
    return ("block", *dims), np.stack([values for _, values, _ in parts]), attrs
