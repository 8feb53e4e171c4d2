"""Does descending an energy on a graph tell which of its nodes do not belong?

Trains an Energy Transformer and the usual baselines on the same features, splits and recipe, over
several seeds and two sizes of the training set; follows the trained model's flow beyond its
training horizon, to equilibrium; and asks what energies say without any label.

    python -m studies.anomaly_detection --help
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
import xarray as xr
from torch import nn
from tqdm import tqdm

from etdyn import store
from etdyn.checks import bad, check_choice, check_count
from etdyn.datasets import load_nodes
from etdyn.report import format_table
from etdyn.tasks import node_baselines
from etdyn.tasks.anomaly import NodeClassifier, graph_system
from etdyn.tasks.detection import detection_scores, split_nodes
from etdyn.tasks.node_baselines import node_table
from etdyn.tasks.node_completion import CompletionRecipe
from etdyn.tasks.node_data import NodeData, prepare_nodes
from etdyn.tasks.node_training import Fit, NodeRecipe, anomaly_probability, fit_nodes
from studies import anomaly_detection_page as page
from studies.anomaly_detection_measurements import follow, without_labels

ET = "Energy Transformer"
NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "graph transformer": node_baselines.GraphTransformer,
    "GCN": node_baselines.GCN,
    "GIN": node_baselines.GIN,
    "MLP": node_baselines.MLP,
}
TABLES = {
    "random forest + neighbours": (node_baselines.forest_probability, True),
    "random forest": (node_baselines.forest_probability, False),
    "logistic regression + neighbours": (node_baselines.regression_probability, True),
    "logistic regression": (node_baselines.regression_probability, False),
}
"""With whether the table holds the means over neighbours."""


@dataclass(frozen=True)
class Model:
    """The Energy Transformer of this study."""

    dim: int = 64
    """Features of a token."""
    heads: int = 2
    """Attention heads."""
    head_dim: int = 32
    """Features of a head."""
    memories: int = 256
    """Memories of the Hopfield network."""
    dynamics: str = "et"
    """Law of motion: et, leaky or sphere."""
    steps: int = 3
    """Euler steps."""
    step: float = 1.0
    """Size of a step."""
    dropout: float = 0.2
    """Of the encoder's outputs and the head's inputs, in training."""
    head: str = "mlp"
    """mlp or linear."""

    def __post_init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            self.build(1)  # refuses what cannot be built, before anything is trained

    def build(self, features: int) -> NodeClassifier:
        """A fresh model, its weights from the global random state."""
        system = graph_system(self.dim, self.heads, self.head_dim, self.memories, self.dynamics)
        return NodeClassifier(
            system, features, steps=self.steps, step=self.step, dropout=self.dropout,
            head=self.head,
        )  # fmt: skip


VARIATIONS: dict[str, dict[str, Any]] = {
    "as in the table": {},
    "1 step": {"steps": 1},
    "5 steps": {"steps": 5},
    "step 0.2": {"step": 0.2},
    "step 5": {"step": 5.0},
    "leaky": {"dynamics": "leaky", "step": 0.5},
    "sphere": {"dynamics": "sphere", "step": 0.2},
    "1 head": {"heads": 1},
    "dim 32": {"dim": 32},
    "linear head": {"head": "linear"},
}
"""What is changed in the Energy Transformer, one thing at a time."""


@dataclass(frozen=True)
class Config:
    """Compare an Energy Transformer with baselines in finding the anomalous nodes of a graph."""

    name: str = "default"
    """Of the run; results go to runs/anomaly_detection/<name>/."""
    runs: Path = Path("runs")
    """Where results go."""
    data: str = "rare-digit"
    """`rare-digit`, made by us of scikit-learn's digits, or a file or folder; see `load_nodes`."""
    shares: tuple[float, ...] = (0.4, 0.01)
    """Shares of the labelled nodes to train on."""
    seeds: int = 3
    """Splits and initial weights, 0 and up; 5 for a table to be quoted."""
    models: tuple[str, ...] = (ET, *NETWORKS, *TABLES)
    """Which are compared."""
    variations: tuple[str, ...] = tuple(VARIATIONS)
    """Changes of the Energy Transformer that are tried at the first share."""
    variation_seeds: int = 1
    """Seeds of each variation."""
    horizons: float = 10.0
    """Up to how many training horizons the trained flow is followed."""
    model: Model = field(default_factory=Model)
    """The Energy Transformer."""
    recipe: NodeRecipe = field(default_factory=lambda: NodeRecipe(epochs=40))
    """The training of all networks; 200 epochs for a table to be quoted."""
    completion: CompletionRecipe = field(default_factory=CompletionRecipe)
    """The training without labels."""
    threads: int = 1
    """Threads of torch."""

    def __post_init__(self) -> None:
        for name in ("seeds", "variation_seeds", "threads"):
            check_count(name, getattr(self, name))
        for chosen in self.models:
            check_choice("models", chosen, (ET, *NETWORKS, *TABLES))
        for chosen in self.variations:
            check_choice("variations", chosen, tuple(VARIATIONS))
        if not self.variations:
            raise bad("variations", "at least one", "none")
        if not self.shares or not all(0 < share < 1 for share in self.shares):
            raise bad("shares", "shares in (0, 1)", self.shares)
        if self.horizons < 1:
            raise bad("horizons", "a number >= 1", self.horizons)
        if ET not in self.models:
            raise bad("models", f"{ET!r} among them", self.models)

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / "anomaly_detection" / self.name


