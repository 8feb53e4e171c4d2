"""The study end to end, small, on two data sets: its files, its numbers, its words."""

import json
import shutil
from html import escape
from pathlib import Path

import numpy as np
import pytest
import torch
import tyro
import xarray as xr

import etdyn as ed
from etdyn.datasets import GraphSet, load_graphs
from etdyn.tasks import GraphData, cross_validate, cross_validation, nested_folds
from studies import graph_classification
from studies import graph_classification_page as page
from studies.graph_classification import Config, main
from studies.graph_classification_descent import renumbered
from studies.graph_classification_figures import draw_accuracy, draw_descent
from studies.graph_classification_models import ETConfig, networks

SMALL = {
    "graphs": 210, "epochs": (1, 2), "patience": (5,), "folds": 2, "doublings": 2,
    "models": ("et", "gin", "mlp", "regression"), "evaluations": 400, "follow": 24,
    "et": ETConfig(blocks=2, dim=12, heads=1, head_dim=12, memories=12, steps=2),
}  # fmt: skip
NAMES = ["superpixel digits 210", "RINGS"]


def write_rings(folder):
    """A TU data set: rings (class 1) and paths (class 0) of 4 to 7 nodes."""
    folder.mkdir()
    edges, owner, labels, before = [], [], [], 0
    for graph in range(48):
        n, ring = 4 + graph % 4, graph // 4 % 2
        pairs = [(a, (a + 1) % n) for a in range(n if ring else n - 1)]
        edges += [(before + a + 1, before + b + 1) for p in pairs for a, b in (p, p[::-1])]
        owner += [graph + 1] * n
        labels.append(ring)
        before += n
    lines = {"A": [f"{a}, {b}" for a, b in edges], "graph_indicator": owner, "graph_labels": labels}
    for name, values in lines.items():
        (folder / f"RINGS_{name}.txt").write_text("".join(f"{v}\n" for v in values))
    return str(folder)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return Config(runs=folder / "runs", data=("digits", write_rings(folder / "RINGS")), **SMALL)


@pytest.fixture(scope="module")
def study(config):
    main(config)
    return config.folder


@pytest.fixture(scope="module")
def result(study):
    return ed.load(study / "result.zarr")


def test_files_and_a_page_that_the_stored_result_tells(study, result):
    names = {path.name for path in study.iterdir()}
    assert names == {"result.zarr", "config.json", "report.html", "parts", "accuracy.png",
                     "descent.png", "descent_2.png"}  # fmt: skip
    words = (study / "report.html").read_text().split("<h2>Configuration")[0]
    assert words.count("data:image/png;base64,") == 3
    assert "http" not in words  # self-contained
    paragraphs = [*page.findings(result), *page.protocol(result)]
    for paragraph in paragraphs:
        assert escape(paragraph) in words
        assert " nan" not in paragraph and " inf" not in paragraph
    for _, rows in (page.accuracy_table(result), page.cost_table(result), page.leak_table(result)):
        assert all(f"<td>{escape(cell)}</td>" in words for row in rows for cell in row)
        assert not any("nan" in cell for row in rows for cell in row)
    assert draw_accuracy(result).axes
    assert draw_descent(result["descent/RINGS"].to_dataset()).axes


def test_the_result_has_its_groups_schema_and_labels(result):
    assert result.attrs["etdyn_schema"] == "etdyn.study.graph_classification/1"
    assert json.loads(result.attrs["etdyn_config"])["study"]["et"]["dim"] == 12
    assert set(result.children) == {"sets", "scores", "leak", "descent"}
    assert result["scores"].sizes == {"data": 2, "model": 4, "fold": 2}
    assert result["leak"].sizes == {"data": 2, "model": 2}
    assert result["scores"]["data"].values.tolist() == NAMES
    assert set(result["descent"].children) == set(NAMES)
    sizes = result["descent/RINGS"].sizes
    assert sizes == {"block": 2, "step": 3, "time": 7, "run": 4, "graph": 24}
    for node in result.subtree:
        for name, variable in node.data_vars.items():
            assert {"units", "long_name"} <= set(variable.attrs), (node.path, name)


def test_sets_are_described(result):
    rings = result["sets"].to_dataset().sel(data="RINGS")
    assert (int(rings["graphs"]), int(rings["classes"])) == (48, 2)
    assert (float(rings["nodes"]), float(rings["edges"])) == (5.5, 10.0)  # 11 a ring, 9 a path
    assert float(rings["majority"]) == 0.5
    assert int(result["sets"]["edge_features"].sel(data=NAMES[0])) == 1


