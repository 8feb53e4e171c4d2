"""Energies by their formulas, forces and Hessians against autograd (ET-F1, ET-F10)."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd.functional import hvp as autograd_hvp

from etdyn import Attention, Hopfield

DATA = st.data()
MASKS = st.sampled_from(["none", "tokens", "keys", "both", "empty rows"])
HOPFIELDS = [("relu", 3), ("power", 2), ("power", 3), ("power", 5), ("softmax", 3)]


def draw_masks(case, data):
    batch, tokens, _ = case.x.shape
    kind = data.draw(MASKS, label="masks")
    present = case.token_mask() if kind in ("tokens", "both") else None
    keys = case.mask(batch, tokens, tokens) if kind in ("keys", "both", "empty rows") else None
    if kind == "empty rows":
        keys[:, 0] = False
    return present, keys


def check_force_and_hvp(case, energy, close):
    g = case.system.activation(case.x)
    u = case.randn(*g.shape)
    value, pulled = autograd_hvp(lambda g: energy.energy(g).sum(), g, u)
    with torch.enable_grad():
        leaf = g.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(energy.energy(leaf).sum(), leaf)
    close(energy.energy(g).sum(), value)
    close(energy.force(g), -gradient)
    close(energy.hvp(g, u), pulled, scale=hvp_scale(energy, u))
    together, force = energy.energy_and_force(g)
    close(together, energy.energy(g), 1e-14)
    close(force, energy.force(g), 1e-14)
    assert together.shape == (len(g),)


def hvp_scale(energy, u):
    """What cancels in the Hessian of a softmax memory that has made its choice."""
    network = energy.terms().get("hopfield")
    if network is None or network.kind != "softmax":
        return 0.0
    return network.beta * torch.linalg.matrix_norm(network.memories, 2) ** 2 * u.abs().max()


@pytest.mark.parametrize("self_attention", [False, True])
@given(data=DATA)
def test_et_f1_f10_attention_equals_autograd(make_case, close, self_attention, data):
    case = make_case(data, self_attention=self_attention)
    check_force_and_hvp(case, case.system.attention.masked(*draw_masks(case, data)), close)


@pytest.mark.parametrize("self_attention", [False, True])
@given(data=DATA)
def test_et_f1_f10_single_token_equals_autograd(make_case, close, self_attention, data):
    case = make_case(data, tokens=1, self_attention=self_attention)
    attention = case.system.attention
    check_force_and_hvp(case, attention.masked(*draw_masks(case, data)), close)
    if not self_attention:
        g = case.system.activation(case.x)
        assert (attention.energy(g) == 0).all(), "an empty sum contributes nothing"
        assert (attention.energy(g, relative=True) == 0).all()
        assert (attention.force(g) == 0).all()


@pytest.mark.parametrize(("kind", "power"), HOPFIELDS)
@given(data=DATA)
def test_et_f1_f10_hopfield_equals_autograd(make_case, close, kind, power, data):
    case = make_case(data, hopfield=kind, power=power)
    check_force_and_hvp(case, case.system.hopfield.masked(*draw_masks(case, data)), close)


@given(data=DATA)
def test_et_f1_f10_sum_equals_autograd(make_case, close, data):
    case = make_case(data)
    energy = case.system.interaction.masked(*draw_masks(case, data))
    check_force_and_hvp(case, energy, close)
    g = case.system.activation(case.x)
    u = case.randn(*g.shape)
    terms = energy.terms().values()
    close(energy.energy(g), sum(term.energy(g) for term in terms), 1e-14)
    close(energy.force(g), sum(term.force(g) for term in terms), 1e-14)
    close(energy.hvp(g, u), sum(term.hvp(g, u) for term in terms), 1e-14)


@given(data=DATA)
def test_force_is_differentiable_as_the_hessian(make_case, close, data):
    """Training differentiates the closed-form force: its derivative is -H u, relu's kinks apart."""
    case = make_case(data)
    energy = case.system.interaction.masked(*draw_masks(case, data))
    g = case.system.activation(case.x)
    u = case.randn(*g.shape)
    moved = torch.func.jvp(energy.force, (g,), (u,))[1]
    close(moved, -energy.hvp(g, u), scale=hvp_scale(energy, u))


@given(data=DATA)
def test_relative_energy_has_the_same_force(make_case, close, data):
    case = make_case(data)
    energy = case.system.interaction.masked(*draw_masks(case, data))
    g = case.system.activation(case.x).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(energy.energy(g, relative=True).sum(), g)
    close(energy.force(g), -gradient)


