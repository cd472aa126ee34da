"""int8 weights for linear layers and head.

W[n, k]  ~  scale[n] * q[n, k]      q int8, scale[n] = max_k |W[n, k]| / 127 in bfloat16
"""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from core.loss import IGNORE, Head

FEW_ROWS = 16  # above, widening the weights first costs less


def convert(model: nn.Module, head: Tensor) -> None:
    """Quantize the linear layers, and `head` (V, C) for the head: a tied embedding stays. Raises
    ValueError, before anything changes."""
    if head.device.type not in ("cpu", "cuda"):
        raise ValueError(f"int8 needs a CPU or CUDA, got {head.device.type}")
    weights = [head, *(m.weight for m in model.modules() if isinstance(m, nn.Linear))]
    if got := {w.dtype for w in weights} - {torch.float32, torch.bfloat16}:
        raise ValueError(f"int8 needs float32 or bfloat16, got {got.pop()}")
    if odd := {k for w in weights if (k := w.shape[1]) % 16}:  # the kernel loads 16 at a time
        raise ValueError(f"int8 needs layers of a multiple of 16 inputs, got {min(odd)}")
    model.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            q, scale = quantize(module.weight)
            module.weight = nn.Parameter(q, requires_grad=False)
            module.register_buffer("scale", scale, persistent=False)
            module.__class__ = Int8Linear
        elif isinstance(module, Head):
            module.weight = None
            for name, t in zip(("q", "scale"), quantize(head), strict=True):
                module.register_buffer(name, t, persistent=False)
            module.__class__ = Int8Head


def parameters(model: nn.Module) -> int:
    stored = *model.parameters(), *model.buffers()
    return sum(t.numel() for t in stored if t.dtype == torch.int8)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(N, K) in any float -> q (N, K) int8 and scale (N,) bfloat16."""
    w = weight.detach().float()
    largest = w.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny * 2**16)
    scale = (largest / 127).bfloat16()  # off by 1/256 at most, and 127 * (1 + 1/256) rounds to 127
    return (w / scale.float()[:, None]).round_().to(torch.int8), scale


class Int8Linear(nn.Linear):
    scale: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return int8_linear(x, self.weight, self.scale, self.bias)


class Int8Head(Head):
    q: Tensor
    scale: Tensor

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return int8_linear(x, self.q, self.scale)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        logits = self(x, weight).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORE)


def int8_linear(x: Tensor, q: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K) times (scale * q).T -> (..., N) in x's dtype."""
    rows = x.reshape(-1, x.shape[-1])
    if x.device.type == "cpu":
        rows = rows.bfloat16()
        if len(rows) <= FEW_ROWS:
            y = torch.ops.aten._weight_int8pack_mm(rows.contiguous(), q, scale)
        else:  # float32 inside, as the kernel
            y = (F.linear(rows.to(x.dtype), q.to(x.dtype)) * scale.to(x.dtype)).bfloat16()
    elif len(rows) == 1 and torch.compiler.is_compiling():  # a fused reduction
        y = (rows.float() * q).sum(dim=1)[None] * scale
    else:
        y = F.linear(rows, q.to(x.dtype)) * scale.to(x.dtype)
    y = y.to(x.dtype).view(*x.shape[:-1], len(q))
    return y if bias is None else y + bias
