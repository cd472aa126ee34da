"""Checkpoints of several processes: saved by any number, loaded by any other, or not at all."""

from __future__ import annotations

import errno
import json
import math
import os
import pickle
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from processes import run
from safetensors import safe_open
from test_checkpoint import Bomb, at_operation, full
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from checkpoint import shards
from checkpoint.__main__ import main as export
from checkpoint.tensors import tensors
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
    saving: checkpoint.Saving | None = None
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


def load_and_go_on(rank: int, n: int, kind: str, saved: Path) -> dict[str, list[float]]:
    """The next 20 losses after each checkpoint of a Saved, which must give what was saved."""
    losses = {}
    for of, (out, want) in torch.load(saved).items():
        r = Run(out, kind, seed=5).load()
        assert r.step == 3 and r.best_loss == 1.0
        assert same(r.whole(), want), of
        losses[of] = r.train(20).losses
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind, n", [("fsdp", 1), ("fsdp", 3), ("fsdp", 4), ("ddp", 2), ("ddp", 3),
                                     ("hybrid", 4)])  # fmt: skip
def test_any_number_of_processes_loads_all_bits_and_goes_on(kind, n, all_kinds, tmp_path):
    want = Run("").train(23).losses[3:]
    torch.save(all_kinds, tmp_path / "saved.pt")
    for losses in run(load_and_go_on, n, kind, tmp_path / "saved.pt"):
        for of, got in losses.items():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5, msg=f"{of} to {kind} {n}")


@pytest.mark.parametrize("of", ["one", "ddp", "fsdp"])
def test_one_process_loads_all_bits_and_goes_on(of, two, tmp_path):
    want = Run("").train(23).losses[3:]
    torch.save({of: two[of]}, tmp_path / "saved.pt")
    losses = load_and_go_on(0, 1, "one", tmp_path / "saved.pt")[of]
    torch.testing.assert_close(losses, want, rtol=0, atol=1e-5)


def test_another_number_of_processes_draws_other_dropout_in_each_and_in_each_step(two):
    """The random states of two are of no use to three."""
    saved, r = checkpoint.load(checkpoint.latest(two["ddp"][0])), Run("")
    seeds = []
    for step in (3, 4):
        saved.state["step"] = step
        for rank in range(3):
            everyone: Any = SimpleNamespace(world_size=3, rank=rank, gather=lambda v: [v] * 3)
            checkpoint.restore(saved, r.model, r.optimizer, r.scaler, 1, everyone)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 6


@pytest.mark.parametrize("of", ["ddp", "fsdp"])
def test_weights_and_optimizer_are_read_whole_on_the_cpu(of, two, recwarn):
    out, want = two[of]
    there = checkpoint.load(checkpoint.latest(out))
    weights = {f"model.{name}": t for name, t in there.weights().items()}
    assert same(weights, {name: t for name, t in want.items() if name.startswith("model.")})
    fresh = Run(out)
    fresh.model = there.model()
    fresh.optimizer = build_optimizer(fresh.model, HOW, CPU)
    rest = there.rest()
    state: list[dict[str, Tensor]] = [{} for _ in rest["names"]]
    for name, tensor in shards.read_whole(there.folder / "shards", "optimizer.").items():
        parameter, _, key = name.rpartition(".")
        state[rest["names"].index(parameter)][key] = tensor
    groups = rest["optimizer"]["param_groups"]  # and by torch's own rules
    fresh.optimizer.load_state_dict({"param_groups": groups, "state": dict(enumerate(state))})
    assert same(fresh.whole(), want)
    assert len(rest["rng"]) == there.state["processes"] == 2
    assert not [w for w in recwarn if "disabled" in str(w.message)]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_tensor_is_read_whole_in_the_dtype_in_which_it_was_written(tmp_path):
    made = {f"model.{t.dtype}": t for t in (torch.rand(3), torch.rand(2, 3).bfloat16(),
                                            torch.tensor(2**40 + 1))}  # fmt: skip
    shards.write(tmp_path / "shards", made, None)
    found = shards.read_whole(tmp_path / "shards", "model.")
    assert same({f"model.{name}": t for name, t in found.items()}, made)
    assert all(str(t.dtype) == name for name, t in found.items())


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

    checkpoint.tensors.safe_open = File
    r, mine = Run(out, "fsdp", seed=5).load(), taken
    assert same(r.whole(), Run(out).load().whole())
    return mine


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


