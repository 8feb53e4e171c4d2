"""Every analysis on graphs: dense attention's numbers under a mask, and those of each alone."""

import copy
import inspect

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor

import etdyn as ed
from etdyn import analysis as an
from etdyn.problems import Problem

F64 = torch.float64
LAWS = ["et", "leaky", "sphere"]
DIM, HEADS, WIDTH, BETA = 4, 2, 3, 0.7
SIZES = (3, 5, 4)
NOT_ABOUT_SYSTEMS = {
    "attention_clusters", "bit_error", "capacity", "comparison_table", "real_limit", "retrieval",
    "stability_function",
}  # fmt: skip


class DenseWeighted(ed.Energy):
    """Weighted attention on a graph in full matrices, by autograd: an oracle."""

    name = "attention"

    def __init__(self, bare, adjacency, weights):
        super().__init__()
        self.query, self.key, self.beta, self.seen = bare.query, bare.key, bare.beta, adjacency
        full = torch.zeros(HEADS, *adjacency.shape, dtype=F64)
        full[:, adjacency] = weights.T
        self.register_buffer("full", full)

    def energy(self, g, relative=False):
        scores = torch.einsum("hyd,bqd,hye,bke->bhqk", self.query, g, self.key, g)
        some = self.seen.any(1)
        logits = (self.beta * self.full * scores)[:, :, some]
        lse = logits.masked_fill(~self.seen[some], -torch.inf).logsumexp(-1)
        counts = self.seen[some].sum(1).log() if relative else 0.0
        return -(lse - counts).sum((1, 2)) / self.beta

    def force(self, g):
        return -torch.func.grad(lambda v: self.energy(v).sum())(g)

    def energy_and_force(self, g, relative=False):
        return self.energy(g, relative), self.force(g)

    def hvp(self, g, u):
        return -torch.func.jvp(self.force, (g,), (u,))[1]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def adjacency_of(nodes, seed):
    """A directed graph with a row without edges; entry (query, key)."""
    seen = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(seed)) < 0.6
    seen[seed % nodes] = False
    return seen


def graph_of(adjacency):
    return ed.Graph.from_edges(adjacency.nonzero().T.flip(0), len(adjacency))


def build(attention, law):
    """With the same parameters, whatever the attention."""
    torch.manual_seed(0)
    memories = ed.Hopfield(DIM, 6, "softmax", beta=2.0).double()
    system = ed.System(ed.LayerNorm(DIM, 1e-2).double(), attention + memories, law)
    system.lagrangian.delta.data.copy_(0.3 * drawn(9, DIM))
    return system.requires_grad_(False)


def bare(kind=ed.GraphAttention, **options):
    torch.manual_seed(1)
    return kind(DIM, HEADS, WIDTH, BETA, **options).double().requires_grad_(False)


def directed(law):
    """A graph and the same pairs as a key mask of dense attention; states."""
    seen = adjacency_of(5, 2)
    dense = build(bare(ed.Attention, self_attention=True), law)
    return build(bare(), law).on(graph_of(seen)), dense.masked(keys=seen[None]), drawn(3, 2, 5, DIM)


def weighted(law):
    """A weighted graph and its oracle; states."""
    seen = adjacency_of(5, 2)
    graph = graph_of(seen)
    weights = drawn(4, graph.size, HEADS)
    oracle = build(DenseWeighted(bare(), seen, weights), law)
    return build(bare(), law).on(graph, weights), oracle, drawn(3, 2, 5, DIM)


def packed(law):
    """Graphs of several sizes as one batch, and as masks of dense attention; states."""
    seen = [adjacency_of(n, 5 + n) for n in SIZES]
    whole = torch.zeros(len(SIZES), max(SIZES), max(SIZES), dtype=torch.bool)
    for k, n in enumerate(SIZES):
        whole[k, :n, :n] = seen[k]
    tokens = torch.arange(max(SIZES)) < torch.tensor(SIZES)[:, None]
    sparse = build(bare(), law).on(ed.Graph.batch([graph_of(each) for each in seen]))
    dense = build(bare(ed.Attention, self_attention=True), law).masked(tokens, whole)
    return sparse, dense, drawn(3, len(SIZES), max(SIZES), DIM)


