"""The node classifier: what forward runs, who sees whom, and what it refuses."""

import copy

import pytest
import torch

import etdyn as ed
from etdyn.graphs import Graph
from etdyn.tasks.anomaly import NodeClassifier, graph_system

SIZES = {"dim": 8, "heads": 2, "head_dim": 4, "memories": 12}
FEATURES, NODES = 5, 12


def build(seed=0, dynamics="et", **options):
    torch.manual_seed(seed)
    system = graph_system(**SIZES, dynamics=dynamics).double()
    model = NodeClassifier(system, FEATURES, **{"steps": 3, "step": 0.4} | options)
    return model.eval().requires_grad_(False)


def path(nodes):
    """0 - 1 - 2 - ..., both directions, with loops."""
    ends = torch.stack([torch.arange(nodes - 1), torch.arange(1, nodes)])
    return Graph.from_edges(torch.cat([ends, ends.flip(0)], 1), nodes, self_loops=True)


@pytest.fixture(scope="module")
def data(random_nodes):
    return random_nodes(NODES, FEATURES, relations=2)


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_logits_are_those_of_the_ends_of_descents(data, close, dynamics):
    model = build(dynamics=dynamics)
    first = model.start(data.features)
    runs = [ed.descend(model.system.on(graph), first, 0.4, 3) for graph in data.graphs]
    expected = model.decode(first, [run.x[-1] for run in runs])
    assert expected.shape == (NODES, 2) and float(expected.std()) > 0.01
    close(model(data.features, data.graphs), expected, 1e-15)
    for run in runs[: dynamics != "sphere"]:
        close(run.x[0], first, 1e-15)


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_logits_do_not_depend_on_the_numbering(data, close, dynamics):
    model, order = build(dynamics=dynamics), torch.randperm(NODES)
    place = order.argsort()
    graphs = [Graph.from_edges(place[graph.edges], NODES) for graph in data.graphs]
    logits = model(data.features, data.graphs)
    close(model(data.features[order], graphs), logits[order], 1e-12)


def test_relations_join_by_the_largest_entry(data, close):
    model, (a, b) = build(head="linear"), data.graphs
    both = model(data.features, [a, b])
    for graphs in ([b, a], [a, b, a], [b, b, a, a]):
        assert torch.equal(model(data.features, graphs), both)
    assert all((model(data.features, [one]) - both).abs().max() > 1e-4 for one in (a, b))
    first = model.start(data.features)
    ends = [ed.descend(model.system.on(g), first, 0.4, 3).x[-1] for g in (a, b)]
    g0, ga, gb = (model.system.activation(x)[0] for x in (first, *ends))
    larger = torch.where(ga > gb, ga, gb)
    assert bool((ga > gb).any()) and bool((gb > ga).any())
    linear = model.head[-1]
    close(both, torch.cat([g0, larger], 1) @ linear.weight.T + linear.bias, 1e-14)


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_step_carries_two_hops(steps):
    """A node is pulled as a key of its neighbours too, and shares them with all their keys."""
    model, n = build(steps=steps, step=1.0), 9
    features = torch.randn(n, FEATURES, dtype=torch.float64)
    found = torch.autograd.functional.jacobian(lambda f: model(f, [path(n)]), features)
    seen = found.abs().amax((1, 3))  # (node, node that is looked at)
    distance = (torch.arange(n) - torch.arange(n)[:, None]).abs()
    assert bool((seen[distance > 2 * steps] == 0).all())
    assert bool((seen[distance <= 2 * steps] > 1e-12).all())


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_a_node_without_edges_is_as_if_alone(random_nodes, close, dynamics):
    model = build(dynamics=dynamics).requires_grad_()
    data = random_nodes(NODES, FEATURES, relations=2, loops=False)
    assert all(int(graph.degrees[0]) == 0 for graph in data.graphs)
    logits = model(data.features, data.graphs)
    alone = Graph.from_edges(torch.zeros(2, 0, dtype=torch.int64), 1)
    close(logits[:1], model(data.features[:1], [alone, alone]), 1e-14)
    logits.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and bool(parameter.grad.isfinite().all()), name
        assert bool(parameter.grad.abs().max() > 0), name


