"""Softmax, masks, memory, the online softmax, tiles.

manual moves S and P, T^2 elements a head; tiled K and V once per block of queries: O(T^2 D^2 / M)
with M bytes on chip (Dao et al. 2022, arXiv 2205.14135).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attention import BACKENDS, Spec, manual, masks, tiled
from core.settings import Size, UserError
from course.figures import Numbers, Sizes, drawing, figure, listed, megabytes, of, table

ITEM = 4  # bytes
Moved = tuple[int, int]  # bytes read from and written to main memory


class Tile(NamedTuple):
    """The state of tiled after a tile."""

    i: int  # block of queries
    j: int  # block of keys
    S: Tensor  # (B, H, B_r, B_c) scores, -inf where masked
    rescale: Tensor  # (B, H, B_r) factor of the old l and O
    m: Tensor  # (B, H, B_r) running maximum
    l: Tensor  # (B, H, B_r) running sum of exp(s - m)
    O: Tensor  # (B, H, B_r, D) output, not normalized


def trace_of(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, B_r: int, B_c: int
) -> tuple[list[Tile], Tensor]:
    """The visited tiles in order, and the output (B, Tq, H, D)."""
    trace: list[Tile] = []

    def on_tile(i: int, j: int, *tensors: Tensor) -> None:
        S, rescale, m, l, O = (t.flatten(1, 2) for t in tensors)  # (B, H, B_r, ...)
        trace.append(Tile(i, j, S, rescale[..., 0], m[..., 0], l[..., 0], O))

    return trace, tiled.forward_tiles(q, k, v, spec, B_r=B_r, B_c=B_c, on_tile=on_tile)[0]


def traced(spec: Spec, Tq: int, Tk: int, B_r: int, B_c: int) -> list[Tile]:
    q, k = (torch.zeros(1, T, 1, spec.head_dim) for T in (Tq, Tk))
    return trace_of(q, k, k, spec, B_r=B_r, B_c=B_c)[0]


def tiled_bytes(trace: list[Tile], Tq: int, D: int) -> Moved:
    """Q_i is read at a row's first tile, K_j and V_j at each; O and L are written once."""
    queries = sum({t.i: t.S.shape[2] for t in trace}.values())
    keys = sum(t.S.shape[3] for t in trace)
    return ITEM * D * (queries + 2 * keys), ITEM * (D + 1) * Tq


def manual_bytes(T: int, D: int) -> Moved:
    """Three passes, Algorithm 0: S = Q K^T, P = softmax(S), O = P V."""
    return ITEM * (3 * T * D + 2 * T * T), ITEM * (T * D + 2 * T * T)


def one_query(
    q: Numbers = (2, 0, 1, 1),
    keys: tuple[Numbers, ...] = ((2, 0, 1, 1), (1, 2, 0, 0), (0, 1, 2, 0), (-2, 0, 0, 1)),
    values: Numbers = (10, 20, 30, 40),
) -> str:
    """Page 1: scores, weights and output of one query; a value is one number."""
    if not len(keys) == len(values) or any(len(k) != len(q) for k in keys):
        raise UserError("one_query needs a value for each key, and keys as long as q")
    D, T = len(q), len(keys)
    q_, k = torch.tensor([[[[*map(float, q)]]]]), torch.tensor([[[*map(float, x)] for x in keys]])
    spec = Spec(1, 1, D, "float32")
    # Unit vectors as values: the output is the weights.
    weights = manual.attend(q_, k[:, :, None], torch.eye(T)[None, :, None], spec).flatten()
    v = torch.tensor([*map(float, values)])[None, :, None, None]
    out = float(manual.attend(q_, k[:, :, None], v, spec))
    dots = k[0] @ q_.flatten()
    scores = dots / math.sqrt(D)
    rows = [{
        "k_j": f"`{listed(keys[j])}`", "q · k_j": f"{dots[j]:g}",
        f"s_j = q · k_j / √{D}": f"{scores[j]:.3g}",
        "exp(s_j - max s)": f"{math.exp(scores[j] - scores.max()):.3f}",
        "p_j": f"{weights[j]:.3f}", "v_j": f"{values[j]:g}",
    } for j in range(T)]
    sums = " + ".join(f"{weights[j]:.3f} · {values[j]:g}" for j in range(T))
    sizes = of("float32", B=1, Tq=1, Tk=T, D=D)
    return f"q = `{listed(q)}` ({sizes})\n\n{table(rows)}\n\nout = {sums} = **{out:.2f}**"


def scale(T: Size = 64, queries: Size = 200) -> str:
    """Page 1: the effect of dividing by sqrt(D), for normally distributed q and k."""
    rows = []
    for D in (4, 16, 64, 256):
        draw = torch.Generator().manual_seed(D)
        q = torch.randn(queries, D, generator=draw, dtype=torch.float64)
        k = torch.randn(queries, T, D, generator=draw, dtype=torch.float64)
        s = torch.einsum("nd,njd->nj", q, k)
        raw, scaled = (x.softmax(dim=1).amax(dim=1).mean() for x in (s, s / math.sqrt(D)))
        rows.append({"D": D, "standard deviation of q · k": f"{s.std():.1f}",
                     f"largest of {T} weights, mean": f"{raw:.2f}",
                     "the same with / √D": f"{scaled:.2f}"})
    return figure(of("float64", "D in the first column", B=queries, Tq=1, Tk=T), rows)


