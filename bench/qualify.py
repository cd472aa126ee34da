"""bench_mfu.py qualify: all modes in stages with shares of --minutes, as one record."""

from __future__ import annotations

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Container
from contextlib import ExitStack, closing, redirect_stdout
from dataclasses import replace
from pathlib import Path

import attention
import data
from attention.check import command as check
from attention.spec import DTYPES, Machine
from bench import ROOT, Json, kernel, record, report, rounds
from bench.candidates import LONGEST, Bench, Candidate, Ours
from bench.settings import MODES
from bench.workers import Failure, Stop, Worker
from core.settings import UserError
from data.prepare import PrepareConfig

GRAPHS = 120.0  # seconds, for CUDA graphs
TRAINED = 4
LENGTHS = (1024, 4096, 16384, 512, 2048, 8192)  # the most informative first
SMALL: Json = {  # learns something in a minute
    "n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "n_kv_head": None,
    "gradient_accumulation_steps": 1, "dropout": 0.0, "compile": False,
}  # fmt: skip

# Share of the time, mode, changed options.
STAGES: dict[str, tuple[float, str, Json]] = {
    "machine": (0.06, "kernel", {}),
    "proof": (0.17, "kernel", {}),
    "kernels": (0.22, "kernel", {"seconds": 0.5, "lengths": LENGTHS}),
    "training": (0.32, "train", {"profile": True, "seconds": 0.5}),
    "decode": (0.13, "decode", {}),
    "converge": (0.10, "converge", {"batch_size": 32, "steps": 100}),
}


def measure(name: str, bench: Bench, stop: Stop) -> Json:
    if name == "machine":
        return {"about": bench.machine["about"], "busy": bench.machine["busy"]}
    if name == "proof":
        return proof(bench, stop)
    fast = tuple(n for n in bench.backends if n not in LONGEST) or bench.backends
    names, config, V = fast[:TRAINED], bench.config, bench.vocab_size
    with tempfile.TemporaryDirectory() as folder:
        if name == "kernels":
            names = tuple(n for n in bench.backends if n == "manual" or n in fast)
        elif name == "decode":
            names = tuple(n for n in bench.backends if n == "sdpa" or n.startswith("flash_attn"))
            names = (*(names or fast[:1]), "paged")
            if bench.cuda and "static" in config.kv_caches and stop.left >= GRAPHS:
                config = replace(config, compile=True)
        elif name == "converge":
            names, paths = ((), ("bfloat16",)) if bench.cuda else (fast[:1], ())
            depth = max(SMALL["n_layer"], len(config.attention_window))
            changes = SMALL | text(Path(folder)) | {"n_layer": depth, "paths": paths}
            config, V = replace(config, **changes), changes["vocab_size"]
        own = replace(bench, backends=names, config=config, vocab_size=V)
        plans = report.MODES[own.mode].plans
        made = kernel.plans(own, shapes(own)) if name == "kernels" else plans(own)
        return record.complete(rounds.measure(own, made, stop))


