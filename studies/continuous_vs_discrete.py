"""How far is the published Energy Transformer from the flow that it discretises?

The published model takes a dozen Euler steps. This study runs a trained image-completion model
on held-out images, at many step sizes and far beyond its training horizon, next to a tight
adaptive integration of the same flow, and does the same for the leaky and the sphere dynamics.

    python -m studies.continuous_vs_discrete --help
"""

from __future__ import annotations

import itertools
import sys
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
from etdyn.analysis import activation_distance
from etdyn.checks import bad, check_count
from etdyn.datasets import ImageSet, digits
from etdyn.report import format_table
from etdyn.solve import Interpolant, iterate
from etdyn.systems import System
from etdyn.tasks import (
    DRAWS,
    ImageCompletion,
    TrainCommand,
    completion_error,
    evaluation_masks,
    gaussian_completion,
    masked_error,
    mean_completion,
    parse_duration,
    psnr,
    read_record,
)
from studies import continuous_vs_discrete_page as page

SHIPPED = Path(__file__).parent.parent / "data" / "digits"


@dataclass(frozen=True)
class Config:
    """Compare the published Euler model with the flow that it discretises."""

    name: str = "default"
    """Of the run; results go to runs/continuous_vs_discrete/<name>/."""
    runs: Path = Path("runs")
    """Where results go."""
    model: Path = SHIPPED
    """The trained model, a safetensors file with its JSON beside it."""
    train: bool = False
    """Train a model anew and use it instead of the shipped one."""
    budget: str = "3min"
    """Time for --train: a number with s, min or h; `full` runs the shipped model's recipe."""
    images: int = 16
    """Held-out images whose trajectories are followed."""
    steps_per_horizon: tuple[int, ...] = (48, 24, 12, 6, 3, 2, 1)
    """Euler steps in one training horizon, the model's own number (12) among them."""
    horizons: tuple[int, ...] = (1, 2, 4, 10, 20)
    """Ends of the runs, in training horizons: 1 and more, increasing."""
    tolerance: float = 1e-8
    """rtol and atol of the reference flow; its error is measured against 100 times as much."""
    seed: int = 0
    """Of the masks."""
    threads: int = 1
    """Threads of torch; more help with large models only, and cost where cores are shared."""

    def __post_init__(self) -> None:
        check_count("images", self.images)
        check_count("threads", self.threads)
        for name in ("steps_per_horizon", "horizons"):
            for value in getattr(self, name):
                check_count(name, value)
        increasing = all(a < b for a, b in itertools.pairwise(self.horizons))
        if self.horizons[:1] != (1,) or len(self.horizons) < 2 or not increasing:
            raise bad("horizons", "increasing numbers that start with 1", self.horizons)
        if not 1e-10 <= self.tolerance <= 1e-4:
            raise bad("tolerance", "a number from 1e-10 to 1e-4", self.tolerance)

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / "continuous_vs_discrete" / self.name

    @property
    def trained_model(self) -> Path:
        """The model that is studied."""
        return self.folder / "model" / "best" if self.train else self.model


@dataclass(frozen=True)
class Batch:
    """What is completed: float64 images, their masks, normalised patches, and the start."""

    images: Tensor
    hidden: Tensor
    target: Tensor
    x0: Tensor


def main(config: Config) -> None:
    """Run the study and write its report."""
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    data = digits()
    model = trained(config) if config.train else ed.load_model(config.model)
    if model.steps not in config.steps_per_horizon:
        raise bad("steps_per_horizon", f"numbers with the model's own {model.steps} among them",
                  config.steps_per_horizon)  # fmt: skip
    baselines = score(model, data)
    print(
        "\n"
        + format_table(("held-out masked-patch error", "error"), page.rows_of(baselines))
        + "\n"
    )
    model = model.double()
    with torch.no_grad():
        batch = start(model, data.test.double(), config)
        groups = {name: measure(model, name, batch, config) for name in page.DYNAMICS}
        gallery = completions(model, batch, data, config)
    error = [v for k, v in baselines.items() if k.startswith("Energy")]
    record = {
        "psnr": float(psnr(torch.tensor(error), model.pixel_std.float())[0]),
        "study": asdict(config) | {"runs": str(config.runs), "model": str(config.model)},
        "model": model.config,
        "baselines": baselines,
        "training": read_record(config.trained_model),
    }
    result = xr.DataTree.from_dict(groups)
    schema = "etdyn.study.continuous_vs_discrete/1"
    result.attrs = store.provenance(schema, record, batch.x0)
    print("\n" + format_table(*page.table(result)) + "\n")
    report = page.report(result, gallery, record)
    path = report.write(config.folder, record, result)
    print(page.findings(result, record))
    print(f"\nreport: {path}")


