"""Which part of a system did what: the change of the decoded state, shared among forces.

A step moves the state by parts that add up, dx = sum_i v_i dt: one a force (attention, Hopfield,
a head, a memory), and the leak. What a reader sees is D(x), a decoder behind a layer norm, which is
not linear, so that a part has no change of D to itself. Here a part is charged for what it does
while all parts act together, along the path of the state:

    C_i = integral over the step of J_D(x(t)) v_i(t) dt,        sum_i C_i = D(x_1) - D(x_0)

- The sum is the chain rule; nothing is left over but the error of the quadrature.
- C_i is linear in v_i: heads add up to attention, memories to the Hopfield network.
- It does not depend on an order of the parts, and a part that does not act gets zero.

The tangent alone, J_D(x_0) v_i dt, is the same to O(dt^2), and useless where a step turns a token
far (ET-F26): on the digits model in data/ the changes that it predicts for the first and the last
step of the published descent are wrong by 146 % and 22 % of what happens.

On the published discrete model the path is straight and the forces are those at its start. On a
flow the path is the cubic Hermite curve through the saved states, and forces act along it.

Source of the path integral: Aumann and Shapley 1974; Friedman 2004; Sundararajan et al. 2017
(integrated gradients). The picture: Hoover et al. 2023.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.paths import CHUNK, OUTPUTS, Decode, Leg, decoded, integrate, legs, numbers
from etdyn.checks import bad, check_count
from etdyn.dynamics import DYNAMICS
from etdyn.energies import Hopfield
from etdyn.solve.solution import Solution, describe_system
from etdyn.systems import System

__all__ = ["contributions", "head_contributions", "memory_contributions", "node_scores"]

ROLES = ("query", "key")


@torch.no_grad()
def contributions(
    solution: Solution, decode: Decode, steps: Sequence[int] | None = None
) -> xr.Dataset:
    """What every term of the force, and the leak, did to the decoded state in each step.

    Args:
        solution: of `descend`, or of `solve` with its states; step k leads from x[k] to x[k + 1].
        decode: states `(batch, token, feature)` to what one looks at, `(batch, ...)` with up to
            three more dims: scores, `(token, output)` or images `(channel, row, column)`.
            Differentiable; for an image model `lambda x: model.pixels(model.decode(x))`.
        steps: which steps, 0 and up; None is all.

    Returns:
        Dataset (schema "etdyn.contributions/1") with dims step, sample, part and those of the
        decoded state: `contribution` of every part (the names of the terms, "leak" for the leaky
        dynamics, "remainder"), `state` before the step, and `change`, which is the sum of the
        contributions over `part`; all in the units of `decode`. Coordinates `time` and `time_end`.
        The remainder of `descend` is rounding (1e-12 of the decoded values), or with noise what
        the noise did. That of `solve` is O(h^5) in the spacing h of the saved times where forces
        are smooth, plus the solver's own error.

    Raises:
        ValueError, TypeError: a solution without its states, a step out of range, an output of
            `decode` that is not as above.
    """
    system = solution.system
    names = [*system.interaction.terms(), *(["leak"] if system.dynamics == "leaky" else [])]

    def rates(x: Tensor) -> Tensor:
        pushes = [_push(system, x, force) for force in system.forces(x).values()]
        return torch.stack(pushes + ([-system.keep(x)] if system.dynamics == "leaky" else []))

    states, changes, parts = [], [], []
    for leg in legs(solution, steps):
        before, after = decoded(decode, leg.x0), decoded(decode, leg.x1)
        pushed = integrate(leg, decode, rates)
        states.append(before)
        changes.append(after - before)
        parts.append(torch.cat([pushed, (after - before - pushed.sum(0)).unsqueeze(0)]))
    found = {"state": states, "change": changes, "contribution": parts}
    labels = {"part": [*names, "remainder"]}
    return _dataset("etdyn.contributions/1", solution, steps, found, labels)


@torch.no_grad()
def head_contributions(
    solution: Solution, decode: Decode, steps: Sequence[int] | None = None
) -> xr.Dataset:
    """What every attention head did, in which role of its tokens; see `contributions`.

    As query a token is drawn to the keys that it attends to, as key to the queries that attend
    to it; the second has no counterpart in ordinary attention (ET section 1.2).

    Returns:
        Dataset (schema "etdyn.head_contributions/1"), `contribution` with dims step, sample,
        head, role ("query", "key") and those of the decoded state. Its sum over head and role is
        the contribution of attention.

    Raises:
        ValueError, TypeError: as `contributions`; no attention, or several.
    """
    system = solution.system
    name, heads = _attention(system, solution.x[0])

    def rates(x: Tensor) -> Tensor:
        forces = system.interaction.terms()[name].head_forces(system.activation(x))
        assert forces is not None
        return _push(system, x, forces.flatten(0, 1))

    found = []
    for leg in legs(solution, steps):
        done = integrate(leg, decode, rates)
        found.append(done.reshape(heads, len(ROLES), *done.shape[1:]))
    labels = {"head": range(heads), "role": ROLES}
    return _dataset("etdyn.head_contributions/1", solution, steps, {"contribution": found}, labels)


@torch.no_grad()
def memory_contributions(
    solution: Solution, decode: Decode, strongest: int = 8, steps: Sequence[int] | None = None
) -> xr.Dataset:
    """What the strongest memories did; see `contributions`.

    A memory pulls every token by r(h) xi. Strong is what changes the decoded sample most, by the
    Euclidean norm of its contribution, in that step and sample.

    Args:
        solution, decode, steps: as there.
        strongest: how many memories are kept.

    Returns:
        Dataset (schema "etdyn.memory_contributions/1"): `contribution` with dims step, sample,
        rank (strongest first) and those of the decoded state, `memory` (step, sample, rank) the
        index of the memory, and `rest` without rank, what all others did together. `rest` and
        the contributions add up to that of the Hopfield network.

    Raises:
        ValueError, TypeError: as `contributions`; no Hopfield network, or several; fewer
            memories than asked for.
    """
    check_count("strongest", strongest)
    memories = _memories(solution.system).memories
    if strongest > len(memories):
        raise bad("strongest", f"at most the {len(memories)} memories", strongest)
    kept, indices, rests = [], [], []
    for leg in legs(solution, steps):
        index, best, total = _strongest(solution.system, leg, decode, strongest)
        indices.append(index)
        kept.append(best)
        rests.append(total - best.sum(0))
    found = {"contribution": kept, "memory": indices, "rest": rests}
    labels = {"rank": range(strongest)}
    return _dataset("etdyn.memory_contributions/1", solution, steps, found, labels)


@torch.no_grad()
def node_scores(system: System, x: Tensor) -> xr.Dataset:
    """What every part of the velocity does to every token, without a decoder; for graphs.

        speed = |M v_i|,  how fast the part alone would move the token's g
        power = f_i . dg/dt,  the rate at which the term's energy falls by this token's motion

    Args:
        system: any.
        x: `(batch, token, feature)`.

    Returns:
        Dataset (schema "etdyn.node_scores/1") with dims sample, token, part (names of the terms,
        and "leak" with f_i = -x for the leaky dynamics). Summed over tokens the power of a term is
        minus its energy's slope, whichever sign; summed over parts it is the token's share of the
        dissipation, never negative (ET-F11, F30). Absent tokens have zeros.

    Raises:
        ValueError, TypeError: x is not a state of the system.
    """
    law, lagrangian, x = DYNAMICS[system.dynamics], system.lagrangian, x.detach()
    forces, pulls = system.forces(x), {}
    for name, force in forces.items():
        pulls[name] = force, _push(system, x, force)
    if system.dynamics == "leaky":
        pulls["leak"] = -x, -x
    moved = system.activation_velocity(x)
    power, speed = [], []
    for force, velocity in pulls.values():
        alone = law.activation_velocity(lagrangian, x, velocity)
        speed.append(system.keep(torch.linalg.vector_norm(alone, dim=-1)))
        power.append(system.keep((force * moved).sum(-1)))
    dims = ("part", "sample", "token")
    data = {
        "speed": (dims, torch.stack(speed).numpy(force=True), _about("speed of g")),
        "power": (dims, torch.stack(power).numpy(force=True), _about("energy released per time")),
    }
    coords = {"part": _text(pulls)}
    attrs = store.provenance("etdyn.node_scores/1", {"system": describe_system(system)}, x)
    return xr.Dataset(data, coords, attrs).transpose("sample", "token", "part")


# --- forces in parts ---------------------------------------------------------------------------


def _push(system: System, x: Tensor, force: Tensor) -> Tensor:
    """The velocity that a force gives by itself, `(..., batch, token, feature)`."""
    if system.dynamics == "leaky":
        return system.keep(force)  # its -x is a part of its own
    return system.keep(DYNAMICS[system.dynamics].velocity(system.lagrangian, x, force))


def _strongest(
    system: System, leg: Leg, decode: Decode, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Indices and contributions `(count, batch, ...)` of the strongest memories, and all's sum."""
    term = _memories(system)
    index, best, total = None, None, None
    for of in torch.split(torch.arange(len(term.memories), device=leg.x0.device), CHUNK):

        def rates(x: Tensor, of: Tensor = of) -> Tensor:
            pull = term.response(system.activation(x))[..., of].movedim(-1, 0)[..., None]
            return _push(system, x, pull * term.memories[of, None, None])

        found = integrate(leg, decode, rates)
        total = found.sum(0) if total is None else total + found.sum(0)
        number = of[:, None].expand(found.shape[:2])
        index = number if index is None else torch.cat([index, number])
        best = found if best is None else torch.cat([best, found])
        size = torch.linalg.vector_norm(best.reshape(*best.shape[:2], -1), dim=2)
        rank = size.argsort(dim=0, descending=True, stable=True)[:count]
        sample = torch.arange(rank.shape[1], device=rank.device)
        index, best = index[rank, sample], best[rank, sample]
    assert index is not None and best is not None and total is not None
    return index, best, total


