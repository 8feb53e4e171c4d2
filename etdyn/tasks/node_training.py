"""Training of node classifiers: on the whole graph, or on sampled neighbourhoods."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from etdyn.checks import bad, check_count, check_positive
from etdyn.tasks.detection import NodeSplit
from etdyn.tasks.loop import warmup_cosine
from etdyn.tasks.memory import saved_bytes
from etdyn.tasks.node_data import NodeData, sample_neighbourhood

__all__ = ["Fit", "NodeRecipe", "anomaly_probability", "fit_nodes"]


@dataclass(frozen=True)
class NodeRecipe:
    """How a node classifier is trained."""

    epochs: int = 200
    """Passes over the training nodes, at most."""
    patience: int = 40
    """Epochs without a better validation, after which training stops."""
    lr: float = 1e-2
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.1
    """Of AdamW."""
    warmup: float = 0.1
    """Share of the steps in which the learning rate rises linearly; then a cosine to 1 %."""
    clip: float = 1.0
    """Global norm to which gradients are clipped."""
    average: float = 0.95
    """Decay of the running average of the weights, which is the model that is validated."""
    evaluate_every: int = 5
    """Epochs between looks at the validation nodes, which choose the model."""
    edge_dropout: float = 0.6
    """Share of the edges, but for self-loops, that a step on the whole graph leaves out, drawn
    anew each time (Rong et al. 2020, DropEdge)."""
    batch: int | None = None
    """Training nodes a step, each with a sampled neighbourhood; None trains on the whole graph."""
    fanout: int = 16
    """Neighbours drawn of a node and relation, a hop."""
    hops: int = 2
    """How far neighbourhoods reach."""

    def __post_init__(self) -> None:
        for name in ("epochs", "patience", "evaluate_every", "fanout", "hops"):
            check_count(name, getattr(self, name))
        for name in ("lr", "clip"):
            check_positive(name, getattr(self, name))
        check_positive("weight_decay", self.weight_decay, zero=True)
        if self.batch is not None:
            check_count("batch", self.batch)
        for name in ("warmup", "average", "edge_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise bad(name, "a share in [0, 1)", getattr(self, name))


@dataclass(frozen=True)
class Fit:
    """A trained node classifier.

    Attributes:
        model: at the epoch with the best validation ROC-AUC.
        history: of every validation, `epoch`, `loss` and `validation_roc_auc`.
        seconds: wall time of the training.
        saved_bytes: what the first step held in memory for its backward pass.
    """

    model: nn.Module
    history: list[dict[str, float]]
    seconds: float
    saved_bytes: int


@torch.no_grad()
def anomaly_probability(model: nn.Module, data: NodeData) -> Tensor:
    """The probability of class 1 for every node, `(node,)`, from the whole graph, no dropout."""
    model.eval()
    probability: Tensor = model(data.features, data.graphs).softmax(-1)[:, 1]
    return probability


def fit_nodes(
    model: nn.Module, data: NodeData, split: NodeSplit, recipe: NodeRecipe, seed: int = 0
) -> Fit:
    """Train a node classifier in place, with class-weighted cross entropy.

    An anomaly weighs as much more as there are fewer of them in training. The model at the best
    validation ROC-AUC is kept; test nodes are never looked at. The global random state is left
    as it was.

    Args:
        model: `model(features, graphs)` gives logits `(node, 2)`.
        data: on the device and in the dtype of the model.
        split, recipe: see there.
        seed: of batches, neighbourhoods, and what is dropped.

    Raises:
        ValueError, TypeError: data that `prepare_nodes` did not make; training or validation
            nodes without anomalies or with unlabelled ones.
    """
    if not isinstance(data, NodeData):
        raise TypeError(f"data: expected NodeData, see prepare_nodes, got {type(data).__name__}")
    split.check(data.labels, "train", "validation")
    began = time.perf_counter()
    run = _Run(model, data, split, recipe)
    best, chosen, history = -math.inf, 0, []
    kept = copy.deepcopy(model.state_dict())
    with torch.random.fork_rng(range(torch.cuda.device_count())):  # all that a seed seeds
        torch.manual_seed(seed)
        for epoch in range(1, recipe.epochs + 1):
            loss = run.epoch()
            if epoch % recipe.evaluate_every and epoch != recipe.epochs:
                continue
            score = _validation(run.average, data, split)
            history.append({"epoch": epoch, "loss": loss, "validation_roc_auc": score})
            if score > best:
                best, chosen = score, epoch
                kept = copy.deepcopy(run.average.module.state_dict())
            if epoch - chosen >= recipe.patience:
                break
    model.load_state_dict(kept)
    return Fit(model.eval(), history, time.perf_counter() - began, run.saved)


class _Run:
    """Model, loss, optimiser and learning rate of one training."""

    def __init__(
        self, model: nn.Module, data: NodeData, split: NodeSplit, recipe: NodeRecipe
    ) -> None:
        self.model, self.data, self.recipe = model, data, recipe
        self.train = split.train.to(data.labels.device)
        counts = data.labels[self.train].bincount(minlength=2).to(data.features)
        weight = torch.stack([counts.new_ones(()), counts[0] / counts[1]])
        self.loss = nn.CrossEntropyLoss(weight)
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay
        )
        steps = 1 if recipe.batch is None else math.ceil(len(self.train) / recipe.batch)
        total = steps * recipe.epochs
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimiser, lambda k: warmup_cosine(k, recipe.warmup * total, total)
        )
        decay = get_ema_multi_avg_fn(recipe.average)  # type: ignore[no-untyped-call]
        self.average = AveragedModel(model, multi_avg_fn=decay)
        self.saved = 0

    def batches(self) -> Iterator[tuple[NodeData, Tensor]]:
        """The graph, or neighbourhoods in random order, with the rows that are trained on."""
        recipe, data = self.recipe, self.data
        if recipe.batch is None:
            yield data.thinned(recipe.edge_dropout), self.train
            return
        generator = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        order = self.train[torch.randperm(len(self.train)).to(self.train.device)]
        for seeds in torch.split(order, recipe.batch):
            nodes = sample_neighbourhood(data.graphs, seeds, recipe.hops, recipe.fanout, generator)
            rows = torch.arange(len(seeds), device=seeds.device)
            yield data.induced(nodes), rows

    def epoch(self) -> float:
        """One pass over the training nodes; the mean loss of its steps."""
        self.model.train()
        losses = []
        for part, rows in self.batches():
            losses.append(self.step(part, rows))
        return float(torch.stack(losses).mean())

    def step(self, part: NodeData, rows: Tensor) -> Tensor:
        """One optimiser step."""
        with saved_bytes(measure=not self.saved) as saved:
            loss: Tensor = self.loss(
                self.model(part.features, part.graphs)[rows], part.labels[rows]
            )
        self.saved = self.saved or saved.total
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        self.optimiser.step()
        self.schedule.step()
        self.average.update_parameters(self.model)
        return loss.detach()


def _validation(model: nn.Module, data: NodeData, split: NodeSplit) -> float:
    from sklearn.metrics import roc_auc_score  # noqa: PLC0415 (slow to import)

    p = anomaly_probability(model, data).cpu()[split.validation]
    if not bool(p.isfinite().all()):
        return -math.inf
    return float(roc_auc_score(data.labels.cpu()[split.validation], p))
