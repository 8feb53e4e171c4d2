"""Lyapunov exponents of flows and maps, and how fast solves backwards lose what flows forget.

Tangent vectors are carried along the trajectory and made orthonormal again at every interval
(Benettin's method): the logarithms of what QR takes out of them are the growth.

What theory says (ET-F29), with kappa the eigenvalues of the leaky flow's stability operator at
the equilibrium (`spectrum`) and two more null directions a token, its mean and radius:

    leaky             -kappa, and -1 for the null directions
    et in log-time    1 - kappa, and 0: a perturbation of x grows as t^(1 - kappa)
    et in time        0, all of them: the growth is algebraic
    sphere            -lambda; here tangents to the spheres only
    Euler steps eta   log|1 - eta kappa| a step of the leaky flow
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import flags, labelled
from etdyn.analysis.operators import flow_jacobian
from etdyn.checks import bad, check_choice, check_count, check_finite, check_positive
from etdyn.solve import Solution, Status
from etdyn.solve.batched import integrate_batched
from etdyn.solve.solution import describe_system
from etdyn.solve.tableaus import TABLEAUS
from etdyn.systems import System

__all__ = ["backward_growth", "lyapunov_exponents", "map_exponents"]

BLOCKS = 8  # at most, for the error
CLOCKS = ("time", "log time")
MAX_STEPS = 100_000  # of an interval


@torch.no_grad()
def lyapunov_exponents(
    system: System,
    x0: Tensor,
    times: Tensor | Sequence[float],
    k: int = 1,
    *,
    clock: str = "time",
    align: float = 0.5,
    rtol: float = 1e-6,
    seed: int = 0,
) -> xr.Dataset:
    """The k leading Lyapunov exponents along the flow from x0, each with its finite-time error.

    State and tangents are integrated together by batched dopri5, which controls the error of
    both, and the tangents are made orthonormal again at every one of `times`.

    Args:
        system: under "et", "leaky" or "sphere".
        x0: start at times[0], `(batch, token, feature)`, float64.
        times: increasing flow times at which to reorthonormalise, three or more. Within an
            interval all tangents turn to the slowest direction, so that the error of exponent i
            grows as rtol exp((exponent_1 - exponent_i) interval).
        k: how many, at most the number of directions.
        clock: "time", growth per flow time; "log time", growth per log t, for times > 0.
        align: the share of the clock, in [0, 1), in which vectors turn and growth is not counted.
        rtol: relative tolerance; the absolute one is a hundredth.
        seed: of the first tangents.

    Returns:
        Dataset "etdyn.exponents/1", dims sample, mode and time (times[1:]): `exponent`,
        descending where all has settled; `error`, the standard error over up to eight blocks of
        the counted intervals and the drift from their first to their second half, added in
        squares; `running`, the mean growth since `align`; `residual`, |P grad E| relative to
        the force: where it is gone the state rests, and the exponents are those of an
        equilibrium, better had from `spectrum`; `status`, and NaN where a sample failed.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: Benettin et al. 1980; ET-F29.
    """
    check_choice("clock", clock, CLOCKS)
    check_positive("rtol", rtol)
    grid = _check_times(times, clock)
    system.check(x0, "x0")
    check_finite("x0", x0)
    x = system.prepare(x0)
    u = _orthonormal(_project(system, x, _directions(x, k, seed)))[0]
    status = torch.full((len(x),), Status.FINISHED, dtype=torch.int8)
    logs, residuals = [], []
    for t0, t1 in zip(grid[:-1].tolist(), grid[1:].tolist(), strict=True):
        x, u, ended = _advance(system, x, u, t1 - t0, rtol)
        status = torch.where(status == Status.FINISHED, ended, status)
        x = system.prepare(x)
        u, growth = _orthonormal(_project(system, x, u))
        logs.append(
            growth.masked_fill((status != Status.FINISHED)[:, None].to(x.device), torch.nan)
        )
        residuals.append(_relative_residual(system, x))
    ticks = (grid.log() if clock == "log time" else grid).numpy()
    data = _growth(torch.stack(logs), ticks, align)
    rest = torch.stack(residuals).cpu().numpy()
    data["residual"] = labelled(("time", "sample"), rest, "residual relative to the force")
    data["status"] = flags("sample", status.numpy(), Status)
    config = {"k": k, "clock": clock, "align": align, "rtol": rtol, "seed": seed,
              "system": describe_system(system)}  # fmt: skip
    return _dataset(data, ("time", grid[1:].numpy(), "flow time"), config, x)


def _advance(
    system: System, x: Tensor, u: Tensor, width: float, rtol: float
) -> tuple[Tensor, Tensor, Tensor]:
    """State and tangents `(batch, k, token, feature)` after a time interval, and statuses.

    The flow knows no time, so that every interval is [0, 1] in its own unit: at a late t, steps
    would fall below what t can resolve.
    """
    batch, k, tokens, dim = u.shape

    def velocity(t: Tensor, y: Tensor, index: Tensor) -> Tensor:
        here, tangents = y[:, :tokens], y[:, tokens:].reshape(-1, tokens, dim)
        several = index.repeat_interleave(k)
        turned = flow_jacobian(system.select(several), here.repeat_interleave(k, 0), tangents)
        v = system.select(index).velocity(0.0, here)
        return width * torch.cat([v, turned.reshape(len(y), k * tokens, dim)], 1)

    start = torch.cat([x, u.reshape(batch, k * tokens, dim)], 1)
    found = integrate_batched(
        velocity, start, (0.0, 1.0), TABLEAUS["dopri5"], rtol=rtol, atol=rtol / 100,
        max_steps=MAX_STEPS,
        tokens=None if system._tokens is None else system._tokens.repeat(1, 1 + k),
    )  # fmt: skip
    end, moved = found.x_end[:, :tokens], found.x_end[:, tokens:]
    return end, moved.reshape(u.shape), found.status.cpu().to(torch.int8)


@torch.no_grad()
def map_exponents(
    advance: Callable[[Tensor], Tensor],
    x0: Tensor,
    steps: int,
    k: int = 1,
    *,
    every: int = 1,
    align: float = 0.5,
    seed: int = 0,
) -> xr.Dataset:
    """The k leading Lyapunov exponents of an iterated map, per step, with finite-time errors.

    Args:
        advance: a differentiable map of states, such as `lambda x: system.map(x, 0.5)`, or an
            Euler step `lambda x: x + 0.1 * system.velocity(0.0, x)`; forward-mode autograd must
            pass through it.
        x0: start, `(batch, token, feature)`.
        steps: of the map, a multiple of `every` and at least three times that.
        k: how many, at most the number of directions.
        every: steps between two QR decompositions.
        align, seed: as in `lyapunov_exponents`.

    Returns:
        Dataset "etdyn.exponents/1", dims sample, mode and step: `exponent`, `error` and `running`
        as in `lyapunov_exponents`. A mode that the map sends to zero has -inf.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: Benettin et al. 1980.
    """
    check_count("every", every)
    check_count("steps", steps, least=3 * every)
    if steps % every:
        raise bad("steps", f"a multiple of every = {every}", steps)
    check_finite("x0", x0)
    x, u = x0, _orthonormal(_directions(x0, k, seed))[0]
    logs = []
    for step in range(1, steps + 1):
        pairs = [torch.func.jvp(advance, (x,), (u[:, i],)) for i in range(k)]
        x, u = pairs[0][0], torch.stack([pair[1] for pair in pairs], 1)
        if step % every == 0:
            u, growth = _orthonormal(u)
            logs.append(growth)
    ticks = np.arange(0, steps + 1, every)
    data = _growth(torch.stack(logs), ticks.astype(np.float64), align)
    data = {name: (tuple("step" if d == "time" else d for d in v[0]), *v[1:])
            for name, v in data.items()}  # fmt: skip
    config = {"map": getattr(advance, "__name__", "map"), "steps": steps, "k": k, "every": every,
              "align": align, "seed": seed}  # fmt: skip
    return _dataset(data, ("step", ticks[1:], "steps"), config, x)


def _directions(x: Tensor, k: int, seed: int) -> Tensor:
    """Random tangents, `(batch, k, token, feature)`; the same for every sample."""
    check_count("k", k)
    if k > x[0].numel():
        raise bad("k", f"at most {x[0].numel()} directions", k)
    generator = torch.Generator().manual_seed(seed)
    u = torch.randn(k, *x.shape[1:], generator=generator, dtype=torch.float64)
    return u.to(x).expand(len(x), -1, -1, -1)


def _project(system: System, x: Tensor, u: Tensor) -> Tensor:
    """u without what does not move: absent tokens, and on the spheres what is not tangent."""
    kept = torch.stack([system.keep(v) for v in u.unbind(1)], 1)
    if system.dynamics == "sphere":
        kept = system.lagrangian.tangent(x.unsqueeze(1), kept)
    return kept


def _orthonormal(u: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal tangents, and the logarithm of what each had grown by, `(batch, k)`."""
    q, r = torch.linalg.qr(u.flatten(2).mT)
    return q.mT.reshape(u.shape), r.diagonal(dim1=-2, dim2=-1).abs().log()


