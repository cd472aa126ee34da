"""The figures of pages 6 to 9: the backward pass, fused kernels, caches, MFU."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import BACKENDS, Spec, packages, resolve
from attention.__main__ import Options, best_dtype
from attention.gpus import describe
from attention.spec import dotted
from attention.tiled import BLOCK_M, BLOCK_N, blocks, wholly_masked
from bench import records
from core import flops
from core.settings import UserError
from docs.figures_basics import kept
from docs.format import drawing, table
from docs.source import ROOT, source
from inference.cache import DynamicCache, PagedCache, StaticCache
from model import GPTConfig
from viewer.tiles import trace_of


def kept_for_backward(T: int = 1024, n_head: int = 12, D: int = 64) -> str:
    """What manual and tiled keep of one layer for the backward pass: every tensor, in float32."""
    if T < 2:
        raise UserError("T must be at least 2")
    half, now = kept(T // 2, n_head, D), kept(T, n_head, D)
    rows: list[tuple[Any, ...]] = []
    for name, tensors in now.items():
        for n, (shape, dtype, size) in enumerate(tensors):
            grew = size / half[name][n][2]
            rows.append((f"`{name}`", shape, dtype, f"{size / 1e6:.2f}", f"x {grew:.3g}"))
        before, whole = (sum(t[2] for t in at[name]) for at in (half, now))
        rows.append((f"`{name}`", "all", "", f"{whole / 1e6:.2f}", f"x {whole / before:.3g}"))
    return table(("backend", "shape", "dtype", "MB", f"against T = {T // 2}"), rows)


def backward_flops(T: int = 512, D: int = 64) -> str:
    """Multiplications and additions of one head, as PyTorch's counter sees them, in T * T * D."""
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
    ("P_ij =", "dq_kernel", "P_ij ="),
    ("dV_j +=", "dkdv_kernel", "dV_j = tl.dot"),
    ("dP_ij =", "dq_kernel", "dP_ij = tl.dot"),
    ("dS_ij =", "dq_kernel", "dS_ij ="),
    ("dQ[..., I, :] +=", "dq_kernel", "dQ_i = tl.dot"),
    ("dK_j +=", "dkdv_kernel", "dK_j = tl.dot"),
)


def forward_line_by_line() -> str:
    """The forward pass of tiled.py, each line above the one of triton_kernels.py."""
    return pairs([("forward_tiles", a, "forward_kernel", b) for a, b in FORWARD_PAIRS])


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
    """The first statement of a function that begins so, as one line without its comment."""
    found = next((line for line in statements(file, function) if line.startswith(begins)), None)
    if found is None:
        raise UserError(f"no statement of {function} in {file} begins {begins!r}")
    return found


@cache
def statements(file: str, function: str) -> list[str]:
    """The statements of a function that hold no other, each as one line without its comment."""
    text = source((ROOT / file).read_text(encoding="utf-8"), function)
    nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.stmt)]
    simple = sorted((n for n in nodes if not hasattr(n, "body")), key=lambda n: n.lineno)
    return [" ".join((ast.get_source_segment(text, n) or "").split()) for n in simple]


MACHINES = ("V100", "TITAN RTX", "A100", "RTX 4090", "H100", "B200", "RTX 5090", "Apple M3", "cpu")


def choices() -> str:
    """What `auto` takes on some machines for training GPT-2, with every package and with none."""
    rows = []
    for text in MACHINES:
        everything = describe(text, "2.13.0", packages())
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


def lazy_rescaling(T: int = 1024, D: int = 64, threshold: float = 8.0) -> str:
    """How often a row of O is rescaled: whenever its maximum grows, and only past a threshold."""
    if T <= BLOCK_N or threshold < 0:
        raise UserError(f"T must be more than {BLOCK_N}, one tile, and the threshold at least 0")
    rows = []
    for spread in (1, 2, 4, 8):
        draw = torch.Generator().manual_seed(spread)
        q, k, v = (torch.randn(1, T, 1, D, generator=draw) for _ in range(3))
        spec = Spec(1, 1, D, "float32")
        trace, _ = trace_of(spread * q, k, v, spec, B_r=BLOCK_M, B_c=BLOCK_N)
        visits = eager = lazy = 0
        for tile in trace:
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
HALF: dict[str, Any] = {"dtype": torch.bfloat16, "device": "meta"}


def cache_bytes() -> str:
    """Bytes of keys and values that one token leaves in the cache, for GPT-2's four sizes."""
    rows = []
    for name, (n_layer, n_head, D) in GPT2.items():
        less, more = (StaticCache(n_layer, 1, T, n_head, D, **HALF) for T in (1023, 1024))
        token = more.nbytes - less.nbytes
        rows.append((name, n_layer, n_head, D, f"{token:,}", f"{1024 * token / 1e6:.1f}"))
    titles = ("model", "layers", "K/V heads", "head_dim", "bytes a token", "MB for 1,024 tokens")
    return table(titles, rows)


LENGTHS = (30, 100, 500, 1000)


def three_caches(lengths: Sequence[int] = LENGTHS, page_size: int = 16) -> str:
    """What texts of several lengths take in each cache: GPT-2 124M, bfloat16."""
    if not lengths or not 1 <= min(lengths) <= max(lengths) <= 1024:
        raise UserError("lengths must be from 1 to 1,024")
    (n_layer, Hkv, D), B, longest = GPT2["gpt2"], len(lengths), max(lengths)
    static = StaticCache(n_layer, B, 1024, Hkv, D, **HALF)
    dynamic = DynamicCache(n_layer, max_len=1024, pad=[longest - n for n in lengths], device="meta")
    step = dynamic.reserve(longest)
    new = torch.empty(B, longest, Hkv, D, **HALF)
    for layer in range(n_layer):
        step.layer(layer).append(new, new)
    pages = sum(-(-n // page_size) for n in lengths)
    paged = PagedCache(n_layer, Hkv, D, n_pages=pages + 1, page_size=page_size, **HALF)
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


def caches_of_a_record() -> str:
    """Generation of GPT-2 124M with and without a cache, as a record of bench_mfu.py has it."""
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


def mfu_of_a_record() -> str:
    """MFU computed again, step by step, from what a record of bench_mfu.py measured."""
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
