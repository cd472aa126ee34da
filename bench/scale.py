"""`bench_mfu.py plan`: what a training step would hold, send and take on GPUs that are not here.

Arithmetic alone: nothing runs, and nothing that it says was measured. Every formula stands in
docs/PLAN.md with what it leaves out; tests/test_plan.py holds bytes held and sent against what
two to four processes really hold and send. Sizes are of the rank that has most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from bench import roofline
from bench.fitting import SHARE
from core.flops import Peak
from core.loss import chunk_rows
from core.parallel import BUCKET_MB
from model import GPTConfig

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "ring")  # ring: point to point
# Seconds that a message takes from one GPU to the next, over NVLink and over the network, before
# its bytes: what NCCL reckons with for rings of protocol LL128 (src/graph/tuning.cc, hwLat).
HOPS = 1.9e-6, 4.0e-6


@dataclass(frozen=True)
class Cluster:
    """GPUs, `node` of them in a server. Rates in bytes a second, links each way and of each GPU."""

    dtype: str  # of the matrix products
    peak: Peak
    products: float  # TFLOP/s that they reach
    bandwidth: float  # of the GPU's memory
    memory: float  # bytes of it
    node: int
    nvlink: float
    network: float
    hops: tuple[float, float] = HOPS
    slower: float = 1.0  # times its roofline, that computing takes


@dataclass(frozen=True)
class Sent:
    """What a rank sends for one collective, in bytes by link, and the seconds until it is done."""

    nvlink: float = 0
    network: float = 0
    seconds: float = 0


def collective(kind: str, size: float, ranks: int, servers: int, at: Cluster) -> Sent:
    """A collective of `size` bytes, the whole tensor's, by ring, over ranks in so many servers."""
    wire = size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    here = ranks // servers  # ranks in a server: each is the border of one of as many rings
    over = 0 if servers == 1 else wire / here
    inside, between = at.hops
    hops = (ranks - servers) * inside + (servers - 1) * between
    if kind == "all-reduce":  # a tree has fewer hops, of as many bytes
        tree = (here - 1) * inside + math.ceil(math.log2(servers)) * between
        hops = 2 * min(hops, tree)
    return Sent(wire - over, over, hops + max((wire - over) / at.nvlink, over / at.network))


@dataclass(frozen=True)
class Job:
    """What is trained."""

    model: GPTConfig
    sequences: int  # in a step, of all ranks
    batch: int  # of them in a micro-batch, at most
    checkpointing: bool = False
    clip: bool = True
    residual: int = 4  # bytes of a channel between the blocks


def block_shapes(m: GPTConfig) -> list[tuple[int, int]]:
    """(rows, numbers in a row) of each parameter of a block; FSDP cuts between rows."""
    C, qkv = m.n_embd, m.n_embd + 2 * m.kv_heads * m.head_dim
    rows = [(qkv, C), (C, C), (4 * C, C), (C, 4 * C), (C, 1), (C, 1)]
    return rows + [(n, 1) for n in (qkv, C, 4 * C, C, C, C) if m.bias]


def root_shapes(m: GPTConfig) -> list[tuple[int, int]]:
    """The same of what is outside the blocks: both embeddings and the last norm."""
    C = m.n_embd
    return [(m.vocab_size, C), (m.block_size, C), *[(C, 1)] * (1 + m.bias)]


