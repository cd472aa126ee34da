"""Runs of train.py on a CPU next to nanoGPT's in float32 (docs/SPEED.md), and finished runs side by
side: a line for runs that differ only in the seed (docs/TRAIN.md)."""

from __future__ import annotations

import json
import os
import pickle
import platform
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch

import checkpoint
import data
from attention.machine.system import cpu_name
from bench import ROOT, Json, rivals
from bench.settings import Runs
from bench.tables import count, markdown
from core import metrics
from core.runtime import dtype_name, pick_dtype
from core.settings import UserError, exit_on_user_error

SKIP = 3  # steps
NAMES = ("n_layer", "n_head", "n_embd", "block_size", "batch_size", "dataset")
SIZES: dict[str, tuple[int, int, int, int, int, str, int]] = {
    # NAMES, then the counted steps
    "a": (4, 4, 128, 64, 12, "shakespeare_char", 400),
    "b": (6, 6, 384, 256, 16, "shakespeare_char", 15),
    "c": (12, 12, 768, 512, 2, "shakespeare", 6),
}
BOTH: Json = {
    "device": "cpu", "dropout": 0.0, "bias": False, "gradient_accumulation_steps": 1,
    "warmup_iters": 10, "eval_interval": 1_000_000, "eval_iters": 1, "log_interval": 1,
}  # fmt: skip
HEAD = ["size", "nanoGPT tok/s", "ours tok/s", "ratio (lowest to highest)", "nanoGPT GB", "ours GB"]
SAME = ("seed", "out_dir", "init_from")  # may differ in a line


PEAK = """import resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stderr=subprocess.STDOUT)
print("", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, sep="\\n")
sys.exit(code if code >= 0 else 128 - code)"""


def ended(cwd: Path, *argv: str, **options: Any) -> tuple[str, int]:
    """Output and peak bytes, as a small process sees them: Linux counts the parent's as well."""
    command = [sys.executable, *argv, *(f"--{name}={value}" for name, value in options.items())]
    how: Any = {"cwd": cwd, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", PEAK, *command], **how) as process:
        try:
            out: str = process.communicate()[0]
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    text, _, peak = out.strip().rpartition("\n")
    if process.returncode:
        last = text.strip().rpartition("\n")[2]
        raise UserError(f"{' '.join(command[:3])} failed ({process.returncode}): {last}")
    return text, int(peak) * (1 if sys.platform == "darwin" else 1024)


def pair(size: str, config: Runs, checkout: Path, work: Path) -> list[float]:
    """Tokens a second: nanoGPT, ours; peak bytes."""
    *sizes, steps = SIZES[size]
    both = BOTH | dict(zip(NAMES, sizes)) | {"max_iters": SKIP + steps}
    both["compile"] = config.compile is True
    ours = both | {"data_dir": work / "data", "out_dir": work / "ours", "peak_tflops": 1}
    ours |= {"attention_backend": config.attention_backend, "dtype": config.dtype}
    theirs = both | {"out_dir": work / "theirs", "always_save_checkpoint": False}
    _, our_bytes = ended(work, str(ROOT / "train.py"), **ours)
    text, their_bytes = ended(work, str(checkout / "train.py"), **theirs)
    printed = re.findall(r"^iter \d+: loss .*, time ([\d.]+)ms", text, re.M)[SKIP + 1 :]
    rows = metrics.read(work / "ours" / "metrics.jsonl")
    times = [map(float, printed), [r["ms"] for r in rows if "ms" in r and r["iter"] > SKIP]]
    tokens = both["block_size"] * both["batch_size"]
    return [*(1e3 * tokens / mean(ms) for ms in times), their_bytes, our_bytes]


def row(size: str, pairs: list[list[float]]) -> list[str]:
    n_layer, _, n_embd, block_size, batch_size, *_ = SIZES[size]
    theirs, ours, *memory = np.array(pairs).T
    ratios = ours / theirs
    model = f"{n_layer} layers, {n_embd} wide" if n_embd < 768 else "GPT-2 124M"
    return [
        f"{model}, block {block_size}, batch {batch_size}",
        *(f"{np.median(speed):,.0f}" for speed in (theirs, ours)),
        f"**{np.median(ratios):.2f}** ({ratios.min():.2f} to {ratios.max():.2f})",
        *(f"{np.median(size) / 1e9:.2f}" for size in memory),
    ]


def runs(config: Runs) -> int:
    named = rivals.named(config.rival)
    if [*named] != ["nanogpt"]:
        raise UserError("runs needs --rival=nanogpt=PATH, a nanoGPT checkout")
    checkout = Path(named["nanogpt"][1]).parent
    results: dict[str, list[list[float]]] = {s: [] for s in config.sizes}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        # nanoGPT reads the working directory.
        (work / "configurator.py").symlink_to(checkout / "configurator.py")
        for dataset in {SIZES[s][5] for s in results}:
            out = work / "data" / dataset
            ended(ROOT, "-m", "data", dataset, out_dir=out)
            vocab_size = data.padded(data.read_meta(out)["vocab_size"])
            (out / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocab_size}))
        for n in range(config.rounds):
            for s, pairs in results.items():
                print(f"round {n + 1} of {config.rounds}, size {s}", file=sys.stderr)
                pairs.append(pair(s, config, checkout, work))
    dtype = pick_dtype(config.dtype, torch.device("cpu"), SIZES[config.sizes[0]][2])
    print(
        f"{cpu_name() or platform.machine()}, {count(torch.get_num_threads(), 'thread')}, "
        f"torch {torch.__version__}, {count(config.rounds, 'round')}, ours in {dtype_name(dtype)}, "
        f"{'compiled' if config.compile else 'not compiled'}\n"
    )
    print(markdown((HEAD, [row(s, pairs) for s, pairs in results.items()]), terminal=True))
    return 0


