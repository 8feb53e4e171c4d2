"""The graph classifier: invariances, batching, noise, blocks that descend."""

import pytest
import torch

import etdyn as ed
from etdyn.datasets.graph_sets import GraphSet
from etdyn.tasks.graph_batches import GraphData
from etdyn.tasks.graph_classification import GraphClassifier, et_blocks

SIZES = {"dim": 12, "heads": 2, "head_dim": 6, "memories": 20}


def build(data, seed=0, blocks=2, **options):
    """A model whose edge weights are not trivial."""
    torch.manual_seed(seed)
    options = {"step": 0.4, "steps": 2, "noise": 0.3} | options
    model = GraphClassifier(et_blocks(blocks, **SIZES), data, **options)
    for name, parameter in model.named_parameters():
        if name.startswith("weights."):
            parameter.data.add_(0.5 * torch.randn_like(parameter))
    return model.double().eval().requires_grad_(False)


def renumbered(graphs, seed=0):
    """The same graphs with nodes in another order, and the order of each."""
    rng = torch.Generator().manual_seed(seed)
    features, edges, orders = [], [], []
    for f, e in zip(graphs.features, graphs.edges, strict=True):
        new = torch.randperm(len(f), generator=rng)
        features.append(f[new.argsort()])
        edges.append(new[e])
        orders.append(new)
    moved = GraphSet(features, edges, graphs.edge_features, graphs.labels, graphs.name)
    return moved, orders


@pytest.fixture(scope="module")
def graphs(random_graphs):
    return random_graphs()


@pytest.fixture(scope="module")
def data(graphs):
    return GraphData(graphs, k=4)


ROWS = [5, 1, 0, 3]


@pytest.mark.parametrize("edge_weights", ["pairwise", "none"])
def test_logits_and_weights_do_not_depend_on_the_numbering(graphs, data, close, edge_weights):
    moved, _ = renumbered(graphs)
    model = build(data, edge_weights=edge_weights)
    first, second = data.batch(ROWS).double(), GraphData(moved, k=4).batch(ROWS).double()
    # positions were rounded to float32 after sums in another order
    second.positions.copy_(_renumber(first, renumbered(graphs)[1]))
    close(model(second), model(first), 1e-12)
    if edge_weights == "pairwise":
        ends = _pairs(model, first), _pairs(model, second)
        assert torch.allclose(ends[0], ends[1], rtol=0, atol=1e-12)
        assert ends[0].std() > 0.1


def _renumber(batch, orders):
    """The positions of a batch, with nodes in another order."""
    parts = batch.positions.split((batch.sizes + 1).tolist())
    return torch.cat([
        torch.cat([part[:1], part[1:][orders[row].argsort()]])
        for part, row in zip(parts, ROWS, strict=True)
    ])  # fmt: skip


def _pairs(model, batch):
    """The weights, sorted within each graph, so that they can be compared as sets."""
    weights = model.weights(model.tokens(batch), batch)
    parts = [weights[batch.pair_owner == g].sort(0).values for g in range(len(batch.cls))]
    return torch.cat(parts)


def test_the_published_convolution_depends_on_the_numbering(graphs, data):
    moved, _ = renumbered(graphs)
    model = build(data, edge_weights="convolution")
    first, second = data.batch(ROWS).double(), GraphData(moved, k=4).batch(ROWS).double()
    assert (model(first) - model(second)).abs().max() > 1e-3


@pytest.mark.parametrize("edge_weights", ["pairwise", "convolution"])
@pytest.mark.parametrize("positions", ["walk", "laplacian"])
def test_union_padded_and_alone_are_the_same(graphs, close, edge_weights, positions):
    data = GraphData(graphs, positions, k=4)
    model = build(data, edge_weights=edge_weights)
    together = model(data.batch(ROWS).double())
    close(model(data.batch(ROWS, padded=True).double()), together, 1e-12)
    close(torch.cat([model(data.batch([row]).double()) for row in ROWS]), together, 1e-12)
    close(model(data.batch(ROWS[::-1]).double()).flip(0), together, 1e-12)


def test_the_untrained_weights_are_those_of_plain_attention(data):
    torch.manual_seed(0)
    model = GraphClassifier(et_blocks(1, **SIZES), data)
    batch = data.batch(ROWS)
    weights = model.weights(model.tokens(batch), batch)
    assert torch.equal(weights, torch.ones(batch.graph.size, 2))


def test_weights_are_those_of_the_formula(data):
    """(a_h <x_c, x_b> / dim + b_h) (1 + U f_cb)_h, pair by pair."""
    model, batch = build(data), data.batch(ROWS).double()
    x, part = model.tokens(batch), model.weights
    keys, queries = batch.graph.edges
    alike = (x[0, keys] * x[0, queries]).sum(1, keepdim=True) / 12
    factor = 1 + batch.pair_features @ part.pair.weight.T
    assert (part(x, batch) - (alike * part.alike + part.bias) * factor).abs().max() < 1e-14


def test_convolution_is_the_one_over_the_grid(data):
    """For one pair of one graph by hand: What_cb = sum of the 3 x 3 kernel times X X^T / dim."""
    model = build(data, edge_weights="convolution")
    batch = data.batch([0]).double()
    x = model.tokens(batch)
    kernel = model.weights.convolution
    pair = int(((batch.graph.keys == 2) & (batch.graph.queries == 0)).nonzero()[0])
    grid = x[0] @ x[0].T / x.shape[2]
    part = (grid[0:2, 1:4] * kernel.weight[:, 0, 1:, :]).sum((1, 2)) + kernel.bias  # row 0: an edge
    expected = part * (1 + model.weights.pair(batch.pair_features[pair]))
    assert (model.weights(x, batch)[pair] - expected).abs().max() < 1e-14


