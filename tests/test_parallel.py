"""Training by several processes learns what one learns, however they share the work; torchrun."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import os
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import processes
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import few
from test_train import make_data, run_line

import train
from attention import Policy, Ring
from checkpoint import gathered, resume_command
from core import metrics, parallel
from core.distributed import DistInfo
from core.optimizer import build_optimizer
from core.runtime import Setup
from core.settings import UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")
SMALL = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 8,
         "max_iters": 24, "eval_interval": 24, "eval_iters": 3, "log_interval": 1, "bias": True,
         "device": "cpu", "dtype": "float32", "warmup_iters": 2, "learning_rate": 2e-3}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 words, by character."""
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    text = " ".join(np.random.default_rng(0).choice(words, 4000))
    return make_data(tmp_path_factory.mktemp("data"), text)


def trained(rank: int, n: int, runs: dict[str, list[str]]) -> dict[str, tuple[int | str, str]]:
    """Run each command line in this process."""
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n, "LOCAL_WORLD_SIZE": n,
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}
    os.environ |= {k: str(v) for k, v in told.items()}
    joined = dist.init_process_group, dist.destroy_process_group, dist.rendezvous
    dist.init_process_group = dist.destroy_process_group = lambda *args, **how: None  # type: ignore
    dist.rendezvous = lambda *args, **how: iter([(dist.HashStore(), rank, n)])  # type: ignore
    found: dict[str, tuple[int | str, str]] = {}
    try:
        for name, line in runs.items():
            out = io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                try:
                    code: int | str = train.main(line)
                except UserError as e:
                    code = str(e)
            found[name] = code, out.getvalue()
    finally:
        dist.init_process_group, dist.destroy_process_group, dist.rendezvous = joined
    return found


def lines(data_dir: Path, out: Path, **runs: dict[str, Any]) -> dict[str, list[str]]:
    shared = {**SMALL, "data_dir": data_dir, "dataset": "tiny"}
    return {
        name: [f"--{k}={v}" for k, v in {**shared, "out_dir": out / name, **run}.items()]
        for name, run in runs.items()
    }


def losses(out: Path) -> dict[str, float]:
    return {
        f"{row['iter']} {key}": row[key]
        for row in metrics.read(out / "metrics.jsonl")
        for key in ("loss", "train_loss", "val_loss")
        if key in row
    }


def ended_well(results: list[dict[str, tuple[int | str, str]]]) -> None:
    for rank, found in enumerate(results):
        for name, (code, out) in found.items():
            assert code == 0, f"{name} on rank {rank}: {code}\n{out}"


def near(found: dict[str, float], want: dict[str, float]) -> bool:
    return all(abs(loss - want.get(key, loss)) < 1e-5 for key, loss in found.items())


