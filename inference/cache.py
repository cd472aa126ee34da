"""KV caches for inference: what attend() is given as `cache`, one view for each layer.

Paged: keys and values lie in pages of `page_size` tokens, in any order, and a table says which page
holds which tokens of which sequence (Kwon et al. 2023, "PagedAttention", arXiv 2309.06180). Nothing
is reserved for tokens that may never come, and sequences with a common beginning share its pages.
Which page is whose, inference/pages.py decides, on the host; here are the tensors.

    cache = PagedCache(12, 12, 64, n_pages=1025)
    a, b = cache.pool.new(), cache.pool.new()        two sequences
    step = cache.reserve([a, b], [6, 9])             their prompts have 6 and 9 tokens
    out = backend.attend(q, k, v, spec, cache=step.view(layer))      once for each layer
    step.advance()                                   the tokens are stored now
    step = cache.reserve([a, b], [1, 1])             decoding: one token each
    ...
    cache.pool.free(a)                               b goes on

    page_table, page_size = 4            k_pages
    row 0   [5 2 0]  start 6             page 0   the null page: padding is written there
    row 1   [5 3 1]  start 9             page 1   row 1's tokens 8 .. 11
                                         page 2   row 0's tokens 4 .. 7
                                         page 3   row 1's tokens 4 .. 7
                                         page 5   tokens 0 .. 3 of both: a shared prompt
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attention.spec import visible
from inference.pages import PagePool


@dataclass(frozen=True)
class PagedView:
    """One layer's pages, and what this call's tokens are. All tensors are on one device.

    Token i of row b in this call stands at position ``start[b] + i`` of its sequence and sees the
    positions up to its own. Tokens from ``count[b]`` on are padding on the right: they are written
    to the null page, and their outputs are finite and mean nothing.
    """

    k_pages: Tensor  # (n_pages, page_size, Hkv, D)
    v_pages: Tensor  # (n_pages, page_size, Hkv, D)
    page_table: Tensor  # (B, max_pages) int32, 0 (the null page) where a row has no page
    start: Tensor  # (B,) int32, tokens of each row stored before this call
    count: Tensor  # (B,) int32, tokens of each row in this call, 0 .. Tq

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write this call's k and v, (B, Tq, Hkv, D), to their places. Never waits for the device.

        The pages must have been taken from the pool before (PagedCache.reserve).
        """
        Tq, size = k.shape[1], self.page_size
        i = torch.arange(Tq, device=k.device)
        at = self.start[:, None] + i  # (B, Tq) positions
        column = (at // size).clamp(max=self.page_table.shape[1] - 1)
        page = self.page_table.gather(1, column.long())
        real = i < self.count[:, None]
        slot = torch.where(real, page * size + at % size, at % size).flatten().long()
        for pages, new in ((self.k_pages, k), (self.v_pages, v)):
            # view(), since flatten() might copy, and the copy would be written to.
            pages.view(-1, *pages.shape[2:])[slot] = new.detach().flatten(0, 1)


class PagedCache:
    """Pages of keys and values for all layers, and the pool that says whose they are.

    A page number stands for one page in every layer. `k` and `v` are (n_layer, n_pages, page_size,
    Hkv, D), zeros at first.

    Args:
        n_pages: for all sequences together, the null page among them.
        page_size: tokens a page.
    """

    def __init__(self, n_layer: int, n_kv_head: int, head_dim: int, *, n_pages: int,
                 page_size: int = 16, dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu") -> None:  # fmt: skip
        self.pool = PagePool(n_pages, page_size)
        shape = (n_layer, n_pages, page_size, n_kv_head, head_dim)
        self.k = torch.zeros(shape, dtype=dtype, device=device)
        self.v = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages of all layers, keys and values."""
        return self.k.nbytes + self.v.nbytes

    @property
    def nbytes_used(self) -> int:
        """Bytes of the pages that some sequence holds; a shared page counts once."""
        return self.nbytes // self.pool.n_pages * self.pool.n_used

    def reserve(self, rows: Sequence[int], counts: Sequence[int]) -> PagedStep:
        """Begin a step: take pages from the pool, copy those that are shared and written to.

        All lengths are known on the host: one small copy goes to the device, none comes back.

        Args:
            rows: the sequence of each row of the batch, by its number in the pool.
            counts: tokens of each row in this step, 0 .. Tq.

        Raises:
            OutOfPages: nothing was changed.
            ValueError: no such sequence, or one that has two rows.
        """
        if len(rows) != len(counts) or len(set(rows)) != len(rows) or not rows:
            raise ValueError(
                f"each row is one sequence and has one count, got rows {list(rows)} and counts "
                f"{list(counts)}"
            )
        pool, step = self.pool, dict(zip(rows, counts, strict=True))
        copies = pool.grow(step)
        start = [pool.length(row) for row in rows]
        pages = [pool.pages(row) for row in rows]
        B, width = len(rows), max(1, *map(len, pages))
        numbers = [page for held in pages for page in (*held, *[0] * (width - len(held)))]
        numbers += [*start, *counts, *(page for pair in copies for page in pair)]
        packed = torch.tensor(numbers, dtype=torch.int32)
        if self.k.is_cuda:
            packed = packed.pin_memory()
        packed = packed.to(self.k.device, non_blocking=True)
        table, starts, new, pairs = packed.split([B * width, B, B, 2 * len(copies)])
        if copies:
            source, destination = pairs.view(-1, 2).long().unbind(1)
            for t in (self.k, self.v):
                t[:, destination] = t[:, source]
        return PagedStep(self, step, start, table.view(B, width), starts, new)


@dataclass(frozen=True)
class PagedStep:
    """One step of a batch of sequences: what the model is given as its cache."""

    cache: PagedCache
    counts: Mapping[int, int]  # sequence -> tokens in this step
    lengths: Sequence[int]  # `start`, on the host
    page_table: Tensor  # (B, max_pages) int32
    start: Tensor  # (B,) int32: where each row's first token of this step stands
    count: Tensor  # (B,) int32
    kind: ClassVar[str] = "paged"
    segments: ClassVar[None] = None

    @property
    def page_size(self) -> int:
        return self.cache.pool.page_size

    def positions(self, T: int) -> Tensor:
        """The positions of this step's T columns, (B, T) int64; 0 for padding on the right."""
        i = torch.arange(T, device=self.start.device)
        return torch.where(i < self.count[:, None], self.start[:, None] + i, 0)

    def view(self, layer: int) -> PagedView:
        """What attend() is given in that layer."""
        k, v = self.cache.k[layer], self.cache.v[layer]
        return PagedView(k, v, self.page_table, self.start, self.count)

    def advance(self) -> None:
        """End the step, after the last layer: its tokens are stored.

        Raises:
            ValueError: it has ended already, or a sequence went on in another step.
        """
        pool = self.cache.pool
        if [pool.length(row) for row in self.counts] != list(self.lengths):
            raise ValueError("this step is over: advance() is called once a step")
        pool.advance(self.counts)


# --- dynamic: buffers that grow ---


class DynamicCache:
    """Keys and values of all tokens so far, in buffers that double when they are full.

    To a kernel they look like plain k and v with Tq < Tk, so every backend can read them. Rows end
    together: prompts of different lengths are padded on the left, and the padding is a segment of
    its own, which nothing else sees. With a window the buffers keep what a later token can see, the
    last window - 1 tokens, and never more than twice the window. ::

        pad = (2, 0)     tokens         segments
        row 0            . . a b c      0 0 1 1 1
        row 1            d e f g h      1 1 1 1 1

        cache = DynamicCache(12, max_len=1024)
        step = cache.reserve(64)
        logits, _ = model(prompts, cache=step)
        step.advance()
        step = cache.reserve(1)                 decoding
        ...

    Args:
        max_len: positions that the model has, block_size.
        window: keys that a query sees, itself included; None: all.
        pad: padding on the left of each row; None: no row has any.
    """

    def __init__(self, n_layer: int, *, max_len: int, window: int | None = None,
                 pad: Sequence[int] | None = None,
                 device: str | torch.device = "cpu") -> None:  # fmt: skip
        self.max_len, self.window, self.device = max_len, window, device
        self.k: list[Tensor | None] = [None] * n_layer  # (B, capacity, Hkv, D), on first use
        self.v: list[Tensor | None] = [None] * n_layer
        self.pads = tuple(pad) if pad is not None and any(pad) else ()
        self.pad = torch.tensor(self.pads, device=device)[:, None] if self.pads else None  # (B, 1)
        self.least_pad = min(self.pads, default=0)  # of the rows that go on: see end()
        self.ended: set[int] = set()
        self.stored = 0  # places so far, padding included
        self.kept = 0  # of these, the last so many are in the buffers
        self.capacity = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all layers, keys and values."""
        return sum(t.nbytes for t in (*self.k, *self.v) if t is not None)

    def end(self, row: int) -> None:
        """That row's text has ended: it stays in the batch, and may run past max_len."""
        self.ended.add(row)
        pads = [pad for b, pad in enumerate(self.pads) if b not in self.ended]
        self.least_pad = min(pads, default=self.stored)

    def reserve(self, T: int) -> DynamicStep:
        """Begin a step of T tokens in each row: make room for them.

        Raises:
            ValueError: the longest row, of those that have not ended, would pass max_len.
        """
        longest = self.stored + T - self.least_pad
        if longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into a cache of {self.max_len}")
        if self.window is None:
            self._make_room(self.kept + T)
        elif T == 1:
            if self.kept == self.capacity >= 2 * self.window:
                self._move_to_front(self.window - 1)
            self._make_room(self.kept + 1, 2 * self.window)
        else:
            self._make_room(min(self.window - 1, self.kept + T), 2 * self.window)
        seen = self.kept if self.window is None else min(self.kept, self.window - 1)
        at = torch.arange(self.stored - seen, self.stored + T, device=self.device)  # (Tk,)
        if self.pad is None:
            return DynamicStep(self, T, at[seen:], None)
        pos = (at[seen:] - self.pad).clamp_(0, self.max_len - 1)  # (B, T)
        return DynamicStep(self, T, pos, (at >= self.pad).int())

    def _make_room(self, n: int, most: int | None = None) -> None:
        """Buffers of at least n places: doubled, so that each token is copied once on average."""
        if n <= self.capacity:
            return
        most = self.max_len if most is None else most
        self.capacity = max(n, min(1 << n.bit_length(), most))
        for buffers in (self.k, self.v):
            for layer, old in enumerate(buffers):
                if old is not None:
                    new = old.new_empty(old.shape[0], self.capacity, *old.shape[2:])
                    new[:, : self.kept] = old[:, : self.kept]
                    buffers[layer] = new

    def _move_to_front(self, n: int) -> None:
        for t in (*self.k, *self.v):
            if t is not None:
                t[:, :n] = t[:, self.kept - n : self.kept]
        self.kept = n


@dataclass(frozen=True)
class DynamicStep:
    """One step of a DynamicCache: what the model is given as its cache."""

    cache: DynamicCache
    T: int  # tokens of each row
    pos: Tensor  # (T,) or, with padding, (B, T) int64
    segments: Tensor | None  # (B, Tk) int32, 0 for padding and 1 for text; None: no padding
    kind: ClassVar[str] = "dynamic"
    page_size: ClassVar[int | None] = None

    def positions(self, T: int) -> Tensor:
        """The positions of this step's T tokens, (T,) or (B, T) int64; 0 for padding."""
        if self.T != T:
            raise ValueError(f"the cache has reserved {self.T} tokens, and {T} came")
        return self.pos

    def view(self, layer: int) -> DynamicView:
        """What CausalSelfAttention is given in that layer."""
        return DynamicView(self.cache, layer)

    def advance(self) -> None:
        """End the step, after the last layer: its tokens are stored."""
        c = self.cache
        c.stored += self.T
        c.kept += self.T
        if c.window is not None and self.T > 1:
            c.kept = min(c.kept, c.window - 1)


@dataclass(frozen=True)
class DynamicView:
    """One layer's buffers."""

    cache: DynamicCache
    layer: int

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, None]:
        """Store this call's k and v, (B, Tq, Hkv, D).

        Returns:
            All keys and all values that its queries may see, (B, Tk, Hkv, D): views of the buffers.
        """
        return self._append(self.cache.k, k), self._append(self.cache.v, v), None

    def _append(self, buffers: list[Tensor | None], new: Tensor) -> Tensor:
        c, T, buffer = self.cache, new.shape[1], buffers[self.layer]
        if buffer is None:
            buffer = new.new_empty(new.shape[0], c.capacity, *new.shape[2:])
            buffers[self.layer] = buffer
        if c.window is None or T == 1:
            end = c.kept + T
            buffer[:, c.kept : end] = new
            return buffer[:, 0 if c.window is None else max(0, end - c.window) : end]
        before = min(c.kept, c.window - 1)
        seen = torch.cat([buffer[:, c.kept - before : c.kept], new], dim=1) if before else new
        stays = min(c.window - 1, c.kept + T)
        buffer[:, :stays] = seen[:, seen.shape[1] - stays :]
        return seen


# --- static: allocated once ---

LEAST_BUCKET = 128


def bucket(n: int, most: int) -> int:
    """How much of a static cache is read where n places are used: a power of two, 128 at the least.

    So attention costs at most twice what the stored tokens alone would, and a decode step is
    compiled for log2(max_len / 128) + 1 shapes, not for each length.
    """
    return min(most, max(LEAST_BUCKET, 1 << (n - 1).bit_length()))


class StaticCache:
    """Keys and values in buffers that are allocated once, for steps that are always one shape.

    Every row starts at place 0, and the lengths of the rows are on the device: a compiled decode
    step, or a CUDA graph, finds its data in the same place each time. The host counts along, and so
    knows, without waiting, how much of the buffers is in use: see bucket(). The last place of each
    row is never read: padding on the right of a prompt is written there. ::

        row 0   a b c . . . . . | .     start 3
        row 1   d e f g h . . . | .     start 5
                <-- max_len --->

        cache = StaticCache(12, 2, 1024, 12, 64)
        step = cache.reserve(5, (3, 5))                 prompts of 3 and 5 tokens, 5 columns
        logits, _ = model(prompts, cache=step)          row 0's answer is logits[0, 2]
        step.advance()
        step = cache.reserve(1)                         decoding: one token each

    Args:
        max_len: places in each row.
    """

    def __init__(self, n_layer: int, batch: int, max_len: int, n_kv_head: int, head_dim: int, *,
                 dtype: torch.dtype = torch.float32,
                 device: str | torch.device = "cpu") -> None:  # fmt: skip
        self.max_len = max_len
        shape = (batch, max_len + 1, n_kv_head, head_dim)
        # Zeros, since 0 * NaN is NaN: a place that is masked must hold finite values all the same.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(n_layer)]
        self.start = torch.zeros(batch, dtype=torch.int32, device=device)
        self.count = torch.zeros(batch, dtype=torch.int32, device=device)
        self.lengths = [0] * batch  # `start`, on the host
        self.counts = (0,) * batch  # `count`, on the host
        self.ended: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers of all layers, keys and values."""
        return sum(t.nbytes for t in (*self.k, *self.v))

    def end(self, row: int) -> None:
        """That row's text has ended: it stays in the batch, and may run past max_len."""
        self.ended.add(row)

    def reserve(self, T: int, counts: Sequence[int] | None = None) -> StaticStep:
        """Begin a step of T columns.

        Args:
            counts: tokens of each row, 0 .. T; what follows in a row is padding. None: T.

        Raises:
            ValueError: a row that has not ended would pass max_len.
        """
        counts = (T,) * len(self.lengths) if counts is None else tuple(counts)
        going = [n + m for b, (n, m) in enumerate(zip(self.lengths, counts, strict=True))
                 if b not in self.ended]  # fmt: skip
        longest = max(going, default=1)
        if longest > self.max_len:
            raise ValueError(f"{longest} tokens do not fit into a cache of {self.max_len}")
        if counts != self.counts:  # once before the prompt, and once after it
            self.count.copy_(torch.tensor(counts, dtype=torch.int32))
            self.counts = counts
        first = not any(self.lengths)
        return StaticStep(
            self, T, self.start, self.count, bucket(max(longest, T), self.max_len), first
        )


@dataclass(frozen=True)
class StaticStep:
    """One step of a StaticCache: what the model is given as its cache."""

    cache: StaticCache
    T: int
    start: Tensor  # (B,) int32, tokens of each row stored before this step
    count: Tensor  # (B,) int32, tokens of each row in this step
    length: int  # places that are read
    first: bool  # nothing is stored yet
    segments: ClassVar[None] = None
    page_size: ClassVar[int | None] = None

    @property
    def kind(self) -> str:
        """The first tokens see only one another: plain attention, which every backend has."""
        return "none" if self.first else "static"

    def positions(self, T: int) -> Tensor:
        """The positions of this step's T columns, (B, T) int64."""
        if self.T != T:
            raise ValueError(f"the cache has reserved {self.T} tokens, and {T} came")
        at = self.start[:, None] + torch.arange(T, device=self.start.device)
        return at.clamp(max=self.cache.max_len - 1)

    def view(self, layer: int) -> StaticView:
        """What attend() is given in that layer."""
        k, v = self.cache.k[layer], self.cache.v[layer]
        return StaticView(k, v, self.start, self.count, self.length, self.first)

    def advance(self) -> None:
        """End the step, after the last layer: its tokens are stored."""
        c = self.cache
        self.start.add_(self.count)
        c.lengths = [n + m for n, m in zip(c.lengths, c.counts, strict=True)]


@dataclass(frozen=True)
class StaticView:
    """One layer's buffers, and what this call's tokens are. All tensors are on one device.

    Token i of row b in this call stands at place ``start[b] + i`` and sees the places up to its
    own. Tokens from ``count[b]`` on are padding on the right: their outputs mean nothing.
    """

    k: Tensor  # (B, max_len + 1, Hkv, D)
    v: Tensor  # (B, max_len + 1, Hkv, D)
    start: Tensor  # (B,) int32
    count: Tensor  # (B,) int32
    length: int  # places that are read
    first: bool = False

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store this call's k and v, (B, Tq, Hkv, D). Never waits for the device.

        Returns:
            The buffers as far as they are read, (B, length, Hkv, D); in the first call k and v.
        """
        i = torch.arange(k.shape[1], device=k.device)
        at = self.start[:, None] + i  # (B, Tq)
        trash = self.k.shape[1] - 1
        at = torch.where(i < self.count[:, None], at, trash).clamp(max=trash)
        row = torch.arange(k.shape[0], device=k.device)[:, None]
        self.k[row, at] = k
        self.v[row, at] = v
        if self.first:
            return k, v
        return self.k[:, : self.length], self.v[:, : self.length]

    def seen(self, Tq: int, window: int | None) -> Tensor:
        """Which places each query of this call sees, bool (B, 1, Tq, length)."""
        i = torch.arange(Tq, device=self.start.device)
        # Padding may stand beyond the places that are read: it sees as the last of them does.
        at = (self.start[:, None] + i).clamp(max=self.length - 1)
        j = torch.arange(self.length, device=self.start.device)
        return visible(at[:, None, :, None], j, 0, window)
