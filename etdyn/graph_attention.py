"""Energy attention over the edges of a graph, in memory O(edges + nodes x dim).

Source: Hoover et al. 2023, sections 4 and 5; ET sections 1.2 and 1.7.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_positive, check_tensor
from etdyn.energies import per_sample, score_norms
from etdyn.graph_products import (
    EDGE,
    KEY,
    QUERY,
    contract,
    row_sum,
    row_top,
    softmax,
    to_edges,
)
from etdyn.graphs import Graph
from etdyn.interactions import Energy

__all__ = ["GraphAttention"]


class GraphAttention(Energy):
    """Energy attention where each token sees its neighbours in a graph, and no others.

        E = -(1/beta) sum_h sum_c log sum_{b in N(c)} exp(beta w_hcb <K_hb, Q_hc>)
        K_hb = key_h g_b,  Q_hc = query_h g_c

    The graph is given by `on`, or `System.on`; a token sees itself where the graph has the loop.
    A query without edges contributes zero. The force is the gradient in both roles, for directed
    edges too. Smooth; equal to `Attention` on a complete graph without weights.

    Args:
        dim, heads, head_dim: sizes; `query` and `key` are `(heads, head_dim, dim)`.
        beta: inverse temperature > 0, shared by the heads; None is 1 / sqrt(head_dim).
    """

    name = "attention"

    def __init__(self, dim: int, heads: int, head_dim: int, beta: float | None = None) -> None:
        super().__init__()
        for label, count in (("dim", dim), ("heads", heads), ("head_dim", head_dim)):
            check_count(label, count)
        if beta is not None:
            check_positive("beta", beta)
        self.beta = 1 / math.sqrt(head_dim) if beta is None else float(beta)
        self.query = nn.Parameter(torch.empty(heads, head_dim, dim).normal_(std=dim**-0.5))
        self.key = nn.Parameter(torch.empty(heads, head_dim, dim).normal_(std=dim**-0.5))
        self._graph: Graph | None = None
        self.weights: Tensor | None
        self.register_buffer("weights", None, persistent=False)

    @property
    def graph(self) -> Graph:
        """Over whose edges it runs, without those that masks take out; `ValueError` if none."""
        if self._graph is None:
            raise bad("graph", "attention on a graph; see System.on", "none")
        return self._graph

    def on(self, graph: Graph, weights: Tensor | None = None) -> Self:
        """This attention over the edges of a graph, sharing parameters; masks are forgotten.

        Args:
            graph: on the device of the parameters.
            weights: w, `(edge, heads)`, finite, in the order of `graph.edges`; None is one.
                Gradients flow to it, and it is among the `parameters()` where it requires them.

        Raises:
            ValueError, TypeError: wrong shape, dtype or device; NaN in the weights.
        """
        if not isinstance(graph, Graph):
            raise TypeError(f"graph: expected a Graph, got {type(graph).__name__}")
        if graph.device != self.query.device:
            raise bad("graph", f"device {self.query.device}", graph.device)
        if weights is not None:
            check_tensor("weights", weights, (graph.size, len(self.query)), self.query)
            if not bool(torch.isfinite(weights).all()):
                raise bad("weights", "finite values", "NaN or infinity")
        view = copy.copy(self)
        view._tokens = view._keys = None
        view._attach(graph, weights)
        return view

    def _attach(self, graph: Graph, weights: Tensor | None) -> None:
        """Put another graph into this view, not into those that it shares dictionaries with."""
        self._graph = graph
        self._parameters = {n: p for n, p in self._parameters.items() if n != "weights"}
        self._buffers = {n: b for n, b in self._buffers.items() if n != "weights"}
        if weights is not None and weights.requires_grad:
            # what a network computed is no Parameter, but solvers look for gradients there
            self._parameters["weights"] = weights  # type: ignore[assignment]
        else:
            self._buffers["weights"] = weights

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """A copy whose weights, where a network computed them, no longer depend on it."""
        if self.weights is not None and not self.weights.is_leaf:
            memo[id(self.weights)] = self.weights.detach().clone().requires_grad_()
        copied = type(self).__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied

    def _set_masks(self, tokens: Tensor | None, keys: Tensor | None) -> None:
        super()._set_masks(tokens, keys)
        if self._graph is None or (tokens is None and keys is None):
            return
        graph = self._graph
        for name, mask in (("tokens", tokens), ("keys", keys)):
            if mask is None:
                continue
            if mask.shape[1] != graph.nodes or (1 not in (len(mask), graph.samples)
                                                and len(mask) != graph.samples):  # fmt: skip
                raise bad(name, f"a mask of {graph.samples} samples of {graph.nodes} tokens",
                          f"shape {tuple(mask.shape)}")  # fmt: skip
            graph = graph.tiled(max(len(mask), graph.samples))
        weights = self._tiled_weights(graph)
        seen = _allowed(graph, tokens, keys)
        if not bool(seen.all()):
            graph, weights = graph.kept(seen), None if weights is None else weights[seen]
        self._attach(graph, weights)

    def _tiled_weights(self, graph: Graph) -> Tensor | None:
        times = graph.samples // self.graph.samples
        if self.weights is None or times == 1:
            return self.weights
        return self.weights.repeat(times, 1)

    def select(self, rows: Tensor) -> Self:
        """See `Interaction`; a batch of graphs is cut too."""
        if self._graph is None or self._graph.samples == 1:
            return super().select(rows)
        index = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        graph, edges = self._graph.select(index)
        if graph is self._graph:
            return self
        view = copy.copy(self)
        view._tokens, view._keys = self._mask_rows(rows)
        view._attach(graph, None if self.weights is None else self.weights[edges])
        return view

    def sizes(self) -> tuple[int | None, int | None]:
        """Those of the graph; one graph serves any number of samples."""
        graph = self.graph
        return (None if graph.samples == 1 else graph.samples), graph.nodes

    @torch.no_grad()
    def curvature_bound(self, tokens: int) -> float | Tensor:
        """2 sum_h |S_h| sqrt(r_h c_h) >= the largest eigenvalue of the Hessian.

        With S_h = key_h^T query_h, r_h the largest |w_hcb|, and c_h the largest sum of |w_hcb|
        over the queries c that see one key; without weights 1 and the number of these queries.
        In a batch of graphs each sample has its own, `(batch,)`. From

            u.Hu = -2 sum_hcb P w <key u_b, query u_c> - beta sum_hc Var_{b~P}(w_cb dA_cb)
            dA_cb = <key u_b, query g_c> + <key g_b, query u_c>

        where the variances do not raise it, and |P w|_2 <= sqrt(|P w|_1 |P w|_inf) with P <= 1
        and sum_b P = 1. Source: ET-F21.
        """
        most, seen, _, _ = self._sizes()
        norms = score_norms(self.key, self.query)[:, None]
        return per_sample((2 * norms * (most * seen).sqrt()).sum(0))

    @torch.no_grad()
    def hessian_bound(self, tokens: int, centre: float, radius: float) -> float | Tensor:
        """sum_h 2 |S_h| sqrt(r_h c_h) + 2 beta |S_h|^2 (q_h G^2 + (r_h radius + d_h centre)^2).

        |H|_2 at most while all g lie within `radius` of a point at `centre` from zero, so that
        |g| <= G = centre + radius. S_h, r_h and c_h as in `curvature_bound`; q_h is the largest
        sum of w^2 over the queries that see one key, d_h half the largest range of w within a
        row; without weights the number of these queries, and zero: `Attention`'s bound.

        The first term bounds the crossed part of u.Hu, see there. A variance is at most twice
        those of both parts of w dA. As P <= 1, that of the first sums to

            sum_c Var(w <key u_b, query g_c>) <= sum_cb w^2 |S|^2 G^2 |u_b|^2 <= q |S|^2 G^2 |u|^2

        A variance is at most the mean square distance from any point. With the middle m of the
        row's weights and the centre z of the ball, |w g_b - m z| <= |w| radius + |w - m| |z|, so

            sum_c Var(<w key g_b, query u_c>) <= (r radius + d centre)^2 |S|^2 |u|^2
        """
        most, seen, squares, spread = self._sizes()
        norms = score_norms(self.key, self.query)[:, None]
        curved = squares * (centre + radius) ** 2 + (most * radius + spread * centre) ** 2
        crossed = norms * (most * seen).sqrt()
        return per_sample((2 * crossed + 2 * self.beta * norms.square() * curved).sum(0))

    def _sizes(self) -> tuple[Tensor, ...]:
        """r, c, q and d of `hessian_bound`, each `(head or 1, sample)`."""
        graph, found = self.graph, []
        ones = self.query.new_ones(len(graph.query_starts) - 1, 1)
        heads = self.query.new_ones(1, graph.size) if self.weights is None else self.weights.T
        for w in heads.contiguous():
            top, low = row_top(graph, w), -row_top(graph, -w)
            seen, squares = (contract(graph, KEY, v, ones)[:, 0] for v in (w.abs(), w.square()))
            found.append(torch.stack([top.maximum(-low), seen, squares, (top - low) / 2]))
        by_sample = torch.stack(found, 1).reshape(4, len(found), graph.samples, graph.nodes)
        return by_sample.amax(-1).unbind()

    def _fitted(self, g: Tensor) -> tuple[Graph, Tensor | None]:
        """The graph and the weights for all samples of g."""
        batch, tokens, _ = g.shape
        if tokens != self.graph.nodes or self.graph.samples not in (1, batch):
            many = "any" if self.graph.samples == 1 else self.graph.samples
            raise bad("g", f"shape ({many}, {self.graph.nodes}, any), as the graph has it",
                      f"shape {tuple(g.shape)}")  # fmt: skip
        graph = self.graph.tiled(batch)
        return graph, self._tiled_weights(graph)

    def _heads(self, g: Tensor) -> Iterator[_Head]:
        """What every head sees, one at a time: only one holds its edges in memory."""
        graph, weights = self._fitted(g)
        columns = [None] * len(self.query) if weights is None else weights.T
        for key, query, w in zip(
            _project(g, self.key), _project(g, self.query), columns, strict=True
        ):
            yield _Head(graph, key, query, w, self.beta)

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """See `Energy`. With p = w softmax_b(beta w A): force_c = query^T (p K) + key^T (p^T Q)."""
        as_query, as_key, logs = [], [], torch.zeros_like(g[..., 0])
        for head in self._heads(g):
            pull, log = head.pull()
            log = head.log_mean() if relative else log
            logs = logs + log.reshape(logs.shape)
            as_query.append(contract(head.graph, QUERY, head.key, pull))
            as_key.append(contract(head.graph, KEY, pull, head.query))
        return -logs.sum(1) / self.beta, self._merge(g, as_query, as_key)

    def _merge(self, g: Tensor, as_query: list[Tensor], as_key: list[Tensor]) -> Tensor:
        merged = _side_by_side(as_query) @ self.query.flatten(0, 1)
        return torch.addmm(merged, _side_by_side(as_key), self.key.flatten(0, 1)).reshape(g.shape)

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return self.local_energies(g, relative).sum((1, 2))

    def local_energies(self, g: Tensor, relative: bool = False) -> Tensor:
        """The energy of every head and query, `(batch, head, query)`."""
        logs = [head.log_mean() if relative else head.pull()[1] for head in self._heads(g)]
        return -torch.stack([log.reshape(g.shape[:2]) for log in logs], 1) / self.beta

    def head_forces(self, g: Tensor) -> Tensor:
        """See `Interaction`."""
        found = []
        for head, query, key in zip(self._heads(g), self.query, self.key, strict=True):
            pull, _ = head.pull()
            as_query = contract(head.graph, QUERY, head.key, pull) @ query
            as_key = contract(head.graph, KEY, pull, head.query) @ key
            found.append(torch.stack([as_query, as_key]).reshape(2, *g.shape))
        return torch.stack(found)

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E times u (ET-F10), with dp = beta p (w dA - sum_b P w dA)."""
        as_query, as_key = [], []
        directions = zip(_project(u, self.key), _project(u, self.query), strict=True)
        for head, (d_key, d_query) in zip(self._heads(g), directions, strict=True):
            graph, (pull, d_pull) = head.graph, head.d_pull(d_key, d_query)
            as_query.append(
                contract(graph, QUERY, head.key, d_pull) + contract(graph, QUERY, d_key, pull)
            )
            as_key.append(
                contract(graph, KEY, d_pull, head.query) + contract(graph, KEY, pull, d_query)
            )
        return -self._merge(g, as_query, as_key)

    def extra_repr(self) -> str:
        """What `print` shows."""
        heads, width, dim = self.query.shape
        graph = "no graph" if self._graph is None else str(self._graph)
        return f"dim={dim}, heads={heads}, head_dim={width}, beta={self.beta:.6g}, {graph}"


