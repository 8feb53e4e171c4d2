"""How large an Euler step may be at an equilibrium: what theory says, and what happens.

Near an equilibrium a step of h multiplies each mode of the stability operator (`operators`) by

    sphere  1 - h lambda                                  stable up to 2 / lambda_max
    leaky   1 - h kappa                                   up to 2 / max(1, kappa_max)
    et      (1 - (h/c)(kappa - 1)) / (1 + h/c)            up to 2 c / (kappa_max - 2) (ET-F23)

The published flow has no equilibrium in x: it drifts along x = c z* with z* = force(z*), so its
multiplier is that of g, which eats the growth of c, and its limit holds for the step at hand:
c grows by h with every step, and each run enters the stable zone. The 1 of the leaky flow belongs
to the means and the lengths of tokens, which have kappa = 1. g does not see them grow beyond
h = 2, not in first order, but then the lengths change sign, and with them g.
"""

from __future__ import annotations

import math

import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.labels import labelled
from etdyn.analysis.spectrum import spectrum
from etdyn.checks import check_count, check_finite, check_positive, check_tensor
from etdyn.lagrangians import LayerNorm
from etdyn.solve.descent import descent_bound
from etdyn.solve.euler import iterate
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["hessian_bound", "measured_limit", "multiplier", "predicted_limits"]

STILL = 1e-6  # residual, relative to 1 + |force|, below which a state counts as an equilibrium
ALIGNED = 1e-3  # |x - c force| / |x| (without means) below which x = c z*
BRACKET = (1 / 3, 5.0)  # shares of the prediction between which the bisection starts
FAR = 1e6  # and where there is none: c divided and multiplied by this


@torch.no_grad()
def predicted_limits(system: System, x: Tensor) -> xr.Dataset:
    """The step sizes of Euler that theory allows at x.

    Args:
        system: has an energy.
        x: float64 `(batch, token, feature)`. `linear` needs an equilibrium, as `find_equilibrium`
            returns; under "et" with layer norm also c times one, whatever c > 0.

    Returns:
        Dataset (schema "etdyn.predicted_limits/1") with dim sample, in flow time:
        `descent`: the energy does not rise in a step from x (ET-F20, `descent_bound`);
        `linear`: deviations from the equilibrium do not grow, as this module's head says;
        infinite where no step is too large; NaN where x is no equilibrium: residual above 1e-6
        of 1 + |force|, or under "et" x not parallel to its force to 1e-3. Directions in which
        the flow itself is unstable are not counted;
        `lipschitz`: 2 / (a bound of |d velocity/dx| at x), ET-F22; zero where none is known;
        and `eigenvalue`, the largest of the stability operator, `scale` c (NaN but for "et"),
        `residual`.

    Raises:
        ValueError, TypeError: wrong input, naming the argument; a system without an energy.
    """
    x = _start(system, x)
    top = _top_mode(system, x)[0]
    scale = _scale(system, x)
    still = system.residual(x) <= STILL * (1 + _norm(system.force(x)))
    linear = torch.where(still, _linear_limit(system, top, scale), torch.nan)
    values = {
        "descent": (descent_bound(system, x), "largest step that cannot raise the energy"),
        "linear": (linear, "largest step that keeps the equilibrium stable"),
        "lipschitz": (2 / _jacobian_bound(system, x), "2 / bound of the Jacobian"),
        "eigenvalue": (top, "largest eigenvalue of the stability operator"),
        "scale": (scale, "c of x = c z*"),
        "residual": (system.residual(x), "|P grad E|"),
    }
    return _per_sample("etdyn.predicted_limits/1", system, x, values)