def part(shapes: list[tuple[int, int]], ranks: int) -> int:
    """The numbers that a rank keeps: as many rows for each, the last ones filled up."""
    return sum(-(-rows // ranks) * width for rows, width in shapes)


def parameters(m: GPTConfig) -> int:
    return m.n_layer * part(block_shapes(m), 1) + part(root_shapes(m), 1)


@dataclass(frozen=True)
class Plan:
    """A job on a number of GPUs, shared in one way: "ddp", "fsdp" over all, or "hybrid", fsdp
    inside a server and replicated between; each sequence over `context` of them."""

    job: Job
    at: Cluster
    parallel: str
    gpus: int
    context: int

    @property
    def shard(self) -> int:
        """Ranks that keep one copy of the weights together."""
        return {"ddp": 1, "fsdp": self.gpus, "hybrid": min(self.at.node, self.gpus)}[self.parallel]

    @property
    def servers(self) -> int:
        return -(-self.gpus // self.at.node)

    @property
    def sequences(self) -> int:
        """In a step, of the rank that has most."""
        return -(-self.job.sequences * self.context // self.gpus)

    @property
    def micro(self) -> int:
        """Micro-batches in a step."""
        return -(-self.sequences // self.job.batch)

    @property
    def tokens(self) -> int:
        """In a micro-batch, of this rank; a ring fills the sequence up to 2 N equal chunks."""
        T, N = self.job.model.block_size, self.context
        mine = T if N == 1 else 2 * -(-T // (2 * N))
        return -(-self.sequences // self.micro) * mine

    @property
    def a(self) -> int:
        """Bytes of an activation."""
        return 4 if self.at.dtype == "float32" else 2

    @cached_property
    def numbers(self) -> tuple[int, int]:
        """(in a block, outside the blocks), as a rank keeps them."""
        m = self.job.model
        return part(block_shapes(m), self.shard), part(root_shapes(m), self.shard)

    @property
    def kept(self) -> int:
        """All the numbers that a rank keeps of the model."""
        block, root = self.numbers
        return self.job.model.n_layer * block + root

    @property
    def kv(self) -> int:
        """Channels of the keys, and of the values."""
        return self.job.model.kv_heads * self.job.model.head_dim

    # --- what a rank holds ---

    @property
    def per_token(self) -> tuple[int, int]:
        """Bytes that the forward pass saves for a token: (of each layer, before and after them)."""
        m, a, r, C, K = self.job.model, self.a, self.job.residual, self.job.model.n_embd, self.kv
        norms = 2 * (r * C + 8 + a * C)  # input, mean and 1/std; the output as the product takes it
        attention = a * (C + 2 * K) + a * C + 4 * m.n_head  # q, k, v; out; L
        ends = 8 + (r * C + 8) + a * C  # the token itself, the last norm, the loss's gradient
        return norms + attention + 2 * a * 4 * C, ends  # GELU's input and output

    @property
    def saved(self) -> int:
        """Bytes of a micro-batch that the backward pass needs; of its layers with gradient
        checkpointing only the inputs, and one layer computed again."""
        (layer, ends), m = self.per_token, self.job.model
        if self.job.checkpointing:
            return self.tokens * (m.n_layer * self.job.residual * m.n_embd + layer + ends)
        return self.tokens * (m.n_layer * layer + ends)

    @cached_property
    def memory(self) -> dict[str, int]:
        """Bytes by purpose, each at its largest; not all are largest at one moment."""
        m, a, r, n = self.job.model, self.a, self.job.residual, self.tokens
        C, V, L, half = m.n_embd, m.vocab_size, m.n_layer, a < 4
        block, root = self.numbers
        rows = chunk_rows(n, V, "cuda")
        if self.at.dtype == "float16":
            rows = min(rows, 4096)
        added = parameters(m) if self.shard > 1 and self.micro > 1 else 0  # of micro-batches
        if self.shard > 1:  # the root; two blocks gathered, twice each; a block's gradients
            gathered = 4 * root * self.shard + (4 * a + a * half + 4) * block * self.shard
        else:  # autocast's copies of the matrices
            gathered = a * half * L * sum(i * j for i, j in block_shapes(m)[:4])
        if self.context > 1:  # two blocks' K, V, three's dK, dV; O and dQ in float32
            gathered += n * (2 * 2 * self.kv * a + 3 * 2 * self.kv * 4 + 2 * 4 * C)
        return {
            "weights": 4 * self.kept,
            "gradients": 4 * (self.kept + added),
            "AdamW": 8 * self.kept,
            "activations": self.saved + n * C * (r + 5 * a),  # and the gradients on the way back
            "logits": 8 * rows * V + V * C * (4 + 2 * a * half) + n * C * (r + a * half),
            "gathered": gathered,
        }

    @property
    def held(self) -> int:
        return sum(self.memory.values())

    @property
    def over(self) -> float:
        """Bytes that are too many; below 0: that are left."""
        return self.held - SHARE * self.at.memory

    # --- what a rank sends ---

    def reduce(self, kind: str, size: float) -> Sent:
        """A collective among the ranks that keep one copy together; of "ddp", among all."""
        inside = self.parallel == "hybrid"
        ranks, servers = (self.shard, 1) if inside else (self.gpus, self.servers)
        return collective(kind, size, ranks, servers, self.at)

    def replicas(self, size: float) -> Sent:
        """The all-reduce of what a rank keeps between the copies of "hybrid"."""
        copies = self.gpus // self.shard
        if copies == 1:
            return Sent()
        return collective("all-reduce", size, copies, copies, self.at)

    def passed(self, width: int) -> Sent:
        """K and V, or their gradients, of one layer to the next rank of the ring."""
        size = 2 * self.tokens * self.kv * width
        if self.context <= self.at.node:  # neighbours
            return Sent(size, 0, self.at.hops[0] + size / self.at.nvlink)
        return Sent(0, size, self.at.hops[1] + size / self.at.network)  # of the server's last rank

    def sent(self) -> Iterator[tuple[str, int, Sent]]:
        """(kind, how often in a step, what is sent each time)."""
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
            yield "ring", L * self.micro * N, self.passed(4)  # dK, dV, and home

    # --- how long it takes ---

    @cached_property
    def computing(self) -> tuple[float, float, float, float, float]:
        """Seconds of computing in a step, and of a block in a micro-batch: (step, forward,
        backward, the scores' share of the forward pass, and of the backward pass)."""
        job, at, L = self.job, self.at, self.job.model.n_layer
        sizes = job.model, self.sequences / self.context
        parts = roofline.work(*sizes, self.micro, at.dtype, job.clip)
        ms = {name: at.slower * w.ms(at.products, at.bandwidth) for name, w in parts.items()}
        # An update is of what is kept; roofline's is of all.
        update = roofline.work(*sizes, 1, at.dtype, job.clip)["optimizer"].ms(1, at.bandwidth)
        ms["optimizer"] -= at.slower * update * (1 - self.kept / parameters(job.model))
        # Of three products one is forward; of the scores' seven two; of the norms' bytes half.
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
        """Seconds of a step in which something is sent, one after the other."""
        return sum(times * s.seconds for _, times, s in self.sent())

    @property
    def exposed(self) -> float:
        """Of these the seconds that no computing hides."""
        seconds = self._ddp_exposed() if self.parallel == "ddp" else self._fsdp_exposed()
        return seconds + (self._ring_exposed() if self.context > 1 else 0)

    def _ddp_exposed(self) -> float:
        """Buckets hide behind the last backward pass, but for the one of the embeddings, whose
        gradients come last."""
        last = self.reduce("all-reduce", 4 * self.numbers[1]).seconds
        total = sum(times * s.seconds for kind, times, s in self.sent() if kind == "all-reduce")
        return max(min(last, total), total - self.job.model.n_layer * self.computing[2])

    def _fsdp_exposed(self) -> float:
        """A block's gather hides behind the block before, its reduction behind the next."""
        _, forward, backward, *_ = self.computing
        (block, root), L = self.numbers, self.job.model.n_layer
        gather = self.reduce("all-gather", self.a * block * self.shard).seconds
        first = self.reduce("all-gather", 4 * root * self.shard).seconds
        scatter, end = (
            self.reduce("reduce-scatter", 4 * n * self.shard).seconds for n in (block, root)
        )
        across, last = (self.replicas(4 * n).seconds for n in (block, root))
        each = first + gather + (L - 1) * max(0, gather - forward)  # the first waits for nothing
        back = gather + (L - 1) * max(0, gather - backward)
        reducing = gather + (L - 1) * max(0, gather + scatter - backward, across - backward)
        after = scatter + across + end + last
        return self.micro * each + (self.micro - 1) * back + reducing + after

    def _ring_exposed(self) -> float:
        """K and V hide behind the scores of the block before; the last dK and dV behind nothing."""
        *_, forward, backward = self.computing
        N, again = self.context, 1 + self.job.checkpointing
        keys, gradients = self.passed(self.a).seconds, self.passed(4).seconds
        ahead = again * (N - 1) * max(0, keys - forward / N)
        behind = (N - 1) * max(0, keys + gradients - backward / N) + gradients
        return self.job.model.n_layer * self.micro * (ahead + behind)

    # --- all of it ---

    @property
    def why_not(self) -> str:
        """Why it cannot be run at all, "" if it can."""
        shares = self.gpus // self.context
        if (least := self.job.sequences // shares) < self.micro:
            how = f"{self.job.sequences:,} sequences a step are too few for {shares:,} shares"
            return how + f" in {self.micro} micro-batches" * (least > 0)
        if self.shard > 1 and self.at.dtype == "float16":
            return "fsdp has no loss scaling, which float16 needs"
        return ""
