"""Methods by name, validated: what torchdiffeq has installed, what is ours, what each needs."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torchdiffeq._impl.fixed_adams import AdamsBashforthMoulton
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.scipy_wrapper import ScipyWrapperODESolver
from torchdiffeq._impl.solvers import FixedGridODESolver

from etdyn.checks import bad, check_count, check_positive
from etdyn.solve.descent import GuardedEuler
from etdyn.solve.discrete_gradient import DiscreteGradient
from etdyn.solve.implicit import MatrixFreeMidpoint
from etdyn.solve.langevin import MirrorLangevin
from etdyn.solve.steppers import Stepper
from etdyn.solve.tableaus import TABLEAUS

__all__ = ["STEPPERS", "Method", "available_methods"]

# Set by the adapter itself, or meaningless to a user.
_RESERVED = {
    "self", "func", "y0", "rtol", "atol", "norm", "dtype", "step_size", "grid_constructor",
    "interp", "perturb", "step_t", "max_num_steps", "kwargs", "unused_kwargs", "implicit",
}  # fmt: skip


_BATCHED = tuple(f"batched_{name}" for name in TABLEAUS)
STEPPERS: dict[str, Callable[..., Stepper]] = {
    cls.name: cls for cls in (GuardedEuler, DiscreteGradient, MatrixFreeMidpoint)
}
_NOISY = {MirrorLangevin.name: MirrorLangevin.seeded}


def available_methods(fixed_step: bool | None = None) -> tuple[str, ...]:
    """The methods that `solve` knows: those of the installed torchdiffeq, and ours.

    Ours are the batched pairs and the steppers. Beside these, `Method` knows "mirror_langevin",
    which adds noise.

    fixed_step: only those that need a `step` (True), or only those that choose it (False).
    """
    offered = [
        name
        for name, solver in SOLVERS.items()
        if fixed_step is None or issubclass(solver, FixedGridODESolver) == fixed_step
    ]
    ours = ([] if fixed_step else list(_BATCHED)) + ([] if fixed_step is False else list(STEPPERS))
    return tuple(sorted(offered + ours))


@dataclass(frozen=True)
class Method:
    """A named, validated way to integrate.

    Args:
        name: one of `available_methods()`.
        step: largest step of a fixed-step method; every save interval is cut into equal steps
            no larger than this, so that save times are met exactly.
        rtol, atol: tolerances of an adaptive method, on the largest per-sample RMS error.
        options: further options by name: `first_step`, `max_order`, ... of torchdiffeq's methods;
            `slack`, `halvings`, `tol` of the steppers; `temperature` and `seed` of
            "mirror_langevin".

    Raises:
        ValueError, TypeError: an unknown name (the message lists the installed ones), a
            fixed-step method without a step or an adaptive one with it, an unknown option.
    """

    name: str
    step: float | None = None
    rtol: float = 1e-6
    atol: float = 1e-8
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name not in available_methods() + tuple(_NOISY):
            names = ", ".join(available_methods() + tuple(_NOISY))
            raise bad("method", f"one of {names}", repr(self.name))
        if self.fixed_step:
            if self.step is None:
                raise bad("step", f"a step size for the fixed-step method {self.name!r}", None)
            check_positive("step", self.step)
        elif self.step is not None:
            raise bad("step", f"none: {self.name!r} chooses its own steps", self.step)
        check_positive("rtol", self.rtol)
        check_positive("atol", self.atol, zero=True)
        unknown = set(self.options) - self.known_options
        if unknown:
            known = ", ".join(sorted(self.known_options)) or "none"
            raise bad("options", f"options of {self.name!r}: {known}", sorted(unknown))
        if "max_order" in self.options:
            check_count("max_order", self.options["max_order"], least=4)
        if self.stepping:
            missing = {"temperature"} & self.known_options - set(self.options)
            if missing:
                raise bad("options", f"an option {missing.pop()!r} for {self.name!r}", "none")
            self.stepper(torch.device("cpu"))  # raises where a value is out of range

    @property
    def per_sample(self) -> bool:
        """Whether every sample has its own time and steps (the batched methods)."""
        return self.name in _BATCHED

    @property
    def stepping(self) -> bool:
        """Whether a stepper of ours moves every sample (guarded, implicit or noisy steps)."""
        return self.name in STEPPERS or self.name in _NOISY

    def stepper(self, device: torch.device) -> Stepper:
        """A new stepper, its noise on this device."""
        if self.name in _NOISY:
            return _NOISY[self.name](**self.options, device=device)
        return STEPPERS[self.name](**self.options)

    def pieces(self, span: float) -> int:
        """How many equal steps of at most `step` make up this time, forwards or backwards."""
        assert self.step is not None
        return max(1, math.ceil(abs(span) / self.step * (1 - 1e-12)))

    @property
    def _solver(self) -> type:
        """torchdiffeq's class; `object` for a method that is not its own."""
        solver: type = SOLVERS.get(self.name, object)
        return solver

    @property
    def fixed_step(self) -> bool:
        """Whether the method steps on a grid."""
        return self.stepping or issubclass(self._solver, FixedGridODESolver)

    @property
    def multistep(self) -> bool:
        """Whether the method remembers earlier steps, and so needs them equal."""
        return issubclass(self._solver, AdamsBashforthMoulton)

    @property
    def differentiable(self) -> bool:
        """Whether gradients pass through the method (scipy's and implicit steps do not)."""
        if self.name in STEPPERS:
            return self.name == GuardedEuler.name
        return not issubclass(self._solver, ScipyWrapperODESolver)

    @property
    def known_options(self) -> frozenset[str]:
        """The names that `options` may hold, read from the installed solver."""
        if self.per_sample:
            return frozenset({"first_step", "min_step"})
        if self.stepping:
            make = _NOISY.get(self.name) or STEPPERS[self.name]
            return frozenset(inspect.signature(make).parameters) - {"device"}
        names: set[str] = set()
        for cls in self._solver.__mro__[:-1]:
            if "__init__" in vars(cls):
                names |= set(inspect.signature(vars(cls)["__init__"]).parameters)
        return frozenset(names - _RESERVED)

    @property
    def callbacks(self) -> frozenset[str]:
        """Which of torchdiffeq's step callbacks the method calls."""
        return frozenset(SOLVERS[self.name].valid_callbacks())

    def check_precision(self, dtype: torch.dtype) -> None:
        """Raise `ValueError` where the tolerance is finer than the dtype's rounding allows."""
        least = (50 if self.per_sample else 8) * torch.finfo(dtype).eps
        if not self.fixed_step and self.rtol < least:
            raise bad("rtol", f"at least {least:.1e}, which {dtype} can carry", self.rtol)

    def describe(self) -> dict[str, Any]:
        """The method as JSON can hold it."""
        return {
            "name": self.name,
            "step": self.step,
            "rtol": None if self.fixed_step and not self.multistep else self.rtol,
            "atol": None if self.fixed_step and not self.multistep else self.atol,
            "options": {k: _plain(v) for k, v in self.options.items()},
        }


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value
