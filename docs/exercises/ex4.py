"""Exercise 4: one step of the online softmax."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from docs.exercises.check import call, parts, same, show

NAMES = ("update",)
TASK = """
Softmax a block at a time

The scores of B_r queries come in blocks of B_c keys, each with its values. Write

    update(m, l, O, S, V)    returns the new m, l, O

    m    (B_r, 1)    the largest score of each row so far; before the first block the least finite
                     number, torch.finfo(torch.float32).min
    l    (B_r, 1)    the sum of exp(s - m) over the scores of the row so far; at first 0
    O    (B_r, D)    the sum of exp(s - m) v over the same, not divided by anything; at first 0
    S    (B_r, B_c)  the new block of scores; -inf where the query does not see the key
    V    (B_c, D)    the values of those keys

After the last block O / l must be softmax(all scores) V. You see each block once, and nothing of
the blocks before but m, l and O. There may be rows of which a block shows no key at all.
"""
START = '''
import torch


def update(m, l, O, S, V):
    """One block more. Returns the new m, l, O."""
    m_new = torch.maximum(m, S.amax(dim=1, keepdim=True))
    P = torch.exp(S - m_new)
    # l and O were sums of exp(s - m), with the old m: what must happen to them?
    return m_new, P.sum(dim=1, keepdim=True), P @ V
'''

HIDDEN = -math.inf
# Blocks of scores of two rows.
CASES: dict[str, list[list[list[float]]]] = {
    "one block": [[[1.0, 3.0], [0.0, 0.0]]],
    "a maximum that rises": [[[1.0, 2.0], [0.0, 0.0]], [[4.0, 3.0], [1.0, 0.0]]],
    "a maximum that stays": [[[4.0, 3.0], [5.0, 0.0]], [[1.0, 2.0], [0.0, -1.0]], [[0.0], [2.0]]],
    "hidden keys": [[[1.0, HIDDEN], [HIDDEN, 2.0]], [[3.0, 0.0], [HIDDEN, HIDDEN]]],
    "a first block that the second row does not see": [
        [[1.0, 0.0], [HIDDEN, HIDDEN]],
        [[2.0, 0.0], [-5.0, -6.0]],
    ],
    "large scores": [[[100.0, 200.0], [-3e4, -4e4]], [[300.0, 1.0], [3e4, 2e4]]],
}


def check(answer: Any) -> None:
    """m, l and O after every block, then O / l. Raises Wrong."""
    draw = torch.Generator().manual_seed(0)
    drawn = {"drawn": [(4 * torch.randn(2, n, generator=draw)).tolist() for n in (8, 8, 5)]}
    for name, case in (CASES | drawn).items():
        l, O = torch.zeros(2, 1), torch.zeros(2, 3)
        m = torch.full_like(l, torch.finfo(l.dtype).min)
        seen_S, seen_V = torch.empty(2, 0), torch.empty(0, 3)
        for n, block in enumerate(case, start=1):
            S = torch.tensor(block)
            V = torch.randn(S.shape[1], 3, generator=draw)
            got = parts(call(answer.update, m, l, O, S, V), ("m", "l", "O"), "update()")
            seen_S, seen_V = torch.cat([seen_S, S], dim=1), torch.cat([seen_V, V])
            m_new = torch.maximum(m, S.amax(dim=1, keepdim=True))
            P = torch.exp(seen_S - m_new)
            want = m_new, P.sum(dim=1, keepdim=True), P @ seen_V
            before = f"came after m = {show(m)}, l = {show(l)}" if n > 1 else "is the first block"
            given = f"after block {n} of the case '{name}': S = {show(S)} {before}"
            wrong = typical(m, l, O, S, V)
            for label, g, w in zip(("m", "l", "O"), got, want):
                same(g, w, label, given, wrong[label])
            m, l, O = want


def typical(m: Tensor, l: Tensor, O: Tensor, S: Tensor, V: Tensor) -> dict[str, dict[str, Tensor]]:
    """What typical mistakes give for one block, for m, l and O."""
    block_max = S.amax(dim=1, keepdim=True)
    m_new = torch.maximum(m, block_max)
    P, factor = torch.exp(S - m_new), torch.exp(m - m_new)
    new_l, new_O = P.sum(dim=1, keepdim=True), P @ V
    l_right = factor * l + new_l
    forgotten = "what was there before is not rescaled: it is a sum of exp(s - m) with the old m"
    upside_down = "the old sum is rescaled by exp(m_new - m); it must be exp(m - m_new)"
    lost = "only this block is in it: what was there before is lost"
    stale = "the new terms are exp(s - m) with the old m; it must be the new one"
    early = "That is divided already; O is a sum, divided once, by l, after the last block"
    return {
        "m": {
            "That is the maximum of this block alone; m is of all blocks so far": block_max,
            "m is still the old one": m,
            "That is one maximum for all rows; each row has its own": m_new.max().expand_as(m),
        },
        "l": {
            f"In l {lost}": new_l,
            f"In l {forgotten}": l + new_l,
            f"In l {upside_down}": l / factor + new_l,
            f"In l {stale}": l + torch.exp(S - m).sum(dim=1, keepdim=True),
        },
        "O": {
            f"In O {lost}": new_O,
            f"In O {forgotten}": O + new_O,
            f"In O {upside_down}": O / factor + new_O,
            early: (factor * O + new_O) / l_right,
            f"{early} (one block's mean is no use to the next)": factor * O + new_O / new_l,
        },
    }
