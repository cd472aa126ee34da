"""flex:FILE.py: flex with a person's own mask, from a file that defines mask_mod.

    def mask_mod(b, h, q_idx, kv_idx):           True where the query sees the key
    def score_mod(score, b, h, q_idx, kv_idx):   optional: changes the scaled score, before the mask

They are those of PyTorch's flex_attention, elementwise in the indices. mask_mod replaces visible(),
causality included. q_idx is a position among the keys: the first query's is Tk - Tq.

What they read must not change: the mask's tiles are listed once a shape, for all layers and steps,
by evaluating mask_mod at each entry: O(B * H * Tq * Tk) work, O(B * H * 128 * Tk) memory.
Refuses what flex refuses, and window, segments, softcap and sinks: those are mask_mod's and
score_mod's. Spec.right is not read. In a compiled model a call breaks the graph. A refusal is an
error, never a fallback: no other kernel computes the same."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from . import flex
from .caps import Backend, Caps
from .function import not_compiled

PREFIX = "flex:"


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
        rows = torch.arange(T, device=device).split(flex.TILE)
        return sum(int(self.seen(1, H, i, T).sum()) for i in rows) / (H * T)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # tensors made in it cannot be used in training
def block_mask(
    mods: Mods, B: int, H: int, Tq: int, Tk: int, device: torch.device
) -> tuple[flex.BlockMask, flex.Mod | None]:
    """The BlockMask of mask_mod, and score_mod, both for queries that are the last Tq of Tk."""
    from torch.nn.attention.flex_attention import BlockMask

    if Tq > Tk:
        raise ValueError(f"a mask of one's own needs at least as many keys as queries: {Tq} > {Tk}")
    some, every, rest = [], [], -Tk % flex.TILE  # keys that the last tile lacks
    for i in torch.arange(Tk - Tq, Tk, device=device).split(flex.TILE):
        seen = mods.seen(B, H, i, Tk)
        some.append(F.pad(seen.any(2), (0, rest)))
        every.append(F.pad(seen.all(2), (0, rest), value=True))
    partly, full = (torch.stack(t, dim=2).unflatten(3, (-1, flex.TILE)) for t in (some, every))
    full = full.all(4)
    mods.scored(torch.zeros(1, H, 1, Tk, device=device), H, i[:1])  # raises here, not in the truth
    # As a tensor: a number would be a constant of the compiled kernel.
    shift = torch.full((), Tk - Tq, device=device)
    mask_of, score_of = mods.mask_mod, mods.score_mod
    mask = BlockMask.from_kv_blocks(
        *flex.listed(partly.any(4) & ~full), *flex.listed(full), BLOCK_SIZE=(flex.TILE, flex.TILE),
        mask_mod=lambda b, h, i, j: mask_of(b, h, i + shift, j), seq_lengths=(Tq, Tk),
    )
    return mask, score_of and (lambda s, b, h, i, j: score_of(s, b, h, i + shift, j))


def backend_of(module: ModuleType, path: str) -> Backend:
    """flex with the functions of a module. Raises AttributeError: it has no mask_mod."""
    mods = Mods(module.mask_mod, getattr(module, "score_mod", None))
    attend = partial(flex.attend, own_mask=partial(block_mask, mods))
    rows = (Caps(c.devices, c.dtypes, c.min_capability, min_torch=c.min_torch, right=True,
                 window=False, dropout=False, segments=False, scale=True, grad=c.grad)
            for c in flex.BACKEND.caps)
    title = f"PyTorch flex_attention, mask of {path}"
    return Backend(PREFIX + os.path.basename(path), title, not_compiled(attend),
                   tuple(dict.fromkeys(rows)), fallback=None, fullgraph=False, mods=mods)
