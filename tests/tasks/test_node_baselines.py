"""The baselines are what they say: torch-geometric's convolutions, dense attention, tables."""

import builtins
import copy

import numpy as np
import pytest
import torch
from torch.nn import functional

from etdyn.graphs import Graph
from etdyn.tasks import node_baselines
from etdyn.tasks.detection import NodeSplit, split_nodes
from etdyn.tasks.node_baselines import (
    GCN,
    GIN,
    MLP,
    GraphTransformer,
    forest_probability,
    node_table,
    regression_probability,
    united,
)
from etdyn.tasks.node_data import NodeData

NETWORKS = [MLP, GCN, GIN, GraphTransformer]
NODES, FEATURES = 14, 5


def build(network, seed=0, **options):
    torch.manual_seed(seed)
    return network(FEATURES, dim=8, dropout=0.0, **options).double()


def dense(graph):
    """Bool `(query, key)`."""
    matrix = torch.zeros(graph.nodes, graph.nodes, dtype=torch.bool)
    keys, queries = graph.edges
    matrix[queries, keys] = True
    return matrix


@pytest.fixture(scope="module")
def data(random_nodes):
    return random_nodes(NODES, FEATURES, relations=2)


def gradients(model, logits, x):
    """Of a function of the logits, by the features and every parameter."""
    weight = torch.linspace(-1, 2, logits.numel(), dtype=logits.dtype).reshape(logits.shape)
    parts = [x, *model.parameters()]
    found = torch.autograd.grad((logits * weight).sin().sum(), parts, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for g, p in zip(found, parts, strict=True)]


# --- networks ---------------------------------------------------------------------------------


def test_united_has_every_edge_once(data):
    graph = united(data.graphs)
    assert torch.equal(dense(graph), dense(data.graphs[0]) | dense(data.graphs[1]))
    assert graph.size == int(dense(graph).sum())
    assert graph.size < sum(g.size for g in data.graphs) - NODES, "some are in both"
    assert united(data.graphs[:1]) is data.graphs[0]


@pytest.mark.parametrize("network", [GCN, GIN])
@pytest.mark.parametrize("relations", [1, 2])
def test_convolutions_are_those_of_torch_geometric(data, close, network, relations):
    """Outputs and gradients, with its own messages along the list of edges."""
    geometric = pytest.importorskip("torch_geometric.nn")
    graphs = data.graphs[:relations]
    model = build(network, layers=3)
    plain = copy.deepcopy(model)
    for k, ours in enumerate(model.convolutions):
        width = FEATURES if k == 0 else 8
        theirs = (
            geometric.GCNConv(width, 8)
            if network is GCN
            else geometric.GINConv(copy.deepcopy(ours.nn), train_eps=True)
        )
        theirs.load_state_dict(ours.state_dict())
        plain.convolutions[k] = theirs.double()
    graph = united(graphs)
    ends = graph.edges[:, graph.keys != graph.queries]  # they add their own loops, or none
    x = data.features.clone().requires_grad_()
    seen = x
    for convolve, norm in zip(plain.convolutions, plain.norms, strict=True):
        seen = norm(convolve(seen, ends)).relu()
    expected, found = plain.output(seen), model(x, graphs)
    close(found, expected, 1e-12)
    pairs = zip(gradients(model, found, x), gradients(plain, expected, x), strict=True)
    for mine, theirs in pairs:
        close(mine, theirs, 1e-11, 0.1)


def test_nodes_without_edges_are_zero_to_their_neighbours(close):
    """As in torch-geometric without added loops: 1 / sqrt(degree) is zero where no edge ends."""
    geometric = pytest.importorskip("torch_geometric.nn")
    edges, x = torch.tensor([[0, 1], [1, 2]]), torch.randn(3, FEATURES, dtype=torch.float64)
    model = build(GCN, layers=1).eval()
    theirs = geometric.GCNConv(FEATURES, 8, add_self_loops=False)
    theirs.load_state_dict(model.convolutions[0].state_dict())
    expected = model.output(model.norms[0](theirs.double()(x, edges)).relu())
    found = model(x, [Graph.from_edges(edges, 3)])
    assert bool(found.isfinite().all())
    close(found, expected, 1e-12)


def test_graph_transformer_is_dense_attention_with_a_mask(data, close):
    model = build(GraphTransformer, heads=2, layers=2)
    x = data.features.clone().requires_grad_()
    mask = dense(united(data.graphs))
    h = model.encoder(x)
    for block in model.blocks:
        parts = block.project(block.norms[0](h)).reshape(NODES, 3, 2, 4).permute(1, 2, 0, 3)
        seen = functional.scaled_dot_product_attention(*parts, attn_mask=mask)
        h = h + block.output(seen.transpose(0, 1).reshape(NODES, 8))
        h = h + block.perceptron(block.norms[1](h))
    expected, found = model.output(h), model(x, data.graphs)
    close(found, expected, 1e-12)
    pairs = zip(gradients(model, found, x), gradients(model, expected, x), strict=True)
    for mine, theirs in pairs:
        close(mine, theirs, 1e-11, 0.1)


