"""Variants of model.py's attention layer, with their costs."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attention import Spec
from model import GPT, Attend, CausalSelfAttention, GPTConfig, Norm, Rope, rotate

CHUNK = 32  # tokens of the delta rule at once
KERNEL = 4  # tokens that its convolution sees


class Variant(CausalSelfAttention):
    """MHA, multi-head attention (Vaswani et al. 2017, arXiv 1706.03762)."""

    settings: ClassVar[dict[str, Any]] = {}  # fields of GPTConfig

    def __init__(self, config: GPTConfig, layer: int = 0, first: Any = None) -> None:
        """`first`: the attention of layer 0, None in that layer."""
        super().__init__(config)
        self.n_head, self.window = config.n_head, config.windows[layer]
        self.layer, self.first = layer, (first,)  # in a tuple: not this layer's weights
        self.cached = 2 * self.kv_size  # numbers for a token
        self.state = 0  # numbers for a text of any length
        self.add_weights(config)

    def add_weights(self, config: GPTConfig) -> None:
        """Add the variant's own weights."""

    def request(self, spec: Spec) -> Spec:
        """The kernel's Spec, from the config's."""
        return spec

    def products(self, keys: float) -> float:
        """Multiply-adds of a token that sees `keys`, without weights."""
        return 2 * self.q_size * keys  # q . k, and p v

    def refuse(self, *options: object) -> None:
        if any(option is not None for option in options):
            raise NotImplementedError(f"{type(self).__name__}: without segments, cache and ALiBi")


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


class Forgetting(Variant):
    """Forgetting attention (Lin et al. 2025, arXiv 2503.02130).

    The forget gates f of later tokens up to the query multiply a key's weight: its score gets the
    bias c_i - c_j with c = cumsum(log f). Softmax ignores c_i. One more channel, for any kernel: k
    gets -c, q a constant.
    """

    def add_weights(self, config: GPTConfig) -> None:
        self.c_forget = nn.Linear(config.n_embd, config.kv_heads)
        rates = torch.logspace(-3, -0.3, config.kv_heads)  # at first: 0.1 % to 50 % a token
        self.c_forget.bias.data = torch.logit(1 - rates)
        self.cached += config.kv_heads

    def request(self, spec: Spec) -> Spec:
        return replace(spec, head_dim=self.head_dim + 1)

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


class MLA(Variant):
    """MLA, multi-head latent attention (DeepSeek-V2 2024, arXiv 2405.04434).

    Naive: head h has keys [A_h c, k_rope] and values B_h c, of a short vector c a token. Absorbed:
    q . A c = (A^T q) . c and sum_j p_j B c_j = B sum_j p_j c_j, MQA over [c, k_rope] and c. c has
    C / 2 channels, each head D and, for positions, R = D / 2 more.
    """

    absorbed = False  # True: reads less in decoding, more FLOPs in training

    def add_weights(self, config: GPTConfig) -> None:
        H, D = config.n_head, self.head_dim
        self.rank, self.R = config.n_embd // 2, D // 2
        self.sizes = [H * (D + self.R), self.rank, self.R]  # q, c, k_rope
        self.cached = self.rank + self.R
        self.c_attn = nn.Linear(config.n_embd, sum(self.sizes), bias=False)
        self.c_norm = Norm(config, self.rank, rms=True)
        self.c_up = nn.Linear(self.rank, H * 2 * D, bias=False)  # A and B of each head

    def request(self, spec: Spec) -> Spec:
        D, rank, R = self.head_dim, self.rank, self.R
        if not self.absorbed:
            return replace(spec, head_dim=D + R)
        return replace(spec, n_kv_head=1, head_dim=rank + R, scale=(D + R) ** -0.5)

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
    """The same, CHUNK tokens at once. G_i is the sum of g up to token i of a chunk; from the S
    before it, U solves (I + A) U = beta (V - exp(G) K S), where A_ij = beta_i exp(G_i - G_j)
    k_i . k_j for j < i."""
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
    """Gated delta rule (Yang et al. 2024, arXiv 2412.06464): a matrix S (D, D) a head, no cache.

        S_t = exp(g_t) S_(t-1) + k_t u_t^T      u_t = beta_t (v_t - exp(g_t) S_(t-1)^T k_t)
        o_t = S_t^T q_t                         S^T k is what the memory returns for a key

    A short convolution of q, k and v, unit q and k, normalized output; no RoPE. Two heads, not
    four: S has D numbers a channel.
    """

    settings: ClassVar = {"n_head": 2}

    def add_weights(self, config: GPTConfig) -> None:
        H, n = config.n_head, self.q_size
        self.c_attn = nn.Linear(config.n_embd, 3 * n + 2 * H, bias=False)  # q, k, v; beta; g
        self.conv = nn.Conv1d(3 * n, 3 * n, KERNEL, groups=3 * n, padding=KERNEL - 1, bias=False)
        self.norm = Norm(config, self.head_dim, rms=True)
        self.cached = 0
        self.state = n * (self.head_dim + 3 * (KERNEL - 1))  # S, inputs of the convolution
        # Heads forget 0.1 % to 10 % a token at first.
        self.g_bias = nn.Parameter(torch.logspace(-3, -1, H).expm1().log())

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


VARIANTS: dict[str, type[Variant]] = {
    "mha": Variant, "gqa": GQA, "mqa": MQA, "window": Window, "gate": Gate,
    "value_residual": ValueResidual, "forgetting": Forgetting, "differential": Differential,
    "mla": MLA, "delta": DeltaRule,
}


def replace_attention(model: GPT, variant: type[Variant]) -> None:
    """Each layer's kernel is chosen for its request()."""
    layers: list[Variant] = []
    for block in model.transformer.h:
        block.attn = variant(model.config, len(layers), layers[0] if layers else None)
        layers.append(block.attn)
    specs = model.config.specs
    model.plans.specs = lambda phase: [
        layer.request(spec) for layer, spec in zip(layers, specs(phase), strict=True)
    ]
