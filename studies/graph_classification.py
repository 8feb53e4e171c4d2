"""Does descending an energy tell graphs apart, as well as the networks made for it?

Trains an Energy Transformer and the usual baselines on the same folds, by one loop, in nested
cross-validation; shows how far the published notebooks' protocol, which scores the graphs it
trained on, inflates accuracy; and runs the blocks of a trained model on, beyond their few steps,
to equilibrium. A run that is killed continues where it was.

    python -m studies.graph_classification --help
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
import xarray as xr
from tqdm import tqdm

from etdyn import store
from etdyn.analysis.labels import labelled
from etdyn.checks import bad, check_choice, check_count
from etdyn.datasets import GraphSet, load_graphs
from etdyn.report import format_table
from etdyn.tasks import (
    FitConfig,
    GraphClassifier,
    GraphData,
    cross_validate,
    nested_folds,
    published_protocol,
    train_fold,
)
from etdyn.tasks.graph_baselines import cross_validate_table, graph_table
from studies import graph_classification_page as page
from studies.graph_classification_descent import Trained, descent, invariance, renumbered
from studies.graph_classification_models import MODELS, TABLES, ETConfig, networks, sees

SCHEMA = "etdyn.study.graph_classification"
LEAK = ("et", "gin")  # those that the published protocol is run on, where they compete
COLUMNS = {
    "test_accuracy": "accuracy on the test fold",
    "validation_accuracy": "accuracy on the inner validation, by which the epoch was chosen",
    "train_accuracy": "accuracy on the training graphs",
    "best_epoch": "epoch that was chosen",
    "epochs": "epochs that were run",
    "seconds": "wall time of training",
    "saved_bytes": "what one training batch keeps for the backward pass",
    "parameters": "parameters",
}


@dataclass(frozen=True)
class Config:
    """Nested cross-validation of graph classifiers, and where their descent goes."""

    name: str = "default"
    """Of the run; results go to runs/graph_classification/<name>/."""
    runs: Path = Path("runs")
    """Where results go."""
    data: tuple[str, ...] = ("digits",)
    """Data sets: digits (superpixel graphs, made here), or zips or folders of TU text files."""
    graphs: int | None = 300
    """At most so many graphs of each, drawn by the seed; None is all."""
    models: tuple[str, ...] = MODELS
    """What competes."""
    folds: int = 3
    """Of the outer cross-validation; 10 for a table that others can compare with."""
    epochs: tuple[int, ...] = (15,)
    """At most; one number for all data sets, or one for each."""
    patience: tuple[int, ...] = (15,)
    """Epochs without a better validation after which training stops; as epochs."""
    batch: int = 32
    """Graphs an optimiser step."""
    et: ETConfig = field(default_factory=ETConfig)
    """The Energy Transformer."""
    follow: int = 40
    """At most so many test graphs of the first fold whose descent is followed."""
    doublings: int = 5
    """Of the training horizon, to which blocks are run on."""
    evaluations: int = 500
    """At most, of the search for each equilibrium."""
    seed: int = 0
    """Of folds, weights, batches, noise, and of the drawn graphs."""
    threads: int = 1
    """Threads of torch; more help with large graphs only, and cost where cores are shared."""

    def __post_init__(self) -> None:
        for name in ("follow", "doublings", "evaluations", "threads"):
            check_count(name, getattr(self, name))
        if self.graphs is not None:
            check_count("graphs", self.graphs)
        for name in ("data", "models"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise bad(name, "at least one, each once", values)
        for model in self.models:
            check_choice("models", model, MODELS)
        for name in ("epochs", "patience"):
            if len(getattr(self, name)) not in (1, len(self.data)):
                raise bad(name, f"one number, or {len(self.data)}, one a data set",
                          getattr(self, name))  # fmt: skip

    @property
    def folder(self) -> Path:
        """Of the results."""
        return self.runs / "graph_classification" / self.name

    def recipe(self, number: int, lr: float) -> FitConfig:
        """How models are trained on the data set of this number."""
        epochs, patience = (values[number % len(values)] for values in (self.epochs, self.patience))
        return FitConfig(epochs=epochs, patience=patience, lr=lr, batch=self.batch)


def main(config: Config) -> None:
    """Run the study and write its report."""
    torch.set_num_threads(config.threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    runs = [Run(config, number, source) for number, source in enumerate(config.data)]
    names = [run.graphs.name for run in runs]
    if len(set(names)) < len(names):
        raise bad("data", "sets of different names", names)
    groups: dict[str, xr.Dataset] = {}
    with tqdm(total=len(runs) * (len(config.models) + 2), desc="graphs", unit="part") as bar:
        found = [run.everything(bar) for run in runs]
    for group in ("sets", "scores", "leak"):
        parts = [part[group] for part in found if group in part]
        if parts:
            groups[group] = xr.concat(parts, "data")
    for name, part in zip(names, found, strict=True):
        if "descent" in part:
            groups[f"descent/{name}"] = part["descent"]
    record = {"study": asdict(config) | {"runs": str(config.runs)}}
    result = xr.DataTree.from_dict(groups)
    result.attrs = store.provenance(f"{SCHEMA}/1", record, torch.empty(0))
    path = page.report(result).write(config.folder, record, result)
    print("\n" + format_table(*page.accuracy_table(result)) + "\n")
    print("\n\n".join(page.findings(result)) + f"\n\nreport: {path}")


class Run:
    """One data set: everything that is done with it, each part kept in the run's folder."""

    def __init__(self, config: Config, number: int, source: str) -> None:
        self.config, self.number = config, number
        self.graphs = drawn(load_graphs(source), config.graphs, config.seed)
        self.data = GraphData(self.graphs)
        self.checksum = self.data.checksum()
        self.networks = networks(config.et)

    def everything(self, bar: tqdm[Any]) -> dict[str, xr.Dataset]:
        """The groups of the result, of this data set."""
        rows = []
        for model in self.config.models:
            bar.set_postfix_str(f"{self.graphs.name}, {model}")
            rows.append(self.scores(model))
            bar.update()
        parts = {"sets": self.about(), "scores": self.labelled(xr.concat(rows, "model"))}
        bar.set_postfix_str(f"{self.graphs.name}, published protocol")
        leaks = [self.leak(model) for model in LEAK if model in self.config.models]
        if leaks:
            parts["leak"] = self.labelled(xr.concat(leaks, "model"))
        bar.update()
        bar.set_postfix_str(f"{self.graphs.name}, descent")
        if "et" in self.config.models:
            parts["descent"] = self.descent()
        bar.update()
        return parts

    def labelled(self, found: xr.Dataset) -> xr.Dataset:
        """With the data set as a dimension, and what each model sees."""
        views = ("model", np.array([sees(str(model)) for model in found["model"].values]))
        return found.assign_coords(sees=views).expand_dims(data=[self.graphs.name])

    def about(self) -> xr.Dataset:
        """How large it is, and how often one is right who always names the commonest class."""
        graphs, count = self.graphs, len(self.graphs)
        values = {
            "graphs": (count, "graphs"),
            "classes": (graphs.classes, "classes"),
            "nodes": (sum(len(f) for f in graphs.features) / count, "mean nodes a graph"),
            "edges": (sum(e.shape[1] for e in graphs.edges) / count, "mean directed edges a graph"),
            "node_features": (self.data.width, "features of a node"),
            "edge_features": (self.data.edge_width, "features of an edge"),
            "majority": (int(graphs.labels.bincount().max()) / count, "share of the largest class"),
        }
        return xr.Dataset({
            name: labelled("data", [value], text) for name, (value, text) in values.items()
        }, {"data": [graphs.name]})  # fmt: skip

    def path(self, part: str) -> Path:
        """Where a part is kept, from which a killed run continues."""
        return self.config.folder / "parts" / f"{self.graphs.name.replace(' ', '_')}-{part}.zarr"

    def kept(self, part: str, record: dict[str, Any], make: Callable[[], xr.Dataset]) -> xr.Dataset:
        """A part that stands in the folder, or is made now and put there.

        Raises:
            ValueError: it stands there with another record.
        """
        path, seed = self.path(part), self.config.seed
        attributes = store.provenance(
            f"{SCHEMA}.part/1",
            {"data": self.data.name, "checksum": self.checksum, "seed": seed, **record},
            torch.empty(0),
        )
        if not path.exists():
            made = make()
            store.save(made.assign_attrs(made.attrs | attributes), path)
        found = store.load(path)
        assert isinstance(found, xr.Dataset)
        wanted, got = attributes["etdyn_config"], found.attrs["etdyn_config"]
        if wanted != got:
            raise bad("name", f"a new one, or one whose {path.name} is a run of {wanted}", got)
        return found

    def scores(self, model: str) -> xr.Dataset:
        """Every fold of one model; what it has none of is NaN."""
        config = self.config
        if model in TABLES:
            table = TABLES[model]
            found = self.kept(model, {"model": model, "folds": config.folds}, lambda: (
                cross_validate_table(
                    table.make, graph_table(self.data, table.neighbours), self.data.labels,
                    config.folds, config.seed,
                )
            ))  # fmt: skip
        else:
            made = self.networks[model]
            found = cross_validate(
                made.build, self.data, config.recipe(self.number, made.lr), folds=config.folds,
                seed=config.seed, model=made.record, path=self.path(model),
            )  # fmt: skip
        nothing = np.full(config.folds, math.nan)
        columns = {
            name: labelled("fold", found.get(name, nothing), text) for name, text in COLUMNS.items()
        }
        return xr.Dataset(columns, {"fold": np.arange(config.folds), "model": model})

    def leak(self, model: str) -> xr.Dataset:
        """The published notebooks' protocol: trained on all graphs, scored on the same."""
        made, recipe = (
            self.networks[model],
            self.config.recipe(self.number, self.networks[model].lr),
        )

        def inflated() -> xr.Dataset:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "accuracy on the training graphs", UserWarning)
                value = published_protocol(made.build, self.data, recipe, self.config.seed)
            text = "NOT HELD OUT: accuracy on the graphs trained on"
            return xr.Dataset({"published": labelled((), value, text)})

        record = {"leak": made.record, "fit": asdict(recipe)}
        found = self.kept(f"{model}-published", record, inflated)
        return found.drop_attrs(deep=False).assign_coords(model=model)

    def descent(self) -> xr.Dataset:
        """The Energy Transformer of the first fold, followed beyond its steps."""
        config, made = self.config, self.networks["et"]
        recipe = config.recipe(self.number, made.lr)

        def follow() -> xr.Dataset:
            fold = nested_folds(self.data.labels, config.folds, config.seed)[0]
            model, data, _ = train_fold(made.build, self.data, recipe, fold, config.seed)
            assert isinstance(model, GraphClassifier)
            moved = GraphData(renumbered(self.graphs, config.seed)).standardised(fold.train)
            same = invariance(model, data, moved, fold.test)
            trained = Trained(model, data, fold.test)
            found = descent(trained, config.follow, config.doublings, config.evaluations)
            return found.merge(same)

        record = {
            "descent": made.record, "fit": asdict(recipe), "folds": config.folds,
            "follow": [config.follow, config.doublings, config.evaluations],
        }  # fmt: skip
        found = self.kept("descent", record, follow)
        shown = {
            k: v for k, v in found.attrs.items() if k in ("horizon", "alpha", "steps", "tight")
        }
        return found.drop_attrs(deep=False).assign_attrs(shown)


def drawn(graphs: GraphSet, most: int | None, seed: int) -> GraphSet:
    """At most so many of the graphs, drawn at random; the name says so."""
    if most is None or most >= len(graphs):
        return graphs
    rows = torch.randperm(len(graphs), generator=torch.Generator().manual_seed(seed))[:most]
    return replace(graphs.subset(rows), name=f"{graphs.name} {most}")


if __name__ == "__main__":
    try:
        main(tyro.cli(Config, description=__doc__))
    except (ValueError, TypeError, ImportError) as problem:
        sys.exit(f"error: {problem}")
