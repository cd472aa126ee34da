"""sdpa: PyTorch's scaled_dot_product_attention.

    sdpa_flash      FlashAttention-2 (arXiv 2307.08691) on CUDA, a blocked kernel on the CPU
    sdpa_efficient  xFormers' memory-efficient kernel (arXiv 2112.05682), CUDA
    sdpa_cudnn      cuDNN's fused attention, CUDA
    sdpa_math       the unfused formula, O(T^2) memory; in float32 for half precision
    sdpa            PyTorch's choice among these (permitted())

Masks   `is_causal=True` is aligned top-left: for Tq == Tk only. Else a mask in blocks of queries
        (blocks.py); flash on CUDA takes none (sdpa_flash.py)."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .blocks import biased, block_size, in_blocks, sdpa_mask
from .caps import Backend, Caps
from .function import dense_gradient, not_compiled
from .masks import Pair, StaticView, for_any_shape, maskless
from .sdpa_flash import PARTIAL, varlen
from .spec import DROPOUT_STEP, Spec

HALF = ("float16", "bfloat16")
varlen_by_segments = not_compiled(varlen)  # shapes depend on the data


@for_any_shape
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: StaticView | None = None, alibi_slopes: Tensor | None = None,
           kernel: SDPBackend | None = None) -> Tensor:
    """Shapes as in caps.Backend; kernel: the only one that may run, else RuntimeError."""
    Tq, Tk = q.shape[1], k.shape[1]
    if cache is not None:
        return from_cache(q, k, v, spec, cache, alibi_slopes, kernel)
    if segments is alibi_slopes is None and (
            kind := maskless(Tq, Tk, spec.window, Tk - Tq, spec.right)):
        return fused(q, k, v, spec, kernel, is_causal=kind == "causal")
    if q.is_cuda and kernel == SDPBackend.FLASH_ATTENTION:
        if segments is not None:
            return varlen_by_segments(q, k, v, spec, segments=segments)
        if spec.right or (spec.window or Tk) < Tk:
            return varlen(q, k, v, spec)
    return in_blocks(with_mask, q, k, v, spec, segments, alibi_slopes, kernel=kernel)


def with_mask(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, offset: int, segments: Pair = None,
              alibi_slopes: Tensor | None = None, kernel: SDPBackend | None = None) -> Tensor:
    attn_mask, is_causal = sdpa_mask(q, k, spec, offset, segments, alibi_slopes)
    if attn_mask is not None and q.is_cuda and kernel == SDPBackend.FLASH_ATTENTION:
        from torch.nn.attention.bias import causal_lower_right  # slow

        attn_mask = causal_lower_right(q.shape[1], k.shape[1])
    return fused(q, k, v, spec, kernel, attn_mask, is_causal)


def from_cache(q: Tensor, k: Tensor, v: Tensor, spec: Spec, cache: StaticView,
               alibi_slopes: Tensor | None, kernel: SDPBackend | None) -> Tensor:
    """Mask all keys: only the device knows a row's positions."""
    outs, size = [], block_size(q)
    for a in range(0, q.shape[1], size):
        part = replace(cache, start=cache.start + a, count=cache.count - a) if a else cache
        rows = q[:, a : a + size]
        attn_mask = part.seen(rows.shape[1], spec.window, spec.right)  # (B, 1, |rows|, Tk)
        if alibi_slopes is not None:
            attn_mask = biased(attn_mask, q, alibi_slopes, part.start[:, None, None, None])
        outs.append(fused(rows, k, v, spec, kernel, attn_mask))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def fused(q: Tensor, k: Tensor, v: Tensor, spec: Spec, kernel: SDPBackend | None,
          attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    kernels, group = None if kernel is None else [kernel], spec.n_head // spec.n_kv_head
    grouped, masked = not group < 2, attn_mask is not None  # `not`: a bool if sizes are symbols
    if kernel == SDPBackend.CUDNN_ATTENTION:
        if k.shape[1] == 1:  # cuDNN refuses it. P = 1: q and k have no gradient
            k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
            return F.dropout(torch.ones_like(q[..., :1]), spec.dropout) * v + 0 * (q + k)
        if attn_mask is not None and spec.grad:  # whole tiles: see permitted()
            k, v = (F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % 128)) for t in (k, v))
            hidden = -torch.inf if attn_mask.is_floating_point() else False
            attn_mask = F.pad(attn_mask, (0, -attn_mask.shape[-1] % 128), value=hidden)
    if q.is_cuda:
        kernels = kernels or permitted(spec, masked)
        takes_groups = not masked and kernel != SDPBackend.EFFICIENT_ATTENTION
        if grouped and takes_groups and kernel is None:
            major = torch.cuda.get_device_properties(q.device).major
            takes_groups = spec.dtype in HALF and major >= 8
        if grouped and not takes_groups:
            # Else the math kernel runs, in O(T^2) memory (PyTorch issue 181528).
            k, v = (t.repeat_interleave(group, dim=2) for t in (k, v))
            grouped = False
    inputs = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H, T, D)
    call = *inputs, attn_mask, spec.dropout, is_causal
    with sdpa_kernel(kernels) if kernels else nullcontext():
        out = F.scaled_dot_product_attention(*call, scale=spec.scale, enable_gqa=grouped)
    return dense_gradient(out.transpose(1, 2))


