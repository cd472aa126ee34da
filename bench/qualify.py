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

import data
from bench import ROOT, Json, converge, decode, kernel, proof, record, report, train
from bench.config import CPU_CONFIG, load_config, vocabulary
from bench.machine import busy
from bench.process import Failure, Stop
from bench.rounds import Run
from core.settings import UserError
from data.prepare import PrepareConfig

MINUTES = 9.0
GRAPHS = 120.0  # seconds, enough to compile the decode steps and record CUDA graphs
ROUNDS = 3
TRAINED = 4  # backends of the training stage
POINTS, ALL_POINTS = 8, 20  # points of the grid; minutes from which all are measured


@dataclass(frozen=True)
class Stage:
    """A stage: its share of the time, its mode, and what it changes in the options."""

    share: float
    measure: Callable[[Run], Json]
    mode: str = "kernel"
    options: Json = field(default_factory=dict)


def grid(cuda: bool) -> list[Json]:
    """Return the points of attention alone, the most informative first.

    A GPU has the width and tokens of the FlashAttention papers, others width 256 and one sequence.
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


def fastest(run: Run, most: int) -> list[str]:
    """Return the first backends, without the slow ones if there are others."""
    able = [name for name in run.backends if name not in run.refused]
    return ([name for name in able if name not in train.LONGEST] or able)[:most]


# --- the stages ---


def machine(run: Run) -> Json:
    return {"about": run.part["machine"]["about"], "busy": busy(run.device.partition(":")[0])}


def numbers(run: Run) -> Json:
    first = run.part["machine"]["dtype"]
    others = ("bfloat16", "float16", "float32") if run.cuda else ("float32",)
    dtypes = list(dict.fromkeys((first, *others)))
    made = proof.prove(run, dtypes)
    for row in made:
        counts = (
            f"{row[n]} {n.replace('_', ' ')}" for n in ("right", "wrong", "refused", "not_reached")
        )
        run.progress.tell(f"{row['backend']}: {', '.join(counts)}")
    return {"dtypes": dtypes, "rows": made}


def kernels(run: Run) -> Json:
    points = grid(run.cuda)
    if (run.config.minutes or MINUTES) < ALL_POINTS:
        points = points[:POINTS]
    run.refuse(kernel.specs(run, points))
    able = ["manual", *fastest(run, len(run.backends))]  # manual: to compare machines
    run.backends = [name for name in run.backends if name in able or name in run.refused]
    kernel.measure(run, points)
    return record.complete(run.content())


def training(run: Run) -> Json:
    run.backends = fastest(run, TRAINED)
    train.measure(run)
    return record.complete(run.content())


def decoding(run: Run) -> Json:
    able = [n for n in run.backends if n == "sdpa" or n.startswith("flash_attn")]
    run.backends = [*(able or fastest(run, 1)), "paged"]
    left = (run.stop.deadline or math.inf) - time.monotonic()
    if run.cuda and left >= GRAPHS:
        run.config = replace(run.config, compile=True)
    decode.measure(run)
    return record.complete(run.content())


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


def convergence(run: Run) -> Json:
    """Train on the text of docs/, the fast path and a plain one."""
    with tempfile.TemporaryDirectory() as folder:
        pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
        source = Path(folder) / "pages.txt"
        source.write_text("\n".join(pages), encoding="utf-8")
        text = PrepareConfig(out_dir=f"{folder}/text", source=str(source))
        with redirect_stdout(sys.stderr):
            data.prepare("shakespeare_char", text)
        V = run.part["vocab_size"] = data.read_meta(Path(folder) / "text")["vocab_size"]
        window, most = run.config.attention_window, SMALL["n_layer"]
        window = window if len(window) <= most else (*window[: most - 1], window[-1])
        how = {**SMALL, "attention_window": window, "vocab_size": V}
        run.config = replace(run.config, data_dir=folder, dataset="text", **how)
        if run.cuda:  # float32 and bfloat16; on a CPU the fused kernels
            run.config = replace(run.config, paths=("bfloat16",), backends=("all",))
        run.backends = fastest(run, 1)
        converge.measure(run)
        return record.complete(run.content())


STAGES = {
    "machine": Stage(0.06, machine),
    "proof": Stage(0.17, numbers),
    "kernels": Stage(0.22, kernels, "kernel", {"seconds": 0.5, "rival": ()}),
    "training": Stage(0.32, training, "train", {"profile": True, "seconds": 0.5}),
    "decode": Stage(0.13, decoding, "decode", {"kv_caches": ("dynamic", "static", "paged")}),
    "converge": Stage(0.10, convergence, "converge", {"batch_size": 32, "steps": 100, "rival": ()}),
}


def settled(run: Run, given: Container[str]) -> None:
    """Choose the model to train: the requested one; else GPT-2 124M without gradient accumulation;
    on a small GPU the model of config/bench_cpu.py."""
    config, free = run.config, run.part["machine"]["free_memory"]
    config = replace(config, rounds=config.rounds if "rounds" in given else ROUNDS)
    if run.cuda and "batch_size" not in given:
        if free >= 22e9:
            batch = 64 if free >= 70e9 else 16
            config = replace(config, gradient_accumulation_steps=1, batch_size=batch)
        else:
            small = load_config([CPU_CONFIG]).settings
            sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "batch_size")
            config = replace(config, **{name: getattr(small, name) for name in sizes})
    run.config = config
    run.part["vocab_size"], _ = vocabulary(config)


def run(whole: Run, about: Json, given: Container[str], folder: Callable[[], Path]) -> Json:
    """Run the requested stages; return the record.

    `whole` has the described machine, `about` the record's entries about the command, `given` the
    names of the user's settings; `folder` makes and returns the record's folder.
    """
    settled(whole, given)
    config, names = whole.config, [*STAGES]
    began, end = time.monotonic(), time.monotonic() + 60 * (config.minutes or MINUTES)
    wanted = [names[n - 1] for n in sorted(set(config.stages))]
    content: Json = {**about, **whole.content(), "stages": []}
    del content["rows"]
    whole.progress.tell(
        f"training: {config.n_layer} layers, {config.n_embd} wide, batch "
        f"{config.batch_size}, {config.block_size} tokens"
    )
    for i, name in enumerate(wanted):
        now = began if i == 0 else time.monotonic()
        stage = STAGES[name]
        box = (end - now) * stage.share / sum(STAGES[later].share for later in wanted[i:])
        own = replace(
            whole,
            mode=stage.mode,
            config=replace(config, **stage.options),
            backends=ranked(content, whole.backends),
            part={**whole.part, "rows": [], "reference": {}},
            stop=Stop(now + box, whole.stop.signals),
            began=time.perf_counter(),
            save=lambda run: None,
        )
        whole.progress.tell(f"stage {1 + names.index(name)}, {name}: {max(box, 0):.0f} s at most")
        content["stages"].append(attempt(name, own, box))
        whole.stop.why = whole.stop.why or (own.stop.why if own.stop.code else "")
        done = {s["name"] for s in content["stages"] if s["status"] == "done"}
        missing = [name for name in names if name not in done]
        content["incomplete"] = f"not done: {', '.join(missing)}"
        content |= {"complete": not missing, "machine": dict(whole.part["machine"])}
        content["answers"] = conclusions(content)
        if not missing:
            del content["incomplete"]
        record.write(folder(), content, whole=False)
    return content


def attempt(name: str, run: Run, box: float) -> Json:
    """Run a stage and return its part of the record."""
    entry: Json = {"name": name, "box_s": box, "why": "", "record": {}}
    began = time.monotonic()
    try:
        run.stop.check()
        run.refuse(report.MODES[run.mode].specs(run))
        entry["record"] = STAGES[name].measure(run)
        why = entry["record"].get("incomplete", run.stop.why)
        entry |= {"status": "cut" if why else "done", "why": why}
    except (Failure, UserError) as e:
        stopped = isinstance(e, Failure) and e.kind in ("stopped", "skipped")
        entry |= {"status": "skipped" if stopped else "failed", "why": str(e)}
    entry["seconds"] = time.monotonic() - began
    return entry


def ranked(content: Json, names: list[str]) -> list[str]:
    """Sort by the time at 1,024 tokens and heads of 64, as far as known."""
    ms = {
        r["backend"]: r["ms"]
        for r in rows_of(content, "kernels")
        if r["status"] == "ok" and (r["point"]["T"], r["point"]["D"]) == (1024, 64)
    }
    return sorted(names, key=lambda name: ms.get(name, math.inf))


# --- the conclusions ---


def results(content: Json, stage: str) -> Json:
    return next((s["record"] for s in content["stages"] if s["name"] == stage), {})


def rows_of(content: Json, stage: str) -> list[Json]:
    return results(content, stage).get("rows", [])


def conclusions(content: Json) -> list[str]:
    """Return the sentences at the end: proof, answers of the stages, doubts, missing stages."""
    found = []
    if rows := rows_of(content, "proof"):
        ok = [r for r in rows if not r["wrong"] and r["right"]]
        names = ", ".join(f"{r['backend']} ({r['right']} cases)" for r in ok) or "none"
        found.append(f"Proof: every number right and nothing leaked: {names}.")
        left = [f"{r['backend']} {r['not_reached']}" for r in rows if r["not_reached"]]
        if left:
            found.append(f"Proof: cases not reached in the time: {', '.join(left)}.")
    for stage in content["stages"]:
        found += stage["record"].get("answers", [])
    found += [f"Suspicious: {text}." for text in doubts(content)]
    for stage in content["stages"]:
        if stage["status"] != "done":
            found.append(f"Missing: {stage['name']}: {stage['status']}: {stage['why']}.")
    return list(dict.fromkeys(found))  # the stages have one peak


def doubts(content: Json) -> list[str]:
    found = []
    for row in rows_of(content, "proof"):
        found += [f"{row['backend']} is wrong in {report.failure(f)}" for f in row["failures"][:3]]
    m = content["machine"]
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < 0.6 * peak:
        found.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of {peak:,.4g} "
            f"({m['peak_source']}): is the power limit lowered?"
        )
    found += results(content, "machine").get("busy", [])
    for stage in content["stages"]:
        rows = [r for r in rows_of(content, stage["name"]) if r.get("status") == "ok"]
        noisy = [row for row in rows if row.get("noisy")]
        if len(noisy) > len(rows) / 2:
            found.append(f"{len(noisy)} of {len(rows)} rows of {stage['name']} are noisy")
    return found


def failed(content: Json) -> bool:
    """True if a kernel was wrong or no stage ended."""
    wrong = any(row["wrong"] for row in rows_of(content, "proof"))
    return wrong or not any(stage["status"] == "done" for stage in content["stages"])