def mask(Tq: Size = 4, Tk: Size = 4, window: Size | None = None,
         segments: tuple[int, ...] | None = None) -> str:
    """Page 2: the mask, by visible(). --segments="(0, 0, 1, 1)"."""
    if segments is not None and not Tq <= len(segments) == Tk:
        raise UserError(f"segments must be Tk = {Tk} numbers, at least Tq, got {len(segments)}")
    seg = None if segments is None else torch.tensor([segments])
    seen = masks.mask(Tq, Tk, window, seg, torch.device("cpu"))[0, 0]
    wide = len(str(Tk - 1)) + 2
    lines = [" " * 6 + "".join(f"k{j}".rjust(wide) for j in range(Tk))]
    if segments is not None:
        lines.insert(0, "segment" + "".join(str(n).rjust(wide) for n in segments)[1:])
    for i, row in enumerate(seen.tolist()):
        lines.append(f"q{i}".ljust(6) + "".join(("x" if x else ".").rjust(wide) for x in row))
    return drawing(*lines)


def memory(T: Sizes = (512, 1024, 2048, 4096), D: Size = 64) -> str:
    """Page 3: memory that one head keeps for the backward pass, float32, by autograd's hooks."""
    rows = [{
        "T": f"{n:,}", "Q, K, V and O": megabytes(4 * 4 * n * D), "P": megabytes(4 * n**2),
        **{f"`{name}` keeps": megabytes(kept(name, n, D)) for name in ("manual", "tiled")},
    } for n in T]
    return figure(of("float32", "T in the first column", B=1, H=1, D=D), rows)


def kept(name: str, T: int, D: int) -> int:
    sizes: dict[int, int] = {}

    def note(t: Tensor) -> Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    q, k, v = (torch.zeros(1, T, 1, D, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = BACKENDS[name].attend(q, k, v, Spec(1, 1, D, "float32"))
    del out  # each storage had its own address
    return sum(sizes.values())


def online(scores: Numbers = (1, 3, 2, 5, 4, 0), block: Size = 2) -> str:
    """Page 4: one row of scores, a block at a time, by forward_tiles()."""
    T = len(scores)
    # D = 1 and q = 1: scores are keys.
    q = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    k = torch.tensor([*map(float, scores)], dtype=torch.float64)
    v = torch.arange(1, T + 1, dtype=torch.float64)
    spec = Spec(1, 1, 1, "float64")
    trace, out = trace_of(q, k[None, :, None, None], v[None, :, None, None], spec, B_r=1, B_c=block)
    rows, m, l_old = [], 0.0, 0.0
    for tile in trace:
        m, l, factor = (float(x) for x in (tile.m, tile.l, tile.rescale))
        rows.append({
            "block of scores": f"`{listed(tile.S.flatten().tolist())}`", "m": f"{m:g}",
            "e^(m_old - m)": f"{factor:.4f}",
            "the block's sum of e^(s - m)": f"{l - factor * l_old:.4f}",
            "l = factor · l_old + sum": f"{l:.4f}", "O": f"{float(tile.O):.4f}",
        })
        l_old = l
    direct = float(torch.softmax(k, dim=0) @ v)
    return figure(of("float64", B=1, Tq=1, Tk=T, D=1), rows, (
        f"At the end O / l = {float(out):.6f}; softmax of all {T} scores at once, times V, is "
        f"{direct:.6f}. L = m + log l = {m + math.log(l_old):.4f}."
    ))


def tiles(Tq: Size = 64, Tk: Size = 64, B_r: Size = 8, B_c: Size = 8, window: Size | None = None,
          D: Size = 64) -> str:
    """Page 5: which tiles are visited, and the bytes of one head in float32, by the trace."""
    trace = traced(Spec(1, 1, D, "float32", window=window), Tq, Tk, B_r, B_c)
    rows, cols = range(len(tiled.blocks(Tq, B_r))), range(len(tiled.blocks(Tk, B_c)))
    signs = {(t.i, t.j): "/" if t.S.isneginf().any() else "x" for t in trace}
    lines = [" " * 12 + "".join(f"{f'K_{j}':>5}" for j in cols)]
    for i in rows:
        lines.append(f"{f'Q_{i}':>12}" + "".join(f"{signs.get((i, j), '.'):>5}" for j in cols))
    lines += ["", "            x wholly visible   / partly masked   . skipped"]
    read, written = tiled_bytes(trace, Tq, D)
    below = (
        f"{of('float32', B=1, H=1, Tq=Tq, Tk=Tk, D=D)}: "
        f"{len(trace)} of {len(rows) * len(cols)} tiles are visited. "
        f"Read: {read:,} bytes, written: {written:,}."
    )
    if Tq == Tk:
        read, written = manual_bytes(Tq, D)
        below += f" The formula in three passes (S, P, O) reads {read:,} and writes {written:,}."
    return f"{drawing(*lines)}\n\n{below}"


def traffic(T: Size = 1024, D: Size = 64, sizes: Sizes = (16, 32, 64, 128, 256)) -> str:
    """Page 5: bytes moved by one head against the fast memory that a tile needs, by the trace."""
    moved = [*map(megabytes, manual_bytes(T, D))]
    cells = [("`manual`, in three passes", "", "", *moved, "")]
    for B_r in sizes:
        B_c = min(B_r, D)
        trace = traced(Spec(1, 1, D, "float32"), T, T, B_r, B_c)
        read, written = tiled_bytes(trace, T, D)
        # Q_i, O_i; K_j, V_j; S_ij; m_i, l_i
        needs = ITEM * (2 * B_r * D + 2 * B_c * D + B_r * B_c + 2 * B_r)
        cells.append((f"`tiled`, B_r = {B_r}, B_c = {B_c}", f"{needs / 1024:.1f} KiB",
                      f"{len(trace):,}", megabytes(read), megabytes(written),
                      f"{read * needs / 1e9:.1f}"))
    titles = ("", "on chip, M", "tiles visited", "read", "written", "read · M / 10^9")
    return figure(of("float32", B=1, H=1, T=T, D=D), [dict(zip(titles, row)) for row in cells])
