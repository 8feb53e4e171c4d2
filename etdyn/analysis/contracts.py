"""What every System promises beside its physics: shapes, samples, precision, gradients, masks.

A docstring says what it means when the promise is broken, and is printed then.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from etdyn.analysis.bench import (
    SAME,
    Bench,
    DoesNotApply,
    Measurement,
    gap,
    law,
    outputs,
    worst,
)
from etdyn.systems import System

__all__ = ["CONTRACTS"]


@law("shapes", 0.0)
def shapes_are_right(b: Bench) -> Measurement:
    """An energy is (batch,): it sums over heads, tokens and memories, never over the batch; a force
    has the shape of g. Counted: wrong shapes.
    """
    sample, wrong = b.g[:, 0, 0], []

    def expect(what: str, value: Tensor, like: Tensor) -> None:
        if value.shape != like.shape:
            wrong.append(f"{what} is {tuple(value.shape)}, not {tuple(like.shape)}")

    for name, term in b.system.interaction.terms().items():
        expect(f"force of {name}", term.force(b.g), b.g)
        expect(f"force_jvp of {name}", term.force_jvp(b.g, b.g), b.g)
    for name, term in b.system.potential.terms().items() if b.system.has_energy else ():
        energy, force = term.energy_and_force(b.g)
        expect(f"energy of {name}", term.energy(b.g), sample)
        expect(f"relative energy of {name}", term.energy(b.g, relative=True), sample)
        expect(f"energy of {name}.energy_and_force", energy, sample)
        expect(f"force of {name}.energy_and_force", force, b.g)
    return float(len(wrong)), "; ".join(wrong)


@law("energy_and_force agree", SAME, needs_energy=True)
def energy_and_force_agree(b: Bench) -> Measurement:
    """energy_and_force does not return what energy and force return."""
    found = []
    for name, term in b.system.potential.terms().items():
        energy, force = term.energy_and_force(b.g)
        found.append((gap(energy, term.energy(b.g)), f"energy of {name}"))
        found.append((gap(force, term.force(b.g)), f"force of {name}"))
    return worst(found)


@law("terms sum up", SAME)
def terms_sum_up(b: Bench) -> Measurement:
    """The named terms do not sum to the energy and the force, or have names that cannot be
    attributes (1 a name).
    """
    names = list(b.system.interaction.terms())
    unfit = [name for name in names if not name.isidentifier() or name == "lagrangian"]
    forces = torch.stack(list(b.system.forces(b.x).values()))
    scale = forces.abs().amax((0, 2, 3))
    found = [(float(len(unfit)), f"names {unfit}")]
    found.append((gap(forces.sum(0), b.system.force(b.x), scale), "force"))
    if b.system.has_energy:
        whole = b.system.energies(b.x)
        terms = torch.stack([whole[name] for name in names])
        total = b.system.interaction_energy(b.x)
        found.append((gap(terms.sum(0), total, terms.abs().amax(0)), "energy"))
    return worst(found)


@law("batch independent", SAME)
def samples_do_not_mix(b: Bench) -> Measurement:
    """A sample alone, or among others in another order, is not what it is in the batch: something
    is summed, averaged or normalised over the batch, or remembers the last one.
    """
    system, x = b.system, b.x
    if len(x) == 1:
        if system.masks is not None:
            raise DoesNotApply("one sample with its own mask")
        x = system.prepare(torch.cat([x, x + b.direction()]))
    order = torch.arange(len(x) - 1, -1, -1, device=x.device)
    together, turned = outputs(system, x), outputs(system.select(order), x[order])
    alone = [outputs(system.select(i[None]), x[i, None]) for i in torch.arange(len(x)).to(x.device)]
    single = {verb: torch.cat([said[verb] for said in alone]) for verb in together}
    back = {verb: value[order] for verb, value in turned.items()}
    return worst(
        _differences(single, together, "alone") + _differences(back, together, "in another order")
    )


@law("same call, same bits", 0.0)
def leaves_no_trace(b: Bench) -> Measurement:
    """A second call differs from the first, or a call changes its input, a parameter or a buffer:
    state is left behind, or something is random.
    """
    held = {"x": b.x, "g": b.g.clone()} | dict(b.system.state_dict(keep_vars=True))
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    first = {verb: value.clone() for verb, value in outputs(b.system, b.x).items()}
    b.system.interaction.force(held["g"])
    outputs(b.system, b.x.flip(0))
    second = outputs(b.system, b.x)
    found = [(_off(held[name], old), f"{name} changed") for name, old in before.items()]
    found += [(_off(second[verb], value), f"{verb}, second call") for verb, value in first.items()]
    return worst(found)


def _off(a: Tensor, b: Tensor) -> float:
    """Largest difference; shapes may be empty or scalar."""
    if torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).abs().max()) if a.shape == b.shape else torch.inf


@law("same in every mode", SAME)
def modes_do_not_matter(b: Bench) -> Measurement:
    """train() and eval(), or no_grad() and gradients, differ: dropout or running statistics; or a
    force made with torch.autograd.grad, where torch.func.grad works in every mode.
    """
    said: dict[str, dict[str, Tensor]] = {}
    for mode, training in (("train()", True), ("eval()", False)):
        said[mode] = outputs(copy.deepcopy(b.system).train(training), b.x)
    with torch.no_grad():
        said["no_grad()"] = outputs(b.system, b.x)
    with_gradient = b.x.clone().requires_grad_()
    said["a graph"] = {k: v.detach() for k, v in outputs(b.system, with_gradient).items()}
    found = []
    for mode, values in said.items():
        found += _differences(values, said["eval()"], f"in {mode}")
    return worst(found)


@law("finite at the edges", 0.0)
def finite_at_the_edges(b: Bench) -> Measurement:
    """NaN or infinity at an extreme state: a logarithm or a sum over nothing, a division by a
    length that may vanish, an exponential without its maximum taken out. A state may be refused
    by `prepare` with a ValueError. Counted: broken verbs.
    """
    count, broken, refused = 0, [], []
    for dtype in dict.fromkeys((torch.float64, b.dtype)):
        system = copy.deepcopy(b.system).to(dtype)
        for name, x in _edges(b).items():
            try:
                said = outputs(system, system.prepare(x.to(dtype)))
            except (ValueError, TypeError, RuntimeError):
                if name != "one token" and not _refuses(system, x.to(dtype)):
                    raise
                refused.append(name)
                continue
            bad = [verb for verb, value in said.items() if not bool(torch.isfinite(value).all())]
            count += len(bad)
            if bad:
                verbs = "every verb" if len(bad) == len(said) else ", ".join(bad)
                broken.append(f"{name} ({str(dtype)[6:]}): {verbs}")
    refusals = f"refused: {', '.join(dict.fromkeys(refused))}" if refused else ""
    return float(count), "; ".join(broken) or refusals


def _edges(b: Bench) -> dict[str, Tensor]:
    x, one = b.direction(), torch.ones_like(b.x)
    edges = {
        "zero": 0 * one,
        "constant tokens": 3 * one,
        "nearly constant tokens": one + 1e-5 * x,
        "states of 1e6": 1e6 * x,
        "states of 1e-8": 1e-8 * x,
    }
    return edges if b.system.masks is not None else edges | {"one token": x[:, :1]}


def _refuses(system: System, x: Tensor) -> bool:
    """Whether x is no start of this dynamics, as constant tokens are none on the sphere."""
    try:
        system.prepare(x)
    except (ValueError, TypeError):
        return True
    return False


@law("dtype and device kept", 0.0)
def dtype_is_kept(b: Bench) -> Measurement:
    """A float32 system must answer in float32, a float64 one in float64, on the device of the
    state: tensors that belong to an energy are parameters or buffers (register_buffer), and new
    ones follow the state (torch.zeros_like). Counted: verbs that do not.
    """
    wrong = []
    for dtype in (torch.float64, torch.float32):
        system = copy.deepcopy(b.system).to(dtype)
        for verb, value in outputs(system, system.prepare(b.x.to(dtype))).items():
            if value.dtype != dtype or value.device != b.x.device:
                wrong.append(f"{verb} of {dtype} is {value.dtype} on {value.device}")
    return float(len(wrong)), "; ".join(wrong)


class _LowPrecision(TorchFunctionMode):
    """Notes the functions that take or return tensors of another floating dtype than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in (*args, *(kwargs or {}).values(), result):
            low = isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 0
            if low and value.dtype != torch.float64:
                name = getattr(func, "__name__", str(func))
                self.found.append(f"{name} with {value.dtype}")
        return result