def shapes(bench: Bench) -> list[Json]:
    """All lengths; at 4,096 tokens also other heads, and a window."""
    points = kernel.grid(bench)
    at = next(p for p in points if p["T"] == LENGTHS[1])
    H, width = at["H"], at["H"] * at["D"]
    others: list[Json] = [
        {"H": max(1, width // 128), "Hkv": max(1, width // 128), "D": 128},
        {"Hkv": H // 4 if H % 4 == 0 else 1},
        {"window": 1024},
    ]
    return [*points[:2], *(at | other for other in others if at | other != at), *points[2:]]


def text(folder: Path) -> Json:
    """Options of a training on the pages of docs/, prepared in the folder."""
    source, out = folder / "pages.txt", folder / "text"
    pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
    source.write_text("\n".join(pages), encoding="utf-8")
    with redirect_stdout(sys.stderr):
        data.prepare(PrepareConfig("shakespeare_char", str(source), out_dir=str(out)))
    V = data.read_meta(out)["vocab_size"]
    return {"vocab_size": V, "data_dir": str(folder), "dataset": out.name}


class Proof:
    """Tests of `python -m attention check`; an error may break the process."""

    def __init__(self, who: Candidate) -> None:
        _ = who.setup  # sets PyTorch's switches
        self.device = str(who.device)
        self.items = {(item.name, item.dtype): item for item in check.items(DTYPES)}

    def judge(self, request: Json) -> Json:
        backend, item = request["backend"], self.items[request["what"], request["dtype"]]
        here = Machine.here(self.device)
        answer = check.judge(attention.get(backend), item, here, self.device)
        return {"verdict": answer.verdict, "why": "; ".join(answer.why)}


def proof(bench: Bench, stop: Stop) -> Json:
    """All backends in turn, the most informative test first, until the time is up."""
    order = {"causality": 0, "dropout": 2, "determinism": 2, "caches": 2}  # the cases' features: 1
    others = ("bfloat16", "float16", "float32") if bench.cuda else ("float32",)
    dtypes = list(dict.fromkeys((bench.machine["dtype"], *others)))
    wanted = [
        item
        for dtype in dtypes
        for item in sorted(check.items([dtype]), key=lambda i: order.get(i.features[0], 1))
        if item.features[0] != "torch.compile"  # slow
    ]
    counts = {"right": 0, "wrong": 0, "refused": 0, "not_reached": len(wanted), "canary": None}
    names = [name for name in bench.backends if name not in bench.left_out]
    rows: list[Json] = [{"backend": name, **counts, "failures": []} for name in names]
    worker = None
    with ExitStack() as workers:
        for item, row in itertools.product(wanted, rows):
            what = {"what": item.name, "feature": item.features[0], "dtype": item.dtype}
            stop.watch(f"proof: {row['backend']}, {item.name}, {item.dtype}")
            try:
                stop.check()
                if worker is None:
                    worker = workers.enter_context(closing(Worker(Proof, Ours(bench), stop)))
                answer = worker.ask("judge", {"backend": row["backend"], **what})
            except Failure as e:
                if e.kind == "stopped":
                    break
                answer = {"verdict": "wrong", "why": str(e)}
                workers.close()
                worker = None
            row[answer["verdict"]] += 1
            row["not_reached"] -= 1
            if answer["verdict"] == "wrong":
                row["failures"].append(what | answer)
            if what["feature"] == "causality" and answer["verdict"] != "refused":
                row["canary"] = row["canary"] is not False and answer["verdict"] == "right"
    return {"dtypes": dtypes, "rows": rows}


def run(bench: Bench, given: Container[str], stop: Stop, save: rounds.Save) -> Json:
    config, free, names = bench.config, bench.machine["free_memory"], [*STAGES]
    if bench.cuda and "batch_size" not in given:  # what fits
        batch = 64 if free >= 70e9 else 16 if free >= 22e9 else 4
        config = replace(config, gradient_accumulation_steps=1, batch_size=batch)
        bench = replace(bench, config=config)
    wanted = [names[n - 1] for n in sorted({*config.stages})]
    missing, content = [*wanted], {**bench.part, "stages": []}
    for i, name in enumerate(wanted):
        share, mode, options = STAGES[name]
        box = stop.left * share / sum(STAGES[later][0] for later in wanted[i:])
        changed = config.to(MODES[mode], **options)
        own = replace(bench, mode=mode, config=changed, backends=ranked(content, bench))
        its = Stop(box / 60, stop.signals)
        entry: Json = {"name": name, "box_s": box, "why": "", "record": {}, "status": "done"}
        try:
            its.check()
            stop.tell(f"stage {1 + names.index(name)}, {name}: {box:.0f} s at most")
            entry["record"] = measure(name, own, its)
            if why := entry["record"].get("incomplete", its.why):
                entry |= {"status": "cut", "why": why}
        except (Failure, UserError) as e:
            stopped = isinstance(e, Failure) and e.kind in ("stopped", "skipped")
            entry |= {"status": "skipped" if stopped else "failed", "why": str(e)}
        content["stages"].append({**entry, "seconds": time.monotonic() - its.began})
        stop.why = stop.why or (its.why if its.code else "")
        if entry["status"] == "done":
            missing.remove(name)
        content |= {"complete": not missing, "incomplete": f"not done: {', '.join(missing)}"}
        if not missing:
            del content["incomplete"]
        save(content)
    return content


def ranked(content: Json, bench: Bench) -> tuple[str, ...]:
    """Backends by time at 1,024 tokens, if known; sdpa runs everywhere."""
    known = [r for r in report.rows_of(content, "kernels") if r["status"] == "ok"]
    at = (1, LENGTHS[0])
    ms = {r["backend"]: r["ms"] for r in known if (r["point"]["B"], r["point"]["T"]) == at}
    return tuple(sorted(bench.backends, key=lambda n: (ms.get(n, math.inf), n != "sdpa")))
