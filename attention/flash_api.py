"""FlashAttention's functions over the backends of this package, on any device.

    import nanoattn as flash_attn                  # or, where the real package may be installed:
    try: from flash_attn import flash_attn_func
    except ImportError: from nanoattn import flash_attn_func

stand_in.py is for programs that import flash_attn and cannot be changed.

Signatures, layouts, defaults and in-place effects are those of flash-attn 2.8 (Dao-AILab,
flash_attn/flash_attn_interface.py); FlashAttention-3's further keywords are accepted too. What
cannot be computed is refused with a ValueError that names the argument:

    alibi_slopes, rotary_cos, cache_leftpad, qv, q_descale, attention_chunk, seqused_k, ...

num_splits, pack_gqa, sm_margin and scheduler_metadata only tune the packages' own kernels: any
value is accepted. All floating dtypes run, not only float16 and bfloat16. Meta and fake tensors
give results of the right shape.

`use()` names the backend; a call's kernel is chosen and proved once for its kind (plan.py). Rows
that see no key give zeros, as in flash-attn, and a log-sum-exp of -inf, where flash-attn has inf.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from . import manual, tiled
from .caps import Backend
from .flash_args import (
    NAMES,
    Request,
    check,
    check_deterministic,
    check_new,
    check_pages,
    check_rows,
    integers,
    lengths_of,
    on_host,
    unpacked,
    wrong,
)
from .function import attention
from .masks import PagedView, StaticView, kept, symbolic
from .plan import Plans
from .select import check_name
from .spec import Policy, Spec

Returned = Any  # out; with the log-sum-exp (out, L), or (out, L, None)
_plans = Plans("auto")


def use(backend: str = "auto", policy: Policy = Policy()) -> None:
    """Choose the backend of all later calls: a name, an alias, "auto", "fastest" or a file.

    Raises:
        ValueError: unknown name.
    """
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
    check(q, k, v)
    if k.shape[0] != q.shape[0]:  # len() would be a constant in torch.export
        wrong("k", f"of q's batch of {q.shape[0]}", k)
    check_deterministic(deterministic, q)
    lse = return_attn_probs or return_softmax_lse
    request = Request.of(dropout_p, softmax_scale, causal, window_size, softcap, lse,
                         alibi_slopes=alibi_slopes, **fa3)
    return _returned(*_dense(q, k, v, request), return_attn_probs, lse)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with kv (B, Tk, 2, Hkv, D)."""
    k, v = unpacked("kv", kv, 2, "batch, tokens")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_func() with qkv (B, T, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, 3, "batch, tokens")
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    return_softmax_lse: bool = False, **fa3: object,
) -> Returned:
    """Attention of N sequences of any lengths, one after the other.

    Args:
        q, k, v: (total_q, H, D) and (total_k, Hkv, D); with block_table k and v are pages,
            (pages, page_size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32: where each sequence begins, and the total.
        max_seqlen_q, max_seqlen_k: not read.
        block_table: (N, pages of the longest) int32: the pages of each sequence.

    Returns:
        (total_q, H, D); softmax_lse is (H, total_q) float32.
    """
    check(q, k, v, dims=3, paged=block_table is not None)
    N = cu_seqlens_q.shape[0] - 1
    integers("cu_seqlens_q", cu_seqlens_q, (max(N, 0) + 1,), q.device)
    integers("cu_seqlens_k", cu_seqlens_k, (N + 1,), q.device)
    if block_table is not None:
        integers("block_table", block_table, (N, -1), q.device)
    check_deterministic(deterministic, q)
    lse = return_attn_probs or return_softmax_lse
    request = Request.of(dropout_p, softmax_scale, causal, window_size, softcap, lse,
                         alibi_slopes=alibi_slopes, **fa3)
    square = cu_seqlens_q is cu_seqlens_k and block_table is None
    if _shape_only(q) or (square and torch.compiler.is_compiling()):
        segments = _segments(cu_seqlens_q, q.shape[0]) if square else None
        k, v = (t.flatten(0, -3)[None] for t in (k, v))
        out, L = _dense(q[None], k, v, request, segments)
        return _returned(out[0], None if L is None else L[0], return_attn_probs, lse)
    lengths_q = lengths_of("cu_seqlens_q", cu_seqlens_q, len(q))
    lengths_k = lengths_of("cu_seqlens_k", cu_seqlens_k, len(k) if block_table is None else None)
    if block_table is not None:
        room, longest = block_table.shape[1] * k.shape[1], max(lengths_k, default=0)
        if longest > room:
            wrong("cu_seqlens_k", f"of at most {room} tokens a row of block_table", longest)
        past = (b - a for a, b in zip(lengths_q, lengths_k))
        skip = [_unseen(n, request.window, k.shape[1]) for n in past]
        if on_host(block_table) is not None:
            check_pages(block_table, k, skip, lengths_k)
        k, v = (_unpaged(pages, block_table, skip, lengths_k) for pages in (k, v))
        lengths_k = [n - m for n, m in zip(lengths_k, skip)]
    if len(set(zip(lengths_q, lengths_k))) <= 1:  # a batch
        a, b = (lengths_q[0], lengths_k[0]) if N else (0, 0)
        q, k, v = (t.unflatten(0, (N, n)) for t, n in ((q, a), (k, b), (v, b)))
        out, L = _dense(q, k, v, request)
        L = None if L is None else L.transpose(0, 1).flatten(1)
        return _returned(out.flatten(0, 1), L, return_attn_probs, lse)
    if lengths_q == lengths_k and q.is_cuda and block_table is None and not lse:
        grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
        if q.device.type in _kernel(q[None], k[None], request, segments=True, grad=grad)[0].varlen:
            segments = _segments(cu_seqlens_q, len(q))
            return _dense(q[None], k[None], v[None], request, segments)[0][0]
    return _returned(*_texts(q, k, v, lengths_q, lengths_k, request), return_attn_probs, lse)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Returned:
    """flash_attn_varlen_func() with kv (total_k, 2, Hkv, D)."""
    k, v = unpacked("kv", kv, 2, "tokens")
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int,
                                     *args: Any, **options: Any) -> Returned:
    """flash_attn_varlen_func() with qkv (total, 3, H, D)."""
    q, k, v = unpacked("qkv", qkv, 3, "tokens")
    ends, longest = cu_seqlens, max_seqlen
    return flash_attn_varlen_func(q, k, v, ends, ends, longest, longest, *args, **options)


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

    Returns:
        (B, Tq, H, D), or with return_softmax_lse also the log-sum-exp (B, H, Tq) float32.

    Raises:
        ValueError: as flash_attn_func(); the cache is as it was.
    """
    if block_table is not None and page_table is not None:
        raise ValueError("page_table is block_table's other name: pass one of them")
    table = page_table if block_table is None else block_table
    check(q, k_cache, v_cache, ("k_cache", "v_cache"), paged=table is not None)
    (B, Tq), (size, *heads), on = q.shape[:2], k_cache.shape[1:], q.device
    request = Request.of(
        0.0, softmax_scale, causal, window_size, softcap, return_softmax_lse,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes, **fa3,
    )
    n_new = check_new(k, v, k_cache, B)
    wait = return_softmax_lse
    lengths = check_rows(B, k_cache, n_new, cache_seqlens, table, cache_batch_idx, wait)
    if _shape_only(q):
        k = v = k_cache.new_empty(B, size, *heads)
        out, L = _dense(q, k, v, request)
        return (out, L) if request.lse else out
    before = size if cache_seqlens is None else cache_seqlens
    total = torch.as_tensor(before, dtype=torch.int32, device=on).expand(B) + n_new
    by_row = return_softmax_lse or (table is None and not q.is_cuda)
    ends = total.tolist() if by_row and lengths is None else [n + n_new for n in lengths or ()]
    skip = [0 if table is None else _unseen(n - Tq, request.window, size) for n in ends]
    if table is not None and lengths is not None and on_host(table) is not None:
        check_pages(table, k_cache, skip, ends)
    by_row |= not q.numel() or (lengths is not None and not any(ends))
    # The kernel is chosen before anything is written: it may be refused.
    if by_row:
        read = {n - m for m, n in zip(skip, ends) if n and q.numel()}
        for n in {n > (request.window or 0): n for n in sorted(read)}.values():
            _kernel(q, k_cache[:1, :1].expand(1, n, *heads), request)
    else:
        cache, pages = ("static", None) if table is None else ("paged", size)
        backend, spec = _kernel(q, k_cache, request, cache=cache, page_size=pages)

    rows = torch.arange(B, device=on) if cache_batch_idx is None else cache_batch_idx
    table = None if table is None else table.clamp(min=0)  # -1 marks an absent page
    if k is not None and v is not None:
        at = (total - n_new)[:, None] + torch.arange(n_new, device=on)
        row, slot = rows[:, None], at
        if table is not None:
            row, slot = table.gather(1, (at // size).long()), at % size
        k_cache[row.long(), slot.long()] = k
        v_cache[row.long(), slot.long()] = v
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    elif table is None:
        k_cache, v_cache = k_cache[:B], v_cache[:B]
    if by_row:
        out, L = _host_rows(q, k_cache, v_cache, skip, ends, table, request)
        return (out, L) if request.lse else out
    start = total - Tq
    # Queries before every key; of these `right` lets the last ones see some.
    ahead = Tq if request.right is None else request.right
    blind = (start[:, None] + torch.arange(Tq, device=on) + ahead < 0) | (total == 0)[:, None]
    view: PagedView | StaticView = StaticView(start, torch.full_like(start, Tq), size)
    if table is not None:
        view = PagedView(table, start, torch.full_like(start, Tq))
    out = backend.compute(q, k_cache, v_cache, spec, cache=view)
    return out.masked_fill(blind[..., None, None], 0)


def _host_rows(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, skip: list[int], ends: list[int],
    table: Tensor | None, request: Request,
) -> tuple[Tensor, Tensor | None]:
    """_dense() of rows whose lengths the host knows: it reads only their keys."""
    if not (q.numel() and any(ends)):
        return _dense(q, k_cache[:, :0], v_cache[:, :0], request)
    if table is None and len(set(ends)) == 1:
        return _dense(q, k_cache[:, : ends[0]], v_cache[:, : ends[0]], request)
    rows = []
    for b, (m, n) in enumerate(zip(skip, ends)):
        if table is None:
            k, v = k_cache[b, :n], v_cache[b, :n]
        else:
            k, v = (_unpaged(pages, table[b : b + 1], [m], [n]) for pages in (k_cache, v_cache))
        rows.append(_dense(q[b : b + 1], k[None], v[None], request))
    L = torch.cat([L for _, L in rows if L is not None]) if request.lse else None
    return torch.cat([out for out, _ in rows]), L


# --- what all functions call ---


def _dense(
    q: Tensor, k: Tensor, v: Tensor, request: Request, segments: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out (B, Tq, H, D), and the log-sum-exp (B, H, Tq) float32 if requested."""
    if not (q.numel() and k.numel()):
        # Zeros, whatever q holds, that keep the graph.
        out = torch.where(q.new_zeros((), dtype=torch.bool), q, 0) + k[:0].sum() + v[:0].sum()
        L = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        return out, L if request.lse else None
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    backend, spec = _kernel(q, k, request, segments=segments is not None, grad=grad)
    with getattr(q, "fake_mode", nullcontext()) if _shape_only(q) else nullcontext():
        if not spec.lse:
            return backend.compute(q, k, v, spec, segments=segments), None
        out, L = attention(q, k, v, spec, kernel=backend.partial, segments=segments)
        return out, L.float()


