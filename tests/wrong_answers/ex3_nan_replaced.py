# refused: dq is NaN

import math

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q: (Tq, H, D); k, v: (Tk, Hkv, D); seen: (Tq, Tk). Returns (Tq, H, D)."""
    H, D = q.shape[1:]
    k, v = (t.repeat_interleave(H // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)
    scores = scores + torch.zeros(seen.shape).masked_fill(~seen, -math.inf)
    probs = torch.softmax(scores, dim=-1).nan_to_num(0.0)
    return torch.einsum("hij,jhd->ihd", probs, v)
