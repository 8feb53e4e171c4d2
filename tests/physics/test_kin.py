"""Systems beside the Energy Transformer: other Lagrangians, couplings, and their exact answers."""

import math

import pytest
import torch
from torch.func import jvp

import etdyn as ed
from etdyn.energies import Attention
from etdyn.problems import (
    QuadraticEnergy,
    anisotropic_well,
    curie_weiss,
    linear_flow,
    two_tokens,
)

STRENGTHS = torch.tensor([0.7, 1.9, 1.1, 0.3], dtype=torch.float64)


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LAGRANGIANS = [
    ed.Quadratic(4).double(),
    ed.IsingSpin(4, beta=0.6).double(),
    ed.IsingSpin(4, beta=3.0).double(),
    ed.LayerNorm(4, eps=0.1, gamma=1.7).double(),
]


@pytest.mark.parametrize("lagrangian", LAGRANGIANS)
def test_lagrangian_derivatives_and_duality(lagrangian, close):
    x, v = 2 * randn(3, 5, 4), randn(3, 5, 4, seed=1)
    g, dg = jvp(lagrangian.activation, (x,), (v,))
    value, slope = jvp(lagrangian.value, (x,), (v,))
    close(slope, (g * v).sum(-1), 1e-13, scale=1)
    close(lagrangian.metric(x, v), dg, 1e-13, scale=1)
    close(lagrangian.metric_root(x, lagrangian.metric_root(x, v)), dg, 1e-13, scale=1)
    back = lagrangian.metric_root(x, lagrangian.metric_root_inverse(x, v))
    seen = v if not isinstance(lagrangian, ed.LayerNorm) else lagrangian.centre(v)
    close(back, seen, 1e-12, scale=1)
    w = randn(3, 5, 4, seed=2)
    close((w * lagrangian.metric_root(x, v)).sum(-1), (v * lagrangian.metric_root(x, w)).sum(-1),
          1e-12, scale=1)  # fmt: skip
    close(lagrangian.legendre(x), (x * g).sum(-1) - value, 1e-13, scale=10)
    close(lagrangian.dual(g), lagrangian.legendre(x), 1e-7, scale=1)  # |g| near its bound
    small = 1e-7 * x
    if not isinstance(lagrangian, ed.LayerNorm):  # no digits are lost near zero
        half = (small * lagrangian.activation(small)).sum(-1) / 2
        for quadratic in (lagrangian.value(small), lagrangian.legendre(small),
                          lagrangian.dual(lagrangian.activation(small))):  # fmt: skip
            close(quadratic, half, 1e-11)
    other = 2 * randn(3, 5, 4, seed=3)  # Fenchel and Young
    assert (lagrangian.value(other) + lagrangian.dual(g) >= (other * g).sum(-1) - 1e-9).all()


def test_ising_spin_far_fields_stay_finite():
    spin = ed.IsingSpin(1, beta=2.0).double()
    x = torch.tensor([[-400.0], [0.0], [400.0]], dtype=torch.float64)
    assert torch.equal(spin.activation(x), torch.tensor([[-1.0], [0.0], [1.0]]).double())
    assert spin.value(x).tolist() == pytest.approx(
        [400 - math.log(2) / 2, 0, 400 - math.log(2) / 2]
    )
    # a saturated spin has lost its entropy log 2
    assert spin.legendre(x).tolist() == pytest.approx([math.log(2) / 2, 0, math.log(2) / 2])
    assert spin.dual(torch.ones(1, 1).double()).item() == pytest.approx(math.log(2) / 2)
    assert spin.dual(torch.full((1, 1), 1.1).double()).isinf().all()


@pytest.mark.parametrize("beta", [0.7, 1.2, 1.5, 2.0])
def test_s_b6_curie_weiss(beta, close):
    known = curie_weiss(6, beta)
    system, m = known.system, known.states[:, 0, 0]
    published = {1.2: 0.6585696604, 1.5: 0.8585596366, 2.0: 0.9575040241}
    if beta in published:
        assert m[0].item() == pytest.approx(published[beta], abs=5e-11)
    assert len(m) == (3 if beta > 1 else 1)
    assert system.residual(known.states).max() < 1e-14
    close(system.map(known.states), known.states, 1e-14, scale=1)
    close(system.interaction_energy(known.states), known.energies, 1e-14, scale=1)
    for state, exponents in zip(known.states, known.exponents, strict=True):
        close(-eigenvalues(system, state).real.sort().values.flip(0), exponents, 1e-12, scale=1)
    found = ed.find_equilibrium(system, randn(20, 6, 1), tol=1e-12)
    assert found.converged.all() and found.safeguard == "energy"
    nearest = (found.x[:, 0, 0].abs() - m[0].abs()).abs()
    assert nearest.max() < (1e-10 if beta > 1 else 1e-8), "minima only, never the saddle at 0"


def eigenvalues(system, state):
    n = state.numel()
    directions = torch.eye(n, dtype=state.dtype).reshape(n, *state.shape)
    x = state.repeat(n, *[1] * state.ndim)
    columns = jvp(lambda x: system.velocity(0.0, x), (x,), (directions,))[1]
    return torch.linalg.eigvals(columns.reshape(n, n).T)


