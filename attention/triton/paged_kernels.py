"""Triton kernels of paged.py, for one query a sequence.

Each sequence's keys are split into runs (Dao et al. 2023, Flash-Decoding), by shapes only:

    decode_kernel    one sequence, key/value head, run      writes O~, m and l of the run
    combine_kernel   one sequence, query head               joins the runs as tiled.py joins tiles

The query heads of a key/value head are the rows of one matmul, padded to 16."""

# mypy: allow-untyped-defs

import torch
import triton
import triton.language as tl
from torch import Tensor

from .flash_kernels import LOG2_E, LOWEST, by_row, tanh, unit_of_scores

PROGRAMS = 512  # fill a large GPU
LEAST_RUN = 256  # keys for a program


@triton.jit
def decode_kernel(Q, K, V, Table, Start, Count, Slopes, Partial, M, L, tau, softcap, window,
                  max_pages, page_size, q_b, q_h, kv_page, kv_slot, kv_g, R: tl.constexpr,
                  HEAD_DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
                  BLOCK_D: tl.constexpr):
    """One run of keys, R query heads: unnormalised O~ (B, Hkv, R, splits, HEAD_DIM), m in units of
    log 2 and l (B, Hkv, R, splits), float32."""
    b, g, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    Hkv, splits = tl.num_programs(1), tl.num_programs(2)
    r, d = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_D)[None, :]
    n = tl.arange(0, BLOCK_N)

    start = tl.load(Start + b)  # the query is at `start`; count 0 is padding, perhaps without pages
    last = (start + 1) * tl.minimum(tl.load(Count + b), 1)
    first = tl.maximum(start - window + 1, 0)
    run = tl.cdiv(tl.cdiv(last - first, splits), BLOCK_N) * BLOCK_N
    begin = first + split * run
    end = tl.minimum(begin + run, last)

    if Slopes is not None:
        slope = tl.load(Slopes + (b * Hkv + g) * R + r, mask=r < R, other=0.0) * LOG2_E
    inside = (r < R) & (d < HEAD_DIM)
    Q_i = tl.load(Q + b * q_b + (g * R + r) * q_h + d, mask=inside, other=0.0)
    O_i = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_R, 1), tl.float32)
    m_i = tl.full((BLOCK_R, 1), LOWEST, tl.float32)  # finite: before any key m_i - m_new is 0
    for j0 in range(begin, end, BLOCK_N):
        j = j0 + n
        there = j < end
        page = tl.load(Table + b * max_pages + j // page_size, mask=there, other=0)
        slot = page.to(tl.int64) * kv_page + (j % page_size) * kv_slot + g * kv_g
        tile, mask = slot[:, None] + d, there[:, None] & (d < HEAD_DIM)
        K_j = tl.load(K + tile, mask=mask, other=0.0)  # (BLOCK_N, BLOCK_D)
        V_j = tl.load(V + tile, mask=mask, other=0.0)
        S_ij = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")
        if softcap is not None:
            S_ij = tanh(S_ij * (tau / softcap))
        S_ij = S_ij * unit_of_scores(tau, softcap)
        if Slopes is not None:
            S_ij -= slope * tl.abs(start - j)[None, :].to(tl.float32)
        S_ij = tl.where(there[None, :], S_ij, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(S_ij, axis=1, keep_dims=True))
        P_ij = tl.exp2(S_ij - m_new)
        rescale = tl.exp2(m_i - m_new)
        l_i = rescale * l_i + tl.sum(P_ij, axis=1, keep_dims=True)
        O_i = rescale * O_i + tl.dot(P_ij.to(V_j.dtype), V_j, input_precision="ieee")
        m_i = m_new

    at = ((b * Hkv + g) * R + r) * splits + split
    tl.store(Partial + at * HEAD_DIM + d, O_i, mask=inside)
    tl.store(M + at, m_i, mask=r < R)
    tl.store(L + at, l_i, mask=r < R)


@triton.jit
def combine_kernel(Partial, M, L, Sinks, Out, H, splits, HEAD_DIM: tl.constexpr,
                   BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr):
    """Join runs; a sink is one with l = 1, O~ = 0."""
    at = tl.program_id(0)
    s, d = tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    m = tl.load(M + at * splits + s, mask=s < splits, other=LOWEST)
    l = tl.load(L + at * splits + s, mask=s < splits, other=0.0)
    inside = (s < splits) & (d < HEAD_DIM)
    O = tl.load(Partial + (at * splits + s) * HEAD_DIM + d, mask=inside, other=0.0)
    m_max = tl.max(m, axis=0, keep_dims=True)
    if Sinks is not None:
        sink = tl.load(Sinks + at % H) * LOG2_E
        m_max = tl.maximum(m_max, sink)
    weight = tl.exp2(m - m_max)
    total = tl.sum(weight * l, axis=0, keep_dims=True)
    if Sinks is not None:
        total += tl.exp2(sink - m_max)
    total = tl.where(total == 0, 1.0, total)  # fully masked: zeros
    out = tl.sum(weight * O, axis=0, keep_dims=True) / total
    tl.store(Out + at * HEAD_DIM + d, out.to(Out.dtype.element_ty), mask=d < HEAD_DIM)


def block_sizes(head_dim: int, element_size: int) -> tuple[int, int]:
    """BLOCK_N and BLOCK_D: a tile of K has at most 16 KB."""
    BLOCK_D = max(16, triton.next_power_of_2(head_dim))
    return max(16, min(64, 2**14 // (BLOCK_D * element_size))), BLOCK_D


@torch.library.custom_op("nanoattn::paged_decode", mutates_args=())
def decode(q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, start: Tensor,
           count: Tensor, sinks: Tensor | None, slopes: Tensor | None, window: int, scale: float,
           softcap: float | None, splits: int) -> Tensor:
    """q (B, 1, H, D); k_pages to count as in masks.PagedView; sinks (H,), slopes (H,) or (B, H)
    float32; window 0: all keys; splits: runs, a power of two; 0: chosen here."""
    (B, _, H, D), (_, page_size, Hkv, _) = q.shape, k_pages.shape
    assert q.stride(3) == 1 and k_pages.stride() == v_pages.stride() and k_pages.stride(3) == 1
    assert page_table.is_contiguous()
    keys = page_table.shape[1] * page_size
    window = min(window or keys, keys)
    if not splits:
        wanted = min(triton.cdiv(PROGRAMS, B * Hkv), triton.cdiv(window, LEAST_RUN))
        splits = min(64, triton.next_power_of_2(wanted))
    BLOCK_N, BLOCK_D = block_sizes(D, q.element_size())
    partial = q.new_empty(B, H, splits, D, dtype=torch.float32)
    m, l = q.new_empty(2, B, H, splits, dtype=torch.float32)
    out = q.new_empty(B, 1, H, D)
    with torch.cuda.device_of(q):  # where Triton launches
        decode_kernel[B, Hkv, splits](
            q, k_pages, v_pages, page_table, start, count, by_row(slopes, B), partial, m, l, scale,
            softcap, window, page_table.shape[1], page_size, q.stride(0), q.stride(2),
            *k_pages.stride()[:3],
            R=H // Hkv, HEAD_DIM=D, BLOCK_R=max(16, triton.next_power_of_2(H // Hkv)),
            BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, num_warps=4, num_stages=2)
        combine_kernel[B * H,](
            partial, m, l, sinks, out, H, splits, HEAD_DIM=D,
            BLOCK_S=triton.next_power_of_2(splits), BLOCK_D=BLOCK_D)
    return out


@decode.register_fake
def _(q: Tensor, *_: object) -> Tensor:
    return q.new_empty(q.shape)
