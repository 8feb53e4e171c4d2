"""The discrete Energy Transformer: explicit Euler with a fixed step, and its noise variant."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from etdyn.checks import check_choice, check_count, check_finite, check_positive
from etdyn.solve.checkpointing import checkpointed_iterate
from etdyn.solve.euler import iterate
from etdyn.solve.solution import Failure, Solution, SolveError, Stats, Status, describe_system
from etdyn.systems import System

__all__ = ["descend"]


def descend(
    system: System,
    x0: Tensor,
    step: float = 0.1,
    steps: int = 12,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    gradient: str | None = "direct",
    throw: bool = True,
) -> Solution:
    """Run the published discrete model: explicit Euler on the dynamics of the system.

        x_{k+1} = x_k + step v(x_k) + sqrt(step) noise N(0, 1)

    The noise is the isotropic one of the published graph classifier. It is not a Langevin
    noise for exp(-E/T): that needs a covariance of M^-1 (ET-F33).

    Args:
        system: what moves.
        x0: `(batch, token, feature)`.
        step: alpha > 0; for the leaky dynamics, 1 is the self-consistency map.
        steps: T >= 0.
        noise: standard deviation s >= 0 (0.02 as published).
        generator: of the noise.
        gradient: "direct"; "checkpoint", which keeps the states but not what lies between them
            and runs again for it; or None, which keeps no graph.
        throw: raise `SolveError` where a sample becomes NaN or infinite.

    Returns:
        Solution with steps + 1 states at times k * step. Differentiable by any of the gradients.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
        SolveError: see throw.

    Source: Hoover et al. 2023, equation 6; ET section 1.4.
    """
    check_positive("step", step)
    check_count("steps", steps, least=0)
    check_positive("noise", noise, zero=True)
    if gradient is not None:
        check_choice("gradient", gradient, ("direct", "checkpoint"))
    system.check(x0, "x0")
    check_finite("x0", x0)
    step, steps, noise = float(step), int(steps), float(noise)
    began = time.perf_counter()
    move = checkpointed_iterate if gradient == "checkpoint" else iterate
    with torch.set_grad_enabled(torch.is_grad_enabled() and gradient is not None):
        states = [system.prepare(x0)]
        states += move(system, states[0], step, steps, noise=noise, generator=generator)
    x = torch.stack(states)
    solution = Solution(
        t=torch.arange(steps + 1, dtype=torch.float64) * step,
        x=x,
        status=torch.zeros(len(x0), dtype=torch.int8),
        stats=Stats(evaluations=steps, accepted=steps, seconds=time.perf_counter() - began),
        system=system,
        config={
            "method": {"name": "descend", "step": step, "steps": steps, "noise": noise},
            "system": describe_system(system),
        },
    )
    return _end_at_last_finite(solution, throw)


def _end_at_last_finite(solution: Solution, throw: bool) -> Solution:
    finite = torch.isfinite(solution.x.detach()).flatten(2).all(2)
    if bool(finite.all()):
        return solution
    last = int(finite.all(1).long().argmin()) - 1
    broken = (~finite[last + 1]).nonzero().flatten().tolist()
    solution.status.fill_(Status.INTERRUPTED)
    solution.status[broken] = Status.NONFINITE
    solution.failure = Failure(
        float(solution.t[last]), tuple(broken), "the next step is NaN or infinite"
    )
    solution.t, solution.x = solution.t[: last + 1], solution.x[: last + 1]
    if throw:
        raise SolveError(solution)
    return solution
