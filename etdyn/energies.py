"""The energies of the Energy Transformer, with their forces and Hessians in closed form.

Every energy is per sample, `(batch,)`; g, forces and directions are `(batch, token, feature)`.
Forces are -grad_g E. Source: Hoover et al. 2023, equations 2 to 5; ET sections 1.2 and 1.3.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from etdyn.checks import check_choice, check_count, check_positive
from etdyn.interactions import Energy

__all__ = ["Attention", "Hopfield", "per_sample", "score_norms"]


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

    @torch.no_grad()
    def curvature_bound(self, tokens: int) -> float | Tensor:
        """2 sum_h |S_h|_2 sqrt(c), S_h = key_h^T query_h, c the most queries that see one key.

        Source: ET-F21.
        """
        norms = score_norms(self.key, self.query)
        return per_sample(2 * norms.sum() * self._seen(tokens).sqrt())

    @torch.no_grad()
    def hessian_bound(self, tokens: int, centre: float, radius: float) -> float | Tensor:
        """sum_h 2 |S_h| sqrt(c) + 2 beta |S_h|^2 (c G^2 + radius^2), G = centre + radius.

        S_h and c are those of `curvature_bound`. Source: ET-F21; `GraphAttention` has the proof.
        """
        norms, seen = score_norms(self.key, self.query), self._seen(tokens)
        curved = seen * (centre + radius) ** 2 + seen.clamp(max=1) * radius**2
        crossed = norms.sum() * seen.sqrt()
        return per_sample(2 * crossed + 2 * self.beta * norms.square().sum() * curved)

    def _seen(self, n: int) -> Tensor:
        """The most queries that see one key, `(batch or 1,)`."""
        allowed = self._allowed(n)
        if allowed is None:
            return self.query.new_full((1,), n)
        return allowed.sum(-2).amax((1, 2)).to(self.query)

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

    def _local_energies(
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
        return -lse.squeeze(-1) / self.beta

    def _force(self, keys: Tensor, queries: Tensor, weights: Tensor) -> Tensor:
        as_query = self._merge(weights @ keys, self.query)
        as_key = self._merge(weights.transpose(-1, -2) @ queries, self.key)
        return as_query + as_key

    def energy_and_force(self, g: Tensor, relative: bool = False) -> tuple[Tensor, Tensor]:
        """See `Energy`. With P = softmax_b(beta A): force_c = query^T (P K) + key^T (P^T Q)."""
        keys, queries, logits, allowed, rows = self._scores(g)
        force = self._force(keys, queries, self._softmax(logits, rows))
        return self._local_energies(logits, allowed, rows, relative).sum((1, 2)), force

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return self.local_energies(g, relative).sum((1, 2))

    def local_energies(self, g: Tensor, relative: bool = False) -> Tensor:
        """The energy of every head and query, `(batch, head, query)`."""
        _, _, logits, allowed, rows = self._scores(g)
        return self._local_energies(logits, allowed, rows, relative)

    def force(self, g: Tensor) -> Tensor:
        """-grad_g E at g."""
        keys, queries, logits, _, rows = self._scores(g)
        return self._force(keys, queries, self._softmax(logits, rows))

    def head_forces(self, g: Tensor) -> Tensor:
        """See `Interaction`."""
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

    @torch.no_grad()
    def hessian_bound(self, tokens: int, centre: float, radius: float) -> float:
        """relu |Xi|^2, power (n - 1) (max |xi| G)^(n - 2) |Xi|^2, softmax beta |Xi|^2.

        With G = centre + radius: |relu(h)| <= max |xi| G, and diag(p) - p p^T <= 1. ET-F21.
        """
        size = float(torch.linalg.matrix_norm(self.memories, 2)) ** 2
        if self.kind == "softmax":
            return self.beta * size
        longest = float(torch.linalg.vector_norm(self.memories, dim=1).max())
        n = 2 if self.kind == "relu" else self.power
        return (n - 1) * (longest * (centre + radius)) ** (n - 2) * size

    def _overlaps(self, g: Tensor) -> Tensor:
        return g @ self.memories.T

    def _local_energies(self, h: Tensor, relative: bool) -> Tensor:
        if self.kind == "softmax":
            scaled = self.beta * h
            top = scaled.amax(-1, keepdim=True).detach()
            if relative:
                per_token = top[..., 0] + torch.log1p(torch.expm1(scaled - top).mean(-1))
            else:
                per_token = scaled.logsumexp(-1)
            return self.keep(-per_token / self.beta)
        n = 2 if self.kind == "relu" else self.power
        return self.keep(-h.relu().pow(n).sum(-1) / n)

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
        return self._local_energies(h, relative).sum(1), self._force(h)

    def energy(self, g: Tensor, relative: bool = False) -> Tensor:
        """E(g), `(batch,)`."""
        return self.local_energies(g, relative).sum(1)

    def local_energies(self, g: Tensor, relative: bool = False) -> Tensor:
        """The energy of every token, `(batch, token)`."""
        return self._local_energies(self._overlaps(g), relative)

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


def score_norms(key: Tensor, query: Tensor) -> Tensor:
    """|key_h^T query_h|_2 of every head, `(head,)`."""
    # from the small triangular factors of key^T and query^T
    key, query = (torch.linalg.qr(w.mT, mode="r").R for w in (key, query))
    norms: Tensor = torch.linalg.matrix_norm(key @ query.mT, 2)
    return norms


def per_sample(bound: Tensor) -> float | Tensor:
    """`(batch,)`, or the number that one sample has."""
    return float(bound) if len(bound) == 1 else bound
