"""The baselines: same batches, same laws."""

import builtins

import numpy as np
import pytest
import torch

from etdyn.datasets.graph_sets import GraphSet
from etdyn.tasks.cross_validation import nested_folds
from etdyn.tasks.graph_baselines import (
    GCN,
    GIN,
    MLP,
    GraphTransformer,
    cross_validate_table,
    graph_table,
    logistic_regression,
    random_forest,
)
from etdyn.tasks.graph_batches import GraphData
from etdyn.tasks.graph_classification import GraphClassifier, et_blocks
from etdyn.tasks.graph_training import FitConfig, accuracy, fit

NETWORKS = [GIN, GCN, MLP, GraphTransformer]
ROWS = [5, 1, 0, 3]


@pytest.fixture(scope="module")
def graphs(random_graphs):
    return random_graphs()


@pytest.fixture(scope="module")
def data(graphs):
    return GraphData(graphs, k=4)


def build(network, data):
    torch.manual_seed(0)
    return network(data).double().eval().requires_grad_(False)


def renumbered(graphs):
    rng = torch.Generator().manual_seed(0)
    features, edges = [], []
    for f, e in zip(graphs.features, graphs.edges, strict=True):
        new = torch.randperm(len(f), generator=rng)
        features.append(f[new.argsort()])
        edges.append(new[e])
    return GraphSet(features, edges, graphs.edge_features, graphs.labels, graphs.name)


@pytest.mark.parametrize("network", NETWORKS)
def test_batching_changes_no_result(data, close, network):
    model = build(network, data)
    together = model(data.batch(ROWS).double())
    assert together.shape == (4, 2)
    close(model(data.batch(ROWS, padded=True).double()), together, 1e-12)
    close(torch.cat([model(data.batch([row]).double()) for row in ROWS]), together, 1e-12)


@pytest.mark.parametrize("network", [GIN, GCN, MLP])
def test_logits_do_not_depend_on_the_numbering(graphs, data, close, network):
    model = build(network, data)
    moved = GraphData(renumbered(graphs), k=4)
    close(model(moved.batch(ROWS).double()), model(data.batch(ROWS).double()), 1e-12)


def test_transformer_hardly_depends_on_the_numbering(graphs, data, close):
    """Its positions are sums in float32, which another order rounds in another way."""
    model, moved = build(GraphTransformer, data), GraphData(renumbered(graphs), k=4)
    close(model(moved.batch(ROWS).double()), model(data.batch(ROWS).double()), 1e-6)


@pytest.mark.parametrize(("network", "sees"), [(GIN, 1), (GCN, 1), (MLP, 0), (GraphTransformer, 1)])
def test_who_sees_edges(graphs, data, network, sees):
    model = build(network, data)
    bare = GraphSet(graphs.features, [e[:, :0] for e in graphs.edges],
                    [w[:0] for w in graphs.edge_features], graphs.labels, "bare")  # fmt: skip
    change = model(GraphData(bare, k=4).batch([0]).double()) - model(data.batch([0]).double())
    assert (change.abs().max() > 1e-6) == bool(sees)


@pytest.mark.parametrize(("network", "sees"), [(GIN, 0), (GCN, 0), (MLP, 0), (GraphTransformer, 1)])
def test_who_sees_edge_features(graphs, data, network, sees):
    model = build(network, data)
    other = GraphSet(graphs.features, graphs.edges, [w + 1 for w in graphs.edge_features],
                     graphs.labels, "other")  # fmt: skip
    change = model(GraphData(other, k=4).batch([0]).double()) - model(data.batch([0]).double())
    assert (change.abs().max() > 1e-6) == bool(sees)


def test_gin_is_the_published_layer(data):
    """h = MLP(x + sum of neighbours), by a dense matrix."""
    model, batch = build(GIN, data), data.batch([0]).double()
    a = torch.zeros(len(batch.features), len(batch.features), dtype=torch.float64)
    a[batch.edges[1], batch.edges[0]] = 1
    layer = model.convolutions[0]
    expected = layer.nn(batch.features + a @ batch.features)
    assert (layer(batch.features, batch.edges) - expected).abs().max() < 1e-14


def test_transformer_has_as_many_parameters_as_the_energy_transformer(data):
    blocks = et_blocks(4, dim=64, heads=2, head_dim=32, memories=256)
    models = GraphClassifier(blocks, data), GraphTransformer(data, dim=64, hidden=64)
    ours, other = (sum(p.numel() for p in model.parameters()) for model in models)
    assert abs(other / ours - 1) < 0.1


@pytest.mark.parametrize("network", [GIN, GraphTransformer])
def test_networks_learn_by_the_same_loop(triangle_graphs, network):
    data = GraphData(triangle_graphs(80), k=4)
    fold = nested_folds(data.labels, 4)[0]
    torch.manual_seed(0)
    model = network(data, dim=16)
    config = FitConfig(epochs=20, batch=16, lr=1e-2)
    fit(model, data, train=fold.train, validation=fold.validation, config=config)
    # GIN cannot tell regular neighbourhoods apart for long, but counts what hangs together here
    assert accuracy(model, data, torch.cat([fold.train, fold.test])) > 0.6


def test_table_by_hand(graphs, data):
    table = graph_table(data)
    f, e = graphs.features[0].double(), graphs.edges[0]
    row = torch.cat([f.sum(0), f.mean(0), torch.tensor([len(f), e.shape[1]])])
    assert (table[0] - row).abs().max() < 1e-5
    wide = graph_table(data, neighbours=True)
    assert torch.equal(wide[:, : table.shape[1]], table)
    a = torch.zeros(len(f), len(f), dtype=torch.float64)
    a[e[1], e[0]] = 1
    near = a @ f / a.sum(1, keepdim=True).clamp(min=1)
    assert (wide[0, table.shape[1] :][:3] - near.sum(0)).abs().max() < 1e-5
    joint = (f.T @ near).flatten()
    assert (wide[0, table.shape[1] + 6 :][:9] - joint).abs().max() < 1e-5
    degrees = a.sum(1).long().clamp(max=8).bincount(minlength=9)
    assert torch.equal(wide[0, -18:-9].double(), degrees.double())
    assert torch.isfinite(wide).all()


@pytest.mark.parametrize("make", [logistic_regression, random_forest])
def test_tables_learn_what_they_hold(make):
    """The class is the sign of one column; with labels drawn at random nothing is learnt."""
    rng = torch.Generator().manual_seed(0)
    table = torch.randn(160, 5, generator=rng)
    labels = (table[:, 2] > 0).long()
    found = cross_validate_table(make, table, labels, folds=2)
    assert float(found.test_accuracy.mean()) > 0.9
    shuffled = labels[torch.randperm(160, generator=rng)]
    assert float(cross_validate_table(make, table, shuffled, folds=2).test_accuracy.mean()) < 0.62
    again = cross_validate_table(make, table, labels, folds=2)
    assert np.array_equal(found.test_accuracy, again.test_accuracy)


def test_absent_library_is_named(data, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("torch_geometric"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"needs torch-geometric; pip install -e"):
        GIN(data)
