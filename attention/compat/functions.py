"""flash_attn_func, flash_attn_varlen_func, their packed forms, and flash_attn_with_kvcache."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from ..caps import INTEGERS
from ..masks import PagedView, StaticView, kept, symbolic
from . import calls
from .calls import Returned, dense, kernel, match, requested, returned, texts, wrong
from .rotary import rotate


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> (B, Tq, H, D).

    window_size (left, right): query i sees keys i - left + Tk - Tq to i + right + Tk - Tq; -1: no
    limit; causal: right=0. alibi_slopes: (H,) or (B, H) float32. return_attn_probs: (out, L, None),
    with the log-sum-exp (B, H, Tq) float32; return_softmax_lse: (out, L). Raises ValueError:
    arguments are not supported or contradict one another."""
    request = requested(
        {}, q, "B Tq H D", {"k": (k, "B Tk Hkv D"), "v": (v, "B Tk Hkv D")}, dropout_p,
        softmax_scale, causal, window_size, softcap, alibi_slopes,
        return_attn_probs or return_softmax_lse, fa3, deterministic)
    return returned(*dense(q, k, v, request, alibi_slopes), return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """N concatenated sequences: out (total_q, H, D), L (H, total_q).

    q (total_q, H, D), k and v (total_k, Hkv, D), or with block_table (N, columns) int32 pages
    (pages, page_size, Hkv, D). cu_seqlens_q, cu_seqlens_k (N + 1,) int32 or int64: starts, and the
    total. seqused_q, seqused_k (N,) int32: used tokens; other queries get zeros."""
    layout = "total_k Hkv D" if block_table is None else "pages page_size Hkv D"
    sizes = {"ends": cu_seqlens_q.shape[0], "B": cu_seqlens_q.shape[0] - 1}
    request = requested(
        sizes, q, "total_q H D", {"k": (k, layout), "v": (v, layout)}, dropout_p, softmax_scale,
        causal, window_size, softcap, alibi_slopes, return_attn_probs or return_softmax_lse, fa3,
        deterministic)
    match(sizes, q.device, INTEGERS, cu_seqlens_q=(cu_seqlens_q, "ends"),
          cu_seqlens_k=(cu_seqlens_k, "ends"), seqused_q=(seqused_q, "B"),
          seqused_k=(seqused_k, "B"), block_table=(block_table, "B columns"))
    one_call = seqused_q is seqused_k is block_table is None
    one_call &= alibi_slopes is None or alibi_slopes.dim() == 1
    joined = one_call and cu_seqlens_q is cu_seqlens_k and torch.compiler.is_compiling()
    if not joined:
        total = len(k) if block_table is None else None
        lengths_q, used_q = calls.lengths_of("cu_seqlens_q", cu_seqlens_q, len(q), seqused_q)
        lengths_k, used_k = calls.lengths_of("cu_seqlens_k", cu_seqlens_k, total, seqused_k)
        if one_call and lengths_q == lengths_k and q.is_cuda and not request.lse:
            backend, _ = kernel(q[None], len(k), request._replace(segments=True), dry=True)
            joined = "cuda" in backend.varlen
    if joined:
        segments = _segments(cu_seqlens_q, q.shape[0])
        out, L = dense(q[None], k[None], v[None], request, alibi_slopes, segments)
        return returned(out[0], None if L is None else L[0], return_attn_probs)
    if block_table is None:
        ks, vs = ([text[:n] for text, n in zip(t.split(lengths_k), used_k)] for t in (k, v))
    else:
        rows = calls.seen("block_table", block_table, k, used_q, used_k, request.window)
        ks, vs = (calls.tokens(t, rows, [0] * len(rows)) for t in (k, v))
    if seqused_q is not None:  # unused queries are texts without keys
        lengths_q = [n for used, length in zip(used_q, lengths_q) for n in (used, length - used)]
        ks, vs = ([part for text in ts for part in (text, text[:0])] for ts in (ks, vs))
        if alibi_slopes is not None and alibi_slopes.dim() == 2:
            alibi_slopes = alibi_slopes.repeat_interleave(2, dim=0)
    outs, Ls = texts(q.split(lengths_q), ks, vs, request, alibi_slopes)
    L = torch.cat([q.new_empty(q.shape[1], 0).float(), *Ls], dim=1) if request.lse else None
    return returned(torch.cat([q[:0], *outs]), L, return_attn_probs)


@kept
def _segments(cu_seqlens: Tensor, total: int) -> Tensor:
    """(1, total) int32: each token's sequence."""
    numbers = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device, dtype=torch.int32)
    return numbers.repeat_interleave(cu_seqlens.diff(), output_size=total)[None]


