"""Generation: every cache gives the tokens of no cache, every row those of its prompt alone."""

from __future__ import annotations

import copy
import gc
import re
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_model import HERE, SHAPES, TINY, build, tokens
from torch import Tensor

import attention
from attention import BACKENDS, BackendUnavailable
from inference import constrain, engine
from inference.cache import DynamicCache, PagedCache, StaticCache
from inference.engine import KV_CACHES
from inference.sampling import ENDED, Copy, Options, Stats
from model import GPT

pytestmark = pytest.mark.usefixtures("remembered_probes")

CACHES = [kv for kv in KV_CACHES if kv != "none"]
SLOW = {"flex", "triton"}  # compiled or interpreted here: one shape of model is enough


def asked(kv: str, **more: Any) -> dict[str, Any]:
    """The part of a Spec that says which cache."""
    return {"cache": kv, "page_size": 16 if kv == "paged" else None, "grad": False, **more}


def can_decode(name: str, kv: str) -> bool:
    spec = TINY.spec("float32", training=False, **asked(kv))
    return not BACKENDS[name].why_not(spec, HERE)


PAIRS = [(name, kv) for kv in CACHES for name in BACKENDS if can_decode(name, kv)]


def lively(**changes: Any) -> GPT:
    """A model whose texts do not come to rest at one token, where all caches would look alike."""
    return build(scale=20.0, **changes).eval()


def greedy(model: GPT, idx: Tensor, n: int) -> Tensor:
    """The likeliest token each time."""
    return model.generate(idx, n, top_k=1)


def ragged() -> list[Tensor]:
    return [tokens(1, T, seed=T)[0] for T in (5, 1, 9, 5)]


# --- the same tokens ---


def test_these_decode_here() -> None:
    """Without this, backends whose caps refuse everything would pass."""
    here = set(PAIRS)
    assert {("manual", "dynamic"), ("tiled", "dynamic"), ("sdpa", "dynamic")} <= here
    assert {("manual", "static"), ("sdpa", "static"), ("paged", "paged")} <= here


@pytest.mark.parametrize(
    "name, kv",  # flex compiles for half a minute: test_attention.py has its caches
    [pytest.param(*p, marks=pytest.mark.slow) if p[0] == "flex" else p for p in PAIRS],
)
def test_greedy_tokens_are_those_without_a_cache(name, kv) -> None:
    """Through the limit of 16 positions, where the window begins to slide; GQA, MQA, windows."""
    for shape, changes in SHAPES.items():
        if name in SLOW and shape != "mqa-window":
            continue
        model = lively(attention_backend=name, attention_fallback=False, **changes)
        plain = lively(attention_backend="manual", **changes)
        sizes = [(5, 5)] if name in SLOW else [(5, 14), (1, 8), (15, 3), (16, 3), (20, 2)]
        for T, n in sizes:
            got = engine.generate(model, tokens(T=T), n, temperature=0, kv_cache=kv)
            assert torch.equal(got, greedy(plain, tokens(T=T), n)), (shape, T)


def test_the_texts_that_are_compared_are_lively() -> None:
    for changes in SHAPES.values():
        for row in greedy(lively(**changes), tokens(T=5), 14)[:, 5:]:
            assert len(row.unique()) > 3


@pytest.mark.parametrize("kv", KV_CACHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_prompts_of_any_lengths_answer_as_each_alone(shape, kv) -> None:
    """Greedily, and with a generator for each row; up to the limit and beyond it."""
    model, prompts = lively(**SHAPES[shape]), ragged()

    def generator(row: int) -> torch.Generator:
        return torch.Generator().manual_seed(row)

    for sampling in ({"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.9, "temperature": 0.8}):
        both = {**sampling, "kv_cache": kv}
        four = engine.generate(
            model, prompts, 14, generator=[generator(b) for b in range(4)], **both
        )
        assert [len(text) for text in four] == [19, 15, 23, 19]
        for b, prompt in enumerate(prompts):
            (alone,) = engine.generate(model, [prompt], 14, generator=[generator(b)], **both)
            assert torch.equal(four[b], alone)
            assert torch.equal(alone[: len(prompt)], prompt)
            if sampling.get("temperature") == 0:
                assert torch.equal(alone[None], greedy(model, prompt[None], 14))


def test_lists_of_numbers_are_prompts_too() -> None:
    model = lively()
    as_tensors = engine.generate(model, ragged(), 4, temperature=0)
    as_lists = engine.generate(model, [p.tolist() for p in ragged()], 4, temperature=0)
    assert all(torch.equal(a, b) for a, b in zip(as_tensors, as_lists, strict=True))
    (one,) = engine.generate(model, ([1, 2, 3],), 0)
    assert one.tolist() == [1, 2, 3] and one.dtype == torch.int64


@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}, {"temperature": 0.7, "top_k": 11}], ids=str)
@pytest.mark.parametrize("kv", KV_CACHES)
def test_the_engine_is_the_plain_loop(kv, sampling, monkeypatch) -> None:
    """Given the same random numbers, and the order in which the engine lays out the tokens."""
    model, idx = lively(), tokens(T=5)
    generators = [torch.Generator().manual_seed(row) for row in range(2)]
    got = engine.generate(model, idx, 20, generator=generators, kv_cache=kv, **sampling)
    numbers = [torch.rand(64, dtype=torch.float64, generator=g.manual_seed(row))
               for row, g in enumerate(generators)]  # fmt: skip
    steps = iter(torch.stack(numbers, 1)[:, :, None])

    def multinomial(probs: Tensor, n: int) -> Tensor:
        order = torch.arange(probs.shape[1]).expand_as(probs)
        if sampling:  # top_k sorts
            probs, order = probs.sort(dim=-1, descending=True)
        upto = probs.cumsum(-1, dtype=torch.float64)
        at = (upto <= next(steps) * upto[:, -1:]).sum(-1, keepdim=True)
        return order.gather(1, at)

    monkeypatch.setattr(torch, "multinomial", multinomial)
    assert torch.equal(got, model.generate(idx, 20, **sampling))


