"""Exercise 8: the online softmax of FlashAttention-4, which rescales only when necessary."""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from course.exercises.check import Wrong, same, several

# scores, block, threshold
CASES: list[tuple[list[list[float]], int, float]] = [
    ([[0, 3, 4, 1, 9]], 1, 8.0),  # grows by 3 and 1, then by 5, which is 9 above the m kept
    ([[0, 20, 21, 50], [0, 1, 2, -math.inf]], 1, 8.0),  # only one of two rows grows
    ([[0, 20, 20], [0, 5, 12]], 1, 8.0),  # a row below the threshold keeps its m
    ([[0, 8, 8, 8, 16]], 1, 8.0),  # equal to the threshold: not more
    ([[0, 1, 1, 2]], 1, 0.0),  # the ordinary online softmax
    ([[5.0 * n for n in range(40)]], 1, 8.0),  # small steps, up to 2^195: past float32
]
MISTAKES = [
    ("(top > m + threshold)[:, 0]", "torch.ones(T, dtype=torch.bool) & (first > 0)",
     "Rescale only rows whose maximum is more than the threshold above their m"),
    ("top > m + threshold", "top >= m + threshold", "Equal to the threshold is not more"),
    ("top > m + threshold", "top > m", "Rescale only above the threshold"),
    ("int(rows.sum())", "int(rows.any())", "Count the rescaled rows, not the blocks"),
    ("int(rows.sum())", "T", "Count the rescaled rows, not all rows of the block"),
    ("rescaled = 0", "rescaled = T", "The first block has nothing to rescale"),
    ("            rescale = torch.exp2(m[rows] - top[rows])\n",
     "            top[rows] = m[rows] + threshold\n"
     "            rescale = torch.exp2(m[rows] - top[rows])\n",
     "A rescaled row's m becomes its new maximum, not m + threshold"),
    ("S_j - m)", "S_j - top)", "P is 2^(S - m) with the m that was kept"),
    ("l[rows] *= rescale", "pass", "Rescale l as well as O"),
    ("O[rows] *= rescale", "pass", "Rescale O as well as l"),
    ("m[rows] = top[rows]", "m = top",
     "Compare the maximum with the m that was kept, not with the maximum of the block before"),
]


def check(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(8)
    cases = [(torch.tensor(S, dtype=torch.float32), b, t) for S, b, t in CASES]
    cases.append((6 * torch.randn(16, 48, generator=draw), 8, 8.0))
    for S, block, threshold in cases:
        V = torch.randint(1, 9, (S.shape[1], 1), generator=draw).float()
        got = several(answer.attend(S.clone(), V.clone(), block, threshold), 3, "attend()")
        case = f"S of shape {tuple(S.shape)}, block = {block}, threshold = {threshold}"
        case = f"S = {S.tolist()}, threshold = {threshold}" if S.numel() < 12 else case
        P = torch.exp2(S - S.amax(1, keepdim=True))
        L = S.amax(1) + P.sum(1).log2()
        same(got[0], P @ V / P.sum(1, keepdim=True), "out", case)
        same(got[1], L, "L", case)
        want = count(S, block, threshold)
        if int(got[2]) != want:
            says = f"rescaled is {int(got[2])}, expected {want}"
            raise Wrong(says, case, torch.tensor(int(got[2])))


def count(S: Tensor, block: int, threshold: float) -> int:
    """The number of rescaled rows."""
    first, *later = S.split(block, dim=1)
    m, rescaled = first.amax(1), 0
    for S_j in later:
        past = S_j.amax(1) > m + threshold
        m = torch.where(past, S_j.amax(1), m)
        rescaled += int(past.sum())
    return rescaled
