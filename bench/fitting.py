"""--batch_size=auto: the largest batch whose training step fits.

Memory and time of a step are linear in the sequences, so two sizes predict the largest that fits.
It is tried, predicts again, and so on, to within an eighth. The search runs uncompiled in one
process; a later compiled step that does not fit is retried with an eighth less. It also ends at a
step of `slowest` seconds (a CPU gains nothing from larger batches) and after SEARCH_S seconds.
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
SHARE = 0.95  # of the memory that a prediction fills
LEAP = 8  # largest factor between sizes: two near points predict badly far away
Step = tuple[float, float]  # seconds, bytes


def largest(
    step: Callable[[int], Step],
    slowest: float,
    memory: float,
    now: Callable[[], float] = time.monotonic,
) -> tuple[int, str, dict[int, str]]:
    """Search the largest batch whose `step` neither raises Failure nor takes `slowest` seconds.

    Returns:
        The batch; its limit ("memory", "time" or "search"); the result of each tried size.

    Raises:
        Failure: one sequence does not fit, the backend is unavailable, or the bench was stopped.
    """
    tried: dict[int, str] = {}
    good: list[tuple[int, Step]] = []
    began, bad, limit = now(), 2**30, "memory"
    size = 1
    while True:
        try:
            took = step(size)
        except Failure as e:
            if size == 1 or e.kind in ("unavailable", "stopped"):
                raise
            tried[size], bad, limit = str(e), size, "memory"
        else:
            tried[size] = f"{took[0]:.3g} s"
            if took[0] <= slowest:
                good.append((size, took))
            elif size == 1:
                return 1, "time", tried
            else:
                bad, limit = size, "time"
        best = good[-1][0]
        size, predicted = following(good, slowest, memory)
        if size < bad:
            limit = predicted
        else:
            size = (best + bad) // 2
        if size - best < max(1, best // 8):
            return best, limit, tried
        if now() - began > SEARCH_S:
            return best, "search", tried


def following(good: list[tuple[int, Step]], slowest: float, memory: float) -> tuple[int, str]:
    """Predict the next size and its limit from the two largest that fit."""
    if len(good) < 2:
        return 2, "memory"
    (a, first), (b, last) = good[-2:]
    reach = []
    for have, x, y in ((slowest, first[0], last[0]), (SHARE * memory, first[1], last[1])):
        each = (y - x) / (b - a)
        reach.append(b + (have - y) / each if each > 0 else float("inf"))
    return int(min(*reach, LEAP * b)), "time" if reach[0] < reach[1] else "memory"


def search(bench: Bench, name: str, baseline: str) -> Json:
    """Run largest() for a backend or baseline in a worker; return the entry of the record."""
    job = bench.job("train", name, 1, baseline, gradient_accumulation_steps=1, compile=False)
    slowest = bench.config.slowest_step
    worker: Worker | None = None

    def step(batch: int) -> Step:
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
        return answer["seconds"], answer["peak_bytes"]

    try:
        batch, limit, tried = largest(step, slowest, bench.machine["memory_limit"])
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
