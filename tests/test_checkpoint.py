"""Checkpoints: bit for bit, whole at any moment, refused in one sentence, and never executed."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import shutil
import ssl
import subprocess
import sys
import urllib.error
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError

import checkpoint
from attention import Policy
from checkpoint.together import together
from core.distributed import DistInfo
from core.hub import why_not_hub
from core.settings import UserError
from model import GPT, GPTConfig

TINY = GPTConfig(block_size=8, vocab_size=20, n_layer=2, n_head=2, n_embd=8)
FILES = ("model.safetensors", "optimizer.pt", "settings.json", "train_state.json")


def save(out: Path, step: int, *, keep: int = 2, fill: float | None = None, **state: Any) -> Path:
    """A checkpoint of TINY; all numbers in it are `fill`, the step if that is None."""
    value = float(step if fill is None else fill)
    weights = {k: torch.full_like(v, value) for k, v in GPT(TINY).state_dict().items()}
    return checkpoint.save(
        out,
        weights=weights,
        optimizer={"optimizer": {"m": torch.full((5000,), value)}, "scaler": {}, "rng": []},
        settings={"train": {}, "model": asdict(TINY), "tokenizer": {"name": "char"}},
        state={"step": step, "value": value, **state},
        keep=keep,
    )


def value(folder: Path) -> float:
    """The number that save() filled it with; fails if any file is torn or of another save."""
    saved = checkpoint.load(folder)
    want = float(saved.state["value"])
    assert all(bool((p == want).all()) for p in saved.model().state_dict().values())
    assert bool((saved.rest()["optimizer"]["m"] == want).all())
    return want


def names(out: Path) -> list[str]:
    return sorted(p.name for p in out.iterdir())


# --- what goes in comes out ---


def test_a_round_trip_is_bit_for_bit(tmp_path):
    model = GPT(replace(TINY, dropout=0.1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    _, loss = model(torch.arange(16).view(2, 8), torch.arange(16).view(2, 8))
    loss.backward()
    optimizer.step()
    scaler = {"scale": 65536.0, "_growth_tracker": 3}
    settings = {
        "train": {"learning_rate": 0.1 + 0.2, "n_kv_head": None},
        "model": asdict(model.config),
        "tokenizer": {"name": "char", "chars": "\n é\u2028"},
    }
    state = {"step": 7, "val_loss": float(loss.detach()), "kernels": ["flash"]}
    rng = torch.get_rng_state()
    folder = checkpoint.save(
        tmp_path / "deep" / "out",
        weights=model.state_dict(),
        optimizer={"optimizer": optimizer.state_dict(), "scaler": scaler, "rng": [{"cpu": rng}]},
        settings=settings,
        state=state,
        keep=1,
    )
    assert folder == checkpoint.latest(tmp_path / "deep" / "out")
    assert sorted(p.name for p in folder.iterdir()) == sorted(FILES)
    saved = checkpoint.load(folder)
    assert (saved.settings, saved.state, saved.step) == (settings, state, 7)
    assert saved.config() == model.config
    assert saved.config(dropout=0.0, attention_backend="manual") == replace(
        model.config, dropout=0.0, attention_backend="manual"
    )
    assert checkpoint.tokenizer_meta(str(folder)) == settings["tokenizer"]
    again = saved.model()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    tensors = saved.rest()
    assert tensors["scaler"] == scaler and torch.equal(tensors["rng"][0]["cpu"], rng)
    other = torch.optim.AdamW(again.parameters())
    other.load_state_dict(tensors["optimizer"])
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        for key, x in optimizer.state[p].items():
            assert torch.equal(x, other.state[q][key])
    groups = zip(optimizer.param_groups, other.param_groups, strict=True)
    assert all(a[k] == b[k] for a, b in groups for k in a if k != "params")


def test_only_the_main_process_writes_the_rest_and_deletes(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=9)
    monkeypatch.setattr(DistInfo, "gather", lambda self, value: [value] * 2)
    second = DistInfo(torch.device("cpu"), rank=1, world_size=2)
    nothing: Any = {"optimizer": {}, "settings": {}, "state": {"step": 4}, "keep": 1}
    final = checkpoint.save(tmp_path, **nothing, distributed=second)
    assert final == tmp_path / "step-00000004" and names(tmp_path) == [
        f"step-0000000{n}" for n in (1, 2, 3)
    ]


def test_it_keeps_the_best_and_the_last(tmp_path):
    for step, loss in enumerate((3.0, 1.0, 2.0, 2.5, None, 1.5), start=1):
        save(tmp_path, step, val_loss=loss)
    assert names(tmp_path) == ["step-00000002", "step-00000005", "step-00000006"]
    assert checkpoint.best_folder(tmp_path) == tmp_path / "step-00000002"
    assert checkpoint.latest(tmp_path).name == "step-00000006"
    save(tmp_path, 7, keep=1, val_loss=0.5)
    assert names(tmp_path) == ["step-00000007"]
    save(tmp_path, 100_000_000, keep=1)  # the newest is the highest step, not the longest name
    assert checkpoint.latest(tmp_path).name == "step-100000000"
    assert checkpoint.best_folder(tmp_path) == tmp_path / "step-00000007"
    assert checkpoint.best_folder(tmp_path / "nowhere") is None
    for step, loss in enumerate((0.5, 0.0, 0.25)):  # 0 is a loss like any other
        save(tmp_path / "zero", step, val_loss=loss)
    assert checkpoint.best_folder(tmp_path / "zero") == tmp_path / "zero" / "step-00000001"


def test_partial_folders_are_ignored_and_swept_away(tmp_path):
    save(tmp_path, 1)
    for name in (".step-00000009.partial", ".step-00000001.deleted.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".step-00000003.partial").write_bytes(b"no folder")  # it is in nobody's way
    (tmp_path / "step-5-notes").mkdir()  # somebody else's
    assert [p.name for p in checkpoint.folders(tmp_path)] == ["step-00000001"]
    save(tmp_path, 2)
    (tmp_path / ".step-00000003.partial").unlink()
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-5-notes"]


def test_the_newest_and_the_best_stay_whatever_keep_says(tmp_path):
    for step, loss in ((1, 3.0), (2, 1.0), (3, 1.0), (4, 2.0)):
        save(tmp_path, step, keep=0, val_loss=loss)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]  # the first of equals


def test_an_earlier_run_is_set_aside_whole(tmp_path):
    assert checkpoint.set_aside(tmp_path) is None and not names(tmp_path)
    whole = ["loss.png", "metrics.jsonl", "step-00000001", "step-00000002"]
    for n in (1, 2):
        for step in (1, 2):
            save(tmp_path, step, fill=n)
        for name in whole[:2]:
            (tmp_path / name).write_text(f"{n}")
        (tmp_path / "notes.txt").write_text("the user's own")
        assert checkpoint.set_aside(tmp_path) == tmp_path / f"earlier-{n}"
        assert names(tmp_path) == [*(f"earlier-{i + 1}" for i in range(n)), "notes.txt"]
    for n in (1, 2):
        assert names(tmp_path / f"earlier-{n}") == whole
        assert value(checkpoint.latest(tmp_path / f"earlier-{n}")) == n
        assert (tmp_path / f"earlier-{n}" / "metrics.jsonl").read_text() == f"{n}"


def test_an_earlier_run_that_cannot_be_moved_is_one_sentence(tmp_path, monkeypatch):
    save(tmp_path, 1)
    error = OSError(errno.EXDEV, "Invalid cross-device link")
    monkeypatch.setattr(Path, "rename", Mock(side_effect=error))
    with pytest.raises(UserError, match="cross-device") as e:
        checkpoint.set_aside(tmp_path)
    said = f"the earlier run in {tmp_path} cannot be moved to {tmp_path / 'earlier-1'} ("
    assert str(e.value).startswith(said)


def test_an_older_one_that_is_damaged_does_not_stop_the_saving(tmp_path, caplog):
    save(tmp_path, 1, val_loss=1.0)
    save(tmp_path, 2, val_loss=2.0)
    (tmp_path / "step-00000001" / "train_state.json").write_text("{")
    save(tmp_path, 3, keep=1, val_loss=3.0)
    assert value(checkpoint.latest(tmp_path)) == 3
    assert "older checkpoints were left" in caplog.text


# --- a kill at any moment ---

SAVE_IN_A_LOOP = """
import os, random, signal, sys, time
from pathlib import Path
import torch
sys.path[:0] = [{tests!r}, {root!r}]
import checkpoint, test_checkpoint as t

