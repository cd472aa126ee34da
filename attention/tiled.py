"""tiled: FlashAttention in plain PyTorch. The formula of manual.py, without storing all of S or P.

For each row keep the maximum m of its scores so far, the sum l of exp(s - m), and an output O that
is not yet normalized. A block S_ij, with values V_j, gives

    m_new = max(m_i, rowmax(S_ij))          P~_ij = exp(S_ij - m_new)
    l_i   = e^(m_i - m_new) l_i + rowsum(P~_ij)
    O_i   = e^(m_i - m_new) O_i + P~_ij V_j        the old sums, rescaled to the new maximum

and in the end O_i / l_i is softmax(S) V. The backward pass keeps L_i = m_i + log l_i and recomputes
P_ij = exp(S_ij - L_i); dS_ij = P_ij * (dP_ij - delta_i), delta_i = rowsum(dO_i * O_i). Sinks begin
the sums: m_i = sink, l_i = 1. Course: pages 4 to 6.

Memory  O(T): q, k, v, out and L stay for the backward pass.
FLOPs   4 Tq Tk D a head forward, 10 Tq Tk D backward, less the wholly masked tiles.
Source  Dao 2023 (arXiv 2307.08691), Algorithms 1 and 2; Dao et al. 2022 (arXiv 2205.14135)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .caps import Backend, Caps, Partial
from .function import attention, not_compiled
from .masks import Pair, alibi, begins, mask, sees_all, symbolic
from .spec import Spec, visible

BLOCK_M = BLOCK_N = 64  # B_r queries and B_c keys of a tile


@not_compiled  # traced, the loops would be unrolled
def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
           cache: None = None, sinks: Tensor | None = None,
           alibi_slopes: Tensor | None = None) -> Tensor:
    """q (B, Tq, H, D), k and v (B, Tk, Hkv, D) -> (B, Tq, H, D), by function.py's autograd."""
    seed = torch.randint(2**62, (), device="cpu") if spec.dropout else None
    return attention(q, k, v, spec, kernel=PARTIAL, segments=segments, sinks=sinks, seed=seed,
                     alibi_slopes=alibi_slopes)[0]


