"""Checkpoints: exact, complete after any kill; other programs' files. Damage: test_damage.py."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import processes
import pytest
import torch
import torch.distributed as dist
from conftest import few
from test_train import nanogpt_file
from torch import Tensor

import checkpoint
from core.optimizer import build_optimizer, tensors
from core.options import TrainConfig
from core.parallel import DistInfo
from core.settings import UserError
from model import GPT, GPTConfig

CPU = torch.device("cpu")
TINY = GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=8)


def restored(folder: Path) -> dict[str, Tensor]:
    """Weights and optimizer as one process goes on with them."""
    saved = checkpoint.load(folder)
    model = saved.model(attention_backend="manual")
    optimizer = build_optimizer(model, saved.read("train", TrainConfig), CPU)
    torch.nn.init.zeros_(model.transformer.wte.weight)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    checkpoint.run.restore(saved, model, optimizer, scaler, 0, DistInfo(CPU))
    assert saved.step == int(folder.name[5:])
    return tensors(model, optimizer)


def save(out: Path, step: int, *, keep: int = 2, fill: float | None = None,
         group: DistInfo | None = None, **state: Any) -> Path:  # fmt: skip
    """TINY filled with one number, by default the step; group: of processes, each with its part."""
    value = float(step if fill is None else fill)
    weights = {k: torch.full_like(v, value) for k, v in GPT(TINY).state_dict().items()}
    how: Any = {"weights": weights} if group is None else {
        "distributed": group, "shards": {f"model.{k}": t for k, t in weights.items()}}
    return checkpoint.save(
        out, **how, settings={"train": {}, "model": asdict(TINY), "tokenizer": {"name": "char"}},
        optimizer={"optimizer": {"m": torch.full((5000,), value)}, "scaler": {}, "rng": []},
        state={"step": step, "value": value, **state}, keep=keep)  # fmt: skip


def value(folder: Path) -> float:
    """The number of save(); fails if the files differ."""
    saved = checkpoint.load(folder)
    want = float(saved.state["value"])
    assert all(bool((p == want).all()) for p in saved.model().state_dict().values())
    assert bool((saved.rest()["optimizer"]["m"] == want).all())
    return want


def names(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir())


# --- saving and loading ---


def test_it_keeps_the_best_and_the_last(tmp_path, caplog):
    for step, loss in enumerate((3.0, 0.0, 2.0, 2.5, None, 1.5), start=1):
        save(tmp_path, step, val_loss=loss)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert checkpoint.best_folder(tmp_path) == tmp_path / "step-00000002"
    for left in (".step-00000009.partial", ".step-00000001.deleted.partial", "step-5-notes"):
        (tmp_path / left).mkdir()  # the last one is the user's
        (tmp_path / left / "model.safetensors").write_bytes(b"half")
    assert [p.name[-1] for p in checkpoint.folders(tmp_path)] == ["2", "5", "6"]
    with pytest.raises(UserError, match="step-00000006"):  # nothing is overwritten
        save(tmp_path, 6, fill=2)
    assert value(checkpoint.latest(tmp_path)) == 6
    save(tmp_path, 7, keep=1, val_loss=-0.5)
    save(tmp_path, 100_000_000, keep=1)  # the newest is the highest step, not the longest name
    assert names(tmp_path) == ["step-00000007", "step-100000000", "step-5-notes"]
    assert checkpoint.latest(tmp_path).name == "step-100000000"
    assert checkpoint.best_folder(tmp_path) == tmp_path / "step-00000007"
    assert checkpoint.best_folder(tmp_path / "nowhere") is None
    (tmp_path / "step-100000000" / "train_state.json").write_text("{")
    save(tmp_path, 100_000_001, keep=1, val_loss=3.0)  # a damaged older one does not prevent it
    assert value(checkpoint.latest(tmp_path)) == 100_000_001 and str(tmp_path) in caplog.text
    assert "--init_from" not in caplog.text  # which reads the others, at each save


def test_in_the_background_the_values_are_those_of_the_call(tmp_path):
    model = GPT(replace(TINY, vocab_size=20_000))
    optimizer = build_optimizer(model, TrainConfig(), CPU)
    config = TrainConfig(out_dir=str(tmp_path), async_checkpoint=True)
    saver = checkpoint.Saver(config, DistInfo(CPU), {}, 0)
    want = {name: t.clone() for name, t in model.state_dict().items()}
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    saver.save(model, optimizer, scaler, step=1, val_loss=None)
    for p in model.parameters():
        p.data.zero_()
    saver.wait()
    torch.testing.assert_close(checkpoint.load(checkpoint.latest(tmp_path)).weights(), want)


# --- a kill at any moment, a full disk ---

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod"}
armed: list[Callable[[str], None]] = []


def audit(event: str, args: tuple[Any, ...]) -> None:
    """Python's audit hook of disk operations."""
    if armed and event in CHANGES and (event != "open" or args[2] & (os.O_WRONLY | os.O_RDWR)):
        armed[-1](event)


sys.addaudithook(audit)


@contextlib.contextmanager
def at_operation(n: int, stop: Callable[[], Any]) -> Iterator[list[str]]:
    """Call `stop` before the n-th disk operation; yield the growing list of names."""
    seen: list[str] = []

    def count(event: str) -> None:
        seen.append(event)
        if len(seen) == n + 1:
            stop()

    fsync = os.fsync  # which has no audit event
    with patch.object(os, "fsync", lambda fd: (count("fsync"), fsync(fd))):
        armed.append(count)
        try:
            yield seen
        finally:
            armed.pop()


