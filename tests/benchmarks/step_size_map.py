"""A map over 64 step sizes as one batch against one run per step size.

    python -m tests.benchmarks.step_size_map

Both do the same with the trained digits model in float64: 100 Euler steps, watched at every step.
Ratios of the medians of interleaved runs, wall time, on one thread and on as many as there are
cores (run it on an idle machine: waiting for a busy core costs the threads more). Of the single
runs four are timed and stand for all. "descend" is the other way to get as much: the discrete model
and `to_xarray`, step size by step size.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import etdyn as ed
from etdyn.analysis.stepsize_map import step_size_map
from etdyn.datasets import digits
from etdyn.report import format_table
from etdyn.tasks import evaluation_masks

STEPS = 100
STEP_SIZES = torch.logspace(-2, 1, 64, dtype=torch.float64)
SAMPLED = 4  # of the 64 single runs are timed
REPEATS = {1: 5, 8: 3, 32: 1}


def seconds(run: Callable[[], object]) -> float:
    """Of one call."""
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def compare(system: ed.System, x0: torch.Tensor, repeats: int) -> tuple[float, float, float]:
    """Seconds of the batch, of the map one by one, of descend one by one."""
    times: tuple[list[float], ...] = ([], [], [])
    chosen = STEP_SIZES[:: len(STEP_SIZES) // SAMPLED]
    for _ in range(repeats):
        times[0].append(seconds(lambda: step_size_map(system, x0, STEP_SIZES, STEPS)))
        for k, h in enumerate(chosen):
            alone = STEP_SIZES[:1] * 0 + h
            one = seconds(lambda alone=alone: step_size_map(system, x0, alone, STEPS))
            times[1].append(len(STEP_SIZES) * one)
            if k == 0:
                run = seconds(lambda h=h: _descend(system, x0, float(h)))
                times[2].append(len(STEP_SIZES) * run)
    batch, one_by_one, descend = (statistics.median(t) for t in times)
    return batch, one_by_one, descend


def _descend(system: ed.System, x0: torch.Tensor, step: float) -> None:
    run = ed.descend(system, x0, step, STEPS, gradient=None, throw=False)
    run.to_xarray(states=False, relative=True)


def main() -> None:
    """Print the table."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    model.requires_grad_(False)
    rows = []
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        for count, repeats in REPEATS.items():
            images = digits().test[:count].double()
            x0 = model.tokens(images, evaluation_masks(count, model.patches))
            batch, alone, descend = compare(model.system, x0, repeats)
            ratios = (f"{alone / batch:.1f}", f"{descend / batch:.1f}")
            rows.append((str(count), str(threads), *ratios))
    header = ("images", "threads", "one map per step size / batch", "descend per step size / batch")
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
