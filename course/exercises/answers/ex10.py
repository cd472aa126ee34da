import math

import torch


def join(O, L, O_new, L_new):
    both = torch.logaddexp(L, L_new)
    # A row that saw nothing in either has -inf - (-inf): its O is 0 in both, so any share will do.
    share, share_new = (torch.exp(x - both).nan_to_num()[:, None] for x in (L, L_new))
    return share * O + share_new * O_new, both


def backward_block(dout, q, k, v, out, L, offset):
    tau = 1 / math.sqrt(q.shape[1])
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
    S = tau * (q @ k.T)  # (Tq, Tk)
    P = torch.exp(S - L[:, None]).masked_fill(j > i + offset, 0.0)  # L and out of the whole row
    dv = P.T @ dout
    dP = dout @ v.T
    dS = P * (dP - (dout * out).sum(dim=1, keepdim=True))
    return tau * (dS @ k), tau * (dS.T @ q), dv
