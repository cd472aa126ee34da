"""sdpa_flash beyond F.scaled_dot_product_attention: windows and segments, and in parts.

varlen()  PyTorch's FlashAttention-2 takes no mask on CUDA, but its varlen function takes a window
          and treats each segment as a sequence, without work on masked pairs.

In parts (caps.Partial) the flash operators are called directly, since they return and take L: given
out and L of the whole row, the gradients of its parts add up. The mask depends on the offset
between queries and keys:

    CPU   is_causal is aligned top-left, which is offset 0; all else takes a mask, in blocks
    CUDA  no mask; is_causal is aligned bottom-right: aligned() finds parts of that kind

Numbers Outputs and gradients of parts come in q's dtype: each part is rounded, where tiled's are
        float32.
Source  PyTorch's own context parallelism calls the same operators (torch/distributed/tensor/
        experimental/_context_parallel/_attention.py in 2.13). On CUDA not run yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from .blocks import BLOCK, Runs, cut, maskless, runs
from .caps import Partial, version
from .function import dense_gradient
from .spec import Spec
from .views import Pair, loadable, mask

aten = torch.ops.aten
# The CPU's operators check no number of heads: before grouped ones came (pull request 157893) they
# read beyond the keys, which gives wrong numbers or ends the process.
GROUPED_ON_CPU = version(torch.__version__) >= (2, 9)


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


def forward(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int, segments: Pair = None
) -> tuple[Tensor, Tensor]:
    if q.is_cuda:
        return _cuda_forward(q, k, v, spec, offset)
    run = cpu_forward if torch.compiler.is_compiling() else _cpu_forward
    seg_q, seg_k = segments or (None, None)
    if k.shape[2] != q.shape[2] and not GROUPED_ON_CPU:
        k, v = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    return run(q, k, v, seg_q, seg_k, offset, spec.window, spec.right, spec.scale)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
             spec: Spec, offset: int, segments: Pair = None) -> tuple[Tensor, ...]:
    if q.is_cuda:
        return _cuda_backward(dout, q, k, v, out, L, spec, offset)
    run = cpu_backward if torch.compiler.is_compiling() else _cpu_backward
    rest = *(segments or (None, None)), offset, spec.window, spec.right, spec.scale
    if k.shape[2] == q.shape[2] or GROUPED_ON_CPU:
        return run(dout, q, k, v, out, L, *rest)
    K, V = (t.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for t in (k, v))
    dq, *dkv = run(dout, q, K, V, out, L, *rest)
    return dq, *(grad.unflatten(2, (k.shape[2], -1)).sum(dim=3) for grad in dkv)


def _cpu_forward(
    q: Tensor, k: Tensor, v: Tensor, seg_q: Tensor | None, seg_k: Tensor | None, offset: int,
    window: int | None, right: int | None, scale: float | None,
) -> tuple[Tensor, Tensor]:
    acc = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape, dtype=acc)
    L = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=acc)
    for b, I, J, how, blind in _cpu_blocks(q, k, window, right, offset, seg_q, seg_k):
        qkv = (_BHTD(t) for t in (q[b, I], k[b, J], v[b, J]))
        part, L_I = aten._scaled_dot_product_flash_attention_for_cpu(*qkv, scale=scale, **how)
        out[b, I] = part.transpose(1, 2)
        L[b, :, I] = L_I if blind is None else L_I.masked_fill(blind, -torch.inf)
    return out, L


def _cpu_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, seg_q: Tensor | None,
    seg_k: Tensor | None, offset: int, window: int | None, right: int | None, scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    L = L.masked_fill(L.isneginf(), 0)  # where no key is seen P is exp(-inf - L): 0, not NaN
    dq, dk, dv = (t.new_zeros(t.shape, dtype=L.dtype) for t in (q, k, v))
    for b, I, J, how, _ in _cpu_blocks(q, k, window, right, offset, seg_q, seg_k):
        tensors = dout[b, I], q[b, I], k[b, J], v[b, J], out[b, I].to(q.dtype)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *map(_BHTD, tensors), L[b, :, I].contiguous(), 0.0,
            how.pop("is_causal", False), scale=scale, **how)
        for total, at, grad in zip((dq, dk, dv), (I, J, J), grads, strict=True):
            total[b, at] += grad.transpose(1, 2)
    return dq, dk, dv


# For torch.compile, which traces no lengths that depend on data.
cpu_forward = torch.library.custom_op("nanoattn::sdpa_cpu", _cpu_forward, mutates_args=())
cpu_backward = torch.library.custom_op("nanoattn::sdpa_cpu_grad", _cpu_backward, mutates_args=())


@cpu_forward.register_fake
def _(q: Tensor, *others: object) -> tuple[Tensor, Tensor]:
    (B, Tq, H, _), acc = q.shape, torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(q.shape, dtype=acc), q.new_empty(B, H, Tq, dtype=acc)


@cpu_backward.register_fake
def _(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
      *others: object) -> tuple[Tensor, ...]:
    return tuple(q.new_empty(t.shape, dtype=L.dtype) for t in (q, k, v))


def _BHTD(t: Tensor) -> Tensor:
    """The operators on the CPU suppose that the last stride is 1, and do not check it."""
    return loadable(t).transpose(1, 2)


def _cpu_blocks(
    q: Tensor, k: Tensor, window: int | None, right: int | None, offset: int,
    seg_q: Tensor | None, seg_k: Tensor | None,
) -> Iterator[tuple[slice, slice, slice, dict[str, bool | Tensor], Tensor | None]]:
    """Rows of the batch, queries, their keys, the operator's mask, and which queries see no key,
    (B or 1, 1, |I|); None: all do."""
    for rows, found in cut(q, k, window, seg_k, BLOCK, right, offset):
        for piece in found:
            I, J = piece.I, piece.J
            n, m, at = I.stop - I.start, J.stop - J.start, offset + I.start - J.start
            pair = None
            if piece.segments and seg_q is not None and seg_k is not None:
                pair = seg_q[rows, I], seg_k[rows, J]
            if pair is None and (kind := maskless(n, m, window, at, right)):
                yield rows, I, J, {"is_causal": True} if kind == "causal" else {}, None
                continue
            seen = mask(n, m, window, pair, q.device, at, right)
            zeros = torch.zeros(seen.shape, dtype=q.dtype, device=q.device)
            blind = ~seen.any(dim=-1)
            yield rows, I, J, {"attn_mask": zeros.masked_fill_(~seen, -torch.inf)}, blind


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