def test_solutions_are_the_blocks_that_forward_runs(data, close):
    model = build(data)
    batch = data.batch(ROWS, padded=True).double()
    found = model.solutions(batch)
    x, systems = model.start(batch)
    assert [s.x.shape for s in found] == [(3, *x.shape)] * 2
    for solution, system in zip(found, systems, strict=True):
        close(ed.descend(system, x, 0.4, 2).x, solution.x, 1e-15)
        x = solution.x[-1]
    close(model.read_out(x, batch), model(batch), 1e-15)
    assert set(found[0].to_xarray().data_vars) >= {"x", "energy", "energy_attention"}


def test_energy_falls_in_every_graph(data):
    model = build(data, steps=40, step=0.01)
    for solution in model.solutions(data.batch(ROWS, padded=True).double()):
        energy = torch.stack([solution.system.energy(x) for x in solution.x])
        assert bool((energy.diff(dim=0) < 0).all())


def test_noise_and_signs_only_in_training(graphs):
    data = GraphData(graphs, "laplacian", k=4)
    model, batch = build(data), data.batch(ROWS).double()
    assert torch.equal(model(batch, torch.Generator()), model(batch))
    model.train()
    plain = model(batch)
    a, b, other = (model(batch, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, other) and not torch.equal(a, plain)
    state = torch.random.get_rng_state()
    model(batch, torch.Generator())
    assert torch.equal(torch.random.get_rng_state(), state), "the global state is not touched"


def test_noise_is_drawn_for_each_graph(data):
    """Two copies of a graph in one batch get different noise (ET defect 16)."""
    model = build(data).train()
    batch = data.batch([0, 0, 0]).double()
    logits = model(batch, torch.Generator().manual_seed(0))
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert (logits[1] - logits[2]).abs().max() > 1e-3
    assert torch.equal(model(batch)[0], model(batch)[1])


def test_signs_flip_whole_eigenvectors_of_each_graph(graphs):
    data = GraphData(graphs, "laplacian", k=4)
    model, batch = build(data), data.batch([0, 0, 3]).double()
    with torch.no_grad():
        model.tokens.position.weight.copy_(torch.eye(12, 4))  # so that tokens show positions
    plain, drawn = model.tokens(batch), [set(), set(), set()]
    for seed in range(20):
        x = model.tokens(batch, torch.Generator().manual_seed(seed))
        change = (x - plain)[0]
        assert not bool(change[:, 4:].any())
        for owner, seen in enumerate(drawn):
            mine = batch.token_owner == owner
            flipped = change[mine, :4].abs().amax(0) > 1e-9
            expected = -2 * batch.positions[mine] * flipped
            assert torch.allclose(change[mine, :4], expected, rtol=0, atol=1e-12)
            seen.add(tuple(flipped.tolist()))
    assert all(len(seen) > 8 for seen in drawn[:2]), "of 16"
    assert drawn[0] != drawn[1]


def test_walk_positions_are_never_flipped(data):
    model, batch = build(data).train(), data.batch(ROWS).double()
    assert torch.equal(model.tokens(batch, torch.Generator()), model.tokens(batch))


def test_gradients_reach_every_parameter(data):
    model = build(data).requires_grad_().train()
    batch = data.batch(ROWS).double()
    model(batch, torch.Generator()).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.abs().max() > 0), name


def test_every_block_has_the_weights(data):
    model, batch = build(data), data.batch(ROWS).double()
    x, systems = model.start(batch)
    weights = model.weights(x, batch)
    assert len(systems) == 2
    assert all(torch.equal(system.attention.weights, weights) for system in systems)


def test_read_out_is_linear_in_cls_mean_and_sum(data):
    model, batch = build(data), data.batch(ROWS).double()
    x = torch.randn(1, len(batch.positions), 12, dtype=torch.float64)
    for place, tokens in enumerate(x[0].split((batch.sizes + 1).tolist())):
        parts = torch.cat([tokens[0], tokens[1:].mean(0), tokens[1:].sum(0) / 16])
        expected = model.read_out.linear(parts)
        assert (model.read_out(x, batch)[place] - expected).abs().max() < 1e-14


def test_published_read_out_sees_only_cls(data):
    model, batch = build(data, nodes=False), data.batch(ROWS).double()
    x, _ = model.start(batch)
    moved = x.clone()
    moved[0, batch.nodes] += 1
    assert torch.equal(model.read_out(moved, batch), model.read_out(x, batch))
    assert model.read_out.linear.in_features == 12


@pytest.mark.parametrize(
    ("blocks", "options", "message"),
    [
        ([], {}, "blocks: expected at least one system"),
        ([*et_blocks(1, **SIZES), *et_blocks(1, **SIZES | {"dim": 8})], {}, "blocks: .*one dim"),
        ([*et_blocks(1, **SIZES), *et_blocks(1, **SIZES | {"heads": 3})], {}, "as many heads"),
        ([ed.EnergyTransformer(**SIZES)], {}, "a GraphAttention in each"),
        (et_blocks(1, **SIZES), {"edge_weights": "dense"}, "edge_weights: expected one of"),
        (et_blocks(1, **SIZES), {"steps": 0}, "steps: expected an integer >= 1"),
        (et_blocks(1, **SIZES), {"step": -1}, "step: expected a finite number > 0"),
        (et_blocks(1, **SIZES), {"noise": -1}, "noise: expected a finite number >= 0"),
    ],
)
def test_wrong_arguments_are_named(data, blocks, options, message):
    with pytest.raises(ValueError, match=message):
        GraphClassifier(blocks, data, **options)
