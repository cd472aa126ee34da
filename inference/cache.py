"""KV caches: the keys and values of the tokens so far, so that each is computed once.

    cache      what it is                                     for
    dynamic    buffers that double when they are full         plain k and v: every backend
    static     buffers of one size, lengths on the device     a compiled step, or a CUDA graph
    paged      pages from a pool, found through a table       many texts of different lengths

All three are used alike. A step reserves room for its tokens, the model stores them layer by layer,
and advance() ends the step: ::

    cache = DynamicCache(12, max_len=1024)
    step = cache.reserve(64)                  the prompt
    logits, _ = model(prompt, cache=step)     each layer calls step.layer(layer).append(k, v)
    step.advance()
    step = cache.reserve(1)                   decoding
    ...

append() stores this call's k and v, (B, Tq, Hkv, D), without waiting for the device, and gives back
what the kernel is to read: keys, values, and for the static and the paged cache a view that says
which of them are whose (attention/views.py). Kernels never write a cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from attention.views import PagedView, StaticView
from core.runtime import to_device
from inference.pages import PagePool

Appended = tuple[Tensor, Tensor, Any]  # keys, values and the view of them, for a kernel to read


class Step:
    """One step of a cache: what the model is given."""

    segments: Tensor | None = None
    page_size: int | None = None

    def layer(self, layer: int) -> LayerCache:
        return LayerCache(self, layer)

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        raise NotImplementedError


@dataclass(frozen=True)
class LayerCache:
    """One layer of a step."""

    step: Step
    layer: int

    def append(self, k: Tensor, v: Tensor) -> Appended:
        return self.step.append(self.layer, k, v)


class Cache:
    """Keys and values of each layer."""

    k: Any
    v: Any

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all layers."""
        return sum(t.nbytes for t in (*self.k, *self.v) if t is not None)


# --- dynamic: buffers that grow ---


class DynamicCache(Cache):
    """Keys and values of all tokens so far, in buffers that double when they are full.

    To a kernel they look like plain k and v with Tq < Tk, so every backend can read them. Rows end
    together: prompts of different lengths are padded on the left, and the padding is a segment of
    its own, which no other token sees. With a window the buffers keep what a later token can see,
    the last window - 1 tokens, and never more than twice the window. ::

        pad = (2, 0)     tokens         segments
        row 0            . . a b c      0 0 1 1 1
        row 1            d e f g h      1 1 1 1 1

    Args:
        max_len: positions that the model has, block_size.
        window: keys that a query sees, itself included; None: all, so max_len.
        pad: padding on the left of each row; None: no row has any.
    """

    def __init__(self, n_layer: int, *,
                 max_len: int, window: int | None = None, pad: Sequence[int] | None = None,
                 device: str | torch.device = "cpu") -> None:  # fmt: skip
        self.max_len, self.window, self.device = max_len, window or max_len, device
        self.k: list[Tensor | None] = [None] * n_layer  # (B, capacity, Hkv, D), on first use
        self.v: list[Tensor | None] = [None] * n_layer
        self.pads = tuple(pad) if pad is not None and any(pad) else ()
        self.pad = torch.tensor(self.pads, device=device)[:, None] if self.pads else None  # (B, 1)
        self.stored = 0  # tokens of a row so far, padding included
        self.kept = 0  # of these, the last so many are in the buffers
        self.capacity = 0  # tokens that the buffers have room for

    def reserve(self, T: int, counts: Sequence[int] | None = None) -> DynamicStep:
        """Begin a step of T tokens in each row: make room for them.

        Args:
            counts: 0 for a row whose text has ended: it may grow past max_len. None: none has.

        Raises:
            ValueError: a row that has not ended would pass max_len.
        """
        pads = [pad for row, pad in enumerate(self.pads) if counts is None or counts[row]]
        longest = self.stored + T - min(pads, default=0)
        if longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into a cache of {self.max_len}")
        if T == 1 and self.kept == self.capacity >= 2 * self.window:
            n = self.window - 1  # what is seen goes to the front
            for t in (*self.k, *self.v):
                if t is not None:
                    t[:, :n] = t[:, self.kept - n : self.kept]
            self.kept = n
        self._make_room(self.kept + 1 if T == 1 else min(self.window - 1, self.kept + T))
        past = min(self.kept, self.window - 1)
        at = torch.arange(self.stored - past, self.stored + T, device=self.device)  # (Tk,)
        if self.pad is None:
            return DynamicStep(self, T, at[past:], None)
        pos = (at[past:] - self.pad).clamp_(0, self.max_len - 1)  # (B, T)
        return DynamicStep(self, T, pos, (at >= self.pad).int())

    def _make_room(self, n: int) -> None:
        """Buffers of at least n tokens: doubled, so that each token is copied once on average."""
        if n <= self.capacity:
            return
        most = self.max_len if self.window == self.max_len else 2 * self.window
        self.capacity = max(n, min(1 << n.bit_length(), most))
        for buffers in (self.k, self.v):
            for layer, old in enumerate(buffers):
                if old is not None:
                    new = old.new_empty(old.shape[0], self.capacity, *old.shape[2:])
                    new[:, : self.kept] = old[:, : self.kept]
                    buffers[layer] = new


