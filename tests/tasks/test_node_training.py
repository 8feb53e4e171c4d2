"""Training of node classifiers: what it looks at, what it keeps, what it counts."""

import copy
import itertools
import math

import pytest
import torch
from torch import nn

from etdyn.graphs import Graph
from etdyn.tasks.anomaly import NodeClassifier, graph_system
from etdyn.tasks.detection import NodeSplit, detection_scores, split_nodes
from etdyn.tasks.loop import warmup_cosine
from etdyn.tasks.memory import saved_bytes
from etdyn.tasks.node_baselines import GCN, MLP
from etdyn.tasks.node_data import NodeData
from etdyn.tasks.node_training import NodeRecipe, anomaly_probability, fit_nodes


def classifier(data, seed=0, **sizes):
    torch.manual_seed(seed)
    sizes = {"dim": 16, "heads": 2, "head_dim": 8, "memories": 16} | sizes
    return NodeClassifier(graph_system(**sizes), data.features.shape[1], steps=2, step=0.5)


@pytest.fixture(scope="module")
def neighbours():
    """300 nodes on a ring with chords; a node is an anomaly where the first features of its four
    neighbours have a large mean. Its own features say nothing."""
    n, rng = 300, torch.Generator().manual_seed(0)
    ring, chords = torch.arange(n), torch.randperm(n, generator=rng)
    ends = torch.cat([
        torch.stack([ring, (ring + 1) % n]), torch.stack([chords, chords.roll(1)])
    ], 1)  # fmt: skip
    edges = torch.cat([ends, ends.flip(0)], 1).unique(dim=1)
    x = torch.randn(n, 3, generator=rng)
    mean = torch.zeros(n).index_add(0, edges[1], x[edges[0], 0]) / edges[1].bincount()
    labels = (mean > mean.quantile(0.7)).long()
    labels[torch.rand(n, generator=rng) < 0.1] = -1
    return NodeData(x, (Graph.from_edges(edges, n, self_loops=True),), labels, "neighbours")


@pytest.fixture(scope="module")
def split(neighbours):
    return split_nodes(neighbours.labels, 0.5)


SHORT = NodeRecipe(epochs=6, evaluate_every=2)
SAMPLED = NodeRecipe(epochs=3, evaluate_every=1, batch=50, fanout=3)


def same(one, other):
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_neighbours_features_are_learnt_and_own_ones_do_not_tell(neighbours, split):
    """The label is hidden from a perceptron, and plain to a descent on the graph."""
    recipe = NodeRecipe(epochs=70, edge_dropout=0.0, evaluate_every=10)
    torch.manual_seed(0)
    models = {"et": classifier(neighbours), "mlp": MLP(3, dim=16)}
    found = {}
    for name, model in models.items():
        fit = fit_nodes(model, neighbours, split, recipe)
        p = anomaly_probability(fit.model, neighbours)
        found[name] = detection_scores(neighbours.labels, p, split)["roc_auc"]
    assert found["et"] > 0.9, found
    assert abs(found["mlp"] - 0.5) < 0.1, found


def test_sampled_neighbourhoods_teach_the_same(neighbours, split):
    recipe = NodeRecipe(epochs=20, batch=35, fanout=16)
    fit = fit_nodes(classifier(neighbours), neighbours, split, recipe)
    p = anomaly_probability(fit.model, neighbours)
    found = detection_scores(neighbours.labels, p, split)
    assert found["roc_auc"] > 0.8, found


@pytest.mark.parametrize("recipe", [SHORT, SAMPLED])
def test_test_labels_and_missing_ones_change_no_bit(neighbours, split, recipe):
    poisoned = neighbours.labels.clone()
    hidden = torch.cat([split.test, (poisoned < 0).nonzero().flatten()])
    poisoned[hidden] = 1 - poisoned[hidden].clamp(min=0)
    other = NodeData(neighbours.features, neighbours.graphs, poisoned, "poisoned")
    one, two = (fit_nodes(classifier(data), data, split, recipe) for data in (neighbours, other))
    assert same(one.model, two.model) and one.history == two.history
    train = split.train[neighbours.labels[split.train] == 1][:3]
    poisoned = neighbours.labels.index_fill(0, train, 0)
    other = NodeData(neighbours.features, neighbours.graphs, poisoned, "poisoned")
    assert not same(one.model, fit_nodes(classifier(other), other, split, recipe).model)


