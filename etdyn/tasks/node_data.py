"""Node sets as networks take them: scaled features, graphs, and neighbourhoods of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from etdyn.checks import bad
from etdyn.datasets.nodes import NodeSet
from etdyn.graphs import Graph

__all__ = ["NodeData", "prepare_nodes", "sample_neighbourhood"]


@dataclass(frozen=True)
class NodeData:
    """A node set as networks take it: scaled features, a graph for each relation, labels."""

    features: Tensor
    graphs: tuple[Graph, ...]
    labels: Tensor
    name: str

    @property
    def nodes(self) -> int:
        """How many."""
        return len(self.labels)

    def induced(self, nodes: Tensor) -> NodeData:
        """Only these nodes, renumbered in this order, and the edges between them."""
        graphs = tuple(graph.induced(nodes) for graph in self.graphs)
        return NodeData(self.features[nodes], graphs, self.labels[nodes], self.name)

    def thinned(self, share: float) -> NodeData:
        """Without a random share of the edges; self-loops stay. From the global random state."""
        graphs = []
        for graph in self.graphs if share else ():
            drawn = torch.rand(graph.size, device=graph.device) >= share
            graphs.append(graph.kept(drawn | (graph.keys == graph.queries)))
        return replace(self, graphs=tuple(graphs)) if share else self


def prepare_nodes(
    nodes: NodeSet, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> NodeData:
    """Features as networks like them, and graphs with self-loops.

    How many neighbours a node has in every relation joins its features: averages over neighbours,
    which most networks take, do not know it. Every feature comes twice, since counts have long
    tails: less its mean over its deviation, and as its rank among all nodes, from -1 to 1 (ties
    share their mean rank). Features are known of every node, labels are not used.

    Raises:
        ValueError: all nodes have the same features and degrees.
    """
    from scipy.stats import rankdata  # noqa: PLC0415 (slow to import)

    x = nodes.features.double()
    degrees = [edges[1].bincount(minlength=len(x)) for edges in nodes.relations.values()]
    x = torch.cat([x, torch.stack(degrees, 1).double().log1p()], 1)
    x = x[:, x.amax(0) > x.amin(0)]  # a constant says nothing
    if not x.shape[1]:
        raise bad("nodes", "features or degrees that differ", "none")
    standard = (x - x.mean(0)) / x.std(0)
    ranks = torch.from_numpy(rankdata(x.numpy(), axis=0))
    ranks = 2 * (ranks - 0.5) / len(x) - 1
    features = torch.cat([standard, ranks], 1).to(device, dtype)
    graphs = tuple(
        Graph.from_edges(edges.to(device), len(x), self_loops=True)
        for edges in nodes.relations.values()
    )
    return NodeData(features, graphs, nodes.labels.to(device), nodes.name)


def sample_neighbourhood(
    graphs: Sequence[Graph], seeds: Tensor, hops: int, fanout: int, generator: torch.Generator
) -> Tensor:
    """Nodes near the seeds: of every relation and node, `fanout` keys drawn, hop after hop.

    Args:
        graphs: of the same nodes.
        seeds: distinct int64 nodes.
        hops, fanout: draws are with replacement, so that a node has at most `fanout`.
        generator: of the draws, on the CPU.

    Returns:
        Distinct int64 nodes, the seeds first.

    Source: Hamilton, Ying, Leskovec 2017, Inductive Representation Learning on Large Graphs.
    """
    found, last = seeds, seeds
    for _ in range(hops):
        drawn = [found]
        for graph in graphs:
            degrees = graph.degrees[last].long()
            u = torch.rand(len(last), fanout, generator=generator).to(last.device)
            steps = torch.minimum((u * degrees[:, None]).long(), degrees[:, None] - 1)
            edges = graph.query_starts[last].long()[:, None] + steps
            drawn.append(graph.keys[edges[degrees > 0]].long().flatten())
        new = torch.unique(torch.cat(drawn))
        last = new[~torch.isin(new, found)]
        found = torch.cat([found, last])
    return found
