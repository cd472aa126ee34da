import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Spec
from course.lab.variant import Variant
from model import Attend, GPTConfig


class GQA(Variant):
    """Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245)."""

    settings: ClassVar = {"n_kv_head": 2}  # of 4 heads


class MQA(Variant):
    """Multi-query attention (Shazeer 2019, arXiv 1911.02150)."""

    settings: ClassVar = {"n_kv_head": 1}


class Window(Variant):
    """GPT-OSS (2025, arXiv 2508.10925): the last 16 keys, and a sink, a learned score without a
    value: a head can attend to nothing."""

    settings: ClassVar = {"attention_window": 16}

    def add_weights(self, config: GPTConfig) -> None:
        self.sinks = nn.Parameter(torch.zeros(config.n_head))

    def request(self, spec: Spec) -> Spec:
        return replace(spec, sinks=True)

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        return super().forward(x, partial(attend, sinks=self.sinks), *rest)


class Gate(Variant):
    """Qwen3-Next (Qiu et al. 2025, arXiv 2505.06708): the heads' output times the sigmoid of a
    linear function of x."""

    def add_weights(self, config: GPTConfig) -> None:
        self.c_gate = nn.Linear(config.n_embd, self.q_size, bias=False)

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        gate = self.c_gate(x).sigmoid().unflatten(2, (self.n_head, -1))  # (B, T, H, D)

        def gated(*args: object, **options: object) -> Tensor:
            return gate * attend(*args, **options)

        return super().forward(x, gated, *rest)


class ValueResidual(Variant):
    """Zhou et al. 2024, arXiv 2410.17897: v becomes a v + b v_0 with v_0 of layer 0, a and b
    learned."""

    def add_weights(self, config: GPTConfig) -> None:
        self.mix = nn.Parameter(torch.full((2,), 0.5)) if self.layer else None
        self.v: Tensor | None = None  # for later layers

    def forward(self, x: Tensor, attend: Attend, *rest: Any) -> Tensor:
        def mixed(q: Tensor, k: Tensor, v: Tensor, *args: object, **options: object) -> Tensor:
            self.v = v
            if self.mix is not None:
                v = self.mix[0] * v + self.mix[1] * self.first[0].v
            return attend(q, k, v, *args, **options)

        return super().forward(x, mixed, *rest)


class Differential(Variant):
    """Ye et al. 2024, arXiv 2410.05258: (softmax(Q1 K1^T) - lam softmax(Q2 K2^T)) V for the heads h
    and h + H / 2; V has the values of both."""

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