@pytest.mark.parametrize("recipe", [SHORT, SAMPLED])
def test_a_seed_gives_one_model_and_leaves_the_global_state(neighbours, split, recipe):
    fits = []
    for k, seed in enumerate((0, 0, 1)):
        model = classifier(neighbours)
        torch.manual_seed(10 + k)  # must not matter
        state = torch.random.get_rng_state()
        fits.append(fit_nodes(model, neighbours, split, recipe, seed))
        assert torch.equal(torch.random.get_rng_state(), state)
    one, again, other = fits
    assert same(one.model, again.model) and one.history == again.history
    assert not same(one.model, other.model)


@pytest.mark.parametrize("recipe", [NodeRecipe(epochs=21, evaluate_every=4, lr=0.3), SAMPLED])
@pytest.mark.parametrize("network", [classifier, lambda data: GCN(3, dim=8)])
def test_the_kept_model_is_the_best_one_seen(neighbours, split, recipe, network):
    torch.manual_seed(0)
    model = network(neighbours)
    fit = fit_nodes(model, neighbours, split, recipe)
    assert fit.model is model and not model.training
    p = anomaly_probability(model, neighbours)
    again = detection_scores(neighbours.labels, p, split)["validation_roc_auc"]
    seen = [row["validation_roc_auc"] for row in fit.history]
    assert again == max(seen) and len(set(seen)) > 1
    looks = range(recipe.evaluate_every, recipe.epochs + 1, recipe.evaluate_every)
    assert [row["epoch"] for row in fit.history] == sorted({*looks, recipe.epochs})
    assert fit.seconds > 0 and fit.saved_bytes > 0


# --- what a model is given --------------------------------------------------------------------


class Recorder(nn.Module):
    """Logits from a table by the first feature, which numbers the nodes; notes its input."""

    seen: list  # of (training, features, graphs, table), shared by copies

    def __init__(self, nodes, seen):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(nodes, 2))
        self.__dict__["seen"] = seen

    def __deepcopy__(self, memo):
        copied = Recorder(len(self.table), self.seen)
        copied.load_state_dict(self.state_dict())
        return copied

    def forward(self, features, graphs):
        self.seen.append((self.training, features, graphs, self.table.detach().clone()))
        return self.table[features[:, 0].long()]


@pytest.fixture(scope="module")
def numbered(neighbours):
    x = torch.cat([torch.arange(300.0)[:, None], neighbours.features], 1)
    return NodeData(x, neighbours.graphs * 2, neighbours.labels, "numbered")


def record(data, split, recipe):
    seen = []
    fit = fit_nodes(Recorder(data.nodes, seen), data, split, recipe)
    return fit, [row for row in seen if row[0]], [row for row in seen if not row[0]]


def test_batches_have_their_seeds_first_and_every_training_node_once(numbered, split):
    recipe = NodeRecipe(epochs=2, batch=64, fanout=2, hops=2, evaluate_every=1, average=0.0)
    fit, trained, validated = record(numbered, split, recipe)
    count = math.ceil(len(split.train) / 64)
    assert len(trained) == 2 * count and len(validated) == 2
    sizes = [min(64, len(split.train) - 64 * k) for k in range(count)]
    orders = []
    for epoch in (trained[:count], trained[count:]):
        rows = [x[:size, 0].long() for (_, x, *_), size in zip(epoch, sizes, strict=True)]
        orders.append(torch.cat(rows))
        assert torch.equal(orders[-1].sort().values, split.train)
    assert not torch.equal(*orders), "the order is drawn anew"
    # what is trained are those rows: nothing else has moved
    moved = (fit.model.table != 0).any(1).nonzero().flatten()
    assert torch.equal(moved, split.train)
    rose = fit.model.table[:, 1] > fit.model.table[:, 0]
    assert torch.equal(rose[split.train], numbered.labels[split.train] == 1), "labels fit rows"
    for (_, x, graphs, _), size in zip(trained, sizes * 2, strict=True):
        nodes = x[:, 0].long()
        assert len(nodes.unique()) == len(nodes) > size and len(graphs) == 2
        whole = numbered.graphs[0].induced(nodes)
        assert all(torch.equal(graph.edges, whole.edges) for graph in graphs)
    assert all(x is numbered.features and g is numbered.graphs for _, x, g, _ in validated)


