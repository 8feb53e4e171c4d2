"""Training of image completion: one loop, every random number from (seed, iteration).

Because no random state is carried along, a run that is resumed ends bit-identical to one that
was never interrupted.
"""

from __future__ import annotations

import copy
import math
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from etdyn.checks import bad, check_count, check_positive
from etdyn.datasets import ImageSet
from etdyn.tasks.checkpoints import load_tensors, save_model, save_tensors
from etdyn.tasks.images import ImageCompletion, draw_masks, masked_error
from etdyn.tasks.loop import follow, generator_of, warmup_cosine

DRAWS = 4  # of masks, with seeds 0, 1, ..., by which held-out errors are measured

__all__ = ["DRAWS", "TrainConfig", "completion_error", "evaluation_masks", "train"]


@dataclass(frozen=True)
class TrainConfig:
    """How a model is trained; the defaults made the digits model in `data/`."""

    iterations: int = 8_000
    """Optimiser steps."""
    batch: int = 64
    """Images a step, drawn with replacement."""
    lr: float = 3e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.05
    """Of AdamW."""
    warmup: float = 0.02
    """Share of the iterations in which the learning rate rises linearly; then a cosine to 1 %."""
    clip: float = 1.0
    """Global norm to which gradients are clipped."""
    scored: float = 0.5
    """Share of the patches in the loss."""
    open_share: float = 0.1
    """Share of the scored patches that stay visible."""
    average: float = 0.995
    """Decay of the running average of the weights, which is the model that is saved."""
    validation: int = 100
    """Training images set aside to choose the best checkpoint."""
    evaluate_every: int = 500
    """Iterations between validations and checkpoints."""
    seed: int = 0
    """Of batches and masks."""

    def __post_init__(self) -> None:
        for name in ("iterations", "batch", "validation", "evaluate_every"):
            check_count(name, getattr(self, name))
        for name in ("lr", "clip"):
            check_positive(name, getattr(self, name))
        check_positive("weight_decay", self.weight_decay, zero=True)
        for name in ("warmup", "average"):
            if not 0 <= getattr(self, name) < 1:
                raise bad(name, "a share in [0, 1)", getattr(self, name))


def evaluation_masks(n: int, patches: int, seed: int = 0, hidden: float = 0.5) -> Tensor:
    """Masks for scoring, bool `(n, patches)`: the hidden share is replaced and scored whole."""
    return draw_masks(n, patches, hidden, 0.0, torch.Generator().manual_seed(seed))[0]


@torch.no_grad()
def completion_error(model: ImageCompletion, images: Tensor, draws: int = DRAWS) -> float:
    """Mean squared error over masked patches, in units of the training pixels' variance.

    Half of the patches are hidden and scored, with masks of seeds 0 to draws - 1.
    """
    target = model.normalised_patches(images)
    errors = []
    for seed in range(draws):
        mask = evaluation_masks(len(images), model.patches, seed).to(images.device)
        errors.append(masked_error(model(images, mask), target, mask).mean())
    return float(torch.stack(errors).mean())


def train(
    model: ImageCompletion,
    images: ImageSet,
    config: TrainConfig,
    folder: Path,
    *,
    budget: float | None = None,
    resume: bool = False,
    progress: bool = True,
) -> ImageCompletion:
    """Train `model` in place and return the best averaged model.

    Writes into `folder`: `best` and `last` models as safetensors with their configuration in
    JSON, and `resume.safetensors`.

    Args:
        model: on its device and in its dtype; images are moved to it batch by batch.
        images: of which `train` is used, less the validation images.
        config: the recipe.
        folder: made where missing.
        budget: seconds; the number of iterations is then chosen from the measured speed, at most
            the recipe's, and recorded in the configuration.
        resume: continue from `resume.safetensors`; the end is bit-identical to an
            uninterrupted run.
        progress: show a bar.

    Raises:
        ValueError: a run already stands in `folder` and `resume` is off, or the run there has
            another configuration; more validation images than training images.
    """
    state_file = folder / "resume.safetensors"
    if len(images.train) <= config.validation:
        raise bad("validation", f"fewer than {len(images.train)} images", config.validation)
    if state_file.exists() != resume:
        raise bad("folder", "a run to resume in it" if resume else "none, or resume", folder)
    like = model.pixel_mean
    order = torch.randperm(len(images.train), generator=generator_of(config.seed, 0))
    held = images.train[order[: config.validation]].to(like)
    fit = images.train[order[config.validation :]]
    run = _Run(model, config, images.name)
    if resume:
        run.restore(state_file)
    elif budget is not None:
        speed = _seconds_per_iteration(model, fit, config)
        run.config = replace(config, iterations=max(1, min(config.iterations, int(budget / speed))))
    total = run.config.iterations
    bar = tqdm(total=total, initial=run.done, disable=not progress, desc="training", unit="it")
    while run.done < total:
        loss = run.advance(fit)
        bar.update()
        if run.done % config.evaluate_every == 0 or run.done == total:
            error = completion_error(run.average, held, draws=1)
            bar.set_postfix(loss=f"{loss:.4f}", validation=f"{error:.4f}")
            record = {
                "train": asdict(run.config), "iteration": run.done,
                "validation_error": error, "data": images.name,
            }  # fmt: skip
            if error < run.best:
                run.best = error
                save_model(run.average, folder / "best", record)
            save_model(run.average, folder / "last", record)
            run.store(state_file)
    bar.close()
    best = copy.deepcopy(run.average)
    best.load_state_dict(load_tensors(folder / "best.safetensors")[0])
    return best


