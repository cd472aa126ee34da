"""What a run says, and leaves behind: metrics.jsonl, loss.png and, when asked, Weights & Biases.

A run never dies because a logger did: a failure of wandb or of the picture is one warning.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path
from statistics import median
from typing import Any

from core import peaks
from core.flops import Speed
from core.runtime import dtype_name, peak_memory
from core.settings import UserError

log = logging.getLogger("nanoattn")


class Metrics:
    """Writes one JSON object a line to out_dir/metrics.jsonl."""

    def __init__(self, out_dir: Path, step: int, config: Any) -> None:
        """Begin after `step` steps: lines of later steps, of a run that was killed, are dropped.

        Args:
            config: the run's settings, a dataclass with wandb_log, wandb_project, wandb_run_name.
        """
        try:
            out_dir.mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise UserError(f"--out_dir={out_dir} cannot be written ({e.strerror})") from e
        self.path, self.step = out_dir / "metrics.jsonl", step
        self._begin_with([r for r in read(self.path) if r["iter"] <= step] if step else [])
        self.failed = False
        self.wandb = _start_wandb(config, out_dir) if config.wandb_log else None

    def _begin_with(self, rows: list[dict[str, Any]]) -> None:
        """Let the file hold these rows, at once; what is logged comes after them."""
        partial = self.path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        partial.replace(self.path)
        self.file = self.path.open("a", encoding="utf-8")

    def reckon_anew(self, speed: Speed) -> int:
        """Give this run's rows their MFU against the peak of `speed`; an earlier run's stay.

        Returns:
            how many there are.
        """
        old = self.file
        try:
            old.flush()  # else what could not be written yet would be lost
            rows = read(self.path)
            timed = [row for row in rows if row["iter"] > self.step and "tokens_per_s" in row]
            for row in timed:
                row.pop("mfu_why", None)
                row |= replace(speed, tokens_per_s=row["tokens_per_s"]).row()
            self._begin_with(rows)
            old.close()
            return len(timed)
        except OSError as e:
            log.warning("%s keeps the mfu of earlier steps (%s)", self.path, e)
            return 0

    def log(self, **row: Any) -> None:
        try:
            self.file.write(json.dumps(row) + "\n")
            self.file.flush()
        except OSError as e:  # the disk is full, say; what is buffered is written when it can be
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


NEAR = 0.9  # of a measured peak: who reaches that much may know a better peak


def believable(run: Any, speed: Speed) -> Speed:
    """`speed` against the best peak that is known; measured again where the run comes near it.

    For a logged step, after its time was taken; all processes call it, and wait while the first
    one measures. A better peak is the run's from then on, and its rows are reckoned anew. After a
    measurement no other until four times the step, or the last: eight in 600,000 steps.

    Args:
        run: train.py's, with peak_from, the step before which nothing is measured.
    """
    everyone, done = run.distributed, run.step == run.config.max_iters
    near = speed.peak.measured and speed.mfu >= NEAR and (done or run.step >= run.peak_from)
    if not everyone.sum([float(near and everyone.main)])[0]:
        return speed
    run.peak_from, before, best = 4 * run.step, run.peak, speed.peak
    if everyone.main:
        try:
            found = peaks.best_peak(everyone.device, dtype_name(run.setup.dtype))
            best = max(best, found, key=attrgetter("tflops"))
        except RuntimeError as e:  # out of memory: the peak that is known stays
            log.warning("the peak could not be measured again (%s)", str(e).partition("\n")[0])
    run.peak = everyone.gather(best)[0]
    speed = replace(speed, peak=run.peak)
    said = f"peak: measured again, for the run came near it: {run.peak}"
    if run.peak.tflops <= before.tflops:
        said += ", as before"
    elif run.metrics and (n := run.metrics.reckon_anew(speed)):
        said += f"; the mfu of {n} earlier lines is less, and metrics.jsonl says so now"
        said += ", wandb does not" * (run.metrics.wandb is not None)
    everyone.say(said)
    return speed


def speed_of(run: Any, tokens_per_s: float) -> Speed:
    model, T, devices = run.model.config, run.config.block_size, run.distributed.world_size
    return Speed(model, T, tokens_per_s, run.peak, devices)


def say_first(run: Any) -> None:
    """Print what train.py's run is, before its first step."""
    config, model, tokens = run.config, run.model, run.global_batch * run.config.block_size
    counts = model.get_num_params(non_embedding=False), model.get_num_params()
    least = speed_of(run, 1.0).mfu * tokens * (config.max_iters - run.step)  # at the peak, s
    say = run.distributed.say
    say("model: {:,} parameters, {:,} without positions".format(*counts))
    say(f"peak: {run.peak}")
    steps = f"{tokens:,} tokens a step, {config.max_iters:,} steps"
    long = run.distributed.device.type == "cpu" and least > 86400
    hint = "; config/train_shakespeare_cpu.py takes minutes" * long
    say(f"{steps}: at the peak rate {duration(least)}, in practice more{hint}")


