"""Numbers of `convergence` that its words and its figures share, from its result alone."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import xarray as xr
from scipy.stats import spearmanr

from etdyn.analysis.convergence import FitStatus

Array = npt.NDArray[np.float64]

RUNS = ("published", "euler", "leaky")
MAJORITY = 0.5  # of the gap in the slowest modes, for a window that can show their rate


def record_of(result: xr.DataTree) -> dict[str, Any]:
    """Configuration, model and baseline."""
    record: dict[str, Any] = json.loads(result.attrs["etdyn_config"])
    return record


def group(result: xr.DataTree, name: str) -> xr.Dataset:
    """One group of the result."""
    data: xr.Dataset = result[name].to_dataset()
    return data


def horizon_of(result: xr.DataTree) -> float:
    """Of training."""
    model = record_of(result)["model"]
    return float(model["steps"] * model["step"])


def straight(fit: xr.Dataset) -> npt.NDArray[np.bool_]:
    """Which runs have a straight window of three decades."""
    found: npt.NDArray[np.bool_] = fit["status"].values == FitStatus.FITTED
    return found


def supported(fit: xr.Dataset) -> npt.NDArray[np.bool_]:
    """Which windows are straight, and hold more of the slowest modes than of all others."""
    if "slow_share" not in fit:
        return straight(fit)
    share = np.nan_to_num(fit["slow_share"].values)
    held: npt.NDArray[np.bool_] = share >= MAJORITY
    return straight(fit) & held


def correlations(result: xr.DataTree, run: str) -> tuple[Array, Array]:
    """Rank correlation of error and energy of every image: up to the training horizon, beyond."""
    data, horizon = group(result, run), horizon_of(result)
    time = data["time"].values
    t = np.expm1(time) if run == "leaky" else time
    parts = []
    for rows in ((t > 0) & (t <= horizon * 1.001), t >= horizon * 0.999):
        pairs = zip(data["energy"].values[rows].T, data["error"].values[rows].T, strict=True)
        parts.append(np.array([float(spearmanr(a, b)[0]) for a, b in pairs]))
    return parts[0], parts[1]


def same_state(ends: xr.Dataset, way: str) -> tuple[Array, float]:
    """Share of pairs in one state: pairs of masks, by image; and pairs of images, each one mask."""
    label = ends["label"].sel(way=way).values
    kind, image = ends["kind"].values, ends["image"].values
    many = kind == "repeated"
    by_image = [pairs(label[many & (image == k)]) for k in np.unique(image[many])]
    return np.array(by_image), pairs(label[kind == "single"])


def pairs(label: npt.NDArray[np.int64]) -> float:
    """Share of pairs with the same label."""
    n = len(label)
    same = (label[:, None] == label[None]) & (label[:, None] >= 0)
    return float((same.sum() - (label >= 0).sum()) / (n * (n - 1))) if n > 1 else float("nan")


def unstable(leaky: xr.Dataset) -> xr.DataArray:
    """Unstable directions at every look, as far as they were counted, (look, sample)."""
    return (leaky["lowest"] < 0).sum("mode")


def decades(rates: xr.Dataset) -> Array:
    """Decades of time in which the published flow's gap falls by three, by theory."""
    needed: Array = 3 / rates["predicted"].values
    return needed


def spread(values: npt.ArrayLike, digits: str = ".2f") -> str:
    """Median and quartiles in words."""
    low, middle, high = np.nanquantile(np.asarray(values, np.float64), (0.25, 0.5, 0.75))
    return f"{middle:{digits}} (quartiles {low:{digits}} to {high:{digits}})"
