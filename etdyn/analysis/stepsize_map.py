"""The map over step size and horizon: what Euler does at every step size from the same starts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.distance import activation_distance
from etdyn.analysis.labels import labelled
from etdyn.checks import bad, check_count, check_finite, check_tensor
from etdyn.lagrangians import LayerNorm
from etdyn.solve.equilibrium import find_equilibrium
from etdyn.solve.solution import describe_system
from etdyn.solve.steppers import move
from etdyn.systems import System

__all__ = ["attractor_switches", "first_step_overshoot", "step_size_map"]

SLACK = 8.0  # roundings of the energy that do not count as a rise
CACHE = 3 * 2**18  # bytes of a batch of states that stays in a core's cache with its products
RETURN, AMPLITUDE = 1e-3, 1e-6  # a 2-cycle returns to within this share of its swing; least swing
MOST = 20_000  # evaluations of a flow to rest
SAME = 1e-3  # distance in g below which equilibria are the same

MAP = ("sample", "step_size", "step")


@torch.no_grad()
def step_size_map(
    system: System,
    x0: Tensor,
    step_sizes: Tensor,
    steps: int = 100,
    error: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> xr.Dataset:
    """Euler from every start with every step size, watched at every step.

    All pairs of a start and a step size are one batch, each with its own step; on a CPU a batch
    larger than the cache is cut where that is faster. One evaluation a step. The states on the way
    are not kept.

    A step raises the energy if the Lyapunov function grows by more than 8 roundings. An end is a
    2-cycle (`period2`) if g returns after two steps to within 1e-3 of the distance of one, and
    that is at least 1e-6: a decaying oscillation with a multiplier below -0.999 would look alike.

    Args:
        system: what moves; without an energy `energy` and `rises` are absent.
        x0: `(batch, token, feature)`.
        step_sizes: `(step_size,)`, > 0, in the dtype of x0.
        steps: Euler steps, at least 2.
        error: error(x, sample) -> `(rows,)`, of the states x `(rows, token, feature)` that started
            from x0[sample]; such as the task's. It must not change with the rows around it.

    Returns:
        Dataset (schema "etdyn.step_size_map/1"), all dimensionless, with `time` = step_size step.
        (sample, step_size, step), step 0 the start: `energy` without its zero-weight constant,
        `rises` until then, `residual`, and `error` where asked for.
        (sample, step_size): `period2`, `swing` the distance in g of the last two states, and
        `distance` in g of the last state from that of the smallest step size, both the mean over
        tokens of `activation_distance`. (sample, step_size, token, feature): `x`, the last state.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET-F19, F20, F24; anchors F6.
    """
    check_count("steps", steps, least=2)
    x0 = _checked(system, x0, step_sizes)
    batch, count = len(x0), len(step_sizes)
    sample = torch.arange(batch, device=x0.device).repeat_interleave(count)
    h = step_sizes.repeat(batch)
    parts = []
    for rows in _cut(x0, len(h)):
        mine = sample[rows]
        score = None if error is None else _of(error, mine)
        parts.append(_watch(system.select(mine), x0[mine], h[rows], steps, score))
    joined = {n: torch.cat([p[n] for p in parts]) for n in parts[0]}
    found = {n: v.reshape(batch, count, *v.shape[1:]) for n, v in joined.items()}
    smallest = found["x"][:, int(step_sizes.argmin())]
    reference = smallest.repeat_interleave(count, 0)
    apart = _apart(system.select(sample), joined["x"], reference)
    found["distance"] = apart.reshape(batch, count)
    ends = (*MAP[:2], "token", "feature")
    data = {
        n: labelled(ends if n == "x" else MAP[: v.ndim], v.cpu().numpy(), _NAMES[n])
        for n, v in found.items()
    }
    return _label("etdyn.step_size_map/1", system, x0, step_sizes, data, steps=steps)


@torch.no_grad()
def attractor_switches(
    system: System, result: xr.Dataset, reference: Tensor | None = None, tol: float = 1e-4
) -> xr.Dataset:
    """Which equilibrium the last state of every run of a map belongs to.

    From there each follows the flow to rest (under "et" the leaky flow, which takes g the same way
    up to eps, ET-F27), so that a label is due to the Euler steps and to nothing after them.
    Equilibria are the same where they differ in g by less than 1e-3 (the mean over tokens of
    `activation_distance`).

    Args:
        system: of the map.
        result: what `step_size_map` returned.
        reference: states `(batch, token, feature)` from which the flow goes to the attractor that
            counts as right; None: the ends of the smallest step size. The starts of the map are a
            good choice.
        tol: of the residual at rest.

    Returns:
        Dataset (schema "etdyn.attractor_switches/1"), dims (sample, step_size): `attractor`, 0
        that of the reference, 1, 2, ... others of the sample by growing step size, -1 where no
        rest was reached; `distance` in g of the equilibrium from the reference's;
        `equilibrium_energy`, E there without its zero-weight constant. NaN where no rest.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.
    """
    like = system.lagrangian.like
    x = torch.tensor(result.x.transpose(*MAP[:2], "token", "feature").values, device=like.device)
    sizes = torch.tensor(result.step_size.values, device=like.device)
    if reference is None:
        reference = x[:, int(sizes.argmin())]
    check_tensor("reference", reference, (len(x), *x.shape[2:]), x)
    places, good, energy = _at_rest(system, torch.cat([reference.unsqueeze(1), x], 1), tol)
    label, distance = _same(system, places, good, sizes.argsort())
    values = {
        "attractor": label[:, 1:],
        "distance": distance[:, 1:],
        "equilibrium_energy": energy[:, 1:].masked_fill(~good[:, 1:], torch.nan),
    }
    data = {n: labelled(MAP[:2], v.cpu().numpy(), _NAMES[n]) for n, v in values.items()}
    return _label("etdyn.attractor_switches/1", system, reference, sizes, data, tol=tol)


@torch.no_grad()
def first_step_overshoot(system: System, x0: Tensor, step_sizes: Tensor) -> xr.Dataset:
    """How far the first Euler step goes, and whether too far.

    Args:
        system: has an energy.
        x0: `(batch, token, feature)`.
        step_sizes: `(step_size,)`, > 0, in the dtype of x0.

    Returns:
        Dataset (schema "etdyn.first_step_overshoot/1"), dims (sample, step_size):
        `energy_change` of the step;
        `decrease_ratio`, that over what the slope at the start promises, -h dissipation: 1 for a
        small step; for a parabola 1 - h curvature/2, so that below 1/2 the step went past the
        lowest point on its way, and below 0 the energy rose;
        (sample, step_size, token): `turn`, by how much g changed (`activation_distance`); and with
        layer norm `displacement` = h |v - mean(v)| / (sqrt(D) sigma), the step over the size of
        the token: beyond 1 the step discards where the token pointed (ET-F26).

    Raises:
        ValueError, TypeError: wrong input, naming the argument; a system without an energy.
    """
    _ = system.potential  # says so where there is no energy
    x0 = _checked(system, x0, step_sizes)
    batch, count = len(x0), len(step_sizes)
    sample = torch.arange(batch, device=x0.device).repeat_interleave(count)
    local, x, h = system.select(sample), x0[sample], step_sizes.repeat(batch)
    v = local.velocity(0.0, x)
    after = move(local, x, h, v)
    change = _energy(local, after) - _energy(local, x)
    values = {
        "energy_change": change,
        "decrease_ratio": change / (-h * local.dissipation(x)),
        "turn": local.keep(activation_distance(local, after, x)),
    }
    if isinstance(system.lagrangian, LayerNorm):
        length = system.lagrangian.centre(v).square().mean(-1).sqrt()
        sigma = system.lagrangian.sigma(local._stand_in(x))
        values["displacement"] = local.keep(h[:, None] * length / sigma)
    dims = (*MAP[:2], "token")
    data = {
        n: labelled(
            dims[: v.ndim + 1], v.reshape(batch, count, *v.shape[1:]).cpu().numpy(), _NAMES[n]
        )
        for n, v in values.items()
    }
    return _label("etdyn.first_step_overshoot/1", system, x0, step_sizes, data)


def _checked(system: System, x0: Tensor, step_sizes: Tensor) -> Tensor:
    system.check(x0, "x0")
    check_finite("x0", x0)
    check_tensor("step_sizes", step_sizes, (None,), x0)
    if not len(step_sizes) or not bool(((step_sizes > 0) & step_sizes.isfinite()).all()):
        raise bad("step_sizes", "finite numbers > 0", step_sizes.tolist())
    return system.prepare(x0)


def _cut(x0: Tensor, rows: int) -> Sequence[Tensor]:
    """Which rows run together."""
    together = CACHE // (x0[0].numel() * x0.element_size()) if x0.device.type == "cpu" else rows
    return torch.arange(rows, device=x0.device).chunk(math.ceil(rows / max(1, together)))


def _of(error: Callable[[Tensor, Tensor], Tensor], sample: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: error(x, sample)


def _watch(
    system: System, x: Tensor, h: Tensor, steps: int, error: Callable[[Tensor], Tensor] | None
) -> dict[str, Tensor]:
    """What is seen of some rows on their way, `(rows, ...)`."""
    columns: dict[str, list[Tensor]] = {}
    last = [x]  # the last three states
    for k in range(steps + 1):
        seen, velocity = _look(system, x)
        if error is not None:
            seen["error"] = error(x)
            check_tensor("error(x, sample)", seen["error"], (len(x),), x)
        for name, value in seen.items():
            columns.setdefault(name, []).append(value)
        if k < steps:
            x = move(system, x, h, velocity)
            last = [*last[-2:], x]
    found = {name: torch.stack(column, 1) for name, column in columns.items()}
    if "energy" in found:
        found["rises"] = _rises(found["energy"])
    swing, back = (_apart(system, x, earlier) for earlier in (last[-2], last[-3]))
    found["swing"] = swing
    found["period2"] = (swing >= AMPLITUDE) & (back <= RETURN * swing)
    return {**found, "x": x}


def _look(system: System, x: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """What is seen at x, each `(rows,)`, and the velocity there. One evaluation."""
    g, here = system.activation(x), system._stand_in(x)
    seen, law = {}, system._law
    if system.has_energy:
        energy, force = system.potential.energy_and_force(g, relative=True)
        neuron = law.neuron_energy(system.lagrangian, here)
        seen["energy"] = energy if neuron is None else energy + system.keep(neuron).sum(1)
    else:
        force = system.interaction.force(g)
    left = system.keep(law.imbalance(system.lagrangian, here, force))
    seen["residual"] = left.square().sum((1, 2)).sqrt()
    return seen, system.keep(law.velocity(system.lagrangian, here, force))


def _rises(energy: Tensor) -> Tensor:
    """How many steps raised the energy until each, int64 `(rows, step)`."""
    before, after = energy[:, :-1], energy[:, 1:]
    rounding = torch.finfo(energy.dtype).eps * torch.maximum(before.abs(), after.abs())
    rose = (after - before > SLACK * rounding).long()
    return torch.cat([torch.zeros_like(rose[:, :1]), rose.cumsum(1)], 1)


def _apart(system: System, x: Tensor, reference: Tensor) -> Tensor:
    """Distance in g, the mean over the tokens that exist, `(rows,)`."""
    return system.token_mean(activation_distance(system, x, reference))


def _energy(system: System, x: Tensor) -> Tensor:
    return torch.stack(list(system.energies(x, relative=True).values())).sum(0)


def _at_rest(system: System, states: Tensor, tol: float) -> tuple[Tensor, Tensor, Tensor]:
    """Equilibria from states `(batch, place, token, feature)`, whether found, their energies."""
    batch, count = states.shape[:2]
    flat = states.flatten(0, 1)
    sample = torch.arange(batch, device=flat.device).repeat_interleave(count)
    finite = torch.isfinite(flat).flatten(1).all(1)
    start = torch.where(finite[:, None, None], flat, torch.ones_like(flat).cumsum(-1))
    found = [
        find_equilibrium(system.select(sample[r]), start[r], "flow", tol=tol, max_evaluations=MOST)
        for r in _cut(flat, len(flat))
    ]
    local = system.select(sample)
    places = torch.cat([f.x for f in found])
    good = torch.cat([f.converged for f in found]) & finite
    energy = local.interaction_energy(places, relative=True)
    return (
        places.reshape(states.shape),
        good.reshape(batch, count),
        energy.reshape(batch, count),
    )


def _same(system: System, places: Tensor, good: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Labels and distances from the first place, `(batch, place)`; -1 and NaN where not `good`.

    The first place has label 0; the others, in `order`, the label of one that they are near, or
    the next.
    """
    batch, count = good.shape
    sample = torch.arange(batch, device=places.device).repeat_interleave(count)
    local, flat = system.select(sample), places.flatten(0, 1)

    def gaps(i: int) -> Tensor:
        return _apart(local, flat, places[:, i].repeat_interleave(count, 0)).reshape(batch, count)

    label = torch.where(good & (gaps(0) < SAME) & good[:, :1], 0, -1)
    for i in order.tolist():
        fresh = good[:, 1 + i] & (label[:, 1 + i] < 0)
        if bool(fresh.any()):
            mine = good & (label < 0) & (gaps(1 + i) < SAME) & fresh[:, None]
            label = torch.where(mine, label.amax(1, keepdim=True).clamp(min=0) + 1, label)
    return label, gaps(0).masked_fill(~(good & good[:, :1]), torch.nan)


