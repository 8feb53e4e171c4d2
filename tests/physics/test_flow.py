"""The flow: descent, its rate, and the Jacobian (ET-F11, F12, F16 to F18, F30)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd.functional import jacobian

from etdyn import EnergyTransformer, LayerNorm, System, descend, solve

DATA = st.data()
LAWS = ["et", "leaky", "sphere"]
STENCIL = torch.arange(5, dtype=torch.float64)


def slope(system, x):
    """dE/dt by forward-mode autograd along the velocity, `(batch,)`."""
    return torch.func.jvp(system.energy, (x,), (system.velocity(0.0, x),))[1]


@torch.no_grad()
def worst_rise(system, states):
    """Largest rise of the energy between consecutive states, in units of |E|."""
    energy = torch.stack([system.energy(x) for x in states])
    return float(((energy[1:] - energy[:-1]) / energy[:-1].abs()).max())


def rate_scale(system, x):
    """What cancels in v.Mv: (gamma / sigma) |v|^2, or |force|^2 in the clock of the sphere."""
    if system.dynamics == "sphere":
        return system.force(x).square().sum((1, 2))
    v = system.velocity(0.0, x)
    return (system.clock_rate(x) * v.square().sum(-1)).sum(1)


@pytest.mark.parametrize("law", LAWS)
@given(data=DATA)
def test_et_f11_dissipation_is_the_slope_of_the_energy(make_case, close, law, data):
    case = make_case(data, dynamics=law)
    system = case.system.masked(tokens=case.token_mask())
    x = system.prepare(case.x)
    close(system.dissipation(x), -slope(system, x), scale=rate_scale(system, x))
    assert (system.dissipation(x) >= -1e-14 * rate_scale(system, x)).all()


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=10)
@given(data=DATA)
def test_et_f11_dissipation_is_the_finite_difference_along_the_flow(make_case, close, law, data):
    """Fourth-order central differences of the energy at five times of the solved flow."""
    smooth = {"hopfield": data.draw(st.sampled_from(["power", "softmax"])), "power": 5}
    case = make_case(data, dynamics=law, tokens=3, spread=1.0, **smooth)
    system = case.system
    x0 = system.prepare(case.x)
    pace = system.velocity(0.0, x0).norm(dim=-1) / system.lagrangian.sigma(x0)
    h = 4e-3 / float(pace.max())
    flow = solve(system, x0, h * STENCIL, "rk4", step=h, gradient=None).x
    energy = torch.stack([system.energy(x) for x in flow])
    difference = (energy[0] - 8 * energy[1] + 8 * energy[3] - energy[4]) / (12 * h)
    scale = rate_scale(system, flow[2])
    rounding = 1e-15 * float(energy.abs().max() / h / scale.max())
    close(-difference, system.dissipation(flow[2]), 1e-7 + rounding, scale=scale)


class PerFeatureGamma(LayerNorm):
    """A test double: layer norm with a gamma per feature of either sign, which ET-F11 forbids."""

    def __init__(self, gamma, eps=1e-5):
        super().__init__(len(gamma), eps)
        self.vector = gamma

    def activation(self, x):
        y = self.centre(x)
        return self.vector * y / self.sigma(x).unsqueeze(-1) + self.delta


def share_of_rises(make_case, gamma):
    """At which share of random states the energy rises when gamma is `gamma(rng)`."""
    rises = total = 0
    for seed in range(20):
        case = make_case(seed=seed, dim=4, heads=1, head_dim=2, memories=2, tokens=2, batch=100)
        system = System(PerFeatureGamma(gamma(case)).double(), case.system.interaction)
        rate = slope(system, case.x)
        rises += int((rate > 1e-12 * case.x[0].numel()).sum())
        total += len(case.x)
    return rises / total


def test_et_f11_descent_needs_a_positive_scalar_gamma(make_case):
    """So the tests of descent can fail: with other gammas the energy does rise."""
    ones = torch.ones(4, dtype=torch.float64)
    assert share_of_rises(make_case, lambda case: 1.3 * ones) == 0
    assert share_of_rises(make_case, lambda case: -ones) > 0.99
    assert share_of_rises(make_case, lambda case: (1.5 * case.randn(4)).exp()) > 0.01


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=5)
@given(data=DATA)
def test_energy_never_rises_along_an_accurate_flow(make_case, law, data):
    case = make_case(data, dynamics=law, spread=1.0)
    times = torch.linspace(0, 0.5, 20)
    solution = solve(case.system, case.x, times, "dopri5", rtol=1e-9, atol=1e-11, gradient=None)
    assert worst_rise(case.system, solution.x) <= 1e-12


@pytest.mark.parametrize("law", LAWS)
def test_energy_never_rises_on_the_reference_block(golden, law):
    arrays = golden("et_block_small")
    beta, eps = float(arrays["beta"]), float(arrays["eps"])
    system = EnergyTransformer.from_official(arrays, beta=beta, eps=eps, dynamics=law)
    x0 = torch.from_numpy(arrays["x0"]).unsqueeze(0)
    times = torch.linspace(0, 0.3, 20)
    solution = solve(system, x0, times, "dopri5", rtol=1e-9, atol=1e-11, gradient=None)
    assert worst_rise(system, solution.x) <= 1e-12
    assert system.energy(solution.x[-1]) < system.energy(solution.x[0]) - 50


@given(data=DATA)
def test_et_f30_leaky_lyapunov_function_is_not_that_of_the_published_flow(make_case, close, data):
    """E + sum(x.g - L) is what leaky motion lowers; E alone is the published flow's."""
    case = make_case(data, dynamics="leaky", eps=1.0)
    leaky, x = case.system, case.x
    g = leaky.activation(x)
    neuron = ((x * g).sum(-1) - leaky.lagrangian.value(x)).sum(1)
    total = leaky.interaction_energy(x) + neuron
    close(leaky.energy(x), total, 1e-14, scale=(x * g).abs().sum((1, 2)) + total.abs())
    assert list(leaky.energies(x)) == ["attention", "hopfield", "lagrangian"]
    et = leaky.with_dynamics("et")
    close(et.energy(x), leaky.interaction_energy(x), 0)
    assert list(et.energies(x)) == ["attention", "hopfield"]