class _Run:
    """Model, running average and optimiser, and how far they are."""

    def __init__(self, model: ImageCompletion, config: TrainConfig, data: str) -> None:
        self.model, self.config = model, config
        # what a resumed run must agree with
        self.identity = {"recipe": asdict(config), "model": model.config, "data": data}
        self.average = copy.deepcopy(model)
        self.optimiser = torch.optim.AdamW(
            model.parameters(), lr=config.lr, betas=(0.9, 0.99), weight_decay=config.weight_decay
        )
        self.done, self.best = 0, math.inf

    def advance(self, images: Tensor) -> float:
        """One optimiser step."""
        config, model = self.config, self.model
        loss = _loss(model, images, config, self.done)
        warm = config.warmup * config.iterations
        for group in self.optimiser.param_groups:
            group["lr"] = config.lr * warmup_cosine(self.done, warm, config.iterations)
        self.optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        self.optimiser.step()
        self.done += 1
        follow(self.average, model, config.average, self.done)
        return float(loss.detach())

    def store(self, path: Path) -> None:
        """Everything that `restore` needs."""
        tensors = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        tensors |= {f"average.{k}": v for k, v in self.average.state_dict().items()}
        for index, values in self.optimiser.state_dict()["state"].items():
            tensors |= {f"optimiser.{index}.{k}": torch.as_tensor(v) for k, v in values.items()}
        record = {"iterations": self.config.iterations, "iteration": self.done, "best": self.best}
        save_tensors(tensors, path, self.identity | record)

    def restore(self, path: Path) -> None:
        """Take up a stored run."""
        tensors, record = load_tensors(path)
        for name, mine in self.identity.items():
            if record.get(name) != mine:
                expected = f"that of the run in {path.parent}: {record.get(name)}"
                raise bad("resume: " + name, expected, mine)
        # a budget may have shortened the stored run
        self.config = replace(self.config, iterations=record["iterations"])
        self.done, self.best = record["iteration"], record["best"]
        moments: dict[int, dict[str, Tensor]] = {}
        parts: dict[str, dict[str, Tensor]] = {"model": {}, "average": {}}
        for name, tensor in tensors.items():
            head, rest = name.split(".", 1)
            if head == "optimiser":
                index, key = rest.split(".")
                moments.setdefault(int(index), {})[key] = tensor
            else:
                parts[head][rest] = tensor
        self.model.load_state_dict(parts["model"])
        self.average.load_state_dict(parts["average"])
        groups = self.optimiser.state_dict()["param_groups"]
        self.optimiser.load_state_dict({"state": moments, "param_groups": groups})


def _loss(model: ImageCompletion, images: Tensor, config: TrainConfig, iteration: int) -> Tensor:
    generator = generator_of(config.seed, iteration + 1)
    picked = torch.randint(len(images), (config.batch,), generator=generator)
    batch = images[picked].to(model.pixel_mean)
    masks = draw_masks(config.batch, model.patches, config.scored, config.open_share, generator)
    replaced, scored = (m.to(batch.device) for m in masks)
    predicted = model(batch, replaced)
    return masked_error(predicted, model.normalised_patches(batch), scored).mean()


def _seconds_per_iteration(model: ImageCompletion, images: Tensor, config: TrainConfig) -> float:
    """Median time of an iteration, measured on a copy."""
    trial = _Run(copy.deepcopy(model), config, "trial")
    times = []
    for _ in range(13):
        began = time.perf_counter()
        trial.advance(images)
        times.append(time.perf_counter() - began)
    return float(np.median(times[3:]))
