"""Exercise 13: MLA's cache."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import Live, Wrong, draws, same

ABSORBED = 'torch.einsum("hd,hdr->hr", q, A) @ c.T'
OUT = 'torch.einsum("hr,hdr->hd", P @ c, B)'
EXPANDED = "A^T q once instead of A c for every token, and B once for the mean of c"
MISTAKES = [
    (ABSORBED, 'torch.einsum("hd,htd->ht", q, torch.einsum("tr,hdr->htd", c, A))', EXPANDED),
    (OUT, 'torch.einsum("ht,htd->hd", P, torch.einsum("tr,hdr->htd", c, B))', EXPANDED),
    ("(D + R) ** 0.5", "D ** 0.5", "A key has D + R channels: divide the scores by sqrt(D + R)"),
    ("(D + R) ** 0.5", "cache.shape[1] ** 0.5",
     "Absorbing A does not change the scores: still divide by sqrt(D + R), not by sqrt(r + R)"),
    (" / (D + R) ** 0.5", "", "Divide the scores by sqrt(D + R)"),
    (" + q_rope @ k_rope.T", "", "The part of the scores that knows positions is missing"),
    ("dim=-1", "dim=0", "Softmax over the tokens, not over the heads"),
    ("P @ c, B)", "P @ c, A)", "The values have a matrix of their own, B"),
    ("q, A)", "q, B)", "The keys have a matrix of their own, A"),
    (OUT, "P @ c", "The weighted mean of c has still to be multiplied by B"),
    (OUT, "P @ cache", "Only c has values in it; k_rope is for the scores alone"),
]


def check(answer: ModuleType) -> None:
    for H, D, R, r, T in ((1, 3, 2, 3, 4), (3, 4, 2, 5, 7), (4, 16, 8, 12, 400)):
        q, q_rope, cache, A, B = draws(0, (H, D), (H, R), (T, r + R), (H, D, r), (H, D, r))
        c, k_rope = cache.split([r, R], dim=1)
        scores = torch.stack([(c @ A[h].T) @ q[h] + k_rope @ q_rope[h] for h in range(H)])
        P = torch.softmax(scores / math.sqrt(D + R), dim=1)
        want = torch.stack([P[h] @ (c @ B[h].T) for h in range(H)])
        case = f"H = {H}, D = {D}, R = {R}, r = {r}, T = {T}"
        inputs = [t.clone() for t in (q, q_rope, cache, A, B)]
        with Live() as live:
            got = answer.attend(*inputs)
        same(got, want, "out", case)
        if T > 100 and live.most >= T * H * D:
            raise Wrong("the tensors that were made hold T H D numbers or more: these are the keys "
                        "or values of every head", case)
