"""How anomaly detectors are judged: splits of the labelled nodes, and scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etdyn.checks import bad

__all__ = ["THRESHOLDS", "NodeSplit", "detection_scores", "split_nodes"]

THRESHOLDS = np.arange(1, 20) / 20  # the published ones (ET section 2.3)


@dataclass(frozen=True)
class NodeSplit:
    """Labelled nodes for training, for choosing, and for the test; int64 indices, sorted."""

    train: Tensor
    validation: Tensor
    test: Tensor


def split_nodes(labels: Tensor, share: float, seed: int = 0) -> NodeSplit:
    """A stratified random split of the labelled nodes, as published.

    Args:
        labels: int64 `(node,)`; nodes of label -1 are in no part.
        share: of the labelled nodes to train on; a third of the rest is for validation, two
            thirds for the test. Published are 0.01 and 0.4.
        seed: of the split.

    Raises:
        ValueError: a share so small or so large that a part has no node of some class.

    Source: Hoover et al. 2023, section 4; ET section 2.3.
    """
    from sklearn.model_selection import train_test_split  # noqa: PLC0415 (slow to import)

    if not 0 < share < 1:
        raise bad("share", "a number in (0, 1)", share)
    known = (labels >= 0).nonzero().flatten().numpy(force=True)
    kinds = labels.numpy(force=True)
    try:
        train, rest = train_test_split(
            known, train_size=share, random_state=seed, stratify=kinds[known]
        )
        validation, test = train_test_split(
            rest, train_size=1 / 3, random_state=seed, stratify=kinds[rest]
        )
    except ValueError as error:
        raise bad("share", "one that leaves every part some nodes", f"{share}: {error}") from error
    parts = [np.sort(part) for part in (train, validation, test)]
    for name, part in zip(("training", "validation", "test"), parts, strict=True):
        if missing := set(np.unique(kinds[known])) - set(kinds[part]):
            raise bad("share", f"{name} nodes of every class", f"{share}, none of {missing}")
    return NodeSplit(*(torch.from_numpy(part) for part in parts))


def detection_scores(labels: Tensor, probability: Tensor, split: NodeSplit) -> dict[str, float]:
    """How well a detector finds the anomalies of the test nodes.

    Args:
        labels: int64 `(node,)`, 1 for an anomaly.
        probability: `(node,)`, of being one.
        split: the threshold of Macro-F1 is the best of `THRESHOLDS` on its validation nodes.

    Returns:
        `macro_f1`, `roc_auc`, `average_precision` on the test nodes, `threshold`, and the
        validation nodes' `validation_roc_auc`.

    Raises:
        ValueError: NaN among the probabilities.
    """
    from sklearn.metrics import average_precision_score, f1_score, roc_auc_score  # noqa: PLC0415

    p, y = probability.numpy(force=True), labels.numpy(force=True)
    if not np.isfinite(p).all():
        raise bad("probability", "finite values", f"{int((~np.isfinite(p)).sum())} others")
    held, test = split.validation.numpy(), split.test.numpy()

    def macro_f1(part: np.ndarray, threshold: float) -> float:
        return float(f1_score(y[part], p[part] > threshold, average="macro"))

    threshold = max(THRESHOLDS, key=lambda at: macro_f1(held, at))
    return {
        "macro_f1": macro_f1(test, threshold),
        "roc_auc": float(roc_auc_score(y[test], p[test])),
        "average_precision": float(average_precision_score(y[test], p[test])),
        "threshold": float(threshold),
        "validation_roc_auc": float(roc_auc_score(y[held], p[held])),
    }
