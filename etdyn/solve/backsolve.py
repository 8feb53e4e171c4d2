"""gradient="backsolve": the adjoint equation backwards in time, from anchors, with a check.

Backwards a contractive flow expands, so the state that is integrated along with the adjoint is
lost after a few 1/lambda, and torchdiffeq's adjoint with it, silently (A-F9). Here the forward
pass leaves anchors: accepted states no further apart than about one e-fold of the fastest rate.
The backward pass starts anew from each of them, measures how far the state that it brought along
has drifted from the stored one, and refuses to go on where that is too far.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torchdiffeq import odeint

from etdyn.checks import bad, check_positive
from etdyn.solve.engine import Ended, Field, grid, solver_options
from etdyn.solve.methods import Method
from etdyn.solve.solution import BacksolveReport, GradientError

__all__ = ["AnchorLog", "BacksolveReport", "GradientError", "backsolve"]

PROBE_EVERY = 4  # accepted steps between two estimates of the fastest rate
WARM_UP = 8  # power iterations of the first estimate; later ones go on from it with one
FLOOR = 1e-3  # of a sample's largest state: below it, drift is measured against this

RightHandSide = Callable[[Tensor, Tensor], Tensor]


class AnchorLog:
    """Accepted states of a solve, about `spacing` e-folds of the fastest mode apart.

    The rate is the modulus of the Jacobian's largest eigenvalue, per sample, by power iteration
    on differences of the velocity; it costs about 2/4 evaluations a step. Where a step alone is
    longer (the stability limit of dopri5 is 3.3 e-folds), every step is an anchor.

    Args:
        velocity: `velocity(t, x)`, the right-hand side without callbacks.
        method: any of torchdiffeq's that reports its steps.
        spacing: > 0, e-folds between anchors.
        report: takes the probes and the rate.

    Raises:
        ValueError: a method that does not report its steps.
    """

    def __init__(
        self,
        velocity: RightHandSide,
        method: Method,
        spacing: float = 1.0,
        report: BacksolveReport | None = None,
    ) -> None:
        check_positive("spacing", spacing)
        fixed = "callback_accept_step" not in method.callbacks
        self.callback = "callback_step" if fixed else "callback_accept_step"
        if self.callback not in method.callbacks:
            raise bad("method", "one that reports its steps", repr(method.name))
        self.velocity, self.spacing = velocity, spacing
        self.report = report or BacksolveReport()
        self.starts: list[float] = []  # of every step
        self.times: list[float] = []  # of the anchors
        self.states: list[Tensor] = []
        self.direction = self.rate = self.passed = torch.empty(0)

    def attach(self, field: nn.Module) -> None:
        """Note what the field is told, after its own callback, from now on."""
        before = getattr(field, self.callback, None)

        def noting(t: Tensor, x: Tensor, dt: Tensor) -> None:
            if before is not None:
                before(t, x, dt)
            with torch.no_grad():
                self._note(t, x.detach(), float(dt))

        setattr(field, self.callback, noting)

    def _note(self, t: Tensor, x: Tensor, dt: float) -> None:
        if len(self.starts) % PROBE_EVERY == 0:
            self._probe(t, x)
        ahead = self.rate * dt
        if bool((self.passed + ahead > self.spacing).any()):
            self.times.append(float(t))
            self.states.append(x)
            self.passed = torch.zeros_like(ahead)
        self.passed = self.passed + ahead
        self.starts.append(float(t))

    def _probe(self, t: Tensor, x: Tensor) -> None:
        """Power iteration u <- J u / |J u|, where J u is a difference of velocities."""
        rounds = 1
        if not self.starts:
            # a fixed direction: the result must not depend on a global generator
            index = torch.arange(x[0].numel(), device=x.device, dtype=torch.float64)
            wave = torch.cos(index * (index + 1.0) * 0.7390851332151607)
            self.direction = wave.to(x).reshape(x[0].shape).expand_as(x)
            self.rate = self.passed = torch.zeros_like(x[:, 0, 0])
            rounds = WARM_UP
        step = torch.finfo(x.dtype).eps ** 0.5 * (_rms(x) + torch.finfo(x.dtype).eps ** 0.5)
        here = self.velocity(t, x)
        tiny = torch.finfo(x.dtype).tiny
        for _ in range(rounds):
            unit = self.direction / _rms(self.direction).clamp(min=tiny)[:, None, None]
            change = self.velocity(t, x + step[:, None, None] * unit) - here
            self.direction = change / step.clamp(min=tiny)[:, None, None]
            self.rate = _rms(self.direction)
        self.report.probes += rounds + 1
        self.report.rate = max(self.report.rate, float(self.rate.max()))


def backsolve(
    field: Field,
    x0: Tensor,
    times: Tensor,
    x: Tensor,
    *,
    method: Method,
    anchors: AnchorLog,
    max_drift: float = 1e-3,
    max_steps: int = 100_000,
    report: BacksolveReport | None = None,
) -> Tensor:
    """Give the states of a solve without graph the gradient of the adjoint equation.

        da/dt = -J^T a,   dL/dtheta = integral of (dv/dtheta)^T a

    with a per-sample scale of a, so that tolerances do not depend on the size of the loss. The
    error is the largest per-sample RMS of x and a; the parameters' integrals are left out of it.

    Args:
        field: `field(t, x)`, counts what it evaluates; its parameters get the gradients.
        x0: start, `(batch, token, feature)`, what the gradient flows to.
        times: float64 `(time,)`, what the first pass reached.
        x: `(time, batch, token, feature)`, its states, without graph.
        method: of the first pass; the backward pass uses it too, with its tolerances.
        anchors: attached to the field during the first pass.
        max_drift: largest relative distance between the state that was integrated backwards and
            the stored one; relative to the sample's RMS, or 1e-3 of its largest.
        max_steps: of the backward pass between two anchors.
        report: takes anchors and drift.

    Returns:
        x, connected to x0 and to the parameters. Differentiable once.

    Raises:
        GradientError: while autograd runs; drift, a NaN, or a step that underflows.

    Source: Chen et al. 2018, equations 4 and 5; Kidger et al. 2021 (seminorm); ET-F34, A-F9.
    """
    check_positive("max_drift", max_drift)
    parameters = [p for p in field.parameters() if p.requires_grad]
    nodes = _timeline(times, x, anchors)
    plan = _Plan(field, parameters, method, times.device, max_drift, max_steps, anchors.starts,
                 [n.time for n in nodes], [n.saved for n in nodes],
                 report or anchors.report)  # fmt: skip
    plan.report.anchors = len(nodes) - 1
    between = [n.state for n in nodes if n.state is not None]
    result: Tensor = _Backsolve.apply(plan, x, between, x0, *parameters)  # type: ignore[no-untyped-call]
    return result


@dataclass
class _Node:
    time: float
    saved: int  # index of the save time, or -1
    state: Tensor | None  # None: the saved one


def _timeline(times: Tensor, x: Tensor, anchors: AnchorLog) -> list[_Node]:
    """Save times and anchors in order, each once."""
    when = times.tolist()
    nodes = [_Node(t, k, None) for k, t in enumerate(when)]
    close = 1e-12 * (when[-1] - when[0])
    for t, state in zip(anchors.times, anchors.states, strict=True):
        k = bisect.bisect(when, t)
        neighbours = when[max(k - 1, 0) : k + 1]
        if when[0] < t < when[-1] and all(abs(t - s) > close for s in neighbours):
            nodes.append(_Node(t, -1, state))
    return sorted(nodes, key=lambda n: n.time)


@dataclass
class _Plan:
    """All that the backward pass needs besides tensors, which autograd keeps."""

    field: Field
    parameters: list[nn.Parameter]
    method: Method
    device: torch.device
    max_drift: float
    max_steps: int
    starts: list[float]
    times: list[float]
    saved: list[int]
    report: BacksolveReport
    options: dict[str, Any] = field(default_factory=dict)

    def interval(self, late: float, early: float, state: tuple[Tensor, ...], scale: Tensor) -> Any:
        """(x, a, parameter integrals) from `late` back to `early`."""
        ends = torch.tensor([late, early], dtype=torch.float64, device=self.device)
        options = solver_options(self.field.system, self.method, ends)
        options.pop("first_step", None)
        if self.method.fixed_step:
            options["grid_constructor"] = lambda func, y, t: grid(self.method, t)
        else:
            steps = bisect.bisect_left(self.starts, late) - bisect.bisect_left(self.starts, early)
            rms = options["norm"]
            options |= {
                "norm": lambda parts: torch.maximum(rms(parts[0]), rms(parts[1])),
                "step_t": ends[1:],
                "first_step": (late - early) / max(1, steps),
                "max_num_steps": self.max_steps,
            }
        try:
            found = odeint(
                self._augmented(scale), state, ends, method=self.method.name,
                rtol=self.method.rtol, atol=self.method.atol, options=options,
            )  # fmt: skip
        except (AssertionError, Ended) as error:  # torchdiffeq's and the field's way to give up
            raise GradientError(
                f'gradient="backsolve": the adjoint could not be integrated from t = {late:.6g} '
                f"back to {early:.6g}: {error}"
            ) from error
        return [part[-1] for part in found]

    def _augmented(self, scale: Tensor) -> Callable[[Tensor, Any], tuple[Tensor, ...]]:
        def dynamics(t: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                x = state[0].detach().requires_grad_(True)
                v = self.field(t, x)
                pulled = torch.autograd.grad(
                    v, (x, *self.parameters), scale * state[1], allow_unused=True
                )
            inputs = (x, *self.parameters)
            back = [torch.zeros_like(i) if p is None else p
                    for i, p in zip(inputs, pulled, strict=True)]  # fmt: skip
            return (v.detach(), -back[0] / scale, *(-b for b in back[1:]))

        return dynamics

    def check(self, t: float, x: Tensor, stored: Tensor, largest: Tensor) -> None:
        """Compare the state that was integrated backwards to time t with the stored one."""
        tiny = torch.finfo(x.dtype).tiny
        drift = _rms(x - stored) / _rms(stored).maximum(FLOOR * largest).clamp(min=tiny)
        drift = drift.nan_to_num(nan=torch.inf)
        worst, sample = (v.item() for v in drift.max(0))
        self.report.drift = max(self.report.drift, worst)
        if worst > self.max_drift:
            raise GradientError(
                f'gradient="backsolve": integrated back to t = {t:.6g} the state of sample '
                f"{int(sample)} is off by {worst:.3g} of its size (max_drift "
                f"{self.max_drift:.3g}); tighten the tolerance or the step, or use "
                'gradient="checkpoint"'
            )


class _Backsolve(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, plan: _Plan, x: Tensor, between: list[Tensor], x0: Tensor, *parameters: Tensor
    ) -> Tensor:
        ctx.plan, ctx.count = plan, len(between)
        x = x.view_as(x)
        ctx.save_for_backward(x, *between, *parameters)  # parameters: to notice changes in place
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        plan: _Plan = ctx.plan
        x, *rest = ctx.saved_tensors
        others = iter(rest[: ctx.count])
        states = [x[k] if k >= 0 else next(others) for k in plan.saved]
        largest = torch.stack([_rms(s) for s in states]).amax(0)
        scale = grad.abs().amax((0, 2, 3))
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))[:, None, None]
        adjoint = grad[-1] / scale
        sums = [torch.zeros_like(p) for p in plan.parameters]
        for late, early in itertools.pairwise(reversed(range(len(states)))):
            state, adjoint, *sums = plan.interval(
                plan.times[late], plan.times[early], (states[late], adjoint, *sums), scale
            )
            plan.check(plan.times[early], state, states[early], largest)
            if plan.saved[early] >= 0:
                adjoint = adjoint + grad[plan.saved[early]] / scale
        if not all(bool(torch.isfinite(part).all()) for part in (adjoint, *sums)):
            raise GradientError('gradient="backsolve": the gradient is NaN or infinite')
        return (None, None, None, scale * adjoint, *sums)


def _rms(x: Tensor) -> Tensor:
    return x.flatten(1).square().mean(1).sqrt()
