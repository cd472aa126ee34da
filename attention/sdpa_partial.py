"""sdpa_flash in parts (caps.Partial): PyTorch's flash operators, which return and take L.

The backward operator takes out and L as arguments: given out and L of the whole row, the gradients
of its parts add up. The mask depends on the offset between queries and keys:

    CPU   is_causal is aligned top-left, which is offset 0; all else takes a mask, O(Tq Tk)
    CUDA  no mask; is_causal is aligned bottom-right: aligned() finds parts of that kind

Numbers Outputs and gradients come in q's dtype: each part is rounded, where tiled's are float32.
Refuses what sdpa_flash refuses.
Source  PyTorch's own context parallelism calls the same operators (torch/distributed/tensor/
        experimental/_context_parallel/_attention.py in 2.13). On CUDA not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .caps import Partial
from .spec import Spec
from .views import mask

aten = torch.ops.aten
Pair = tuple[Tensor, Tensor] | None  # segments of the queries and of the keys


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int, segments: Pair = None
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return _cuda_forward(q, k, v, spec, offset)
    how, blind = _cpu_mask(q, k, spec, offset, segments)
    qkv = (t.transpose(1, 2) for t in (q, k, v))
    out, L = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, scale=spec.scale, **how)
    L = L if blind is None else L.masked_fill(blind, -torch.inf)
    return out.transpose(1, 2).to(L.dtype), L


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
             spec: Spec, offset: int, segments: Pair = None) -> tuple[Tensor, ...]:  # fmt: skip
    if q.is_cuda:
        return _cuda_backward(dout, q, k, v, out, L, spec, offset)
    how, _ = _cpu_mask(q, k, spec, offset, segments)
    given = (t.transpose(1, 2) for t in (dout, q, k, v, out.to(q.dtype)))
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *given, L, 0.0, how.pop("is_causal", False), scale=spec.scale, **how
    )
    return tuple(t.transpose(1, 2).to(L.dtype) for t in grads)


def _cpu_mask(
    q: Tensor, k: Tensor, spec: Spec, offset: int, segments: Pair
) -> tuple[dict[str, Any], Tensor | None]:
    """The operator's arguments, and which queries see no key, (B or 1, 1, Tq); None: all do."""
    Tq, Tk = q.shape[1], k.shape[1]
    if spec.window is None and segments is None:
        if offset >= Tk - 1:
            return {}, None
        if offset == 0:
            return {"is_causal": True}, None
    seen = mask(Tq, Tk, spec.window, segments, q.device, offset)  # (B or 1, 1, Tq, Tk)
    zeros = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
    return {"attn_mask": zeros.masked_fill(~seen, -torch.inf)}, ~seen.any(dim=-1)


def aligned(Tq: int, Tk: int, offset: int) -> Iterator[tuple[slice, slice, bool]]:
    """Split the visible pairs into rectangles of queries and keys: causal to their bottom-right
    corner (True), or not masked."""
    first, whole = min(max(-offset, 0), Tq), min(max(Tk - offset, 0), Tq)
    if first < whole:
        yield slice(first, whole), slice(0, whole + offset), True
    if whole < Tq:
        yield slice(whole, Tq), slice(0, Tk), False


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int
) -> tuple[Tensor, Tensor]:
    (B, Tq, H, D), Tk = q.shape, k.shape[1]
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    L = torch.full((B, H, Tq), -torch.inf, device=q.device)
    for I, J, causal in aligned(Tq, Tk, offset):
        qkv = (by_8(t).transpose(1, 2) for t in (q[:, I], k[:, J], v[:, J]))
        got = aten._scaled_dot_product_flash_attention(
            *qkv, 0.0, causal, False, scale=spec.softmax_scale
        )
        out[:, I], L[..., I] = got[0].transpose(1, 2)[..., :D], got[1]
    return out, L


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, spec: Spec, offset: int
) -> tuple[Tensor, ...]:
    dq, dk, dv = (torch.zeros(t.shape, dtype=L.dtype, device=q.device) for t in (q, k, v))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout: not read
    for I, J, causal in aligned(q.shape[1], k.shape[1], offset):
        tensors = (dout[:, I], q[:, I], k[:, J], v[:, J], out[:, I].to(q.dtype))
        given = (by_8(t).transpose(1, 2) for t in tensors)
        lengths = I.stop - I.start, J.stop - J.start
        grads = aten._scaled_dot_product_flash_attention_backward(
            *given, L[..., I].contiguous(), None, None, *lengths, 0.0, causal, seed, seed,
            scale=spec.softmax_scale)  # fmt: skip
        for sum_, rows, grad in zip((dq, dk, dv), (I, J, J), grads, strict=True):
            sum_[:, rows] += grad.transpose(1, 2)[..., : q.shape[3]]
    return dq, dk, dv


def by_8(x: Tensor) -> Tensor:
    """x with zeros after its last dimension, up to a multiple of 8."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


PARTIAL = Partial(forward, backward)
