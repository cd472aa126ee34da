"""Tests of Backend.partial: attention in parts, and the log-sum-exp of rows that see later keys."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..caps import Backend
from ..function import attention, whole
from ..masks import mask
from ..proof import Result, run
from ..spec import Spec, visible
from . import matrix
from .matrix import close, require


def in_parts(backend: Backend, spec: Spec, device: str) -> None:
    """Partial attention over blocks, merged by its log-sum-exp L, equals full attention."""
    if backend.partial is None:
        raise AssertionError("it declares lse but has no partial")
    Tq, Tk = 50, 41  # the first 9 queries see no key
    case = replace(matrix.case_of(spec, Tk), Tq=Tq)
    q, k, v, dout = matrix.draw(case, spec.dtype, device)
    seg, acc, parts = matrix.segments(case, device), torch.promote_types(q.dtype, torch.float32), []
    # In rows 16 to 37 and keys 13 to 30 the mask hides a few pairs.
    borders = itertools.pairwise((0, 16, 37, Tq)), itertools.pairwise((0, 13, 30, Tk))
    for I, J in ((slice(*i), slice(*j)) for i, j in itertools.product(*borders)):
        pair = None if seg is None else (F.pad(seg, (Tq - Tk, 0))[:, I], seg[:, J])
        parts.append((I, J, I.start - J.start + Tk - Tq, pair))
    out = torch.zeros(q.shape, dtype=acc, device=device)
    L = torch.full((*q.shape[:1], q.shape[2], Tq), torch.finfo(acc).min, dtype=acc, device=device)
    with torch.no_grad():
        for I, J, offset, pair in parts:
            O_ij, L_ij = backend.partial.forward(q[:, I], k[:, J], v[:, J], spec, offset, pair)
            require(O_ij.dtype == L_ij.dtype == acc, f"out is {O_ij.dtype}, L is {L_ij.dtype}")
            i, j = (torch.arange(x.stop - x.start, device=device) for x in (I, J))
            both = (None, None) if pair is None else (pair[0][:, :, None], pair[1][:, None])
            masked = ~visible(i[:, None], j, offset, spec.window, *both).any(dim=-1)  # (B, or ,) Tq
            masked = masked.expand(q.shape[0], -1)
            require(not O_ij[masked].any(), "a fully masked row must give zeros")
            empty = (L_ij.transpose(1, 2)[masked] == -torch.inf).all()
            require(empty, "the L of a fully masked row must be -inf")
            L_new = torch.logaddexp(L[..., I], L_ij)
            old, new = (torch.exp(x - L_new).mT[..., None] for x in (L[..., I], L_ij))
            out[:, I], L[..., I] = old * out[:, I] + new * O_ij, L_new
        L = L.masked_fill(L.eq(torch.finfo(acc).min), -torch.inf)
        sums = [torch.zeros(t.shape, dtype=acc, device=device) for t in (q, k, v)]
        whole = out.to(q.dtype)
        for I, J, offset, pair in parts:
            of_row = dout[:, I], q[:, I], k[:, J], v[:, J], whole[:, I], L[..., I]
            grads = backend.partial.backward(*of_row, spec, offset, pair)
            for total, rows, grad in zip(sums, (I, J, J), grads, strict=True):
                require(grad.dtype == acc, f"a gradient is {grad.dtype}")
                total[:, rows] += grad
    got = Result(whole, *(t.to(q.dtype) for t in sums))
    matrix.compare(got, case, spec.dtype, device)


def log_sum_exp(backend: Backend, spec: Spec, device: str) -> None:
    """L of whole rows that see later keys, and the gradients by it."""
    if backend.partial is None:
        raise AssertionError("it declares lse but has no partial")
    for Tq, Tk in ((33, 33), (20, 33), *([] if spec.segments else [(40, 33)])):
        case = replace(matrix.case_of(spec, Tk), Tq=Tq)
        given = matrix.inputs(case, spec.dtype, device)
        matrix.compare(run(whole(backend), given, spec), case, spec.dtype, device)
        q, k, v, _, seg, _ = given
        with torch.no_grad():
            L = attention(q, k, v, spec, segments=seg, kernel=backend.partial)[1]
        keys = k.double().repeat_interleave(spec.n_head // spec.n_kv_head, dim=2)
        scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * spec.softmax_scale
        sides = spec.window, seg, torch.device(device), None, spec.right
        seen = mask(Tq, Tk, *sides)
        want = scores.masked_fill(~seen, -torch.inf).logsumexp(dim=3)
        masked = want.isneginf()
        require(torch.equal(masked, L.isneginf()), "L must be -inf in fully masked rows only")
        tolerance = 20 * max(torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps)
        close(L[~masked], want[~masked], tolerance, "L")
