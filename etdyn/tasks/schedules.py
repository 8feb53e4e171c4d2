"""Learning rates over their peak, step by step."""

from __future__ import annotations

import math

__all__ = ["warmup_cosine"]


def warmup_cosine(step: int, warm: float, total: int, end: float = 0.01) -> float:
    """Linear warm-up over `warm` of `total` steps, then a cosine from 1 to `end`."""
    if step < warm:
        return (step + 1) / (warm + 1)
    phase = (step - warm) / max(total - warm, 1)
    return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * phase))
