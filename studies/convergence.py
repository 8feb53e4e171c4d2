"""Does a trained Energy Transformer converge?

In which variable, how fast, to how many equilibria, and does the task error follow the energy?
This study follows a trained image-completion model on held-out images far beyond its training
horizon: the published flow, its Euler steps, the leaky flow, which is the published one in
log-time, and the sphere. Then it asks where 200 starts end, and fits rates against spectra.

    python -m studies.convergence --help
"""

from __future__ import annotations

import copy
import itertools
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
import xarray as xr
from torch import Tensor
from tqdm import tqdm

import etdyn as ed
from etdyn import store
from etdyn.analysis.clusters import token_clusters
from etdyn.analysis.contributions import contributions
from etdyn.analysis.descent import Cause, audit
from etdyn.analysis.labels import labelled
from etdyn.analysis.spectrum import spectrum
from etdyn.checks import bad, check_count, check_positive
from etdyn.datasets import digits
from etdyn.solve import Solution, iterate
from etdyn.systems import System
from etdyn.tasks import ImageCompletion, evaluation_masks, masked_error, mean_completion
from studies import convergence_page as page
from studies.convergence_ends import by_time, ends, fitted, near
from studies.convergence_numbers import record_of

SHIPPED = Path(__file__).parent.parent / "data" / "digits"
LOOKS = (2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 150.0, 200.0, 250.0, 300.0)  # at the lowest curvature
DRAWN = 4  # images whose steps are taken apart
UNSTABLE = 4  # of it, so many eigenvalues


@dataclass(frozen=True)
class Config:
    """Follow a trained model to its equilibria."""

    name: str = "default"
    """Of the run; results go to runs/convergence/<name>/."""
    runs: Path = Path("runs")
    """Where results go."""
    model: Path = SHIPPED
    """The trained model, a safetensors file with its JSON beside it."""
    images: int = 16
    """Held-out images whose descents are followed, each with half of its patches hidden."""
    log_time: float = 300.0
    """End of the leaky flow, the published one at time exp(log_time)."""
    published: float = 1e6
    """End of the published flow itself."""
    sphere: float = 20.0
    """End of the sphere flow, in its own clock."""
    horizons: int = 250
    """End of the Euler run, in training horizons."""
    single: int = 80
    """Starts of the survey: images with one mask each; those that are followed come first."""
    repeated: int = 8
    """Starts of the survey: images that have several masks."""
    masks: int = 10
    """Of each of these."""
    random: int = 40
    """Starts of the survey: normal random tokens of the images' size."""
    head_start: float = 5.0
    """Log-time that the flow runs before an equilibrium is searched from where it came to."""
    near: int = 2
    """Starts near every equilibrium, for its rates."""
    tolerance: float = 1e-7
    """rtol of the flows, atol a hundredth; the leaky one is repeated at ten times as much."""
    seed: int = 0
    """Of masks, random starts and directions."""
    threads: int = 1
    """Threads of torch; more help with large models only, and cost where cores are shared."""

    def __post_init__(self) -> None:
        for name in ("images", "horizons", "single", "repeated", "random", "near", "threads"):
            check_count(name, getattr(self, name))
        check_count("masks", self.masks, least=2)
        for name in ("log_time", "published", "sphere", "head_start"):
            check_positive(name, getattr(self, name))
        if not 5 <= self.log_time <= 600:
            raise bad("log_time", "a number from 5 to 600", self.log_time)
        if np.log1p(self.published) > self.log_time:
            raise bad("published", "at most exp(log_time) - 1", self.published)
        if self.images > self.single:
            raise bad("images", f"at most single = {self.single}", self.images)
        if not 1e-9 <= self.tolerance <= 1e-4:
            raise bad("tolerance", "a number from 1e-9 to 1e-4", self.tolerance)

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / "convergence" / self.name


@dataclass(frozen=True)
class Case:
    """The model as trained, its system without eps, and the starts; all float64."""

    model: ImageCompletion
    limit: System
    hidden: Tensor
    target: Tensor
    starts: Tensor  # of the survey: single, repeated, random; the images come first
    config: Config

    @property
    def x0(self) -> Tensor:
        """Of the followed images."""
        return self.starts[: self.config.images]

    def error(self, x: Tensor) -> Tensor:
        """Masked-patch error of the followed images, `(image,)`, in the pixels' variance."""
        return masked_error(self.model.decode(x), self.target, self.hidden)

    def flow(self, system: System, x0: Tensor, times: Any, factor: float = 1.0) -> Solution:
        """The flow at the study's tolerance, or a multiple of it, every sample by itself."""
        rtol = factor * self.config.tolerance
        when = np.asarray(times).tolist()
        return ed.solve(
            system, x0, when, "batched_dopri5", rtol=rtol, atol=rtol / 100, gradient=None
        )


