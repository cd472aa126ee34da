"""FlashAttention's functions over the backends of this package, on any device: the signatures,
layouts, defaults and in-place effects of flash-attn 2.8 (Dao-AILab, flash_attn_interface.py).

    flash_attn_func           _dense
    flash_attn_varlen_func    segments, if a CUDA kernel reads each by itself; else _texts
    flash_attn_with_kvcache   a view of the cache, on CUDA and of pages; else _texts

FlashAttention-3's further keywords are accepted. What is not computed raises a ValueError
(flash_args.REFUSED); what only tunes the packages' own kernels is ignored (HINTS). All floating
dtypes run. Meta and fake tensors give results of the right shape. Rows that see no key give zeros,
and a log-sum-exp of -inf, where flash-attn has inf.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .. import manual, tiled
from ..caps import INTEGERS, Backend, must_be
from ..function import attention
from ..masks import PagedView, StaticView, kept, nothing, symbolic
from ..plan import Plans
from ..select import check_name
from ..spec import Policy, Spec
from . import arguments as flash_args
from .arguments import Request, wrong

Returned = Any  # out; with the log-sum-exp (out, L), or (out, L, None)
NO_MODE, PLAIN = nullcontext(), (bool, float, str, type(None))
_spec = lru_cache(maxsize=4096)(Spec)
_plans = Plans("auto")


def use(backend: str = "auto", policy: Policy = Policy()) -> None:
    """Choose the backend of all later calls: a name, an alias, "auto", "fastest" or a file, else
    ValueError."""
    global _plans
    check_name(backend)
    _plans = Plans(backend, policy)


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
        deterministic: on CUDA it needs torch.use_deterministic_algorithms(True).
        return_attn_probs: return (out, softmax_lse, None), the log-sum-exp (B, H, Tq) float32.
        return_softmax_lse: return (out, softmax_lse), as FlashAttention-3.

    Raises:
        ValueError: an argument that is not supported, or arguments that contradict one another.
    """
    flash_args.check(q, k, v)
    if k.shape[0] != q.shape[0]:  # len() would be a constant in torch.export
        wrong("k", f"of q's batch of {q.shape[0]}", k)
    request = Request.of(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        return_attn_probs or return_softmax_lse, deterministic, alibi_slopes=alibi_slopes, **fa3,
    )
    return _returned(*_dense(q, k, v, request), return_attn_probs)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with kv (B, Tk, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with qkv (B, T, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """Attention of N sequences, one after the other: out (total_q, H, D), softmax_lse (H, total_q).

    Args:
        q, k, v: (total_q, H, D) and (total_k, Hkv, D); with block_table k and v are pages,
            (pages, page_size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32: where each begins, and the total.
        max_seqlen_q, max_seqlen_k: not read.
        block_table: (N, pages of the longest) int32: the pages of each sequence.
    """
    flash_args.check(q, k, v, dims=3, paged=block_table is not None)
    n = cu_seqlens_q.shape[0]
    must_be("cu_seqlens_q", cu_seqlens_q, (n,), q.device, INTEGERS)
    must_be("cu_seqlens_k", cu_seqlens_k, (n,), q.device, INTEGERS)
    if block_table is not None:
        must_be("block_table", block_table, (n - 1, -1), q.device, INTEGERS)
    request = Request.of(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        return_attn_probs or return_softmax_lse, deterministic, alibi_slopes=alibi_slopes, **fa3,
    )
    square = cu_seqlens_q is cu_seqlens_k and block_table is None
    if _shape_only(q) or (square and torch.compiler.is_compiling()):
        segments = _segments(cu_seqlens_q, q.shape[0]) if square else None
        k, v = (t.flatten(0, -3)[None] for t in (k, v))
        out, L = _dense(q[None], k, v, request, segments)
        return _returned(out[0], None if L is None else L[0], return_attn_probs)
    lengths_q = flash_args.lengths_of("cu_seqlens_q", cu_seqlens_q, len(q))
    total = len(k) if block_table is None else None
    lengths_k = flash_args.lengths_of("cu_seqlens_k", cu_seqlens_k, total)
    if block_table is not None:
        used = flash_args.pages_seen(block_table, k, lengths_q, lengths_k, request.window)
        ks, vs = _tokens(k, used, lengths_k), _tokens(v, used, lengths_k)
    else:
        if lengths_q == lengths_k and q.is_cuda and not request.lse:
            backend = _kernel(q[None], len(k), k.shape[1], request, segments=True)[0]
            if q.device.type in backend.varlen:
                segments = _segments(cu_seqlens_q, len(q))
                return _dense(q[None], k[None], v[None], request, segments)[0][0]
        ks, vs = k.split(lengths_k), v.split(lengths_k)
    alike: dict[tuple[int, int], list[int]] = {}  # the texts of each length
    for i, (n, text) in enumerate(zip(lengths_q, ks)):
        alike.setdefault((n, len(text)), []).append(i)
    outs, Ls = _texts(q.split(lengths_q), ks, vs, [*alike.values()], request)
    L = torch.cat([q.new_empty(q.shape[1], 0).float(), *Ls], dim=1) if request.lse else None
    return _returned(torch.cat([q[:0], *outs]), L, return_attn_probs)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_varlen_func() with kv (total_k, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                                     *args: Any, **options: Any) -> Returned:
    """flash_attn_varlen_func() with qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    lengths = cu_seqlens, cu_seqlens, max_seqlen, max_seqlen
    return flash_attn_varlen_func(q, k, v, *lengths, *args, **options)


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False, *,
    page_table: Tensor | None = None, **fa3: object,
) -> Returned:
    """Attention to a cache, without gradients; k and v are first appended to it, in place.

    Args:
        q: (B, Tq, H, D). The last query is aligned with the row's last key; if not causal, the
            others see it too, as far as window_size allows.
        k_cache, v_cache: (B or more, S, Hkv, D); with block_table (pages, page_size, Hkv, D).
        k, v: (B, T_new, Hkv, D), new tokens.
        cache_seqlens: tokens of each row before this call, (B,) int32 or one number; None: S.
        cache_batch_idx: (B,) the cache's row of each row of q. It copies those rows.
        block_table: (B, pages of the longest) int32 (page_table in FlashAttention-3).

    Returns out (B, Tq, H, D), with return_softmax_lse also the log-sum-exp (B, H, Tq) float32.
    After a ValueError, as in flash_attn_func(), the cache is as it was.
    """
    if block_table is not None and page_table is not None:
        raise ValueError("page_table is block_table's other name: pass one of them")
    table = page_table if block_table is None else block_table
    flash_args.check(q, k_cache, v_cache, ("k_cache", "v_cache"), paged=table is not None)
    B, Tq, size, Hkv, on = q.shape[0], q.shape[1], k_cache.shape[1], k_cache.shape[2], q.device
    request = Request.of(
        q, k_cache, v_cache, 0.0, softmax_scale, causal, window_size, softcap, return_softmax_lse,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes, **fa3,
    )
    n_new = flash_args.check_new(k, v, k_cache, B)
    lengths = flash_args.check_rows(
        B, k_cache, n_new, cache_seqlens, table, cache_batch_idx, wait=request.lse
    )
    if _shape_only(q):
        kv = k_cache.new_empty(B, size, Hkv, q.shape[3])
        return _returned(*_dense(q, kv, kv, request))
    before = size if cache_seqlens is None else cache_seqlens
    total = torch.as_tensor(before, dtype=torch.int32, device=on).expand(B) + n_new
    by_row = request.lse or not (table is not None or q.is_cuda)
    ends = total.tolist() if by_row and lengths is None else [n + n_new for n in lengths or ()]
    read, used = ends, None
    if table is not None and ends:
        used = flash_args.pages_seen(table, k_cache, [Tq] * B, ends, request.window)
        read = [len(pages) * size - -n % size for pages, n in zip(used, ends)]
    by_row |= not q.numel() or (lengths is not None and not any(ends))
    # The kernel is chosen before anything is written: it may be refused.
    lengths_read = [n for n in read if n]
    if by_row and q.numel() and lengths_read:
        for n in {min(lengths_read), max(lengths_read)}:
            _kernel(q, n, Hkv, request)
    if not by_row:
        cache, pages = ("static", None) if table is None else ("paged", size)
        backend, spec = _kernel(q, size, Hkv, request, cache=cache, page_size=pages)

    rows = torch.arange(B, device=on) if cache_batch_idx is None else cache_batch_idx
    table = None if table is None else table.clamp(min=0)  # -1 marks an absent page
    if k is not None and v is not None:
        at = (total - n_new)[:, None] + torch.arange(n_new, device=on)
        row, slot = rows[:, None], at
        if table is not None:
            row, slot = table.gather(1, (at // size).long()), at % size
        k_cache[row.long(), slot.long()] = k
        v_cache[row.long(), slot.long()] = v
    if table is None:
        these = slice(B) if cache_batch_idx is None else rows
        k_cache, v_cache = k_cache[these], v_cache[these]
    if by_row and (not q.numel() or (used is None and len(set(ends)) == 1)):
        n = ends[0] if q.numel() else 0
        return _returned(*_dense(q, k_cache[:, :n], v_cache[:, :n], request))
    if by_row:
        ks, vs = (_tokens(t, used, ends) if used else [row[:n] for row, n in zip(t, ends)]
                  for t in (k_cache, v_cache))
        outs, Ls = _texts(q.unbind(), ks, vs, [[b] for b in range(B)], request)
        return _returned(torch.stack(outs), torch.stack(Ls) if request.lse else None)
    start, count = total - Tq, torch.full_like(total, Tq)
    # Queries before every key; of these `right` lets the last ones see some.
    ahead = Tq if request.right is None else request.right
    blind = (start[:, None] + torch.arange(Tq, device=on) + ahead < 0) | (total == 0)[:, None]
    view = StaticView(start, count, size) if table is None else PagedView(table, start, count)
    out = backend.compute(q, k_cache, v_cache, spec, cache=view)
    return out.masked_fill(blind[..., None, None], 0)


# --- what all functions call ---


def _dense(
    q: Tensor, k: Tensor, v: Tensor, request: Request, segments: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out (B, Tq, H, D), and the log-sum-exp (B, H, Tq) float32 if requested."""
    if not (q.numel() and k.numel()):
        out, L = nothing(q, k, v, None, lse=True)
        return out, L.float() if request.lse else None
    more = {} if segments is None else {"segments": segments}
    shapes = _shape_only(q)
    backend, spec = _kernel(q, k.shape[1], k.shape[2], request, segments=bool(more), shapes=shapes)
    with getattr(q, "fake_mode", NO_MODE) if shapes else NO_MODE:
        if not request.lse:
            return backend.compute(q, k, v, spec, **more), None
        out, L = attention(q, k, v, spec, kernel=backend.partial, **more)
        return out, L.float()


def _texts(
    qs: Sequence[Tensor], ks: Sequence[Tensor], vs: Sequence[Tensor], groups: list[list[int]],
    request: Request,
) -> tuple[list[Tensor], list[Tensor]]:
    """out (Tq, H, D) of each text, and its log-sum-exp (H, Tq) if requested. A group is a batch of
    texts of one length. NaN in one text reaches no other, as it does through a masked key."""
    outs, Ls = [*qs], [*qs]
    for group in groups:
        q, k, v = (torch.stack([t[i] for i in group]) if len(group) > 1 else t[group[0]][None]
                   for t in (qs, ks, vs))
        out, L = _dense(q, k, v, request)
        for i, row, L_row in zip(group, out, out if L is None else L):
            outs[i], Ls[i] = row, L_row
    return outs, Ls


def _kernel(
    q: Tensor, Tk: int, Hkv: int, request: Request, *, segments: bool = False, cache: str = "none",
    page_size: int | None = None, shapes: bool = False,
) -> tuple[Backend, Spec]:
    """The kernel and the Spec of a call with Tk keys of Hkv heads."""
    B, Tq, H, D = q.shape
    compiled = torch.compiler.is_compiling()
    # A side that hides nothing is none: more kernels have that.
    window, right = request.window, request.right
    if window is not None and window >= Tk and cache != "paged":
        window = None
    if right != 0:
        right = 0 if Tq == 1 else None if right is None or right >= Tq - 1 else right
    fields: tuple[Any, ...] = (  # in the order of Spec's
        H, Hkv, D, flash_args.NAMES[q.dtype], window, request.dropout, segments, request.grad,
        cache, compiled, page_size, request.scale, request.softcap, False, request.lse, right,
    )
    if compiled or type(Tq) is not int:  # sizes may be a tracer's
        fields = tuple(n if type(n) in PLAIN else operator.index(n) for n in fields)
    plans, device = _plans, str(q.device)  # use() may replace _plans
    if compiled:
        key = device, torch.are_deterministic_algorithms_enabled(), *fields
        plans.choose_in_trace(*key)
        call = plans.known[key][0]
        return call.chosen.backend, call.spec
    spec = _spec(*fields)
    if shapes:
        return (tiled if request.lse else manual).BACKEND, spec
    chosen = plans.choose(spec, device, (B, Tq, Tk), " (flash_attn functions)")
    return chosen.backend, spec


def _shape_only(t: Tensor) -> bool:
    """True for meta and fake tensors: no kernel runs, or could."""
    return symbolic(t) and not torch.compiler.is_compiling()


def _returned(out: Tensor, L: Tensor | None, probs: bool = False) -> Returned:
    return out if L is None else (out, L, None) if probs else (out, L)


@kept
def _segments(cu_seqlens: Tensor, total: int) -> Tensor:
    """(1, total) int32: the number of each token's sequence."""
    numbers = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device, dtype=torch.int32)
    return numbers.repeat_interleave(cu_seqlens.diff(), output_size=total)[None]


def _tokens(pages: Tensor, used: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """The tokens (n, Hkv, D) in each row's used pages, of pages (pages, page_size, Hkv, D)."""
    size = pages.shape[1]
    return [pages[u].flatten(0, 1)[: len(u) * size - -n % size] for u, n in zip(used, lengths)]
