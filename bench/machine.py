"""Clock, memory, bandwidth, description and disturbances of the machine; the job "machine".

Time: device events on CUDA, elsewhere the process's clock, synchronized only at the ends of an
interval. Memory: on CUDA the peak of PyTorch's allocator, on the CPU the peak resident size of the
process, which Linux can reset. Bandwidth: bytes read and written per second by copies of 1 GB.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import torch

import attention
from attention.machine.system import cpu_name, synchronize
from attention.spec import Machine, Spec
from bench import Json
from bench.job import Job
from core import flops
from core.runtime import describe, peak_memory

PACKAGES = ("torch", "triton", "flash_attn", "flash_attn_3", "transformers", "numpy")
STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's limits
CONTEXT = 600_000_000  # bytes of a CUDA context, about, which no allocator counts
LARGEST_COPY = 2**30  # bytes, beyond the caches


Stamp = float | torch.cuda.Event  # seconds, or an event


class Clock:
    """Time stamps that need no synchronization, and the milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.apart = device.type != "mps"  # stamps within a step are meaningful

    def stamp(self) -> Stamp:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def start(self) -> Stamp:
        synchronize(self.device)
        return self.stamp()

    def stop(self) -> Stamp:
        """Stamp the end of all work; earlier stamps can be read after it."""
        stamp = self.stamp()
        synchronize(self.device)
        return stamp if self.device.type == "cuda" else self.stamp()

    def ms(self, a: Stamp, b: Stamp) -> float:
        if isinstance(a, float) or isinstance(b, float):
            assert isinstance(a, float) and isinstance(b, float)
            return (b - a) * 1e3
        return float(a.elapsed_time(b))


# --- memory ---


def reset_peak(device: torch.device) -> bool:
    """Reset the peak of memory(). Returns False where that is not possible."""
    gc.collect()
    empty_cache(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def memory(device: torch.device, peak: bool = True) -> int:
    """Return the peak memory since reset_peak, or the current memory, in bytes."""
    if device.type == "cuda":
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return read(device)
    name = "VmHWM" if peak else "VmRSS"
    text = STATUS.read_text(encoding="utf-8") if STATUS.exists() else ""
    if found := re.search(rf"{name}:\s+(\d+) kB", text):
        return int(found[1]) * 1024
    return peak_memory(device)


def empty_cache(device: torch.device, keep: bool = False) -> int:
    """Free cached memory before others measure, unless `keep`; return the bytes still held."""
    if device.type == "cuda":
        if not keep:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device) + CONTEXT
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # return freed memory to the system
    return memory(device, peak=False)


def free_memory(device: torch.device) -> int:
    """Return the free bytes of the device or of this container; 0 if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        text = MEMINFO.read_text(encoding="ascii")
    except OSError:
        return 0
    free = int(re.findall(r"MemAvailable:\s+(\d+) kB", text)[0]) * 1024
    limit = CGROUP / "memory.max"  # "max" where there is none
    if limit.exists() and (most := limit.read_text().strip()).isdecimal():
        free = min(free, int(most) - int((CGROUP / "memory.current").read_text(encoding="ascii")))
    return free


# --- bandwidth ---


def bandwidth(device: torch.device, limit: int | None = None) -> tuple[float, str]:
    """Return the memory bandwidth in bytes/s, the best of several copies, and its source."""
    free = min(f for f in (free_memory(device), limit, 2**50) if f)
    size = min(LARGEST_COPY, free // 4)
    a = torch.ones(size // 4, device=device)  # float32
    b = torch.ones_like(a)
    clock, rates, began = Clock(device), list[float](), time.perf_counter()
    least = 0.5 if device.type == "cuda" else 0.0  # seconds in which a GPU raises its clocks
    while (passed := time.perf_counter() - began) < least or len(rates) < (10 if passed < 4 else 3):
        start = clock.start()
        b.copy_(a)
        rates.append(2 * a.nbytes / (clock.ms(start, clock.stop()) / 1e3))
    del a, b
    reset_peak(device)
    return max(rates), f"measured: copies of {size / 1e9:.2g} GB"


# --- description ---


class MachineProbe:
    """Describes this machine, and refuses backends that need not be tried here."""

    def __init__(self, told: Json) -> None:
        self.job = job = Job(told)
        self.device = job.device
        self.about = look(job)
        rate, source = None, "not measured"
        if told["bandwidth_gbs"]:
            rate, source = told["bandwidth_gbs"] * 1e9, "--bandwidth_gbs"
        elif told["wants_bandwidth"]:  # takes seconds
            rate, source = bandwidth(self.device, told["memory_limit"])
        self.about |= {"bandwidth": rate, "bandwidth_source": source}

    def round(self, request: Json) -> Json:
        """Return the backends among "names" that declare support for none of the "specs"."""
        config = self.job.config
        here = Machine.here(str(self.device))
        refused = {}
        specs = [Spec(dtype=self.job.dtype, **spec) for spec in request["specs"]]
        for name in request["names"]:
            reasons = []
            for spec in specs:
                try:
                    attention.resolve(name, spec, here, config.policy)
                except attention.BackendUnavailable as e:
                    reasons.append(reason(e))
            if len(reasons) == len(specs):
                refused[name] = reasons[:1]
        return {"refused": refused}


def reason(error: ValueError) -> str:
    """Return REASON of "attention backend 'x' cannot run here. x: REASON", or the message."""
    return str(error).partition(" cannot run here. ")[2].partition(": ")[2] or str(error)


def look(job: Job) -> Json:
    """Describe what affects a measurement on this machine."""
    device, name = job.device, cpu_name() or platform.machine()
    packages = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package)
    free = free_memory(device)  # before the peak is measured, whose memory PyTorch keeps
    peak = flops.peak(device, job.dtype, job.config.peak_tflops)
    own: Json = dict.fromkeys(("capability", "driver", "products_tflops"))
    if device.type == "cuda":
        own = {
            "name": torch.cuda.get_device_name(device),
            "capability": list(torch.cuda.get_device_capability(device)),
            "driver": next(iter(nvidia_smi("driver_version")), [None])[0],
            # the rate that matmuls reach: always below the datasheet's
            "products_tflops": flops.best_peak(device, job.dtype).tflops,
        }
    return {
        "device": str(device),
        "kind": device.type,
        "name": name,
        **own,
        "about": describe(device),
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
        "cpu": name,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "packages": packages,
        "dtype": job.dtype,
        "free_memory": free,
        "peak_tflops": peak.tflops,
        "peak_source": peak.source,
        "peak_measured": peak.measured,
    }


def nvidia_smi(query: str) -> list[list[str]]:
    """Return the fields of a query, one list per GPU; [] if nvidia-smi is missing or fails."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # it hangs if a GPU has fallen off the bus
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[word.strip() for word in line.split(",")] for line in lines]


def busy(device: str, ask: Callable[[str], list[list[str]]] = nvidia_smi) -> list[str]:
    """Return a line for each sign of other processes at work before the measurement."""
    found = []
    if device == "cuda":
        for i, line in enumerate(ask("memory.used,utilization.gpu")):
            with suppress(ValueError, IndexError):
                used, share = float(line[0]), float(line[1])
                if used > 1000 or share > 10:
                    what = f"{used:,.0f} MB, {share:.0f}%"
                    found.append(f"GPU {i} was in use before we began: {what}")
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > (os.cpu_count() or 1) / 2:
        found.append(f"the CPU was busy before we began: a load of {load:.1f}")
    return found