def test_edges_are_left_out_in_training_only(numbered, split):
    full, loops = numbered.graphs[0].size, numbered.nodes
    recipe = NodeRecipe(epochs=4, evaluate_every=2, edge_dropout=0.3)
    _, trained, validated = record(numbered, split, recipe)
    sizes = {graph.size for _, _, graphs, _ in trained for graph in graphs}
    assert len(sizes) > 4, "drawn anew for every step and relation"
    assert all(abs(size - loops - 0.7 * (full - loops)) < 5 * math.sqrt(0.21 * full)
               for size in sizes)  # fmt: skip
    assert all(g is numbered.graphs for _, _, g, _ in validated)
    _, trained, _ = record(numbered, split, NodeRecipe(epochs=2, edge_dropout=0.0))
    assert all(g is numbered.graphs for _, _, g, _ in trained)


@pytest.mark.parametrize("average", [0.0, 0.8])
def test_what_is_validated_is_the_running_average(numbered, split, average, close):
    recipe = NodeRecipe(epochs=6, evaluate_every=1, average=average)
    _, trained, validated = record(numbered, split, recipe)
    tables = [table.double() for *_, table in trained[1:]]  # after steps 1, 2, ...
    mean = tables[0]
    for table, (*_, seen) in zip(tables, validated, strict=False):
        mean = average * mean + (1 - average) * table
        close(seen, mean, 1e-6)


# --- loss -------------------------------------------------------------------------------------