@dataclass(frozen=True)
class _Head:
    """One head at one state; the nodes of all samples in a row.

    key, query: `(node, head_dim)`; weight: w `(edge,)` or None.
    """

    graph: Graph
    key: Tensor
    query: Tensor
    weight: Tensor | None
    beta: float

    def logits(self) -> Tensor:
        """beta w <K_b, Q_c>, `(edge,)`."""
        return self.weighted(contract(self.graph, EDGE, self.beta * self.query, self.key))

    def weighted(self, edges: Tensor) -> Tensor:
        """Times w."""
        return edges if self.weight is None else edges * self.weight

    def pull(self) -> tuple[Tensor, Tensor]:
        """P w, `(edge,)`, how strongly key and query pull at each other; log sum_b exp(logits)."""
        share, lse = softmax(self.graph, self.logits())
        return self.weighted(share), lse

    def d_pull(self, d_key: Tensor, d_query: Tensor) -> tuple[Tensor, Tensor]:
        """P w and its derivative, beta P w (w dA - sum_b P w dA)."""
        share, _ = softmax(self.graph, self.logits())
        pairs = torch.cat([d_query, self.query], 1), torch.cat([self.key, d_key], 1)
        change = self.weighted(contract(self.graph, EDGE, *pairs))
        mean = to_edges(self.graph, row_sum(self.graph, share * change))
        return self.weighted(share), self.beta * self.weighted(share * (change - mean))

    def log_mean(self) -> Tensor:
        """log mean_b exp(logits), `(node,)`: exact for small ones, which log sum would drown."""
        logits, count = self.logits(), self.graph.degrees.clamp(min=1)
        top = row_top(self.graph, logits)
        excess = (logits - to_edges(self.graph, top)).expm1()
        return top + torch.log1p(row_sum(self.graph, excess) / count)


def _project(g: Tensor, weight: Tensor) -> Tensor:
    """`(head, node, head_dim)`."""
    flat = g.flatten(0, 1) @ weight.flatten(0, 1).T
    return flat.reshape(len(flat), *weight.shape[:2]).transpose(0, 1).contiguous()


def _side_by_side(heads: list[Tensor]) -> Tensor:
    return heads[0] if len(heads) == 1 else torch.cat(heads, 1)  # a copy costs as much as a product


def _allowed(graph: Graph, tokens: Tensor | None, keys: Tensor | None) -> Tensor:
    """Which edges the masks leave, bool `(edge,)`."""
    seen = torch.ones(graph.size, dtype=torch.bool, device=graph.device)
    if tokens is not None:
        present = tokens.expand(graph.samples, -1).flatten()
        seen &= present[graph.keys] & present[graph.queries]
    if keys is not None:
        n = graph.nodes
        sample = graph.queries // n if len(keys) > 1 else torch.zeros_like(graph.queries)
        seen &= keys[sample, graph.queries % n, graph.keys % n]
    return seen
