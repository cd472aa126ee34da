"""Output files, locks, printable names."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import shlex
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO

from core.process import escaped
from core.settings import UserError

log = logging.getLogger("nanoattn")


def refuse_link(path: Path, hard: bool = False) -> None:
    """OSError: a link (`hard`: a hard one too), but /dev/stdout."""
    soft = path.is_symlink() and str(path.parent) not in ("/dev", "/dev/fd", "/proc/self/fd")
    if soft or (hard and path.is_file() and path.stat().st_nlink > 1):
        why = f"a link to {os.readlink(path)!r}" if soft else "a hard link to another file"
        raise OSError(errno.ELOOP, f"{path} is {why}", str(path))


def open_output(path: Path, mode: str) -> IO[str]:
    """Open a text file to write. OSError: any link."""
    refuse_link(path, hard=True)
    follow = 0 if path.is_symlink() else os.O_NOFOLLOW
    opener = lambda name, flags: os.open(name, flags | follow, 0o666)  # noqa: E731
    return open(path, mode, encoding="utf-8", opener=opener)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file that replaces `path`. OSError: a link."""
    refuse_link(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):  # /dev/stdout
        yield path
        return
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        partial.touch(exist_ok=False)
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_at_once(path: Path, content: str | bytes) -> None:
    with replacing(path) as file:
        file.write_bytes(content.encode() if isinstance(content, str) else content)


def printable(text: object) -> str:
    return escaped(str(text)).replace("\n", "\\n").replace("\t", "\\t")


def command(*words: object) -> str:
    """A line to paste into bash."""
    return " ".join(map(_quoted, map(str, words)))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    quoted = ""
    for c in word:
        path_byte = "\udc80" <= c <= "\udcff"  # other halves of surrogate pairs come from JSON
        code = c.encode(errors="surrogateescape" if path_byte else "surrogatepass")
        plain = c.isprintable() and c not in "\\'"
        quoted += c if plain else "".join(f"\\x{byte:02x}" for byte in code)
    return f"$'{quoted}'"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Create --out_dir and keep others out, by a file on a shared disk too, by a socket if the
    folder is deleted. Raises UserError."""
    path = folder / ".lock"
    option = f"--out_dir={printable(folder)}"
    existed = os.path.exists(folder)
    with ExitStack() as held:
        try:
            with suppress(PermissionError):  # in a sandbox
                if sys.platform == "linux":
                    name = held.enter_context(socket.socket(socket.AF_UNIX))
                    name.bind(b"\0nanoattn" + sha256(os.fsencode(folder.resolve())).digest())
            folder.mkdir(parents=True, exist_ok=True)
            file = held.enter_context(open_output(path, "a+"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                if isinstance(e, BlockingIOError):
                    raise
                log.warning("%s cannot be locked (%s): use it once at a time", option, e.strerror)
        except OSError as e:
            why = f"cannot be written ({e.strerror})"
            if e.errno in (errno.EADDRINUSE, errno.EWOULDBLOCK):
                found = path.read_text("utf-8", "replace") if path.is_file() else "now deleted"
                why = f"is in use by another process ({printable(found[:99])})"
            raise UserError(f"{option} {why}; name another folder") from e
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
                if not existed:
                    folder.rmdir()  # fails if something was written
