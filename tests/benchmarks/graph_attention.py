"""Attention over edges, against gathering and scattering; cost per edge; a graph of 75 million.

    python -m tests.benchmarks.graph_attention            speed, memory and cost per edge
    python -m tests.benchmarks.graph_attention largest    one step on the largest graph, 6 GiB

Times are medians, in processor time of one thread (wall time counts the neighbours of a shared
machine), of calls that take turns in one process. Memory is what a force adds to the
resident memory of a process of its own: the high-water mark of the kernel (VmHWM), reset before.
The cost per edge is that of graphs whose neighbours are near in memory, as nearest neighbours on
an ordered set are, and of graphs whose neighbours are anywhere; there, above some 10,000 nodes,
every edge waits for memory instead of cache, three times a force. A third of that wait is the
search for 4 KiB pages: THP_MEM_ALLOC_ENABLE=1 in the environment has torch ask for huge ones.
Products in tiles of 4,000 to 16,000 nodes, which the cache holds, were tried: a force is slower, as
every tile has a row for each of its queries, with few edges or none.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import etdyn as ed
from etdyn.graph_attention import GraphAttention
from etdyn.graphs import Graph
from etdyn.report import format_table

DEGREE = 43  # 2 million edges of 46,000 nodes
WINDOW = 8  # nodes to a neighbour, where they are near


def graph(nodes: int, degree: int, near: bool) -> Graph:
    """Every node sees `degree` others, one drawn from each of as many stretches of nodes."""
    rng = torch.Generator().manual_seed(0)
    stretch = WINDOW if near else nodes // degree
    query = torch.arange(nodes)[:, None]
    key = torch.randint(stretch, (nodes, degree), generator=rng)
    key += stretch * torch.arange(degree) + query - stretch * degree // 2
    edges = torch.stack([key.remainder_(nodes).flatten(), query.expand(-1, degree).flatten()])
    del key
    return Graph.from_edges(edges, nodes)


def case(nodes: int, degree: int, dim: int, near: bool = False) -> tuple[GraphAttention, Tensor]:
    """Attention with one head over such a graph, and activations."""
    torch.manual_seed(0)
    attention = GraphAttention(dim, 1, dim).on(graph(nodes, degree, near))
    return attention, torch.randn(1, nodes, dim)


def gathered_force(attention: GraphAttention, g: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """The force as message passing has it: features of both ends of every edge, scattered back."""
    wk, wq = attention.key[0], attention.query[0]
    at_key, at_query = (g[0] @ wk.T)[keys], (g[0] @ wq.T)[queries]
    logits = attention.beta * (at_key * at_query).sum(-1)
    nodes = g.new_zeros(g.shape[1])
    top = (nodes - torch.inf).scatter_reduce(0, queries, logits, "amax")
    share = (logits - top[queries]).exp()
    share /= nodes.index_add(0, queries, share)[queries]
    as_query = torch.zeros_like(g[0]).index_add(0, queries, share[:, None] * at_key)
    as_key = torch.zeros_like(g[0]).index_add(0, keys, share[:, None] * at_query)
    return (as_query @ wq + as_key @ wk)[None]


def medians(*calls: Callable[[], object], rounds: int = 5) -> list[float]:
    """Processor seconds of each call, on one thread; they take turns."""
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds + 1):
        for call, spent in zip(calls, seconds, strict=True):
            began = time.process_time()
            call()
            spent.append(time.process_time() - began)
    return [statistics.median(spent[1:]) for spent in seconds]


def force(kind: str) -> tuple[Callable[[], Tensor], GraphAttention]:
    """A force on 46,000 nodes and 2 million edges of 64 features, by "edges" or "gather"."""
    attention, g = case(46_000, DEGREE, 64)
    keys, queries = attention.graph.edges
    if kind == "gather":
        return lambda: gathered_force(attention, g, keys, queries), attention
    return lambda: attention.force(g), attention


def resident(what: str) -> float:
    """VmRSS or VmHWM of this process in MiB."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if what in x)
    return int(line.split()[1]) / 1024


def extra_memory(call: Callable[[], object]) -> float:
    """MiB that a call adds at its height."""
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def in_a_process(*arguments: str) -> str:
    """What this file prints with these arguments."""
    command = [sys.executable, "-m", "tests.benchmarks.graph_attention", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def against_gathering() -> str:
    """Time and extra memory of one force, both ways."""
    (edges, attention), (gather, _) = force("edges"), force("gather")
    reference = gather()
    off = float((edges() - reference).abs().max() / reference.abs().max())
    seconds = medians(edges, gather)
    memory = [float(in_a_process("memory", kind)) for kind in ("edges", "gather")]
    rows = [
        (name, f"{1e3 * s:.0f}", f"{m:.0f}")
        for name, s, m in zip(("over edges", "gather and scatter"), seconds, memory, strict=True)
    ]
    rows.append(("ratio", f"{seconds[1] / seconds[0]:.1f}", f"{memory[1] / memory[0]:.1f}"))
    title = f"{attention.graph}, dim 64, one head; they differ by {off:.1g}"
    return title + "\n" + format_table(("force", "ms", "extra MiB"), rows)


def cost_per_edge() -> str:
    """Nanoseconds an edge from 1e5 to 1e7, nodes in proportion."""
    rows = []
    for edges in (10**5, 10**6, 10**7):
        row = [f"{edges:.0e}"]
        for near in (True, False):
            attention, g = case(edges // DEGREE, DEGREE, 64, near)
            (seconds,) = medians(lambda a=attention, g=g: a.force(g))  # type: ignore[misc]
            row.append(f"{1e9 * seconds / attention.graph.size:.0f}")
        rows.append(row)
    return format_table(("edges", "ns an edge, near neighbours", "anywhere"), rows)


def largest(nodes: int = 5_800_000, degree: int = 13, dim: int = 16) -> str:
    """One step of descent on a graph of the size of T-Social, from its edges on."""
    began = time.perf_counter()
    attention, g = case(nodes, degree, dim)
    built, height = time.perf_counter() - began, resident("VmHWM") / 1024
    energy = GraphAttention(dim, 1, dim) + ed.Hopfield(dim, 2 * dim)
    system = ed.System(ed.LayerNorm(dim), energy).on(attention.graph)
    Path("/proc/self/clear_refs").write_text("5")
    before, began = resident("VmRSS"), time.perf_counter()
    solution = ed.descend(system, g, 0.1, 1, gradient=None)
    seconds = time.perf_counter() - began
    assert bool(torch.isfinite(solution.x).all())
    return (
        f"{attention.graph}, dim {dim}: built in {built:.0f} s, {height:.1f} GiB at "
        f"the height; one step {seconds:.1f} s, resident {before / 1024:.1f} GiB before it and "
        f"{resident('VmHWM') / 1024:.1f} GiB at its height"
    )


@torch.no_grad()
def main(task: str = "", kind: str = "") -> None:
    """Print what is asked for."""
    torch.set_num_threads(1)
    if task == "memory":
        print(extra_memory(force(kind)[0]))
    elif task == "largest":
        print(largest())
    else:
        print(against_gathering() + "\n", flush=True)
        print(cost_per_edge())


if __name__ == "__main__":
    main(*sys.argv[1:])