# --- the same logits ---


def caches(kv: str, model: GPT, B: int, max_len: int) -> Any:
    """An object with step(counts), which begins a step of a new cache."""
    config = model.config
    sizes = {"dtype": model.transformer.wte.weight.dtype}
    heads = config.kv_heads, config.head_dim
    if kv == "dynamic":
        window = config.spec("float32").window
        dynamic = DynamicCache(config.n_layer, max_len=max_len, window=window)
        return lambda T: dynamic.reserve(T)
    if kv == "static":
        static = StaticCache(config.n_layer, B, max_len, *heads, **sizes)
        return lambda T: static.reserve(T)
    paged = PagedCache(config.n_layer, *heads, n_pages=B * max_len + 1, page_size=4, **sizes)
    rows = [paged.pool.new() for _ in range(B)]
    return lambda T: paged.reserve(rows, [T] * B)


CHUNKS = {
    "prefill": [16],
    "prefill, decode": [6, *[1] * 10],
    "chunked prefill, decode": [4, 5, 2, *[1] * 5],
    "decode": [1] * 16,
}


@torch.no_grad()
def cached_logits(model: GPT, idx: Tensor, kv: str, chunks: list[int]) -> Tensor:
    """(B, T, V): all logits, the tokens coming in chunks."""
    reserve, logits, n = caches(kv, model, len(idx), 16), [], 0
    for T in chunks:
        step = reserve(T)
        out, _ = model(idx[:, n : n + T], cache=step)
        step.advance()
        logits.append(out)
        n += T
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("phase", CHUNKS)
@pytest.mark.parametrize("name, kv", [p for p in PAIRS if p[0] not in SLOW])
def test_logits_are_those_without_a_cache(name, kv, phase) -> None:
    """Against the same weights in float64; allowed: twice manual's own error, and one rounding."""
    for shape, changes in SHAPES.items():
        for dtype in (torch.float32, torch.bfloat16):
            model = build(attention_backend=name, **changes).eval().to(dtype)
            plain = build(attention_backend="manual", **changes).eval().to(dtype)
            with torch.no_grad():
                yardstick = plain(tokens())[0].double()
                truth = copy.deepcopy(plain).double()(tokens())[0]
            got = cached_logits(model, tokens(), kv, CHUNKS[phase])
            assert got.dtype == dtype and got.isfinite().all()
            allowed = 2 * (yardstick - truth).abs().max()
            allowed += torch.finfo(dtype).eps * truth.abs().max()
            assert (got - truth).abs().max() <= allowed, (shape, dtype)
            spec = next(s for _, s in model._kernels.values() if s.cache in (kv, "none"))
            assert spec.dtype == str(dtype).removeprefix("torch.") and not spec.grad


@pytest.mark.parametrize("phase", CHUNKS)
@pytest.mark.parametrize("name, kv", [p for p in PAIRS if p[0] not in SLOW])
def test_canary_a_later_token_moves_nothing_before_it(name, kv, phase) -> None:
    for window in (None, 4):
        model = build(attention_backend=name, attention_window=window).eval()
        idx = tokens()
        before = cached_logits(model, idx, kv, CHUNKS[phase])
        for t in (1, 7, 15):
            changed = idx.clone()
            changed[:, t] = (changed[:, t] + 1) % 37
            after = cached_logits(model, changed, kv, CHUNKS[phase])
            assert torch.equal(before[:, :t], after[:, :t])
            assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.parametrize("kv", CACHES)
def test_canary_another_row_moves_nothing(kv) -> None:
    model, idx = build().eval(), tokens()
    before = cached_logits(model, idx, kv, CHUNKS["chunked prefill, decode"])
    other = torch.stack([idx[0], tokens(1, seed=9)[0]])
    after = cached_logits(model, other, kv, CHUNKS["chunked prefill, decode"])
    assert torch.equal(before[0], after[0]) and not torch.equal(before[1], after[1])


def test_what_does_not_fit_is_refused() -> None:
    model = build().eval()
    for kv in ("dynamic", "static"):
        reserve = caches(kv, model, 2, 16)
        with pytest.raises(ValueError, match="17 tokens do not fit into a cache of 16"):
            reserve(17)
        with pytest.raises(ValueError, match="the cache has reserved 4 tokens, and 5 came"):
            model(tokens(T=5), cache=reserve(4))
    step = caches("dynamic", model, 2, 16)(5)
    with pytest.raises(ValueError, match="segments cannot be given with a cache"):
        model(tokens(T=5), None, torch.zeros(2, 5, dtype=torch.int32), step)


# --- which backend reads which cache ---


def test_attention_is_resolved_once_a_phase(monkeypatch) -> None:
    specs = []
    select = attention.select

    def note(name: str, spec: Any, *args: Any, **kwargs: Any) -> Any:
        specs.append(spec)
        return select(name, spec, *args, **kwargs)

    monkeypatch.setattr(attention, "select", note)
    model = build().eval()
    for kv, kinds in (
        ("dynamic", ["dynamic"]),
        ("static", ["none", "static"]),
        ("paged", ["paged"]),
    ):
        specs.clear()
        for _ in range(2):
            engine.generate(model, tokens(T=5), 6, kv_cache=kv)
        assert [spec.cache for spec in specs] == kinds  # the prompt of a static cache needs "none"
    assert not any(spec.grad for spec in specs)


