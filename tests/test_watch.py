# ruff: noqa: F401, F811 (a fixture)
"""Killed, frozen or failed processes: torchrun ends the others, the rank is named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import python
from test_train import argv, data_dir, run, run_line

import checkpoint
from core.metrics import read

pytestmark = pytest.mark.slow
# train.py with a rank that fails.
FAULTY = """
import os, signal, sys
import torch, train
from core.settings import exit_on_user_error
from torch.distributed.elastic.multiprocessing.errors import record

fault, victim, at = sys.argv[1], sys.argv[2], sys.argv[3].split(",")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
step, done = train.train_step, 0

def faulty(module, *args, **how):
    global done
    done += 1
    if done == int([*at, *"00"][attempt]) and os.environ["RANK"] == victim:
        if fault == "fails":
            raise ValueError("a fault of its own")
        if fault == "nan":
            next(module.parameters()).register_hook(lambda g: g * torch.nan)
        else:
            os.kill(os.getpid(), getattr(signal, fault))
    return step(module, *args, **how)

train.train_step = faulty
exit_on_user_error(lambda: record(train.main)(sys.argv[4:]))
"""


def torchrun(folder: Path, fault: str, victim: int, line: list[str], *how: str, at: str = "5"
             ) -> tuple[int, str]:
    """One of two processes fails at a step of each attempt: (exit code, output)."""
    script = folder / "faulty.py"
    script.write_text(FAULTY, encoding="utf-8")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", *how]
    done = python(*command, str(script), fault, str(victim), at, *line, cwd=folder, timeout=180)
    return done.returncode, done.stdout + done.stderr


FSDP = {"parallel": "fsdp"}


@pytest.mark.parametrize(("fault", "victim", "knobs", "exit_code"), [
    ("SIGKILL", 1, {}, None), ("fails", 1, FSDP, None),
    ("SIGSTOP", 0, FSDP, None),  # torchrun waits 30 s to kill it
    ("SIGSTOP", 1, {"context_parallel": 2, "attention_backend": "tiled"}, None),
    ("nan", 1, {}, 1), ("SIGTERM", 1, FSDP, 143), ("SIGHUP", 1, FSDP, 129)])
def test_a_fault_of_one_rank_ends_all(data_dir, tmp_path, fault, victim, knobs, exit_code):
    """A lost one is named; NaN changes no weight; a signal saves, and one process resumes."""
    out = tmp_path / "out with space"
    line = argv(data_dir, out, max_iters=10_000, eval_interval=3, hang_timeout=4, **knobs)
    how = ["--shutdown-timeout=1"] if fault == "SIGSTOP" else []
    code, said = torchrun(tmp_path, fault, victim, line, *how)  # it ends in time, or fails
    lost = {*re.findall(r"lost rank (\d+)", said)}
    assert code != 0 and lost == ({str(victim)} if exit_code is None else set()), said
    assert exit_code or f"--init_from=resume '--out_dir={out}'" in said
    assert fault != "fails" or "of its own" in said
    if fault == "nan":
        assert "at step 5" in said and checkpoint.latest(out).name == "step-00000003"
    elif exit_code:
        assert f"exitcode  : {exit_code}" in said
        assert checkpoint.latest(out).name == "step-00000005"
        assert "--nproc_per_node=2 train.py --init_from=resume" in said
        r = run_line(["--init_from=resume", f"--out_dir={out}", "--max_iters=6"], out)
        assert r.code == 0 and "after step 5" in r.out, r.err


KERNEL = """
import os, sys, time
from attention import BACKENDS, Backend, Caps

waited = [0][int(os.environ["RANK"]):]

def attend(q, k, v, spec, **more):
    if "--compile=True" in sys.argv and spec.grad and not spec.compiled:
        raise RuntimeError("the request does not say that it is compiled")
    if not (spec.compiled or spec.grad or waited) and q.shape[0] == 4:  # of the probe it is 2
        waited.append(time.sleep(9))
    return BACKENDS["manual"].attend(q, k, v, spec, **more)

BACKEND = Backend("mine", "slow on rank 1, at first", attend, (Caps(),), fallback=None)
"""
WANDB = """
import sys, time
Settings = dict
init = lambda **how: sys.modules["wandb"]
log = lambda row, step: None
finish = lambda: (time.sleep(9), print("wandb is done", flush=True))
"""


@pytest.mark.parametrize("knobs", [
    {"wandb_log": True}, {"attention_backend": "mine.py"},
    {"attention_backend": "mine.py", "parallel": "fsdp", "compile": True}], ids=str)
def test_a_finished_run_is_not_lost_because_one_rank_is_slow(data_dir, tmp_path, knobs):
    """In its last work, or the first evaluation."""
    (tmp_path / "mine.py").write_text(KERNEL, encoding="utf-8")
    (tmp_path / "wandb.py").write_text(WANDB, encoding="utf-8")
    line = argv(data_dir, tmp_path / "out", max_iters=6, eval_interval=4, sample_tokens=2,
                gradient_accumulation_steps=2, attention_fallback=False,
                **{"hang_timeout": 60 if "compile" in knobs else 3, **knobs})
    code, said = torchrun(tmp_path, "none", 0, line, at="100")
    assert code == 0 and "lost" not in said and "a sample of 2" in said, said
    assert ("wandb is done" in said) == ("wandb_log" in knobs), said
    assert ("backend: mine (" in said) == ("attention_backend" in knobs), said
    assert checkpoint.latest(tmp_path / "out").name == "step-00000006"


def test_a_restart_goes_on_from_the_last_checkpoint_of_its_own_run(data_dir, tmp_path):
    """Not from an earlier run's in the folder."""
    out, knobs = tmp_path / "out", {"max_iters": 8, "eval_interval": 2, "batch_size": 2}
    knobs["gradient_accumulation_steps"] = 2
    earlier = run(data_dir, out, **knobs)
    line = argv(data_dir, out, **knobs)
    code, said = torchrun(tmp_path, "SIGKILL", 1, line, "--max_restarts=2", at="1,6")
    assert code == 0 and said.count("resuming") == 2 and "after step 4" in said, said
    again = [(row["iter"], row["loss"]) for row in read(out / "metrics.jsonl") if "loss" in row]
    assert len(again) == 8 and dict(again) == pytest.approx(earlier.losses(), rel=1e-5)
    assert checkpoint.latest(out / "earlier-1").name == "step-00000008"
