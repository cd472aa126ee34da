"""The process that measures one candidate: python -m bench.worker.

Each line of stdin is a JSON object, each line of stdout the answer. The first is the job, all later
ones are requests to it:

    {"job": "train", "name": "sdpa", "train": {...}, ...}  ->  {"ok": {"title": ...}}
    {"warm_up": true}                                      ->  {"ok": {"kernels": [...], ...}}
    {"seconds": 1.0}                                       ->  {"ok": {"ms": ...}}

A candidate that cannot run gives {"unavailable": [reasons]}, an error {"failed": "...", "broken":
true if the process cannot be used any more}. What libraries print goes to stderr.
"""

from __future__ import annotations

import importlib
import json
import os
import queue
import signal
import sys
import threading
import warnings
from typing import Any

import torch

from attention import BackendUnavailable
from bench import Json, machine
from core.settings import UserError

WORK = {  # a worker imports only its own
    "machine": ("bench.machine", "Description"),
    "reference": ("bench.train", "Reference"),
    "train": ("bench.train", "Training"),
    "converge": ("bench.train", "Training"),
    "kernel": ("bench.kernel", "Kernels"),
    "decode": ("bench.decode", "Decoding"),
    "proof": ("bench.proof", "Proof"),
}


class Handler:
    work: Any = None

    def answer(self, request: Json) -> Json:
        try:
            if self.work is None:
                self.work = begin(request)
                return {"ok": self.work.about}
            result = self.work.round(request)
            keep = getattr(self.work, "keeps_memory", False)
            result["held_bytes"] = machine.empty_cache(self.work.device, keep)
            return {"ok": result}
        except (BackendUnavailable, UserError) as e:
            return {"unavailable": [machine.reason(e)]}
        except Exception as e:  # any error of a kernel becomes a row of the table
            return {"failed": machine.first_line(e), "broken": self.broken()}

    def broken(self) -> bool:
        """True if the job was not set up, or after an error that leaves CUDA unusable."""
        try:
            machine.reset_peak(self.work.device)  # also frees what the failed call held
        except Exception:
            return True
        return False


def begin(job: Json) -> Any:
    if job["memory_limit"] and sys.platform == "linux":
        import resource

        # An allocation beyond the limit fails here, before Linux kills some process.
        resource.setrlimit(resource.RLIMIT_DATA, (job["memory_limit"],) * 2)
    if torch.device(job["device"]).index is not None:  # "cuda:1"
        torch.cuda.set_device(job["device"])
    module, kind = WORK[job["job"]]
    return getattr(importlib.import_module(module), kind)(job)


def lines() -> queue.Queue[str]:
    """Return the lines of stdin as they come. At its end, even by kill -9 of the parent, this
    process ends with all that it started."""
    found = queue.Queue[str]()

    def read() -> None:
        for line in sys.stdin:
            found.put(line)
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    return found


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    requests, handler = lines(), Handler()
    while True:
        answer = handler.answer(json.loads(requests.get()))
        answers.write(json.dumps(answer, allow_nan=False) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
