"""etdyn: the Energy Transformer as a dynamical system."""

from etdyn.analysis import check, compare
from etdyn.couplings import Coupling, LinearCoupling
from etdyn.energies import Attention, Hopfield
from etdyn.graph_attention import GraphAttention
from etdyn.graphs import Graph
from etdyn.interactions import Energy, EnergySum, Interaction
from etdyn.lagrangians import IsingSpin, Lagrangian, LayerNorm, Quadratic
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
from etdyn.systems import System
from etdyn.tasks import ImageCompletion, load_model, load_official_checkpoint, save_model
from etdyn.transformer import EnergyTransformer

__all__ = [
    "Attention",
    "Coupling",
    "Energy",
    "EnergySum",
    "EnergyTransformer",
    "Equilibrium",
    "EquilibriumError",
    "Failure",
    "GradientError",
    "Graph",
    "GraphAttention",
    "Hopfield",
    "ImageCompletion",
    "Interaction",
    "IsingSpin",
    "Lagrangian",
    "LayerNorm",
    "LinearCoupling",
    "Method",
    "Quadratic",
    "Solution",
    "SolveError",
    "Stats",
    "Status",
    "Stop",
    "System",
    "available_methods",
    "check",
    "compare",
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
