"""Nothing is lost: kills, signals, a second machine, and a resumed run that is the same run."""

from __future__ import annotations

import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_train import TEXT, TINY, Run, argv, close, make_data, refusal, run, run_line

import checkpoint
import train
from core import flops, metrics
from core.distributed import DistInfo
from core.restarts import mark_begun
from core.settings import read
from model import GPT
from train import TrainConfig

ROOT = Path(__file__).parent.parent
# Dropout, two micro-steps and evaluations in between: whatever draws random numbers or keeps state.
FULL: dict[str, Any] = {
    "max_iters": 40, "eval_interval": 10, "dropout": 0.2, "gradient_accumulation_steps": 2,
    "n_layer": 2, "eval_on_start": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def straight(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The run that nothing interrupts."""
    r = run(data_dir, tmp_path_factory.mktemp("straight") / "out", **FULL)
    assert r.code == 0 and list(r.losses()) == list(range(1, 41))
    assert list(r.evaluations()) == [0, 10, 20, 30, 40]
    return r


def same(r: Run, straight: Run) -> None:
    """Fails where a loss differs by a bit, or a row is doubled, missing or out of order."""
    assert r.losses() == straight.losses()
    assert r.evaluations() == straight.evaluations()
    assert [row["iter"] for row in r.rows] == [row["iter"] for row in straight.rows]


def process(code: str, *args: Any) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, in the repository."""
    line = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(line, cwd=ROOT, env=environment(), capture_output=True, text=True,
                          timeout=120)  # fmt: skip


def environment() -> dict[str, str]:
    quiet = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**quiet, "OMP_NUM_THREADS": "1"}


def line_to_go_on(r: Run) -> list[str]:
    """The arguments that a stopped run tells to go on with."""
    (line,) = [x for x in r.out.splitlines() if "to go on: python train.py" in x]
    words = shlex.split(line.split("to go on: ")[1])
    assert words[:2] == ["python", "train.py"] and "--init_from=resume" in words
    return words[2:]


# --- killed ---

# Trains, and sends itself the signals right after the row of step AT was written.
KILL = """
import os, signal, sys
from core import metrics; import train
at, signals, log = int(sys.argv[1]), sys.argv[2].split(","), metrics.Metrics.log
def then_die(self, **row):
    log(self, **row)
    if row["iter"] == at:
        for name in signals:
            os.kill(os.getpid(), getattr(signal, "SIG" + name))
metrics.Metrics.log = then_die
sys.exit(train.main(sys.argv[3:]))
"""


def test_killed_between_checkpoints_the_losses_are_the_same(data_dir, tmp_path, straight):
    out = tmp_path / "out"
    killed = process(KILL, 27, "KILL", *argv(data_dir, out, **FULL))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert max(row["iter"] for row in metrics.read(out / "metrics.jsonl")) == 27
    assert checkpoint.load(checkpoint.latest(out)).step == 20
    r = run_line(["--init_from=resume", f"--out_dir={out}"], out)
    assert r.code == 0 and "after step 20" in r.out
    same(r, straight)


def test_killed_within_a_row_and_right_after_a_checkpoint(data_dir, tmp_path, straight):
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patch:
        dying(patch, step=21, error=RuntimeError("as if killed"))
        with pytest.raises(RuntimeError, match="as if killed"):
            run(data_dir, out, **FULL)
    with (out / "metrics.jsonl").open("a") as f:
        f.write('{"iter": 21, "lo')  # a row that was cut short
    r = run_line(["--init_from=resume", f"--out_dir={out}"], out)
    same(r, straight)


def dying(patch: pytest.MonkeyPatch, step: int, error: Exception | None = None,
          signals: tuple[int, ...] = ()) -> None:  # fmt: skip
    """In training step `step` of a run of FULL, in the first of two micro-steps: raise, or send."""
    forward, calls = GPT.forward, [0]

    def spy(self: GPT, *args: Any) -> Any:
        calls[0] += self.training
        if self.training and calls[0] == 2 * step - 1:
            for s in signals:
                os.kill(os.getpid(), s)
            if error is not None:
                raise error
        return forward(self, *args)

    patch.setattr(GPT, "forward", spy)


# --- asked to stop ---


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_finishes_the_step_saves_and_says_how_to_go_on(
    signum, data_dir, tmp_path, straight, monkeypatch
):
    out = tmp_path / "a folder with spaces"
    dying(monkeypatch, step=13, signals=(signum,))
    r = run(data_dir, out, **FULL)
    assert r.code == 128 + signum
    assert max(r.losses()) == 13
    assert checkpoint.load(checkpoint.latest(out)).step == 13
    monkeypatch.undo()
    same(run_line(line_to_go_on(r), out), straight)


@pytest.mark.slow
def test_a_second_signal_stops_at_once(data_dir, tmp_path, straight):
    out = tmp_path / "out"
    killed = process(KILL, 13, "TERM,INT", *argv(data_dir, out, **FULL))
    assert killed.returncode == -signal.SIGINT
    assert "once more stops at once" in killed.stderr and "Traceback" not in killed.stderr
    assert checkpoint.load(checkpoint.latest(out)).step == 10
    same(run_line(["--init_from=resume", f"--out_dir={out}"], out), straight)


def test_stopped_again_and_again(data_dir, tmp_path, straight):
    out = tmp_path / "out"
    line = argv(data_dir, out, **FULL)
    for stop in (7, 8, 20, 33):
        with pytest.MonkeyPatch.context() as patch:
            done = max([0, *(row["iter"] for row in metrics.read(out / "metrics.jsonl"))])
            dying(patch, step=stop - done, signals=(signal.SIGTERM,))
            r = run_line(line, out)
        assert r.code == 128 + signal.SIGTERM and max(r.losses()) == stop
        line = line_to_go_on(r)
    same(run_line(line, out), straight)
    best = min(val for _, val in straight.evaluations().values())
    state = checkpoint.load(checkpoint.latest(out)).state
    assert state["best_val_loss"] == best  # of all parts of the run
    assert state["sequences_seen"] == 40 * 8
    assert state["attention_backend"] == "sdpa" and state["attention_kernels"]


def test_the_loss_scale_goes_on(data_dir, tmp_path, monkeypatch):
    """One so large that the first steps overflow, and that grows again soon."""
    scaler = partial(torch.amp.GradScaler, init_scale=2.0**24, growth_interval=7)
    monkeypatch.setattr(torch.amp, "GradScaler", scaler)
    knobs = {**FULL, "dtype": "float16", "max_iters": 30}
    want = run(data_dir, tmp_path / "straight", **knobs)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        dying(patch, step=15, signals=(signal.SIGTERM,))
        r = run(data_dir, out, **knobs)
    saved = checkpoint.load(checkpoint.latest(out)).rest()["scaler"]
    assert saved["scale"] != 2.0**24 and saved["_growth_tracker"] > 0
    same(run_line(line_to_go_on(r), out), want)
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


def resume(out: Path, *words: str) -> Run:
    return run_line(["--init_from=resume", f"--out_dir={out}", *words], out)


def test_a_knob_that_is_given_anew_is_taken(out, monkeypatch):
    seen: list[list[dict[str, Any]]] = []
    step = torch.optim.AdamW.step

    def spy(self: Any, *args: Any) -> Any:
        seen.append([{k: v for k, v in g.items() if k != "params"} for g in self.param_groups])
        return step(self, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", spy)
    r = resume(out, "--max_iters=11", "--weight_decay=0.5", "--beta1=0.7", "--beta2=0.8",
               "--learning_rate=1e-5", "--decay_lr=False", "--dropout=0.25",
               "--attention_backend=manual", "--attention_window=8")  # fmt: skip
    assert r.code == 0
    model = checkpoint.load(checkpoint.latest(out)).config()
    assert (model.dropout, model.attention_backend, model.attention_window) == (0.25, "manual", 8)
    (groups,) = seen
    assert [g["weight_decay"] for g in groups] == [0.5, 0.0]
    assert all(tuple(g["betas"]) == (0.7, 0.8) and g["lr"] == 1e-5 for g in groups)
    assert "weight_decay" in r.out and "command line" in r.out and "step-00000010" in r.out


def test_the_best_loss_is_remembered_and_its_checkpoint_kept(out):
    best = checkpoint.load(checkpoint.latest(out)).state["val_loss"]
    r = resume(out, "--max_iters=40", "--learning_rate=3", "--decay_lr=False", "--log_interval=40")
    assert r.code == 0 and all(val > best for _, val in list(r.evaluations().values())[2:])
    assert checkpoint.load(checkpoint.latest(out)).state["best_val_loss"] == best
    assert [p.name[-2:] for p in checkpoint.folders(out)] == ["10", "35", "40"]
    more = "--max_iters=42", "--eval_interval=1", "--keep_checkpoints=1"
    assert resume(out, *more).code == 0  # from one far above it
    assert checkpoint.load(checkpoint.latest(out)).state["best_val_loss"] == best
    assert [p.name[-2:] for p in checkpoint.folders(out)] == ["10", "42"]


def test_dropout_is_drawn_by_the_seed_of_the_run_where_its_states_are_of_no_use(out, monkeypatch):
    """Of two processes, for the one that goes on."""
    rest, seeds = checkpoint.Checkpoint.rest, []
    two = lambda saved: {**rest(saved), "rng": [{}, {}]}  # noqa: E731
    monkeypatch.setattr(checkpoint.Checkpoint, "rest", two)
    for seed in (5, 6):
        assert resume(out, f"--seed={seed}", "--eval_only").code == 0
        seeds.append(torch.initial_seed())
    assert seeds[0] + 1 == seeds[1]


@pytest.mark.parametrize("in_background", [False, True])
def test_a_gpus_random_state_is_saved_and_given_back(in_background, out, monkeypatch):
    """That of the process's own GPU, from which a thread that writes copies too."""
    given, current, own = [], [], torch.device("cuda", 3)
    state = torch.tensor([7], dtype=torch.uint8)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: state * device.index)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *at: given.append(at))
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    loaded = checkpoint.resumed(read(TrainConfig, ["--init_from=resume", f"--out_dir={out}"]))
    r = train.set_up(loaded, DistInfo(torch.device("cpu")))
    r.distributed, r.step = DistInfo(own), 11
    of_a_cpu = checkpoint.load(checkpoint.latest(out))
    checkpoint.restore(of_a_cpu, r.model, r.optimizer, r.scaler, 1, r.distributed)
    assert not given
    r.config = replace(r.config, async_checkpoint=in_background)
    checkpoint.save_run(r, None)
    checkpoint.finish(r)
    saved = checkpoint.load(checkpoint.latest(out))
    assert saved.step == 11
    checkpoint.restore(saved, r.model, r.optimizer, r.scaler, 1, r.distributed)
    assert given == [(torch.tensor([21]), own)] and current == [own] * in_background


