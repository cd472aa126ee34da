"""Every figure and table of the course, computed by the code that the course is about.

    python -m docs.figures                          what there is
    python -m docs.figures mask                     one of them, as it stands in its page
    python -m docs.figures mask --Tq=2 --Tk=6       the same with other numbers

Each function gives Markdown that reads well in a terminal too. Nothing here is timed or random
without a seed: `python -m docs.build --check` compares it with the pages. The functions import
torch, and what they show, when they are called.
"""

from __future__ import annotations

import ast
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from core.settings import UserError, exit_on_user_error

FIGURES: dict[str, Callable[..., str]] = {}


def figure(make: Callable[..., str]) -> Callable[..., str]:
    """Enter a function, all of whose arguments have defaults, under its name."""
    FIGURES[make.__name__] = make
    return make


def main(argv: Sequence[str]) -> int:
    """Print the list of figures, or one of them."""
    if argv:
        print(draw(argv))
        return 0
    for name, make in FIGURES.items():
        print(f"{name:22s} {summary(make)}")
    return 0


def draw(words: Sequence[str]) -> str:
    """A figure by its name, with options as on the command line.

    Raises:
        UserError: no such figure, no such option, or a value that it cannot take.
    """
    name, *rest = words
    if name not in FIGURES:
        raise UserError(f"no figure {name!r}; there are {', '.join(FIGURES)}")
    known = inspect.signature(FIGURES[name]).parameters
    given = {}
    for word in rest:
        key, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not equals or key not in known:
            takes = ", ".join(f"--{p.name}={p.default}" for p in known.values()) or "no options"
            raise UserError(f"{name} takes {takes}; got {word}")
        try:
            given[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            raise UserError(f"--{key} must be a number, a list or None, got {value}") from None
    return FIGURES[name](**given)


def summary(make: Callable[..., str]) -> str:
    return (inspect.getdoc(make) or "").partition("\n")[0]


def table(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table; its columns stand under one another in a terminal too."""
    cells = [list(titles), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(titles))]
    lines = [" | ".join(c.ljust(w) for c, w in zip(row, widths)) for row in cells]
    lines.insert(1, " | ".join("-" * w for w in widths))
    return "\n".join(f"| {line} |" for line in lines)


def drawing(*lines: str) -> str:
    """Text that keeps its columns."""
    return "\n".join(["```text", *(line.rstrip() for line in lines), "```"])


# pages 1 to 5

Numbers = Sequence[float]


@figure
def one_query(q: Numbers = (2, 0, 1, 1),
              keys: Sequence[Numbers] = ((2, 0, 1, 1), (1, 2, 0, 0), (0, 1, 2, 0), (-2, 0, 0, 1)),
              values: Numbers = (10, 20, 30, 40)) -> str:  # fmt: skip
    """Page 1: the scores and weights of one query, and its output; a value is one number here."""
    import torch

    from attention import Spec, manual

    if not len(keys) == len(values) or any(len(k) != len(q) for k in keys):
        raise UserError("one_query needs a value for each key, and keys as long as q")
    D, T = len(q), len(keys)
    q_, k = torch.tensor([[[[*map(float, q)]]]]), torch.tensor([[[*map(float, x)] for x in keys]])
    spec = Spec(1, 1, D, "float32")
    # The last query sees every key; with the unit vectors for values the output is the weights.
    weights = manual.attend(q_, k[:, :, None], torch.eye(T)[None, :, None], spec).flatten()
    v = torch.tensor([*map(float, values)])[None, :, None, None]
    out = float(manual.attend(q_, k[:, :, None], v, spec))
    dots = k[0] @ q_.flatten()
    scores = dots / math.sqrt(D)
    rows = [
        (f"`{plain(keys[j])}`", f"{dots[j]:g}", f"{scores[j]:.3g}",
         f"{math.exp(scores[j] - scores.max()):.3f}", f"{weights[j]:.3f}", f"{values[j]:g}")
        for j in range(T)
    ]  # fmt: skip
    titles = ("k_j", "q · k_j", f"s_j = q · k_j / √{D}", "exp(s_j - max s)", "p_j", "v_j")
    sums = " + ".join(f"{weights[j]:.3f} · {values[j]:g}" for j in range(T))
    return f"q = `{plain(q)}`\n\n{table(titles, rows)}\n\nout = {sums} = **{out:.2f}**"


def plain(x: Numbers) -> str:
    return ", ".join(f"{n:g}" for n in x)


@figure
def scale(T: int = 64, queries: int = 200) -> str:
    """Page 1: what dividing by sqrt(D) is for; q and k are drawn from a normal distribution."""
    import torch

    rows = []
    for D in (4, 16, 64, 256):
        draw = torch.Generator().manual_seed(D)
        q = torch.randn(queries, D, generator=draw, dtype=torch.float64)
        k = torch.randn(queries, T, D, generator=draw, dtype=torch.float64)
        s = torch.einsum("nd,njd->nj", q, k)
        largest = [float(x.softmax(dim=1).amax(dim=1).mean()) for x in (s, s / math.sqrt(D))]
        rows.append((D, f"{s.std():.1f}", *(f"{p:.2f}" for p in largest)))
    titles = ("D", "standard deviation of q · k", f"largest of {T} weights, mean",
              "the same with / √D")  # fmt: skip
    return table(titles, rows)


@figure
def mask(Tq: int = 4, Tk: int = 4, window: int | None = None,
         segments: Sequence[int] | None = None) -> str:  # fmt: skip
    """Page 2: who sees whom, by visible(). --Tq, --Tk, --window, --segments="(0, 0, 1, 1)"."""
    import torch

    from attention import views

    if min(Tq, Tk) < 1 or (window is not None and window < 1):
        raise UserError("Tq, Tk and window must be at least 1")
    if segments is not None and len(segments) != Tk:
        raise UserError(f"segments must be Tk = {Tk} numbers, got {len(segments)}")
    seg = None if segments is None else torch.tensor([segments])
    seen = views.mask(Tq, Tk, window, seg, torch.device("cpu"))[0, 0]
    wide = len(str(Tk - 1)) + 2
    lines = [" " * 6 + "".join(f"k{j}".rjust(wide) for j in range(Tk))]
    if segments is not None:
        lines.insert(0, "segment" + "".join(str(n).rjust(wide) for n in segments)[1:])
    for i, row in enumerate(seen.tolist()):
        lines.append(f"q{i}".ljust(6) + "".join(("x" if x else ".").rjust(wide) for x in row))
    return drawing(*lines)


@figure
def memory(T: Sequence[int] = (512, 1024, 2048, 4096), D: int = 64) -> str:
    """Page 3: what one head keeps for the backward pass, in float32, seen by autograd's hooks."""
    import torch

    from attention import Spec, manual, tiled

    rows = []
    for tokens in (T,) if isinstance(T, int) else T:
        cells = [f"{tokens:,}", megabytes(4 * 4 * tokens * D), megabytes(4 * tokens**2)]
        for backend in (manual, tiled):
            q, k, v = (torch.zeros(1, tokens, 1, D, requires_grad=True) for _ in range(3))
            held: dict[int, int] = {}  # storage -> bytes; views of one tensor count once

            def note(x: torch.Tensor, held: dict[int, int] = held) -> torch.Tensor:
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                out = backend.attend(q, k, v, Spec(1, 1, D, "float32"))
            cells.append(megabytes(sum(held.values())))
            del out
        rows.append(cells)
    titles = ("T", "Q, K, V and O", "P", "`manual` keeps", "`tiled` keeps")
    return table(titles, rows)


def megabytes(n: int) -> str:
    """Bytes in units of 10^6."""
    return f"{n / 1e6:,.2f} MB"


@figure
def online(scores: Numbers = (1, 3, 2, 5, 4, 0), block: int = 2) -> str:
    """Page 4: one row of scores, a block at a time, by forward_tiles()."""
    import torch

    from attention import Spec
    from viewer.tiles import trace

    if not scores or block < 1:
        raise UserError("online needs a score and a block of at least 1")
    T = len(scores)
    # With D = 1 and q = 1 the scores are the keys. The values count 1, 2, ...: any will do.
    k = torch.tensor([*map(float, scores)], dtype=torch.float64)
    v = torch.arange(1, T + 1, dtype=torch.float64)
    told, out, L = trace(
        torch.ones(1, 1, 1, 1, dtype=torch.float64), k[None, :, None, None], v[None, :, None, None],
        Spec(1, 1, 1, "float64"), B_r=1, B_c=block,
    )  # fmt: skip
    rows, l_old = [], 0.0
    for tile in told:
        assert tile.S is not None and tile.rescale is not None  # the last query sees every key
        m, l, factor = (float(x) for x in (tile.m, tile.l, tile.rescale))
        rows.append((f"`{plain(tile.S.flatten().tolist())}`", f"{m:g}", f"{factor:.4f}",
                     f"{l - factor * l_old:.4f}", f"{l:.4f}", f"{float(tile.O):.4f}"))  # fmt: skip
        l_old = l
    titles = ("block of scores", "m", "e^(m_old - m)", "the block's sum of e^(s - m)",
              "l = factor · l_old + sum", "O")  # fmt: skip
    direct = float(torch.softmax(k, dim=0) @ v)
    return (
        f"{table(titles, rows)}\n\n"
        f"At the end O / l = {float(out):.6f}; softmax of all {T} scores at once, times V, is "
        f"{direct:.6f}. L = m + log l = {float(L):.4f}."
    )


@figure
def tiles(Tq: int = 64, Tk: int = 64, B_r: int = 8, B_c: int = 8, window: int | None = None,
          D: int = 64) -> str:  # fmt: skip
    """Page 5: which tiles are visited, and the bytes of one head in float32, by the trace."""
    import torch

    from attention import Spec, tiled
    from viewer.cost import manual_steps

    if min(Tq, Tk, B_r, B_c, D) < 1 or (window is not None and window < 1):
        raise UserError("Tq, Tk, B_r, B_c, D and window must be at least 1")
    spec = Spec(1, 1, D, "float32", window=window)
    trace = traced(spec, Tq, Tk, B_r, B_c)
    rows, cols = tiled.blocks(Tq, B_r), tiled.blocks(Tk, B_c)
    lines = [" " * 6 + " ".join(f"K{j}".ljust(3) for j in range(len(cols)))]
    for i, I in enumerate(rows):
        signs = []
        for j, J in enumerate(cols):
            S = torch.zeros(I.stop - I.start, J.stop - J.start)
            whole = tiled.masked(S, I, J, Tq, Tk, window, None) is S  # nothing to mask
            signs.append("." if trace[i * len(cols) + j].skipped else "x" if whole else "/")
        lines.append(f"Q{i}".ljust(6) + " ".join(sign.ljust(3) for sign in signs))
    lines += ["", "x  visited, no mask     /  visited, masked entry by entry     .  skipped"]
    skipped = sum(t.skipped for t in trace)
    read, written = sum(t.read for t in trace), sum(t.written for t in trace)
    told = [f"{len(trace) - skipped} of {len(trace)} tiles are visited. "
            f"Read: {read:,} bytes, written: {written:,}."]  # fmt: skip
    if Tq == Tk:
        last = manual_steps(spec, Tq)[-1]
        told.append(
            f"The formula in three passes (S, P, O) reads {last['read_so_far']:,} and writes "
            f"{last['written_so_far']:,}."
        )
    return drawing(*lines) + "\n\n" + " ".join(told)


@figure
def traffic(T: int = 1024, D: int = 64, sizes: Sequence[int] = (16, 32, 64, 128, 256)) -> str:
    """Page 5: bytes moved by one head against the fast memory that a tile needs, by the trace."""
    from attention import Spec
    from viewer.cost import fast_memory, manual_steps

    spec = Spec(1, 1, D, "float32")
    last = manual_steps(spec, T)[-1]
    rows = [
        ("`manual`, in three passes", "", "", megabytes(last["read_so_far"]),
         megabytes(last["written_so_far"]), "")
    ]  # fmt: skip
    for B_r in sizes:
        B_c = min(B_r, D)
        trace = traced(spec, T, T, B_r, B_c)
        read, written = sum(t.read for t in trace), sum(t.written for t in trace)
        needs = fast_memory(spec, B_r, B_c)
        rows.append((f"`tiled`, B_r = {B_r}, B_c = {B_c}", f"{needs / 1024:.1f} KiB",
                     f"{sum(not t.skipped for t in trace):,}", megabytes(read),
                     megabytes(written), f"{read * needs / 1e9:.1f}"))  # fmt: skip
    titles = ("", "on chip, M", "tiles visited", "read", "written", "read · M / 10^9")
    return table(titles, rows)


def traced(spec: Any, Tq: int, Tk: int, B_r: int, B_c: int) -> list[Any]:
    """The trace of forward_tiles() for these lengths; the numbers do not matter.

    Args:
        spec: of one head.
    """
    import torch

    from viewer.tiles import trace

    q, k = (torch.zeros(1, T, 1, spec.head_dim) for T in (Tq, Tk))
    return trace(q, k, k, spec, B_r=B_r, B_c=B_c)[0]


# pages 6 to 9


@figure
def kept_for_backward(T: int = 1024, n_head: int = 12, D: int = 64) -> str:
    """What manual and tiled keep of one layer for the backward pass: every tensor, in float32."""
    if min(T // 2, n_head, D) < 1:
        raise UserError("T must be at least 2, n_head and D at least 1")
    half, now = kept(T // 2, n_head, D), kept(T, n_head, D)
    rows: list[tuple[Any, ...]] = []
    for name, tensors in now.items():
        for n, (shape, dtype, size) in enumerate(tensors):
            grew = size / half[name][n][2]
            rows.append((f"`{name}`", shape, dtype, f"{size / 1e6:.2f}", f"x {grew:.3g}"))
        before, whole = (sum(t[2] for t in at[name]) for at in (half, now))
        rows.append((f"`{name}`", "all", "", f"{whole / 1e6:.2f}", f"x {whole / before:.3g}"))
    return table(("backend", "shape", "dtype", "MB", f"against T = {T // 2}"), rows)


def kept(T: int, n_head: int, D: int) -> dict[str, list[tuple[str, str, int]]]:
    """Shape, dtype and bytes of each tensor that autograd keeps of manual's and tiled's forward."""
    import torch

    from attention import BACKENDS, Spec

    found = {}
    for name in ("manual", "tiled"):
        saved: dict[int, tuple[str, str, int]] = {}

        def note(t: torch.Tensor, saved: dict[int, tuple[str, str, int]] = saved) -> torch.Tensor:
            storage = t.untyped_storage()
            dtype = str(t.dtype).removeprefix("torch.")
            saved[storage.data_ptr()] = f"{tuple(t.shape)}", dtype, storage.nbytes()
            return t

        q, k, v = (torch.zeros(1, T, n_head, D, requires_grad=True) for _ in range(3))
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
            out = BACKENDS[name].attend(q, k, v, Spec(n_head, n_head, D, "float32"))
        found[name] = list(saved.values())
        del out  # until here each has an address of its own
    return found


@figure
def backward_flops(T: int = 512, D: int = 64) -> str:
    """Multiplications and additions of one head, as PyTorch's counter sees them, in T * T * D."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    from attention import BACKENDS, Spec
    from attention.tiled import BLOCK_M, BLOCK_N, blocks, wholly_masked

    if min(T, D) < 1:
        raise UserError("T and D must be at least 1")
    rows = []
    for name in ("manual", "tiled"):
        q, k, v = (torch.zeros(1, T, 1, D, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as forward:
            out = BACKENDS[name].attend(q, k, v, Spec(1, 1, D, "float32"))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts = [f"{c.get_total_flops() / (T * T * D):.3g}" for c in (forward, backward)]
        tiles = [
            wholly_masked(I, J, 0, None) for I in blocks(T, BLOCK_M) for J in blocks(T, BLOCK_N)
        ]
        visits = f"{tiles.count(False)} of {len(tiles)}" if name == "tiled" else "all"
        rows.append((f"`{name}`", visits, *counts))
    return table(("backend", "tiles that it computes", "forward", "backward"), rows)


# The statement of tiled.py that begins so, and the one of triton_kernels.py.
FORWARD_PAIRS = (
    ("Q_i =", "Q_i ="),
    ("O_i = torch.zeros", "O_i = tl.zeros"),
    ("l_i = torch.zeros", "l_i = tl.zeros"),
    ("m_i = torch.full", "m_i = tl.full"),
    ("S_ij = tau", "S_ij = tl.dot"),
    ("S_ij = masked", "S_ij = tl.where"),
    ("m_new =", "m_new ="),
    ("P_tilde_ij =", "P_tilde_ij = tl.exp2"),
    ("rescale =", "rescale ="),
    ("l_i = rescale", "l_i = rescale"),
    ("O_i = rescale", "O_i = tl.dot"),
    ("m_i = m_new", "m_i = m_new"),
    ("O[..., I, :] =", "store_rows(O"),
    ("L[..., I, :] =", "tl.store(L"),
)
BACKWARD_PAIRS = (
    ("D =", "dq_kernel", "D_i = tl.sum"),
    ("S_ij = tau", "dq_kernel", "S_ij = tl.dot"),
    ("S_ij = masked", "dq_kernel", "S_ij = tl.where"),
    ("P_ij =", "dq_kernel", "P_ij ="),
    ("dV_j +=", "dkdv_kernel", "dV_j = tl.dot"),
    ("dP_ij =", "dq_kernel", "dP_ij = tl.dot"),
    ("dS_ij =", "dq_kernel", "dS_ij ="),
    ("dQ[..., I, :] +=", "dq_kernel", "dQ_i = tl.dot"),
    ("dK_j +=", "dkdv_kernel", "dK_j = tl.dot"),
)


@figure
def forward_line_by_line() -> str:
    """The forward pass of tiled.py, each line above the one of triton_kernels.py."""
    return pairs([("forward_tiles", a, "forward_kernel", b) for a, b in FORWARD_PAIRS])


@figure
def backward_line_by_line() -> str:
    """The backward pass of tiled.py, each line above the one of triton_kernels.py."""
    return pairs([("backward_tiles", a, kernel, b) for a, kernel, b in BACKWARD_PAIRS])


def pairs(each: Iterable[tuple[str, str, str, str]]) -> str:
    """Statements of tiled.py and triton_kernels.py, one above the other."""
    lines: list[str] = []
    for function, begins, kernel, there in each:
        lines += [
            f"tiled   {statement('attention/tiled.py', function, begins)}",
            f"triton  {statement('attention/triton_kernels.py', kernel, there)}",
            "",
        ]
    return drawing(*lines[:-1])


def statement(file: str, function: str, begins: str) -> str:
    """The first statement of a function that begins so, as one line without its comment.

    Raises:
        UserError: there is none.
    """
    found = next((line for line in statements(file, function) if line.startswith(begins)), None)
    if found is None:
        raise UserError(f"no statement of {function} in {file} begins {begins!r}")
    return found


@cache
def statements(file: str, function: str) -> list[str]:
    """The statements of a function that hold no other, each as one line without its comment."""
    from docs.build import ROOT, source

    text = source((ROOT / file).read_text(encoding="utf-8"), function)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)]
    simple = sorted((n for n in nodes if not hasattr(n, "body")), key=lambda n: n.lineno)
    return [" ".join((ast.get_source_segment(text, n) or "").split()) for n in simple]


@figure
def generations() -> str:
    """What each fused kernel declares (Caps) about where it runs and what it takes."""
    from attention import BACKENDS
    from attention.support import place, share

    rows = []
    for name in ("sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "triton", "flash_attn_2",
                 "flash_attn_3", "flash_attn_4"):  # fmt: skip
        caps = [c for c in BACKENDS[name].caps if not c.hub_kernels and "cuda" in c.devices]
        dtypes = dict.fromkeys(d for c in caps for d in c.dtypes)
        largest = [c.head_dim_max for c in caps if c.head_dim_max]
        dropout = [c.dropout for c in caps] + [False for c in caps if c.dropout_step]
        rows.append((
            f"`{name}`", place("cuda", caps).removeprefix("cuda "), ", ".join(dtypes),
            max(largest) if largest else "any", share([c.window for c in caps]), share(dropout),
            ", ".join(dict.fromkeys(p for c in caps for p in c.packages)) or "PyTorch",
        ))  # fmt: skip
    titles = ("backend", "compute capability", "dtypes", "head_dim up to", "window", "dropout",
              "package")  # fmt: skip
    return table(titles, rows)


MACHINES = ("V100", "TITAN RTX", "A100", "RTX 4090", "H100", "B200", "RTX 5090", "Apple M3", "cpu")


@figure
def choices() -> str:
    """What `auto` takes on some machines for training GPT-2, with every package and with none."""
    from attention import BACKENDS, packages, resolve
    from attention.__main__ import Options, best_dtype
    from attention.machines import describe
    from attention.spec import dotted

    rows = []
    for text in MACHINES:
        everything = describe(text, None, "2.13.0", packages())
        nothing = replace(everything, packages={})
        spec = Options().spec(best_dtype(everything))
        auto = [f"`{resolve('auto', spec, m).backend.name}`" for m in (everything, nothing)]
        can = [
            "yes" if not BACKENDS[n].why_not(spec, everything) else ""
            for n in ("flash_attn_2", "flash_attn_3", "flash_attn_4", "sdpa_cudnn", "triton")
        ]
        capability = dotted(everything.capability) if everything.capability else ""
        rows.append((everything.name, capability, spec.dtype, *auto, *can))
    titles = ("machine", "capability", "dtype", "`auto`, all installed", "`auto`, none",
              "FA-2", "FA-3", "FA-4", "cuDNN", "Triton")  # fmt: skip
    return table(titles, rows)


@figure
def lazy_rescaling(T: int = 1024, D: int = 64, threshold: float = 8.0) -> str:
    """How often a row of O is rescaled: whenever its maximum grows, and only past a threshold."""
    import math

    import torch

    from attention import Spec
    from attention.tiled import BLOCK_M, BLOCK_N
    from viewer.tiles import trace

    if T <= BLOCK_N or D < 1 or threshold < 0:
        raise UserError(
            f"T must be more than {BLOCK_N}, one tile, D at least 1 and the threshold at least 0"
        )
    rows = []
    for spread in (1, 2, 4, 8):
        draw = torch.Generator().manual_seed(spread)
        q, k, v = (torch.randn(1, T, 1, D, generator=draw) for _ in range(3))
        told, _, _ = trace(spread * q, k, v, Spec(1, 1, D, "float32"), B_r=BLOCK_M, B_c=BLOCK_N)
        visits = eager = lazy = 0
        for tile in told:
            if tile.skipped:
                continue
            top = tile.m / math.log(2)  # the maximum so far, in units of log 2
            if tile.j == 0:
                before = m = top
                continue
            past = top - m > threshold
            visits += top.numel()
            eager += int((top > before).sum())
            lazy += int(past.sum())
            before, m = top, torch.where(past, top, m)
        share = (f"{n:,} ({n / visits:.1%})" for n in (eager, lazy))
        rows.append((spread, f"{visits:,}", *share))
    titles = ("spread of the scores", "rows of later tiles", "maximum grew",
              f"passed m by more than {threshold:g}")  # fmt: skip
    return table(titles, rows)


GPT2 = {"gpt2": (12, 12, 64), "gpt2-medium": (24, 16, 64), "gpt2-large": (36, 20, 64),
        "gpt2-xl": (48, 25, 64)}  # fmt: skip


@figure
def cache_bytes(itemsize: int = 2) -> str:
    """Bytes of keys and values that one token leaves in the cache, for GPT-2's four sizes."""
    import torch

    from inference.cache import StaticCache

    if itemsize not in (2, 4):
        raise UserError(f"itemsize must be 2 (half precision) or 4, got {itemsize}")
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    rows = []
    for name, (n_layer, n_head, D) in GPT2.items():
        caches = [StaticCache(n_layer, 1, T, n_head, D, dtype=dtype, device="meta")
                  for T in (1023, 1024)]  # fmt: skip
        token = caches[1].nbytes - caches[0].nbytes
        rows.append((name, n_layer, n_head, D, f"{token:,}", f"{1024 * token / 1e6:.1f}"))
    titles = ("model", "layers", "K/V heads", "head_dim", "bytes a token", "MB for 1,024 tokens")
    return table(titles, rows)


LENGTHS = (30, 100, 500, 1000)


@figure
def three_caches(lengths: Sequence[int] = LENGTHS, page_size: int = 16) -> str:
    """What texts of several lengths take in each cache: GPT-2 124M, bfloat16."""
    import torch

    from inference.cache import DynamicCache, PagedCache, StaticCache

    if not lengths or not 1 <= min(lengths) <= max(lengths) <= 1024 or page_size < 1:
        raise UserError("lengths must be from 1 to 1,024, and page_size at least 1")
    (n_layer, Hkv, D), B, longest = GPT2["gpt2"], len(lengths), max(lengths)
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}
    static = StaticCache(n_layer, B, 1024, Hkv, D, **like)
    dynamic = DynamicCache(n_layer, max_len=1024, pad=[longest - n for n in lengths], device="meta")
    step = dynamic.reserve(longest)
    new = torch.empty(B, longest, Hkv, D, **like)
    for layer in range(n_layer):
        step.view(layer).append(new, new)
    pages = sum(-(-n // page_size) for n in lengths)
    paged = PagedCache(n_layer, Hkv, D, n_pages=pages + 1, page_size=page_size, **like)
    for n in lengths:
        paged.pool.grow({paged.pool.new(): n})
    token = paged.nbytes // (paged.pool.n_pages * page_size)
    rows = [
        (name, f"{size // token:,}", f"{size / 1e6:.1f}", f"{sum(lengths) * token / size:.0%}")
        for name, size in (
            ("`static`", static.nbytes),
            ("`dynamic`", dynamic.nbytes),
            (f"`paged`, {page_size} tokens a page", paged.nbytes_used),
        )
    ]
    return table(("cache", "places for tokens", "MB", "filled"), rows)


TRAINING = "bench/records/2026-11-21_cpu_train"
GENERATION = "bench/records/2026-11-21_cpu_decode-caches"
SHOWN = ("manual", "tiled", "sdpa", "nanogpt")


@figure
def caches_of_a_record() -> str:
    """Generation of GPT-2 124M with and without a cache, as a record of bench_mfu.py has it."""
    from bench import records
    from docs.build import ROOT

    rows = []
    for row in records.read(ROOT / GENERATION)["rows"]:
        if row["status"] == "ok" and row["backend"] == "sdpa":
            point = row["point"]
            rows.append((
                point["B"], f"`{point['cache']}`", f"{row['tokens_per_s']:.1f}", f"{row['ms']:.1f}",
                f"{row['q1_ms']:.1f} to {row['q3_ms']:.1f}", f"{row['cache_bytes'] / 1e6:.1f}",
                f"{row['mbu']:.1%}",
            ))  # fmt: skip
    titles = ("sequences", "cache", "tok/s", "ms a token", "quartiles", "cache MB", "mbu")
    return table(titles, rows)


@figure
def mfu_of_a_record() -> str:
    """MFU computed again, step by step, from what a record of bench_mfu.py measured."""
    from bench import records
    from core import flops
    from docs.build import ROOT
    from model import GPTConfig

    content = records.read(ROOT / TRAINING)
    asked = content["settings"]
    names = ("n_layer", "n_head", "n_kv_head", "n_embd", "block_size", "bias")
    config = GPTConfig(vocab_size=content["vocab_size"], **{n: asked[n] for n in names})
    N, T = flops.n_params(config), config.block_size
    pairs = 12 * config.n_layer * config.n_head * config.head_dim
    peak = content["machine"]["peak_tflops"]
    count = [
        f"N             {N:>15,}   parameters without the position embeddings",
        f"6 N           {6 * N:>15,}   FLOP a token",
        f"12 L H Q T    {pairs * T:>15,}   attention over all {T} keys",
        f"              {pairs * flops.mean_keys(T):>15,.0f}   over the {flops.mean_keys(T)} keys "
        "that a query sees",
        f"peak          {peak * 1e12:>15,.0f}   FLOP/s ({content['machine']['peak_source']})",
    ]
    rows = []
    for row in content["rows"]:
        if row["mode"] != "train" or row["status"] != "ok" or row["backend"] not in SHOWN:
            continue
        rate = row["tokens_per_s"]
        full, causal = flops.mfu(config, T, rate, flops.Peak(peak, "measured"))
        spread = f"{row['q1_ms']:.0f} to {row['q3_ms']:.0f}"
        rows.append((
            f"`{row['backend']}`", f"{rate:,.0f}", f"{row['ms']:.0f}", spread, f"{full:.1%}",
            f"{causal:.1%}", f"{row['memory_bytes'] / 1e6:.0f}",
        ))  # fmt: skip
    titles = ("backend", "tok/s", "ms a step", "quartiles", "mfu", "mfu_causal", "MB")
    return f"{drawing(*count)}\n\n{table(titles, rows)}"


if __name__ == "__main__":
    from docs.figures import main as run  # the module under its own name holds the same figures

    exit_on_user_error(lambda: run(sys.argv[1:]))
