"""Exercise 7.4: the online softmax over blocks of keys, in Triton."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import draws
from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare

BLOCK_M, BLOCK_N, D = 16, 32, 64
MAX = "tl.maximum(m_i, tl.max(S_ij, axis=1))"
MISTAKES = [
    ("O_i / l_i[:, None]", "O_i", "Divide O_i by l_i after the loop"),
    ("rescale[:, None] * O_i", "O_i", "Rescale O_i by exp(m_i - m_new)"),
    ("rescale * l_i", "l_i", "Rescale l_i by exp(m_i - m_new)"),
    ("tl.exp(m_i - m_new)", "tl.exp(m_new - m_new)", "Rescale l_i and O_i by exp(m_i - m_new)"),
    ("m_i = m_new", "pass", "m_i stays the first maximum: set m_i = m_new"),
    (MAX, "tl.max(S_ij, axis=1)", "m_new is the maximum of m_i and of the block"),
    (MAX, "tl.maximum(m_i, tl.max(S_ij, axis=0))",
     "The maximum and the sum of a row are along axis=1"),
    (MAX, "tl.zeros((BLOCK_M,), tl.float32)",
     "tl.exp overflows: subtract the largest score of the row so far"),
    ("tl.where(j[None, :] < Tk, S_ij, float(\"-inf\"))", "S_ij",
     "A place past the last key has score 0: it must be -inf"),
    (", mask=j[:, None] < Tk, other=0.0", "",
     "Memory after the last key holds NaN: loads need a mask"),
    ("tau * tl.dot", "tl.dot", "Multiply the scores by tau"),
]


def check(answer: ModuleType) -> None:
    for Tq, Tk, size in ((16, 32, 1), (21, 96, 1), (8, 43, 1), (16, 70, 200)):
        q, k, v = draws(Tk, (Tq, D), (Tk, D), (Tk, D))
        k *= 1 + torch.arange(Tk)[:, None] // BLOCK_N  # the maximum of a row grows block by block
        case = f"Tq = {Tq}, Tk = {Tk}{', scores in the hundreds' if size > 1 else ''}"
        tau = 1 / math.sqrt(D)
        tensors = {"Q": size * q, "K": k, "V": v}
        want = {"O": (tau * size * q @ k.T).softmax(1) @ v}
        compare(answer, "attend", (-(-Tq // BLOCK_M),), tensors, want, Tq, Tk, tau, case=case, D=D,
                BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
