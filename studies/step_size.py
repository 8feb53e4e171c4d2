"""How large may the Energy Transformer's step be, and what does another step do to its answers?

Predicted step-size limits against measured ones at the equilibria of a trained image-completion
model; what Euler does at every step size and horizon, in one batch; and how well a model trained
at one step size and step count completes images at others. A small system of repelling tokens,
whose published dynamics does have a limit, is the control.

    python -m studies.step_size --help
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
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
from etdyn.analysis.labels import labelled
from etdyn.analysis.spectrum import spectrum
from etdyn.analysis.stepsize import measured_limit, multiplier, predicted_limits
from etdyn.analysis.stepsize_map import attractor_switches, first_step_overshoot, step_size_map
from etdyn.checks import bad, check_count
from etdyn.datasets import digits
from etdyn.solve import iterate
from etdyn.systems import System
from etdyn.tasks import ImageCompletion, evaluation_masks, masked_error, read_record
from studies import step_size_page as page
from studies.step_size_numbers import DYNAMICS, KINDS

SHIPPED = Path(__file__).parent.parent / "data" / "digits"
DECADES = {"et": (-1, 2), "leaky": (-1, 2), "sphere": (-2, 1)}  # step sizes over the trained one
PUBLISHED_SPREAD = 0.002 * 2**0.5  # of masked tokens at the published start (ET-F26)
TIGHT = 1e-9  # of the residual of equilibria
KICK = 1e-3  # off the control's equilibrium, relative
TOKENS, DIM, BETA = 8, 12, 1e-3  # of the control (ET-F24)
NO_EPS = 1e-12  # there, or g grows longer as x drifts, and hides what the kick does to E


@dataclass(frozen=True)
class Config:
    """Predicted and measured step-size limits, the step-size map, and steps beyond training."""

    name: str = "default"
    """Of the run; results go to runs/step_size/<name>/."""
    runs: Path = Path("runs")
    """Where results go."""
    model: Path = SHIPPED
    """The trained model, a safetensors file with its JSON beside it."""
    images: int = 24
    """Held-out images of the limits and the map."""
    scored_images: int = 120
    """Held-out images that choose the best step size and count; the others check the choice."""
    scored_sizes: int = 22
    """Step sizes among which they choose, over the three decades of the map."""
    step_sizes: int = 64
    """Step sizes of the map, over three decades: a multiple of three, and one."""
    steps: int = 100
    """Euler steps at every step size, the model's own number and more."""
    followed_images: int = 8
    """Of the map, whose last states are followed to rest."""
    followed_sizes: int = 10
    """Step sizes at which they are."""
    starts: int = 8
    """Starts of the control, and random ones of the trained model beside its images."""
    seed: int = 0
    """Of masks and random starts."""
    threads: int = 1
    """Threads of torch; more help with large models only, and cost where cores are shared."""

    def __post_init__(self) -> None:
        counts = (*(f"{part}_images" for part in ("scored", "followed")), "images", "threads")
        for name in (*counts, "followed_sizes", "starts"):
            check_count(name, getattr(self, name))
        check_count("steps", self.steps, least=2)
        for name in ("step_sizes", "scored_sizes"):
            count = getattr(self, name)
            if count < 4 or count % 3 != 1:
                raise bad(name, "4, 7, 10, ... (a multiple of three, and one)", count)
        for name, most in (("followed_images", self.images), ("followed_sizes", self.step_sizes)):
            if getattr(self, name) > most:
                raise bad(name, f"at most {most}", getattr(self, name))

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / "step_size" / self.name


@dataclass(frozen=True)
class Batch:
    """What is completed: float64 normalised patches, which of them are hidden, and the start."""

    target: Tensor
    hidden: Tensor
    x0: Tensor

    def __getitem__(self, rows: slice) -> Batch:
        return Batch(self.target[rows], self.hidden[rows], self.x0[rows])

    def error(self, model: ImageCompletion, x: Tensor, sample: Tensor) -> Tensor:
        """Masked-patch error of states that started from these samples, `(rows,)`."""
        return masked_error(model.decode(x), self.target[sample], self.hidden[sample])


