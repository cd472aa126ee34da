"""Processes under torchrun: their group, how they are started again, what they send."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from checkpoint import resume_command
from core.distributed import DistInfo
from core.optimizer import build_optimizer
from core.parallel import replicate
from core.runtime import Setup
from model import GPT, GPTConfig
from train import TrainConfig, train_step


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun --nproc_per_node=1 tells its one process."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    told = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_process_under_torchrun_leaves_its_group(torchrun) -> None:
    distributed = DistInfo.join("cpu")
    assert dist.is_initialized() and distributed.world_size == 1
    assert distributed.sum([2.0]) == [2.0] and distributed.gather("x") == ["x"]
    module = torch.nn.Linear(1, 1)
    assert replicate(module, distributed) is module
    distributed.leave()
    assert not dist.is_initialized()


def test_how_as_many_processes_are_started_again(monkeypatch) -> None:
    def launcher(n: int) -> str:  # of all processes, also of those that share sequences
        device = torch.device("cpu")
        return DistInfo(device, world_size=n, context_parallel=n // 2 or 1).launcher

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert launcher(1) == "python" and launcher(4) == "torchrun --standalone --nproc_per_node=4"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert launcher(4) == "torchrun --standalone --nproc_per_node=4"
    nodes = "--rdzv_backend=c10d --rdzv_endpoint=node0:29400"
    assert launcher(8) == f"torchrun --nnodes=2 --nproc_per_node=4 {nodes}"


def test_before_the_first_checkpoint_the_advice_is_to_start_again(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "config/my.py", "--out_dir=a b"])
    checkpoint, run = tmp_path / "step-00000005", DistInfo(torch.device("cpu"))
    checkpoint.mkdir()
    os.utime(checkpoint, (run.began - 1, run.began - 1))  # an earlier run's
    assert resume_command(str(tmp_path), run) == "python train.py config/my.py '--out_dir=a b'"
    os.utime(checkpoint, (run.began + 1, run.began + 1))
    resume = f"python train.py --init_from=resume --out_dir={tmp_path}"
    assert resume_command(str(tmp_path), run) == resume


def test_ddp_sends_gradients_once_a_step_whatever_the_micro_batches(torchrun) -> None:
    distributed, sent, begun = DistInfo.join("cpu"), [], []
    model, cpu = GPT(GPTConfig(8, 16, 1, 1, 8)), torch.device("cpu")
    module = replicate(model, DistInfo(cpu, world_size=2, control=dist.group.WORLD))

    def send(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        sent.extend([begun.count("backward")] * bucket.is_last())
        return done

    module.register_comm_hook(None, send)
    setup, x = Setup.of(cpu, "float32"), torch.randint(16, (6, 8))
    optimizer = build_optimizer(model, TrainConfig(), cpu)
    for micro_steps in (1, 3):
        train_step(module, optimizer, setup.scaler(), setup.autocast, x, x, micro_steps, 1.0,
                   torch.zeros(()), begun.append)
        assert sent == [micro_steps]  # in the last one's backward pass
        sent.clear()
        begun.clear()
    distributed.leave()
