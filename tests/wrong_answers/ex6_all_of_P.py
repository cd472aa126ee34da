# refused: as large as all of P
import math

import torch


def backward(q, k, v, out, L, dout, block):
    Tq, Tk = q.shape[1], len(k)
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    S = q @ k.T / math.sqrt(q.shape[-1])
    seen = torch.arange(Tk) <= torch.arange(Tq)[:, None] + Tk - Tq
    P = S.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.autograd.grad(P @ v, (q, k, v), dout)
