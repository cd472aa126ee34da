"""A sigmoid gate on each head's output, as in Qwen3-Next (Qiu et al. 2025, arXiv 2505.06708)."""

from typing import Any

from torch import Tensor, nn

from course.lab.variant import Variant
from model import Attend, GPTConfig


class Attention(Variant):
    """Each channel of the output, before c_proj, times sigmoid of a linear function of x."""

    def add_weights(self, config: GPTConfig) -> None:
        self.c_gate = nn.Linear(config.n_embd, self.q_size, bias=False)

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        gate = self.c_gate(x).sigmoid().unflatten(2, (self.n_head, -1))  # (B, T, H, D)

        def gated(*args: object, **options: object) -> Tensor:
            return gate * attend(*args, **options)

        return super().forward(x, gated, *rest)
