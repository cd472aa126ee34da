"""Run a function in its own thread, without the caller's autocast, hooks and tracers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TypeVar

import torch

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_inside = threading.local()
_lock = threading.Lock()  # one choice at a time
PATIENCE = 600  # seconds


def apart(device: str | torch.device, function: Callable[[], T]) -> T:
    """Return function() from a new thread. Raises RuntimeError: in a CUDA graph capture, after a
    hang."""
    if getattr(_inside, "now", False):  # a kernel calls attention
        return function()
    on = torch.device(device)
    if on.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("no kernel was chosen before this CUDA graph: call model.plan() first")
    result: Future[T] = Future()

    def run() -> None:
        _inside.now = True
        try:
            with torch.cuda.device(on) if on.type == "cuda" else nullcontext():
                result.set_result(function())
        except BaseException as e:
            result.set_exception(e)

    # In autograd's thread a tried kernel must not wait.
    lock = _lock if torch._C._current_graph_task_id() == -1 else threading.Lock()
    if not lock.acquire(timeout=PATIENCE):
        raise RuntimeError(f"another thread has been choosing a kernel for {PATIENCE:,} s")
    try:
        threading.Thread(target=run, daemon=True).start()
        return result.result()
    finally:
        lock.release()


def outside_a_trace(function: F) -> F:
    """assume_constant_result() without the slow import of torch._dynamo."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
