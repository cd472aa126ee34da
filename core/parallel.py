"""The processes of a run, and a model in copies (DDP) or shards along the first dimension (FSDP2,
as ZeRO-3, Rajbhandari et al. 2020, arXiv 1910.02054); docs/SCALE.md."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TextIO, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from attention import Ring
from core.loss import IGNORE
from core.runtime import Setup, StopSignal, pick_device, random_state, set_random_state
from core.settings import UserError, user_errors

T = TypeVar("T")
SLOW_S = 1800.0  # timeout while ranks start, compile or save
ROLL_CALL_S = 5.0  # for the other ranks to notice a failed collective
BUCKET_MB = 100  # of gradients in a DDP message


@dataclass(frozen=True)
class DistInfo:
    device: torch.device
    rank: int = 0
    world_size: int = 1
    control: dist.ProcessGroup | None = None  # gloo: never waits for the GPU
    disk: dist.ProcessGroup | None = None  # gloo: its timeout stays SLOW_S
    context_parallel: int = 1  # neighbouring ranks that share a sequence
    ring: dist.ProcessGroup | None = None
    began: float = field(default_factory=time.time)  # by the clock of files

    @classmethod
    def join(cls, wanted: str, context_parallel: int = 1) -> DistInfo:
        """Join the processes that torchrun started. Raises UserError."""
        device = pick_device(wanted)
        env, slow = os.environ, timedelta(seconds=SLOW_S)
        alone = env.get("RANK"), env.get("WORLD_SIZE", "1"), env.get("LOCAL_RANK", "0")
        store, rank, n, N = None, 0, 1, context_parallel
        if alone != (None, "1", "0"):
            unset = "unset RANK WORLD_SIZE LOCAL_RANK"
            with user_errors(f"not started by torchrun (for one process: {unset}): "):
                if not 0 <= int(env.get("RANK", 0)) < int(env.get("WORLD_SIZE", 1)):
                    raise ValueError(f"RANK={env.get('RANK')}, WORLD_SIZE={env.get('WORLD_SIZE')}")
                if device.type == "cuda" and not {"LOCAL_RANK", "LOCAL_WORLD_SIZE"} <= env.keys():
                    raise ValueError("no LOCAL_RANK, LOCAL_WORLD_SIZE")
                store, rank, n = next(dist.rendezvous("env://", timeout=slow))
        if n % N:
            raise UserError(f"--context_parallel={N} needs a multiple of {N} processes, got {n}")
        if store is None:
            return cls(device)
        if device.type == "cuda":
            local_size = int(env["LOCAL_WORLD_SIZE"])
            if local_size > (gpus := torch.cuda.device_count()):
                raise UserError(f"--nproc_per_node={local_size} needs as many GPUs, found {gpus}")
            device = pick_device(f"cuda:{env['LOCAL_RANK']}")
        if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
            # torchrun's store keeps old addresses (PyTorch issue 135712).
            store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=slow, store=store, rank=rank, world_size=n)
        control, disk = (dist.new_group(backend="gloo", timeout=slow) for _ in range(2))
        ring = dist.new_subgroups(N, timeout=slow)[0] if N > 1 else None
        return cls(device, rank, n, control, disk, N, ring)

    @property
    def data(self) -> tuple[int, int]:
        """(data-parallel rank, data-parallel size)."""
        return self.rank // self.context_parallel, self.world_size // self.context_parallel

    @property
    def main(self) -> bool:
        return self.rank == 0

    def micro_steps(self, batch_size: int, accumulated: int) -> int:
        """Micro-batches per step and process. UserError: fewer than one."""
        n = self.data[1]
        steps = math.ceil(accumulated / n)
        if batch_size * accumulated // n < steps:
            got = f"--gradient_accumulation_steps={accumulated}"
            raise UserError(f"{got}: expected a multiple of the {n} processes")
        return steps

    @property
    def launcher(self) -> str:
        """Command prefix on each node."""
        if self.world_size == 1:
            return "python"
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if local_size == self.world_size:
            return f"torchrun --standalone --nproc_per_node={local_size}"
        nodes = f"--nnodes={self.world_size // local_size} --nproc_per_node={local_size}"
        endpoint = f"--rdzv_endpoint={os.environ['MASTER_ADDR']}:29400"
        return f"torchrun {nodes} --rdzv_backend=c10d {endpoint}"

    def job(self) -> str | None:
        """The torchrun job, across restarts, or None. Collective."""
        name = os.environ.get("TORCHELASTIC_RUN_ID")  # "none" without --rdzv_id
        return self.gather(f"none {os.getppid()}" if name == "none" else name)[0]

    def limit(self, seconds: float) -> None:
        """Set the timeout of all groups but `disk`."""
        for group in [*dist.distributed_c10d._world.pg_map] if self.control is not None else ():
            if group is not self.disk:
                dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)

    def name_missing(self, error: Exception, resume: str) -> None:
        """Print the lost ranks, and the command to resume."""
        text = str(error).lower()
        of_group = isinstance(error, dist.DistError) or "gloo" in text or "nccl" in text
        if self.control is None or not of_group:
            return
        store = dist.distributed_c10d._get_default_store()
        store.set(f"roll_call/{self.rank}", "here")
        time.sleep(ROLL_CALL_S)
        ranks = range(self.world_size)
        missing = ", ".join(f"rank {r}" for r in ranks if not store.check([f"roll_call/{r}"]))
        if missing:
            text = f"error (rank {self.rank}): lost {missing}; to continue: {resume}"
            print(text, file=sys.stderr, flush=True)

    def sum(self, values: list[float]) -> list[float]:
        if self.world_size == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def gather(self, value: T) -> list[T]:
        values = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(values, value, group=self.control)
        return values

    def leave(self) -> None:
        if self.control is not None:
            dist.destroy_process_group()

    def say(self, text: str, file: TextIO | None = None) -> None:
        if self.main:
            print(text, file=file, flush=True)


class Stopped(Exception):
    """All processes agreed to end."""


class Stop(StopSignal):
    """Agreement to stop; fails if a process is lost or frozen."""

    def __init__(self, distributed: DistInfo) -> None:
        super().__init__()
        self.distributed = distributed
        self.random: dict[str, Tensor] = {}  # before the step

    def mark(self, part: str) -> None:
        """Between micro-batches, Stopped leaves the state as before the step."""
        if part == "update":
            self.random = {}
        elif part == "forward" and not self.random:
            self.random = random_state(self.distributed.device)
        elif part == "forward" and self.agreed():
            set_random_state(self.random, self.distributed.device)
            raise Stopped

    def agreed(self) -> bool:
        """True if a process was signalled. Collective."""
        return any(self.distributed.sum([float(self.noted)]))


# --- a model in copies or shards ---


def replicate(module: nn.Module, distributed: DistInfo) -> nn.Module:
    if distributed.world_size == 1:
        return module
    return DistributedDataParallel(module, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB)


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
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    names = ("replicate", "shard")
    mesh = dist.init_device_mesh(distributed.device.type, (n // size, size), mesh_dim_names=names)
    mesh = mesh["shard"] if size == n else mesh
    policy = MixedPrecisionPolicy()
    if setup.dtype == torch.bfloat16:  # inputs keep their dtype: autocast casts in each operation
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    for block in model.get_submodule("transformer.h").children():
        if setup.compile:
            block.compile(mode=setup.config.compile_mode)
        fully_shard(block, mesh=mesh, mp_policy=policy)
    if setup.compile:  # the head's loss alone: this call of the model gathers its weights
        head: Any = model.get_submodule("lm_head")
        model.__dict__["compiled_blocks"] = True
        head.loss = torch.compile(head.loss, mode=setup.config.compile_mode)
    fully_shard(model, mesh=mesh)


def ring(distributed: DistInfo, T: int) -> Ring | None:
    if (n := distributed.context_parallel) > T:
        raise UserError(f"--context_parallel={n} processes cannot share --block_size={T} tokens")
    return None if distributed.ring is None else Ring(distributed.ring)


def shard_batch(ring: Ring | None, *batch: Tensor) -> tuple[Tensor, ...]:
    """Cut (B, T) tokens, targets and segments along T."""
    fillings = 0, IGNORE, batch[0].shape[1]  # padding is a segment of its own
    return batch if ring is None else (*map(ring.shard, batch, fillings),)


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


def deal(rows: Tensor, like: Tensor, mesh: dist.DeviceMesh | None
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
