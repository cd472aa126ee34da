"""A candidate of the bench that does as its job says: {"warm p": "dies"}; "again": when it is built
for the second time. A line in `log` for each request, and for each time that it is built."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from core.settings import UserError

HELD, PEAK = 6, 5  # bytes


class Stub:
    """In a process of its own, or in the test's (Scripted in test_bench_stop.py)."""

    device = torch.device("cpu")

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.about = job, {"title": "stub"}
        built = self.noted("job")
        self.does("again" if built == 2 else "job")

    def noted(self, what: str) -> int:
        """Note what is done; return how often it was."""
        with Path(self.job["log"]).open("a+", encoding="utf-8") as log:
            log.write(f"{self.job['name']} {what}\n")
            log.seek(0)
            return log.read().count(f"{self.job['name']} {what}\n")

    def does(self, what: str) -> None:
        how = self.job.get(what, "")
        if how == "dies":
            os.write(2, b"Fatal: bad address\n")
            os._exit(3)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how in ("hangs", "slow"):
            time.sleep(1000 if how == "hangs" else 0.5)
        elif how == "refuses":
            raise UserError("too old")
        elif how == "fails":
            raise RuntimeError("no")
        elif how == "has a child":
            child = subprocess.Popen(["sleep", "1000"])
            note = Path(self.job["pids"])
            note.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
            note.with_suffix(".part").rename(note)
            time.sleep(1000)

    def round(self, request: dict[str, Any]) -> dict[str, Any]:
        what = f"{'warm' if request.get('warm_up') else 'round'} {request['at']}"
        self.noted(what)
        self.does(what)
        return {"ms": 1.0, "peak_bytes": PEAK}

    warm_up = round
