"""GPT: the whole model in one file. Read it from the bottom up, or from the top down.

GPT-2 as published (Radford et al. 2019): learned positions, pre-norm blocks, GELU, tied head. The
shapes in the comments: B sequences, T tokens each, C = n_embd channels, H query heads and Hkv
key/value heads of D = C / H channels each, V tokens in the vocabulary.

Attention itself is not here: `attend` is chosen by name from the package attention/, once for each
phase (training, evaluation, prefill, decoding), and called in CausalSelfAttention.forward. Nor are
the caches (inference/cache.py) and the loop that generates text (inference/engine.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import attention
from attention import Resolution, Spec
from core import cpu_matmul
from inference import engine

IGNORE = -1  # a target that counts for nothing

# n_layer, n_head, n_embd of the four GPT-2s (Radford et al. 2019, table 2, names of the hub)
SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}


@dataclass(frozen=True)
class GPTConfig:
    """The model's sizes, and how it attends.

    Raises:
        ValueError: a size that is not positive, or that does not divide as it must.
    """

    block_size: int = 1024  # the longest sequence, in tokens
    vocab_size: int = 50304  # GPT-2's 50257, rounded up to a multiple of 64 for the hardware
    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    n_kv_head: int | None = None  # fewer than n_head: grouped-query attention; None: n_head
    dropout: float = 0.0
    bias: bool = True  # in Linear and LayerNorm
    gelu: Literal["exact", "tanh"] = "exact"  # GPT-2's own checkpoints use tanh
    gradient_checkpointing: bool = False  # recompute each block in backward: less memory, slower
    residual_dtype: Literal["float32", "autocast"] = "float32"  # autocast: that of the products
    attention_backend: str = "auto"
    attention_window: int | None = None  # keys that a query sees, itself included; None: all
    attention_fallback: bool = True  # False: a backend that is refused is an error
    attention_deterministic: bool = False  # the backward gives the same bits each time
    attention_hub_kernels: bool = False  # flash_attn_*: download a prebuilt kernel, and run it
    sdpa_flash_impl: Literal["FA2", "FA3", "FA4"] = "FA2"  # what PyTorch's own flash kernel is
    allow_mps_sdpa: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_embd % self.n_head:
            raise ValueError(
                f"n_embd must be a multiple of n_head, got n_embd={self.n_embd}, "
                f"n_head={self.n_head}"
            )
        if self.sdpa_flash_impl != "FA2" and self.dropout:
            raise ValueError(
                f"sdpa_flash_impl={self.sdpa_flash_impl} has no dropout, got dropout="
                f"{self.dropout:g}; it must be 0, or sdpa_flash_impl FA2"
            )
        if self.gelu not in ("exact", "tanh"):
            raise ValueError(f"gelu must be 'exact' or 'tanh', got {self.gelu!r}")
        if self.residual_dtype not in ("float32", "autocast"):
            raise ValueError(
                f"residual_dtype must be 'float32' or 'autocast', got {self.residual_dtype!r}"
            )
        if self.attention_backend not in attention.RULES:
            attention.get(self.attention_backend)  # an unknown name lists the known ones
        self.spec("float32")  # checks n_kv_head, attention_window and dropout

    @classmethod
    def named(cls, size: str, **changes: Any) -> GPTConfig:
        """The sizes of "gpt2", "gpt2-medium", "gpt2-large" or "gpt2-xl".

        Raises:
            ValueError: another name.
        """
        if size not in SIZES:
            raise ValueError(f"unknown model size {size!r}; known: {', '.join(SIZES)}")
        n_layer, n_head, n_embd = SIZES[size]
        return cls(**{"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd, **changes})

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    def spec(self, dtype: str, *, training: bool = True, **asked: Any) -> Spec:
        """What this model asks of an attention backend."""
        window = self.attention_window
        if window is not None and window >= self.block_size:
            window = None  # as wide as every sequence: no window, and a kernel without one will do
        return Spec(
            self.n_head,
            self.kv_heads,
            self.head_dim,
            dtype,
            window=window,
            dropout=self.dropout if training else 0.0,
            deterministic=self.attention_deterministic,
            hub_kernels=self.attention_hub_kernels,
            **asked,
        )


class LayerNorm(nn.Module):
    """Layer normalization with an optional bias; mean and variance are taken in float32."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(config.n_embd))
        self.bias = nn.Parameter(torch.zeros(config.n_embd)) if config.bias else None

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):  # on CUDA it lifts x to float32
            return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, 1e-5)


class Linear(nn.Linear):
    """nn.Linear, with float32 products by oneDNN where GPT.use_onednn() asked for them."""

    onednn = False

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.onednn)


