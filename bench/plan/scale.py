"""Estimates of a training step for the largest rank; docs/PLAN.md explains the formulas."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property

import torch

from bench import parts
from core import flops
from core.loss import chunk_rows
from core.parallel import BUCKET_MB
from model import GPT, GPTConfig

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "ring")  # ring: point to point
# Seconds of a message over NVLink and network: NCCL's rings in LL128 (src/graph/tuning.cc, hwLat).
HOPS = 1.9e-6, 4.0e-6


@dataclass(frozen=True)
class Cluster:
    """`node` GPUs in a server. Rates: bytes a second, links each way, per GPU."""

    dtype: str
    peak: flops.Peak
    products: float
    bandwidth: float
    memory: float
    node: int
    nvlink: float
    network: float


@dataclass(frozen=True)
class Sent:
    nvlink: float = 0
    network: float = 0
    seconds: float = 0


def collective(kind: str, size: float, ranks: int, servers: int, at: Cluster) -> Sent:
    if ranks == 1:
        return Sent()
    wire = size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    here = ranks // servers
    over = 0 if servers == 1 else wire / here
    inside, between = HOPS
    hops = (ranks - servers) * inside + (servers - 1) * between
    if kind == "all-reduce":  # a tree sends as many bytes in fewer hops
        tree = (here - 1) * inside + math.ceil(math.log2(servers)) * between
        hops = 2 * min(hops, tree)
    return Sent(wire - over, over, hops + max((wire - over) / at.nvlink, over / at.network))


@dataclass(frozen=True)
class Job:
    model: GPTConfig
    sequences: int
    batch: int
    checkpointing: bool = False
    clip: bool = True
    residual: int = 4  # bytes of an element between blocks


@cache
def shapes(m: GPTConfig) -> tuple[list[torch.Size], list[torch.Size]]:
    with torch.device("meta"):
        model = GPT(replace(m, n_layer=1, attention_window=None))
    block = {id(p): p.shape for p in model.transformer.h[0].parameters()}
    return [*block.values()], [p.shape for p in model.parameters() if id(p) not in block]


def shard(shapes: list[torch.Size], ranks: int) -> int:
    """Elements of a rank; FSDP pads rows to a multiple of `ranks`."""
    return sum(math.ceil(s[0] / ranks) * math.prod(s[1:]) for s in shapes)


def parameters(m: GPTConfig) -> int:
    block, root = shapes(m)
    return m.n_layer * shard(block, 1) + shard(root, 1)


@dataclass
class Plan:
    """A job in rings of `context` GPUs; "hybrid" is fsdp inside a server."""

    job: Job
    at: Cluster
    parallel: str
    gpus: int
    context: int

    def __post_init__(self) -> None:
        m, gpus, N = self.job.model, self.gpus, self.context
        by_way = {"ddp": 1, "fsdp": gpus, "hybrid": min(self.at.node, gpus)}
        self.shard = by_way[self.parallel]  # ranks of a copy of the weights
        self.copies = gpus // self.shard
        servers = math.ceil(gpus / self.at.node)
        self.group = (self.shard, 1) if self.parallel == "hybrid" else (gpus, servers)
        # Elements of a rank in a block, and outside.
        self.block, self.root = (shard(of, self.shard) for of in shapes(m))
        self.kept = m.n_layer * self.block + self.root
        self.sequences = math.ceil(self.job.sequences * N / gpus)
        self.micro = math.ceil(self.sequences / self.job.batch)
        # Per rank and micro-batch; a ring pads to 2 N equal chunks.
        local = m.block_size if N == 1 else 2 * math.ceil(m.block_size / (2 * N))
        self.tokens = math.ceil(self.sequences / self.micro) * local
        self.a = 4 if self.at.dtype == "float32" else 2  # bytes of an activation
        self.kv = m.kv_heads * m.head_dim  # channels of the keys

    @property
    def per_token(self) -> tuple[int, int]:
        """Bytes saved for backward: (per layer, outside)."""
        m, a, r, C, K = self.job.model, self.a, self.job.residual, self.job.model.n_embd, self.kv
        norms = 2 * (r * C + 8 + a * C)  # input, mean and 1/std; the matmul's input
        Q = m.n_head * m.head_dim
        attention = a * (Q + 2 * K) + a * Q + 4 * m.n_head  # q, k, v; out; L
        attention += a * (Q + K) * (m.position == "rope")  # before they are rotated
        ends = 8 + (r * C + 8) + a * C  # token, last norm, gradient of the loss
        wide = 4 if m.mlp == "swiglu" else 2  # gate, value, silu, product; or GELU's in and out
        return norms + attention + a * wide * m.hidden, ends

    @cached_property
    def memory(self) -> dict[str, int]:
        """Peak bytes by purpose."""
        m, a, r, n = self.job.model, self.a, self.job.residual, self.tokens
        C, V, L, half, S = m.n_embd, m.vocab_size, m.n_layer, a < 4, self.shard
        layer, ends = self.per_token
        saved = L * layer + ends
        if self.job.checkpointing:  # the layers' inputs, and one layer
            saved = L * r * C + layer + ends
        rows = chunk_rows(n, V, "cuda", getattr(torch, self.at.dtype), self.at.memory)
        added = parameters(m) if S > 1 and self.micro > 1 else 0  # unsharded gradients
        if S > 1:  # root, two blocks in both dtypes, a block's gradients
            gathered = 4 * self.root * S + (4 * a + a * half + 4) * self.block * S
        else:  # autocast's copies of the weights
            gathered = a * half * L * sum(math.prod(s) for s in shapes(m)[0] if len(s) > 1)
        if self.context > 1:  # two blocks' K, V, three's dK, dV; O and dQ in float32
            gathered += n * (2 * 2 * self.kv * a + 3 * 2 * self.kv * 4 + 2 * 4 * C)
        return {
            "weights": 4 * self.kept,
            "gradients": 4 * (self.kept + added),
            "AdamW": 8 * self.kept,
            "activations": n * saved + n * C * (r + 5 * a),  # and their gradients
            "logits": 8 * rows * V + V * C * (4 + 2 * a * half) + n * C * (r + a * half),
            "gathered": gathered,
        }

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    def cost(self, kind: str, size: float) -> Sent:
        return collective(kind, size, *self.group, self.at)

    def passed(self, width: int) -> Sent:
        size = 2 * self.tokens * self.kv * width
        if self.context <= self.at.node:  # neighbours
            return Sent(size, 0, HOPS[0] + size / self.at.nvlink)
        return Sent(0, size, HOPS[1] + size / self.at.network)  # of the server's last rank

    @cached_property
    def costs(self) -> dict[str, Sent]:
        S, copies = self.shard, self.copies
        found = {}
        for of, n, width in (("", self.block, self.a), (" root", self.root, 4)):
            found[f"gather{of}"] = self.cost("all-gather", width * n * S)
            found[f"scatter{of}"] = self.cost("reduce-scatter", 4 * n * S)
            # Between the copies of "hybrid".
            found[f"across{of}"] = collective("all-reduce", 4 * n, copies, copies, self.at)
        return found

    def sent(self) -> Iterator[tuple[str, int, Sent]]:
        L, N, cost = self.job.model.n_layer, self.context, self.costs
        if self.parallel == "ddp":
            buckets = math.ceil(4 * self.kept / (BUCKET_MB * 2**20))
            yield "all-reduce", buckets, self.cost("all-reduce", 4 * self.kept / buckets)
        else:
            yield "all-gather", 2 * L * self.micro, cost["gather"]
            yield "all-gather", self.micro, cost["gather root"]
            for times, of in ((L, ""), (1, " root")):
                yield "reduce-scatter", times, cost[f"scatter{of}"]
                yield "all-reduce", times, cost[f"across{of}"]
        if N > 1:
            passes = (2 + self.job.checkpointing) * (N - 1)  # forward, perhaps twice, backward
            yield "ring", L * self.micro * passes, self.passed(self.a)
            yield "ring", L * self.micro * N, self.passed(4)  # dK and dV

    @cached_property
    def computing(self) -> tuple[float, float, float, float]:
        """Seconds of (a step, a block's forward, backward, attention)."""
        job, at, each = self.job, self.at, self.job.model.n_layer * self.micro
        sizes = job.model, self.sequences / self.context
        works = parts.work(*sizes, self.micro, at.dtype, job.clip)
        s = {name: w.ms(at.products, at.bandwidth) / 1e3 for name, w in works.items()}
        # A rank updates only its shard.
        update = parts.work(*sizes, 1, at.dtype, job.clip)["optimizer"].bytes / at.bandwidth
        s["optimizer"] -= update * (1 - self.kept / parameters(job.model))
        names = ("linear", "attention", "norms and elementwise")
        linear, scores, norms = (s[name] / each for name in names)
        # Forward: 1 of 3 matmuls, 2 of attention's 7, half of the norms' bytes.
        forward = linear / 3 + norms / 2 + scores * 2 / 7
        again = forward if job.checkpointing else 0.0
        backward = again + linear * 2 / 3 + norms / 2 + scores * 5 / 7
        return sum(s.values()) + each * again, forward, backward, scores

    @property
    def exposed(self) -> float:
        """Seconds of communication that computing does not hide."""
        _, forward, backward, scores = self.computing
        L, m = self.job.model.n_layer, self.micro
        if self.parallel == "ddp":  # the last bucket is never hidden
            last = self.cost("all-reduce", 4 * self.root).seconds
            total = sum(times * s.seconds for kind, times, s in self.sent() if kind != "ring")
            seconds = max(min(last, total), total - L * backward)
        else:  # a block's all-gather overlaps the previous block, its reduce-scatter the next
            cost = {name: sent.seconds for name, sent in self.costs.items()}
            gather, scatter, across = cost["gather"], cost["scatter"], cost["across"]
            each = cost["gather root"] + gather + (L - 1) * max(0, gather - forward)
            back = gather + (L - 1) * max(0, gather - backward)
            reducing = gather + (L - 1) * max(0, gather + scatter - backward, across - backward)
            ends = scatter + across + cost["scatter root"] + cost["across root"]
            seconds = m * each + (m - 1) * back + reducing + ends
        if (N := self.context) == 1:
            return seconds
        # K and V overlap the previous chunk's attention; the last dK and dV overlap nothing.
        keys, gradients = self.passed(self.a).seconds, self.passed(4).seconds
        ahead = (1 + self.job.checkpointing) * (N - 1) * max(0, keys - scores * 2 / 7 / N)
        behind = (N - 1) * max(0, keys + gradients - scores * 5 / 7 / N) + gradients
        return seconds + L * m * (ahead + behind)

    @property
    def why_not(self) -> str:
        shares = self.gpus // self.context
        if self.job.sequences // shares < self.micro:
            few = f"{self.job.sequences:,} sequences a step are too few for {shares:,} shares"
            return f"{few}, each of whole ones (--context_parallels splits them)"
        if self.shard > 1 and self.at.dtype == "float16":
            return "fsdp does not support float16 (no loss scaling)"
        return ""
