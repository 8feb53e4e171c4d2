"""The study end to end, small: its files, its labels, that it goes on, and its failures."""

import json
import runpy
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
import tyro
import xarray as xr

import etdyn as ed
from etdyn.tasks import node_baselines
from etdyn.tasks.detection import split_nodes
from etdyn.tasks.node_completion import CompletionRecipe
from etdyn.tasks.node_data import prepare_nodes
from etdyn.tasks.node_training import NodeRecipe
from studies import anomaly_detection
from studies import anomaly_detection_page as page
from studies.anomaly_detection import ET, Bench, Config, Model, load_nodes, main

MODELS = (ET, "GCN", "logistic regression + neighbours")
SMALL = {
    "shares": (0.4, 0.2), "seeds": 2, "models": MODELS, "variations": ("as in the table", "leaky"),
    "variation_seeds": 1, "horizons": 2.0,
    "model": Model(dim=8, heads=1, head_dim=4, memories=8, steps=2, step=0.5),
    "recipe": NodeRecipe(epochs=4, evaluate_every=2), "completion": CompletionRecipe(epochs=3),
}  # fmt: skip
SCORES = {"macro_f1", "roc_auc", "average_precision", "threshold", "validation_roc_auc"}


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    """90 nodes, a quarter anomalies with other features, ten without label."""
    rng = np.random.default_rng(0)
    labels = (np.arange(90) % 4 == 0).astype(np.int8)
    x = rng.normal(size=(90, 4)) + labels[:, None]
    labels[np.arange(80, 90)] = -1
    ends = rng.integers(0, 90, (2, 200))
    path = tmp_path_factory.mktemp("data") / "small.npz"
    np.savez(path, x=x.astype(np.float32), y=labels, edge_index=ends[:, ends[0] != ends[1]])
    return path


@pytest.fixture(scope="module")
def config(graph, tmp_path_factory):
    return Config(data=str(graph), runs=tmp_path_factory.mktemp("runs"), **SMALL)


@pytest.fixture(scope="module")
def study(config):
    state = torch.random.get_rng_state()
    main(config)
    assert torch.equal(torch.random.get_rng_state(), state)
    return config.folder


@pytest.fixture(scope="module")
def result(study):
    return ed.load(study / "result.zarr")


def test_files(study):
    names = {path.name for path in study.iterdir()}
    assert {"result.zarr", "config.json", "report.html", "scores.json"} < names
    assert sum(name.endswith(".png") for name in names) == 3
    told = (study / "report.html").read_text().split("<h2>Configuration")[0]
    assert told.count("data:image/png;base64,") == 3 and told.count("<table>") == 3
    assert "http" not in told
    words = " ".join(part.split('"', 1)[-1] for part in told.split("base64,"))
    assert "nan" not in words.lower()
    assert "made by us" not in words, "this graph is not ours"


def test_the_result_is_labelled_and_complete(result, config):
    assert result.attrs["etdyn_schema"] == "etdyn.study.anomaly_detection/1"
    assert json.loads(result.attrs["etdyn_config"])["study"]["seeds"] == 2
    assert set(result.children) == {"scores", "variations", "descent", "without_labels"}
    scores = result["scores"].to_dataset()
    assert dict(scores.sizes) == {"share": 2, "model": 3, "seed": 2}
    assert scores["model"].to_numpy().tolist() == list(MODELS)
    assert scores["share"].to_numpy().tolist() == [0.4, 0.2]
    assert set(scores) == SCORES | {"parameters", "saved_bytes", "epoch", "seconds"}
    for name in (*SCORES, "seconds"):
        assert bool(np.isfinite(scores[name]).all()), name
    for name in ("parameters", "saved_bytes", "epoch"):
        missing = scores[name].isnull().any(("share", "seed")).to_numpy()
        assert missing.tolist() == [False, False, True], "a regression has none"
    tried = result["variations"].to_dataset()
    assert dict(tried.sizes) == {"variation": 2, "seed": 1}
    first = scores.sel(share=0.4, model=ET).isel(seed=0)
    assert float(tried["roc_auc"][0, 0]) == float(first["roc_auc"]), "one run serves both"
    assert float(tried["roc_auc"][1, 0]) != float(first["roc_auc"])


