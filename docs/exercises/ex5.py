"""Exercise 5: attention tile by tile, with every read from main memory counted."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from attention.spec import visible
from attention.tiled import blocks, wholly_masked
from docs.exercises.check import Wrong, call, same

NAMES = ("forward",)
TASK = """
Attention tile by tile

One head, causal. Q, K and V lie in main memory; the fast memory holds one block of each. Write

    forward(load, store, rows, cols, offset)

    load("Q", i)     brings block i of Q into the fast memory and returns it, (B_r, D); likewise
                     load("K", j) and load("V", j), (B_c, D). The next block overwrites it there
    store(i, O_i)    writes block i of the output, (B_r, D), to main memory
    rows, cols       lists of slices: block i of Q holds the queries from rows[i].start up to, not
                     including, rows[i].stop; block j of K and V the keys of cols[j]. The last
                     block may be shorter, and the blocks of Q and of K may differ in size
    offset           query i sees key j where j <= i + offset; offset = Tk - Tq

For each block of Q in turn, go through the blocks of K and V and keep m, l and O as in exercise 4.
The checker compares what you store, and counts what you load: a block of Q once, and a block of K
and of V once for each row of tiles, unless no query of that row sees a key of it. A query that sees
no key gives zeros; every block of the output is stored once.
"""
START = '''
import math

import torch


def forward(load, store, rows, cols, offset):
    """Attention of one head, tile by tile."""
    for i, I in enumerate(rows):
        Q_i = load("Q", i)
        m = torch.full((len(Q_i), 1), torch.finfo(torch.float32).min)
        l = torch.zeros(len(Q_i), 1)
        O = torch.zeros_like(Q_i)
        for j, J in enumerate(cols):
            # Which tiles can be skipped?
            K_j, V_j = load("K", j), load("V", j)
            S = Q_i @ K_j.T / math.sqrt(Q_i.shape[1])
            # Which of these scores must be hidden? Then m, l and O as in exercise 4.
        store(i, O)
'''

# Tq, Tk, B_r, B_c
CASES = [(2, 2, 2, 2), (4, 4, 2, 2), (6, 6, 2, 3), (8, 8, 4, 2), (7, 7, 3, 2), (4, 8, 2, 2),
         (1, 6, 1, 4), (3, 10, 2, 4), (6, 3, 2, 2), (40, 40, 8, 16)]  # fmt: skip


class Memory:
    """Main memory and a fast memory with room for one block of Q, one of K and one of V."""

    def __init__(self, Tq: int, Tk: int, B_r: int, B_c: int, D: int = 4) -> None:
        draw = torch.Generator().manual_seed(100 * Tq + Tk)
        self.main = {n: torch.randn(T, D, generator=draw) for n, T in zip("QKV", (Tq, Tk, Tk))}
        self.rows, self.cols, self.offset = blocks(Tq, B_r), blocks(Tk, B_c), Tk - Tq
        self.given = f"with Tq = {Tq}, Tk = {Tk}, B_r = {B_r}, B_c = {B_c}"
        self.fast = {"Q": torch.empty(B_r, D), "K": torch.empty(B_c, D), "V": torch.empty(B_c, D)}
        self.loads: dict[tuple[int, str, int], int] = {}  # (row of tiles, name, block) -> times
        self.row = -1
        self.out: dict[int, Tensor] = {}

    def load(self, name: str, number: int) -> Tensor:
        if name not in self.fast:
            raise Wrong(f'load("Q", i), load("K", j) or load("V", j), got load({name!r}, {number})')
        cut = self.rows if name == "Q" else self.cols
        if not 0 <= number < len(cut):
            raise Wrong(f"load({name!r}, {number}): {name} has blocks 0 to {len(cut) - 1}")
        if name == "Q":
            self.row = number
        if self.row < 0:
            raise Wrong(f"load({name!r}, {number}) came before any block of Q was loaded")
        key = (self.row, name, number)
        self.loads[key] = self.loads.get(key, 0) + 1
        block = self.main[name][cut[number]]
        slot = self.fast[name][: len(block)]
        return slot.copy_(block)

    def store(self, i: int, O_i: Any) -> None:
        if i in self.out:
            raise Wrong(f"block {i} of the output is stored twice, {self.given}")
        if not 0 <= i < len(self.rows):
            raise Wrong(f"store({i}, ...): the output has blocks 0 to {len(self.rows) - 1}")
        self.out[i] = O_i.clone() if isinstance(O_i, Tensor) else O_i


def check(answer: Any) -> None:
    """Numbers first, since they say more; then the traffic. Raises Wrong."""
    for case in CASES:
        memory = Memory(*case)
        blocks_ = list(memory.rows), list(memory.cols)
        call(answer.forward, memory.load, memory.store, *blocks_, memory.offset)
        compare(memory)
        count(memory)


def compare(memory: Memory) -> None:
    """What was stored against the formula. Raises Wrong."""
    want = formula(memory, *scores(memory))
    wrong = typical(memory)
    for i, I in enumerate(memory.rows):
        if i not in memory.out:
            raise Wrong(f"block {i} of the output was never stored, {memory.given}")
        given = f"{memory.given} (queries {span(I)})"
        mistakes = {text: out[I] for text, out in wrong.items()}
        same(memory.out[i], want[I], f"O_{i}", given, mistakes)


def count(memory: Memory) -> None:
    """What was loaded against what the tiles need. Raises Wrong."""
    for i, I in enumerate(memory.rows):
        if memory.loads.get((i, "Q", i), 0) > 1:
            raise Wrong(
                f"block {i} of Q was loaded {memory.loads[i, 'Q', i]} times, {memory.given}. It "
                "stays in the fast memory while the blocks of K and V come by"
            )
        for j, J in enumerate(memory.cols):
            masked = wholly_masked(I, J, memory.offset, None)
            for name in "KV":
                times = memory.loads.get((i, name, j), 0)
                if masked and times:
                    raise Wrong(
                        f"block {j} of {name} was loaded for block {i} of Q, {memory.given}. Of "
                        f"queries {span(I)} none sees any of keys {span(J)}: skip that tile before "
                        "loading"
                    )
                if not masked and times != 1:
                    raise Wrong(
                        f"block {j} of {name} was loaded {times} times for block {i} of Q, must be "
                        f"once, {memory.given}"
                    )


def scores(memory: Memory) -> tuple[Tensor, Tensor]:
    """All scores (Tq, Tk), and which of them count."""
    Q, K = memory.main["Q"], memory.main["K"]
    i, j = torch.arange(len(Q))[:, None], torch.arange(len(K))
    return Q @ K.T / math.sqrt(Q.shape[1]), visible(i, j, memory.offset)


def formula(memory: Memory, S: Tensor, seen: Tensor) -> Tensor:
    """softmax(S) V over what is seen; a row that sees nothing gives zeros."""
    least = torch.finfo(S.dtype).min
    return torch.softmax(S.masked_fill(~seen, least), dim=1) * seen @ memory.main["V"]


def typical(memory: Memory) -> dict[str, Tensor]:
    """What typical mistakes give."""
    S, seen = scores(memory)
    (Tq, Tk), D, V = S.shape, memory.main["Q"].shape[1], memory.main["V"]
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    row, col = i // memory.rows[0].stop, j // memory.cols[0].stop  # the numbers of the blocks
    right = formula(memory, S, seen)
    blind = ~seen.any(dim=1, keepdim=True)
    # The running maximum as it was when a key's tile came by.
    hidden = S.masked_fill(~seen, torch.finfo(S.dtype).min)
    peaks = torch.stack([hidden[:, J].amax(dim=1) for J in memory.cols], dim=1).cummax(dim=1).values
    then = torch.exp(hidden - peaks[:, col]) * seen
    visited = torch.zeros_like(seen)  # keys in a tile that some query of the block sees
    for I in memory.rows:
        for J in memory.cols:
            visited[I, J] = seen[I, J].any()
    mean = visited.float() @ V / visited.sum(dim=1, keepdim=True).clamp(min=1)
    now = torch.exp(hidden - peaks[:, -1:]) * seen
    return {
        "A row that sees nothing is 0 / 0 at the end; it must give zeros": (
            right.masked_fill(blind, math.nan)
        ),
        "A row that sees nothing gets the mean of the values that came by; it must give zeros. "
        "Give exp -inf for a hidden score: against a finite one m rises to it, and exp(0) is 1": (
            torch.where(blind, mean, right)
        ),
        "That is the zeros that O began with: no tile was added to it, not even the one on the "
        "diagonal, of which each query sees a part": torch.zeros_like(right),
        "The scores of the tiles on the diagonal are not masked entry by entry": (
            formula(memory, S, torch.ones_like(seen))
        ),
        "Tiles on the diagonal are skipped: only those above it may be": (
            formula(memory, S, seen & (col < row))
        ),
        "Tiles are skipped by their number, j > i; with B_r and B_c (or Tq and Tk) different, "
        "compare positions": formula(memory, S, seen & (col <= row)),
        "The mask is aligned top-left: query i sees key j where j <= i + offset": (
            formula(memory, S, visible(i, j))
        ),
        "The scores are not divided by sqrt(D)": formula(memory, S * math.sqrt(D), seen),
        "O is not divided by l at the end": now @ V,
        "When a tile brings a new maximum, neither O nor l is rescaled": (
            then @ V / then.sum(dim=1, keepdim=True)
        ),
        "When a tile brings a new maximum, O is not rescaled": (
            then @ V / now.sum(dim=1, keepdim=True)
        ),
        "When a tile brings a new maximum, l is not rescaled": (
            now @ V / then.sum(dim=1, keepdim=True)
        ),
    }


def span(block: slice) -> str:
    first, last = block.start, block.stop - 1
    return f"{first}" if first == last else f"{first} to {last}"