def main(config: Config) -> None:
    """Run the study and write its report."""
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = ed.load_model(config.model).double().requires_grad_(False)
    data = held_out(model, config)
    groups: dict[str, xr.Dataset] = {}
    with torch.no_grad(), tqdm(total=len(PARTS), desc="step size", unit="part") as bar:
        for name, part in measurements(model, data, config):
            groups[name] = part
            bar.set_postfix_str(name)
            bar.update()
    record = {
        "study": asdict(config) | {"runs": str(config.runs), "model": str(config.model)},
        "model": model.config,
        "training": read_record(config.model),
    }
    result = xr.DataTree.from_dict(groups)
    result.attrs = store.provenance("etdyn.study.step_size/1", record, data.x0)
    path = page.report(result, record).write(config.folder, record, result)
    print("\n" + "\n\n".join(page.findings(result)) + f"\n\nreport: {path}")


def held_out(model: ImageCompletion, config: Config) -> Batch:
    """All held-out images, half of their patches hidden."""
    images = digits().test.double()
    if config.scored_images >= len(images) or config.images > len(images):
        raise bad("scored_images", f"fewer than the {len(images)} held-out images, and images as "
                  "many at most", (config.scored_images, config.images))  # fmt: skip
    if config.steps < model.steps:
        raise bad("steps", f"at least the model's own {model.steps}", config.steps)
    hidden = evaluation_masks(len(images), model.patches, config.seed)
    return Batch(model.normalised_patches(images), hidden, model.tokens(images, hidden))


PARTS = (
    *(f"{part}/{law}" for part in ("limits", "control", "map") for law in DYNAMICS),
    "multiplier", "transient", "first_step", "scored", "unseen",
)  # fmt: skip


def measurements(
    model: ImageCompletion, data: Batch, config: Config
) -> Iterator[tuple[str, xr.Dataset]]:
    """The groups of the result, in the order of PARTS."""
    batch = data[: config.images]
    draw = torch.Generator().manual_seed(config.seed)
    random = torch.randn(config.starts, *batch.x0.shape[1:], generator=draw).double()
    starts = torch.cat([batch.x0, random])
    control, x0 = repelling(config)
    still = ed.find_equilibrium(control, x0, tol=TIGHT).x
    settled = ed.find_equilibrium(model.system, starts, tol=TIGHT).x
    for law in DYNAMICS:
        system = model.system.with_dynamics(law)
        yield f"limits/{law}", limits(system, starts, settled, config.images)
    for law in DYNAMICS:
        yield f"control/{law}", limits(control.with_dynamics(law), x0, still, 0)
    for law in DYNAMICS:
        mapped = measure_map(model, law, batch, config.step_sizes, config.steps)
        ends = follow(model.system.with_dynamics(law), mapped, batch.x0, config)
        yield f"map/{law}", mapped.drop_vars("x").merge(ends)
    yield "multiplier", multipliers(control, still)
    yield "transient", transient(control, still, config.steps)
    yield "first_step", first_step(model, batch, grid(model, "et", config.step_sizes))
    few = data[: config.scored_images]
    scored = measure_map(model, "et", few, config.scored_sizes, config.steps).drop_vars("x")
    yield "scored", scored
    yield "unseen", score(model, data[config.scored_images :], candidates(scored, model))


# --- limits ------------------------------------------------------------------------------------


def limits(system: System, x0: Tensor, settled: Tensor, images: int) -> xr.Dataset:
    """Predicted and measured limits where every start comes to rest; the first are images.

    settled: where they do under the leaky dynamics, whose equilibria all share in g.
    """
    found = ed.find_equilibrium(system, settled, tol=TIGHT)
    measured = measured_limit(system, found.x)
    data = predicted_limits(system, found.x).drop_attrs(deep=False).drop_vars("lipschitz")
    data["limit"], data["ratio"] = measured["limit"], measured["ratio"]
    at = {state: predicted_limits(system, x) for state, x in (("start", x0), ("rest", found.x))}
    for name in ("descent", "lipschitz"):
        both = xr.concat([at["start"][name], at["rest"][name]], "state")
        data[name] = both.assign_coords(state=text(at))
    energy = system.interaction_energy(found.x, relative=True)
    data["energy"] = labelled("sample", energy, "interaction energy without its constant")
    data["converged"] = labelled("sample", found.converged, "whether it came to rest")
    data["image"] = labelled("sample", np.arange(len(x0)) < images, "whether an image started it")
    return data


