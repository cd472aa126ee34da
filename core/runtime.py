"""Set-up of a run: device, dtype, compilation, signals, memory."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import platform
import re
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import FrameType
from typing import Any, TypeVar, cast

import torch
import torch.nn as nn
from torch import Tensor

from attention import BackendUnavailable, DeviceLost
from attention.machine.system import bfloat16_units, cpu_name, devices
from core.cpu import matmul as cpu_matmul
from core.options import TrainConfig
from core.process import SIGNALS, escaped
from core.settings import UserError

M = TypeVar("M", bound=nn.Module)
OUT_OF_MEMORY = re.compile("DefaultCPUAllocator: |out of memory|_ALLOC_FAILED")


def pick_device(wanted: str) -> torch.device:
    """ "auto": CUDA, else MPS, else the CPU. Raises UserError."""
    usable = torch.cuda.is_available()  # False: the driver is too old
    available = [name for name in devices() if usable or "cuda" not in name]
    if wanted == "auto":
        wanted = next(kind for kind in ("cuda", "mps", "cpu") if kind in available)
    if wanted not in available:
        raise UserError(f"device {wanted!r} not found; available: {', '.join(available)}")
    device = torch.device(wanted)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)  # Triton launches its kernels on the current device
    return device


def pick_dtype(wanted: str, device: torch.device, n_embd: int | None = None) -> torch.dtype:
    """Dtype of matrix products; "auto": half if the hardware has it, on a CPU only in training
    (n_embd): text would depend on the cache."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type == "cuda":
        ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        return torch.bfloat16 if ampere else torch.float16
    half = device.type == "cpu" and n_embd and not cpu_matmul.why_not_bfloat16(n_embd)
    return torch.bfloat16 if half else torch.float32


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def decide_residual(wanted: str, device: str, dtype: str) -> str:
    half = device == "cuda" and dtype == "bfloat16"
    return wanted if wanted != "auto" else "autocast" if half else "float32"


def why_not_compile(wanted: bool | None, device: torch.device) -> str:
    """Why not to compile, or ""; None: on CUDA."""
    if wanted is False:
        return "--compile=False"
    if device.type == "cuda" and find_spec("triton") is None:
        return "package 'triton' is not installed (pip install triton)"
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "no C++ compiler found"
    if wanted is None and device.type != "cuda":
        return "--compile=True pays on long runs"
    return ""


class Setup:
    def __init__(self, device: torch.device, config: TrainConfig,
                 n_embd: int | None = None) -> None:  # fmt: skip
        """Decide, and set PyTorch's global switches; n_embd: the model's, in training."""
        # Not by fp32_precision: Inductor reads the older settings.
        torch.set_float32_matmul_precision("highest")  # PyTorch refuses a mix with allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
        if config.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self.device = device
        self.config = config
        self.dtype = pick_dtype(config.dtype, device, n_embd)  # weights stay in float32
        dtype = dtype_name(self.dtype)
        # Between the blocks: a dtype, or "autocast".
        self.residual = decide_residual(config.residual_dtype, device.type, dtype)
        no_onednn = cpu_matmul.why_not(config.onednn, device, self.dtype)
        self.onednn = not no_onednn  # for float32 products
        no_compile = why_not_compile(config.compile, device)
        self.compile = not no_compile
        self.lines = []  # the decisions
        if device.type == "cpu":
            if config.dtype == "auto" and n_embd is not None:
                units = f"this processor has {bfloat16_units()}"
                why = cpu_matmul.why_not_bfloat16(n_embd) or units
                self.lines.append(f"dtype: {dtype} ({why})")
            self.lines.append(f"oneDNN for float32 products: {_switch(no_onednn)}")
        mode = f" (mode {config.compile_mode})" if self.compile else ""
        self.lines.append(f"compile: {_switch(no_compile)}{mode}")

    @property
    def autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)

    def scaler(self) -> torch.amp.GradScaler:
        return torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)

    def place(self, model: M, cast: bool = False) -> M:
        """Move the model to the device; cast=True: weights in `dtype` (inference)."""
        model = model.to(self.device, self.dtype if cast else None)
        if self.device.type == "cpu":
            decoding = cast and self.config.onednn is not False
            if self.onednn:
                cpu_matmul.convert(model, "onednn", decoding)
            elif decoding and cpu_matmul.few_rows_pay():
                cpu_matmul.convert(model, "few", decoding)
            elif not (cast or self.compile):
                cpu_matmul.convert(model, "mkl")
        return model

    def compiled(self, model: nn.Module, micro_steps: int = 1) -> nn.Module:
        """Compile, if decided. Raises UserError."""
        if not self.compile:
            return model
        if self.device.type == "cuda" and micro_steps > 1:  # PyTorch issue 169545
            self.refuse_graphs(f"cannot add up {micro_steps} micro-batches")
        return cast(nn.Module, torch.compile(model, mode=self.config.compile_mode))

    def refuse_graphs(self, why: str) -> None:
        mode = self.config.compile_mode
        if self.compile and mode in ("reduce-overhead", "max-autotune"):
            got = f"CUDA graphs {why}: --compile_mode={mode}"
            raise UserError(f"{got}; use max-autotune-no-cudagraphs")

    def report(self, processes: int) -> list[str]:
        count = f"{processes} process" + ("es" if processes > 1 else "")
        what = f"{describe(self.device)}), {dtype_name(self.dtype)}, {count}"
        return [f"device: {self.device} ({what}", *self.lines]


