"""Which equilibria a system has: found from many starts, told apart, judged by their spectrum.

Equilibria live in g: the published flow drifts in x for ever (ET 1.5.2), and its equilibria in g
are those of the leaky flow (ET-F27), whose spectrum is quoted for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from scipy.optimize import linear_sum_assignment
from scipy.spatial.distance import cdist
from scipy.stats import binomtest
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import labelled
from etdyn.analysis.spectrum import spectrum
from etdyn.checks import bad, check_choice
from etdyn.solve import Equilibrium, find_equilibrium
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["basin_changes", "survey"]

MARGIN = 10.0  # by which the first-order estimate of an error may be too small
LARGEST_ERROR = 1e-3  # in units of the size that g may have; no larger estimate is believed
DENSE = 256  # coordinates of a state up to which all eigenvalues are computed
EXTREMES = 4  # eigenvalues computed first at each end of a larger spectrum

Array = npt.NDArray[np.float64]


@torch.no_grad()
def survey(
    system: System,
    starts: Tensor,
    method: str = "anderson",
    *,
    tol: float = 1e-10,
    symmetry: str | None = None,
    max_evaluations: int = 20_000,
) -> xr.Dataset:
    """Find an equilibrium from every start, and tell which are the same and what each one is.

    Two states are the same equilibrium where they differ in g by no more than their errors. The
    error of a state is its speed in g over the slowest rate of the equilibrium,

        |g - g*| <~ |dg/dt| / min |eigenvalue|,

    exact to first order on the sphere, and elsewhere up to the root of the ratio of the tokens'
    metrics; ten times the sum of both errors is allowed. Where that exceeds 1e-3 of the size
    that g may have, radius sqrt(tokens), `isolated` is False and labels mean little: the state
    belongs to a continuous family, or almost.

    The basins are those of `method`. They are the basins of the flow for "flow" alone; "map" and
    "anderson" only approximate them, see `basin_changes`. The index is counted in the spectrum,
    never inferred from slowness. The accelerated methods leave the saddles that they notice: a
    survey by them is no census of saddles.

    Args:
        system: has an energy; under "et" the leaky flow stands for the published one. A mask must
            be the same for all starts: other masks make other systems.
        starts: float64 `(start, token, feature)`; their generator's seed is the caller's.
        method, tol, max_evaluations: of `find_equilibrium`.
        symmetry: None, or "permutation" where all tokens that exist play the same part (no
            position codes in the system, no graph and no mask of keys, ET-F4).

    Returns:
        Dataset (schema "etdyn.equilibria/1"), equilibria sorted by energy. By start: `label`
        (-1: not converged), `evaluations`, `distance` from the state that stands for its
        equilibrium. By equilibrium: `state`, `energy` E(g), `residual`, `error` (estimated, in
        g), `index` (unstable directions), `flat` (eigenvalues that are zero to half the digits),
        `lowest`, `highest` and `slowest` (smallest in size) eigenvalue, `isolated`, `count`,
        `basin_fraction` of all starts and its 95 % Wilson interval `basin_interval`. `unseen`
        estimates the probability that one more start ends in an equilibrium not in the list
        (Good and Turing: the share of equilibria found once).

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET-F4, F23, F27, F29; Wilson 1927; Good 1953.
    """
    _check(system, starts, symmetry)
    found = find_equilibrium(system, starts, method, tol=tol, max_evaluations=max_evaluations)
    catalogue = _Catalogue(system, symmetry, found.x[:1])
    label, distance = catalogue.place(found)
    order, label = _by_energy(catalogue, label)
    data = _per_equilibrium(catalogue, order) | _fractions(label, len(order))
    data["label"] = labelled("start", label, "equilibrium reached, -1 where not converged")
    data["distance"] = labelled("start", distance, "distance in g from the equilibrium's state")
    data["evaluations"] = labelled("start", found.evaluations.numpy(), "evaluations spent")
    config = found.config | {"symmetry": symmetry, "margin": MARGIN}
    return _dataset(data, "etdyn.equilibria/1", config, starts)


@torch.no_grad()
def basin_changes(
    system: System,
    starts: Tensor,
    methods: Sequence[str] = ("flow", "map", "anderson"),
    *,
    tol: float = 1e-10,
    symmetry: str | None = None,
    max_evaluations: int = 20_000,
) -> xr.Dataset:
    """How many starts end in another equilibrium when another method leads them there.

    The states that all methods find are told apart together, as in `survey`.

    Args:
        methods: two or more of `find_equilibrium`; "flow" is the true descent.
        system, starts, tol, symmetry, max_evaluations: as in `survey`.

    Returns:
        Dataset (schema "etdyn.basin_changes/1"): `label` (solver, start), -1 where not
        converged; `energy` of the equilibria; `changed` (solver, other), the share of starts
        that end elsewhere, among those that converge by both, with its 95 % Wilson interval
        `changed_interval`; NaN where there are none.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
    """
    _check(system, starts, symmetry)
    if len(methods) < 2 or len(set(methods)) < len(methods):
        raise bad("methods", "two or more different names", tuple(methods))
    catalogue, labels = None, []
    for method in methods:
        found = find_equilibrium(system, starts, method, tol=tol, max_evaluations=max_evaluations)
        catalogue = catalogue or _Catalogue(system, symmetry, found.x[:1])
        labels.append(catalogue.place(found)[0])
    assert catalogue is not None
    order, label = _by_energy(catalogue, np.stack(labels))
    both = (label[:, None] >= 0) & (label[None] >= 0)
    moved = ((label[:, None] != label[None]) & both).sum(-1)
    pairs = np.array([[_share(m, n) for m, n in zip(*row, strict=True)]
                      for row in zip(moved, both.sum(-1), strict=True)])  # fmt: skip
    pair = ("solver", "other")
    energies = [catalogue.known[k].energy for k in order]
    data = {
        "label": labelled(("solver", "start"), label, "equilibrium reached, -1 if none"),
        "energy": labelled("equilibrium", np.array(energies), "interaction energy E(g)"),
        "changed": labelled(pair, pairs[..., 0], "share of starts that end elsewhere"),
        "changed_interval": labelled((*pair, "bound"), pairs[..., 1:], "95 % Wilson interval"),
    }
    config = {"methods": list(methods), "tol": tol, "symmetry": symmetry, "margin": MARGIN}
    config |= {"max_evaluations": max_evaluations, "system": describe_system(system)}
    result = _dataset(data, "etdyn.basin_changes/1", config, starts)
    names = np.array(methods, dtype=np.dtypes.StringDType())
    return result.assign_coords(solver=names, other=names)


# --- telling equilibria apart ------------------------------------------------------------------


@dataclass
class _Known:
    """An equilibrium: the state that stands for it, and what its spectrum says."""

    x: Tensor
    g: Array
    energy: float
    residual: float
    error: float
    index: int
    flat: int
    lowest: float
    highest: float
    slowest: float


class _Catalogue:
    """The distinct equilibria so far.

    Args:
        system: as surveyed.
        symmetry: as in `survey`.
        like: a state, for its tokens.
    """

    def __init__(self, system: System, symmetry: str | None, like: Tensor) -> None:
        # the rates of the published flow are those of its leaky conjugate
        self.system = system.with_dynamics("leaky") if system.dynamics == "et" else system
        self.symmetry = symmetry
        self.present = self.system.keep(torch.ones_like(like[:, :, 0]))[0].bool()
        size = float(system.lagrangian.radius) * math.sqrt(int(self.present.sum()))
        self.largest = LARGEST_ERROR * size
        self.known: list[_Known] = []
        self.shadows: list[Array] = []

    def place(self, found: Equilibrium) -> tuple[npt.NDArray[np.int64], Array]:
        """Labels of the states, in order of discovery, and their distances; the best come first."""
        label = np.full(len(found.x), -1)
        distance = np.full(len(found.x), np.nan)
        g = self.system.activation(found.x)[:, self.present].numpy()
        speed = self.speed(found.x)
        converged = found.converged.nonzero().flatten().numpy()
        for row in converged[np.argsort(speed[converged], kind="stable")]:
            label[row], distance[row] = self.find(g[row], speed[row])
            if label[row] < 0:
                label[row], distance[row] = len(self.known), 0.0
                self.add(found.x[row : row + 1], g[row], speed[row])
        return label, distance

    def speed(self, x: Tensor) -> Array:
        """|dg/dt| `(batch,)`, at least what rounding makes of zero."""
        moving = self.system.keep(self.system.activation_velocity(x))
        floor = 8 * torch.finfo(x.dtype).eps * _size(self.system.keep(self.system.activation(x)))
        return (_size(moving) + floor).double().numpy()

    def find(self, g: Array, speed: float) -> tuple[int, float]:
        """The known equilibrium that this state is, and how far away; -1 if none."""
        if not self.known:
            return -1, math.nan
        errors = [MARGIN * (e.error + _over(speed, e.slowest)) for e in self.known]
        allowed = np.minimum(errors, self.largest)
        least = np.linalg.norm(np.stack(self.shadows) - self.shadow(g), axis=1)
        for k in np.argsort(least, kind="stable"):
            if least[k] > allowed[k]:
                break
            distance = self.distance(g, self.known[k].g)
            if distance <= allowed[k]:
                return int(k), distance
        return -1, math.nan

    def shadow(self, g: Array) -> Array:
        """The tokens' components along one direction; shadows are no farther apart than states.

        Sorted, they are as close as any order of the tokens can bring them.
        """
        ramp = np.linspace(-1, 1, g.shape[1]) ** 3 + 0.5
        components: Array = g @ (ramp / np.linalg.norm(ramp))
        return np.sort(components) if self.symmetry else components

    def distance(self, a: Array, b: Array) -> float:
        """|a - b|, over the best order of the tokens where they may be permuted."""
        if self.symmetry:
            rows, columns = linear_sum_assignment(cdist(a, b, "sqeuclidean"))
            a, b = a[rows], b[columns]
        return float(np.linalg.norm(a - b))

    def add(self, x: Tensor, g: Array, speed: float) -> None:
        """One more equilibrium."""
        values = _ends(self.system, x, g.size)
        zero = np.abs(values) <= torch.finfo(x.dtype).eps ** 0.5 * np.abs(values).max()
        slowest = float(values[np.argmin(np.abs(values))])
        self.known.append(
            _Known(
                x, g, float(self.system.interaction_energy(x)), float(self.system.residual(x)),
                _over(speed, slowest), int((values[~zero] < 0).sum()), int(zero.sum()),
                float(values[0]), float(values[-1]), slowest,
            )
        )  # fmt: skip
        self.shadows.append(self.shadow(g))


def _ends(system: System, x: Tensor, size: int) -> Array:
    """Ascending eigenvalues of one state of this size: all, or both ends and every negative one."""
    k: int | None = None if size <= DENSE else EXTREMES
    while True:
        values: Array = spectrum(system, x, k)["eigenvalue"].values[0]
        if k is None or (values[k - 1] > 0 and bool(np.isfinite(values).all())):
            return values
        k = None if 16 * k > size else 2 * k


def _size(v: Tensor) -> Tensor:
    return v.square().sum((1, 2)).sqrt()


def _over(speed: float, rate: float) -> float:
    return speed / abs(rate) if rate else math.inf


# --- the result --------------------------------------------------------------------------------


def _check(system: System, starts: Tensor, symmetry: str | None) -> None:
    if not system.has_energy:
        raise TypeError("system: expected an interaction with an energy, got one without")
    system.check(starts, "starts")
    samples, tokens = system.interaction.sizes()
    if symmetry is not None:
        check_choice("symmetry", symmetry, ("permutation",))
        if "keys" in (system.masks or {}) or tokens is not None:
            raise bad("symmetry", "None where keys are masked or tokens have their places, as in "
                      "a graph", repr(symmetry))  # fmt: skip
    if samples is not None:
        raise bad("starts", "one graph for all (survey each graph by itself)", samples)
    try:  # one state more than there are starts fits every mask but one per sample
        system.check(starts[:1].expand(len(starts) + 1, -1, -1))
    except ValueError:
        raise bad("starts", "one mask for all (survey each mask by itself)", "several") from None


def _by_energy(
    catalogue: _Catalogue, label: npt.NDArray[np.int64]
) -> tuple[list[int], npt.NDArray[np.int64]]:
    """The order of energy (ten digits, then the order of first starts), and labels that follow."""
    flat = label.reshape(-1, label.shape[-1])
    first = [int(np.argmax((flat == k).any(0))) for k in range(len(catalogue.known))]
    energy = [float(f"{e.energy:.10g}") for e in catalogue.known]
    order = sorted(range(len(first)), key=lambda k: (energy[k], first[k]))
    rank = np.full(len(order) + 1, -1)  # the last is that of -1
    rank[np.array(order, int)] = np.arange(len(order))
    return order, rank[label]


def _per_equilibrium(catalogue: _Catalogue, order: list[int]) -> dict[str, Any]:
    known = [catalogue.known[k] for k in order]
    texts = {
        "energy": "interaction energy E(g)",
        "residual": "residual |P grad_g E|",
        "error": "estimated error |g - g*|",
        "index": "unstable directions",
        "flat": "eigenvalues that are zero to half the digits",
        "lowest": "lowest eigenvalue of the stability operator",
        "highest": "highest eigenvalue of the stability operator",
        "slowest": "eigenvalue of smallest size",
    }
    data = {
        name: labelled("equilibrium", np.array([getattr(e, name) for e in known]), text)
        for name, text in texts.items()
    }
    isolated = [MARGIN * e.error <= catalogue.largest for e in known]
    data["isolated"] = labelled("equilibrium", np.array(isolated, bool), "error is small")
    if known:
        states = torch.cat([e.x for e in known]).numpy()
        data["state"] = labelled(("equilibrium", "token", "feature"), states, "state x")
    return data


def _fractions(label: npt.NDArray[np.int64], found: int) -> dict[str, Any]:
    count = np.bincount(label[label >= 0], minlength=found)
    shares = np.array([_share(n, len(label)) for n in count]).reshape(found, 3)
    return {
        "count": labelled("equilibrium", count, "starts that end here"),
        "basin_fraction": labelled("equilibrium", shares[:, 0], "share of all starts"),
        "basin_interval": labelled(("equilibrium", "bound"), shares[:, 1:], "95 % Wilson"),
        "unseen": labelled((), (count == 1).sum() / len(label), "probability of other ends"),
    }


def _share(part: int, whole: int) -> tuple[float, float, float]:
    """part / whole and its 95 % Wilson interval."""
    if not whole:
        return math.nan, math.nan, math.nan
    low, high = binomtest(int(part), int(whole)).proportion_ci(0.95, method="wilson")
    return part / whole, low, high


def _dataset(
    data: dict[str, Any], schema: str, config: dict[str, Any], starts: Tensor
) -> xr.Dataset:
    result = xr.Dataset(data, attrs=store.provenance(schema, config, starts))
    labelled = result.assign_coords(start=np.arange(len(starts)))
    bounds = np.array(["low", "high"], dtype=np.dtypes.StringDType())
    return labelled.assign_coords(
        equilibrium=np.arange(result.sizes["equilibrium"]), bound=("bound", bounds)
    )
