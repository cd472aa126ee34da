"""FLOPs per token, peak rates and MFU (Chowdhery et al. 2022, PaLM, arXiv 2204.02311, appendix B):

    MFU = FLOPs per token * tokens per second / (peak FLOP/s * number of devices)

    mfu          6 N + 12 L H Q T per token. N: parameters without embeddings that are only looked
                 up; L layers, H heads of Q channels, T tokens in a sequence.
    mfu_causal   T replaced by the mean number of keys that a query sees.

Recomputation is not counted.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date, datetime, timezone
from functools import partial, singledispatch
from pathlib import Path
from typing import Any, Literal

import torch

from attention.machine.system import synchronize
from attention.plan import store, stored
from core.cpu import matmul as cpu_matmul
from core.gpus import find_rated
from core.runtime import describe

Row = dict[str, Any]  # of metrics.jsonl
Sizes = Any  # a GPTConfig, or counted ones (bench/parts.py)


def matrices(config: Sizes) -> list[tuple[int, int, bool]]:
    """(outputs, inputs, bias?) of c_attn, attn.c_proj, c_fc and mlp.c_proj."""
    C, bias = config.n_embd, config.bias is True
    q, kv = config.n_head * config.head_dim, config.kv_heads * config.head_dim
    fc = config.hidden * (2 if config.mlp == "swiglu" else 1)
    qkv = (q + 2 * kv, C, bool(config.bias))
    return [qkv, (C, q, bias), (fc, C, bias), (C, config.hidden, bias)]


def n_params(config: Sizes) -> int:
    """N, by arithmetic."""
    norm = config.n_embd * (2 if config.norm == "layer" and config.bias is True else 1)
    block = sum(rows * (columns + bias) for rows, columns, bias in matrices(config))
    block += 2 * norm + 2 * config.head_dim * config.qk_norm
    return config.vocab_size * config.n_embd + config.n_layer * block + norm


def mean_keys(T: int, window: int | None = None) -> float:
    w = min(T, window or T)
    return (w * (w + 1) // 2 + (T - w) * w) / T


def keys_seen(starts: torch.Tensor, windows: tuple[int | None, ...]) -> torch.Tensor:
    """Mean keys per query and layer, float32 (); starts (B, T): where a query's document begins."""
    T = starts.shape[1]
    keys = torch.arange(1, T + 1, device=starts.device) - starts
    means = {window: keys.clamp(max=window or T).float().mean() for window in {*windows}}
    return torch.stack([means[window] for window in windows]).mean()


@singledispatch  # bench/parts.py adds counted models
def flops_per_token(config: Sizes, T: int, causal: bool = False) -> float:
    """FLOPs forward and backward; causal: of visible pairs only."""
    keys = sum(mean_keys(T, window) if causal else T for window in config.windows)
    return 6 * n_params(config) + 12 * config.n_head * config.head_dim * keys


# --- the peak rate ---


@dataclass(frozen=True)
class Peak:
    tflops: float  # 1e12 FLOP/s of one device
    source: str  # "datasheet: ...", "measured ...: ..." or "--peak_tflops"

    def __str__(self) -> str:
        return f"{self.tflops:,.4g} TFLOP/s ({self.source})"

    @property
    def measured(self) -> bool:
        return self.source.startswith("measured")

    @property
    def of(self) -> str:
        """Suffix of a figure with another peak than the datasheet's."""
        return " of measured peak" if self.measured else given(self.source)


def given(source: str) -> str:
    return f" of {source}" if source.startswith("--") else ""


def datasheet_peak(name: str, dtype: str, tf32: bool = False) -> Peak | None:
    if not (gpu := find_rated(name)):
        return None
    half, in_tf32, single = gpu.tflops
    bfloat16 = half if in_tf32 else None  # Ampere brought both
    rates = {"float16": half, "bfloat16": bfloat16, "float32": in_tf32 if tf32 else single}
    return Peak(rate, f"datasheet: {gpu.source}") if (rate := rates.get(dtype)) else None


def peak(device: str | torch.device, dtype: str,
         wanted: float | Literal["measure"] | None = None) -> Peak:  # fmt: skip
    """`wanted` (TFLOP/s), else the datasheet's, else a measured peak."""
    if wanted is not None and wanted != "measure":
        return Peak(wanted, "--peak_tflops")
    device = torch.device(device)
    cuda = device.type == "cuda"
    tf32 = cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"
    if cuda and (known := datasheet_peak(torch.cuda.get_device_name(device), dtype, tf32)):
        return known
    what = f"TFLOP/s, {dtype}{' in TF32' if tf32 and dtype == 'float32' else ''}"
    measure = partial(measured_tflops, device, getattr(torch, dtype))
    rate, when = kept_rate(what, device, measure, again=wanted == "measure")
    return Peak(rate, f"{when}: the best of several large matrix products")


