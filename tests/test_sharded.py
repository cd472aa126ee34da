"""Checkpoints of several processes: saved by any number, loaded by any other, or not at all."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from safetensors import safe_open
from test_checkpoint import at_operation, full
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from checkpoint.resume import tensors
from core.distributed import DistInfo
from core.optimizer import build_optimizer
from core.settings import UserError
from model import GPT, GPTConfig

# Sizes that 3 and 4 processes do not divide; LayerNorms of 6 for 4, and biases.
TINY = GPTConfig(block_size=7, vocab_size=19, n_layer=2, n_head=2, n_embd=6,
                 attention_backend="manual")  # fmt: skip
HOW: Any = SimpleNamespace(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)
CPU = torch.device("cpu")


@dataclass
class Knobs:
    """What save_run() asks of train.py's TrainConfig."""

    out_dir: str
    keep_checkpoints: int = 2
    async_checkpoint: bool = False


class Run:
    """A run like train.py's, of this process and the others of its group."""

    global_batch = 4
    best_loss = float("inf")
    meta: Any = MappingProxyType({"tokenizer": {"name": "char"}})
    chosen: Any = SimpleNamespace(backend=SimpleNamespace(name="manual"), kernels=())

    def __init__(self, out: Path | str, kind: str = "one", seed: int = 0, **knobs: Any) -> None:
        """kind: "one", "ddp", "fsdp", or "hybrid", where 2 processes share one copy."""
        torch.manual_seed(seed)  # of the weights: the same on each process
        world = dist.get_world_size() if kind != "one" else 1
        rank, group = (dist.get_rank(), dist.group.WORLD) if kind != "one" else (0, None)
        control = dist.new_group(backend="gloo") if group else None
        self.distributed = DistInfo(CPU, rank, world, control)
        self.config: Any = Knobs(str(out), **knobs)
        self.model = self.module = GPT(TINY)
        if kind == "ddp":
            self.module = DistributedDataParallel(self.model)
        elif kind in ("fsdp", "hybrid"):
            shape = (world,) if kind == "fsdp" else (world // 2, 2)
            mesh = init_device_mesh("cpu", shape, mesh_dim_names=("copy", "shard")[-len(shape) :])
            for block in self.model.transformer.h:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = build_optimizer(self.model, HOW, CPU)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.step = 0

    def train(self, steps: int) -> Run:
        """Steps on batches of which each process has its part, and an evaluation: FSDP then leaves
        the root's parameters whole."""
        size, rank = self.distributed.world_size, self.distributed.rank
        self.losses: list[float] = []
        for _ in range(steps):
            batch = torch.Generator().manual_seed(self.step)
            x, y = torch.randint(19, (2, 12, 7), generator=batch)
            loss = self.module(x.chunk(size)[rank], y.chunk(size)[rank])[1]
            loss.backward()
            self.losses += self.distributed.sum([loss.item() / size])
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.step += 1
        with torch.no_grad():
            self.module(*torch.zeros(2, 1, 7, dtype=torch.long))
        return self

    def save(self, val_loss: float | None = None) -> Path:
        checkpoint.save_run(self, val_loss)
        return Path(self.config.out_dir)

    def load(self) -> Run:
        saved = checkpoint.load(checkpoint.latest(self.config.out_dir))
        self.step, self.best_loss = checkpoint.restore(
            saved, self.model, self.optimizer, self.scaler, 1, self.distributed
        )
        return self

    def whole(self) -> dict[str, Tensor]:
        """Weights and optimizer, whole, copied."""
        flat: dict[str, Any] = tensors(self.model, self.optimizer)
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
            for name, t in flat.items()
        }


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    """Whether all bits are the same."""
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


# --- saved by N, loaded by M ---


