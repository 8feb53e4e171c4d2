"""The flows that `solver_sweep` solves: add one to `TASKS`, and the study has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import etdyn as ed
from etdyn.checks import bad
from etdyn.datasets import digits
from etdyn.systems import System
from etdyn.tasks import evaluation_masks

__all__ = ["TASKS", "Task"]


NODES, NEIGHBOURS = 24, 4  # of the random graph: how many, and whom a node sees on average


@dataclass(frozen=True)
class Task:
    """A flow to be solved from 0 to the horizon.

    Attributes:
        about: what it is, for the reader.
        system: float64.
        x0: float64 `(sample, token, feature)`.
        horizon: end of the flow.
        step: of the published discrete model, the baseline.
        agreement: that two references are asked for; kinks of relu memories make it dear.
    """

    about: str
    system: System
    x0: Tensor
    horizon: float
    step: float
    agreement: float


def trained(path: Path, samples: int, seed: int) -> Task:
    """A completion model on held-out digits, half of the patches hidden."""
    model, images = ed.load_model(path).double(), digits().test.double()
    if samples > len(images):
        raise bad("samples", f"at most the {len(images)} held-out images", samples)
    hidden = evaluation_masks(len(images), model.patches, seed)[:samples]
    x0 = model.tokens(images[:samples], hidden).detach()
    about = "the trained digits model on held-out images, half of the patches hidden"
    return Task(about, model.system, x0, model.steps * model.step, model.step, 3e-7)


def random(kind: str, samples: int, seed: int, agreement: float) -> Task:
    """A random system with memories of this kind, and random starts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        system = ed.EnergyTransformer(32, 4, 8, 128, hopfield=kind).double()
        x0 = torch.randn(samples, 16, 32, dtype=torch.float64)
    about = f"a random system of 16 tokens, 32 features and 128 {kind} memories"
    return Task(about, system, x0, 1.2, 0.1, agreement)


def graph(samples: int, seed: int) -> Task:
    """Attention over a sparse directed graph with weights, and random starts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        attention = ed.GraphAttention(16, 1, 16) + ed.Hopfield(16, 32, "softmax")
        system = ed.System(ed.LayerNorm(16), attention).double()
        pairs = torch.rand(NODES, NODES) < NEIGHBOURS / NODES
        net = ed.Graph.from_edges(pairs.nonzero().T, NODES, self_loops=True)
        weights = torch.rand(net.size, 1, dtype=torch.float64)
        x0 = torch.randn(samples, NODES, 16, dtype=torch.float64)
    about = f"a random system on a directed graph of {NODES} nodes and {net.size} weighted edges"
    return Task(about, system.on(net, weights), x0, 1.2, 0.1, 1e-9)


TASKS: dict[str, Callable[[Path, int, int], Task]] = {
    "digits": trained,
    "softmax": lambda _, samples, seed: random("softmax", samples, seed, 1e-9),
    "relu": lambda _, samples, seed: random("relu", samples, seed, 3e-7),
    "graph": lambda _, samples, seed: graph(samples, seed),
}
"""By name: a function of the model's path, the number of samples and the seed."""
