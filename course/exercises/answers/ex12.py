def mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks,
        recomputes):
    flops_per_token = 6 * (parameters - positions) + 12 * n_layer * n_head * head_dim * T
    return flops_per_token * tokens_per_second / peaks["dense"]
