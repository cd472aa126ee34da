# refused: the L that was given knows all of them
import math

import torch
from torch import Tensor


def join(O: Tensor, L: Tensor, O_new: Tensor, L_new: Tensor) -> tuple[Tensor, Tensor]:
    """(O, L) over the keys of both."""
    both = torch.logaddexp(L, L_new)
    share, share_new = (torch.exp(x - both).nan_to_num()[:, None] for x in (L, L_new))
    return share * O + share_new * O_new, both


def backward_block(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, offset: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What one block of keys adds to dq, and what these queries add to dk and dv."""
    tau = 1 / math.sqrt(q.shape[1])
    i, j = torch.arange(len(q))[:, None], torch.arange(len(k))
    S = tau * (q @ k.T)
    P = torch.softmax(S.masked_fill(j > i + offset, -math.inf), dim=1).nan_to_num()
    dv = P.T @ dout
    dP = dout @ v.T
    dS = P * (dP - (dout * out).sum(dim=1, keepdim=True))
    return tau * (dS @ k), tau * (dS.T @ q), dv
