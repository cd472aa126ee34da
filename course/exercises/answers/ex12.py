"""An answer to exercise 12: PaLM's formula."""


def mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks,
        recomputes):
    """Model FLOPs utilization, a fraction of the dense peak; what is recomputed does not count."""
    flops_per_token = 6 * (parameters - positions) + 12 * n_layer * n_head * head_dim * T
    return flops_per_token * tokens_per_second / peaks["dense"]
