"""GPT: the whole model in one file. GPT-2 as published (Radford et al. 2019); the options of
GPTConfig turn it, one at a time, into Llama 3 or Qwen3.

    GPT-2     position=learned  norm=layer  mlp=gelu    bias=True   tied=True
    Llama 3   position=rope     norm=rms    mlp=swiglu  bias=False  n_kv_head < n_head
    Qwen3     as Llama 3, with qk_norm

Shapes in comments: B sequences of T tokens, C = n_embd channels, H query heads and Hkv key/value
heads of D channels (C / H, if head_size does not say otherwise), V tokens in the vocabulary.

In CausalSelfAttention.forward, `attend` is the kernel that `config.attention_backend` chooses.
Read next: attention/manual.py, the formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from pydantic import PositiveFloat
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention import Phase, Plan, Plans, Policy, Ranks, Ring, Spec, check_name
from attention.machine.system import autocast_dtype, autocast_off
from core.loss import Head
from core.options import ModelOptions
from core.settings import Size, check_fields

Attend = Callable[..., Tensor]  # see attention.Backend
Rope = tuple[Tensor, Tensor] | None  # cosine and sine of the angles, see rotate()
Cache = Any  # one step of a KV cache: inference/cache.py
Store = Callable[[Tensor, Tensor], Any]  # its append(), for a layer


@dataclass(frozen=True)
class GPTConfig(ModelOptions):
    """ModelOptions and what few models need. Raises ValueError if inconsistent."""

    vocab_size: Size = 50304  # GPT-2's 50257, rounded up to a multiple of 64 for speed
    bias: bool | Literal["qkv"] = True  # as GPT-2's checkpoints; train.py's default is False
    rope_theta: PositiveFloat = 10000.0  # the slowest channels turn 2 pi * theta tokens
    rope_scaling: tuple[PositiveFloat, float, PositiveFloat, Size] | None = None  # Llama 3.1
    head_size: Size | None = None  # D; None: n_embd / n_head
    n_hidden: Size | None = None  # inside the MLP; None: see `hidden`
    norm_eps: PositiveFloat = 1e-5
    # Keys that a query attends to, itself included; None: all. Several: see `windows`.
    attention_window: int | tuple[int | None, ...] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.head_size is None and self.n_embd % self.n_head:
            got = f"n_embd={self.n_embd}, n_head={self.n_head}"
            raise ValueError(f"n_embd must be a multiple of n_head, got {got}")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"position=rope needs heads of an even width, got {self.head_dim}")
        if (scaling := self.rope_scaling) and not 0 <= scaling[1] < scaling[2]:
            raise ValueError(f"rope_scaling: expected 0 <= low < high, got {scaling}")
        check_name(self.attention_backend)  # runs no code: a saved config may name some
        if isinstance(self.attention_window, tuple):
            n = len(self.attention_window)
            if not 1 <= n <= self.n_layer:
                raise ValueError(f"attention_window: expected 1 to n_layer={self.n_layer}, got {n}")
            if n == 1:  # equal models have equal configs
                object.__setattr__(self, "attention_window", self.attention_window[0])
        self.specs(Phase("cpu", "float32"))  # checks n_kv_head, attention_window and dropout

    @classmethod
    def of(cls, options: ModelOptions, vocab_size: int) -> GPTConfig:
        """The model that a command's options describe."""
        given = {f.name: getattr(options, f.name) for f in fields(cls) if hasattr(options, f.name)}
        return cls(**{**given, "vocab_size": vocab_size})

    @property
    def head_dim(self) -> int:
        return self.head_size or self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def hidden(self) -> int:
        """Channels inside the MLP; by default gelu and swiglu have equally many parameters."""
        C = self.n_embd
        return self.n_hidden or (4 * C if self.mlp == "gelu" else max(16, round(C / 6) * 16))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Each layer's window: several are repeated, and the last layer takes the last one."""
        pattern = self.attention_window
        if not isinstance(pattern, tuple):
            pattern = (pattern,)
        layers = [*(pattern[i % len(pattern)] for i in range(self.n_layer - 1)), pattern[-1]]
        # As wide as every sequence is None: then kernels without a window can run it.
        return tuple(None if w is None or w >= self.block_size else w for w in layers)

    def specs(self, phase: Phase) -> list[Spec]:
        """Each layer's attention in a phase."""
        heads = self.n_head, self.kv_heads, self.head_dim
        alibi = self.position == "alibi"
        return [phase.spec(*heads, window, self.dropout, alibi) for window in self.windows]