def _switch(why_not: str) -> str:
    return f"off ({why_not})" if why_not else "on"


class StopSignal:
    """Notes SIGTERM, Ctrl-C, SIGHUP, torchrun's death; a second one ends at once, but a repeated
    SIGHUP or torchrun's."""

    def __init__(self, says: str = "stopping; saving the last step") -> None:
        self.signal: int | None = None
        self.says = says
        self.parent = os.getppid()
        self.torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # handles SIGHUP under nohup too
        nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN and not self.torchrun
        self.before = {s: signal.signal(s, self._note) for s in SIGNALS[: 2 if nohup else 3]}

    @property
    def noted(self) -> bool:
        if os.getppid() != self.parent and self.torchrun:
            self.signal = self.signal or signal.SIGTERM  # nobody else would send it
        return self.signal is not None

    def close(self) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signal = self.signal or signum
        if self.torchrun or signum == signal.SIGHUP:
            return
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, signal.SIG_DFL)
        with suppress(OSError):
            os.write(2, f"\n{self.says}; once more stops at once\n".encode())


@contextmanager
def explained(less_memory: str) -> Iterator[None]:
    """Raise failures with a known remedy as UserError."""
    try:
        yield
    except (BackendUnavailable, DeviceLost) as e:
        raise UserError(str(e)) from e
    except (RuntimeError, MemoryError) as e:
        text = str(e).strip() or type(e).__name__
        if isinstance(e, MemoryError | torch.OutOfMemoryError) or OUT_OF_MEMORY.search(text):
            raise UserError(f"out of memory ({text.splitlines()[0]}); try {less_memory}") from e
        raise


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


def peak_memory(device: torch.device) -> int:
    """Bytes, of the GPU or this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def settle(device: torch.device) -> None:
    """Exempt objects from garbage collection; reset peak memory."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def keep_freed_memory() -> None:
    if platform.libc_ver()[0] == "glibc":
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        trim_threshold, mmap_max = -1, -4  # numbers of malloc.h
        mallopt(mmap_max, 0)
        mallopt(trim_threshold, -1)


def to_device(values: Any, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Copy a tensor or numbers, asynchronously on CUDA."""
    t, cuda = torch.as_tensor(values, dtype=dtype), device.type == "cuda"
    return (t.pin_memory() if cuda and t.device.type == "cpu" else t).to(device, non_blocking=cuda)


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{cpu_name() or device.type}, {threads} thread{'' if threads == 1 else 's'}"


def show_log() -> None:
    handler = logging.StreamHandler()
    plain = logging.Formatter("%(levelname)s: %(message)s").format
    # A checkpoint's text could control the terminal.
    handler.format = lambda record: escaped(plain(record))  # type: ignore[method-assign]
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("nanoattn").setLevel(logging.INFO)
