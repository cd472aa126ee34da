"""Attention as a plain program that can make the common mistakes (mistakes.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..proof import Inputs
from ..spec import Spec, visible


def cast(given: Inputs, dtype: str) -> Inputs:
    """The floating-point tensors in this dtype."""
    to = getattr(torch, dtype)
    found = (t.detach().to(to) if t is not None and t.is_floating_point() else t for t in given)
    return Inputs(*found)  # type: ignore[arg-type]


def program(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
    sinks: Tensor | None = None, alibi_slopes: Tensor | None = None, keep: Tensor | None = None,
    offset: int | None = None, shift: int = 0, inverted: bool = False, order: int = 0,
    modulo: bool = False, gradient_of: int | None = None, dims: int | None = None,
    late: bool = False, tile: int = 0, stale: str = "", half: str = "",
    rounded: str = "", no_rowsum: bool = False, factor: Mapping[str, float] = {}, **sides: Any,
) -> Tensor:
    """attend() by the formula, in q's dtype. A row that sees no key gives zeros.
    `keep` (B, H, Tq, Tk) are dropout's factors; what follows are mistakes: `factor` of gradients by
    the input's name, `sides` other values of window, right, scale and softcap."""
    Tq, Tk, H, group = q.shape[1], k.shape[1], q.shape[2], q.shape[2] // k.shape[2]
    of = {**vars(spec), "scale": spec.softmax_scale, **sides}
    i, j, h = (torch.arange(n, device=q.device) for n in (Tq, Tk, H))

    def half_at(t: Tensor, place: str) -> Tensor:
        return t.to(getattr(torch, half)).to(t.dtype) if place == rounded else t

    def leaf(t: Tensor, name: str) -> Tensor:
        times = factor.get(name, 1.0)
        t = t if times == 1 else t.detach() + times * (t - t.detach())
        return half_at(t, "q, k and v are")

    heads = h % k.shape[2] if modulo else h // group
    q, k, v = leaf(q, "q"), leaf(k, "k")[:, :, heads], leaf(v, "v")[:, :, heads]
    if gradient_of is not None:
        own = (h % group == gradient_of)[:, None]
        k, v = (torch.where(own, t, t.detach()) for t in (k, v))
    at = i + (Tk - Tq if offset is None else offset)
    seen = visible(at[:, None] + shift, j, 0, of["window"], right=of["right"])[None]
    if segments is not None:
        own = i + Tk - Tq
        ahead = segments[:, None] - segments[:, own.clamp(min=0), None]
        seen = seen & (ahead * order >= 0 if order else ahead == 0) & (own >= 0)[:, None]
    seen = (seen != inverted)[:, None]  # (B or 1, 1, Tq, Tk)

    s = half_at(torch.einsum("bihd,bjhd->bhij", q[..., :dims], k[..., :dims]), "q . k is")
    s = s * of["scale"]
    s = s.masked_fill(~seen, -torch.inf) if late else s
    if of["softcap"] is not None:
        s = of["softcap"] * torch.tanh(s / of["softcap"])
    if alibi_slopes is not None:
        s = s - alibi_slopes[..., None, None] * (at[:, None] - j).abs()
    s = half_at(s if late else s.masked_fill(~seen, -torch.inf), "the scores are")
    sink = s.new_full((H, 1, 1), -torch.inf)
    if sinks is not None:
        sink = leaf(sinks, "sinks").to(s.dtype)[:, None, None]
    lowest = torch.finfo(s.dtype).min
    m = torch.maximum(s.amax(3, keepdim=True), sink).clamp(min=lowest).detach()
    e, e_sink = torch.exp(s - m), torch.exp(sink - m)
    top = bottom = e
    if tile:  # exponentials from the maximum of the tiles so far
        tiles = F.pad(s, (0, -Tk % tile), value=-torch.inf).unflatten(3, (-1, tile))
        so_far = torch.maximum(tiles.amax(4).cummax(3).values, sink).clamp(min=lowest)
        old = torch.exp(s - so_far.repeat_interleave(tile, dim=3)[..., :Tk])
        top, bottom = e if stale == "sum" else old, e if stale == "out" else old
    total = bottom.sum(3, keepdim=True) + e_sink
    total = total.detach() + 0 * total if no_rowsum else total
    p = half_at(top / total.masked_fill(total == 0, 1), "the softmax is")
    p = p * seen.any(3, keepdim=True) * (1 if keep is None else keep)
    return torch.einsum("bhij,bjhd->bihd", p, v)
