import torch


def mask(Tq, Tk, window, segments):
    i = torch.arange(Tq)[:, None] + Tk - Tq  # the position of the query
    j = torch.arange(Tk)[None, :]
    seen = j <= i
    if window is not None:
        seen &= j > i - window
    if segments is not None:
        # A query before every key has no position, and sees nothing anyway.
        seen &= segments[i.clamp(min=0)] == segments
    return seen
