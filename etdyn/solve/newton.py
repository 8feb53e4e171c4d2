"""Newton-Krylov on x = force(x), and the lowest curvature of an equilibrium; no matrix is built.

The Jacobian of F(z) - z is -K with K = I + HM. On the null space of M (a token's mean, and its
length up to eps) K is the identity, so nothing needs deflating (ET-F31): Newton moves g on its
tangent space and lets the rest follow.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import linalg
from torch import Tensor

from etdyn.solve.krylov import KRYLOV_LIMIT, gmres
from etdyn.solve.relaxation import Accelerated, Point

__all__ = ["NewtonKrylov", "lowest_curvature"]

SHORTEST = 2.0**-4  # share of a Newton step below which the map takes over
BLIND_WAIT = 200  # steps after which, without an energy, a map that will not settle is helped
HOLD = 4  # steps of the map after a Newton step that failed; doubles each time


class NewtonKrylov(Accelerated):
    """Inexact Newton steps K dz = F(z) - z once the map has settled.

    GMRES solves to |r| <= forcing |F - z| with forcing = min(0.1, |F - z| / |F|), which keeps the
    convergence quadratic where the force is smooth. Line search: a step that raises the energy or
    does not shorten F - z is halved, and given up for a few steps of the map below 1/16.
    """

    def __init__(self, start: Point, damping: float, tol: float) -> None:
        super().__init__(start, damping)
        self.tol, self.blind = tol, not start.system.has_energy
        self.step = torch.zeros_like(start.z)
        self.share = torch.zeros_like(start.merit)  # of the step tried last; 0: none to go on with
        self.wait = torch.zeros_like(self.streak)
        self.steps = torch.zeros_like(self.streak)
        self.hold = torch.full_like(self.streak, HOLD)

    def ready(self, left: Tensor) -> Tensor:
        """Settled, not waiting after a failure, and sure to stay within the evaluations left.

        A coupling can turn the map round for ever: without an energy, after `BLIND_WAIT` steps.
        """
        affordable = (left > KRYLOV_LIMIT) | (self.share > 0)
        settled = self.settled | (self.blind & (self.steps >= BLIND_WAIT))
        return settled & (self.wait == 0) & affordable

    def leap(self, point: Point, rows: Tensor) -> tuple[Tensor, Tensor]:
        """A new Newton step, or a shorter one in the same direction."""
        spent = torch.zeros_like(rows)
        fresh = self.share[rows] == 0
        new = rows[fresh]
        if len(new):
            here = point.at(new)
            size = _norm(here.velocity)
            forcing = (size / here.size).clamp(max=0.1).maximum(0.1 * self.tol / size)
            self.step[new], spent[fresh] = _solve(here, forcing.clamp(max=0.5))
            self.share[new] = 1.0
        return point.z[rows] + self.share[rows, None, None] * self.step[rows], spent

    def worse(self, old: Point, new: Point) -> Tensor:
        """Also where a Newton step leaves F - z as long as it was."""
        newton = self.leaps & ~self.escaping
        return super().worse(old, new) | (newton & self._too_long(old, new))

    def _too_long(self, old: Point, new: Point) -> Tensor:
        return _norm(new.velocity) >= (1 - 1e-4 * self.share) * _norm(old.velocity)

    def learn(self, old: Point, new: Point, worse: Tensor) -> None:
        """Halve a step that failed, or wait."""
        leapt = self.leaps & ~self.escaping
        self.steps += 1
        super().learn(old, new, worse)
        half = torch.where(leapt & worse, self.share / 2, 0.0)
        failed = leapt & worse & (half < SHORTEST)
        self.share = torch.where(failed, 0.0, half)
        self.wait = torch.where(failed, self.hold, (self.wait - 1).clamp(min=0))
        self.hold = torch.where(failed, 2 * self.hold, self.hold)


def _solve(point: Point, forcing: Tensor) -> tuple[Tensor, Tensor]:
    """GMRES on K dz = F - z: batched, or scipy's where one state is solved on a CPU."""
    if len(point.velocity) > 1 or point.velocity.device.type != "cpu":
        return gmres(point, point.velocity, forcing)
    b, rtol, spent, done = point.velocity, float(forcing), 0, False

    def product(v: NDArray[np.floating]) -> NDArray[np.floating]:
        nonlocal spent
        if done:  # scipy's closing look at the residual, which nothing here uses
            return v
        spent += 1
        u = torch.from_numpy(np.ascontiguousarray(v)).reshape(b.shape)
        image: NDArray[np.floating] = (u - point.derivative(u)).flatten().numpy()
        return image

    def note(relative_residual: float) -> None:
        nonlocal done
        done = relative_residual < (1 - 1e-6) * rtol or spent == limit

    n = b[0].numel()
    limit = min(KRYLOV_LIMIT, n)
    operator = linalg.LinearOperator((n, n), matvec=product, dtype=b.numpy().dtype)
    dz, _ = linalg.gmres(
        operator, b.flatten().numpy(), rtol=rtol, restart=limit, maxiter=1,
        callback=note, callback_type="pr_norm",
    )  # fmt: skip
    return torch.from_numpy(dz).reshape(b.shape), torch.tensor([spent])


def lowest_curvature(point: Point, steps: int) -> tuple[Tensor, Tensor]:
    """The lowest eigenvalue of K = I + HM as `steps` Lanczos steps see it, and its direction.

    K is self-adjoint in the semi-inner product u.Mv (ET-F12), in which the basis is kept
    orthogonal. Each step is one evaluation; every sample starts from the same random direction.

    Returns:
        An upper bound of the lowest eigenvalue `(batch,)`, and the Ritz vector `(batch, token,
        feature)` of unit length.
    """
    z = point.z
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(z.shape[1:], generator=generator, dtype=torch.float64).to(z).expand_as(z)
    basis, duals = _normalised(point, point.system.keep(q), [], [])
    matrix = z.new_zeros(len(z), steps, steps)
    for j in range(steps):
        w = basis[j] - point.derivative(basis[j])
        for i in range(j + 1):
            matrix[:, i, j] = matrix[:, j, i] = _dot(w, duals[i])
        basis, duals = _normalised(point, w, basis, duals)
    # a space that was exhausted early goes on with zeros: repeat a value that it has
    empty = torch.stack([_dot(q, q) == 0 for q in basis[:steps]], 1)
    repeated = torch.where(empty, matrix[:, :1, 0], matrix.diagonal(dim1=1, dim2=2))
    matrix.diagonal(dim1=1, dim2=2).copy_(repeated)
    values, vectors = torch.linalg.eigh(matrix)
    direction = torch.einsum("kbtf,bk->btf", torch.stack(basis[:steps]), vectors[:, :, 0])
    return values[:, 0], direction


def _normalised(
    point: Point, w: Tensor, basis: list[Tensor], duals: list[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """`basis` and its images under M, with w appended at unit length; zero where nothing is left.

    Twice, since one Gram-Schmidt pass leaves rounding behind.
    """
    before = _dot(w, point.metric(w)).clamp(min=0).sqrt()
    for _ in range(2):
        for q, dual in zip(basis, duals, strict=True):
            w = w - _dot(w, dual)[:, None, None] * q
    dual = point.metric(w)
    size = _dot(w, dual).clamp(min=0).sqrt()
    alive = size > 1e3 * torch.finfo(w.dtype).eps * before
    inverse = torch.where(alive, 1 / size, 0.0)[:, None, None]
    return [*basis, inverse * w], [*duals, inverse * dual]


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).flatten(1).sum(1)


def _norm(v: Tensor) -> Tensor:
    return _dot(v, v).sqrt()
