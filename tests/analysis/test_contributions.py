"""Who changed the decoded state: contributions add up, are known where they can be, and scale."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import jvp

import etdyn as ed
from etdyn.analysis.contributions import (
    contributions,
    head_contributions,
    memory_contributions,
    node_scores,
)
from etdyn.datasets import digits
from etdyn.problems import LinearEnergy, single_memory
from etdyn.tasks import evaluation_masks

DYNAMICS = ["et", "leaky", "sphere"]


def named(name, v):
    energy = LinearEnergy(v)
    energy.name = name
    return energy


def decoders(case):
    """Linear in g, nonlinear in g and mixing tokens, and nonlinear in x itself."""
    system, dim = case.system, case.system.dim
    weight, mixer = case.randn(dim, 6), case.randn(case.x.shape[1], case.x.shape[1])
    return {
        "linear": lambda x: system.activation(x) @ weight,
        "nonlinear": lambda x: torch.tanh(mixer @ system.activation(x) @ weight).square(),
        "of x": lambda x: torch.sin(x @ weight),
        "a score": lambda x: torch.tanh(system.activation(x) @ weight).sum((1, 2)),
    }


def array(values):
    return torch.from_numpy(np.ascontiguousarray(values))


# --- they add up -------------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_the_parts_of_a_step_sum_to_the_decoded_change(make_case, close, dynamics, masked):
    case = make_case(dynamics=dynamics, spread=0.5, seed=3)
    if masked:
        mask = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 0]], dtype=torch.bool)
        case.system = case.system.masked(mask)
        case.x[~mask] = 0.0  # padding without a direction
    sol = ed.descend(case.system, case.x, 0.3, 2)
    for name, decode in decoders(case).items():
        if masked and name == "nonlinear":
            continue  # mixes absent tokens in
        ds = contributions(sol, decode)
        change = torch.stack(
            [decode(b) - decode(a) for a, b in zip(sol.x, sol.x[1:], strict=False)]
        )
        own = change.abs().max()
        assert own > 0.1
        close(array(ds.contribution.sum("part")), change, 1e-14)
        if not (dynamics == "sphere" and name == "of x"):
            close(array(ds.contribution.sel(part="remainder")), 0 * change, 1e-12, own)
        parts = ["attention", "hopfield"] + ["leak"] * (dynamics == "leaky") + ["remainder"]
        assert ds.part.values.tolist() == parts


def test_a_decoder_that_sees_the_length_of_a_token_sums_on_the_sphere_too(make_case, close):
    case = make_case(dynamics="sphere")
    decode = decoders(case)["of x"]
    sol = ed.descend(case.system, case.x, 0.5, 2)
    ds = contributions(sol, decode)
    close(
        array(ds.contribution.sel(part="remainder")), 0 * array(ds.change), 1e-12, array(ds.change)
    )


def test_a_token_that_a_step_takes_past_zero_is_resolved(close):
    """x turns round within the step, at a distance of 0.02 |x|: eight Gauss points are far off."""
    x0 = torch.tensor([[[1.0, -1.0, 0.02, -0.02]]], dtype=torch.float64)
    v = torch.tensor([[-2.0, 2.0, 0.0, 0.0]], dtype=torch.float64)
    system = ed.System(ed.LayerNorm(4).double(), LinearEnergy(v))
    ds = contributions(ed.descend(system, x0, 1.0, 1), system.activation)
    assert abs(ds.change).max() > 1.9
    close(array(ds.contribution.sel(part="remainder")), 0 * array(ds.change), 1e-12, 1.0)


def test_noise_is_the_remainder(make_case, close):
    for dynamics in DYNAMICS:
        case = make_case(dynamics=dynamics)
        decode = decoders(case)["nonlinear"]
        sol = ed.descend(
            case.system, case.x, 0.1, 1, noise=0.5, generator=torch.Generator().manual_seed(0)
        )
        quiet = ed.descend(case.system, case.x, 0.1, 1)
        ds, calm = contributions(sol, decode), contributions(quiet, decode)
        moved = decode(sol.x[1]) - decode(quiet.x[1])
        remainder = array(ds.contribution.sel(part="remainder"))[0]
        close(remainder, moved, 1e-12)
        kept = ds.part.values[:-1].tolist()
        close(array(ds.contribution.sel(part=kept)), array(calm.contribution.sel(part=kept)), 1e-13)


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_on_the_shipped_model(close, dynamics):
    """Criterion: parts and remainder sum to the change to 1e-10, the remainder is far below it."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    model = model.with_system(model.system.with_dynamics(dynamics))
    x0 = model.tokens(digits().test[:4].double(), evaluation_masks(4, model.patches))

    def decode(x):
        return model.pixels(model.decode(x))

    sol = ed.descend(model.system, x0, model.step, model.steps, gradient=None)
    ds = contributions(sol, decode, steps=[0, 11])
    change = torch.stack([decode(sol.x[k + 1]) - decode(sol.x[k]) for k in (0, 11)]).detach()
    assert ds.sizes["sample"] == 4 and ds.state.dims == (
        "step", "sample", "channel", "row", "column",
    )  # fmt: skip
    assert float((array(ds.contribution.sum("part")) - change).abs().max()) < 1e-10
    assert abs(ds.contribution.sel(part="remainder")).max() < 1e-12
    heads = head_contributions(sol, decode, steps=[11])
    last = ds.contribution.sel(step=[11])
    attention, hopfield = (array(last.sel(part=p)) for p in ("attention", "hopfield"))
    close(array(heads.contribution.sum(["head", "role"])), attention, 1e-12)
    strong = memory_contributions(sol, decode, 5, steps=[11])
    close(array(strong.contribution.sum("rank") + strong.rest), hopfield, 1e-12)