@pytest.mark.parametrize("fused", [True, False])
def test_the_state_of_a_run_without_a_step_is_what_adamw_would_make(fused):
    """Made on whatever device: the fused AdamW wants its step beside the weights."""
    model: Any = GPT(GPTConfig(8, 20, 1, 2, 8)).to("meta")
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.defaults["fused"] = fused
    flat = tensors(model, optimizer)
    names = [name for name, _ in model.named_parameters()]
    keys = ("step", "exp_avg", "exp_avg_sq")
    assert flat.keys() == {
        *(f"model.{n}" for n in names), *(f"optimizer.{n}.{k}" for n in names for k in keys)
    }  # fmt: skip
    assert len({id(t) for t in flat.values()}) == 4 * len(names)
    for name, p in model.named_parameters():
        step, *moments = (flat[f"optimizer.{name}.{key}"] for key in keys)
        assert step.device.type == ("meta" if fused else "cpu") and step.shape == ()
        assert all((t.shape, t.device) == (p.shape, p.device) for t in moments)


def read_on_one(rank: int, n: int, out: str) -> tuple[bool, str]:
    """Whether the random numbers go on where they were; and what is said where one cannot read."""
    r = Run(out, "fsdp")
    torch.manual_seed(rank)
    r.save()
    want = torch.rand(3)
    r.load()
    good = torch.equal(torch.rand(3), want)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as e:
        if rank == 1:
            patch.setattr(torch, "load", broken)
        r.load()
    return good, str(e.value)


def test_where_one_process_cannot_read_none_goes_on(tmp_path):
    (good, said), other = run(read_on_one, 2, str(tmp_path))
    assert good and other == (good, said)
    assert re.search(r"^process 1: .*optimizer.pt cannot be read \(OSError: .*error", said), said


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

    patch.setattr(checkpoint.saving, "save", save)
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


@pytest.mark.slow
def test_a_write_that_fails_on_one_process_fails_on_all(tmp_path):
    main, other = run(fail_everywhere, 2, str(tmp_path), "fsdp", timeout=300)
    assert {"mkdir", "save", "write_text", "fsync", "rename"} <= main
    assert other == {"mkdir", "save", "fsync"}


def test_what_failed_on_one_process_is_raised_on_that_one(tmp_path, monkeypatch):
    full = OSError(28, "No space left on device")
    failed = dcp.CheckpointException("write", {1: (full, None)})  # type: ignore[dict-item]
    monkeypatch.setattr(dcp, "save", Mock(side_effect=failed))
    monkeypatch.setattr(dist, "get_rank", lambda group: group)
    shards.write(tmp_path, {}, 0)
    with pytest.raises(OSError) as e:
        shards.write(tmp_path, {}, 1)
    assert e.value is full


def save_on_two_disks(rank: int, n: int, out: str) -> str:
    """As on two machines that share no folder."""
    with pytest.raises(UserError) as e:
        Run(f"{out}/{rank}", "fsdp").save()
    assert not list(Path(out, str(rank)).glob(".step*"))
    return str(e.value)


def test_machines_that_share_no_folder_are_told(tmp_path):
    said = run(save_on_two_disks, 2, str(tmp_path))
    assert all("out_dir must be a folder that all machines share" in text for text in said)


def killed_at(rank: int, n: int, out: str, bad: int, at: int) -> list[str]:
    """Save step 1, then be killed in the save of step 2; without that, its operations."""
    r = Run(out, "fsdp").train(1)
    r.save()
    if rank == 0 and at >= 0:
        torch.save(r.step, f"{out}/ready")
    r.train(1)
    with pytest.MonkeyPatch.context() as patch:
        seen = when_saving(patch, at if rank == bad else -1, kill)
        r.save()
    return seen


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_sigkill_of_one_process_at_any_operation_leaves_a_good_one(tmp_path):
    """And where a process survives that, it does not take what is there for a whole one."""
    operations = run(killed_at, 2, str(tmp_path / "whole"), 0, -1)
    want = {}
    for folder in checkpoint.folders(tmp_path / "whole"):
        want[int(folder.name[-1])] = checkpoint.load(folder).weights()
    assert sorted(want) == [1, 2] and not same(want[1], want[2])
    ends = set()
    for bad, names in enumerate(operations):
        # Of each run of the same operation the first and the last.
        edges = [at for at in range(len(names)) if len(set(names[max(0, at - 1) : at + 2])) > 1]
        for at in edges:
            out = tmp_path / f"{bad}-{at}"
            with pytest.raises(AssertionError, match=r"without a word|Connection"):
                run(killed_at, 2, str(out), bad, at)
            newest = checkpoint.load(checkpoint.latest(out))
            assert same(newest.weights(), want[newest.step]), (bad, names[at])
            ends.add((bad, newest.step))
            again = Run(out).load()
            again.step = 3
            again.save()
            assert not list(out.glob(".step*partial"))
            assert same(checkpoint.load(checkpoint.latest(out)).weights(), want[newest.step])
    # Before the rename of the main process all deaths leave the old one, after it the new one.
    assert ends == {(0, 1), (0, 2), (1, 1)}


