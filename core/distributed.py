"""The processes of a run: who is who, and how they agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist

from core import restarts
from core.runtime import pick_device
from core.settings import UserError


@dataclass(frozen=True)
class DistInfo:
    """This process among all of the run: one under plain `python`, more under `torchrun`."""

    device: torch.device
    rank: int = 0
    world_size: int = 1
    control: Any = None  # a gloo group: agreeing on the CPU never waits for the GPU
    context_parallel: int = 1  # processes that share each sequence, neighbours in rank
    ring: Any = None  # their group; None: each has whole sequences

    @classmethod
    def join(cls, wanted: str, context_parallel: int = 1) -> DistInfo:
        """Join the other processes that torchrun started, if it did.

        Raises:
            UserError: no such device, or the processes do not divide into rings.
        """
        device = pick_device(wanted)
        n, N = int(os.environ.get("WORLD_SIZE", 1)), context_parallel
        if n % N:
            raise UserError(
                f"--context_parallel={N} needs a multiple of {N} processes, here "
                f"{'is' if n == 1 else 'are'} {n}: torchrun --nproc_per_node={N} train.py ..."
            )
        if "RANK" not in os.environ:
            return cls(device=device)
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            here, gpus = int(os.environ["LOCAL_WORLD_SIZE"]), torch.cuda.device_count()
            if here > gpus:  # on all of them: process 0 is the one that prints
                raise UserError(
                    f"{here} processes need as many GPUs, here are {gpus}; lower --nproc_per_node"
                )
            torch.cuda.set_device(device)
        store, rank, size = restarts.meet()
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        control = dist.new_group(backend="gloo")
        rank, ring = dist.get_rank(), None
        for first in range(0, n, N) if N > 1 else ():  # every process must make every group
            group = dist.new_group(list(range(first, first + N)))
            ring = group if first <= rank < first + N else ring
        return cls(device, rank, n, control, N, ring)

    @property
    def data_size(self) -> int:
        """Among how many the sequences of a step are divided; those of a ring have the same."""
        return self.world_size // self.context_parallel

    @property
    def data(self) -> tuple[int, int]:
        """Which share of a step's sequences is this process's, and of how many."""
        return self.rank // self.context_parallel, self.data_size

    @property
    def main(self) -> bool:
        """Whether this process is the one that prints and writes files."""
        return self.rank == 0

    def micro_steps(self, batch_size: int, accumulated: int) -> int:
        """In how many micro-batches a process takes its share of batch_size * accumulated
        sequences: as many in each process, and none of more than batch_size.

        Raises:
            UserError: some process would have none.
        """
        least, more = divmod(batch_size * accumulated, self.data_size)
        steps = -(-(least + bool(more)) // batch_size)
        if least < steps:
            raise UserError(
                f"--batch_size={batch_size} times --gradient_accumulation_steps={accumulated} "
                f"cannot be divided among {self.data_size} processes: make the second a multiple"
            )
        return steps

    @property
    def launcher(self) -> str:
        """What train.py is started with, to be the same number of processes."""
        if self.world_size == 1:
            return "python"
        here = int(os.environ.get("LOCAL_WORLD_SIZE", self.world_size))
        if here < self.world_size:
            return f"torchrun --nnodes={self.world_size // here} --nproc_per_node={here} ..."
        return f"torchrun --standalone --nproc_per_node={here}"

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
