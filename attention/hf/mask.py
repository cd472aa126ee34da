"""Convert a mask of `transformers` to a window, `right` and segments.

transformers passes a mask (B, 1, Tq, Tk). It is decomposed, rebuilt by
:func:`visible <attention.spec.visible>`, and compared in every entry. Any other mask is refused.
"""

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
    """A mask as window, `right` (bottom-right, over the first `end` keys) and segments.

    Keys from `end` on, the free places of a static cache, are visible to no query.
    """

    queries: int
    end: int
    window: int | None = None
    # (B, end) int32; padding has an id of its own; None: the sides are enough
    segments: Tensor | None = None
    texts: Tensor | None = None  # (B, end) int32, 0 for padding; None: all keys are one text
    right: int | None = 0
    # Rows of the batch, and the keys that all their queries see; empty: all see the same.
    runs: tuple[tuple[list[int], slice], ...] = ()

    def effective(self, window: int | None) -> int | None:
        """Return the window, or None if it masks nothing."""
        return window if window is not None and window < self.end else None


class Mask(Tensor):
    """A proved mask: shape (B, 1, Tq, Tk), with a Proof in place of entries.

    Computing with it raises: such a model does not call its attention implementation.
    """

    proof: Proof
    asked_by = "nanoattn"  # attn_implementation
    checked: Tensor | None = None  # position_ids that fit it

    @staticmethod
    def of(proof: Proof, asked_by: str, shape: tuple[int, ...]) -> Mask:
        made = torch.zeros((), dtype=torch.bool).expand(shape).as_subclass(Mask)
        made.proof, made.asked_by = proof, asked_by
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., object], types: object, args: Sequence[Any] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        called, others = getattr(func, "__name__", ""), (*args, *(kwargs or {}).values())
        # Writes (fill_, __setitem__, __ior__, but not __invert__) would not be in the proof.
        in_place = called.startswith("__i") and len(others) > 1
        in_place |= called.endswith("_") and not called.endswith("__")
        writes = in_place or called == "__setitem__"
        if writes or any(isinstance(x, Tensor) and not isinstance(x, Mask) for x in others):
            name = next(x.asked_by for x in others if isinstance(x, Mask))
            raise BackendUnavailable(
                f"this model does not call {name!r}: it computes with the mask itself "
                f"({called or func})"
            )
        out = super().__torch_function__(func, types, args, kwargs)
        # Copies, as generate() and hooks make, keep their proof; other results have none.
        if isinstance(out, Mask) and called in ("to", "detach", "contiguous", "clone"):
            seg = args[0].proof.segments
            out.asked_by = args[0].asked_by
            out.proof = replace(args[0].proof, segments=None if seg is None else seg.to(out.device))
        return out


def prove(
    mask: Tensor, window: int | None = None, real: Tensor | None = None, causal: bool = True
) -> Proof:
    """Decompose a mask: causal with a window and segments; or each query of a row sees the same run
    of keys, as in cross-attention to padded texts; or a window to both sides, and segments.

    Except in the second form, rows of padding are not compared: nobody reads their outputs.
    Synchronizes with the device.

    Args:
        mask: (B or 1, 1, Tq, Tk): True or 0.0 where visible, else False or the minimum.
        window: declared by a causal layer; None: taken from the mask.
        real: (B, Tq) bool, True for tokens; None: rows with any visible key.
        causal: the model's request; False: the queries may not be the keys' tokens.

    Raises:
        ValueError: the mask is not of these forms; names the entry.
    """
    seen = _entries(mask)  # (B, Tq, Tk)
    if causal:
        try:
            return _causal(seen, window, seen.any(-1) if real is None else real)
        except ValueError as e:
            found = _same_keys(seen) or _two_sided(seen, real)
            if found is None or found.right == 0:
                raise e
            return found
    if found := _same_keys(seen) or _two_sided(seen, real):
        return found
    raise ValueError("not causal, and not a window to both sides or one run of keys in each row")


def _same_keys(seen: Tensor) -> Proof | None:
    """The proof of a mask in which all queries of a row see the same run of keys."""
    Tq, Tk = seen.shape[1:]
    keys, first = seen[:, 0], seen[:, 0].to(torch.uint8).argmax(-1)
    stop = first + keys.sum(-1)
    j = torch.arange(Tk, device=seen.device)
    run = (j >= first[:, None]) & (j < stop[:, None])
    if not bool((seen == run[:, None]).all()):
        return None
    found: dict[tuple[int, int], list[int]] = {}
    for b, ends in enumerate(zip(first.tolist(), stop.tolist(), strict=True)):
        found.setdefault(ends, []).append(b)
    runs = tuple((rows, slice(*ends)) for ends, rows in found.items())
    everywhere = [J for _, J in runs] == [slice(0, Tk)]
    return Proof(Tq, Tk, right=None, runs=() if everywhere else runs)


def _two_sided(seen: Tensor, real: Tensor | None) -> Proof | None:
    """The proof of a window to both sides, and segments, of as many queries as keys."""
    T, Tk = seen.shape[1:]
    if Tk != T:
        return None
    real = seen.any(-1) if real is None else real
    i = torch.arange(T, device=seen.device)
    first, last = (x.to(torch.uint8).argmax(-1) for x in (seen, seen.flip(-1)))
    rows = real & seen.any(-1)
    left, right = (
        int(torch.where(rows, n, 0).amax().clamp(min=0)) for n in (i - first, Tk - 1 - last - i)
    )
    joined = seen.diagonal(-1, 1, 2) | seen.diagonal(1, 1, 2) | ~real[:, 1:]
    joined = joined & (real[:, 1:] == real[:, :-1])  # neither token to padding nor to other texts
    ids = (1 + F.pad(~joined, (1, 0)).cumsum(1)).int()
    for segments in (None, ids):
        want = rebuilt(T, T, left + 1, segments, seen.device, None, right)[:, 0]
        if not bool(((want != seen) & real[:, :, None]).any()):
            return Proof(T, T, left + 1, segments, torch.where(real, ids, 0), right)
    return None


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
    for w in windows:
        for segments in (None, ids):
            differs = (rebuilt(Tq, end, w, segments, seen.device)[:, 0] != seen) & real[:, :, None]
            if not bool(differs.any()):
                broken = (earlier[:, :-1] != 0) & (earlier[:, 1:] == 0)  # padding follows a token
                if segments is not None and bool(broken.any()):
                    raise ValueError("padding between tokens: a segment must be one run")
                return Proof(Tq, end, w, segments, texts)
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
