"""Exercise 1: softmax, and attention of one query."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import same

TASK = """Softmax, and attention of one query

softmax(s)         s: (T,) scores. Returns (T,): exp(s_j) / sum of exp(s).
attend(q, K, V)    q: (D,), K and V: (T, D). Returns (D,): the mean of the rows of V,
                   weighted by softmax(K q / sqrt(D)).

Write softmax with exp, sum and max. Scores of 1000 and of -1000 must work.
"""
START = '''import math

import torch


def softmax(s):
    """s: (T,) scores. Returns (T,) weights that sum to 1."""
    # your lines here


def attend(q, K, V):
    """q: (D,), K and V: (T, D). Returns (D,)."""
    # your lines here, with softmax()
'''


def check(answer: ModuleType) -> None:
    for s in torch.tensor([[1.0, 2, 3], [2, 2, 2], [1000, 1001, 0], [-1000, -1001, -1000]]):
        e = torch.exp(s)
        mistakes = {
            "Divide exp(s) by its sum": e,
            "Subtract the largest score before exp(), or exp() overflows": e / e.sum(),
        }
        same(answer.softmax(s.clone()), s.softmax(0), "softmax(s)", f"s = {s.tolist()}", mistakes)
    draw = torch.Generator().manual_seed(0)
    for T, D in ((1, 4), (3, 2), (30, 9)):
        q, K, V = (torch.randn(*shape, generator=draw) for shape in ((D,), (T, D), (T, D)))
        s = K @ q / math.sqrt(D)
        mistakes = {
            "Divide the scores by sqrt(D)": (K @ q).softmax(0) @ V,
            "Divide the scores by sqrt(D), not by D": (K @ q / D).softmax(0) @ V,
            "Sum the values, not the keys": s.softmax(0) @ K,
        }
        case = f"T = {T}, D = {D}"
        got = answer.attend(q.clone(), K.clone(), V.clone())
        same(got, s.softmax(0) @ V, "attend(q, K, V)", case, mistakes)
