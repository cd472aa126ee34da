"""GPUs and links of `bench_mfu.py plan`, and the cost of a collective."""

from __future__ import annotations

import math
from dataclasses import dataclass

from bench.settings import Plan as BenchConfig
from core import flops
from core.gpus import SERVERS, describe_rated
from core.settings import UserError

SHARE = 0.95  # of the memory that may be used
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


def cluster(config: BenchConfig) -> tuple[Cluster, list[str]]:
    """Return the GPUs of --gpu, and lines about them. Raises UserError for an unknown rate."""
    if config.gpu is None:
        raise UserError("plan needs a GPU, such as --gpu=H200")
    if config.peak_tflops == "measure":
        raise UserError("--peak_tflops=measure: plan measures nothing, give a number")
    try:
        gpu, note = describe_rated(config.gpu)
    except ValueError as e:
        raise UserError(f"--gpu: {e}") from None
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
        found: float | None = getattr(config, option)
        found = found or getattr(gpu, of, None) or getattr(server, of, None)
        if found is None:
            raise UserError(f"the {of} of {gpu.name!r} is unknown: give --{option}, in {unit}")
        return found * 1e9

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
