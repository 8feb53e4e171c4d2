"""What a graph classifier must beat: other networks on the same batches, and models of sums.

The networks are trained by the same loop; the others are scikit-learn's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import xarray as xr
from torch import Tensor, nn
from torch.nn.functional import one_hot

from etdyn.tasks.cross_validation import nested_folds
from etdyn.tasks.graph_batches import GraphBatch, GraphData
from etdyn.tasks.graph_classification import ReadOut, Tokens

__all__ = [
    "GCN",
    "GIN",
    "MLP",
    "GraphTransformer",
    "cross_validate_table",
    "graph_table",
    "logistic_regression",
    "random_forest",
]


def _convolutions() -> Any:
    try:
        from torch_geometric import nn as geometric  # noqa: PLC0415 (optional)
    except ImportError as error:
        hint = 'this baseline needs torch-geometric; pip install -e ".[graphs]"'
        raise ImportError(hint) from error
    return geometric


class GIN(nn.Module):
    """Graph isomorphism network: sums over neighbours, sums over nodes after every layer.

    Two-layer perceptrons with batch norm, a linear read-out of every layer's sum, dropout before
    it. Source: Xu, Hu, Leskovec, Jegelka 2019 (GIN-0).
    """

    def __init__(
        self, data: GraphData, dim: int = 64, layers: int = 4, dropout: float = 0.5
    ) -> None:
        super().__init__()
        geometric = _convolutions()
        widths = [data.width] + [dim] * layers
        self.convolutions = nn.ModuleList(
            geometric.GINConv(
                nn.Sequential(
                    nn.Linear(w, dim), nn.BatchNorm1d(dim), nn.ReLU(), nn.Linear(dim, dim)
                )
            )
            for w in widths[:-1]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(dim) for _ in range(layers))
        self.outputs = nn.ModuleList(nn.Linear(w, data.classes) for w in widths)
        self.drop = nn.Dropout(dropout)

    def forward(self, batch: GraphBatch, generator: torch.Generator | None = None) -> Tensor:
        """Logits `(graph, class)`."""
        x = batch.features
        logits = self.drop(self.outputs[0](batch.node_sum(x)))
        layers = zip(self.convolutions, self.norms, self.outputs[1:], strict=True)
        for convolve, norm, output in layers:
            x = norm(convolve(x, batch.edges)).relu()
            logits = logits + self.drop(output(batch.node_sum(x)))
        result: Tensor = logits
        return result


class GCN(nn.Module):
    """Graph convolutions with batch norm and the mean of the nodes. Source: Kipf & Welling 2017."""

    def __init__(
        self, data: GraphData, dim: int = 64, layers: int = 4, dropout: float = 0.5
    ) -> None:
        super().__init__()
        geometric = _convolutions()
        widths = [data.width] + [dim] * layers
        self.convolutions = nn.ModuleList(geometric.GCNConv(w, dim) for w in widths[:-1])
        self.norms = nn.ModuleList(nn.BatchNorm1d(dim) for _ in range(layers))
        self.output = nn.Linear(dim, data.classes)
        self.drop = nn.Dropout(dropout)

    def forward(self, batch: GraphBatch, generator: torch.Generator | None = None) -> Tensor:
        """Logits `(graph, class)`."""
        x = batch.features
        for convolve, norm in zip(self.convolutions, self.norms, strict=True):
            x = norm(convolve(x, batch.edges)).relu()
        pooled = batch.node_sum(x) / batch.sizes[:, None]
        logits: Tensor = self.output(self.drop(pooled))
        return logits


class MLP(nn.Module):
    """A perceptron of each node, then of the sum and the mean over the nodes: no edges."""

    def __init__(self, data: GraphData, dim: int = 128, dropout: float = 0.5) -> None:
        super().__init__()
        self.node = nn.Sequential(
            nn.Linear(data.width, dim), nn.BatchNorm1d(dim), nn.ReLU(),
            nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU(),
        )  # fmt: skip
        self.output = nn.Linear(2 * dim, data.classes)
        self.drop = nn.Dropout(dropout)

    def forward(self, batch: GraphBatch, generator: torch.Generator | None = None) -> Tensor:
        """Logits `(graph, class)`."""
        total = batch.node_sum(self.node(batch.features))
        pooled = torch.cat([total / batch.sizes[:, None], total / 16], 1)
        logits: Tensor = self.output(self.drop(pooled))
        return logits


class GraphTransformer(nn.Module):
    """An ordinary transformer over the same tokens, edges and read-out as `GraphClassifier`.

    Source: Dwivedi & Bresson 2021, with the edges as in Shi et al. 2021.
    """

    def __init__(
        self,
        data: GraphData,
        *,
        dim: int = 64,
        heads: int = 4,
        hidden: int = 64,
        blocks: int = 4,
        nodes: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = Tokens(data.width, data.positions, dim, data.signed)
        width = data.edge_width + 1
        self.blocks = nn.ModuleList(_Block(dim, heads, hidden, width) for _ in range(blocks))
        self.read_out = ReadOut(dim, data.classes, nodes, dropout)

    def forward(self, batch: GraphBatch, generator: torch.Generator | None = None) -> Tensor:
        """Logits `(graph, class)`."""
        x = self.tokens(batch, generator if self.training else None)
        flat, edges = x.flatten(0, 1), batch.graph.edges
        for block in self.blocks:
            flat = block(flat, edges, batch.pair_features)
        logits: Tensor = self.read_out(flat.reshape(x.shape), batch)
        return logits


class _Block(nn.Module):
    """Softmax attention over edges, whose features join keys and values; then a perceptron."""

    def __init__(self, dim: int, heads: int, hidden: int, features: int) -> None:
        super().__init__()
        self.norm, self.merge = nn.LayerNorm(dim), nn.Linear(dim, dim)
        self.attend = _convolutions().TransformerConv(
            dim, dim // heads, heads, edge_dim=features, root_weight=False
        )
        self.attend.lin_skip = None  # is made, but not used, without a root weight
        self.feed = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)
        )

    def forward(self, x: Tensor, edges: Tensor, features: Tensor) -> Tensor:
        x = x + self.merge(self.attend(self.norm(x), edges, features))
        y: Tensor = x + self.feed(x)
        return y


def graph_table(data: GraphData, neighbours: bool = False) -> Tensor:
    """One row a graph: sum and mean of the node features, numbers of nodes and of edges.

    neighbours: also of the means over the neighbours, of their products with the node's own
    features, and of the degrees 0 to 8 and more.
    """
    batch = data.batch(range(len(data)))
    sizes, here = batch.sizes[:, None], batch.features
    degree = torch.bincount(batch.edges[1], minlength=len(here))
    edges = batch.node_sum(degree[:, None])
    columns = [batch.node_sum(here), batch.node_sum(here) / sizes, sizes, edges]
    if neighbours:
        total = torch.zeros_like(here).index_add(0, batch.edges[1], here[batch.edges[0]])
        near = total / degree.clamp(min=1)[:, None]
        joint = (here[:, :, None] * near[:, None, :]).flatten(1)
        for part in (near, joint, one_hot(degree.clamp(max=8), 9)):
            columns += [batch.node_sum(part), batch.node_sum(part) / sizes]
    return torch.cat([column.to(here.dtype) for column in columns], 1)


def logistic_regression(seed: int) -> Any:
    """Scikit-learn's, on standardised columns."""
    from sklearn.linear_model import LogisticRegression  # noqa: PLC0415
    from sklearn.pipeline import make_pipeline  # noqa: PLC0415
    from sklearn.preprocessing import StandardScaler  # noqa: PLC0415

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000, random_state=seed))


def random_forest(seed: int) -> Any:
    """Scikit-learn's, of 300 trees."""
    from sklearn.ensemble import RandomForestClassifier  # noqa: PLC0415

    return RandomForestClassifier(300, random_state=seed)


def cross_validate_table(
    make: Callable[[int], Any], table: Tensor, labels: Tensor, folds: int = 10, seed: int = 0
) -> xr.Dataset:
    """Test accuracy and seconds of a scikit-learn model on the folds of `nested_folds`.

    It trains on training and validation graphs together, as it has no epochs to choose.

    Args:
        make: makes a fresh model from a seed.
        table: `(graph, column)`.
        labels: int64 `(graph,)`.
        folds, seed: see `nested_folds`.
    """
    scores, seconds, x, y = [], [], table.numpy(), labels.numpy()
    for number, fold in enumerate(nested_folds(labels, folds, seed)):
        began = time.perf_counter()
        rows = torch.cat([fold.train, fold.validation]).numpy()
        model = make(seed + number).fit(x[rows], y[rows])
        scores.append(float(model.score(x[fold.test.numpy()], y[fold.test.numpy()])))
        seconds.append(time.perf_counter() - began)
    return xr.Dataset({"test_accuracy": ("fold", scores), "seconds": ("fold", seconds)})
