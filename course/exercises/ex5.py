"""Exercise 5: attention tile by tile, with reads from main memory counted."""

from __future__ import annotations

from collections import Counter
from itertools import product
from types import ModuleType

import torch
from torch import Tensor

from attention.tiled import blocks, wholly_masked
from course.exercises.check import Live, causal, draws, reference, same

# Tq, Tk, B_r, B_c, large scores
CASES = [(4, 4, 2, 2, False), (6, 6, 2, 3, False), (8, 8, 4, 2, False), (7, 7, 3, 2, False),
         (1, 6, 1, 4, False), (3, 10, 2, 4, False), (6, 3, 2, 2, False), (40, 40, 8, 16, False),
         (8, 8, 4, 2, True), (8, 512, 8, 16, False)]
SEEN = "torch.arange(J.start, J.stop) <= torch.arange(I.start, I.stop)[:, None] + offset"
MAX = "torch.maximum(m, S.amax(dim=1, keepdim=True))"
MISTAKES = [
    (SEEN, SEEN.removesuffix(" + offset"),
     "Query i sees key j where j <= i + offset, not j <= i"),
    (SEEN, f"({SEEN}) | True", "The mask inside the tile is missing"),
    (" / math.sqrt(Q_i.shape[1])", "", "Divide the scores by sqrt(D)"),
    ("O / l.masked_fill(l == 0, 1)", "O", "Divide by l after the last tile"),
    ("O / l.masked_fill(l == 0, 1)", "O / l", "l is 0 for a query without a visible key"),
    ("rescale * O", "O", "Rescale O by exp(m - m_new)"),
    ("rescale * l", "l", "Rescale l by exp(m - m_new)"),
    ("rescale = torch.exp(m - m_new)", "rescale = 1",
     "Rescale l and O by exp(m - m_new) when the maximum rises"),
    (MAX, "torch.zeros_like(m)", "exp() overflows: subtract the largest score of the row so far"),
    (MAX, "torch.maximum(m, S.amax().clamp(min=-1e30))",
     "m is a maximum for each row: S.amax(dim=1), not one for the tile"),
    ("m, l, O = m_new", "_, l, O = m_new", "m stays the old maximum: set m = m_new"),
    (SEEN, SEEN.replace("<=", "<"), "A query sees itself: j <= i + offset, not <"),
    ("J.start > I.stop - 1 + offset", "j > i", "Compare positions: i and j number blocks"),
    ("J.start > I.stop - 1 + offset", "J.start > I.start + offset",
     "A tile is visible if the LAST query of the block sees its first key"),
]


class Memory:
    """Main memory, and fast memory for one block each of Q, K and V."""

    def __init__(self, Tq: int, Tk: int, B_r: int, B_c: int, large: bool, D: int = 4) -> None:
        self.main = dict(zip("QKV", draws(100 * Tq + Tk, (Tq, D), (Tk, D), (Tk, D))))
        if large:  # scores of rows in hundreds, of others near 0
            self.main["Q"] *= 400.0 * (torch.arange(Tq)[:, None] % 2)
        self.rows, self.cols = blocks(Tq, B_r), blocks(Tk, B_c)
        self.fast = {n: torch.empty(B, D) for n, B in zip("QKV", (B_r, B_c, B_c))}
        self.loads: Counter[tuple[int, str, int]] = Counter()  # (row of tiles, name, block)
        self.row = -1
        self.out: dict[int, Tensor] = {}

    def load(self, name: str, number: int) -> Tensor:
        self.row = number if name == "Q" else self.row
        assert self.row >= 0, f"load({name!r}, {number}) came before a block of Q"
        self.loads[self.row, name, number] += 1
        block = self.main[name][(self.rows if name == "Q" else self.cols)[number]]
        return self.fast[name][: len(block)].copy_(block)  # overwrites the block before it

    def store(self, i: int, O_i: Tensor) -> None:
        assert i not in self.out, f"block {i} of the output is stored twice"
        self.out[i] = O_i.clone()


def check(answer: ModuleType) -> None:
    for Tq, Tk, B_r, B_c, large in CASES:
        memory, offset = Memory(Tq, Tk, B_r, B_c, large), Tk - Tq
        with Live() as live:
            answer.forward(memory.load, memory.store, [*memory.rows], [*memory.cols], offset)
        case = f"Tq = {Tq}, Tk = {Tk}, B_r = {B_r}, B_c = {B_c}"
        case += ", scores in the hundreds" if large else ""
        Q, K, V = memory.main.values()
        want = reference(Q, K, V, causal(Tq, Tk, offset))[0]
        for i, I in enumerate(memory.rows):
            assert i in memory.out, f"block {i} of the output is not stored, {case}"
            same(memory.out[i], want[I], f"O_{i}", case)
            assert memory.loads[i, "Q", i] == 1, f"load block {i} of Q once, {case}"
            for n, name in product(range(len(memory.cols)), "KV"):
                got = memory.loads[i, name, n]
                need = int(not wholly_masked(I, memory.cols[n], offset, None))
                assert got == need, (
                    f"block {n} of {name} was loaded {got} times for block {i} of Q, expected "
                    f"{need}, {case}. Skip a tile, before loading it, if no query sees a key of it"
                )
        assert Tk < 512 or live.most < B_r * Tk, (
            f"{live.most} numbers were held at one time, {case}: fast memory has room for a few "
            f"tiles of {B_r * B_c}. Do not collect the scores of all keys"
        )