def repelling(config: Config) -> tuple[System, Tensor]:
    """The control of ET-F24, tokens that repel each other, and random starts."""
    attention = ed.Attention(DIM, 1, DIM, beta=BETA).double().requires_grad_(False)
    with torch.no_grad():
        attention.query.copy_(torch.eye(DIM))
        attention.key.copy_(-torch.eye(DIM))
    draw = torch.Generator().manual_seed(config.seed)
    x0 = torch.randn(config.starts, TOKENS, DIM, generator=draw).double()
    return System(ed.LayerNorm(DIM, eps=NO_EPS).double().requires_grad_(False), attention), x0


def multipliers(control: System, rest: Tensor) -> xr.Dataset:
    """By what a step multiplies the control's top mode under the published dynamics."""
    sizes = np.geomspace(0.01, 100.0, 33)
    rows = [multiplier(control, rest, float(h)).drop_vars("step") for h in sizes]
    joined = xr.concat(rows, xr.DataArray(sizes, dims="step_size"), combine_attrs="drop_conflicts")
    return joined.drop_attrs(deep=False).assign_coords(step_size=size_coordinate(sizes))


def transient(control: System, rest: Tensor, steps: int) -> xr.Dataset:
    """How often the control's energy rises after a kick along its top mode, and how often ET-F23
    says: in every step with h / c_k > 2 / (kappa - 2), where c_k = c_0 + k h.
    """
    still = control.with_dynamics("leaky")
    top = spectrum(still, rest, k=1, which="highest", vectors=True).isel(mode=-1)
    kick = torch.from_numpy(top["direction"].values)
    length = rest.square().sum((1, 2), keepdim=True).sqrt()
    sizes = torch.logspace(-1, 2, 31, dtype=torch.float64)
    found = step_size_map(control, rest + KICK * length * kick, sizes, steps)
    c0 = predicted_limits(control, rest)["scale"].values[:, None, None]
    h = sizes.numpy()[None, :, None]
    unstable = c0 + np.arange(steps) * h < h * (top["eigenvalue"].values[:, None, None] - 2) / 2
    data = found[["rises"]].isel(step=-1, drop=True).drop_attrs(deep=False)
    data["predicted"] = labelled(("sample", "step_size"), unstable.sum(2), "rises by ET-F23")
    return data.drop_vars("time", errors="ignore")


# --- the map -----------------------------------------------------------------------------------


def grid(model: ImageCompletion, law: str, count: int) -> Tensor:
    """Step sizes over three decades, the trained one among them."""
    low, high = DECADES[law]
    return model.step * torch.logspace(low, high, count, dtype=torch.float64)


def measure_map(
    model: ImageCompletion, law: str, batch: Batch, sizes: int, steps: int
) -> xr.Dataset:
    """The step-size map of one dynamics, with the error of the images."""
    local = model.with_system(model.system.with_dynamics(law))
    found = step_size_map(
        local.system, batch.x0, grid(model, law, sizes), steps,
        lambda x, sample: batch.error(local, x, sample),
    )  # fmt: skip
    attrs = {"dynamics": law, "step": model.step, "steps": model.steps}
    return found.drop_attrs(deep=False).assign_attrs(attrs)


def follow(system: System, found: xr.Dataset, x0: Tensor, config: Config) -> xr.Dataset:
    """Which attractors some of a map's last states belong to."""
    images, count = config.followed_images, config.followed_sizes
    chosen = np.linspace(0, found.sizes["step_size"] - 1, count).round().astype(int)
    few = found.isel(sample=slice(images), step_size=np.unique(chosen))
    ends = attractor_switches(system, few, x0[:images]).drop_attrs(deep=False)
    return ends.rename(sample="followed", step_size="followed_size", distance="attractor_distance")


