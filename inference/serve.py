"""The scheduler: many prompts through the rows of a KV cache.

With pages a new prompt replaces a finished text at once; other rows begin and end together (Yu et
al. 2022, "Orca", OSDI, section 3). A prompt waits for all pages that it can need, and one step for
pages to share. A text longer than block_size slides: nothing is cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence, Sized
from contextlib import closing
from heapq import nlargest
from itertools import chain, islice, repeat
from typing import Any, TypeVar

import torch

from core.runtime import to_device
from core.settings import UserError
from inference import graphs, sampling
from inference.cache import Cache, DynamicCache, PagedCache, StaticCache, bucket
from inference.constrain import combined
from inference.pages import PAGE_SIZE, PagePool, pages_for
from inference.sampling import ENDED, INVALID, Draw, Options, Prompt, Row, in_range
from model import GPT

T = TypeVar("T")
Prompts = str | Iterable[Prompt]
PREFILL = 2048  # most tokens of a padded batch, unless one prompt has more


def stream(
    model: GPT, prompts: Prompts, max_new_tokens: int | Iterable[int], **options: Any
) -> Iterator[tuple[int, int]]:
    """Continue prompts, `slots` at a time; yield a prompt's number and its next token, at the end
    ENDED (-1).

    prompts: an iterator's are taken when there is room.
    max_new_tokens, generator: for all prompts, or one for each.
    n_pages: of the pool; None: enough for the longest texts.
    options: as in engine.stream(); kv_cache is "paged" by default.
    Raises ValueError: as engine.stream(), or a prompt needs more pages than the pool has.
    """
    options = {"slots": 8, "kv_cache": "paged", **options}
    scheduler = Scheduler(model, prompts, max_new_tokens, samples=None, **options)
    with closing(scheduler.progress()) as rows:
        for row in rows:
            if row.new:
                yield row.index, row.new[-1]
            if row.ended:
                yield row.index, ENDED


Launched = tuple[Sequence[Row], Callable[[], list[list[int]]]]


class Scheduler:
    def __init__(self, model: GPT, prompts: Prompts, max_new_tokens: int | Iterable[int],
                 *, generator: torch.Generator | Iterable[torch.Generator] | None = None,
                 slots: int | None = None, samples: int | None = None, kv_cache: str = "auto",
                 compile: bool = False, n_pages: int | None = None, page_size: int = PAGE_SIZE,
                 **options: Any) -> None:  # fmt: skip
        """slots: None: a row for each prompt; samples: texts of each, begun when there is room."""
        self.model, self.block_size = model, model.config.block_size
        self.device = model.transformer.wte.weight.device
        self.options = Options(model.config.vocab_size, model.tokenizer, **options)
        self.stats, self.cache = self.options.stats, Cache()
        given: Any = [prompts] if isinstance(prompts, str) else prompts
        n = len(given) if isinstance(given, Sized) else None
        if n == 0:
            raise ValueError("expected at least one prompt of at least one token")
        self.slots = in_range("slots", len(given) if slots is None else slots, 1)
        encoded = (sampling.encode(i, prompt, model) for i, prompt in enumerate(given))
        rooms = _each("max_new_tokens", max_new_tokens, n)
        todo: Any = ((e, in_range("max_new_tokens", room, 0)) for e, room in zip(encoded, rooms))
        constraint, most = self.options.constraint, [self.block_size] * self.slots
        n_texts = None if n is None else n * (samples or 1)
        if n_texts is not None:
            self.slots = min(self.slots, n_texts)
            todo = [*todo]  # errors at once
            most = [len(ids) + room - 1 for (_, ids), room in todo]
            most *= min(samples or 1, self.slots)
            most = nlargest(self.slots, most)  # as Row.most
            if isinstance(constraint, Sequence):
                constraint = [*islice(_each("constraint", constraint, n_texts), n_texts)]
        texts = chain.from_iterable(repeat(each, samples or 1) for each in todo)
        generators = _each("generator", generator, n_texts)
        self.coming: Iterator[Row] = (
            Row(index, prompt, room, one, self.device, self.options)
            for index, ((prompt, room), one) in enumerate(zip(texts, generators))
        )
        if n is not None and samples is None:  # rows of one generator draw in order
            self.coming = iter([*self.coming])
        self.waiting: list[Row] = []
        self.rows: list[Row] = []  # in progress
        page_size = in_range("page_size", page_size, 1)
        self.kv_cache, self.graph = graphs.choose(model, kv_cache, compile, self.slots)
        limit = combined(constraint)
        limit = None if limit is None else limit.to(self.device)
        self.draw = Draw.by(self.options, self.device)._replace(constraint=limit)
        # In the step (docs/GENERATE.md) a processor's numbers are the graph's: one a call.
        self.of_call = object() if self.options.in_step else None
        if n_pages is not None and self.kv_cache != "paged":
            raise ValueError(f"n_pages needs kv_cache=paged, got {self.kv_cache}")
        if self.kv_cache == "paged":
            enough = 1 + max(1, sum(pages_for(min(m, self.block_size), page_size) for m in most))
            self.cache = self._pages(enough if n_pages is None else n_pages, page_size)
        self.slides = most[0] > self.block_size
        # On the device: texts and constraints' states by slot; slots and lengths (B,) of `batch`.
        self.texts = torch.zeros(self.slots, 1, dtype=torch.int64, device=self.device)
        self.states = self.texts.expand(-1, 2).clone()
        self.batch: list[Row] = []  # of the last step
        self.slot = self.length = self.texts[:0, 0]
        self.longest = 0  # of self.length
        self.decoding = False  # the same rows go on

    def _pages(self, n_pages: int, page_size: int) -> PagedCache:
        config = self.model.config
        sizes, prefill = {}, pages_for(max(PREFILL, self.block_size), page_size)
        for window in config.windows:
            kept = self.slots * pages_for(self.block_size, page_size, window)
            sizes[window] = n_pages if window is None else min(n_pages, 1 + kept + prefill)
        self.stats.all_pages = sum(n - 1 for n in sizes.values())
        return PagedCache(
            config.windows, config.kv_heads, config.head_dim, n_pages=sizes, page_size=page_size,
            dtype=getattr(torch, self.model.phase().dtype), device=self.device,
        )  # fmt: skip

    @torch.no_grad()
    def progress(self) -> Generator[Row, None, None]:
        """Yield each row when it is taken, in order, and after each of its tokens."""
        ahead = 1 if self.device.type == "cuda" else 0  # steps launched before one is read
        launched: deque[Launched] = deque()
        try:
            while True:
                new = [*islice(self.coming, self.slots - len(self.rows) - len(self.waiting))]
                self.waiting += [row for row in new if not row.ended]
                yield from new
                if not (new or self.waiting or self.rows or launched):
                    return
                self._admit()
                if self.rows:
                    launched.append(self._step())
                while len(launched) > (ahead if self.rows or self.waiting else 0):
                    yield from self._read(*launched.popleft())
        finally:
            self._leave(interrupted=True)

    def _read(self, rows: Sequence[Row], tokens: Callable[[], list[list[int]]]) -> list[Row]:
        # Others ended after the launch.
        drawn = [(row, values) for row, values in zip(rows, tokens()) if not row.ended]
        for row, (token, *over) in drawn:
            if token == INVALID:
                why = "the logits of the model or of a logits_processor contain NaN, or all are"
                raise UserError(f"no token can follow text {row.index}: {why} -infinity")
            row.new.append(token)
            row.ended = any(over) or len(row.new) == row.room or row.stops()
        self._leave()
        return [row for row, _ in drawn]

    def _leave(self, interrupted: bool = False) -> None:
        done = [row for row in self.rows if row.done or interrupted]
        if self.cache.pool is not None:
            for row in done:
                self.rows.remove(row)
                self.cache.pool.free(row.slot)
        elif len(done) == len(self.rows):
            self.rows = []
            self._drop_cache()

    def _drop_cache(self) -> None:
        graphs.give_back(self.model, self.cache)
        self.cache = Cache()
        for row in self.rows:
            row.stored = 0

    # --- admission ---

    def _admit(self) -> None:
        coming = [*self.waiting]
        if self.cache.pool is not None:
            self._admit_to_pages(coming, self.cache.pool)
        elif coming and not self.rows:
            self.cache = self._contiguous(coming)
            for slot, row in enumerate(coming):
                self._begin(row, slot)
        if self.waiting and not self.rows:
            row, n = self.waiting[0], self.stats.all_pages
            needs = f"prompt {row.index} ({len(row.prompt)} tokens, {row.room} new ones) needs"
            raise UserError(f"{needs} more than the {n} pages of the pool: raise n_pages")

    def _contiguous(self, rows: Sequence[Row]) -> Cache:
        config, T = self.model.config, max(row.n for row in rows)
        longest = T + max(row.room for row in rows)
        if self.kv_cache == "none" or longest == T + 1 or self.block_size <= T:
            return Cache()
        if self.kv_cache == "dynamic":
            pad = [T - row.n for row in rows]
            return DynamicCache(config.windows, self.block_size, pad, self.device)
        # Rounded up: other lengths reuse the graphs.
        max_len = bucket(longest, self.block_size)
        return graphs.static_cache(self.model, len(rows), max_len, self.graph)

    def _admit_to_pages(self, coming: Sequence[Row], pool: PagePool) -> None:
        for row in coming:
            shared = row.prompt if row.most <= self.block_size else []
            slot = row.slot = pool.new(shared)
            if not self._fit([*self.rows, row], pool):
                pool.free(slot)
                break
            row.stored = pool.length(slot)
            n = row.stored + pool.page_size
            new = (other.prompt for other in self.rows if other.n == len(other.prompt))
            if n < len(shared) and any(other[:n] == shared[:n] for other in new):
                pool.free(slot)  # the other computes a page to share
                continue
            self._begin(row, slot)
            self.stats.shared_pages += row.stored // pool.page_size

    def _fit(self, rows: Sequence[Row], pool: PagePool) -> bool:
        for window, n in pool.n_pages.items():
            room = n - 1
            if window is None:  # shared pages are held to the end
                room = pool.n_free() + sum(len(pool.pages(row.slot)) for row in rows)
            for row in rows:
                stored = min(row.most, self.block_size)
                slides = row.most > self.block_size  # read again in each step
                once = stored if slides else row.n if row.n == len(row.prompt) else 1
                kept = pages_for(stored, pool.page_size, window)
                room -= max(kept, pages_for(once, pool.page_size))
            if room < 0:
                return False
        return True

    def _begin(self, row: Row, slot: int) -> None:
        self.waiting.remove(row)
        self.rows.append(row)
        row.slot = slot
        self._widen(row.n + min(row.room, self.block_size))  # one width while it has a cache
        # Elsewhere the first token: harmless to sets of tokens.
        self.texts[slot] = row.prompt[0]
        self.texts[slot, : row.n] = to_device(row.prompt, self.device)
        if self.draw.constraint is not None:
            self.states[slot] = self.draw.constraint.start(row.index, row.room)

    def _widen(self, n: int) -> None:
        if (more := bucket(n) - self.texts.shape[1]) > 0:
            self.texts = torch.cat([self.texts, self.texts[:, :1].expand(-1, more)], dim=1)

    # --- a step ---

    def _step(self) -> Launched:
        if self.cache.pool is None and any(r.n > self.block_size for r in self.rows if not r.done):
            self._drop_cache()
        groups = self._groups()
        rows = [row for group in groups for row in group]
        self.decoding = rows == self.batch
        if self.decoding:
            self.length = self.length + 1
            self.longest += 1
        else:
            self.batch = rows
            slots_and_lengths = [r.slot for r in rows], [r.n for r in rows]
            self.slot, self.length = to_device(slots_and_lengths, self.device)
            self.longest = max(row.n for row in rows)
        self._widen(self.longest + 1)
        u = [next(row.random) for row in rows if row.random is not None]
        draw, processor = self.draw, self.options.logits_processor
        if u:
            draw = draw._replace(u=torch.cat(u))
        if draw.constraint is not None:
            draw = draw._replace(state=self.states[self.slot])
        if self.options.in_step:
            draw = draw._replace(processor=processor, tokens=self.texts[self.slot],
                                 lengths=self.length)  # fmt: skip
        if len(groups) == 1 and processor is draw.processor:
            token, after, over = self._forward(sampling.next_token, rows, draw)
        else:
            logits = torch.cat([self._forward(sampling.next_logits, group) for group in groups])
            if processor is not None and not self.options.in_step:
                lengths, read = [row.n for row in rows], self.texts[self.slot]
                logits = sampling.process_rows(processor, read, logits, lengths)
            token, after, over = self._run(sampling.sample_step, draw, logits)
        self.texts[self.slot, self.length] = token.clamp(min=0)  # INVALID is for the host
        if after is not None:
            self.states[self.slot] = after
        for row in rows:
            row.n += not row.done
        self.stats.cache_bytes = max(self.stats.cache_bytes, self.cache.nbytes)
        self._leave()
        return rows, sampling.to_host(token, over)

    def _groups(self) -> list[list[Row]]:
        """Batches in which no row is padded to twice its length."""
        if self.cache.pool is None:
            return [[*self.rows]]
        groups: list[list[Row]] = []
        longest = 0
        for row in sorted(self.rows, key=self._reads, reverse=True):
            n = self._reads(row)
            if groups and 2 * n > longest and longest * (len(groups[-1]) + 1) <= PREFILL:
                groups[-1].append(row)
            else:
                groups.append([row])
                longest = n
        return groups

    def _reads(self, row: Row) -> int:
        if row.n > self.block_size:
            return self.block_size
        return row.n - row.stored

    def _forward(self, function: Callable[..., T], rows: Sequence[Row], *draw: Draw) -> T:
        """function(*draw, ...), the rest as next_logits()."""
        pool, first = self.cache.pool, self.batch.index(rows[0])  # rows: a run of the batch
        slot, end = (t[first : first + len(rows), None] for t in (self.slot, self.length))
        counts = [0 if row.done else self._reads(row) for row in rows]
        T, last, at = max(counts), None, end - max(counts)  # (B, 1)
        if 1 < T > min(counts) and not isinstance(self.cache, DynamicCache):  # padded on the right
            n = to_device(counts, self.device)[:, None]
            last, at = (n - 1).clamp(min=0), end - n
        if T > 1:
            at = (at + torch.arange(T, device=self.device)).clamp(0, self.texts.shape[1] - 1)
        idx = self.texts[slot, at]
        for row in rows:
            if pool is not None and row.n > self.block_size:
                pool.free(row.slot)
                row.slot = pool.new()  # the same number
        step = self.cache.reserve(counts, [row.slot for row in rows])
        if pool is not None:
            self.stats.pages = max(self.stats.pages, sum(map(pool.n_used, pool.n_pages)))
        made = self._run(function, *draw, self.model, idx, last, step, self.options.vocab_size)
        if step is not None:
            step.advance()
            for row, new in zip(rows, counts):
                row.stored += new
        return made

    def _run(self, function: Callable[..., T], *args: object) -> T:
        kind = self.graph if self.decoding and isinstance(self.cache, StaticCache) else None
        return graphs.run(self.model, kind, function, args, self.of_call)


def _each(name: str, given: Any, n: int | None) -> Iterator[Any]:
    """One value for each prompt; n: of them, None: unknown."""
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        yield from repeat(given)
    if n is not None and isinstance(given, Sized) and len(given) != n:
        raise ValueError(f"{name}: expected one, or {n} for {n} prompts, got {len(given)}")
    yield from given
    raise ValueError(f"{name}: fewer values than prompts")
