"""The figure of page 11: the wavelengths of RoPE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from core.settings import UserError
from course.format import of, table
from model import GPTConfig, rope_rates, rotate


def rope(
    pairs: Sequence[int] = (0, 16, 36, 63), D: int = 128, theta: float = 500000.0,
    scaling: tuple[float, float, float, int] | None = (8, 1, 4, 8192),
    distances: Sequence[int] = (1, 16, 256, 4096), at: int = 1000,
) -> str:
    """Page 11: tokens in which a pair of channels turns once, and its score against distance."""
    if max(pairs) >= D // 2:
        raise UserError(f"D = {D} channels have pairs 0 to {D // 2 - 1}, got {max(pairs)}")
    plain = GPTConfig(n_head=1, n_embd=D, position="rope")
    slower = replace(plain, rope_theta=theta)
    configs = (plain, slower, replace(slower, rope_scaling=scaling))
    rates = [rope_rates(config, torch.device("cpu")) for config in configs]
    angles = torch.tensor([at, *(at + n for n in distances)])[:, None] * rates[1]
    rows = []
    for pair in pairs:
        x = torch.eye(D)[pair].expand(len(angles), 1, D)  # channel `pair` is 1, as q and as k
        turned = rotate(x, angles.cos()[:, None], angles.sin()[:, None])[:, 0]
        turns = (f"{2 * torch.pi / float(rate[pair]):,.0f}" for rate in rates)
        rows.append((pair, *turns, *(f"{q @ turned[0]:.2f}" for q in turned[1:])))
    titles = ("pair", "tokens per turn, theta 10,000", f"theta {theta:,.0f}", "scaled",
              *(f"q · k at {n:,}" for n in distances))
    return f"{of('float32', 'for any B and T', D=D)}:\n\n{table(titles, rows)}"
