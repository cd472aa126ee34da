"""The trace of attention/tiled.py on the model's own q, k and v; bytes are of all heads.

T tokens, H query heads, s bytes per element, G = H / Hkv.

    manual  writes and reads S = Q K^T and P = softmax(S), H T^2 elements each.
    tiled   reads Q once, and K and V once per block of queries, without skipped tiles.

A tile of B_r queries and B_c keys needs on chip, for Q_i, K_j, V_j and O_i, S_ij, m_i, l_i,

    M = s (G B_r D + 2 B_c D) + 4 G (B_r D + B_r B_c + 2 B_r)

bytes. Traffic is O(T^2 D^2 / M) (Dao et al. 2022, arXiv 2205.14135, Theorem 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention import Spec, tiled
from attention.tiled import blocks
from viewer.document import ManualStep, Tiles, TileStep, TracedHead, pack
from viewer.maps import Call, compared

MOST_TILES = 1024  # of one head


def tiles(call: Call, B_r: int, B_c: int, layer: int) -> Tiles:
    """The trace of all heads of one layer. Raises ValueError for more than MOST_TILES tiles."""
    (T, H), spec = call.q.shape[1:3], call.spec
    n_rows, n_cols = len(blocks(T, B_r)), len(blocks(T, B_c))
    if n_rows * n_cols > MOST_TILES:
        raise ValueError(
            f"{n_rows * n_cols} tiles of {B_r} x {B_c} for {T} tokens, at most {MOST_TILES} can be "
            "shown: increase --block_m or --block_n"
        )
    trace, out = trace_of(call.q, call.k, call.v, spec, call.segments, B_r=B_r, B_c=B_c)
    scores = padded([t.S[0] for t in trace], B_r, B_c)  # (V, H, B_r, B_c)
    m, l, rescale = (padded([x[0] for x in xs], B_r)
                     for xs in zip(*((t.m, t.l, t.rescale) for t in trace)))  # fmt: skip
    m = m.masked_fill(m == torch.finfo(m.dtype).min, -torch.inf)
    heads: list[TracedHead] = [
        {
            **compared(call, out, layer, h),
            "scores": pack(scores[:, h]),
            "m": pack(m[:, h]),
            "l": pack(l[:, h]),
            "rescale": pack(rescale[:, h]),
        }
        for h in range(H)
    ]
    return {
        "block_m": B_r,
        "block_n": B_c,
        "n_rows": n_rows,
        "n_cols": n_cols,
        "size": size_of(spec),
        "fast_memory": fast_memory(spec, B_r, B_c),
        "steps": steps(trace, spec, T, T, B_r, B_c),
        "manual": manual_steps(spec, T),
        "heads": heads,
    }


class Tile(NamedTuple):
    """The state of tiled after a visited tile."""

    i: int  # block of queries
    j: int  # block of keys
    S: Tensor  # (B, H, B_r, B_c) scores, -inf where masked
    rescale: Tensor  # (B, H, B_r) factor of the old l and O
    m: Tensor  # (B, H, B_r) running maximum; the least finite number: no key yet
    l: Tensor  # (B, H, B_r) running sum of exp(s - m)
    O: Tensor  # (B, H, B_r, D) output, not normalized


def trace_of(q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: Tensor | None = None, *,
             B_r: int, B_c: int) -> tuple[list[Tile], Tensor]:  # fmt: skip
    """The visited tiles in order, and the output (B, Tq, H, D)."""
    trace: list[Tile] = []

    def on_tile(i: int, j: int, *tensors: Tensor) -> None:
        S, rescale, m, l, O = (t.flatten(1, 2) for t in tensors)  # (B, H, B_r, ...)
        trace.append(Tile(i, j, S, rescale[..., 0], m[..., 0], l[..., 0], O))

    with torch.autocast(q.device.type, enabled=False):
        out, _ = tiled.forward_tiles(
            q, k, v, spec, segments=segments, B_r=B_r, B_c=B_c, on_tile=on_tile
        )
    return trace, out.to(q.dtype)


def steps(trace: list[Tile], spec: Spec, Tq: int, Tk: int, B_r: int, B_c: int) -> list[TileStep]:
    """All tiles, with the bytes that a fused kernel moves at each, without segment ids."""
    D, H, Hkv, s = spec.head_dim, spec.n_head, spec.n_kv_head, size_of(spec)
    place = {(t.i, t.j): n for n, t in enumerate(trace)}
    cols = blocks(Tk, B_c)
    found: list[TileStep] = []
    reads = writes = 0
    for i, I in enumerate(blocks(Tq, B_r)):
        visited, queries = [j for j in range(len(cols)) if (i, j) in place], H * (I.stop - I.start)
        ends = visited[-1] if visited else len(cols) - 1  # O_i is written after it
        for j, J in enumerate(cols):
            read = 2 * s * D * Hkv * (J.stop - J.start) if (i, j) in place else 0
            read += s * D * queries if j in visited[:1] else 0
            written = (s * D + size_inside(spec)) * queries if j == ends else 0
            reads, writes = reads + read, writes + written
            found.append({
                "i": i, "j": j, "rows": [I.start, I.stop], "cols": [J.start, J.stop],
                "skipped": (i, j) not in place, "at": place.get((i, j)),
                "first": j in visited[:1], "last": j in visited[-1:],
                "read": read, "written": written, "read_so_far": reads, "written_so_far": writes,
            })  # fmt: skip
    return found


def size_of(spec: Spec) -> int:
    """Bytes per element of q, k, v and out."""
    return getattr(torch, spec.dtype).itemsize


def size_inside(spec: Spec) -> int:
    """Bytes per element of O_i, S_ij, m, l and L."""
    return max(4, size_of(spec))


def fast_memory(spec: Spec, B_r: int, B_c: int) -> int:
    """Bytes on chip for a tile of B_r queries and B_c keys: M above."""
    s, acc, D, G = size_of(spec), size_inside(spec), spec.head_dim, spec.n_head // spec.n_kv_head
    return s * (G * B_r * D + 2 * B_c * D) + acc * G * (B_r * D + B_r * B_c + 2 * B_r)


def manual_steps(spec: Spec, T: int) -> list[ManualStep]:
    """The three passes of the standard algorithm (Dao et al. 2022, Algorithm 0)."""
    s, D, H, Hkv = size_of(spec), spec.head_dim, spec.n_head, spec.n_kv_head
    q, kv, square = s * H * T * D, s * Hkv * T * D, s * H * T * T
    steps: list[ManualStep] = []
    reads = writes = 0
    for name, read, written in (
        ("S = Q K^T", q + kv, square),
        ("P = softmax(S)", square, square),
        ("O = P V", square + kv, q),
    ):
        reads, writes = reads + read, writes + written
        steps.append({"name": name, "read": read, "written": written, "read_so_far": reads,
                      "written_so_far": writes})  # fmt: skip
    return steps


def padded(parts: list[Tensor], *shape: int) -> Tensor:
    """Stack tensors (H, n, ...) into (V, H, *shape), padded with NaN."""
    whole = parts[0].new_full((len(parts), parts[0].shape[0], *shape), torch.nan)
    for where, part in zip(whole, parts, strict=True):
        where[tuple(map(slice, part.shape))] = part
    return whole
