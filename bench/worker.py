"""The process in which one backend is measured.

It is started by process.py, reads a JSON object a line from its standard input, and answers each
with one line. The first names the job, the others are the job's rounds:

    {"job": "train", "contender": "sdpa", ...}   ->  {"ok": {...}}
    {"warm_up": true}                            ->  {"ok": {...}}
    {"seconds": 1.0}                             ->  {"ok": {"ms": ...}}

or {"unavailable": [reasons]} where the backend may not run, {"failed": "...", "broken": ...} where
it failed, and whether it is of any more use. What libraries print goes to standard error. Nothing
is ever replaced by another kernel here.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

sys.path[0] = str(Path(__file__).resolve().parent.parent)

import torch  # noqa: E402

from attention import BackendUnavailable  # noqa: E402
from bench import machine  # noqa: E402
from core.settings import UserError  # noqa: E402


def begin(job: dict[str, Any]) -> Any:
    """The job, set up; jobs import what they need, so that none pays for another's."""
    if job["memory_limit"]:
        machine.limit_memory(job["memory_limit"])
    if torch.device(job["device"]).index is not None:  # "cuda:1"
        torch.cuda.set_device(job["device"])
    match job["job"]:
        case "machine":
            return machine.Scout(job)
        case "reference":
            from bench.training import Reference

            return Reference(job)
        case "train" | "converge":
            from bench.training import Training

            return Training(job)
        case "kernel":
            from bench.kernels import Kernels

            return Kernels(job)
        case "decode":
            from bench.decoding import Decoding

            return Decoding(job)
    raise AssertionError(job["job"])


def words(error: BaseException) -> str:
    """One line that tells what went wrong, in the words of who raised it."""
    text = str(error).strip() or "no message"
    first = next(line for line in text.splitlines() if line.strip())
    name = type(error).__name__
    out_of_memory = name == "OutOfMemoryError" or "can't allocate memory" in text
    return f"out of memory: {first}" if out_of_memory else f"{name}: {first}"


def broken(job: Any) -> bool:
    """Whether nothing more can be asked here: after some errors CUDA is lost to a process."""
    if job is None:
        return True
    try:
        machine.reset_peak(job.device)  # what the failed call held is freed, too
    except Exception:
        return True
    return False


def main() -> None:
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not get between the answers
    warnings.simplefilter("ignore")
    job: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any]
        try:
            if job is None:
                job = begin(request)
                answer = {"ok": job.about}
            else:
                answer = {"ok": job.round(request)}
                answer["ok"]["held_bytes"] = machine.give_back(job.device)
        except BackendUnavailable as e:
            answer = {"unavailable": [machine.reason(e)]}
        except UserError as e:
            answer = {"unavailable": [str(e)]}
        except Exception as e:  # whatever a kernel does, it becomes a row of the table
            answer = {"failed": words(e), "broken": broken(job)}
        channel.write(json.dumps(answer) + "\n")
        channel.flush()


if __name__ == "__main__":
    main()
