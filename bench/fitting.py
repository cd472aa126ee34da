"""--batch_size=auto: the largest batch whose training step fits.

The size doubles until a step fails or takes `slowest` seconds (a CPU gains nothing from larger
batches), then the gap is halved to within an eighth. The search runs uncompiled in one process; a
later compiled step that does not fit is retried with an eighth less.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from bench import Json
from bench.process import Failure, Worker

if TYPE_CHECKING:
    from bench.bench import Bench

SEARCH_S = 60.0  # no size is tried later
SHARE = 0.95  # of the memory that may be used


def largest(
    step: Callable[[int], float], slowest: float, now: Callable[[], float] = time.monotonic
) -> tuple[int, str, dict[int, str]]:
    """Search the largest batch whose `step` neither raises Failure nor takes `slowest` seconds.

    Returns:
        The batch; its limit ("memory", "time" or "search"); the result of each tried size.

    Raises:
        Failure: one sequence does not fit, the backend is unavailable, or the bench was stopped.
    """
    tried: dict[int, str] = {}
    began, best, bad, size, limit = now(), 0, 2**30, 1, "memory"
    while size - best >= max(1, best // 8):
        if best and now() - began > SEARCH_S:
            return best, "search", tried
        try:
            seconds = step(size)
            tried[size] = f"{seconds:.3g} s"
        except Failure as e:
            if size == 1 or e.kind in ("unavailable", "stopped"):
                raise
            tried[size], bad, limit = str(e), size, "memory"
        else:
            if seconds <= slowest or size == 1:
                best = size
            if seconds > slowest:
                bad, limit = size, "time"
        size = min(2 * best, (best + bad) // 2)
    return best, limit, tried


def search(bench: Bench, name: str, baseline: str) -> Json:
    """Run largest() for a backend or baseline in a worker; return the entry of the record."""
    job = bench.job("train", name, 1, baseline, gradient_accumulation_steps=1, compile=False)
    slowest = bench.config.slowest_step
    worker: Worker | None = None

    def step(batch: int) -> float:
        nonlocal worker
        bench.watch(f"does a batch fit? {name}, {batch} sequences")
        try:
            worker = worker or Worker(bench.config.timeout, bench.stop).begin(job)
            answer = worker.ask({"fits": batch})
        except Failure as e:
            if worker and e.kind == "died":
                worker.close()
                worker = None
            raise
        if answer["peak_bytes"] > SHARE * bench.machine["memory_limit"]:
            raise Failure("failed", ["out of memory: no room is left for the rounds"])
        return float(answer["seconds"])

    try:
        batch, limit, tried = largest(step, slowest)
    finally:
        if worker:
            worker.close()
    limits = {
        "memory": "memory",
        "time": f"a step of {slowest:g} s (--slowest_step)",
        "search": f"{SEARCH_S:g} s of searching",
    }
    sizes = ", ".join(map(str, tried))
    bench.tell(f"{name}: batch {batch}, limited by {limits[limit]}; tried {sizes}, not compiled")
    return {"batch_size": batch, "limit": limit, "tried": {str(k): v for k, v in tried.items()}}
