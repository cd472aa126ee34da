"""Text that must match: a regular expression, one of several choices, or a JSON schema.

    regular expression  ->  automaton over bytes  ->  automaton over tokens  ->  tensors
    (choices, JSON schema)    (n states, 256)           (n states, V)

A finite automaton reads text and is in one of n states; some accept: the text so far is a whole
match. Whether a token may come next depends on the state alone, so a decode step needs two gathers,
inside its graph, and the host waits for nothing (Willard & Louf 2023, arXiv 2307.09702). Tokens
that agree in every state are one class: at most hundreds, where GPT-2 has 50,257 tokens.

**Every text ends well.** For each state is known the least number of tokens that lead to a match.
A token is allowed only where that many are left after it, so what max_new_tokens cuts off is a
match as well. The end-of-text token is allowed where a state accepts; where in the tokens that are
left no longer match can follow, a text ends without it.

Regular expressions are compiled by outlines-core (the extra "constrain"); see docs/CONSTRAINTS.md.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError
from inference import json_schema

NEVER = 2**31 - 1  # tokens to a match from where there is none
MAX_ENTRIES = 2**27  # of a table: 0.5 GB
# Of a pattern: an escape, a class in brackets, or any other character.
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|.", re.DOTALL)


class Bytes(NamedTuple):
    """An automaton over bytes: the first state is the start, the last is dead."""

    table: np.ndarray  # (n, 256) int32, the next state
    accepts: np.ndarray  # (n,) bool


class Automaton(nn.Module):
    """An automaton over tokens, as tensors: a module so that it moves to a device with .to().

    The state of B rows is one tensor (B, 2) int64: where each is, and how many tokens it has left.
    start() gives it, forward() masks the logits, advance() follows the token that was drawn.
    """

    transition: Tensor  # (states, classes) int32: the next state
    token_class: Tensor  # (V,) int64
    least: Tensor  # (states,) int32: the fewest tokens to a match, 0 where a state accepts
    onward: Tensor  # (states,) int32: the fewest to a longer match than this one

    def __init__(self, transition: np.ndarray, token_class: np.ndarray, least: np.ndarray,
                 has_eot: bool) -> None:  # fmt: skip
        """The first state is the start, the last two are the end and the dead state."""
        super().__init__()
        self.end = len(transition) - 2
        after = np.where(transition == self.end, NEVER, least[transition]).min(1)
        onward = np.where(after < NEVER, after + 1, NEVER)
        self.shortest = int(least[0] if has_eot else onward[0])
        self.register_buffer("transition", torch.from_numpy(transition))
        self.register_buffer("token_class", torch.from_numpy(token_class.astype(np.int64)))
        self.register_buffer("least", torch.from_numpy(least.astype(np.int32)))
        self.register_buffer("onward", torch.from_numpy(onward.astype(np.int32)))

    def start(self, left: Sequence[int]) -> Tensor:
        """The state of rows that have no text yet, and may have so many tokens."""
        if min(left) < self.shortest:
            raise UserError(
                f"the shortest text that matches the constraint has {self.shortest} tokens, and "
                f"there is room for {min(left)}; raise max_new_tokens"
            )
        room = to_device(torch.tensor(left), self.transition.device)
        return self._at(torch.zeros_like(room), room)

    def forward(self, logits: Tensor, state: Tensor) -> Tensor:
        """The logits (B, V) with -inf for each token that the constraint forbids.

        logits may be wider than the tokenizer's vocabulary: what pads it is forbidden. One allowed
        token at least always has a finite logit, whatever a logits processor did to them.
        """
        after = self.least[self.transition[state[:, 0]]]  # (B, classes) tokens to come after one
        forbidden = (after >= state[:, 1:]).index_select(1, self.token_class)  # (B, V)
        forbidden = F.pad(forbidden, (0, logits.shape[1] - forbidden.shape[1]), value=True)
        return logits.clamp(min=-3e4).masked_fill(forbidden, -math.inf)  # -3e4: float16 holds it

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """The state (B, 2) after these tokens, (B,) int64, which were allowed."""
        at = self.transition[state[:, 0], self.token_class[token]].long()
        return self._at(at, state[:, 1] - 1)

    def _at(self, at: Tensor, left: Tensor) -> Tensor:
        """The state of rows, ended where no text that is left room for is longer: (B, 2)."""
        at = torch.where(self.onward[at] <= left, at, self.end)
        return torch.stack([at, left.clamp(min=1)], dim=1)  # at the end a token is always allowed


def regex(pattern: str, tokenizer: Any) -> Automaton:
    """Texts that match a regular expression as a whole, in Rust's syntax, which is nearly Python's.

    Refused: look-around, back-references, anchors other than ^ and $ around the whole.

    Raises: UserError, it cannot be used, or no text of the tokenizer's tokens matches.
    """
    what = f"the regular expression {_shortened(pattern)}"
    return over_tokens(compiled(pattern), tokenizer, what)


def choices(texts: Sequence[str], tokenizer: Any) -> Automaton:
    """One of several texts. Raises: UserError, none is given or can be written in the tokens."""
    if not texts:
        raise UserError("there are no choices to choose from")
    pattern = "|".join(map(re.escape, texts))
    return over_tokens(compiled(pattern), tokenizer, f"the choices {_shortened(', '.join(texts))}")


def schema(text: str | dict[str, Any], tokenizer: Any) -> Automaton:
    """JSON values that a JSON schema describes. Raises: UserError, as json_schema.to_regex()."""
    return over_tokens(compiled(json_schema.to_regex(text)), tokenizer, "the JSON schema")


# --- the automaton over bytes ---


def unanchored(pattern: str) -> str:
    """The pattern without ^ and $ around it: a whole text has to match in any case."""
    pieces = PIECE.findall(pattern)
    pieces = pieces[pieces[:1] == ["^"] :]
    pieces = pieces[: len(pieces) - (pieces[-1:] == ["$"])]
    for piece in pieces:
        if piece in ("^", "$", r"\A", r"\z", r"\b", r"\B"):
            raise UserError(
                f"the regular expression {pattern!r} has {piece} inside; the whole text must match "
                "it, and ^ and $ can only stand at its ends"
            )
    return "".join(pieces)


def compiled(pattern: str) -> Bytes:
    """The automaton of a regular expression, by outlines-core 0.2.14.

    The library's automaton looks for the match that a backtracking search would find first: for
    "a|ab" it never goes on to "ab". With a NUL behind the pattern no match ends before it, and a
    state accepts where the NUL would match. It also prepares for matches that begin later in a
    text, 2^20 states for "a[ab]{20}": with an empty alternative, the last, there is a match at the
    start already. But steps into the state right after that match are dropped: so there is a NUL
    before the pattern too, whose step is, and a token of the NUL and each byte, which steps over.
    """
    try:
        import outlines_core as outlines
    except ImportError as e:
        raise UserError(
            f"a regular expression or a JSON schema needs the package outlines-core ({e}); "
            "pip install outlines-core"
        ) from e
    pattern = unanchored(pattern)
    tokens = {bytes([b]): [b] for b in range(256)} | {bytes([0, b]): [256 + b] for b in range(256)}
    try:
        # By itself first: "a)(b" is an error, though "(?:a)(b)" is not. The byte ff is in no text.
        outlines.Index(f"{pattern}|", outlines.Vocabulary(1, {b"\xff": [0]}))
        index = outlines.Index(f"\\x00(?:{pattern})\\x00|", outlines.Vocabulary(512, tokens))
    except ValueError as e:
        raise UserError(
            f"the regular expression {_shortened(pattern)} cannot be used ("
            f"{str(e).split('. ')[0]}); it needs balanced brackets, something to match in each "
            "branch, no look-around or back-reference, and no very large number of repetitions"
        ) from e
    found, finals = index.get_transitions(), index.get_final_states()
    after_nul = found.get(index.get_initial_state(), {})
    rows = [{token - 256: state for token, state in after_nul.items() if 256 <= token < 512}]
    number: dict[int, int] = {}  # of the library's states, in the order in which they are met
    accepts = []
    for row in rows:  # which grow meanwhile
        accepts.append(row.pop(0, None) in finals)
        for byte, state in row.items():
            if state not in number:
                number[state] = len(rows)
                rows.append({b: s for b, s in found.get(state, {}).items() if b < 256})
            row[byte] = number[state]
    table = np.full((len(rows) + 1, 256), len(rows), dtype=np.int32)
    for line, row in zip(table, rows):
        line[list(row)] = list(row.values())
    return Bytes(table, np.array([*accepts, False]))


# --- the automaton over tokens ---


def over_tokens(automaton: Bytes, tokenizer: Any, what: str) -> Automaton:
    """The same for the tokens of a tokenizer. Raises: UserError, no text matches `what`."""
    tokens, eot = tokenizer.token_bytes(), tokenizer.eot
    step, token_class = _classes(automaton.table, tokens, what)  # (n, classes), (V,)
    least = np.where(automaton.accepts, 0, NEVER)  # the fewest tokens to a match
    while (near := (least == NEVER) & (least[step].min(1) < NEVER)).any():
        least[near] = least[step[near]].min(1) + 1
    alive = least < NEVER
    if not alive[0]:
        raise UserError(f"no text of the model's vocabulary of {len(tokens)} tokens matches {what}")
    if not alive[step[0]].any():
        raise UserError(f"only the empty text matches {what}")

    n = int(alive.sum())
    end, dead = n, n + 1
    renamed = np.where(alive, np.cumsum(alive) - 1, dead)
    transition = np.full((n + 2, step.shape[1] + 1), dead, dtype=np.int32)
    transition[:n, :-1] = renamed[step[alive]]
    # The last column is the end-of-text token's. Without one an ended row repeats the first token,
    # which nobody reads, so that there is always a token to draw.
    if eot is None:
        transition[:n, -1] = transition[:n, token_class[0]]
    else:
        transition[:n, -1][automaton.accepts[alive]] = end
    transition[end, -1] = end
    token_class[eot or 0] = step.shape[1]
    # Columns that differed only in states which are gone are one class.
    transition, same = np.unique(transition, axis=1, return_inverse=True)
    transition, token_class = np.ascontiguousarray(transition), same.reshape(-1)[token_class]
    least = np.concatenate([least[alive], [0, NEVER]])
    return Automaton(transition, token_class, least, eot is not None)


def _classes(table: np.ndarray, tokens: Sequence[bytes],
             what: str) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Tokens that lead from every state to the same state as one another, as one column.

    What a token does is what its bytes do one after the other: one composition for each *different*
    map of states to states and each byte (the automaton's transition monoid), and never n x V.

    Returns:
        (n, classes) the next state, (V,) the class of each token. One without bytes is no text.
    """
    columns, byte_class = np.unique(table.T, axis=0, return_inverse=True)
    kind = byte_class.reshape(-1).tolist()  # bytes that do the same are one kind
    maps = [np.arange(len(table), dtype=np.int32)]  # the state that each is led to
    number = {maps[0].tobytes(): 0}
    composed: dict[tuple[int, int], int] = {}
    of_token = np.empty(len(tokens), dtype=np.int64)
    for i, token in enumerate(tokens):
        at = 0
        for byte in token:
            key = (at, kind[byte])
            if key not in composed:
                after = columns[kind[byte]][maps[at]]
                composed[key] = number.setdefault(after.tobytes(), len(maps))
                if composed[key] == len(maps):
                    maps.append(after)
            at = composed[key]
        of_token[i] = at if token else -1
        if len(maps) * len(table) > MAX_ENTRIES:
            raise UserError(
                f"the tables of {what} would have more than {MAX_ENTRIES:,} entries; it needs "
                "fewer choices, or smaller numbers of repetitions"
            )
    maps.append(np.full_like(maps[0], len(table) - 1))
    used, token_class = np.unique(of_token, return_inverse=True)
    return np.stack([maps[i] for i in used], axis=1), token_class.reshape(-1)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