def test_a_run_whose_steps_are_done_says_so(out):
    before = (out / "metrics.jsonl").read_bytes()
    for words in ((), ("--max_iters=7",)):
        r = resume(out, *words)
        assert r.code == 0 and "nothing to do" in r.out and "--max_iters" in r.out
        assert (out / "metrics.jsonl").read_bytes() == before
    more = resume(out, "--max_iters=12")
    assert more.code == 0 and list(more.losses()) == list(range(1, 13))


def test_the_time_that_is_foretold_is_that_of_the_steps_that_are_left(out):
    saved = checkpoint.load(checkpoint.latest(out))
    how = saved.train_settings(TrainConfig)
    tokens = how.batch_size * how.gradient_accumulation_steps * how.block_size
    work = flops.flops_per_token(saved.config(), how.block_size) * tokens
    r = resume(out, "--max_iters=13", f"--peak_tflops={work / 20e12}", "--eval_only")
    assert "13 steps: at the peak rate 60 s" in r.out  # three, of 20 seconds each


def test_with_nothing_to_resume(tmp_path):
    said = refusal(resume(tmp_path / "nothing"))
    assert f"no checkpoint in {tmp_path / 'nothing'}" in said and "python train.py" in said


def test_another_model_is_refused(out):
    """Each size, and what it was."""
    was = checkpoint.load(checkpoint.latest(out)).config()
    others = {"n_layer": 3, "n_head": 1, "n_kv_head": 1, "n_embd": 24, "bias": True,
              "gelu": "tanh", "vocab_size": 99, "block_size": 8}  # fmt: skip
    for name, value in others.items():
        said = refusal(resume(out, "--max_iters=12", f"--{name}={value}"))
        had = was.n_head if name == "n_kv_head" else getattr(was, name)
        there = f"has {name}={had}, which cannot be changed to {value} (command line)"
        assert str(checkpoint.latest(out)) in said and there in said, said
    settings = checkpoint.latest(out) / "settings.json"
    shared = settings.read_text().replace('"n_kv_head": null', '"n_kv_head": 1')
    settings.write_text(shared)
    said = refusal(resume(out, "--max_iters=12", "--n_kv_head=none"))  # which is as many as heads
    assert "has n_kv_head=1, which cannot be changed to 2 (command line)" in said


