"""The oracle: attention and its gradients in float64, and the comparison with it.

`attention` is the contract (docs/DESIGN.md, section 3), one head of one text after the other, with
gradients derived by hand, in NumPy. It shares only `visible` with the backends.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..probing import allowed_error
from ..spec import visible


@dataclass(frozen=True)
class Result:
    """Output and gradients of one attention call."""

    out: Tensor  # (B, Tq, H, D)
    dq: Tensor | None = None  # (B, Tq, H, D)
    dk: Tensor | None = None  # (B, Tk, Hkv, D)
    dv: Tensor | None = None  # (B, Tk, Hkv, D)
    dsinks: Tensor | None = None  # (H,)
    condition: Mapping[str, float] = field(default_factory=dict, kw_only=True)  # of attention()
    rounded: Mapping[str, float] = field(default_factory=dict, kw_only=True)  # of attention()

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The output and those gradients that are there, by name."""
        found = {name: getattr(self, name) for name in ("out", "dq", "dk", "dv", "dsinks")}
        return {name: t for name, t in found.items() if t is not None}


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, window: int | None = None,
              segments: Tensor | None = None, scale: float | None = None,
              softcap: float | None = None, sinks: Tensor | None = None,
              right: int | None = 0) -> Result:
    """Return the exact result, in float64 on the CPU. Memory: ten matrices (Tq, Tk).

    Per row, with the scale tau (1 / sqrt(D)), t_j = tau q . k_j, s_j = c tanh(t_j / c) with a
    softcap c, else t_j, and p = softmax(s) over the visible keys j and the sink a (of value 0):

        out  = sum_j p_j v_j
        dv_j += p_j dout                          out is linear in v
        dp_j  = dout . v_j                        0 for the sink
        ds_j  = p_j (dp_j - sum_l p_l dp_l)       the Jacobian of softmax: diag(p) - p p^T
        da   += -p_a sum_l p_l dp_l
        dt_j  = ds_j (1 - (s_j / c)^2)            tanh' = 1 - tanh^2
        dq    = tau sum_j dt_j k_j
        dk_j += tau dt_j q

    `condition` holds for each tensor the largest rounding error to first order, in units of eps:
    (a) of each score s_j relative to its terms |q||k|, of a capped score and a sink relative to
    themselves: a relative error of p_j, doubled in the backward pass; (b) of dp and sum p dp
    relative to their terms, even if the difference is zero (a row with one visible key); (c) of
    1 - (s / c)^2, from the error of s.

    `rounded` holds how far the gradients move, in units of eps, if sum_l p_l dp_l is computed as
    dout . out from an output that was rounded, as FlashAttention does; plain PyTorch does not.

    Args:
        q, dout: (B, Tq, H, D); k, v: (B, Tk, Hkv, D).
        segments: (B, Tk) integers; the queries are the last Tq positions. A query before all of
            them belongs to no segment: it sees no key.
        sinks: (H,).
    """
    q_, k_, v_, dout_ = (t.detach().cpu().double().numpy() for t in (q, k, v, dout))
    seg = None if segments is None else segments.cpu().numpy()
    (B, Tq, H, D), (_, Tk, Hkv, _) = q.shape, k.shape
    tau = 1 / math.sqrt(D) if scale is None else scale
    sink = np.full(H, -np.inf) if sinks is None else sinks.detach().cpu().double().numpy()
    like = q_, q_, k_, v_, sink
    out, dq, dk, dv, da = (np.zeros_like(t) for t in like)
    out_moves, dq_moves, dk_moves, dv_moves, da_moves = (np.zeros_like(t) for t in like)
    dq_rounds, dk_rounds, da_rounds = (np.zeros_like(t) for t in (q_, k_, sink))  # squares
    offset, j = Tk - Tq, np.arange(Tk)
    for b, h in itertools.product(range(B), range(H)):
        g = h // (H // Hkv)
        i = np.arange(Tq) if seg is None else np.arange(max(0, -offset), Tq)
        seg_i, seg_j = (None, None) if seg is None else (seg[b, i + offset, None], seg[b])
        seen = visible(i[:, None], j, offset, window, seg_i, seg_j, right)
        i, seen = i[seen.any(1)], seen[seen.any(1)]  # of a row that sees no key all terms are zero
        if not len(i):
            continue
        queries, do = q_[b, i, h], dout_[b, i, h]
        # What no row sees may be NaN.
        keys, values = (np.where(seen.any(0)[:, None], t[b, :, g], 0) for t in (k_, v_))
        s = queries @ keys.T * tau  # (rows, Tk), as are slope, p, dp, ds and dt
        slope = np.ones_like(s)
        if softcap is not None:
            s = softcap * np.tanh(s / softcap)
            slope = 1 - (s / softcap) ** 2
        visible_s = np.where(seen, s, -np.inf)
        row_max = np.maximum(visible_s.max(1, keepdims=True), sink[h])
        e, e_sink = np.exp(visible_s - row_max), np.exp(sink[h] - row_max)
        p, p_sink = (x / (e.sum(1, keepdims=True) + e_sink) for x in (e, e_sink))
        out[b, i, h] = o = p @ values
        dv[b, :, g] += p.T @ do
        dp = do @ values.T
        mean_dp = (p * dp).sum(1, keepdims=True)
        ds = p * (dp - mean_dp)
        da[h] -= (p_sink * mean_dp).sum()
        dt = ds * slope
        dq[b, i, h] = dt @ keys * tau
        dk[b, :, g] += dt.T @ queries * tau

        queries_abs, keys_abs, do_abs = np.abs(queries), np.abs(keys), np.abs(do)
        s_moves = queries_abs @ keys_abs.T * tau * slope
        if softcap is not None:
            s_moves += np.abs(s)
        rel = np.where(seen, s_moves, 0).max(1, keepdims=True)  # of any p
        if sinks is not None:
            rel = np.maximum(rel, np.where(p_sink > 0, abs(sink[h]), 0))
        far = np.array([row @ np.abs(values - o_i) for row, o_i in zip(p, o, strict=True)])
        out_moves[b, i, h] = rel * (far + p_sink * np.abs(o))
        p_moves = 2 * rel * p
        dv_moves[b, :, g] += p_moves.T @ do_abs
        dp_moves = do_abs @ np.abs(values).T
        mean_moves = (p * dp_moves).sum(1, keepdims=True)
        ds_moves = p_moves * np.abs(dp - mean_dp) + p * (dp_moves + mean_moves)
        da_moves[h] += (p_sink * (2 * rel * np.abs(mean_dp) + mean_moves)).sum()
        dt_moves = ds_moves * slope
        if softcap is not None:
            dt_moves += np.abs(ds) * (1 + 2 * np.abs(s) * s_moves / softcap**2)
        dq_moves[b, i, h] = dt_moves @ keys_abs * tau
        dk_moves[b, :, g] += dt_moves.T @ queries_abs * tau

        delta = np.sqrt(np.square(o * do).sum(1, keepdims=True))  # its errors add up
        dt_round = p * slope * delta * tau
        dq_rounds[b, i, h] = np.square(dt_round @ keys)
        dk_rounds[b, :, g] += np.square(dt_round).T @ np.square(queries)
        da_rounds[h] += np.square(p_sink * delta).sum()
    names = ("out", "dq", "dk", "dv", "dsinks")
    moves = (out_moves, dq_moves, dk_moves, dv_moves, da_moves)
    condition = {name: float(t.max()) for name, t in zip(names, moves, strict=True)}
    squares = {"dq": dq_rounds, "dk": dk_rounds, "dsinks": da_rounds}
    rounded = {name: math.sqrt(t.max()) for name, t in squares.items()}
    got = [torch.from_numpy(t) for t in (out, dq, dk, dv, da)]
    kept = got if sinks is not None else got[:4]
    return Result(*kept, condition=condition, rounded=rounded)


