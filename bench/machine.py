"""The machine under a measurement: its clock, its memory, its rates, what disturbs them; and the
job "machine".

Time: on CUDA by device events, which the GPU itself stamps; elsewhere by the process's clock. Both
are read with the device synchronized at the ends of an interval only.

Memory: on CUDA the most that PyTorch's allocator has handed out. On the CPU the largest resident
set of the process, which Linux lets a process reset; where it cannot be reset (macOS) it only ever
grows, so that the memory of single calls is not known there.

Bandwidth: bytes read and written a second while one large array is copied onto another. Each is
four times as large as the last-level cache, or 1 GB where that is more: on a server CPU with 300 MB
of cache, arrays of 64 MB never reach the memory, and the rate came out at twice the truth.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import attention
from attention.spec import Machine, Spec
from attention.system import cpu_name
from bench.job import Job
from core import peaks
from core.runtime import describe, synchronize

PACKAGES = ("torch", "triton", "flash_attn", "flash_attn_3", "transformers", "numpy")
STATUS = Path("/proc/self/status")
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")  # a container's limits
CPUS = Path("/sys/devices/system/cpu")
CONTEXT = 600_000_000  # bytes that a process's CUDA context takes, about; no allocator counts them
LEAST_COPY = 2**30  # bytes; a virtual machine may not be told how large the host's caches are


class Clock:
    """Stamps that cost no synchronization, and the milliseconds between them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.apart = device.type != "mps"  # can the parts of a step be told from one another?

    def stamp(self) -> Any:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()

    def start(self) -> Any:
        """A stamp before which all is done."""
        synchronize(self.device)
        return self.stamp()

    def stop(self) -> Any:
        """A stamp after which all is done; the stamps before it can then be read."""
        stamp = self.stamp()
        synchronize(self.device)
        return stamp if self.device.type == "cuda" else self.stamp()

    def ms(self, a: Any, b: Any) -> float:
        """Milliseconds between two stamps, once the device is synchronized."""
        return a.elapsed_time(b) if self.device.type == "cuda" else (b - a) * 1e3


# ----------------------------------------------------------------------------- memory


def reset_peak(device: torch.device) -> bool:
    """Begin to look for the peak of memory anew; False where this machine cannot."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        return True
    try:
        trim()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def trim() -> None:
    """What was freed goes back to the system, and counts no more."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def memory(device: torch.device, peak: bool = True) -> int:
    """The most memory since reset_peak, or what is in use now; bytes."""
    if device.type == "cuda":
        read = torch.cuda.max_memory_allocated if peak else torch.cuda.memory_allocated
        return read(device)
    name = "VmHWM" if peak else "VmRSS"
    text = STATUS.read_text(encoding="utf-8") if STATUS.exists() else ""
    if found := re.search(rf"{name}:\s+(\d+) kB", text):
        return int(found[1]) * 1024
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def empty_cache(device: torch.device, keep: bool = False) -> int:
    """Return memory that is kept for later, before others measure; the bytes that remain held.
    With `keep` not on CUDA, where the next round would wait for the driver to give it again."""
    if device.type == "cuda":
        if not keep:
            torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(device) + CONTEXT
    trim()
    return memory(device, peak=False)


def free_memory(device: torch.device) -> int:
    """Bytes that are not in use on the device, or left to this container; 0 where unknown."""
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


# ----------------------------------------------------------------------------- bandwidth


def last_level_cache(device: torch.device) -> int | None:
    """Bytes of the largest caches in front of the memory, all that this process may use together:
    a server CPU has one for every few cores."""
    if device.type == "cuda":
        return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", None)
    if not hasattr(os, "sched_getaffinity"):
        return None
    found: dict[tuple[int, str], int] = {}  # by level and the cores that share it
    for cpu in os.sched_getaffinity(0):
        for cache in (CPUS / f"cpu{cpu}" / "cache").glob("index*"):
            try:
                level, shared, size = (
                    (cache / name).read_text().strip()
                    for name in ("level", "shared_cpu_list", "size")
                )
                found[int(level), shared] = int(size[:-1]) * {"K": 2**10, "M": 2**20}[size[-1]]
            except (OSError, ValueError, KeyError, IndexError):  # a machine that does not tell
                continue
    last = max((level for level, _ in found), default=0)
    return sum(size for (level, _), size in found.items() if level == last) or None


