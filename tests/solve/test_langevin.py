"""Noise with a stated stationary law: the Gibbs measure (ET-F33), against exact moments and laws.

One token in a linear energy, E = -v.g with |v| = 1 at T = 1. Along v the law of g is known: on the
sphere of R^n it is von Mises and Fisher's with kappa = R |v| / T, and the uniform law of a ball
of R^n is the shadow of that of a sphere in R^(n+2).
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from scipy.special import ive

import etdyn as ed
from etdyn import LayerNorm, System
from etdyn.problems import LinearEnergy
from etdyn.solve import iterate
from etdyn.solve.langevin import RADIAL, MirrorLangevin

DIM = 6
N = DIM - 1  # features of a token orthogonal to the ones
RADIUS = DIM**0.5  # gamma = 1
KAPPA = RADIUS


def system(dynamics, eps=1e-5):
    v = torch.arange(DIM, dtype=torch.float64)
    v = (v - v.mean()) / (v - v.mean()).norm()
    lagrangian = LayerNorm(DIM, eps).double()
    lagrangian.set_gamma(1.0)  # to the rounding of float64
    return System(lagrangian, LinearEnergy(v[None]), dynamics)


def mean_resultant(d, kappa):
    """A_d(kappa) = I_{d/2}(kappa) / I_{d/2 - 1}(kappa)."""
    return float(ive(d / 2, kappa) / ive(d / 2 - 1, kappa))


def law(d, kappa):
    """The distribution function of t = cos of the angle to v on the sphere in R^d."""
    t = np.linspace(-1, 1, 20001)
    density = (1 - t**2) ** ((d - 3) / 2) * np.exp(kappa * (t - 1))
    total = integrate.cumulative_trapezoid(density, t, initial=0)
    return lambda x: np.interp(x, t, total / total[-1])


def along(system, x):
    """(g - delta).v / R, and |g - delta| / R, `(batch,)`."""
    u = (system.activation(x) - system.lagrangian.delta)[:, 0] / RADIUS
    return (u @ system.linear.v[0]).numpy(), u.norm(dim=1).numpy()


def travel(stepper, system, x, h, time):
    """Every sample to the same time, in steps of h or what the stepper makes of it."""
    x, left = x.clone(), torch.full((len(x),), time, dtype=x.dtype)
    while len(rows := (left > 1e-12).nonzero().flatten()):
        report = stepper.step(system, x[rows], left[rows].clamp(max=h))
        assert not report.failed.any() and (report.evaluations == 1).all()
        x[rows], left[rows] = report.x, left[rows] - report.taken
    return x


def last(states):
    *_, x = states
    return x


def start(batch, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 1, DIM, generator=generator, dtype=torch.float64), generator


@torch.no_grad()
def test_f33_on_the_sphere_the_law_is_von_mises_and_fishers():
    x, generator = start(3000)
    sphere = system("sphere")
    x = travel(MirrorLangevin(1.0, generator), sphere, sphere.prepare(x), 0.02, 8.0)
    t, radius = along(sphere, x)
    assert np.abs(radius - 1).max() < 1e-14
    assert stats.kstest(t, law(N, KAPPA)).pvalue > 0.01
    assert abs(t.mean() - mean_resultant(N, KAPPA)) < 3 * t.std() / len(t) ** 0.5
    # the test sees another temperature, and another dimension
    assert stats.kstest(t, law(N, KAPPA / 1.3)).pvalue < 1e-4
    assert stats.kstest(t, law(N + 2, KAPPA)).pvalue < 1e-4


@torch.no_grad()
def test_the_bias_falls_with_the_step():
    """Order 1: a quarter of the step leaves about a quarter of the bias of E."""
    bias = []
    for h in (0.4, 0.1):
        x, generator = start(2000, seed=1)
        sphere, stepper, means = system("sphere"), MirrorLangevin(1.0, generator), []
        x = travel(stepper, sphere, sphere.prepare(x), h, 6.0)
        for _ in range(round(30 / h)):
            x = stepper.step(sphere, x, torch.full((2000,), h, dtype=x.dtype)).x
            means.append(along(sphere, x)[0].mean())
        bias.append(abs(np.mean(means) - mean_resultant(N, KAPPA)))
    assert bias[0] > 0.02
    assert bias[1] < 0.4 * bias[0]


@torch.no_grad()
def test_f33_published_tokens_with_mirror_noise_fill_the_ball_with_the_gibbs_measure():
    """exp(-E/T) dg: along v the law of the sphere in two dimensions more."""
    x, generator = start(3000)
    published = system("et", eps=1.0)
    x = travel(MirrorLangevin(1.0, generator), published, x, 0.1, 8.0)
    t, radius = along(published, x)
    assert stats.kstest(t, law(N + 2, KAPPA)).pvalue > 0.01
    assert abs(t.mean() - mean_resultant(N + 2, KAPPA)) < 3 * t.std() / len(t) ** 0.5
    square = ball_mean(lambda t, rho: t * t + rho * rho, lambda t, rho: 0.0)
    assert abs((radius**2).mean() - square) < 3 * (radius**2).std() / len(t) ** 0.5
    assert stats.kstest(t, law(N, KAPPA)).pvalue < 1e-4


@torch.no_grad()
def test_f33_leaky_tokens_have_the_gibbs_measure_of_their_lyapunov_function():
    """exp(-(E + L*)/T) dg, with L* = -sqrt(D eps) sqrt(R^2 - |g - delta|^2)."""
    x, generator = start(3000)
    leaky = system("leaky", eps=1.0)
    x = travel(MirrorLangevin(1.0, generator), leaky, x, 0.05, 8.0)
    t, _ = along(leaky, x)

    def conjugate(t, rho):
        return -(DIM**0.5) * RADIUS * max(1 - t * t - rho * rho, 0.0) ** 0.5

    exact = ball_mean(lambda t, rho: t, conjugate)
    assert abs(t.mean() - exact) < 3 * t.std() / len(t) ** 0.5
    assert abs(exact - mean_resultant(N + 2, KAPPA)) > 0.05  # another law than without L*


def ball_mean(value, energy):
    """The mean of value(t, rho) under exp(kappa t - energy) on the unit ball of R^N."""

    def integral(f):
        return integrate.dblquad(
            lambda rho, t: f(t, rho) * np.exp(KAPPA * t - energy(t, rho)) * rho ** (N - 2),
            -1, 1, 0, lambda t: (1 - t * t) ** 0.5, epsabs=1e-8,
        )[0]  # fmt: skip

    return integral(value) / integral(lambda t, rho: 1.0)


@torch.no_grad()
def test_f33_published_noise_freezes_the_published_tokens():
    """The law is not stationary: sigma grows, the noise anneals, and g ends at v."""
    x, generator = start(1000)
    published, means = system("et"), []
    for _ in range(3):
        x = last(iterate(published, x, 2.0, 50, noise=2**0.5, generator=generator))
        means.append(along(published, x)[0].mean())
    assert mean_resultant(N, KAPPA) < 0.43
    assert 0.9 < means[0] < means[1] < means[2]


@torch.no_grad()
def test_f33_published_noise_gives_leaky_tokens_a_projected_normal_instead():
    """x is normal around v with variance s^2/2 = T; along v that is not the Gibbs law at T."""
    temperature = 0.1
    x, generator = start(3000)
    leaky, s = system("leaky"), (2 * temperature) ** 0.5
    x = last(iterate(leaky, x, 0.02, 300, noise=s, generator=generator))
    t, _ = along(leaky, x)
    normal = s / 2**0.5 * torch.randn(3000, DIM, generator=generator, dtype=torch.float64)
    direct, _ = along(leaky, (leaky.linear.v + normal)[:, None])
    assert stats.ks_2samp(t, direct).pvalue > 0.01
    error = t.std() / len(t) ** 0.5
    assert abs(t.mean() - mean_resultant(N, KAPPA / temperature)) > 10 * error
    assert stats.kstest(t, law(N, KAPPA / temperature)).pvalue < 1e-4


@pytest.mark.parametrize("dynamics", ["et", "leaky", "sphere"])
@torch.no_grad()
def test_f33_the_noise_has_the_covariance_of_the_inverse_metric(make_case, close, dynamics):
    """M^1/2 dx is white on the space that g can move in: M cov = 2 T h P."""
    case = make_case(dynamics=dynamics, batch=1, tokens=1, dim=5, eps=0.5)
    x = case.system.prepare(case.x)
    many, h = x.expand(200_000, -1, -1), torch.full((200_000,), 1e-6, dtype=x.dtype)
    stepper = MirrorLangevin(0.7, torch.Generator().manual_seed(0))
    noise = stepper.step(case.system, many, h).x - case.system.velocity(0, many) * 1e-6 - many
    covariance = torch.cov(noise[:, 0].T) / (2 * 0.7 * 1e-6)
    unit = torch.eye(5, dtype=x.dtype)
    lagrangian = case.system.lagrangian
    if dynamics == "sphere":
        expected = lagrangian.tangent(x[0, :1], unit) / lagrangian.gamma**2
    else:
        metric = torch.stack([lagrangian.metric(x[0, 0], e) for e in unit])
        expected = torch.linalg.pinv(metric, atol=1e-9)
    close(covariance, expected, 0.02)


@pytest.mark.parametrize("trained", [False, True])
@torch.no_grad()
def test_f33_published_noise_anneals_itself(make_case, close, trained):
    """In z = x / c, c_k = c_0 + k alpha, where the flow is leaky, a step's noise is 1 / c smaller.

    So its total variance is finite: the sum of 1 / c_k^2.
    """
    if trained:
        model = ed.load_model(Path(__file__).parents[2] / "data" / "digits").double()
        case_system, x = model.system, torch.randn(2, model.patches + 1, model.system.dim).double()
    else:
        case = make_case()
        case_system, x = case.system, case.x
    alpha, s, c, steps = 0.5, 0.3, 2.0, 40
    drawn, again = (torch.Generator().manual_seed(1) for _ in range(2))
    total = 0.0
    for k, after in enumerate(iterate(case_system, x, alpha, steps, noise=s, generator=drawn)):
        before, c_next = x, c + (k + 1) * alpha
        damped = before + alpha * case_system.force(before)  # a damped step of the map, times c
        xi = torch.randn(x.shape, generator=again, dtype=x.dtype)
        close((after - damped) / c_next, s * alpha**0.5 / c_next * xi, 1e-10, scale=1e-2)
        total += s * s * alpha / c_next**2
        x = after
    assert total < s * s / c, "what an endless run would add up to"


@torch.no_grad()
def test_absent_tokens_feel_no_noise(make_case):
    case = make_case(tokens=3)
    tokens = torch.tensor([[True, False, True], [True, True, True]])
    masked, h = case.system.masked(tokens), torch.full((2,), 1e-3, dtype=torch.float64)
    x = MirrorLangevin(1.0).step(masked, case.x, h).x
    assert torch.equal(x[0, 1], case.x[0, 1])
    assert not torch.equal(x[0, 0], case.x[0, 0])


@torch.no_grad()
def test_a_step_too_long_for_the_noise_on_lengths_is_shortened(make_case):
    case = make_case(batch=2, eps=1e-2)
    sigma = case.system.lagrangian.sigma(case.x).amax(1)
    h = torch.tensor([1e-5, 1.0], dtype=torch.float64)
    report = MirrorLangevin(0.5).step(case.system, case.x, h)
    assert report.shrunk.tolist() == [False, True]
    limit = RADIAL * float(case.system.lagrangian.gamma) * 1e-2 / sigma[1]
    assert float(report.taken[1]) == pytest.approx(float(limit), rel=1e-12)


def test_without_eps_the_ball_has_no_interior_and_is_refused(make_case):
    case = make_case()
    case.system.lagrangian.eps = 0.0
    h = torch.full((2,), 1e-3, dtype=torch.float64)
    with pytest.raises(ValueError, match="system: expected eps > 0, or the sphere"):
        MirrorLangevin(1.0).step(case.system, case.x, h)
    sphere = case.system.with_dynamics("sphere")
    MirrorLangevin(1.0).step(sphere, sphere.prepare(case.x), h)
