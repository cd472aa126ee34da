"""Exercise 7: the loop over key blocks of FlashAttention-2's forward pass, in Triton."""

from __future__ import annotations

import math
import os
import sys
from types import ModuleType

import torch

from course.exercises.check import same

# Set before an answer imports Triton.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

TASK = """The forward pass in Triton

One program computes BLOCK_M queries of one head. Write the online softmax inside the loop, and the
division after it.

    Q, O    pointers to (Tq, D) float32, contiguous
    K, V    pointers to (Tk, D) float32
    L       pointer to (Tq,) float32: log to base 2 of the sum of exp(s) of each row
    scale   log2(e) / sqrt(D), so that 2^(scale * q . k) is exp(q . k / sqrt(D))

Query i sees key j where j <= i + Tk - Tq, and at least one key. Tq and Tk need not be multiples of
the blocks. Without a CUDA device the checker uses Triton's interpreter.
"""
START = """import triton
import triton.language as tl


@triton.jit
def forward(Q, K, V, O, L, Tq, Tk, scale,
            D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    i = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    Q_i = tl.load(Q + i[:, None] * D + d[None, :], mask=i[:, None] < Tq, other=0.0)
    O_i = tl.zeros((BLOCK_M, D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), -1e30, tl.float32)
    for j0 in range(0, Tk, BLOCK_N):
        j = j0 + tl.arange(0, BLOCK_N)
        K_j = tl.load(K + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
        V_j = tl.load(V + j[:, None] * D + d[None, :], mask=j[:, None] < Tk, other=0.0)
        S_ij = scale * tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
        seen = j[None, :] <= i[:, None] + Tk - Tq
        S_ij = tl.where(seen, S_ij, float("-inf"))
        # m_new, P_ij, rescale, then l_i, O_i and m_i. tl.max(x, axis=1) is the maximum of each row,
        # tl.exp2 is 2^x, and tl.dot(a, b, input_precision="ieee") multiplies in float32
    # O_i is not normalised yet
    tl.store(O + i[:, None] * D + d[None, :], O_i, mask=i[:, None] < Tq)
    tl.store(L + i, m_i, mask=i < Tq)
"""

BLOCK, D = 16, 16
GUARD = 64  # rows of NaN before and after each tensor


def check(answer: ModuleType) -> None:
    assert hasattr(answer.forward, "run"), "forward needs the decorator @triton.jit"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for Tq, Tk in ((16, 16), (8, 16), (16, 48), (21, 43)):
        draw = torch.Generator().manual_seed(Tq)
        q, k, v = (torch.randn(T, D, generator=draw) for T in (Tq, Tk, Tk))
        k *= 1 + torch.arange(Tk)[:, None] // BLOCK  # the maximum of a row grows block by block
        case = f"Tq = {Tq}, Tk = {Tk}, D = {D}, BLOCK_M = BLOCK_N = {BLOCK}"
        guarded = []
        for x in (q, k, v, torch.zeros_like(q), torch.zeros(Tq)):
            around = x.new_full((len(x) + 2 * GUARD, *x.shape[1:]), torch.nan).to(device)
            around[GUARD:-GUARD] = x
            guarded.append(around)
        inner = [x[GUARD:-GUARD] for x in guarded]
        scale = math.log2(math.e) / math.sqrt(D)
        grid = (-(-Tq // BLOCK),)
        answer.forward[grid](*inner, Tq, Tk, scale, D=D, BLOCK_M=BLOCK, BLOCK_N=BLOCK)
        for name, x in zip("QKVOL", guarded):
            outside = torch.cat([x[:GUARD], x[-GUARD:]])
            assert outside.isnan().all(), f"a store outside {name}, {case}: use mask=i < Tq"
        out, L = (x.cpu() for x in inner[3:])
        assert not out.isnan().any(), (
            f"O is NaN, {case}. Memory after the last row holds NaN: loads need a mask"
        )
        S = scale * q @ k.T
        seen = torch.arange(Tk) <= torch.arange(Tq)[:, None] + Tk - Tq
        S = S.masked_fill(~seen, -math.inf)
        m = S.amax(dim=1, keepdim=True)
        P = torch.exp2(S - m)
        l = P.sum(dim=1, keepdim=True)
        mistakes = {
            "Divide O_i by l_i": P @ v,
            "Use tl.exp2: scale has the factor log2(e)": torch.softmax(S, dim=1) @ v,
        }
        same(out, P @ v / l, "O", case, mistakes)
        same(L, (m + l.log2())[:, 0], "L", case, {"L is m_i + log2(l_i)": m[:, 0]})
