"""Extreme eigenvalues of the symmetric operators of a batch: block Lanczos, every sample its own.

scipy's eigsh gives the same values one sample at a time; on the 200 equilibria of a trained model
batching is several times faster, which is why it is not used here. A block as wide as the number of
wanted values finds eigenvalues of any multiplicity, which a single vector would miss in silence.
The basis is kept orthogonal by two full Gram-Schmidt passes; there are no restarts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Symmetric", "extreme_eigenpairs", "krylov_limit", "tolerance"]

FIRST_LOOK, GROWTH = 20, 1.15  # of the Krylov space, at its Ritz values, and until the next


class Symmetric(Protocol):
    """Symmetric operators, one a sample, on vectors `(batch, width, n)`."""

    def product(self, v: Tensor) -> Tensor:
        """The image of v."""

    def project(self, v: Tensor) -> Tensor:
        """v in the space where eigenvalues are sought."""


def krylov_limit(width: int) -> int:
    """Dimensions that the Krylov space of a sample may have, besides its last block."""
    return max(400, 30 * width)


def tolerance(dtype: torch.dtype) -> float:
    """Largest residual of an eigenpair, relative to the largest eigenvalue: rounding^(2/3)."""
    return float(torch.finfo(dtype).eps ** (2 / 3))


def extreme_eigenpairs(
    operators: Callable[[Tensor], Symmetric], start: Tensor, ends: tuple[int, int], room: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The lowest and the highest eigenvalues of every sample, as Ritz values.

    Args:
        operators: indices of samples -> their operators.
        start: `(batch, width, n)`, anything.
        ends: how many at the lowest and at the highest end, at most `width` each.
        room: dimension of that space, above 2 width.

    Returns:
        The largest |Ritz value| `(batch,)`, values `(batch, sum(ends))`, ascending, and unit
        vectors `(batch, sum(ends), n)`. Where the Krylov space did not suffice they have not
        converged: look at their residuals.

    Source: Golub and Underwood 1977; Parlett 1998, chapter 13.
    """
    batch, width, n = start.shape
    count = sum(ends)
    values, vectors = start.new_empty(batch, count), start.new_empty(batch, count, n)
    size = start.new_empty(batch)
    limit = min(krylov_limit(width), room - width)
    rows = torch.arange(batch, device=start.device)
    here = operators(rows)
    krylov = _Krylov(here, start, limit + width)
    look = FIRST_LOOK
    while len(rows):
        krylov.expand(here)
        last = krylov.size + width > limit
        if not last and krylov.size < look:
            continue
        look = max(look + 1, int(GROWTH * look))
        scale, theta, ritz, met = krylov.ritz(ends)
        done = met | last
        size[rows[done]] = scale[done]
        values[rows[done]], vectors[rows[done]] = theta[done], krylov.vectors(ritz, done)
        if bool(done.any()) and not bool(done.all()):
            krylov.keep(~done)
            here = operators(rows[~done])
        rows = rows[~done]
    return size, values, vectors


class _Krylov:
    """Orthonormal bases `(batch, size + width, n)` of block Krylov spaces, and S within them.

    The last `width` vectors have not met the operator yet.
    """

    def __init__(self, here: Symmetric, start: Tensor, capacity: int) -> None:
        batch, self.width, n = start.shape
        self.size = 0
        self.basis = start.new_empty(batch, capacity, n)
        self.matrix = start.new_zeros(batch, capacity, capacity)
        self.left = start.new_zeros(batch, self.width, self.width)  # Gram matrix of what is left
        self.start = start
        self._append(here, start, start.square().sum(2).amax(1).sqrt())

    def keep(self, rows: Tensor) -> None:
        """Forget the other samples."""
        for name in ("basis", "matrix", "left", "start"):
            setattr(self, name, getattr(self, name)[rows])

    def expand(self, here: Symmetric) -> None:
        """Apply the operator to the last block, and append what is new in its image."""
        old, new = self.size, self.size + self.width
        image = here.product(self.basis[:, old:new])
        scale = image.square().sum(2).amax(1).sqrt()
        self.size = new
        known = self.basis[:, :new]
        inside = image @ known.mT
        image = image - inside @ known
        again = image @ known.mT
        image, inside = image - again @ known, inside + again
        self.matrix[:, old:new, :new], self.matrix[:, :new, old:new] = inside, inside.mT
        self.left = image @ image.mT
        self._append(here, image, scale)

    def _append(self, here: Symmetric, block: Tensor, scale: Tensor) -> None:
        """Orthonormalise a block, already off the basis, and put it at the end.

        A direction that is new by rounding only is replaced by one that is new.
        """
        block = here.project(block)  # rounding off the space would grow like an eigenvector
        tiny = 1e3 * torch.finfo(block.dtype).eps * scale
        for i in range(self.width):
            end = self.size + i
            v = self._off(block[:, i], end, self.size)
            empty = v.square().sum(1).sqrt() <= tiny
            if bool(empty.any()):
                fresh = here.project(self.start.roll(end + 1, 2))[:, i]
                v = torch.where(empty[:, None], self._off(fresh, end, 0), v)
            self.basis[:, end] = v / v.square().sum(1).sqrt()[:, None]

    def _off(self, v: Tensor, end: int, begin: int) -> Tensor:
        """v off the basis vectors from `begin` to `end`."""
        known = self.basis[:, begin:end]
        for _ in range(2):
            v = v - torch.einsum("bk,bkn->bn", torch.einsum("bkn,bn->bk", known, v), known)
        return v

    def ritz(self, ends: tuple[int, int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The largest size, both ends with their coefficients, where all residuals are small."""
        theta, s = torch.linalg.eigh(self.matrix[:, : self.size, : self.size])
        scale = theta.abs().amax(1)
        low, high = ends
        index = [*range(low), *range(self.size - high, self.size)]
        theta, s = theta[:, index], s[:, :, index]
        tail = s[:, -self.width :]
        residual = torch.einsum("bik,bij,bjk->bk", tail, self.left, tail).clamp(min=0).sqrt()
        met = (residual <= tolerance(theta.dtype) * scale[:, None]).all(1)
        return scale, theta, s, met

    def vectors(self, s: Tensor, rows: Tensor) -> Tensor:
        """The Ritz vectors of these samples."""
        return s[rows].mT @ self.basis[rows, : self.size]