# --- known exactly -----------------------------------------------------------------------------


def test_f15_constant_forces_and_a_quadratic_decoder_are_known_exactly(make_case, close):
    """D = x^2: C_i = dt v_i (x0 + x1), for a step of the discrete model and of the flow alike."""
    case = make_case()
    a, b = case.randn(5, 8), case.randn(5, 8)
    system = ed.System(ed.LayerNorm(8).double(), named("a", a) + named("b", b))
    for sol in (
        ed.descend(system, case.x, 0.7, 3),
        ed.solve(system, case.x, [0.0, 0.3, 1.5], method="rk4", step=0.1),
    ):
        ds = contributions(sol, torch.square)
        dt = sol.t.diff()[:, None, None, None]
        for name, v in (("a", a), ("b", b)):
            exact = dt * v * (sol.x[:-1] + sol.x[1:])
            close(array(ds.contribution.sel(part=name)), exact, 1e-14)
        close(array(ds.contribution.sel(part="remainder")), 0 * exact, 1e-13, exact)


def test_a_linear_decoder_gives_the_forces_themselves(make_case, close):
    case = make_case()
    weight = case.randn(8, 3)
    sol = ed.descend(case.system, case.x, 0.2, 2)
    ds = contributions(sol, lambda x: x @ weight)
    for k in range(2):
        for name, force in case.system.forces(sol.x[k]).items():
            found = array(ds.contribution.sel(part=name, step=k))
            close(found, 0.2 * force @ weight, 1e-13)


def test_f14_a_single_memory_does_everything(close):
    problem = single_memory(strength=0.7)
    times = np.linspace(0, 2, 21)
    sol = ed.solve(problem.system, problem.start, times, rtol=1e-11, atol=1e-12)
    g = problem.system.activation
    ds = contributions(sol, g)
    exact = torch.stack([g(problem.exact(float(t))) for t in times]).diff(dim=0)
    close(array(ds.contribution.sel(part="hopfield")), exact, 1e-6)  # O(h^5) of the spacing
    strong = memory_contributions(sol, g, strongest=1)
    close(array(strong.contribution)[:, :, 0], array(ds.contribution.sel(part="hopfield")), 1e-13)
    assert (strong.memory == 0).all()
    assert abs(strong.rest).max() == 0


