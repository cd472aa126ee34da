"""Exercise 7.5: FlashAttention-2's forward pass with a causal mask, in Triton."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import causal, draws, reference
from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare

BLOCK_M, BLOCK_N, D = 16, 32, 64
MISTAKES = [
    ("O_i / l_i[:, None]", "O_i", "Divide O_i by l_i after the loop"),
    ("rescale[:, None] * O_i", "O_i", "Rescale O_i by 2^(m_i - m_new)"),
    ("rescale * l_i", "l_i", "Rescale l_i by 2^(m_i - m_new)"),
    ("tl.exp2(m_i - m_new)", "tl.exp2(m_new - m_new)", "Rescale l_i and O_i by 2^(m_i - m_new)"),
    ("tl.exp2", "tl.exp", "Use tl.exp2: scale has the factor log2(e)"),
    ("tl.log2", "tl.log", "L is to base 2: m_i + tl.log2(l_i)"),
    ("m_i + tl.log2(l_i)", "m_i", "L is m_i + tl.log2(l_i)"),
    ("m_i + tl.log2(l_i)", "tl.log2(l_i)", "L is m_i + tl.log2(l_i): m_i is missing"),
    ("m_i + tl.log2(l_i)", "(m_i + tl.log2(l_i)) * 0.6931472", "L is to base 2, not to base e"),
    ("m_i = m_new", "pass", "m_i stays the first maximum: set m_i = m_new"),
    ("(seen, S_ij, float", "(~seen, S_ij, float", "The mask is inverted: keep S_ij where seen"),
    (" + Tk - Tq", "", "Query i sees key j where j <= i + Tk - Tq, not j <= i"),
    ("tl.maximum(m_i, tl.max(S_ij, axis=1))", "tl.max(S_ij, axis=1)",
     "m_new is the maximum of m_i and of the block: a block may hide all keys of a row"),
    ("tl.maximum(m_i, tl.max(S_ij, axis=1))", "tl.maximum(m_i, tl.max(S_ij, axis=0))",
     "The maximum and the sum of a row are along axis=1"),
    ("tl.sum(P_ij, axis=1)", "tl.sum(P_ij, axis=0)",
     "The maximum and the sum of a row are along axis=1"),
    ("tl.maximum(m_i, tl.max(S_ij, axis=1))", "tl.zeros((BLOCK_M,), tl.float32)",
     "2^S overflows: subtract the largest score of the row so far"),
    ("S_ij = tl.where(seen, S_ij, float(\"-inf\"))", "pass", "The causal mask is missing"),
    (", mask=j[:, None] < Tk, other=0.0", "",
     "Memory after the last key holds NaN: loads need a mask"),
]


def check(answer: ModuleType) -> None:
    for Tq, Tk, size in ((16, 16, 1), (8, 32, 1), (16, 80, 1), (21, 43, 1), (16, 40, 200)):
        q, k, v = draws(Tq, (Tq, D), (Tk, D), (Tk, D))
        k *= 1 + torch.arange(Tk)[:, None] // BLOCK_N  # the maximum of a row grows block by block
        q *= size
        case = f"Tq = {Tq}, Tk = {Tk}{', scores in the hundreds' if size > 1 else ''}"
        out, L = reference(q, k, v, causal(Tq, Tk, Tk - Tq))
        tensors, want = {"Q": q, "K": k, "V": v}, {"O": out, "L": L * math.log2(math.e)}
        compare(answer, "forward", (-(-Tq // BLOCK_M),), tensors, want, Tq, Tk,
                math.log2(math.e) / math.sqrt(D), case=case, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
