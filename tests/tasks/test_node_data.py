"""Node sets as networks take them: parts of graphs, drawn neighbourhoods, scaled features."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn.datasets.nodes import NodeSet
from etdyn.graphs import Graph
from etdyn.tasks.node_data import NodeData, prepare_nodes, sample_neighbourhood


def dense(graph):
    """Bool `(query, key)`."""
    matrix = torch.zeros(graph.nodes, graph.nodes, dtype=torch.bool)
    keys, queries = graph.edges
    matrix[queries, keys] = True
    return matrix


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def ball(graphs, seeds, hops):
    """Bool `(node,)`: those that some seed reaches from query to key, by any relation."""
    union = torch.stack([dense(graph) for graph in graphs]).any(0)
    found = torch.zeros(len(union), dtype=torch.bool)
    found[seeds] = True
    for _ in range(hops):
        found = found | union[found].any(0)
    return found


# --- parts ------------------------------------------------------------------------------------


def test_induced_takes_the_same_nodes_everywhere(random_nodes):
    data, nodes = random_nodes(), torch.tensor([7, 2, 11, 0, 5])
    part = data.induced(nodes)
    assert torch.equal(part.features, data.features[nodes])
    assert torch.equal(part.labels, data.labels[nodes])
    assert part.nodes == 5 and part.name == data.name and len(part.graphs) == 2
    for small, large in zip(part.graphs, data.graphs, strict=True):
        assert torch.equal(dense(small), dense(large)[nodes][:, nodes])


def test_thinned_leaves_out_about_a_share_and_no_loop():
    edges = (torch.rand(100, 100, generator=rng()) < 0.3).nonzero().T
    graph = Graph.from_edges(edges, 100, self_loops=True)
    data = NodeData(torch.zeros(100, 1), (graph, graph), torch.zeros(100).long(), "dense")
    torch.manual_seed(0)
    part = data.thinned(0.4)
    assert part.features is data.features and part.labels is data.labels
    matrices = [dense(thin) for thin in part.graphs]
    for thin, matrix in zip(part.graphs, matrices, strict=True):
        assert bool(matrix.diagonal().all()) and not bool((matrix & ~dense(graph)).any())
        others = graph.size - 100
        left = thin.size - 100
        assert abs(left - 0.6 * others) < 5 * math.sqrt(0.24 * others)
    assert not torch.equal(*matrices), "relations are drawn for themselves"
    assert not torch.equal(dense(data.thinned(0.4).graphs[0]), matrices[0])
    torch.manual_seed(0)
    assert torch.equal(dense(data.thinned(0.4).graphs[0]), matrices[0])
    state = torch.random.get_rng_state()
    assert data.thinned(0.0) is data
    assert torch.equal(torch.random.get_rng_state(), state)


# --- neighbourhoods ---------------------------------------------------------------------------


@given(loops=st.booleans(), seed=st.integers(0, 99), sizes=st.tuples(*[st.integers(1, 4)] * 4))
def test_drawn_nodes_are_distinct_and_near(random_nodes, loops, seed, sizes):
    relations, hops, fanout, count = sizes
    graphs = random_nodes(30, 1, relations, loops, seed).graphs
    seeds = torch.randperm(30, generator=rng(seed))[:count]
    found = sample_neighbourhood(graphs, seeds, hops, fanout, rng(seed))
    assert found.dtype == torch.int64 and torch.equal(found[:count], seeds)
    assert len(found.unique()) == len(found)
    assert bool(ball(graphs, seeds, hops)[found].all())
    most, last = count, count
    for _ in range(hops):
        last *= relations * fanout
        most += last
    assert len(found) <= most
    assert torch.equal(sample_neighbourhood(graphs, seeds, hops, fanout, rng(seed)), found)


@pytest.mark.parametrize("hops", [1, 2, 3])
@pytest.mark.parametrize("loops", [True, False])
def test_many_draws_find_all_that_is_near(random_nodes, hops, loops):
    graphs, seeds = random_nodes(40, 1, 2, loops).graphs, torch.tensor([3, 0])
    thin = [graph.kept(torch.rand(graph.size, generator=rng()) < 0.3) for graph in graphs]
    found = sample_neighbourhood(thin, seeds, hops, 1_000, rng())
    expected = ball(thin, seeds, hops)
    assert torch.equal(found.sort().values, expected.nonzero().flatten())
    assert hops == 3 or int(expected.sum()) < 40


def test_keys_are_drawn_alike_often():
    """One draw of eight keys, 800 times: each 100, within 5 deviations of a binomial."""
    ends = torch.stack([torch.arange(1, 9), torch.zeros(8, dtype=torch.int64)])
    graph, generator = Graph.from_edges(ends, 9), rng()
    drawn = torch.cat([
        sample_neighbourhood([graph], torch.tensor([0]), 1, 1, generator)[1:] for _ in range(800)
    ])  # fmt: skip
    counts = drawn.bincount(minlength=9)
    assert counts[0] == 0 and int(counts.sum()) == 800
    assert (counts[1:] - 100).abs().max() < 5 * math.sqrt(800 * 7 / 64)


def test_seeds_without_edges_stay_alone(random_nodes):
    empty = Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), 5)
    seeds = torch.tensor([4, 1])
    assert torch.equal(sample_neighbourhood([empty], seeds, 2, 3, rng()), seeds)
    graphs = random_nodes(loops=False).graphs  # node 0 has no edge
    assert sample_neighbourhood(graphs, torch.tensor([0]), 3, 5, rng()).tolist() == [0]
    both = sample_neighbourhood(graphs, torch.tensor([0, 1]), 1, 50, rng())
    assert both[:2].tolist() == [0, 1] and len(both) > 2


def test_draws_leave_the_global_state(random_nodes):
    state = torch.random.get_rng_state()
    graphs = random_nodes().graphs
    one, two = (sample_neighbourhood(graphs, torch.tensor([1]), 1, 2, rng(s)) for s in (0, 1))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert one.tolist() != two.tolist()


# --- features ---------------------------------------------------------------------------------


def star_and_path(features, labels=(1, 0, 0, 0, -1)):
    """Five nodes: in one relation the first is joined to all others but the last, in the other
    all follow each other."""
    star = torch.tensor([[0, 0, 0, 1, 2, 3], [1, 2, 3, 0, 0, 0]])
    path = torch.tensor([[0, 1, 2, 3, 1, 2, 3, 4], [1, 2, 3, 4, 0, 1, 2, 3]])
    return NodeSet(features, torch.tensor(labels), {"star": star, "path": path}, "five")


X = torch.tensor([[1.0, 7, 2], [3, 7, 2], [2, 7, 2], [-4, 7, 5], [3, 7, 2]])
COLUMNS = torch.tensor([  # what is not constant, and both degrees
    [1.0, 3, 2, -4, 3], [2, 2, 2, 5, 2], [3, 1, 1, 1, 0], [1, 2, 2, 2, 1],
], dtype=torch.float64)  # fmt: skip


def ranks(column):
    """2 (r - 1/2) / n - 1 where r counts the smaller ones, and half of the equal ones."""
    below = (column < column[:, None]).sum(1) + 0.5 * (column == column[:, None]).sum(1).double()
    return 2 * below / len(column) - 1


def test_features_are_scaled_and_ranked_with_degrees(close):
    data = prepare_nodes(star_and_path(X), dtype=torch.float64)
    assert data.features.shape == (5, 8), "the constant column is gone"
    columns = COLUMNS.clone()
    columns[2:] = columns[2:].log1p()
    for k, column in enumerate(columns):
        scaled = data.features[:, k]
        assert abs(float(scaled.mean())) < 1e-15 and abs(float(scaled.std()) - 1) < 1e-15
        close(scaled, (column - column.mean()) / column.std(), 1e-14)
        close(data.features[:, 4 + k], ranks(column), 1e-15)
    assert float(data.features[:, 4:].abs().max()) < 1


def test_graphs_have_the_edges_of_the_relations_and_loops():
    nodes = star_and_path(X)
    data = prepare_nodes(nodes)
    assert data.features.dtype == torch.float32 and data.features.device.type == "cpu"
    assert torch.equal(data.labels, nodes.labels) and data.name == "five" and data.nodes == 5
    for graph, edges in zip(data.graphs, nodes.relations.values(), strict=True):
        matrix = torch.eye(5, dtype=torch.bool)
        matrix[edges[1], edges[0]] = True
        assert torch.equal(dense(graph), matrix)


def test_features_do_not_know_labels():
    one, two = star_and_path(X), star_and_path(X, labels=(0, -1, 1, 1, 1))
    assert torch.equal(prepare_nodes(one).features, prepare_nodes(two).features)


def test_units_do_not_matter_and_ranks_not_even_scales(close):
    """Features in other units change nothing; a rising map leaves the ranks."""
    plain = prepare_nodes(star_and_path(X), dtype=torch.float64).features
    moved = prepare_nodes(star_and_path(1024 * X - 512), dtype=torch.float64).features
    close(moved, plain, 1e-14)
    cubed = prepare_nodes(star_and_path(X**3), dtype=torch.float64).features
    assert torch.equal(cubed[:, 4:], plain[:, 4:])
    assert (cubed - plain).abs().max() > 0.1


def test_nothing_but_constants_is_refused():
    ring = torch.stack([torch.arange(4), (torch.arange(4) + 1) % 4])
    edges = torch.cat([ring, ring.flip(0)], 1)
    nodes = NodeSet(torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), {"ring": edges}, "ring")
    with pytest.raises(ValueError, match="nodes: expected features or degrees that differ"):
        prepare_nodes(nodes)
