"""Names and ownership of parameters: once each, and tied through copies and state dicts."""

import copy

import pytest
import torch

from etdyn import EnergyTransformer, Hopfield, LayerNorm, System
from etdyn.problems import LinearEnergy

NAMES = {
    "attention.query": (2, 4, 8),
    "attention.key": (2, 4, 8),
    "hopfield.memories": (12, 8),
    "lagrangian.raw_gamma": (),
    "lagrangian.delta": (8,),
}


@pytest.fixture
def system():
    torch.manual_seed(0)
    return EnergyTransformer(8, 2, 4, 12).double()


@pytest.fixture
def x():
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def test_parameters_are_named_once(system):
    named = list(system.named_parameters(remove_duplicate=False))
    assert {name: tuple(p.shape) for name, p in named} == NAMES
    assert len(named) == len(NAMES)
    assert system.state_dict().keys() == NAMES.keys()
    assert sum(p.numel() for p in system.parameters()) == 2 * 2 * 4 * 8 + 12 * 8 + 1 + 8


def test_parameters_after_masking_are_named_as_before(system):
    view = system.masked(tokens=torch.ones(1, 5, dtype=torch.bool)).with_dynamics("leaky")
    assert [name for name, _ in view.named_parameters(remove_duplicate=False)] == [
        name for name, _ in system.named_parameters()
    ]


def test_sum_and_terms_share_parameters(system):
    terms = system.interaction.terms()
    assert terms["attention"] is system.attention
    assert terms["hopfield"] is system.hopfield


def scramble(system):
    with torch.no_grad():
        for parameter in system.parameters():
            parameter.copy_(torch.randn_like(parameter))


def check_tied(system, x):
    """What the named parts hold is what the energy uses."""
    scramble(system)
    parts = system.energies(x)
    assert torch.allclose(sum(parts.values()), system.interaction_energy(x), rtol=1e-14, atol=0)
    g = system.activation(x)
    assert torch.equal(system.attention.energy(g), parts["attention"])
    assert torch.equal(system.hopfield.energy(g), parts["hopfield"])
    assert torch.equal(system.interaction.terms()["hopfield"].energy(g), parts["hopfield"])


def test_deepcopy_keeps_the_sum_and_the_terms_tied(system, x):
    before = system.energy(x)
    twin = copy.deepcopy(system)
    assert torch.equal(twin.energy(x), before)
    check_tied(twin, x)
    assert torch.equal(system.energy(x), before), "the copy has its own parameters"
    check_tied(system, x)


def test_state_dict_round_trip_keeps_the_sum_and_the_terms_tied(system, x):
    other = EnergyTransformer(**system.config).double()
    assert not torch.equal(other.energy(x), system.energy(x))
    other.load_state_dict(system.state_dict())
    assert torch.equal(other.energy(x), system.energy(x))
    check_tied(other, x)


def test_changes_of_dtype_keep_the_sum_and_the_terms_tied(system, x):
    system.float()
    check_tied(system, x.float())
    assert system.interaction_energy(x.float()).dtype == torch.float32
    with pytest.raises(TypeError, match="dtype"):
        system.energy(x)
    system.double()
    check_tied(system, x)


def test_config_rebuilds_the_system(x):
    torch.manual_seed(0)
    arguments = {"dynamics": "leaky", "self_attention": True, "hopfield": "softmax", "power": 4,
                 "beta": 0.7, "hopfield_beta": 0.3, "eps": 1e-3}  # fmt: skip
    system = EnergyTransformer(8, 2, 4, 12, **arguments).double()
    assert {**arguments, "dim": 8, "heads": 2, "head_dim": 4, "memories": 12} == system.config
    other = EnergyTransformer(**system.config).double()
    other.load_state_dict(system.state_dict())
    assert torch.equal(other.energy(x), system.energy(x))
    assert torch.equal(other.velocity(0, x), system.velocity(0, x))


def test_names_of_parts_must_be_free():
    class Force(LinearEnergy):
        name = "force"

    with pytest.raises(ValueError, match="interaction"):
        System(LayerNorm(4), Force(torch.zeros(1, 4)))


def test_sum_keeps_its_terms_in_order():
    total = LinearEnergy(torch.zeros(1, 4)) + Hopfield(4, 2)
    system = System(LayerNorm(4), total)
    assert list(system.energies(torch.randn(1, 3, 4))) == ["linear", "hopfield"]
    assert [name for name, _ in system.named_parameters()] == [
        "lagrangian.raw_gamma", "lagrangian.delta", "linear.v", "hopfield.memories",
    ]  # fmt: skip


def test_gamma_is_stored_to_rounding():
    for gamma in (1e-6, 0.1, 1.0, 30.0, 1e4):
        lagrangian = LayerNorm(4).double()
        lagrangian.set_gamma(gamma)
        assert lagrangian.gamma.item() == pytest.approx(gamma, rel=1e-14)