def _relative_residual(system: System, x: Tensor) -> Tensor:
    force = system.keep(system.force(x)).square().sum((1, 2)).sqrt()
    return system.residual(x) / force.clamp(min=torch.finfo(x.dtype).tiny)


def _growth(logs: Tensor, ticks: NDArray[np.float64], align: float) -> dict[str, Any]:
    """Exponents, errors and running means of logarithms `(interval, batch, k)`."""
    if not 0 <= align < 1:
        raise bad("align", "a share in [0, 1)", align)
    gained = logs.cpu().numpy()
    first = int(np.searchsorted(ticks, ticks[0] + align * (ticks[-1] - ticks[0]) * (1 - 1e-12)))
    first = min(first, len(gained) - 2)
    widths = np.diff(ticks)[:, None, None]
    running = np.full_like(gained, np.nan)
    running[first:] = gained[first:].cumsum(0) / widths[first:].cumsum(0)

    def means(count: int) -> NDArray[np.float64]:
        parts = np.array_split(np.arange(first, len(gained)), min(count, len(gained) - first))
        return np.stack([gained[p].sum(0) / widths[p].sum(0) for p in parts])

    with np.errstate(invalid="ignore"):
        blocks, halves = means(BLOCKS), means(2)
        scatter = blocks.std(0, ddof=1) / math.sqrt(len(blocks))
        error = np.hypot(scatter, halves[1] - halves[0])
    modes = ("sample", "mode")
    return {
        "exponent": labelled(modes, running[-1], "Lyapunov exponent"),
        "error": labelled(modes, error, "scatter of blocks and drift between halves"),
        "running": labelled(("time", *modes), running, "mean growth rate so far"),
    }


