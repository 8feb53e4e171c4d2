"""Training of graph classifiers: one loop for all of them, every random number from (seed, epoch).

The loop is given the rows to train on and the rows to choose the epoch by, and no others.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from etdyn.checks import bad, check_count, check_positive
from etdyn.tasks.graph_batches import GraphData
from etdyn.tasks.loop import follow, generator_of, warmup_cosine
from etdyn.tasks.memory import saved_bytes

__all__ = ["FitConfig", "FitReport", "accuracy", "fit", "predict"]


@dataclass(frozen=True)
class FitConfig:
    """How a graph classifier is trained; the same for every model."""

    epochs: int = 80
    """At most."""
    patience: int = 30
    """Epochs without a better validation after which training stops."""
    batch: int = 64
    """Graphs an optimiser step."""
    lr: float = 2e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.05
    """Of AdamW."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly; then a cosine to 1 %."""
    smoothing: float = 0.05
    """Of the labels."""
    clip: float = 1.0
    """Global norm to which gradients are clipped."""
    average: float = 0.98
    """Decay of the running average of the weights, which is the model that is kept."""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "batch"):
            check_count(name, getattr(self, name))
        for name in ("lr", "clip"):
            check_positive(name, getattr(self, name))
        check_positive("weight_decay", self.weight_decay, zero=True)
        for name in ("warmup", "smoothing", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise bad(name, "a share in [0, 1)", getattr(self, name))


@dataclass(frozen=True)
class FitReport:
    """How a training went.

    Attributes:
        validation_accuracy: by which the epoch was chosen; NaN without validation.
        best_epoch, epochs: the one that was chosen, and how many were run; the first is 1.
        seconds: wall time.
        saved_bytes: what the first step held in memory for its backward pass.
    """

    validation_accuracy: float
    best_epoch: int
    epochs: int
    seconds: float
    saved_bytes: int


def fit(
    model: nn.Module,
    data: GraphData,
    *,
    train: Tensor,
    validation: Tensor | None,
    config: FitConfig,
    seed: int = 0,
) -> FitReport:
    """Train `model` in place; it ends with the averaged weights of the best epoch.

    The best epoch has the highest validation accuracy and, among equal ones, the lowest
    cross-entropy. The same seed gives the same bits on the same machine.

    Args:
        model: `model(batch, generator)` gives logits `(graph, class)`.
        data: graphs, of which only these rows are read.
        train, validation: int64 rows. Without validation there is no choice: the last epoch is
            kept.
        config: the recipe.
        seed: of batches, dropout, and what the model draws from its generator.

    Raises:
        ValueError: no rows, or rows in both parts.
    """
    began = time.perf_counter()
    _check_rows(train, validation)
    run = _Run(model, config, math.ceil(len(train) / config.batch))
    best, kept, best_epoch, epoch = (-1.0, -math.inf), model.state_dict(), 0, 0
    for epoch in range(1, config.epochs + 1):
        run.epoch(data, train, generator_of(seed, epoch))
        score = (0.0, epoch) if validation is None else _score(run.average, data, validation)
        if score > best:
            best, best_epoch, kept = score, epoch, copy.deepcopy(run.average.state_dict())
        if epoch - best_epoch >= config.patience:
            break
    model.load_state_dict(kept)
    model.eval()
    seconds = time.perf_counter() - began
    chosen = math.nan if validation is None else best[0]
    return FitReport(chosen, best_epoch, epoch, seconds, run.saved_bytes)


@torch.no_grad()
def predict(model: nn.Module, data: GraphData, rows: Tensor, batch: int = 256) -> Tensor:
    """Logits `(row, class)`, in evaluation mode, without noise."""
    model.eval()
    return torch.cat([model(data.batch(part)) for part in torch.split(rows, batch)])


def accuracy(model: nn.Module, data: GraphData, rows: Tensor) -> float:
    """The share of these graphs whose class has the largest logit."""
    right = predict(model, data, rows).argmax(1) == data.labels[rows]
    return float(right.double().mean())


class _Run:
    """Model, running average and optimiser, and how far they are."""

    def __init__(self, model: nn.Module, config: FitConfig, batches: int) -> None:
        self.model, self.config, self.batches = model, config, batches
        self.average = copy.deepcopy(model)
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=config.lr, weight_decay=config.weight_decay
        )
        self.done = self.saved_bytes = 0

    def epoch(self, data: GraphData, rows: Tensor, generator: torch.Generator) -> None:
        """Once through the rows, in batches of nearly equal size."""
        self.model.train()
        shuffled = rows[torch.randperm(len(rows), generator=generator)]
        with torch.random.fork_rng():  # dropout draws from torch's own state
            torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
            for part in shuffled.tensor_split(self.batches):
                self._advance(data, part, generator)

    def _advance(self, data: GraphData, rows: Tensor, generator: torch.Generator) -> None:
        config, batch = self.config, data.batch(rows)
        with saved_bytes(measure=not self.done) as saved:
            logits = self.model(batch, generator)
            loss = cross_entropy(logits, batch.labels, label_smoothing=config.smoothing)
        self.saved_bytes = self.saved_bytes or saved.total
        total = self.batches * config.epochs
        for group in self.optimiser.param_groups:
            group["lr"] = config.lr * warmup_cosine(self.done, config.warmup * total, total)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        self.optimiser.step()
        self.done += 1
        follow(self.average, self.model, config.average, self.done)


def _score(model: nn.Module, data: GraphData, rows: Tensor) -> tuple[float, float]:
    """Accuracy and minus the cross-entropy: the larger the better."""
    logits, labels = predict(model, data, rows), data.labels[rows]
    right = float((logits.argmax(1) == labels).double().mean())
    return right, -float(cross_entropy(logits, labels))


def _check_rows(train: Tensor, validation: Tensor | None) -> None:
    for name, rows in (("train", train), ("validation", validation)):
        if rows is not None and not len(rows):
            raise bad(name, "at least one graph", "none")
    if validation is None:
        return
    both = len(np.intersect1d(train.numpy(), validation.numpy()))
    if both:
        raise bad("validation", "graphs that are not trained on", f"{both} that are")
