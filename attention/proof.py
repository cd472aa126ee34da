"""Runs of a kernel against the truth (truth.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from .caps import Backend, DeviceLost, must_be
from .function import whole
from .machine.system import KERNEL_ERRORS, first_line, loses_device, profiled
from .masks import filled_cache
from .ring import Ring
from .spec import BUFFERS, Spec
from .truth import Deviation, Inputs, Result, errors, plain, truth, wrong

SHORT = 64
LONG = 256  # keys; longer calls are probed too
ROWS = 32  # compared queries of a longer call
LARGE = 32  # factor of q: exp() of scores overflows
KERNELS = {  # of the profiler -> usual name
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
# Namespaces without attention kernels of other libraries.
PLAIN = {"aten", "prims", "autograd", "c10d", "mkldnn", "inductor", "nanoattn"}
# `error` and its limit `allowed`, relative to the largest true output; `grad_error`, `grad_allowed`
# of the gradient closest to its limit; `canary`: no earlier output moved.
Proof = dict[str, Any]


@dataclass(frozen=True)
class Probe:
    why: tuple[str, ...] = ()  # empty if it can be used
    kernels: tuple[str, ...] = ()  # "flash", "math"
    proof: Proof | None = None  # None: no results


def probe(backend: Backend, spec: Spec, device: str | torch.device, T: int = SHORT) -> Probe:
    """Run `backend` at batch 2 and length T: on ordinary and large scores, then with other numbers,
    since one plan serves a kind. A later token must not move earlier outputs, unless the mask is
    its own."""
    device, cached = torch.device(device), spec.cache in BUFFERS
    window, right = (n and min(n, T // 2) for n in (spec.window, spec.right))  # hide something
    spec = replace(spec, window=window, right=right, grad=spec.grad and not cached)
    shorter = T if spec.grad or cached or spec.lse else T // 3
    window, right = (n and (n + 1 if n < 5 else n // 2 + 2) for n in (window, right))
    cap = spec.softcap  # a large one hardly matters
    other = replace(spec, window=window, right=right, scale=spec.scale and 0.75 * spec.scale,
                    softcap=cap and (1.5 * cap if cap < 4 else 2.0))
    draw = torch.Generator().manual_seed(0)
    cases = [(spec, T, 1.0), (spec, shorter, LARGE), (other, T, 1.0)][: 2 + (other != spec)]
    ordinary, why, events = list[Deviation](), list[str](), list[str]()
    try:
        for case, Tq, size in cases:
            found = trial(backend, case, device, (2, Tq, T), draw, size)
            about = ", on large scores" * (size > 1) + f", with {case}" * (case != spec)
            why = why or [text + about for text in wrong(found)]
            ordinary = ordinary or found
        given = draw_inputs(spec, device, (2, T, T), torch.Generator().manual_seed(0))
        attend, ahead = attend_of(backend, spec), 0 if cached else spec.right
        with attempt(backend, device):
            with profiled(events):
                got = run(attend, given, spec)
            if spec.dropout and not all(bool(t.isfinite().all()) for t in got.tensors.values()):
                raise FloatingPointError("not finite with dropout")
            quiet = replace(spec, dropout=0.0, grad=False)
            leak = leakage(attend, given, quiet, None if backend.mods else ahead)
    except KernelFailed as e:
        return Probe((f"it failed in the probe ({e})",))
    if not why and leak != 0:
        why = [f"a later token moves earlier outputs, by up to {leak:.2g}"]
    reasons = [f"its numbers are wrong ({'; '.join(why)})"] if why else []
    kernels, promised = kernels_of(events), backend.name.removeprefix("sdpa_")
    others = {kernel.split()[0] for kernel in kernels} & {*PINNED} - {promised}  # "flash (CPU)"
    if others and promised in PINNED and not why:
        reasons = [f"it ran another kernel ({', '.join(sorted(others))})"]
    out, *grads = (d for d in ordinary if d.where.startswith(" at") and d.size)
    grad = max(grads, key=lambda d: d.off / d.allowed, default=None)
    return Probe(tuple(reasons), kernels, {
        "error": out.off / out.size, "allowed": out.allowed / out.size,
        "grad_error": grad and grad.off / grad.size,
        "grad_allowed": grad and grad.allowed / grad.size, "canary": leak == 0})


def probe_long(backend: Backend, spec: Spec, device: str | torch.device,
               shape: tuple[int, int, int]) -> tuple[str, ...]:
    """Errors of one (B, Tq, Tk) call in at most ROWS queries and their gradients: O(ROWS * Tk)."""
    (_, Tq, Tk), cached = shape, spec.cache in BUFFERS
    Tq = min(Tq, ROWS) if cached else Tq
    spec = replace(spec, n_head=spec.n_head // spec.n_kv_head, n_kv_head=1, dropout=0.0,
                   grad=spec.grad and not cached)
    rows = torch.linspace(0, Tq - 1, min(Tq, ROWS)).round().long()
    draw = torch.Generator().manual_seed(0)
    try:
        found = trial(backend, spec, torch.device(device), (1, Tq, Tk), draw, rows=rows)
    except KernelFailed as e:
        return (f"it failed at {Tk:,} tokens ({e})",)
    return tuple(f"at {Tk:,} tokens {text}" for text in wrong(found))


def trial(backend: Backend, spec: Spec, device: torch.device, shape: tuple[int, int, int],
          draw: torch.Generator, size: float = 1.0, rows: Tensor | None = None) -> list[Deviation]:
    given, spec = draw_inputs(spec, device, shape, draw, size), replace(spec, dropout=0.0)
    Tq, ends = shape[1], [] if rows is None else [[shape[1]]]
    if rows is None and spec.cache in BUFFERS and spec.right != 0:
        # A chunk sees no later one, unlike the truth.
        rows, ends = torch.arange(Tq // 2, Tq), [[Tq // 3, Tq // 2], [Tq, Tq]]
    rows = torch.arange(Tq, device=device) if rows is None else rows.to(device)
    hidden = torch.ones(Tq, dtype=torch.bool, device=device).index_fill(0, rows, False)
    given = given._replace(dout=given.dout.masked_fill(hidden[:, None, None], 0))
    with attempt(backend, device):
        got = run(attend_of(backend, spec), given, spec, ends=ends)
    dq = None if got.dq is None else got.dq[:, rows]
    got = replace(got, out=got.out[:, rows], dq=dq)
    spec = replace(spec, cache="none", page_size=None)
    rough, want = (of(given, spec, rows, backend.mods) for of in (plain, truth))
    return errors(got, rough, want, given.q.dtype)


# --- inputs ---


def draw_inputs(spec: Spec, device: torch.device, shape: tuple[int, int, int],
                draw: torch.Generator, size: float = 1.0) -> Inputs:
    """Slices of one tensor; `size`: a factor of q. ALiBi's slopes: (H,) if it is 1, else (B, H)."""
    (B, Tq, Tk), dtype = shape, getattr(torch, spec.dtype)
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    qkv = torch.randn(B, max(Tq, Tk), (H + 2 * Hkv) * D, generator=draw, dtype=torch.float32)
    qkv[..., : H * D] *= size
    qkv = qkv.to(device, dtype)
    q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
    dout = torch.randn(B, Tq, H, D, generator=draw, dtype=torch.float32).to(device, dtype)
    segments = sinks = slopes = None
    if spec.segments:
        segments = (torch.arange(Tk, device=device) >= Tk // 3).int().expand(B, Tk).contiguous()
    if spec.sinks:
        sinks = torch.randn(H, generator=draw, dtype=torch.float32).add(3).to(device, dtype)
    if spec.alibi:  # 1/16 to 1
        rows = (H,) if size == 1 else (B, H)
        slopes = torch.exp2(-4 * torch.rand(rows, generator=draw)).to(device)
    return Inputs(q[:, q.shape[1] - Tq :], k[:, :Tk], v[:, :Tk], dout, segments, sinks, slopes)


# --- a run ---


class KernelFailed(RuntimeError):
    """The type and first line of a kernel's exception."""


@contextmanager
def attempt(backend: Backend, device: torch.device) -> Iterator[None]:
    """Run with autograd and an own random state. Raises KernelFailed or DeviceLost."""
    cuda = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(cuda), torch.enable_grad():
            yield
    except KERNEL_ERRORS as e:
        if not loses_device(e):
            raise KernelFailed(f"{type(e).__name__}: {first_line(e)}") from e
        raise DeviceLost(
            f"{backend.name} has crashed on the GPU ({first_line(e)}): start again, with "
            f"--attention_backend={backend.fallback or 'manual'}") from e


def attend_of(backend: Backend, spec: Spec) -> Callable[..., Tensor]:
    if not spec.lse:
        return backend.compute

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Tensor:
        parts = spec.right == 0 and q.shape[1] == k.shape[1] and q.shape[1] % 2 == 0
        call = Ring().attend(backend) if parts else whole(backend)
        return call(q, k, v, spec, **options)

    return attend


def run(attend: Callable[..., Tensor], given: Inputs, spec: Spec,
        wrt: Sequence[str] = ("q", "k", "v", "sinks"), times: int = 1,
        ends: Sequence[Sequence[int]] = ()) -> Result:
    """Output, and gradients of `wrt` after `times` backward passes; `ends` as in run_cached()."""
    if spec.cache in BUFFERS:
        return run_cached(attend, given, spec, ends)
    leaves = {name: getattr(given, name).detach().requires_grad_() for name in wrt
              if getattr(given, name) is not None}
    given = given._replace(**leaves)
    with torch.set_grad_enabled(spec.grad):
        out = attend(given.q, given.k, given.v, spec, **given.options)
    must_be("its output", out, tuple(given.q.shape), given.q.device, (str(given.q.dtype)[6:],))
    if out.requires_grad != spec.grad:
        raise AssertionError(f"out.requires_grad is {out.requires_grad}")
    grads: Sequence[Tensor] = ()
    for _ in range(times if spec.grad else 0):
        grads = torch.autograd.grad(out, [*leaves.values()], given.dout, retain_graph=times > 1)
    found = dict(zip(leaves, grads))
    return Result(out.detach(), *map(found.get, ("q", "k", "v", "sinks")))


@torch.no_grad()
def run_cached(attend: Callable[..., Tensor], given: Inputs, spec: Spec,
               ends: Sequence[Sequence[int]] = ()) -> Result:
    """Run each row's next queries up to `ends`; default: chunks, then single tokens."""
    (B, T), out, before = given.q.shape[:2], torch.empty_like(given.q), given.k.shape[1]
    k, v, view = filled_cache(given.k, given.v, spec)
    done: Sequence[int] = [0] * B
    for end in ends or ((T // 2, T // 3), (T - 3, T - 2), (T - 2, T - 1), (T - 1, T), (T, T)):
        rows = [given.q[b, a:z] for b, (a, z) in enumerate(zip(done, end))]
        q, count = pad_sequence(rows, True), [len(row) for row in rows]
        cache = view([before - T + n for n in done], count)
        got = attend(q, k, v, spec, cache=cache, **given.options)
        must_be("its output", got, tuple(q.shape), q.device, (str(q.dtype)[6:],))
        for b, n in enumerate(count):
            out[b, done[b] : end[b]] = got[b, :n]
        done = end
    return Result(out)


def leakage(attend: Callable[..., Tensor], given: Inputs, spec: Spec, ahead: int | None) -> float:
    if ahead is None:
        return 0.0
    q, k, v = (torch.cat((t[:, :-1], 3 - t[:, -1:]), dim=1) for t in given[:3])
    moved = 0.0
    for _ in range(3):  # libraries may round differently under load
        before, after = (run(attend, x, spec).out for x in (given, given._replace(q=q, k=k, v=v)))
        moved = float((after.double() - before.double())[:, : -1 - ahead].abs().max())
        if moved == 0:
            break
    return moved


def kernels_of(events: Sequence[str]) -> tuple[str, ...]:
    found = dict[str, None]()
    for event in events:
        library, _, operator = event.partition("::")
        if event in KERNELS:
            found[KERNELS[event]] = None
        elif operator.isidentifier() and library.isidentifier() and library not in PLAIN:
            found[operator] = None
    compiled = any(event.startswith("Torch-Compiled Region") for event in events)
    return tuple(found) or ("by torch.compile",) * compiled