def packed_weighted(law):
    """A batch of weighted graphs, each of them alone, and states."""
    graphs = [graph_of(adjacency_of(n, 5 + n)) for n in SIZES]
    weights = [drawn(20 + k, g.size, HEADS) for k, g in enumerate(graphs)]
    together = build(bare(), law).on(ed.Graph.batch(graphs), torch.cat(weights))
    alone = [build(bare(), law).on(g, w) for g, w in zip(graphs, weights, strict=True)]
    return together, alone, drawn(3, len(SIZES), max(SIZES), DIM)


# --- every analysis, as a function of a system and states ---------------------------------------


def rest(system, x):
    found = ed.find_equilibrium(system, x, tol=1e-11)
    assert found.converged.all()
    return found.x


def run(system, x, steps=4):
    return ed.descend(system, x, 0.2, steps, gradient=None)


def flow(system, x, times=(0.0, 0.1, 0.3)):
    return ed.solve(system, x, times, "rk4", step=0.05, gradient=None)


def decode(x):
    return x[..., :2]


def leaky_run(system, x):
    leaky = system.with_dynamics("leaky")
    return leaky, ed.solve(leaky, x, torch.linspace(0, 8, 17), "rk4", step=0.25, gradient=None)


def decay(system, x):
    leaky, found = leaky_run(system, x)
    limit = leaky.energy(rest(leaky, x))
    return an.decay_rate(found, limit, decades=1.0)[["gap", "rate", "window_decades"]]


def conjugate(system, x):
    run_ = flow(system.with_dynamics("et"), x)
    return an.conjugate(run_).to_xarray()


def orders(system, x):
    start = system.prepare(x)
    exact = ed.solve(system, start, [0.0, 0.2], "rk4", step=0.01, gradient=None).x[-1]
    return an.method_order(
        Problem(system, start, lambda _: exact), ["heun2"], [0.1, 0.05, 0.025], end=0.2
    )


def work(system, x):
    reference = an.reference_solution(system, x, [0.0, 0.2])
    found = an.work_precision(system, x, {"rk4": [ed.Method("rk4", 0.1)]}, reference, repeats=1)
    return found[["error", "status", "evaluations"]]


def lyapunov(system, x):
    return an.lyapunov_exponents(system, system.prepare(x), [0, 0.1, 0.2, 0.3], 2)


def mapped(system, x):
    return an.map_exponents(system.map, system.prepare(x), 3)


def switches(system, x):
    table = an.step_size_map(system, x, torch.tensor([0.2, 0.4], dtype=F64), 20)
    return an.attractor_switches(system, table, tol=1e-3)


def steady(system, x):
    data = flow(system, x).to_xarray()
    return an.plateaus(data, band=10.0, least=1e-6, tol=1e-12)


def compared(system, x):
    euler = ed.solve(system, x, [0.0, 0.1, 0.3], "euler", step=0.05, gradient=None)
    return an.compare({"fine": flow(system, x), "coarse": euler})


def operator(system, x):
    made = an.linear_operator(system, system.prepare(x), sample=1)
    return torch.from_numpy(made.matvec(np.ones(made.shape[0])))


def on_direction(product):
    return lambda system, x: system.keep(product(system, system.prepare(x), drawn(7, *x.shape)))


def distance(system, x):
    return system.keep(an.activation_distance(system, system.prepare(x), system.prepare(x.flip(2))))


def bound(system, x):
    found = torch.as_tensor(an.hessian_bound(system, x.shape[1]), dtype=F64)
    return found.expand(len(x))


