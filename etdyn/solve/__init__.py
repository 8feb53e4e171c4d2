"""Moving a System: the discrete model, the flow, and what they return."""

from etdyn.solve.discrete import descend, iterate
from etdyn.solve.flow import solve
from etdyn.solve.implicit_gradient import ImplicitReport, implicit
from etdyn.solve.interpolate import Interpolant
from etdyn.solve.methods import Method, available_methods
from etdyn.solve.observables import named_observables
from etdyn.solve.solution import (
    BacksolveReport,
    Failure,
    GradientError,
    Solution,
    SolveError,
    Stats,
    Status,
)
from etdyn.solve.stopping import Stop

__all__ = [
    "BacksolveReport",
    "Failure",
    "GradientError",
    "ImplicitReport",
    "Interpolant",
    "Method",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "Stop",
    "available_methods",
    "descend",
    "implicit",
    "iterate",
    "named_observables",
    "solve",
]