# --- copies that are no longer the same ---


def flip_a_bit(rank: int, n: int, out: str, kind: str, bad: int) -> list[str]:
    """What the next saves say after the lowest bit of one weight has changed, and changed back."""
    r, said = Run(out, kind).train(1), []
    weight: Any = r.model.transformer.h[1].attn.c_proj.weight
    weight = weight.to_local() if hasattr(weight, "to_local") else weight
    for _ in range(2):
        if rank == bad:
            weight.detach().view(torch.int32)[-1, 0] ^= 1
        try:
            r.save()
            said.append(str([p.name for p in checkpoint.folders(out)]))
        except UserError as e:
            assert not Path(out).exists()
            said.append(str(e))
    return said


@pytest.mark.parametrize("kind, n, bad, words", [
    ("ddp", 2, 1, "of process 1 is not that of process 0"),
    pytest.param("ddp", 3, 0, "of process 0 is not that of processes 1, 2", marks=pytest.mark.slow),
    pytest.param("hybrid", 4, 2, "of process 2 is not that of process 0", marks=pytest.mark.slow),
    pytest.param("hybrid", 6, 3, "of process 3 is not that of processes 1, 5",
                 marks=pytest.mark.slow),
])  # fmt: skip
def test_one_bit_of_one_copy_is_noticed_and_its_process_named(kind, n, bad, words, tmp_path):
    for first, then in run(flip_a_bit, n, str(tmp_path / "out"), kind, bad):
        assert f"transformer.h.1.attn.c_proj.weight {words};" in first
        assert then == "['step-00000001']"


# --- in the background ---


def save_in_the_background(rank: int, n: int, out: str, kind: str) -> list[str]:
    """Save while the weights change; the files that differ from those of a plain save."""
    plain, later = Run(f"{out}/plain", kind), Run(f"{out}/later", kind, async_checkpoint=True)
    go_on, began, ended = threading.Event(), [], []
    real = checkpoint.store.save

    def held(*args: Any, **kwargs: Any) -> Any:
        began.append(kwargs["state"]["step"])
        assert rank or go_on.wait(60)  # the others wait for it, in a group of their own
        done = real(*args, **kwargs)
        ended.append(kwargs["state"]["step"])
        return done

    for r in (plain, later):
        r.train(2)
    torch.manual_seed(3)  # the random state is saved, too
    plain.save()
    torch.manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint.saving, "save", held)
        later.save()
        later.train(3)  # and its collectives
        assert (began, ended) == ([2], []) and not list(Path(out, "later").glob("step*"))
        threading.Timer(0.2, go_on.set).start()
        later.save()  # waits for the first one
        assert ended == [2]
        checkpoint.finish(later)
        assert (began, ended) == ([2, 5], [2, 5])
    checkpoint.finish(later)  # nothing is left to wait for
    later.distributed.gather(None)
    assert same(later.whole(), Run(f"{out}/later", kind, seed=5).load().whole())
    there = [Path(out, name, "step-00000002") for name in ("plain", "later")]
    files = [{p.relative_to(f) for p in f.rglob("*") if p.is_file()} for f in there]
    assert files[0] == files[1]
    return sorted(
        str(f) for f in files[0] if (there[0] / f).read_bytes() != (there[1] / f).read_bytes()
    )


@pytest.mark.slow
def test_in_the_background_the_bytes_are_those_of_the_moment(tmp_path):
    differ = ["settings.json"]  # which names the knob, and the folder
    assert save_in_the_background(0, 1, str(tmp_path / "one"), "one") == differ
    differ.append("shards/.metadata")  # DCP's own holds a random name
    got = run(save_in_the_background, 2, str(tmp_path / "two"), "fsdp")
    assert got == [differ, differ]


def fail_in_the_background(rank: int, n: int, out: str) -> list[str]:
    """What is said, and when: by the save after the one that failed, or at the end."""
    r, said = Run(out, "fsdp", async_checkpoint=True).train(1), []
    r.save()
    for then in (r.save, lambda: checkpoint.finish(r)):
        checkpoint.finish(r)
        r.train(1)
        with pytest.MonkeyPatch.context() as patch:
            when_saving(patch, 9 if rank == 1 else -1, full)
            r.save()
            assert r.saving.thread
            r.saving.thread.join()
        with pytest.raises(UserError) as e:
            then()
        said.append(str(e.value))
    r.save()
    checkpoint.finish(r)
    assert checkpoint.load(checkpoint.latest(out)).step == 3
    return said


