"""The tiles that attention/tiled.py visits, and the bytes of float32 that one head moves.

    manual  writes and reads S = Q K^T and P = softmax(S), T^2 elements each.
    tiled   reads Q once, and K and V once per block of queries, without skipped tiles.

Traffic of tiled is O(T^2 D^2 / M), M: bytes on chip (Dao et al. 2022, arXiv 2205.14135, Theorem 2).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attention import Spec, tiled

ITEM = 4  # bytes
Moved = tuple[int, int]  # bytes read from main memory, and written to it


class Tile(NamedTuple):
    """The state of tiled after a visited tile."""

    i: int  # block of queries
    j: int  # block of keys
    S: Tensor  # (B, H, B_r, B_c) scores, -inf where masked
    rescale: Tensor  # (B, H, B_r) factor of the old l and O
    m: Tensor  # (B, H, B_r) running maximum
    l: Tensor  # (B, H, B_r) running sum of exp(s - m)
    O: Tensor  # (B, H, B_r, D) output, not normalized


def trace_of(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, B_r: int, B_c: int
) -> tuple[list[Tile], Tensor]:
    """The visited tiles in order, and the output (B, Tq, H, D)."""
    trace: list[Tile] = []

    def on_tile(i: int, j: int, *tensors: Tensor) -> None:
        S, rescale, m, l, O = (t.flatten(1, 2) for t in tensors)  # (B, H, B_r, ...)
        trace.append(Tile(i, j, S, rescale[..., 0], m[..., 0], l[..., 0], O))

    return trace, tiled.forward_tiles(q, k, v, spec, B_r=B_r, B_c=B_c, on_tile=on_tile)[0]


def traced(spec: Spec, Tq: int, Tk: int, B_r: int, B_c: int) -> list[Tile]:
    """The tiles that are visited, whatever the numbers."""
    q, k = (torch.zeros(1, T, 1, spec.head_dim) for T in (Tq, Tk))
    return trace_of(q, k, k, spec, B_r=B_r, B_c=B_c)[0]


def tiled_bytes(trace: list[Tile], Tq: int, D: int) -> Moved:
    """Q_i is read at a row's first tile, K_j and V_j at each; O and L are written once."""
    queries = sum({t.i: t.S.shape[2] for t in trace}.values())
    keys = sum(t.S.shape[3] for t in trace)
    return ITEM * D * (queries + 2 * keys), ITEM * (D + 1) * Tq


def manual_bytes(T: int, D: int) -> Moved:
    """Three passes: S = Q K^T, P = softmax(S), O = P V (Dao et al. 2022, Algorithm 0)."""
    return ITEM * (3 * T * D + 2 * T * T), ITEM * (T * D + 2 * T * T)


def fast_memory(B_r: int, B_c: int, D: int) -> int:
    """Bytes on chip for Q_i, K_j, V_j, O_i, S_ij, m_i and l_i: M above."""
    return ITEM * (2 * B_r * D + 2 * B_c * D + B_r * B_c + 2 * B_r)
