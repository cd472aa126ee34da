"""Estimates for `bench_mfu.py plan`: memory, bytes sent and time of a training step.

docs/PLAN.md explains every formula. tests/test_plan.py compares bytes held and sent with those of
two to four processes. Sizes are of the largest rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from bench import parts
from core import flops
from core.flops import Peak
from core.loss import chunk_rows
from core.parallel import BUCKET_MB
from model import GPTConfig

SHARE = 0.95  # of the memory that may be used
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "ring")  # ring: point to point
# Latency of a message in seconds, over NVLink and over the network: NCCL's constants for rings of
# protocol LL128 (src/graph/tuning.cc, hwLat).
HOPS = 1.9e-6, 4.0e-6


@dataclass(frozen=True)
class Cluster:
    """GPUs, `node` of them in a server. Rates in bytes a second, links each way, per GPU."""

    dtype: str  # of the matrix products
    peak: Peak
    products: float  # TFLOP/s of matmuls
    bandwidth: float  # of the GPU's memory
    memory: float  # bytes
    node: int
    nvlink: float
    network: float


@dataclass(frozen=True)
class Sent:
    """Bytes that a rank sends in one collective, by link, and its seconds."""

    nvlink: float = 0
    network: float = 0
    seconds: float = 0


def collective(kind: str, size: float, ranks: int, servers: int, at: Cluster) -> Sent:
    """Return the cost of a ring collective on a tensor of `size` bytes."""
    wire = size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    here = ranks // servers  # in a server, each the last one of one ring
    over = 0 if servers == 1 else wire / here
    inside, between = HOPS
    hops = (ranks - servers) * inside + (servers - 1) * between
    if kind == "all-reduce":  # a tree sends as many bytes in fewer hops
        tree = (here - 1) * inside + math.ceil(math.log2(servers)) * between
        hops = 2 * min(hops, tree)
    return Sent(wire - over, over, hops + max((wire - over) / at.nvlink, over / at.network))


@dataclass(frozen=True)
class Job:
    """Model and batch."""

    model: GPTConfig
    sequences: int  # per step, all ranks
    batch: int  # largest micro-batch
    checkpointing: bool = False
    clip: bool = True
    residual: int = 4  # bytes of an element of the residual stream


def block_shapes(m: GPTConfig) -> list[tuple[int, int]]:
    """Return (rows, elements in a row) of each parameter of a block; FSDP shards the rows."""
    made = flops.matrices(m)
    vectors = [rows for rows, _, bias in made if bias] + 2 * [m.head_dim] * m.qk_norm
    norms = 2 * [m.n_embd] * flops.norm_vectors(m)
    return [(rows, n) for rows, n, _ in made] + [(rows, 1) for rows in vectors + norms]


def root_shapes(m: GPTConfig) -> list[tuple[int, int]]:
    """Return the same for the embeddings and the last norm."""
    C, norm = m.n_embd, flops.norm_vectors(m)
    tables = [m.vocab_size] if m.tied else 2 * [m.vocab_size]
    if m.position == "learned":
        tables.append(m.block_size)
    return [*((rows, C) for rows in tables), *(norm * [(C, 1)])]


def part(shapes: list[tuple[int, int]], ranks: int) -> int:
    """Return the elements in a rank's shard; rows are padded to a multiple of `ranks`."""
    return sum(-(-rows // ranks) * width for rows, width in shapes)


def parameters(m: GPTConfig) -> int:
    return m.n_layer * part(block_shapes(m), 1) + part(root_shapes(m), 1)


@dataclass(frozen=True)
class Plan:
    """A job on `gpus` GPUs, with each sequence split over a ring of `context` GPUs.

    `parallel` is "ddp", "fsdp", or "hybrid": fsdp inside a server, replicated between servers.
    """

    job: Job
    at: Cluster
    parallel: str
    gpus: int
    context: int

    @property
    def shard(self) -> int:
        """Ranks that share one copy of the weights."""
        return {"ddp": 1, "fsdp": self.gpus, "hybrid": min(self.at.node, self.gpus)}[self.parallel]

    @property
    def servers(self) -> int:
        return -(-self.gpus // self.at.node)

    @property
    def sequences(self) -> int:
        """Sequences of a rank in a step."""
        return -(-self.job.sequences * self.context // self.gpus)

    @property
    def micro(self) -> int:
        """Micro-batches in a step."""
        return -(-self.sequences // self.job.batch)

    @property
    def tokens(self) -> int:
        """Tokens of a rank in a micro-batch; a ring pads the sequence to 2 N equal chunks."""
        T, N = self.job.model.block_size, self.context
        local = T if N == 1 else 2 * -(-T // (2 * N))
        return -(-self.sequences // self.micro) * local

    @property
    def a(self) -> int:
        """Bytes of an activation."""
        return 4 if self.at.dtype == "float32" else 2

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """Elements in a rank's shard: (of a block, outside the blocks)."""
        m = self.job.model
        return part(block_shapes(m), self.shard), part(root_shapes(m), self.shard)

    @property
    def kept(self) -> int:
        """Elements in a rank's shard of the model."""
        block, root = self.numbers
        return self.job.model.n_layer * block + root

    @property
    def kv(self) -> int:
        """Channels of the keys."""
        return self.job.model.kv_heads * self.job.model.head_dim

    # --- memory ---

    @property
    def per_token(self) -> tuple[int, int]:
        """Bytes saved per token for the backward pass: (in each layer, outside the layers)."""
        m, a, r, C, K = self.job.model, self.a, self.job.residual, self.job.model.n_embd, self.kv
        norms = 2 * (r * C + 8 + a * C)  # input, mean and 1/std; the matmul's input
        Q = m.n_head * m.head_dim
        attention = a * (Q + 2 * K) + a * Q + 4 * m.n_head  # q, k, v; out; L
        if m.position == "rope":
            attention += a * (Q + K)  # before they are rotated
        ends = 8 + (r * C + 8) + a * C  # token, last norm, gradient of the loss
        wide = 4 if m.mlp == "swiglu" else 2  # gate, value, silu, product; or GELU's in and out
        return norms + attention + a * wide * m.hidden, ends

    @property
    def saved(self) -> int:
        """Bytes saved per micro-batch; with checkpointing the layers' inputs and one layer."""
        (layer, ends), m = self.per_token, self.job.model
        if self.job.checkpointing:
            return self.tokens * (m.n_layer * self.job.residual * m.n_embd + layer + ends)
        return self.tokens * (m.n_layer * layer + ends)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Peak bytes by purpose. The peaks may be at different times."""
        m, a, r, n = self.job.model, self.a, self.job.residual, self.tokens
        C, V, L, half = m.n_embd, m.vocab_size, m.n_layer, a < 4
        block, root = self.numbers
        rows = chunk_rows(n, V, "cuda", getattr(torch, self.at.dtype), self.at.memory)
        added = parameters(m) if self.shard > 1 and self.micro > 1 else 0  # unsharded gradients
        if self.shard > 1:  # root, two blocks in both dtypes, a block's gradients
            gathered = 4 * root * self.shard + (4 * a + a * half + 4) * block * self.shard
        else:  # autocast's copies of the weights
            gathered = a * half * L * sum(i * j for i, j in block_shapes(m)[:4])
        if self.context > 1:  # two blocks' K, V, three's dK, dV; O and dQ in float32
            gathered += n * (2 * 2 * self.kv * a + 3 * 2 * self.kv * 4 + 2 * 4 * C)
        return {
            "weights": 4 * self.kept,
            "gradients": 4 * (self.kept + added),
            "AdamW": 8 * self.kept,
            "activations": self.saved + n * C * (r + 5 * a),  # and their gradients
            "logits": 8 * rows * V + V * C * (4 + 2 * a * half) + n * C * (r + a * half),
            "gathered": gathered,
        }

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    @property
    def over(self) -> float:
        """Bytes above the limit; negative if the job fits."""
        return self.held - SHARE * self.at.memory

    # --- communication ---

    def reduce(self, kind: str, size: float) -> Sent:
        """A collective within a copy of the weights; with "ddp" among all ranks."""
        inside = self.parallel == "hybrid"
        ranks, servers = (self.shard, 1) if inside else (self.gpus, self.servers)
        return collective(kind, size, ranks, servers, self.at)

    def replicas(self, size: float) -> Sent:
        """The all-reduce between the copies of "hybrid"."""
        copies = self.gpus // self.shard
        if copies == 1:
            return Sent()
        return collective("all-reduce", size, copies, copies, self.at)

    def passed(self, width: int) -> Sent:
        """K and V of a layer, or their gradients, sent to the next rank of the ring."""
        size = 2 * self.tokens * self.kv * width
        if self.context <= self.at.node:  # neighbours
            return Sent(size, 0, HOPS[0] + size / self.at.nvlink)
        return Sent(0, size, HOPS[1] + size / self.at.network)  # of the server's last rank

    def sent(self) -> Iterator[tuple[str, int, Sent]]:
        """Yield (kind, times per step, cost of each)."""
        L, N, (block, root) = self.job.model.n_layer, self.context, self.numbers
        if self.parallel == "ddp":
            buckets = -(-4 * self.kept // (BUCKET_MB * 2**20))
            yield "all-reduce", buckets, self.reduce("all-reduce", 4 * self.kept / buckets)
        else:
            gather = self.reduce("all-gather", self.a * block * self.shard)
            yield "all-gather", 2 * L * self.micro, gather
            yield "all-gather", self.micro, self.reduce("all-gather", 4 * root * self.shard)
            for times, size in ((L, 4 * block), (1, 4 * root)):
                yield "reduce-scatter", times, self.reduce("reduce-scatter", size * self.shard)
                yield "all-reduce", times, self.replicas(size)
        if N > 1:
            passes = (2 + self.job.checkpointing) * (N - 1)  # forward, perhaps again, and backward
            yield "ring", L * self.micro * passes, self.passed(self.a)
            yield "ring", L * self.micro * N, self.passed(4)  # dK and dV

    # --- time ---

    @cached_property
    def computing(self) -> tuple[float, float, float, float, float]:
        """Seconds of (a step, a block's forward and backward in a micro-batch, attention's part of
        each)."""
        job, at, L = self.job, self.at, self.job.model.n_layer
        sizes = job.model, self.sequences / self.context
        works = parts.work(*sizes, self.micro, at.dtype, job.clip)
        ms = {name: w.ms(at.products, at.bandwidth) for name, w in works.items()}
        # A rank updates only its shard.
        update = parts.work(*sizes, 1, at.dtype, job.clip)["optimizer"].ms(1, at.bandwidth)
        ms["optimizer"] -= update * (1 - self.kept / parameters(job.model))
        # Forward: 1 of 3 matmuls, 2 of attention's 7, half of the norms' bytes.
        linear, scores, norms = (
            ms[name] / 1e3 / (L * self.micro)
            for name in ("linear", "attention", "norms and elementwise")
        )
        forward = linear / 3 + norms / 2 + scores * 2 / 7
        again = forward if job.checkpointing else 0.0
        backward = again + linear * 2 / 3 + norms / 2 + scores * 5 / 7
        step = sum(ms.values()) / 1e3 + L * self.micro * again
        return step, forward, backward, scores * 2 / 7, scores * 5 / 7

    @property
    def communicating(self) -> float:
        """Seconds of all communication in a step, without overlap."""
        return sum(times * s.seconds for _, times, s in self.sent())

    @property
    def exposed(self) -> float:
        """Seconds of communication that computing does not hide."""
        seconds = self._ddp_exposed() if self.parallel == "ddp" else self._fsdp_exposed()
        return seconds + (self._ring_exposed() if self.context > 1 else 0)

    def _ddp_exposed(self) -> float:
        # The last bucket, the embeddings', is never hidden.
        last = self.reduce("all-reduce", 4 * self.numbers[1]).seconds
        total = sum(times * s.seconds for kind, times, s in self.sent() if kind == "all-reduce")
        return max(min(last, total), total - self.job.model.n_layer * self.computing[2])

    def _fsdp_exposed(self) -> float:
        # A block's all-gather overlaps the block before, its reduce-scatter the one after.
        _, forward, backward, *_ = self.computing
        (block, root), L = self.numbers, self.job.model.n_layer
        gather = self.reduce("all-gather", self.a * block * self.shard).seconds
        first = self.reduce("all-gather", 4 * root * self.shard).seconds
        scatter, end = (
            self.reduce("reduce-scatter", 4 * n * self.shard).seconds for n in (block, root)
        )
        across, last = (self.replicas(4 * n).seconds for n in (block, root))
        each = first + gather + (L - 1) * max(0, gather - forward)
        back = gather + (L - 1) * max(0, gather - backward)
        reducing = gather + (L - 1) * max(0, gather + scatter - backward, across - backward)
        after = scatter + across + end + last
        return self.micro * each + (self.micro - 1) * back + reducing + after

    def _ring_exposed(self) -> float:
        # K and V overlap attention to the previous chunk; the last dK and dV overlap nothing.
        *_, forward, backward = self.computing
        N, again = self.context, 1 + self.job.checkpointing
        keys, gradients = self.passed(self.a).seconds, self.passed(4).seconds
        ahead = again * (N - 1) * max(0, keys - forward / N)
        behind = (N - 1) * max(0, keys + gradients - backward / N) + gradients
        return self.job.model.n_layer * self.micro * (ahead + behind)

    @property
    def why_not(self) -> str:
        """Return why it cannot run, or ""."""
        shares = self.gpus // self.context
        if (least := self.job.sequences // shares) < self.micro:
            few = f"{self.job.sequences:,} sequences a step are too few for {shares:,} shares"
            return few + (f" in {self.micro} micro-batches" if least > 0 else "")
        if self.shard > 1 and self.at.dtype == "float16":
            return "fsdp does not support float16 (no loss scaling)"
        return ""
