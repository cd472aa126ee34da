"""Weights and optimizer state as one flat dict of plain tensors or DTensors (--parallel=fsdp).

{"model.<name>": weight, "optimizer.<name>.exp_avg": ..., ...}
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from checkpoint.store import check_shapes, load_weights, read_file, shapes
from core.parallel import is_sharded, whole
from model import GPT


def gathered(model: GPT) -> GPT:
    """An unsharded model, a copy if needed. All processes must call it."""
    if model.ring is None and not is_sharded(model):
        return model
    alone = GPT(model.config, model.policy)
    load_weights(alone, {k: whole(t) for k, t in model.state_dict().items()}, "this run")
    return alone.to(model.transformer.wte.weight.device)


def numbers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The number that optimizer.state_dict() gives each parameter."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    number = {id(p): i for i, p in enumerate(params)}
    return {name: number[id(p)] for name, p in model.state_dict(keep_vars=True).items()}


def tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Weights and optimizer state, which is created as in AdamW's first step if it is empty."""
    flat: dict[str, Tensor] = {}
    for name, p in model.state_dict(keep_vars=True).items():
        flat[f"model.{name}"] = weight = p.detach()
        if not (state := optimizer.state[p]):
            device = p.device if optimizer.defaults["fused"] else "cpu"
            state["step"] = torch.zeros((), device=device)
            state |= {key: torch.zeros_like(weight) for key in ("exp_avg", "exp_avg_sq")}
        flat |= {f"optimizer.{name}.{key}": value for key, value in state.items()}
    return flat


def read_shards_into(targets: dict[str, Tensor], folder: Path) -> None:
    from checkpoint import shards

    check_shapes(shapes(targets), read_file(folder, shards.shapes), str(folder))
    read_file(folder, lambda path: shards.read(path, targets))


def read_whole_into(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path, state: dict[int, Any]
) -> None:
    """Fill from a one-file checkpoint and `state`, the optimizer's state by parameter number."""
    path, targets = folder / "model.safetensors", tensors(model, optimizer)

    def read(path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            sources = {f"model.{name}": file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            saved = {name: tuple(s.get_shape()) for name, s in sources.items()}
            own = {n: s for n, s in shapes(targets).items() if n.startswith("model.")}
            check_shapes(own, saved, str(path))
            for name, number in numbers(model, optimizer).items():
                moments = state.get(number, {})  # empty before the first step
                sources |= {f"optimizer.{name}.{key}": value for key, value in moments.items()}
            for name in sources.keys() & targets.keys():
                fill(targets[name], sources[name])

    read_file(path, read)


def fill(target: Any, source: Any) -> None:
    """Copy a tensor or slices of a file into `target`: for a DTensor, only its local part."""
    part: tuple[slice, ...] = (slice(None),) * target.dim()
    if hasattr(target, "placements"):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as find

        shape, at = find(target.shape, target.device_mesh, target.placements)
        part = tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))
        target = target.to_local()
    if target.numel():
        target.copy_(source[part])
