"""The laws of physics that any System must satisfy, each a measurement; autograd is the oracle.

A docstring says what it means when the law does not hold, and is printed then.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etdyn.analysis.bench import (
    IDENTITY,
    SAME,
    Bench,
    Measurement,
    gap,
    gradient,
    inner,
    jvp,
    law,
    norm,
    ratio,
    secant,
    twist,
    worst,
)
from etdyn.interactions import Interaction
from etdyn.solve.flow import solve
from etdyn.solve.solution import Status

__all__ = ["LAWS"]

MAX_DENSE = 256  # size of a state up to which a complex spectrum is worth computing
POWER_STEPS = 20
ROUNDING = 1e-11  # of an energy, and of the square of the solver's tolerance


@law("g = grad L", IDENTITY)
def activation_is_a_gradient(b: Bench) -> Measurement:
    """lagrangian.activation is not the gradient of lagrangian.value (ET-F2)."""
    lagrangian = b.system.lagrangian
    return gap(lagrangian.activation(b.x), gradient(lagrangian.value, b.x))


@law("M = dg/dx", IDENTITY)
def metric_is_the_derivative(b: Bench) -> Measurement:
    """lagrangian.metric is not the derivative of lagrangian.activation (ET-F2)."""
    lagrangian, u = b.system.lagrangian, b.direction()
    scale = secant(lagrangian.activation(b.x), b.x, u)
    return gap(lagrangian.metric(b.x, u), jvp(lagrangian.activation, b.x, u), scale)


def _dense_metric(b: Bench) -> Tensor:
    """dg/dx of the first token of every sample, by autograd, `(batch, feature, feature)`."""
    activation, dim = b.system.lagrangian.activation, b.x.shape[-1]
    eye = torch.eye(dim, dtype=b.x.dtype, device=b.x.device).unsqueeze(1)
    columns = [jvp(activation, x.repeat(dim, 1, 1), eye)[:, 0] for x in b.x[:, :1]]
    return torch.stack(columns).detach().mT


@law("dg/dx symmetric", IDENTITY)
def metric_is_symmetric(b: Bench) -> Measurement:
    """g is no gradient, so that the energy may rise: is gamma a number for each feature instead of
    one for all? (ET-F11)
    """
    metric = _dense_metric(b)
    return gap(metric, metric.mT)


@law("dg/dx >= 0", IDENTITY)
def metric_is_positive(b: Bench) -> Measurement:
    """The Lagrangian is not convex, so that the energy rises: is gamma negative? (ET-F11)"""
    metric = _dense_metric(b)
    values = torch.linalg.eigvalsh((metric + metric.mT) / 2)
    return ratio((-values[:, 0]).clamp(min=0), values.abs().amax(1))


@law("M^1/2 twice = M", IDENTITY)
def root_squares_to_the_metric(b: Bench) -> Measurement:
    """lagrangian.metric_root is not the root of lagrangian.metric: spectra are wrong."""
    lagrangian, u = b.system.lagrangian, b.direction()
    twice = lagrangian.metric_root(b.x, lagrangian.metric_root(b.x, u))
    return gap(twice, lagrangian.metric(b.x, u), secant(lagrangian.activation(b.x), b.x, u))


@law("x.g - L = L*(g)", IDENTITY)
def legendre_transform(b: Bench) -> Measurement:
    """lagrangian.legendre or .dual is not the Legendre transform of .value: the energy of the leaky
    flow is wrong (ET-F2).
    """
    lagrangian = b.system.lagrangian
    g, value = lagrangian.activation(b.x), lagrangian.value(b.x)
    exact = (b.x * g).sum(-1) - value
    scale = ((b.x * g).abs().sum(-1) + value.abs()).amax(1)
    legendre, dual = lagrangian.legendre(b.x), lagrangian.dual(g)
    return worst([(gap(legendre, exact, scale), "legendre"), (gap(dual, exact, scale), "dual")])


@law("P projects", IDENTITY)
def tangent_projects(b: Bench) -> Measurement:
    """lagrangian.tangent is no orthogonal projection: residuals are wrong."""
    tangent, u, v = b.system.lagrangian.tangent, b.direction(), b.direction()
    pu, pv = tangent(b.x, u), tangent(b.x, v)
    return max(gap(tangent(b.x, pu), pu), twist(u, pu, v, pv))


@law("force = -grad E", IDENTITY, needs_energy=True)
def force_is_minus_the_gradient(b: Bench) -> Measurement:
    """About 2: the sign. Less: a part is missing; a token may act in two roles, as query and as
    key, and feels both (ET-F1).
    """
    found = []
    for name, term in b.system.potential.terms().items():
        found.append((gap(term.force(b.g), -gradient(term.energy, b.g)), name))
    return worst(found)


@law("force has no curl", IDENTITY, needs_energy=True)
def force_has_no_curl(b: Bench) -> Measurement:
    """The derivative of the force is not symmetric, so that it is the gradient of nothing: a role
    that is missing, or a gather over an asymmetric graph (ET-F12).
    """
    u, v = b.direction(), b.direction()

    def curl(term: Interaction) -> float:
        scale = secant(term.force(b.g), b.g, u)
        return twist(u, jvp(term.force, b.g, u), v, jvp(term.force, b.g, v), scale)

    return b.terms(curl)


@law("force_jvp = d force", IDENTITY)
def derivative_of_the_force(b: Bench) -> Measurement:
    """hvp (with its sign turned), or force_jvp, is not the derivative of the force: spectra, Newton
    steps and implicit gradients are wrong (ET-F10).
    """
    u = b.direction()

    def off(term: Interaction) -> float:
        scale = secant(term.force(b.g), b.g, u)
        return gap(term.force_jvp(b.g, u), jvp(term.force, b.g, u), scale)

    return b.terms(off)


@law("relative energy", IDENTITY, needs_energy=True)
def relative_energy_differs_by_a_constant(b: Bench) -> Measurement:
    """energy(g, relative=True) must differ from energy(g) by the same number at every g (ET-F6)."""
    other, found = b.system.keep(b.direction()), []
    for name, term in b.system.potential.terms().items():
        here, there = (term.energy(g) for g in (b.g, other))
        scale = torch.maximum(here.abs(), there.abs())
        change = here - there
        same = term.energy(b.g, relative=True) - term.energy(other, relative=True)
        found.append((gap(same, change, scale), name))
    return worst(found)


@law("curvature bound", IDENTITY, needs_energy=True)
def curvature_bound_holds(b: Bench) -> Measurement:
    """An eigenvalue of the Hessian lies above curvature_bound: guarded steps are not safe. Leave
    the bound infinite where it is not known (ET-F21).
    """

    def excess(term: Interaction) -> float:
        bound, u = term.curvature_bound(b.x.shape[1]), b.direction()
        for _ in range(POWER_STEPS):
            u = u / norm(u)[:, None, None]
            hu = -term.force_jvp(b.g, u)
            top, size = inner(u, hu), norm(hu)
            shift = 2 * size + (size == 0)  # lifts the top above the bottom, and keeps u from 0
            u = hu + shift[:, None, None] * u
        return ratio((top - bound).clamp(min=0), torch.maximum(size, top.abs()))

    return b.terms(excess)


@law("spectrum is real", IDENTITY, needs_energy=True)
def spectrum_is_real(b: Bench) -> Measurement:
    """The Jacobian J of the flow is not self-adjoint, M J = (M J)^T fails, so that its eigenvalues
    may be complex. If the force has a curl or dg/dx is not symmetric, look there (ET-F12).
    """
    u, v = b.direction(), b.direction()
    if b.system.dynamics == "sphere":  # where radii are a matter of gauge
        u, v = (b.system.lagrangian.tangent(b.x, w) for w in (u, v))
    ju, jv = (jvp(lambda x: b.system.velocity(0.0, x), b.x, w) for w in (u, v))
    measured = twist(b.metric(u), ju, b.metric(v), jv)
    return measured, "" if measured <= IDENTITY else _largest_imaginary_part(b)


def _largest_imaginary_part(b: Bench) -> str:
    """Of the eigenvalues of the flow's Jacobian at the first state, in words."""
    size = b.x[0].numel()
    if size > MAX_DENSE:
        return ""
    rows = torch.zeros(size, dtype=torch.int64, device=b.x.device)
    system, eye = b.system.select(rows), torch.eye(size, dtype=b.x.dtype, device=b.x.device)
    unit = eye.reshape(size, *b.x.shape[1:])
    jacobian = jvp(lambda x: system.velocity(0.0, x), b.x[rows], unit).reshape(size, size)
    values = torch.linalg.eigvals(jacobian.detach())
    return (
        f"largest |Im| of an eigenvalue {float(values.imag.abs().max()):.2g}, "
        f"largest |eigenvalue| {float(values.abs().max()):.2g}"
    )


