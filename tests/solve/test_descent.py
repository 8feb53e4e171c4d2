"""Explicit steps and the energy: the descent lemma (ET-F20), and Euler guarded by it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn import Attention, LayerNorm, System
from etdyn.problems import LinearEnergy
from etdyn.solve.descent import GuardedEuler, descent_bound
from etdyn.solve.euler import iterate

DYNAMICS = ["et", "leaky", "sphere"]
STEPS = torch.logspace(-3, 3, 13, dtype=torch.float64)


def rise(system, x, new):
    """Relative to |E|, per sample."""
    before = system.energy(x)
    return (system.energy(new) - before) / before.abs()


def repulsive(batch):
    """ET-F24: repelling tokens near consensus, where a large Euler step raises the energy."""
    dim, tokens = 12, 8
    attention = Attention(dim, 1, dim, beta=1e-3).double()
    with torch.no_grad():
        attention.query.copy_(torch.eye(dim))
        attention.key.copy_(-torch.eye(dim))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, 1, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(batch, tokens, dim, generator=generator, dtype=torch.float64)
    system = System(LayerNorm(dim).double(), attention)
    return system, 0.1 * system.lagrangian.normalise(direction + 1e-3 * noise)


@pytest.mark.parametrize("dynamics", DYNAMICS)
@given(data=st.data())
@torch.no_grad()
def test_et_f20_a_step_within_the_bound_never_raises_the_energy(make_case, dynamics, data):
    case = make_case(data, dynamics=dynamics, tokens=data.draw(st.integers(2, 6)))
    if data.draw(st.booleans(), label="repulsive"):
        case.system.attention.key.copy_(-case.system.attention.query)
    system, x = case.system, case.system.prepare(case.x)
    bound = descent_bound(system, x)
    assert (bound > 0).all()
    for share in (1e-3, 0.3, 1.0):
        h = (share * bound).clamp(max=1e3)
        moved = next(iterate(system, x, h, 1))
        before, after = system.energy(x), system.energy(moved)
        assert (after - before <= 1e-12 * before.abs().maximum(after.abs())).all()


@given(data=st.data())
@torch.no_grad()
def test_et_f21_no_direction_curves_upwards_more_than_the_bound(make_case, data):
    case = make_case(data)
    _, tokens, dim = case.x.shape
    top = case.system.interaction.curvature_bound(tokens)
    g = case.system.activation(case.x)[:1]
    basis = torch.eye(tokens * dim, dtype=g.dtype).reshape(-1, tokens, dim)
    hessian = case.system.interaction.hvp(g.expand(tokens * dim, -1, -1), basis).flatten(1)
    assert torch.linalg.eigvalsh(hessian).max() <= top + 1e-12 * hessian.abs().max()


@torch.no_grad()
def test_concave_energies_bound_no_step_and_the_leaky_map_has_one(make_case):
    """ET-F19; the leaky Euler step 1 is the self-consistency map."""
    case = make_case()
    system = System(case.system.lagrangian, case.system.hopfield)
    assert (descent_bound(system, case.x) == torch.inf).all()
    assert (descent_bound(system.with_dynamics("leaky"), case.x) == 1).all()


@torch.no_grad()
def test_an_unknown_energy_has_no_bound_and_is_guarded_all_the_same():
    class Unknown(LinearEnergy):
        def curvature_bound(self, tokens):
            return math.inf

    v = torch.randn(3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    system = System(LayerNorm(6).double(), Unknown(v))
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert (descent_bound(system, x) == 0).all()
    report = GuardedEuler().step(system, x, torch.full((2,), 100.0, dtype=torch.float64))
    assert not report.failed.any()
    assert (rise(system, x, report.x) <= 0).all()


@pytest.mark.parametrize("dynamics", DYNAMICS)
@torch.no_grad()
def test_guarded_euler_raises_no_energy_where_euler_does(make_case, dynamics):
    system, x = repulsive(len(STEPS))
    system = system.with_dynamics(dynamics)
    x, raised, shrunk = system.prepare(x), 0, 0
    for _ in range(12):
        raised += int((rise(system, x, next(iterate(system, x, STEPS, 1))) > 1e-12).sum())
        report = GuardedEuler().step(system, x, STEPS)
        assert (rise(system, x, report.x) <= 1e-12).all()
        least = STEPS.minimum(descent_bound(system, x))
        assert (report.taken >= least * (1 - 1e-12)).all()
        assert torch.equal(report.shrunk, report.taken < STEPS)
        halvings = report.evaluations - 2
        assert torch.equal(report.shrunk, halvings > 0)
        shrunk += int(report.shrunk.sum())
        x = report.x
    assert raised > 10  # or the guard would have nothing to do
    assert shrunk > 10


@pytest.mark.parametrize("dynamics", DYNAMICS)
@torch.no_grad()
def test_a_step_that_euler_may_take_is_taken_as_it_is(make_case, close, dynamics):
    case = make_case(dynamics=dynamics, batch=3)
    x = case.system.prepare(case.x)
    h = torch.full((3,), 1e-3, dtype=torch.float64)
    report, plain = GuardedEuler().step(case.system, x, h), next(iterate(case.system, x, h, 1))
    assert torch.equal(report.taken, h) and not report.shrunk.any()
    assert (report.evaluations == 2).all()
    close(report.x, plain, 1e-15)


@torch.no_grad()
def test_at_an_equilibrium_rounding_is_not_taken_for_a_rise(make_case):
    case = make_case(dynamics="leaky", batch=4, hopfield="softmax")
    x = case.x
    for _ in range(3000):
        x = case.system.map(x, 0.5)
    assert case.system.residual(x).max() < 1e-12
    report = GuardedEuler().step(case.system, x, torch.full((4,), 0.3, dtype=torch.float64))
    assert not report.shrunk.any()


@torch.no_grad()
def test_a_search_that_may_not_halve_fails_visibly():
    system, x = repulsive(1)
    report = GuardedEuler(halvings=0).step(system, x, torch.ones(1, dtype=torch.float64))
    assert report.failed.all() and (report.taken == 0).all()
    assert torch.equal(report.x, x)
