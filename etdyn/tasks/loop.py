"""What training loops share: random numbers, learning rates, a running average."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import nn

__all__ = ["follow", "generator_of", "warmup_cosine"]


def generator_of(seed: int, number: int) -> torch.Generator:
    """Random numbers of one step or epoch, from its number alone, so that no state is kept."""
    mixed = np.random.SeedSequence([seed, number]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(mixed[0] >> 1))


@torch.no_grad()
def follow(average: nn.Module, model: nn.Module, decay: float, done: int) -> None:
    """Move the running average of a model's weights after `done` steps; buffers are copied.

    A short memory first, so that the average forgets the initial weights.
    """
    decay = min(decay, done / (done + 9))
    for mean, now in zip(average.parameters(), model.parameters(), strict=True):
        mean.lerp_(now, 1 - decay)
    for held, new in zip(average.buffers(), model.buffers(), strict=True):
        held.copy_(new)


def warmup_cosine(step: int, warm: float, total: int, end: float = 0.01) -> float:
    """Linear warm-up over `warm` of `total` steps, then a cosine from 1 to `end`."""
    if step < warm:
        return (step + 1) / (warm + 1)
    phase = (step - warm) / max(total - warm, 1)
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * phase))
