"""Generation: the same tokens with every cache, in a batch and alone; prompts as text."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import small_tokenizer
from test_model import HERE, SHAPES, TINY, build, tokens
from torch import Tensor

import data
from attention import BACKENDS, Phase
from inference import engine, serve
from inference.cache import DynamicCache, PagedCache, StaticCache
from inference.engine import KV_CACHES
from inference.graphs import compiled
from inference.sampling import ENDED, Stats
from model import GPT

pytestmark = pytest.mark.usefixtures("remembered_probes")

CACHES = [kv for kv in KV_CACHES if kv != "none"]
SLOW = {"flex", "triton"}  # compiled or interpreted here: one shape of model is enough


def can_decode(name: str, kv: str) -> bool:
    page_size = 16 if kv == "paged" else None
    spec = TINY.specs(Phase("cpu", "float32", False, False, False, kv, page_size))[0]
    # paged reads caches only, and the prompt of a static cache is plain attention.
    return not BACKENDS[name].why_not(spec, HERE) and (name, kv) != ("paged", "static")


PAIRS = [(name, kv) for kv in CACHES for name in BACKENDS if can_decode(name, kv)]


def lively(**changes: Any) -> GPT:
    return build(scale=20.0, **changes).eval()


def greedy(model: GPT, idx: Tensor, n: int) -> Tensor:
    return model.generate(idx, n, top_k=1)


def ragged() -> list[Tensor]:
    return [tokens(1, T, seed=T)[0] for T in (5, 1, 9, 5)]


@cache
def manual_text(shape: str, T: int, n: int) -> Tensor:
    return greedy(lively(attention_backend="manual", **SHAPES[shape]), tokens(T=T), n)


@pytest.mark.parametrize("name, kv", [
    pytest.param(*pair, marks=[pytest.mark.slow] * (pair[0] == "triton")) for pair in PAIRS
    if pair[0] != "flex"  # compiles for half a minute: test_attention.py has its caches
])
def test_greedy_tokens_are_those_without_a_cache(name, kv) -> None:
    """GQA, MQA, windows; beyond block_size 16, where texts slide."""
    for shape, changes in SHAPES.items():
        if name in SLOW and shape != "mqa-window":
            continue
        model = lively(attention_backend=name, attention_fallback=False, **changes)
        sizes = [(5, 5)] if name in SLOW else [(1, 17), (20, 2)]
        for T, n in sizes:
            got = engine.generate(model, tokens(T=T), n, temperature=0, kv_cache=kv)
            assert torch.equal(got, manual_text(shape, T, n)), (shape, T)


def caches(kv: str, model: GPT, B: int, max_len: int) -> Any:
    config = model.config
    sizes = {"dtype": model.transformer.wte.weight.dtype}
    heads = config.kv_heads, config.head_dim
    if kv == "dynamic":
        return DynamicCache(config.n_layer, max_len=max_len, windows=config.windows).reserve
    if kv == "static":
        sizes |= {"windows": config.windows, "in_order": config.position == "alibi"}
        return StaticCache(config.n_layer, B, max_len, *heads, **sizes).reserve
    n_pages = dict.fromkeys(config.windows, B * max_len + 1)
    sizes |= {"n_pages": n_pages, "windows": config.windows, "page_size": 4}
    paged = PagedCache(config.n_layer, *heads, **sizes)
    rows = [paged.pool.new() for _ in range(B)]
    return lambda T: paged.reserve(T, [T] * B, rows)


CHUNKS = {"prefill": [16], "chunked prefill, decode": [4, 5, 2, *[1] * 5]}


@torch.no_grad()
def cached_logits(model: GPT, idx: Tensor, kv: str, chunks: list[int]) -> Tensor:
    reserve, logits, n = caches(kv, model, len(idx), 16), [], 0
    for T in chunks:
        step = reserve(T)
        out, _ = model(idx[:, n : n + T], cache=step)
        step.advance()
        logits.append(out)
        n += T
    return torch.cat(logits, dim=1)


@cache
@torch.no_grad()
def manual_logits(shape: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    plain = build(attention_backend="manual", **SHAPES[shape]).eval().to(dtype)
    return plain(tokens())[0].double(), copy.deepcopy(plain).double()(tokens())[0]


@pytest.mark.parametrize("dtype", few([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("phase", CHUNKS)
@pytest.mark.parametrize("name, kv", [p for p in PAIRS if p[0] not in SLOW])
def test_logits_are_those_without_a_cache(name, kv, phase, dtype) -> None:
    """At most twice manual's error, plus one rounding."""
    for shape, changes in SHAPES.items():
        model = build(attention_backend=name, **changes).eval().to(dtype)
        yardstick, truth = manual_logits(shape, dtype)
        got = cached_logits(model, tokens(), kv, CHUNKS[phase])
        assert got.dtype == dtype and got.isfinite().all()
        allowed = 2 * (yardstick - truth).abs().max()
        allowed += torch.finfo(dtype).eps * truth.abs().max()
        assert (got - truth).abs().max() <= allowed, shape


