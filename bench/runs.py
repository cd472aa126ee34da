"""The mode runs: whole runs of train.py and of nanoGPT's train.py on the CPU, interleaved.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    python bench_mfu.py runs --rival=nanogpt=../nanoGPT

Each run is a new process on the same tokens and sizes, A B A B ... nanoGPT computes in float32.
"""

from __future__ import annotations

import json
import os
import pickle
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean, median

import torch

from attention.machine.system import cpu_name
from bench import ROOT, job
from bench.settings import Runs
from bench.tables import markdown
from core.settings import UserError

Pair = tuple[tuple[float, int], tuple[float, int]]  # (s a step, bytes) of ours, of nanoGPT
SKIP = 3  # first steps of each run, not counted
NAMES = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dataset")
SIZES: dict[
    str, tuple[int, int, int, int, int, str, int]
] = {  # values of NAMES, and the steps that are counted in a run
    "a": (4, 4, 128, 64, 12, "shakespeare_char", 400),
    "b": (6, 6, 384, 256, 16, "shakespeare_char", 15),
    "c": (12, 12, 768, 512, 2, "shakespeare", 6),  # GPT-2 124M
}
HEAD = ["size", "nanoGPT tok/s", "ours tok/s", "ratio (lowest to highest)", "nanoGPT GB", "ours GB"]


def settings(name: str, config: Runs) -> list[str]:
    """Return the options that both train.py share."""
    *size, steps = SIZES[name]
    both = {**dict(zip(NAMES, size)), "max_iters": SKIP + steps, "device": "cpu"}
    both |= {"compile": config.compile is True, "dropout": 0.0, "bias": False}
    both |= {"gradient_accumulation_steps": 1, "warmup_iters": 10}
    both |= {"eval_interval": 1_000_000, "eval_iters": 1, "log_interval": 1}
    return [f"--{name}={value}" for name, value in both.items()]


def ended(command: list[str], cwd: Path) -> tuple[str, int]:
    """Run a command; return its output and its peak resident memory in bytes."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        process = subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        text = out.read()
    if process.returncode:
        last = text.strip().rpartition("\n")[2]
        raise UserError(f"{' '.join(command[:3])} failed ({process.returncode}): {last}")
    return text, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def ours(size: str, config: Runs, work: Path) -> tuple[float, int]:
    """Return mean seconds per step, and bytes, of this project's loop."""
    command = [sys.executable, str(ROOT / "train.py"), *settings(size, config)]
    command += [f"--data_dir={work / 'data'}", f"--out_dir={work / 'ours'}", "--peak_tflops=1"]
    command += [f"--attention_backend={config.attention_backend}", f"--dtype={config.dtype}"]
    _, memory = ended(command, work)
    with (work / "ours" / "metrics.jsonl").open(encoding="utf-8") as rows:
        times = [r["ms"] / 1e3 for r in map(json.loads, rows) if "ms" in r and r["iter"] > SKIP]
    return mean(times), memory


def theirs(size: str, config: Runs, checkout: Path, work: Path) -> tuple[float, int]:
    """Return the same for nanoGPT's loop."""
    command = [sys.executable, str(checkout / "train.py"), *settings(size, config)]
    command += [f"--out_dir={work / 'theirs'}", "--always_save_checkpoint=False"]
    text, memory = ended(command, work)
    times = [float(t) / 1e3 for t in re.findall(r"^iter \d+: loss .*, time ([\d.]+)ms", text, re.M)]
    return mean(times[SKIP + 1 :]), memory


def prepare(sizes: tuple[str, ...], checkout: Path, work: Path) -> None:
    """Fill a folder for both: datasets with the metadata that each needs."""
    for name in ("train.py", "model.py", "configurator.py"):
        if not (checkout / name).is_file():
            raise UserError(f"{checkout} is not a nanoGPT checkout ({name} not found)")
    # It reads configurator.py and data/ from the working directory.
    (work / "configurator.py").symlink_to(checkout / "configurator.py")
    for dataset in {SIZES[s][5] for s in sizes}:
        folder = work / "data" / dataset
        ended([sys.executable, "-m", "data", dataset, f"--out_dir={folder}"], ROOT)
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        if meta["vocab_size"] < 1024:  # for BPE both use 50304
            (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": meta["vocab_size"]}))


def row(name: str, pairs: list[Pair]) -> list[str]:
    n_layer, _, n_embd, block_size, batch_size, *_ = SIZES[name]
    tokens = block_size * batch_size
    speed = [[tokens / seconds for seconds, _ in side] for side in zip(*pairs, strict=True)]
    memory = [f"{median(m for _, m in side) / 1e9:.2f}" for side in zip(*pairs, strict=True)]
    ratios = sorted(a / b for a, b in zip(*speed, strict=True))
    mine, other = (f"{median(s):,.0f}" for s in speed)
    model = f"{n_layer} layers, {n_embd} wide" if n_embd < 768 else "GPT-2 124M"
    ratio = f"**{median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    title = f"{model}, block {block_size}, batch {batch_size}"
    return [title, other, mine, ratio, memory[1], memory[0]]


def run(config: Runs) -> int:
    """Run both commands and print the table. Returns the exit code."""
    rivals = job.rivals(config.rival)
    if [*rivals] != ["nanogpt"]:
        raise UserError("runs needs --rival=nanogpt=PATH, a nanoGPT checkout")
    checkout = Path(rivals["nanogpt"].partition("=")[2]).parent
    results: dict[str, list[Pair]] = {s: [] for s in config.sizes}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(config.sizes, checkout, work)
        for n in range(config.rounds):
            for s, pairs in results.items():
                print(f"round {n + 1} of {config.rounds}, size {s}", file=sys.stderr)
                pairs.append((ours(s, config, work), theirs(s, config, checkout, work)))
    print(
        f"{cpu_name() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {config.rounds} rounds, ours in {config.dtype}, "
        f"{'compiled' if config.compile else 'not compiled'}\n"
    )
    print(markdown((HEAD, [row(s, pairs) for s, pairs in results.items()])))
    return 0
