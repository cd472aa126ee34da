"""Bytes, FLOPs and the roofline of one layer of attention, in closed form.

T tokens, H query heads, s bytes per element, G = H / Hkv.

    manual  writes and reads S = Q K^T and P = softmax(S), H T^2 elements each.
    tiled   reads Q once, and K and V once per block of queries, without skipped tiles.

A tile of B_r queries and B_c keys needs on chip, for Q_i, K_j, V_j and O_i, S_ij, m_i, l_i,

    M = s (G B_r D + 2 B_c D) + 4 G (B_r D + B_r B_c + 2 B_r)

bytes. Traffic is O(T^2 D^2 / M) (Dao et al. 2022, arXiv 2205.14135, Theorem 2). The roofline is
max(FLOPs / peak, bytes / bandwidth) (Williams et al. 2009, CACM 52(4)).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention import Spec
from attention.machine.gpus import RATED, datasheet_bandwidth, datasheet_tflops
from viewer.document import Cost, Costs, ManualStep

LENGTHS = [2**n for n in range(6, 17)]  # 64 ... 65,536


def find_gpu(text: str) -> str:
    """The one GPU with this name or part of a name. Raises ValueError."""
    wanted, names = text.lower().removeprefix("nvidia "), [gpu.short for gpu in RATED]
    found = [n for n in names if n.lower() == wanted] or [n for n in names if wanted in n.lower()]
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
    """Keys read and pairs computed by all blocks of queries, of one head."""
    keys = pairs = 0
    for first in range(0, T, B_r):
        stop = min(first + B_r, T)
        begin = 0 if spec.window is None else max(0, first - spec.window + 1) // B_c * B_c
        read = min(-(-stop // B_c) * B_c, T) - begin
        keys, pairs = keys + read, pairs + (stop - first) * read
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
    reads = writes = 0
    for name, read, written in (
        ("S = Q K^T", q + kv, square),
        ("P = softmax(S)", square, square),
        ("O = P V", square + kv, q),
    ):
        reads, writes = reads + read, writes + written
        steps.append({"name": name, "read": read, "written": written, "read_so_far": reads,
                      "written_so_far": writes})  # fmt: skip
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
    rate, width = peak[0] * 1e12, memory[0]

    def cost(pairs: int, moved: int) -> Cost:
        flops = 4 * spec.head_dim * spec.n_head * pairs
        compute, transfer = flops / rate, moved / width
        bound = "memory" if transfer > compute else "compute"
        return {"flops": flops, "bytes": moved, "intensity": flops / moved,
                "seconds": max(compute, transfer), "bound": bound}  # fmt: skip

    def by_manual(T: int) -> Cost:
        last = manual_steps(spec, T)[-1]
        return cost(T * T, last["read_so_far"] + last["written_so_far"])

    def by_tiled(T: int) -> Cost:
        return cost(visited(spec, T, B_r, B_c)[1], sum(tiled_bytes(spec, T, B_r, B_c)))

    return {
        "gpu": name,
        "dtype": half,
        "peak": rate,
        "peak_source": peak[1],
        "bandwidth": width,
        "bandwidth_source": memory[1],
        "ridge": rate / width,
        "block_m": B_r,
        "block_n": B_c,
        "fast_memory": on_chip,
        "rows": [{"T": T, "manual": by_manual(T), "tiled": by_tiled(T)} for T in LENGTHS],
    }