def _attention(system: System, x: Tensor) -> tuple[str, int]:
    """The name of the term that has heads, and how many."""
    g = system.activation(x)
    forces = {name: term.head_forces(g) for name, term in system.interaction.terms().items()}
    found = [(name, len(each)) for name, each in forces.items() if each is not None]
    if len(found) != 1:
        raise bad("solution", "a system with one term that has heads, as Attention", len(found))
    return found[0]


def _memories(system: System) -> Hopfield:
    found = [t for t in system.interaction.terms().values() if isinstance(t, Hopfield)]
    if len(found) != 1:
        raise bad("solution", "a system with one term of kind Hopfield", len(found))
    return found[0]


# --- the result --------------------------------------------------------------------------------


def _dataset(
    schema: str,
    solution: Solution,
    steps: Sequence[int] | None,
    found: dict[str, list[Tensor]],
    labels: Mapping[str, Sequence[Any]],
) -> xr.Dataset:
    """Stack `([label dims], sample, ...)` of every step; move the sample in front of the labels."""
    chosen = numbers(solution, steps)
    data: dict[str, Any] = {}
    for name, tensors in found.items():
        names = [*labels] if name in ("contribution", "memory") else []
        values = torch.stack(tensors).numpy(force=True)
        dims = ["step", *names, "sample", *OUTPUTS[values.ndim - len(names) - 2]]
        data[name] = (dims, values, _about(_MEANINGS[name]))
    t = solution.t.numpy(force=True)
    coords = {
        "step": chosen,
        "sample": np.arange(solution.x.shape[1]),
        "time": ("step", t[chosen], _about("flow time before the step")),
        "time_end": ("step", t[np.array(chosen) + 1], _about("flow time after the step")),
        **{name: _text(v) if name in ("part", "role") else list(v) for name, v in labels.items()},
    }
    attrs = store.provenance(schema, {"solution": solution.config}, solution.x)
    return xr.Dataset(data, coords, attrs).transpose("step", "sample", *labels, ...)


_MEANINGS = {
    "state": "decoded state before the step",
    "change": "change of the decoded state in the step",
    "contribution": "contribution to the change of the decoded state",
    "memory": "index of the memory",
    "rest": "contribution of all other memories",
}


def _about(meaning: str) -> dict[str, str]:
    return {"units": "1", "long_name": meaning}


def _text(labels: Iterable[str]) -> npt.NDArray[Any]:
    return np.array([*labels], dtype=np.dtypes.StringDType())
