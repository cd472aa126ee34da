import math

import torch


def attention(q, k, v, seen):
    H, D = q.shape[1:]
    k, v = (t.repeat_interleave(H // k.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(D)
    # Finite, so that a row that sees nothing has a softmax at all; it is made zero after it.
    scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
    probs = torch.softmax(scores, dim=-1).masked_fill(~seen, 0.0)
    return torch.einsum("hij,jhd->ihd", probs, v)
