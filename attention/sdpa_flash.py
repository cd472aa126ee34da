"""sdpa_flash's windows and segments on CUDA, and its operators in parts (caps.Partial), not run on
CUDA yet: is_causal is aligned bottom-right there, without other masks; on the CPU top-left."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .blocks import BLOCK, blocks, sdpa_mask
from .caps import Partial
from .function import dense_gradient
from .masks import Pair, Runs, loadable, runs, sees_all
from .spec import Spec

aten = torch.ops.aten


def varlen(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *,
           segments: Tensor | None = None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # its window needs torch >= 2.12

    (B, Tq, _, D), Tk = q.shape, k.shape[1]
    if segments is None:
        rows = torch.arange(B + 1, device=q.device, dtype=torch.int32)
        found = Runs(rows * Tq, rows * Tk, Tq, Tk, keys=None)
    else:
        found = runs(segments, Tq)
    left = -1 if spec.window is None else spec.window - 1
    right = -1 if spec.right is None else spec.right
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # else torch 2.14 may take cuDNN's kernel
        q_THD, k_THD, v_THD = found.pack(by_8(q), by_8(k), by_8(v))
        out = varlen_attn(q_THD, k_THD, v_THD, *found[:4], scale=spec.softmax_scale,
                          window_size=(left, right), enable_gqa=spec.n_head != spec.n_kv_head)
    out = dense_gradient(out)  # type: ignore[arg-type]
    return out.unflatten(0, (B, Tq))[..., :D]


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int, segments: Pair = None,
            alibi_slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    (B, Tq, H, D), acc = q.shape, torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape, dtype=acc)
    L = q.new_full((B, H, Tq), -torch.inf, dtype=acc)
    operator = (aten._scaled_dot_product_flash_attention_for_cpu if q.is_cpu else
                aten._scaled_dot_product_flash_attention)
    for I, J, causal, masks in parts(q, k, spec, offset, segments, alibi_slopes):
        inputs = map(BHTD, (q[:, I], k[:, J], v[:, J]))
        O_I, L_I, *_ = operator(*inputs, 0.0, causal, scale=spec.softmax_scale, **masks)
        out[:, I] = O_I.transpose(1, 2)[..., :D]
        L[..., I] = L_I
        for bias in masks.values():  # fully masked
            L[..., I].masked_fill_(bias.isneginf().all(dim=-1), -torch.inf)
    return out, L


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
             spec: Spec, offset: int, segments: Pair = None,
             alibi_slopes: Tensor | None = None) -> tuple[Tensor, ...]:
    L = L.masked_fill(L.isneginf(), 0)  # P is exp(-inf - L): 0, not NaN
    grads = [t.new_zeros(t.shape, dtype=L.dtype) for t in (q, k, v)]
    for I, J, causal, masks in parts(q, k, spec, offset, segments, alibi_slopes):
        rows = dout[:, I], q[:, I], k[:, J], v[:, J], out[:, I].to(q.dtype)
        inputs = *map(BHTD, rows), L[..., I].contiguous()
        if q.is_cpu:
            found = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *inputs, 0.0, causal, scale=spec.softmax_scale, **masks)
        else:
            sizes = None, None, I.stop - I.start, J.stop - J.start
            seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # not read
            found = aten._scaled_dot_product_flash_attention_backward(
                *inputs, *sizes, 0.0, causal, seed, seed, scale=spec.softmax_scale)
        for total, at, grad in zip(grads, (I, J, J), found):
            total[:, at] += grad.transpose(1, 2)[..., : q.shape[3]]
    return tuple(grads)


def parts(q: Tensor, k: Tensor, spec: Spec, offset: int, segments: Pair,
          slopes: Tensor | None) -> Iterator[tuple[slice, slice, bool, dict[str, Tensor]]]:
    """Queries, keys, is_causal and any attn_mask of each call."""
    Tq, Tk = q.shape[1], k.shape[1]
    if not q.is_cpu:
        every = slice(0, Tk)
        found = [(slice(0, Tq), every)]
        if spec.right is not None:  # in line with keys causal; later queries see all
            first, whole = min(max(-offset, 0), Tq), min(max(Tk - offset, 0), Tq)
            found = [(slice(first, whole), slice(0, whole + offset)), (slice(whole, Tq), every)]
        for I, J in found:
            if I.start < I.stop:
                at = offset + I.start
                yield I, J, not sees_all(I.stop - I.start, J.stop, None, at, spec.right), {}
        return
    masked = segments is not None or spec.alibi
    for Q, J in blocks(slice(offset, offset + Tq), slice(0, Tk), spec, BLOCK, masked):
        I = slice(Q.start - offset, Q.stop - offset)
        pair = None if segments is None else (segments[0][:, I], segments[1][:, J])
        at = Q.start - J.start
        attn_mask, is_causal = sdpa_mask(q[:, I], k[:, J], spec, at, pair, slopes)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            bias = torch.zeros(attn_mask.shape, dtype=q.dtype, device=q.device)
            attn_mask = bias.masked_fill_(~attn_mask, -torch.inf)
        yield I, J, is_causal, {} if attn_mask is None else {"attn_mask": attn_mask}


def BHTD(t: Tensor) -> Tensor:
    """(B, H, T, D); the operators do not check the last stride."""
    return (by_8(t) if t.is_cuda else loadable(t)).transpose(1, 2)


def by_8(x: Tensor) -> Tensor:
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


PARTIAL = Partial(forward, backward)
