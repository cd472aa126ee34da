"""Logits processors, constraints, captured steps: the same tokens with every cache, and matches."""

from __future__ import annotations

import json
import logging
import math
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import eager_graphs, lively, ragged  # noqa: F401 (a fixture)
from test_model import SHAPES, theirs, tokens, transformers  # noqa: F401 (a fixture)
from torch import Tensor

import data
from core.cpu import int8
from core.settings import UserError
from inference import constrain, engine, graphs
from inference.constrain import Automaton
from model import GPT

pytestmark = pytest.mark.usefixtures("remembered_probes", "eager_graphs")

WAYS: list[dict[str, Any]] = [{"kv_cache": kv} for kv in engine.KV_CACHES]
WAYS.append({"kv_cache": "static", "compile": True})


class Vocabulary(NamedTuple):
    tokens: list[bytes]
    ends: Any = ()

    def token_bytes(self) -> list[bytes]:
        return self.tokens

    def matches(self, pattern: str, ids: Iterable[int]) -> bool:
        try:
            return re.fullmatch(pattern, b"".join(self.tokens[i] for i in ids).decode()) is not None
        except UnicodeDecodeError:
            return False


# 37 tokens, as the models of these tests: some are parts of characters, two are ends.
PIECES = [b"ab", b"ba", b"abc", b" ", "é".encode(), b"\xc3", b"\xa9", b"\xa9a", b"00", b"-"]
TOKENS = [bytes([b]) for b in b"abcdefghijklm0123456789xy"] + PIECES + [b"", b""]
ENDS = (35, 36)


small = cache(partial(lively, n_layer=1))


def every_way(model: GPT, prompts: Any, n: int, **options: Any) -> list[list[int]]:
    """New tokens, the same in all WAYS."""
    found = []
    for way in WAYS:
        options["generator"] = [torch.Generator().manual_seed(b) for b in range(len(prompts))]
        texts = engine.generate(model, prompts, n, **way, **options)
        found.append([t[len(p) :].tolist() for t, p in zip(texts, prompts, strict=True)])
    assert all(texts == found[0] for texts in found)
    return found[0]


# --- constraints: exactly the texts that match ---

atoms = st.sampled_from(["a", "b", "c", "é", ".", "[ab]", "[^a]", "[é-í]", r"\x61", r"\w", r"\d"])
repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,3}", "*?", "??", "+?"])
patterns = st.recursive(
    atoms,
    lambda p: st.one_of(
        *(st.builds(form.format, p, p) for form in ("{}{}", "({}|{})", "(?:{}|{}|)")),
        st.builds("(?:{}){}".format, p, repeats),
    ),
    max_leaves=6,
)


def all_texts(automaton: Automaton, vocabulary: Vocabulary, left: int) -> set[tuple[int, ...]]:
    """Every text as tokens, without the end."""
    ended, going = set(), [((), automaton.start([0], [left]))]
    while going:
        text, state = going.pop()
        allowed = automaton(torch.zeros(1, len(vocabulary.tokens)), state)[0] > -math.inf
        assert allowed.any()
        for token in allowed.nonzero()[:, 0].tolist():
            after = automaton.advance(state, torch.tensor([token]))
            if int(after[0, 0]) != constrain.END:
                going.append(((*text, token), after))
            else:
                ended.add(text if token in vocabulary.ends else (*text, token))
    return ended


@settings(max_examples=20, deadline=None)
@given(patterns, st.sets(st.sampled_from([*PIECES, b"a", b"b"]), min_size=1, max_size=4),
       st.integers(1, 4), st.integers(0, 2))
def test_the_texts_are_those_that_python_matches(pattern, pieces, left, n_ends) -> None:
    """Exactly re.fullmatch's."""
    V = len(pieces)
    vocabulary = Vocabulary([*pieces, *[b""] * n_ends], ends=list(range(V, V + n_ends)))
    level: list[tuple[int, ...]] = [()]
    # Without an end, no text is empty, and a text that can go on does.
    expected = {()} if vocabulary.matches(pattern, ()) and n_ends else set()
    for _ in range(left):
        level = [(*ids, i) for ids in level for i in range(V)]
        expected |= {ids for ids in level if vocabulary.matches(pattern, ids)}
    try:
        automaton = constrain.regex(pattern, vocabulary)
    except UserError as e:
        assert "matches" in str(e) and expected <= {()}
        return
    if not expected:
        with pytest.raises(UserError, match="shortest"):
            automaton.start([0], [left])
        return
    goes_on = set() if n_ends else {ids[:n] for ids in expected for n in range(len(ids))}
    assert all_texts(automaton, vocabulary, left) == expected - goes_on


