# refused: softmax(s)[0] is NaN

import math

import torch
from torch import Tensor


def softmax(s: Tensor) -> Tensor:
    """s: (T,) scores. Returns (T,) weights that sum to 1."""
    e = torch.exp(s - s.abs().max())
    return e / e.sum()


def attend(q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """q: (D,), K and V: (T, D). Returns (D,)."""
    return softmax(K @ q / math.sqrt(len(q))) @ V
