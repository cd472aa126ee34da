"""Measure every attention backend side by side: speed, MFU, memory, error.

    python bench_mfu.py                                    training steps, every backend
    python bench_mfu.py train --profile                    and where their time goes
    python bench_mfu.py train --roofline="NVIDIA H200"     where it would go at best, on any GPU
    python bench_mfu.py kernel --lengths=512,4096          attention alone over a grid
    python bench_mfu.py decode --backends=sdpa --rival=hf  generation
    python bench_mfu.py converge --steps=200               the same training with each backend
    python bench_mfu.py compare RECORD_A RECORD_B          two records side by side
    python bench_mfu.py report RECORD --html=FILE          a record as one HTML page
    python bench_mfu.py --help                             every knob

The model's knobs and config files are train.py's. Each backend runs in a process of its own, the
rounds in turn (bench/process.py), and strictly: a row is the kernel that was named, or says why it
is not. With --record=SLUG all of it is kept in bench/records/.

Before you trust a faster kernel: `converge` with it, and look at its verdict against manual.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

import data
from bench import answers, fitting, records, roofline, rows, tables
from bench import baselines as rivals
from bench import pictures as report
from bench.config import BenchConfig, names, settings_of, settle, vocabulary
from bench.machine import free_memory
from bench.process import Failure, Outcome, Worker, measure
from core import flops
from core.runtime import pick_device
from core.settings import UserError, exit_on_user_error
from model import GPTConfig

MODES = ("train", "kernel", "decode", "converge", "compare", "report")
SWEEP_ROUNDS = 3
PROFILED_STEPS = 3
CONVERGE_ROUNDS = 10  # parts into which the steps of a converge run are cut, to be run in turn


@dataclass
class Bench:
    """One run of the bench: what all modes need, and what they add to."""

    config: BenchConfig
    device: str
    vocab_size: int
    backends: list[str]
    memory_limit: int | None  # bytes that a worker may allocate, on the CPU
    watch: Callable[[str], None]
    machine: dict[str, Any]
    refused: dict[str, list[str]] = field(default_factory=dict)  # by what they declare, with why
    fresh: bool = False

    @property
    def peak(self) -> flops.Peak:
        return flops.Peak(self.machine["peak_tflops"], self.machine["peak_source"])

    @property
    def model(self) -> GPTConfig:
        return self.config.train(1).model(self.vocab_size)

    def parts(self, sequences: int, micro: int) -> dict[str, roofline.Work]:
        """What a step has to do."""
        clip = bool(self.config.grad_clip)
        return roofline.work(self.model, sequences, micro, self.machine["dtype"], clip)

    def rates(self) -> tuple[tuple[float, str], float | None]:
        """The memory's bytes a second with their source, and what large products reach."""
        known = flops.datasheet_bandwidth(self.machine["name"])
        measured = self.machine["bandwidth"], "measured: a large copy"
        return known or measured, self.config.products_tflops or self.machine["products_tflops"]

    def job(self, kind: str, name: str, batch_size: int = 1, rival: str = "",
            **changes: Any) -> dict[str, Any]:  # fmt: skip
        """What a worker is told: everything, so that it reads no settings of its own."""
        ours = {"attention_backend": name} if name and not rival else {}
        train = self.config.train(batch_size, **{**ours, "attention_fallback": False, **changes})
        return {"job": kind, "contender": name, "rival": rival, "train": asdict(train),
                "device": self.device, "vocab_size": self.vocab_size,
                "memory_limit": self.memory_limit, "profile": self.config.profile}  # fmt: skip

    def ask_once(self, kind: str, batch_size: int = 1) -> dict[str, Any]:
        """The answer of a worker that only has to begin.

        Raises:
            Failure: it could not.
        """
        self.watch(kind)
        worker = Worker(self.job(kind, "", batch_size), self.config.timeout)
        worker.close()
        return worker.about

    def look_again(self) -> None:
        """Measure the machine's rates once more, after the rounds, and keep the better of both.

        A neighbour that was busy while the peak was measured makes it too low, and every MFU too
        high. Once only, so that all rows have the same peak.
        """
        measured = self.machine["peak_source"].startswith("measured")
        if measured and not self.machine.get("looked_again"):
            again = self.ask_once("machine")
            for rate in ("peak_tflops", "bandwidth"):
                self.machine[rate] = max(self.machine[rate], again[rate])
            self.machine["looked_again"] = True

    def measure(
        self,
        jobs: dict[str, dict[str, Any]],
        points: dict[str, dict[str, Any]],
        rounds: int,
        fresh: bool | None = None,
        without: Container[tuple[str, str]] = (),
    ) -> dict[tuple[str, str], Outcome]:
        begun = {name: job for name, job in jobs.items() if name not in self.refused}
        found, used = measure(
            begun,
            points,
            rounds,
            without=without,
            fresh=self.config.fresh_rounds if fresh is None else fresh,
            budget=int(0.9 * self.machine["memory_limit"]),
            timeout=self.config.timeout,
            watch=self.watch,
        )
        self.fresh = self.fresh or used
        self.look_again()
        for name, point in itertools.product(jobs.keys() - begun.keys(), points):
            found[name, point] = Outcome(failure=Failure("unavailable", self.refused[name]))
        return found


