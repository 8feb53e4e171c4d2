"""The page of `solver_sweep`: words, tables and figures, made from its result alone."""

from __future__ import annotations

import itertools

import numpy as np
import xarray as xr

from etdyn.report import Report
from studies.solver_sweep_figures import (
    FAMILIES,
    ORDERS,
    agreement,
    cost,
    draw_orders,
    draw_precision,
    draw_work,
    number,
    published,
    record_of,
    strings,
    worst,
)

TARGETS = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
LETTERS = {
    "MAX_STEPS": "M", "NONFINITE": "N", "DT_MIN": "D", "INTERRUPTED": "I", "REFUSED": "R",
    "RAISED": "E", "NOT_RUN": "-",
}  # fmt: skip
FAR = 0.5  # in g, of at most 2: above, an error no longer tells an order
CLEAR = 3  # a target is judged where it is this many times the references' disagreement

QUESTION = (
    "Which solver should move an Energy Transformer, at which step or tolerance and in which "
    "precision; what does the published Euler model reach for its price; and where do methods "
    "fail, lose their order, or pay for one hard sample of a batch?"
)
LIMITS = (
    "Small systems and one thread: where a force is large, its share of the time grows and times "
    "follow the evaluations. Settings are coarse (steps by factors, tolerances by decades), so a "
    "cheapest setting is the cheapest of those that were run, and a method between two of them can "
    "be as cheap. Only the state at the horizon counts; rtol = atol throughout; implicit steppers "
    "and Adams correctors solve their equations to rounding, and would be cheaper if they did not. "
    "Evaluations of a per-sample method are means over the samples. The reference is a "
    "computation: what lies below its own disagreement is not known."
)


def cheapest(
    result: xr.Dataset, task: str, target: float, price: str
) -> tuple[xr.Dataset, float] | None:
    """The cell of least price ("evaluations", of float64, or "time", of any dtype), if any."""
    cells = result.sel(task=task)
    if price == "evaluations":
        cells = cells.sel(dtype=["float64"])
    prices = cost(cells) if price == "evaluations" else cells["relative_time"]
    prices = prices.where(worst(cells) <= target).transpose("dtype", "solver", "setting")
    values = prices.to_numpy()
    if np.isnan(values).all():
        return None
    d, s, k = np.unravel_index(int(np.nanargmin(values)), values.shape)
    return cells.isel(dtype=d, solver=s, setting=k), float(values[d, s, k])


def setting_of(cell: xr.Dataset) -> str:
    """Method and setting, in words."""
    adaptive = str(cell["family"].item()).startswith("adaptive")
    dtype = " (float32)" if cell["dtype"].item() == "float32" else ""
    kind = "rtol" if adaptive else "step"
    return f"{cell['solver'].item()}, {kind} {float(cell['step_or_rtol']):.3g}{dtype}"


def recommendations(result: xr.Dataset) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """For every task and target the cheapest setting, by evaluations and by time."""
    header = ("task", "error in g", "fewest evaluations", "evaluations", "reached",
              "least time", "time / Euler's", "reached")  # fmt: skip
    rows: list[tuple[str, ...]] = []
    for task in strings(result["task"]):
        euler = published(result, task)
        if euler is not None:
            reached = number(float(worst(euler)))
            rows.append((task, "published", setting_of(euler), f"{float(cost(euler)):.0f}",
                         reached, setting_of(euler), number(float(euler["relative_time"])),
                         reached))  # fmt: skip
        for target in TARGETS:
            row = [task, f"{target:.0e}"]
            for price in ("evaluations", "time"):
                found = cheapest(result, task, target, price)
                if target < CLEAR * agreement(result, task):
                    row += ["beyond the reference", "", ""]
                elif found is None:
                    row += ["no setting that was run", "", ""]
                else:
                    cell, value = found
                    text = f"{value:.0f}" if price == "evaluations" else number(value)
                    row += [setting_of(cell), text, number(float(worst(cell)))]
            rows.append(tuple(row))
    return header, rows


def outcomes(result: xr.Dataset) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """How many cells of every method gave a number, and what became of the others."""
    status = result["status"]
    meanings = dict(zip(np.atleast_1d(status.attrs["flag_values"]).tolist(),
                        status.attrs["flag_meanings"].split(), strict=True))  # fmt: skip
    pairs = [(t, d) for t in strings(result["task"]) for d in strings(result["dtype"])]
    rows = []
    for solver in strings(result["solver"]):
        row = [solver]
        for task, dtype in pairs:
            cells = result.sel(task=task, dtype=dtype, solver=solver)
            worst_status = [meanings[int(v)] for v in cells["status"].max("sample")]
            parts = [str(worst_status.count("FINISHED"))]
            parts += [
                f"{worst_status.count(n)}{c}" for n, c in LETTERS.items() if n in worst_status
            ]
            loose = int((cells["unconverged"] > 0).sum())
            row.append(" ".join(parts) + (f" ({loose}u)" if loose else ""))
        rows.append(tuple(row))
    return ("method", *(f"{t} {d}" for t, d in pairs)), rows


