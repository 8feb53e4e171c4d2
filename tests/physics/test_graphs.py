"""The graph container: what an edge list becomes, and what its parts are."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn.graphs import Graph


@st.composite
def adjacencies(draw, nodes=None):
    """Bool `(query, key)`, directed, loops and isolated nodes included."""
    n = draw(st.integers(1, 6)) if nodes is None else nodes
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.rand(n, n, generator=rng) < draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))


def dense(graph):
    """Bool `(sample, query, key)`."""
    total = graph.samples * graph.nodes
    matrix = torch.zeros(total, total, dtype=torch.bool)
    keys, queries = graph.edges
    matrix[queries, keys] = True
    blocks = matrix.reshape(graph.samples, graph.nodes, graph.samples, graph.nodes)
    assert int(blocks.sum()) == sum(int(blocks[s, :, s].sum()) for s in range(graph.samples))
    return torch.stack([blocks[s, :, s] for s in range(graph.samples)])


def of(adjacency, shuffle=0):
    edges = adjacency.nonzero().T.flip(0)
    rng = torch.Generator().manual_seed(shuffle)
    return Graph.from_edges(edges[:, torch.randperm(edges.shape[1], generator=rng)], len(adjacency))


def consistent(graph):
    """The two orders describe the same edges."""
    keys, queries = graph.edges
    assert bool((queries * graph.samples * graph.nodes + keys).diff().gt(0).all())
    assert torch.equal(graph.query_starts.diff().long(),
                       torch.bincount(queries, minlength=len(graph.degrees)))  # fmt: skip
    by_key = graph.by_key.long()
    assert torch.equal(graph.queries_by_key, graph.queries[by_key])
    assert bool((graph.keys[by_key].diff() >= 0).all())
    assert torch.equal(graph.key_starts.diff().long(),
                       torch.bincount(keys, minlength=len(graph.degrees)))  # fmt: skip
    indices = (graph.keys, graph.queries, graph.query_starts, graph.key_starts, graph.by_key)
    assert all(index.dtype == torch.int32 for index in indices)


@given(adjacencies(), st.integers(0, 9))
def test_edges_come_back_sorted_with_the_order_they_were_given_in(adjacency, shuffle):
    edges = adjacency.nonzero().T.flip(0)
    edges = edges[:, torch.randperm(edges.shape[1])]
    graph = Graph.from_edges(edges, len(adjacency))
    assert torch.equal(dense(graph)[0], adjacency)
    assert torch.equal(edges[:, graph.order.long()], graph.edges)
    consistent(graph)


@given(adjacencies())
def test_self_loops_are_added_or_taken_out_once(adjacency):
    edges, n = adjacency.nonzero().T.flip(0), len(adjacency)
    eye = torch.eye(n, dtype=torch.bool)
    with_loops = Graph.from_edges(edges, n, self_loops=True)
    without = Graph.from_edges(edges, n, self_loops=False)
    assert torch.equal(dense(with_loops)[0], adjacency | eye)
    assert torch.equal(dense(without)[0], adjacency & ~eye)
    added = with_loops.order < 0
    assert int(added.sum()) == int((~adjacency.diagonal()).sum())
    for graph in (with_loops, without):
        given_ = graph.order[graph.order >= 0].long()
        assert torch.equal(edges[:, given_], graph.edges[:, graph.order >= 0])
        consistent(graph)


@given(st.lists(adjacencies(), min_size=1, max_size=4), st.data())
def test_batch_tiled_select_and_kept_are_made_of_the_same_edges(adjacencies, data):
    graphs = [of(a) for a in adjacencies]
    batch = Graph.batch(graphs)
    sizes = [g.nodes for g in graphs]
    assert torch.equal(batch.tokens.sum(1), torch.tensor(sizes))
    for matrix, adjacency in zip(dense(batch), adjacencies, strict=True):
        n = len(adjacency)
        assert torch.equal(matrix[:n, :n], adjacency) and int(matrix.sum()) == int(adjacency.sum())
    consistent(batch)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, len(graphs) - 1), max_size=5)),
                        dtype=torch.int64)  # fmt: skip
    if len(rows):
        part, edges = batch.select(rows)
        assert torch.equal(dense(part), dense(batch)[rows])
        assert torch.equal(part.tokens, batch.tokens[rows])
        within = lambda g, e: g.edges[:, e] % g.nodes  # noqa: E731
        assert torch.equal(within(part, torch.arange(part.size)), within(batch, edges))
        consistent(part)
    three = graphs[0].tiled(3)
    assert torch.equal(dense(three), dense(graphs[0]).expand(3, -1, -1))
    consistent(three)
    seen = torch.rand(batch.size, generator=torch.Generator().manual_seed(0)) < 0.5
    kept = batch.kept(seen)
    assert torch.equal(kept.edges, batch.edges[:, seen])
    consistent(kept)


def test_a_graph_of_all_samples_in_order_is_the_graph():
    batch = Graph.batch([of(torch.ones(2, 2) > 0), of(torch.ones(3, 3) > 0)])
    part, edges = batch.select(torch.arange(2))
    assert part is batch and torch.equal(edges, torch.arange(batch.size))
    assert batch.tiled(2) is batch
    assert repr(batch) == "Graph(2 of 3 nodes, 13 edges)"
    with pytest.raises(ValueError, match="graph: expected 1 or 3 samples, got 2"):
        batch.tiled(3)


def test_wrong_edges_are_refused():
    edges = torch.tensor([[0, 1], [1, 2]])
    with pytest.raises(ValueError, match="edges: expected ends from 0 to 1, got 0 to 2"):
        Graph.from_edges(edges, 2)
    with pytest.raises(ValueError, match="edges: expected ends from 0 to 2, got -1 to 1"):
        Graph.from_edges(edges - 1, 3)
    with pytest.raises(ValueError, match="edges: expected every edge once, got 1 repeated"):
        Graph.from_edges(torch.tensor([[0, 1, 0], [1, 2, 1]]), 3)
    with pytest.raises(ValueError, match=r"edges: expected shape \(2, edge\)"):
        Graph.from_edges(edges.flatten(), 3)
    with pytest.raises(TypeError, match="edges: expected a tensor of int32 or int64"):
        Graph.from_edges(edges.float(), 3)
    with pytest.raises(TypeError, match="int64, got list"):
        Graph.from_edges([[0], [1]], 3)
    with pytest.raises(ValueError, match="nodes: expected an integer >= 1, got 0"):
        Graph.from_edges(edges, 0)
    with pytest.raises(ValueError, match="graphs: expected at least one graph"):
        Graph.batch([])
    with pytest.raises(ValueError, match="graphs: expected at least one graph, of one sample each"):
        Graph.batch([Graph.from_edges(edges, 3).tiled(2)])


@given(adjacencies(), st.data())
def test_induced_is_the_part_of_the_matrix(adjacency, data):
    graph, n = of(adjacency), len(adjacency)
    order = data.draw(st.permutations(range(n)))
    nodes = torch.tensor(order[: data.draw(st.integers(1, n))])
    part = graph.induced(nodes)
    assert torch.equal(dense(part)[0], adjacency[nodes][:, nodes])
    consistent(part)
    assert part.order.dtype == torch.int32
    before = graph.edges[:, part.order.long()]
    assert torch.equal(nodes[part.edges], before), "order names the edges, and weights follow"
    same = graph.induced(torch.arange(n))
    assert torch.equal(same.edges, graph.edges)
    assert torch.equal(same.order, torch.arange(graph.size).int())


def test_induced_refuses_what_is_no_part():
    graph = of(torch.ones(3, 3) > 0)
    with pytest.raises(ValueError, match="nodes: expected distinct nodes, got repeated ones"):
        graph.induced(torch.tensor([0, 1, 0]))
    with pytest.raises(ValueError, match="nodes: expected indices from 0 to 2, got -1 to 1"):
        graph.induced(torch.tensor([1, -1]))
    with pytest.raises(ValueError, match="nodes: expected indices from 0 to 2, got 1 to 3"):
        graph.induced(torch.tensor([3, 1]))
    with pytest.raises(ValueError, match="graph: expected a single graph, got 2 samples"):
        graph.tiled(2).induced(torch.tensor([0]))


def test_kept_takes_a_mask_of_all_edges():
    graph = of(torch.ones(3, 3) > 0)
    for wrong, kind in ((torch.tensor([0, 1]), r"torch\.int64"), ([True] * 9, "list")):
        with pytest.raises(TypeError, match=f"edges: expected a bool tensor, got {kind}"):
            graph.kept(wrong)
    with pytest.raises(ValueError, match=r"edges: expected shape \(9,\), got shape \(2,\)"):
        graph.kept(torch.tensor([True, False]))
