"""Continuous batching: every text equals that of its prompt alone, and no page is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import count, islice
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from test_generate import lively
from test_model import SHAPES, build, tokens
from torch import Tensor

from inference import engine, serve
from inference.sampling import ENDED, Stats
from model import GPT

LENGTHS = (5, 1, 9, 5, 16, 12, 3, 7, 2, 20)


def some_prompts(**changes: Any) -> list[Tensor]:
    return [tokens(1, T, seed=i, **changes)[0] for i, T in enumerate(LENGTHS)]


def seeds() -> Iterator[torch.Generator]:
    return (torch.Generator().manual_seed(i) for i in count())


def alone(model: GPT, prompt: Any, n: int, index: int, **options: Any) -> list[int]:
    """The text of generate() without a cache."""
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


def test_a_prompt_enters_when_a_text_ends_and_its_pages_are_free(calls) -> None:
    """9 pages for texts that need 4, 2, 4 and 1: the third waits, and the last behind it. No row
    idles or is padded: (B, T) of each call of the model."""
    model = lively(block_size=64)
    prompts = [tokens(1, T, seed=T)[0] for T in (10, 5, 12, 1)]
    stats = Stats()
    got = texts_of(model, prompts, iter([6, 3, 4, 4]), slots=4, n_pages=10, page_size=4,
                   temperature=0, stats=stats)
    rooms = (6, 3, 4, 4)
    want = [alone(model, p, n, i, temperature=0) for i, (p, n) in enumerate(zip(prompts, rooms))]
    assert got == want
    # Text 1 has 3 tokens; then there are 5 free pages, for text 2 and for text 3.
    entering = [(1, 10), (1, 5)], [(1, 12), (2, 1)]
    assert calls[:9] == [*entering[0], (2, 1), (2, 1), *entering[1], (3, 1), (3, 1), (2, 1)]
    assert stats.all_pages == 9 and 6 < stats.pages <= 9
    assert stats.cache_bytes == 10 * 4 * 512


def test_samples_of_one_prompt_are_read_once(calls) -> None:
    """Seven tokens in pages of 4: the others wait a step for the full page, and read three."""
    model, prompt = lively(block_size=64), tokens(1, 7)[0]
    stats = Stats()
    got = texts_of(model, [prompt] * 5, 6, slots=5, page_size=4, stats=stats, top_k=9)
    assert calls == [(1, 7), (4, 3), (1, 1), *[(5, 1)] * 4, (4, 1)]
    assert got == [alone(model, prompt, 6, i, top_k=9) for i in range(5)] and got[0] != got[1]
    assert stats.shared_pages == 4
    assert stats.pages == 1 + 5 * 2  # 12 tokens each, of which 4 are everybody's


BRIEF = settings(max_examples=40, deadline=None, derandomize=True, database=None,
                 phases=[Phase.generate])


@BRIEF
@given(data=st.data())
@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 4,
                                    pytest.param((4, None), marks=pytest.mark.slow)])
def test_under_random_load(data, window) -> None:
    """Common prefixes, pools of any size, stop conditions, readers that leave."""
    model, draw = random_model(window), data.draw
    n = draw(st.integers(1, 12))
    begin = [i % 2 for i in range(draw(st.integers(1, 14)))]
    # Many are the same, begin alike, or share nothing.
    few = [begin, [*begin, 2], [*begin[:3], 3, 4], [5], [6, *begin], [7, *begin]]
    prompts = [draw(st.sampled_from(few)) for _ in range(n)]
    rooms = draw(st.lists(st.integers(0, 9), min_size=n, max_size=n))
    stop_at = draw(st.lists(st.integers(1, 12), min_size=n, max_size=n))
    leaves_at = draw(st.sampled_from([None, None, None, 1, 5, 9, 14, 30]))
    page_size = draw(st.integers(1, 5))
    least = -(-model.config.block_size // page_size)
    sizes = {"slots": draw(st.sampled_from([3, 5, 2, 1])), "page_size": page_size,
             "n_pages": 1 + draw(st.integers(least, 3 * least))}
    stop = {"stop": lambda index, new: len(new) >= stop_at[index]}
    # Short prefills leave few pages to the layers with a window.
    with mock.patch.object(serve, "PREFILL", draw(st.sampled_from([2048, 1]))):
        texts = whole(model, prompts, iter(rooms), temperature=0, **sizes, **stop)
        got = list(islice(texts, leaves_at))
    assert len(got) == (n if leaves_at is None else min(n, leaves_at))
    for index, new in got:
        text = known_text(window, tuple(prompts[index]), min(rooms[index], stop_at[index]))
        assert prompts[index] + new.tolist() == text


@cache
def random_model(window: Any) -> GPT:
    return lively(n_layer=2, block_size=16, attention_window=window)


@cache
def nine_tokens(window: Any, prompt: tuple[int, ...]) -> list[int]:
    return alone(random_model(window), list(prompt), 9, 0, temperature=0)


def known_text(window: Any, prompt: tuple[int, ...], n: int) -> list[int]:
    return nine_tokens(window, prompt)[: len(prompt) + n]


def test_invalid_options_are_named() -> None:
    model, prompts = build().eval(), some_prompts()
    for options, words in (
        ({"slots": 0}, "slots.* 0"),
        ({"page_size": 0}, "page_size.* 0"),
        ({"n_pages": 1}, "n_pages"),
        ({"generator": list(islice(seeds(), 2))}, "generator"),
    ):
        with pytest.raises(ValueError, match=words):
            list(whole(model, prompts, 5, **options))
    for n, words in ((-1, "max_new_tokens.* -1"), ([4, 4], "max_new_tokens")):
        with pytest.raises(ValueError, match=words):
            list(whole(model, prompts, n))
    with pytest.raises(ValueError, match="prompt 2"):
        list(whole(model, [[1, 2], [3], [], [4]], 5))
    got = whole(model, iter([[1], [1] * 9]), 7, n_pages=4, page_size=4)  # 7 and 15 tokens
    assert len(next(got)[1]) == 7
    with pytest.raises(ValueError, match=r"prompt 1.*\b3 pages"):
        next(got)


# --- on a GPU ---


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_every_text_is_that_of_its_prompt_alone(shape) -> None:
    """The decode kernel, the copies of pages, and steps that are launched before one is read."""
    model, prompts = lively(block_size=64, **SHAPES[shape]).cuda(), some_prompts()
    prompts += [prompts[4], prompts[4], torch.cat([prompts[4], prompts[2]])]
    for options in ({"temperature": 0.0}, {"temperature": 0.0, "stop": {1, 2, 3}}):
        for n_pages in (None, 18):
            got = texts_of(model, prompts, 30, slots=4, page_size=4, n_pages=n_pages, **options)
            want = [alone(model, p, 30, i, **options) for i, p in enumerate(prompts)]
            assert got == want