def test_a_backend_that_cannot_read_the_cache_is_replaced_aloud_or_refused(caplog) -> None:
    attention.select.__globals__["_once"].cache_clear()
    caplog.set_level("WARNING", logger="nanoattn")
    model = build(attention_backend="tiled").eval()
    want = greedy(model, tokens(T=5), 6)
    for kv, after in (("static", "manual"), ("paged", "paged")):
        caplog.clear()
        assert torch.equal(engine.generate(model, tokens(T=5), 6, temperature=0, kv_cache=kv), want)
        words = " ".join(r.getMessage() for r in caplog.records)
        assert f"tiled requested but it has no '{kv}' cache" in words
        assert f"Falling back to '{after}'" in words
        strict = build(attention_backend="tiled", attention_fallback=False).eval()
        with pytest.raises(BackendUnavailable, match=f"tiled: it has no '{kv}' cache"):
            engine.generate(strict, tokens(T=5), 6, kv_cache=kv)


@pytest.mark.parametrize("name, kv", PAIRS)
def test_a_strict_backend_generates_with_the_caches_that_it_has(name, kv) -> None:
    """paged reads nothing else: it must not be asked for anything without a cache."""
    if name in SLOW:
        return
    model = build(attention_backend=name, attention_fallback=False).eval()
    for T, n in ((5, 6), (5, 1), (12, 8), (20, 2), (5, 0)):  # beyond the limit too
        assert engine.generate(model, tokens(T=T), n, kv_cache=kv).shape == (2, T + n)
    assert {r.backend.name for r, _ in model._kernels.values()} == {name}


def test_the_named_backend_reads_the_cache(monkeypatch) -> None:
    """It is called for each layer with the view, and its Spec says which cache that is."""
    seen: list[tuple[str, bool, int, int]] = []

    def spy(q: Tensor, k: Tensor, v: Tensor, spec: Any, *, segments: Any, cache: Any) -> Tensor:
        seen.append((spec.cache, cache is not None, q.shape[1], k.shape[1]))
        return chosen.backend.attend(q, k, v, spec, segments=segments, cache=cache)

    model = build(attention_backend="manual").eval()
    for kv, want in (
        ("dynamic", [("dynamic", False, 5, 5), ("dynamic", False, 1, 6), ("dynamic", False, 1, 7)]),
        ("static", [("none", False, 5, 5), ("static", True, 1, 16), ("static", True, 1, 16)]),
    ):
        engine.generate(model, tokens(T=5), 3, kv_cache=kv)
        for phase, (chosen, spec) in model._kernels.items():
            backend = replace(chosen.backend, attend=spy)
            monkeypatch.setitem(model._kernels, phase, (replace(chosen, backend=backend), spec))
        seen.clear()
        engine.generate(model, tokens(T=5), 3, kv_cache=kv)
        monkeypatch.undo()
        assert seen[::2] == seen[1::2] == want


# --- the limit of positions ---


@pytest.mark.parametrize("kv", KV_CACHES)
def test_stop_ends_a_text_that_has_block_size_tokens(kv) -> None:
    """Each row by itself; the others go on."""
    model, prompts = lively(), ragged()
    slid = engine.generate(model, prompts, 30, temperature=0, kv_cache=kv)
    texts = engine.generate(model, prompts, 30, temperature=0, kv_cache=kv, overflow="stop")
    assert [len(t) for t in texts] == [16] * 4
    assert all(torch.equal(t, s[:16]) for t, s in zip(texts, slid, strict=True))
    rows = torch.stack(
        list(engine.stream(model, prompts, 30, temperature=0, kv_cache=kv, overflow="stop"))
    )
    assert (rows != ENDED).sum(0).tolist() == [11, 15, 7, 11] and len(rows) == 15
    full = tokens(T=16)
    assert torch.equal(engine.generate(model, full, 5, kv_cache=kv, overflow="stop"), full)
    with pytest.raises(ValueError, match="a prompt of 17 tokens does not fit into block_size 16"):
        engine.generate(model, tokens(T=17), 5, kv_cache=kv, overflow="stop")


@pytest.mark.parametrize("kv", CACHES)
def test_the_cache_is_used_until_the_limit_and_given_up_there(kv, monkeypatch) -> None:
    columns = []
    hidden = GPT.hidden

    def note(self: GPT, idx: Tensor, segments: Any = None, cache: Any = None) -> Tensor:
        columns.append((idx.shape[1], cache is not None))
        return hidden(self, idx, segments, cache)

    monkeypatch.setattr(GPT, "hidden", note)
    engine.generate(build().eval(), tokens(T=13), 6, kv_cache=kv)
    beyond = (16, kv == "paged")  # whose attention cannot do without
    assert columns == [(13, True), (1, True), (1, True), (1, True), beyond, beyond]
    columns.clear()
    engine.generate(build().eval(), tokens(T=13), 6, kv_cache="none")
    assert columns == [(n, False) for n in (13, 14, 15, 16, 16, 16)]


