"""Workers of the bench without torch: they start in a tenth of a second."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

NOTE = "nanoattn_note"  # environment: a file for the pids


def stuck(pipe: Any, errors: str) -> None:
    """A worker in the middle of a long step, with a child of its own."""
    from bench.worker import alone

    alone(errors)
    child = subprocess.Popen(["sleep", "1000"])
    note = Path(os.environ[NOTE])
    note.write_text(f"{os.getpid()} {child.pid}")
    note.rename(f"{note}.there")
    time.sleep(1000)


def scripted(pipe: Any, errors: str) -> None:
    """A worker that does as its job says, where it says anything; a line in `log` per answer."""
    os.setsid()
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    job = pipe.recv()

    def note(what: str) -> None:
        with Path(job["log"]).open("a", encoding="utf-8") as out:
            out.write(f"{job['name']} {what}\n")

    note("job")
    pipe.send({"unavailable": job["refuses"]} if "refuses" in job else {"ok": {"pid": os.getpid()}})
    while True:
        asked = pipe.recv()
        what = "warm" if asked.get("warm_up") else "round"
        note(f"{what} {asked['at']}")
        how = job.get(f"{what} {asked['at']}", "")
        if how == "dies":
            os.write(2, b"Fatal: bad address\n")
            os._exit(3)
        elif how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "hangs":
            time.sleep(1000)
        elif how in ("failed", "broken"):
            pipe.send({"failed": "RuntimeError: no", "broken": how == "broken"})
        else:
            pipe.send({"ok": {"ms": 1.0, "held_bytes": 6, "peak_bytes": 5}})
