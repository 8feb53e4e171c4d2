"""Attention over the edges of graphs: exact, sparse, and a System like any other."""

import copy
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import etdyn as ed
from etdyn import Attention, Hopfield, LayerNorm, System
from etdyn.analysis.spectrum import spectrum
from etdyn.graph_attention import GraphAttention
from etdyn.graph_products import EDGE, KEY, QUERY, contract, row_sum, softmax, to_edges
from etdyn.graphs import Graph

F64 = torch.float64
LAWS = ["et", "leaky", "sphere"]


class World:
    """A random graph, attention on it, and activations, in float64."""

    def __init__(
        self, seed, nodes=6, share=0.4, *, heads=2, width=3, dim=5, batch=2, weighted=True
    ):
        self.rng = torch.Generator().manual_seed(seed)
        self.adjacency = torch.rand(nodes, nodes, generator=self.rng) < share
        self.adjacency[torch.randint(nodes, (1,), generator=self.rng)] = False  # a row without
        self.graph = Graph.from_edges(self.adjacency.nonzero().T.flip(0), nodes)
        self.bare = GraphAttention(dim, heads, width, beta=0.7).double().requires_grad_(False)
        self.bare.query.copy_(self.randn(heads, width, dim))
        self.bare.key.copy_(self.randn(heads, width, dim))
        self.weights = self.randn(self.graph.size, heads) if weighted else None
        self.attention = self.bare.on(self.graph, self.weights)
        self.g, self.u = self.randn(batch, nodes, dim), self.randn(batch, nodes, dim)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.rng, dtype=F64)

    def system(self, dynamics="et", graph=None, weights=None):
        torch.manual_seed(0)
        dim = self.g.shape[-1]
        own, memories = copy.deepcopy(self.bare), Hopfield(dim, 7, "softmax").double()
        system = System(LayerNorm(dim, 1e-2).double(), own + memories, dynamics)
        system.requires_grad_(False)
        graph = self.graph if graph is None else graph
        return system.on(graph, self.weights if weights is None else weights)


def dense_energy(attention, g, adjacency, weights=None):
    """The stated energy in full matrices, `(batch,)`: written once more, as an oracle."""
    scores = torch.einsum("hyd,bqd,hye,bke->bhqk", attention.query, g, attention.key, g)
    logits = attention.beta * scores
    if weights is not None:
        full = torch.zeros(len(attention.query), *adjacency.shape, dtype=F64)
        full[:, adjacency] = weights.T
        logits = logits * full
    some = adjacency.any(-1)
    logits = logits[:, :, some].masked_fill(~adjacency[some], -torch.inf)
    return -logits.logsumexp(-1).sum((1, 2)) / attention.beta


def gradient(function, x):
    x = x.detach().clone().requires_grad_()
    return torch.autograd.grad(function(x).sum(), x)[0]


SEEDS = st.integers(0, 2**31)
SHARES = st.sampled_from([0.0, 0.2, 0.5, 1.0])


@given(seed=SEEDS, share=SHARES, weighted=st.booleans(), nodes=st.integers(1, 7))
def test_f1_force_is_the_gradient_of_the_stated_energy(close, seed, share, weighted, nodes):
    """Directed, weighted, with loops and empty rows (defect 19 of the public code)."""
    w = World(seed, nodes, share, weighted=weighted)
    attention, g = w.attention, w.g

    def stated(x):
        return dense_energy(attention, x, w.adjacency, w.weights)

    scale = attention.beta * w.g.square().sum()
    close(attention.energy(g), stated(g), 1e-13, scale=scale)
    slope = gradient(stated, g)
    close(attention.force(g), -slope, 1e-13, scale=scale)
    close(attention.force(g), -gradient(attention.energy, g), 1e-13, scale=scale)
    energy, force = attention.energy_and_force(g)
    close(energy, attention.energy(g), 1e-14, scale=scale)
    close(force, attention.force(g), 0)


