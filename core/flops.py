"""FLOPs per token and MFU: every formula with its source. The peak rates: core/peaks.py.

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
this leaves out (softmax with scale, softcap and sinks; norms; GELU), or counts though it multiplies
nothing (biases, norm gains), is held against torch's FlopCounterMode in tests/test_flops.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any, Protocol

import torch

from attention import visible
from attention.machine.gpus import datasheet_bandwidth as datasheet_bandwidth
from core.peaks import Peak as Peak
from core.peaks import datasheet_peak as datasheet_peak
from core.peaks import peak as peak


class Sizes(Protocol):
    """The sizes of a model, as its GPTConfig has them."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def n_embd(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def bias(self) -> bool: ...
    @property
    def attention_window(self) -> int | None: ...


def n_params(config: Sizes) -> int:
    """N: the parameters of GPT(config) without its position embeddings, by arithmetic."""
    C, kv = config.n_embd, config.kv_heads * config.head_dim
    weights = C * (C + 2 * kv) + C * C + 8 * C * C  # c_attn, attention c_proj, MLP
    biases = (C + 2 * kv) + C + 4 * C + C if config.bias else 0
    norm = C * (2 if config.bias else 1)
    return config.vocab_size * C + config.n_layer * (weights + biases + 2 * norm) + norm


@cache  # the loop asks at every line that it logs
def mean_keys(T: int, window: int | None = None) -> float:
    """How many keys a query of a sequence of T sees on average; see attention.visible.

    >>> mean_keys(4), mean_keys(4, window=2)
    (2.5, 1.75)
    """
    i = torch.arange(T)
    if T <= 2048:  # count the definition itself
        return float(visible(i[:, None], i[None, :], 0, window).sum()) / T
    return float((i + 1).clamp(max=window or T).sum()) / T


@singledispatch  # bench/hf.py adds models that were counted
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

    @property
    def mfu(self) -> float:
        """The quotient itself, which exceeds 1 if the peak is too low."""
        return mfu(self.model, self.T, self.tokens_per_s, self.peak, self.devices)[0]

    def row(self) -> dict[str, Any]:
        """The fields of metrics.jsonl and the records. MFU above 1 is None; "mfu_why" is why."""
        full, causal = mfu(self.model, self.T, self.tokens_per_s, self.peak, self.devices)
        row: dict[str, Any] = {"tokens_per_s": self.tokens_per_s}
        row |= {"mfu": full, "mfu_causal": causal}
        if causal > 1:  # every kernel has to do these operations
            row |= {"mfu": None, "mfu_causal": None}
            row["mfu_why"] = f"the run exceeds the peak of {self.peak}"
        elif full > 1:  # not these: a kernel may leave out the masked pairs
            row["mfu"] = None
            row["mfu_why"] = f"with the masked pairs the run would exceed the peak of {self.peak}"
        return row

    def __str__(self) -> str:
        of = " of measured peak" if self.peak.measured else ""
        return f"{self.tokens_per_s:,.0f} tok/s, {in_words(self.row(), of)}"


def in_words(row: dict[str, Any], of: str = "") -> str:
    """The MFU of a row: "mfu 41.2% (causal 39.6%)", or why it is not known."""
    known = None if row["mfu_causal"] is None else f"(causal {row['mfu_causal']:.1%}){of}"
    if row["mfu"] is None:
        return f"mfu not known{f' {known}' if known else ''}: {row['mfu_why']}"
    return f"mfu {row['mfu']:.1%} {known}"
