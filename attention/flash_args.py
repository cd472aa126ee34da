"""The arguments of flash_api.py's functions: ValueError for what is not supported or contradicts
itself, before anything is read or written.

Values on another device than the CPU are checked only where the host waits for them anyway:
cu_seqlens, and cache_seqlens for a log-sum-exp.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from numbers import Integral, Real
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from .caps import dense, shape_of, unlike
from .spec import DTYPES, LARGEST, NO_LIMIT, is_number
from .views import kept, not_compiled, symbolic

HINTS = ("num_splits", "pack_gqa", "sm_margin", "scheduler_metadata")
REFUSED = ("alibi_slopes", "attention_chunk", "cache_leftpad", "cu_seqlens_k_new", "cu_seqlens_q",
           "k_descale", "max_seqlen_q", "q_descale", "qv", "rotary_cos", "rotary_seqlens",
           "rotary_sin", "seqused_k", "seqused_q", "v_descale")


@dataclass(frozen=True)
class Request:
    """The arguments that all functions share, checked."""

    dropout: float
    scale: float | None
    window: int | None
    right: int | None
    softcap: float | None
    lse: bool  # return the log-sum-exp too

    @classmethod
    def of(
        cls, dropout: float, scale: Any, causal: bool, window: tuple[int, int],
        softcap: float, lse: bool, **others: object,
    ) -> Request:
        """Raise ValueError for what is not supported. `others` are HINTS, or REFUSED unless None,
        False or 0."""
        meta = isinstance(window, Tensor) and window.is_meta
        pair: object = window.tolist() if isinstance(window, Tensor) and not meta else window
        sides = list(pair) if isinstance(pair, (tuple, list)) else []
        if len(sides) != 2 or not all(n is None or is_a(Integral, n) for n in sides):
            wrong("window_size", "a pair of integers", window)
        if not (is_a(Real, dropout) and 0 <= dropout < 1):
            wrong("dropout_p", "in [0, 1)", dropout)
        # A tensor without dimensions is a number for flash-attn's operators too.
        if isinstance(scale, Tensor) and not scale.dim() and not scale.is_meta:
            if scale.requires_grad and torch.is_grad_enabled():
                wrong("softmax_scale", "a number: it gets no gradient", scale)
            scale = scale.item()
        if scale is not None and not (is_a(Real, scale) and 0 < scale <= LARGEST):
            wrong("softmax_scale", "positive", scale)
        if softcap is not None and not (is_a(Real, softcap) and 0 <= softcap <= LARGEST):
            wrong("softcap", "positive, or 0 for none", softcap)
        several = getattr(causal, "ndim", 0) or getattr(causal, "is_meta", False)
        if several or causal not in (False, True):
            wrong("causal", "True or False", causal)
        dropout, softcap = number(dropout), number(softcap or 0)
        scale = None if scale is None else number(scale)
        left, right = (
            None if side is None or not 0 <= side < NO_LIMIT else int(side) for side in sides
        )
        for name, value in others.items():
            if name not in REFUSED:
                if name not in HINTS:
                    raise TypeError(f"unexpected keyword argument {name!r}")
            elif value is not None and not (is_number(value) and value == 0) and value is not False:
                raise ValueError(f"{name} is not supported")
        width = None if left is None else left + 1
        return cls(dropout, scale, width, 0 if causal else right, softcap or None, lse)

    def sides(self, Tq: int, Tk: int) -> tuple[int | None, int | None]:
        """`window` and `right` for a call, None if it hides nothing: more kernels have that."""
        window = None if self.window is None or self.window >= Tk else self.window
        if self.right == 0 or Tq == 1:
            return window, 0
        return window, None if self.right is None or self.right >= Tq - 1 else self.right


INDICES = ("int32", "int64")
COMMON: dict[type, tuple[type, ...]] = {Integral: (int,), Real: (float, int)}
FLOATS = {getattr(torch, name) for name in DTYPES}


def wrong(name: str, expected: str, got: object) -> NoReturn:
    raise ValueError(f"{name} must be {expected}, got {shape_of(got)}")


def is_a(kind: type, value: object) -> bool:
    # First the common types: an abstract class is slow.
    return type(value) in COMMON[kind] or (isinstance(value, kind) and not isinstance(value, bool))


def number(x: Any) -> float:
    """float(x); while torch.compile traces a constant, not the symbol of any float."""
    x = float(x)
    return math.ldexp(*math.frexp(x)) if torch.compiler.is_compiling() else x


def integers(name: str, t: object, shape: tuple[int, ...], on: torch.device,
             dtypes: tuple[str, ...] = INDICES) -> None:
    if why := unlike(t, shape, on, dtypes):
        raise ValueError(f"{name} must be {why}")


def on_host(t: Tensor) -> list[Any] | None:
    return None if symbolic(t) or t.device.type != "cpu" else t.tolist()


def check(q: Tensor, k: Tensor, v: Tensor, names: tuple[str, str] = ("k", "v"), *,
           varlen: bool = False, paged: bool = False) -> None:
    one = "(total tokens, heads, head_dim)" if varlen else "(batch, tokens, heads, head_dim)"
    keys, dims = one, 3 if varlen else 4
    if paged:
        keys = "(pages, page_size, heads, head_dim)"
    for name, t, layout in (("q", q, one), (names[0], k, keys), (names[1], v, keys)):
        if isinstance(t, Tensor) and not dense(t):
            wrong(name, "a dense tensor", t)
        if not isinstance(t, Tensor) or t.dim() != (4 if layout is not one else dims):
            wrong(name, layout, t)
        if 0 in t.shape[1 if layout is not one else -2 :]:
            wrong(name, f"{layout} without a size of 0", t)
        if t.dtype not in FLOATS or t.dtype != q.dtype or t.device != q.device:
            dtype = str(q.dtype)[6:] if name != "q" else " or ".join(DTYPES)
            wrong(name, f"of dtype {dtype} on {q.device}", t)
    if k.shape[-1] != q.shape[-1] or q.shape[-2] % k.shape[-2]:
        wrong(names[0], f"of q's head_dim, with heads that divide q's {q.shape[-2]}", k)
    if v.shape != k.shape:
        wrong(names[1], f"{tuple(k.shape)} as {names[0]}", v)


def unpacked(name: str, t: Tensor, n: int, before: str) -> tuple[Tensor, ...]:
    dims = before.count(",") + 4
    if not isinstance(t, Tensor) or t.dim() != dims or t.shape[-3] != n:
        wrong(name, f"({before}, {n}, heads, head_dim)", t)
    return t.unbind(-3)


def check_new(k: Tensor | None, v: Tensor | None, k_cache: Tensor, B: int) -> int:
    """The number of new tokens k, v (B, T_new, Hkv, D)."""
    if k is None or v is None:
        if k is not v:
            raise ValueError("k and v, the new tokens, are passed together")
        return 0
    H, D = k_cache.shape[2:]
    for name, t in (("k", k), ("v", v)):
        same = isinstance(t, Tensor) and dense(t)
        same = same and (t.dtype, t.device) == (k_cache.dtype, k_cache.device)
        if not same or t.dim() != 4 or (t.shape[0], *t.shape[2:]) != (B, H, D):
            wrong(name, f"({B}, new tokens, {H}, {D}), as {shape_of(k_cache)}", t)
    if v.shape != k.shape:
        wrong("v", f"{tuple(k.shape)} as k", v)
    return k.shape[1]


def check_writable(k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise ValueError for caches that are to be written and share memory, within or between."""
    for name, t in (("k_cache", k_cache), ("v_cache", v_cache)):
        steps = list(zip(t.stride(), t.shape))
        if any(step == 0 and n > 1 for step, n in steps) or not (symbolic(t) or apart(steps)):
            wrong(name, "memory of its own for each row, since k and v are written", t)
        if not symbolic(t) and t.is_inference() and not torch.is_inference_mode_enabled():
            wrong(name, "made outside of inference mode, since k and v are written", t)
    if k_cache is v_cache or not (symbolic(v_cache) or not_one(k_cache, v_cache)):
        wrong("v_cache", "memory apart from k_cache's, since k and v are written", v_cache)


