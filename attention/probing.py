"""probe(): one run of a backend before anything depends on it.

The backend runs forward and backward in the real dtype, head_dim and head counts, on ordinary and
on large scores. The results are compared with manual's in float64. A later token is changed to
check that no earlier output moves. The profiler records which kernels ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from . import manual
from .caps import Backend, DeviceLost, Proof, shape_of
from .function import whole
from .machine.apart import trial_of_backward
from .machine.flash_impl import flash_impl
from .machine.system import KERNEL_ERRORS, first_line, loses_device, profiled, settings_stay
from .ring import Ring
from .spec import Spec, visible
from .views import filled_cache

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

SHORT = 64  # tokens in probe()
LONG = 256  # a run with longer sequences is probed at its own length too
# Scale of the second sequence's queries. Some of its scores are beyond 88, where exp() overflows in
# float32, and some kernels fail (NVIDIA/TransformerEngine issue 3216).
LARGE = 32


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


@contextmanager
def gpu_survives(backend: Backend) -> Iterator[None]:
    """Name the kernel that has lost the GPU: everything that runs next would fail, and be blamed.

    Raises:
        DeviceLost: instead of CUDA's error.
    """
    try:
        yield
    except Exception as e:
        if isinstance(e, DeviceLost) or not loses_device(e):
            raise
        other = backend.fallback or "manual"
        raise DeviceLost(
            f"{backend.name} has crashed on the GPU ({first_line(e)}), which this process cannot "
            f"use any more; start again with another kernel: --attention_backend={other}"
        ) from e


def probe(backend: Backend, spec: Spec, device: str | torch.device, T: int = SHORT) -> Probe:
    """Run `backend` once, forward and, if `spec.grad`, backward, at batch 2 and length T.

    With a cache the queries come in chunks, then one by one. The random state is restored.
    """
    device = torch.device(device)
    cached = spec.cache in ("static", "paged")
    # A window longer than T would not be tested, and no gradient flows through a cache.
    window, right = (n and min(n, T // 2) for n in (spec.window, spec.right))
    spec = replace(spec, window=window, right=right, grad=spec.grad and spec.cache == "none")
    quiet, uncached = replace(spec, dropout=0.0), replace(spec, dropout=0.0, cache="none",
                                                          page_size=None)
    way = run_cached if cached else _run
    run = partial(way, attend_of(backend, spec))
    draw = torch.Generator().manual_seed(0)
    out, plain, truth, moves = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    events: list[str] = []
    seeds = torch.random.fork_rng([device] if device.type == "cuda" else [])
    with gpu_survives(backend), seeds, torch.enable_grad():
        # Inference also continues a prefix, with fewer queries than keys.
        for Tq in (T,) if spec.grad or cached or spec.lse else (T // 3, T):
            inputs, seg = _inputs(spec, device, Tq, T, draw)
            plain += way(manual.attend, inputs, seg, uncached)
            truth += (exact := _exact(way, inputs, seg, uncached))
            moves += _moves(inputs, seg, uncached) if spec.grad else map(torch.zeros_like, exact)
            try:
                with settings_stay():
                    out += run(inputs, seg, quiet)
                    if Tq == T:
                        with profiled(events):
                            again = run(inputs, seg, spec)
                        if spec.dropout and not all(bool(t.isfinite().all()) for t in again):
                            raise FloatingPointError("not finite with dropout")
                        leak = leakage(run, inputs, seg, quiet)
            except KERNEL_ERRORS as e:
                if loses_device(e):
                    raise
                return Probe((f"it failed in the probe ({type(e).__name__}: {first_line(e)})",))
    names = ["out after a prefix"] if len(out) > 1 and not spec.grad else []
    names += ["out", "dq", "dk", "dv", "dsinks"][: len(out) - len(names)]
    all_four = [[x.double().cpu() for x in xs] for xs in (out, plain, truth, moves)]
    # The sinks' gradient sums over both sequences: it belongs to the large scores.
    found, large = (
        _deviations(names, *([x[b] if x.dim() == 4 else b * x for x in xs] for xs in all_four),
                    dtype=inputs[0].dtype, scale=scale * _steep(spec))
        for b, scale in enumerate((1, LARGE))
    )
    why = _wrong(found) or [f"{text}, on large scores" for text in _wrong(large)]
    if not why and leak != 0:
        why = [f"a later token moves earlier outputs, by up to {leak:.2g}"]
    pinned, ran = backend.name.removeprefix("sdpa_"), [k.split()[0] for k in kernels_of(events)]
    other = [k for k in ran if pinned in PINNED and k in PINNED and k != pinned]
    largest = [d for d in found if not d.where and d.size]
    o = next(d for d in largest if d.name == "out")
    g = max((d for d in largest if d.name[0] == "d"), key=lambda d: d.off / d.allowed, default=None)
    proof: Proof = {
        "error": o.off / o.size,
        "allowed": o.allowed / o.size,
        "grad_error": g and g.off / g.size,
        "grad_allowed": g and g.allowed / g.size,
        "canary": leak == 0,
    }
    wrong = [f"it ran another kernel ({kernel})" for kernel in other]
    wrong = [f"its numbers are wrong ({'; '.join(why)})"] if why else wrong
    return Probe(tuple(wrong), kernels_of(events), tuple(events), proof)


def wrong_at(backend: Backend, spec: Spec, device: str | torch.device, T: int) -> tuple[str, ...]:
    """The errors at T tokens; empty if there are none.

    Compares the outputs of some queries, and the gradients that flow from them, of one sequence and
    the query heads of one key/value head: memory O(T). With a cache, the last queries only.
    """
    on = torch.device(device)
    R = spec.n_head // spec.n_kv_head
    cached = spec.cache in ("static", "paged")
    grad = spec.grad and spec.cache == "none"
    spec = replace(spec, n_head=R, n_kv_head=1, dropout=0.0, grad=grad)
    T += T % 2  # a ring takes two equal chunks
    places = range(T - 3, T) if cached else (0, T // 3, T // 2, T - T // 5, T - 2, T - 1)
    rows = sorted({row for row in places if 0 <= row < T})
    inputs, seg = _inputs(spec, on, T, T, torch.Generator().manual_seed(0))
    q, k, v, dout, *sinks = (t[:1] if t.dim() == 4 else t for t in inputs)
    seg = None if seg is None else seg[:1]
    kept = torch.zeros(T, device=on, dtype=torch.bool)
    kept[rows] = True
    dout = dout * kept[None, :, None, None]  # the gradients of these rows only
    seeds = torch.random.fork_rng([on] if on.type == "cuda" else [])
    with gpu_survives(backend), seeds, torch.enable_grad():
        try:
            if cached:
                held_k, held_v, view = filled_cache(k, v, spec)
                more = {"sinks": sinks[0]} if sinks else {}
                part, reads = q[:, rows], view([rows[0]], [len(rows)])
                got = [backend.attend(part, held_k, held_v, spec, cache=reads, **more)]
            else:
                got = _run(attend_of(backend, spec), [q, k, v, dout, *sinks], seg, spec)
        except KERNEL_ERRORS as e:
            if loses_device(e):
                raise
            return (f"it failed at {T:,} tokens ({type(e).__name__}: {first_line(e)})",)
        got[0] = got[0] if cached else got[0][:, rows]
        inputs = [q, k, v, dout, *sinks]
        ways = partial(_run, manual.attend), partial(_exact, _run), _moves
        plain, truth, moves = (_rows(inputs, seg, spec, rows, run) for run in ways)
    names = ["out", "dq", "dk", "dv", "dsinks"][: len(got)]
    all_four = ([x.double().cpu() for x in xs] for xs in (got, plain, truth, moves))
    found = _deviations(names, *all_four, dtype=q.dtype, scale=_steep(spec))
    return tuple(f"at {T:,} tokens {text}" for text in _wrong(found))


def attend_of(backend: Backend, spec: Spec) -> Callable[..., Tensor]:
    """What runs `spec`: attend(), or for the log-sum-exp the partial, in parts if causal."""
    if not spec.lse:
        return backend.attend
    return Ring().attend(backend) if spec.right == 0 else whole(backend)


def _steep(spec: Spec) -> float:
    """How many times larger scores are than by the default scale, at least 1."""
    return max(1.0, spec.softmax_scale * spec.head_dim**0.5)


def _rows(inputs: list[Tensor], seg: Tensor | None, spec: Spec, rows: list[int],
          run: Callable[[list[Tensor], None, Spec], list[Tensor]]) -> list[Tensor]:
    """run() for these queries of one sequence, each against the keys that it sees."""
    q, k, v, dout, *sinks = inputs
    outs: list[Tensor] = []
    sums = [torch.zeros_like(t, dtype=torch.float64) for t in (q, k, v, *sinks)]
    j = torch.arange(k.shape[1], device=k.device)
    sees_all = replace(spec, window=None, segments=False)
    for i in rows:
        seg_i, seg_j = (None, None) if seg is None else (seg[0, i], seg[0])
        seen = visible(i, j, 0, spec.window, seg_i, seg_j, spec.right).nonzero()
        I, J = slice(i, i + 1), slice(int(seen[0]), int(seen[-1]) + 1)  # one run of keys
        part = [q[:, I], k[:, J], v[:, J], dout[:, I], *sinks]
        one = run(part, None, sees_all)
        outs.append(one[0])
        spans = I, J, J, slice(None)  # the sinks: (H,)
        for total, at, g in zip(sums, spans, one[1:], strict=False):
            (total[:, at] if total.dim() == 4 else total).add_(g.to(total.device))
    return [torch.cat(outs, dim=1), *(sums if spec.grad else ())]


def kernels_of(events: Sequence[str]) -> tuple[str, ...]:
    """Short names of the attention kernels among the profiler's events."""
    found = []
    for event in events:
        library, _, operator = event.partition("::")
        if KERNELS.get(event) == "flash" and flash_impl() != "FA2":
            found.append(f"flash ({flash_impl()})")  # behind PyTorch's flash operator on CUDA
        elif event in KERNELS:
            found.append(KERNELS[event])
        elif operator.isidentifier() and library.isidentifier() and library not in PLAIN:
            found.append(operator)
    if not found and any(event.startswith("Torch-Compiled Region") for event in events):
        return ("by torch.compile",)
    return tuple(dict.fromkeys(found))


