"""Exercise 6: the gradients of attention from what the forward pass kept, block by block."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from docs.exercises.check import Wrong, call, parts, same, small

NAMES = ("backward",)
TASK = """Gradients without P

Write backward(q, k, v, out, L, dout, block), which gives (dq, dk, dv).

    q, out, dout   (R, Tq, D)   of the R query heads that share one key/value head
    k, v           (Tk, D)      of that head
    L              (R, Tq)      log of the sum of exp(s) over the keys that the query sees
    block          how many keys are looked at together; the last block may be shorter

Scores are s = q . k / sqrt(D). Query i sees key j when j <= i + Tk - Tq, and every query sees at
least one key. P was not kept: compute it again for one block of keys at a time. No tensor as large
as all of P, R * Tq * Tk numbers, may be made. dk and dv have the shape of k and v.
"""
START = """
import math

import torch


def backward(q, k, v, out, L, dout, block):
    R, Tq, D = q.shape
    Tk = len(k)
    tau = 1 / math.sqrt(D)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    i = torch.arange(Tq)[:, None]
    # once, before the blocks: what does each row need that is a sum over all keys?
    for first in range(0, Tk, block):
        J = slice(first, min(first + block, Tk))
        j = torch.arange(J.start, J.stop)
        S = tau * (q @ k[J].T)  # (R, Tq, keys of the block)
        # P from S and L; then dv[J], dP, dS, dk[J], and this block's part of dq
    return dq, dk, dv
