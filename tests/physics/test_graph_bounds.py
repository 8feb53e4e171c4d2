"""Bounds of the Hessian of graph attention (ET-F21): never passed, and dense attention's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import etdyn as ed

F64 = torch.float64
DIM, HEADS, WIDTH, BETA = 4, 2, 3, 0.7


def adjacency_of(nodes, seed):
    """A directed graph with a row without edges; entry (query, key)."""
    seen = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(seed)) < 0.6
    seen[seed % nodes] = False
    return seen


def graph_of(adjacency):
    return ed.Graph.from_edges(adjacency.nonzero().T.flip(0), len(adjacency))


def bare(kind=ed.GraphAttention, **options):
    torch.manual_seed(1)
    return kind(DIM, HEADS, WIDTH, BETA, **options).double().requires_grad_(False)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), share=st.sampled_from([0.2, 0.6, 1.0]), sign=st.booleans())
def test_f21_the_hessian_is_within_its_bound(seed, share, sign):
    """Of random directed graphs, with weights of one sign or both."""
    draw = torch.Generator().manual_seed(seed)
    n, beta = 4, 10 ** (2 * torch.rand(1, generator=draw).item() - 1)
    seen = torch.rand(n, n, generator=draw) < share
    graph = graph_of(seen)
    weights = torch.randn(graph.size, HEADS, generator=draw, dtype=F64)
    attention = ed.GraphAttention(DIM, HEADS, WIDTH, beta).double().requires_grad_(False)
    for weight in (attention.query, attention.key):
        weight.copy_(torch.randn(weight.shape, generator=draw, dtype=F64))
    attention = attention.on(graph, weights.abs() if sign else weights)
    delta = torch.randn(DIM, generator=draw, dtype=F64)
    ball = torch.nn.functional.normalize(torch.randn(1, n, DIM, generator=draw, dtype=F64), dim=2)
    eye = torch.eye(n * DIM, dtype=F64).reshape(-1, n, DIM)
    for radius in (0.1, 2.0):
        hessian = attention.hvp((delta + radius * ball).expand(len(eye), -1, -1), eye).flatten(1)
        bound_ = attention.hessian_bound(n, float(delta.norm()), radius)
        assert float(torch.linalg.matrix_norm(hessian, 2)) <= bound_ * (1 + 1e-12) + 1e-12


@pytest.mark.parametrize("name", ["curvature_bound", "hessian_bound"])
@pytest.mark.parametrize("self_attention", [True, False])
def test_bounds_are_those_of_dense_attention(close, name, self_attention):
    """On a complete graph, and under masks, sample by sample."""
    ball = (0.4, 1.3) if name == "hessian_bound" else ()
    dense = bare(ed.Attention, self_attention=self_attention)
    whole = torch.ones(5, 5, dtype=torch.bool)
    whole.fill_diagonal_(self_attention)
    sparse = bare().on(graph_of(whole))
    close(getattr(sparse, name)(5, *ball), getattr(dense, name)(5, *ball), 1e-14)
    ones = sparse.on(sparse.graph, torch.ones(sparse.graph.size, HEADS, dtype=F64))
    close(getattr(ones, name)(5, *ball), getattr(dense, name)(5, *ball), 1e-14)
    tokens = torch.tensor([[True] * 5, [True, True, True, False, False], [True] + 4 * [False]])
    keys = adjacency_of(5, 2)[None]
    for masks in ({"tokens": tokens}, {"keys": keys}, {"tokens": tokens, "keys": keys}):
        found = getattr(sparse.masked(**masks), name)(5, *ball)
        close(found, getattr(dense.masked(**masks), name)(5, *ball), 1e-14)


def test_a_spread_of_weights_raises_the_bound_by_as_much_as_derived(close):
    """One query that sees two keys, w = 1 +- d: 2 |S| sqrt(r c) + 2 beta |S|^2 (q G^2 + ...)."""
    one = ed.GraphAttention(2, 1, 2, 1.0).double().requires_grad_(False)
    one.query[0] = one.key[0] = torch.eye(2)
    graph = ed.Graph.from_edges(torch.tensor([[0, 1], [2, 2]]), 3)
    for d in (0.0, 0.5):
        w = torch.tensor([[1 + d], [1 - d]], dtype=F64)
        r, centre, radius = 1 + d, 3.0, 0.5
        curved = r**2 * (centre + radius) ** 2 + (r * radius + d * centre) ** 2
        close(one.on(graph, w).hessian_bound(3, centre, radius), 2 * r + 2 * curved, 1e-14)
