"""inference/constrain.py: exactly the texts that match, and every text ends as one that does."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import data
from core.settings import UserError
from inference import constrain
from inference.constrain import Automaton


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


@settings(max_examples=100, deadline=None)
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
        with pytest.raises(UserError, match="shortest"):
            automaton.start([left])
        return
    assert automaton.shortest == min(map(len, expected))
    texts = all_texts(automaton, vocabulary, left)
    if has_end:
        assert texts == expected
    else:  # a text that can go on does
        goes_on = {longer[:n] for longer in expected for n in range(len(longer))}
        assert texts == expected - goes_on


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


# --- as tensors ---


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


# --- the tokenizers of this project ---


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


# --- errors ---


SYNTAX = ["(a", "a)(b", "a{", "[a", "*", "(?=a)b", r"(a)\1", r"(?<!a)b", "a\\"]
ANCHORS = ["^^a", "a$$", "(^a)", "(a$)|b", r"\Aa", r"a\b", r"a\B", r"a\z"]


@pytest.mark.parametrize("pattern", SYNTAX + ANCHORS)
def test_an_unsupported_pattern_is_named(pattern):
    with pytest.raises(UserError, match=re.escape(repr(pattern))):
        constrain.regex(pattern, BYTES)


@pytest.mark.parametrize("pattern", ["[0-9]+", "[a&&b]", ""])
def test_a_constraint_without_a_text_is_an_error(pattern):
    with pytest.raises(UserError):
        constrain.regex(pattern, Vocabulary([b"a", b"b"]))


@pytest.mark.parametrize("pattern", ["a[ab]{40}", '"([^"]|[\\\\]"){0,60}"', "[A-Z].{0,50}"])
def test_states_are_as_many_as_the_pattern_is_long(pattern):
    """Matches that begin later would make 2^40 states of the first pattern."""
    assert len(constrain.compiled(pattern).table) < 1200
