"""How anomaly detectors are judged: splits of the labelled nodes, and scores."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from etdyn.checks import bad, check_rows, check_tensor

__all__ = ["THRESHOLDS", "NodeSplit", "detection_scores", "split_nodes"]

THRESHOLDS = np.arange(1, 20) / 20  # the published ones (ET section 2.3)


@dataclass(frozen=True)
class NodeSplit:
    """Labelled nodes for training, for choosing, and for the test; int64 indices.

    Raises ValueError, TypeError for masks, parts without nodes, and nodes in two parts.
    """

    train: Tensor
    validation: Tensor
    test: Tensor

    def __post_init__(self) -> None:
        """Refuse what would let the test be seen."""
        for name, part in vars(self).items():
            check_rows(name, part, 2**63 - 1)
        together = torch.cat([self.train, self.validation, self.test])
        if len(torch.unique(together)) < len(together):
            raise bad("split", "every node once", "nodes that are in two parts")

    def check(self, labels: Tensor, *parts: str) -> None:
        """Raise `ValueError` unless these parts have anomalies, normal nodes, and no others."""
        for name in parts:
            part = check_rows(name, getattr(self, name), len(labels))
            kinds = torch.unique(labels[part.to(labels.device)]).tolist()
            if kinds != [0, 1]:
                raise bad(name, "nodes of labels 0 and 1, both", f"labels {kinds}")


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
        probability: `(node,)`, of being one, from 0 to 1.
        split: the threshold of Macro-F1 is the best of `THRESHOLDS` on its validation nodes.

    Returns:
        `macro_f1`, `roc_auc`, `average_precision` on the test nodes, `threshold`, and the
        validation nodes' `validation_roc_auc`.

    Raises:
        ValueError, TypeError: probabilities of another shape or outside 0 to 1, NaN among them; a
            part of the split without anomalies or with unlabelled nodes.
    """
    from sklearn.metrics import average_precision_score, f1_score, roc_auc_score  # noqa: PLC0415

    check_tensor("probability", probability, (len(labels),), probability)
    p, y = probability.numpy(force=True), labels.numpy(force=True)
    if out := int((~((p >= 0) & (p <= 1))).sum()):
        raise bad("probability", "numbers from 0 to 1", f"{out} others")
    split.check(labels, "validation", "test")
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
