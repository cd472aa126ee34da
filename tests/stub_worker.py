"""Workers of the bench without torch: python stub_worker.py [stuck]. They start in 0.1 s.

A worker does as its job says: {"warm p": "dies"}; "again": in its second process. A line in `log`
for each answer.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PIDS = "NANOATTN_TEST_PIDS"  # environment: a file for the pids of a worker and its child


def answer(request: dict[str, Any], job: dict[str, Any]) -> dict[str, Any]:
    what = "job"
    if request is not job:
        what = f"{'warm' if request.get('warm_up') else 'round'} {request['at']}"
    with Path(job["log"]).open("a+", encoding="utf-8") as log:
        log.write(f"{job['name']} {what}\n")
        log.seek(0)
        if request is job and log.read().count(f"{job['name']} job\n") == 2:
            what = "again"
    how = job.get(what, "")
    if how == "dies":
        os.write(2, b"Fatal: bad address\n")
        os._exit(3)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how in ("hangs", "slow"):
        time.sleep(1000 if how == "hangs" else 0.9)
    elif how == "refuses":
        return {"unavailable": ["too old"]}
    elif how == "fails":
        return {"failed": "RuntimeError: no", "broken": False}
    return {"ok": {"ms": 1.0, "held_bytes": 6, "peak_bytes": 5}}


def stuck() -> None:
    """In the middle of a long step, with a child of its own."""
    from bench.worker import lines

    lines()
    child = subprocess.Popen(["sleep", "1000"])
    note = Path(os.environ[PIDS])
    note.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
    note.with_suffix(".part").rename(note)
    time.sleep(1000)


def main() -> None:
    job = json.loads(sys.stdin.readline())
    request = job
    while True:
        print(json.dumps(answer(request, job)), flush=True)
        request = json.loads(sys.stdin.readline())


if __name__ == "__main__":
    stuck() if sys.argv[1:] else main()
