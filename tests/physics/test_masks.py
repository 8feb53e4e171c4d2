"""Absent tokens: a padded sample is the sample; masked systems are views."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etdyn import descend, solve

DATA = st.data()
LAWS = ["et", "leaky", "sphere"]
FILLERS = st.sampled_from(["random", "zero", "huge", "constant"])


def pad(case, data):
    """The case's samples among absent tokens, and the mask that says which is which."""
    batch, tokens, dim = case.x.shape
    extra = data.draw(st.integers(1, 3), label="absent tokens")
    padded = {
        "random": case.randn(batch, tokens + extra, dim),
        "zero": torch.zeros(batch, tokens + extra, dim, dtype=torch.float64),
        "huge": 1e8 * case.randn(batch, tokens + extra, dim),
        "constant": torch.full((batch, tokens + extra, dim), 0.3, dtype=torch.float64),
    }[data.draw(FILLERS, label="filler")]
    present = torch.zeros(batch, tokens + extra, dtype=torch.bool)
    for sample in range(batch):  # another place in every sample
        present[sample, torch.randperm(tokens + extra, generator=case.rng)[:tokens]] = True
    padded[present] = case.x.flatten(0, 1)
    return padded, present


def kept(padded, present, like):
    return padded[present].reshape(like.shape)


@pytest.mark.parametrize("law", LAWS)
@given(data=DATA)
def test_absent_tokens_change_no_verb(make_case, close, law, data):
    case = make_case(data, dynamics=law)
    system, x, n = case.system, case.x, case.x.shape[1]
    padded, present = pad(case, data)
    masked = system.masked(tokens=present)
    force = system.force(x).flatten(1).norm(dim=1)
    for name, term in system.energies(x).items():
        close(masked.energies(padded)[name], term, scale=n)
        relative = system.energies(x, relative=True)[name]
        close(masked.energies(padded, relative=True)[name], relative, scale=n)
    close(masked.energy(padded), system.energy(x), scale=n)
    close(masked.interaction_energy(padded), system.interaction_energy(x), scale=n)
    close(masked.residual(padded), system.residual(x), scale=force)
    rate = force.square() * (1 + system.clock_rate(x).amax(1))
    close(masked.dissipation(padded), system.dissipation(x), scale=rate)
    velocity = masked.velocity(0.0, padded)
    close(kept(velocity, present, x), system.velocity(0.0, x), scale=force)
    assert (velocity[~present] == 0).all(), "absent tokens stay where they are"
    mapped = masked.map(padded, 0.7)
    close(kept(mapped, present, x), system.map(x, 0.7))
    assert torch.equal(mapped[~present], padded[~present]), "absent tokens stay where they are"
    for name, term in system.forces(x).items():
        close(kept(masked.forces(padded)[name], present, x), term)
        assert (masked.forces(padded)[name][~present] == 0).all()


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=10)
@given(data=DATA)
def test_absent_tokens_change_no_trajectory(make_case, close, law, data):
    case = make_case(data, dynamics=law, spread=1.0, weights=0.5)
    system, x = case.system, case.x
    padded, present = pad(case, data)
    masked = system.masked(tokens=present)
    for move in (
        lambda s, x: descend(s, x, 0.1, 8).x,
        lambda s, x: solve(s, x, [0.0, 0.2, 0.4], "rk4", step=0.1, gradient=None).x,
    ):
        plain, all_tokens = move(system, x), move(masked, padded)
        for k, state in enumerate(all_tokens):
            close(kept(state, present, x), plain[k])
            assert torch.equal(state[~present], padded[~present]), "absent tokens stay put"


@pytest.mark.parametrize("law", LAWS)
def test_gradients_pass_absent_tokens(make_case, close, law):
    """Zero padding must not turn gradients into NaN."""
    case = make_case(dynamics=law)
    case.system.requires_grad_(True)
    present = torch.tensor([[True, True, False, True, False]]).expand(2, -1)
    x = case.x.masked_fill(~present[..., None], 0.0).requires_grad_()
    masked = case.system.masked(tokens=present)
    for value in (masked.energy(x), masked.velocity(0.0, x), descend(masked, x, 0.1, 3).x[-1]):
        leaves = [x, case.system.attention.query, case.system.hopfield.memories]
        weight = case.randn(*value.shape)
        if value.ndim == 3:
            weight = weight * present[..., None]
        for gradient in torch.autograd.grad((value * weight).sum(), leaves):
            assert torch.isfinite(gradient).all()
            assert gradient.abs().max() > 0


@given(data=DATA)
def test_token_mask_is_a_key_mask_without_the_absent_memories(make_case, close, data):
    case = make_case(data)
    attention, g = case.system.attention, case.system.activation(case.x)
    present = case.token_mask()
    pairs = present[:, :, None] & present[:, None, :]
    close(attention.masked(tokens=present).energy(g), attention.masked(keys=pairs).energy(g), 0)
    close(attention.masked(tokens=present).force(g), attention.masked(keys=pairs).force(g), 0)
    everything = torch.ones_like(pairs)
    close(attention.masked(keys=everything).energy(g), attention.energy(g), 1e-15, scale=1)
    close(attention.masked(keys=everything).force(g), attention.force(g), 1e-15)


