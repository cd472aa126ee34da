"""--batch_size=auto: the largest batch whose training step fits.

The size is doubled until it does not fit, then bisected, each size in a process of its own; down to
an eighth of the size, since the edge itself moves a little from run to run. The search ends where a
step takes longer than `slowest` seconds: on a CPU a batch that fills the memory could take minutes
a step, and is no faster for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.process import Failure, Worker


def largest(seconds_of: Callable[[int], float], slowest: float) -> tuple[int, str, dict[int, str]]:
    """The largest batch for which `seconds_of`, the time of a step, does not raise Failure.

    Returns:
        the batch size, what limits it ("memory" or "time"), and what was said of each size tried.

    Raises:
        Failure: not even one sequence fits, or the backend may not run at all.
    """
    tried: dict[int, str] = {}

    def fits(batch: int) -> float | None:
        try:
            seconds = seconds_of(batch)
        except Failure as e:
            if batch == 1 or e.kind == "unavailable":
                raise
            tried[batch] = str(e)
            return None
        tried[batch] = f"{seconds:.3g} s"
        return seconds

    good, seconds = 1, fits(1)
    while seconds is not None and seconds <= slowest:
        seconds = fits(2 * good)
        if seconds is not None:
            good *= 2
    if seconds is not None:
        return good, "time", tried
    bad = 2 * good
    while bad - good > max(1, good // 8):
        middle = (good + bad) // 2
        if fits(middle) is None:
            bad = middle
        else:
            good = middle
    return good, "memory", tried


def search(
    job: Mapping[str, Any],
    slowest: float,
    timeout: float,
    watch: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """largest() with a new worker for each size, as a record has it."""

    def seconds_of(batch: int) -> float:
        watch(f"does batch {batch} fit? {job['name']}")
        worker = Worker(job, timeout)
        try:
            return worker.ask({"fits": batch})["seconds"]
        finally:
            worker.close()

    batch, limit, tried = largest(seconds_of, slowest)
    return {"batch_size": batch, "limit": limit, "tried": {str(k): v for k, v in tried.items()}}