torch.set_num_threads(1)
out, draw, torn = Path({out!r}), random.Random(), 0
t.save(out, 0)
for attempt in range({kills}):
    newest = checkpoint.load(checkpoint.latest(out)).step
    child = os.fork()
    if child == 0:
        for step in range(newest + 1, newest + 10_000):
            t.save(out, step, keep=1, fill=2 * step, val_loss=float(step % 3))
            t.save(out, step, keep=1, fill=2 * step + 1, val_loss=float(step % 3))  # over itself
    time.sleep(draw.uniform(0.0, 0.12))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    torn += any(out.glob(".step-*.partial"))
    for folder in checkpoint.folders(out):
        t.value(folder)
    assert t.value(checkpoint.latest(out)) >= 2 * newest
print(torn, checkpoint.load(checkpoint.latest(out)).step)
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_sigkill_at_any_moment_leaves_a_good_one(tmp_path):
    here = Path(__file__).resolve().parent
    script = SAVE_IN_A_LOOP.format(
        tests=str(here), root=str(here.parent), out=str(tmp_path), kills=25
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    torn, steps = map(int, done.stdout.split())
    assert torn and steps, "no kill hit a save: the test proves nothing"


class Crash(BaseException):
    """The process is gone: nothing may handle it, and nothing after it runs."""


# Every step that save() takes on the disk. rmtree deletes by os.unlink and os.rmdir, so a crash
# comes in the middle of it too.
DISK = [
    (Path, "mkdir"), (Path, "rename"), (Path, "write_text"), (os, "fsync"), (os, "unlink"),
    (os, "rmdir"), (checkpoint.store, "save_file"), (torch, "save"),
]  # fmt: skip


def at_operation(monkeypatch: pytest.MonkeyPatch, n: int, stop: Callable[[], None]) -> list[str]:
    """Call `stop` in place of the n-th operation on the disk; the list fills with their names."""
    seen: list[str] = []

    def wrap(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            if len(seen) == n + 1:
                stop()
            return real(*args, **kwargs)

        return operation

    for where, name in DISK:
        monkeypatch.setattr(where, name, wrap(name, getattr(where, name)))
    return seen


def crash() -> None:
    raise Crash


SCENES = {  # before the save that crashes: (step, loss) of the checkpoints, then its own step
    "first": ([], 1),
    "new": ([(1, 9.0), (2, 1.0), (3, 4.0), (4, 5.0)], 5),
    "over itself": ([(1, 1.0), (2, 4.0), (3, 5.0)], 3),
}


@pytest.mark.parametrize("scene", SCENES)
def test_a_crash_between_any_two_operations(scene, tmp_path):
    before, step = SCENES[scene]
    start = tmp_path / "start"
    start.mkdir()
    for s, loss in before:
        save(start, s, keep=9, val_loss=loss)
    shutil.copytree(start, tmp_path / "count")
    with pytest.MonkeyPatch.context() as monkeypatch:
        seen = at_operation(monkeypatch, -1, crash)
        save(tmp_path / "count", step, keep=1, fill=99, val_loss=6.0)
        count = len(seen)
    assert count >= (12 if scene == "first" else 18)
    outcomes = set()
    for n in range(count):
        out = tmp_path / str(n)
        shutil.copytree(start, out)
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen = at_operation(monkeypatch, n, crash)
            with pytest.raises(Crash):
                save(out, step, keep=1, fill=99, val_loss=6.0)
        left = [value(folder) for folder in checkpoint.folders(out)]  # each of them is whole
        if before:
            assert left[-1] in (before[-1][0], 99), seen
            assert value(checkpoint.latest(out)) == left[-1]
            best = checkpoint.best_folder(out)
            assert best is not None and checkpoint.load(best).state["val_loss"] == 1.0
        outcomes.add(left[-1] if left else None)
        save(out, step, keep=1, fill=7, val_loss=6.0)  # and life goes on
        save(out, step + 1, keep=1, fill=8, val_loss=7.0)
        assert value(checkpoint.latest(out)) == 8
        kept = [f"step-{s:08d}" for s, loss in before if loss == 1.0] or [f"step-{step:08d}"]
        assert names(out) == [*kept, f"step-{step + 1:08d}"]
        shutil.rmtree(out)
    assert outcomes == {before[-1][0] if before else None, 99.0}


def test_one_that_was_being_replaced_counts_until_its_successor_is_there(tmp_path):
    save(tmp_path, 6, keep=9)
    save(tmp_path, 7, keep=9, fill=1).rename(tmp_path / "step-00000007.old")
    assert value(checkpoint.latest(tmp_path)) == 1
    save(tmp_path, 7, keep=9, fill=2)
    assert value(checkpoint.latest(tmp_path)) == 2
    assert names(tmp_path) == ["step-00000006", "step-00000007"]


# --- a disk that is full ---


SPACE = SimpleNamespace(total=9e9, used=7.5e9, free=1.5e9)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def torch_full() -> None:
    raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")


def safetensors_full() -> None:
    raise SafetensorError("I/O error: No space left on device (os error 28)")


@pytest.mark.parametrize("step", [1, 2], ids=["over itself", "new"])
def test_a_failure_of_any_write_is_one_sentence_and_the_old_one_stays(step, tmp_path):
    save(tmp_path, 1)
    writes, n = set(), 0
    while True:
        with pytest.MonkeyPatch.context() as monkeypatch:
            seen: list[str] = []

            def fail() -> None:
                {"save": torch_full, "save_file": safetensors_full}.get(seen[-1], full)()  # noqa: B023

            monkeypatch.setattr(shutil, "disk_usage", lambda path: SPACE)
            seen = at_operation(monkeypatch, n, fail)
            try:
                save(tmp_path, step, fill=50)
                break  # the first failure that does not matter is a deletion, when all is safe
            except UserError as e:
                message = str(e)
        writes.add(seen[n])
        assert message.startswith(f"could not write checkpoint {tmp_path / f'step-{step:08d}'} (")
        assert "1.50 GB free): step-0000000" in message and message.endswith("is still good")
        assert value(checkpoint.latest(tmp_path)) in (1, 50)
        assert not list(tmp_path.glob(".step*"))
        n += 1
    assert writes == {"mkdir", "save_file", "save", "write_text", "fsync", "rename"}


@pytest.mark.parametrize("limit", [100, 12_000, 27_000, 29_000])  # bytes a file may have
def test_a_real_limit_on_the_size_of_files(limit, tmp_path):
    save(tmp_path, 1)
    sizes = {f: (checkpoint.latest(tmp_path) / f).stat().st_size for f in FILES}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        if limit < max(sizes.values()):
            with pytest.raises(UserError, match=r"could not write .*step-00000001 is still good"):
                save(tmp_path, 2)
        else:
            save(tmp_path, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert value(checkpoint.latest(tmp_path)) == (1 if limit < max(sizes.values()) else 2)
    assert not list(tmp_path.glob(".step*"))


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"could not write .* there is none before it"):
        save(tmp_path / "file" / "a" / "b", 1)


# --- damage ---


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("damage", ["truncated", "empty", "missing", "garbage"])
@pytest.mark.parametrize("file", FILES)
def test_damage_is_one_sentence_that_names_the_file_and_another_checkpoint(file, damage, tmp_path):
    for step in (0, 1):
        save(tmp_path, step)
    folder = save(tmp_path, 2, keep=3)
    path = folder / file
    content = path.read_bytes()
    damaged = {"truncated": content[: len(content) * 2 // 3], "empty": b"", "garbage": b"\x80\xffx"}
    path.unlink() if damage == "missing" else path.write_bytes(damaged[damage])
    with pytest.raises(UserError) as e:
        saved = checkpoint.load(checkpoint.latest(tmp_path))
        saved.model()
        saved.rest()
    message = str(e.value)
    assert message.startswith(f"{path} ") and "\n" not in message
    assert message.endswith(f"; another one there is --init_from={tmp_path / 'step-00000001'}")
    if file != "optimizer.pt":
        for source in (folder, tmp_path):
            with pytest.raises(UserError, match=str(path)):
                checkpoint.init_model(str(source))
    for other in (0, 1):
        shutil.rmtree(tmp_path / f"step-0000000{other}")
    with pytest.raises(UserError, match=r"name another checkpoint, or train one with python "):
        saved = checkpoint.load(folder)
        saved.model()
        saved.rest()


@pytest.mark.parametrize("file, content, words", [
    ("settings.json", "[]", "is not a checkpoint's"),
    ("settings.json", '{"train": {}, "model": {}}', "is not a checkpoint's"),
    ("train_state.json", "3", "holds no step"),
    ("train_state.json", '{"step": "3"}', "holds no step"),
])  # fmt: skip
def test_json_of_another_kind(file, content, words, tmp_path):
    folder = save(tmp_path, 1)
    (folder / file).write_text(content)
    with pytest.raises(UserError, match=words):
        checkpoint.load(folder)


def test_a_reader_that_fails_in_many_words_is_quoted_by_its_first_line(tmp_path):
    save(tmp_path, 1)
    folder = save(tmp_path, 2)

    def reader(path: Path) -> None:
        raise EOFError("too short\nand more")

    with pytest.raises(UserError) as e:
        checkpoint.store.read_file(folder / "x.bin", reader)
    other = f"another one there is --init_from={tmp_path / 'step-00000001'}"
    assert str(e.value) == f"{folder / 'x.bin'} cannot be read (EOFError: too short); {other}"
    with pytest.raises(UserError, match=r"^in its own words$"):
        checkpoint.store.read_file(folder, Mock(side_effect=UserError("in its own words")))


def test_no_checkpoint_but_runs_nearby(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for run in ("out/gpt2", "out/shakespeare_char", "out/shakespeare_cpu", "else/run", "mine"):
        save(tmp_path / run, 1)
    (tmp_path / "out" / "empty").mkdir()

    def named(out_dir: str) -> list[str]:
        with pytest.raises(UserError, match=f"no checkpoint in {out_dir}; train one with: ") as e:
            checkpoint.latest(out_dir)
        assert f"python train.py config/train_shakespeare_cpu.py --out_dir={out_dir}" in str(
            e.value
        )
        _, _, runs = str(e.value).partition("; or name a run that is there: ")
        return runs.split(", ") if runs else []

    assert named("out-shakespeare-char")[0] == "out/shakespeare_char"
    assert named("out")[:1] != [] and set(named("out")) <= {
        "out/gpt2", "out/shakespeare_char", "out/shakespeare_cpu", "mine"}  # fmt: skip
    assert named("else/rum")[0] == "else/run"
    assert "else/run" in named("else")  # the folder of the run's folder
    assert len(named("out/nothing")) == 3
    shutil.rmtree("out")
    shutil.rmtree("mine")
    assert named("out-shakespeare-char") == []


def test_checkpoints_are_in_the_order_of_their_steps(tmp_path):
    """As numbers, whoever wrote the names; one that was being replaced before its successor."""
    names = ["step-9", "step-10.old", "step-10", "step-00000011", "step-200"]
    for name in [*reversed(names), "step-x", "step-7.partial"]:
        (tmp_path / name).mkdir()
    assert [p.name for p in checkpoint.folders(tmp_path)] == names


def test_no_checkpoint_at_all(tmp_path):
    with pytest.raises(UserError, match=f"no checkpoint in {tmp_path}; train one with: "):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("changes, words", [
    ({"block_size": 4}, r"size: transformer.wpe.weight is \(8, 8\), the model's is \(4, 8\)"),
    ({"n_embd": 16}, r"size: transformer.wte.weight is \(20, 8\), the model's is \(20, 16\)"),
    ({"n_layer": 3}, "another model: it lacks transformer.h.2.attn.c_attn.bias"),
    ({"n_layer": 1}, "model: it has transformer.h.1.attn.c_attn.bias, which the model lacks"),
    ({"bias": False}, "another model: it has transformer.h.0.attn.c_attn.bias"),
    ({"n_head": 3}, "n_embd must be a multiple of n_head"),
    ({"n_heads": 2}, "unknown settings: 'n_heads'"),
])  # fmt: skip
def test_weights_that_do_not_fit(changes, words, tmp_path):
    folder = save(tmp_path, 1)
    with pytest.raises(UserError, match=words) as e:
        checkpoint.init_model(str(folder), **changes)
    assert str(folder) in str(e.value)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("form", ["pickle", "torch"])
def test_nothing_executes_code_from_a_file(form, tmp_path):
    folder = save(tmp_path / "out", 1)
    blown = tmp_path / "blown"
    if form == "pickle":
        bomb = pickle.dumps(Bomb(blown), protocol=2)
    else:
        torch.save({"model": Bomb(blown), "model_args": {}}, tmp_path / "bomb")
        bomb = (tmp_path / "bomb").read_bytes()
    (folder / "optimizer.pt").write_bytes(bomb)
    (tmp_path / "ckpt.pt").write_bytes(bomb)
    refusals: list[Callable[[], Any]] = [
        checkpoint.load(folder).rest,
        lambda: checkpoint.init_model(str(tmp_path / "ckpt.pt")),
        lambda: checkpoint.load_nanogpt(tmp_path / "ckpt.pt"),
    ]
    for refused in refusals:
        with pytest.raises(UserError, match="could run code") as e:
            refused()
        assert "weights_only" not in str(e.value)  # torch's own advice is to switch the check off
    assert not blown.exists()
    pickle.loads(pickle.dumps(Bomb(blown)))
    assert blown.exists()  # it was a live one


# --- what all processes do, or none ---


@pytest.mark.parametrize("others, said", [
    (("", "", ""), "process 0: no space"),
    (("no space", "", "no space"), "processes 0, 1, 3: no space"),
    (("no space", "no space", "no space"), "no space"),
    (("", "read only", ""), "process 0: no space; process 2: read only"),
])  # fmt: skip
def test_who_failed_is_named_with_what_it_was(others, said):
    def gather(mine: str) -> list[str]:
        return [mine, *others]

    everyone: Any = SimpleNamespace(world_size=4, gather=gather)
    for error in (OSError("no space"), UserError("no space"), RuntimeError("no space\nmore")):
        with pytest.raises(UserError) as e:
            together(everyone, Mock(side_effect=error))
        assert str(e.value) == said and e.value.__cause__ is error
    if others[1]:
        with pytest.raises(UserError) as e:
            together(everyone, lambda: None)  # here all is well
        who = "processes 1, 2, 3" if others[0] else "process 2"
        assert str(e.value) == f"{who}: {others[1]}"
    with pytest.raises(KeyError):  # a bug of ours passes as it is
        together(everyone, Mock(side_effect=KeyError("x")))


# --- from elsewhere ---


@pytest.fixture
def nanogpt(tmp_path) -> tuple[Path, GPT, dict[str, Any]]:
    """A ckpt.pt as nanoGPT writes it from a compiled model, the model, what was saved."""
    model = GPT(replace(TINY, bias=False)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    weights = {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}
    weights["_orig_mod.lm_head.weight"] = weights["_orig_mod.transformer.wte.weight"]
    for layer in range(2):  # its mask, where there is no flash attention
        weights[f"_orig_mod.transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 8, 8).tril()
    args = {"n_layer": 2, "n_head": 2, "n_embd": 8, "block_size": 8, "bias": False,
            "vocab_size": 20, "dropout": 0.2}  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters())
    saved = {
        "model": weights,
        "optimizer": optimizer.state_dict(),
        "model_args": args,
        "iter_num": 250,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out-shakespeare-char", "compile": True, "learning_rate": 1e-3},
    }
    torch.save(saved, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt", model, saved


def test_a_nanogpt_checkpoint_gives_the_same_logits(nanogpt):
    path, model, saved = nanogpt
    idx = torch.randint(20, (3, 8))
    got = checkpoint.init_model(str(path), attention_backend="manual").eval()
    assert got.config == replace(model.config, dropout=0.2, attention_backend="manual")
    assert got.config.gelu == "exact"  # nanoGPT's nn.GELU()
    torch.testing.assert_close(got(idx)[0], model(idx)[0])
    plain = {k.removeprefix("_orig_mod."): v for k, v in saved["model"].items()}
    torch.save({**saved, "model": plain}, path)  # from a run without --compile
    assert torch.equal(checkpoint.load_nanogpt(path).eval()(idx)[0], model(idx)[0])


@pytest.mark.parametrize("change, words", [
    ({"model_args": None}, "no nanoGPT checkpoint"),
    ({"model": [1]}, "no nanoGPT checkpoint"),
    ({"model_args": {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8, "bias": False,
                     "vocab_size": 20}}, "has transformer.h.1"),
    ({"model_args": {"n_head": 5, "n_embd": 8}}, "n_embd must be a multiple"),
])  # fmt: skip
def test_a_file_that_is_no_nanogpt_checkpoint(nanogpt, change, words):
    path, _, saved = nanogpt
    torch.save({**saved, **change}, path)
    with pytest.raises(UserError, match=words) as e:
        checkpoint.init_model(str(path))
    assert str(path) in str(e.value)
    torch.save([1, 2], path)
    with pytest.raises(UserError, match="no 'model' and 'model_args'"):
        checkpoint.init_model(str(path))


def test_init_model_takes_each_kind_of_source(nanogpt, tmp_path):
    path, model, _ = nanogpt
    idx = torch.randint(20, (1, 8))
    out = tmp_path / "out"
    save(out, 3)
    save(out, 4)
    policy = Policy(fallback=False)
    for source, want in ((out, 4), (out / "step-00000003", 3)):
        got = checkpoint.init_model(str(source), policy, dropout=0.5)
        assert got.policy == policy
        assert bool((got.transformer.wte.weight == want).all()) and got.config.dropout == 0.5
        assert checkpoint.tokenizer_meta(str(source)) == {"name": "char"}
    checkpoint.save_hf(model, hf := tmp_path / "new" / "hf")
    got = checkpoint.init_model(str(hf)).eval()
    torch.testing.assert_close(got(idx)[0], model(idx)[0])
    for source in (hf, path):
        got = checkpoint.init_model(str(source), policy, dropout=0.5)
        assert got.policy == policy and got.config.dropout == 0.5
    for source in (hf, path, Path("gpt2")):
        assert checkpoint.tokenizer_meta(str(source)) is None


def test_a_source_that_is_not_there(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for source in ("gpt2-xl", "nobody/no-such-thing"):
        with pytest.raises(UserError, match="no local folder or file, and the hub did not") as e:
            checkpoint.init_model(source)
        assert source in str(e.value) and "\n" not in str(e.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # as if not installed
    needs = "'gpt2' is no local folder or file, and taking it .* needs: pip install huggingface_hub"
    with pytest.raises(UserError, match=needs):
        checkpoint.init_model("gpt2")
    with pytest.raises(UserError, match=r"config.json does not exist"):
        checkpoint.init_model(str(tmp_path))


@pytest.mark.parametrize("source, nearest", [
    ("gpt9", "'gpt2'"),
    ("gpt2-mediun", "'gpt2-medium'"),
    ("out/shakespere_char", "'out/shakespeare_char'"),
    ("out/shakespeare_char/ckpt.pt", ""),
    ("no/such/thing", ""),
    ("weights/of/others/gpt2-mediun", "'gpt2-medium'"),
    ("./gpt2", "'gpt2'"),
    ("{tmp_path}/ckpt.pt", ""),
    ("somewhere/ckpt.pt", ""),
    ("out/another", ""),
])  # fmt: skip
def test_a_name_that_nothing_has_is_told_at_once(source, nearest, tmp_path, monkeypatch):
    """Without asking the hub, and with the nearest name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(checkpoint.convert, "why_not_hub", lambda: pytest.fail("asked the hub"))
    (tmp_path / "out" / "shakespeare_char").mkdir(parents=True)
    source = source.format(tmp_path=tmp_path)
    with pytest.raises(UserError, match="no local folder or file, and no model's name") as e:
        checkpoint.init_model(source)
    said = str(e.value)
    assert repr(source) in said and "known: gpt2, gpt2-medium, gpt2-large, gpt2-xl" in said
    assert f"did you mean {nearest}?" in said if nearest else "did you mean" not in said


def test_a_hub_out_of_reach_is_told_at_once_and_once(monkeypatch, capfd):
    """One question, and the hub's client, which would ask for half a minute, is not asked."""
    import huggingface_hub

    def unreachable(request, timeout):
        asked.append(request.full_url)
        raise urllib.error.URLError("Name or service not known")

    def only_files_here(name, file, *, local_files_only):
        assert local_files_only
        raise FileNotFoundError("it is not in the cache")

    asked: list[str] = []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr("urllib.request.urlopen", unreachable)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", only_files_here)
    with pytest.raises(
        UserError, match=r"'gpt2'.*\(no connection to .*: Name or service not known"
    ):
        checkpoint.init_model("gpt2")
    assert len(asked) == 1 and not "".join(capfd.readouterr())


def test_a_hub_that_answers_is_used_whatever_it_answers(monkeypatch):
    import huggingface_hub

    def download(name, file, *, local_files_only):
        assert not local_files_only
        raise OSError("the client's own words")

    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for error in (urllib.error.HTTPError("", 503, "", {}, None),
                  urllib.error.URLError(ssl.SSLCertVerificationError("no roots"))):  # fmt: skip

        def answer(*args: Any, error: Exception = error, **kwargs: Any) -> None:
            raise error

        monkeypatch.setattr("urllib.request.urlopen", answer)
        monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
        with pytest.raises(UserError, match="the client's own words"):
            checkpoint.init_model("owner/name")


def test_what_the_hub_has_is_taken_whole(tmp_path, monkeypatch):
    import huggingface_hub

    def download(name, file, *, local_files_only):
        asked.append((name, file, local_files_only))
        return str(tmp_path / "there" / file)

    asked: list[Any] = []
    model, idx = GPT(TINY).eval(), torch.randint(20, (2, 8))
    checkpoint.save_hf(model, tmp_path / "there")
    monkeypatch.setattr(checkpoint.convert, "why_not_hub", lambda: None)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    for name in ("gpt2-xl", "owner/name-1.5"):
        got = checkpoint.init_model(name, attention_window=3)
        assert got.config.attention_window == 3
        assert all(torch.equal(t, model.state_dict()[k]) for k, t in got.state_dict().items())
        assert torch.equal(checkpoint.init_model(name).eval()(idx)[0], model(idx)[0])
        files = {(name, "model.safetensors", False), (name, "config.json", False)}
        assert set(asked) == files and not asked.clear()


def test_who_is_asked_whether_the_hub_is_there(monkeypatch):
    asked: list[tuple[str, str, float]] = []

    def answer(request, timeout):
        asked.append((request.full_url, request.get_method(), timeout))
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("urllib.request.urlopen", answer)
    monkeypatch.delenv("HF_ENDPOINT", raising=False)
    for off in ("1", "ON", "yes", "True"):
        monkeypatch.setenv("HF_HUB_OFFLINE", off)
        assert why_not_hub() is None and not asked
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert why_not_hub() is None and asked == [("https://huggingface.co", "HEAD", 5.0)]
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror")
    assert why_not_hub() is None and asked[1][0] == "http://mirror"
    refused = urllib.error.URLError("Connection refused")
    monkeypatch.setattr("urllib.request.urlopen", Mock(side_effect=refused))
    assert why_not_hub() == "no connection to http://mirror: Connection refused"


def test_warnings_of_the_hubs_client_come_once():
    """Its own handler prints them; the root's, which train.py sets up, would print them again."""
    code = """
import logging
import huggingface_hub
from huggingface_hub.utils import logging as theirs
import checkpoint
from core.runtime import show_log

def warns(name, file, *, local_files_only):
    theirs.get_logger("huggingface_hub.x").warning("Retrying")
    raise OSError("given up")

show_log()
huggingface_hub.hf_hub_download, checkpoint.convert.why_not_hub = warns, lambda: None
try:
    checkpoint.init_model("gpt2")
except ValueError as e:
    print(e)
"""
    root = Path(__file__).resolve().parent.parent
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert "given up" in done.stdout and done.stderr.count("Retrying") == 1, done.stderr


# --- from an earlier version ---

# As version 0.1 wrote them: the model's config had fields that are the run's or the process's now.
OLD_MODEL = {
    "block_size": 8, "vocab_size": 20, "n_layer": 2, "n_head": 2, "n_embd": 8, "n_kv_head": None,
    "dropout": 0.0, "bias": True, "gelu": "exact", "gradient_checkpointing": True,
    "residual_dtype": "float32", "attention_backend": "auto", "attention_window": None,
    "attention_fallback": False, "attention_deterministic": False, "attention_hub_kernels": False,
    "sdpa_flash_impl": "FA2", "allow_mps_sdpa": False,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """A GPTConfig of today, without what the old one had beside its sizes."""

    block_size: int = 1
    n_layer: int = 1
    attention_backend: str = "auto"


@dataclass(frozen=True)
class Knobs:
    """A TrainConfig of today: one name is new, one is gone, one of the model's stays."""

    batch_size: int = 1
    deterministic: bool = False
    gradient_checkpointing: bool = False


def test_a_checkpoint_with_old_settings_loads(tmp_path):
    folder = save(tmp_path, 3)
    settings = json.loads((folder / "settings.json").read_text())
    train = {"batch_size": 4, "attention_deterministic": True, "keep_freed_memory": False,
             "gradient_checkpointing": True}  # fmt: skip
    old = {**settings, "model": OLD_MODEL, "train": train}
    (folder / "settings.json").write_text(json.dumps(old))
    assert checkpoint.load(folder).config().n_layer == 2
    assert bool((checkpoint.init_model(str(folder)).transformer.wte.weight == 3).all())
    assert checkpoint.load(folder).train_settings(Knobs) == Knobs(4, True, True)


def test_only_known_old_names_are_dropped():
    names = checkpoint.store.todays_names
    sizes = {"block_size": 8, "n_layer": 2, "attention_backend": "auto"}
    beside = {k: v for k, v in OLD_MODEL.items() if k not in GPT_FIELDS}
    assert len(beside) == 7
    assert names(Sizes, {**sizes, **beside}) == sizes
    assert names(Sizes, {**sizes, "flux": 1}) == {**sizes, "flux": 1}  # for from_dict to refuse
    assert names(Knobs, {"attention_deterministic": True}) == {"deterministic": True}
    assert names(Knobs, {"deterministic": True}) == {"deterministic": True}
    assert names(Knobs, {"keep_freed_memory": True}) == {}
    assert names(Knobs, {"gradient_checkpointing": True}) == {"gradient_checkpointing": True}


GPT_FIELDS = ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_kv_head", "dropout",
              "bias", "gelu", "attention_backend", "attention_window")  # fmt: skip


def test_every_file_is_plain_data(tmp_path):
    """What is written can be read without this project's classes."""
    folder = save(tmp_path, 1)
    assert json.loads((folder / "settings.json").read_text())["model"] == asdict(TINY)
    torch.load(folder / "optimizer.pt", weights_only=True)
    header = (folder / "model.safetensors").read_bytes()
    assert b"transformer.wte.weight" in header[:4000] and b"lm_head" not in header
    assert b'"__metadata__":{"format":"pt"}' in header