def trained(config: Config) -> ImageCompletion:
    """A model trained now, in `config.folder`/model, or the end of a run that stands there."""
    folder = config.folder / "model"
    command = TrainCommand(folder=folder, resume=(folder / "resume.safetensors").exists())
    return command.run(None if config.budget == "full" else parse_duration(config.budget))


@torch.no_grad()
def score(model: ImageCompletion, data: ImageSet) -> dict[str, float]:
    """Errors of the model and of the baselines on all held-out images, half the patches hidden."""
    target, train = (model.normalised_patches(x) for x in (data.test, data.train))
    mean, gauss = [], []
    for seed in range(DRAWS):  # the masks of completion_error
        mask = evaluation_masks(len(target), model.patches, seed)
        mean.append(masked_error(mean_completion(train, target), target, mask).mean())
        filled = gaussian_completion(train, target, mask)
        gauss.append(masked_error(filled, target.double(), mask).mean())
    error = completion_error(model, data.test)
    return {
        "mean of every position": float(torch.stack(mean).mean()),
        "Gaussian conditional mean": float(torch.stack(gauss).mean()),
        f"Energy Transformer, {model.steps} steps of {model.step:g}": error,
    }


def start(model: ImageCompletion, images: Tensor, config: Config) -> Batch:
    """The first images with half of their patches hidden."""
    if config.images > len(images):
        raise bad("images", f"at most the {len(images)} held-out images", config.images)
    hidden = evaluation_masks(len(images), model.patches, config.seed)[: config.images]
    images = images[: config.images]
    return Batch(images, hidden, model.normalised_patches(images), model.tokens(images, hidden))


# --- measurement -------------------------------------------------------------------------------


def measure(model: ImageCompletion, dynamics: str, batch: Batch, config: Config) -> xr.Dataset:
    """Flow and Euler runs of one dynamics from the same start, compared at every horizon."""
    system = model.system.with_dynamics(dynamics)
    model = model.with_system(system)
    horizon = model.steps * model.step
    ends = np.array(config.horizons) * horizon
    times = np.unique(np.concatenate([
        [0.0], np.geomspace(1e-3 * horizon, ends.max(), 120), np.linspace(0, horizon, 49), ends,
    ]).round(12))  # fmt: skip
    flow = ed.solve(
        system, batch.x0, times.tolist(), rtol=config.tolerance, atol=config.tolerance,
        gradient=None, progress=f"flow  {dynamics:6s}",
    )  # fmt: skip
    rough = ed.solve(
        system, batch.x0, [0.0, *ends.tolist()], rtol=100 * config.tolerance,
        atol=100 * config.tolerance, gradient=None, progress=f"check {dynamics:6s}",
    )  # fmt: skip
    observed = flow.to_xarray(states=False)
    data: dict[str, Any] = {f"flow_{n}": v for n, v in observed.data_vars.items() if n != "status"}
    data["flow_error"] = (("time", "sample"), stack(completion(model, batch, x) for x in flow.x))
    at_ends = [int(np.abs(times - end).argmin()) for end in ends]
    data["reference_distance"] = (
        ("horizon", "kind", "sample"),
        stack(
            distance(system, rough.x[k + 1], flow.x[i], batch.hidden) for k, i in enumerate(at_ends)
        ),
    )
    counts = sorted(config.steps_per_horizon, reverse=True)
    clock = observed["clock"].to_numpy()
    comparison = Comparison(model, batch, config.horizons, Interpolant(flow), clock)
    with tqdm(total=sum(counts) * max(config.horizons), desc=f"Euler {dynamics:6s}") as bar:
        runs = [comparison.euler(horizon / count, count, bar) for count in counts]
    coords = {
        "step_size": horizon / np.array(counts),
        "horizon": np.array(config.horizons),
        "kind": np.array(page.KINDS, dtype=np.dtypes.StringDType()),
    }
    joined = xr.concat(runs, dim=xr.DataArray(coords["step_size"], dims="step_size"))
    attrs = {"dynamics": dynamics, "training_horizon": horizon, "training_step": model.step}
    return xr.Dataset(data, {**observed.coords, **coords}, attrs).merge(joined)


