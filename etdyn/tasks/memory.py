"""What a forward pass keeps in memory for its backward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["SavedBytes", "saved_bytes"]


@dataclass
class SavedBytes:
    """Storages that autograd holds, each counted once."""

    storages: dict[int, int] = field(default_factory=dict)

    @property
    def total(self) -> int:
        """In bytes."""
        return sum(self.storages.values())


@contextmanager
def saved_bytes(measure: bool = True) -> Iterator[SavedBytes]:
    """Count what autograd saves inside this context, parameters and inputs included.

    Exact on any device, and independent of what else the process holds. Sparse tensors are
    counted by their parts.

    Args:
        measure: off, it counts nothing and costs nothing.
    """
    found = SavedBytes()

    def note(x: Tensor) -> Tensor:
        for part in _parts(x):
            storage = part.untyped_storage()
            found.storages[storage.data_ptr()] = storage.nbytes()
        return x

    if not measure:
        yield found
        return
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        yield found


def _parts(x: Tensor) -> list[Tensor]:
    """The dense tensors that x is made of."""
    if x.layout == torch.strided:
        return [x]
    if x.layout == torch.sparse_coo:
        return [x._indices(), x._values()]
    return [x.crow_indices(), x.col_indices(), x.values()]
