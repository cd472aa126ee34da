"""Checkpoints of several processes: saved by any number, loaded by any other."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run
from safetensors import safe_open
from test_checkpoint import Bomb, at_operation
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import checkpoint
from checkpoint import shards
from checkpoint.__main__ import main as export
from checkpoint.run import numbers, tensors
from core.distributed import DistInfo
from core.optimizer import build_optimizer
from core.settings import UserError
from data import CharTokenizer
from model import GPT, GPTConfig

# Sizes that 3 and 4 processes do not divide; norms of 6 for 4, and a head of its own.
TINY = GPTConfig(block_size=7, vocab_size=19, n_layer=2, n_head=1, n_embd=6, bias=False,
                 attention_backend="manual", position="rope", norm="rms", mlp="swiglu",
                 tied=False)
HOW: Any = SimpleNamespace(learning_rate=1e-2, weight_decay=0.1, beta1=0.9, beta2=0.95)
CPU = torch.device("cpu")
LETTERS = CharTokenizer("abcdefghijklmnopqrs")


class Run:
    """A run like train.py's, of this process and the others of its group."""

    best_loss = float("inf")

    def __init__(self, out: Path | str, kind: str = "one", seed: int = 0) -> None:
        """kind: "one", "ddp", "fsdp", or "hybrid", where 2 processes share one copy."""
        torch.manual_seed(seed)
        world = dist.get_world_size() if kind != "one" else 1
        rank, group = (dist.get_rank(), dist.group.WORLD) if kind != "one" else (0, None)
        control = dist.new_group(backend="gloo") if group else None
        self.distributed = DistInfo(CPU, rank, world, control)
        self.saver = checkpoint.Saver(str(out), 2, self.distributed)
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
        """Train on sharded batches and evaluate: FSDP then leaves the root's parameters whole."""
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
        self.saver.save(
            self.model, self.optimizer, self.scaler, {}, LETTERS.to_meta(),
            step=self.step, val_loss=val_loss,
        )
        return Path(self.saver.out_dir)

    def load(self) -> Run:
        saved = checkpoint.load(checkpoint.latest(self.saver.out_dir))
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
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


# --- saved by n processes, loaded by m ---


def train_and_save(rank: int, n: int, folder: str, *kinds: str) -> dict[str, dict[str, Tensor]]:
    """Weights and optimizer of each kind of run after 3 steps."""
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
    """The next 20 losses after each checkpoint; asserts that all values are restored."""
    losses = {}
    for of, (out, want) in torch.load(saved).items():
        r = Run(out, kind, seed=5).load()
        assert r.step == 3 and r.best_loss == 1.0
        assert same(r.whole(), want), of
        losses[of] = r.train(20).losses
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("kind, n", [("fsdp", 1), ("fsdp", 3), ("ddp", 2), ("hybrid", 4)])
def test_any_number_of_processes_loads_all_bits_and_goes_on(kind, n, all_kinds, tmp_path):
    want = Run("").train(23).losses[3:]
    torch.save(all_kinds, tmp_path / "saved.pt")
    for losses in run(load_and_go_on, n, kind, tmp_path / "saved.pt"):
        for of, got in losses.items():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5, msg=f"{of} to {kind} {n}")


