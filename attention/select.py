"""From a backend's name to the one that will run, with every reason why others will not.

resolve()  is pure: it decides from what the backends declare, for any described machine, so what
           an RTX 4090 or an Apple laptop would run is tested anywhere.
probe()    runs the kernel. An installed package may fail to import, an imported one to run, and
           the kernel that runs may not be the one that was named. So it runs once, forward and
           backward, at the real dtype, head_dim and head counts, on ordinary and on large scores;
           its results are compared with manual's, a later token is changed to check that no
           earlier output moves, and the profiler tells which kernels ran.
select()   does both until a backend passes: what a model calls.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from . import flash, flex, manual, own, paged, sdpa, sdpa_bmm, tiled, triton_flash
from .flash_impl import flash_impl
from .spec import Backend, BackendUnavailable, Machine, Policy, Refusal, Resolution, Spec
from .system import first_line, profiled
from .views import filled_cache

log = logging.getLogger("nanoattn")

# Every kernel there is. A new one is a file with a BACKEND, imported above and named here.
BACKENDS: dict[str, Backend] = {
    b.name: b
    for b in (
        manual.BACKEND, tiled.BACKEND, sdpa.BACKEND, sdpa.FLASH, sdpa.EFFICIENT, sdpa.CUDNN,
        sdpa.MATH, sdpa_bmm.BACKEND, flex.BACKEND, triton_flash.BACKEND, flash.V2, flash.V3,
        flash.V4, paged.BACKEND,
    )
}  # fmt: skip
RULES = ("auto", "fastest")  # not kernels: they choose one. autotune.py measures for "fastest"
_BY_ANY_NAME = {n: b for b in BACKENDS.values() for n in (b.name, *b.aliases)}

MPS_GUARD = Refusal(
    "on Apple's Metal it has given NaN and leaked future tokens "
    "(--allow_mps_sdpa=True runs it all the same)",
    "device",
)


def get(name: str) -> Backend:
    """The backend with that name or alias, or the one that a file defines, which is run (own.py).

    Raises:
        ValueError: unknown name; the message lists the known ones.
        BackendUnavailable: the file defines no backend that can be used.
    """
    if own.is_file(name):
        return own.load(name, _BY_ANY_NAME, RULES)
    if name not in _BY_ANY_NAME:
        near = difflib.get_close_matches(name, [*_BY_ANY_NAME, *RULES], n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join([*RULES, *_BY_ANY_NAME])
        raise ValueError(f"unknown attention backend {name!r}; {hint}known: {known}")
    return _BY_ANY_NAME[name]


def check_name(name: str) -> None:
    """A ValueError where no backend has that name. A file is not run, nor is it looked for."""
    if not (name in RULES or own.is_file(name)):
        get(name)


def packages(*names: str) -> tuple[str, ...]:
    """The import names of all packages that any backend needs, files among `names` included."""
    backends = [*BACKENDS.values(), *(get(name) for name in names if own.is_file(name))]
    rows = (c for b in backends for c in b.caps)
    return tuple(dict.fromkeys(p.partition(">=")[0] for c in rows for p in c.packages))


# --- resolve: what the backends declare ---


def _first_of_auto(spec: Spec, machine: Machine) -> str:
    """The first name that "auto" tries: the latest FlashAttention that is installed and supports
    this, else PyTorch's SDPA (which falls back to manual on Apple's Metal), or paged. To train on a
    CPU with matrix units it is SDPA with another backward, where that supports it. With a softcap
    or sinks it is what _without_sdpa() says."""
    if machine.device == "cuda":
        for name in ("flash_attn_4", "flash_attn_3", "flash_attn_2"):
            if name in BACKENDS and not BACKENDS[name].why_not(spec, machine):
                return name
    trains = spec.grad and not spec.compiled
    if machine.matrix_units and trains and not sdpa_bmm.BACKEND.why_not(spec, machine):
        return "sdpa_bmm"
    if spec.cache == "paged":
        return "paged"
    return _without_sdpa(spec, machine) if spec.softcap or spec.sinks else "sdpa"


def _without_sdpa(spec: Spec, machine: Machine, rejected: Iterable[str] = ()) -> str:
    """What to try where SDPA cannot: manual; but for a softcap or sinks, which SDPA has nowhere, on
    CUDA first the fused kernels that have them, rather than hold all scores."""
    fused = ("flex", "triton") if spec.softcap or spec.sinks else ()
    able = (name for name in fused if not BACKENDS[name].why_not(spec, machine))
    on_cuda = (name for name in able if machine.device == "cuda" and name not in rejected)
    return next(on_cuda, "manual")


def resolve(
    name: str, spec: Spec, machine: Machine, policy: Policy = Policy(), *,
    failed: Mapping[str, tuple[str, ...]] | None = None,
) -> Resolution:  # fmt: skip
    """Choose the backend that will run.

    Args:
        name: a backend's name, alias or file; or "auto", which names no kernel: it may fall back
            even with policy.fallback=False, and what it skips at first is not reported.
        failed: backends known not to run here, whatever they declare, with the reasons.

    Raises:
        ValueError: unknown name.
        BackendUnavailable: refused, with no fallback left or allowed; lists every reason.
    """
    failed = failed or {}
    strict = not policy.fallback and name not in RULES
    backend = get(_first_of_auto(spec, machine) if name in RULES else name)
    rejected: dict[str, tuple[str, ...]] = {}
    while True:
        why = [*backend.why_not(spec, machine), *failed.get(backend.name, ())]
        on_metal = machine.device == "mps" and backend.name in ("sdpa", "sdpa_math")
        if on_metal and not policy.mps_sdpa:
            why.append(MPS_GUARD)
        if not why:
            return Resolution(name, backend, rejected)
        rejected[backend.name] = tuple(why)
        after = backend.fallback
        if after is not None and "sdpa" in rejected:
            after = _without_sdpa(spec, machine, rejected)
        if after is None and spec.cache == "paged":  # the one thing manual cannot do
            after = "paged"
        if strict or after is None or after in rejected:
            reasons = ". ".join(f"{n}: {'; '.join(w)}" for n, w in rejected.items())
            raise BackendUnavailable(f"attention backend {name!r} cannot run here. {reasons}")
        backend = get(after)


# --- select and announce ---


def select(
    name: str, spec: Spec, device: str | torch.device, policy: Policy = Policy(), *,
    shape: tuple[int, int] | None = None,
) -> Resolution:  # fmt: skip
    """Resolve `name` on this machine, falling back until a backend passes the probe.

    Args:
        shape: batch size and tokens a sequence, if known, for math_note().
    """
    machine = Machine.here(str(device), packages(name))
    failed: dict[str, tuple[str, ...]] = {}
    while True:
        chosen = resolve(name, spec, machine, policy, failed=failed)
        tried = probe(chosen.backend, spec, device)
        if not tried.why:
            note = math_note(chosen.backend, spec, shape) if "math" in tried.kernels else ""
            return replace(chosen, kernels=tried.kernels, note=note, proof=tried.proof)
        failed[chosen.backend.name] = tried.why


def math_note(backend: Backend, spec: Spec, shape: tuple[int, int] | None) -> str:
    """A warning where PyTorch's math kernel would hold more than 1 GB of scores; else empty.

    It keeps the scores and their softmax, (B, H, T, T) each, in at least float32.
    """
    B, T = shape or (0, 0)
    size = 2 * (8 if spec.dtype == "float64" else 4) * B * spec.n_head * T * T
    if size <= 1e9:
        return ""
    return (
        f"{backend.name} runs PyTorch's math kernel here, which holds every score: "
        f"{size / 1e9:.1f} GB in each layer at batch size {B} and {T:,} tokens.\n"
        "What the fused kernels refuse, python -m attention tells; --attention_backend=tiled needs "
        "no such memory."
    )


def announce(chosen: Resolution, phase: str = "") -> None:
    """Log what will run and what was refused: once a process, on rank 0 only."""
    if int(os.environ.get("RANK", "0")):
        return
    for warning in chosen.warnings():
        _once(logging.WARNING, warning.replace("\n", "\n         "))
    _once(logging.INFO, chosen.info() + phase)


@cache
def _once(level: int, text: str) -> None:
    log.log(level, text)


# --- probe: a real run ---

# Attention operators as the profiler names them, and their usual names.
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


# The probe's second sequence has its queries scaled by this: scores with a standard deviation of
# LARGE, some beyond 88, where exp() overflows in float32, and in most rows one key dominates.
# Trained models have such scores, and kernels have failed on them only (NVIDIA/TransformerEngine
# issue 3216).
LARGE = 32


@dataclass(frozen=True)
class Probe:
    """The result of running a backend once."""

    why: tuple[str, ...] = ()  # why it cannot be used; empty: its results are right
    kernels: tuple[str, ...] = ()  # short names: "flash", "math"
    events: tuple[str, ...] = ()  # the profiler's own names, device kernels included
    # "error": max |out - float64| over max |float64| on ordinary scores, and "allowed", in the same
    # unit; "grad_error" and "grad_allowed": the same for the gradient closest to its limit, None
    # without gradients; "canary": did earlier outputs stay when the last token changed?
    proof: dict[str, Any] | None = None  # None: it failed before it had results

    @property
    def error(self) -> float | None:
        return self.proof["error"] if self.proof else None


def probe(backend: Backend, spec: Spec, device: str | torch.device, T: int = 64) -> Probe:
    """Run `backend` once, forward and, if `spec.grad`, backward, at batch 2 and length T.

    A cache is filled with all T tokens, and the queries come in chunks, then one by one. The random
    state is restored.
    """
    # A window longer than T would not be tested. No gradient flows through a cache.
    window, grad = spec.window and min(spec.window, T // 2), spec.grad and spec.cache == "none"
    spec = replace(spec, window=window, grad=grad)
    quiet = replace(spec, dropout=0.0)
    exact_on = torch.device("cpu") if torch.device(device).type == "mps" else torch.device(device)
    draw = torch.Generator().manual_seed(0)
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    cached = spec.cache in ("static", "paged")
    run = run_cached if cached else _run
    out, plain, truth = [], [], []
    events: list[str] = []
    with torch.random.fork_rng(devices), torch.enable_grad():
        # Inference also continues a prefix, with fewer queries than keys.
        for Tq in (T,) if spec.grad or cached else (T // 3, T):
            inputs, seg = _inputs(spec, device, Tq, T, draw)
            exact = [t.to(exact_on).double() for t in inputs]
            exact_seg = None if seg is None else seg.to(exact_on)
            plain += _run(manual.attend, inputs, seg, quiet)
            truth += _run(manual.attend, exact, exact_seg, replace(quiet, dtype="float64"))
            try:
                # The kernels are read from the last run: as many queries as keys, and dropout.
                with nullcontext() if Tq < T or spec.dropout else profiled(events):
                    out += run(backend.attend, inputs, seg, quiet)
                if spec.dropout:  # random: only that it runs, and is finite, can be checked
                    with nullcontext() if Tq < T else profiled(events):
                        tried = run(backend.attend, inputs, seg, spec)
                    if not all(bool(t.isfinite().all()) for t in tried):
                        raise FloatingPointError("not finite with dropout")
                if Tq == T:
                    for _ in range(3):  # a library may round differently once, as under load
                        leak = leakage(partial(run, backend.attend), inputs, seg, quiet)
                        if leak == 0:
                            break
            except Exception as e:  # whatever a kernel raises is the reason to refuse it
                words = f"{type(e).__name__}: {first_line(e)}"
                return Probe(why=(f"it failed when it was tried ({words})",))
    names = (
        ("out", "dq", "dk", "dv", "dsinks")[: len(out)]
        if spec.grad
        else ("out after a prefix", "out")[-len(out) :]
    )
    out, plain, truth = ([x.double().cpu() for x in xs] for xs in (out, plain, truth))
    # The gradient of the sinks is a sum over both sequences: it belongs to the larger scores.
    found, large = (
        _deviations(names, *([x[b] if x.dim() == 4 else b * x for x in xs]
                             for xs in (out, plain, truth)),
                    dtype=inputs[0].dtype, scale=scale)
        for b, scale in enumerate((1, LARGE)))  # fmt: skip
    why = _wrong(found) or [f"{text}, on large scores" for text in _wrong(large)]
    if not why and leak != 0:
        why = [f"a later token moves earlier outputs, by up to {leak:.2g}"]
    most = [d for d in found if not d.where and d.size]
    o = next(d for d in most if d.name == "out")
    g = max((d for d in most if d.name[0] == "d"), key=lambda d: d.off / d.allowed, default=None)
    proof = {
        "error": o.off / o.size,
        "allowed": o.allowed / o.size,
        "grad_error": g and g.off / g.size,
        "grad_allowed": g and g.allowed / g.size,
        "canary": leak == 0,
    }
    kernels = tuple(dict.fromkeys(_kernel(e) for e in events if e in KERNELS))
    return Probe(tuple(f"its numbers are wrong ({w})" for w in why), kernels, tuple(events), proof)


def leakage(run: Callable[..., list[Tensor]], inputs: list[Tensor], seg: Tensor | None,
          spec: Spec) -> float:  # fmt: skip
    """By how much the earlier outputs move when q, k and v of the last token change."""
    before = run(inputs, seg, spec, backward=False)[0]
    last = [t[:, -1].clone() for t in inputs[:3]]
    for t in inputs[:3]:
        t[:, -1] = 3 - t[:, -1]
    after = run(inputs, seg, spec, backward=False)[0]
    for t, kept in zip(inputs, last, strict=False):
        t[:, -1] = kept
    return float((after.double() - before.double())[:, :-1].abs().max())


class Deviation(NamedTuple):
    """The error of one tensor, its largest or its root mean square."""

    name: str
    where: str  # "", or " in the mean"
    off: float
    allowed: float
    size: float  # of the truth


def _deviations(names: tuple[str, ...], out: list[Tensor], plain: list[Tensor],
                truth: list[Tensor], *, dtype: torch.dtype,
                scale: float) -> list[Deviation]:  # fmt: skip
    """Of each tensor the largest error, then the root mean square: rows that see few keys have
    large values, which would hide an error of a few percent in the others."""

    def most(x: Tensor) -> float:
        return float(x.abs().max())

    def root_mean_square(x: Tensor) -> float:
        return float(x.square().mean().sqrt())

    largest = max(map(most, truth))
    found = []
    for name, o, p, t in zip(names, out, plain, truth, strict=True):
        m = 3 if name.startswith("d") else 2
        for size, where in ((most, ""), (root_mean_square, " in the mean")):
            allowed = allowed_error(size(p - t), size(t), scale * largest, dtype, m)
            found.append(Deviation(name, where, size(o - t), allowed, size(t)))
    return found


def _wrong(found: list[Deviation]) -> list[str]:
    """The tensors whose error is more than allowed, a text each; empty: none."""
    texts: dict[str, str] = {}
    for d in found:
        if not d.off <= d.allowed:  # written so that NaN fails
            text = f"{d.name} is off by {d.off:.2g}{d.where}, {d.allowed:.2g} is allowed"
            texts.setdefault(d.name, text)
    return list(texts.values())


def allowed_error(
    plain: float, size: float, largest: float, dtype: torch.dtype, m: int = 2
) -> float:
    """The largest allowed error of a kernel: the policy of attention/oracle.py, simplified.

    m times the error of manual in the same dtype, plus one rounding error at this size, plus 32 at
    the largest value in the precision that kernels compute in (float32 for half precision): manual
    may be exact by luck where a correct kernel rounds. Scores that are LARGE times as large have
    rounding errors LARGE times as large: there `largest` is scaled accordingly.
    """
    eps = torch.finfo(dtype).eps
    return m * plain + eps * size + 32 * min(eps, torch.finfo(torch.float32).eps) * largest


def _inputs(spec: Spec, device: Any, Tq: int, T: int,
            draw: torch.Generator) -> tuple[list[Tensor], Tensor | None]:  # fmt: skip
    """q, k, v, slices of one tensor as in a model, the output's gradient, and sinks if there are
    any; segments."""
    dtype = getattr(torch, spec.dtype)
    B, H, Hkv, D = 2, spec.n_head, spec.n_kv_head, spec.head_dim
    qkv = torch.randn(B, T, (H + 2 * Hkv) * D, generator=draw)
    qkv[1, :, : H * D] *= LARGE
    qkv = qkv.to(device, dtype)
    q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
    seg = (torch.arange(T) >= T // 3).int().expand(B, T).contiguous() if spec.segments else None
    dout = torch.randn(B, Tq, H, D, generator=draw).to(device, dtype)
    sinks = [torch.randn(H, generator=draw).add(3).to(device, dtype)] if spec.sinks else []
    return [q[:, T - Tq :], k, v, dout, *sinks], None if seg is None else seg.to(device)


def _run(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
         spec: Spec, backward: bool = True) -> list[Tensor]:  # fmt: skip
    """The output and, with spec.grad and unless disabled, the gradients of q, k, v and sinks."""
    q, k, v, dout, *sinks = (t.detach().requires_grad_(spec.grad) for t in inputs)
    out = attend(q, k, v, spec, segments=seg, **({"sinks": sinks[0]} if sinks else {}))
    assert out.shape == q.shape and out.dtype == q.dtype, (out.shape, out.dtype)
    grads = torch.autograd.grad(out, (q, k, v, *sinks), dout) if spec.grad and backward else ()
    return [out.detach(), *grads]


@torch.no_grad()
def run_cached(attend: Callable[..., Tensor], inputs: list[Tensor], seg: Tensor | None,
                spec: Spec, backward: bool = False) -> list[Tensor]:  # fmt: skip
    """The same output through a cache: two chunks, then single tokens; rows of two lengths."""
    q, k, v, _, *sinks = inputs
    more = {"sinks": sinks[0]} if sinks else {}
    T, out = q.shape[1], torch.empty_like(q)
    k, v, view = filled_cache(k, v, spec)
    lengths = [0, 0]
    for counts in ((T // 2, T // 3), (T - T // 2 - 3, T - T // 3 - 2), (1, 1), (1, 1), (1, 0)):
        spans = [slice(n, n + m) for n, m in zip(lengths, counts, strict=True)]
        padded = pad_sequence([q[b, at] for b, at in enumerate(spans)], True)
        got = attend(padded, k, v, spec, segments=seg, cache=view(lengths, counts), **more)
        assert got.shape == padded.shape and got.dtype == out.dtype, (got.shape, got.dtype)
        for b, at in enumerate(spans):
            out[b, at] = got[b, : counts[b]]
        lengths = [at.stop for at in spans]
    return [out]


def _kernel(event: str) -> str:
    """Its usual name; PyTorch's flash operator on CUDA may run another generation's kernel."""
    swapped = KERNELS[event] == "flash" and flash_impl() != "FA2"
    return f"flash ({flash_impl()})" if swapped else KERNELS[event]
