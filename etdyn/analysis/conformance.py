"""`check`: does a system keep the laws and promises that the rest of etdyn relies on?"""

from __future__ import annotations

import copy
import math
import textwrap
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from etdyn import store
from etdyn.analysis.bench import Bench, DoesNotApply, Law
from etdyn.analysis.contracts import CONTRACTS, dtype_is_kept
from etdyn.analysis.laws import LAWS
from etdyn.checks import bad, check_count, check_finite
from etdyn.solve.solution import describe_system
from etdyn.systems import System

__all__ = ["Conformance", "Verdict", "check"]

SCALES = (0.01, 0.3, 1.0, 3.0, 30.0)  # standard deviations of the states that are drawn, one each
MOST_SAMPLES = 8
WIDTH = 100


@dataclass(frozen=True)
class Verdict:
    """What became of one law.

    Attributes:
        law: its name.
        measured: how far it is from holding; NaN where it could not be measured.
        bound: the largest number with which it holds.
        applies: False where the law has nothing to say about this system.
        detail: where the number was found, or why there is none.
        meaning: what a failure means and where to look.
    """

    law: str
    measured: float
    bound: float
    applies: bool
    detail: str
    meaning: str

    @property
    def passed(self) -> bool:
        """Whether it holds, or has nothing to say."""
        return not self.applies or self.measured <= self.bound

    def __str__(self) -> str:
        """One line; under a failure, what it means."""
        if not self.applies:
            return f"  --  {self.law:<27} not measured: {self.detail}"
        if self.passed:
            note = f"   {self.detail}" if self.detail.startswith("refused") else ""
            return f"PASS  {self.law:<27} {self.measured:8.2g} <= {self.bound:.0g}{note}"
        where = f"   {self.detail}" if self.detail else ""
        lines = [f"FAIL  {self.law:<27} {self.measured:8.2g} >  {self.bound:.0g}{where}"]
        indent = " " * 6
        lines += textwrap.wrap(self.meaning, WIDTH, initial_indent=indent, subsequent_indent=indent)
        return "\n".join(lines)


@dataclass(frozen=True)
class Conformance:
    """The verdicts on a system; printing it shows a line for each.

    Attributes:
        verdicts: in the order of the laws.
        title: what was checked, in words.
        attrs: provenance, as stored.
    """

    verdicts: tuple[Verdict, ...]
    title: str
    attrs: dict[str, Any]

    @property
    def passed(self) -> bool:
        """Whether every law that applies holds."""
        return not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """The names of the laws that do not hold."""
        return tuple(v.law for v in self.verdicts if not v.passed)

    def to_xarray(self) -> xr.Dataset:
        """The verdicts as a dataset (schema "etdyn.conformance/1").

        Returns:
            Dataset with dim law and variables `measured`, `bound` (float64, dimensionless),
            `applies`, `passed` (bool) and `detail` (text).
        """

        def column(name: str, dtype: Any, long_name: str, **attrs: str) -> Any:
            values = np.array([getattr(v, name) for v in self.verdicts], dtype=dtype)
            return ("law", values, {"long_name": long_name} | attrs)

        data = {
            "measured": column("measured", float, "distance from the law", units="1"),
            "bound": column("bound", float, "largest distance that passes", units="1"),
            "applies": column("applies", bool, "law applies to this system"),
            "passed": column("passed", bool, "law holds or does not apply"),
            "detail": column("detail", object, "where it was found, or why there is no number"),
        }
        return xr.Dataset(data, {"law": column("law", object, "name of the law")}, self.attrs)

    def __str__(self) -> str:
        """A line for each law."""
        held = sum(v.passed and v.applies for v in self.verdicts)
        idle = sum(not v.applies for v in self.verdicts)
        last = f"{held} hold, {len(self.failures)} fail, {idle} not measured"
        return "\n".join([self.title, *map(str, self.verdicts), last])

    __repr__ = __str__  # so that a session that asks sees it


