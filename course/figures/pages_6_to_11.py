"""The backward pass, fused kernels, rings, RoPE; the tables of docs/PLAN.md."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import groupby
from typing import Annotated, Literal

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat
from torch.utils.flop_counter import FlopCounterMode

from attention import BACKENDS, Ring, Spec, visible
from attention.tiled import BLOCK_M, BLOCK_N, blocks, wholly_masked
from bench import plan as planned
from bench import tables
from bench.plan import Cluster, Plan
from core import flops
from core.settings import Size, UserError
from course.figures import Row, Sizes, figure, of, table
from course.figures.pages_1_to_5 import trace_of
from model import GPTConfig, rope_rates, rotate

H200 = Cluster("bfloat16", flops.Peak(989.4, "datasheet"), 989.4, 4.8e12, 141e9, 8, 450e9, 50e9)
Servers = Annotated[int, Field(gt=0, multiple_of=H200.node)]
WAYS = [("ddp", 1), ("fsdp", 1), ("hybrid", 1), ("fsdp", 8)]


def backward_flops(T: Size = 512, D: Size = 64) -> str:
    """Page 6: FLOPs of one head by PyTorch's counter, in T * T * D."""
    masked = [wholly_masked(I, J, 0, None) for I in blocks(T, BLOCK_M) for J in blocks(T, BLOCK_N)]
    visits = {"manual": "all", "tiled": f"{masked.count(False)} of {len(masked)}"}
    rows = []
    for name in visits:
        q, k, v = (torch.zeros(1, T, 1, D, requires_grad=True) for _ in range(3))
        with FlopCounterMode(display=False) as forward:
            out = BACKENDS[name].attend(q, k, v, Spec(1, 1, D, "float32"))
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        counts = {"forward": forward, "backward": backward}
        rows.append({"backend": f"`{name}`", "tiles that it computes": visits[name],
                     **{n: f"{c.get_total_flops() / (T * T * D):.3g}" for n, c in counts.items()}})
    return figure(of("float32", B=1, H=1, T=T, D=D), rows)


def lazy_rescaling(T: Size = 1024, D: Size = 64, threshold: float = 8.0) -> str:
    """Page 8: number of rescalings of a row of O, always or only past a threshold."""
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
            top = tile.m / math.log(2)  # running maximum, in log 2
            if tile.j == 0:
                before = m = top
                continue
            past = top - m > threshold
            visits += top.numel()
            eager += int((top > before).sum())
            lazy += int(past.sum())
            before, m = top, torch.where(past, top, m)
        rows.append({
            "spread of the scores": spread, "rows of later tiles": f"{visits:,}",
            "maximum grew": f"{eager:,} ({eager / visits:.1%})",
            f"passed m by more than {threshold:g}": f"{lazy:,} ({lazy / visits:.1%})",
        })
    return figure(of("float32", B=1, H=1, T=T, D=D), rows)


def ring_of(N: int) -> list[Ring]:
    ring = [Ring() for _ in range(N)]
    for rank, process in enumerate(ring):
        process.rank, process.size = rank, N
    return ring


def ring_rounds(N: Size = 4) -> str:
    """Page 10: the chunks whose keys and values are in each process at each step."""
    rows = []
    for process in ring_of(N):
        held = {"Q, O, L": process.rank}
        held |= {f"K, V at step {step}": (process.rank - step) % N for step in range(N)}
        chunks = {title: "{} and {}".format(*process.chunks(r)) for title, r in held.items()}
        rows.append({"process": process.rank, **chunks})
    return figure(f"Chunks of T / {2 * N} positions, for any dtype, T, B and D", rows)


def ring_work(N: Size = 4, T: Size = 1024, window: Size | None = None) -> str:
    """Page 10: each process's share of the visible pairs at each step, contiguous and zigzag."""
    if T % (2 * N):
        raise UserError(f"T must be a multiple of 2 N = {2 * N}, got {T}")
    at = torch.arange(T)
    seen = visible(at[:, None], at, 0, window)
    zigzag = [process.shard(at[None])[0] for process in ring_of(N)]
    titles = [*(f"step {s}" for s in range(N)), "all"]
    rows: list[Row] = []
    for name, parts in (("plain", list(at.chunk(N))), ("zigzag", zigzag)):
        pairs = [[int(seen[parts[r]][:, parts[(r - step) % N]].sum()) for step in range(N)]
                 for r in range(N)]
        share = torch.tensor(pairs) / int(seen.sum())
        *cells, last = (tuple(f"{x:.1%}" for x in (*row, row.sum()))
                        for row in (*share, share.amax(dim=0)))
        lines: list[tuple[object, tuple[str, ...]]] = []
        for row, alike in groupby(range(N), cells.__getitem__):
            first, *more = alike
            lines.append((f"{first} to {more[-1]}" if more else first, row))
        lines += [("slowest", last)] if last not in cells else []
        rows += [{"chunks": name, "process": r, **dict(zip(titles, row))} for r, row in lines]
    return figure(f"T = {T:,}, for any dtype, B and D", rows)


