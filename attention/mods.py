"""flex:FILE.py: flex with functions of a file (docs/KERNEL.md):

    def mask_mod(b, h, q_idx, kv_idx):           instead of visible(); q_idx is among the keys
    def score_mod(score, b, h, q_idx, kv_idx):   optional: changes the scaled score

Tiles are listed once a shape: O(B * H * Tq * Tk) work, O(B * H * 128 * Tk) memory."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F

from . import flex
from .caps import Backend
from .function import not_compiled
from .masks import Mods

PREFIX = "flex:"


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # its tensors cannot be used in training
def block_mask(mods: Mods, B: int, H: int, Tq: int, Tk: int,
               device: torch.device) -> tuple[flex.BlockMask, flex.Mod | None]:
    """mask_mod as a BlockMask, and score_mod, for the last Tq of Tk positions."""
    if Tq > Tk:
        raise ValueError(f"a mask of one's own needs at least as many keys as queries: {Tq} > {Tk}")
    some, every = [], []
    rest = -Tk % flex.TILE  # missing keys of the last tile
    for i in torch.arange(Tk - Tq, Tk, device=device).split(flex.TILE):
        seen = mods.seen(B, H, i, Tk)
        some.append(F.pad(seen.any(2), (0, rest)).unflatten(2, (-1, flex.TILE)).any(3))
        every.append(F.pad(seen.all(2), (0, rest), value=True).unflatten(2, (-1, flex.TILE)).all(3))
    mods.scored(torch.zeros(1, H, 1, Tk, device=device), H, i[:1])  # raises here, not in the truth
    # A number would be a constant of the compiled kernel.
    shift = torch.full((), Tk - Tq, device=device)
    mask_of, score_of = mods.mask_mod, mods.score_mod
    mask = flex.listed(torch.stack(some, dim=2), torch.stack(every, dim=2), (Tq, Tk), flex.TILE,
                       lambda b, h, i, j: mask_of(b, h, i + shift, j))
    return mask, score_of and (lambda s, b, h, i, j: score_of(s, b, h, i + shift, j))


def backend_of(module: ModuleType, path: str) -> Backend:
    mods = Mods(module.mask_mod, getattr(module, "score_mod", None))
    attend = partial(flex.attend, own_mask=partial(block_mask, mods))
    rows = dict.fromkeys(
        replace(row, window=False, segments=False, softcap=False, sinks=False, alibi=False)
        for row in flex.BACKEND.caps)
    title = f"PyTorch flex_attention, mask of {path}"
    return Backend(PREFIX + os.path.basename(path), title, not_compiled(attend), tuple(rows),
                   fallback=None, fullgraph=False, mods=mods)
