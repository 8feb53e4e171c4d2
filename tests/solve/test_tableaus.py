"""The embedded pairs as tables: order conditions, stability, order of steps and interpolants."""

import math

import numpy as np
import pytest
import torch

from etdyn.solve.tableaus import TABLEAUS, error_ratio, interpolate, rk_step, step_factor

PAIRS = pytest.mark.parametrize("tableau", TABLEAUS.values(), ids=TABLEAUS)
DOPRI5 = TABLEAUS["dopri5"]
END = torch.tensor(2.0, dtype=torch.float64)


def saturating(t, x, index=None):
    return 1 - x * x


def riccati(t, x, index=None):
    return -t.reshape(-1, 1, 1) * x * x


EXACT = {
    saturating: lambda t, x0: (t + x0.atanh()).tanh(),
    riccati: lambda t, x0: 1 / (1 / x0 + t * t / 2),
}
PROBLEMS = pytest.mark.parametrize("field", EXACT, ids=lambda f: f.__name__)


def start(batch=4, token=3, feature=5):
    g = torch.Generator().manual_seed(batch)
    return 0.2 + 0.6 * torch.rand(batch, token, feature, generator=g, dtype=torch.float64)


def trees(size):
    """Rooted trees with this many nodes, each a sorted tuple of its root's subtrees."""

    def forests(left):
        if left == 0:
            return {()}
        return {
            tuple(sorted((tree, *rest)))
            for n in range(1, left + 1)
            for tree in trees(n)
            for rest in forests(left - n)
        }

    return sorted(forests(size - 1))


def order_gaps(a, tree_size, weights, theta=1.0):
    """|sum_i w_i phi_i(tree) - theta^n / gamma(tree)| of all trees with n nodes (HNW I, II.2)."""

    def nodes(tree):
        return 1 + sum(map(nodes, tree))

    def density(tree):
        return nodes(tree) * math.prod(map(density, tree))

    def phi(tree):
        return math.prod((a @ phi(sub) for sub in tree), start=np.ones(len(a)))

    return [abs(weights @ phi(t) - theta**tree_size / density(t)) for t in trees(tree_size)]


@PAIRS
def test_order_conditions(tableau):
    assert [len(trees(n)) for n in range(1, 7)] == [1, 1, 2, 4, 9, 20]
    a = np.array([[*row, *[0.0] * (tableau.stages - len(row))] for row in tableau.a])
    b, dense = np.array(tableau.b), np.array(tableau.dense)
    np.testing.assert_allclose(a.sum(1), tableau.c, atol=1e-14)
    rules = [(b, tableau.order, 1.0), (b - tableau.error, tableau.embedded_order, 1.0)]
    for theta in (0.1, 0.35, 0.5, 0.8, 1.0):
        weights = dense @ theta ** np.arange(1, dense.shape[1] + 1)
        rules.append((weights, tableau.dense_order, theta))
    for weights, order, theta in rules:
        for n in range(1, order + 1):
            assert max(order_gaps(a, n, weights, theta)) < 1e-13
        if theta in (0.5, 1.0) and weights is not rules[-1][0]:
            assert max(order_gaps(a, order + 1, weights, theta)) > 1e-4
    np.testing.assert_allclose(dense.sum(1), b, atol=1e-14)


@PAIRS
def test_infinite_state_is_no_accepted_step(tableau):
    x = torch.ones(2, 1, 2, dtype=torch.float64)
    x1 = x.clone()
    x1[1, 0, 0] = torch.inf
    stages = [torch.ones_like(x)] * tableau.stages
    error = error_ratio(tableau, x, x1, stages, h=torch.ones(2), rtol=1e-3, atol=0.0)
    assert error[0] < 1e-12 and np.isnan(error[1])


def one_step(tableau, field, t, x, h):
    t, h = torch.full((len(x),), t, dtype=x.dtype), torch.full((len(x),), h, dtype=x.dtype)
    times = [t + c * h for c in tableau.c]
    return rk_step(tableau, field, times, x=x, k=field(t, x), h=h)


def slope(sizes, errors):
    return np.polyfit(np.log(sizes), np.log(errors), 1)[0]


@PAIRS
@PROBLEMS
def test_fixed_steps_and_interpolant_have_their_order(tableau, field):
    x0, sizes = start(), np.array([1 / 16, 1 / 32, 1 / 64])
    ends, within = [], []
    for h in sizes:
        x = x0
        for n in range(round(2 / h)):
            x, _ = one_step(tableau, field, n * h, x, h)
        ends.append(float((x - EXACT[field](END, x0)).abs().max()))
        middle = EXACT[field](torch.tensor(1.0), x0)
        _, stages = one_step(tableau, field, 1.0, middle, h)
        gaps = []
        for theta in np.linspace(0.1, 0.9, 9):
            full = np.ones(len(x0))
            x = interpolate(tableau, middle, stages, h * full, theta * full)
            gaps.append(float((x - EXACT[field](torch.tensor(1 + theta * h), x0)).abs().max()))
        within.append(max(gaps))
    assert slope(sizes, ends) == pytest.approx(tableau.order, abs=0.2)
    assert slope(sizes, within) == pytest.approx(tableau.dense_order + 1, abs=0.2)


def test_step_control_is_that_of_dopri5():
    error, before = np.array([0.3, 0.03, 1e-12, 3.0, 1e9, np.nan]), np.full(6, 0.05)
    held = np.array([False, True, False, False, False, False])
    want = [0.9 * 0.3**-0.17 * 0.05**0.04, 1.0, 10.0, 0.9 * 3.0**-0.17, 0.2, 0.1]
    np.testing.assert_allclose(step_factor(DOPRI5, error, before, held), want, rtol=1e-14)
