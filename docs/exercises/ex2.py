"""Exercise 2: the mask, from its words and not from visible()."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attention.spec import visible
from docs.exercises.check import Wrong, call

NAMES = ("mask",)
TASK = """
Who sees whom

Write

    mask(Tq, Tk, window, segments)

that returns a bool tensor (Tq, Tk): True where query i may see key j. All three must hold:

    causal     no query sees a key after its own position. The queries are the last Tq of the Tk
               positions, so the last query stands at the last key. (With Tq > Tk the first
               queries come before every key, and see nothing.)
    window     None, or a number: a query sees at most so many keys, itself included.
    segments   None, or (Tk,) integers, the document that each position belongs to: a query sees
               only keys of its own document.

Write it without attention.visible(), which the checker uses; then compare.
"""
START = '''
import torch


def mask(Tq, Tk, window, segments):
    """bool (Tq, Tk): may query i see key j?"""
    i = torch.arange(Tq)[:, None]
    j = torch.arange(Tk)[None, :]
    return j <= i  # causal for Tq = Tk; the rest is yours
'''

CASES: list[tuple[int, int, int | None, list[int] | None]] = [
    (3, 3, None, None),
    (1, 1, 1, [0]),
    (3, 5, None, None),
    (1, 6, None, None),
    (5, 3, None, None),
    (4, 4, 2, None),
    (3, 6, 2, None),
    (3, 3, 1, None),
    (4, 4, 9, None),
    (4, 4, None, [0, 0, 1, 1]),
    (3, 5, None, [0, 0, 1, 1, 1]),
    (2, 5, None, [3, 3, 3, 7, 7]),
    (4, 6, 3, [0, 0, 0, 0, 1, 1]),
]


def check(answer: Any) -> None:
    """Small masks, each entry. Raises Wrong."""
    for Tq, Tk, window, seg in CASES:
        segments = None if seg is None else torch.tensor(seg)
        got = call(answer.mask, Tq, Tk, window, segments)
        shown = f"mask({Tq}, {Tk}, window={window}, segments={seg})"
        if not isinstance(got, Tensor) or got.dtype != torch.bool:
            kind = got.dtype if isinstance(got, Tensor) else type(got).__name__
            raise Wrong(f"{shown} must be a tensor of dtype bool, is {kind}")
        if got.shape != (Tq, Tk):
            raise Wrong(f"{shown} must have shape ({Tq}, {Tk}), has {tuple(got.shape)}")
        off = torch.nonzero(got != truth(Tq, Tk, window, segments)).tolist()
        if off:
            i, j = off[0]
            raise Wrong(
                f"in {shown} query {i} {'sees' if got[i, j] else 'does not see'} key {j}, and "
                f"{'must not' if got[i, j] else 'must'}; its row is {row(got[i])}, must be "
                f"{row(truth(Tq, Tk, window, segments)[i])}{why(got, Tq, Tk, window, segments)}"
            )


def truth(Tq: int, Tk: int, window: int | None, segments: Tensor | None) -> Tensor:
    """The mask by visible()."""
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    if segments is None:
        return visible(i, j, Tk - Tq, window)
    seg_i = segments[(i + Tk - Tq).clamp(min=0)]
    return visible(i, j, Tk - Tq, window, seg_i, segments)


def row(seen: Tensor) -> str:
    return " ".join("x" if x else "." for x in seen.tolist())


def why(got: Tensor, Tq: int, Tk: int, window: int | None, segments: Tensor | None) -> str:
    """A sentence on the mistake that gives just this mask, if it is a typical one."""
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    offset = Tk - Tq
    mistakes: dict[str, Tensor] = {}
    if window is not None:
        mistakes |= {
            f"That window shows {window + 1} keys; {window} is the number with the query itself": (
                truth(Tq, Tk, window + 1, segments)
            ),
            "The window is left out": truth(Tq, Tk, None, segments),
            "The window opens into the future too": (j - i - offset).abs() < window,
            "The window is counted back from i, not from the query's position, i + Tk - Tq": (
                truth(Tq, Tk, None, segments) & (j > i - window)
            ),
        }
    if segments is not None:
        at_i = segments[torch.arange(Tq).clamp(max=Tk - 1)][:, None]
        mistakes |= {
            "Segments are left out": truth(Tq, Tk, window, None),
            "Query i's segment is that of its position, segments[i + Tk - Tq], not segments[i]": (
                visible(i, j, offset, window, at_i, segments)
            ),
        }
    mistakes |= {
        "A query sees itself too: j <= i + offset, not j <": truth(Tq, Tk, window, segments)
        & (j != i + offset),
        "The mask is aligned top-left: query i stands at position i + Tk - Tq": (
            visible(i, j, 0, window)
        ),
        "That is not causal: keys after the query's own position are seen": torch.ones_like(got),
    }
    return next((f". {text}" for text, m in mistakes.items() if torch.equal(got, m)), "")
