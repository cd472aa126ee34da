"""The modes of bench_mfu.py: requests to the workers, and the rows made of their answers."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import data
from bench import Json, hf, roofline, rows
from bench.bench import Bench
from bench.process import Failure, Key, Outcome
from core import flops
from core.settings import UserError

PROFILED_STEPS = 3
CONVERGE_ROUNDS = 10  # parts of a converge run, interleaved
PATHS = {  # of converge --paths
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16-residual": {"dtype": "bfloat16", "residual_dtype": "autocast"},
}


def train(bench: Bench) -> list[rows.Row]:
    """Training steps of every backend and baseline."""
    config, batch = bench.config, bench.config.batch_size
    everyone, micro = bench.everyone(), config.train.gradient_accumulation_steps
    if not bench.reference:
        try:
            bench.reference = bench.ask_once("reference", batch * micro)
        except Failure as e:
            bench.reference = {"why": str(e)}
    jobs = {name: bench.job("train", name, batch, base) for name, base in everyone.items()}
    ask = {"seconds": config.seconds, "warm_up_steps": config.warm_up_steps}
    ask["profile"] = PROFILED_STEPS * config.profile

    def row(name: str, where: str, outcome: Outcome) -> rows.Row:
        row = rows.begin("train", name, {}, outcome) | {"batch_size": batch}
        how = bench.model, batch * micro, bench.peak, bench.reference
        row = rows.of_training(row, outcome, *how)
        if "profile" in row:
            row["profile"] = beside_roofline(bench, row["profile"], batch, micro)
        return row

    return bench.measure({}, jobs, {"": ask}, row)


def beside_roofline(bench: Bench, found: Json, batch: int, micro: int) -> Json:
    """Add each part's roofline to a worker's profile of one micro-batch and the update."""
    config, m = bench.config, bench.machine
    parts = roofline.work(bench.model, batch, 1, m["dtype"], bool(config.train.grad_clip))
    known = None if config.bandwidth_gbs else flops.datasheet_bandwidth(m["name"])
    bandwidth = known or (m["bandwidth"], m["bandwidth_source"])
    products = config.products_tflops or m["products_tflops"]
    made = rows.of_profile(found, parts, bench.model, batch, bench.peak, bandwidth, products)
    return {**made, "micro_batches": micro}


def grid(bench: Bench) -> list[Json]:
    """Return the points of the mode kernel."""
    if bench.points:
        return bench.points
    config, model = bench.config, bench.model
    default: tuple[int, ...] = (512, 1024, 2048, 4096, 8192, 16384, 32768)
    sizes: tuple[int, ...] = (1, 8)
    if not bench.device.startswith("cuda"):
        default, sizes = (128, 512, 2048), (1, 4)
    lengths, batch_sizes = config.lengths or default, config.batch_sizes or sizes
    windows = config.windows or tuple(dict.fromkeys(model.windows))
    heads = {"H": model.n_head, "Hkv": model.kv_heads, "D": model.head_dim}
    # Without the corner of large batches and long sequences, which takes most of the time.
    most = math.inf if config.lengths and config.batch_sizes else sorted(lengths)[len(lengths) // 2]
    return [
        {"B": B, "T": T, **heads, "window": window}
        for B, T, window in itertools.product(batch_sizes, lengths, windows)
        if min(batch_sizes) == B or most >= T
    ]


def kernel(bench: Bench) -> list[rows.Row]:
    """Attention alone over grid()."""
    points = {rows.where(point): point for point in grid(bench)}
    jobs = {name: bench.job("kernel", name) for name in bench.backends}
    seconds = bench.config.seconds / 5

    def row(name: str, where: str, outcome: Outcome) -> rows.Row:
        row = rows.begin("kernel", name, points[where], outcome)
        return rows.of_kernel(row, outcome, bench.peak)

    ask = {where: {**point, "seconds": seconds} for where, point in points.items()}
    return bench.measure({}, jobs, ask, row)


def texts(bench: Bench) -> list[Json]:
    """Return the points of the mode decode."""
    config = bench.config
    cuda, T = bench.device.startswith("cuda"), bench.model.block_size
    new = config.new_tokens or (128 if cuda else 16)  # three record the CUDA graph
    batch_sizes = config.batch_sizes or ((1, 8) if cuda else (1, 4))
    prompts = config.prompts or (max(1, T // 2 - new),)
    if max(prompts) + new > T or min(prompts) < 1:
        raise UserError(
            f"--prompts, --new_tokens: {max(*prompts, 1)} + {new} tokens exceed --block_size={T}"
        )
    caches = [c for c in config.kv_caches if not bench.hf or c in hf.CACHES]
    shapes = itertools.product(batch_sizes, prompts, caches, config.constraint)
    keys = ("B", "P", "cache", "constraint")
    return [{**dict(zip(keys, shape)), "new_tokens": new} for shape in shapes]


def decode(bench: Bench) -> list[rows.Row]:
    """Generation of every backend and baseline over texts()."""
    points = {rows.where(point): point for point in texts(bench)}
    everyone = bench.everyone(("sdpa",))
    jobs = {name: bench.job("decode", name, baseline=what) for name, what in everyone.items()}

    def row(name: str, where: str, outcome: Outcome) -> rows.Row:
        row = rows.begin("decode", name, points[where], outcome)
        row["baseline"] = name not in bench.backends
        return rows.of_decoding(row, outcome, bench.machine["bandwidth"])

    return bench.measure({}, jobs, points, row)


def converge(bench: Bench) -> list[rows.Row]:
    """The same training with every backend or path; the learning rate decays over its steps."""
    config = bench.config
    part, rest = divmod(config.steps, CONVERGE_ROUNDS)
    if rest or not part:
        raise UserError(f"--steps must be a multiple of {CONVERGE_ROUNDS}, got {config.steps}")
    batch = config.batch_size
    folder = Path(config.train.data_dir) / config.train.dataset
    data.load(folder, "train", bench.model.block_size, bench.vocab_size)  # or raise UserError
    schedule: Json = {"max_iters": config.steps, "lr_decay_iters": config.steps}
    schedule["warmup_iters"] = config.steps // 10

    def jobs(seed: int) -> dict[str, Json]:
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

    found: dict[Key, Outcome] = {(name, ""): Outcome() for name in jobs(0)}
    planned = CONVERGE_ROUNDS * config.seeds  # an outcome has the rounds of all seeds
    sequences = batch * config.train.gradient_accumulation_steps

    def row(name: str, where: str, outcome: Outcome) -> rows.Row:
        row = rows.begin("converge", name, {}, outcome)
        row = rows.of_training(row, outcome, bench.model, sequences, bench.peak, {})
        if row["status"] == "ok" and len(outcome.rounds) < planned:  # no final loss yet
            row |= {"status": "stopped", "why": [f"{len(outcome.rounds)} of {planned} parts"]}
        return row

    def judge(table: list[rows.Row]) -> None:
        rows.of_convergence(table, next(iter(jobs(0))), config.tolerance, config.seeds)

    made: list[rows.Row] = []
    for everyone in map(jobs, range(config.seeds)):
        # Not fresh: a training is one process.
        how: Json = {"rounds": CONVERGE_ROUNDS, "fresh": False, "judge": judge}
        made = bench.measure(found, everyone, {"": {"steps": part}}, row, **how)
    return made


def points(bench: Bench) -> list[Json]:
    """Return all points of the run, for the plan."""
    if bench.mode == "decode":
        return texts(bench)
    return grid(bench) if bench.mode == "kernel" else []


def specs(bench: Bench) -> list[Json]:
    """Return the fields of the Specs in this run; a backend that supports none is not started."""
    model = bench.model
    own = {"n_head": model.n_head, "n_kv_head": model.kv_heads, "head_dim": model.head_dim}
    own |= model.layers[0] if bench.hf else {"window": model.windows[0]}
    if bench.mode == "decode":
        asked = [{**own, "grad": False, "cache": cache} for cache in bench.config.kv_caches]
        return [{**s, "page_size": 16} if s["cache"] == "paged" else s for s in asked]
    if bench.mode == "kernel":
        return [{**own, "window": point["window"]} for point in grid(bench)]
    return [{**own, "dropout": model.dropout}]


MODES = {"train": train, "kernel": kernel, "decode": decode, "converge": converge}