def permitted(spec: Spec, masked: bool) -> list[SDPBackend] | None:
    """Kernels to choose from on CUDA; None: all. cuDNN plans each new length (slow), rounds dropout
    to sixteenths (pull request 174245), and with a mask dq may be NaN if keys do not fill tiles of
    128 (issue 196678)."""
    if masked or not spec.grad or spec.dropout % DROPOUT_STEP:
        return [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return None


BACKEND = Backend(
    "sdpa", "PyTorch scaled_dot_product_attention", attend,
    (Caps(right=True, scale=True, alibi=True, caches=("none", "dynamic", "static")),), None)


def _pinned(name: str, kernel: SDPBackend, to: str, *caps: Caps, **more: Any) -> Backend:
    title, run = f"PyTorch SDPA pinned to {to}", partial(attend, kernel=kernel)
    return Backend(name, title, run, caps, fallback="sdpa", **more)


_FLASH = Caps(("cuda",), HALF, (8, 0), right=True, head_dim_max=256, scale=True)
FLASH = _pinned(
    "sdpa_flash", SDPBackend.FLASH_ATTENTION, "its FlashAttention kernel",
    replace(_FLASH, window=False, segments=False, lse=True),
    replace(_FLASH, min_torch="2.12", dropout=False),  # varlen_attn with a window
    Caps(("cpu",), right=True, dropout=False, scale=True, alibi=True, lse=True),
    partial=PARTIAL, varlen=("cuda",))
_EFFICIENT = Caps(("cuda",), HALF, (8, 0), right=True, head_dim_multiple=8, scale=True, alibi=True)
EFFICIENT = _pinned(
    "sdpa_efficient", SDPBackend.EFFICIENT_ATTENTION, "its memory-efficient kernel",
    _EFFICIENT,
    replace(_EFFICIENT, dtypes=("float16",), min_capability=(5, 0)),
    replace(_EFFICIENT, dtypes=("float32",), min_capability=(5, 0), head_dim_multiple=4))
CUDNN = _pinned(
    "sdpa_cudnn", SDPBackend.CUDNN_ATTENTION, "cuDNN's kernel",
    Caps(("cuda",), HALF, (8, 0), right=True, head_dim_max=128, head_dim_multiple=8, scale=True,
         alibi=True, dropout_step=DROPOUT_STEP, deterministic=False))
MATH = _pinned("sdpa_math", SDPBackend.MATH, "its unfused kernel, O(S^2) memory",
               Caps(right=True, scale=True, alibi=True))
