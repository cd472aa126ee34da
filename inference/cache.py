"""KV caches: step = cache.reserve(counts), model(idx, cache=step), step.advance().

step.append(layer, k, v) stores k and v (B, Tq, Hkv, D), and returns what the kernel reads.
windows: keys that a query sees in each layer, itself included; None: all.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.masks import PagedView, StaticView
from core.runtime import to_device
from inference.pages import PagePool

Numbers = Sequence[int]
Windows = Sequence[int | None]
Device = str | torch.device
Appended = tuple[Tensor, Tensor, StaticView | PagedView | None]  # keys, values, view of them


class Cache:
    """A cache that stores nothing."""

    pool: PagePool | None = None  # None: rows begin and end together
    k: Sequence[Tensor] = ()  # of each layer
    v: Sequence[Tensor] = ()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (*self.k, *self.v))

    def reserve(self, counts: Numbers, rows: Numbers = ()) -> Any:
        """Begin a step. ValueError: a text exceeds the cache. counts: tokens of each row, the rest
        of max(counts) is padding; rows: sequences of a paged step."""
        return None


class DynamicLayer:
    """At least the last window - 1 tokens of a layer."""

    def __init__(self, window: int, max_len: int) -> None:
        self.window, self.max_len = window, max_len
        self.kv: Tensor | None = None  # (2, B, capacity, Hkv, D)
        self.kept = 0

    def append(self, k: Tensor, v: Tensor) -> Appended:
        past = min(self.kept, self.window - 1)  # seen by the first query
        if self.kv is not None and k.shape[1] == 1 and self.kept < self.kv.shape[2]:
            self.kv[0, :, self.kept], self.kv[1, :, self.kept] = k[:, 0], v[:, 0]
            self.kept += 1
            seen = self.kv[:, :, self.kept - past - 1 : self.kept]
        else:
            seen = torch.stack([k, v])
            if self.kv is not None:
                seen = torch.cat([self.kv[:, :, self.kept - past : self.kept], seen], dim=2)
            n = seen.shape[2]
            self.kept = min(n, self.window - 1)
            capacity = min(1 << n.bit_length(), 2 * self.window, self.max_len)
            self.kv = seen.new_empty(*seen.shape[:2], capacity, *seen.shape[3:])
            self.kv[:, :, : self.kept] = seen[:, :, n - self.kept :]
        return seen[0], seen[1], None


class DynamicCache(Cache):
    """Buffers that double when full. Prompts are padded on the left. ::

    pad = (2, 0)     tokens         segments
    row 0            . . a b c      0 0 1 1 1
    row 1            d e f g h      1 1 1 1 1
    """

    kind = "dynamic"
    page_size = None
    pos: Tensor  # (T,) or, with padding, (B, T) int64
    segments: Tensor | None = None  # (B, Tk) int32, 0: padding; None: no padding

    def __init__(self, windows: Windows, max_len: int, pad: Numbers, device: Device) -> None:
        kept = [min(window or max_len, max_len) for window in windows]
        self.max_len, self.widest, self.device = max_len, max(kept), device
        self.layers = [DynamicLayer(window, max_len) for window in kept]
        self.pads = tuple(pad) if any(pad) else ()
        self.pad = torch.tensor(self.pads, device=device)[:, None]  # (B, 1)
        self.stored = 0  # with padding

    @property
    def nbytes(self) -> int:
        return sum(layer.kv.nbytes for layer in self.layers if layer.kv is not None)

    def reserve(self, counts: Numbers, rows: Numbers = ()) -> DynamicCache:
        """counts[b] is 0 for a row that has ended."""
        T, pads = max(counts), (pad for pad, n in zip(self.pads, counts) if n)
        if (n := self.stored + T - min(pads, default=0)) > self.max_len:
            raise ValueError(f"{n} tokens do not fit into a cache of {self.max_len}")
        past = min(self.stored, self.widest - 1)
        at = torch.arange(self.stored - past, self.stored + T, device=self.device)  # (Tk,)
        self.pos = at[past:]
        if self.pads:
            self.pos = (self.pos - self.pad).clamp_(0, self.max_len - 1)
            self.segments = (at >= self.pad).int()
        return self

    def positions(self, T: int) -> Tensor:
        if self.pos.shape[-1] != T:
            raise ValueError(f"the cache has reserved {self.pos.shape[-1]} tokens, got {T}")
        return self.pos

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        return self.layers[layer].append(k, v)

    def advance(self) -> None:
        self.stored += self.pos.shape[-1]


@dataclass(frozen=True)
class Step:
    """A step of a static or paged cache."""

    segments: ClassVar[None] = None
    cache: StaticCache | PagedCache
    kind: str  # "static" or "paged"; "none": nothing is stored yet
    start: Tensor  # (B,) int32, stored tokens
    count: Tensor  # (B,) int32, tokens of this step
    length: int = 0  # slots that are read
    counts: Mapping[int, int] = field(default_factory=dict)  # sequence -> tokens in this step
    page_tables: Mapping[Any, Tensor] = field(default_factory=dict)  # of each window, (B, n) int32
    page_size: int | None = None
    known: dict[Any, Tensor] = field(default_factory=dict, init=False)

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        cache, kind = self.cache, self.cache.kinds[layer]
        seen = cache.read(self, layer, k, v)
        known = {} if torch.compiler.is_compiling() else self.known
        if kind not in known:
            known[kind] = cache.slots(self, kind, k.shape[1]).flatten()
        for buffer, new in ((cache.k[layer], k), (cache.v[layer], v)):
            # Not flatten(), which might copy.
            buffer.view(-1, *buffer.shape[2:])[known[kind]] = new.detach().flatten(0, 1)
        return seen

    def columns(self, T: int) -> tuple[Tensor, Tensor]:
        """Position (B, T) int64, and bool (B, T), False for padding."""
        i = torch.arange(T, device=self.start.device)
        return self.start[:, None] + i, i < self.count[:, None]

    def positions(self, T: int) -> Tensor:
        at, real = self.columns(T)
        return torch.where(real, at, 0)

    def advance(self) -> None:
        self.cache.advance(self)


def bucket(n: int, limit: int = sys.maxsize) -> int:
    """Round n up to one of few lengths, each with a graph."""
    return min(limit, max(128, 1 << (n - 1).bit_length()))


class StaticCache(Cache):
    """Buffers for `max_len` tokens of each row, allocated once.

    The last slot takes padding. With a window, token p is in slot p % window. ::

        row 0   a b c . . . . . | .     start 3       window 4   a b c . | .
        row 1   d e f g h . . . | .     start 5                  h e f g | .

    in_order: copy a window's tokens in order, for kernels that need distances (ALiBi).
    in_buckets: the kernel reads whole buckets, not bounds on the device.
    """

    key: Hashable = None  # of inference/graphs.py

    def __init__(self, windows: Windows, batch: int, max_len: int, n_kv_head: int, head_dim: int,
                 *, in_order: bool = False, in_buckets: bool = True, dtype: torch.dtype,
                 device: Device) -> None:  # fmt: skip
        self.max_len, self.in_order, self.in_buckets = max_len, in_order, in_buckets
        self.kinds = [min(window or max_len, max_len) for window in windows]
        shapes = [(batch, slots + 1, n_kv_head, head_dim) for slots in self.kinds]
        self.k = [torch.empty(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.empty_like(k) for k in self.k]
        self.start = torch.empty(batch, dtype=torch.int32, device=device)
        self.count = torch.empty_like(self.start)
        self.reset()

    def reset(self) -> None:
        """Empty in place: a CUDA graph has the addresses."""
        # 0 * NaN is NaN, in masked slots too.
        torch._foreach_zero_([*self.k, *self.v, self.start, self.count])
        self.lengths = [0] * len(self.start)  # `start`, on the host
        self.counts = (0,) * len(self.start)

    def reserve(self, counts: Numbers, rows: Numbers = ()) -> Step:
        counts = tuple(counts)
        after = (n + m for n, m in zip(self.lengths, counts, strict=True) if m)
        if (longest := max(after, default=1)) > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into a cache of {self.max_len}")
        if counts != self.counts:
            self.count.copy_(to_device(counts, self.count.device, torch.int32))
            self.counts = counts
        length = bucket(longest, self.max_len) if self.in_buckets else self.max_len
        kind = "static" if any(self.lengths) else "none"
        return Step(self, kind, self.start, self.count, length)

    def advance(self, step: Step) -> None:
        self.start.add_(self.count)
        self.lengths = [n + m for n, m in zip(self.lengths, self.counts, strict=True)]

    def read(self, step: Step, layer: int, k: Tensor, v: Tensor) -> Appended:
        if step.kind == "none":
            return k, v, None
        slots, T = self.kinds[layer], k.shape[1]
        buffers = self.k[layer], self.v[layer]
        start, length = step.start, min(step.length, slots)
        if slots < self.max_len:
            start = start.clamp(max=slots - 1)
            if T > 1 or self.in_order:  # one new token may be in any slot
                k, v = (_in_order(*pair, step.start, start) for pair in zip(buffers, (k, v)))
                return k, v, StaticView(start, step.count, slots - 1 + T)
        k, v = (buffer[:, :length] for buffer in buffers)
        return k, v, StaticView(start, step.count, length)

    def slots(self, step: Step, kind: Any, T: int) -> Tensor:
        at, real = step.columns(T)
        if kind < T:  # later tokens replace the first ones
            real &= at >= (step.start + step.count)[:, None] - kind
        first = torch.arange(0, len(at) * (kind + 1), kind + 1, device=at.device)
        return first[:, None] + torch.where(real, at % kind, kind)


def _in_order(buffer: Tensor, new: Tensor, stored: Tensor, start: Tensor) -> Tensor:
    """The last start[b] of stored[b] tokens, then new ones: (B, slots - 1 + T, Hkv, D)."""
    (B, slots), T = (len(buffer), buffer.shape[1] - 1), new.shape[1]
    row = torch.arange(B, device=new.device)[:, None]
    i = torch.arange(slots - 1 + T, device=new.device)
    ordered = buffer[row, ((stored - start)[:, None] + i) % slots]
    ordered[row, start[:, None] + i[:T]] = new
    return ordered


class PagedCache(Cache):
    """Pages of `page_size` tokens (pages.py); a row is a sequence of the pool. Page 0 takes padding
    and stands for pages that no later token sees: a table never has a page that was freed."""

    pool: PagePool

    def __init__(self, windows: Windows, n_kv_head: int, head_dim: int, *,
                 n_pages: Mapping[int | None, int], page_size: int, dtype: torch.dtype,
                 device: Device) -> None:  # fmt: skip
        self.kinds = windows
        shapes = [(n_pages[window], page_size, n_kv_head, head_dim) for window in windows]
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for shape in shapes]
        self.v = [torch.zeros_like(k) for k in self.k]
        self.pool = PagePool(n_pages, page_size)  # last: what cannot fit is an error at once

    def reserve(self, counts: Numbers, rows: Numbers = ()) -> Step:
        """Raises as PagePool.grow()."""
        assert rows and len(set(rows)) == len(rows), "a sequence twice"
        step = dict(zip(rows, counts, strict=True))
        start = [self.pool.length(row) for row in rows]
        self.pool.grow(step)
        tables, on = {}, (self.k[0].device, torch.int32)
        for window in self.pool.n_pages:
            pages = [self.pool.pages(row, window) for row in rows]
            width = max(1, *map(len, pages))
            tables[window] = to_device([[*p, *[0] * (width - len(p))] for p in pages], *on)
        sizes = to_device(start, *on), to_device([*step.values()], *on)
        return Step(self, "paged", *sizes, 0, step, tables, self.pool.page_size)

    def advance(self, step: Step) -> None:
        self.pool.advance(step.counts)

    def read(self, step: Step, layer: int, k: Tensor, v: Tensor) -> Appended:
        view = PagedView(step.page_tables[self.kinds[layer]], step.start, step.count)
        return self.k[layer], self.v[layer], view

    def slots(self, step: Step, kind: int | None, T: int) -> Tensor:
        page_table, size = step.page_tables[kind], self.pool.page_size
        at, real = step.columns(T)
        column = (at // size).clamp(max=page_table.shape[1] - 1)
        page = page_table.gather(1, column.long())
        return torch.where(real, page * size + at % size, at % size).long()
