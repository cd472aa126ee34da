"""A process for each candidate: it builds, warms up, and measures a round for each request.

    job      ->  {"ok": {"title": ...}}                       the candidate is built
    request  ->  {"ok": {"ms": ...}, "took_s": ...}           a warm-up or a round
             ->  {"unavailable": [reasons]}                   it cannot run
             ->  {"failed": "...", "broken": true if the process cannot be used any more}

multiprocessing starts it; JSON goes through a pipe, what libraries print to a file. It ends with
all that it started when its parent closes it or dies.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import queue
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from types import ModuleType
from typing import Any

import torch

from attention import BackendUnavailable
from bench import Json, machine
from core.runtime import StopSignal
from core.settings import UserError

GRACE = 20.0  # seconds that a round may go on after the deadline
LOOK = 0.2  # seconds between two checks for signals while a worker works
SPAWN = multiprocessing.get_context("spawn")  # CUDA does not survive a fork


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
        elif self.left < -late:
            self.why = self.why or "the time limit was reached"
        else:
            return
        raise Failure("stopped", [self.why])

    @property
    def left(self) -> float:
        """Seconds until the deadline."""
        return float("inf") if self.deadline is None else self.deadline - time.monotonic()

    @property
    def code(self) -> int:
        """The exit code."""
        number = self.signals.signal if self.signals and self.why else None
        return 128 + number if number else 0


class Worker:
    """A process that measures; `work` names its class, as in "bench.train:Training"."""

    def __init__(self, work: str, job: Json, timeout: float, stop: Stop) -> None:
        """Start it; begun() waits until it has built the candidate."""
        stop.check()
        self.timeout, self.stop = timeout, stop
        self.about: Json | None = None  # the answer to the job
        self.setup_s = self.took_s = 0.0  # of the set-up, of the last answer
        self.held_bytes = 0  # of memory, by the sleeping process
        self.errors = tempfile.NamedTemporaryFile()  # noqa: SIM115
        self.pipe, theirs = SPAWN.Pipe()
        args = (theirs, work, job, self.errors.name, time.time())
        self.process = SPAWN.Process(target=serve, args=args)
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")  # else it runs the user's script again
        # Until it has a process group of its own Ctrl-C reaches it too.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self.process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            sys.modules["__main__"] = main
        theirs.close()

    def begun(self) -> Json:
        """Return the answer to the job. Raises Failure, with the process closed."""
        if self.about is None:
            try:
                self.about = self.receive()
            except BaseException:
                self.close()
                raise
            self.setup_s = self.took_s
        return self.about

    def send(self, request: Json) -> None:
        with suppress(OSError):  # receive() says that it died
            self.pipe.send_bytes(json.dumps(request).encode())

    def receive(self) -> Json:
        """Return the next answer. Raises Failure, after `timeout` seconds too."""
        deadline = time.monotonic() + self.timeout
        with suppress(EOFError, OSError):
            while not self.pipe.poll(LOOK):
                self.stop.check(GRACE)
                if time.monotonic() > deadline:
                    raise Failure("died", [f"no answer within {self.timeout:g} s (--timeout)"])
                if not self.process.is_alive() and not self.pipe.poll():
                    break
            else:
                return self.result(json.loads(self.pipe.recv_bytes()))
        self.stop.check()  # perhaps ended by Ctrl-C, too
        raise self._died()

    def ask(self, request: Json) -> Json:
        self.send(request)
        return self.receive()

    def result(self, answer: Json) -> Json:
        """Return the content of an answer. Raises Failure for a refusal or an error."""
        if "unavailable" in answer:
            raise Failure("unavailable", answer["unavailable"])
        if "failed" in answer:
            raise Failure("died" if answer["broken"] else "failed", [answer["failed"]])
        self.took_s, self.held_bytes = answer["took_s"], answer["held_bytes"]
        return answer["ok"]

    def _died(self) -> Failure:
        self.process.join()
        code = self.process.exitcode or 0
        last = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as Linux does when memory runs out"
        return Failure("died", [f"its process died ({how}){': ' if last else ''}{last}"])

    def close(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        self.process.kill()  # it may have no group of its own yet
        self.process.join()
        self.pipe.close()
        self.errors.close()


# --- in the process ---


def serve(pipe: Connection, work: str, job: Json, errors: str, began: float) -> None:
    """Answer the job, then every request."""
    os.setsid()  # a group of its own
    log = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    warnings.simplefilter("ignore")
    requests = queue.SimpleQueue[Json]()
    threading.Thread(target=read, args=(pipe, requests), daemon=True).start()
    if job.get("memory_limit") and sys.platform == "linux":
        import resource

        # An allocation beyond the limit fails here, before Linux kills some process.
        resource.setrlimit(resource.RLIMIT_DATA, (job["memory_limit"],) * 2)
    if torch.device(job["device"]).index is not None:  # "cuda:1"
        torch.cuda.set_device(job["device"])
    handler, request = Handler(work), job
    while True:
        pipe.send_bytes(handler.answer(request, began))
        request, began = requests.get(), time.time()


def read(pipe: Connection, requests: queue.SimpleQueue[Json]) -> None:
    """Queue the requests. When the parent ends, even by kill -9, end with all that was started."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(json.loads(pipe.recv_bytes()))
    os.killpg(0, signal.SIGKILL)


class Handler:
    """The candidate of a process: built by the first request, the job."""

    def __init__(self, work: str) -> None:
        self.name = work
        self.work: Any = None

    def answer(self, request: Json, began: float) -> bytes:
        """Return the answer as JSON; it took the time since `began`."""
        try:
            if self.work is None:
                module, _, kind = self.name.partition(":")
                self.work = getattr(importlib.import_module(module), kind)(request)
                answer: Json = {"ok": self.work.about}
            else:
                answer = {"ok": self.work.round(request)}
            answer["took_s"] = time.time() - began
            keep = getattr(self.work, "keeps_memory", False)
            answer["held_bytes"] = machine.empty_cache(self.work.device, keep)
            return json.dumps(answer, allow_nan=False).encode()
        except (BackendUnavailable, UserError) as e:
            answer = {"unavailable": [machine.reason(e)]}
        except Exception as e:  # any error of a kernel becomes a row of the table
            answer = {"failed": machine.first_line(e), "broken": self.broken()}
        return json.dumps(answer).encode()

    def broken(self) -> bool:
        """True if the job was not set up, or after an error that leaves CUDA unusable."""
        try:
            machine.reset_peak(self.work.device)  # also frees what the failed call held
        except Exception:
            return True
        return False
