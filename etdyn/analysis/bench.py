"""The bench on which a System is measured against the laws: its copy, its states, its ruler.

A law is measured as a number that its bound must not be below. Unless it says otherwise, the
number is relative to what is compared, or to what cancels in it, and is the worst sample's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from etdyn.interactions import Interaction
from etdyn.systems import System

__all__ = ["Bench", "DoesNotApply", "Law", "law"]

IDENTITY = 1e-10  # two formulas for one thing; one in float32 would be off by 1e-7
SAME = 1e-12  # one formula in two surroundings

Measurement = float | tuple[float, str]


class DoesNotApply(Exception):  # noqa: N818  # no error: a law has nothing to say, and why
    """A law has nothing to say about this system, for the reason given."""


@dataclass(frozen=True)
class Law:
    """One line of a verdict.

    Attributes:
        name: as printed.
        bound: the largest measurement with which it holds.
        needs_energy: whether it is about an energy.
        measure: the measurement, or that and where it was found; its docstring says what a
            failure means, and is printed with it.
    """

    name: str
    bound: float
    needs_energy: bool
    measure: Callable[[Bench], Measurement]

    @property
    def meaning(self) -> str:
        """What a failure means and where to look."""
        return " ".join((inspect.getdoc(self.measure) or "").split())


def law(
    name: str, bound: float, *, needs_energy: bool = False
) -> Callable[[Callable[[Bench], Measurement]], Law]:
    """Make a law of a measurement."""
    return lambda measure: Law(name, bound, needs_energy, measure)


@dataclass(frozen=True)
class Bench:
    """A system on the bench.

    Attributes:
        system: a copy in float64 without gradients.
        x: states of it, prepared, `(batch, token, feature)`.
        rng: source of directions.
        dtype: of the system that was copied.
    """

    system: System
    x: Tensor
    rng: torch.Generator
    dtype: torch.dtype

    @cached_property
    def g(self) -> Tensor:
        """Activations of the states."""
        return self.system.activation(self.x)

    def direction(self) -> Tensor:
        """Normal random numbers in the shape of the states."""
        drawn = torch.randn(self.x.shape, generator=self.rng, dtype=torch.float64)
        return drawn.to(self.x.device)

    def metric(self, v: Tensor) -> Tensor:
        """How g moves with x, in the clock of the dynamics: M v."""
        return self.system._law.activation_velocity(self.system.lagrangian, self.x, v)

    def terms(self, measure: Callable[[Interaction], float]) -> tuple[float, str]:
        """The worst term of the interaction."""
        terms = self.system.interaction.terms().items()
        return worst((measure(term), name) for name, term in terms)


def jvp(function: Callable[[Tensor], Tensor], x: Tensor, u: Tensor) -> Tensor:
    """The derivative of a function in the direction u, by reverse-mode autograd, twice.

    Forward mode would be faster, but does not pass through a force made with torch.autograd.grad.
    """
    product = torch.autograd.functional.jvp(function, x.detach(), u)  # type: ignore[no-untyped-call]
    derivative: Tensor = product[1]
    return derivative


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The gradient of a function of every sample, by reverse-mode autograd."""
    x = x.detach().requires_grad_()
    value = function(x).sum()
    if not value.requires_grad:
        return torch.zeros_like(x)
    slope: Tensor = torch.autograd.grad(value, x)[0]
    return slope


def inner(u: Tensor, v: Tensor) -> Tensor:
    """u.v of every sample."""
    return (u * v).flatten(1).sum(1)


def norm(u: Tensor) -> Tensor:
    """|u| of every sample."""
    return inner(u, u).sqrt()


def ratio(off: Tensor, size: Tensor) -> float:
    """The largest off / size; nothing is off by nothing."""
    return float(torch.where(off == 0, off, off / size).detach().max())


def gap(a: Tensor, b: Tensor, scale: Tensor | float = 0.0) -> float:
    """Largest |a - b| of a sample over its largest number, or over `scale` where that is more."""
    if a.shape != b.shape:
        raise ValueError(f"shape {tuple(a.shape)} where {tuple(b.shape)} was expected")
    a, b = (v.reshape(v.shape[0] if v.ndim else 1, -1) for v in (a, b))
    size = torch.maximum(a.abs().amax(1), b.abs().amax(1))
    size = torch.maximum(size, torch.as_tensor(scale, dtype=size.dtype, device=size.device))
    return ratio((a - b).abs().amax(1), size)


def twist(u: Tensor, au: Tensor, v: Tensor, av: Tensor, scale: Tensor | float = 0.0) -> float:
    """|u.Av - v.Au| over |u||Av| + |v||Au|, zero for a symmetric A; |Au|, |Av| at least `scale`."""
    least = torch.as_tensor(scale, dtype=u.dtype, device=u.device)
    size = norm(u) * norm(av).maximum(least) + norm(v) * norm(au).maximum(least)
    return ratio((inner(u, av) - inner(v, au)).abs(), size)


def secant(value: Tensor, at: Tensor, u: Tensor) -> Tensor:
    """|value| |u| / |at|: the size of a derivative along u in which more may cancel."""
    return norm(value) * norm(u) / norm(at).clamp(min=torch.finfo(at.dtype).tiny)


def worst(found: Iterable[tuple[float, str]]) -> tuple[float, str]:
    """The largest number and where it was found; a NaN is larger than any."""
    return max(found, key=lambda pair: (pair[0] != pair[0], pair[0]), default=(0.0, ""))


def outputs(system: System, x: Tensor) -> dict[str, Tensor]:
    """What the verbs of a system say at x."""
    said = {
        "activation": system.activation(x),
        "force": system.force(x),
        "velocity": system.velocity(0.0, x),
        "residual": system.residual(x),
    }
    if system.has_energy:
        said["energy"] = system.energy(x)
        said["interaction_energy"] = system.interaction_energy(x)
        said["relative interaction_energy"] = system.interaction_energy(x, relative=True)
        said["dissipation"] = system.dissipation(x)
    return said