def check(system: System, x: Tensor | None = None, tokens: int = 5, seed: int = 0) -> Conformance:
    """Measure a system against every law and promise that etdyn relies on.

        print(ed.check(ed.System(ed.LayerNorm(16), MyEnergy(), "et")))

    Forces, their derivatives and the metric against autograd; a real spectrum (ET-F12);
    dissipation and descent (ET-F11); and shapes, independence of samples, precision, gradients,
    masks and finite values at extreme states. Everything is measured on a copy in float64, whatever
    the dtype of the system; only "dtype and device kept" and "finite at the edges" look at float32
    too. The system and torch's generators stay as they are.

    Args:
        system: with an energy, or with a coupling, of which less is asked.
        x: states to measure at, `(batch, token, feature)`, in the dtype of the system, of which
            the first 8 are used; None draws normal ones with standard deviations from 0.01 to 30.
        tokens: how many, where states are drawn; a mask or a graph of the system decides instead.
        seed: of the states and directions that are drawn.

    Returns:
        Conformance.

    Raises:
        ValueError, TypeError: wrong input, naming the argument; a system that cannot run.
    """
    if not isinstance(system, System):
        raise TypeError(f"system: expected a System, got {type(system).__name__}")
    check_count("seed", seed, least=0)
    rng = torch.Generator().manual_seed(seed)
    drawn = x is None
    x = _draw(system, tokens, rng) if x is None else x
    system.check(x)
    check_finite("x", x)
    x = x[:MOST_SAMPLES]
    system = system.select(torch.arange(len(x), device=x.device))
    copied = copy.deepcopy(system).double().requires_grad_(False)
    with torch.random.fork_rng([] if x.device.type == "cpu" else [x.device]):
        torch.manual_seed(seed)  # for what is random in there, and should not be
        if problem := _problem(system, x):
            raise bad("system", "one that runs (is `tokens` right?)", problem)
        start = copied.prepare(x.detach().double())
        problem = _problem(copied, start)
        bench = Bench(copied, start, rng, x.dtype)
        verdicts = tuple(_judge(law, bench, problem) for law in (*LAWS, *CONTRACTS))
    config = {
        "system": describe_system(system),
        "shape": list(x.shape),
        "drawn": drawn,
        "seed": seed,
    }
    attrs = store.provenance("etdyn.conformance/1", config, x)
    return Conformance(verdicts, _title(system, x), attrs)


def _draw(system: System, tokens: int, rng: torch.Generator) -> Tensor:
    """A state of every scale; where a mask or a graph is for one batch, for all of its samples."""
    check_count("tokens", tokens)
    masks = [mask for mask in (system._tokens, system._keys) if mask is not None]
    given = [system.interaction.sizes(), *((len(mask), mask.shape[-1]) for mask in masks)]
    tokens = next((n for _, n in given if n is not None), tokens)
    batch = next((count for count, _ in given if count not in (None, 1)), len(SCALES))
    like = system.lagrangian.like
    x = torch.randn(batch, tokens, system.dim, generator=rng, dtype=torch.float64)
    scales = torch.tensor(SCALES, dtype=torch.float64).repeat(math.ceil(batch / len(SCALES)))
    return (scales[:batch, None, None] * x).to(like)


def _problem(system: System, x: Tensor) -> str:
    """What a system that cannot run at all says; nothing where it can."""
    try:
        system.velocity(0.0, system.prepare(x))
    except Exception as error:  # anything may be wrong in there
        return f"{type(error).__name__}: {_first_line(error)}"
    return ""


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


@torch.enable_grad()  # autograd is the oracle
def _judge(law: Law, bench: Bench, problem: str) -> Verdict:
    """Measure; what a law raises is its failure. One line is enough for a copy that cannot run."""
    applies, detail = True, ""
    try:
        if problem and law is not dtype_is_kept:
            raise DoesNotApply("the copy in float64 does not run")
        if law.needs_energy and not bench.system.has_energy:
            raise DoesNotApply("no energy is claimed")
        result = law.measure(bench)
        measured, detail = result if isinstance(result, tuple) else (result, "")
    except DoesNotApply as reason:
        measured, applies, detail = math.nan, False, str(reason)
    except Exception as error:  # anything may be wrong in there
        measured, detail = math.nan, f"raised {type(error).__name__}: {_first_line(error)}"
    return Verdict(law.name, float(measured), law.bound, applies, detail, law.meaning)


def _title(system: System, x: Tensor) -> str:
    terms = " + ".join(system.interaction.terms())
    batch, tokens, dim = x.shape
    own = str(x.dtype).removeprefix("torch.")
    copied = "" if x.dtype == torch.float64 else f"; the system is {own}, a copy was measured"
    return (
        f"{type(system.lagrangian).__name__}, {terms}, {system.dynamics!r}: "
        f"{batch} states of {tokens} tokens of {dim} features, in float64{copied}"
    )
