"""Exercise 8: FlashAttention-4's online softmax, which rescales only when it must."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from docs.exercises.check import Wrong, call, parts, same, show, small

NAMES = ("attend",)
TASK = """Rescale only when you must

Write attend(S, V, block, threshold), which gives (out, L, rescaled).

    S           (T, Tk) scores in units of log 2: P is 2^S, normalised; -inf where a query does not
                see the key; every query sees at least one key of the first block
    V           (Tk, D)
    block       how many keys are looked at together; it divides Tk
    threshold   how far, in units of log 2, m may lag behind the true maximum of a row

The starting file is the online softmax of page 4, and gives the right out (T, D) and L (T,), the
log to base 2 of the sum of 2^S. But it multiplies O and l of every row by 2^(m - m_new) at every
block. Do that, as FlashAttention-4 does, only in the rows whose maximum has passed their m by more
than the threshold; in the others m stays as it is. The first block has nothing to rescale: there m
becomes the block's maximum. `rescaled` is how often a row was rescaled, over all rows and blocks.
"""
START = """
import torch


def attend(S, V, block, threshold):
    T, D = len(S), V.shape[1]
    O, l = torch.zeros(T, D), torch.zeros(T, 1)
    m = S[:, :block].amax(1, keepdim=True)
    rescaled = 0
    for first in range(0, S.shape[1], block):
        S_j, V_j = S[:, first : first + block], V[first : first + block]
        m_new = torch.maximum(m, S_j.amax(1, keepdim=True))
        if first:
            rescale = torch.exp2(m - m_new)
            l, O = rescale * l, rescale * O
            rescaled += T
        P = torch.exp2(S_j - m_new)
        l = l + P.sum(1, keepdim=True)
        O = O + P @ V_j
        m = m_new
    return O / l, (m + torch.log2(l))[:, 0], rescaled