@dataclass(frozen=True)
class DynamicStep(Step):
    """One step of a DynamicCache."""

    cache: DynamicCache
    T: int  # tokens of each row
    pos: Tensor  # (T,) or, with padding, (B, T) int64
    segments: Tensor | None  # (B, Tk) int32, 0 for padding and 1 for text; None: no padding
    kind: ClassVar[str] = "dynamic"

    def positions(self, T: int) -> Tensor:
        """The positions of this step's T tokens, (T,) or (B, T) int64; 0 for padding."""
        if T != self.T:
            raise ValueError(f"the cache has reserved {self.T} tokens, and {T} came")
        return self.pos

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        """Views of the buffers, (B, Tk, Hkv, D), and None."""
        return self._append(self.cache.k, layer, k), self._append(self.cache.v, layer, v), None

    def _append(self, buffers: list[Tensor | None], layer: int, new: Tensor) -> Tensor:
        c, T, buffer = self.cache, new.shape[1], buffers[layer]
        if buffer is None:
            buffer = new.new_empty(new.shape[0], c.capacity, *new.shape[2:])
            buffers[layer] = buffer
        if T == 1:
            end = c.kept + 1
            buffer[:, c.kept : end] = new
            return buffer[:, max(0, end - c.window) : end]
        # A chunk's first query sees window - 1 tokens before it; the next step, as many of these.
        past = min(c.kept, c.window - 1)
        seen = torch.cat([buffer[:, c.kept - past : c.kept], new], dim=1) if past else new
        keep = min(c.window - 1, c.kept + T)
        buffer[:, :keep] = seen[:, seen.shape[1] - keep :]
        return seen

    def advance(self) -> None:
        c = self.cache
        c.stored += self.T
        c.kept += self.T
        if self.T > 1:
            c.kept = min(c.kept, c.window - 1)


# --- static: allocated once ---

MIN_BUCKET = 128


def bucket(n: int, limit: int) -> int:
    """How much of a static cache is read where n tokens are stored: a power of two, at least 128.

    So attention costs at most twice what the stored tokens alone would, for log2(limit / 128) + 1
    shapes to compile.
    """
    return min(limit, max(MIN_BUCKET, 1 << (n - 1).bit_length()))