def kept_rate(what: str, device: torch.device, measure: Callable[[], float],
              again: bool) -> tuple[float, str]:  # fmt: skip
    """A rate, kept for later, and its age; measured again after a busy time."""
    key = f"{what}, {describe(device)}, torch {torch.__version__}"
    today = datetime.now(timezone.utc).date()
    try:
        rate, day, busy = stored("rates.json")[key]
        age = (today - date.fromisoformat(day)).days
        again = again or not (math.isfinite(rate) and rate > 0) or (busy and not is_busy())
    except (ValueError, TypeError, LookupError):
        again = True
    if again:
        day, age, since = str(today), 0, clock()
        rate = measure()
        busy = device.type == "cpu" and disturbed(since)
        store(key, [rate, day, busy], "rates.json")
    when = f"measured {day}, " + (f"{age} day{'s' * (age > 1)} ago" if age else "today")
    return rate, when + (", while other programs used these cores" if busy else "")


def clock() -> tuple[float, float]:
    """Seconds now, and those spent waiting for a core (0: not Linux)."""
    try:
        waited = int(Path("/proc/thread-self/schedstat").read_text(encoding="ascii").split()[1])
    except OSError:
        waited = 0
    return time.perf_counter(), waited / 1e9


def disturbed(since: tuple[float, float]) -> bool:
    """True if a tenth of the time since that clock() went by waiting."""
    passed, waited = (b - a for a, b in zip(since, clock()))
    return waited > max(0.01, 0.1 * passed)


def is_busy() -> bool:
    since = clock()
    while time.perf_counter() < since[0] + 0.1:
        pass
    return disturbed(since)


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """Best rate of large matrix products."""
    own = torch.Generator(device).manual_seed(0)
    kinds: list[Callable[..., torch.Tensor]] = [torch.mm]
    if device.type == "cpu" and dtype == torch.float32 and cpu_matmul.exact():
        kinds.append(cpu_matmul.matmul)
    cuda = device.type == "cuda"
    at_a_time, least = (10, 0.5) if cuda else (1, 0.0)  # a GPU raises its clocks while it works
    best, began = 0.0, time.perf_counter()
    for i, n in enumerate((4096, 8192) if cuda else (1024, 1536, 2048)):
        a, b = torch.randn(2, n, n, device=device, generator=own).to(dtype)
        for count in itertools.count():
            passed = time.perf_counter() - began
            enough = count >= 8 * len(kinds) and passed >= least * (i + 1)
            if enough or (best and passed > 4):  # float16 is slow on a CPU
                break
            synchronize(device)
            start = time.perf_counter()
            for _ in range(at_a_time):
                kinds[count % len(kinds)](a, b)
            synchronize(device)
            best = max(best, at_a_time * 2 * n**3 / (time.perf_counter() - start))
    return best / 1e12


# --- MFU ---


@dataclass(frozen=True)
class Speed:
    model: Sizes
    T: int
    tokens_per_s: float
    peak: Peak
    devices: int = 1
    keys: float | None = None  # keys_seen(); None: no document mask
    why_not: str = ""  # reason to leave MFU out

    @property
    def mfu(self) -> tuple[float, float]:
        """(mfu, mfu_causal), fractions of the peak."""
        m = self.model
        full = flops_per_token(m, self.T)
        if self.keys is None:
            causal = flops_per_token(m, self.T, causal=True)
        else:
            causal = full - 12 * m.n_head * m.head_dim * m.n_layer * (self.T - self.keys)
        at_peak = self.tokens_per_s / (self.peak.tflops * 1e12 * self.devices)
        return full * at_peak, causal * at_peak

    def row(self) -> Row:
        """Of records; MFU above 1 is None, with "mfu_why"."""
        full, causal = self.mfu
        row: Row = {"tokens_per_s": self.tokens_per_s, "mfu": full, "mfu_causal": causal}
        above = f"the run exceeds the peak of {self.peak}"
        if self.why_not or causal > 1:  # every kernel does these operations
            row |= {"mfu": None, "mfu_causal": None, "mfu_why": self.why_not or above}
        elif full > 1:  # a kernel may leave out the masked pairs
            row |= {"mfu": None, "mfu_why": f"with the masked pairs {above}"}
        return row

    def __str__(self) -> str:
        return f"{self.tokens_per_s:,.0f} tok/s, {in_words(self.row(), self.peak.of)}"


def in_words(row: Row, of: str = "") -> str:
    """ "mfu 41.2% (causal 39.6%)", or why not."""
    known = "" if row["mfu_causal"] is None else f" (causal {row['mfu_causal']:.1%}){of}"
    if row["mfu"] is None:
        return f"mfu not known{known}: {row['mfu_why']}"
    return f"mfu {row['mfu']:.1%}{known}"
