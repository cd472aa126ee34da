"""What attention/tiled.py does, tile by tile, with the bytes that it costs, ready to be played.

The trace is that of the algorithm itself (forward_tiles), on the q, k and v that the model had:
what is shown is what was computed. Bytes are counted for all heads of a layer together, since heads
that share keys and values read them once; the rest is a head's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from attention import Spec, manual
from attention.tiled import blocks, forward_tiles
from viewer.cost import fast_memory, manual_steps, size_of
from viewer.document import Tiles, TileStep, TracedHead, pack
from viewer.maps import Call, agreement, off

MOST_TILES = 1024  # of one head
BUDGET = 1_500_000  # numbers in all, 6 MB


class Tile(NamedTuple):
    """What forward_tiles() did at one tile, for all sequences and heads together.

    The bytes are what a fused kernel moves to and from a GPU's main memory, at the inputs' size:
    it reads Q_i with the first tile of row i that is not skipped, and K_j and V_j with each such
    tile, once for all query heads that share them; it writes O_i and L_i after the last (of a row
    that is skipped whole, the zeros). S and P stay on chip. Segments are not counted.
    """

    i: int  # block of queries
    j: int  # block of keys
    skipped: bool
    m: Tensor  # (B, H, B_r) running maximum after this tile; the least finite number: nothing seen
    l: Tensor  # (B, H, B_r) running sum of exp(s - m)
    O: Tensor  # (B, H, B_r, D) the output after this tile, not normalised yet
    S: Tensor | None  # (B, H, B_r, B_c) the scores, -inf where masked; None: skipped
    rescale: Tensor | None  # (B, H, B_r) what the old l and O were multiplied by; None: skipped
    read: int  # bytes
    written: int  # bytes


def trace(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: Tensor | None = None, *, B_r: int,
    B_c: int,
) -> tuple[list[Tile], Tensor, Tensor]:  # fmt: skip
    """Every tile of forward_tiles(), the skipped ones too, in its order; its out and its L."""
    visited: dict[tuple[int, int], tuple[Tensor, ...]] = {}

    def on_tile(i: int, j: int, *tensors: Tensor) -> None:
        S, rescale, m, l, O = (t.flatten(1, 2) for t in tensors)
        visited[i, j] = m[..., 0], l[..., 0], O, S, rescale[..., 0]

    out, L = forward_tiles(q, k, v, spec, segments, B_r=B_r, B_c=B_c, on_tile=on_tile)
    rows, cols = blocks(q.shape[1], B_r), blocks(k.shape[1], B_c)
    acc = L.dtype
    told: list[Tile] = []
    for i, I in enumerate(rows):
        seen = [j for j in range(len(cols)) if (i, j) in visited]
        first, last = (seen[0], seen[-1]) if seen else (None, len(cols) - 1)
        O = torch.zeros_like(q[:, I].transpose(1, 2), dtype=acc)
        m, l = torch.full_like(O[..., 0], torch.finfo(acc).min), torch.zeros_like(O[..., 0])
        for j, J in enumerate(cols):
            S: Tensor | None = None
            rescale: Tensor | None = None
            read = q[:, I].nbytes if j == first else 0
            if (i, j) in visited:
                m, l, O, S, rescale = visited[i, j]
                read += k[:, J].nbytes + v[:, J].nbytes
            written = q[:, I].nbytes + m.nbytes if j == last else 0
            told.append(Tile(i, j, S is None, m, l, O, S, rescale, read, written))
    return told, out, L


def tiles(calls: list[Call], B_r: int, B_c: int, layer: int, head: int) -> Tiles:
    """The trace of each layer and head, as many as BUDGET allows.

    Args:
        layer, head: what must be there.

    Raises:
        ValueError: more than MOST_TILES tiles a head.
    """
    T, H, D = calls[0].q.shape[1:]
    rows, cols = blocks(T, B_r), blocks(T, B_c)
    if len(rows) * len(cols) > MOST_TILES:
        raise ValueError(
            f"tiles of {B_r} x {B_c} are {len(rows) * len(cols)} for {T} tokens, at most "
            f"{MOST_TILES} can be shown; take larger ones (--block_m, --block_n)"
        )
    one = calls[layer].spec
    traced = {layer: trace_of(calls[layer], B_r, B_c)}
    told = traced[layer][0]
    visited = sum(not t.skipped for t in told)
    layers, heads, with_o, notes = _chosen(
        (len(calls), H), layer, head, visited * B_r * (B_c + 4) + 2 * T * D, visited * B_r * D
    )
    if calls[layer].segments is not None:
        notes.append("The border of a document masks scores, and skips no tile.")
    played: list[TracedHead] = []
    for n in layers:
        of_layer, out = traced.get(n) or trace_of(calls[n], B_r, B_c)
        played += _heads(calls[n], n, heads, of_layer, out, (B_r, B_c), with_o)
    return {
        "block_m": B_r,
        "block_n": B_c,
        "n_rows": len(rows),
        "n_cols": len(cols),
        "size": size_of(one),
        "fast_memory": fast_memory(one, B_r, B_c),
        "steps": steps(told, rows, cols),
        "manual": manual_steps(one, T),
        "heads": played,
        "notes": notes,
    }


def trace_of(call: Call, B_r: int, B_c: int) -> tuple[list[Tile], Tensor]:
    """What tiled does with a layer's q, k and v: its tiles, and its output (1, T, H, D)."""
    with torch.autocast(call.q.device.type, enabled=False):
        told, out, _ = trace(call.q, call.k, call.v, call.spec, call.segments, B_r=B_r, B_c=B_c)
    return told, out