def test_masks_do_not_leak_into_the_original(make_case):
    case = make_case()
    before = case.system.energy(case.x)
    present = torch.tensor([[True, False, True, True, False]])
    masked = case.system.masked(tokens=present)
    assert not torch.equal(masked.energy(case.x), before)
    assert torch.equal(case.system.energy(case.x), before)
    assert torch.equal(masked.masked().energy(case.x), masked.energy(case.x))


def test_a_second_mask_takes_out_more(make_case, close):
    case = make_case()
    first = torch.tensor([[True, False, True, True, True]])
    second = torch.tensor([[True, True, True, False, True]])
    pairs = case.mask(1, 5, 5)
    twice = case.system.masked(tokens=first).masked(tokens=second, keys=pairs)
    once = case.system.masked(tokens=first & second, keys=pairs)
    close(twice.energy(case.x), once.energy(case.x), 1e-14)
    assert twice.masks == {"tokens": 2, "keys": int((~pairs).sum())}
    assert case.system.masks is None


@pytest.mark.parametrize("self_attention", [True, False])
def test_masks_that_do_not_fit_the_state_are_refused(make_case, self_attention):
    case = make_case(self_attention=self_attention)  # batch 2, 5 tokens
    for masked in (
        case.system.masked(keys=torch.ones(1, 10, 10, dtype=torch.bool)),
        case.system.masked(keys=torch.ones(2, 5, 1, dtype=torch.bool)),
        case.system.masked(tokens=torch.ones(2, 1, dtype=torch.bool)),
        case.system.masked(tokens=torch.ones(3, 5, dtype=torch.bool)),
    ):
        for verb in (masked.force, masked.energy, lambda x, m=masked: descend(m, x)):
            with pytest.raises(ValueError, match="expected a state that fits the mask of shape"):
                verb(case.x)


def test_absent_tokens_neither_move_by_noise_nor_count_in_the_clock(make_case, close):
    case = make_case(batch=1)
    padded = torch.cat([case.x, torch.zeros(1, 1, 8, dtype=torch.float64)], 1)
    present = torch.tensor([[True] * 5 + [False]])
    masked = case.system.masked(tokens=present)
    noisy = descend(masked, padded, noise=0.1, generator=torch.Generator().manual_seed(0))
    assert torch.equal(noisy.x[:, :, 5], torch.zeros(13, 1, 8, dtype=torch.float64))
    assert float((noisy.x[-1, 0, :5] - descend(masked, padded).x[-1, 0, :5]).norm()) > 0
    clocks = [
        torch.from_numpy(descend(s, x).to_xarray()["clock"].to_numpy())
        for s, x in ((masked, padded), (case.system, case.x))
    ]
    close(*clocks, 1e-12)


def test_views_share_parameters(make_case):
    case = make_case()
    system = case.system
    mine = dict(system.named_parameters())
    views = [
        system.with_dynamics("leaky"),
        system.masked(tokens=torch.tensor([[True, True, True, False, True]])),
        system.with_dynamics("leaky").masked(keys=torch.ones(1, 5, 5, dtype=torch.bool)),
        system.masked(tokens=torch.ones(1, 5, dtype=torch.bool)).with_dynamics("sphere"),
    ]
    before = [view.interaction_energy(case.x) for view in views]
    for view in views:
        theirs = dict(view.named_parameters())
        assert theirs.keys() == mine.keys()
        assert all(theirs[name] is mine[name] for name in mine)
    assert system.dynamics == "et"
    with torch.no_grad():
        system.hopfield.memories.mul_(2)
    for view, old in zip(views, before, strict=True):
        assert (view.interaction_energy(case.x) < old).all()


def test_masked_keeps_its_dynamics_and_with_dynamics_its_masks(make_case, close):
    case = make_case()
    present = torch.tensor([[True, True, True, False, True]])
    one = case.system.masked(tokens=present).with_dynamics("leaky")
    other = case.system.with_dynamics("leaky").masked(tokens=present)
    close(one.velocity(0, case.x), other.velocity(0, case.x), 0)
    close(one.energy(case.x), other.energy(case.x), 0)
    assert (one.velocity(0, case.x)[:, 3] == 0).all()


def test_wrong_masks_raise(make_case):
    system = make_case().system
    with pytest.raises(TypeError, match="tokens"):
        system.masked(tokens=torch.ones(1, 5))
    with pytest.raises(ValueError, match="tokens"):
        system.masked(tokens=torch.ones(5, dtype=torch.bool))
    with pytest.raises(ValueError, match="keys"):
        system.masked(keys=torch.ones(5, 5, dtype=torch.bool))
    with pytest.raises(ValueError, match="at least one token"):
        system.masked(tokens=torch.tensor([[True, False], [False, False]]))
