"""Exercise 10: attention over keys that lie in several processes, without the processes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from docs.exercises.check import call, parts, same, small

NAMES = ("join", "backward_block")
TASK = """
Join partial outputs, and go back through one block

1. join(O, L, O_new, L_new) gives (O, L) over the keys of both.

       O, O_new    (T, D)    softmax(scores) V of T queries over some keys: divided already
       L, L_new    (T,)      log of the sum of exp(s) over the same keys

   The two sets of keys have none in common. A query that saw no key of a set has O = 0 and
   L = -inf there. Scores may be in the thousands.

2. backward_block(dout, q, k, v, out, L, offset) gives (dq, dk, dv): what this block of keys adds to
   the gradient of q, and what these queries add to those of k and v.

       q, dout, out    (Tq, D)    queries, and output of the WHOLE row with its gradient
       L               (Tq,)      of the WHOLE row: over all keys in all processes
       k, v            (Tk, D)    the block that has just arrived
       offset          position of the first query less that of the first key, of any sign:
                       query i sees key j when j <= i + offset

   Scores are s = q . k / sqrt(D). Of a block a query may see all keys, some, or none.
"""
START = '''
import math

import torch


def join(O, L, O_new, L_new):
    """(O, L) over the keys of both."""
    # which share of the whole sum has each of them?
    return (O + O_new) / 2, torch.maximum(L, L_new)


def backward_block(dout, q, k, v, out, L, offset):
    """What one block of keys adds to dq, and what these queries add to dk and dv."""
    tau = 1 / math.sqrt(q.shape[1])
    S = tau * (q @ k.T)  # (Tq, Tk)
    # P from S and L; then dv, dP, dS, dq and dk, as on page 6
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
'''

Joined = tuple[Tensor, Tensor]
Gradients = tuple[Tensor, Tensor, Tensor]

# A mistake -> the sentence that tells it by its symptom.
JOINS = {
    "empty": "A query that saw no key of either set has L = -inf, and -inf - (-inf) is NaN: it "
    "must stay with O = 0 and L = -inf",
    "overflow": "That is what exp(L) gives, which is too large for float32 from 89 on: take the "
    "larger L off first, as a softmax does, or use torch.logaddexp",
    "sum": "That is the two added up: both are divided already, so each must count by its share of "
    "the whole sum",
    "mean": "That is the mean of the two: the one whose scores are higher counts for more, by "
    "exp(L) of each",
    "swapped": "That is with the two shares exchanged: O has the share exp(L - L_of_both)",
    "undivided": "That is each times exp(L - the larger L), and not divided by the sum of the two "
    "factors",
    "base 2": "That is with powers of 2: this L is a natural logarithm",
    "by L": "That is weighted by L itself: L is a logarithm, the sums are exp(L)",
    "larger L": "That is the larger of the two: the whole sum has the terms of both",
    "L added": "That is L + L_new, the logarithm of a product: the sums are added, not multiplied",
}
BLOCKS = {
    "nothing": "That is zero: nothing was computed yet",
    "mask": "That is what comes out without the mask: a query hands gradient to keys that come "
    "after it",
    "corner": "That is what j <= i gives: the positions of queries and keys differ by the offset",
    "alone": "That is the gradient of attention over this block alone: its softmax sums to 1 over "
    "the block, and that of the row over the keys of all processes",
    "block softmax": "That is what a softmax over this block gives: P sums to 1 over all keys, and "
    "the L that was given knows all of them: P = exp(S - L)",
    "block D": "That is what D summed over this block gives: D_i = rowsum(dout * out), of the "
    "whole row",
    "D": "That is what dS = P * dP gives: D is missing",
    "S": "That is what scores without 1 / sqrt(D) give: then exp(S - L) is not the P of the "
    "forward pass",
    "scale": "That is sqrt(D) times too large: s = q . k / sqrt(D), so dS reaches q and k with the "
    "factor 1 / sqrt(D) too",
}  # fmt: skip


def joined(O: Tensor, L: Tensor, O_new: Tensor, L_new: Tensor, slip: str = "") -> Joined:
    """(O, L) as they must be, or as they come out with one of JOINS."""
    both = torch.logaddexp(L, L_new)
    if slip == "overflow":
        both = torch.log(torch.exp(L) + torch.exp(L_new))
    shares = [torch.exp(x - both) for x in (L, L_new)]
    if slip == "undivided":
        shares = [torch.exp(x - torch.maximum(L, L_new)) for x in (L, L_new)]
    if slip == "base 2":
        both = torch.logaddexp2(L, L_new)
        shares = [torch.exp2(x - both) for x in (L, L_new)]
    if slip == "by L":
        shares = [L / (L + L_new), L_new / (L + L_new)]
    if slip == "swapped":
        shares.reverse()
    if slip in ("sum", "mean"):
        shares = [torch.full_like(L, 1.0 if slip == "sum" else 0.5)] * 2
    if slip not in ("empty", "overflow", "by L"):
        shares = [x.nan_to_num() for x in shares]
    both = {"larger L": torch.maximum(L, L_new), "L added": L + L_new}.get(slip, both)
    return shares[0][:, None] * O + shares[1][:, None] * O_new, both


def of_block(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, offset: int,
             slip: str = "") -> Gradients:  # fmt: skip
    """dq, dk, dv of one block as they must be, or as they come out with one of BLOCKS."""
    Tq, Tk, tau = len(q), len(k), 1 / math.sqrt(q.shape[1])
    if slip == "nothing":
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    S = q @ k.T * (1 if slip == "S" else tau)
    if slip != "mask":
        shift = 0 if slip == "corner" else offset
        S = S.masked_fill(torch.arange(Tk) > torch.arange(Tq)[:, None] + shift, -math.inf)
    P = torch.exp(S - L[:, None])
    if slip in ("block softmax", "alone"):
        P = S.softmax(-1).nan_to_num()
    dP = dout @ v.T
    D_i = (dout * out).sum(-1, keepdim=True)
    if slip in ("block D", "alone"):
        D_i = (P * dP).sum(-1, keepdim=True)
    dS = (P * (dP - (0 if slip == "D" else D_i))) * (1 if slip == "scale" else tau)
    return dS @ k, dS.T @ q, P.T @ dout


def partial(q: Tensor, kv: Tensor, offset: int) -> Joined:
    """(O, L) of queries over some keys and their values alone, by the formula."""
    k, v = kv
    seen = torch.arange(len(k)) <= torch.arange(len(q))[:, None] + offset
    S = (q @ k.T / math.sqrt(q.shape[1])).masked_fill(~seen, -math.inf)
    return S.softmax(-1).nan_to_num() @ v, S.logsumexp(-1)


def check(answer: Any) -> None:
    """Raise Wrong for an answer that is not right."""
    check_join(answer)
    check_block(answer)


def check_join(answer: Any) -> None:
    never = -math.inf
    O, O_new = torch.tensor([[1.0], [6.0]]), torch.tensor([[5.0], [-2.0]])
    for case in (([1.0, 1.0], [1.0, 3.0]), ([1.0, 3.0], [2.0, -4.0]),
                 ([1000.0, -900.0], [1001.0, -901.0]), ([2.0, never], [never, 0.5]),
                 ([never, 1.0], [never, 1.0])):  # fmt: skip
        L, L_new = torch.tensor(case)
        one, two = (x.masked_fill(y[:, None] == never, 0) for x, y in ((O, L), (O_new, L_new)))
        compare_join(answer, one, L, two, L_new, small(O=one, L=L, O_new=two, L_new=L_new))
    # The last of three processes, in the order in which the blocks come round to it.
    draw = torch.Generator().manual_seed(0)
    q, blocks = torch.randn(4, 4, generator=draw), torch.randn(3, 2, 4, 4, generator=draw)
    O, L = partial(q, blocks[0], 0)
    for n in (1, 2):
        given = f"after block {n + 1} of 3, with T = D = 4"
        O, L = compare_join(answer, O, L, *partial(q, blocks[n], 4 * n), given)


def compare_join(answer: Any, O: Tensor, L: Tensor, O_new: Tensor, L_new: Tensor,
                 given: str) -> Joined:  # fmt: skip
    """One call, held against the truth and against every mistake."""
    want = joined(O, L, O_new, L_new)
    got = parts(call(answer.join, O, L, O_new, L_new), ("O", "L"), "join()")
    slips = {text: joined(O, L, O_new, L_new, slip) for slip, text in JOINS.items()}
    for n, name in ((1, "L"), (0, "O")):
        # A mistake that this input does not show is none of this complaint's.
        shown = {text: m[n] for text, m in slips.items() if not torch.equal(m[n], want[n])}
        same(got[n], want[n], name, given, shown)
    return want


def check_block(answer: Any) -> None:
    # A block wholly seen, on the diagonal, seen in part from either side; of other lengths.
    for Tq, Tk, offset in ((3, 3, 3), (3, 3, 0), (4, 4, 2), (4, 4, -2), (2, 5, 3)):
        draw = torch.Generator().manual_seed(10 * Tq + Tk + offset)
        q, dout = torch.randint(-2, 3, (2, Tq, 4), generator=draw).float()
        kv = torch.randint(-2, 3, (2, Tk, 4), generator=draw).float()
        before = torch.randint(-2, 3, (2, 3, 4), generator=draw).float()  # other keys and values
        out, L = joined(*partial(q, before, 99), *partial(q, kv, offset))
        asked = dout, q, kv[0], kv[1], out, L, offset
        want = of_block(*asked)
        names = ("dq", "dk", "dv")
        got = parts(call(answer.backward_block, *asked), names, "backward_block()")
        slips = {text: of_block(*asked, slip) for slip, text in BLOCKS.items()}
        given = f"with Tq = {Tq}, Tk = {Tk} and offset = {offset}"
        for n in range(3):
            shown = {text: m[n] for text, m in slips.items() if not torch.equal(m[n], want[n])}
            same(got[n], want[n], names[n], given, shown)