@torch.no_grad()
def measured_limit(
    system: System, x: Tensor, steps: int = 60, size: float = 1e-5, width: float = 1e-3
) -> xr.Dataset:
    """The Euler step up to which small deviations from an equilibrium decay, by bisection.

    Two runs start `size` times |x| to either side of x along the most curved direction: the top
    mode of the stability operator, or under "leaky" the lengths of the tokens where these have the
    largest exponent, kappa = 1. Half their distance is the deviation, so that an inexact
    equilibrium does no harm, and the step is too large if it is longer after `steps` than before.
    It is measured in g, where a mode stays a mode (in x it drags means and lengths along), and
    in x only for the lengths, which g does not see. Under "et" with layer norm one step decides,
    since c grows (see this module's head). All samples are bisected in one batch.

    Args:
        system: has an energy.
        x: float64 `(batch, token, feature)`, an equilibrium as in `predicted_limits`.
        steps: of a trial; with layer norm under "et" always one.
        size: of the perturbation, relative to |x|.
        width: relative, of the last bracket.

    Returns:
        Dataset (schema "etdyn.measured_limit/1") with dim sample: `limit`, the middle of the last
        bracket; the first goes from a third to five times the prediction (no limit predicted: from
        1e-6 c to 1e6 c). Infinite where its upper end decays, 0 where its lower end grows, NaN
        where nothing can be predicted. `predicted` and `ratio` = limit / predicted.

    Raises:
        ValueError, TypeError: wrong input, naming the argument; a system without an energy.
    """
    check_count("steps", steps)
    check_positive("size", size)
    check_positive("width", width)
    x = _start(system, x)
    predicted = torch.from_numpy(predicted_limits(system, x).linear.values).to(x)
    direction, lengths = _top_direction(system, x)
    kick = size * _norm(x)[:, None, None] * direction
    count = 1 if _drifts(system) else int(steps)

    def decays(h: Tensor) -> Tensor:
        before, after = _deviations(system, x, kick, h=h, steps=count, in_x=lengths)
        return _norm(after) <= _norm(before)

    known, c = predicted.isfinite(), _scale(system, x).nan_to_num(1.0)
    low = torch.where(known, BRACKET[0] * predicted, c / FAR)
    high = torch.where(known, BRACKET[1] * predicted, c * FAR)
    none, unlimited = ~decays(low), decays(high)
    for _ in range(math.ceil(math.log2(float((high / low).log().max()) / width))):
        middle = (low * high).sqrt()
        good = decays(middle)
        low, high = torch.where(good, middle, low), torch.where(good, high, middle)
    limit = (low * high).sqrt().masked_fill(unlimited, torch.inf).masked_fill(none, 0.0)
    limit = limit.masked_fill(predicted.isnan(), torch.nan)
    values = {
        "limit": (limit, "measured largest stable step"),
        "predicted": (predicted, "predicted largest stable step"),
        "ratio": (limit / predicted, "measured / predicted"),
    }
    return _per_sample(
        "etdyn.measured_limit/1", system, x, values, steps=count, size=size, width=width
    )


@torch.no_grad()
def multiplier(system: System, x: Tensor, step: float | Tensor, size: float = 1e-5) -> xr.Dataset:
    """By what one Euler step multiplies a small deviation of g along the top mode.

    Args:
        system: has an energy.
        x: float64 `(batch, token, feature)`, an equilibrium as in `predicted_limits`.
        step: h > 0, one for all or `(batch,)`.
        size: of the perturbation to either side of x, relative to |x|.

    Returns:
        Dataset (schema "etdyn.multiplier/1") with dim sample: `measured`, the part of dg after
        the step along dg before it, over the length of the latter; `predicted`, as this
        module's head says; `turned`, the sine of the angle between both, zero for a mode;
        `eigenvalue`, kappa of the mode, or lambda where the flow has no leak and does not drift.

    Raises:
        ValueError, TypeError: wrong input, naming the argument; a system without an energy.

    Source: ET-F23.
    """
    check_positive("size", size)
    x = _start(system, x)
    h = _steps(step, x)
    top, direction = _top_mode(system, x)[:2]
    kick = size * _norm(x)[:, None, None] * direction
    before, after = _deviations(system, x, kick, h=h, steps=1)
    measured = (before * after).sum((1, 2)) / before.square().sum((1, 2))
    rest = _norm(after - measured[:, None, None] * before) / _norm(after)
    scale = _scale(system, x)
    kappa = 1 + scale * top if _drifts(system) else top
    share = h / scale
    drifting = (1 - share * (kappa - 1)) / (1 + share)
    values = {
        "measured": (measured, "measured multiplier of g"),
        "predicted": (drifting if _drifts(system) else 1 - h * top, "predicted multiplier of g"),
        "turned": (rest, "sine of the angle by which the deviation turned"),
        "eigenvalue": (kappa, "exponent of the mode"),
        "step": (h, "step size"),
    }
    return _per_sample("etdyn.multiplier/1", system, x, values, size=size)


@torch.no_grad()
def hessian_bound(system: System, tokens: int) -> float | Tensor:
    """|H|_2 at most, wherever g is under layer norm; infinite where not known.

    See `hessian_bound` of the terms, with the ball of radius gamma sqrt(D) around delta.

    Returns:
        One number for all samples, or `(batch,)` where masks or graphs make them differ.
    """
    if not isinstance(system.lagrangian, LayerNorm):
        return math.inf
    centre = float(torch.linalg.vector_norm(system.lagrangian.delta))
    return system.potential.hessian_bound(tokens, centre, float(system.lagrangian.radius))


