"""The study end to end, small: its files, and that its numbers obey the theory."""

import json
from html import escape

import numpy as np
import pytest
import tyro
import xarray as xr

import etdyn as ed
from studies import step_size_page as page
from studies.step_size import Config, main
from studies.step_size_figures import draw_ends, draw_first, draw_limits
from studies.step_size_numbers import best_counts, correlations, equilibria, first_rise, slope

SMALL = {
    "images": 2, "scored_images": 200, "scored_sizes": 4, "step_sizes": 4, "steps": 12,
    "followed_images": 1, "followed_sizes": 1, "starts": 1,
}  # fmt: skip
DYNAMICS = ("et", "leaky", "sphere")


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    config = Config(runs=tmp_path_factory.mktemp("runs"), **SMALL)
    main(config)
    return config.folder


@pytest.fixture(scope="module")
def result(study):
    return ed.load(study / "result.zarr")


def test_files_and_a_page_that_the_stored_result_tells(study, result):
    names = {path.name for path in study.iterdir()}
    assert {"result.zarr", "config.json", "report.html"} < names
    assert sum(name.endswith(".png") for name in names) == 7
    html = (study / "report.html").read_text()
    words = html.split("<h2>Configuration")[0]
    assert words.count("data:image/png;base64,") == 7
    assert "http" not in words  # self-contained
    config = json.loads((study / "config.json").read_text())
    assert config["study"]["images"] == 2 and config["study"]["seed"] == 0
    for paragraph in page.findings(result):
        assert escape(paragraph) in words
        assert " nan" not in paragraph and " inf" not in paragraph
    for _, rows in (
        page.limits_table(result),
        page.candidates_table(result["unseen"].to_dataset()),
    ):
        assert all(f"<td>{escape(cell)}</td>" in words for row in rows for cell in row)
    for draw in (draw_limits, draw_first, draw_ends):  # figures, too, need nothing else
        assert draw(result).axes


def test_the_result_has_its_groups_schema_and_labels(result):
    assert result.attrs["etdyn_schema"] == "etdyn.study.step_size/1"
    assert json.loads(result.attrs["etdyn_config"])["study"]["starts"] == 1
    single = {"multiplier", "transient", "first_step", "scored", "unseen"}
    assert set(result.children) == single | {"limits", "control", "map"}
    assert all(set(result[name].children) == set(DYNAMICS) for name in ("limits", "control", "map"))
    found = result["map/leaky"].to_dataset()
    assert found["error"].sizes == {"sample": 2, "step_size": 4, "step": 13}
    assert found["step_size"].values == pytest.approx([0.01, 0.1, 1.0, 10.0])
    assert found["attractor"].dims == ("followed", "followed_size")
    for node in result.subtree:
        for name, variable in node.data_vars.items():
            assert {"units", "long_name"} <= set(variable.attrs), (node.path, name)


@pytest.mark.parametrize("law", DYNAMICS)
def test_f23_measured_limits_meet_the_predicted_ones(result, law):
    control = result[f"control/{law}"].to_dataset()
    assert abs(control["ratio"] - 1).max() < 2e-3
    trained = result[f"limits/{law}"].to_dataset()
    assert trained["converged"].all() and trained["image"].values.tolist() == [True, True, False]
    if law == "et":  # kappa_max < 2
        assert np.isinf(trained["limit"]).all() and np.isinf(trained["linear"]).all()
    else:
        assert abs(trained["ratio"] - 1).max() < 2e-3
        assert (trained["descent"].sel(state="rest") < trained["linear"]).all()


def test_f23_the_control_rises_as_often_as_steps_are_unstable(result):
    kicked = result["transient"].to_dataset()
    assert (kicked["rises"] == kicked["predicted"]).all() and kicked["rises"].max() == 3
    multiplier = result["multiplier"].to_dataset()
    assert abs(multiplier["measured"] - multiplier["predicted"]).max() < 1e-6


def test_energy_rises_beyond_the_limit_and_never_under_the_published_dynamics(result):
    assert np.isinf(first_rise(result["map/et"].to_dataset())).all()
    for law, size in (("leaky", 10.0), ("sphere", 1.0)):
        assert first_rise(result[f"map/{law}"].to_dataset()).values == pytest.approx(size)


def test_the_error_of_the_trained_candidate_is_the_models_own(result):
    unseen = result["unseen"].to_dataset()
    trained = unseen.sel(candidate="as trained")
    assert float(trained["step_size"]) == 0.1 and int(trained["count"]) == 12
    assert float(trained["error"].mean()) == pytest.approx(0.204, abs=0.02)  # data/digits.json
    assert unseen.sizes["image"] == 160


def test_numbers_of_a_made_up_map():
    """A best count of 4.5 / step size, an error that is the energy until there and falls after."""
    size, step = np.geomspace(0.1, 1.0, 7), np.arange(61)
    horizon = size[:, None] * step
    error = np.abs(horizon - 4.5)[None].repeat(5, 0)
    energy = -horizon[None].repeat(5, 0)
    dims = ("sample", "step_size", "step")
    scored = xr.Dataset({"error": (dims, error), "energy": (dims, energy)},
                        {"step_size": size, "step": step}, {"step": 0.1, "steps": 45})  # fmt: skip
    assert best_counts(scored).tolist() == np.round(4.5 / size).astype(int).tolist()
    tree = xr.DataTree.from_dict({"scored": scored})
    fitted, low, high = slope(tree, 0.0, 1.0)
    assert fitted == pytest.approx(-1, abs=0.05) and low == high == fitted
    first, after, *_ = correlations(scored).values()
    assert first.tolist() == pytest.approx([1] * 5) and after.tolist() == pytest.approx([-1] * 5)
    group = xr.Dataset({"energy": ("sample", [-2.0, -1.0, -2.0 - 1e-9])})
    assert [rows.tolist() for rows in equilibria(group)] == [[0, 2], [1]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 0}, "images"),
        ({"steps": 1}, "steps"),
        ({"step_sizes": 6}, "step_sizes"),
        ({"scored_sizes": 1}, "scored_sizes"),
        ({"images": 4, "followed_images": 5}, "followed_images"),
        ({"step_sizes": 4, "followed_sizes": 5}, "followed_sizes"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=f"{message}: expected"):
        Config(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scored_images": 360}, "scored_images"),
        ({"images": 361}, "images"),
        ({"steps": 11}, "steps: .*own 12"),
    ],
)
def test_what_the_data_and_the_model_ask_of_the_configuration(changes, message):
    with pytest.raises(ValueError, match=message):
        main(Config(**changes))


def test_help_explains_every_field(capsys):
    with pytest.raises(SystemExit):
        tyro.cli(Config, args=["--help"])
    shown = capsys.readouterr().out
    for field in Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in shown, field
