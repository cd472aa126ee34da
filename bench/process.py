"""Worker processes and interleaved rounds: A B C A B C.

Each backend has its own process, memory and compile caches. After the warm-ups each measures one
round in turn, so that a drifting clock affects all alike. If the sleeping workers do not fit into
memory together, every round gets new processes ("fresh").
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from bench import Json
from bench.worker import serve
from core.runtime import StopSignal

SPAWN = multiprocessing.get_context("spawn")
WARM_UP = 0.65  # share of the time until a deadline after which nothing more is warmed up
GRACE = 20.0  # seconds that a round may go on after the deadline
LOOK = 0.2  # seconds between two checks for signals while a worker works


class Failure(Exception):
    """No result: "unavailable", "failed", "died", "skipped" (too slow) or "stopped"."""

    def __init__(self, kind: str, why: Sequence[str]) -> None:
        super().__init__("; ".join(why))
        self.kind, self.why = kind, tuple(why)


@dataclass
class Stop:
    """Deadline and signals that end the bench."""

    deadline: float | None = None  # time.monotonic(), after which nothing more begins
    signals: StopSignal | None = None
    why: str = ""  # set when the bench was stopped

    def check(self, late: float = 0.0) -> None:
        """Raises Failure ("stopped") after a signal, or `late` seconds after the deadline."""
        if self.signals and (number := self.signals.signal):
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.why = f"stopped by {name}"
        elif self.deadline is not None and time.monotonic() > self.deadline + late:
            self.why = self.why or "the time limit was reached"
        else:
            return
        raise Failure("stopped", [self.why])

    @property
    def code(self) -> int:
        """The exit code."""
        number = self.signals.signal if self.signals and self.why else None
        return 128 + number if number else 0


def result(answer: Json) -> Json:
    """Return the content of a worker's answer. Raises Failure for a refusal or an error."""
    if "unavailable" in answer:
        raise Failure("unavailable", answer["unavailable"])
    if "failed" in answer:
        raise Failure("died" if answer.get("broken") else "failed", [answer["failed"]])
    return answer["ok"]


class Worker:
    """A process and the pipe to it; it imports torch while it waits for its job."""

    about: Json  # the answer to the job
    setup_s: float

    def __init__(
        self, timeout: float, stop: Stop | None = None, target: Callable[..., None] = serve
    ) -> None:
        self.timeout, self.stop = timeout, stop or Stop()
        self.errors = tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace")  # noqa: SIM115
        self.pipe, theirs = SPAWN.Pipe()
        self.process = SPAWN.Process(target=target, args=(theirs, self.errors.name), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, job: Json) -> Worker:
        """Set up the job; the process ends if that fails."""
        began = time.perf_counter()
        try:
            self.stop.check()
            self.about = self.ask(job)
        except BaseException:
            self.close()
            raise
        self.setup_s = time.perf_counter() - began
        return self

    def ask(self, request: Json) -> Json:
        """Send a request and return its answer. Raises Failure, after `timeout` seconds too."""
        deadline = time.monotonic() + self.timeout
        try:
            self.pipe.send(dict(request))
            while not self.pipe.poll(LOOK):
                self.stop.check(GRACE)
                if time.monotonic() > deadline:
                    raise Failure("died", [f"no answer within {self.timeout:g} s (--timeout)"])
            return result(self.pipe.recv())
        except (EOFError, OSError):
            self.stop.check()  # Ctrl-C may have ended it, too
            raise self._died() from None

    def _died(self) -> Failure:
        self.process.join()
        code = self.process.exitcode or 0
        last = self.errors.read().strip().rpartition("\n")[2]
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as Linux does when memory runs out"
        return Failure("died", [f"its process died ({how}){': ' if last else ''}{last}"])

    def close(self) -> None:
        """End the process and all that it started."""
        if self.process.is_alive():
            try:
                os.killpg(self.process.ident or 0, signal.SIGKILL)
            except ProcessLookupError:  # still starting: not yet the leader of a group
                self.process.kill()
        self.process.join()
        self.pipe.close()
        with suppress(FileNotFoundError):
            self.errors.close()


@dataclass
class Outcome:
    """Results of one backend at one point."""

    about: Json = field(default_factory=dict)  # the answer to the job
    setup_s: float = 0.0  # from the start of the process to that answer
    warm: Json = field(default_factory=dict)  # the answer to the warm-up
    warm_up_s: float = 0.0
    rounds: list[Json] = field(default_factory=list)
    failure: Failure | None = None


Key = tuple[str, str]  # name of the row, point


def measure(
    jobs: Mapping[str, Json],
    points: Mapping[str, Json],
    rounds: int,
    outcomes: dict[Key, Outcome],
    *,
    ahead: bool = False,
    fresh: bool | None = None,
    budget: int = 0,
    timeout: float = 600.0,
    stop: Stop | None = None,
    skip: Callable[[str, str], str] = lambda name, point: "",
    watch: Callable[[str], None] = lambda what: None,
    known: Callable[[str, str], None] = lambda name, point: None,
    after_round: Callable[[], None] = lambda: None,
) -> bool:
    """Warm up every job at every point, then measure interleaved rounds.

    Args:
        jobs: name -> the worker's job; points: name -> the request of a round.
        outcomes: results of each pair, filled in as they come.
        ahead: start all processes at the beginning.
        fresh: new processes in every round; None: only if they do not all fit into `budget`.
        budget: bytes for all workers together; 0: unlimited.
        skip: returns why a pair is not measured, or "".
        known: called for each pair after its last round or its failure.

    Returns:
        True if rounds had fresh processes.
    """
    stop = stop or Stop()
    for pair in itertools.product(jobs, points):
        outcomes.setdefault(pair, Outcome())
    workers: dict[str, Worker] = {}
    held: dict[str, int] = {}  # bytes of a sleeping worker
    peak = 0  # the most that any worker needed
    begun, of = 0, (rounds + 1) * len(jobs) * len(points)
    warm_by = time.monotonic() + WARM_UP * ((stop.deadline or 0) - time.monotonic())
    waiting = {name: Worker(timeout, stop) for name in jobs if ahead and not fresh}

    def drop(*names: str) -> None:
        for name in names:
            workers.pop(name).close()
            held.pop(name, None)

    def one(name: str, point: str, round_: int) -> None:
        """Warm up (in round 0, or a new process) and measure (in all other rounds)."""
        nonlocal peak
        outcome = outcomes[name, point]
        if round_ == 0 and (why := skip(name, point)):
            raise Failure("skipped", [why])
        if round_ == 0 and held and stop.deadline and time.monotonic() > warm_by:
            raise Failure("stopped", ["its warm-up would have left no time for the rounds"])
        if name not in workers:
            worker = waiting.pop(name, None) or Worker(timeout, stop)
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
                    for p in [point] if lives else points:  # a job that cannot begin has no points
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
    return bool(fresh)