def test_a_size_that_cannot_be_is_told_with_what_is_resumed(out):
    said = refusal(resume(out, "--n_head=3"))
    assert "n_embd must be a multiple of n_head, got n_embd=16, n_head=3" in said
    assert f"(resuming {checkpoint.latest(out)})" in said


def test_a_run_that_torchrun_starts_again_goes_on(out, tmp_path, monkeypatch, capsys):
    """With the words that it was started with, and whatever its checkpoint knows beside them."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    alone = DistInfo(torch.device("cpu"))
    words = ["--max_iters=13", "--learning_rate=0.5", "--init_from=scratch"]
    for place in (out, tmp_path / "without"):
        mark_begun(str(place), alone)
        loaded = read(TrainConfig, [f"--out_dir={place}", *words])
        again = checkpoint.started_again(loaded, alone)
        if place != out:  # it died before its first checkpoint
            assert again is loaded and not capsys.readouterr().out
            continue
        saved = checkpoint.load(checkpoint.latest(out)).train_settings(TrainConfig)
        said = {"max_iters": 13, "learning_rate": 0.5, "init_from": "resume", "out_dir": str(out)}
        last = 10 if saved.lr_decay_iters is None else saved.lr_decay_iters
        assert again.settings == replace(saved, **said, lr_decay_iters=last)
        assert (again.origins["init_from"], again.origins["n_embd"]) == (
            "restart", str(checkpoint.latest(out)))  # fmt: skip
        assert "goes on from its last checkpoint" in capsys.readouterr().out
    monkeypatch.setattr("core.restarts._launcher", lambda: "another torchrun")
    loaded = read(TrainConfig, [f"--out_dir={out}", *words])
    assert checkpoint.started_again(loaded, alone) is loaded


def test_a_kernel_that_must_run_is_not_replaced_where_weights_are_taken_over(
    out, data_dir, tmp_path
):
    words = ("--attention_backend=sdpa_cudnn", "--attention_fallback=False")
    for init_from, to in (("resume", out), (str(out), tmp_path / "new")):
        r = run_line([*argv(data_dir, to, init_from=init_from, max_iters=11), *words], to)
        assert r.code == 2 and "attention backend 'sdpa_cudnn' cannot run here" in r.err


def test_the_models_own_size_said_again_is_no_mistake(out):
    sizes = checkpoint.load(checkpoint.latest(out)).config()
    words = [f"--{k}={getattr(sizes, k)}" for k in ("n_layer", "vocab_size", "bias")]
    r = resume(out, "--max_iters=11", "--n_kv_head=2", *words)
    assert r.code == 0, r.err


def test_a_folder_that_was_moved(out, tmp_path, monkeypatch):
    """The checkpoint remembers another out_dir; the one that was asked for counts."""
    monkeypatch.chdir(tmp_path)
    moved = tmp_path / TrainConfig().out_dir  # the default, which is not named then
    aside = out.rename(tmp_path / "aside")
    moved.parent.mkdir()
    aside.rename(moved)
    r = run_line(["--init_from=resume", "--max_iters=12"], moved)
    assert r.code == 0 and max(r.losses()) == 12
    assert checkpoint.load(checkpoint.latest(moved)).step == 12


def test_settings_of_another_version_are_one_sentence(out):
    path = checkpoint.latest(out) / "settings.json"
    settings = json.loads(path.read_text())
    saved = settings["train"]
    for changed in ({**saved, "flux": 1}, {**saved, "n_layer": "one"}, {**saved, "n_layer": 0}):
        path.write_text(json.dumps({**settings, "train": changed}))
        assert f"error: {path}" in refusal(resume(out, "--max_iters=12"))
    short = {k: v for k, v in saved.items() if k not in ("bias", "dropout")}
    path.write_text(json.dumps({**settings, "train": short}))
    assert resume(out, "--max_iters=12", "--bias=False").code == 0  # those are the defaults


def test_settings_with_the_names_of_version_0_1(out):
    """What was the model's, or had another name, stands in the way of no run."""
    path = checkpoint.latest(out) / "settings.json"
    settings = json.loads(path.read_text())
    once = {"attention_deterministic": False, "gradient_checkpointing": False, "sdpa_flash_impl":
            "FA2", "residual_dtype": "float32", "attention_fallback": True, "allow_mps_sdpa": False,
            "attention_hub_kernels": False}  # fmt: skip
    train = {**settings["train"], **once, "keep_freed_memory": True}
    train.pop("deterministic", None)
    model = {**settings["model"], **once}
    path.write_text(json.dumps({**settings, "train": train, "model": model}))
    r = resume(out, "--max_iters=12")
    assert r.code == 0 and max(r.losses()) == 12, r.err


