"""A window with sinks, as in GPT-OSS (2025, arXiv 2508.10925)."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention import Spec
from course.lab.variant import Variant
from model import Attend, GPTConfig


class Attention(Variant):
    """A query sees the last 16 keys, and a learned score of its head, which has no value: a head
    can attend to nothing."""

    settings: ClassVar = {"attention_window": 16}

    def add_weights(self, config: GPTConfig) -> None:
        self.sinks = nn.Parameter(torch.zeros(config.n_head))

    def request(self, spec: Spec) -> Spec:
        return replace(spec, sinks=True)

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        return super().forward(x, partial(attend, sinks=self.sinks), *rest)
