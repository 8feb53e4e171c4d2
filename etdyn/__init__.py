"""etdyn: the Energy Transformer as a dynamical system."""

from etdyn.energies import Attention, Energy, EnergySum, Hopfield
from etdyn.lagrangians import Lagrangian, LayerNorm
from etdyn.solve import (
    Equilibrium,
    EquilibriumError,
    Failure,
    GradientError,
    Method,
    Solution,
    SolveError,
    Stats,
    Status,
    Stop,
    available_methods,
    descend,
    find_equilibrium,
    implicit,
    solve,
)
from etdyn.store import load, save
from etdyn.systems import EnergyTransformer, System
from etdyn.tasks import ImageCompletion, load_model, load_official_checkpoint, save_model

__all__ = [
    "Attention",
    "Energy",
    "EnergySum",
    "EnergyTransformer",
    "Equilibrium",
    "EquilibriumError",
    "Failure",
    "GradientError",
    "Hopfield",
    "ImageCompletion",
    "Lagrangian",
    "LayerNorm",
    "Method",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "Stop",
    "System",
    "available_methods",
    "descend",
    "find_equilibrium",
    "implicit",
    "load",
    "load_model",
    "load_official_checkpoint",
    "save",
    "save_model",
    "solve",
]