def apart(steps: list[tuple[int, int]]) -> bool:
    """True if dimensions of these strides and sizes lie within one another: no element is twice."""
    reach = 0  # of the smaller strides
    for step, n in sorted(pair for pair in steps if pair[1] > 1):
        if step <= reach:
            return False
        reach += step * (n - 1)
    return True


def not_one(a: Tensor, b: Tensor) -> bool:
    """True if tensors of one shape and dtype share no memory. They may alternate in one tensor."""
    a, b = sorted((a, b), key=Tensor.data_ptr)
    between = (b.data_ptr() - a.data_ptr()) // a.element_size()
    steps, others = ([pair for pair in zip(t.stride(), t.shape) if pair[1] > 1] for t in (a, b))
    behind = between > sum(step * (n - 1) for step, n in steps)
    return behind or not a.numel() or (steps == others and apart([(between, 2), *steps]))


def unshared(new: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
    """new, copied if it lies in a cache's memory, which is written before it is read."""
    if symbolic(new):
        return new
    own = new.untyped_storage().data_ptr()
    return new.clone() if own in [t.untyped_storage().data_ptr() for t in caches] else new


def check_rows(B: int, k_cache: Tensor, n_new: int, seqlens: int | Tensor | None,
               table: Tensor | None, rows: Tensor | None, wait: bool) -> list[int] | None:
    """The lengths of B rows before n_new tokens are written; None: they are on a device, and the
    host does not `wait` for it."""
    (n_rows, room), on = k_cache.shape[:2], k_cache.device
    if table is not None:
        if seqlens is None or rows is not None:
            raise ValueError("block_table needs cache_seqlens, and excludes cache_batch_idx")
        integers("block_table", table, (B, -1), on)
        room *= table.shape[1]
    elif rows is not None:
        integers("cache_batch_idx", rows, (B,), on)
        chosen = on_host(rows) or []
        if not all(0 <= row < n_rows for row in chosen):
            wrong("cache_batch_idx", f"in 0 .. {n_rows - 1}", chosen)
        if n_new and len(set(chosen)) < len(chosen):
            wrong("cache_batch_idx", "different rows, since k and v are written", chosen)
    elif n_rows < B:
        wrong("k_cache", f"of q's batch of {B}, or more", k_cache)
    if isinstance(seqlens, Tensor):
        integers("cache_seqlens", seqlens, (B,), on)
        lengths = seqlens.tolist() if wait and not symbolic(seqlens) else on_host(seqlens)
    elif seqlens is None or is_a(Integral, seqlens):
        lengths = [k_cache.shape[1] if seqlens is None else int(seqlens)] * B
    else:
        wrong("cache_seqlens", f"an integer or int32 ({B},)", seqlens)
    for n in lengths or ():
        if not 0 <= n <= room - n_new:
            new = f", less {n_new} new ones" if n_new else ""
            wrong("cache_seqlens", f"in 0 .. {room} tokens{new}", n)
    return lengths


@not_compiled
@kept
def _ends(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.tolist()  # waits for the device, once per tensor


def lengths_of(name: str, cu_seqlens: Tensor, total: int | None) -> list[int]:
    """The sequences' lengths, of `total` tokens."""
    ends = _ends(cu_seqlens)
    for a, b in pairwise(ends) if sorted(ends) != ends else ():
        if b < a:
            wrong(name, f"no less than {a} after it", b)
    if ends[0] != 0:
        wrong(name, "0 at first", ends[0])
    if total is not None and ends[-1] != total:
        wrong(name, f"{total} at last, the number of tokens", ends[-1])
    return [b - a for a, b in pairwise(ends)]


def check_pages(table: Tensor, pages: Tensor, skip: list[int], ends: list[int],
                before: list[int]) -> None:
    """Each row's tokens skip .. end lie in pages, and those from `before` on, which are written,
    in pages of no other row."""
    # NumPy's small operations take a fraction of PyTorch's time.
    (n_pages, size), numbers = pages.shape[:2], table.numpy()
    first = np.arange(table.shape[1]) * size  # tokens of each column
    least, last, start = np.array([skip, ends, before], dtype=np.int64)[:, :, None]
    used = (first + size > np.minimum(least, start)) & (first < last)
    found = numbers[used]
    if found.size and not 0 <= found.min() <= found.max() < n_pages:
        none = found[(found < 0) | (found >= n_pages)]
        wrong("block_table", f"pages of 0 .. {n_pages - 1} where there are tokens", int(none[0]))
    if before != ends:
        written = numbers[used & (first + size > start)]
        twice = written[np.bincount(found, minlength=n_pages)[written] > 1]
        if twice.size:
            wrong("block_table", "pages of one row where tokens are written", int(twice[0]))


def check_deterministic(deterministic: bool, q: Tensor) -> None:
    if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise ValueError("deterministic=True needs torch.use_deterministic_algorithms(True) here")