def test_an_older_run_of_a_gpu_goes_on_on_the_cpu(out):
    """In the dtype that "auto" was there."""
    path = checkpoint.latest(out) / "settings.json"
    settings = json.loads(path.read_text())
    of_a_gpu = {**settings["train"], "dtype": "auto", "device": "cuda:64"}
    path.write_text(json.dumps({**settings, "train": of_a_gpu}))
    words = ["--init_from=resume", f"--out_dir={out}", "--device=cpu"]
    again = checkpoint.resumed(read(TrainConfig, words)).settings
    assert (again.device, again.dtype) == ("cpu", "float32")


def test_a_run_without_a_loss_scale_goes_on_in_float16(out):
    r = resume(out, "--max_iters=12", "--dtype=float16")
    assert r.code == 0 and max(r.losses()) == 12, r.err
    assert checkpoint.load(checkpoint.latest(out)).rest()["scaler"]["scale"] > 1


def test_a_run_in_parts_goes_on_whole(out):
    path = checkpoint.latest(out) / "settings.json"
    settings = json.loads(path.read_text())
    train = {**settings["train"], "parallel": "fsdp", "shard_size": 2}
    path.write_text(json.dumps({**settings, "train": train}))
    assert "one alone takes --parallel=ddp" in refusal(resume(out, "--max_iters=12"))
    r = resume(out, "--max_iters=12", "--parallel=ddp")
    assert r.code == 0 and max(r.losses()) == 12, r.err


