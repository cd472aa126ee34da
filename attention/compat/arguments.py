"""The functions' arguments: ValueError for what is not supported or contradicts itself, before
anything is written. Values on a GPU are checked only where the host waits for them anyway:
cu_seqlens, seqused, and cache_seqlens for a log-sum-exp or a cache_leftpad."""

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

HINTS = ("max_seqlen_q", "num_splits", "pack_gqa", "scheduler_metadata", "sm_margin")
REFUSED = {  # and what to do instead
    "attention_chunk": "pass each chunk as a sequence of flash_attn_varlen_func",
    "qv": "append it to q, v to k, and zeros to v, along head_dim",
    **dict.fromkeys(("q_descale", "k_descale", "v_descale"), "multiply q, k and v by it"),
    **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k_new"), "flash_attn_varlen_func reads pages too"),
}
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
    slopes: Tensor | None  # ALiBi's

    @classmethod
    def of(
        cls, q: Tensor, k: Tensor, v: Tensor, B: int, dropout: Any, scale: Any, causal: bool,
        window: Any, softcap: Any, slopes: Tensor | None, lse: bool, others: dict[str, object],
    ) -> Request:
        """`others` are HINTS, or REFUSED unless None, False or 0. B: sequences."""
        for name, value in others.items():
            if name not in REFUSED and name not in HINTS:
                raise TypeError(f"unexpected keyword argument {name!r}")
            if name in REFUSED and (isinstance(value, Tensor) or value not in (None, False, 0)):
                raise ValueError(f"{name} is not supported; instead: {REFUSED[name]}")
        if slopes is not None:
            H = q.shape[-2]
            must_be("alibi_slopes", slopes, (B, H)[-slopes.dim() :], q.device, ("float32",))
            if slopes.requires_grad:
                raise ValueError("alibi_slopes must not require gradients: they get none")
        left, right = [n if 0 <= n < NO_LIMIT else None for n in window]
        # A constant, while torch.compile traces, not the symbol of any float.
        traced = torch.compiler.is_compiling()
        number = (lambda x: math.ldexp(*math.frexp(float(x)))) if traced else float
        grad = q.requires_grad or k.requires_grad or v.requires_grad
        return cls(number(dropout), None if scale is None else number(scale),
                   None if left is None else left + 1, 0 if causal else right,
                   number(softcap or 0) or None, lse, grad and torch.is_grad_enabled(), slopes)


def wrong(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {shape_of(got)}")


def integers(n: int, on: object, **given: Tensor | None) -> None:
    """Those that are given are (n,)."""
    for name, t in given.items():
        if t is not None:
            must_be(name, t, (n,), on, INTEGERS)


def on_host(t: Tensor) -> list[Any] | None:
    return None if symbolic(t) or t.device.type != "cpu" else t.tolist()


def check(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v"), *,
          dims: int = 4, paged: bool = False) -> None:
    """q of so many dimensions, k and v too or pages; heads that divide q's; the rest alike."""
    layout = "(total tokens, heads, head_dim)" if dims == 3 else "(batch, tokens, heads, head_dim)"
    if q.dim() != dims or q.dtype not in NAMES or not (q.shape[-1] and q.shape[-2]):
        wrong("q", f"{layout} of {' or '.join(DTYPES)}", q)
    Hkv, alike = k.shape[-2], (q.device, (NAMES[q.dtype],))
    must_be(names[0], k, (*[-1] * (2 if paged else dims - 2), Hkv, q.shape[-1]), *alike)
    must_be(names[1], v, k.shape, *alike)
    if not Hkv or q.shape[-2] % Hkv:
        wrong(names[0], f"of heads that divide q's {q.shape[-2]}", k)


@not_compiled
@kept
def _read(t: Tensor) -> list[int]:
    return t.tolist()  # waits for the device, once per tensor


def lengths_of(name: str, cu_seqlens: Tensor, total: int | None) -> list[int]:
    """The sequences' lengths, of `total` tokens."""
    ends = _read(cu_seqlens)
    if ends[:1] != [0] or sorted(ends) != ends or total not in (None, ends[-1]):
        last = "" if total is None else f" to {total}, the number of tokens"
        wrong(name, f"ascending from 0{last}", ends)
    return [b - a for a, b in pairwise(ends)]


def used_of(name: str, used: Tensor | None, lengths: list[int]) -> list[int]:
    """The first tokens of each sequence that are used (seqused); None: all."""
    found = lengths if used is None else _read(used)
    if not all(0 <= n <= length for n, length in zip(found, lengths)):
        wrong(name, f"from 0 to the lengths {lengths}", found)
    return found


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


def tokens(pages: Tensor, used: list[Tensor], lengths: list[int]) -> list[Tensor]:
    """The tokens (n, Hkv, D) in each row's used pages, of pages (pages, page_size, Hkv, D)."""
    size = pages.shape[1]
    return [pages[u].flatten(0, 1)[: len(u) * size - -n % size] for u, n in zip(used, lengths)]


def check_deterministic(q: Tensor) -> None:
    if q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) here")
