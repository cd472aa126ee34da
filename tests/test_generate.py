"""Generation: with every cache the tokens that a loop over the whole text draws."""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_data import small_tokenizer
from test_model import build, tokens
from torch import Tensor

import data
from core.cpu import int8
from core.settings import UserError
from inference import constrain, engine, serve
from inference.graphs import KV_CACHES
from inference.sampling import ENDED, Draw, Options, Stats, sample_token, uniform
from model import GPT

pytestmark = pytest.mark.usefixtures("remembered_probes")

CPU = torch.device("cpu")


def lively(**changes: Any) -> GPT:
    return build(scale=20.0, **changes).eval()


def ragged() -> list[Tensor]:
    return [tokens(1, T, seed=T)[0] for T in (5, 1, 9, 5)]


def seeds(n: int = 4) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(b) for b in range(n)]


# --- the options of generate() with every cache ---

# 37 tokens, as many as the models have: some are parts of characters, two are ends.
PARTS = [b"ab", b"ba", b"abc", b" ", "é".encode(), b"\xc3", b"\xa9", b"\xa9a", b"00", b"-"]
TOKENS = [bytes([b]) for b in b"abcdefghijklm0123456789xy"] + PARTS + [b"", b""]
ENDS = (35, 36)


class Vocabulary:
    def __init__(self, tokens: Any, ends: Any = ()) -> None:
        self.tokens, self.ends = tokens, ends

    def token_bytes(self) -> list[bytes]:
        return self.tokens


def rarely(tokens: Tensor, logits: Tensor, lengths: Tensor) -> Tensor:
    """A part of the step: padding must not count."""
    at = torch.arange(tokens.shape[1])
    return logits.scatter_add(1, tokens, -2.0 * ((at > 0) & (at < lengths[:, None])))


def by_python(tokens: Tensor, logits: Tensor) -> Tensor:
    for row, text in zip(logits, tokens.tolist(), strict=True):
        for token in text[1:]:
            row[token] -= 2.0
    return logits


def next_id(tokens: Tensor, logits: Tensor) -> Tensor:
    return torch.eye(37)[(tokens[:, -1] + 1) % 37].long()


def next_half(tokens: Tensor, logits: Tensor, lengths: Tensor) -> Tensor:
    return next_id(tokens.gather(1, lengths[:, None] - 1), logits).half()


LLAMA = {"position": "rope", "norm": "rms", "mlp": "swiglu", "bias": False, "tied": False,
         "n_kv_head": 2}
GREEDY = {"temperature": 0.0}
# The model's options, those of generate(), the number of new tokens: block_size is 16.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "greedy, sliding": ({}, GREEDY, 20),
    "seeds": ({}, {}, 14),
    "one token": ({}, {}, 1),
    "none": ({}, {}, 0),
    "one generator": ({"block_size": 96}, {"generator": 5}, 75),
    "one generator, rows end": (
        {"block_size": 96}, {"generator": 5, "stop": lambda b, new: len(new) == 9 + 4 * b}, 75),
    "no generator": ({}, {"generator": None, "top_k": 5}, 14),
    "top_k and top_p": ({}, {"top_k": 9, "top_p": 0.8, "temperature": 0.9}, 14),
    "vocab_size, unused": ({}, {"vocab_size": 30, "unused": [3, 17, 29], "top_p": 0.9}, 14),
    "stop": ({}, {"stop": [3, 9, 30]}, 20),
    "in step, seeds": ({"n_kv_head": 2}, {"logits_processor": rarely, "top_k": 9}, 9),
    "in step, float16": ({}, {"logits_processor": next_half}, 3),
    "python, stop": ({}, {"logits_processor": by_python, "stop": 5}, 14),
    "python, int64": ({}, {"logits_processor": next_id}, 3),
    "constraint": ({}, {"constraint": "[a-f]{2,5}-é?[0-9]+"}, 12),
    "constraints": ({}, {"constraint": ["[ab]+", None, "(00|é)*-", "[x-y]{9}"]}, 12),
    "constraint, greedy": ({"n_kv_head": 1}, {"constraint": "[^a]{3,}", **GREEDY}, 8),
    "all": ({"attention_window": 5}, {"constraint": "[a-m]*", "logits_processor": rarely,
                                      "top_k": 20, "top_p": 0.95}, 9),
    "windows": ({"attention_window": (3, None)}, {}, 14),
    "window of one": ({"attention_window": 1}, GREEDY, 9),
    "llama": ({**LLAMA, "qk_norm": True}, GREEDY, 14),
    "llama, window": ({**LLAMA, "attention_window": (6, 2)}, {"top_p": 0.9}, 20),
    "alibi, window": ({"position": "alibi", "attention_window": 5, "n_kv_head": 2}, {}, 14),
    "float64": ({"dtype": torch.float64}, {}, 9),
    "int8": ({"int8": True, "tied": False, "n_kv_head": 2}, GREEDY, 20),
    "int8, llama": ({**LLAMA, "qk_norm": True, "int8": True}, {}, 14),
    "manual": ({"attention_backend": "manual", "attention_window": (None, 3)}, GREEDY, 14),
    "tiled": ({"attention_backend": "tiled", "n_kv_head": 2}, GREEDY, 14),
    "shared prefix": ({"block_size": 48}, {"prompts": "shared"}, 14),
    "shared, window": ({"block_size": 48, "attention_window": 9}, {"prompts": "shared"}, 14),
    "longer than block_size": ({}, {"prompts": "long", "top_k": 5}, 5),
}


