"""One step of a system at a time, with a step size for every sample: what steppers share.

A `Stepper` moves each sample of a batch by its own step and reports what that took. `descent`
holds the energy-guarded step, `implicit` and `discrete_gradient` the implicit ones, `langevin`
the noisy one; plain Euler steps are `iterate`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from etdyn.checks import bad, check_tensor
from etdyn.solve.inner import InnerMethod
from etdyn.solve.rows import Rows
from etdyn.systems import System

__all__ = ["StepReport", "Stepper"]


@dataclass(frozen=True)
class StepReport(Rows):
    """What one step did, per sample.

    Attributes:
        x: the new states `(batch, token, feature)`.
        taken: the steps really taken, `(batch,)` in the dtype of x; less than asked for where a
            step had to shrink, 0 where it failed.
        evaluations: int64 `(batch,)`.
        shrunk: bool `(batch,)`.
        failed: bool `(batch,)`: no step was possible, and x is where it was.
        inner_residual: `(batch,)`, relative, of an implicit equation; 0 for explicit steppers.
        inner_method: int8 `(batch,)`, values of `InnerMethod`.
    """

    x: Tensor
    taken: Tensor
    evaluations: Tensor
    shrunk: Tensor
    failed: Tensor
    inner_residual: Tensor
    inner_method: Tensor

    @classmethod
    def explicit(cls, x: Tensor, h: Tensor, taken: Tensor, evaluations: Tensor) -> StepReport:
        """Of a step without an inner equation; taken is 0 where it failed."""
        return cls(
            x=x,
            taken=taken,
            evaluations=evaluations,
            shrunk=(taken > 0) & (taken < h),
            failed=taken == 0,
            inner_residual=torch.zeros_like(h),
            inner_method=torch.full_like(h, InnerMethod.EXPLICIT, dtype=torch.int8),
        )


class Stepper(ABC):
    """A way to move a system by one step; a sample's result does not depend on its neighbours."""

    name: str

    @abstractmethod
    def step(self, system: System, x: Tensor, h: Tensor) -> StepReport:
        """Move every sample once.

        Args:
            system: what moves.
            x: `(batch, token, feature)`, prepared (`system.prepare`).
            h: `(batch,)`, steps > 0 in the dtype of x.

        Raises:
            ValueError, TypeError: wrong input, naming the argument.
        """

    def check(self, system: System, x: Tensor, h: Tensor) -> None:
        """Raise unless x is a state of the system and h a positive step for every sample."""
        system.check(x)
        check_tensor("h", h, (len(x),), x)
        if not bool(((h > 0) & torch.isfinite(h)).all()):
            raise bad("h", "finite steps > 0", h.tolist())


def move(system: System, x: Tensor, h: Tensor, v: Tensor) -> Tensor:
    """x + h v, brought back to the sphere where that is the state space."""
    return system.prepare(x + h[:, None, None] * v)


def settle(system: System, good: Tensor, moved: Tensor, x: Tensor) -> Tensor:
    """`moved` for the samples that are `good` and the tokens that exist, x for the others."""
    return torch.where(good[:, None, None] & (system.keep(torch.ones_like(x)) > 0), moved, x)
