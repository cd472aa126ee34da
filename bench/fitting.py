"""--batch_size=auto: the largest batch whose training step fits.

Memory and time of a step grow by the same amount with every sequence. So two small sizes foretell
the largest that fits, which is then tried; what it gives foretells better, and it ends within an
eighth. A size is never more than eight times what was tried before it: a line through two near
points is none further on. One process does it, not compiled, since each size would compile anew;
the rounds that follow compile once, and step back by an eighth where that does not hold.

It goes no further where a step takes `slowest` seconds: on a CPU a batch that fills the memory
could take minutes a step, and is no faster for it. And it ends after SEARCH_S seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from bench.process import Failure, Worker

if TYPE_CHECKING:
    from bench.bench import Bench

SEARCH_S = 60.0  # no size is begun later than that
SHARE = 0.95  # of the memory, that a prediction fills
LEAP = 8  # a size is at most so many times the largest that was tried
Step = tuple[float, float]  # seconds, bytes


def largest(
    step: Callable[[int], Step],
    slowest: float,
    memory: float,
    now: Callable[[], float] = time.monotonic,
) -> tuple[int, str, dict[int, str]]:
    """The largest batch for which `step` does not raise Failure, nor takes `slowest` seconds; what
    limits it ("memory", of so many bytes, "time" or "search": SEARCH_S); what each size tried gave.

    Raises:
        Failure: not even one sequence fits, the backend may not run at all, or the bench is to end.
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
        size, foretold = following(good, slowest, memory)
        if size < bad:
            limit = foretold
        else:
            size = (best + bad) // 2
        if size - best < max(1, best // 8):
            return best, limit, tried
        if now() - began > SEARCH_S:
            return best, "search", tried


def following(good: list[tuple[int, Step]], slowest: float, memory: float) -> tuple[int, str]:
    """The size to try next by the two largest that went through, and what limits it there."""
    if len(good) < 2:
        return 2, "memory"
    (a, first), (b, last) = good[-2:]
    reach = []
    for have, x, y in ((slowest, first[0], last[0]), (SHARE * memory, first[1], last[1])):
        each = (y - x) / (b - a)
        reach.append(b + (have - y) / each if each > 0 else float("inf"))
    return int(min(*reach, LEAP * b)), "time" if reach[0] < reach[1] else "memory"


def search(bench: Bench, name: str, baseline: str) -> dict[str, Any]:
    """largest() for a backend or baseline in a worker, a new one where it died; as a record has
    it."""
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
    by = {"memory": "memory", "time": f"a step of {slowest:g} s (--slowest_step)",
          "search": f"{SEARCH_S:g} s of searching"}[limit]  # fmt: skip
    sizes = ", ".join(map(str, tried))
    bench.tell(f"{name}: batch {batch}, limited by {by}; tried {sizes}, not compiled")
    return {"batch_size": batch, "limit": limit, "tried": {str(k): v for k, v in tried.items()}}
