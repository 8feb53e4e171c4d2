"""What an anomaly detector must beat: other networks, and models that see one node at a time.

All take the same features, splits and training loop as `NodeClassifier`.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from etdyn.checks import bad
from etdyn.graph_products import EDGE, QUERY, contract, row_sum, softmax
from etdyn.graphs import Graph
from etdyn.tasks.detection import NodeSplit
from etdyn.tasks.node_data import NodeData

__all__ = [
    "GCN",
    "GIN",
    "MLP",
    "GraphTransformer",
    "forest_probability",
    "node_table",
    "regression_probability",
    "united",
]


def united(graphs: Sequence[Graph]) -> Graph:
    """The edges of all relations in one graph, each once; one relation as it is given."""
    if len(graphs) == 1:
        return graphs[0]
    edges = torch.unique(torch.cat([graph.edges for graph in graphs], 1), dim=1)
    return Graph.from_edges(edges, graphs[0].nodes)


class MLP(nn.Module):
    """A perceptron of every node by itself: what the features tell without the graph."""

    def __init__(self, features: int, dim: int = 64, dropout: float = 0.3) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, dim), nn.ReLU(), nn.Dropout(dropout),
            nn.Linear(dim, dim), nn.ReLU(), nn.Dropout(dropout), nn.Linear(dim, 2),
        )  # fmt: skip

    def forward(self, features: Tensor, graphs: Sequence[Graph]) -> Tensor:
        """Logits `(node, 2)`."""
        logits: Tensor = self.layers(features)
        return logits


class _Convolutions(nn.Module, ABC):
    """Convolutions over the union of the relations, each with batch norm, relu and dropout."""

    def __init__(self, features: int, dim: int = 64, layers: int = 2, dropout: float = 0.3) -> None:
        super().__init__()
        widths = [features, *[dim] * layers]
        self.convolutions = nn.ModuleList(self._convolution(w, dim) for w in widths[:-1])
        self.norms = nn.ModuleList(nn.BatchNorm1d(dim) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(dim, 2)

    @abstractmethod
    def _convolution(self, width: int, dim: int) -> nn.Module:
        """One layer."""

    @abstractmethod
    def _edges(self, graph: Graph, like: Tensor) -> tuple[Any, ...]:
        """What the convolutions take after x."""

    def forward(self, features: Tensor, graphs: Sequence[Graph]) -> Tensor:
        """Logits `(node, 2)`."""
        edges, x = self._edges(united(graphs), features), features
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            x = self.dropout(norm(convolve(x, *edges)).relu())
        logits: Tensor = self.output(x)
        return logits


class GCN(_Convolutions):
    """Graph convolutions, torch-geometric's GCNConv. Source: Kipf & Welling 2017."""

    def _convolution(self, width: int, dim: int) -> nn.Module:
        convolution: nn.Module = _sparse("GCNConv")(width, dim, normalize=False)
        return convolution

    def _edges(self, graph: Graph, like: Tensor) -> tuple[Any, ...]:
        root = graph.degrees.to(like.dtype).rsqrt()
        root = root.masked_fill(root.isinf(), 0.0)  # as torch-geometric, where no edge ends
        return graph, root[graph.queries] * root[graph.keys]


class GIN(_Convolutions):
    """Sums over neighbours, then a perceptron, its GINConv. Source: Xu et al. 2019."""

    def _convolution(self, width: int, dim: int) -> nn.Module:
        perceptron = nn.Sequential(nn.Linear(width, dim), nn.ReLU(), nn.Linear(dim, dim))
        convolution: nn.Module = _sparse("GINConv")(perceptron, train_eps=True)
        return convolution

    def _edges(self, graph: Graph, like: Tensor) -> tuple[Any, ...]:
        return (graph.kept(graph.keys != graph.queries),)


@functools.cache
def _sparse(name: str) -> Any:
    """torch-geometric's convolution, its messages summed by the sparse product of this package.

    Its own sums build a message for every edge, or transpose the graph in every backward pass:
    5 to 20 times slower here at a million edges.
    """
    try:
        from torch_geometric import nn as geometric  # noqa: PLC0415 (optional)
    except ImportError as error:
        raise ImportError("GCN and GIN need torch-geometric: pip install etdyn[graphs]") from error

    class Sparse(getattr(geometric, name)):  # type: ignore[misc]
        def propagate(
            self, edge_index: Graph, x: Any, edge_weight: Tensor | None = None, size: None = None
        ) -> Tensor:
            keys = x if isinstance(x, Tensor) else x[0]
            weight = keys.new_ones(edge_index.size) if edge_weight is None else edge_weight
            return contract(edge_index, QUERY, keys, weight)

    return Sparse