@pytest.mark.parametrize("kv", CACHES)
def test_a_long_row_that_has_ended_costs_its_neighbours_nothing(kv, monkeypatch) -> None:
    """It stands at 13 of 16 positions, and would slide; the other goes on with its cache."""
    columns = []
    hidden = GPT.hidden

    def note(self: GPT, idx: Tensor, segments: Any = None, cache: Any = None) -> Tensor:
        columns.append((idx.shape[1], cache is not None))
        return hidden(self, idx, segments, cache)

    monkeypatch.setattr(GPT, "hidden", note)
    model, prompts = lively(), [tokens(1, 13)[0], tokens(1, 3, seed=1)[0]]

    def ends(row: int, new: list[int]) -> bool:
        return row == 0 and len(new) == 2

    _, text = engine.generate(model, prompts, 12, temperature=0, kv_cache=kv, stop=ends)
    assert torch.equal(text[None], greedy(model, prompts[1][None], 12))
    columns = columns[: -12 if kv != "paged" else len(columns) - 12]  # those of greedy() come last
    assert all(cached for _, cached in columns)
    assert [T for T, _ in columns if T > 1] == ([13, 3] if kv == "paged" else [13])


# --- memory ---


def test_what_the_caches_hold(monkeypatch) -> None:
    """2 layers of keys and values, 4 heads of 8 numbers of 4 bytes: 512 bytes a token."""
    for kv, tokens_held in (("none", 0), ("dynamic", 128), ("static", 129), ("paged", 96 + 16)):
        stats = Stats()
        model = build(block_size=256).eval()
        engine.generate(model, tokens(1, 64), 32, kv_cache=kv, stats=stats)
        assert stats.cache_bytes == 512 * tokens_held, kv
        if kv != "paged":  # the most of several calls: a smaller one takes nothing away
            engine.generate(model, tokens(1, 3), 2, kv_cache=kv, stats=stats)
            assert stats.cache_bytes == 512 * tokens_held, kv
        # One token alone needs none, nor does a text that slides from its first token on.
        stats = Stats()
        engine.generate(model, tokens(1, 3), 1, kv_cache=kv, stats=stats)
        engine.generate(model, tokens(1, 256), 3, kv_cache=kv, stats=stats)
        assert (stats.cache_bytes == 0) == (kv != "paged")
    stats = Stats()
    engine.generate(
        build(block_size=256, attention_window=8).eval(), tokens(1, 64), 99, stats=stats
    )
    assert stats.cache_bytes <= 512 * 16


# --- sampling ---


