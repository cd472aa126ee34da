"""A person's own mask, for flex: a file that defines mask_mod, named flex:FILE.py.

    def mask_mod(b, h, q_idx, kv_idx):           True where the query sees the key
    def score_mod(score, b, h, q_idx, kv_idx):   optional: changes the scaled score, before the mask

They are those of PyTorch's flex_attention: elementwise in the indices of a sequence, a query head,
a query and a key. mask_mod replaces visible(), causality included. q_idx is a position among the
keys: with Tk - Tq keys before the first query (a cache), that query's is Tk - Tq.

What they read must not change: the list of the mask's tiles is made once a shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROWS = 128  # queries for which the mask is evaluated at once


def indices(B: int, H: int, i: Tensor, Tk: int) -> tuple[Tensor, ...]:
    """b, h, q_idx and kv_idx that broadcast to (B, H, len(i), Tk)."""
    b, h, j = (torch.arange(n, device=i.device) for n in (B, H, Tk))
    return b[:, None, None, None], h[:, None, None], i[:, None], j


@dataclass(frozen=True, eq=False)
class Mods:
    """The functions of such a file."""

    mask_mod: Callable[..., Tensor]
    score_mod: Callable[..., Tensor] | None = None

    def seen(self, B: int, H: int, i: Tensor, Tk: int) -> Tensor:
        """The mask, bool (B, H, len(i), Tk), of queries at the positions i."""
        seen = self.mask_mod(*indices(B, H, i, Tk))
        return torch.as_tensor(seen, device=i.device).bool().expand(B, H, len(i), Tk)

    def scored(self, scores: Tensor, H: int, i: Tensor) -> Tensor:
        """The scores (B, Hkv, H / Hkv * len(i), Tk) after score_mod."""
        if self.score_mod is None:
            return scores
        B, Tk = len(scores), scores.shape[-1]
        by_head = scores.reshape(B, H, len(i), Tk)
        moved = self.score_mod(by_head, *indices(B, H, i, Tk))
        return moved.expand_as(by_head).reshape(scores.shape)

    def mean_keys(self, T: int, H: int, device: str | torch.device = "cpu") -> float:
        """Keys that a query sees, the mean over T queries of H heads in one sequence."""
        rows = torch.arange(T, device=device).split(ROWS)
        return sum(int(self.seen(1, H, i, T).sum()) for i in rows) / (H * T)
