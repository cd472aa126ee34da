"""The truth in float64, the one tolerance of this project, and probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from .caps import check_call, must_be
from .machine.system import autocast_off
from .masks import Mods
from .spec import DTYPES, Spec, alibi_bias, visible

ON_A_GPU = 1.5  # exp2 is approximate


class Inputs(NamedTuple):
    q: Tensor  # (B, Tq, H, D)
    k: Tensor  # (B, Tk, Hkv, D)
    v: Tensor  # (B, Tk, Hkv, D)
    dout: Tensor  # (B, Tq, H, D)
    segments: Tensor | None = None
    sinks: Tensor | None = None  # (H,)
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in self._asdict().items() if t is not None}

    @property
    def options(self) -> dict[str, Tensor]:
        names = "segments", "sinks", "alibi_slopes"
        return {name: t for name, t in self.tensors.items() if name in names}


@dataclass(frozen=True)
class Result:
    """Output and gradients, shaped as q, q, k, v and sinks."""

    out: Tensor
    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dsinks: Tensor | None = None
    condition: dict[str, Tensor] = field(default_factory=dict, kw_only=True)  # of truth()
    rounded: dict[str, Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}


def grouped(t: Tensor, Hkv: int) -> Tensor:
    """(B, T, H, D) -> (B, Hkv, H / Hkv * T, D)."""
    return t.transpose(1, 2).unflatten(1, (Hkv, -1)).flatten(2, 3)


def changed(raw: Tensor, given: Inputs, spec: Spec, rows: Tensor,
            mods: Mods | None = None) -> tuple[Tensor, Tensor | float, Tensor]:
    """Scores after softcap and score_mod, ALiBi's bias, and visible() or mask_mod as bool, from tau
    q . k of grouped() queries: (B, Hkv, H / Hkv * rows, Tk)."""
    (B, Tq, H, _), (_, Tk, Hkv, _) = given.q.shape, given.k.shape
    s = raw
    bias: Tensor | float = 0.0
    at, j = rows + Tk - Tq, torch.arange(Tk, device=rows.device)  # among the keys
    if spec.softcap is not None:
        s = spec.softcap * torch.tanh(s / spec.softcap)
    if given.alibi_slopes is not None:
        slopes = given.alibi_slopes.to(raw.device, torch.promote_types(raw.dtype, torch.float32))
        slopes = slopes.reshape(-1, Hkv, H // Hkv, 1, 1)
        bias = alibi_bias(slopes, at[:, None], j).flatten(2, 3).to(raw.dtype)
    if mods is not None:
        seen = mods.seen(B, H, at, Tk)
        return mods.scored(s, H, at), bias, seen.unflatten(1, (Hkv, -1)).flatten(2, 3)
    seen = visible(at[:, None], j, 0, spec.window, right=spec.right)[None]
    if given.segments is not None:
        segments = given.segments.to(rows.device)
        own = segments[:, at.clamp(min=0)]
        seen = seen & (own[:, :, None] == segments[:, None]) & (at[:, None] >= 0)
    return s, bias, seen[:, None].repeat(1, 1, H // Hkv, 1)


@torch.no_grad()
def truth(given: Inputs, spec: Spec, rows: Tensor | None = None,
          mods: Mods | None = None) -> Result:
    """The exact result in float64 for the queries `rows`, in O(rows * Tk). With tau the scale,
    t_j = tau q . k_j, s_j = c tanh(t_j / c) or t_j, and p = softmax(s + bias) over the visible keys
    j and the sink a (of value 0), per row:

        out  = sum_j p_j v_j
        dv_j += p_j dout                          out is linear in v
        dp_j  = dout . v_j                        0 for the sink
        ds_j  = p_j (dp_j - sum_l p_l dp_l)       the Jacobian of softmax: diag(p) - p p^T
        da   += -p_a sum_l p_l dp_l
        dt_j  = tau ds_j (1 - (s_j / c)^2)        of q . k_j; tanh' = 1 - tanh^2
        dq    = sum_j dt_j k_j
        dk_j += dt_j q

    `condition` is each tensor's rounding error to first order, in eps. `rounded`: the change of
    gradients if sum_l p_l dp_l is dout . out of a rounded output, as in FlashAttention."""
    on = torch.device("cpu") if given.q.device.type == "mps" else given.q.device
    Tq, H, Hkv = given.q.shape[1], spec.n_head, spec.n_kv_head
    rows = torch.arange(Tq, device=on) if rows is None else rows.to(on)
    tau, c = spec.softmax_scale, spec.softcap
    Q, dO = (grouped(t.to(on)[:, rows].double(), Hkv) for t in (given.q, given.dout))
    K, V = (t.to(on).double().transpose(1, 2) for t in (given.k, given.v))  # (B, Hkv, Tk, D)
    with torch.enable_grad():
        raw = (Q @ K.mT * tau).requires_grad_()  # (B, Hkv, M, Tk), for M = H / Hkv * rows
        s, bias, seen = changed(raw, given, spec, rows, mods)
        slope = torch.autograd.grad(s.sum() + 0 * raw.sum(), raw)[0]
    # Unseen keys may be NaN.
    s, slope = s.detach().masked_fill(~seen, 0), slope.masked_fill(~seen, 0)
    used = seen.any(2)[..., None]
    K, V = torch.where(used, K, 0), torch.where(used, V, 0)
    sink = torch.full((H,), -torch.inf, dtype=torch.float64, device=on)
    if given.sinks is not None:
        sink = given.sinks.detach().to(on).double()
    sink = sink.view(1, Hkv, -1, 1).expand(-1, -1, -1, len(rows)).flatten(2)[..., None]

    visible_s = (s + bias).masked_fill(~seen, -torch.inf)
    row_max = torch.maximum(visible_s.amax(3, keepdim=True), sink).clamp(min=-1e300)
    e, e_sink = torch.exp(visible_s - row_max), torch.exp(sink - row_max)
    total = e.sum(3, keepdim=True) + e_sink
    total = total.masked_fill(total == 0, 1)  # fully masked
    p, p_sink = e / total, e_sink / total
    out = p @ V
    dp = dO @ V.mT
    mean_dp = (p * dp).sum(3, keepdim=True)
    ds = p * (dp - mean_dp)

    def of_queries(t: Tensor) -> Tensor:  # (B, Hkv, M, D) -> (B, rows, H, D)
        return t.unflatten(2, (-1, len(rows))).flatten(1, 2).transpose(1, 2)

    def gradients(dt: Tensor, p: Tensor, da: Tensor, Q: Tensor, K: Tensor,
                  dO: Tensor) -> dict[str, Tensor]:
        by_head = da.unflatten(2, (-1, len(rows)))  # (B, Hkv, H / Hkv, rows, 1)
        return {"dq": of_queries(dt @ K), "dk": (dt.mT @ Q).transpose(1, 2),
                "dv": (p.mT @ dO).transpose(1, 2), "dsinks": by_head.sum((0, 3, 4)).flatten()}

    exact = gradients(tau * ds * slope, p, -p_sink * mean_dp, Q, K, dO)
    if given.sinks is None:
        del exact["dsinks"]

    s_moves = Q.abs() @ K.abs().mT * tau * slope.abs()
    if c is not None or mods is not None:
        s_moves += s.abs()
    rel = s_moves.masked_fill(~seen, 0).amax(3, keepdim=True)  # of any p
    if given.sinks is not None:
        rel = torch.maximum(rel, torch.where(p_sink > 0, sink.abs(), 0))
    rel = rel + (p * bias**2).sum(3, keepdim=True).sqrt()
    deviation = (p @ V**2 - out**2).clamp(min=0).sqrt()  # of v under p
    p_moves = 2 * rel * p
    dp_moves = dO.abs() @ V.abs().mT
    mean_moves = (p * dp_moves).sum(3, keepdim=True)
    ds_moves = p_moves * (dp - mean_dp).abs() + p * (dp_moves + mean_moves)
    dt_moves = ds_moves * slope
    if c is not None:
        dt_moves += ds.abs() * (1 + 2 * s.abs() * s_moves / c**2)
    da_moves = p_sink * (2 * rel * mean_dp.abs() + mean_moves)
    condition = gradients(tau * dt_moves, p_moves, da_moves, Q.abs(), K.abs(), dO.abs())
    condition["out"] = of_queries(rel * deviation)

    delta = (out * dO).square().sum(3, keepdim=True).sqrt()  # its errors add up
    dt, da = tau * p * slope * delta, p_sink * delta
    squares = gradients(dt**2, p, da**2, Q**2, K, dO)  # the rows' errors are independent
    rounded = {"dq": gradients(dt, p, da, Q, K, dO)["dq"].abs(),
               "dk": squares["dk"].sqrt(), "dsinks": squares["dsinks"].sqrt()}
    return Result(of_queries(out), **exact, condition=condition, rounded=rounded)


@torch.enable_grad()
def plain(given: Inputs, spec: Spec, rows: Tensor | None = None,
          mods: Mods | None = None) -> Result:
    """truth() in the inputs' dtype, by autograd."""
    Tk, H, Hkv, dtype = given.k.shape[1], spec.n_head, spec.n_kv_head, given.q.dtype
    rows = torch.arange(given.q.shape[1], device=given.q.device) if rows is None else rows
    q, k, v = (t.detach().requires_grad_() for t in (given.q[:, rows], given.k, given.v))
    wide = torch.float32 if dtype == torch.float16 else dtype  # scores may exceed 65,504
    raw = grouped(q, Hkv).to(wide) * spec.softmax_scale @ k.to(wide).permute(0, 2, 3, 1)
    scores, bias, seen = changed(raw, given, spec, rows, mods)
    scores = (scores + bias).masked_fill(~seen, torch.finfo(wide).min)
    leaves = [q, k, v]
    if given.sinks is not None:
        leaves.append(given.sinks.detach().requires_grad_())
        column = leaves[3].to(wide).view(1, Hkv, -1, 1).expand(len(q), -1, -1, len(rows))
        scores = torch.cat([scores, column.flatten(2)[..., None]], dim=-1)
    probs = (torch.softmax(scores, dim=-1)[..., :Tk] * seen).to(dtype)
    out = probs @ v.transpose(1, 2)
    out = out.unflatten(2, (H // Hkv, len(rows))).flatten(1, 2).transpose(1, 2)
    return Result(out.detach(), *torch.autograd.grad(out, leaves, given.dout[:, rows]))


# --- the tolerance ---


def allowed_error(plain: float, size: float, largest: float, dtype: torch.dtype,
                  m: int = 2) -> float:
    """m * plain (which may be 0 by luck), one rounding error at `size` and 32 at `largest`."""
    eps = torch.finfo(dtype).eps
    return m * plain + eps * size + 32 * min(eps, torch.finfo(torch.float32).eps) * largest


class Deviation(NamedTuple):
    name: str
    where: str  # " at [0, 3, 1, 7]", or " in the mean"
    off: float
    allowed: float
    size: float  # of the truth

    def __str__(self) -> str:
        return f"{self.name} is off by {self.off:.3g}{self.where}, {self.allowed:.2g} is allowed"


def errors(got: Result, rough: Result, exact: Result, dtype: torch.dtype) -> list[Deviation]:
    """Largest and root mean square error of each tensor of `got`, with their limits

        m * |plain - truth| + eps(dtype) * |truth| + eps(compute) * condition
        + eps(dtype) * rounded, in half precision

    with m = 2 for the output and 3 for gradients. The mean finds errors of a few percent."""
    found = []
    for name, tensor in got.tensors.items():
        want, g, p = (x.cpu().double() for x in (exact.tensors[name], tensor, rough.tensors[name]))
        if g.shape != want.shape:
            raise AssertionError(f"{name} has shape {tuple(g.shape)}, not {tuple(want.shape)}")
        # Sinks have their own dtype.
        rounded_to = max(dtype, tensor.dtype, key=lambda d: torch.finfo(d).eps)
        sizes: dict[str, Callable[[Tensor], float]] = {
            f" at {list(worst(g, want))}": lambda x: float(x.abs().max()),
            " in the mean": lambda x: float(x.square().mean() ** 0.5),
        }
        for where, size in sizes.items():
            condition = size(exact.condition[name].cpu()) / 32
            m = 2 if name == "out" else 3
            allowed = allowed_error(size(p - want), size(want), condition, rounded_to, m)
            if dtype == torch.float64:
                allowed += allowed_error(0.0, size(want), condition, dtype)
            elif dtype != torch.float32 and name in exact.rounded:
                allowed += torch.finfo(dtype).eps * size(exact.rounded[name].cpu())
            allowed *= ON_A_GPU if tensor.is_cuda else 1
            found.append(Deviation(name, where, size(g - want), allowed, size(want)))
    return found


def worst(got: Tensor, want: Tensor) -> tuple[int, ...]:
    """Indices of the largest error."""
    at = (got - want).abs().nan_to_num(torch.inf).argmax()
    return tuple(int(n) for n in torch.unravel_index(at, got.shape))


def wrong(found: Sequence[Deviation]) -> list[str]:
    first = {d.name: d for d in reversed(found) if not d.off <= d.allowed}
    return [str(d) for d in reversed(first.values())]


# --- probabilities ---


def weights(q: Tensor, k: Tensor, spec: Spec, *, rows: Sequence[int] | Tensor | None = None,
            L: Tensor | None = None, segments: Tensor | None = None, sinks: Tensor | None = None,
            alibi_slopes: Tensor | None = None) -> Tensor:
    """Probabilities exp(S - L) (Dao et al. 2022, arXiv 2205.14135, section 3.1) of the queries
    `rows`, (B, H, rows, Tk) float32 (float64 for float64), without dropout; zeros in fully masked
    rows.

    rows: as in q[:, rows]; None: all. L: the log-sum-exp (B, H, Tq), sinks included, of
    flash_attn_func(..., return_attn_probs=True): then the result has no gradient. Raises
    ValueError: tensors contradict the Spec; IndexError: no such row."""
    (B, Tq, H, _), (Tk, Hkv) = q.shape, k.shape[1:3]
    check_call(q, k, k, spec, segments, None, sinks, alibi_slopes)
    if L is not None:
        must_be("L", L, (B, H, Tq), q.device, DTYPES)
    at = torch.arange(Tq)
    if rows is not None:
        chosen = torch.as_tensor(rows, device="cpu")
        mask = chosen.dtype == torch.bool
        at = at[chosen if mask or (chosen.is_floating_point() and len(chosen)) else chosen.long()]
    if at.dim() != 1:
        raise ValueError(f"rows must be a list of indices or a mask, got {rows}")
    at, acc = at.to(q.device), torch.promote_types(q.dtype, torch.float32)
    with autocast_off(q):
        raw = grouped(q[:, at].to(acc), Hkv) * spec.softmax_scale @ k.to(acc).permute(0, 2, 3, 1)
    given = Inputs(q, k, k, q, segments if Tk else None, alibi_slopes=alibi_slopes)
    scores, bias, seen = changed(raw, given, spec, at)
    S = (scores + bias).masked_fill(~seen, -torch.inf).view(B, H, len(at), Tk)
    if L is None:
        L_i = S.logsumexp(dim=-1)
        if sinks is not None:
            L_i = torch.logaddexp(L_i, sinks.to(acc)[:, None])
    else:
        S, L_i = S.detach(), L.detach()[:, :, at].to(acc)
    # Both are -inf in fully masked rows.
    return torch.exp(S - L_i.masked_fill(L_i.isneginf(), 0)[..., None])