@pytest.mark.parametrize("sampling", [
    {"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-9}, {"temperature": 1e-4},
    {"temperature": 0.0, "top_k": 3, "top_p": 0.5}])  # fmt: skip
def test_greedy(sampling) -> None:
    """5 + 30 tokens through a block_size of 16: the window slides."""
    model, idx = build().eval(), tokens(T=5)
    want = greedy(model, idx, 30)
    got = engine.generate(model, idx, 30, **sampling)
    assert got.shape == (2, 35) and got.dtype == torch.int64 and torch.equal(got, want)
    assert torch.equal(torch.stack(list(engine.stream(model, idx, 30, **sampling)), 1), want[:, 5:])
    none = engine.generate(model, idx, 0)
    assert none.dtype == torch.int64 and torch.equal(none, idx)


def test_generation_repeats_with_the_seed_and_leaves_no_graph() -> None:
    model, idx = build().eval(), tokens(T=5)

    def draw(seed: int) -> Tensor:
        return engine.generate(model, idx, 30, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(state, torch.get_rng_state())  # a generator of one's own is the only source
    assert torch.is_grad_enabled() and not draw(1).requires_grad
    for _ in engine.stream(model, idx, 2):
        assert torch.is_grad_enabled()  # between the tokens the caller's mode holds


def test_padding_of_the_vocabulary_is_never_drawn() -> None:
    model, idx = build().eval(), tokens(T=5, vocab_size=9)
    with torch.no_grad():
        model.transformer.wte.weight[9:] *= 30  # what would be drawn
    for sampling in ({}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}):
        assert engine.generate(model, idx, 20, vocab_size=9, **sampling).max() < 9
    assert engine.generate(model, idx, 20).max() >= 9


@pytest.mark.parametrize("kv", CACHES)
@pytest.mark.parametrize("sampling", [{}, {"top_k": 4}, {"top_p": 0.8}, {"temperature": 0.5}])
def test_a_seed_gives_the_tokens_of_no_cache(sampling, kv) -> None:
    model = lively()

    def text(kv: str, n: int = 20) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return engine.generate(model, tokens(T=5), n, kv_cache=kv, generator=generator, **sampling)

    assert torch.equal(text(kv), text("none"))
    assert torch.equal(text(kv)[:, :13], text(kv, 8))  # a longer text begins like a shorter one


def test_a_generator_for_each_row() -> None:
    model, idx = lively(), tokens(1, 5).expand(3, 5)

    def texts(*seeds: int) -> list[list[int]]:
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        return engine.generate(model, idx[: len(seeds)], 80, generator=generators).tolist()

    state = torch.get_rng_state()
    a, b, c = texts(1, 2, 1)
    assert a == c != b and texts(2) == [b]
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(ValueError, match="3 rows need as many generators, got 1"):
        engine.generate(model, idx, 5, generator=[torch.Generator()])


def test_options_that_mean_nothing() -> None:
    model, idx = build().eval(), tokens(T=5)
    for options, words in (
        ({"kv_cache": "ring"}, "kv_cache must be one of none, dynamic, static, paged, got 'ring'"),
        ({"overflow": "grow"}, "overflow must be one of slide, stop, got 'grow'"),
        ({"compile": True}, "compile needs kv_cache=static, got dynamic"),
        ({"temperature": -1}, "temperature must be at least 0, got -1"),
        ({"top_k": 0}, "top_k must be at least 1, got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
    ):
        with pytest.raises(ValueError, match=words):
            engine.generate(model, idx, 5, **options)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 0, got -1"):
        engine.generate(model, idx, -1)
    for prompts in ([], [[]], [[1], []], torch.zeros(2, 0, dtype=torch.int64)):
        with pytest.raises(ValueError, match="at least one token"):
            engine.generate(model, prompts, 5)


# --- stop ---


@pytest.mark.parametrize("kv", KV_CACHES)
def test_a_row_ends_with_its_stop_token(kv) -> None:
    """Which does not change what the others say."""
    model, prompts = lively(), ragged()
    full = [t.tolist() for t in engine.generate(model, prompts, 20, temperature=0, kv_cache=kv)]

    def cut(text: list[int], prompt: int, stop: set[int]) -> list[int]:
        ends = [i + 1 for i in range(prompt, len(text)) if text[i] in stop]
        return text[: min(ends, default=len(text))]

    def wanted(stop: set[int]) -> list[list[int]]:
        return [cut(text, len(p), stop) for text, p in zip(full, prompts, strict=True)]

    def lengths(texts: list[list[int]]) -> set[int]:
        return {len(text) - len(p) for text, p in zip(texts, prompts, strict=True)}

    pairs = [{a, b} for a in range(37) for b in range(a)]
    stop = max(pairs, key=lambda stop: (len(lengths(wanted(stop))), -max(lengths(wanted(stop)))))
    want = wanted(stop)
    assert len(lengths(want)) >= 3 and max(lengths(want)) < 20
    options = {"temperature": 0, "kv_cache": kv, "stop": stop}
    assert [t.tolist() for t in engine.generate(model, prompts, 20, **options)] == want
    rows = [row.tolist() for row in engine.stream(model, prompts, 20, **options)]
    for b, (text, prompt) in enumerate(zip(want, prompts, strict=True)):
        new = [row[b] for row in rows]
        assert new == text[len(prompt) :] + [ENDED] * (len(rows) - len(text) + len(prompt))
    (text,) = engine.generate(model, prompts[:1], 20, temperature=0, kv_cache=kv, stop=full[0][8])
    assert text.tolist() == cut(full[0], 5, {full[0][8]})


def test_a_tensor_of_rows_that_ended_repeats_the_last_token() -> None:
    model, idx = lively(), tokens(T=5)
    full = engine.generate(model, idx, 9, temperature=0)
    text = engine.generate(
        model, idx, 9, temperature=0, stop=lambda row, new: row == 0 and len(new) == 2
    )
    assert torch.equal(text[0, :7], full[0, :7]) and (text[0, 7:] == full[0, 6]).all()
    assert torch.equal(text[1], full[1])
    short = engine.generate(model, idx, 9, temperature=0, stop=lambda row, new: len(new) == 2)
    assert torch.equal(short, full[:, :7])


def test_nothing_is_computed_after_the_last_row_has_ended(monkeypatch) -> None:
    calls = []
    hidden = GPT.hidden
    monkeypatch.setattr(
        GPT, "hidden", lambda self, *a, **k: calls.append(1) or hidden(self, *a, **k)
    )
    engine.generate(build().eval(), tokens(T=5), 100, stop=lambda row, new: len(new) == 4)
    assert len(calls) == 4


# --- logits processors ---


@pytest.mark.parametrize("kv", KV_CACHES)
@pytest.mark.parametrize("compile", [False, True])
def test_processors(kv, compile, eager_graphs) -> None:
    """One that does nothing changes nothing; one that bans is obeyed; each sees all so far."""
    if compile and kv != "static":
        return
    model, idx = lively(), tokens(T=5)
    options = {"kv_cache": kv, "compile": compile, "vocab_size": 30}

    def text(processor: Any = None) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return engine.generate(
            model, idx, 15, generator=generator, logits_processor=processor, **options
        )

    seen = []

    def nothing(input_ids: Tensor, logits: Tensor) -> Tensor:
        assert input_ids.dtype == torch.int64 and logits.shape == (len(input_ids), 30)
        seen.append(input_ids.clone())
        return logits

    plain = text()
    assert torch.equal(text(nothing), plain)
    if kv == "paged":  # each row by itself
        seen = [torch.cat(pair) for pair in zip(seen[::2], seen[1::2], strict=True)]
    assert len(seen) == 15
    assert all(torch.equal(ids, plain[:, :n]) for n, ids in enumerate(seen, 5))

    def even(input_ids: Tensor, logits: Tensor) -> Tensor:
        return logits.masked_fill(torch.arange(30) % 2 == 1, -torch.inf)

    assert (plain[:, 5:] % 2 == 1).any() and (text(even)[:, 5:] % 2 == 0).all()

    def one_more(input_ids: Tensor, logits: Tensor) -> Tensor:
        """The token after the last, and nothing else."""
        return torch.full_like(logits, -torch.inf).scatter(1, (input_ids[:, -1:] + 1) % 30, 0.0)

    want = (idx[:, -1:] % 30 + torch.arange(1, 16)) % 30
    assert torch.equal(text(one_more)[:, 5:], want)


@pytest.mark.parametrize("kv", KV_CACHES)
def test_a_processor_never_sees_padding(kv) -> None:
    """So prompts of different lengths are given to it one by one, each as if it were alone."""

    def rarely(input_ids: Tensor, logits: Tensor) -> Tensor:
        """What was there before becomes less likely: padding would count as token 0."""
        assert (input_ids != 0).all() or (prompt0 := input_ids[:, 0]).numel() == prompt0.numel()
        return logits - 5 * torch.zeros_like(logits).scatter(1, input_ids, 1.0)

    model, prompts = lively(), ragged()
    options = {"temperature": 0, "kv_cache": kv, "logits_processor": rarely}
    four = engine.generate(model, prompts, 14, **options)
    for text, prompt in zip(four, prompts, strict=True):
        assert torch.equal(text[None], engine.generate(model, prompt[None], 14, **options))
    assert not torch.equal(
        four[0], engine.generate(model, prompts, 14, temperature=0, kv_cache=kv)[0]
    )


@pytest.mark.parametrize("kv", ["none", "dynamic", "static", "paged"])
def test_a_processor_is_not_asked_about_a_text_that_has_ended(kv) -> None:
    """Row r ends after r + 1 tokens, and a processor that knows it by its first token hears of it
    no more: one that counts what it was shown would count too much."""
    seen: list[list[int]] = []

    def note(input_ids: Tensor, logits: Tensor) -> Tensor:
        seen.extend(input_ids.tolist())
        return logits

    prompts = [torch.tensor([row] * T) for row, T in enumerate((5, 1, 9, 3))]
    ends = {"stop": lambda row, new: len(new) > row}
    engine.generate(lively(), prompts, 9, kv_cache=kv, logits_processor=note, **ends)
    calls = [sum(text[0] == row for text in seen) for row in range(4)]
    assert calls == [1, 2, 3, 4]


# --- nothing waits for the device ---


@pytest.mark.parametrize("kv", ["none", "dynamic", "static"])
def test_the_loop_reads_nothing_back(kv, monkeypatch) -> None:
    """No value of a tensor is asked for but in one place, once a step."""
    model, prompts = build().eval(), ragged()
    engine.generate(model, prompts, 20, kv_cache=kv)  # the backends are probed
    asked: list[str] = []
    allowed = []

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
    with torch.no_grad():
        options = Options(top_k=4, top_p=0.9, temperature=0.7)
        run = engine._Batch(model, prompts, 20, None, kv, False, options)
        assert len(list(run.launch())) == 20
    assert asked == []
    wait = Copy.wait

    def read_back(self: Any) -> list[int]:
        allowed.append(1)
        try:
            return wait(self)
        finally:
            allowed.pop()

    monkeypatch.setattr(Copy, "wait", read_back)
    list(engine.stream(model, prompts, 20, kv_cache=kv, stop=36))
    assert asked == []
    assert bool(torch.ones(())) and asked == ["__bool__"]  # the watch works


# --- constraints ---

PATTERN = r"[0-9]{3}-[0-9]{4}( [a-zé]+)*"


class Bytes:
    """A tokenizer of bytes, whose token 256 ends a text."""

    eot = 256

    def token_bytes(self) -> list[bytes]:
        return [bytes([b]) for b in range(256)] + [b""]


def constrained(constraint: Any, n: int = 20, **options: Any) -> list[str]:
    model = build(block_size=64, vocab_size=320).eval()
    prompts = [tokens(1, T, vocab_size=256, seed=T)[0] for T in (5, 3, 9)]
    options = {"generator": torch.Generator().manual_seed(3), "vocab_size": 257, **options}
    out = engine.generate(model, prompts, n, constraint=constraint, **options)
    new = [text[len(prompt) :].tolist() for text, prompt in zip(out, prompts, strict=True)]
    return [bytes(t for t in row if t < 256).decode() for row in new]


@pytest.mark.parametrize("sampling", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0}],
                         ids=str)  # fmt: skip