# ----------------------------------------------------------------------------- the modes


def train(bench: Bench) -> tuple[list[rows.Row], dict[str, Any]]:
    """Training steps of every backend and rival; then, as a sweep, attention alone."""
    config, batch = bench.config, bench.config.fixed_batch
    contenders = dict.fromkeys(bench.backends, "") | rivals.contenders(config.rival)
    micro = config.gradient_accumulation_steps if batch else 1
    sizes = dict.fromkeys(contenders, batch or 1)
    fits: dict[str, dict[str, Any]] = {}
    refused: dict[str, Outcome] = {}
    if batch is None:
        reference: dict[str, Any] = {"why": "with --batch_size=auto each has a batch of its own"}
        for name, rival in contenders.items():
            if name in bench.refused:
                continue
            job = bench.job("train", name, 1, rival, gradient_accumulation_steps=1)
            try:
                fits[name] = fitting.search(job, config.slowest_step, config.timeout, bench.watch)
                sizes[name] = fits[name]["batch_size"]
            except Failure as e:
                refused[name] = Outcome(failure=e)
    else:
        try:
            reference = bench.ask_once("reference", batch * micro)
        except Failure as e:
            reference = {"why": str(e)}
    jobs = {
        name: bench.job("train", name, sizes[name], rival, gradient_accumulation_steps=micro)
        for name, rival in contenders.items()
        if name not in refused
    }
    ask = {"seconds": config.seconds, "warm_up_steps": config.warm_up_steps,
           "profile": PROFILED_STEPS * config.profile}  # fmt: skip
    # A batch that fills the memory leaves no room for another's worker to sleep in.
    fresh = True if batch is None and config.fresh_rounds is None else None
    found = {n: o for (n, _), o in bench.measure(jobs, {"": ask}, config.rounds, fresh).items()}
    for name, fit in fits.items():
        # The edge is not sharp, and a step under the profiler takes more: a little further back.
        while found[name].out_of_memory and sizes[name] > 1:
            sizes[name] = fit["batch_size"] = sizes[name] * 7 // 8
            smaller = {**jobs[name], "train": {**jobs[name]["train"], "batch_size": sizes[name]}}
            again = bench.measure({name: smaller}, {"": ask}, config.rounds, fresh)
            found[name] = again[name, ""]
    table = []
    for name in contenders:
        outcome = refused.get(name) or found[name]
        row = rows.begin("train", name, {}, outcome, config.noise)
        row["batch_size"] = sizes[name]
        if name in fits:
            row["fits"] = fits[name]
        known = reference if "loss" in reference else {}
        sequences = sizes[name] * micro
        row = rows.of_training(row, outcome, bench.model, sequences, bench.peak, known)
        if "profile" in row:
            parts = bench.parts(sequences, micro)
            row["profile"] = rows.of_profile(row["profile"], parts, bench.model, sequences,
                                             bench.peak, *bench.rates())  # fmt: skip
        table.append(row)
    if config.sweep:  # the model's own heads, and fewer rounds: it is beside the point
        own = replace(config, heads=(), head_dims=(), windows=(), seconds=config.seconds / 2,
                      rounds=min(SWEEP_ROUNDS, config.rounds))  # fmt: skip
        table += kernel(replace(bench, config=own))[0]
    return table, reference


