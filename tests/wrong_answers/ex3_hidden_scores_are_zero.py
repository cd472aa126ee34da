# refused: a score like any other

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q: (Tq, H, D); k, v: (Tk, Hkv, D); seen: (Tq, Tk). Returns (Tq, H, D)."""
    H, D = q.shape[1:]
    k, v = (t.repeat_interleave(H // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)
    scores = scores.masked_fill(~seen, 0.0)
    probs = torch.softmax(scores, dim=-1)
    return torch.einsum("hij,jhd->ihd", probs, v)
