"""flash_attn_func and flash_attn_varlen_func, with their packed forms.

Sequences of different lengths are segments of one call, if a CUDA kernel reads each by itself, else
one call for each length (calls.texts). FlashAttention-3's keywords are accepted: what is not
computed raises a ValueError (arguments.REFUSED); what only tunes its kernels is ignored (HINTS).
All floating dtypes run. Meta and fake tensors give results of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..caps import INTEGERS, must_be
from ..masks import kept
from . import arguments
from .arguments import Request, wrong
from .calls import Returned, dense, kernel, returned, shape_only, texts


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """Attention: q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> (B, Tq, H, D).

    Args:
        causal: no query sees a key after its own: right is 0.
        window_size: (left, right): query i sees the keys i - left + Tk - Tq to i + right + Tk - Tq;
            -1 is no limit.
        alibi_slopes: (H,) or (B, H) float32: -slope * |i + Tk - Tq - j| is added to a score.
        deterministic: on CUDA it needs torch.use_deterministic_algorithms(True).
        return_attn_probs: return (out, softmax_lse, None), the log-sum-exp (B, H, Tq) float32.
        return_softmax_lse: return (out, softmax_lse), as FlashAttention-3.

    Raises:
        ValueError: an argument that is not supported, or arguments that contradict one another.
    """
    arguments.check(q, k, v)
    if k.shape[0] != q.shape[0]:  # len() would be a constant in torch.export
        wrong("k", f"of q's batch of {q.shape[0]}", k)
    if deterministic:
        arguments.check_deterministic(q)
    lse = return_attn_probs or return_softmax_lse
    request = Request.of(q, k, v, q.shape[0], dropout_p, softmax_scale, causal, window_size,
                         softcap, alibi_slopes, lse, fa3)
    return returned(*dense(q, k, v, request), return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """Attention of N sequences, one after the other: out (total_q, H, D), softmax_lse (H, total_q).

    Args:
        q, k, v: (total_q, H, D) and (total_k, Hkv, D); with block_table k and v are pages,
            (pages, page_size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32: where each begins, and the total.
        max_seqlen_q, max_seqlen_k: not read.
        alibi_slopes: (H,) or (N, H) float32.
        block_table: (N, pages of the longest) int32: the pages of each sequence.
        seqused_q, seqused_k: (N,) int32: tokens of each that count; other queries get zeros.
    """
    arguments.check(q, k, v, dims=3, paged=block_table is not None)
    n, on = cu_seqlens_q.shape[0], q.device
    arguments.integers(n, on, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    arguments.integers(n - 1, on, seqused_q=seqused_q, seqused_k=seqused_k)
    if block_table is not None:
        must_be("block_table", block_table, (n - 1, -1), on, INTEGERS)
    if deterministic:
        arguments.check_deterministic(q)
    lse = return_attn_probs or return_softmax_lse
    request = Request.of(q, k, v, n - 1, dropout_p, softmax_scale, causal, window_size,
                         softcap, alibi_slopes, lse, fa3)
    one_call = seqused_q is seqused_k is None and (alibi_slopes is None or alibi_slopes.dim() == 1)
    square = one_call and cu_seqlens_q is cu_seqlens_k and block_table is None
    if shape_only(q) or (square and torch.compiler.is_compiling()):
        segments = _segments(cu_seqlens_q, q.shape[0]) if square else None
        k, v = (t.flatten(0, -3)[None] for t in (k, v))
        out, L = dense(q[None], k, v, request, segments)
        return returned(out[0], None if L is None else L[0], return_attn_probs)
    lengths_q = arguments.lengths_of("cu_seqlens_q", cu_seqlens_q, len(q))
    total = len(k) if block_table is None else None
    lengths_k = arguments.lengths_of("cu_seqlens_k", cu_seqlens_k, total)
    used_q = arguments.used_of("seqused_q", seqused_q, lengths_q)
    used_k = arguments.used_of("seqused_k", seqused_k, lengths_k)
    if block_table is not None:
        used = arguments.pages_seen(block_table, k, used_q, used_k, request.window)
        ks, vs = (arguments.tokens(t, used, used_k) for t in (k, v))
    else:
        if one_call and lengths_q == lengths_k and q.is_cuda and not request.lse:
            backend, _ = kernel(q[None], len(k), k.shape[1], request, segments=True, dry=True)
            if q.device.type in backend.varlen:
                segments = _segments(cu_seqlens_q, len(q))
                return dense(q[None], k[None], v[None], request, segments)[0][0]
        ks, vs = (_first(t.split(lengths_k), used_k) for t in (k, v))
    outs, Ls = texts(_first(q.split(lengths_q), used_q), ks, vs, request)
    rest = [a - b for a, b in zip(lengths_q, used_q)]  # queries that are not used
    outs = [F.pad(t, (0, 0, 0, 0, 0, n)) if n else t for t, n in zip(outs, rest)]
    L = None
    if request.lse:
        Ls = [F.pad(t, (0, n), value=-torch.inf) if n else t for t, n in zip(Ls, rest)]
        L = torch.cat([q.new_empty(q.shape[1], 0).float(), *Ls], dim=1)
    return returned(torch.cat([q[:0], *outs]), L, return_attn_probs)


@kept
def _segments(cu_seqlens: Tensor, total: int) -> Tensor:
    """(1, total) int32: the number of each token's sequence."""
    numbers = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device, dtype=torch.int32)
    return numbers.repeat_interleave(cu_seqlens.diff(), output_size=total)[None]


def _first(parts: tuple[Tensor, ...], used: list[int]) -> list[Tensor]:
    return [t if len(t) == n else t[:n] for t, n in zip(parts, used)]


# --- packed forms ---


def _like(function: Callable[..., Returned]) -> Callable[[Any], Any]:
    """inspect.signature() of a packed form: its own parameters, and the options of `function`."""
    known = [*signature(function).parameters.values()]
    first = [p.name for p in known].index("dropout_p")

    def sign(packed: Any) -> Any:
        own = [p for p in signature(packed).parameters.values() if p.kind < p.VAR_POSITIONAL]
        options = [p for p in known[first:] if p.name != "block_table"]
        packed.__signature__ = Signature([*own, *options])
        return packed

    return sign


@_like(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with kv (B, Tk, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


@_like(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with qkv (B, T, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


@_like(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, *args: Any, **options: Any,
) -> Returned:
    """flash_attn_varlen_func() with kv (total_k, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    ends = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return flash_attn_varlen_func(q, k, v, *ends, *args, **options)


@_like(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Returned:
    """flash_attn_varlen_func() with qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    ends = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *ends, *args, **options)