def main(config: Config) -> None:
    """Run the study and write its report."""
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        result = measure(config)
    report = page.report(result)
    path = report.write(config.folder, record_of(result), result)
    print("\n" + "\n\n".join(page.findings(result)) + f"\n\nreport: {path}")


def measure(config: Config) -> xr.DataTree:
    """All measurements, a group each."""
    case = prepare(config)
    groups: dict[str, xr.Dataset] = {}
    stages: dict[str, Callable[[], dict[str, xr.Dataset]]] = {
        "published flow": lambda: published(case),
        "Euler steps": lambda: euler(case),
        "leaky flow": lambda: leaky(case),
        "sphere flow": lambda: sphere(case),
        "survey": lambda: ends(case, {name: groups[name] for name in ("leaky", "sphere")}),
        "rates": lambda: (
            near(case, groups["equilibria"])
            | {"published_rates": by_time(groups["published"], groups["rates"])}
        ),
    }
    with tqdm(stages.items(), unit="stage") as bar:
        for name, stage in bar:
            bar.set_description(name)
            groups |= stage()
    record = {
        "study": asdict(config) | {"runs": str(config.runs), "model": str(config.model)},
        "model": case.model.config,
        "mean_error": mean_error(case),
    }
    result = xr.DataTree.from_dict(groups)
    result.attrs = store.provenance("etdyn.study.convergence/1", record, case.x0)
    return result


def prepare(config: Config) -> Case:
    """The model, and images, masks and random tokens from the seed."""
    model = ed.load_model(config.model).double().requires_grad_(False)
    images = digits().test.double()
    most = max(config.single, config.repeated)
    if most > len(images):
        raise bad("single", f"and repeated at most the {len(images)} held-out images", most)
    chosen = torch.cat([
        images[: config.single], images[: config.repeated].repeat_interleave(config.masks, 0)
    ])  # fmt: skip
    hidden = evaluation_masks(len(chosen), model.patches, config.seed)
    tokens = model.tokens(chosen, hidden)
    draw = torch.Generator().manual_seed(config.seed)
    shape = (config.random, *tokens.shape[1:])
    random = torch.randn(shape, generator=draw, dtype=tokens.dtype) * tokens.square().mean().sqrt()
    few = slice(config.images)
    limit = copy.deepcopy(model.system)
    limit.layer_norm.eps = 0.0
    target = model.normalised_patches(chosen[few])
    return Case(model, limit, hidden[few], target, torch.cat([tokens, random]), config)


def mean_error(case: Case) -> float:
    """Of the mean patch of every position, on the followed images."""
    train = case.model.normalised_patches(digits().train.double())
    filled = mean_completion(train, case.target)
    return float(masked_error(filled, case.target, case.hidden).mean())


def grid(case: Case) -> np.ndarray[Any, Any]:
    """Log-times s = log(1 + t) of the saved states, the training horizon among them."""
    end, horizon = case.config.log_time, case.model.steps * case.model.step
    parts = [0.0], np.geomspace(1e-3, 1, 31), np.arange(1.2, 15, 0.2), np.arange(15, end, 1.0)
    every = np.concatenate([*parts, [np.log1p(horizon), end]]).round(12)
    return np.unique(every[every <= end])


# --- the descents of the images ----------------------------------------------------------------


def published(case: Case) -> dict[str, xr.Dataset]:
    """The published flow with its trained eps: its energy, and what settles and what does not."""
    times, system = np.expm1(grid(case)), case.model.system
    flow = case.flow(system, case.x0, times[times <= case.config.published])
    rises = (audit(flow)["cause"] > Cause.ROUNDING).sum("interval")
    quantities: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
        "speed": (lambda x: rms(system.velocity(0.0, x)), "|dx/dt| of a token"),
        "length": (rms, "|x| of a token"),
        "activation_speed": (lambda x: size(system.activation_velocity(x)), "|dg/dt|"),
        "force": (lambda x: size(system.force(x)), "|grad E|"),
        "error": (case.error, "masked-patch error"),
    }
    data = flow.to_xarray(states=False, relative=True)
    for name, (function, meaning) in quantities.items():
        data[name] = along(flow, function, meaning)
    data["rises"] = labelled("sample", rises, "intervals in which the energy rose")
    return {"published": data}


def euler(case: Case) -> dict[str, xr.Dataset]:
    """The published discrete model, far beyond its last step."""
    model, last = case.model, case.model.steps * case.config.horizons
    shown = {0, model.steps, *np.geomspace(1, last, 100).round().astype(int).tolist()}
    states = itertools.chain([case.x0], iterate(model.system, case.x0, model.step, last))
    rows = [
        (model.system.interaction_energy(x, relative=True), case.error(x))
        for k, x in enumerate(states) if k in shown
    ]  # fmt: skip
    energy, error = (torch.stack(column) for column in zip(*rows, strict=True))
    dims = ("time", "sample")
    data = {
        "energy": labelled(dims, energy, "energy E(g)"),
        "error": labelled(dims, error, "masked-patch error"),
    }
    times = labelled("time", np.array(sorted(shown)) * model.step, "time")
    return {"euler": xr.Dataset(data, {"time": times}), "modules": modules(case)}


