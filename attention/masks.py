"""visible() as tensors, calls of any shape, segments by value, views of caches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from .machine.system import R
from .spec import Numbers, Spec, alibi_bias, visible

Pair = tuple[Tensor, Tensor] | None  # segments of queries and keys


def mask(Tq: int, Tk: int, window: int | None, segments: Tensor | Pair, device: torch.device,
         offset: int | None = None, right: int | None = 0) -> Tensor:
    """visible() as bool (1 or B, 1, Tq, Tk); segments (B, Tk) or of both."""
    i = torch.arange(Tq, device=device)[:, None]
    j = torch.arange(Tk, device=device)[None, :]
    offset = Tk - Tq if offset is None else offset
    if segments is None:
        return visible(i, j, offset, window, right=right)[None, None]
    if isinstance(segments, Tensor):
        segments = segments[:, Tk - Tq :], segments
    seg_i, seg_j = segments[0][:, :, None], segments[1][:, None, :]
    return visible(i, j, offset, window, seg_i, seg_j, right)[:, None]


def alibi(slopes: Tensor, Tq: int, Tk: int, offset: Numbers, dtype: torch.dtype) -> Tensor:
    """alibi_bias() (1 or B, H, Tq, Tk), rounded once; slopes (H,) or (B, H)."""
    slopes = slopes.to(torch.promote_types(dtype, slopes.dtype))
    i = torch.arange(Tq, device=slopes.device)[:, None]
    j = torch.arange(Tk, device=slopes.device)
    return alibi_bias(slopes.reshape(-1, slopes.shape[-1], 1, 1), i, j, offset).to(dtype)


def sees_all(Tq: int, Tk: int, window: int | None, offset: int, right: int | None) -> bool:
    first = visible(0, Tk - 1, offset, window, right=right)
    return bool(first and visible(Tq - 1, 0, offset, window, right=right))


def maskless(Tq: int, Tk: int, window: int | None, offset: int, right: int | None) -> str:
    """Return "full", "causal" (of a square), or "" for any other mask."""
    if sees_all(Tq, Tk, window, offset, right):
        return "full"
    square = Tq == Tk and offset == 0 and right == 0
    return "causal" if square and (window is None or window >= Tk) else ""


# --- any shape, any stride ---

Parts = tuple[Tensor, ...]  # out, and any log-sum-exp


def for_any_shape(attend: Callable[..., R], lse: bool = False) -> Callable[..., R]:
    """Extend an attend() for 0 < Tq <= Tk to any shape; `lse`: it also returns L."""

    @wraps(attend)
    def wrapped(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Any:
        (B, Tq), Tk = q.shape[:2], k.shape[1]
        if options.get("cache") is not None:  # k is the cache's buffer, not Tk long
            Tk = max(Tq, 1)
        if B == 0 or Tq == 0 or Tk == 0:
            return nothing(q, k, v, options.get("sinks"), lse)
        if Tq > Tk and (options.get("segments") is not None
                        or not sees_all(Tq, Tk, spec.window, Tk - Tq, spec.right)):
            call = wrapped if lse else lambda *args, **options: (wrapped(*args, **options),)
            return queries_before_keys(call, q, k, v, spec, options)[slice(None) if lse else 0]
        if q.is_cuda or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = loadable(q), loadable(k), loadable(v)
        return attend(q, k, v, spec, **options)

    return wrapped


def queries_before_keys(attend: Callable[..., Parts], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
                        options: dict[str, Any]) -> Parts:
    """The Tq - Tk queries before every key see `right` keys, none with segments; then the rest."""
    n, Tk = q.shape[1] - k.shape[1], k.shape[1]
    n_seen = Tk if spec.right is None else min(spec.right, Tk)
    if options.get("segments") is not None:
        n_seen = 0
    if spec.alibi and n_seen:
        first = early_by_alibi(attend, q, k, v, spec, options)
    else:
        early = replace(spec, window=None, right=spec.right and spec.right - n_seen)
        alone = {**options, "segments": None}
        first = attend(q[:, :n], k[:, :n_seen], v[:, :n_seen], early, **alone)
    return joined(first, attend(q[:, n:], k, v, spec, **options))


def early_by_alibi(attend: Callable[..., Parts], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
                   options: dict[str, Any]) -> Parts:
    """The last early queries see all keys. The others' scores, -m * (j - p), are those of causal
    attention with slopes -m, but for m * right: added to the sinks, taken from L."""
    slopes, sinks = options["alibi_slopes"], options.get("sinks")
    if sinks is not None and slopes.dim() == 2:  # other sinks in each row
        rows = (early_by_alibi(attend, q[b : b + 1], k[b : b + 1], v[b : b + 1], spec,
                               {**options, "alibi_slopes": slopes[b]}) for b in range(len(q)))
        return joined(*rows, dims=(0, 0))
    n, Tk = q.shape[1] - k.shape[1], k.shape[1]
    n_all = n if spec.right is None else min(n, max(0, spec.right - Tk + 1))
    exact = torch.promote_types(q.dtype, torch.float32)
    m_right, n_seen = slopes.to(exact) * (spec.right or 0), min(spec.right or 0, Tk - 1)
    moved = {**options, "alibi_slopes": -slopes}
    if sinks is not None:
        moved["sinks"] = sinks.to(exact) + m_right
    some, all_and_rest = q[:, : n - n_all], q[:, n - n_all :] if n_all else q[:, :0]
    causal, full = replace(spec, window=None, right=0), replace(spec, window=None, right=None)
    out, *L = attend(some, k[:, :n_seen], v[:, :n_seen], causal, **moved)
    L = [x - m_right.view(-1, m_right.shape[-1], 1) for x in L]
    last = attend(all_and_rest, k, v, full, **options)  # the rest for their distances
    return joined((out, *L), tuple(x.narrow(d, 0, n_all) for d, x in enumerate(last, 1)))


def joined(*parts: Parts, dims: tuple[int, int] = (1, 2)) -> Parts:
    return tuple(torch.cat(tensors, d) for tensors, d in zip(zip(*parts), dims))


def nothing(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lse: bool) -> Any:
    """Zeros, which keep the graph."""
    used = (t for t in (q, k, v, sinks) if t is not None)
    out = torch.zeros_like(q) + sum(t[:0].sum().to(q.dtype) for t in used)
    acc = torch.promote_types(q.dtype, torch.float32)
    L = q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=acc)
    return (out, L) if lse else out


def loadable(t: Tensor) -> Tensor:
    """Copy unless rows are contiguous and aligned: CUDA kernels load 16 bytes, unchecked."""
    if t.stride(-1) != 1:  # contiguous() keeps the stride of a single number
        return t.clone(memory_format=torch.contiguous_format)
    n = 16 // t.element_size()
    if not t.is_cuda or t.shape[-1] % n:
        return t
    # Traced, functorch's and fake tensors have no address.
    traced = torch.compiler.is_compiling() or type(t) not in (Tensor, Parameter)
    if traced or torch._C._functorch.is_functorch_wrapped_tensor(t):
        aside = t.storage_offset() % n
    else:
        aside = t.data_ptr() % 16
    if aside or any(step % n for size, step in zip(t.shape[:-1], t.stride()) if size > 1):
        return t.clone(memory_format=torch.contiguous_format)
    return t


# --- what depends on the values of segments ---


def symbolic(t: Tensor) -> bool:
    """True if t has no values."""
    return (torch.compiler.is_compiling() or t.is_meta or isinstance(t, FakeTensor)
            or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None)


def kept(make: Callable[..., R]) -> Callable[..., R]:
    """Cache make(t, *args), which must not refer to t, until args or t's values (off the CPU its
    version) change."""
    known = WeakTensorKeyDictionary()

    @wraps(make)
    def call(t: Tensor, *args: object) -> R:
        on_host = t.device.type == "cpu"  # NumPy writes without a new version
        if symbolic(t) or (not on_host and t.is_inference()):  # which has no version
            return make(t, *args)
        found = known.get(t)  # another thread may replace it
        if found is None or found[0] != args or not (
                torch.equal(found[1], t) if on_host else found[1] == t._version):
            with torch.inference_mode(False):  # else unusable in training
                state = t.detach().clone() if on_host else t._version
                found = known[t] = args, state, make(t, *args)
        return found[2]

    return call


def begins(segments: Tensor) -> Tensor:
    """True (B, T) where a segment begins."""
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)


@kept
def in_pieces(segments: Tensor) -> bool:
    """True if an id (B, Tk) comes again after others; checked on the CPU only."""
    return not symbolic(segments) and segments.device.type == "cpu" and bool(
        begins(segments).sum() != begins(segments.sort(dim=1).values).sum())


@kept
def borders(segments: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in begins(segments).cpu()]


class Runs(NamedTuple):
    """Segments that hold queries, for varlen functions."""

    cu_q: Tensor  # (runs + 1,) int32: starts, and the end
    cu_k: Tensor  # of the keys
    max_q: int
    max_k: int
    keys: Tensor | None  # indices among the B * Tk keys; None: all

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q, k and v as (tokens, heads, head_dim)."""
        q, *kv = (t.flatten(0, 1) for t in (q, k, v))
        return [q, *(t if self.keys is None else t[self.keys] for t in kv)]


