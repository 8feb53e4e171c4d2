"""Noise whose stationary law is the Gibbs measure.

One draw serves the whole batch, so a sample's noise depends on its place in it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from etdyn.checks import bad, check_positive
from etdyn.solve.steppers import Stepper, StepReport, move
from etdyn.systems import System

__all__ = ["MirrorLangevin"]

RADIAL = 0.1  # largest variance of the relative change of a token's sigma in one step


class MirrorLangevin(Stepper):
    """Langevin noise at temperature T, with the Gibbs measure as its stationary law.

        sphere  x+ = normalise(x + h v + sqrt(2 T h)/gamma P xi)
        et      x+ = x + h f + sqrt(2 T h) M^-1/2 xi,            f = -grad_g E
        leaky   x+ = x + h (f - x) + sqrt(2 T h) M^-1/2 xi

    xi is standard normal, M = dg/dx. The law of g that is stationary as h -> 0:

        sphere  exp(-E/T) times the uniform measure on the spheres |g - delta| = gamma sqrt(D)
        et      exp(-E/T) dg, the volume of the balls |g - delta| < gamma sqrt(D)
        leaky   exp(-(E + L*)/T) dg on the same balls, where E + L* = `system.energy`

    a sphere or ball per token, within sum(g - delta) = 0. At a given h the bias is O(h).

    sphere is dg = -P grad E dtau + sqrt(2T) P o dW, the Riemannian Langevin equation: the
    normalisation turns the radial part of |noise|^2 into the drift -T (D - 2)/R^2 (g - delta) that
    Brownian motion on a sphere has. et and leaky are the mirror Langevin equation (Ito)
    dx = -grad V dt + sqrt(2T) (grad^2 L*)^1/2 dW, with x = grad L*(g) and grad^2 L* = M^-1, whose
    law in g is exp(-V/T) dg. On the mean of a token, which g ignores, M is singular and there is
    no noise. On its length M is gamma eps / sigma^3: that noise grows as sigma^3/2 / sqrt(eps),
    and as eps -> 0 the tokens shrink to sigma ~ sqrt(eps), to where the volume of the ball is. So
    with the small eps of a layer norm the measure to want is the sphere's.

    Where the noise on the length of a token would be above `RADIAL`, the step of that sample is
    shortened to RADIAL gamma eps / (2 T sigma), which shows as `shrunk`. The bound depends on the
    state, so averages over such a run must weight the states by `taken`, or be taken at equal
    times over samples, as those of a `Solution` are. One evaluation.

    The published noise, `descend(noise=s)`, has covariance s^2 instead of 2 T M^-1, and is not the
    Langevin noise of exp(-E/T) for any s and T, except on the sphere:

    - et: tokens drift away and the same kick turns them less and less, sigma ~ t; the noise
      anneals itself, and g freezes.
    - leaky: stationary, but with another law. For a constant force f, x is normal around f with
      variance s^2/2, and g is a projected normal instead of an exponential of E.
    - sphere: normalising removes the noise on the length, so that s = sqrt(2 T)/gamma has the law
      above as h -> 0.

    Args:
        temperature: T > 0.
        generator: of the noise.

    Raises:
        ValueError: at the step, et or leaky with eps = 0, where M is singular on lengths.

    Source: ET-F33; Hsieh et al. 2018; Zhang, Peyre, Fadili, Pereyra 2020, equation 2.
    """

    name = "mirror_langevin"

    def __init__(self, temperature: float, generator: torch.Generator | None = None) -> None:
        check_positive("temperature", temperature)
        self.temperature, self.generator = float(temperature), generator

    @classmethod
    def seeded(
        cls, temperature: float, seed: int = 0, device: torch.device | None = None
    ) -> MirrorLangevin:
        """With a generator of its own."""
        generator = torch.Generator(device or torch.device("cpu")).manual_seed(int(seed))
        return cls(temperature, generator)

    def step(self, system: System, x: Tensor, h: Tensor) -> StepReport:
        """See `Stepper`. Differentiable."""
        self.check(system, x, h)
        lagrangian, taken = system.layer_norm, h
        xi = _normal(x, self.generator)
        if system.dynamics == "sphere":
            noise = lagrangian.tangent(x, xi) / lagrangian.gamma
        elif lagrangian.eps == 0:
            raise bad("system", "eps > 0, or the sphere dynamics, for a Gibbs measure", "eps 0")
        else:
            noise = lagrangian.metric_root_inverse(x, xi)
            taken = h.minimum(self._longest(system, x))
        v = system.velocity(0.0, x)
        kick = (2 * self.temperature / taken).sqrt()[:, None, None] * system.keep(noise)
        moved = move(system, x, taken, v + kick)
        once = torch.ones(len(x), dtype=torch.int64, device=x.device)
        return StepReport.explicit(moved, h, taken, once)

    def _longest(self, system: System, x: Tensor) -> Tensor:
        lagrangian = system.layer_norm
        sigma = system.keep(lagrangian.sigma(x).unsqueeze(-1)).amax((1, 2))
        return RADIAL * lagrangian.gamma * lagrangian.eps / (2 * self.temperature * sigma)


def _normal(x: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(x.shape, generator=generator, dtype=x.dtype, device=x.device)
