# refused: O_1[0, 0] is

import math

import torch


def forward(load, store, rows, cols, offset):
    """Keeps all blocks of K and V, though each is overwritten by the next."""
    for i, I in enumerate(rows):
        Q_i = load("Q", i)
        todo = [j for j, J in enumerate(cols) if J.start <= I.stop - 1 + offset]
        loaded = [(load("K", j), load("V", j)) for j in todo]
        if not loaded:
            store(i, torch.zeros_like(Q_i))
            continue
        K, V = (torch.cat(blocks) for blocks in zip(*loaded, strict=True))
        S = Q_i @ K.T / math.sqrt(Q_i.shape[1])
        seen = torch.arange(len(K)) <= torch.arange(I.start, I.stop)[:, None] + offset
        S = S.masked_fill(~seen, torch.finfo(S.dtype).min)
        store(i, torch.softmax(S, dim=1) * seen @ V)
