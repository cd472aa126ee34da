"""The processes of a run: who is who, and how they agree."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist

from core.runtime import pick_device
from core.settings import UserError


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
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        control = dist.new_group(backend="gloo")
        return cls(device, dist.get_rank(), dist.get_world_size(), control)

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
