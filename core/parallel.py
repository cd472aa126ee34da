"""A model in copies (DDP) or shards along the first dimension (FSDP2, as ZeRO-3, Rajbhandari et al.
2020, arXiv 1910.02054); docs/SCALE.md."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from attention import Ring
from core.distributed import DistInfo, Stop, Stopped
from core.loss import IGNORE
from core.runtime import Setup
from core.settings import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BUCKET_MB = 100  # of gradients in a DDP message


def replicate(module: nn.Module, distributed: DistInfo) -> nn.Module:
    if distributed.world_size == 1:
        return module
    device = distributed.device
    ids = [device.index] if device.type == "cuda" else None
    return DistributedDataParallel(
        module, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB
    )


def shard(model: nn.Module, distributed: DistInfo, setup: Setup, size: int | None) -> None:
    """Shard a CPU model in place (FSDP2), a copy in `size` processes (None: all). UserError."""
    n = distributed.world_size
    size = size or n
    if distributed.control is None:
        raise UserError("--parallel=fsdp needs several processes (torchrun)")
    if n % size:
        raise UserError(f"--shard_size={size} does not divide the {n} processes")
    if setup.dtype == torch.float16:
        raise UserError("--parallel=fsdp has no loss scaling: use --dtype=bfloat16 or float32")
    setup.refuse_graphs("cannot hold FSDP's gathered parameters")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")
    mesh = init_device_mesh(distributed.device.type, (n // size, size), mesh_dim_names=names)
    mesh = mesh["shard"] if size == n else mesh
    how: Any = {"mesh": mesh}
    if setup.dtype == torch.bfloat16:  # inputs keep their dtype: autocast casts in each operation
        dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
        how["mp_policy"] = MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False)
    for block in model.get_submodule("transformer.h").children():
        if setup.compile:
            block.compile(mode=setup.compile_mode)
        fully_shard(block, **how)
    if setup.compile:  # the head's loss alone: this call of the model gathers its weights
        head: Any = model.get_submodule("lm_head")
        model.__dict__["compiled_blocks"] = True
        head.loss = torch.compile(head.loss, mode=setup.compile_mode)
    fully_shard(model, mesh=mesh)


def ring(distributed: DistInfo, T: int) -> Ring | None:
    if (n := distributed.context_parallel) > T:
        raise UserError(f"--context_parallel={n} processes cannot share --block_size={T} tokens")
    return None if distributed.ring is None else Ring(distributed.ring)


def shard_batch(ring: Ring | None, *batch: Tensor) -> tuple[Tensor, ...]:
    """Cut (B, T) tokens, targets and segments along T."""
    fillings = 0, IGNORE, batch[0].shape[1]  # padding is a segment of its own
    return batch if ring is None else (*map(ring.shard, batch, fillings),)


def mean_loss(module: nn.Module, batches: Iterable[tuple[Tensor, ...]], autocast: torch.autocast,
              ring: Ring | None, distributed: DistInfo, stop: Stop | None) -> float:  # fmt: skip
    """Mean over all processes; NaN without targets. batches: x, y, perhaps segments (B, T)."""
    total = torch.zeros((), device=distributed.device)
    targets = torch.zeros((), dtype=torch.int64, device=distributed.device)
    for batch in batches:
        if stop and stop.agreed():
            raise Stopped
        x, y, *segments = shard_batch(ring, *batch)
        n = (y != IGNORE).sum()
        with autocast:
            mean = module(x, y, *segments)[1]
        total += torch.where(n == 0, 0.0, mean * n)
        targets += n
    summed, n_targets = distributed.sum([float(total), float(targets)])
    return summed / n_targets if n_targets else math.nan


def loss_weights(module: nn.Module, targets: Tensor) -> Tensor:
    """Weights (n,) float32 of micro-batches by their targets (n,) int64, times the processes that
    average gradients; NaN without targets."""
    total = targets.sum()
    processes = 1
    if isinstance(module, DistributedDataParallel) or is_sharded(module):
        dist.all_reduce(total)
        processes = dist.get_world_size()
    return targets * processes / total


def is_sharded(module: nn.Module) -> bool:
    return hasattr(module, "set_requires_gradient_sync")  # FSDPModule takes seconds to import


def average_gradients(module: Any, on: bool) -> None:
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = on
    elif is_sharded(module):
        module.set_requires_gradient_sync(on)


# --- a tensor that may be sharded (DTensor) ---


def whole(t: Tensor) -> Tensor:
    """The full tensor. Collective."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def local(t: Tensor) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def local_part(t: Any) -> tuple[list[int], list[int], bool]:
    """Shape and offset of this process's part; False: an earlier one has the same."""
    if not hasattr(t, "placements"):
        return [*t.shape], [0] * t.ndim, True
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset as find

    shape, at = find(t.shape, t.device_mesh, t.placements)
    places = zip(t.device_mesh.get_coordinate(), t.placements, strict=True)
    return [*shape], [*at], not any(i and p.is_replicate() for i, p in places)


def fill(target: Any, source: Tensor) -> None:
    shape, at, _ = local_part(target)
    local(target).copy_(source[tuple(slice(a, a + n) for a, n in zip(at, shape, strict=True))])


def deal(rows: Tensor, like: Tensor, mesh: DeviceMesh | None
         ) -> tuple[Tensor, Callable[[Tensor], Tensor]]:  # fmt: skip
    """Divide n matrices (R, C) among the processes: (m, R, C) for this one, and a function from its
    results to (n, r, C). Both are collective.

    rows: (n, r, C), all or FSDP's shard, as `like` has; mesh: processes with all rows (DDP).
    """
    mesh = getattr(like, "device_mesh", mesh)
    if mesh is None:
        return rows, lambda results: results
    from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

    copy: list[Placement] = [Replicate()] * mesh.ndim
    by_row = [Shard(1) if p.is_shard() else p for p in getattr(like, "placements", copy)]
    by_matrix: list[Placement] = [Shard(0)] * mesh.ndim
    R, C = like.shape
    shape: Any = {"shape": torch.Size((len(rows), R, C)), "stride": (R * C, C, 1)}

    def move(t: Tensor, before: list[Placement], after: list[Placement]) -> Tensor:
        whole = DTensor.from_local(t.contiguous(), mesh, before, run_check=False, **shape)
        if mesh.device_type == "cpu":  # gloo has no all-to-all: DTensor would warn
            whole = whole.redistribute(placements=copy)
        return whole.redistribute(placements=after).to_local()

    return move(rows, by_row, by_matrix), lambda results: move(results, by_matrix, by_row)
