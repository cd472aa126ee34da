"""Exercise 1: softmax, and attention of one query."""

from __future__ import annotations

from types import ModuleType

import torch

from course.exercises.check import causal, draws, forbidding, reference, same

MISTAKES = [
    ("return e / e.sum()", "return e", "Divide exp(s) by its sum"),
    ("s - s.max()", "s", "Subtract the largest score before exp(), or exp() overflows"),
    ("s - s.max()", "s.clamp(-80, 80)", "Do not clamp: subtract the largest score before exp()"),
    (" / math.sqrt(len(q))", "", "Divide the scores by sqrt(D)"),
    ("sqrt(len(q))", "sqrt(len(K))", "Divide the scores by sqrt(D), not by sqrt(T)"),
    ("/ math.sqrt(len(q))", "/ len(q)", "Divide the scores by sqrt(D), not by D"),
    ("/ math.sqrt(len(q))", "* math.sqrt(len(q))", "Divide the scores by sqrt(D), not multiply"),
    (" @ V", " @ K", "Sum the values, not the keys"),
    ("softmax(K @ q / math.sqrt(len(q)))", "(K @ q / math.sqrt(len(q)))",
     "The weights are the softmax of the scores"),
]


def check(answer: ModuleType) -> None:
    names = ("softmax", "log_softmax", "logsumexp", "_softmax")
    with forbidding(answer, names, "write softmax with exp, sum and max"):
        answer.softmax(torch.tensor([1.0, 2.0]))
    for s in torch.tensor([[1.0, 2, 3], [2, 2, 2], [1000, 1001, 0], [-1000, -1001, -1000]]):
        same(answer.softmax(s.clone()), s.softmax(0), "softmax(s)", f"s = {s.tolist()}")
    for T, D in ((1, 4), (3, 2), (30, 9)):
        q, K, V = draws(0, (D,), (T, D), (T, D))
        want = reference(q[None], K, V, causal(1, T, T))[0][0]
        got = answer.attend(q.clone(), K.clone(), V.clone())
        same(got, want, "attend(q, K, V)", f"T = {T}, D = {D}")
