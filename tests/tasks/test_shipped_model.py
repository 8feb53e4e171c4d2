"""The model in `data/`: what it is, and that it beats what it must beat."""

import hashlib
import json
from pathlib import Path

import pytest

import etdyn as ed
from etdyn.datasets import digits
from etdyn.tasks import completion_error
from studies.continuous_vs_discrete import SHIPPED, score


@pytest.fixture(scope="module")
def record():
    return json.loads(SHIPPED.with_suffix(".json").read_text())


def test_it_is_small_and_carries_its_checksum(record):
    data = SHIPPED.with_suffix(".safetensors").read_bytes()
    assert len(data) < 2**20
    assert hashlib.sha256(data).hexdigest() == record["sha256"]
    manifest = json.loads(Path(SHIPPED.parent / "manifest.json").read_text())
    for name, entry in manifest["files"].items():
        content = (SHIPPED.parent / name).read_bytes()
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name


def test_its_error_is_below_the_gaussian_conditional_mean(record):
    data, model = digits(), ed.load_model(SHIPPED)
    assert len(data.test) == 360
    errors = score(model, data)
    gauss, mean = errors["Gaussian conditional mean"], errors["mean of every position"]
    assert 0.25 < gauss < 0.30  # a weak baseline would prove nothing
    assert 0.50 < mean < 0.55
    found = completion_error(model, data.test)
    assert found < gauss
    assert found == pytest.approx(record["held_out_error"], rel=1e-4)


def test_three_seeds_are_recorded(record):
    seeds = record["seeds"]
    errors = list(seeds["held_out_error"].values())
    assert len(errors) == 3
    assert seeds["mean"] == pytest.approx(sum(errors) / 3)
    assert max(errors) - min(errors) < 0.1 * seeds["mean"]
    assert record["held_out_error"] in errors
