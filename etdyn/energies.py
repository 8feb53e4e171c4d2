"""Interaction energies of the activations g, with their forces and Hessians in closed form.

Every energy is per sample, `(batch,)`; g, forces and directions are `(batch, token, feature)`.
Forces are -grad_g E. Source: Hoover et al. 2023, equations 2 to 5; ET sections 1.2 and 1.3.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from etdyn.checks import bad, check_choice, check_count, check_positive
from etdyn.interactions import Interaction

if TYPE_CHECKING:
    from etdyn.graphs import Graph

__all__ = ["Attention", "Energy", "EnergySum", "Hopfield"]


class Energy(Interaction):
    """An interaction energy E(g); `a + b` is an `EnergySum` that keeps both names."""

    name = "energy"

    @abstractmethod
    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """E `(batch,)` and -grad_g E `(batch, token, feature)` in one pass.

        relative: subtract the energy's value at zero weights, exactly (the mean instead of the
        sum inside each logarithm).
        """

    @abstractmethod
    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E at g times the direction u."""

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return self.energy_and_force(g, relative)[0]

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        return self.energy_and_force(g)[1]

    def terms(self) -> dict[str, Energy]:
        """The named energies that this one is the sum of."""
        return {self.name: self}

    def force_jvp(self, g: Tensor, u: Tensor) -> Tensor:
        """Minus the Hessian times u."""
        return -self.hvp(g, u)

    def __add__(self, other: Energy) -> EnergySum:
        mine, theirs = self.terms(), other.terms()
        twice = mine.keys() & theirs.keys()
        if twice:
            raise bad("energies", "terms with different names", f"{sorted(twice)} twice")
        return EnergySum(mine | theirs)


class EnergySum(Energy):
    """A sum of energies whose terms keep their names.

    Args:
        terms: name -> energy. The names become the names of the results' variables.
    """

    name = "sum"

    def __init__(self, terms: Mapping[str, Energy]) -> None:
        super().__init__()
        if not terms:
            raise bad("terms", "at least one energy", "none")
        self.parts = nn.ModuleDict(dict(terms))

    def terms(self) -> dict[str, Energy]:
        """The named terms."""
        return dict(self.parts.items())  # type: ignore[arg-type]  # a ModuleDict forgets its type

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """The sums over the terms; see `Energy`."""
        pairs = [term.energy_and_force(g, relative) for term in self.terms().values()]
        return _total([e for e, _ in pairs]), _total([f for _, f in pairs])

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return _total([term.energy(g, relative) for term in self.terms().values()])

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        return _total([term.force(g) for term in self.terms().values()])

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E at g times u."""
        return _total([term.hvp(g, u) for term in self.terms().values()])

    def curvature_bound(self, tokens: int) -> float:
        """The sum of the terms' bounds."""
        return sum(term.curvature_bound(tokens) for term in self.terms().values())

    def _set_masks(self, tokens: Tensor | None, keys: Tensor | None) -> None:
        masked = {name: term.masked(tokens, keys) for name, term in self.terms().items()}
        self._modules = {"parts": nn.ModuleDict(masked)}

    def on(self, graph: Graph, weights: Tensor | None = None) -> Self:
        """The sum of the terms over the edges of a graph."""
        return self._each({n: term.on(graph, weights) for n, term in self.terms().items()})

    def select(self, rows: Tensor) -> Self:
        """The sum of the terms as some samples of the batch feel it."""
        return self._each({n: term.select(rows) for n, term in self.terms().items()})

    def _each(self, terms: dict[str, Energy]) -> Self:
        """Made of these terms; the sum itself where they are its own."""
        if all(term is self.terms()[name] for name, term in terms.items()):
            return self
        view = copy.copy(self)
        view._modules = {"parts": nn.ModuleDict(terms)}
        return view


