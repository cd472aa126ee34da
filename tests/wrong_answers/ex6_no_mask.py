# refused: without the mask
import math

import torch


def backward(q, k, v, out, L, dout, block):
    D, Tk = q.shape[2], len(k)
    tau = 1 / math.sqrt(D)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    D_i = (dout * out).sum(-1, keepdim=True)
    for first in range(0, Tk, block):
        J = slice(first, min(first + block, Tk))
        S = tau * (q @ k[J].T)
        P = torch.exp(S - L[..., None])
        dv[J] = (P.mT @ dout).sum(0)
        dP = dout @ v[J].T
        dS = P * (dP - D_i)
        dq += tau * (dS @ k[J])
        dk[J] = tau * (dS.mT @ q).sum(0)
    return dq, dk, dv
