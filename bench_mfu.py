"""Measure attention backends side by side: speed, MFU, memory, error.

    python bench_mfu.py train --profile                    training steps, every backend
    python bench_mfu.py kernel --lengths=512,4096          attention alone over a grid
    python bench_mfu.py decode --backends=sdpa --rival=hf  generation
    python bench_mfu.py converge --steps=200               the same training with each backend
    python bench_mfu.py qualify                            all of these on a new machine
    python bench_mfu.py plan --gpu="NVIDIA H200"           a step on many GPUs: docs/PLAN.md
    python bench_mfu.py --help                             every option

The model's options and config files are train.py's. See docs/MEASURE.md.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from bench import Json, candidates, hf, modes, qualify, records, rows, tables
from bench.bench import Bench
from bench.config import ALIASES, BenchConfig, load_config, names, vocabulary
from bench.machine import free_memory
from bench.plan import planned
from bench.process import Failure, Outcome, Stop
from core.runtime import StopSignal, pick_device
from core.settings import UserError, exit_on_user_error

MODES = (*modes.MODES, "qualify", "plan")


def run(mode: str, argv: list[str]) -> int:
    """Measure in one of the modes. Returns the exit code."""
    state = records.git_state()
    loaded = load_config(argv, mode)
    config = loaded.settings
    check(mode, config)
    if mode == "plan":
        return planned.run(config)
    device = pick_device(config.train.device)
    backends, left_out = ([], {}) if config.paths else names(config, device.type)
    vocab_size, source = vocabulary(config)
    theirs: Json = {}
    if config.hf:
        theirs = {"name": config.hf, "config": hf.read(config.hf)}
        vocab_size, source = theirs["config"]["vocab_size"], f"--hf={config.hf}"
    limit = None
    if device.type == "cpu":
        limit = int(1e9 * config.memory_gb if config.memory_gb else 0.7 * free_memory(device))
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
            content = bench.content(table + others, "the run had not ended")
            records.write(folder, {**told, **content}, whole=False)

    whole = mode == "qualify"  # each stage has a deadline of its own
    stop = Stop(time.monotonic() + 60 * config.minutes if config.minutes and not whole else None)
    shown = Progress()
    with signals() as stop.signals:
        how: Json = {"hf": theirs, "stop": stop, "tell": shown.tell, "keep": keep}
        bench = Bench(mode, config, str(device), vocab_size, backends, limit, shown.watch, **how)
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


OF_MODES = {  # options of some modes only
    ("profile",): ("train",),
    ("hf",): ("train", "decode"),
    ("paths", "seeds"): ("converge",),
    ("weights", "constraint"): ("decode",),
    ("stages",): ("qualify",),
    ("gpu", "gpus", "gpus_per_node"): ("plan",),
    ("context_parallels", "nvlink_gbs", "network_gbs"): ("plan",),
    ("rival",): ("train", "decode", "qualify"),
}


def check(mode: str, config: BenchConfig) -> None:
    """Raises UserError for options that this mode does not have."""
    if config.record is not None and not re.fullmatch(r"[\w.-]+", config.record):
        slug = repr(config.record)
        raise UserError(f"--record must be letters, digits, '-', '_' and '.', got {slug}")
    default = BenchConfig()
    for names_, where in OF_MODES.items():
        fields = [ALIASES.get(name, name) for name in names_]
        if mode not in where and any(getattr(config, f) != getattr(default, f) for f in fields):
            options = ", ".join(f"--{name}" for name in names_)
            raise UserError(f"{options}: for {', '.join(where)} only, got mode {mode}")
    if config.paths and config.backends != ("all",):
        raise UserError("give either --paths or --backends")
    if config.hf and (config.baseline or config.profile):
        raise UserError("--hf does not support --rival and --profile")
    candidates.parse(config.baseline)


@contextmanager
def signals() -> Iterator[StopSignal]:
    """Within this context Ctrl-C and SIGTERM set the StopSignal."""
    stop = StopSignal("stopping; keeping the results so far")
    try:
        yield stop
    finally:
        stop.release()


class Progress:
    """Plain lines on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", file=sys.stderr, flush=True)

    def watch(self, what: str) -> None:
        """Print at most every two seconds."""
        if time.monotonic() - self.last >= 2:
            self.last = time.monotonic()
            self.tell(what)


def show(content: Json) -> None:
    """Print the tables and the conclusions."""
    print(records.title(content))
    if "incomplete" in content:
        print(f"incomplete: {content['incomplete']}")
    for name, value in records.facts(content):
        if name in ("model", "peak", "MFLOP a token", "bandwidth", "rounds"):
            print(f"{name}: {value}")
    if why := content.get("reference", {}).get("why"):
        print(f"no reference: {why}")
    if content["mode"] != "qualify":  # its tables are in the record
        for name, made in records.sections(content):
            print(f"\n{name}\n{tables.markdown(made)}")
    print("", *content["answers"], sep="\n")


def main(argv: list[str]) -> int:
    mode, rest = "train", argv
    if argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):  # no config file
        mode, rest = argv[0], argv[1:]
        if mode not in MODES:
            raise UserError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    try:
        return run(mode, rest)
    except KeyboardInterrupt:
        print("\nstopped before anything was measured", file=sys.stderr)
        return 130


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