def test_et_f30_the_sum_rises_on_the_published_flow(make_case):
    """At eps = 1 it does at most random states, so the two energies are worth keeping apart."""
    case = make_case(eps=1.0, batch=200, weights=0.1)
    x, v = case.x, case.system.velocity(0.0, case.x)
    leaky = case.system.with_dynamics("leaky")
    rate = torch.func.jvp(leaky.energy, (x,), (v,))[1]
    assert (rate > 0).double().mean() > 0.1
    assert (slope(leaky, x) < 0).all()
    assert (slope(case.system, x) < 0).all()


def dense_metric(lagrangian, x):
    """M as one matrix over all tokens and features of one sample."""
    size = x.numel()
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *x.shape[1:])
    return lagrangian.metric(x.expand(size, -1, -1), unit).reshape(size, size)


def dense_hessian(energy, g):
    size = g.numel()
    unit = torch.eye(size, dtype=torch.float64).reshape(size, *g.shape[1:])
    return energy.hvp(g.expand(size, -1, -1), unit).reshape(size, size)


@settings(max_examples=15)
@given(data=DATA)
def test_et_f12_jacobian_is_minus_hessian_times_metric(make_case, close, data):
    """J = -H M; M J symmetric; the spectrum real, that of -M^1/2 H M^1/2; N exact zeros."""
    case = make_case(data, batch=1, spread=1.0)
    system, x = case.system, case.x
    size, tokens = x.numel(), x.shape[1]
    j = jacobian(lambda v: system.velocity(0.0, v), x).reshape(size, size)
    m = dense_metric(system.lagrangian, x)
    h = dense_hessian(system.interaction, system.activation(x))
    scale = torch.linalg.matrix_norm(h, 2) * torch.linalg.matrix_norm(m, 2)
    close(h, h.T, 1e-14, scale=h.abs().max())
    close(j, -h @ m, scale=scale)
    close(m @ j, (m @ j).T, scale=scale * torch.linalg.matrix_norm(m, 2))
    values, vectors = torch.linalg.eigh(m)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    exact = torch.linalg.eigvalsh(-root @ h @ root)
    found = torch.linalg.eigvals(j)
    # zero may sit in a nilpotent block, which rounding splits by the square root of 1e-16
    assert (found.imag.abs() <= 1e-7 * scale).all()
    close(found.real.sort().values, exact, 1e-7, scale=scale)
    assert (exact.abs() <= 1e-13 * scale).sum() >= tokens