def plain(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, *, window: int | None = None,
          segments: Tensor | None = None, scale: float | None = None,
          softcap: float | None = None, sinks: Tensor | None = None,
          right: int | None = 0) -> Result:
    """Return the result of plain PyTorch in the inputs' dtype."""
    q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
    (Tq, H, D), (Tk, Hkv) = q.shape[1:], k.shape[1:3]
    k_all, v_all = (t.repeat_interleave(H // Hkv, dim=2) for t in (k, v))
    i, j = torch.arange(Tq, device=q.device)[:, None], torch.arange(Tk, device=q.device)
    seen = visible(i, j, Tk - Tq, window, right=right).expand(q.shape[0], Tq, Tk)
    if segments is not None:
        seg_i = segments[:, (i.flatten() + Tk - Tq).clamp(min=0)]
        seen = seen & (seg_i[:, :, None] == segments[:, None, :]) & (i + Tk - Tq >= 0)
    seen = seen[:, None]  # (B, 1, Tq, Tk)
    # q times a power of two is exact, and q . k stays as far from overflow as the scores are.
    rest, power = math.frexp(scale or 1 / math.sqrt(D))
    scores = torch.einsum("bihd,bjhd->bhij", q * 2.0**power, k_all) * rest
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, torch.finfo(q.dtype).min)
    leaves = [q, k, v]
    if sinks is not None:
        leaves.append(sinks.detach().requires_grad_())
        column = leaves[3].to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :Tk] * seen
    out = torch.einsum("bhij,bjhd->bihd", probs, v_all)
    return Result(out.detach(), *torch.autograd.grad(out, leaves, dout))


