"""Anomaly detection on graphs: which nodes do not belong, seen by a System's descent.

Source: Hoover et al. 2023, section 4; ET sections 1.7 and 2.3.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_choice, check_count, check_finite, check_positive, check_tensor
from etdyn.energies import Hopfield
from etdyn.graph_attention import GraphAttention
from etdyn.graphs import Graph
from etdyn.lagrangians import LayerNorm
from etdyn.solve.euler import iterate
from etdyn.systems import System

__all__ = ["NodeClassifier", "graph_system"]


def graph_system(
    dim: int = 64, heads: int = 2, head_dim: int = 32, memories: int = 256, dynamics: str = "et"
) -> System:
    """An Energy Transformer whose attention runs over the edges of a graph; see `System.on`."""
    terms = GraphAttention(dim, heads, head_dim) + Hopfield(dim, memories)
    return System(LayerNorm(dim), terms, dynamics)


class NodeClassifier(nn.Module):
    """A classifier of nodes around any System whose attention runs on graphs.

        features -> linear encoder -> x0
        for every relation: `steps` Euler steps of size `step` on its graph, from x0
        head(g(x0), largest entry of g(x_end) over the relations) -> logits

    One relation is the plain model; the largest entry joins several as published. The last
    activations are those of the states, so what is classified is a point of the descent.

    Args:
        system: any System with a `GraphAttention`; nodes are its tokens.
        features: numbers a node comes with.
        steps, step: of the descent that `forward` runs.
        dropout: share of the head's inputs, and of the encoder's outputs, left out in training.
        classes: of the labels.
        head: "mlp", one hidden layer of the system's width, or "linear".
    """

    def __init__(
        self,
        system: System,
        features: int,
        *,
        steps: int = 2,
        step: float = 0.5,
        dropout: float = 0.3,
        classes: int = 2,
        head: str = "mlp",
    ) -> None:
        super().__init__()
        check_count("features", features)
        check_count("classes", classes)
        check_count("steps", steps, least=0)
        check_positive("step", step)
        if not 0 <= dropout < 1:
            raise bad("dropout", "a share in [0, 1)", dropout)
        self.system, self.steps, self.step = system, steps, float(step)
        like, dim = system.lagrangian.like, system.dim
        self.encoder = nn.Linear(features, dim, dtype=like.dtype)
        self.dropout = nn.Dropout(dropout)
        check_choice("head", head, ("mlp", "linear"))
        layers: list[nn.Module] = [nn.Dropout(dropout)]
        if head == "mlp":
            layers += [nn.Linear(2 * dim, dim), nn.GELU(), nn.Dropout(dropout)]
        last = nn.Linear(dim if head == "mlp" else 2 * dim, classes)
        self.head = nn.Sequential(*layers, last).to(like.dtype)

    def with_system(self, system: System) -> Self:
        """This model around another system of the same width, sharing all other parameters."""
        if system.dim != self.system.dim:
            raise bad("system", f"dim {self.system.dim}", system.dim)
        view = copy.copy(self)
        view._modules = {**self._modules, "system": system}
        return view

    def start(self, features: Tensor) -> Tensor:
        """The state x0, `(1, node, dim)`, of features `(node, feature)`.

        Raises:
            ValueError, TypeError: wrong shape, dtype or device; NaN or infinite features.
        """
        check_tensor("features", features, (None, self.encoder.in_features), self.encoder.weight)
        check_finite("features", features)
        x0: Tensor = self.encoder(features)[None]
        return x0

    def decode(self, first: Tensor, last: Sequence[Tensor]) -> Tensor:
        """Logits `(node, classes)` of the start and of the end on every relation.

        first, last: states `(1, node, dim)`.
        """
        ends = torch.stack([self.system.activation(x) for x in last])
        joined = torch.cat([self.system.activation(first), ends.amax(0)], -1)
        logits: Tensor = self.head(joined)[0]
        return logits

    def forward(self, features: Tensor, graphs: Sequence[Graph]) -> Tensor:
        """Logits `(node, classes)` of features `(node, feature)` and a graph for each relation."""
        if not graphs:
            raise bad("graphs", "a graph for every relation", "none")
        first, ends = self.start(features), []
        for graph in graphs:
            system = self.system.on(graph)
            x = system.prepare(self.dropout(first))
            for state in iterate(system, x, self.step, self.steps):
                x = state
            ends.append(x)
        return self.decode(first, ends)
