"""Finished runs of train.py side by side.

    python -m bench.compare out/adamw-* out/muon-*

Runs whose settings differ in the seed alone are one line. The last columns say when the mean curve
of a line first had the final loss of the first line's, between two evaluations by interpolation.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from core import terminal
from core.settings import UserError, exit_on_user_error

if __name__ == "__main__":
    terminal.end_at_once()

import numpy as np

import checkpoint
from core import metrics

SAME = ("seed", "out_dir", "init_from")  # settings in which the runs of a line may differ
HEAD = "| settings | seeds | steps | s | val loss: mean (lowest to highest) | steps to {:.4f} | s |"


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


def table(folders: list[Path]) -> list[str]:
    """The lines of a Markdown table."""
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
    lines = [HEAD.format(target), "|---" * 7 + "|"]
    for settings, curves, mean in zip(known, groups.values(), means):
        what = " ".join(f"{name}={settings.get(name)}" for name in differ) or "all"
        losses = np.array([c[2, -1] for c in curves])
        steps, seconds = np.mean([c[:2, -1] for c in curves], axis=0)
        there = [f"{x:,.0f}" if np.isfinite(x) else "never" for x in reached(mean, target)]
        loss = f"{losses.mean():.4f} ({losses.min():.4f} to {losses.max():.4f})"
        cells = what, len(curves), f"{steps:,.0f}", f"{seconds:,.0f}", loss, *there
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return lines


def main(argv: list[str]) -> int:
    if not all(argv) or not argv or argv[0].startswith("-"):
        raise UserError("expected the folders of runs: python -m bench.compare out/a out/b")
    print(*table([Path(name) for name in argv]), sep="\n")
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