@settings(max_examples=12)
@given(seed=SEEDS, share=SHARES, weighted=st.booleans())
def test_f10_hvp_is_the_derivative_of_the_force(close, seed, share, weighted):
    """In both modes of autograd, and symmetric."""
    w = World(seed, share=share, weighted=weighted)
    attention, g, u, v = w.attention, w.g, w.u, w.randn(*w.g.shape)
    closed, scale = attention.hvp(g, u), 10 * w.g.square().sum()
    close(-closed, torch.autograd.functional.jvp(attention.force, g, u)[1], 1e-13, scale=scale)
    close(-closed, torch.func.jvp(attention.force, (g,), (u,))[1], 1e-13, scale=scale)
    close((v * closed).sum(), (u * attention.hvp(g, v)).sum(), 1e-13, scale=scale)


@pytest.mark.parametrize("self_attention", [True, False])
@given(data=st.data())
def test_complete_graph_is_dense_attention(make_case, close, self_attention, data):
    case = make_case(data, self_attention=self_attention, spread=1.0)
    full, g = case.system.attention, case.system.activation(case.x)
    n, (heads, width, dim) = g.shape[1], full.query.shape
    everyone = torch.ones(n, n).nonzero().T
    sparse = GraphAttention(dim, heads, width, full.beta).double().requires_grad_(False)
    sparse.load_state_dict(full.state_dict())
    sparse = sparse.on(Graph.from_edges(everyone, n, self_loops=self_attention))
    same_attention(close, sparse, full, g, case.randn(*g.shape))
    close(sparse.curvature_bound(n), full.curvature_bound(n), 1e-14)


@given(seed=SEEDS, share=SHARES)
def test_graph_is_a_key_mask(close, seed, share):
    w = World(seed, share=share, weighted=False)
    heads, width, dim = w.bare.query.shape
    full = Attention(dim, heads, width, w.bare.beta, self_attention=True).double()
    full.requires_grad_(False).load_state_dict(w.bare.state_dict())
    same_attention(close, w.attention, full.masked(keys=w.adjacency[None]), w.g, w.u)
    again = w.bare.on(Graph.from_edges(torch.ones(6, 6).nonzero().T, 6))
    masks = torch.stack([w.adjacency, ~w.adjacency])
    same_attention(close, again.masked(keys=masks), full.masked(keys=masks), w.g, w.u)


def same_attention(close, sparse, full, g, u):
    scale = float(g.square().sum()) + g.shape[1]
    for relative in (False, True):
        close(sparse.energy(g, relative), full.energy(g, relative), 1e-13, scale=scale)
        close(sparse.energy_and_force(g, relative)[0], full.energy(g, relative), 1e-13, scale=scale)
    close(sparse.force(g), full.force(g), 1e-13, scale=scale)
    close(sparse.hvp(g, u), full.hvp(g, u), 1e-13, scale=10 * scale)
    close(sparse.head_forces(g), full.head_forces(g), 1e-13, scale=scale)


@given(seed=SEEDS, weighted=st.booleans())
def test_parts_sum_to_the_whole(close, seed, weighted):
    w = World(seed, weighted=weighted)
    attention, g = w.attention, w.g
    close(attention.head_forces(g).sum((0, 1)), attention.force(g), 1e-13, scale=g.square().sum())
    for relative in (False, True):
        local = attention.local_energies(g, relative)
        assert local.shape == (2, 2, 6)
        close(local.sum((1, 2)), attention.energy(g, relative), 1e-14)
    constant = w.graph.degrees.clamp(min=1).double().log().sum() * 2 / attention.beta
    close(attention.energy(g, relative=True), attention.energy(g) + constant, 1e-13, scale=constant)


def test_weights_of_one_are_no_weights(close):
    w = World(0, weighted=False)
    ones = w.bare.on(w.graph, torch.ones(w.graph.size, 2, dtype=F64))
    close(ones.energy(w.g), w.attention.energy(w.g), 0)
    close(ones.force(w.g), w.attention.force(w.g), 0)
    close(ones.curvature_bound(6), w.attention.curvature_bound(6), 1e-15)


@given(seed=SEEDS)
def test_f4_renumbering_the_nodes_renumbers_the_force(close, seed):
    w = World(seed)
    order = torch.randperm(6, generator=w.rng)
    keys, queries = w.graph.edges
    place = order.argsort()
    renumbered = Graph.from_edges(torch.stack([place[keys], place[queries]]), 6)
    attention = w.bare.on(renumbered, w.weights[renumbered.order.long()])
    g, scale = w.g[:, order], w.g.square().sum()
    close(attention.energy(g), w.attention.energy(w.g), 1e-13, scale=scale)
    close(attention.force(g), w.attention.force(w.g)[:, order], 1e-13, scale=scale)
    close(attention.hvp(g, w.u[:, order]), w.attention.hvp(w.g, w.u)[:, order], 1e-13,
          scale=scale)  # fmt: skip