@kept
def runs(segments: Tensor, Tq: int) -> Runs:
    """Runs of segments (B, Tk) that hold the last Tq positions."""
    B, Tk = segments.shape
    cu_k = F.pad(begins(segments).flatten().nonzero().flatten(), (0, 1), value=B * Tk)
    row, j = cu_k // Tk, cu_k % Tk
    cu_q = row * Tq + (j - (Tk - Tq)).clamp(min=0)
    keys = None
    if Tq < Tk:
        # flash-attn 2.8.3 miscounts sequences without queries (flash_api.cpp).
        with_queries = cu_q.diff() > 0
        lengths = cu_k.diff()
        keys = with_queries.repeat_interleave(lengths).nonzero().flatten()
        cu_q = F.pad(cu_q.diff()[with_queries].cumsum(0), (1, 0))
        cu_k = F.pad(lengths[with_queries].cumsum(0), (1, 0))
    max_q, max_k = torch.stack((cu_q.diff().max(), cu_k.diff().max())).tolist()
    return Runs(cu_q.int(), cu_k.int(), max_q, max_k, keys)


# --- views of caches ---


@dataclass(frozen=True)
class StaticView:
    """A static cache: k and v are buffers (B, length, Hkv, D). Token i of row b in this call is at
    ``start[b] + i``; from ``count[b]`` on tokens are padding, with meaningless outputs."""

    start: Tensor  # (B,) int32, tokens before this call
    count: Tensor  # (B,) int32, in this call, 0 .. Tq
    length: int  # positions that are read
    kind: ClassVar[str] = "static"  # Spec.cache

    def seen(self, Tq: int, window: int | None, right: int | None = 0) -> Tensor:
        """The mask, bool (B, 1, Tq, length)."""
        i = torch.arange(Tq, device=self.start.device)
        j = torch.arange(self.length, device=self.start.device)
        last: Numbers = self.length - 1  # padding past `length` sees as its last position
        if right != 0:
            last = (self.start + self.count).clamp(1, self.length)[:, None, None, None] - 1
        at = (self.start[:, None, None, None] + i[:, None]).clamp(max=last)
        seen = visible(at, j, 0, window, right=right)
        return seen if right == 0 else seen & (j <= last)

    def as_pages(self) -> PagedView:
        rows = torch.arange(len(self.start), dtype=torch.int32, device=self.start.device)
        return PagedView(rows[:, None], self.start, self.count)