def prompts_of(kind: str) -> list[Tensor]:
    if kind == "shared":  # pages of 4: two full ones are common, one more to two of them
        begin = tokens(1, 11, seed=3)[0]
        ends = [[1], [1, 2, 3, 4], [1, 2, 3, 5], [6]]
        return [torch.cat([begin[: 11 - 2 * (b == 3)], torch.tensor(e)])
                for b, e in enumerate(ends)]
    return [tokens(1, T, seed=T)[0] for T in (20, 3, 16)] if kind == "long" else ragged()


@torch.no_grad()
def by_hand(model: GPT, prompts: list[Tensor], n: int, generator: Any = None, stop: Any = (),
            constraint: Any = None, logits_processor: Any = None, **how: Any) -> list[list[int]]:
    """New tokens: each text alone, read whole for each token."""
    each = generator if isinstance(generator, list) else [generator] * len(prompts)
    numbers = [uniform(CPU, g) for g in each]
    limits = constraint if isinstance(constraint, list) else [constraint] * len(prompts)
    ends = stop if callable(stop) else lambda b, new: new[-1] in (
        {stop} if isinstance(stop, int) else {*stop})
    V, draw = how.get("vocab_size", 37), Draw.by(Options(37, None, **how), CPU)
    found: list[list[int]] = []
    for b, (prompt, limit) in enumerate(zip(prompts, limits)):
        text, new, over = prompt.tolist(), list[int](), n == 0
        state = limit and limit.start(0, n)
        while not over:
            logits = model(torch.tensor([text[-model.config.block_size :]]))[0][:, -1, :V]
            if logits_processor:
                in_step = "lengths" in inspect.signature(logits_processor).parameters
                args = torch.tensor([text]), logits, *[torch.tensor([len(text)])] * in_step
                logits = logits_processor(*args).to(logits.dtype)
            logits = logits if limit is None else limit(logits, state)
            u = next(numbers[b]) if how.get("temperature", 1.0) else None
            token = sample_token(logits, draw._replace(u=u))
            text, new = [*text, int(token)], [*new, int(token)]
            over = len(new) == n or ends(b, new)
            if limit is not None:
                state = limit.advance(state, token)
                over = over or int(state[0, 0]) == constrain.END
        found.append(new)
    return found


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_cache_draws_what_a_loop_over_the_text_draws(setting) -> None:
    changes, options, n = SETTINGS[setting]
    prompts = prompts_of(options.get("prompts", ""))
    model = lively(**{k: v for k, v in changes.items() if k not in ("dtype", "int8")})
    model.to(changes.get("dtype"))
    if "int8" in changes:
        int8.convert(model, model.head_weight)
    limits = options.get("constraint")
    one = isinstance(limits, str)
    limits = [limit and constrain.regex(limit, Vocabulary(TOKENS, ENDS))
              for limit in ([limits] if one else limits or ())]

    def given() -> dict[str, Any]:
        how = {"generator": seeds(len(prompts)), **options}
        if isinstance(how["generator"], int):
            how["generator"] = torch.Generator().manual_seed(how["generator"])
        torch.manual_seed(7)
        how |= {"constraint": limits[0] if one else limits} if limits else {}
        return {k: v for k, v in how.items() if k != "prompts"}

    want = by_hand(model, prompts, n, **given())
    ids = {*range(options.get("vocab_size", 37))} - {*options.get("unused", ())}
    assert ids >= {token for row in want for token in row}
    for kv in KV_CACHES:
        pages = {"page_size": 4} if kv == "paged" else {}
        how, state = given(), torch.get_rng_state()
        texts = engine.generate(model, prompts, n, kv_cache=kv, **pages, **how)
        assert [t[len(p) :].tolist() for t, p in zip(texts, prompts, strict=True)] == want, kv
        assert how["generator"] is None or torch.equal(state, torch.get_rng_state())
    if "generator" not in options:  # numbers of one generator come in another order
        new: list[list[int]] = [[] for _ in prompts]
        for b, token in serve.stream(model, iter(prompts), n, slots=2, page_size=4, **given()):
            assert torch.is_grad_enabled()
            new[b] += [] if token == ENDED else [token]
        assert new == want
    if n > 9 and options != GREEDY and "generator" not in options:  # an option changes the texts
        assert want != by_hand(model, prompts, n, **GREEDY)


