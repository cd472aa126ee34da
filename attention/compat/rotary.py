"""flash_attn.layers.rotary: rotary position embeddings (Su et al. 2021, arXiv 2104.09864).

Pair n of a head, (x_a, x_b), becomes (x_a cos - x_b sin, x_a sin + x_b cos) with row t, column n of
cos and sin, for the token at position t: a and b are n and n + R, or interleaved 2 n and 2 n + 1.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..caps import DTYPES, must_be
from ..masks import symbolic
from .calls import integers, lengths_of, wrong


def rotate(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """x (..., T, H, D), its first 2 R dimensions rotated by the rows `at` (..., T) of cos and sin
    (n, R). Computes in float32 or better; the result has x's dtype."""
    n, R = cos.shape
    if not 0 < 2 * R <= x.shape[-1]:
        wrong("rotary_cos", f"(positions, at most {x.shape[-1] // 2})", cos)
    must_be("rotary_sin", sin, (n, R), x.device, DTYPES)
    host = at.numel() and at.device.type == "cpu" and not symbolic(at)
    if host and not 0 <= at.min() <= at.max() < n:
        wrong("rotary_cos", f"rows for the positions {int(at.min())} to {int(at.max())}", cos)
    acc = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[at][..., None, :].to(acc) for table in (cos, sin))
    turned = x[..., : 2 * R].to(acc)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * c - b * s, a * s + b * c
    new = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((new.to(x.dtype), x[..., 2 * R :]), dim=-1)


def apply_rotary_emb(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, inplace: bool = False,
    seqlen_offsets: int | Tensor = 0, cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """x (B, T, H, D), or with cu_seqlens (B + 1,) int32 (total, H, D), rotated.

    cos, sin: (positions, R), R at most D / 2; what is beyond 2 R dimensions stays. inplace: write
    to x, and return it. seqlen_offsets: each sequence's first position, one number or (B,)
    integers. max_seqlen is not read."""
    B = len(x) if cu_seqlens is None else len(cu_seqlens) - 1
    first = torch.as_tensor(seqlen_offsets, device=x.device)
    integers(x.device, B, seqlen_offsets=first if first.dim() else None)
    if cu_seqlens is None:
        _, T, _, _ = x.shape
        at = torch.arange(T, device=x.device) + first.reshape(-1, 1)
    else:
        T, _, _ = x.shape
        if not symbolic(cu_seqlens):
            lengths_of("cu_seqlens", cu_seqlens, T)
        at = torch.arange(T, device=x.device)
        row = torch.bucketize(at, cu_seqlens[1:], right=True)
        at = at - cu_seqlens[row] + first.expand(B)[row]
    out = rotate(x, cos, sin, at, interleaved)
    return x.copy_(out) if inplace else out


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in qkv, (B, T, 3, H, D) or (B, T, num_heads_q + 2 Hkv, D), in place."""
    if num_heads_q is None:
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    else:
        q, k, _ = qkv.tensor_split((num_heads_q, (qkv.shape[2] + num_heads_q) // 2), dim=2)
    tables = (cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)
    for t, table in zip((q, k), tables):
        apply_rotary_emb(t, *table, interleaved, True, seqlen_offsets)
    return qkv


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False,
                         seqlen_offsets: int | Tensor = 0) -> Tensor:
    """Rotate k in kv (B, T, 2, Hkv, D), in place."""
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv
