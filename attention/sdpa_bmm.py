"""sdpa_bmm: PyTorch's flash kernel forward, and a backward pass of large products, for CPUs: the
kernel's own in bfloat16 multiplies small tiles. Of a few heads at a time:

    S = scale * Q K^T       P = softmax(S)
    dV = P^T dO             dP = dO V^T
    dS = P * (dP - rowsum(P * dP))
    dQ = scale * dS K       dK = scale * dS^T Q"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .blocks import in_blocks, sdpa_mask
from .caps import Backend, Caps, Partial
from .function import attention
from .masks import for_any_shape, mask
from .spec import Spec

ELEMENTS = 2**21  # of S at a time: 4 MB


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: None = None,
           cache: None = None) -> Tensor:
    return in_blocks(call_sdpa, q, k, v, spec, segments)


def call_sdpa(q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int) -> Tensor:
    k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
    return attention(q, k, v, spec, kernel=WHOLE, offset=offset)[0]


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int,
            segments: None) -> tuple[Tensor, Tensor]:
    """L is empty: backward() does not need it."""
    seen, is_causal = sdpa_mask(q, k, spec, offset)
    q_BHTD, k_BHTD, v_BHTD = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(
        q_BHTD, k_BHTD, v_BHTD, seen, is_causal=is_causal, scale=spec.softmax_scale)
    return out.transpose(1, 2), q.new_empty(q.shape[0], 0)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, spec: Spec,
             offset: int, segments: None) -> tuple[Tensor, ...]:
    (B, Tq, H, _), Tk = q.shape, k.shape[1]
    scale = spec.softmax_scale
    Q, K, V, dO = (t.transpose(1, 2).flatten(0, 1) for t in (q * scale, k, v, dout))
    dQ, dK, dV = (torch.empty_like(t) for t in (Q, K, V))  # (B * H, T, D)
    seen = mask(Tq, Tk, spec.window, None, q.device, offset, spec.right)[0, 0]
    hidden = torch.zeros(seen.shape, dtype=q.dtype, device=q.device).masked_fill(~seen, -math.inf)
    heads = max(1, ELEMENTS // (Tq * Tk))
    for h in (slice(a, a + heads) for a in range(0, B * H, heads)):
        P = (Q[h] @ K[h].mT).add_(hidden).softmax(dim=-1)  # (heads, Tq, Tk)
        torch.bmm(P.mT, dO[h], out=dV[h])
        dS = torch._softmax_backward_data(dO[h] @ V[h].mT, P, -1, P.dtype)
        torch.bmm(dS, K[h], out=dQ[h])
        torch.bmm(dS.mT, Q[h], out=dK[h])
    dQ *= scale
    return tuple(t.unflatten(0, (B, H)).transpose(1, 2) for t in (dQ, dK, dV))


WHOLE = Partial(forward, backward)
BACKEND = Backend(
    "sdpa_bmm", "PyTorch SDPA forward, backward by batched products", attend,
    (Caps(("cpu",), ("bfloat16",), right=True, dropout=False, segments=False, scale=True),), "sdpa")
