"""Rows while they are measured, and what the user sees meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from bench import Json, report, tables
from bench.job import Bench
from bench.tables import Row
from bench.workers import Failure


class Progress:
    """Plain lines on stderr, with the seconds since the start."""

    def __init__(self) -> None:
        self.began = self.last = time.monotonic()

    def tell(self, line: str) -> None:
        print(f"[{time.monotonic() - self.began:4.0f} s] {line}", file=sys.stderr, flush=True)

    def watch(self, what: str) -> None:
        """Print at most every two seconds."""
        if time.monotonic() - self.last >= 2:
            self.last = time.monotonic()
            self.tell(what)


@dataclass
class Result:
    """A row: one candidate at one point."""

    name: str
    point: Json
    rounds: list[Json] = field(default_factory=list)
    about: Json = field(default_factory=dict)  # from the set-up and the warm-up
    failure: Failure = field(default_factory=lambda: Failure("stopped", "no round was measured"))
    ended: bool = False  # no further rounds
    memory: int = 0  # bytes at the peak

    def __str__(self) -> str:
        return tables.where(self.point, self.name)

    def fail(self, failure: Failure) -> None:
        """End it; if the bench was stopped, its rounds so far count."""
        self.ended = True
        if failure.kind != "stopped" or not self.rounds:
            self.failure, self.rounds = failure, []

    def row(self, mode: str) -> Row:
        status = "ok" if self.rounds else self.failure.kind.replace("died", "failed")
        row: Row = {"mode": mode, "backend": self.name, "point": self.point, "status": status}
        row |= {"rounds": [dict(r) for r in self.rounds], **self.about}
        row |= {"memory_bytes": self.memory} if self.memory else {}
        return row if self.rounds else {**row, "why": [self.failure.why]}


def content_of(bench: Bench[Any], results: Iterable[Result], why: str) -> Json:
    """Return the rows of a record, and whether it is complete; `why`: why it is not."""
    rows = [r.row(bench.mode) for r in results]
    none = sum(r["status"] == "stopped" for r in rows)
    why = why or ("the time limit was reached" if none else "")
    if not why:
        return {"rows": rows, "complete": True}
    planned = report.planned(bench.mode, bench.config.flat())
    few = sum(r["status"] == "ok" and len(r["rounds"]) < planned for r in rows)
    missing = [f"{none} of {len(rows)} rows were not measured"] if none else []
    missing += [f"{few} have fewer than {planned} rounds"] if few else []
    return {"rows": rows, "complete": False, "incomplete": "; ".join([why, *missing])}
