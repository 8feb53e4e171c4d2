"""Finite steps: what a discrete descent keeps of the flow (ET-F19, F20, F24, F28)."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etdyn import Attention, EnergyTransformer, LayerNorm, System, descend

DATA = st.data()
STEPS = [10.0**k for k in range(-3, 7)]
HOPFIELDS = [("relu", 3), ("power", 2), ("power", 3), ("power", 5), ("softmax", 3)]


def rises(system, states):
    """How often the energy rises by more than rounding, 1e-12 |E|, between states."""
    energy = torch.stack([system.energy(x) for x in states])
    return int((energy[1:] - energy[:-1] > 1e-12 * energy[:-1].abs()).sum())


@pytest.mark.parametrize(("kind", "power"), HOPFIELDS)
@given(data=DATA)
def test_et_f19_memories_alone_never_raise_the_energy(make_case, kind, power, data):
    """E is concave and the Lagrangian convex: one Euler step of any size lowers E."""
    case = make_case(data, hopfield=kind, power=power)
    system = System(case.system.lagrangian, case.system.hopfield)
    for step in STEPS:
        assert rises(system, descend(system, case.x, step, 4).x) == 0, step


def repulsive(step_of_beta=1e-3):
    """Tokens that repel each other, near consensus: ET-F24's recipe for a rise."""
    dim, tokens = 12, 8
    attention = Attention(dim, 1, dim, beta=step_of_beta).double()
    with torch.no_grad():
        attention.query.copy_(torch.eye(dim))
        attention.key.copy_(-torch.eye(dim))
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(1, 1, dim, generator=generator, dtype=torch.float64)
    noise = torch.randn(1, tokens, dim, generator=generator, dtype=torch.float64)
    system = System(LayerNorm(dim).double(), attention)
    start = system.lagrangian.normalise(direction + 1e-3 * noise)
    return system, 0.1 * start


def test_et_f24_repelling_tokens_rise_at_a_large_step_only():
    """So the tests of descent at finite steps can fail; the flow itself still descends."""
    system, start = repulsive()
    assert rises(system, descend(system, start, 1e-3, 400).x) == 0
    assert rises(system, descend(system, start, 1.0, 40).x) > 0


@given(data=DATA)
def test_et_f20_steps_within_the_descent_lemma_never_raise_the_energy(make_case, data):
    """alpha <= 2 sigma_min / (gamma h_+) with h_+ <= 2 sum_h |S_h| sqrt(N) (ET-F21)."""
    case = make_case(data, tokens=data.draw(st.integers(2, 6)))
    system, attention = case.system, case.system.attention
    keys = case.x.shape[1] - (not attention.self_attention)
    s = torch.linalg.matrix_norm(attention.key.mT @ attention.query, 2).sum()
    x, gamma = case.x, float(system.lagrangian.gamma)
    for _ in range(5):
        step = (
            2 * float(system.lagrangian.sigma(x).min()) / (gamma * 2 * float(s) * math.sqrt(keys))
        )
        # sigma_min is that of the whole segment; shrink until the end of the step has it too
        for _ in range(60):
            after = descend(system, x, step, 1).x[-1]
            segment = torch.stack([torch.lerp(x, after, w) for w in torch.linspace(0, 1, 33)])
            least = float(system.lagrangian.sigma(segment).min())
            if step <= 0.99 * least / (gamma * float(s) * math.sqrt(keys)):
                break
            step *= 0.7
        assert rises(system, torch.stack([x, after])) == 0
        x = after


@given(data=DATA)
def test_et_f28_euler_is_a_harmonically_damped_map(make_case, close, data):
    """z_k = x_k / c_k with c_k = c_0 + k alpha: z <- (1 - eta) z + eta F(z), eta = alpha / c."""
    case = make_case(data, eps=0.0)
    step, begin, x = 0.1, 2.0, case.x
    states = descend(case.system, x, step, 12).x
    z = x / begin
    for k, state in enumerate(states[1:], 1):
        c = begin + k * step
        z = case.system.map(z, damping=step / c)
        close(c * z, state)


def test_leaky_euler_with_step_one_is_the_map(make_case, close):
    system = make_case(dynamics="leaky").system
    x = make_case().x
    states = descend(system, x, 1.0, 5).x
    for before, after in pairwise(states):
        close(after, system.map(before), 1e-14)
        close(after, system.force(before), 1e-14)


@pytest.mark.parametrize("law", ["et", "leaky", "sphere"])
def test_noise_has_the_published_size(law):
    """x <- x + step v + sqrt(step) noise N(0, 1), from the generator that was passed."""
    torch.manual_seed(0)
    system = EnergyTransformer(8, 2, 4, 12, law).double()
    x0 = torch.randn(300, 5, 8, dtype=torch.float64)
    step, noise = 0.25, 0.1

    def run(seed, noise):
        generator = torch.Generator().manual_seed(seed)
        return descend(system, x0, step, 1, noise=noise, generator=generator).x[-1].detach()

    assert torch.equal(run(1, noise), run(1, noise))
    assert not torch.equal(run(1, noise), run(2, noise))
    if law != "sphere":  # whose states are renormalised
        kick = run(1, noise) - run(1, 0.0)
        assert float(kick.std()) == pytest.approx(math.sqrt(step) * noise, rel=0.03)
        assert abs(float(kick.mean())) < 4 * math.sqrt(step) * noise / math.sqrt(kick.numel())