@pytest.mark.parametrize("network", NETWORKS)
def test_logits_do_not_depend_on_the_numbering(data, close, network):
    model, order = build(network).eval(), torch.randperm(NODES)
    place = order.argsort()
    graphs = [Graph.from_edges(place[graph.edges], NODES) for graph in data.graphs]
    logits = model(data.features, data.graphs)
    assert logits.shape == (NODES, 2)
    close(model(data.features[order], graphs), logits[order], 1e-12)


@pytest.mark.parametrize(("network", "sees"), [(MLP, 0), (GCN, 2), (GIN, 2), (GraphTransformer, 1)])
def test_who_sees_whom(network, sees):
    """On a path: as many hops as layers."""
    ends = torch.stack([torch.arange(6), torch.arange(1, 7)])
    graph = Graph.from_edges(torch.cat([ends, ends.flip(0)], 1), 7, self_loops=True)
    model = build(network).eval()
    x = torch.randn(7, FEATURES, dtype=torch.float64)
    found = torch.autograd.functional.jacobian(lambda f: model(f, [graph]), x)
    distance = (torch.arange(7) - torch.arange(7)[:, None]).abs()
    assert torch.equal(found.abs().amax((1, 3)) > 1e-14, distance <= sees)


@pytest.mark.parametrize("network", NETWORKS)
def test_dropout_only_in_training(data, network):
    torch.manual_seed(0)
    model = network(FEATURES, dropout=0.5).double()
    first, other = (model(data.features, data.graphs) for _ in range(2))
    assert not torch.equal(first, other)
    model.eval()
    assert torch.equal(model(data.features, data.graphs), model(data.features, data.graphs))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="heads: expected a divisor of 8, got 3"):
        build(GraphTransformer, heads=3)


@pytest.mark.parametrize("network", [GCN, GIN])
def test_absent_library_is_named(monkeypatch, network):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torch_geometric"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    node_baselines._sparse.cache_clear()
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"need torch-geometric: pip install etdyn\[graphs\]"):
        build(network)


# --- tables -----------------------------------------------------------------------------------


def test_table_by_hand(data, close):
    """A node, then for each relation the mean over its other neighbours and their number."""
    own = node_table(data, neighbours=False)
    assert own.dtype == np.float64 and np.array_equal(own, data.features.numpy())
    columns = [data.features]
    for graph in data.graphs:
        a = dense(graph).double().fill_diagonal_(0)
        degree = a.sum(1, keepdim=True)
        assert float(degree[0]) == 0, "and a node without any"
        columns += [a @ data.features / degree.clamp(min=1), degree]
    wide = node_table(data, neighbours=True)
    close(wide, torch.cat(columns, 1), 1e-14)
    assert wide.shape == (NODES, 3 * FEATURES + 2)


@pytest.fixture(scope="module")
def told():
    """300 nodes whose label is the sign of one of three features, all but always; no edges."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=rng, dtype=torch.float64)
    labels = (x[:, 1] + 0.3 * torch.randn(300, generator=rng) > 0.8).long()
    graph = Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), 300, self_loops=True)
    return NodeData(x, (graph,), labels, "told")


@pytest.mark.parametrize("predict", [regression_probability, forest_probability])
def test_tables_learn_without_test_labels(told, predict, monkeypatch):
    split = split_nodes(told.labels, 0.4)
    table = node_table(told, neighbours=False)
    candidates = []
    real = node_baselines._best
    monkeypatch.setattr(
        node_baselines, "_best", lambda c, *rest: candidates.extend(c) or real(c, *rest)
    )
    p = predict(table, told, split)
    assert p.shape == (300,) and p.dtype == torch.float64
    assert bool(((p >= 0) & (p <= 1)).all())
    y = told.labels
    assert auc(y[split.test], p[split.test]) > 0.9
    poisoned = y.index_put((split.test,), 1 - y[split.test])
    again = predict(table, NodeData(told.features, told.graphs, poisoned, "poisoned"), split)
    assert torch.equal(p, again), "and the same in every run"
    held = split.validation
    scores = [auc(y[held], torch.from_numpy(c.predict_proba(table)[:, 1])[held])
              for c in candidates[: len(candidates) // 2]]  # fmt: skip
    assert len(scores) > 1 and auc(y[held], p[held]) == pytest.approx(max(scores), abs=1e-12)


def auc(labels, p):
    gap = p[labels == 1][:, None] - p[labels == 0]
    return float(((gap > 0).double() + 0.5 * (gap == 0)).mean())


def test_regression_balances_the_classes(told):
    """Its decision, not only its order, is that of classes of equal weight."""
    rows = torch.arange(300)
    split = NodeSplit(rows[:200], rows[200:250], rows[250:])
    p = regression_probability(node_table(told, neighbours=False), told, split)
    y = told.labels[:200]
    assert float((p[:200] > 0.5).double().mean()) > float(y.double().mean())
    mean = [float(p[:200][y == kind].mean()) for kind in (0, 1)]
    assert mean[0] < 0.3 and mean[1] > 0.7
