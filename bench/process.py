"""A worker's process, and what ends a measurement: failures, deadlines, signals."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from bench import ROOT, Json
from core.runtime import StopSignal

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
        raise Failure("died" if answer["broken"] else "failed", [answer["failed"]])
    return answer["ok"]


class Worker:
    """A process that measures; `about` is its answer to the job."""

    # Wherever it is started, this folder's modules are imported.
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from bench.worker import main; main()"
    command = (sys.executable, "-c", code)

    def __init__(self, job: Json, timeout: float, stop: Stop) -> None:
        """Start it and set up the job. Raises Failure."""
        stop.check()
        self.timeout, self.stop, began = timeout, stop, time.perf_counter()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            self.command, stdin=pipe, stdout=pipe, stderr=self.errors, start_new_session=True
        )
        try:
            self.about = self.ask(job)
        except BaseException:
            self.close()
            raise
        self.setup_s = time.perf_counter() - began

    def ask(self, request: Json) -> Json:
        """Send a request and return its answer. Raises Failure, after `timeout` seconds too."""
        deadline, out = time.monotonic() + self.timeout, self.process.stdout
        assert self.process.stdin and out
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
            while not select.select([out], [], [], LOOK)[0]:
                self.stop.check(GRACE)
                if time.monotonic() > deadline:
                    raise Failure("died", [f"no answer within {self.timeout:g} s (--timeout)"])
            if line := out.readline():
                return result(json.loads(line))
        except OSError:
            pass
        self.stop.check()  # perhaps ended by Ctrl-C, too
        raise self._died()

    def _died(self) -> Failure:
        code = self.process.wait()
        self.errors.seek(0)
        last = self.errors.read().decode(errors="replace").strip().rpartition("\n")[2]
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            how += ", as Linux does when memory runs out"
        return Failure("died", [f"its process died ({how}){': ' if last else ''}{last}"])

    def close(self) -> None:
        """End the process and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout, self.errors):
            with suppress(OSError):  # a request that was never read
                stream.close()  # type: ignore[union-attr]
