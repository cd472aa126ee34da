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

import re
import time
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from attention import visible
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


# Dense rates in TFLOP/s (never the sparse figure), half precision with float32 accumulation.
# How torch.cuda.get_device_name ends, {dtype: rate}, datasheet. A variant with a longer name
# ("Laptop GPU", "D", a MIG slice, a vGPU) has other rates: no pattern matches it.
_H100 = {"half": 989.4, "tf32": 494.7, "float32": 66.9}
_H100_NVL = {"half": 835.5, "tf32": 417.5, "float32": 60}
_A100 = {"half": 312, "tf32": 156, "float32": 19.5}
PEAKS: list[tuple[str, dict[str, float], str]] = [
    ("B200", {"half": 2250, "tf32": 1125, "float32": 75}, "NVIDIA HGX B200 datasheet"),
    ("H200 NVL", _H100_NVL, "NVIDIA H200 datasheet"),
    ("H200", _H100, "NVIDIA H200 datasheet"),
    (r"GH200 \d+GB?( HBM3e)?", _H100, "NVIDIA GH200 datasheet"),
    ("H100 NVL", _H100_NVL, "NVIDIA H100 datasheet"),
    ("H[18]00 PCIe", {"half": 756, "tf32": 378, "float32": 51.2}, "NVIDIA H100 datasheet"),
    ("H100 80GB HBM3|H800", _H100, "NVIDIA H100 whitepaper"),
    ("A[18]00(-SXM4?|-PCIE)?[- ][48]0GB( PCIe| Active)?", _A100, "NVIDIA A100 datasheet"),
    ("A40", {"half": 149.7, "tf32": 74.8, "float32": 37.4}, "NVIDIA A40 datasheet"),
    ("A30", {"half": 165, "tf32": 82, "float32": 10.3}, "NVIDIA A30 datasheet"),
    ("A10", {"half": 125, "tf32": 62.5, "float32": 31.2}, "NVIDIA A10 datasheet"),
    ("L40S", {"half": 362, "tf32": 183, "float32": 91.6}, "NVIDIA L40S datasheet"),
    ("L40", {"half": 181, "tf32": 90.5, "float32": 90.5}, "NVIDIA L40 datasheet"),
    ("L4", {"half": 121, "tf32": 60, "float32": 30.3}, "NVIDIA L4 datasheet"),
    ("RTX 5090", {"half": 209.5, "tf32": 104.8, "float32": 104.8}, "NVIDIA RTX Blackwell paper"),
    ("RTX 4090", {"half": 165.2, "tf32": 82.6, "float32": 82.6}, "NVIDIA Ada whitepaper"),
    ("RTX 3090 Ti", {"half": 80, "tf32": 40, "float32": 40}, "NVIDIA GA102 whitepaper"),
    ("RTX 3090", {"half": 71, "tf32": 35.6, "float32": 35.6}, "NVIDIA GA102 whitepaper"),
    ("RTX A6000", {"half": 154.8, "tf32": 77.4, "float32": 38.7}, "NVIDIA RTX A6000 datasheet"),
    ("TITAN RTX", {"float16": 130.5, "float32": 16.3}, "NVIDIA Turing whitepaper"),
    ("T4", {"float16": 65, "float32": 8.1}, "NVIDIA T4 datasheet"),
    ("V100-PCIE-(16|32)GB", {"float16": 112, "float32": 14}, "NVIDIA V100 datasheet"),
    ("V100-SXM2-(16|32)GB", {"float16": 125, "float32": 15.7}, "NVIDIA V100 datasheet"),
    ("MI300X( OAM| VF)?", {"half": 1307.4, "tf32": 653.7, "float32": 163.4}, "AMD datasheet"),
]


# Bytes a second between the device's memory and its chip, in GB/s: how the name ends, rate,
# datasheet. As in PEAKS, a longer name is another device.
BANDWIDTHS: list[tuple[str, float, str]] = [
    ("B200", 8000, "NVIDIA DGX B200 datasheet"),
    ("H200( NVL)?", 4800, "NVIDIA H200 datasheet"),
    (r"GH200 \d+GB? HBM3e", 4900, "NVIDIA GH200 datasheet"),
    (r"GH200 \d+GB?", 4000, "NVIDIA GH200 datasheet"),
    ("H100 NVL", 3900, "NVIDIA H100 datasheet"),
    ("H[18]00 PCIe", 2000, "NVIDIA H100 datasheet"),
    ("H100 80GB HBM3|H800", 3350, "NVIDIA H100 datasheet"),
    ("A[18]00-SXM4?-80GB", 2039, "NVIDIA A100 datasheet"),
    ("A[18]00 80GB PCIe", 1935, "NVIDIA A100 datasheet"),
    ("A[18]00(-SXM4?|-PCIE)?[- ]40GB( PCIe| Active)?", 1555, "NVIDIA A100 datasheet"),
    ("A40", 696, "NVIDIA A40 datasheet"),
    ("A30", 933, "NVIDIA A30 datasheet"),
    ("A10", 600, "NVIDIA A10 datasheet"),
    ("L40S?", 864, "NVIDIA L40S datasheet"),
    ("L4", 300, "NVIDIA L4 datasheet"),
    ("RTX 5090", 1792, "NVIDIA RTX Blackwell paper"),
    ("RTX 4090|RTX 3090 Ti", 1008, "NVIDIA Ada and GA102 whitepapers"),
    ("RTX 3090", 936, "NVIDIA GA102 whitepaper"),
    ("RTX A6000", 768, "NVIDIA RTX A6000 datasheet"),
    ("TITAN RTX", 672, "NVIDIA Turing whitepaper"),
    ("T4", 320, "NVIDIA T4 datasheet"),
    ("V100-(PCIE|SXM2)-(16|32)GB", 900, "NVIDIA V100 datasheet"),
    ("MI300X( OAM| VF)?", 5300, "AMD datasheet"),
]


def datasheet_bandwidth(name: str) -> tuple[float, str] | None:
    """Bytes a second of the device of that name and where that stands, None where it is unknown."""
    for pattern, rate, source in BANDWIDTHS:
        if re.search(rf"\b({pattern})$", name):
            return rate * 1e9, f"datasheet: {source}"
    return None


def datasheet_peak(name: str, dtype: str, tf32: bool = False) -> Peak | None:
    """The peak of the device of that name, None where the table does not know it.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        tf32: whether float32 products run in TF32.
    """
    wanted: tuple[str, ...] = ("tf32",) if dtype == "float32" and tf32 else (dtype,)
    if dtype in ("float16", "bfloat16"):
        wanted = (dtype, "half")
    for pattern, rates, source in PEAKS:
        if re.search(rf"\b({pattern})$", name):
            rate = next((rates[w] for w in wanted if w in rates), None)
            return None if rate is None else Peak(rate, f"datasheet: {source}")
    return None


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
