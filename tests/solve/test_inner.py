"""The inner solver: fixed points and linear equations of a batch without a matrix."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from etdyn.solve.inner import Equation, InnerMethod, fixed_point
from etdyn.solve.krylov import Image, gmres


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass(frozen=True)
class Waves(Equation):
    """Q(q) = b + A sin(q), of which `strength` says how far it is from a contraction."""

    a: Tensor
    b: Tensor

    @property
    def scale(self):
        return self.b.flatten(1).norm(dim=1)

    def relaxation(self, q):
        return torch.full_like(q[..., :1], 0.25)

    def image(self, q):
        wave = torch.einsum("bij,bj->bi", self.a, q.flatten(1).sin()).reshape(q.shape)
        return WavesImage(self.b + wave, self.a, q)


@dataclass(frozen=True)
class WavesImage(Image):
    a: Tensor
    q: Tensor

    def derivative(self, v):
        u = (self.q.cos() * v).flatten(1)
        return torch.einsum("bij,bj->bi", self.a, u).reshape(v.shape)


def waves(strengths, n=12):
    a, b = randn(16, n, n) / n**0.5, randn(16, 3, 4, seed=1)  # the same whatever the batch
    scale = torch.tensor(strengths).double()[:, None, None]
    return Waves(scale * a[: len(scale)], b[: len(scale)])


def test_gmres_is_the_dense_solution():
    equation = waves([0.1, 1.0, 5.0])
    image = equation.image(0.3 * equation.b)
    b = randn(3, 3, 4, seed=2)
    d, spent = gmres(image, b, torch.full((3,), 1e-13, dtype=torch.float64))
    columns = torch.eye(12, dtype=torch.float64).reshape(12, 3, 4)
    dense = [image.derivative(c.expand(3, -1, -1)).flatten(1) for c in columns]
    matrix = torch.eye(12, dtype=torch.float64) - torch.stack(dense, -1)
    exact = torch.linalg.solve(matrix, b.flatten(1))
    assert (d.flatten(1) - exact).abs().max() < 1e-11 * exact.abs().max()
    assert spent[0] < spent[2] <= 12


@pytest.mark.parametrize("forcing", [0.3, 1e-3, 1e-8])
def test_gmres_stops_every_sample_at_its_forcing(forcing):
    equation = waves([0.0, 0.3, 3.0])
    image, b = equation.image(equation.b), randn(3, 3, 4, seed=3)
    d, spent = gmres(image, b, torch.full((3,), forcing, dtype=torch.float64))
    left = (b - (d - image.derivative(d))).flatten(1).norm(dim=1)
    assert (left <= 1.01 * forcing * b.flatten(1).norm(dim=1)).all()
    assert spent[0] == 1  # I d = b is solved by one product
    alone, cost = gmres(image.at(torch.tensor([2])), b[2:], torch.tensor([forcing]).double())
    assert torch.equal(cost, spent[2:])
    assert (alone - d[2:]).abs().max() < 1e-13


def test_a_right_hand_side_of_zero_is_solved_by_zero():
    equation = waves([1.0])
    d, _ = gmres(equation.image(equation.b), 0 * equation.b, torch.tensor([0.1]).double())
    assert (d == 0).all()


def test_every_sample_gets_what_it_needs_and_no_more():
    """A constant map takes one evaluation, a contraction a few, and what stalls gets Newton."""
    equation = waves([0.0, 0.2, 0.9, 1.2, 1.5, 1.8])  # the last one stalls
    found = fixed_point(equation, equation.b, 1e-13)
    assert found.converged.all()
    residual = (equation.image(found.q).value - found.q).flatten(1).norm(dim=1)
    size = equation.image(found.q).value.flatten(1).norm(dim=1)
    assert (residual <= 1.01e-13 * size.maximum(equation.scale)).all()
    assert found.evaluations[0] == 1
    assert found.method[0] == InnerMethod.PICARD
    assert found.method[1] == InnerMethod.ACCELERATED
    assert found.method[-1] == InnerMethod.NEWTON_KRYLOV
    assert (found.evaluations[:-1] < 50).all() and found.evaluations[-1] > 100


def test_acceleration_beats_the_plain_iteration():
    """Linear with the eigenvalue 0.99: Picard needs ln(1e-13)/ln(0.99), about 3,000 steps."""
    spectrum = torch.linspace(-0.9, 0.99, 12, dtype=torch.float64)
    basis = torch.linalg.qr(randn(12, 12)).Q
    a = (basis * spectrum) @ basis.T

    @dataclass(frozen=True)
    class Linear(Waves):
        def image(self, q):
            value = self.b + torch.einsum("bij,bj->bi", self.a, q.flatten(1)).reshape(q.shape)
            return WavesImage(value, self.a, 0 * q)

    equation = Linear(a[None], randn(1, 3, 4, seed=1))
    found = fixed_point(equation, equation.b, 1e-12)
    assert found.converged.all()
    assert found.evaluations < 200


def test_nothing_reported_as_converged_is_not():
    equation = waves([0.0, 0.5, 3.0])
    found = fixed_point(equation, equation.b * torch.tensor([[[1.0]], [[torch.nan]], [[1.0]]]), 0.0)
    assert found.converged.tolist() == [True, False, False]  # a constant map is met exactly