@pytest.fixture(scope="module")
def alone(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    out = tmp_path_factory.mktemp("alone")
    assert run_line(lines(data_dir, out, one={})["one"], out / "one").code == 0
    found = losses(out / "one")
    assert len(found) == 26 and found["24 loss"] < found["1 loss"] - 0.3
    return found


FSDP = {"parallel": "fsdp"}
RUNS: dict[int, dict[str, dict[str, Any]]] = {
    # Eight sequences a step do not divide by three, nor three by two.
    3: {
        "ddp_uneven": {}, "fsdp_uneven": FSDP, "ring_uneven": {"context_parallel": 3},
        "micro": {**FSDP, "batch_size": 2, "gradient_accumulation_steps": 4, "eval_iters": 12},
    },
    4: {
        "ddp_and_ring": {"context_parallel": 2, "sample_tokens": 5},
        "fsdp_and_ring": {**FSDP, "context_parallel": 2, "sample_tokens": 5},
        "hybrid": {**FSDP, "shard_size": 2, "gradient_checkpointing": True},
        "ring_of_four": {**FSDP, "context_parallel": 4},
    },
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("n", RUNS)
def test_losses_are_those_of_one_process(n, data_dir, alone, tmp_path) -> None:
    results = processes.run(trained, n, lines(data_dir, tmp_path, **RUNS[n]), timeout=300)
    ended_well(results)
    for name, how in RUNS[n].items():
        assert ("sample of 5 tokens" in results[0][name][1]) == ("sample_tokens" in how), name
        found = losses(tmp_path / name)
        assert found.keys() == alone.keys() and near(found, alone), name


# A run of 12 steps by some processes, which four go on with; by one: test_sharded.py.


def group(rank: int, n: int) -> DistInfo:
    return DistInfo(CPU, rank, n, dist.group.WORLD if dist.is_initialized() else None)


def compiled_steps(rank: int, n: int, backend: str) -> tuple[list[float], list[float], int]:
    """Losses, eager and compiled, and the number of graphs."""
    found: list[list[float]] = []
    for on in (False, True):
        torch.manual_seed(0)
        model = GPT(GPTConfig(16, 65, 2, 2, 32, attention_backend="manual"))
        setup = Setup.of(CPU, "float32", compile=on)
        torch._dynamo.utils.counters.clear()
        with mock.patch("torch.compile", partial(torch.compile, backend=backend)):
            parallel.shard(model, group(rank, n), setup, None)
        optimizer = build_optimizer(model, train.TrainConfig(learning_rate=1e-2), CPU)
        losses = []
        for _ in range(3):
            x, y = (t.tensor_split(n)[rank] for t in torch.randint(-1, 65, (2, 4 * n, 16)))
            losses.append(train.train_step(model, optimizer, setup.scaler(), setup.autocast,
                                           x.clamp(min=0), y, 2, 1.0, torch.zeros(())))
        with torch.no_grad():
            losses.append(model(x.clamp(min=0), y)[1])
        found.append([float(loss) for loss in losses])
    return *found, torch._dynamo.utils.counters["stats"]["unique_graphs"]  # type: ignore[return-value]


@pytest.mark.slow
def test_compiled_blocks_and_head_learn_what_plain_ones_do() -> None:
    for eager, compiled, graphs in processes.run(compiled_steps, 2, "aot_eager"):
        torch.testing.assert_close(compiled, eager)
        assert graphs == 4  # a block and the head with its loss, with gradients and without


UNMASKED = [0, 2, 6, 11]  # of 11 sequences the first n have no targets, and so no part of each


def stepped(rank: int, n: int) -> dict[str, Any]:
    """Loss, gradients, flag of 11 sequences, by kind and number masked."""
    found, everyone, setup = {}, group(rank, n), Setup.of(CPU, "float32")
    kinds = ["ddp", "fsdp", "ddp ring", "fsdp ring"] if n > 1 else ["whole", "micro"]
    for kind, masked in itertools.product(kinds, UNMASKED):
        torch.manual_seed(masked)
        model = GPT(GPTConfig(13, 65, 1, 2, 16, attention_backend="tiled")).double()
        x, y = torch.randint(65, (2, 11, 13))
        y[torch.rand(y.shape) < torch.rand(11, 1)] = -1
        y[:masked], y[:, : masked // 2] = -1, -1  # of a ring the first rank holds the beginning
        module: Any = model
        if "fsdp" in kind:
            parallel.shard(model, everyone, setup, None)
        if "ring" in kind:
            model.ring = Ring(dist.group.WORLD)
            x, y = parallel.shard_batch(model.ring, x, y)
        else:
            x, y = (t.tensor_split(n)[rank] for t in (x, y))
        if "ddp" in kind:
            module = parallel.replicate(model, everyone)
        grads: list[torch.Tensor] = []

        def mark(part: str, model: Any = model, grads: Any = grads) -> None:
            if part == "update":
                grads.extend(parallel.whole(p.grad).flatten() for p in model.parameters())

        bad = torch.zeros(())
        if kind == "whole":
            loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten(), ignore_index=-1)
            loss.backward()
            mark("update")
            bad += loss.isnan()
        else:
            optimizer = build_optimizer(model, train.TrainConfig(), CPU)
            loss = train.train_step(module, optimizer, setup.scaler(), setup.autocast, x, y, 2, 0.0,
                                    bad, mark)
        found[f"{kind} {masked}"] = everyone.sum([loss.item() / n]), torch.cat(grads), bool(bad)
    return found


@pytest.mark.parametrize("n", few([2, 3, 5]))
def test_every_target_counts_once(n: int) -> None:
    """Masked or not; no targets are refused."""
    want = stepped(0, 1)
    for found in [want, *processes.run(stepped, n)]:
        for key, (loss, grads, bad) in found.items():
            whole, whole_grads, nan = want[f"whole {key.rpartition(' ')[2]}"]
            assert bad == nan == (key.endswith("11")), key
            assert loss == pytest.approx(whole, rel=1e-6, nan_ok=True), key
            if not bad:
                torch.testing.assert_close(grads, whole_grads, rtol=1e-6, atol=1e-8, msg=key)


# --- how a step is divided ---


def test_what_samples_alone_has_all_weights_and_no_ring() -> None:
    config = GPTConfig(16, 65, 1, 2, 32, attention_backend="tiled")
    model = GPT(config, Policy(fallback=False)).eval()
    assert gathered(model) is model
    model.ring = Ring(None)  # which others would have to answer
    alone = gathered(model).eval()
    assert alone.ring is None and (alone.config, alone.policy) == (model.config, model.policy)
    model.ring, x = None, torch.arange(5)[None]
    assert torch.equal(alone(x)[0], model(x)[0])


def test_any_number_of_processes_shares_a_step() -> None:
    for sequences, most in ((12, 12), (12, 5), (7, 2), (5, 1), (64, 3)):
        for n in range(1, 9):
            shares = [len(part) for part in np.array_split(np.arange(sequences * most), n)]
            if (most == 1 and sequences % n) or sequences * most < n:
                with pytest.raises(UserError, match="multiple"):
                    DistInfo(CPU, 0, n).micro_steps(most, sequences)
                continue
            steps = DistInfo(CPU, 0, n).micro_steps(most, sequences)
            assert steps == math.ceil(max(shares) / most)
            for share in shares:
                sizes = [len(t) for t in torch.arange(share).tensor_split(steps)]
                assert min(sizes) > 0 and max(sizes) <= most


def test_the_processes_of_a_ring_have_the_same_sequences() -> None:
    places = [DistInfo(CPU, rank, 6, context_parallel=3).data for rank in range(6)]
    assert places == [(0, 2)] * 3 + [(1, 2)] * 3


@pytest.mark.parametrize(("n", "size", "how", "named"), [
    (3, 2, {}, "--shard_size=2"), (1, None, {}, "--parallel=fsdp"),
    (3, None, {"dtype": "float16"}, "--dtype"),
    (3, None, {"compile": True, "compile_mode": "reduce-overhead"}, "reduce-overhead"),
])
def test_what_does_not_go_with_fsdp(n: int, size: int | None, how: Any, named: str) -> None:
    everyone: Any = DistInfo(CPU, 0, n, "group" if n > 1 else None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=named):
        parallel.shard(None, everyone, Setup.of(CPU, **how), size)  # type: ignore[arg-type]


@pytest.mark.parametrize("world, named", [
    ({}, "--context_parallel=2"), ({"WORLD_SIZE": "2"}, "RANK"), ({"RANK": "0"}, "WORLD_SIZE"),
    ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK=2"),
    ({"LOCAL_RANK": "1"}, "RANK")])  # fmt: skip
def test_a_ring_and_an_incomplete_launch_need_processes(world, named, monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=named):
        DistInfo.join("cpu", 2)


# --- under torchrun ---


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
    assert parallel.replicate(module, distributed) is module
    distributed.leave()
    assert not dist.is_initialized()


def test_how_as_many_processes_are_started_again(monkeypatch) -> None:
    def launcher(n: int) -> str:  # of all processes, also of those that share sequences
        return DistInfo(CPU, world_size=n, context_parallel=n // 2 or 1).launcher

    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert launcher(1) == "python" and launcher(4) == "torchrun --standalone --nproc_per_node=4"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    assert launcher(4) == "torchrun --standalone --nproc_per_node=4"
    nodes = "--rdzv_backend=c10d --rdzv_endpoint=node0:29400"
    assert launcher(8) == f"torchrun --nnodes=2 --nproc_per_node=4 {nodes}"


def test_before_the_first_checkpoint_the_advice_is_to_start_again(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "config/my.py", "--out_dir=a b"])
    checkpoint, run = tmp_path / "step-00000005", DistInfo(CPU)
    checkpoint.mkdir()
    os.utime(checkpoint, (run.began - 1, run.began - 1))  # an earlier run's
    assert resume_command(str(tmp_path), run) == "python train.py config/my.py '--out_dir=a b'"
    os.utime(checkpoint, (run.began + 1, run.began + 1))
    resume = f"python train.py --init_from=resume --out_dir={tmp_path}"
    assert resume_command(str(tmp_path), run) == resume


def test_ddp_sends_gradients_once_a_step_whatever_the_micro_batches(torchrun) -> None:
    distributed, sent, begun = DistInfo.join("cpu"), [], []
    model = GPT(GPTConfig(8, 16, 1, 1, 8))
    module = parallel.replicate(model, DistInfo(CPU, world_size=2, control=dist.group.WORLD))

    def send(state, bucket):
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        sent.extend([begun.count("backward")] * bucket.is_last())
        return done

    module.register_comm_hook(None, send)
    setup, x = Setup.of(CPU, "float32"), torch.randint(16, (6, 8))
    optimizer = build_optimizer(model, train.TrainConfig(), CPU)
    for micro_steps in (1, 3):
        train.train_step(module, optimizer, setup.scaler(), setup.autocast, x, x, micro_steps, 1.0,
                         torch.zeros(()), begun.append)
        assert sent == [micro_steps]  # in the last one's backward pass
        sent.clear()
        begun.clear()
    distributed.leave()
