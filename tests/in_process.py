"""Workers of the bench within this process: the same jobs and answers."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from bench import process, rounds, worker


class InProcess:
    """bench.process.Worker, with jobs, requests and answers through JSON."""

    setup_s = 1.0

    def __init__(self, job: Any, timeout: float, stop: Any) -> None:
        stop.check()
        self.handler = worker.Handler()
        self.about = self.ask({**job, "memory_limit": None})  # it would be this process's

    def ask(self, request: Any) -> dict[str, Any]:
        answer = self.handler.answer(json.loads(json.dumps(request)))
        return process.result(json.loads(json.dumps(answer)))

    def close(self) -> None:
        self.handler.work = None


def use(patch: pytest.MonkeyPatch, kind: Any = InProcess) -> None:
    """Use such workers in every mode."""
    gc.freeze()  # the bench collects garbage before each measurement: seconds in pytest
    patch.setattr(rounds, "Worker", kind)
