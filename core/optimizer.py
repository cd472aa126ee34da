"""AdamW, its learning rate, and an update that clips and checks without waiting for the device.

`config` is train.py's TrainConfig.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from core.parallel import whole


def learning_rate(step: int, config: Any) -> float:
    """Linear warm-up, cosine decay to min_lr, then flat; step counts from 0. Without decay_lr the
    rate is constant, as in nanoGPT."""
    if not config.decay_lr:
        return config.learning_rate
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    last = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= last:
        return low
    done = (step - config.warmup_iters) / (last - config.warmup_iters)
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - low)


def schedule_warnings(config: Any) -> list[str]:
    """Return a warning if the schedule does not reach learning_rate, or min_lr by a decay."""
    rate, warm_up, steps = config.learning_rate, config.warmup_iters, config.max_iters
    last = steps if config.lr_decay_iters is None else config.lr_decay_iters
    if not config.decay_lr or config.eval_only:
        return []
    found = []
    if warm_up >= steps:
        found += [
            f"--warmup_iters={warm_up} of --max_iters={steps}: learning_rate={rate} is not reached"
        ]
    elif last <= warm_up:
        found += [f"--lr_decay_iters={last} is within --warmup_iters={warm_up}: no decay to min_lr"]
    if (config.min_lr or 0) > rate:
        found += [f"--min_lr={config.min_lr} is above --learning_rate={rate}: the rate rises"]
    return [f"WARNING: {line}" for line in found]


def build_optimizer(model: nn.Module, config: Any, device: torch.device) -> torch.optim.AdamW:
    """AdamW, fused on CPU and CUDA, that decays the matrices, but no biases and norm gains."""
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas, fused = (config.beta1, config.beta2), device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)


def update(
    optimizer: torch.optim.AdamW,
    scaler: torch.amp.GradScaler,
    loss: Tensor,
    clip: float,
    found_inf: Tensor,
) -> None:
    """Clip the gradients to the global norm `clip`, and step; not if anything is not finite.

    The fused AdamW takes a factor and a flag, made for GradScaler: clipping needs no pass over the
    gradients, and nothing waits for the device.

    Args:
        loss: float32 ().
        clip: 0 disables clipping.
        found_inf: float32 (), set to 1 for good when the loss or a gradient is not finite. In
            float16 only the loss counts: a gradient only lowers the loss scale.
    """
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        found_inf.copy_(torch.maximum(found_inf, (~loss.isfinite()).float()))
        scaler.step(optimizer)  # leaves the weights alone where a gradient is not finite
        scaler.update()
        return
    grads = [p.grad for p in params]
    norm = whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
    found_inf.copy_(torch.maximum(found_inf, (~(loss.isfinite() & norm.isfinite())).float()))
    divisor = (norm / clip).clamp(min=1.0) if clip else None
    if optimizer.defaults["fused"]:
        optimizer.grad_scale, optimizer.found_inf = divisor, found_inf  # type: ignore[attr-defined]
        optimizer.step()
    elif not found_inf:
        if divisor is not None:
            torch._foreach_div_(grads, divisor)
        optimizer.step()