def test_a_dataset_of_another_vocabulary_is_refused(out, tmp_path):
    """As many characters, but others: the ids would mean something else."""
    other = make_data(tmp_path / "other", TEXT.replace("q", "Q"))
    said = refusal(resume(out, "--max_iters=12", f"--data_dir={other}"))
    assert "tokenizer" in said or "vocabulary" in said


def test_a_fresh_run_in_an_old_folder_is_not_mixed_with_it(data_dir, out, monkeypatch):
    """A resume after it must not go on with the run before it, which is moved when all processes
    are ready: one may fail, or read its weights there."""
    order = []

    def note(name: str, does: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given: order.append(name) or does(*given)

    noted = [(train, "set_up"), (DistInfo, "gather"), (checkpoint, "set_aside"),
             (train, "mark_begun")]  # fmt: skip
    for place, name in noted:
        monkeypatch.setattr(place, name, note(name, getattr(place, name)))
    steps, rows = [p.name for p in checkpoint.folders(out)], (out / "metrics.jsonl").read_bytes()
    fresh = run(data_dir, out, max_iters=4, eval_interval=2, seed=5)
    aside = out / "earlier-1"
    assert fresh.code == 0 and f"checkpoints and metrics are now in {aside}\n" in fresh.out
    assert [p.name for p in checkpoint.folders(aside)] == steps
    assert (aside / "metrics.jsonl").read_bytes() == rows and (aside / "loss.png").exists()
    assert order[:4] == [name for _, name in noted]
    assert list(fresh.losses()) == [1, 2, 3, 4]
    state = checkpoint.load(checkpoint.latest(out)).state
    losses = [val for _, val in fresh.evaluations().values()]
    assert state == {
        "step": 4, "sequences_seen": 16, "processes": 1, "torch": torch.__version__,
        "val_loss": losses[-1], "best_val_loss": min(losses),
        "attention_backend": "sdpa", "attention_kernels": state["attention_kernels"],
    }  # fmt: skip
    r = resume(out, "--max_iters=6")
    assert r.code == 0 and "after step 4" in r.out


# --- more processes ---

# Each process: several runs one after the other, what they gave into result.<rank>.json.
WORKER = """
import contextlib, io, json, os, signal, sys, threading
from pathlib import Path
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
import train
from model import GPT
from train import TrainConfig
from core.settings import UserError

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
line = sys.argv[2:]
result = {"reduced": 0, "unsynced": 0}

def count(state, bucket):
    result["reduced"] += bucket.is_last()
    return default_hooks.allreduce_hook(state, bucket)

init, no_sync, forward = DDP.__init__, DDP.no_sync, GPT.forward
def counting_init(self, *args, **how):
    init(self, *args, **how)
    self.register_comm_hook(None, count)
def counting_no_sync(self):
    result["unsynced"] += 1
    return no_sync(self)
DDP.__init__, DDP.no_sync = counting_init, counting_no_sync

# Under one torchrun the processes can meet only once: the runs share the group.
meet, part, met = dist.init_process_group, dist.destroy_process_group, []
dist.init_process_group = lambda *a, **how: met.append(meet(*a, **how)) if not met else None
dist.destroy_process_group = lambda: None

def main(name, *more):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            code = train.main([*line, f"--out_dir={folder / name}", *more])
        except UserError as e:
            code = str(e)
    result[name] = {"code": code, "out": out.getvalue()}
    (folder / f"result.{rank}.json").write_text(json.dumps(result))

main("plain")
result["reduced_in_plain"], result["unsynced_in_plain"] = result["reduced"], result["unsynced"]
main("half", "--max_iters=4", "--lr_decay_iters=8")
main("dropout", "--dropout=0.2")

calls = 0
def stopping(self, *args):
    global calls
    calls += self.training
    if rank == 1 and self.training and calls == 2 * 5 - 1:  # this process alone, within step 5
        os.kill(os.getpid(), signal.SIGTERM)
    return forward(self, *args)
GPT.forward = stopping
main("stopped", "--dropout=0.2")
GPT.forward = forward
main("stopped", "--init_from=resume")
main("odd", "--batch_size=1", "--gradient_accumulation_steps=3")

calls = 0
def spoiled(self, *args):
    global calls
    logits, loss = forward(self, *args)
    calls += self.training
    if rank == 1 and self.training and calls == 2 * 3:  # in step 3, which is not logged
        loss = loss + torch.inf  # its gradient is finite
    return logits, loss
GPT.forward = spoiled
threading.Timer(20, os._exit, (1,)).start()  # rather than wait for one another for half an hour
main("spoiled", "--log_interval=100")
calls = 0
main("spoiled_float16", "--log_interval=100", "--dtype=float16")  # only this process knows of it
part()
os._exit(0)
"""

TWO: dict[str, Any] = {"gradient_accumulation_steps": 4, "max_iters": 8, "eval_interval": 4,
                       "n_layer": 2}  # fmt: skip


Two = tuple[Path, Callable[[], Any]]


@pytest.fixture(scope="module")
def two(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Two:
    """Two gloo processes: the folder of their runs, and what each process said of them."""
    folder = tmp_path_factory.mktemp("two")
    (folder / "worker.py").write_text(WORKER)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
            str(folder / "worker.py"), str(folder),
            *argv(data_dir, folder, **TWO)]  # fmt: skip
    env = {**environment(), "PYTHONPATH": str(ROOT)}
    subprocess.run(line, cwd=folder, env=env, capture_output=True, timeout=120)

    def said() -> Any:
        return [json.loads((folder / f"result.{rank}.json").read_text()) for rank in (0, 1)]

    return folder, said


def losses(out: Path) -> dict[int, float]:
    return Run(0, "", "", metrics.read(out / "metrics.jsonl")).losses()


def evaluations(out: Path) -> dict[int, float]:
    found = Run(0, "", "", metrics.read(out / "metrics.jsonl")).evaluations()
    return {k: v for k, (_, v) in found.items()}


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(two, data_dir, tmp_path):
    folder, said = two
    one = run(data_dir, tmp_path / "one", **TWO)
    assert [r["plain"]["code"] for r in said()] == [0, 0]
    assert "2 processes" in said()[0]["plain"]["out"] and said()[1]["plain"]["out"] == ""
    assert len(one.losses()) == 8 and one.losses()[8] < one.losses()[1]
    assert close(one.losses(), losses(folder / "plain"))
    val = {k: v for k, (_, v) in one.evaluations().items()}
    assert close(val, evaluations(folder / "plain")) and list(val) == [4, 8]


@pytest.mark.slow
def test_gradients_are_synchronized_once_a_step(two):
    _, said = two
    for r in said():
        assert r["reduced_in_plain"] == 8  # steps
        assert r["unsynced_in_plain"] == 8  # two micro-steps of each process, but the last


@pytest.mark.slow
def test_two_processes_resume_the_same_run(two):
    """One of them was told to stop; both stopped after the same step."""
    folder, said = two
    assert [r["dropout"]["code"] for r in said()] == [0, 0]
    assert [r["stopped"]["code"] for r in said()] == [0, 0]
    assert "after step 5" in said()[0]["stopped"]["out"]
    assert losses(folder / "stopped") == losses(folder / "dropout")
    assert losses(folder / "dropout") != losses(folder / "plain")


@pytest.mark.slow
def test_one_process_goes_on_for_two(two, data_dir):
    folder, _ = two
    r = resume(folder / "half", "--max_iters=8")
    assert r.code == 0
    assert close(r.losses(), losses(folder / "plain"))


@pytest.mark.slow
def test_micro_steps_that_two_processes_cannot_share(two):
    _, said = two
    for r in said():
        assert "gradient_accumulation_steps=3" in r["odd"]["code"] and "2 proc" in r["odd"]["code"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["spoiled", "spoiled_float16"])
def test_a_loss_that_is_not_finite_in_one_process_stops_both(two, name):
    folder, said = two
    assert [r.get(name, {}).get("code") for r in said()] == [1, 1]
    assert not checkpoint.folders(folder / name)
    assert all(math.isfinite(x) for x in losses(folder / name).values())


def test_more_steps_do_not_raise_the_learning_rate_again(out, data_dir):
    """The schedule is the one that the run began with, unless another is asked for."""
    r = resume(out, "--max_iters=14", "--log_interval=1")
    low = [row["lr"] for row in r.rows if row["iter"] > 10 and "lr" in row]
    assert r.code == 0 and low == [pytest.approx(TINY["learning_rate"] / 10)] * 4
    assert "lr_decay_iters" in r.out


def test_a_longer_schedule_can_be_asked_for(out, data_dir):
    r = resume(out, "--max_iters=14", "--lr_decay_iters=14", "--log_interval=1")
    rates = [row["lr"] for row in r.rows if row["iter"] > 10 and "lr" in row]
    assert r.code == 0 and rates[0] > 1.2 * TINY["learning_rate"] / 10
