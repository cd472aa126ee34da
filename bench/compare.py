"""Whole runs of train.py: next to nanoGPT's train.py, and finished ones side by side.

    git clone https://github.com/karpathy/nanoGPT ../nanoGPT
    python bench_mfu.py runs --rival=nanogpt=../nanoGPT
    python -m bench.compare out/adamw-* out/muon-*

runs: each run is a new process on the same tokens and sizes, on the CPU, A B A B ... nanoGPT
computes in float32. compare: runs whose settings differ in the seed alone are one line. The last
columns say when the mean curve of a line first had the final loss of the first line's, between two
evaluations by interpolation.
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

from core import terminal
from core.settings import UserError, exit_on_user_error

if __name__ == "__main__":
    terminal.end_at_once()

import numpy as np
import torch

import checkpoint
from attention.machine.system import cpu_name
from bench import ROOT, job
from bench.settings import Runs
from bench.tables import markdown
from core import metrics

Run = tuple[float, int]  # seconds a step, bytes
SKIP = 3  # first steps of each run, not counted
NAMES = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dataset")
SIZES: dict[str, tuple[int, int, int, int, int, str, int]] = {
    # values of NAMES, and the steps that are counted in a run
    "a": (4, 4, 128, 64, 12, "shakespeare_char", 400),
    "b": (6, 6, 384, 256, 16, "shakespeare_char", 15),
    "c": (12, 12, 768, 512, 2, "shakespeare", 6),  # GPT-2 124M
}
HEAD = ["size", "nanoGPT tok/s", "ours tok/s", "ratio (lowest to highest)", "nanoGPT GB", "ours GB"]
LOSS = "val loss: mean (lowest to highest)"
SAME = ("seed", "out_dir", "init_from")  # settings in which the runs of a line may differ


# --- next to nanoGPT ---


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


def pair(size: str, config: Runs, checkout: Path, work: Path) -> tuple[Run, Run]:
    """Return a run of this project's loop, and one of nanoGPT's."""
    *sizes, steps = SIZES[size]
    both = {**dict(zip(NAMES, sizes)), "max_iters": SKIP + steps, "device": "cpu"}
    both |= {"compile": config.compile is True, "dropout": 0.0, "bias": False}
    both |= {"gradient_accumulation_steps": 1, "warmup_iters": 10}
    both |= {"eval_interval": 1_000_000, "eval_iters": 1, "log_interval": 1}
    ours = {"data_dir": work / "data", "out_dir": work / "ours", "peak_tflops": 1}
    ours |= {"attention_backend": config.attention_backend, "dtype": config.dtype}
    theirs = {"out_dir": work / "theirs", "always_save_checkpoint": False}

    def run(folder: Path, own: dict[str, object]) -> tuple[str, int]:
        options = [f"--{name}={value}" for name, value in (both | own).items()]
        return ended([sys.executable, str(folder / "train.py"), *options], work)

    _, memory = run(ROOT, ours)
    rows = metrics.read(work / "ours" / "metrics.jsonl")
    our_times = [r["ms"] / 1e3 for r in rows if "ms" in r and r["iter"] > SKIP]
    text, their_memory = run(checkout, theirs)
    printed = re.findall(r"^iter \d+: loss .*, time ([\d.]+)ms", text, re.M)[SKIP + 1 :]
    return (mean(our_times), memory), (mean(float(ms) / 1e3 for ms in printed), their_memory)


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


def row(name: str, pairs: list[tuple[Run, Run]]) -> list[str]:
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


def runs(config: Runs) -> int:
    """Run both commands and print the table. Returns the exit code."""
    rivals = job.rivals(config.rival)
    if [*rivals] != ["nanogpt"]:
        raise UserError("runs needs --rival=nanogpt=PATH, a nanoGPT checkout")
    checkout = Path(rivals["nanogpt"].partition("=")[2]).parent
    results: dict[str, list[tuple[Run, Run]]] = {s: [] for s in config.sizes}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepare(config.sizes, checkout, work)
        for n in range(config.rounds):
            for s, pairs in results.items():
                print(f"round {n + 1} of {config.rounds}, size {s}", file=sys.stderr)
                pairs.append(pair(s, config, checkout, work))
    print(
        f"{cpu_name() or platform.machine()}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}, {config.rounds} rounds, ours in {config.dtype}, "
        f"{'compiled' if config.compile else 'not compiled'}\n"
    )
    print(markdown((HEAD, [row(s, pairs) for s, pairs in results.items()])))
    return 0


# --- finished runs ---


def curve(folder: Path) -> np.ndarray:
    """(3, n): step, seconds and validation loss of each evaluation of a run. The first steps, which
    are not timed, count as the next ones."""
    seconds, last, found = 0.0, 0, []
    rows = metrics.read(folder / "metrics.jsonl")
    first = next((row["ms"] for row in rows if "ms" in row), 0.0)
    for row in rows:
        seconds += (row["iter"] - last) * row.get("ms", first) / 1e3
        last = row["iter"]
        found += [(last, seconds, row["val_loss"])] if "val_loss" in row else []
    if not found:
        raise UserError(f"{folder} has no evaluation")
    return np.array(found).T


def reached(curve: np.ndarray, loss: float) -> list[float]:
    """Steps and seconds after which a curve first has this loss; NaN if it never has."""
    best, first = np.unique(-np.minimum.accumulate(curve[2]), return_index=True)
    return [float(np.interp(-loss, best, x[first], right=np.nan)) for x in curve[:2]]


def table(folders: list[Path]) -> str:
    groups: dict[str, list[np.ndarray]] = {}
    for folder in folders:
        settings = checkpoint.load(checkpoint.latest(folder)).settings["train"]
        key = json.dumps({k: v for k, v in settings.items() if k not in SAME})
        groups.setdefault(key, []).append(curve(folder))
    known: list[dict[str, object]] = [json.loads(key) for key in groups]
    differ = [name for name in known[0] if any(s.get(name) != known[0][name] for s in known)]
    # Seed by seed, one that ends above the mean would never reach it.
    ends = [min(c.shape[1] for c in curves) for curves in groups.values()]
    means = [np.mean([c[:, :n] for c in cs], axis=0) for n, cs in zip(ends, groups.values())]
    target = float(means[0][2, -1])
    head = f"settings | seeds | steps | s | {LOSS} | steps to {target:.4f} | s"
    lines = [f"| {head} |", "|---" * 7 + "|"]
    for settings, curves, middle in zip(known, groups.values(), means):
        what = " ".join(f"{name}={settings.get(name)}" for name in differ) or "all"
        losses = np.array([c[2, -1] for c in curves])
        steps, seconds = np.mean([c[:2, -1] for c in curves], axis=0)
        there = [f"{x:,.0f}" if np.isfinite(x) else "never" for x in reached(middle, target)]
        loss = f"{losses.mean():.4f} ({losses.min():.4f} to {losses.max():.4f})"
        cells = what, len(curves), f"{steps:,.0f}", f"{seconds:,.0f}", loss, *there
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    if not all(argv) or not argv or argv[0].startswith("-"):
        raise UserError("expected the folders of runs: python -m bench.compare out/a out/b")
    print(table([Path(name) for name in argv]))
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
