"""Proof that a kernel is right: the truth in float64, the allowed error, and the probe.

truth()   the contract (spec.py) with gradients derived by hand; of some queries: O(rows * Tk)
plain()   the same by plain PyTorch in the inputs' dtype, whose error is the measure
errors()  the errors of a result and their limits: the one tolerance of this project
probe()   one short run of a backend before anything depends on it
probe_long()  one run at a call's own length

`select` (choice), `check` and the bench use these. No backend is called to compute a truth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .caps import Backend, DeviceLost, shape_of
from .function import whole
from .machine.system import KERNEL_ERRORS, first_line, loses_device, profiled, settings_stay
from .masks import filled_cache
from .ring import Ring
from .spec import Spec, alibi_bias, visible

SHORT = 64  # tokens in probe()
LONG = 256  # a longer call is probed at its own length too
ROWS = 32  # queries of it that are compared
# Factor of the queries in a second run. Some of its scores are beyond 88, where exp() overflows in
# float32, and some kernels fail (NVIDIA/TransformerEngine issue 3216).
LARGE = 32
# On a GPU exp2 and the reciprocal are approximations, and sums of parts end in any order.
ON_A_GPU = 1.5


class Inputs(NamedTuple):
    """The tensors of one call."""

    q: Tensor  # (B, Tq, H, D)
    k: Tensor  # (B, Tk, Hkv, D)
    v: Tensor  # (B, Tk, Hkv, D)
    dout: Tensor  # (B, Tq, H, D)
    segments: Tensor | None = None  # (B, Tk); the queries are the last Tq positions
    sinks: Tensor | None = None  # (H,)
    alibi_slopes: Tensor | None = None  # (H,) or (B, H)

    @property
    def options(self) -> dict[str, Tensor]:
        """attend()'s keyword arguments."""
        names = "segments", "sinks", "alibi_slopes"
        found = {name: getattr(self, name) for name in names}
        return {name: t for name, t in found.items() if t is not None}