def test_what_fails_in_the_background_is_said_at_the_next_save_or_the_end(tmp_path):
    (first, second), other = run(fail_in_the_background, 2, str(tmp_path))
    assert f"{tmp_path}/step-00000002 (process 1: [Errno 28]" in first
    assert f"{tmp_path}/step-00000003 (process 1: [Errno 28]" in second
    assert first.endswith("step-00000001 is still good") and len(other) == 2


# --- somebody else's checkpoint ---


@pytest.fixture
def shared(two: Saved, tmp_path: Path) -> Path:
    """A checkpoint of two processes; to be damaged."""
    return Path(
        shutil.copytree(checkpoint.latest(two["fsdp"][0]), tmp_path / "out" / "step-00000003")
    )


def change(folder: Path, how: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((folder / "shards" / "index.json").read_text())
    how(index)
    (folder / "shards" / "index.json").write_text(json.dumps(index))


NAME = "model.transformer.wte.weight"
DAMAGE: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a hole": (lambda index: index[NAME]["parts"].pop(), f"the parts of {NAME} are not the whole"),
    "another file": (lambda index: index[NAME]["parts"][0].update(file="../../x"),
                     "'../../x' is not a file in this folder"),
    "a file of the system": (lambda index: index[NAME]["parts"][0].update(file="/etc/hostname"),
                             "'/etc/hostname' is not a file in this folder"),
    "no dtype": (lambda index: index[NAME].update(dtype="load"), "has the dtype 'load'"),
    "no key": (lambda index: index[NAME].pop("shape"), "KeyError: 'shape'"),
    "beyond the end": (lambda index: index[NAME]["parts"][0].update(offset=10**7),
                       "cannot be read"),
    "a name less": (lambda index: index.pop(NAME), "of another model: it lacks"),
    "another size": (lambda index: index.update({NAME: index[NAME.replace("wte", "wpe")]}),
                     "of another size"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_an_index_that_is_damaged_is_one_sentence(damage, shared):
    how, words = DAMAGE[damage]
    change(shared, how)
    for read in (Run(shared.parent, seed=5).load, lambda: checkpoint.load(shared).model()):
        with pytest.raises(UserError) as e:
            read()
        assert words in str(e.value) and "\n" not in str(e.value), e.value


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "index.json"])
def test_a_file_that_is_missing_or_cut_is_one_sentence(file, shared):
    path = shared / "shards" / file
    path.write_bytes(path.read_bytes()[:-5000])
    for words in ("cannot be read", "does not exist"):
        with pytest.raises(UserError, match=words) as e:
            Run(shared.parent, seed=5).load()
        assert "\n" not in str(e.value)
        path.unlink(missing_ok=True)


def test_nothing_in_a_shared_checkpoint_runs_code(shared, tmp_path):
    blown, index = tmp_path / "blown", shared / "shards" / "index.json"
    want = checkpoint.load(shared).weights()
    (shared / "shards" / ".metadata").write_bytes(pickle.dumps(Bomb(blown)))
    assert same(checkpoint.load(shared).weights(), want)  # it is not looked at
    good = index.read_bytes()
    index.write_bytes(pickle.dumps(Bomb(blown)))
    with pytest.raises(UserError, match="cannot be read"):
        checkpoint.load(shared).weights()
    index.write_bytes(good)
    for path in (shared / "shards").glob("*.distcp"):
        torch.save(Bomb(blown), path)
        length = path.stat().st_size
        change(shared, lambda index, length=length: [
            part.update(offset=0, length=length) for t in index.values() for part in t["parts"]
        ])  # fmt: skip
    with pytest.raises(UserError, match="cannot be read") as e:
        checkpoint.load(shared).weights()
    assert "weights_only=False" not in str(e.value)
    torch.save({"optimizer": Bomb(blown)}, shared / "optimizer.pt")
    with pytest.raises(UserError, match="could run code"):
        Run(shared.parent).load()
    assert not blown.exists()
    pickle.loads(pickle.dumps(Bomb(blown)))
    assert blown.exists()  # it was a live one


# --- python -m checkpoint export ---


