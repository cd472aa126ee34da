"""The worker processes, and the rounds: A B C A B C.

Each backend gets a process of its own, so that memory, compile caches and the allocator's state
stay apart. The processes are started one after another and warmed up; then each measures a round
in turn, while the others sleep, so that a clock that drifts, or a neighbour who comes and goes,
hits all alike. A sleeping worker still holds its weights: where all of them together would not fit
into memory, every round gets new processes instead ("fresh"), which takes longer.

A bench ends at Ctrl-C or SIGTERM at once, and at its deadline after the round at hand; what was
measured so far is kept then. Whatever ends it, its processes end too (bench/guard.py).
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.runtime import StopSignal

HERE = Path(__file__).resolve().parent
GUARD = (sys.executable, "-IS", str(HERE / "guard.py"))
COMMAND = (sys.executable, str(HERE / "worker.py"))
WARM_UP = 0.65  # of the time until a deadline: who is not warm by then leaves it to the others
GRACE = 20.0  # seconds that a round which is begun may go on after the deadline
LOOK = 0.2  # seconds between two looks at the signals while a worker works


class Failure(Exception):
    """What a worker could not do: `kind` is "unavailable" (refused, with reasons), "failed" (it
    raised), "died" (the process can answer nothing more), "skipped" (it would take too long), or
    "stopped" (the bench is to end)."""

    def __init__(self, kind: str, why: Sequence[str]) -> None:
        super().__init__("; ".join(why))
        self.kind, self.why = kind, tuple(why)


@dataclass
class Stop:
    """When the bench is to end, and why it did."""

    deadline: float | None = None  # time.monotonic(), after which nothing more begins
    signals: StopSignal | None = None
    why: str = ""  # once it was stopped

    def check(self, late: float = 0.0) -> None:
        """Raises: Failure, "stopped", at a signal, and `late` seconds after the deadline."""
        if self.signals and (number := self.signals.signal):
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.why = f"it was stopped by {name}"
        elif self.deadline is not None and time.monotonic() > self.deadline + late:
            self.why = self.why or "its time was over"
        else:
            return
        raise Failure("stopped", [self.why])

    @property
    def code(self) -> int:
        """The exit code of who was stopped by a signal, as shells have it; else 0."""
        number = self.signals.signal if self.signals and self.why else None
        return 128 + number if number else 0


def start(command: Sequence[str], **pipes: Any) -> subprocess.Popen[bytes]:
    """Start a command that ends when this process does, and all that it starts with it."""
    pipes |= {"stdin": subprocess.PIPE, "start_new_session": True}  # Ctrl-C is ours to handle
    return subprocess.Popen([*GUARD, *command], **pipes)


def end(process: subprocess.Popen[bytes]) -> None:
    """End what start() started, and all that it started."""
    assert process.stdin
    if not process.stdin.closed:  # while it is open its guard lives, and the group is still its own
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            process.stdin.close()
    process.wait()


def result(answer: dict[str, Any]) -> dict[str, Any]:
    """What a worker's answer holds; Failure where it is a refusal, or what went wrong."""
    if "unavailable" in answer:
        raise Failure("unavailable", answer["unavailable"])
    if "failed" in answer:
        raise Failure("died" if answer.get("broken") else "failed", [answer["failed"]])
    return answer["ok"]


