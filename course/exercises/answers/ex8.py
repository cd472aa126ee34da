import torch


def attend(S, V, block, threshold):
    T, D = len(S), V.shape[1]
    O, l = torch.zeros(T, D), torch.zeros(T, 1)
    m = S[:, :block].amax(1, keepdim=True)
    rescaled = 0
    for first in range(0, S.shape[1], block):
        S_j, V_j = S[:, first : first + block], V[first : first + block]
        top = S_j.amax(1, keepdim=True)
        rows = (top > m + threshold)[:, 0]
        if rows.any():
            rescale = torch.exp2(m[rows] - top[rows])
            l[rows] *= rescale
            O[rows] *= rescale
            m[rows] = top[rows]
            rescaled += int(rows.sum())
        P = torch.exp2(S_j - m)
        l += P.sum(1, keepdim=True)
        O += P @ V_j
    return O / l, (m + torch.log2(l))[:, 0], rescaled
