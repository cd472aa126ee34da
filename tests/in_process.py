"""Workers of the bench within this process: the same jobs and answers."""

from __future__ import annotations

import gc
import json
from typing import Any

import pytest

from bench import bench, process, proof, training, worker


class InProcess:
    """bench.process.Worker, with requests and answers through JSON."""

    setup_s = 1.0

    def __init__(self, timeout: float, stop: Any = None) -> None:
        self.handler = worker.Handler()

    def begin(self, job: Any) -> InProcess:
        self.about = self.ask({**job, "memory_limit": None})  # of this process
        return self

    def ask(self, request: Any) -> dict[str, Any]:
        answer = self.handler.answer(json.loads(json.dumps(request)))
        return process.result(json.loads(json.dumps(answer)))

    def close(self) -> None:
        self.handler.job = None


def use(patch: pytest.MonkeyPatch, kind: Any = InProcess) -> None:
    """Use such workers in every mode."""
    gc.freeze()  # the bench collects garbage before each measurement: seconds in pytest
    for module in (bench, process, proof):
        patch.setattr(module, "Worker", kind)
    patch.setattr(training, "keep_freed_memory", lambda: None)
