"""FlashAttention's functions over the backends of this package, on any device.

    import nanoattn as flash_attn                  # or, where the real package may be installed:
    try: from flash_attn import flash_attn_func
    except ImportError: from nanoattn import flash_attn_func

Signatures, layouts, defaults and in-place effects are those of flash-attn 2.8 (Dao-AILab,
flash_attn/flash_attn_interface.py); FlashAttention-3's further keywords are accepted too. What
cannot be computed is refused with a ValueError that names the argument:

    causal=False  except where it changes nothing: one query, or a window whose right side is 0
    alibi_slopes, rotary_cos, cache_leftpad, qv, q_descale, attention_chunk, seqused_k, ...

num_splits, pack_gqa, sm_margin and scheduler_metadata only tune the packages' own kernels: any
value is accepted. All floating dtypes run, not only float16 and bfloat16.

`use()` names the backend; a call's kernel is chosen and checked once for its kind of shape and each
doubling of its length. Rows that see no key give zeros, as in flash-attn, and a log-sum-exp of
-inf, where flash-attn has inf.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from .caps import Backend
from .function import attention
from .machine.apart import outside_a_trace
from .plan import Plans
from .probing import LONG
from .select import check_name
from .spec import Policy, Spec
from .views import PagedView, StaticView, kept

HINTS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
REFUSED = ("alibi_slopes", "attention_chunk", "cache_leftpad", "cu_seqlens_k_new", "cu_seqlens_q",
           "k_descale", "max_seqlen_q", "q_descale", "qv", "rotary_cos", "rotary_seqlens",
           "rotary_sin", "seqused_k", "seqused_q", "v_descale")  # fmt: skip
_plans = Plans("auto")


def use(backend: str = "auto", policy: Policy = Policy()) -> None:
    """Choose the backend of all later calls: a name, an alias, "auto", "fastest" or a file.

    Raises:
        ValueError: unknown name.
    """
    global _plans
    check_name(backend)
    _plans = Plans(backend, policy)


@dataclass(frozen=True)
class Request:
    """The arguments that all functions share, checked."""

    dropout: float
    scale: float | None
    window: int | None
    softcap: float | None
    lse: bool  # return the log-sum-exp too

    @classmethod
    def of(
        cls, Tq: int, dropout: float, scale: float | None, causal: bool, window: tuple[int, int],
        softcap: float, lse: bool, **others: object,
    ) -> Request:  # fmt: skip
        """Raise ValueError for what is not supported. `others` are HINTS, or REFUSED unless None,
        False or 0."""
        left, right = (-1 if side is None else side for side in window)
        if not causal and right != 0 and Tq != 1:
            raise ValueError(
                f"causal=False with window_size={window} is not supported: attention here is "
                "causal (causal=True, or a window_size whose right side is 0)"
            )
        for name, value in others.items():
            if name not in HINTS + REFUSED:
                raise TypeError(f"unexpected keyword argument {name!r}")
            if name in REFUSED and (isinstance(value, Tensor) or value):
                raise ValueError(f"{name} is not supported")
        return cls(dropout, scale, left + 1 if left >= 0 else None, softcap or None, lse)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, *, return_softmax_lse: bool = False, **fa3: Any,
) -> Any:  # fmt: skip
    """Causal attention: q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> (B, Tq, H, D).

    Args:
        window_size: (left, right): query i sees the keys from i - left on, bottom-right aligned.
        deterministic: on CUDA it needs torch.use_deterministic_algorithms(True).
        return_attn_probs: return (out, softmax_lse, None), the log-sum-exp (B, H, Tq) float32.
        return_softmax_lse: return (out, softmax_lse), as FlashAttention-3.

    Raises:
        ValueError: an argument that is not supported, or tensors of another layout.
    """
    _check(q, k, v, 4, "(batch, tokens, heads, head_dim)")
    _check_deterministic(deterministic, q)
    lse = return_attn_probs or return_softmax_lse
    request = Request.of(q.shape[1], dropout_p, softmax_scale, causal, window_size, softcap, lse,
                         alibi_slopes=alibi_slopes, **fa3)  # fmt: skip
    return _returned(*_dense(q, k, v, request), return_attn_probs, lse)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func() with kv (B, Tk, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_qkvpacked_func(qkv: Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_func() with qkv (B, T, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
    return flash_attn_func(q, k, v, *args, **options)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
    max_seqlen_k: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0,
    alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None, *,
    return_softmax_lse: bool = False, **fa3: Any,
) -> Any:  # fmt: skip
    """Causal attention of N sequences of any lengths, one after the other.

    Args:
        q, k, v: (total_q, H, D) and (total_k, Hkv, D); with block_table k and v are pages,
            (pages, page_size, Hkv, D).
        cu_seqlens_q, cu_seqlens_k: (N + 1,) int32: where each sequence begins, and the total.
        max_seqlen_q, max_seqlen_k: not read.
        block_table: (N, pages of the longest) int32: the pages of each sequence.

    Returns:
        (total_q, H, D); softmax_lse is (H, total_q) float32.
    """
    for name, cu in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if cu.dtype != torch.int32 or cu.dim() != 1:
            raise ValueError(f"{name} must be (sequences + 1,) int32, got {_is(cu)}")
    _check(q, k, v, 3, "(total tokens, heads, head_dim)", pages=block_table is not None)
    _check_deterministic(deterministic, q)
    lse = return_attn_probs or return_softmax_lse
    ends_q, ends_k = _ends(cu_seqlens_q), _ends(cu_seqlens_k)
    lengths_q, lengths_k = ([b - a for a, b in pairwise(e)] for e in (ends_q, ends_k))
    longest = max(lengths_q, default=0)
    request = Request.of(longest, dropout_p, softmax_scale, causal, window_size, softcap, lse,
                         alibi_slopes=alibi_slopes, **fa3)  # fmt: skip
    if block_table is not None:
        k, v = (_unpaged(pages, block_table, lengths_k) for pages in (k, v))
    for name, total, t in (("cu_seqlens_q", ends_q[-1], q), ("cu_seqlens_k", ends_k[-1], k)):
        if total != len(t):
            raise ValueError(f"{name} ends at {total}, but there are {len(t)} tokens")
    alike = len(set(lengths_q)) == len(set(lengths_k)) == 1
    if alike and lengths_q[0] and lengths_k[0]:  # a batch
        n = len(lengths_q)
        q, k, v = (t.unflatten(0, (n, -1)) for t in (q, k, v))
        out, L = _dense(q, k, v, request)
        L = None if L is None else L.transpose(0, 1).flatten(1)
        return _returned(out.flatten(0, 1), L, return_attn_probs, lse)
    if lengths_q == lengths_k:  # one row, each sequence a segment
        out, L = _dense(q[None], k[None], v[None], request, _segments(cu_seqlens_q, len(q)))
        return _returned(out[0], None if L is None else L[0], return_attn_probs, lse)
    parts = [
        _dense(q_i[None], k_i[None], v_i[None], request)
        for q_i, k_i, v_i in zip(q.split(lengths_q), k.split(lengths_k), v.split(lengths_k))
    ]
    out = torch.cat([out[0] for out, _ in parts])
    L = torch.cat([L[0] for _, L in parts if L is not None], dim=1) if lse else None
    return _returned(out, L, return_attn_probs, lse)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *args: Any, **options: Any) -> Any:
    """flash_attn_varlen_func() with kv (total_k, 2, Hkv, D)."""
    k, v = kv.unbind(-3)
    return flash_attn_varlen_func(q, k, v, *args, **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *args: Any, **options: Any
) -> Any:
    """flash_attn_varlen_func() with qkv (total, 3, H, D)."""
    q, k, v = qkv.unbind(-3)
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
    page_table: Tensor | None = None, **fa3: Any,
) -> Any:  # fmt: skip
    """Causal attention to a cache, without gradients; k and v are first appended to it, in place.

    Args:
        q: (B, Tq, H, D). The last query is aligned with the row's last key.
        k_cache, v_cache: (B or more, S, Hkv, D); with block_table (pages, page_size, Hkv, D).
        k, v: (B, T_new, Hkv, D), new tokens.
        cache_seqlens: tokens of each row before this call, (B,) int32 or one number; None: S.
        cache_batch_idx: (B,) the cache's row of each row of q. It copies those rows.
        block_table: (B, pages of the longest) int32 (page_table in FlashAttention-3).

    Returns:
        (B, Tq, H, D), or with return_softmax_lse also the log-sum-exp (B, H, Tq) float32.
    """
    _check(q, k_cache, v_cache, 4, "(batch, tokens, heads, head_dim)")
    (B, Tq), table = q.shape[:2], page_table if block_table is None else block_table
    request = Request.of(
        Tq, 0.0, softmax_scale, causal, window_size, softcap, return_softmax_lse,
        rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad,
        alibi_slopes=alibi_slopes, **fa3,
    )  # fmt: skip
    if table is not None and (cache_seqlens is None or cache_batch_idx is not None):
        raise ValueError("block_table needs cache_seqlens, and excludes cache_batch_idx")
    if table is not None:
        table = table.clamp(min=0)  # -1 marks an absent page
    before = k_cache.shape[1] if cache_seqlens is None else cache_seqlens
    start = torch.as_tensor(before, dtype=torch.int32, device=q.device).expand(B)
    rows = torch.arange(B, device=q.device) if cache_batch_idx is None else cache_batch_idx
    if (k is None) != (v is None):
        raise ValueError("k and v, the new tokens, are passed together")
    if k is not None and v is not None:
        at = start[:, None] + torch.arange(k.shape[1], device=q.device)
        row, slot = rows[:, None], at
        if table is not None:
            size = k_cache.shape[1]
            row, slot = table.gather(1, (at // size).long()), at % size
        k_cache[row.long(), slot.long()] = k
        v_cache[row.long(), slot.long()] = v
        start = start + k.shape[1]
    total, start = start, start - Tq
    if cache_batch_idx is not None:
        k_cache, v_cache = k_cache[rows], v_cache[rows]
    elif table is None:
        k_cache, v_cache = k_cache[:B], v_cache[:B]
    if return_softmax_lse or (table is None and not q.is_cuda):
        return _host_rows(q, k_cache, v_cache, total.tolist(), table, request)
    blind = start[:, None] + torch.arange(Tq, device=q.device) < 0  # queries before every key
    if table is not None:
        backend, spec = _kernel(q, k_cache, request, cache="paged", page_size=k_cache.shape[1])
        view: PagedView | StaticView = PagedView(table, start, torch.full_like(start, Tq))
    else:
        backend, spec = _kernel(q, k_cache, request, cache="static")
        view = StaticView(start, torch.full_like(start, Tq), k_cache.shape[1])
    out = backend.attend(q, k_cache, v_cache, spec, cache=view)
    return out.masked_fill(blind[..., None, None], 0)


def _host_rows(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: list[int], table: Tensor | None,
    request: Request,
) -> Any:  # fmt: skip
    """Attention to rows whose lengths the host knows: it reads only their keys."""
    if table is None and len(set(lengths)) == 1:
        n = lengths[0]
        out, L = _dense(q, k_cache[:, :n], v_cache[:, :n], request)
    else:
        rows = []
        for b, n in enumerate(lengths):
            if table is None:
                k, v = k_cache[b, :n], v_cache[b, :n]
            else:
                k, v = (_unpaged(pages, table[b : b + 1], [n]) for pages in (k_cache, v_cache))
            rows.append(_dense(q[b : b + 1], k[None], v[None], request))
        out = torch.cat([out for out, _ in rows])
        L = torch.cat([L for _, L in rows if L is not None]) if request.lse else None
    return (out, L) if request.lse else out


# --- what all functions call ---


def _dense(
    q: Tensor, k: Tensor, v: Tensor, request: Request, segments: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """out (B, Tq, H, D), and the log-sum-exp (B, H, Tq) float32 if requested."""
    if not (q.shape[1] and k.shape[1]):
        out = q * 0 + 0 * (k.sum() + v.sum())  # keeps the graph
        L = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=torch.float32)
        return out, L if request.lse else None
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    backend, spec = _kernel(q, k, request, segments=segments is not None, grad=grad)
    if not request.lse:
        return backend.attend(q, k, v, spec, segments=segments), None
    out, L = attention(q, k, v, spec, kernel=backend.partial, segments=segments)
    return out, L.float()


def _kernel(
    q: Tensor, k: Tensor, request: Request, *, segments: bool = False, grad: bool = False,
    cache: str = "none", page_size: int | None = None,
) -> tuple[Backend, Spec]:  # fmt: skip
    Tq, Tk = q.shape[1], k.shape[1]
    window = request.window
    if window is not None and cache != "paged" and window >= Tk:
        window = None  # it hides nothing: then kernels without a window can run it
    compiled = torch.compiler.is_compiling()
    # In the order of Spec's fields.
    asked = (
        window, request.dropout, segments, grad, cache, compiled, page_size, request.scale,
        request.softcap, False, request.lse,
    )  # fmt: skip
    heads = q.shape[-2], k.shape[-2], q.shape[-1]
    dtype, device = str(q.dtype).removeprefix("torch."), str(q.device)
    size = 0 if compiled else max(Tk, LONG).bit_length()  # a longer call is probed at its length
    key: tuple[Any, ...] = (device, size, *heads, dtype, *asked)
    if compiled:
        # index(): a size may be symbolic here.
        key = tuple(
            operator.index(n) if isinstance(n, int) and not isinstance(n, bool) else n for n in key
        )
        _plan_in_trace(*key)
    if key not in _plans.known:
        _plan(key, (q.shape[0], Tq, Tk))
    call = _plans.known[key][0]
    return call.chosen.backend, call.spec


def _plan(key: Sequence[Any], shape: tuple[int, int, int]) -> None:
    device, _, *fields = key
    _plans.make(tuple(key), [Spec(*fields)], device, shape, " (flash_attn functions)")


@outside_a_trace
def _plan_in_trace(*key: Any) -> None:
    if key not in _plans.known:
        _plan(key, (1, LONG, LONG))


def _returned(out: Tensor, L: Tensor | None, probs: bool, lse: bool) -> Any:
    if probs:
        return out, L, None
    return (out, L) if lse else out


@kept
def _ends(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.tolist()  # waits for the device, once per tensor


@kept
def _segments(cu_seqlens: Tensor, total: int) -> Tensor:
    """(1, total) int32: the number of each token's sequence."""
    numbers = torch.arange(len(cu_seqlens) - 1, device=cu_seqlens.device, dtype=torch.int32)
    return numbers.repeat_interleave(cu_seqlens.diff(), output_size=total)[None]


def _unpaged(pages: Tensor, table: Tensor, lengths: list[int]) -> Tensor:
    """(sum of lengths, Hkv, D), the first tokens of each row's pages (pages, page_size, Hkv, D)."""
    size = pages.shape[1]
    rows = zip(table.clamp(min=0), lengths, strict=True)
    return torch.cat([pages[row[: -(-n // size)]].flatten(0, 1)[:n] for row, n in rows])


def _is(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def _check(q: Tensor, k: Tensor, v: Tensor, dims: int, layout: str, pages: bool = False) -> None:
    same = k.shape == v.shape and q.dtype == k.dtype == v.dtype and q.shape[-1] == k.shape[-1]
    if (
        not same
        or q.dim() != dims
        or k.dim() != (4 if pages else dims)
        or q.shape[-2] % k.shape[-2]
    ):
        raise ValueError(
            f"q, k and v must be {layout} of one dtype, got {_is(q)}, {_is(k)}, {_is(v)}"
        )


def _check_deterministic(deterministic: bool, q: Tensor) -> None:
    if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) here")
