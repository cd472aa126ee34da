"""The page pool: which page of a paged KV cache belongs to which sequence. Plain Python, no torch.

A sequence holds a list of pages, and pages are taken one by one as it grows: at most page_size - 1
places a sequence stand empty, whatever length it might have reached.

A common prompt need not be computed twice. A full page, which is never written to again, can be
given a name: a hash of its token ids and of the name of the page before it, so that equal names
mean equal beginnings. A new sequence takes the named pages that its own tokens begin with, and
every page counts the sequences that hold it. A named page that nobody holds keeps its content
until its place is needed: pages without a name are taken first, then the one that was given back
first, and of one sequence the last page before the first.

    pages, page_size = 2          held by        name
    1   "the cat"                 A B            h1 = hash("the cat")
    2   "sat on"                  A              h2 = hash(h1, "sat on")
    3   "ran to"                  B              h3 = hash(h1, "ran to")
    4   "a"                       B              none, it is not full

Page 0 is the null page: nobody's, and never handed out. inference/cache.py writes padding there.

Source  Kwon et al. 2023, "PagedAttention" (arXiv 2309.06180), sections 4.2 to 4.4; of its sharing
        only that of full pages, so that no page is ever copied. Names that are hashes over the
        whole beginning are vLLM's "automatic prefix caching", which came after the paper.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class OutOfPages(RuntimeError):
    """There are not enough free pages; nothing was changed."""


@dataclass
class _Held:
    """What one sequence holds."""

    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens stored; the pages may have room for more


class PagePool:
    """Hands out pages 1 .. n_pages - 1 to sequences, which are known by number.

    Each step is grow(), then the writing of the tokens, then advance(). Until advance() the new
    places are only reserved, and growing again takes nothing more.

    Raises:
        ValueError: no page besides the null page, or a page of no tokens.
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

    # --- what is there ---

    @property
    def n_free(self) -> int:
        """Pages that nobody holds, those with known content included."""
        return len(self._free)

    @property
    def n_used(self) -> int:
        """Pages that some sequence holds, each counted once."""
        return self.n_pages - 1 - len(self._free)

    def pages(self, seq: int) -> tuple[int, ...]:
        """The pages of a sequence, in the order of its tokens."""
        return tuple(self._of(seq).pages)

    def length(self, seq: int) -> int:
        """Tokens stored of a sequence."""
        return self._of(seq).length

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens fill."""
        return -(-tokens // self.page_size)

    # --- sequences come and go ---

    def new(self, tokens: Sequence[int] = ()) -> int:
        """A new sequence, which holds the known pages that `tokens` begin with.

        Their tokens count as stored: length() tells how many need not be computed. The last token
        is never among them, since its output is wanted.
        """
        held, name = _Held(), b""
        for i in range((len(tokens) - 1) // self.page_size):
            name = self._name(name, tokens, i)
            if name not in self._page_named:
                break
            held.pages.append(self._page_named[name])
        held.length = len(held.pages) * self.page_size
        for page in held.pages:
            self._free.pop(page, None)
            self._holders[page] += 1
        seq = self._next
        self._next += 1  # numbers are not used again, so that a stale one is noticed
        self._held[seq] = held
        return seq

    def free(self, seq: int) -> None:
        """End a sequence. A page that nobody else holds can be taken again."""
        held = self._of(seq)
        del self._held[seq]
        for page in reversed(held.pages):
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free[page] = None
                if page not in self._name_of:  # to the front: nothing in it is known
                    self._free.move_to_end(page, last=False)

    # --- a step ---

    def grow(self, counts: Mapping[int, int]) -> None:
        """Give each sequence the places for so many tokens more.

        Args:
            counts: sequence -> tokens that this step will store.

        Raises:
            OutOfPages: not enough for all of them together; nothing was changed.
            ValueError: no such sequence.
        """
        # What was reserved and not used yet is there already: then this is negative, or 0.
        more = {seq: self.pages_for(self.length(seq) + n) - len(self.pages(seq))
                for seq, n in counts.items()}  # fmt: skip
        needed = sum(n for n in more.values() if n > 0)
        if needed > self.n_free:
            raise OutOfPages(f"out of KV cache pages: {needed} needed, {self.n_free} free")
        for seq, n in more.items():
            self._held[seq].pages.extend(self._take() for _ in range(n))

    def advance(self, counts: Mapping[int, int]) -> None:
        """The tokens of grow(counts) have been written."""
        for seq, n in counts.items():
            held = self._of(seq)
            assert 0 <= n <= len(held.pages) * self.page_size - held.length, "grow() comes first"
            held.length += n

    def remember(self, seq: int, tokens: Sequence[int]) -> None:
        """Name the full pages of a sequence, so that new() finds them.

        Args:
            tokens: the ids of its tokens from the first on; they may be more than are stored.
        """
        held, name = self._of(seq), b""
        for i in range(min(held.length, len(tokens)) // self.page_size):
            name = self._name(name, tokens, i)
            page = held.pages[i]
            assert self._name_of.get(page, name) == name, "its tokens were others before"
            # Two sequences may have computed the same page: the first to be named is shared.
            if name not in self._page_named:
                self._name_of[page], self._page_named[name] = name, page

    # --- inside ---

    def _of(self, seq: int) -> _Held:
        if seq not in self._held:
            raise ValueError(f"there is no sequence {seq}: it was freed, or never made")
        return self._held[seq]

    def _take(self) -> int:
        page, _ = self._free.popitem(last=False)
        if page in self._name_of:  # its content is lost from here on
            del self._page_named[self._name_of.pop(page)]
        self._holders[page] = 1
        return page

    def _name(self, before: bytes, tokens: Sequence[int], i: int) -> bytes:
        """The name of the i-th page: 128 bits of a hash that nobody can make collide."""
        ids = array("q", tokens[i * self.page_size : (i + 1) * self.page_size])
        return hashlib.blake2b(before + ids.tobytes(), digest_size=16).digest()