def leakage(
    run: partial[list[Tensor]], inputs: list[Tensor], seg: Tensor | None, spec: Spec
) -> float:
    """The largest change of outputs that do not see the last token when its q, k and v change."""
    ahead = 0 if run.func is run_cached else spec.right  # there it comes alone, after all others
    if ahead is None:
        return 0.0
    changed = [torch.cat((t[:, :-1], 3 - t[:, -1:]), dim=1) for t in inputs[:3]] + inputs[3:]
    for _ in range(3):  # a library may round differently once, under load
        before, after = (run(x, seg, spec, backward=False)[0] for x in (inputs, changed))
        moved = float((after.double() - before.double())[:, : -1 - ahead].abs().max())
        if moved == 0:
            break
    return moved


class Deviation(NamedTuple):
    """The error of one tensor, its largest or its root mean square."""

    name: str
    where: str  # "", or " in the mean"
    off: float
    allowed: float
    size: float  # of the truth


def _deviations(
    names: list[str], out: list[Tensor], plain: list[Tensor], truth: list[Tensor],
    moves: list[Tensor], *, dtype: torch.dtype, scale: float,
) -> list[Deviation]:
    """The largest error of each tensor, and the root mean square: the large values of rows with few
    visible keys would hide an error of a few percent in the others."""
    sizes: dict[str, Callable[[Tensor], float]] = {
        "": lambda x: float(x.abs().max()),
        " in the mean": lambda x: float(x.square().mean() ** 0.5),
    }
    largest = max(map(sizes[""], truth))
    found = []
    for name, o, p, t, moved in zip(names, out, plain, truth, moves, strict=True):
        m = 3 if name.startswith("d") else 2
        for where, size in sizes.items():
            usual = size(p - t) + 2 * size(moved)  # dS is rounded, too
            allowed = allowed_error(usual, size(t), scale * largest, dtype, m)
            found.append(Deviation(name, where, size(o - t), allowed, size(t)))
    return found


