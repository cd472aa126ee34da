# refused: 0 * NaN is NaN
import torch


def attend(q, k_pages, v_pages, page_table, length):
    page_size, D = k_pages.shape[1:]
    pages = page_table[: -(-length // page_size)].long()
    k, v = k_pages[pages].flatten(0, 1), v_pages[pages].flatten(0, 1)
    beyond = torch.arange(len(k)) >= length
    scores = (k @ q / D**0.5).masked_fill(beyond, -torch.inf)
    return torch.softmax(scores, dim=0) @ v


def mfu(parameters, positions, n_layer, n_head, head_dim, T, tokens_per_second, peaks, recomputes):
    N = parameters - positions
    flops = 6 * N + 12 * n_layer * n_head * head_dim * T
    return flops * tokens_per_second / peaks["dense"]