def test_a_pure_attention_step_leaves_the_memories_nothing(make_case):
    case = make_case()
    with torch.no_grad():
        case.system.hopfield.memories.zero_()
    ds = contributions(ed.descend(case.system, case.x, 0.3, 1), case.system.activation)
    assert abs(ds.contribution.sel(part="hopfield")).max() == 0
    assert abs(ds.contribution.sel(part="attention")).max() > 0.1


# --- orders ------------------------------------------------------------------------------------


def order(errors):
    return [math.log2(a / b) for a, b in itertools.pairwise(errors)]


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_the_tangent_is_the_limit_with_an_error_of_order_two(make_case, dynamics):
    case = make_case(dynamics=dynamics)
    decode = decoders(case)["nonlinear"]
    x0, errors = case.system.prepare(case.x), []
    for step in (0.002, 0.001, 0.0005):
        ds = contributions(ed.descend(case.system, case.x, step, 1), decode)
        push = case.system.forces(x0)["attention"]
        if dynamics == "sphere":
            push = case.system.lagrangian.tangent(x0, push) / case.system.lagrangian.gamma
        tangent = step * jvp(decode, (x0,), (push,))[1]
        errors.append(float((array(ds.contribution.sel(part="attention"))[0] - tangent).norm()))
    assert order(errors) == pytest.approx([2, 2], abs=0.1)


def test_f2_the_leak_turns_no_token_but_for_the_step_size(make_case):
    """M x = O(eps): the leak contracts lengths, which g does not see; along a step, O(dt^2)."""
    case = make_case(dynamics="leaky", eps=1e-5)
    sizes = []
    for step in (0.02, 0.01, 0.005):
        ds = contributions(ed.descend(case.system, case.x, step, 1), case.system.activation)
        sizes.append(float(abs(ds.contribution.sel(part="leak")).max()))
        forced = float(abs(ds.contribution.sel(part="attention")).max())
    assert sizes[-1] < 0.1 * forced
    assert order(sizes) == pytest.approx([2, 2], abs=0.15)


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_the_remainder_of_a_flow_is_of_order_five_in_the_save_spacing(make_case, dynamics):
    case = make_case(dynamics=dynamics, hopfield="softmax", weights=0.5)
    decode, errors = decoders(case)["nonlinear"], []
    for width in (0.1, 0.05, 0.025):
        sol = ed.solve(case.system, case.x, [0.0, width], rtol=1e-12, atol=1e-13, gradient=None)
        remainder = contributions(sol, decode).contribution.sel(part="remainder")
        errors.append(float(np.linalg.norm(remainder)))
    assert order(errors) == pytest.approx([5, 5], abs=0.7)
    assert errors[-1] < 1e-7


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_parts_of_the_discrete_model_approach_those_of_the_flow(make_case, dynamics):
    case = make_case(dynamics=dynamics, hopfield="softmax", weights=0.5)
    decode, end = decoders(case)["linear"], 0.4
    flow = ed.solve(
        case.system, case.x, np.linspace(0, end, 5), rtol=1e-11, atol=1e-12, gradient=None
    )
    exact, errors = contributions(flow, decode).contribution.sum("step"), []
    for steps in (6, 12, 24):
        euler = contributions(ed.descend(case.system, case.x, end / steps, steps), decode)
        errors.append(float(abs(euler.contribution.sum("step") - exact).max()))
    assert order(errors) == pytest.approx([1, 1], abs=0.15)


# --- heads and memories ------------------------------------------------------------------------


