"""Write files without following links: in a downloaded folder they may lead to any file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISREG
from typing import IO


def refuse_link(path: Path) -> None:
    """Raise OSError for a link, except one of the system, as /dev/stdout."""
    if path.is_symlink() and str(path.parent) not in ("/dev", "/dev/fd", "/proc/self/fd"):
        why = f"{path} is a link to {os.readlink(path)!r}; delete it or name another file"
        raise OSError(errno.ELOOP, why, str(path))


def open_output(path: Path, mode: str = "w") -> IO[str]:
    """Open a text file to write ("w", "a", "a+"). Raises OSError for a link, a hard one too."""
    refuse_link(path)
    follow = 0 if path.is_symlink() else os.O_NOFOLLOW

    def opener(name: str, flags: int) -> int:
        file = os.open(name, flags & ~os.O_TRUNC | follow, 0o666)
        stat = os.fstat(file)
        if S_ISREG(stat.st_mode) and stat.st_nlink > 1:
            os.close(file)
            why = f"{name} is a hard link ({stat.st_nlink} names); delete it or name another file"
            raise OSError(errno.EMLINK, why, name)
        if flags & os.O_TRUNC and S_ISREG(stat.st_mode):
            os.ftruncate(file, 0)
        return file

    return open(path, mode, encoding="utf-8", opener=opener)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file, which replaces `path` at the end; or `path` if it is a pipe or device.

    Raises OSError for a link.
    """
    refuse_link(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    try:
        partial.touch(exist_ok=False)
        yield partial
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_at_once(path: Path, content: str | bytes) -> None:
    """Write a file atomically; see replacing()."""
    with replacing(path) as file:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
