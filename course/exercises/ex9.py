"""Exercise 9: attention over a page table."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import same

MISTAKES = [
    ("page_table[j // page_size].long()", "j // page_size",
     "The page table says which pages hold the tokens, in which order"),
    ("torch.arange(length)", "torch.arange(-(-length // page_size) * page_size)",
     "Read the last page only up to `length`"),
    ("torch.arange(length)", "torch.arange(length // page_size * page_size)",
     "The last page, which is not full, is left out"),
    ("torch.arange(length)", "torch.arange(length - 1)", "The newest token sees itself, too"),
    (" / math.sqrt(D)", "", "Divide the scores by sqrt(D)"),
]


def check(answer: ModuleType) -> None:
    # Pages in order; out of order; a full last page; a last page with one token.
    for table, length in (([1, 0, 0], 4), ([5, 2, 0], 6), ([3, 6, 1], 12), ([4, 5, 2], 9)):
        draw = torch.Generator().manual_seed(length)
        k_pages, v_pages = torch.randn(2, 7, 4, 2, generator=draw)
        q, page_table = torch.tensor([2.0, 1.0]), torch.tensor(table, dtype=torch.int32)
        case = f"page_table = {table}, page_size = 4, length = {length}"
        k, v = (pages[page_table.long()].flatten(0, 1)[:length] for pages in (k_pages, v_pages))
        want = torch.softmax(k @ q / math.sqrt(2), dim=0) @ v
        same(answer.attend(q, k_pages, v_pages, page_table, length), want, "out", case)
        other = torch.ones(7, 4, dtype=torch.bool)
        for j in range(length):
            other[table[j // 4], j % 4] = False
        k_pages[other] = v_pages[other] = torch.nan
        got = answer.attend(q, k_pages, v_pages, page_table, length)
        assert not got.isnan().any(), (
            f"out is NaN if unused places hold NaN, {case}: read nothing behind `length`"
        )
