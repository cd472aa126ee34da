"""Convert a mask of `transformers` to a window, `right` and segments.

transformers passes a mask (B, 1, Tq, Tk). It is decomposed, rebuilt by
:func:`visible <attention.spec.visible>`, and compared in every entry. Any other mask is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..caps import BackendUnavailable
from ..masks import mask as rebuilt


@dataclass(frozen=True)
class Proof:
    """A mask as window, `right` (bottom-right, over the first `end` keys) and segments. Keys from
    `end` on, the free places of a static cache, are visible to no query."""

    queries: int
    end: int
    window: int | None = None
    segments: Tensor | None = None  # (B, end) int32, padding included; None: the sides are enough
    texts: Tensor | None = None  # (B, end) int32, 0 for padding; None: all keys are one text
    right: int | None = 0
    # Rows of the batch, and the keys that all their queries see; empty: all see the same.
    runs: tuple[tuple[list[int], slice], ...] = ()

    def effective(self, window: int | None) -> int | None:
        """Return the window, or None if it masks nothing."""
        return window if window is not None and window < self.end else None


class Mask(Tensor):
    """A proved mask: shape (B, 1, Tq, Tk), with a Proof in place of entries. Computing with it
    raises: such a model does not call its attention implementation."""

    proof: Proof
    implementation = "nanoattn"  # attn_implementation
    checked: Tensor | None = None  # position_ids that fit it

    @staticmethod
    def of(proof: Proof, implementation: str, shape: tuple[int, ...]) -> Mask:
        mask = torch.zeros((), dtype=torch.bool).expand(shape).as_subclass(Mask)
        mask.proof, mask.implementation = proof, implementation
        return mask

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[Any] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        called, operands = getattr(func, "__name__", ""), (*args, *(kwargs or {}).values())
        # Writes (fill_, __setitem__, __ior__, but not __invert__) would not be in the proof.
        writes = called == "__setitem__" or (called.startswith("__i") and len(operands) > 1)
        writes |= called.endswith("_") and not called.endswith("__")
        if writes or any(isinstance(x, Tensor) and not isinstance(x, Mask) for x in operands):
            name = next(x.implementation for x in operands if isinstance(x, Mask))
            text = f"it computes with the mask itself ({called or func})"
            raise BackendUnavailable(f"this model does not call {name!r}: {text}")
        out = super().__torch_function__(func, types, args, kwargs)
        # Copies, as generate() and hooks make, keep their proof; other results have none.
        if isinstance(out, Mask) and called in ("to", "detach", "contiguous", "clone"):
            segments = args[0].proof.segments
            segments = None if segments is None else segments.to(out.device)
            out.implementation = args[0].implementation
            out.proof = replace(args[0].proof, segments=segments)
        return out


def prove(
    mask: Tensor, window: int | None = None, real: Tensor | None = None, causal: bool = True
) -> Proof:
    """Decompose a mask: causal with a window and segments; or each query of a row sees the same run
    of keys, as in cross-attention to padded texts; or a window to both sides, and segments. Except
    in the second form, rows of padding are not compared. Synchronizes with the device.

    Args:
        mask: (B or 1, 1, Tq, Tk): True or 0.0 where visible, else False or the minimum.
        window: declared by a causal layer; None: taken from the mask.
        real: (B, Tq) bool, True for tokens; None: rows with any visible key.
        causal: the model's request; False: the queries may not be the keys' tokens.
    Raises ValueError: the mask is not of these forms; names the entry."""
    seen = _entries(mask)  # (B, Tq, Tk)
    why = "not causal, and not a window to both sides or one run of keys in each row"
    if causal:
        try:
            return _causal(seen, window, seen.any(-1) if real is None else real)
        except ValueError as e:
            why = str(e)
    proof = _same_keys(seen) or _two_sided(seen, real)
    if proof is None or (causal and proof.right == 0):
        raise ValueError(why)
    return proof


def _same_keys(seen: Tensor) -> Proof | None:
    """The proof of a mask in which all queries of a row see the same run of keys."""
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


def _two_sided(seen: Tensor, real: Tensor | None) -> Proof | None:
    """The proof of a window to both sides, and segments, of as many queries as keys."""
    T, Tk = seen.shape[1:]
    if Tk != T:
        return None
    real = seen.any(-1) if real is None else real
    i = torch.arange(T, device=seen.device)
    first, last = (x.to(torch.uint8).argmax(-1) for x in (seen, seen.flip(-1)))
    rows = real & seen.any(-1)
    left = int(torch.where(rows, i - first, 0).amax().clamp(min=0))
    right = int(torch.where(rows, T - 1 - last - i, 0).amax().clamp(min=0))
    joined = seen.diagonal(-1, 1, 2) | seen.diagonal(1, 1, 2) | ~real[:, 1:]
    joined = joined & (real[:, 1:] == real[:, :-1])  # neither token to padding nor to other texts
    ids = (1 + F.pad(~joined, (1, 0)).cumsum(1)).int()
    texts = torch.where(real, ids, 0)
    for segments in (None, ids):
        proof = Proof(T, T, left + 1, segments, texts, right)
        if not bool(_differs(proof, seen, real).any()):
            return proof
    return None


def _differs(proof: Proof, seen: Tensor, real: Tensor) -> Tensor:
    """Bool (B, Tq, end), True where a row of `real` tokens has another entry than the proof."""
    sizes, on = (proof.queries, proof.end, proof.window), seen.device
    again = rebuilt(*sizes, proof.segments, on, right=proof.right)
    return (again[:, 0] != seen) & real[:, :, None]


def _causal(seen: Tensor, window: int | None, real: Tensor) -> Proof:
    """The proof of a causal mask, perhaps with a window and segments."""
    Tq, Tk = seen.shape[1:]
    # Query i is at the position of key i + offset: the last key that it sees.
    last = Tk - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    ahead = torch.where(real & seen.any(-1), last, -1) - torch.arange(Tq, device=seen.device)
    offset = max(0, int(ahead.amax()))
    end = offset + Tq
    if end > Tk:
        i = int(ahead.amax(0).argmax())
        raise ValueError(f"not causal: query {i} of {Tq} sees key {i + offset} of {Tk}")

    seen = seen[:, :, :end]
    beside = seen.diagonal(offset - 1, 1, 2)  # the key before its own is visible
    beside = F.pad(beside, (Tq - beside.shape[1], 0))  # position 0 has no key before it
    # True where a text begins, or the padding behind one.
    begins = torch.where(real, ~beside, F.pad(real[:, :-1], (1, 0)))
    ids = torch.where(real.cumsum(1) > 0, 1 + begins.cumsum(1), 0)
    earlier = torch.where(seen[:, 0, :offset], ids[:, :1], 0)  # keys before the first query
    texts = torch.cat([earlier, torch.where(real, ids, 0)], dim=1).int()
    ids = torch.cat([earlier, ids], dim=1).int()  # (B, end)

    windows: list[int | None] = [window]
    if window is None:  # the most keys that a token sees: a window, or a segment's length
        windows.append(max(1, int((seen & real[:, :, None]).sum(-1).amax())))
    for proof in (Proof(Tq, end, w, ids_, texts) for w in windows for ids_ in (None, ids)):
        differs = _differs(proof, seen, real)
        if not bool(differs.any()):
            broken = (earlier[:, :-1] != 0) & (earlier[:, 1:] == 0)  # padding follows a token
            if proof.segments is not None and bool(broken.any()):
                raise ValueError("padding between tokens: a segment must be one run")
            return proof
    b, i, j = differs.nonzero()[0].tolist()
    sees, known = "sees" if seen[b, i, j] else "misses", f"window {window}" if window else "causal"
    raise ValueError(f"not just {known} and segments: query {i} of row {b} {sees} key {j}")


def _entries(mask: Tensor) -> Tensor:
    """Return a mask (B, 1, Tq, Tk) as bool (B, Tq, Tk)."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"shape {tuple(mask.shape)}, expected (batch, 1, queries, keys)")
    if mask.dtype == torch.bool:
        return mask[:, 0]
    if not mask.is_floating_point():
        raise ValueError(f"dtype {mask.dtype}, expected bool or floating point")
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise ValueError("entries other than 0 and the minimum: a bias, not a mask")
    return seen[:, 0]