def _rate_scale(b: Bench) -> Tensor:
    """What cancels in v.Mv: |M| (|v| + |f|)^2 summed over tokens, |M| from a random direction."""
    u, v, force = b.direction(), b.system.velocity(0.0, b.x), b.system.force(b.x)
    stretch = b.metric(u).norm(dim=-1) / u.norm(dim=-1)
    push: Tensor = v.norm(dim=-1) + force.norm(dim=-1)
    scale: Tensor = (stretch * push.square()).sum(1)
    return scale


@law("dissipation = -dE/dt", IDENTITY, needs_energy=True)
def dissipation_is_the_slope(b: Bench) -> Measurement:
    """The energy does not change along the flow as v.Mv says: energy, force and M do not belong
    together (ET-F11, ET-F30).
    """
    slope = jvp(b.system.energy, b.x, b.system.velocity(0.0, b.x))
    return gap(b.system.dissipation(b.x), -slope, _rate_scale(b))


@law("dissipation >= 0", SAME, needs_energy=True)
def dissipation_is_positive(b: Bench) -> Measurement:
    """The energy rises along the flow: M is not positive (ET-F11)."""
    return ratio((-b.system.dissipation(b.x)).clamp(min=0), _rate_scale(b))


@law("energy falls", 1e-6, needs_energy=True)
def energy_falls(b: Bench) -> Measurement:
    """Along an accurate solution the energy rises: this share of all its changes (ET-F11)."""
    # dopri5, for the time in which g of the fastest sample could change by itself, or less
    size = norm(b.g).clamp(min=torch.finfo(b.g.dtype).tiny)
    pace = ratio(norm(b.system.activation_velocity(b.x)), size)
    if pace == 0:
        return 0.0, "at rest"
    flow = solve(
        b.system, b.x, torch.linspace(0, 1 / pace, 11), "dopri5", rtol=1e-7, atol=1e-9,
        gradient=None, max_steps=150, throw=False,
    )  # fmt: skip
    if flow.failure is not None and bool((flow.status != Status.MAX_STEPS).all()):
        return torch.nan, f"the solver ended at t = {flow.failure.time:.3g}: {flow.failure.reason}"
    energy = torch.stack([b.system.energy(x) for x in flow.x])
    change = energy[1:] - energy[:-1]
    change = torch.where(change.abs() <= ROUNDING * energy.abs().amax(0), 0.0, change)
    return ratio(change.clamp(min=0).sum(0), change.abs().sum(0))


LAWS = (
    activation_is_a_gradient,
    metric_is_the_derivative,
    metric_is_symmetric,
    metric_is_positive,
    root_squares_to_the_metric,
    legendre_transform,
    tangent_projects,
    force_is_minus_the_gradient,
    force_has_no_curl,
    derivative_of_the_force,
    relative_energy_differs_by_a_constant,
    curvature_bound_holds,
    spectrum_is_real,
    dissipation_is_the_slope,
    dissipation_is_positive,
    energy_falls,
)
