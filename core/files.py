"""Write files without following links: in a downloaded folder they may lead to any file."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


def refuse_link(path: Path, hard: bool = False) -> None:
    """Raise OSError for a link (`hard`: a hard one too), except of the system: /dev/stdout."""
    if path.is_symlink() and str(path.parent) not in ("/dev", "/dev/fd", "/proc/self/fd"):
        why = f"a link to {os.readlink(path)!r}"
    elif hard and path.is_file() and path.stat().st_nlink > 1:
        why = "a hard link to another file"
    else:
        return
    raise OSError(errno.ELOOP, f"{path} is {why}; delete it or name another file", str(path))


def open_output(path: Path, mode: str) -> IO[str]:
    """Open a text file to write. Raises OSError for a link, a hard one too."""
    refuse_link(path, hard=True)
    follow = 0 if path.is_symlink() else os.O_NOFOLLOW
    opener = lambda name, flags: os.open(name, flags | follow, 0o666)  # noqa: E731
    return open(path, mode, encoding="utf-8", opener=opener)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file that then replaces `path`, or a pipe or device. OSError: it is a link."""
    refuse_link(path)
    if path.is_symlink() or (path.exists() and not path.is_file()):
        yield path
        return
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