@pytest.mark.parametrize("of", ["one", "ddp", "fsdp"])
def test_an_export_gives_the_same_logits(of, two, tmp_path, capsys):
    out, held = two[of]
    want = checkpoint.load(checkpoint.latest(two["one"][0])).model().eval()
    want.load_state_dict({n.removeprefix("model."): t for n, t in held.items() if "model." in n})
    x = torch.randint(19, (2, 7))
    with torch.no_grad():
        logits = want(x)[0]
        for source, form in ((out, "safetensors"), (checkpoint.latest(out), "transformers")):
            to = tmp_path / "new" / form
            killed = to.with_name(f".{form}.partial")  # an export into the same place
            killed.mkdir(parents=True)
            (killed / "config.json").write_text("{")
            assert export(["export", str(source), f"--to={to}", f"--format={form}"]) == 0
            got = checkpoint.init_model(str(to), attention_backend="manual").eval()(x)[0]
            assert torch.equal(got, logits)
            said = f"{checkpoint.latest(out)} is now in {to} ({form})\n"
            assert capsys.readouterr().out == said
            assert [p.name for p in to.parent.glob(".*")] == []
            assert (to / "config.json").exists() == (form == "transformers")
            with safe_open(to / "model.safetensors", "pt") as file:
                assert file.metadata() == {"format": "pt"}  # transformers refuses others
        transformers = pytest.importorskip("transformers")
        theirs = transformers.GPT2LMHeadModel.from_pretrained(to).eval()(x).logits
    torch.testing.assert_close(theirs, logits)


@pytest.mark.parametrize("words, said", [
    ([], "python -m checkpoint export FOLDER --to=PLACE"),
    (["export", "x"], "python -m checkpoint export FOLDER --to=PLACE"),
    (["import", "x", "--to=y"], "python -m checkpoint export FOLDER --to=PLACE"),
    (["export", "nowhere", "--to=y"], "there is no checkpoint in nowhere"),
    (["export", "{out}", "--to={out}"], "is there already"),
    (["export", "{out}", "--to={out}/step-00000003/settings.json/x"], "could not write"),
])  # fmt: skip
def test_an_export_that_cannot_be_is_one_sentence(words, said, two):
    with pytest.raises(UserError, match=re.escape(said)) as e:
        export([word.format(out=two["fsdp"][0]) for word in words])
    assert "\n" not in str(e.value)


def test_what_is_written_in_the_background_is_a_copy() -> None:
    """The next step changes the weights while it is written."""
    weight, told = torch.zeros(3), {"lr": 0.1}
    copy = checkpoint.saving.copied({"model": [weight], "group": told})
    weight.fill_(1)
    told["lr"] = 0.2
    assert copy["model"][0].tolist() == [0, 0, 0] and copy["group"] == {"lr": 0.1}


def test_what_is_written_in_the_background_is_agreed_on_in_a_group_of_its_own(monkeypatch) -> None:
    """In the run's own group its answers would mix with those of the steps."""
    monkeypatch.setattr(dist, "new_group", lambda backend: f"new {backend}")
    for of_the_run, own in ((None, None), ("the run's", "new gloo")):
        saving = checkpoint.Saving(DistInfo(CPU, control=of_the_run))
        assert saving.distributed.control == own


class Told:
    """One process among others: gather() keeps what it says, and gives what all have said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def gather(self, mine: Any) -> list[Any]:
        self.said.append(mine)
        return self.said


def test_copies_that_differ_by_a_bit_are_told_with_who_holds_them() -> None:
    names = ("wte", "ln.bias")
    good = {name: torch.linspace(-0.4, 0.5, 7) for name in names}
    for kind in (torch.float32, torch.bfloat16, torch.int64):
        everyone: Any = Told()
        for _ in range(3):
            shards.check_replicas({n: t.to(kind) for n, t in good.items()}, everyone)
        bad = {n: t.to(kind) for n, t in good.items()}
        bits = bad["ln.bias"].view(torch.int16 if kind is torch.bfloat16 else torch.int32)
        bits[3] ^= 1
        said = r"different: ln.bias of process 3 is not that of processes 0, 1, 2; nothing was sav"
        with pytest.raises(UserError, match=said):
            shards.check_replicas(bad, everyone)
    everyone = Told()  # what each holds a part of may differ, and only its copies are compared
    everyone.said = [[((0,), 5)], [((1,), 6)], [((0,), 5)], [((1,), 7)]]
    with pytest.raises(UserError, match=r"wte of process 3 is not that of process 1; "):
        shards.check_replicas({"wte": torch.zeros(0)}, everyone)
    everyone.said = [[((0,), 5)], [((1,), 6)], [((0,), 5)], [((1,), 6)]]
    shards.check_replicas({"wte": torch.zeros(0)}, everyone)
