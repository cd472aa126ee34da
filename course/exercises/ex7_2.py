"""Exercise 7.2: softmax of a row, in Triton."""

from __future__ import annotations

from types import ModuleType

from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare, draws

TASK = """Triton: softmax of a row

softmax(S, P, Tk, BLOCK_N) writes the softmax of each row of S to P, pointers to (Tq, Tk) float32.
Program i computes row i. BLOCK_N is a power of two, at least Tk. Scores of 1000 must work.
"""
START = """import triton
import triton.language as tl


@triton.jit
def softmax(S, P, Tk, BLOCK_N: tl.constexpr):
    i = tl.program_id(0)
    j = tl.arange(0, BLOCK_N)
    # Load row i. tl.load(..., mask=..., other=x) gives x where the mask is False: which score has
    # weight 0? tl.max(s, axis=0) and tl.sum(s, axis=0) reduce a row to a number; tl.exp is e^x
"""
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
        case = f"Tq = {Tq}, Tk = {Tk}, BLOCK_N = {BLOCK_N}, scores up to {s.abs().max():.0f}"
        want = {"P": s.softmax(1)}
        compare(answer, "softmax", (Tq,), {"S": s}, want, Tk, case=case, BLOCK_N=BLOCK_N)