@given(seed=SEEDS, share=SHARES, weighted=st.booleans())
def test_f21_no_eigenvalue_lies_above_the_curvature_bound(seed, share, weighted):
    w = World(seed, nodes=4, share=share, dim=3, batch=1, weighted=weighted)
    eye = torch.eye(12, dtype=F64).reshape(12, 4, 3)
    hessian = w.attention.hvp(w.g.expand(12, -1, -1), eye).reshape(12, 12)
    bound = w.attention.curvature_bound(4)
    assert float(torch.linalg.eigvalsh(hessian)[-1]) <= bound * (1 + 1e-12) + 1e-12


def test_f21_the_bound_is_reached_by_one_edge(close):
    """One key that one query sees: E = -<K_b, Q_c> w, an indefinite form of norm |S| |w|."""
    bare = GraphAttention(2, 1, 2).double().requires_grad_(False)
    bare.query.copy_(torch.eye(2)), bare.key.copy_(torch.eye(2))
    attention = bare.on(
        Graph.from_edges(torch.tensor([[0], [1]]), 2), torch.tensor([[-3.0]]).to(F64)
    )
    eye = torch.eye(4, dtype=F64).reshape(4, 2, 2)
    hessian = attention.hvp(eye, eye).reshape(4, 4)
    close(torch.linalg.eigvalsh(hessian)[-1], 3.0, 1e-14)
    close(attention.curvature_bound(2), 6.0, 1e-14)  # the bound counts both roles apart


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_isolated_nodes_contribute_zero_and_nothing_is_ever_nan(dtype):
    w = World(1)
    attention = copy.deepcopy(w.attention).to(dtype)
    alone = ~(w.adjacency.any(1) | w.adjacency.any(0))
    empty = w.bare.on(Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), 6))
    empty = copy.deepcopy(empty).to(dtype)
    for size in (0.0, 1e-8, 1.0, 1e6, 1e9):
        g, u = (size * w.g).to(dtype), w.u.to(dtype)
        for term in (attention, empty):
            values = [*term.energy_and_force(g, relative=True), term.energy(g), term.hvp(g, u)]
            values.append(gradient(lambda x, t=term: t.force(x).sum((1, 2)), g))
            assert all(bool(torch.isfinite(v).all()) for v in values), size
        assert bool((attention.force(g)[:, alone] == 0).all())
        assert bool((attention.local_energies(g, False)[..., ~w.adjacency.any(1)] == 0).all())
        assert bool((empty.energy(g) == 0).all()) and bool((empty.force(g) == 0).all())
    assert empty.curvature_bound(6) == 0.0


def test_float32_agrees_with_float64(close):
    w = World(3)
    single = copy.deepcopy(w.attention).float()
    close(single.force(w.g.float()), w.attention.force(w.g), 1e-5)
    assert single.force(w.g.float()).dtype == torch.float32


def test_products_have_exact_derivatives_of_first_and_second_order():
    w = World(2, batch=1)
    graph, n = w.graph, 6
    sizes = {EDGE: (graph.size,), QUERY: (n, 3), KEY: (n, 3)}
    for slot in (EDGE, QUERY, KEY):
        given_ = [w.randn(*sizes[(slot + k) % 3]).requires_grad_() for k in (1, 2)]
        check = lambda a, b, s=slot: contract(graph, s, a, b)  # noqa: E731
        assert torch.autograd.gradcheck(check, given_, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(check, given_)
    edge, node = w.randn(graph.size).requires_grad_(), w.randn(n).requires_grad_()
    for function, x in ((row_sum, edge), (softmax, edge), (to_edges, node)):
        check = lambda v, f=function: f(graph, v)  # noqa: E731
        assert torch.autograd.gradcheck(check, x, check_forward_ad=True)
        assert torch.autograd.gradgradcheck(check, x)


def test_gradients_reach_everything_through_force_and_energy():
    w = World(4, nodes=4, dim=3, heads=1, width=2, batch=1)
    leaves = [w.g, w.bare.query.clone(), w.bare.key.clone(), w.weights]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]

    def outputs(g, query, key, weights):
        own = copy.copy(w.bare)
        own._parameters = {"query": query, "key": key}
        own = own.on(w.graph, 1.0 * weights)  # as a network would have computed them
        return own.energy(g), own.energy(g, relative=True), own.force(g)

    assert torch.autograd.gradcheck(outputs, leaves)


