"""The arguments of functions.py's functions: ValueError for what is not supported or contradicts
itself, before anything is written. Values on another device than the CPU are checked only where the
host waits for them anyway: cu_seqlens, and cache_seqlens for a log-sum-exp.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ..caps import INTEGERS, must_be, shape_of
from ..function import not_compiled
from ..masks import kept, symbolic
from ..spec import DTYPES, NO_LIMIT

HINTS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
REFUSED = ("alibi_slopes", "attention_chunk", "cache_leftpad", "cu_seqlens_k_new", "cu_seqlens_q",
           "k_descale", "max_seqlen_q", "q_descale", "qv", "rotary_cos", "rotary_seqlens",
           "rotary_sin", "seqused_k", "seqused_q", "v_descale")
NAMES = {getattr(torch, name): name for name in DTYPES}


class Request(NamedTuple):
    """The options that all functions share. Spec checks the ranges of the numbers."""

    dropout: float
    scale: float | None
    window: int | None
    right: int | None
    softcap: float | None
    lse: bool  # return the log-sum-exp too
    grad: bool  # backward() will be called

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, dropout: Any, scale: Any, causal: bool, window: Any,
        softcap: Any, lse: bool, deterministic: object = False, alibi_slopes: object = None,
        **others: object,
    ) -> Request:
        """`others` are HINTS, or REFUSED unless None, False or 0."""
        others |= {} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}
        for name, value in others.items():
            if name not in REFUSED and name not in HINTS:
                raise TypeError(f"unexpected keyword argument {name!r}")
            if name in REFUSED and (isinstance(value, Tensor) or value not in (None, False, 0)):
                raise ValueError(f"{name} is not supported")
        if deterministic:
            check_deterministic(q)
        left, right = window
        width = left + 1 if 0 <= left < NO_LIMIT else None
        ahead = right if 0 <= right < NO_LIMIT else None
        number = constant if torch.compiler.is_compiling() else float
        scale = None if scale is None else number(scale)
        softcap = number(softcap or 0) or None
        grad = q.requires_grad or k.requires_grad or v.requires_grad
        return cls(number(dropout), scale, width, 0 if causal else ahead, softcap, lse,
                   grad and torch.is_grad_enabled())


def constant(x: Any) -> float:
    """float(x), while torch.compile traces: not the symbol of any float."""
    return math.ldexp(*math.frexp(float(x)))


def wrong(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {shape_of(got)}")


def on_host(t: Tensor) -> list[Any] | None:
    return None if symbolic(t) or t.device.type != "cpu" else t.tolist()


def check(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v"), *,
          dims: int = 4, paged: bool = False) -> None:
    """q of so many dimensions, k and v too or pages; heads that divide q's; the rest alike."""
    layout = "(total tokens, heads, head_dim)" if dims == 3 else "(batch, tokens, heads, head_dim)"
    q_shape, k_shape, dtype, on = q.shape, k.shape, q.dtype, q.device
    if len(q_shape) != dims or dtype not in NAMES or not (q_shape[-1] and q_shape[-2]):
        wrong("q", f"{layout} of {' or '.join(DTYPES)}", q)
    if paged:
        layout, dims = "(pages, page_size, heads, head_dim)", 4
    H, D = q_shape[-2], q_shape[-1]
    fits = len(k_shape) == dims and k.dtype == dtype and k.device == on
    if not fits or k_shape[-1] != D or not k_shape[-2] or H % k_shape[-2]:
        of_q = f"{NAMES[dtype]} on {on} with heads of {D} that divide q's {H}"
        wrong(names[0], f"{layout}, {of_q}", k)
    if v.shape != k_shape or v.dtype != dtype or v.device != on:
        wrong(names[1], f"{shape_of(k)} as {names[0]}", v)


def check_new(k: Tensor | None, v: Tensor | None, k_cache: Tensor, B: int) -> int:
    """The number of new tokens k, v (B, T_new, Hkv, D)."""
    if (k is None) != (v is None):
        raise ValueError("k and v, the new tokens, are passed together")
    if k is None:
        return 0
    for name, t in (("k", k), ("v", v)):
        shape = B, k.shape[1], *k_cache.shape[2:]
        must_be(name, t, shape, k_cache.device, (NAMES[k_cache.dtype],))
    return k.shape[1]


def check_rows(B: int, k_cache: Tensor, n_new: int, seqlens: int | Tensor | None,
               table: Tensor | None, rows: Tensor | None, wait: bool) -> list[int] | None:
    """The lengths of B rows before n_new tokens are written; None: they are on a device, and the
    host does not `wait` for it."""
    n_rows, room, on = k_cache.shape[0], k_cache.shape[1], k_cache.device
    lengths: list[Any] | None = [room if seqlens is None else seqlens] * B
    if table is not None:
        if seqlens is None or rows is not None:
            raise ValueError("block_table needs cache_seqlens, and excludes cache_batch_idx")
        must_be("block_table", table, (B, -1), on, INTEGERS)
        room *= table.shape[1]
    elif rows is not None:
        must_be("cache_batch_idx", rows, (B,), on, INTEGERS)
        chosen = on_host(rows) or []
        twice = n_new > 0 and len(set(chosen)) < len(chosen)
        if twice or not all(0 <= row < n_rows for row in chosen):
            expected = f"in 0 .. {n_rows - 1}, and different where k and v are written"
            wrong("cache_batch_idx", expected, chosen)
    elif n_rows < B:
        wrong("k_cache", f"of q's batch of {B}, or more", k_cache)
    if isinstance(seqlens, Tensor):
        must_be("cache_seqlens", seqlens, (B,), on, INTEGERS)
        lengths = seqlens.tolist() if wait and not symbolic(seqlens) else on_host(seqlens)
    for n in lengths or ():
        if not 0 <= n <= room - n_new:
            wrong("cache_seqlens", f"in 0 .. {room} tokens, less {n_new} new ones", n)
    return lengths


@not_compiled
@kept
def _ends(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.tolist()  # waits for the device, once per tensor


def lengths_of(name: str, cu_seqlens: Tensor, total: int | None) -> list[int]:
    """The sequences' lengths, of `total` tokens."""
    ends = _ends(cu_seqlens)
    if ends[:1] != [0] or sorted(ends) != ends or total not in (None, ends[-1]):
        last = "" if total is None else f" to {total}, the number of tokens"
        wrong(name, f"ascending from 0{last}", ends)
    return [b - a for a, b in pairwise(ends)]


def pages_seen(table: Tensor, pages: Tensor, lengths_q: list[int], lengths_k: list[int],
               window: int | None) -> list[Tensor]:
    """Each row's pages from the first one that its queries see: -1 marks an absent page."""
    n_pages, size = pages.shape[:2]
    rows = []
    for row, Tq, Tk in zip(table, lengths_q, lengths_k, strict=True):
        first = 0 if window is None else max(0, Tk - Tq - window + 1) // size
        rows.append(row[first : -(-Tk // size)])
        if -(-Tk // size) > len(row):
            wrong("cu_seqlens_k", f"of at most {len(row) * size} tokens a row of block_table", Tk)
        if not all(0 <= page < n_pages for page in on_host(rows[-1]) or ()):
            wrong("block_table", f"pages of 0 .. {n_pages - 1} where there are tokens", row)
    return rows


def check_deterministic(q: Tensor) -> None:
    if q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) here")