EVERYWHERE = {
    "activation_distance": distance,
    "audit": lambda s, x: an.audit(flow(s, x)),
    "backward_growth": lambda s, x: an.backward_growth(run(s, x)),
    "compare": compared,
    "conjugate": conjugate,
    "contributions": lambda s, x: an.contributions(run(s, x, 2), decode),
    "decay_rate": decay,
    "error_in_g": lambda s, x: an.error_in_g(flow(s, x), an.reference_solution(
        s, x, [0.0, 0.1, 0.3])),
    "first_step_overshoot": lambda s, x: an.first_step_overshoot(
        s, x, torch.tensor([0.1, 1.0], dtype=F64)),
    "flow_jacobian": on_direction(an.flow_jacobian),
    "increases": lambda s, x: an.increases(an.audit(ed.descend(s, x, 4.0, 6, gradient=None))),
    "jacobian_spectrum": lambda s, x: an.jacobian_spectrum(s, x)[["real", "imaginary", "null"]],
    "lyapunov_exponents": lyapunov,
    "map_exponents": mapped,
    "measured_limit": lambda s, x: an.measured_limit(s, rest(s, x), steps=20),
    "memory_contributions": lambda s, x: an.memory_contributions(run(s, x, 2), decode, 3),
    "monotone_table": an.monotone_table,
    "multiplier": lambda s, x: an.multiplier(s, rest(s, x), 0.5),
    "node_scores": an.node_scores,
    "plateaus": steady,
    "predicted_limits": lambda s, x: an.predicted_limits(s, rest(s, x))[
        ["linear", "eigenvalue", "scale"]],
    "real_spectrum": an.real_spectrum,
    "recovered": lambda s, x: an.recovered(s, x, drawn(8, 3, DIM)),
    "reference_solution": lambda s, x: an.reference_solution(s, x, [0.0, 0.2]).x,
    "spectrum": lambda s, x: an.spectrum(s, x)[["eigenvalue", "radial", "null"]],
    "stability_product": on_direction(an.stability_product),
    "step_size_map": lambda s, x: an.step_size_map(s, x, torch.tensor([0.1, 0.5], dtype=F64), 5),
    "attractor_switches": switches,
    "token_clusters": lambda s, x: an.token_clusters(s, flow(s, x)),
    "without_null": on_direction(an.without_null),
    "work_precision": work,
}  # fmt: skip
ONE_SAMPLE = {  # of one system or one sample
    "basin_changes": lambda s, x: an.basin_changes(
        s, drawn(6, 2, *x.shape[1:]), ("map", "anderson")
    ),
    "dense_matrix": lambda s, x: an.dense_matrix(s, s.prepare(x), sample=1),
    "linear_operator": operator,
    "method_order": orders,
    "survey": lambda s, x: an.survey(s, drawn(6, 3, *x.shape[1:])),
}
ATTENTION = {  # what only a term that is attention says
    "head_contributions": lambda s, x: an.head_contributions(run(s, x, 2), decode),
    "hessian_bound": bound,
    "local_energies": lambda s, x: an.local_energies(s, s.prepare(x)),
    "predicted_limits": lambda s, x: an.predicted_limits(s, rest(s, x)),
}
CONFORMS = {"check"}
# Run under every law only among the slow tests; by default under one law for each question.
HEAVY = {
    "attractor_switches", "audit", "basin_changes", "decay_rate", "error_in_g", "increases",
    "lyapunov_exponents", "map_exponents", "measured_limit", "method_order", "multiplier",
    "predicted_limits", "reference_solution", "survey", "work_precision",
}  # fmt: skip
SHARED = {  # over samples, or with directions that are drawn for all samples at once
    "backward_growth", "compare", "flow_jacobian", "increases", "lyapunov_exponents",
    "map_exponents", "monotone_table", "real_spectrum", "stability_product", "without_null",
}  # fmt: skip


def cases(names, own):
    """Names under every law; the heavy ones by default under `own` alone, None: only when slow."""
    return pytest.mark.parametrize(
        ("name", "law"),
        [
            pytest.param(n, law, marks=[pytest.mark.slow] if n in HEAVY and law != own else [])
            for n in names for law in LAWS
        ],
    )  # fmt: skip


