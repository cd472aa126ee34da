"""AdamW, Muon, learning rates, and an update that does not wait for the device."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.profiler import record_function

from core import profile
from core.cpu.matmul import why_not_bfloat16
from core.parallel import deal, local, whole

Config = Any  # TrainConfig, or the course's Task
Group = dict[str, Any]

FLAT = 0.3  # of the steps, before a linear decay


def learning_rate(step: int, config: Config) -> float:
    """Linear warm-up, then cosine decay to min_lr; decay_lr="linear": flat, then a line."""
    if not config.decay_lr:
        return config.learning_rate
    low = config.learning_rate / 10 if config.min_lr is None else config.min_lr
    last = config.max_iters if config.lr_decay_iters is None else config.lr_decay_iters
    if step < config.warmup_iters:
        return config.learning_rate * (step + 1) / (config.warmup_iters + 1)
    if step >= last:
        return low
    if config.decay_lr == "linear":
        left = min(1.0, (last - step) / ((1 - FLAT) * last))
        return low + left * (config.learning_rate - low)
    done = (step - config.warmup_iters) / (last - config.warmup_iters)
    return low + 0.5 * (1 + math.cos(math.pi * done)) * (config.learning_rate - low)


def schedule_warnings(config: Config) -> list[str]:
    if not config.decay_lr or config.eval_only:
        return []
    last, warm, end = config.max_iters - 1, config.warmup_iters, config.lr_decay_iters
    highest = max(learning_rate(min(last, step), config) for step in (max(0, warm - 1), warm))
    if highest < (1 - 1e-9) * config.learning_rate:
        names = ("learning_rate", "warmup_iters", "lr_decay_iters", "max_iters")
        why = ", ".join(f"--{name}={getattr(config, name)}" for name in names)
        return [f"WARNING: the highest learning rate is {highest:.3g} ({why})"]
    if end is not None and end < config.max_iters:
        return [f"WARNING: --lr_decay_iters={end} < --max_iters={config.max_iters}"]
    if (config.min_lr or 0) > config.learning_rate:
        return [f"WARNING: --min_lr={config.min_lr} > --learning_rate={config.learning_rate}"]
    return []


def set_learning_rate(optimizer: torch.optim.Optimizer, step: int, config: Config) -> float:
    """Return AdamW's rate, or that of Muon's matrices."""
    rate = learning_rate(step, config)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("factor", 1.0)
    return next((group["lr"] for group in muon_only(optimizer)), rate)


def build_optimizer(model: Any, config: Config, device: torch.device,
                    processes: int = 1) -> torch.optim.AdamW:  # fmt: skip
    """AdamW that decays matrices only, or Muon; processes: copies of the model (DDP)."""
    fused = device.type in ("cuda", "cpu")
    how: Group = {"lr": config.learning_rate, "betas": (config.beta1, config.beta2), "fused": fused}
    if getattr(config, "optimizer", "adamw") == "muon":
        muon = Muon(muon_groups(model, config), **how)
        half = device.type == "cpu" and config.dtype == "bfloat16"
        if device.type == "cuda" or (half and not why_not_bfloat16(model.config.n_embd)):
            muon.dtype = torch.bfloat16
        if processes > 1:
            muon.mesh = dist.init_device_mesh(device.type, (processes,))
        return muon
    params = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **how)


def empty_state(optimizer: torch.optim.Optimizer, p: Tensor) -> dict[str, Tensor]:
    weight = p.detach()
    if any(p is q for group in muon_only(optimizer) for q in group["params"]):
        return {"momentum_buffer": torch.zeros_like(weight)}
    step = torch.zeros((), device=p.device if optimizer.defaults["fused"] else "cpu")
    return {"step": step} | {k: torch.zeros_like(weight) for k in ("exp_avg", "exp_avg_sq")}


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{"model.<name>": weight, "optimizer.<name>.exp_avg": state, ...}."""
    flat: dict[str, Tensor] = {}
    for name, p in model.state_dict(keep_vars=True).items():
        flat[f"model.{name}"] = p.detach()
        if not (state := optimizer.state[p]):
            state |= empty_state(optimizer, p)
        flat |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return flat


# ----------------------------------------------------------------------------- Muon

MOMENTUM = 0.95
NEWTON_SCHULZ = 2.0, -1.5, 0.5  # x -> a x + b x^3 + c x^5 brings singular values to 1
ITERATIONS = 12
ADAMW = {"weight_decay": 1e-3, "eps": 1e-10}


def muon_groups(model: Any, config: Config) -> list[Group]:
    """The blocks' matrices by shape, then the rest. "rows": of matrices joined in a parameter."""
    c, rates = model.config, (*config.muon_rates, *[config.learning_rate] * 3)
    q, kv = c.n_head * c.head_dim, c.kv_heads * c.head_dim
    joined: dict[str, tuple[int, ...]] = {"attn.c_attn.weight": (q, kv, kv)}
    if c.mlp == "swiglu":
        joined["mlp.c_fc.weight"] = (c.hidden, c.hidden)
    groups: dict[tuple[object, ...], Group] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        kind = 3 if p.dim() < 2 else 2 if name.startswith("lm_head") else 1
        how: Group = {**ADAMW}
        if p.dim() == 2 and ".h." in name:
            rows = joined.get(name.split(".", 3)[3], (p.shape[0],))
            kind, how = 0, {"weight_decay": config.weight_decay, "rows": rows}
        how |= {"lr": rates[kind], "factor": rates[kind] / config.learning_rate, "params": []}
        key = kind, how.get("rows"), p.shape if kind == 0 else None
        groups.setdefault(key, how)["params"].append(p)
    return list(groups.values())


