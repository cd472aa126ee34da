"""Workers of the bench without processes: the same jobs and answers, in this one, at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from bench import bench, fitting, process, proof, training, worker


class InProcess:
    """bench.process.Worker's part; what goes in and out is JSON here too."""

    setup_s = 1.0

    def __init__(self, timeout: float, stop: Any = None, command: Sequence[str] = ()) -> None:
        self.handler = worker.Handler()

    def begin(self, job: Any) -> InProcess:
        self.about = self.ask({**job, "memory_limit": None})  # it would be this process's
        return self

    def ask(self, request: Any) -> dict[str, Any]:
        answer = self.handler.answer(json.loads(json.dumps(request)))
        return process.result(json.loads(json.dumps(answer)))

    def close(self) -> None:
        self.handler.job = None


def use(patch: pytest.MonkeyPatch, kind: Any = InProcess) -> None:
    """Every mode of the bench takes such workers."""
    for module in (fitting, bench, process, proof):
        patch.setattr(module, "Worker", kind)
    patch.setattr(training, "keep_freed_memory", lambda: None)  # malloc is this process's, too
