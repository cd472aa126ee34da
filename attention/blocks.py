"""Windows and segments at their true cost, for kernels that mask: the queries in blocks.

A block of queries attends to the keys from the first to the last one that any of them sees. This is
a smaller attention problem, with an offset of its own:

             k0  k1  k2  k3  k4  k5  k6  k7
        q2   x   x   x   .   .   .   .   .      window=3, blocks of 2 queries: each block needs
        q3   .   x   x   x   .   .   .   .      4 keys, however long the sequence is
        q4   .   .   x   x   x   .   .   .
        q5   .   .   .   x   x   x   .   .

A window W costs time in T * (W + right + BLOCK) and memory in T; segments cost the sum of their
squares, since a block ends where a long segment ends, and a whole segment needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .spec import Spec
from .views import StaticView, kept, sees_all, unreadable

BLOCK = 256  # queries; 128 is a little faster on a CPU, with twice the calls (docs/LOG.md)
CUDA_BLOCK = 1024  # each block is a kernel launch; not measured


@dataclass(frozen=True)
class Piece:
    """Queries that are computed together, and the keys that they see."""

    I: slice  # queries
    J: slice  # keys
    segments: bool  # several segments: they mask


def ranges(
    Tq: int, Tk: int, window: int | None, block: int, offset: int, segments: bool = False,
    right: int | None = 0,
) -> Iterator[Piece]:
    """Blocks of queries with the keys that any of them sees, offset as in visible(). A block that
    sees no key is left out."""
    for a in range(0, Tq, block):
        b = min(a + block, Tq)
        first = 0 if window is None else max(0, a + offset - window + 1)
        stop = Tk if right is None else min(Tk, b + offset + right)
        if first < stop:
            yield Piece(slice(a, b), slice(first, stop), segments)


def pieces(
    Tq: int, Tk: int, window: int | None, borders: tuple[int, ...], block: int, right: int | None
) -> list[Piece]:
    """Cut the last Tq of Tk positions, one row whose segments begin at `borders`.

    Short neighbors share a block; a segment that needs no mask is one piece.
    """
    found: list[Piece] = []
    offset = Tk - Tq
    for s, e in zip(borders, (*borders[1:], Tk), strict=True):
        if e <= offset:
            continue
        n = min(e - offset, e - s)  # queries of this segment, its last positions
        size = n if maskless(n, e - s, window, e - s - n, right) else block
        for piece in ranges(n, e - s, window, size, e - s - n, right=right):
            at = e - n - offset  # of the segment's first query
            I = slice(piece.I.start + at, piece.I.stop + at)
            J = slice(piece.J.start + s, piece.J.stop + s)
            if found and I.stop - found[-1].I.start <= block:
                last = found.pop()  # of an earlier segment
                I, J = slice(last.I.start, I.stop), slice(last.J.start, J.stop)
                found.append(Piece(I, J, True))
            else:
                found.append(Piece(I, J, False))
    return found


def maskless(Tq: int, Tk: int, window: int | None, offset: int, right: int | None) -> str:
    """ "causal" for as many queries as keys, each seeing those up to its own, "full" if every query
    sees every key: kernels compute both without a mask. "" needs a mask."""
    if sees_all(Tq, Tk, window, offset, right):
        return "full"
    square = Tq == Tk and offset == 0 and right == 0
    return "causal" if square and (window is None or window >= Tk) else ""


def begins(segments: Tensor) -> Tensor:
    """True (B, T) where a segment begins."""
    first = torch.ones_like(segments, dtype=torch.bool)
    first[:, 1:] = segments[:, 1:] != segments[:, :-1]
    return first


@kept
def borders(segments: Tensor) -> list[tuple[int, ...]]:
    """Where the segments of each row of (B, T) begin. The host waits for the device, once per
    tensor."""
    found: list[list[int]] = [[] for _ in segments]
    for row, j in begins(segments).nonzero().tolist():
        found[row].append(j)
    return [tuple(row) for row in found]


def in_blocks(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
              segments: Tensor | None, cache: StaticView | None = None,
              **options: object) -> Tensor:
    """Call attend(q, k, v, spec, offset=, segments=), which masks, for blocks of queries and the
    keys that they see. Segments are only masked in a call of one block and under torch.compile."""
    block = CUDA_BLOCK if q.is_cuda else BLOCK
    if cache is not None:  # where a row's queries are is on the device: the mask is in blocks
        if q.shape[1] <= block:
            return attend(q, k, v, spec, cache=cache, **options)
        outs = []
        for n, part in enumerate(q.split(block, dim=1)):
            rest = replace(cache, start=cache.start + n * block, count=cache.count - n * block)
            outs.append(attend(part, k, v, spec, cache=rest, **options))
        return torch.cat(outs, dim=1)
    offset = k.shape[1] - q.shape[1]
    groups = list(cut(q, k, spec.window, segments, block, spec.right, offset))
    if len(groups) == 1:
        return _in_pieces(attend, q, k, v, spec, segments, groups[0][1], options)
    assert segments is not None
    return torch.cat([
        _in_pieces(attend, q[rows], k[rows], v[rows], spec, segments[rows], found, options)
        for rows, found in groups
    ])


def cut(q: Tensor, k: Tensor, window: int | None, segments: Tensor | None, block: int,
        right: int | None, offset: int) -> Iterator[tuple[slice, list[Piece]]]:
    """Rows (B) with the same segments, and the pieces of each. Only if the queries are the last
    positions do the segments of the keys tell what to skip."""
    (B, Tq), Tk = q.shape[:2], k.shape[1]
    last = offset == Tk - Tq >= 0
    if segments is None or Tq <= block or not last or unreadable(segments):
        kind = maskless(Tq, Tk, window, offset, right) if segments is None else ""
        size, several = Tq if kind else block, segments is not None
        yield slice(0, B), list(ranges(Tq, Tk, window, size, offset, several, right))
        return
    rows, b = borders(segments), 0
    while b < B:
        n = next((i for i in range(b, B) if rows[i] != rows[b]), B)
        yield slice(b, n), pieces(Tq, Tk, window, rows[b], block, right)
        b = n


def _in_pieces(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
               segments: Tensor | None, found: list[Piece], options: dict[str, object]) -> Tensor:
    # Not split into one: its gradient would be a copy.
    sizes = [piece.I.stop - piece.I.start for piece in found]
    qs = q.split(sizes, dim=1) if len(found) > 1 else (q,)
    ks, vs = (slices(t, [piece.J for piece in found]) for t in (k, v))
    outs = []
    shift = k.shape[1] - q.shape[1]
    for piece, *qkv in zip(found, qs, ks, vs, strict=True):
        I, J = piece.I, piece.J
        own = None
        if segments is not None and piece.segments:
            own = segments[:, I.start + shift : I.stop + shift], segments[:, J]
        outs.append(attend(*qkv, spec, offset=I.start + shift - J.start, segments=own, **options))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)


def slices(t: Tensor, at: list[slice]) -> tuple[Tensor, ...]:
    """t[:, J] for each J. Autograd of plain slices would make a gradient of t's size for each."""
    if len(at) > 1 and t.requires_grad and not torch.compiler.is_compiling():
        return Slices.apply(t, at)
    whole = slice(0, t.shape[1])
    return tuple(t if whole == J else t.narrow(1, J.start, J.stop - J.start) for J in at)


