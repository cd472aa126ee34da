"""MLA, multi-head latent attention (DeepSeek-V2 2024, arXiv 2405.04434).

Naive: head h has keys [A_h c, k_rope] and values B_h c, of a short vector c a token.
Absorbed: q . A c = (A^T q) . c and sum_j p_j B c_j = B sum_j p_j c_j, MQA over [c, k_rope] and c.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Spec
from course.lab.variant import Variant
from model import Attend, GPTConfig, Norm, Rope, rotate


class MLA(Variant):
    """c has C / 2 channels, each head D and, for positions, R = D / 2 more."""

    absorbed = False  # True: reads less in decoding, more FLOPs in training

    def add_weights(self, config: GPTConfig) -> None:
        H, D = config.n_head, self.head_dim
        self.rank, self.R = config.n_embd // 2, D // 2
        self.sizes = [H * (D + self.R), self.rank, self.R]  # q, c, k_rope
        self.c_attn = nn.Linear(config.n_embd, sum(self.sizes), bias=False)
        self.c_norm = Norm(config, self.rank, rms=True)
        self.c_up = nn.Linear(self.rank, H * 2 * D, bias=False)  # A and B of each head

    def request(self, spec: Spec) -> Spec:
        D, rank, R = self.head_dim, self.rank, self.R
        if not self.absorbed:
            return replace(spec, head_dim=D + R)
        return replace(spec, n_kv_head=1, head_dim=rank + R, scale=(D + R) ** -0.5)

    @property
    def cached(self) -> int:
        return self.rank + self.R

    def products(self, keys: float) -> float:
        return self.n_head * (2 * self.head_dim + self.R) * keys

    def forward(self, x: Tensor, attend: Attend, spec: Spec, segments: Tensor | None = None,
                rope: Rope = None, *rest: Any) -> Tensor:
        self.refuse(*rest)
        H, D = self.n_head, self.head_dim
        q, c, k_rope = self.c_attn(x).split(self.sizes, dim=2)
        q, q_rope = q.unflatten(2, (H, -1)).split([D, self.R], dim=3)  # (B, T, H, D and R)
        c, k_rope = self.c_norm(c)[:, :, None], k_rope[:, :, None]  # (B, T, 1, rank and R)
        if rope is not None:  # every second rate
            q_rope, k_rope = (rotate(t, *(r[..., ::2] for r in rope)) for t in (q_rope, k_rope))
        if self.absorbed:
            A, B = self.c_up.weight.unflatten(0, (H, 2, D)).unbind(1)  # (H, D, rank)
            q = torch.cat([torch.einsum("bthd,hdr->bthr", q, A), q_rope], dim=3)
            k = torch.cat([c, k_rope], dim=3)
            out = attend(q, k, k, spec, segments=segments)[..., : self.rank]
            y = torch.einsum("bthr,hdr->bthd", out, B)
        else:
            k, v = self.c_up(c).unflatten(3, (H, 2, D))[:, :, 0].unbind(3)  # (B, T, H, D)
            k = torch.cat([k, k_rope.expand(-1, -1, H, -1)], dim=3)
            q, v = torch.cat([q, q_rope], dim=3), F.pad(v, (0, self.R))
            y = attend(q, k, v, spec, segments=segments)[..., :D]
        return self.dropout(self.c_proj(y.flatten(2)))
