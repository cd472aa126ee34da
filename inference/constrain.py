"""Constrained text: every new text matches a regular expression.

    regular expression  ->  automaton over bytes  ->  automaton over tokens  ->  tensors
                              (n states, 256)           (n states, V)

The state decides which tokens may follow (Willard & Louf 2023, arXiv 2307.09702). Tokens with the
same column are one class: GPT-2's 50,257 tokens need hundreds.

**Every text ends as a match.** A token is allowed only if a match still fits into the tokens left.
The end-of-text token is allowed in accepting states; a text that cannot go on ends without it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError

if TYPE_CHECKING:
    from data.tokenizer import Tokenizer

NEVER = 2**31 - 1  # tokens to a match if there is none
MAX_ENTRIES = 2**27  # of a table: 0.5 GB
# An escape, a class, or another character.
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|.", re.DOTALL)


class Bytes(NamedTuple):
    """An automaton over bytes; the first state is the start, the last is dead."""

    table: np.ndarray  # (n, 256) int32, the next state
    accepts: np.ndarray  # (n,) bool


class Automaton(nn.Module):
    """An automaton over tokens. States (B, 2) int64: the automaton's, and the tokens left."""

    transition: Tensor  # (states, classes) int32: the next state
    token_class: Tensor  # (V,) int64
    least: Tensor  # (states,) int32: the fewest tokens to a match, 0 in an accepting state
    onward: Tensor  # (states,) int32: the fewest to a longer match

    # State 0 is the start; the last two are the end and the dead state.
    def __init__(
        self, transition: np.ndarray, token_class: np.ndarray, least: np.ndarray, has_eot: bool
    ) -> None:
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
        """The state (B, 2) of rows that may have left[b] tokens. Raises UserError if too few."""
        if min(left) < self.shortest:
            raise UserError(
                f"the shortest match of the constraint has {self.shortest} tokens, there is room "
                f"for {min(left)}: raise max_new_tokens"
            )
        room = to_device(torch.tensor(left), self.transition.device)
        return self._at(torch.zeros_like(room), room)

    def forward(self, logits: Tensor, state: Tensor) -> Tensor:
        """The logits (B, V) with -inf for forbidden tokens; others become finite."""
        after = self.least[self.transition[state[:, 0]]]  # (B, classes)
        forbidden = (after >= state[:, 1:]).index_select(1, self.token_class)  # (B, V)
        forbidden = F.pad(forbidden, (0, logits.shape[1] - forbidden.shape[1]), value=True)
        return logits.clamp(min=-3e4).masked_fill(forbidden, -math.inf)  # -3e4: float16 holds it

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """The state (B, 2) after these allowed tokens, (B,) int64."""
        at = self.transition[state[:, 0], self.token_class[token]].long()
        return self._at(at, state[:, 1] - 1)

    def _at(self, at: Tensor, left: Tensor) -> Tensor:
        at = torch.where(self.onward[at] <= left, at, self.end)
        return torch.stack([at, left.clamp(min=1)], dim=1)  # at the end a token is always allowed


def regex(pattern: str, tokenizer: Tokenizer) -> Automaton:
    """Texts that fully match a regular expression in Rust's syntax.

    Raises:
        UserError: no text matches, or the pattern is not supported.
    """
    return over_tokens(compiled(pattern), tokenizer, f"the regex {_shortened(pattern)}")


# --- the automaton over bytes ---


def unanchored(pattern: str) -> str:
    pieces = PIECE.findall(pattern)
    pieces = pieces[pieces[:1] == ["^"] :]
    pieces = pieces[: len(pieces) - (pieces[-1:] == ["$"])]
    for piece in pieces:
        if piece in ("^", "$", r"\A", r"\z", r"\b", r"\B"):
            raise UserError(f"the regex {pattern!r}: {piece} is possible at its ends only")
    return "".join(pieces)


def compiled(pattern: str) -> Bytes:
    """The automaton of a regular expression, by outlines-core 0.2.14.

    Workarounds:
    - it stops at the first match of a backtracking search: "a|ab" never matches "ab". With a NUL
      after the pattern no match ends early; a state accepts if NUL is possible.
    - it tracks matches that begin later: 2^20 states for "a[ab]{20}". An empty alternative matches
      at the start. The library drops steps into the state after it, so a NUL precedes the pattern,
      with tokens of NUL and each byte.
    """
    try:
        import outlines_core as outlines
    except ImportError as e:
        raise UserError(f"constraints need: pip install outlines-core ({e})") from e
    pattern = unanchored(pattern)
    tokens = {bytes([b]): [b] for b in range(256)} | {bytes([0, b]): [256 + b] for b in range(256)}
    try:
        # Alone first: "a)(b" is an error, "(?:a)(b)" is not. UTF-8 has no byte ff.
        outlines.Index(f"{pattern}|", outlines.Vocabulary(1, {b"\xff": [0]}))
        index = outlines.Index(f"\\x00(?:{pattern})\\x00|", outlines.Vocabulary(512, tokens))
    except ValueError as e:
        raise UserError(
            f"cannot compile the regex {_shortened(pattern)} ({str(e).split('. ')[0]}); "
            "look-around and back-references are not supported"
        ) from e
    found, finals = index.get_transitions(), index.get_final_states()
    after_nul = found.get(index.get_initial_state(), {})
    rows = [{token - 256: state for token, state in after_nul.items() if 256 <= token < 512}]
    number: dict[int, int] = {}  # the library's state -> ours
    accepts = []
    for row in rows:  # grows inside
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


def over_tokens(automaton: Bytes, tokenizer: Tokenizer, what: str) -> Automaton:
    """The automaton over a tokenizer's tokens. Raises UserError if no text matches `what`."""
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
    # The last column is the end-of-text token. Without one, ended rows repeat the first token.
    if eot is None:
        transition[:n, -1] = transition[:n, token_class[0]]
    else:
        transition[:n, -1][automaton.accepts[alive]] = end
    transition[end, -1] = end
    token_class[eot or 0] = step.shape[1]
    # Merge columns that differed only in removed states.
    transition, same = np.unique(transition, axis=1, return_inverse=True)
    transition, token_class = np.ascontiguousarray(transition), same.reshape(-1)[token_class]
    least = np.concatenate([least[alive], [0, NEVER]])
    return Automaton(transition, token_class, least, eot is not None)


def _classes(
    table: np.ndarray, tokens: Sequence[bytes], what: str
) -> tuple[np.ndarray, np.ndarray]:
    """The next state (n, classes) and the class of each token (V,); an empty token is dead.

    Each pair of a map of states and a byte is composed once (the automaton's transition monoid).
    """
    columns, byte_class = np.unique(table.T, axis=0, return_inverse=True)
    kind = byte_class.reshape(-1).tolist()
    maps = [np.arange(len(table), dtype=np.int32)]  # state -> next state
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
            raise UserError(f"{what} has too many states: use fewer alternatives or repetitions")
    maps.append(np.full_like(maps[0], len(table) - 1))
    used, token_class = np.unique(of_token, return_inverse=True)
    return np.stack([maps[i] for i in used], axis=1), token_class.reshape(-1)


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
