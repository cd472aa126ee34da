"""The page pool under random load. Caches are in test_paged.py."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from inference.pages import OutOfPages, PagePool


class RandomLoad(RuleBasedStateMachine):
    """A token's memory holds all tokens up to it."""

    @initialize(
        n_pages=st.dictionaries(
            st.sampled_from([None, 1, 2, 3, 5, 8]), st.integers(2, 14), min_size=1, max_size=3
        ),
        page_size=st.integers(1, 4),
    )
    def make(self, n_pages: dict[int | None, int], page_size: int) -> None:
        self.pool = PagePool(n_pages, page_size)
        self.prompts: dict[int, list[int]] = {}
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.memory: dict[tuple[int | None, int, int], Any] = {}

    def some(self, data: st.DataObject) -> list[int]:
        each = st.sampled_from(sorted(self.tokens))
        return data.draw(st.lists(each, min_size=1, unique=True, max_size=4))

    @precondition(lambda self: len(self.tokens) < 8)
    @rule(tokens=st.lists(st.integers(0, 1), max_size=14))
    def new(self, tokens: list[int]) -> None:
        seq = self.pool.new(tokens)
        assert seq not in self.tokens
        known = self.pool.length(seq)
        assert known % self.pool.page_size == 0 and known < max(len(tokens), 1)
        self.prompts[seq], self.tokens[seq] = tokens, tuple(tokens[:known])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), fails=st.booleans())
    def step(self, data: st.DataObject, fails: bool) -> None:
        """A few tokens of some sequences, the prompt first. A failed step is repeated."""
        pool, size, new = self.pool, self.pool.page_size, {}
        for seq in self.some(data):
            more = data.draw(st.lists(st.integers(0, 1), max_size=6))
            coming = self.prompts[seq][len(self.tokens[seq]) :][: len(more)]
            new[seq] = (*coming, *more[len(coming) :])
        counts = {seq: len(added) for seq, added in new.items()}
        left = {}  # free pages afterwards
        for window in pool.n_pages:
            ends = {seq: len(self.tokens[seq]) + n for seq, n in counts.items()}
            more = [-(-end // size) - len(pool.pages(seq, window)) for seq, end in ends.items()]
            left[window] = pool.n_free(window) - sum(max(0, n) for n in more)
        if min(left.values()) < 0:
            before = self.state()
            with pytest.raises(OutOfPages):
                pool.grow(counts)
            assert self.state() == before
            return
        pool.grow(counts)
        assert {window: pool.n_free(window) for window in left} == left
        for seq, added in new.items():
            for window in left:
                held = pool.pages(seq, window)
                for i, _ in enumerate(added):
                    at = len(self.tokens[seq]) + i
                    stored = "half a step" if fails else (*self.tokens[seq], *added[: i + 1])
                    self.memory[window, held[at // size], at % size] = stored
        if not fails:
            pool.advance(counts)
            self.tokens |= {seq: self.tokens[seq] + added for seq, added in new.items()}

    @precondition(lambda self: self.tokens)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        for seq in self.some(data):
            self.pool.free(seq)
            del self.tokens[seq]
            with pytest.raises(ValueError, match=str(seq)):
                self.pool.pages(seq)

    def state(self) -> Any:
        pool = self.pool
        pages = {(w, seq): pool.pages(seq, w) for w in pool.n_pages for seq in self.tokens}
        return pages, [*map(pool.n_free, pool.n_pages)], [*map(pool.length, self.tokens)]

    @invariant()
    def every_sequence_reads_its_own_tokens_and_a_window_keeps_no_more(self) -> None:
        size = self.pool.page_size
        for seq, tokens in self.tokens.items():
            assert self.pool.length(seq) == len(tokens)
            for window in self.pool.n_pages:
                held = self.pool.pages(seq, window)
                # What the next token sees, itself included.
                first = 0 if window is None else max(0, len(tokens) + 1 - window)
                assert not any(held[: first // size])
                for at in range(first, len(tokens)):
                    stored = self.memory[window, held[at // size], at % size]
                    assert stored == tokens[: at + 1]

    @invariant()
    def no_page_is_lost(self) -> None:
        for window, n in self.pool.n_pages.items():
            used = {page for seq in self.tokens for page in self.pool.pages(seq, window)} - {0}
            assert self.pool.n_used(window) == len(used) == n - 1 - self.pool.n_free(window)
            assert used <= set(range(1, n))

    def teardown(self) -> None:
        for seq in self.tokens:
            self.pool.free(seq)
        assert not any(map(self.pool.n_used, self.pool.n_pages))
        everything = self.pool.new()
        n = min(self.pool.n_pages.values()) - 1
        self.pool.grow({everything: n * self.pool.page_size})
        assert all(len({*self.pool.pages(everything, window)}) == n for window in self.pool.n_pages)


def test_the_pool_under_random_load() -> None:
    how = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True,
                   database=None, phases=[Phase.generate])
    run_machine(RandomLoad, settings=how)


def test_a_window_shares_the_pages_that_it_sees() -> None:
    """Page 0 was freed in the layers with a window: a longer prefix is still shared."""
    pool, prompt = PagePool({None: 20, 5: 6}, 4), list(range(100, 112))

    def write(seq: int, n: int) -> None:
        pool.grow({seq: n})
        pool.advance({seq: n})

    write(pool.new(prompt), 12)
    b = pool.new([*prompt, 1])
    assert pool.length(b) == 12
    assert pool.pages(b, 5)[:2] == (0, 0) and pool.pages(b, 5)[2] > 0 and all(pool.pages(b))
    write(pool.new(), 16)  # takes all free pages of the window's layers
    assert pool.length(pool.new([*prompt, 1])) == 12
    assert pool.length(pool.new(prompt[:9])) == 0
    assert pool.length(pool.new([*prompt[:4], 0, *prompt[5:]])) == 0
