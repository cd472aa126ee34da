"""Progress: lines, metrics.jsonl, loss.png, Weights & Biases. A failing logger only warns."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from attention import Backend, Resolution
from attention.machine.system import synchronize
from core.files import open_output, printable, refuse_link, replacing, write_at_once
from core.flops import Row, Sizes, Speed, clock, disturbed, in_words, keys_seen, peak
from core.options import TrainConfig
from core.parallel import DistInfo
from core.runtime import peak_memory
from core.settings import UserError, first_line

log = logging.getLogger("nanoattn")
BUSY = "other programs use this machine's cores"


@contextmanager
def warned(failure: str) -> Iterator[None]:
    try:
        yield
    except (Exception, SystemExit) as e:
        log.warning("%s (%s: %s)", failure, type(e).__name__, e)


class Metrics:
    """Writes out_dir/metrics.jsonl."""

    def __init__(self, out_dir: Path, step: int, wandb: Row | None = None,
                 evaluated: bool = True) -> None:  # fmt: skip
        """Begin after `step`, without later lines; wandb: of wandb.init()."""
        self.path = out_dir / "metrics.jsonl"
        self.failed = False
        self.wandb: Any = None
        try:
            refuse_link(self.path)
            rows = [r for r in read(self.path) if r["iter"] <= step] if step else []
            rows = [r for r in rows if evaluated or r["iter"] < step or "val_loss" not in r]
            self._write("".join(json.dumps(r) + "\n" for r in rows))
        except OSError as e:
            raise UserError(f"{self.path} cannot be read and written ({e.strerror})") from e
        if wandb is None:
            return
        with warned("wandb is off"):
            from wandb import Settings, init

            known = out_dir / "wandb_id.txt"
            for path in (known, out_dir / "wandb"):
                refuse_link(path)
            if step and known.exists():
                wandb = {**wandb, "id": known.read_text(), "resume": "allow"}
            self.wandb = init(dir=out_dir, settings=Settings(init_timeout=20), **wandb)
            if identity := getattr(self.wandb, "id", None):
                write_at_once(known, identity)

    def _write(self, text: str) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_at_once(self.path, text)
        self.file = open_output(self.path, "a+")

    def log(self, **row: object) -> None:
        try:
            if not self.path.exists():
                log.warning("%s has vanished; it is written again", self.path)
                self.file.seek(0)
                self._write(self.file.read())
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as e:  # what is buffered is written later
            if not self.failed:
                log.warning("%s could not be written (%s)", self.path, e)
            self.failed = True
        if self.wandb is not None:
            run, self.wandb = self.wandb, None  # if it fails
            with warned("wandb stopped logging"):
                run.log(row, step=row["iter"])
                self.wandb = run

    def close(self) -> None:
        with warned("metrics.jsonl was not finished"):
            self.file.close()
        with warned("loss.png was not finished"):
            draw(self.path, self.path.with_name("loss.png"))
        with warned("the wandb run was not finished"):
            if self.wandb is not None:
                self.wandb.finish()


class Meter:
    metrics: Metrics | None = None

    def __init__(self, distributed: DistInfo, model: Sizes, config: TrainConfig, backend: Backend,
                 step: int) -> None:  # fmt: skip
        device = distributed.device
        self.distributed = distributed
        self.model = model
        self.config = config
        self.tokens = config.global_batch * config.block_size
        self.peak = peak(device, config.dtype, config.peak_tflops)
        self.speeds: list[Speed] = []
        self.printed: set[str] = set()
        self.clock = clock()
        self.counted: list[Tensor] = []  # keys_seen() since the last line
        self.keys: float | None = None  # their mean
        if backend.mods is not None:  # flex:FILE.py
            self.keys = backend.mods.mean_keys(config.block_size, model.n_head, device)
        at_peak = self.speed(1.0).mfu[0] * self.tokens * max(0, config.max_iters - step)  # s
        size = f"{self.tokens:,} tokens a step, {config.max_iters:,} steps"
        distributed.say(f"peak: {self.peak}\n{size}: at the peak rate {duration(at_peak)}")
        self.restart(step, timed=False)

    def speed(self, tokens_per_s: float, busy: bool = False) -> Speed:
        T, n = self.config.block_size, self.distributed.world_size
        return Speed(self.model, T, tokens_per_s, self.peak, n, self.keys, BUSY if busy else "")

    def count(self, *starts: Tensor) -> None:
        self.counted += [keys_seen(t, self.model.windows).expand(len(t)) for t in starts]

    def restart(self, step: int, timed: bool) -> None:
        """Begin the next line's interval; timed=False: of first steps."""
        self.step = step
        self.timed = timed
        self.counted.clear()
        synchronize(self.distributed.device)
        self.began = time.perf_counter()

    def overdue(self) -> bool:
        return time.perf_counter() - self.began > 30

    def log(self, step: int, loss: float, lr: float) -> None:
        """Collective, after the device has finished."""
        seconds = (time.perf_counter() - self.began) / max(1, step - self.step)
        if self.counted:
            local = torch.cat(self.counted)
            total, sequences = self.distributed.sum([float(local.sum()), float(len(local))])
            self.keys = total / sequences
        if not self.distributed.main:
            return
        memory = peak_memory(self.distributed.device)
        row: Row = {"iter": step, "loss": loss, "lr": lr, "mem_bytes": memory}
        busy = self.peak.measured and disturbed(self.clock)
        self.clock = clock()
        speed, left = "a first step, not timed", ""
        if self.timed and step > self.step:
            found = self.speed(self.tokens / seconds, busy)
            self.speeds.append(found)
            row |= {"ms": seconds * 1e3, **found.row()}
            speed = f"{seconds * 1e3:,.1f} ms, {found.tokens_per_s:,.0f} tok/s"
            if row["mfu"] is not None:
                speed += f", {in_words(row, self.peak.of)}"
            elif row["mfu_why"] not in self.printed:
                self.printed.add(row["mfu_why"])
                print(f"mfu is left out below: {row['mfu_why']}", flush=True)
            if step < self.config.max_iters:
                left = f", {duration(seconds * (self.config.max_iters - step))} left"
        memory_text = f"mem {memory / 1e9:.1f} GB{left}"
        print(f"iter {step}: loss {loss:.4f}, lr {lr:.1e}, {speed}, {memory_text}", flush=True)
        if self.metrics:
            self.metrics.log(**row)

    def not_finite(self, step: int, loss: float, lr: float, kernel: Resolution, good: str) -> None:
        name = "+".join([kernel.backend.name, *kernel.kernels])
        found = f"(loss {loss}, lr {lr:.2e}, kernel {name}; docs/TRAIN.md)"
        why = f"a loss or gradient is not finite at step {step} or before {found}"
        self.distributed.say(f"error: {why}; {good}", file=sys.stderr)

    def end(self, val_loss: float | None, baselines: dict[str, float]) -> None:
        if self.speeds:
            keys = [speed.keys for speed in self.speeds if speed.keys is not None]
            self.keys = fmean(keys) if keys else None
            quiet = [speed for speed in self.speeds if not speed.why_not]
            found = self.speed(median(speed.tokens_per_s for speed in quiet or self.speeds))
            busy = f"{found.tokens_per_s:,.0f} tok/s; no mfu: {BUSY}"
            self.distributed.say(f"{found}; peak: {self.peak}" if quiet else busy)
        if baselines and val_loss is not None:
            known = ", ".join(f"{name} model {x:.2f}" for name, x in baselines.items())
            self.distributed.say(f"val loss {val_loss:.4f} nats a token; for comparison: {known}")