@pytest.mark.parametrize("self_attention", [False, True])
def test_head_forces_sum_to_the_force_and_roles_are_derivatives_in_their_argument(
    make_case, close, self_attention
):
    case = make_case(heads=3, self_attention=self_attention)
    case.system = case.system.masked(case.token_mask(), case.mask(2, 5, 5))
    term, g = case.system.attention, case.system.activation(case.x)
    found = term.head_forces(g)
    close(found.sum((0, 1)), term.force(g), 1e-14)
    for head in range(3):
        alone = ed.Attention(8, 1, 4, term.beta, self_attention).double()
        with torch.no_grad():
            alone.query.copy_(term.query[head : head + 1])
            alone.key.copy_(term.key[head : head + 1])
        alone = alone.masked(term._tokens, term._keys)
        close(found[head].sum(0), alone.force(g).detach(), 1e-14)
        # freeze the keys: what is left is the force on queries
        both = torch.cat([g, g], -1).requires_grad_()
        queries, keys = both[..., :8] @ alone.query[0].T, both[..., 8:] @ alone.key[0].T
        logits = alone.beta * queries @ keys.mT
        allowed = alone._allowed(5)[:, 0]
        lse = logits.masked_fill(~allowed, -torch.inf).logsumexp(-1)[allowed.any(-1)]
        as_query, as_key = torch.autograd.grad(lse.sum() / alone.beta, both)[0].split(8, -1)
        close(found[head, 0], as_query, 1e-13)
        close(found[head, 1], as_key, 1e-13)


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_heads_sum_to_attention_and_swap_with_their_weights(make_case, close, dynamics):
    case = make_case(heads=3, dynamics=dynamics)
    decode = decoders(case)["nonlinear"]
    found = []
    for _ in range(2):
        sol = ed.descend(case.system, case.x, 0.1, 1)
        found.append(array(head_contributions(sol, decode).contribution))
        attention = array(contributions(sol, decode).contribution.sel(part="attention"))
        close(found[-1].sum((2, 3)), attention, 1e-13)
        with torch.no_grad():
            for weight in (case.system.attention.query, case.system.attention.key):
                weight.copy_(weight[[2, 0, 1]])
    close(found[1], found[0][:, :, [2, 0, 1]], 1e-12)


@pytest.mark.parametrize("kind", ["relu", "power", "softmax"])
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_memories_sum_to_the_network_and_are_sorted(make_case, close, dynamics, kind):
    case = make_case(memories=70, hopfield=kind, dynamics=dynamics)  # more than one chunk
    case.system = case.system.masked(case.token_mask())
    decode = decoders(case)["linear"]
    sol = ed.descend(case.system, case.x, 0.1, 1)
    hopfield = array(contributions(sol, decode).contribution.sel(part="hopfield"))
    every = memory_contributions(sol, decode, strongest=70)
    close(array(every.contribution.sum("rank")), hopfield, 1e-12)
    close(array(every.rest), 0 * hopfield, 1e-13, hopfield)
    assert (np.sort(every.memory, -1) == np.arange(70)).all()
    size = np.sqrt((every.contribution**2).sum(["token", "output"]))
    assert (size.diff("rank") <= 0).all()
    few = memory_contributions(sol, decode, strongest=3)
    assert (few.memory.values == every.memory.values[..., :3]).all()
    close(array(few.contribution), array(every.contribution[:, :, :3]), 1e-12)
    close(array(few.contribution.sum("rank") + few.rest), hopfield, 1e-12)


@pytest.mark.parametrize("dynamics", ["et", "leaky"])
def test_a_memory_does_what_its_force_does_to_a_linear_decoder(make_case, close, dynamics):
    case = make_case(dynamics=dynamics, memories=70)  # more than one chunk
    weight = case.randn(8, 3)
    sol = ed.descend(case.system, case.x, 0.3, 1)
    ds = memory_contributions(sol, lambda x: x @ weight, 70)
    x, memories = sol.x[0], case.system.hopfield.memories
    h = case.system.activation(x) @ memories.T
    for sample in range(2):
        for rank, memory in enumerate(ds.memory.values[0, sample]):
            force = h.relu()[sample, :, [memory]] * memories[memory]
            exact = 0.3 * force @ weight
            close(array(ds.contribution.values[0, sample, rank]), exact, 1e-12, 1e-3)


