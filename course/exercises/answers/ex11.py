import torch


def rotate(x, positions, theta):
    D = x.shape[1]
    angle = positions[:, None] * theta ** (-torch.arange(0, D, 2) / D)  # (T, D / 2)
    a, b = x.chunk(2, dim=1)
    cos, sin = torch.cos(angle), torch.sin(angle)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=1)


def scores(q, k, theta):
    Tq, Tk = len(q), len(k)
    return rotate(q, torch.arange(Tk - Tq, Tk), theta) @ k.T / q.shape[1] ** 0.5