@settings(max_examples=15)
@given(data=DATA)
def test_et_f12_two_null_directions_a_token_without_eps(make_case, data):
    case = make_case(data, batch=1, spread=1.0, eps=0.0)
    system, x = case.system, case.x
    size, tokens = x.numel(), x.shape[1]
    m = dense_metric(system.lagrangian, x)
    assert torch.linalg.matrix_rank(m, rtol=1e-12) == size - 2 * tokens
    j = jacobian(lambda v: system.velocity(0.0, v), x).reshape(size, size)
    y = system.lagrangian.centre(x)
    for null in (torch.ones_like(x), y):
        for token in range(tokens):
            v = torch.zeros_like(x)
            v[:, token] = null[:, token] / null[:, token].norm()
            assert (j @ v.flatten()).norm() <= 1e-13 * torch.linalg.matrix_norm(j, 2)


@given(data=DATA)
def test_et_f16_memories_push_tokens_outwards(make_case, close, data):
    """Without attention and delta: d(|y_A|^2 / 2)/dt = (sigma_A / gamma) sum relu(h)^2 >= 0."""
    case = make_case(data, hopfield="relu")
    lagrangian, network, x = case.system.lagrangian, case.system.hopfield, case.x
    with torch.no_grad():
        lagrangian.delta.zero_()
    system = System(lagrangian, network)
    y = lagrangian.centre(x)
    rate = (y * system.velocity(0.0, x)).sum(-1)
    h = (system.activation(x) @ network.memories.T).relu()
    pushed = lagrangian.sigma(x) / lagrangian.gamma * h.square().sum(-1)
    close(rate, pushed, 1e-13)


def force_bound(system, tokens):
    """C >= |grad E|, from |g_A| <= G and the spectral norms of the weights."""
    lagrangian, attention = system.lagrangian, system.attention
    g = lagrangian.delta.norm() + lagrangian.gamma * lagrangian.dim**0.5
    s = torch.linalg.matrix_norm(attention.key.mT @ attention.query, 2).sum()
    memories = torch.linalg.matrix_norm(system.hopfield.memories, 2) ** 2
    return g * ((tokens**0.5 + tokens) * s + tokens**0.5 * memories)


@settings(max_examples=10)
@given(data=DATA, step=st.sampled_from([1.0, 1e3, 1e6, 1e12]))
def test_et_f17_states_stay_within_the_light_cone(make_case, data, step):
    """|x_k - x_0| <= k alpha C for Euler with any step, |x(t) - x(0)| <= C t for the flow."""
    case = make_case(data, hopfield="relu")
    system, x, tokens = case.system, case.x, case.x.shape[1]
    bound = force_bound(system, tokens)
    solution = descend(system, x, step, 12)
    moved = (solution.x - x).flatten(2).norm(dim=2)
    k = torch.arange(13, dtype=torch.float64)[:, None]
    assert (moved <= k * step * bound * (1 + 1e-12)).all()
    flow = solve(system, x, [0.0, 0.5, 1.0], rtol=1e-6, gradient=None)
    moved = (flow.x - x).flatten(2).norm(dim=2)
    assert (moved <= flow.t[:, None] * bound * (1 + 1e-5)).all()


@pytest.mark.parametrize("law", LAWS)
@given(data=DATA)
def test_et_f18_tokens_decouple_without_attention(make_case, law, data):
    case = make_case(data, tokens=4)
    other = case.x.clone()
    other[:, 2] = case.randn(*case.x[:, 2].shape)
    with torch.no_grad():
        case.system.attention.query.zero_()
    for interaction in (case.system.hopfield, case.system.interaction):
        system = System(case.system.lagrangian, interaction, law)
        a, b = descend(system, case.x, 0.3, 4).x, descend(system, other, 0.3, 4).x
        assert torch.equal(a[:, :, [0, 1, 3]], b[:, :, [0, 1, 3]])
        assert not torch.equal(a[:, :, 2], b[:, :, 2])