def test_other_constraints_reuse_the_graph(eager_graphs) -> None:  # noqa: F811
    for pattern in ("[a-f]{3}-[0-9]{4}", "(ab|é)+c?"):
        constraint = constrain.regex(pattern, Vocabulary(TOKENS, ENDS))
        every_way(small(), ragged(), 12, constraint=constraint)
        assert len(eager_graphs) == 1


def test_the_tokenizers_of_models() -> None:
    gpt2, pattern = data.GPT2Tokenizer(), "[0-9]{3}-é+[a-c]*"
    byte_level = data.FileTokenizer(json.dumps(gpt2.to_json()), gpt2.eot)
    characters = data.CharTokenizer([*map(chr, range(32, 256)), "<e>"], eot=224)
    for tokenizer in (gpt2, byte_level, characters):
        model = lively(vocab_size=tokenizer.vocab_size + 3, n_embd=16)
        options = {"constraint": constrain.regex(pattern, tokenizer), "kv_cache": "paged"}
        for prompt, text in zip(ragged(), engine.generate(model, ragged(), 16, **options)):
            shown = tokenizer.decode(t for t in text[len(prompt) :].tolist() if t != tokenizer.eot)
            assert re.fullmatch(pattern, shown), shown
    words = {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False}}
    refused = data.FileTokenizer(json.dumps(gpt2.to_json() | words))
    with pytest.raises(UserError, match=r"tokenizer\.json.*WordPiece"):
        constrain.regex(pattern, refused)


@pytest.mark.parametrize("pattern, place", [
    ("ab(c", 2), ("^ab)", 3), ("a[z-b]", 1), ("[a", 0), (r"é\p{Foo}", 1), ("b{3,1}", 2), ("a{", 1),
    (r"x\q", 1), ("xy(?=a)", 2), ("(?P<x>a)(?P=x)", 8), ("a$b", 1), (r"(a)\p{L}\1", 8),
    ("a\n(", 2), ("a\\", 1), ("*", 0), ("(^a)", 1), (r"\Aa", 0), (r"a\B", 1), (r"a\z", 1),
    ("Z", ""), ("", ""), ("\ud800", 0),
])
def test_a_pattern_that_cannot_be_is_named_with_the_place(pattern, place) -> None:
    with pytest.raises(UserError, match=re.escape(repr(pattern))) as error:
        constrain.regex(pattern, Vocabulary(TOKENS))
    assert place == "" or f"position {place}" in str(error.value)