def muon_only(optimizer: torch.optim.Optimizer) -> list[Group]:
    return [group for group in optimizer.param_groups if "rows" in group]


def about(optimizer: torch.optim.Optimizer) -> list[str]:
    flops = 0
    for group in muon_only(optimizer):
        n, C = len(group["params"]), group["params"][0].shape[1]
        for r, c in (sorted((rows, C)) for rows in group["rows"]):
            flops += n * ITERATIONS * (4 * r * r * c + 2 * r**3)
    cost = f"{flops / 1e9:,.4g} GFLOP a step, which MFU does not count"
    return [f"optimizer: Muon for the blocks' matrices ({cost}), AdamW for the rest"] * bool(flops)


class Muon(torch.optim.AdamW):
    """Muon for the groups with "rows", AdamW for the others.

    Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) moves a matrix by its momentum with
    all singular values set to 1; each process orthogonalizes some matrices.
    """

    dtype: torch.dtype | None = None  # of Newton-Schulz; None: of the weights
    mesh: dist.DeviceMesh | None = None  # processes with a copy of the weights; None: one, or FSDP

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        # As in fused AdamW: divisor of gradients, flag to change nothing.
        divisor, found_inf = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        shares, returns, groups = [], [], muon_only(self)
        for group in groups:
            params = group["params"]
            for p in params:
                self.state[p] = self.state[p] or empty_state(self, p)
            momenta = [local(self.state[p]["momentum_buffer"]) for p in params]
            grads = torch.stack([local(p.grad) for p in params])
            if divisor is not None:
                grads /= divisor
            if found_inf is not None:
                grads = torch.where(found_inf > 0, torch.stack(momenta), grads)
            torch._foreach_lerp_(momenta, grads.unbind(), 1 - MOMENTUM)
            nesterov = grads.lerp_(torch.stack(momenta), MOMENTUM).to(self.dtype or grads.dtype)
            share, give_back = deal(nesterov, params[0], self.mesh)
            shares += share.split(group["rows"], dim=1)
            returns.append(give_back)
        factors = iter(orthogonal(shares))
        for group, give_back in zip(groups, returns):
            parts = [x * max(1, x.shape[1] / x.shape[2]) ** 0.5
                     for _, x in zip(group["rows"], factors)]  # fmt: skip
            rate = group["lr"] if found_inf is None else group["lr"] * (found_inf == 0)
            weights = [local(p) for p in group["params"]]
            torch._foreach_mul_(weights, 1 - rate * group["weight_decay"])
            update = give_back(torch.cat(parts, dim=1)).to(weights[0].dtype) * rate
            torch._foreach_sub_(weights, update.unbind())
        every = self.param_groups
        self.param_groups = [group for group in every if "rows" not in group]
        super().step()
        self.param_groups = every


def orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """U V^T of each matrix U S V^T, (n, rows, columns) each."""
    wide = [x.mT if x.shape[1] > x.shape[2] else x for x in matrices]
    by_shape: dict[torch.Size, list[int]] = {}
    for i, x in enumerate(wide):
        by_shape.setdefault(x.shape[1:], []).append(i)
    a, b, c = NEWTON_SCHULZ
    for which in by_shape.values():
        x = torch.cat([wide[i] for i in which])
        x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
        for _ in range(ITERATIONS):
            gram = x @ x.mT
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        for i, part in zip(which, x.split([len(wide[i]) for i in which])):
            wide[i] = part.mT if matrices[i].shape[1] > matrices[i].shape[2] else part
    return wide


# ----------------------------------------------------------------------------- the update


@record_function(profile.UPDATE)
def update(optimizer: torch.optim.AdamW, scaler: torch.amp.GradScaler, loss: Tensor, clip: float,
           found_inf: Tensor) -> None:  # fmt: skip
    """Clip gradients to the global norm `clip` (0: off), and step. Where the loss or a gradient is
    not finite, no weight changes and found_inf, float32 (), becomes 1; in float16 a gradient only
    lowers the loss scale."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if scaler.is_enabled():
        scaler.unscale_(optimizer)
        if clip:
            torch.nn.utils.clip_grad_norm_(params, clip)
        found_inf.copy_(torch.maximum(found_inf, (~loss.isfinite()).float()))
        scaler.step(optimizer)
        scaler.update()
        return
    grads = [p.grad for p in params]
    norm = whole(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads))))
    found_inf.copy_(torch.maximum(found_inf, (~(loss.isfinite() & norm.isfinite())).float()))
    divisor = (norm / clip).clamp(min=1.0).float() if clip else None
    if optimizer.defaults["fused"]:
        optimizer.grad_scale, optimizer.found_inf = divisor, found_inf  # type: ignore[attr-defined]
        optimizer.step()
    elif not found_inf:
        if divisor is not None:
            torch._foreach_div_(grads, divisor)
        optimizer.step()