class Slices(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(t: Tensor, at: list[slice]) -> tuple[Tensor, ...]:
        return tuple(t[:, J] for J in at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, list[slice]], output: object) -> None:
        ctx.shape, ctx.at = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for J, grad in zip(ctx.at, grads, strict=True):
            total[:, J] += grad
        return total, None


# --- for varlen functions, which take each segment as a sequence ---


@dataclass(frozen=True)
class Runs:
    """The segments that hold queries, as the varlen functions take them."""

    cu_q: Tensor  # (runs + 1,) int32: where the queries of each begin, and the end of the last
    cu_k: Tensor  # (runs + 1,) int32: the same for its keys
    max_q: int  # the most queries in one
    max_k: int  # the most keys in one
    keys: Tensor | None  # indices of their keys among the B * Tk; None: all


@kept
def runs(segments: Tensor, Tq: int) -> Runs:
    """The runs of `segments` (B, Tk) that hold the last Tq positions."""
    B, Tk = segments.shape
    cu_k = F.pad(begins(segments).flatten().nonzero().flatten(), (0, 1), value=B * Tk)
    row, j = cu_k // Tk, cu_k % Tk
    cu_q = row * Tq + (j - (Tk - Tq)).clamp(min=0)
    keys = None
    if Tq < Tk:
        # Drop runs without queries: flash-attn 2 has a path for one query a sequence that mistakes
        # the batch size for the number of queries (csrc/flash_attn/flash_api.cpp of 2.8.3).
        asked = cu_q.diff() > 0
        lengths = cu_k.diff()
        keys = asked.repeat_interleave(lengths).nonzero().flatten()
        cu_q = F.pad(cu_q.diff()[asked].cumsum(0), (1, 0))
        cu_k = F.pad(lengths[asked].cumsum(0), (1, 0))
    max_q, max_k = torch.stack((cu_q.diff().max(), cu_k.diff().max())).tolist()
    return Runs(cu_q.int(), cu_k.int(), max_q, max_k, keys)