class Largest(TorchDispatchMode):
    """The largest strided tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, torch.Tensor) and value.layout == torch.strided:
                self.numel = max(self.numel, value.numel())
        return result


def test_no_tensor_has_the_size_of_edges_times_features():
    """Nor heads times edges; forward, backward and in Hessian products."""
    nodes, dim, heads = 60, 16, 2
    w = World(0, nodes, share=1.0, heads=heads, width=8, dim=dim, batch=1, weighted=False)
    attention = copy.deepcopy(w.attention).requires_grad_(True)
    g = w.g.requires_grad_()
    with Largest() as watch:
        (attention.force(g).square().sum() + attention.energy(g).sum()).backward()
        attention.hvp(g, w.u)
    assert w.graph.size > 2 * nodes * dim
    assert watch.numel <= w.graph.size


def test_nothing_warns():
    w = World(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w.attention.energy_and_force(w.g)


# ------------------------------------------------------------------ as a System


def three_graphs(seed):
    """Graphs of 4, 7 and 5 nodes with weights; states padded with rubbish."""
    worlds = [World(seed + k, nodes=n, batch=1) for k, n in enumerate((4, 7, 5))]
    batch = Graph.batch([w.graph for w in worlds])
    weights = torch.cat([w.weights for w in worlds])
    x = 1e3 * worlds[0].randn(3, 7, 5)
    for k, w in enumerate(worlds):
        x[k, : w.g.shape[1]] = w.g[0]
    return worlds, batch, weights, x


def test_check_finds_every_law_kept():
    """A graph, one with tokens taken out, a batch of graphs; each under another dynamics."""
    w, (_, batch, weights, _) = World(5), three_graphs(0)
    present = torch.tensor([[True, True, False, True, True, True]])
    for system, tokens in (
        (w.system("et"), 6),
        (w.system("leaky").masked(tokens=present), 6),
        (w.system("sphere", batch, weights), 7),
    ):
        found = ed.check(system, tokens=tokens)
        assert found.passed, found


@pytest.mark.parametrize("dynamics", LAWS)
@settings(max_examples=8)
@given(seed=SEEDS)
def test_batching_changes_no_result(close, dynamics, seed):
    worlds, batch, weights, x = three_graphs(seed)
    together = worlds[0].system(dynamics, batch, weights)
    moved = ed.descend(together, x, 0.1, 5).x[-1]
    for k, w in enumerate(worlds):
        n, own = w.g.shape[1], worlds[0].system(dynamics, w.graph, w.weights)
        scale = w.g.square().sum()
        close(together.energy(x)[k], own.energy(w.g)[0], scale=scale)
        close(together.force(x)[k, :n], own.force(w.g)[0], scale=scale)
        close(together.residual(x)[k], own.residual(w.g)[0], scale=scale)
        close(moved[k, :n], ed.descend(own, w.g, 0.1, 5).x[-1, 0])
        assert torch.equal(moved[k, n:], x[k, n:]), "padding stays where it is"


@given(seed=SEEDS)
def test_one_graph_serves_every_sample_alike(close, seed):
    w = World(seed, batch=3)
    force, image = w.attention.force(w.g), w.attention.hvp(w.g, w.u)
    for k in range(3):
        one = slice(k, k + 1)
        close(w.attention.force(w.g[one]), force[one], 1e-14)
        close(w.attention.hvp(w.g[one], w.u[one]), image[one], 1e-13)


@given(seed=SEEDS, weighted=st.booleans())
def test_token_mask_is_the_graph_of_the_tokens_left(close, seed, weighted):
    w = World(seed, weighted=weighted)
    present = torch.rand(2, 6, generator=w.rng) < 0.7
    present[:, 0] = True
    masked, g, u = w.attention.masked(tokens=present), w.g.clone(), w.u.clone()
    for k in range(2):
        left = present[k]
        keys, queries = w.graph.edges
        seen = left[keys] & left[queries]
        place = left.cumsum(0) - 1
        part = Graph.from_edges(place[w.graph.edges[:, seen]], int(left.sum()))
        own = w.bare.on(part, None if w.weights is None else w.weights[seen])
        sub, scale = (g[k, left][None], u[k, left][None]), w.g.square().sum()
        close(masked.energy(g)[k], own.energy(sub[0])[0], 1e-13, scale=scale)
        close(masked.force(g)[k, left], own.force(sub[0])[0], 1e-13, scale=scale)
        close(masked.hvp(g, u)[k, left], own.hvp(*sub)[0], 1e-13, scale=10 * scale)
        assert bool((masked.force(g)[k, ~left] == 0).all())


def test_masks_compose_and_leave_the_original_alone(close):
    w = World(6)
    system, x = w.system(), w.g
    before = system.energy(x)
    first = torch.tensor([[True, True, True, True, True, False]])
    second = torch.tensor([[False, True, True, True, True, True], [True] * 6])
    pairs = torch.rand(1, 6, 6, generator=w.rng) < 0.5
    twice = system.masked(tokens=first).masked(tokens=second, keys=pairs)
    once = system.masked(tokens=first & second, keys=pairs)
    close(twice.energy(x), once.energy(x), 1e-14)
    assert torch.equal(system.energy(x), before)
    assert dict(twice.named_parameters()).keys() == dict(system.named_parameters()).keys()
    assert all(a is b for a, b in zip(twice.parameters(), system.parameters(), strict=True))
    assert "attention.weights" not in system.state_dict()


@pytest.mark.parametrize("masked", [False, True])
def test_select_takes_graphs_weights_and_masks_along(close, masked):
    worlds, batch, weights, x = three_graphs(3)
    system = worlds[0].system("leaky", batch, weights)
    if masked:
        system = system.masked(tokens=torch.rand(3, 7, generator=worlds[0].rng) < 0.9)
    for rows in (
        torch.tensor([2]), torch.tensor([2, 0, 1, 0]), torch.tensor([True, False, True]),
    ):  # fmt: skip
        part = system.select(rows)
        close(part.energy(x[rows]), system.energy(x)[rows], 1e-14)
        close(part.velocity(0.0, x[rows]), system.velocity(0.0, x)[rows], 1e-14)
    assert system.select(torch.arange(3)).interaction.terms()["attention"].graph is (
        system.interaction.terms()["attention"].graph
    )
    single = worlds[1].system()
    assert single.select(torch.tensor([1, 0, 0])) is single


@pytest.mark.parametrize("dynamics", LAWS)
def test_f11_energy_falls_along_accurate_flows(close, dynamics):
    worlds, batch, weights, x = three_graphs(7)
    system = worlds[0].system(dynamics, batch, weights)
    times = torch.linspace(0, 0.5, 11)
    flow = ed.solve(system, x, times, "dopri5", rtol=1e-8, atol=1e-9, gradient=None)
    energy = torch.stack([system.energy(s) for s in flow.x])
    assert bool((energy.diff(dim=0) < 0).all())
    for method in (ed.Method("batched_dopri5"), ed.Method("guarded_euler", 0.01)):
        own = ed.solve(system, x, [0.0, 0.2], method, gradient=None)
        assert bool((system.energy(own.x[-1]) < system.energy(own.x[0])).all()), method.name


def test_samples_that_have_arrived_leave_the_batch(close):
    """Every sample's equilibrium is the one that it finds alone: `select` in solvers."""
    worlds, batch, weights, x = three_graphs(11)
    system = worlds[0].system("leaky", batch, weights)
    for method in ("anderson", "newton-krylov"):
        found = ed.find_equilibrium(system, x, method, tol=1e-10, gradient=None)
        assert bool(found.converged.all())
        for k, w in enumerate(worlds):
            own = worlds[0].system("leaky", w.graph, w.weights)
            alone = ed.find_equilibrium(own, w.g, method, tol=1e-10, gradient=None)
            close(found.energy[k], alone.energy[0], 1e-9)
    stop = ed.Stop(1e-4)
    ended = ed.solve(system, x, [0.0, 200.0], "batched_dopri5", stop=stop, gradient=None)
    assert bool((ended.status == ed.Status.EQUILIBRIUM).all())


