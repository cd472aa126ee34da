"""Attention probabilities, which a fused kernel never stores: with L, the log-sum-exp of each row's
scores S, P_ij = exp(S_ij - L_i) (Dao et al. 2022, arXiv 2205.14135, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .caps import check_call, must_be
from .machine.system import autocast_off
from .spec import DTYPES, Spec
from .truth import Inputs, changed, grouped


def weights(
    q: Tensor, k: Tensor, spec: Spec, *, rows: Sequence[int] | Tensor | None = None,
    L: Tensor | None = None, segments: Tensor | None = None, sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
) -> Tensor:
    """Exact probabilities of the queries `rows`, (B, H, rows, Tk) float32 (float64 for float64),
    without dropout. Fully masked rows are zeros; with sinks a row's sum is less than 1.

    Args:
        q, k, segments, sinks, alibi_slopes: as in attend().
        rows: indices into Tq, as in q[:, rows]; None: all. Only these are stored.
        L: (B, H, Tq) of flash_attn_func(..., return_attn_probs=True) or Backend.partial, sinks
            included: the result has no gradient. None: computed here.

    Raises:
        ValueError: tensors contradict the Spec or one another. IndexError: no such row."""
    (B, Tq, H, _), (Tk, Hkv) = q.shape, k.shape[1:3]
    check_call(q, k, k, spec, segments, None, sinks, alibi_slopes)
    if L is not None:
        must_be("L", L, (B, H, Tq), q.device, DTYPES)
    at = torch.arange(Tq)
    if rows is not None:
        chosen = torch.as_tensor(rows, device="cpu")
        mask = chosen.dtype == torch.bool
        at = at[chosen if mask or (chosen.is_floating_point() and len(chosen)) else chosen.long()]
    if at.dim() != 1:
        raise ValueError(f"rows must be a list of indices or a mask, got {rows}")
    at, acc = at.to(q.device), torch.promote_types(q.dtype, torch.float32)
    with autocast_off(q):
        raw = grouped(q[:, at].to(acc), Hkv) * spec.softmax_scale @ k.to(acc).permute(0, 2, 3, 1)
    given = Inputs(q, k, k, q, segments if Tk else None, alibi_slopes=alibi_slopes)
    scores, bias, seen = changed(raw, given, spec, at)
    S = (scores + bias).masked_fill(~seen, -torch.inf).view(B, H, len(at), Tk)
    if L is None:
        L_i = S.logsumexp(dim=-1)
        if sinks is not None:
            L_i = torch.logaddexp(L_i, sinks.to(acc)[:, None])
    else:
        S, L_i = S.detach(), L.detach()[:, :, at].to(acc)
    # Both are -inf in fully masked rows.
    return torch.exp(S - L_i.masked_fill(L_i.isneginf(), 0)[..., None])
