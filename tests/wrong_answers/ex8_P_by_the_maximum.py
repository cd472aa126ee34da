# refused: relative to one m
import torch


def attend(S, V, block, threshold):
    T, D = len(S), V.shape[1]
    O, l = torch.zeros(T, D), torch.zeros(T, 1)
    m = S[:, :block].amax(1, keepdim=True)
    rescaled = 0
    for first in range(0, S.shape[1], block):
        S_j, V_j = S[:, first : first + block], V[first : first + block]
        top = torch.maximum(m, S_j.amax(1, keepdim=True))
        m_new = torch.where(top - m > threshold, top, m)
        rescale = torch.exp2(m - m_new)
        rescaled += int((m_new > m).sum())
        P = torch.exp2(S_j - top)
        l = rescale * l + P.sum(1, keepdim=True)
        O = rescale * O + P @ V_j
        m = m_new
    return O / l, (m + torch.log2(l))[:, 0], rescaled
