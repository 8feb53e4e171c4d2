"""Products over the edges of a graph that build nothing of the size edges x features.

Every product is one slot of the trilinear form

    T(v, q, k) = sum_{edges c <- b} v_cb <q_c, k_b>

given the other two: `EDGE` is <q_c, k_b> (a sampled dense-dense product), `QUERY` is
sum_b v_cb k_b and `KEY` is sum_c v_cb q_c (sparse-dense products). The derivative of a slot is
made of the other slots, so autograd, in both modes and to any order, is as sparse.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from etdyn.graphs import Graph

__all__ = ["EDGE", "KEY", "QUERY", "contract", "row_sum", "row_top", "softmax", "to_edges"]

EDGE, QUERY, KEY = range(3)


def contract(graph: Graph, slot: int, a: Tensor, b: Tensor) -> Tensor:
    """One slot of the trilinear form of this file, from the two that follow it in a circle.

    Args:
        graph: of all samples.
        slot: `EDGE` from (query, key), `QUERY` from (key, edge), `KEY` from (edge, query).
        a, b: edge `(edge,)`; query and key `(samples * nodes, width)`.
    """
    result: Tensor = _Contract.apply(graph, slot, a, b)  # type: ignore[no-untyped-call]
    return result


def _csr(starts: Tensor, columns: Tensor, values: Tensor) -> Tensor:
    n = len(starts) - 1
    return torch.sparse_csr_tensor(starts, columns, values, (n, n), check_invariants=False)


with warnings.catch_warnings():  # torch says once in a process that CSR tensors are young
    warnings.simplefilter("ignore")
    _csr(torch.zeros(2, dtype=torch.int32), torch.zeros(0, dtype=torch.int32), torch.zeros(0))


def _product(graph: Graph, slot: int, a: Tensor, b: Tensor) -> Tensor:
    if slot == EDGE:
        matrix = _csr(graph.query_starts, graph.keys, a.new_zeros(graph.size))
        torch.sparse.sampled_addmm(matrix, a, b.mT, beta=0.0, out=matrix)
        return matrix.values()
    if slot == QUERY:
        return _csr(graph.query_starts, graph.keys, b) @ a
    return _csr(graph.key_starts, graph.queries_by_key, a.index_select(0, graph.by_key)) @ b


class _Contract(torch.autograd.Function):
    @staticmethod
    def forward(graph: Graph, slot: int, a: Tensor, b: Tensor) -> Tensor:
        return _product(graph, slot, a.contiguous(), b.contiguous())

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.graph, ctx.slot, *given = inputs
        ctx.save_for_backward(*given)
        ctx.save_for_forward(*given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        first, second = (ctx.slot + 1) % 3, (ctx.slot + 2) % 3
        wants = ctx.needs_input_grad
        return (
            None,
            None,
            contract(ctx.graph, first, b, grad) if wants[2] else None,
            contract(ctx.graph, second, grad, a) if wants[3] else None,
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (a, b), (da, db) = ctx.saved_tensors, tangents[2:]
        parts = []
        if da is not None:
            parts.append(contract(ctx.graph, ctx.slot, da, b))
        if db is not None:
            parts.append(contract(ctx.graph, ctx.slot, a, db))
        return sum(parts[1:], parts[0])


def row_sum(graph: Graph, edges: Tensor) -> Tensor:
    """The sum of `(edge,)` over the keys of every query, `(samples * nodes,)`."""
    result: Tensor = _RowSum.apply(graph, edges)  # type: ignore[no-untyped-call]
    return result


def to_edges(graph: Graph, queries: Tensor) -> Tensor:
    """`(samples * nodes,)` of every edge's query, `(edge,)`; the adjoint of `row_sum`."""
    result: Tensor = _ToEdges.apply(graph, queries)  # type: ignore[no-untyped-call]
    return result


def softmax(graph: Graph, logits: Tensor) -> tuple[Tensor, Tensor]:
    """P = softmax of `(edge,)` over the keys of every query, and the logarithm of its sum.

    Returns:
        P `(edge,)` and log sum_b exp(logits) `(samples * nodes,)`, zero where a query has no edge.
    """
    result: tuple[Tensor, Tensor] = _Softmax.apply(graph, logits)  # type: ignore[no-untyped-call]
    return result


def row_top(graph: Graph, logits: Tensor) -> Tensor:
    """The largest of every query, without gradient, `(samples * nodes,)`; zero without edges."""
    top = torch.segment_reduce(logits.detach(), "max", offsets=graph.query_starts)
    return top.masked_fill(graph.degrees == 0, 0.0)


class _Softmax(torch.autograd.Function):
    """dP = P (dz - sum_b P dz), d lse = sum_b P dz."""

    @staticmethod
    def forward(graph: Graph, logits: Tensor) -> tuple[Tensor, Tensor]:
        top = row_top(graph, logits)
        share = top.index_select(0, graph.queries)
        torch.sub(logits, share, out=share).exp_()
        total = row_sum(graph, share).masked_fill_(graph.degrees == 0, 1.0)
        return share.div_(total.index_select(0, graph.queries)), top + total.log()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.graph = inputs[0]
        ctx.save_for_backward(output[0])
        ctx.save_for_forward(output[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
        (share,) = ctx.saved_tensors
        mean = row_sum(ctx.graph, share * grad)
        return None, share * (grad + to_edges(ctx.graph, grad_lse - mean))

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> tuple[Tensor, Tensor]:
        (share,) = ctx.saved_tensors
        mean = row_sum(ctx.graph, share * tangent)
        return share * (tangent - to_edges(ctx.graph, mean)), mean


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(graph: Graph, edges: Tensor) -> Tensor:
        ones = edges.new_ones(len(graph.query_starts) - 1)
        return _csr(graph.query_starts, graph.keys, edges.contiguous()) @ ones

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.graph = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, to_edges(ctx.graph, grad)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        return row_sum(ctx.graph, tangent)


class _ToEdges(torch.autograd.Function):
    @staticmethod
    def forward(graph: Graph, queries: Tensor) -> Tensor:
        return queries.index_select(0, graph.queries)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.graph = inputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, row_sum(ctx.graph, grad)

    @staticmethod
    def jvp(ctx: Any, _: Any, tangent: Tensor) -> Tensor:
        return to_edges(ctx.graph, tangent)
