"""Linear equations of a batch without a matrix: GMRES, every sample in its own Krylov space."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from etdyn.solve.rows import Rows

__all__ = ["KRYLOV_LIMIT", "Image", "gmres"]

KRYLOV_LIMIT = 60  # dimensions


@dataclass(frozen=True)
class Image(Rows, ABC):
    """Q at some q, and Q' there."""

    value: Tensor

    @abstractmethod
    def derivative(self, v: Tensor) -> Tensor:
        """Q'(q) v. One evaluation."""


def gmres(image: Image, b: Tensor, forcing: Tensor) -> tuple[Tensor, Tensor]:
    """Solve (I - Q') d = b to |b - (I - Q') d| <= forcing |b|: d, and evaluations per sample.

    Batched GMRES with Givens rotations; a sample that is done costs no further products.
    """
    batch, size, tiny = len(b), b.flatten(1).square().sum(1).sqrt(), torch.finfo(b.dtype).tiny
    m = min(KRYLOV_LIMIT, b[0].numel())
    krylov = _Krylov(b.flatten(1) / size.clamp(min=tiny).unsqueeze(1), size, m)
    rows = torch.arange(batch, device=b.device)
    spent = torch.zeros(batch, dtype=torch.int64, device=b.device)
    for j in range(m):
        v = krylov.basis[j, rows].reshape(-1, *b.shape[1:])
        spent[rows] += 1
        left = krylov.extend(rows, j, (v - image.derivative(v)).flatten(1))
        going = left > forcing[rows] * size[rows]
        if not bool(going.all()):
            rows, image = rows[going], image.at(going)
        if not len(rows):
            break
    return krylov.solution().reshape(b.shape), spent


class _Krylov:
    """Arnoldi bases of a batch with the triangular factors of their Hessenberg matrices.

    A sample that stops growing keeps unit columns with zero right-hand sides, so that one
    triangular solve serves samples of different dimension.
    """

    def __init__(self, start: Tensor, size: Tensor, m: int) -> None:
        batch, n = start.shape
        self.basis = start.new_zeros(m + 1, batch, n)
        self.basis[0] = start
        self.upper = torch.eye(m, dtype=start.dtype, device=start.device).repeat(batch, 1, 1)
        self.right = start.new_zeros(batch, m)
        self.turns = start.new_zeros(m, 2, batch)  # cosine and sine of every rotation
        self.left = size.clone()  # signed norm of the residual

    def extend(self, rows: Tensor, j: int, w: Tensor) -> Tensor:
        """Add the direction w as column j of these samples; returns the residual norms left."""
        known = self.basis[: j + 1, rows]
        column = w.new_zeros(len(rows), j + 2)
        for _ in range(2):  # classical Gram-Schmidt, twice
            overlap = torch.einsum("kbn,bn->bk", known, w)
            w = w - torch.einsum("bk,kbn->bn", overlap, known)
            column[:, :-1] += overlap
        length = w.square().sum(1).sqrt()
        # an exhausted space holds the exact answer: rounding must not extend it
        info = torch.finfo(w.dtype)
        length = length.masked_fill(length < 16 * info.eps * column.square().sum(1).sqrt(), 0.0)
        column[:, -1] = length
        self.basis[j + 1, rows] = w / length.clamp(min=info.tiny).unsqueeze(1)
        for i in range(j):
            column[:, i], column[:, i + 1] = self._turn(i, rows, column[:, i], column[:, i + 1])
        radius = torch.hypot(column[:, j], column[:, j + 1]).clamp(min=info.tiny)
        self.turns[j, 0, rows], self.turns[j, 1, rows] = column[:, j] / radius, length / radius
        self.upper[rows, :j, j], self.upper[rows, j, j] = column[:, :j], radius
        left = self.left[rows]
        self.right[rows, j], self.left[rows] = self._turn(j, rows, left, torch.zeros_like(left))
        return self.left[rows].abs()

    def _turn(self, i: int, rows: Tensor, above: Tensor, below: Tensor) -> tuple[Tensor, Tensor]:
        c, s = self.turns[i, 0, rows], self.turns[i, 1, rows]
        return c * above + s * below, c * below - s * above

    def solution(self) -> Tensor:
        """The minimisers, `(batch, n)`."""
        weights = torch.linalg.solve_triangular(self.upper, self.right.unsqueeze(-1), upper=True)
        return torch.einsum("kbn,bk->bn", self.basis[:-1], weights.squeeze(-1))
