"""The figures of pages 6 and 8: the backward pass, fused kernels."""

from __future__ import annotations

import math

import torch
from torch.utils.flop_counter import FlopCounterMode

from attention import BACKENDS, Spec
from attention.tiled import BLOCK_M, BLOCK_N, blocks, wholly_masked
from core.settings import UserError
from course.figures.trace import trace_of
from course.format import of, table


def backward_flops(T: int = 512, D: int = 64) -> str:
    """Page 6: FLOPs of one head by PyTorch's counter, in T * T * D."""
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
    titles = ("backend", "tiles that it computes", "forward", "backward")
    return f"{of('float32', B=1, H=1, T=T, D=D)}:\n\n{table(titles, rows)}"


def lazy_rescaling(T: int = 1024, D: int = 64, threshold: float = 8.0) -> str:
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
              f"passed m by more than {threshold:g}")
    return f"{of('float32', B=1, H=1, T=T, D=D)}:\n\n{table(titles, rows)}"