def test_a_constrained_text_matches_with_every_cache(sampling) -> None:
    constraint = constrain.regex(PATTERN, Bytes())
    for n in (8, 9, 20):  # 8 tokens are the shortest match
        want = constrained(constraint, n, kv_cache="none", **sampling)
        assert all(re.fullmatch(PATTERN, text) for text in want), want
        for kv in CACHES:
            assert constrained(constraint, n, kv_cache=kv, **sampling) == want
    with pytest.raises(ValueError, match="has 8 tokens, and there is room for 7"):
        constrained(constraint, 7)


def test_a_constraint_comes_after_the_processor_and_leaves_it_a_say() -> None:
    constraint = constrain.choices(["yes", "no", "perhaps"], Bytes())

    def never_p(ids: Tensor, logits: Tensor) -> Tensor:
        logits[:, ord("p")], logits[:, ord("x")] = -torch.inf, 1e4
        return logits

    for seed in range(5):
        texts = constrained(constraint, generator=torch.Generator().manual_seed(seed),
                            logits_processor=never_p)  # fmt: skip
        assert set(texts) <= {"yes", "no"}


def test_a_constraint_where_the_context_ends() -> None:
    """overflow="stop" leaves each row what block_size leaves: it still ends with a match."""
    constraint = constrain.regex(PATTERN, Bytes())
    model = build(block_size=64, vocab_size=320).eval()
    prompts = [tokens(1, T, vocab_size=256)[0] for T in (50, 55)]
    out = engine.generate(
        model, prompts, 30, constraint=constraint, vocab_size=257, overflow="stop"
    )
    for text, prompt in zip(out, prompts, strict=True):
        new = bytes(t for t in text[len(prompt) :].tolist() if t < 256).decode()
        assert re.fullmatch(PATTERN, new) and len(text) <= 64


