"""Nested cross-validation: every test fold is read once, after all choices were made."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from etdyn import store
from etdyn.checks import bad, check_count
from etdyn.tasks.graph_batches import GraphData
from etdyn.tasks.graph_training import FitConfig, FitReport, accuracy, fit

__all__ = ["Fold", "cross_validate", "nested_folds", "published_protocol", "train_fold"]

Build = Callable[[GraphData], nn.Module]


@dataclass(frozen=True, eq=False)
class Fold:
    """Which graphs to train on, to choose the epoch by, and to report; int64 rows, sorted."""

    train: Tensor
    validation: Tensor
    test: Tensor


def nested_folds(labels: Tensor, folds: int = 10, seed: int = 0) -> list[Fold]:
    """Stratified outer folds; a tenth of each training part, stratified, is for validation.

    Every graph is in exactly one test fold.

    Args:
        labels: int64 `(graph,)`.
        folds: how many, at most the size of the smallest class.
        seed: of both splits.

    Raises:
        ValueError: a class with fewer graphs than folds; fewer graphs than give every class a
            place in validation.
    """
    from sklearn.model_selection import StratifiedKFold, train_test_split  # noqa: PLC0415

    check_count("folds", folds, least=2)
    rows, y = np.arange(len(labels)), labels.numpy()
    counts = np.unique(y, return_counts=True)[1]
    if folds > counts.min():
        raise bad("folds", f"at most {counts.min()}, the graphs of the smallest class", folds)
    rest = len(y) - math.ceil(len(y) / folds)
    if rest <= 10 * (len(counts) - 1):
        wanted = f"over {10 * (len(counts) - 1)} outside a fold, a tenth of which holds each class"
        raise bad("labels", wanted, rest)
    found = []
    outer = StratifiedKFold(folds, shuffle=True, random_state=seed)
    for number, (rest, test) in enumerate(outer.split(rows, y)):
        train, validation = train_test_split(
            rest, test_size=0.1, random_state=seed + number, stratify=y[rest]
        )
        found.append(Fold(*(torch.from_numpy(np.sort(part)) for part in (train, validation, test))))
    return found


def cross_validate(
    build: Build,
    data: GraphData,
    config: FitConfig,
    *,
    folds: int = 10,
    seed: int = 0,
    model: dict[str, Any] | None = None,
    path: str | Path | None = None,
) -> xr.Dataset:
    """Nested cross-validation of one model.

    In each outer fold features are scaled by the training graphs, a fresh model is trained on
    them, the epoch is chosen by the validation graphs, and the test graphs are scored once.

    Args:
        build: makes a model for the data; what it draws is fixed by seed and fold.
        data: the graphs.
        config: of the training.
        folds, seed: see `nested_folds`.
        model: what `build` makes, as JSON can hold it, for the record.
        path: of a zarr store that is written after each fold; one that is there is continued
            where it is of the same data, model and settings. Needs `model`.

    Returns:
        Dataset over `fold`: test_accuracy, train_accuracy, the fields of `FitReport`, and
        parameters, the size of the model.

    Raises:
        ValueError: as `nested_folds`; a store at `path` of something else; `path` without `model`.
    """
    if path is not None and not model:
        raise bad("model", "a record of what build makes, by which path is continued", model)
    path = None if path is None else Path(path)
    record = {
        "data": data.name, "checksum": data.checksum(),
        "positions": [data.encoding, data.positions], "model": model or {}, "fit": asdict(config),
        "folds": folds, "seed": seed,
    }  # fmt: skip
    attributes = store.provenance("etdyn.cross_validation/1", record, torch.empty(0))
    done = _resume(path, attributes)
    for number, fold in enumerate(nested_folds(data.labels, folds, seed)):
        if number < len(done):
            continue
        done.append(_run_fold(build, data, config, fold, seed + 1000 * number))
        if path is not None:
            store.save(_table(done, attributes), path)
    return _table(done, attributes)


def train_fold(
    build: Build, data: GraphData, config: FitConfig, fold: Fold, seed: int = 0
) -> tuple[nn.Module, GraphData, FitReport]:
    """The model of one fold, the data scaled for it, and how training went.

    With the seed of `cross_validate` and its first fold it is the model that was scored there.
    """
    scaled = data.standardised(fold.train)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(scaled)
    report = fit(
        model, scaled, train=fold.train, validation=fold.validation, config=config, seed=seed
    )
    return model, scaled, report


def _run_fold(
    build: Build, data: GraphData, config: FitConfig, fold: Fold, seed: int
) -> dict[str, float]:
    model, scaled, report = train_fold(build, data, config, fold, seed)
    return {
        "test_accuracy": accuracy(model, scaled, fold.test),
        "train_accuracy": accuracy(model, scaled, fold.train),
        **asdict(report),
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _table(rows: list[dict[str, float]], attributes: dict[str, Any]) -> xr.Dataset:
    columns = {name: ("fold", [row[name] for row in rows]) for name in rows[0]}
    return xr.Dataset(columns, {"fold": np.arange(len(rows))}, attributes)


def _resume(path: Path | None, attributes: dict[str, Any]) -> list[dict[str, float]]:
    """The folds that a store holds, if it is there."""
    if path is None or not path.exists():
        return []
    found = store.load(path)
    wanted, got = (json.loads(a["etdyn_config"]) for a in (attributes, found.attrs))
    if other := {name: got.get(name) for name in wanted if got.get(name) != wanted[name]}:
        raise bad("path", f"a run of { {name: wanted[name] for name in other} }", other)
    return [
        {str(name): column.values[row].item() for name, column in found.data_vars.items()}
        for row in range(found.sizes["fold"])
    ]


def published_protocol(build: Build, data: GraphData, config: FitConfig, seed: int = 0) -> float:
    """WARNING: not held out. Trains on all graphs and scores the same graphs.

    What the published notebooks do with the TU sets (ET section 2.4, defect 13); here only to
    show how far it inflates the accuracy. There is no early stopping.

    Returns:
        The share of training graphs that are classified correctly.
    """
    warnings.warn("accuracy on the training graphs: not held out", UserWarning, stacklevel=2)
    rows = torch.arange(len(data))
    scaled = data.standardised(rows)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build(scaled)
    fit(model, scaled, train=rows, validation=None, config=config, seed=seed)
    return accuracy(model, scaled, rows)
