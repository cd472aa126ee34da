"""Many prompts through a few rows of a paged KV cache: continuous batching, with shared prompts.

engine.py writes one batch: its rows begin together, and a row whose text has ended idles until
the last one has. Here a new prompt takes the row's place at once:

    step     1    2    3    4    5    6    7          step     1    2    3    4    5    6    7
    row 0    A    a    a    .    .    C    c          row 0    A    a    a    C    c    c    c
    row 1    B    b    b    b    b    D    d          row 1    B    b    b    b    b    D    d
             a batch, then the next                            capitals: a prompt is read

("Iteration-level scheduling": Yu et al. 2022, "Orca: A Distributed Serving System for
Transformer-Based Generative Models", OSDI, section 3.) In a step there go through the model

    the prompts that enter, in groups of about one length, padded on the right
    the last token of every other row, as one batch

and then a token is drawn for all of them at once. No row idles, though all wait for a prompt that
is read, up to block_size tokens. Each text is the one that generate() makes of its prompt alone
(greedily, or with a generator for each prompt).

**Pages** come from a pool of limited size (inference/pages.py). A prompt enters only when the pages
that its text may need to its end are free, counting what the texts in progress may still take; else
it waits, and those behind it do. So no text ever stops for lack of pages, and when the last text
has ended, all pages are free: whatever fits into the pool gets its turn. A prompt that would never
fit is an error, after the texts before it are finished.

**Sharing.** A prompt takes the full pages that it has in common with one that was read before, as
long as those are kept. Prompts that are the same and enter together (samples of one prompt) are
read once, and share the last, partly filled page too, until each writes to it: then it is copied.
A prompt whose beginning is just being read waits a step for it. Texts that may slide (see
inference/engine.py) share nothing: each will need a whole window for itself.

**Memory** does not grow with the number of prompts. They are taken from their iterator when there
is room for one, and a text is forgotten when it has been handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from core.settings import UserError
from inference.engine import (
    ENDED,
    Copy,
    Processor,
    Stats,
    Stop,
    Uniform,
    as_function,
    check_options,
    draw,
    last_logits,
    on_device,
    paged_cache,
)

if TYPE_CHECKING:
    from inference.constrain import Automaton
    from model import GPT

PREFILL = 2048  # tokens, padding included, that are read at once, unless one prompt has more


@torch.no_grad()
def serve(
    model: GPT, prompts: Iterable[Any], max_new_tokens: int | Iterable[int], **options: Any
) -> Iterator[tuple[int, Tensor]]:
    """Continue many prompts, and hand out each text when it ends; see stream() for the options.

    Yields:
        which prompt it was, from 0 on, and (T + n,) int64 on the CPU: the prompt and what was
        drawn, as generate() gives it for that prompt alone (greedily, or with a generator each).
    """
    with closing(_Server(model, prompts, max_new_tokens, **options).tokens()) as tokens:
        for row, token in tokens:
            if token == ENDED:
                yield row.index, torch.tensor(row.prompt + row.new)


@torch.no_grad()
def stream(
    model: GPT, prompts: Iterable[Any], max_new_tokens: int | Iterable[int], **options: Any
) -> Iterator[tuple[int, int]]:
    """Continue many prompts, and hand out each token as it comes.

    Args:
        prompts: each (T,) token ids. Taken one by one, when there is room for another.
        max_new_tokens: for each prompt, or of each prompt in turn.
        temperature, top_k, top_p, vocab_size, overflow: as in generate.stream().
        generator: the source of randomness, one for all prompts, or one of each prompt in turn.
        logits_processor: as there; it is called for each row by itself.
        constraint: as there.
        stop: as there; a function is given the number of the prompt.
        slots: texts in progress at once, at most.
        n_pages: pages in the pool, one of which is not used; None: enough for `slots` texts of
            block_size tokens. See enough_pages().
        page_size: tokens a page.
        stats: is filled in.

    Yields:
        which prompt, from 0 on, and its next token; ENDED (-1) when its text has ended.

    Raises:
        ValueError: as generate.stream(), or a prompt needs more pages than there are. For what is
            wrong with one prompt, after the texts of those before it.
    """
    with closing(_Server(model, prompts, max_new_tokens, **options).tokens()) as tokens:
        for row, token in tokens:
            yield row.index, token


def enough_pages(
    model: GPT, lengths: Iterable[int], max_new_tokens: int, slots: int, page_size: int = 16
) -> int:
    """The n_pages with which no prompt of these lengths ever waits for a page."""
    most = (min(T + max_new_tokens, model.config.block_size) for T in lengths)
    return 1 + sum(-(-n // page_size) for n in sorted(most)[-slots:])


def _each(given: Any, kind: Any) -> Iterator[Any]:
    """What was given for all, again and again, or of each in turn."""
    return repeat(given) if isinstance(given, kind) else iter(given)


@dataclass(eq=False)
class _Row:
    """A prompt and its text."""

    index: int
    prompt: list[int]
    room: int  # tokens that may be drawn
    slides: bool  # may it get longer than the context?
    most: int  # pages that it holds in the end
    uniform: Uniform
    state: Tensor | None  # (1, 2) of the constraint, before the first token
    place: int = -1  # in the tables on the device, from when it enters
    seq: int | None = None  # in the pool, from when it enters; a twin's when its prompt was read
    twin: _Row | None = None  # the same prompt, which is just being read
    shared: int = 0  # pages that it found in the pool, filled
    copies: int = 0  # pages that it holds and has to copy before it writes
    launched: int = 0  # tokens drawn on the device
    new: list[int] = field(default_factory=list)  # of these, those read
    ended: bool = False

    @property
    def n(self) -> int:
        """Tokens of the text so far, those that are launched included."""
        return len(self.prompt) + self.launched


@dataclass
class _Server:
    """One call of serve() or stream()."""

    model: GPT
    prompts: Iterable[Any]
    max_new_tokens: int | Iterable[int]
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    generator: torch.Generator | Iterable[torch.Generator] | None = None
    vocab_size: int | None = None
    overflow: str = "slide"
    logits_processor: Processor | None = None
    constraint: Automaton | None = None
    stop: Stop | None = None
    slots: int = 8
    n_pages: int | None = None
    page_size: int = 16
    stats: Stats = field(default_factory=Stats)

    def __post_init__(self) -> None:
        check_options(self.temperature, self.top_k, self.top_p, self.overflow)
        for name in ("slots", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        self.device = self.model.transformer.wte.weight.device
        self.block_size = self.model.config.block_size
        if self.n_pages is None:
            self.n_pages = 1 + self.slots * self._pages(self.block_size)
        self.cache = paged_cache(self.model, self.n_pages, self.page_size)
        self.pool = self.cache.pool
        self.stats.cache_bytes = self.cache.nbytes
        self.stats.all_pages = self.n_pages - 1
        self.how = on_device(self.temperature, self.top_k, self.top_p, self.device)
        self.stops = as_function(self.stop)
        self.coming = enumerate(self.prompts)
        self.each = {
            "max_new_tokens": _each(self.max_new_tokens, int),
            "generator": _each(self.generator, (torch.Generator, type(None))),
        }
        self.ahead = 1 if self.device.type == "cuda" else 0  # steps launched before one is read
        self.refused: ValueError | None = None  # what is wrong with the prompt that comes next
        self.waiting: list[_Row] = []  # until there are pages for them
        self.rows: list[_Row] = []  # in progress
        self.places = list(range(self.slots))  # in the tables on the device, those that are free
        self.texts = torch.zeros(len(self.places), 0, dtype=torch.int64, device=self.device)
        self.states: Tensor | None = None
        self.left = [0] * len(self.places)  # tokens that each row's constraint has room for
        self.matched = None
        if self.constraint is not None:
            self.states = torch.zeros(len(self.places), 2, dtype=torch.int64, device=self.device)
            self.matched = self.constraint.stop(self.left)

    # --- the loop ---

    def tokens(self) -> Generator[tuple[_Row, int], None, None]:
        """Each row's tokens as they are read, and ENDED after its last."""
        on_the_way: deque[tuple[list[_Row], Copy]] = deque()
        try:
            while True:
                empty = self._come()
                for row in empty:
                    yield row, ENDED
                self._enter()
                if self.rows:
                    rows, token = self._step()
                    on_the_way.append((rows, Copy(token)))
                    if len(on_the_way) <= self.ahead:
                        continue
                elif not on_the_way and not empty:
                    assert not self.waiting, "with all pages free the first prompt fits"
                    break
                elif not on_the_way:
                    continue
                read, copy = on_the_way.popleft()
                for row, id_ in zip(read, copy.wait(), strict=True):
                    if not row.ended:
                        row.new.append(id_)
                        yield row, id_
                        if self._ends(row):
                            row.ended = True
                            self._leave([row])
                            yield row, ENDED
        finally:
            self._leave(self.rows)
        if self.refused is not None:
            raise self.refused

    def _ends(self, row: _Row) -> bool:
        """Whether a row's text ends with the token that was read last."""
        if len(row.new) == row.room:
            return True
        if self.matched is not None and self.matched(row.place, row.new):
            return True
        return self.stops is not None and self.stops(row.index, row.new)

    def _leave(self, rows: Sequence[_Row]) -> None:
        """Their pages and places can be taken again, on the device after what was launched."""
        for row in rows:
            if row in self.rows:
                self.places.append(row.place)
                if row.seq is not None:
                    self.pool.free(row.seq)
        self.rows = [row for row in self.rows if row not in rows]

    # --- prompts enter ---

    def _come(self) -> list[_Row]:
        """Take prompts, one for each free slot; those of them that have room for no token."""
        empty: list[_Row] = []
        while len(self.rows) + len(self.waiting) + len(empty) < self.slots and not self.refused:
            try:
                coming = next(self.coming, None)
                if coming is None:
                    break
                row = self._row(*coming)
            except ValueError as e:
                self.refused = e  # told when the texts before it are finished
            else:
                (self.waiting if row.room else empty).append(row)
        return empty

    def _enter(self) -> None:
        """Let prompts enter that have their pages, from the first on."""
        entered: list[_Row] = []
        for row in list(self.waiting):
            others = [] if row.slides else [r for r in entered if not r.slides]
            row.twin = next((r for r in others if r.prompt == row.prompt and not r.twin), None)
            if row.twin is None:
                row.seq = self.pool.new(() if row.slides else row.prompt)
            stored = len(row.prompt) if row.seq is None else self.pool.length(row.seq)
            row.shared = stored // self.page_size
            # Could it share one page more when what enters now has been read?
            n = (row.shared + 1) * self.page_size
            later = n < len(row.prompt) and any(r.prompt[:n] == row.prompt[:n] for r in others)
            fits = sum(map(self._may_take, [*self.rows, row])) <= self.pool.n_free
            if fits and not later:
                self._begin(row)
                entered.append(row)
                continue
            if row.seq is not None:
                self.pool.free(row.seq)
            row.seq = row.twin = None
            if not fits:
                break
        self.waiting = [row for row in self.waiting if row not in entered]

    def _row(self, index: int, prompt: Any) -> _Row:
        """What is known of a prompt before it enters."""
        ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        room, generator = (self._next(name, index) for name in self.each)
        T, block_size = len(ids), self.block_size
        if not T:
            raise ValueError(f"each prompt must have at least one token; prompt {index} has none")
        if room < 0:
            raise ValueError(f"max_new_tokens must be at least 0, got {room}")
        if self.overflow == "stop":
            if block_size < T:
                raise ValueError(
                    f"a prompt of {T} tokens does not fit into block_size {block_size} (prompt "
                    f"{index})"
                )
            room = min(room, block_size - T)
        stored = T + room - 1  # the last token is drawn, and not looked at
        most = self._pages(min(stored, block_size))
        if most > self.pool.n_pages - 1:
            raise UserError(
                f"prompt {index} needs {most} pages of {self.page_size} tokens, for its {T} tokens "
                f"and {room} new ones, and the pool has {self.pool.n_pages - 1}; raise n_pages"
            )
        state = self.constraint.start([room]) if self.constraint is not None else None
        uniform = Uniform(1, self.device, generator)
        return _Row(index, ids, room, stored > block_size, most, uniform, state)

    def _next(self, name: str, index: int) -> Any:
        for given in self.each[name]:
            return given
        raise ValueError(f"{name} has {index} entries, and there are more prompts")

    def _begin(self, row: _Row) -> None:
        """The row is in progress, its text and its constraint's state on the device."""
        self.rows = [*self.rows, row]
        row.place = self.places.pop()
        full = len(row.prompt) + row.room
        if full > self.texts.shape[1]:
            wider = self.texts.new_zeros(len(self.texts), full)
            wider[:, : self.texts.shape[1]] = self.texts
            self.texts = wider
        self.texts[row.place, : len(row.prompt)] = self._to_device(row.prompt)
        if self.states is not None and row.state is not None:
            self.states[row.place] = row.state[0]
            self.left[row.place] = row.room
        self.stats.shared_pages += row.shared

    def _may_take(self, row: _Row) -> int:
        """Pages that a row in progress may still take from the pool."""
        held = row.shared if row.seq is None else len(self.pool.pages(row.seq))
        return row.most - held + row.copies

    # --- a step ---

    def _step(self) -> tuple[list[_Row], Tensor]:
        """Draw a token for each row: the rows, and (B,) int64 on the device, not waited for."""
        groups = self._groups()
        logits = torch.cat([self._read(group) for group in groups])
        rows = [row for group in groups for row in group]
        if len(rows) < len(self.rows):
            logits = logits[self._to_device(self._fork_twins(rows))]
        if self.logits_processor is not None:
            texts = (self.texts[row.place, : row.n][None] for row in rows)
            pairs = zip(texts, logits[:, None], strict=True)
            logits = torch.cat([self.logits_processor(ids, one) for ids, one in pairs])
        u = None if self.temperature == 0 else torch.cat([row.uniform.next() for row in rows])
        numbers = [row.place for row in rows] + [row.n for row in rows]
        place, n = self._to_device(numbers).view(2, -1)
        before = None if self.states is None else self.states[place]
        token, after = draw(logits, u, *self.how, self.constraint, before)
        self.texts[place, n] = token
        if self.states is not None and after is not None:
            self.states[place] = after
        for row in rows:
            row.launched += 1
        self._leave([row for row in rows if row.launched == row.room])
        return rows, token

    def _groups(self) -> list[list[_Row]]:
        """Rows that go through the model together: none is padded to twice its length."""
        groups: list[list[_Row]] = []
        for row in sorted((r for r in self.rows if r.twin is None), key=self._lacks, reverse=True):
            most = self._lacks(groups[-1][0]) if groups else 0
            if groups and 2 * self._lacks(row) > most and most * (len(groups[-1]) + 1) <= PREFILL:
                groups[-1].append(row)
            else:
                groups.append([row])
        return groups

    def _lacks(self, row: _Row) -> int:
        """Tokens that the cache lacks of a row's text, or of its window."""
        if row.n > self.block_size:
            return self.block_size
        assert row.seq is not None
        return row.n - self.pool.length(row.seq)

    def _read(self, group: Sequence[_Row]) -> Tensor:
        """Rows through the model, into the cache: (B, V) the logits of each one's next token."""
        counts = [self._lacks(row) for row in group]
        for row in group:
            if row.n > self.block_size and row.seq is not None:  # every position moves
                self.pool.free(row.seq)
                row.seq = self.pool.new()
        step = self.cache.reserve([row.seq for row in group if row.seq is not None], counts)
        self.stats.pages = max(self.stats.pages, self.pool.n_used)
        numbers = [row.place for row in group]
        numbers += [row.n - count for row, count in zip(group, counts, strict=True)]
        place, begin = self._to_device(numbers).view(2, -1, 1)
        at = begin + torch.arange(max(counts), device=self.device)  # (B, T)
        idx = self.texts[place, at.clamp(max=self.texts.shape[1] - 1)]
        x = self.model.hidden(idx, None, step)
        step.advance()
        for row in group:
            row.copies = 0
            if not row.launched and not row.slides and row.seq is not None:
                self.pool.remember(row.seq, row.prompt)
        return last_logits(self.model, x, step.count[:, None].long() - 1, self.vocab_size)

    def _fork_twins(self, rows: list[_Row]) -> list[int]:
        """Add the rows whose prompt has just been read for another; whose logits each row has."""
        at = list(range(len(rows)))
        for row in self.rows:
            if row.twin is not None:
                assert row.twin.seq is not None
                row.seq = self.pool.fork(row.twin.seq)
                row.copies = len(self.pool.pages(row.seq)) - row.shared
                at.append(rows.index(row.twin))
                rows.append(row)
                row.twin = None
        return at

    # --- small things ---

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _to_device(self, numbers: Sequence[int]) -> Tensor:
        """(n,) int64; on CUDA the copy is not waited for."""
        there = torch.tensor(numbers, dtype=torch.int64)
        if self.device.type == "cuda":
            there = there.pin_memory()
        return there.to(self.device, non_blocking=True)
