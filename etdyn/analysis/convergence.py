"""How fast a flow converges: decay rates of its energy, and the log-time that makes them constant.

Times, energies and rates are dimensionless.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import flags, labelled
from etdyn.checks import bad, check_choice, check_positive
from etdyn.solve import Solution

__all__ = ["FitStatus", "conjugate", "decay_rate", "line"]

Floats = NDArray[np.float64]

CLOCKS = ("time", "log time", "intrinsic")
ROUNDINGS = 100  # a gap below this many roundings of the energy is noise
LEAST_POINTS = 8  # in a window


class FitStatus(IntEnum):
    """Whether a window carries a rate."""

    FITTED = 0
    SHORT = 1  # the gap falls by too few decades before the run ends or rounding begins
    FEW_POINTS = 2  # fewer than eight saved times in the window
    CURVED = 3  # the two halves of the window have different slopes: not yet, or no longer, a law


@dataclass
class _Fit:
    """The window of one sample and its line."""

    status: FitStatus
    rate: float = math.nan
    standard_error: float = math.nan
    rate_early: float = math.nan
    rate_late: float = math.nan
    window_start: float = math.nan
    window_end: float = math.nan
    window_decades: float = math.nan
    points: int = 0


_MEANINGS = {
    "rate": "decay rate of the energy gap in the clock",
    "standard_error": "standard error of the regression",
    "rate_early": "rate in the early half of the window",
    "rate_late": "rate in the late half of the window",
    "window_start": "start of the window in the clock",
    "window_end": "end of the window in the clock",
    "window_decades": "decades by which the gap falls in the window",
    "points": "saved times in the window",
}


def decay_rate(
    run: Solution | xr.Dataset,
    limit: Tensor,
    clock: str = "time",
    *,
    slowest: Tensor | None = None,
    decades: float = 3.0,
    straight: float = 0.01,
) -> xr.Dataset:
    """How fast the energy falls to its limit: -d log(energy - limit) / d clock, fitted.

        clock "time"       gap ~ exp(-rate t)      leaky, sphere: rate -> 2 kappa_min, 2 lambda_min
        clock "log time"   gap ~ t^-rate           et: rate -> 2 kappa_min, with the kappa of the
                                                   leaky flow at the same equilibrium
        clock "intrinsic"  gap ~ exp(-rate tau)    tau is the mean clock of the tokens

    The window is the last one in which the gap falls by `decades`, ending at the last saved time
    or where the gap meets rounding. It is refused, with the reason in `status`, where it is too
    short, or where the slopes of its two halves differ by more than `straight`: modes take over
    from each other slowly, and a straight piece further up belongs to a faster one. With the
    defaults two modes whose rates differ by less than about a tenth can still pass for one, so
    that a fitted rate may be too large by as much. And FITTED says that the line is straight, not
    whose it is: slower modes with no amplitude in the window are not seen (the trained digits
    model has a run that is 43 % off; `studies.convergence` projects on the eigenvectors).
    `local_rate` shows the whole run.

    Args:
        run: Solution, or a Dataset of schema "etdyn.solution/1", with many saved times.
        limit: `(sample,)`, the same energy at the equilibrium: `system.energy` there, with the
            `relative` of the Dataset. Its error must be far below the gap.
        clock: see above; "log time" leaves out t <= 0.
        slowest: `(sample,)`, the least eigenvalue at the equilibrium by theory; adds `predicted`,
            twice this as the energy is quadratic, and `deviation`, rate / predicted - 1.
        decades: the fall of the gap in the window, > 0.
        straight: the largest |late slope - early slope| / |slope|, > 0.

    Returns:
        Dataset "etdyn.decay_rate/1", dims sample and time: `rate` and its `standard_error`, NaN
        unless `status` is FITTED; `rate_early` and `rate_late` of the halves, `window_start` and
        `window_end` in the clock, and `points`, wherever there is a window; `window_decades`;
        `gap`, `local_rate`, and the coordinate `clock`.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET 1.5.5, ET-F29.
    """
    check_choice("clock", clock, CLOCKS)
    check_positive("decades", decades)
    check_positive("straight", straight)
    data = run.to_xarray(states=False) if isinstance(run, Solution) else run
    time, when, energy = _columns(data, clock)
    batch = energy.shape[1]
    bottom = _per_sample("limit", limit, batch)
    gap = energy - bottom
    floor = ROUNDINGS * np.finfo(data["energy"].dtype).eps * np.abs(bottom)
    fits = [_fit(when[:, i], gap[:, i], floor[i], decades, straight) for i in range(batch)]
    values = {
        name: labelled("sample", [asdict(fit)[name] for fit in fits], meaning)
        for name, meaning in _MEANINGS.items()
    }
    values["status"] = flags("sample", [fit.status for fit in fits], FitStatus)
    values["gap"] = labelled(("time", "sample"), gap, "energy above its limit")
    local = _local_rate(when, gap)
    values["local_rate"] = labelled(("time", "sample"), local, "decay rate between saved times")
    if slowest is not None:
        predicted = 2 * _per_sample("slowest", slowest, batch)
        deviation = np.array([fit.rate for fit in fits]) / predicted - 1
        values["predicted"] = labelled("sample", predicted, "twice the slowest eigenvalue")
        values["deviation"] = labelled("sample", deviation, "rate / predicted - 1")
    coords = {
        "time": labelled("time", time, "flow time"),
        "clock": labelled(("time", "sample"), when, clock),
        "sample": np.arange(batch),
    }
    config = {"clock": clock, "decades": decades, "straight": straight}
    config["run"] = data.attrs.get("etdyn_config")
    attrs = store.provenance("etdyn.decay_rate/1", config, torch.from_numpy(gap))
    return xr.Dataset(values, coords, attrs)


def _columns(data: xr.Dataset, clock: str) -> tuple[Floats, Floats, Floats]:
    """Time `(time,)`, clock and energy `(time, sample)`."""
    needed = {"time", "energy"} | ({"clock"} if clock == "intrinsic" else set())
    if missing := needed - set(data.variables):
        raise bad("run", f"a solution with {sorted(needed)}", f"none of {sorted(missing)}")
    if clock == "log time":
        data = data.isel(time=data["time"].to_numpy() > 0)
    if data.sizes["time"] < 3:
        raise bad("run", "at least three saved times", data.sizes["time"])
    energy = data["energy"].transpose("time", "sample").to_numpy().astype(np.float64)
    time = data["time"].to_numpy()
    if clock == "intrinsic":
        return time, data["clock"].transpose("time", "sample").to_numpy().astype(np.float64), energy
    column = np.log(time) if clock == "log time" else time
    return time, np.repeat(column[:, None], energy.shape[1], 1), energy


def _fit(when: Floats, gap: Floats, floor: float, decades: float, straight: float) -> _Fit:
    noise = np.flatnonzero(~(gap > floor))  # NaN, after a sample's end, among them
    end = int(noise[0]) if len(noise) else len(gap)
    when, log = when[:end], np.log10(gap[:end])
    above = np.flatnonzero(log >= log[-1] + decades) if end else noise[:0]
    if not len(above):
        fall = float(log[0] - log[-1]) if end else 0.0
        return _Fit(FitStatus.SHORT, window_decades=fall)
    when, log = when[above[-1] :], log[above[-1] :] - log[-1]
    fit = _Fit(
        FitStatus.FEW_POINTS, window_start=float(when[0]), window_end=float(when[-1]),
        window_decades=float(log[0]), points=len(when),
    )  # fmt: skip
    if len(when) < LEAST_POINTS:
        return fit
    log = log * math.log(10)
    middle = int(np.clip(np.searchsorted(when, (when[0] + when[-1]) / 2), 2, len(when) - 3))
    slope, error = line(when, log)
    fit.rate_early = -line(when[: middle + 1], log[: middle + 1])[0]
    fit.rate_late = -line(when[middle:], log[middle:])[0]
    fit.status = FitStatus.CURVED
    if abs(fit.rate_late - fit.rate_early) <= straight * abs(slope):
        fit.status, fit.rate, fit.standard_error = FitStatus.FITTED, -slope, error
    return fit


def line(x: Floats, y: Floats) -> tuple[float, float]:
    """Slope of the least-squares line through points, and its standard error."""
    u = x - x.mean()
    slope = float(u @ y / (u @ u))
    left = y - y.mean() - slope * u
    return slope, math.sqrt(float(left @ left) / max(len(x) - 2, 1) / float(u @ u))


def _local_rate(when: Floats, gap: Floats) -> Floats:
    with np.errstate(invalid="ignore", divide="ignore"):
        log = np.log(gap)
        columns = zip(when.T, log.T, strict=True)
        return np.stack([-np.gradient(y, x) for x, y in columns], 1)


def _per_sample(name: str, value: Any, batch: int) -> Floats:
    array = torch.as_tensor(value).detach().cpu().double().numpy()
    if array.shape != (batch,):
        raise bad(name, f"shape ({batch},)", f"shape {array.shape}")
    return array


def conjugate(solution: Solution, offset: float = 1.0) -> Solution:
    """The leaky trajectory of a published one, or back: z(s) = exp(-s) x(exp(s) - offset).

    If g does not depend on the scale of x (eps = 0), x solves dx/dt = F(x) exactly where z solves
    dz/ds = F(z) - z, so that the published flow is the leaky one in log-time, and rests where it
    does. With eps > 0 the difference is O(eps / sigma^2) at the start, and dies as t grows.

    Args:
        solution: of a system with LayerNorm under "et" or "leaky", whose states were saved.
        offset: t + offset = exp(s), > 0; an "et" start at t = 0 is a leaky one at
            s = log(offset), divided by offset. The flows know no t, so that every offset is right.

    Returns:
        Solution under the other dynamics at the mapped times; same statuses and cost.

    Raises:
        ValueError: another dynamics; no states; an "et" time at or before -offset.

    Source: ET 1.5.3, ET-F27; for Euler steps the same map is ET-F28.
    """
    check_positive("offset", offset)
    names = {"et": "leaky", "leaky": "et"}
    check_choice("solution.system.dynamics", solution.system.dynamics, tuple(names))
    if solution.saved:
        raise bad("solution", "one that saved its states", f"only {sorted(solution.saved)}")
    forward = solution.system.dynamics == "et"
    if forward and float(solution.t[0]) <= -offset:
        raise bad("solution", f"times after -offset = {-offset:g}", float(solution.t[0]))

    def moved(t: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        scale = t + offset if forward else t.exp()
        factor = (1 / scale if forward else scale).to(x).reshape(-1, *[1] * (x.ndim - 1))
        return (scale.log() if forward else scale - offset), x * factor

    t, x = moved(solution.t, solution.x)
    return Solution(
        t, x, solution.status, solution.stats,
        solution.system.with_dynamics(names[solution.system.dynamics]),
        config={"conjugate": {"offset": offset, "of": solution.config}},
        failure=solution.failure,
        ends=None if solution.ends is None else moved(*solution.ends),
    )  # fmt: skip
