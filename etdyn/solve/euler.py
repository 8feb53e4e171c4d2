"""The fixed-step explicit loop, step by step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from etdyn.systems import System

__all__ = ["iterate"]


def iterate(
    system: System,
    x: Tensor,
    step: float,
    steps: int,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the `steps` states after x of x <- x + step v(x) + sqrt(step) noise N(0, 1).

    One evaluation a step. Under the sphere dynamics every state is renormalised.
    """
    for _ in range(steps):
        x = x + step * system.velocity(0.0, x)
        if noise:
            kick = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            x = x + step**0.5 * noise * system.keep(kick)
        if system.dynamics == "sphere":
            x = system.prepare(x)
        yield x
