"""Processor, packages, autocast, profiler, a thread apart."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib import metadata
from pathlib import Path
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch
from torch.autograd import profiler_legacy

P = ParamSpec("P")
R = TypeVar("R")
F = TypeVar("F", bound=Callable[..., object])
KERNEL_ERRORS = (Exception, SystemExit)  # not Ctrl-C
LOST = re.compile(  # these lose a CUDA context
    "CUDA.*(illegal memory access|illegal address|device-side assert|misaligned address|illegal "
    "instruction|invalid program counter|unspecified launch failure|hardware stack error|"
    "ILLEGAL_ADDRESS|MISALIGNED_ADDRESS|LAUNCH_FAILED|ECC error)", re.I | re.S)
UNKNOWN_VERSION = "unknown version"


def cpu_name() -> str | None:
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.*\S)", text, re.MULTILINE)
    return found and found[1]


def bfloat16_units() -> str:
    """For bfloat16 products: "AMX", "AVX512_BF16" or ""."""
    has = torch.cpu.get_capabilities()
    return "AMX" if has.get("amx_bf16") else "AVX512_BF16" if has.get("avx512_bf16") else ""


def devices() -> list[str]:
    numbered = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return ["cpu", *["cuda"] * bool(numbered), *numbered, *mps]


@cache
def import_version(package: str) -> str | None:
    """Version, or error of the import; None: missing."""
    def versions() -> dict[str, str]:
        names = metadata.packages_distributions().get(package.partition(".")[0], ())
        return {name: metadata.version(name) for name in names}

    try:
        found = importlib.util.find_spec(package)
        if found is None or (found.origin is None and found.submodule_search_locations is not None):
            return None  # a namespace
        module = importlib.import_module(package)
    except Exception as e:  # a broken binary
        if isinstance(e, ModuleNotFoundError) and f"{package}.".startswith(f"{e.name}."):
            return None  # "a.b" where a is missing
        why = f"{type(e).__name__}: {e}"
        if len(owners := versions()) > 1:  # flash-attn 2.8 and flash-attn-4
            both = " and ".join(map(" ".join, owners.items()))
            why += f"; {both} share a folder: pip install --force-reinstall --no-deps one of them"
        return why
    version = str(getattr(module, "__version__", ""))
    if re.match(r"[\d.]*[1-9]", version):
        return version
    # None, or 0.0.0 under a former name.
    return max(versions().values(), default=UNKNOWN_VERSION,
               key=lambda text: [int(n) for n in re.findall(r"\d+", text)])


def first_line(e: BaseException) -> str:
    try:
        text = str(e).strip()
    except Exception:
        text = ""
    return (text or type(e).__name__).splitlines()[0]


def loses_device(e: BaseException) -> bool:
    return isinstance(e, RuntimeError) and bool(LOST.search(str(e)))


def own_code(f: Callable[P, R], name: str) -> Callable[P, R]:
    """Give f its own code object: torch.compile recompiles each at most 8 times."""
    assert isinstance(f, FunctionType)
    code = f.__code__.replace(co_name=name)
    return FunctionType(code, f.__globals__, name, f.__defaults__, f.__closure__)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def autocast_dtype(device_type: str) -> torch.dtype | None:
    if device_type == "meta" or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


def autocast_off(t: torch.Tensor) -> AbstractContextManager[object]:
    kind = t.device.type
    return torch.autocast(kind, enabled=False) if autocast_dtype(kind) else nullcontext()


@contextmanager
def profiled(names: list[str]) -> Iterator[None]:
    """Append operators that this thread runs to `names`, without disturbing a torch.profiler."""
    with profiler_legacy.profile() as profile:
        yield
    names += dict.fromkeys(event.name for event in profile.function_events or ())


def kineto(device_type: str) -> torch.profiler.profile:
    # Silences "USDT: ... profiler_start" of torch 2.13.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, *[kinds.CUDA] * (device_type == "cuda")]
    return torch.profiler.profile(activities=activities, acc_events=True)  # else 2.11 warns


_inside = threading.local()
_lock = threading.Lock()  # one choice at a time
PATIENCE = 600  # seconds


def apart(device: str | torch.device, function: Callable[[], R]) -> R:
    """Return function() from a new thread, without the caller's autocast, hooks and tracers. Raises
    RuntimeError: in a CUDA graph capture, after a hang."""
    if getattr(_inside, "now", False):  # a kernel calls attention
        return function()
    on = torch.device(device)
    if on.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("no kernel was chosen before this CUDA graph: call model.plan() first")
    result: Future[R] = Future()

    def run() -> None:
        _inside.now = True
        try:
            with torch.cuda.device(on) if on.type == "cuda" else nullcontext():
                result.set_result(function())
        except BaseException as e:
            result.set_exception(e)

    # In autograd's thread a tried kernel must not wait.
    lock = _lock if torch._C._current_graph_task_id() == -1 else threading.Lock()
    if not lock.acquire(timeout=PATIENCE):
        raise RuntimeError(f"another thread has been choosing a kernel for {PATIENCE:,} s")
    try:
        threading.Thread(target=run, daemon=True).start()
        return result.result()
    finally:
        lock.release()


def outside_a_trace(function: F) -> F:
    """assume_constant_result() without the slow import of torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
