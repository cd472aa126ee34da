"""Measure every attention backend side by side: speed, MFU, memory, error.

    python bench_mfu.py                                    training steps, every backend
    python bench_mfu.py train --profile                    and where their time goes
    python bench_mfu.py train --roofline="NVIDIA H200"     where it would go at best, on any GPU
    python bench_mfu.py train --hf=FOLDER                  any causal model of transformers
    python bench_mfu.py kernel --lengths=512,4096          attention alone over a grid
    python bench_mfu.py decode --backends=sdpa --rival=hf  generation
    python bench_mfu.py converge --steps=200               the same training with each backend
    python bench_mfu.py converge --paths=bfloat16          a precision beside plain float32
    python bench_mfu.py qualify                            all of that here, in nine minutes
    python bench_mfu.py compare RECORD_A RECORD_B          two records side by side
    python bench_mfu.py plan --gpu="NVIDIA H200"           a step on many GPUs: docs/PLAN.md
    python bench_mfu.py --help                             every knob

The model's knobs and config files are train.py's. Each backend runs in a process of its own, the
rounds in turn (bench/process.py), and strictly: a row is the kernel that was named, or says why it
is not. With --record=SLUG all of it is kept in bench/records/, as each round ends. Ctrl-C, SIGTERM
and --minutes end a run and leave what was measured so far.

Before you trust a faster kernel: `converge` with it, and look at its verdict against manual.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from bench import candidates, hf, modes, plan, planned, qualify, records, rows, tables
from bench.bench import Bench
from bench.compare import compare as compare_records
from bench.config import ALIASES, BenchConfig, load_config, names, vocabulary
from bench.machine import free_memory
from bench.process import Failure, Outcome, Stop
from core.runtime import StopSignal, pick_device
from core.settings import UserError, exit_on_user_error

MODES = (*modes.MODES, "qualify", "compare", "plan")


def run(mode: str, argv: list[str]) -> int:
    """Measure in one of the modes; the exit code."""
    state = records.git_state()  # of the source that is about to run
    loaded = load_config(argv, mode)
    config = loaded.settings
    check(mode, config)
    if mode == "plan":
        return planned.run(config)
    if config.roofline:
        return modes.only_roofline(config, config.roofline)
    device = pick_device(config.train.device)
    backends, left_out = ([], {}) if config.paths else names(config, device.type)
    vocab_size, source = vocabulary(config)
    theirs: dict[str, Any] = {}
    if config.hf:
        theirs = {"name": config.hf, "config": hf.read(config.hf)}
        vocab_size, source = theirs["config"]["vocab_size"], f"--hf={config.hf}"
    limit = None
    if device.type == "cpu":
        limit = int(config.memory_gb * 1e9 if config.memory_gb else 0.7 * free_memory(device))
    files = {o.rpartition(":")[0] for o in loaded.origins.values() if o != "command line"}
    print(f"settings: {', '.join(sorted(files)) or 'the defaults'}", file=sys.stderr)
    print(f"vocabulary: {vocab_size:,} ({source})", file=sys.stderr)
    told = {
        "format": records.FORMAT,
        "mode": mode,
        "command": shlex.join(["python", "bench_mfu.py", mode, *argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **state,
    }
    folder: Path | None = None
    others = [
        rows.begin(mode, name, {}, Outcome(failure=Failure("unavailable", [why])))
        for name, why in left_out.items()
    ]

    def keep(bench: Bench, table: list[rows.Row]) -> None:
        if folder:
            content = bench.content(table + others, "it had not ended when this was written")
            records.write(folder, {**told, **content}, whole=False)

    whole = mode == "qualify"  # it gives each stage a deadline of its own
    stop = Stop(time.monotonic() + 60 * config.minutes if config.minutes and not whole else None)
    with progress() as (watch, tell), signals() as stop.signals:
        how: dict[str, Any] = {"hf": theirs, "stop": stop, "tell": tell, "keep": keep}
        bench = Bench(mode, config, str(device), vocab_size, backends, limit, watch, **how)
        try:
            if whole:
                content, folder = qualify.run(bench, told, loaded.origins)
            else:
                probe = bench.begin()
                if theirs:
                    bench.count()
                asked = {"names": backends, "specs": modes.specs(bench)}
                bench.refused = probe.ask(asked)["refused"]
                probe.close()
        except Failure as e:
            if e.kind == "stopped":
                print(f"{e}; nothing was measured", file=sys.stderr)
                return stop.code or 1
            raise UserError(f"nothing can be measured on {device}: {e}") from None
        if not whole:
            if device.type == "cuda":
                tell(plan.told(bench, modes.points(bench)))
            if config.record is not None:
                folder = records.folder_of(config.records_dir, config.record, bench.machine)
            content = {**told, **bench.content(modes.MODES[mode](bench) + others)}
        if folder:
            records.write(folder, content)
    show(content)
    if folder:
        print(f"record: {folder}")
    if config.json:
        print(json.dumps(content, allow_nan=False))
    if whole:
        return stop.code or int(qualify.failed(content))
    failed = mode == "converge" and any(r.get("verdict") == "FAIL" for r in content["rows"])
    return stop.code or int(failed or not any(r["status"] == "ok" for r in content["rows"]))


# The knobs that only some of the modes have.
OF_MODES = {
    ("profile", "roofline"): ("train",),
    ("hf",): ("train", "decode"),
    ("paths", "seeds"): ("converge",),
    ("weights",): ("decode",),
    ("stages", "resume"): ("qualify",),
    ("gpu", "gpus", "gpus_per_node"): ("plan",),
    ("context_parallels", "nvlink_gbs", "network_gbs", "roofline_times"): ("plan",),
    ("rival",): ("train", "decode", "qualify"),
}


def check(mode: str, config: BenchConfig) -> None:
    """Raises UserError for knobs that this mode does not have, before anything starts."""
    if config.record is not None and not re.fullmatch(r"[\w.-]+", config.record):
        slug = repr(config.record)
        raise UserError(f"--record must be letters, digits, '-', '_' and '.', got {slug}")
    default = BenchConfig()
    for names_, where in OF_MODES.items():
        fields = [ALIASES.get(name, name) for name in names_]
        if mode not in where and any(getattr(config, f) != getattr(default, f) for f in fields):
            knobs = " and ".join(f"--{name}" for name in names_)
            of = f"{'are' if len(names_) > 1 else 'is'} for the mode{'s' * (len(where) > 1)}"
            raise UserError(f"{knobs} {of} {', '.join(where)}, not for {mode}")
    if config.paths and config.backends != ("all",):
        raise UserError("--paths compares training paths, --backends backends: give one of them")
    if config.hf and (config.baseline or config.profile or config.roofline):
        raise UserError("--rival, --profile and --roofline are for our own model, not for --hf")
    candidates.parse(config.baseline)


@contextmanager
def signals() -> Iterator[StopSignal]:
    """Inside, Ctrl-C and SIGTERM set the signal: see bench/process.py."""
    before = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield StopSignal("stopping; what was measured is kept")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def progress() -> Iterator[tuple[Callable[[str], None], Callable[[str], None]]]:
    """Two functions: one shows what is being measured, the other reports a result.

    On a terminal a line with a clock below the results; else plain lines with the seconds since the
    start, for each result and each round, and otherwise at most one every two seconds.
    """
    console = Console(stderr=True)
    if console.is_terminal:
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(bar_width=20), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as shown:
            task = shown.add_task("starting", total=None)
            show = partial(console.print, markup=False)  # an error may have brackets
            yield (lambda what: shown.update(task, description=what)), show
        return
    began = last = time.monotonic()
    doing = ""

    def tell(line: str) -> None:
        print(f"[{time.monotonic() - began:4.0f} s] {line}", file=sys.stderr, flush=True)

    def watch(what: str) -> None:
        nonlocal doing, last
        if (of := what.partition(":")[0]) != doing or time.monotonic() - last >= 2:
            doing, last = of, time.monotonic()
            tell(what)

    yield watch, tell


def show(content: dict[str, Any]) -> None:
    """Print the tables, and the answers that follow from them."""
    print(records.title(content))
    if "incomplete" in content:
        print(f"incomplete: {content['incomplete']}")
    for name, value in records.facts(content):
        if name in ("model", "peak", "MFLOP a token", "bandwidth", "rounds"):
            print(f"{name}: {value}")
    if why := content.get("reference", {}).get("why"):
        print(f"no reference: {why}")
    if content["mode"] != "qualify":  # its tables are many: on the record's page
        for name, made in records.sections(content):
            print(f"\n{name}\n{tables.markdown(made)}")
    print("", *content["answers"], sep="\n")


def compare(paths: list[str]) -> int:
    if len(paths) != 2:
        raise UserError("compare takes two records: python bench_mfu.py compare A B")
    notes, table = compare_records(*map(records.read, paths))
    print(f"A: {paths[0]}", f"B: {paths[1]}", *notes, sep="\n")
    if table[1]:
        print(tables.markdown(table))
    return 0


def main(argv: list[str]) -> int:
    mode, rest = "train", argv
    if argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):  # no config file
        mode, rest = argv[0], argv[1:]
        if mode not in MODES:
            raise UserError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    try:
        return compare(rest) if mode == "compare" else run(mode, rest)
    except KeyboardInterrupt:
        print("\nstopped before anything was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