_NAMES = {
    "energy": "Lyapunov function without its zero-weight constant",
    "rises": "steps until now that raised the energy",
    "residual": "|P grad E|",
    "error": "task error",
    "swing": "distance in g of the last two states",
    "period2": "whether the last states alternate",
    "distance": "distance in g from the reference",
    "x": "last state",
    "attractor": "label of the equilibrium; 0: the reference's, -1: none",
    "equilibrium_energy": "interaction energy of the equilibrium, without its constant",
    "energy_change": "change of the Lyapunov function",
    "decrease_ratio": "change over what the slope at the start promises",
    "turn": "change of g, over the radius of its sphere",
    "displacement": "length of the step over the size of the token",
}


def _label(
    schema: str, system: System, x0: Tensor, step_sizes: Tensor, data: dict[str, Any], **config: Any
) -> xr.Dataset:
    sizes = step_sizes.cpu().numpy()
    coords: dict[str, Any] = {
        "sample": range(len(x0)),
        "step_size": labelled("step_size", sizes, "step size, flow time"),
    }
    if "steps" in config:
        step = np.arange(config["steps"] + 1)
        coords["step"] = labelled("step", step, "Euler steps taken")
        coords["time"] = labelled(("step_size", "step"), np.outer(sizes, step), "flow time")
    attrs = store.provenance(schema, {**config, "system": describe_system(system)}, x0)
    return xr.Dataset(data, coords, attrs)