def copy_size(device: torch.device, limit: int | None = None) -> tuple[int, str]:
    """Bytes of each of the two arrays that measure the bandwidth, and a doubt about them."""
    cache = last_level_cache(device) or 0
    wanted = max(LEAST_COPY, 4 * cache)
    free = free_memory(device) or 4 * wanted
    size = min(wanted, free // 4, (limit or free) // 4)
    return size, f", of which a cache of {cache / 1e6:.0f} MB holds a part" * (size < 4 * cache)


def bandwidth(device: torch.device, limit: int | None = None) -> tuple[float, str]:
    """Bytes a second to and from memory by the best of several large copies, now or remembered."""
    size, doubt = copy_size(device, limit)
    a = torch.ones(size // 4, device=device)  # float32
    b = torch.ones_like(a)
    clock, rates, began = Clock(device), list[float](), time.perf_counter()
    least = 0.5 if device.type == "cuda" else 0.0  # seconds, in which a GPU raises its clocks
    while (passed := time.perf_counter() - began) < least or len(rates) < (10 if passed < 4 else 3):
        start = clock.start()
        b.copy_(a)
        seconds = clock.ms(start, clock.stop()) / 1e3
        rates.append(2 * a.nbytes / seconds)  # all of a is read, all of b written
    del a, b
    reset_peak(device)
    how = f"copies of {size / 1e9:.2g} GB{doubt}"
    if doubt or size < LEAST_COPY:  # it may be a cache's: nothing to be remembered as the memory's
        return max(rates), f"measured: {how}"
    rate, source = peaks.better(max(rates) / 1e9, "GB/s", how, device)
    return rate * 1e9, source


# ----------------------------------------------------------------------------- what is here


class MachineProbe:
    """What this machine is, how fast it could be, and which backends need not be tried here."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.job = job = Job(told)
        self.device = job.device
        self.about = look(job)
        rate, source = None, "not measured"
        if told["bandwidth_gbs"]:
            rate, source = told["bandwidth_gbs"] * 1e9, "--bandwidth_gbs"
        elif told["wants_bandwidth"]:  # it takes seconds
            rate, source = bandwidth(self.device, told["memory_limit"])
        self.about |= {"bandwidth": rate, "bandwidth_source": source}

    def round(self, request: dict[str, Any]) -> dict[str, Any]:
        """The backends ("names") that declare that they can do none of what is asked ("specs"): no
        process need be started for them."""
        config = self.job.config
        here = Machine.here(str(self.device), attention.packages(*request["names"]))
        always = {"dtype": self.job.dtype, "hub_kernels": config.attention_hub_kernels}
        refused = {}
        for name in request["names"]:
            reasons = []
            for asked in request["specs"]:
                try:
                    attention.resolve(name, Spec(**{**always, **asked}), here, config.policy)
                except attention.BackendUnavailable as e:
                    reasons.append(reason(e))
            if len(reasons) == len(request["specs"]):
                refused[name] = reasons[:1]
        return {"refused": refused}


def reason(error: attention.BackendUnavailable) -> str:
    """The why of "attention backend 'x' cannot run here. x: why; and why"."""
    return str(error).partition(" cannot run here. ")[2].partition(": ")[2] or str(error)


def look(job: Job) -> dict[str, Any]:
    """Everything about this machine that a figure depends on."""
    device, name = job.device, cpu_name() or platform.machine()
    packages = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            packages[package] = metadata.version(package.replace("_", "-"))
    free = free_memory(device)  # before large products are measured, whose memory PyTorch keeps
    peak = peaks.peak(device, job.dtype, job.config.peak_tflops)
    own: dict[str, Any] = dict.fromkeys(("capability", "driver", "products_tflops"))
    if device.type == "cuda":
        # No matmul reaches what a datasheet promises; so also measure what one does reach.
        own = {
            "name": torch.cuda.get_device_name(device),
            "capability": torch.cuda.get_device_capability(device),
            "driver": next(iter(nvidia_smi("driver_version")), [None])[0],
            "products_tflops": peaks.best_peak(device, job.dtype).tflops,
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
    """The fields of a query, a list a GPU; empty if nvidia-smi is missing or cannot answer."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):  # it hangs where a GPU has fallen off the bus
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[word.strip() for word in line.split(",")] for line in lines]


# ----------------------------------------------------------------------------- what disturbs it

# Those of nvidia-smi's clocks_event_reasons that slow a GPU down.
REASONS = {0x4: "its power cap", 0x8: "a hardware slowdown", 0x20: "heat (software)",
           0x40: "heat (hardware)", 0x80: "the power brake"}  # fmt: skip


@contextmanager
def watched(ask: Callable[[str], list[list[str]]] = nvidia_smi) -> Iterator[dict[str, Any]]:
    """Look at the GPU every two seconds while a stage runs. The dict is filled at the end: why the
    clock was throttled, the highest temperature and power, other processes."""
    seen: dict[str, Any] = {}
    over = threading.Event()
    reasons, hot, watts = set[str](), [0.0], [0.0]

    def look() -> None:
        while True:
            for line in ask("clocks_event_reasons.active,temperature.gpu,power.draw"):
                with suppress(ValueError):
                    bits = int(line[0], 16)
                    reasons.update(text for bit, text in REASONS.items() if bits & bit)
                    hot.append(float(line[1]))
                    watts.append(float(line[2]))
            if over.wait(2):
                return

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join(timeout=12)
        if len(hot) > 1:
            seen |= {"held_down_by": sorted(reasons), "celsius": max(hot), "watts": max(watts)}


def busy(device: str, ask: Callable[[str], list[list[str]]] = nvidia_smi) -> list[str]:
    """Which other processes are busy on this machine before ours start."""
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
