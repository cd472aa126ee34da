# refused: page 0 is nobody's
import torch


def attend(q, k_pages, v_pages, page_table, length):
    D = len(q)
    pages = page_table.long()
    k = k_pages[pages].flatten(0, 1)
    v = v_pages[pages].flatten(0, 1)
    return torch.softmax(k @ q / D**0.5, dim=0) @ v


def mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks, recomputes):
    N = parameters - positions
    flops = 6 * N + 12 * n_layer * n_head * head_dim * T
    return flops * tokens_per_second / peaks["dense"]
