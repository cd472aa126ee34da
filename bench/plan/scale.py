"""Estimates of a training step for the largest rank; docs/PLAN.md explains the formulas."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import torch

from bench import Json, parts
from core import flops
from core.loss import chunk_rows
from core.parallel import BUCKET_MB
from model import GPT, GPTConfig

SHARE = 0.95  # of the memory
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


class Message(NamedTuple):
    """Bytes over each link."""

    kind: str
    times: int
    nvlink: float = 0
    network: float = 0
    seconds: float = 0


@cache
def shapes(m: GPTConfig) -> tuple[list[torch.Size], list[torch.Size]]:
    """Parameters of a block, and the others."""
    with torch.device("meta"):
        model = GPT(replace(m, n_layer=1, attention_window=None))
    block = {id(p): p.shape for p in model.transformer.h[0].parameters()}
    return [*block.values()], [p.shape for p in model.parameters() if id(p) not in block]


def elements(shapes: list[torch.Size], ranks: int) -> int:
    """FSDP pads rows to a multiple of `ranks`."""
    return sum(math.ceil(s[0] / ranks) * math.prod(s[1:]) for s in shapes)


@dataclass
class Plan:
    """A step in rings of `context` GPUs; "hybrid" is fsdp inside a server."""

    model: GPTConfig
    at: Cluster
    sequences: int
    largest: int  # micro-batch
    checkpointing: bool = False
    clip: bool = True
    residual: int = 4  # bytes of an element between blocks
    parallel: str = "ddp"
    gpus: int = 1
    context: int = 1

    def __post_init__(self) -> None:
        m, gpus, N = self.model, self.gpus, self.context
        block, root = shapes(m)
        by_way = {"ddp": 1, "fsdp": gpus, "hybrid": min(self.at.node, gpus)}
        self.shard = by_way[self.parallel]  # ranks of a copy of the weights
        self.parameters = m.n_layer * elements(block, 1) + elements(root, 1)
        self.block, self.root = elements(block, self.shard), elements(root, self.shard)
        self.kept = m.n_layer * self.block + self.root
        self.own = math.ceil(self.sequences * N / gpus)
        self.micro = math.ceil(self.own / self.largest)
        # Per rank and micro-batch; a ring pads to 2 N equal chunks.
        local = m.block_size if N == 1 else 2 * math.ceil(m.block_size / (2 * N))
        self.tokens = math.ceil(self.own / self.micro) * local
        self.a = 4 if self.at.dtype == "float32" else 2  # bytes of an activation
        self.kv = m.kv_heads * m.head_dim  # channels of the keys

    @property
    def per_token(self) -> tuple[int, int]:
        """Bytes saved for backward: (per layer, outside)."""
        m, a, r, C, K = self.model, self.a, self.residual, self.model.n_embd, self.kv
        norms = 2 * (r * C + 8 + a * C)  # input, mean and 1/std; the matmul's input
        Q = m.n_head * m.head_dim
        attention = a * (Q + 2 * K) + a * Q + 4 * m.n_head  # q, k, v; out; L
        attention += a * (Q + K) * (m.position == "rope")  # before they are rotated
        ends = 8 + (r * C + 8) + a * C  # token, last norm, gradient of the loss
        wide = 4 if m.mlp == "swiglu" else 2  # gate, value, silu, product; or GELU's in and out
        return norms + attention + a * wide * m.hidden, ends

    @property
    def memory(self) -> dict[str, int]:
        """Peak bytes by purpose."""
        m, a, r, n = self.model, self.a, self.residual, self.tokens
        C, V, L, half, S = m.n_embd, m.vocab_size, m.n_layer, a < 4, self.shard
        layer, ends = self.per_token
        saved = L * layer + ends
        if self.checkpointing:  # the layers' inputs, and one layer
            saved = L * r * C + layer + ends
        rows = chunk_rows(n, V, "cuda", getattr(torch, self.at.dtype), self.at.memory)
        added = self.parameters if S > 1 and self.micro > 1 else 0  # unsharded gradients
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

    def collective(self, times: int, kind: str, size: float, copies: bool = False) -> Message:
        """Among all ranks; hybrid: a server's, or the copies."""
        ranks, servers = self.gpus, math.ceil(self.gpus / self.at.node)
        if copies:
            ranks = servers = self.gpus // self.shard
        elif self.parallel == "hybrid":
            ranks, servers = self.shard, 1
        if ranks == 1:
            return Message(kind, times)
        wire = size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
        here = ranks // servers
        over = 0 if servers == 1 else wire / here
        inside, between = HOPS
        hops = (ranks - servers) * inside + (servers - 1) * between
        if kind == "all-reduce":  # a tree sends as many bytes in fewer hops
            tree = (here - 1) * inside + math.ceil(math.log2(servers)) * between
            hops = 2 * min(hops, tree)
        seconds = hops + max((wire - over) / self.at.nvlink, over / self.at.network)
        return Message(kind, times, wire - over, over, seconds)

    def passed(self, times: int, width: int) -> Message:
        size = 2 * self.tokens * self.kv * width
        if self.at.node % self.context == 0 or self.gpus <= self.at.node:  # in a server
            return Message("ring", times, size, 0, HOPS[0] + size / self.at.nvlink)
        last = HOPS[1] + size / self.at.network  # the server's last rank
        return Message("ring", times, 0, size, last)

    @cached_property
    def sent(self) -> dict[str, Message]:
        L, m, S, N = self.model.n_layer, self.micro, self.shard, self.context
        found = {}
        if self.parallel == "ddp":
            buckets = math.ceil(4 * self.kept / (BUCKET_MB * 2**20))
            found["bucket"] = self.collective(buckets, "all-reduce", 4 * self.kept / buckets)
        else:
            found["gather"] = self.collective(2 * L * m, "all-gather", self.a * self.block * S)
            found["gather root"] = self.collective(m, "all-gather", 4 * self.root * S)
            for of, times, n in (("", L, self.block), (" root", 1, self.root)):
                found[f"scatter{of}"] = self.collective(times, "reduce-scatter", 4 * n * S)
                found[f"across{of}"] = self.collective(times, "all-reduce", 4 * n, copies=True)
        if N > 1:
            passes = (2 + self.checkpointing) * (N - 1)  # forward, perhaps twice, backward
            found["keys"] = self.passed(L * m * passes, self.a)
            found["gradients"] = self.passed(L * m * N, 4)
        return found

    def seconds(self) -> tuple[float, float]:
        """A step's computing, and the communication that it does not hide."""
        at, L, m, N = self.at, self.model.n_layer, self.micro, self.context
        sizes = self.model, self.own / N
        works = parts.work(*sizes, m, at.dtype, self.clip)
        s = {name: w.ms(at.products, at.bandwidth) / 1e3 for name, w in works.items()}
        # A rank updates only its shard.
        update = parts.work(*sizes, 1, at.dtype, self.clip)["optimizer"].bytes / at.bandwidth
        s["optimizer"] -= update * (1 - self.kept / self.parameters)
        names = ("linear", "attention", "norms and elementwise")
        linear, scores, norms = (s[name] / (L * m) for name in names)
        # Forward: 1 of 3 matmuls, 2 of attention's 7, half of the norms' bytes.
        forward = linear / 3 + norms / 2 + scores * 2 / 7
        again = forward if self.checkpointing else 0.0
        backward = again + linear * 2 / 3 + norms / 2 + scores * 5 / 7
        cost = {name: message.seconds for name, message in self.sent.items()}
        # K and V overlap the previous chunk's attention; the last dK and dV overlap nothing.
        keys, gradients = (cost.get(name, 0.0) for name in ("keys", "gradients"))
        ahead = (N - 1) * max(0, keys - scores * 2 / 7 / N)
        behind = (N - 1) * max(0, keys + gradients - scores * 5 / 7 / N) + gradients
        behind += ahead * self.checkpointing
        exposed = L * m * (ahead + behind)
        forward, backward = forward + ahead, backward + behind  # other messages go meanwhile
        if self.parallel == "ddp":  # the last bucket is never hidden
            last = self.collective(1, "all-reduce", 4 * self.root).seconds
            total = self.sent["bucket"].times * cost["bucket"]
            exposed += max(min(last, total), total - L * backward)
        else:  # a block's all-gather overlaps the previous block, its reduce-scatter the next
            gather, scatter, across = cost["gather"], cost["scatter"], cost["across"]
            each = cost["gather root"] + gather + (L - 1) * max(0, gather - forward)
            back = gather + (L - 1) * max(0, gather - backward)
            reducing = gather + (L - 1) * max(0, gather + scatter - backward, across - backward)
            ends = scatter + across + cost["scatter root"] + cost["across root"]
            exposed += m * each + (m - 1) * back + reducing + ends
        return sum(s.values()) + L * m * again, exposed

    def row(self) -> Json:
        row: Json = {"planned": True, "gpus": self.gpus, "parallel": self.parallel}
        row |= {"context_parallel": self.context, "shard_size": self.shard}
        shares = self.gpus // self.context
        if self.sequences // shares < self.micro:
            few = f"{self.sequences:,} sequences a step are too few for {shares:,} shares"
            return {**row, "why": f"{few}, each of whole ones (--context_parallels splits them)"}
        if self.context > (T := self.model.block_size):
            return {**row, "why": f"rings of {self.context} cannot share {T:,} tokens"}
        if self.shard > 1 and self.at.dtype == "float16":
            return {**row, "why": "fsdp does not support float16 (no loss scaling)"}
        sent, links, seconds = dict.fromkeys(KINDS, 0.0), {"nvlink": 0.0, "network": 0.0}, 0.0
        for kind, times, nvlink, network, s in self.sent.values():
            links["nvlink"] += times * nvlink
            links["network"] += times * network
            sent[kind] += times * (nvlink + network)
            seconds += times * s
        memory, (compute, exposed) = self.memory, self.seconds()
        held = sum(memory.values())
        rate = self.sequences * T / (compute + exposed)
        row |= {"sequences": self.own, "micro_steps": self.micro, "memory": memory}
        row |= {"memory_bytes": held, "left_bytes": SHARE * self.at.memory - held}
        row |= {"sent": sent, "links": links, "compute_ms": 1e3 * compute}
        row |= {"communication_ms": 1e3 * seconds, "exposed_ms": 1e3 * exposed}
        row["ms"] = 1e3 * (compute + exposed)
        return row | flops.Speed(self.model, T, rate, self.at.peak, self.gpus).row()
