"""Order parameters of configurations that are known, and plateaus that were put there."""

import math

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.integrate import solve_ivp

import etdyn as ed
from etdyn import store
from etdyn.analysis.clusters import attention_clusters, plateaus, token_clusters
from etdyn.lagrangians import LayerNorm, Quadratic
from etdyn.problems import LinearEnergy
from etdyn.systems import System


def planar(*degrees):
    """A system and one sample with tokens at these angles in a plane of zero mean."""
    a = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    e1 = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64) / 2**0.5
    e2 = torch.tensor([1.0, 1.0, -2.0], dtype=torch.float64) / 6**0.5
    lagrangian = LayerNorm(3, eps=0.0).double().requires_grad_(False)
    lagrangian.delta.copy_(torch.tensor([3.0, -1.0, 7.0]))
    energy = LinearEnergy(torch.ones(1, 3, dtype=torch.float64))
    x = (a.cos()[:, None] * e1 + a.sin()[:, None] * e2) * 4 + 2
    return System(lagrangian, energy), x.unsqueeze(0)


def test_planar_tokens_have_their_angles(close):
    """Merges of single linkage are the gaps 3, 20 and 50 degrees; delta and mean do not count."""
    system, x = planar(0, 20, 23, 73)
    found = token_clusters(system, x, math.radians(10))
    close(np.degrees(found["merge"].values), [[50.0, 20.0, 3.0]], 1e-12)
    assert found["clusters"].values.tolist() == [3]
    close(np.degrees(found["narrowest"].values), [3.0], 1e-12)
    close(np.degrees(found["widest"].values), [20.0], 1e-12)
    pairs = np.cos(np.radians([20, 23, 73, 3, 53, 50])).mean()
    close(found["mean_cosine"].values, [pairs], 1e-13)
    counts = [
        token_clusters(system, x, math.radians(a))["clusters"].item() for a in (1, 10, 30, 60)
    ]
    assert counts == [4, 3, 2, 1]


def test_angles_keep_their_digits_near_zero(close):
    found = token_clusters(*planar(0, 1e-6))
    close(np.degrees(found["merge"].values), [[1e-6]], 1e-8)


def test_effective_rank_counts_equal_singular_values(make_case):
    """Orthonormal tokens of zero sum: as many as tokens; equal or opposite ones: one."""
    system, x = planar(0, 90)
    assert token_clusters(system, x)["effective_rank"].item() == pytest.approx(2, abs=1e-14)
    line = token_clusters(*planar(0, 180, 0))
    assert line["effective_rank"].item() == pytest.approx(1, abs=1e-7)
    assert line["clusters"].item() == 2
    case = make_case(tokens=6)
    found = token_clusters(case.system, case.x)
    assert (found["effective_rank"] > 2).all() and (found["effective_rank"] <= 6).all()


def test_masked_tokens_and_lost_directions_do_not_count(make_case, close):
    case = make_case(tokens=5, batch=1)
    mask = torch.tensor([[True, False, True, True, False]])
    found = token_clusters(case.system.masked(mask), case.x)
    alone = token_clusters(case.system, case.x[:, mask[0]])
    for name in ("mean_cosine", "effective_rank", "clusters", "widest"):
        close(found[name].values, alone[name].values, 1e-14)
    assert np.isnan(found["merge"].values[0, 2:]).all()
    flat = System(Quadratic(3).double(), LinearEnergy(torch.ones(1, 3, dtype=torch.float64)))
    lost = token_clusters(flat, torch.zeros(1, 2, 3, dtype=torch.float64))
    assert lost["clusters"].values.tolist() == [-1] and np.isnan(lost["mean_cosine"].values).all()


# --- attention gathers tokens ------------------------------------------------------------------


@pytest.mark.parametrize("beta", [0.5, 4.0])
def test_two_tokens_approach_by_their_exact_law(beta):
    """d theta/dt = -4 sin(theta) / (1 + exp(beta (1 - cos(theta)))), from the energy by hand."""
    times = [0.0, 0.3, 1.0, 3.0, 10.0]
    found = attention_clusters([beta], [2], 5, times, samples=2, seed=3)
    cosine = found["mean_cosine"].values[0, 0]

    def law(_, theta):
        return -4 * np.sin(theta) / (1 + np.exp(beta * (1 - np.cos(theta))))

    start = np.arccos(cosine[0])
    exact = solve_ivp(law, (0, 10), start, t_eval=times, rtol=1e-11, atol=1e-12)
    assert abs(np.cos(exact.y.T) - cosine).max() < 1e-6


def test_attention_gathers_all_tokens_at_one_point():
    """Geshkovski et al.: Q^T K = 1 on the sphere; energy -N/beta log(N exp(beta)) at the end."""
    found = attention_clusters([1.0], [3, 6], 5, [0.0, 2.0, 40.0], samples=3)
    end = found.isel(time=-1, beta=0)
    assert (end["clusters"] == 1).all() and (found["clusters"].isel(time=0) > 1).all()
    assert abs(end["mean_cosine"] - 1).max() < 1e-10
    assert abs(end["effective_rank"] - 1).max() < 1e-4
    limit = [-n * math.log(n * math.e) for n in (3, 6)]
    assert abs(end["energy"].values - np.array(limit)[:, None]).max() < 1e-10
    assert (found["energy"].diff("time") < 1e-9).all()


