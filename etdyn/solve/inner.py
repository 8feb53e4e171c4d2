"""Fixed points q = Q(q) of a batch of small problems, without a matrix.

Picard iteration first, with Anderson mixing of a sample only while its residual falls; where that
stalls the same with shorter steps, and Newton-Krylov last. Samples that are done leave the batch
and stop costing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from enum import IntEnum

import torch
from torch import Tensor

from etdyn.solve.krylov import Image, gmres
from etdyn.solve.rows import Rows

__all__ = ["Equation", "Found", "InnerMethod", "InnerReport", "fixed_point"]

MEMORY = 5  # differences that Anderson mixing keeps
# iterations without a tenfold smaller residual before the next method takes over; relaxed ones
PATIENCE = {False: 40, True: 100}
NEWTON_LIMIT = 30
SHORTEST = 2.0**-4  # of the line search
PROGRESS = 0.9  # a Newton step that shortens the residual by less gives up


class InnerMethod(IntEnum):
    """The most elaborate method that a sample's step needed."""

    EXPLICIT = 0  # no equation to solve
    PICARD = 1
    ACCELERATED = 2  # Anderson mixing
    RELAXED = 3  # the same with shorter steps
    NEWTON_KRYLOV = 4


@dataclass
class InnerReport:
    """How the implicit equations of a solve were solved, per sample.

    Attributes:
        residual: float64 `(batch,)`, the largest relative residual of a step that was taken.
        methods: int64 `(batch, method)`, steps by the most elaborate `InnerMethod` they needed.
    """

    residual: Tensor
    methods: Tensor

    @classmethod
    def empty(cls, batch: int) -> InnerReport:
        """Before the first step."""
        steps = torch.zeros(batch, len(InnerMethod), dtype=torch.int64)
        return cls(torch.zeros(batch, dtype=torch.float64), steps)

    def note(self, rows: Tensor, residual: Tensor, method: Tensor) -> None:
        """One more step of these samples."""
        self.residual[rows] = torch.maximum(self.residual[rows], residual.double().cpu())
        self.methods[rows, method.long().cpu()] += 1

    def describe(self) -> dict[str, object]:
        """As JSON can hold it."""
        steps = {m.name.lower(): self.methods[:, m].tolist() for m in InnerMethod if m}
        return {"residual": self.residual.tolist(), "steps": steps}


@dataclass(frozen=True)
class Equation(Rows, ABC):
    """q = Q(q) for every sample; q is `(batch, token, feature)`."""

    @property
    @abstractmethod
    def scale(self) -> Tensor:
        """`(batch,)`, the size of what may cancel in Q: residuals are relative to it."""

    @abstractmethod
    def relaxation(self, q: Tensor) -> Tensor:
        """Which share of Q(q) - q does not overshoot, `(batch, token, 1)`."""

    @abstractmethod
    def image(self, q: Tensor) -> Image:
        """Q(q). One evaluation."""


@dataclass(frozen=True)
class Found(Rows):
    """What the inner solve found, per sample.

    q is the iterate with the smallest `residual` |Q(q) - q| / max(|Q(q)|, scale); `method` holds
    values of `InnerMethod`.
    """

    q: Tensor
    residual: Tensor
    converged: Tensor
    evaluations: Tensor
    method: Tensor

    @classmethod
    def nothing(cls, guess: Tensor) -> Found:
        """Before the first iteration."""
        none = torch.zeros(len(guess), dtype=torch.int64, device=guess.device)
        return cls(
            q=guess.clone(),
            residual=guess.new_full((len(guess),), torch.inf),
            converged=none.bool(),
            evaluations=none,
            method=torch.full_like(none, InnerMethod.PICARD, dtype=torch.int8),
        )

    def after(self, earlier: Found) -> Found:
        """This attempt with the cost of an earlier one on top."""
        return replace(
            self,
            evaluations=self.evaluations + earlier.evaluations,
            method=torch.maximum(self.method, earlier.method),
        )

    def otherwise(self, other: Found) -> Found:
        """This where it converged, elsewhere what `other` found, at this one's cost."""
        good = self.converged
        return replace(
            self,
            q=torch.where(good[:, None, None], self.q, other.q),
            residual=torch.where(good, self.residual, other.residual),
            converged=good | other.converged,
        )

    def put(self, rows: Tensor, other: Found) -> None:
        """Overwrite these samples, in place."""
        for f in fields(self):
            getattr(self, f.name)[rows] = getattr(other, f.name)

    def improve(self, rows: Tensor, q: Tensor, size: Tensor, tol: float) -> None:
        """Count an evaluation of these samples and keep the iterates that are better."""
        self.evaluations[rows] += 1
        better = size < self.residual[rows]  # false for NaN
        self.q[rows[better]], self.residual[rows[better]] = q[better], size[better]
        self.converged[rows] = self.residual[rows] <= tol


def fixed_point(equation: Equation, guess: Tensor, tol: float) -> Found:
    """Solve q = Q(q) per sample to |Q(q) - q| <= tol max(|Q(q)|, scale), from `guess`.

    Returns:
        Found. Where not converged, neither the iteration nor Newton-Krylov got on.
    """
    found = Found.nothing(guess)
    rows = torch.arange(len(guess), device=guess.device)
    for relaxed in (False, True):
        _iterate(equation.at(rows), found, rows, guess[rows], tol, relaxed=relaxed)
        rows = (~found.converged & torch.isfinite(found.residual)).nonzero().flatten()
        if not len(rows):
            return found
    _newton(equation.at(rows), found, rows, tol)
    return found


