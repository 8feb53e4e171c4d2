"""When a trajectory has arrived: a condition on the activations, never on dx/dt.

The published flow has no fixed point in x (A-F1), so "the velocity vanishes" never comes true.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from etdyn.checks import check_choice, check_positive
from etdyn.systems import System

__all__ = ["Stop"]

QUANTITIES = ("residual", "dissipation", "activation_change")


@dataclass(frozen=True)
class Stop:
    """Stop where a measure of distance from equilibrium has fallen to a threshold.

    Args:
        residual: the threshold, > 0, on the quantity.
        quantity: "residual", |P grad_g E|; "dissipation", -d(energy)/dt; or
            "activation_change", |dg/dt| over tokens and features.
        every_sample: stop when every sample has arrived, or (False) when the first has.
    """

    residual: float = 1e-8
    quantity: str = "residual"
    every_sample: bool = True

    def __post_init__(self) -> None:
        check_positive("residual", self.residual)
        check_choice("quantity", self.quantity, QUANTITIES)

    def arrived(self, system: System, x: Tensor) -> Tensor:
        """Which samples have arrived, bool `(batch,)`. One evaluation.

        A state so large that its variance overflows has not: its g, and so its force, are zero.
        """
        if self.quantity == "activation_change":
            value = system.activation_velocity(x).square().sum((1, 2)).sqrt()
        else:
            value = getattr(system, self.quantity)(x)
        return (value <= self.residual) & torch.isfinite(x.square().sum((1, 2)))

    def met(self, arrived: Tensor) -> bool:
        """Whether the batch stops."""
        return bool(arrived.all() if self.every_sample else arrived.any())
