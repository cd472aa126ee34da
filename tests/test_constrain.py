"""inference/constrain.py: exactly the texts that match, and every text ends as one that does."""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from core.settings import UserError
from inference import constrain, json_schema
from inference.constrain import Automaton
from inference.sampling import SamplingParams, sample_step


@dataclass
class Vocabulary:
    """A tokenizer of these tokens."""

    tokens: list[bytes]
    eot: int | None = None

    def token_bytes(self) -> list[bytes]:
        return self.tokens

    def text(self, ids: Sequence[int]) -> bytes:
        return b"".join(self.tokens[i] for i in ids)


# Every byte, some longer tokens that cross the borders of what JSON is made of, and an end.
LONGER = [b'{"', b'":', b'", "', b"true", b"12", b"00", b"-0", b"ab", "é".encode(), b"\xa9a", b"]}"]
BYTES = Vocabulary([bytes([b]) for b in range(256)] + LONGER + [b""], eot=256 + len(LONGER))


def matches(pattern: str, text: bytes) -> bool:
    try:
        return re.fullmatch(pattern, text.decode()) is not None
    except UnicodeDecodeError:
        return False


def allowed(automaton: Automaton, state: torch.Tensor, width: int) -> torch.Tensor:
    return automaton(torch.zeros(len(state), width), state) > -math.inf


def all_texts(automaton: Automaton, vocabulary: Vocabulary, left: int) -> set[tuple[int, ...]]:
    """Every text that a decode loop can end with, as tokens, without the one that ends it."""
    ended = set()
    going: list[tuple[int, ...]] = [()]
    state = automaton.start([left])
    for n in range(left):
        rows, tokens = allowed(automaton, state, len(vocabulary.tokens)).nonzero(as_tuple=True)
        assert set(rows.tolist()) == set(range(len(going))), "no token is allowed"
        state = automaton.advance(state[rows], tokens)
        texts = [(*going[r], t) for r, t in zip(rows.tolist(), tokens.tolist())]
        going, open_ = [], []
        for i, (text, at) in enumerate(zip(texts, state[:, 0].tolist())):
            if vocabulary.eot is not None and text[-1] == vocabulary.eot:
                ended.add(text[:-1])
            elif at == automaton.end:
                ended.add(text)
            else:
                assert n < left - 1
                going.append(text)
                open_.append(i)
        state = state[open_]
        if not going:
            break
    return ended


def sample(
    automaton: Automaton, vocabulary: Vocabulary, left: Sequence[int], seed: int, sharp: float = 3.0
) -> list[bytes]:
    """A text for each row from random logits, as generate() draws them."""
    generator = torch.Generator().manual_seed(seed)
    state = automaton.start(left)
    new: list[list[int]] = [[] for _ in left]
    going = set(range(len(left)))
    for _ in range(max(left)):
        logits = torch.randn(len(left), len(vocabulary.tokens) + 3, generator=generator) * sharp
        probs = automaton(logits, state).softmax(1)
        token = torch.multinomial(probs, 1, generator=generator)[:, 0]
        state = automaton.advance(state, token)
        for row in sorted(going):
            new[row].append(int(token[row]))
            if int(state[row, 0]) == automaton.end:
                going.remove(row)
        if not going:
            break
    assert not going
    return [vocabulary.text(ids) for ids in new]


# --- exactly the texts that match ---

