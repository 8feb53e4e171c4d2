"""What the kinks of the relu memories cost: orders and tolerances, smooth against kinked.

    python -m tests.benchmarks.orders

Prints the second and third table of etdyn/solve/GUIDE.md. The order is the slope of log error
over log step from 16 to 128 steps to t = 1; the response of an adaptive method is the slope of
log error over log tolerance from 1e-4 to 1e-8. Medians over eight systems.
"""

from __future__ import annotations

import numpy as np
import torch

import etdyn as ed
from etdyn.report import format_table

COUNTS = (16, 32, 64, 128)
TOLERANCES = tuple(10.0**-k for k in range(4, 9))
SYSTEMS = 8


def case(kind: str, seed: int) -> tuple[ed.System, torch.Tensor, torch.Tensor]:
    """A random system, its start, and its state at t = 1 to about 1e-12."""
    torch.manual_seed(seed)
    system = ed.EnergyTransformer(16, 2, 8, 64, hopfield=kind).double()
    x0 = torch.randn(1, 6, 16, dtype=torch.float64)
    method = ed.Method("dopri8", rtol=2e-13, atol=1e-14)
    end = ed.solve(system, x0, [0.0, 1.0], method, gradient=None, max_steps=10**6).x[-1]
    return system, x0, end


def error(system: ed.System, x0: torch.Tensor, end: torch.Tensor, method: ed.Method) -> float:
    """Largest error of the activations at t = 1."""
    found = ed.solve(system, x0, [0.0, 1.0], method, gradient=None).x[-1]
    return float((system.activation(found) - system.activation(end)).abs().max())


def slope(x: tuple[float, ...], errors: list[float]) -> float:
    """Of log error, above 1e-12 where the reference ends."""
    good = [(a, b) for a, b in zip(x, errors, strict=True) if b > 1e-12]
    return float(np.polyfit(*np.log(np.array(good)).T, 1)[0]) if len(good) > 2 else float("nan")


def fixed(name: str, cases: list[tuple[ed.System, torch.Tensor, torch.Tensor]]) -> str:
    """The order of a fixed-step method."""
    sizes = tuple(1 / n for n in COUNTS)
    slopes = [
        slope(sizes, [error(*c, ed.Method(name, h, rtol=1e-13, atol=1e-15)) for h in sizes])
        for c in cases
    ]
    return f"{np.nanmedian(slopes):.1f} ({np.nanmin(slopes):.1f} to {np.nanmax(slopes):.1f})"


def adaptive(name: str, cases: list[tuple[ed.System, torch.Tensor, torch.Tensor]]) -> list[str]:
    """The response of an adaptive method, and its error over the tolerance at 1e-6."""
    rows = [[error(*c, ed.Method(name, rtol=t, atol=t)) for t in TOLERANCES] for c in cases]
    response = np.nanmedian([slope(TOLERANCES, row) for row in rows])
    return [f"{response:.2f}", f"{np.median([row[2] for row in rows]) / 1e-6:.2g}"]


@torch.no_grad()
def main() -> None:
    """Print both tables."""
    torch.set_num_threads(1)
    cases = {kind: [case(kind, k) for k in range(SYSTEMS)] for kind in ("softmax", "relu")}
    rows = [
        (name, fixed(name, cases["softmax"]), fixed(name, cases["relu"]))
        for name in ed.available_methods(True)
    ]
    print(format_table(("fixed step: order", "softmax", "relu"), rows) + "\n", flush=True)
    names = ed.available_methods(False)
    rows = [(n, *adaptive(n, cases["softmax"]), *adaptive(n, cases["relu"])) for n in names]
    header = ("adaptive", "softmax: response", "error / tol", "relu: response", "error / tol")
    print(format_table(header, rows))


if __name__ == "__main__":
    main()
