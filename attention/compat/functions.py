"""flash_attn_func, flash_attn_varlen_func, their packed forms, and flash_attn_with_kvcache.

Sequences of different lengths are segments of one call, if a CUDA kernel reads each by itself, else
one call for each length (calls.texts). A cache is a view on CUDA and in pages, else rows. All
floating dtypes run. Meta and fake tensors give results of the right shape."""

from __future__ import annotations

from inspect import Parameter, Signature, signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..caps import must_be
from ..masks import PagedView, StaticView, kept, symbolic
from . import calls
from .calls import NAMES, Returned, dense, kernel, returned, shape_only, texts, wrong
from .rotary import rotate


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """Attention: q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> (B, Tq, H, D).

    Args:
        window_size: (left, right): query i sees the keys i - left + Tk - Tq to i + right + Tk - Tq;
            -1 is no limit. causal: right is 0.
        alibi_slopes: (H,) or (B, H) float32: -slope * |i + Tk - Tq - j| is added to a score.
        deterministic: on CUDA it needs torch.use_deterministic_algorithms(True).
        return_attn_probs: return (out, softmax_lse, None), the log-sum-exp (B, H, Tq) float32;
            return_softmax_lse, as FlashAttention-3: (out, softmax_lse).
    Raises ValueError for arguments that are not supported or contradict one another."""
    calls.check(q, k, v)
    if k.shape[0] != q.shape[0]:  # len() would be a constant in torch.export
        wrong("k", f"of q's batch of {q.shape[0]}", k)
    request = calls.requested(
        q, k, v, q.shape[0], dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs or return_softmax_lse, fa3, deterministic)
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
        q, k, v: (total_q, H, D) and (total_k, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32: where each begins, and the total. max_seqlen_q
            and max_seqlen_k are not read.
        block_table: (N, pages of the longest) int32: pages of k, v (pages, page_size, Hkv, D).
        seqused_q, seqused_k: (N,) int32: tokens of each that count; other queries get zeros."""
    calls.check(q, k, v, dims=3, paged=block_table is not None)
    n, on = cu_seqlens_q.shape[0], q.device
    calls.integers(on, n, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    calls.integers(on, n - 1, seqused_q=seqused_q, seqused_k=seqused_k)
    calls.integers(on, n - 1, -1, block_table=block_table)
    request = calls.requested(
        q, k, v, n - 1, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs or return_softmax_lse, fa3, deterministic)
    one_call = seqused_q is seqused_k is None and (alibi_slopes is None or alibi_slopes.dim() == 1)
    one_call &= block_table is None
    square = one_call and cu_seqlens_q is cu_seqlens_k
    joined = shape_only(q) or (square and torch.compiler.is_compiling())
    if not joined:
        total = len(k) if block_table is None else None
        lengths_q, used_q = calls.lengths_of("cu_seqlens_q", cu_seqlens_q, len(q), seqused_q)
        lengths_k, used_k = calls.lengths_of("cu_seqlens_k", cu_seqlens_k, total, seqused_k)
        if one_call and lengths_q == lengths_k and q.is_cuda and not request.lse:
            backend, _ = kernel(q[None], len(k), k.shape[1], request, segments=True, dry=True)
            square = joined = "cuda" in backend.varlen
    if joined:
        segments = _segments(cu_seqlens_q, q.shape[0]) if square else None
        k, v = (t.flatten(0, -3)[None] for t in (k, v))
        out, L = dense(q[None], k, v, request, segments)
        return returned(out[0], None if L is None else L[0], return_attn_probs)
    if block_table is None:
        ks, vs = (_first(t.split(lengths_k), used_k) for t in (k, v))
    else:
        used = calls.pages_seen(block_table, k, used_q, used_k, request.window)
        ks, vs = (calls.tokens(t, used, used_k) for t in (k, v))
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


def _packed(function: Any, names: str, layout: str) -> Any:
    """`function` of these names, of which q, k and v are one tensor or two, and of its options."""
    first = names.split()
    n, at = len(first), int(first[0] == "q")

    def packed(*args: Any, **more: Any) -> Returned:
        own = [*args[:n], *(more.pop(name) for name in first[len(args) :])]
        ends = own[2:] if at else [x for x in own[1:] for _ in range(2)]  # of q and of k
        return function(*own[:at], *own[at].unbind(-3), *ends, *args[n:], **more)

    shown = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in first]
    shown += [p for p in signature(function).parameters.values() if p.name != "block_table"
              and (p.default is not p.empty or p.kind is p.VAR_KEYWORD)]
    packed.__signature__ = Signature(shown)  # type: ignore[attr-defined]
    packed.__name__ = function.__name__.replace("func", f"{first[at]}packed_func")
    packed.__doc__ = f"{function.__name__}() with {layout}."
    return packed


flash_attn_kvpacked_func = _packed(flash_attn_func, "q kv", "kv (B, Tk, 2, Hkv, D)")
flash_attn_qkvpacked_func = _packed(flash_attn_func, "qkv", "qkv (B, T, 3, H, D)")
flash_attn_varlen_kvpacked_func = _packed(
    flash_attn_varlen_func, "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
    "kv (total_k, 2, Hkv, D)")
flash_attn_varlen_qkvpacked_func = _packed(
    flash_attn_varlen_func, "qkv cu_seqlens max_seqlen", "qkv (total, 3, H, D)")


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor | None = None, v: Tensor | None = None,
    rotary_cos: Tensor | None = None, rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None, cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None, block_table: Tensor | None = None,
    softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None, num_splits: int = 0, return_softmax_lse: bool = False, *,
    page_table: Tensor | None = None, rotary_seqlens: Tensor | None = None, **fa3: object,
) -> Returned:
    """Attention to a cache, without gradients; k and v are first appended to it, in place.

    Args:
        q: (B, Tq, H, D), aligned with the last keys; if not causal, all queries see those.
        k_cache, v_cache: (B or more, S, Hkv, D); with block_table (pages, page_size, Hkv, D).
        k, v: (B, T_new, Hkv, D), new tokens.
        rotary_cos, rotary_sin: (positions, R): token n of q and k is rotated by row cache_seqlens
            (or rotary_seqlens, (B,)) + n; q by that of n = 0 if neither causal nor windowed.
        cache_seqlens: tokens of each row before this call, (B,) int32 or one number; None: S.
        cache_batch_idx: (B,) the cache's row of each row of q. It copies those rows.
        cache_leftpad: (B,) the first slot of each row that is read; cache_seqlens counts from 0.
        block_table: (B, pages of the longest) int32 (page_table in FlashAttention-3).
    Returns out (B, Tq, H, D), with return_softmax_lse also the log-sum-exp (B, H, Tq) float32.
    After a ValueError, as in flash_attn_func(), the cache is as it was."""
    if block_table is not None and page_table is not None:
        raise ValueError("page_table is block_table's other name: pass one of them")
    table = page_table if block_table is None else block_table
    calls.check(q, k_cache, v_cache, ("k_cache", "v_cache"), paged=table is not None)
    B, Tq, size, Hkv, on = q.shape[0], q.shape[1], k_cache.shape[1], k_cache.shape[2], q.device
    request = calls.requested(q, k_cache, v_cache, B, 0.0, softmax_scale, causal, window_size,
                              softcap, alibi_slopes, return_softmax_lse, fa3)
    if table is not None and (cache_seqlens is None or cache_batch_idx is not None):
        raise ValueError("block_table needs cache_seqlens, and excludes cache_batch_idx")
    if (k is None) != (v is None):
        raise ValueError("k and v, the new tokens, are passed together")
    n_new = 0 if k is None else k.shape[1]
    for name, t in (("k", k), ("v", v)):
        if t is not None:
            must_be(name, t, (B, n_new, Hkv, q.shape[3]), on, (NAMES[q.dtype],))
    seqlens = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    calls.integers(on, B, -1, block_table=table)
    calls.integers(on, B, cache_seqlens=seqlens, cache_batch_idx=cache_batch_idx,
                   cache_leftpad=cache_leftpad, rotary_seqlens=rotary_seqlens)
    wait = request.lse or cache_leftpad is not None
    before = size if cache_seqlens is None else cache_seqlens
    room, rows = size if table is None else size * table.shape[1], cache_batch_idx
    if table is None and rows is None and len(k_cache) < B:
        wrong("k_cache", f"of q's batch of {B}, or more", k_cache)
    chosen = [] if rows is None else calls.on_host(rows) or []
    twice = n_new > 0 and len(set(chosen)) < len(chosen)
    if twice or not all(0 <= row < len(k_cache) for row in chosen):
        expected = f"in 0 .. {len(k_cache) - 1}, and different where k and v are written"
        wrong("cache_batch_idx", expected, chosen)
    lengths: Any = [before] * B if seqlens is None else calls.on_host(seqlens, wait)
    for n in lengths or ():  # None: they are on a device, and the host does not wait for it
        if not 0 <= n <= room - n_new:
            wrong("cache_seqlens", f"in 0 .. {room} tokens, less {n_new} new ones", n)
    starts = [0] * B if cache_leftpad is None or symbolic(q) else cache_leftpad.tolist()
    beyond = any(not 0 <= a <= n for a, n in zip(starts, lengths or ()))
    if beyond or (cache_leftpad is not None and table is not None):
        wrong("cache_leftpad", "in 0 .. cache_seqlens, and None with block_table", starts)
    if shape_only(q):
        kv = k_cache.new_empty(B, size, Hkv, q.shape[3])
        return returned(*dense(q, kv, kv, request))
    start = torch.as_tensor(before, dtype=torch.int32, device=on).expand(B)
    total = start + n_new
    slot = start[:, None] + torch.arange(max(n_new, Tq), device=on)  # (B, T)
    if rotary_cos is not None or rotary_sin is not None or rotary_seqlens is not None:
        if k is None or rotary_cos is None or rotary_sin is None:
            raise ValueError("rotary embeddings need rotary_cos, rotary_sin, and new k and v")
        at = slot if rotary_seqlens is None else slot - slot[:, :1] + rotary_seqlens[:, None]
        moves = causal or request.window is not None or request.right is not None
        of_q = at[:, :Tq] if moves else at[:, :1].expand(B, Tq)
        q = rotate(q, rotary_cos, rotary_sin, of_q, rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, at[:, :n_new], rotary_interleaved)

    by_row = wait or not (table is not None or q.is_cuda)
    ends = total.tolist() if by_row and lengths is None else [n + n_new for n in lengths or ()]
    read, used = [n - a for a, n in zip(starts, ends)], None
    if table is not None and ends:
        used = calls.pages_seen(table, k_cache, [Tq] * B, ends, request.window)
        read = [len(pages) * size - -n % size for pages, n in zip(used, ends)]
    by_row |= not q.numel() or (lengths is not None and not any(ends))
    # The kernel is chosen before anything is written: it may be refused.
    if by_row and q.numel() and any(read):
        for n in {min(filter(None, read)), max(read)}:
            kernel(q, n, Hkv, request, dry=True)
    if not by_row:
        cache, pages = ("static", None) if table is None else ("paged", size)
        backend, spec = kernel(q, size, Hkv, request, cache=cache, page_size=pages)
        copies = backend.name == "paged" and (Tq > 1 or not q.is_cuda)  # rows of the table
        if copies and not ends and not torch.cuda.is_current_stream_capturing():
            ends = total.tolist()

    if table is not None:  # as wide as the longest text may be, with -1 for an absent page
        table = (table[:, : max(1, -(-max(ends) // size))] if ends else table).clamp(min=0)
    if k is not None and v is not None:
        slot, row = slot[:, :n_new], (torch.arange(B, device=on) if rows is None else rows)[:, None]
        if table is not None:
            row, slot = table.gather(1, (slot // size).long()), slot % size
        k_cache[row.long(), slot.long()] = k
        v_cache[row.long(), slot.long()] = v
    if table is None:
        these = slice(B) if rows is None else rows
        k_cache, v_cache = k_cache[these], v_cache[these]
    if by_row and used is None and len({*zip(starts, ends)}) < 2:
        J = slice(*next(zip(starts, ends), (0, 0)))
        return returned(*dense(q, k_cache[:, J], v_cache[:, J], request))
    if by_row:
        ks, vs = (calls.tokens(t, used, ends) if used else
                  [row[a:n] for row, a, n in zip(t, starts, ends)] for t in (k_cache, v_cache))
        outs, Ls = texts(q.unbind(), ks, vs, request)
        return returned(torch.stack(outs), torch.stack(Ls) if request.lse else None)
    start, count = total - Tq, torch.full_like(total, Tq)
    # Queries before every key; of these `right` lets the last ones see some.
    ahead = Tq if request.right is None else request.right
    blind = (start[:, None] + torch.arange(Tq, device=on) + ahead < 0) | (total == 0)[:, None]
    view = StaticView(start, count, size) if table is None else PagedView(table, start, count)
    slopes = {} if request.slopes is None else {"alibi_slopes": request.slopes}
    out = backend.compute(q, k_cache, v_cache, spec, cache=view, **slopes)
    return out.masked_fill(blind[..., None, None], 0)
