"""sdpa_flash beyond F.scaled_dot_product_attention: windows and segments, and in parts.

varlen()  PyTorch's FlashAttention-2 takes no mask on CUDA, but its varlen function takes a window
          and treats each segment as a sequence, without work on masked pairs.

In parts (caps.Partial) the flash operators are called directly, since they return and take L: given
out and L of the whole row, the gradients of its parts add up. The mask depends on the offset:

    CPU   is_causal is aligned top-left, which is offset 0; all else takes a mask, in blocks
    CUDA  no mask; is_causal is aligned bottom-right: aligned() finds parts of that kind

Numbers Each part's output and gradients are rounded to q's dtype, where tiled's are float32.
Source  PyTorch's own context parallelism calls the same operators (torch/distributed/tensor/
        experimental/_context_parallel/_attention.py in 2.13). On CUDA not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .caps import Partial
from .function import dense_gradient
from .masks import BLOCK, Pair, Runs, alibi, loadable, mask, maskless, ranges, runs
from .spec import Spec

aten = torch.ops.aten


def varlen(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None
) -> Tensor:
    """Attention by torch.nn.attention.varlen: shapes as in caps.Backend, Tq <= Tk."""
    from torch.nn.attention.varlen import varlen_attn  # torch >= 2.12 has its window

    (B, Tq, _, D), Tk = q.shape, k.shape[1]
    if segments is None:
        rows = torch.arange(B + 1, device=q.device, dtype=torch.int32)
        found = Runs(rows * Tq, rows * Tk, Tq, Tk, keys=None)
    else:
        found = runs(segments, Tq)
    q_THD, k_THD, v_THD = (by_8(t).flatten(0, 1) for t in (q, k, v))
    if found.keys is not None:
        k_THD, v_THD = k_THD[found.keys], v_THD[found.keys]
    lengths = found.cu_q, found.cu_k, found.max_q, found.max_k
    sides = (-1 if spec.window is None else spec.window - 1,
             -1 if spec.right is None else spec.right)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # else torch 2.14 may take cuDNN's kernel
        out = varlen_attn(q_THD, k_THD, v_THD, *lengths, scale=spec.softmax_scale,
                          window_size=sides, enable_gqa=spec.n_head != spec.n_kv_head)
    out = dense_gradient(out)  # type: ignore[arg-type]
    return out.unflatten(0, (B, Tq))[..., :D]


# --- in parts ---


def forward(q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int, segments: Pair = None,
            alibi_slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return _cuda_forward(q, k, v, spec, offset)
    acc = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape, dtype=acc)
    L = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=acc)
    for I, J, how, blind in _cpu_blocks(q, k, spec, offset, segments, alibi_slopes):
        qkv = (_BHTD(t) for t in (q[:, I], k[:, J], v[:, J]))
        part, L_I = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, scale=spec.scale, **how)
        out[:, I] = part.transpose(1, 2)
        L[:, :, I] = L_I if blind is None else L_I.masked_fill(blind, -torch.inf)
    return out, L


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
             spec: Spec, offset: int, segments: Pair = None,
             alibi_slopes: Tensor | None = None) -> tuple[Tensor, ...]:
    if q.is_cuda:
        return _cuda_backward(dout, q, k, v, out, L, spec, offset)
    L = L.masked_fill(L.isneginf(), 0)  # where no key is seen P is exp(-inf - L): 0, not NaN
    dq, dk, dv = (t.new_zeros(t.shape, dtype=L.dtype) for t in (q, k, v))
    for I, J, how, _ in _cpu_blocks(q, k, spec, offset, segments, alibi_slopes):
        tensors = dout[:, I], q[:, I], k[:, J], v[:, J], out[:, I].to(q.dtype)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_BHTD, tensors), L[:, :, I].contiguous(), 0.0,
            how.pop("is_causal", False), scale=spec.scale, **how)
        for total, at, grad in zip((dq, dk, dv), (I, J, J), grads):
            total[:, at] += grad.transpose(1, 2)
    return dq, dk, dv


def _BHTD(t: Tensor) -> Tensor:
    """The operators on the CPU suppose that the last stride is 1, and do not check it."""
    return loadable(t).transpose(1, 2)


def bias_dtype(q: Tensor) -> torch.dtype:
    """The dtype of a mask with numbers. On the CPU a float32 mask goes with half precision (with
    float64 the kernel would read it as float64); on CUDA a mask has q's dtype."""
    return torch.promote_types(q.dtype, torch.float32) if q.is_cpu else q.dtype


