"""Standard streams and signals."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import unicodedata
from contextlib import suppress
from typing import Any, NoReturn


def escaped(text: str) -> str:
    r"""Control characters but newline and tab as \x1b, for terminals."""
    plain = (c in "\n\t" or unicodedata.category(c) != "Cc" for c in text)
    return "".join(c if p else repr(c)[1:-1] for c, p in zip(text, plain))


class _Lasting(io.FileIO):
    """Drops what cannot be written, with one warning."""

    warned = False

    def write(self, data: Any, /) -> int:
        try:
            # None: a full pipe that does not block.
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


class _Output(io.TextIOWrapper):
    """Takes any text; escapes it in a terminal."""

    safe = False

    def write(self, text: str, /) -> int:
        return super().write(escaped(text) if self.safe else text)


def prepare(*lasting: str) -> None:
    """Let standard streams take any text, and the `lasting` never fail."""
    while (fd := os.open(os.devnull, os.O_RDWR)) < 3:  # closed: a file would take its number
        pass
    os.close(fd)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115, PLW1514
        if stream is getattr(sys, f"__{name}__") or isinstance(stream, _Output):
            stream.flush()
            raw = (_Lasting if name in lasting else io.FileIO)(stream.fileno(), "wb", closefd=False)
            lines = name in lasting or stream.line_buffering or stream.write_through
            # \u4e00 for a text outside an ASCII terminal's.
            code = stream.encoding, "backslashreplace"
            stream = _Output(io.BufferedWriter(raw), *code, line_buffering=lines)
            stream.safe = name == "stdout" and stream.isatty()  # stderr: bars of downloads
        setattr(sys, name, stream)


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def end_at_once() -> None:
    """Let Ctrl-C interrupt slow imports silently."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def raise_on_signals() -> None:
    """Let the first of SIGNALS raise KeyboardInterrupt(128 + number). torchrun's SIGTERM and SIGHUP
    end a process."""

    def interrupt(number: int, frame: object) -> NoReturn:
        for other in mine:  # a terminal that closes sends SIGHUP twice
            signal.signal(other, signal.SIG_IGN if other == signal.SIGHUP else signal.SIG_DFL)
        raise KeyboardInterrupt(128 + number)

    mine = SIGNALS[: 1 if "RANK" in os.environ else 3]
    mine = tuple(number for number in mine if signal.getsignal(number) != signal.SIG_IGN)
    for number in mine:
        signal.signal(number, interrupt)