def test_memory_of_the_caches() -> None:
    """2 layers, K and V, 4 heads of 8 floats: 512 bytes a token."""
    model = build(block_size=256).eval()
    for kv, tokens_held in (("none", 0), ("dynamic", 128), ("static", 129), ("paged", 96 + 16)):
        stats = Stats()
        engine.generate(model, tokens(1, 64), 32, kv_cache=kv, stats=stats)
        assert stats.cache_bytes == 512 * tokens_held, kv
    windowed, stats = build(block_size=256, attention_window=8).eval(), Stats()
    engine.generate(windowed, tokens(1, 64), 99, stats=stats)
    assert stats.cache_bytes <= 512 * 16
    # 32 texts, one after the other: the prompts of one prefill, and the windows of all.
    prompts = [tokens(1, 200)[0]] * 32
    engine.generate(windowed, prompts, 2, kv_cache="paged", page_size=4, stats=stats)
    assert stats.cache_bytes <= 512 * (2048 + 32 * 12 + 4)


@pytest.mark.parametrize("kv", KV_CACHES)
def test_tokens_that_never_come_cost_nothing(kv) -> None:
    """10 TB of ids, also where texts slide (block_size 16)."""
    steps = engine.stream(lively(), tokens(2, 5), 10**12, temperature=0, kv_cache=kv)
    got = torch.stack([next(steps) for _ in range(140)], dim=1)
    assert torch.equal(got, greedy(lively(), tokens(2, 5), 140)[:, 5:])


# --- sampling ---


def test_generation_repeats_with_the_seed_and_leaves_no_graph() -> None:
    model, idx = build().eval(), tokens(T=5)

    def draw(seed: int) -> Tensor:
        return engine.generate(model, idx, 30, generator=torch.Generator().manual_seed(seed))

    state = torch.get_rng_state()
    assert torch.equal(draw(1), draw(1)) and not torch.equal(draw(1), draw(2))
    assert torch.equal(state, torch.get_rng_state())
    assert torch.is_grad_enabled() and not draw(1).requires_grad
    for _ in engine.stream(model, idx, 2):
        assert torch.is_grad_enabled()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("kv", KV_CACHES)
