"""bench_mfu.py qualify: all modes in a row on a new machine, as one record.

Six stages at fixed sizes, each with its share of --minutes. The record is rewritten after each.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import data
from bench import Json, modes, proof, records, tables
from bench.bench import Bench
from bench.config import CPU_CONFIG, BenchConfig, load_config, vocabulary
from bench.limits import LONGEST
from bench.machine import busy
from bench.process import Failure, Stop, Worker
from core.settings import UserError
from data.prepare import PrepareConfig

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 9.0
GRAPHS = 120.0  # seconds, enough to compile the decode steps and record CUDA graphs
CACHES = ("dynamic", "static", "paged")
ROUNDS = 3
TRAINED = 4  # backends of the training stage
POINTS, ALL_POINTS = 8, 20  # points of the grid; minutes from which all are measured
# Shares of the whole time.
SHARES = {
    "machine": 0.06,
    "proof": 0.17,
    "kernels": 0.22,
    "training": 0.32,
    "decode": 0.13,
    "converge": 0.10,
}
STAGES = tuple(SHARES)
Content = Json


def grid(cuda: bool) -> list[Json]:
    """Return the points of attention alone, the most informative first.

    On a GPU width and tokens are the FlashAttention papers', 2048 and 16,384; elsewhere the width
    is 256, with one sequence.
    """
    lengths, widths = (1024, 4096, 16384, 512, 2048, 8192), (64, 128)
    sizes: list[tuple[int, int, int | None, int]] = [
        (T, D, None, 1) for T in lengths for D in widths
    ]
    sizes[4:4] = [(4096, 64, 1024, 1), (4096, 128, None, 4)]
    made = []
    for T, D, window, group in [*sizes, (16384, 128, 1024, 1)]:
        H = (2048 if cuda else 256) // D
        heads = {"H": H, "Hkv": max(1, H // group), "D": D}
        made.append({"B": max(1, 16384 // T) if cuda else 1, "T": T, **heads, "window": window})
    return made


def fastest(bench: Bench, most: int) -> list[str]:
    """Return the first backends, without those of LONGEST if there are others."""
    able = [name for name in bench.backends if name not in bench.refused]
    return ([name for name in able if name not in LONGEST] or able)[:most]


# --- the stages ---


def numbers(bench: Bench, box: float) -> Content:
    first = bench.machine["dtype"]
    others = ("bfloat16", "float16", "float32") if bench.device.startswith("cuda") else ("float32",)
    dtypes = list(dict.fromkeys((first, *others)))
    made = proof.prove(bench, dtypes)
    for row in made:
        counts = (f"{row[n]} {n.replace('_', ' ')}" for n in tables.VERDICTS)
        bench.tell(f"{row['backend']}: {', '.join(counts)}")
    return {"dtypes": dtypes, "rows": made}


def kernels(bench: Bench, box: float) -> Content:
    wanted = ["manual", *fastest(bench, len(bench.backends))]  # manual: to compare machines
    bench.backends = [name for name in bench.backends if name in wanted]
    points = grid(bench.device.startswith("cuda"))
    long = (bench.config.minutes or MINUTES) >= ALL_POINTS
    bench.points = points if long else points[:POINTS]
    made = bench.content(modes.kernel(bench))
    # Tokens and width are the same at all lengths: the answers do not name B and H.
    same = [{**r, "point": {**r["point"], "B": None, "H": None}} for r in made["rows"]]
    return made | {"answers": tables.answers({**made, "rows": same})}


def training(bench: Bench, box: float) -> Content:
    bench.backends = fastest(bench, TRAINED)
    return bench.content(modes.train(bench))


def decoding(bench: Bench, box: float) -> Content:
    able = [n for n in bench.backends if n == "sdpa" or n.startswith("flash_attn")]
    bench.backends = [*(able or fastest(bench, 1)), "paged"]
    if bench.device.startswith("cuda") and box >= GRAPHS:
        bench.config = replace(bench.config, train=replace(bench.config.train, compile=True))
    return bench.content(modes.decode(bench))


# A model for converge that learns something in a minute.
SMALL: Json = {
    "n_layer": 4,
    "n_head": 4,
    "n_embd": 128,
    "block_size": 64,
    "n_kv_head": None,
    "gradient_accumulation_steps": 1,
    "dropout": 0.0,
    "compile": False,
}


def convergence(bench: Bench, box: float) -> Content:
    """Train on the text of docs/, the fast path and a plain one."""
    config = bench.config
    with tempfile.TemporaryDirectory() as folder:
        pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
        source = Path(folder) / "pages.txt"
        source.write_text("\n".join(pages), encoding="utf-8")
        text = PrepareConfig(out_dir=f"{folder}/text", source=str(source))
        with redirect_stdout(sys.stderr):
            data.prepare("shakespeare_char", text)
        V = data.read_meta(Path(folder) / "text")["vocab_size"]
        train = replace(config.train, data_dir=folder, dataset="text", vocab_size=V, **SMALL)
        bench.config, bench.vocab_size = replace(config, train=train), V
        bench.backends = fastest(bench, 1)
        return bench.content(modes.converge(bench))


class Stage(NamedTuple):
    run: Callable[[Bench, float], Content]
    mode: str = "kernel"
    options: Mapping[str, Any] = {}


STAGE = {
    "machine": Stage(lambda bench, box: {"about": bench.machine["about"]}),
    "proof": Stage(numbers),
    "kernels": Stage(kernels, "kernel", {"seconds": 0.5, "baseline": ()}),
    "training": Stage(training, "train", {"profile": True, "seconds": 0.5}),
    "decode": Stage(decoding, "decode", {"kv_caches": CACHES}),
    "converge": Stage(convergence, "converge", {"batch_size": 32, "steps": 100, "baseline": ()}),
}


def settled(config: BenchConfig, given: Container[str], cuda: bool, free: float) -> BenchConfig:
    """Choose the model to train: the requested one; else GPT-2 124M without gradient accumulation;
    on a small GPU that of bench/cpu.py."""
    if not cuda or "batch_size" in given:
        return config
    if free >= 22e9:
        train = replace(config.train, gradient_accumulation_steps=1)
        return replace(config, train=train, batch_size=64 if free >= 70e9 else 16)
    small = load_config([CPU_CONFIG]).settings
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    train = replace(config.train, **{name: getattr(small.train, name) for name in sizes})
    return replace(config, train=train, batch_size=small.batch_size)


def run(bench: Bench, told: Content, given: Container[str]) -> tuple[Content, Path]:
    """Run the requested stages; return the record and its folder.

    Args:
        told: the record's entries about the command.
        given: names of the settings that the user gave.
    """
    config, cuda = bench.config, bench.device.startswith("cuda")
    began, end = time.monotonic(), time.monotonic() + 60 * (config.minutes or MINUTES)
    wanted = [STAGES[n - 1] for n in sorted(set(config.stages))]
    others = busy(bench.device.partition(":")[0])
    probe = bench.begin()
    config = settled(config, given, cuda, bench.machine["free_memory"])
    config = replace(config, rounds=config.rounds if "rounds" in given else ROUNDS)
    bench.vocab_size, _ = vocabulary(config)
    record: Content = {
        **told,
        "mode": "qualify",
        "machine": bench.machine,
        "stages": [],
        "vocab_size": bench.vocab_size,
        "settings": config.flat(),
    }
    folder = records.folder_of(config.records_dir, config.record or "qualify", bench.machine)
    bench.tell(
        f"training: {config.train.n_layer} layers, {config.train.n_embd} wide, batch "
        f"{config.batch_size}, {config.train.block_size} tokens"
    )
    for i, name in enumerate(wanted):
        stage, now = STAGE[name], began if i == 0 else time.monotonic()
        box = (end - now) * SHARES[name] / sum(SHARES[later] for later in wanted[i:])
        bench.backends = ranked(record, bench.backends)
        own = replace(
            bench,
            mode=stage.mode,
            config=replace(config, **stage.options),
            stop=Stop(now + box, bench.stop.signals),
            began=time.perf_counter(),
        )
        if name == "converge" and cuda:  # float32 and bfloat16; on a CPU the fused kernels
            own.config = replace(own.config, paths=("bfloat16",), backends=("all",))
        bench.tell(f"stage {1 + STAGES.index(name)}, {name}: {box:.0f} s at most")
        entry = attempt(name, own, box, probe)
        if name == "machine":
            entry["record"]["busy"] = others
        record["stages"].append(entry)
        bench.stop.why = bench.stop.why or (own.stop.why if own.stop.code else "")
        done = {s["name"] for s in record["stages"] if s["status"] == "done"}
        missing = [name for name in STAGES if name not in done]
        record["incomplete"] = f"not done: {', '.join(missing)}"
        record |= {"complete": not missing, "answers": conclusions(record)}
        if not missing:
            del record["incomplete"]
        records.write(folder, record, whole=False)
    probe.close()
    return record, folder


def attempt(name: str, bench: Bench, box: float, probe: Worker) -> Content:
    """Run a stage and return its part of the record."""
    entry: Content = {"name": name, "box_s": box, "why": "", "record": {}}
    began = time.monotonic()
    try:
        bench.stop.check()
        asked = {"names": bench.backends, "specs": modes.specs(bench)}
        bench.refused = probe.ask(asked)["refused"]
        entry["record"] = STAGE[name].run(bench, box)
        why = entry["record"].get("incomplete", bench.stop.why)
        entry |= {"status": "cut" if why else "done", "why": why}
    except (Failure, UserError) as e:
        stopped = isinstance(e, Failure) and e.kind in ("stopped", "skipped")
        entry |= {"status": "skipped" if stopped else "failed", "why": str(e)}
    entry["seconds"] = time.monotonic() - began
    return entry


def ranked(record: Content, names: list[str]) -> list[str]:
    """Sort by the time at 1,024 tokens and heads of 64, as far as known."""
    short = (
        r for r in ok_rows(record, "kernels") if (r["point"]["T"], r["point"]["D"]) == (1024, 64)
    )
    ms = {row["backend"]: row["ms"] for row in short}
    return sorted(names, key=lambda name: ms.get(name, math.inf))


# --- the conclusions ---


def results(record: Content, stage: str) -> Content:
    return next((s["record"] for s in record["stages"] if s["name"] == stage), {})


def rows_of(record: Content, stage: str) -> list[Content]:
    return results(record, stage).get("rows", [])


def ok_rows(record: Content, stage: str) -> list[Content]:
    return [row for row in rows_of(record, stage) if row.get("status") == "ok"]


def conclusions(record: Content) -> list[str]:
    """Return the sentences at the end: proof, answers of the stages, doubts, missing stages."""
    said = []
    if rows := rows_of(record, "proof"):
        ok = [r for r in rows if not r["wrong"] and r["right"]]
        names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in ok) or "none"
        said.append(f"Proof: every number right and nothing leaked: {names}.")
        left = [f"{r['backend']} {r['not_reached']}" for r in rows if r["not_reached"]]
        if left:
            said.append(f"Proof: cases not reached in the time: {', '.join(left)}.")
    for stage in record["stages"]:
        said += stage["record"].get("answers", [])
    said += [f"Suspicious: {text}." for text in doubts(record)]
    for stage in record["stages"]:
        if stage["status"] != "done":
            said.append(f"Missing: {stage['name']}: {stage['status']}: {stage['why']}.")
    return said


def doubts(record: Content) -> list[str]:
    said = []
    for row in rows_of(record, "proof"):
        said += [f"{row['backend']} is wrong in {tables.failure(f)}" for f in row["failures"][:3]]
    m = record["machine"]
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < 0.6 * peak:
        said.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of {peak:,.4g} "
            f"({m['peak_source']}): is the power limit lowered?"
        )
    said += results(record, "machine").get("busy", [])
    for stage in record["stages"]:
        rows = ok_rows(record, stage["name"])
        noisy = [row for row in rows if row.get("noisy")]
        if len(noisy) > len(rows) / 2:
            said.append(f"{len(noisy)} of {len(rows)} rows of {stage['name']} are noisy")
    return said


def failed(record: Content) -> bool:
    """True if a kernel was wrong or no stage ended."""
    wrong = any(row["wrong"] for row in rows_of(record, "proof"))
    return wrong or not any(stage["status"] == "done" for stage in record["stages"])