def test_scores_are_those_of_nested_cross_validation(config, result):
    data = GraphData(load_graphs(config.data[1]))
    made = networks(config.et)["gin"]
    found = cross_validate(made.build, data, config.recipe(1, made.lr), folds=2)
    scores = result["scores"].to_dataset().sel(data="RINGS", model="gin")
    for name in ("test_accuracy", "validation_accuracy", "parameters", "saved_bytes"):
        assert np.array_equal(scores[name], found[name]), name
    assert scores["epochs"].values.tolist() == [2, 2], "of its own data set"
    table = result["scores"].to_dataset().sel(model="regression")
    assert np.isnan(table["validation_accuracy"]).all() and (table["test_accuracy"] <= 1).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_descent_is_that_of_the_scored_model(result, name):
    """Its first T steps are the model of fold 0; the flow brings the energy down, Euler too."""
    group = result[f"descent/{name}"].to_dataset()
    horizon = group.attrs["horizon"]
    scored = result["scores"]["test_accuracy"].sel(data=name, model="et", fold=0)
    last = group.isel(block=-1)
    if name == "RINGS":  # whose whole test fold is followed
        right = float(last["euler_correct"].sel(run=horizon).mean())
        assert right == pytest.approx(float(scored))
    assert np.allclose(group["euler_energy"].sel(run=horizon), group["energy"].isel(step=-1),
                       rtol=1e-14)  # fmt: skip
    assert np.array_equal(group["euler_energy"].sel(run=0), group["flow_energy"].sel(time=0))
    assert (group["flow_energy"].diff("time") < 0).all()
    for kind in ("flow", "euler"):
        assert (group[f"{kind}_imbalance"] >= 0).all() and (group[f"{kind}_imbalance"] <= 1).all()
    gap = abs(group["flow_energy"].sel(time=horizon) - group["euler_energy"].sel(run=horizon))
    fall = group["flow_energy"].sel(time=0) - group["flow_energy"].sel(time=horizon)
    assert (gap > 0).all() and (gap < fall).all(), "Euler is near the flow, and not it"


@pytest.mark.parametrize("name", NAMES)
def test_equilibria_are_lower_than_where_the_model_ends(result, name):
    group = result[f"descent/{name}"].to_dataset()
    converged = group["rest_converged"]
    assert converged.mean() > 0.8
    assert ((group["rest_residual"] <= group.attrs["tight"]) == converged).all()
    end = group["energy"].isel(block=-1, step=-1)
    assert (group["rest_energy"] < end).all()
    assert (group["rest_evaluations"] > 0).all()


@pytest.mark.parametrize("name", NAMES)
def test_the_numbering_of_nodes_does_not_matter(result, name):
    group = result[f"descent/{name}"].to_dataset()
    assert 0 < group["logit_change"] < 1e-4 * group["logit_spread"]  # float32
    assert group["changed"] == 0


def test_renumbered_graphs_are_the_same_graphs():
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    graphs = GraphSet([torch.arange(3.0)[:, None]], [edges], None, torch.tensor([0]), "path")
    moved = [renumbered(graphs, seed) for seed in range(8)]
    for one in moved:
        names = one.features[0][:, 0].long()
        assert torch.equal(names[one.edges[0]], edges), "edges follow their nodes"
    assert len({tuple(one.features[0].flatten().tolist()) for one in moved}) > 2


def rings_only(config, **changes):
    return Config(**vars(config) | {"data": config.data[1:], "epochs": config.epochs[1:]} | changes)


def test_a_second_run_takes_what_is_there(config, study, result, monkeypatch):
    """A run that was killed goes on: parts that stand are read, the one that is lost is made."""

    def refuse(*_, **__):
        raise AssertionError("nothing may be trained again")

    for name in ("published_protocol", "train_fold"):
        monkeypatch.setattr(graph_classification, name, refuse)
    monkeypatch.setattr(cross_validation, "fit", refuse)
    again = rings_only(config, name="again")
    shutil.copytree(study / "parts", again.folder / "parts")
    shutil.rmtree(again.folder / "parts" / "RINGS-regression.zarr")
    main(again)
    found = ed.load(again.folder / "result.zarr")
    for group in ("sets", "leak"):
        expected = result[group].to_dataset().sel(data=["RINGS"])
        assert found[group].to_dataset().equals(expected), group
    expected = result["descent/RINGS"].to_dataset()
    assert found["descent/RINGS"].to_dataset().equals(expected)
    for name in ("test_accuracy", "saved_bytes"):
        assert found["scores"][name].equals(result["scores"][name].sel(data=["RINGS"])), name


