"""Exercise 7.6: gradients of keys and values, in Triton."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import causal, draws, reference
from course.exercises.kernels import NEEDS as NEEDS
from course.exercises.kernels import compare

BLOCK_M, BLOCK_N, D = 32, 16, 64
DS = "P_ij * (dP_ij - delta_i[:, None])"
MISTAKES = [
    (DS, "P_ij * dP_ij", "Subtract delta_i, the row sums of dO * O, from dP_ij"),
    (DS, "dP_ij - delta_i[:, None]", "Multiply dP_ij - delta_i by P_ij"),
    ("tl.where(seen, tl.exp2(S_ij - L_i[:, None]), 0.0)", "tl.exp2(S_ij - L_i[:, None])",
     "The causal mask is missing: P_ij is 0 where j > i + Tk - Tq"),
    ("j[None, :] <= i[:, None] + Tk - Tq", "j[None, :] <= i[:, None]",
     "Query i sees key j where j <= i + Tk - Tq, not j <= i"),
    ("scale * tl.dot", "tau * tl.dot", "2^x needs the scores with scale, which has log2(e)"),
    ("tl.trans(P_ij)", "P_ij", "dV is P^T dO, dK is dS^T Q: tl.trans()"),
    ("tl.exp2", "tl.exp", "L is to base 2: P_ij = 2^(S_ij - L_i)"),
    ("S_ij - L_i[:, None]", "S_ij", "P_ij is 2^(S_ij - L_i)"),
    ("tau * dK_j", "dK_j", "Scale dK by tau, since S is scaled"),
    ("tau * dK_j", "scale * dK_j", "Scale dK by tau: log2(e) is for the exponential alone"),
    ("dV_j += ", "dV_j = ", "Add the parts of all blocks of queries: dV_j is overwritten"),
    ("dK_j += ", "dK_j = ", "Add the parts of all blocks of queries: dK_j is overwritten"),
    ("tl.load(L + i, mask=i < Tq, other=0.0)", "tl.load(L + i)",
     "Memory after the last query holds NaN: loads need a mask"),
]


def check(answer: ModuleType) -> None:
    for Tq, Tk, size in ((32, 16, 1), (32, 48, 1), (64, 64, 1), (21, 43, 1), (70, 70, 4)):
        q, k, v, dout = draws(Tq + Tk, (Tq, D), (Tk, D), (Tk, D), (Tq, D))
        q, tau = size * q, 1 / math.sqrt(D)
        case = f"Tq = {Tq}, Tk = {Tk}{', large scores' if size > 1 else ''}"
        leaves = [t.requires_grad_() for t in (k, v)]
        out, L = reference(q, k, v, causal(Tq, Tk, Tk - Tq))
        L = (L * math.log2(math.e)).nan_to_num(neginf=0)  # a query before every key sees none
        want = dict(zip(("dK", "dV"), torch.autograd.grad(out, leaves, dout)))
        tensors = {"Q": q, "K": k.detach(), "V": v.detach(), "dO": dout, "L": L.detach(),
                   "Delta": (out * dout).sum(1).detach()}
        compare(answer, "backward", (-(-Tk // BLOCK_N),), tensors, want, Tq, Tk, tau,
                tau * math.log2(math.e), case=case, D=D, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N)
