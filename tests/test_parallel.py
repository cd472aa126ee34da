"""Processes that share a run: relays from any number to any other, and how a step is divided."""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import sys
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
from test_checkpoint import restored
from test_train import make_data, run_line
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import checkpoint
import train
from attention import Ring
from core import metrics, parallel
from core.optimizer import build_optimizer
from core.parallel import DistInfo
from core.runtime import Setup
from core.settings import UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")
LEG = 4  # steps

# --- relays ---
# Each round's processes go on with the checkpoints of the round before. All must learn what one
# process learns that never stops.

SMALL: dict[str, Any] = {
    "dataset": "tiny", "n_head": 2, "n_embd": 32, "block_size": 32, "batch_size": 7,
    "eval_interval": LEG, "eval_iters": 3, "log_interval": 1, "lr_decay_iters": 6 * LEG,
    "warmup_iters": 2, "learning_rate": 2e-3, "device": "cpu", "dtype": "float32",
    "peak_tflops": 1.0, "keep_checkpoints": 9, "n_layer": 2, "onednn": False,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"bias": True, "gradient_checkpointing": True},
    "muon": {"position": "rope", "norm": "rms", "mlp": "swiglu", "n_kv_head": 1, "tied": False,
             "qk_norm": True, "optimizer": "muon", "muon_rates": 0.02, "decay_lr": "linear",
             "batch_size": 3, "gradient_accumulation_steps": 4, "async_checkpoint": True},
    "documents": {"document_mask": True, "attention_window": "5,none"},
}  # fmt: skip
FSDP = {"parallel": "fsdp", "context_parallel": 1}
SHARED: dict[str, dict[str, Any]] = {
    "one": {}, "ddp": {"parallel": "ddp", "context_parallel": 1}, "fsdp": FSDP,
    "hybrid": {**FSDP, "shard_size": 2},
    "ring": {"parallel": "ddp", "context_parallel": 2, "sample_tokens": 5},
    "fsdp+ring": {**FSDP, "context_parallel": 2},
}  # fmt: skip
RELAYS: dict[str, dict[str, list[str]]] = {  # processes of each round; how they share each run
    "1 2 1": {
        "gpt": ["one", "fsdp ddp", "one"], "muon": ["", "ddp fsdp", "one"],
    },
    "1 3 4 2 1": {
        "gpt": ["one", "fsdp", "ddp", "fsdp", "one"], "gpt 2": ["", "ddp", "hybrid", "ring", "one"],
        "gpt 3": ["one", "", "fsdp+ring", "ddp", ""], "muon 2": ["", "fsdp", "ring", "fsdp", "one"],
        "muon": ["one", "ddp", "hybrid", "ddp", "one"],
        "documents": ["", "fsdp", "fsdp+ring", "ddp", "one"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,000 words by character; a space ends a document."""
    words = ["to", "be", "or", "not", "that", "is", "the", "question"]
    text = " ".join(np.random.default_rng(0).choice(words, 4000))
    folder = make_data(tmp_path_factory.mktemp("data"), text)
    meta = json.loads((path := folder / "tiny" / "meta.json").read_text())
    meta["tokenizer"]["eot"] = meta["tokenizer"]["vocabulary"].index(" ")
    path.write_text(json.dumps(meta))
    return folder


def words(out: Path, **how: Any) -> list[str]:
    return [f"--{name}={value}" for name, value in {"out_dir": out, **how}.items()]


def numbers(out: Path) -> dict[str, float]:
    found = {}
    for row in metrics.read(out / "metrics.jsonl"):
        row |= {"seen": row["mfu_causal"] / row["mfu"]} if "mfu" in row else {}
        for key in row.keys() & {"loss", "train_loss", "val_loss", "seen", "lr"}:
            found[f"{row['iter']} {key}"] = row[key]
    return found


def at_work(rank: int, n: int, lines: list[list[str]]) -> tuple[list[str], dict[str, Any]]:
    return processes.trained(rank, n, lines), stepped(rank, n)


@pytest.fixture(scope="module", params=few([*RELAYS]))
def relays(request: Any, data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of the runs; what processes found in stepped(); the steps of each run."""
    folder, rounds = tmp_path_factory.mktemp("relays"), [*map(int, request.param.split())]
    runs = RELAYS[request.param]
    steps = dict.fromkeys(runs, 0)
    found: list[Any] = []
    for i, n in enumerate(rounds):
        lines, sampled = [], []
        for name, legs in runs.items():
            for kind in legs[i].split():
                model = {**SMALL, **MODELS[name.split()[0]], "data_dir": data_dir}
                steps[name] += LEG
                how = {"init_from": "resume"} if steps[name] > LEG else model
                how = {**how, "sample_tokens": 0, **SHARED[kind], "max_iters": steps[name]}
                lines.append(words(folder / name, **how))
                sampled.append(how["sample_tokens"] > 0)
        if i == 1:  # one run, and the same in two parts
            how = {**SMALL, **FSDP, "data_dir": data_dir, "dropout": 0.2, "max_iters": 2 * LEG}
            lines.append(words(folder / "whole", **how))
            lines.append(words(folder / "cut", **{**how, "max_iters": LEG}))
            lines.append(words(folder / "cut", init_from="resume", max_iters=2 * LEG))
        if n == 1:
            assert not any(run_line(line, folder).code for line in lines)
        else:
            results = processes.run(at_work, n, lines, timeout=300)
            found += [steps_of for _, steps_of in results]
            said = results[0][0]
            assert ["a sample of 5" in text for text in said][: len(sampled)] == sampled
    for name in {run.split()[0] for run in runs}:
        how = {**SMALL, **MODELS[name], "data_dir": data_dir, "max_iters": len(rounds) * LEG + LEG}
        assert run_line(words(folder / f"{name} alone", **how), folder).code == 0
    return folder, found, steps


def test_a_relay_learns_what_one_process_learns(relays: Any) -> None:
    """Losses, rates, the share of visible keys; then all weights and moments."""
    folder, _, steps = relays
    for name, n in steps.items():
        alone = folder / f"{name.split()[0]} alone"
        want, found = numbers(alone), numbers(folder / name)
        assert {f"{i} loss" for i in range(1, n + 1)} < found.keys() <= want.keys(), name
        assert want[f"{n} loss"] < want["1 loss"] - 0.01 * n
        for key, value in found.items():
            assert value == pytest.approx(want[key], rel=1e-5), (name, key)
        ours = restored(folder / name / f"step-{n:08}")
        for key, t in restored(alone / f"step-{n:08}").items():
            if not key.endswith("c_attn.bias") and "c_attn.bias." not in key:  # a key's: noise
                assert (ours[key] - t).abs().max() <= 2e-3 * t.abs().max(), (name, key)


def test_as_many_processes_go_on_with_their_random_numbers(relays: Any) -> None:
    whole, cut = (numbers(relays[0] / name) for name in ("whole", "cut"))
    assert f"{2 * LEG} loss" in cut.keys() <= whole.keys()
    assert cut == pytest.approx({key: whole[key] for key in cut}, rel=1e-6)


# --- a step of several processes ---

UNMASKED = [0, 2, 6, 11]  # of 11 sequences the first n have no targets, and so no part of each


def group(rank: int, n: int) -> DistInfo:
    return DistInfo(CPU, rank, n, dist.group.WORLD if dist.is_initialized() else None)


def send(sent, bucket):  # DDP refuses other annotations than its own
    sent.append(bucket.is_last())
    return allreduce_hook(dist.group.WORLD, bucket)


def stepped(rank: int, n: int) -> dict[str, Any]:
    """Loss, gradients, flag, messages of 11 sequences, by kind and number masked."""
    found, everyone, setup = {}, group(rank, n), Setup(CPU, train.TrainConfig(dtype="float32"))
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
        sent: list[bool] = []
        if "ddp" in kind:
            module = parallel.replicate(model, everyone)
            module.register_comm_hook(sent, send)
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
        mean = everyone.sum([loss.item() / n])
        found[f"{kind} {masked}"] = mean, torch.cat(grads), bool(bad), sum(sent)
    return found


def test_every_target_counts_once(relays: Any) -> None:
    """Masked or not; no targets are refused."""
    want = stepped(0, 1)
    for found in [want, *relays[1]]:
        for key, (loss, grads, bad, sent) in found.items():
            whole, whole_grads, nan, _ = want[f"whole {key.rpartition(' ')[2]}"]
            assert bad == nan == (key.endswith("11")), key
            assert sent == ("ddp" in key), key  # not at each micro-batch
            assert loss == pytest.approx(whole, rel=1e-6, nan_ok=True), key
            if not bad:
                torch.testing.assert_close(grads, whole_grads, rtol=1e-6, atol=1e-8, msg=key)


@pytest.mark.slow
def test_compiled_blocks_and_head_learn_what_plain_ones_do(data_dir: Path, tmp_path: Path) -> None:
    how = {**SMALL, **FSDP, "data_dir": data_dir, "max_iters": LEG, "bias": True}
    lines = [words(tmp_path / f"{on}", **how, compile=on) for on in (False, True)]
    processes.run(processes.trained, 2, lines, timeout=300)
    want, found = (numbers(tmp_path / f"{on}") for on in (False, True))
    assert f"{LEG} val_loss" in found and found.keys() <= want.keys()
    assert found == pytest.approx({key: want[key] for key in found}, rel=1e-4)


def test_any_number_of_processes_shares_a_step() -> None:
    for sequences, most in ((12, 12), (12, 5), (7, 2), (5, 1), (64, 3)):
        for n in range(1, 9):
            shares = [len(part) for part in np.array_split(np.arange(sequences * most), n)]
            if (most == 1 and sequences % n) or sequences * most < n:
                with pytest.raises(UserError, match=f"--gradient_accumulation_steps={sequences}"):
                    DistInfo(CPU, 0, n).micro_steps(most, sequences)
                continue
            steps = DistInfo(CPU, 0, n).micro_steps(most, sequences)
            assert steps == math.ceil(max(shares) / most)
            for share in shares:
                sizes = [len(t) for t in torch.arange(share).tensor_split(steps)]
                assert min(sizes) > 0 and max(sizes) <= most
    places = [DistInfo(CPU, rank, 6, context_parallel=3).data for rank in range(6)]
    assert places == [(0, 2)] * 3 + [(1, 2)] * 3  # a ring's processes have the same sequences


# --- how processes are begun, and left ---


@pytest.mark.parametrize(("n", "size", "how", "named"), [
    (3, 2, {}, "--shard_size=2"), (1, None, {}, "--parallel=fsdp"),
    (3, None, {"dtype": "float16"}, "--dtype"),
    (3, None, {"compile": True, "compile_mode": "reduce-overhead"}, "reduce-overhead"),
])
def test_what_does_not_go_with_fsdp(n: int, size: int | None, how: Any, named: str) -> None:
    everyone: Any = DistInfo(CPU, 0, n, "group" if n > 1 else None)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=named):
        setup = Setup(CPU, train.TrainConfig(**how))
        parallel.shard(None, everyone, setup, size)  # type: ignore[arg-type]


LAUNCH = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.parametrize("world, named", [
    ({}, "--context_parallel=2"), ({"WORLD_SIZE": "2"}, "RANK"), ({"RANK": "0"}, "WORLD_SIZE"),
    *(({"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, f"RANK={rank}")
      for rank in ("2", "-1")),
    ({"LOCAL_RANK": "1"}, "RANK")])  # fmt: skip
def test_a_ring_and_an_incomplete_launch_need_processes(world, named) -> None:
    clean = {name: x for name, x in os.environ.items() if name not in LAUNCH}
    patched = mock.patch.dict(os.environ, clean | world, clear=True)
    with patched, pytest.raises(UserError, match=named):
        DistInfo.join("cpu", 2)


NODES = "torchrun --nnodes=2 --nproc_per_node=4 --rdzv_backend=c10d --rdzv_endpoint=node0:29400"


@pytest.mark.parametrize("n, launcher", [
    (1, "python"), (4, "torchrun --standalone --nproc_per_node=4"), (8, NODES)])
def test_as_many_processes_go_on_or_start_again(n, launcher, monkeypatch, tmp_path) -> None:
    """Also those that share sequences. Before the run's first checkpoint it starts again."""
    given = ["train.py", "config/my.py", "--out_dir=a b"]
    monkeypatch.setattr(sys, "argv", given)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(n, 4)))
    monkeypatch.setenv("MASTER_ADDR", "node0")
    folder = tmp_path / "step-00000005"
    folder.mkdir()
    run = DistInfo(CPU, world_size=n, context_parallel=n // 2 or 1)
    resume = ["train.py", "--init_from=resume", f"--out_dir={tmp_path}"]
    for seconds, line in ((-1, given), (1, resume)):  # an earlier run's, and this one's
        os.utime(folder, (run.began + seconds, run.began + seconds))
        said = shlex.split(checkpoint.run.resume_command(str(tmp_path), run))
        assert said == [*launcher.split(), *line]
