"""Exercise 11: RoPE."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from course.exercises.check import same
from model import GPTConfig, rope_rates, rotate

SPLIT = "a, b = x.chunk(2, dim=1)"
PAIRS = "torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)"
MISTAKES = [
    (SPLIT, "a, b = x[:, ::2], x[:, 1::2]", "A pair is channels i and i + D / 2"),
    (f"{SPLIT}\n    cos, sin = torch.cos(angle), torch.sin(angle)\n    return {PAIRS}",
     "a, b = x[:, ::2], x[:, 1::2]\n    cos, sin = torch.cos(angle), torch.sin(angle)\n"
     "    return torch.stack([a * cos - b * sin, b * cos + a * sin], dim=2).flatten(1)",
     "A pair is channels i and i + D / 2, not 2 i and 2 i + 1"),
    ("a * cos - b * sin, b * cos + a * sin", "a * cos + b * sin, b * cos - a * sin",
     "Turn from the first channel of a pair to the second"),
    ("theta ** (-torch", "theta ** (torch", "The exponent is -2 i / D, negative"),
    ("torch.arange(0, D, 2) / D", "torch.arange(0, D, 2) / D / 2", "The exponent is -2 i / D"),
    (" * theta ** (-torch.arange(0, D, 2) / D)", " * torch.ones(D // 2)",
     "Each pair has its own rate, theta ** (-2 i / D)"),
    ("a * cos - b * sin, b * cos + a * sin", "a * cos, b * cos", "The sine is missing"),
    ("torch.arange(Tk - Tq, Tk)", "torch.arange(Tq)", "Query i stands at position i + Tk - Tq"),
    ("rotate(q, torch.arange(Tk - Tq, Tk), theta) @ k.T",
     "rotate(q, torch.arange(Tk - Tq, Tk), theta) @ rotate(k, torch.arange(Tk), theta).T",
     "The keys in the cache are rotated already"),
    ("rotate(q, torch.arange(Tk - Tq, Tk), theta)", "q", "Rotate the queries"),
    (" / q.shape[1] ** 0.5", "", "Divide the scores by sqrt(D)"),
]


def check(answer: ModuleType) -> None:
    draw = torch.Generator().manual_seed(0)
    for D, theta in ((2, 10000.0), (4, 10000.0), (8, 500.0)):
        config = GPTConfig(n_head=1, n_embd=D, position="rope", rope_theta=theta)
        rates = rope_rates(config, torch.device("cpu"))

        def turned(x: Tensor, positions: Tensor, rates: Tensor = rates) -> Tensor:
            angles = positions[:, None, None] * rates
            return rotate(x[:, None], angles.cos(), angles.sin())[:, 0]

        q, k = torch.randn(2, 5, D, generator=draw)
        at = torch.tensor([0, 1, 5, 6, 30])
        case = f"positions = {at.tolist()}, D = {D}, theta = {theta:g}"
        same(answer.rotate(q.clone(), at, theta), turned(q, at), "rotate()", case)
        near = answer.rotate(q, at, theta) @ answer.rotate(k, at, theta).T
        far = answer.rotate(q, at + 100, theta) @ answer.rotate(k, at + 100, theta).T
        assert torch.allclose(near, far, atol=1e-3), f"q · k changes if all move by 100, {case}"

        keys, q = turned(k, torch.arange(5)), q[:2]
        want = turned(q, torch.arange(2) + 3) @ keys.T / D**0.5
        got = answer.scores(q.clone(), keys.clone(), theta)
        same(got, want, "scores()", f"Tq = 2, Tk = 5, D = {D}, theta = {theta:g}")