@pytest.mark.parametrize("pattern", few(["(" * 9 + "a?" + "){9}" * 9, "(a|b)*a(a|b){40}"], 0))
def test_a_pattern_of_too_many_states_is_refused(pattern) -> None:
    with pytest.raises(UserError, match=re.escape(repr(pattern)[:50])):
        constrain.regex(pattern, Vocabulary(TOKENS))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4.2 * 2**20  # kB


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_compilation(number) -> None:
    code = (
        "from core.settings import exit_on_user_error; from inference import automaton\n"
        "def main():\n"
        "    print('ready', flush=True)\n"
        "    automaton.build('(a{1000}){1000}{10}', [b'a'], [])\n"
        "exit_on_user_error(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                          cwd=Path(__file__).parents[1]) as process:  # fmt: skip
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(1)
        process.send_signal(number)
        assert process.wait(timeout=15) == 128 + number


def test_rows_and_constraints_must_fit() -> None:
    one = constrain.regex("[1-9]{5}", Vocabulary(TOKENS, ENDS))
    for each, n, words in (([one], 5, "2 prompts.* 1"), (one, 4, "5 tokens.* 4")):
        for way in WAYS:
            with pytest.raises(ValueError, match=words):
                engine.generate(small(), tokens(T=3), n, constraint=each, **way)


def rarely(tokens: Tensor, logits: Tensor, lengths: Tensor) -> Tensor:
    """Padding must not count."""
    at = torch.arange(tokens.shape[1])
    real = (at > 0) & (at < lengths[:, None])
    return logits.scatter_add(1, tokens, -2.0 * real)


def by_python(tokens: Tensor, logits: Tensor) -> Tensor:
    assert tokens.dtype == torch.int64 and len(tokens) == len(logits)
    for row, text in zip(logits, tokens.tolist(), strict=True):
        for token in text[1:]:
            row[token] -= 2.0
    return logits


def by_hand(text: list[int], n: int) -> list[int]:
    for _ in range(n):
        logits = small()(torch.tensor([text[-16:]]))[0][0, -1].detach()
        counts = Counter(text[1:])
        text = [*text, int(logits.sub(2.0 * torch.tensor([counts[v] for v in range(37)])).argmax())]
    return text[-n:]


@pytest.mark.slow
def test_a_processor_reads_exactly_the_text(eager_graphs) -> None:  # noqa: F811
    """Up to block_size 16 and beyond; one graph, or two with Python."""
    how: Any = small(), ragged(), 13
    plain = every_way(*how, temperature=0)
    want = [by_hand(prompt.tolist(), 13) for prompt in ragged()]
    for processor, n_graphs in ((rarely, 1), (by_python, 2)):
        eager_graphs.clear()
        assert every_way(*how, temperature=0, logits_processor=processor) == want != plain
        assert len(eager_graphs) == n_graphs


PROCESSORS: dict[str, Any] = {
    "RepetitionPenalty": [1.8], "NoRepeatNGram": [2], "MinLength": [12, [7, 3]],
    "ForcedEOSToken": [14, 7],
}


@pytest.mark.parametrize("names", few([[*PROCESSORS], *([name] for name in PROCESSORS)]), ids=str)
def test_processors_of_transformers(names, transformers, tmp_path: Path) -> None:  # noqa: F811
    """As their greedy generate() of one row."""
    each = [getattr(transformers, f"{n}LogitsProcessor")(*PROCESSORS[n]) for n in names]
    them, made = theirs(transformers, tmp_path), transformers.LogitsProcessorList(each)
    how = {"max_length": 14, "do_sample": False, "eos_token_id": [7, 3], "pad_token_id": 7}
    options: dict[str, Any] = {"temperature": 0, "stop": [7, 3], "logits_processor": made}
    ours = every_way(GPT.from_pretrained(str(tmp_path)).eval(), ragged(), 13, **options)
    for prompt, got in zip(ragged(), ours, strict=True):
        want = them.generate(prompt[None], logits_processor=made, **how)[0, len(prompt) :]
        assert got[: 14 - len(prompt)] == want.tolist()


# --- captured decoding, with the device's part replaced: a graph runs its step again ---


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Captured steps."""
    made: list[Any] = []

    def record(step: Callable[[], None], device: torch.device) -> Callable[[], None]:
        made.append(step)
        return step

    monkeypatch.setattr(graphs, "possible", lambda device: True)
    monkeypatch.setattr(graphs, "record", record)
    yield made


def text(model: Any, n: int = 30, **options: Any) -> list[list[int]]:
    options.setdefault("generator", [torch.Generator().manual_seed(b) for b in range(4)])
    return [t.tolist() for t in engine.generate(model, ragged(), n, **options)]


HOWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0}, "seeds": {}, "top_p": {"top_p": 0.8, "top_k": 9},
    "constraint": {"constraint": True}, "in step": {"logits_processor": rarely},
    "python": {"logits_processor": by_python}, "stop": {"stop": [3, 9]},
}  # fmt: skip


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("shape", few(["llama-window", "plain"]))
def test_captured_tokens_are_those_of_the_eager_static_cache(shape, how, recorded) -> None:
    """Also in a second call without captures, and for sliding texts."""
    model, options = lively(**SHAPES[shape]), dict(HOWS[how])
    if "constraint" in options:
        options["constraint"] = constrain.regex("[ab]{3}.*", Vocabulary(TOKENS, ENDS))
    want = text(model, kv_cache="static", **options)
    assert not recorded
    assert text(model, **options) == want
    n = len(recorded)
    assert n == (2 if how == "python" else 1)
    assert text(model, **options) == want
    assert len(recorded) == (2 * n if how == "in step" else n)  # its numbers may have changed


def test_weights_that_moved_are_captured_again(recorded) -> None:
    model, other = lively(), lively(n_head=2)
    before = text(model, temperature=0)
    for n, move in enumerate((
        lambda: model.load_state_dict(other.state_dict(), assign=True),
        lambda: model.to(torch.float64).to(torch.float32),
        lambda: int8.convert(model, model.head_weight),
    ), 2):  # fmt: skip
        move()
        want = text(model, temperature=0, kv_cache="static")
        assert text(model, temperature=0) == want
        assert len(recorded) == n
    with torch.no_grad():
        model.transformer.wte.weight.mul_(-1)
    assert text(model, temperature=0) == text(model, temperature=0, kv_cache="static") != before
    assert len(recorded) == n


def test_a_capture_that_fails_is_one_warning_and_eager(recorded, monkeypatch, caplog) -> None:
    def fail(*args: Any) -> Any:
        try:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        finally:
            raise RuntimeError("the end of the capture failed")

    monkeypatch.setattr(graphs, "record", fail)
    model = lively()
    want = text(model, kv_cache="static")
    with caplog.at_level(logging.WARNING):
        assert text(model) == text(model) == want
        text(model, top_k=36)  # another kind of step with the same reason
    (record,) = [r for r in caplog.records if "captur" in r.message]
    assert "not permitted" in record.message and "more" not in record.message
