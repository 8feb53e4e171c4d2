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
    step: float | Tensor,
    steps: int,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the `steps` states after x of x <- x + step v(x) + sqrt(step) noise N(0, 1).

    One evaluation a step; no state but the last is kept. Under the sphere dynamics every state
    is renormalised: v is tangent, so that costs O(step^2) and order 1 stays.

    Args:
        system: what moves.
        x: `(batch, token, feature)`, prepared.
        step: of all samples, or of each, `(batch,)`: a map of step sizes is one batch.
        steps: how many.
        noise: standard deviation s.
        generator: of the noise.
    """
    h = step.reshape(-1, 1, 1) if isinstance(step, Tensor) else step
    for _ in range(steps):
        x = x + h * system.velocity(0.0, x)
        if noise:
            kick = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            x = x + h**0.5 * noise * system.keep(kick)
        if system.dynamics == "sphere":
            x = system.prepare(x)
        yield x
