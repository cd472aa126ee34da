"""The page pool under random load. Caches are in test_paged.py."""

from __future__ import annotations

import random
from typing import Any

import pytest

from inference.pages import OutOfPages, PagePool, pages_for


class Load:
    """Sequences of a pool. A token's memory holds all tokens up to it."""

    def __init__(self, draw: random.Random) -> None:
        windows = draw.sample([None, 1, 2, 3, 5, 8], draw.randint(1, 3))
        self.draw, self.size = draw, draw.randint(1, 4)
        self.pool = PagePool({window: draw.randint(2, 14) for window in windows}, self.size)
        self.prompts: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.memory: dict[tuple[int | None, int, int], Any] = {}

    def tokens(self, n: int) -> list[int]:
        return self.draw.choices((0, 1), k=n)

    def begin(self) -> None:
        prompt = self.tokens(self.draw.randint(0, 14))
        seq = self.pool.new(prompt)
        known = self.pool.length(seq)
        assert seq not in self.texts
        assert known % self.size == 0 and known < max(len(prompt), 1)
        self.prompts[seq], self.texts[seq] = prompt, prompt[:known]

    def end(self) -> None:
        seq = self.draw.choice([*self.texts])
        self.pool.free(seq)
        del self.texts[seq]
        with pytest.raises(KeyError, match=str(seq)):
            self.pool.length(seq)

    def step(self) -> None:
        """A few tokens of some sequences, the prompt first. A failed step is repeated."""
        pool, new, fails = self.pool, {}, self.draw.random() < 0.3
        for seq in self.draw.sample([*self.texts], self.draw.randint(1, len(self.texts))):
            n = self.draw.randint(0, 6)
            coming = self.prompts[seq][len(self.texts[seq]) :][:n]
            new[seq] = coming + self.tokens(n - len(coming))
        counts = {seq: len(added) for seq, added in new.items()}
        left = {window: pool.n_free(window) for window in pool.n_pages}
        for window in left:
            for seq, n in counts.items():
                pages = -(-(len(self.texts[seq]) + n) // self.size)
                left[window] -= max(0, pages - len(pool.pages(seq, window)))
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
                for at in range(len(self.texts[seq]), len(self.texts[seq]) + len(added)):
                    text = "half a step" if fails else (self.texts[seq] + added)[: at + 1]
                    self.memory[window, held[at // self.size], at % self.size] = text
        if not fails:
            pool.advance(counts)
            self.texts |= {seq: self.texts[seq] + added for seq, added in new.items()}

    def state(self) -> Any:
        pages = {(w, seq): self.pool.pages(seq, w) for w in self.pool.n_pages for seq in self.texts}
        return pages, [*map(self.pool.n_free, self.pool.n_pages)]

    def check(self) -> None:
        """Each sequence reads its own tokens, a window keeps no more, and no page is lost."""
        for window, n in self.pool.n_pages.items():
            used = set()
            for seq, text in self.texts.items():
                assert self.pool.length(seq) == len(text)
                held = self.pool.pages(seq, window)
                used |= {*held} - {0}
                # What the next token sees, itself included.
                first = 0 if window is None else max(0, len(text) + 1 - window)
                assert not any(held[: first // self.size])
                for at in range(first, len(text)):
                    key = window, held[at // self.size], at % self.size
                    assert self.memory[key] == text[: at + 1]
            assert self.pool.n_used(window) == len(used) == n - 1 - self.pool.n_free(window)
            assert used <= {*range(1, n)}


def test_the_pool_under_random_load() -> None:
    for seed in (*range(400), 1109, 1186, 1280):  # whose windows disagree on a shared prefix
        load = Load(random.Random(seed))
        for _ in range(60):
            able = [load.begin] if len(load.texts) < 8 else []
            able += [load.step, load.step, load.end] if load.texts else []
            load.draw.choice(able)()
            load.check()


@pytest.mark.parametrize("window", [1, 2, 3, 5, 8, None])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_sequence_holds_what_pages_for_says(size: int, window: int | None) -> None:
    pool = PagePool({window: 40}, size)
    seq, most = pool.new(), 0
    for n in range(1, 31):
        pool.grow({seq: 1})
        most = max(most, pool.n_used(window))
        pool.advance({seq: 1})
        assert pages_for(n, size, window) == most
