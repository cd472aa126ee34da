"""Train each variant of attention on the plays and on recall, and print its costs.

    python -m course.lab                                  all variants
    python -m course.lab --variants=mha,delta --seeds=1
    python -m course.lab --tasks=speed                    only tokens per second

Trainings in out_dir/results.json are not repeated.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
from pydantic import PositiveFloat, PositiveInt

from attention import check_name
from core.files import refuse_link, write_at_once
from core.settings import UserError, check_fields, did_you_mean, exit_on_user_error, read
from course import figures
from course.lab import training
from course.lab.training import LEVELS, PLAYS, Json, build, costs
from course.lab.variants import VARIANTS
from data.loader import find, read_meta

TaskName = Literal["recall", "plays", "speed"]
TASKS: tuple[TaskName, ...] = ("recall", "plays", "speed")
TITLES = {name: name.replace("_", " ") for name in VARIANTS} | {
    "mha": "MHA", "gqa": "GQA", "mqa": "MQA", "window": "window, sinks", "mla": "MLA",
    "delta": "gated delta rule",
}


@dataclass(frozen=True)
class LabConfig:
    """Variants of attention: cost, loss on the plays, recall."""

    variants: tuple[str, ...] = (*VARIANTS,)  # of course/lab/variants.py
    tasks: tuple[TaskName, ...] = TASKS  # recall: of key-value pairs; plays: loss; speed: tokens/s
    seeds: PositiveInt = 3  # trainings of each variant and task
    scale: PositiveFloat = 1.0  # of the number of steps: 0.1 is a quick try
    workers: PositiveInt = 2  # trainings at one time, a thread each
    attention_backend: str = "manual"  # the kernel of all variants that use one
    data_dir: str = "data"  # where shakespeare_char is
    out_dir: str = "out/lab"  # for results.json

    def __post_init__(self) -> None:
        check_fields(self)
        for name in {*self.variants} - VARIANTS.keys():
            near = did_you_mean(name, VARIANTS) or f"; known: {', '.join(VARIANTS)}"
            raise UserError(f"--variants: unknown {name!r}{near}")
        check_name(self.attention_backend)


def main(argv: Sequence[str]) -> int:
    config = read(LabConfig, argv).settings
    if "plays" in config.tasks:
        read_meta(find("shakespeare_char", config.data_dir))  # raises if missing
    path = Path(config.out_dir) / "results.json"
    how = {"scale": config.scale, "attention_backend": config.attention_backend}
    content = {"settings": how, "torch": torch.__version__, "speed": {}, "rows": []}
    if path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["settings"] != how:
            raise UserError(f"{path} is of {content['settings']}, not of {how}; change --out_dir")
    path.parent.mkdir(parents=True, exist_ok=True)
    refuse_link(path)  # before minutes of training
    try:
        run(config, content, path)
    finally:
        if content["rows"] or content["speed"]:
            print(f"\n{table(content)}\n\nin {path}")
    return 0


def run(config: LabConfig, content: Json, path: Path) -> None:
    """Train what is missing, then measure the speed alone."""
    began = time.perf_counter()
    done = {(row["variant"], row["task"], row["seed"]) for row in content["rows"]}
    jobs = [*dict.fromkeys(
        training.Job(name, task, seed, config.scale, config.data_dir, config.attention_backend)
        for seed in range(config.seeds) for name in config.variants for task in config.tasks
        if task != "speed" and (name, task, seed) not in done
    )]
    # A fork would copy torch's threads.
    pool = multiprocessing.get_context("spawn").Pool(config.workers, training.start_worker)
    with pool:  # Ctrl-C ends the trainings
        for n, row in enumerate(pool.imap_unordered(training.train, jobs), 1):
            content["rows"].append(row)
            write_at_once(path, json.dumps(content, indent=1) + "\n")
            found = f"loss {row['loss']:.3f}" if "loss" in row else ", ".join(
                f"{pairs} pairs {part:.0%}" for pairs, part in row["recalled"].items())
            print(f"[{n} of {len(jobs)}, {time.perf_counter() - began:.0f} s] {row['variant']} "
                  f"{row['task']} seed {row['seed']}: {found}", flush=True)
    if "speed" in config.tasks:
        print("tokens per second", flush=True)
        content["speed"] |= training.speeds(config.variants, config.attention_backend)
        write_at_once(path, json.dumps(content, indent=1) + "\n")


def spread(values: Iterable[float], digits: str) -> str:
    """Mean, smallest and largest."""
    found = sorted(values)
    if not found:
        return ""
    low, middle, high = (f"{x:{digits}}" for x in (found[0], mean(found), found[-1]))
    return middle if low == high else f"{middle} ({low} to {high})"


def table(content: Json) -> str:
    rows = []
    present = {row["variant"] for row in content["rows"]} | content["speed"].keys()
    for name in (n for n in VARIANTS if n in present):
        cost = costs(build(name, PLAYS))
        own = [row for row in content["rows"] if row["variant"] == name]
        recall = [row["recalled"] for row in own if "recalled" in row]
        kept = f"{cost['cached']:,.0f}" if name != "delta" else f"0 ({cost['state']:,.0f} in all)"
        rows.append({
            "variant": TITLES[name], "cache, bytes a token": kept,
            "MFLOP a token": f"{cost['flops'] / 1e6:.2f}", "parameters": f"{cost['parameters']:,}",
            "loss": spread((row["loss"] for row in own if "loss" in row), ".3f"),
            "tokens/s": f"{speed:,.0f}" if (speed := content["speed"].get(name)) else "",
            **{f"{pairs} pairs": spread((r[str(pairs)] for r in recall), ".0%")
               for pairs, _ in LEVELS},
        })
    return figures.table(rows)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