atoms = st.sampled_from(["a", "b", "c", "é", ".", "[ab]", "[^a]", "[é-í]", r"\x61", r"\w"])
repeats = st.sampled_from(["*", "+", "?", "{2}", "{1,2}", "{2,}", "{0,3}", "*?", "??", "+?"])
patterns = st.recursive(
    atoms,
    lambda p: st.one_of(
        st.tuples(p, p).map("".join),
        st.tuples(p, p).map(lambda two: f"({two[0]}|{two[1]})"),
        st.tuples(p, p).map(lambda two: f"(?:{two[0]}|{two[1]}|)"),
        st.tuples(p, repeats).map(lambda two: f"(?:{two[0]}){two[1]}"),
    ),
    max_leaves=6,
)
pieces = [b"a", b"b", b"c", b"aa", b"ab", b"ba", b"abc", "é".encode(), b"\xc3", b"\xa9", b"\xa9a"]
vocabularies = st.lists(st.sampled_from(pieces), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(patterns, vocabularies, st.integers(1, 4), st.booleans())
def test_the_texts_are_those_that_python_matches(pattern, tokens, left, has_end):
    """All token sequences against re.fullmatch: none too many, and none lost."""
    vocabulary = Vocabulary([*tokens, b""], eot=len(tokens)) if has_end else Vocabulary(tokens)
    # A model without an end cannot give the empty text.
    expected = {()} if matches(pattern, b"") and has_end else set()
    level: list[tuple[int, ...]] = [()]
    for _ in range(left):
        level = [(*ids, i) for ids in level for i in range(len(tokens))]
        expected |= {ids for ids in level if matches(pattern, vocabulary.text(ids))}
    try:
        automaton = constrain.regex(pattern, vocabulary)
    except UserError as e:
        assert "matches" in str(e) and expected <= {()}
        return
    if not expected:
        assert automaton.shortest > left
        with pytest.raises(UserError, match="shortest text"):
            automaton.start([left])
        return
    assert automaton.shortest == min(map(len, expected))
    texts = all_texts(automaton, vocabulary, left)
    if has_end:
        assert texts == expected
    else:  # a text that can go on does
        goes_on = {longer[:n] for longer in expected for n in range(len(longer))}
        assert texts == expected - goes_on


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text("abé", max_size=4), min_size=1, max_size=5), st.booleans())
def test_choices_are_given_and_nothing_else(texts, has_end):
    tokens = [b"a", b"b", b"ab", b"bab", b"\xc3", b"\xa9", b"\xa9a", b"\xa9\xc3"]
    vocabulary = Vocabulary([*tokens, b""], eot=len(tokens)) if has_end else Vocabulary(tokens)
    if not any(texts):
        with pytest.raises(UserError, match="only the empty text"):
            constrain.choices(texts, vocabulary)
        return
    automaton = constrain.choices(texts, vocabulary)
    found = {vocabulary.text(ids).decode() for ids in all_texts(automaton, vocabulary, 8)}
    if has_end:
        assert found == set(texts)
    else:
        begins_another = {a for a in texts for b in texts if a != b and b.startswith(a)}
        assert found == set(texts) - begins_another


def test_a_choice_is_a_text_and_no_pattern():
    vocabulary = Vocabulary([b"a", b".", b"|", b"(", b""], eot=4)
    automaton = constrain.choices(["a.", "(|"], vocabulary)
    found = {vocabulary.text(ids) for ids in all_texts(automaton, vocabulary, 3)}
    assert found == {b"a.", b"(|"}


def test_of_two_choices_one_may_begin_the_other():
    vocabulary = Vocabulary([b"n", b"o", b"t", b"no", b""], eot=4)
    automaton = constrain.choices(["no", "not"], vocabulary)
    texts = all_texts(automaton, vocabulary, 4)
    assert {vocabulary.text(ids) for ids in texts} == {b"no", b"not"}
    # Where the budget ends with "no", that is the text.
    assert {vocabulary.text(ids) for ids in all_texts(automaton, vocabulary, 1)} == {b"no"}


def test_a_character_may_be_cut_between_tokens():
    """日 is e6 97 a5, 本 is e6 9c ac."""
    tokens = [b"\xe6", b"\x97\xa5", b"\x97", b"\xa5\xe6\x9c", b"\xac", b"\xa5", b"a", b""]
    vocabulary = Vocabulary(tokens, eot=7)
    automaton = constrain.regex("日本?", vocabulary)
    assert all_texts(automaton, vocabulary, 6) == {(0, 1), (0, 2, 5), (0, 2, 3, 4)}