class CausalSelfAttention(nn.Module):
    """Every token looks back at the tokens before it, in H heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.q_size, self.kv_size = config.n_embd, config.kv_heads * config.head_dim
        self.c_attn = Linear(config.n_embd, self.q_size + 2 * self.kv_size, bias=config.bias)
        self.c_proj = Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        attend: Callable[..., Tensor],
        spec: Spec,
        segments: Tensor | None,
        cache: Any = None,
    ) -> Tensor:
        qkv = self.c_attn(x)  # (B, T, C + 2 * Hkv * D)
        q, k, v = qkv.split([self.q_size, self.kv_size, self.kv_size], dim=2)
        q, k, v = (t.unflatten(2, (-1, self.head_dim)) for t in (q, k, v))  # (B, T, H or Hkv, D)
        reads = None
        if cache is not None:
            k, v, reads = cache.append(k, v)
        y = attend(q, k, v, spec, segments=segments, cache=reads)  # (B, T, H, D)
        return self.dropout(self.c_proj(y.flatten(2)))  # (B, T, C)


class MLP(nn.Module):
    """Every token by itself: widen four times, GELU, narrow again."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU(approximate="tanh" if config.gelu == "tanh" else "none")
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    """Attention, then MLP, each on a normalized copy and added back to the residual stream."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = LayerNorm(config)
        self.mlp = MLP(config)

    def forward(
        self,
        x: Tensor,
        attend: Callable[..., Tensor],
        spec: Spec,
        segments: Tensor | None,
        cache: Any = None,
    ) -> Tensor:
        x = x + self.attn(self.ln_1(x), attend, spec, segments, cache)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """A GPT-2 language model whose attention kernel is chosen by `config.attention_backend`."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.onednn = False  # see use_onednn()
        self.compiled = False  # set before torch.compile, so that attention is resolved for it
        self._resolved: dict[tuple[Any, ...], tuple[Resolution, Spec]] = {}
        self.transformer: Any = nn.ModuleDict(
            {
                "wte": nn.Embedding(config.vocab_size, config.n_embd),
                "wpe": nn.Embedding(config.block_size, config.n_embd),
                "drop": nn.Dropout(config.dropout),
                "h": nn.ModuleList(Block(config) for _ in range(config.n_layer)),
                "ln_f": LayerNorm(config),
            }
        )
        # The head has no weights of its own: it is the transposed token embedding (tied weights,
        # Press & Wolf 2017, arXiv 1608.05859).
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):  # 2 * n_layer of them add up in the residual stream
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        segments: Tensor | None = None,
        cache: Any = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The loss where there are targets, else the logits.

        Args:
            idx: (B, T) int64 token ids, T <= block_size.
            targets: (B, T) int64, the token after each; -1 counts for nothing.
            segments: (B, T) int32; a token sees only its own segment.
            cache: one step of a KV cache; see hidden().

        Returns:
            (None, loss): mean cross entropy in nats a token, float32, shape (); the logits of the
            whole batch, the largest tensor of all, never exist at once. Without targets
            (logits, None): (B, T, V).
        """
        x = self.hidden(idx, segments, cache)
        if targets is None:
            return self.head(x), None
        return None, linear_cross_entropy(
            x.flatten(0, 1), self.transformer.wte.weight, targets.flatten(), self.onednn
        )

    def hidden(self, idx: Tensor, segments: Tensor | None = None, cache: Any = None) -> Tensor:
        """(B, T) token ids -> (B, T, C), what the head reads.

        Args:
            cache: one step of a KV cache (inference/cache.py): the tokens stored in it come before
                idx, and idx joins them. Its positions and its segments hold.

        Raises:
            ValueError: the tokens do not fit into block_size, or segments beside a cache.
        """
        T = idx.shape[1]
        kind, page_size = "none", None
        if cache is None:
            if self.config.block_size < T:
                raise ValueError(f"{T} tokens do not fit into block_size {self.config.block_size}")
            pos = torch.arange(T, device=idx.device)
        elif segments is not None:
            raise ValueError("segments cannot be given with a cache, which keeps its own")
        else:
            kind, page_size = cache.kind, cache.page_size
            pos, segments = cache.positions(T), cache.segments
        chosen, spec = self.attention(segments is not None, (idx.shape[0], T), kind, page_size)
        attend = chosen.backend.attend
        x = self.transformer.wte(idx) + self.transformer.wpe(pos)  # (B, T, C) + (T or B, T, C)
        x = self.transformer.drop(x.to(self.residual_dtype))
        for i, block in enumerate(self.transformer.h):
            if self.config.gradient_checkpointing and self.training:
                x = checkpoint(block, x, attend, spec, segments, use_reentrant=False)
            else:
                x = block(x, attend, spec, segments, cache.view(i) if cache is not None else None)
        return self.transformer.ln_f(x)

    def head(self, x: Tensor) -> Tensor:
        """(..., C) -> (..., V) logits."""
        return linear(x, self.transformer.wte.weight, None, self.onednn)

    def attention(
        self,
        segments: bool = False,
        shape: tuple[int, int] | None = None,
        cache: str = "none",
        page_size: int | None = None,
        compiled: bool = False,
    ) -> tuple[Resolution, Spec]:
        """The backend for this phase, device and dtype: resolved when first asked for, and kept.

        Call it once before torch.compile, which cannot trace the probe.

        Args:
            segments: whether there will be any.
            shape: batch size and tokens of a sequence; None: one sequence of block_size tokens.
            cache, page_size: as in Spec.
            compiled: it will run inside torch.compile, whatever self.compiled says.
        """
        weight = self.transformer.wte.weight
        device = weight.device
        autocast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if autocast else weight.dtype
        compiled = compiled or self.compiled or torch.compiler.is_compiling()
        key = (str(device), dtype, self.training, torch.is_grad_enabled(), segments, compiled,
               cache, page_size)  # fmt: skip
        if key not in self._resolved:
            self._resolve(key, shape or (1, self.config.block_size))
        return self._resolved[key]

    @torch.compiler.disable
    def _resolve(self, key: tuple[Any, ...], shape: tuple[int, int]) -> None:
        device, dtype, training, grad, segments, compiled, cache, page_size = key
        config = self.config
        spec = config.spec(
            str(dtype).removeprefix("torch."),
            training=training,
            segments=segments,
            grad=grad,
            compiled=compiled,
            cache=cache,
            page_size=page_size,
        )
        if config.sdpa_flash_impl != "FA2" or device.startswith("cuda"):
            attention.use_flash_impl(config.sdpa_flash_impl)
        guard = config.allow_mps_sdpa
        if config.attention_backend == "fastest":
            B, T = shape
            # With a cache nearly all calls decode: one query, and in the end block_size keys.
            full = (B, T, T) if cache == "none" else (B, 1, config.block_size)
            chosen = attention.fastest(spec, device, full, allow_mps_sdpa=guard)
        else:
            chosen = attention.select(
                config.attention_backend,
                spec,
                device,
                config.attention_fallback,
                allow_mps_sdpa=guard,
                shape=shape,
            )
        known = {(r.backend.name, r.kernels) for r, _ in self._resolved.values()}
        other = known and (chosen.backend.name, chosen.kernels) not in known
        phase = f" with the {cache} cache" if cache != "none" else " for evaluation"
        attention.announce(chosen, phase if other and not training else "")
        self._resolved[key] = (chosen, spec)

    @property
    def residual_dtype(self) -> torch.dtype:
        """What x is between the blocks: the weights' dtype, or autocast's."""
        device = self.transformer.wte.weight.device.type
        if self.config.residual_dtype == "autocast" and torch.is_autocast_enabled(device):
            return torch.get_autocast_dtype(device)
        return self.transformer.wte.weight.dtype

    def use_onednn(self, on: bool) -> None:
        """Take oneDNN for float32 products in the linear layers and the loss: core/cpu_matmul.py.

        On the CPU only; it does nothing under autocast, nor in a compiled training step.
        """
        self.onednn = on
        for module in self.modules():
            if isinstance(module, Linear):
                module.onednn = on

    def num_params(self, positions: bool = True) -> int:
        """How many parameters; positions=False leaves the position embeddings out."""
        n = sum(p.numel() for p in self.parameters())
        return n if positions else n - self.transformer.wpe.weight.numel()

    def crop_block_size(self, block_size: int) -> None:
        """Keep the first `block_size` positions only.

        Raises:
            ValueError: more positions than there are.
        """
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(
                f"block_size can only be cropped, from {self.config.block_size}; got {block_size}"
            )
        wpe = self.transformer.wpe
        wpe.weight = nn.Parameter(wpe.weight.detach()[:block_size].clone())
        wpe.num_embeddings = block_size
        self.config = replace(self.config, block_size=block_size)

    @classmethod
    def from_pretrained(cls, source: str, **changes: Any) -> GPT:
        """GPT-2 weights from a local folder or from the hub ("gpt2", "gpt2-xl", ...).

        Args:
            source: a folder as `transformers` writes it, or a hub name.
            changes: GPTConfig fields that differ (dropout, attention_backend, ...).
        """
        from checkpoint import load_hf

        return load_hf(source, **changes)

    def generate(self, idx: Tensor | Sequence[Any], max_new_tokens: int, **options: Any) -> Any:
        """Append `max_new_tokens` sampled tokens: engine.generate(), which has the options."""
        return engine.generate(self, idx, max_new_tokens, **options)

    def stream(
        self, idx: Tensor | Sequence[Any], max_new_tokens: int, **options: Any
    ) -> Iterator[Tensor]:
        """Sample tokens one at a time: engine.stream(), which has the options."""
        return engine.stream(self, idx, max_new_tokens, **options)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, onednn: bool) -> Tensor:
    """F.linear, with float32 products by oneDNN where that is asked for: core/cpu_matmul.py."""
    if onednn and x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu"):
        return cpu_matmul.linear(x, weight, bias)
    return F.linear(x, weight, bias)


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, onednn: bool = False
) -> Tensor:
    """Mean cross entropy of the logits x @ weight.T, without ever holding all of the logits.

    Args:
        x: (N, C); weight: (V, C); targets: (N,) int64, IGNORE (-1) where nothing is asked.
        onednn: take oneDNN for float32 products on the CPU; see core/cpu_matmul.py.

    Returns:
        float32 (), float64 for float64 inputs, in nats. NaN, with zero gradients, where nothing is
        asked at all, as F.cross_entropy gives.
    """
    dtype = x.dtype
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    # ctx.needs_input_grad is True under no_grad too, where the gradients would be for nothing.
    want_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    onednn = onednn and dtype == torch.float32 and not torch.compiler.is_compiling()
    return _LinearCrossEntropy.apply(x, weight, targets, dtype, want_grad, onednn)


class _LinearCrossEntropy(torch.autograd.Function):
    """Head and loss together, a chunk of rows at a time, gradients included.

    The gradient of the mean loss with respect to the logits is (softmax - onehot) / n: it needs
    nothing from above but one factor. So while a chunk of logits is at hand, the forward pass takes
    its share of dx and dweight too, and the chunk's memory is used again for the next: the
    logits are never stored, and nothing is recomputed.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype,
        want_grad: bool, onednn: bool,
    ) -> Tensor:  # fmt: skip
        N, V = x.shape[0], weight.shape[0]
        rows = chunk_rows(N, V, x.device.type)
        if dtype == torch.float16:  # a sum over more rows, all of one token, could pass 65504
            rows = min(rows, 4096)
        wide = torch.promote_types(dtype, torch.float32)
        x_, w = x.to(dtype), weight.to(dtype)
        counted = targets != IGNORE  # (N,)
        target = targets.masked_fill(~counted, 0)[:, None]  # (N, 1)
        dx = torch.empty_like(x_) if want_grad else None
        dw = torch.zeros_like(weight, dtype=wide) if want_grad else None
        total = torch.zeros((), dtype=wide, device=x.device)
        with torch.autocast(x.device.type, enabled=False), cpu_matmul.onednn(onednn):
            for a in range(0, N, rows):
                c = slice(a, min(a + rows, N))
                logp = F.log_softmax(x_[c] @ w.t(), dim=-1, dtype=wide)  # (rows, V)
                total -= logp.gather(1, target[c])[:, 0].mul(counted[c]).sum()
                if dx is not None and dw is not None:
                    if torch.compiler.is_compiling():  # a comparison fuses; a scatter would not
                        onehot = torch.arange(V, device=x.device) == target[c]  # (rows, V)
                        dlogits = torch.where(onehot, logp.exp() - 1, logp.exp())
                    else:
                        dlogits = logp.exp_()
                        minus_1 = dlogits.new_full((), -1.0).expand(c.stop - a, 1)
                        dlogits.scatter_add_(1, target[c], minus_1)
                    dlogits = dlogits.mul_(counted[c, None]).to(dtype)
                    torch.mm(dlogits, w, out=dx[c])
                    if dtype == wide:
                        dw.addmm_(dlogits.t(), x_[c])
                    else:
                        dw += dlogits.t() @ x_[c]
        n = counted.sum()
        ctx.save_for_backward(dx, dw, n)
        ctx.dtypes = x.dtype, weight.dtype
        return total / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, n = ctx.saved_tensors
        # Late, so that float16 gradients meet the loss scale before they underflow; and in dw's
        # float32, for a scale rounded to bfloat16 is off by up to 0.4 %, and 65536 has no float16.
        scale = grad / n.clamp(min=1)
        dx, dw = dx.to(dw.dtype).mul_(scale), dw.mul_(scale)
        return dx.to(ctx.dtypes[0]), dw.to(ctx.dtypes[1]), None, None, None, None


def chunk_rows(N: int, V: int, device: str) -> int:
    """Rows of logits at a time: enough for an efficient product, few enough to stay in caches."""
    budget = 2**24 if device == "cpu" else 2**28  # numbers: 64 MB and 1 GB of float32
    return max(1, min(N, budget // V))
