"""What competes in `graph_classification`: names, sizes, learning rates, and what each one sees."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from etdyn.checks import bad, check_count, check_positive
from etdyn.tasks import GraphClassifier, GraphData, et_blocks
from etdyn.tasks.graph_baselines import (
    GCN,
    GIN,
    MLP,
    GraphTransformer,
    logistic_regression,
    random_forest,
)

ALL = "edges, their features, walk positions"


@dataclass(frozen=True)
class ETConfig:
    """The Energy Transformer: S blocks of T steps."""

    blocks: int = 4
    """S, each with its own weights."""
    dim: int = 48
    """Features of a token."""
    heads: int = 2
    """Of the attention."""
    head_dim: int = 24
    """Of keys and queries."""
    memories: int = 192
    """Of the Hopfield energy."""
    step: float = 0.5
    """alpha."""
    steps: int = 1
    """T."""
    dropout: float = 0.2
    """Before the read-out."""

    def __post_init__(self) -> None:
        for name in ("blocks", "dim", "heads", "head_dim", "memories", "steps"):
            check_count(name, getattr(self, name))
        check_positive("step", self.step)
        if not 0 <= self.dropout < 1:
            raise bad("dropout", "a share in [0, 1)", self.dropout)


@dataclass(frozen=True)
class Network:
    """A model that the loop of `etdyn.tasks.graph_training` trains."""

    title: str
    sees: str
    lr: float
    record: dict[str, Any]
    build: Callable[[GraphData], nn.Module]


@dataclass(frozen=True)
class Table:
    """A scikit-learn model of one row of numbers a graph."""

    title: str
    sees: str
    make: Callable[[int], Any]
    neighbours: bool


TABLES = {
    "regression": Table("logistic regression", "sums, means, counts", logistic_regression, False),
    "regression_neighbours": Table(
        "regression, neighbour means", "also neighbour means, degrees", logistic_regression, True
    ),
    "forest": Table("random forest", "sums, means, counts", random_forest, False),
    "forest_neighbours": Table(
        "forest, neighbour means", "also neighbour means, degrees", random_forest, True
    ),
}
NETWORKS = ("et", "graph_transformer", "gin", "gcn", "mlp")
MODELS = (*NETWORKS, *TABLES)


def networks(et: ETConfig) -> dict[str, Network]:
    """Every network by its key; sizes, dropout and rates are the same on all data sets."""
    size: dict[str, Any] = {
        k: v for k, v in asdict(et).items() if k not in ("blocks", "step", "steps", "dropout")
    }
    descent: dict[str, Any] = {"step": et.step, "steps": et.steps, "dropout": et.dropout}
    other: dict[str, Any] = {"dim": 48, "heads": 4, "hidden": 48, "blocks": 4, "dropout": 0.2}
    deep: dict[str, Any] = {"dim": 64, "layers": 4, "dropout": 0.5}
    wide: dict[str, Any] = {"dim": 128, "dropout": 0.5}
    return {
        "et": Network(
            "Energy Transformer", ALL, 2e-3, {"name": "ET", **asdict(et)},
            lambda data: GraphClassifier(et_blocks(et.blocks, **size), data, **descent),
        ),
        "graph_transformer": Network(
            "graph transformer", ALL, 2e-3, {"name": "GraphTransformer", **other},
            lambda data: GraphTransformer(data, **other),
        ),
        "gin": Network(
            "GIN", "edges", 5e-3, {"name": "GIN", **deep}, lambda data: GIN(data, **deep)
        ),
        "gcn": Network(
            "GCN", "edges", 5e-3, {"name": "GCN", **deep}, lambda data: GCN(data, **deep)
        ),
        "mlp": Network(
            "MLP", "nodes only", 5e-3, {"name": "MLP", **wide}, lambda data: MLP(data, **wide)
        ),
    }  # fmt: skip


def title(model: str) -> str:
    """What tables and figures call a model."""
    return (TABLES.get(model) or networks(ETConfig())[model]).title


def sees(model: str) -> str:
    """What of a graph a model is given, beside the features of its nodes."""
    return (TABLES.get(model) or networks(ETConfig())[model]).sees
