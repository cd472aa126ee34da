"""KV caches for inference: what attend() is given as `cache`, one view for each layer.

Paged: keys and values lie in pages of `page_size` tokens, in any order, and a table says which page
holds which tokens of which sequence (Kwon et al. 2023, "PagedAttention", arXiv 2309.06180). Nothing
is reserved for tokens that may never come, and sequences with a common beginning share its pages.

    page_table, page_size = 4            k_pages
    row 0   [5 2 0]  start 6             page 0   the null page: padding is written there
    row 1   [5 3 1]  start 9             page 1   row 1's tokens 8 .. 11
                                         page 2   row 0's tokens 4 .. 7
                                         page 3   row 1's tokens 4 .. 7
                                         page 5   tokens 0 .. 3 of both: a shared prompt
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class PagedView:
    """One layer's pages, and what this call's tokens are. All tensors are on one device.

    Token i of row b in this call stands at position ``start[b] + i`` of its sequence and sees the
    positions up to its own. Tokens from ``count[b]`` on are padding on the right: they are written
    to the null page, and their outputs are finite and mean nothing.
    """

    k_pages: Tensor  # (n_pages, page_size, Hkv, D)
    v_pages: Tensor  # (n_pages, page_size, Hkv, D)
    page_table: Tensor  # (B, max_pages) int32, 0 (the null page) where a row has no page
    start: Tensor  # (B,) int32, tokens of each row stored before this call
    count: Tensor  # (B,) int32, tokens of each row in this call, 0 .. Tq

    @property
    def page_size(self) -> int:
        return self.k_pages.shape[1]

    def append(self, k: Tensor, v: Tensor) -> None:
        """Write this call's k and v, (B, Tq, Hkv, D), to their places. Never waits for the device.

        The pages must have been taken from the pool before (PagedCache.reserve).
        """
        Tq, size = k.shape[1], self.page_size
        i = torch.arange(Tq, device=k.device)
        at = self.start[:, None] + i  # (B, Tq) positions
        column = (at // size).clamp(max=self.page_table.shape[1] - 1)
        page = self.page_table.gather(1, column.long())
        real = i < self.count[:, None]
        slot = torch.where(real, page * size + at % size, at % size).flatten().long()
        self.k_pages.flatten(0, 1)[slot] = k.flatten(0, 1)
        self.v_pages.flatten(0, 1)[slot] = v.flatten(0, 1)
