"""The page pool: which pages of a paged KV cache belong to which sequence. No torch.

The name of a full page is a hash of its token ids and of the previous page's name. Equal names mean
equal prefixes: a new sequence shares the named pages of its prefix. A named page without holders
keeps its content until it is reused: unnamed pages go first, then named ones in the order in which
they were freed, the last page of a sequence before its first. ::

    pages, page_size = 2          held by        name
    1   "the cat"                 A B            h1 = hash("the cat")
    2   "sat on"                  A              h2 = hash(h1, "sat on")
    3   "ran to"                  B              h3 = hash(h1, "ran to")
    4   "a"                       B              none: it is not full

Page 0 is the null page, for padding. Only full pages are shared, so none is copied.

Source  Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), sections 4.2 to 4.4; vLLM's hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field


class OutOfPages(RuntimeError):
    """Not enough free pages."""


@dataclass
class _Held:
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens stored; the pages may have room for more


class PagePool:
    """Assign pages 1 .. n_pages - 1 to sequences. A step is grow(), the model's writes, advance().

    Raises:
        ValueError: n_pages < 2 or page_size < 1.
    """

    def __init__(self, n_pages: int, page_size: int) -> None:
        if n_pages < 2:
            raise ValueError(f"n_pages must be at least 2 (page 0 is not used), got {n_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.n_pages, self.page_size = n_pages, page_size
        self._held: dict[int, _Held] = {}
        self._holders = [0] * n_pages  # sequences that hold each page
        self._free = OrderedDict.fromkeys(range(1, n_pages))  # taken from the front
        self._page_named: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._next = 0

    @property
    def n_free(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Pages that some sequence holds."""
        return self.n_pages - 1 - len(self._free)

    def pages(self, seq: int) -> tuple[int, ...]:
        """The pages of a sequence, in order."""
        return tuple(self._of(seq).pages)

    def length(self, seq: int) -> int:
        """Tokens stored of a sequence."""
        return self._of(seq).length

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def new(self, tokens: Sequence[int] = ()) -> int:
        """Begin a sequence with the named pages of a prefix of `tokens`; return its number.

        At least the last token needs a prefill, for its logits.
        """
        held = _Held()
        for name in self._names(tokens, (len(tokens) - 1) // self.page_size):
            if name not in self._page_named:
                break
            page = self._page_named[name]
            held.pages.append(page)
            held.length += self.page_size
            self._free.pop(page, None)
            self._holders[page] += 1
        seq = self._next
        self._next += 1  # never reused: a stale number is an error
        self._held[seq] = held
        return seq

    def free(self, seq: int) -> None:
        """End a sequence and free its pages."""
        held = self._of(seq)
        del self._held[seq]
        for page in reversed(held.pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None
                if page not in self._name_of:  # unnamed: to the front
                    self._free.move_to_end(page, last=False)

    def grow(self, counts: Mapping[int, int]) -> None:
        """Reserve room for `counts` (sequence -> tokens of this step).

        Raises:
            OutOfPages: nothing was changed.
            ValueError: no such sequence.
        """
        more = {}
        for seq, n in counts.items():  # none if an earlier step reserved more than it used
            more[seq] = max(0, self.pages_for(self.length(seq) + n) - len(self.pages(seq)))
        if (needed := sum(more.values())) > self.n_free:
            raise OutOfPages(f"out of KV cache pages: {needed} needed, {self.n_free} free")
        for seq, n in more.items():
            self._held[seq].pages.extend(self._take() for _ in range(n))

    def advance(self, counts: Mapping[int, int]) -> None:
        """Count the tokens of grow(counts) as stored."""
        for seq, n in counts.items():
            held = self._of(seq)
            held.length += n

    def remember(self, seq: int, tokens: Sequence[int]) -> None:
        """Name the full pages of a sequence, which has these token ids, for new()."""
        held = self._of(seq)
        names = self._names(tokens, min(held.length, len(tokens)) // self.page_size)
        for page, name in zip(held.pages, names):
            if name not in self._page_named:  # the first of two equal pages is shared
                self._name_of[page], self._page_named[name] = name, page

    def _of(self, seq: int) -> _Held:
        if seq not in self._held:
            raise ValueError(f"no sequence {seq}")
        return self._held[seq]

    def _take(self) -> int:
        page, _ = self._free.popitem(last=False)
        if page in self._name_of:
            del self._page_named[self._name_of.pop(page)]
        self._holders[page] = 1
        return page

    def _names(self, tokens: Sequence[int], n: int) -> Iterator[bytes]:
        """The names of the first n pages of these tokens."""
        name = b""
        for i in range(n):
            ids = array("q", tokens[i * self.page_size : (i + 1) * self.page_size])
            name = hashlib.blake2b(name + ids.tobytes(), digest_size=16).digest()
            yield name
