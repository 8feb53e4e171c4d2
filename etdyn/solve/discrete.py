"""The discrete Energy Transformer: explicit Euler with a fixed step, and its noise variant."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from torch import Tensor

from etdyn.checks import check_count, check_finite, check_positive
from etdyn.solve.solution import Failure, Solution, SolveError, Stats, Status, describe_system
from etdyn.systems import System

__all__ = ["descend", "iterate"]


def iterate(
    system: System,
    x: Tensor,
    step: float,
    steps: int,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Tensor]:
    """Yield the `steps` states after x of x <- x + step v(x) + sqrt(step) noise N(0, 1).

    One evaluation a step. Under the sphere dynamics every state is renormalised.
    """
    for _ in range(steps):
        x = x + step * system.velocity(0.0, x)
        if noise:
            kick = torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
            x = x + step**0.5 * noise * system.keep(kick)
        if system.dynamics == "sphere":
            x = system.prepare(x)
        yield x


def descend(
    system: System,
    x0: Tensor,
    step: float = 0.1,
    steps: int = 12,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
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
        throw: raise `SolveError` where a sample becomes NaN or infinite.

    Returns:
        Solution with steps + 1 states at times k * step. Differentiable.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
        SolveError: see throw.

    Source: Hoover et al. 2023, equation 6; ET section 1.4.
    """
    check_positive("step", step)
    check_count("steps", steps, least=0)
    check_positive("noise", noise, zero=True)
    system.check(x0, "x0")
    check_finite("x0", x0)
    step, steps, noise = float(step), int(steps), float(noise)
    began = time.perf_counter()
    states = [system.prepare(x0)]
    states += iterate(system, states[0], step, steps, noise=noise, generator=generator)
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
