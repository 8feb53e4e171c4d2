"""Completion of hidden nodes, and scores that saw no label."""

import math

import pytest
import torch

import etdyn as ed
from etdyn.graphs import Graph
from etdyn.tasks.anomaly import graph_system
from etdyn.tasks.node_completion import (
    CompletionRecipe,
    NodeCompletion,
    fit_completion,
    node_scores,
)
from etdyn.tasks.node_data import NodeData

FEATURES = 5


def build(features=FEATURES, seed=0, dynamics="et", **options):
    torch.manual_seed(seed)
    sizes = {"dim": 12, "heads": 2, "head_dim": 4, "memories": 16}
    system = graph_system(**sizes, dynamics=dynamics).double()
    return NodeCompletion(system, features, **options)


@pytest.fixture(scope="module")
def data(random_nodes):
    return random_nodes(14, FEATURES, relations=2)


@pytest.fixture(scope="module")
def smooth():
    """A ring of 50 nodes whose four features, of unit variance, change slowly along it."""
    n = 50
    angle = 2 * math.pi * torch.arange(n, dtype=torch.float64) / n
    x = math.sqrt(2) * torch.stack([angle.sin(), angle.cos(), (2 * angle).sin(), (3 * angle).cos()])
    ends = torch.cat([
        torch.stack([torch.arange(n), (torch.arange(n) + hop) % n]) for hop in (1, 2)
    ], 1)  # fmt: skip
    graph = Graph.from_edges(torch.cat([ends, ends.flip(0)], 1), n, self_loops=True)
    return NodeData(x.T.contiguous(), (graph,), torch.zeros(n).long(), "smooth")


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_completion_is_the_decoded_end_of_a_descent(data, close, dynamics):
    model, graph = build(dynamics=dynamics, steps=3, step=0.4), data.graphs[0]
    hidden = torch.arange(14) % 3 == 0
    x0 = model.encoder(data.features)
    x0[hidden] = model.mask_token
    x = ed.descend(model.system.on(graph), x0[None], 0.4, 3).x[-1]
    close(model.descend(data.features, graph, hidden), x, 1e-15)
    close(model(data.features, graph, hidden), model.decoder(model.system.activation(x))[0], 1e-15)


def test_what_is_hidden_is_not_seen(data):
    """Neither by its own completion nor by any other; what is not hidden is."""
    model, hidden = build(), torch.arange(14) % 2 == 0
    found = torch.autograd.functional.jacobian(
        lambda f: model(f, data.graphs[0], hidden), data.features
    ).abs().amax((1, 3))  # fmt: skip
    assert bool((found[:, hidden] == 0).all())
    others = found[:, ~hidden] > 1e-12
    assert bool(others.any(1)[1:].all()), "all but the node without edges see something"
    assert not bool(others[0].any())
    poisoned = data.features.clone()
    poisoned[hidden] = 1e6
    a, b = (model(x, data.graphs[0], hidden) for x in (data.features, poisoned))
    assert torch.equal(a, b)


@pytest.mark.parametrize("dynamics", ["et", "leaky"])
def test_energies_of_nodes_sum_to_the_energy(data, close, dynamics):
    model = build(dynamics=dynamics)
    found = node_scores(model, data)
    assert set(found) == {"completion error", "attention energy", "hopfield energy", "energy"}
    assert all(score.shape == (14,) and not score.requires_grad for score in found.values())
    x = model.descend(data.features, data.graphs[0], torch.zeros(14) > 0)
    system = model.system.on(data.graphs[0])
    close(found["energy"].sum()[None], system.interaction_energy(x, relative=True), 1e-13)
    terms = system.energies(x, relative=True)
    for name in ("attention", "hopfield"):
        close(found[f"{name} energy"].sum()[None], terms[name], 1e-13)
        assert float(found[f"{name} energy"].std()) > 1e-3
    assert (found["energy"].sum() - system.interaction_energy(x)).abs() > 1, "another zero"
    isolated = NodeData(data.features[:1], (Graph.from_edges(torch.tensor([[0], [0]]), 1),),
                        data.labels[:1], "alone")  # fmt: skip
    alone = node_scores(model, isolated)
    for name in ("energy", "attention energy"):
        close(alone[name], found[name][:1], 1e-12)


@pytest.mark.parametrize("draws", [1, 2, 7])
def test_every_node_is_hidden_alike_often(data, close, draws):
    """Without a step every completion is the decoded mask token, so the error is known."""
    model = build(steps=0)
    constant = model.decoder(model.system.activation(model.mask_token[None, None]))[0]
    expected = (constant - data.features).square().mean(1)
    close(node_scores(model, data, draws)["completion error"], expected, 1e-14)


def test_training_completes_from_the_neighbours(smooth):
    """The mean of the features has an error of one."""
    model = build(4)
    before = node_scores(model, smooth)["completion error"].mean()
    losses = fit_completion(model, smooth, CompletionRecipe(epochs=80))
    after = node_scores(model, smooth)["completion error"].mean()
    assert len(losses) == 80 and losses[0] > 0.9 and sum(losses[-10:]) / 10 < 0.4
    assert before > 0.9 and after < 0.4
    odd = smooth.features.clone()
    odd[17] = -odd[17]
    scores = node_scores(model, NodeData(odd, smooth.graphs, smooth.labels, "odd"))
    assert int(scores["completion error"].argmax()) == 17, "a node that does not belong"


def test_labels_are_never_read(smooth):
    poisoned = NodeData(smooth.features, smooth.graphs, smooth.labels - 7, "poisoned")
    fitted = []
    for data in (smooth, poisoned):
        model = build(4)
        losses = fit_completion(model, data, CompletionRecipe(epochs=4))
        fitted.append((losses, node_scores(model, data)))
    (one, first), (two, second) = fitted
    assert one == two and all(torch.equal(first[name], second[name]) for name in first)


def test_a_seed_gives_one_training_and_leaves_the_global_state(smooth):
    runs = []
    for seed in (0, 0, 1):
        model = build(4)
        state = torch.random.get_rng_state()
        losses = fit_completion(model, smooth, CompletionRecipe(epochs=3), seed)
        scores = node_scores(model, smooth, seed=seed)["completion error"]
        assert torch.equal(torch.random.get_rng_state(), state)
        runs.append((losses, scores))
    assert runs[0][0] == runs[1][0] and torch.equal(runs[0][1], runs[1][1])
    assert runs[0][0] != runs[2][0]


def test_wrong_input_is_named(data):
    model, graph, hidden = build(), data.graphs[0], torch.zeros(14) > 0
    with pytest.raises(ValueError, match=r"features: expected shape \(any, 5\)"):
        model(data.features[:, :4], graph, hidden)
    with pytest.raises(TypeError, match=r"features: expected dtype torch\.float64"):
        model(data.features.float(), graph, hidden)
    with pytest.raises(ValueError, match="features: expected finite values"):
        model(data.features * torch.nan, graph, hidden)
    with pytest.raises(ValueError, match="draws: expected an integer >= 1"):
        node_scores(model, data, draws=0)
    for options, message in (
        ({"epochs": 0}, "epochs: expected an integer >= 1"),
        ({"lr": 0.0}, "lr: expected a finite number > 0"),
        ({"hidden": 1.0}, r"hidden: expected a share in \(0, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            CompletionRecipe(**options)
    with pytest.raises(ValueError, match="steps: expected an integer >= 0"):
        build(steps=-1)
