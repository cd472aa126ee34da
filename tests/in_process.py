"""Workers of the bench within this process: the same requests and answers."""

from __future__ import annotations

import gc
import json
import time
from typing import Any

import pytest

from bench import rounds, workers


class InProcess(workers.Worker):
    """Requests and answers as JSON, but no process."""

    held_bytes = 0

    def __init__(self, work: str, job: Any, timeout: float, stop: Any) -> None:
        stop.check()
        self.began, self.stop, self.job = time.time(), stop, job
        self.about, self.warm = {}, set()
        job = json.loads(json.dumps({**job, "memory_limit": None}))  # it would be this process's
        self.handler = workers.Handler(work, job)
        self.answers: list[bytes] = []

    def send(self, request: Any) -> None:
        self.answers.append(self.handler.answer(json.loads(json.dumps(request))))

    def receive(self) -> dict[str, Any]:
        return self.result(json.loads(self.answers.pop(0)))

    def close(self) -> None:
        self.handler.work = None


def use(patch: pytest.MonkeyPatch, kind: Any = InProcess) -> None:
    """Use such workers in every mode."""
    gc.freeze()  # the bench collects garbage before each measurement: seconds in pytest
    for module in (rounds, workers):
        patch.setattr(module, "Worker", kind)
