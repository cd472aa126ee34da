"""The machine under a run: devices, dtypes, processes, signals, memory."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import signal
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from attention.system import cpu_name
from core import cpu_matmul
from core.settings import UserError


@dataclass(frozen=True)
class World:
    """This process among all: plain `python` is a world of one, `torchrun` makes it larger."""

    device: torch.device
    rank: int = 0
    size: int = 1
    control: Any = None  # a gloo group: agreeing on the CPU never waits for the GPU

    @classmethod
    def join(cls, wanted: str) -> World:
        device = pick_device(wanted)
        if "RANK" not in os.environ:
            return cls(device=device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if device.index >= torch.cuda.device_count():
                raise UserError(
                    f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs, here are "
                    f"{torch.cuda.device_count()}; lower --nproc_per_node"
                )
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        control = dist.new_group(backend="gloo")
        return cls(device, dist.get_rank(), dist.get_world_size(), control)

    @property
    def main(self) -> bool:
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sum over all processes."""
        if self.size == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()

    def any(self, flag: bool) -> bool:
        """Whether any process says yes; all get the same answer."""
        return self.sum([float(flag)])[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order of rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values


def pick_device(wanted: str) -> torch.device:
    """"auto" or a device's name -> a device that is there.

    Raises:
        UserError: it is not there.
    """  # fmt: skip
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    here = ["cpu"] + ["mps"] * mps + [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if wanted not in here and not (wanted == "cuda" and cuda):
        raise UserError(f"there is no device {wanted!r} here; there is {', '.join(here)}")
    return torch.device(wanted)


def pick_dtype(wanted: str, device: torch.device) -> torch.dtype:
    """The dtype of the matrix products; "auto" is bfloat16 on a GPU that has it in hardware."""
    if wanted != "auto":
        return getattr(torch, wanted)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def dtype_name(dtype: torch.dtype) -> str:
    """"bfloat16" for torch.bfloat16."""  # fmt: skip
    return str(dtype).removeprefix("torch.")


def allow_tf32(on: bool) -> None:
    """Let float32 products on CUDA run in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = on
    torch.backends.cudnn.allow_tf32 = on


def why_not_compile(wanted: bool | None, device: torch.device) -> str | None:
    """Why the model will not be compiled; None: it will be."""
    if wanted is False:
        return "--compile=False"
    if device.type == "cuda" and find_spec("triton") is None:
        return "package 'triton' is not installed (pip install triton)"
    if device.type == "cpu" and not any(map(shutil.which, ("c++", "g++", "clang++", "cl"))):
        return "there is no C++ compiler on this machine"
    if wanted is None and device.type != "cuda":
        return f"it pays on long runs only; --compile=True turns it on for the {device.type}"
    return None


def why_not_onednn(
    wanted: bool | None, device: torch.device, dtype: torch.dtype, compiled: bool = False
) -> str | None:
    """Why oneDNN will not take the float32 products; None: it will. See core/cpu_matmul.py.

    Args:
        compiled: is it for a compiled training step?
    """
    if wanted is False:
        return "--onednn=False"
    if compiled:
        return "a compiled training step does not take it"
    if device.type != "cpu" or dtype != torch.float32:
        return f"it is for float32 on the CPU, this is {dtype_name(dtype)} on {device.type}"
    return None if wanted else cpu_matmul.why_not()


class Stop:
    """Notes SIGTERM and Ctrl-C, so that the loop ends between steps; a second one ends at once."""

    def __init__(self) -> None:
        self.signal: int | None = None
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, self._note)

    def _note(self, signum: int, frame: Any) -> None:
        self.signal = signum
        for s in (signal.SIGTERM, signal.SIGINT):
            signal.signal(s, signal.SIG_DFL)
        os.write(2, b"\nstopping after this step; once more stops at once\n")


def peak_memory(device: torch.device) -> int:
    """The most memory in use so far, bytes: the GPU's, or this process's on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    import resource

    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def keep_freed_memory() -> bool:
    """Let malloc keep what is freed, where it would return large blocks to the system at once.

    A step frees its tensors, and the next one allocates them again: each is then a fresh mapping,
    whose every page the system fills with zeros when it is first touched.

    Returns:
        False where malloc is not glibc's, and nothing has changed.
    """
    if sys.platform != "linux" or platform.libc_ver()[0] != "glibc":
        return False
    mallopt = ctypes.CDLL("libc.so.6").mallopt
    trim_threshold, mmap_max = -1, -4  # numbers of malloc.h
    # No block is a mapping of its own, and the heap does not shrink.
    return bool(mallopt(mmap_max, 0) and mallopt(trim_threshold, -1))


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The random state of this process."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def describe(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu_name() or device.type}, {torch.get_num_threads()} threads"


def show_log() -> None:
    """Show what the project logs (on stderr), and other libraries' warnings."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    logging.getLogger("nanoattn").setLevel(logging.INFO)
