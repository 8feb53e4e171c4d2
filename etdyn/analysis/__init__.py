"""Measurements: free functions of systems, states and results, which return labelled data.

descent        audit, increases, local_energies, monotone_table
equilibria     survey, basin_changes; recovered, retrieval, bit_error, capacity (memories)
spectrum       spectrum, jacobian_spectrum, real_spectrum; flow_jacobian, stability_product,
               without_null, dense_matrix, linear_operator (operators)
step size      predicted_limits, measured_limit, multiplier, hessian_bound, step_size_map,
               attractor_switches, first_step_overshoot, stability_function, real_limit
convergence    decay_rate, conjugate; method_order, reference_solution, error_in_g,
               work_precision (precision); activation_distance
exponents      lyapunov_exponents, map_exponents, backward_growth
contributions  contributions, head_contributions, memory_contributions, node_scores
clusters       token_clusters, attention_clusters, plateaus
conformance    check (of one's own energy), compare (of runs)
"""

from etdyn.analysis.clusters import attention_clusters, plateaus, token_clusters
from etdyn.analysis.comparison import compare, comparison_table
from etdyn.analysis.conformance import Conformance, Verdict, check
from etdyn.analysis.contributions import (
    contributions,
    head_contributions,
    memory_contributions,
    node_scores,
)
from etdyn.analysis.convergence import FitStatus, conjugate, decay_rate
from etdyn.analysis.descent import Cause, audit, increases, local_energies
from etdyn.analysis.distance import activation_distance
from etdyn.analysis.equilibria import basin_changes, survey
from etdyn.analysis.exponents import backward_growth, lyapunov_exponents, map_exponents
from etdyn.analysis.jacobian import jacobian_spectrum, real_spectrum
from etdyn.analysis.memories import bit_error, capacity, recovered, retrieval
from etdyn.analysis.monotone import monotone_table
from etdyn.analysis.operators import (
    dense_matrix,
    flow_jacobian,
    linear_operator,
    stability_product,
    without_null,
)
from etdyn.analysis.precision import (
    DisagreementError,
    error_in_g,
    method_order,
    reference_solution,
    work_precision,
)
from etdyn.analysis.spectrum import spectrum
from etdyn.analysis.stability_function import real_limit, stability_function
from etdyn.analysis.stepsize import hessian_bound, measured_limit, multiplier, predicted_limits
from etdyn.analysis.stepsize_map import attractor_switches, first_step_overshoot, step_size_map

__all__ = [
    "Cause",
    "Conformance",
    "DisagreementError",
    "FitStatus",
    "Verdict",
    "activation_distance",
    "attention_clusters",
    "attractor_switches",
    "audit",
    "backward_growth",
    "basin_changes",
    "bit_error",
    "capacity",
    "check",
    "compare",
    "comparison_table",
    "conjugate",
    "contributions",
    "decay_rate",
    "dense_matrix",
    "error_in_g",
    "first_step_overshoot",
    "flow_jacobian",
    "head_contributions",
    "hessian_bound",
    "increases",
    "jacobian_spectrum",
    "linear_operator",
    "local_energies",
    "lyapunov_exponents",
    "map_exponents",
    "measured_limit",
    "memory_contributions",
    "method_order",
    "monotone_table",
    "multiplier",
    "node_scores",
    "plateaus",
    "predicted_limits",
    "real_limit",
    "real_spectrum",
    "recovered",
    "reference_solution",
    "retrieval",
    "spectrum",
    "stability_function",
    "stability_product",
    "step_size_map",
    "survey",
    "token_clusters",
    "without_null",
    "work_precision",
]