def _cpu_blocks(
    q: Tensor, k: Tensor, spec: Spec, offset: int, segments: Pair, slopes: Tensor | None
) -> Iterator[tuple[slice, slice, dict[str, bool | Tensor], Tensor | None]]:
    """Queries, their keys, the operator's mask, and which queries see no key, (B or 1, 1, |I|);
    None: all do."""
    (Tq, Tk), window, right = (q.shape[1], k.shape[1]), spec.window, spec.right
    bare = segments is None and slopes is None
    size = Tq if bare and maskless(Tq, Tk, window, offset, right) else BLOCK
    for piece in ranges(Tq, Tk, window, size, offset, right=right):
        I, J = piece.I, piece.J
        sizes, at = (I.stop - I.start, J.stop - J.start), offset + I.start - J.start
        pair = None if segments is None else (segments[0][:, I], segments[1][:, J])
        if bare and (kind := maskless(*sizes, window, at, right)):
            yield I, J, {"is_causal": True} if kind == "causal" else {}, None
            continue
        seen = mask(*sizes, window, pair, q.device, at, right)
        if slopes is None:
            bias = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
        else:
            bias = alibi(slopes, *sizes, at, bias_dtype(q))
        yield I, J, {"attn_mask": bias.masked_fill(~seen, -torch.inf)}, ~seen.any(dim=-1)


def aligned(
    Tq: int, Tk: int, offset: int, right: int | None
) -> Iterator[tuple[slice, slice, bool]]:
    """Split the visible pairs into rectangles of queries and keys: causal to their bottom-right
    corner (True), or not masked."""
    if right is None:
        yield slice(0, Tq), slice(0, Tk), False
        return
    first, whole = min(max(-offset, 0), Tq), min(max(Tk - offset, 0), Tq)
    if first < whole:
        yield slice(first, whole), slice(0, whole + offset), True
    if whole < Tq:
        yield slice(whole, Tq), slice(0, Tk), False


def _cuda_forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int
) -> tuple[Tensor, Tensor]:
    (B, Tq, H, D), Tk = q.shape, k.shape[1]
    out = q.new_zeros(q.shape, dtype=torch.float32)
    L = q.new_full((B, H, Tq), -torch.inf, dtype=torch.float32)
    for I, J, causal in aligned(Tq, Tk, offset, spec.right):
        qkv = (by_8(t).transpose(1, 2) for t in (q[:, I], k[:, J], v[:, J]))
        got = aten._scaled_dot_product_flash_attention(
            *qkv, 0.0, causal, False, scale=spec.softmax_scale
        )
        out[:, I], L[..., I] = got[0].transpose(1, 2)[..., :D], got[1]
    return out, L


def _cuda_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, spec: Spec, offset: int
) -> tuple[Tensor, ...]:
    dq, dk, dv = (t.new_zeros(t.shape, dtype=L.dtype) for t in (q, k, v))
    seed = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of dropout: not read
    for I, J, causal in aligned(q.shape[1], k.shape[1], offset, spec.right):
        tensors = (dout[:, I], q[:, I], k[:, J], v[:, J], out[:, I].to(q.dtype))
        given = (by_8(t).transpose(1, 2) for t in tensors)
        lengths = I.stop - I.start, J.stop - J.start
        grads = aten._scaled_dot_product_flash_attention_backward(
            *given, L[..., I].contiguous(), None, None, *lengths, 0.0, causal, seed, seed,
            scale=spec.softmax_scale)
        for sum_, rows, grad in zip((dq, dk, dv), (I, J, J), grads, strict=True):
            sum_[:, rows] += grad.transpose(1, 2)[..., : q.shape[3]]
    return dq, dk, dv


def by_8(x: Tensor) -> Tensor:
    """x with zeros after its last dimension, up to a multiple of 8."""
    return F.pad(x, (0, -x.shape[-1] % 8)) if x.shape[-1] % 8 else x


PARTIAL = Partial(forward, backward)