# --- what comes out ---


def test_memory_of_the_caches() -> None:
    """2 layers, K and V, 4 heads of 8 floats: 512 bytes a token."""
    model, windowed = (build(block_size=256, attention_window=w).eval() for w in (None, 8))
    # 32 texts, one after the other: the prompts of one prefill, and the windows of all.
    several = [tokens(1, 200)[0]] * 32
    for kv, who, prompts, n, held in (
        ("none", model, tokens(1, 64), 32, 0), ("dynamic", model, tokens(1, 64), 32, 128),
        ("static", model, tokens(1, 64), 32, 129), ("paged", model, tokens(1, 64), 32, 96 + 16),
        ("dynamic", windowed, tokens(1, 64), 99, 16), ("paged", windowed, several, 2, 2436)):
        stats, pages = Stats(), {"page_size": 4} if prompts is several else {}
        engine.generate(who, prompts, n, kv_cache=kv, stats=stats, **pages)
        got = stats.cache_bytes
        assert got == 512 * held or (who is windowed and 0 < got <= 512 * held), kv


@pytest.mark.parametrize("kv", KV_CACHES)
def test_tokens_that_never_come_cost_nothing(kv) -> None:
    """10 TB of ids, also where texts slide (block_size 16)."""
    steps = engine.stream(lively(), tokens(2, 5), 10**12, temperature=0, kv_cache=kv)
    got = torch.stack([next(steps) for _ in range(140)], dim=1)
    assert got.tolist() == by_hand(lively(), [*tokens(2, 5)], 140, temperature=0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.5}], ids=str)
@pytest.mark.parametrize("kv", KV_CACHES)
def test_logits_without_a_token_are_an_error(kv, how, value) -> None:
    def spoil(tokens: Tensor, logits: Tensor) -> Tensor:
        return logits.index_fill(0, tokens.new_ones(1), value) if tokens.shape[1] > 6 else logits

    options = {**how, "kv_cache": kv, "logits_processor": spoil}
    steps = engine.stream(build().eval(), tokens(2, 5), 9, **options)
    assert all(0 <= int(t) < 37 for _ in range(2) for t in next(steps))
    with pytest.raises(UserError, match=r"text 1: .*NaN"):
        next(steps)


@pytest.mark.parametrize("kv", KV_CACHES)
def test_a_row_ends_with_its_stop_token(kv) -> None:
    """Ids of any kind; a stream has ENDED for it, a tensor's row repeats the token."""
    model, prompts, how = lively(), ragged(), {"temperature": 0, "kv_cache": kv}
    free = by_hand(model, prompts, 20, temperature=0)
    ids = free[0][4], free[1][3]
    array = torch.tensor(ids)
    kinds = [(one, ids[:1]) for one in (ids[0], np.uint16(ids[0]), array[0], np.array(ids[0]))]
    kinds += [(several, ids) for several in (iter(ids), array.numpy(), array, [*array])]
    for stop, those in kinds:
        want = [row[: next((n for n, t in enumerate(row, 1) if t in those), 20)] for row in free]
        got = engine.generate(model, prompts, torch.tensor(20), stop=stop, **how)
        assert [t[len(p) :].tolist() for t, p in zip(got, prompts)] == want
    assert len({*map(len, want)}) >= 3
    steps = torch.stack([*engine.stream(model, prompts, 20, stop=ids, **how)]).T.tolist()
    most = max(map(len, want))
    assert steps == [row + [ENDED] * (most - len(row)) for row in want]
    square = engine.generate(model, tokens(T=5), 9, **how)
    short = engine.generate(model, tokens(T=5), 9, **how,
                            stop=lambda row, new: row == 0 and len(new) == 2)
    assert torch.equal(short[0, :7], square[0, :7]) and (short[0, 7:] == square[0, 6]).all()
    assert torch.equal(short[1], square[1])


