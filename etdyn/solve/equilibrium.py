"""`find_equilibrium`: the states x = force(x) of a System, each with its residual and its cost."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from etdyn.checks import bad, check_choice, check_count, check_finite, check_positive
from etdyn.lagrangians import LayerNorm
from etdyn.solve.flow import solve
from etdyn.solve.implicit_gradient import ImplicitReport, implicit
from etdyn.solve.newton import NewtonKrylov, lowest_curvature
from etdyn.solve.relaxation import Accelerated, Anderson, Point, Relaxation
from etdyn.solve.relaxation import evaluate as evaluate_at
from etdyn.solve.solution import Status, describe_system
from etdyn.systems import System

__all__ = ["Equilibrium", "EquilibriumError", "find_equilibrium"]

METHODS = ("map", "anderson", "newton-krylov", "flow")
SADDLE = -1e-3  # lowest eigenvalue of I + HM below which an equilibrium is left again
ESCAPE = 1e-2  # change of g, relative to g, of the step off a saddle
FLOW_STEPS = (16, 32)  # first and longest interval between two looks at the residual


@dataclass
class Equilibrium:
    """Where a search ended, sample by sample.

    Attributes:
        x: `(batch, token, feature)`: x = force(x); under the sphere dynamics x has mean 0 and
            standard deviation 1 and is parallel to its force. Where a sample has not converged,
            the last state that was not taken back.
        energy: `(batch,)`, the interaction energy at x; None without one.
        residual: `(batch,)`, |P grad_g E| at x, as `System.residual` has it.
        converged: bool `(batch,)`, residual <= tol.
        evaluations: int64 `(batch,)`, forces and Hessian-vector products.
        status: int8 `(batch,)`, values of `Status`.
        curvature: `(batch,)`, an upper bound of the lowest eigenvalue of I + HM, where an
            accelerated result was probed; else NaN. Below zero: a saddle.
        history: `(iteration, batch)`, the residual after each iteration (of "flow": interval);
            NaN once the sample was done.
        method: as asked for.
        safeguard: what a step must not raise: "energy", or where the interaction has none,
            "residual", which cannot tell a minimum from a saddle; "none" for "flow".
        seconds: wall time.
        system: what was solved.
        config: method, system and arguments, as JSON can hold them.
        gradient: what the implicit gradient is good for, where one was asked for.
    """

    x: Tensor
    energy: Tensor | None
    residual: Tensor
    converged: Tensor
    evaluations: Tensor
    status: Tensor
    curvature: Tensor
    history: Tensor
    method: str
    safeguard: str
    seconds: float
    system: System
    config: dict[str, Any] = field(default_factory=dict)
    gradient: ImplicitReport | None = None


class EquilibriumError(RuntimeError):
    """Some samples did not converge; `equilibrium` holds what was reached."""

    def __init__(self, equilibrium: Equilibrium) -> None:
        failed = (~equilibrium.converged).nonzero().flatten().tolist()
        worst = equilibrium.residual[failed].max()
        super().__init__(
            f"no equilibrium in samples {failed}: residual up to {float(worst):.3g} after up to "
            f"{int(equilibrium.evaluations[failed].max())} evaluations, tol "
            f"{equilibrium.config['tol']:.3g}. The exception's `equilibrium` holds the states; "
            "throw=False returns it instead."
        )
        self.equilibrium = equilibrium


def find_equilibrium(
    system: System,
    x0: Tensor,
    method: str = "anderson",
    *,
    tol: float = 1e-10,
    damping: float = 1.0,
    max_evaluations: int = 5000,
    memory: int = 10,
    probe: int = 8,
    gradient: str | None = None,
    throw: bool = False,
) -> Equilibrium:
    """Find x = force(x), the equilibrium in g of every dynamics, from x0; per sample.

        "map"            x <- (1 - eta) x + eta force(x), with eta found per sample
        "anderson"       the map until g has settled, then Anderson mixing of the last steps
        "newton-krylov"  the map until g has settled, then matrix-free Newton steps
        "flow"           dopri5 along the leaky or the sphere flow, in growing intervals

    Steps that raise the energy of the leaky flow (sphere: E) are taken back. An equilibrium that
    mixing or Newton steps reached is probed for negative curvature, and left again where it is a
    saddle, to the side from which it was approached, as the map would. A sample that is done
    leaves the batch, and its result does not depend on the others.

    Args:
        system: without an energy only the residual guards the steps, and the result says so.
        x0: start, `(batch, token, feature)`.
        tol: of the residual |P grad_g E|, at least one rounding of the dtype.
        damping: the largest eta, in (0, 1].
        max_evaluations: per sample.
        memory: steps that "anderson" mixes.
        probe: Lanczos steps, one evaluation each, of a probe; 0 accepts saddles.
        gradient: "implicit" lets gradients of x flow to the parameters (`etdyn.implicit`; not on
            the sphere), however many iterations found it; None keeps no graph.
        throw: raise `EquilibriumError` where a sample did not converge.

    Returns:
        Equilibrium. Nothing has converged with a residual above tol.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
        EquilibriumError: see throw.
        GradientError: gradient="implicit" where a sample has not converged.

    Source: ET-F23, F30 and F31; Walker and Ni 2011 (Anderson mixing); Knoll and Keyes 2004.
    """
    check_positive("damping", damping)
    if damping > 1:
        raise bad("damping", "a number in (0, 1]", damping)
    check_count("max_evaluations", max_evaluations)
    check_count("memory", memory)
    check_count("probe", probe, least=0)
    _check(system, x0, method, tol)
    if gradient is not None:
        check_choice("gradient", gradient, ("implicit",))
        if system.dynamics == "sphere" or not system.has_energy:
            raise bad("gradient", "None on the sphere and for a coupling", gradient)
    began = time.perf_counter()
    # the published flow has no fixed point in x; its equilibria in g are those of the leaky one
    still = system.with_dynamics("leaky") if system.dynamics == "et" else system
    x = still.prepare(x0.detach())
    search = _Search(still, x, tol, max_evaluations)
    with torch.no_grad():
        _run(search, method, damping, memory, probe)
    safeguard = "none" if method == "flow" else "energy" if system.has_energy else "residual"
    found = Equilibrium(
        search.x, search.energy if system.has_energy else None, search.residual,
        search.status == Status.CONVERGED, search.evaluations, search.status, search.curvature,
        torch.stack(search.history), method, safeguard, time.perf_counter() - began, system,
        {
            "method": method, "tol": tol, "damping": damping, "max_evaluations": max_evaluations,
            "memory": memory, "probe": probe, "system": describe_system(system),
        },
    )  # fmt: skip
    if throw and not bool(found.converged.all()):
        raise EquilibriumError(found)
    if gradient is not None:
        found.gradient = ImplicitReport()
        found.x = implicit(system, found.x, start=x0, report=found.gradient)
    return found


def _run(search: _Search, method: str, damping: float, memory: int, probe: int) -> None:
    if method == "flow":
        search.flow()
        return
    starts: dict[str, Callable[[Point], Relaxation]] = {
        "map": partial(Relaxation, damping=damping),
        "anderson": partial(Anderson, damping=damping, memory=memory),
        "newton-krylov": partial(NewtonKrylov, damping=damping, tol=search.tol),
    }
    search.run(starts[method], probe if search.system.has_energy else 0)


def _check(system: System, x0: Tensor, method: str, tol: float) -> None:
    check_choice("method", method, METHODS)
    if system.dynamics == "et" and not isinstance(system.lagrangian, LayerNorm):
        raise bad("system", 'dynamics "leaky" unless g is a layer norm, whose scale is free',
                  '"et"')  # fmt: skip
    system.check(x0, "x0")
    check_finite("x0", x0)
    check_positive("tol", tol)
    least = torch.finfo(x0.dtype).eps
    if tol < least:
        raise bad("tol", f"at least {least:.3g}, the rounding of {x0.dtype}", tol)


class _Search:
    """The samples of a batch on their way, and what became of those that are done."""

    def __init__(self, system: System, x: Tensor, tol: float, max_evaluations: int) -> None:
        batch = len(x)
        self.system, self.tol, self.max_evaluations = system, tol, max_evaluations
        self.x = x.clone()
        self.energy, self.residual, self.curvature = x.new_full((3, batch), torch.nan).unbind()
        self.status = torch.full((batch,), Status.MAX_STEPS, dtype=torch.int8, device=x.device)
        self.evaluations = torch.zeros(batch, dtype=torch.int64, device=x.device)
        self.history: list[Tensor] = []
        self.rows = torch.arange(batch, device=x.device)  # the samples on their way
        self.local = system  # as they see it

    def evaluate(self, x: Tensor) -> Point:
        """One evaluation of the samples on their way."""
        self.evaluations[self.rows] += 1
        return evaluate_at(self.local, x)

    def left(self) -> Tensor:
        """Evaluations that the samples on their way may still use."""
        return self.max_evaluations - self.evaluations[self.rows]

    def note(self, point: Point) -> None:
        """Append to the history."""
        row = torch.full_like(self.residual, torch.nan)
        row[self.rows] = point.residual
        self.history.append(row)

    def finish(self, point: Point, done: Tensor, status: Tensor) -> None:
        """Write down the samples that are done, and go on with the others.

        status: `(batch,)`, what it is where a sample has not converged.
        """
        status = status.masked_fill(point.converged(self.tol), Status.CONVERGED)
        rows = self.rows[done]
        self.x[rows], self.status[rows] = point.x[done], status[done]
        self.energy[rows], self.residual[rows] = point.energy[done], point.residual[done]
        self.rows = self.rows[~done]
        self.local = self.system.select(self.rows)

    def run(self, start: Callable[[Point], Relaxation], probe: int) -> None:
        """Step, judge, keep or take back, until every sample is done."""
        point = self.evaluate(self.x)
        method, status = start(point), _status(point.finite())
        while True:
            self.note(point)
            met = point.converged(self.tol)
            if probe and isinstance(method, Accelerated):
                met = self.probe(point, method, met, probe)
            done = met | (status != Status.MAX_STEPS) | (self.left() < 1)
            if bool(done.any()):
                self.finish(point, done, status)
                if not len(self.rows):
                    return
                point = point.at(~done)
                method.keep(~done)
            z, spent = method.propose(point, self.left() - 1)
            self.evaluations[self.rows] += spent
            sphere = self.system.dynamics == "sphere"
            new = self.evaluate(self.local.prepare(z) if sphere else z)
            worse = method.worse(point, new)
            status = _status(new.finite() | method.leaps)
            method.learn(point, new, worse)
            point = point.unless(worse, new) if bool(worse.any()) else new

    def probe(self, point: Point, method: Accelerated, met: Tensor, steps: int) -> Tensor:
        """Which of the samples that met the tolerance may end; the others leave their saddle."""
        met = met & ~(method.escaping & (self.left() > 0))
        rows = (met & method.leapt & (self.left() > steps)).nonzero().flatten()
        if not len(rows):
            return met
        here = point.at(rows)
        curvature, direction = lowest_curvature(here, steps)
        self.evaluations[self.rows[rows]] += steps
        self.curvature[self.rows[rows]] = curvature
        saddle = curvature < SADDLE
        came_from = here.metric(method.origin[rows] - here.z)
        side = torch.where((came_from * direction).sum((1, 2)) < 0, -1.0, 1.0)
        moved = here.metric(direction).square().sum((1, 2)).sqrt()
        length = side * ESCAPE * here.g.square().sum((1, 2)).sqrt() / moved
        method.leave(rows[saddle], (length[:, None, None] * direction)[saddle])
        return met.index_fill(0, rows[saddle], value=False)

    def flow(self) -> None:
        """Integrate in growing intervals, with tolerances that follow the residual down."""
        point, longest = self.evaluate(self.x), FLOW_STEPS[0]
        status = _status(point.finite())
        while True:
            self.note(point)
            # a step of dopri5 has six new stages; its start and the point that follows take three
            steps = ((self.left() - 3) // 6).clamp(max=longest)
            done = point.converged(self.tol) | (status != Status.MAX_STEPS) | (steps < 1)
            if bool(done.any()):
                self.finish(point, done, status)
                if not len(self.rows):
                    return
                point, steps = point.at(~done), steps[~done]
            x, status = self.integrate(point, steps)
            new = self.evaluate(self.local.prepare(x))
            status = torch.where(new.finite(), status, _status(new.finite()))
            point = point.unless(~new.finite(), new)
            longest = min(2 * longest, FLOW_STEPS[1])

    def integrate(self, point: Point, steps: Tensor) -> tuple[Tensor, Tensor]:
        """Take this many attempted steps; the states, and how each sample ended."""
        size = point.size
        floor = math.ceil(math.log10(100 * torch.finfo(size.dtype).eps))
        tiny = torch.finfo(size.dtype).tiny  # a force, or a residual, may vanish
        wanted = (1e-3 * point.residual / size.clamp(min=tiny)).clamp(min=tiny).nan_to_num(tiny)
        decade = wanted.log10().floor().clamp(floor, -6).long()
        x, status = point.x.clone(), _status(point.finite())
        groups = set(zip(decade.tolist(), steps.tolist(), strict=True))
        for exponent, count in sorted(groups):
            rows = ((decade == exponent) & (steps == count)).nonzero().flatten()
            flow = solve(
                self.local.select(rows), point.x[rows], [0.0, 1e12], "batched_dopri5",
                rtol=10.0**exponent, atol=10.0**exponent, gradient=None, max_steps=count,
                throw=False,
            )  # fmt: skip
            x[rows], status[rows] = flow.x_end, flow.status.to(x.device)
            spent = torch.as_tensor(flow.stats.evaluations, device=x.device)
            self.evaluations[self.rows[rows]] += spent
        return x, status


def _status(finite: Tensor) -> Tensor:
    """What it is, where a sample does not converge."""
    good = torch.full_like(finite, Status.MAX_STEPS, dtype=torch.int8)
    return good.masked_fill(~finite, Status.NONFINITE)
