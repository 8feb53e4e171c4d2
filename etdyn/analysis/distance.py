"""How far apart two configurations are, where it matters: in their activations."""

from __future__ import annotations

import torch
from torch import Tensor

from etdyn.systems import System

__all__ = ["activation_distance"]


def activation_distance(system: System, x: Tensor, reference: Tensor) -> Tensor:
    """Distance of two states in g, per token, in units of the sphere that g lives on.

        d = |g(x) - g(reference)| / (gamma sqrt(D)),    0 <= d <= 2,

    or in units of the `radius` of another Lagrangian.
    States that differ by a token's mean or (up to eps) its length have distance zero, because the
    published flow drifts along these directions for ever (ET section 1.5).

    Args:
        system: whose activation is meant.
        x, reference: `(batch, token, feature)`.

    Returns:
        `(batch, token)`.
    """
    gap = torch.linalg.vector_norm(system.activation(x) - system.activation(reference), dim=-1)
    return torch.div(gap, system.lagrangian.radius)
