"""Progress of a run: printed lines, metrics.jsonl, loss.png and Weights & Biases.

A failing logger never ends a run: a failure of wandb or of the picture is one warning.
"""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from attention.machine.system import write_at_once
from core.distributed import DistInfo
from core.flops import Sizes, Speed
from core.peaks import best_peak, peak
from core.runtime import peak_memory
from core.settings import UserError, first_line

log = logging.getLogger("nanoattn")


class LogConfig(Protocol):
    """The settings that a logger reads; all of them are sent to wandb."""

    @property
    def wandb_log(self) -> bool: ...
    @property
    def wandb_project(self) -> str: ...
    @property
    def wandb_run_name(self) -> str: ...


class Metrics:
    """Writes one JSON object a line to out_dir/metrics.jsonl."""

    def __init__(self, out_dir: Path, step: int, config: LogConfig) -> None:
        """Begin after `step` steps; lines of later steps, left by a killed run, are dropped."""
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--out_dir={out_dir} cannot be written ({e.strerror})") from e
        self.path, self.step = out_dir / "metrics.jsonl", step
        rows = [r for r in read(self.path) if r["iter"] <= step] if step else []
        write_at_once(self.path, "".join(json.dumps(r) + "\n" for r in rows))
        self.file = self.path.open("a", encoding="utf-8")
        self.failed = False
        self.wandb = _start_wandb(config, out_dir) if config.wandb_log else None

    def log(self, **row: Any) -> None:
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as e:  # a full disk, for example; what is buffered is written later
            if not self.failed:
                log.warning("%s could not be written (%s); the training goes on", self.path, e)
            self.failed = True
        if self.wandb is not None:
            try:
                self.wandb.log(row, step=row["iter"])
            except Exception as e:  # whatever it was, the training goes on
                name = type(e).__name__
                log.warning("wandb stopped logging (%s: %s); metrics.jsonl goes on", name, e)
                self.wandb = None

    def close(self) -> None:
        """Close the file, draw out_dir/loss.png, finish the wandb run."""
        finish = [self.file.close, lambda: draw(self.path, self.path.with_name("loss.png"))]
        if self.wandb is not None:
            finish.append(self.wandb.finish)
        for step, what in zip(finish, ("metrics.jsonl", "loss.png", "the wandb run")):
            try:
                step()
            except Exception as e:  # whatever it was, the training is done
                log.warning("%s was not finished (%s: %s)", what, type(e).__name__, e)


class Meter:
    """Prints and logs a run's loss, speed, memory and remaining time."""

    def __init__(
        self,
        distributed: DistInfo,
        model: Sizes,
        T: int,
        tokens: int,
        max_iters: int,
        dtype: str,
        peak_tflops: float | None = None,
    ) -> None:
        """Look the peak rate up, or measure it.

        Args:
            T: tokens of a sequence; tokens: of a step, over all processes.
            dtype: of the matrix products.
            peak_tflops: of one device, as the user gave it.
        """
        self.distributed, self.model, self.T, self.tokens = distributed, model, T, tokens
        self.max_iters, self.dtype = max_iters, dtype
        self.peak = peak(distributed.device, dtype, peak_tflops)
        self.checked = False  # the peak was measured a second time
        self.rates: list[float] = []  # tokens a second, of each logged interval
        self.metrics: Metrics | None = None  # the main process's

    def speed(self, tokens_per_s: float) -> Speed:
        return Speed(self.model, self.T, tokens_per_s, self.peak, self.distributed.world_size)

    def begin(self, step: int) -> None:
        """Print the peak rate and how long the remaining steps take at least."""
        say, steps = self.distributed.say, max(0, self.max_iters - step)
        at_peak = self.speed(1.0).mfu * self.tokens * steps  # s
        say(f"peak: {self.peak}")
        long = self.distributed.device.type == "cpu" and at_peak > 86400
        hint = "; config/train_shakespeare_cpu.py takes minutes" * long
        size = f"{self.tokens:,} tokens a step, {self.max_iters:,} steps"
        say(f"{size}: at the peak rate {duration(at_peak)}, in practice more{hint}")

    def log(self, step: int, loss: float, lr: float, seconds: float | None) -> None:
        """Print and log a step.

        Args:
            seconds: per step, the mean since the last line; None while warming up.
        """
        if not self.distributed.main:
            return
        memory = peak_memory(self.distributed.device)
        row = {"iter": step, "loss": loss, "lr": lr, "mem_bytes": memory}
        text = f"iter {step}: loss {loss:.4f}, lr {lr:.1e}"
        if seconds is None:
            text += ", warming up"
        else:
            speed = self._check_peak(self.speed(self.tokens / seconds))
            self.rates.append(speed.tokens_per_s)
            row |= {"ms": seconds * 1e3, **speed.row()}
            text += f", {seconds * 1e3:,.1f} ms, {speed}"
        text += f", mem {memory / 1e9:.1f} GB"
        if seconds is not None and step < self.max_iters:
            text += f", {duration(seconds * (self.max_iters - step))} left"
        print(text, flush=True)
        if self.metrics:
            self.metrics.log(**row)

    def _check_peak(self, speed: Speed) -> Speed:
        """Above a measured peak: the machine was busy when it was measured. Try once more."""
        if speed.mfu <= 1 or not self.peak.measured or self.checked:
            return speed
        self.checked = True
        try:
            again = best_peak(self.distributed.device, self.dtype)
        except RuntimeError as e:  # out of memory
            log.warning("the peak could not be measured again (%s)", first_line(e))
            return speed
        if again.tflops > self.peak.tflops:
            self.peak = again
        print(f"peak: measured again, because MFU exceeded 100 %: {self.peak}", flush=True)
        return replace(speed, peak=self.peak)

    def end(self, val_loss: float | None, baselines: dict[str, float]) -> None:
        """Print the median speed, and the validation loss next to simpler models'."""
        if self.rates:
            self.distributed.say(f"{self.speed(median(self.rates))}; peak: {self.peak}")
        if baselines:
            known = ", ".join(f"{name} model {x:.2f}" for name, x in baselines.items())
            say = f"val loss {val_loss:.4f} nats a token; for comparison: {known}"
            self.distributed.say(say)


