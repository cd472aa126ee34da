"""Exercise 2: the mask."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from attention.spec import visible
from course.exercises.check import Wrong, forbidding

CASES: list[tuple[int, int, int | None, list[int] | None]] = [
    (3, 3, None, None),
    (3, 5, None, None),
    (5, 3, None, None),
    (4, 4, 2, None),
    (3, 6, 2, None),
    (4, 4, None, [0, 0, 1, 1]),
    (4, 6, 3, [0, 0, 0, 0, 1, 1]),
]
MISTAKES = [
    ("[:, None] + Tk - Tq", "[:, None]", "Query i stands at position i + Tk - Tq"),
    ("j > i - window", "j >= i - window", "A query is in its window: it sees window - 1 others"),
    ("j > i - window", "j > i - window + 1", "The window is one key too short"),
    ("seen = j <= i", "seen = j < i", "A query sees itself"),
    ("seen = j <= i", "seen = j >= i", "A query sees earlier keys, not later ones"),
    ("seen = j <= i", "seen = (j <= i) | True", "A query sees no later key"),
    ("return seen", "return ~seen", "True means that the query sees the key"),
    ("segments[i.clamp(min=0)]", "segments[(i - Tk + Tq).clamp(max=Tk - 1)]",
     "The document of query i is that of position i + Tk - Tq"),
    ("seen &= segments[i.clamp(min=0)] == segments", "pass", "Other documents are visible"),
]


def check(answer: ModuleType) -> None:
    with forbidding(answer, ("visible",), "write the mask with comparisons"):
        answer.mask(2, 2, None, None)
    for Tq, Tk, window, seg in CASES:
        segments = None if seg is None else torch.tensor(seg)
        got = answer.mask(Tq, Tk, window, segments)
        case = f"mask({Tq}, {Tk}, window={window}, segments={seg})"
        assert isinstance(got, Tensor) and got.dtype == torch.bool and got.shape == (Tq, Tk), (
            f"{case} must return a bool tensor ({Tq}, {Tk})"
        )
        wrong = torch.nonzero(got != truth(Tq, Tk, Tk - Tq, window, segments)).tolist()
        if wrong:
            raise Wrong(f"wrong at {wrong[0]}", case, got)


def truth(Tq: int, Tk: int, offset: int, window: int | None, segments: Tensor | None) -> Tensor:
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    if segments is None:
        return visible(i, j, offset, window)
    return visible(i, j, offset, window, segments[(i + Tk - Tq).clamp(min=0)], segments)