class Norm(nn.Module):
    """LayerNorm with an optional bias, or RMSNorm; summed in float32."""

    def __init__(self, config: GPTConfig, width: int, rms: bool) -> None:
        super().__init__()
        self.rms = rms
        self.eps = config.norm_eps
        biased = config.bias is True and not rms
        self.weight: Tensor = nn.Parameter(torch.ones(width))
        self.bias: Tensor | None = nn.Parameter(torch.zeros(width)) if biased else None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with autocast_off(x):  # on CUDA it would cast x to float32
            if self.rms:
                return F.rms_norm(x, weight.shape, weight, self.eps)
            return F.layer_norm(x, weight.shape, weight, bias, self.eps)


def rope_rates(config: GPTConfig, device: torch.device) -> Tensor:
    """RoPE's D / 2 rates in radians per token, float32 (Su et al. 2021, arXiv 2104.09864)."""
    D = config.head_dim
    pair = torch.arange(0, D, 2, dtype=torch.float32, device=device)
    rates = 1 / config.rope_theta ** (pair / D)
    if config.rope_scaling is None:
        return rates
    # Llama 3.1: pairs that turn fewer than `low` times in `length` tokens slow down by `factor`,
    # those that turn more than `high` times stay, those between are interpolated.
    factor, low, high, length = config.rope_scaling
    stay = ((rates * length / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
    return rates * (stay + (1 - stay) / factor)


def alibi_slopes(n_head: int, device: torch.device) -> Tensor:
    """ALiBi's slopes (H,) float32: 2^(-8 h / H), h = 1 to H. If H is not a power of 2, those of the
    next smaller one n, then every second one of 2 n (Press et al. 2022, arXiv 2108.12409)."""
    n = 1 << (n_head.bit_length() - 1)
    h = torch.arange(1, n_head + 1, dtype=torch.float32, device=device)
    return torch.exp2(-8 / n * torch.where(h <= n, h, h - n - 0.5))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + D / 2 of x (B, T, H, D); cos and sin (..., T, 1, D / 2)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).to(x.dtype)


class CausalSelfAttention(nn.Module):
    """Each token attends to itself and to the tokens before it, in H heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C, D = config.n_embd, config.head_dim
        self.head_dim = D
        self.q_size = config.n_head * D
        self.kv_size = config.kv_heads * D
        self.c_attn = nn.Linear(C, self.q_size + 2 * self.kv_size, bias=bool(config.bias))
        self.c_proj = nn.Linear(self.q_size, C, bias=config.bias is True)
        self.q_norm = Norm(config, D, rms=True) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(config, D, rms=True) if config.qk_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, attend: Attend, spec: Spec, segments: Tensor | None,
                rope: Rope = None, store: Store | None = None,
                slopes: Tensor | None = None) -> Tensor:  # fmt: skip
        qkv = self.c_attn(x)  # (B, T, (H + 2 * Hkv) * D)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=2)
        q, k, v = (t.unflatten(2, (-1, self.head_dim)) for t in (q, k, v))  # (B, T, H or Hkv, D)
        q, k = self.q_norm(q), self.k_norm(k)
        if rope is not None:
            q, k = rotate(q, *rope), rotate(k, *rope)
        view = None  # how to read a static or a paged cache: attention/masks.py
        if store is not None:
            k, v, view = store(k, v)  # (B, Tk, Hkv, D), or pages of them
            if segments is not None:  # of the keys that the window has kept
                segments = segments[:, -k.shape[1] :]
        alibi = {} if slopes is None else {"alibi_slopes": slopes}
        y = attend(q, k, v, spec, segments=segments, cache=view, **alibi)  # (B, T, H, D)
        return self.dropout(self.c_proj(y.flatten(2)))  # (B, T, C)


class MLP(nn.Module):
    """For each token: expand, GELU or a gate, project back."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        C, hidden, bias = config.n_embd, config.hidden, config.bias is True
        self.gated = config.mlp == "swiglu"
        self.c_fc = nn.Linear(C, (1 + self.gated) * hidden, bias=bias)  # gated: gate, then value
        self.gelu = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.c_proj = nn.Linear(hidden, C, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)  # (B, T, hidden), gated (B, T, 2 * hidden)
        if self.gated:
            gate, value = x.chunk(2, dim=-1)
            return self.dropout(self.c_proj(F.silu(gate) * value))
        return self.dropout(self.c_proj(self.gelu(x)))


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy and added back to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = Norm(config, config.n_embd, config.norm == "rms")
        self.attn = CausalSelfAttention(config)
        self.ln_2 = Norm(config, config.n_embd, config.norm == "rms")
        self.mlp = MLP(config)

    def forward(self, x: Tensor, *attention_args: object) -> Tensor:
        x = x + self.attn(self.ln_1(x), *attention_args)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A language model; its attention kernel is `config.attention_backend`, as `policy` permits."""

    def __init__(self, config: GPTConfig, policy: Policy = Policy()) -> None:
        super().__init__()
        self.config = config
        self.policy = policy
        # Set by the program that runs the model:
        self.gradient_checkpointing = False  # recompute each block in backward
        self.residual_autocast = False  # x between the blocks in autocast's dtype, not float32
        self.ring: Ring | None = None  # context parallelism: idx is a shard of each sequence
        self.compiled_blocks = False  # set by core/parallel.py
        self.tokenizer: Any = None  # of inference.load()
        self.packed = False  # segments are where a token's document begins: positions count from it
        # The kernel of each layer, by phase (training, evaluation, decoding): attention/plan.py.
        self.plans = Plans(config.attention_backend, policy, config.specs, config.block_size)
        learned = config.position == "learned"
        self.transformer: Any = nn.ModuleDict({
            "wte": nn.Embedding(config.vocab_size, config.n_embd),
            **({"wpe": nn.Embedding(config.block_size, config.n_embd)} if learned else {}),
            "drop": nn.Dropout(config.dropout),
            "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
            "ln_f": Norm(config, config.n_embd, config.norm == "rms"),
        })  # fmt: skip
        self.lm_head = Head(None if config.tied else (config.vocab_size, config.n_embd))
        for name, p in self.named_parameters():
            n = 2 * config.n_layer if name.endswith("c_proj.weight") else 1  # outputs that add up
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02 / math.sqrt(n))
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx: Tensor, targets: Tensor | None = None, segments: Tensor | None = None,
                cache: Cache = None) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Token ids (B, T) int64 -> (logits (B, T, V), None), or with targets (None, loss).

        Targets (B, T) int64 are the next tokens; -1 is ignored. The loss is the mean cross entropy
        in nats, float32 (), computed without storing all logits (core/loss.py).
        """
        x = self.hidden(idx, segments, cache)
        if targets is None:
            return self.head(x), None
        if targets.shape != idx.shape:
            raise ValueError(f"targets: expected shape {idx.shape}, got {targets.shape}")
        return None, self.lm_head.loss(x, self.head_weight, targets)

    def hidden(self, idx: Tensor, segments: Tensor | None = None, cache: Cache = None) -> Tensor:
        """Token ids (B, T) int64, T <= block_size -> (B, T, C), the input of the head.

        Args:
            segments: (B, T) int32; a token attends to its own segment only.
            cache: a step of a KV cache (inference/cache.py), with its own positions and segments.
        """
        config, device = self.config, idx.device
        if cache is not None:
            if segments is not None:
                raise ValueError("segments cannot be passed with a cache, which has its own")
            segments = cache.segments
        pos = self.positions(idx.shape[1], device, segments, cache)
        x = self.transformer.wte(idx)  # (B, T, C)
        rope, slopes = None, None
        if config.position == "learned":
            x = x + self.transformer.wpe(pos)
        elif config.position == "rope":
            angles = pos[..., None, None] * rope_rates(config, device)  # (..., T, 1, D / 2)
            rope = angles.cos(), angles.sin()
        elif config.position == "alibi":
            slopes = alibi_slopes(config.n_head, device)  # (H,)
        if self.residual_autocast:
            x = x.to(autocast_dtype(device.type) or x.dtype)
        x = self.transformer.drop(x)

        plan = self.plans.look_up(self.phase(segments is not None, cache, x), idx.shape[0])
        for i, (block, (attend, spec, chosen)) in enumerate(zip(self.transformer.h, plan)):
            if spec.lse and self.ring:  # keys and values go round: attention/ring.py
                attend = self.ring.attend(chosen.backend)
            store = None if cache is None else partial(cache.append, i)
            args = attend, spec, segments, rope, store, slopes
            if self.gradient_checkpointing and self.training and cache is None:
                x = checkpoint(block, x, *args, use_reentrant=False)
            else:
                x = block(x, *args)
        return self.transformer.ln_f(x)

    def positions(self, T: int, device: torch.device, segments: Tensor | None,
                  cache: Cache) -> Tensor:  # fmt: skip
        """Positions (T,), or (B, T) if they differ between texts, of T new tokens."""
        if cache is not None:
            return cache.positions(T)
        if self.ring:
            pos = self.ring.positions(T, self.config.block_size - 1, device)
        elif self.config.block_size < T:
            raise ValueError(f"{T} tokens do not fit into block_size {self.config.block_size}")
        else:
            pos = torch.arange(T, device=device)
        if self.packed and segments is not None:
            return (pos - segments).clamp(min=0)
        return pos

    def head(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V) logits."""
        return self.lm_head(x, self.head_weight)

    @property
    def head_weight(self) -> Tensor:
        """(V, C): the token embedding's, if they are tied."""
        return self.transformer.wte.weight if self.lm_head.weight is None else self.lm_head.weight

    def phase(self, segments: bool = False, cache: Cache = None, x: Tensor | None = None) -> Phase:
        """The phase of a forward pass that begins now; x: embeddings in the blocks' dtype."""
        x = self.transformer.wte.weight if x is None else x
        ring = self.ring is not None and cache is None
        now = Phase.now(x, self.training, segments, cache, ring)
        return now._replace(compiled=now.compiled or self.compiled_blocks)

    def plan(self, B: int = 1, ranks: Ranks | None = None, **changes: Any) -> Plan:
        """Choose each layer's kernel in advance, for phase() with `changes`."""
        return self.plans.plan(self.phase()._replace(**changes), B, ranks)

    @torch.no_grad()
    def generate(self, idx: Tensor, max_new_tokens: int, temperature: float = 1.0,
                 top_k: int | None = None) -> Tensor:  # fmt: skip
        """Append sampled tokens to idx (B, T) int64. inference/engine.py has KV caches."""
        valid = max_new_tokens >= 0 and temperature >= 0 and (top_k is None or top_k >= 1)
        if not valid or idx.dim() != 2 or not idx.shape[1]:
            raise ValueError(f"got idx {idx.shape}, {max_new_tokens=}, {temperature=}, {top_k=}")
        for _ in range(max_new_tokens):
            logits = self.head(self.hidden(idx[:, -self.config.block_size :])[:, -1])  # (B, V)
            if temperature == 0:
                token = logits.argmax(dim=-1, keepdim=True)  # (B, 1)
            else:
                logits = logits.float() / max(temperature, 1e-20)  # smaller is 0 in float32
                if top_k is not None and top_k < logits.shape[-1]:
                    least = logits.topk(top_k).values[:, -1:]
                    logits = logits.masked_fill(logits < least, -math.inf)
                token = torch.multinomial(logits.softmax(dim=-1), 1)  # (B, 1)
            idx = torch.cat([idx, token], dim=1)
        return idx

    def get_num_params(self, non_embedding: bool = True) -> int:
        """The number of parameters, or of those that are not only looked up."""
        n = sum(p.numel() for p in self.parameters())
        if non_embedding and self.config.position == "learned":
            n -= self.transformer.wpe.weight.numel()
        if non_embedding and not self.config.tied:
            n -= self.transformer.wte.weight.numel()
        return n

    def crop_block_size(self, block_size: int) -> None:
        """Keep only the first `block_size` positions."""
        config, n = self.config, self.config.block_size
        if not 1 <= block_size <= n:
            raise ValueError(f"block_size can only be cropped, from {n}; got {block_size}")
        if config.position == "learned":
            rows = self.transformer.wpe.weight.detach()[:block_size].clone()
            self.transformer["wpe"] = nn.Embedding.from_pretrained(rows, freeze=False)
        self.config = replace(config, block_size=block_size)
        self.plans = Plans(config.attention_backend, self.policy, self.config.specs, block_size)

    @classmethod
    def from_pretrained(cls, source: str, override_args: Any = None, **changes: Any) -> GPT:
        """Load a folder of transformers, or a name on the hub. override_args (nanoGPT's) and
        changes replace fields of GPTConfig."""
        from checkpoint import load_hf

        return load_hf(source, **{**(override_args or {}), **changes})
