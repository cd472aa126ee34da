"""Constrained text: every new text matches a regular expression.

    regular expression  ->  automaton over bytes  ->  automaton over tokens  ->  tensors
                              (n states, 256)           (n states, classes)

The state decides which tokens may follow (Willard & Louf 2023, arXiv 2307.09702), by lookups that
are part of a compiled decode step. Tokens with the same column are one class: GPT-2's 50,257 tokens
need hundreds.

**Every text ends as a match.** A token is allowed only if a match still fits into the tokens left.
An end token is allowed in accepting states; a text that cannot go on ends without one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from typing import TYPE_CHECKING, Any

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


class Automaton(nn.Module):
    """An automaton over tokens. States (B, 2) int64: the automaton's, and the tokens left.

    Class 0 has the tokens that are never allowed, and ids beyond the tokenizer's. The table's sides
    are rounded up: other constraints reuse the compiled decode step.
    """

    transition: Tensor  # (states, classes) int32: the next state
    token_class: Tensor  # (V,) int64
    least: Tensor  # (states,) int32: the fewest tokens to a match, 0 in an accepting state
    onward: Tensor  # (states,) int32: the fewest to a longer match

    def __init__(
        self,
        transition: np.ndarray,
        token_class: np.ndarray,
        least: np.ndarray,
        starts: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        self.starts = starts  # the first state of each row; None: START
        spare = [(0, max(64, 1 << (n - 1).bit_length()) - n) for n in transition.shape]
        transition = np.pad(transition, spare, constant_values=DEAD)
        least = np.pad(least, spare[0], constant_values=NEVER)
        after = np.where(transition == END, NEVER, least[transition]).min(1)
        onward = np.where(after < NEVER, after, NEVER - 1) + 1
        tables = {"transition": transition, "token_class": token_class, "least": least}
        for name, table in (tables | {"onward": onward.astype(np.int32)}).items():
            self.register_buffer(name, torch.from_numpy(table))
        self.shortest = np.where((transition == END).any(1), least, onward)

    def start(self, rows: Sequence[int], left: Sequence[int]) -> Tensor:
        """The first state (B, 2) of rows that may have left[b] tokens. Raises UserError if too few
        tokens are left for a match."""
        at = [START if self.starts is None else self.starts[row] for row in rows]
        for state, room in zip(at, left, strict=True):
            if 0 < room < self.shortest[state]:
                least = f"the shortest match of the constraint has {self.shortest[state]} tokens"
                raise UserError(f"{least}, there is room for {room}: raise max_new_tokens")
        both = [[state, max(1, room)] for state, room in zip(at, left)]
        return to_device(torch.tensor(both), self.transition.device)

    def forward(self, logits: Tensor, state: Tensor) -> Tensor:
        """The logits (B, V) with -inf for forbidden tokens; others become finite."""
        after = self.least[self.transition[state[:, 0]]]  # (B, classes)
        of_token = F.pad(self.token_class, (0, logits.shape[1] - len(self.token_class)))
        forbidden = (after >= state[:, 1:]).index_select(1, of_token)  # (B, V)
        return logits.clamp(min=-3e4).masked_fill(forbidden, -math.inf)  # -3e4: float16 holds it

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """The state (B, 2) after these allowed tokens, (B,) int64."""
        V = len(self.token_class)
        of_token = torch.where(token < V, self.token_class[token.clamp(max=V - 1)], 0)
        at, left = self.transition[state[:, 0], of_token].long(), state[:, 1] - 1
        at = torch.where(self.onward[at] <= left, at, END)
        return torch.stack([at, left.clamp(min=1)], dim=1)  # at the end any token is allowed


def regex(pattern: str, tokenizer: Tokenizer, stop: Iterable[int] | None = None) -> Automaton:
    """Texts that fully match a regular expression in Rust's syntax, ended by the tokens `stop`, by
    default the tokenizer's. Raises UserError if no text can match, or it is not supported."""
    kinds = getattr(tokenizer, "decoders", ["ByteLevel"])
    if "ByteLevel" not in kinds or set(kinds) - {"ByteLevel", "Fuse"}:
        found = f"{tokenizer.name} with decoder {', '.join(kinds)}"
        raise UserError(f"a constraint needs a tokenizer of characters or bytes, got {found}")
    stop = list(tokenizer.ends if stop is None else stop)
    (table, accepts), tokens = compiled(pattern), tokenizer.token_bytes()
    what = f"the regex {pattern!r:.100}"
    step, token_class = _classes(table, tokens, what)  # (n, classes), (V,)
    least = np.where(accepts, 0, NEVER).astype(np.int32)  # the fewest tokens to a match
    while (near := (least == NEVER) & (least[step].min(1) < NEVER)).any():
        least[near] = least[step[near]].min(1) + 1
    alive = least < NEVER
    if not alive[step[0]].any():
        raise UserError(
            f"no text of the model's {len(tokens)} tokens, but the empty, matches {what}"
        )
    renamed = np.where(alive, START + np.cumsum(alive) - 1, DEAD)
    allowed = renamed[step[alive]]
    ends = np.where(accepts[alive], END, DEAD)
    columns = [np.zeros_like(ends), *allowed.T]  # of no token, then of the classes
    token_class = token_class + 1
    if stop:
        token_class[stop] = len(columns)
        columns.append(ends)
    return _table(np.stack(columns, 1), token_class, least[alive])


