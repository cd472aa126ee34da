"""Proof that a kernel is right: a run of it against the truth (truth.py), short in probe(), and in
probe_long() at a call's own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .caps import Backend, DeviceLost, shape_of
from .function import whole
from .machine.system import KERNEL_ERRORS, first_line, loses_device, profiled
from .masks import filled_cache
from .ring import Ring
from .spec import Spec
from .truth import Deviation, Inputs, Result, errors, plain, truth, wrong

BUFFERS = ("static", "paged")  # caches that are read through a view
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


def calls_of(T: int, ends: Sequence[Sequence[int]] = ()) -> list[list[slice]]:
    """The queries of each row in each call through a cache: up to `ends`, or of two rows two chunks
    and then single tokens."""
    ends = ends or ((T // 2, T // 3), (T - 3, T - 2), (T - 2, T - 1), (T - 1, T), (T, T))
    pairs = pairwise(([0] * len(ends[0]), *ends))
    return [[slice(*span) for span in zip(*pair)] for pair in pairs]


@torch.no_grad()
def run_cached(attend: Callable[..., Tensor], given: Inputs, spec: Spec,
               ends: Sequence[Sequence[int]] = ()) -> Result:
    """The output through a cache, by calls_of()."""
    q, out, before = given.q, torch.empty_like(given.q), given.k.shape[1] - given.q.shape[1]
    k, v, view = filled_cache(given.k, given.v, spec)
    for at in calls_of(q.shape[1], ends):
        start, count = [before + span.start for span in at], [s.stop - s.start for s in at]
        padded = pad_sequence([q[b, span] for b, span in enumerate(at)], True)
        got = attend(padded, k, v, spec, cache=view(start, count), **given.options)
        must_be_like(got, padded)
        for b, span in enumerate(at):
            out[b, span] = got[b, : count[b]]
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
    device, cached = torch.device(device), spec.cache in BUFFERS
    spec = clipped(replace(spec, grad=spec.grad and not cached), T)
    shorter = T if spec.grad or cached or spec.lse else T // 3
    other, draw = other_numbers(spec), torch.Generator().manual_seed(0)
    cases = [(spec, T, 1.0), (spec, shorter, LARGE), (other, T, 1.0)][: 2 + (other != spec)]
    ordinary, why = list[Deviation](), list[str]()
    try:
        for case, Tq, size in cases:
            found = trial(backend, case, device, (2, Tq, T), draw, size)
            about = ", on large scores" * (size > 1) + f", with {case}" * (case != spec)
            why = why or [text + about for text in wrong(found)]
            ordinary = ordinary or found
        kernels, leak = observe(backend, spec, device, T)
    except KernelFailed as e:
        return Probe((f"it failed in the probe ({e})",))
    if not why and leak != 0:
        why = [f"a later token moves earlier outputs, by up to {leak:.2g}"]
    reasons = [f"its numbers are wrong ({'; '.join(why)})"] if why else []
    promised = backend.name.removeprefix("sdpa_")
    others = {kernel.split()[0] for kernel in kernels} & {*PINNED} - {promised}  # "flash (CPU)"
    if others and promised in PINNED and not why:
        reasons = [f"it ran another kernel ({', '.join(sorted(others))})"]
    largest = [d for d in ordinary if d.where.startswith(" at") and d.size]
    out = next(d for d in largest if d.name == "out")
    grads = (d for d in largest if d.name != "out")
    grad = max(grads, key=lambda d: d.off / d.allowed, default=None)
    return Probe(tuple(reasons), kernels, {
        "error": out.off / out.size, "allowed": out.allowed / out.size,
        "grad_error": grad and grad.off / grad.size,
        "grad_allowed": grad and grad.allowed / grad.size, "canary": leak == 0})


def probe_long(backend: Backend, spec: Spec, device: str | torch.device,
               shape: tuple[int, int, int]) -> tuple[str, ...]:
    """The errors in one call of this shape, (B, Tq, Tk), of one sequence and the query heads of
    one key/value head; empty if there are none. Compares at most ROWS queries, and the gradients
    that flow from them: the truth costs O(ROWS * Tk). A cache holds Tk tokens before its last Tq.
    """
    (_, Tq, Tk), cached = shape, spec.cache in BUFFERS
    Tq = min(Tq, ROWS) if cached else Tq
    group = spec.n_head // spec.n_kv_head
    spec = replace(spec, n_head=group, n_kv_head=1, dropout=0.0, grad=spec.grad and not cached)
    rows = torch.linspace(0, Tq - 1, min(Tq, ROWS)).round().long()
    draw = torch.Generator().manual_seed(0)
    try:
        found = trial(backend, spec, torch.device(device), (1, Tq, Tk), draw, rows=rows)
    except KernelFailed as e:
        return (f"it failed at {Tk:,} tokens ({e})",)
    return tuple(f"at {Tk:,} tokens {text}" for text in wrong(found))


def trial(
    backend: Backend, spec: Spec, device: torch.device, shape: tuple[int, int, int],
    draw: torch.Generator, size: float = 1.0, rows: Tensor | None = None,
) -> list[Deviation]:
    """The errors of a run of random inputs without dropout. With `rows` only these queries have a
    gradient and are compared, and a cache is read once."""
    given, spec = draw_inputs(spec, device, shape, draw, size), replace(spec, dropout=0.0)
    Tq, ends = shape[1], [] if rows is None else [[shape[1]]]
    if rows is None and spec.cache in BUFFERS and spec.right != 0:
        # A chunk does not see later ones, as the truth does: the last call is compared.
        rows, ends = torch.arange(Tq // 2, Tq), [[Tq // 3, Tq // 2], [Tq, Tq]]
    rows = torch.arange(Tq, device=device) if rows is None else rows.to(device)
    hidden = torch.ones(Tq, dtype=torch.bool, device=device).index_fill(0, rows, False)
    given = given._replace(dout=given.dout.masked_fill(hidden[:, None, None], 0))
    with attempt(backend, device):
        got = way_of(backend, spec, ends)(given, spec)
    dq = None if got.dq is None else got.dq[:, rows]
    got = replace(got, out=got.out[:, rows], dq=dq)
    spec = replace(spec, cache="none", page_size=None)
    rough, want = (of(given, spec, rows, backend.mods) for of in (plain, truth))
    return errors(got, rough, want, given.q.dtype)


def observe(backend: Backend, spec: Spec, device: torch.device,
            T: int) -> tuple[tuple[str, ...], float]:
    """The kernels of a run, with dropout, and leakage() without."""
    given = draw_inputs(spec, device, (2, T, T), torch.Generator().manual_seed(0))
    way, events = way_of(backend, spec), list[str]()
    ahead = None if backend.mods else 0 if spec.cache in BUFFERS else spec.right
    with attempt(backend, device):
        with profiled(events):
            got = way(given, spec)
        if spec.dropout and not all(bool(t.isfinite().all()) for t in got.tensors.values()):
            raise FloatingPointError("not finite with dropout")
        leak = leakage(way, given, replace(spec, dropout=0.0), ahead)
    return kernels_of(events), leak


class KernelFailed(RuntimeError):
    """A kernel has raised an exception: its type and first line."""


@contextmanager
def attempt(backend: Backend, device: torch.device) -> Iterator[None]:
    """Run a kernel with autograd, apart from the random state. Raises KernelFailed, or DeviceLost:
    it has lost the GPU, and what runs next would fail and be blamed instead."""
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda), torch.enable_grad():
            yield
    except KERNEL_ERRORS as e:
        if not loses_device(e):
            raise KernelFailed(f"{type(e).__name__}: {first_line(e)}") from e
        other = backend.fallback or "manual"
        raise DeviceLost(
            f"{backend.name} has crashed on the GPU ({first_line(e)}), which this process cannot "
            f"use any more; start again with another kernel: --attention_backend={other}"
        ) from e


def way_of(backend: Backend, spec: Spec,
           ends: Sequence[Sequence[int]] = ()) -> Callable[..., Result]:
    """run() of a backend, or run_cached() by these calls."""
    attend = attend_of(backend, spec)
    return partial(run_cached, attend, ends=ends) if spec.cache in BUFFERS else partial(run, attend)


def attend_of(backend: Backend, spec: Spec) -> Callable[..., Tensor]:
    """What runs `spec`: attend(), or for the log-sum-exp the partial, in parts where a ring can."""
    if not spec.lse:
        return backend.compute

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Tensor:
        parts = spec.right == 0 and q.shape[1] == k.shape[1] and q.shape[1] % 2 == 0
        call = Ring().attend(backend) if parts else whole(backend)
        return call(q, k, v, spec, **options)

    return attend


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