def modules(case: Case) -> xr.Dataset:
    """What attention and Hopfield network did to the first images, early and late."""
    model, few = case.model, slice(DRAWN)
    target, hidden = case.target[few], case.hidden[few].unsqueeze(-1)
    run = ed.descend(model.system, case.x0[few], model.step, model.steps, gradient=None)
    steps = sorted({0, 1, 3, model.steps - 1} & set(range(model.steps)))
    data = contributions(run, lambda x: model.pixels(model.decode(x)), steps)
    dims = ("sample", "channel", "row", "column")
    for name, patches in (("given", target.masked_fill(hidden, torch.nan)), ("true", target)):
        data[name] = labelled(dims, model.pixels(patches).numpy(), f"pixels, {name}")
    return data


def leaky(case: Case) -> dict[str, xr.Dataset]:
    """The leaky flow at eps = 0, the published one in log-time, and its decay to equilibrium."""
    system, times = case.limit.with_dynamics("leaky"), grid(case)
    flow = case.flow(system, case.x0, times)
    rough = case.flow(system, case.x0, times, 10)
    gathered = token_clusters(system, flow)[["mean_cosine", "effective_rank", "clusters"]]
    data = flow.to_xarray(states=False, relative=True).merge(gathered, compat="override")
    data["error"] = along(flow, case.error, "masked-patch error")
    energy = along(rough, lambda x: system.interaction_energy(x, relative=True), "energy")[1]
    change = np.abs(energy - data["energy"].values)
    data["tolerance_error"] = labelled(("time", "sample"), change, "at ten times the tolerance")
    seen = [int(np.abs(times - s).argmin()) for s in LOOKS if s <= times[-1]]
    lowest = np.stack([
        spectrum(system, flow.x[k], UNSTABLE, "lowest")["eigenvalue"].values for k in seen
    ])  # fmt: skip
    data["lowest"] = labelled(("look", "sample", "mode"), lowest, "lowest kappa on the way")
    data = data.assign_coords(look=labelled("look", times[seen], "log-time"))
    rest, fit = fitted(case, flow, data)
    fit["error"] = labelled("sample", case.error(rest), "masked-patch error at equilibrium")
    data["end"] = state(flow.x[-1])
    return {"leaky": data, "rates": fit, "pictures": pictures(case, flow, rest)}


def sphere(case: Case) -> dict[str, xr.Dataset]:
    """The sphere flow, at ten times the tolerance: it is the stiffest."""
    times = [0.0, *np.geomspace(1e-3, case.config.sphere, 120)]
    flow = case.flow(case.limit.with_dynamics("sphere"), case.x0, times, 10)
    data = flow.to_xarray(states=False, relative=True)
    data["error"] = along(flow, case.error, "masked-patch error")
    data["end"] = state(flow.x[-1])
    return {"sphere": data}


def along(flow: Solution, function: Callable[[Tensor], Tensor], meaning: str) -> Any:
    """A quantity `(sample,)` of every saved state, as a variable."""
    values = torch.stack([function(x) for x in flow.x])
    return labelled(("time", "sample"), values.numpy(), meaning)


def pictures(case: Case, flow: Solution, rest: Tensor) -> xr.Dataset:
    """Completions of the first eight images: when training stopped, later, and at equilibrium."""
    model, few = case.model, slice(8)
    target, hidden = case.target[few], case.hidden[few].unsqueeze(-1)
    horizon, end = np.log1p(model.steps * model.step), case.config.log_time
    rows = {"image": target, "given": target.masked_fill(hidden, torch.nan)}
    for s in (horizon, 5.0, 50.0, end):
        if s <= end:
            x = flow.x[int((flow.t - s).abs().argmin())]
            rows[f"s = {s:.3g}"] = torch.where(hidden, model.decode(x[few]), target)
    rows["equilibrium"] = torch.where(hidden, model.decode(rest[few]), target)
    shown = np.stack([model.pixels(patches).numpy() for patches in rows.values()])
    dims = ("row", "image", "channel", "height", "width")
    names = np.array(list(rows), dtype=np.dtypes.StringDType())
    return xr.Dataset({"pixels": labelled(dims, shown, "pixels")}, {"row": names})


def state(x: Tensor) -> Any:
    """States as a variable."""
    return labelled(("sample", "token", "feature"), x.numpy(), "last state x")


def size(v: Tensor) -> Tensor:
    """Frobenius norm over tokens and features, `(sample,)`."""
    return v.square().sum((1, 2)).sqrt()


def rms(v: Tensor) -> Tensor:
    """Root mean square over tokens of their norms, `(sample,)`."""
    return v.square().sum(2).mean(1).sqrt()


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, TypeError) as problem:
        sys.exit(f"error: {problem}")