def duration(seconds: float) -> str:
    """'40 s', '12 min', '3.5 h', '9.1 days'."""
    for unit, size, limit in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48), ("days", 86400, 730)):
        if seconds < size * limit:
            digits = 0 if unit in ("s", "min") else 1
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / (86400 * 365.25):,.1f} years"


def read(path: Path) -> list[Row]:
    """Rows up to an incomplete last line. Raises UserError."""
    rows: list[Row] = []
    for number, line in enumerate(path.open("rb") if path.exists() else (), 1):
        try:
            rows.append(json.loads(line))
            rows[-1]["iter"] + 0  # a number
        except (ValueError, TypeError, LookupError) as e:
            if not line.endswith(b"\n"):
                return rows[: number - 1]
            raise UserError(f"{path}, line {number} is not a row of a run ({first_line(e)})") from e
    return rows


def draw(path: Path, picture: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    rows = read(path)
    for key, label, color, marker in (("loss", "training, batch by batch", "#9bb1c0", ""),
                                      ("val_loss", "validation", "#c7553b", "o")):  # fmt: skip
        if points := [(r["iter"], r[key]) for r in rows if key in r]:
            axes.plot(*zip(*points), label=label, color=color, marker=marker, linewidth=1.2)
            axes.legend(frameon=False)
    if points:
        x, y = points[-1]
        axes.annotate(f"{y:.3f}", (x, y), (0, 9), "data", "offset points", color=color, ha="right")
    axes.locator_params(axis="x", integer=True)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    title = printable(path.resolve().parent.name).replace("$", r"\$")  # not a formula
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=title)
    with replacing(picture) as file:
        figure.savefig(file, dpi=120, format="png")
