"""A System: a Lagrangian, an interaction energy and a dynamics, with one set of verbs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_choice, check_positive, check_state
from etdyn.dynamics import DYNAMICS, Dynamics
from etdyn.energies import Attention, Energy, Hopfield
from etdyn.lagrangians import LayerNorm

__all__ = ["EnergyTransformer", "System"]


class System(nn.Module):
    """Tokens whose activations g descend an interaction energy.

    States x are `(batch, token, feature)` in the dtype and on the device of the parameters;
    time is dimensionless flow time. The verbs work on any batch of samples, and a sample's
    result does not depend on its neighbours.

    Args:
        lagrangian: turns x into g.
        interaction: the energy E(g); its terms become named parts of the system, so that
            parameters are called `attention.query`, `hopfield.memories`, ...
        dynamics: "et" (published), "leaky" or "sphere"; see `etdyn.dynamics`.
    """

    def __init__(self, lagrangian: LayerNorm, interaction: Energy, dynamics: str = "et") -> None:
        super().__init__()
        check_choice("dynamics", dynamics, tuple(DYNAMICS))
        self.lagrangian = lagrangian
        for name, term in interaction.terms().items():
            if hasattr(self, name):
                raise bad("interaction", "term names that System does not use", repr(name))
            self.add_module(name, term)
        # The terms are registered above; registering their sum too would name them twice.
        self.__dict__["interaction"] = interaction
        self.dynamics = dynamics
        self._tokens: Tensor | None = None
        self._keys: Tensor | None = None

    interaction: Energy

    @property
    def dim(self) -> int:
        """Features of a token."""
        return self.lagrangian.dim

    @property
    def _law(self) -> Dynamics:
        return DYNAMICS[self.dynamics]

    def _view(self) -> Self:
        view = copy.copy(self)
        view._modules = dict(self._modules)
        return view

    def with_dynamics(self, dynamics: str) -> Self:
        """This system under another dynamics, sharing parameters."""
        check_choice("dynamics", dynamics, tuple(DYNAMICS))
        view = self._view()
        view.dynamics = dynamics
        return view

    def masked(self, tokens: Tensor | None = None, keys: Tensor | None = None) -> Self:
        """This system with tokens or pairs of tokens taken out, sharing parameters.

        A second mask takes out more: tokens and pairs must pass both.

        Args:
            tokens: bool `(batch or 1, token)`, False where a token does not exist. Such a
                token stays where it is and contributes nothing.
            keys: bool `(batch or 1, query, key)`, True where the query may attend to the key.

        Raises:
            ValueError, TypeError: wrong shape, dtype, device, or a sample without any token.
        """
        for name, mask, ndim in (("tokens", tokens, 2), ("keys", keys, 3)):
            if mask is None:
                continue
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                raise TypeError(f"{name}: expected a bool tensor, got {_kind(mask)}")
            if mask.ndim != ndim:
                raise bad(name, f"{ndim} dimensions", f"shape {tuple(mask.shape)}")
            if mask.device != self.lagrangian.delta.device:
                raise bad(name, f"device {self.lagrangian.delta.device}", mask.device)
        if tokens is not None and not bool(tokens.any(1).all()):
            raise bad("tokens", "at least one token in every sample", "a sample without any")
        if tokens is not None and self._tokens is not None:
            tokens = tokens & self._tokens
        if keys is not None and self._keys is not None:
            keys = keys & self._keys
        return self._with_masks(
            self._tokens if tokens is None else tokens, self._keys if keys is None else keys
        )

    @property
    def masks(self) -> dict[str, int] | None:
        """How many tokens and pairs of tokens the masks take out; None without masks."""
        pairs = {"tokens": self._tokens, "keys": self._keys}
        taken = {name: int((~m).sum()) for name, m in pairs.items() if m is not None}
        return taken or None

    def _with_masks(self, tokens: Tensor | None, keys: Tensor | None) -> Self:
        view = self._view()
        interaction = self.interaction.masked(tokens, keys)
        view._modules.update(interaction.terms())
        view.__dict__["interaction"] = interaction
        view._tokens, view._keys = tokens, keys
        return view

    def select(self, rows: Tensor) -> Self:
        """This system as some samples of its batch see it, with their masks.

        rows: int64 indices or bool `(batch,)`.
        """
        masks = [m if m is None or len(m) == 1 else m[rows] for m in (self._tokens, self._keys)]
        if all(a is b for a, b in zip(masks, (self._tokens, self._keys), strict=True)):
            return self
        return self._with_masks(*masks)

    def keep(self, per_token: Tensor) -> Tensor:
        """`(batch, token[, feature])` with zeros for tokens that do not exist."""
        if self._tokens is None:
            return per_token
        mask = self._tokens if per_token.ndim == 2 else self._tokens.unsqueeze(-1)
        return per_token.masked_fill(~mask, 0.0)

    def _stand_in(self, x: Tensor) -> Tensor:
        """x with every absent token replaced by one that has a direction.

        Padding may be constant or zero, where a direction, or its gradient, is undefined.
        """
        if self._tokens is None:
            return x
        self.check(x)
        ramp = torch.linspace(-1, 1, self.dim, dtype=x.dtype, device=x.device)
        return torch.where(self._tokens.unsqueeze(-1), x, ramp)

    def __setattr__(self, name: str, value: Any) -> None:
        if "interaction" in self.__dict__ and name in self.interaction.terms():
            raise bad(name, "a part that stays; build a new System to change it", _kind(value))
        super().__setattr__(name, value)

    def check(self, x: Tensor, name: str = "x") -> None:
        """Raise unless x is a state of this system: shape, dtype, device, and its masks fit."""
        check_state(name, x, self.dim, self.lagrangian.delta)
        batch, n, _ = x.shape
        for mask in (self._tokens, self._keys):
            if mask is not None and (len(mask) not in (1, batch) or set(mask.shape[1:]) != {n}):
                raise bad(name, f"a state that fits the mask of shape {tuple(mask.shape)}",
                          f"shape {tuple(x.shape)}")  # fmt: skip

    def token_mean(self, per_token: Tensor) -> Tensor:
        """The mean of `(batch, token)` over the tokens that exist, `(batch,)`."""
        if self._tokens is None:
            return per_token.mean(1)
        return self.keep(per_token).sum(1) / self._tokens.sum(1)

    def prepare(self, x: Tensor) -> Tensor:
        """x as a start of this dynamics (sphere: mean 0, standard deviation 1).

        Absent tokens stay as they are.

        Raises:
            ValueError, TypeError: wrong shape, dtype or device; a constant token (sphere).
        """
        self.check(x)
        return self._prepare(x)

    def _prepare(self, x: Tensor) -> Tensor:
        ready = self._law.prepare(self.lagrangian, self._stand_in(x))
        return ready if self._tokens is None else torch.where(self._tokens.unsqueeze(-1), ready, x)

    def activation(self, x: Tensor) -> Tensor:
        """g(x), shape of x; without meaning where a token is absent."""
        self.check(x)
        return self._law.activation(self.lagrangian, self._stand_in(x))

    def force(self, x: Tensor) -> Tensor:
        """-grad_g E at g(x), shape of x. One evaluation."""
        return self.interaction.force(self.activation(x))

    def forces(self, x: Tensor) -> dict[str, Tensor]:
        """The force of every term, by name."""
        g = self.activation(x)
        return {name: term.force(g) for name, term in self.interaction.terms().items()}

    def velocity(self, t: Tensor | float, x: Tensor) -> Tensor:
        """dx/dt, shape of x; none of the dynamics depends on t."""
        x = self._stand_in(x)
        return self.keep(self._law.velocity(self.lagrangian, x, self.force(x)))

    def activation_velocity(self, x: Tensor) -> Tensor:
        """dg/dt along the flow, shape of x."""
        return self._law.activation_velocity(self.lagrangian, x, self.velocity(0.0, x))

    def interaction_energy(self, x: Tensor, relative: bool = False) -> Tensor:
        """E(g(x)), `(batch,)`, whatever the dynamics."""
        return self.interaction.energy(self.activation(x), relative)

    def energies(self, x: Tensor, relative: bool = False) -> dict[str, Tensor]:
        """The terms of the Lyapunov function by name, each `(batch,)`; they sum to `energy`.

        relative: subtract the constant that E has at zero weights (-99,916 at the size of the
        ImageNet model, ET-F6), without rounding it away.
        """
        g = self.activation(x)
        parts = {n: term.energy(g, relative) for n, term in self.interaction.terms().items()}
        neuron = self._law.neuron_energy(self.lagrangian, self._stand_in(x))
        if neuron is not None:
            parts["lagrangian"] = self.keep(neuron).sum(1)
        return parts

    def energy(self, x: Tensor) -> Tensor:
        """The Lyapunov function of this dynamics, `(batch,)`: E(g), or for "leaky" E + x.g - L."""
        return torch.stack(list(self.energies(x).values())).sum(0)

    def dissipation(self, x: Tensor) -> Tensor:
        """Exact -d(energy)/dt along the flow, `(batch,)`, never negative."""
        x = self._stand_in(x)
        force = self.force(x)
        if self._tokens is not None and self.dynamics == "leaky":
            # leaky motion leaves absent tokens alone: with this force their velocity is zero
            force = torch.where(self._tokens.unsqueeze(-1), force, x)
        return self._law.dissipation(self.lagrangian, x, force)

    def residual(self, x: Tensor) -> Tensor:
        """|P grad_g E|, `(batch,)`: Frobenius norm over tokens and features.

        P takes out the parts of the gradient that g cannot follow, so this vanishes exactly
        where g is at equilibrium (up to eps in the layer norm), and never because x grew.
        """
        x = self._stand_in(x)
        tangent = self.keep(self.lagrangian.tangent(x, self.force(x)))
        return tangent.square().sum((1, 2)).sqrt()

    def map(self, x: Tensor, damping: float = 1.0) -> Tensor:
        """(1 - damping) x + damping force(x); its fixed points are the equilibria.

        On the sphere both are normalised before they are mixed, and the result again; a token
        that no force turns stays.
        """
        x = self._prepare(x)
        here = self._stand_in(x)
        target = self._law.target(self.lagrangian, here, self.force(x))
        moved = self._law.prepare(self.lagrangian, torch.lerp(here, target, damping))
        return moved if self._tokens is None else torch.where(self._tokens.unsqueeze(-1), moved, x)

    def clock_rate(self, x: Tensor) -> Tensor:
        """dtau/dt of every token, `(batch, token)`: how fast the intrinsic clock runs."""
        self.check(x)
        return self._law.clock_rate(self.lagrangian, x)

    def elapsed_clock(self, x0: Tensor, x1: Tensor, dt: Tensor | float) -> Tensor:
        """Intrinsic time of a straight step from x0 to x1 in dt, exactly, `(batch, token)`.

        An Euler step is straight; a flow is nearly so between two close times.
        """
        self.check(x0, "x0")
        self.check(x1, "x1")
        return self._law.elapsed_clock(self.lagrangian, x0, x1, dt)


class EnergyTransformer(System):
    """The Energy Transformer block: layer norm, energy attention and a Hopfield network.

    Weights start at a standard deviation of 1/sqrt(dim), drawn from torch's global generator.

    Args:
        dim: features of a token.
        heads, head_dim: of the attention.
        memories: of the Hopfield network.
        dynamics: "et", "leaky" or "sphere".
        self_attention: whether a token attends to itself; the paper says no, the released
            weights were trained with yes.
        hopfield: "relu" (published), "power" or "softmax".
        power: exponent of hopfield="power".
        beta: of the attention; None is 1/sqrt(head_dim).
        hopfield_beta: of hopfield="softmax".
        eps: of the layer norm.

    Source: Hoover et al. 2023, arXiv 2302.07253; ET section 1.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        memories: int,
        dynamics: str = "et",
        *,
        self_attention: bool = False,
        hopfield: str = "relu",
        power: int = 3,
        beta: float | None = None,
        hopfield_beta: float = 1.0,
        eps: float = 1e-5,
    ) -> None:
        attention = Attention(dim, heads, head_dim, beta, self_attention)
        network = Hopfield(dim, memories, hopfield, power, hopfield_beta)
        super().__init__(LayerNorm(dim, eps), attention + network, dynamics)

    attention: Attention
    hopfield: Hopfield

    @property
    def config(self) -> dict[str, Any]:
        """The arguments that rebuild this system, as JSON can hold them."""
        heads, head_dim, dim = self.attention.query.shape
        return {
            "dim": dim,
            "heads": heads,
            "head_dim": head_dim,
            "memories": self.hopfield.memories.shape[0],
            "dynamics": self.dynamics,
            "self_attention": self.attention.self_attention,
            "hopfield": self.hopfield.kind,
            "power": self.hopfield.power,
            "beta": self.attention.beta,
            "hopfield_beta": self.hopfield.beta,
            "eps": self.lagrangian.eps,
        }

    @classmethod
    def from_official(
        cls,
        arrays: Mapping[str, Any],
        *,
        self_attention: bool = True,
        dynamics: str = "et",
        beta: float | None = None,
        eps: float = 1e-5,
    ) -> Self:
        """Build from arrays in the layout of the official implementation, in their dtype.

        Args:
            arrays: `Wq`, `Wk` (heads, head_dim, dim), `Xi` (dim, memories), `gamma` scalar
                > 0, `delta` (dim,); numpy arrays or tensors of one floating dtype.
            self_attention: True for the released weights.
            dynamics, beta, eps: as in the class.

        Raises:
            ValueError, TypeError: a missing array, a wrong shape or mixed dtypes, NaN,
                gamma <= 0.
        """
        tensors = {name: _official(arrays, name) for name in ("Wq", "Wk", "Xi", "gamma", "delta")}
        dtypes = {t.dtype for t in tensors.values()}
        if len(dtypes) != 1:
            raise TypeError(f"arrays: expected one floating dtype, got {sorted(map(str, dtypes))}")
        if tensors["Wq"].ndim != 3:
            raise bad("Wq", "shape (heads, head_dim, dim)", f"shape {tuple(tensors['Wq'].shape)}")
        heads, head_dim, dim = tensors["Wq"].shape
        memories = tensors["Xi"].shape[-1] if tensors["Xi"].ndim else 0
        for name, shape in {
            "Wk": (heads, head_dim, dim), "Xi": (dim, memories), "gamma": (), "delta": (dim,),
        }.items():  # fmt: skip
            if tuple(tensors[name].shape) != shape:
                raise bad(name, f"shape {shape}", f"shape {tuple(tensors[name].shape)}")
        check_positive("beta", 1.0 if beta is None else beta)
        system = cls(
            dim, heads, head_dim, memories, dynamics,
            self_attention=self_attention, beta=beta, eps=eps,
        ).to(dtypes.pop())  # fmt: skip
        with torch.no_grad():
            system.attention.query.copy_(tensors["Wq"])
            system.attention.key.copy_(tensors["Wk"])
            system.hopfield.memories.copy_(tensors["Xi"].T)
            system.lagrangian.delta.copy_(tensors["delta"])
            system.lagrangian.set_gamma(float(tensors["gamma"]))
        return system


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


def _official(arrays: Mapping[str, Any], name: str) -> Tensor:
    if name not in arrays:
        raise bad("arrays", f"an array {name!r}", f"only {sorted(arrays)}")
    value = arrays[name]
    tensor = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if not tensor.is_floating_point():
        raise TypeError(f"{name}: expected a floating dtype, got {tensor.dtype}")
    if not bool(torch.isfinite(tensor).all()):
        raise bad(name, "finite values", "NaN or infinity")
    return tensor