def reasons(result: xr.Dataset) -> list[tuple[str, str]]:
    """Every reason for which a cell was not computed, and how often."""
    found = [r for r in result["reason"].to_numpy().ravel().tolist() if r]
    return [(reason, str(found.count(reason))) for reason in sorted(set(found))]


def beside_hard(result: xr.Dataset) -> xr.DataArray:
    """Forces of the other samples beside a hard one, over those without it; float64."""
    cells = result.sel(dtype="float64")
    setting = int(cells["hard_setting"].to_numpy().ravel()[0])
    others = slice(0, max(1, result.sizes["sample"] - 1))
    with_hard = cells["hard_evaluations"].isel(sample=others).mean("sample", skipna=False)
    alone = cells["evaluations"].isel(setting=setting, sample=others).mean("sample")
    return with_hard / alone


def hard_table(result: xr.Dataset) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """What one hard sample costs the others, every method."""
    tasks, ratio = strings(result["task"]), beside_hard(result)
    header = ("method", "steps", *(f"cost, {t}" for t in tasks))
    rows = []
    for solver in strings(result["solver"]):
        rows.append((
            solver, str(result["family"].sel(solver=solver).item()),
            *(f"{float(ratio.sel(task=t, solver=solver)):.2f}" for t in tasks),
        ))  # fmt: skip
    return header, rows


def findings(result: xr.Dataset) -> list[str]:
    """What was found, a paragraph a question, with every number taken from the result."""
    tasks = strings(result["task"])
    said = [about_euler(result, task) for task in tasks if published(result, task) is not None]
    said.append(about_orders(result))
    said.append(about_hard(result))
    if "float32" in strings(result["dtype"]):
        said.append(about_precision(result))
    status = result["status"].max("sample")
    total, good = status.size, int((status == 0).sum())
    said.append(
        f"Of {total} cells {good} gave a number; the others are counted in the table of outcomes."
    )
    return [text for text in said if text]


def about_euler(result: xr.Dataset, task: str) -> str:
    """The published model, and what else its evaluations buy."""
    euler = published(result, task)
    assert euler is not None
    cells = result.sel(task=task, dtype="float64")
    price = float(cost(euler))
    errors = worst(cells).where(cost(cells) <= 1.5 * price).transpose("solver", "setting")
    s, k = np.unravel_index(int(np.nanargmin(errors.to_numpy())), errors.shape)
    best = cells.isel(solver=s, setting=k)
    text = (
        f"{task}: the published Euler model takes {price:.0f} evaluations and ends "
        f"{number(float(euler['error'].median()))} away from its flow in g (median over samples "
        f"of the worst token; worst sample {number(float(worst(euler)))}). "
    )
    if best["solver"].item() == "euler":
        return text + "No method does better for at most one and a half times as many. "
    return text + (
        f"The best for at most one and a half times as many is {setting_of(best)}: "
        f"{number(float(worst(best)))} in the worst sample for {float(cost(best)):.0f}."
    )


def about_orders(result: xr.Dataset) -> str:
    """High orders, where the flow is smooth and where it has kinks."""
    high = [s for s in strings(result["solver"]) if ORDERS.get(s, 0) >= 3]
    if not high:
        return ""
    slope = result["slope"].sel(dtype="float64").median("sample")
    parts = []
    for task in strings(result["task"]):
        found = {s: float(slope.sel(task=task, solver=s)) for s in high}
        known = [f"{s} {v:.1f} (of {ORDERS[s]})" for s, v in found.items() if np.isfinite(v)]
        if known:
            parts.append(f"{task}: " + ", ".join(known))
    return (
        "Measured orders of the methods whose order is 3 and more: " + "; ".join(parts) + ". "
        "Kinks of relu memories, where the force has no derivative, cost a step of size h an "
        "error of order h^2 whatever the method: below the order of theory, where steps are small "
        "enough to tell. " + twins(result)
    )


def twins(result: xr.Dataset) -> str:
    """Methods that are one method under two names."""
    solvers = strings(result["solver"])
    same = [
        f"{a} and {b}"
        for a, b in itertools.combinations(solvers, 2)
        if np.array_equal(result["error"].sel(solver=a), result["error"].sel(solver=b), True)
        and bool(np.isfinite(result["error"].sel(solver=a)).any())
    ]
    return f"The same numbers in every cell come from {'; '.join(same)}." if same else ""


