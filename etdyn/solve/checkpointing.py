"""gradient="checkpoint": the direct gradient from states that are computed again, not kept.

The steps are cut into pieces of 8, 64, 512, ... that are nested torch checkpoints: autograd holds
at most 8 states per level and the graph of one piece of 8 steps, so memory grows with the
logarithm of the number of steps, and each step is taken once more per level. The same steps are
taken with the same operations, so values are those of gradient="direct", and so are gradients where
steps are fixed. The lengths of adaptive steps are constants here; "direct" differentiates them too
(dopri5 on a weighted graph: 1e-4 apart at rtol 1e-3, where the solve is 3e-3 off).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchdiffeq._impl.interp import _interp_evaluate
from torchdiffeq._impl.misc import _PerturbFunc
from torchdiffeq._impl.odeint import SOLVERS
from torchdiffeq._impl.rk_common import RKAdaptiveStepsizeODESolver, _runge_kutta_step
from torchdiffeq._impl.solvers import FixedGridODESolver

from etdyn.checks import bad
from etdyn.solve.euler import iterate
from etdyn.solve.methods import Method
from etdyn.solve.solution import GradientError
from etdyn.systems import System

__all__ = ["StepLog", "check_checkpoint", "checkpointed", "checkpointed_iterate", "replay"]

LEAF = 8  # steps whose graph is held at once
BRANCH = 8  # pieces of a piece

State = tuple[Tensor, ...]
Segment = Callable[[State, int, int], tuple[State, list[Tensor]]]
RightHandSide = Callable[[Tensor, Tensor], Tensor]


def checkpointed(
    segment: Segment, state: State, first: int, last: int
) -> tuple[State, list[Tensor]]:
    """Take the steps first, ..., last - 1 and keep the states that `segment` keeps.

    Args:
        segment: `segment(state, a, b)` takes the steps a, ..., b - 1 and returns the state after
            them and a list of tensors to keep. Called again with the same arguments it must do
            the same; it may be called for any part of the steps.
        state: tensors of any shape, all that one step needs of the one before.

    Returns:
        What `segment` would return for all steps, with a graph where gradients are enabled.

    Source: Griewank and Walther 2000 (recursive checkpointing), with a fixed branching.
    """
    if last - first <= LEAF:
        return segment(state, first, last)
    span = LEAF
    while span * BRANCH < last - first:
        span *= BRANCH
    kept: list[Tensor] = []
    for a in range(first, last, span):
        # the tensors are arguments of their own: torch would hold on to those inside a tuple
        state, new = checkpoint(
            _piece, segment, a, min(a + span, last), *state,
            use_reentrant=False, preserve_rng_state=False,
        )  # fmt: skip
        kept += new
    return state, kept


def _piece(segment: Segment, first: int, last: int, *state: Tensor) -> tuple[State, list[Tensor]]:
    return checkpointed(segment, state, first, last)


def checkpointed_iterate(
    system: System,
    x: Tensor,
    step: float,
    steps: int,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[Tensor]:
    """The states that `iterate` yields, `(batch, token, feature)` each, under checkpoints.

    Noise is drawn once and again alike: the generator is wound back for a piece that is computed
    again, and left where it was.
    """
    draws = _Draws(generator or _default_generator(x)) if noise else None

    def segment(state: State, first: int, last: int) -> tuple[State, list[Tensor]]:
        if draws is None:
            new = list(iterate(system, state[0], step, last - first))
        else:
            with draws.of(first):
                new = list(
                    iterate(
                        system, state[0], step, last - first,
                        noise=noise, generator=draws.generator,
                    )
                )  # fmt: skip
        return (new[-1],), new

    return checkpointed(segment, (x,), 0, steps)[1] if steps else []


def _default_generator(x: Tensor) -> torch.Generator:
    if x.device.type == "cpu":
        return torch.default_generator
    index = x.device.index if x.device.index is not None else torch.cuda.current_device()
    found: torch.Generator = torch.cuda.default_generators[index]
    return found


class _Draws:
    """Where the generator stood when each leaf was first computed."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        self.stood: dict[int, Tensor] = {}

    @contextmanager
    def of(self, first: int) -> Iterator[None]:
        """Draw what this leaf drew the first time."""
        now = self.generator.get_state()
        again = first in self.stood
        self.generator.set_state(self.stood.setdefault(first, now))
        try:
            yield
        finally:
            if again:
                self.generator.set_state(now)


def check_checkpoint(method: Method) -> None:
    """Raise `ValueError` unless the method's steps can be taken again one by one."""
    solver = SOLVERS[method.name]
    one_step = issubclass(solver, FixedGridODESolver) and not method.multistep
    if not (one_step or issubclass(solver, RKAdaptiveStepsizeODESolver)):
        what = "remembers earlier steps" if method.multistep else "does not report its steps"
        raise bad("method", 'a Runge-Kutta method with gradient="checkpoint"',
                  f"{method.name!r}, which {what}")  # fmt: skip


