"""Steps that all processes take, or none."""

from __future__ import annotations

from collections.abc import Callable

from safetensors import SafetensorError

from core.distributed import DistInfo
from core.settings import UserError, first_line

DISK = (OSError, RuntimeError, SafetensorError, UserError)  # torch and safetensors wrap disk errors


def together(distributed: DistInfo, step: Callable[[], object]) -> None:
    """Run step() and wait for the other processes, which must call this too.

    Raises:
        UserError: on all processes, if a disk or a file failed on one. Other exceptions pass.
    """
    failure, message = None, ""
    try:
        step()
    except Exception as e:
        failure, message = e, str(e) if isinstance(e, UserError) else disk_error(e)
    messages = distributed.gather(message)
    if failure is not None and not isinstance(failure, DISK):
        raise failure
    if len(set(messages)) > 1:
        named = [f"process {rank}: {m}" for rank, m in enumerate(messages) if m]
        raise UserError("; ".join(named)) from failure
    if message:
        raise UserError(message) from failure


def disk_error(error: BaseException) -> str:
    """The system's message, which torch and safetensors may hide behind their own."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__cause__ or cause.__context__
    return first_line(error)