class GraphTransformer(nn.Module):
    """An ordinary transformer whose attention runs over the union of the relations.

        x + output(softmax(<query, key> / sqrt(head_dim)) value), then x + perceptron(x)

    with a layer norm (a gamma for every feature) before each. Through the sparse products of
    `GraphAttention`. Source: Vaswani et al. 2017; Dwivedi & Bresson 2021.
    """

    def __init__(
        self, features: int, dim: int = 64, heads: int = 2, layers: int = 1, dropout: float = 0.3
    ) -> None:
        super().__init__()
        self.encoder, self.dropout = nn.Linear(features, dim), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(_TransformerBlock(dim, heads, dropout) for _ in range(layers))
        self.output = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2))

    def forward(self, features: Tensor, graphs: Sequence[Graph]) -> Tensor:
        """Logits `(node, 2)`."""
        graph, x = united(graphs), self.dropout(self.encoder(features))
        for block in self.blocks:
            x = block(x, graph)
        logits: Tensor = self.output(x)
        return logits


class _TransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        if dim % heads:
            raise bad("heads", f"a divisor of {dim}", heads)
        self.heads, self.dropout = heads, nn.Dropout(dropout)
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.project, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        hidden = 2 * dim
        self.perceptron = nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x: Tensor, graph: Graph) -> Tensor:
        query, key, value = self.project(self.norms[0](x)).chunk(3, 1)
        seen = [
            _attend(graph, *(part.contiguous() for part in head))
            for head in zip(*(p.chunk(self.heads, 1) for p in (query, key, value)), strict=True)
        ]
        x = x + self.dropout(self.output(torch.cat(seen, 1)))
        changed: Tensor = x + self.dropout(self.perceptron(self.norms[1](x)))
        return changed


def _attend(graph: Graph, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    share, _ = softmax(graph, contract(graph, EDGE, query / math.sqrt(query.shape[1]), key))
    return contract(graph, QUERY, value, share)


# --- models without a network -----------------------------------------------------------------


def node_table(data: NodeData, neighbours: bool) -> np.ndarray[Any, Any]:
    """The features of every node, `(node, columns)`, float64.

    neighbours: also their mean over the neighbours, and how many these are, for every relation.
    """
    x = data.features.double()
    columns = [x]
    for graph in data.graphs if neighbours else ():
        own = graph.kept(graph.keys != graph.queries)
        degree = row_sum(own, x.new_ones(own.size))[:, None]
        columns += [contract(own, QUERY, x, x.new_ones(own.size)) / degree.clamp(min=1), degree]
    return torch.cat(columns, 1).numpy(force=True)


def regression_probability(
    table: np.ndarray[Any, Any], data: NodeData, split: NodeSplit, seed: int = 0
) -> Tensor:
    """Logistic regression on standardised columns, its penalty chosen on the validation nodes."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415 (slow to import)
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    scaled = StandardScaler().fit_transform(table)
    candidates = [
        LogisticRegression(C=c, class_weight="balanced", max_iter=2_000, random_state=seed)
        for c in (1e-2, 1e-1, 1.0, 10.0)
    ]
    return _best(candidates, scaled, data, split)


def forest_probability(
    table: np.ndarray[Any, Any], data: NodeData, split: NodeSplit, seed: int = 0
) -> Tensor:
    """A random forest of 300 trees, the size of its leaves chosen on the validation nodes."""
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415 (slow to import)

    candidates = [
        RandomForestClassifier(300, min_samples_leaf=leaf, random_state=seed) for leaf in (1, 4)
    ]
    return _best(candidates, table, data, split)


def _best(
    candidates: Sequence[Any], table: np.ndarray[Any, Any], data: NodeData, split: NodeSplit
) -> Tensor:
    """The probabilities `(node,)` of the candidate with the best validation ROC-AUC."""
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 (slow to import)

    y = data.labels.numpy(force=True)
    train, held = split.train.numpy(), split.validation.numpy()
    found = [model.fit(table[train], y[train]).predict_proba(table)[:, 1] for model in candidates]
    best = max(found, key=lambda p: roc_auc_score(y[held], p[held]))
    return torch.from_numpy(best)