def test_memories_swap_with_their_weights(make_case, close):
    case = make_case()
    decode, order_ = decoders(case)["linear"], torch.randperm(12, generator=case.rng)
    sol = ed.descend(case.system, case.x, 0.3, 1)
    before = memory_contributions(sol, decode, 4)
    with torch.no_grad():
        case.system.hopfield.memories.copy_(case.system.hopfield.memories[order_])
    after = memory_contributions(ed.descend(case.system, case.x, 0.3, 1), decode, 4)
    assert (order_.numpy()[after.memory.values] == before.memory.values).all()
    close(array(after.contribution), array(before.contribution), 1e-12)


# --- batches, files, mistakes ------------------------------------------------------------------


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_a_sample_does_not_depend_on_its_neighbours(make_case, close, dynamics):
    case = make_case(dynamics=dynamics, batch=3)
    case.x[1] *= 0.1  # one that needs a finer quadrature
    decode = decoders(case)["linear"]
    every = contributions(ed.descend(case.system, case.x, 0.3, 1), decode)
    for k in range(3):
        alone = contributions(ed.descend(case.system, case.x[k : k + 1], 0.3, 1), decode)
        close(array(alone.contribution)[:, 0], array(every.contribution)[:, k], 1e-11)


def test_an_absent_token_changes_nothing(make_case, close):
    case = make_case()
    mask = torch.tensor([[True] * 5 + [False] * 2])
    padded = torch.cat([case.x, case.randn(2, 2, 8)], 1)
    system = case.system.masked(mask)
    for find in (contributions, head_contributions, memory_contributions):
        own = find(ed.descend(case.system, case.x, 0.3, 2), case.system.activation)
        more = find(ed.descend(system, padded, 0.3, 2), system.activation)
        close(array(more.contribution)[..., :5, :], array(own.contribution), 1e-12)
        absent = more.contribution[..., 5:, :]
        assert abs(absent).max() <= 1e-15  # also the remainder, a difference of equal states


def test_a_sample_that_ended_is_nan_and_its_neighbour_is_not(make_case):
    case = make_case()
    sol = ed.descend(case.system, case.x, 0.3, 2, gradient=None)
    sol.x[1:, 0] = torch.nan
    ds = contributions(sol, case.system.activation)
    assert np.isnan(ds.contribution.isel(sample=0)).any()
    assert abs(ds.contribution.isel(sample=1).sel(part="remainder")).max() < 1e-12


def test_the_results_survive_the_disk(make_case, tmp_path):
    case = make_case(dynamics="leaky")
    sol, decode = ed.descend(case.system, case.x, 0.3, 3), decoders(case)["linear"]
    for k, ds in enumerate([
        contributions(sol, decode, [0, 2]), head_contributions(sol, decode, [2]),
        memory_contributions(sol, decode, 2), node_scores(case.system, case.x),
    ]):  # fmt: skip
        ed.save(ds, tmp_path / f"{k}.zarr")
        assert ed.load(tmp_path / f"{k}.zarr").identical(ds)
        assert all({"units", "long_name"} <= set(v.attrs) for v in ds.data_vars.values())
    ds = contributions(sol, decode, [0, 2])
    assert ds.step.values.tolist() == [0, 2]
    assert ds.time.values == pytest.approx([0.0, 0.6])
    assert ds.time_end.values == pytest.approx([0.3, 0.9])