def ring_hides(
    tokens: Sizes = (512, 1024, 2048, 4096, 16384), H: Size = 32, Hkv: Size = 8, D: Size = 128,
    itemsize: Size = 2, gpu: str = "NVIDIA H200", links: tuple[PositiveFloat, ...] = (450, 50),
) -> str:
    """Page 10: lower bounds of a step's computation and communication; links in GB/s."""
    peak = flops.datasheet_peak(gpu, "bfloat16")
    if peak is None:
        raise UserError(f"no peak is known for {gpu!r}")
    rate = peak.tflops * 1e12
    # Products of 2 D FLOPs for each of (T / N)^2 / 2 pairs; bytes sent per element of K and V
    passes = {"forward": (2, 2 * itemsize), "backward": (5, 2 * itemsize + 2 * 4)}
    columns = [(name, link) for name in passes for link in (None, *links)]  # None: computation
    titles = [name if link is None else f"sent at {link:g} GB/s" for name, link in columns]
    rows: list[Row] = []
    for n in tokens:
        cells: dict[object, str] = {"T / N": f"{n:,}"}
        for name, link in columns:
            products, size = passes[name]
            computing = products * 2 * D * H * n**2 / 2 / rate
            seconds = computing if link is None else size * Hkv * D * n / (link * 1e9)
            bold = "**" if seconds > computing else ""
            cells[name, link] = f"{bold}{seconds * 1e6:,.0f}{bold}"
        rows.append(cells)
    least = [
        f"{size * Hkv * rate / (products * H * link * 1e9):,.0f} {name} at {link:g} GB/s"
        for link in links
        for name, (products, size) in passes.items()
    ]
    sizes = of(f"{itemsize} bytes a number", "T / N in the first column", B=1, H=H, Hkv=Hkv, D=D)
    return figure(sizes, rows, (
        "Microseconds of one step; bold: longer than computing. Sending hides from T / N = "
        f"{', '.join(least)}."
    ), ["T / N", *titles])


def rope(
    pairs: tuple[NonNegativeInt, ...] = (0, 16, 36, 63), D: Size = 128, theta: float = 500000.0,
    scaling: tuple[float, float, float, int] | None = (8, 1, 4, 8192),
    distances: tuple[int, ...] = (1, 16, 256, 4096), at: int = 1000,
) -> str:
    """Page 11: tokens in which a pair of channels turns once, and its score against distance."""
    if max(pairs) >= D // 2:
        raise UserError(f"D = {D} channels have pairs 0 to {D // 2 - 1}, got {max(pairs)}")
    plain = GPTConfig(n_head=1, n_embd=D, position="rope")
    slower = replace(plain, rope_theta=theta)
    configs = {"tokens per turn, theta 10,000": plain, f"theta {theta:,.0f}": slower,
               "scaled": replace(slower, rope_scaling=scaling)}
    rates = {title: rope_rates(c, torch.device("cpu")) for title, c in configs.items()}
    angles = torch.tensor([at, *(at + n for n in distances)])[:, None] * [*rates.values()][1]
    rows = []
    for pair in pairs:
        x = torch.eye(D)[pair].expand(len(angles), 1, D)  # channel `pair` is 1, as q and as k
        k, *qs = rotate(x, angles.cos()[:, None], angles.sin()[:, None])[:, 0]
        turns = {title: f"{2 * torch.pi / float(r[pair]):,.0f}" for title, r in rates.items()}
        scores = {f"q · k at {n:,}": f"{q @ k:.2f}" for n, q in zip(distances, qs)}
        rows.append({"pair": pair, **turns, **scores})
    return figure(of("float32", "for any B and T", D=D), rows)


def plan(what: Literal[1, 2, 3] = 1, T: Size = 8192, gpus: Servers = 16) -> str:
    """docs/PLAN.md: 1 memory, 2 bytes sent, 3 time, of GPT-2 124M on H200s."""
    model = GPTConfig(block_size=T, bias=False)
    job = Plan(model, H200, 4 * gpus, 4, residual=2)
    rows = [replace(job, parallel=way, gpus=gpus, context=N).row() for way, N in WAYS]
    return tables.markdown(planned.sections(rows)[what - 1][1])


def saved(T: Size = 8192) -> str:
    """docs/PLAN.md: bytes that a token of GPT-2 124M leaves for the backward pass."""
    rows = []
    for dtype, residual in (("float32", 4), ("bfloat16", 2)):
        model, at = GPTConfig(block_size=T, bias=False), replace(H200, dtype=dtype)
        layer, ends = Plan(model, at, 4, 4, residual=residual).per_token
        sizes = {"a layer": layer, "around them": ends, "of 12 layers": 12 * layer + ends,
                 "with gradient checkpointing": 12 * residual * 768 + layer + ends}
        rows.append({"dtype": dtype, **{title: f"{n:,}" for title, n in sizes.items()}})
    return table(rows)
