"""How tokens gather: order parameters of a configuration, and the plateaus on the way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from scipy.cluster.hierarchy import linkage
from scipy.spatial.distance import pdist
from torch import Tensor

from etdyn import store
from etdyn.analysis.directions import directions
from etdyn.analysis.labels import labelled
from etdyn.checks import bad, check_choice, check_count, check_positive
from etdyn.energies import Attention
from etdyn.lagrangians import LayerNorm
from etdyn.solve import Solution, solve
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["attention_clusters", "plateaus", "token_clusters"]

Array = npt.NDArray[np.float64]


@torch.no_grad()
def token_clusters(
    system: System, states: Tensor | Solution, angle: float = math.radians(10)
) -> xr.Dataset:
    """How clustered the tokens are, sample by sample, and along time for a Solution.

    Tokens are compared by their directions: those of g - delta under LayerNorm, of g for spins
    (see `etdyn.analysis.directions`). Clusters are those of single linkage: chains of tokens,
    each within `angle` of the next. Their number at any other angle is 1 + the number of `merge`
    angles above it.

    Args:
        system: whose activation is meant; masked tokens do not count.
        states: `(sample, token, feature)`, or a Solution that keeps its states.
        angle: in radians, between 0 and pi.

    Returns:
        Dataset (schema "etdyn.clusters/1") with dims (time, sample), without time for states:
        `mean_cosine` over pairs of tokens; `effective_rank`, exp of the entropy of the singular
        values of the directions as shares of their sum (1 for one line); `clusters`; `merge`
        (..., level), the angles at which clusters merge, falling; `widest` and `narrowest`, the
        range of angles with this same number of clusters (a wide range: no matter of taste).
        A Solution adds its `energy`, `residual` and `clock`. NaN, and -1 clusters, where
        a token has no direction, and NaN levels beyond the tokens that exist.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: Roy and Vetterli 2007 (effective rank); Geshkovski et al., arXiv 2312.10794.
    """
    check_positive("angle", angle)
    if angle >= math.pi:
        raise bad("angle", "an angle below pi", angle)
    x = _trajectory(states)
    system.check(x[0])
    rows = [[_order(u, angle) for u in _directions(system, now)] for now in x]
    dims = ("time", "sample")
    texts = {
        "mean_cosine": "mean cosine of pairs of tokens",
        "effective_rank": "exp of the entropy of the singular values",
        "clusters": "clusters by single linkage",
        "narrowest": "smallest angle with as many clusters",
        "widest": "largest angle with as many clusters",
    }
    data = {
        name: labelled(dims, np.array([[row[name] for row in now] for now in rows]), text)
        for name, text in texts.items()
    }
    data["merge"] = labelled((*dims, "level"), _pad(rows, x.shape[2] - 1), "angle of a merger")
    config = {"angle": angle, "system": describe_system(system)}
    result = xr.Dataset(data, attrs=store.provenance("etdyn.clusters/1", config, x))
    for name in ("merge", "narrowest", "widest"):
        result[name].attrs["units"] = "rad"
    if isinstance(states, Tensor):
        return result.isel(time=0)
    observed = states.to_xarray(states=False)
    return result.assign({n: observed[n] for n in ("energy", "residual", "clock")})


def _trajectory(states: Tensor | Solution) -> Tensor:
    if isinstance(states, Tensor):
        return states.unsqueeze(0)
    if len(states.x) != len(states.t):
        raise bad("states", "a Solution with its states", "one that saved observables")
    return states.x.detach()


def _directions(system: System, x: Tensor) -> list[Array]:
    """Unit vectors of the tokens that exist, sample by sample; zero where there is no direction."""
    units = directions(system.lagrangian, x)
    present = system.keep(torch.ones_like(x[..., 0])) > 0
    return [u[here].numpy() for u, here in zip(units, present, strict=True)]


def _order(u: Array, angle: float) -> dict[str, Any]:
    """Order parameters of one configuration of unit vectors `(token, feature)`."""
    n = len(u)
    if not bool(np.isfinite(u).all() and u.any(1).all()):
        lost = dict.fromkeys(("mean_cosine", "effective_rank", "narrowest", "widest"), math.nan)
        return lost | {"clusters": -1, "merge": np.zeros(0)}
    shares = np.linalg.svd(u, compute_uv=False)
    shares = shares[shares > 0] / shares.sum()
    # angles by chords, which keep their digits where cosines lose them
    apart = 2 * np.arcsin(np.minimum(pdist(u) / 2, 1)) if n > 1 else np.zeros(0)
    merge = linkage(apart, "single")[::-1, 2] if n > 1 else np.zeros(0)
    clusters = 1 + int((merge > angle).sum())
    return {
        "mean_cosine": float(np.cos(apart).mean()) if n > 1 else math.nan,
        "effective_rank": float(np.exp(-(shares * np.log(shares)).sum())),
        "clusters": clusters,
        "narrowest": float(merge[clusters - 1]) if clusters < n else 0.0,
        "widest": float(merge[clusters - 2]) if clusters > 1 else math.pi,
        "merge": merge,
    }


def _pad(rows: list[list[dict[str, Any]]], levels: int) -> Array:
    padded = np.full((len(rows), len(rows[0]), levels), np.nan)
    for k, now in enumerate(rows):
        for i, row in enumerate(now):
            padded[k, i, : len(row["merge"])] = row["merge"]
    return padded


def plateaus(
    data: xr.Dataset,
    variable: str = "energy",
    *,
    band: float,
    least: float,
    tol: float,
    clock: str = "clock",
) -> xr.Dataset:
    """Metastable plateaus: where a quantity stands almost still although no equilibrium is near.

    A plateau is an interval of saved times in which the quantity stays within `band` (largest
    minus smallest value) and the residual above `tol`, that no saved time can extend, and that
    lasts at least `least`. Where two overlap the longer one keeps the overlap. Its ends
    are saved times, so both are known to the spacing of these.

    Args:
        data: with dims time and sample, `variable`, `residual` and, for its clock, `clock`: of
            `token_clusters` of a Solution, or `Solution.to_xarray`.
        variable: which quantity, such as "energy" or "clusters".
        band: >= 0, in the units of the quantity; 0 for a count.
        least: > 0, in the units of the clock.
        tol: of the residual, > 0; at and below it the state is an equilibrium.
        clock: "clock", the intrinsic time tau, or "log", the logarithm of the flow time, in
            which the published flow decays (ET 1.5.3).

    Returns:
        Dataset (schema "etdyn.plateaus/1"), by (sample, plateau) in order of time: `begin`,
        `end` and `length` in the clock, `level` (mean value over saved times) and `drop` (first
        minus last value), NaN beyond the `count` of a sample.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
    """
    check_positive("band", band, zero=True)
    check_positive("least", least)
    check_positive("tol", tol)
    check_choice("clock", clock, ("clock", "log"))
    needed = {variable, "residual"} | ({"clock"} if clock == "clock" else set())
    if missing := sorted(needed - set(data.data_vars)):
        raise bad("data", f"variables {sorted(needed)}", f"a dataset without {missing}")
    rows = []
    for sample in range(data.sizes["sample"]):
        one = data.isel(sample=sample)
        value, tau = one[variable].values, _clock(one, clock)
        away = (one["residual"].values > tol) & np.isfinite(value) & np.isfinite(tau)
        spans = _spans(value, tau, away, band, least)
        rows.append([
            (tau[i], tau[j], tau[j] - tau[i], value[i : j + 1].mean(), value[i] - value[j])
            for i, j in spans
        ])  # fmt: skip
    table = np.full((len(rows), max(map(len, rows), default=0), 5), np.nan)
    for sample, row in enumerate(rows):
        if row:
            table[sample, : len(row)] = row
    names = {"begin": "start in the clock", "end": "end in the clock", "length": "duration",
             "level": f"mean of {variable}", "drop": f"fall of {variable}"}  # fmt: skip
    variables = {
        name: labelled(("sample", "plateau"), table[..., k], text)
        for k, (name, text) in enumerate(names.items())
    }
    variables["count"] = labelled("sample", [len(row) for row in rows], "plateaus")
    config = {"variable": variable, "band": band, "least": least, "tol": tol, "clock": clock}
    like = torch.from_numpy(np.array(data[variable].values[:0], np.float64))
    return xr.Dataset(variables, attrs=store.provenance("etdyn.plateaus/1", config, like))


def _clock(one: xr.Dataset, clock: str) -> Array:
    if clock == "clock":
        tau: Array = one["clock"].values
        return tau
    with np.errstate(divide="ignore"):
        log: Array = np.log(one["time"].values)
    return log


def _spans(
    value: Array, tau: Array, away: npt.NDArray[np.bool_], band: float, least: float
) -> list[tuple[int, int]]:
    """First and last index of every plateau, in order of time; the longest are placed first."""
    free = away.copy()
    spans: list[tuple[int, int]] = []
    while True:
        i, j, length = _longest(value, tau, free, band)
        if length < least:
            return sorted(spans)
        spans.append((i, j))
        free[i : j + 1] = False


def _longest(
    value: Array, tau: Array, free: npt.NDArray[np.bool_], band: float
) -> tuple[int, int, float]:
    """Ends and length of the longest run of free times whose values stay within the band."""
    first, last, length = 0, 0, 0.0
    for i in np.flatnonzero(free):
        run = value[i:]
        inside = np.maximum.accumulate(run) - np.minimum.accumulate(run) <= band
        stop = np.flatnonzero(~(free[i:] & inside))
        j = i + (int(stop[0]) if len(stop) else len(run)) - 1
        if tau[j] - tau[i] > length:
            first, last, length = int(i), int(j), float(tau[j] - tau[i])
    return first, last, length


@torch.no_grad()
def attention_clusters(
    betas: Sequence[float],
    tokens: Sequence[int],
    dim: int,
    times: Sequence[float],
    *,
    samples: int = 4,
    seed: int = 0,
    angle: float = math.radians(10),
) -> xr.Dataset:
    """Clustering of tokens under attention alone, against beta and their number.

    One head with query^T key = 1 and self-attention, on the unit sphere: the energy
    -1/beta sum_c log sum_b exp(beta u_b.u_c) draws all tokens together, at large beta through
    long-lived groups. Tokens start uniformly on the sphere of dim - 2 dimensions that zero mean
    and unit length leave.

    Args:
        betas: inverse temperatures > 0.
        tokens: numbers of tokens, at least 2.
        dim: features of a token, at least 3.
        times: increasing, in the clock of the sphere, from 0.
        samples: random starts of every pair of beta and number, common to all beta.
        seed: of the starts.
        angle: as in `token_clusters`.

    Returns:
        Dataset (schema "etdyn.attention_clusters/1") with dims (beta, tokens, time, sample):
        `mean_cosine`, `effective_rank`, `clusters`, `energy`, `residual`, `clock`.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: Geshkovski, Letrouit, Polyanskiy and Rigollet, arXiv 2312.10794 (there the energy
    -sum exp(beta u_b.u_c) / beta, without the logarithm).
    """
    check_count("dim", dim, least=3)
    check_count("samples", samples)
    for beta, n in itertools.product(betas, tokens):
        check_positive("betas", beta)
        check_count("tokens", n, least=2)
    names = ("mean_cosine", "effective_rank", "clusters", "energy", "residual", "clock")
    rows = []
    for beta in betas:
        system = _consensus_system(dim, beta)
        row = []
        for n in tokens:
            draw = torch.Generator().manual_seed(seed)
            x0 = torch.randn(samples, n, dim, generator=draw, dtype=torch.float64)
            flow = solve(system, x0, times, rtol=1e-7, atol=1e-9, gradient=None)
            row.append(token_clusters(system, flow, angle)[list(names)])
        rows.append(xr.concat(row, xr.Variable("tokens", list(tokens))))
    config = {"dim": dim, "samples": samples, "seed": seed, "angle": angle}
    result = xr.concat(rows, xr.Variable("beta", [float(b) for b in betas]))
    return result.assign_attrs(store.provenance("etdyn.attention_clusters/1", config, x0))


def _consensus_system(dim: int, beta: float) -> System:
    attention = Attention(dim, 1, dim, float(beta), self_attention=True).double()
    attention.query[0] = attention.key[0] = torch.eye(dim, dtype=torch.float64)
    lagrangian = LayerNorm(dim, eps=0.0).double()
    lagrangian.set_gamma(dim**-0.5)  # so that |g| = 1
    return System(lagrangian, attention, "sphere")
