"""A mask of `transformers` as window, `right` and segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..caps import BackendUnavailable
from ..masks import mask as visible_mask


@dataclass(frozen=True)
class Proof:
    """Window, `right` and segments over the first `end` keys; later ones are masked."""

    queries: int
    end: int
    window: int | None = None
    segments: Tensor | None = None  # (B, end) int32, with padding
    texts: Tensor | None = None  # (B, end) int32, 0 for padding; None: one text
    right: int | None = 0
    runs: tuple[tuple[list[int], slice], ...] = ()  # rows, and the keys that all their queries see

    def effective(self, window: int | None) -> int | None:
        return window if window is not None and window < self.end else None


class Mask(Tensor):
    """A proved mask (B, 1, Tq, Tk) without entries. Computing with it raises."""

    proof: Proof
    checked: Tensor | None = None

    @staticmethod
    def of(proof: Proof, shape: tuple[int, ...]) -> Mask:
        mask = torch.zeros((), dtype=torch.bool).expand(shape).as_subclass(Mask)
        mask.proof = proof
        return mask

    @classmethod
    def __torch_function__(cls, func: Callable[..., object], types: object,
                           args: Sequence[Any] = (),
                           kwargs: dict[str, object] | None = None) -> object:
        called, operands = getattr(func, "__name__", ""), (*args, *(kwargs or {}).values())
        # fill_, __setitem__, __ior__, but not __invert__.
        writes = called == "__setitem__" or (called.startswith("__i") and len(operands) > 1)
        writes |= called.endswith("_") and not called.endswith("__")
        if writes or any(isinstance(x, Tensor) and not isinstance(x, Mask) for x in operands):
            text = f"it computes with the mask itself ({called or func})"
            raise BackendUnavailable(f"this model does not call nanoattn: {text}")
        out = super().__torch_function__(func, types, args, kwargs)
        # Copies, by generate(), keep their proof.
        if isinstance(out, Mask) and called in ("to", "detach", "contiguous", "clone"):
            proof = args[0].proof
            segments = None if proof.segments is None else proof.segments.to(out.device)
            out.proof = replace(proof, segments=segments)
        return out


def prove(mask: Tensor, window: int | None = None, real: Tensor | None = None,
          causal: bool = True) -> Proof:
    """Decompose a mask: causal, with a window and segments; one run of keys for all queries of a
    row; or a window to both sides, and segments. Else ValueError with the entry. The host waits.

    mask: (B or 1, 1, Tq, Tk), True or 0.0 where visible, else False or the minimum. window: a
    causal layer's; None: the mask's. real: (B, Tq) bool, True for tokens; None: rows with a visible
    key. causal: the model's request."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"shape {tuple(mask.shape)}, expected (batch, 1, queries, keys)")
    seen = mask[:, 0]  # (B, Tq, Tk)
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():
            raise ValueError(f"dtype {mask.dtype}, expected bool or floating point")
        seen, least = seen == 0, torch.finfo(mask.dtype).min
        if not bool((seen | (mask[:, 0] <= least / 2)).all()):
            raise ValueError("entries other than 0 and the minimum: a bias, not a mask")
    tokens = seen.any(-1) if real is None else real
    why = ValueError("not causal, and not a window to both sides or one run of keys in each row")
    if causal:
        try:
            return _band(seen, tokens, window, causal=True)
        except ValueError as e:
            why = e
    if proof := _same_keys(seen):
        return proof
    with suppress(ValueError):
        proof = _band(seen, tokens, None, causal=False)
        if not causal or proof.right:
            return proof
    raise why


def _same_keys(seen: Tensor) -> Proof | None:
    Tq, Tk = seen.shape[1:]
    first = seen[:, 0].to(torch.uint8).argmax(-1)
    stop = first + seen[:, 0].sum(-1)
    j = torch.arange(Tk, device=seen.device)
    run = (j >= first[:, None]) & (j < stop[:, None])
    if not bool((seen == run[:, None]).all()):
        return None
    rows: dict[tuple[int, int], list[int]] = {}
    for b, ends in enumerate(zip(first.tolist(), stop.tolist(), strict=True)):
        rows.setdefault(ends, []).append(b)
    runs = tuple((of_run, slice(*ends)) for ends, of_run in rows.items())
    return Proof(Tq, Tk, right=None, runs=() if [*rows] == [(0, Tk)] else runs)


def _band(seen: Tensor, real: Tensor, window: int | None, causal: bool) -> Proof:
    Tq, Tk = seen.shape[1:]
    if Tq != Tk and not causal:
        raise ValueError(f"not causal, with {Tq} queries and {Tk} keys")
    i = torch.arange(Tq, device=seen.device)
    sees = real & seen.any(-1)
    first = seen.to(torch.uint8).argmax(-1)
    last = Tk - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    ahead = torch.where(sees, last, -1) - i  # causal, query i sees keys up to i + offset
    offset = max(0, int(ahead.amax())) if causal else 0
    end, right = offset + Tq, 0 if causal else max(0, int(ahead.amax()))
    if end > Tk:
        n = int(ahead.amax(0).argmax())
        raise ValueError(f"not causal: query {n} of {Tq} sees key {n + offset} of {Tk}")

    seen = seen[:, :, :end]
    sees_last = seen.diagonal(offset - 1, 1, 2)
    joined = F.pad(sees_last, (Tq - sees_last.shape[1], 0))[:, 1:]
    if not causal:
        joined = joined | (seen.diagonal(1, 1, 2) & real[:, :-1])
    joined = torch.where(real[:, 1:], joined, ~real[:, :-1])  # also paddings share a text
    ids = (1 + F.pad(~joined, (1, 0)).cumsum(1)).int()
    earlier = torch.where(seen[:, 0, :offset], ids[:, :1], 0)  # before the first query
    texts = torch.cat([earlier, torch.where(real, ids, 0)], dim=1)
    ids = torch.cat([earlier, ids], dim=1)  # (B, end)

    windows = [window]
    if window is None:  # the most that a token sees
        windows.append(1 + max(0, int(torch.where(sees, i + offset - first, 0).amax())))
    for proof in (Proof(Tq, end, w, ids_, texts, right) for w in windows for ids_ in (None, ids)):
        rebuilt = visible_mask(Tq, end, proof.window, proof.segments, seen.device, right=right)
        differs = (rebuilt[:, 0] != seen) & real[:, :, None]
        if not bool(differs.any()):
            broken = (earlier[:, :-1] != 0) & (earlier[:, 1:] == 0)
            if proof.segments is not None and bool(broken.any()):
                raise ValueError("padding between tokens: a segment must be one run")
            return proof
    b, i_, j = differs.nonzero()[0].tolist()
    word, known = "sees" if seen[b, i_, j] else "misses", f"window {window}" if window else "causal"
    raise ValueError(f"not just {known} and segments: query {i_} of row {b} {word} key {j}")
