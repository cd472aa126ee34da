"""Does the fast training step learn what the plain one learns? Loss curves over several seeds.

    python -m data shakespeare_char
    python -m bench.curves --steps=500 --seeds=3

The fast paths are train.py as its users run it, in a process of its own. The plain one is below,
the few lines that everybody would write: float32 throughout, softmax(QK^T)V, all of the logits at
once, AdamW and the clipping as PyTorch has them, nothing compiled or fused. Both begin with the
same weights and see the same batches, which the seed decides.

Two seeds differ by their weights and batches; how far apart they end is the noise that a choice of
seed makes anyway, and a path passes where the mean of its differences to plain (the same seed) is
smaller. The curve of differences, step by step, is in the picture: rounding makes any two paths
part in the end, but neither should stay above the other.
"""

from __future__ import annotations

import io
import json
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import Progress

import data
import train
from bench import records
from core.runtime import allow_tf32, describe, pick_device
from core.settings import Loaded, UserError, exit_on_user_error, read
from train import TrainConfig

ROOT = Path(__file__).resolve().parent.parent

# What train.py is told for each path, beside the config file.
PATHS: dict[str, list[str]] = {
    "float32": ["--dtype=float32"],
    "bfloat16": ["--dtype=bfloat16"],
    "bfloat16-residual": ["--dtype=bfloat16", "--residual_dtype=autocast"],
}