@dataclass(frozen=True)
class Result:
    """Output and gradients of one call; `condition` and `rounded` as truth() gives them."""

    out: Tensor  # (B, Tq, H, D)
    dq: Tensor | None = None  # (B, Tq, H, D)
    dk: Tensor | None = None  # (B, Tk, Hkv, D)
    dv: Tensor | None = None  # (B, Tk, Hkv, D)
    dsinks: Tensor | None = None  # (H,)
    condition: dict[str, Tensor] = field(default_factory=dict, kw_only=True)
    rounded: dict[str, Tensor] = field(default_factory=dict, kw_only=True)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The output and those gradients that are there, by name."""
        found = {name: getattr(self, name) for name in ("out", "dq", "dk", "dv", "dsinks")}
        return {name: t for name, t in found.items() if t is not None}


def grouped(t: Tensor, Hkv: int) -> Tensor:
    """(B, T, H, D) -> (B, Hkv, H / Hkv * T, D): the query heads of a key/value head are rows."""
    return t.transpose(1, 2).unflatten(1, (Hkv, -1)).flatten(2, 3)


def seen_by(given: Inputs, spec: Spec, rows: Tensor) -> Tensor:
    """visible() as bool (B or 1, 1, H / Hkv * rows, Tk), for grouped() queries. With segments a
    query before all keys belongs to none."""
    Tk, on = given.k.shape[1], rows.device
    offset, j = Tk - given.q.shape[1], torch.arange(given.k.shape[1], device=on)
    seen = visible(rows[:, None], j, offset, spec.window, right=spec.right)[None]
    if given.segments is not None:
        segments = given.segments.to(on)
        own = segments[:, (rows + offset).clamp(min=0)]
        seen = seen & (own[:, :, None] == segments[:, None]) & (rows[:, None] + offset >= 0)
    return seen[:, None].repeat(1, 1, spec.n_head // spec.n_kv_head, 1)


def bias_of(given: Inputs, spec: Spec, rows: Tensor, dtype: torch.dtype) -> Tensor | float:
    """alibi_bias() as (B or 1, Hkv, H / Hkv * rows, Tk), for grouped() queries, or 0."""
    if given.alibi_slopes is None:
        return 0.0
    Tq, Tk, Hkv = given.q.shape[1], given.k.shape[1], spec.n_kv_head
    slopes = given.alibi_slopes.to(rows.device, dtype)
    slopes = slopes.reshape(-1, Hkv, spec.n_head // Hkv, 1, 1)
    j = torch.arange(Tk, device=rows.device)
    return alibi_bias(slopes, rows[:, None], j, Tk - Tq).flatten(2, 3)


@torch.no_grad()
def truth(given: Inputs, spec: Spec, rows: Tensor | None = None) -> Result:
    """The exact result in float64, of the queries `rows` and of the gradients that flow from them.

    Per row, with the scale tau, t_j = tau q . k_j, s_j = c tanh(t_j / c) with a softcap c, else
    t_j, and p = softmax(s + bias) over the visible keys j and the sink a (of value 0), where the
    bias is ALiBi's:

        out  = sum_j p_j v_j
        dv_j += p_j dout                          out is linear in v
        dp_j  = dout . v_j                        0 for the sink
        ds_j  = p_j (dp_j - sum_l p_l dp_l)       the Jacobian of softmax: diag(p) - p p^T
        da   += -p_a sum_l p_l dp_l
        dt_j  = ds_j (1 - (s_j / c)^2)            tanh' = 1 - tanh^2
        dq    = tau sum_j dt_j k_j
        dk_j += tau dt_j q

    `condition` holds for each tensor the rounding error to first order, in units of eps: (a) of
    each score s_j relative to its terms |q||k|, of a capped score and a sink relative to
    themselves, and of ALiBi's bias by its root mean square under p: a relative error of p_j, which
    moves out by it times the deviation of v under p, and is doubled in the backward pass; (b) of dp
    and sum p dp relative to their terms, even if the difference is zero (a row with one visible
    key); (c) of 1 - (s / c)^2, from the error of s.

    `rounded` holds how far the gradients move, in units of eps, if sum_l p_l dp_l is computed as
    dout . out from an output that was rounded, as FlashAttention does; plain PyTorch does not.
    """
    on = torch.device("cpu") if given.q.device.type == "mps" else given.q.device
    Tq, H, Hkv = given.q.shape[1], spec.n_head, spec.n_kv_head
    rows = torch.arange(Tq, device=on) if rows is None else rows.to(on)
    tau, c = spec.softmax_scale, spec.softcap
    Q, dO = (grouped(t.to(on)[:, rows].double(), Hkv) for t in (given.q, given.dout))
    K, V = (t.to(on).double().transpose(1, 2) for t in (given.k, given.v))  # (B, Hkv, Tk, D)
    seen = seen_by(given, spec, rows)  # (B or 1, 1, M, Tk), for M = H / Hkv * rows
    used = seen.any(2)[..., None]  # what no row sees may be NaN
    K, V = torch.where(used, K, 0), torch.where(used, V, 0)
    sink = torch.full((H,), -torch.inf, dtype=torch.float64, device=on)
    if given.sinks is not None:
        sink = given.sinks.detach().to(on).double()
    sink = sink.view(1, Hkv, -1, 1).expand(-1, -1, -1, len(rows)).flatten(2)[..., None]

    s = Q @ K.mT * tau  # (B, Hkv, M, Tk), as are slope, p, dp, ds and dt
    slope = torch.ones_like(s)
    if c is not None:
        s = c * torch.tanh(s / c)
        slope = 1 - (s / c) ** 2
    bias = bias_of(given, spec, rows, torch.float64)
    visible_s = (s + bias).masked_fill(~seen, -torch.inf)
    row_max = torch.maximum(visible_s.amax(3, keepdim=True), sink).clamp(min=-1e300)
    e, e_sink = torch.exp(visible_s - row_max), torch.exp(sink - row_max)
    total = e.sum(3, keepdim=True) + e_sink
    total = total.masked_fill(total == 0, 1)  # a row that sees no key
    p, p_sink = e / total, e_sink / total
    out = p @ V
    dp = dO @ V.mT
    mean_dp = (p * dp).sum(3, keepdim=True)
    ds = p * (dp - mean_dp)
    dt = ds * slope

    s_moves = Q.abs() @ K.abs().mT * tau * slope
    if c is not None:
        s_moves += s.abs()
    rel = s_moves.masked_fill(~seen, 0).amax(3, keepdim=True)  # of any p
    if given.sinks is not None:
        rel = torch.maximum(rel, torch.where(p_sink > 0, sink.abs(), 0))
    rel = rel + (p * bias**2).sum(3, keepdim=True).sqrt()
    deviation = (p @ V**2 - out**2).clamp(min=0).sqrt()  # of v under p, the sink's value is 0
    p_moves = 2 * rel * p
    dp_moves = dO.abs() @ V.abs().mT
    mean_moves = (p * dp_moves).sum(3, keepdim=True)
    ds_moves = p_moves * (dp - mean_dp).abs() + p * (dp_moves + mean_moves)
    dt_moves = ds_moves * slope
    if c is not None:
        dt_moves += ds.abs() * (1 + 2 * s.abs() * s_moves / c**2)
    da_moves = p_sink * (2 * rel * mean_dp.abs() + mean_moves)
    delta = (out * dO).square().sum(3, keepdim=True).sqrt()  # its errors add up
    dt_round = p * slope * delta * tau

    def by_head(t: Tensor) -> Tensor:  # (B, Hkv, M, 1) -> (H,)
        return t.unflatten(2, (-1, len(rows))).sum((0, 3, 4)).flatten()

    def of_queries(t: Tensor) -> Tensor:  # (B, Hkv, M, D) -> (B, rows, H, D)
        return t.unflatten(2, (-1, len(rows))).flatten(1, 2).transpose(1, 2)

    def of_keys(t: Tensor) -> Tensor:  # (B, Hkv, Tk, D) -> (B, Tk, Hkv, D)
        return t.transpose(1, 2)

    condition = {
        "out": of_queries(rel * deviation), "dq": of_queries(dt_moves @ K.abs() * tau),
        "dk": of_keys(dt_moves.mT @ Q.abs() * tau), "dv": of_keys(p_moves.mT @ dO.abs()),
        "dsinks": by_head(da_moves),
    }
    rounded = {
        "dq": of_queries((dt_round @ K).abs()),
        "dk": of_keys((dt_round.square().mT @ Q.square()).sqrt()),
        "dsinks": by_head((p_sink * delta).square()).sqrt(),
    }
    dsinks = None if given.sinks is None else by_head(-p_sink * mean_dp)
    return Result(
        of_queries(out), of_queries(dt @ K * tau), of_keys(dt.mT @ Q * tau), of_keys(p.mT @ dO),
        dsinks, condition=condition, rounded=rounded,
    )


@torch.enable_grad()
def plain(given: Inputs, spec: Spec, rows: Tensor | None = None) -> Result:
    """truth() by plain PyTorch in the inputs' dtype, with autograd's gradients."""
    Tk, H, Hkv, dtype = given.k.shape[1], spec.n_head, spec.n_kv_head, given.q.dtype
    rows = torch.arange(given.q.shape[1], device=given.q.device) if rows is None else rows
    q, k, v = (t.detach().requires_grad_() for t in (given.q[:, rows], given.k, given.v))
    wide = torch.float32 if dtype == torch.float16 else dtype  # scores may be past 65,504
    Q, K = grouped(q, Hkv).to(wide), k.to(wide).permute(0, 2, 3, 1)
    scores = Q * spec.softmax_scale @ K  # (B, Hkv, M, Tk)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    bias = bias_of(given, spec, rows, torch.promote_types(wide, torch.float32))
    scores = scores + (bias.to(wide) if isinstance(bias, Tensor) else bias)
    seen = seen_by(given, spec, rows)
    scores = scores.masked_fill(~seen, torch.finfo(wide).min)
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


def allowed_error(
    plain: float, size: float, largest: float, dtype: torch.dtype, m: int = 2
) -> float:
    """The largest allowed error: m times the error of plain PyTorch, plus one rounding error at
    this size, plus 32 at the largest value in the precision of the sums (float32 for half
    precision), since plain PyTorch may be exact by luck.

    Args:
        size: of the true values.
        largest: the largest true value; for large scores times their scale.
    """
    eps = torch.finfo(dtype).eps
    return m * plain + eps * size + 32 * min(eps, torch.finfo(torch.float32).eps) * largest


class Deviation(NamedTuple):
    """The error of one tensor, its largest or its root mean square."""

    name: str
    where: str  # " at [0, 3, 1, 7]", or " in the mean"
    off: float
    allowed: float
    size: float  # of the truth

    def __str__(self) -> str:
        return f"{self.name} is off by {self.off:.3g}{self.where}, {self.allowed:.2g} is allowed"


def errors(got: Result, rough: Result, exact: Result, dtype: torch.dtype) -> list[Deviation]:
    """The largest error of each tensor of `got` and the root mean square, with their limits

        m * |plain - truth| + eps(dtype) * |truth| + eps(compute) * condition
        + eps(dtype) * rounded, in half precision

    with m = 2 for the output and 3 for gradients. The mean finds an error of a few percent, which
    the large values of rows with few visible keys would hide. The condition matters where plain
    PyTorch is exact by luck, as P with one visible key. In float64 the truth is rounded, too.
    """
    sizes: dict[str, Callable[[Tensor], float]] = {
        "": lambda x: float(x.abs().max()),
        " in the mean": lambda x: float(x.square().mean() ** 0.5),
    }
    found = []
    for name, tensor in got.tensors.items():
        want = exact.tensors[name].cpu()
        g, p = tensor.detach().cpu().double(), rough.tensors[name].cpu().double()
        if g.shape != want.shape:
            raise AssertionError(f"{name} has shape {tuple(g.shape)}, not {tuple(want.shape)}")
        # Sinks have a dtype of their own.
        rounded_to = max(dtype, tensor.dtype, key=lambda d: torch.finfo(d).eps)
        m, error = 2 if name == "out" else 3, (g - want).abs()
        for where, size in sizes.items():
            condition = size(exact.condition[name].cpu()) / 32
            allowed = allowed_error(size(p - want), size(want), condition, rounded_to, m)
            if dtype == torch.float64:
                allowed += allowed_error(0.0, size(want), condition, dtype)
            elif dtype != torch.float32 and name in exact.rounded:
                allowed += torch.finfo(dtype).eps * size(exact.rounded[name].cpu())
            allowed *= ON_A_GPU if tensor.is_cuda else 1
            if not where:
                at = torch.unravel_index(error.nan_to_num(torch.inf).argmax(), error.shape)
                where = f" at {[int(n) for n in at]}"
            found.append(Deviation(name, where, size(g - want), allowed, size(want)))
    return found


def wrong(found: Sequence[Deviation]) -> list[str]:
    """A text for each tensor that is off by more than is allowed; NaN is."""
    first = {d.name: d for d in reversed(found) if not d.off <= d.allowed}
    return [str(d) for d in reversed(first.values())]


# --- one call ---


def run(attend: Callable[..., Tensor], given: Inputs, spec: Spec,
        wrt: Sequence[str] = ("q", "k", "v", "sinks"), times: int = 1) -> Result:
    """The output, and with spec.grad the gradients of the inputs that `wrt` names, those of the
    last of so many backward passes."""
    leaves = {
        name: getattr(given, name).detach().requires_grad_()
        for name in wrt if getattr(given, name) is not None
    }
    given = given._replace(**leaves)
    with torch.set_grad_enabled(spec.grad):
        out = attend(given.q, given.k, given.v, spec, **given.options)
    must_be_like(out, given.q)
    if out.requires_grad != spec.grad:
        raise AssertionError(f"out.requires_grad is {out.requires_grad}")
    grads: Sequence[Tensor] = ()
    for _ in range(times if spec.grad else 0):
        grads = torch.autograd.grad(out, [*leaves.values()], given.dout, retain_graph=times > 1)
    found = dict(zip(leaves, grads))
    return Result(out.detach(), *map(found.get, ("q", "k", "v", "sinks")))


@torch.no_grad()
def run_cached(attend: Callable[..., Tensor], given: Inputs, spec: Spec) -> Result:
    """The output through a cache: two chunks, then single tokens; rows of two lengths. If the Spec
    has none, each row's chunk is a call with the keys up to its end."""
    q, T, out = given.q, given.q.shape[1], torch.empty_like(given.q)
    k, v, view = filled_cache(given.k, given.v, spec)
    lengths = [0, 0]
    for counts in ((T // 2, T // 3), (T - T // 2 - 3, T - T // 3 - 2), (1, 1), (1, 1), (1, 0)):
        before, lengths = lengths, [n + m for n, m in zip(lengths, counts)]
        spans = [slice(n, m) for n, m in zip(before, lengths)]
        if spec.cache == "none":
            for b, at in enumerate(spans):
                if at.start < at.stop:
                    row = slice(b, b + 1)
                    part = q[row, at], k[row, : at.stop], v[row, : at.stop]
                    own = {n: t[row] if t.dim() > 1 else t for n, t in given.options.items()}
                    out[b, at] = attend(*part, spec, **own)[0]
            continue
        padded = pad_sequence([q[b, at] for b, at in enumerate(spans)], True)
        got = attend(padded, k, v, spec, cache=view(before, counts), **given.options)
        must_be_like(got, padded)
        for b, at in enumerate(spans):
            out[b, at] = got[b, : counts[b]]
    return Result(out)


def must_be_like(out: object, q: Tensor) -> None:
    if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
        raise TypeError(f"it returned {shape_of(out)}, not {shape_of(q)}")


def leakage(run: Callable[..., Result], given: Inputs, spec: Spec, ahead: int | None) -> float:
    """The largest change of outputs that do not see the last token, which is more than `ahead`
    after them, when its q, k and v change."""
    if ahead is None:
        return 0.0
    q, k, v = (torch.cat((t[:, :-1], 3 - t[:, -1:]), dim=1) for t in given[:3])
    quiet = replace(spec, grad=False)
    moved = 0.0
    for _ in range(3):  # a library may round differently once, under load
        before, after = (run(x, quiet).out for x in (given, given._replace(q=q, k=k, v=v)))
        moved = float((after.double() - before.double())[:, : -1 - ahead].abs().max())
        if moved == 0:
            break
    return moved


# --- the probe ---

# Profiler name of an attention operator -> usual name of the kernel.
KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_cudnn_attention_forward": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math (MPS)",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "torch_attn::_varlen_attn": "flash (varlen)",
    "nanoattn::flash_forward": "flash (our Triton)",
    "nanoattn::paged_decode": "paged decode (Triton)",
}
PINNED = ("flash", "efficient", "cudnn", "math")  # the kernels that sdpa_* promise
# Namespaces without another library's attention kernels.
PLAIN = {"aten", "prims", "autograd", "c10d", "mkldnn", "inductor", "nanoattn"}


class Proof(TypedDict):
    """The errors of a probe, relative to the largest true value, and their limits."""

    error: float  # of the output, on ordinary scores
    allowed: float
    grad_error: float | None  # of the gradient closest to its limit
    grad_allowed: float | None
    canary: bool  # earlier outputs did not move when the last token changed


@dataclass(frozen=True)
class Probe:
    """The result of running a backend once."""

    why: tuple[str, ...] = ()  # why it cannot be used; empty if it can
    kernels: tuple[str, ...] = ()  # short names: "flash", "math"
    events: tuple[str, ...] = ()  # the profiler's own names, device kernels included
    proof: Proof | None = None  # None: no results

    @property
    def error(self) -> float | None:
        return self.proof["error"] if self.proof else None


def probe(backend: Backend, spec: Spec, device: str | torch.device, T: int = SHORT) -> Probe:
    """Run `backend` at batch 2 and length T, forward and, if `spec.grad`, backward: with the Spec's
    numbers on ordinary and on large scores, then with other numbers, since one plan serves all
    calls of a kind. The random state is restored.

    With a cache the queries come in chunks, then one by one. Inference also continues a prefix,
    with fewer queries than keys. A later token is changed to check that no earlier output moves.
    The profiler records which kernels ran.
    """
    device = torch.device(device)
    cached = spec.cache in ("static", "paged")
    spec = clipped(replace(spec, grad=spec.grad and not cached), T)
    way = partial(run_cached if cached else run, attend_of(backend, spec))
    shorter = T if spec.grad or cached or spec.lse else T // 3
    other = other_numbers(spec)
    draws = [(spec, T, 1.0), (spec, shorter, LARGE), *([(other, T, 1.0)] if other != spec else [])]
    draw, events, why = torch.Generator().manual_seed(0), list[str](), list[str]()
    ordinary: list[Deviation] = []
    leak = 0.0
    for case, Tq, size in draws:
        given, quiet = draw_inputs(case, device, (2, Tq, T), draw, size), replace(case, dropout=0.0)
        try:
            with survives(backend, device):
                got = way(given, quiet)
                if not ordinary:
                    with profiled(events):
                        again = way(given, case)
                    finite = all(bool(t.isfinite().all()) for t in again.tensors.values())
                    if spec.dropout and not finite:
                        raise FloatingPointError("not finite with dropout")
                    leak = leakage(way, given, quiet, 0 if cached else spec.right)
        except KERNEL_ERRORS as e:
            if isinstance(e, DeviceLost):
                raise
            return Probe((f"it failed in the probe ({type(e).__name__}: {first_line(e)})",))
        uncached = replace(quiet, cache="none", page_size=None)
        if cached and case.right != 0:
            rough, want = by_chunks(given, case)
        else:
            rough, want = plain(given, uncached), truth(given, uncached)
        found = errors(got, rough, want, given.q.dtype)
        ordinary = ordinary or found
        about = ", on large scores" * (size > 1) + f", with {case}" * (case != spec)
        why = why or [text + about for text in wrong(found)]
    if not why and leak != 0:
        why = [f"a later token moves earlier outputs, by up to {leak:.2g}"]
    largest = [d for d in ordinary if d.where.startswith(" at") and d.size]
    o = next(d for d in largest if d.name == "out")
    g = max((d for d in largest if d.name[0] == "d"), key=lambda d: d.off / d.allowed, default=None)
    proof: Proof = {
        "error": o.off / o.size,
        "allowed": o.allowed / o.size,
        "grad_error": g and g.off / g.size,
        "grad_allowed": g and g.allowed / g.size,
        "canary": leak == 0,
    }
    kernels = kernels_of(events)
    promised = backend.name[5:] if backend.name.startswith("sdpa_") else ""
    ran = {kernel.split()[0] for kernel in kernels}  # "flash (CPU)" is flash
    others = ran & {*PINNED} - {promised} if promised in PINNED else set()
    reasons = [f"it ran another kernel ({', '.join(sorted(others))})"] if others else []
    reasons = [f"its numbers are wrong ({'; '.join(why)})"] if why else reasons
    return Probe(tuple(reasons), kernels, tuple(events), proof)


def probe_long(
    backend: Backend, spec: Spec, device: str | torch.device, shape: tuple[int, int, int]
) -> tuple[str, ...]:
    """The errors in one call of this shape, (B, Tq, Tk), of one sequence and the query heads of
    one key/value head; empty if there are none. Compares at most ROWS queries, and the gradients
    that flow from them: the truth costs O(ROWS * Tk). A cache holds Tk tokens before its last Tq.
    """
    on, (_, Tq, Tk) = torch.device(device), shape
    cached = spec.cache in ("static", "paged")
    Tq = min(Tq, ROWS) if cached else Tq
    group = spec.n_head // spec.n_kv_head
    spec = replace(spec, n_head=group, n_kv_head=1, dropout=0.0, grad=spec.grad and not cached)
    given = draw_inputs(spec, on, (1, Tq, Tk), torch.Generator().manual_seed(0))
    rows = torch.linspace(0, Tq - 1, min(Tq, ROWS), device=on).round().long()
    chosen = torch.zeros(Tq, device=on, dtype=torch.bool)
    chosen[rows] = True
    given = given._replace(dout=given.dout * chosen[None, :, None, None])
    try:
        with survives(backend, on):
            if cached:
                k, v, view = filled_cache(given.k, given.v, spec)
                reads = view([Tk - Tq], [Tq])
                with torch.no_grad():
                    out = backend.compute(given.q, k, v, spec, cache=reads, **given.options)
                got = Result(out)
            else:
                got = run(whole(backend) if spec.lse else backend.compute, given, spec)
    except KERNEL_ERRORS as e:
        if isinstance(e, DeviceLost):
            raise
        return (f"it failed at {Tk:,} tokens ({type(e).__name__}: {first_line(e)})",)
    dq = None if got.dq is None else got.dq[:, rows]
    got = replace(got, out=got.out[:, rows], dq=dq)
    uncached = replace(spec, cache="none", page_size=None)
    found = errors(got, plain(given, uncached, rows), truth(given, uncached, rows), given.q.dtype)
    return tuple(f"at {Tk:,} tokens {text}" for text in wrong(found))


def attend_of(backend: Backend, spec: Spec) -> Callable[..., Tensor]:
    """What runs `spec`: attend(), or for the log-sum-exp the partial, in parts if causal."""
    if not spec.lse:
        return backend.compute
    return Ring().attend(backend) if spec.right == 0 else whole(backend)


def by_chunks(given: Inputs, spec: Spec) -> tuple[Result, Result]:
    """plain() and truth() of what run_cached() computes if the Spec is not causal: a chunk's
    queries see no key of a later chunk."""
    uncached = replace(spec, cache="none", page_size=None)

    def by(of: Callable[..., Result], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
           **options: Tensor) -> Tensor:
        return of(Inputs(q, k, v, q, **options), spec).out.to(q.dtype)

    exact = given._replace(q=given.q.double(), k=given.k.double(), v=given.v.double())
    wide = replace(uncached, dtype="float64")
    found = run_cached(partial(by, truth), exact, wide)
    rough = run_cached(partial(by, plain), given, uncached)
    return rough, replace(found, condition={"out": torch.zeros(1)})


@contextmanager
def survives(backend: Backend, device: torch.device) -> Iterator[None]:
    """Run a kernel with autograd, apart from the random state and PyTorch's settings.

    Raises:
        DeviceLost: the kernel has lost the GPU: everything that runs next would fail, and be
            blamed instead of it.
    """
    seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
    try:
        with seeds, torch.enable_grad(), settings_stay():
            yield
    except Exception as e:
        if isinstance(e, DeviceLost) or not loses_device(e):
            raise
        other = backend.fallback or "manual"
        raise DeviceLost(
            f"{backend.name} has crashed on the GPU ({first_line(e)}), which this process cannot "
            f"use any more; start again with another kernel: --attention_backend={other}"
        ) from e


def clipped(spec: Spec, T: int) -> Spec:
    """The Spec with sides that hide something in T tokens, whatever the call's are."""
    window = spec.window and min(spec.window, T // 2)
    right = spec.right and min(spec.right, T // 2)
    return replace(spec, window=window, right=right)


def other_numbers(spec: Spec) -> Spec:
    """A Spec of the same kind with another value of each number."""
    changes: dict[str, float] = {}
    for name in ("window", "right"):
        if side := getattr(spec, name):
            changes[name] = side + 1 if side < 5 else side // 2 + 2
    if spec.scale is not None:
        changes["scale"] = 0.75 * spec.scale
    if spec.softcap is not None:  # a large one hardly moves ordinary scores
        changes["softcap"] = 1.5 * spec.softcap if spec.softcap < 4 else 2.0
    return replace(spec, **changes)  # type: ignore[arg-type]


def draw_inputs(spec: Spec, device: torch.device, shape: tuple[int, int, int],
                draw: torch.Generator, size: float = 1.0) -> Inputs:
    """Random inputs for (B, Tq, Tk): q, k and v are slices of one tensor, as in a model; `size` is
    a factor of q. Two segments; ALiBi's slopes are (B, H) if `size` is not 1, else (H,)."""
    (B, Tq, Tk), dtype = shape, getattr(torch, spec.dtype)
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    qkv = torch.randn(B, max(Tq, Tk), (H + 2 * Hkv) * D, generator=draw, dtype=torch.float32)
    qkv[..., : H * D] *= size
    qkv = qkv.to(device, dtype)
    q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
    dout = torch.randn(B, Tq, H, D, generator=draw, dtype=torch.float32).to(device, dtype)
    segments = sinks = None
    if spec.segments:
        segments = (torch.arange(Tk, device=device) >= Tk // 3).int().expand(B, Tk).contiguous()
    if spec.sinks:
        sinks = torch.randn(H, generator=draw, dtype=torch.float32).add(3).to(device, dtype)
    slopes = None
    if spec.alibi:  # 1/16 to 1
        shape_of_slopes = (H,) if size == 1 else (B, H)
        slopes = torch.exp2(-4 * torch.rand(shape_of_slopes, generator=draw)).to(device)
    return Inputs(q[:, q.shape[1] - Tq :], k[:, :Tk], v[:, :Tk], dout, segments, sinks, slopes)


def kernels_of(events: Sequence[str]) -> tuple[str, ...]:
    """Short names of the attention kernels among the profiler's events."""
    found = []
    for event in events:
        library, _, operator = event.partition("::")
        if event in KERNELS:
            found.append(KERNELS[event])
        elif operator.isidentifier() and library.isidentifier() and library not in PLAIN:
            found.append(operator)
    if not found and any(event.startswith("Torch-Compiled Region") for event in events):
        return ("by torch.compile",)
    return tuple(dict.fromkeys(found))
