"""The page of `step_size`: words, tables and figures, made from its result alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xarray as xr

from etdyn.report import Report
from studies import step_size_figures as figures
from studies.step_size_numbers import (
    DYNAMICS,
    best_counts,
    correlations,
    crossover,
    deviation,
    difference,
    equilibria,
    first_rise,
    overflowed,
    rung,
    slope,
)

TITLE = "Step size: limits, what lies beyond them, and steps that were not trained"
CRITERION = 0.02  # how well a predicted limit should meet the measured one
NEAR = 1.05  # of the trained error, what counts as about as good

QUESTION = (
    "How large may an Euler step of the Energy Transformer be? Theory gives three answers: a step "
    "that cannot raise the energy (the descent lemma, ET-F20), one that keeps an equilibrium "
    "stable (2 / the fastest rate; for the published dynamics, which has no fixed point in x, "
    "ET-F23), and one below 2 / the Lipschitz bound (ET-F22). How near is each to what happens? "
    "And a model is trained at one step size and step count: what does it do at others, does its "
    "accuracy follow the horizon, which is their product, or the count, and does the energy tell?"
)
LIMITS = (
    "One small model on one small data set, trained at one step size as the published dynamics; "
    "the leaky and the sphere runs use its weights, which were not made for them. Whether training "
    "at another step size moves the optimum is not measured here, as one training takes longer "
    "than this study: `python -m etdyn train --model.step 0.4 --model.steps 3` trains such a "
    "model, and this study's --model shows it in the same way. Linear limits are those of "
    "equilibria, and few "
    "distinct equilibria were found. Energies of the leaky dynamics contain the term x.g - L. "
    "An end that is neither at rest nor a 2-cycle may be a longer cycle, or still on its way: "
    "they are not told apart. Attractors are named by the flow after the last Euler step; near the "
    "border of two basins the smallest difference decides."
)


def spread(values: Any) -> str:
    """Least and largest, or one number where they agree to three digits."""
    low, high = f"{np.min(values):.3g}", f"{np.max(values):.3g}"
    return low if low == high else f"{low} to {high}"


# --- words -------------------------------------------------------------------------------------


def findings(result: xr.DataTree) -> list[str]:
    """What was found, a paragraph a question, every number from the result."""
    return [of_limits(result), of_published(result), of_map(result), of_first_step(result),
            of_training(result), of_energy(result)]  # fmt: skip


def of_limits(result: xr.DataTree) -> str:
    """Predicted limits against measured ones, and how far below the bounds lie."""
    group = result["limits/leaky"].to_dataset()
    rest = group["converged"].values
    sentences = [
        f"{int(rest.sum())} of {len(rest)} starts of the trained model ("
        f"{int(group['image'].sum())} images with half of their patches hidden, the others random "
        f"tokens) came to rest, in {len(equilibria(group))} distinct equilibria."
    ]
    worst = {law: deviation(result, f"limits/{law}") for law in DYNAMICS[1:]}
    for law in DYNAMICS[1:]:
        found = result[f"limits/{law}"].to_dataset()
        found = found.isel(sample=found["image"].values)
        ratio = {
            name: np.median(found["linear"] / found[name.split()[0]].sel(state=name.split()[1]))
            for name in ("descent rest", "descent start", "lipschitz rest")
        }
        sentences.append(
            f"Under the {law} dynamics the predicted Euler limits are {spread(found['linear'])}, "
            f"and the measured ones differ by at most {100 * worst[law]:.2g} %; the "
            f"descent-lemma bound is {ratio['descent rest']:.3g} times smaller at rest and "
            f"{ratio['descent start']:.3g} times at the start, the Lipschitz bound "
            f"{ratio['lipschitz rest']:.3g} times at rest (medians over images)."
        )
    met = max(worst.values()) < CRITERION
    sentences.append(f"The criterion, {100 * CRITERION:g} %, is {'met' if met else 'NOT met'}; "
                     "the bisection itself resolves 0.1 %.")  # fmt: skip
    return " ".join(sentences)


def of_published(result: xr.DataTree) -> str:
    """What ET-F23 says for the published dynamics of the model and of the control."""
    found, map_et = result["limits/et"].to_dataset(), result["map/et"].to_dataset()
    top, limit = 1 + found["eigenvalue"] * found["scale"], found["limit"].values
    control = result["control/et"].to_dataset()
    kappa = 1 + control["eigenvalue"] * control["scale"]
    rises = int(map_et["rises"].isel(step=-1).sum())
    steps = map_et.sizes["sample"] * map_et.sizes["step_size"] * (map_et.sizes["step"] - 1)
    multiplier = result["multiplier"].to_dataset()
    gap = float(abs(multiplier["measured"] - multiplier["predicted"]).max())
    kicked = result["transient"].to_dataset()
    same = (kicked["rises"] == kicked["predicted"]).values
    worst = ", ".join(f"{100 * deviation(result, f'control/{law}'):.2g} % ({law})"
                      for law in DYNAMICS)  # fmt: skip
    if np.isinf(limit).all() and float(top.max()) <= 2:
        verdict = (f"at most {float(top.max()):.3g}, below 2: no step is too large for the "
                   "equilibria, and the bisection finds none up to 1e6 either")  # fmt: skip
    else:
        verdict = f"up to {float(top.max()):.3g}; measured limits are {spread(limit)}"
    return (
        f"The published dynamics has an Euler limit only where kappa_max exceeds 2 (ET-F23). In "
        f"the trained model it is {verdict}. In the map {rises} of {steps} steps raise the energy. "
        f"The control, {figures.CONTROL}, has kappa_max {spread(kappa)} and limits under all "
        f"dynamics, which the measured ones meet to {worst}. Under the published one the measured "
        f"multiplier of its top mode follows (1 - (h/c)(kappa - 1)) / (1 + h/c) to {gap:.1g}; "
        "after a kick the energy rises as often as there are steps with h / c_k beyond the limit "
        f"in {100 * same.mean():.0f} % of the runs, {int(kicked['rises'].max())} times at most, "
        "since c grows with every step and carries the run into the stable zone."
    )


def of_map(result: xr.DataTree) -> str:
    """Where the energy starts to rise, how runs end beyond, and whose attractor they reach."""
    sentences = []
    for law in DYNAMICS[1:]:
        found = result[f"map/{law}"].to_dataset()
        sizes, first = found["step_size"].values, first_rise(found).values
        limit = rung(result, law, "predicted limit, rest")
        seen, ratio = np.isfinite(first), sizes[1] / sizes[0]
        sentences.append(
            f"Under the {law} dynamics the energy first rises at "
            + (f"{spread(first[seen] / limit[seen])} times the limit predicted for the image's "
               f"equilibrium ({int(seen.sum())} of {len(seen)} images; step sizes of the map are "
               f"a factor {ratio:.3g} apart)." if seen.any() else "no step size of the map.")
        )  # fmt: skip
        if (first[seen] < limit[seen]).any() and (first[seen] >= limit.min()).all():
            sentences.append(
                "Where that is below one, the step is still above the least limit of all these "
                "equilibria, and may have led to another of them."
            )
        beyond = found.isel(step_size=sizes > limit.max() * ratio)
        if beyond.sizes["step_size"]:
            cycles = 100 * beyond["period2"].mean("sample").values
            lost = 100 * float(overflowed(beyond).mean("sample").max())
            most = beyond["step_size"].values[cycles.argmax()]
            sentences.append(
                f"Beyond it up to {cycles.max():.0f} % of the images end in a 2-cycle (at step "
                f"{most:.3g}; at the largest, {sizes[-1]:.3g}, {cycles[-1]:.0f} %), and "
                + (f"up to {lost:.0f} % overflow." if lost else "none overflows.")
            )
    away = []
    for law in DYNAMICS:
        label = result[f"map/{law}"].to_dataset()["attractor"]
        step = result[f"map/{law}"].attrs["step"]
        share = (label > 0).mean("followed")
        own = int(abs(share["followed_size"].values - step).argmin())
        share = share.isel(followed_size=sorted({0, own, share.sizes["followed_size"] - 1}))
        away.append(f"{law} " + ", ".join(
            f"{100 * float(v):.0f} % at {float(h):.2g}"
            for h, v in zip(share["followed_size"], share, strict=True)
        ))  # fmt: skip
    sentences.append(
        f"Of {label.sizes['followed']} images, followed to rest from the last Euler state, these "
        f"reach another attractor than the flow from their start: {'; '.join(away)} (intervals in "
        "the figure). A step may keep the energy falling all the way and yet choose another end."
    )
    return " ".join(sentences)


def of_first_step(result: xr.DataTree) -> str:
    """How far the first step goes at the model's sigma and at the published start's."""
    found = result["first_step"].to_dataset()
    here = found.sel(step_size=result["map/et"].attrs["step"], method="nearest").mean("sample")
    parts = []
    for scale in (0, 1):
        masked = here.isel(scale=scale).sel(kind="masked")
        kept = float(here["decrease_ratio"].isel(scale=scale))
        parts.append(
            f"{float(masked['displacement']):.3g} times as long as a masked token (sigma "
            f"{float(masked['sigma']):.2g}), turns it by {float(masked['turn']):.2f} of its radius "
            f"and lowers the energy by {100 * kept:.0f} % of what the slope promises"
        )
    return (
        f"The first step, at the trained size {float(here['step_size']):g}, is {parts[0]}. From "
        "the same start shrunk to the spread of features of the published initialisation it is "
        f"{parts[1]}: "
        "the step discards where such tokens pointed (ET-F26). "
        f"A step of {crossover(result):.2g} is as long as a masked token of the trained model. "
        + ("The first step lowers the energy at every size of the map: overshoot, no instability."
           if float(found["decrease_ratio"].min()) > 0 else
           "Some of the first steps raise the energy.")
    )  # fmt: skip


def of_training(result: xr.DataTree) -> str:
    """The error at steps that were not trained."""
    scored, unseen = result["scored"].to_dataset(), result["unseen"].to_dataset()
    step, steps = scored.attrs["step"], scored.attrs["steps"]
    error, size = scored["error"].mean("sample"), scored["step_size"].values
    trained = float(error.sel(step_size=step, method="nearest").sel(step=steps))
    floor = error[:, 1:].min("step").values
    near = {"its own best count": size[floor <= NEAR * trained],
            f"{steps} steps": size[error.sel(step=steps).values <= NEAR * trained]}  # fmt: skip
    name = "best step and count"
    best, wide = difference(unseen, name)
    pick = unseen.sel(candidate=name)
    pair = f"step {float(pick['step_size']):.3g} and {int(pick['count'])} steps"
    gaps = {n: difference(unseen, n) for n in unseen["candidate"].values}
    small, large = "smallest step, trained horizon", "largest step, best count"
    verdict = (
        "which is no better than as trained" if best + wide >= 0 else "which beats the trained pair"
    )
    c = crossover(result)
    below, above = slope(result, 0.0, c), slope(result, 10 * c, math.inf)
    return (
        f"The model was trained with {steps} steps of {step:g}. On {scored.sizes['sample']} images "
        f"the best pair of the map is {pair}, {verdict} on the other {unseen.sizes['image']}: "
        f"difference {best:+.4f} +- {wide:.4f} (95 %; error as trained "
        f"{float(unseen['error'].isel(candidate=0).mean()):.4f}). The error stays within "
        f"{100 * (NEAR - 1):.0f} % of the trained one for step sizes of "
        + ", and ".join(f"{spread(v)} at {n}" if len(v) else f"none at {n}"
                        for n, v in near.items())
        + f". At the trained horizon {step * steps:g} the smallest step, "
        f"{float(unseen['step_size'].sel(candidate=small)):.3g}, changes it by "
        f"{gaps[small][0]:+.4f} +- {gaps[small][1]:.4f}; the largest step, "
        f"{float(unseen['step_size'].sel(candidate=large)):.3g}, at its best count of "
        f"{int(unseen['count'].sel(candidate=large))}, by {gaps[large][0]:+.4f} +- "
        f"{gaps[large][1]:.4f}. {of_slopes(below, above, c)}"
    )  # fmt: skip


def of_slopes(below: tuple[float, ...], above: tuple[float, ...], c: float) -> str:
    """What the best count does with the step size."""
    if math.isnan(below[0]) or math.isnan(above[0]):
        return "Too few step sizes to say how the best count depends on them."
    text = (
        f"If accuracy followed the horizon, the best count would fall as step^-1; if it followed "
        f"the count, as step^0. It goes as step^{below[0]:.2f} (95 %: {below[1]:.2f} to "
        f"{below[2]:.2f}) up to {c:.2g}, where a step is as long as a token, and as "
        f"step^{above[0]:.2f} ({above[1]:.2f} to {above[2]:.2f}) beyond ten times that"
    )
    if -1 < below[0] < -0.5 and above[0] > -0.35:
        text += (
            ": nearer to the horizon while steps are short, and the count alone in the end. So it "
            "must be: g does not change when x is divided by its scale c, and in x / c the model "
            "is a relaxation by the shares h / c_k of its steps (ET-F28), which no longer depend "
            "on h once the start is forgotten"
        )
    return text + "."


def of_energy(result: xr.DataTree) -> str:
    """Whether the energy predicts the error."""
    found = correlations(result["scored"].to_dataset())
    parts = []
    for name, ranks in found.items():
        if len(ranks):
            low, middle, high = np.quantile(ranks, (0.25, 0.5, 0.75))
            words = name.replace("\n", " ")
            parts.append(f"{words} {middle:+.2f} ({low:+.2f} to {high:+.2f})")
    firsts = [float(np.median(r)) if len(r) else math.nan for r in found.values()]
    verdict = (
        "The energy tells how far a run has come and not how good its answer is: it falls on past "
        "the best answer." if firsts[0] > 0.5 and firsts[1] < 0 else
        "The energy does not simply order the answers."
    )  # fmt: skip
    return (
        "Rank correlation of energy and error per image, median and quartiles: "
        + "; ".join(parts) + f". {verdict}"
    )  # fmt: skip


def protocol(result: xr.DataTree, record: dict[str, Any]) -> list[str]:
    """How it was measured."""
    study = record["study"]
    maps = {law: result[f"map/{law}"].to_dataset() for law in DYNAMICS}
    sizes = "; ".join(f"{law} {spread(m['step_size'])}" for law, m in maps.items())
    followed = result["map/et"]["attractor"].sizes
    return [
        f"The trained model's system in float64; held-out digits with half of the patches hidden "
        f"(seed {study['seed']}). Limits: from {study['images']} images and {study['starts']} "
        "random states to rest (residual below 1e-9). Predicted limits from the largest eigenvalue "
        "of the stability operator there; measured ones by bisection of the step at which a "
        "deviation of 1e-5 along the top mode stops decaying within 60 steps (published dynamics: "
        "one step, as its c grows), to 0.1 %; its trials are multiples of the prediction, so that "
        "equal deviations mean one cell. First rise: the smallest step size of the map that "
        "raises the energy at any step.",
        f"Map: {study['images']} images, {study['step_sizes']} step sizes ({sizes}, each in its "
        f"dynamics' own time) and {study['steps']} Euler steps, in one batch. A rise is more than "
        "8 roundings of the Lyapunov function. An end is a 2-cycle if g returns after two steps "
        f"to 1e-3 of the distance of one. {followed['followed']} images at "
        f"{followed['followed_size']} step sizes are then followed along the flow to rest; "
        "another attractor is one at more than 1e-3 in g from where the flow takes the start.",
        f"Steps that were not trained: {result['scored'].sizes['sample']} images at "
        f"{study['scored_sizes']} step sizes choose, the other "
        f"{result['unseen'].sizes['image']} held-out images check. Error: mean squared error over "
        "the masked patches, over the variance of the training pixels. Lines are means and bands "
        "quartiles over images.",
        f"Control: {figures.CONTROL} (ET-F24; beta 1e-3, eps 1e-12), from {study['starts']} random "
        "starts; kicked by 1e-3 of its length along its top mode.",
    ]


# --- tables and the page -----------------------------------------------------------------------


def limits_table(result: xr.DataTree) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Every distinct equilibrium of the trained model, and the control's, with its limits."""
    header = ("equilibrium", "dynamics", "images", "random", "kappa or lambda", "descent",
              "predicted", "measured", "deviation")  # fmt: skip
    rows = []
    for system, name in (("limits", "trained"), ("control", "control")):
        for law in DYNAMICS:
            group = result[f"{system}/{law}"].to_dataset()
            rate = group["eigenvalue"] if law != "et" else 1 + group["eigenvalue"] * group["scale"]
            for members in equilibria(group):
                one, images = group.isel(sample=members), group["image"].values[members].sum()
                ratio = float(one["ratio"].mean())
                rows.append((
                    f"{name}, E = {float(one['energy'].mean()):.1f}", law, f"{images}",
                    f"{len(members) - images}", f"{float(rate[members].mean()):.4g}",
                    f"{float(one['descent'].sel(state='rest').mean()):.4g}",
                    *(f"{v:.4g}" if math.isfinite(v) else "none"
                      for v in (float(one["linear"].mean()), float(one["limit"].mean()))),
                    f"{100 * (ratio - 1):+.3f} %" if math.isfinite(ratio) else "",
                ))  # fmt: skip
    return header, rows