# --- torch.compile ---


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that torch.compile makes, run as they are; each has the addresses of its calls."""
    graphs: list[Any] = []
    torch_compile = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            graph.addresses.append([t.data_ptr() for t in args])
            return graph(*args)

        graph.addresses = []
        graphs.append(graph)
        return run

    def compile(function: Any, **how: Any) -> Any:
        assert how["fullgraph"] and how["dynamic"] is False
        return torch_compile(function, fullgraph=True, dynamic=False, backend=backend)

    monkeypatch.setattr(torch, "compile", compile)
    engine.compiled.cache_clear()
    torch._dynamo.reset()
    yield graphs
    engine.compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("device, mode", [("cpu", None), ("cuda", "reduce-overhead")])
def test_cuda_graphs_are_asked_for_where_there_are_any(device, mode, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: asked.append(how))
    engine.compiled.__wrapped__(engine.next_logits, device)
    assert asked == [{"fullgraph": True, "dynamic": False, "mode": mode}]


@pytest.mark.parametrize("name", [pytest.param("manual", marks=pytest.mark.slow), "sdpa"])
def test_a_decode_step_is_one_graph_for_each_bucket(name, eager_graphs) -> None:
    """Buckets of 128, 256 and 300 places; another text of another length compiles nothing."""
    model = lively(block_size=300, n_kv_head=2, attention_backend=name)
    want = engine.generate(model, tokens(T=5), 295, temperature=0, kv_cache="none")
    for T in (5, 40, 5):
        got = engine.generate(
            model, want[:, :T], 300 - T, temperature=0, kv_cache="static", compile=True
        )
        assert torch.equal(got, want)
        assert len(eager_graphs) == 3


def test_other_numbers_need_no_other_graph(eager_graphs) -> None:
    model = lively()

    def text(compile: bool, **sampling: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return engine.generate(model, tokens(T=5), 9, kv_cache="static", compile=compile,
                              generator=generator, **sampling)  # fmt: skip

    for sampling in ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.3, "top_p": 0.5}):
        assert torch.equal(text(True, **sampling), text(False, **sampling))
    assert len(eager_graphs) == 1


def test_prompts_of_any_lengths_through_the_graph(eager_graphs) -> None:
    model = lively()
    for overflow in ("slide", "stop"):
        options = {"temperature": 0, "overflow": overflow}
        want = engine.generate(model, ragged(), 30, kv_cache="none", **options)
        got = engine.generate(model, ragged(), 30, kv_cache="static", compile=True, **options)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))
    assert len(eager_graphs) == 1


def test_a_processor_runs_between_two_graphs(eager_graphs) -> None:
    model = build().eval()
    options = {"kv_cache": "static", "compile": True, "temperature": 0}
    engine.generate(model, tokens(T=5), 9, logits_processor=lambda ids, logits: logits, **options)
    assert len(eager_graphs) == 2


def test_a_constraint_is_part_of_the_graph(eager_graphs) -> None:
    constraint = constrain.regex(PATTERN, Bytes())
    want = constrained(constraint, kv_cache="none")
    assert constrained(constraint, kv_cache="static", compile=True) == want
    assert constrained(constraint, 30, kv_cache="static", compile=True) != want
    assert len(eager_graphs) == 1


def recordings(graph: Any) -> tuple[int, int]:
    """CUDA graphs that torch would record, one for each set of addresses of the static inputs; and
    how many inputs are not static: they are copied to a fixed place at each call."""
    kinds = [
        bool(node.meta["tensor_dict"].get("_dynamo_static_input_type"))
        for node in graph.graph.nodes
        if node.op == "placeholder"
    ]
    assert all(len(call) == len(kinds) for call in graph.addresses) and any(kinds)
    fixed = {tuple(p for p, static in zip(call, kinds) if static) for call in graph.addresses}
    return len(fixed), kinds.count(False)


@pytest.mark.parametrize(
    "options, new_each_step",
    [
        ({"temperature": 0}, 1),  # the token before
        ({"top_p": 0.9}, 4),  # it, a random number, temperature, top_p
    ],
    ids=str,
)
def test_every_call_finds_the_graph_that_was_recorded(options, new_each_step, eager_graphs) -> None:
    """A CUDA graph holds the addresses of the weights, of the cache and of the constraint."""
    model = lively()
    kept = []  # memory that is not free at the next call
    for T in (5, 9, 3):
        how = {**options, "generator": torch.Generator().manual_seed(1)}
        want = engine.generate(model, tokens(T=T), 7, **how)
        how["generator"] = torch.Generator().manual_seed(1)
        got = engine.generate(model, tokens(T=T), 7, kv_cache="static", compile=True, **how)
        assert torch.equal(got, want)
        kept.append(torch.empty(2**16))
    (graph,) = eager_graphs
    assert len(graph.addresses) == 3 * 6 and recordings(graph) == (1, new_each_step)


def test_a_constraints_tables_stay_where_they_are(eager_graphs) -> None:
    """They are a module's buffers, which torch.compile takes for static by itself."""
    constraint = constrain.choices(["yes", "no", "perhaps"], Bytes())
    constrained(constraint, kv_cache="static", compile=True)
    (graph,) = eager_graphs
    # the token before, a random number, temperature, the state
    assert len(graph.addresses) > 2 and recordings(graph) == (1, 4)