def steps(told: list[Tile], rows: list[slice], cols: list[slice]) -> list[TileStep]:
    """What a trace has that is the same for all heads."""
    found: list[TileStep] = []
    at = read = written = 0
    visited: dict[int, list[int]] = {}  # the numbers of each row's tiles that are not skipped
    for n, t in enumerate(told):
        visited.setdefault(t.i, []).extend([n] * (not t.skipped))
    for n, t in enumerate(told):
        read, written, row = read + t.read, written + t.written, visited[t.i]
        found.append({
            "i": t.i, "j": t.j,
            "rows": [rows[t.i].start, rows[t.i].stop], "cols": [cols[t.j].start, cols[t.j].stop],
            "skipped": t.skipped, "at": None if t.skipped else at,
            "first": not t.skipped and n == row[0], "last": not t.skipped and n == row[-1],
            "read": t.read, "written": t.written,
            "read_so_far": read, "written_so_far": written,
        })  # fmt: skip
        at += not t.skipped
    return found


def _chosen(shape: tuple[int, int], layer: int, head: int, least: int,
            outputs: int) -> tuple[list[int], list[int], bool, list[str]]:  # fmt: skip
    """Which layers and heads are traced, and whether with O_i: the most that the budget allows.

    Args:
        shape: layers and heads that there are.
        least: numbers of one head without O_i.
        outputs: the numbers of O_i of one head.
    """
    L, H = shape
    every, only = list(range(L)), f"layer {layer}"
    plans: list[tuple[list[int], list[int], str]] = [
        (every, list(range(H)), ""),
        ([layer], list(range(H)), f"the heads of {only} only"),
        ([layer], [head], f"head {head} of {only} only"),
    ]
    for layers, heads, what in plans:
        for with_o in (True, False):
            n = len(layers) * len(heads) * (least + outputs * with_o)
            if n <= BUDGET or (len(layers) * len(heads) == 1 and not with_o):
                why = f"to keep the file below {BUDGET * 4 // 10**6} MB of numbers"
                notes = []
                if what:
                    notes.append(f"Tiles are traced for {what}, {why}; --layer and --head choose.")
                if not with_o:
                    notes.append(f"Of O_i the norm of each row is shown, not its numbers, {why}.")
                return layers, heads, with_o, notes
    raise AssertionError("the last plan is always taken")


def _heads(call: Call, layer: int, heads: list[int], told: list[Tile], out: Tensor,
           tile: tuple[int, int], with_o: bool) -> list[TracedHead]:  # fmt: skip
    """The trace of some heads of one layer, and the output of tiled beside manual's."""
    B_r, B_c = tile
    told = [t for t in told if not t.skipped]
    plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)
    held = agreement(replace(call, out=out))
    # (V, H, B_r, ...), NaN beyond a block that is shorter than the others
    scores = _padded([t.S[0] for t in told if t.S is not None], B_r, B_c)
    rescale = _padded([t.rescale[0] for t in told if t.rescale is not None], B_r)
    m, l = (_padded([x[0] for x in xs], B_r) for xs in zip(*((t.m, t.l) for t in told)))
    m = m.masked_fill(m == torch.finfo(m.dtype).min, -torch.inf)
    o = _padded([t.O[0] for t in told], B_r, call.q.shape[3])
    norm = torch.linalg.vector_norm(o, dim=-1)
    return [
        {
            "layer": layer,
            "head": h,
            "scores": pack(scores[:, h]),
            "m": pack(m[:, h]),
            "l": pack(l[:, h]),
            "rescale": pack(rescale[:, h]),
            "o": pack(o[:, h]) if with_o else None,
            "o_norm": pack(norm[:, h]),
            "out": pack(out[0, :, h]),
            "manual": pack(plain[0, :, h]),
            "difference": float(off(out[0, :, h], plain[0, :, h]).max()),
            "allowed": held["allowed"],
            "error": held["heads"][h],
        }
        for h in heads
    ]


def _padded(parts: list[Tensor], *shape: int) -> Tensor:
    """Tensors (H, n, ...) of a head's tiles in one (V, H, *shape), NaN where they are smaller."""
    whole = parts[0].new_full((len(parts), parts[0].shape[0], *shape), torch.nan)
    for n, part in enumerate(parts):
        where = whole[n]
        for dim, size in enumerate(part.shape):
            where = where.narrow(dim, 0, size)
        where.copy_(part)
    return whole
