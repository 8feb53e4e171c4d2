"""The layer norm as the gradient of a convex Lagrangian (ET-F2, ET-F3)."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.functional import hessian

from etdyn import LayerNorm, descend

DATA = st.data()
MACHINE = torch.finfo(torch.float64).eps


def hessians(lagrangian, x):
    """The Hessian of L by autograd, one matrix a token, `(batch * token, dim, dim)`."""
    tokens = x.flatten(0, 1)
    return torch.stack([hessian(lambda v: lagrangian.value(v[None]).sum(), v) for v in tokens])


@given(data=DATA)
def test_et_f2_activation_is_the_gradient_of_the_lagrangian(make_case, close, data):
    case = make_case(data)
    x = case.x.requires_grad_()
    (gradient,) = torch.autograd.grad(case.system.lagrangian.value(x).sum(), x)
    close(case.system.activation(x), gradient)


@given(data=DATA)
def test_et_f2_metric_is_the_hessian_of_the_lagrangian(make_case, close, data):
    case = make_case(data)
    lagrangian, x = case.system.lagrangian, case.x
    v = case.randn(*x.shape)
    moved = torch.func.jvp(lagrangian.activation, (x,), (v,))[1]
    close(lagrangian.metric(x, v), moved)
    dense = (hessians(lagrangian, x) @ v.flatten(0, 1).unsqueeze(-1)).reshape(x.shape)
    close(lagrangian.metric(x, v), dense)


@given(data=DATA)
def test_et_f2_spectrum_of_the_metric(make_case, close, data):
    """{0, gamma eps / sigma^3, gamma / sigma x (D - 2)}."""
    case = make_case(data)
    lagrangian, x = case.system.lagrangian, case.x
    y = x - x.mean(-1, keepdim=True)
    sigma = (y.square().mean(-1) + lagrangian.eps).sqrt().flatten()
    gamma, dim = lagrangian.gamma, lagrangian.dim
    stiff = (gamma / sigma)[:, None].expand(-1, dim - 2)
    soft = (gamma * lagrangian.eps / sigma**3)[:, None]
    expected = torch.cat([torch.zeros_like(soft), soft, stiff], 1)
    close(case.system.clock_rate(x).flatten(), gamma / sigma, 1e-14)
    found = torch.linalg.eigvalsh(hessians(lagrangian, x))
    for mine, exact in zip(found, expected, strict=True):  # eps / sigma^2 < 1: already sorted
        close(mine, exact, 1e-13)
    unit = torch.eye(dim, dtype=torch.float64)
    columns = [lagrangian.metric(x, e.expand_as(x)) for e in unit]
    built = torch.linalg.eigvalsh(torch.stack(columns, -1).flatten(0, 1))
    for mine, exact in zip(built, expected, strict=True):
        close(mine, exact, 1e-13)


@given(data=DATA)
def test_et_f2_legendre_energy_is_x_g_minus_lagrangian(make_case, close, data):
    case = make_case(data)
    lagrangian, x = case.system.lagrangian, case.x
    g = lagrangian.activation(x)
    subtracted = (x * g).sum(-1) - lagrangian.value(x)
    close(lagrangian.legendre(x), subtracted, 1e-14, scale=(x * g).abs().sum(-1))


@given(data=DATA)
def test_et_f2_dual_is_attained_at_the_state(make_case, data):
    """L*(g(x)) = x.g - L(x), as well as the distance of g from the sphere can be known."""
    case = make_case(data)
    lagrangian, x = case.system.lagrangian, case.x
    exact = lagrangian.legendre(x)
    radius2 = lagrangian.gamma**2 * lagrangian.dim
    # L* = -sqrt(D eps gap): rounding of size u R^2 in the gap = R^2 eps / sigma^2
    gap = radius2 * lagrangian.eps / lagrangian.sigma(x) ** 2
    rounding = 4 * lagrangian.dim * MACHINE * radius2
    slack = exact.abs() * (1 - (1 - rounding / gap).clamp(min=0).sqrt())
    dual = lagrangian.dual(lagrangian.activation(x))
    assert ((dual - exact).abs() <= slack + 1e-13 * exact.abs()).all()


@given(data=DATA)
def test_et_f2_dual_bounds_every_other_state(make_case, data):
    """Fenchel-Young: x.g - L(x) <= L*(g) for every x and every g in the domain."""
    case = make_case(data, eps=1.0)
    lagrangian, x = case.system.lagrangian, case.x
    inside = lagrangian.activation(case.randn(*x.shape))
    dual = lagrangian.dual(inside)
    assert torch.isfinite(dual).all()
    for scale in (0.1, 1.0, 10.0):
        other = scale * case.randn(*x.shape)
        value = (other * inside).sum(-1) - lagrangian.value(other)
        assert (value <= dual + 1e-13 * lagrangian.value(other).abs()).all()


@given(data=DATA)
def test_et_f2_dual_is_infinite_off_its_domain(make_case, data):
    case = make_case(data)
    lagrangian = case.system.lagrangian
    u = case.randn(*case.x.shape)
    u = u - u.mean(-1, keepdim=True)
    u = u / u.norm(dim=-1, keepdim=True) * lagrangian.gamma * lagrangian.dim**0.5
    assert torch.isfinite(lagrangian.dual(lagrangian.delta + 0.999999 * u)).all()
    assert (lagrangian.dual(lagrangian.delta + 1.000001 * u) == torch.inf).all(), "beyond R"
    tilted = lagrangian.delta + 0.5 * u + 1e-6 * lagrangian.gamma
    assert (lagrangian.dual(tilted) == torch.inf).all(), "off the hyperplane"


def test_et_f2_gamma_and_eps_out_of_range_raise():
    for gamma in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="gamma"):
            LayerNorm(4, gamma=gamma)
    with pytest.raises(ValueError, match="eps"):
        LayerNorm(4, eps=-1e-5)


@given(data=DATA)
def test_et_f3_shifting_a_token_changes_nothing(make_case, data):
    case = make_case(data)
    system, x = case.system, case.x
    shift = 3 * case.randn(*x.shape[:2], 1)
    sigma = system.lagrangian.sigma(x).min()
    lost = 8 * MACHINE * system.lagrangian.gamma * (x.abs().max() + shift.abs().max()) / sigma
    assert (system.activation(x + shift) - system.activation(x)).abs().max() <= lost


@given(data=DATA)
def test_et_f3_scaling_a_token_scales_eps(make_case, close, data):
    case = make_case(data)
    lagrangian, x = case.system.lagrangian, case.x
    for s in (1e-3, 0.5, 1e4):
        other = LayerNorm(lagrangian.dim, lagrangian.eps / s**2).double()
        other.load_state_dict(lagrangian.state_dict())
        close(lagrangian.activation(s * x), other.activation(x), 1e-13)


@given(data=DATA)
def test_et_f3_flow_commutes_with_shifts(make_case, close, data):
    """x0 + c_A 1 moves as x0 does, shifted; the mean is a passive read-out."""
    case = make_case(data, spread=1.0, weights=0.5)
    shift = case.randn(*case.x.shape[:2], 1)
    plain = descend(case.system, case.x, 0.1, 8).x
    shifted = descend(case.system, case.x + shift, 0.1, 8).x
    close(shifted, plain + shift, 1e-12)


@given(data=DATA)
def test_sphere_activation_lies_on_the_sphere_and_moves_with_the_tangent_force(
    make_case, close, data
):
    """|g - delta| = gamma sqrt(D) whatever the scale of x, without eps; dg/dtau = P force."""
    case = make_case(data, dynamics="sphere")
    system, lagrangian, x = case.system, case.system.lagrangian, case.x
    exact = LayerNorm(system.dim, eps=0.0).double()
    exact.load_state_dict(lagrangian.state_dict())
    g = system.activation(x)
    close(g, exact.activation(x), 1e-13)
    radius = (g - lagrangian.delta).norm(dim=-1)
    close(radius, (lagrangian.gamma * lagrangian.dim**0.5).expand_as(radius), 1e-13)
    close(system.activation(7.0 * x + 3.0), g, 1e-12)
    start = system.prepare(x)
    rounding = x.abs().amax(-1) / x.std(-1)  # of the mean that was taken off
    close(start.mean(-1), torch.zeros_like(radius), 1e-15, scale=4 * rounding)
    close(start.square().mean(-1), torch.ones_like(radius), 1e-14)
    moved = torch.func.jvp(system.activation, (x,), (system.velocity(0.0, x),))[1]
    force = system.force(x)
    close(moved, lagrangian.tangent(x, force), 1e-12, scale=force)
