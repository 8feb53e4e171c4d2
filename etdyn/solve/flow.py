"""`solve`: the flow of a System, validated and counted, by any method."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from etdyn.checks import bad, check_choice, check_count, check_finite
from etdyn.solve.engine import Field
from etdyn.solve.methods import Method
from etdyn.solve.observables import Observable, Recorder
from etdyn.solve.per_sample import PerSample
from etdyn.solve.progress import TimeBar
from etdyn.solve.solution import Solution, SolveError, describe_system
from etdyn.solve.stepping import Stepping
from etdyn.solve.stopping import Stop
from etdyn.solve.together import solve_together
from etdyn.systems import System

__all__ = ["solve"]


def solve(
    system: System,
    x0: Tensor,
    times: Tensor | Sequence[float],
    method: str | Method = "dopri5",
    *,
    step: float | None = None,
    rtol: float = 1e-6,
    atol: float = 1e-8,
    gradient: str | None = "direct",
    stop: Stop | None = None,
    save: Sequence[Observable] | None = None,
    max_steps: int = 100_000,
    throw: bool = True,
    progress: bool | str = False,
) -> Solution:
    """Integrate dx/dt = system.velocity(t, x) from times[0] and save the states at `times`.

    Args:
        system: what moves.
        x0: start, `(batch, token, feature)`; under the sphere dynamics it is normalised first.
        times: increasing flow times, at least two; the first is the start's.
        method: a name from `available_methods()`, or a `Method`, which carries its own step,
            tolerances and options.
        step: of a fixed-step method.
        rtol, atol: of an adaptive one; the error is the largest per-sample RMS.
        gradient: "direct" differentiates the solver's own operations; "checkpoint" the same with
            memory that grows as the logarithm of the steps, for about three more forward passes;
            "backsolve" integrates the adjoint equation backwards, restarted at anchors of its
            own choice, and raises `GradientError` where it drifts; None keeps no graph.
        stop: end at equilibrium, tested after every accepted step (scipy_solver: at save times);
            with a batched method or a stepper every sample ends on its own.
        save: observables to keep at the save times instead of the states, by name (see
            `named_observables`) or as functions of (system, x); they appear in `Solution.saved`.
        max_steps: attempted steps in the whole solve (scipy_solver: evaluations; batched methods
            and steppers: steps of every sample).
        throw: raise `SolveError` on NONFINITE, DT_MIN and MAX_STEPS.
        progress: show a bar of the flow time; a string is its label.

    Returns:
        Solution. After an early end `t` and `x` hold every saved time before it and the last
        accepted state; where samples end at different times (batched methods, steppers), `x` is NaN
        after a sample's end, which `t_end` and `x_end` hold.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
        SolveError: see throw.
    """
    if isinstance(method, str):
        method = Method(method, step, rtol, atol)
    elif step is not None:
        raise bad("step", "none beside a Method, which has its own", step)
    if gradient is not None:
        check_choice("gradient", gradient, ("direct", "checkpoint", "backsolve"))
    check_count("max_steps", max_steps)
    system.check(x0, "x0")
    check_finite("x0", x0)
    when = _check_times(times).to(x0.device)
    method.check_precision(x0.dtype)
    needs = gradient is not None and torch.is_grad_enabled() and _wants_gradient(system, x0)
    if needs and gradient != "direct" and (method.per_sample or method.stepping):
        raise bad("gradient", f"'direct' or None with {method.name!r}", gradient)
    if needs and not method.differentiable:
        raise bad("gradient", f"None (no gradient passes through {method.name!r})", gradient)
    if needs and gradient != "direct" and save is not None:
        raise bad("save", f"none with gradient={gradient!r}", save)
    recorder = Recorder(system, save)
    began = time.perf_counter()
    with torch.set_grad_enabled(needs), TimeBar(progress, when) as bar:
        start = system.prepare(x0)
        if method.per_sample or method.stepping:
            make = PerSample if method.per_sample else Stepping
            solution = make(system, method, max_steps, stop, bar).solve(recorder, start, when)
        else:
            field = Field(system, method, max_steps, stop, bar)
            solution = solve_together(
                field, recorder, start, when, method=method, gradient=gradient if needs else None
            )
    solution.stats.seconds = time.perf_counter() - began
    solution.config = {
        "method": method.describe(),
        "gradient": gradient,
        "stop": None if stop is None else vars(stop),
        "max_steps": max_steps,
        "system": describe_system(system),
    }
    if throw and solution.failure is not None:
        raise SolveError(solution)
    return solution


def _check_times(times: Tensor | Sequence[float]) -> Tensor:
    grid = torch.as_tensor(times, dtype=torch.float64).detach()
    if grid.ndim != 1 or len(grid) < 2:
        raise bad("times", "at least two times in one dimension", f"shape {tuple(grid.shape)}")
    if not bool(torch.isfinite(grid).all()):
        raise bad("times", "finite times", "NaN or infinity")
    if not bool((grid[1:] > grid[:-1]).all()):
        raise bad("times", "strictly increasing times", grid.tolist())
    return grid


def _wants_gradient(system: System, x0: Tensor) -> bool:
    return x0.requires_grad or any(p.requires_grad for p in system.parameters())
