"""What a kernel is told about a KV cache that it reads: whose tokens stand where. Read-only.

The keys and values themselves come as k and v, this call's own among them (inference/cache.py has
stored them by then):

    StaticView   k, v (B, length, Hkv, D)             row b's tokens stand at places 0, 1, 2, ...
    PagedView    k, v (n_pages, page_size, Hkv, D)    row b's tokens lie in the pages of its table

Token i of row b in this call stands at position ``start[b] + i`` of its sequence and sees the
positions up to its own. Tokens from ``count[b]`` on are padding on the right: their outputs are
finite and mean nothing. All tensors are on one device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attention.spec import visible


@dataclass(frozen=True)
class StaticView:
    """How far each row of a static cache is filled."""

    start: Tensor  # (B,) int32, tokens of each row stored before this call
    count: Tensor  # (B,) int32, tokens of each row in this call, 0 .. Tq
    length: int  # places that are read

    def seen(self, Tq: int, window: int | None) -> Tensor:
        """Which places each query of this call sees, bool (B, 1, Tq, length)."""
        i = torch.arange(Tq, device=self.start.device)
        # Padding may stand beyond the places that are read: it sees as the last of them does.
        at = (self.start[:, None] + i).clamp(max=self.length - 1)
        j = torch.arange(self.length, device=self.start.device)
        return visible(at[:, None, :, None], j, 0, window)


@dataclass(frozen=True)
class PagedView:
    """Which pages hold each row's tokens, in order."""

    page_table: Tensor  # (B, max_pages) int32, 0 (the null page) where a row has no page
    start: Tensor  # (B,) int32, tokens of each row stored before this call
    count: Tensor  # (B,) int32, tokens of each row in this call, 0 .. Tq
