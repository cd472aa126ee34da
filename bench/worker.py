"""The process in which one backend is measured.

It is started by process.py, reads a JSON object a line from its standard input, and answers each
with one line. The first names the job, the others are the job's rounds:

    {"job": "train", "name": "sdpa", ...}   ->  {"ok": {...}}
    {"warm_up": true}                       ->  {"ok": {...}}
    {"seconds": 1.0}                        ->  {"ok": {"ms": ...}}

or {"unavailable": [reasons]} where the backend may not run, {"failed": "...", "broken": ...} where
it failed, and whether the process is of any more use. What libraries print goes to standard error.
Nothing is ever replaced by another kernel here.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch

from attention import BackendUnavailable
from bench import machine
from core.runtime import describe
from core.settings import UserError

# Where each job stands; a worker imports its own only.
JOBS = {
    "machine": ("bench.machine", "MachineProbe"),
    "reference": ("bench.training", "Reference"),
    "train": ("bench.training", "Training"),
    "converge": ("bench.training", "Training"),
    "kernel": ("bench.kernels", "Kernels"),
    "decode": ("bench.decoding", "Decoding"),
    "proof": ("bench.proof", "Proof"),
}


class Handler:
    """Answers requests, one after the other: the first sets up the job."""

    job: Any = None
    where = ""

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            if self.job is None:
                self.job = begin(request)
                device = describe(torch.device(request["device"]))
                self.where = f"{device}, run {request['run']}"
                return {"ok": self.job.about}
            result = self.job.round(request)
            keep = getattr(self.job, "keeps_memory", False)
            result["held_bytes"] = machine.empty_cache(self.job.device, keep)
            result["machine"] = self.where  # where it was measured, and in which run
            return {"ok": result}
        except BackendUnavailable as e:
            return {"unavailable": [machine.reason(e)]}
        except UserError as e:
            return {"unavailable": [str(e)]}
        except Exception as e:  # whatever a kernel does, it becomes a row of the table
            return {"failed": first_line(e), "broken": self.broken()}

    def broken(self) -> bool:
        """Whether nothing more can be asked here: after some errors CUDA is lost to a process."""
        try:
            machine.reset_peak(self.job.device)  # also frees what the failed call held
        except Exception:  # or there is no job
            return True
        return False


def begin(job: dict[str, Any]) -> Any:
    """Set the job up."""
    if job["memory_limit"] and sys.platform == "linux":
        import resource

        # An allocation beyond it fails here, before Linux kills some process.
        resource.setrlimit(resource.RLIMIT_DATA, (job["memory_limit"],) * 2)
    if torch.device(job["device"]).index is not None:  # "cuda:1"
        torch.cuda.set_device(job["device"])
    module, kind = JOBS[job["job"]]
    return getattr(importlib.import_module(module), kind)(job)


def first_line(error: BaseException) -> str:
    """One line that tells what went wrong, in the words of who raised it."""
    text = str(error).strip() or "no message"
    name = type(error).__name__
    if name == "OutOfMemoryError" or "can't allocate memory" in text:
        name = "out of memory"
    return f"{name}: {text.splitlines()[0]}"


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    warnings.simplefilter("ignore")
    handler = Handler()
    for line in sys.stdin:
        channel.write(json.dumps(handler.answer(json.loads(line))) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
