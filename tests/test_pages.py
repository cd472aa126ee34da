"""The page pool against a naive model under random load."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inference.pages import OutOfPages, PagePool


def write(pool: PagePool, seq: int, n: int) -> None:
    pool.grow({seq: n})
    pool.advance({seq: n})


class RandomLoad(RuleBasedStateMachine):
    """The memory of a token holds all tokens up to it: each sequence must read its own."""

    @initialize(n_pages=st.integers(2, 14), page_size=st.integers(1, 4))
    def make(self, n_pages: int, page_size: int) -> None:
        self.pool = PagePool(n_pages, page_size)
        self.tokens: dict[int, tuple[int, ...]] = {}
        self.memory: dict[tuple[int, int], Any] = {}

    def some(self, data: st.DataObject, least: int = 1) -> list[int]:
        return data.draw(st.lists(st.sampled_from(sorted(self.tokens)), min_size=least, unique=True,
                                  max_size=4))  # fmt: skip

    @precondition(lambda self: len(self.tokens) < 8)
    @rule(tokens=st.lists(st.integers(0, 1), max_size=14))
    def new(self, tokens: list[int]) -> None:
        seq = self.pool.new(tokens)
        assert seq not in self.tokens
        known = self.pool.length(seq)
        assert known % self.pool.page_size == 0 and known < max(len(tokens), 1)
        self.tokens[seq] = tuple(tokens[:known])

    @precondition(lambda self: self.tokens)
    @rule(data=st.data(), remember=st.booleans(), fails=st.booleans())
    def step(self, data: st.DataObject, remember: bool, fails: bool) -> None:
        pool, size = self.pool, self.pool.page_size
        rows = self.some(data)
        new = {seq: tuple(data.draw(st.lists(st.integers(0, 1), max_size=6))) for seq in rows}
        counts = {seq: len(added) for seq, added in new.items()}

        needed = 0
        for seq, n in counts.items():
            after = len(self.tokens[seq]) + n
            needed += max(0, (after + size - 1) // size - len(pool.pages(seq)))
        if needed > pool.n_free:
            before = self.state()
            with pytest.raises(OutOfPages, match=f"{needed} .*{pool.n_free} "):
                pool.grow(counts)
            assert self.state() == before
            return

        free = pool.n_free
        pool.grow(counts)
        assert pool.n_free == free - needed
        for seq, added in new.items():
            held = pool.pages(seq)
            for i, _ in enumerate(added):
                at = len(self.tokens[seq]) + i
                stored = "half a step" if fails else (*self.tokens[seq], *added[: i + 1])
                self.memory[held[at // size], at % size] = stored
        if fails:
            return
        pool.advance(counts)
        for seq, added in new.items():
            self.tokens[seq] += added
            if remember:
                pool.remember(seq, self.tokens[seq])

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
        return {seq: (pool.pages(seq), pool.length(seq)) for seq in self.tokens}, pool.n_free

    @invariant()
    def every_sequence_reads_its_own_tokens(self) -> None:
        size = self.pool.page_size
        for seq, tokens in self.tokens.items():
            held = self.pool.pages(seq)
            assert self.pool.length(seq) == len(tokens) <= len(held) * size
            for at in range(len(tokens)):
                assert self.memory[held[at // size], at % size] == tokens[: at + 1]

    @invariant()
    def no_page_is_lost(self) -> None:
        used = {page for seq in self.tokens for page in self.pool.pages(seq)}
        assert self.pool.n_used == len(used) <= self.pool.n_pages - 1
        assert self.pool.n_used + self.pool.n_free == self.pool.n_pages - 1
        assert used <= set(range(1, self.pool.n_pages))  # the null page is nobody's

    def teardown(self) -> None:
        for seq in self.tokens:
            self.pool.free(seq)
        assert self.pool.n_used == 0
        everything = self.pool.new()  # all pages can be taken again
        self.pool.grow({everything: (self.pool.n_pages - 1) * self.pool.page_size})
        assert sorted(self.pool.pages(everything)) == list(range(1, self.pool.n_pages))


def test_under_random_load() -> None:
    how = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True,
                   database=None, phases=[Phase.generate])  # fmt: skip
    run_state_machine_as_test(RandomLoad, settings=how)


def test_a_common_prompt_is_stored_once() -> None:
    pool = PagePool(20, 4)
    prompt = list(range(100, 110))  # two full pages and two tokens
    a = pool.new()
    write(pool, a, 13)
    pool.remember(a, [*prompt, 1, 2, 3])
    b = pool.new([*prompt, 7, 8, 9])
    assert pool.length(b) == 8 and pool.pages(b) == pool.pages(a)[:2]
    write(pool, b, 5)
    assert pool.n_used == 4 + 2
    pool.free(a)
    assert pool.n_used == 4  # b's
    c = pool.new([*prompt[:4], 0, *prompt[5:]])
    assert pool.pages(c) == pool.pages(b)[:1]
    assert pool.pages(pool.new([0, *prompt[1:]])) == ()