class StaticCache(Cache):
    """Keys and values in buffers that are allocated once, for steps that are always one shape.

    Every row starts at place 0, and the lengths of the rows are on the device: a compiled decode
    step, or a CUDA graph, finds its data in the same place each time. The host counts along, so it
    knows, without waiting, how much of the buffers is in use: see bucket(). The last place of each
    row is never read: padding on the right of a prompt is written there. ::

        row 0   a b c . . . . . | .     start 3
        row 1   d e f g h . . . | .     start 5
                <-- max_len --->

        cache = StaticCache(12, 2, 1024, 12, 64)
        step = cache.reserve(5, (3, 5))                 prompts of 3 and 5 tokens, 5 columns
        logits, _ = model(prompts, cache=step)          row 0's answer is logits[0, 2]

    Args:
        max_len: tokens that each row has room for.
    """

    def __init__(self, n_layer: int, batch: int, max_len: int, n_kv_head: int, head_dim: int, *,
                 dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu") -> None:  # fmt: skip
        self.max_len = max_len
        shape = (batch, max_len + 1, n_kv_head, head_dim)
        self.k = [torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.v = [torch.empty(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.start = torch.empty(batch, dtype=torch.int32, device=device)
        self.count = torch.empty(batch, dtype=torch.int32, device=device)
        self.reset()

    def reset(self) -> None:
        """Empty the cache where it lies: a CUDA graph that was recorded with it stays right."""
        # Zeros, since 0 * NaN is NaN: a place that is masked must hold finite values all the same.
        torch._foreach_zero_([*self.k, *self.v])
        self.start.zero_()
        self.count.zero_()
        self.lengths = [0] * len(self.start)  # `start`, on the host
        self.counts = (0,) * len(self.start)  # `count`, on the host

    def reserve(self, T: int, counts: Sequence[int] | None = None) -> StaticStep:
        """Begin a step of T columns.

        Args:
            counts: tokens of each row, 0 .. T; what follows in a row is padding. None: T.

        Raises:
            ValueError: a row would pass max_len.
        """
        counts = (T,) * len(self.lengths) if counts is None else tuple(counts)
        after = [n + m for n, m in zip(self.lengths, counts, strict=True)]
        longest = max((n for n, m in zip(after, counts, strict=True) if m), default=1)
        if longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into a cache of {self.max_len}")
        if counts != self.counts:  # for the prompt, after it, and when a row's text has ended
            self.count.copy_(to_device(torch.tensor(counts, dtype=torch.int32), self.count.device))
            self.counts = counts
        length = bucket(longest, self.max_len)
        return StaticStep(self, T, self.start, self.count, length, not any(self.lengths))


@dataclass(frozen=True)
class StaticStep(Step):
    """One step of a StaticCache."""

    cache: StaticCache
    T: int  # columns
    start: Tensor  # (B,) int32, tokens of each row stored before this step
    count: Tensor  # (B,) int32, tokens of each row in this step
    length: int  # places that are read
    first: bool  # nothing is stored yet

    @property
    def kind(self) -> str:
        """The first tokens see only one another: plain attention, which every backend has."""
        return "none" if self.first else "static"

    def positions(self, T: int) -> Tensor:
        """The positions of this step's T columns, (B, T) int64."""
        if T != self.T:
            raise ValueError(f"the cache has reserved {self.T} tokens, and {T} came")
        at = self.start[:, None] + torch.arange(T, device=self.start.device)
        return at.clamp(max=self.cache.max_len - 1)

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        """The buffers as far as they are read; in the first step k and v as they are, and None."""
        k_buffer, v_buffer, trash = self.cache.k[layer], self.cache.v[layer], self.cache.max_len
        i = torch.arange(k.shape[1], device=k.device)
        at = self.start[:, None] + i  # (B, Tq)
        at = torch.where(i < self.count[:, None], at, trash)
        row = torch.arange(k.shape[0], device=k.device)[:, None]
        k_buffer[row, at] = k
        v_buffer[row, at] = v
        if self.first:
            return k, v, None
        view = StaticView(self.start, self.count, self.length)
        return k_buffer[:, : self.length], v_buffer[:, : self.length], view

    def advance(self) -> None:
        c = self.cache
        self.start.add_(self.count)
        c.lengths = [n + m for n, m in zip(c.lengths, c.counts, strict=True)]


# --- paged: pages from a pool ---


class PagedCache(Cache):
    """Keys and values in pages of `page_size` tokens, which lie in any order.

    A table says which page holds which tokens of which sequence (Kwon et al. 2023,
    "PagedAttention", arXiv 2309.06180). Nothing is reserved for tokens that may never come, and
    sequences with a common beginning share its pages. Which page is whose, inference/pages.py
    decides, on the host; here are the tensors, where a page number stands for one page in every
    layer. ::

        page_table, page_size = 4            pages
        row 0   [5 2 0]  start 6             page 0   the null page: padding is written there
        row 1   [5 3 1]  start 9             page 1   row 1's tokens 8 .. 11
                                             page 2   row 0's tokens 4 .. 7
                                             page 3   row 1's tokens 4 .. 7
                                             page 5   tokens 0 .. 3 of both: a shared prompt

        cache = PagedCache(12, 12, 64, n_pages=1025, page_size=4)
        a, b = cache.pool.new(), cache.pool.new()       two sequences
        step = cache.reserve([a, b], [6, 9])            their prompts have 6 and 9 tokens

    Args:
        n_pages: for all sequences together, the null page among them.
        page_size: tokens a page.
    """

    def __init__(self, n_layer: int, n_kv_head: int, head_dim: int, *,
                 n_pages: int, page_size: int, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu") -> None:  # fmt: skip
        self.pool = PagePool(n_pages, page_size)
        shape = (n_layer, n_pages, page_size, n_kv_head, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes_used(self) -> int:
        """Bytes of the pages that some sequence holds; a shared page counts once."""
        return self.nbytes // self.pool.n_pages * self.pool.n_used

    def reserve(self, rows: Sequence[int], counts: Sequence[int]) -> PagedStep:
        """Begin a step: take pages from the pool.

        All lengths are known on the host: one small copy goes to the device, none comes back.

        Args:
            rows: the sequence of each row of the batch, by its number in the pool.
            counts: tokens of each row in this step, 0 .. Tq.

        Raises:
            OutOfPages: nothing was changed.
            ValueError: no such sequence.
        """
        assert len(set(rows)) == len(rows) > 0, "each row is another sequence"
        step = dict(zip(rows, counts, strict=True))
        self.pool.grow(step)
        lengths = [self.pool.length(row) for row in rows]
        pages = [self.pool.pages(row) for row in rows]
        B, width = len(rows), max(1, *map(len, pages))
        numbers = [page for held in pages for page in (*held, *[0] * (width - len(held)))]
        packed = torch.tensor([*numbers, *lengths, *counts], dtype=torch.int32)
        table, start, count = to_device(packed, self.k.device).split([B * width, B, B])
        return PagedStep(self, step, table.view(B, width), start, count, self.pool.page_size)


@dataclass(frozen=True)
class PagedStep(Step):
    """One step of some sequences of a PagedCache."""

    cache: PagedCache
    counts: Mapping[int, int]  # sequence -> tokens in this step
    page_table: Tensor  # (B, max_pages) int32
    start: Tensor  # (B,) int32: where each row's first token of this step stands
    count: Tensor  # (B,) int32
    page_size: int
    kind: ClassVar[str] = "paged"

    def positions(self, T: int) -> Tensor:
        """The positions of this step's T columns, (B, T) int64; 0 for padding on the right."""
        i = torch.arange(T, device=self.start.device)
        return torch.where(i < self.count[:, None], self.start[:, None] + i, 0)

    def append(self, layer: int, k: Tensor, v: Tensor) -> Appended:
        """The pages, (n_pages, page_size, Hkv, D), and a PagedView."""
        k_pages, v_pages, size = self.cache.k[layer], self.cache.v[layer], self.page_size
        i = torch.arange(k.shape[1], device=k.device)
        at = self.start[:, None] + i  # (B, Tq) positions
        column = (at // size).clamp(max=self.page_table.shape[1] - 1)
        page = self.page_table.gather(1, column.long())
        real = i < self.count[:, None]
        slot = torch.where(real, page * size + at % size, at % size).flatten().long()
        for pages, new in ((k_pages, k), (v_pages, v)):
            # view(), since flatten() might copy, and the copy would be written to.
            pages.view(-1, *pages.shape[2:])[slot] = new.detach().flatten(0, 1)
        return k_pages, v_pages, PagedView(self.page_table, self.start, self.count)

    def advance(self) -> None:
        """End the step, after the last layer: its tokens are stored."""
        self.cache.pool.advance(self.counts)
