import torch


def attend(q, q_rope, cache, A, B):
    D, R = q.shape[1], q_rope.shape[1]
    c, k_rope = cache[:, :-R], cache[:, -R:]
    scores = torch.einsum("hd,hdr->hr", q, A) @ c.T + q_rope @ k_rope.T  # (H, T)
    P = torch.softmax(scores / (D + R) ** 0.5, dim=-1)
    return torch.einsum("hr,hdr->hd", P @ c, B)
