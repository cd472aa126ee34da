"""The page pool of a paged KV cache. No torch.

Layers with the same window share page numbers; a page that no later token sees is freed (0). A full
page's name hashes its token ids and the previous name: new sequences share pages of equal names.
Free pages keep their content until reuse, unnamed ones first. Source: Kwon et al. 2023,
"PagedAttention" (arXiv 2309.06180), sections 4.2 to 4.4; vLLM's hashes.

    pages, page_size = 2          held by        name
    1   "the cat"                 A B            h1 = hash("the cat")
    2   "sat on"                  A              h2 = hash(h1, "sat on")
    3   "a"                       B              none: it is not full
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence

PAGE_SIZE = 16  # tokens


class OutOfPages(RuntimeError): ...


def pages_for(tokens: int, page_size: int, window: int | None = None) -> int:
    """With a window: the most that one token sees."""
    n = -(-tokens // page_size)
    return n if window is None else min(n, (window - 2) // page_size + 2)


def names_of(tokens: Sequence[int], page_size: int) -> list[bytes]:
    name, found = b"", []
    for end in range(page_size, len(tokens) + 1, page_size):
        ids = array("q", tokens[end - page_size : end])
        name = hashlib.blake2b(name + ids.tobytes(), digest_size=16).digest()
        found.append(name)
    return found


class _Pages:
    """Pages 1 .. n - 1 of the layers with one window; None: no window."""

    def __init__(self, n: int, page_size: int, window: int | None) -> None:
        self.size, self.window = page_size, window
        self.held: dict[int, list[int]] = {}  # by each sequence
        self.holders = [0] * n  # sequences that hold each page
        self.free = OrderedDict.fromkeys(range(1, n))
        self.page_named: dict[bytes, int] = {}
        self.name_of: dict[int, bytes] = {}

    def first(self, length: int) -> int:
        return max(0, length - self.window + 1) // self.size if self.window else 0

    def prefix(self, names: Sequence[bytes], n: int) -> int:
        """The most of the first n pages whose next token finds all that it sees."""
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
        self.holders[page] -= 1
        if page and not self.holders[page]:
            self.free[page] = None
            if page not in self.name_of:
                self.free.move_to_end(page, last=False)


class PagePool:
    """A step is grow(), the model's writes, advance().

    n_pages: of each window (None: no window); page 0 is not used.
    """

    def __init__(self, n_pages: Mapping[int | None, int], page_size: int) -> None:
        if (least := min(n_pages.values())) < 2:
            raise ValueError(f"n_pages must be at least 2 (page 0 is not used), got {least}")
        self.n_pages, self.page_size = dict(n_pages), page_size
        self._of = {window: _Pages(n, page_size, window) for window, n in n_pages.items()}
        self._lengths: dict[int, int] = {}  # stored tokens; the pages can hold more
        self._names: dict[int, list[bytes]] = {}  # of full pages
        self._numbers: list[int] = []  # of ended sequences

    def n_free(self, window: int | None = None) -> int:
        return len(self._of[window].free)

    def n_used(self, window: int | None = None) -> int:
        return self.n_pages[window] - 1 - self.n_free(window)

    def pages(self, seq: int, window: int | None = None) -> tuple[int, ...]:
        """Pages of a sequence; 0: no later token sees it."""
        return tuple(self._of[window].held[seq])

    def length(self, seq: int) -> int:
        return self._lengths[seq]

    def new(self, tokens: Sequence[int] = ()) -> int:
        """Return a sequence's number: the last one freed, or the next. The last of `tokens` is not
        shared: its logits need a prefill."""
        names, n = names_of(tokens, self.page_size), max(0, len(tokens) - 1) // self.page_size
        while (least := min(pages.prefix(names, n) for pages in self._of.values())) < n:
            n = least
        seq = self._numbers.pop() if self._numbers else len(self._lengths)
        self._names[seq], self._lengths[seq] = names, n * self.page_size
        for pages in self._of.values():
            first = pages.first(n * self.page_size)
            pages.held[seq] = [0] * first + [pages.share(name) for name in names[first:n]]
        return seq

    def free(self, seq: int) -> None:
        del self._names[seq], self._lengths[seq]
        self._numbers.append(seq)
        for pages in self._of.values():
            for page in reversed(pages.held.pop(seq)):
                pages.release(page)

    def grow(self, counts: Mapping[int, int]) -> None:
        """Reserve room: sequence -> new tokens. Raises OutOfPages, with nothing changed."""
        ends = {seq: pages_for(self._lengths[seq] + n, self.page_size) for seq, n in counts.items()}
        for pages in self._of.values():
            # An earlier step may have left some.
            needed = sum(max(0, end - len(pages.held[seq])) for seq, end in ends.items())
            if needed > (free := len(pages.free)):
                raise OutOfPages(f"out of KV cache pages: {needed} needed, {free} free")
        for pages in self._of.values():
            for seq, end in ends.items():
                pages.held[seq] += [pages.take() for _ in range(len(pages.held[seq]), end)]

    def advance(self, counts: Mapping[int, int]) -> None:
        """Count the tokens of grow() as stored; free pages that nothing sees."""
        for seq, n in counts.items():
            before, after = self._lengths[seq], self._lengths[seq] + n
            self._lengths[seq] = after
            full = range(before // self.page_size, after // self.page_size)
            for pages in self._of.values():
                numbers = pages.held[seq]
                for i, name in zip(full, self._names[seq][full.start :]):
                    if name not in pages.page_named:  # the first of two equal pages is shared
                        pages.page_named[name] = numbers[i]
                        pages.name_of[numbers[i]] = name
                for i in range(pages.first(before), pages.first(after)):
                    pages.release(numbers[i])
                    numbers[i] = 0
