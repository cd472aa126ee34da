"""Texts from Python: prompts as text, end tokens and stop strings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import KV_CACHES, lively

import data
from inference import engine, serve
from inference.sampling import ENDED
from model import GPT

pytestmark = pytest.mark.usefixtures("remembered_probes")

# Each entry is a token: a stop string may begin and end within one.
PIECES = ["a", "b", "ab", "ba", "aab", "\n", "é", "\n\n", "b\n", " a", "."]


def talker(eot: int | None = None) -> GPT:
    """A model with a tokenizer of PIECES, and ids above them that no token has."""
    model = lively(block_size=64)
    model.tokenizer = data.CharTokenizer(PIECES, eot)
    return model


def seeded(n: int) -> dict[str, Any]:
    return {"generator": [torch.Generator().manual_seed(b) for b in range(n)], "temperature": 1.5}


def cut(ids: list[int], stops: list[str]) -> tuple[str, int]:
    """The text before the first stop string that is complete, and the tokens up to there."""
    text = ""
    for n, token in enumerate(ids, 1):
        text += PIECES[token]
        if found := [text.index(stop) for stop in stops if stop in text]:
            return text[: min(found)], n
    return text, len(ids)


@settings(max_examples=25, deadline=None)
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
    one = engine.generate(model, "ab", 9, **seeded(1))
    assert isinstance(one, str) and one.startswith("ab") and len(one) > 9
    assert engine.generate(model, ["ab"], 9, **seeded(1)) == [one]
    assert engine.generate(model, "ab", 0) == "ab"
    (ids,) = engine.generate(model, [[0, 1]], 9, **seeded(1))
    assert "".join(PIECES[i] for i in ids) == one  # no id without a token is drawn
    assert engine.generate(model, torch.tensor([[0, 1]]), 9, **seeded(1)).tolist() == [ids.tolist()]
    steps = engine.stream(model, "ab", 9, **seeded(1))
    assert [int(t) for t in steps] == ids[2:].tolist()
    served = serve.stream(model, iter(["ab"]), 9, **seeded(1))
    assert [*served] == [*((0, int(i)) for i in ids[2:]), (0, ENDED)]


def test_an_end_token_ends_a_text_and_is_no_part_of_it() -> None:
    (free,) = engine.generate(talker(), [[0, 1]], 30, **seeded(1))
    model, end = talker(eot=4), free.tolist().index(4)
    before = "".join(PIECES[i] for i in free[:end])
    assert engine.generate(model, "ab", 30, **seeded(1)) == before
    assert engine.generate(model, "ab", 30, stop=lambda b, new: False, **seeded(1)) == before
    (ids,) = engine.generate(model, [[0, 1]], 30, **seeded(1))  # ids go on
    assert len(ids) == 32


def test_a_character_of_several_tokens_stops_a_text() -> None:
    """é is two tokens of GPT-2's; the first alone is no text."""
    model = lively(vocab_size=50304, n_embd=16)
    model.tokenizer = gpt2 = data.GPT2Tokenizer()
    coming = [*gpt2.encode("one é"), *gpt2.encode("two")]

    def force(tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1] - 1
        return torch.full_like(logits, -9.0).index_fill(1, torch.tensor(coming[n]), 9.0)

    how = {"temperature": 0, "logits_processor": force}
    assert engine.generate(model, "x", len(coming), **how) == "xone étwo"
    assert engine.generate(model, "x", len(coming), stop=" é", **how) == "xone"
    assert engine.generate(model, "x", len(coming), stop=["twice", "et"], **how) == "xone étwo"


def test_errors_name_the_text() -> None:
    for stop in ("x", ["x"], [3, "x"]):
        with pytest.raises(ValueError, match=r"stop.*'x'"):
            engine.generate(lively(), [[1]], 5, stop=stop)
    with pytest.raises(ValueError, match=r"stop.*''"):
        engine.generate(talker(), "a", 5, stop="")
    with pytest.raises(ValueError, match="'ab'"):
        engine.generate(lively(), "ab", 5)
    with pytest.raises(ValueError, match="'ab'"):
        engine.generate(talker(), ["ab", [1]], 5)
    with pytest.raises(ValueError, match="'q'"):
        engine.generate(talker(), "q", 5)