def about_hard(result: xr.Dataset) -> str:
    """What one hard sample costs its neighbours."""
    ratio = beside_hard(result)
    parts = []
    for name in FAMILIES[2:]:
        cells = ratio.where(result["family"] == name)
        if bool(np.isfinite(cells).any()):
            low, high = float(cells.min()), float(cells.max())
            span = f"{low:.2f}" if high - low < 0.005 else f"{low:.2f} to {high:.2f}"
            parts.append(f"{span} in the {name} methods")
    if not parts:
        return ""
    scale = record_of(result)["hard_scale"]
    return (
        f"One sample of the batch shrunk to {scale:g} of its size, where the clock gamma/sigma is "
        f"{1 / scale:.0f} times as fast, multiplies the evaluations of the others by "
        + ", and by ".join(parts) + "."
    )  # fmt: skip


def about_precision(result: xr.Dataset) -> str:
    """The floor of float32, and what it saves."""
    floor = worst(result).min(("solver", "setting"))
    both = result["relative_time"].sel(dtype="float32") / result["relative_time"].sel(
        dtype="float64"
    )
    parts = [
        f"{t} {number(float(floor.sel(task=t, dtype='float32')))} (float64 "
        f"{number(float(floor.sel(task=t, dtype='float64')))}), at "
        f"{float(both.sel(task=t).median()):.2f} of the time"
        for t in strings(result["task"])
    ]
    return (
        "The least error that any method reached in float32, and the median ratio of times of "
        "the cells that both precisions finished: " + "; ".join(parts) + "."
    )


def protocol(result: xr.Dataset) -> str:
    """How it was measured."""
    record = record_of(result)
    study = record["study"]
    tasks = "; ".join(
        f"{name}: {about['about']}, to t = {about['horizon']:g}, published step {about['step']:g}, "
        f"references agree to {number(agreement(result, name))}"
        for name, about in record["tasks"].items()
    )
    return (
        f"{result.sizes['sample']} samples a task, one batch, published dynamics (seed "
        f"{study['seed']}). {tasks}. The reference is batched dopri5 against batched tsit5, both "
        "in float64, at a tolerance at which they agree. Error: |g - g_reference| / (gamma "
        "sqrt(D)) at the horizon, worst token. Fixed-step methods take "
        f"{', '.join(map(str, study['steps_per_horizon']))} steps, adaptive ones rtol = atol = "
        f"{', '.join(f'{t:g}' for t in study['tolerances'])}. A solve may attempt "
        f"{study['max_steps']} steps; once a setting runs out of them or takes more than "
        f"{study['dear']} evaluations, the finer ones of that method are not run. Times are "
        f"medians of up to {study['repeats']} solves, over the median of the published Euler "
        f"model's in float64, which runs before every cell, with {study['threads']} thread(s)."
    )


def report(result: xr.Dataset) -> Report:
    """The page: question, protocol, result, limits."""
    made = Report("Solver sweep: which method, at which tolerance, in which precision?")
    made.text("Question", QUESTION)
    made.text("Protocol", protocol(result))
    made.text("Result", *findings(result))
    made.table(
        "The cheapest settings that were run whose error is within the target for every sample and "
        "token: by evaluations per sample, in float64, and by time, in either precision. First "
        "line of a task: the published Euler model, whose time over its own baseline would be 1 "
        "on a quiet machine; how far it is off is how far the times can be trusted. A target below "
        f"{CLEAR} times the references' disagreement cannot be judged.",
        *recommendations(result),
    )  # fmt: skip
    for task in strings(result["task"]):
        made.figure(f"work_precision_{task}", draw_work(result, task),
            f"{task}: error in g against evaluations (above) and against time (below), float64. "
            "Lines: median over samples of the worst token; bands: all samples. Wide grey line: "
            "the least median that any method reaches at that price. Star: the "
            "published Euler model. Crosses: settings that failed, at what they had cost. Grey "
            "area: below the disagreement of the two references.")  # fmt: skip
    made.figure("orders", draw_orders(result),
        f"Slopes over the three finest settings whose error is below {FAR:g} and above ten times "
        "the references' "
        "disagreement, float64; median and range over samples. A method without a mark has fewer "
        "than three such settings in some sample.")  # fmt: skip
    made.figure("precision", draw_precision(result),
        "The least error that each method reached at any setting. No mark: no setting gave a "
        "number. Grey area: below the disagreement of the two references.")  # fmt: skip
    made.table(
        "Evaluations of the other samples beside one hard sample, over those without it, at the "
        "published step and at the tolerance in the same place of the list; 1: it costs them "
        "nothing.", *hard_table(result),
    )  # fmt: skip
    made.table(
        "Outcomes: settings that gave a number, and what became of the others. "
        + ", ".join(f"{letter} {name}" for name, letter in LETTERS.items())
        + "; (u): cells in which an Adams corrector gave up in some steps.",
        *outcomes(result),
    )
    if why := reasons(result):
        made.table("Why cells were not computed.", ("reason", "cells"), why)
    made.text("Limits", LIMITS)
    return made
