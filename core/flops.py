"""FLOPs per token, peak rates, MFU: every formula with its source.

Model FLOPs utilization (MFU, Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B) is the rate
of the operations that the model's mathematics needs, over the device's peak rate:

    mfu = FLOPs per token * tokens per second / (peak FLOP/s * number of devices)

Recomputation (gradient checkpointing, a flash kernel's backward) is never counted, so two runs of
one model compare whatever their kernels do. Two counts stand side by side:

    mfu          6 N + 12 L H Q T per token, as in PaLM and nanoGPT: the whole T x T square of
                 scores. N: parameters without the position embeddings; L layers, H heads of Q
                 channels, T tokens in a sequence.
    mfu_causal   the same with T replaced by the mean number of keys that a query sees: (T + 1) / 2,
                 fewer with a sliding window.

6 N: a multiply and an add for each weight forward, twice that backward (gradients of the input and
of the weight). 12 L H Q T: QK^T and PV take 2 * 2 * Q * T forward a head, twice that backward. What
this leaves out (softmax, norms, GELU), or counts though it multiplies nothing (biases, norm gains),
is held against torch's FlopCounterMode in tests/test_flops.py.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from attention import visible
from attention.gpus import datasheet_bandwidth as datasheet_bandwidth
from attention.gpus import datasheet_tflops
from core import cpu_matmul
from core.runtime import synchronize


class Sizes(Protocol):
    """What the count has to know of a model: the fields of its GPTConfig."""

    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def bias(self) -> bool: ...
    @property
    def attention_window(self) -> int | None: ...


@dataclass(frozen=True)
class Peak:
    """The rate that MFU is measured against."""

    tflops: float  # 1e12 FLOP/s of one device
    source: str  # "datasheet: ...", "measured: ..." or "--peak_tflops"

    @property
    def measured(self) -> bool:
        """Whether it was measured here: a busy machine may have given too little."""
        return self.source.startswith("measured")

    def __str__(self) -> str:
        return f"{self.tflops:,.4g} TFLOP/s ({self.source})"


def datasheet_peak(name: str, dtype: str, tf32: bool = False) -> Peak | None:
    """The peak of the device of that name, None where attention/gpus.py does not know it.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        tf32: whether float32 products run in TF32.
    """
    known = datasheet_tflops(name, dtype, tf32)
    return known and Peak(*known)


def measured_peak(device: str | torch.device, dtype: torch.dtype) -> Peak:
    """The best rate of several large square matrix products: what this device really gives.

    It leaves the random state alone, as a run that is resumed must find it.
    """
    device = torch.device(device)
    best = 0.0
    own = torch.Generator(device).manual_seed(0)
    # A run may take oneDNN for its float32 products: where that is exact, its rate is the device's.
    plain = device.type != "cpu" or dtype != torch.float32 or not cpu_matmul.exact()
    kinds = (torch.mm,) if plain else (torch.mm, cpu_matmul.matmul)
    began = time.perf_counter()
    for n in (4096, 8192) if device.type == "cuda" else (1024, 1536, 2048):
        a, b = torch.randn(2, n, n, device=device, generator=own).to(dtype)
        for multiply in kinds * 8:
            if best and time.perf_counter() - began > 4:  # float16 on a CPU: 200 times slower
                break
            synchronize(device)
            start = time.perf_counter()
            multiply(a, b)
            synchronize(device)
            best = max(best, 2 * n**3 / (time.perf_counter() - start))
    return Peak(best / 1e12, "measured: the best of several large matrix products")


def peak(device: str | torch.device, dtype: str, override: float | None = None) -> Peak:
    """The peak rate to measure against: the user's, else the datasheet's, else a measured one.

    Args:
        override: TFLOP/s given by --peak_tflops.
    """
    if override is not None:
        return Peak(override, "--peak_tflops")
    device = torch.device(device)
    if device.type == "cuda":
        tf32 = torch.backends.cuda.matmul.allow_tf32
        if known := datasheet_peak(torch.cuda.get_device_name(device), dtype, tf32):
            return known
    return measured_peak(device, getattr(torch, dtype))


def n_params(config: Sizes) -> int:
    """N: the parameters of GPT(config) without its position embeddings, by arithmetic."""
    C, kv = config.n_embd, config.kv_heads * config.head_dim
    weights = C * (C + 2 * kv) + C * C + 8 * C * C  # c_attn, attention c_proj, MLP
    biases = (C + 2 * kv) + C + 4 * C + C if config.bias else 0
    norm = C * (2 if config.bias else 1)
    return config.vocab_size * C + config.n_layer * (weights + biases + 2 * norm) + norm


@cache  # the loop asks at every line that it logs
def mean_keys(T: int, window: int | None = None) -> float:
    """How many keys a query of a sequence of T sees in the mean; see attention.visible.

    >>> mean_keys(4), mean_keys(4, window=2)
    (2.5, 1.75)
    """
    i = torch.arange(T)
    if T <= 2048:  # count the definition itself
        return float(visible(i[:, None], i[None, :], 0, window).sum()) / T
    return float((i + 1).clamp(max=window or T).sum()) / T


def flops_per_token(config: Sizes, T: int, causal: bool = False) -> float:
    """Floating-point operations that one trained token needs, forward and backward.

    Args:
        T: the length actually trained on.
        causal: count only the pairs of query and key that are visible.
    """
    keys = mean_keys(T, config.attention_window) if causal else T
    return 6 * n_params(config) + 12 * config.n_layer * config.n_head * config.head_dim * keys


def mfu(
    config: Sizes, T: int, tokens_per_second: float, peak: Peak, devices: int = 1
) -> tuple[float, float]:
    """(mfu, mfu_causal), each a fraction of the peak of all devices together."""
    full, causal = (flops_per_token(config, T, causal=c) for c in (False, True))
    per_flop = tokens_per_second / (peak.tflops * 1e12 * devices)
    return full * per_flop, causal * per_flop


@dataclass(frozen=True)
class Speed:
    """A run's tokens a second, and what share of the peak that is."""

    model: Sizes
    T: int
    tokens_per_s: float
    peak: Peak
    devices: int = 1

    def row(self) -> dict[str, float]:
        """As metrics.jsonl has it."""
        full, causal = mfu(self.model, self.T, self.tokens_per_s, self.peak, self.devices)
        return {"tokens_per_s": self.tokens_per_s, "mfu": full, "mfu_causal": causal}

    def __str__(self) -> str:
        row = self.row()
        of = " of measured peak" if self.peak.measured else ""
        share = f"mfu {row['mfu']:.1%} (causal {row['mfu_causal']:.1%}){of}"
        return f"{self.tokens_per_s:,.0f} tok/s, {share}"