@pytest.mark.parametrize("pattern", ["^a|b$", "^[$^a]$", r"a\$", r"^(a\\)?b$", "[]^]a|[^]^]b"])
def test_anchors_may_stand_at_the_ends(pattern):
    vocabulary = Vocabulary([b"a", b"b", b"$", b"^", b"\\", b"]", b""], eot=6)
    texts = all_texts(constrain.regex(pattern, vocabulary), vocabulary, 3)
    some = [p for n in (1, 2, 3) for p in itertools.product(range(6), repeat=n)]
    assert texts == {ids for ids in some if matches(pattern, vocabulary.text(ids))}


@pytest.mark.parametrize(
    "pattern", ["^^a", "a$$", "(^a)", "(a$)|b", r"\Aa", r"a\b", r"a\B", r"a\z"]
)
def test_anchors_elsewhere_are_refused(pattern):
    with pytest.raises(UserError, match="inside"):
        constrain.regex(pattern, BYTES)


# --- every text ends well ---

PATTERNS = [
    "[0-9]{3}-[0-9]{4}",
    "(ab|é)+c?",
    "a{7}b*",
    '"[^"]*"',
    "[a-zé-ÿ日]{2,9}",
    "(x|yy|zzz){1,3}!",
    "(12)*0",
    ".*",
]


@pytest.mark.parametrize("has_end", [True, False])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_whatever_is_drawn_matches_for_every_budget(pattern, has_end):
    vocabulary = Vocabulary(BYTES.tokens, BYTES.eot if has_end else None)
    automaton = constrain.regex(pattern, vocabulary)
    first = max(1, automaton.shortest)
    for seed, sharp in enumerate((0.0, 3.0, 30.0)):
        left = [first + n for n in (0, 0, 1, 2, 3, 5, 8, 13, 40)]
        for text in sample(automaton, vocabulary, left, seed, sharp):
            assert matches(pattern, text), text


def test_the_budget_takes_away_only_what_cannot_end():
    vocabulary = Vocabulary([b"(", b")", b"a", b""], eot=3)
    automaton = constrain.regex(r"\(a*\)", vocabulary)
    state = automaton.start([3])
    seen = []
    for token in (0, 2, 1):
        seen.append(allowed(automaton, state, 4)[0].nonzero()[:, 0].tolist())
        state = automaton.advance(state, torch.tensor([token]))
    assert seen == [[0], [1, 2], [1]]
    assert state.tolist() == [[automaton.end, 1]]


def test_a_budget_without_a_match_is_refused_before_the_first_token():
    automaton = constrain.regex("a{7}", Vocabulary([b"a", b"aa"]))
    assert automaton.shortest == 4
    automaton.start([4, 9])
    with pytest.raises(UserError, match="has 4 tokens, and there is room for 3; raise max_new"):
        automaton.start([9, 3])


def test_after_the_end_there_is_only_the_end():
    vocabulary = Vocabulary([b"a", b"b", b"", b""], eot=2)
    automaton = constrain.regex("ab?", vocabulary)
    state = automaton.start([9])
    assert allowed(automaton, state, 6)[0].nonzero()[:, 0].tolist() == [0]
    for token, after in ((0, [1, 2]), (2, [2]), (2, [2])):
        state = automaton.advance(state, torch.tensor([token]))
        assert allowed(automaton, state, 6)[0].nonzero()[:, 0].tolist() == after
    # Without an end-of-text token a row that has ended still has a token to draw, for ever.
    automaton = constrain.regex("ab", Vocabulary([b"b", b"a"]))
    state = automaton.start([2])
    for token in (1, 0, 0, 0, 0):
        assert allowed(automaton, state, 2)[0].nonzero()[:, 0].tolist() == [token]
        state = automaton.advance(state, torch.tensor([token]))
    assert state.tolist() == [[automaton.end, 1]]


def test_a_row_without_room_is_ended():
    automaton = constrain.regex("a*", Vocabulary([b"a", b""], eot=1))
    state = automaton.start([0, 2])
    assert state.tolist() == [[automaton.end, 1], [0, 2]]
    assert allowed(automaton, state, 2).tolist() == [[False, True], [True, True]]


