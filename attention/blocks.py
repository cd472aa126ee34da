"""Blocks of queries, each with a mask for PyTorch's SDPA over the keys that any of them sees:

             k0  k1  k2  k3  k4  k5  k6  k7
        q2   x   x   x   .   .   .   .   .      window=3, blocks of 2 queries: each needs
        q3   .   x   x   x   .   .   .   .      4 keys, in a sequence of any length
        q4   .   .   x   x   x   .   .   .
        q5   .   .   .   x   x   x   .   .

A block ends where a long segment ends; a whole segment needs no mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .masks import Pair, alibi, borders, mask, maskless, symbolic
from .spec import Numbers, Spec

BLOCK = 256  # queries
CUDA_BLOCK = 1024  # each block is a kernel launch


def sdpa_mask(q: Tensor, k: Tensor, spec: Spec, offset: int, segments: Pair = None,
              alibi_slopes: Tensor | None = None) -> tuple[Tensor | None, bool]:
    """Return SDPA's attn_mask, None, bool (1 or B, 1, Tq, Tk) or biases, and is_causal."""
    Tq, Tk = q.shape[1], k.shape[1]
    if segments is alibi_slopes is None and (
            kind := maskless(Tq, Tk, spec.window, offset, spec.right)):
        return None, kind == "causal"
    seen = mask(Tq, Tk, spec.window, segments, q.device, offset, spec.right)
    return seen if alibi_slopes is None else biased(seen, q, alibi_slopes, offset), False


def biased(seen: Tensor, q: Tensor, alibi_slopes: Tensor, offset: Numbers) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32) if q.is_cpu else q.dtype
    bias = alibi(alibi_slopes, seen.shape[-2], seen.shape[-1], offset, dtype)
    return bias.masked_fill(~seen, -torch.inf)


class Block(NamedTuple):
    b: slice  # rows of the batch
    queries: slice
    keys: slice
    several: bool = False  # segments


def block_size(q: Tensor) -> int:
    return CUDA_BLOCK if q.is_cuda else BLOCK


def blocks(queries: slice, keys: slice, spec: Spec, size: int,
           masked: bool) -> list[tuple[slice, slice]]:
    """Blocks of `size` queries with the keys that any of them sees; one block if nothing masks."""
    n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
    offset = queries.start - keys.start
    if not masked and maskless(n_queries, n_keys, spec.window, offset, spec.right):
        return [(queries, keys)]
    found = []
    for start in range(queries.start, queries.stop, size):
        stop = min(start + size, queries.stop)
        first = keys.start if spec.window is None else max(keys.start, start - spec.window + 1)
        last = keys.stop if spec.right is None else min(keys.stop, stop + spec.right)
        if first < last:
            found.append((slice(start, stop), slice(first, last)))
    return found


def blocks_of_segments(segments: Tensor, offset: int, spec: Spec, size: int) -> list[Block]:
    starts, found = borders(segments), []
    alike = all(row == starts[0] for row in starts)
    for b, row in enumerate(starts[:1] if alike else starts):
        rows = slice(None) if alike else slice(b, b + 1)
        groups: list[tuple[int, int, bool]] = []  # begin, end, several segments
        for begin, end in zip(row, [*row[1:], segments.shape[1]]):
            if groups and end - max(groups[-1][0], offset) <= size:
                groups[-1] = groups[-1][0], end, True
            elif end > offset:  # it has queries
                groups.append((begin, end, False))
        for begin, end, several in groups:
            queries, keys = slice(max(begin, offset), end), slice(begin, end)
            parts = blocks(queries, keys, spec, size, spec.alibi)
            found += [Block(rows, *part, several) for part in parts]
    return found


def in_blocks(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
              segments: Tensor | None = None, alibi_slopes: Tensor | None = None,
              **options: Any) -> Tensor:
    """Call attend(q, k, v, spec, offset=) on blocks; one block, or a trace, masks segments too."""
    size = block_size(q)
    (Tq, Tk), offset = (q.shape[1], k.shape[1]), k.shape[1] - q.shape[1]
    if segments is None or Tq <= size or symbolic(segments):
        masked = spec.alibi or segments is not None
        parts = blocks(slice(offset, Tk), slice(0, Tk), spec, size, masked)
        found = [Block(slice(None), *part, segments is not None) for part in parts]
    else:
        found = blocks_of_segments(segments, offset, spec, size)
    qs = slices(q, [(b, slice(Q.start - offset, Q.stop - offset)) for b, Q, _, _ in found])
    ks, vs = (slices(t, [(b, K) for b, _, K, _ in found]) for t in (k, v))
    outs = []
    for (b, Q, K, several), *qkv in zip(found, qs, ks, vs):
        if segments is not None:
            options["segments"] = (segments[b, Q], segments[b, K]) if several else None
        if alibi_slopes is not None:
            options["alibi_slopes"] = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
        outs.append(attend(*qkv, spec, offset=Q.start - K.start, **options))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1).view(q.shape)


def slices(t: Tensor, at: list[tuple[slice, slice]]) -> tuple[Tensor, ...]:
    """Take t[b, J] for each (b, J). Indexing would make a gradient of t's size for each."""
    if len(at) > 1 and t.requires_grad and not torch.compiler.is_compiling():
        return Slices.apply(t, at)
    return tuple(t if (b, J) == (slice(None), slice(0, t.shape[1])) else t[b, J] for b, J in at)


class Slices(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor, at: list[tuple[slice, slice]]) -> tuple[Tensor, ...]:
        return tuple(t[b, J] for b, J in at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.shape, ctx.at = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for (b, J), grad in zip(ctx.at, grads):
            total[b, J] += grad
        return total, None
