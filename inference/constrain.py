"""Constrained text: every new text matches a regular expression.

    regular expression  ->  automaton over bytes  ->  automaton over tokens  ->  tensors
                              (n states, 256)           (n states, classes)

The state decides which tokens may follow (Willard & Louf 2023, arXiv 2307.09702). Tokens with the
same column are one class: GPT-2's 50,257 tokens need hundreds.

**Every text ends as a match.** A token is allowed only if a match still fits into the tokens left.
An end token is allowed in accepting states; a text that cannot go on ends without one.

Masking and the next state are lookups in tensors: part of a compiled decode step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
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

DEAD, END, START = 0, 1, 2  # states
NEVER = 2**31 - 1  # tokens to a match if there is none
MAX_ENTRIES = 2**27  # of a table: 0.5 GB
# An escape, a class, or another character.
PIECE = re.compile(r"\\.|\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\]|.", re.DOTALL)


class Bytes(NamedTuple):
    """An automaton over bytes; the first state is the start, the last is dead."""

    table: np.ndarray  # (n, 256) int32, the next state
    accepts: np.ndarray  # (n,) bool


class Automaton(nn.Module):
    """An automaton over tokens. States (B, 2) int64: the automaton's, and the tokens left.

    Class 0 has the tokens that are never allowed, and ids beyond the tokenizer's. Both sides of
    the table are rounded up: other constraints reuse the compiled decode step.

    Args:
        transition: (states, classes) int32, the next state.
        token_class: (V,) int64.
        least: (states,) int32, the fewest tokens to a match, 0 in an accepting state.
        starts: the first state of each row; None: START.
    """

    transition: Tensor
    token_class: Tensor
    least: Tensor
    onward: Tensor  # (states,) int32: the fewest tokens to a longer match

    def __init__(
        self, transition: np.ndarray, token_class: np.ndarray, least: np.ndarray,
        starts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.starts = starts
        spare = [(0, max(64, 1 << (n - 1).bit_length()) - n) for n in transition.shape]
        transition = np.pad(transition, spare, constant_values=DEAD)
        least = np.pad(least, spare[0], constant_values=NEVER)
        after = np.where(transition == END, NEVER, least[transition]).min(1)
        onward = np.where(after < NEVER, after, NEVER - 1) + 1
        self.register_buffer("transition", torch.from_numpy(transition))
        self.register_buffer("token_class", torch.from_numpy(token_class))
        self.register_buffer("least", torch.from_numpy(least))
        self.register_buffer("onward", torch.from_numpy(onward.astype(np.int32)))
        # An empty text needs an end token, or a row of any text, where class 0 is allowed.
        empty = (transition == END).any(1) | (transition[:, 0] != DEAD)
        self.shortest = np.where(empty, least, onward)

    def start(self, rows: Sequence[int], left: Sequence[int]) -> Tensor:
        """The first state (B, 2) of rows that may have left[b] tokens.

        Raises:
            ValueError: too few tokens are left for a match, or constraints for the rows.
        """
        if self.starts is not None and max(rows) >= len(self.starts):
            raise ValueError(f"{len(self.starts)} constraints are too few for row {max(rows)}")
        at = [START if self.starts is None else self.starts[row] for row in rows]
        for state, room in zip(at, left, strict=True):
            if room < self.shortest[state]:
                raise UserError(
                    f"the shortest match of the constraint has {self.shortest[state]} tokens, "
                    f"there is room for {room}: raise max_new_tokens"
                )
        both = torch.tensor([at, [max(1, n) for n in left]]).T
        return to_device(both.contiguous(), self.transition.device)

    def forward(self, logits: Tensor, state: Tensor) -> Tensor:
        """The logits (B, V) with -inf for forbidden tokens; others become finite."""
        after = self.least[self.transition[state[:, 0]]]  # (B, classes)
        of_token = F.pad(self.token_class, (0, logits.shape[1] - len(self.token_class)))
        forbidden = (after >= state[:, 1:]).index_select(1, of_token)  # (B, V)
        return logits.clamp(min=-3e4).masked_fill(forbidden, -math.inf)  # -3e4: float16 holds it

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """The state (B, 2) after these allowed tokens, (B,) int64."""
        of_token = self.token_class[token.clamp(max=len(self.token_class) - 1)]
        of_token = torch.where(token < len(self.token_class), of_token, 0)
        at, left = self.transition[state[:, 0], of_token].long(), state[:, 1] - 1
        at = torch.where(self.onward[at] <= left, at, END)
        return torch.stack([at, left.clamp(min=1)], dim=1)  # at the end any token is allowed


def regex(pattern: str, tokenizer: Tokenizer, stop: Iterable[int] | None = None) -> Automaton:
    """Texts that fully match a regular expression in Rust's syntax.

    Args:
        stop: tokens that end a text; None: the tokenizer's.

    Raises:
        UserError: no text matches, or the pattern or the tokenizer is not supported.
    """
    kinds = getattr(tokenizer, "decoders", ["ByteLevel"])
    if "ByteLevel" not in kinds or set(kinds) - {"ByteLevel", "Fuse"}:
        raise UserError(
            "a constraint needs a tokenizer of characters or bytes, got the model's "
            f"{tokenizer.name} with decoder {', '.join(kinds)}"
        )
    if stop is None:
        eot: int | Sequence[int] | None = tokenizer.eot
        stop = () if eot is None else (eot,) if isinstance(eot, int) else eot
    return over_tokens(compiled(pattern), tokenizer, tuple(stop), f"the regex {_short(pattern)}")


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
            f"cannot compile the regex {_short(pattern)} ({str(e).split('. ')[0]}); "
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


def over_tokens(
    automaton: Bytes, tokenizer: Tokenizer, stop: Sequence[int], what: str
) -> Automaton:
    """The automaton over a tokenizer's tokens. Raises UserError if no text matches `what`."""
    tokens = tokenizer.token_bytes()
    step, token_class = _classes(automaton.table, tokens, what)  # (n, classes), (V,)
    least = np.where(automaton.accepts, 0, NEVER).astype(np.int32)  # the fewest tokens to a match
    while (near := (least == NEVER) & (least[step].min(1) < NEVER)).any():
        least[near] = least[step[near]].min(1) + 1
    alive = least < NEVER
    if not alive[0]:
        raise UserError(f"no text of the model's vocabulary of {len(tokens)} tokens matches {what}")
    if not alive[step[0]].any():
        raise UserError(f"only the empty text matches {what}")

    renamed = np.where(alive, START + np.cumsum(alive) - 1, DEAD)
    allowed = renamed[step[alive]]
    ends = np.where(automaton.accepts[alive], END, DEAD)
    columns = [np.zeros_like(ends), *allowed.T]  # of no token, then of the classes
    token_class = token_class + 1
    if stop:
        token_class[list(stop)] = len(columns)
        columns.append(ends)
    return _table(np.stack(columns, 1), token_class, least[alive])


