"""probe(): a backend, run once before anything depends on it.

An installed package may fail to import, an imported one to run, and the kernel that runs may not be
the one that was named. So it runs forward and backward, at the real dtype, head_dim and head
counts, on ordinary and on large scores; its results are compared with manual's in float64, a later
token is changed to check that no earlier output moves, and the profiler tells which kernels ran.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from . import manual
from .flash_impl import flash_impl
from .ring import Ring
from .spec import Backend, Spec
from .system import first_line, profiled
from .views import filled_cache

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
    attend = Ring().attend(backend) if spec.lse else backend.attend
    out, plain, truth = [], [], []
    events: list[str] = []
    with torch.random.fork_rng(devices), torch.enable_grad():
        # Inference also continues a prefix, with fewer queries than keys.
        for Tq in (T,) if spec.grad or cached or spec.lse else (T // 3, T):
            inputs, seg = _inputs(spec, device, Tq, T, draw)
            exact = [t.to(exact_on).double() for t in inputs]
            exact_seg = None if seg is None else seg.to(exact_on)
            plain += _run(manual.attend, inputs, seg, quiet)
            truth += _run(manual.attend, exact, exact_seg, replace(quiet, dtype="float64"))
            try:
                # The kernels are read from the last run: as many queries as keys, and dropout.
                with nullcontext() if Tq < T or spec.dropout else profiled(events):
                    out += run(attend, inputs, seg, quiet)
                if spec.dropout:  # random: only that it runs, and is finite, can be checked
                    with nullcontext() if Tq < T else profiled(events):
                        tried = run(attend, inputs, seg, spec)
                    if not all(bool(t.isfinite().all()) for t in tried):
                        raise FloatingPointError("not finite with dropout")
                if Tq == T:
                    for _ in range(3):  # a library may round differently once, as under load
                        leak = leakage(partial(run, attend), inputs, seg, quiet)
                        if leak == 0:
                            break
            except Exception as e:  # whatever a kernel raises is the reason to refuse it
                words = f"{type(e).__name__}: {first_line(e)}"
                return Probe(why=(f"it failed when it was tried ({words})",))
    names = ["out after a prefix"] * (len(out) > 1 and not spec.grad)
    names += ["out", "dq", "dk", "dv", "dsinks"][: len(out) - len(names)]
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
    wrong = (f"its numbers are wrong ({'; '.join(why)})",) if why else ()
    return Probe(wrong, kernels, tuple(events), proof)


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


def _deviations(names: list[str], out: list[Tensor], plain: list[Tensor],
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