def not_finite(
    step: int, loss: float, val_loss: float | None, lr: float, backend: str, resume: str
) -> str:
    """The message of a run that stops; `resume` is the command that resumes it."""
    value = f"loss {loss}" if val_loss is None else f"loss {loss}, val loss {val_loss}"
    return (
        f"error: a loss or gradient is not finite at step {step} or shortly before ({value}, "
        f"lr {lr:.2e}, attention backend {backend}). No checkpoint contains it. Try "
        "--attention_backend=manual, to see whether the kernel is the cause; or a lower "
        f"--learning_rate: {resume}"
    )


def duration(seconds: float) -> str:
    """For people: '40 s', '12 min', '3.5 h', '9.1 days', '2.5 years'."""
    for unit, size, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48), ("days", 86400, 730)):
        if seconds < size * most:
            digits = 0 if unit in ("s", "min") else 1
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / (86400 * 365.25):,.1f} years"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; an incomplete last line is dropped."""
    rows = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
    return rows


def draw(path: Path, picture: Path) -> None:
    """The curves of training and validation loss."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = read(path)
    train = [(r["iter"], r["loss"]) for r in rows if "loss" in r]
    val = [(r["iter"], r["val_loss"]) for r in rows if "val_loss" in r]
    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    if train:
        axes.plot(*zip(*train, strict=True), linewidth=0.8, color="#9db4c0",
                  label="training, batch by batch")  # fmt: skip
    if val:
        axes.plot(*zip(*val, strict=True), marker="o", markersize=4, color="#c8553d",
                  label="validation")  # fmt: skip
        axes.annotate(f"{val[-1][1]:.3f}", val[-1], xytext=(0, 9), textcoords="offset points",
                      ha="right", color="#c8553d")  # fmt: skip
    axes.set(xlabel="step", ylabel="loss (nats a token)", title=path.parent.name)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if train or val:
        axes.legend(frameon=False)
    figure.savefig(picture, dpi=120)
    plt.close(figure)


def _start_wandb(config: LogConfig, out_dir: Path) -> Any:
    try:
        import wandb

        names = {"project": config.wandb_project, "name": config.wandb_run_name}
        soon = wandb.Settings(init_timeout=20)
        return wandb.init(**names, config=vars(config), dir=out_dir, settings=soon)
    except Exception as e:  # not installed, not logged in, not reachable: the run goes on without
        why = f"{type(e).__name__}: {e}"
        log.warning("wandb is off (%s); metrics.jsonl has everything", why)
        return None
