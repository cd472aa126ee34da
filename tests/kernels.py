"""Users' kernels for tests."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Backend, Caps, manual

CAPS = Caps(right=True, scale=True, softcap=True, sinks=True, caches=("none", "dynamic", "static"))
MADE: dict[str, Backend] = {}
_numbers = map(str, itertools.count())


def backend(attend: Callable[..., Tensor], fallback: str | None = "manual",
            caps: Caps = CAPS) -> Backend:
    return Backend("mine", "made up", attend, (caps,), fallback)


def as_file(folder: Path, attend: Callable[..., Tensor], **options: Any) -> str:
    """Write a kernel file named "mine" that runs `attend`."""
    number = next(_numbers)
    MADE[number], path = backend(attend, **options), folder / f"mine{number}.py"
    path.write_text(f"import kernels\nBACKEND = kernels.MADE[{number!r}]\n")
    return str(path)


def wrong_beyond(n: int) -> Backend:
    """Right up to so many keys."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Any, **options: Any) -> Tensor:
        return manual.attend(q, k, torch.cat((v[:, :n], 2 * v[:, n:]), 1), spec, **options)

    return backend(attend)


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
