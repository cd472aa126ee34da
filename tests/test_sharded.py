"""Checkpoints saved by any number of processes, loaded by any other."""

from __future__ import annotations

import errno
import json
import os
import pickle
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
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
from checkpoint.__main__ import main as export
from core.distributed import DistInfo
from core.optimizer import build_optimizer, tensors
from core.options import TrainConfig
from core.settings import UserError
from data import CharTokenizer
from model import GPT, GPTConfig

# Sizes that 3 and 4 processes do not divide; norms of 6 for 4, and a head of its own.
TINY = GPTConfig(block_size=7, vocab_size=19, n_layer=2, n_head=1, n_embd=6, bias=False,
                 attention_backend="manual", position="rope", norm="rms", mlp="swiglu",
                 tied=False)
CPU = torch.device("cpu")
LETTERS = CharTokenizer("abcdefghijklmnopqrs")


class Run:
    best_loss = float("inf")

    def __init__(self, out: Path | str, kind: str = "one", seed: int = 0) -> None:
        """kind: "one", "muon", "ddp", "fsdp", "hybrid" (2 processes share a copy)."""
        torch.manual_seed(seed)
        alone, optimizer = kind in ("one", "muon"), "muon" if kind == "muon" else "adamw"
        world = 1 if alone else dist.get_world_size()
        rank, group = (0, None) if alone else (dist.get_rank(), dist.group.WORLD)
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
        config = TrainConfig(learning_rate=1e-2, optimizer=optimizer)
        self.optimizer = build_optimizer(self.model, config, CPU)
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        self.step = 0

    def train(self, steps: int) -> Run:
        """And evaluate: FSDP then leaves the root's parameters whole."""
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
        """Weights and optimizer, copied."""
        flat: dict[str, Any] = tensors(self.model, self.optimizer)
        return {
            name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
            for name, t in flat.items()
        }


def same(got: dict[str, Tensor], want: dict[str, Tensor]) -> bool:
    return got.keys() == want.keys() and all(torch.equal(got[name], want[name]) for name in want)


# --- saved by n processes, loaded by m ---


def train_and_save(rank: int, n: int, folder: str, *kinds: str) -> dict[str, dict[str, Tensor]]:
    """Weights and optimizer after 3 steps."""
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
    folder = tmp_path_factory.mktemp("two")
    return train_in(1, folder, "one", "muon") | train_in(2, folder, "ddp", "fsdp")


@pytest.fixture(scope="module")
def all_kinds(two: Saved, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    four = train_in(4, tmp_path_factory.mktemp("four"), "hybrid")
    return {kind: saved for kind, saved in (two | four).items() if kind != "muon"}


def load_and_go_on(rank: int, n: int, kind: str, saved: Path) -> dict[str, list[float]]:
    """The next 20 losses; asserts that all values are restored."""
    losses = {}
    for of, (out, want) in torch.load(saved).items():
        r = Run(out, kind, seed=5).load()
        assert r.step == 3 and r.best_loss == 1.0
        assert same(r.whole(), want), of
        losses[of] = r.train(20).losses
    return losses


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, n", [("one", 1), ("fsdp", 1), ("fsdp", 3), ("ddp", 2), ("hybrid", 4)]
)
def test_any_number_of_processes_loads_all_bits_and_goes_on(kind, n, all_kinds, tmp_path):
    want = Run("").train(23).losses[3:]
    torch.save(all_kinds, tmp_path / "saved.pt")
    for losses in run(load_and_go_on, n, kind, tmp_path / "saved.pt"):
        for of, got in losses.items():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-5, msg=f"{of} to {kind} {n}")


def read_on_one(rank: int, n: int, out: str) -> tuple[bool, str, str]:
    """(random numbers are restored, errors of process 1: unreadable, no folder)."""
    r = Run(f"{out}/shared", "fsdp")
    torch.manual_seed(rank)
    r.save()
    want = torch.rand(3)
    r.load()
    good = torch.equal(torch.rand(3), want)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.EIO, "Input/output error")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as read:
        if rank == 1:
            patch.setattr(torch, "load", broken)
        r.load()
    with pytest.raises(UserError) as write:
        Run(f"{out}/{rank}", "fsdp").save()
    assert not list(Path(out, str(rank)).glob(".step*"))
    return good, str(read.value), str(write.value)


def test_if_one_process_cannot_read_or_write_all_fail(tmp_path):
    (good, read, write), other = run(read_on_one, 2, str(tmp_path))
    assert good and other[:2] == (good, read) and "out_dir" in write and "out_dir" in other[2]
    assert re.search(r"^process 1: .*optimizer.pt .*OSError: .*error", read), read


def killed_at(rank: int, n: int, out: str, bad: int, at: int) -> list[str]:
    """Be killed in the save of step 2; return the operations."""
    r = Run(out, "fsdp").train(1)
    r.save()
    r.train(1)
    with at_operation(at if rank == bad else -1, lambda: os.kill(os.getpid(), signal.SIGKILL)) as x:
        r.save()
    return x


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

ODD = 'it\'s "out"\n\x1b[31m $x'  # a name of a folder


@pytest.fixture
def out(kind: str, two: Saved, tmp_path: Path) -> Path:
    """A run's folder, to damage."""
    return Path(shutil.copytree(two[kind][0], tmp_path / ODD))


def read_all(out: Path, kind: str = "one") -> dict[str, Tensor]:
    """Restore the newest checkpoint, and load its model."""
    checkpoint.load(checkpoint.latest(out)).model()
    return Run(out, kind, seed=5).load().whole()


