"""Users' kernels for tests."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Backend, Caps, manual

CAPS = Caps(right=True, scale=True, softcap=True, sinks=True, caches=("none", "dynamic", "static"))
MADE: list[Backend] = []


def backend(attend: Callable[..., Tensor], fallback: str | None = "manual",
            caps: Caps = CAPS) -> Backend:
    return Backend("mine", "made up", attend, (caps,), fallback)


def as_file(folder: Path, attend: Callable[..., Tensor], **options: Any) -> str:
    """Write a kernel file named "mine" that runs `attend`."""
    path = folder / f"mine{len(MADE)}.py"
    path.write_text(f"import kernels\nBACKEND = kernels.MADE[{len(MADE)}]\n")
    MADE.append(backend(attend, **options))
    return str(path)


class Recorder:
    """A right kernel that notes (B, Tq, Tk, H) of each call."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int, int]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: Any, **options: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            self.shapes.append((q.shape[0], q.shape[1], k.shape[1], q.shape[2]))
        return manual.attend(q, k, v, spec, **options)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Largest(TorchDispatchMode):
    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        out = function(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, Tensor)]
        self.numbers = max([self.numbers, *made])
        return out


def hurry(patch: Any) -> None:
    """A clock at a hundred times its speed: timings take few rounds."""
    patch.setattr("attention.machine.timing.perf_counter", lambda: 100 * time.perf_counter())


def hub_of(patch: Any, make: Callable[[str], Any]) -> list[tuple[str, str | None]]:
    """The package `kernels`, whose get_kernel() returns make(repository); its calls."""
    calls, module = list[tuple[str, str | None]](), ModuleType("kernels")

    def get_kernel(repo_id: str, *, revision: str | None = None, version: int | None = None,
                   trust_remote_code: bool | list[str] = False) -> Any:
        assert trust_remote_code == [repo_id]
        calls.append((repo_id, revision))
        return make(repo_id)

    vars(module).update(get_kernel=get_kernel, __spec__=metadata.__spec__, __version__="0.17.2")
    patch.setitem(sys.modules, "kernels", module)
    return calls
