"""The worker processes, and the rounds: A B C A B C.

Each backend gets a process of its own, so that memory, compile caches and the allocator's state
stay apart. The processes are started one after another and warmed up; then each measures a round
in turn, while the others sleep, so that a clock that drifts, or a neighbour who comes and goes,
hits all alike. A sleeping worker still holds its weights: where all of them together would not fit
into memory, every round gets new processes instead ("fresh"), which takes longer.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

COMMAND = (sys.executable, str(Path(__file__).resolve().parent / "worker.py"))


class Failure(Exception):
    """What a worker could not do.

    kind: "unavailable" (refused, with reasons), "failed" (it raised), or "died": the process
    can answer nothing more.
    """

    def __init__(self, kind: str, why: Sequence[str]) -> None:
        super().__init__("; ".join(why))
        self.kind, self.why = kind, tuple(why)


def result(answer: dict[str, Any]) -> dict[str, Any]:
    """What a worker's answer holds; Failure where it is a refusal, or what went wrong."""
    if "unavailable" in answer:
        raise Failure("unavailable", answer["unavailable"])
    if "failed" in answer:
        raise Failure("died" if answer.get("broken") else "failed", [answer["failed"]])
    return answer["ok"]


class Worker:
    """One process, and the lines between it and us."""

    def __init__(
        self, job: Mapping[str, Any], timeout: float, command: Sequence[str] = COMMAND
    ) -> None:
        """Start the process and set up its job; `about` is what it answers."""
        self.timeout = timeout
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
        began = time.perf_counter()
        try:
            self.about = self.ask(job)
        except Failure:
            self.close()
            raise
        self.setup_s = time.perf_counter() - began

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and wait for its answer, `timeout` seconds at most."""
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self._died() from None
        line, deadline = b"", time.monotonic() + self.timeout
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.close()
                raise Failure("died", [f"it gave no answer within {self.timeout:g} s (--timeout)"])
            piece = os.read(self.process.stdout.fileno(), 2**16)
            if not piece:
                raise self._died()
            line += piece
        return result(json.loads(line))

    def _died(self) -> Failure:
        code = self.process.wait()
        self.errors.seek(0)
        last = next((s for s in reversed(self.errors.read().splitlines()) if s.strip()), "")
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as Linux does when memory runs out"
        words = f": {last.strip()}" if last else ""
        return Failure("died", [f"its process died ({how}){words}"])

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.errors):
            if pipe:
                pipe.close()


@dataclass
class Outcome:
    """What one backend gave at one point."""

    about: dict[str, Any] = field(default_factory=dict)  # the worker's answer to its job
    setup_s: float = 0.0  # from the start of the process to that answer
    warm: dict[str, Any] = field(default_factory=dict)  # its answer to the warm-up
    warm_up_s: float = 0.0
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failure: Failure | None = None

    @property
    def out_of_memory(self) -> bool:
        words = str(self.failure)  # worker.py's, or those of _died()
        return words.startswith("out of memory") or "memory runs out" in words


Key = tuple[str, str]  # name of the row, point


def measure(
    jobs: Mapping[str, Mapping[str, Any]],
    points: Mapping[str, Mapping[str, Any]],
    rounds: int,
    *,
    without: Container[Key] = (),
    fresh: bool | None = None,
    budget: int = 0,
    timeout: float = 600.0,
    watch: Callable[[str], None] = lambda what: None,
    command: Sequence[str] = COMMAND,
) -> tuple[dict[Key, Outcome], bool]:
    """Warm every job up at every point, then measure `rounds` rounds in turn.

    Args:
        jobs: name -> its worker's job; points: name -> what a round asks of a worker.
        without: pairs of name and point to leave out.
        fresh: new processes in every round; None: only where they do not all fit into `budget`.
        budget: bytes for all workers together; 0: not known, so they all stay.
        watch: told what is about to be done.

    Returns:
        the outcome of each pair, and whether rounds had fresh processes.
    """
    pairs = ((name, point) for name in jobs for point in points)
    outcomes = {pair: Outcome() for pair in pairs if pair not in without}
    workers: dict[str, Worker] = {}
    held: dict[str, int] = {}  # bytes of a sleeping worker
    peak = 0  # the most that any worker needed

    def drop(*names: str) -> None:
        for name in names:
            workers.pop(name).close()
            held.pop(name, None)

    def one(name: str, point: str, round_: int) -> None:
        """Warm up (round 0, or a new process), measure (all other rounds)."""
        nonlocal peak
        outcome = outcomes[name, point]
        if name not in workers:
            workers[name] = Worker(jobs[name], timeout, command)
        worker = workers[name]
        outcome.about, outcome.setup_s = worker.about, outcome.setup_s or worker.setup_s
        if round_ == 0 or fresh:
            began = time.perf_counter()
            warm = worker.ask({**points[point], "warm_up": True, "again": round_ > 0})
            if round_ == 0:
                outcome.warm, outcome.warm_up_s = warm, time.perf_counter() - began
            peak = max(peak, warm.get("peak_bytes", 0))
            held[name] = warm.get("held_bytes", 0)
        if round_ > 0:
            outcome.rounds.append(worker.ask(points[point]))

    try:
        for round_ in range(rounds + 1):
            for point in points:
                for name in jobs:
                    if (name, point) not in outcomes or outcomes[name, point].failure:
                        continue
                    doing = f"round {round_} of {rounds}" if round_ else "warming up"
                    watch(f"{doing}: {name} {point}".strip())
                    try:
                        one(name, point, round_)
                    except Failure as e:
                        begun = name in workers
                        for p in [point] if begun else points:  # not begun: it never will
                            if (name, p) in outcomes:
                                outcomes[name, p].failure = e
                        if e.kind == "died" and begun:
                            drop(name)
                    if fresh is None and budget and sum(held.values()) + peak > budget:
                        fresh = True
                    if fresh:
                        drop(*workers)
    finally:
        drop(*workers)
    return outcomes, bool(fresh)
