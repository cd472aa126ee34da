"""hf_mask: what a mask of `transformers` is in this project's terms, proved entry by entry.

transformers hands each layer a mask (B, 1, Tq, Tk); the contract knows causal, a window and
segments. Whatever of a mask these three do not say would be lost, and nobody would see it. So the
mask is taken apart into them, :func:`visible <attention.spec.visible>` rebuilds it, and every entry
is compared. A mask that is anything else is refused.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import BackendUnavailable
from .views import mask as rebuilt


@dataclass(frozen=True)
class Proof:
    """What a mask was proved to be: for that many queries causal and bottom-right over the first
    `end` keys, and this.

    No query sees a key from `end` on: those are places of a static cache that are yet to be filled.
    """

    queries: int
    end: int
    window: int | None = None
    segments: Tensor | None = None  # (B, end) int32; 0 is padding

    def effective(self, window: int | None) -> int | None:
        """A window that hides nothing is no request."""
        return window if window is not None and window < self.end else None


class Mask(Tensor):
    """A proved mask: it has the shape of one, (B, 1, Tq, Tk), and a Proof in place of entries.

    A model that computes with it gets an error: it does not hand its attention over.
    """

    proof: Proof
    asked_by = "nanoattn"  # the attn_implementation

    @staticmethod
    def of(proof: Proof, asked_by: str, shape: tuple[int, ...]) -> Mask:
        made = torch.zeros((), dtype=torch.bool).expand(shape).as_subclass(Mask)
        made.proof, made.asked_by = proof, asked_by
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        called, others = getattr(func, "__name__", ""), (*args, *(kwargs or {}).values())
        # fill_, __setitem__, __ior__: what is written would not be in the proof. Not __invert__.
        writes = (called == "__setitem__" or (called.startswith("__i") and len(others) > 1)
                  or (called.endswith("_") and not called.endswith("__")))  # fmt: skip
        if writes or any(isinstance(x, Tensor) and not isinstance(x, Mask) for x in others):
            name = next(x.asked_by for x in others if isinstance(x, Mask))
            raise BackendUnavailable(
                f"this model does not hand its attention to {name!r}: it computes with the mask "
                f"itself ({called or func})"
            )
        out = super().__torch_function__(func, types, args, kwargs)
        # Copied or moved, as generate() and hooks do, it stays proved; after all else it is not.
        if isinstance(out, Mask) and called in ("to", "detach", "contiguous", "clone"):
            seg = args[0].proof.segments
            out.asked_by = args[0].asked_by
            out.proof = replace(args[0].proof, segments=None if seg is None else seg.to(out.device))
        return out


def prove(mask: Tensor, window: int | None = None, real: Tensor | None = None) -> Proof:
    """A mask as causal, window and segments, if it is exactly that.

    Each row of a token is compared entry by entry; nobody reads the outputs of padding, and
    transformers lets it see anything. Takes a few passes over the mask, and waits for the device.

    Args:
        mask: (B or 1, 1, Tq, Tk), True or 0.0 where a query sees a key, False or the least number
            of the dtype where it does not.
        window: that the layer says it has; None: found from the mask, if it has one.
        real: (B, Tq) bool, the queries that are tokens; None: those that see anything.

    Raises:
        ValueError: it is something else; says where.
    """
    seen = _entries(mask)  # (B, Tq, Tk)
    Tq, Tk = seen.shape[1:]
    real = seen.any(-1) if real is None else real
    # The last key that each token sees tells where the queries stand: query i is key i + offset.
    last = Tk - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    ahead = torch.where(real & seen.any(-1), last, -1) - torch.arange(Tq, device=seen.device)
    offset = max(0, int(ahead.amax()))
    end = offset + Tq
    if end > Tk:
        i = int(ahead.amax(0).argmax())
        raise ValueError(f"it is not causal: query {i} of {Tq} sees key {i + offset} of {Tk}")

    seen = seen[:, :, :end]
    beside = seen.diagonal(offset - 1, 1, 2)  # does a query see the key before its own?
    beside = F.pad(beside, (Tq - beside.shape[1], 0))  # the very first key has none before it
    ids = torch.where(real, 1 + (~beside).cumsum(1), 0)
    earlier = torch.where(seen[:, 0, :offset], ids[:, :1], 0)  # keys before the first query
    ids = torch.cat([earlier, ids], dim=1).int()  # (B, end)

    windows: list[int | None] = [window]
    if window is None:  # else the most keys that a token sees, unless that is a segment's length
        windows.append(max(1, int((seen & real[:, :, None]).sum(-1).amax())))
    for w in windows:
        for segments in (None, ids):
            differs = (rebuilt(Tq, end, w, segments, seen.device)[:, 0] != seen) & real[:, :, None]
            if not bool(differs.any()):
                broken = (earlier[:, :-1] != 0) & (earlier[:, 1:] == 0)  # padding follows a token
                if segments is not None and bool(broken.any()):
                    raise ValueError("padding lies between tokens: a segment must be one run")
                return Proof(Tq, end, w, segments)
    b, i, j = differs.nonzero()[0].tolist()
    sees, known = "sees" if seen[b, i, j] else "misses", f"window {window}" if window else "causal"
    raise ValueError(f"it is more than {known} and segments: query {i} of row {b} {sees} key {j}")


def _entries(mask: Tensor) -> Tensor:
    """A mask (B, 1, Tq, Tk) as bool (B, Tq, Tk)."""
    if mask.dim() != 4 or mask.shape[1] != 1:
        raise ValueError(f"it has shape {tuple(mask.shape)}, not (batch, 1, queries, keys)")
    if mask.dtype == torch.bool:
        return mask[:, 0]
    if not mask.is_floating_point():
        raise ValueError(f"it holds {mask.dtype}, neither bool nor floating point")
    seen = mask == 0
    if not bool((seen | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
        raise ValueError("it has entries between 0 and the least number: a bias, not a mask")
    return seen[:, 0]
