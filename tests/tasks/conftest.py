"""Small sets of graphs, and small graphs of nodes, for the tests of tasks."""

from collections.abc import Callable

import pytest
import torch

from etdyn.datasets.graph_sets import GraphSet
from etdyn.graphs import Graph
from etdyn.tasks.node_data import NodeData


@pytest.fixture(scope="session")
def random_graphs() -> Callable[..., GraphSet]:
    """`random_graphs(count, seed)`: undirected graphs of 2 to 10 nodes; the second has no edge."""

    def make(count: int = 6, seed: int = 0, edge_features: bool = True) -> GraphSet:
        rng = torch.Generator().manual_seed(seed)
        features, edges, weights = [], [], []
        for graph in range(count):
            n = 2 + int(torch.randint(9, (1,), generator=rng))
            a = (torch.rand(n, n, generator=rng) < (0 if graph == 1 else 0.4)).triu(1)
            ends = (a | a.T).nonzero().T
            features.append(torch.randn(n, 3, generator=rng))
            edges.append(ends)
            weights.append(torch.randn(n, n, 2, generator=rng)[ends[0], ends[1]])
        labels = torch.arange(count) % 2
        return GraphSet(features, edges, weights if edge_features else None, labels, "random")

    return make


@pytest.fixture(scope="session")
def triangle_graphs() -> Callable[..., GraphSet]:
    """`triangle_graphs(count, seed)`: rings of 9 to 12 nodes, half of them with chords that close
    triangles, the others with as many that close squares. Node features say nothing."""

    def make(count: int = 120, seed: int = 0) -> GraphSet:
        rng = torch.Generator().manual_seed(seed)
        features, edges = [], []
        for graph in range(count):
            n = 9 + int(torch.randint(4, (1,), generator=rng))
            ring = torch.arange(n)
            start = int(torch.randint(n, (1,), generator=rng))
            chords = torch.tensor([start, start + 4])
            ends = torch.stack([
                torch.cat([ring, chords]), torch.cat([ring + 1, chords + 2 + graph % 2])
            ]) % n  # fmt: skip
            shuffled = torch.randperm(n, generator=rng)[ends]
            features.append(torch.ones(n, 1))
            edges.append(torch.cat([shuffled, shuffled.flip(0)], 1))
        return GraphSet(features, edges, None, torch.arange(count) % 2, "triangles")

    return make


@pytest.fixture(scope="session")
def random_nodes() -> Callable[..., NodeData]:
    """`random_nodes(nodes, features, relations)`: directed random graphs on float64 features.

    The first node has no edge but its loop; labels are 1, 0, 0, -1, and again."""

    def make(
        nodes: int = 12, features: int = 5, relations: int = 2, loops: bool = True, seed: int = 0
    ) -> NodeData:
        rng = torch.Generator().manual_seed(seed)
        graphs = []
        for _ in range(relations):
            a = torch.rand(nodes, nodes, generator=rng) < 0.25
            a[0] = a[:, 0] = False
            graphs.append(Graph.from_edges(a.nonzero().T, nodes, self_loops=loops))
        x = torch.randn(nodes, features, generator=rng, dtype=torch.float64)
        labels = torch.tensor([1, 0, 0, -1])[torch.arange(nodes) % 4]
        return NodeData(x, tuple(graphs), labels, "random")

    return make
