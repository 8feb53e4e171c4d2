"""What pulls on the tokens: a force of their activations, with or without an energy."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

if TYPE_CHECKING:
    from etdyn.graphs import Graph

__all__ = ["Interaction"]


class Interaction(nn.Module, ABC):
    """A force of the activations g; g, forces and directions are `(batch, token, feature)`.

    An `Energy` has a force that is minus a gradient, a `Coupling` one that need not be.
    """

    name: str

    def __init__(self) -> None:
        super().__init__()
        self._tokens: Tensor | None = None
        self._keys: Tensor | None = None

    @abstractmethod
    def force(self, g: Tensor) -> Tensor:
        """What pulls on x at g. One evaluation."""

    @abstractmethod
    def force_jvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The derivative of the force at g in the direction u. One evaluation."""

    def terms(self) -> Mapping[str, Interaction]:
        """The named parts that this one is the sum of."""
        return {self.name: self}

    def curvature_bound(self, tokens: int) -> float:
        """h+ >= the largest eigenvalue of the Hessian, wherever g is; infinite if not known."""
        return math.inf

    def masked(self, tokens: Tensor | None = None, keys: Tensor | None = None) -> Self:
        """This interaction with tokens taken out, sharing parameters with the original.

        Args:
            tokens: bool `(batch or 1, token)`, False where a token does not exist: it pulls on
                none, has no energy and feels no force.
            keys: bool `(batch or 1, query, key)`, True where the query may see the key.
        """
        view = copy.copy(self)
        view._set_masks(tokens, keys)
        return view

    def on(self, graph: Graph, weights: Tensor | None = None) -> Self:
        """This interaction over the edges of a graph; itself where it knows of none."""
        return self

    def select(self, rows: Tensor) -> Self:
        """This interaction as some samples of its batch feel it; rows: indices or bool."""
        tokens, keys = self._mask_rows(rows)
        if tokens is self._tokens and keys is self._keys:
            return self
        return self.masked(tokens, keys)

    def _mask_rows(self, rows: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return take(self._tokens, rows), take(self._keys, rows)

    def _set_masks(self, tokens: Tensor | None, keys: Tensor | None) -> None:
        self._tokens, self._keys = tokens, keys

    def keep(self, per_token: Tensor) -> Tensor:
        """`(batch, token[, feature])` with zeros for tokens that do not exist."""
        if self._tokens is None:
            return per_token
        mask = self._tokens if per_token.ndim == 2 else self._tokens.unsqueeze(-1)
        return per_token.masked_fill(~mask, 0.0)


def take(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """Some samples of a mask; the mask itself where it serves every sample."""
    return mask if mask is None or len(mask) == 1 else mask[rows]