@pytest.mark.parametrize("dynamics", ["sphere", "leaky", "et"])
def test_et_f7_two_tokens(dynamics, close):
    known = two_tokens(STRENGTHS, dynamics, gamma=1.3)
    system = known.system
    close(system.interaction_energy(known.states), known.energies, 1e-13)
    force = system.force(known.states).flatten(1).norm(dim=1)
    assert (system.residual(known.states) < 1e-14 * force).all()
    close(system.map(known.states), known.states, 1e-13)
    index = (known.exponents < 0).sum(1)
    assert index.tolist() == [0, 1, 2, 3], "the k-th strongest pair has k - 1 ways down"
    for state, exponents in zip(known.states, known.exponents, strict=True):
        values = -eigenvalues(system, state)
        assert values.imag.abs().max() < 1e-7  # null directions make nilpotent blocks
        real = values.real.sort().values
        if dynamics == "sphere":  # 4 null directions: mean and length of both tokens
            wanted = torch.cat([exponents, torch.zeros(4).double()]).sort().values
        elif dynamics == "leaky":
            wanted = torch.cat([exponents, torch.ones(4).double()]).sort().values
        else:  # the state stands for x = c z, c = 1: what moves is H M, kappa - 1
            wanted = torch.cat([exponents - 1, torch.zeros(4).double()]).sort().values
        close(real, wanted, 1e-7, scale=1)


def test_linear_flow_turns_and_is_met_exactly(close):
    turn = torch.tensor([[0.0, -3.0], [3.0, 0.0]], dtype=torch.float64)
    problem = linear_flow(turn, randn(2, 2, 3))
    system = problem.system
    sol = ed.solve(system, problem.start, [0.0, 0.5, 1.0], rtol=1e-10, atol=1e-12, gradient=None)
    for t, x in zip(sol.t.tolist(), sol.x, strict=True):
        close(x, problem.exact(t), 1e-8)
    values = eigenvalues(system, problem.start[0]).detach()
    assert values.imag.abs().min().item() == pytest.approx(3.0), "no energy: complex eigenvalues"
    for method in ("map", "anderson", "newton-krylov"):  # the undamped map turns outwards
        found = ed.find_equilibrium(system, problem.start, method, tol=1e-12)
        assert found.converged.all() and found.energy is None and found.safeguard == "residual"
        assert found.x.abs().max() < 1e-11
    ds = sol.to_xarray()
    assert "residual" in ds and not any(name.startswith("energy") for name in ds)


def test_couplings_have_no_energy_and_say_so():
    system = linear_flow(torch.eye(3).double(), randn(1, 3, 2)).system
    x = randn(1, 3, 2)
    assert not system.has_energy
    for verb in (system.energy, system.energies, system.interaction_energy, system.dissipation):
        with pytest.raises(TypeError, match="expected an interaction that has an energy"):
            verb(x)
    with pytest.raises(TypeError, match="LayerNorm"):
        _ = system.layer_norm
    with pytest.raises(ValueError, match="dynamics"):
        system.with_dynamics("sphere")
    with pytest.raises(ValueError, match="couplings"):
        ed.LinearCoupling(torch.ones(2, 3))
    with pytest.raises(ValueError, match="3 tokens"):
        system.force(randn(1, 4, 2))


def test_coupling_derivative_and_masks(close):
    coupling = ed.LinearCoupling(randn(5, 5))
    g, u = randn(2, 5, 3, seed=1), randn(2, 5, 3, seed=2)
    close(coupling.force_jvp(g, u), jvp(coupling.force, (g,), (u,))[1], 1e-14)
    tokens = torch.tensor([[True, True, False, True, False]]).expand(2, -1)
    keys = randn(2, 5, 5, seed=4) > 0
    masked = coupling.masked(tokens, keys)
    few = tokens[0].nonzero().flatten()
    for k in range(2):
        j = (coupling.couplings * keys[k])[few][:, few]
        close(masked.force(g)[k, few], j @ g[k, few], 1e-14)
    assert (masked.force(g)[~tokens] == 0).all()
    close(masked.force_jvp(g, u), jvp(masked.force, (g,), (u,))[1], 1e-14)


def test_anisotropic_well_is_met_exactly(close):
    rates = torch.tensor([[0.5, 2.0], [-0.3, 1.0]], dtype=torch.float64)
    problem = anisotropic_well(rates, randn(3, 2, 2))
    system = problem.system
    sol = ed.solve(system, problem.start, [0.0, 1.5], rtol=1e-11, atol=1e-13, gradient=None)
    close(sol.x[-1], problem.exact(1.5), 1e-9)
    x = problem.start
    close(system.energy(x), (rates * x.square()).sum((1, 2)) / 2, 1e-14)
    close(system.dissipation(x), (rates * x).square().sum((1, 2)), 1e-14)
    close(system.residual(x), (rates * x).flatten(1).norm(dim=1), 1e-14)
    with pytest.raises(ValueError, match="leaky"):  # here force(x) = x is no equilibrium
        ed.find_equilibrium(system, x)


def test_quadratic_energy_is_its_matrix(close):
    a = randn(3, 2, 3, 2)
    energy = QuadraticEnergy(a + a.permute(2, 3, 0, 1))
    g, u = randn(4, 3, 2, seed=1), randn(4, 3, 2, seed=2)
    value, slope = jvp(energy.energy, (g,), (u,))
    close(slope, -(energy.force(g) * u).sum((1, 2)), 1e-13)
    close(energy.force_jvp(g, u), jvp(energy.force, (g,), (u,))[1], 1e-13)
    close(value, torch.einsum("nia,iajb,njb->n", g, energy.matrix, g) / 2, 1e-13)
    with pytest.raises(ValueError, match="symmetric"):
        QuadraticEnergy(a)


def test_forces_differentiate_alike(make_case, close):
    case = make_case()
    g, u = case.system.activation(case.x), torch.randn_like(case.x)
    for term in case.system.interaction.terms().values():
        close(term.force_jvp(g, u), jvp(term.force, (g,), (u,))[1], 1e-11, scale=1)
    assert math.isinf(linear_flow(torch.eye(2).double(), randn(1, 2, 1)).system.interaction
                      .curvature_bound(2))  # fmt: skip
    assert isinstance(case.system.interaction.terms()["attention"], Attention)