@pytest.mark.slow
@pytest.mark.parametrize("of", ["one", "ddp", "fsdp"])
def test_one_process_loads_all_bits_and_goes_on(of, two, tmp_path):
    want = Run("").train(23).losses[3:]
    torch.save({of: two[of]}, tmp_path / "saved.pt")
    losses = load_and_go_on(0, 1, "one", tmp_path / "saved.pt")[of]
    torch.testing.assert_close(losses, want, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("of", ["ddp", "fsdp"])
def test_weights_and_optimizer_are_read_whole_on_the_cpu(of, two):
    out, want = two[of]
    there = checkpoint.load(checkpoint.latest(out))
    weights = {f"model.{name}": t for name, t in there.weights().items()}
    assert same(weights, {name: t for name, t in want.items() if name.startswith("model.")})
    fresh = Run(out)
    fresh.model = there.model()
    fresh.optimizer = build_optimizer(fresh.model, HOW, CPU)
    rest = there.rest()
    number = numbers(fresh.model, fresh.optimizer)
    state: dict[int, dict[str, Tensor]] = {i: {} for i in number.values()}
    for name, tensor in shards.read_whole(there.folder / "shards", "optimizer.").items():
        parameter, _, key = name.rpartition(".")
        state[number[parameter]][key] = tensor
    groups = rest["optimizer"]["param_groups"]  # and by torch's own rules
    fresh.optimizer.load_state_dict({"param_groups": groups, "state": state})
    assert same(fresh.whole(), want)
    assert len(rest["rng"]) == there.state["processes"] == 2


def read_on_one(rank: int, n: int, out: str) -> tuple[bool, str]:
    """(random numbers are restored, the error if process 1 cannot read)."""
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


def test_if_one_process_cannot_read_all_fail(tmp_path):
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

    patch.setattr(checkpoint.store, "save", save)
    return seen


def save_on_two_disks(rank: int, n: int, out: str) -> str:
    with pytest.raises(UserError) as e:
        Run(f"{out}/{rank}", "fsdp").save()
    assert not list(Path(out, str(rank)).glob(".step*"))
    return str(e.value)


def test_machines_must_share_the_folder(tmp_path):
    assert all("out_dir" in message for message in run(save_on_two_disks, 2, str(tmp_path)))


def killed_at(rank: int, n: int, out: str, bad: int, at: int) -> list[str]:
    """Save step 1, be killed in the save of step 2; return the operations."""
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
    operations = run(killed_at, 2, str(tmp_path / "whole"), 0, -1)
    want = {}
    for folder in checkpoint.folders(tmp_path / "whole"):
        want[int(folder.name[-1])] = checkpoint.load(folder).weights()
    assert sorted(want) == [1, 2] and not same(want[1], want[2])
    ends = set()
    for bad, names in enumerate(operations):
        # Of each run of the same operation the first and the last.
        changes = [at for at in range(1, len(names)) if names[at - 1] != names[at]]
        edges = {0, *changes, *(at - 1 for at in changes), len(names) - 1}
        for at in sorted(edges):
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


# --- damage ---


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
DAMAGE: dict[str, Callable[[dict[str, Any]], Any]] = {
    NAME: lambda index: index[NAME]["parts"].pop(),
    "../../x": lambda index: index[NAME]["parts"][0].update(file="../../x"),
    "/etc/hostname": lambda index: index[NAME]["parts"][0].update(file="/etc/hostname"),
    "load": lambda index: index[NAME].update(dtype="load"),
    "shape": lambda index: index[NAME].pop("shape"),
    "shards": lambda index: index[NAME]["parts"][0].update(offset=10**7),
    "wte.weight is missing": lambda index: index.pop(NAME),
    "wte.weight is (": lambda index: index.update({NAME: index[NAME.replace("wte", "ln_f")]}),
}


@pytest.mark.parametrize("value", DAMAGE)
def test_a_damaged_index_is_an_error_that_names_the_value(value, shared):
    change(shared, DAMAGE[value])
    for read in (Run(shared.parent, seed=5).load, lambda: checkpoint.load(shared).model()):
        with pytest.raises(UserError) as e:
            read()
        assert value in str(e.value) and "\n" not in str(e.value), e.value


def move(part: dict[str, Any], rows: int) -> None:
    part["at"][0] += rows


@pytest.mark.parametrize("name", [NAME, f"optimizer.{NAME.removeprefix('model.')}.exp_avg"])
@pytest.mark.parametrize("damage", [
    lambda saved: move(saved["parts"][0], 1), lambda saved: move(saved["parts"][1], -1),
    lambda saved: move(saved["parts"][1], 10**6), lambda saved: move(saved["parts"][0], -4),
    lambda saved: saved["parts"].append(saved["parts"][0]),
    lambda saved: saved.update(dtype="float16"), lambda saved: saved.update(dtype="int32"),
    lambda saved: [part.update(shape=part["shape"][::-1], at=[0, 0]) for part in saved["parts"]],
])  # fmt: skip
def test_parts_cover_each_tensor_once_as_they_were_written(name, damage, shared):
    change(shared, lambda index: damage(index[name]))
    with pytest.raises(UserError, match=name) as e:
        Run(shared.parent, seed=5).load()
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp"])
def test_a_flipped_bit_in_a_shard_is_an_error_and_old_shards_have_no_checksum(file, shared):
    path = shared / "shards" / file
    content = bytearray(path.read_bytes())
    index = json.loads((shared / "shards" / "index.json").read_text())
    part = next(p for t in index.values() for p in t["parts"] if p["file"] == file)
    last = torch.load(io.BytesIO(content[part["offset"] :][: part["length"]])).numpy().tobytes()
    content[content.index(last, part["offset"]) + 3] ^= 0x40  # of a number
    path.write_bytes(content)
    for read in (Run(shared.parent, seed=5).load, lambda: checkpoint.load(shared).model()):
        with pytest.raises(UserError, match=file):
            read()
    (shared / "checksums.json").unlink()
    change(shared, lambda index: [p.pop("crc32") for t in index.values() for p in t["parts"]])
    assert Run(shared.parent, seed=5).load().step == 3


@pytest.mark.parametrize("file", ["__0_0.distcp", "__1_0.distcp", "index.json"])
def test_a_missing_or_cut_file_is_an_error(file, shared):
    path = shared / "shards" / file
    path.write_bytes(path.read_bytes()[:-5000])
    for _ in ("cut", "missing"):
        with pytest.raises(UserError, match="shards") as e:
            Run(shared.parent, seed=5).load()
        assert "\n" not in str(e.value)
        path.unlink(missing_ok=True)


def test_nothing_in_a_shared_checkpoint_runs_code(shared, tmp_path):
    blown, index = tmp_path / "blown", shared / "shards" / "index.json"
    want = checkpoint.load(shared).weights()
    (shared / "shards" / ".metadata").write_bytes(pickle.dumps(Bomb(blown)))
    assert same(checkpoint.load(shared).weights(), want)
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
        ])
    with pytest.raises(UserError, match="cannot be read") as e:
        checkpoint.load(shared).weights()
    assert "weights_only=False" not in str(e.value)
    torch.save({"optimizer": Bomb(blown)}, shared / "optimizer.pt")
    with pytest.raises(UserError, match="could run code"):
        Run(shared.parent).load()
    assert not blown.exists()
    pickle.loads(pickle.dumps(Bomb(blown)))
    assert blown.exists()


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
            assert str(to) in capsys.readouterr().out
            assert [p.name for p in to.parent.glob(".*")] == []
            assert (to / "config.json").exists() == (form == "transformers")
            with safe_open(to / "model.safetensors", "pt") as file:
                assert file.metadata() == {"format": "pt"}  # transformers refuses others
        transformers = pytest.importorskip("transformers")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(to).eval()(x).logits
    torch.testing.assert_close(theirs, logits)


@pytest.mark.parametrize("words, said", [
    ([], "--to"),
    (["export", "x"], "no checkpoint in x"),
    (["import", "x", "--to=y"], "--to"),
    (["export", "nowhere", "--to=y"], "nowhere"),
    (["export", "{out}", "--to={out}"], "exists"),
    (["export", "{out}", "--to={out}/step-00000003/settings.json/x"], "could not write"),
])
def test_an_impossible_export_is_an_error(words, said, two):
    with pytest.raises(UserError, match=re.escape(said)) as e:
        export([word.format(out=two["fsdp"][0]) for word in words])
    assert "\n" not in str(e.value)
