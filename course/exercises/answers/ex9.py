import math

import torch


def attend(q, k_pages, v_pages, page_table, length):
    page_size, D = k_pages.shape[1:]
    j = torch.arange(length)
    page, place = page_table[j // page_size].long(), j % page_size
    k, v = k_pages[page, place], v_pages[page, place]  # (length, D)
    return torch.softmax(k @ q / math.sqrt(D), dim=0) @ v
