"""Where the descents of `convergence` end, and with what rates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import xarray as xr
from scipy.stats import binomtest
from torch import Tensor

import etdyn as ed
from etdyn.analysis.clusters import token_clusters
from etdyn.analysis.convergence import decay_rate
from etdyn.analysis.equilibria import survey
from etdyn.analysis.labels import labelled
from etdyn.analysis.memories import recovered
from etdyn.analysis.spectrum import spectrum
from etdyn.solve import Solution
from etdyn.systems import System

if TYPE_CHECKING:
    from studies.convergence import Case

DENSE = 10  # equilibria with a dense spectrum
LOWEST = 16  # modes of an image's equilibrium that are told apart
DEGENERATE = 0.01  # relative distance in kappa of modes that count as one
PUSH = 0.05  # of the starts near equilibria, relative to the tokens' own size


def fitted(case: Case, flow: Solution, data: xr.Dataset) -> tuple[Tensor, xr.Dataset]:
    """Equilibria next to the ends of a flow, and the rates with which its energy nears them."""
    on_sphere = case.limit.with_dynamics("sphere")
    found = ed.find_equilibrium(on_sphere, flow.x[-1], max_evaluations=20_000)
    bottom = on_sphere.interaction_energy(found.x, relative=True)
    rest = found.x if flow.system.dynamics == "sphere" else case.limit.force(found.x)
    modes = spectrum(flow.system, rest, LOWEST, "lowest", vectors=True)
    slowest = torch.from_numpy(modes["eigenvalue"].values[:, 0])
    bottom = bottom.where(found.converged, torch.nan)
    fit = decay_rate(data, bottom, slowest=slowest)
    fit["bottom"] = labelled("sample", bottom, "energy at equilibrium")
    if flow.system.dynamics == "leaky":
        share = slow_share(flow, fit, rest, modes)
        fit["slow_share"] = labelled("sample", share, "gap in the slowest modes, mid-window")
    return rest, fit


def by_time(published: xr.Dataset, rates: xr.Dataset) -> xr.Dataset:
    """What the published flow itself shows of the exponents, by the time that it reached."""
    limits = [torch.from_numpy(rates[name].values) for name in ("bottom", "predicted")]
    return decay_rate(published, limits[0], "log time", slowest=limits[1] / 2)


def slow_share(
    flow: Solution, fit: xr.Dataset, rest: Tensor, modes: xr.Dataset
) -> np.ndarray[Any, Any]:
    """How much of the gap lies in the slowest modes in the middle of a fit's window, `(sample,)`.

    To second order the gap is sum kappa a^2 / 2 over the modes, a the components of M^-1/2 dg.
    """
    lagrangian = flow.system.layer_norm
    middle = (fit["window_start"] + fit["window_end"]).fillna(0).values / 2
    rows = np.abs(flow.t.numpy()[:, None] - middle).argmin(0)
    every = np.arange(len(rest))
    moved = lagrangian.activation(flow.x[rows, every]) - lagrangian.activation(rest)
    v = lagrangian.metric_root_inverse(rest, moved).unsqueeze(1)
    units = lagrangian.metric_root(rest.unsqueeze(1), torch.from_numpy(modes["direction"].values))
    units = units / units.square().sum((2, 3), keepdim=True).sqrt()
    kappa = modes["eigenvalue"].values
    parts = kappa * (v * units).sum((2, 3)).square().numpy() / 2
    slow = kappa <= (1 + DEGENERATE) * kappa[:, :1]
    gap = fit["gap"].sel(time=flow.t.numpy()[rows], method="nearest").values[every, every]
    share = (parts * slow).sum(1) / gap
    return np.where(fit["window_start"].notnull(), share, np.nan)


def near(case: Case, equilibria: xr.Dataset) -> dict[str, xr.Dataset]:
    """Rates of both flows from random starts near every stable equilibrium."""
    stable = equilibria.isel(equilibrium=np.flatnonzero(equilibria["index"].values == 0)[:DENSE])
    rest = torch.from_numpy(stable["state"].values).repeat(case.config.near, 1, 1)
    draw = torch.Generator().manual_seed(case.config.seed)
    noise = torch.randn(rest.shape, generator=draw, dtype=rest.dtype)
    x0 = rest + PUSH * case.limit.layer_norm.sigma(rest).unsqueeze(-1) * noise
    found = {}
    for name, lowest in (("leaky", "lowest"), ("sphere", "sphere_lowest")):
        end = np.log(1e10) / (2 * float(stable[lowest].min()))  # the gap falls by ten decades
        flow = case.flow(case.limit.with_dynamics(name), x0, np.linspace(0, end, 401), 0.1)
        data = flow.to_xarray(states=False, relative=True)
        fit = fitted(case, flow, data)[1]
        fit["equilibrium"] = labelled("sample", np.tile(stable["equilibrium"], case.config.near),
                                      "equilibrium at the start")  # fmt: skip
        found[f"near_{name}"] = fit
    return found


# --- the ends ----------------------------------------------------------------------------------


def ends(case: Case, flows: dict[str, xr.Dataset]) -> dict[str, xr.Dataset]:
    """Equilibria of the starts: at once, after a stretch of the flow, and by the whole flows."""
    config, system = case.config, case.limit
    ways = {"at once": case.starts, "flow first": head_start(case)}
    ways |= {name: torch.from_numpy(flow["end"].values) for name, flow in flows.items()}
    found = survey(system, torch.cat(list(ways.values())), symmetry="permutation")
    cuts = np.cumsum([len(x) for x in ways.values()])[:-1]
    once, first, *followed = np.split(found["label"].values, cuts)
    many = found.sizes["equilibrium"]
    shares = [
        [wilson(int((row == k).sum()), len(row)) for k in range(many)] for row in (once, first)
    ]
    kinds = ["single"] * config.single + ["repeated"] * config.repeated * config.masks
    image = [*range(config.single), *np.repeat(range(config.repeated), config.masks)]
    both, other = ("way", "start"), ("flow", "sample")
    data = {
        "label": labelled(both, np.stack([once, first]), "equilibrium, -1: none"),
        "arrived": labelled(other, np.stack(followed), "equilibrium nearest the end of a flow"),
        "fraction": labelled(("way", "equilibrium"), np.array(shares)[..., 0], "share of starts"),
        "interval": labelled(("way", "equilibrium", "bound"), np.array(shares)[..., 1:],
                             "95 % Wilson interval"),
        "kind": ("start", text([*kinds, *["random"] * config.random])),
        "image": labelled("start", [*image, *[-1] * config.random], "held-out image, -1: none"),
    }  # fmt: skip
    coords = {"way": text(list(ways)[:2]), "flow": text(list(ways)[2:])}
    equilibria = describe(system, found.drop_dims("start"))
    return {"ends": xr.Dataset(data, coords), "equilibria": equilibria}


def head_start(case: Case) -> Tensor:
    """The starts after the log-time `head_start` of the leaky flow."""
    times = [0.0, case.config.head_start]
    return case.flow(case.limit.with_dynamics("leaky"), case.starts, times, 10).x[-1]


def describe(system: System, found: xr.Dataset) -> xr.Dataset:
    """The equilibria with their clusters, their memories and their spectra."""
    x = torch.from_numpy(found["state"].values)
    clusters = token_clusters(system, x).rename(sample="equilibrium")
    best = recovered(system, x, system.get_parameter("hopfield.memories"))["best"].values
    energy = system.interaction_energy(x, relative=True)
    kappa = spectrum(system.with_dynamics("leaky"), x[:DENSE])["eigenvalue"].values
    curvature = spectrum(system.with_dynamics("sphere"), x[:DENSE])["eigenvalue"].values
    least = spectrum(system.with_dynamics("sphere"), x, 1, "lowest")["eigenvalue"].values
    modes = ("lowest_states", "mode")
    return found.assign({
        **{n: clusters[n] for n in ("mean_cosine", "effective_rank", "clusters")},
        "overlap": labelled("equilibrium", best.max(1), "largest overlap with a memory"),
        "relative_energy": labelled("equilibrium", energy, "E(g) above that of zero weights"),
        "kappa": labelled(modes, kappa, "eigenvalues of the leaky flow's stability operator"),
        "lambda": labelled(modes, curvature, "curvatures of E on the spheres"),
        "sphere_lowest": labelled("equilibrium", least[:, 0], "lowest curvature of E"),
    })  # fmt: skip


def wilson(part: int, whole: int) -> tuple[float, float, float]:
    """part / whole with its 95 % interval."""
    low, high = binomtest(part, whole).proportion_ci(0.95, method="wilson")
    return part / whole, float(low), float(high)


def text(values: list[str]) -> Any:
    """Words as an array that zarr keeps."""
    return np.array(values, dtype=np.dtypes.StringDType())
