"""Many prompts through a few rows of a paged KV cache: continuous batching, with shared prompts.

engine.py writes one batch: its rows begin together, and a row whose text has ended idles until
the last one has. Here a new prompt takes the row's place at once:

    step     1    2    3    4    5    6    7          step     1    2    3    4    5    6    7
    row 0    A    a    a    .    .    C    c          row 0    A    a    a    C    c    c    c
    row 1    B    b    b    b    b    D    d          row 1    B    b    b    b    b    D    d
             a batch, then the next                            capitals: a prompt is read

("Iteration-level scheduling": Yu et al. 2022, "Orca", OSDI, section 3.) In a step the prompts that
are admitted go through the model, in groups of about one length, padded on the right, and the last
token of every other row, as one batch; then a token is drawn for all of them at once. Each text is
the one that generate() makes of its prompt alone.

**Pages** come from a pool of limited size (inference/pages.py). A prompt is admitted only when the
pages that its text may need to its end are free, counting what the texts in progress may still
take; else it waits, and those behind it do. So no text ever stops for lack of pages. A prompt that
would never fit is an error, after the texts before it are finished.

**Sharing.** A prompt takes the full pages that it has in common with one that was read before, as
long as those are kept. If its beginning is just being read (by another sample of the same prompt,
say), it waits a step for it. Texts that may slide (see inference/engine.py) share nothing: each
will need a whole window for itself.

**Memory** does not grow with the number of prompts: they are taken when there is room for one, and
forgotten when their text has been handed out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import repeat
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError
from inference.cache import PagedCache
from inference.sampling import (
    ENDED,
    Copy,
    Options,
    SamplingParams,
    Uniform,
    behind,
    each_alone,
    next_logits,
    sample_step,
)

if TYPE_CHECKING:
    from model import GPT

PREFILL = 2048  # tokens, padding included, that are read at once, unless one prompt has more


@torch.no_grad()
def stream(
    model: GPT, prompts: Iterable[Any], max_new_tokens: int | Iterable[int], **options: Any
) -> Iterator[tuple[int, int]]:
    """Continue many prompts, and hand out each token as it comes.

    Args:
        prompts: each (T,) token ids.
        max_new_tokens: for each prompt, or of each prompt in turn.
        generator: the source of randomness, one for all prompts, or one of each prompt in turn.
        slots: texts in progress at once, at most.
        n_pages: pages in the pool, one of which is not used; None: enough for `slots` texts of
            block_size tokens. See enough_pages().
        options: those of sampling.Options; stop is given the number of the prompt.

    Yields:
        which prompt, from 0 on, and its next token; ENDED (-1) when its text has ended.

    Raises:
        ValueError: as engine.stream(), or a prompt needs more pages than there are. For what is
            wrong with one prompt, after the texts of those before it.
    """
    with closing(_Server(model, prompts, max_new_tokens, **options).tokens()) as tokens:
        for row, token in tokens:
            yield row.index, token


def batch(
    model: GPT, prompts: Sequence[Tensor], max_new_tokens: int, **options: Any
) -> Iterator[Tensor]:
    """One batch of prompts, all at once: engine.stream() with kv_cache="paged"."""
    options["slots"] = len(prompts)
    options["n_pages"] = enough_pages(
        model, map(len, prompts), max_new_tokens, len(prompts), options["page_size"]
    )
    # A prompt may have waited a step for its beginning, and be a token behind.
    ready: list[deque[int]] = [deque() for _ in prompts]
    for index, token in stream(model, prompts, max_new_tokens, **options):
        ready[index].append(token)
        while all(ready):
            tokens = [row[0] if row[0] == ENDED else row.popleft() for row in ready]
            if all(token == ENDED for token in tokens):
                return
            yield torch.tensor(tokens)


def enough_pages(
    model: GPT, lengths: Iterable[int], max_new_tokens: int, slots: int, page_size: int = 16
) -> int:
    """The n_pages with which no prompt of these lengths ever waits for a page."""
    longest = (min(T + max_new_tokens, model.config.block_size) for T in lengths)
    return 1 + sum(-(-n // page_size) for n in sorted(longest)[-slots:])


@dataclass(eq=False)
class _Row:
    """A prompt and its text."""

    index: int
    prompt: list[int]
    room: int  # tokens that may be drawn
    slides: bool  # may it get longer than the context?
    max_pages: int  # that it holds in the end
    uniform: Uniform | None
    state: Tensor | None  # (1, 2) of the constraint
    place: int = -1  # in the tables on the device, once it is admitted
    seq: int = -1  # in the pool, once it is admitted
    launched: int = 0  # tokens drawn on the device
    new: list[int] = field(default_factory=list)  # of these, those read
    ended: bool = False

    @property
    def n(self) -> int:
        """Tokens of the text so far, those that are launched included."""
        return len(self.prompt) + self.launched


class _Server:
    """One call of serve() or stream()."""

    def __init__(
        self,
        model: GPT,
        prompts: Iterable[Any],
        max_new_tokens: int | Iterable[int],
        *,
        generator: torch.Generator | Iterable[torch.Generator] | None = None,
        slots: int = 8,
        n_pages: int | None = None,
        page_size: int = 16,
        **options: Any,
    ) -> None:
        self.model, self.options = model, Options(**options)
        for name, n in (("slots", slots), ("page_size", page_size)):
            if n < 1:
                raise ValueError(f"{name} must be at least 1, got {n}")
        self.device = model.transformer.wte.weight.device
        self.block_size, self.slots = model.config.block_size, slots
        if n_pages is None:
            n_pages = 1 + slots * -(-self.block_size // page_size)
        config, (_, spec) = model.config, model.attention(False, None, "paged", page_size)
        sizes: dict[str, Any] = {"n_pages": n_pages, "page_size": page_size}
        where = {"dtype": getattr(torch, spec.dtype), "device": self.device}
        self.cache = PagedCache(config.n_layer, config.kv_heads, config.head_dim, **sizes, **where)
        self.pool, self.stats = self.cache.pool, self.options.stats
        self.stats.cache_bytes, self.stats.all_pages = self.cache.nbytes, n_pages - 1
        self.params = SamplingParams.on(self.device, self.options)
        self.stops = self.options.ends()
        self.coming = enumerate(prompts)
        given: dict[str, Any] = {"max_new_tokens": max_new_tokens, "generator": generator}
        self.each = {  # of each prompt in turn, or the same for all
            name: iter(of) if isinstance(of, Iterable) else repeat(of) for name, of in given.items()
        }
        self.ahead = 1 if self.device.type == "cuda" else 0  # steps launched before one is read
        self.refused: ValueError | None = None  # what is wrong with the prompt that comes next
        self.waiting: list[_Row] = []  # until there are pages for them
        self.rows: list[_Row] = []  # in progress
        self.places = list(range(slots))  # in the tables on the device, those that are free
        self.texts = torch.zeros(slots, 0, dtype=torch.int64, device=self.device)

    # --- the loop ---

    def tokens(self) -> Generator[tuple[_Row, int], None, None]:
        try:
            for rows, copy in behind(self.launch(), self.ahead):
                if copy is None:
                    yield from ((row, ENDED) for row in rows)
                    continue
                for row, (id_, *over) in zip(rows, copy.wait(), strict=True):
                    if row.ended:  # launched before that was known
                        continue
                    row.new.append(id_)
                    yield row, id_
                    full = len(row.new) == row.room
                    if full or any(over) or self.stops(row.index, row.new):
                        row.ended = True
                        self.leave([row])
                        yield row, ENDED
        finally:
            self.leave(self.rows)
        if self.refused is not None:
            raise self.refused

    def launch(self) -> Iterator[tuple[list[_Row], Copy | None]]:
        """Rows and the tokens drawn for them, not waited for; None: there is room for no token."""
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
        """Their pages and places can be taken again, on the device after what was launched."""
        for row in [row for row in rows if row in self.rows]:  # not those that have left before
            self.rows.remove(row)
            self.places.append(row.place)
            self.pool.free(row.seq)

    # --- prompts come in ---

    def pull(self) -> list[_Row]:
        """Take prompts, one for each free slot; returns those that have room for no token."""
        empty: list[_Row] = []
        while len(self.rows) + len(self.waiting) + len(empty) < self.slots and not self.refused:
            try:
                coming = next(self.coming, None)
                if coming is None:
                    break
                row = self.new_row(*coming)
            except ValueError as e:
                self.refused = e  # told when the texts before it are finished
            else:
                (self.waiting if row.room else empty).append(row)
        return empty

    def new_row(self, index: int, prompt: Any) -> _Row:
        """What is known of a prompt before it is admitted."""
        ids = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
        most, generator = (self.next_of(name, index) for name in self.each)
        T, block_size = len(ids), self.block_size
        room = self.options.room(index, T, most, block_size)
        stored = T + room - 1  # the last token is drawn, and not looked at
        pages = self.pool.pages_for(min(stored, block_size))
        if pages > self.pool.n_pages - 1:
            raise UserError(
                f"prompt {index} needs {pages} pages of {self.pool.page_size} tokens, for its {T} "
                f"tokens and {room} new ones, and the pool has {self.pool.n_pages - 1}; raise "
                "n_pages"
            )
        constraint = self.options.constraint
        state = constraint.start([room]) if constraint is not None else None
        greedy = self.options.temperature == 0
        uniform = None if greedy else Uniform(1, self.device, generator)
        return _Row(index, ids, room, stored > block_size, pages, uniform, state)

    def next_of(self, name: str, index: int) -> Any:
        for given in self.each[name]:
            return given
        raise ValueError(f"{name} has {index} entries, and there are more prompts")

    def admit(self) -> None:
        """Let those in that have their pages, from the first on."""
        admitted: list[_Row] = []
        for row in list(self.waiting):
            row.seq = self.pool.new(() if row.slides else row.prompt)
            needed = sum(r.max_pages - len(self.pool.pages(r.seq)) for r in [*self.rows, row])
            if needed > self.pool.n_free:
                self.pool.free(row.seq)
                break
            # Will it find one page more when those that were just admitted have been read?
            n = self.pool.length(row.seq) + self.pool.page_size
            sharers = [] if row.slides else [r for r in admitted if not r.slides]
            if n < len(row.prompt) and any(r.prompt[:n] == row.prompt[:n] for r in sharers):
                self.pool.free(row.seq)
                continue
            self.begin(row)
            admitted.append(row)
        self.waiting = [row for row in self.waiting if row not in admitted]

    def begin(self, row: _Row) -> None:
        """The row is in progress, its text on the device."""
        self.rows.append(row)
        row.place = self.places.pop()
        if (more := len(row.prompt) + row.room - self.texts.shape[1]) > 0:
            self.texts = F.pad(self.texts, (0, more))
        self.texts[row.place, : len(row.prompt)] = self.to_device(row.prompt)
        self.stats.shared_pages += len(self.pool.pages(row.seq))

    # --- a step ---

    def step(self) -> tuple[list[_Row], Copy]:
        """Draw a token for each row: the rows, and the tokens, not waited for."""
        groups = self.groups()
        logits = torch.cat([self.read(group) for group in groups])
        rows = [row for group in groups for row in group]
        processor, constraint = self.options.logits_processor, self.options.constraint
        if processor is not None:
            logits = each_alone(processor, [self.texts[r.place, : r.n] for r in rows], logits)
        # Of each row one, or none at all.
        u = [row.uniform.next() for row in rows if row.uniform is not None]
        states = [row.state for row in rows if row.state is not None]
        how = (torch.cat(of) if of else None for of in (u, states))
        place, n = self.to_device([r.place for r in rows] + [r.n for r in rows]).view(2, -1)
        token, after, over = sample_step(logits, self.params, constraint, *how)
        self.texts[place, n] = token
        for i, row in enumerate(rows):
            row.state = None if after is None else after[i : i + 1]
            row.launched += 1
        self.leave([row for row in rows if row.launched == row.room])
        return rows, Copy(token, over)

    def groups(self) -> list[list[_Row]]:
        """Rows that go through the model together: none is padded to twice its length."""
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
        """Tokens that the cache lacks of a row's text, or of its window."""
        return self.block_size if row.n > self.block_size else row.n - self.pool.length(row.seq)

    def read(self, group: Sequence[_Row]) -> Tensor:
        """Rows through the model, into the cache: (B, V) the logits of each one's next token."""
        counts = [self.num_uncomputed_tokens(row) for row in group]
        for row in group:
            if row.n > self.block_size:  # every position moves
                self.pool.free(row.seq)
                row.seq = self.pool.new()
        step = self.cache.reserve([row.seq for row in group], counts)
        self.stats.pages = max(self.stats.pages, self.pool.n_used)
        numbers = [row.place for row in group]
        numbers += [row.n - count for row, count in zip(group, counts, strict=True)]
        place, begin = self.to_device(numbers).view(2, -1, 1)
        at = begin + torch.arange(max(counts), device=self.device)  # (B, T)
        idx = self.texts[place, at.clamp(max=self.texts.shape[1] - 1)]
        last = step.count[:, None].long() - 1
        logits = next_logits(self.model, idx, last, step, self.options.vocab_size)
        step.advance()
        for row in group:
            if not row.launched and not row.slides:
                self.pool.remember(row.seq, row.prompt)
        return logits

    def to_device(self, numbers: Sequence[int]) -> Tensor:
        """(n,) int64; on CUDA the copy is not waited for."""
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.device)