# --- texts ---

# Each entry is a token: a stop string may begin and end within one.
PIECES = ["a", "b", "ab", "ba", "aab", "\n", "é", "\n\n", "b\n", " a", "."]


def talker(eot: int | None = None) -> GPT:
    """A tokenizer of PIECES, and ids without a token."""
    model = lively(block_size=64)
    model.tokenizer = data.CharTokenizer(PIECES, eot)
    return model


def seeded(n: int = 1) -> dict[str, Any]:
    return {"generator": seeds(n), "temperature": 1.5}


def cut(ids: list[int], stops: list[str]) -> tuple[str, int]:
    """The text before the first complete stop string, and its tokens."""
    text = ""
    for n, token in enumerate(ids, 1):
        text += PIECES[token]
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)], n
    return text, len(ids)


cuts = st.tuples(st.integers(0, 2), st.integers(0, 40), st.integers(1, 5))


@settings(max_examples=15, deadline=None)
@given(st.lists(cuts, min_size=1, max_size=3), st.sampled_from(KV_CACHES))
def test_a_text_ends_before_a_stop_string(cuts, kv) -> None:
    """Parts of the texts, wherever their tokens end, and one that no text has."""
    model, prompts, ids = talker(), ["ab", "b\n", "a"], [[0, 1], [1, 5], [0]]
    how = {"kv_cache": kv, "max_new_tokens": 30}
    free = engine.generate(model, ids, **how, **seeded(3))
    whole = ["".join(PIECES[i] for i in t[len(p) :]) for t, p in zip(free, ids)]
    stops = ["é..é", *filter(None, (whole[row][at : at + n] for row, at, n in cuts))]
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
    for more in ({}, {"stop": lambda b, new: False}):
        assert engine.generate(model, "ab", 30, **seeded(), **more) == before
    assert len(engine.generate(model, [[0, 1]], 30, **seeded())[0]) == 32


@pytest.mark.parametrize("kind, prompt, new, stop, want", [
    ("gpt2", "x", ["one é", "two"], None, "xone étwo"),
    ("gpt2", "x", ["one é", "two"], " é", "xone"),
    ("gpt2", "x", ["one é", "two"], ["twice", "et"], "xone étwo"),
    ("llama", "a", ["rose a"], None, "a rose a"),  # the prompt's space is a token of its own
    ("llama", "a rose ", ["rose a"], None, "a rose  rose a"),
    ("wordpiece", "a rose ", ["rose a"], None, "a rose rose a"),
])
def test_tokens_join_as_the_tokenizer_joins_them(kind, prompt, new, stop, want, tmp_path) -> None:
    """é is two tokens of GPT-2's; the first alone is no text."""
    made: Any = data.GPT2Tokenizer()
    if kind != "gpt2":
        made = data.FileTokenizer.read(small_tokenizer(tmp_path, kind))
        made.begin = ()
    coming = [token for part in new for token in made.encode(part)]
    model = lively(vocab_size=max(300, made.vocab_size), n_embd=16, n_layer=1)
    model.tokenizer, n = made, len(made.encode(prompt))

    def force(tokens: Tensor, logits: Tensor) -> Tensor:
        token = torch.tensor(coming[tokens.shape[1] - n])
        return torch.full_like(logits, -9.0).index_fill(1, token, 9.0)

    how = {"temperature": 0, "logits_processor": force, "stop": stop}
    assert engine.generate(model, prompt, len(coming), **how) == want


