"""The audit of a trajectory: what its energy did, against what the flow's energy must do."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import flags, labelled
from etdyn.checks import bad
from etdyn.solve import Solution, Status, descend, solve
from etdyn.systems import System

__all__ = ["Cause", "audit", "increases", "local_energies"]

SLACK = 8.0  # roundings that an energy may carry
RTOLS = 1e-3, 1e-5, 1e-7, 1e-9, 1e-11, 1e-13  # of the flow that rises are judged by
MAX_STEPS = 2000  # of that flow, per sample


class Cause(IntEnum):
    """Why the energy rose over an interval."""

    NONE = 0  # it did not
    ROUNDING = 1  # by no more than its own rounding
    STEP_TOO_LARGE = 2  # the flow from the same state falls, the fixed step did not follow it
    SOLVER_ERROR = 3  # the flow from the same state falls, the adaptive solver did not follow it
    NOISE = 4  # the same step without its noise falls
    NO_LYAPUNOV_FUNCTION = 5  # the flow from the same state rises too
    UNDECIDED = 6  # the flow could not be integrated accurately enough to tell


@torch.no_grad()
def audit(solution: Solution) -> xr.Dataset:
    """What the energy did along a trajectory, and whether it did what the flow must do.

    Energies are `system.energies(x, relative=True)`: the terms of the Lyapunov function without
    the constant of zero weights (ET-F6), in the dtype of the trajectory. All is dimensionless.

    An interval lies between two saved times; a rise within one that falls as a whole is not seen.
    Its `slope_measured` is (change of energy) / (its length), which should be `slope_exact`:
    - of a flow, minus the mean dissipation, by Simpson's rule with the middle of the cubic that
      meets states and velocities at both ends. Error O(length^4) where the energy is smooth, two
      orders less over the kinks of relu memories. `slope_uncertainty`, the distance to the
      trapezoid rule, is much larger than that error on a grid that resolves the motion; an
      estimate and no bound, it can vanish where the dissipation bends the other way.
    - of the discrete model (`descend`), minus the dissipation at the start of the step. A step is
      no slope: they differ by step/2 v.V''v, to first order, and `slope_uncertainty` is NaN.

    A rise is at most `rounding` (8 eps times the sizes that the energy is summed from and how it
    responds to relative errors of x and g), or it is judged by evidence: the flow is integrated
    from the state where it began, over the same time, ever tighter until it falls by more than
    its error or knows the rise to a quarter. If the flow rises by more than its error, the energy
    is no Lyapunov function of it. Otherwise the fixed step, the adaptive solver or the noise (if
    the same step without it does not raise the energy) is to blame. See `Cause`.

    Args:
        solution: of `descend` or `solve`, with its states at two times at least. NaN after a
            sample's own end (batched methods) stays NaN.

    Returns:
        Dataset (schema "etdyn.descent/1").
        (time, sample): `energy`, `energy_<term>`, `dissipation` = -d energy/dt, and
        `dissipation_<term>` = -d energy_<term>/dt = force_term . dg/dt (the leak: -x . dg/dt),
        which may be negative apiece and sum to the whole; `activation_norm` |g|, bounded under
        layer norm, so that growth without end means an energy without a floor (ET-F32).
        (time, sample, token): `energy_<term>_by_token`, (time, sample, head):
        `energy_attention_by_head`; see `local_energies`.
        (interval, sample): `change`, `slope_measured`, `slope_exact`, `slope_uncertainty`,
        `rounding`, `flow_change` and `flow_error` (of the judging flow; NaN where none was
        needed), `cause`.

    Raises:
        ValueError: fewer than two saved states.
        TypeError: a system without an energy.

    Source: ET section 1.4, ET-F11, F30.
    """
    system, x, t = solution.system, solution.x.detach(), solution.t
    if solution.saved or len(t) < 2:
        raise bad("solution", "states at two times at least (solve without `save`)", len(x))
    _ = system.potential
    rows = [_observe(system, state) for state in x]
    data = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    changes = _changes(solution, data)
    variables = {n: _variable(n, v, "interval") for n, v in changes.items()}
    variables |= {n: _variable(n, v, "time") for n, v in data.items()}
    variables["status"] = _variable("status", solution.status, "time")
    coords = {
        "time": labelled("time", t.numpy(), "flow time"),
        "start": labelled("interval", t[:-1].numpy(), "start of the interval"),
        "end": labelled("interval", t[1:].numpy(), "end of the interval"),
        "sample": labelled("sample", np.arange(x.shape[1]), "sample"),
    }
    config = {**solution.config, "slack": SLACK}
    return xr.Dataset(variables, coords, store.provenance("etdyn.descent/1", config, x))


def increases(audited: xr.Dataset) -> xr.Dataset:
    """Every rise of the energy that an audit found, one row each, in order of time.

    Args:
        audited: what `audit` returned, or `load` read back.

    Returns:
        Dataset (schema "etdyn.increases/1") with the dim increase: `sample`, `start` and `end` of
        the interval, `size` of the rise, `relative_size` (to |energy| at the start), `rounding`,
        `flow_change`, `flow_error` and `cause`, as in `audit`.
    """
    cause = audited["cause"].transpose("interval", "sample").values
    interval, sample = (xr.DataArray(k, dims="increase") for k in (cause != Cause.NONE).nonzero())
    rows = audited[["change", "rounding", "flow_change", "flow_error", "cause"]]
    rows = rows.isel(interval=interval, sample=sample).rename(change="size")
    before = audited["energy"].isel(time=interval, sample=sample)
    relative = (rows["size"] / abs(before)).values
    rows["relative_size"] = labelled("increase", relative, "rise over |energy| at the start")
    rows["size"].attrs["long_name"] = "rise of the energy"
    rows = rows.reset_coords(["sample", "start", "end"])
    rows.attrs = {**audited.attrs, "etdyn_schema": "etdyn.increases/1"}
    return rows


@torch.no_grad()
def local_energies(system: System, x: Tensor) -> dict[str, Tensor]:
    """Where each term's energy sits: per head and query, or per token; zero-weight part removed.

    Returns:
        "attention" `(batch, head, token)`: -1/beta log mean_b exp(beta <K_hb, Q_hc>) of the query
        c; "hopfield" and (leaky) "lagrangian" `(batch, token)`. Each sums over what follows the
        batch to `energies(x, relative=True)`. Terms without `local_energies` are left out.
    """
    g, terms = system.activation(x), system.potential.terms()
    told = {name: term.local_energies(g, relative=True) for name, term in terms.items()}
    neuron = system._law.neuron_energy(system.lagrangian, system._stand_in(x))
    if neuron is not None:
        told["lagrangian"] = system.keep(neuron)
    return {name: energy for name, energy in told.items() if energy is not None}


def _observe(system: System, x: Tensor) -> dict[str, Tensor]:
    """What an audit says about one state of the batch, and its `condition`."""
    terms, local = system.energies(x, relative=True), local_energies(system, x)
    moved = system.keep(system.activation_velocity(x))
    pulls = system.forces(x) | ({"lagrangian": -x} if "lagrangian" in terms else {})
    return {
        "energy": _total(terms),
        **{f"energy_{name}": value for name, value in terms.items()},
        **{f"energy_{n}_by_token": e if e.ndim == 2 else e.sum(1) for n, e in local.items()},
        **{f"energy_{n}_by_head": e.sum(2) for n, e in local.items() if e.ndim == 3},
        "dissipation": system.dissipation(x),
        **{f"dissipation_{n}": (system.keep(f) * moved).sum((1, 2)) for n, f in pulls.items()},
        "activation_norm": system.keep(system.activation(x)).square().sum((1, 2)).sqrt(),
        "condition": _condition(system, x, terms | local),
    }


def _condition(system: System, x: Tensor, parts: dict[str, Tensor]) -> Tensor:
    """What relative errors of the energy's summands, of g and of x count with, `(batch,)`."""
    force, g = system.force(x), system.activation(x)
    to_x = system.lagrangian.metric(x, force)  # -dE/dx
    summands = [part.reshape(len(x), -1) for part in parts.values()]
    responses = [system.keep(r).flatten(1) for r in (force * g, to_x * x)]
    return torch.cat(summands + responses, 1).abs().sum(1)


