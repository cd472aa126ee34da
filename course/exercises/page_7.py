"""Checks, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import math
import os
import sys
from types import ModuleType

import torch
from torch import Tensor

from course.exercises import ALIGNED, UNMASKED
from course.exercises.check import causal, draws, reference, same

# Before model.py (for exercise 11) or an answer imports Triton.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ["TRITON_INTERPRET"] = "1"

GUARD = 64  # rows before and after each tensor
D = 64
TAU = 1 / math.sqrt(D)
BLOCKS = {"D": D, "BLOCK_M": 16, "BLOCK_N": 32}
LOG2E = math.log2(math.e)


def run(answer: ModuleType, name: str, grid: tuple[int, ...], tensors: dict[str, Tensor],
        want: dict[str, Tensor], *numbers: float, **sizes: int) -> None:
    """Call kernel `name`, with zeros for `want`. Raises AssertionError unless it writes `want`, and
    only there: NaN or, for `want`, inf surrounds each tensor."""
    kernel = getattr(answer, name)
    assert hasattr(kernel, "run"), f"{name} needs the decorator @triton.jit"
    shapes = (f"{what} {tuple(x.shape)}" for what, x in tensors.items())
    case = ", ".join([*shapes, *(f"{size} = {x}" for size, x in sizes.items())])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    guarded = {}
    for what, x in (tensors | {what: torch.zeros_like(x) for what, x in want.items()}).items():
        edge = torch.nan if what in tensors else torch.inf  # loads past an end give NaN
        guarded[what] = x.new_full((len(x) + 2 * GUARD, *x.shape[1:]), edge).to(device)
        guarded[what][GUARD:-GUARD] = x
    kernel[grid](*(x[GUARD:-GUARD] for x in guarded.values()), *numbers, **sizes)
    for what, x in want.items():
        same(guarded[what][GUARD:-GUARD].cpu(), x, what, case)
    for what, x in guarded.items():
        kept = (torch.isnan if what in tensors else torch.isinf)(torch.cat([x[:GUARD], x[-GUARD:]]))
        assert kept.all(), f"a store outside {what}, {case}: use mask="


def rising(seed: int, Tq: int, Tk: int, size: float) -> list[Tensor]:
    """q, k and v: the maximum of a row grows block by block."""
    q, k, v = draws(seed, (Tq, D), (Tk, D), (Tk, D))
    return [size * q, k * (1 + torch.arange(Tk)[:, None] // 32), v]


COPY = [
    ("X + t * D", "X", "Every program loads row 0: row t begins at X + t * D"),
    ("t * D", "t * BLOCK_D", "Rows are D numbers apart, not BLOCK_D"),
    ("Y + t * D", "Y", "Write to row t of Y: it begins at Y + t * D"),
]


def copy(answer: ModuleType) -> None:
    for T, width, BLOCK_D in ((1, 8, 8), (3, 8, 8), (3, 6, 8), (2, 40, 64)):
        (x,) = draws(width, (T, width))
        run(answer, "copy", (T,), {"X": x}, {"Y": x}, width, BLOCK_D=BLOCK_D)


SOFTMAX = [
    ('other=float("-inf")', "other=0.0",
     'Places past the row have a weight: other=float("-inf") makes it 0'),
    ("tl.exp(s - tl.max(s, axis=0))", "tl.exp(s)",
     "tl.exp overflows: subtract the largest score of the row"),
    ("p / tl.sum(p, axis=0)", "p", "Divide by the sum of the row"),
    ("S + i * Tk", "S", "Every program loads row 0: row i begins at S + i * Tk"),
    ("i * Tk", "i * BLOCK_N", "Rows are Tk numbers apart, not BLOCK_N"),
]


def softmax(answer: ModuleType) -> None:
    for Tq, Tk, BLOCK_N, size in ((3, 8, 8, 1), (5, 11, 16, 1), (4, 33, 64, 1000)):
        s = size * (draws(Tk, (Tq, Tk))[0] - 4 * torch.arange(Tq)[:, None])
        run(answer, "softmax", (Tq,), {"S": s}, {"P": s.softmax(1)}, Tk, BLOCK_N=BLOCK_N)


ADDRESS = "i[:, None] * Tk + j[None, :]"
SCORES = [
    ("tau * tl.dot", "tl.dot", "Multiply the scores by tau"),
    ("tl.program_id(1)", "tl.program_id(0)", "The block of keys is tl.program_id(1)"),
    (ADDRESS, ADDRESS.replace("Tk", "BLOCK_N"), "Rows of S are Tk numbers apart, not BLOCK_N"),
    ("tl.trans(K_j)", "K_j", "A product needs (BLOCK_M, D) and (D, BLOCK_N): tl.trans(K_j)"),
    (" & (j[None, :] < Tk)", "", "The store needs a mask for the columns too: j[None, :] < Tk"),
]


def scores(answer: ModuleType) -> None:
    for Tq, Tk in ((16, 32), (16, 64), (21, 43), (40, 50)):
        q, k = draws(Tk, (Tq, D), (Tk, D))
        run(answer, "scores", (-(-Tq // 16), -(-Tk // 32)), {"Q": q, "K": k},
            {"S": TAU * q @ k.T}, Tq, Tk, TAU, **BLOCKS)


MAX = "tl.maximum(m_i, tl.max(S_ij, axis=1))"
AXIS = "The maximum and the sum of a row are along axis=1"
LOAD = "Memory past the end holds NaN: loads need a mask"
STREAM = [  # of 7.4 and 7.5
    ("O_i / l_i[:, None]", "O_i", "Divide O_i by l_i after the loop"),
    ("rescale[:, None] * O_i", "O_i", "Rescale O_i when the maximum rises"),
    ("rescale * l_i", "l_i", "Rescale l_i when the maximum rises"),
    ("m_i = m_new", "pass", "m_i stays the first maximum: set m_i = m_new"),
    (MAX, "tl.max(S_ij, axis=1)", "m_new is the maximum of m_i and of the block"),
    (MAX, "tl.maximum(m_i, tl.max(S_ij, axis=0))", AXIS),
    (", mask=j[:, None] < Tk, other=0.0", "", LOAD),
]
ATTEND = [
    *STREAM,
    ("tl.exp(m_i - m_new)", "tl.exp(m_new - m_new)", "Rescale l_i and O_i by exp(m_i - m_new)"),
    ('tl.where(j[None, :] < Tk, S_ij, float("-inf"))', "S_ij",
     "A place past the last key has score 0: it must be -inf"),
    ("tau * tl.dot", "tl.dot", "Multiply the scores by tau"),
]


def attend(answer: ModuleType) -> None:
    for Tq, Tk, size in ((16, 32, 1), (21, 96, 1), (8, 43, 1), (16, 70, 200)):
        q, k, v = rising(Tk, Tq, Tk, size)
        run(answer, "attend", (-(-Tq // 16),), {"Q": q, "K": k, "V": v},
            {"O": (TAU * q @ k.T).softmax(1) @ v}, Tq, Tk, TAU, **BLOCKS)


FORWARD = [
    *STREAM,
    ("tl.exp2(m_i - m_new)", "tl.exp2(m_new - m_new)", "Rescale l_i and O_i by 2^(m_i - m_new)"),
    ("tl.exp2", "tl.exp", "Use tl.exp2: scale has the factor log2(e)"),
    ("tl.log2", "tl.log", "L is to base 2: m_i + tl.log2(l_i)"),
    (" + Tk - Tq", "", ALIGNED),
    ('S_ij = tl.where(seen, S_ij, float("-inf"))', "pass", UNMASKED),
]


def forward(answer: ModuleType) -> None:
    for Tq, Tk, size in ((16, 16, 1), (8, 32, 1), (16, 80, 1), (21, 43, 1), (16, 40, 200)):
        q, k, v = rising(Tq, Tq, Tk, size)
        out, L = reference(q, k, v, causal(Tq, Tk, Tk - Tq))
        run(answer, "forward", (-(-Tq // 16),), {"Q": q, "K": k, "V": v},
            {"O": out, "L": L * LOG2E}, Tq, Tk, TAU * LOG2E, **BLOCKS)


DS = "P_ij * (dP_ij - delta_i[:, None])"
BACKWARD = [
    (DS, "P_ij * dP_ij", "Subtract delta_i, the row sums of dO * O, from dP_ij"),
    (DS, "dP_ij - delta_i[:, None]", "Multiply dP_ij - delta_i by P_ij"),
    ("tl.where(seen, tl.exp2(S_ij - L_i[:, None]), 0.0)", "tl.exp2(S_ij - L_i[:, None])",
     "The causal mask is missing: P_ij is 0 where j > i + Tk - Tq"),
    ("j[None, :] <= i[:, None] + Tk - Tq", "j[None, :] <= i[:, None]", ALIGNED),
    ("scale * tl.dot", "tau * tl.dot", "2^x needs the scores with scale, which has log2(e)"),
    ("tl.trans(P_ij)", "P_ij", "dV is P^T dO, dK is dS^T Q: tl.trans()"),
    ("tl.exp2", "tl.exp", "L is to base 2: P_ij = 2^(S_ij - L_i)"),
    ("tau * dK_j", "dK_j", "Scale dK by tau, since S is scaled"),
    ("dV_j += ", "dV_j = ", "Add the parts of all blocks of queries: dV_j is overwritten"),
    ("tl.load(L + i, mask=i < Tq, other=0.0)", "tl.load(L + i)", LOAD),
]


def backward(answer: ModuleType) -> None:
    for Tq, Tk, size in ((32, 16, 1), (32, 48, 1), (64, 64, 1), (21, 43, 1), (70, 70, 4)):
        q, k, v, dout = draws(Tq + Tk, (Tq, D), (Tk, D), (Tk, D), (Tq, D))
        leaves = [t.requires_grad_() for t in (k, v)]
        out, L = reference(size * q, k, v, causal(Tq, Tk, Tk - Tq))
        L = (L * LOG2E).nan_to_num(neginf=0)  # a query before every key sees none
        want = dict(zip(("dK", "dV"), torch.autograd.grad(out, leaves, dout)))
        tensors = {"Q": size * q, "K": k, "V": v, "dO": dout, "L": L, "Delta": (out * dout).sum(1)}
        run(answer, "backward", (-(-Tk // 16),), {n: t.detach() for n, t in tensors.items()},
            want, Tq, Tk, TAU, TAU * LOG2E, D=D, BLOCK_M=32, BLOCK_N=16)


CHECKS = {"7.1": (copy, COPY), "7.2": (softmax, SOFTMAX), "7.3": (scores, SCORES),
          "7.4": (attend, ATTEND), "7.5": (forward, FORWARD), "7.6": (backward, BACKWARD)}
