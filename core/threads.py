"""Idle threads on a busy machine; imported before torch, which reads it once."""

from __future__ import annotations

import os
import sys
import time

BUSY = 0.5  # share of cores in other use


def cores_in_use() -> float:
    """Share of cores in use in the next 0.1 s; 0: unknown."""

    def times() -> list[int]:
        ours = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as f:
            cores = [words for words in map(str.split, f) if words[0] in ours]
        return [sum(map(int, column)) for column in zip(*(words[1:9] for words in cores))]

    try:
        before = times()
        time.sleep(0.1)
        passed = [b - a for a, b in zip(before, times(), strict=True)]
        return 1 - (passed[3] + passed[4]) / sum(passed)  # idle, waiting for a disk
    except (OSError, AttributeError, ValueError, LookupError, ZeroDivisionError):  # not Linux
        return 0.0


def wait_passively() -> None:
    """Let OpenMP's idle threads sleep (docs/TRAIN.md)."""
    if os.environ.get("OMP_NUM_THREADS") == "1" or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {
        *os.environ
    }:
        return
    if (used := cores_in_use()) >= BUSY:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        if os.environ.get("RANK", "0") == "0":
            why = f"other programs use {used:.0%} of the cores"
            print(f"threads: {why}: OMP_WAIT_POLICY=passive is now set", file=sys.stderr)
