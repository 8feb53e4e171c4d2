"""Splits that mix nothing up, and scores that agree with counting by hand."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn.tasks.detection import THRESHOLDS, NodeSplit, detection_scores, split_nodes


def random_labels(nodes, seed=0, anomalies=0.2, unlabelled=0.3):
    rng = torch.Generator().manual_seed(seed)
    labels = (torch.rand(nodes, generator=rng) < anomalies).long()
    return labels.where(torch.rand(nodes, generator=rng) >= unlabelled, -1)


def parts_of(split):
    return [getattr(split, field.name) for field in dataclasses.fields(split)]


# --- splits -----------------------------------------------------------------------------------


@given(
    nodes=st.integers(200, 900), share=st.floats(0.1, 0.9), anomalies=st.floats(0.2, 0.5),
    unlabelled=st.sampled_from([0.0, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_split_covers_the_labelled_nodes_once_and_in_proportion(
    nodes, share, anomalies, unlabelled, seed
):
    labels = random_labels(nodes, seed, anomalies, unlabelled)
    parts = parts_of(split_nodes(labels, share, seed))
    together = torch.cat(parts)
    known = (labels >= 0).nonzero().flatten()
    assert torch.equal(together.sort().values, known), "each labelled node once, no other"
    assert all(part.dtype == torch.int64 and bool((part.diff() > 0).all()) for part in parts)
    rest = len(known) - int(share * len(known))
    assert [len(part) for part in parts] == [len(known) - rest, rest // 3, rest - rest // 3]
    train, validation, test = (int((labels[part] == 1).sum()) for part in parts)
    all_anomalies = int((labels == 1).sum())
    assert abs(train - all_anomalies * len(parts[0]) / len(known)) < 1
    assert abs(validation - (validation + test) * len(parts[1]) / rest) < 1


@pytest.mark.parametrize(("share", "sizes"), [(0.01, [100, 3300, 6600]), (0.4, [4000, 2000, 4000])])
def test_published_sizes(share, sizes):
    labels = random_labels(10_000, unlabelled=0.0)
    assert [len(part) for part in parts_of(split_nodes(labels, share))] == sizes


def test_a_seed_gives_one_split():
    labels = random_labels(500)
    state = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    first, again, other = (parts_of(split_nodes(labels, 0.4, seed)) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert torch.equal(torch.random.get_rng_state(), state[0])
    assert np.array_equal(np.random.get_state()[1], state[1])


@pytest.mark.parametrize(
    ("share", "message"),
    [
        (0.0, r"share: expected a number in \(0, 1\), got 0.0"),
        (1.0, r"share: expected a number in \(0, 1\), got 1.0"),
        (-0.2, r"share: expected a number in \(0, 1\)"),
        (float("nan"), r"share: expected a number in \(0, 1\), got nan"),
        (20, r"share: expected a number in \(0, 1\), got 20"),
        (0.01, "share: expected (one that leaves every part some nodes|training nodes of every)"),
        (0.99, "share: expected (one that leaves every part some nodes|validation nodes of every)"),
    ],
)
def test_impossible_shares_are_refused(share, message):
    with pytest.raises(ValueError, match=message):
        split_nodes(torch.tensor([0, 1] * 20), share)


@pytest.mark.parametrize("anomalies", [1, 2])
def test_too_few_anomalies_are_refused(anomalies):
    """Three parts cannot have one each."""
    labels = (torch.arange(100) < anomalies).long()
    for share in (0.3, 0.4, 0.5):
        with pytest.raises(ValueError, match="share: expected"):
            split_nodes(labels, share)


# --- scores -----------------------------------------------------------------------------------


def macro_f1(labels, found):
    """The mean over both classes of 2 hits / (2 hits + misses + false alarms)."""
    scores = []
    for kind in (0, 1):
        hits = ((labels == kind) & (found == kind)).sum()
        wrong = ((labels == kind) != (found == kind)).sum()
        scores.append(2 * hits / (2 * hits + wrong))
    return float(sum(scores) / 2)


def pairs_won(labels, p):
    """Of all pairs of an anomaly and a normal node, in which the anomaly has more; ties half."""
    gap = p[labels == 1][:, None] - p[labels == 0]
    return float(((gap > 0).double() + 0.5 * (gap == 0)).mean())


def average_precision(labels, p):
    """The precision at the rank of every anomaly, without ties."""
    ranked = labels[p.argsort(descending=True)]
    precision = ranked.cumsum(0).double() / torch.arange(1, len(ranked) + 1)
    return float(precision[ranked == 1].mean())


@pytest.fixture(scope="module")
def case():
    labels = random_labels(400, unlabelled=0.2)
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(400, generator=rng, dtype=torch.float64) + 1.2 * labels - 1.5
    return labels, logits.sigmoid(), split_nodes(labels, 0.3)


def test_scores_are_those_of_counting(case):
    labels, p, split = case
    found = detection_scores(labels, p, split)
    held, y, q = split.validation, labels[split.test], p[split.test]
    by_threshold = [macro_f1(labels[held], (p[held] > at).long()) for at in THRESHOLDS]
    assert found["threshold"] == THRESHOLDS[int(np.argmax(by_threshold))]
    assert 0.05 < found["threshold"] < 0.95 and len(set(by_threshold)) > 10
    assert found["macro_f1"] == pytest.approx(macro_f1(y, (q > found["threshold"]).long()))
    assert found["roc_auc"] == pytest.approx(pairs_won(y, q), rel=1e-12)
    assert found["average_precision"] == pytest.approx(average_precision(y, q), rel=1e-12)
    assert found["validation_roc_auc"] == pytest.approx(pairs_won(labels[held], p[held]), rel=1e-12)
    assert 0.6 < found["roc_auc"] < 0.95
    assert set(map(type, found.values())) == {float}


def test_thresholds_are_the_published_ones():
    assert THRESHOLDS.tolist() == pytest.approx([k / 20 for k in range(1, 20)], abs=1e-15)


def test_the_threshold_is_chosen_without_test_or_training_nodes(case):
    labels, p, split = case
    before = detection_scores(labels, p, split)
    turned, moved = labels.clone(), p.clone()
    turned[split.test], moved[split.test] = 1 - labels[split.test], 1 - p[split.test]
    for part in (split.train, (labels < 0).nonzero().flatten()):
        turned[part], moved[part] = 1, 0.5
    for y, q in ((turned, p), (labels, moved)):
        found = detection_scores(y, q, split)
        assert found["threshold"] == before["threshold"]
        assert found["validation_roc_auc"] == before["validation_roc_auc"]
        assert found["roc_auc"] == pytest.approx(1 - before["roc_auc"], abs=1e-12)


def test_perfect_inverted_and_constant_detectors(case):
    labels, _, split = case
    right = labels.clamp(min=0).double()
    found = detection_scores(labels, 0.8 * right + 0.1, split)
    assert all(found[name] == 1 for name in ("macro_f1", "roc_auc", "average_precision"))
    wrong = detection_scores(labels, 1 - right, split)
    assert wrong["roc_auc"] == wrong["validation_roc_auc"] == 0
    flat = detection_scores(labels, torch.full_like(right, 0.3), split)
    share = float((labels[split.test] == 1).double().mean())
    assert flat["roc_auc"] == 0.5 and flat["average_precision"] == pytest.approx(share)


def test_rising_maps_change_macro_f1_only(case):
    """The others are of ranks; single precision is enough for them."""
    labels, p, split = case
    a, b = (detection_scores(labels, q, split) for q in (p, p.square()))
    for name in ("roc_auc", "average_precision", "validation_roc_auc"):
        assert a[name] == b[name]
    single = detection_scores(labels, p.float(), split)
    assert single["threshold"] == a["threshold"] and single["macro_f1"] == a["macro_f1"]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -0.1, 1.1])
def test_probabilities_are_probabilities(case, value):
    labels, p, split = case
    p = p.index_fill(0, torch.tensor([5, 7]), value)
    with pytest.raises(ValueError, match="probability: expected numbers from 0 to 1, got 2 others"):
        detection_scores(labels, p, split)


def test_probabilities_are_one_a_node(case):
    labels, p, split = case
    for wrong in (p[1:], torch.stack([1 - p, p], 1)):
        with pytest.raises(ValueError, match=r"probability: expected shape \(\d+\), got"):
            detection_scores(labels, wrong, split)
    with pytest.raises(TypeError, match=r"probability: expected a torch\.Tensor, got ndarray"):
        detection_scores(labels, p.numpy(), split)


def test_parts_that_tell_nothing_or_too_much_are_refused(case):
    labels, p, split = case
    with pytest.raises(ValueError, match="split: expected every node once, got nodes that are in"):
        NodeSplit(split.train, split.validation, split.validation)
    with pytest.raises(TypeError, match=r"train: expected integers, got torch\.bool"):
        NodeSplit(labels > 0, split.validation, split.test)
    with pytest.raises(ValueError, match="test: expected one or more"):
        NodeSplit(split.train, split.validation, split.test[:0])
    normal = split.test[labels[split.test] == 0]
    unlabelled = torch.cat([split.test, (labels < 0).nonzero().flatten()])
    for test, kinds in ((normal, r"\[0\]"), (unlabelled, r"\[-1, 0, 1\]")):
        by_hand = NodeSplit(split.train, split.validation, test)
        with pytest.raises(ValueError, match=f"test: expected nodes of .* got labels {kinds}"):
            detection_scores(labels, p, by_hand)


def test_a_split_by_hand():
    """Six nodes: two to choose the threshold, three to be judged."""
    labels = torch.tensor([0, 1, 0, 1, 1, 0])
    p = torch.tensor([0.0, 0.62, 0.58, 0.9, 0.59, 0.3])
    split = NodeSplit(torch.tensor([0]), torch.tensor([1, 2]), torch.tensor([3, 4, 5]))
    found = detection_scores(labels, p, split)
    assert found["threshold"] == 0.6, "only 0.6 tells 0.62 from 0.58"
    assert found["roc_auc"] == 1 and found["macro_f1"] == pytest.approx((2 / 3 + 2 / 3) / 2)