def test_a_processor_may_return_any_dtype(kv, dtype) -> None:
    def between(tokens: Tensor, logits: Tensor) -> Tensor:
        return torch.eye(37)[(tokens[:, -1] + 1) % 37].to(dtype)

    def in_step(tokens: Tensor, logits: Tensor, lengths: Tensor) -> Tensor:
        return between(tokens.gather(1, lengths[:, None] - 1), logits)

    for processor, prompts in ((in_step, ragged()), (between, tokens(2, 5))):
        how = {"temperature": 0, "kv_cache": kv, "logits_processor": processor}
        for prompt, text in zip(prompts, engine.generate(lively(), prompts, 3, **how)):
            assert text[len(prompt) :].tolist() == [(int(prompt[-1]) + i) % 37 for i in (1, 2, 3)]


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("kv", KV_CACHES)
def test_logits_without_a_token_are_an_error(kv, how, value) -> None:
    def spoil(tokens: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(0, tokens.new_ones(1), value) if tokens.shape[1] > 6 else logits

    options = {**how, "kv_cache": kv, "logits_processor": spoil}
    steps = engine.stream(build().eval(), tokens(2, 5), 9, **options)
    assert all(0 <= int(t) < 37 for _ in range(2) for t in next(steps))
    with pytest.raises(ValueError, match=r"text 1: .*NaN"):
        next(steps)


@pytest.mark.parametrize("kv", KV_CACHES)
def test_a_row_ends_with_its_stop_token(kv) -> None:
    """Ids of any kind; a tensor's row repeats it."""
    model, prompts, how = lively(), ragged(), {"temperature": 0, "kv_cache": kv}
    full = [t.tolist() for t in engine.generate(model, prompts, 20, **how)]

    def cut(stop: set[int]) -> list[list[int]]:
        ends = [[n for n in range(len(p), len(t)) if t[n] in stop] for t, p in zip(full, prompts)]
        return [text[: min(end, default=len(text)) + 1] for text, end in zip(full, ends)]

    pairs = itertools.combinations(range(37), 2)
    ids = max(pairs, key=lambda s: len({len(t) - len(p) for t, p in zip(cut({*s}), prompts)}))
    one, few_ids = ids[0], torch.tensor(ids)
    for stop, want in (
        *((kind, cut({one})) for kind in (one, np.uint16(one), few_ids[0], np.array(one))),
        *((kind, cut({*ids})) for kind in (iter(ids), few_ids.numpy(), few_ids, [*few_ids])),
    ):
        got = engine.generate(model, prompts, torch.tensor(20), stop=stop, **how)
        assert [t.tolist() for t in got] == want
    assert len({len(t) - len(p) for t, p in zip(want, prompts)}) >= 3
    rows = [row.tolist() for row in engine.stream(model, prompts, 20, stop=ids, **how)]
    for b, (text, prompt) in enumerate(zip(want, prompts)):
        new = [row[b] for row in rows]
        assert new == text[len(prompt) :] + [ENDED] * (len(rows) - len(text) + len(prompt))
    idx = tokens(T=5)
    plain = engine.generate(model, idx, 9, **how)
    short = engine.generate(model, idx, 9, stop=lambda row, new: row == 0 and len(new) == 2, **how)
    assert torch.equal(short[0, :7], plain[0, :7]) and (short[0, 7:] == plain[0, 6]).all()
    assert torch.equal(short[1], plain[1])


@pytest.fixture
def eager_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """torch.compile's graphs, run eagerly."""
    graphs: list[Any] = []
    torch_compile = torch.compile

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    def compile(function: Any, **how: Any) -> Any:
        assert how["fullgraph"] and how["dynamic"] is False
        return torch_compile(function, fullgraph=True, dynamic=False, backend=backend)

    monkeypatch.setattr(torch, "compile", compile)
    compiled.cache_clear()
    torch._dynamo.reset()
    yield graphs
    compiled.cache_clear()
    torch._dynamo.reset()


@pytest.mark.parametrize("name", [pytest.param("manual", marks=pytest.mark.slow), "sdpa"])
def test_a_decode_step_is_one_graph_for_each_bucket(name, eager_graphs) -> None:
    """Buckets of 128 and 140 slots; other lengths compile nothing."""
    model = lively(n_layer=1, block_size=140, n_kv_head=2, attention_backend=name)
    want = engine.generate(model, tokens(T=5), 135, temperature=0, kv_cache="none")
    for T in (5, 100):
        got = engine.generate(
            model, want[:, :T], 140 - T, temperature=0, kv_cache="static", compile=True
        )
        assert torch.equal(got, want)
        assert len(eager_graphs) == 2


@pytest.mark.slow
def test_the_compiler_gives_the_same_tokens() -> None:
    torch._dynamo.reset()
    compiled.cache_clear()
    model = lively(n_layer=1, attention_window=6)
    texts = [engine.generate(model, tokens(T=5), 9, top_k=5, kv_cache="static", compile=on,
                             generator=torch.Generator().manual_seed(1)) for on in (True, False)]
    assert torch.equal(*texts)


# --- texts ---

# Each entry is a token: a stop string may begin and end within one.
PIECES = ["a", "b", "ab", "ba", "aab", "\n", "é", "\n\n", "b\n", " a", "."]


def talker(eot: int | None = None) -> GPT:
    """A tokenizer of PIECES, and ids without a token."""
    model = lively(block_size=64)
    model.tokenizer = data.CharTokenizer(PIECES, eot)
    return model


def seeded(n: int = 1) -> dict[str, Any]:
    return {"generator": [torch.Generator().manual_seed(b) for b in range(n)], "temperature": 1.5}


def cut(ids: list[int], stops: list[str]) -> tuple[str, int]:
    """The text before the first complete stop string, and its tokens."""
    text = ""
    for n, token in enumerate(ids, 1):
        text += PIECES[token]
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)], n
    return text, len(ids)