def _total(terms: dict[str, Tensor]) -> Tensor:
    return torch.stack(list(terms.values())).sum(0)


def _changes(solution: Solution, data: dict[str, Tensor]) -> dict[str, Tensor]:
    """What an audit says about every interval; takes `condition` out of the data."""
    condition = data.pop("condition")
    dt = solution.t.diff().to(condition)[:, None]
    change = data["energy"].diff(dim=0)
    rounding = SLACK * torch.finfo(condition.dtype).eps * condition[1:].maximum(condition[:-1])
    exact, uncertainty = _exact_slope(solution, data["dissipation"], dt)
    cause, flow_change, flow_error = _causes(solution, change, rounding)
    return {
        "change": change,
        "slope_measured": change / dt,
        "slope_exact": exact,
        "slope_uncertainty": uncertainty,
        "rounding": rounding,
        "flow_change": flow_change,
        "flow_error": flow_error,
        "cause": cause,
    }


def _exact_slope(solution: Solution, dissipation: Tensor, dt: Tensor) -> tuple[Tensor, Tensor]:
    left, right = dissipation[:-1], dissipation[1:]
    if solution.config["method"]["name"] == "descend":
        return -left, torch.full_like(left, torch.nan)
    system, x = solution.system, solution.x.detach()
    v = torch.stack([system.velocity(0.0, state) for state in x])
    middle = (x[:-1] + x[1:]) / 2 + dt[..., None, None] / 8 * (v[:-1] - v[1:])
    between = torch.stack([system.dissipation(system.prepare(state)) for state in middle])
    trapezoid, simpson = (left + right) / 2, (left + 4 * between + right) / 6
    return -simpson, (simpson - trapezoid).abs()