def main(config: Config) -> None:
    """Run the study and write its report."""
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    nodes = load_nodes(config.data)
    data = prepare_nodes(nodes)
    record = {
        "study": asdict(config) | {"runs": str(config.runs)}, "data": repr(nodes),
        "made_by_us": config.data == "rare-digit",
    }  # fmt: skip
    bench = Bench(config, data, repr(nodes))
    groups = {"scores": bench.table(), "variations": bench.variations()}
    share = config.shares[0]
    trained = bench.trained(ET, config.model, share, 0).model
    assert isinstance(trained, NodeClassifier)
    groups["descent"] = follow(trained, data, split_nodes(data.labels, share), config.horizons)
    groups["without_labels"] = without_labels(data, config.seeds, config.completion)
    result = xr.DataTree.from_dict(groups)
    schema = "etdyn.study.anomaly_detection/1"
    result.attrs = store.provenance(schema, record, data.features)
    for share in config.shares:
        print("\n" + format_table(*page.table(result, share)))
    path = page.report(result, record).write(config.folder, record, result)
    print("\n" + page.findings(result, record))
    print(f"\nreport: {path}")


class Bench:
    """Trains and scores, once each: what a stopped run has found stays in `scores.json`."""

    def __init__(self, config: Config, data: NodeData, about: str) -> None:
        self.config, self.data = config, data
        for share in config.shares:
            split_nodes(data.labels, share)  # refuses what is too small, before anything is trained
        self.path = config.folder / "scores.json"
        parts = [data.features, data.labels, *(graph.edges for graph in data.graphs)]
        identity = json.loads(json.dumps({
            "data": about, "checksum": store.checksum(parts), "model": asdict(config.model),
            "recipe": asdict(config.recipe),
        }))  # fmt: skip
        self.found: dict[str, Any] = {"of": identity}
        if self.path.exists():
            self.found = json.loads(self.path.read_text())
            if self.found["of"] != identity:
                raise bad("name", f"a new one, or the settings of {self.path}", config.name)

    def table(self) -> xr.Dataset:
        """Every model at every share and seed."""
        config = self.config
        seeds = list(range(config.seeds))
        rows = [
            [[self.row(model, config.model, share, seed) for seed in seeds]
             for model in config.models]
            for share in tqdm(config.shares, desc="models")
        ]  # fmt: skip
        coords = {"share": list(config.shares), "model": np.array(config.models, str)}
        return _dataset(rows, coords | {"seed": seeds})

    def variations(self) -> xr.Dataset:
        """The Energy Transformer with one thing changed, at the first share."""
        config, seeds = self.config, list(range(self.config.variation_seeds))
        rows = [
            [self.row(ET, replace(config.model, **VARIATIONS[name]), config.shares[0], seed)
             for seed in seeds]
            for name in tqdm(config.variations, desc="variations")
        ]  # fmt: skip
        return _dataset(rows, {"variation": np.array(config.variations, str), "seed": seeds})

    def row(self, name: str, model: Model, share: float, seed: int) -> dict[str, float]:
        """Scores, time and size of one model, from the file where it has them."""
        key = json.dumps([name, asdict(model) if name == ET else {}, share, seed])
        if key not in self.found:
            began = time.perf_counter()
            found = self.scored(name, model, share, seed)
            self.found[key] = found | {"seconds": time.perf_counter() - began}
            store.write_atomically(self.path, json.dumps(self.found, indent=1))
        row: dict[str, float] = self.found[key]
        return row

    def scored(self, name: str, model: Model, share: float, seed: int) -> dict[str, float]:
        """Train one model and score it on its test nodes."""
        split = split_nodes(self.data.labels, share, seed)
        nothing = {"parameters": math.nan, "saved_bytes": math.nan, "epoch": math.nan}
        if name in TABLES:
            predict, neighbours = TABLES[name]
            probability = predict(node_table(self.data, neighbours), self.data, split, seed)
            return nothing | detection_scores(self.data.labels, probability, split)
        fit = self.trained(name, model, share, seed)
        best = max(fit.history, key=lambda at: at["validation_roc_auc"])
        return {
            "parameters": sum(p.numel() for p in fit.model.parameters()),
            "saved_bytes": fit.saved_bytes,
            "epoch": best["epoch"],
        } | detection_scores(self.data.labels, anomaly_probability(fit.model, self.data), split)

    def trained(self, name: str, model: Model, share: float, seed: int) -> Fit:
        """Train one network, its weights and all else from the seed."""
        features = self.data.features.shape[1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = model.build(features) if name == ET else NETWORKS[name](features)
        split = split_nodes(self.data.labels, share, seed)
        return fit_nodes(network, self.data, split, self.config.recipe, seed)


def _dataset(rows: list[Any], coords: dict[str, Any]) -> xr.Dataset:
    """Nested lists of rows as labelled arrays."""
    flat = np.array(rows, dtype=object)
    columns = {
        name: (tuple(coords), np.vectorize(lambda row, n=name: row[n], otypes=[float])(flat))
        for name in flat.flat[0]
    }
    return xr.Dataset(columns, coords)


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, TypeError, ImportError) as problem:
        sys.exit(f"error: {problem}")