def test_a_cache_that_was_used_before_is_empty(eager_graphs) -> None:
    model = lively()
    how = {"kv_cache": "static", "compile": True, "temperature": 0}
    want = engine.generate(model, tokens(T=5), 9, **how)
    (cache,) = engine._idle[model].values()
    for t in (*cache.k, *cache.v, cache.start, cache.count):
        t.fill_(7 if t.dtype == torch.int32 else torch.nan)
    cache.lengths, cache.counts = [99, 99], (1, 0)
    assert torch.equal(engine.generate(model, tokens(T=5), 9, **how), want)
    assert [*engine._idle[model].values()] == [cache]


def test_two_texts_at_once_have_a_cache_each(eager_graphs) -> None:
    model = lively()
    how = {"kv_cache": "static", "compile": True, "temperature": 0}
    prompts = [tokens(T=5, seed=seed) for seed in (1, 2)]
    want = [list(engine.stream(model, prompt, 9, temperature=0)) for prompt in prompts]
    both = zip(*(engine.stream(model, prompt, 9, **how) for prompt in prompts), strict=True)
    got = [*zip(*both, strict=True)]
    assert all(torch.equal(torch.stack(g), torch.stack(w)) for g, w in zip(got, want, strict=True))
    assert len(engine._idle[model]) == 1  # of one size one is kept

    broken_off = engine.stream(model, prompts[0], 9, **how)
    next(broken_off)
    assert not engine._idle[model]
    broken_off.close()
    assert len(engine._idle[model]) == 1


def test_a_model_that_was_cast_since_gets_another_cache(eager_graphs) -> None:
    model = lively()
    for dtype in (torch.float32, torch.bfloat16, torch.float32):
        model.to(dtype)
        want, got = (
            engine.generate(model, tokens(T=5), 9, temperature=0, **how)
            for how in ({}, {"kv_cache": "static", "compile": True})
        )
        assert torch.equal(got, want)
    assert len(engine._idle[model]) == 2


@pytest.mark.slow
def test_a_longer_text_gets_a_longer_cache(eager_graphs) -> None:
    model = lively(block_size=256)
    for n in (9, 130, 9):
        want, got = (
            engine.generate(model, tokens(T=5), n, temperature=0, **how)
            for how in ({}, {"kv_cache": "static", "compile": True})
        )
        assert torch.equal(got, want)
    assert sorted(cache.max_len for cache in engine._idle[model].values()) == [128, 256]


@pytest.mark.slow
def test_a_cache_is_kept_as_long_as_its_model_and_in_every_mode(eager_graphs) -> None:
    model = lively()
    how = {"kv_cache": "static", "compile": True, "temperature": 0}
    with torch.inference_mode():
        want = engine.generate(model, tokens(T=5), 9, **how)
    assert torch.equal(engine.generate(model, tokens(T=5), 9, **how), want)
    (cache,) = map(weakref.ref, engine._idle[model].values())
    del model
    torch._dynamo.reset()
    eager_graphs.clear()
    gc.collect()
    assert cache() is None


def test_the_compiler_gives_the_same_tokens() -> None:
    """inductor itself, on a small model."""
    torch._dynamo.reset()
    engine.compiled.cache_clear()
    model = lively(n_layer=1, attention_window=6)

    def text(**how: Any) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        return engine.generate(model, tokens(T=5), 9, top_k=5, generator=generator, **how)

    assert torch.equal(text(kv_cache="static", compile=True), text())


# --- on a GPU ---


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kv", CACHES)
def test_on_a_gpu_every_cache_gives_the_tokens_of_no_cache(kv) -> None:
    model, prompts = lively(block_size=64).cuda(), [p.cuda() for p in ragged()]
    want = engine.generate(model, prompts, 50, temperature=0, kv_cache="none")
    for compile in (False, True)[: 1 + (kv == "static")]:
        how = {"kv_cache": kv, "compile": compile, "temperature": 0}
        got = engine.generate(model, prompts, 50, **how)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kv", CACHES)
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_on_a_gpu_nothing_is_waited_for_between_two_tokens(kv, on) -> None:
    """Whatever device the random numbers come from; they are drawn 64 steps at a time."""
    model, prompts = lively(block_size=128).cuda(), [p.cuda() for p in ragged()]
    generators = [torch.Generator(on).manual_seed(row) for row in range(4)]
    how = {"kv_cache": kv, "top_k": 5, "generator": generators}
    list(engine.stream(model, prompts, 100, **how))  # the kernels are chosen
    steps = engine.stream(model, prompts, 100, **how)
    next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(steps)) == 99
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@cuda
def test_on_a_gpu_later_calls_find_the_cuda_graphs_of_the_first() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.cudagraph_trees import get_manager

    def recorded() -> int:
        manager = get_manager(torch.cuda.current_device(), create_if_none_exists=False)
        return -1 if manager is None else manager.new_graph_id().id  # each look counts as one

    torch._dynamo.reset()
    engine.compiled.cache_clear()
    counters.clear()
    model = lively(block_size=256).cuda()
    how = {"kv_cache": "static", "compile": True, "temperature": 0}
    want = engine.generate(model, tokens(T=5).cuda(), 40, kv_cache="dynamic", temperature=0)
    assert torch.equal(engine.generate(model, tokens(T=5).cuda(), 40, **how), want)
    before, kept = recorded(), []
    assert before > 0 and counters["inductor"]["cudagraph_skips"] == 0
    for T in (5, 9, 3):
        engine.generate(model, tokens(T=T).cuda(), 40, **how)
        kept.append(torch.empty(2**20, device="cuda"))  # memory that is not free at the next call
    assert recorded() == before + 1
