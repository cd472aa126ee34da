"""Variants of a few lines."""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attention import Spec
from course.lab.variant import Variant
from model import Attend, GPTConfig


class GQA(Variant):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): two query heads share a
    key/value head."""

    settings: ClassVar = {"n_kv_head": 2}  # of 4 heads


class MQA(Variant):
    """Multi-query attention (Shazeer 2019, arXiv 1911.02150): all share one key/value head."""

    settings: ClassVar = {"n_kv_head": 1}


class Window(Variant):
    """GPT-OSS (2025, arXiv 2508.10925): a query sees the last 16 keys, and a sink, a learned score
    of its head without a value: a head can attend to nothing."""

    settings: ClassVar = {"attention_window": 16}

    def add_weights(self, config: GPTConfig) -> None:
        self.sinks = nn.Parameter(torch.zeros(config.n_head))

    def request(self, spec: Spec) -> Spec:
        return replace(spec, sinks=True)

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        return super().forward(x, partial(attend, sinks=self.sinks), *rest)


class Gate(Variant):
    """Qwen3-Next (Qiu et al. 2025, arXiv 2505.06708): each channel of the heads' output, before
    c_proj, times the sigmoid of a linear function of x."""

    def add_weights(self, config: GPTConfig) -> None:
        self.c_gate = nn.Linear(config.n_embd, self.q_size, bias=False)

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        gate = self.c_gate(x).sigmoid().unflatten(2, (self.n_head, -1))  # (B, T, H, D)

        def gated(*args: object, **options: object) -> Tensor:
            return gate * attend(*args, **options)

        return super().forward(x, gated, *rest)


class ValueResidual(Variant):
    """Zhou et al. 2024, arXiv 2410.17897: v becomes a v + b v_0 with the values v_0 of layer 0; a
    and b are learned, 0.5 at first."""

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