def _causes(solution: Solution, change: Tensor, rounding: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The cause of every rise; the flow's change of energy and its error, where integrated."""
    flow, error, quiet = torch.full_like(change.expand(3, -1, -1), torch.nan)
    method = solution.config["method"]
    for k, sample in _alike(solution, change > rounding):
        system, start = solution.system.select(sample), solution.x.detach()[k, sample]
        dt = float(solution.t[k[0] + 1] - solution.t[k[0]])
        flow[k, sample], error[k, sample] = _judge(system, start, dt, change[k, sample])
        if method.get("noise"):
            step = descend(system, start, method["step"], 1, gradient=None, throw=False)
            quiet[k, sample] = _change(system, start, step.x[-1])
    decided, rises = _decided(flow, error, change), flow > error + rounding
    cause = torch.full_like(change, Cause.UNDECIDED, dtype=torch.int8)
    cause[decided] = Cause.SOLVER_ERROR if method["step"] is None else Cause.STEP_TOO_LARGE
    cause[decided & (quiet <= rounding)] = Cause.NOISE
    cause[decided & rises] = Cause.NO_LYAPUNOV_FUNCTION
    cause[change <= rounding] = Cause.ROUNDING
    cause[~(change > 0)] = Cause.NONE
    return cause, flow, error


def _decided(flow: Tensor, error: Tensor, rise: Tensor) -> Tensor:
    """Whether the flow's change is known well enough: it falls, or its error is small."""
    return (flow < -error) | (error <= rise / 4)


def _alike(solution: Solution, chosen: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The chosen (interval, sample) in groups of intervals of one length."""
    k, sample = chosen.nonzero(as_tuple=True)
    length = solution.t.diff().float().to(k.device)[k]  # differences of times carry rounding
    same = [length == dt for dt in torch.unique(length)]
    return [(k[rows], sample[rows]) for rows in same]


def _judge(system: System, x: Tensor, dt: float, rise: Tensor) -> tuple[Tensor, Tensor]:
    """How much the energy changes along the flow from x in dt, and the error of that.

    The error is the distance to what a hundred times the tolerance gave.
    """
    change, error = torch.full((2, len(x)), torch.nan, dtype=x.dtype, device=x.device)
    rows = torch.arange(len(x), device=x.device)
    for rtol in RTOLS:
        if len(rows) and rtol >= 64 * torch.finfo(x.dtype).eps:
            better = _flow_change(system.select(rows), x[rows], dt, rtol)
            error[rows], change[rows] = (better - change[rows]).abs(), better
            rows = rows[~_decided(change, error, rise)[rows]]
    return change, error


def _flow_change(system: System, x: Tensor, dt: float, rtol: float) -> Tensor:
    """The change of energy along the flow from x in dt; NaN where its integration failed."""
    found = solve(
        system, x, [0.0, dt], "batched_dopri5", rtol=rtol, gradient=None, max_steps=MAX_STEPS,
        atol=rtol * float(x.square().mean().sqrt()), throw=False,
    )  # fmt: skip
    finished = found.status.to(x.device) == Status.FINISHED
    return _change(system, x, found.x_end).where(finished, torch.nan)


def _change(system: System, x: Tensor, new: Tensor) -> Tensor:
    before, after = (_total(system.energies(state, relative=True)) for state in (x, new))
    return after - before


_LONG = {
    "energy": "Lyapunov function, relative to zero weights",
    "dissipation": "exact -d(energy)/dt",
    "activation_norm": "|g|",
    "status": "how the integration ended",
    "change": "change of energy over the interval",
    "slope_measured": "change of energy over the length of the interval",
    "slope_exact": "mean of -dissipation",
    "slope_uncertainty": "what the quadrature of slope_exact may be off by",
    "rounding": "rise that rounding can explain",
    "flow_change": "change of energy of the flow from the same state over the same time",
    "flow_error": "error of flow_change",
    "cause": "why the energy rose",
}
_FLAGS: dict[str, type[IntEnum]] = {"cause": Cause, "status": Status}


def _variable(name: str, value: Tensor, first: str) -> Any:
    """A variable of an audit, as `xarray.Dataset` takes it."""
    last = "head" if name.endswith("_by_head") else "token"
    dims = ("sample",) if value.ndim == 1 else (first, "sample", last)[: value.ndim]
    values, long_name = value.cpu().numpy(), _LONG.get(name, name.replace("_", " "))
    if name not in _FLAGS:
        return labelled(dims, values, long_name)
    dims, values, attrs = flags(dims, values, _FLAGS[name])
    return dims, values, attrs | {"long_name": long_name}
