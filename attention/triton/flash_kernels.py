"""Triton kernels of triton_flash.py: the algorithm and names of tiled.py, a program a block.

    forward_kernel   a block of queries, loops over keys                        writes O_i, L_i
    dq_kernel        a block of queries, loops over keys                        writes dQ_i, delta_i
    dkdv_kernel      a block of keys, loops over queries and over the query     writes dK_j, dV_j
                     heads that share its key/value head

Without atomics each sum has a fixed order; the price: both backward kernels compute S and dP.

Visible tiles   Each row sees one interval of keys, whose ends never decrease from row to row: a
                block visits one run of tiles, and the inner ones need no mask:

                    begin       inner_begin     inner_end       end
                      |  / x x x x | x x x x x x x | x           |
                      |    / x x x | x x x x x x x | x x         |
                      |      / x x | x x x x x x x | x x x       |

exp2            Scores, m_i and L_i are in units of log 2: S_ij is multiplied by `unit`.
Sizes           Tiles have BLOCK_D columns; their address has 64 bits, offsets inside 32.
float32         is multiplied in float32 ("ieee"), not TF32."""

# mypy: allow-untyped-defs

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(math.log2(math.e))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def tanh(x):
    """Within 6 eps in float32, by a Taylor series below 1/4."""
    z = x * x
    series = x + x * (z * (-1 / 3 + z * (2 / 15 - z * (17 / 315))))
    e = tl.exp2(tl.abs(x) * (-2 * LOG2_E))
    y = (1 - e) / (1 + e)
    return tl.where(z < 1 / 16, series, tl.where(x < 0, -y, y))


@triton.jit
def unit_of_scores(tau, softcap):
    if softcap is None:
        return tau * LOG2_E
    else:
        return softcap * LOG2_E


@triton.jit
def block_of_queries(Tq, H, BLOCK_M: tl.constexpr):
    n_blocks = (Tq + BLOCK_M - 1) // BLOCK_M
    bh = tl.program_id(0) // n_blocks
    i0 = (n_blocks - 1 - tl.program_id(0) % n_blocks) * BLOCK_M
    return i0, bh, (bh // H).to(tl.int64), (bh % H).to(tl.int64)


@triton.jit
def rows_of(X, T, stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
            TMA: tl.constexpr):
    if TMA:
        return tl.make_tensor_descriptor(X, [T, HEAD_DIM], [stride, 1], [BLOCK, BLOCK_D])
    else:
        return X


@triton.jit
def load_rows(X, start, T, stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
              BLOCK_D: tl.constexpr, BOUNDED: tl.constexpr, TMA: tl.constexpr = False):
    """X[start : start + BLOCK] of a head, with zeros outside if BOUNDED."""
    if TMA:
        return X.load([start, 0])
    else:
        t, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
        tile = X + tl.cast(start, tl.int64) * stride + (t * stride + d)
        if BOUNDED:
            if HEAD_DIM == BLOCK_D:
                return tl.load(tile, mask=start + t < T, other=0.0)
            else:
                return tl.load(tile, mask=(start + t < T) & (d < HEAD_DIM), other=0.0)
        else:
            if HEAD_DIM == BLOCK_D:
                return tl.load(tile)
            else:
                return tl.load(tile, mask=d < HEAD_DIM, other=0.0)


@triton.jit
def store_rows(X, x, start, T, stride, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
               BLOCK_D: tl.constexpr):
    t, d = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_D)[None, :]
    tile = X + tl.cast(start, tl.int64) * stride + (t * stride + d)
    tl.store(tile, x.to(X.dtype.element_ty), mask=(start + t < T) & (d < HEAD_DIM))


@triton.jit
def interval(t, shift, T, before, after, low, high, Run):
    """First and last that row t sees. Run[t], Run[T + t]: those of its segment."""
    first, last = t * 0 + low, t * 0 + high
    if before is not None:
        first = tl.maximum(first, t + shift - before)
    if after is not None:
        last = tl.minimum(last, t + shift + after)
    if Run is not None:
        first = tl.maximum(first, tl.load(Run + t))
        last = tl.minimum(last, tl.load(Run + T + t))
    return first, last


