"""A System: a Lagrangian, an interaction and a dynamics, with one set of verbs."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_choice, check_state
from etdyn.dynamics import DYNAMICS, Dynamics
from etdyn.interactions import Energy, Interaction, take
from etdyn.lagrangians import Lagrangian, LayerNorm

if TYPE_CHECKING:
    from etdyn.graphs import Graph

__all__ = ["System"]


class System(nn.Module):
    """Tokens that move under a force of their activations g, most often down an energy E(g).

    States x are `(batch, token, feature)` in the dtype and on the device of the parameters;
    time is dimensionless flow time. The verbs work on any batch of samples, and a sample's
    result does not depend on its neighbours.

    Args:
        lagrangian: turns x into g.
        interaction: an energy E(g), or a coupling, which has none; its terms become named parts
            of the system, so that parameters are called `attention.query`, ...
        dynamics: "et" (published), "leaky", or with LayerNorm "sphere"; see `etdyn.dynamics`.

    Raises:
        ValueError: an unknown dynamics, or one that the Lagrangian does not allow.
    """

    def __init__(
        self, lagrangian: Lagrangian, interaction: Interaction, dynamics: str = "et"
    ) -> None:
        super().__init__()
        _check_dynamics(dynamics, lagrangian)
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

    interaction: Interaction

    @property
    def dim(self) -> int:
        """Features of a token."""
        return self.lagrangian.dim

    @property
    def has_energy(self) -> bool:
        """Whether the force comes from an energy; without, `energy` and `dissipation` raise."""
        return isinstance(self.interaction, Energy)

    @property
    def potential(self) -> Energy:
        """The interaction, which must be an energy: `TypeError` where it is none."""
        if not isinstance(self.interaction, Energy):
            raise TypeError("system: expected an interaction that has an energy, got "
                            f"{type(self.interaction).__name__}")  # fmt: skip
        return self.interaction

    @property
    def layer_norm(self) -> LayerNorm:
        """The Lagrangian, which must be a LayerNorm: `TypeError` where it is none."""
        if not isinstance(self.lagrangian, LayerNorm):
            raise TypeError("system: expected a LayerNorm as its Lagrangian, got "
                            f"{type(self.lagrangian).__name__}")  # fmt: skip
        return self.lagrangian

    @property
    def _law(self) -> Dynamics[Any]:
        return DYNAMICS[self.dynamics]

    def _view(self) -> Self:
        view = copy.copy(self)
        view._modules = dict(self._modules)
        return view

    def with_dynamics(self, dynamics: str) -> Self:
        """This system under another dynamics, sharing parameters."""
        _check_dynamics(dynamics, self.lagrangian)
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
            if mask.device != self.lagrangian.like.device:
                raise bad(name, f"device {self.lagrangian.like.device}", mask.device)
        tokens, keys = _both("tokens", self._tokens, tokens), _both("keys", self._keys, keys)
        if tokens is not None and not bool(tokens.any(1).all()):
            raise bad("tokens", "at least one token in every sample", "a sample without any")
        return self._with(self.interaction.masked(tokens, keys), tokens, keys)

    def on(self, graph: Graph, weights: Tensor | None = None) -> Self:
        """This system with its attention over the edges of a graph, sharing parameters.

        Args:
            graph: one graph, for any batch of states on it, or a batch of graphs, whose padding
                is masked.
            weights: `(edge, heads)`, see `GraphAttention.on`; None is one.

        Raises:
            ValueError, TypeError: wrong weights or device; a system with masks, which come after
                the graph; no term that runs on graphs.
        """
        if self.masks is not None:
            raise bad("system", "one without masks, which come after the graph", self.masks)
        interaction = self.interaction.on(graph, weights)
        if interaction is self.interaction:
            names = ", ".join(type(term).__name__ for term in interaction.terms().values())
            raise TypeError(f"system: expected a GraphAttention among its terms, got {names}")
        tokens = graph.tokens
        return self._with(interaction.masked(tokens), tokens, None)

    @property
    def masks(self) -> dict[str, int] | None:
        """How many tokens and pairs of tokens the masks take out; None without masks."""
        pairs = {"tokens": self._tokens, "keys": self._keys}
        taken = {name: int((~m).sum()) for name, m in pairs.items() if m is not None}
        return taken or None

    def _with(self, interaction: Interaction, tokens: Tensor | None, keys: Tensor | None) -> Self:
        view = self._view()
        view._modules.update(interaction.terms())
        view.__dict__["interaction"] = interaction
        view._tokens, view._keys = tokens, keys
        return view

    def select(self, rows: Tensor) -> Self:
        """This system as some samples of its batch see it, with their masks.

        rows: int64 indices or bool `(batch,)`.
        """
        if not isinstance(rows, Tensor) or rows.dtype not in (torch.bool, torch.int64):
            raise TypeError(f"rows: expected a tensor of int64 or bool, got {_kind(rows)}")
        interaction = self.interaction.select(rows)
        tokens, keys = take(self._tokens, rows), take(self._keys, rows)
        if interaction is self.interaction and tokens is self._tokens and keys is self._keys:
            return self
        return self._with(interaction, tokens, keys)

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
        check_state(name, x, self.dim, self.lagrangian.like)
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
        return self.potential.energy(self.activation(x), relative)

    def energies(self, x: Tensor, relative: bool = False) -> dict[str, Tensor]:
        """The terms of the Lyapunov function by name, each `(batch,)`; they sum to `energy`.

        relative: subtract the constant that E has at zero weights (-99,916 at the size of the
        ImageNet model, ET-F6), without rounding it away.
        """
        g = self.activation(x)
        parts = {n: term.energy(g, relative) for n, term in self.potential.terms().items()}
        neuron = self._law.neuron_energy(self.lagrangian, self._stand_in(x))
        if neuron is not None:
            parts["lagrangian"] = self.keep(neuron).sum(1)
        return parts

    def energy(self, x: Tensor) -> Tensor:
        """The Lyapunov function of this dynamics, `(batch,)`: E(g), or for "leaky" E + x.g - L."""
        return torch.stack(list(self.energies(x).values())).sum(0)

    def dissipation(self, x: Tensor) -> Tensor:
        """Exact -d(energy)/dt along the flow, `(batch,)`, never negative."""
        _ = self.potential  # a coupling dissipates nothing that is defined
        x = self._stand_in(x)
        force = self.force(x)
        if self._tokens is not None and self.dynamics == "leaky":
            # leaky motion leaves absent tokens alone: with this force their velocity is zero
            force = torch.where(self._tokens.unsqueeze(-1), force, x)
        return self._law.dissipation(self.lagrangian, x, force)

    def residual(self, x: Tensor) -> Tensor:
        """|P grad_g E|, `(batch,)`: Frobenius norm over tokens and features.

        P takes out the parts of the gradient that g cannot follow, so this vanishes exactly
        where g is at equilibrium (up to eps in the layer norm), and never because x grew. With
        another Lagrangian than LayerNorm nothing is taken out, and it is |force - x| for "leaky".
        """
        x = self._stand_in(x)
        left = self.keep(self._law.imbalance(self.lagrangian, x, self.force(x)))
        return left.square().sum((1, 2)).sqrt()

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


def _check_dynamics(dynamics: str, lagrangian: Lagrangian) -> None:
    check_choice("dynamics", dynamics, tuple(DYNAMICS))
    if dynamics == "sphere" and not isinstance(lagrangian, LayerNorm):
        raise bad("dynamics", "one without spheres, \"et\" or \"leaky\", with "
                  f"{type(lagrangian).__name__}", repr(dynamics))  # fmt: skip


def _both(name: str, first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """Where both masks are True; None is a mask that is True everywhere."""
    if first is None or second is None:
        return second if first is None else first
    if first.shape[1:] != second.shape[1:] or (
        len(first) != len(second) and 1 not in (len(first), len(second))
    ):
        raise bad(
            name,
            f"shape {tuple(first.shape)}, as the mask before, or one sample",
            f"shape {tuple(second.shape)}",
        )
    return first & second


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