def same(found, expected, rel=1e-8):
    """Equal numbers, whatever holds them."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name], rel)
    elif isinstance(expected, xr.Dataset):
        assert found.sizes == expected.sizes
        for name, variable in expected.data_vars.items():
            if name != "evaluations" and np.issubdtype(variable.dtype, np.number):
                equal(str(name), found[name].to_numpy(), variable.to_numpy(), rel)
    else:
        equal("tensor", found.numpy(), expected.numpy(), rel)


def equal(name, found, expected, rel):
    finite = np.isfinite(expected)
    size = 1.0 + (np.abs(expected[finite]).max() if finite.any() else 0.0)
    np.testing.assert_allclose(found, expected, rtol=0, atol=rel * size, err_msg=name)


def test_every_public_analysis_is_here():
    functions = {name for name in an.__all__ if inspect.isfunction(getattr(an, name))}
    here = EVERYWHERE.keys() | ONE_SAMPLE.keys() | ATTENTION.keys() | CONFORMS
    assert here | NOT_ABOUT_SYSTEMS == functions


@cases(EVERYWHERE | ONE_SAMPLE | ATTENTION, "leaky")
def test_a_graph_is_dense_attention_under_a_mask(name, law):
    sparse, dense, x = directed(law)
    analysis = (EVERYWHERE | ONE_SAMPLE | ATTENTION)[name]
    same(analysis(sparse, x), analysis(dense, x))


@cases(EVERYWHERE | ONE_SAMPLE, "et")
def test_a_weighted_graph_is_its_stated_energy(name, law):
    sparse, oracle, x = weighted(law)
    analysis = (EVERYWHERE | ONE_SAMPLE)[name]
    found, expected = analysis(sparse, x), analysis(oracle, x)
    if isinstance(found, xr.Dataset):  # the oracle does not tell where its energy sits
        found = found[[name for name in found if name in expected]]
        expected = expected[list(found)]
    same(found, expected)


@cases(EVERYWHERE | ATTENTION, "sphere")
def test_a_batch_of_graphs_is_dense_attention_under_masks(name, law):
    sparse, dense, x = packed(law)
    analysis = (EVERYWHERE | ATTENTION)[name]
    same(analysis(sparse, x), analysis(dense, x))


@cases(sorted((EVERYWHERE | ATTENTION).keys() - SHARED), None)
def test_a_batch_of_graphs_is_each_graph_alone(name, law):
    """Reference solutions share their steps, and agree to what they were asked for."""
    together, alone, x = packed_weighted(law)
    analysis = (EVERYWHERE | ATTENTION)[name]
    found = analysis(together, x)
    for k, (n, system) in enumerate(zip(SIZES, alone, strict=True)):
        expected = analysis(system, x[k : k + 1, :n])
        same(part(found, k, expected), expected, 3e-7)


def part(found, k, like):
    """What a result says about one sample, without what padding adds."""
    if isinstance(found, dict):
        return {name: part(value, k, like[name]) for name, value in found.items()}
    if isinstance(found, Tensor):
        dim = found.ndim - 3 if found.ndim == 4 else 0  # (time, sample, token, feature)
        one = found.narrow(dim, k, 1)
        return one[tuple(slice(n) for n in like.shape)]
    sizes = {dim: slice(n) for dim, n in like.sizes.items() if dim != "sample"}
    return found.isel(sample=[k]).isel(sizes)


# --- refusals, bounds, conformance --------------------------------------------------------------


@pytest.mark.parametrize("kind", ["weighted", "packed", "by a network"])
def test_check_finds_every_law_kept(kind):
    """States that fit are drawn; a network's weights are cut off; a few of many graphs are used."""
    many = ed.Graph.batch([graph_of(adjacency_of(2 + n % 4, n)) for n in range(10)])
    network = torch.nn.Linear(HEADS, HEADS).double()
    system = {
        "weighted": lambda: weighted("et")[0],
        "packed": lambda: build(bare(), "leaky").on(many),
        "by a network": lambda: build(bare(), "sphere").on(many, network(drawn(1, many.size, 2))),
    }[kind]()
    found = ed.check(system)
    assert found.passed, found
    shape = [5, 5, DIM] if kind == "weighted" else [8, 5, DIM]
    assert f'"shape": {shape}' in found.to_xarray().attrs["etdyn_config"]


def test_surveys_refuse_what_they_cannot_tell_apart():
    sparse, _, x = directed("leaky")
    with pytest.raises(ValueError, match=r"symmetry: expected None where .* a graph"):
        an.survey(sparse, x, symmetry="permutation")
    together, _, x = packed_weighted("leaky")
    with pytest.raises(ValueError, match="starts: expected one graph for all"):
        an.survey(together, x)


def test_copies_let_go_of_the_network_that_computed_the_weights():
    network = torch.nn.Linear(HEADS, HEADS).double()
    graph = graph_of(adjacency_of(5, 2))
    system = build(bare(), "et").on(graph, network(drawn(1, graph.size, HEADS)))
    copied, x = copy.deepcopy(system), drawn(3, 2, 5, DIM)
    assert torch.equal(copied.force(x), system.force(x))
    assert copied.attention.weights.is_leaf and copied.attention.weights.requires_grad
    assert copied.attention is copied.interaction.terms()["attention"]