@pytest.mark.parametrize("change", [{"seed": 1}, {"batch": 16}, {"follow": 3}, {"folds": 3}])
def test_a_run_of_another_configuration_is_not_continued(config, study, change):
    with pytest.raises(ValueError, match=r"(path|name): expected .*run of"):
        main(rings_only(config, **change))


def accuracies(**models):
    values = np.array(list(models.values()))
    return xr.DataArray(values, {"model": list(models), "fold": range(values.shape[1])})


@pytest.mark.parametrize(
    ("gin", "words", "near"),
    [
        ([0.6, 0.7, 0.8], "at least as good as GIN", True),
        ([0.65, 0.8, 0.85], "within one standard deviation of GIN", True),
        ([0.89, 0.9, 0.91], "BEHIND GIN", False),
    ],
)
def test_words_follow_the_numbers(gin, words, near):
    text, found = page.against(accuracies(et=[0.6, 0.7, 0.81], gin=gin), "gin")
    assert text.startswith(words) and found == near
    gap = 100 * np.mean(np.array([0.6, 0.7, 0.81]) - gin)
    assert f"fold by fold {gap:+.1f} ±" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": ()}, "data: expected at least one"),
        ({"models": ("et", "et")}, "models: expected at least one, each once"),
        ({"models": ("svm",)}, "models: expected one of"),
        ({"epochs": (1, 2)}, "epochs: expected one number, or 1"),
        ({"graphs": 0}, "graphs: expected"),
        ({"doublings": 0}, "doublings: expected"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**changes)


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Config, args=["--help"])
    shown = capsys.readouterr().out
    for name in Config.__dataclass_fields__:
        assert f"--{name.replace('_', '-')}" in shown, name


@pytest.mark.parametrize("changes", [{"dim": 0}, {"steps": 0}, {"step": np.nan}, {"dropout": 1.0}])
def test_models_that_cannot_be_built_are_refused_at_once(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        ETConfig(**changes)


def test_a_constant_answer_is_called_one(result):
    """A network no better than the share of the largest class, whatever else it beats."""
    sets, scores = result["sets"].to_dataset(), result["scores"].to_dataset().copy(deep=True)
    name = str(scores["data"].values[0])
    scores["test_accuracy"][:] = 1.0
    changed = xr.DataTree.from_dict({"sets": sets, "scores": scores})
    assert page.constant(changed) == []
    at = {"data": name, "model": "gin"}
    scores["test_accuracy"].loc[at] = float(sets["majority"].sel(data=name))
    changed = xr.DataTree.from_dict({"sets": sets, "scores": scores})
    assert page.constant(changed) == [f"NO BETTER THAN NAMING THE LARGEST CLASS: GIN on {name}."]


def test_parts_of_other_graphs_are_not_taken_up(config, study, tmp_path):
    """A folder of the same name with other labels in it."""
    source = Path(config.data[1])
    shutil.copytree(source, tmp_path / source.name)
    labels = tmp_path / source.name / "RINGS_graph_labels.txt"
    labels.write_text("".join(labels.read_text().splitlines(keepends=True)[::-1]))
    with pytest.raises(ValueError, match=r"(path|name): expected .*run of .*checksum"):
        main(rings_only(config, data=(str(tmp_path / source.name),)))


def test_followed_graphs_are_drawn_from_the_whole_fold(result, config):
    """Files list graphs class by class: the first of a fold would be of one class."""
    drawn = graph_classification.drawn(load_graphs("digits"), config.graphs, config.seed)
    group, fold = result[f"descent/{NAMES[0]}"], nested_folds(drawn.labels, config.folds)[0]
    rows = group["graph"].values
    assert len(rows) == 24 < len(fold.test) and set(rows) <= set(fold.test.tolist())
    assert rows.max() > fold.test[len(fold.test) // 2] and list(rows) != fold.test[:24].tolist()
    assert group["label"].values.tolist() == drawn.labels[rows].tolist()
