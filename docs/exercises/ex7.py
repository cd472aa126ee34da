"""Exercise 7: the loop over key blocks of FlashAttention-2's forward pass, in Triton."""

from __future__ import annotations

import math
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from docs.exercises.check import Wrong, alike, same, small, told

NAMES = ("forward",)
TASK = """The forward pass in Triton

Write forward, a Triton kernel: one program computes one block of BLOCK_M queries of one head.
Loads, stores and the loop over key blocks are in the starting file; the lines of online softmax
that belong into the loop are missing, and the division after it.

    Q, O    pointers to (Tq, D) float32, rows one after the other
    K, V    pointers to (Tk, D) float32
    L       pointer to (Tq,) float32: log to base 2 of the sum of exp(s) of each row
    scale   log2(e) / sqrt(D), so that 2^(scale * q . k) is exp(q . k / sqrt(D))

Query i sees key j when j <= i + Tk - Tq, and every query sees at least one key. Tq and Tk need not
be multiples of the blocks. Without a CUDA device the kernel runs in Triton's interpreter, on the
CPU; the checker sees to that.
"""
START = """
import triton
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

# A mistake -> the sentence that tells it by its symptom.
MISTAKES = {
    "nothing": "That is what a loop gives that adds nothing to O_i",
    "not normalised": "That is O_i before it is divided by l_i",
    "no rescale": "That is what comes out when the old O_i is not rescaled: it was summed "
    "relative to the old maximum, and the new block is relative to m_new",
    "no rescale of l": "That is what comes out when l_i is not rescaled with O_i",
    "exp": "That is what tl.exp gives: scale holds a factor log2(e), which is meant for tl.exp2",
    "mask": "That is what comes out without the mask: queries see keys that come after them",
    "corner": "That is what j <= i gives: the mask must end in the lower right corner, so that the "
    "last query sees the last key",
    "last block": "That is the last block of keys alone: O_i = ... must add to what was there",
}
L_MISTAKES = {
    "m": "That is m_i: the sum l_i is missing, L = m_i + log2(l_i)",
    "natural": "That is in natural units: the log to base 2 is asked, tl.log2",
}
BLOCK, D = 16, 16
GUARD = 64  # rows of NaN around each tensor


def prepare() -> None:
    """Triton must be there, and in its interpreter where there is no CUDA device.

    Raises:
        Wrong: it is not, or is imported already for a GPU.
    """
    if find_spec("triton") is None:
        raise Wrong(
            "exercise 7 needs the package 'triton', which is not installed here (pip install "
            "triton; it has wheels for Linux). The page can be read, and the other exercises "
            "done, without it"
        )
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        return
    if "triton" in sys.modules:
        raise Wrong("Triton was imported without its interpreter: set TRITON_INTERPRET=1 before")
    os.environ["TRITON_INTERPRET"] = "1"


def check(answer: Any) -> None:
    """Raise Wrong for an answer that is not right."""
    if not hasattr(answer.forward, "run"):
        raise Wrong("forward is a plain function: it needs the decorator @triton.jit")
    # One tile; the corner; a short last tile in each direction.
    for Tq, Tk in ((16, 16), (8, 16), (16, 48), (21, 43)):
        draw = torch.Generator().manual_seed(Tq)
        # Later keys are longer, so that the maximum of a row grows from block to block.
        q, k, v = (torch.randn(T, D, generator=draw) for T in (Tq, Tk, Tk))
        k *= 1 + torch.arange(Tk)[:, None] // BLOCK
        try:
            out, L = launch(answer.forward, q, k, v)
        except Wrong:
            raise
        except Exception as e:  # the interpreter's own error has the kernel's as its cause
            path = Path(getattr(answer, "__file__", "the answer"))
            raise Wrong(f"the kernel does not run. {told(e.__cause__ or e, path)}") from e
        given = small(Tq=Tq, Tk=Tk, D=D, BLOCK_M=BLOCK, BLOCK_N=BLOCK)
        slips = {text: online(q, k, v, slip) for slip, text in MISTAKES.items()}
        want, want_L = online(q, k, v)
        same(out, want, "O", given, {t: o for t, (o, _) in slips.items() if not o.equal(want)})
        m = maxima(q, k)
        natural = want_L * math.log(2)
        half = m + (want_L - m) * math.log(2)  # m_i + tl.log(l_i)
        more = {L_MISTAKES["m"]: m, L_MISTAKES["natural"]: half if alike(L, half) else natural}
        same(L, want_L, "L", given, more)


def launch(kernel: Any, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Run the kernel on tensors that have NaN before and behind them, and look at these after.

    Raises:
        Wrong: it wrote beside its tensors, or read from there.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    Tq, Tk = len(q), len(k)

    def guarded(x: Tensor) -> tuple[Tensor, Tensor]:
        around = torch.full((len(x) + 2 * GUARD, *x.shape[1:]), torch.nan, device=device)
        inner = around[GUARD:-GUARD]
        inner.copy_(x)
        return around, inner

    names = ("Q", "K", "V", "O", "L")
    whole, inner = zip(*map(guarded, (q, k, v, torch.zeros_like(q), torch.zeros(Tq))), strict=True)
    scale = math.log2(math.e) / math.sqrt(D)
    kernel[(-(-Tq // BLOCK),)](*inner, Tq, Tk, scale, D=D, BLOCK_M=BLOCK, BLOCK_N=BLOCK)
    for name, t in zip(names, whole, strict=True):
        if not (t[:GUARD].isnan().all() and t[-GUARD:].isnan().all()):
            raise Wrong(
                f"something was written before or behind {name}, with Tq = {Tq}, Tk = {Tk} and "
                f"BLOCK_M = {BLOCK}: a store of a block that is not full needs mask=i < Tq"
            )
    out, L = (t.cpu() for t in inner[3:])
    if out.isnan().any():
        row = int(out.isnan().any(dim=1).nonzero()[0])
        raise Wrong(
            f"O[{row}] is NaN, with Tq = {Tq}, Tk = {Tk} and blocks of {BLOCK}. Behind the last "
            "row of Q, K and V there is NaN, and 0 * NaN is NaN: loads of a block that is not "
            "full need a mask, and a row that sees nothing yet must not compute inf - inf"
        )
    return out, L


def online(q: Tensor, k: Tensor, v: Tensor, slip: str = "") -> tuple[Tensor, Tensor]:
    """O and L as they must be, or as they come out with one of MISTAKES."""
    Tq, Tk = len(q), len(k)
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    seen = j <= (i if slip == "corner" else i + Tk - Tq)
    S = q @ k.T * (math.log2(math.e) / math.sqrt(D))
    if slip != "mask":
        S = S.masked_fill(~seen, -math.inf)
    base = math.e if slip == "exp" else 2.0
    O, l = torch.zeros_like(q), torch.zeros(Tq, 1)
    m = torch.full((Tq, 1), -1e30)
    for S_j, V_j in zip(S.split(BLOCK, dim=1), v.split(BLOCK), strict=True):
        m_new = torch.maximum(m, S_j.amax(dim=1, keepdim=True))
        P, rescale = base ** (S_j - m_new), base ** (m - m_new)
        l = (1 if slip == "no rescale of l" else rescale) * l + P.sum(dim=1, keepdim=True)
        kept = {"no rescale": 1.0, "last block": 0.0}.get(slip, rescale)
        O = kept * O + P @ V_j
        m = m_new
    if slip == "nothing":
        O = torch.zeros_like(O)
    return (O if slip == "not normalised" else O / l), (m + l.log2())[:, 0]


def maxima(q: Tensor, k: Tensor) -> Tensor:
    """The largest score that each query sees, in units of log 2."""
    Tq, Tk = len(q), len(k)
    S = q @ k.T * (math.log2(math.e) / math.sqrt(D))
    hidden = torch.arange(Tk) > torch.arange(Tq)[:, None] + Tk - Tq
    return S.masked_fill(hidden, -math.inf).amax(dim=1)