def combined(constraints: Sequence[Automaton | None]) -> Automaton | None:
    """One automaton in which row b starts in constraints[b]; None allows every token."""
    each = [c for c in dict.fromkeys(constraints) if c is not None]
    if not each:
        return None
    if len({len(c.token_class) for c in each}) > 1:
        raise ValueError("the constraints of a batch must be of one tokenizer")
    pairs = np.stack([c.token_class.cpu().numpy() for c in each])  # (constraints, V)
    classes, token_class = np.unique(np.pad(pairs, ((0, 0), (1, 0))), axis=1, return_inverse=True)
    starts: dict[Automaton | None, int] = {}
    blocks, least, n = [], [], START
    for c, own in zip(each, classes):
        starts[c] = n
        real = int((c.least < NEVER).sum()) + 1  # and DEAD; the rest is padding
        block = c.transition.cpu().numpy()[START:real, own]
        blocks.append(np.where(block < START, block, block + n - START))
        least.append(c.least.cpu().numpy()[START:real])
        n += len(block)
    blocks.append(np.full((1, classes.shape[1]), n))
    starts[None] = n
    table = np.concatenate(blocks), token_class.reshape(-1)[1:], np.concatenate([*least, [0]])
    return _table(*table, [starts[c] for c in constraints])


def _table(
    allowed: np.ndarray, token_class: np.ndarray, least: np.ndarray, starts: list[int] | None = None
) -> Automaton:
    """The automaton with these rows from START on. Class 0, of no token, has the least column."""
    if allowed.size > MAX_ENTRIES:
        raise UserError(f"a table of {allowed.shape} is too large: use simpler constraints")
    # Columns may differ in removed states only.
    columns, same = np.unique(allowed, axis=1, return_inverse=True)
    first = np.array([[DEAD], [END]]).repeat(columns.shape[1], 1)
    transition = np.concatenate([first, columns]).astype(np.int32)
    least = np.array([NEVER, 0, *least], dtype=np.int32)
    return Automaton(transition, same.reshape(-1)[token_class], least, starts)


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


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else text[:97] + "...")
