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

    def __init__(
        self,
        job: Any,
        timeout: float,
        command: Sequence[str] = (),
        stop: Any = None,
        started: Any = None,
    ) -> None:
        self.handler = worker.Handler()
        self.about = self.ask({**job, "memory_limit": None})  # it would be this process's

    def ask(self, request: Any) -> dict[str, Any]:
        answer = self.handler.answer(json.loads(json.dumps(request)))
        return process.result(json.loads(json.dumps(answer)))

    def close(self) -> None:
        self.handler.job = None


class NotStarted:
    """bench.process.Started's part, of which nothing is needed."""

    def __init__(self, command: Sequence[str] = ()) -> None: ...

    def close(self) -> None: ...


def use(patch: pytest.MonkeyPatch, kind: Any = InProcess) -> None:
    """Every mode of the bench takes such workers."""
    for module in (fitting, bench, process, proof):
        patch.setattr(module, "Worker", kind)
    patch.setattr(process, "Started", NotStarted)
    patch.setattr(training, "keep_freed_memory", lambda: None)  # malloc is this process's, too