# There exp2 and the reciprocal are approximations, and sums of parts end in any order.
ON_A_GPU = 1.5


def check(got: Result, plain: Result, truth: Result, dtype: torch.dtype, factor: float = 1) -> None:
    """Check a result: all values must be finite, and for each tensor of `got`

        max|got - truth| <= m * max|plain - truth| + eps(dtype) * max|truth|
                            + eps(compute) * condition
                            + eps(dtype) * rounded, in half precision

    with m = 2 for the output and 3 for gradients: attention.probing.allowed_error(). The condition
    matters where plain PyTorch is exact by luck, as P with one visible key. In float64 the truth
    has a rounding error and a condition of its own.

    Args:
        factor: scales the tolerance; below 1 it shows the margin.

    Raises:
        AssertionError: names the tensor, its largest error, the position, and the tolerance.
    """
    for name, g in got.tensors.items():
        m, p, t = 2 if name == "out" else 3, plain.tensors[name], truth.tensors[name]
        require(g.dtype == p.dtype, f"{name} is {g.dtype}, not {p.dtype}")
        require(g.shape == t.shape, f"{name} has shape {tuple(g.shape)}, not {tuple(t.shape)}")
        on_gpu, g_dtype = g.is_cuda, g.dtype
        g, p = g.detach().cpu().double(), p.detach().cpu().double()
        require(p.isfinite().all(), f"{name} of plain PyTorch is not finite")
        require(g.isfinite().all(), f"{name} is not finite")
        usual, size = float((p - t).abs().max()), float(t.abs().max())
        rounded = max(dtype, g_dtype, key=lambda d: torch.finfo(d).eps)  # sinks have their own
        allowed = factor * allowed_error(usual, size, truth.condition[name] / 32, rounded, m)
        if dtype in (torch.float16, torch.bfloat16):
            allowed += factor * torch.finfo(dtype).eps * truth.rounded.get(name, 0.0)
        if dtype == torch.float64:
            allowed += factor * allowed_error(0.0, size, truth.condition[name] / 32, dtype)
        allowed *= ON_A_GPU if on_gpu else 1
        error = (g - t).abs()
        if not float(error.max()) <= allowed:
            at = tuple(int(n) for n in torch.unravel_index(error.argmax(), error.shape))
            raise AssertionError(
                f"{name} is off by {float(error[at]):.3g} at {list(at)}: {float(g[at]):.6g}, the "
                f"truth is {float(t[at]):.6g}; allowed is {allowed:.3g}"
            )


def require(ok: bool | Tensor, text: str) -> None:
    """Assert, also under `python -O`."""
    if not ok:
        raise AssertionError(text)


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Assert |got - want| <= tolerance * (1 + |want|)."""
    got, want = got.detach().double(), want.detach().double()
    off = (got - want).abs() - tolerance * want.abs()
    require((off <= tolerance).all(), f"{what} is off by up to {float(off.max()):.3g}")