# --- the automaton over bytes ---


def unanchored(pattern: str) -> str:
    pieces = PIECE.findall(pattern)
    pieces = pieces[pieces[:1] == ["^"] :]
    pieces = pieces[: len(pieces) - (pieces[-1:] == ["$"])]
    for piece in pieces:
        if piece in ("^", "$", r"\A", r"\z", r"\b", r"\B"):
            raise UserError(f"the regex {pattern!r}: {piece} is not supported there")
    return "".join(pieces)


def compiled(pattern: str) -> tuple[np.ndarray, np.ndarray]:
    """The automaton of a regular expression, by outlines-core 0.2.14: the next states (n, 256), and
    (n,) True for accepting ones. The first state is the start, the last is dead.

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
        why = f"({str(e).split('. ')[0]}); look-around and back-references are not supported"
        raise UserError(f"cannot compile the regex {pattern!r:.100} {why}") from e
    found, finals = index.get_transitions(), index.get_final_states()
    start = found.get(index.get_initial_state(), {})
    rows = [{t - 256: state for t, state in start.items() if 256 <= t < 512}, *found.values()]
    number = {state: i for i, state in enumerate(found, 1)}
    table = np.full((len(rows) + 1, 256), len(rows), dtype=np.int32)
    for i, row in enumerate(rows):
        for byte, state in row.items():
            if 0 < byte < 256:
                table[i, byte] = number.get(state, len(rows))
    return table, np.array([*(row.get(0) in finals for row in rows), False])


# --- the automaton over tokens ---


def combined(constraints: Automaton | Sequence[Automaton | None] | None) -> Automaton | None:
    """One automaton in which row b starts in constraints[b]; None allows every token."""
    if not isinstance(constraints, Sequence):
        return constraints
    each = [c for c in dict.fromkeys(constraints) if c is not None]
    if not each:
        return None
    if len({len(c.token_class) for c in each}) > 1:
        raise ValueError("the constraints of a batch must be of one tokenizer")
    own = np.stack([c.token_class.cpu().numpy() for c in each])  # (constraints, V)
    classes, token_class = np.unique(np.pad(own, ((0, 0), (1, 0))), axis=1, return_inverse=True)
    starts: dict[Automaton | None, int] = {}
    blocks, least, n = [], [], START
    for c, columns in zip(each, classes):
        starts[c], block = n, c.transition.cpu().numpy()[START:, columns]
        blocks.append(np.where(block < START, block, block + n - START))
        least += c.least[START:].tolist()
        n += len(block)
    blocks.append(np.full((1, classes.shape[1]), n))  # any token
    at = [starts.get(c, n) for c in constraints]
    return _table(np.concatenate(blocks), token_class.reshape(-1)[1:], [*least, 0], at)


def _table(
    allowed: np.ndarray, token_class: np.ndarray, least: Any, starts: list[int] | None = None
) -> Automaton:
    """The automaton with these rows from START on. Class 0 sorts first, it is all DEAD."""
    # Columns may differ in removed states only.
    columns, same = np.unique(allowed, axis=1, return_inverse=True)
    transition = np.pad(columns, ((START, 0), (0, 0)), constant_values=DEAD).astype(np.int32)
    transition[END] = END
    least = np.array([NEVER, 0, *least], dtype=np.int32)
    return Automaton(transition, same.reshape(-1)[token_class], least, starts)


def _classes(table: np.ndarray, tokens: list[bytes], what: str) -> tuple[np.ndarray, np.ndarray]:
    """The next state (n, classes) and the class of each token (V,); an empty token is dead. Each
    pair of a map of states and a byte is composed once (the automaton's transition monoid)."""
    maps = [np.arange(len(table), dtype=np.int32)]  # state -> next state
    number = {maps[0].tobytes(): 0}

    @cache
    def composed(at: int, byte: int) -> int:
        after = table[maps[at], byte]
        if (n := number.setdefault(after.tobytes(), len(maps))) == len(maps):
            maps.append(after)
            if after.size * len(maps) > MAX_ENTRIES:
                raise UserError(f"{what} has too many states: use fewer alternatives, repetitions")
        return n

    of_token = [reduce(composed, token, 0) if token else -1 for token in tokens]
    maps.append(np.full_like(maps[0], len(table) - 1))
    used, token_class = np.unique(of_token, return_inverse=True)
    return np.stack([maps[i] for i in used], axis=1), token_class.reshape(-1)
