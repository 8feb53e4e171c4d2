"""The block against the official JAX implementation, number by number, in float64."""

import numpy as np
import pytest
import torch

from etdyn import EnergyTransformer, descend

FILES = ("et_block_small", "et_block_sharp")


@pytest.fixture(params=FILES)
def block(request, golden):
    return golden(request.param)


def build(arrays, dynamics="et"):
    return EnergyTransformer.from_official(
        arrays,
        self_attention=True,
        dynamics=dynamics,
        beta=float(arrays["beta"]),
        eps=float(arrays["eps"]),
    )


def one(array):
    """A batch of one sample."""
    return torch.from_numpy(array).unsqueeze(0)


def test_activation_equals_reference(block, close):
    close(build(block).activation(one(block["x0"]))[0], block["g0"])


def test_lagrangian_and_legendre_energy_equal_reference(block, close):
    lagrangian, x = build(block).lagrangian, one(block["x0"])
    close(lagrangian.value(x)[0, 0], block["lagrangian0_token0"])
    # the reference subtracts two numbers of the Lagrangian's size
    close(lagrangian.legendre(x)[0, 0], block["ln_energy0_token0"], 1e-15,
          scale=block["lagrangian0_token0"])  # fmt: skip


def test_energies_equal_reference(block, close):
    system, x = build(block), torch.from_numpy(block["x"])
    terms = system.energies(x)
    assert list(terms) == ["attention", "hopfield"]
    close(terms["attention"], block["energy_attention"])
    close(terms["hopfield"], block["energy_hopfield"])
    close(system.energy(x), block["energy"])


def test_gradients_equal_reference(block, close):
    system, x = build(block), torch.from_numpy(block["x"][:-1])
    forces = system.forces(x)
    close(-forces["attention"], block["grad_attention"])
    close(-forces["hopfield"], block["grad_hopfield"])
    close(-system.force(x), block["grad"])


def test_descent_equals_reference(block, close):
    steps = len(block["x"]) - 1
    solution = descend(build(block), one(block["x0"]), float(block["alpha"]), steps)
    close(solution.x[:, 0], block["x"])
    close(solution.t, float(block["alpha"]) * np.arange(steps + 1))


def test_map_reaches_the_quoted_equilibrium(golden):
    """Residual and energy along the self-consistency map, as golden/README.md measured them."""
    arrays = golden("et_block_small")
    system = build(arrays, "leaky")
    quoted = {50: (-1449.91, 5e-3, 2.0), 100: (-1462.5890193, 5e-8, 6e-4),
              200: (-1462.5890195, 5e-8, 1e-10), 300: (-1462.5890195, 5e-8, 3e-14)}  # fmt: skip
    x = one(arrays["x0"])
    with torch.no_grad():
        for k in range(1, 301):
            x = system.map(x)
            if k in quoted:
                energy, last_digit, residual = quoted[k]
                assert abs(float(system.interaction_energy(x)) - energy) <= last_digit, k
                assert float(system.residual(x)) <= 1.5 * residual, k


def test_map_on_the_sphere_reaches_the_quoted_equilibrium(golden):
    """Without eps the energy differs in the seventh digit, as golden/README.md says."""
    arrays = golden("et_block_small")
    system = build(arrays, "sphere")
    with torch.no_grad():
        x = system.prepare(one(arrays["x0"]))
        for _ in range(300):
            x = system.map(x)
        assert abs(float(system.interaction_energy(x)) + 1462.589318) <= 5e-7
        assert float(system.residual(x)) <= 1e-12
