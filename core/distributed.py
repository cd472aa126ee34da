"""The processes of a run: ranks, timeouts, small collectives (docs/SCALE.md)."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TextIO, TypeVar

import torch
import torch.distributed as dist

from core.runtime import StopSignal, pick_device, random_state, set_random_state
from core.settings import UserError, user_errors

T = TypeVar("T")
SLOW_S = 1800.0  # timeout while ranks start, compile or save
ROLL_CALL_S = 5.0  # for the other ranks to notice a failed collective


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
            device = torch.device("cuda", int(env["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        if env.get("LOCAL_WORLD_SIZE") == env["WORLD_SIZE"]:
            # torchrun's store keeps old addresses (PyTorch issue 135712).
            store = dist.PrefixStore(env.get("TORCHELASTIC_RESTART_COUNT", "0"), store)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=slow, store=store, rank=rank, world_size=n)
        control, disk = (dist.new_group(backend="gloo", timeout=slow) for _ in range(2))
        ring = None
        for first in range(0, n, N) if N > 1 else ():  # every process must make every group
            group = dist.new_group(list(range(first, first + N)), timeout=slow)
            ring = group if first <= rank < first + N else ring
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
        share = batch_size * accumulated / n
        steps = math.ceil(math.ceil(share) / batch_size)
        if int(share) < steps:
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
        self.random: dict[str, torch.Tensor] = {}  # before the step

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