class Constant(nn.Module):
    """The same logits for every node."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits))

    def forward(self, features, graphs):
        return self.logits.expand(len(features), 2)


def test_both_classes_weigh_the_same(neighbours, split):
    """Of constant logits the loss is (l_0 + l_1) / 2, l_k = -log p_k, whatever the counts."""
    logits = [0.3, -0.9]
    recipe = NodeRecipe(epochs=1)
    fit = fit_nodes(Constant(logits), neighbours, split, recipe)
    expected = -torch.tensor(logits, dtype=torch.float64).log_softmax(0).mean()
    assert fit.history[0]["loss"] == pytest.approx(float(expected), rel=1e-6)
    labels = neighbours.labels[split.train]
    assert int((labels == 0).sum()) > 2 * int((labels == 1).sum())


def test_training_ends_some_epochs_after_the_best(neighbours, split):
    """A constant is never better than at the first look; one that is NaN never good at all."""
    recipe = NodeRecipe(epochs=30, evaluate_every=2, patience=5)
    for model, last in ((Constant([0.0, 1.0]), 8), (Breaks(0), 6)):
        fit = fit_nodes(model, neighbours, split, recipe)
        assert [row["epoch"] for row in fit.history] == list(range(2, last + 1, 2))


class Breaks(nn.Module):
    """Becomes NaN after some steps."""

    def __init__(self, after):
        super().__init__()
        self.linear, self.after = nn.Linear(3, 2), after

    def forward(self, features, graphs):
        self.after -= self.training
        return self.linear(features) * (math.nan if self.training and self.after < 0 else 1)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_nan_is_survived_and_never_kept(neighbours, split, after):
    torch.manual_seed(0)
    model = Breaks(after)
    first = copy.deepcopy(model.state_dict())
    recipe = NodeRecipe(epochs=8, evaluate_every=1, average=0.5)
    fit = fit_nodes(model, neighbours, split, recipe)
    seen = [row["validation_roc_auc"] for row in fit.history]
    assert all(map(math.isfinite, seen[:after])) and seen[after:] == [-math.inf] * (8 - after)
    p = anomaly_probability(fit.model, neighbours)
    assert bool(p.isfinite().all())
    kept = fit.model.state_dict()["linear.weight"]
    assert torch.equal(kept, first["linear.weight"]) == (after == 0), "then nothing better came"


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
def test_absurd_learning_rates_do_not_crash(neighbours, split, dynamics):
    model = classifier(neighbours, dynamics=dynamics)
    recipe = NodeRecipe(epochs=6, lr=1e30, evaluate_every=1)
    fit = fit_nodes(model, neighbours, split, recipe)
    assert bool(anomaly_probability(fit.model, neighbours).isfinite().all())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs: expected an integer >= 1"),
        ({"evaluate_every": 0}, "evaluate_every: expected an integer >= 1"),
        ({"batch": 0}, "batch: expected an integer >= 1"),
        ({"fanout": 0}, "fanout: expected an integer >= 1"),
        ({"patience": 0}, "patience: expected an integer >= 1"),
        ({"hops": 0}, "hops: expected an integer >= 1"),
        ({"lr": 0.0}, "lr: expected a finite number > 0"),
        ({"clip": -1.0}, "clip: expected a finite number > 0"),
        ({"weight_decay": -1.0}, "weight_decay: expected a finite number >= 0"),
        ({"warmup": 1.0}, "warmup: expected a share"),
        ({"average": 1.0}, "average: expected a share"),
        ({"edge_dropout": 1.0}, "edge_dropout: expected a share"),
    ],
)
def test_wrong_recipes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        NodeRecipe(**options)


def test_probabilities_are_those_of_evaluation(neighbours):
    model = classifier(neighbours).train()
    p = anomaly_probability(model, neighbours)
    assert not p.requires_grad and p.shape == (300,) and not model.training
    logits = model(neighbours.features, neighbours.graphs)
    assert (p - (logits[:, 1] - logits[:, 0]).sigmoid()).abs().max() < 1e-6


# --- learning rate ----------------------------------------------------------------------------


@pytest.mark.parametrize(("warm", "total"), [(10, 100), (2.5, 40), (0, 7)])
def test_the_rate_rises_in_a_line_then_falls_as_a_cosine(warm, total):
    rates = [warmup_cosine(k, warm, total, end=0.1) for k in range(total + 1)]
    up = [rate for k, rate in enumerate(rates) if k < warm]
    assert up == pytest.approx([(k + 1) / (warm + 1) for k in range(len(up))], rel=1e-15)
    down = rates[len(up) :]
    assert max(rates) <= 1 and rates[-1] == pytest.approx(0.1, rel=1e-12)
    assert all(a > b for a, b in itertools.pairwise(down))
    middle = warmup_cosine((warm + total) / 2, warm, total, end=0.1)
    assert middle == pytest.approx(0.55, rel=1e-12), "half way down"
    assert warmup_cosine(warm, warm, total, end=0.1) == 1


def test_a_training_ends_at_one_percent_of_its_rate(numbered, split):
    """Adam moves a parameter with a steady gradient by the rate: the steps are the schedule."""
    recipe = NodeRecipe(epochs=20, average=0.0, weight_decay=0.0, lr=1e-4, warmup=0.25)
    _, trained, _ = record(numbered, split, recipe)
    node = split.train[0]
    moves = torch.stack([table[node, 0] for *_, table in trained]).diff().abs() / 1e-4
    expected = [warmup_cosine(k, 5, 20) for k in range(19)]
    assert moves.tolist() == pytest.approx(expected, rel=1e-2)


# --- memory -----------------------------------------------------------------------------------


def test_saved_bytes_of_products_by_hand():
    x = torch.randn(30, 4, requires_grad=True)
    w = torch.randn(4, 5, requires_grad=True)
    with saved_bytes() as saved:
        y = x @ w  # keeps both
    assert saved.total == 4 * (30 * 4 + 4 * 5)
    with saved_bytes() as saved:
        z = y.exp()  # keeps its result
    assert saved.total == 4 * 30 * 5
    with saved_bytes() as saved:
        (z + 1).sum()  # nothing
    assert saved.total == 0


def test_a_storage_counts_once():
    x = torch.randn(30, 4, dtype=torch.float64, requires_grad=True)
    with saved_bytes() as saved:
        x * x, x.T @ x, x[:3].square()
    assert saved.total == 8 * 30 * 4, "views too are their whole storage"


def test_sparse_parts_are_counted():
    dense, ends, ones = torch.eye(6, requires_grad=True), torch.arange(6), torch.ones(6)
    csr = torch.sparse_csr_tensor(torch.arange(7), ends, ones, (6, 6), check_invariants=True)
    coo = torch.sparse_coo_tensor(
        torch.stack([ends, ends]), ones, (6, 6), is_coalesced=True, check_invariants=True
    )
    for matrix, numbers in ((csr, 7 + 6), (coo, 2 * 6)):
        with saved_bytes() as saved:
            torch.sparse.mm(matrix, dense)
        assert saved.total == 8 * numbers + 4 * 6


def test_off_nothing_is_counted_and_gradients_are_the_same():
    x = torch.randn(30, 4, requires_grad=True)
    with saved_bytes(measure=False) as saved:
        x.exp().sum().backward()
    assert saved.total == 0
    plain, x.grad = x.grad, None
    with saved_bytes() as saved:
        y = x.exp().sum()
    y.backward()
    assert saved.total > 0 and torch.equal(x.grad, plain)


def test_the_first_step_is_what_a_fit_reports(neighbours, split):
    model = MLP(3, dim=8, dropout=0.0)
    recipe = NodeRecipe(epochs=2)
    copied = copy.deepcopy(model)
    fit = fit_nodes(model, neighbours, split, recipe)
    weight = torch.tensor([1.0, 2.0])
    with saved_bytes() as saved:
        logits = copied(neighbours.features, ())
        nn.CrossEntropyLoss(weight)(logits[split.train], neighbours.labels[split.train])
    assert fit.saved_bytes == saved.total > 4 * 300 * (3 + 8 + 8)


def test_a_split_without_a_generator_of_its_own_is_enough(neighbours):
    """Any three parts will do, in any order."""
    rows = torch.randperm(300, generator=torch.Generator().manual_seed(1))
    rows = rows[neighbours.labels[rows] >= 0]
    split = NodeSplit(rows[:120], rows[120:190], rows[190:])
    fit = fit_nodes(MLP(3, dim=8), neighbours, split, SAMPLED)
    assert len(fit.history) == 3


def test_wrong_data_and_splits_by_hand_are_refused(neighbours, split):
    """Before anything is trained; the test's labels are not looked at, so may be missing."""
    model, unlabelled = classifier(neighbours), (neighbours.labels < 0).nonzero().flatten()
    with pytest.raises(TypeError, match="data: expected NodeData, see prepare_nodes, got Tensor"):
        fit_nodes(model, neighbours.features, split, SHORT)
    normal = split.train[neighbours.labels[split.train] == 0]
    for train, message in (
        (normal, r"train: expected nodes .* got labels \[0\]"),
        (unlabelled, r"train: expected nodes .* got labels \[-1\]"),
        (split.train + len(neighbours.labels), "train: expected indices from 0 to 299"),
    ):
        by_hand = NodeSplit(train, split.validation, split.test)
        with pytest.raises(ValueError, match=message):
            fit_nodes(model, neighbours, by_hand, SHORT)
    fit_nodes(model, neighbours, NodeSplit(split.train, split.validation, unlabelled), SHORT)
