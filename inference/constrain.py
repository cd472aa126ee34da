"""Constrained text: each new text matches a regular expression within its limit.

Allowed are tokens after which a match still fits into the tokens left (Willard & Louf 2023, arXiv
2307.09702).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core.runtime import to_device
from core.settings import UserError, user_errors
from data.tokenizer import Tokenizer
from inference import automaton
from inference.automaton import DEAD, END, NEVER, START


class Automaton(nn.Module):
    """States (B, 2) int64: the automaton's, and the tokens left. Class 0: never allowed."""

    transition: Tensor  # (states, classes) int32: the next state
    token_class: Tensor  # (V,) int64
    least: Tensor  # (states,) int32: fewest tokens to a match, 0 in an accepting state
    onward: Tensor  # (states,) int32: to a longer match

    def __init__(self, tables: automaton.Tables, starts: Sequence[int] | None = None) -> None:
        super().__init__()
        self.starts = starts  # of each row; None: START
        transition, token_class, least = tables
        # Rounded up: constraints share the compiled decode step.
        spare = [(0, max(64, 1 << (n - 1).bit_length()) - n) for n in transition.shape]
        transition = np.pad(transition, spare, constant_values=DEAD)
        least = np.pad(least, spare[0], constant_values=NEVER)
        after = np.where(transition == END, NEVER, least[transition]).min(1)
        onward = np.where(after < NEVER, after, NEVER - 1) + 1
        named = {"transition": transition, "token_class": token_class, "least": least}
        for name, array in (named | {"onward": onward.astype(np.int32)}).items():
            self.register_buffer(name, torch.from_numpy(array))
        self.shortest = np.where((transition == END).any(1), least, onward)

    def start(self, row: int, room: int) -> Tensor:
        """First state (1, 2) of a row; room: its most tokens. UserError: too few."""
        if self.starts is not None and row >= len(self.starts):
            raise UserError("constraint: fewer values than prompts")
        state = START if self.starts is None else self.starts[row]
        if 0 < room < (n := self.shortest[state]):
            raise UserError(f"the shortest match has {n} tokens, max_new_tokens is {room}")
        return to_device([[state, min(max(1, room), NEVER)]], self.transition.device)

    def forward(self, logits: Tensor, state: Tensor) -> Tensor:
        """Logits (B, V), -inf for forbidden tokens, finite for others."""
        after = self.least[self.transition[state[:, 0]]]  # (B, classes)
        of_token = F.pad(self.token_class, (0, logits.shape[1] - len(self.token_class)))
        forbidden = (after >= state[:, 1:]).index_select(1, of_token)  # (B, V)
        forbidden |= logits == -math.inf  # by a processor
        return logits.clamp(min=-3e4).masked_fill(forbidden, -math.inf)  # -3e4: float16 holds it

    def advance(self, state: Tensor, token: Tensor) -> Tensor:
        """States (B, 2) after these allowed tokens, (B,) int64."""
        V = len(self.token_class)
        of_token = torch.where(token < V, self.token_class[token.clamp(max=V - 1)], 0)
        at, left = self.transition[state[:, 0], of_token].long(), state[:, 1] - 1
        at = torch.where(self.onward[at] <= left, at, END)
        return torch.stack([at, left.clamp(min=1)], dim=1)  # END allows any token


def regex(pattern: str, tokenizer: Tokenizer, stop: Iterable[int] | None = None) -> Automaton:
    """Full matches of a regex in Rust's syntax, ended by `stop` (None: the tokenizer's ends)."""
    kinds = getattr(tokenizer, "decoders", ["ByteLevel"])
    if "ByteLevel" not in kinds or set(kinds) - {"ByteLevel", "Fuse"}:
        got = f"{tokenizer.name} with decoder {', '.join(kinds)}"
        raise UserError(f"a constraint needs a tokenizer of characters or bytes, got {got}")
    ends = [*(tokenizer.ends if stop is None else stop)]
    with user_errors():
        return Automaton(automaton.build(pattern, tokenizer.token_bytes(), ends))


def combined(constraints: Automaton | Sequence[Automaton | None] | None) -> Automaton | None:
    """Row b starts in constraints[b]; None allows every token."""
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
    blocks.append(np.full((1, classes.shape[1]), n))
    tables = automaton.table(np.concatenate(blocks), token_class.reshape(-1)[1:], [*least, 0])
    return Automaton(tables, [starts.get(c, n) for c in constraints])
