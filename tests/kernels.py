"""Users' kernels: files that define BACKEND, whose functions are those of a test."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention import Backend, Caps, manual

EVERYTHING = Caps(right=True, scale=True, softcap=True, sinks=True,
                  caches=("none", "dynamic", "static"))
MADE: dict[str, Backend] = {}
_numbers = itertools.count()


def backend(attend: Callable[..., Tensor], caps: Caps = EVERYTHING,
            fallback: str | None = "manual", name: str = "mine") -> Backend:
    return Backend(name, "made up", attend, (caps,), fallback)


def as_file(folder: Path, attend: Callable[..., Tensor], caps: Caps = EVERYTHING,
            fallback: str | None = "manual") -> str:
    """The path of a new kernel file that runs `attend`, under the name "mine"."""
    number = str(next(_numbers))
    MADE[number] = backend(attend, caps, fallback)
    path = folder / f"mine{number}.py"
    path.write_text(f"import kernels\nBACKEND = kernels.MADE[{number!r}]\n")
    return str(path)


class Recorder:
    """A right kernel that notes the shape (B, Tq, Tk, H) of each call with its Spec's gradient."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, int, int, int]] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, spec: Any, **options: Any) -> Tensor:
        if not torch.compiler.is_compiling():
            self.shapes.append((q.shape[0], q.shape[1], k.shape[1], q.shape[2]))
        return self.compute(q, k, v, spec, **options)

    compute = staticmethod(manual.attend)
