"""Every solver and gradient on graphs: dense attention's numbers under a mask, each graph's own."""

import numpy as np
import pytest
import torch

import etdyn as ed
from etdyn import store
from etdyn.solve import Interpolant, iterate
from etdyn.solve.descent import descent_bound

F64 = torch.float64
LAWS = ["et", "leaky", "sphere"]
DIM, HEADS = 4, 2
SIZES = (3, 5, 4)
FIXED = ed.available_methods(fixed_step=True)
ADAPTIVE = ed.available_methods(fixed_step=False)
ALONE_TO_ROUNDING = [*FIXED, *(m for m in ADAPTIVE if m.startswith("batched_"))]
GRADIENTS = ["direct", "checkpoint", "backsolve"]


def drawn(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def adjacency_of(nodes, seed):
    """A directed graph with a row without edges; entry (query, key)."""
    seen = torch.rand(nodes, nodes, generator=torch.Generator().manual_seed(seed)) < 0.6
    seen[seed % nodes] = False
    return seen


def graph_of(adjacency):
    return ed.Graph.from_edges(adjacency.nonzero().T.flip(0), len(adjacency))


def build(kind, law, **options):
    torch.manual_seed(0)
    attention = kind(DIM, HEADS, 3, 0.7, **options)
    memories = ed.Hopfield(DIM, 6, "softmax", beta=2.0)
    return ed.System(ed.LayerNorm(DIM, 1e-2), attention + memories, law).double()


def directed(law):
    """A graph and the same pairs as a key mask of dense attention; states."""
    seen = adjacency_of(5, 2)
    dense = build(ed.Attention, law, self_attention=True).masked(keys=seen[None])
    return build(ed.GraphAttention, law).on(graph_of(seen)), dense, drawn(3, 2, 5, DIM)


def packed(law):
    """A batch of weighted graphs of several sizes, each of them alone, and states."""
    graphs = [graph_of(adjacency_of(n, 5 + n)) for n in SIZES]
    weights = [drawn(20 + k, g.size, HEADS) for k, g in enumerate(graphs)]
    system = build(ed.GraphAttention, law)
    together = system.on(ed.Graph.batch(graphs), torch.cat(weights))
    alone = [system.on(g, w) for g, w in zip(graphs, weights, strict=True)]
    x = 30 * drawn(3, len(SIZES), max(SIZES), DIM)  # so that padding is large
    for k, n in enumerate(SIZES):
        x[k, :n] /= 30
    return together, alone, x


def method_of(name):
    """Adaptive ones to 1e-6; the multistep ones and the midpoint rule converge to rounding."""
    if name not in FIXED:
        return ed.Method(name, rtol=1e-6, atol=1e-6)
    return ed.Method(name, 0.05, rtol=1e-13, atol=1e-13)


def run(system, x, name, times=(0.0, 0.1, 0.3), **options):
    return ed.solve(system, x, times, method_of(name), gradient=None, **options)


# --- flows and the discrete model ----------------------------------------------------------------


@pytest.mark.parametrize("name", [*FIXED, *ADAPTIVE])
def test_a_graph_moves_as_dense_attention_under_a_mask(close, name):
    for law in LAWS:
        sparse, dense, x = directed(law)
        found, expected = run(sparse, x, name), run(dense, x, name)
        assert torch.equal(found.status, expected.status)
        close(found.x, expected.x, 1e-12 if name in FIXED else 1e-8)


@pytest.mark.parametrize("name", [*FIXED, *ADAPTIVE])
def test_a_batch_of_graphs_moves_as_each_alone(close, name):
    """To rounding, padding and neighbours notwithstanding; with a shared step to its tolerance."""
    rel = 1e-11 if name in ALONE_TO_ROUNDING else 1e-3
    for law in LAWS:
        together, alone, x = packed(law)
        found = run(together, x, name)
        for k, (n, system) in enumerate(zip(SIZES, alone, strict=True)):
            own = run(system, x[k : k + 1, :n], name)
            close(found.x[:, k, :n], own.x[:, 0], rel)
            # torchdiffeq interpolates what stands still
            np.testing.assert_allclose(found.x[-1, k, n:], x[k, n:], rtol=1e-14)
            if name.startswith("batched_"):
                assert found.stats.evaluations[k] == own.stats.evaluations[0]


@pytest.mark.parametrize(
    ("name", "gradient"),
    [(m, None) for m in ADAPTIVE if m != "scipy_solver"]  # which has its own norm
    + [("dopri5", g) for g in ("direct", "checkpoint", "backsolve")],
)
def test_padding_changes_no_step(close, name, gradient):
    """Absent tokens, far away: the same steps and, to rounding, states and gradients."""
    x, edges = drawn(3, 1, 5, DIM), graph_of(adjacency_of(5, 2)).edges
    room = torch.cat([x, 1e3 * drawn(4, 1, 20, DIM)], 1)
    system, present = build(ed.GraphAttention, "et"), torch.arange(25)[None] < 5
    padded = system.on(ed.Graph.from_edges(edges, 25)).masked(tokens=present)
    found, counts = [], []
    for each, x0 in ((system.on(ed.Graph.from_edges(edges, 5)), x), (padded, room)):
        start = x0.clone().requires_grad_(gradient is not None)
        solution = ed.solve(each, start, (0.0, 0.1, 0.3), method_of(name), gradient=gradient)
        parts = [solution.x[:, :, :5].detach()]
        if gradient is not None:
            loss = each.activation(solution.x[-1])[:, :5].pow(3).sum()
            of_start, *rest = torch.autograd.grad(loss, [start, *parameters(system)])
            parts += [of_start[:, :5], *rest]
        found.append(parts)
        counts.append(int(torch.as_tensor(solution.stats.evaluations).sum()))
    assert counts[0] == counts[1]
    for own, with_room in zip(*found, strict=True):
        close(with_room, own, 1e-10)


@pytest.mark.parametrize("law", LAWS)
def test_the_discrete_model_and_its_noise(close, law):
    """Noise is drawn for the whole batch, so that it is that of dense attention."""
    sparse, dense, x = directed(law)
    for options in ({}, {"noise": 0.1}):
        pair = [
            ed.descend(s, x, 0.1, 5, generator=torch.Generator().manual_seed(0), **options)
            if options else ed.descend(s, x, 0.1, 5)
            for s in (sparse, dense)
        ]  # fmt: skip
        close(pair[0].x, pair[1].x)
    steps = torch.tensor([0.1, 0.2], dtype=F64)
    for a, b in zip(iterate(sparse, sparse.prepare(x), steps, 3),
                    iterate(dense, dense.prepare(x), steps, 3), strict=True):  # fmt: skip
        close(a, b)
    noisy = [
        ed.solve(s, x, [0.0, 0.1], ed.Method("mirror_langevin", 0.01, options={
            "temperature": 0.1, "seed": 0}), gradient=None)
        for s in (sparse, dense)
    ]  # fmt: skip
    close(noisy[0].x, noisy[1].x)
    together, _, x = packed(law)
    moved = ed.solve(together, x, [0.0, 0.1], ed.Method("mirror_langevin", 0.01, options={
        "temperature": 0.1, "seed": 0}), gradient=None).x[-1]  # fmt: skip
    for k, n in enumerate(SIZES):
        assert torch.equal(moved[k, n:], x[k, n:]) and not torch.equal(moved[k, :n], x[k, :n])


@pytest.mark.parametrize("law", LAWS)
def test_f11_energy_falls(law):
    together, _, x = packed(law)
    times = torch.linspace(0, 0.5, 6)
    for name in ("dopri5", "discrete_gradient", "guarded_euler"):
        found = run(together, x, name, times)
        energy = torch.stack([together.energy(state) for state in found.x])
        assert (energy.diff(dim=0) < 0).all(), name


@pytest.mark.parametrize("law", LAWS)
def test_f20_the_descent_bound_of_each_is_its_own(close, law):
    """Neighbours and padding do not count; within it no energy rises."""
    together, alone, x = packed(law)
    x = together.prepare(x)
    bound = descent_bound(together, x)
    for k, (n, system) in enumerate(zip(SIZES, alone, strict=True)):
        close(bound[k : k + 1], descent_bound(system, x[k : k + 1, :n]))
    moved = next(iterate(together, x, bound, 1))
    assert (together.energy(moved) <= together.energy(x) + 1e-12).all()


def test_stops_observables_and_storage(close, tmp_path):
    together, alone, x = packed("leaky")
    stop = ed.Stop(1e-2)
    times = torch.arange(0.0, 60.0, 10.0)
    found = ed.solve(together, x, times, "batched_dopri5", stop=stop, gradient=None)
    assert set(found.status.tolist()) == {ed.Status.EQUILIBRIUM}
    lean = ed.solve(together, x, times, "batched_dopri5", stop=stop, gradient=None,
                    save=["residual", "energies"])  # fmt: skip
    for k, (n, system) in enumerate(zip(SIZES, alone, strict=True)):
        own = ed.solve(system, x[k : k + 1, :n], times, "batched_dopri5", stop=stop, gradient=None)
        close(found.ends[0][k], own.ends[0][0], 1e-8)
        close(found.ends[1][k, :n], own.ends[1][0], 1e-8)
    data = found.to_xarray()
    np.testing.assert_array_equal(data.x.values, found.x)
    for each in (data, lean.to_xarray()):
        store.save(each, tmp_path / "run")
        assert store.load(tmp_path / "run").identical(each)


def test_interpolants(close):
    together, alone, x = packed("et")
    between = Interpolant(run(together, x, "rk4"))([0.05, 0.2, 0.3])
    for k, (n, system) in enumerate(zip(SIZES, alone, strict=True)):
        own = Interpolant(run(system, x[k : k + 1, :n], "rk4"))
        close(between[k, :n], own([0.05, 0.2, 0.3][k])[0])


# --- equilibria ----------------------------------------------------------------------------------


SEARCHES = ["map", "anderson", "newton-krylov", "flow"]


@pytest.mark.parametrize(
    ("method", "law"),
    [(m, law) for m in SEARCHES for law in ("leaky", "sphere") if (m, law) != ("flow", "sphere")]
    + [pytest.param("flow", "sphere", marks=pytest.mark.slow)],
)
def test_equilibria(close, method, law):
    """Dense attention's, and each graph's own; padding of size 30 costs no evaluation."""
    sparse, dense, x = directed(law)
    pair = [ed.find_equilibrium(s, x, method, tol=1e-6) for s in (sparse, dense)]
    assert pair[0].converged.all()
    close(pair[0].x, pair[1].x, 1e-5)
    together, alone, x = packed(law)
    found = ed.find_equilibrium(together, x, method, tol=1e-6)
    assert found.converged.all()
    for k, (n, system) in enumerate(zip(SIZES, alone, strict=True)):
        own = ed.find_equilibrium(system, x[k : k + 1, :n], method, tol=1e-6)
        close(found.x[k, :n], own.x[0], 1e-5)
        if method != "newton-krylov":  # whose linear solves end at a threshold
            assert found.evaluations[k] == own.evaluations[0]


# --- gradients -----------------------------------------------------------------------------------


def parameters(system):
    return [p for p in system.parameters() if p.requires_grad]


def gradients(system, x, gradient, name="rk4"):
    solution = ed.solve(system, x, [0.0, 0.2], method_of(name), gradient=gradient)
    loss = system.keep(system.activation(solution.x[-1])).pow(3).sum()
    return torch.autograd.grad(loss, parameters(system))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_are_those_of_dense_attention(close, law, gradient):
    sparse, dense, x = directed(law)
    found, exact = gradients(sparse, x, gradient), gradients(dense, x, gradient)
    for a, b, direct in zip(found, exact, gradients(dense, x, "direct"), strict=True):
        close(a, b, 1e-11)
        close(a, direct, 1e-3 if gradient == "backsolve" else 1e-12)


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_gradients_of_a_batch_of_graphs_add_up(close, gradient):
    """Those of weights are each graph's own. Backwards in time samples share their anchors, which
    shows below the error that rk4 has there (1e-3).
    """
    rel = 1e-4 if gradient == "backsolve" else 1e-11
    graphs = [graph_of(adjacency_of(n, 5 + n)) for n in SIZES]
    weights = [drawn(20 + k, g.size, HEADS).requires_grad_() for k, g in enumerate(graphs)]
    system, (_, _, x) = build(ed.GraphAttention, "leaky"), packed("leaky")
    whole = torch.cat(weights).detach().requires_grad_()
    found = gradients(system.on(ed.Graph.batch(graphs), whole), x, gradient)
    total = None
    for k, n in enumerate(SIZES):
        own = gradients(system.on(graphs[k], weights[k]), x[k : k + 1, :n], gradient)
        *shared, of_weights = _weights_last(system.on(graphs[k], weights[k]), own)
        total = shared if total is None else [a + b for a, b in zip(total, shared, strict=True)]
        begin = sum(g.size for g in graphs[:k])
        *_, mine = _weights_last(system.on(ed.Graph.batch(graphs), whole), found)
        close(mine[begin : begin + graphs[k].size], of_weights, rel)
    *shared, _ = _weights_last(system.on(ed.Graph.batch(graphs), whole), found)
    for a, b in zip(shared, total, strict=True):
        close(a, b, rel)


def _weights_last(system, values):
    """The gradients with that of the edge weights at the end."""
    names = [name for name, p in system.named_parameters() if p.requires_grad]
    place = names.index("attention.weights")
    return [v for k, v in enumerate(values) if k != place] + [values[place]]


@pytest.mark.parametrize("name", ["batched_dopri5", "dopri5"])
def test_gradients_through_adaptive_steps(close, name):
    sparse, dense, x = directed("leaky")
    for a, b in zip(gradients(sparse, x, "direct", name), gradients(dense, x, "direct", name),
                    strict=True):  # fmt: skip
        close(a, b, 1e-8)


def test_implicit_gradients(close):
    """At the equilibrium, of the parameters, dense attention's; of a batch, their sum."""

    def of(system, x):
        found = ed.find_equilibrium(system, x, tol=1e-11, gradient="implicit")
        loss = system.keep(system.activation(found.x)).pow(3).sum()
        return torch.autograd.grad(loss, parameters(system))

    sparse, dense, x = directed("leaky")
    for a, b in zip(of(sparse, x), of(dense, x), strict=True):
        close(a, b, 1e-7)
    together, alone, x = packed("leaky")
    own = [of(s, x[k : k + 1, :n]) for k, (n, s) in enumerate(zip(SIZES, alone, strict=True))]
    for a, *parts in zip(of(together, x), *own, strict=True):
        close(a, sum(parts), 1e-7)


def test_results_say_over_which_graph():
    """Two results of one system over two graphs do not look the same."""
    system, _, x = directed("et")
    graphs = [graph_of(adjacency_of(5, 3)), graph_of(adjacency_of(5, 4))]
    assert graphs[0].size != graphs[1].size
    for graph in graphs:
        solution = ed.descend(system.on(graph), x, 0.1, 1)
        record = solution.to_xarray(states=False).attrs["etdyn_config"]
        assert f"Graph(5 nodes, {graph.size} edges)" in record