@law("float64 throughout", 0.0)
def precision_is_kept(b: Bench) -> Measurement:
    """Asked in float64, it computes in another dtype on the way: the digits are gone, whatever the
    dtype of the answer. Counted: calls of torch.
    """
    with _LowPrecision() as watch:
        outputs(b.system, b.x)
        b.system.interaction.force_jvp(b.g, b.g)
    return float(len(watch.found)), "; ".join(dict.fromkeys(watch.found))


@law("gradients reach parameters", 0.0)
def gradients_reach_parameters(b: Bench) -> Measurement:
    """Training through the force, or through the energy, leaves a parameter alone or makes it NaN:
    it is detached, converted or not used. Counted: parameters.
    """
    if b.x.shape[1] == 1:
        raise DoesNotApply("one token, which may have none to see")
    system = copy.deepcopy(b.system).requires_grad_(True)
    named: dict[str, Tensor] = dict(system.named_parameters())
    if not named:
        raise DoesNotApply("no parameters")
    force, pulled, energy = (_gradients(loss, named) for loss in _losses(b, system))
    lost = []
    for name in named:
        got = (force[name], pulled[name], energy[name])
        if not all(bool(torch.isfinite(value).all()) for value in got):
            lost.append(f"{name} (not finite)")
        elif pulled[name].any() and not force[name].any():
            lost.append(f"{name} (not through the force)")
        elif not (force[name].any() or energy[name].any()):
            lost.append(name)
    return float(len(lost)), ", ".join(lost)


