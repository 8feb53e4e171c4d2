"""The flow linearised at a state, matrix-free: its Jacobian, and the symmetric operator like it.

With F' = -H the derivative of the force in g (H the Hessian of the energy, where there is one)
and M = dg/dx, the Jacobian of the published flow is J = F' M. It is not symmetric, but off the
null space of M it is similar to M^1/2 F' M^1/2, which is (ET-F12). What is written S here is that
operator with its sign turned, so that a negative eigenvalue is an unstable direction:

    et      S = -M^1/2 F' M^1/2
    leaky   S = 1 - M^1/2 F' M^1/2               its eigenvalues are the kappa of ET-F29
    sphere  S = P (-F' + (force.n) / R) P        n the unit normal, R the radius: Riemannian Hessian

At a state where leaky flow and sphere flow both rest (eps = 0, R / rho = gamma / sigma per token,
rho = |x - mean|) the two are congruent, S_leaky = (R/rho)^1/2 S_sphere (R/rho)^1/2: same signs,
and for one token kappa = (R / rho) lambda = 1 + R h / rho with h the curvature of E (ET 1.5).

Where a Hopfield network is "relu", H jumps at the kinks h = 0 and is the one-sided one there.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

from etdyn.checks import bad, check_choice
from etdyn.lagrangians import LayerNorm
from etdyn.systems import System

__all__ = [
    "Linearisation",
    "Product",
    "dense_matrix",
    "flow_jacobian",
    "linear_operator",
    "stability_product",
    "without_null",
]

Product = Callable[[System, Tensor, Tensor], Tensor]
CHUNK = 128  # directions in a batch of products


class Linearisation:
    """A system linearised at x; what does not depend on the direction is computed once.

    Directions are `(batch, token, feature)` in the dtype of x. Those of absent tokens are null.

    Args:
        system: under "et", "leaky" or "sphere"; energy or coupling.
        x: `(batch, token, feature)`.

    Raises:
        ValueError, TypeError: another dynamics; x is not a state of the system.
    """

    def __init__(self, system: System, x: Tensor) -> None:
        check_choice("system.dynamics", system.dynamics, ("et", "leaky", "sphere"))
        system.check(x)
        self.system, self.x = system, system._stand_in(x)
        self.lagrangian = system.lagrangian
        self.g = system.activation(x)
        self.sphere = system.dynamics == "sphere"
        if self.sphere:
            self.force = system.interaction.force(self.g)
            self.y = x_centred = self._layer_norm().centre(self.x)
            self.y2 = x_centred.square().sum(-1, keepdim=True)
            self.along = (x_centred * self.force).sum(-1, keepdim=True)  # y.force

    def _layer_norm(self) -> LayerNorm:
        assert isinstance(self.lagrangian, LayerNorm)  # System allows spheres with no other
        return self.lagrangian

    def pull(self, u: Tensor) -> Tensor:
        """F' u, the change of the force where g changes by u. One evaluation."""
        return self.system.keep(self.system.interaction.force_jvp(self.g, self.system.keep(u)))

    def jacobian(self, u: Tensor) -> Tensor:
        """J u = d velocity/dx u. One evaluation."""
        if self.sphere:
            return self._sphere_jacobian(u)
        u = self.system.keep(u)
        moved = self.pull(self.lagrangian.metric(self.x, u))
        return moved - u if self.system.dynamics == "leaky" else moved

    def _sphere_jacobian(self, u: Tensor) -> Tensor:
        """Of v = (s/gamma) P force, with s = |y|/sqrt(D) and P off the ones and y."""
        gamma, u = self._layer_norm().gamma, self._layer_norm().centre(u)
        scale = (self.y2 / self.y.shape[-1]).sqrt() / gamma
        turn = self.lagrangian.tangent(self.x, u)
        change = self.lagrangian.tangent(self.x, self.pull(turn / scale))
        radial = (self.y * u).sum(-1, keepdim=True) / self.y2  # d log|y|
        back = self.along * turn + self.y * (turn * self.force).sum(-1, keepdim=True)
        straight = self.lagrangian.tangent(self.x, self.force)
        return self.system.keep(scale * (change - back / self.y2 + radial * straight))

    def stability(self, u: Tensor) -> Tensor:
        """S u; zero along null directions. One evaluation."""
        u = self.project(u)
        if self.sphere:
            weight = self._layer_norm().gamma * (self.y2 * self.y.shape[-1]).sqrt()
            return self.project(self.along / weight * u - self.pull(u))
        pulled = self.pull(self.lagrangian.metric_root(self.x, u))
        bent = -self.project(self.lagrangian.metric_root(self.x, pulled))
        return bent + u if self.system.dynamics == "leaky" else bent

    def project(self, u: Tensor) -> Tensor:
        """u without its null directions; see `without_null`."""
        if isinstance(self.lagrangian, LayerNorm):
            exact = self.sphere or self.lagrangian.eps == 0
            u = self.lagrangian.tangent(self.x, u) if exact else self.lagrangian.centre(u)
        return self.system.keep(u)

    def null(self) -> Tensor:
        """How many null directions the tokens that exist have, int64 `(batch,)`."""
        per_token = 0
        if isinstance(self.lagrangian, LayerNorm):
            per_token = 2 if self.sphere or self.lagrangian.eps == 0 else 1
        return per_token * self.tokens()

    def tokens(self) -> Tensor:
        """How many tokens exist, int64 `(batch,)`."""
        return self.system.keep(torch.ones_like(self.x[..., 0])).sum(1).round().long()

    def lift(self, w: Tensor) -> Tensor:
        """The change of x that belongs to w in the coordinates of S: M^-1/2 w (sphere: w)."""
        w = self.project(w)
        if self.sphere:
            return w
        return self.system.keep(self.lagrangian.metric_root_inverse(self.x, w))