def test_no_dead_end_is_entered():
    """"ab" leads to where only "c" helps, which this vocabulary lacks."""  # fmt: skip
    vocabulary = Vocabulary([b"a", b"b", b"x"])
    automaton = constrain.regex("abc|ax|axb", vocabulary)
    state = automaton.advance(automaton.start([9]), torch.tensor([0]))
    assert allowed(automaton, state, 3).tolist() == [[False, False, True]]


# --- as tensors ---


def test_padding_of_the_vocabulary_is_never_allowed():
    automaton = constrain.regex(".*", BYTES)
    n = len(BYTES.tokens)
    logits = automaton(torch.full((2, n + 47), 5.0), automaton.start([4, 4]))
    assert logits.shape == (2, n + 47)
    assert logits[:, n:].eq(-math.inf).all() and logits[:, ord("a")].eq(5.0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_allowed_logits_are_unchanged_and_one_is_always_finite(dtype):
    vocabulary = Vocabulary([b"a", b"b", b"c", b""], eot=3)
    automaton = constrain.regex("(a|b)+", vocabulary)
    state = automaton.start([5])
    logits = torch.tensor([[-2.5, 7.0, 9.0, 1.0]], dtype=dtype)
    out = automaton(logits, state)
    assert out.dtype == dtype and out.tolist() == [[-2.5, 7.0, -math.inf, -math.inf]]
    assert logits.tolist() == [[-2.5, 7.0, 9.0, 1.0]]
    # A logits processor has forbidden all that the constraint allows: it matches all the same.
    out = automaton(torch.tensor([[-math.inf, -math.inf, 3.0, 3.0]], dtype=dtype), state)
    assert out.isfinite().tolist() == [[True, True, False, False]]
    assert (out.float() / 0.01).softmax(1).tolist() == [[0.5, 0.5, 0.0, 0.0]]


def test_rows_do_not_know_one_another():
    automaton = constrain.regex("(ab|é|12)+c?", BYTES)
    torch.manual_seed(0)
    left = [3, 5, 9, 40]
    together = automaton.start(left)
    alone = [automaton.start([n]) for n in left]
    for _ in range(12):
        logits = torch.randn(len(left), len(BYTES.tokens))
        masked = automaton(logits, together)
        for row in range(len(left)):
            assert torch.equal(automaton(logits[row : row + 1], alone[row]), masked[row : row + 1])
        token = masked.argmax(1)
        together = automaton.advance(together, token)
        alone = [automaton.advance(s, t[None]) for s, t in zip(alone, token)]
        assert torch.equal(torch.cat(alone), together)


def test_a_step_is_one_graph_and_compiles_once():
    automaton = constrain.regex("[0-9]{3}-[0-9]{4}", BYTES)

    def step(logits: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token = automaton(logits, state).argmax(1)
        return token, automaton.advance(state, token)

    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.manual_seed(1)
    state = other = automaton.start([8, 30])
    for _ in range(10):
        logits = torch.randn(2, 300)
        token, state = step(logits, state)
        again, other = compiled(logits, other)
        assert torch.equal(token, again) and torch.equal(state, other)
    assert len(graphs) == 1
    assert not re.search(r"\.item\(|nonzero|tolist", graphs[0].code)


def test_classes_keep_the_tables_small():
    """Tokens that do the same in every state share a column."""
    words = [bytes(pair) for pair in itertools.product(b"abcdefghijklmnopqrstuvwxyz", repeat=2)]
    vocabulary = Vocabulary([*words, b'"', b'"a', b"", b"0"], eot=len(words) + 2)
    automaton = constrain.regex('"[a-z]*"', vocabulary)
    # before, within and behind the quotation marks, the end, dead; a word, ", "a, the end, 0
    assert automaton.transition.shape == (5, 5)
    assert automaton.token_class.shape == (len(words) + 4,)


def by_hand(pattern: str) -> constrain.Bytes:
    """The automaton of a text of digits (0) and themselves, without outlines-core."""
    table = np.full((len(pattern) + 2, 256), len(pattern) + 1, dtype=np.int32)  # dead
    for at, c in enumerate(pattern.encode()):
        table[at, list(b"0123456789") if c == ord("0") else [c]] = at + 1
    return constrain.Bytes(table, np.arange(len(table)) == len(pattern))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")])])  # fmt: skip
def test_the_tables_move_to_the_device_and_nothing_waits(device):
    automaton = constrain.over_tokens(by_hand("000-0000"), BYTES, "a telephone number")
    here = sample(automaton, BYTES, [8, 9], 0)
    assert all(matches("[0-9]{3}-[0-9]{4}", text) for text in here)
    there = copy.deepcopy(automaton).to(device)
    state, state_there = automaton.start([8, 9]), there.start([8, 9])
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        steps = []
        for _ in range(9):
            token = there(torch.ones(2, 300, device=device), state_there).argmax(1)
            state_there = there.advance(state_there, token)
            steps.append((token, state_there))
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    for token, after in steps:
        state = automaton.advance(state, token.cpu())
        assert torch.equal(state, after.cpu())


# --- the tokenizers of this project ---


def test_a_character_vocabulary():
    tokenizer = data.CharTokenizer(sorted("0123456789-é \n"))
    assert b"".join(tokenizer.token_bytes()).decode() == "".join(tokenizer.vocabulary)
    automaton = constrain.regex("[0-9]+é", tokenizer)
    vocabulary = Vocabulary(tokenizer.token_bytes())
    for text in sample(automaton, vocabulary, [2, 3, 20], seed=0):
        assert matches("[0-9]+é", text)
    with_end = data.CharTokenizer(["a", "<|end|>"], eot=1)
    assert with_end.token_bytes() == [b"a", b""]


def test_gpt2s_vocabulary():
    tokenizer = data.GPT2Tokenizer()
    tokens = tokenizer.token_bytes()
    assert len(tokens) == 50257 and tokens[tokenizer.eot] == b"" and tokens.count(b"") == 1
    text = "Naïve façade, 日本語! 🙂"
    assert b"".join(tokens[i] for i in tokenizer.encode(text)).decode() == text
    vocabulary = Vocabulary(tokens, tokenizer.eot)
    automaton = constrain.regex("[0-9]{3}-(日本|🙂)+", tokenizer)
    assert automaton.transition.numel() < 5000
    for text in sample(automaton, vocabulary, [automaton.shortest, 9, 12, 15], seed=3):
        assert matches("[0-9]{3}-(日本|🙂)+", text)


# --- JSON schema ---


def valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is valid, for the keywords of these tests; written from the specification."""
    types = {"string": str, "integer": int, "number": (int, float), "boolean": bool,
             "null": type(None), "array": list, "object": dict}  # fmt: skip
    if "type" in schema:
        names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if not any(
            isinstance(value, types[n]) and (n == "boolean" or not isinstance(value, bool))
            for n in names
        ):
            return False
    checks: list[bool] = [
        "enum" not in schema or value in schema["enum"],
        "const" not in schema or value == schema["const"],
        "anyOf" not in schema or any(valid(value, s) for s in schema["anyOf"]),
    ]
    if isinstance(value, str):
        checks += [schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", math.inf)]
    if isinstance(value, list):
        checks += [
            schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf),
            all(valid(item, schema.get("items", {})) for item in value),
        ]
    if isinstance(value, dict):
        checks += [
            set(schema.get("required", [])) <= set(value),
            set(value) <= set(schema.get("properties", value)),
            all(valid(v, schema.get("properties", {}).get(k, {})) for k, v in value.items()),
        ]
    return all(checks)


PERSON = {
    "title": "Person",
    "type": "object",
    "properties": {
        "nick": {"type": "string"},
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer"},
        'a "b" \\ é.*': {"type": ["null", "boolean"], "description": "a name to escape"},
        "tags": {"type": "array", "items": {"enum": ["x", "y z", 'q"']}, "maxItems": 3},
    },
    "required": ["age", "name"],
    "additionalProperties": False,
}
SCHEMAS: list[dict[str, Any]] = [
    PERSON,
    {**PERSON, "required": []},
    {**PERSON, "required": list(PERSON["properties"])},
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2},
    {"type": "string", "minLength": 2, "maxLength": 2},
    {"type": "integer"},
    {"type": "number"},
    {"type": ["integer", "null", "string"]},
    {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    {"enum": ["one", 2, None, [3, {"four": True}], 'fi"ve é']},
    {"type": "string", "enum": ["one", 2, "two"]},
    {"type": "integer", "enum": [1, True, 2]},
    {"const": {"a": [1, 2.5]}},
    {"anyOf": [{"type": "boolean"}, {"type": "array", "items": {"type": "number"}}]},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2},
    {"type": "array", "items": {"type": "null"}, "minItems": 1},
    {"type": "array", "items": {"type": "null"}, "maxItems": 0},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:60])
def test_json_is_valid_whatever_is_drawn(schema):
    automaton = constrain.schema(json.dumps(schema), BYTES)
    left = [automaton.shortest + n for n in (0, 1, 2, 3, 5, 8, 13, 21, 34, 70, 200)]
    seen = set()
    for seed, sharp in enumerate((0.5, 4.0)):
        for text in sample(automaton, BYTES, left, seed, sharp):
            value = json.loads(text)
            assert valid(value, schema), text
            seen.add(text)
    assert len(seen) > 1 or schema.get("maxItems") == 0 or "const" in schema


@pytest.mark.parametrize("required", [["c"], []])
def test_references_and_every_combination_of_properties(required):
    schema = {
        "type": "object",
        "properties": {k: {"$ref": "#/$defs/a~1b~01"} for k in "abcd"},
        "required": required,
        "$defs": {"a/b~1": {"type": "null"}},
    }
    pattern = json_schema.to_regex(schema)
    automaton = constrain.compiled(pattern)
    for subset in range(16):
        keys = [k for i, k in enumerate("abcd") if subset >> i & 1]
        for separators in ((",", ":"), (", ", ": ")):
            text = json.dumps(dict.fromkeys(keys), separators=separators)
            at = 0
            for byte in text.encode():
                at = automaton.table[at, byte]
            assert automaton.accepts[at] == (set(required) <= set(keys)), text


def test_one_space_may_stand_between_any_two_signs_of_json():
    numbers = {"type": "array", "items": {"type": "integer"}}
    schema = {"properties": {"a": numbers, "b": {"const": None}, "c": {"properties": {"d": {}}}}}
    schema["properties"]["c"]["properties"]["d"] = numbers | {"maxItems": 0}
    pattern = re.compile(json_schema.to_regex(schema))
    signs = re.findall(r"\S+", '{ "a" : [ 1 , 2 ] , "b" : null , "c" : { "d" : [ ] } }')
    assert pattern.fullmatch("".join(signs)) and pattern.fullmatch(" ".join(signs))
    for n, gap in itertools.product(range(len(signs) + 1), (" ", "  ", "\t", "\n")):
        text = "".join([*signs[:n], gap, *signs[n:]])
        assert bool(pattern.fullmatch(text)) == (gap == " " and 0 < n < len(signs)), text


def test_what_is_not_ascii_is_written_as_it_is():
    pattern = json_schema.to_regex({"properties": {"é": {"enum": ["日", "b"]}}, "required": ["é"]})
    assert re.fullmatch(pattern, '{"é":"日"}') and not re.fullmatch(pattern, r'{"\u00e9":"b"}')


@pytest.mark.parametrize("text", ["0", "-0", "12", "-3.50", "0.01", "1e5", "2E-07", "7.1e+3"])
def test_numbers_are_those_of_json(text):
    pattern = re.compile(json_schema.to_regex({"type": "number"}))
    assert pattern.fullmatch(text) and json.loads(text) is not None
    for wrong in (f"0{text}", f"+{text}", f"{text}.", f"{text}e", f"--{text}", f".{text}"):
        with pytest.raises(ValueError):
            json.loads(wrong)
        assert not pattern.fullmatch(wrong), wrong


# --- what is refused ---


@pytest.mark.parametrize(
    "pattern", ["(a", "a)(b", "a{", "[a", "*", "(?=a)b", r"(a)\1", r"(?<!a)b", "a\\"]
)
def test_a_pattern_that_cannot_be_used(pattern):
    with pytest.raises(UserError, match=re.escape(repr(pattern)) + ".*cannot be used"):
        constrain.regex(pattern, BYTES)


@pytest.mark.parametrize("cuts", [{"top_k": 1}, {"top_p": 0.01}, {"temperature": 0.001}])
def test_the_cuts_are_made_among_the_tokens_that_are_allowed(cuts):
    """The likeliest token of those, whatever number is drawn."""
    automaton = constrain.regex("[a-e]", BYTES)
    logits = torch.randn(1, len(BYTES.tokens), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(**{"temperature": 1.0, **cuts})
    likeliest = ord("a") + int(logits[0, ord("a") : ord("f")].argmax())
    for u in (0.0, 0.5, 0.999):
        drawn = torch.tensor([u], dtype=torch.float64)
        token, state, over = sample_step(logits, params, automaton, drawn, automaton.start([3]))
        assert token.tolist() == [likeliest] != logits.argmax(1).tolist()
        assert over is not None and over.tolist() == [True] and state is not None


def test_a_schema_lets_every_number_of_items_be():
    for low, high in ((0, None), (0, 1), (1, 1), (1, 3), (2, 3), (2, None), (3, 3)):
        most = {} if high is None else {"maxItems": high}
        numbers = {"type": "array", "items": {"type": "integer"}, "minItems": low, **most}
        letters = {"type": "string", "minLength": low} | (most and {"maxLength": high})
        for n in range(6):
            for schema, text in ((numbers, json.dumps([7] * n)), (letters, f'"{"x" * n}"')):
                fits = low <= n <= (5 if high is None else high)
                assert bool(re.fullmatch(json_schema.to_regex(schema), text)) == fits, text


def test_nothing_to_say():
    with pytest.raises(UserError, match="no text of the model's vocabulary of 2 tokens matches"):
        constrain.regex("[0-9]+", Vocabulary([b"a", b"b"]))
    with pytest.raises(UserError, match="no text"):
        constrain.regex("[a&&b]", BYTES)  # what is a and b at once
    with pytest.raises(UserError, match="matches the choices 'c, d'"):
        constrain.choices(["c", "d"], Vocabulary([b"a", b"b"]))
    with pytest.raises(UserError, match="no choices"):
        constrain.choices([], BYTES)
    with pytest.raises(UserError, match="only the empty text"):
        constrain.regex("", BYTES)
    with pytest.raises(UserError, match="utf-8"):
        constrain.choices(["\udc80"], BYTES)


def test_tables_that_would_not_fit(monkeypatch):
    monkeypatch.setattr(constrain, "MAX_ENTRIES", 100)
    with pytest.raises(UserError, match="would have more than 100 entries"):
        constrain.regex("[a-z]{100}", BYTES)
    # 102 states, the dead one among them; tokens that go on, that end it, and none at all.
    letters = Vocabulary([b"a", b"b", b"?"])
    monkeypatch.setattr(constrain, "MAX_ENTRIES", 3 * 102)
    constrain.regex("[a-z]{100}", letters)
    monkeypatch.setattr(constrain, "MAX_ENTRIES", 3 * 102 - 1)
    with pytest.raises(UserError, match=r"the tables of the regular expression .* 305 entries"):
        constrain.regex("[a-z]{100}", letters)


@pytest.mark.parametrize("pattern", ["a[ab]{40}", '"([^"]|[\\\\]"){0,60}"', "[A-Z].{0,50}"])
def test_states_are_as_many_as_the_pattern_is_long(pattern):
    """A text begins at its start: what could begin later made 2^40 states of the first pattern."""
    assert len(constrain.compiled(pattern).table) < 1200


def test_without_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "outlines_core", None)
    with pytest.raises(UserError, match="pip install outlines-core"):
        constrain.regex("a", BYTES)


def refusals() -> Iterator[tuple[Any, str]]:
    thing = {"type": "null"}
    yield "{", "is not JSON"
    yield {"const": math.nan}, "is not JSON"
    yield {"const": {1, 2}}, "is not JSON"
    yield True, "expected an object, got true"
    yield {}, "#: type must be one of string"
    yield {"type": "any"}, 'got "any"'
    yield {"type": []}, "type must be"
    yield {"type": [["null"]]}, "type must be"
    yield {"type": {}, "enum": [1]}, "type must be"
    yield {"oneOf": [thing]}, "type must be|'oneOf' is not supported"
    yield {"type": "object", "properties": {"a": thing}, "allOf": []}, "'allOf' is not supported"
    yield {"anyOf": [thing], "type": "null"}, "'type' is not supported for anyOf"
    yield {"anyOf": []}, "anyOf must be a list"
    yield {"type": "integer", "multipleOf": 2}, "'multipleOf' is not supported for integer"
    yield {"type": "number", "minimum": 2}, "'minimum' is not supported for number"
    yield {"type": "integer", "minimum": 2}, "'minimum' is not supported for integer"
    yield {"type": "string", "format": "date"}, "'format' is not supported for string"
    yield {"type": "string", "pattern": "a"}, "'pattern' is not supported for string"
    yield {"type": ["string", "null"], "maxLength": 2}, "'maxLength' is not supported for null"
    yield {"type": "string", "minLength": 3, "maxLength": 2}, "minLength is 3 and maxLength 2"
    yield {"type": "string", "minLength": -1}, "minLength is -1"
    yield {"type": "string", "minLength": 1.5}, "minLength must be an integer, got 1.5"
    for keyword in ("minLength", "maxLength", "minItems", "maxItems"):
        what = {"type": "string"} if "Length" in keyword else {"type": "array", "items": thing}
        for value in ("2", True, 2.0, None):
            words = f"#: {keyword} must be an integer, got {json.dumps(value)}"
            yield {**what, keyword: value}, words
    yield {"type": "array", "items": [thing]}, "#: items must be an object"
    yield {"properties": [thing]}, "#: properties must be an object"
    yield {"properties": {"a": thing}, "required": "a"}, '#: required must be a list, got "a"'
    yield {"enum": {"a": 1}}, "#: enum must be a list"
    yield {"anyOf": thing}, "#: anyOf must be a list"
    yield {"$ref": 3}, "#: [$]ref must be a string, got 3"
    yield {"type": "array"}, "needs items"
    yield {"type": "object"}, "needs properties"
    yield {"type": "object", "properties": {"a": thing}, "required": ["b"]}, '"b" is required'
    yield {"type": "object", "properties": {"a": thing}, "required": [["a"]]}, "is required"
    yield {"type": "object", "properties": {"a": {"not": {}}}}, "#/properties/a: type must be"
    yield {"enum": [1], "type": "string"}, "no value fits"
    yield {"enum": []}, "enum must be a list"
    yield {"$ref": "http://a/b"}, "must point to a place in the schema"
    yield {"$ref": "other.json#/$defs/b", "$defs": {"b": thing}}, "must point to a place"
    yield {"$ref": "#/$defs/b"}, "must point to a place in the schema"
    yield {"$ref": "#"}, "# recurs"
    tree = {"type": "array", "items": {"$ref": "#/$defs/t"}}
    yield {"$ref": "#/$defs/t", "$defs": {"t": tree}}, "recurs"
    two = {"a": {"anyOf": [thing, {"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}}
    yield {"$ref": "#/$defs/a", "$defs": two}, "#/[$]defs/b: #/[$]defs/a recurs"


@pytest.mark.parametrize(("schema", "words"), list(refusals()), ids=lambda x: str(x)[:40])
def test_a_schema_is_honoured_or_refused(schema, words):
    with pytest.raises(UserError, match=words):
        constrain.schema(schema, BYTES)
