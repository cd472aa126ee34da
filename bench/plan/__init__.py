"""`bench_mfu.py plan`: its GPUs, and tables of bench/plan/scale.py's estimates."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from bench import ROOT, Json, parts, tables
from bench.plan.scale import KINDS, SHARE, Cluster, Plan
from bench.settings import Plan as Settings
from bench.tables import Cells
from core import flops
from core.gpus import SERVERS, describe_rated
from core.runtime import decide_residual
from core.settings import UserError, user_errors
from model import GPTConfig


def cluster(config: Settings) -> tuple[Cluster, list[str]]:
    if config.gpu is None or config.peak_tflops == "measure":
        raise UserError("plan measures nothing: give --gpu=H200 and --peak_tflops as a number")
    with user_errors("--gpu: "):
        gpu, note = describe_rated(config.gpu)
    dtype: str = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if flops.datasheet_peak(gpu.name, "bfloat16") else "float16"
    peak = flops.datasheet_peak(gpu.name, dtype, config.tf32)
    if peak is None:
        raise UserError(f"--gpu: no {dtype} rates known for {gpu.name!r}")
    if config.peak_tflops:
        peak = flops.Peak(config.peak_tflops, "--peak_tflops")
    server = SERVERS.get(gpu.name) if "800" not in config.gpu else None  # A800, H800: less NVLink

    def rate(of: str, option: str, unit: str) -> float:
        found = getattr(config, option) or getattr(gpu, of, None) or getattr(server, of, None)
        if found is None:
            raise UserError(f"the {of} of {gpu.name!r} is unknown: give --{option}, in {unit}")
        return 1e9 * float(found)

    memory = rate("memory", "memory_gb", "GB")
    bandwidth = rate("bandwidth", "bandwidth_gbs", "GB/s")
    source = "--bandwidth_gbs" if config.bandwidth_gbs else f"datasheet: {gpu.source}"
    several, between = max(config.gpus) > 1, max(config.gpus) > config.gpus_per_node
    nvlink = rate("nvlink", "nvlink_gbs", "GB/s each way") if several else math.inf
    network = rate("network", "network_gbs", "GB/s each way, a GPU") if between else math.inf
    products, node = config.products_tflops or peak.tflops, config.gpus_per_node
    at = Cluster(dtype, peak, products, bandwidth, memory, node, nvlink, network)
    lines = [note] if note else []
    size = f"memory: {memory / 1e9:,.4g} GB, to be filled to {SHARE:.0%}"
    lines += [f"peak: {peak}", f"{size}, at {bandwidth / 1e9:,.4g} GB/s ({source})"]
    if several:
        links = f"links: NVLink {nvlink / 1e9:,.4g} GB/s among {node} GPUs"
        links += f", network {network / 1e9:,.4g} GB/s a GPU" if between else ""
        lines += [f"{links}, each way", f"       ({server.source})"] if server else [links]
    return at, [*lines, f"computing: its roofline, with matmuls at {products:,.4g} TFLOP/s"]


def plans(config: Settings, of: Plan, gpus: int) -> list[Json]:
    if gpus > of.at.node and gpus % of.at.node:
        raise UserError(f"--gpus={gpus} is not a multiple of --gpus_per_node={of.at.node}")
    option = "--context_parallels" if config.context_parallels else "--context_parallel"
    for N in (rings := config.context_parallels or (config.context_parallel,)):
        if gpus % N:
            raise UserError(f"{option}: rings of {N} do not divide --gpus={gpus}")
    ways = ["ddp"] + (["fsdp"] if gpus > 1 else []) + (["hybrid"] if gpus > of.at.node else [])
    made = (replace(of, parallel=way, gpus=gpus, context=N) for way in ways for N in rings)
    return [plan.row() for plan in made]


def run(config: Settings) -> int:
    at, lines = cluster(config)
    vocab_size, source = parts.vocabulary(config)
    model = GPTConfig.of(config, vocab_size)
    between = decide_residual(config.residual_dtype, "cuda", at.dtype)
    residual = 2 if between == "autocast" and at.dtype != "float32" else 4
    sequences = config.batch_size * config.gradient_accumulation_steps
    plan = Plan(model, at, sequences, config.batch_size, config.gradient_checkpointing,
                bool(config.grad_clip), residual)  # fmt: skip
    every = {n: plans(config, plan, n) for n in config.gpus}
    print(
        f"PLANNED, not measured: {model.n_layer} layers, {model.n_embd:,} wide, on {config.gpu}\n"
        f"{sequences:,} x {model.block_size:,} tokens a step, at most {plan.largest:,} sequences "
        f"in a micro-batch, {at.dtype}{', gradient checkpointing' if plan.checkpointing else ''}\n"
        f"vocabulary: {vocab_size:,} ({source})"
    )
    lines += ["optimizer: memory and times are AdamW's, not Muon's"] * (config.optimizer == "muon")
    print(*lines, "formulas, and what they leave out: docs/PLAN.md", sep="\n")
    for n, made in every.items():
        for r in (r for r in made if "why" in r):
            where = f"{n:,} GPUs, {r['parallel']}, context {r['context_parallel']}"
            print(f"\n{where}: {r['why']}")
        good = [r for r in made if "why" not in r]
        for title, cells in sections(good, flops.given(at.peak.source)) if good else ():
            text = tables.markdown(cells, terminal=True)
            print(f"\n{n:,} GPU{'s' if n > 1 else ''}, planned: {title}\n{text}")
        if good:
            print(f"A lower bound. {nearest(at, config.gpu or '', n)}")
    if config.json:
        content = [r for made in every.values() for r in made]
        print(json.dumps({"mode": "plan", "planned": True, "gpu": config.gpu, "rows": content}))
    return 0


def sections(rows: list[Json], given: str = "") -> list[tuple[str, Cells]]:
    def gb(n: float) -> str:
        return "-" if not n else f"{n / 1e9:.2g}" if n < 1e8 else tables.number(n / 1e9)

    what, ms = ["planned", "context"], ["compute", "sending", "exposed", "step", "Mtok/s", "mfu"]
    memory = [[*what, *rows[0]["memory"], "sum", "left"]]
    sent = [[*what, "micro", *KINDS, "NVLink", "network"]]
    time = [what + [title if title == "sending" else title + given for title in ms]]
    for r in rows:
        what, left = [r["parallel"], str(r["context_parallel"])], r["left_bytes"]
        fits = gb(left) if left >= 0 else f"over by {gb(-left)}"
        memory.append([*what, *map(gb, (*r["memory"].values(), r["memory_bytes"])), fits])
        each = (*r["sent"].values(), *r["links"].values())
        sent.append([*what, str(r["micro_steps"]), *map(gb, each)])
        mfu = "-" if r["mfu"] is None else tables.percent(r["mfu"])
        ends = [tables.number(r["ms"]), tables.number(r["tokens_per_s"] / 1e6), mfu]
        parts = (tables.number(r[f"{of}_ms"]) for of in ("compute", "communication", "exposed"))
        time.append([*what, *parts, *(ends if left >= 0 else ["-", "-", "does not fit"])])
    titles = ("memory of a rank, GB", "sent by a rank in a step, GB", "a step, ms")
    made = zip(titles, (memory, sent, time))
    return [(title, (head, lines)) for title, (head, *lines) in made]


def nearest(at: Cluster, gpu: str, gpus: int) -> str:
    """Measured step in docs/MEASURE.md, nearest by name, rate, number."""
    page = (ROOT / "docs" / "MEASURE.md").read_text(encoding="utf-8").partition("## MFU anchors")[2]
    lines = (line.split("|")[1:-1] for line in page.splitlines() if line.startswith("|"))
    head, _, *anchors = [[cell.strip(" `") for cell in line] for line in lines]
    known = describe_rated(gpu)[0]
    half = flops.datasheet_peak(known.name, "bfloat16") or at.peak

    def distance(anchor: Json) -> tuple[bool, float, float]:
        count, _, name = anchor["GPUs"].partition(" x ")
        off = math.log(float(anchor["peak, TFLOP/s"].replace(",", "")) / half.tflops)
        return not known.short.startswith(name), abs(off), abs(math.log(int(count) / gpus))

    rows = (dict(zip(head, anchor)) for anchor in anchors)
    best = min((row for row in rows if row["ms a step"] != "-"), key=distance)
    of = f"{best['code']}; GPT-2 124M, {best['tokens a step']} tokens a step: docs/MEASURE.md"
    return f"Others measured on {best['GPUs']}: {best['ms a step']} ms, mfu {best['mfu']} ({of})"
