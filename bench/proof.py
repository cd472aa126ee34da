"""The matrix and the canary on the machine at hand: the job "proof", one case a request.

All backends share one process, so that the truth of a case is computed once. A backend that breaks
it, by a bad address on CUDA say, is noted, and another process continues with the others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import attention
from attention import matrix
from attention.spec import Machine
from bench.job import Job
from bench.process import Failure, Stop, Worker

Item = dict[str, str]  # of the job "proof": a case or a phase of the canary, and a dtype
CASES = {case.name: case for case in matrix.CASES}


class Proof:
    """Judges one backend at one case."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.job = Job(told)
        self.device = self.job.device
        self.here = Machine.here(str(self.device), attention.packages())
        self.about = {"cases": len(CASES)}

    def round(self, request: dict[str, Any]) -> dict[str, Any]:
        """{"verdict": "right", "refused" or "wrong", "why": ...}; what a kernel itself raises is
        not caught, since it may have broken the process."""
        backend, dtype = attention.get(request["backend"]), request["dtype"]
        case, phase = CASES.get(request.get("case", "")), request.get("phase", "")
        specs = [case.spec(dtype)] if case else list(matrix.canaries(dtype, phase))
        may = [spec for spec in specs if not backend.why_not(spec, self.here)]
        if not may:
            why = "; ".join(backend.why_not(specs[0], self.here))
            return {"verdict": "refused", "why": why}
        try:
            if case:
                matrix.check(backend, case, dtype, str(self.device))
            else:
                for spec in may:
                    matrix.canary(backend, spec, phase, str(self.device), few=True)
        except AssertionError as e:
            return {"verdict": "wrong", "why": str(e)}
        return {"verdict": "right", "why": ""}


def items(dtypes: list[str]) -> list[Item]:
    """What each backend is tested on, the most informative first: the canary in each phase, the
    cases in the run's dtype, then both in the others."""
    return [
        item
        for dtype in dtypes
        for item in (
            *({"phase": phase, "dtype": dtype} for phase in matrix.PHASES),
            *({"case": case.name, "dtype": dtype} for case in matrix.in_order()),
        )
    ]


def prove(
    job: dict[str, Any],
    backends: list[str],
    dtypes: list[str],
    stop: Stop,
    timeout: float,
    watch: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Test until all is done or the time is up. The backend that has used the least time is next,
    so that one that compiles for minutes takes none from the others.

    Args:
        stop: when to end.

    Returns:
        a row a backend: how many cases were right, wrong, refused and not reached, the canary, and
        what was wrong.
    """
    asked = items(dtypes)
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in backends}
    spent = dict.fromkeys(backends, 0.0)
    worker = None
    try:
        while waiting := [name for name in backends if len(answers[name]) < len(asked)]:
            stop.check()
            name = min(waiting, key=spent.__getitem__)
            item, began = asked[len(answers[name])], time.monotonic()
            what = item.get("case") or f"canary, {item['phase']}"
            watch(f"proof: {name}, {what}, {item['dtype']}")
            try:
                worker = worker or Worker(job, timeout, stop=stop)
                answer = worker.ask({"backend": name, **item})
            except Failure as e:
                if e.kind == "stopped":
                    raise
                answer = {"verdict": "wrong", "why": str(e)}
                if e.kind == "died":
                    if worker is None:  # no process can be started: give up
                        raise
                    worker.close()
                    worker = None
            answers[name].append({**item, **answer})
            spent[name] += time.monotonic() - began
    except Failure as e:
        if e.kind != "stopped":
            raise
    finally:
        if worker is not None:
            worker.close()
    return [row(name, answers[name], len(asked), spent[name]) for name in backends]


def row(name: str, answers: list[dict[str, Any]], asked: int, seconds: float) -> dict[str, Any]:
    """A backend's answers in one row."""
    by = {v: [a for a in answers if a["verdict"] == v] for v in ("right", "wrong", "refused")}
    heard = [a["verdict"] for a in answers if "phase" in a and a["verdict"] != "refused"]
    return {
        "backend": name,
        **{verdict: len(found) for verdict, found in by.items()},
        "not_reached": asked - len(answers),
        "canary": "wrong" not in heard if heard else None,
        "failures": by["wrong"],
        "reached": [f"{a.get('case') or a['phase']} {a['dtype']}" for a in answers],
        "seconds": seconds,
    }
