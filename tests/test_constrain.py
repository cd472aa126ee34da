"""Constraints: exactly the texts that match. Processors of transformers, captured steps."""

from __future__ import annotations

import json
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from conftest import few
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_generate import ENDS, PARTS, TOKENS, Vocabulary, by_python, lively, ragged, rarely, seeds
from test_model import SHAPES, theirs, tokens, transformers  # noqa: F401 (a fixture)

import data
from core.cpu import int8
from core.settings import UserError
from inference import constrain, engine, graphs
from inference.constrain import Automaton
from inference.graphs import compiled
from model import GPT

pytestmark = pytest.mark.usefixtures("remembered_probes", "eager_graphs")


def text(model: Any, n: int = 30, **options: Any) -> list[list[int]]:
    return [t.tolist() for t in engine.generate(model, ragged(), n, generator=seeds(), **options)]


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


def matches(pattern: str, pieces: Iterable[bytes]) -> bool:
    try:
        return re.fullmatch(pattern, b"".join(pieces).decode()) is not None
    except UnicodeDecodeError:
        return False


def all_texts(automaton: Automaton, vocabulary: Vocabulary, left: int) -> set[tuple[int, ...]]:
    """Every text as tokens, without the end."""
    ended, going = set(), [((), automaton.start(0, left))]
    while going:
        text, state = going.pop()
        assert len(text) < left
        allowed = automaton(torch.zeros(1, len(vocabulary.tokens)), state)[0] > -torch.inf
        assert allowed.any()
        for token in allowed.nonzero()[:, 0].tolist():
            after = automaton.advance(state, torch.tensor([token]))
            if int(after[0, 0]) != constrain.END:
                going.append(((*text, token), after))
            else:
                ended.add(text if token in vocabulary.ends else (*text, token))
    return ended


@settings(max_examples=20, deadline=None)
@example("(?:a|baa)", {b"a", b"b"}, 2, 1)  # no match of "b" is short enough
@given(patterns, st.sets(st.sampled_from([*PARTS, b"a", b"b"]), min_size=1, max_size=4),
       st.integers(1, 4), st.integers(0, 2))
def test_the_texts_are_those_that_python_matches(pattern, parts, left, n_ends) -> None:
    """Exactly re.fullmatch's."""
    pieces = [*parts]
    V = len(pieces)
    vocabulary = Vocabulary([*pieces, *[b""] * n_ends], ends=list(range(V, V + n_ends)))
    level: list[tuple[int, ...]] = [()]
    # Without an end, no text is empty, and a text that can go on does.
    expected = {()} if n_ends and matches(pattern, ()) else set()
    for _ in range(left):
        level = [(*ids, i) for ids in level for i in range(V)]
        expected |= {ids for ids in level if matches(pattern, map(pieces.__getitem__, ids))}
    try:
        automaton = constrain.regex(pattern, vocabulary)
    except UserError as e:
        assert "matches" in str(e) and expected <= {()}
        return
    if not expected:
        with pytest.raises(UserError, match="shortest"):
            automaton.start(0, left)
        return
    goes_on = set() if n_ends else {ids[:n] for ids in expected for n in range(len(ids))}
    assert all_texts(automaton, vocabulary, left) == expected - goes_on


def test_the_tokenizers_of_models() -> None:
    gpt2, pattern = data.GPT2Tokenizer(), "[0-9]{3}-é+[a-c]*"
    words = {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False}}
    with pytest.raises(UserError, match=r"tokenizer\.json.*WordPiece"):
        constrain.regex(pattern, data.FileTokenizer(json.dumps(gpt2.to_json() | words)))
    steps = {"type": "Sequence", "decoders": [gpt2.to_json()["decoder"], {"type": "Fuse"}]}
    byte_level = data.FileTokenizer(json.dumps(gpt2.to_json() | {"decoder": steps}), gpt2.eot)
    characters = data.CharTokenizer([*map(chr, range(32, 256)), "<e>"], eot=224)
    for tokenizer in (gpt2, byte_level, characters):
        model = lively(vocab_size=tokenizer.vocab_size + 3, n_embd=16, n_layer=1)
        options = {"constraint": constrain.regex(pattern, tokenizer), "kv_cache": "paged"}
        for prompt, text in zip(ragged(), engine.generate(model, ragged(), 16, **options)):
            shown = tokenizer.decode(t for t in text[len(prompt) :].tolist() if t != tokenizer.eot)
            assert re.fullmatch(pattern, shown), shown


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