@triton.jit
def seen_by(t0, shift, T, before, after, low, high, Run, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """interval() of each row from t0 on; from `low` on [begin, end) and [inner_begin, inner_end)
    of the block's tiles, by its first and last row."""
    t, t_last = tl.minimum(t0 + tl.arange(0, ROWS), T - 1), tl.minimum(t0 + ROWS, T) - 1
    first, last = interval(t, shift, T, before, after, low, high, Run)
    first_of_first, last_of_first = interval(t0, shift, T, before, after, low, high, Run)
    first_of_last, last_of_last = interval(t_last, shift, T, before, after, low, high, Run)
    begin = tl.maximum(first_of_first - low, 0) // BLOCK * BLOCK
    inner_begin = (tl.maximum(first_of_last - low, 0) + BLOCK - 1) // BLOCK * BLOCK
    inner_end = tl.maximum(last_of_first + 1 - low, 0) // BLOCK * BLOCK
    return (first, last, begin, inner_begin, tl.maximum(inner_end, inner_begin),
            tl.maximum(last_of_last + 1 - low, 0))


@triton.jit
def loop_of(begin, inner_begin, inner_end, end, MASKED: tl.constexpr):
    """A loop over the inner tiles, or over both ends: start, stop, what it skips between."""
    if MASKED:
        return begin, end - (inner_end - inner_begin), inner_end - inner_begin
    else:
        return inner_begin, inner_end, 0


@triton.jit
def scores(S, p, j, a, b, c, d, tau, softcap, Slopes, bh, MASKED: tl.constexpr, BOTH: tl.constexpr):
    """q . k of positions p and j, after softcap, ALiBi and mask (a <= b, if BOTH also c <= d), in
    units of unit_of_scores(); and the softcap's slope."""
    slope = S
    if softcap is not None:
        S = tanh(S * (tau / softcap))
        slope = 1 - S * S  # before the mask: 0 * inf is NaN
    if Slopes is not None:
        m = tl.load(Slopes + bh) / (unit_of_scores(tau, softcap) / LOG2_E)
        S -= m * tl.abs(p - j).to(tl.float32)
    if MASKED:
        seen = a <= b
        if BOTH:
            seen = seen & (c <= d)
        S = tl.where(seen, S, float("-inf"))
    return S, slope


@triton.jit
def dropout_keeps(seed, bh, i0, j0, threshold, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Z_ij > 0, bool, by Philox with 7 rounds (Salmon et al. 2011), four keys a counter."""
    i = i0 + tl.arange(0, BLOCK_M)[:, None]
    j_4 = j0 // 4 + tl.arange(0, BLOCK_N // 4)[None, :]
    zeros = tl.full((BLOCK_M, BLOCK_N // 4), 0, tl.int32)
    r0, r1, r2, r3 = tl.philox(seed, i | zeros, j_4 | zeros, bh | zeros, zeros, 7)
    r = tl.reshape(tl.join(tl.join(r0, r2), tl.join(r1, r3)), (BLOCK_M, BLOCK_N))
    return r.to(tl.int32, bitcast=True) >= threshold


# --- Forward: FlashAttention-2, Algorithm 1 ---


@triton.jit
def forward_kernel(
    Q, K, V, O, L, Run, Seed, Sinks, Slopes,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h,
    Tq, Tk, offset, H, window, right, tau, softcap, threshold, keep,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):
    """O_i = softmax(S_i) V and L_i = log2 sum_j 2^S_ij."""
    BOTH: tl.constexpr = window is not None or Run is not None
    before = window if window is None else window - 1
    i0, bh, b, h = block_of_queries(Tq, H, BLOCK_M)
    Q += b * q_b + h * q_h
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    O += (b * Tq * H + h) * HEAD_DIM
    L += bh.to(tl.int64) * Tq
    run = Run if Run is None else Run + b * 2 * Tq
    seed = Seed if Seed is None else tl.load(Seed)

    first, last, begin, inner_begin, inner_end, end = seen_by(
        i0, offset, Tq, before, right, 0, Tk - 1, run, BLOCK_M, BLOCK_N)
    i = i0 + tl.arange(0, BLOCK_M)
    p = i[:, None] + offset
    Q_i = load_rows(Q, i0, Tq, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    O_i = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    m_i = tl.full((BLOCK_M,), LOWEST, tl.float32)  # finite: before any visible key m_i - m_new is 0
    if Sinks is not None:
        m_i = tl.maximum(m_i, tl.load(Sinks + h) * LOG2_E)
        l_i += 1.0
    unit = unit_of_scores(tau, softcap)
    for MASKED in tl.static_range(2):  # inner tiles, then both ends
        start, stop, skip = loop_of(begin, inner_begin, inner_end, end, MASKED)
        for n in range(start, stop, BLOCK_N):
            j0 = tl.where(n < inner_begin, n, n + skip)
            j = j0 + tl.arange(0, BLOCK_N)[None, :]
            K_j = load_rows(K, j0, Tk, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
            S_ij = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
            S_ij, _ = scores(S_ij, p, j, j, last[:, None], first[:, None], j, tau, softcap, Slopes,
                             bh, MASKED, BOTH)
            m_new = tl.maximum(m_i, tl.max(S_ij, axis=1) * unit)
            P_tilde_ij = tl.exp2(S_ij * unit - m_new[:, None])
            rescale = tl.exp2(m_i - m_new)
            l_i = rescale * l_i + tl.sum(P_tilde_ij, axis=1)
            if Seed is not None:
                kept = dropout_keeps(seed, bh, i0, j0, threshold, BLOCK_M, BLOCK_N)
                P_tilde_ij = tl.where(kept, P_tilde_ij, 0.0)
            V_j = load_rows(V, j0, Tk, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED)
            O_i = O_i * rescale[:, None]
            O_i = tl.dot(P_tilde_ij.to(V_j.dtype), V_j, O_i, input_precision="ieee")
            m_i = m_new
    l_i = tl.where(l_i == 0, 1.0, l_i)  # fully masked: 0 / 1, not 0 / 0
    store_rows(O, O_i / (l_i * keep)[:, None], i0, Tq, H * HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D)
    tl.store(L + i, m_i + tl.log2(l_i), mask=i < Tq)


# --- Backward: FlashAttention-2, Algorithm 2, for dQ, then for dK and dV ---


@triton.jit
def dq_kernel(
    Q, K, V, O, dO, L, Delta, dQ, Run, Seed, Slopes,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, d_b, d_t,
    Tq, Tk, offset, H, window, right, tau, softcap, threshold, keep,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):
    """dQ_i = tau * sum_j dS_ij K_j, and delta_i for dkdv_kernel."""
    BOTH: tl.constexpr = window is not None or Run is not None
    before = window if window is None else window - 1
    i0, bh, b, h = block_of_queries(Tq, H, BLOCK_M)
    Q += b * q_b + h * q_h
    dO += b * do_b + h * do_h
    O += (b * Tq * H + h) * HEAD_DIM
    dQ += b * d_b + h * HEAD_DIM
    L += bh.to(tl.int64) * Tq
    Delta += bh.to(tl.int64) * Tq
    run = Run if Run is None else Run + b * 2 * Tq
    seed = Seed if Seed is None else tl.load(Seed)

    K = rows_of(K + b * k_b + h // GROUP * k_h, Tk, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
    V = rows_of(V + b * v_b + h // GROUP * v_h, Tk, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, TMA)
    first, last, begin, inner_begin, inner_end, end = seen_by(
        i0, offset, Tq, before, right, 0, Tk - 1, run, BLOCK_M, BLOCK_N)
    i = i0 + tl.arange(0, BLOCK_M)
    p = i[:, None] + offset
    dO_i = load_rows(dO, i0, Tq, do_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    O_i = load_rows(O, i0, Tq, H * HEAD_DIM, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    delta_i = tl.sum(dO_i.to(tl.float32) * O_i.to(tl.float32), axis=1)
    tl.store(Delta + i, delta_i, mask=i < Tq)
    Q_i = load_rows(Q, i0, Tq, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, True)
    L_i = tl.load(L + i, mask=i < Tq, other=float("inf"))  # 0: ALiBi's scores might overflow
    dQ_i = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    unit = unit_of_scores(tau, softcap)
    for MASKED in tl.static_range(2):
        start, stop, skip = loop_of(begin, inner_begin, inner_end, end, MASKED)
        for n in range(start, stop, BLOCK_N):
            j0 = tl.where(n < inner_begin, n, n + skip)
            j = j0 + tl.arange(0, BLOCK_N)[None, :]
            K_j = load_rows(K, j0, Tk, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, TMA)
            S_ij = tl.dot(Q_i, tl.trans(K_j), input_precision="ieee")  # (BLOCK_M, BLOCK_N)
            S_ij, slope = scores(S_ij, p, j, j, last[:, None], first[:, None], j, tau, softcap,
                                 Slopes, bh, MASKED, BOTH)
            P_ij = tl.exp2(S_ij * unit - L_i[:, None])
            if softcap is not None:
                P_ij *= slope  # for dS_ij; here it frees registers
            V_j = load_rows(V, j0, Tk, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, MASKED, TMA)
            dP_ij = tl.dot(dO_i, tl.trans(V_j), input_precision="ieee")
            if Seed is not None:
                kept = dropout_keeps(seed, bh, i0, j0, threshold, BLOCK_M, BLOCK_N)
                dP_ij = tl.where(kept, dP_ij / keep, 0.0)
            dS_ij = P_ij * (dP_ij - delta_i[:, None])
            dQ_i = tl.dot(dS_ij.to(K_j.dtype), K_j, dQ_i, input_precision="ieee")
    store_rows(dQ, dQ_i * tau, i0, Tq, d_t, BLOCK_M, HEAD_DIM, BLOCK_D)


@triton.jit
def dkdv_kernel(
    Q, K, V, dO, L, Delta, dK, dV, Run, Seed, Slopes,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, do_b, do_t, do_h, d_b, d_t,
    Tq, Tk, offset, H, window, right, tau, softcap, threshold, keep,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):
    """dV_j = sum_i P_ij dO_i, dK_j = tau * sum_i dS_ij Q_i. Transposed, to stay in registers."""
    BOTH: tl.constexpr = window is not None or Run is not None
    after = window if window is None else window - 1
    n_blocks = (Tk + BLOCK_N - 1) // BLOCK_N
    bg = tl.program_id(0) // n_blocks
    j0 = tl.program_id(0) % n_blocks * BLOCK_N
    Hkv = H // GROUP
    b, g = (bg // Hkv).to(tl.int64), (bg % Hkv).to(tl.int64)
    K += b * k_b + g * k_h
    V += b * v_b + g * v_h
    dK += b * d_b + g * HEAD_DIM
    dV += b * d_b + g * HEAD_DIM
    run = Run if Run is None else Run + b * 2 * Tk
    seed = Seed if Seed is None else tl.load(Seed)

    # Keys past the end are not stored.
    first, last, begin, inner_begin, inner_end, end = seen_by(
        j0, 0, Tk, right, after, offset, Tq + offset - 1, run, BLOCK_N, BLOCK_M)
    j = j0 + tl.arange(0, BLOCK_N)[:, None]
    K_j = load_rows(K, j0, Tk, k_t, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    V_j = load_rows(V, j0, Tk, v_t, BLOCK_N, HEAD_DIM, BLOCK_D, True)
    dK_j = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    dV_j = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    unit = unit_of_scores(tau, softcap)
    for r in range(GROUP):
        h = g * GROUP + r
        bh = b * H + h
        Q_h = rows_of(Q + b * q_b + h * q_h, Tq, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
        dO_h = rows_of(dO + b * do_b + h * do_h, Tq, do_t, BLOCK_M, HEAD_DIM, BLOCK_D, TMA)
        for MASKED in tl.static_range(2):
            start, stop, skip = loop_of(begin, inner_begin, inner_end, end, MASKED)
            for n in range(start, stop, BLOCK_M):
                i0 = tl.where(n < inner_begin, n, n + skip)
                i = i0 + tl.arange(0, BLOCK_M)
                p = (i + offset)[None, :]
                Q_i = load_rows(Q_h, i0, Tq, q_t, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED, TMA)
                if MASKED:
                    L_i = tl.load(L + bh * Tq + i, mask=i < Tq, other=float("inf"))
                    delta_i = tl.load(Delta + bh * Tq + i, mask=i < Tq, other=0.0)
                else:
                    L_i = tl.load(L + bh * Tq + i)
                    delta_i = tl.load(Delta + bh * Tq + i)
                S_T = tl.dot(K_j, tl.trans(Q_i), input_precision="ieee")  # (BLOCK_N, BLOCK_M)
                S_T, slope = scores(S_T, p, j, first[:, None], p, p, last[:, None], tau, softcap,
                                    Slopes, bh, MASKED, BOTH)
                P_T = tl.exp2(S_T * unit - L_i[None, :])
                dO_i = load_rows(dO_h, i0, Tq, do_t, BLOCK_M, HEAD_DIM, BLOCK_D, MASKED, TMA)
                dropped = P_T
                if Seed is not None:
                    kept = tl.trans(dropout_keeps(
                        seed, bh.to(tl.int32), i0, j0, threshold, BLOCK_M, BLOCK_N))
                    dropped = tl.where(kept, P_T, 0.0)
                dropped = dropped.to(dO_i.dtype)
                if softcap is not None:
                    P_T *= slope
                dV_j = tl.dot(dropped, dO_i, dV_j, input_precision="ieee")
                dP_T = tl.dot(V_j, tl.trans(dO_i), input_precision="ieee")
                if Seed is not None:
                    dP_T = tl.where(kept, dP_T / keep, 0.0)
                dS_T = P_T * (dP_T - delta_i[None, :])
                dK_j = tl.dot(dS_T.to(Q_i.dtype), Q_i, dK_j, input_precision="ieee")
    store_rows(dV, dV_j / keep, j0, Tk, d_t, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_rows(dK, dK_j * tau, j0, Tk, d_t, BLOCK_N, HEAD_DIM, BLOCK_D)


Tile = tuple[int, int, int, int]  # BLOCK_M queries, BLOCK_N keys, warps, pipeline stages
KERNELS = {"forward": forward_kernel, "dq": dq_kernel, "dkdv": dkdv_kernel}
# Bytes an element: {capability and later: tiles of forward, dq, dkdv up to head_dim 64, up to 128}.
# By the compiler (docs/SUPPORT.md), on 9.0 by time.
_7_5 = (((32, 32, 8, 1), (32, 32, 8, 1), (32, 16, 8, 1)),
        ((16, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)))
_8_6 = (((128, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2)),
        ((64, 64, 4, 2), (64, 32, 4, 2), (32, 64, 4, 2)))
TILES: dict[int, dict[tuple[int, int], tuple[tuple[Tile, ...], ...]]] = {
    2: {(7, 5): _7_5,
        (8, 0): (((128, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 2)),
                 ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 8, 2))),
        (8, 6): _8_6,
        (9, 0): (((128, 64, 8, 3), (64, 64, 4, 3), (64, 64, 4, 2)),
                 ((64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 8, 2))),
        (10, 0): (((128, 64, 4, 3), (128, 64, 8, 2), (64, 64, 4, 2)),
                  ((128, 64, 8, 2), (128, 64, 8, 2), (64, 128, 8, 2))),
        (12, 0): _8_6},
    4: {(7, 5): _7_5,
        (8, 0): (((32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 2)),
                 ((32, 32, 8, 1), (16, 16, 8, 1), (32, 16, 8, 1)))}}
INTERPRETED: dict[str, Tile] = dict.fromkeys(KERNELS, (64, 32, 1, 1)) | {"dkdv": (32, 64, 1, 1)}


def default_tile(kernel: str, capability: tuple[int, int] | None, head_dim: int,
                 itemsize: int) -> Tile:
    if capability is None:
        return INTERPRETED[kernel]
    table = TILES[itemsize]
    up_to_64, up_to_128 = table[max(c for c in table if c <= capability)]
    return (up_to_64 if head_dim <= 64 else up_to_128)[[*KERNELS].index(kernel)]


def _launch(name: str, heads: int, T: int, q: Tensor, *args: object,
            tile: Sequence[int] | None = None, **constants: bool) -> None:
    capability = torch.cuda.get_device_capability(q.device) if q.is_cuda else None
    head_dim, itemsize = q.shape[3], q.element_size()
    M, N, warps, stages = tile or default_tile(name, capability, head_dim, itemsize)
    if constants.get("TMA"):
        triton.set_allocator(lambda size, *_: torch.empty(size, dtype=torch.int8, device="cuda"))
    programs = heads * triton.cdiv(T, N if name == "dkdv" else M)
    with torch.cuda.device_of(q):  # where Triton launches
        KERNELS[name][programs,](
            q, *args, HEAD_DIM=head_dim, BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
            BLOCK_M=M, BLOCK_N=N, **constants, num_warps=warps, num_stages=stages,
            enable_fp_fusion=True)  # S_ij * tau - m_i in one instruction


def _readable(x: Tensor) -> Tensor:
    """x, copied if rows are not contiguous or a tile spans 2^31 elements."""
    return x if x.stride(3) == 1 and 128 * x.stride(1) < 2**31 else x.contiguous()


def by_row(slopes: Tensor | None, B: int) -> Tensor | None:
    """(H,) or (B, H) as (B, H)."""
    return slopes if slopes is None else slopes.expand(B, -1).contiguous()


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:3]]


def _numbers(q: Tensor, k: Tensor, window: int | None, right: int | None, dropout: float,
             scale: float, softcap: float | None, offset: int | None) -> tuple[float | None, ...]:
    (Tq, H), Tk = q.shape[1:3], k.shape[1]
    offset = Tk - Tq if offset is None else offset
    right = Tk - 1 - offset if right is None else right  # the first query sees the last key
    # A random int32 is at least this with probability 1 - dropout.
    threshold = round(dropout * 2**32) - 2**31
    sizes = Tq, Tk, offset, H
    return *sizes, window, right, scale, softcap, threshold, 1 - dropout, H // k.shape[2]


# Not triton_op: Inductor cannot trace it in the interpreter. Schemas are read from annotations.


@torch.library.custom_op("nanoattn::flash_forward", mutates_args=())
def flash_forward(q: Tensor, k: Tensor, v: Tensor, run_q: Tensor | None, run_k: Tensor | None,
                  seed: Tensor | None, sinks: Tensor | None, slopes: Tensor | None,
                  window: int | None, right: int | None, dropout: float, scale: float,
                  softcap: float | None, offset: int | None) -> tuple[Tensor, Tensor]:
    """out (B, Tq, H, D) and L (B, H, Tq) float32, log2 of the sum of exp(s).

    run_q (B, 2, Tq), run_k (B, 2, Tk) int32: first and last key of each query's segment, position
    of each key's. seed (1,) int64; sinks (H,), slopes (H,) or (B, H) float32. offset as in
    visible(): with one the results are float32."""
    q, k, v = _readable(q), _readable(k), _readable(v)
    B, Tq, H, _ = q.shape
    out = _result(q.shape, q, offset)
    L = torch.empty(B, H, Tq, dtype=torch.float32, device=q.device)
    _launch("forward", B * H, Tq, q, k, v, out, L, run_q, seed, sinks, by_row(slopes, B),
            *_strides(q, k, v), *_numbers(q, k, window, right, dropout, scale, softcap, offset))
    return out, L


def _result(shape: tuple[int, ...], q: Tensor, offset: int | None) -> Tensor:
    """float32 with an offset, since parts are summed."""
    return torch.empty(shape, dtype=q.dtype if offset is None else torch.float32, device=q.device)


@torch.library.custom_op("nanoattn::flash_backward", mutates_args=())
def flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
                   run_q: Tensor | None, run_k: Tensor | None, seed: Tensor | None,
                   slopes: Tensor | None, tiles: list[int] | None, tma: bool, window: int | None,
                   right: int | None, dropout: float, scale: float, softcap: float | None,
                   offset: int | None) -> tuple[Tensor, Tensor]:
    """Packed gradients, delta (B, H, Tq) float32. tiles: dq, dkdv. tma: 16-byte rows, on 9.0."""
    q, k, v, dout = _readable(q), _readable(k), _readable(v), _readable(dout)
    B, Tq, H, _ = q.shape
    Tk, Hkv = k.shape[1:3]
    grads = _packed(q, k, offset)
    dq, dk, dv = unpack(grads, q, k)
    delta = torch.empty_like(L)
    before = seed, by_row(slopes, B), *_strides(q, k, v, dout)
    numbers = _numbers(q, k, window, right, dropout, scale, softcap, offset)
    dq_tile, dkdv_tile = (tiles[:4], tiles[4:]) if tiles else (None, None)
    _launch("dq", B * H, Tq, q, k, v, out, dout, L, delta, dq, run_q, *before, *dq.stride()[:2],
            *numbers, tile=dq_tile, TMA=tma)
    # After dq, which writes delta.
    _launch("dkdv", B * Hkv, Tk, q, k, v, dout, L, delta, dk, dv, run_k, *before, *dk.stride()[:2],
            *numbers, tile=dkdv_tile, TMA=tma)
    return grads, delta


def _packed(q: Tensor, k: Tensor, offset: int | None) -> Tensor:
    (B, Tq, H, D), (Tk, Hkv) = q.shape, k.shape[1:3]
    flat = (B * (Tq * H + 2 * Tk * Hkv) * D,)
    return _result((B, Tq, (H + 2 * Hkv) * D) if Tq == Tk else flat, q, offset)


def unpack(grads: Tensor, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Gradients of q, k and v; of one length side by side, as torch.compile wants them."""
    (B, Tq, H, D), (Tk, Hkv) = q.shape, k.shape[1:3]
    if Tq == Tk:
        found = grads.split([H * D, Hkv * D, Hkv * D], dim=2)
        return tuple(g.unflatten(2, (-1, D)) for g in found)
    found = grads.split([B * Tq * H * D, *[B * Tk * Hkv * D] * 2])
    return found[0].view(q.shape), *(g.view(k.shape) for g in found[1:])


@flash_forward.register_fake
def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    B, Tq, H, _D = q.shape
    return _result(q.shape, q, rest[-1]), q.new_empty((B, H, Tq), dtype=torch.float32)


@flash_backward.register_fake
def _(_dout: Tensor, q: Tensor, k: Tensor, _v: Tensor, _out: Tensor, L: Tensor,
      *rest: Any) -> tuple[Tensor, Tensor]:
    return _packed(q, k, rest[-1]), torch.empty_like(L)
