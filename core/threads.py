"""How idle threads of matrix products wait; imported before torch, which reads it once."""

from __future__ import annotations

import os
import sys
import time

BUSY = 0.5  # share of the cores that other programs use, from which threads should not spin
LOOK_S = 0.1


def cores_in_use() -> float:
    """Return the share of the cores that this process may use that was in use in the next tenth of
    a second; 0: unknown."""

    def times() -> list[int]:
        ours = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as f:
            cores = [words for words in map(str.split, f) if words[0] in ours]
        return [sum(map(int, column)) for column in zip(*(words[1:9] for words in cores))]

    try:
        before = times()
        time.sleep(LOOK_S)
        passed = [b - a for a, b in zip(before, times(), strict=True)]
        idle = passed[3] + passed[4]  # and waiting for a disk
        return 1 - idle / sum(passed)
    except (OSError, AttributeError, ValueError, LookupError, ZeroDivisionError):  # not Linux
        return 0.0


def wait_passively() -> None:
    """On a machine that others use, let idle OpenMP threads sleep instead of spin, and say so.

    A spinning thread keeps its core from the program that the other thread waits for: steps took 5
    to 20 times as long (docs/LOG.md). A setting of the user's stands.
    """
    one = os.environ.get("OMP_NUM_THREADS") == "1"  # which never waits for another
    if one or {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        return
    if (used := cores_in_use()) >= BUSY:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        if os.environ.get("RANK", "0") == "0":
            why = f"other programs use {used:.0%} of the cores"
            how = "OMP_WAIT_POLICY=passive; =active for a quiet machine"
            print(f"threads: {why}, so idle threads sleep ({how})", file=sys.stderr)