def candidates_table(unseen: xr.Dataset) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Errors of the candidates on images that did not choose them."""
    header = ("candidate", "step", "steps", "horizon", "error", "from trained", "95 %")
    rows: list[tuple[str, ...]] = []
    for name in unseen["candidate"].values:
        one = unseen.sel(candidate=name)
        step, count, gap = float(one["step_size"]), int(one["count"]), difference(unseen, name)
        rows.append((
            str(name), f"{step:.4g}", f"{count}", f"{step * count:.3g}",
            f"{float(one['error'].mean()):.4f}", f"{gap[0]:+.4f}", f"+- {gap[1]:.4f}",
        ))  # fmt: skip
    return header, rows


def report(result: xr.DataTree, record: dict[str, Any]) -> Report:
    """The page: question, protocol, result, limits."""
    scored = result["scored"].to_dataset()
    made = Report(TITLE)
    made.text("Question", QUESTION)
    made.text("Protocol", *protocol(result, record))
    limits, published, mapped, first, training, energy = findings(result)
    made.text("Result: limits", limits)
    made.figure("limits", figures.draw_limits(result), figures.CAPTIONS["limits"])
    made.table(
        "Limits at every distinct equilibrium: the eigenvalue is kappa (et, leaky) or lambda "
        "(sphere); descent: the bound of ET-F20 at rest.", *limits_table(result),
    )  # fmt: skip
    made.text("Result: the published dynamics", published)
    made.figure("control", figures.draw_control(result), figures.CAPTIONS["control"])
    made.text("Result: step size and horizon", mapped)
    made.figure("map", figures.draw_map(result), figures.CAPTIONS["map"])
    made.figure("ends", figures.draw_ends(result), figures.CAPTIONS["ends"])
    made.text("Result: the first step", first)
    made.figure("first_step", figures.draw_first(result), figures.CAPTIONS["first_step"])
    made.text("Result: steps that were not trained", training)
    made.figure("training", figures.draw_training(result, best_counts(scored)),
                figures.CAPTIONS["training"])  # fmt: skip
    made.table(
        "Errors on the held-out images that had no part in the choice; difference from the "
        "trained step and count, paired.", *candidates_table(result["unseen"].to_dataset()),
    )  # fmt: skip
    made.text("Result: energy and error", energy)
    made.figure("energy", figures.draw_energy(result, correlations(scored)),
                figures.CAPTIONS["energy"])  # fmt: skip
    made.text("Limits", LIMITS)
    return made
