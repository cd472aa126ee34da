"""The trace of attention/tiled.py, prepared for playing tile by tile.

The trace is of the algorithm itself (forward_tiles), on the model's q, k and v: what is shown is
what was computed. Bytes are counted for all heads of a layer together, since heads
that share keys and values read them once; the rest is a head's own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention import Spec, tiled
from attention.tiled import blocks
from viewer.cost import fast_memory, manual_steps, size_inside, size_of
from viewer.document import Tiles, TileStep, TracedHead, pack
from viewer.maps import Call, beside

MOST_TILES = 1024  # of one head
BUDGET = 1_500_000  # elements in all, 6 MB


def tiles(calls: list[Call], B_r: int, B_c: int, layer: int, head: int) -> Tiles:
    """The trace of as many layers and heads as BUDGET allows, at least one."""
    T, H, D = calls[0].q.shape[1:]
    rows, cols = blocks(T, B_r), blocks(T, B_c)
    if len(rows) * len(cols) > MOST_TILES:
        raise ValueError(
            f"tiles of {B_r} x {B_c} are {len(rows) * len(cols)} for {T} tokens, at most "
            f"{MOST_TILES} can be shown; take larger ones (--block_m, --block_n)"
        )
    one = calls[layer].spec
    trace = trace_of(*calls[layer].given, B_r=B_r, B_c=B_c)[0]
    each = len(trace) * B_r * (B_c + 4) + 2 * T * D  # TracedHead's arrays
    layers, heads, notes = _chosen(len(calls), H, layer, head, each)
    if calls[layer].segments is not None:
        notes.append("The border of a document masks scores, and skips no tile.")
    played: list[TracedHead] = []
    for n in layers:
        told, out = trace_of(*calls[n].given, B_r=B_r, B_c=B_c)
        played += _heads(calls[n], n, heads, told, out, (B_r, B_c))
    return {
        "block_m": B_r,
        "block_n": B_c,
        "n_rows": len(rows),
        "n_cols": len(cols),
        "size": size_of(one),
        "fast_memory": fast_memory(one, B_r, B_c),
        "steps": steps(trace, one, T, T, B_r, B_c),
        "manual": manual_steps(one, T),
        "heads": played,
        "notes": notes,
    }


class Tile(NamedTuple):
    """What tiled did at one tile that it did not skip, for all sequences and heads together."""

    i: int  # block of queries
    j: int  # block of keys
    S: Tensor  # (B, H, B_r, B_c) the scores, -inf where masked
    rescale: Tensor  # (B, H, B_r) what the old l and O were multiplied by
    m: Tensor  # (B, H, B_r) running maximum after this tile; the least finite number: nothing seen
    l: Tensor  # (B, H, B_r) running sum of exp(s - m)
    O: Tensor  # (B, H, B_r, D) the output after this tile, not normalised yet


def trace_of(q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: Tensor | None = None, *,
             B_r: int, B_c: int) -> tuple[list[Tile], Tensor]:  # fmt: skip
    """The tiles that tiled computes, in its order, and its output (B, Tq, H, D)."""
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
    """The grid of tiles, the skipped ones too, with the bytes that a fused kernel moves at each.

    It reads Q_i with the first tile of row i that is not skipped, and K_j and V_j with each such
    tile, once for all query heads that share them; it writes O_i and L_i after the last (of a row
    that is skipped whole, the zeros). S and P stay on chip. Segment ids are not counted.
    """
    D, H, Hkv = spec.head_dim, spec.n_head, spec.n_kv_head
    s, acc = size_of(spec), size_inside(spec)
    place = {(t.i, t.j): n for n, t in enumerate(trace)}  # of the tiles that are not skipped
    cols = blocks(Tk, B_c)
    found: list[TileStep] = []
    read_so_far = written_so_far = 0
    for i, I in enumerate(blocks(Tq, B_r)):
        visited = [j for j in range(len(cols)) if (i, j) in place]
        ends = visited[-1] if visited else len(cols) - 1  # the column after which O_i is written
        for j, J in enumerate(cols):
            read = 2 * s * D * Hkv * (J.stop - J.start) if (i, j) in place else 0
            read += s * D * H * (I.stop - I.start) if j in visited[:1] else 0
            written = (s * D + acc) * H * (I.stop - I.start) if j == ends else 0
            read_so_far, written_so_far = read_so_far + read, written_so_far + written
            found.append({
                "i": i, "j": j, "rows": [I.start, I.stop], "cols": [J.start, J.stop],
                "skipped": (i, j) not in place, "at": place.get((i, j)),
                "first": j in visited[:1], "last": j in visited[-1:],
                "read": read, "written": written,
                "read_so_far": read_so_far, "written_so_far": written_so_far,
            })  # fmt: skip
    return found


def _chosen(
    L: int, H: int, layer: int, head: int, each: int
) -> tuple[list[int], list[int], list[str]]:
    """Which layers and heads are traced, the most that the budget allows; each: of one head."""
    heads = list(range(H))
    if L * H * each <= BUDGET:
        return list(range(L)), heads, []
    what = f"the heads of layer {layer} only"
    if H * each > BUDGET:
        heads, what = [head], f"head {head} of layer {layer} only"
    why = f"to keep the file below {BUDGET * 4 // 10**6} MB of numbers"
    return [layer], heads, [f"Tiles are traced for {what}, {why}; --layer and --head choose."]


def _heads(
    call: Call, layer: int, heads: list[int], trace: list[Tile], out: Tensor, tile: tuple[int, int]
) -> list[TracedHead]:
    """The trace of some heads of one layer, and the output of tiled beside manual's."""
    B_r, B_c = tile
    # (V, H, B_r, ...), NaN beyond a block that is shorter than the others
    scores = _padded([t.S[0] for t in trace], B_r, B_c)
    rescale = _padded([t.rescale[0] for t in trace], B_r)
    m, l = (_padded([x[0] for x in xs], B_r) for xs in zip(*((t.m, t.l) for t in trace)))
    m = m.masked_fill(m == torch.finfo(m.dtype).min, -torch.inf)
    o = _padded([t.O[0] for t in trace], B_r, call.q.shape[3])
    return [
        {
            **found,
            "scores": pack(scores[:, h]),
            "m": pack(m[:, h]),
            "l": pack(l[:, h]),
            "rescale": pack(rescale[:, h]),
            "o_norm": pack(o[:, h].norm(dim=-1)),
            "out": pack(out[0, :, h]),
        }
        for h, found in zip(heads, beside(call, out, layer, heads), strict=True)
    ]


def _padded(parts: list[Tensor], *shape: int) -> Tensor:
    """Tensors (H, n, ...) of a head's tiles in one (V, H, *shape), NaN where they are smaller."""
    whole = parts[0].new_full((len(parts), parts[0].shape[0], *shape), torch.nan)
    for where, part in zip(whole, parts, strict=True):
        where[tuple(map(slice, part.shape))] = part
    return whole
