"""Continuous batching: many prompts through a few rows of a paged KV cache, with shared pages.

A new prompt replaces a finished text at once; engine.py waits for the end of the batch
(Yu et al. 2022, "Orca", OSDI, section 3):

    step     1    2    3    4    5    6    7          step     1    2    3    4    5    6    7
    row 0    A    a    a    .    .    C    c          row 0    A    a    a    C    c    c    c
    row 1    B    b    b    b    b    D    d          row 1    B    b    b    b    b    D    d
             a batch, then the next                            capitals: prefill

A step runs the new prompts in groups of similar length, and one token of every other row. Each text
equals generate()'s for its prompt alone, in float32; in other dtypes rounding depends on the batch.

**Admission.** A prompt waits, and all behind it, until the pool has pages for its longest text and
for those in progress. So no text stops for lack of pages. A prompt that can never fit is an error.

**Sharing.** A prompt takes the full pages of a prefix in the pool. If another new prompt computes
them in this step, it waits for the next one. Texts that may slide share nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError
from inference.cache import PagedCache
from inference.decode import Decoder, Launched, Row, next_logits, sample_step, to_host
from inference.pages import pages_for
from inference.sampling import ENDED, Options, Prompt, Uniform, check_prompt, in_range

if TYPE_CHECKING:
    from model import GPT

T = TypeVar("T")
PREFILL = 2048  # most tokens of a prefill, padding included, unless one prompt has more


@torch.no_grad()
def stream(
    model: GPT, prompts: Iterable[Prompt], max_new_tokens: int | Iterable[int], **options: Any
) -> Iterator[tuple[int, int]]:
    """Continue many prompts, and yield each token as it comes.

    Args:
        prompts: (T,) token ids each; taken when there is room for one.
        max_new_tokens: for all prompts, or one for each; likewise generator.
        slots: most texts in progress.
        n_pages: size of the pool; page 0 is not used; None: enough for `slots` full contexts.
            Layers with a window have pools of their own, not larger, with room for the windows of
            `slots` texts and a prefill.
        options: as sampling.Options.

    Yields the number of a prompt, and its next token; ENDED (-1) when its text has ended.
    Raises ValueError: as engine.stream(), or a prompt needs more pages than the pool has.
    """
    with closing(_Server(model, prompts, max_new_tokens, **options).tokens()) as tokens:
        for row, token in tokens:
            yield row.index, token


def batch(
    model: GPT, prompts: Sequence[Tensor], max_new_tokens: int, **options: Any
) -> Iterator[Tensor]:
    """engine.stream() with kv_cache="paged"."""
    B, size = len(prompts), options["page_size"]
    options["slots"] = B
    options["n_pages"] = enough_pages(model, map(len, prompts), max_new_tokens, B, size)
    # A prompt that waited for a shared prefix is a token late.
    ready: list[deque[int]] = [deque() for _ in prompts]
    for index, token in stream(model, prompts, max_new_tokens, **options):
        ready[index].append(token)
        while all(ready):
            tokens = [row[0] if row[0] == ENDED else row.popleft() for row in ready]
            if set(tokens) == {ENDED}:
                return
            yield torch.tensor(tokens)


def enough_pages(
    model: GPT, lengths: Iterable[int], max_new_tokens: int, slots: int, page_size: int = 16
) -> int:
    """The least n_pages with which prompts of these lengths never wait for layers without a
    window."""
    longest = (min(T + max(0, max_new_tokens - 1), model.config.block_size) for T in lengths)
    return 1 + sum(pages_for(n, page_size) for n in sorted(longest)[-slots:])


@dataclass(eq=False)
class _Row(Row):
    prompt: list[int] = field(default_factory=list)
    slides: bool = False  # may exceed block_size
    stored: int = 0  # the most tokens that are in the cache
    names: list[bytes] = field(default_factory=list)  # of the prompt's full pages
    random: Uniform | None = None
    place: int = -1  # in _Server.texts, once admitted
    seq: int = -1  # in the pool, once admitted
    launched: int = 0  # tokens drawn on the device

    @property
    def n(self) -> int:
        """Tokens of the text, including launched ones."""
        return len(self.prompt) + self.launched


class _Server(Decoder[_Row]):
    """One call of stream()."""

    def __init__(
        self,
        model: GPT,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Iterable[int],
        *,
        generator: torch.Generator | Iterable[torch.Generator] | None = None,
        slots: int = 8,
        n_pages: int | None = None,
        page_size: int = 16,
        **options: Any,
    ) -> None:
        super().__init__(model, Options(**options))
        self.slots, page_size = in_range("slots", slots, 1), in_range("page_size", page_size, 1)
        if n_pages is None:
            n_pages = enough_pages(model, [self.block_size] * slots, 0, slots, page_size)
        config = model.config
        sizes = {window: n_pages for window in config.windows}
        for window in sizes:
            if window is not None:
                kept = slots * pages_for(self.block_size, page_size, window)
                prefill = pages_for(max(PREFILL, self.block_size), page_size)
                sizes[window] = min(n_pages, 1 + kept + prefill)
        self.cache = PagedCache(
            config.n_layer,
            config.kv_heads,
            config.head_dim,
            n_pages=sizes,
            windows=config.windows,
            page_size=page_size,
            dtype=getattr(torch, model.phase().dtype),
            device=self.device,
        )
        self.pool, self.stats = self.cache.pool, self.options.stats
        self.stats.cache_bytes = self.cache.nbytes
        self.stats.all_pages = sum(n - 1 for n in sizes.values())
        self.coming = self.new_rows(prompts, max_new_tokens, generator)
        self.waiting: list[_Row] = []  # until there are pages for them
        self.rows: list[_Row] = []  # in progress
        self.places = list(range(slots))  # free rows of `texts`
        self.texts = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self.states = torch.zeros(slots, 2, dtype=torch.int64, device=self.device)

    def tokens(self) -> Generator[tuple[_Row, int], None, None]:
        try:
            for got in self.steps():
                self.leave([row for row in got if row.ended])
                for row in got:
                    if row.new:
                        yield row, row.new[-1]
                    if row.ended:
                        yield row, ENDED
        finally:
            self.leave(self.rows)

    def launch(self) -> Iterator[Launched[_Row]]:
        while True:
            if empty := self.pull():
                yield empty, None
            self.admit()
            if self.rows:
                yield self.step()
            elif not empty:
                assert not self.waiting, "with all pages free the first prompt fits"
                return

    def leave(self, rows: Sequence[_Row]) -> None:
        for row in [row for row in rows if row in self.rows]:
            self.rows.remove(row)
            self.places.append(row.place)
            self.pool.free(row.seq)

    def pull(self) -> list[_Row]:
        """Take a prompt for each free slot; returns those without room for a token."""
        empty: list[_Row] = []
        free = self.slots - len(self.rows) - len(self.waiting)
        for row in islice(self.coming, free):
            (self.waiting if row.room else empty).append(row)
        return empty

    def new_rows(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Iterable[int],
        generator: torch.Generator | Iterable[torch.Generator] | None,
    ) -> Iterator[_Row]:
        each = _each("max_new_tokens", max_new_tokens), _each("generator", generator)
        for index, (prompt, new, random) in enumerate(zip(prompts, *each)):
            check_prompt(index, prompt, self.model.config.vocab_size)
            row = _Row(index, in_range("max_new_tokens", new, 0))
            row.prompt = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
            stored = len(prompt) + row.room - 1  # the last token is never read
            row.slides = stored > self.block_size
            row.stored = min(stored, self.block_size)
            row.names = [] if row.slides else self.pool.names(row.prompt)
            for window, n in self.pool.n_pages.items():
                if (most := self.most_pages(row, window)) > n - 1:
                    raise UserError(
                        f"prompt {index} ({len(prompt)} tokens, {row.room} new ones) needs "
                        f"{most} pages, the pool has {n - 1}: raise n_pages"
                    )
            row.random = self.uniform(1, random)
            yield row

    def admit(self) -> None:
        """Start the texts whose pages are free, in order."""
        admitted: list[_Row] = []
        for row in list(self.waiting):
            row.seq = self.pool.new(() if row.slides else row.prompt, row.names)
            if not self.fits([*self.rows, row]):
                self.pool.free(row.seq)
                break
            # Does a prompt admitted just now compute a page that this one can share?
            n = self.pool.length(row.seq) + self.pool.page_size
            sharers = [] if row.slides else [r for r in admitted if not r.slides]
            if n < len(row.prompt) and any(r.prompt[:n] == row.prompt[:n] for r in sharers):
                self.pool.free(row.seq)
                continue
            self.waiting.remove(row)
            self.begin(row)
            admitted.append(row)

    def fits(self, rows: Sequence[_Row]) -> bool:
        """True if the pool has all pages that these rows may come to hold."""
        for window, n in self.pool.n_pages.items():
            room = n - 1
            if window is None:  # a shared page is held to the end
                room = self.pool.n_free() + sum(len(self.pool.pages(row.seq)) for row in rows)
            if sum(self.most_pages(row, window) for row in rows) > room:
                return False
        return True

    def most_pages(self, row: _Row, window: int | None) -> int:
        """The most pages that the row may hold from now on in the layers with this window."""
        size = self.pool.page_size
        # A text that slides is read again in each step.
        prefill = row.stored if row.slides else 0 if row.launched else len(row.prompt)
        return max(pages_for(row.stored, size, window), pages_for(prefill, size))

    def begin(self, row: _Row) -> None:
        self.rows.append(row)
        row.place = self.places.pop()
        if (more := len(row.prompt) + row.room - self.texts.shape[1]) > 0:
            self.texts = torch.cat([self.texts, self.texts[:, :1].expand(-1, more)], dim=1)
        self.texts[row.place] = row.prompt[0]  # in the other places, as in engine.py
        if self.constraint is not None:
            self.states[row.place] = self.constraint.start([row.index], [row.room])[0]
        self.texts[row.place, : len(row.prompt)] = self.to_device(row.prompt)
        self.stats.shared_pages += self.pool.length(row.seq) // self.pool.page_size

    def step(self) -> Launched[_Row]:
        groups = self.groups()
        logits = torch.cat([self.read(group) for group in groups])
        rows = [row for group in groups for row in group]
        # All rows have one, or none.
        u = [row.random.next() for row in rows if row.random is not None]
        place, n = self.to_device([r.place for r in rows] + [r.n for r in rows]).view(2, -1)
        texts, processor = None, self.options.logits_processor
        if processor is not None and self.in_step:
            texts = processor, self.texts[place], n
        elif processor is not None:
            logits = self.processed(logits, self.texts[place], [(0, row.n) for row in rows])
        how = self.params, self.constraint, self.states[place], torch.cat(u) if u else None
        token, after, over = sample_step(logits, how, texts)
        self.texts[place, n] = token.clamp(min=0)  # INVALID is for the host
        if after is not None:
            self.states[place] = after
        for row in rows:
            row.launched += 1
        self.leave([row for row in rows if row.launched == row.room])
        return rows, to_host(token, over)

    def groups(self) -> list[list[_Row]]:
        """Batches of similar length: no row is padded to twice its length."""
        groups: list[list[_Row]] = []
        for row in sorted(self.rows, key=self.num_uncomputed_tokens, reverse=True):
            longest = self.num_uncomputed_tokens(groups[-1][0]) if groups else 0
            alike = 2 * self.num_uncomputed_tokens(row) > longest
            if groups and alike and longest * (len(groups[-1]) + 1) <= PREFILL:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def num_uncomputed_tokens(self, row: _Row) -> int:
        return self.block_size if row.n > self.block_size else row.n - self.pool.length(row.seq)

    def read(self, group: Sequence[_Row]) -> Tensor:
        """Run rows through the model: logits (B, V) of the next tokens."""
        counts = [self.num_uncomputed_tokens(row) for row in group]
        for row in group:
            if row.n > self.block_size:  # every position moves
                self.pool.free(row.seq)
                row.seq = self.pool.new()
        step = self.cache.reserve([row.seq for row in group], counts)
        used = sum(map(self.pool.n_used, self.pool.n_pages))
        self.stats.pages = max(self.stats.pages, used)
        numbers = [row.place for row in group]
        numbers += [row.n - count for row, count in zip(group, counts, strict=True)]
        place, begin = self.to_device(numbers).view(2, -1, 1)
        at = begin + torch.arange(max(counts), device=self.device)  # (B, T)
        idx = self.texts[place, at.clamp(max=self.texts.shape[1] - 1)]
        last = step.count[:, None].long() - 1
        logits = next_logits(self.model, idx, last, step, self.options.vocab_size)
        step.advance()
        return logits

    def to_device(self, numbers: Sequence[int]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)


def _each(name: str, given: T | Iterable[T]) -> Iterator[T]:
    """One entry for each prompt: the same for all, or the next one given."""
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        yield from repeat(given)
    else:
        yield from given
    raise ValueError(f"{name} has fewer entries than there are prompts")
