"""Finished runs of train.py side by side.

    python -m bench.runs out/adamw-* out/muon-*

Runs whose settings differ in the seed alone are one line. The last columns say when a line first
had the final loss of the first line, between two evaluations by interpolation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import mean

import checkpoint
from core import metrics
from core.settings import UserError, exit_on_user_error

Curve = list[tuple[int, float, float]]  # step, seconds of training, validation loss


def curve(folder: Path) -> Curve:
    """The evaluations of a run. Its first steps, which are not timed, count as the next ones."""
    seconds, last, found = 0.0, 0, []
    rows = metrics.read(folder / "metrics.jsonl")
    first = next((row["ms"] for row in rows if "ms" in row), 0.0)
    for row in rows:
        seconds += (row["iter"] - last) * row.get("ms", first) / 1e3
        last = row["iter"]
        if "val_loss" in row:
            found.append((last, seconds, row["val_loss"]))
    if not found:
        raise UserError(f"{folder} has no evaluation")
    return found


def reached(curve: Curve, loss: float) -> tuple[float, float] | None:
    """Steps and seconds after which a curve first has this loss; None: it never has."""
    before = None
    for step, seconds, now in curve:
        if now <= loss:
            if before is None:
                return step, seconds
            part = (before[2] - loss) / (before[2] - now)
            return tuple(a + part * (b - a) for a, b in zip(before, (step, seconds)))  # type: ignore
        before = step, seconds, now
    return None


def table(folders: list[Path]) -> list[str]:
    """The lines of a Markdown table."""
    groups: dict[str, list[Curve]] = {}
    for folder in folders:
        settings = checkpoint.load(checkpoint.latest(folder)).settings["train"]
        settings = {k: v for k, v in settings.items() if k not in ("seed", "out_dir", "init_from")}
        groups.setdefault(json.dumps(settings), []).append(curve(folder))
    known = [json.loads(key) for key in groups]
    differ = [name for name in known[0] if len({json.dumps(s.get(name)) for s in known}) > 1]
    target = mean(c[-1][2] for c in next(iter(groups.values())))
    lines = [
        f"| settings | seeds | steps | s | validation loss: mean (lowest to highest) | steps to "
        f"{target:.4f} | s |",
        "|---|---|---|---|---|---|---|",
    ]
    for settings, curves in zip(known, groups.values()):
        what = " ".join(f"{name}={settings.get(name)}" for name in differ) or "all"
        ends = [c[-1] for c in curves]
        losses = [loss for _, _, loss in ends]
        when = [reached(c, target) for c in curves]
        steps, seconds = ("never", "")
        if all(when):
            steps, seconds = (f"{mean(w[i] for w in when if w):,.0f}" for i in (0, 1))
        loss = f"{mean(losses):.4f} ({min(losses):.4f} to {max(losses):.4f})"
        cost = f"{ends[0][0]:,} | {mean(s for _, s, _ in ends):,.0f}"
        lines.append(f"| {what} | {len(curves)} | {cost} | {loss} | {steps} | {seconds} |")
    return lines


def main(argv: list[str]) -> int:
    if not argv or argv[0].startswith("-"):
        raise UserError("expected the folders of runs: python -m bench.runs out/a out/b")
    print(*table([Path(name) for name in argv]), sep="\n")
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
