"""Exercise 7.3: a tile of Q K^T, in Triton."""

from __future__ import annotations

import math
from types import ModuleType

from course.exercises.check import draws
from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare

BLOCK_M, BLOCK_N, D = 16, 32, 64
ROW, COLUMN = "tl.program_id(0)", "tl.program_id(1)"
MISTAKES = [
    ("tau * tl.dot", "tl.dot", "Multiply the scores by tau"),
    (COLUMN, ROW, "The block of keys is tl.program_id(1)"),
    ("i[:, None] * Tk + j[None, :]", "i[:, None] * BLOCK_N + j[None, :]",
     "Rows of S are Tk numbers apart, not BLOCK_N"),
    ("i[:, None] * Tk + j[None, :]", "i[:, None] * D + j[None, :]",
     "Rows of S are Tk numbers apart, not D"),
    ("tl.trans(K_j)", "K_j", "A product needs (BLOCK_M, D) and (D, BLOCK_N): tl.trans(K_j)"),
    (" & (j[None, :] < Tk)", "", "The store needs a mask for the columns too: j[None, :] < Tk"),
]


def check(answer: ModuleType) -> None:
    for Tq, Tk in ((16, 32), (16, 64), (21, 43), (40, 50)):
        q, k = draws(Tk, (Tq, D), (Tk, D))
        grid = -(-Tq // BLOCK_M), -(-Tk // BLOCK_N)
        tau = 1 / math.sqrt(D)
        compare(answer, "scores", grid, {"Q": q, "K": k}, {"S": tau * q @ k.T}, Tq, Tk, tau,
                case=f"Tq = {Tq}, Tk = {Tk}", D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