def first_step(model: ImageCompletion, batch: Batch, sizes: Tensor) -> xr.Dataset:
    """The first step of the published dynamics from the model's starts and from smaller ones.

    The smaller ones are scaled so that masked tokens have the published spread of features.
    """
    lagrangian = model.system.lagrangian
    assert isinstance(lagrangian, ed.LayerNorm)
    spread = lagrangian.centre(batch.x0).square().mean(-1).sqrt()[:, 1:]
    small = PUBLISHED_SPREAD / float(spread[batch.hidden].mean())
    parts = []
    for scale in (1.0, small):
        x0 = scale * batch.x0
        seen = first_step_overshoot(model.system, x0, sizes)
        data = seen[["decrease_ratio"]].drop_attrs(deep=False)
        for name in ("displacement", "turn"):
            of_kind = by_kind(seen[name].values, batch.hidden.numpy())
            dims = ("kind", "sample", "step_size")
            data[name] = labelled(dims, of_kind, seen[name].attrs["long_name"])
        widths = lagrangian.sigma(x0)[:, None, :].numpy()
        data["sigma"] = labelled(
            ("kind", "sample"), by_kind(widths, batch.hidden.numpy())[..., 0], "sigma of tokens"
        )
        parts.append(data)
    scales = xr.DataArray([1.0, small], dims="scale", name="scale")
    return xr.concat(parts, scales).assign_coords(kind=text(KINDS))


def by_kind(values: np.ndarray[Any, Any], hidden: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Means over tokens of each kind of `(sample, step_size, token)`: `(kind, sample, step_size)`.

    NaN where a sample has none of a kind.
    """
    cls = np.zeros(len(hidden), bool)[:, None]
    kinds = [np.concatenate([cls, mask], 1) for mask in (hidden, ~hidden)]
    kinds.append(np.concatenate([~cls, np.zeros_like(hidden)], 1))
    return np.stack([np.einsum("sht,st->sh", values, m) / m.sum(1)[:, None] for m in kinds])


# --- steps that the model was not trained for --------------------------------------------------


def candidates(et: xr.Dataset, model: ImageCompletion) -> dict[str, tuple[float, int]]:
    """Step sizes and counts that the map's images find best, and the trained ones."""
    error = et["error"].mean("sample").values  # (step_size, step)
    sizes, steps = et["step_size"].values, et.sizes["step"] - 1
    own = int(np.abs(sizes - model.step).argmin())
    counts = (model.step * model.steps / sizes).round().astype(int)
    same = np.flatnonzero((counts >= 1) & (counts <= steps))  # reach the trained horizon
    kept = same[error[same, counts[same]].argmin()]
    fixed = error[:, model.steps].argmin()
    free = np.unravel_index(error[:, 1:].argmin(), error[:, 1:].shape)
    chosen = {
        "as trained": (own, model.steps),
        "best count at the trained step": (own, 1 + error[own, 1:].argmin()),
        "best step at the trained count": (fixed, model.steps),
        "best step at the trained horizon": (kept, counts[kept]),
        "smallest step, trained horizon": (same[0], counts[same[0]]),
        "best step and count": (free[0], 1 + free[1]),
        "largest step, best count": (-1, 1 + error[-1, 1:].argmin()),
    }
    return {name: (float(sizes[i]), int(n)) for name, (i, n) in chosen.items()}


def score(model: ImageCompletion, batch: Batch, chosen: dict[str, tuple[float, int]]) -> xr.Dataset:
    """Errors of every candidate on images that had no part in choosing it."""
    everything, errors = torch.arange(len(batch.x0)), []
    for step, count in chosen.values():
        *_, x = iterate(model.system, model.system.prepare(batch.x0), step, count)
        errors.append(batch.error(model, x, everything).numpy())
    sizes, counts = zip(*chosen.values(), strict=True)
    data = {
        "error": labelled(("candidate", "image"), errors, "masked-patch error"),
        "step_size": labelled("candidate", sizes, "step size, flow time"),
        "count": labelled("candidate", counts, "Euler steps"),
    }
    return xr.Dataset(data, {"candidate": text(chosen), "image": range(len(batch.x0))})


def text(names: Any) -> np.ndarray[Any, Any]:
    """Names as zarr keeps them."""
    return np.array(list(names), dtype=np.dtypes.StringDType())


def size_coordinate(sizes: np.ndarray[Any, Any]) -> Any:
    """Step sizes as a coordinate."""
    return labelled("step_size", sizes, "step size, flow time")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, TypeError) as problem:
        sys.exit(f"error: {problem}")