def test_scores_are_those_of_the_models_on_the_same_splits(result, config):
    """One baseline by hand."""
    data = prepare_nodes(load_nodes(config.data))
    scores = result["scores"].to_dataset().sel(model=MODELS[2])
    table = node_baselines.node_table(data, neighbours=True)
    for share in config.shares:
        split = split_nodes(data.labels, share, 1)
        p = node_baselines.regression_probability(table, data, split, 1)
        gap = p[split.test][data.labels[split.test] == 1][:, None]
        gap = gap - p[split.test][data.labels[split.test] == 0]
        expected = float(((gap > 0).double() + 0.5 * (gap == 0)).mean())
        assert float(scores["roc_auc"].sel(share=share, seed=1)) == pytest.approx(expected)


def test_the_descent_is_that_of_theory(result):
    run = result["descent"].to_dataset()
    assert run.attrs["training_horizon"] == 1.0 and run.attrs["training_steps"] == 2
    assert run["time"][0] == 0 and float(run["time"][-1]) == pytest.approx(2.0)
    assert 1.0 in run["time"].to_numpy() and run.sizes["step"] == 5 and run.sizes["relation"] == 1
    energy = run["flow_energy"].isel(relation=0).to_numpy()
    assert (np.diff(energy) < 1e-6 * np.ptp(energy)).all(), "it falls"
    for path in ("flow", "euler"):
        parts = run[f"{path}_energy_attention"] + run[f"{path}_energy_hopfield"]
        assert np.allclose(parts, run[f"{path}_energy"], rtol=1e-12)
    assert run["flow_energy"][0, 0] == pytest.approx(float(run["euler_energy"][0, 0]))
    assert float(run["rest_energy"][0]) < energy[-1]
    assert bool(np.isfinite(run.to_array()).all())


def test_the_trained_model_is_the_one_of_the_table(result):
    """After as many Euler steps as in training, the head reads out the score of the table."""
    run, scores = result["descent"].to_dataset(), result["scores"].to_dataset()
    told = scores["roc_auc"].sel(model=ET, share=0.4, seed=0)
    assert float(run["euler_roc_auc"][2]) == pytest.approx(float(told), abs=1e-3)


def test_scores_without_labels_are_there(result):
    free = result["without_labels"].to_dataset()
    assert set(free["score"].to_numpy()) == {
        "completion error", "attention energy", "hopfield energy", "energy", "energy, untrained",
        "isolation forest", "isolation forest + neighbours",
    }  # fmt: skip
    assert free.sizes["seed"] == 2 and bool(np.isfinite(free.to_array()).all())
    assert free.attrs["anomaly_share"] == 20 / 80


def test_the_page_is_made_from_the_saved_result_alone(result, study):
    record = json.loads(result.attrs["etdyn_config"])
    made = page.report(result, record)
    told = (study / "report.html").read_text()
    assert all(part in told for part in made._body), "to the last pixel"
    assert set(made._figures) == {"scores", "descent", "without_labels"}


