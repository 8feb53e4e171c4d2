"""Evaluations and time to a residual of 1e-8, for every way to an equilibrium.

    python -m tests.benchmarks.to_equilibrium

Prints the table of etdyn/solve/GUIDE.md. Times are medians of three runs, relative to the
self-consistency map in the same process; evaluations are medians over samples. Adaptive methods
run at rtol 1e-9, since below their tolerance a residual does not settle; fixed steps are 0.5, or
as STEPS has them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torchdiffeq import odeint
from tqdm import tqdm

import etdyn as ed
from etdyn.datasets import digits
from etdyn.report import format_table
from etdyn.tasks import evaluation_masks

TOL = 1e-8
REPEATS = 3
LONG = 3.0  # seconds, after which one run must do
LIMIT = 10_000

Way = Callable[[ed.System, torch.Tensor], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def random_system() -> tuple[ed.System, torch.Tensor]:
    """Four samples of 12 tokens in 32 dimensions."""
    torch.manual_seed(0)
    system = ed.EnergyTransformer(32, 4, 8, 128).double()
    return system, torch.randn(4, 12, 32, dtype=torch.float64)


def trained_system() -> tuple[ed.System, torch.Tensor]:
    """Four half-masked held-out digits."""
    model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
    images = digits().test[:4].double()
    return model.system, model.tokens(images, evaluation_masks(4, model.patches))


def equilibrium(dynamics: str, method: str) -> Way:
    """By `find_equilibrium`."""

    def run(system, x0):
        found = ed.find_equilibrium(
            system.with_dynamics(dynamics), x0, method, tol=TOL, max_evaluations=LIMIT
        )
        return found.residual, found.evaluations, found.energy

    return run


def trajectory(dynamics: str, name: str) -> Way:
    """By `solve`, stopped where every sample has arrived."""

    def run(system, x0):
        moving = system.with_dynamics(dynamics)
        fixed = name in ed.available_methods(True)
        step = STEPS.get(name, 0.5) if fixed else None
        # scipy's solvers look at the stop at save times only, and count evaluations, not steps
        whole = name == "scipy_solver" or (fixed and name not in STEPS)
        times = torch.linspace(0, 500, 101) if name == "scipy_solver" else [0.0, 1e6]
        found = ed.solve(
            moving, x0, times, ed.Method(name, step, rtol=1e-9, atol=1e-11), stop=ed.Stop(TOL),
            gradient=None, throw=False,
            max_steps=LIMIT if whole else LIMIT // 6,
        )  # fmt: skip
        cost = torch.as_tensor(found.stats.evaluations)
        return moving.residual(found.x_end), cost, moving.interaction_energy(found.x_end)

    return run


def plain(system: ed.System, x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """torchdiffeq's dopri5 as it comes, on the published flow, decade by decade of its time."""
    x, start, spent = x0, 0.0, 0

    def velocity(t, x):
        nonlocal spent
        spent += 1
        return system.velocity(t, x)

    for k in range(13):
        span = torch.tensor([start, 10.0**k], dtype=torch.float64)
        x = odeint(velocity, x, span, method="dopri5", rtol=1e-9, atol=1e-11)[-1]
        start = 10.0**k
        if float(system.residual(x).max()) <= TOL or spent > LIMIT:
            break
    return system.residual(x), torch.tensor(spent), system.interaction_energy(x)


STEPS = {"discrete_gradient": 10.0, "matrix_free_midpoint": 1.0, "guarded_euler": 1.0}
WAYS: dict[str, Way] = {
    **{
        f"{dynamics}: {method}": equilibrium(dynamics, method)
        for dynamics in ("leaky", "sphere")
        for method in ("map", "anderson", "newton-krylov", "flow")
    },
    **{f"leaky: solve, {name}": trajectory("leaky", name) for name in ed.available_methods()},
    "sphere: solve, dopri5": trajectory("sphere", "dopri5"),
    "sphere: solve, batched_tsit5": trajectory("sphere", "batched_tsit5"),
    "et: solve, dopri5": trajectory("et", "dopri5"),
    "et: torchdiffeq's dopri5 itself": plain,
}


@torch.no_grad()
def measure(way: Way, system: ed.System, x0: torch.Tensor) -> tuple[float, str, str, str]:
    """Seconds, evaluations, residual and energy."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        residual, evaluations, energy = way(system, x0)
        times.append(time.perf_counter() - began)
        if times[0] > LONG:
            break
    worst = float(residual.max())
    cost = f"{float(evaluations.double().median()):.0f}"
    reached = worst <= TOL
    return (
        statistics.median(times),
        cost if reached else f"> {cost}",
        f"{worst:.0e}",
        f"{float(energy.mean()):.4f}",
    )


def main() -> None:
    """Print one table a system."""
    torch.set_num_threads(1)
    for name, make in (("random", random_system), ("trained", trained_system)):
        with torch.no_grad():
            system, x0 = make()
        rows, unit = [], 0.0
        for label, way in tqdm(WAYS.items(), desc=name):
            seconds, cost, residual, energy = measure(way, system, x0)
            unit = unit or seconds
            rows.append((label, cost, f"{seconds / unit:.1f}", residual, energy))
        header = (f"{name} system", "evaluations", "time / map", "worst residual", "mean energy")
        print(format_table(header, rows) + "\n", flush=True)


if __name__ == "__main__":
    main()
