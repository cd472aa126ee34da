"""The page pool against a naive model under random load, and its rules one by one. No torch."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
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

PATH = Path(__file__).parents[1] / "inference" / "pages.py"


def load() -> Any:
    """inference/pages.py by itself: `import attention` would import torch."""
    found = importlib.util.spec_from_file_location("pages_alone", PATH)
    assert found is not None and found.loader is not None
    module = sys.modules["pages_alone"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


pages = load()
PagePool, OutOfPages = pages.PagePool, pages.OutOfPages


def test_the_pool_imports_no_torch() -> None:
    code = f"""if True:
        import importlib.util, sys
        found = importlib.util.spec_from_file_location("pages", {str(PATH)!r})
        module = sys.modules["pages"] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        pool = module.PagePool(9, 4)
        pool.grow({{pool.new(): 7}})
        assert "torch" not in sys.modules and pool.n_used == 2"""
    subprocess.run([sys.executable, "-c", code], check=True)


def write(pool: Any, seq: int, n: int) -> None:
    """One step: n tokens more of one sequence."""
    pool.grow({seq: n})
    pool.advance({seq: n})


def filled(pool: Any, tokens: list[int]) -> int:
    """A sequence of these tokens, stored and remembered."""
    seq: int = pool.new(tokens)
    write(pool, seq, len(tokens) - pool.length(seq))
    pool.remember(seq, tokens)
    return seq


# --- under random load ---


class RandomLoad(RuleBasedStateMachine):
    """A memory is kept as a cache would: what is stored for a token is all tokens up to it.

    A page that is shared or taken back wrongly then shows as a sequence that does not read
    its own tokens.
    """

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

        needed = 0  # places that are reserved already count for nothing
        for seq, n in counts.items():
            after = len(self.tokens[seq]) + n
            needed += max(0, (after + size - 1) // size - len(pool.pages(seq)))
        if needed > pool.n_free:
            before = self.state()
            with pytest.raises(OutOfPages, match=f"{needed} needed, {pool.n_free} free"):
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
            with pytest.raises(ValueError, match=f"no sequence {seq}"):
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


def random_load(max_examples: int) -> None:
    """Without a phase that shrinks: a failure is told at once, by the example that it had."""
    run_state_machine_as_test(
        RandomLoad,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            phases=[Phase.generate],
        ),
    )


def test_under_random_load() -> None:
    random_load(60)


@pytest.mark.slow
def test_under_much_random_load() -> None:
    random_load(400)


# --- growing ---


def test_pages_are_taken_as_they_are_needed() -> None:
    pool = PagePool(8, 4)
    a, b = pool.new(), pool.new()
    taken = []
    for n in (1, 3, 1, 8):
        pool.grow({a: n, b: 0})
        pool.advance({a: n, b: 0})
        taken.append((pool.length(a), len(pool.pages(a)), pool.n_used, pool.n_free))
    assert taken == [(1, 1, 1, 6), (4, 1, 1, 6), (5, 2, 2, 5), (13, 4, 4, 3)]
    assert pool.pages(b) == () and pool.length(b) == 0
    assert len(set(pool.pages(a))) == 4 and 0 not in pool.pages(a)


def test_what_was_reserved_and_not_used_is_not_reserved_twice() -> None:
    pool = PagePool(8, 4)
    a = pool.new()
    pool.grow({a: 9})
    held = pool.pages(a)
    assert pool.length(a) == 0 and len(held) == 3
    for n in (9, 1, 12):
        pool.grow({a: n})
        assert pool.pages(a) == held
    with pytest.raises(AssertionError):
        pool.advance({a: 13})
    assert pool.length(a) == 0


def test_when_no_page_is_free_nothing_changes() -> None:
    pool = PagePool(4, 2)
    a, b = pool.new(), pool.new()
    write(pool, a, 3)
    held = pool.pages(a)
    with pytest.raises(OutOfPages) as e:
        pool.grow({a: 2, b: 1})  # a page for each, and one is free
    assert str(e.value) == "out of KV cache pages: 2 needed, 1 free"
    assert pool.pages(a) == held and pool.pages(b) == () and pool.n_free == 1
    pool.grow({b: 2})
    assert pool.n_free == 0
    with pytest.raises(OutOfPages, match="1 needed, 0 free"):  # the room that a has is no help to b
        pool.grow({a: 1, b: 3})


def test_pages_for() -> None:
    assert [PagePool(4, 4).pages_for(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]


# --- sharing ---


def test_a_common_prompt_is_stored_once() -> None:
    pool = PagePool(20, 4)
    prompt = list(range(100, 110))  # two full pages and two tokens
    a = filled(pool, [*prompt, 1, 2, 3])
    b = pool.new([*prompt, 7, 8, 9])
    assert pool.length(b) == 8 and pool.pages(b) == pool.pages(a)[:2]
    write(pool, b, 5)
    assert pool.n_used == 4 + 2
    pool.free(a)
    assert pool.n_used == 4  # b's
    c = pool.new([*prompt[:4], 0, *prompt[5:]])
    assert pool.pages(c) == pool.pages(b)[:1]
    assert pool.pages(pool.new([0, *prompt[1:]])) == ()


def test_the_last_token_is_always_left_to_compute() -> None:
    pool = PagePool(20, 4)
    filled(pool, list(range(12)))
    lengths = [pool.length(pool.new(list(range(n)))) for n in (0, 1, 4, 5, 8, 9, 12, 13)]
    assert lengths == [0, 0, 0, 4, 4, 8, 8, 12]


def test_the_same_tokens_after_another_beginning_are_another_page() -> None:
    pool = PagePool(20, 2)
    a = filled(pool, [1, 2, 5, 6])
    assert pool.pages(pool.new([5, 6, 0])) == ()
    assert pool.pages(pool.new([3, 4, 5, 6, 0])) == ()
    assert pool.pages(pool.new([1, 2, 5, 6, 0])) == pool.pages(a)


def test_only_what_is_stored_is_remembered() -> None:
    pool = PagePool(20, 2)
    a = pool.new()
    pool.grow({a: 6})
    pool.remember(a, [1, 2, 3, 4, 5, 6])
    assert pool.length(pool.new([1, 2, 3, 4, 5, 6])) == 0
    pool.advance({a: 3})
    pool.remember(a, [1, 2, 3, 4, 5, 6])
    assert pool.length(pool.new([1, 2, 3, 4, 5, 6])) == 2
    pool.advance({a: 3})
    pool.remember(a, [1, 2, 3, 4])
    assert pool.length(pool.new([1, 2, 3, 4, 5, 6, 7])) == 4


def test_the_same_prompt_computed_twice_is_shared_from_then_on() -> None:
    pool = PagePool(20, 2)
    a, b = pool.new([1, 2, 3]), pool.new([1, 2, 3])  # neither knows of the other
    for seq in (a, b):
        write(pool, seq, 3)
    pool.remember(b, [1, 2, 3])
    pool.remember(a, [1, 2, 3])
    assert pool.pages(pool.new([1, 2, 3])) == pool.pages(b)[:1] != pool.pages(a)[:1]
    pool.free(b)
    assert pool.pages(a)[0] not in pool.pages(filled(pool, [1, 2, 4]))


def test_content_outlives_its_sequence_until_the_place_is_needed() -> None:
    pool = PagePool(7, 2)
    a = filled(pool, [1, 2, 3, 4, 5])  # pages 1, 2 and 3; the last is not full and has no name
    b = filled(pool, [6, 7, 8])  # pages 4 and 5
    assert pool.pages(a) == (1, 2, 3) and pool.pages(b) == (4, 5)
    pool.free(a)
    pool.free(b)
    assert pool.n_free == 6
    again = pool.new([1, 2, 3, 4, 0])
    assert pool.pages(again) == (1, 2) and pool.n_free == 4
    pool.free(again)
    d = pool.new()
    write(pool, d, 1)
    pool.free(d)  # given back last, but nothing in it is known
    c = pool.new()
    pool.grow({c: 6})  # the pages without a name come first
    assert sorted(pool.pages(c)) == [3, 5, 6]
    pool.grow({c: 8})  # then what was given back first
    assert pool.pages(c)[3] == 4 and pool.length(pool.new([6, 7, 8])) == 0
    pool.grow({c: 10})  # and of one sequence its end before its beginning
    assert pool.pages(c)[4] == 2
    assert pool.pages(pool.new([1, 2, 3, 4, 0])) == (1,)


# --- errors ---


def test_the_same_calls_give_the_same_pages() -> None:
    def pages_of() -> list[Any]:
        pool = PagePool(30, 3)
        rows = [filled(pool, [n % 3 for n in range(length)]) for length in (7, 4, 11)]
        pool.free(rows[1])
        rows.append(pool.new([n % 3 for n in range(9)]))
        pool.grow({rows[0]: 4, rows[3]: 2})
        return [pool.pages(rows[n]) for n in (0, 2, 3)]

    assert pages_of() == pages_of()


def test_mistakes_are_errors_and_change_nothing() -> None:
    for n_pages, page_size in ((1, 4), (0, 4), (8, 0)):
        with pytest.raises(ValueError, match="must be at least"):
            PagePool(n_pages, page_size)
    pool = PagePool(8, 4)
    a, b = pool.new(), pool.new()
    pool.free(b)
    for call in (lambda: pool.free(b), lambda: pool.grow({a: 5, b: 1}),
                 lambda: pool.advance({b: 0}), lambda: pool.remember(7, [])):  # fmt: skip
        with pytest.raises(ValueError, match=r"there is no sequence \d: it was freed, or never"):
            call()
    assert pool.n_used == 0 and pool.pages(a) == () and pool.new() not in (a, b)
    c = filled(pool, list(range(9)))
    with pytest.raises(AssertionError, match="its tokens were others before"):
        pool.remember(c, [0, 1, 2, 3, 4, 5, 6, 0])
    assert pool.length(pool.new(list(range(9)))) == 8
