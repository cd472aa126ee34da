"""Every file in config/ loads, and its header tells how to run it and what to expect."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT, files

from core.optimizer import learning_rate, schedule_warnings
from core.settings import read
from data import DATASETS
from train import ALIASES, IGNORED, TrainConfig

FILES = [p for p in files("config/*.py") if p.stem != "bench_cpu"]


def load(name: str) -> TrainConfig:
    return read(TrainConfig, [str(ROOT / "config" / f"{name}.py")]).settings


def header(path: Path) -> str:
    """The comment lines at the top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_config_loads_and_sets_only_what_differs(path):
    loaded = read(TrainConfig, [str(path)])
    assert loaded.origins and all(str(path) in origin for origin in loaded.origins.values())
    assert loaded.settings.dataset in DATASETS
    own = "gpt" if loaded.settings.eval_only else path.stem.removeprefix("train_")
    assert loaded.settings.out_dir == f"out/{own}"  # where no other run's checkpoints are


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_header_names_the_launch_line_the_hardware_and_the_loss(path):
    text = header(path)
    config = load(path.stem)
    launch = [line for line in text.splitlines() if f"train.py config/{path.name}" in line]
    assert launch and all("python" in line or "torchrun" in line for line in launch)
    assert f"python -m data {config.dataset}\n" in text
    assert re.search(r"^# Hardware: \S", text, re.M)
    # what to expect: a figure, of a named unit
    expected = text[text.index("# Expect:") :]
    assert re.search(r"\bloss\b.*\b\d\.\d+ nats a (token|character)", expected, re.S)
    assert re.search(r"\b(minutes?|days?|hours?|timed)\b", text)
    # Every option that a launch line gives is one that there is.
    for line in launch:
        words = line.split("train.py ")[1].split("  ")[0].split()
        read(TrainConfig, [str(ROOT / w) if w.startswith("config/") else w for w in words])


# Of nanoGPT's config/finetune_shakespeare.py.
NANOGPT = """import time
wandb_run_name = 'ft-' + str(time.time())
dataset = 'shakespeare'
always_save_checkpoint = False
gradient_accumulation_steps = 32
max_iters = 20
learning_rate = 3e-5
decay_lr = False
"""


def test_nanogpts_finetuning_runs_unchanged_at_its_constant_rate(tmp_path):
    (tmp_path / "finetune.py").write_text(NANOGPT)
    argv = [str(tmp_path / "finetune.py"), "--backend=nccl"]
    loaded = read(TrainConfig, argv, aliases=ALIASES, ignored=IGNORED)
    config, report = loaded.settings, "\n".join(loaded.report())
    assert "always_save_checkpoint" in report and "backend" in report
    assert (config.dataset, config.gradient_accumulation_steps) == ("shakespeare", 32)
    assert {learning_rate(step, config) for step in range(config.max_iters)} == {3e-5}
    assert schedule_warnings(config) == []
    assert read(TrainConfig, []).settings.dataset == "openwebtext"


@pytest.mark.parametrize(
    "changes, named",
    [
        ({"warmup_iters": 10}, []),
        ({"warmup_iters": 101}, ["101", "100"]),
        ({"warmup_iters": 101, "decay_lr": False}, []),
        ({"min_lr": 0.5}, ["0.5", "0.1"]),
        ({"min_lr": 0.1}, []),
        ({"lr_decay_iters": 0}, ["--lr_decay_iters=0"]),
        ({"warmup_iters": 50, "lr_decay_iters": 10}, ["10", "50"]),
    ],
)
def test_a_schedule_that_is_cut_short_is_a_warning(changes: dict[str, Any], named):
    plain = TrainConfig(max_iters=100, warmup_iters=0, learning_rate=0.1)
    found = schedule_warnings(replace(plain, **changes))
    assert len(found) == bool(named)
    assert all(word in found[0] for word in named)