@dataclass(frozen=True)
class PagedView:
    """A paged cache: k and v are pages (n_pages, page_size, Hkv, D); the j-th token of row b is
    ``k[page_table[b, j // page_size], j % page_size]``. Padding is finite; a row without new tokens
    needs no pages. Else as StaticView."""

    page_table: Tensor  # (B, max_pages) int32; 0 is the null page
    start: Tensor  # (B,) int32
    count: Tensor  # (B,) int32
    kind: ClassVar[str] = "paged"  # Spec.cache


def filled_cache(k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor, Callable[..., Any]]:
    """k and v (B, T, Hkv, D) in the cache of `spec`, and view(start, count)."""
    B, T = k.shape[:2]

    def view(*rows: Numbers) -> StaticView | PagedView | None:
        start, count = (torch.as_tensor(x, dtype=torch.int32, device=k.device) for x in rows)
        if spec.cache == "static":
            return StaticView(start, count, T)
        return PagedView(table.int(), start, count) if spec.cache == "paged" else None

    if spec.page_size is None:
        return k, v, view
    size, n = spec.page_size, -(-T // spec.page_size)  # n pages of a row
    order = torch.randperm(B * n, generator=torch.Generator().manual_seed(0)) + 1
    table = order.view(B, n).to(k.device)
    pages = []
    for x in (k, v):
        pages.append(x.new_zeros(1 + B * n, size, *x.shape[2:]))
        pages[-1][table] = F.pad(x, (0, 0, 0, 0, 0, n * size - T)).unflatten(1, (n, size))
    return pages[0], pages[1], view


# --- a mask of one's own ---


@dataclass(frozen=True, eq=False)
class Mods:
    mask_mod: Callable[..., Tensor]
    score_mod: Callable[..., Tensor] | None = None

    def seen(self, B: int, H: int, i: Tensor, Tk: int) -> Tensor:
        """The mask, bool (B, H, len(i), Tk), for positions i."""
        seen = self.mask_mod(*indices(B, H, i, Tk))
        return torch.as_tensor(seen, device=i.device).bool().expand(B, H, len(i), Tk)

    def scored(self, scores: Tensor, H: int, i: Tensor) -> Tensor:
        """Scores (B, Hkv, H / Hkv * len(i), Tk) after score_mod."""
        if self.score_mod is None:
            return scores
        by_head = scores.reshape(len(scores), H, len(i), -1)
        moved = self.score_mod(by_head, *indices(len(scores), H, i, scores.shape[-1]))
        return moved.expand_as(by_head).reshape(scores.shape)

    def mean_keys(self, T: int, H: int, device: str | torch.device = "cpu") -> float:
        rows = torch.arange(T, device=device).split(128)
        return sum(int(self.seen(1, H, i, T).sum()) for i in rows) / (H * T)


def indices(B: int, H: int, i: Tensor, Tk: int) -> tuple[Tensor, ...]:
    b, h, j = (torch.arange(n, device=i.device) for n in (B, H, Tk))
    return b[:, None, None, None], h[:, None, None], i[:, None], j