def test_wrong_input_says_what_is_wrong(make_case):
    case = make_case()
    sol = ed.descend(case.system, case.x, 0.3, 3)
    g = case.system.activation
    with pytest.raises(ValueError, match="steps: expected numbers below 3, got 3"):
        contributions(sol, g, [3])
    with pytest.raises(ValueError, match="steps: expected an integer >= 0, got -1"):
        contributions(sol, g, [-1])
    with pytest.raises(ValueError, match="steps: expected at least one"):
        contributions(sol, g, [])
    with pytest.raises(ValueError, match=r"decode: expected an output \(2, \.\.\.\)"):
        contributions(sol, lambda x: x[:1])
    with pytest.raises(TypeError, match="decode: expected to return a tensor, got list"):
        contributions(sol, lambda x: [x])
    with pytest.raises(ValueError, match="strongest: expected at most the 12 memories"):
        memory_contributions(sol, g, 13)
    bare = ed.solve(case.system, case.x, [0.0, 0.1, 0.2], save=["dissipation"], gradient=None)
    with pytest.raises(ValueError, match="solution: expected the states"):
        contributions(bare, g)
    linear = ed.System(ed.LayerNorm(8).double(), LinearEnergy(case.randn(5, 8)))
    for find, kind in ((head_contributions, "Attention"), (memory_contributions, "Hopfield")):
        with pytest.raises(ValueError, match=f"solution: expected a system with one term .*{kind}"):
            find(ed.descend(linear, case.x, 0.1, 1), g)


# --- scores of nodes ---------------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_f11_f30_power_sums_to_the_dissipation_and_to_every_slope(
    make_case, close, dynamics, masked
):
    case = make_case(dynamics=dynamics, hopfield="softmax", weights=0.5)
    if masked:
        mask = case.token_mask()
        case.system = case.system.masked(mask)
        case.x[~mask] = 1.0
    x = case.system.prepare(case.x)
    ds = node_scores(case.system, x)
    close(array(ds.power.sum(["token", "part"])), case.system.dissipation(x), 1e-13)
    assert float(ds.power.sum("part").min()) >= -1e-15
    h, v = 1e-5, case.system.velocity(0.0, x)
    ahead, behind = (case.system.energies(x + s * v) for s in (h, -h))
    for name in ahead:
        slope = (ahead[name] - behind[name]) / (2 * h)
        power = array(ds.power.sel(part="leak" if name == "lagrangian" else name).sum("token"))
        close(-power, slope, 1e-7, case.system.dissipation(x))
    if masked:
        assert (ds.power.values[~mask.numpy()] == 0).all()
        assert (ds.speed.values[~mask.numpy()] == 0).all()


@pytest.mark.parametrize("dynamics", DYNAMICS)
def test_speed_is_how_fast_a_part_alone_moves_g(make_case, close, dynamics):
    case = make_case(dynamics=dynamics)
    with torch.no_grad():
        case.system.hopfield.memories.zero_()
    x = case.system.prepare(case.x)
    ds = node_scores(case.system, x)
    h, v = 1e-6, case.system.velocity(0.0, x)
    moved = (case.system.activation(x + h * v) - case.system.activation(x - h * v)) / (2 * h)
    if dynamics != "leaky":
        close(array(ds.speed.sel(part="attention")), moved.norm(dim=-1), 1e-7)
    else:  # the leak moves g by O(eps) only
        close(array(ds.speed.sel(part="attention")), moved.norm(dim=-1), 1e-3)
        assert float(ds.speed.sel(part="leak").max()) < 1e-3
    assert (ds.speed.sel(part="hopfield") == 0).all()


def test_scores_of_a_graph_need_only_a_decoder_that_scores_nodes(make_case, close):
    """A node classifier: logits `(batch, token, output)`, the contributions are per-node scores."""
    case = make_case()
    classify = nn.Linear(8, 2).double().requires_grad_(False)
    system = case.system.masked(keys=case.mask(2, 5, 5))
    ds = contributions(ed.descend(system, case.x, 0.3, 2), lambda x: classify(system.activation(x)))
    assert ds.contribution.dims == ("step", "sample", "part", "token", "output")
    assert abs(ds.contribution.sel(part="remainder")).max() < 1e-12
