"""The modes of bench_mfu.py: what each asks of the workers, and the rows that come of it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Container
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.text import Text

import data
from bench import baselines, fitting, roofline, rows, tables
from bench.config import BenchConfig, vocabulary
from bench.process import Failure, Outcome, Worker, measure
from core import flops
from core.settings import UserError
from model import GPTConfig

SWEEP_ROUNDS = 3
PROFILED_STEPS = 3
CONVERGE_ROUNDS = 10  # parts into which the steps of a converge run are cut, to be run in turn
PATHS = {  # the training paths that converge can hold against a plain one
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-residual": {"dtype": "bfloat16", "residual_dtype": "autocast"},
}
Table = tuple[list[rows.Row], dict[str, Any]]  # the rows, and the reference they are held against


@dataclass
class Bench:
    """One run of the bench: what all modes need, and what they add to."""

    mode: str
    config: BenchConfig
    device: str
    vocab_size: int
    backends: list[str]
    memory_limit: int | None  # bytes that a worker may allocate; on the CPU only
    watch: Callable[[str], None]
    machine: dict[str, Any]
    refused: dict[str, list[str]] = field(default_factory=dict)  # by what they declare, with why
    fresh: bool = False

    @property
    def peak(self) -> flops.Peak:
        return flops.Peak(self.machine["peak_tflops"], self.machine["peak_source"])

    @property
    def model(self) -> GPTConfig:
        return self.config.train.model(self.vocab_size)

    def job(
        self, kind: str, name: str, batch_size: int = 1, baseline: str = "", **changes: Any
    ) -> dict[str, Any]:
        """What a worker is told: everything, so that it reads no settings of its own.

        Args:
            kind: of bench/worker.py's jobs.
            name: of the row; without a baseline, also the attention backend to measure.
            baseline: what bench/baselines.py builds instead of our model.
            changes: of train.py's settings.
        """
        ours = {"attention_backend": name} if name and not baseline else {}
        changes = {**ours, "attention_fallback": False, **changes}
        return {
            "job": kind,
            "name": name,
            "baseline": baseline,
            "train": asdict(self.config.training(batch_size, **changes)),
            "device": self.device,
            "vocab_size": self.vocab_size,
            "memory_limit": self.memory_limit,
            "profile": self.config.profile,
            "bandwidth_gbs": self.config.bandwidth_gbs,
            "wants_bandwidth": self.mode == "decode" or self.config.profile,
        }

    def ask_once(self, kind: str, batch_size: int = 1) -> dict[str, Any]:
        """The answer of a worker that only has to set up its job."""
        self.watch(kind)
        worker = Worker(self.job(kind, "", batch_size), self.config.timeout)
        worker.close()
        return worker.about

    def look_again(self) -> None:
        """Measure the machine's rates once more, after the rounds, and keep the better of both.

        A neighbour that was busy while the peak was measured makes it too low, and every MFU too
        high. Once only, so that all rows have the same peak.
        """
        m = self.machine
        if self.peak.measured and not m.get("looked_again"):
            again = self.ask_once("machine")
            for rate in ("peak_tflops", "bandwidth"):
                m[rate] = m[rate] and max(m[rate], again[rate])
            m["looked_again"] = True

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


def train(bench: Bench) -> Table:
    """Training steps of every backend and baseline; then, as a sweep, attention alone."""
    config, batch = bench.config, bench.config.fixed_batch
    everyone = dict.fromkeys(bench.backends, "") | baselines.parse(config.baseline)
    micro = config.train.gradient_accumulation_steps if batch else 1
    sizes = dict.fromkeys(everyone, batch or 1)
    fits: dict[str, dict[str, Any]] = {}
    refused: dict[str, Outcome] = {}
    if batch is None:
        reference: dict[str, Any] = {"why": "with --batch_size=auto each has a batch of its own"}
        for name, baseline in everyone.items():
            if name in bench.refused:
                continue
            job = bench.job("train", name, 1, baseline, gradient_accumulation_steps=1)
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
        name: bench.job("train", name, sizes[name], baseline, gradient_accumulation_steps=micro)
        for name, baseline in everyone.items()
        if name not in refused
    }
    ask = {"seconds": config.seconds, "warm_up_steps": config.warm_up_steps}
    ask["profile"] = PROFILED_STEPS * config.profile
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
    known = reference if "loss" in reference else {}
    for name in everyone:
        outcome, sequences = refused.get(name) or found[name], sizes[name] * micro
        row = rows.begin("train", name, {}, outcome, config.noise)
        row["batch_size"] = sizes[name]
        if name in fits:
            row["fits"] = fits[name]
        row = rows.of_training(row, outcome, bench.model, sequences, bench.peak, known)
        if "profile" in row:
            row["profile"] = beside_roofline(bench, row["profile"], sequences, micro)
        table.append(row)
    if config.sweep:  # the model's own heads, and fewer rounds: it is beside the point
        rounds = min(SWEEP_ROUNDS, config.rounds)
        own = replace(config, windows=(), seconds=config.seconds / 2, rounds=rounds)
        table += kernel(replace(bench, config=own))[0]
    return table, reference


def beside_roofline(
    bench: Bench, found: dict[str, Any], sequences: int, micro: int
) -> dict[str, Any]:
    """A worker's profile, with what each part would take at best."""
    config, m = bench.config, bench.machine
    parts = roofline.work(bench.model, sequences, micro, m["dtype"], bool(config.train.grad_clip))
    known = None if config.bandwidth_gbs else flops.datasheet_bandwidth(m["name"])
    bandwidth = known or (m["bandwidth"], m["bandwidth_source"])
    products = config.products_tflops or m["products_tflops"]
    return rows.of_profile(found, parts, bench.model, sequences, bench.peak, bandwidth, products)


