"""Exercise 12: model FLOPs utilization."""

from __future__ import annotations

import math
from types import ModuleType

import torch

from course.exercises.check import Wrong

MISTAKES = [
    ('peaks["dense"]', 'peaks["sparse"]', "Divide by the dense peak"),
    (" + 12 * n_layer * n_head * head_dim * T", "",
     "The products of attention are missing: 12 * n_layer * n_head * head_dim * T"),
    (" * head_dim * T", " * head_dim", "The products of attention grow with T"),
    ("12 * n_layer", "12", "12 * n_head * head_dim * T is of one layer"),
    ("6 * (", "2 * (", "2 operations for a parameter forward, 4 backward: 6 * parameters"),
    ("return flops", "return 100 * flops", "A fraction from 0 to 1, not percent"),
    ("12 * n_layer * n_head * head_dim * T", "6 * n_layer * n_head * head_dim * T",
     "PaLM and nanoGPT count all T keys of a query, not the visible half"),
    ("(parameters - positions)", "parameters",
     "Leave out the position embeddings: parameters - positions"),
    ("return flops_per_token", "return (4 / 3 if recomputes else 1) * flops_per_token",
     "What is recomputed does not count"),
    ("6 * (parameters", "(8 if recomputes else 6) * (parameters",
     "What is recomputed does not count"),
]


def check(answer: ModuleType) -> None:
    # GPT-2 medium at 150,000 tokens/s on an H100
    N, positions, pairs, peak = 353_774_592, 1024 * 1024, 24 * 16 * 64 * 1024, 989.4e12
    for recomputes in (False, True):
        got = answer.mfu(N + positions, positions, 24, 16, 64, 1024, 150_000.0,
                         {"dense": peak, "sparse": 2 * peak}, recomputes)
        want = (6 * N + 12 * pairs) * 150_000 / peak
        if not math.isclose(got, want, rel_tol=1e-6):
            says = f"mfu is {got:.4g}, expected {want:.4g}"
            raise Wrong(says, f"recomputes={recomputes}", torch.tensor(got).double())
