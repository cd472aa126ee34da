"""Continuous batching: every text is that of its prompt alone, and no page is lost or mistaken."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import closing
from itertools import count, islice
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_generate import PATTERN, Bytes, lively
from test_model import SHAPES, build, tokens
from torch import Tensor

from inference import constrain, engine, serve
from inference.cache import PagedCache
from inference.sampling import ENDED, Copy, Stats
from model import GPT

LENGTHS = (5, 1, 9, 5, 16, 12, 3, 7, 2, 20)


def some_prompts(**changes: Any) -> list[Tensor]:
    return [tokens(1, T, seed=i, **changes)[0] for i, T in enumerate(LENGTHS)]


def seeds() -> Iterator[torch.Generator]:
    return (torch.Generator().manual_seed(i) for i in count())


def alone(model: GPT, prompt: Any, n: int, index: int, **options: Any) -> list[int]:
    """What generate() makes of it, without a cache."""
    generator = torch.Generator().manual_seed(index)
    (text,) = engine.generate(model, [prompt], n, generator=[generator], kv_cache="none", **options)
    return text.tolist()


def whole(model: GPT, prompts: Any, n: Any, **options: Any) -> Iterator[tuple[int, Tensor]]:
    """Each text when it ends: the number of its prompt, its new tokens."""
    new: dict[int, list[int]] = {}
    with closing(serve.stream(model, prompts, n, **options)) as got:
        for index, token in got:
            row = new.setdefault(index, [])
            if token == ENDED:
                yield index, torch.tensor(row, dtype=torch.int64)
            else:
                row.append(token)


def texts_of(model: GPT, prompts: Any, n: Any, **options: Any) -> list[list[int]]:
    """In the order of the prompts."""
    found = dict(whole(model, prompts, n, generator=seeds(), **options))
    assert sorted(found) == list(range(len(found)))
    return [[*map(int, prompt), *found[i].tolist()] for i, prompt in enumerate(prompts)]


def server_of(*args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return serve._Server(*args, **options)


@torch.no_grad()
def texts_from(server: Any) -> dict[int, list[int]]:
    return {row.index: row.prompt + row.new for row, token in server.tokens() if token == ENDED}


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The page pools of the calls that are made."""
    made: list[Any] = []

    def note(*args: Any, **sizes: Any) -> Any:
        cache = PagedCache(*args, **sizes)
        made.append(cache.pool)
        return cache

    monkeypatch.setattr(serve, "PagedCache", note)
    return made


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(B, T) of each call of the model."""
    made: list[tuple[int, int]] = []
    hidden = GPT.hidden

    def note(self: GPT, idx: Tensor, *args: Any) -> Tensor:
        made.append(tuple(idx.shape))
        return hidden(self, idx, *args)

    monkeypatch.setattr(GPT, "hidden", note)
    return made


# --- the same tokens ---


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.0}, pytest.param({"top_p": 0.9}, marks=pytest.mark.slow)],
    ids=str,
)
def test_every_text_is_that_of_its_prompt_alone(shape, sampling, pools) -> None:
    """Up to the limit of 16 positions and beyond it; pools that hold all of the rows, or fewer."""
    model = lively(attention_backend="paged", attention_fallback=False, **SHAPES[shape])
    plain, prompts = lively(**SHAPES[shape]), some_prompts()
    for overflow, asked in (("slide", prompts), ("stop", prompts[:-1])):
        options = {**sampling, "overflow": overflow}
        want = [alone(plain, p, 14, i, **options) for i, p in enumerate(asked)]
        for page_size, slots, n_pages in ((4, 3, None), (16, 8, 4), (3, 4, 9)):
            sizes = {"page_size": page_size, "slots": slots, "n_pages": n_pages}
            assert texts_of(model, asked, 14, **sizes, **options) == want, sizes
    assert all(pool.n_used == 0 for pool in pools) and len(pools) == 6


def test_one_generator_for_all_and_none(pools) -> None:
    model = lively()

    def texts(**options: Any) -> list[Any]:
        found = whole(model, some_prompts(), 9, slots=3, **options)
        return sorted((i, text.tolist()) for i, text in found)

    once, again = (texts(generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert once == again
    state = torch.get_rng_state()
    assert texts() != texts() and not torch.equal(state, torch.get_rng_state())


def test_a_number_of_tokens_for_each_prompt() -> None:
    model, rooms = lively(), [3, 0, 14, 1, 5, 0, 2, 30, 7, 4]
    for overflow, n in (("slide", 10), ("stop", 9)):
        options = {"temperature": 0.0, "overflow": overflow}
        got = texts_of(model, some_prompts()[:n], iter(rooms), slots=3, **options)
        prompts = zip(some_prompts()[:n], rooms)
        assert got == [alone(model, p, room, i, **options) for i, (p, room) in enumerate(prompts)]
    assert texts_of(model, some_prompts(), 0, slots=2) == [p.tolist() for p in some_prompts()]
    assert list(whole(model, [], 5)) == []


def test_texts_end_with_stop(pools) -> None:
    """A token, several, or a function, which is told the number of the prompt."""
    model, prompts = lively(), some_prompts()
    full = [alone(model, p, 14, i) for i, p in enumerate(prompts)]
    numbers = set()

    def sums(index: int, new: list[int]) -> bool:
        numbers.add(index)
        assert new == full[index][len(prompts[index]) :][: len(new)]
        return sum(new) > 60

    for stop in (full[0][8], {full[0][8], full[3][6], full[2][20]}, sums):
        calls: Any = stop if callable(stop) else lambda _, new, stop=stop: new[-1] in (
            stop if isinstance(stop, set) else {stop})  # fmt: skip
        got = texts_of(model, prompts, 14, stop=stop, slots=3, page_size=4)
        for index, (text, prompt) in enumerate(zip(got, prompts)):
            T = len(prompt)
            ends = [n for n in range(1, 15) if calls(index, full[index][T : T + n])]
            assert text == full[index][: T + min(ends, default=14)]
    assert numbers == set(range(10))
    assert all(pool.n_used == 0 for pool in pools)


def test_tokens_come_one_by_one() -> None:
    model, prompts = lively(), some_prompts()
    got: dict[int, list[int]] = {}
    for index, token in serve.stream(model, prompts, 6, slots=4, temperature=0):
        new = got.setdefault(index, [])
        assert ENDED not in new
        new.append(token)
    want = [alone(model, p, 6, i, temperature=0) for i, p in enumerate(prompts)]
    assert [got[i] for i in range(10)] == [
        [*text[len(p) :], ENDED] for text, p in zip(want, prompts)
    ]


def test_a_text_is_handed_out_when_it_ends() -> None:
    """Those that are short before a long one that began earlier."""
    found = list(whole(lively(), some_prompts()[:5], iter([9, 2, 2, 2, 2]), slots=2))
    assert [index for index, _ in found] == [1, 2, 3, 4, 0]


# --- continuous batching ---


def test_a_prompt_enters_when_a_text_ends(calls) -> None:
    """No row idles, none is padded: what the model is given, step by step."""
    model, five = build(block_size=64).eval(), [tokens(1, 5, seed=i)[0] for i in range(4)]
    list(whole(model, five, iter([4, 2, 3, 2]), slots=2))
    assert calls == [
        (2, 5),  # prompts 0 and 1
        (2, 1),  # a token of each: text 1 ends
        (1, 5), (1, 1),  # prompt 2, and a token of text 0
        (2, 1),  # text 0 ends
        (1, 5), (1, 1),  # prompt 3, and text 2 ends
        (1, 1),
    ]  # fmt: skip


def test_prompts_of_like_lengths_are_read_together(calls, monkeypatch) -> None:
    model = build(block_size=64).eval()
    prompts = [tokens(1, T, seed=T)[0] for T in (30, 4, 31, 16, 7, 1)]
    list(whole(model, prompts, 1, slots=6))
    assert calls == [(3, 31), (2, 7), (1, 1)]
    monkeypatch.setattr(serve, "PREFILL", 62)
    calls.clear()
    list(whole(model, prompts, 1, slots=6))
    assert calls == [(2, 31), (1, 16), (2, 7), (1, 1)]


def test_prompts_are_taken_when_there_is_room_for_them() -> None:
    """From an iterator without end; what is done is forgotten."""
    taken = 0

    def endless() -> Iterator[Tensor]:
        nonlocal taken
        for i in count():
            taken += 1
            yield tokens(1, 1 + i % 9, seed=i)[0]

    server = server_of(build().eval(), endless(), 3, slots=3, page_size=4)
    done = 0
    with torch.no_grad(), closing(server.tokens()) as got:
        for row, token in islice(got, 400):
            done += token == ENDED
            assert taken - done <= 3 + (token == ENDED)
            assert row.index < taken
            assert len(server.rows) <= 3 and len(server.waiting) <= 3
            assert server.texts.shape == (3, server.texts.shape[1]) and server.texts.shape[1] <= 12
    assert done > 90 and server.pool.n_used == 0


# --- the pool ---


def test_a_prompt_waits_until_its_pages_are_free(calls, pools) -> None:
    """9 pages for texts that need 4, 2, 4 and 1: the third waits, and the last behind it."""
    model = lively(block_size=64)
    prompts = [tokens(1, T, seed=T)[0] for T in (10, 5, 12, 1)]
    stats = Stats()
    got = texts_of(model, prompts, iter([6, 3, 4, 4]), slots=4, n_pages=10, page_size=4,
                   temperature=0, stats=stats)  # fmt: skip
    rooms = (6, 3, 4, 4)
    want = [alone(model, p, n, i, temperature=0) for i, (p, n) in enumerate(zip(prompts, rooms))]
    assert got == want
    # Text 1 has 3 tokens; then there are 5 free pages, for text 2 and for text 3.
    entering = [(1, 10), (1, 5)], [(1, 12), (2, 1)]
    assert calls[:9] == [*entering[0], (2, 1), (2, 1), *entering[1], (3, 1), (3, 1), (2, 1)]
    assert stats.all_pages == 9 and 6 < stats.pages <= 9
    assert stats.cache_bytes == 10 * 4 * 512


def test_one_at_a_time_where_the_pool_holds_no_more(calls) -> None:
    model, prompts = lively(), some_prompts()
    for n_pages in (5, 6):  # 16 tokens in pages of 4
        calls.clear()
        got = texts_of(model, prompts, 14, slots=8, n_pages=n_pages, page_size=4, temperature=0)
        assert all(B == 1 for B, _ in calls)
        assert got == [alone(model, p, 14, i, temperature=0) for i, p in enumerate(prompts)]


def test_a_prompt_that_never_fits_is_told_after_those_before_it(pools) -> None:
    model, prompts = lively(block_size=64), some_prompts()
    done = []
    words = "prompt 4 needs 7 pages of 4 tokens, for its 16 tokens and 10 new ones, and the pool "
    with pytest.raises(ValueError, match=words + "has 6; raise n_pages"):
        for index, text in whole(model, prompts, 10, slots=4, n_pages=7, page_size=4):
            done.append((index, len(prompts[index]) + len(text)))
    assert sorted(done) == [(0, 15), (1, 11), (2, 19), (3, 15)]
    assert pools[0].n_used == 0


def test_enough_pages() -> None:
    """Those of the longest texts together, none longer than the context."""
    model = build(block_size=64)
    assert serve.enough_pages(model, [22, 1, 24, 2], 10, 2) == 1 + 2 + 3
    assert serve.enough_pages(model, [60], 100, 8, page_size=4) == 1 + 16
    for slots in (1, 3, 16):
        stats = Stats()
        n_pages = serve.enough_pages(model, LENGTHS, 9, slots, page_size=4)
        server = server_of(model, some_prompts(), 9, slots=slots, n_pages=n_pages, page_size=4,
                               stats=stats)  # fmt: skip
        with torch.no_grad():
            for _ in server.tokens():
                assert not server.waiting


def test_a_batch_has_the_pages_that_its_texts_need() -> None:
    """Of the size that was asked for: 11 and 9 tokens, the last of which is never stored."""
    stats = Stats()
    how: dict[str, Any] = {"kv_cache": "paged", "page_size": 4, "stats": stats}
    list(engine.stream(build(block_size=64).eval(), [tokens(1, 5)[0], tokens(1, 3)[0]], 6, **how))
    assert (stats.pages, stats.all_pages) == (3 + 2, 3 + 3)


# --- sharing ---


def test_samples_of_one_prompt_are_read_once(calls) -> None:
    """Seven tokens in pages of 4: the others wait a step for the full page, and read three."""
    model, prompt = lively(block_size=64), tokens(1, 7)[0]
    stats = Stats()
    got = texts_of(model, [prompt] * 5, 6, slots=5, page_size=4, stats=stats, top_k=9)
    assert calls == [(1, 7), (4, 3), (1, 1), *[(5, 1)] * 4, (4, 1)]
    assert got == [alone(model, prompt, 6, i, top_k=9) for i in range(5)] and got[0] != got[1]
    assert stats.shared_pages == 4
    assert stats.pages == 1 + 5 * 2  # 12 tokens each, of which 4 are everybody's


def test_samples_of_a_prompt_that_ends_with_its_page_wait_for_nothing(calls) -> None:
    """The last token is always read: there is no page that they could share."""
    got = texts_of(lively(block_size=64), [tokens(1, 4)[0]] * 3, 2, slots=3, page_size=4)
    assert calls == [(3, 4), (3, 1)] and len(got) == 3


def test_nobody_waits_for_the_beginning_of_a_text_that_slides(calls) -> None:
    prompt = tokens(1, 7)[0]
    texts_of(lively(), [prompt, prompt], iter([12, 2]), slots=2, page_size=4)
    assert calls[0] == (2, 7)


def test_samples_of_several_prompts_that_enter_together(calls) -> None:
    model, a, b = lively(block_size=64), tokens(1, 7)[0], tokens(1, 9, seed=1)[0]
    prompts = [a, b, a, b, b]
    got = texts_of(model, prompts, 6, slots=5, page_size=4, temperature=0)
    assert calls == [(2, 9), (1, 3), (4, 1), *[(5, 1)] * 4, (3, 1)]
    assert got == [alone(model, p, 6, i, temperature=0) for i, p in enumerate(prompts)]


def test_samples_that_come_later_find_the_full_pages(calls) -> None:
    model, prompt = lively(block_size=64), tokens(1, 11)[0]
    stats = Stats()
    texts_of(model, [prompt] * 4, 3, slots=2, page_size=4, stats=stats)
    assert calls == [
        (1, 11),  # sample 0
        (1, 3), (1, 1),  # 8 of its tokens are found; a token of sample 0
        (2, 1),  # sample 0 ends
        (1, 3), (1, 1),  # sample 2, and sample 1 ends
        (1, 3), (1, 1),
        (2, 1),
        (1, 1),
    ]  # fmt: skip
    assert stats.shared_pages == 2 * 3


def test_a_common_beginning_is_read_once(calls, pools) -> None:
    """Those that enter with the one that reads it wait a step."""
    model, same = lively(block_size=64), tokens(1, 9)[0]
    prompts = [torch.cat([same, tokens(1, n, seed=n)[0]]) for n in (2, 3, 1, 6)]
    prompts.append(tokens(1, 8, seed=50)[0])
    stats = Stats()
    got = texts_of(model, prompts, 4, slots=5, page_size=4, stats=stats, temperature=0)
    assert calls[:4] == [(2, 11), (2, 7), (1, 2), (2, 1)]  # 11 and 8 tokens, then 4, 2 and 7
    calls.clear()
    assert got == [alone(model, p, 4, i, temperature=0) for i, p in enumerate(prompts)]
    assert stats.shared_pages == 3 * 2
    n = [len(p) + 3 for p in prompts]
    assert stats.pages <= sum(-(-k // 4) for k in n) - 6


def test_pages_that_are_shared_let_more_prompts_in() -> None:
    """Alone each needs 5 pages; of 8, four are common."""
    model, same = lively(block_size=64), tokens(1, 16)[0]
    prompts = [torch.cat([same, tokens(1, 1, seed=n)[0]]) for n in range(5)]
    server = server_of(model, prompts, 3, slots=5, n_pages=9, page_size=4, temperature=0)
    most, got = 0, {}
    with torch.no_grad():
        for row, token in server.tokens():
            most = max(most, len(server.rows))
            if token == ENDED:
                got[row.index] = row.prompt + row.new
    assert most == 4
    assert got == {i: alone(model, p, 3, i, temperature=0) for i, p in enumerate(prompts)}


def test_texts_that_may_slide_share_nothing() -> None:
    """Else the pages that one gives up to begin anew could be held by another, and be lacking."""
    model, prompt, stats = lively(), tokens(1, 12)[0], Stats()
    prompts = [prompt, prompt, torch.cat([prompt, prompt]), prompt]
    for rooms in ([9, 2, 5, 9], [2, 9, 5, 9], [9, 9, 9, 9]):
        for n_pages in (5, 9, 13):
            got = texts_of(model, prompts, iter(rooms), slots=4, n_pages=n_pages, page_size=4,
                           stats=stats, temperature=0)  # fmt: skip
            zipped = enumerate(zip(prompts, rooms))
            assert got == [alone(model, p, n, i, temperature=0) for i, (p, n) in zipped]
    # The third enters when the first, of which it has the beginning, is about to slide.
    got = texts_of(model, [prompt, [7], prompt], iter([9, 1, 5]), slots=2, n_pages=7, page_size=4,
                   stats=stats, temperature=0)  # fmt: skip
    assert got[2] == alone(model, prompt, 5, 2, temperature=0)
    assert stats.shared_pages == 0


# --- under random load ---


class Stopped(Exception):
    """The reader, or what it gave, fails."""


def check_pages(server: Any, rooms: list[int]) -> None:
    """Two texts hold a page only where their tokens up to its end are the same.

    And the pages that are free are enough for every text in progress to reach its end.
    """
    pool, size = server.pool, server.pool.page_size
    read: dict[int, list[int]] = {}
    to_come = 0
    for row in server.rows:
        stored_in_the_end = min(len(row.prompt) + rooms[row.index] - 1, server.block_size)
        to_come += math.ceil(stored_in_the_end / size) - len(pool.pages(row.seq))
        length = pool.length(row.seq)
        begin = row.n - 1 - length  # what was drawn last is not stored
        assert begin == 0 or length == server.block_size
        text = (row.prompt + row.new)[begin:]
        for i, page in enumerate(pool.pages(row.seq)):
            stored = text[: min(length, (i + 1) * size)]
            assert read.setdefault(page, stored) == stored
    held = {page for row in server.rows for page in pool.pages(row.seq)}
    assert 0 not in held and pool.n_used == len(held)
    places = [*server.places, *(row.place for row in server.rows)]
    assert sorted(places) == list(range(server.slots))
    assert to_come <= pool.n_free


BRIEF = settings(max_examples=60, deadline=None, derandomize=True, database=None,
                 phases=[Phase.generate])  # fmt: skip


@BRIEF
@given(data=st.data())
def test_under_random_load(data) -> None:
    random_load(data)


@pytest.mark.slow
@settings(BRIEF, max_examples=500)
@given(data=st.data())
def test_under_much_random_load(data) -> None:
    random_load(data)


def random_load(data: st.DataObject) -> None:
    """Prompts with common beginnings, pools of any size, texts that stop, readers that leave."""
    model = random_model()
    draw = data.draw
    n = draw(st.integers(1, 12))
    begin = draw(st.lists(st.integers(0, 1), min_size=1, max_size=14))
    few = [begin, [*begin, 2], [*begin[:3], 3, 4], [5]]  # many are the same, or begin alike
    prompts = [draw(st.sampled_from(few)) for _ in range(n)]
    rooms = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    stop_at = draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    ends_at = st.sampled_from([None, None, None, 1, 5, 9, 14, 30])
    fails_at, leaves_at = draw(ends_at), draw(ends_at)
    page_size = draw(st.integers(1, 5))
    least = -(-model.config.block_size // page_size)
    server = server_of(
        model, iter(prompts), iter(rooms), temperature=0, slots=draw(st.sampled_from([3, 5, 2, 1])),
        page_size=page_size, n_pages=1 + draw(st.integers(least, 3 * least)),
        stop=lambda index, new: len(new) >= stop_at[index],
        logits_processor=lambda ids, logits: fail(ids, logits))  # fmt: skip
    server.ahead = draw(st.integers(0, 1))  # as on a GPU: a step is launched before one is read
    steps = 0

    def fail(ids: Tensor, logits: Tensor) -> Tensor:
        nonlocal steps
        steps += 1
        if steps == fails_at:
            raise Stopped
        return logits

    got: dict[int, list[int]] = {}
    try:
        with torch.no_grad(), closing(server.tokens()) as tokens:
            for i, (row, token) in enumerate(tokens):
                if not server.ahead:
                    check_pages(server, rooms)
                if token == ENDED:
                    got[row.index] = row.prompt + row.new
                if i == leaves_at:
                    break
            else:
                assert len(got) == n
    except Stopped:
        assert fails_at is not None
    pool = server.pool
    assert pool.n_used == 0 and pool.n_free == pool.n_pages - 1 and not server.rows
    assert sorted(server.places) == list(range(server.slots))
    for index, text in got.items():
        room = min(rooms[index], stop_at[index])
        assert text == known_text(tuple(prompts[index]), room)


KNOWN: dict[Any, Any] = {}


def random_model() -> GPT:
    if "model" not in KNOWN:
        KNOWN["model"] = lively(n_layer=1, block_size=16)
    return KNOWN["model"]


def known_text(prompt: tuple[int, ...], n: int) -> list[int]:
    """What generate() makes of it; looked up where it was made before."""
    if prompt not in KNOWN:
        KNOWN[prompt] = alone(random_model(), list(prompt), 9, 0, temperature=0)
    return KNOWN[prompt][: len(prompt) + n]


# --- whatever happens, all pages are given back ---


def test_a_reader_that_leaves_leaves_no_page(pools) -> None:
    model = build().eval()
    for ask in (whole, serve.stream):
        texts = ask(model, some_prompts(), iter(range(2, 20)), slots=3)
        next(texts)
        assert pools[-1].n_used > 0
        texts.close()
        assert pools[-1].n_used == 0
    texts = whole(model, some_prompts(), iter(range(2, 20)), slots=3)
    next(texts)
    assert pools[-1].n_used > 0
    del texts
    assert pools[-1].n_used == 0


def test_an_error_leaves_no_page(pools) -> None:
    model = build().eval()

    def fail(*args: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise Stopped
        return args[-1] if isinstance(args[-1], Tensor) else False

    def fail_late() -> Iterator[Tensor]:
        yield from some_prompts()[:5]
        raise Stopped

    for options in ({"stop": fail}, {"logits_processor": fail}):
        calls: list[int] = []
        with pytest.raises(Stopped):
            list(whole(model, some_prompts(), 9, slots=3, **options))
    with pytest.raises(Stopped):
        list(whole(model, fail_late(), 9, slots=3))
    assert len(pools) == 3 and all(pool.n_used == 0 for pool in pools)


# --- rows are alone ---


def test_canary_what_a_neighbour_says_moves_nothing(monkeypatch) -> None:
    """Neither its prompt nor its text; its own prompt does."""
    seen: list[Tensor] = []
    sample_step = serve.sample_step

    def note(logits: Tensor, *args: Any) -> Any:
        seen.append(logits)
        return sample_step(logits, *args)

    monkeypatch.setattr(serve, "sample_step", note)

    def logits_of(first: int, changed: int | None) -> list[Tensor]:
        prompts = [tokens(1, 6, seed=i)[0] for i in range(3)]
        if changed is not None:
            prompts[changed] = (prompts[changed] + 1) % 37
        seen.clear()
        list(whole(model, prompts, 8, slots=3, page_size=4, temperature=0))
        return [step[first].clone() for step in seen]

    for window in (None, 4):
        model = lively(attention_window=window, block_size=32)
        for row in range(3):
            plain = logits_of(row, None)
            for other in {0, 1, 2} - {row}:
                pairs = zip(plain, logits_of(row, other), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)
            assert not torch.equal(plain[0], logits_of(row, row)[0])


def test_what_a_page_held_before_moves_nothing(monkeypatch) -> None:
    """Nor what was never written: NaN in all that is free, before every step."""
    reserve = PagedCache.reserve

    def poison(self: PagedCache, rows: Any, counts: Any) -> Any:
        pool = self.pool
        free = [page for page in pool._free if page not in pool._name_of]
        for t in (self.k, self.v):
            t[:, free] = torch.nan
        return reserve(self, rows, counts)

    model, prompts = lively(), some_prompts()
    want = texts_of(model, prompts, 14, slots=3, page_size=4, temperature=0)
    monkeypatch.setattr(PagedCache, "reserve", poison)
    assert texts_of(model, prompts, 14, slots=3, page_size=4, temperature=0) == want


# --- processors and constraints ---


def test_a_processor_sees_each_text_alone() -> None:
    model = lively()

    def rarely(input_ids: Tensor, logits: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64 and logits.shape == (1, 30)
        return logits - 5 * torch.zeros_like(logits).scatter(1, input_ids % 30, 1.0)

    options = {"top_k": 9, "vocab_size": 30, "logits_processor": rarely}
    got = texts_of(model, some_prompts(), 14, slots=3, page_size=4, **options)
    assert got == [alone(model, p, 14, i, **options) for i, p in enumerate(some_prompts())]
    del options["logits_processor"]
    assert got != texts_of(model, some_prompts(), 14, slots=3, **options)


@pytest.mark.parametrize("ahead", [0, 1])
def test_constrained_texts_match(ahead) -> None:
    """Each ends where its match does, in its own room; as alone."""
    constraint = constrain.regex(PATTERN, Bytes())
    model = build(block_size=64, vocab_size=320).eval()
    prompts = [tokens(1, T, vocab_size=256, seed=T)[0] for T in (5, 3, 9, 5, 40, 55)]
    rooms = [20, 8, 9, 30, 11, 9]
    options = {"vocab_size": 257, "constraint": constraint, "overflow": "stop"}
    server = server_of(model, prompts, iter(rooms), slots=2, generator=seeds(), **options)
    server.ahead = ahead
    got = texts_from(server)
    for index, (prompt, room) in enumerate(zip(prompts, rooms)):
        want = alone(model, prompt, room, index, **options)
        assert got[index] == want
        new = bytes(t for t in want[len(prompt) :] if t < 256).decode()
        assert re.fullmatch(PATTERN, new)
    with pytest.raises(ValueError, match="has 8 tokens, and there is room for 7"):
        list(whole(model, prompts, iter([20, 7]), **options))


# --- nothing waits for the device ---


def test_a_step_that_is_launched_early_changes_nothing(pools) -> None:
    """As on a GPU: a row's end is known a step late, and what was launched for it is dropped."""
    model, prompts = lively(), some_prompts()
    options = {"slots": 3, "page_size": 4, "top_k": 9, "n_pages": 13}
    for stop in (None, lambda index, new: sum(new) > 60):
        want = texts_of(model, prompts, 14, stop=stop, **options)
        server = server_of(model, prompts, 14, stop=stop, generator=seeds(), **options)
        server.ahead = 1
        got = texts_from(server)
        assert [got[i] for i in range(10)] == want
    assert all(pool.n_used == 0 for pool in pools)