@torch.no_grad()
def forward_tiles(q: Tensor, k: Tensor, v: Tensor, spec: Spec, offset: int | None = None,
                  segments: Pair = None, sinks: Tensor | None = None, seed: Tensor | None = None,
                  B_r: int = BLOCK_M, B_c: int = BLOCK_N,
                  on_tile: Callable[..., object] = lambda *_: None,
                  alibi_slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Algorithm 1: out and L as in caps.Partial. A tile's seed is `seed` plus its number."""
    Tq, Tk, Hkv, tau = q.shape[1], k.shape[1], k.shape[2], spec.softmax_scale
    acc = torch.promote_types(q.dtype, torch.float32)
    offset = Tk - Tq if offset is None else offset
    Q, K, V = (by_kv_head(t, Hkv) for t in (q, k, v))
    out = q.new_empty(q.shape, dtype=acc)
    O, L = by_kv_head(out, Hkv), q.new_empty((*Q.shape[:-1], 1), dtype=acc)
    rows, cols = blocks(Tq, B_r), blocks(Tk, B_c)
    skipped = masked_tiles(rows, cols, offset, spec, segments)
    for i, I in enumerate(rows):
        Q_i = Q[..., I, :].to(acc)  # (B, Hkv, H/Hkv, B_r, D)
        O_i = torch.zeros_like(Q_i)
        l_i = torch.zeros_like(Q_i[..., :1])  # (B, Hkv, H/Hkv, B_r, 1)
        # Finite: where nothing is seen yet, m_i - m_new is 0.
        m_i = torch.full_like(l_i, torch.finfo(acc).min)
        if sinks is not None:
            m_i, l_i = torch.maximum(m_i, sinks.to(acc).view(Hkv, -1, 1, 1)), l_i + 1
        for j, J in enumerate(cols):
            if skipped[i][j]:
                continue
            K_j, V_j = K[..., J, :].to(acc), V[..., J, :].to(acc)  # (B, Hkv, 1, B_c, D)
            S_ij = tau * (Q_i @ K_j.mT)  # (B, Hkv, H/Hkv, B_r, B_c)
            if spec.softcap is not None:
                S_ij = spec.softcap * torch.tanh(S_ij / spec.softcap)
            S_ij = masked(S_ij, I, J, offset, spec, segments, alibi_slopes)
            m_new = torch.maximum(m_i, S_ij.amax(dim=-1, keepdim=True))
            P_tilde_ij = torch.exp(S_ij - m_new)
            rescale = torch.exp(m_i - m_new)
            l_i = rescale * l_i + P_tilde_ij.sum(dim=-1, keepdim=True)
            Z_ij = dropout(P_tilde_ij, spec.dropout, seed, i * len(cols) + j)
            O_i = rescale * O_i + (Z_ij * P_tilde_ij).to(q.dtype).to(acc) @ V_j
            m_i = m_new
            on_tile(i, j, S_ij, rescale, m_i, l_i, O_i)
        l_i = l_i.masked_fill(l_i == 0, 1)  # fully masked: 0 / 1, not 0 / 0
        O[..., I, :] = O_i / l_i
        L[..., I, :] = m_i + torch.log(l_i)
    return out, L.masked_fill(L.eq(torch.finfo(acc).min), -torch.inf).flatten(1, 2)[..., 0]


def backward_tiles(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
                   spec: Spec, offset: int | None = None, segments: Pair = None,
                   sinks: Tensor | None = None, seed: Tensor | None = None,
                   alibi_slopes: Tensor | None = None) -> tuple[Tensor, ...]:
    """Algorithm 2: gradients of q, k, v and any sinks."""
    Tq, Tk, Hkv, tau, acc = q.shape[1], k.shape[1], k.shape[2], spec.softmax_scale, L.dtype
    Q, K, V, O, dO = (by_kv_head(t, Hkv) for t in (q, k, v, out, dout))
    offset = Tk - Tq if offset is None else offset
    dq, dk, dv = (t.new_zeros(t.shape, dtype=acc) for t in (q, k, v))
    dQ, dK, dV = (by_kv_head(t, Hkv) for t in (dq, dk, dv))
    rows, cols = blocks(Tq, BLOCK_M), blocks(Tk, BLOCK_N)
    skipped = masked_tiles(rows, cols, offset, spec, segments)
    L = L.clamp(min=torch.finfo(acc).min).unflatten(1, (Hkv, -1))[..., None]
    delta = (dO.to(acc) * O.to(acc)).sum(dim=-1, keepdim=True)  # (B, Hkv, H/Hkv, Tq, 1), as L
    for j, J in enumerate(cols):
        K_j, V_j = K[..., J, :].to(acc), V[..., J, :].to(acc)  # (B, Hkv, 1, B_c, D)
        dK_j, dV_j = torch.zeros_like(K_j), torch.zeros_like(V_j)
        for i, I in enumerate(rows):
            if skipped[i][j]:
                continue
            Q_i, dO_i = Q[..., I, :].to(acc), dO[..., I, :].to(acc)
            S_ij = tau * (Q_i @ K_j.mT)  # (B, Hkv, H/Hkv, B_r, B_c)
            if spec.softcap is not None:
                S_ij = spec.softcap * torch.tanh(S_ij / spec.softcap)
            S_seen = masked(S_ij, I, J, offset, spec, segments, alibi_slopes)
            P_ij = torch.exp(S_seen - L[..., I, :])
            Z_ij = dropout(P_ij, spec.dropout, seed, i * len(cols) + j)
            dropped = (Z_ij * P_ij).to(q.dtype).to(acc)
            dV_j += (dropped.mT @ dO_i).sum(dim=2, keepdim=True)  # query heads add up
            dP_ij = Z_ij * (dO_i @ V_j.mT)
            dS_ij = P_ij * (dP_ij - delta[..., I, :])
            if spec.softcap is not None:
                dS_ij *= 1 - (S_ij / spec.softcap) ** 2  # tanh' = 1 - tanh^2
            dS_ij = dS_ij.to(q.dtype).to(acc)
            dQ[..., I, :] += tau * (dS_ij @ K_j)
            dK_j += tau * (dS_ij.mT @ Q_i).sum(dim=2, keepdim=True)
        dK[..., J, :], dV[..., J, :] = dK_j, dV_j
    if sinks is None:
        return dq, dk, dv
    P_sink = torch.exp(sinks.to(acc).view(Hkv, -1, 1, 1) - L)
    return dq, dk, dv, -(P_sink * delta).sum(dim=(0, 3, 4)).flatten()


def by_kv_head(x: Tensor, Hkv: int) -> Tensor:
    """(B, T, H, D) as (B, Hkv, H/Hkv, T, D)."""
    return x.unflatten(2, (Hkv, -1)).permute(0, 2, 3, 1, 4)


def blocks(T: int, size: int) -> list[slice]:
    return [slice(t, min(t + size, T)) for t in range(0, T, size)]


def wholly_masked(I: slice, J: slice, offset: int, window: int | None,
                  right: int | None = 0) -> bool:
    """True if no pair is visible: the one nearest the diagonal decides."""
    least, largest = J.start - (I.stop - 1), (J.stop - 1) - I.start  # of j - i
    nearest = min(max(offset, least), largest)  # to the diagonal j = i + offset
    return not visible(0, nearest, offset, window, right=right)


def masked_tiles(rows: list[slice], cols: list[slice], offset: int, spec: Spec,
                 segments: Pair) -> list[list[bool]]:
    masked = [[wholly_masked(I, J, offset, spec.window, spec.right) for J in cols] for I in rows]
    if segments is None or symbolic(segments[1]) or not (
            0 <= offset == cols[-1].stop - rows[-1].stop):  # else keys between have other ids
        return masked
    number = begins(segments[1]).cumsum(dim=1).cpu()  # (B, Tk)
    first_q = number[:, [offset + I.start for I in rows], None]  # (B, rows, 1)
    last_q = number[:, [offset + I.stop - 1 for I in rows], None]
    first_k = number[:, None, [J.start for J in cols]]  # (B, 1, cols)
    last_k = number[:, None, [J.stop - 1 for J in cols]]
    other_segment = ((last_k < first_q) | (last_q < first_k)).all(dim=0)
    return (torch.tensor(masked, device="cpu") | other_segment).tolist()


def masked(S_ij: Tensor, I: slice, J: slice, offset: int, spec: Spec, segments: Pair,
           alibi_slopes: Tensor | None = None) -> Tensor:
    (n, m), at = S_ij.shape[-2:], offset + I.start - J.start
    if alibi_slopes is not None:
        bias = alibi(alibi_slopes, n, m, at, S_ij.dtype)
        S_ij = S_ij + bias.unflatten(1, (S_ij.shape[1], -1))
    if segments is None and sees_all(n, m, spec.window, at, spec.right):
        return S_ij
    pair = (segments[0][:, I], segments[1][:, J]) if segments else None
    seen = mask(n, m, spec.window, pair, S_ij.device, at, spec.right)  # (1 or B, 1, n, m)
    return S_ij.masked_fill(~seen[:, None], -torch.inf)


def dropout(P_ij: Tensor, p: float, seed: Tensor | None, tile: int) -> Tensor | float:
    """Z_ij: 0 with probability p, else 1 / (1 - p); the same for one seed."""
    if not p:
        return 1.0
    assert seed is not None
    draw = torch.Generator(P_ij.device).manual_seed(int(seed) + tile)
    kept = torch.rand(P_ij.shape, generator=draw, dtype=torch.float32, device=P_ij.device) >= p
    return kept.to(P_ij.dtype) / (1 - p)


PARTIAL = Partial(forward_tiles, backward_tiles, dropout=True)
BACKEND = Backend("tiled", "FlashAttention's algorithm in plain PyTorch, O(S) memory", attend,
                  (Caps(right=True, scale=True, softcap=True, sinks=True, alibi=True, lse=True),),
                  fallback=None, fullgraph=False, partial=PARTIAL)