def test_a_killed_run_goes_on_and_ends_the_same(config, study, result, tmp_path, monkeypatch):
    again = replace(config, runs=tmp_path)
    data = prepare_nodes(load_nodes(config.data))
    trained, real = [], Bench.scored

    def dies(self, name, model, share, seed):
        if len(trained) == 5:
            raise KeyboardInterrupt
        trained.append((name, model.dynamics, share, seed))
        return real(self, name, model, share, seed)

    monkeypatch.setattr(Bench, "scored", dies)
    with pytest.raises(KeyboardInterrupt):
        Bench(again, data, repr(load_nodes(config.data))).table()
    stood = json.loads((again.folder / "scores.json").read_text())
    assert len(stood) == 1 + 5
    trained.clear()
    monkeypatch.setattr(Bench, "scored", lambda self, *a: (
        trained.append((a[0], a[1].dynamics, *a[2:])), real(self, *a))[1])  # fmt: skip
    bench = Bench(again, data, repr(load_nodes(config.data)))
    table, variations = bench.table(), bench.variations()
    assert len(trained) == len(set(trained)) == 12 - 5 + 1, "nothing is trained twice"
    for found, group in ((table, "scores"), (variations, "variations")):
        expected = result[group].to_dataset()
        assert found.drop_vars("seconds").equals(expected.drop_vars("seconds"))
    kept = json.loads((again.folder / "scores.json").read_text())
    assert all(kept[key] == row for key, row in stood.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"model": Model(dim=6, heads=1, head_dim=4, memories=8)},
        {"recipe": NodeRecipe(epochs=5)},
        {"data": "rare-digit"},
    ],
)
def test_other_settings_under_the_same_name_are_refused(config, study, changes):
    other = replace(config, **changes)
    with pytest.raises(ValueError, match=r"name: expected a new one, or the settings of .*scores"):
        main(other)


def test_more_seeds_under_the_same_name_go_on(config, study, monkeypatch):
    data, done = prepare_nodes(load_nodes(config.data)), []
    monkeypatch.setattr(Bench, "scored", lambda self, *a: done.append(a[3]) or {"roc_auc": 0.5})
    monkeypatch.setattr("etdyn.store.write_atomically", lambda *a: None)
    bench = Bench(replace(config, seeds=3, models=(ET,)), data, repr(load_nodes(config.data)))
    rows = [[bench.row(ET, config.model, s, seed) for seed in range(3)] for s in config.shares]
    assert done == [2, 2] and len(rows) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seeds": 0}, "seeds: expected an integer >= 1"),
        ({"variation_seeds": 0}, "variation_seeds: expected an integer >= 1"),
        ({"shares": ()}, r"shares: expected shares in \(0, 1\)"),
        ({"shares": (0.4, 1.0)}, r"shares: expected shares in \(0, 1\)"),
        ({"models": (ET, "oracle")}, "models: expected one of"),
        ({"models": ("GCN",)}, "models: expected 'Energy Transformer' among them"),
        ({"variations": ("7 steps",)}, "variations: expected one of"),
        ({"horizons": 0.5}, "horizons: expected a number >= 1"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**SMALL | changes)


def test_transformer_has_as_many_parameters_as_the_energy_transformer():
    """In the study as it stands, within a tenth."""
    ours, other = Model().build(50), node_baselines.GraphTransformer(50)
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, other)]
    assert abs(counts[0] / counts[1] - 1) < 0.1, counts


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit) as ended:
        tyro.cli(Config, args=["--help"])
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for field in Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in told, field


def test_the_command_line_names_mistakes(tmp_path, monkeypatch):
    words = ["--data", str(tmp_path / "absent.npz"), "--runs", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["anomaly_detection", *words])
    with pytest.raises(SystemExit, match=r"^error: source: expected .* does not exist"):
        runpy.run_path(anomaly_detection.__file__, run_name="__main__")
    assert not list(tmp_path.iterdir())


def test_shares_that_leave_too_few_nodes_end_it_before_training(config, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("nothing may be trained")

    monkeypatch.setattr(Bench, "scored", refuse)
    with pytest.raises(ValueError, match="share: expected one that leaves every part some nodes"):
        main(replace(config, name="few", shares=(0.4, 1e-4)))


def test_models_that_cannot_be_built_are_refused_at_once():
    state = torch.get_rng_state()
    for changes, message in (({"dim": 0}, "dim: "), ({"step": np.nan}, "step: "),
                             ({"dynamics": "odd"}, "dynamics: ")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Model(**changes)
    Model()
    assert torch.equal(torch.get_rng_state(), state)


def test_one_seed_has_no_deviation():
    values = xr.DataArray([0.5, 0.7], dims="seed")
    assert page.spread(values) == "0.600 ± 0.141" and page.spread(values[:1]) == "0.500"
