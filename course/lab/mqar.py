"""MQAR, multi-query associative recall (Arora et al. 2023, "Zoology", arXiv 2312.04927), cut to a
laptop: a text of keys with their values, and later the keys again, among blanks.

    k1 v1 k2 v2 k3 v3  .  .  k2  .  .  k1  .  k3  .  .
                             v2        v1     v3           the targets

Each sequence has other pairs, so nothing can be learned by heart.
"""

from __future__ import annotations

import torch
from torch import Tensor

VOCABULARY = 256  # a blank, 127 keys, 128 values
LEVELS = ((4, 64), (8, 64), (16, 128))  # pairs, and tokens in a sequence


def sequences(n: int, pairs: int, T: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return n sequences (n, T) int64 and their targets, -1 where there is none."""
    half = VOCABULARY // 2
    keys = torch.rand(n, half - 1, generator=draw).argsort(dim=1)[:, :pairs] + 1
    values = torch.randint(half, VOCABULARY, (n, pairs), generator=draw)
    idx, targets = torch.zeros(n, T, dtype=torch.int64), torch.full((n, T), -1)
    idx[:, : 2 * pairs] = torch.stack([keys, values], dim=2).flatten(1)
    at = torch.rand(n, T - 2 * pairs, generator=draw).argsort(dim=1)[:, :pairs] + 2 * pairs
    return idx.scatter(1, at, keys), targets.scatter(1, at, values)
