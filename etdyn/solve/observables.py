"""What a solve keeps at its save times: states, or only what is asked of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from etdyn.checks import bad
from etdyn.systems import System

__all__ = ["Observable", "Recorder", "named_observables"]

Observable = str | Callable[[System, Tensor], Tensor]


def _energies(system: System, x: Tensor) -> dict[str, Tensor]:
    terms = system.energies(x)
    total = torch.stack(list(terms.values())).sum(0)
    return {"energy": total} | {f"energy_{name}": value for name, value in terms.items()}


def _forces(system: System, x: Tensor) -> dict[str, Tensor]:
    return {f"force_{name}": value for name, value in system.forces(x).items()}


_NAMED: dict[str, Callable[[System, Tensor], dict[str, Tensor]]] = {
    "energies": _energies,
    "forces": _forces,
    "activation": lambda system, x: {"activation": system.activation(x)},
    "dissipation": lambda system, x: {"dissipation": system.dissipation(x)},
    "interaction_energy": lambda system, x: {"interaction_energy": system.interaction_energy(x)},
    "residual": lambda system, x: {"residual": system.residual(x)},
}


def named_observables() -> tuple[str, ...]:
    """The names that `save` understands; any function of (system, x) will do as well."""
    return tuple(_NAMED)


class Recorder:
    """Collects states, or observables and the latest state.

    Args:
        system: whose states they are.
        save: None to keep states, else names and functions of (system, x), which are evaluated at
            every save time and called by their `__name__`.

    Raises:
        ValueError, TypeError: an unknown name, or neither a name nor a function.
    """

    def __init__(self, system: System, save: Sequence[Observable] | None) -> None:
        self.system, self.save = system, save
        self.states: list[Tensor] = []
        self.saved: dict[str, list[Tensor]] = {}
        self.count = 0
        for item in save or ():
            if isinstance(item, str) and item not in _NAMED:
                raise bad("save", "functions or names of " + ", ".join(_NAMED), repr(item))
            if not isinstance(item, str) and not callable(item):
                raise TypeError(f"save: expected names and functions, got {type(item).__name__}")

    def add(self, x: Tensor) -> None:
        """One more save time."""
        self.count += 1
        if self.save is None:
            self.states.append(x)
            return
        self.states = [x]
        for item in self.save:
            if isinstance(item, str):
                values = _NAMED[item](self.system, x)
            else:
                values = {item.__name__: item(self.system, x)}
            for name, value in values.items():
                self.saved.setdefault(name, []).append(value)

    def drop(self, x: Tensor) -> None:
        """Forget the last save time; x is the state before it."""
        self.count -= 1
        self.states.pop()
        for column in self.saved.values():
            column.pop()
        if not self.states:
            self.states = [x]

    def result(self) -> tuple[Tensor, dict[str, Tensor]]:
        """States `(time or 1, batch, token, feature)` and observables `(time, ...)` by name."""
        columns = {name: torch.stack(column) for name, column in self.saved.items()}
        return torch.stack(self.states), columns