def _norm(v: Tensor) -> Tensor:
    return v.flatten(1).square().sum(1).sqrt()


def _residual(equation: Equation, image: Image, q: Tensor) -> tuple[Tensor, Tensor]:
    r = image.value - q
    scale = torch.maximum(_norm(image.value), equation.scale)
    return r, _norm(r) / scale.clamp(min=torch.finfo(q.dtype).tiny)


def _iterate(
    equation: Equation, found: Found, rows: Tensor, q: Tensor, tol: float, *, relaxed: bool
) -> None:
    """Picard from q, accelerated where it may be, until every sample has converged or stalled."""
    mixing, method = _Mixing(), InnerMethod.RELAXED if relaxed else InnerMethod.ACCELERATED
    last = mark = q.new_full((len(q),), torch.inf)
    age = torch.zeros_like(rows)  # since the residual fell to a tenth of `mark`
    while True:
        r, size = _residual(equation, equation.image(q), q)
        found.improve(rows, q, size, tol)
        better = size < 0.1 * mark
        mark = torch.where(better, size, mark)
        age = torch.where(better, 0, age + 1)
        going = ~found.converged[rows] & torch.isfinite(size) & (age < PATIENCE[relaxed])
        if not bool(going.all()):
            rows, q, r, size = rows[going], q[going], r[going], size[going]
            last, mark, age = last[going], mark[going], age[going]
            equation = equation.at(going)
            mixing.keep(going)
        if not len(rows):
            return
        r = equation.relaxation(q) * r if relaxed else r
        q, mixed = mixing.next(q, r, size < last)
        found.method[rows[mixed]] = method
        last = size


class _Mixing:
    """Anderson mixing of the last few iterates of every sample (type II, relative ridge)."""

    def __init__(self) -> None:
        self.dq: list[Tensor] = []
        self.dr: list[Tensor] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def keep(self, rows: Tensor) -> None:
        """Forget the other samples."""
        self.dq, self.dr = [v[rows] for v in self.dq], [v[rows] for v in self.dr]
        if self.last is not None:
            self.last = self.last[0][rows], self.last[1][rows]

    def next(self, q: Tensor, r: Tensor, fell: Tensor) -> tuple[Tensor, Tensor]:
        """The next iterate, and for which samples it is more than a Picard step.

        A sample whose residual did not fall forgets its past and takes a Picard step.
        """
        flat, residual = q.flatten(1), r.flatten(1)
        if self.last is not None:
            self.dq = [*self.dq[1 - MEMORY :], flat - self.last[0]]
            self.dr = [*self.dr[1 - MEMORY :], residual - self.last[1]]
            for v in (*self.dq, *self.dr):
                v[~fell] = 0
        self.last = flat, residual
        if not self.dr:
            return q + r, torch.zeros_like(fell)
        dq, dr = torch.stack(self.dq, -1), torch.stack(self.dr, -1)
        gram = dr.mT @ dr
        scale = gram.diagonal(dim1=1, dim2=2).sum(1)
        info = torch.finfo(q.dtype)
        ridge = (16 * info.eps * scale).clamp(min=info.tiny)[:, None, None]
        gram = gram + ridge * torch.eye(len(self.dr), dtype=q.dtype, device=q.device)
        weights = torch.linalg.solve(gram, dr.mT @ residual.unsqueeze(-1))
        mixed = flat + residual - ((dq + dr) @ weights).squeeze(-1)
        return mixed.reshape(q.shape), scale > 0


def _newton(equation: Equation, found: Found, rows: Tensor, tol: float) -> None:
    """Inexact Newton on Q(q) - q with a line search on its norm, from the best iterates.

    Where Q has kinks its derivative is one-sided: semismooth Newton.
    """
    found.method[rows] = InnerMethod.NEWTON_KRYLOV
    for _ in range(NEWTON_LIMIT):
        q = found.q[rows]
        image = equation.image(q)
        r, size = _residual(equation, image, q)
        forcing = size.sqrt().clamp(max=0.1).maximum(0.3 * tol / size)
        direction, spent = gmres(image, r, forcing)
        found.evaluations[rows] += 1 + spent
        advanced = _line_search(equation, found, rows, direction, tol)
        going = advanced & ~found.converged[rows]
        rows, equation = rows[going], equation.at(going)
        if not len(rows):
            return


def _line_search(
    equation: Equation, found: Found, rows: Tensor, direction: Tensor, tol: float
) -> Tensor:
    """Take the first of 1, 1/2, 1/4, ... of `direction` that shortens the residual.

    Updates the best iterates; returns which samples made progress.
    """
    start, base = found.q[rows], found.residual[rows]
    todo = torch.arange(len(rows), device=rows.device)
    fraction = 1.0
    while len(todo) and fraction >= SHORTEST:
        q = start[todo] + fraction * direction[todo]
        _, size = _residual(equation, equation.image(q), q)
        found.improve(rows[todo], q, size, tol)
        longer = ~(size < (1 - 1e-4 * fraction) * base[todo])
        todo, equation = todo[longer], equation.at(longer)
        fraction /= 2
    return found.residual[rows] < PROGRESS * base
