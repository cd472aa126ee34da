"""The trace of attention/tiled.py, made ready to be played tile by tile.

The trace is that of the algorithm itself (forward_tiles), on the q, k and v that the model had:
what is shown is what was computed. Bytes are counted for all heads of a layer together, since heads
that share keys and values read them once; the rest is a head's own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attention import Spec, manual
from attention.tiled import Tile, blocks, forward_tiles
from viewer.cost import fast_memory, manual_steps, size_inside, size_of
from viewer.document import Tiles, TileStep, TracedHead, pack
from viewer.maps import Call, agreement, off

MOST_TILES = 1024  # of one head
BUDGET = 1_500_000  # numbers in all, 6 MB


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
    trace = trace_of(*calls[layer].given, B_r=B_r, B_c=B_c)[0]
    visited = sum(not t.skipped for t in trace)
    layers, heads, with_o, notes = _chosen(
        (len(calls), H), layer, head, visited * B_r * (B_c + 4) + 2 * T * D, visited * B_r * D
    )
    if calls[layer].segments is not None:
        notes.append("The border of a document masks scores, and skips no tile.")
    played: list[TracedHead] = []
    for n in layers:
        told, out = trace_of(*calls[n].given, B_r=B_r, B_c=B_c)
        played += _heads(calls[n], n, heads, told, out, (B_r, B_c), with_o)
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


def trace_of(q: Tensor, k: Tensor, v: Tensor, spec: Spec, segments: Tensor | None = None, *,
             B_r: int, B_c: int) -> tuple[list[Tile], Tensor]:  # fmt: skip
    """What tiled does: every tile in its order, and the output (B, Tq, H, D)."""
    trace: list[Tile] = []
    with torch.autocast(q.device.type, enabled=False):
        out, _ = forward_tiles(q, k, v, spec, segments, B_r=B_r, B_c=B_c, trace=trace)
    return trace, out


def steps(trace: list[Tile], spec: Spec, Tq: int, Tk: int, B_r: int, B_c: int) -> list[TileStep]:
    """What a trace has that is the same for all heads, with the bytes that a fused kernel moves.

    It reads Q_i with the first tile of row i that is not skipped, and K_j and V_j with each such
    tile, once for all query heads that share them; it writes O_i and L_i after the last (of a row
    that is skipped whole, the zeros). S and P stay on chip. Segment ids are not counted.
    """
    s, acc, D, H, Hkv = (
        size_of(spec), size_inside(spec), spec.head_dim, spec.n_head, spec.n_kv_head
    )  # fmt: skip
    rows, cols = blocks(Tq, B_r), blocks(Tk, B_c)
    visited: dict[int, list[int]] = {i: [] for i in range(len(rows))}  # columns of each row
    for t in trace:
        visited[t.i] += [] if t.skipped else [t.j]
    found: list[TileStep] = []
    at = read_so_far = written_so_far = 0
    for t in trace:
        I, J, row = rows[t.i], cols[t.j], visited[t.i]
        first, last = t.j in row[:1], t.j in row[-1:]
        read = s * D * (2 * Hkv * (J.stop - J.start) * (not t.skipped)
                        + H * (I.stop - I.start) * first)  # fmt: skip
        ends = last or (not row and t.j == len(cols) - 1)
        written = H * (s * D + acc) * (I.stop - I.start) * ends
        read_so_far, written_so_far = read_so_far + read, written_so_far + written
        found.append({
            "i": t.i, "j": t.j, "rows": [I.start, I.stop], "cols": [J.start, J.stop],
            "skipped": t.skipped, "at": None if t.skipped else at, "first": first, "last": last,
            "read": read, "written": written,
            "read_so_far": read_so_far, "written_so_far": written_so_far,
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


def _heads(call: Call, layer: int, heads: list[int], trace: list[Tile], out: Tensor,
           tile: tuple[int, int], with_o: bool) -> list[TracedHead]:  # fmt: skip
    """The trace of some heads of one layer, and the output of tiled beside manual's."""
    B_r, B_c = tile
    trace = [t for t in trace if not t.skipped]
    plain = manual.attend(call.q, call.k, call.v, call.spec, segments=call.segments)
    held = agreement(replace(call, out=out))
    # (V, H, B_r, ...), NaN beyond a block that is shorter than the others
    scores = _padded([t.S[0] for t in trace if t.S is not None], B_r, B_c)
    rescale = _padded([t.rescale[0] for t in trace if t.rescale is not None], B_r)
    m, l = (_padded([x[0] for x in xs], B_r) for xs in zip(*((t.m, t.l) for t in trace)))
    m = m.masked_fill(m == torch.finfo(m.dtype).min, -torch.inf)
    o = _padded([t.O[0] for t in trace], B_r, call.q.shape[3])
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
