"""An answer to exercise 12: PaLM's formula."""

from __future__ import annotations


def mfu(parameters: int, positions: int, n_layer: int, n_head: int, head_dim: int, T: int,
        tokens_per_second: float, peaks: dict[str, float], recomputes: bool) -> float:
    """Model FLOPs utilization, a fraction of the dense peak; what is recomputed does not count."""
    flops_per_token = 6 * (parameters - positions) + 12 * n_layer * n_head * head_dim * T
    return flops_per_token * tokens_per_second / peaks["dense"]
