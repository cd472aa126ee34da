"""Exercise 7.4: the online softmax over blocks of keys, in Triton."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare, draws

TASK = """Triton: the online softmax

attend(Q, K, V, O, Tq, Tk, tau, D, BLOCK_M, BLOCK_N) writes softmax(tau Q K^T) V to O. No mask: each
query sees all Tk keys. Program a computes the queries of block a, with m, l and O of exercise 4 for
its rows.

    Q, O    pointers to (Tq, D) float32
    K, V    pointers to (Tk, D) float32
"""
START = """import triton
import triton.language as tl


@triton.jit
def attend(Q, K, V, O, Tq, Tk, tau,
           D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    Q_i = tl.load(Q + i[:, None] * D + d[None, :], mask=i[:, None] < Tq, other=0.0)
    O_i = tl.zeros((BLOCK_M, D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    for j0 in range(0, Tk, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        # K_j, V_j and S_ij as in 7.3. Which score does a place past the last key have, and which
        # must it have? tl.where(condition, a, b) chooses. Then m_new, P_ij, rescale, l_i, O_i and
        # m_i. tl.max(x, axis=1) is the maximum of each row, tl.maximum(a, b) that of two tensors
    tl.store(O + i[:, None] * D + d[None, :], O_i, mask=i[:, None] < Tq)
"""
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
        case = f"Tq = {Tq}, Tk = {Tk}, D = {D}, BLOCK_M = {BLOCK_M}, BLOCK_N = {BLOCK_N}"
        case += ", scores in the hundreds" if size > 1 else ""
        tau = 1 / math.sqrt(D)
        tensors = {"Q": size * q, "K": k, "V": v}
        want = {"O": (tau * size * q @ k.T).softmax(1) @ v}
        compare(answer, "attend", (-(-Tq // BLOCK_M),), tensors, want, Tq, Tk, tau, case=case, D=D,
                BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