def _options_of(function: Callable[..., Returned]) -> Callable[..., Any]:
    options = [p for p in signature(function).parameters.values() if p.name != "block_table"
               and (p.default is not p.empty or p.kind is Parameter.VAR_KEYWORD)]

    def show(packed: Any) -> Any:
        shown = signature(packed)
        own = [p for p in shown.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        packed.__signature__ = shown.replace(parameters=[*own, *options])
        return packed

    return show


@_options_of(flash_attn_func)
def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with qkv (B, T, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


@_options_of(flash_attn_func)
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with kv (B, Tk, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


@_options_of(flash_attn_varlen_func)
def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any,
                                     **options: Any) -> Returned:
    """flash_attn_varlen_func() with qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *args, **options)


@_options_of(flash_attn_varlen_func)
def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, cu_seqlens_q: Tensor,
                                    cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
                                    *args: Any, **options: Any) -> Returned:
    """flash_attn_varlen_func() with kv (total_k, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *args, **options)


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
    """Attention to a cache, without gradients; k and v (B, T_new, Hkv, D) are first appended to it,
    in place. A ValueError leaves the cache as it was.

    q (B, Tq, H, D) is aligned with the last keys. k_cache, v_cache: (B or more, S, Hkv, D); with
    block_table (B, columns) int32 (FlashAttention-3: page_table) (pages, page_size, Hkv, D).
    cache_seqlens: tokens before this call, (B,) int32 or one number; None: S. cache_batch_idx,
    cache_leftpad: (B,), row in the cache, first slot that is read. rotary_cos, rotary_sin:
    (positions, R), rows as in docs/ATTENTION.md, or of rotary_seqlens (B,). Returns out (B, Tq, H,
    D), and any L (B, H, Tq) float32."""
    table = page_table if block_table is None else block_table
    paged = table is not None
    sizes: dict[str, int] = {}
    request = requested(
        sizes, q, "B Tq H D",
        {"k_cache": (k_cache, "rows S Hkv D"), "v_cache": (v_cache, "rows S Hkv D"),
         "k": (k, "B T_new Hkv D"), "v": (v, "B T_new Hkv D")},
        0.0, softmax_scale, causal, window_size, softcap, alibi_slopes, return_softmax_lse, fa3)
    seqlens = cache_seqlens if isinstance(cache_seqlens, Tensor) else None
    match(sizes, q.device, INTEGERS, block_table=(table, "B columns"), cache_seqlens=(seqlens, "B"),
          cache_batch_idx=(cache_batch_idx, "B"), cache_leftpad=(cache_leftpad, "B"),
          rotary_seqlens=(rotary_seqlens, "B"))
    B, Tq, size, n_new = sizes["B"], sizes["Tq"], sizes["S"], sizes.get("T_new", 0)
    if (k is None) != (v is None):
        raise ValueError("k and v, the new tokens, are passed together")
    if paged and (cache_seqlens is None or not cache_batch_idx is cache_leftpad is None):
        raise ValueError("block_table needs cache_seqlens, not cache_batch_idx or cache_leftpad")
    if table is None:  # a page is a row
        rows = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx
        table = rows[:, None]
        if cache_batch_idx is None and sizes["rows"] < B:
            wrong("k_cache", f"of q's batch of {B}, or more", k_cache)
        chosen = calls.on_host(rows) if n_new and cache_batch_idx is not None else None
        if chosen and len(set(chosen)) < B:
            wrong("cache_batch_idx", "of different rows, where k and v are written", chosen)
    wait = request.lse or cache_leftpad is not None
    before = size if cache_seqlens is None else cache_seqlens
    lengths: Any = [before] * B if seqlens is None else calls.on_host(seqlens, wait)
    fake = symbolic(q) and not torch.compiler.is_compiling()
    starts = [0] * B if cache_leftpad is None or fake else calls.read(cache_leftpad)
    room = size * table.shape[1]
    for n, first in zip(lengths or (), starts):
        if not 0 <= n <= room - n_new:
            wrong("cache_seqlens", f"in 0 .. {room} tokens, less {n_new} new ones", n)
        if not 0 <= first <= n:
            wrong("cache_leftpad", f"in 0 .. cache_seqlens ({n})", first)
    start = torch.as_tensor(before, dtype=torch.int32, device=q.device).expand(B)
    total = start + n_new
    slot = start[:, None] + torch.arange(max(n_new, Tq), device=q.device)  # (B, T)
    if rotary_cos is not None or rotary_sin is not None or rotary_seqlens is not None:
        if k is None or rotary_cos is None or rotary_sin is None:
            raise ValueError("rotary embeddings need rotary_cos, rotary_sin, and new k and v")
        at = slot if rotary_seqlens is None else slot - slot[:, :1] + rotary_seqlens[:, None]
        moves = request.window is not None or request.right is not None  # causal too
        of_q = at[:, :Tq] if moves else at[:, :1].expand(B, Tq)
        q = rotate(q, rotary_cos, rotary_sin, of_q, rotary_interleaved)
        k = rotate(k, rotary_cos, rotary_sin, at[:, :n_new], rotary_interleaved)

    by_row = wait or not (paged or q.is_cuda)  # A refusal must come before the cache is written
    ends = total.tolist() if by_row and lengths is None else [n + n_new for n in lengths or ()]
    even = not paged and cache_batch_idx is None and len({*zip(starts, ends)}) < 2
    used = []
    if ends and not even:
        name = "block_table" if paged else "cache_batch_idx"
        used = calls.seen(name, table, k_cache, [Tq] * B, ends, request.window)
    read = {n - a for n, a in zip([n for _, n in used] or ends, starts)} - {0}
    if by_row and q.numel() and read:
        for n in {min(read), max(read)}:
            kernel(q, n, request, dry=True)
    if not by_row:
        cache = {"cache": "paged", "page_size": size} if paged else {"cache": "static"}
        backend, spec = kernel(q, size, request._replace(**cache))
        copies = backend.name == "paged" and (Tq > 1 or not q.is_cuda)  # rows of the table
        if copies and not (ends or symbolic(q) or torch.cuda.is_current_stream_capturing()):
            ends = total.tolist()
    # -1 is an absent page.
    table = (table[:, : max(1, -(-max(ends) // size))] if ends else table).clamp(min=0)
    if k is not None and v is not None:
        at = slot[:, :n_new]
        page = table.gather(1, (at // size).long()).long()
        k_cache[page, at % size] = k
        v_cache[page, at % size] = v
    if by_row and (even or not q.numel()):
        J = slice(*next(zip(starts, ends), (0, 0)))
        return returned(*dense(q, k_cache[:B, J], v_cache[:B, J], request, alibi_slopes))
    if by_row:
        ks, vs = (calls.tokens(t, used, starts) for t in (k_cache, v_cache))
        outs, Ls = texts(q.unbind(), ks, vs, request, alibi_slopes)
        return returned(torch.stack(outs), torch.stack(Ls) if request.lse else None)
    start, count = total - Tq, torch.full_like(total, Tq)
    view: Any = PagedView(table, start, count) if paged else StaticView(start, count, size)
    if not paged:
        these = slice(B) if cache_batch_idx is None else cache_batch_idx
        k_cache, v_cache = k_cache[these], v_cache[these]
    slopes = {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}
    out = backend.compute(q, k_cache, v_cache, spec, cache=view, **slopes)
    ahead = Tq if request.right is None else request.right  # queries before every key
    blind = start[:, None] + torch.arange(Tq, device=q.device) + ahead < 0
    return out.masked_fill((blind | (total == 0)[:, None])[..., None, None], 0)
