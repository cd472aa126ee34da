"""Available means that it ran: a tiny real forward and backward, here, before the first step.

A package that is installed may not import, one that imports may not run, and a kernel that runs
may not be the one that a flag named. So the chosen backend is run once at the real dtype, head_dim
and head counts, its numbers are held against manual's, and the names of the kernels are read from
the profiler. What is reported is what executed.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from attention import manual, sdpa
from attention.resolve import packages, resolve
from attention.spec import Backend, Machine, Policy, Resolution, Spec
from inference.cache import PagedCache, StaticCache

log = logging.getLogger("nanoattn")

# What attention operators are called in the profiler, and what people call them.
KERNELS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": "flash (CPU)",
    "aten::_scaled_dot_product_flash_attention": "flash",
    "aten::_scaled_dot_product_efficient_attention": "efficient",
    "aten::_scaled_dot_product_cudnn_attention": "cudnn",
    "aten::_scaled_dot_product_attention_math": "math",
    "aten::_scaled_dot_product_attention_math_for_mps": "math (MPS)",
    "aten::_scaled_dot_product_fused_attention_overrideable": "overrideable",
    "nanoattn::flash_forward": "flash (our Triton)",
    "nanoattn::paged_decode": "paged decode (Triton)",
}


@dataclass(frozen=True)
class Probe:
    """What a backend did when it was run."""

    why: tuple[str, ...] = ()  # why it cannot be used; empty: it ran and its numbers are right
    kernels: tuple[str, ...] = ()  # short names: "flash", "math"
    events: tuple[str, ...] = ()  # the profiler's own names, device kernels included
    error: float | None = None  # max |out - float64| over max |float64|


def probe(backend: Backend, spec: Spec, device: str | torch.device, T: int = 64) -> Probe:
    """Run `backend` once, forward and, if `spec.grad`, backward, at batch 2 and length T.

    The policy of tests/oracle.py, in short: against manual in float64, the error may be twice
    (gradients: three times) that of manual in the same dtype, plus the rounding of the largest
    value, plus 32 roundings in the precision that kernels compute in, float32 for half precision:
    manual may be exact by luck where an honest kernel rounds, and is the truth itself in float64.
    A paged cache is filled in chunks, then token by token; a static cache is filled in part. The
    random state is left as it was found.
    """
    # A window that T does not reach would not be tried. Through a cache no gradient goes.
    spec = replace(spec, window=spec.window and min(spec.window, T // 2),
                   grad=spec.grad and spec.cache == "none")  # fmt: skip
    quiet = replace(spec, dropout=0.0)
    exact_on = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
    draw = torch.Generator().manual_seed(0)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    out, plain, truth = [], [], []
    events: list[str] = []
    with torch.random.fork_rng(devices), torch.enable_grad():
        # Inference also goes on from a prefix, with fewer queries than keys; a cache always does.
        run = {"paged": _run_paged, "static": _run_static}.get(spec.cache, _run)
        for Tq in (T,) if spec.grad or spec.cache == "paged" else (T // 3, T):
            inputs, seg = _inputs(spec, device, Tq, T, draw)
            try:
                # The last run is the one that tells its kernels: as many queries as keys, dropout.
                with nullcontext() if Tq < T or spec.dropout else _profiled(events):
                    out += run(backend.attend, inputs, seg, quiet)
                if spec.dropout:  # random, so only that it runs, and is finite, can be asked
                    with nullcontext() if Tq < T else _profiled(events):
                        _check_finite(run(backend.attend, inputs, seg, spec))
            except Exception as e:  # any failure of a kernel is its refusal, in its own words
                words = f"{type(e).__name__}: {_first_line(e)}"
                return Probe(why=(f"it failed when it was tried ({words})",))
            plain += _run(manual.attend, inputs, seg, quiet)
            truth += _run(manual.attend, [t.to(exact_on).double() for t in inputs],
                          None if seg is None else seg.to(exact_on),
                          replace(quiet, dtype="float64"))  # fmt: skip
    names = ("out", "dq", "dk", "dv") if spec.grad else ("out after a prefix", "out")[-len(out) :]
    eps = torch.finfo(inputs[0].dtype).eps
    eps_compute = min(eps, torch.finfo(torch.float32).eps)
    computed = 32 * eps_compute * max(float(t.abs().max()) for t in truth)
    why = []
    for name, o, p, t in zip(names, out, plain, truth, strict=True):
        o, p, t = (x.double().cpu() for x in (o, p, t))
        m = 3 if name.startswith("d") else 2
        allowed = m * (p - t).abs().max() + eps * t.abs().max() + computed
        if not (o - t).abs().max() <= allowed:  # written so that NaN fails
            why.append(
                f"its numbers are wrong ({name} is off by {(o - t).abs().max():.2g}, "
                f"{allowed:.2g} is allowed)"
            )
    o, t = (x[names.index("out")].double().cpu() for x in (out, truth))
    error = float((o - t).abs().max() / t.abs().max())
    kernels = tuple(dict.fromkeys(_kernel(e) for e in events if e in KERNELS))
    return Probe(tuple(why), kernels, tuple(events), error)


def select(name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
           shape: tuple[int, int] | None = None) -> Resolution:  # fmt: skip
    """Resolve `name` on this machine, and go on until a backend proves itself in the probe.

    Args:
        shape: batch size and tokens of a sequence, where they are known: PyTorch's math kernel is
            warned about where it would hold more than 1 GB of scores.

    Raises:
        ValueError, BackendUnavailable: as resolve() does.
    """
    machine = Machine.here(str(device), packages())
    failed: dict[str, tuple[str, ...]] = {}
    while True:
        chosen = resolve(
            name, spec, machine, policy.fallback, allow_mps_sdpa=policy.mps_sdpa, failed=failed
        )
        tried = probe(chosen.backend, spec, device)
        if not tried.why:
            note = math_note(chosen.backend, spec, shape) if "math" in tried.kernels else ""
            return replace(chosen, kernels=tried.kernels, note=note)
        failed[chosen.backend.name] = tried.why


def math_note(backend: Backend, spec: Spec, shape: tuple[int, int] | None) -> str:
    """A warning where PyTorch's math kernel would hold more than 1 GB of scores; else empty.

    It keeps the scores and their softmax, (B, H, T, T) each, in float32 at the least.
    """
    B, T = shape or (0, 0)
    number = 8 if spec.dtype == "float64" else 4
    size = 2 * number * B * spec.n_head * T * T
    if size <= 1e9:
        return ""
    return (
        f"{backend.name} runs PyTorch's math kernel here, which holds every score: "
        f"{size / 1e9:.1f} GB in each layer at batch size {B} and {T:,} tokens.\n"
        "What the fused kernels refuse, python -m attention tells; --attention_backend=tiled needs "
        "no such memory."
    )


def announce(chosen: Resolution, phase: str = "") -> None:
    """Say what will run and what was refused: once a process, on rank 0 only."""
    if int(os.environ.get("RANK", "0")):
        return
    for warning in chosen.warnings():
        _once(logging.WARNING, warning.replace("\n", "\n         "))
    _once(logging.INFO, chosen.info() + phase)


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)


def _inputs(spec: Spec, device: Any, Tq: int, T: int,
            draw: torch.Generator) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """q, k, v and the gradient of the output, cut from one tensor as a model does; segments."""
    dtype = getattr(torch, spec.dtype)
    B, H, Hkv, D = 2, spec.n_head, spec.n_kv_head, spec.head_dim
    qkv = torch.randn(B, T, (H + 2 * Hkv) * D, generator=draw).to(device, dtype)
    q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
    seg = (torch.arange(T) >= T // 3).int().expand(B, T).contiguous() if spec.segments else None
    dout = torch.randn(B, Tq, H, D, generator=draw).to(device, dtype)
    return [q[:, T - Tq :], k, v, dout], None if seg is None else seg.to(device)


def _run(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
         spec: Spec) -> list[Tensor]:  # fmt: skip
    """The output, and with spec.grad the gradients of q, k and v."""
    q, k, v = (t.detach().requires_grad_(spec.grad) for t in inputs[:3])
    out = attend(q, k, v, spec, segments=seg)
    assert out.shape == q.shape and out.dtype == q.dtype, (out.shape, out.dtype)
    grads = torch.autograd.grad(out, (q, k, v), inputs[3]) if spec.grad else ()
    return [out.detach(), *grads]


def _kernel(event: str) -> str:
    """What people call it; PyTorch's flash operator on CUDA may run another generation's kernel."""
    swapped = KERNELS[event] == "flash" and sdpa.flash_impl() != "FA2"
    return f"flash ({sdpa.flash_impl()})" if swapped else KERNELS[event]


@torch.no_grad()
def _run_paged(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
               spec: Spec) -> list[Tensor]:  # fmt: skip
    """The same output by way of a paged cache: two chunks, then single tokens.

    The two rows have different lengths, and their pages are in no order.
    """
    qkv = inputs[:3]
    T, page_size = qkv[0].shape[1], spec.page_size or 1
    cache = PagedCache(1, spec.n_kv_head, spec.head_dim, n_pages=2 * -(-T // page_size) + 1,
                       page_size=page_size, dtype=qkv[0].dtype, device=qkv[0].device)  # fmt: skip
    taken = [cache.pool.new() for _ in range(cache.pool.n_free)]
    cache.pool.grow(dict.fromkeys(taken, page_size))
    for seq in taken[::2] + taken[1::2]:
        cache.pool.free(seq)
    rows = [cache.pool.new(), cache.pool.new()]
    out = torch.empty_like(qkv[0])
    for counts in ((T // 2, T // 3), (T - T // 2 - 3, T - T // 3 - 2), (1, 1), (1, 1), (1, 0)):
        step = cache.reserve(rows, counts)
        spans = [slice(n, n + m) for n, m in zip(step.lengths, counts, strict=True)]
        padded = [pad_sequence([x[b, at] for b, at in enumerate(spans)], True) for x in qkv]
        got = attend(*padded, spec, segments=seg, cache=step.view(0))
        assert got.shape == padded[0].shape and got.dtype == out.dtype, (got.shape, got.dtype)
        for b, at in enumerate(spans):
            out[b, at] = got[b, : counts[b]]
        step.advance()
    return [out]


@torch.no_grad()
def _run_static(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
                spec: Spec) -> list[Tensor]:  # fmt: skip
    """The same output from a static cache that holds what comes before the queries."""
    q, k, v = inputs[:3]
    B, T, Hkv, D = k.shape
    before = T - q.shape[1]
    cache = StaticCache(1, B, T, Hkv, D, dtype=k.dtype, device=k.device)
    step = cache.reserve(before)
    step.view(0).append(k[:, :before], v[:, :before])
    step.advance()
    view = replace(cache.reserve(T - before), first=False).view(0)
    out = attend(q, k[:, before:], v[:, before:], spec, segments=seg, cache=view)
    assert out.shape == q.shape and out.dtype == q.dtype, (out.shape, out.dtype)
    return [out]


def _check_finite(tensors: list[Tensor]) -> None:
    if not all(bool(t.isfinite().all()) for t in tensors):
        raise FloatingPointError("not finite with dropout")


def _first_line(e: Exception) -> str:
    return (str(e).strip() or "no message").splitlines()[0]


@contextmanager
def _profiled(names: list[str]) -> Iterator[None]:
    """Adds to `names` those of the operators and device kernels that ran inside."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with _no_stderr():
        profiler = torch.profiler.profile(activities=activities)
        profiler.__enter__()
    try:
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    finally:
        with _no_stderr():
            profiler.__exit__(None, None, None)
    names += [e.key for e in profiler.key_averages()]


@contextmanager
def _no_stderr() -> Iterator[None]:
    """Mute file descriptor 2: PyTorch 2.13's profiler writes 'USDT: ... profiler_start' there."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
