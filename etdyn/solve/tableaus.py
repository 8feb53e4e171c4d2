"""Embedded explicit Runge-Kutta pairs as data, and one step: stages, error, next size, interpolant.

States are `(batch, token, feature)` on any device; times and step sizes are float64. Every
function here treats each sample by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "LEAST_ERROR",
    "TABLEAUS",
    "Tableau",
    "error_ratio",
    "first_steps",
    "interpolate",
    "rk_step",
    "step_factor",
]

Row = tuple[float, ...]
Floats = NDArray[np.float64]

SAFETY, SHRINK, GROW, MEMORY = 0.9, 0.2, 10.0, 0.2
LEAST_ERROR = 1e-4
BROKEN_SHRINK = 0.1


@dataclass(frozen=True)
class Tableau:
    """An explicit pair whose last stage is the first of the next step (FSAL).

        k_i = f(t + c_i h, x + h sum_j a_ij k_j),      x1 = x + h sum_i b_i k_i
        error = h sum_i e_i k_i,                       e = b - b_embedded
        x(t + theta h) = x + h sum_i b_i(theta) k_i,   b_i(theta) = sum_d dense_id theta^d

    Attributes:
        name: as in `TABLEAUS`.
        order: of x1, which the integration goes on with.
        embedded_order: of x1 - error.
        dense_order: of the interpolant; its error within a step is O(h^(dense_order + 1)).
        c: nodes, the row sums of a.
        a: row i holds a_ij for j < i; the last row is b without its last, zero weight.
        error: e, one number a stage.
        dense: row i holds the coefficients of theta, theta^2, ... in b_i(theta).
        source: where the numbers come from.
    """

    name: str
    order: int
    embedded_order: int
    dense_order: int
    c: Row
    a: tuple[Row, ...]
    error: Row
    dense: tuple[Row, ...]
    source: str

    @property
    def stages(self) -> int:
        """Stages of a step; a step costs one evaluation less, since the first is known."""
        return len(self.a)

    @property
    def b(self) -> Row:
        """Weights of the step."""
        return (*self.a[-1], 0.0)

    @property
    def q(self) -> int:
        """Power of h in the error estimate: min(order, embedded order) + 1."""
        return min(self.order, self.embedded_order) + 1


def rk_step(
    tableau: Tableau,
    velocity: Callable[[Tensor, Tensor], Tensor],
    times: Sequence[Tensor],
    *,
    x: Tensor,
    k: Tensor,
    h: Tensor,
) -> tuple[Tensor, list[Tensor]]:
    """One step of every sample.

    Args:
        tableau: the pair.
        velocity: f(t, x) with t `(batch,)` and x `(batch, token, feature)`.
        times: t + c_i h of every stage, each `(batch,)`.
        x: `(batch, token, feature)`.
        k: f at the start, shape of x.
        h: steps `(batch,)`, dtype of x.

    Returns:
        x1, shape of x, and the stages k_i; `stages - 1` evaluations.
    """
    stages, y = [k], x
    for row, t in zip(tableau.a[1:], times[1:], strict=True):
        y = torch.addcmul(x, _column(h), _combine(row, stages))
        stages.append(velocity(t, y))
    return y, stages


@torch.no_grad()
def error_ratio(
    tableau: Tableau,
    x: Tensor,
    x1: Tensor,
    stages: Sequence[Tensor],
    *,
    h: Tensor,
    rtol: float,
    atol: float,
    tokens: Tensor | None = None,
) -> Floats:
    """RMS over token and feature of error / (atol + rtol max(|x|, |x1|)), `(batch,)`, on the host.

    Above 1 the step is too large. NaN where x1 or the error is not finite. With `tokens`, bool
    `(batch or 1, token)`, the mean is over those that are True.
    """
    error = _column(h) * _combine(tableau.error, stages)
    norm = _rms(error / _scale(torch.maximum(x.abs(), x1.abs()), rtol, atol), tokens)
    good = torch.isfinite(x1).flatten(1).all(1) & torch.isfinite(norm)
    return _host(torch.where(good, norm, torch.nan))


def step_factor(tableau: Tableau, error: Floats, before: Floats, held: NDArray[np.bool_]) -> Floats:
    """By how much a step changes after an attempt with this error: PI control.

        accepted:  clip(0.9 e^(-0.85/q) e'^(0.2/q), 0.2, 10)     rejected:  0.9 e^(-0.85/q), >= 0.2

    e' is the error of the accepted step before, at least `LEAST_ERROR`. The first step after a
    rejected one does not grow. These are the constants of the code DOPRI5 for q = 5. After an
    attempt that met NaN or infinity the factor is 0.1.

    Args:
        tableau: the pair, for its q.
        error: e, `(batch,)`; NaN as in `error_ratio`.
        before: e', `(batch,)`.
        held: whether the last attempt was rejected, `(batch,)`.

    Source: Hairer, Norsett, Wanner, Solving ODEs I, II.4; Gustafsson 1991, ACM TOMS 17, 533.
    """
    factor = SAFETY * np.fmax(error, 1e-10) ** (-(1 - 0.75 * MEMORY) / tableau.q)
    accepted = factor * before ** (MEMORY / tableau.q)
    most = np.where(held, 1.0, GROW)
    rejected = np.where(np.isnan(error), BROKEN_SHRINK, np.maximum(SHRINK, factor))
    return np.where(error <= 1, np.clip(accepted, SHRINK, most), rejected)


@torch.no_grad()
def first_steps(
    tableau: Tableau,
    trial: Callable[[Floats, Tensor], Tensor],
    x: Tensor,
    k: Tensor,
    *,
    longest: float,
    rtol: float,
    atol: float,
    tokens: Tensor | None = None,
) -> Floats:
    """Steps to begin with, `(batch,)`, by Hairer's algorithm; one evaluation.

    Args:
        tableau: the pair.
        trial: f(t + h, y) for steps h `(batch,)` of at most `longest`.
        x, k: start and velocity there.
        longest: the interval.
        rtol, atol, tokens: as in `error_ratio`.

    Source: Hairer, Norsett, Wanner, Solving ODEs I, II.4, "Starting step size".
    """
    scale = _scale(x.abs(), rtol, atol)
    d0, d1 = _host(_rms(x / scale, tokens)), _host(_rms(k / scale, tokens))
    with np.errstate(all="ignore"):
        h0 = np.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1)
        h0 = np.minimum(np.where(np.isfinite(h0) & (h0 > 0), h0, 1e-6), longest)
        h = torch.from_numpy(h0).to(x.device, x.dtype)
        change = trial(h0, torch.addcmul(x, _column(h), k)) - k
        slope = np.maximum(d1, _host(_rms(change / scale, tokens)) / h0)
        flat = np.maximum(1e-6, 1e-3 * h0)
        h1 = np.where(slope <= 1e-15, flat, (0.01 / slope) ** (1 / tableau.q))
    best = np.minimum(100 * h0, h1)
    return np.minimum(np.where(np.isfinite(best) & (best > 0), best, h0), longest)


def interpolate(
    tableau: Tableau, x: Tensor, stages: Sequence[Tensor], h: Floats, theta: Floats
) -> Tensor:
    """States inside steps of the samples, shape of x.

    Args:
        tableau: the pair.
        x: starts of the steps, `(batch, token, feature)`.
        stages: k_i of the steps, each of the shape of x.
        h: steps `(batch,)`.
        theta: where in the step, `(batch,)`, in [0, 1].
    """
    powers = np.stack([theta ** (d + 1) for d in range(len(tableau.dense[0]))])
    weights = torch.from_numpy(np.array(tableau.dense) @ powers * h).to(x.device, x.dtype)
    for row, weight, stage in zip(tableau.dense, weights, stages, strict=True):
        if any(row):
            x = torch.addcmul(x, _column(weight), stage)
    return x


def _combine(weights: Sequence[float], stages: Sequence[Tensor]) -> Tensor:
    total: Tensor | None = None
    for weight, stage in zip(weights, stages, strict=True):
        if weight:
            total = weight * stage if total is None else total.add(stage, alpha=weight)
    assert total is not None
    return total


def _scale(size: Tensor, rtol: float, atol: float) -> Tensor:
    # a component that is and stays zero has no error, with atol = 0 too
    return (atol + rtol * size).clamp(min=torch.finfo(size.dtype).tiny)


def _column(h: Tensor) -> Tensor:
    return h.reshape(-1, 1, 1)


def _rms(x: Tensor, tokens: Tensor | None) -> Tensor:
    if tokens is None:
        return x.flatten(1).square().mean(1).sqrt()
    squares = x.square().mean(2).masked_fill(~tokens, 0.0)
    return (squares.sum(1) / tokens.sum(1)).sqrt()


def _host(x: Tensor) -> Floats:
    values: Floats = x.to("cpu", torch.float64).numpy()
    return values


BOSH3 = Tableau(
    "bosh3",
    order=3,
    embedded_order=2,
    dense_order=3,
    c=(0.0, 1 / 2, 3 / 4, 1.0),
    a=((), (1 / 2,), (0.0, 3 / 4), (2 / 9, 1 / 3, 4 / 9)),
    error=(-5 / 72, 1 / 12, 1 / 9, -1 / 8),
    # cubic Hermite interpolation of both ends and their velocities
    dense=(
        (1.0, -4 / 3, 5 / 9),
        (0.0, 1.0, -2 / 3),
        (0.0, 4 / 3, -8 / 9),
        (0.0, -1.0, 1.0),
    ),
    source="Bogacki, Shampine 1989, Appl. Math. Lett. 2, 321, doi:10.1016/0893-9659(89)90079-7",
)

DOPRI5 = Tableau(
    "dopri5",
    order=5,
    embedded_order=4,
    dense_order=4,
    c=(0.0, 1 / 5, 3 / 10, 4 / 5, 8 / 9, 1.0, 1.0),
    a=(
        (),
        (1 / 5,),
        (3 / 40, 9 / 40),
        (44 / 45, -56 / 15, 32 / 9),
        (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
        (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
        (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
    ),
    error=(71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40),
    dense=(
        (1.0, -8048581381 / 2820520608, 8663915743 / 2820520608, -12715105075 / 11282082432),
        (0.0, 0.0, 0.0, 0.0),
        (0.0, 131558114200 / 32700410799, -68118460800 / 10900136933, 87487479700 / 32700410799),
        (0.0, -1754552775 / 470086768, 14199869525 / 1410260304, -10690763975 / 1880347072),
        (0.0, 127303824393 / 49829197408, -318862633887 / 49829197408, 701980252875 / 199316789632),
        (0.0, -282668133 / 205662961, 2019193451 / 616988883, -1453857185 / 822651844),
        (0.0, 40617522 / 29380423, -110615467 / 29380423, 69997945 / 29380423),
    ),
    source="Dormand, Prince 1980, J. Comput. Appl. Math. 6, 19; interpolant: Shampine 1986, "
    "Math. Comp. 46, 135; Hairer, Norsett, Wanner, Solving ODEs I, II.6",
)

TSIT5 = Tableau(
    "tsit5",
    order=5,
    embedded_order=4,
    dense_order=4,
    c=(0.0, 0.161, 0.327, 0.9, 0.9800255409045097, 1.0, 1.0),
    a=(
        (),
        (0.161,),
        (-0.008480655492356989, 0.335480655492357),
        (2.8971530571054935, -6.359448489975075, 4.3622954328695815),
        (5.325864828439257, -11.748883564062828, 7.4955393428898365, -0.09249506636175525),
        (5.86145544294642, -12.92096931784711, 8.159367898576159, -0.071584973281401,
         -0.028269050394068383),
        (0.09646076681806523, 0.01, 0.4798896504144996, 1.379008574103742, -3.290069515436081,
         2.324710524099774),
    ),
    error=(0.00178001105222577714, 0.0008164344596567469, -0.007880878010261995,
           0.1447110071732629, -0.5823571654525552, 0.45808210592918697, -1 / 66),
    # the paper's seven polynomials, multiplied out
    dense=(
        (1.0, -2.763706197274826, 2.9132554618219126, -1.0530884977290216),
        (0.0, 0.1317, -0.2234, 0.1017),
        (0.0, 3.9302962368947516, -5.941033872131505, 2.490627285651253),
        (0.0, -12.411077166933676, 30.33818863028232, -16.548102889244902),
        (0.0, 37.50931341651104, -88.1789048947664, 47.37952196281928),
        (0.0, -27.896526289197286, 65.09189467479366, -34.87065786149661),
        (0.0, 1.5, -4.0, 2.5),
    ),
    source="Tsitouras 2011, Comput. Math. Appl. 62, 770, doi:10.1016/j.camwa.2011.06.002",
)  # fmt: skip

TABLEAUS: dict[str, Tableau] = {t.name: t for t in (BOSH3, DOPRI5, TSIT5)}
"""The pairs by name."""
