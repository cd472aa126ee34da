"""Run a function apart from whatever surrounds its caller.

PyTorch keeps its modes per thread: hooks of saved tensors, autocast, functorch's levels, fake
tensors and other dispatch modes, the default device, inference mode, tracers and the operators that
a profiler records. A new thread begins without any of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from .system import start_profiler

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])

_lock = threading.Lock()
_inside = threading.local()
PATIENCE = 1800  # seconds: no choice takes as long


def apart(device: str | torch.device, function: Callable[[], T]) -> T:
    """Return function() from a new thread, one at a time.

    Raises:
        RuntimeError: a CUDA graph is being captured, which would break. Or this thread belongs to
            a kernel that is being tried, which waits for it.
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
    # A backward pass has threads of its own. That of a kernel that is being tried cannot wait.
    patience = 0.0 if torch._C._current_graph_task_id() != -1 else PATIENCE

    def run() -> None:
        _inside.now = True
        current = torch.cuda.device(on) if on.type == "cuda" else nullcontext()
        locked = _lock.acquire(timeout=patience)
        try:
            if patience and not locked:
                raise RuntimeError(
                    "no kernel could be chosen: another thread has been choosing one for "
                    f"{patience / 60:.0f} minutes. Perhaps its kernel waits for this thread"
                )
            with current:
                result.set_result(function())
        except BaseException as e:
            result.set_exception(e)
        finally:
            if locked:
                _lock.release()

    threading.Thread(target=run, daemon=True).start()
    return result.result()


def outside_a_trace(function: F) -> F:
    """Let torch.compile call a function of constants while it traces, instead of tracing it.

    As torch.compiler.assume_constant_result, without its import of torch._dynamo (1 s).
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function
