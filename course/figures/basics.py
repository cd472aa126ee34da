"""The figures of pages 1 to 5: softmax, masks, memory, the online softmax, tiles."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from attention import BACKENDS, Spec, manual, masks, tiled
from core.settings import UserError
from course.figures.trace import Tile, fast_memory, grid, manual_bytes, tiled_bytes, trace_of
from course.format import Numbers, drawing, megabytes, of, plain, table


def one_query(
    q: Numbers = (2, 0, 1, 1),
    keys: Sequence[Numbers] = ((2, 0, 1, 1), (1, 2, 0, 0), (0, 1, 2, 0), (-2, 0, 0, 1)),
    values: Numbers = (10, 20, 30, 40),
) -> str:
    """Page 1: scores, weights and output of one query; a value is one number."""
    if not len(keys) == len(values) or any(len(k) != len(q) for k in keys):
        raise UserError("one_query needs a value for each key, and keys as long as q")
    D, T = len(q), len(keys)
    q_, k = torch.tensor([[[[*map(float, q)]]]]), torch.tensor([[[*map(float, x)] for x in keys]])
    spec = Spec(1, 1, D, "float32")
    # With unit vectors as values the output is the weights.
    weights = manual.attend(q_, k[:, :, None], torch.eye(T)[None, :, None], spec).flatten()
    v = torch.tensor([*map(float, values)])[None, :, None, None]
    out = float(manual.attend(q_, k[:, :, None], v, spec))
    dots = k[0] @ q_.flatten()
    scores = dots / math.sqrt(D)
    rows = [
        (f"`{plain(keys[j])}`", f"{dots[j]:g}", f"{scores[j]:.3g}",
         f"{math.exp(scores[j] - scores.max()):.3f}", f"{weights[j]:.3f}", f"{values[j]:g}")
        for j in range(T)
    ]
    titles = ("k_j", "q · k_j", f"s_j = q · k_j / √{D}", "exp(s_j - max s)", "p_j", "v_j")
    sums = " + ".join(f"{weights[j]:.3f} · {values[j]:g}" for j in range(T))
    sizes = of("float32", B=1, Tq=1, Tk=T, D=D)
    return f"q = `{plain(q)}` ({sizes})\n\n{table(titles, rows)}\n\nout = {sums} = **{out:.2f}**"


def scale(T: int = 64, queries: int = 200) -> str:
    """Page 1: the effect of dividing by sqrt(D), for normally distributed q and k."""
    rows = []
    for D in (4, 16, 64, 256):
        draw = torch.Generator().manual_seed(D)
        q = torch.randn(queries, D, generator=draw, dtype=torch.float64)
        k = torch.randn(queries, T, D, generator=draw, dtype=torch.float64)
        s = torch.einsum("nd,njd->nj", q, k)
        largest = [float(x.softmax(dim=1).amax(dim=1).mean()) for x in (s, s / math.sqrt(D))]
        rows.append((D, f"{s.std():.1f}", *(f"{p:.2f}" for p in largest)))
    titles = ("D", "standard deviation of q · k", f"largest of {T} weights, mean",
              "the same with / √D")
    sizes = of("float64", "D in the first column", B=queries, Tq=1, Tk=T)
    return f"{sizes}:\n\n{table(titles, rows)}"


def mask(
    Tq: int = 4, Tk: int = 4, window: int | None = None, segments: Sequence[int] | None = None
) -> str:
    """Page 2: the mask, by visible(). --segments="(0, 0, 1, 1)"."""
    if segments is not None and len(segments) != Tk:
        raise UserError(f"segments must be Tk = {Tk} numbers, got {len(segments)}")
    seg = None if segments is None else torch.tensor([segments])
    seen = masks.mask(Tq, Tk, window, seg, torch.device("cpu"))[0, 0]
    wide = len(str(Tk - 1)) + 2
    lines = [" " * 6 + "".join(f"k{j}".rjust(wide) for j in range(Tk))]
    if segments is not None:
        lines.insert(0, "segment" + "".join(str(n).rjust(wide) for n in segments)[1:])
    for i, row in enumerate(seen.tolist()):
        lines.append(f"q{i}".ljust(6) + "".join(("x" if x else ".").rjust(wide) for x in row))
    return drawing(*lines)


def memory(T: Sequence[int] = (512, 1024, 2048, 4096), D: int = 64) -> str:
    """Page 3: memory that one head keeps for the backward pass, float32, by autograd's hooks."""
    rows = []
    for tokens in (T,) if isinstance(T, int) else T:
        held = [kept(name, tokens, D) for name in ("manual", "tiled")]
        sizes = (4 * 4 * tokens * D, 4 * tokens**2, *held)
        rows.append([f"{tokens:,}", *map(megabytes, sizes)])
    titles = ("T", "Q, K, V and O", "P", "`manual` keeps", "`tiled` keeps")
    above = of("float32", "T in the first column", B=1, H=1, D=D)
    return f"{above}:\n\n{table(titles, rows)}"