"""

Gradients = tuple[Tensor, Tensor, Tensor]

# A mistake -> the sentence that tells it by its symptom.
MISTAKES = {
    "nothing": "That is zero: nothing was added to it yet",
    "mask": "That is what comes out when P is computed again without the mask: a query then hands "
    "gradient to keys that come after it, which its output does not depend on",
    "corner": "That is what j <= i gives: the mask stands in the upper left corner, and must end "
    "in the lower right one, so that the last query sees the last key",
    "L": "That is what exp(S) gives: without L a row of P does not sum to 1",
    "block softmax": "That is what a softmax over the block alone gives: a row of P sums to 1 over "
    "all keys, and L knows all of them: P = exp(S - L)",
    "S": "That is what scores without 1 / sqrt(D) give: then exp(S - L) is not the P of the "
    "forward pass",
    "D": "That is what dS = P * dP gives: D is missing. Adding one number to all scores of a row "
    "changes nothing, so a row of dS must sum to 0, and here it does not",
    "block D": "That is what D summed over the block alone gives: D_i = rowsum(dO * O), once for "
    "all blocks",
    "scale": "That is sqrt(D) times too large: s = q . k / sqrt(D), so dS reaches q and k with the "
    "factor 1 / sqrt(D) too",
    "last block": "That is the last block's part alone: every block of keys adds to dq",
    "one head": "That is the gradient from the last query head alone: all R heads read the same "
    "keys and values, so their gradients are summed",
    "mean": "That is the mean over the query heads: their gradients are summed",
}  # fmt: skip


def gradients(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, block: int, slip: str = ""
) -> Gradients:
    """dq, dk, dv as they must be, or as they come out with one of MISTAKES."""
    (R, Tq, _), Tk, tau = q.shape, len(k), 1 / math.sqrt(q.shape[2])
    if slip == "nothing":
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    seen = j <= i + Tk - Tq
    S = tau * (q @ k.T)
    L = S.masked_fill(~seen, -math.inf).logsumexp(-1, keepdim=True)
    out = (S - L).exp().where(seen, 0.0) @ v
    again = S / tau if slip == "S" else S
    if slip != "mask":
        again = again.masked_fill(~(j <= i if slip == "corner" else seen), -math.inf)
    blocks = again.split(block, dim=-1)
    if slip == "block softmax":
        P = torch.cat([b.softmax(-1).nan_to_num() for b in blocks], dim=-1)
    else:
        P = (again if slip == "L" else again - L).exp()
    dP = dout @ v.T
    Di = (dout * out).sum(-1, keepdim=True)
    if slip == "block D":
        each = [b.sum(-1, keepdim=True).expand(b.shape) for b in (P * dP).split(block, dim=-1)]
        Di = torch.cat(each, dim=-1)
    dS = P * (dP if slip == "D" else dP - Di)
    if slip != "scale":
        dS = tau * dS
    last = slice((Tk - 1) // block * block if slip == "last block" else 0, Tk)
    dk, dv = dS.mT @ q, P.mT @ dout  # (R, Tk, D)
    if slip == "one head":
        return dS @ k, dk[-1], dv[-1]
    share = 1 / R if slip == "mean" else 1
    return dS[..., last] @ k[last], share * dk.sum(0), share * dv.sum(0)


def check(answer: Any) -> None:
    """Raise Wrong for an answer that is not right."""
    one = torch.ones(1, 1, 2)
    compare(answer, one, 2 * one[0], one[0], 3 * one, 1)
    for R, Tq, Tk, D, block in ((1, 3, 3, 4, 8), (1, 4, 4, 4, 2), (1, 2, 5, 4, 2), (2, 3, 4, 4, 3)):
        draw = torch.Generator().manual_seed(10 * Tq + Tk)
        q, k, v, dout = (
            torch.randint(-2, 3, shape, generator=draw).float()
            for shape in ((R, Tq, D), (Tk, D), (Tk, D), (R, Tq, D))
        )
        compare(answer, q, k, v, dout, block)
    size_of_what_is_made(answer)


def compare(answer: Any, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, block: int) -> None:
    """One call, held against the truth and against every mistake."""
    truth = gradients(q, k, v, dout, block)
    got = parts(call(answer.backward, q, k, v, *kept(q, k, v), dout, block), ("dq", "dk", "dv"),
                "backward()")  # fmt: skip
    slips = {text: gradients(q, k, v, dout, block, slip) for slip, text in MISTAKES.items()}
    R, Tq, _ = q.shape
    shapes = f"with R = {R}, Tq = {Tq}, Tk = {len(k)} and block = {block}"
    given = small(q=q, k=k, v=v, dout=dout) if len(k) == 1 else shapes
    for n, name in ((2, "dv"), (0, "dq"), (1, "dk")):
        if name != "dq" and getattr(got[n], "shape", None) == (R, *k.shape):
            raise Wrong(
                f"{name} has shape {tuple(got[n].shape)}, must be of shape {tuple(k.shape)}, "
                f"{shapes}: all R heads read the same keys and values, so their gradients are "
                "summed"
            )
        # A mistake that this input does not show is none of this complaint's.
        shown = {text: m[n] for text, m in slips.items() if not torch.equal(m[n], truth[n])}
        same(got[n], truth[n], name, given, shown)


def kept(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """out and L, as a forward pass leaves them."""
    Tq, Tk = q.shape[1], len(k)
    S = q @ k.T / math.sqrt(q.shape[2])
    S = S.masked_fill(torch.arange(Tk) > torch.arange(Tq)[:, None] + Tk - Tq, -math.inf)
    return S.softmax(-1) @ v, S.logsumexp(-1)


class Largest(TorchDispatchMode):
    """Notes the shape of the largest tensor that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for t in tree_leaves(made):
            if isinstance(t, Tensor) and t.numel() > math.prod(self.shape):
                self.shape = tuple(t.shape)
        return made


def size_of_what_is_made(answer: Any) -> None:
    R, T, D, block = 3, 12, 2, 3
    draw = torch.Generator().manual_seed(0)
    q, dout = torch.randn(2, R, T, D, generator=draw)
    k, v = torch.randn(2, T, D, generator=draw)
    compare(answer, q, k, v, dout, block)
    out, L = kept(q, k, v)
    with Largest() as largest:
        answer.backward(q, k, v, out, L, dout, block)
    if math.prod(largest.shape) >= R * T * T:
        raise Wrong(
            f"the gradients are right, but a tensor of shape {largest.shape} was made, as large as "
            f"all of P, with R = {R}, Tq = Tk = {T} and block = {block}: scores must exist for one "
            "block of keys at a time"
        )
