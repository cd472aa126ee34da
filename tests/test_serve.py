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

from data import CharTokenizer
from inference import constrain, engine, serve
from inference.sampling import ENDED, Stats
from model import GPT


def seeds() -> Iterator[torch.Generator]:
    return (torch.Generator().manual_seed(i) for i in count())


def alone(model: GPT, prompt: Any, n: int, index: int, **options: Any) -> list[int]:
    generator = torch.Generator().manual_seed(index)
    (text,) = engine.generate(model, [prompt], n, generator=[generator], kv_cache="none", **options)
    return text.tolist()


def whole(model: GPT, prompts: Any, n: Any, **options: Any) -> Iterator[tuple[int, list[int]]]:
    new: dict[int, list[int]] = {}
    with closing(serve.stream(model, prompts, n, **options)) as got:
        for index, token in got:
            row = new.setdefault(index, [])
            if token == ENDED:
                yield index, row
            else:
                row.append(token)


def texts_of(model: GPT, prompts: Any, n: Any, **options: Any) -> list[list[int]]:
    found = dict(whole(model, prompts, n, generator=seeds(), **options))
    assert sorted(found) == list(range(len(found)))
    return [[*map(int, prompt), *found[i]] for i, prompt in enumerate(prompts)]


def test_a_prompt_enters_when_a_text_ends_and_its_pages_are_free() -> None:
    """9 pages for texts of 4, 2, 4 and 1: the third waits, and the last behind it."""
    model, stats = lively(block_size=64), Stats()
    prompts = [tokens(1, T, seed=T)[0] for T in (10, 5, 12, 1)]
    rooms = (6, 3, 4, 4)
    got = texts_of(model, prompts, iter(rooms), slots=4, n_pages=10, page_size=4, temperature=0,
                   stats=stats)
    want = [alone(model, p, n, i, temperature=0) for i, (p, n) in enumerate(zip(prompts, rooms))]
    assert got == want
    assert stats.all_pages == 9 and 6 < stats.pages <= 9
    assert stats.cache_bytes == 10 * 4 * 512


def test_samples_of_one_prompt_share_its_full_pages() -> None:
    model, prompt, stats = lively(block_size=64), tokens(1, 7)[0], Stats()
    got = texts_of(model, [prompt] * 5, 6, slots=5, page_size=4, stats=stats, top_k=9)
    assert got == [alone(model, prompt, 6, i, top_k=9) for i in range(5)] and got[0] != got[1]
    assert stats.shared_pages == 4 and stats.pages == 1 + 5 * 2


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
        prompt, room = prompts[index], min(rooms[index], stop_at[index])
        assert prompt + new == nine_tokens(window, tuple(prompt))[: len(prompt) + room]


@cache
def random_model(window: Any) -> GPT:
    return lively(n_layer=2, block_size=16, attention_window=window)


@cache
def nine_tokens(window: Any, prompt: tuple[int, ...]) -> list[int]:
    return alone(random_model(window), list(prompt), 9, 0, temperature=0)


def test_rows_of_one_generator_draw_in_order() -> None:
    """A row draws 64 numbers at a time."""
    model, prompts, found = lively(block_size=128), [[1], [2], [3]], []
    for slots, kind in ((3, list), (1, list), (3, iter), (1, iter)):
        one = torch.Generator().manual_seed(1)
        found.append(dict(whole(model, prompts, 70, slots=slots, generator=kind([one] * 3))))
    assert found == found[:1] * 4


def test_invalid_options_are_named() -> None:
    model, prompts = build().eval(), [[1, 2], [3], [4, 5]]
    ab = constrain.regex("[ab]+", CharTokenizer([*"abcdef"]))
    for options, words in (
        ({"slots": 0}, "slots.* 0"), ({"page_size": 0}, "page_size.* 0"),
        ({"n_pages": 1}, "n_pages"), ({"n": [4, 4]}, "max_new_tokens"),
        ({"generator": list(islice(seeds(), 2))}, "generator"), ({"n": -1}, "max_new_tokens.* -1"),
        ({"prompts": [[1], [3], []]}, "prompt 2"),
        ({"n_pages": 9, "kv_cache": "dynamic"}, "n_pages.* dynamic"),
        ({"prompts": iter(prompts), "constraint": [None, ab]}, "constraint"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            list(whole(model, **{"prompts": prompts, "n": 5} | options))
    got = whole(model, iter([[1], [1] * 9]), 7, n_pages=4, page_size=4)  # 7 and 15 tokens
    assert len(next(got)[1]) == 7
    with pytest.raises(ValueError, match=r"prompt 1.*\b3 pages"):
        next(got)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_every_text_is_that_of_its_prompt_alone(shape) -> None:
    """The decode kernel, page copies, steps launched ahead."""
    model = lively(block_size=64, **SHAPES[shape]).cuda()
    lengths = (5, 1, 9, 5, 16, 12, 3, 7, 2, 20)
    prompts: list[Tensor] = [tokens(1, T, seed=i)[0] for i, T in enumerate(lengths)]
    prompts += [prompts[4], prompts[4], torch.cat([prompts[4], prompts[2]])]
    for options in ({"temperature": 0.0}, {"temperature": 0.0, "stop": {1, 2, 3}}):
        for n_pages in (None, 18):
            got = texts_of(model, prompts, 30, slots=4, page_size=4, n_pages=n_pages, **options)
            want = [alone(model, p, 30, i, **options) for i, p in enumerate(prompts)]
            assert got == want
