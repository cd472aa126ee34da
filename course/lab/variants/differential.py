"""Differential attention (Ye et al. 2024, arXiv 2410.05258)."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course.lab.variant import Variant
from model import Attend, GPTConfig


class Differential(Variant):
    """(softmax(Q1 K1^T) - lam softmax(Q2 K2^T)) V for each pair of heads, h and h + H / 2; V has
    the values of both, 2 D channels. Weight that both put on unimportant keys cancels."""

    def add_weights(self, config: GPTConfig) -> None:
        self.least = 0.8 - 0.6 * math.exp(-0.3 * self.layer)  # the paper's lambda_init
        self.lam = nn.ParameterList(nn.Parameter(0.1 * torch.randn(self.head_dim)) for _ in "1122")

    def products(self, keys: float) -> float:
        return 3 * self.q_size * keys  # each value has 2 D channels

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        q1, k1, q2, k2 = self.lam
        lam = (q1 * k1).sum().exp() - (q2 * k2).sum().exp() + self.least

        def difference(q: Tensor, k: Tensor, v: Tensor, *args: object, **options: object) -> Tensor:
            halves = (torch.cat([half, half], dim=2) for half in v.chunk(2, dim=2))
            out = torch.cat([attend(q, k, half, *args, **options) for half in halves], dim=-1)
            one, two = out.chunk(2, dim=2)  # (B, T, H / 2, 2 D)
            return (1 - self.least) * F.rms_norm(one - lam * two, (2 * self.head_dim,), eps=1e-5)

        return super().forward(x, difference, *rest)
