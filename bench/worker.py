"""The process that measures one backend, and its protocol.

bench/process.py sends dicts through a pipe. The first sets up the job, the others are rounds:

    {"job": "train", "name": "sdpa", ...}   ->  {"ok": {...}}
    {"warm_up": True}                       ->  {"ok": {...}}
    {"seconds": 1.0}                        ->  {"ok": {"ms": ...}}

A backend that cannot run gives {"unavailable": [reasons]}, an error {"failed": "...", "broken":
True if the process cannot be used any more}.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import torch

from attention import BackendUnavailable
from bench import Json, machine
from core.runtime import describe
from core.settings import UserError

JOBS = {  # a worker imports only its own
    "machine": ("bench.machine", "MachineProbe"),
    "reference": ("bench.training", "Reference"),
    "train": ("bench.training", "Training"),
    "converge": ("bench.training", "Training"),
    "kernel": ("bench.kernels", "Kernels"),
    "decode": ("bench.decoding", "Decoding"),
    "proof": ("bench.proof", "Proof"),
}


class Handler:
    job: Any = None
    where = ""

    def answer(self, request: Json) -> Json:
        try:
            if self.job is None:
                self.job = begin(request)
                device = describe(torch.device(request["device"]))
                self.where = f"{device}, run {request['run']}"
                return {"ok": self.job.about}
            result = self.job.round(request)
            keep = getattr(self.job, "keeps_memory", False)
            result["held_bytes"] = machine.empty_cache(self.job.device, keep)
            result["machine"] = self.where
            return {"ok": result}
        except (BackendUnavailable, UserError) as e:
            return {"unavailable": [machine.reason(e)]}
        except Exception as e:  # any error of a kernel becomes a row of the table
            return {"failed": first_line(e), "broken": self.broken()}

    def broken(self) -> bool:
        """True if the job was not set up, or after an error that leaves CUDA unusable."""
        try:
            machine.reset_peak(self.job.device)  # also frees what the failed call held
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
    module, kind = JOBS[job["job"]]
    return getattr(importlib.import_module(module), kind)(job)


def first_line(error: BaseException) -> str:
    text = str(error).strip() or "no message"
    name = type(error).__name__
    if name == "OutOfMemoryError" or "can't allocate memory" in text:
        name = "out of memory"
    return f"{name}: {text.splitlines()[0]}"


def alone(errors: str) -> None:
    """Lead a process group that ends with its parent, even by kill -9; print to file `errors`."""
    os.setsid()

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=end_with_parent, daemon=True).start()
    log = os.open(errors, os.O_WRONLY | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)


def serve(pipe: Connection[Any, Any], errors: str) -> None:
    alone(errors)
    warnings.simplefilter("ignore")
    handler = Handler()
    with suppress(EOFError):
        while True:
            pipe.send(handler.answer(pipe.recv()))
