"""Run an answer's Triton kernel: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import sys
from types import ModuleType

import torch
from torch import Tensor

from course.exercises.check import same

# Set before an answer imports Triton.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

NEEDS = ("triton",)
GUARD = 64  # rows of NaN before and after each tensor


def compare(answer: ModuleType, name: str, grid: tuple[int, ...], tensors: dict[str, Tensor],
            want: dict[str, Tensor], *numbers: float, case: str, **sizes: int) -> None:
    """Call kernel `name` with the tensors, zeros for `want`, numbers and sizes.

    Raises AssertionError unless it writes `want`, and only there: NaN surrounds each tensor.
    """
    kernel = getattr(answer, name)
    case = ", ".join([case, *(f"{size} = {x}" for size, x in sizes.items())])
    assert hasattr(kernel, "run"), f"{name} needs the decorator @triton.jit"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    guarded = []
    given = tensors | {what: torch.zeros_like(x) for what, x in want.items()}
    for x in given.values():
        around = x.new_full((len(x) + 2 * GUARD, *x.shape[1:]), torch.nan).to(device)
        around[GUARD:-GUARD] = x
        guarded.append(around)
    inner = [x[GUARD:-GUARD] for x in guarded]
    kernel[grid](*inner, *numbers, **sizes)
    for what, x in zip(given, inner):
        if what in want:
            same(x.cpu(), want[what], what, case)
    for what, x in zip(given, guarded):
        outside = torch.cat([x[:GUARD], x[-GUARD:]])
        assert outside.isnan().all(), f"a store outside {what}, {case}: use mask="
