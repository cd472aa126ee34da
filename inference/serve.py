"""The scheduler: many prompts through the rows of a KV cache. A batch has a row for each prompt.

With pages a new prompt replaces a finished text at once, and texts share the pages of a common
prefix. The rows of other caches begin and end together (Yu et al. 2022, "Orca", OSDI, section 3):

    step     1    2    3    4    5    6    7          step     1    2    3    4    5    6    7
    row 0    A    a    a    .    .    C    c          row 0    A    a    a    C    c    c    c
    row 1    B    b    b    b    b    D    d          row 1    B    b    b    b    b    D    d
             dynamic, static, none                             paged; capitals: prefill

A step runs the new prompts in groups of similar length, and one token of every other row. Each text
equals that of its prompt alone, in float32; in other dtypes rounding depends on the batch. GPT-2
has learned vectors for block_size positions. A longer text slides as in nanoGPT: the model reads
its last block_size tokens, which moves every position, so nothing can be cached.

**Admission.** A prompt waits, and all behind it, until the pool has pages for its longest text and
for those in progress. So no text stops for lack of pages. A prompt that can never fit is an error.

**Sharing.** A prompt takes the full pages of a prefix in the pool. If another new prompt computes
them in this step, it waits for the next one. Texts that may slide share nothing.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice, repeat
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError
from inference import graphs
from inference.cache import Cache, DynamicCache, PagedCache, StaticCache, Step, bucket
from inference.constrain import combined
from inference.decode import Texts, next_logits, next_token, process_rows, sample_step, to_host
from inference.pages import PagePool, pages_for
from inference.sampling import (
    ENDED,
    INVALID,
    Options,
    Prompt,
    SamplingParams,
    Uniform,
    check_prompt,
    in_range,
)
from inference.texts import StopStrings

if TYPE_CHECKING:
    from model import GPT

    Read = tuple[GPT, Tensor, Tensor | None, Step | None, int | None]  # of next_logits()

T = TypeVar("T")
KV_CACHES = ("none", "dynamic", "static", "paged")
PREFILL = 2048  # most tokens of a prefill of pages, padding included, unless one prompt has more


@torch.no_grad()
def stream(
    model: GPT, prompts: Iterable[Prompt], max_new_tokens: int | Iterable[int], **options: Any
) -> Iterator[tuple[int, int]]:
    """Continue many prompts, and yield each token as it comes.

    Args:
        prompts: (T,) token ids each; taken when there is room for one.
        max_new_tokens: for all prompts, or one for each; likewise generator.
        slots: most texts in progress.
        kv_cache: "paged", or as engine.stream(), also compile.
        n_pages: size of the pool; page 0 is not used; None: enough for `slots` full contexts.
            Layers with a window have pools of their own, not larger, with room for the windows of
            `slots` texts and a prefill.
        page_size: tokens of a page.
        options: as sampling.Options.

    Yields the number of a prompt, and its next token; ENDED (-1) when its text has ended.
    Raises ValueError: as engine.stream(), or a prompt needs more pages than the pool has.
    """
    with closing(Scheduler(model, prompts, max_new_tokens, **options).tokens()) as tokens:
        for row, token in tokens:
            yield row.index, token


def enough_pages(
    model: GPT, lengths: Iterable[int], max_new_tokens: int, slots: int, page_size: int = 16
) -> int:
    """The least n_pages with which prompts of these lengths never wait for layers without a
    window."""
    longest = (min(T + max(0, max_new_tokens - 1), model.config.block_size) for T in lengths)
    return 1 + sum(pages_for(n, page_size) for n in sorted(longest)[-slots:])


@dataclass(eq=False)
class Row:
    """The text of one prompt."""

    index: int
    prompt: list[int]
    room: int  # tokens that may be drawn
    random: Uniform | None
    stops: StopStrings | None
    new: list[int] = field(default_factory=list)
    launched: int = 0  # tokens drawn on the device
    slot: int = -1  # of the cache, once admitted
    ended: bool = False  # known to the host
    stored: int = 0  # the most tokens that are in a cache of pages
    slides: bool = False  # may exceed block_size
    names: list[bytes] = field(default_factory=list)  # of the prompt's full pages

    @property
    def n(self) -> int:
        """Tokens of the text, including launched ones."""
        return len(self.prompt) + self.launched

    @property
    def done(self) -> bool:
        return self.ended or self.launched == self.room


# Rows, and a function that waits for their tokens; None: the rows have no room for a token.
Launched = tuple[Sequence[Row], Callable[[], list[list[int]]] | None]


class Scheduler:
    """One call of stream(): admit rows, run a step, sample, stop."""

    def __init__(
        self,
        model: GPT,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Iterable[int],
        *,
        generator: torch.Generator | Iterable[torch.Generator] | None = None,
        slots: int = 8,
        kv_cache: str = "paged",
        compile: bool = False,
        n_pages: int | None = None,
        page_size: int = 16,
        **options: Any,
    ) -> None:
        self.model, self.options = model, Options(**options)
        self.device = model.transformer.wte.weight.device
        self.block_size = model.config.block_size
        self.kv_cache, self.graph = self.storage(kv_cache, compile)
        self.tokenizer = model.tokenizer
        if self.tokenizer is not None and self.options.vocab_size is None:
            known = self.tokenizer.vocab_size, self.tokenizer.unused
            self.options.vocab_size, self.options.unused = known
        self.stop, self.stop_strings = self.options.ends(model.config.vocab_size)
        if self.stop_strings and self.tokenizer is None:
            raise ValueError(f"stop: {self.stop_strings[0]!r} needs a model with a tokenizer, as "
                             "of inference.load()")  # fmt: skip
        self.params = SamplingParams.on(self.device, self.options)
        given = self.options.constraint
        self.constraint = combined(given) if isinstance(given, Sequence) else given
        if self.constraint is not None:
            self.constraint.to(self.device)
        # A processor with a parameter `lengths` is part of the step (docs/GENERATE.md).
        self.processor = self.options.logits_processor
        called = getattr(self.processor, "forward", self.processor)
        self.in_step = called is not None and "lengths" in inspect.signature(called).parameters
        slots, page_size = in_range("slots", slots, 1), in_range("page_size", page_size, 1)
        self.slots, self.stats = slots, self.options.stats
        self.pool: PagePool | None = None  # of a cache of pages
        self.cache = Cache()
        if self.kv_cache == "paged":
            self.cache = paged = self.pages(n_pages, page_size)
            self.pool = paged.pool
        self.ahead = 1 if self.device.type == "cuda" else 0  # steps launched before one is read
        self.coming = self.new_rows(prompts, max_new_tokens, generator)
        self.waiting: list[Row] = []  # until there is room for them
        self.rows: list[Row] = []  # in progress
        self.texts = torch.zeros(slots, 1, dtype=torch.int64, device=self.device)
        self.states = torch.zeros(slots, 2, dtype=torch.int64, device=self.device)
        # Of the last step: the rows, and their slots, lengths and tokens on the device, (B,) each.
        self.batch: list[Row] = []
        self.slot = self.length = self.token = self.texts[:0, 0]
        self.decoding = False  # the batch goes on

    def storage(self, kv_cache: str, compile: bool) -> tuple[str, str | None]:
        """The cache, and the kind of graph of its decode steps."""
        if kv_cache == "auto" and not compile:
            captured = graphs.possible(self.device) and not graphs.hooked(self.model)
            return ("static", "captured") if captured else ("dynamic", None)
        if kv_cache not in KV_CACHES:
            names = ", ".join(("auto", *KV_CACHES))
            raise ValueError(f"kv_cache must be one of {names}, got {kv_cache!r}")
        if compile and kv_cache != "static":
            raise ValueError(f"compile needs kv_cache=static, got {kv_cache}")
        return kv_cache, "compiled" if compile else None

    # --- the loop ---

    def tokens(self) -> Generator[tuple[Row, int], None, None]:
        pending: deque[Launched] = deque()
        try:
            for step in self.launch():
                pending.append(step)
                if len(pending) > self.ahead:
                    yield from self.read(*pending.popleft())
            for step in pending:
                yield from self.read(*step)
        finally:
            self.free([*self.rows])

    def launch(self) -> Iterator[Launched]:
        """Sample a token for each row on the device."""
        while True:
            if empty := self.pull():
                yield empty, None
            self.admit()
            if self.rows:
                yield self.step()
            elif not empty:
                assert not self.waiting, "with all pages free the first prompt fits"
                return

    def read(
        self, rows: Sequence[Row], tokens: Callable[[], list[list[int]]] | None
    ) -> Iterator[tuple[Row, int]]:
        """Wait for the tokens of a step, and end texts."""
        going = [row for row in rows if not row.ended]  # others ended after the launch
        for row, (token, *over) in zip(rows, tokens() if tokens else ()):
            if row.ended:
                continue
            if token == INVALID:
                raise UserError(
                    f"no token can follow text {row.index}: its logits contain NaN, or all are "
                    "-infinity (by the model, or by a logits_processor)"
                )
            row.new.append(token)
            over += len(row.new) == row.room, self.stop(row.index, row.new)
            row.ended = any(over) or (row.stops is not None and row.stops.found(row.new))
        self.leave()
        for row in going:
            if row.new:
                yield row, row.new[-1]
            if row.ended or not row.room:
                yield row, ENDED

    def leave(self) -> None:
        """Free the rows that need no further step."""
        done = [row for row in self.rows if row.done]
        if len(done) == len(self.rows) or not self.cache.together:
            self.free(done)

    def free(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.rows.remove(row)
            self.cache.free(row.slot)
        if not self.rows:
            self.drop_cache()

    # --- admission ---

    def pull(self) -> list[Row]:
        """Take a prompt for each free slot; returns those without room for a token."""
        empty: list[Row] = []
        free = self.slots - len(self.rows) - len(self.waiting)
        for row in islice(self.coming, free):
            (self.waiting if row.room else empty).append(row)
        return empty

    def new_rows(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int | Iterable[int],
        generator: torch.Generator | Iterable[torch.Generator] | None,
    ) -> Iterator[Row]:
        each = _each("max_new_tokens", max_new_tokens), _each("generator", generator)
        for index, (prompt, new, random) in enumerate(zip(prompts, *each)):
            ids = check_prompt(index, prompt, self.model.config.vocab_size)
            sampled, strings = self.options.temperature > 0, self.stop_strings
            uniform = Uniform(self.device, random) if sampled else None
            stops = StopStrings(self.tokenizer, strings, ids) if strings else None
            row = Row(index, ids, in_range("max_new_tokens", new, 0), uniform, stops)
            if self.pool is not None:
                self.count_pages(row, self.pool)
            yield row

    def admit(self) -> None:
        """Start the texts for which there is room, in order."""
        if self.pool is not None:
            self.admit_to_pages(self.pool)
        elif self.waiting and not self.rows:
            rows, self.waiting = self.waiting, []
            for slot, row in enumerate(rows):
                row.slot = slot
            self.cache = self.new_cache(rows)
            self.texts = self.texts.new_zeros(len(rows), 1)
            self.begin(rows)

    def begin(self, rows: Sequence[Row]) -> None:
        width = max(len(row.prompt) + row.room for row in rows)
        if self.graph:  # few shapes
            width = bucket(width, max(128, 2 * width))
        if (more := width - self.texts.shape[1]) > 0:
            self.texts = torch.cat([self.texts, self.texts[:, :1].expand(-1, more)], dim=1)
        for row in rows:
            self.rows.append(row)
            # In other places the first token: harmless to processors of sets of tokens.
            self.texts[row.slot] = row.prompt[0]
            self.texts[row.slot, : len(row.prompt)] = self.to_device(row.prompt)
            if self.constraint is not None:
                self.states[row.slot] = self.constraint.start([row.index], [row.room])[0]

    def new_cache(self, rows: Sequence[Row]) -> Cache:
        """A cache for rows that begin together."""
        config, lengths = self.model.config, [len(row.prompt) for row in rows]
        T, room = max(lengths), max(row.room for row in rows)
        if self.kv_cache == "none" or room == 1 or self.block_size <= T:
            return Cache()
        if self.kv_cache == "dynamic":
            how = {"max_len": self.block_size, "windows": config.windows, "device": self.device}
            return DynamicCache(config.n_layer, pad=[T - n for n in lengths], **how)
        # Rounded up, so that other lengths reuse the graphs.
        max_len = bucket(min(T + room, self.block_size), self.block_size)
        if self.in_step and self.graph == "captured":
            graphs.forget(self.model, self.processor)
        return graphs.static_cache(self.model, len(rows), max_len, self.graph)

    def drop_cache(self) -> None:
        """The rows go on without a cache: it can be reused."""
        if self.cache.together:
            if isinstance(self.cache, StaticCache) and self.graph:
                graphs.give_back(self.model, self.cache)
            self.cache = Cache()

    # --- pages ---

    def pages(self, n_pages: int | None, page_size: int) -> PagedCache:
        config, slots = self.model.config, self.slots
        if n_pages is None:
            n_pages = enough_pages(self.model, [self.block_size] * slots, 0, slots, page_size)
        sizes = {window: n_pages for window in config.windows}
        for window in sizes:
            if window is not None:
                kept = slots * pages_for(self.block_size, page_size, window)
                prefill = pages_for(max(PREFILL, self.block_size), page_size)
                sizes[window] = min(n_pages, 1 + kept + prefill)
        cache = PagedCache(
            config.n_layer, config.kv_heads, config.head_dim, n_pages=sizes, page_size=page_size,
            windows=config.windows, dtype=getattr(torch, self.model.phase().dtype),
            device=self.device,
        )  # fmt: skip
        self.stats.all_pages = sum(n - 1 for n in sizes.values())
        return cache

    def count_pages(self, row: Row, pool: PagePool) -> None:
        """Note what the row will store. Raises UserError: more than the pool has."""
        stored = len(row.prompt) + row.room - 1  # the last token is never read
        row.stored = min(stored, self.block_size)
        row.slides = stored > self.block_size
        row.names = [] if row.slides else pool.names(row.prompt)
        for window, n in pool.n_pages.items():
            if (most := self.most_pages(row, window, pool)) > n - 1:
                raise UserError(
                    f"prompt {row.index} ({len(row.prompt)} tokens, {row.room} new ones) needs "
                    f"{most} pages, the pool has {n - 1}: raise n_pages"
                )

    def admit_to_pages(self, pool: PagePool) -> None:
        admitted: list[Row] = []
        for row in [*self.waiting]:
            row.slot = pool.new(() if row.slides else row.prompt, row.names)
            if not self.fits([*self.rows, row], pool):
                pool.free(row.slot)
                break
            # Does a prompt admitted just now compute a page that this one can share?
            n = pool.length(row.slot) + pool.page_size
            sharers = [] if row.slides else [r for r in admitted if not r.slides]
            if n < len(row.prompt) and any(r.prompt[:n] == row.prompt[:n] for r in sharers):
                pool.free(row.slot)
                continue
            self.waiting.remove(row)
            self.begin([row])
            admitted.append(row)
            self.stats.shared_pages += pool.length(row.slot) // pool.page_size

    def fits(self, rows: Sequence[Row], pool: PagePool) -> bool:
        """True if the pool has all pages that these rows may come to hold."""
        for window, n in pool.n_pages.items():
            room = n - 1
            if window is None:  # a shared page is held to the end
                room = pool.n_free() + sum(len(pool.pages(row.slot)) for row in rows)
            if sum(self.most_pages(row, window, pool) for row in rows) > room:
                return False
        return True

    def most_pages(self, row: Row, window: int | None, pool: PagePool) -> int:
        """The most pages that the row may hold from now on in the layers with this window."""
        size = pool.page_size
        # A text that slides is read again in each step.
        prefill = row.stored if row.slides else 0 if row.launched else len(row.prompt)
        return max(pages_for(row.stored, size, window), pages_for(prefill, size))

    # --- a step ---

    def step(self) -> Launched:
        if self.cache.together and any(r.n > self.block_size for r in self.rows if not r.done):
            self.drop_cache()  # a text slides: the cached positions are wrong
        groups = self.groups()
        rows = [row for group in groups for row in group]
        self.decoding = rows == self.batch
        if self.decoding:
            self.length = self.length + 1
        else:
            self.batch = rows
            self.slot, self.length = self.to_device([[r.slot for r in rows], [r.n for r in rows]])
        u = [row.random.next() for row in rows if row.random is not None]  # of all rows, or none
        state = None if self.constraint is None else self.states[self.slot]
        how = self.params, self.constraint, state, torch.cat(u) if u else None
        texts: Texts | None = None
        if self.in_step and self.processor is not None:
            texts = self.processor, self.texts[self.slot], self.length
        if len(groups) == 1 and (self.processor is None or self.in_step):
            drawn = self.forward(next_token, rows, how, texts)
        else:
            logits = torch.cat([self.forward(next_logits, group) for group in groups])
            if self.processor is not None and not self.in_step:  # Python, between two graphs
                lengths = [row.n for row in rows]
                logits = process_rows(self.processor, self.texts[self.slot], logits, lengths)
            drawn = self.run(sample_step, logits, how, texts)
        token, after, over = drawn
        self.token = token.clamp(min=0)  # INVALID is for the host
        self.texts[self.slot, self.length] = self.token
        if after is not None:
            self.states[self.slot] = after
        for row in rows:
            row.launched += not row.done
        self.stats.cache_bytes = max(self.stats.cache_bytes, self.cache.nbytes)
        self.leave()
        return rows, to_host(token, over)

    def groups(self) -> list[list[Row]]:
        """Batches of similar length: no row is padded to twice its length."""
        if self.cache.together:
            return [[*self.rows]]
        groups: list[list[Row]] = []
        for row in sorted(self.rows, key=self.num_uncomputed_tokens, reverse=True):
            longest = self.num_uncomputed_tokens(groups[-1][0]) if groups else 0
            alike = 2 * self.num_uncomputed_tokens(row) > longest
            if groups and alike and longest * (len(groups[-1]) + 1) <= PREFILL:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def num_uncomputed_tokens(self, row: Row) -> int:
        if row.n > self.block_size:  # every position moves
            return self.block_size
        return row.n - self.cache.length(row.slot)

    def forward(self, function: Callable[..., T], rows: Sequence[Row], *args: object) -> T:
        """function(read, *args) with the arguments of next_logits() for these rows."""
        counts = [0 if row.done else self.num_uncomputed_tokens(row) for row in rows]
        T, last = max(counts), None
        if self.decoding and T == 1 and len(rows) == len(self.batch):
            idx = self.token[:, None]
        else:
            left = isinstance(self.cache, DynamicCache)  # pads on the left, others on the right
            begin = [row.n - (T if left else n) for row, n in zip(rows, counts)]
            numbers = [[row.slot for row in rows], begin, [max(0, n - 1) for n in counts]]
            slot, begin, last = self.to_device(numbers)[:, :, None]  # (B, 1) each
            at = begin + torch.arange(T, device=self.device)
            idx = self.texts[slot, at.clamp(0, self.texts.shape[1] - 1)]
            last = None if left or min(counts) == T else last
        for row in rows:
            if self.pool is not None and row.n > self.block_size:
                self.pool.free(row.slot)
                row.slot = self.pool.new()  # the same one again
        step = self.cache.reserve(T, counts, [row.slot for row in rows])
        read = self.model, idx, last, step, self.options.vocab_size
        made = self.run(function, read, *args)
        if self.pool is not None:
            used = sum(map(self.pool.n_used, self.pool.n_pages))
            self.stats.pages = max(self.stats.pages, used)
        if step is not None:
            step.advance()
        return made

    def run(self, function: Callable[..., T], *args: object) -> T:
        """A function of a decode step, by a graph if there is one."""
        if not (self.graph and self.decoding and isinstance(self.cache, StaticCache)):
            return function(*args)
        if self.graph == "compiled":
            return graphs.compiled(function, self.device.type)(*args)
        return graphs.captured(self.model, function, args)

    def to_device(self, numbers: Sequence[Any]) -> Tensor:
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)


def _each(name: str, given: T | Iterable[T]) -> Iterator[T]:
    """One entry for each prompt: the same for all, or the next one given."""
    if not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        yield from repeat(given)
    else:
        yield from given
    raise ValueError(f"{name} has fewer entries than there are prompts")
