"""Measure attention backends side by side: speed, MFU, memory, error.

    python bench_mfu.py train --profile                    training steps, every backend
    python bench_mfu.py kernel --lengths=512,4096          attention alone over a grid
    python bench_mfu.py decode --backends=sdpa --rival=hf  generation
    python bench_mfu.py converge --steps=200               the same training with each backend
    python bench_mfu.py runs --rival=nanogpt=../nanoGPT    whole runs of both train.py
    python bench_mfu.py qualify                            all of these on a new machine
    python bench_mfu.py plan --gpu="NVIDIA H200"           a step on many GPUs: docs/PLAN.md
    python bench_mfu.py MODE --help                        every option of a mode

The model's options and config files are train.py's. See docs/MEASURE.md.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from contextlib import closing
from datetime import datetime, timezone
from functools import cache
from pathlib import Path

from core.settings import Loaded, UserError, end_at_once, exit_on_user_error

if __name__ == "__main__":
    end_at_once()

from bench import Json, candidates, hf, qualify, record, report, rounds, runs, tables
from bench.config import MODES, BenchConfig, load_config, names, vocabulary
from bench.machine import free_memory
from bench.plan import planned
from bench.process import Failure, Stop
from bench.rounds import Run
from core.runtime import StopSignal, pick_device

MINUTES_ON_CUDA = 10.0


def measure(mode: str, argv: list[str], loaded: Loaded[BenchConfig]) -> int:
    """Measure in one of the modes. Returns the exit code."""
    config, state = loaded.settings, record.git_state()
    if config.record is not None and not re.fullmatch(r"[\w.-]+", config.record):
        slug = repr(config.record)
        raise UserError(f"--record must be letters, digits, '-', '_' and '.', got {slug}")
    candidates.rivals(config.rival)
    device = pick_device(config.device)
    backends, left_out = ([], {}) if config.paths else names(config, device.type)
    vocab_size, source = vocabulary(config)
    part: Json = {"reference": {}, "rows": []}
    if config.hf:
        part["hf"] = {"name": config.hf, "config": hf.read(config.hf)}
        vocab_size, source = part["hf"]["config"]["vocab_size"], f"--hf={config.hf}"
    part["vocab_size"], limit = vocab_size, None
    if device.type == "cpu":
        limit = int(1e9 * config.memory_gb if config.memory_gb else 0.7 * free_memory(device))
    files = {o.rpartition(":")[0] for o in loaded.origins.values() if o != "command line"}
    print(f"settings: {', '.join(sorted(files)) or 'the defaults'}", file=sys.stderr)
    print(f"vocabulary: {vocab_size:,} ({source})", file=sys.stderr)
    about = {
        "format": record.FORMAT,
        "command": shlex.join(["python", "bench_mfu.py", mode, *argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **state,
    }

    @cache
    def folder() -> Path:  # made when there is a result
        return record.new_folder(config.records_dir, config.record or "qualify", part["machine"])

    def content_of(run: Run, why: str = "") -> Json:
        return record.complete({**about, **run.content(why)})

    def save(run: Run) -> None:
        if config.record is not None:
            record.write(folder(), content_of(run, "the run had not ended"), whole=False)

    whole = mode == "qualify"  # each stage has a deadline of its own
    minutes = config.minutes or (MINUTES_ON_CUDA if device.type == "cuda" else 0)
    stop = Stop(time.monotonic() + 60 * minutes if minutes and not whole else None)
    with closing(StopSignal("stopping; keeping the results so far")) as stop.signals:
        run = Run(mode, config, str(device), backends, left_out, part, stop, save=save)
        try:
            rounds.begin(run, limit)
            if whole:
                content = qualify.run(run, about, loaded.origins, folder)
            else:
                run.refuse(report.MODES[mode].specs(run))
                report.MODES[mode].measure(run)
                content = content_of(run)
        except Failure as e:
            if e.kind == "stopped":
                print(f"{e}; nothing was measured", file=sys.stderr)
                return stop.code or 1
            given = f" (--memory_gb={config.memory_gb:g})" if limit and config.memory_gb else ""
            raise UserError(f"nothing can be measured on {device}{given}: {e}") from None
        if recorded := whole or config.record is not None:
            record.write(folder(), content)
    show(content)
    if recorded:
        print(f"record: {folder()}")
    if config.json:
        print(json.dumps(content, allow_nan=False))
    if whole:
        return stop.code or int(qualify.failed(content))
    failed = mode == "converge" and any(r.get("verdict") == "FAIL" for r in content["rows"])
    return stop.code or int(failed or not any(r["status"] == "ok" for r in content["rows"]))


def show(content: Json) -> None:
    """Print the tables and the conclusions."""
    print(report.title(content))
    if "incomplete" in content:
        print(f"incomplete: {content['incomplete']}")
    for name, value in report.facts(content).items():
        if name not in ("command", "date", "commit", "device", "software"):
            print(f"{name}: {value}")
    if why := content.get("reference", {}).get("why"):
        print(f"no reference: {why}")
    if content["mode"] != "qualify":  # its tables are in the record
        for name, made in report.sections(content):
            print(f"\n{name}\n{tables.markdown(made)}")
    print("", *content["answers"], sep="\n")


def main(argv: list[str]) -> int:
    mode, rest = None, argv
    if argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):  # no config file
        mode, rest = argv[0], argv[1:]
        if mode not in MODES:
            raise UserError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    if mode is None and {"-h", "--help"} & {*rest}:
        print("python bench_mfu.py MODE, with MODE one of (MODE --help: its options)")
        print(*(f"  {name:<9} {what}" for name, what in MODES.items()), "", sep="\n")
    loaded = load_config(rest, mode)
    if mode in ("plan", "runs"):
        return (planned if mode == "plan" else runs).run(loaded.settings)
    return measure(mode or "train", rest, loaded)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