def _texts(
    q: Tensor, k: Tensor, v: Tensor, lengths_q: list[int], lengths_k: list[int], request: Request
) -> tuple[Tensor, Tensor | None]:
    """out (total_q, H, D) and the log-sum-exp (H, total_q) of texts of any lengths.

    Those of one length are a batch, and causal ones of nearly the same, padded with zeros on the
    right, where no query looks: no mask, and NaN in one text does not reach another, as it does
    through a masked key.
    """
    outs = [q] * len(lengths_q)
    Ls: list[Tensor] = [q] * len(lengths_q)
    texts = [t.split(n) for t, n in ((q, lengths_q), (k, lengths_k), (v, lengths_k))]
    for rows in _similar(lengths_q, lengths_k, request.right == 0):
        q, k, v = (_padded([of[i] for i in rows]) for of in texts)
        out, L = _dense(q, k, v, request)
        # Unbound first: the gradient of a slice of the batch would be of the batch's size.
        for b, (i, row) in enumerate(zip(rows, out.unbind())):
            outs[i] = row[: lengths_q[i]]
            Ls[i] = row if L is None else L[b, :, : lengths_q[i]]
    return torch.cat(outs), torch.cat(Ls, dim=1) if request.lse else None


def _similar(lengths_q: list[int], lengths_k: list[int], causal: bool) -> Iterator[list[int]]:
    """The numbers of the texts in groups of one len_k - len_q and of one length, or if causal the
    longest last and at most 32 tokens or a quarter longer than the first."""
    key = [(b - a, a) for a, b in zip(lengths_q, lengths_k)]
    rows: list[int] = []
    for i in sorted(range(len(key)), key=key.__getitem__):
        if rows:
            offset, first = key[rows[0]]
            full = key[i][1] > first + (max(32, first // 4) if causal else 0)
            if full or key[i][0] != offset or not min(first, lengths_k[rows[0]]):
                yield rows
                rows = []
        rows.append(i)
    yield rows


def _padded(texts: list[Tensor]) -> Tensor:
    """(texts, length of the last, H, D), with zeros behind each."""
    n = len(texts[-1])
    zeros = texts[0].new_zeros(n - len(texts[0]), *texts[0].shape[1:])
    pieces = [piece for t in texts for piece in (t, zeros[: n - len(t)])]
    return torch.cat(pieces).unflatten(0, (len(texts), n)) if len(texts) > 1 else texts[0][None]


def _kernel(
    q: Tensor, k: Tensor, request: Request, *, segments: bool = False, grad: bool = False,
    cache: str = "none", page_size: int | None = None,
) -> tuple[Backend, Spec]:
    Tq, Tk, heads = q.shape[1], k.shape[1], (q.shape[-2], k.shape[-2], q.shape[-1])
    compiled = torch.compiler.is_compiling()
    if type(Tq) is not int and not compiled:  # other tracers' numbers
        Tq, Tk = operator.index(Tq), operator.index(Tk)
        heads = operator.index(heads[0]), operator.index(heads[1]), operator.index(heads[2])
    window, right = request.sides(Tq, Tk)
    window = request.window if cache == "paged" else window  # there k is pages
    fields: tuple[Any, ...] = (  # in the order of Spec's
        *heads, NAMES[q.dtype], window, request.dropout, segments, grad, cache, compiled, page_size,
        request.scale, request.softcap, False, request.lse, right,
    )
    plans, device = _plans, str(q.device)  # use() may replace _plans
    if compiled:
        # index(): a size may be symbolic here.
        fields = tuple(operator.index(n) if type(n) not in PLAIN else n for n in fields)
        key = device, torch.are_deterministic_algorithms_enabled(), *fields
        plans.choose_in_trace(*key)
        call = plans.known[key][0]
        return call.chosen.backend, call.spec
    spec = _spec(*fields)
    if _shape_only(q):
        return (tiled if request.lse else manual).BACKEND, spec
    chosen = plans.choose(spec, device, (q.shape[0], Tq, Tk), " (flash_attn functions)")
    return chosen.backend, spec


PLAIN = (bool, float, str, type(None))
_spec = lru_cache(maxsize=4096)(Spec)


def _shape_only(t: Tensor) -> bool:
    """True for meta and fake tensors: no kernel runs, or could."""
    return symbolic(t) and not torch.compiler.is_compiling()


def _returned(out: Tensor, L: Tensor | None, probs: bool, lse: bool) -> Returned:
    if probs:
        return out, L, None
    return (out, L) if lse else out


@kept
def _segments(cu_seqlens: Tensor, total: int) -> Tensor:
    """(1, total) int32: the number of each token's sequence."""
    numbers = torch.arange(cu_seqlens.shape[0] - 1, device=cu_seqlens.device, dtype=torch.int32)
    return numbers.repeat_interleave(cu_seqlens.diff(), output_size=total)[None]


def _unpaged(pages: Tensor, table: Tensor, skip: list[int], lengths: list[int]) -> Tensor:
    """(sum of lengths - skip, Hkv, D), each row's tokens after the first `skip`, which fill whole
    pages, from pages (pages, page_size, Hkv, D)."""
    size = pages.shape[1]
    rows = zip(table, skip, lengths, strict=True)
    tokens = [pages[row[m // size : -(-n // size)]].flatten(0, 1)[: n - m] for row, m, n in rows]
    return torch.cat(tokens) if tokens else pages.flatten(0, 1)[:0]


def _unseen(past: int, window: int | None, size: int) -> int:
    """Tokens before the first page that queries from position `past` on see."""
    return 0 if window is None else max(0, past - window + 1) // size * size
