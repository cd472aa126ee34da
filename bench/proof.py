"""The tests of `python -m attention check` on this machine, one item a request.

All backends share one process and the references; after a crash a new process continues.
"""

from __future__ import annotations

import time
from typing import Any

import attention
from attention.check import command as check
from attention.spec import DTYPES, Machine
from bench import Json
from bench.candidates import Job
from bench.job import Bench
from bench.workers import Failure, Progress, Stop, Worker

Item = dict[str, str]  # a case or a property, its feature, and a dtype


class Proof:
    """The worker. Errors of a kernel are not caught here, since they may break the process."""

    def __init__(self, sent: Json) -> None:
        self.device = Job(sent).device
        self.items = {(item.name, item.spec.dtype): item for item in check.items(DTYPES)}
        self.about: Json = {}

    def round(self, request: Json) -> Json:
        """Return {"verdict": "right", "refused" or "wrong", "why": ...}."""
        name, item = request["backend"], self.items[request["what"], request["dtype"]]
        here = Machine.here(str(self.device))
        answer = check.judge(attention.get(name), item, here, str(self.device))
        return {"verdict": answer.verdict, "why": "; ".join(answer.why)}


def items(dtypes: list[str]) -> list[Item]:
    """Return the items for each backend, the most informative first: for each dtype the causality
    test, the cases, then the other properties without torch.compile, which is slow."""
    order = {"causality": 0, "dropout": 2, "determinism": 2, "caches": 2}  # the cases' features: 1
    return [
        {"what": item.name, "feature": item.features[0], "dtype": dtype}
        for dtype in dtypes
        for item in sorted(check.items([dtype]), key=lambda i: order.get(i.features[0], 1))
        if item.features[0] != "torch.compile"
    ]


def prove(bench: Bench[Any], dtypes: list[str], stop: Stop, progress: Progress) -> list[Json]:
    """Test until the time is up, always the backend that has used the least; return their rows."""
    wanted, job, timeout = items(dtypes), bench.job(), bench.config.timeout
    backends = [name for name in bench.backends if name not in bench.left_out]
    answers: dict[str, list[Json]] = {name: [] for name in backends}
    spent, worker = dict.fromkeys(backends, 0.0), None
    try:
        while waiting := [name for name in backends if len(answers[name]) < len(wanted)]:
            stop.check()
            name = min(waiting, key=spent.__getitem__)
            item, began = wanted[len(answers[name])], time.monotonic()
            progress.watch(f"proof: {name}, {item['what']}, {item['dtype']}")
            try:
                if worker is None:
                    worker = Worker("bench.proof:Proof", job, timeout, stop)
                answer = worker.ask({"backend": name, **item})
            except Failure as e:
                if e.kind == "stopped":
                    break
                answer = {"verdict": "wrong", "why": str(e)}
                if e.kind == "died" and worker is not None:
                    worker.close()
                    worker = None
            answers[name].append({**item, **answer})
            spent[name] += time.monotonic() - began
    except Failure:  # the bench was stopped
        pass
    finally:
        if worker is not None:
            worker.close()
    return [row(name, answers[name], len(wanted), spent[name]) for name in backends]


def row(name: str, answers: list[Json], wanted: int, seconds: float) -> Json:
    verdicts = [a["verdict"] for a in answers]
    causal = {a["verdict"] for a in answers if a["feature"] == "causality"} - {"refused"}
    return {
        "backend": name,
        **{verdict: verdicts.count(verdict) for verdict in ("right", "wrong", "refused")},
        "not_reached": wanted - len(answers),
        "canary": "wrong" not in causal if causal else None,
        "failures": [a for a in answers if a["verdict"] == "wrong"],
        "seconds": seconds,
    }
