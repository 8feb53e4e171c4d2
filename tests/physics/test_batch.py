"""A sample's results do not depend on its neighbours: rule 1 of the design."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etdyn import Method, descend, solve

DATA = st.data()
LAWS = ["et", "leaky", "sphere"]
VERBS = {
    "activation": lambda s, x: s.activation(x),
    "force": lambda s, x: s.force(x),
    "velocity": lambda s, x: s.velocity(0.0, x),
    "energy": lambda s, x: s.energy(x),
    "interaction_energy": lambda s, x: s.interaction_energy(x),
    "relative energy": lambda s, x: s.interaction_energy(x, relative=True),
    "dissipation": lambda s, x: s.dissipation(x),
    "residual": lambda s, x: s.residual(x),
    "clock_rate": lambda s, x: s.clock_rate(x),
    "map": lambda s, x: s.map(x, 0.7),
    "hvp": lambda s, x: s.interaction.hvp(s.activation(x), x),
}


def terms(system, x):
    """Energies and forces by their names."""
    energies = {f"energy of {name}": value for name, value in system.energies(x).items()}
    return energies | {f"force of {name}": value for name, value in system.forces(x).items()}


def uneven(case):
    """The sample of the case, and neighbours that are far larger, smaller and near constant."""
    shape = case.x.shape[1:]
    near = 1 + 1e-3 * case.randn(1, *shape)
    return torch.cat([case.x[:1], 1e3 * case.randn(1, *shape), 1e-2 * case.randn(1, *shape), near])


def sizes(system, x):
    """What may cancel in a verb: forces and their squares, energies of every token."""
    force = system.force(x).flatten(1).norm(dim=1)
    speed = system.velocity(0.0, x).flatten(1).norm(dim=1).maximum(force)
    named = {f"energy of {name}": x.shape[1] for name in ("attention", "hopfield", "lagrangian")}
    return named | {
        "velocity": force, "energy": x.shape[1], "interaction_energy": x.shape[1],
        "relative energy": x.shape[1], "residual": force,
        "dissipation": speed.square() * (1 + system.clock_rate(x).amax(1)),
    }  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=8)
@given(data=DATA)
def test_verbs_do_not_see_the_neighbours(make_case, close, law, data):
    case = make_case(data, dynamics=law, batch=1)
    x, system = uneven(case), case.system
    together = {name: verb(system, x) for name, verb in VERBS.items()} | terms(system, x)
    for i in range(len(x)):
        one = x[i : i + 1]
        scale = sizes(system, one)
        alone = {name: verb(system, one) for name, verb in VERBS.items()} | terms(system, one)
        for name, value in alone.items():
            close(together[name][i : i + 1], value, 1e-12, scale=scale.get(name, 0.0))


@pytest.mark.parametrize("law", LAWS)
@settings(max_examples=4)
@given(data=DATA)
def test_steps_do_not_see_the_neighbours(make_case, close, law, data):
    """The discrete model and fixed-step solves."""
    case = make_case(data, dynamics=law, batch=1, spread=1.0, weights=0.5)
    x = uneven(case)
    together = descend(case.system, x, 0.1, 10).x
    flow = solve(case.system, x, [0.0, 0.3, 0.5], "rk4", step=0.05, gradient=None).x
    for i in range(len(x)):
        one = x[i : i + 1]
        close(together[:, i : i + 1], descend(case.system, one, 0.1, 10).x, 1e-12)
        alone = solve(case.system, one, [0.0, 0.3, 0.5], "rk4", step=0.05, gradient=None).x
        close(flow[:, i : i + 1], alone, 1e-12)


@pytest.mark.parametrize("law", LAWS)
def test_shared_adaptive_steps_see_the_neighbours_within_the_tolerance(make_case, close, law):
    case = make_case(dynamics=law, hopfield="softmax", batch=1, seed=3)
    x = torch.cat([case.x, 30 * case.randn(3, *case.x.shape[1:])])
    for tolerance in (1e-4, 1e-7):
        arguments = {"rtol": tolerance, "atol": tolerance, "gradient": None}
        together = solve(case.system, x, [0.0, 1.0, 2.0], **arguments).x
        for i in range(len(x)):
            alone = solve(case.system, x[i : i + 1], [0.0, 1.0, 2.0], **arguments).x
            close(together[:, i : i + 1], alone, 10 * tolerance)


def test_a_hard_sample_is_not_diluted_by_its_batch(make_case, close):
    """The error norm is the largest over samples: the hard one sets the steps, as if alone."""
    case = make_case(hopfield="softmax", batch=1, seed=3)
    hard, easy = 0.05 * case.x, 1e4 * case.randn(63, *case.x.shape[1:])
    method = Method("dopri5", rtol=1e-12, atol=1e-6, options={"first_step": 1e-3})
    alone = solve(case.system, hard, [0.0, 1.0], method, gradient=None)
    together = solve(case.system, torch.cat([hard, easy]), [0.0, 1.0], method, gradient=None)
    assert together.stats.accepted == alone.stats.accepted > 10
    close(together.x[:, :1], alone.x, 1e-11)