def say_last(run: Any, val_loss: float | None) -> None:
    """Print what came of it, after its last step."""
    if run.rates:
        run.distributed.say(f"{speed_of(run, median(run.rates))}; peak: {run.peak}")
    if "baselines" in run.meta:
        known = ", ".join(f"{name} model {x:.2f}" for name, x in run.meta["baselines"].items())
        run.distributed.say(f"val loss {val_loss:.4f} nats a token; for comparison: {known}")


def log_step(run: Any, loss: float, lr: float, seconds: float, warm: bool) -> None:
    """Print and log a step; all processes call it.

    Args:
        seconds: that a step takes, on average since the last line.
        warm: whether it was timed after what comes once, as compilation.
    """
    memory, speed = peak_memory(run.distributed.device), None
    row = {"iter": run.step, "loss": loss, "lr": lr, "mem_bytes": memory}
    if warm:
        tokens = run.global_batch * run.config.block_size
        speed = believable(run, speed_of(run, tokens / seconds))
        run.rates.append(speed.tokens_per_s)
        row |= {"ms": seconds * 1e3, **speed.row()}
    done = f"iter {run.step}: loss {loss:.4f}, lr {lr:.1e}, {seconds * 1e3:,.1f} ms"
    left = duration(seconds * (run.config.max_iters - run.step))
    left = f", {left} left" if run.step < run.config.max_iters else ""
    run.distributed.say(f"{done}, {speed or 'warming up'}, mem {memory / 1e9:.1f} GB{left}")
    if run.metrics:
        run.metrics.log(**row)


def not_finite(run: Any, loss: float, val_loss: float | None, lr: float) -> str:
    """The message of a run that stops because its loss is not finite."""
    value = f"loss {loss}" if val_loss is None else f"loss {loss}, val loss {val_loss}"
    return (
        f"error: a loss or gradient became not finite at step {run.step} or shortly before "
        f"({value}, lr {lr:.2e}, attention backend {run.chosen.backend.name}). It reached no "
        "checkpoint. Next: --attention_backend=manual, to see whether the kernel is to blame; "
        "--init_from=resume with a lower --learning_rate, to go on."
    )


def duration(seconds: float) -> str:
    """As people say it: '40 s', '12 min', '3.5 h', '9.1 days', '2.5 years'."""
    for unit, size, most in (("s", 1, 90), ("min", 60, 90), ("h", 3600, 48), ("days", 86400, 730)):
        if seconds < size * most:
            digits = 0 if unit in ("s", "min") else 1
            return f"{seconds / size:.{digits}f} {unit}"
    return f"{seconds / (86400 * 365.25):,.1f} years"


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a metrics.jsonl; a last line that a kill cut short is left out."""
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


def _start_wandb(config: Any, out_dir: Path) -> Any:
    try:
        import wandb

        names = {"project": config.wandb_project, "name": config.wandb_run_name}
        soon = wandb.Settings(init_timeout=20)
        return wandb.init(**names, config=asdict(config), dir=out_dir, settings=soon)
    except Exception as e:  # not installed, not logged in, not reachable: the run goes on without
        why = f"{type(e).__name__}: {e}"
        mend = "WANDB_MODE=offline keeps a copy for wandb sync"
        log.warning("wandb is off (%s); metrics.jsonl has it all, and %s", why, mend)
        return None
