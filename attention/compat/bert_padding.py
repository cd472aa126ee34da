"""flash_attn.bert_padding: a padded batch for the varlen functions, and back."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .calls import wrong


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows (n, ...) of x (rows, ...) at indices (n,) int64."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Zeros (first_axis_dim, ...) with values (n, ...) at indices (n,) int64."""
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def unpad_input(hidden_states: Tensor, attention_mask: Tensor,
                unused_mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """Rows (total, ...) of hidden_states (B, T, ...), their indices (total,) int64, cu_seqlens
    (B + 1,) int32, the longest length, and token counts (B,) int32; the host waits. attention_mask
    (B, T): 1 for tokens; unused_mask (B, T): 1 for kept places without one."""
    spare = torch.zeros_like(attention_mask) if unused_mask is None else unused_mask
    kept = attention_mask.int() + spare.int()
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", spare)):
        if mask.shape != hidden_states.shape[:2]:
            wrong(name, f"{tuple(hidden_states.shape[:2])} as hidden_states", mask)
        if not bool(((mask == 0) | (mask == 1) & (kept == 1)).all()):
            wrong(name, "0 or 1, and not 1 in both masks", mask)
    lengths, used = kept.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    rows = index_first_axis(hidden_states.flatten(0, 1), indices)
    return rows, indices, cu_seqlens, max(lengths.tolist(), default=0), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """(batch, seqlen, ...) from the rows of unpad_input(), zero-padded."""
    out = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return out.unflatten(0, (batch, seqlen))
