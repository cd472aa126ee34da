"""bench_mfu.py qualify: all modes in stages with shares of --minutes, as one record."""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Container
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import attention
import data
from attention.check import command as check
from attention.spec import DTYPES, Machine
from bench import ROOT, Json, kernel, record, report, rounds
from bench.candidates import Job
from bench.job import LONGEST, Bench, Plan
from bench.settings import MODES
from bench.workers import Failure, Stop, Worker
from core.settings import UserError
from data.prepare import PrepareConfig

MINUTES = 9.0
GRAPHS = 120.0  # seconds, for CUDA graphs
TRAINED = 4
LENGTHS = (1024, 4096, 16384, 512, 2048, 8192)  # the most informative first
# Learns something in a minute.
SMALL: Json = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "n_kv_head": None}
SMALL |= {"gradient_accumulation_steps": 1, "dropout": 0.0, "compile": False}

# Share of the time, mode, changed options.
STAGES: dict[str, tuple[float, str, Json]] = {
    "machine": (0.06, "kernel", {}),
    "proof": (0.17, "kernel", {}),
    "kernels": (0.22, "kernel", {"seconds": 0.5, "lengths": LENGTHS}),
    "training": (0.32, "train", {"profile": True, "seconds": 0.5}),
    "decode": (0.13, "decode", {}),
    "converge": (0.10, "converge", {"batch_size": 32, "steps": 100}),
}


def measure(name: str, bench: Bench[Any], stop: Stop) -> Json:
    fast = tuple(n for n in bench.backends if n not in LONGEST) or bench.backends
    names, config = fast[:TRAINED], bench.config
    if name == "machine":
        return {"about": bench.machine["about"], "busy": bench.machine["busy"]}
    if name == "proof":
        return proof(bench, stop)
    if name == "converge":
        return convergence(bench, fast[:1], stop)
    if name == "kernels":
        names = tuple(n for n in bench.backends if n == "manual" or n in fast)  # compares machines
    elif name == "decode":
        names = tuple(n for n in bench.backends if n == "sdpa" or n.startswith("flash_attn"))
        names = (*(names or fast[:1]), "paged")
        if bench.cuda and stop.left >= GRAPHS:
            config = replace(config, compile=True)
    bench = replace(bench, backends=names, config=config)
    made = kernels(bench) if name == "kernels" else report.MODES[bench.mode].plans(bench)
    return record.complete(rounds.measure(bench, made, stop))


