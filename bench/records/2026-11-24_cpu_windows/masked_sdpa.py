"""PyTorch's SDPA with one T x T mask for a window, as transformers calls it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from attention import Backend, Caps, Spec
from attention.masks import mask


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **_: object) -> Tensor:
    window, grouped = spec.window, spec.n_head != spec.n_kv_head
    seen = None if window is None else mask(q.shape[1], k.shape[1], window, None, q.device)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # (B, H, T, D)
    out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=grouped)
    return out.transpose(1, 2)


CAPS = (Caps(dropout=False, segments=False, caches=("none",)),)
BACKEND = Backend("masked_sdpa", "PyTorch SDPA with a T x T mask", attend, CAPS, fallback=None)
