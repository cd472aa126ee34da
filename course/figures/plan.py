"""The tables of docs/PLAN.md."""

from __future__ import annotations

from bench import plan as planned
from bench import tables
from bench.plan import Cluster, Job, Plan
from core import flops
from course.figures import table
from model import GPTConfig

H200 = Cluster("bfloat16", flops.Peak(989.4, "datasheet"), 989.4, 4.8e12, 141e9, 8, 450e9, 50e9)
WAYS = [("ddp", 1), ("fsdp", 1), ("hybrid", 1), ("fsdp", 8)]


def plan(what: int = 1, T: int = 8192, gpus: int = 16) -> str:
    """docs/PLAN.md: 1 memory, 2 bytes sent, 3 time, of GPT-2 124M on H200s."""
    model = GPTConfig(block_size=T, bias=False)
    plans = [Plan(Job(model, 4 * gpus, 4, residual=2), H200, way, gpus, N) for way, N in WAYS]
    rows = [planned.row(p) for p in plans]
    return tables.markdown(planned.sections(rows)[what - 1][1])


def saved(T: int = 8192) -> str:
    """docs/PLAN.md: bytes that a token of GPT-2 124M leaves for the backward pass."""
    rows = []
    for dtype, residual in (("float32", 4), ("bfloat16", 2)):
        job = Job(GPTConfig(block_size=T, bias=False), 4, 4, residual=residual)
        layer, ends = Plan(job, Cluster(dtype, H200.peak, 1, 1, 1, 8, 1, 1), "ddp", 1, 1).per_token
        sizes = {"a layer": layer, "around them": ends, "of 12 layers": 12 * layer + ends,
                 "with gradient checkpointing": 12 * residual * 768 + layer + ends}
        rows.append({"dtype": dtype, **{title: f"{n:,}" for title, n in sizes.items()}})
    return table(rows)
