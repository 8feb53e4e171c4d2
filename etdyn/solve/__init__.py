"""Moving a System: the discrete model, the flow, and what they return."""

from etdyn.solve.discrete import descend
from etdyn.solve.equilibrium import Equilibrium, EquilibriumError, find_equilibrium
from etdyn.solve.euler import iterate
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
    "Equilibrium",
    "EquilibriumError",
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
    "find_equilibrium",
    "implicit",
    "iterate",
    "named_observables",
    "solve",
]
