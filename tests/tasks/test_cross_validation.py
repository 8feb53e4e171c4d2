"""Folds, the training loop, and that a test fold is seen once."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from etdyn import store
from etdyn.datasets.graph_sets import GraphSet
from etdyn.tasks import graph_training
from etdyn.tasks.cross_validation import (
    cross_validate,
    nested_folds,
    published_protocol,
    train_fold,
)
from etdyn.tasks.graph_batches import GraphData
from etdyn.tasks.graph_classification import GraphClassifier, et_blocks
from etdyn.tasks.graph_training import FitConfig, accuracy, fit, predict

FAST = FitConfig(epochs=4, patience=4, batch=16)


def small(data):
    blocks = et_blocks(1, dim=12, heads=1, head_dim=6, memories=12)
    return GraphClassifier(blocks, data, step=0.5, dropout=0.2)


@pytest.fixture
def data(random_graphs):
    return GraphData(random_graphs(40), k=4)


@pytest.fixture
def fold(data):
    return nested_folds(data.labels, 4)[0]


def trained(data, fold, config=FAST, seed=0):
    torch.manual_seed(0)
    model = small(data)
    report = fit(
        model, data, train=fold.train, validation=fold.validation, config=config, seed=seed
    )
    return model, report


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_folds_are_disjoint_stratified_and_cover_all():
    labels = torch.tensor([0] * 70 + [1] * 50 + [2] * 30)[
        torch.randperm(150, generator=torch.Generator().manual_seed(0))
    ]
    folds = nested_folds(labels, 10, seed=3)
    assert torch.equal(torch.cat([f.test for f in folds]).sort().values, torch.arange(150))
    for fold in folds:
        together = torch.cat([fold.train, fold.validation, fold.test])
        assert torch.equal(together.sort().values, torch.arange(150))
        assert len(fold.validation) == 14  # a tenth of 135, rounded up
        assert labels[fold.test].bincount().tolist() == [7, 5, 3]
        assert (labels[fold.validation].bincount() - torch.tensor([6.3, 4.5, 2.7])).abs().max() < 1
    again, other = nested_folds(labels, 10, 3), nested_folds(labels, 10, 4)
    assert all(torch.equal(a.train, b.train) for a, b in zip(folds, again, strict=True))
    assert not torch.equal(folds[0].test, other[0].test)


def test_more_folds_than_a_class_has_graphs_are_refused():
    with pytest.raises(ValueError, match="folds: expected at most 3, the graphs of the smallest"):
        nested_folds(torch.tensor([0] * 9 + [1] * 3), 4)


def test_a_validation_that_cannot_hold_every_class_is_refused():
    labels = torch.arange(42) % 3
    assert all(len(fold.validation) == 3 for fold in nested_folds(labels, 2))
    with pytest.raises(ValueError, match=r"labels: expected over 20 outside a fold.*got 20"):
        nested_folds(labels[:40], 2)


def test_the_test_fold_is_never_seen(random_graphs, fold):
    """Other features, edges and labels of the test graphs leave the model as it is, to the bit."""
    graphs = random_graphs(40)
    test = set(fold.test.tolist())
    poisoned = GraphSet(
        [f + 99 if r in test else f for r, f in enumerate(graphs.features)],
        [e[:, :0] if r in test else e for r, e in enumerate(graphs.edges)],
        [w[:0] if r in test else w for r, w in enumerate(graphs.edge_features)],
        torch.tensor([1 - y if r in test else y for r, y in enumerate(graphs.labels.tolist())]),
        "poisoned",
    )
    first, again = (train_fold(small, GraphData(g, k=4), FAST, fold) for g in (graphs, poisoned))
    assert torch.equal(weights(first[0]), weights(again[0]))
    rows = fold.validation
    assert torch.equal(first[1].batch(rows).features, again[1].batch(rows).features)


def test_same_seed_same_bits_and_no_global_state(data, fold):
    first, report = trained(data, fold)
    state = torch.random.get_rng_state()
    second, again = trained(data, fold)
    torch.manual_seed(0)
    small(data)  # what `trained` itself draws
    after = torch.random.get_rng_state()
    assert torch.equal(weights(first), weights(second)) and not torch.equal(
        weights(first), weights(trained(data, fold, seed=1)[0])
    )
    assert torch.equal(state, after), "training must not touch the global state"
    assert (report.best_epoch, report.saved_bytes) == (again.best_epoch, again.saved_bytes)
    assert report.saved_bytes > 0


def test_the_best_epoch_is_kept_and_patience_ends(data, fold, monkeypatch):
    """By accuracy, then cross-entropy: of these scores the third epoch's, which stops at 5."""
    scores = iter([(0.6, -0.9), (0.7, -0.5), (0.7, -0.4), (0.7, -0.4), (0.6, -0.1), (1.0, 0.0)])
    seen = []

    def scripted(model, data, rows):
        seen.append(copy.deepcopy(model.state_dict()))
        return next(scores)

    monkeypatch.setattr(graph_training, "_score", scripted)
    config = FitConfig(epochs=6, patience=2, batch=16)
    model, report = trained(data, fold, config)
    assert (report.best_epoch, report.epochs, report.validation_accuracy) == (3, 5, 0.7)
    for name, value in model.state_dict().items():
        assert torch.equal(value, seen[2][name]), name
    assert not model.training


def test_weights_are_averaged(data, fold):
    """With no memory the average is the model itself, and differs from one with memory."""
    sharp = trained(data, fold, FitConfig(epochs=3, batch=16, average=0.0))[0]
    smooth = trained(data, fold, FitConfig(epochs=3, batch=16, average=0.9))[0]
    assert not torch.equal(weights(sharp), weights(smooth))