def curve(folder: Path) -> np.ndarray:
    """(3, n): step, seconds and validation loss of each evaluation."""
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
    best, first = np.unique(-np.minimum.accumulate(curve[2]), return_index=True)
    return [float(np.interp(-loss, best, x[first], right=np.nan)) for x in curve[:2]]


def main(argv: list[str]) -> int:
    if not all(argv) or not argv or argv[0].startswith("-"):
        raise UserError("expected the folders of runs: python -m bench.compare out/a out/b")
    groups: dict[str, list[np.ndarray]] = {}
    for folder in {Path(word).resolve(): Path(word) for word in argv}.values():
        settings = checkpoint.load(checkpoint.latest(folder)).settings["train"]
        key = json.dumps({k: v for k, v in settings.items() if k not in SAME})
        found, whole = curve(folder), settings["max_iters"]
        if found[0, -1] < whole:
            raise UserError(f"{folder} is evaluated up to step {found[0, -1]:,.0f} of {whole:,}")
        groups.setdefault(key, []).append(found)
    known = [json.loads(key) for key in groups]
    differ = [name for name in known[0] if any(s.get(name) != known[0][name] for s in known)]
    target, lines = 0.0, list[list[str]]()
    for settings, curves in zip(known, groups.values()):
        # Single seeds may end above the mean, and never reach it.
        end = min(c.shape[1] for c in curves)
        middle = np.mean([c[:, :end] for c in curves], axis=0)
        target = target if lines else float(middle[2, -1])
        what = " ".join(f"{name}={settings.get(name)}" for name in differ) or "all"
        losses = np.array([c[2, -1] for c in curves])
        loss = f"{losses.mean():.4f} ({losses.min():.4f} to {losses.max():.4f})"
        took = (f"{x:,.0f}" for x in np.mean([c[:2, -1] for c in curves], axis=0))
        there = (f"{x:,.0f}" if np.isfinite(x) else "never" for x in reached(middle, target))
        lines.append([what, str(len(curves)), *took, loss, *there])
    head = ["settings", "seeds", "steps", "s", "val loss: mean (lowest to highest)"]
    print(markdown(([*head, f"steps to {target:.4f}", "s"], lines), terminal=True))
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