def grid(bench: Bench) -> dict[str, dict[str, Any]]:
    """The points of the modes kernel and sweep, by name."""
    config, model = bench.config, bench.model
    cuda = bench.device.startswith("cuda")
    default = (512, 1024, 2048, 4096, 8192, 16384, 32768) if cuda else (128, 512, 2048)
    lengths = config.lengths or default
    batch_sizes = config.batch_sizes or ((1, 8) if cuda else (1, 4))
    points = {}
    windows = config.windows or (model.attention_window,)
    for B, T, window in itertools.product(batch_sizes, lengths, windows):
        largest = min(batch_sizes) < B and sorted(lengths)[len(lengths) // 2] < T
        if largest and not (config.lengths and config.batch_sizes):
            continue  # the largest corner would take most of the time
        heads = {"H": model.n_head, "Hkv": model.kv_heads, "D": model.head_dim}
        points[f"B{B} T{T}" + (f" W{window}" if window else "")] = {
            "B": B,
            "T": T,
            **heads,
            "window": window,
        }
    return points


def kernel(bench: Bench) -> Table:
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


def decode(bench: Bench) -> Table:
    """Generation over batch sizes, prompt lengths and caches, of every backend and baseline."""
    config = bench.config
    cuda, T = bench.device.startswith("cuda"), bench.model.block_size
    new = config.new_tokens or (128 if cuda else 16)  # a CUDA graph is recorded in the first three
    batch_sizes = config.batch_sizes or ((1, 8) if cuda else (1, 4))
    prompts = config.prompts or (max(1, T // 2 - new),)
    if max(prompts) + new > T or min(prompts) < 1:
        raise UserError(
            f"a prompt of {max(*prompts, 1)} and {new} new tokens do not fit into "
            f"--block_size={T}: beyond it the text is read through a sliding window"
        )
    points: dict[str, dict[str, Any]] = {}
    shapes = itertools.product(batch_sizes, prompts, config.kv_caches, config.processors)
    for B, P, cache, processor in shapes:
        point = {"B": B, "P": P, "cache": cache, "processor": processor, "new_tokens": new}
        points[f"B{B} P{P} {cache}{' with a processor' * processor}"] = point
    others = baselines.parse(config.baseline, ("sdpa",))
    everyone = dict.fromkeys(bench.backends, "") | others
    jobs = {name: bench.job("decode", name, baseline=what) for name, what in everyone.items()}
    without = {
        (name, where)
        for (name, what), (where, p) in itertools.product(others.items(), points.items())
        if not baselines.can_write(what, p["cache"], p["processor"])
    }
    found = bench.measure(jobs, points, config.rounds, without=without)
    table: list[rows.Row] = []
    for where, point in points.items():
        for name in jobs:
            if (name, where) not in without:
                row = rows.begin("decode", name, point, found[name, where], config.noise)
                row["baseline"] = name in others
                rate = bench.machine["bandwidth"]
                table.append(rows.of_decoding(row, found[name, where], rate))
    why = "it has none of --kv_caches, or no logits processor, and --processors asks for it"
    idle = [name for name in others if all((name, where) in without for where in points)]
    return table + [rows.unavailable("decode", name, why) for name in idle], {}


def converge(bench: Bench) -> Table:
    """The same training with every backend; a learning rate schedule that fits the steps."""
    config = bench.config
    part, rest = divmod(config.steps, CONVERGE_ROUNDS)
    if rest or not part:
        raise UserError(f"--steps must be a multiple of {CONVERGE_ROUNDS}, got {config.steps}")
    if (batch := config.fixed_batch) is None:
        raise UserError("--batch_size=auto has no place in converge: all train on the same batches")
    folder = Path(config.train.data_dir) / config.train.dataset
    data.load(folder, "train", bench.model.block_size, bench.vocab_size)  # or say how to prepare it
    schedule: dict[str, Any] = {"max_iters": config.steps, "lr_decay_iters": config.steps}
    schedule["warmup_iters"] = config.steps // 10

    def jobs(seed: int) -> dict[str, dict[str, Any]]:
        more = {**schedule, "seed": config.train.seed + seed}
        if not config.paths:
            order = dict.fromkeys(["manual", *bench.backends])
            return {name: bench.job("converge", name, batch, **more) for name in order}
        exact = {"dtype": "float32", "tf32": False, "attention_backend": "manual"}
        plain = {**more, **exact, "compile": False, "residual_dtype": "float32"}
        made = {"plain": bench.job("converge", "plain", batch, "plain", **plain)}
        own = {"attention_backend": config.train.attention_backend}
        for path in config.paths:
            made[path] = bench.job("converge", path, batch, **more, **own, **PATHS[path])
        return made

    found: dict[str, Outcome] = {}  # its rounds are those of all seeds, in order
    for seed in range(config.seeds):
        everyone = jobs(seed)
        # One run is one process from its first step to its last: "fresh" is one after the other.
        groups = [{n: j} for n, j in everyone.items()] if config.fresh_rounds else [everyone]
        for group in groups:
            done = bench.measure(group, {"": {"steps": part}}, CONVERGE_ROUNDS, fresh=False)
            for (name, _), outcome in done.items():
                if (first := found.setdefault(name, outcome)) is not outcome:
                    first.rounds += outcome.rounds
                    first.failure = first.failure or outcome.failure
    table = []
    sequences = batch * config.train.gradient_accumulation_steps
    for name in jobs(0):
        row = rows.begin("converge", name, {}, found[name], config.noise)
        table.append(rows.of_training(row, found[name], bench.model, sequences, bench.peak, {}))
    rows.of_convergence(table, next(iter(jobs(0))), config.tolerance, config.seeds)
    return table, {}


def only_roofline(config: BenchConfig, gpu: str) -> int:
    """Print the least time of each part of a step on a GPU that need not be here."""
    wanted: str = config.train.dtype
    half = (d for d in ("bfloat16", "float16") if flops.datasheet_peak(gpu, d))
    dtype = next(half, "float32") if wanted == "auto" else wanted
    peak = flops.datasheet_peak(gpu, dtype, config.train.tf32)
    bandwidth = flops.datasheet_bandwidth(gpu)
    if peak is None or bandwidth is None:
        of = "bfloat16 or float16" if wanted == "auto" else dtype
        raise UserError(
            f"--roofline: the table of GPUs has no {of} rates of {gpu!r}; names are those that "
            "drivers give: 'NVIDIA H200', 'NVIDIA A100-SXM4-80GB'"
        )
    if config.train.peak_tflops:
        peak = flops.peak("cpu", dtype, config.train.peak_tflops)
    if config.bandwidth_gbs:
        bandwidth = config.bandwidth_gbs * 1e9, "--bandwidth_gbs"
    if (batch := config.fixed_batch) is None:
        raise UserError("--roofline needs a --batch_size")
    micro = config.train.gradient_accumulation_steps
    vocab_size, source = vocabulary(config)
    model, sequences = config.train.model(vocab_size), batch * micro
    parts = roofline.work(model, sequences, micro, dtype, bool(config.train.grad_clip))
    console = tables.console()
    console.print(Text(
        f"A training step of {model.n_layer} layers, {model.n_embd} wide, vocabulary "
        f"{vocab_size:,} ({source}), {sequences} x {model.block_size} tokens, {dtype}, on {gpu}"
        f"\npeak: {peak}\nmemory: {bandwidth[0] / 1e9:,.4g} GB/s ({bandwidth[1]})\n"
    ))  # fmt: skip
    rates = {"ceiling": peak.tflops, "reachable": config.products_tflops}
    found = {}
    for name, tflops in rates.items():
        if tflops:
            how = f", with matmuls at {tflops:,.4g} TFLOP/s" * (name == "reachable")
            lines = roofline.lines(parts, tflops, bandwidth[0])
            best = roofline.ceiling(parts, model, sequences, tflops, bandwidth[0], peak.tflops)
            title = f"The roofline of each part{how}"
            console.print(tables.rich_table(title, tables.rooflines(lines)))
            console.print(Text(roofline.told(best, how) + "\n"))
            found[name] = {**best, "parts": lines}
    if config.json:
        print(json.dumps({"gpu": gpu, "dtype": dtype, "vocab_size": vocab_size, **found}))
    return 0


def specs(bench: Bench) -> list[dict[str, Any]]:
    """What will be asked of the backends, as fields of Spec: a backend that can do none of it has
    no process started."""
    model = bench.model
    own: dict[str, Any] = {name: getattr(model, name) for name in ("n_head", "head_dim")}
    own |= {"n_kv_head": model.kv_heads, "window": model.spec("float32").window}
    if bench.mode == "decode":
        pages = {"paged": {"page_size": 16}}
        caches = bench.config.kv_caches
        return [{**own, "grad": False, "cache": c, **pages.get(c, {})} for c in caches]
    if bench.mode == "kernel":
        return [{**own, "window": point["window"]} for point in grid(bench).values()]
    return [{**own, "dropout": model.dropout}]


MODES: dict[str, Callable[[Bench], Table]] = {
    "train": train,
    "kernel": kernel,
    "decode": decode,
    "converge": converge,
}