class Worker:
    """One process, and the lines between it and us; it imports until it is told its job."""

    about: dict[str, Any]  # its answer to the job
    setup_s: float

    def __init__(
        self, timeout: float, stop: Stop | None = None, command: Sequence[str] = COMMAND
    ) -> None:
        self.timeout, self.stop = timeout, stop or Stop()
        self.errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.process = start(command, stdout=subprocess.PIPE, stderr=self.errors)

    def begin(self, job: Mapping[str, Any]) -> Worker:
        """Have it set up its job; it ends where it cannot."""
        began = time.perf_counter()
        try:
            self.stop.check()
            self.about = self.ask(job)
        except BaseException:
            self.close()
            raise
        self.setup_s = time.perf_counter() - began
        return self

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
            self.stop.check(GRACE)
            left = deadline - time.monotonic()
            if left <= 0:
                self.close()
                raise Failure("died", [f"it gave no answer within {self.timeout:g} s (--timeout)"])
            if not select.select([self.process.stdout], [], [], min(left, LOOK))[0]:
                continue
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
        end(self.process)
        assert self.process.stdout
        self.process.stdout.close()
        self.errors.close()


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
    outcomes: dict[Key, Outcome] | None = None,
    ahead: bool = False,
    fresh: bool | None = None,
    budget: int = 0,
    timeout: float = 600.0,
    stop: Stop | None = None,
    skip: Callable[[str, str], str] = lambda name, point: "",
    watch: Callable[[str], None] = lambda what: None,
    known: Callable[[str, str], None] = lambda name, point: None,
    after_round: Callable[[], None] = lambda: None,
    command: Sequence[str] = COMMAND,
) -> tuple[dict[Key, Outcome], bool]:
    """Warm every job up at every point, then measure `rounds` rounds in turn.

    Args:
        jobs: name -> its worker's job; points: name -> what a round asks of a worker.
        outcomes: of earlier rounds, to be added to, as soon as something is known.
        ahead: start all processes at the beginning, and let them import.
        fresh: new processes in every round; None: only where they do not all fit into `budget`.
        budget: bytes for all workers together; 0: not known, so they all stay.
        skip: why not to measure a pair, asked before it is warmed up; "": measure it.
        known: told of each pair whose last round is done, or that failed.
        after_round: called after the warm-up, too.

    Returns:
        the outcome of each pair, and whether rounds had fresh processes.
    """
    stop, outcomes = stop or Stop(), {} if outcomes is None else outcomes
    for pair in itertools.product(jobs, points):
        outcomes.setdefault(pair, Outcome())
    workers: dict[str, Worker] = {}
    held: dict[str, int] = {}  # bytes of a sleeping worker
    peak = 0  # the most that any worker needed
    begun, of = 0, (rounds + 1) * len(jobs) * len(points)
    warm_by = time.monotonic() + WARM_UP * ((stop.deadline or 0) - time.monotonic())
    # Importing takes seconds of one core, so all begin with it at once, where there is no memory
    # limit that it might come near.
    waiting = {name: Worker(timeout, stop, command) for name in jobs if ahead and not fresh}

    def drop(*names: str) -> None:
        for name in names:
            workers.pop(name).close()
            held.pop(name, None)

    def one(name: str, point: str, round_: int) -> None:
        """Warm up (round 0, or a new process), measure (all other rounds)."""
        nonlocal peak
        outcome = outcomes[name, point]
        if round_ == 0 and (why := skip(name, point)):
            raise Failure("skipped", [why])
        if round_ == 0 and held and stop.deadline and time.monotonic() > warm_by:
            raise Failure("stopped", ["warming it up would have left no time for the rounds"])
        if name not in workers:
            worker = waiting.pop(name, None) or Worker(timeout, stop, command)
            workers[name] = worker.begin(jobs[name])
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
            doing = f"round {round_} of {rounds}" if round_ else "warming up"
            for point, name in itertools.product(points, jobs):
                begun += 1
                if outcomes[name, point].failure:
                    continue
                try:
                    stop.check()
                    watch(f"{doing}: {name} {point}".strip() + f" ({begun} of {of})")
                    one(name, point, round_)
                except Failure as e:
                    lives = name in workers or e.kind == "skipped"
                    for p in [point] if lives else points:  # not begun: it never will
                        outcomes[name, p].failure = e
                    if e.kind == "died" and name in workers:
                        drop(name)
                if round_ == rounds or outcomes[name, point].failure:
                    known(name, point)
                if fresh is None and budget and sum(held.values()) + peak > budget:
                    fresh = True
                if fresh:
                    drop(*workers)
            after_round()
    finally:
        drop(*workers)
        for worker in waiting.values():
            worker.close()
    return outcomes, bool(fresh)