def grid(bench: Bench) -> dict[str, dict[str, Any]]:
    """The points of the modes kernel and sweep."""
    config, cuda = bench.config, bench.machine["kind"] == "cuda"
    default = (512, 1024, 2048, 4096, 8192, 16384, 32768) if cuda else (128, 512, 2048)
    lengths = config.lengths or default
    batch_sizes = config.batch_sizes or ((1, 8) if cuda else (1, 4))
    asked_for = bool(config.lengths and config.batch_sizes)
    windows = config.windows or (config.attention_window,)
    points = {}
    shapes = itertools.product(
        batch_sizes, lengths, config.heads or (config.n_head,),
        config.head_dims or (config.n_embd // config.n_head,), windows,
    )  # fmt: skip
    for B, T, H, D, window in shapes:
        if not asked_for and min(batch_sizes) < B and sorted(lengths)[len(lengths) // 2] < T:
            continue  # the largest corner would take most of the time
        groups = config.n_head // (config.n_kv_head or config.n_head)
        if H % groups:
            raise UserError(f"--heads={H} is no multiple of the {groups} heads that share a key")
        point = {"B": B, "T": T, "H": H, "Hkv": H // groups, "D": D, "window": window}
        points[f"B{B} T{T} H{H} D{D}" + (f" W{window}" if window else "")] = point
    return points


def kernel(bench: Bench) -> tuple[list[rows.Row], dict[str, Any]]:
    """Attention alone over the grid."""
    config, points = bench.config, grid(bench)
    jobs = {name: bench.job("kernel", name) for name in bench.backends}
    ask = {name: {**point, "seconds": config.seconds / 5} for name, point in points.items()}
    found = bench.measure(jobs, ask, config.rounds)
    table = []
    for where, point in points.items():
        for name in jobs:
            row = rows.begin("kernel", name, point, found[name, where], config.noise)
            table.append(rows.of_kernel(row, found[name, where], bench.peak))
    return table, {}


def decode(bench: Bench) -> tuple[list[rows.Row], dict[str, Any]]:
    """Generation over batch sizes, prompt lengths and caches, of every backend and rival."""
    config = bench.config
    new, T = config.new_tokens, config.block_size
    batch_sizes = config.batch_sizes or ((1, 8) if bench.machine["kind"] == "cuda" else (1, 4))
    prompts = config.prompts or (max(1, T // 2 - new),)
    if max(prompts) + new > T or min(prompts) < 1:
        raise UserError(
            f"a prompt of {max(*prompts, 1)} and {new} new tokens do not fit into "
            f"--block_size={T}: beyond it the text is read through a sliding window"
        )
    points: dict[str, dict[str, Any]] = {
        f"B{B} P{P} {cache}{' with a processor' * p}":
            {"B": B, "P": P, "cache": cache, "processor": p, "new_tokens": new}
        for B, P, cache, p in itertools.product(batch_sizes, prompts, config.kv_caches,
                                                config.processors)
    }  # fmt: skip
    others = rivals.contenders(config.rival, ("sdpa",))
    contenders = dict.fromkeys(bench.backends, "") | others
    jobs = {name: bench.job("decode", name, rival=rival) for name, rival in contenders.items()}
    without = {
        (name, where)
        for (name, rival), (where, p) in itertools.product(others.items(), points.items())
        if not rivals.can_write(rival, p["cache"], p["processor"])
    }
    idle = [name for name in others if all((name, where) in without for where in points)]
    found = bench.measure(jobs, points, config.rounds, without=without)
    table: list[rows.Row] = []
    for where, point in points.items():
        for name in jobs:
            if (name, where) in without:
                continue
            row = rows.begin("decode", name, point, found[name, where], config.noise)
            row["rival"] = name in others
            table.append(rows.of_decoding(row, found[name, where], bench.machine["bandwidth"]))
    table += [
        {"mode": "decode", "backend": name, "point": {}, "status": "unavailable",
         "why": ["it has none of --kv_caches, or no logits processor, and --processors asks for "
                 "nothing else"]}
        for name in idle
    ]  # fmt: skip
    return table, {}


def converge(bench: Bench) -> tuple[list[rows.Row], dict[str, Any]]:
    """The same training with every backend; a learning rate schedule that fits the steps."""
    config = bench.config
    part, rest = divmod(config.steps, CONVERGE_ROUNDS)
    if rest or not part:
        raise UserError(f"--steps must be a multiple of {CONVERGE_ROUNDS}, got {config.steps}")
    if (batch := config.fixed_batch) is None:
        raise UserError("--batch_size=auto has no place in converge: all train on the same batches")
    folder = Path(config.data_dir) / config.dataset
    data.load(folder, "train", config.block_size, bench.vocab_size)  # or the command that makes it
    schedule: dict[str, Any] = {"max_iters": config.steps, "lr_decay_iters": config.steps,
                                "warmup_iters": config.steps // 10}  # fmt: skip
    order = ["manual", *(name for name in bench.backends if name != "manual")]
    jobs = {name: bench.job("converge", name, batch, **schedule) for name in order}
    # One run is one process from its first step to its last: "fresh" is one after the other.
    groups = [{n: j} for n, j in jobs.items()] if config.fresh_rounds else [jobs]
    found: dict[tuple[str, str], Outcome] = {}
    for group in groups:
        found |= bench.measure(group, {"": {"steps": part}}, CONVERGE_ROUNDS, fresh=False)
    table = []
    sequences = batch * config.gradient_accumulation_steps
    for name in order:
        outcome = found[name, ""]
        row = rows.begin("converge", name, {}, outcome, config.noise)
        table.append(rows.of_training(row, outcome, bench.model, sequences, bench.peak, {}))
    rows.of_convergence(table, config.tolerance)
    return table, {}


def only_roofline(config: BenchConfig, gpu: str) -> int:
    """Print the least time of each part of a step on a GPU that need not be here."""
    half = ("bfloat16", "float16")
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = next((d for d in half if flops.datasheet_peak(gpu, d)), "float32")
    peak = flops.datasheet_peak(gpu, dtype, config.tf32)
    if peak and config.peak_tflops:
        peak = flops.peak("cpu", dtype, config.peak_tflops)
    bandwidth = flops.datasheet_bandwidth(gpu)
    if peak is None or bandwidth is None:
        of = "bfloat16 or float16" if config.dtype == "auto" else dtype
        raise UserError(f"--roofline: flops.py has no {of} rates of {gpu!r}; names are those that "
                        "drivers give: 'NVIDIA H200', 'NVIDIA A100-SXM4-80GB'")  # fmt: skip
    if (batch := config.fixed_batch) is None:
        raise UserError("--roofline needs a --batch_size")
    vocab_size, source = vocabulary(config)
    model, micro = config.train(1).model(vocab_size), config.gradient_accumulation_steps
    parts = roofline.work(model, batch * micro, micro, dtype, bool(config.grad_clip))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(Text(
        f"A training step of {model.n_layer} layers, {model.n_embd} wide, vocabulary "
        f"{vocab_size:,} ({source}), {batch * micro} x {model.block_size} tokens, {dtype}, on {gpu}"
        f"\npeak: {peak}\nmemory: {bandwidth[0] / 1e9:,.4g} GB/s ({bandwidth[1]})\n"
    ))  # fmt: skip
    rates = [(peak.tflops, "")]
    if rate := config.products_tflops:
        rates.append((rate, f", with products at {rate:,.4g} TFLOP/s"))
    found = {}
    for tflops, how in rates:
        lines = roofline.lines(parts, tflops, bandwidth[0])
        ceiling = roofline.ceiling(parts, model, batch * micro, tflops, bandwidth[0], peak.tflops)
        console.print(tables.rich_table(f"The roofline of each part{how}", tables.roofline(lines)))
        console.print(Text(roofline.told(ceiling, how) + "\n"))
        found["reachable" if how else "ceiling"] = {**ceiling, "parts": lines}
    if config.json:
        print(json.dumps({"gpu": gpu, "dtype": dtype, "vocab_size": vocab_size, **found}))
    return 0


# ----------------------------------------------------------------------------- the run


def run(mode: str, argv: list[str]) -> int:
    """Measure in one of the first four modes; the exit code."""
    began = time.perf_counter()
    config, origins = settle(argv)
    if config.record is not None:
        records.check_slug(config.record)
    if mode != "train" and (config.profile or config.roofline):
        raise UserError(f"--profile and --roofline are for the mode train, not for {mode}")
    if config.roofline:
        return only_roofline(config, config.roofline)
    if config.rival and mode not in ("train", "decode"):
        raise UserError(f"--rival is for the modes train and decode, not for {mode}")
    rivals.contenders(config.rival)  # a mistake in it is told at once
    device = pick_device(config.device)
    backends, left_out = names(config, device.type)
    vocab_size, source = vocabulary(config)
    limit = None
    if device.type == "cpu":
        limit = int(config.memory_gb * 1e9 if config.memory_gb else 0.7 * free_memory(device))
    say = Console(stderr=True, highlight=False)
    files = {o.rpartition(":")[0] for o in origins.values() if o != "command line"}
    say.print(Text(f"settings: {', '.join(sorted(files)) or 'the defaults'}"))
    say.print(Text(f"vocabulary: {vocab_size:,} ({source})"))
    with progress(say) as watch:
        bench = Bench(config, str(device), vocab_size, backends, limit or None, watch, {})
        try:
            watch("the machine")
            scout = Worker(bench.job("machine", ""), config.timeout)
            bench.machine = scout.about
            told = scout.ask({"names": backends, "specs": specs(mode, bench)})
            bench.refused = told["refused"]
            scout.close()
        except Failure as e:
            raise UserError(f"nothing can be measured on {device}: {e}") from None
        bench.machine["memory_limit"] = limit or bench.machine["free_memory"]
        modes = {"train": train, "kernel": kernel, "decode": decode, "converge": converge}
        table, reference = modes[mode](bench)
    table += [
        {"mode": mode, "backend": n, "point": {}, "status": "unavailable", "why": [why]}
        for n, why in left_out.items()
    ]
    T = config.block_size
    content: dict[str, Any] = {
        "format": records.FORMAT,
        "mode": mode,
        "command": records.command([mode, *argv]),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        **records.git_state(),
        "seconds": time.perf_counter() - began,
        "machine": bench.machine,
        "vocab_size": vocab_size,
        "settings": settings_of(config),
        "fresh_rounds": bench.fresh,
        "flops_per_token": {
            "mfu": flops.flops_per_token(bench.model, T),
            "mfu_causal": flops.flops_per_token(bench.model, T, causal=True),
        },
        "reference": reference,
        "rows": table,
    }
    content["answers"] = answers.answers(content)
    show(content)
    keep(content, config)
    if config.json:
        print(json.dumps(content, allow_nan=False))
    if mode == "converge" and any(r.get("verdict") == "FAIL" for r in table):
        return 1
    return 0 if any(r["status"] == "ok" for r in table) else 1


def specs(mode: str, bench: Bench) -> list[dict[str, Any]]:
    """What will be asked of the backends, as fields of Spec: a backend that can do none of it has
    no process started."""
    model = bench.model
    own = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "head_dim": model.head_dim}
    window = model.spec("float32").window
    if mode == "decode":
        return [{**own, "window": window, "grad": False, "cache": cache,
                 "page_size": 16 if cache == "paged" else None}
                for cache in bench.config.kv_caches]  # fmt: skip
    if mode == "kernel":
        return [{"n_head": p["H"], "n_kv_head": p["Hkv"], "head_dim": p["D"], "window": p["window"]}
                for p in grid(bench).values()]  # fmt: skip
    return [{**own, "window": window, "dropout": model.dropout}]


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str], None]]:
    """A line that says what is being measured, and since when."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task("starting", total=None)

        def watch(what: str) -> None:
            shown.update(task, description=what)

        yield watch


def show(content: dict[str, Any]) -> None:
    """The tables, and what they say."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(Text(records.title(content), style="bold"))
    for name, value in records.facts(content):
        if name in ("model", "peak", "MFLOP a token", "bandwidth", "rounds"):
            console.print(Text(f"{name}: {value}"))
    if "why" in content["reference"]:
        console.print(Text(f"no reference: {content['reference']['why']}", style="yellow"))
    for name, made in records.sections(content):
        console.print()
        console.print(tables.rich_table(name, made))
    console.print()
    for line in content["answers"]:
        console.print(Text(line))


def keep(content: dict[str, Any], config: BenchConfig) -> None:
    """The record and the page, where they were asked for."""
    if config.record is not None:
        folder = records.folder_of(config.records_dir, config.record, content["machine"])
        records.write(folder, content)
        print(f"record: {folder}")
    if config.html is not None:
        write_page(content, config.html)


def write_page(content: dict[str, Any], path: str) -> None:
    try:
        Path(path).write_text(report.page(content), encoding="utf-8")
    except OSError as e:
        raise UserError(f"--html={path} cannot be written ({e.strerror})") from e
    print(f"page: {path}")


def compare(argv: list[str]) -> int:
    """Two records side by side."""
    if len(argv) != 2 or any(word.startswith("-") for word in argv):
        raise UserError("compare takes two records: python bench_mfu.py compare A B")
    notes, table = records.compare(records.read(argv[0]), records.read(argv[1]))
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=160)
    console.print(Text(f"A: {argv[0]}\nB: {argv[1]}"))
    for note in notes:
        console.print(Text(note))
    if table[1]:
        console.print(tables.rich_table("", table))
    return 0


def page_of(argv: list[str]) -> int:
    """A record's page, by default report.html beside it."""
    files = [w for w in argv if not w.startswith("--")]
    pages = [w.removeprefix("--html=") for w in argv if w.startswith("--html=")]
    if len(files) != 1 or len(argv) != 1 + len(pages) or len(pages) > 1:
        raise UserError("report takes one record: python bench_mfu.py report RECORD --html=FILE")
    folder = Path(files[0]) if Path(files[0]).is_dir() else Path(files[0]).parent
    write_page(records.read(files[0]), pages[0] if pages else str(folder / "report.html"))
    return 0


def main(argv: list[str]) -> int:
    mode, rest = (argv[0], argv[1:]) if argv and argv[0] in MODES else ("train", argv)
    try:
        if mode == "compare":
            return compare(rest)
        if mode == "report":
            return page_of(rest)
        return run(mode, rest)
    except KeyboardInterrupt:
        print("\nstopped; nothing was recorded", file=sys.stderr)
        return 130


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