def _dataset(
    data: dict[str, Any], axis: tuple[str, Any, str], config: dict[str, Any], like: Tensor
) -> xr.Dataset:
    name, values, meaning = axis
    coords = {name: labelled(name, values, meaning), "sample": np.arange(len(like))}
    return xr.Dataset(data, coords, store.provenance("etdyn.exponents/1", config, like))


def _check_times(times: Tensor | Sequence[float], clock: str) -> Tensor:
    grid = torch.as_tensor(times, dtype=torch.float64).detach().cpu()
    if grid.ndim != 1 or len(grid) < 3 or not bool((grid[1:] > grid[:-1]).all()):
        raise bad("times", "three or more increasing times", f"{tuple(grid.shape)} times")
    if clock == "log time" and float(grid[0]) <= 0:
        raise bad("times", "positive times in log-time", float(grid[0]))
    return grid


@torch.no_grad()
def backward_growth(solution: Solution, clock: str = "time", *, seed: int = 0) -> xr.Dataset:
    """How a solve back along a trajectory amplifies an error at its end, measured in g.

        du/dt = J(x(t)) u from the end to the start, along the states that were saved

    The direction that the flow forgets fastest takes over: backwards the error grows as
    exp(kappa_max (T - t)) along the leaky flow, and as (T/t)^kappa_max along the published one,
    whose adjoint is d lambda/dt = M H lambda. This is what breaks an adjoint that integrates the
    state back to the start; `gradient="checkpoint"` and `implicit` do not.

    Args:
        solution: with states at an odd number of times, five or more, equally spaced in the
            clock: RK4 takes two intervals at a time. Their width times kappa_max must be small.
        clock: "time" or "log time" (for times > 0).
        seed: of the error at the end.

    Returns:
        Dataset "etdyn.backward_growth/1", dims time (those of the steps) and sample: `growth`,
        log(|M u(t)| / |M u(T)|), and `rate`, its slope against -clock.

    Raises:
        ValueError: wrong input, naming the argument.

    Source: ET-F34; A-F9.
    """
    check_choice("clock", clock, CLOCKS)
    if solution.saved:
        raise bad("solution", "one that saved its states", f"only {sorted(solution.saved)}")
    t, x, system = _check_times(solution.t, clock), solution.x, solution.system
    ticks = t.log() if clock == "log time" else t
    width = float(ticks[1] - ticks[0])
    even = bool(((ticks.diff() - width).abs() <= 1e-6 * abs(width)).all())
    if len(t) < 5 or len(t) % 2 == 0 or not even:
        raise bad("solution", f"5, 7, 9... times equally spaced in {clock}", f"{len(t)} times")
    scale = t if clock == "log time" else torch.ones_like(t)  # dt / d clock
    u = _project(system, x[-1], _directions(x[-1], 1, seed))[:, 0]

    def slope(i: int, u: Tensor) -> Tensor:
        return float(scale[i]) * flow_jacobian(system, x[i], u)

    def size(i: int, u: Tensor) -> Tensor:
        return system.lagrangian.metric(x[i], u).square().sum((1, 2)).sqrt()

    sizes = [size(-1, u)]
    for i in range(len(t) - 1, 1, -2):
        u = _step_back(slope, i, width, u)
        sizes.append(size(i - 2, u))
    growth = (torch.stack(sizes[::-1]) / sizes[0]).log().cpu().numpy()
    rate = -np.gradient(growth, ticks[::2].numpy(), axis=0)
    grid = ("time", "sample")
    data = {
        "growth": labelled(grid, growth, "log growth of an error in g since the end"),
        "rate": labelled(grid, rate, f"growth rate backwards in {clock}"),
    }
    coords = {"time": labelled("time", t[::2].numpy(), "flow time"), "sample": np.arange(len(u))}
    config = {"clock": clock, "seed": seed, "solution": solution.config}
    return xr.Dataset(data, coords, store.provenance("etdyn.backward_growth/1", config, u))


def _step_back(slope: Callable[[int, Tensor], Tensor], i: int, width: float, u: Tensor) -> Tensor:
    """RK4 of du/d clock = slope from tick i to tick i - 2."""
    k1 = slope(i, u)
    k2 = slope(i - 1, u - width * k1)
    k3 = slope(i - 1, u - width * k2)
    k4 = slope(i - 2, u - 2 * width * k3)
    return u - width / 3 * (k1 + 2 * k2 + 2 * k3 + k4)