def test_every_part_of_the_recipe_counts(data, fold):
    plain = {"epochs": 2, "batch": 16, "lr": 1e-2}
    changes = [{}, {"lr": 2e-2}, {"weight_decay": 0.5}, {"warmup": 0.9}, {"smoothing": 0.3},
               {"clip": 1e-3}, {"average": 0.1}, {"batch": 9}]  # fmt: skip
    found = [weights(trained(data, fold, FitConfig(**plain | change))[0]) for change in changes]
    assert len({tuple(w.tolist()) for w in found}) == len(changes)


def test_prediction_does_not_depend_on_the_batch(data):
    torch.manual_seed(0)
    model, rows = small(data), torch.arange(40)
    difference = predict(model, data, rows, 7) - predict(model, data, rows, 40)
    assert difference.abs().max() < 1e-6  # float32


def test_a_small_problem_is_learnt(triangle_graphs):
    """Rings with two chords each: which close triangles? Features and degrees say nothing."""
    data = GraphData(triangle_graphs(), k=4)
    fold = nested_folds(data.labels, 4)[0]
    torch.manual_seed(0)
    model = GraphClassifier(et_blocks(2, dim=16, heads=1, head_dim=8, memories=32), data, step=0.5)
    config = FitConfig(epochs=30, batch=16, lr=1e-2)
    fit(model, data, train=fold.train, validation=fold.validation, config=config)
    assert accuracy(model, data, fold.test) > 0.9


def test_cross_validation_is_recorded_and_continued(data, tmp_path):
    path = tmp_path / "run.zarr"
    arguments = {"folds": 3, "seed": 1, "model": {"name": "small"}}
    whole = cross_validate(small, data, FAST, **arguments)
    calls = []

    def failing(data):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return small(data)

    with pytest.raises(KeyboardInterrupt):
        cross_validate(failing, data, FAST, **arguments, path=path)
    assert store.load(path).sizes["fold"] == 2
    result = cross_validate(small, data, FAST, **arguments, path=path)
    for name in ("test_accuracy", "train_accuracy", "validation_accuracy", "best_epoch"):
        assert np.array_equal(result[name], whole[name]), name
    assert store.load(path).identical(result)
    assert result.attrs["etdyn_schema"] == "etdyn.cross_validation/1"
    assert bool((result.parameters == sum(p.numel() for p in small(data).parameters())).all())
    with pytest.raises(ValueError, match=r"path: expected a run of \{'fit': .*'epochs': 5"):
        cross_validate(small, data, FitConfig(epochs=5), **arguments, path=str(path))
    with pytest.raises(ValueError, match="model: expected a record of what build makes"):
        cross_validate(small, data, FAST, folds=3, path=path)


def test_what_is_continued_is_of_the_same_graphs(data, triangle_graphs, tmp_path):
    """Not only of the same name: every label, feature and edge counts."""
    arguments = {"folds": 3, "model": {"name": "small"}, "path": tmp_path / "run.zarr"}
    graphs = triangle_graphs()
    cross_validate(small, GraphData(graphs, k=4), FAST, **arguments)
    features = [f.clone() for f in graphs.features]
    features[-1][-1, -1] += 1e-6
    edges = [*graphs.edges[:-1], graphs.edges[-1][:, 2:]]
    for change in ({"labels": 1 - graphs.labels}, {"features": features}, {"edges": edges}):
        other = GraphData(replace(graphs, **change), k=4)
        with pytest.raises(ValueError, match=r"path: expected a run of \{'checksum'"):
            cross_validate(small, other, FAST, **arguments)


def test_masks_are_no_rows(data):
    mask = torch.arange(len(data)) < 20
    for verb in (data.batch, data.standardised):
        with pytest.raises(TypeError, match=r"rows: expected integers, got torch\.bool"):
            verb(mask)
        with pytest.raises(TypeError, match="rows: expected integers"):
            verb([0.5])
        for rows in ([-1], [len(data)], []):
            with pytest.raises(ValueError, match="rows: expected"):
                verb(rows)


class Memory(nn.Module):
    """Knows every training graph by its first feature, and no other: what leakage looks like."""

    def __init__(self, data):
        super().__init__()
        self.table = nn.Linear(1, data.classes)
        self.known = {}

    def forward(self, batch, generator=None):
        starts = batch.sizes.cumsum(0) - batch.sizes
        first = batch.features[starts, 0].tolist()
        if self.training:
            self.known |= dict(zip(first, batch.labels.tolist(), strict=True))
        guess = [self.known.get(value, 0) for value in first]
        return 0 * self.table.weight.sum() + torch.eye(2)[guess]


def test_published_protocol_is_labelled_and_inflated(data):
    with pytest.warns(UserWarning, match="not held out"):
        leaky = published_protocol(Memory, data, FAST)
    honest = cross_validate(Memory, data, FAST, folds=4)
    assert leaky == 1.0
    assert float(honest.test_accuracy.mean()) < 0.7


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer >= 1"),
        ({"lr": 0}, "lr: expected a finite number > 0"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"smoothing": 1.0}, r"smoothing: expected a share in \[0, 1\)"),
    ],
)
def test_wrong_recipes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        FitConfig(**options)


def test_wrong_rows_are_refused(data, fold):
    with pytest.raises(ValueError, match="validation: expected graphs that are not trained on"):
        fit(small(data), data, train=fold.train, validation=fold.train[:2], config=FAST)
    with pytest.raises(ValueError, match="train: expected at least one graph"):
        fit(small(data), data, train=fold.train[:0], validation=fold.test, config=FAST)