def test_another_system_shares_the_rest(data):
    model = build()
    leaky = model.with_system(model.system.with_dynamics("leaky"))
    before = model(data.features, data.graphs)
    fresh = build(seed=1, dynamics="leaky")
    fresh.load_state_dict(model.state_dict())
    expected = fresh(data.features, data.graphs)
    assert torch.equal(leaky(data.features, data.graphs), expected)
    assert (expected - before).abs().max() > 1e-3
    assert torch.equal(model(data.features, data.graphs), before), "the model is as it was"
    pairs = zip(model.parameters(), leaky.parameters(), strict=True)
    assert all(mine is shared for mine, shared in pairs)
    with pytest.raises(ValueError, match="system: expected dim 8, got 6"):
        model.with_system(graph_system(**SIZES | {"dim": 6}))


def test_any_system_on_graphs_serves(data, close):
    """Attention alone, and a Lagrangian that is no layer norm."""
    torch.manual_seed(0)
    for system in (
        ed.System(ed.LayerNorm(8), ed.GraphAttention(8, 1, 4)).double(),
        ed.System(ed.Quadratic(8), ed.GraphAttention(8, 1, 4), "leaky").double(),
    ):
        model = NodeClassifier(system, FEATURES, steps=4, step=0.3).eval()
        first = model.start(data.features)
        end = ed.descend(system.on(data.graphs[0]), first, 0.3, 4).x[-1]
        close(model(data.features, data.graphs[:1]), model.decode(first, [end]), 1e-15)


def test_dropout_only_in_training(data):
    model = build(dropout=0.5)
    plain = model(data.features, data.graphs)
    assert torch.equal(model(data.features, data.graphs), plain)
    model.train()
    torch.manual_seed(0)
    first, other = (model(data.features, data.graphs) for _ in range(2))
    torch.manual_seed(0)
    assert torch.equal(model(data.features, data.graphs), first)
    assert not torch.equal(first, other) and not torch.equal(first, plain)
    none = build(dropout=0.0).train()
    none.load_state_dict(model.state_dict())
    assert torch.equal(none(data.features, data.graphs), plain)


def test_sizes_and_dtype_are_as_asked(data):
    model = build(classes=3)
    assert model(data.features, data.graphs).shape == (NODES, 3)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    single = copy.deepcopy(model).float()
    logits = single(data.features.float(), data.graphs)
    assert logits.dtype == torch.float32
    assert (logits - model(data.features, data.graphs)).abs().max() < 1e-5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": -1}, "steps: expected an integer >= 0, got -1"),
        ({"step": 0.0}, "step: expected a finite number > 0"),
        ({"dropout": 1.0}, r"dropout: expected a share in \[0, 1\), got 1.0"),
        ({"dropout": -0.1}, "dropout: expected a share"),
        ({"head": "conv"}, "head: expected one of 'mlp', 'linear', got 'conv'"),
        ({"classes": 0}, "classes: expected an integer >= 1, got 0"),
    ],
)
def test_wrong_arguments_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        build(**options)


def test_wrong_input_is_named(data):
    model = build()
    x, graphs = data.features, data.graphs
    with pytest.raises(ValueError, match="features: expected an integer >= 1, got 0"):
        NodeClassifier(model.system, 0)
    with pytest.raises(ValueError, match="graphs: expected a graph for every relation, got none"):
        model(x, [])
    with pytest.raises(ValueError, match=r"features: expected shape \(any, 5\), got .*\(12, 4\)"):
        model(x[:, 1:], graphs)
    with pytest.raises(TypeError, match=r"features: expected dtype torch.float64, got .*float32"):
        model(x.float(), graphs)
    with pytest.raises(ValueError, match=r"features: expected finite values, .* sample 3"):
        model(x.index_fill(0, torch.tensor(3), torch.nan), graphs)
    with pytest.raises(ValueError, match=r"expected shape \(any, 12, any\), as the graph has it"):
        model(x[1:], graphs)
    with pytest.raises(TypeError, match="graph: expected a Graph, got Tensor"):
        model(x, [graphs[0].edges])
    plain = NodeClassifier(ed.EnergyTransformer(**SIZES).double(), FEATURES)
    with pytest.raises(TypeError, match="system: expected a GraphAttention among its terms"):
        plain(x, graphs)
