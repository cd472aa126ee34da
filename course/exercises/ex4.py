"""Exercise 4: one step of the online softmax."""

from __future__ import annotations

from types import ModuleType

import torch

from course.exercises.check import same, several

HIDDEN = -torch.inf
# Blocks of scores of two rows.
CASES: dict[str, list[list[list[float]]]] = {
    "a maximum that rises": [[[1, 2], [0, 0]], [[4, 3], [1, 0]]],
    "a maximum that stays": [[[4, 3], [5, 0]], [[0], [2]]],
    "a row without a key in the first block": [[[1, 0], [HIDDEN, HIDDEN]], [[2, 0], [-5, -6]]],
    "large scores": [[[100, 200], [-3e4, -4e4]], [[300, 1], [3e4, 2e4]]],
}
MAX = "torch.maximum(m, S.amax(dim=1, keepdim=True))"
MISTAKES = [
    ("rescale * l + P.sum(dim=1, keepdim=True), rescale * O + P @ V",
     "P.sum(dim=1, keepdim=True), P @ V", "Keep the old sums: rescale and add"),
    (MAX, "S.amax(dim=1, keepdim=True)", "m is the maximum of all blocks so far"),
    (MAX, "torch.zeros_like(m)", "m is the largest score of each row so far"),
    (MAX, "torch.maximum(m, S.amax())", "m is a maximum for each row, not one for the block"),
    ("return m_new", "return m", "Return the new maximum as m"),
    ("rescale * l", "l", "Rescale the old sum l by exp(m - m_new)"),
    ("rescale * O", "O", "Rescale the old sum O by exp(m - m_new)"),
    ("torch.exp(m - m_new)", "torch.exp(m_new - m)", "Rescale by exp(m - m_new), the other way"),
    ("rescale * O + P @ V",
     "(rescale * O + P @ V) / (rescale * l + P.sum(dim=1, keepdim=True))",
     "Divide by l once, after the last block"),
    ("torch.exp(S - m_new)", "torch.exp(S - m)", "Subtract the new maximum from the scores"),
]


def check(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    for name, case in CASES.items():
        m, l, O = torch.full((2, 1), torch.finfo().min), torch.zeros(2, 1), torch.zeros(2, 3)
        for n, block in enumerate(case, start=1):
            S = torch.tensor(block, dtype=torch.float32)
            V = torch.randn(S.shape[1], 3, generator=draw)
            got = several(answer.update(*(t.clone() for t in (m, l, O, S, V))), 3, "update()")
            m_new = torch.maximum(m, S.amax(dim=1, keepdim=True))
            P, rescale = torch.exp(S - m_new), torch.exp(m - m_new)
            want = m_new, rescale * l + P.sum(dim=1, keepdim=True), rescale * O + P @ V
            for letter, g, w in zip("mlO", got, want):
                same(g, w, letter, f"block {n} of the case '{name}'")
            m, l, O = want
