"""From a configuration to a trained model: what the training command runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from etdyn.checks import bad
from etdyn.datasets import ImageSet, load_images
from etdyn.tasks.checkpoints import read_record, save_model
from etdyn.tasks.images import ImageCompletion
from etdyn.tasks.training import TrainConfig, completion_error, train
from etdyn.transformer import EnergyTransformer

__all__ = ["ModelConfig", "TrainCommand", "build_model", "parse_duration"]


@dataclass(frozen=True)
class ModelConfig:
    """An image-completion model; the defaults are the digits model in `data/`."""

    patch: int = 2
    """Side of a patch in pixels."""
    dim: int = 64
    """Features of a token."""
    heads: int = 4
    """Attention heads."""
    head_dim: int = 16
    """Features of a head."""
    memories: int = 256
    """Memories of the Hopfield network."""
    steps: int = 12
    """Euler steps of the published model."""
    step: float = 0.1
    """Size of a step."""
    dynamics: str = "et"
    """Law of motion: et, leaky or sphere."""
    hopfield: str = "relu"
    """Nonlinearity of the memories: relu, power or softmax."""
    self_attention: bool = False
    """Whether a token attends to itself."""
    eps: float = 1e-5
    """In the layer norm."""


def build_model(config: ModelConfig, images: ImageSet, seed: int) -> ImageCompletion:
    """A fresh model for these images, its weights drawn from `seed`, in float32 on the CPU.

    Pixels are normalised by the mean and deviation of all training pixels, so that an error of 1
    is the error of the mean grey. The global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        system = EnergyTransformer(
            config.dim, config.heads, config.head_dim, config.memories, config.dynamics,
            self_attention=config.self_attention, hopfield=config.hopfield, eps=config.eps,
        )  # fmt: skip
        return ImageCompletion(
            system, images.shape, config.patch, steps=config.steps, step=config.step,
            pixel_mean=float(images.train.mean()), pixel_std=float(images.train.std()),
        )  # fmt: skip


def parse_duration(text: str) -> float:
    """A duration such as "90s", "3min" or "1h" in seconds.

    Raises:
        ValueError: anything else.
    """
    for unit, factor in (("min", 60.0), ("s", 1.0), ("h", 3600.0)):
        number = text.removesuffix(unit)
        if number != text and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * factor
    raise bad("budget", "a duration such as 90s, 3min or 1h, or full", repr(text))


@dataclass(frozen=True)
class TrainCommand:
    """Train an image-completion model and say how well it completes held-out images."""

    folder: Path = Path("runs/train/digits")
    """Where the model, its configuration and the state to resume from go."""
    data: str = "digits"
    """`digits`, or a path: IDX files, CIFAR-10 binaries, images, a tar, an npz."""
    size: int = 32
    """Side to which images of folders and tars are brought."""
    channels: int = 3
    """Colour channels of images of folders and tars."""
    device: str = "cpu"
    """torch device."""
    threads: int = 1
    """Threads of torch; a run repeats bit by bit only with as many as before."""
    resume: bool = False
    """Continue the run that stands in the folder."""
    model: ModelConfig = field(default_factory=ModelConfig)
    """The model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The recipe."""

    def run(self, budget: float | None = None) -> ImageCompletion:
        """Train, print the held-out error, and return the best model.

        budget: seconds, see `train`.
        """
        torch.set_num_threads(self.threads)
        images = load_images(self.data, self.size, self.channels)
        fresh = build_model(self.model, images, self.train.seed).to(self.device)
        best = train(
            fresh, images, self.train, self.folder, budget=budget, resume=self.resume
        ).eval()
        error = completion_error(best, images.test.to(self.device))
        record = read_record(self.folder / "best") | {"held_out_error": error}
        save_model(best, self.folder / "best", record)
        print(f"held-out masked-patch error {error:.4f} (variance of the training pixels = 1)")
        print(f"model: {self.folder / 'best.safetensors'}")
        return best
