"""The intrinsic clock: the time of the sphere dynamics, read off any trajectory."""

import numpy as np
import torch

import etdyn as ed


def test_a_straight_steps_clock_is_the_integral_of_gamma_over_sigma(make_case, close):
    for spread, move in ((1.0, 3.0), (0.01, 5.0), (1.0, 1e-9), (1.0, -2.0)):
        case = make_case(spread=spread, eps=1e-3, gamma=1.7)
        x0, x1 = case.x, case.x + move * case.randn(*case.x.shape)
        if move < 0:
            x1 = case.x * 1.5 - 2.0 * case.x  # through the point where sigma is smallest
        nodes, weights = (torch.from_numpy(v) for v in gauss_legendre())
        rate = [case.system.clock_rate(x0 + s * (x1 - x0)) for s in nodes]
        expected = 0.3 * (torch.stack(rate) * weights[:, None, None]).sum(0)
        close(case.system.elapsed_clock(x0, x1, 0.3), expected, 1e-8)


def gauss_legendre(pieces=400):
    node, weight = np.polynomial.legendre.leggauss(10)
    starts = np.arange(pieces)[:, None] / pieces
    nodes = (starts + (node + 1) / (2 * pieces)).ravel()
    return nodes, np.tile(weight / (2 * pieces), pieces)


def test_in_its_clock_a_single_token_is_the_sphere_flow(make_case):
    """For one token dg/dtau = -P grad E holds along the published and the leaky flow (eps to 0)."""
    case = make_case(tokens=1, eps=1e-12, hopfield="softmax", batch=1)
    sphere = case.system.with_dynamics("sphere")
    for dynamics in ("et", "leaky"):
        system = case.system.with_dynamics(dynamics)
        times = torch.linspace(0, 2, 801)
        flow = ed.solve(system, case.x, times, rtol=1e-10, atol=1e-12, gradient=None)
        clock = flow.to_xarray(states=False)["clock"].to_numpy()[:, 0]
        ends = [0.0, float(clock[400]), float(clock[800])]
        same = ed.solve(sphere, case.x, ends, rtol=1e-10, atol=1e-12, gradient=None)
        for k in (1, 2):
            gap = system.activation(flow.x[400 * k]) - sphere.activation(same.x[k])
            assert float(gap.abs().max()) < 1e-5  # the clock's 801 straight pieces
