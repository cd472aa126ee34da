"""A process for each candidate: a request builds it, then calls a method of it. An answer is JSON
or a Failure. A process ends with its parent, and all that it started."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import resource
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

from attention import BackendUnavailable
from bench import Json, machine
from bench.candidates import Candidate, Plan
from core.runtime import StopSignal
from core.settings import UserError

GRACE = 20.0  # seconds of a round after the deadline
LOOK = 0.2  # seconds between checks for signals
SPAWN = multiprocessing.get_context("spawn")
Work = Callable[[Candidate], Any]  # its result answers the requests, or is the only answer


@dataclass(eq=False)
class Failure(Exception):
    kind: str  # a row's status: unavailable, failed, skipped or stopped
    why: str
    built: bool = True  # False: the candidate cannot be built

    def __str__(self) -> str:
        return self.why


class Stop:
    def __init__(self, minutes: float = math.inf, signals: StopSignal | None = None) -> None:
        self.began = self.told = time.monotonic()
        self.deadline = self.began + 60 * minutes
        self.signals, self.why = signals, ""

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def check(self, late: float = 0.0) -> None:
        """Failure "stopped" after a signal, or `late` seconds after the deadline."""
        if self.signals and (number := self.signals.signal):
            name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
            self.why = f"stopped by {name}"
        elif self.left < -late:
            passed = f"set-up and measuring took {time.monotonic() - self.began:.0f} s so far"
            self.why = self.why or f"the time limit was reached: {passed}"
        else:
            return
        raise Failure("stopped", self.why)

    @property
    def code(self) -> int:
        number = self.signals.signal if self.signals and self.why else None
        return 128 + number if number else 0

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", file=sys.stderr, flush=True)

    def watch(self, what: str) -> None:
        if time.monotonic() - self.told >= 2:
            self.told = time.monotonic()
            self.tell(what)


class Worker:
    def __init__(self, work: Work, who: Candidate, stop: Stop) -> None:
        stop.check()
        self.timeout, self.stop, self.free_bytes = who.bench.config.timeout, stop, 0
        self.warm: set[str] = set()  # rows
        self.errors = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.pipe, theirs = SPAWN.Pipe()
        how = (theirs, work, who, self.errors.name, time.time())
        self.process = SPAWN.Process(target=serve, args=how)
        # Python warns of killed compilers' semaphores.
        os.environ.setdefault("PYTHONWARNINGS", "ignore:resource_tracker")
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else the user's script runs again
        # Ctrl-C reaches it until it has its own process group.
        resource_tracker.ensure_running()  # it unblocks Ctrl-C
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            sys.modules["__main__"] = main
        theirs.close()

    def send(self, call: str, request: Json) -> None:
        with suppress(OSError):  # receive() raises for a process that died
            self.pipe.send((call, request))

    def receive(self, most: float = math.inf) -> Json:
        """The answer, within --timeout and `most` seconds."""
        most = min(most, self.timeout)
        deadline = time.monotonic() + most
        try:
            while not self.pipe.poll(LOOK):
                self.stop.check(GRACE)
                if time.monotonic() > deadline:
                    raise Failure("failed", f"no answer within {most:.6g} s (--timeout, --minutes)")
                if not self.process.is_alive() and not self.pipe.poll():
                    raise EOFError
            answer = self.pipe.recv()
        except (EOFError, OSError):
            self.stop.check()  # perhaps by Ctrl-C
            raise Failure("failed", self.death()) from None
        if isinstance(answer, Failure):
            raise answer
        self.free_bytes = answer.pop("free_bytes")
        return answer

    def ask(self, call: str, request: Json) -> Json:
        self.send(call, request)
        return self.receive()

    def death(self) -> str:
        self.process.join()
        code = self.process.exitcode or 0
        last = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        how += ", as Linux does when memory runs out" if code == -signal.SIGKILL else ""
        return f"its process died ({how}){': ' if last else ''}{last}"

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may have no group yet
        self.process.join()
        self.pipe.close()
        self.errors.close()


def once(work: Work, who: Candidate, stop: Stop, call: str = "", request: Any = None) -> Json:
    with closing(Worker(work, who, stop)) as worker:
        return worker.ask(call, request)


def largest(plan: Plan, who: Candidate, stop: Stop, request: Json) -> int:
    """The largest batch that fits, to an eighth. A try without memory may break its process."""
    good, bad, worker = 0, plan.most + 1, None
    who = who.but(compile=False)
    with ExitStack() as workers:
        while bad - good > max(1, good // 8):
            n = min(max(1, 2 * good), plan.most) if bad > plan.most else (good + bad) // 2
            stop.watch(f"batch of {n}: {who.name}")
            try:
                if worker is None:
                    worker = workers.enter_context(closing(Worker(plan.work, who, stop)))
                worker.ask("fits", request | {"B": n})
                good = n
            except Failure as e:
                if n == 1 or not re.search("out of memory|memory runs out|SIGSEGV", e.why):
                    raise
                workers.close()
                worker, bad = None, n
    return good


# --- in the worker ---


def serve(pipe: Connection, work: Work, who: Candidate, errors: str, sent_at: float) -> None:
    os.setsid()
    log = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    threading.Thread(target=end_with_parent, daemon=True).start()
    limit, device = who.bench.machine["memory_limit"], who.device
    if limit and device.type == "cpu" and sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))  # else Linux kills some process
    if device.index is not None:
        torch.cuda.set_device(device)
    torch.manual_seed(who.config.seed)
    built: Any = None
    while True:
        try:
            call, request = pipe.recv()
        except EOFError:
            os.killpg(0, signal.SIGKILL)
        try:
            if built is None:
                built = work(who)
                setup_s = time.time() - sent_at
            began = time.perf_counter()
            answer: Any = getattr(built, call)(request) if call else built
            if call == "warm_up":
                took = {"setup_s": setup_s, "warm_up_s": time.perf_counter() - began}
                answer = {"dtype": who.dtype, **answer, **took}
            if who.bench.mode != "decode":  # its rounds have no warm-up
                machine.empty_cache(device)
            answer["free_bytes"] = machine.free_memory(device)
            json.dumps(answer, allow_nan=False)  # it becomes a row
        except (BackendUnavailable, UserError, ImportError) as e:
            answer = Failure("unavailable", machine.reason(e), built is not None)
        except Exception as e:
            answer = Failure("failed", machine.failure(e), built is not None)
        pipe.send(answer)


def end_with_parent() -> None:
    """End with the parent, even after kill -9, and all that was started."""
    if parent := multiprocessing.parent_process():
        parent.join()
    os.killpg(0, signal.SIGKILL)
