"""The flow linearised: closed forms against autograd, differences, symmetry and exact cases."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import eigsh
from torch.autograd.functional import hessian

from etdyn import LayerNorm, System, find_equilibrium
from etdyn.analysis.operators import (
    Linearisation,
    dense_matrix,
    flow_jacobian,
    linear_operator,
    stability_product,
    without_null,
)
from etdyn.energies import Hopfield
from etdyn.lagrangians import Quadratic
from etdyn.problems import curie_weiss, linear_flow, two_tokens

DATA = st.data()
LAWS = ["et", "leaky", "sphere"]


def derivative(system, x, u):
    """Of the velocity, by forward differentiation."""
    return torch.func.jvp(lambda z: system.velocity(0.0, z), (x,), (u,))[1]


@pytest.mark.parametrize("law", LAWS)
@given(data=DATA)
def test_f10_flow_jacobian_is_the_derivative_of_the_velocity(make_case, close, law, data):
    case = make_case(data, dynamics=law)
    u = case.randn(*case.x.shape)
    for system in (case.system, case.system.masked(case.token_mask())):
        exact = derivative(system, case.x, u)
        cancelled = 0.0
        if law == "leaky":
            cancelled = float(u.abs().max())
        close(flow_jacobian(system, case.x, u), exact, 1e-11, scale=cancelled)


def test_f10_flow_jacobian_of_other_lagrangians_and_couplings(close):
    rng = torch.Generator().manual_seed(0)
    spins = curie_weiss(5, 1.7)
    turning = linear_flow(
        torch.randn(5, 5, generator=rng, dtype=torch.float64),
        torch.randn(2, 5, 3, generator=rng, dtype=torch.float64),
    )
    for system, x in ((spins.system, spins.states), (turning.system, turning.start)):
        u = torch.randn(*x.shape, generator=rng, dtype=torch.float64)
        close(flow_jacobian(system, x, u), derivative(system, x, u), 1e-14)


@pytest.mark.parametrize("kind", ["relu", "power", "softmax"])
def test_f10_stability_is_the_hessian_where_g_is_x(make_case, close, kind):
    """With g = x (L quadratic), S is the Hessian of E, here by autograd twice."""
    case = make_case(hopfield=kind, tokens=3, dim=4)
    system = System(Quadratic(4).double(), case.system.interaction, "et")
    x = case.x[:1]
    exact = hessian(lambda z: system.interaction_energy(z).sum(), x).reshape(12, 12)
    close(dense_matrix(system, x), exact, 1e-13)


@pytest.mark.parametrize("law", LAWS)
@given(data=DATA)
def test_f12_stability_is_symmetric_and_blind_to_null_directions(make_case, close, law, data):
    case = make_case(data, dynamics=law)
    system, x = case.system.masked(case.token_mask()), case.x
    u, v = case.randn(*x.shape), case.randn(*x.shape)
    su, sv = stability_product(system, x, u), stability_product(system, x, v)
    size = max(float(v.norm() * su.norm()), float(u.norm() * sv.norm()))
    close((v * su).sum((1, 2)), (u * sv).sum((1, 2)), 1e-13, scale=size)
    close(stability_product(system, x, without_null(system, x, u)), su, 1e-12)
    close(without_null(system, x, su), su, 1e-13)


@pytest.mark.parametrize("eps", [1e-5, 1e-2, 0.0])
@pytest.mark.parametrize("law", ["et", "leaky"])
@pytest.mark.parametrize("mask", [False, True])
def test_f12_eigenvalues_are_minus_those_of_the_jacobian(make_case, close, law, eps, mask):
    """At any state, radii included; what is null has rate 0 (leaky: -1)."""
    case = make_case(dynamics=law, eps=eps, hopfield="softmax", seed=3)
    tokens = torch.tensor([[True, True, False, True, True]])
    system = case.system.masked(tokens) if mask else case.system
    rates = torch.linalg.eigvals(dense_matrix(system, case.x[:1], flow_jacobian))
    close(rates.imag, torch.zeros_like(rates.imag), 1e-11, scale=rates.abs().max())
    here = Linearisation(system, case.x[:1])
    null = int(here.null())
    assert null == (1 if eps else 2) * (4 if mask else 5)
    s = torch.linalg.eigvalsh(dense_matrix(system, case.x[:1]))
    # S is zero on null and absent directions; the leaky flow has -1 and 0 there
    moved = s.clone()
    if law == "leaky":
        moved[s.abs().argsort()[:null]] = 1.0
    close(-rates.real.sort(descending=True).values, moved.sort().values, 1e-11)


@pytest.mark.parametrize("spread", [1.0, 7.0])
def test_sphere_hessian_is_the_second_derivative_along_geodesics(make_case, close, spread):
    """E on great circles g_A(t) = R (n cos + t sin), five-point stencil; x need not be prepared."""
    case = make_case(dynamics="sphere", hopfield="softmax", gamma=1.4, spread=spread, eps=1.0)
    system, x, h = case.system, case.x, 1e-2
    n = system.lagrangian.normalise(x)  # length sqrt(D), radius gamma sqrt(D) in g
    u = without_null(system, x, case.randn(*x.shape))
    u = u / u.flatten(1).norm(dim=1)[:, None, None]
    radius = system.lagrangian.gamma * system.dim**0.5
    speed = u.norm(dim=-1, keepdim=True)

    def energy(t):
        angle = speed * t / radius
        y = n * angle.cos() + system.dim**0.5 * u / speed * angle.sin()
        return system.interaction_energy(y)

    near, far = energy(h) + energy(-h), energy(2 * h) + energy(-2 * h)
    second = (16 * near - far - 30 * energy(0.0)) / (12 * h * h)
    product = (u * stability_product(system, x, u)).sum((1, 2))
    close(product, second, 1e-8)
    # and without the curvature of the sphere it would not be
    flat = -(u * system.interaction.force_jvp(system.activation(x), u)).sum((1, 2))
    assert ((flat - second).abs() > 1e-2 * second.abs()).all()


@given(data=DATA)
def test_sphere_jacobian_seen_from_the_sphere_is_minus_the_hessian(make_case, close, data):
    """At any state, not only at equilibrium: P J P = -S."""
    case = make_case(data, dynamics="sphere", spread=1.0, dim=5)
    system, x = case.system, case.system.prepare(case.x)
    u = without_null(system, x, case.randn(*x.shape))
    seen = without_null(system, x, flow_jacobian(system, x, u))
    size = system.force(x).norm() + u.norm() * system.interaction.hvp(case.x, u).norm()
    close(seen, -stability_product(system, x, u), 1e-12, scale=size)


def test_leaky_and_sphere_are_congruent_at_a_common_equilibrium(make_case, close):
    """S_leaky = W^1/2 S_sphere W^1/2 with W = R / rho per token: the same index, and for one
    token kappa = 1 + R h / rho (ET 1.5.5)."""
    for tokens in (1, 4):
        case = make_case(dynamics="leaky", hopfield="softmax", weights=1.5, eps=0.0, tokens=tokens)
        leaky, sphere = case.system, case.system.with_dynamics("sphere")
        x = find_equilibrium(leaky, case.x, tol=1e-12, throw=True).x
        y = leaky.lagrangian.centre(x)
        weight = leaky.lagrangian.gamma * leaky.dim**0.5 / y.norm(dim=-1, keepdim=True)
        u = case.randn(*x.shape)
        around = weight.sqrt() * stability_product(sphere, x, weight.sqrt() * u)
        close(stability_product(leaky, x, u), around, 1e-11)
        kappa = torch.linalg.eigvalsh(dense_matrix(leaky, x))
        lowest = torch.linalg.eigvalsh(dense_matrix(sphere, x))
        assert ((kappa < -1e-10).sum() == (lowest < -1e-10).sum()).all()
        if tokens == 1:
            bare = System(leaky.lagrangian, leaky.interaction, "et")
            h = torch.linalg.eigvalsh(dense_matrix(bare, x)) / weight[0, 0]
            inside = h.abs() > 1e-12  # off the two null directions
            close(kappa[kappa.abs() > 1e-12], 1 + weight[0, 0] * h[inside], 1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_two_tokens_index_is_the_number_of_negative_eigenvalues(law):
    known = two_tokens(torch.tensor([4.0, 2.0, 1.0], dtype=torch.float64), law)
    shift = 1.0 if law == "et" else 0.0
    for k in range(3):
        values = shift + torch.linalg.eigvalsh(dense_matrix(known.system, known.states, sample=k))
        assert int((values < -1e-9).sum()) == k


@pytest.mark.parametrize("law", LAWS)
def test_absent_tokens_change_nothing_and_do_not_move(make_case, close, law):
    case = make_case(dynamics=law, tokens=5)
    present = torch.tensor([[True, True, False, True, False]])
    x = case.x.clone()
    x[:, ~present[0]] = 7.0  # padding without a direction
    u = case.randn(*x.shape)
    for product in (flow_jacobian, stability_product):
        masked = product(case.system.masked(present), x, u)
        alone = product(case.system, x[:, present[0]], u[:, present[0]])
        close(masked[:, present[0]], alone, 1e-13)
        assert (masked[:, ~present[0]] == 0).all()
    here = Linearisation(case.system.masked(present), x)
    assert (here.tokens() == 3).all()


def test_relu_hessian_is_one_sided_at_a_kink(close):
    """At h = 0 the memory is off, as it is just below; just above it pulls."""
    network = Hopfield(4, memories=1, kind="relu").double().requires_grad_(False)
    xi = torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    network.memories.copy_(xi)
    system = System(LayerNorm(4).double(), network, "leaky").requires_grad_(False)
    on = torch.tensor([[[0.0, 0.0, 1.0, -1.0]]], dtype=torch.float64)
    u = xi.reshape(1, 1, 4)
    kink, below, above = (stability_product(system, on + c * u, u) for c in (0.0, -1e-9, 1e-9))
    close(kink, below, 1e-8)
    close(kink, u, 1e-15)  # kappa = 1 off the memory
    curved = 1 - 2 * float(system.clock_rate(on))  # |xi|^2 gamma / sigma
    close(above, curved * u, 1e-8)


@pytest.mark.parametrize("law", LAWS)
def test_lift_moves_g_along_the_mode(make_case, close, law):
    """M lift(w) = M^1/2 w; on the sphere x itself moves along w."""
    case = make_case(dynamics=law, eps=1e-3)
    here, w = Linearisation(case.system, case.x), case.randn(*case.x.shape)
    lifted = here.lift(w)
    if law == "sphere":
        close(lifted, without_null(case.system, case.x, w), 0)
        return
    lagrangian = case.system.lagrangian
    close(lagrangian.metric(case.x, lifted), lagrangian.metric_root(case.x, w), 1e-12)
    close(here.project(lifted), lifted, 1e-13)


def test_lift_of_other_lagrangians(close):
    known = curie_weiss(5, 1.7)
    w = torch.randn(3, 5, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lifted = Linearisation(known.system, known.states).lift(w)
    root = known.system.lagrangian.metric_root(known.states, lifted)
    close(root, w, 1e-13)


@pytest.mark.parametrize("product", [flow_jacobian, stability_product, without_null])
def test_linear_operator_and_dense_matrix_are_the_same(make_case, product):
    case = make_case(dynamics="leaky", batch=3)
    system = case.system.masked(case.token_mask())
    matrix = dense_matrix(system, case.x, product, 2).numpy()
    operator = linear_operator(system, case.x, product, 2)
    assert operator.dtype == np.float64
    columns = np.random.default_rng(0).normal(size=(operator.shape[0], 3))
    np.testing.assert_allclose(operator @ columns, matrix @ columns, rtol=0, atol=1e-13)
    np.testing.assert_allclose(operator @ columns[:, 0], matrix @ columns[:, 0], rtol=0, atol=1e-13)


def test_linear_operator_serves_scipy(make_case):
    case = make_case(dynamics="et")
    dense = torch.linalg.eigvalsh(dense_matrix(case.system, case.x, sample=1)).numpy()
    values = eigsh(linear_operator(case.system, case.x, sample=1), k=4, which="BE")[0]
    np.testing.assert_allclose(np.sort(values), dense[[0, 1, -2, -1]], atol=1e-12)


def test_wrong_input_raises(make_case):
    case = make_case()
    with pytest.raises(ValueError, match="u: "):
        flow_jacobian(case.system, case.x, case.x[..., :3])
    with pytest.raises(TypeError, match="u: "):
        stability_product(case.system, case.x, case.x.float())
    for make in (dense_matrix, linear_operator):
        with pytest.raises(ValueError, match="sample: "):
            make(case.system, case.x, sample=2)