def kept(name: str, T: int, D: int) -> int:
    """Bytes of one head that autograd keeps for the backward pass."""
    sizes: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    q, k, v = (torch.zeros(1, T, 1, D, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        out = BACKENDS[name].attend(q, k, v, Spec(1, 1, D, "float32"))
    del out  # until here each storage has its own address
    return sum(sizes.values())


def online(scores: Numbers = (1, 3, 2, 5, 4, 0), block: int = 2) -> str:
    """Page 4: one row of scores, a block at a time, by forward_tiles()."""
    if not scores:
        raise UserError("online needs a score")
    T = len(scores)
    # With D = 1 and q = 1 the scores are the keys.
    k = torch.tensor([*map(float, scores)], dtype=torch.float64)
    v = torch.arange(1, T + 1, dtype=torch.float64)
    trace, out = trace_of(
        torch.ones(1, 1, 1, 1, dtype=torch.float64), k[None, :, None, None], v[None, :, None, None],
        Spec(1, 1, 1, "float64"), B_r=1, B_c=block,
    )
    rows, m, l_old = [], 0.0, 0.0
    for tile in trace:
        m, l, factor = (float(x) for x in (tile.m, tile.l, tile.rescale))
        rows.append((f"`{plain(tile.S.flatten().tolist())}`", f"{m:g}", f"{factor:.4f}",
                     f"{l - factor * l_old:.4f}", f"{l:.4f}", f"{float(tile.O):.4f}"))
        l_old = l
    titles = ("block of scores", "m", "e^(m_old - m)", "the block's sum of e^(s - m)",
              "l = factor · l_old + sum", "O")
    direct = float(torch.softmax(k, dim=0) @ v)
    return (
        f"{of('float64', B=1, Tq=1, Tk=T, D=1)}:\n\n{table(titles, rows)}\n\n"
        f"At the end O / l = {float(out):.6f}; softmax of all {T} scores at once, times V, is "
        f"{direct:.6f}. L = m + log l = {m + math.log(l_old):.4f}."
    )


def tiles(
    Tq: int = 64, Tk: int = 64, B_r: int = 8, B_c: int = 8, window: int | None = None, D: int = 64
) -> str:
    """Page 5: which tiles are visited, and the bytes of one head in float32, by the trace."""
    spec = Spec(1, 1, D, "float32", window=window)
    trace = traced(spec, Tq, Tk, B_r, B_c)
    n_rows, n_cols = len(tiled.blocks(Tq, B_r)), len(tiled.blocks(Tk, B_c))
    read, written = tiled_bytes(trace, spec, Tq)
    caption = [
        f"{of('float32', B=1, H=1, Tq=Tq, Tk=Tk, D=D)}: "
        f"{len(trace)} of {n_rows * n_cols} tiles are visited. "
        f"Read: {read:,} bytes, written: {written:,}."
    ]
    if Tq == Tk:
        read, written = manual_bytes(spec, Tq)
        caption.append(
            f"The formula in three passes (S, P, O) reads {read:,} and writes {written:,}."
        )
    return drawing(*grid(trace, n_rows, n_cols)) + "\n\n" + " ".join(caption)


def traffic(T: int = 1024, D: int = 64, sizes: Sequence[int] = (16, 32, 64, 128, 256)) -> str:
    """Page 5: bytes moved by one head against the fast memory that a tile needs, by the trace."""
    spec = Spec(1, 1, D, "float32")
    rows = [("`manual`, in three passes", "", "", *map(megabytes, manual_bytes(spec, T)), "")]
    for B_r in sizes:
        B_c = min(B_r, D)
        trace = traced(spec, T, T, B_r, B_c)
        read, written = tiled_bytes(trace, spec, T)
        needs = fast_memory(spec, B_r, B_c)
        rows.append((f"`tiled`, B_r = {B_r}, B_c = {B_c}", f"{needs / 1024:.1f} KiB",
                     f"{len(trace):,}", megabytes(read), megabytes(written),
                     f"{read * needs / 1e9:.1f}"))
    titles = ("", "on chip, M", "tiles visited", "read", "written", "read · M / 10^9")
    return f"{of('float32', B=1, H=1, T=T, D=D)}:\n\n{table(titles, rows)}"


def traced(spec: Spec, Tq: int, Tk: int, B_r: int, B_c: int) -> list[Tile]:
    """The tiles that forward_tiles() visits."""
    q, k = (torch.zeros(1, T, 1, spec.head_dim) for T in (Tq, Tk))
    return trace_of(q, k, k, spec, B_r=B_r, B_c=B_c)[0]