class Attention(Energy):
    """Energy attention: each token seeks to align with a few others, as query and as key.

        E = -(1/beta) sum_h sum_c log sum_{b != c} exp(beta <K_hb, Q_hc>)
        K_hb = key_h g_b,  Q_hc = query_h g_c

    A query without any key contributes zero. Smooth.

    Args:
        dim, heads, head_dim: sizes; `query` and `key` are `(heads, head_dim, dim)`.
        beta: inverse temperature > 0, shared by the heads; None is 1 / sqrt(head_dim).
        self_attention: whether a token may attend to itself (b = c); the paper excludes it,
            the released image model includes it (ET section 1.2).
    """

    name = "attention"

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        beta: float | None = None,
        self_attention: bool = False,
    ) -> None:
        super().__init__()
        for label, count in (("dim", dim), ("heads", heads), ("head_dim", head_dim)):
            check_count(label, count)
        if beta is not None:
            check_positive("beta", beta)
        self.beta = 1 / math.sqrt(head_dim) if beta is None else float(beta)
        self.self_attention = bool(self_attention)
        self.query = nn.Parameter(torch.empty(heads, head_dim, dim).normal_(std=dim**-0.5))
        self.key = nn.Parameter(torch.empty(heads, head_dim, dim).normal_(std=dim**-0.5))

    def curvature_bound(self, tokens: int) -> float:
        """2 sum_h |key_h^T query_h|_2 sqrt(c), c = tokens - 1, or tokens with self-attention.

        Source: ET-F21.
        """
        # |K^T Q|_2 from the small triangular factors of K^T and Q^T
        key, query = (torch.linalg.qr(w.detach().mT, mode="r").R for w in (self.key, self.query))
        norms = torch.linalg.matrix_norm(key @ query.mT, 2)
        return 2 * float(norms.sum()) * math.sqrt(tokens - (not self.self_attention))

    def _allowed(self, n: int) -> Tensor | None:
        """Which key (last axis) each query may see, `(batch or 1, 1, query, key)`; None: all."""
        allowed = None
        if not self.self_attention:
            allowed = ~torch.eye(n, dtype=torch.bool, device=self.query.device)
        if self._keys is not None:
            allowed = self._keys if allowed is None else allowed & self._keys
        if self._tokens is not None:
            pairs = self._tokens[:, :, None] & self._tokens[:, None, :]
            allowed = pairs if allowed is None else allowed & pairs
        if allowed is None:
            return None
        return allowed.reshape(-1, 1, *allowed.shape[-2:])

    def _heads(self, g: Tensor, weight: Tensor) -> Tensor:
        """Project g on every head, `(batch, head, token, head_dim)`."""
        heads, width, _ = weight.shape
        flat = g @ weight.flatten(0, 1).T
        return flat.reshape(*g.shape[:2], heads, width).transpose(1, 2)

    def _merge(self, per_head: Tensor, weight: Tensor) -> Tensor:
        """The adjoint of `_heads`."""
        return per_head.transpose(1, 2).flatten(2) @ weight.flatten(0, 1)

    def _scores(self, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys, queries, beta A (head, query, key) with forbidden pairs at the dtype's minimum,
        the allowed pairs, and which queries see a key (None: every one does).
        """
        keys, queries = self._heads(g, self.key), self._heads(g, self.query)
        logits = self.beta * (queries @ keys.transpose(-1, -2))
        allowed = self._allowed(g.shape[1])
        if allowed is None:
            return keys, queries, logits, None, None
        logits = logits.masked_fill(~allowed, torch.finfo(logits.dtype).min)
        plain = self._keys is None and self._tokens is None and g.shape[1] > 1
        return keys, queries, logits, allowed, None if plain else allowed.any(-1, keepdim=True)

    @staticmethod
    def _softmax(logits: Tensor, rows: Tensor | None) -> Tensor:
        weights = logits.softmax(-1)
        return weights if rows is None else weights * rows

    def _energy(
        self, logits: Tensor, allowed: Tensor | None, rows: Tensor | None, relative: bool
    ) -> Tensor:
        if relative:
            # log of the mean: exact for small scores, where the constant would drown them
            top = logits.amax(-1, keepdim=True).detach()
            excess = torch.expm1(logits - top)
            if allowed is None:
                mean = excess.mean(-1, keepdim=True)
            else:
                count = allowed.sum(-1, keepdim=True).clamp(min=1)
                mean = (excess * allowed).sum(-1, keepdim=True) / count
            lse = top + torch.log1p(mean)
        else:
            lse = logits.logsumexp(-1, keepdim=True)
        if rows is not None:
            lse = torch.where(rows, lse, torch.zeros_like(lse))
        return -lse.sum((1, 2, 3)) / self.beta

    def _force(self, keys: Tensor, queries: Tensor, weights: Tensor) -> Tensor:
        as_query = self._merge(weights @ keys, self.query)
        as_key = self._merge(weights.transpose(-1, -2) @ queries, self.key)
        return as_query + as_key

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """See `Energy`. With P = softmax_b(beta A): force_c = query^T (P K) + key^T (P^T Q)."""
        keys, queries, logits, allowed, rows = self._scores(g)
        force = self._force(keys, queries, self._softmax(logits, rows))
        return self._energy(logits, allowed, rows, relative), force

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        _, _, logits, allowed, rows = self._scores(g)
        return self._energy(logits, allowed, rows, relative)

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        keys, queries, logits, _, rows = self._scores(g)
        return self._force(keys, queries, self._softmax(logits, rows))

    def head_forces(self, g: Tensor) -> Tensor:
        """The force of every head, on tokens as queries and as keys; they sum to the force.

        Returns:
            `(head, 2, batch, token, feature)`.
        """
        keys, queries, logits, _, rows = self._scores(g)
        weights = self._softmax(logits, rows)
        as_query = torch.einsum("bhty,hyd->hbtd", weights @ keys, self.query)
        as_key = torch.einsum("bhty,hyd->hbtd", weights.mT @ queries, self.key)
        return torch.stack([as_query, as_key], 1)

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E times u (ET-F10), with dP = beta P (dA - sum_b P dA)."""
        keys, queries, logits, _, rows = self._scores(g)
        weights = self._softmax(logits, rows)
        d_keys, d_queries = self._heads(u, self.key), self._heads(u, self.query)
        d_scores = d_queries @ keys.transpose(-1, -2) + queries @ d_keys.transpose(-1, -2)
        mean = (weights * d_scores).sum(-1, keepdim=True)
        d_weights = self.beta * weights * (d_scores - mean)
        as_query = self._merge(d_weights @ keys + weights @ d_keys, self.query)
        d_weights, weights = d_weights.transpose(-1, -2), weights.transpose(-1, -2)
        as_key = self._merge(d_weights @ queries + weights @ d_queries, self.key)
        return -(as_query + as_key)

    def extra_repr(self) -> str:
        """What `print` shows."""
        heads, width, dim = self.query.shape
        return (
            f"dim={dim}, heads={heads}, head_dim={width}, beta={self.beta:.6g}, "
            f"self_attention={self.self_attention}"
        )


class Hopfield(Energy):
    """Dense associative memory: every token is drawn to the memories that it resembles.

        h = g memories^T
        relu      E = -1/2 sum relu(h)^2                     kinks: the Hessian jumps at h = 0
        power     E = -1/n sum relu(h)^n                     smooth to order n - 1
        softmax   E = -1/beta sum_token log sum_mu exp(beta h)        smooth

    All are concave in g.

    Args:
        dim, memories: sizes; the parameter `memories` is `(memories, dim)`.
        kind: "relu", "power" or "softmax".
        power: n, an integer of at least 2, used by "power".
        beta: inverse temperature > 0, used by "softmax".
    """

    name = "hopfield"
    KINDS = ("relu", "power", "softmax")

    def __init__(
        self, dim: int, memories: int, kind: str = "relu", power: int = 3, beta: float = 1.0
    ) -> None:
        super().__init__()
        check_count("dim", dim)
        check_count("memories", memories)
        check_choice("hopfield", kind, self.KINDS)
        check_count("power", power, least=2)
        check_positive("hopfield_beta", beta)
        self.kind, self.power, self.beta = kind, power, float(beta)
        self.memories = nn.Parameter(torch.empty(memories, dim).normal_(std=dim**-0.5))

    def curvature_bound(self, tokens: int) -> float:
        """Zero: memories are concave."""
        return 0.0

    def _overlaps(self, g: Tensor) -> Tensor:
        return g @ self.memories.T

    def _energy(self, h: Tensor, relative: bool) -> Tensor:
        if self.kind == "softmax":
            scaled = self.beta * h
            top = scaled.amax(-1, keepdim=True).detach()
            if relative:
                per_token = top[..., 0] + torch.log1p(torch.expm1(scaled - top).mean(-1))
            else:
                per_token = scaled.logsumexp(-1)
            return self.keep(-per_token / self.beta).sum(1)
        n = 2 if self.kind == "relu" else self.power
        return self.keep(-h.relu().pow(n).sum(-1) / n).sum(1)

    def _response(self, h: Tensor) -> Tensor:
        if self.kind == "softmax":
            return (self.beta * h).softmax(-1)
        return h.relu() if self.kind == "relu" else h.relu().pow(self.power - 1)

    def response(self, g: Tensor) -> Tensor:
        """r(h): how strongly each memory pulls, `(batch, token, memory)`; force = r memories."""
        return self.keep(self._response(self._overlaps(g)))

    def _force(self, h: Tensor) -> Tensor:
        return self.keep(self._response(h) @ self.memories)

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """See `Energy`. The force is r(h) memories with r the derivative of the nonlinearity."""
        h = self._overlaps(g)
        return self._energy(h, relative), self._force(h)

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return self._energy(self._overlaps(g), relative)

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        return self._force(self._overlaps(g))

    def hvp(self, g: Tensor, u: Tensor) -> Tensor:
        """The Hessian of E times u; for relu the one-sided one, zero at h = 0."""
        h, du = self._overlaps(g), self._overlaps(u)
        if self.kind == "softmax":
            weights = (self.beta * h).softmax(-1)
            curved = self.beta * weights * (du - (weights * du).sum(-1, keepdim=True))
        elif self.kind == "relu":
            curved = du * (h > 0)
        else:
            curved = (self.power - 1) * h.relu().pow(self.power - 2) * du * (h > 0)
        return self.keep(-(curved @ self.memories))

    def extra_repr(self) -> str:
        """What `print` shows."""
        count, dim = self.memories.shape
        return f"dim={dim}, memories={count}, kind={self.kind!r}"


def _total(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total