def kernels(bench: Bench[Any]) -> list[Plan]:
    """All lengths; at 4,096 tokens also other heads, and a window."""
    points = kernel.grid(bench)
    at = next(p for p in points if p["T"] == LENGTHS[1])
    H, width = at["H"], at["H"] * at["D"]
    others: list[Json] = [
        {"H": max(1, width // 128), "Hkv": max(1, width // 128), "D": 128},
        {"Hkv": H // 4 if H % 4 == 0 else 1},
        {"window": 1024},
    ]
    more = [at | other for other in others if at | other != at]
    return kernel.plans(bench, [*points[:2], *more, *points[2:]])


def convergence(bench: Bench[Any], names: tuple[str, ...], stop: Stop) -> Json:
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "pages.txt", Path(folder) / "text"
        pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
        source.write_text("\n".join(pages), encoding="utf-8")
        with redirect_stdout(sys.stderr):
            text = PrepareConfig(out_dir=str(out), source=str(source))
            data.prepare("shakespeare_char", text)
        V = data.read_meta(out)["vocab_size"]
        how = {**SMALL, "vocab_size": V, "data_dir": folder, "dataset": out.name}
        how["n_layer"] = max(SMALL["n_layer"], len(bench.config.attention_window))
        if bench.cuda:
            how |= {"paths": ("bfloat16",), "backends": ("all",)}
            names = ()
        config = replace(bench.config, **how)
        bench = replace(bench, vocab_size=V, config=config, backends=names)
        plans = report.MODES["converge"].plans(bench)
        return record.complete(rounds.measure(bench, plans, stop))


# --- the proof ---


class Proof:
    """Tests of `python -m attention check`; an error may break the process."""

    def __init__(self, sent: Json) -> None:
        self.device = Job(sent).device
        self.items = {(item.name, item.spec.dtype): item for item in check.items(DTYPES)}
        self.about: Json = {}

    def round(self, request: Json) -> Json:
        name, item = request["backend"], self.items[request["what"], request["dtype"]]
        here = Machine.here(str(self.device))
        answer = check.judge(attention.get(name), item, here, str(self.device))
        return {"verdict": answer.verdict, "why": "; ".join(answer.why)}


def items(dtypes: list[str]) -> list[dict[str, str]]:
    """Tests, the most informative first, without torch.compile's, which are slow."""
    order = {"causality": 0, "dropout": 2, "determinism": 2, "caches": 2}  # the cases' features: 1
    return [
        {"what": item.name, "feature": item.features[0], "dtype": dtype}
        for dtype in dtypes
        for item in sorted(check.items([dtype]), key=lambda i: order.get(i.features[0], 1))
        if item.features[0] != "torch.compile"
    ]


def proof(bench: Bench[Any], stop: Stop) -> Json:
    """Test until the time is up, next the backend that used least."""
    others = ("bfloat16", "float16", "float32") if bench.cuda else ("float32",)
    dtypes = list(dict.fromkeys((bench.machine["dtype"], *others)))
    wanted, worker = items(dtypes), None
    answers: dict[str, list[Json]] = {n: [] for n in bench.backends if n not in bench.left_out}
    spent = dict.fromkeys(answers, 0.0)
    try:
        while waiting := [name for name in answers if len(answers[name]) < len(wanted)]:
            name = min(waiting, key=spent.__getitem__)
            item, began = wanted[len(answers[name])], time.monotonic()
            stop.watch(f"proof: {name}, {item['what']}, {item['dtype']}")
            try:
                stop.check()
                how = bench.job(), bench.config.timeout, stop
                worker = worker or Worker("bench.qualify:Proof", *how)
                answer = worker.ask({"backend": name, **item})
            except Failure as e:
                if e.kind == "stopped":
                    break
                answer = {"verdict": "wrong", "why": str(e)}
                if worker and e.kind == "died":
                    worker.close()
                    worker = None
            answers[name].append({**item, **answer})
            spent[name] += time.monotonic() - began
    finally:
        if worker:
            worker.close()
    rows: list[Json] = []
    for name, found in answers.items():
        verdicts = [a["verdict"] for a in found]
        causal = {a["verdict"] for a in found if a["feature"] == "causality"} - {"refused"}
        counts = {verdict: verdicts.count(verdict) for verdict in ("right", "wrong", "refused")}
        rows.append({"backend": name, **counts, "not_reached": len(wanted) - len(found)})
        rows[-1]["canary"] = "wrong" not in causal if causal else None
        rows[-1]["failures"] = [a for a in found if a["verdict"] == "wrong"]
        rows[-1]["seconds"] = spent[name]
    return {"dtypes": dtypes, "rows": rows}


# --- the run ---


def run(bench: Bench[Any], about: Json, given: Container[str], stop: Stop,
        folder: Callable[[], Path]) -> Json:  # fmt: skip
    config, free, names = bench.config, bench.machine["free_memory"], [*STAGES]
    if bench.cuda and "batch_size" not in given:  # what fits
        batch = 64 if free >= 70e9 else 16 if free >= 22e9 else 4
        config = replace(config, gradient_accumulation_steps=1, batch_size=batch)
        bench = replace(bench, config=config)
    end = time.monotonic() + 60 * (config.minutes or MINUTES)
    missing = [names[n - 1] for n in sorted({*config.stages})]
    content: Json = {**about, **bench.part, "stages": []}
    for i, name in enumerate(wanted := [*missing]):
        (share, mode, options), began = STAGES[name], time.monotonic()
        box = (end - began) * share / sum(STAGES[later][0] for later in wanted[i:])
        changed = config.to(MODES[mode], **options)
        own = replace(bench, mode=mode, config=changed, backends=ranked(content, bench))
        stop.tell(f"stage {1 + names.index(name)}, {name}: {max(box, 0):.0f} s at most")
        its = Stop(began + box, stop.signals)
        entry: Json = {"name": name, "box_s": box, "why": "", "record": {}, "status": "done"}
        try:
            its.check()
            entry["record"] = measure(name, own, its)
            if why := entry["record"].get("incomplete", its.why):
                entry |= {"status": "cut", "why": why}
        except (Failure, UserError) as e:
            stopped = isinstance(e, Failure) and e.kind in ("stopped", "skipped")
            entry |= {"status": "skipped" if stopped else "failed", "why": str(e)}
        content["stages"].append({**entry, "seconds": time.monotonic() - began})
        stop.why = stop.why or (its.why if its.code else "")
        if entry["status"] == "done":
            missing.remove(name)
        content |= {"complete": not missing, "incomplete": f"not done: {', '.join(missing)}"}
        if not missing:
            del content["incomplete"]
        content = record.complete(content)
        record.write(folder(), content, whole=False)
    return content


def ranked(content: Json, bench: Bench[Any]) -> tuple[str, ...]:
    """Backends by time at 1,024 tokens, if known; sdpa runs everywhere."""
    known = [r for r in rows_of(content, "kernels") if r["status"] == "ok"]
    at = (1, LENGTHS[0])
    ms = {r["backend"]: r["ms"] for r in known if (r["point"]["B"], r["point"]["T"]) == at}
    return tuple(sorted(bench.backends, key=lambda n: (ms.get(n, math.inf), n != "sdpa")))


def rows_of(content: Json, name: str) -> list[Json]:
    return [r for s in content["stages"] if s["name"] == name for r in s["record"].get("rows", ())]


def failed(content: Json) -> bool:
    wrong = any(row["wrong"] for row in rows_of(content, "proof"))
    return wrong or not any(stage["status"] == "done" for stage in content["stages"])
