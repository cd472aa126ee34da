"""The peak rate of a device in TFLOP/s, which MFU and rooflines compare with.

From --peak_tflops, else from a datasheet (attention/machine/gpus.py), else measured. A busy machine
measures too little, never too much.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from datetime import datetime, timezone

import torch

from attention.machine.gpus import datasheet_tflops
from core.cpu import matmul as cpu_matmul
from core.runtime import synchronize


@dataclass(frozen=True)
class Peak:
    """The rate that MFU is measured against."""

    tflops: float  # 1e12 FLOP/s of one device
    source: str  # "datasheet: ...", "measured 2026-11-22: ..." or "--peak_tflops"
    measured: bool = False  # on a busy machine this may be too low

    def __str__(self) -> str:
        return f"{self.tflops:,.4g} TFLOP/s ({self.source})"


def peak(device: str | torch.device, dtype: str, override: float | None = None) -> Peak:
    """The user's peak rate, else the datasheet's, else a measured one.

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
    return best_peak(device, dtype)


def datasheet_peak(name: str, dtype: str, tf32: bool = False) -> Peak | None:
    """The datasheet's peak of the GPU of that name, None if attention/machine/gpus.py lacks it.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        tf32: float32 products run in TF32.
    """
    known = datasheet_tflops(name, dtype, tf32)
    return known and Peak(*known)


def best_peak(device: str | torch.device, dtype: str) -> Peak:
    """Measure the peak rate, which takes seconds."""
    rate = measured_tflops(torch.device(device), getattr(torch, dtype))
    today = datetime.now(timezone.utc).date()
    return Peak(rate, f"measured {today}: the best of several large matrix products", True)


def measured_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """The best rate of several large square matrix products, in TFLOP/s.

    Leaves the global random state alone, so that a resumed run draws the same numbers.
    """
    best = 0.0
    own = torch.Generator(device).manual_seed(0)
    # A run may use oneDNN for float32 products: if that is exact, its rate counts too.
    plain = device.type != "cpu" or dtype != torch.float32 or not cpu_matmul.exact()
    kinds = (torch.mm,) if plain else (torch.mm, cpu_matmul.matmul)
    cuda, began = device.type == "cuda", time.perf_counter()
    # A GPU raises its clocks while it works, and a launch costs a tenth of a product: so half a
    # second for each size, and ten products between two looks at the clock.
    at_a_time, least = (10, 0.5) if cuda else (1, 0.0)
    for i, n in enumerate((4096, 8192) if cuda else (1024, 1536, 2048)):
        a, b = torch.randn(2, n, n, device=device, generator=own).to(dtype)
        for count in itertools.count():
            passed = time.perf_counter() - began
            if count >= 8 * len(kinds) and passed >= least * (i + 1):
                break
            if best and passed > 4:  # float16 on a CPU: 200 times slower
                break
            multiply = kinds[count % len(kinds)]
            synchronize(device)
            start = time.perf_counter()
            for _ in range(at_a_time):
                multiply(a, b)
            synchronize(device)
            best = max(best, at_a_time * 2 * n**3 / (time.perf_counter() - start))
    return best / 1e12
