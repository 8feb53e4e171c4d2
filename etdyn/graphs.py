"""Graphs: which token may see which, in compressed sparse row form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from etdyn.checks import bad, check_count, check_rows

__all__ = ["Graph"]

MOST = 2**31 - 1  # indices are int32, as sparse libraries like them, and half the memory


@dataclass(frozen=True, eq=False)
class Graph:
    """Which token may see which: edges from keys to queries, of one graph or of many.

    Made by `from_edges` and `batch`. One graph (`samples` 1) serves any batch of states, each
    sample by itself; a batch of graphs serves states of that batch, padded to the largest. Node n
    of sample s has the index s * nodes + n. Edges are sorted by query, then key; per-edge weights
    follow this order, which `edges` lists. Index tensors are int32.

    Attributes:
        nodes: tokens of a sample.
        samples: graphs.
        keys, queries: `(edge,)`, the ends.
        query_starts: `(samples * nodes + 1,)`; the edges of query c begin at its entry c.
        key_starts, queries_by_key, by_key: the same edges sorted by key: where each key begins,
            the queries, and the place of each edge in the order by query.
        order: `(edge,)`, which of the given edges each is, -1 for an added loop, so that
            `attributes[graph.order]` follows the edges; None where `from_edges` did not make it.
        tokens: bool `(samples, nodes)`, False for padding; None where nothing is padded.
    """

    nodes: int
    samples: int
    keys: Tensor
    queries: Tensor
    query_starts: Tensor
    key_starts: Tensor
    queries_by_key: Tensor
    by_key: Tensor
    order: Tensor | None = None
    tokens: Tensor | None = None
    _tiles: dict[int, Graph] = field(default_factory=dict, repr=False)

    @classmethod
    def from_edges(cls, edges: Tensor, nodes: int, self_loops: bool | None = None) -> Graph:
        """A graph from a list of its edges.

        Args:
            edges: integers `(2, edge)`: keys (sources) and queries (targets), the order of
                torch-geometric's edge_index. An undirected edge is two.
            nodes: how many.
            self_loops: True adds the loops that are missing, False takes all out, None leaves
                them as given.

        Raises:
            ValueError, TypeError: wrong shape or dtype, an end out of range, an edge given twice.
        """
        check_count("nodes", nodes)
        _check_edges(edges, nodes)
        keys, queries = (end.numpy(force=True) for end in edges)
        order = np.arange(len(keys), dtype=np.int32)
        if self_loops is not None:
            order = order[keys != queries] if not self_loops else order
            loops = np.arange(nodes) if self_loops else np.arange(0)
            missing = np.setdiff1d(loops, keys[keys == queries], assume_unique=True)
            keys = np.concatenate([keys[order], missing])
            queries = np.concatenate([queries[order], missing])
            order = np.concatenate([order, np.full(len(missing), -1, np.int32)])
        # two stable counting sorts, in linear time; the first adds repeated edges up
        place = np.arange(len(keys), dtype=np.int32)
        matrix = sp.coo_array((place, (queries, keys)), (nodes, nodes)).tocsc()
        if matrix.nnz < len(keys):
            raise bad("edges", "every edge once", f"{len(keys) - matrix.nnz} repeated")
        matrix = matrix.tocsr()
        found = _sorted(matrix.indices, matrix.indptr, nodes, 1, edges.device)
        return replace(found, order=torch.from_numpy(order[matrix.data]).to(edges.device))

    @classmethod
    def batch(cls, graphs: Sequence[Graph]) -> Graph:
        """Many graphs as one: sample s is graphs[s], padded to the largest.

        Args:
            graphs: single graphs on one device. Their edges follow each other, so that
                `torch.cat` of their weights are the weights of the batch.

        Returns:
            Graph whose `tokens` says which nodes exist.
        """
        if not graphs or any(g.samples != 1 for g in graphs):
            raise bad("graphs", "at least one graph, of one sample each", list(graphs))
        nodes = max(g.nodes for g in graphs)
        shifts = [s * nodes for s in range(len(graphs))]
        keys = torch.cat([g.keys + shift for g, shift in zip(graphs, shifts, strict=True)])
        counts = [torch.nn.functional.pad(g.degrees, (0, nodes - g.nodes)) for g in graphs]
        sizes = torch.tensor([g.nodes for g in graphs], device=keys.device)
        found = _from_counts(keys, torch.cat(counts), nodes, len(graphs))
        tokens = torch.arange(nodes, device=keys.device) < sizes[:, None]
        return replace(found, tokens=tokens)

    @property
    def size(self) -> int:
        """The number of edges."""
        return len(self.keys)

    @property
    def edges(self) -> Tensor:
        """The edges, int64 `(2, edge)`: keys and queries, with indices over all samples."""
        return torch.stack([self.keys, self.queries]).long()

    @property
    def degrees(self) -> Tensor:
        """How many keys each query sees, int32 `(samples * nodes,)`."""
        return self.query_starts.diff()

    @property
    def device(self) -> torch.device:
        """Where the indices are."""
        return self.keys.device

    def to(self, device: torch.device | str) -> Self:
        """The same graph on a device."""
        moved: dict[str, Any] = {
            name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)
        }
        return replace(self, **moved, _tiles={})

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # nothing in it ever changes

    def tiled(self, samples: int) -> Graph:
        """This graph for each of several samples; the graph itself where it has that many.

        Raises:
            ValueError: a batch of another number of graphs.
        """
        if samples == self.samples:
            return self
        if self.samples != 1:
            raise bad("graph", f"1 or {samples} samples", self.samples)
        if samples not in self._tiles:
            self._tiles.clear()  # one is enough: batches seldom change their size
            keys = _shifted(self.keys, samples, self.nodes)
            self._tiles[samples] = replace(
                self, samples=samples, keys=keys, _tiles={}, order=None,
                queries=_shifted(self.queries, samples, self.nodes),
                query_starts=_starts(self.degrees.repeat(samples)),
                key_starts=_starts(self.key_starts.diff().repeat(samples)),
                queries_by_key=_shifted(self.queries_by_key, samples, self.nodes),
                by_key=_shifted(self.by_key, samples, self.size),
            )  # fmt: skip
        return self._tiles[samples]

    def kept(self, edges: Tensor) -> Graph:
        """Only some of the edges; edges: bool `(edge,)`."""
        if not isinstance(edges, Tensor) or edges.dtype != torch.bool:
            kind = edges.dtype if isinstance(edges, Tensor) else type(edges).__name__
            raise TypeError(f"edges: expected a bool tensor, got {kind}")
        if edges.shape != self.keys.shape:
            raise bad("edges", f"shape ({self.size},)", f"shape {tuple(edges.shape)}")
        counts = torch.zeros_like(self.query_starts[1:])
        counts.index_add_(0, self.queries, edges.to(counts.dtype))
        return _from_counts(self.keys[edges], counts, self.nodes, self.samples)

    def select(self, rows: Tensor) -> tuple[Graph, Tensor]:
        """Some of the samples, in this order, and which edges they have, int64 `(edge,)`.

        rows: int64 indices of samples.
        """
        if len(rows) == self.samples and bool((rows.diff() == 1).all()):
            return self, torch.arange(self.size, device=self.device)
        begins = self.query_starts[:: self.nodes].long()
        counts = begins.diff()[rows]
        edges = _ranges(begins[rows], counts)
        shift = (torch.arange(len(rows), device=self.device) - rows) * self.nodes
        keys = self.keys[edges] + shift.repeat_interleave(counts).int()
        degrees = self.degrees.reshape(self.samples, self.nodes)[rows].flatten()
        found = _from_counts(keys, degrees, self.nodes, len(rows))
        return replace(found, tokens=None if self.tokens is None else self.tokens[rows]), edges

    def induced(self, nodes: Tensor) -> Graph:
        """The graph of some nodes, renumbered in this order, and the edges between them.

        nodes: distinct int64 indices, of a single graph. `order` says which edges of this graph
        the new ones are.
        """
        if self.samples != 1:
            raise bad("graph", "a single graph", f"{self.samples} samples")
        nodes = check_rows("nodes", nodes, self.nodes)
        place = torch.full((self.nodes,), -1, dtype=torch.int32, device=self.device)
        place[nodes] = torch.arange(len(nodes), dtype=torch.int32, device=self.device)
        if int((place >= 0).sum()) != len(nodes):
            raise bad("nodes", "distinct nodes", "repeated ones")
        counts = self.degrees[nodes].long()
        edges = _ranges(self.query_starts[nodes].long(), counts)
        seen = place[self.keys[edges]] >= 0
        edges = edges[seen]
        ends = torch.stack([place[self.keys[edges]], place[self.queries[edges]]])
        found = Graph.from_edges(ends, len(nodes))
        return replace(found, order=edges[found.order].int())

    def __repr__(self) -> str:
        many = f"{self.samples} of " if self.samples > 1 else ""
        return f"Graph({many}{self.nodes} nodes, {self.size} edges)"


def _check_edges(edges: Tensor, nodes: int) -> None:
    if not isinstance(edges, Tensor) or edges.dtype not in (torch.int32, torch.int64):
        kind = edges.dtype if isinstance(edges, Tensor) else type(edges).__name__
        raise TypeError(f"edges: expected a tensor of int32 or int64, got {kind}")
    if edges.ndim != 2 or len(edges) != 2:
        raise bad("edges", "shape (2, edge)", f"shape {tuple(edges.shape)}")
    if edges.shape[1] + nodes > MOST:
        raise bad("edges", f"at most {MOST} edges and loops", edges.shape[1] + nodes)
    if edges.numel() and not 0 <= int(edges.min()) <= int(edges.max()) < nodes:
        raise bad("edges", f"ends from 0 to {nodes - 1}",
                  f"{int(edges.min())} to {int(edges.max())}")  # fmt: skip


def _sorted(
    keys: np.ndarray, starts: np.ndarray, nodes: int, samples: int, device: torch.device
) -> Graph:
    """From the edges sorted by query, as a CSR matrix has them."""
    total = nodes * samples
    place = np.arange(len(keys), dtype=np.int32)
    keys, starts = keys.astype(np.int32, copy=False), starts.astype(np.int32, copy=False)
    by_key = sp.csr_array((place, keys, starts), (total, total)).tocsc()  # a counting sort
    queries = np.repeat(np.arange(total, dtype=np.int32), np.diff(starts))

    def tensor(index: np.ndarray) -> Tensor:
        return torch.from_numpy(index.astype(np.int32, copy=False)).to(device)

    return Graph(
        nodes, samples, tensor(keys), tensor(queries), tensor(starts),
        tensor(by_key.indptr), tensor(by_key.indices), tensor(by_key.data),
    )  # fmt: skip


def _from_counts(keys: Tensor, counts: Tensor, nodes: int, samples: int) -> Graph:
    """From the keys sorted by query, and how many each query has."""
    starts = _starts(counts).numpy(force=True)
    return _sorted(keys.numpy(force=True), starts, nodes, samples, keys.device)


def _starts(counts: Tensor) -> Tensor:
    total = int(counts.sum())
    if total > MOST:
        raise bad("graph", f"at most {MOST} edges over all samples", total)
    return torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))


def _shifted(index: Tensor, samples: int, by: int) -> Tensor:
    shifts = torch.arange(samples, dtype=index.dtype, device=index.device) * by
    return (index + shifts[:, None]).flatten()


def _ranges(begins: Tensor, counts: Tensor) -> Tensor:
    """begins[0], begins[0] + 1, ..., counts[0] of them, then those of begins[1], ..."""
    before = counts.cumsum(0) - counts
    within = torch.arange(int(counts.sum()), device=counts.device)
    return within + (begins - before).repeat_interleave(counts)