@pytest.mark.parametrize("kv", ["dynamic", "paged"])
def test_invalid_options_are_named(kv) -> None:
    one = constrain.regex("[1-9]{5}", Vocabulary(TOKENS, ENDS))
    for options, words in (
        ({"kv_cache": "ring"}, "kv_cache.*ring"), ({"compile": True}, "compile.*kv_cache"),
        ({"temperature": -1}, "temperature.* -1"), ({"temperature": None}, "temperature.*None"),
        ({"temperature": math.nan}, "temperature.*nan"),
        ({"top_k": 2.0}, r"top_k.*2\.0"), ({"top_p": "x"}, "top_p.*'x'"),
        *(({"stop": stop}, "stop.*'x'") for stop in ("x", ["x"], [3, "x"])),
        ({"stop": [3, 37]}, "stop.* 36.*37"), ({"stop": torch.tensor([1.0])}, r"stop.*1\."),
        ({"stop": np.array([True])}, "stop.*True"), ({"unused": [-1]}, "unused.*-1"),
        ({"vocab_size": 9, "unused": [9]}, "unused.* 8.* 9"), ({"constraint": ["a+", None]}, "a"),
        ({"constraint": [one]}, "2 prompts.* 1"),
        ({"constraint": one, "max_new_tokens": 4}, "5 tokens.* 4"),
        ({"constraint": one, "prompts": "a", "who": talker}, "tokenizer of 37"),
        ({"logits_processor": lambda tokens, logits: logits.tolist()}, "logits_processor.*list"),
        ({"logits_processor": lambda tokens, logits, lengths: logits[:1]}, r"\(1, 37\)"),
        *(({"max_new_tokens": n}, f"max_new_tokens.*{re.escape(repr(n))}")
          for n in (-1, 3.0, True, torch.tensor(2.5))),
        *(({"prompts": prompts}, "prompt") for prompts in (
            [], [[]], [[1], []], torch.zeros(2, 0, dtype=torch.int64), torch.tensor([1]),
            torch.tensor([[1.5]]), [[True]], [[1, 37]], torch.tensor([[-1]]))),
        ({"prompts": "ab"}, "'ab'"), ({"prompts": "a", "stop": "", "who": talker}, "''"),
        ({"prompts": "q", "who": talker}, "'q'"),
    ):
        how: Any = {"prompts": tokens(T=5), "max_new_tokens": 5, "kv_cache": kv} | options
        model, prompts, n = (how.pop("who", build)(), how.pop("prompts"), how.pop("max_new_tokens"))
        with pytest.raises(ValueError, match=words):
            engine.generate(model, prompts, n, **how)
    for function in (engine.generate, engine.stream, serve.stream):
        for prompts, more in ((tokens(T=5), {"temprature": 1}), (tokens(T=5), {"samples": 2}),
                              (iter([[1, 2]]), {"slots": 2})):
            if function is engine.stream or "slots" not in more:
                with pytest.raises(TypeError, match=r"'temprature'|samples|iterator"):
                    list(function(build(), prompts, 5, **more))


cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.gpu
@cuda
@pytest.mark.parametrize("kv", ["auto", "dynamic", "static", "paged"])
@pytest.mark.parametrize("on", ["cpu", "cuda"])
def test_on_a_gpu_every_cache_draws_the_same_and_never_synchronizes(kv, on) -> None:
    model, prompts = lively(block_size=128).cuda(), [p.cuda() for p in ragged()]
    for compile in (False, True)[: 1 + (kv == "static")]:
        want, *others = (engine.generate(model, prompts, 50, temperature=0, kv_cache=one,
                                         compile=compile and one == kv) for one in ("none", kv))
        assert all(torch.equal(g, w) for g, w in zip(*others, want, strict=True))
    def drawn(kv: str) -> Any:
        generator = [torch.Generator(on).manual_seed(row) for row in range(4)]
        return engine.stream(model, prompts, 100, kv_cache=kv, top_k=5, generator=generator)

    with torch.profiler.profile() as watched:
        drawn_tokens = list(drawn(kv))
    if kv == "auto":  # replayed, and to the bit eager's
        assert "cudaGraphLaunch" in {event.key for event in watched.key_averages()}
        assert all(map(torch.equal, drawn_tokens, drawn("static")))
    steps = drawn(kv)
    next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert len(list(steps)) == 99
    finally:
        torch.cuda.set_sync_debug_mode("default")