def test_the_loop_reads_nothing_back(monkeypatch) -> None:
    """But for the tokens, once a step, in one place."""
    model, prompts = build().eval(), [p.tolist() for p in some_prompts()]
    options = {"top_k": 4, "top_p": 0.9, "slots": 3, "page_size": 4}
    list(whole(model, prompts, 9, **options))  # the backends are probed
    asked: list[str] = []
    allowed: list[int] = []

    def forbid(name: str) -> Any:
        original = getattr(Tensor, name)

        def method(self: Tensor, *args: Any) -> Any:
            if not allowed:
                asked.append(name)
            return original(self, *args)

        return method

    names = ("item", "tolist", "__int__", "__float__", "__bool__", "__index__", "numpy")
    for name in (*names, "nonzero", "cpu"):
        monkeypatch.setattr(Tensor, name, forbid(name))
    wait = Copy.wait

    def read_back(self: Any) -> list[int]:
        allowed.append(1)
        try:
            return wait(self)
        finally:
            allowed.pop()

    monkeypatch.setattr(Copy, "wait", read_back)
    assert len(list(whole(model, prompts, 9, **options))) == 10
    assert asked == []
    assert bool(torch.ones(())) and asked == ["__bool__"]  # the watch works


# --- mistakes ---


def test_options_that_mean_nothing() -> None:
    model, prompts = build().eval(), some_prompts()
    for options, words in (
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"overflow": "grow"}, "overflow must be one of slide, stop, got 'grow'"),
        ({"slots": 0}, "slots must be at least 1, got 0"),
        ({"page_size": 0}, "page_size must be at least 1, got 0"),
        ({"n_pages": 1}, "n_pages must be at least 2"),
        ({"generator": list(islice(seeds(), 2))}, "generator has 2 entries, and there are more"),
        ({"overflow": "stop"}, r"a prompt of 20 tokens does not fit into block_size 16 \(prompt 9"),
    ):
        with pytest.raises(ValueError, match=words):
            list(whole(model, prompts, 5, **options))
    for n, words in (
        (-1, "max_new_tokens must be at least 0, got -1"),
        ([4, 4], "max_new_tokens has 2 entries, and there are more prompts"),
    ):
        with pytest.raises(ValueError, match=words):
            list(whole(model, prompts, n))
    done = []
    with pytest.raises(ValueError, match="at least one token; prompt 2 has none"):
        for index, _ in whole(model, [[1, 2], [3], [], [4]], 5, slots=8):
            done.append(index)
    assert done == [0, 1]


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_every_text_is_that_of_its_prompt_alone(shape, pools) -> None:
    """The decode kernel, the copies of pages, and steps that are launched before one is read."""
    model, prompts = lively(block_size=64, **SHAPES[shape]).cuda(), some_prompts()
    prompts += [prompts[4], prompts[4], torch.cat([prompts[4], prompts[2]])]
    for options in ({"temperature": 0.0}, {"temperature": 0.0, "stop": {1, 2, 3}}):
        for n_pages in (None, 18):
            got = texts_of(model, prompts, 30, slots=4, page_size=4, n_pages=n_pages, **options)
            want = [alone(model, p, 30, i, **options) for i, p in enumerate(prompts)]
            assert got == want
    assert all(pool.n_used == 0 for pool in pools)
