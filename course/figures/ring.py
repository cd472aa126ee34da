"""The figures of page 10: positions in a ring, distribution of work, time of communication."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from attention import Ring, visible
from core.gpus import datasheet_tflops
from core.settings import UserError
from course.format import of, table


def ring_of(N: int) -> list[Ring]:
    ring = [Ring() for _ in range(N)]
    for rank, process in enumerate(ring):
        process.rank, process.size = rank, N
    return ring


def ring_rounds(N: int = 4) -> str:
    """Page 10: the chunks whose keys and values are in each process at each step."""
    rows = []
    for process in ring_of(N):
        own = process.chunks(process.rank)
        held = (process.chunks((process.rank - step) % N) for step in range(N))
        rows.append((process.rank, *(f"{a} and {b}" for a, b in (own, *held))))
    titles = ("process", "Q, O, L", *(f"K, V at step {s}" for s in range(N)))
    return f"Chunks of T / {2 * N} positions, for any dtype, T, B and D:\n\n{table(titles, rows)}"


def ring_work(N: int = 4, T: int = 1024, window: int | None = None) -> str:
    """Page 10: each process's share of the visible pairs at each step, contiguous and zigzag."""
    if T % (2 * N):
        raise UserError(f"T must be a multiple of 2 N = {2 * N}, got {T}")
    at = torch.arange(T)
    seen = visible(at[:, None], at, 0, window)
    zigzag = [process.shard(at[None])[0] for process in ring_of(N)]
    rows: list[tuple[object, ...]] = []
    for name, parts in (("plain", list(at.chunk(N))), ("zigzag", zigzag)):
        pairs = [[int(seen[parts[r]][:, parts[(r - step) % N]].sum()) for step in range(N)]
                 for r in range(N)]
        share = torch.tensor(pairs) / int(seen.sum())
        cells = [tuple(f"{x:.1%}" for x in (*row, row.sum())) for row in share]
        for row, alike in groupby(range(N), cells.__getitem__):
            first, *more = alike
            rows.append((name, f"{first} to {more[-1]}" if more else first, *row))
        slowest = share.amax(dim=0)
        last = tuple(f"{x:.1%}" for x in (*slowest, slowest.sum()))
        if last not in cells:
            rows.append((name, "slowest", *last))
    titles = ("chunks", "process", *(f"step {s}" for s in range(N)), "all")
    return f"T = {T:,}, for any dtype, B and D:\n\n{table(titles, rows)}"


def ring_hides(
    tokens: Sequence[int] = (512, 1024, 2048, 4096, 16384), H: int = 32, Hkv: int = 8, D: int = 128,
    itemsize: int = 2, gpu: str = "NVIDIA H200", links: Sequence[float] = (450, 50),
) -> str:
    """Page 10: lower bounds of a step's computation and communication; links in GB/s."""
    peak = datasheet_tflops(gpu, "bfloat16")
    if peak is None:
        raise UserError(f"no peak is known for {gpu!r}")
    rate = peak[0] * 1e12
    # Products of 2 D FLOPs for each of (T / N)^2 / 2 pairs; bytes sent per element of K and V
    passes = {"forward": (2, 2 * itemsize), "backward": (5, 2 * itemsize + 2 * 4)}

    def cells(n: int, products: int, size: int) -> list[str]:
        computing = products * 2 * D * H * n**2 / 2 / rate
        times = [computing, *(size * Hkv * D * n / (link * 1e9) for link in links)]
        return [f"**{x * 1e6:,.0f}**" if x > computing else f"{x * 1e6:,.0f}" for x in times]

    rows = [(f"{n:,}", *(c for each in passes.values() for c in cells(n, *each))) for n in tokens]
    titles = ["T / N"]
    for name in passes:
        titles += [name, *(f"sent at {link:g} GB/s" for link in links)]
    least = [
        f"{size * Hkv * rate / (products * H * link * 1e9):,.0f} {name} at {link:g} GB/s"
        for link in links
        for name, (products, size) in passes.items()
    ]
    sizes = of(f"{itemsize} bytes a number", "T / N in the first column", B=1, H=H, Hkv=Hkv, D=D)
    return (
        f"{sizes}:\n\n{table(titles, rows)}\n\nMicroseconds of one step; bold: longer than "
        f"computing. Sending hides from T / N = {', '.join(least)}."
    )