"""

# A mistake -> the sentence that tells it by its symptom.
MISTAKES = {
    "P by the maximum": "That is what comes out when P is 2^(S - the new maximum) in a row that "
    "was not rescaled: P, l and O of a row must be relative to one m, the one that is kept",
    "l not rescaled": "That is what comes out when O is rescaled and l is not",
    "O not rescaled": "That is what comes out when l is rescaled and O is not",
    "L by the maximum": "That is what the true maximum + log2(l) gives: l is relative to m, which "
    "may lag behind it",
}

RULE = "a row is rescaled when its maximum has passed its m by more than the threshold"
COUNTS = {
    "always": "that is every row at every block",
    "grew": "that is whenever a maximum grew, however little",
    "together": "that is all rows as soon as one of them needs it",
    "first": "the first block has nothing to rescale",
    "nats": "that is a threshold times log 2: it is in units of log 2 already, as the scores are",
}


def check(answer: Any) -> None:
    """Raise Wrong for an answer that is not right."""
    inf = math.inf
    cases: list[tuple[list[list[float]], int, float]] = [
        # Grows by 3 and 1, then by 5 more, which is 9 over the m that was kept.
        ([[0, 3, 4, 1, 9]], 1, 8.0),
        ([[0, 20, 21, 50], [0, 1, 2, -inf]], 1, 8.0),  # two rows of which one grows
        ([[0, 8, 8, 8, 16]], 1, 8.0),  # exactly the threshold is not more than it
        ([[0, 1, 1, 2]], 1, 0.0),  # the ordinary online softmax
        ([[0, 70, 140, 200]], 1, 8.0),  # 2^200 is past float32
        ([[5.0 * n for n in range(40)]], 1, 8.0),  # and these steps lead there too
    ]
    draw = torch.Generator().manual_seed(8)
    inputs = [(torch.tensor(S), block, threshold) for S, block, threshold in cases]
    inputs.append((6 * torch.randn(16, 48, generator=draw), 8, 8.0))
    told = []
    for S, block, threshold in inputs:
        V = torch.randint(1, 9, (S.shape[1], 1), generator=draw).float()
        told.append(compare(answer, S, V, block, threshold))
    # Only now the counts: that an answer is wrong tells more than that it is slow.
    count(told, inputs)


def compare(answer: Any, S: Tensor, V: Tensor, block: int, threshold: float) -> int:
    """One call: out and L, held against the truth and against every mistake. Returns `rescaled`."""
    out, L, rescaled = parts(
        call(answer.attend, S, V, block, threshold), ("out", "L", "rescaled"), "attend()"
    )
    given = small(S=S, block=block, threshold=threshold)
    want, want_L, _ = online(S, V, block, threshold)
    if isinstance(out, Tensor) and out.shape == want.shape and not out.isfinite().all():
        row = int((~out.isfinite()).any(dim=1).nonzero()[0])
        scores = S[row][S[row].isfinite()]
        if scores.max() - scores.min() < 127:
            raise Wrong(
                f"out[{row}] is not finite, {given}: the scores of that row go from "
                f"{scores.min():g} to {scores.max():g} only, so nothing need overflow. m of a row "
                "never falls: it must not become -inf in a block of which the row sees no key"
            )
        raise Wrong(
            f"out[{row}] is not finite, {given}: the scores of that row go from {scores.min():g} "
            f"to {scores.max():g}, and 2^(S - m) is past the largest number. A row must be "
            "rescaled once its maximum has passed the m that it is relative to by more than the "
            "threshold, even if it got there by small steps"
        )
    slips = {text: online(S, V, block, threshold, slip) for slip, text in MISTAKES.items()}
    same(out, want, "out", given, {t: o for t, (o, _, _) in slips.items() if not o.equal(want)})
    same(L, want_L, "L", given, {t: x for t, (_, x, _) in slips.items() if not x.equal(want_L)})
    if isinstance(rescaled, Tensor) and rescaled.numel() == 1:
        rescaled = rescaled.item()
    if not isinstance(rescaled, (int, float)) or rescaled % 1 != 0:
        raise Wrong(f"rescaled is {show(rescaled)}, must be a whole number, {given}")
    return int(rescaled)


def count(told: list[int], inputs: list[tuple[Tensor, int, float]]) -> None:
    """Refuse other numbers of rescaled rows than the rule gives."""
    want = [counts(*each) for each in inputs]
    wrong = [n for n, (a, b) in enumerate(zip(told, want, strict=True)) if a != b["right"]]
    if not wrong:
        return
    S, block, threshold = inputs[wrong[0]]
    # A mistake is named when it gives every count, since any one number may come by chance.
    slip = next((s for s in COUNTS if told == [each[s] for each in want]), "right")
    raise Wrong(
        f"out and L are right, but rows were rescaled {told[wrong[0]]} times, must be "
        f"{want[wrong[0]]['right']}, {small(S=S, block=block, threshold=threshold)}: "
        f"{COUNTS.get(slip, RULE)}"
    )


def counts(S: Tensor, block: int, threshold: float) -> dict[str, int]:
    """How many rows are rescaled, by the rule ("right") and by each mistake of COUNTS."""
    V = torch.zeros(S.shape[1], 1)
    right = online(S, V, block, threshold)[2]
    return {
        "right": right,
        "always": len(S) * (S.shape[1] // block - 1),
        "grew": online(S, V, block, 0.0)[2],
        "together": online(S, V, block, threshold, "together")[2],
        "first": right + len(S),
        "nats": online(S, V, block, threshold * math.log(2))[2],
    }


def online(S: Tensor, V: Tensor, block: int, threshold: float,
           slip: str = "") -> tuple[Tensor, Tensor, int]:  # fmt: skip
    """out, L and the number of rescaled rows, as they must be or with one of MISTAKES."""
    m = S[:, :block].amax(1, keepdim=True)
    O, l, rescaled = torch.zeros(len(S), V.shape[1]), torch.zeros(len(S), 1), 0
    for S_j, V_j in zip(S.split(block, dim=1), V.split(block), strict=True):
        top = torch.maximum(m, S_j.amax(1, keepdim=True))
        past = top - m > threshold
        m_new = torch.where(past.any() if slip == "together" else past, top, m)
        rescaled += int((m_new > m).sum())
        rescale = torch.exp2(m - m_new)
        P = torch.exp2(S_j - (top if slip == "P by the maximum" else m_new))
        l = (1 if slip == "l not rescaled" else rescale) * l + P.sum(1, keepdim=True)
        O = (1 if slip == "O not rescaled" else rescale) * O + P @ V_j
        m = m_new
    base = S.amax(1, keepdim=True) if slip == "L by the maximum" else m
    return O / l, (base + l.log2())[:, 0], rescaled