class StepLog:
    """The accepted steps of a solve, noted through torchdiffeq's callbacks.

    Args:
        method: a Runge-Kutta method, fixed or adaptive.

    Raises:
        ValueError: another method.
    """

    def __init__(self, method: Method) -> None:
        check_checkpoint(method)
        self.callback = "callback_step" if method.fixed_step else "callback_accept_step"
        self.starts: list[Tensor] = []
        self.lengths: list[Tensor] = []

    def attach(self, field: nn.Module) -> None:
        """Note what the field is told, after its own callback, from now on."""
        before = getattr(field, self.callback, None)

        def noting(t: Tensor, x: Tensor, dt: Tensor) -> None:
            if before is not None:
                before(t, x, dt)
            self.starts.append(t.detach())
            self.lengths.append(dt.detach())

        setattr(field, self.callback, noting)


def replay(
    velocity: RightHandSide,
    x0: Tensor,
    times: Tensor,
    method: Method,
    log: StepLog,
    *,
    options: dict[str, Any] | None = None,
    expected: Tensor | None = None,
) -> Tensor:
    """Take the logged steps again, under checkpoints.

    Args:
        velocity: `velocity(t, x)`, the right-hand side without callbacks.
        x0: start, `(batch, token, feature)`.
        times: float64 `(time,)`, what the first pass reached; the last is the end of a step.
        method: of the first pass.
        log: of the first pass, which may have gone on beyond `times`.
        options: of the torchdiffeq solver, as in the first pass; they change no step here.
        expected: `(time, batch, token, feature)`, the states of the first pass.

    Returns:
        The states at `times`, `(time, batch, token, feature)`.

    Raises:
        GradientError: the states differ from the expected ones by more than rounding, so the
            right-hand side is not deterministic.
    """
    taken = _Steps(velocity, x0, times, method, log=log, options=options or {})
    kept = checkpointed(taken.segment, taken.state, 0, taken.count)[1]
    x = torch.stack([x0, *kept])
    if expected is not None:
        _check_same(x.detach(), expected)
    return x


def _check_same(x: Tensor, expected: Tensor) -> None:
    off = float((x - expected).detach().abs().max())
    if not off <= torch.finfo(x.dtype).eps ** 0.75 * float(expected.detach().abs().max()):
        raise GradientError(
            f'gradient="checkpoint": the same steps taken again end {off:.3g} away; is the '
            "velocity random, or has the system changed since?"
        )


class _Steps:
    """The logged steps with the solver's own arithmetic."""

    def __init__(
        self, velocity: RightHandSide, x0: Tensor, times: Tensor, method: Method, *,
        log: StepLog, options: dict[str, Any],
    ) -> None:  # fmt: skip
        starts = torch.stack(log.starts).to(times) if log.starts else times[:0]
        self.count = int((starts < times[-1]).sum())
        bounds = torch.cat([starts[: self.count], times[-1:]])
        self.bounds = bounds.unbind()
        self.lengths = bounds.diff().unbind() if method.fixed_step else log.lengths
        # the save times that lie in each step: t0 < t <= t1
        self.inside: dict[int, list[Tensor]] = {}
        for t, k in zip(
            times[1:], (torch.searchsorted(bounds, times[1:]) - 1).tolist(), strict=True
        ):
            self.inside.setdefault(k, []).append(t)
        self.func = _PerturbFunc(velocity)
        self.solver = SOLVERS[method.name](
            func=self.func, y0=x0.detach(), rtol=method.rtol, atol=method.atol, **options
        )
        self.adaptive = not method.fixed_step
        self.state: State = (x0,)
        if self.adaptive:
            self.state = x0, self.func(times[0], x0)

    def segment(self, state: State, first: int, last: int) -> tuple[State, list[Tensor]]:
        """See `checkpointed`."""
        kept: list[Tensor] = []
        for k in range(first, last):
            inside = self.inside.get(k, [])
            state, new = (self._adaptive if self.adaptive else self._fixed)(state, k, inside)
            kept += new
        return state, kept

    def _fixed(self, state: State, k: int, inside: list[Tensor]) -> tuple[State, list[Tensor]]:
        t0, t1, dt = self.bounds[k], self.bounds[k + 1], self.lengths[k]
        change, _ = self.solver._step_func(self.func, t0, dt, t1, state[0])
        x = state[0] + change
        return (x,), [x for _ in inside]

    def _adaptive(self, state: State, k: int, inside: list[Tensor]) -> tuple[State, list[Tensor]]:
        x0, f0 = state
        t0, t1, dt = self.bounds[k], self.bounds[k + 1], self.lengths[k]
        x, f, _, stages = _runge_kutta_step(self.func, x0, f0, t0, dt, t1, self.solver.tableau)
        kept = []
        if inside:
            coefficients = self.solver._interp_fit(x0, x, stages, dt)
            kept = [_interp_evaluate(coefficients, t0, t1, t) for t in inside]
        return (x, f), kept
