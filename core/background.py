"""Work in daemon threads, which end with the process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")


def begin(work: Callable[..., R], *args: Any) -> Future[R]:
    """Run work(*args) in a thread; a signal interrupts result()."""
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
        running.append(begin(work, task))
        if len(running) >= ahead:
            yield running.popleft().result()
    yield from (future.result() for future in running)