@pytest.mark.parametrize("number", few([signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_the_compilation(number) -> None:
    code = (
        "from core.settings import exit_on_user_error; from inference import automaton\n"
        "def main():\n"
        "    print('ready', flush=True)\n"
        "    automaton.build('(a{1000}){1000}{10}', [b'a'], [])\n"
        "exit_on_user_error(main)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True,
                          cwd=ROOT) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(0.5)
        process.send_signal(number)
        assert process.wait(timeout=15) == 128 + number


# --- in the decode step ---


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
    want = engine.generate(model, tokens(T=5), 135, temperature=0, kv_cache="dynamic")
    for T in (5, 100):
        how = {"temperature": 0, "kv_cache": "static", "compile": True}
        assert torch.equal(engine.generate(model, want[:, :T], 140 - T, **how), want)
        assert len(eager_graphs) == 2


def test_constraints_share_a_graph(eager_graphs) -> None:
    model = lively(n_layer=1)
    for limit in ("[a-f]{3}-[0-9]{4}", "(ab|é)+c?"):
        how = {"constraint": constrain.regex(limit, Vocabulary(TOKENS, ENDS))}
        got = text(model, 8, kv_cache="static", compile=True, **how)
        assert got == text(model, 8, kv_cache="none", **how) and len(eager_graphs) == 1


def test_what_a_processor_bans_is_not_allowed_by_a_constraint() -> None:
    only = constrain.regex("[ab]{3}", Vocabulary(TOKENS, ENDS))
    banned = torch.tensor([i for i, token in enumerate(TOKENS) if {*token} <= {*b"ab"}])
    with pytest.raises(UserError, match="logits_processor"):
        text(lively(n_layer=1), 8, constraint=only,
             logits_processor=lambda tokens, logits: logits.index_fill(1, banned, -torch.inf))


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
    us = GPT.from_pretrained(str(tmp_path)).eval()
    want = [them.generate(p[None], logits_processor=made, **how)[0].tolist() for p in ragged()]
    for way in ({"kv_cache": "paged"}, {"kv_cache": "static", "compile": True}):
        assert [ids[:14] for ids in text(us, 13, **way, **options)] == want


# --- captured decoding: without a GPU a graph runs its step again ---


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Captured steps."""
    made: list[Any] = []
    monkeypatch.setattr(graphs, "possible", lambda device: True)
    monkeypatch.setattr(graphs, "record", lambda step, device: made.append(step) or step)
    return made


@pytest.mark.parametrize("how, captures, again", [
    ({"temperature": 0}, 1, 0), ({"top_p": 0.8, "top_k": 9}, 1, 0), ({"constraint": True}, 1, 0),
    ({"logits_processor": rarely}, 1, 1),  # its numbers may have changed
    ({"logits_processor": by_python}, 2, 0), ({"stop": [3, 9]}, 1, 0),
])
def test_captured_tokens_are_those_of_the_eager_static_cache(how, captures, again, recorded):
    """Also in a second call, for sliding texts, and after weights have moved."""
    model = lively(**SHAPES["llama-window"])
    if "constraint" in how:
        how = {"constraint": constrain.regex("[ab]{3}.*", Vocabulary(TOKENS, ENDS))}
    double = {name: 2 * t for name, t in model.state_dict().items()}
    n = 0
    for move, more in ((lambda: None, captures), (lambda: None, again),
                       (lambda: model.load_state_dict(double, assign=True), 1),
                       (lambda: model.to(torch.float64).to(torch.float32), 1),
                       (lambda: int8.convert(model, model.head_weight), 1),
                       (lambda: model.transformer.wte.weight.data.mul_(-1), again)):
        move()
        want = text(model, kv_cache="static", **how)
        assert len(recorded) == n and text(model, **how) == want
        n += more
        assert len(recorded) == n
