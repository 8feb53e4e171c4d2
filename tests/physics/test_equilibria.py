"""The residual: zero where g stands still, and nowhere else."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn import LayerNorm, System

DATA = st.data()


def settle(system, x, evaluations=2000):
    """Follow the self-consistency map until x stands still to rounding."""
    for _ in range(evaluations):
        after = system.map(x)
        if (after - x).abs().max() <= 1e-13 * x.abs().max():
            return after
        x = after
    return x


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("law", ["leaky", "sphere"])
def test_residual_vanishes_at_equilibria_of_the_map(make_case, close, law, seed):
    case = make_case(dynamics=law, seed=seed, hopfield="softmax", weights=1.5, tokens=4)
    system = case.system
    begin = system.residual(system.prepare(case.x))
    x = settle(system, system.prepare(case.x))
    force = system.force(x).flatten(1).norm(dim=1)
    assert (begin > 0.05 * force).all(), "the start is no equilibrium"
    assert (system.residual(x) < 1e-10).all()
    close(system.velocity(0.0, x), torch.zeros_like(x), 1e-10, scale=1)
    assert (system.dissipation(x).abs() < 1e-18).all()
    close(system.map(x), x, 1e-12)
    if law == "leaky":  # an equilibrium is its own force; on the sphere, up to normalisation
        close(system.force(x), x, 1e-12)
    else:
        close(system.lagrangian.normalise(system.force(x)), x, 1e-12)


def test_published_flow_drifts_where_the_residual_vanishes(make_case, close):
    """ET 1.5.2: at a leaky equilibrium x grows along itself while g stands still."""
    case = make_case(dynamics="leaky", hopfield="softmax", weights=1.5, tokens=4)
    x = settle(case.system, case.x)
    et = case.system.with_dynamics("et")
    close(et.velocity(0.0, x), x, 1e-12)
    assert (et.residual(x) < 1e-10).all()
    g = et.activation(x)
    moved = et.activation(x + 0.5 * et.velocity(0.0, x))
    eps = et.lagrangian.eps / et.lagrangian.sigma(x).min() ** 2
    close(moved, g, 1.0 * float(eps))


@pytest.mark.parametrize("law", ["et", "leaky", "sphere"])
@given(data=DATA)
def test_residual_does_not_vanish_because_x_grew(make_case, close, law, data):
    """residual(s x; eps) = residual(x; eps / s^2) > 0, where |M grad E| would fall as 1/s."""
    case = make_case(data, dynamics=law, spread=1.0, tokens=3)
    system, x = case.system, case.x
    lagrangian = LayerNorm(system.dim, system.lagrangian.eps / 1e12).double()
    lagrangian.load_state_dict(system.lagrangian.state_dict())
    other = System(lagrangian, system.interaction, law)
    force = other.force(x).flatten(1).norm(dim=1)
    close(system.residual(1e6 * x), other.residual(x), 1e-13, scale=force)
    assert (system.residual(1e6 * x) > 1e-6 * force).all()
    slow = system.lagrangian.metric(1e6 * x, system.force(1e6 * x)).flatten(1).norm(dim=1)
    assert (slow < 1e-4 * force).all()


@given(data=DATA)
def test_residual_is_the_gradient_that_g_can_follow(make_case, close, data):
    """P projects off the ones and y of every token: twice is once, and nothing else is lost."""
    case = make_case(data)
    system, x = case.system, case.x
    force = system.force(x)
    y = x - x.mean(-1, keepdim=True)
    normals = torch.stack([torch.ones_like(x), y], -1)  # (batch, token, feature, 2)
    fit = torch.linalg.lstsq(normals, force.unsqueeze(-1)).solution
    rest = force - (normals @ fit).squeeze(-1)
    scale = force.flatten(1).norm(dim=1)
    close(system.residual(x), rest.flatten(1).norm(dim=1), scale=scale)
    tangent = system.lagrangian.tangent(x, force)
    close(system.lagrangian.tangent(x, tangent), tangent, 1e-13, scale=force)
    close(
        (tangent * y).sum(-1),
        torch.zeros_like(y[..., 0]),
        1e-13,
        scale=force.abs().max() * y.norm(),
    )


def test_tangent_of_a_token_without_direction(make_case):
    """A constant token has no y to project off, and nothing is divided by zero."""
    system = make_case().system
    x = torch.full((1, 2, 8), 3.0, dtype=torch.float64)
    v = torch.arange(16, dtype=torch.float64).reshape(1, 2, 8)
    tangent = system.lagrangian.tangent(x, v)
    assert torch.equal(tangent, v - v.mean(-1, keepdim=True))
    with pytest.raises(ValueError, match="variance"):
        system.with_dynamics("sphere").prepare(x)
