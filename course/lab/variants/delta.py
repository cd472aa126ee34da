"""Gated delta rule (Yang et al. 2024, arXiv 2412.06464): a matrix S (D, D) a head, no cache.

    S_t = exp(g_t) S_(t-1) + k_t u_t^T      u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t)
    o_t = S_t^T q_t                         S^T k is what the memory returns for a key

In a chunk let G_i be the sum of g up to token i. From the S before it, U solves (I + A) U = beta (V
- exp(G) K S), where A_ij = beta_i exp(G_i - G_j) k_i . k_j for j < i.
"""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.lab.variant import Variant
from model import GPTConfig, Norm

CHUNK = 32
KERNEL = 4  # tokens that the convolution sees


def recurrent(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """q, k, v (B, H, T, D), g and beta (B, H, T) -> (B, H, T, D), token by token."""
    S, out = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for t in range(q.shape[2]):
        S = g[:, :, t, None, None].exp() * S
        u = beta[:, :, t, None] * (v[:, :, t] - torch.einsum("bhde,bhd->bhe", S, k[:, :, t]))
        S = S + k[:, :, t, :, None] * u[:, :, None]
        out.append(torch.einsum("bhde,bhd->bhe", S, q[:, :, t]))
    return torch.stack(out, dim=2)


def chunked(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The same, CHUNK tokens at once."""
    S, out = q.new_zeros(*q.shape[:2], q.shape[3], v.shape[3]), []
    for Q, K, V, g_c, b in zip(*(t.split(CHUNK, dim=2) for t in (q, k, v, g, beta[..., None]))):
        G = g_c.cumsum(dim=2)[..., None]  # (B, H, n, 1)
        later = torch.ones(len(G[0, 0]), len(G[0, 0]), dtype=torch.bool, device=q.device).triu(1)
        decay = (G - G.mT).masked_fill(later, -torch.inf).exp()  # (B, H, n, n), 0 for j > i
        A = b * decay * (K @ K.mT)  # the diagonal is not read
        right = b * (V - G.exp() * (K @ S))
        U = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
        out.append(G.exp() * (Q @ S) + (decay * (Q @ K.mT)) @ U)
        S = G[:, :, -1:].exp() * S + ((G[:, :, -1:] - G).exp() * K).mT @ U
    return torch.cat(out, dim=2)


class DeltaRule(Variant):
    """A short convolution of q, k and v, unit q and k, normalized output; no RoPE. Two heads, not
    four: S has D numbers a channel."""

    settings: ClassVar = {"n_head": 2}

    def add_weights(self, config: GPTConfig) -> None:
        H, n = config.n_head, self.q_size
        self.c_attn = nn.Linear(config.n_embd, 3 * n + 2 * H, bias=False)  # q, k, v; beta; g
        self.conv = nn.Conv1d(3 * n, 3 * n, KERNEL, groups=3 * n, padding=KERNEL - 1, bias=False)
        self.norm = Norm(config, self.head_dim, rms=True)
        # Heads forget 0.1 % to 10 % a token at first.
        self.g_bias = nn.Parameter(torch.logspace(-3, -1, H).expm1().log())

    @property
    def cached(self) -> int:
        return 0

    @property
    def state(self) -> int:
        return self.q_size * (self.head_dim + 3 * (KERNEL - 1))  # S, inputs of the convolution

    def products(self, keys: float) -> float:
        return 3 * self.q_size * self.head_dim  # S^T k, k u^T and S^T q

    def forward(self, x: Tensor, attend: Any, spec: Any, segments: Tensor | None = None,
                rope: Any = None, *rest: Any) -> Tensor:
        self.refuse(segments, *rest)
        n, H = self.q_size, self.n_head
        qkv, beta, g = self.c_attn(x).split([3 * n, H, H], dim=2)
        qkv = self.conv(qkv.mT)[..., : x.shape[1]].mT
        q, k, v = (t.unflatten(2, (H, -1)).transpose(1, 2) for t in qkv.chunk(3, dim=2))
        q, k = F.normalize(q, dim=3), F.normalize(k, dim=3)  # (B, H, T, D)
        g = -F.softplus(g + self.g_bias)
        out = chunked(q, k, v, g.mT, beta.mT.sigmoid()).transpose(1, 2)
        return self.dropout(self.c_proj(self.norm(out).flatten(2)))