def _losses(b: Bench, system: System) -> tuple[Tensor, Tensor, Tensor]:
    """A loss of the force, the same of minus the gradient of the energy, and one of the energy."""
    with torch.enable_grad():
        weights, x = b.direction(), b.x.clone().requires_grad_()
        loss = (weights * system.force(x)).sum()
        if not system.has_energy:
            return loss, loss, loss
        g = system.activation(x)
        energy = system.potential.energy(g).sum()
        (slope,) = torch.autograd.grad(energy, g, create_graph=True)
        return loss, -(weights * slope).sum(), energy


def _gradients(loss: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    """Of every parameter; zero where the loss does not know it."""
    found: tuple[Tensor | None, ...] = (None,) * len(named)
    if loss.requires_grad:
        found = torch.autograd.grad(
            loss, list(named.values()), retain_graph=True, allow_unused=True
        )
    pairs = zip(named.items(), found, strict=True)
    return {name: torch.zeros_like(p) if slope is None else slope for (name, p), slope in pairs}


@law("masks take tokens out", SAME)
def masked_tokens_contribute_nothing(b: Bench) -> Measurement:
    """A masked token still pulls, has an energy, moves, or counts in a mean; or `masked` changed
    the system that it was called on. See Interaction.masked.
    """
    system, x = b.system, b.x
    present = system.keep(torch.ones_like(x[..., 0])) > 0
    last = x.shape[1] - 1 - present.flip(1).long().argmax(1)
    tokens = present.scatter(1, last[:, None], value=False)
    if not bool(tokens.any(1).all()):
        raise DoesNotApply("a sample of one token")
    before, masked = outputs(system, x), system.masked(tokens=tokens)
    there = tokens.unsqueeze(-1)
    said = _present(outputs(masked, masked.prepare(x)), there)
    other = outputs(masked, masked.prepare(torch.where(there, x, 3 * b.direction())))
    found = _differences(_present(other, there), said, "depends on it")
    found += _differences(outputs(system, x), before, "changed the original")
    moved = masked.velocity(0.0, x).detach().masked_fill(there, 0.0).abs().max()
    found.append((float(moved), "a masked token moves"))
    if system.masks is None:
        found += _differences(_shorter(system, x), said, "is not that of the tokens left")
    return worst(found)


def _differences(
    said: dict[str, Tensor], expected: dict[str, Tensor], what: str
) -> list[tuple[float, str]]:
    """The gap of every verb, in units of what cancels in it at equilibrium too."""
    pull = expected["force"].abs().max()
    units = {"velocity": pull, "residual": pull, "dissipation": pull.square()}
    found = []
    for verb, value in said.items():
        unit = value.abs().max() if value.ndim == 1 else pull.new_zeros(())
        unit = torch.maximum(unit.detach(), units.get(verb, unit).detach())
        found.append((gap(value, expected[verb], unit), f"{verb} {what}"))
    return found


def _present(said: dict[str, Tensor], there: Tensor) -> dict[str, Tensor]:
    """Zero for tokens that are absent, which have no activation."""
    return {k: v.where(there, 0.0) if v.ndim == there.ndim else v for k, v in said.items()}


def _shorter(system: System, x: Tensor) -> dict[str, Tensor]:
    """Without the last token at all; nothing where the interaction has a fixed number of tokens."""
    try:
        said = outputs(system, system.prepare(x[:, :-1]))
    except (ValueError, RuntimeError, IndexError):
        return {}
    pad = (0, 0, 0, 1)
    return {k: torch.nn.functional.pad(v, pad) if v.ndim == 3 else v for k, v in said.items()}


CONTRACTS = (
    shapes_are_right,
    energy_and_force_agree,
    terms_sum_up,
    samples_do_not_mix,
    leaves_no_trace,
    modes_do_not_matter,
    finite_at_the_edges,
    dtype_is_kept,
    precision_is_kept,
    gradients_reach_parameters,
    masked_tokens_contribute_nothing,
)