def train_and_save(rank: int, n: int, folder: str, *kinds: str) -> dict[str, dict[str, Tensor]]:
    """What each kind of run holds after 3 steps, and saved in a folder of its name."""
    held = {}
    for kind in kinds:
        r = Run(f"{folder}/{kind}", kind).train(3)
        r.save(val_loss=1.0)
        held[kind] = r.whole()
    return held


Saved = dict[str, tuple[str, dict[str, Tensor]]]  # kind -> its out_dir, and what it held


def train_in(n: int, folder: Path, *kinds: str) -> Saved:
    each = (
        run(train_and_save, n, str(folder), *kinds)
        if n > 1
        else [train_and_save(0, 1, str(folder), *kinds)]
    )
    assert all(same(held[kind], each[0][kind]) for held in each for kind in kinds)
    return {kind: (str(folder / kind), held) for kind, held in each[0].items()}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Runs of one and of two processes."""
    folder = tmp_path_factory.mktemp("two")
    return train_in(1, folder, "one") | train_in(2, folder, "ddp", "fsdp")


@pytest.fixture(scope="module")
def all_kinds(two: Saved, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return two | train_in(4, tmp_path_factory.mktemp("four"), "hybrid")


def load_and_go_on(rank: int, n: int, kind: str, saved: Saved) -> dict[str, list[float]]:
    """The next 20 losses after each of the checkpoints, which must give what was saved."""
    losses = {}
    for of, (out, want) in saved.items():
        r = Run(out, kind, seed=5).load()
        assert r.step == 3 and r.best_loss == 1.0
        assert same(r.whole(), want), of
        losses[of] = r.train(20).losses
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind, n", [("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("ddp", 2), ("ddp", 3),
                                     ("hybrid", 4)])  # fmt: skip
def test_any_number_of_processes_loads_all_bits_and_goes_on(kind, n, all_kinds):
    want = Run("").train(23).losses[3:]
    for losses in run(load_and_go_on, n, kind, all_kinds):
        for of, got in losses.items():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5, msg=f"{of} to {kind} {n}")


@pytest.mark.parametrize("of", ["one", "ddp", "fsdp"])
def test_one_process_loads_all_bits_and_goes_on(of, two):
    want = Run("").train(23).losses[3:]
    losses = load_and_go_on(0, 1, "one", {of: two[of]})[of]
    torch.testing.assert_close(losses, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("of", ["ddp", "fsdp"])
def test_weights_and_optimizer_are_read_whole_on_the_cpu(of, two):
    out, want = two[of]
    there = checkpoint.load(checkpoint.latest(out))
    weights = {f"model.{name}": t for name, t in there.weights().items()}
    assert same(weights, {name: t for name, t in want.items() if name.startswith("model.")})
    fresh = Run(out)
    fresh.model = there.model()
    fresh.optimizer = build_optimizer(fresh.model, HOW, CPU)
    fresh.optimizer.load_state_dict(there.optimizer()["optimizer"])  # by torch's own rules
    assert same(fresh.whole(), want)
    assert len(there.optimizer()["rng"]) == 2


@pytest.mark.parametrize("of", ["ddp", "fsdp"])
def test_each_process_writes_its_half_and_nothing_twice(of, two):
    out, want = two[of]
    folder = checkpoint.latest(out)
    assert not (folder / "model.safetensors").exists()
    assert (folder / "optimizer.pt").stat().st_size < 30_000  # random states
    written, parts = Counter[str](), Counter[str]()
    for name, tensor in json.loads((folder / "shards" / "index.json").read_text()).items():
        for part in tensor["parts"]:
            written[part["file"]] += math.prod(part["shape"]) * want[name].element_size()
            parts[part["file"]] += part["length"]
    total = sum(t.nbytes for t in want.values())
    assert sum(written.values()) == total and len(written) == 2
    assert max(written.values()) < 0.55 * total
    files = {p.name: p.stat().st_size for p in (folder / "shards").glob("*.distcp")}
    assert files == parts  # all bytes of the files are those of the index


def load_watched(rank: int, n: int, out: str) -> int:
    """The numbers that a process takes out of the file with the weights of one process."""
    taken = 0

    class Slice:
        def __init__(self, real: Any) -> None:
            self.get_shape, self.real = real.get_shape, real

        def __getitem__(self, part: Any) -> Tensor:
            nonlocal taken
            taken += self.real[part].numel()
            return self.real[part]

    class File:
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.file = safe_open(*args, **kwargs)

        def __enter__(self) -> File:
            self.real = self.file.__enter__()
            self.keys = self.real.keys
            return self

        def __exit__(self, *args: Any) -> None:
            self.file.__exit__(*args)

        def get_slice(self, name: str) -> Slice:
            return Slice(self.real.get_slice(name))

    checkpoint.resume.safe_open = File
    Run(out, "fsdp").load()
    return taken


def test_of_one_file_each_process_reads_its_part(two):
    out, held = two["one"]
    taken = run(load_watched, 2, out)
    total = sum(t.numel() for name, t in held.items() if name.startswith("model."))
    assert sum(taken) == total and max(taken) < 0.6 * total


def save_before_the_first_step(rank: int, n: int, out: str) -> bool:
    r = Run(out, "fsdp")
    r.save()
    before = r.whole()
    again = Run(out, "fsdp", seed=5).load()
    fine = same(again.whole(), before)
    return fine and same(again.train(2).whole(), Run("", "fsdp").train(2).whole())


def test_a_run_without_a_step_has_an_optimizer_of_zeros(tmp_path):
    assert run(save_before_the_first_step, 2, str(tmp_path)) == [True, True]
    assert not any(
        t.any() for name, t in Run(tmp_path, seed=5).load().whole().items() if "optimizer" in name
    )


# --- a write that fails, a process that is killed ---


def when_saving(patch: pytest.MonkeyPatch, at: int, stop: Callable[[], None]) -> list[str]:
    """Call `stop` in place of operation `at` on the disk of the next save(); the operations."""
    seen: list[str] = []
    real = checkpoint.store.save

    def save(*args: Any, **kwargs: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            done = at_operation(inner, at, stop)
            try:
                return real(*args, **kwargs)
            finally:
                seen.extend(done)

    patch.setattr(checkpoint.resume, "save", save)
    return seen


def fail_everywhere(rank: int, n: int, out: str, kind: str) -> set[str]:
    """Fail at each operation on the disk, of each process in turn; the operations that failed."""
    r, failed = Run(out, kind).train(1), set()
    r.save()
    for bad in range(n):
        for at in count():
            with pytest.MonkeyPatch.context() as patch:
                seen = when_saving(patch, at if rank == bad else -1, full)
                try:
                    r.step = 2
                    r.save()
                    message = ""
                except UserError as e:
                    message = str(e)
            texts = {re.sub(r"[\d.]+ GB", "GB", m) for m in r.distributed.gather(message)}
            assert len(texts) == 1, texts  # all of them, in the same words
            assert not list(Path(out).glob(".step*partial"))
            new = checkpoint.folders(out)[1:]
            assert message or new
            r.distributed.gather(None)
            if rank == 0 and new:  # also if only its folder could not be synced
                shutil.rmtree(new[0])
            r.distributed.gather(None)
            if not message:
                break
            assert f"(process {bad}: [Errno 28] No space left on device; " in message, message
            assert message.startswith(f"could not write checkpoint {out}/step-00000002 (")
            assert message.endswith(f"GB free): step-0000000{1 + len(new)} is still good")
            failed.update(seen[at : at + 1] if rank == bad else ())
    return failed


def test_a_write_that_fails_on_one_process_fails_on_all(tmp_path):
    main, other = run(fail_everywhere, 2, str(tmp_path), "fsdp", timeout=300)
    assert {"mkdir", "save", "write_text", "fsync", "rename"} <= main
    assert other == {"mkdir", "save", "fsync"}
