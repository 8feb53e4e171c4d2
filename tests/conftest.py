"""What the tests share. Test files cannot import each other, so helpers are fixtures."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from torch import Tensor

from etdyn import EnergyTransformer

GOLDEN = Path(
    os.environ.get("ETDYN_GOLDEN", Path(__file__).resolve().parents[1] / "../shared/golden")
)

torch.set_num_threads(1)  # the tests' matrices are small, and cores may be shared

# derandomize: the same draws in every run, so that CI goes red for a change and not by chance;
# HYPOTHESIS_PROFILE=explore looks elsewhere, and more.
COMMON: dict[str, Any] = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.too_slow],
    "phases": (Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink),  # explaining is slow
}
settings.register_profile("etdyn", max_examples=25, derandomize=True, database=None, **COMMON)
settings.register_profile("explore", max_examples=200, **COMMON)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "etdyn"))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, np.ndarray]]:
    """Read one reference file by name; skips where the folder is absent."""

    def read(name: str) -> dict[str, np.ndarray]:
        path = GOLDEN / f"{name}.npz"
        if not path.exists():
            pytest.skip(f"golden array {path} absent; set ETDYN_GOLDEN")
        with np.load(path) as file:
            return {key: file[key] for key in file.files}

    return read


@pytest.fixture(scope="session")
def golden_path() -> Path:
    if not GOLDEN.exists():
        pytest.skip(f"golden folder {GOLDEN} absent; set ETDYN_GOLDEN")
    return GOLDEN


@pytest.fixture(scope="session")
def close() -> Callable[..., None]:
    """Assert |a - b| <= rel * max(max|b|, scale), where scale is the size of what cancelled."""

    def check(a: Any, b: Any, rel: float = 1e-12, scale: Any = 0.0) -> None:
        a, b, scale = (torch.as_tensor(v, dtype=torch.float64).detach() for v in (a, b, scale))
        assert a.shape == b.shape, f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        assert torch.isfinite(a).all() and torch.isfinite(b).all(), "NaN or infinity"
        size = max(float(b.abs().max()), float(scale.abs().max()))
        worst = float((a - b).abs().max())
        assert worst <= rel * size, f"off by {worst:.3g} where the size is {size:.3g}"

    return check


@dataclass
class Case:
    """A random system in float64 with states for it, and a source of more numbers."""

    system: EnergyTransformer
    x: Tensor
    rng: torch.Generator

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.rng, dtype=torch.float64)

    def mask(self, *shape: int, share: float = 0.6) -> Tensor:
        """Booleans, True with this probability."""
        return torch.rand(*shape, generator=self.rng, dtype=torch.float64) < share

    def token_mask(self) -> Tensor:
        """`(batch, token)` with at least one token in every sample."""
        batch, tokens, _ = self.x.shape
        mask = self.mask(batch, tokens)
        mask[:, torch.randint(tokens, (1,), generator=self.rng)] = True
        return mask


SIZES = {
    "dim": st.integers(3, 9),
    "heads": st.integers(1, 3),
    "head_dim": st.integers(1, 6),
    "memories": st.integers(2, 12),
    "batch": st.integers(1, 3),
    "tokens": st.integers(1, 6),
    "self_attention": st.booleans(),
    "hopfield": st.sampled_from(["relu", "power", "softmax"]),
    "power": st.sampled_from([2, 3, 5]),
    "beta": st.sampled_from([None, 0.05, 1.0, 3.0]),
    "hopfield_beta": st.sampled_from([0.1, 1.0]),
    "gamma": st.sampled_from([0.3, 1.0, 2.0]),
    "eps": st.sampled_from([1e-5, 1e-2, 1.0]),
    "weights": st.sampled_from([0.1, 0.5, 1.0]),  # times 1/sqrt(dim): std of all weights
    "spread": st.sampled_from([0.1, 1.0, 30.0]),  # std of the states
    "seed": st.integers(0, 2**31),
}
# What a system is without `data`: a plain one of moderate size, attention and memories balanced.
PLAIN: dict[str, Any] = {
    "dim": 8, "heads": 2, "head_dim": 4, "memories": 12, "batch": 2, "tokens": 5,
    "self_attention": False, "hopfield": "relu", "power": 3, "beta": None, "hopfield_beta": 1.0,
    "gamma": 1.0, "eps": 1e-5, "weights": 1.0, "spread": 1.0, "seed": 0,
}  # fmt: skip


@pytest.fixture(scope="session")
def make_case() -> Callable[..., Case]:
    """`make_case(**sizes)` builds a plain case; `make_case(data, **sizes)` draws what is left.

    `data` is hypothesis' `st.data()`; `sizes` are the names in SIZES, and `dynamics`.
    """

    def make(data: Any = None, dynamics: str = "et", **sizes: Any) -> Case:
        chosen = {
            name: sizes[name]
            if name in sizes
            else PLAIN[name]
            if data is None
            else data.draw(strategy, label=name)
            for name, strategy in SIZES.items()
        }
        assert not sizes.keys() - SIZES.keys(), "unknown size"
        own = ("batch", "tokens", "gamma", "weights", "spread", "seed")
        batch, tokens, gamma, weights, spread, seed = (chosen.pop(name) for name in own)
        system = EnergyTransformer(dynamics=dynamics, **chosen).double().requires_grad_(False)
        case = Case(system, torch.empty(0), torch.Generator().manual_seed(seed))
        dim = system.dim
        with torch.no_grad():
            for parameter in (
                system.attention.query, system.attention.key, system.hopfield.memories,
            ):  # fmt: skip
                parameter.copy_(weights * dim**-0.5 * case.randn(*parameter.shape))
            system.lagrangian.delta.copy_(0.3 * case.randn(dim))
            system.lagrangian.set_gamma(gamma)
        case.x = spread * case.randn(batch, tokens, dim)
        return case

    return make
