"""Memory, bandwidth and description of a machine."""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import platform
import re
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path

import torch

import attention
from attention import Spec
from attention.machine.system import cpu_name
from attention.machine.timing import Clock
from attention.spec import Machine
from bench import Json
from bench.candidates import Candidate
from core import flops
from core.runtime import OUT_OF_MEMORY, describe, peak_memory
from core.settings import first_line

PACKAGES = ("torch", "triton", "flash_attn", "flash_attn_3", "transformers", "numpy")
PROCESS = Path("/proc/self")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
CONTEXT = 600_000_000  # bytes of a CUDA context, which no allocator counts
LARGEST_COPY = 2**30
SLICE = 2**26  # bytes of a copy on a CPU: a fraction of a scheduler's turn
NO_MEMORY = re.compile(f"bad_alloc|could not create a (primitive|memory)|{OUT_OF_MEMORY.pattern}")


def reset_peak(device: torch.device) -> bool:
    """Reset memory()'s peak; False if impossible."""
    gc.collect()
    empty_cache(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with suppress(OSError):
        return bool((PROCESS / "clear_refs").write_text("5", encoding="ascii"))
    return False


def memory(device: torch.device, peak: bool = True) -> int:
    """Bytes now, or their peak since reset_peak()."""
    if device.type == "cuda" and not peak:
        return torch.cuda.memory_allocated(device)
    if device.type == "cuda" or not PROCESS.exists():
        return peak_memory(device)
    return kilobytes(PROCESS / "status", "VmHWM" if peak else "VmRSS")


def kilobytes(file: Path, name: str) -> int:
    return 1024 * int(re.findall(rf"{name}:\s+(\d+) kB", file.read_text(encoding="utf-8"))[0])


def empty_cache(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if not MEMINFO.exists():
        return 0
    free = kilobytes(MEMINFO, "MemAvailable")
    limit = CGROUP / "memory.max"
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        used, stat = ((CGROUP / f"memory.{name}").read_text() for name in ("current", "stat"))
        files = int(re.findall(r"^inactive_file (\d+)", stat, re.M)[0])  # Linux frees them
        free = min(free, int(most) - int(used) + files)
    return free


def failure(error: BaseException) -> str:
    kinds = MemoryError, torch.OutOfMemoryError
    full = isinstance(error, kinds) or NO_MEMORY.search(str(error))
    why = first_line(error) if str(error).strip() else "no message"
    return f"{'out of memory' if full else type(error).__name__}: {why}"


def reason(error: Exception) -> str:
    """REASON of "attention backend 'x' cannot run here. x: REASON", or the message."""
    return str(error).partition(" cannot run here. ")[2].partition(": ")[2] or str(error)


def refusal(who: Candidate, point: Json, spec: Json,
            longest: int | None) -> tuple[str, str] | None:  # fmt: skip
    """Status and reason of a row, if a process could only refuse."""
    bench, name, T = who.bench, who.name, point.get("T", who.config.block_size)
    if why := bench.left_out.get(name):
        return "unavailable", why
    m, here = bench.machine, Machine.here("cpu")
    if m["kind"] != "cpu":
        capability = tuple(m["capability"] or ()) or None
        here = replace(here, device=m["kind"], name=m["name"], capability=capability)
    try:
        if name in bench.backends:
            attention.resolve(name, Spec(**{"dtype": m["dtype"], **spec}), here, who.config.policy)
    except attention.BackendUnavailable as e:
        return "unavailable", reason(e)
    if longest is not None and longest < T:
        beyond = f" beyond {longest:,} tokens" if longest else ""
        also = ", and --lengths" if bench.mode == "kernel" else ""
        return "skipped", f"left out{beyond}: name it in --backends{also}"
    return None


def bandwidth(device: torch.device, limit: int | None) -> float:
    """Bytes a second: the best of copies and reads."""
    free = min(f for f in (free_memory(device), limit, 2**50) if f)
    a = torch.ones(min(LARGEST_COPY, free // 4) // 4, device=device)
    b, cuda = torch.ones_like(a), device.type == "cuda"
    slices = [(a, b)] if cuda else [*zip(a.split(SLICE // 4), b.split(SLICE // 4))]
    clock, best, began = Clock(device), 0.0, time.perf_counter()
    least, sweeps = 0.5 if cuda else 0.0, 0  # seconds: a GPU raises its clocks
    while (passed := time.perf_counter() - began) < least or sweeps < (5 if passed < 4 else 2):
        for (x, y), copies in itertools.product(slices, (True, False)):
            start = clock.start()
            y.copy_(x) if copies else x.sum()
            best = max(best, (1 + copies) * x.nbytes / (clock.ms(start, clock.stop()) / 1e3))
        sweeps += 1
    return best


def about(who: Candidate) -> Json:
    """This machine, and the rates that the mode needs: each takes seconds."""
    device, config, mode = who.device, who.bench.config, who.bench.mode
    cuda, driver, packages, cpu = None, None, {}, cpu_name() or platform.machine()
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    if who.bench.cuda:
        cuda = torch.cuda.get_device_properties(device)
        with suppress(OSError):
            text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
            driver = re.search(r"NVRM version:.*?\s(\d+\.[\d.]+)\s", text)
    found: Json = {
        "kind": device.type, "name": cuda.name if cuda else cpu, "cpu": cpu,
        "about": describe(device), "threads": torch.get_num_threads(), "packages": packages,
        "python": platform.python_version(), "dtype": who.dtype,
        "system": f"{platform.system()} {platform.release()}",
        "capability": [cuda.major, cuda.minor] if cuda else None,
        "driver": driver and driver[1], "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if cuda else None,
        # Before the rates, whose memory PyTorch keeps.
        "free_memory": free_memory(device), "busy": busy(device),
    }  # fmt: skip
    peak, rate, source, products = flops.Peak(0, "not measured"), None, "not measured", None
    every = mode == "qualify" or getattr(config, "profile", False)
    if mode != "decode":
        peak = flops.peak(device, who.dtype, who.config.peak_tflops)
        if cuda and every:
            products = flops.measured_tflops(device, who.setup.dtype)
    if given := getattr(config, "bandwidth_gbs", None):
        rate, source = given * 1e9, "--bandwidth_gbs"
    elif every or mode == "decode":
        measure = partial(bandwidth, device, who.bench.machine["memory_limit"])
        what, again = "bytes/s of copies and reads", who.config.peak_tflops == "measure"
        rate, when = flops.kept_rate(what, device, measure, again)
        source = f"{when}: copies and reads in {LARGEST_COPY / 1e9:.2g} GB"
    found |= {"peak_tflops": peak.tflops or None, "peak_source": peak.source}
    found |= {"products_tflops": products, "bandwidth": rate, "bandwidth_source": source}
    reset_peak(device)
    return found


def busy(device: torch.device) -> list[str]:
    found = []
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        if total - free > 2 * CONTEXT:
            found.append(f"{(total - free) / 1e9:.1f} GB of the GPU were in use before we began")
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > (os.cpu_count() or 1) / 2:
        found.append(f"the CPU was busy before we began: a load of {load:.1f}")
    return found
