"""The page pool: which pages of a paged KV cache belong to which sequence. No torch.

Layers with the same window share their page numbers. A sequence gives back the pages that no later
token of it can see: with a window of 4 and pages of 2, after 7 tokens::

    all tokens   [3 1 4 2]
    window of 4  [0 0 1 5]     0, the null page, for pages that were given back, and for padding

The name of a full page is a hash of its token ids and of the previous page's name. Equal names mean
equal prefixes: a new sequence shares the named pages of its prompt's prefix, if every window finds
those that it sees. A page that nothing holds keeps its content until it is reused, unnamed pages
first, then in the order in which they were freed. ::

    pages, page_size = 2          held by        name
    1   "the cat"                 A B            h1 = hash("the cat")
    2   "sat on"                  A              h2 = hash(h1, "sat on")
    3   "ran to"                  B              h3 = hash(h1, "ran to")
    4   "a"                       B              none: it is not full

Only full pages are shared, so none is copied.

Source  Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), sections 4.2 to 4.4; vLLM's hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class OutOfPages(RuntimeError):
    """Not enough free pages."""


def pages_for(tokens: int, page_size: int, window: int | None = None) -> int:
    """Pages for the tokens; with a window the most that one of them sees."""
    n = -(-tokens // page_size)
    return n if window is None else min(n, (window - 2) // page_size + 2)


@dataclass
class _Held:
    names: list[bytes]  # of the prompt's full pages
    length: int = 0  # tokens stored; the pages can hold more
    pages: dict[int | None, list[int]] = field(default_factory=dict)  # of each window


class _Pages:
    """Pages 1 .. n - 1 of the layers with one window; None: they see all tokens."""

    def __init__(self, n: int, page_size: int, window: int | None) -> None:
        self.n, self.size, self.window = n, page_size, window
        self.holders = [0] * n  # sequences that hold each page
        self.free = OrderedDict.fromkeys(range(1, n))  # taken from the front
        self.page_named: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}

    def first(self, length: int) -> int:
        """The first page that the token at position `length` sees."""
        return max(0, length - self.window + 1) // self.size if self.window else 0

    def prefix(self, names: Sequence[bytes], n: int) -> int:
        """The most of the first n names whose next token finds all pages that it sees."""
        i = n
        while i > self.first(n * self.size):
            i -= 1
            if names[i] not in self.page_named:
                n = i
        return n

    def take(self) -> int:
        page, _ = self.free.popitem(last=False)
        if page in self.name_of:
            del self.page_named[self.name_of.pop(page)]
        self.holders[page] = 1
        return page

    def share(self, name: bytes) -> int:
        page = self.page_named[name]
        self.free.pop(page, None)
        self.holders[page] += 1
        return page

    def release(self, page: int) -> None:
        if page:
            self.holders[page] -= 1
            if not self.holders[page]:
                self.free[page] = None
                if page not in self.name_of:  # unnamed: to the front
                    self.free.move_to_end(page, last=False)

    def give_name(self, page: int, name: bytes) -> None:
        if name not in self.page_named:  # the first of two equal pages is shared
            self.name_of[page], self.page_named[name] = name, page


class PagePool:
    """Assign pages to sequences. A step is grow(), the model's writes, advance().

    Args:
        n_pages: pages for the layers of each window (None: no window); page 0 is not used.

    Raises ValueError: n_pages < 2 or page_size < 1.
    """

    def __init__(self, n_pages: Mapping[int | None, int], page_size: int) -> None:
        if (least := min(n_pages.values())) < 2:
            raise ValueError(f"n_pages must be at least 2 (page 0 is not used), got {least}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.n_pages, self.page_size = dict(n_pages), page_size
        self._of = {window: _Pages(n, page_size, window) for window, n in n_pages.items()}
        self._sequences: dict[int, _Held] = {}
        self._numbers: list[int] = []  # of ended sequences

    def n_free(self, window: int | None = None) -> int:
        """Pages that no sequence holds."""
        return len(self._of[window].free)

    def n_used(self, window: int | None = None) -> int:
        """Pages that some sequence holds."""
        return self.n_pages[window] - 1 - self.n_free(window)

    def pages(self, seq: int, window: int | None = None) -> tuple[int, ...]:
        """The pages of a sequence, in order; 0: no later token sees it."""
        return tuple(self._held(seq).pages[window])

    def length(self, seq: int) -> int:
        return self._held(seq).length

    def new(self, tokens: Sequence[int] = ()) -> int:
        """Begin a sequence that will start with `tokens`; return its number, the last one freed
        or the next.

        It shares the named pages of a prefix. At least the last token needs a prefill, for its
        logits. Its own full pages get names.
        """
        names, n = self._names(tokens), max(0, len(tokens) - 1) // self.page_size
        while (least := min(pages.prefix(names, n) for pages in self._of.values())) < n:
            n = least
        held = _Held(names, n * self.page_size)
        for window, pages in self._of.items():
            first = pages.first(held.length)
            held.pages[window] = [0] * first + [pages.share(name) for name in names[first:n]]
        seq = self._numbers.pop() if self._numbers else len(self._sequences)
        self._sequences[seq] = held
        return seq

    def free(self, seq: int) -> None:
        """End a sequence and free its pages."""
        held = self._held(seq)
        del self._sequences[seq]
        self._numbers.append(seq)
        for window, pages in self._of.items():
            for page in reversed(held.pages[window]):
                pages.release(page)

    def grow(self, counts: Mapping[int, int]) -> None:
        """Reserve room for `counts` (sequence -> tokens of this step).

        Raises OutOfPages, with nothing changed, or ValueError: no such sequence.
        """

        def missing(seq: int, window: int | None) -> int:
            held = self._held(seq)  # more, if an earlier step reserved more than it used
            pages = pages_for(held.length + counts[seq], self.page_size)
            return max(0, pages - len(held.pages[window]))

        for window, pages in self._of.items():
            needed, free = sum(missing(seq, window) for seq in counts), len(pages.free)
            if needed > free:
                raise OutOfPages(f"out of KV cache pages: {needed} needed, {free} free")
        for window, pages in self._of.items():
            for seq in counts:
                taken = [pages.take() for _ in range(missing(seq, window))]
                self._sequences[seq].pages[window] += taken

    def advance(self, counts: Mapping[int, int]) -> None:
        """Count the tokens of grow(counts) as stored; free the pages that nothing sees any more."""
        for seq, n in counts.items():
            held = self._held(seq)
            before, held.length = held.length, held.length + n
            full = range(before // self.page_size, held.length // self.page_size)
            for window, pages in self._of.items():
                numbers = held.pages[window]
                for i, name in zip(full, held.names[full.start :]):
                    pages.give_name(numbers[i], name)
                for i in range(pages.first(before), pages.first(held.length)):
                    pages.release(numbers[i])
                    numbers[i] = 0

    def _held(self, seq: int) -> _Held:
        if seq not in self._sequences:
            raise ValueError(f"no sequence {seq}")
        return self._sequences[seq]

    def _names(self, tokens: Sequence[int]) -> list[bytes]:
        """The names of the full pages of these tokens."""
        name, found = b"", []
        for end in range(self.page_size, len(tokens) + 1, self.page_size):
            ids = array("q", tokens[end - self.page_size : end])
            name = hashlib.blake2b(name + ids.tobytes(), digest_size=16).digest()
            found.append(name)
        return found