@settings(max_examples=12, deadline=None)
@given(st.lists(st.text("ab\né .", min_size=1, max_size=4), min_size=1, max_size=3),
       st.sampled_from(KV_CACHES))
def test_a_text_ends_before_a_stop_string(stops, kv) -> None:
    model, prompts = talker(), ["ab", "b\n", "a"]
    ids = [[0, 1], [1, 5], [0]]
    how = {"kv_cache": kv, "max_new_tokens": 30}
    free = engine.generate(model, ids, **how, **seeded(3))
    want = [cut(t[len(p) :].tolist(), stops) for t, p in zip(free, ids)]
    texts = engine.generate(model, prompts, **how, **seeded(3), stop=stops)
    assert texts == [p + text for p, (text, _) in zip(prompts, want)]
    ended = engine.generate(model, ids, **how, **seeded(3), stop=stops)
    assert [len(t) - len(p) for t, p in zip(ended, ids)] == [n for _, n in want]
    if kv == "paged":
        counts = [0, 0, 0]
        for row, token in serve.stream(model, ids, 30, slots=2, stop=stops, **seeded(3)):
            counts[row] += token != ENDED
        assert counts == [n for _, n in want]


def test_texts_give_texts_and_ids_give_ids() -> None:
    model = talker()
    one = engine.generate(model, "ab", 30, **seeded())
    assert isinstance(one, str) and one.startswith("ab") and len(one) > 30
    assert engine.generate(model, ["ab"], 30, **seeded()) == [one]
    assert engine.generate(model, "ab", 0) == "ab"
    (ids,) = engine.generate(model, [[0, 1]], 30, **seeded())
    assert "".join(PIECES[i] for i in ids) == one
    assert [int(t) for t in engine.stream(model, "ab", 30, **seeded())] == ids[2:].tolist()
    served = serve.stream(model, iter(["ab"]), 30, **seeded())
    assert [*served] == [*((0, int(i)) for i in ids[2:]), (0, ENDED)]
    model = talker(eot=4)
    before = "".join(PIECES[i] for i in ids[: ids.tolist().index(4)])
    assert engine.generate(model, "ab", 30, **seeded()) == before
    assert engine.generate(model, "ab", 30, stop=lambda b, new: False, **seeded()) == before
    assert len(engine.generate(model, [[0, 1]], 30, **seeded())[0]) == 32


def test_a_character_of_several_tokens_stops_a_text() -> None:
    """é is two tokens of GPT-2's; the first alone is no text."""
    model = lively(vocab_size=50304, n_embd=16)
    model.tokenizer = gpt2 = data.GPT2Tokenizer()
    coming = [*gpt2.encode("one é"), *gpt2.encode("two")]

    def force(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1] - 1
        return torch.full_like(logits, -9.0).index_fill(1, torch.tensor(coming[n]), 9.0)

    how = {"temperature": 0, "logits_processor": force}
    for stop, want in ((None, "xone étwo"), (" é", "xone"), (["twice", "et"], "xone étwo")):
        assert engine.generate(model, "x", len(coming), stop=stop, **how) == want


