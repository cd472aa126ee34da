"""Estimates for GPUs that are not here: their rates, and the cost of a collective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core import flops

# Latency of a message in seconds, over NVLink and over the network: NCCL's constants for rings of
# protocol LL128 (src/graph/tuning.cc, hwLat).
HOPS = 1.9e-6, 4.0e-6


@dataclass(frozen=True)
class Cluster:
    """GPUs, `node` of them in a server. Rates in bytes a second, links each way, per GPU."""

    dtype: str  # of the matrix products
    peak: flops.Peak
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
    if ranks == 1:
        return Sent()
    wire = size * (ranks - 1) / ranks * (2 if kind == "all-reduce" else 1)
    here = ranks // servers  # in a server, each the last one of one ring
    over = 0 if servers == 1 else wire / here
    inside, between = HOPS
    hops = (ranks - servers) * inside + (servers - 1) * between
    if kind == "all-reduce":  # a tree sends as many bytes in fewer hops
        tree = (here - 1) * inside + math.ceil(math.log2(servers)) * between
        hops = 2 * min(hops, tree)
    return Sent(wire - over, over, hops + max((wire - over) / at.nvlink, over / at.network))
