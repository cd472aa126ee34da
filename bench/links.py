"""GPUs, the links between them, and what a collective sends over each: for bench/scale.py."""

from __future__ import annotations

import math
from dataclasses import dataclass

from core.flops import Peak

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
