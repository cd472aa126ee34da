"""The processes of a run: who is who, and how they agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from core import restarts
from core.runtime import pick_device
from core.settings import UserError

BUCKET_MB = 100  # of gradients that are sent at once; PyTorch's own is 25


@dataclass(frozen=True)
class DistInfo:
    """This process among all of the run: one under plain `python`, more under `torchrun`."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    control: Any = None  # a gloo group: agreeing on the CPU never waits for the GPU

    @classmethod
    def join(cls, wanted: str) -> DistInfo:
        device = pick_device(wanted)
        if "RANK" not in os.environ:
            return cls(device=device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            if device.index >= torch.cuda.device_count():
                raise UserError(
                    f"{os.environ['LOCAL_WORLD_SIZE']} processes need as many GPUs, here are "
                    f"{torch.cuda.device_count()}; lower --nproc_per_node"
                )
            torch.cuda.set_device(device)
        store, rank, size = restarts.meet()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        control = dist.new_group(backend="gloo")
        return cls(device, dist.get_rank(), dist.get_world_size(), control)

    def share(self, module: Any) -> Any:
        """The module, plain or compiled, its gradients averaged over all processes in backward.

        PyTorch cuts a compiled module's graph at the borders of the buckets, so that a bucket is
        sent while the rest of backward runs. Larger buckets are fewer and longer graphs.
        """
        if self.world_size == 1:
            return module
        if isinstance(module, torch._dynamo.OptimizedModule) and not _can_cut():
            torch._dynamo.config.optimize_ddp = False
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            module, device_ids=ids, gradient_as_bucket_view=True, bucket_cap_mb=BUCKET_MB
        )

    @property
    def main(self) -> bool:
        """Whether this process is the one that prints and writes files."""
        return self.rank == 0

    def sum(self, values: list[float]) -> list[float]:
        """The element-wise sum over all processes."""
        if self.world_size == 1:
            return values
        t = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(t, group=self.control)
        return t.tolist()

    def leave(self) -> None:
        if self.control is not None:
            dist.destroy_process_group()

    def say(self, text: str, file: TextIO | None = None) -> None:
        """Print on the main process only."""
        if self.main:
            print(text, file=file, flush=True)

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order of rank."""
        if self.world_size == 1:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values


def _can_cut() -> bool:
    """Whether this PyTorch can cut a graph that holds an autograd.Function, as that of our loss
    does: some releases refuse it (PyTorch issue 104674)."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    return "has_higher_order_op" not in DDPOptimizer.compile_fn.__code__.co_names
