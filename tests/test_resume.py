# ruff: noqa: F401, F811 (a fixture)
"""Nothing is lost: kills, signals, a second machine, and a resumed run that is the same run."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from conftest import few
from test_metrics import fake_wandb
from test_train import Run, data_dir, refusal, run, run_line

import checkpoint
from checkpoint.run import resume_command
from core import files, metrics
from core.parallel import DistInfo
from model import GPT

# Dropout, two micro-steps and evaluations in between: whatever draws random numbers or keeps state.
FULL: dict[str, Any] = {
    "max_iters": 40, "eval_interval": 10, "dropout": 0.2, "gradient_accumulation_steps": 2,
    "n_layer": 2, "eval_on_start": True,
}
TERM, INT, HUP = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


@pytest.fixture(scope="module")
def straight(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    out = tmp_path_factory.mktemp("straight") / "out"
    r = run(data_dir, out, **FULL, keep_checkpoints=9)
    assert r.code == 0 and list(r.losses()) == list(range(1, 41))
    assert list(r.evaluations()) == [0, 10, 20, 30, 40]
    return r


def same(r: Run, straight: Run) -> None:
    assert r.losses() == straight.losses() and r.evaluations() == straight.evaluations()
    assert [row["iter"] for row in r.rows] == [row["iter"] for row in straight.rows]


def resume(out: Path, *words: str) -> Run:
    return run_line(["--init_from=resume", f"--out_dir={out}", *words], out)


def as_it_says(r: Run, out: Path) -> Run:
    (line,) = [x for x in r.out.splitlines() if "--init_from=resume" in x]
    return run_line(shlex.split(line.split("python train.py ")[1]), out)


def steps(out: Path) -> list[int]:
    return [int(p.name[5:]) for p in checkpoint.folders(out)]


# --- killed, or asked to stop ---


@pytest.mark.parametrize("at", [27, 20])
def test_killed_the_losses_are_the_same(at, straight, tmp_path):
    """As a killed process leaves its folder: also within a row of metrics.jsonl."""
    out = Path(shutil.copytree(straight.out_dir, tmp_path / "out"))
    for folder in checkpoint.folders(out):
        if int(folder.name[5:]) >= at:
            shutil.rmtree(folder)
    rows = [row for row in straight.rows if row["iter"] <= at]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "metrics.jsonl").write_text(text + '{"iter": 28, "lo')
    r = resume(out)
    assert r.code == 0 and f"after step {(at - 1) // 10 * 10}" in r.out
    same(r, straight)


def signalled(patch: pytest.MonkeyPatch, signals: tuple[int, ...], when: Callable[[Any], bool],
              ) -> None:  # fmt: skip
    """In the model's first call where `when` is true."""
    hidden, sent = GPT.hidden, []

    def spy(self: GPT, *args: Any) -> Any:
        if not sent and when(self):
            sent.append(1)
            for s in signals:
                os.kill(os.getpid(), s)
        return hidden(self, *args)

    patch.setattr(GPT, "hidden", spy)


def in_step(step: int) -> Callable[[Any], bool]:
    calls = iter(range(1, 10**9))
    return lambda model: model.training and next(calls) == 2 * step - 1


@pytest.mark.parametrize("signum, during, at", few([
    (TERM, "step", 12), (INT, "step", 12), (HUP, "step", 12), (TERM, "step", 0),
    (TERM, "step", 20),  # step 20 has been saved
    (TERM, "evaluation", 20), (TERM, "evaluation", 40),  # the last evaluation too
]))
def test_a_signal_saves_the_last_step_and_says_how_to_go_on(
    signum, during, at, data_dir, tmp_path, straight, monkeypatch
):
    """The second micro-batch does not begin; a resumed run repeats an evaluation."""
    out = tmp_path / "a folder with spaces"

    def evaluating(model: GPT) -> bool:
        rows = metrics.read(out / "metrics.jsonl")
        return not model.training and bool(rows) and rows[-1]["iter"] == at

    signalled(monkeypatch, (signum,), in_step(at + 1) if during == "step" else evaluating)
    r = run(data_dir, out, **FULL)
    assert r.code == 128 + signum
    assert max(r.losses(), default=0) == at and steps(out)[-1:] == [at][:at]
    assert (at in r.evaluations()) == (during == "step" and at != 12)
    same(as_it_says(r, out) if at else run(data_dir, out, **FULL), straight)


