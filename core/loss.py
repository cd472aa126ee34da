"""Cross entropy of x @ weight.T in chunks: the forward pass computes loss and both gradients,
(softmax - onehot) / n, and stores no logits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention.function import once
from attention.machine.system import autocast_dtype, outside_a_trace
from attention.tiled import blocks

IGNORE = -1


class Head(nn.Module):
    """Its weights (V, C) are its own, or the token embedding's."""

    def __init__(self, shape: tuple[int, int] | None = None) -> None:
        super().__init__()
        self.weight = None if shape is None else nn.Parameter(torch.empty(shape))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x (..., C), weight (V, C) -> (..., V) logits."""
        return F.linear(x, weight)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """x (B, T, C), weight (V, C), targets (B, T) int64 -> the mean loss, float32 ()."""
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten())


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """x (N, C), weight (V, C), targets (N,) int64 -> the mean in nats, float32 (), or float64 as x.
    All targets ignored: NaN with zero gradients, as F.cross_entropy."""
    dtype = autocast_dtype(x.device.type) or x.dtype
    # ctx.needs_input_grad is True under no_grad too.
    want_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    # For a second derivative to fail; views would keep x in memory.
    empty = x[:0].clone(), weight[:0].clone()
    return _LinearCrossEntropy.apply(x, weight, targets, dtype, want_grad, *empty)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, dtype: torch.dtype,
                want_grad: bool, empty_x: Tensor, empty_w: Tensor) -> Tensor:  # fmt: skip
        N, V = x.shape[0], weight.shape[0]
        rows = chunk_rows(N, V, x.device.type, dtype)
        # Few rows are faster in oneDNN's bfloat16.
        product_rows = 512 if x.device.type == "cpu" and dtype == torch.bfloat16 else rows
        wide = torch.promote_types(dtype, torch.float32)
        x_, w = x.to(dtype), weight.to(dtype)
        counted = (targets != IGNORE).view(N)  # (N,)
        target = targets.masked_fill(~counted, 0)[:, None]  # (N, 1)
        dx = torch.empty_like(x_) if want_grad else None
        dw = torch.zeros_like(w) if want_grad and not N else None
        total = torch.zeros((), dtype=wide, device=x.device)
        with torch.autocast(x.device.type, enabled=False):
            for c in blocks(N, rows):
                logits = x_[c] @ w.t()  # (rows, V)
                loss, dlogits = _cross_entropy(logits, target[c], counted[c], wide, want_grad)
                total += loss
                if dx is None:
                    continue
                for p in blocks(len(dlogits), product_rows):
                    torch.mm(dlogits[p], w, out=dx[c][p])
                if dw is None:
                    dw = dlogits.t() @ x_[c]  # (V, C)
                elif dtype == wide:
                    dw.addmm_(dlogits.t(), x_[c])
                else:
                    dw = dw.to(wide).add_(dlogits.t() @ x_[c])
        n = counted.sum()
        ctx.save_for_backward(dx, dw, n, empty_x, empty_w)
        ctx.dtypes = x.dtype, weight.dtype
        return total / n

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw, n, *empty = ctx.saved_tensors
        # Not in forward: float16 gradients would underflow. In float32: float16 has no 65536.
        scale = grad.detach() / n.clamp(min=1)
        wide = torch.promote_types(dx.dtype, torch.float32)
        dx, dw = (d.to(wide).mul_(scale).to(t) for d, t in zip((dx, dw), ctx.dtypes, strict=True))
        return *once(2, dx, dw, grad, *empty), *[None] * 5


def _cross_entropy(logits: Tensor, target: Tensor, counted: Tensor, wide: torch.dtype,
                   want_grad: bool) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sum, and its gradient in the logits' dtype (half precision on a CPU: in place), or logits."""
    compiling, at_a_time = torch.compiler.is_compiling(), None
    if logits.device.type == "cpu" and logits.dtype != wide and not compiling:
        at_a_time = max(1, 2**20 // logits.shape[1])
    total = torch.zeros((), dtype=wide, device=logits.device)
    for r in blocks(len(logits), at_a_time or len(logits)):
        logp = F.log_softmax(logits[r], dim=-1, dtype=wide)  # (rows, V)
        total -= logp.gather(1, target[r])[:, 0].mul(counted[r]).sum()
        if not want_grad:
            continue
        if compiling:  # a comparison fuses; a scatter would not
            onehot = torch.arange(logits.shape[1], device=logits.device) == target[r]
            dlogits = torch.where(onehot, logp.exp() - 1, logp.exp())
        else:
            dlogits = logp.exp_()
            dlogits.scatter_add_(1, target[r], dlogits.new_full((), -1.0).expand(len(logp), 1))
        dlogits = dlogits.mul_(counted[r, None])
        if at_a_time is None:
            return total, dlogits.to(logits.dtype)
        logits[r] = dlogits
    return total, logits


def chunk_rows(N: int, V: int, device: str, dtype: torch.dtype = torch.float32,
               memory: float | None = None) -> int:  # fmt: skip
    """Rows of logits in 1/16 of a GPU's memory (bytes) or 4 GB; in a CPU's caches."""
    if device != "cpu":  # 8 bytes an element
        budget = min(int(memory or gpu_memory()) // 128, 2**29)
    else:
        budget = 2**26 if dtype == torch.bfloat16 else 2**24  # 128 MB, 64 MB
    most = max(1, min(N, budget // V))
    if dtype == torch.float16:  # a sum over more rows could pass 65504
        most = min(most, 4096)
    if most == N or most < 128:
        return most
    # Equal chunks: products of few rows, or of an odd number, are slow.
    least = -(-N // (most - most % 128))
    parts = next((n for n in range(least, 2 * least) if N % (128 * n) == 0), least)
    return -(-N // (128 * parts)) * 128


@outside_a_trace
def gpu_memory() -> int:
    """Total bytes: free memory varies."""
    if not torch.cuda.is_available():
        return 2**35
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