@pytest.mark.parametrize(
    ("gradient", "method", "tolerance"),
    [
        ("checkpoint", ed.Method("rk4", 0.02), 1e-12),
        ("backsolve", ed.Method("dopri5", rtol=1e-8, atol=1e-9), 1e-6),
    ],
)
def test_gradient_modes_agree_with_the_direct_one(close, gradient, method, tolerance):
    """With weights that a network computed among what gradients flow to."""
    worlds, batch, weights, x0 = three_graphs(13)
    base = worlds[0]

    def gradients(mode):
        raw, start = weights.clone().requires_grad_(), x0.clone().requires_grad_()
        system = base.system("leaky", batch, 0.3 * torch.tanh(raw))
        attention = system.interaction.terms()["attention"]
        leaves = [raw, start, attention.query.requires_grad_(), attention.key.requires_grad_()]
        end = ed.solve(system, start, [0.0, 0.3], method, gradient=mode).x[-1]
        return torch.autograd.grad(system.keep(end).square().sum(), leaves)

    for direct, other in zip(gradients("direct"), gradients(gradient), strict=True):
        assert float(direct.abs().max()) > 0
        close(other, direct, tolerance)


def test_f31_implicit_gradient_is_that_of_the_unrolled_map(close):
    worlds, batch, weights, x = three_graphs(17)

    def system_of(raw):
        return worlds[0].system("leaky", batch, 0.3 * torch.tanh(raw))

    with torch.no_grad():
        found = ed.find_equilibrium(system_of(weights), x, "anderson", tol=1e-12).x
    raw = weights.clone().requires_grad_()
    here = ed.implicit(system_of(raw), found)
    (implicit,) = torch.autograd.grad(here.cos().sum(), raw)
    other = weights.clone().requires_grad_()
    system, state = system_of(other), found
    for _ in range(150):
        state = system.map(state)
    (unrolled,) = torch.autograd.grad(state.cos().sum(), other)
    assert float(unrolled.abs().max()) > 0
    close(implicit, unrolled, 1e-8)