@pytest.mark.parametrize("nohup", [False, True])
@pytest.mark.parametrize("signals", [(1, 1), (1, 15), (15, 1)])
def test_a_closed_terminal_may_repeat_its_signal(signals, nohup, data_dir, tmp_path, monkeypatch):
    before = signal.signal(HUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    signalled(monkeypatch, signals, in_step(2))
    r = run(data_dir, tmp_path / "out", **FULL | {"max_iters": 3})
    signal.signal(HUP, before)
    code = 0 if nohup and signals == (1, 1) else 143 if nohup else 128 + signals[0]
    assert (r.code, steps(tmp_path / "out")[-1]) == (code, 1 if code else 3)


@pytest.mark.parametrize("signum", [TERM, INT])
@pytest.mark.parametrize("how", ["eval_only", "eval_on_start", "sample_tokens"])
def test_a_signal_before_and_after_the_steps(signum, how, data_dir, tmp_path, monkeypatch):
    out = tmp_path / "out"
    sampling = how == "sample_tokens"
    signalled(monkeypatch, (signum,),
              lambda model: not model.training and bool(not sampling or checkpoint.folders(out)))
    r = run(data_dir, out, max_iters=1, **{how: 5 if sampling else True})
    assert r.code == 128 + signum and "Traceback" not in r.out + r.err
    assert out.exists() == (how != "eval_only") and len(steps(out)) == sampling


@pytest.mark.slow
def test_the_loss_scale_goes_on(data_dir, tmp_path, monkeypatch):
    """It overflows at first, and grows again soon."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=7)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    knobs, out = {**FULL, "dtype": "float16", "max_iters": 30}, tmp_path / "out"
    want = run(data_dir, tmp_path / "straight", **knobs)
    with monkeypatch.context() as patch:
        signalled(patch, (TERM,), in_step(15))
        r = run(data_dir, out, **knobs)
    saved = checkpoint.load(checkpoint.latest(out)).rest()["scaler"]
    assert saved["scale"] != 2.0**24 and saved["_growth_tracker"] > 0
    same(as_it_says(r, out), want)
    ends = [checkpoint.load(checkpoint.latest(p)).rest() for p in (out, tmp_path / "straight")]
    assert ends[0]["scaler"] == ends[1]["scaler"]


# --- what a resumed run takes from where ---


@pytest.fixture(scope="module")
def ten(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The out_dir of 10 finished steps; to be copied."""
    out = tmp_path_factory.mktemp("ten") / "out"
    assert run(data_dir, out, max_iters=10, eval_interval=5).code == 0
    return out


@pytest.fixture
def out(ten: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(ten, tmp_path / "out"))


def state(out: Path) -> dict[str, Any]:
    return checkpoint.load(checkpoint.latest(out)).state


def test_another_batch_size_goes_on_after_the_last_sequence(data_dir, tmp_path):
    """Constant weights: two steps of two sequences have the mean loss of four."""
    still: dict[str, Any] = {"learning_rate": 1e-30, "eval_interval": 10}
    want = run(data_dir, tmp_path / "want", **still, max_iters=12).losses()
    assert run(data_dir, tmp_path / "out", **still, max_iters=10).code == 0
    r = resume(tmp_path / "out", "--max_iters=14", "--batch_size=2")
    found = r.losses()
    for step in (11, 12):
        pair = found[2 * step - 11] + found[2 * step - 10]
        assert pair / 2 == pytest.approx(want[step], rel=1e-6)
    assert state(tmp_path / "out")["sequences_seen"] == 48


def test_a_knob_that_is_given_anew_is_taken(out, caplog):
    r = resume(out, "--max_iters=11", "--weight_decay=0.5", "--beta1=0.7", "--beta2=0.8",
               "--learning_rate=1e-5", "--decay_lr=False", "--dropout=0.25",
               "--attention_backend=manual", "--attention_window=8", "--profile_step=10")
    assert r.code == 0 and "10 steps are done" in caplog.text
    saved = checkpoint.load(checkpoint.latest(out))
    model, groups = saved.config(), saved.rest()["optimizer"]["param_groups"]
    assert (model.dropout, model.attention_backend, model.attention_window) == (0.25, "manual", 8)
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert all(tuple(g["betas"]) == (0.7, 0.8) and g["lr"] == 1e-5 for g in groups)
    assert "weight_decay" in r.out and "command line" in r.out and "step-00000010" in r.out


def test_the_best_loss_is_remembered_and_its_checkpoint_kept(out):
    best = state(out)["val_loss"]
    r = resume(out, "--max_iters=40", "--learning_rate=3", "--decay_lr=False", "--log_interval=40")
    assert r.code == 0 and all(val > best for _, val in list(r.evaluations().values())[2:])
    assert state(out)["best_val_loss"] == best and steps(out) == [10, 35, 40]
    more = "--max_iters=42", "--eval_interval=1", "--keep_checkpoints=1"
    assert resume(out, *more).code == 0  # from one far above it
    assert state(out)["best_val_loss"] == best and steps(out) == [10, 42]


@pytest.mark.parametrize("change", ["data", "eval_iters=1", "batch_size=1"])
def test_another_evaluation_begins_a_new_best(change, out, data_dir, tmp_path):
    """Not the same data elsewhere."""
    path = checkpoint.latest(out) / "train_state.json"
    saved = json.loads(path.read_text())
    path.write_text(json.dumps(saved | {"val_loss": 0.0, "best_val_loss": 0.0}))
    shutil.copytree(data_dir / "tiny", other := tmp_path / "other" / "tiny")
    more = "--eval_interval=2", "--keep_checkpoints=1", f"--dataset={other}"
    r = resume(out, "--max_iters=14", *more)
    assert "new best" not in r.out and checkpoint.best_folder(out) == out / "step-00000010"
    if change == "data":  # of the same name and length
        ids = np.fromfile(other / "val.bin", dtype=np.uint16)
        ids[:-1][ids[:-1] == 1] = 2
        ids.tofile(other / "val.bin")
    r = resume(out, "--max_iters=18", *more, *[f"--{change}"] * (change != "data"))
    (line,) = [line for line in r.out.splitlines() if "new best" in line]
    assert r.code == 0 and change.split("=")[0] in line
    found = min(val for step, (_, val) in r.evaluations().items() if step > 14)
    best, *newer = steps(out)  # of both evaluations
    assert state(out)["best_val_loss"] == found and best == 10 and newer[0] >= 16
    assert "new best" not in resume(out, "--max_iters=20", *more).out


def test_a_fresh_run_in_an_old_folder_is_not_mixed_with_it(data_dir, out):
    (out / "notes.txt").touch()
    for aside in (out / "earlier-1", out / "earlier-2"):
        before, rows = steps(out), (out / "metrics.jsonl").read_bytes()
        fresh = run(data_dir, out, max_iters=4, eval_interval=2, seed=5)
        assert fresh.code == 0 and str(aside) in fresh.out and steps(aside) == before
        assert {p.name for p in aside.glob("*.*")} == {"metrics.jsonl", "loss.png"}
        assert (aside / "metrics.jsonl").read_bytes() == rows
        assert list(fresh.losses()) == [1, 2, 3, 4] and (out / "notes.txt").exists()
    losses = [val for _, val in fresh.evaluations().values()]
    want = {"step": 4, "sequences_seen": 16, "val_loss": losses[-1], "best_val_loss": min(losses)}
    assert want.items() <= state(out).items()
    r = resume(out, "--max_iters=6")
    assert r.code == 0 and "after step 4" in r.out and "--lr_decay_iters=4" in r.out
    assert [row["lr"] for row in r.rows if "lr" in row][-2:] == pytest.approx([1e-3] * 2)  # lowest


# --- a folder in use, damage, links ---


def test_the_advice_after_damage_is_a_command(out, tmp_path):
    """Also for names with characters of a shell or terminal."""
    out = out.rename(tmp_path / 'it\'s "a" $run;\n\x1b[31m é')
    old, new = checkpoint.folders(out)[-2:]
    for path, cut in ((new / "model.safetensors", 100), (new / "train_state.json", None)):
        path.unlink() if cut is None else path.write_bytes(path.read_bytes()[:cut])
        said = refusal(resume(out, "--max_iters=12"))
        assert path.name in said and old.name in said and said.strip().isprintable()
    python = "set -- train.py; python() { printf '%s\\0' \"$@\"; }; "
    done = subprocess.run(["bash", "-c", python + "mv " + said.partition(": mv ")[2]], cwd=tmp_path,
                          capture_output=True, text=True, check=True)  # fmt: skip
    r = run_line([*done.stdout.split("\0")[1:-1], "--max_iters=12"], out)
    assert r.code == 0 and "after step 5" in r.out


@pytest.mark.parametrize("sandbox", [False, True])
def test_a_folder_in_use_is_refused(data_dir, out, monkeypatch, sandbox):
    """--eval_only writes nothing. A sandbox permits no sockets."""
    if sandbox:
        monkeypatch.setattr("socket.socket", Mock(side_effect=PermissionError))
    with files.locked(out):
        before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
        for r in (run(data_dir, out, max_iters=2), resume(out, "--max_iters=12")):
            said = refusal(r)
            assert str(out) in said and f"process {os.getpid()}" in said
        assert resume(out, "--eval_only=True").code == 0
        assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before
    assert resume(out, "--max_iters=11").code == 0 and not (out / ".lock").exists()


def test_a_folder_that_is_deleted_during_a_run(data_dir, tmp_path, monkeypatch, caplog):
    """Saving makes it again, with a warning; other runs are refused."""
    out, log, seen = tmp_path / "out", metrics.Metrics.log, []

    def then_delete(self: Any, **row: Any) -> None:
        log(self, **row)
        if row["iter"] == 3 and not seen:
            shutil.rmtree(out)
            seen.append(refusal(run(data_dir, out, max_iters=1)))

    monkeypatch.setattr(metrics.Metrics, "log", then_delete)
    r = run(data_dir, out, max_iters=6, eval_interval=2)
    assert "--out_dir" in seen[0] and r.code == 0 and str(out) in caplog.text
    assert steps(out) == [4, 6] and resume(out, "--max_iters=7").code == 0


@pytest.mark.parametrize("hard", [False, True])
def test_no_file_of_a_run_is_written_through_a_link(hard, out, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb())
    content = (out / "metrics.jsonl").read_bytes()
    for step, name in enumerate((".lock", "metrics.jsonl", "loss.png", "wandb_id.txt"), 11):
        caplog.clear()
        (target := out.parent / name).write_bytes(content)
        (path := out / name).unlink(missing_ok=True)
        path.hardlink_to(target) if hard else path.symlink_to(target)
        r = resume(out, f"--max_iters={step}", "--wandb_log=True")
        assert target.read_bytes() == content
        if name == ".lock" or (name == "metrics.jsonl" and not hard):
            assert str(path) in refusal(r)
            path.unlink()
        else:
            assert r.code == 0 and (hard or str(path) in caplog.text)


def test_wandb_is_resumed_in_the_folder_of_its_run_only(out, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", wandb := fake_wandb())
    wandb.id = "abc"
    words = "--wandb_log=True", "--wandb_project=theirs"
    assert resume(out, "--max_iters=11", *words).code == 0
    assert resume(out, "--max_iters=12").code == 0  # in its own folder
    assert "wandb_id.txt" in caplog.text
    (out / "wandb_id.txt").unlink()  # as a folder from somebody else
    assert resume(out, "--max_iters=13").code == 0
    assert resume(out, "--max_iters=14", "--wandb_log=True").code == 0
    begun = [begun.kwargs for begun in wandb.init.call_args_list]
    assert [how["project"] for how in begun] == ["theirs", "theirs", "nanoattn"]
    assert [how.get("id") for how in begun] == [None, "abc", None]


def test_a_folder_that_just_vanished_spoils_no_advice(tmp_path: Path) -> None:
    (tmp_path / "step-00000004").symlink_to(tmp_path / "gone")
    assert "train.py" in resume_command(str(tmp_path), DistInfo(torch.device("cpu")))