@pytest.mark.parametrize("kind", ["llama", "wordpiece"])
def test_the_space_after_the_prompt_stays(kind, tmp_path) -> None:
    model = lively(vocab_size=300, n_embd=16)
    model.tokenizer = made = data.FileTokenizer.read(small_tokenizer(tmp_path, kind))
    made.begin = ()
    coming = made.encode("rose a")

    def force(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        new = coming[tokens.shape[1] - n]
        return torch.full_like(logits, -9.0).index_fill(1, torch.tensor(new), 9.0)

    # llama: the prompt's space is a token of its own.
    after = {"a": " rose a", "a rose ": " rose a" if kind == "llama" else "rose a"}
    for prompt, new in after.items():
        n, how = len(made.encode(prompt)), {"temperature": 0, "logits_processor": force}
        assert engine.generate(model, prompt, len(coming), **how) == prompt + new


@pytest.mark.parametrize("kv", ["dynamic", "paged"])
def test_invalid_options_are_named(kv) -> None:
    model, idx = build().eval(), tokens(T=5)
    for options, words in (
        ({"kv_cache": "ring"}, "kv_cache.*ring"), ({"compile": True}, "compile.*kv_cache"),
        ({"temperature": -1}, "temperature.* -1"), ({"temperature": None}, "temperature.*None"),
        ({"top_k": 2.0}, r"top_k.*2\.0"), ({"top_p": "x"}, "top_p.*'x'"),
        *(({"stop": stop}, "stop.*'x'") for stop in ("x", ["x"], [3, "x"])),
        ({"stop": [3, 37]}, "stop.* 36.*37"), ({"stop": torch.tensor([1.0])}, r"stop.*1\."),
        ({"stop": np.array([True])}, "stop.*True"), ({"unused": [-1]}, "unused.*-1"),
        ({"vocab_size": 9, "unused": [9]}, "unused.* 8.* 9"),
        ({"logits_processor": lambda tokens, logits: logits.tolist()}, "logits_processor.*list"),
        ({"logits_processor": lambda tokens, logits, lengths: logits[:1]}, r"\(1, 37\)"),
        *(({"max_new_tokens": n}, f"max_new_tokens.*{re.escape(repr(n))}")
          for n in (-1, 3.0, True, torch.tensor(2.5))),
        *(({"idx": prompts}, "prompt") for prompts in (
            [], [[]], [[1], []], torch.zeros(2, 0, dtype=torch.int64), torch.tensor([1]),
            torch.tensor([[1.5]]), [[True]], [[1, 37]], torch.tensor([[-1]]))),
        ({"idx": "ab"}, "'ab'"), ({"idx": "a", "stop": "", "model": talker()}, "''"),
        ({"idx": "q", "model": talker()}, "'q'"),
    ):  # fmt: skip
        how: Any = {"model": model, "idx": idx, "max_new_tokens": 5, "kv_cache": kv} | options
        with pytest.raises(ValueError, match=words):
            engine.generate(**how)
    for function in (engine.generate, engine.stream, serve.stream):
        with pytest.raises(TypeError, match="'temprature'"):
            list(function(model, idx, 5, temprature=1))


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kv", [*CACHES, "auto"])
def test_on_a_gpu_every_cache_gives_the_tokens_of_no_cache(kv) -> None:
    model, prompts = lively(block_size=64).cuda(), [p.cuda() for p in ragged()]
    want = engine.generate(model, prompts, 50, temperature=0, kv_cache="none")
    for compile in (False, True)[: 1 + (kv == "static")]:
        how = {"kv_cache": kv, "compile": compile, "temperature": 0}
        got = engine.generate(model, prompts, 50, **how)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kv", [*CACHES, "auto"])
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_on_a_gpu_decoding_never_synchronizes(kv, on) -> None:
    model, prompts = lively(block_size=128).cuda(), [p.cuda() for p in ragged()]
    generators = [torch.Generator(on).manual_seed(row) for row in range(4)]
    how = {"kv_cache": kv, "top_k": 5, "generator": generators}
    list(engine.stream(model, prompts, 100, **how))
    steps = engine.stream(model, prompts, 100, **how)
    next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(steps)) == 99
    finally:
        torch.cuda.set_sync_debug_mode("default")