@given(data=DATA)
def test_attention_energy_is_its_formula(make_case, close, data):
    """-(1/beta) sum_h sum_c log sum_b exp(beta <K_hb, Q_hc>), pair by pair."""
    case = make_case(data, batch=2)
    attention = case.system.attention.requires_grad_(False)
    g = case.system.activation(case.x).detach()
    present, keys = draw_masks(case, data)
    tokens = range(g.shape[1])
    for sample, mine in enumerate(attention.masked(present, keys).energy(g)):
        total = 0.0
        for query_weight, key_weight in zip(attention.query, attention.key, strict=True):
            for c in tokens:
                boltzmann = [
                    math.exp(attention.beta * ((key_weight @ b) @ (query_weight @ g[sample, c])))
                    for index, b in enumerate(g[sample])
                    if (attention.self_attention or index != c)
                    and (keys is None or keys[sample, c, index])
                    and (present is None or (present[sample, c] and present[sample, index]))
                ]  # fmt: skip
                total -= math.log(sum(boltzmann)) / attention.beta if boltzmann else 0.0
        close(mine, total, 1e-13, scale=attention.query.shape[0] * len(tokens))


@given(data=DATA)
def test_hopfield_energy_is_its_formula(make_case, close, data):
    case = make_case(data)
    network = case.system.hopfield.requires_grad_(False)
    g = case.system.activation(case.x).detach()
    present = case.token_mask()
    for sample, mine in enumerate(network.masked(tokens=present).energy(g)):
        total = 0.0
        for h in (network.memories @ g[sample].T).T[present[sample]]:
            if network.kind == "softmax":
                total -= math.log(sum(math.exp(network.beta * v) for v in h)) / network.beta
            else:
                n = 2 if network.kind == "relu" else network.power
                total -= sum(max(float(v), 0.0) ** n for v in h) / n
        close(mine, total, 1e-13, scale=1)


@pytest.mark.parametrize("kind", ["attention", "hopfield"])
@pytest.mark.parametrize("size", [1e4, 1e8])
def test_saturated_softmax_stays_finite(make_case, close, kind, size):
    """Scores far beyond the range of exp: the largest takes all, every row less log of its keys."""
    case = make_case(hopfield="softmax")
    g = size * case.x
    energy, rows, keys = {
        "attention": (case.system.attention, 2 * 5, 4),
        "hopfield": (case.system.hopfield, 5, 12),
    }[kind]
    scores = attention_scores(energy, g) if kind == "attention" else g @ energy.memories.T
    best = scores.amax(-1).flatten(1).sum(1)
    close(energy.energy(g), -best)
    close(energy.energy(g, relative=True), rows * math.log(keys) / energy.beta - best)
    assert torch.isfinite(energy.force(g)).all()
    assert torch.isfinite(energy.hvp(g, case.randn(*g.shape))).all()


def attention_scores(attention, g):
    """A without the diagonal, `(batch, head, query, key)`."""
    keys = torch.einsum("hyd,nbd->nhby", attention.key, g)
    queries = torch.einsum("hyd,ncd->nhcy", attention.query, g)
    scores = torch.einsum("nhcy,nhby->nhcb", queries, keys)
    return scores.masked_fill(torch.eye(g.shape[1], dtype=torch.bool), -math.inf)


def test_zero_power_hessian_at_the_kink():
    """relu'(0) = 0: a memory at exactly zero overlap bends nothing."""
    for kind, power in (("relu", 2), ("power", 2), ("power", 3)):
        network = Hopfield(4, 3, kind, power).double()
        zero = torch.zeros(1, 2, 4, dtype=torch.float64)
        assert (network.hvp(zero, torch.ones_like(zero)) == 0).all()
        assert (network.force(zero) == 0).all()


def test_energies_refuse_wrong_arguments():
    for arguments, name in (
        ((0, 1, 1), "dim"), ((4, 0, 1), "heads"), ((4, 1, 0), "head_dim"), ((4, 1, 1, 0.0), "beta"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            Attention(*arguments)
    with pytest.raises(ValueError, match="hopfield"):
        Hopfield(4, 3, "gelu")
    with pytest.raises(ValueError, match="power"):
        Hopfield(4, 3, "power", 1)
    with pytest.raises(ValueError, match="attention"):
        Attention(4, 1, 1) + Attention(4, 1, 1)
