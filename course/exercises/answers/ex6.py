import math

import torch


def backward(q, k, v, out, L, dout, block):
    _, Tq, D = q.shape
    Tk = len(k)
    tau = 1 / math.sqrt(D)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    i = torch.arange(Tq)[:, None]
    delta = (dout * out).sum(dim=-1, keepdim=True)  # (R, Tq, 1)
    for first in range(0, Tk, block):
        J = slice(first, min(first + block, Tk))
        j = torch.arange(J.start, J.stop)
        S = tau * (q @ k[J].T)  # (R, Tq, keys of the block)
        P = torch.exp(S - L[..., None]).masked_fill(j > i + Tk - Tq, 0.0)
        dv[J] = (P.mT @ dout).sum(dim=0)
        dP = dout @ v[J].T
        dS = P * (dP - delta)
        dq += tau * (dS @ k[J])
        dk[J] = tau * (dS.mT @ q).sum(dim=0)
    return dq, dk, dv
