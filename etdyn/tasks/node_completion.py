"""Anomalies without labels: nodes whose features the graph does not explain, or of high energy.

A System learns to complete the hidden features of nodes from the rest of the graph. Then every
node has an energy, its share of the terms of E, and an error of its completion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_count, check_finite, check_positive, check_tensor
from etdyn.graphs import Graph
from etdyn.solve.euler import iterate
from etdyn.systems import System
from etdyn.tasks.loop import warmup_cosine
from etdyn.tasks.node_data import NodeData

__all__ = ["CompletionRecipe", "NodeCompletion", "fit_completion", "node_scores"]


class NodeCompletion(nn.Module):
    """Completes the features of hidden nodes by a System's descent on the graph.

        features -> linear encoder, mask token where hidden -> `steps` Euler steps of size `step`
        -> layer norm of the system -> linear decoder

    Args:
        system: any System with a `GraphAttention`; nodes are its tokens.
        features: numbers a node comes with.
        steps, step: of the descent.
    """

    def __init__(self, system: System, features: int, *, steps: int = 3, step: float = 0.5) -> None:
        super().__init__()
        check_count("features", features)
        check_count("steps", steps, least=0)
        check_positive("step", step)
        self.system, self.steps, self.step = system, steps, float(step)
        like, dim = system.lagrangian.like, system.dim
        self.encoder = nn.Linear(features, dim, dtype=like.dtype)
        self.decoder = nn.Linear(dim, features, dtype=like.dtype)
        self.mask_token = nn.Parameter(torch.randn(dim, dtype=like.dtype) * dim**-0.5)

    def descend(self, features: Tensor, graph: Graph, hidden: Tensor) -> Tensor:
        """The state at the end of the descent, `(1, node, dim)`.

        features: `(node, feature)`; hidden: bool `(node,)`.

        Raises:
            ValueError, TypeError: wrong shape, dtype or device; NaN or infinite features.
        """
        check_tensor("features", features, (None, self.encoder.in_features), self.encoder.weight)
        check_finite("features", features)
        x = torch.where(hidden[:, None], self.mask_token, self.encoder(features))[None]
        system = self.system.on(graph)
        x = system.prepare(x)
        for state in iterate(system, x, self.step, self.steps):
            x = state
        return x

    def forward(self, features: Tensor, graph: Graph, hidden: Tensor) -> Tensor:
        """Completed features `(node, feature)`."""
        x = self.descend(features, graph, hidden)
        completed: Tensor = self.decoder(self.system.activation(x))[0]
        return completed


@dataclass(frozen=True)
class CompletionRecipe:
    """How a node completion is trained."""

    epochs: int = 60
    """Steps, each on the whole graph."""
    lr: float = 1e-2
    """Peak learning rate of AdamW; it warms up over a tenth of the epochs."""
    hidden: float = 0.5
    """Share of the nodes whose features are hidden and completed."""

    def __post_init__(self) -> None:
        check_count("epochs", self.epochs)
        check_positive("lr", self.lr)
        if not 0 < self.hidden < 1:
            raise bad("hidden", "a share in (0, 1)", self.hidden)


def fit_completion(
    model: NodeCompletion, data: NodeData, recipe: CompletionRecipe, seed: int = 0
) -> list[float]:
    """Train in place on the first relation of a graph, without any label.

    Returns:
        The mean squared error over hidden nodes of every epoch, in units of the features'.
    """
    optimiser = torch.optim.AdamW(model.parameters(), lr=recipe.lr)
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for epoch in range(recipe.epochs):
        for group in optimiser.param_groups:
            rate = warmup_cosine(epoch, recipe.epochs / 10, recipe.epochs)
            group["lr"] = recipe.lr * rate
        hidden = _draw(data, recipe.hidden, generator)
        completed = model(data.features, data.graphs[0], hidden)
        loss = (completed - data.features)[hidden].square().mean()
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def _draw(data: NodeData, share: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(data.nodes, generator=generator) < share).to(data.features.device)


@torch.no_grad()
def node_scores(
    model: NodeCompletion, data: NodeData, draws: int = 8, seed: int = 0
) -> dict[str, Tensor]:
    """How anomalous every node looks without labels; higher is more so.

    Returns:
        `(node,)` each. "completion error": mean squared error of a node's features where they
        are hidden, over about `draws` random masks, each with its complement. With nothing
        hidden, at the end of the descent, what the node adds to every term of E, its zero-weight
        part removed: "attention energy" of it as a query, "hopfield energy", and their sum
        "energy".
    """
    check_count("draws", draws)
    features, graph = data.features, data.graphs[0]
    generator, error = torch.Generator().manual_seed(seed), torch.zeros_like(features[:, 0])
    pairs = math.ceil(draws / 2)
    for _ in range(pairs):
        hidden = _draw(data, 0.5, generator)
        for mask in (hidden, ~hidden):  # every node is hidden in one of the two
            gap = (model(features, graph, mask) - features).square().mean(1)
            error += torch.where(mask, gap, 0.0) / pairs
    x = model.descend(features, graph, torch.zeros_like(hidden))
    g = model.system.activation(x)
    terms = model.system.on(graph).potential.terms()
    found = {"completion error": error}
    total = torch.zeros_like(error)
    for name, term in terms.items():
        local = term.local_energies(g, relative=True)
        if local is not None:
            found[f"{name} energy"] = local.reshape(1, -1, data.nodes).sum(1)[0]
            total = total + found[f"{name} energy"]
    return found | {"energy": total}
