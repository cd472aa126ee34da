"""flex:FILE.py: flex with a person's own mask, as mods.py describes it.

The tiles of the BlockMask are listed by evaluating mask_mod at each entry, 128 queries at a time:
O(B * H * Tq * Tk) work once a shape, O(B * H * 128 * Tk) memory. Layers and steps share the list.
Refuses what flex refuses, and window, segments, softcap and sinks: those are mask_mod's and
score_mod's. Spec.right is not read. In a compiled model a call breaks the graph.
No other kernel computes the same, so a refusal is an error, never a fallback.
"""

from __future__ import annotations

import os
from functools import lru_cache, partial
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from . import flex
from .caps import Backend, Caps
from .function import not_compiled
from .mods import Mods

PREFIX = "flex:"


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

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return mods.mask_mod(b, h, i + shift, j)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert mods.score_mod is not None
        return mods.score_mod(score, b, h, i + shift, j)

    mask = BlockMask.from_kv_blocks(
        *flex.listed(partly.any(4) & ~full), *flex.listed(full), BLOCK_SIZE=(flex.TILE, flex.TILE),
        mask_mod=mask_mod, seq_lengths=(Tq, Tk),
    )
    return mask, score_mod if mods.score_mod else None


def backend_of(module: ModuleType, path: str) -> Backend:
    """flex with the functions of a module. Raises ValueError: it has no mask_mod."""
    mask_mod, score_mod = (getattr(module, name, None) for name in ("mask_mod", "score_mod"))
    if not callable(mask_mod):
        raise ValueError("it defines no mask_mod(b, h, q_idx, kv_idx)")
    mods = Mods(mask_mod, score_mod)
    attend = partial(flex.attend, own_mask=partial(block_mask, mods))
    rows = (Caps(c.devices, c.dtypes, c.min_capability, min_torch=c.min_torch, right=True,
                 window=False, dropout=False, segments=False, scale=True, grad=c.grad)
            for c in flex.BACKEND.caps)
    title = f"PyTorch flex_attention, mask of {path}"
    return Backend(PREFIX + os.path.basename(path), title, not_compiled(attend),
                   tuple(dict.fromkeys(rows)), fallback=None, fullgraph=False, mods=mods)
