"""An answer to exercise 13: the absorbed form, MQA over the cache."""

import torch


def attend(q, q_rope, cache, A, B):
    """q (H, D), q_rope (H, R), cache (T, r + R), A and B (H, D, r). Returns (H, D)."""
    D, R = q.shape[1], q_rope.shape[1]
    c, k_rope = cache[:, :-R], cache[:, -R:]
    scores = torch.einsum("hd,hdr->hr", q, A) @ c.T + q_rope @ k_rope.T  # (H, T)
    P = torch.softmax(scores / (D + R) ** 0.5, dim=-1)
    return torch.einsum("hr,hdr->hd", P @ c, B)
