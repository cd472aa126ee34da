"""This process: standard streams, signals, threads. Imported before torch."""

from __future__ import annotations

import errno
import io
import os
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
R = TypeVar("R")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Control characters but newline and tab, as \x1b.
ESCAPES = {n: repr(chr(n))[1:-1] for n in (*range(9), *range(11, 32), *range(127, 160))}
while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # closed: a file would take its number
    os.set_inheritable(fd, True)
os.close(fd)


def escaped(text: str) -> str:
    return text.translate(ESCAPES)


class _Lasting(io.FileIO):
    """Drops what cannot be written, with one warning."""

    warned = False

    def write(self, data: Any, /) -> int:
        try:
            while (n := super().write(data)) is None:  # a full pipe that does not block
                select.select([], [self], [])
            return n
        except OSError as e:
            name, other = ("stdout", 2) if self.fileno() == 1 else ("stderr", 1)
            text = f"WARNING: cannot write to {name} ({e.strerror}); going on without it\n"
            if e.errno == errno.EPIPE:
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())
            if not self.warned:
                self.warned = True
                with suppress(OSError):
                    os.write(other, text.encode())
            return memoryview(data).nbytes


class _Output(io.TextIOWrapper):
    """Takes any text; escapes it in a terminal."""

    safe = False

    def write(self, text: str, /) -> int:
        return super().write(escaped(text) if self.safe else text)


def prepare(lasting: bool = False) -> None:
    """Let streams take any text, and stderr never fail; lasting: nor stdout."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115, PLW1514
        if stream is getattr(sys, f"__{name}__") or isinstance(stream, _Output):
            stream.flush()
            lasts = lasting or name == "stderr"
            raw = (_Lasting if lasts else io.FileIO)(stream.fileno(), "wb", closefd=False)
            lines = lasts or stream.line_buffering or stream.write_through
            # \u4e00 for a text outside an ASCII terminal's.
            code = stream.encoding, "backslashreplace"
            stream = _Output(io.BufferedWriter(raw), *code, line_buffering=lines)
            stream.safe = name == "stdout" and stream.isatty()  # stderr: bars of downloads
        setattr(sys, name, stream)


def end_at_once() -> None:
    """Let Ctrl-C interrupt slow imports silently."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_signals() -> None:
    """Let the first signal raise KeyboardInterrupt(128 + number); torchrun's end a process."""

    def interrupt(number: int, frame: object) -> NoReturn:
        for other in mine:  # a terminal that closes sends SIGHUP twice
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL)
        raise KeyboardInterrupt(128 + number)

    wanted = SIGNALS[: 1 if "RANK" in os.environ else 3]
    mine = [number for number in wanted if signal.getsignal(number) != signal.SIG_IGN]
    for number in mine:
        signal.signal(number, interrupt)


def wait_passively() -> None:
    """Let OpenMP's idle threads sleep if others use half of our cores in the next 0.1 s."""

    def times() -> list[int]:
        ours = {f"cpu{i}" for i in os.sched_getaffinity(0)}
        with open("/proc/stat", encoding="ascii") as f:
            cores = [words for words in map(str.split, f) if words[0] in ours]
        return [sum(map(int, column)) for column in zip(*(words[1:9] for words in cores))]

    decided = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & {*os.environ}
    if decided or os.environ.get("OMP_NUM_THREADS") == "1":
        return
    try:
        before = times()
        time.sleep(0.1)
        passed = [b - a for a, b in zip(before, times(), strict=True)]
        used = 1 - (passed[3] + passed[4]) / sum(passed)  # idle, waiting for a disk
    except (OSError, AttributeError, ValueError, LookupError, ZeroDivisionError):  # not Linux
        return
    if used >= 0.5:
        os.environ["OMP_WAIT_POLICY"] = "passive"
        if os.environ.get("RANK", "0") == "0":
            why = f"other programs use {used:.0%} of the cores"
            print(f"threads: {why}: OMP_WAIT_POLICY=passive is now set", file=sys.stderr)


def in_thread(work: Callable[..., R], *args: Any) -> Future[R]:
    """Run work(*args) in a thread that ends with the process; a signal interrupts result()."""
    future: Future[R] = Future()

    def run() -> None:
        try:
            future.set_result(work(*args))
        except BaseException as e:
            future.set_exception(e)

    Thread(target=run, daemon=True, name="background").start()
    return future


def map_ahead(work: Callable[[T], R], tasks: Iterable[T], ahead: int) -> Iterator[R]:
    """Like map(), with up to `ahead` tasks at once in threads."""
    running: deque[Future[R]] = deque()
    for task in tasks:
        running.append(in_thread(work, task))
        if len(running) >= ahead:
            yield running.popleft().result()
    yield from (future.result() for future in running)


if sys.argv[:1] == ["-m"]:  # imports the package before its __main__.py
    end_at_once()
