"""The clock of autotune.py and of python -m attention: one attention call, as a model makes it."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attention.spec import Backend, Spec
from attention.system import own_code, synchronize
from attention.views import PagedView, StaticView, filled_cache

Shape = tuple[int, int, int]  # B sequences, Tq queries and Tk keys each


class Inputs(NamedTuple):
    """What a model hands to attention."""

    qkv: Tensor  # (B, Tq, (H + 2 Hkv) D), the projection's output
    past: tuple[Tensor, Tensor] | None  # k, v of a cache; None: they are those in qkv
    segments: Tensor | None  # (B, Tk) int32
    view: PagedView | StaticView | None  # of a static or paged cache
    dout: Tensor  # (B, Tq, H D)


def draw(spec: Spec, device: torch.device, shape: Shape) -> Inputs:
    """Random inputs with the strides that a model gives them."""
    B, Tq, Tk = shape
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    kind: dict[str, Any] = {"device": device, "dtype": getattr(torch, spec.dtype)}
    qkv = torch.randn(B, Tq, (H + 2 * Hkv) * D, **kind).requires_grad_(spec.grad)
    past = view = segments = None
    if Tq != Tk or spec.cache in ("static", "paged"):
        k, v = torch.randn(2, B, Tk, Hkv, D, **kind)
        k, v, view_of = filled_cache(k, v, spec)
        past, view = (k, v), view_of([Tk - Tq] * B, [Tq] * B)
    if spec.segments:  # two documents
        segments = (torch.arange(Tk, device=device) >= Tk // 2).int().expand(B, Tk).contiguous()
    return Inputs(qkv, past, segments, view, torch.randn(B, Tq, H * D, **kind))


def work(backend: Backend, spec: Spec, inputs: Inputs) -> Callable[[], None]:
    """One attention call as the model makes it, with the backward where spec.grad asks for it."""
    H, Hkv, D = spec.n_head, spec.n_kv_head, spec.head_dim
    attend = backend.attend

    def forward(qkv: Tensor, past: Any, segments: Tensor | None, view: Any) -> Tensor:
        q, k, v = (t.unflatten(2, (-1, D)) for t in qkv.split([H * D, Hkv * D, Hkv * D], dim=2))
        if past is not None:
            k, v = past
        return attend(q, k, v, spec, segments=segments, cache=view).flatten(2)

    run: Any = forward
    if spec.compiled:
        run = torch.compile(own_code(forward, f"forward_{backend.name}"), dynamic=False)
    *given, dout = inputs

    def call() -> None:
        with torch.set_grad_enabled(spec.grad):
            out = run(*given)
            if spec.grad:
                torch.autograd.grad(out, inputs.qkv, dout)

    return call


def seconds(call: Callable[[], None], device: torch.device, n: int = 1) -> float:
    """How long a call takes, the mean of n in a row; on CUDA by the clock of the device."""
    synchronize(device)
    if device.type == "cuda":
        with torch.cuda.device(device):  # events are of the current device
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(n):
                call()
            end.record()
            synchronize(device)
        return start.elapsed_time(end) / 1e3 / n
    began = perf_counter()
    for _ in range(n):
        call()
    synchronize(device)
    return (perf_counter() - began) / n
