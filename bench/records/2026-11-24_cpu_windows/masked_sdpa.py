"""masked_sdpa: PyTorch's SDPA with one T x T mask for a window, as transformers calls it.

A rival for `bench_mfu.py kernel --backends=sdpa,bench/masked_sdpa.py --windows=none,256`.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from attention import Backend, Caps, Spec
from attention.masks import mask


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **_: Any) -> Tensor:
    """q (B, T, H, D), k and v (B, T, Hkv, D) -> (B, T, H, D)."""
    seen = (
        None if spec.window is None else mask(q.shape[1], k.shape[1], spec.window, None, q.device)
    )
    q_BHTD, k_BHTD, v_BHTD = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    grouped = spec.n_head != spec.n_kv_head
    out = F.scaled_dot_product_attention(
        q_BHTD, k_BHTD, v_BHTD, seen, is_causal=seen is None, enable_gqa=grouped
    )
    return out.transpose(1, 2)


BACKEND = Backend(
    "masked_sdpa",
    "PyTorch SDPA with a T x T mask",
    attend,
    (Caps(dropout=False, segments=False, caches=("none",)),),
    fallback=None,
)
