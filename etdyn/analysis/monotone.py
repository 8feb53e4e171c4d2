"""Which energy is monotone under which dynamics: the theory, and a measurement beside it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import labelled
from etdyn.checks import check_finite
from etdyn.dynamics import DYNAMICS
from etdyn.lagrangians import LayerNorm
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["monotone_table"]

SLACK = 8.0  # roundings that a rate may carry


@torch.no_grad()
def monotone_table(system: System, x: Tensor) -> xr.Dataset:
    """Which energy is monotone under which dynamics: what is proved, and the sign at these states.

    Exact derivatives, with f = -grad E and dg/dt of each dynamics:

        d term/dt = -f_term.dg/dt,   dE/dt = -f.dg/dt,   d(E + sum(x.g - L))/dt = (x - f).dg/dt

    Proved never to rise: E under et (-f.Mf) and sphere (-|Pf|^2), the total E + sum(x.g - L)
    under leaky (-v.Mv) and sphere, where it is E and a constant. The total under et and E under
    leaky have one and the same derivative, -f.Mf + x.Mf: neither is monotone, but with the layer
    norm Mx = gamma eps y / sigma^3, so that both are at eps = 0. A term alone is not monotone.

    Args:
        system: an energy with any Lagrangian; its own dynamics does not matter.
        x: `(batch, token, feature)`, the states.

    Returns:
        Dataset (schema "etdyn.monotone/1") with dims energy ("interaction" is E, "total" is
        E + sum(x.g - L), and the terms where there are several), dynamics (those that the
        Lagrangian allows) and sample: `rate`, the exact derivative; `rounding`, above which it is
        a rise; `rising`, the share of samples where it is; `proved`, whether theory says never;
        `contradicted`, proved and rising: the system breaks an assumption (M symmetric and
        positive semidefinite, force = -grad E).

    Raises:
        ValueError, TypeError: x is no finite state; a system without an energy.

    Source: ET section 1.4 and its caveat, ET-F11, F30.
    """
    system.check(x)
    check_finite("x", x)
    energies = list(system.potential.terms()) if len(system.potential.terms()) > 1 else []
    energies += ["interaction", "total"]
    names = [n for n in DYNAMICS if n != "sphere" or isinstance(system.lagrangian, LayerNorm)]
    pairs = [_rates(system.with_dynamics(name), x, energies) for name in names]
    rate, rounding = (torch.stack(part, 1) for part in zip(*pairs, strict=True))
    rising = (rate > rounding).double().mean(2)
    proved = torch.tensor([[_proved(system, e, d) for d in names] for e in energies])
    dims = ("energy", "dynamics", "sample")
    values = {
        "rate": (rate, "exact d(energy)/dt"),
        "rounding": (rounding, "rate that rounding can explain"),
        "rising": (rising, "share of samples where the energy rises"),
        "proved": (proved, "proved never to rise"),
        "contradicted": (proved & (rising > 0), "proved never to rise, and rising"),
    }
    data = {n: labelled(dims[: v.ndim], v.cpu().numpy(), text) for n, (v, text) in values.items()}
    coords = {"energy": _labels(energies), "dynamics": _labels(names), "sample": np.arange(len(x))}
    config = {"system": describe_system(system), "slack": SLACK}
    return xr.Dataset(data, coords, store.provenance("etdyn.monotone/1", config, x))


def _labels(names: list[str]) -> npt.NDArray[Any]:
    return np.array(names, dtype=np.dtypes.StringDType())


def _proved(system: System, energy: str, dynamics: str) -> bool:
    scale_free = getattr(system.lagrangian, "eps", None) == 0
    own = {"et": ("interaction",), "leaky": ("total",), "sphere": ("interaction", "total")}
    return energy in own[dynamics] or (scale_free and energy in ("interaction", "total"))


def _rates(system: System, x: Tensor, energies: list[str]) -> tuple[Tensor, Tensor]:
    """d energy/dt and its rounding, each `(energy, batch)`."""
    x = system.prepare(x)
    moved = system.keep(system.activation_velocity(x))
    pulls = system.forces(x)
    pulls["interaction"] = system.force(x)
    pulls["total"] = pulls["interaction"] - x
    pull = system.keep(torch.stack([pulls[name] for name in energies]))
    # M v, and P f on the sphere, are what is left of this
    size = pull[-2].abs() + (x.abs() if system.dynamics == "leaky" else 0.0)
    size = system.keep(system.clock_rate(x)) * system.keep(size).norm(dim=-1)
    rounding = SLACK * torch.finfo(x.dtype).eps * (pull.norm(dim=-1) * size).sum(-1)
    return -(pull * moved).sum((2, 3)), rounding
