"""flash_attn.layers.rotary and ops.triton.rotary (Su et al. 2021, arXiv 2104.09864).

    (x_a, x_b) -> (x_a cos - x_b sin, x_a sin + x_b cos)    a, b = n, n + R, or 2 n, 2 n + 1

In place bypasses autograd, as in flash-attn: only the returned tensor has a gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..caps import DTYPES, INTEGERS
from ..masks import symbolic
from .calls import lengths_of, match, wrong


def rotate(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """Rotate 2 R dimensions of x (..., T, H, D) by rows `at` of cos and sin (n, R)."""
    sizes: dict[str, int] = {}
    match(sizes, x.device, DTYPES, rotary_cos=(cos, "n R"), rotary_sin=(sin, "n R"))
    n, R = sizes.values()
    if not 0 < 2 * R <= x.shape[-1]:
        wrong("rotary_cos", f"(positions, at most {x.shape[-1] // 2})", cos)
    on_host = at.device.type == "cpu" and not symbolic(at)
    if on_host and at.numel() and not 0 <= at.min() <= at.max() < n:
        wrong("rotary_cos", f"rows for the positions {int(at.min())} to {int(at.max())}", cos)
    acc = torch.promote_types(x.dtype, torch.float32)
    c, s = (table[at][..., None, :].to(acc) for table in (cos, sin))
    turned = x[..., : 2 * R].to(acc)
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pair = a * c - b * s, a * s + b * c
    new = torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)
    return torch.cat((new.to(x.dtype), x[..., 2 * R :]), dim=-1)


def positions(x: Tensor, seqlen_offsets: int | Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
    at = torch.arange(x.shape[-3], device=x.device)
    B, row = x.shape[0], None
    if cu_seqlens is not None:
        B = cu_seqlens.shape[0] - 1
        if not symbolic(cu_seqlens):
            lengths_of("cu_seqlens", cu_seqlens, x.shape[0])
        row = torch.bucketize(at, cu_seqlens[1:], right=True)
        at = at - cu_seqlens[row]
    if isinstance(seqlen_offsets, Tensor):
        match({"B": B}, x.device, INTEGERS, seqlen_offsets=(seqlen_offsets, "B"))
        seqlen_offsets = seqlen_offsets[:, None] if row is None else seqlen_offsets[row]
    return at + seqlen_offsets


def in_place(x: Tensor, new: Tensor) -> Tensor:
    x.data.copy_(new.detach())
    return new if new.requires_grad else x


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, seqlen_offsets: int | Tensor = 0,
                 cu_seqlens: Tensor | None = None, max_seqlen: int | None = None,
                 interleaved: bool = False, inplace: bool = False,
                 conjugate: bool = False) -> Tensor:
    """As apply_rotary_emb(); conjugate: backwards."""
    at = positions(x, seqlen_offsets, cu_seqlens)
    new = rotate(x, cos, -sin if conjugate else sin, at, interleaved)
    return in_place(x, new) if inplace else new


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False,
                     inplace: bool = False, seqlen_offsets: int | Tensor = 0,
                     cu_seqlens: Tensor | None = None, max_seqlen: int | None = None) -> Tensor:
    """Rotate x (B, T, H, D), or with cu_seqlens (B + 1,) (total, H, D). cos, sin: (positions, R), R
    at most D / 2. seqlen_offsets: first positions, one or (B,)."""
    return apply_rotary(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor, cos: Tensor, sin: Tensor, cos_k: Tensor | None = None, sin_k: Tensor | None = None,
    interleaved: bool = False, seqlen_offsets: int | Tensor = 0, num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k in qkv, (B, T, 3, H, D) or (B, T, num_heads_q + 2 Hkv, D), in place."""
    heads = qkv.flatten(2, -2)
    H = qkv.shape[3] if qkv.dim() == 5 else num_heads_q
    k, v = heads[:, :, H:].unflatten(2, (2, -1)).unbind(2)
    at = positions(heads, seqlen_offsets)
    q = rotate(heads[:, :, :H], cos, sin, at, interleaved)
    k = rotate(k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, at, interleaved)
    return in_place(qkv, torch.cat((q, k, v), dim=2).view(qkv.shape))


def apply_rotary_emb_kv_(kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False,
                         seqlen_offsets: int | Tensor = 0) -> Tensor:
    """Rotate k in kv (B, T, 2, Hkv, D), in place."""
    k, v = kv.unbind(2)
    k = rotate(k, cos, sin, positions(k, seqlen_offsets), interleaved)
    return in_place(kv, torch.stack((k, v), dim=2))


class RotaryEmbedding(torch.nn.Module):
    """dim: 2 R. scale_base: xPos (Sun et al. 2022, arXiv 2212.10554). pos_idx_in_fp32 is unused."""

    inv_freq: Tensor

    def __init__(self, dim: int, base: float = 10000.0, interleaved: bool = False,
                 scale_base: float | None = None, device: torch.device | None = None, *,
                 pos_idx_in_fp32: bool = True) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        scale = None if scale_base is None else self._compute_scale(device)
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        self.register_buffer("scale", scale, persistent=False)
        self._seq_len_cached = 0  # subclasses write these five
        self._cos_cached: Any = None
        self._sin_cached: Any = None
        self._cos_k_cached: Any = None
        self._sin_k_cached: Any = None

    def _compute_inv_freq(self, device: torch.device | None = None) -> Tensor:
        return 1.0 / self.base ** self._fractions(device)

    def _compute_scale(self, device: torch.device | None = None) -> Tensor:
        return (self._fractions(device) + 0.4) / 1.4

    def _fractions(self, device: torch.device | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim

    def _update_cos_sin_cache(self, seqlen: int, device: torch.device | None = None,
                              dtype: torch.dtype | None = None) -> None:
        cos = self._cos_cached
        if cos is not None and seqlen <= self._seq_len_cached:
            stale = self.training and cos.is_inference()
            if not stale and (cos.device, cos.dtype) == (device, dtype):
                return
        self._seq_len_cached = seqlen
        cast = self.inv_freq.dtype != torch.float32  # the model was cast: too rough
        t = torch.arange(seqlen, device=device, dtype=torch.float32)
        angles = torch.outer(t, self._compute_inv_freq(device) if cast else self.inv_freq)
        cos, sin, scale = angles.cos(), angles.sin(), torch.ones_like(angles)
        if self.scale_base is not None:
            scale = self._compute_scale(device) ** ((t - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(self, qkv: Tensor, kv: Tensor | None = None, seqlen_offset: int | Tensor = 0,
                max_seqlen: int | None = None,
                num_heads_q: int | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate qkv, or q and kv (B, T, 2, Hkv, D), in place. max_seqlen: length of the tables."""
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(qkv.shape[1] + seqlen_offset, qkv.device, qkv.dtype)
        tables = self._cos_cached, self._sin_cached
        of_k = tables if self.scale_base is None else (self._cos_k_cached, self._sin_k_cached)
        options = self.interleaved, seqlen_offset
        if kv is None:
            return apply_rotary_emb_qkv_(qkv, *tables, *of_k, *options, num_heads_q)
        q = apply_rotary_emb(qkv, *tables, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, *of_k, *options)
