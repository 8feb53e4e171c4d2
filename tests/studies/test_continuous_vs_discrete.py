"""The study end to end, small: its files, and that its numbers obey the theory."""

import json
import subprocess
import sys

import numpy as np
import pytest

import etdyn as ed
from studies.continuous_vs_discrete import Config, main


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    config = Config(
        runs=tmp_path_factory.mktemp("runs"), images=3, steps_per_horizon=(48, 24, 12, 1),
        horizons=(1, 2), tolerance=1e-7,
    )  # fmt: skip
    main(config)
    return config.folder


def test_files(study):
    names = {path.name for path in study.iterdir()}
    assert {"result.zarr", "config.json", "report.html"} < names
    assert sum(name.endswith(".png") for name in names) == 4
    page = (study / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 4
    assert "http" not in page.split("<h2>Configuration")[0]  # self-contained
    assert "nan" not in page.split("<h2>Configuration")[0].split("base64,")[0].lower()
    config = json.loads((study / "config.json").read_text())
    assert config["study"]["images"] == 3
    assert config["baselines"]["Gaussian conditional mean"] > 0.2


def test_the_euler_model_converges_to_the_flow_at_first_order(study):
    et = ed.load(study / "result.zarr")["et"].to_dataset()
    gaps = et["euler_distance"].sel(horizon=1, kind="masked").mean("sample").to_numpy()
    assert et["step_size"].to_numpy() == pytest.approx([0.025, 0.05, 0.1, 1.2])
    assert gaps[0] / gaps[1] == pytest.approx(0.5, abs=0.12)
    assert gaps.max() <= 2.0
    uncertainty = et["reference_distance"].sel(horizon=1).max()
    assert float(uncertainty) < 0.05 * gaps[0]


def test_energy_falls_along_every_flow(study):
    tree = ed.load(study / "result.zarr")
    assert set(tree.children) == {"et", "leaky", "sphere"}
    for node in tree.children.values():
        energy = node["flow_energy"].to_numpy()
        steps = np.diff(energy, axis=0)
        assert (steps <= 1e-7 * np.abs(energy[1:])).all()
        assert float(node["flow_dissipation"].min()) >= 0
    assert np.allclose(
        sum(tree["leaky"][f"flow_energy_{n}"] for n in ("attention", "hopfield", "lagrangian")),
        tree["leaky"]["flow_energy"],
    )


def test_euler_rises_are_those_of_the_energy(study):
    # the clock of the sphere dynamics is time itself
    sphere = ed.load(study / "result.zarr")["sphere"].to_dataset()
    assert np.allclose(sphere["euler_clock"].sel(horizon=1), 1.2)
    assert np.allclose(sphere["flow_clock"].isel(sample=0), sphere["time"])
    assert np.allclose(sphere["euler_distance"], sphere["euler_distance_at_equal_clock"], atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": 0}, "images"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"horizons": (0,)}, "horizons"),
        ({"horizons": (1,)}, "horizons"),
        ({"horizons": (3, 1)}, "horizons"),
        ({"horizons": (2, 4)}, "horizons"),
    ],
)
def test_configuration_is_checked(changes, message):
    with pytest.raises(ValueError, match=f"{message}: expected"):
        Config(**changes)


def test_the_trained_step_must_be_among_the_steps():
    with pytest.raises(ValueError, match=r"steps_per_horizon: .*the model's own 12"):
        main(Config(steps_per_horizon=(5, 2)))


def test_help_explains_every_field():
    done = subprocess.run(
        [sys.executable, "-m", "studies.continuous_vs_discrete", "--help"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    for field in Config.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in done.stdout, field
