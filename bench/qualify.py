"""bench_mfu.py qualify: all modes in a row on a new machine, as one record.

Six stages at fixed sizes, each with its share of --minutes. The record is rewritten after each.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Container
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import data
from bench import ROOT, Json, converge, decode, kernel, proof, record, report, rounds, train
from bench.job import LONGEST, Bench
from bench.settings import MODES, Qualify
from bench.workers import Failure, Progress, Stop
from core.settings import UserError
from data.prepare import PrepareConfig

MINUTES = 9.0
GRAPHS = 120.0  # seconds, enough to compile the decode steps and record CUDA graphs
TRAINED = 4  # backends of the training stage
POINTS, ALL_POINTS = 8, 20  # points of the grid; minutes from which all are measured
# A model for converge that learns something in a minute.
SMALL: Json = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64, "n_kv_head": None}
SMALL |= {"gradient_accumulation_steps": 1, "dropout": 0.0, "compile": False}


@dataclass(frozen=True)
class Stage:
    """A stage: its share of the time, its mode, and what it changes in the options."""

    share: float
    measure: Callable[[Bench[Any], Stop, Progress], Json]
    mode: str = "kernel"
    options: Json = field(default_factory=dict)


def grid(cuda: bool) -> list[Json]:
    """Return the points of attention alone, the most informative first.

    A GPU has the width and tokens of the FlashAttention papers, others width 256 and one sequence.
    """
    lengths, widths = (1024, 4096, 16384, 512, 2048, 8192), (64, 128)
    sizes = [(T, D, None, 1) for T in lengths for D in widths]
    more = [(4096, 64, 1024, 1), (4096, 128, None, 4), (16384, 128, 1024, 1)]
    made = []
    for T, D, window, group in [*sizes[:4], *more[:2], *sizes[4:], more[2]]:
        H, B = ((2048 if cuda else 256) // D, max(1, 16384 // T) if cuda else 1)
        Hkv = max(1, H // group)
        made.append({"B": B, "T": T, "H": H, "Hkv": Hkv, "D": D, "window": window})
    return made


def fast(bench: Bench[Any]) -> tuple[str, ...]:
    """Return the backends without the slow ones, if there are others."""
    return tuple(n for n in bench.backends if n not in LONGEST) or bench.backends


# --- the stages ---


def machine(bench: Bench[Any], stop: Stop, progress: Progress) -> Json:
    return {"about": bench.machine["about"], "busy": bench.machine["busy"]}


def numbers(bench: Bench[Any], stop: Stop, progress: Progress) -> Json:
    others = ("bfloat16", "float16", "float32") if bench.cuda else ("float32",)
    dtypes = list(dict.fromkeys((bench.machine["dtype"], *others)))
    return {"dtypes": dtypes, "rows": proof.prove(bench, dtypes, stop, progress)}


def kernels(bench: Bench[Any], stop: Stop, progress: Progress) -> Json:
    points = grid(bench.cuda)[: POINTS if (bench.config.minutes or MINUTES) < ALL_POINTS else None]
    # manual compares machines
    names = tuple(n for n in bench.backends if n == "manual" or n in fast(bench))
    bench = replace(bench, backends=names)
    return record.complete(rounds.measure(bench, kernel.plans(bench, points), stop, progress))


def training(bench: Bench[Any], stop: Stop, progress: Progress) -> Json:
    bench = replace(bench, backends=fast(bench)[:TRAINED])
    return record.complete(rounds.measure(bench, train.plans(bench), stop, progress))


def decoding(bench: Bench[Any], stop: Stop, progress: Progress) -> Json:
    names = [n for n in bench.backends if n == "sdpa" or n.startswith("flash_attn")]
    if bench.cuda and stop.left >= GRAPHS:
        bench = replace(bench, config=replace(bench.config, compile=True))
    bench = replace(bench, backends=(*(names or fast(bench)[:1]), "paged"))
    return record.complete(rounds.measure(bench, decode.plans(bench), stop, progress))


def convergence(bench: Bench[Any], stop: Stop, progress: Progress) -> Json:
    """Train a small model on the text of docs/, by the fastest backend and a plain one."""
    with tempfile.TemporaryDirectory() as folder:
        pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
        source = Path(folder) / "pages.txt"
        source.write_text("\n".join(pages), encoding="utf-8")
        text = PrepareConfig(out_dir=f"{folder}/text", source=str(source))
        with redirect_stdout(sys.stderr):
            data.prepare("shakespeare_char", text)
        V = data.read_meta(Path(folder) / "text")["vocab_size"]
        how = {**SMALL, "vocab_size": V, "data_dir": folder, "dataset": "text"}
        how["n_layer"] = max(SMALL["n_layer"], len(bench.config.attention_window))
        if bench.cuda:  # float32 and bfloat16; on a CPU the fused kernels
            how |= {"paths": ("bfloat16",), "backends": ("all",)}
        names = () if bench.cuda else fast(bench)[:1]
        config = replace(bench.config, **how)
        bench = replace(bench, vocab_size=V, config=config, backends=names)
        return record.complete(rounds.measure(bench, converge.plans(bench), stop, progress))


STAGES = {
    "machine": Stage(0.06, machine),
    "proof": Stage(0.17, numbers),
    "kernels": Stage(0.22, kernels, "kernel", {"seconds": 0.5}),
    "training": Stage(0.32, training, "train", {"profile": True, "seconds": 0.5}),
    "decode": Stage(0.13, decoding, "decode"),
    "converge": Stage(0.10, convergence, "converge", {"batch_size": 32, "steps": 100}),
}


def run(
    bench: Bench[Qualify], about: Json, given: Container[str], stop: Stop, progress: Progress,
    folder: Callable[[], Path],
) -> Json:  # fmt: skip
    """Run the requested stages; return the record.

    `about` has the record's entries about the command, `given` the names of the user's settings;
    `folder` makes and returns the record's folder.
    """
    config, free, names = bench.config, bench.machine["free_memory"], [*STAGES]
    if bench.cuda and "batch_size" not in given:  # as many sequences as fit, in one micro-batch
        batch = 64 if free >= 70e9 else 16 if free >= 22e9 else 4
        config = replace(config, gradient_accumulation_steps=1, batch_size=batch)
        bench = replace(bench, config=config)
    end = time.monotonic() + 60 * (config.minutes or MINUTES)
    wanted = [names[n - 1] for n in sorted(set(config.stages))]
    content: Json = {**about, **bench.part, "stages": []}
    for i, name in enumerate(wanted):
        stage, now = STAGES[name], time.monotonic()
        box = (end - now) * stage.share / sum(STAGES[later].share for later in wanted[i:])
        own = replace(
            bench,
            mode=stage.mode,
            config=config.to(MODES[stage.mode], **stage.options),
            backends=ranked(content, bench.backends),
        )
        progress.tell(f"stage {1 + names.index(name)}, {name}: {max(box, 0):.0f} s at most")
        its = Stop(now + box, stop.signals)
        content["stages"].append(attempt(name, own, its, progress, box))
        stop.why = stop.why or (its.why if its.code else "")
        done = {s["name"] for s in content["stages"] if s["status"] == "done"}
        missing = [name for name in names if name not in done]
        content |= {"complete": not missing, "answers": conclusions(content)}
        content.pop("incomplete", None)
        content |= {"incomplete": f"not done: {', '.join(missing)}"} if missing else {}
        content = record.sealed(content)
        record.write(folder(), content, whole=False)
    return content


def attempt(name: str, bench: Bench[Any], stop: Stop, progress: Progress, box: float) -> Json:
    """Run a stage and return its part of the record."""
    entry: Json = {"name": name, "box_s": box, "why": "", "record": {}}
    began = time.monotonic()
    try:
        stop.check()
        entry["record"] = STAGES[name].measure(bench, stop, progress)
        why = entry["record"].get("incomplete", stop.why)
        entry |= {"status": "cut" if why else "done", "why": why}
    except (Failure, UserError) as e:
        stopped = isinstance(e, Failure) and e.kind in ("stopped", "skipped")
        entry |= {"status": "skipped" if stopped else "failed", "why": str(e)}
    return {**entry, "seconds": time.monotonic() - began}


def ranked(content: Json, names: tuple[str, ...]) -> tuple[str, ...]:
    """Sort by the time at 1,024 tokens and heads of 64, as far as known; sdpa runs everywhere."""
    ms = {
        r["backend"]: r["ms"]
        for r in rows_of(content, "kernels")
        if r["status"] == "ok" and (r["point"]["T"], r["point"]["D"]) == (1024, 64)
    }
    return tuple(sorted(names, key=lambda n: (ms.get(n, math.inf), n != "sdpa")))


# --- the conclusions ---


def rows_of(content: Json, stage: str) -> list[Json]:
    found = (s["record"].get("rows", []) for s in content["stages"] if s["name"] == stage)
    return next(found, [])


def conclusions(content: Json) -> list[str]:
    """Return the sentences at the end: proof, answers of the stages, doubts, missing stages."""
    found, rows, m = [], rows_of(content, "proof"), content["machine"]
    if rows:
        right = [r for r in rows if not r["wrong"] and r["right"]]
        names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in right) or "none"
        found.append(f"Proof: every number right and nothing leaked: {names}.")
    if left := [f"{r['backend']} {r['not_reached']}" for r in rows if r["not_reached"]]:
        found.append(f"Proof: cases not reached in the time: {', '.join(left)}.")
    doubts = [f"{r['backend']} is wrong in {report.failure(f)}"
              for r in rows for f in r["failures"][:3]]  # fmt: skip
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < 0.6 * peak:
        doubts.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of {peak:,.4g} "
            f"({m['peak_source']}): is the power limit lowered?"
        )
    for stage in content["stages"]:
        found += stage["record"].get("answers", [])
        doubts += stage["record"].get("busy", [])
        timed = [r for r in rows_of(content, stage["name"]) if r.get("status") == "ok"]
        noisy = [row for row in timed if row.get("noisy")]
        if len(noisy) > len(timed) / 2:
            doubts.append(f"{len(noisy)} of {len(timed)} rows of {stage['name']} are noisy")
    found += [f"Suspicious: {text}." for text in doubts]
    for stage in content["stages"]:
        if stage["status"] != "done":
            found.append(f"Missing: {stage['name']}: {stage['status']}: {stage['why']}.")
    return list(dict.fromkeys(found))  # the stages have one peak


def failed(content: Json) -> bool:
    """True if a kernel was wrong or no stage ended."""
    wrong = any(row["wrong"] for row in rows_of(content, "proof"))
    return wrong or not any(stage["status"] == "done" for stage in content["stages"])
