"""Graphs with a label each, made ready once and packed into batches by concatenation.

Each graph gets a CLS node, number 0, that sees and is seen by all others, and itself; other nodes
do not see themselves. A batch is the disjoint union of its graphs: one graph of one sample, without
padding. Source: ET section 1.7.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from etdyn import store
from etdyn.checks import bad, check_choice, check_count, check_rows
from etdyn.datasets.graph_sets import GraphSet
from etdyn.graphs import Graph

__all__ = ["GraphBatch", "GraphData", "disjoint_union", "laplacian_positions", "walk_positions"]

POSITIONS = ("walk", "laplacian")
Array = npt.NDArray[np.float64]


def laplacian_positions(edges: Tensor, nodes: int, k: int) -> Tensor:
    """Eigenvectors of I - D^-1/2 A D^-1/2 with CLS as node 0, float64 `(1 + nodes, k)`.

    The first is skipped; columns are zero where there are fewer. An eigenvector's sign is free
    and is chosen here so that the sum of its cubes is positive; so is the basis where an
    eigenvalue is multiple, as on any symmetric graph, and there the result depends on how the
    nodes are numbered. Source: ET section 1.7; Dwivedi & Bresson 2021.
    """
    a = np.ones((nodes + 1, nodes + 1))
    a[1:, 1:] = _adjacency(edges, nodes)
    scale = a.sum(1) ** -0.5
    vectors = np.linalg.eigh(np.eye(nodes + 1) - scale[:, None] * a * scale)[1][:, 1 : k + 1]
    vectors = vectors * np.where((vectors**3).sum(0) < 0, -1.0, 1.0)
    return torch.from_numpy(np.pad(vectors, ((0, 0), (0, k - vectors.shape[1]))))


def walk_positions(edges: Tensor, nodes: int, k: int) -> Tensor:
    """The chance that a random walk is back after 1 to k steps, float64 `(1 + nodes, k)`.

    Diagonals of the powers of D^-1 A, without CLS, whose row is zero. They move with the nodes
    however these are numbered. Source: Dwivedi et al. 2022 (random-walk structural encoding).
    """
    a = _adjacency(edges, nodes)
    step = a / np.maximum(a.sum(1, keepdims=True), 1)
    power, found = np.eye(nodes), np.zeros((nodes + 1, k))
    for column in range(k):
        power = power @ step
        found[1:, column] = np.diag(power)
    return torch.from_numpy(found)


def _adjacency(edges: Tensor, nodes: int) -> Array:
    """`(query, key)`."""
    a = np.zeros((nodes, nodes))
    a[edges[1].numpy(), edges[0].numpy()] = 1
    return a


def disjoint_union(graphs: Sequence[Graph]) -> Graph:
    """Many graphs as one of a single sample: the nodes, and the edges, follow each other.

    Raises:
        ValueError: no graph, or one that is already a batch.
    """
    if not graphs or any(g.samples != 1 for g in graphs):
        raise bad("graphs", "at least one graph, of one sample each", list(graphs))
    nodes, edges = [g.nodes for g in graphs], [g.size for g in graphs]

    def joined(name: str, sizes: list[int]) -> Tensor:
        """Indices that are shifted by what stands before."""
        parts = [getattr(g, name) for g in graphs]
        before = torch.tensor([0, *sizes[:-1]], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        counts = torch.tensor([len(part) for part in parts])
        return torch.cat(parts) + before.repeat_interleave(counts).to(parts[0].device)

    def starts(name: str) -> Tensor:
        counts = torch.cat([getattr(g, name).diff() for g in graphs])
        return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))

    return Graph(
        sum(nodes), 1, joined("keys", nodes), joined("queries", nodes), starts("query_starts"),
        starts("key_starts"), joined("queries_by_key", nodes), joined("by_key", edges),
    )  # fmt: skip


@dataclass(frozen=True, eq=False)
class GraphBatch:
    """Several graphs packed together. Nodes are those of the graphs; tokens are CLS and nodes.

    Attributes:
        features: `(node, feature)`.
        edges: int64 `(2, edge)`, among the nodes, keys then queries.
        edge_features: `(edge, k)`; k is 0 where the data has none.
        owner: int64 `(node,)`, which graph of the batch a node belongs to.
        labels: int64 `(graph,)`.
        graph: over the tokens, `(1, token)` as a disjoint union or `(graph, token)` padded.
        pair_features: `(pair, k + 1)`, the features of the edges of `graph`, zero where CLS is an
            end, and last a 1 for those, else 0.
        positions: `(token, p)`, of CLS and nodes, graph after graph.
        cls, nodes: int64 `(graph,)` and `(node,)`, which rows of `graph`'s flattened states
            CLS tokens and nodes are.
    """

    features: Tensor
    edges: Tensor
    edge_features: Tensor
    owner: Tensor
    labels: Tensor
    graph: Graph
    pair_features: Tensor
    positions: Tensor
    cls: Tensor
    nodes: Tensor

    @property
    def tokens(self) -> Tensor:
        """Which rows of the flattened states the tokens are, in the order of `positions`."""
        return torch.cat([self.cls, self.nodes]).sort().values

    @property
    def shape(self) -> tuple[int, int]:
        """Samples and tokens of the states."""
        return self.graph.samples, self.graph.nodes

    @property
    def sizes(self) -> Tensor:
        """The number of nodes of each graph, int64 `(graph,)`."""
        return torch.bincount(self.owner, minlength=len(self.cls))

    @property
    def token_owner(self) -> Tensor:
        """Which graph each row of `positions` belongs to, int64 `(token,)`."""
        graphs = torch.arange(len(self.cls), device=self.cls.device)
        return graphs.repeat_interleave(self.sizes + 1)

    def node_sum(self, per_node: Tensor) -> Tensor:
        """The sum of `(node, ...)` over the nodes of each graph, `(graph, ...)`."""
        empty = per_node.new_zeros(len(self.cls), *per_node.shape[1:])
        return empty.index_add(0, self.owner, per_node)

    @property
    def pair_owner(self) -> Tensor:
        """Which graph each edge of `graph` belongs to, int64 `(pair,)`."""
        return torch.bucketize(self.graph.queries.long(), self.cls, right=True) - 1

    def to(self, device: torch.device | str) -> Self:
        """The same batch on a device."""
        parts = {k: v.to(device) for k, v in vars(self).items()}
        return replace(self, **parts)

    def double(self) -> Self:
        """The same batch in float64."""
        names = ("features", "edge_features", "pair_features", "positions")
        return replace(self, **{name: getattr(self, name).double() for name in names})


@dataclass(frozen=True, eq=False)
class _Example:
    """One graph made ready; the names are those of `GraphBatch`."""

    features: Tensor
    edges: Tensor
    edge_features: Tensor
    graph: Graph
    pair_features: Tensor
    positions: Tensor


class GraphData:
    """A set of graphs made ready for batches: CLS joined, positions computed, edges sorted.

    Args:
        graphs: the data.
        positions: "walk" (return probabilities, which do not depend on the numbering) or
            "laplacian" (eigenvectors, as published).
        k: how many of them.

    Attributes:
        labels: int64 `(graph,)`.
        classes, width, edge_width, positions: number of classes, of node features, of edge
            features, of positions.
        encoding: of the positions, "walk" or "laplacian".
        signed: whether the sign of the positions is arbitrary.
    """

    def __init__(self, graphs: GraphSet, positions: str = "walk", k: int = 16) -> None:
        if not isinstance(graphs, GraphSet):
            raise TypeError(f"graphs: expected a GraphSet, got {type(graphs).__name__}")
        check_choice("positions", positions, POSITIONS)
        check_count("k", k)
        self.name, self.labels, self.classes = graphs.name, graphs.labels, graphs.classes
        self.width = graphs.features[0].shape[1]
        self.edge_width = 0 if graphs.edge_features is None else graphs.edge_features[0].shape[1]
        self.positions, self.encoding = k, positions
        self.signed = positions == "laplacian"
        encode = laplacian_positions if self.signed else walk_positions
        self._examples = []
        for row, (features, edges) in enumerate(zip(graphs.features, graphs.edges, strict=True)):
            given = None if graphs.edge_features is None else graphs.edge_features[row]
            per_edge = features.new_zeros(edges.shape[1], 0) if given is None else given
            place = encode(edges, len(features), k).to(features.dtype)
            graph, pairs = _with_cls(edges, per_edge, len(features))
            self._examples.append(_Example(features, edges, per_edge, graph, pairs, place))

    def __len__(self) -> int:
        return len(self._examples)

    def checksum(self) -> str:
        """Of labels, features and edges, so that results of other graphs are not taken up."""
        parts = [(e.features, e.edges, e.edge_features) for e in self._examples]
        return store.checksum([self.labels, *itertools.chain.from_iterable(parts)])

    def standardised(self, rows: Sequence[int] | Tensor) -> GraphData:
        """The same graphs with node features of mean 0 and deviation 1 over some of the graphs.

        Features that are only 0 or 1 stay. rows: see `batch`.
        """
        rows = check_rows("rows", rows, len(self)).tolist()
        seen = torch.cat([self._examples[row].features for row in rows])
        binary = ((seen == 0) | (seen == 1)).all(0)
        mean = seen.mean(0).masked_fill(binary, 0.0)
        std = seen.std(0, correction=0).masked_fill(binary, 1.0)
        std = torch.where(std > 0, std, 1.0)
        result = object.__new__(GraphData)
        result.__dict__.update(vars(self))
        result._examples = [replace(e, features=(e.features - mean) / std) for e in self._examples]
        return result

    def batch(self, rows: Sequence[int] | Tensor, padded: bool = False) -> GraphBatch:
        """Some of the graphs packed together, in this order.

        rows: integers, at least one. Raises TypeError for others, ValueError out of range.
        padded: states of one row a graph, `(graph, token, dim)`, instead of `(1, token, dim)`.
        """
        rows = check_rows("rows", rows, len(self)).tolist()
        picked = [self._examples[row] for row in rows]
        sizes = torch.tensor([len(e.features) for e in picked])
        owner = torch.arange(len(rows)).repeat_interleave(sizes)
        before = sizes.cumsum(0) - sizes
        counts = torch.tensor([e.edges.shape[1] for e in picked])
        graphs = [e.graph for e in picked]
        graph = Graph.batch(graphs) if padded else disjoint_union(graphs)
        cls = torch.arange(len(rows)) * graph.nodes if padded else before + torch.arange(len(rows))
        within = torch.arange(len(owner)) - before[owner]
        return GraphBatch(
            torch.cat([e.features for e in picked]),
            torch.cat([e.edges for e in picked], 1) + before.repeat_interleave(counts),
            torch.cat([e.edge_features for e in picked]),
            owner,
            self.labels[rows],
            graph,
            torch.cat([e.pair_features for e in picked]),
            torch.cat([e.positions for e in picked]),
            cls,
            cls[owner] + 1 + within,
        )


def _with_cls(edges: Tensor, features: Tensor, nodes: int) -> tuple[Graph, Tensor]:
    """The graph with CLS as node 0, and the features of its edges."""
    others = torch.arange(1, nodes + 1)
    cls = torch.zeros_like(others)
    pairs = torch.cat(
        [edges + 1, torch.stack([cls, others]), torch.stack([others, cls]), edges.new_zeros(2, 1)],
        1,
    )
    graph = Graph.from_edges(pairs, nodes + 1)
    assert graph.order is not None  # from_edges makes it
    to_cls = features.new_zeros(pairs.shape[1], features.shape[1] + 1)
    to_cls[: len(features), :-1] = features
    to_cls[len(features) :, -1] = 1
    return graph, to_cls[graph.order.long()]
