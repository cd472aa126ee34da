"""bench_mfu.py qualify: one command that takes a machine from bare to a checked record.

Six stages, each in its own time box; what a stage leaves over goes to those after it. A stage plans
what fits into its box, from the machine's speed and the time to compile, says what it left out, and
is stopped at the end of the box. The record is rewritten after every stage.
"""

from __future__ import annotations

import math
import sys
import tempfile
import time
from collections.abc import Callable, Container, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import data
from bench import modes, plan, proof, records, rows, tables
from bench.bench import Bench
from bench.compare import SAME
from bench.config import CPU_CONFIG, BenchConfig, load_config, vocabulary
from bench.machine import busy, watched
from bench.process import Failure, Stop, Worker
from core.settings import UserError
from data.prepare import PrepareConfig

ROOT = Path(__file__).resolve().parent.parent
MINUTES = 9.0
GRAPHS = 120.0  # seconds, enough to compile the decode steps and record CUDA graphs
CACHES = ("dynamic", "static", "paged")
ROUNDS = 3
STAGES = ("machine", "proof", "kernels", "training", "decode", "converge")
# Shares of the whole time; what a stage leaves over goes to those after it.
SHARES = dict(zip(STAGES, (0.06, 0.17, 0.22, 0.32, 0.13, 0.10), strict=True))
Content = dict[str, Any]


# --- what fits ---


def boxes(seconds: float, wanted: Sequence[str]) -> dict[str, float]:
    """Seconds for each of the wanted stages, out of those left for all."""
    total = sum(SHARES[name] for name in wanted)
    return {name: seconds * SHARES[name] / total for name in wanted}


