"""The rates that a machine reaches at best: what MFU, MBU and rooflines are measured against.

A datasheet's rate counts where attention/gpus.py has one. Elsewhere it is measured; and a neighbour
that is busy meanwhile makes it too low, never too high. So the best that was ever measured is
remembered, with its date and the load of the machine then, under whatever could change it: a file
of its own in peaks/ of the project's cache folder ($NANOATTN_CACHE). Deleting it forgets it.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import platform
import time
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from attention.gpus import datasheet_tflops
from attention.system import cache_folder, cpu_name, write_at_once
from core import cpu_matmul
from core.runtime import synchronize

DOUBTFUL = 2  # times what is measured now: more than that is no ordinary neighbour

log = logging.getLogger("nanoattn")


@dataclass(frozen=True)
class Peak:
    """The rate that MFU is measured against."""

    tflops: float  # 1e12 FLOP/s of one device
    source: str  # "datasheet: ...", "measured 2026-11-22: ..." or "--peak_tflops"
    measured: bool = False  # a machine that was always busy may have given too little

    def __str__(self) -> str:
        return f"{self.tflops:,.4g} TFLOP/s ({self.source})"


def peak(device: str | torch.device, dtype: str, override: float | None = None) -> Peak:
    """The peak rate to measure against: the user's, else the datasheet's, else the best measured.

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
    """The peak of the device of that name, None where attention/gpus.py does not know it.

    Args:
        dtype: "float32", "bfloat16" or "float16".
        tf32: whether float32 products run in TF32.
    """
    known = datasheet_tflops(name, dtype, tf32)
    return known and Peak(*known)


def best_peak(device: str | torch.device, dtype: str) -> Peak:
    """Measured now, which takes seconds, or remembered, whichever is better."""
    device = torch.device(device)
    tf32 = device.type == "cuda" and dtype == "float32" and torch.backends.cuda.matmul.allow_tf32
    now, how = measured_tflops(device, getattr(torch, dtype))
    return Peak(*better(now, "TFLOP/s", how, device, dtype=dtype, tf32=tf32), measured=True)


def measured_tflops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """The best rate of several large square matrix products, in TFLOP/s, and how it was measured.

    It leaves the random state alone, as a run that is resumed must find it.
    """
    best = 0.0
    own = torch.Generator(device).manual_seed(0)
    # A run may take oneDNN for its float32 products: where that is exact, its rate is the device's.
    plain = device.type != "cpu" or dtype != torch.float32 or not cpu_matmul.exact()
    kinds = (torch.mm,) if plain else (torch.mm, cpu_matmul.matmul)
    cuda, began = device.type == "cuda", time.perf_counter()
    # A GPU raises its clocks while it works, and to launch a product and wait for it takes a tenth
    # of the product: so for half a second each size, and ten between two looks at the clock.
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
    return best / 1e12, "the best of several large matrix products"


# ----------------------------------------------------------------------------- what is remembered


def better(
    now: float, unit: str, how: str, device: torch.device, **conditions: Any
) -> tuple[float, str]:
    """The better of a rate that was measured just now and the best that is remembered.

    The better one is what is remembered from here on. Of processes that end together with better
    rates one wins: the file is whole in any case.

    Args:
        now: the rate, in `unit`.
        how: it was measured, in words.
        conditions: what else the rate depends on, beside machine, threads and PyTorch.

    Returns:
        the rate, and where it is from: "measured 2026-11-22: ...", with what is measured now, and
        a doubt where that is much less.
    """
    cuda = device.type == "cuda"
    about = {
        "what": f"{how}, {unit}",
        "device": device.type,
        "machine": torch.cuda.get_device_name(device) if cuda else cpu_name() or platform.machine(),
        "threads": None if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        **conditions,
    }
    date, busy = datetime.now(timezone.utc).isoformat(timespec="seconds"), load()
    try:
        digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
        path = cache_folder() / "peaks" / f"{digest[:16]}.json"
        known = _read(path)
        if known is None or known["rate"] < now:
            found = {**about, "rate": now, "date": date, "load": busy}
            write_at_once(path, json.dumps(found, indent=1) + "\n")
            known = None
    except OSError as e:
        log.warning("the best rate that was measured cannot be remembered (%s)", e)
        known = None
    if known is None:
        return now, f"measured {date[:10]}{_at(busy)}: {how}"
    source = f"measured {known['date'][:10]}{_at(known['load'])}: {how}; now {now:,.4g} {unit}"
    if known["rate"] > DOUBTFUL * now:
        source += (
            f"{_at(busy)}, a doubt: the machine is busy or throttled, or that was another "
            f"one of this name; peaks/{path.name} in the cache folder remembers it"
        )
    return known["rate"], source


def load() -> float | None:
    """How many processes wanted to run in the last minute, on average; None where unknown."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _at(load: float | None) -> str:
    return "" if load is None else f" at load {load:g}"


def _read(path: Path) -> dict[str, Any] | None:
    """What is remembered there; None where there is nothing that can be used."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        rate, date, load = known["rate"], known["date"], known["load"]
        datetime.fromisoformat(date)
        good = type(rate) is float and math.isfinite(rate) and rate > 0
        good = good and (load is None or type(load) in (int, float))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, OSError):
        good = False
    if not good:
        log.warning("%s is of no use; what is measured now replaces it", path)
        return None
    return {"rate": rate, "date": date, "load": load}
