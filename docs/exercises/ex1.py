"""Exercise 1: attention of one query, softmax included."""

from __future__ import annotations

import math
from typing import Any

import torch

from docs.exercises.check import call, same, small

NAMES = ("softmax", "attend")
TASK = """
Softmax, and attention of one query

Write two functions.

    softmax(s)         s: (T,) scores. Returns (T,): exp(s_j) / sum of all exp(s), for each j.
    attend(q, K, V)    q: (D,), K and V: (T, D). Returns (D,): the mean of the rows of V,
                       weighted by softmax(K q / sqrt(D)).

Build softmax from exp, sum and max: torch.softmax is what you are writing. Scores of 1000 must not
overflow, and scores of -1000 must not vanish all at once.
"""
START = '''
import math

import torch


def softmax(s):
    """s: (T,) scores. Returns (T,) weights that sum to 1."""
    # your lines here


def attend(q, K, V):
    """q: (D,), K and V: (T, D). Returns (D,)."""
    # your lines here, with softmax()
'''


def check(answer: Any) -> None:
    """Scores small, large and equal; then queries against keys. Raises Wrong."""
    for scores in ([1.0, 2.0, 3.0], [5.0], [2.0, 2.0, 2.0, 2.0], [1000.0, 1001.0],
                   [-1000.0, -1001.0], [0.0, -3000.0, 3000.0]):  # fmt: skip
        s = torch.tensor(scores)
        e = torch.exp(s)
        overflow = "Subtract the largest score before exp(): the quotient stays the same"
        mistakes = {
            "That is exp(s), not yet divided by its sum": e,
            f"exp() of these is {'inf' if e.isinf().any() else '0'}. {overflow}": e / e.sum(),
            "That divides the scores by their sum; exp() comes first": s / s.sum(),
        }
        same(call(answer.softmax, s), s.softmax(0), "softmax(s)", small(s=s), mistakes)

    draw = torch.Generator().manual_seed(0)
    small_case = [torch.tensor(x) for x in ([2.0, 0, 0, 0], [[1.0, 0, 0, 0], [0, 1, 0, 0]],
                                            [[1.0, 2, 3, 4], [5, 6, 7, 8]])]  # fmt: skip
    drawn = [torch.randn(*shape, generator=draw) for shape in ((9,), (30, 9), (30, 9))]
    for q, K, V in (small_case, drawn, [drawn[0] * 300, *drawn[1:]]):
        D = len(q)
        mistakes = {
            "That is what comes out without the division by sqrt(D)": (K @ q).softmax(0) @ V,
            "That is what comes out when the scores are divided by D; it must be sqrt(D)": (
                (K @ q / D).softmax(0) @ V
            ),
            "That is what comes out when they are multiplied by sqrt(D)": (
                (K @ q * math.sqrt(D)).softmax(0) @ V
            ),
            "That is the plain mean of the values: the weights are missing": V.mean(0),
            "That is a mean of the keys; V holds the values": (
                (K @ q / math.sqrt(D)).softmax(0) @ K
            ),
            "That is the weighted sum with scores for weights; softmax() is missing": (
                (K @ q / math.sqrt(D)) @ V
            ),
        }
        want = (K @ q / math.sqrt(D)).softmax(0) @ V
        same(call(answer.attend, q, K, V), want, "attend(q, K, V)", small(q=q, K=K, V=V), mistakes)
