"""Forgetting attention (Lin et al. 2025, arXiv 2503.02130).

The forget gates f of later tokens up to the query multiply a key's weight: its score gets the bias
c_i - c_j with c = cumsum(log f). Softmax ignores c_i.
"""

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Spec
from course.lab.variant import Variant
from model import Attend, GPTConfig, Rope


class Forgetting(Variant):
    """One more channel, for any kernel: k gets -c, q a constant."""

    def add_weights(self, config: GPTConfig) -> None:
        self.c_forget = nn.Linear(config.n_embd, config.kv_heads)
        rates = torch.logspace(-3, -0.3, config.kv_heads)  # at first: 0.1 % to 50 % a token
        self.c_forget.bias.data = torch.logit(1 - rates)

    def request(self, spec: Spec) -> Spec:
        return replace(spec, head_dim=self.head_dim + 1)

    @property
    def cached(self) -> int:
        return 2 * self.kv_size + self.c_forget.out_features

    def products(self, keys: float) -> float:
        return (2 * self.q_size + self.n_head) * keys

    def forward(self, x: Tensor, attend: Attend, spec: Spec, segments: Tensor | None = None,
                rope: Rope = None, *rest: Any) -> Tensor:
        self.refuse(*rest)
        c = F.logsigmoid(self.c_forget(x)).cumsum(dim=1)  # (B, T, Hkv)
        D = self.head_dim

        def biased(q: Tensor, k: Tensor, v: Tensor, *args: object, **options: object) -> Tensor:
            # The kernel divides by sqrt(D + 1).
            q = F.pad(q * math.sqrt((D + 1) / D), (0, 1), value=math.sqrt(D + 1))
            k = F.pad(k, (0, 1)) - F.pad(c[..., None], (D, 0))
            return attend(q, k, F.pad(v, (0, 1)), *args, **options)[..., :D]

        return super().forward(x, biased, spec, segments, rope)
