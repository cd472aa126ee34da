"""Bytes, FLOPs and the roofline of attention, in closed form.

For one layer of one sequence of T tokens with H query heads, causal or within a window. s is the
bytes of an element, G = H / Hkv the query heads that share keys and values.

    manual  writes S = Q K^T, reads it, writes P = softmax(S), reads that: H T^2 elements each; Q,
            K, V and O once. Scale and mask count as fused.
    tiled   reads Q once, and K and V once for each block of queries, except for skipped tiles;
            writes O and L.

A block of B_r queries needs, on chip, for Q_i, K_j, V_j and O_i, S_ij, m_i, l_i,

    M = s (G B_r D + 2 B_c D) + 4 G (B_r D + B_r B_c + 2 B_r)

bytes. K and V are read T / B_r times: with B_c <= D that is O(T^2 D^2 / M) elements (Dao et al.
2022, arXiv 2205.14135, Theorem 2), while manual's O(T D + T^2) does not depend on M.

The roofline is max(FLOPs / peak, bytes / bandwidth) (Williams, Waterman and Patterson 2009, CACM
52(4)). FLOPs: 4 D for each pair of query and key computed, the whole square for manual, the
visited tiles for tiled.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention import Spec
from attention.machine.gpus import RATED, datasheet_bandwidth, datasheet_tflops
from viewer.document import Cost, Costs, ManualStep

LENGTHS = [2**n for n in range(6, 17)]  # 64 ... 65,536


def find_gpu(text: str) -> str:
    """The one GPU with this name or part of a name. Raises ValueError if there is none."""
    asked, names = text.lower().removeprefix("nvidia "), [gpu.short for gpu in RATED]
    found = [n for n in names if n.lower() == asked] or [n for n in names if asked in n.lower()]
    if len(found) != 1:
        raise ValueError(f"gpu: expected one of {', '.join(found or names)}; got {text!r}")
    return found[0]


def size_of(spec: Spec) -> int:
    """Bytes per element of q, k, v and out."""
    return torch.finfo(getattr(torch, spec.dtype)).bits // 8


def size_inside(spec: Spec) -> int:
    """Bytes per element of O_i, S_ij, m, l and L."""
    return max(4, size_of(spec))


def fast_memory(spec: Spec, B_r: int, B_c: int) -> int:
    """Bytes on chip for a tile of B_r queries and B_c keys: M above."""
    s, acc, D, G = size_of(spec), size_inside(spec), spec.head_dim, spec.n_head // spec.n_kv_head
    return s * (G * B_r * D + 2 * B_c * D) + acc * G * (B_r * D + B_r * B_c + 2 * B_r)


def visited(spec: Spec, T: int, B_r: int, B_c: int) -> tuple[int, int]:
    """Keys read by all blocks of queries, and pairs of query and key computed, of one head."""
    keys = pairs = 0
    for first in range(0, T, B_r):
        stop = min(first + B_r, T)
        last = min(-(-stop // B_c) * B_c, T)
        begin = 0
        if spec.window is not None:
            begin = max(0, first - spec.window + 1) // B_c * B_c
        keys += last - begin
        pairs += (stop - first) * (last - begin)
    return keys, pairs


def tiled_bytes(spec: Spec, T: int, B_r: int, B_c: int) -> tuple[int, int]:
    """Bytes that tiled reads and writes."""
    s, D, H, Hkv = size_of(spec), spec.head_dim, spec.n_head, spec.n_kv_head
    keys, _ = visited(spec, T, B_r, B_c)
    return s * D * (H * T + 2 * Hkv * keys), s * H * T * D + size_inside(spec) * H * T


def manual_steps(spec: Spec, T: int) -> list[ManualStep]:
    """The three passes of the standard algorithm (Dao et al. 2022, Algorithm 0)."""
    s, D, H, Hkv = size_of(spec), spec.head_dim, spec.n_head, spec.n_kv_head
    q, kv, square = s * H * T * D, s * Hkv * T * D, s * H * T * T
    steps: list[ManualStep] = []
    total = [0, 0]
    for name, reads, writes, read, written in (
        ("S = Q K^T", "Q, K", "S", q + kv, square),
        ("P = softmax(S)", "S", "P", square, square),
        ("O = P V", "P, V", "O", square + kv, q),
    ):
        total = [total[0] + read, total[1] + written]
        steps.append({"name": name, "reads": reads, "writes": writes, "read": read,
                      "written": written, "read_so_far": total[0],
                      "written_so_far": total[1]})  # fmt: skip
    return steps


def tile_sizes(spec: Spec, T: int) -> list[tuple[int, int]]:
    """Candidates (B_r, B_c): powers of two up to T, and B_c at most D."""
    rows = [2**n for n in range(T.bit_length()) if 2**n < T] + [T]
    return [(B_r, min(B_r, spec.head_dim)) for B_r in rows]


def costs(spec: Spec, gpu: str, on_chip: int) -> Costs:
    """Manual and tiled under the roofline of a GPU, in half precision, as T grows."""
    name = find_gpu(gpu)
    half = "bfloat16" if datasheet_tflops(name, "bfloat16") else "float16"
    peak, memory = datasheet_tflops(name, half), datasheet_bandwidth(name)
    assert peak is not None and memory is not None, f"{name} is not in both tables"
    spec = replace(spec, dtype=half)
    fit = [b for b in tile_sizes(spec, LENGTHS[-1]) if fast_memory(spec, *b) <= on_chip]
    if not fit:
        least = fast_memory(spec, 1, 1)
        raise ValueError(f"fast_memory must be at least {least} bytes for a tile, got {on_chip}")
    B_r, B_c = fit[-1]
    (tflops, peak_source), (width, width_source) = peak, memory
    rate = tflops * 1e12

    def cost(pairs: int, moved: int) -> Cost:
        n = 4 * spec.head_dim * spec.n_head * pairs
        compute, transfer = n / rate, moved / width
        return {"flops": n, "bytes": moved, "intensity": n / moved,
                "seconds": max(compute, transfer),
                "bound": "memory" if transfer > compute else "compute"}  # fmt: skip

    return {
        "gpu": name,
        "dtype": half,
        "peak": rate,
        "peak_source": peak_source,
        "bandwidth": width,
        "bandwidth_source": width_source,
        "ridge": rate / width,
        "block_m": B_r,
        "block_n": B_c,
        "fast_memory": on_chip,
        "rows": [
            {
                "T": T,
                "manual": cost(T * T, sum(s["read"] + s["written"] for s in manual_steps(spec, T))),
                "tiled": cost(visited(spec, T, B_r, B_c)[1], sum(tiled_bytes(spec, T, B_r, B_c))),
            }
            for T in LENGTHS
        ],
    }
