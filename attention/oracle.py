"""The oracle: attention and its gradients in float64, as loops; and the one tolerance policy.

`attention` is written from the contract alone (docs/DESIGN.md, section 3), one query row at a time,
with gradients derived by hand. It shares only `visible` with the backends. `check` is the only
place that decides whether a backend's results are right.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .spec import visible


@dataclass(frozen=True)
class Result:
    """The output and, where they were asked for, the gradients of one attention call."""

    out: Tensor  # (B, Tq, H, D)
    dq: Tensor | None = None  # (B, Tq, H, D)
    dk: Tensor | None = None  # (B, Tk, Hkv, D)
    dv: Tensor | None = None  # (B, Tk, Hkv, D)
    condition: Mapping[str, float] = field(default_factory=dict)  # of the truth only: attention()


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, window: int | None = None,
              segments: Tensor | None = None) -> Result:  # fmt: skip
    """The truth, in float64 on the CPU, whatever dtype and device the inputs have.

    Per row, with s_j = q . k_j / sqrt(D) and p = softmax(s) over the keys j that it may see:

        out  = sum_j p_j v_j
        dv_j += p_j dout                          out is linear in v
        dp_j  = dout . v_j
        ds_j  = p_j (dp_j - sum_l p_l dp_l)       the Jacobian of softmax: diag(p) - p p^T
        dq    = sum_j ds_j k_j / sqrt(D)
        dk_j += ds_j q / sqrt(D)

    The result also has the condition of each tensor: how far, to first order, an entry may move
    when a kernel rounds (a) each score s_j relative to its terms |q||k|, which becomes a relative
    error of p_j, and twice that in the backward where exp(s_j - logsumexp) is recomputed; and (b)
    dp and sum p dp relative to theirs, whose rounding stays in ds even where the difference is zero
    (a row with one visible key). In units of eps, the largest entry.

    Args:
        q, dout: (B, Tq, H, D); k, v: (B, Tk, Hkv, D).
        segments: (B, Tk) integers; the queries are the last Tq positions.
    """
    q_, k_, v_, do = (t.detach().cpu().double().numpy() for t in (q, k, v, dout))
    seg = None if segments is None else segments.cpu().numpy()
    (B, Tq, H, D), (_, Tk, Hkv, _) = q.shape, k.shape
    out, dq, dk, dv = (np.zeros_like(t) for t in (q_, q_, k_, v_))
    out_moves, dq_moves, dk_moves, dv_moves = (np.zeros_like(t) for t in (q_, q_, k_, v_))
    offset, j = Tk - Tq, np.arange(Tk)
    for b in range(B):
        for i in range(Tq):
            seg_i = None if seg is None or i + offset < 0 else seg[b, i + offset]
            seen = visible(i, j, offset, window, seg_i, None if seg is None else seg[b])
            if not seen.any():
                continue  # out and dq stay zero, and the row adds nothing to dk and dv
            for h in range(H):
                g = h // (H // Hkv)
                keys, values = k_[b, seen, g], v_[b, seen, g]  # (visible keys, D)
                s = keys @ q_[b, i, h] / math.sqrt(D)
                e = np.exp(s - s.max())
                p = e / e.sum()
                out[b, i, h] = p @ values
                dv[b, seen, g] += np.outer(p, do[b, i, h])
                dp = values @ do[b, i, h]
                ds = p * (dp - p @ dp)
                dq[b, i, h] = ds @ keys / math.sqrt(D)
                dk[b, seen, g] += np.outer(ds, q_[b, i, h]) / math.sqrt(D)

                q_abs, do_abs, keys_abs = np.abs(q_[b, i, h]), np.abs(do[b, i, h]), np.abs(keys)
                p_moves = p * (keys_abs @ q_abs).max() / math.sqrt(D)
                out_moves[b, i, h] = p_moves @ np.abs(values - out[b, i, h])
                p_moves *= 2
                dv_moves[b, seen, g] += np.outer(p_moves, do_abs)
                dp_moves = np.abs(values) @ do_abs
                ds_moves = p_moves * np.abs(dp - p @ dp) + p * (dp_moves + p @ dp_moves)
                dq_moves[b, i, h] = ds_moves @ keys_abs / math.sqrt(D)
                dk_moves[b, seen, g] += np.outer(ds_moves, q_abs) / math.sqrt(D)
    moves = {"out": out_moves, "dq": dq_moves, "dk": dk_moves, "dv": dv_moves}
    out_, dq_, dk_, dv_ = (torch.from_numpy(t) for t in (out, dq, dk, dv))
    return Result(out_, dq_, dk_, dv_, {name: float(t.max()) for name, t in moves.items()})


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, window: int | None = None,
          segments: Tensor | None = None) -> Result:  # fmt: skip
    """The result of plain PyTorch in the inputs' dtype and on their device: the yardstick.

    The textbook formula with autograd, and nothing clever: its error is what the dtype costs.
    """
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    (Tq, H, D), (Tk, Hkv) = q.shape[1:], k.shape[1:3]
    k_all, v_all = (t.repeat_interleave(H // Hkv, dim=2) for t in (k, v))
    i, j = torch.arange(Tq, device=q.device)[:, None], torch.arange(Tk, device=q.device)
    seen = visible(i, j, Tk - Tq, window).expand(q.shape[0], Tq, Tk)
    if segments is not None:
        seg_i = segments[:, (i.flatten() + Tk - Tq).clamp(min=0)]  # clamped rows see nothing
        seen = seen & visible(i, j, Tk - Tq, window, seg_i[:, :, None], segments[:, None, :])
    seen = seen[:, None]  # (B, 1, Tq, Tk)
    scores = torch.einsum("bihd,bjhd->bhij", q, k_all) / math.sqrt(D)
    scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
    probs = torch.softmax(scores, dim=-1) * seen
    out = torch.einsum("bhij,bjhd->bihd", probs, v_all)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), dout)
    return Result(out.detach(), dq, dk, dv)


def check(got: Result, plain: Result, truth: Result, dtype: torch.dtype, factor: float = 1) -> None:
    """THE tolerance policy. All values must be finite, and for each tensor of `got`

        max|got - truth| <= m * max|plain - truth| + eps(dtype) * max|truth|
                            + eps(compute) * condition

    with m = 2 for the output and 3 for the gradients. No kernel can avoid the last term: a few
    roundings in the precision that kernels compute in, float32 for half precision. It matters where
    plain PyTorch is exact by luck, as in a row with one visible key: P is x / x there, but in the
    backward of a FlashAttention kernel it is exp(s - logsumexp).

    Args:
        factor: scales the tolerance; below 1 to see how much room there is.

    Raises:
        AssertionError: which tensor is off, by how much, where, and what is allowed.
    """
    eps = torch.finfo(dtype).eps
    eps_compute = min(eps, torch.finfo(torch.float32).eps)
    for name, m in (("out", 2), ("dq", 3), ("dk", 3), ("dv", 3)):
        g, p, t = (getattr(r, name) for r in (got, plain, truth))
        if g is None:
            continue
        require(g.dtype == dtype, f"{name} is {g.dtype}, not {dtype}")
        require(g.shape == t.shape, f"{name} has shape {tuple(g.shape)}, not {tuple(t.shape)}")
        g, p = g.detach().cpu().double(), p.detach().cpu().double()
        require(p.isfinite().all(), f"{name} of plain PyTorch is not finite: no yardstick")
        require(g.isfinite().all(), f"{name} is not finite")
        allowed = m * float((p - t).abs().max()) + eps * float(t.abs().max())
        allowed = factor * (allowed + eps_compute * truth.condition[name])
        error = (g - t).abs()
        if not float(error.max()) <= allowed:
            at = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
            raise AssertionError(
                f"{name} is off by {float(error[at]):.3g} at {list(at)}: {float(g[at]):.6g}, the "
                f"truth is {float(t[at]):.6g}; allowed is {allowed:.3g}"
            )


def require(ok: bool | Tensor, text: str) -> None:
    """An assertion that `python -O` keeps."""
    if not ok:
        raise AssertionError(text)