def grid(cuda: bool) -> list[dict[str, Any]]:
    """The standard grid of attention alone, the most informative points first: causal with a
    head_dim of 64 and 128 from 512 to 16,384 tokens, with a window and grouped heads in between.

    On a GPU the width and the tokens of a call are the FlashAttention papers', 2048 and 16,384;
    elsewhere an eighth of the width and one sequence.
    """
    plain: Any = [(T, D, None, 1) for T in (1024, 4096, 16384, 512, 2048, 8192) for D in (64, 128)]
    more = [(4096, 64, 1024, 1), (4096, 128, None, 4)]
    made = []
    for T, D, window, group in [*plain[:4], *more, *plain[4:], (16384, 128, 1024, 1)]:
        H = (2048 if cuda else 256) // D
        heads = {"H": H, "Hkv": max(1, H // group), "D": D}
        made.append({"B": max(1, 16384 // T) if cuda else 1, "T": T, **heads, "window": window})
    return made


def that_fit(bench: Bench, box: float) -> tuple[list[Content], list[str]]:
    """The points of the grid that fit into the box, and the names of the others."""
    taken: list[Content] = []
    points = grid(bench.device.startswith("cuda"))
    for point in points:
        if sum(plan.seconds(bench, [*taken, point]).values()) <= box:
            taken.append(point)
    if not taken:
        raise Failure("skipped", [f"{box:.0f} s are too short for one point; --minutes gives more"])
    return taken, [rows.where(point) for point in points if point not in taken]


def contenders(bench: Bench, box: float) -> list[str]:
    """As many of the backends as fit into the box, at least one; none that hold all scores or loop
    over tiles in Python, if there is another."""
    able = [name for name in bench.backends if name not in bench.refused]
    able = [name for name in able if name not in plan.LONGEST] or able
    taken: list[str] = []
    for name in able:
        reckoned = plan.seconds(replace(bench, backends=[*taken, name]), [])
        if not taken or sum(reckoned.values()) <= box:
            taken.append(name)
    return taken


# --- the stages ---


def numbers(bench: Bench, box: float) -> Content:
    """The matrix and the canary for every backend that runs here, as time allows."""
    first = bench.machine["dtype"]
    others = ("bfloat16", "float16", "float32") if bench.device.startswith("cuda") else ("float32",)
    dtypes = list(dict.fromkeys((first, *others)))
    made = proof.prove(bench, dtypes)
    for row in made:
        counts = (f"{row[n]} {n.replace('_', ' ')}" for n in tables.VERDICTS)
        bench.tell(f"{row['backend']}: {', '.join(counts)}")
    return {"dtypes": dtypes, "rows": made}


def kernels(bench: Bench, box: float) -> Content:
    wanted = ["manual", *contenders(bench, math.inf)]  # manual: to compare with other machines
    bench.backends = [name for name in bench.backends if name in wanted]
    bench.points, dropped = that_fit(bench, box)
    bench.tell(f"kernels: {len(bench.points)} of {len(bench.points) + len(dropped)} points")
    made = bench.content(modes.kernel(bench)) | {"left_out": dropped}
    # B and H are no matter to the answers: a call's tokens and width are the same at all lengths.
    same = [{**r, "point": {**r["point"], "B": None, "H": None}} for r in made["rows"]]
    return made | {"answers": tables.answers({**made, "rows": same})}


def training(bench: Bench, box: float) -> Content:
    bench.backends = contenders(bench, box)
    bench.tell(f"training: {', '.join(bench.backends)}")
    return bench.content(modes.train(bench))


def decoding(bench: Bench, box: float) -> Content:
    able = [n for n in bench.backends if n == "sdpa" or n.startswith("flash_attn")]
    bench.backends = [*(able or contenders(bench, 0)), "paged"]
    if bench.device.startswith("cuda") and box >= GRAPHS:
        bench.config = replace(bench.config, train=replace(bench.config.train, compile=True))
    return bench.content(modes.decode(bench))


def convergence(bench: Bench, box: float) -> Content:
    """The fast path beside a plain one, trained on the text of our own docs."""
    config = bench.config
    with tempfile.TemporaryDirectory() as folder:
        pages = (page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md")))
        source = Path(folder) / "pages.txt"
        source.write_text("\n".join(pages), encoding="utf-8")
        text = PrepareConfig(out_dir=f"{folder}/text", source=str(source), tokenizer="char")
        with redirect_stdout(sys.stderr):
            data.prepare("text", text)
        V = data.read_meta(Path(folder) / "text")["vocab_size"]
        train = replace(config.train, data_dir=folder, dataset="text", vocab_size=V, **SMALL)
        bench.config, bench.vocab_size = replace(config, train=train), V
        bench.backends = contenders(bench, 0)
        return bench.content(modes.converge(bench))


# A model that learns something in a minute, for converge.
SMALL: dict[str, Any] = {"n_layer": 4, "n_head": 4, "n_embd": 128, "block_size": 64,
                         "n_kv_head": None, "gradient_accumulation_steps": 1, "dropout": 0.0,
                         "compile": False}  # fmt: skip


class Stage(NamedTuple):
    """One of the six: what it does, in which mode of the bench, with which of its knobs."""

    run: Callable[[Bench, float], Content]
    mode: str = "kernel"
    knobs: Mapping[str, Any] = {}


STAGE = {
    # measured just before, and at the top of the record
    "machine": Stage(lambda bench, box: {"about": bench.machine["about"]}),
    "proof": Stage(numbers),
    "kernels": Stage(kernels, "kernel", {"seconds": 0.5, "baseline": ()}),
    "training": Stage(training, "train", {"sweep": False, "profile": True, "seconds": 0.5}),
    "decode": Stage(decoding, "decode", {"kv_caches": CACHES}),
    "converge": Stage(convergence, "converge", {"batch_size": 32, "steps": 100, "baseline": ()}),
}


def settled(config: BenchConfig, given: Container[str], cuda: bool, free: float) -> BenchConfig:
    """The model to train: the one asked for; else GPT-2 124M at a batch that fits without gradient
    accumulation; else, on a CPU or a small GPU, that of bench/cpu.py."""
    if not cuda or "batch_size" in given:
        return config
    # Bytes in which so many sequences of 1,024 tokens surely fit, in half precision.
    fits = {70e9: 64, 38e9: 32, 22e9: 16, 14e9: 8, 7e9: 4}
    if batch := next((batch for least, batch in fits.items() if free >= least), None):
        train = replace(config.train, gradient_accumulation_steps=1)
        return replace(config, train=train, batch_size=batch)
    small = load_config([CPU_CONFIG]).settings
    sizes = ("n_layer", "n_head", "n_embd", "block_size", "vocab_size")
    train = replace(config.train, **{name: getattr(small.train, name) for name in sizes})
    return replace(config, train=train, batch_size=small.batch_size)


def run(bench: Bench, told: Content, given: Container[str]) -> tuple[Content, Path]:
    """Run the stages that were asked for: the record, and its folder.

    Args:
        told: the record's entries about the command.
        given: the names of the settings that the user gave.
    """
    config, cuda = bench.config, bench.device.startswith("cuda")
    end = time.monotonic() + 60 * (config.minutes or MINUTES)
    wanted = [STAGES[n - 1] for n in sorted(set(config.stages))]
    others = busy(bench.device.partition(":")[0])
    began = time.monotonic()
    probe = bench.begin()
    first_look = time.monotonic() - began
    config = settled(config, given, cuda, bench.machine["free_memory"])
    config = replace(config, rounds=config.rounds if "rounds" in given else ROUNDS)
    bench.vocab_size, _ = vocabulary(config)
    record: Content = {**told, "mode": "qualify", "machine": bench.machine, "stages": [],
                       "vocab_size": bench.vocab_size, "settings": config.flat()}  # fmt: skip
    folder = records.folder_of(config.records_dir, config.record or "qualify", bench.machine)
    if config.resume:
        folder, record["stages"] = earlier(folder, record)
        wanted = [name for name in wanted if name in undone(record)]
        record["stages"] = [s for s in record["stages"] if s["name"] not in wanted]
    shares = boxes(end - time.monotonic(), wanted).items()
    sizes = f"{config.train.n_layer} layers, {config.train.n_embd} wide, batch {config.batch_size}"
    bench.tell(
        f"plan: {', '.join(f'{name} {seconds:.0f} s' for name, seconds in shares)}; what is left "
        f"over goes to those after it. Training: {sizes}, {config.train.block_size} tokens"
    )
    for i, name in enumerate(wanted):
        stage, now = STAGE[name], time.monotonic()
        box = boxes(end - now, wanted[i:])[name]
        bench.backends = ranked(record, bench.backends)
        own = replace(bench, mode=stage.mode, config=replace(config, **stage.knobs),
                      stop=Stop(now + box, bench.stop.signals),
                      began=time.perf_counter())  # fmt: skip
        if name == "converge" and cuda:  # beside the plain path; on a CPU: the fused kernels
            own.config = replace(own.config, paths=("bfloat16",), backends=("all",))
        bench.tell(f"stage {1 + STAGES.index(name)}, {name}: {box:.0f} s at most")
        entry = attempt(name, own, box, probe)
        if name == "machine":
            entry["seconds"] += first_look
            entry["record"]["busy"] = others
        record["stages"].append(entry)
        record["stages"].sort(key=lambda s: STAGES.index(s["name"]))
        bench.stop.why = bench.stop.why or (own.stop.why if own.stop.code else "")
        record.pop("incomplete", None)
        if missing := undone(record):
            record["incomplete"] = f"not done: {', '.join(missing)}"
        record |= {"complete": not missing, "answers": conclusions(record)}
        records.write(folder, record, whole=False)
    probe.close()
    return record, folder


def undone(record: Content) -> list[str]:
    done = {s["name"] for s in record["stages"] if s["status"] == "done"}
    return [name for name in STAGES if name not in done]


def attempt(name: str, bench: Bench, box: float, probe: Worker) -> Content:
    """A stage's part of the record, whatever becomes of it."""
    entry: Content = {"name": name, "box_s": box, "why": "", "record": {}}
    began = time.monotonic()
    try:
        bench.stop.check()
        asked = {"names": bench.backends, "specs": modes.specs(bench)}
        bench.refused = probe.ask(asked)["refused"]
        with watched() as entry["watched"]:
            entry["record"] = STAGE[name].run(bench, box)
        why = entry["record"].get("incomplete", bench.stop.why)
        entry |= {"status": "cut" if why else "done", "why": why}
    except (Failure, UserError) as e:
        stopped = isinstance(e, Failure) and e.kind in ("stopped", "skipped")
        entry |= {"status": "skipped" if stopped else "failed", "why": str(e)}
    entry["seconds"] = time.monotonic() - began
    return entry


def ranked(record: Content, names: list[str]) -> list[str]:
    """The backends, the quickest at 1,024 tokens and heads of 64 first, once that is known."""
    short = (
        r for r in ok_rows(record, "kernels") if (r["point"]["T"], r["point"]["D"]) == (1024, 64)
    )
    ms = {row["backend"]: row["ms"] for row in short}
    return sorted(names, key=lambda name: ms.get(name, math.inf))


def earlier(folder: Path, record: Content) -> tuple[Path, list[Content]]:
    """The newest record of this device and name, and its stages, for --resume."""
    tail = folder.name.partition("_")[2]
    found = sorted(folder.parent.glob(f"*_{tail}/record.json"))
    if not found:
        raise UserError(f"--resume: there is no record *_{tail} in {folder.parent}")
    old = records.read(found[-1])
    if old.get("mode") != "qualify":
        raise UserError(f"--resume: {found[-1]} is no record of qualify")
    for name, what in (("source_sha256", "source"), ("vocab_size", "vocabulary")):
        if old.get(name) != record.get(name):
            raise UserError(f"--resume: {found[-1].parent} was measured with another {what}")
    if any(old["machine"].get(n) != record["machine"].get(n) for n in SAME):
        raise UserError(f"--resume: {found[-1].parent} is of {old['machine']['about']}")
    return found[-1].parent, old["stages"]


# --- the conclusions ---


def results(record: Content, stage: str) -> Content:
    """Those of a stage; {} where it has none."""
    return next((s["record"] for s in record["stages"] if s["name"] == stage), {})


def rows_of(record: Content, stage: str) -> list[Content]:
    return results(record, stage).get("rows", [])


def ok_rows(record: Content, stage: str) -> list[Content]:
    return [row for row in rows_of(record, stage) if row.get("status") == "ok"]


def conclusions(record: Content) -> list[str]:
    """Who was right, what each stage says, what makes a figure doubtful, what is missing."""
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
    """What is wrong, or makes a figure doubtful."""
    said = []
    for row in rows_of(record, "proof"):
        said += [f"{row['backend']} is wrong in {tables.failure(f)}" for f in row["failures"][:3]]
    m = record["machine"]
    reached, peak = m.get("products_tflops"), m["peak_tflops"]
    if reached and reached < 0.6 * peak:
        said.append(
            f"large matmuls reach {reached:,.4g} TFLOP/s, {reached / peak:.0%} of the datasheet's "
            f"{peak:,.4g}: is the power limit lowered, or the name another's?"
        )
    said += results(record, "machine").get("busy", [])
    for stage in record["stages"]:
        if held := stage.get("watched", {}).get("held_down_by"):
            why = " and ".join(held)
            said.append(f"in the stage {stage['name']} the GPU's clock was held down by {why}")
        rows = ok_rows(record, stage["name"])
        noisy = [row for row in rows if row.get("noisy")]
        if len(noisy) > len(rows) / 2:
            said.append(f"{len(noisy)} of {len(rows)} rows of {stage['name']} are noisy")
    return said


def failed(record: Content) -> bool:
    """Whether a kernel was wrong, or nothing was done."""
    wrong = any(row["wrong"] for row in rows_of(record, "proof"))
    return wrong or not any(stage["status"] == "done" for stage in record["stages"])
