"""Measurements: free functions of systems, states and results."""

from etdyn.analysis.distance import activation_distance

__all__ = ["activation_distance"]
