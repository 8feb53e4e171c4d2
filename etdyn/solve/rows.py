"""Taking some of the samples out of a batch, so that those that are done stop costing."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Self

import torch
from torch import Tensor

from etdyn.systems import System

__all__ = ["Rows"]


@dataclass(frozen=True)
class Rows:
    """A dataclass of per-sample tensors and systems, of which a part of the samples is taken."""

    def at(self, rows: Tensor) -> Self:
        """The same for some of the samples; rows: indices, or bool `(batch,)`."""
        index = rows.nonzero().flatten() if rows.dtype == torch.bool else rows
        return replace(self, **{f.name: _cut(getattr(self, f.name), index) for f in fields(self)})


def _cut(value: Any, rows: Tensor) -> Any:
    if isinstance(value, Tensor):
        return value[rows]
    if isinstance(value, Rows):
        return value.at(rows)
    return value.select(rows) if isinstance(value, System) else value
