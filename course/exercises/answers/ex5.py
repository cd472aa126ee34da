import math

import torch


def forward(load, store, rows, cols, offset):
    for i, I in enumerate(rows):
        Q_i = load("Q", i)
        m = torch.full((len(Q_i), 1), torch.finfo(torch.float32).min)
        l = torch.zeros(len(Q_i), 1)
        O = torch.zeros_like(Q_i)
        for j, J in enumerate(cols):
            if J.start > I.stop - 1 + offset:  # its first key comes after what the last query sees
                continue
            K_j, V_j = load("K", j), load("V", j)
            S = Q_i @ K_j.T / math.sqrt(Q_i.shape[1])
            seen = torch.arange(J.start, J.stop) <= torch.arange(I.start, I.stop)[:, None] + offset
            S = S.masked_fill(~seen, -math.inf)
            m_new = torch.maximum(m, S.amax(dim=1, keepdim=True))
            P = torch.exp(S - m_new)
            rescale = torch.exp(m - m_new)
            m, l, O = m_new, rescale * l + P.sum(dim=1, keepdim=True), rescale * O + P @ V_j
        store(i, O / l.masked_fill(l == 0, 1))
