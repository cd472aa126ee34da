import torch


def update(m, l, O, S, V):
    m_new = torch.maximum(m, S.amax(dim=1, keepdim=True))
    P = torch.exp(S - m_new)
    rescale = torch.exp(m - m_new)  # turns each exp(s - m) of the old sums into exp(s - m_new)
    return m_new, rescale * l + P.sum(dim=1, keepdim=True), rescale * O + P @ V