def test_spectrum_of_a_batch_is_that_of_each_graph(close):
    worlds, batch, weights, x = three_graphs(19)
    together = spectrum(worlds[0].system("leaky", batch, weights), x)["eigenvalue"].values
    for k, w in enumerate(worlds):
        alone = spectrum(worlds[0].system("leaky", w.graph, w.weights), w.g)["eigenvalue"].values[0]
        own = torch.from_numpy(together[k])
        close(own[torch.isfinite(own)], torch.from_numpy(alone), 1e-10)


def test_wrong_graphs_and_weights_are_refused():
    w = World(0)
    heads, width, dim = w.bare.query.shape
    with pytest.raises(ValueError, match="graph: expected attention on a graph"):
        w.bare.force(w.g)
    with pytest.raises(TypeError, match="graph: expected a Graph, got Tensor"):
        w.bare.on(w.graph.edges)
    size = w.graph.size
    with pytest.raises(ValueError, match=rf"weights: expected shape \({size}, 2\)"):
        w.bare.on(w.graph, w.weights[1:])
    with pytest.raises(TypeError, match="weights: expected dtype"):
        w.bare.on(w.graph, w.weights.float())
    with pytest.raises(ValueError, match="weights: expected finite values"):
        w.bare.on(w.graph, w.weights * torch.nan)
    with pytest.raises(ValueError, match=r"g: expected shape \(any, 6, any\)"):
        w.attention.force(w.g[:, :5])
    batch = w.bare.on(Graph.batch([w.graph] * 3))
    with pytest.raises(ValueError, match=r"g: expected shape \(3, 6, any\)"):
        batch.force(w.g)
    with pytest.raises(ValueError, match="tokens: expected a mask of 3 samples of 6 tokens"):
        batch.masked(tokens=torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(ValueError, match="keys: expected a mask of 1 samples of 6 tokens"):
        w.attention.masked(keys=torch.ones(1, 5, 5, dtype=torch.bool))
    dense = System(LayerNorm(dim), Attention(dim, heads, width) + Hopfield(dim, 3))
    with pytest.raises(TypeError, match="expected a GraphAttention among its terms, got Attention"):
        dense.on(w.graph)
    with pytest.raises(ValueError, match="system: expected one without masks"):
        w.system().masked(tokens=torch.ones(1, 6, dtype=torch.bool)).on(w.graph)
