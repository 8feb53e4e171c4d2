"""Systems refuse what they cannot mean, with the argument's name, the expectation and the value."""

import subprocess
import sys

import numpy as np
import pytest
import torch

import etdyn as ed
from etdyn.interactions import EnergySum


def test_sizes_and_numbers_of_the_parts():
    for build, message in [
        (lambda: ed.LayerNorm(1), "dim: expected an integer >= 2, got 1"),
        (lambda: ed.LayerNorm(8, eps=-1e-5), "eps: expected a finite number >= 0, got -1e-05"),
        (lambda: ed.LayerNorm(8, gamma=0.0), "gamma: expected a finite number > 0"),
        (lambda: ed.LayerNorm(8, gamma=-1.0), "gamma: expected a finite number > 0"),
        (lambda: ed.Attention(8, 0, 4), "heads"),
        (lambda: ed.Attention(8, 1, 4, beta=-1.0), "beta"),
        (lambda: ed.Hopfield(8, 0), "memories"),
        (lambda: ed.Hopfield(8, 4, "gelu"), "hopfield: expected one of 'relu', 'power', 'softmax'"),
        (lambda: ed.Hopfield(8, 4, "power", power=1), "power"),
        (lambda: ed.EnergyTransformer(8, 1, 4, 4, "newtonian"), "dynamics: expected one of 'et'"),
        (lambda: ed.EnergyTransformer(8, 1, 4, 4, eps=float("nan")), "eps"),
        (lambda: EnergySum({}), "terms"),
        (lambda: ed.Hopfield(8, 4) + ed.Hopfield(8, 4), "different names"),
    ]:
        with pytest.raises(ValueError, match=message):
            build()
    for build in (lambda: ed.LayerNorm(8.0), lambda: ed.LayerNorm(8, eps="small")):
        with pytest.raises(TypeError, match="expected"):
            build()


def test_states():
    system = ed.EnergyTransformer(8, 1, 4, 4)
    for verb in (
        system.activation, system.force, system.energy, system.energies, system.dissipation,
        system.residual, system.map, system.clock_rate, system.prepare, system.forces,
        system.interaction_energy, lambda x: system.velocity(0.0, x),
    ):  # fmt: skip
        with pytest.raises(
            ValueError, match=r"x: expected shape \(any, any, 8\), got shape \(2, 8\)"
        ):
            verb(torch.zeros(2, 8))
        with pytest.raises(
            TypeError, match=r"x: expected dtype torch\.float32, got torch\.float64"
        ):
            verb(torch.zeros(1, 2, 8).double())
        with pytest.raises(ValueError, match="x: expected device cpu, got device meta"):
            verb(torch.zeros(1, 2, 8, device="meta"))


def test_masks():
    system = ed.EnergyTransformer(8, 1, 4, 4)
    with pytest.raises(ValueError, match="tokens: expected at least one token in every sample"):
        system.masked(tokens=torch.tensor([[True, True], [False, False]]))
    with pytest.raises(TypeError, match=r"tokens: expected a bool tensor, got torch\.float32"):
        system.masked(tokens=torch.ones(1, 2))
    with pytest.raises(ValueError, match="keys: expected 3 dimensions"):
        system.masked(keys=torch.ones(2, 2).bool())
    half = torch.tensor([[True, False]])
    with pytest.raises(ValueError, match="tokens: expected at least one token in every sample"):
        system.masked(tokens=half).masked(tokens=~half)
    for name, first, second in (
        ("tokens", (1, 3), (1, 2)), ("tokens", (2, 3), (3, 3)), ("keys", (1, 3, 3), (1, 1, 3)),
    ):  # fmt: skip
        once = system.masked(**{name: torch.ones(first).bool()})
        with pytest.raises(ValueError, match=rf"{name}: expected shape \({first[0]}, 3"):
            once.masked(**{name: torch.ones(second).bool()})


def test_rows_to_select():
    system = ed.EnergyTransformer(8, 1, 4, 4).masked(tokens=torch.ones(3, 2).bool())
    for rows, kind in (([0, 1], "list"), (torch.ones(1), r"torch\.float32")):
        with pytest.raises(TypeError, match=f"rows: expected .* int64 or bool, got {kind}"):
            system.select(rows)


def test_parts_of_a_system_stay():
    system = ed.EnergyTransformer(8, 1, 4, 4)
    with pytest.raises(ValueError, match="hopfield: expected a part that stays"):
        system.hopfield = ed.Hopfield(8, 5)


def test_empty_states_and_numpy_numbers():
    system = ed.EnergyTransformer(8, 1, 4, 4)
    for shape in ((0, 3, 8), (2, 0, 8)):
        with pytest.raises(ValueError, match="x0: expected at least one sample and one token"):
            ed.descend(system, torch.zeros(shape))
    found = ed.descend(system, torch.randn(1, 2, 8), np.float32(0.5), np.int64(3))
    assert found.to_xarray().sizes["time"] == 4


def official(**changes):
    rng = np.random.default_rng(0)
    arrays = {
        "Wq": rng.normal(size=(2, 3, 8)), "Wk": rng.normal(size=(2, 3, 8)),
        "Xi": rng.normal(size=(8, 5)), "gamma": np.array(1.0), "delta": np.zeros(8),
    }  # fmt: skip
    return {k: v for k, v in (arrays | changes).items() if v is not None}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"Wq": None}, ValueError, "arrays: expected an array 'Wq'"),
        ({"Wq": np.zeros((3, 8))}, ValueError, r"Wq: expected shape \(heads, head_dim, dim\)"),
        ({"Wk": np.zeros((2, 3, 7))}, ValueError, r"Wk: expected shape \(2, 3, 8\)"),
        ({"Xi": np.zeros((5, 8))}, ValueError, "Xi: expected shape"),
        ({"delta": np.zeros(8, np.float32)}, TypeError, "arrays: expected one floating dtype"),
        ({"delta": np.zeros(8, int)}, TypeError, "delta: expected a floating dtype"),
        ({"delta": np.full(8, np.nan)}, ValueError, "delta: expected finite"),
        ({"gamma": np.array(-1.0)}, ValueError, "gamma: expected a finite number > 0, got -1.0"),
        ({"gamma": np.ones(8)}, ValueError, r"gamma: expected shape \(\)"),
    ],
)
def test_official_arrays(changes, error, message):
    ed.EnergyTransformer.from_official(official())
    with pytest.raises(error, match=message):
        ed.EnergyTransformer.from_official(official(**changes))


def test_optional_parts_are_not_imported():
    """`import etdyn` takes only what it needs."""
    code = (
        "import sys, etdyn; "
        "print([m for m in ('torch_geometric', 'dask.distributed', 'h5netcdf', 'h5py', 'sklearn',"
        " 'matplotlib', 'tyro') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
