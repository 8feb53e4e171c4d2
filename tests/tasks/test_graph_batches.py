"""Packing graphs: unions, padding, positions, scaling."""

import pytest
import torch

from etdyn.datasets.graph_sets import GraphSet
from etdyn.graphs import Graph
from etdyn.tasks.graph_batches import (
    GraphData,
    disjoint_union,
    laplacian_positions,
    walk_positions,
)


@pytest.fixture
def graphs(random_graphs):
    return random_graphs()


def test_union_is_the_graph_that_from_edges_makes_of_all_edges():
    rng = torch.Generator().manual_seed(0)
    singles, ends, before = [], [], 0
    for n in (3, 1, 5):
        edges = (torch.rand(n, n, generator=rng) < 0.5).nonzero().T  # directed
        singles.append(Graph.from_edges(edges, n))
        ends.append(edges + before)
        before += n
    union, whole = disjoint_union(singles), Graph.from_edges(torch.cat(ends, 1), before)
    assert (union.nodes, union.samples) == (whole.nodes, whole.samples) == (9, 1)
    for name in ("keys", "queries", "query_starts", "key_starts", "queries_by_key", "by_key"):
        assert torch.equal(getattr(union, name), getattr(whole, name)), name
        assert getattr(union, name).dtype == torch.int32, name


def test_union_refuses_what_is_no_single_graph():
    single = Graph.from_edges(torch.tensor([[0], [1]]), 2)
    for graphs in ([], [single, Graph.batch([single, single])]):
        with pytest.raises(ValueError, match="graphs: expected at least one graph"):
            disjoint_union(graphs)


@pytest.mark.parametrize("padded", [False, True])
def test_pairs_are_those_of_the_spec(graphs, padded):
    """CLS to and from every node and itself, no loops of nodes, features in their places."""
    batch = GraphData(graphs, k=2).batch([4, 1, 0], padded)
    assert batch.shape == ((3, 1 + int(batch.sizes.max())) if padded else (1, len(batch.positions)))
    rows = [4, 1, 0]
    for place, row in enumerate(rows):
        n = len(graphs.features[row])
        table = {}
        mine = batch.pair_owner == place
        for (key, query), value in zip(
            (batch.graph.edges - batch.cls[place])[:, mine].T.tolist(),
            batch.pair_features[mine],
            strict=True,
        ):
            table[key, query] = value
        expected = {(0, b) for b in range(n + 1)} | {(b, 0) for b in range(n + 1)}
        for (key, query), value in zip(
            graphs.edges[row].T.tolist(), graphs.edge_features[row], strict=True
        ):
            assert torch.equal(table[key + 1, query + 1], torch.cat([value, torch.zeros(1)]))
            expected.add((key + 1, query + 1))
        assert table.keys() == expected
        assert all(torch.equal(table[e], torch.tensor([0, 0, 1.0])) for e in table if 0 in e)
        assert torch.equal(batch.features[batch.owner == place], graphs.features[row])
        assert int(batch.nodes[batch.owner == place][0]) == int(batch.cls[place]) + 1
    assert torch.equal(batch.labels, graphs.labels[rows])


def test_edges_among_nodes_follow_their_graphs(graphs):
    batch = GraphData(graphs, k=2).batch([3, 0])
    n = len(graphs.features[3])
    assert torch.equal(batch.edges, torch.cat([graphs.edges[3], graphs.edges[0] + n], 1))
    total = graphs.features[0].double().sum(0)
    assert (batch.double().node_sum(batch.double().features)[1] - total).abs().max() < 1e-14
    assert torch.equal(batch.token_owner.bincount() - 1, batch.sizes)


def test_laplacian_positions_are_eigenvectors_of_the_graph_with_cls(graphs):
    edges, n, k = graphs.edges[0], len(graphs.features[0]), 4
    vectors = laplacian_positions(edges, n, k)
    a = torch.ones(n + 1, n + 1, dtype=torch.float64)
    a[1:, 1:] = 0
    a[edges[1] + 1, edges[0] + 1] = 1
    scale = a.sum(1).rsqrt()
    laplacian = torch.eye(n + 1, dtype=torch.float64) - scale[:, None] * a * scale
    values = torch.linalg.eigvalsh(laplacian)
    assert (laplacian @ vectors - vectors * values[1 : k + 1]).abs().max() < 1e-13
    assert (vectors.T @ vectors - torch.eye(k, dtype=torch.float64)).abs().max() < 1e-13
    assert bool(((vectors**3).sum(0) >= 0).all())
    assert abs(float(values[0])) < 1e-14, "the one that is skipped is D^1/2 1"
    wide = laplacian_positions(edges, n, 30)
    assert torch.equal(wide[:, :k].abs(), vectors.abs()) and not bool(wide[:, n:].any())


def test_walk_positions_are_return_probabilities():
    path = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    found = walk_positions(path, 4, 4)  # node 3 has no edge
    rows = [[0, 0, 0, 0], [0, 0.5, 0, 0.5], [0, 1, 0, 1], [0, 0.5, 0, 0.5], [0, 0, 0, 0]]
    assert torch.equal(found, torch.tensor(rows, dtype=torch.float64))


def test_walk_positions_move_with_the_nodes(graphs):
    edges, n = graphs.edges[0], len(graphs.features[0])
    new = torch.randperm(n, generator=torch.Generator().manual_seed(1))
    moved = walk_positions(new[edges], n, 8)[1:][new]
    assert (moved - walk_positions(edges, n, 8)[1:]).abs().max() < 1e-15


def test_features_are_scaled_by_the_rows_that_are_seen(graphs):
    graphs = GraphSet(
        [torch.cat([f * 7 + 3, (f[:, :1] > 0).float()], 1) for f in graphs.features],
        graphs.edges, graphs.edge_features, graphs.labels, "scaled",
    )  # fmt: skip
    data, rows = GraphData(graphs, k=2), torch.tensor([0, 2, 3])
    scaled = data.standardised(rows)
    seen = scaled.batch(rows).features
    assert seen[:, :3].mean(0).abs().max() < 1e-5
    assert (seen[:, :3].std(0, correction=0) - 1).abs().max() < 1e-5
    assert set(seen[:, 3].tolist()) <= {0.0, 1.0}
    assert torch.equal(data.batch([0]).features, graphs.features[0]), "the original stays"
    changed = [f * (1 if row in rows else 99) for row, f in enumerate(graphs.features)]
    other = GraphSet(changed, graphs.edges, graphs.edge_features, graphs.labels, "other")
    again = GraphData(other, k=2).standardised(rows).batch(rows).features
    assert torch.equal(again, seen), "unseen graphs must not matter"


def test_constant_features_stay_finite(graphs):
    ones = [torch.full((len(f), 1), 5.0) for f in graphs.features]
    data = GraphData(GraphSet(ones, graphs.edges, None, graphs.labels, "constant"), k=2)
    assert not bool(data.standardised([0, 1]).batch([0]).features.any())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("sine", 2), "positions: expected one of"), (("walk", 0), "k: expected an integer >= 1")],
)
def test_wrong_arguments_are_named(graphs, arguments, message):
    with pytest.raises(ValueError, match=message):
        GraphData(graphs, *arguments)
