"""The tests of `python -m attention check` on this machine: the job "proof", one item a request.

All backends share one process and the references; after a crash a new process continues.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attention
from attention.check import command as check
from attention.spec import DTYPES, Machine
from bench import Json
from bench.job import Job
from bench.process import Failure

if TYPE_CHECKING:
    from bench.rounds import Run

Item = dict[str, str]  # a case or a property, its feature, and a dtype


class Proof:
    def __init__(self, sent: Json) -> None:
        self.device = Job(sent).device
        self.items = {(item.name, item.spec.dtype): item for item in check.items(DTYPES)}
        self.about: Json = {}

    def round(self, request: Json) -> Json:
        """Return {"verdict": "right", "refused" or "wrong", "why": ...}.

        Errors of a kernel are not caught here, since they may break the process.
        """
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


def prove(run: Run, dtypes: list[str]) -> list[Json]:
    """Test until the time is up, always the backend that has used the least; return their rows."""
    wanted, job = items(dtypes), run.job("proof")
    backends = [name for name in run.backends if name not in run.left_out]
    answers: dict[str, list[Json]] = {name: [] for name in backends}
    spent = dict.fromkeys(backends, 0.0)
    worker = None
    try:
        while waiting := [name for name in backends if len(answers[name]) < len(wanted)]:
            run.stop.check()
            name = min(waiting, key=spent.__getitem__)
            item, began = wanted[len(answers[name])], time.monotonic()
            run.progress.watch(f"proof: {name}, {item['what']}, {item['dtype']}")
            worker = worker or run.worker(job)
            try:
                answer = worker.ask({"backend": name, **item})
            except Failure as e:
                if e.kind == "stopped":
                    raise
                answer = {"verdict": "wrong", "why": str(e)}
                if e.kind == "died":
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
