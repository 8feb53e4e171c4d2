"""What a solver's answer is worth, and what it costs: orders, errors in g, work against precision.

Times and errors are dimensionless.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.convergence import Floats, line
from etdyn.analysis.distance import activation_distance
from etdyn.analysis.labels import flags, labelled
from etdyn.checks import bad, check_choice, check_count, check_positive
from etdyn.problems import Problem
from etdyn.solve import Method, Solution, Status, available_methods, solve
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = [
    "DisagreementError",
    "error_in_g",
    "method_order",
    "reference_solution",
    "work_precision",
]

LONG = 0.1  # s; caches and allocators do not matter to a solve that takes longer
SAME_START = 1e-4  # in g; a float32 start is within 1e-6 of its float64 one


@torch.no_grad()
def method_order(
    problem: Problem, methods: Sequence[str], steps: Sequence[float], end: float = 1.0
) -> xr.Dataset:
    """The order at which fixed-step methods converge: slope of log error over log step.

    The error is the largest RMS over tokens and features, over samples, of x(end) - exact(end).
    Steps whose error is below 100 roundings of the state are left out of the fit.

    Args:
        problem: with an exact motion, or a reference as `Problem.exact`.
        methods: names from `available_methods(fixed_step=True)`.
        steps: at least three step sizes, decreasing, each end / a whole number.
        end: flow time > 0.

    Returns:
        Dataset "etdyn.method_order/1", dims solver and step: `error`; `local_order` between a step
        and the next smaller one (NaN at the last); `order` with its `standard_error`, NaN where
        fewer than three steps are above rounding.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET-F13; A 1.4 (DiffEqDevTools' convergence tests).
    """
    check_positive("end", end)
    for name in methods:
        check_choice("methods", name, available_methods(fixed_step=True))
    sizes = np.asarray(steps, np.float64)
    counts = end / sizes
    whole = np.abs(counts - counts.round()) < 1e-9 * counts
    if len(sizes) < 3 or not (np.diff(sizes) < 0).all() or not whole.all():
        raise bad("steps", f"three or more decreasing parts of end = {end:g}", list(steps))
    exact = problem.exact(end)
    floor = 100 * torch.finfo(exact.dtype).eps * float(exact.square().mean().sqrt())
    error = np.array([[_state_error(problem, Method(name, step=h), end) for h in sizes.tolist()]
                      for name in methods])  # fmt: skip
    used = np.where(error > floor, error, np.nan)
    local = np.full_like(error, np.nan)
    local[:, :-1] = np.diff(np.log(used), axis=1) / np.diff(np.log(sizes))
    fits = np.array([_order(sizes, row) for row in used])
    config = {"end": end, "system": describe_system(problem.system)}
    return xr.Dataset(
        {
            "error": labelled(("solver", "step"), error, "RMS error of the state, worst sample"),
            "local_order": labelled(("solver", "step"), local, "order to the next smaller step"),
            "order": labelled("solver", fits[:, 0], "order of convergence"),
            "standard_error": labelled("solver", fits[:, 1], "standard error of the regression"),
        },
        {"solver": list(methods), "step": labelled("step", sizes, "step size")},
        store.provenance("etdyn.method_order/1", config, exact),
    )


def _state_error(problem: Problem, method: Method, end: float) -> float:
    found = solve(problem.system, problem.start, [0.0, end], method, gradient=None, throw=False)
    if found.failure is not None:
        return math.nan
    return float((found.x[-1] - problem.exact(end)).square().mean((1, 2)).max().sqrt())


def _order(steps: Floats, errors: Floats) -> tuple[float, float]:
    good = np.isfinite(errors)
    if good.sum() < 3:
        return math.nan, math.nan
    return line(np.log(steps[good]), np.log(errors[good]))


class DisagreementError(RuntimeError):
    """Two ways to a reference differ by more than was asked: neither can be trusted so far."""


def reference_solution(
    system: System, x0: Tensor, times: Tensor | Sequence[float], agreement: float = 1e-8
) -> Solution:
    """A flow that two methods agree on: batched dopri5 and batched tsit5.

    Both run at a tolerance of agreement / 100, and where they disagree, as at the kinks of relu
    memories, once more at agreement / 10000.

    Args:
        system: float64.
        x0, times: as in `solve`.
        agreement: largest distance in g of the two, over times, samples and tokens, >= 1e-9.

    Returns:
        Solution of dopri5; `config["agreement"]` is what was measured.

    Raises:
        DisagreementError: they do not agree.
        SolveError, ValueError, TypeError: as in `solve`.
    """
    if x0.dtype != torch.float64:
        raise TypeError(f"x0: expected torch.float64 for a reference, got {x0.dtype}")
    check_positive("agreement", agreement)
    if agreement < 1e-9:
        raise bad("agreement", "at least 1e-9, which float64 can carry", agreement)
    for tolerance in (agreement / 1e2, agreement / 1e4):
        first, second = (
            solve(system, x0, times, name, rtol=tolerance, atol=tolerance, gradient=None)
            for name in ("batched_dopri5", "batched_tsit5")
        )
        apart = float(error_in_g(second, first)["error_max"].max())
        if apart <= agreement:
            first.config["agreement"] = apart
            return first
    raise DisagreementError(
        f"dopri5 and tsit5 at rtol {tolerance:.1g} differ by {apart:.3g} in g, more than the "
        f"agreement {agreement:.3g} that was asked for"
    )


@torch.no_grad()
def error_in_g(solution: Solution, reference: Solution) -> xr.Dataset:
    """Distance in g from a reference at its times, per sample, in units of the sphere's radius.

    States are compared in the reference's dtype and under its system, so that a float32 run can
    be held against a float64 reference.

    Args:
        solution: with states; it may have ended early.
        reference: with states, of the same samples.

    Returns:
        Dataset "etdyn.error_in_g/1", dims time and sample: `error_max` and `error_mean` over the
        tokens that exist; NaN at times that the solution does not hold.

    Raises:
        ValueError: other shapes, observables instead of states, or no common time.
    """
    for name, run in (("solution", solution), ("reference", reference)):
        if run.saved:
            raise bad(name, "one that saved its states", f"only {sorted(run.saved)}")
    if solution.x.shape[1:] != reference.x.shape[1:]:
        raise bad("solution", f"states {tuple(reference.x.shape[1:])}", tuple(solution.x.shape[1:]))
    system, t = reference.system, solution.t
    near = (t[None] - reference.t[:, None]).abs() <= 1e-12 * reference.t[-1].abs()
    if not bool(near.any()):
        raise bad("solution", "times of the reference", t.tolist())
    worst = reference.x.new_full(reference.x.shape[:2], torch.nan)
    mean = worst.clone()
    for k in near.any(1).nonzero().flatten().tolist():
        x = solution.x[int(near[k].nonzero()[0])].to(reference.x)
        apart = system.keep(activation_distance(system, x, reference.x[k]))
        worst[k], mean[k] = apart.amax(1), system.token_mean(apart)
    grid = ("time", "sample")
    config = {"solution": solution.config, "reference": reference.config}
    return xr.Dataset(
        {
            "error_max": labelled(grid, worst.cpu().numpy(), "distance in g, worst token"),
            "error_mean": labelled(grid, mean.cpu().numpy(), "distance in g, mean over tokens"),
        },
        {"time": labelled("time", reference.t.numpy(), "flow time"),
         "sample": np.arange(reference.x.shape[1])},
        store.provenance("etdyn.error_in_g/1", config, reference.x),
    )  # fmt: skip


def work_precision(
    system: System,
    x0: Tensor,
    methods: Mapping[str, Sequence[Method]],
    reference: Solution,
    *,
    repeats: int = 3,
    max_steps: int = 100_000,
) -> xr.Dataset:
    """Error against cost, for methods at several steps or tolerances.

    Args:
        system: what moves; in its own dtype, which need not be the reference's.
        x0: start of the reference, in the dtype of the system.
        methods: label -> settings of one method, equally many for each label.
        reference: of the same flow at the times that count, see `reference_solution`.
        repeats: timed solves after one that is not timed, for the median, >= 1; a failing solve
            is not repeated.
        max_steps: of a solve.

    Returns:
        Dataset "etdyn.work_precision/1", dims solver, setting and sample: `error`, the largest
        distance in g over tokens and times after the first, NaN where the sample failed;
        `error_median` and `error_max` over samples, NaN where any failed; `failures`, samples;
        `status`; `evaluations` per sample; `seconds`, the median of a whole solve;
        `unconverged`, implicit Adams steps whose corrector gave up; `step_or_rtol`, the setting.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: A 1.4 (DiffEqDevTools' WorkPrecisionSet: a failure is a NaN cell).
    """
    check_count("repeats", repeats)
    lengths = {len(row) for row in methods.values()}
    if len(lengths) != 1 or 0 in lengths:
        raise bad("methods", "labels with equally many settings", sorted(lengths))
    if system.dynamics != reference.system.dynamics:
        raise bad("reference", f"a flow of {system.dynamics!r}", reference.system.dynamics)
    cells = [[_cell(system, x0, m, reference, (repeats, max_steps)) for m in row]
             for row in methods.values()]  # fmt: skip
    columns = {key: np.array([[cell[key] for cell in row] for row in cells]) for key in cells[0][0]}
    error = columns["error"]
    grid, each = ("solver", "setting"), ("solver", "setting", "sample")
    data = {
        "error": labelled(each, error, "distance in g, worst token and time"),
        "error_median": labelled(grid, np.median(error, -1), "median error over samples"),
        "error_max": labelled(grid, error.max(-1), "error of the worst sample"),
        "failures": labelled(grid, np.isnan(error).sum(-1), "samples that failed"),
        "status": flags(each, columns["status"], Status),
        "evaluations": labelled(each, columns["evaluations"], "forces per sample"),
        "seconds": (grid, columns["seconds"], {"units": "s", "long_name": "median wall time"}),
        "unconverged": labelled(grid, columns["unconverged"], "steps whose corrector gave up"),
        "step_or_rtol": labelled(grid, columns["setting"], "step size or relative tolerance"),
    }
    config = {
        "methods": {label: [m.describe() for m in row] for label, row in methods.items()},
        "repeats": repeats, "max_steps": max_steps, "reference": reference.config,
        "system": describe_system(system),
    }  # fmt: skip
    coords = {"solver": list(methods), "sample": np.arange(len(x0))}
    return xr.Dataset(data, coords, store.provenance("etdyn.work_precision/1", config, x0))


def _cell(
    system: System, x0: Tensor, method: Method, reference: Solution, limits: tuple[int, int]
) -> dict[str, Any]:
    """One method at one setting; limits: repeats and max_steps."""
    repeats, max_steps = limits

    def run() -> Solution:
        return solve(
            system, x0, reference.t, method, gradient=None, max_steps=max_steps, throw=False
        )

    found = run()
    good = bool((found.status == Status.FINISHED).all())
    short = good and found.stats.seconds < LONG
    timed = [run() for _ in range(repeats)] if short else [found]
    error = error_in_g(found, reference)["error_max"].to_numpy()
    if not error[0].max() <= SAME_START:
        raise bad("x0", "the start of the reference", f"one {error[0].max():.3g} away in g")
    return {
        "error": error[1:].max(0),  # NaN where a time was not reached
        "status": found.status.numpy(),
        "evaluations": torch.as_tensor(found.stats.evaluations).expand(len(x0)).numpy(),
        "seconds": statistics.median(each.stats.seconds for each in timed),
        "unconverged": found.stats.unconverged,
        "setting": method.step if method.fixed_step else method.rtol,
    }
