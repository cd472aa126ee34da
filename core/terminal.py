"""A command's standard streams and signals."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn


class _Lasting(io.FileIO):
    """An output that drops what cannot be written, with one warning on the other stream."""

    warned = False

    def write(self, data: Any, /) -> int:
        try:
            # None: another program has set a pipe that is full now to not block.
            while (n := super().write(data)) is None:
                select.select([], [self], [])
            return n
        except OSError as e:
            name, other = ("stdout", 2) if self.fileno() == 1 else ("stderr", 1)
            text = f"WARNING: cannot write to {name} ({e.strerror}); going on without it\n"
            if not self.warned:
                self.warned = True
                with suppress(OSError):
                    os.write(other, text.encode())
            return memoryview(data).nbytes


def prepare(*lasting: str) -> None:
    """Let the standard streams take any text, and those named, "stdout" or "stderr", never fail."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # closed: a file would take its number
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115, PLW1514
        if isinstance(stream, io.TextIOWrapper):  # \u4e00 for a text outside an ASCII terminal's
            stream.reconfigure(errors="backslashreplace")
            if name in lasting and stream is getattr(sys, f"__{name}__"):
                raw = _Lasting(stream.fileno(), "wb", closefd=False)
                code = stream.encoding, "backslashreplace"
                stream = io.TextIOWrapper(io.BufferedWriter(raw), *code, line_buffering=True)
        setattr(sys, name, stream)


# A terminal that closes sends SIGHUP, often twice. nohup ignores it.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt(number: int, frame: object) -> NoReturn:
    on_signals(signal.SIG_DFL)  # once more ends at once
    raise KeyboardInterrupt(128 + number)


def on_signals(handler: Callable[[int, object], object] | signal.Handlers) -> None:
    """Handle SIGNALS so, unless they are ignored. torchrun's SIGTERM and SIGHUP end a process."""
    for number in SIGNALS[: 1 if "RANK" in os.environ else 3]:
        if signal.getsignal(number) != signal.SIG_IGN:
            again = handler == signal.SIG_DFL and number == signal.SIGHUP
            signal.signal(number, signal.SIG_IGN if again else handler)


def interrupted(number: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            word = "interrupted" if number == signal.SIGINT else "terminated"
            os.write(2, f"\n{word}\n".encode())
    return 128 + number