@dataclass(frozen=True)
class Comparison:
    """Euler runs of one dynamics against its flow."""

    model: ImageCompletion
    batch: Batch
    horizons: tuple[int, ...]
    flow: Interpolant
    clock: np.ndarray[Any, Any]  # of the flow at its saved times, (time, sample)

    def time_of(self, clock: Tensor) -> np.ndarray[Any, Any]:
        """When every sample's own intrinsic clock shows this, `(sample,)`; the end, if later."""
        pairs = zip(clock.numpy(), self.clock.T, strict=True)
        return np.array([np.interp(tau, column, self.flow.t) for tau, column in pairs])

    def euler(self, step: float, count: int, bar: tqdm[Any]) -> xr.Dataset:
        """One run of `count` steps a horizon, compared at equal time and at equal clock."""
        system = self.model.system
        start = system.prepare(self.batch.x0)
        energy, last = system.energy(start), start
        clock, rises = torch.zeros_like(energy), torch.zeros_like(energy)
        rows: dict[str, list[Tensor]] = {}
        for k, x in enumerate(iterate(system, start, step, count * max(self.horizons)), 1):
            bar.update()
            before, energy = energy, system.energy(x)
            rises += energy - before > 1e-12 * before.abs()
            clock += system.token_mean(system.elapsed_clock(last, x, step))
            last = x
            if k % count == 0 and k // count in self.horizons:
                row = self.observe(x, k * step, clock) | {"clock": clock, "rises": rises}
                for name, value in row.items():
                    rows.setdefault(f"euler_{name}", []).append(value.clone())
        dims = ("horizon", "kind", "sample")
        return xr.Dataset({
            name: (dims if values[0].ndim == 2 else dims[::2], stack(values))
            for name, values in rows.items()
        })  # fmt: skip

    def nearest_time(self, x: Tensor) -> Tensor:
        """When the flow comes nearest to x in g, over all tokens, `(sample,)`."""
        gaps = [activation_distance(self.model.system, x, y).norm(dim=1) for y in self.flow.x]
        return torch.from_numpy(self.flow.t)[torch.stack(gaps).argmin(0)]

    def observe(self, x: Tensor, t: float, clock: Tensor) -> dict[str, Tensor]:
        """What is recorded of a state that an Euler run reached at time t."""
        system, hidden = self.model.system, self.batch.hidden
        at_clock, nearest = self.flow(self.time_of(clock)), self.nearest_time(x)
        return {
            "nearest_time": nearest,
            "distance_to_path": distance(system, x, self.flow(nearest.numpy()), hidden),
            "distance": distance(system, x, self.flow(min(t, self.flow.t[-1])), hidden),
            "distance_at_equal_clock": distance(system, x, at_clock, hidden),
            "energy": system.energy(x),
            **{f"energy_{name}": value for name, value in system.energies(x).items()},
            "interaction_energy": system.interaction_energy(x),
            "residual": system.residual(x),
            "error": completion(self.model, self.batch, x),
        }


def distance(system: System, x: Tensor, reference: Tensor, hidden: Tensor) -> Tensor:
    """Root mean square over the tokens of a kind of their distance in g, `(kind, sample)`."""
    gap = activation_distance(system, x, reference).square()
    kinds = [(gap[:, 1:] * mask).sum(1) / mask.sum(1) for mask in (hidden, ~hidden)]
    return torch.stack([*kinds, gap[:, 0]]).sqrt()


def completion(model: ImageCompletion, batch: Batch, x: Tensor) -> Tensor:
    """Masked-patch error of every image, `(sample,)`, in units of the pixels' variance."""
    return masked_error(model.decode(x), batch.target, batch.hidden)


def stack(values: Any) -> np.ndarray[Any, Any]:
    """Tensors of one shape as one array."""
    return torch.stack(list(values)).numpy()


# --- report ------------------------------------------------------------------------------------


def completions(
    model: ImageCompletion, batch: Batch, data: ImageSet, config: Config
) -> dict[str, np.ndarray[Any, Any]]:
    """Images for the eye: the first ten, as given and as completed in several ways."""
    few = slice(0, 10)
    target, hidden = batch.target[few], batch.hidden[few].unsqueeze(-1)
    horizon, far = model.steps * model.step, max(config.horizons)
    ends = [0.0, horizon, far * horizon]
    flow = ed.solve(model.system, batch.x0[few], ends, gradient=None)
    discrete = ed.descend(model.system, batch.x0[few], model.step, far * model.steps)
    train = model.normalised_patches(data.train.double())
    filled = gaussian_completion(train, target, hidden[..., 0])
    rows = {
        "image": target,
        "given": target.masked_fill(hidden, float("nan")),
        "Gaussian": filled,
        f"Euler, t = {horizon:g}": model.decode(discrete.x[model.steps]),
        f"flow, t = {horizon:g}": model.decode(flow.x[1]),
        f"Euler, t = {far * horizon:g}": model.decode(discrete.x[-1]),
        f"flow, t = {far * horizon:g}": model.decode(flow.x[2]),
    }
    shown = {n: p if n == "given" else torch.where(hidden, p, target) for n, p in rows.items()}
    return {name: model.pixels(patches).numpy() for name, patches in shown.items()}


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, TypeError) as problem:
        sys.exit(f"error: {problem}")
