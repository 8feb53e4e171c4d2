"""What pulls on the tokens: a force of their activations, with or without an energy."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

from torch import Tensor, nn

from etdyn.checks import bad

if TYPE_CHECKING:
    from etdyn.graphs import Graph

__all__ = ["Energy", "EnergySum", "Interaction"]


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

    def sizes(self) -> tuple[int | None, int | None]:
        """How many samples and tokens its states must have; None: any number."""
        return None, None

    def curvature_bound(self, tokens: int) -> float | Tensor:
        """h+ >= the largest eigenvalue of the Hessian, wherever g is; infinite if not known.

        One number for all samples, or `(batch,)` where masks or graphs make them differ.
        """
        return math.inf

    def head_forces(self, g: Tensor) -> Tensor | None:
        """The force of every attention head, on tokens as queries and as keys; None: no heads.

        Returns:
            `(head, 2, batch, token, feature)`, which sum over head and role to the force.
        """
        return None

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


class Energy(Interaction):
    """An interaction energy E(g); `a + b` is an `EnergySum` that keeps both names."""

    name = "energy"

    @abstractmethod
    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """E `(batch,)` and -grad_g E `(batch, token, feature)` in one pass.

        relative: subtract the energy's value at zero weights, exactly (the mean instead of the
        sum inside each logarithm).
        """

    @abstractmethod
    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E at g times the direction u."""

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return self.energy_and_force(g, relative)[0]

    def local_energies(self, g: Tensor, relative: bool = False) -> Tensor | None:
        """Where the energy sits; it sums over what follows the batch to `energy`.

        Returns:
            `(batch, token)`, or of attention `(batch, head, query)`; None if not known.
        """
        return None

    def hessian_bound(self, tokens: int, centre: float, radius: float) -> float | Tensor:
        """|H|_2 at most while all g lie in a ball; infinite if not known.

        centre, radius: how far its middle is from zero, and its radius. Under layer norm these
        are |delta| and gamma sqrt(D).

        Returns:
            One number for all samples, or `(batch,)`, as `curvature_bound`.
        """
        return math.inf

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        return self.energy_and_force(g)[1]

    def terms(self) -> dict[str, Energy]:
        """The named energies that this one is the sum of."""
        return {self.name: self}

    def force_jvp(self, g: Tensor, u: Tensor) -> Tensor:
        """Minus the Hessian times u."""
        return -self.hvp(g, u)

    def __add__(self, other: Energy) -> EnergySum:
        mine, theirs = self.terms(), other.terms()
        twice = mine.keys() & theirs.keys()
        if twice:
            raise bad("energies", "terms with different names", f"{sorted(twice)} twice")
        return EnergySum(mine | theirs)


class EnergySum(Energy):
    """A sum of energies whose terms keep their names.

    Args:
        terms: name -> energy. The names become the names of the results' variables.
    """

    name = "sum"

    def __init__(self, terms: Mapping[str, Energy]) -> None:
        super().__init__()
        if not terms:
            raise bad("terms", "at least one energy", "none")
        self.parts = nn.ModuleDict(dict(terms))

    def terms(self) -> dict[str, Energy]:
        """The named terms."""
        return dict(self.parts.items())  # type: ignore[arg-type]  # a ModuleDict forgets its type

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """The sums over the terms; see `Energy`."""
        pairs = [term.energy_and_force(g, relative) for term in self.terms().values()]
        return _total([e for e, _ in pairs]), _total([f for _, f in pairs])

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return _total([term.energy(g, relative) for term in self.terms().values()])

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        return _total([term.force(g) for term in self.terms().values()])

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E at g times u."""
        return _total([term.hvp(g, u) for term in self.terms().values()])

    def sizes(self) -> tuple[int | None, int | None]:
        """What a term says that fixes them."""
        samples, tokens = zip(*(term.sizes() for term in self.terms().values()), strict=True)
        return _first(samples), _first(tokens)

    def curvature_bound(self, tokens: int) -> float | Tensor:
        """The sum of the terms' bounds."""
        return sum(term.curvature_bound(tokens) for term in self.terms().values())

    def hessian_bound(self, tokens: int, centre: float, radius: float) -> float | Tensor:
        """The sum of the terms' bounds."""
        return sum(term.hessian_bound(tokens, centre, radius) for term in self.terms().values())

    def _set_masks(self, tokens: Tensor | None, keys: Tensor | None) -> None:
        masked = {name: term.masked(tokens, keys) for name, term in self.terms().items()}
        self._modules = {"parts": nn.ModuleDict(masked)}

    def on(self, graph: Graph, weights: Tensor | None = None) -> Self:
        """The sum of the terms over the edges of a graph."""
        return self._each({n: term.on(graph, weights) for n, term in self.terms().items()})

    def select(self, rows: Tensor) -> Self:
        """The sum of the terms as some samples of the batch feel it."""
        return self._each({n: term.select(rows) for n, term in self.terms().items()})

    def _each(self, terms: dict[str, Energy]) -> Self:
        """Made of these terms; the sum itself where they are its own."""
        if all(term is self.terms()[name] for name, term in terms.items()):
            return self
        view = copy.copy(self)
        view._modules = {"parts": nn.ModuleDict(terms)}
        return view


def _first(counts: tuple[int | None, ...]) -> int | None:
    return next((count for count in counts if count is not None), None)


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def take(mask: Tensor | None, rows: Tensor) -> Tensor | None:
    """Some samples of a mask; the mask itself where it serves every sample."""
    return mask if mask is None or len(mask) == 1 else mask[rows]