def _jacobian_bound(system: System, x: Tensor) -> Tensor:
    """Of |d velocity/dx| at x (sphere: of the Riemannian Hessian), `(batch,)`."""
    bound = hessian_bound(system, x.shape[1])
    if not isinstance(system.lagrangian, LayerNorm):
        return torch.full_like(x[:, 0, 0], torch.inf)
    if system.dynamics == "sphere":
        outward = (x * system.force(x)).sum(-1).abs() / x.square().sum(-1).sqrt()
        return bound + (system.keep(outward) / system.lagrangian.radius).amax(1)
    rate = system.keep(system.clock_rate(system._stand_in(x))).amax(1)
    return bound * rate + (system.dynamics == "leaky")


def _drifts(system: System) -> bool:
    """Whether equilibria exist in g alone."""
    return system.dynamics == "et" and isinstance(system.lagrangian, LayerNorm)


def _scale(system: System, x: Tensor) -> Tensor:
    """c of x = c force(x) up to the means, `(batch,)`; NaN where there is none."""
    if not (_drifts(system) and isinstance(system.lagrangian, LayerNorm)):
        return torch.full_like(x[:, 0, 0], torch.nan)
    y, f = (system.keep(system.lagrangian.centre(v)) for v in (x, system.force(x)))
    c = (y * f).sum((1, 2)) / f.square().sum((1, 2))
    fits = (c > 0) & (_norm(y - c[:, None, None] * f) <= ALIGNED * _norm(y))
    return torch.where(fits, c, torch.nan)


def _linear_limit(system: System, top: Tensor, scale: Tensor) -> Tensor:
    if _drifts(system):
        beyond = scale * top - 1  # kappa_max - 2
        return torch.where(beyond <= 0, torch.inf, 2 * scale / beyond)
    if system.dynamics == "leaky" and isinstance(system.lagrangian, LayerNorm):
        top = top.clamp(min=1)
    return torch.where(top <= 0, torch.inf, 2 / top)


def _top_mode(system: System, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest eigenvalue of the stability operator `(batch,)`, its direction in x, and whether
    that is one of the lengths of tokens.
    """
    modes = spectrum(system, x, k=1, which="highest", vectors=True).isel(mode=-1)
    top, direction, radial = (
        torch.from_numpy(modes[name].values).to(x) for name in ("eigenvalue", "direction", "radial")
    )
    return top, direction, radial > 0.5


def _top_direction(system: System, x: Tensor) -> tuple[Tensor, Tensor]:
    """Unit directions in x that the largest steps stretch most, and whether they are lengths."""
    top, direction, radial = _top_mode(system, x)
    if system.dynamics != "leaky" or not isinstance(system.lagrangian, LayerNorm):
        return direction, torch.zeros_like(radial)
    lengths, y = radial | (top < 1), system.keep(system.lagrangian.centre(x))
    return torch.where(lengths[:, None, None], y / _norm(y)[:, None, None], direction), lengths


def _deviations(
    system: System, x: Tensor, kick: Tensor, *, h: Tensor, steps: int, in_x: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Half of what separates the runs from x + kick and x - kick, at the start and at the end.

    in_x: `(batch,)`, whether in x rather than in g; None: nowhere.
    """
    pair = system.select(torch.arange(len(x), device=x.device).repeat(2))
    start = pair.prepare(torch.cat([x + kick, x - kick]))
    *_, state = iterate(pair, start, h.repeat(2), steps)

    def apart(state: Tensor) -> Tensor:
        seen = pair.activation(state)
        if in_x is not None:
            seen = torch.where(in_x.repeat(2)[:, None, None], state, seen)
        a, b = seen.chunk(2)
        return system.keep(a - b) / 2

    return apart(start), apart(state)


def _start(system: System, x: Tensor) -> Tensor:
    _ = system.potential  # says so where there is no energy
    system.check(x)
    check_finite("x", x)
    if x.dtype != torch.float64:
        raise TypeError(f"x: expected float64, got {x.dtype} (see System.double)")
    return system.prepare(x)


def _steps(step: float | Tensor, x: Tensor) -> Tensor:
    if isinstance(step, Tensor) and step.ndim:
        check_tensor("step", step, (len(x),), x)
    else:
        check_positive("step", float(step))
    return torch.as_tensor(step, dtype=x.dtype, device=x.device).expand(len(x))


def _norm(v: Tensor) -> Tensor:
    return v.square().sum((1, 2)).sqrt()


def _per_sample(
    schema: str, system: System, x: Tensor, values: dict[str, tuple[Tensor, str]], **config: float
) -> xr.Dataset:
    data = {n: labelled("sample", v.cpu().numpy(), long) for n, (v, long) in values.items()}
    coords = {"sample": range(len(x))}
    attrs = store.provenance(schema, {**config, "system": describe_system(system)}, x)
    return xr.Dataset(data, coords, attrs)
