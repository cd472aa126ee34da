"""What all processes do, or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core.distributed import DistInfo
from core.settings import UserError, first_line


def together(distributed: DistInfo, step: Callable[[], Any]) -> None:
    """Run step() on this process and wait for the others; all of them call this.

    Raises:
        UserError: on all processes, what failed and where, if it did on one. What the death of a
            process raises in the others passes as it is.
    """
    failure, what = None, ""
    try:
        step()
    except Exception as e:
        failure, what = e, str(e) if isinstance(e, UserError) else first_line(e)
    told: dict[str, list[int]] = {}
    for rank, why in enumerate(distributed.gather(what)):
        if why:
            told.setdefault(why, []).append(rank)
    if told:
        n = distributed.world_size
        said = (why if len(at) == n else f"{ranks(at)}: {why}" for why, at in told.items())
        raise UserError("; ".join(said)) from failure


def ranks(numbers: list[int]) -> str:
    """[0] -> "process 0"; [0, 2] -> "processes 0, 2"."""
    return f"process{'es' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
