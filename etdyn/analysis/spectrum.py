"""Spectra of the flow's Jacobian: real ones of systems with an energy, complex ones of the others.

Dense spectra build the matrix of S (see `etdyn.analysis.operators`) by one batch of products with
unit vectors and cost n^2 memory and n^3 time, n = tokens times features; extreme ones are
matrix-free. Both leave null directions out, exactly, and agree to the residuals that they report.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import labelled
from etdyn.analysis.lanczos import extreme_eigenpairs, krylov_limit, tolerance
from etdyn.analysis.operators import Linearisation, dense_matrix, without_null
from etdyn.checks import bad, check_choice, check_count, check_finite
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["spectrum"]

DENSE, PER_MODE = 128, 30  # directions, in all and per k, up to which all eigenvalues are cheaper
MEMORY = 2**25  # numbers that the Krylov bases of a batch may hold
ENDS = {"both": (1, 1), "lowest": (1, 0), "highest": (0, 1)}


@torch.no_grad()
def spectrum(
    system: System, x: Tensor, k: int | None = None, which: str = "both", vectors: bool = False
) -> xr.Dataset:
    """Eigenvalues of the stability operator S of every sample: minus the flow's rates.

    Leaky: the kappa of ET-F29, Euler stable below 2 / max(1, kappa_max). Sphere: the lambda of
    the Riemannian Hessian, Euler stable below 2 / lambda_max. Negative: an unstable direction.

    Args:
        system: one with an energy, under "et", "leaky" or "sphere".
        x: `(batch, token, feature)`, at equilibrium or not (ET-F12).
        k: None for all eigenvalues, or how many at an end, matrix-free.
        which: the end: "both", "lowest" or "highest"; of no effect where k is None.
        vectors: also return the directions.

    Returns:
        Dataset (schema "etdyn.spectrum/1"), dims sample and mode, values per unit of flow time:
        `eigenvalue` ascending; NaN where it has not converged, and beyond a sample's last mode.
        `residual` |S v - lambda v| of the unit vector v, which bounds the eigenvalue's error.
        `radial` share of v along the lengths of tokens, where M is small (eps / sigma^2); the
        eigenvalue of such a mode is 1 (leaky) or 0 (et) up to that.
        `null` (sample,) directions left out because no g follows them: the means of tokens, on
        the sphere and for eps = 0 also their lengths. In x they have rate -1 (leaky) or 0.
        `absent` (sample,) directions of tokens that a mask takes out.
        `direction` (sample, mode, token, feature), with `vectors`: the change of x that moves g
        along v, at unit length.

    Raises:
        ValueError, TypeError: wrong input, naming the argument; a system without an energy
            (`jacobian_spectrum` serves it).

    Source: ET-F12, ET-F29, ET section 1.5.
    """
    x, room = _check(system, x, k, which)
    modes = int(room.max()) if k is None else k * sum(ENDS[which])
    values, residual, radial = x.new_full((3, len(x), modes), torch.nan).unbind()
    size = x.new_zeros(len(x))
    units = x.new_full((len(x), modes if vectors else 0, *x.shape[1:]), torch.nan)
    for count in sorted(set(room.tolist())):  # samples of one size at a time
        rows = (room == count).nonzero().flatten()
        found = _eigenpairs(system.select(rows), x[rows], count, (k, which, vectors))
        size[rows] = found[0]
        for whole, part in zip((values, residual, radial, units), found[1:], strict=True):
            whole[rows, : part.shape[1]] = part
    # rates below the rounding of one are zero
    allowed = (4 * tolerance(x.dtype) * size[:, None]).clamp(min=16 * torch.finfo(x.dtype).eps)
    values = values.masked_fill(~(residual <= allowed), torch.nan)
    here = Linearisation(system, x)
    dims = ("sample", "mode")
    data = {
        "eigenvalue": labelled(dims, values.cpu(), "eigenvalue of S, per unit of flow time"),
        "residual": labelled(dims, residual.cpu(), "|S v - eigenvalue v|, per unit of flow time"),
        "radial": labelled(dims, radial.cpu(), "share along the lengths of tokens"),
        **left_out(here),
    }
    if vectors:
        name = "change of x that moves g along the mode, unit length"
        moves = _directions(here, units).cpu()
        data["direction"] = labelled((*dims, "token", "feature"), moves, name)
    config = {"k": k, "which": which, "vectors": vectors, "system": describe_system(system)}
    coords = {"sample": np.arange(len(x)), "mode": np.arange(modes)}
    return xr.Dataset(data, coords, store.provenance("etdyn.spectrum/1", config, x))


def left_out(here: Linearisation) -> dict[str, Any]:
    """The variables that count directions of x without a mode, each `(sample,)`."""
    absent = (here.x.shape[1] - here.tokens()) * here.x.shape[2]
    return {
        "null": labelled("sample", here.null().cpu(), "null directions"),
        "absent": labelled("sample", absent.cpu(), "directions of absent tokens"),
    }


def _check(system: System, x: Tensor, k: int | None, which: str) -> tuple[Tensor, Tensor]:
    """The state on its sphere, where it has one, and how many directions each sample has."""
    if not system.has_energy:
        raise TypeError("system: expected one with an energy (jacobian_spectrum serves the others)"
                        f", got {type(system.interaction).__name__}")  # fmt: skip
    check_choice("which", which, tuple(ENDS))
    x = system.prepare(x)
    check_finite("x", x)
    here = Linearisation(system, x)
    room = here.tokens() * x.shape[2] - here.null()
    check_modes(k, int(room.min()) // sum(ENDS[which]))
    return x, room


def check_modes(k: int | None, most: int) -> None:
    """Raise unless k is None, for all eigenvalues, or a count of at most this many."""
    if k is not None:
        check_count("k", k)
        if k > most:
            raise bad("k", f"at most {most} eigenvalues", k)


# |S| (batch,); values, residuals, radial shares (batch, mode); unit vectors (batch, mode, ...)
Pairs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _eigenpairs(system: System, x: Tensor, room: int, how: tuple[int | None, str, bool]) -> Pairs:
    """Of samples that all have `room` directions; unit vectors only where they are wanted."""
    k, which, vectors = how
    if k is None:
        return _dense(system, x, room, slice(room), vectors)
    low, high = k * ENDS[which][0], k * ENDS[which][1]
    if room <= max(DENSE, PER_MODE * k):
        return _dense(system, x, room, [*range(low), *range(room - high, room)], vectors)
    found = _extreme(system, x, k, (low, high), room)
    return found if vectors else (*found[:4], found[4][:, :0])


def _dense(system: System, x: Tensor, room: int, modes: slice | list[int], vectors: bool) -> Pairs:
    """Some of all eigenpairs."""
    found = []
    for i in range(len(x)):
        matrix = dense_matrix(system, x, sample=i)
        null = torch.eye(len(matrix)).to(matrix) - dense_matrix(system, x, without_null, i)
        beyond = 2 * matrix.norm() + 1  # where null directions are moved to
        theta, v = torch.linalg.eigh((matrix + matrix.T) / 2 + beyond * (null + null.T) / 2)
        size = theta[:room].abs().max()
        theta, v = theta[modes], v[:, modes]
        units = v.T.reshape(-1, *x.shape[1:])
        radial = _radial(system.select(torch.tensor([i])), x[i : i + 1], units[None])[0]
        residual = (matrix @ v - theta * v).norm(dim=0)
        found.append((size, theta, residual, radial, units if vectors else units[:0]))
    sizes, values, residuals, radials, kept = map(torch.stack, zip(*found, strict=True))
    return sizes, values, residuals, radials, kept


class _Blocks:
    """S on blocks `(batch, width, n)` of directions."""

    def __init__(self, system: System, x: Tensor, width: int, rows: Tensor) -> None:
        rows = rows.repeat_interleave(width)
        self.here = Linearisation(system.select(rows), x[rows])
        self.shape = x.shape[1:]

    def product(self, v: Tensor) -> Tensor:
        """S v."""
        return self.here.stability(v.reshape(-1, *self.shape)).reshape(v.shape)

    def project(self, v: Tensor) -> Tensor:
        """v without null directions."""
        return self.here.project(v.reshape(-1, *self.shape)).reshape(v.shape)


def _extreme(system: System, x: Tensor, k: int, ends: tuple[int, int], room: int) -> Pairs:
    """The extreme eigenpairs; batches of samples whose Krylov bases fit into memory."""
    n = x[0].numel()
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(k, n, generator=generator, dtype=torch.float64).to(x)
    share, parts = max(1, MEMORY // (krylov_limit(k) * n)), []
    for first in range(0, len(x), share):
        rows = torch.arange(first, min(first + share, len(x)), device=x.device)
        local, here = system.select(rows), x[rows]
        blocks = partial(_Blocks, local, here, k)
        size, values, v = extreme_eigenpairs(blocks, start.repeat(len(rows), 1, 1), ends, room)
        image = _Blocks(local, here, sum(ends), torch.arange(len(rows))).product(v)
        units = v.reshape(*v.shape[:2], *x.shape[1:])
        residual = (image - values[..., None] * v).norm(dim=2)
        parts.append((size, values, residual, _radial(local, here, units), units))
    size, values, residual, radial, units = map(torch.cat, zip(*parts, strict=True))
    return size, values, residual, radial, units


def _radial(system: System, x: Tensor, units: Tensor) -> Tensor:
    """The share of unit vectors along the lengths of tokens, `(batch, mode)`."""
    anchor = Linearisation(system, x).x.unsqueeze(1)
    along = units - system.lagrangian.tangent(anchor, units)
    return along.square().sum((2, 3))


def _directions(here: Linearisation, units: Tensor) -> Tensor:
    """The change of x of every mode, `(batch, mode, token, feature)`."""
    lifted = torch.stack([here.lift(v) for v in units.unbind(1)], 1)
    length = lifted.square().sum((2, 3), keepdim=True).sqrt()
    return lifted / length