def versions(path: Path, how: str, blown: Path) -> list[bytes | None]:
    """The damaged content; None: no file."""
    content = path.read_bytes()
    n = len(content)
    if how == "flipped":
        places = {*range(n // 18, n, n // 9), n - 1}
        return [content[:i] + bytes([content[i] ^ 0x40]) + content[i + 1 :] for i in places]
    if how == "cut":
        return [b"", content[: n // 2], content[:-1].rstrip()[:-1], None]
    torch.save(Bomb(blown), path)  # makes a folder when it is unpickled
    objects = [[], {}, 3, None, {"step": "3"}, {"train": {}, "model": {}}, {NAME: 3}]
    other = [json.dumps(content).encode() for content in objects]
    return [path.read_bytes(), pickle.dumps(Bomb(blown)), b"\x80\xffx", *other]


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("how", ["flipped", "cut", "another"])
@pytest.mark.parametrize("kind", ["one", "fsdp"])
def test_a_damaged_file_is_one_sentence_that_names_it(kind, how, out, two, tmp_path, caplog):
    """JSON that still fits is a warning."""
    want, folder, blown = two[kind][1], checkpoint.latest(out), tmp_path / "blown"
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        good = path.read_bytes()
        for content in versions(path, how, blown):
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
            elif path.name == "checksums.json":  # as in older versions
                continue
            caplog.clear()
            error = ""
            try:
                assert same(read_all(out), want)
                assert path.suffix == ".json"
            except UserError as e:
                error = str(e)
                assert error.isprintable()
            assert path.name in error + caplog.text or path.name == "checksums.json"
            assert "weights_only" not in error and error + caplog.text
        path.write_bytes(good)
    assert same(read_all(out), want) and not blown.exists()
    pickle.loads(pickle.dumps(Bomb(blown)))
    assert blown.exists()


NAME = "model.transformer.wte.weight"
MOMENT = "optimizer.transformer.wte.weight.exp_avg"


def moment(content: Any, change: Any) -> None:
    """Change the momenta of matrices."""
    for state in content["optimizer"]["state"].values():
        name = "exp_avg" if "exp_avg" in state else "momentum_buffer"
        state[name] = change(state[name]) if state[name].dim() == 2 else state[name]


def move(part: dict[str, Any], rows: int) -> None:
    part["at"][0] += rows


STATES: list[Callable[[Any], Any]] = [  # of optimizer.pt
    lambda o: o["optimizer"]["state"].clear(), lambda o: o["optimizer"]["state"].pop(1),
    lambda o: moment(o, lambda t: t.flatten()[:1]), lambda o: moment(o, lambda t: t.mT),
    lambda o: moment(o, lambda t: t.long()), lambda o: moment(o, lambda t: 0.5),
    lambda o: o["optimizer"]["state"][0].update(foo=torch.zeros(1)),
    lambda o: o.pop("rng"), lambda o: o.update(optimizer=[]),
]  # fmt: skip
ENTRIES: list[Callable[[Any], Any]] = [  # of a tensor in shards/index.json
    lambda saved: saved["parts"].pop(), lambda saved: saved["parts"].append(saved["parts"][0]),
    lambda saved: saved["parts"][0].update(file="../../x"), lambda saved: saved.pop("shape"),
    lambda saved: saved["parts"][0].update(file="/etc/hostname"),
    lambda saved: saved["parts"][0].update(offset=10**7),
    lambda saved: saved.update(dtype="load"), lambda saved: saved.update(dtype="float16"),
    lambda saved: saved.update(dtype="int32"), lambda saved: move(saved["parts"][0], 1),
    lambda saved: move(saved["parts"][1], -1), lambda saved: move(saved["parts"][1], 10**6),
    lambda saved: move(saved["parts"][0], -4),
    lambda saved: [part.update(shape=part["shape"][::-1], at=[0, 0]) for part in saved["parts"]],
]  # fmt: skip
INDEXES: list[Callable[[Any], Any]] = [
    lambda index: index.pop(NAME), lambda index: index.update({"\x1b[2J\n": index[NAME]}),
    *(lambda index, f=f, name=name: f(index[name]) for f in ENTRIES for name in (NAME, MOMENT)),
]  # fmt: skip


@pytest.mark.parametrize("kind, edit", [
    *((kind, edit) for kind in ("one", "muon") for edit in STATES),
    *(("fsdp", edit) for edit in INDEXES),
])
def test_contents_that_do_not_fit_are_refused(kind, edit, out):
    """Without checksums."""
    folder = checkpoint.latest(out)
    path = folder / ("shards/index.json" if kind == "fsdp" else "optimizer.pt")
    content = json.loads(path.read_text()) if kind == "fsdp" else torch.load(path)
    edit(content)
    if kind == "fsdp":
        path.write_text(json.dumps(content))
    else:
        torch.save(content, path)
    (folder / "checksums.json").unlink()
    with pytest.raises(UserError, match=folder.name) as e:
        read_all(out, "one" if kind == "fsdp" else kind)
    assert str(e.value).isprintable()


@pytest.mark.parametrize("kind", ["fsdp"])
def test_checkpoints_of_older_versions_have_no_checksums(kind, out, two):
    folder = checkpoint.latest(out)
    (folder / "checksums.json").unlink()
    index = folder / "shards" / "index.json"
    content = json.loads(index.read_text())
    for part in [part for saved in content.values() for part in saved["parts"]]:
        part.pop("crc32")
    index.write_text(json.dumps(content))
    (folder / "shards" / ".metadata").write_bytes(pickle.dumps(Bomb(out / "blown")))
    assert same(read_all(out), two["fsdp"][1]) and not (out / "blown").exists()


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
