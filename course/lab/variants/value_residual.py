"""Value residual (Zhou et al. 2024, arXiv 2410.17897)."""

from typing import Any

import torch
from torch import Tensor, nn

from course.lab.variant import Variant
from model import Attend, GPTConfig


class Attention(Variant):
    """v becomes a v + b v_0 with the values v_0 of layer 0; a and b are learned, 0.5 at first."""

    def add_weights(self, config: GPTConfig) -> None:
        self.mix = nn.Parameter(torch.full((2,), 0.5)) if self.layer else None
        self.v: Tensor | None = None  # of the last call, for the layers after this one

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        def mixed(q: Tensor, k: Tensor, v: Tensor, *args: object, **options: object) -> Tensor:
            self.v = v
            if self.mix is not None:
                v = self.mix[0] * v + self.mix[1] * self.first[0].v
            return attend(q, k, v, *args, **options)

        return super().forward(x, mixed, *rest)
