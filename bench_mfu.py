"""Measure attention backends side by side: speed, MFU, memory, error (docs/MEASURE.md).

    python bench_mfu.py MODE [config/FILE.py] [--key=value ...]       --help lists the modes

The model's options and config files are train.py's.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from contextlib import closing, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from core import process
from core.settings import LINE, Loaded, UserError, exit_on_user_error

if __name__ == "__main__":
    process.end_at_once()

from bench import ROOT, Json, compare, plan, qualify, record, report, rounds
from bench.settings import MODES, load_config
from bench.workers import Failure, Stop
from core.runtime import StopSignal, pick_device


def measure(mode: str, argv: list[str], loaded: Loaded[Any]) -> int:
    config = loaded.settings
    command = shlex.join(["python", "bench_mfu.py", mode, *argv])
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    about = {"format": record.FORMAT, "command": command, "date": date, **record.git_state()}
    device = pick_device(config.device)
    folder: Path | None = None

    def save(content: Json) -> None:
        if folder:
            with suppress(UserError):  # the last one counts
                record.write(folder, record.complete(about | content), whole=False)

    stop = Stop(config.minutes or (10.0 if device.type == "cuda" else math.inf))
    with closing(StopSignal("stopping; keeping the results so far")) as stop.signals:
        try:
            bench = rounds.begin(mode, config, device, stop)
            if config.record is not None:
                # The default is the project's, also from another folder.
                root = ROOT if config.records_dir == type(config).records_dir else Path()
                folder = record.new_folder(root / config.records_dir, config.record, bench.machine)
            if mode == "qualify":
                content = qualify.run(bench, loaded.origins, stop, save)
            else:
                content = rounds.measure(bench, report.MODES[mode].plans(bench), stop, save)
            content, lost = record.complete(about | content), None
            if folder:
                try:
                    record.write(folder, content)
                except UserError as e:
                    lost = e
            print(report.terminal(content))
            if lost:
                raise lost
            if folder:
                print(f"record: {folder}")
        except Failure as e:
            if e.kind == "stopped":
                print(f"{e}; nothing was measured", file=sys.stderr)
                return stop.code or 1
            options = {name: vars(config).get(name) for name in ("device", "hf", "memory_gb")}
            given = " ".join(f"--{name}={value}" for name, value in options.items() if value)
            raise UserError(f"nothing can be measured with {given}: {e}") from None
        finally:
            if folder:
                with suppress(OSError):  # empty: nothing was measured
                    folder.rmdir()
    if config.json:
        print(json.dumps(content, allow_nan=False))
    return stop.code or int(report.failed(content))


def main(argv: list[str]) -> int:
    mode, rest = None, argv
    if argv and not argv[0].startswith("-") and not argv[0].endswith(".py"):
        mode, rest = argv[0], argv[1:]
        if mode not in MODES:
            raise UserError(f"unknown mode {mode!r}; the modes are {', '.join(MODES)}")
    if mode is None and {"-h", "--help"} & {*rest}:
        print("python bench_mfu.py MODE, with MODE one of (MODE --help: its options)")
        print(*(f"  {name:<9} {kind.__doc__}" for name, kind in MODES.items()), "", sep="\n")
    loaded = load_config(rest, mode)
    files = {o.rpartition(":")[0] for o in loaded.origins.values() if o != LINE}
    print(f"settings: {', '.join(sorted(files)) or 'the defaults'}", *loaded.notes, sep="\n",
          file=sys.stderr)  # fmt: skip
    if mode in ("plan", "runs"):
        return (plan.run if mode == "plan" else compare.runs)(loaded.settings)
    return measure(mode or "train", rest, loaded)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