@dataclass(frozen=True)
class CurvesConfig:
    """Compare the loss curves of the fast training paths with the plain float32 one."""

    config: str = "config/train_shakespeare_cpu.py"  # a config file of train.py
    steps: int = 500  # of each run; at least 10
    seeds: int = 3  # runs of each path
    paths: tuple[str, ...] = tuple(PATHS)  # of float32, bfloat16, bfloat16-residual
    compile: bool | None = None  # train.py's, for the fast paths
    device: str = "auto"  # auto (cuda, else mps, else cpu), cpu, cuda, cuda:1, mps
    data_dir: str = "data"  # where the prepared datasets lie
    record: str | None = None  # write bench/records/DATE_DEVICE_RECORD
    records_dir: str = str(ROOT / "bench" / "records")  # the folder of the records

    def __post_init__(self) -> None:
        for name, least in (("steps", 10), ("seeds", 2)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if unknown := sorted(set(self.paths) - set(PATHS)):
            raise ValueError(f"paths must be some of {', '.join(PATHS)}, got {unknown[0]!r}")


@dataclass(frozen=True)
class Curve:
    """One run: the loss of every step, and on the validation split after the last one."""

    losses: list[float]
    val_loss: float

    @property
    def final(self) -> float:
        """The mean loss of the last tenth of the steps."""
        return statistics.fmean(self.losses[-(len(self.losses) // 10) :])


def schedule(config: CurvesConfig) -> list[str]:
    """What both sides are told: a learning rate schedule that fits the steps."""
    steps = config.steps
    return [f"--max_iters={steps}", f"--lr_decay_iters={steps}", f"--warmup_iters={steps // 10}",
            f"--eval_interval={steps}", f"--data_dir={config.data_dir}",
            f"--device={config.device}", "--sample_tokens=0", "--dropout=0"]  # fmt: skip


def fast(config: CurvesConfig, path: str, seed: int, folder: Path) -> Curve:
    """A run of train.py.

    Raises:
        UserError: it failed; with its last words.
    """
    command = [sys.executable, str(ROOT / "train.py"), config.config, *schedule(config),
               *PATHS[path], f"--seed={seed}", f"--compile={config.compile}", "--log_interval=1",
               f"--out_dir={folder}"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise UserError(f"train.py {' '.join(PATHS[path])} failed ({done.returncode}): {last}")
    with (folder / "metrics.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    losses = [row["loss"] for row in rows if "loss" in row]
    return Curve(losses, [row["val_loss"] for row in rows if "val_loss" in row][-1])


def plain(config: CurvesConfig, seed: int) -> Curve:
    """The same training, written down as plainly as it can be."""
    argv = [config.config, *schedule(config), f"--seed={seed}"]
    settings = replace(read(TrainConfig, argv).settings, attention_backend="manual")
    device = pick_device(config.device)
    folder, T = Path(config.data_dir) / settings.dataset, settings.block_size
    meta = data.read_meta(folder)
    allow_tf32(False)
    torch.manual_seed(seed)
    model = train.build_model(Loaded(settings, {}), meta).to(device)
    V = model.config.vocab_size
    optimizer = train.build_optimizer(model, settings, device)
    groups = [{"params": g["params"], "weight_decay": g["weight_decay"]}
              for g in optimizer.param_groups]  # fmt: skip
    optimizer = torch.optim.AdamW(groups, betas=(settings.beta1, settings.beta2), foreach=False)
    n = settings.batch_size * settings.gradient_accumulation_steps
    batches = data.Batches(data.load(folder, "train", T, V), T, n, seed, device)

    losses = []
    for step in range(settings.max_iters):
        for group in optimizer.param_groups:
            group["lr"] = train.learning_rate(step, settings)
        x, y = batches.get(step)
        logits = model(x)[0]
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        loss.backward()
        if settings.grad_clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))

    model.eval()
    val = data.load(folder, "val", T, V)
    with torch.no_grad():
        parts = [
            float(F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten()))
            for x, y in data.eval_batches(
                val, T, settings.eval_iters, settings.batch_size, 0, 1, device
            )
        ]
    return Curve(losses, statistics.fmean(parts))


@dataclass(frozen=True)
class Verdict:
    """How one path ends beside plain; losses in nats a token."""

    path: str
    differences: list[float]  # of the final losses, a seed each
    val_differences: list[float]
    noise: float  # the standard deviation of plain's final losses over the seeds
    val_noise: float

    @property
    def passes(self) -> bool:
        mean, val_mean = statistics.fmean(self.differences), statistics.fmean(self.val_differences)
        return abs(mean) < self.noise and abs(val_mean) < self.val_noise

    def row(self) -> str:
        def told(differences: list[float], noise: float) -> str:
            each = ", ".join(f"{d:+.4f}" for d in differences)
            return f"{statistics.fmean(differences):+.4f} ({each}) | {noise:.4f}"

        verdict = "within the noise" if self.passes else "**FAIL**"
        return (f"| {self.path} | {told(self.differences, self.noise)} | "
                f"{told(self.val_differences, self.val_noise)} | {verdict} |")  # fmt: skip


def judge(curves: dict[str, list[Curve]]) -> Iterator[Verdict]:
    """Each path against plain, seed by seed."""
    base = curves["plain"]
    noise = statistics.stdev(c.final for c in base)
    val_noise = statistics.stdev(c.val_loss for c in base)
    for path, runs in curves.items():
        if path != "plain":
            pairs = list(zip(runs, base, strict=True))
            final = [a.final - b.final for a, b in pairs]
            yield Verdict(path, final, [a.val_loss - b.val_loss for a, b in pairs],
                          noise, val_noise)  # fmt: skip


def table(curves: dict[str, list[Curve]], verdicts: Iterable[Verdict]) -> list[str]:
    base = curves["plain"]
    ends = ", ".join(f"{c.final:.4f}" for c in base)
    val = ", ".join(f"{c.val_loss:.4f}" for c in base)
    return [
        f"plain ends at {ends} (validation {val}), a seed each.",
        "",
        "| path | final loss - plain's | noise | val loss - plain's | noise | verdict |",
        "|---|---|---|---|---|---|",
        *(v.row() for v in verdicts),
    ]


def picture(curves: dict[str, list[Curve]]) -> bytes:
    """Above the curves, below their differences to plain, as PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=[3, 2])
    below.axhline(0, color="gray", linewidth=0.8)
    for n, (path, runs) in enumerate(curves.items()):
        for seed, run in enumerate(runs):
            label = path if seed == 0 else None
            above.plot(smooth(run.losses), color=f"C{n}", linewidth=0.9, label=label)
            if path != "plain":
                apart = [a - b for a, b in zip(run.losses, curves["plain"][seed].losses)]
                below.plot(smooth(apart), color=f"C{n}", linewidth=0.9, label=label)
    above.set_ylabel("training loss, nats a token")
    below.set_ylabel("loss - plain's, same seed")
    below.set_xlabel("step (mean of the 20 before)")
    above.legend()
    out = io.BytesIO()
    figure.savefig(out, dpi=120)
    return out.getvalue()


def smooth(values: list[float], over: int = 20) -> list[float]:
    return [statistics.fmean(values[max(0, i + 1 - over) : i + 1]) for i in range(len(values))]


def main(argv: list[str]) -> int:
    config = read(CurvesConfig, argv).settings
    if config.record is not None:
        records.check_slug(config.record)
    settings = read(TrainConfig, [config.config]).settings
    if settings.init_from != "scratch":
        raise UserError(f"{config.config} starts from {settings.init_from}, and scratch is meant")
    data.read_meta(Path(config.data_dir) / settings.dataset)  # or the command that makes it
    curves: dict[str, list[Curve]] = {name: [] for name in ("plain", *config.paths)}
    console = Console(stderr=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        Progress(console=console, transient=True) as progress,
    ):
        task = progress.add_task("", total=config.seeds * len(curves))
        for seed in range(config.seeds):
            for name, runs in curves.items():
                progress.update(task, description=f"seed {seed + 1} of {config.seeds}, {name}")
                where = Path(folder) / f"{name}-{seed}"
                run = plain(config, seed) if name == "plain" else fast(config, name, seed, where)
                runs.append(run)
                progress.advance(task)
    verdicts = list(judge(curves))
    device = pick_device(config.device)
    lines = [
        f"{config.config}, {config.steps} steps, {config.seeds} seeds, {describe(device)}, "
        f"torch {torch.__version__}; final: the mean of the last tenth of the steps.",
        "",
        *table(curves, verdicts),
    ]
    print("\n".join(lines))
    if config.record is not None:
        print(f"\nrecord: {write(config, argv, curves, lines, settings)}")
    return 0 if all(v.passes for v in verdicts) else 1


def write(config: CurvesConfig, argv: list[str], curves: dict[str, list[Curve]],
          lines: list[str], settings: TrainConfig) -> Path:  # fmt: skip
    """The record's folder: every loss of every run, the table, the picture."""
    device = pick_device(config.device)
    machine = {"kind": device.type, "name": describe(device)}
    slug = "cpu" if device.type == "cpu" else records.device_slug(machine)
    folder = Path(config.records_dir) / f"{date.today()}_{slug}_{config.record}"
    folder.mkdir(parents=True, exist_ok=True)
    command = " ".join(["python -m bench.curves", *argv])
    given = {f.name: getattr(config, f.name) for f in fields(config) if f.name != "records_dir"}
    content: dict[str, Any] = {
        "command": command,
        **records.git_state(),
        "device": machine["name"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "settings": given,
        "train": asdict(settings),
        "paths": {name: PATHS[name] for name in config.paths},
        "curves": {name: [asdict(run) for run in runs] for name, runs in curves.items()},
    }
    (folder / "record.json").write_text(json.dumps(content) + "\n", encoding="utf-8")
    (folder / "curves.png").write_bytes(picture(curves))
    commit = (content["commit"] or "none")[:10] + (" (with changes)" if content["dirty"] else "")
    about = [
        "# Loss curves: the fast training paths beside the plain one",
        *("", *lines, "", "![loss curves](curves.png)", ""),
        f"Commit {commit}: `{command}`. Every loss is in [record.json](record.json).",
    ]
    (folder / "README.md").write_text("\n".join(about) + "\n", encoding="utf-8")
    return folder


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
