"""Proof that a kernel is right: a run of it against the truth (truth.py), short in probe(), and in
probe_long() at a call's own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .caps import Backend, DeviceLost, shape_of
from .function import whole
from .machine.system import KERNEL_ERRORS, first_line, loses_device, profiled, settings_stay
from .masks import filled_cache
from .ring import Ring
from .spec import Spec
from .truth import Deviation, Inputs, Result, errors, plain, truth, wrong

SHORT = 64  # tokens in probe()
LONG = 256  # a longer call is probed at its own length too
ROWS = 32  # queries of it that are compared
# Factor of the queries in a second run. Some of its scores are beyond 88, where exp() overflows in
# float32, and some kernels fail (NVIDIA/TransformerEngine issue 3216).
LARGE = 32


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
    calls of a kind. The random state is restored. The profiler records which kernels ran.

    With a cache the queries come in chunks, then one by one. Inference also continues a prefix,
    with fewer queries than keys. No earlier output may move when a later token is changed, unless
    the backend has its own mask, which is then the truth's."""
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
                    ahead = None if backend.mods else 0 if cached else spec.right
                    leak = leakage(way, given, quiet, ahead)
        except KERNEL_ERRORS as e:
            if isinstance(e, DeviceLost):
                raise
            return Probe((f"it failed in the probe ({type(e).__name__}: {first_line(e)})",))
        uncached = replace(quiet, cache="none", page_size=None)
        if cached and case.right != 0:
            rough, want = by_chunks(given, case)
        else:
            rough, want = (of(given, uncached, mods=backend.mods) for of in (plain, truth))
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
    rough, want = (of(given, uncached, rows, backend.mods) for of in (plain, truth))
    found = errors(got, rough, want, given.q.dtype)
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
    """Run a kernel with autograd, apart from the random state and PyTorch's settings. Raises
    DeviceLost: it has lost the GPU, and what runs next would fail and be blamed instead."""
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
