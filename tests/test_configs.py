"""Every file in config/ loads, and its header tells how to run it and what to expect."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from attention import Policy
from attention.__main__ import Options
from bench.config import BenchConfig
from core.settings import read
from data import DATASETS
from data.__main__ import DataConfig
from explain import ExplainConfig
from sample import SampleConfig
from train import TrainConfig

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "config").glob("*.py"))


def load(name: str) -> TrainConfig:
    return read(TrainConfig, [str(ROOT / "config" / f"{name}.py")]).settings


def header(path: Path) -> str:
    """The comment lines at the top."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return "\n".join(lines[:end])


def test_all_configs_are_here():
    assert {p.stem for p in FILES} >= {
        "train_shakespeare_char", "train_shakespeare_cpu", "train_gpt2", "finetune_shakespeare",
        "eval_gpt2", "eval_gpt2_medium", "eval_gpt2_large", "eval_gpt2_xl",
    }  # fmt: skip


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


def test_shakespeare_char_is_nanogpts():
    c = load("train_shakespeare_char")
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.batch_size) == (6, 6, 384, 256, 64)
    assert (c.dropout, c.learning_rate, c.beta2, c.warmup_iters) == (0.2, 1e-3, 0.99, 100)
    assert (c.max_iters, c.lr_decay_iters, c.min_lr) == (5000, None, None)  # to 5000, to 1e-4
    assert (c.eval_interval, c.eval_iters, c.gradient_accumulation_steps) == (250, 200, 1)
    assert (c.weight_decay, c.beta1, c.grad_clip, c.bias) == (0.1, 0.9, 1.0, False)
    assert c.dataset == "shakespeare_char"


def test_gpt2_is_nanogpts():
    c = load("train_gpt2")
    assert c.batch_size * c.gradient_accumulation_steps * c.block_size == 491_520
    assert c.gradient_accumulation_steps % 8 == 0  # the launch line's eight processes share it
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.bias) == (12, 12, 768, 1024, False)
    assert (c.learning_rate, c.min_lr, c.warmup_iters) == (6e-4, None, 2000)
    assert (c.max_iters, c.lr_decay_iters) == (600_000, 600_000)
    assert (c.weight_decay, c.beta1, c.beta2, c.grad_clip, c.dropout) == (0.1, 0.9, 0.95, 1.0, 0.0)
    assert c.dataset == "openwebtext"
    assert (c.eval_interval, c.eval_iters, c.log_interval) == (1000, 200, 10)
    assert "491,520" in (ROOT / "config" / "train_gpt2.py").read_text()


def test_shakespeare_cpu_is_small():
    c = load("train_shakespeare_cpu")
    assert (c.n_layer, c.n_head, c.n_embd, c.block_size, c.batch_size) == (4, 4, 128, 64, 12)
    assert (c.max_iters, c.dataset) == (2000, "shakespeare_char")
    assert (c.learning_rate, c.beta2, c.warmup_iters, c.dropout) == (1e-3, 0.99, 100, 0.0)
    assert (c.weight_decay, c.grad_clip, c.gradient_accumulation_steps) == (0.1, 1.0, 1)
    assert (c.eval_interval, c.eval_iters) == (500, 40)
    assert c.sample_tokens > 0 and c.max_iters % c.eval_interval == 0


def test_what_nobody_asks_for_is_off_and_texts_are_drawn_as_nanogpts_are():
    """Hub kernels, Metal's SDPA and a dataset's replacement are asked for, never a default."""
    on = {
        TrainConfig: {"attention_fallback", "decay_lr", "tf32"}, BenchConfig: {"sweep"},
        SampleConfig: {"attention_fallback"}, ExplainConfig: {"attention_fallback"},
        Options: set(), DataConfig: set(), Policy: {"fallback"},
    }  # fmt: skip
    for settings, switches in on.items():
        assert {f.name for f in fields(settings) if f.default is True} == switches
    s, e = SampleConfig(), ExplainConfig()
    assert (s.temperature, s.top_k, s.max_new_tokens, s.seed) == (0.8, 200, 500, 1337)
    assert (e.layer, e.head, e.block_m, e.block_n, e.ring) == (0, 0, 8, 8, 4)
    assert (e.fast_memory, e.gpu) == (196_608, "A100-SXM4-80GB")


def test_finetuning_starts_from_gpt2_xl_with_a_constant_rate():
    c = load("finetune_shakespeare")
    assert (c.init_from, c.dataset, c.decay_lr) == ("gpt2-xl", "shakespeare", False)
    assert (c.learning_rate, c.max_iters, c.warmup_iters) == (3e-5, 20, 0)
    assert (c.eval_interval, c.eval_iters, c.log_interval, c.dropout) == (5, 40, 1, 0.0)
    assert c.gradient_checkpointing and c.sample_tokens == 300
    assert c.batch_size * c.gradient_accumulation_steps * c.block_size == 32_768


@pytest.mark.parametrize("size", ["", "_medium", "_large", "_xl"])
def test_eval_gpt2_evaluates_and_no_more(size):
    c = load(f"eval_gpt2{size}")
    assert c.init_from == "gpt2" + size.replace("_", "-")
    assert c.eval_only and c.dataset == "openwebtext" and c.block_size == 1024
    # What is compared was evaluated alike, the largest in smaller batches.
    assert (c.eval_iters, c.dropout, c.dtype) == (500, 0.0, "auto")
    assert c.batch_size == (4 if size == "_xl" else 8)


# --- what is answered before torch is imported, which takes seconds ---

WITHOUT_TORCH = """
import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    slow = {"torch", "numpy", "matplotlib"} & set(sys.modules)
    assert not slow, slow
"""


@pytest.mark.parametrize(
    "argv, code, says",
    [
        (["train.py", "--help"], 0, "--n_layer=12"),
        (["train.py", "--help"], 0, "--attn_implementation]"),
        (["train.py", "config/train_shakespeare_cpu.py", "-h"], 0, "--n_layer=4 "),
        (["train.py", "config/train_gtp2.py"], 2, "did you mean 'config/train_gpt2.py'?"),
        (["train.py", "--batch_sise=3"], 2, "did you mean '--batch_size'?"),
        (["train.py", "--batch_size=0"], 2, "--batch_size must be at least 1, got 0"),
        (["train.py", "--batch_size=many"], 2, "--batch_size must be an integer, got 'many'"),
        (["sample.py", "--help"], 0, "--attn_implementation]"),
        (["sample.py", "--batch_size=0"], 2, "--batch_size must be at least 1, got 0"),
    ],
)
def test_help_and_mistakes_are_answered_before_torch_is_imported(argv, code, says):
    command = [sys.executable, "-c", WITHOUT_TORCH, *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert says in done.stdout + done.stderr and done.stderr.count("\n") == (code == 2)


@pytest.mark.parametrize(
    "argv, slow, code, says",
    [
        (["-m", "data", "--help"], "torch", 0, "usage: python -m data [dataset]"),
        (["-m", "data", "shakespear"], "torch", 2, "did you mean 'shakespeare'?"),
        (["-c", "import model"], "torch._dynamo", 0, ""),
    ],
)
def test_a_command_does_not_wait_for_an_import_that_it_can_do_without(argv, slow, code, says):
    command = [sys.executable, "-X", "importtime", *argv]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == code and says in done.stdout + done.stderr
    assert "ast" in imported and slow not in imported
