"""Graph classification: nodes become tokens, a CLS token joins, blocks of descent, a read-out.

Source: Hoover et al. 2023, section 5; ET sections 1.7 and 2.4.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_choice, check_count, check_positive
from etdyn.graph_attention import GraphAttention
from etdyn.graph_products import EDGE, contract
from etdyn.graphs import Graph
from etdyn.solve import Solution, descend
from etdyn.solve.euler import iterate
from etdyn.systems import System
from etdyn.tasks.anomaly import graph_system
from etdyn.tasks.graph_batches import GraphBatch, GraphData

__all__ = ["ConvolutionWeights", "EdgeWeights", "GraphClassifier", "ReadOut", "Tokens", "et_blocks"]

EDGE_WEIGHTS = ("pairwise", "convolution", "none")


def et_blocks(
    count: int = 4,
    *,
    dim: int = 64,
    heads: int = 2,
    head_dim: int = 32,
    memories: int = 256,
    dynamics: str = "et",
) -> list[System]:
    """Energy Transformers for graphs, each with its own weights; see `graph_system`."""
    return [graph_system(dim, heads, head_dim, memories, dynamics) for _ in range(count)]


class Tokens(nn.Module):
    """The start: linear encoder of nodes, CLS token, and a linear map of positions for all.

    Args:
        features, positions: of a node.
        dim: of a token.
        signed: whether positions have an arbitrary sign, which training then draws.
    """

    def __init__(self, features: int, positions: int, dim: int, signed: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(features, dim)
        self.position = nn.Linear(positions, dim, bias=False)
        self.cls = nn.Parameter(torch.randn(dim) * dim**-0.5)
        self.signed = signed

    def forward(self, batch: GraphBatch, generator: torch.Generator | None = None) -> Tensor:
        """States `(sample, token, dim)`, zero where padded.

        generator: of the signs, one for each graph and position; None flips none.
        """
        positions = batch.positions
        if self.signed and generator is not None:
            shape = len(batch.cls), positions.shape[1]
            signs = torch.randint(2, shape, generator=generator, device=positions.device) * 2 - 1
            positions = positions * signs[batch.token_owner]
        samples, tokens = batch.shape
        x = self.cls.new_zeros(samples * tokens, len(self.cls))
        x = x.index_copy(0, batch.nodes, self.encoder(batch.features))
        x = x.index_copy(0, batch.cls, self.cls.expand(len(batch.cls), -1))
        x = x.index_add(0, batch.tokens, self.position(positions))
        return x.reshape(samples, tokens, -1)


class EdgeWeights(nn.Module):
    """What, `(pair, heads)`, from the first tokens: (a_h <x_c, x_b> / dim + b_h) (1 + U f_cb)_h.

    f_cb are the features of a pair. The published form with a convolution of 1 x 1, which, unlike
    3 x 3, does not see how the nodes are numbered (ET defect 15), and without the bias that made
    every pair an edge (defect 14). One before training.
    """

    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.alike = nn.Parameter(torch.zeros(heads))
        self.bias = nn.Parameter(torch.ones(heads))
        self.pair = nn.Linear(features, heads, bias=False)
        nn.init.zeros_(self.pair.weight)

    def forward(self, x: Tensor, batch: GraphBatch) -> Tensor:
        """x: the first tokens `(sample, token, dim)`."""
        flat = x.flatten(0, 1)
        weights: Tensor = self.grid(batch.graph, flat) * (1 + self.pair(batch.pair_features))
        return weights

    def grid(self, graph: Graph, flat: Tensor) -> Tensor:
        """The part that depends on the tokens, `(pair, heads)`."""
        alike = contract(graph, EDGE, flat, flat) / flat.shape[1]
        return alike[:, None] * self.alike + self.bias


class ConvolutionWeights(EdgeWeights):
    """What as published: a 3 x 3 convolution over the grid of node numbers, graph by graph.

    NOT equivariant: it depends on how the nodes are numbered. Builds a dense grid of each graph;
    here for fidelity (ET section 1.7, defect 15).
    """

    def __init__(self, features: int, heads: int) -> None:
        super().__init__(features, heads)
        self.convolution = nn.Conv2d(1, heads, 3, padding=1)
        del self.alike, self.bias

    def forward(self, x: Tensor, batch: GraphBatch) -> Tensor:
        """x: the first tokens `(sample, token, dim)`."""
        flat, found = x.flatten(0, 1), []
        ends = batch.graph.edges - batch.cls[batch.pair_owner]
        for graph, size in enumerate(batch.sizes.tolist()):
            tokens = flat[int(batch.cls[graph]) :][: size + 1]
            grid = self.convolution((tokens @ tokens.T / flat.shape[1])[None])
            keys, queries = ends[:, batch.pair_owner == graph]
            found.append(grid[:, queries, keys].T)
        weights: Tensor = torch.cat(found) * (1 + self.pair(batch.pair_features))
        return weights


class ReadOut(nn.Module):
    """Logits from CLS and, beside it, from the nodes: their mean and their sum."""

    def __init__(self, dim: int, classes: int, nodes: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.nodes = nodes
        self.drop = nn.Dropout(dropout)
        self.linear = nn.Linear(dim * (3 if nodes else 1), classes)

    def forward(self, x: Tensor, batch: GraphBatch) -> Tensor:
        """x: states `(sample, token, dim)`; returns logits `(graph, class)`."""
        flat = x.flatten(0, 1)
        parts = [flat[batch.cls]]
        if self.nodes:
            total = batch.node_sum(flat[batch.nodes])
            parts += [total / batch.sizes[:, None], total / 16]
        result: Tensor = self.linear(self.drop(torch.cat(parts, 1)))
        return result


class GraphClassifier(nn.Module):
    """A classifier of graphs around any Systems that run on graphs.

        nodes, CLS, positions -> tokens -> block 1: `steps` Euler steps -> block 2 ... -> read-out

    The weights of the edges are computed once, from the first tokens, and serve all blocks. The
    read-out takes raw states x, without a layer norm, as published.

    Args:
        blocks: one System a block, with a `GraphAttention` each; all of one `dim`.
        data: whose widths and classes the model takes.
        steps, step: T and alpha of every block.
        noise: standard deviation of the Gaussian noise of each step, in training only.
        edge_weights: "pairwise" (see `EdgeWeights`), "convolution" (as published, which depends
            on the numbering of the nodes), or "none".
        nodes: whether the read-out sees mean and sum of the nodes beside CLS; published: False.
        dropout: before the read-out.
    """

    def __init__(
        self,
        blocks: Sequence[System],
        data: GraphData,
        *,
        steps: int = 1,
        step: float = 0.1,
        noise: float = 0.02,
        edge_weights: str = "pairwise",
        nodes: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_count("steps", steps)
        check_positive("step", step)
        check_positive("noise", noise, zero=True)
        check_choice("edge_weights", edge_weights, EDGE_WEIGHTS)
        dims = {system.dim for system in blocks}
        if len(dims) != 1:
            raise bad("blocks", "at least one system, all of one dim", sorted(dims))
        dim, heads = dims.pop(), _heads(blocks)
        self.steps, self.step, self.noise = steps, float(step), float(noise)
        self.tokens = Tokens(data.width, data.positions, dim, data.signed)
        self.blocks = nn.ModuleList(blocks)
        kinds = {"pairwise": EdgeWeights, "convolution": ConvolutionWeights}
        pair_width = data.edge_width + 1
        self.weights = None if edge_weights == "none" else kinds[edge_weights](pair_width, heads)
        self.read_out = ReadOut(dim, data.classes, nodes, dropout)

    def start(
        self, batch: GraphBatch, generator: torch.Generator | None = None
    ) -> tuple[Tensor, list[System]]:
        """The first states `(sample, token, dim)`, and the blocks on the graphs of the batch."""
        x = self.tokens(batch, generator)
        weights = None if self.weights is None else self.weights(x, batch)
        return x, [system.on(batch.graph, weights) for system in self._systems()]

    def _systems(self) -> Iterator[System]:
        for block in self.blocks:
            assert isinstance(block, System)  # a ModuleList forgets
            yield block

    def solutions(self, batch: GraphBatch) -> list[Solution]:
        """How each block moves, one `Solution` a block; a padded batch has a sample a graph."""
        x, systems = self.start(batch)
        found = []
        for system in systems:
            found.append(descend(system, x, self.step, self.steps))
            x = found[-1].x[-1]
        return found

    def forward(self, batch: GraphBatch, generator: torch.Generator | None = None) -> Tensor:
        """Logits `(graph, class)`.

        generator: of signs and noise, in training mode only; None has none.
        """
        generator = generator if self.training else None
        x, systems = self.start(batch, generator)
        noise = 0.0 if generator is None else self.noise
        for system in systems:
            x = system.prepare(x)
            for state in iterate(
                system, x, self.step, self.steps, noise=noise, generator=generator
            ):
                x = state
        logits: Tensor = self.read_out(x, batch)
        return logits


def _heads(blocks: Sequence[System]) -> int:
    heads = set()
    for system in blocks:
        terms = system.interaction.terms().values()
        heads |= {len(term.query) for term in terms if isinstance(term, GraphAttention)}
    if len(heads) != 1:
        raise bad("blocks", "a GraphAttention in each, all of as many heads", sorted(heads))
    return heads.pop()
