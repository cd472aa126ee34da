"""Exercise 7.2: softmax of a row, in Triton."""

from __future__ import annotations

from types import ModuleType

from course.exercises.check import draws
from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare

MISTAKES = [
    ('other=float("-inf")', "other=0.0",
     'Places past the row have a weight: other=float("-inf") makes it 0'),
    ("tl.exp(s - tl.max(s, axis=0))", "tl.exp(s)",
     "tl.exp overflows: subtract the largest score of the row"),
    ("p / tl.sum(p, axis=0)", "p", "Divide by the sum of the row"),
    ("S + i * Tk", "S", "Every program loads row 0: row i begins at S + i * Tk"),
    ("i * Tk", "i * BLOCK_N", "Rows are Tk numbers apart, not BLOCK_N"),
]


def check(answer: ModuleType) -> None:
    for Tq, Tk, BLOCK_N, size in ((3, 8, 8, 1), (5, 11, 16, 1), (4, 33, 64, 1000)):
        (s,) = draws(Tk, (Tq, Tk))
        s = s * size - 4
        case = f"Tq = {Tq}, Tk = {Tk}, scores up to {s.abs().max():.0f}"
        want = {"P": s.softmax(1)}
        compare(answer, "softmax", (Tq,), {"S": s}, want, Tk, case=case, BLOCK_N=BLOCK_N)
