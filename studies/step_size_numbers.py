"""What the page and the figures of `step_size` take from its result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xarray as xr
from scipy.stats import spearmanr

DYNAMICS = ("et", "leaky", "sphere")
KINDS = ("masked", "open", "CLS")
RESAMPLES = 400
RUNGS = {
    "2 / Lipschitz bound, start": ("lipschitz", "start"),
    "2 / Lipschitz bound, rest": ("lipschitz", "rest"),
    "descent bound, start": ("descent", "start"),
    "descent bound, rest": ("descent", "rest"),
    "predicted limit, rest": ("linear", None),
    "measured limit, rest": ("limit", None),
    "first rise in the map": ("rise", None),
}


def first_rise(found: xr.Dataset) -> xr.DataArray:
    """The smallest step size with an energy rise within the map, `(sample,)`; infinite if none."""
    rose = found["rises"].isel(step=-1) > 0
    return found["step_size"].where(rose, np.inf).min("step_size")


def overflowed(found: xr.Dataset) -> xr.DataArray:
    """Whether a run of the map has left the numbers, `(sample, step_size)`."""
    return ~(abs(found["energy"].isel(step=-1)) < np.inf)


def rung(result: xr.DataTree, law: str, name: str) -> np.ndarray[Any, Any]:
    """Step sizes of a quantity of RUNGS over the images, `(sample,)`."""
    variable, state = RUNGS[name]
    if variable == "rise":
        return np.asarray(first_rise(result[f"map/{law}"].to_dataset()))
    group = result[f"limits/{law}"].to_dataset()
    values = group[variable] if state is None else group[variable].sel(state=state)
    return np.asarray(values[group["image"].values])


def deviation(result: xr.DataTree, group: str) -> float:
    """The largest |measured / predicted - 1|; NaN where nothing limits the step."""
    ratio = result[group].to_dataset()["ratio"].values
    finite = ratio[np.isfinite(ratio)]
    return float(np.abs(finite - 1).max()) if len(finite) else math.nan


def equilibria(group: xr.Dataset) -> list[np.ndarray[Any, Any]]:
    """Samples that came to rest in one place, by energy to seven digits, lowest first."""
    energy = group["energy"].values
    labels = [f"{e:.6e}" for e in energy]
    distinct = sorted(set(labels), key=float)
    return [np.flatnonzero([label == one for label in labels]) for one in distinct]


def best_counts(scored: xr.Dataset, samples: np.ndarray[Any, Any] | None = None) -> Any:
    """The number of steps, one and more, with the least mean error at every step size."""
    error = scored["error"].values
    error = error if samples is None else error[samples]
    return 1 + error[:, :, 1:].mean(0).argmin(1)


def crossover(result: xr.DataTree) -> float:
    """The step that moves a masked token by its own length at the start."""
    found = result["first_step"].to_dataset().isel(scale=0, step_size=0)
    return float(found["step_size"] / found["displacement"].sel(kind="masked").mean())


def slope(result: xr.DataTree, smallest: float, largest: float) -> tuple[float, float, float]:
    """Exponent of the best count in the step size between two step sizes, and its 95 % interval
    over resampled images; NaN with fewer than three step sizes.
    """
    scored = result["scored"].to_dataset()
    size = scored["step_size"].values
    chosen = (size >= smallest * 0.999) & (size <= largest * 1.001)
    if chosen.sum() < 3:
        return math.nan, math.nan, math.nan
    draw, images = np.random.default_rng(0), scored.sizes["sample"]

    def fit(samples: np.ndarray[Any, Any] | None) -> float:
        counts = best_counts(scored, samples)[chosen]
        return float(np.polyfit(np.log(size[chosen]), np.log(counts), 1)[0])

    fits = [fit(draw.integers(0, images, images)) for _ in range(RESAMPLES)]
    low, high = np.quantile(fits, (0.025, 0.975))
    return fit(None), float(low), float(high)


def correlations(scored: xr.Dataset) -> dict[str, np.ndarray[Any, Any]]:
    """Rank correlations of energy and error, of every image, along and across runs."""
    step, steps = scored.attrs["step"], scored.attrs["steps"]
    size = scored["step_size"].values
    counts = (step * steps / size).round().astype(int)
    same = np.flatnonzero((counts >= 1) & (counts < scored.sizes["step"]))
    own = int(np.abs(size - step).argmin())
    last = scored.sizes["step"]
    picks: dict[str, tuple[Any, Any]] = {
        f"along the trained step,\nfirst {steps} steps": (own, np.arange(steps + 1)),
        f"along the trained step,\nafter {steps} steps": (own, np.arange(steps, last)),
        f"across step sizes,\nafter {steps} steps": (np.arange(len(size)), steps),
        f"across step sizes,\nat the horizon {step * steps:g}": (same, counts[same]),
    }
    energy, error = scored["energy"].values, scored["error"].values
    found = {}
    for name, (i, n) in picks.items():
        pairs = zip(energy[:, i, n], error[:, i, n], strict=True)
        ranks = np.array([spearmanr(a, b).statistic if len(a) > 2 else np.nan for a, b in pairs])
        found[name] = ranks[np.isfinite(ranks)]
    return found


def difference(unseen: xr.Dataset, name: str) -> tuple[float, float]:
    """Mean paired difference from the trained step and count, and its 95 % half-width."""
    gap = (unseen["error"].sel(candidate=name) - unseen["error"].isel(candidate=0)).values
    return float(gap.mean()), 1.96 * float(gap.std(ddof=1)) / math.sqrt(len(gap))
