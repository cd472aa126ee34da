"""Run a function apart from whatever surrounds its caller.

PyTorch keeps its modes per thread: hooks of saved tensors, autocast, functorch's levels, fake
tensors and other dispatch modes, the default device, inference mode, tracers and the operators that
a profiler records. A new thread begins without any of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from .system import start_profiler

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_lock = threading.Lock()
_inside = threading.local()
_trial = threading.Event()  # a kernel that is tried runs its backward pass
PATIENCE = 1800  # seconds: no choice takes as long


def _in_a_fork() -> None:
    """The parent's thread that holds the lock is not in the child."""
    global _lock
    _lock = threading.Lock()
    _trial.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_a_fork)


def apart(device: str | torch.device, function: Callable[[], T]) -> T:
    """Return function() from a new thread, one at a time.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would break. Or another choice did not
            end: its kernel may wait for this thread.
    """
    import torch

    if getattr(_inside, "now", False):  # a kernel that calls attention, too
        return function()
    on = torch.device(device)
    if on.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "no kernel was chosen before this CUDA graph is captured: call model.plan(), or the "
            "function once with these shapes, before the capture"
        )
    if on.type == "cuda":
        start_profiler()
    result: Future[T] = Future()
    # A kernel that is tried may run its backward pass in another thread. That thread must not wait
    # for the lock, which the trial holds.
    tried = _trial.is_set() and torch._C._current_graph_task_id() != -1
    patience = 0.0 if tried else PATIENCE

    def choose() -> T:
        _inside.now, lock = True, _lock
        locked = lock.acquire(timeout=patience)
        if patience and not locked:
            raise RuntimeError(
                "no kernel could be chosen: another thread has been choosing one for "
                f"{patience:,.0f} s. Perhaps its kernel waits for this thread"
            )
        try:
            with torch.cuda.device(on) if on.type == "cuda" else nullcontext():
                return function()
        finally:
            if locked:
                lock.release()

    def run() -> None:
        try:  # the lock is free again before the caller goes on, and may fork
            result.set_result(choose())
        except BaseException as e:
            result.set_exception(e)

    threading.Thread(target=run, daemon=True).start()
    return result.result()


@contextmanager
def trial_of_backward() -> Iterator[None]:
    """Around the backward pass of a kernel that is tried in apart()."""
    _trial.set()
    try:
        yield
    finally:
        _trial.clear()


def outside_a_trace(function: F) -> F:
    """Let torch.compile call a function of constants while it traces, instead of tracing it.

    As torch.compiler.assume_constant_result, without its import of torch._dynamo (1 s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