def _wrong(found: list[Deviation]) -> list[str]:
    # `not <=`, so that NaN fails. One text for each tensor.
    wrong = {d.name: d for d in reversed(found) if not d.off <= d.allowed}
    return [
        f"{name} is off by {d.off:.2g}{d.where}, {d.allowed:.2g} is allowed"
        for name, d in reversed(wrong.items())
    ]


def allowed_error(
    plain: float, size: float, largest: float, dtype: torch.dtype, m: int = 2
) -> float:
    """The largest allowed error of a kernel, the one tolerance of this project.

    m times the error of plain PyTorch, plus one rounding error at this size, plus 32 at the largest
    value in the precision of the sums (float32 for half precision): plain PyTorch may be exact by
    luck.

    Args:
        size: of the true values.
        largest: the largest true value; for large scores times their scale.
    """
    eps = torch.finfo(dtype).eps
    return m * plain + eps * size + 32 * min(eps, torch.finfo(torch.float32).eps) * largest


def _inputs(
    spec: Spec, device: torch.device, Tq: int, T: int, draw: torch.Generator
) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v as slices of one tensor, the output's gradient, any sinks; segments."""
    dtype = getattr(torch, spec.dtype)
    B, H, Hkv, D = 2, spec.n_head, spec.n_kv_head, spec.head_dim
    qkv = torch.randn(B, T, (H + 2 * Hkv) * D, generator=draw, dtype=torch.float32)
    qkv[1, :, : H * D] *= LARGE
    qkv = qkv.to(device, dtype)
    q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
    seg = (torch.arange(T) >= T // 3).int().expand(B, T).contiguous() if spec.segments else None
    dout = torch.randn(B, Tq, H, D, generator=draw, dtype=torch.float32).to(device, dtype)
    sinks = []
    if spec.sinks:
        sinks = [torch.randn(H, generator=draw, dtype=torch.float32).add(3).to(device, dtype)]
    return [q[:, T - Tq :], k, v, dout, *sinks], None if seg is None else seg.to(device)


def _exact(
    way: Callable[..., list[Tensor]], inputs: list[Tensor], seg: Tensor | None, spec: Spec
) -> list[Tensor]:
    """The results in float64, by manual; Metal has no float64."""
    on = torch.device("cpu") if inputs[0].device.type == "mps" else inputs[0].device
    exact = [t.to(on).double() for t in inputs]
    return way(
        manual.attend, exact, seg if seg is None else seg.to(on), replace(spec, dtype="float64")
    )


def _moves(inputs: list[Tensor], seg: Tensor | None, spec: Spec) -> list[Tensor]:
    """How far each of _run()'s results moves because FlashAttention's backward pass reads the
    output in the inputs' dtype. Plain PyTorch does not: of one visible key its dS is 0.

    With e = rowsum(dO * (rounded O - O)), dS moves by P * e: dQ by e * scale * (P K), dK as dV if
    dO were e * scale * Q.
    """
    exact = _exact(_run, inputs, seg, spec)
    moves = [torch.zeros_like(t) for t in exact]
    if not spec.grad:
        return moves
    out, (q, k, _, dout, *sinks) = exact[0], (t.to(exact[0].device).double() for t in inputs)
    e = spec.softmax_scale * (dout * (out.to(inputs[0].dtype).double() - out)).sum(-1, keepdim=True)
    PK, _, _, dk, *_ = _exact(_run, [q, k, k, e * q, *sinks], seg, spec)
    moves[1:3] = e * PK, dk
    return moves


def must_be_like(out: object, q: Tensor) -> None:
    if not isinstance(out, Tensor) or out.shape != q.shape or out.dtype != q.dtype:
        raise TypeError(f"it returned {shape_of(out)}, not {shape_of(q)}")


def _run(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
         spec: Spec, backward: bool = True) -> list[Tensor]:
    """The output, and with spec.grad the gradients of q, k, v and sinks."""
    q, k, v, dout, *sinks = (t.detach().requires_grad_(spec.grad) for t in inputs)
    out = attend(q, k, v, spec, segments=seg, **({"sinks": sinks[0]} if sinks else {}))
    must_be_like(out, q)
    if not (spec.grad and backward):
        return [out.detach()]
    with trial_of_backward():
        return [out.detach(), *torch.autograd.grad(out, (q, k, v, *sinks), dout)]


@torch.no_grad()
def run_cached(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
                spec: Spec, backward: bool = False) -> list[Tensor]:
    """The output through a cache: two chunks, then single tokens; rows of two lengths. If the Spec
    has none, each row's chunk is a call with the keys up to its end."""
    q, k, v, _, *sinks = inputs
    more = {"sinks": sinks[0]} if sinks else {}
    T, out = q.shape[1], torch.empty_like(q)
    k, v, view = filled_cache(k, v, spec)
    lengths = [0, 0]
    for counts in ((T // 2, T // 3), (T - T // 2 - 3, T - T // 3 - 2), (1, 1), (1, 1), (1, 0)):
        spans = [slice(n, n + m) for n, m in zip(lengths, counts, strict=True)]
        lengths_before, lengths = lengths, [at.stop for at in spans]
        if spec.cache == "none":
            for b, at in enumerate(spans):
                if at.start < at.stop:
                    one = q[b : b + 1, at], k[b : b + 1, : at.stop], v[b : b + 1, : at.stop]
                    out[b, at] = attend(*one, spec, **more)[0]
            continue
        padded = pad_sequence([q[b, at] for b, at in enumerate(spans)], True)
        got = attend(padded, k, v, spec, segments=seg, cache=view(lengths_before, counts), **more)
        must_be_like(got, padded)
        for b, at in enumerate(spans):
            out[b, at] = got[b, : counts[b]]
    return [out]