def flow_jacobian(system: System, x: Tensor, u: Tensor) -> Tensor:
    """d velocity/dx in the direction u, in closed form; one evaluation.

    Args:
        system: under "et", "leaky" or "sphere"; a force with or without an energy.
        x, u: state and direction, `(batch, token, feature)`.

    Returns:
        Shape of x, per unit of flow time.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET-F10, ET-F12.
    """
    system.check(u, "u")
    return Linearisation(system, x).jacobian(u)


def stability_product(system: System, x: Tensor, u: Tensor) -> Tensor:
    """S u: the stability operator of this module in orthonormal tangent coordinates.

    Symmetric where the force comes from an energy. Off the null directions, which it sends to
    zero, its eigenvalues are minus those of the flow's Jacobian; on the sphere they are those of
    the Riemannian Hessian, which is minus the Jacobian of the flow seen from the sphere.

    Args:
        system: under "et", "leaky" or "sphere".
        x, u: state and direction, `(batch, token, feature)`.

    Returns:
        Shape of x, per unit of flow time. One evaluation.

    Raises:
        ValueError, TypeError: wrong input, naming the argument.

    Source: ET-F12, ET-F29.
    """
    system.check(u, "u")
    return Linearisation(system, x).stability(u)


def without_null(system: System, x: Tensor, u: Tensor) -> Tensor:
    """u projected off the null directions of S, which no g follows; shape of x.

    The means of tokens under LayerNorm, their lengths too on the sphere or where eps = 0; all of
    an absent token.
    """
    system.check(u, "u")
    return Linearisation(system, x).project(u)


def dense_matrix(
    system: System, x: Tensor, product: Product = stability_product, sample: int = 0
) -> Tensor:
    """One sample's operator as a matrix, built by batches of products with unit vectors.

    Args:
        system, x: as `product` takes them.
        product: (system, x, u) -> image of u, such as `flow_jacobian`.
        sample: which one of the batch.

    Returns:
        `(n, n)` in the dtype of x, n = tokens times features. n evaluations.

    Raises:
        ValueError: no such sample.
    """
    _check_sample(system, x, sample)
    eye = torch.eye(x[sample].numel(), dtype=x.dtype, device=x.device)
    starts = range(0, len(eye), CHUNK)
    columns = [_image(system, x, product, sample, eye[i : i + CHUNK]) for i in starts]
    return torch.cat(columns).T


def linear_operator(
    system: System, x: Tensor, product: Product = stability_product, sample: int = 0
) -> LinearOperator:
    """One sample's operator as scipy's sparse solvers take it.

    Args:
        system, x, product, sample: as in `dense_matrix`.

    Returns:
        LinearOperator of size (n, n) and the dtype of x, with `matmat` in one batch.

    Raises:
        ValueError: no such sample.
    """
    _check_sample(system, x, sample)
    n = x[sample].numel()

    def matmat(columns: NDArray[np.floating]) -> NDArray[np.floating]:
        u = torch.from_numpy(np.ascontiguousarray(columns.T)).to(x)
        image: NDArray[np.floating] = _image(system, x, product, sample, u).T.cpu().numpy()
        return image

    def matvec(column: NDArray[np.floating]) -> NDArray[np.floating]:
        return matmat(column.reshape(n, 1))[:, 0]

    dtype = torch.empty((), dtype=x.dtype).numpy().dtype
    return LinearOperator((n, n), matvec=matvec, matmat=matmat, dtype=dtype)


def _check_sample(system: System, x: Tensor, sample: int) -> None:
    system.check(x)
    if not 0 <= sample < len(x):
        raise bad("sample", f"an index in [0, {len(x)})", sample)


def _image(system: System, x: Tensor, product: Product, sample: int, u: Tensor) -> Tensor:
    """Of every row of u `(k, n)`, `(k, n)`."""
    rows = torch.full((len(u),), sample, device=x.device)
    image = product(system.select(rows), x[rows], u.reshape(-1, *x.shape[1:]))
    return image.detach().flatten(1)
