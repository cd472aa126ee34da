# refused: counts what is computed again
import torch


def attend(q, k_pages, v_pages, page_table, length):
    page_size, D = k_pages.shape[1:]
    pages = page_table[: -(-length // page_size)].long()
    k = k_pages[pages].flatten(0, 1)[:length]
    v = v_pages[pages].flatten(0, 1)[:length]
    return torch.softmax(k @ q / D**0.5, dim=0) @ v


def mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks, recomputes):
    N = parameters - positions
    passes = 4 if recomputes else 3
    flops = passes * (2 * N + 4 * n_layer * n_head * head_dim * T)
    return flops * tokens_per_second / peaks["dense"]