def survived(out: Path, losses: list[float]) -> float | None:
    """The newest checkpoint's number, if any; the best stays, and further saves clean up."""
    step = len(losses) + 1
    left = [value(folder) for folder in checkpoint.folders(out)]
    if losses:
        assert left[-1] in (len(losses), 99)
        best = checkpoint.best_folder(out)
        assert best is not None and checkpoint.load(best).state["val_loss"] == 1.0
    if not (out / f"step-{step:08}").exists():
        save(out, step, keep=1, fill=7, val_loss=6.0)
    save(out, step + 1, keep=1, fill=8, val_loss=7.0)
    assert value(checkpoint.latest(out)) == 8
    kept = "step-00000001" if losses else f"step-{step:08}"
    assert names(out) == [kept, f"step-{step + 1:08}"]
    return left[-1] if left else None


def edges(operations: list[str]) -> list[int]:
    """Of each run of the same operation the first and the last."""
    changes = [at for at in range(1, len(operations)) if operations[at - 1] != operations[at]]
    return sorted({0, *changes, *(at - 1 for at in changes), len(operations) - 1})


def begun(out: Path, losses: list[float], group: DistInfo | None = None) -> Path:
    out.mkdir(exist_ok=True)
    for step, loss in enumerate(losses, 1):
        save(out, step, keep=9, val_loss=loss, group=group)
    return out


@pytest.mark.parametrize("losses", few([[1.0, 5.0], []]))
def test_a_crash_between_any_two_operations(losses, tmp_path):
    start, last = begun(tmp_path / "start", losses), {"keep": 1, "fill": 99, "val_loss": 6.0}
    shutil.copytree(start, whole := tmp_path / "whole")
    with at_operation(-1, print) as operations:
        save(whole, len(losses) + 1, **last)
    outcomes = set()
    for n in edges(operations):
        shutil.copytree(start, out := tmp_path / str(n))
        with pytest.raises(KeyboardInterrupt), at_operation(n, Mock(side_effect=KeyboardInterrupt)):
            save(out, len(losses) + 1, **last)
        outcomes.add(survived(out, losses))
    assert len(operations) > 8 and outcomes == {len(losses) or None, 99.0}


def killed_at(rank: int, n: int, out: Path, bad: int, at: int) -> list[str]:
    """Kill process `bad` in the save of step 3; return the operations."""
    group = DistInfo(CPU, rank, n, dist.group.WORLD)
    begun(out, [1.0, 5.0], group)
    with at_operation(at if rank == bad else -1, lambda: os.kill(os.getpid(), signal.SIGKILL)) as x:
        save(out, 3, keep=1, fill=99, val_loss=6.0, group=group)
    return x


@pytest.mark.slow
def test_sigkill_of_one_process_at_any_operation_leaves_a_good_one(tmp_path):
    outcomes = set()
    for bad, operations in enumerate(processes.run(killed_at, 2, tmp_path / "whole", 0, -1)):
        for at in edges(operations):
            with pytest.raises(AssertionError, match=r"without a word|Connection"):
                processes.run(killed_at, 2, out := tmp_path / f"{bad}-{at}", bad, at)
            outcomes.add((bad, survived(out, [1.0, 5.0])))
    # Before the rename of the main process all deaths leave the old one, after it the new one.
    assert outcomes == {(0, 2.0), (0, 99.0), (1, 2.0)}


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path):
    save(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for step, limit in enumerate((0, 100, 2000, 5000, 19_000), 2):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(UserError, match=f"step-{step:08}.*File too large"):
                save(tmp_path, step)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert names(tmp_path) == ["step-00000001"] and value(checkpoint.latest(tmp_path)) == 1


# --- of others ---


def test_unknown_settings_of_another_version_are_ignored(tmp_path):
    folder = save(tmp_path, 3)
    settings = json.loads((folder / "settings.json").read_text())
    settings["model"]["residual_dtype"] = "float32"
    settings["train"] = {"batch_size": 4, "keep_freed_memory": False}
    (folder / "settings.json").write_text(json.dumps(settings))
    assert checkpoint.load(folder).config() == TINY
    assert bool((checkpoint.init_model(str(folder)).transformer.wte.weight == 3).all())
    assert checkpoint.load(folder).read("train", TrainConfig) == TrainConfig(batch_size=4)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


ONE_LAYER = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "vocab_size": 20}


def test_a_nanogpt_checkpoint_has_the_same_weights_or_is_refused(tmp_path):
    """With --compile and without; code in it is not executed."""
    model = GPT(replace(TINY, bias=False, dropout=0.2)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    saved = torch.load(path := nanogpt_file(tmp_path / "ckpt.pt", model))
    saved["optimizer"] = torch.optim.AdamW(model.parameters()).state_dict()
    plain = {k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()}
    for weights in (saved["model"], plain):
        torch.save({**saved, "model": weights, "best_val_loss": torch.tensor(1.5)}, path)
        got = checkpoint.init_model(str(path), attention_backend="manual")
        assert got.config == replace(model.config, attention_backend="manual", gelu="exact")
        torch.testing.assert_close(got.state_dict(), model.state_dict(), rtol=0, atol=0)
    blown = path.with_name("blown")
    for content, named in (
        ([1, 2], "model_args"), ({**saved, "model_args": None}, "model_args"),
        ({**saved, "model": [1]}, "model_args"), ({**saved, "model": Bomb(blown)}, ""),
        ({**saved, "model_args": {**ONE_LAYER, "bias": False}}, "transformer.h.1"),
        ({**saved, "model_args": {"n_head": 5, "n_embd": 8}}, "n_embd"), (None, ""),
    ):  # fmt: skip
        torch.save(content, path)
        if content is None:
            path.write_bytes(pickle.dumps(Bomb(blown), protocol=2))
        with pytest.raises(UserError, match=f"{path}.*{named}") as e:
            checkpoint.init_model(str(path))
        assert "weights_only" not in str(e.value)  # torch's advice would run it
    assert not blown.exists()