def test_large_beta_holds_groups_apart(tmp_path):
    """At beta 1 one cluster is left where beta 30 still has several, on a plateau of energy."""
    times = [0.0, *np.geomspace(0.1, 60, 25)]
    found = attention_clusters([1.0, 30.0], [6], 4, times, samples=2)
    at = found["clusters"].isel(time=-1, tokens=0)
    assert (at.sel(beta=1.0) == 1).all() and (at.sel(beta=30.0) > 1).all()
    rested = plateaus(found.isel(tokens=0).sel(beta=30.0), "clusters", band=0, least=20, tol=1e-12)
    assert (rested["count"] >= 1).all() and (rested["drop"].isel(plateau=0) == 0).all()
    store.save(found, tmp_path / "c.zarr")
    assert ed.load(tmp_path / "c.zarr").identical(found)


# --- plateaus ----------------------------------------------------------------------------------


def trajectory(value, residual=None, time=None):
    value = np.asarray(value, float)
    time = np.arange(len(value), dtype=float) if time is None else np.asarray(time)
    residual = np.ones_like(value) if residual is None else np.asarray(residual, float)
    dims = ("time", "sample")
    data = {"energy": value, "residual": residual, "clock": 2 * time}
    return xr.Dataset({k: (dims, v[:, None]) for k, v in data.items()}, {"time": time})


def test_plateaus_are_found_where_they_were_put():
    staircase = [9, 5, 5.01, 5, 5, 4, 3, 1, 1, 1.01, 1, 1, 1, 0, 0, 0]
    moving = [1] * 13 + [0] * 3
    found = plateaus(trajectory(staircase, moving), band=0.02, least=4, tol=1e-3)
    assert found["count"].values.tolist() == [2]
    assert found["begin"].values.tolist() == [[2.0, 14.0]]  # the clock runs at twice the time
    assert found["end"].values.tolist() == [[8.0, 24.0]]
    assert found["level"].values[0] == pytest.approx([5.0025, 1 + 0.01 / 6])
    assert plateaus(trajectory(staircase, moving), band=0.005, least=4, tol=1e-3)[
        "begin"
    ].values.tolist() == [[20.0]]


def test_equilibrium_is_no_plateau():
    flat = trajectory(np.zeros(9), np.full(9, 1e-9))
    assert plateaus(flat, band=1, least=1, tol=1e-8)["count"].values.tolist() == [0]
    assert plateaus(flat, band=1, least=1, tol=1e-10)["length"].values.tolist() == [[16.0]]


def test_plateaus_in_log_time():
    """ln t from t = 1 to t = e^3 is three long, and t = 0 is no time of that clock."""
    time = np.exp(np.arange(-2, 6, 0.5))
    value = np.where((time >= 0.99) & (time <= np.exp(3) * 1.01), 2.0, -time)
    data = trajectory(np.append(-1e9, value), time=np.append(0.0, time))
    found = plateaus(data, band=1e-6, least=1.2, tol=1e-3, clock="log")
    assert found["begin"].values == pytest.approx(np.array([[0.0]]), abs=1e-12)
    assert found["length"].values == pytest.approx(np.array([[3.0]]))


def test_solution_carries_its_clock_and_energy(make_case, tmp_path):
    case = make_case(hopfield="softmax")
    flow = ed.solve(case.system, case.x, [0.0, 1.0, 4.0], gradient=None)
    found = token_clusters(case.system, flow)
    observed = flow.to_xarray(states=False)
    for name in ("energy", "residual", "clock"):
        assert found[name].identical(observed[name])
    at_end = token_clusters(case.system, flow.x[-1])
    assert (found["mean_cosine"].values[-1] == at_end["mean_cosine"].values).all()
    store.save(found, tmp_path / "c.zarr")
    assert ed.load(tmp_path / "c.zarr").identical(found)


def test_wrong_input_is_refused(make_case):
    case = make_case()
    with pytest.raises(ValueError, match="angle"):
        token_clusters(case.system, case.x, 4.0)
    flow = ed.solve(case.system, case.x, [0.0, 1.0], gradient=None, save=["residual"])
    with pytest.raises(ValueError, match="states"):
        token_clusters(case.system, flow)
    with pytest.raises(ValueError, match="data"):
        plateaus(token_clusters(case.system, case.x).expand_dims("time"), band=1, least=1, tol=1)
    with pytest.raises(ValueError, match="clock"):
        plateaus(trajectory([1, 2]), band=1, least=1, tol=1, clock="time")
    with pytest.raises(ValueError, match="tokens"):
        attention_clusters([1.0], [1], 4, [0.0, 1.0])
