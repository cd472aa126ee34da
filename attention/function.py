"""Kernels with their own gradient (caps.Partial), for autograd and torch.compile.

A second derivative raises RuntimeError (once_differentiable would give zero)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, NoReturn

import torch
from torch import Tensor

from .caps import Backend, Partial
from .machine.system import P, R, autocast_off
from .masks import Pair, for_any_shape, loadable
from .spec import Spec


@partial(for_any_shape, lse=True)
def attention(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, kernel: Partial,
              segments: Tensor | Pair = None, sinks: Tensor | None = None,
              seed: Tensor | None = None, offset: int | None = None,
              alibi_slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return out in q's dtype and L (B, H, Tq), without gradient; segments (B, Tk) or of both."""
    if isinstance(segments, Tensor):
        segments = segments[:, k.shape[1] - q.shape[1] :], segments
    offset = k.shape[1] - q.shape[1] if offset is None else offset
    pair = (None, None) if segments is None else segments
    inputs = kernel, spec, offset, q, k, v, sinks, seed, alibi_slopes, *pair
    if not torch.is_grad_enabled():  # apply() is slow in decoding
        return Attention.forward(*inputs)
    return Attention.apply(*inputs)


def whole(backend: Backend) -> Callable[..., Tensor]:
    return lambda *args, **options: attention(*args, kernel=backend.partial, **options)[0]


def _run(f: Callable[..., Any], spec: Spec, offset: int, tensors: tuple[Tensor, ...],
         *more: Tensor | None) -> Any:
    """`more`: sinks, seed, alibi_slopes, only passed if given; seg_q, seg_k."""
    *given, seg_q, seg_k = more
    segments = None if seg_q is None else (seg_q, seg_k)
    options = zip(("sinks", "seed", "alibi_slopes"), given)
    with autocast_off(tensors[0]):  # backward runs in autograd's context
        return f(*tensors, spec, offset, segments, **{n: t for n, t in options if t is not None})


class Attention(torch.autograd.Function):
    @staticmethod  # torch.compile counts *args as one parameter less
    def forward(kernel: Partial, spec: Spec, offset: int, q: Tensor, k: Tensor, v: Tensor,
                sinks: Tensor | None, seed: Tensor | None, alibi: Tensor | None,
                seg_q: Tensor | None, seg_k: Tensor | None) -> tuple[Tensor, Tensor]:
        more = sinks, seed, alibi, seg_q, seg_k
        out, L = _run(kernel.forward, spec, offset, (q, k, v), *more)
        out = out.to(q.dtype)
        # Dynamo (2.11) also returns intermediates: dout would go to `out` before `to`.
        return out.view_as(out), L

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.call = inputs[:3]
        ctx.save_for_backward(*output, *inputs[3:])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        kernel, spec, offset = ctx.call
        tensors = dout, *ctx.saved_tensors

        def gradient(*tensors: Tensor) -> tuple[Tensor, ...]:
            dout, out, L, q, k, v, *more = tensors
            rows = loadable(dout), q, k, v, out, L
            grads = _run(kernel.backward, spec, offset, rows, *more)
            return tuple(g.to(t.dtype) for g, t in zip(grads, (q, k, v, more[0])))

        compute = gradient if torch.compiler.is_compiling() else partial(Once.apply, gradient)
        dq, dk, dv, *dsinks = compute(*tensors)
        return None, None, None, dq, dk, dv, *(dsinks or [None]), None, None, None, None


class Once(torch.autograd.Function):
    """A gradient whose own derivative is an error."""

    @staticmethod
    def forward(compute: Callable[..., Any], *tensors: Tensor | None) -> Any:
        return compute(*tensors)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: object) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *_: Tensor) -> NoReturn:
        raise RuntimeError("no second derivative here: of the attention kernels, manual and "
                           "sdpa_math have one")


def once(n: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The first n tensors, gradients of the others, whose derivative is an error."""

    def first(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:n])

    return tensors[:n] if torch.compiler.is_compiling() else Once.apply(first, *tensors)


class Dense(torch.autograd.Function):
    @staticmethod
    def forward(out: Tensor) -> Tensor:
        return out.view_as(out)

    setup_context = Once.setup_context

    @staticmethod
    def backward(ctx: object, dout: Tensor) -> Tensor:
        return loadable(dout.contiguous())


def dense_gradient(out: Tensor) -> Tensor:
    """Make out's gradient contiguous: cuDNN in PyTorch 2.11 is wrong for a second layout."""
    return Dense.apply(out) if out.is_cuda and out.requires_grad else out


def not_compiled(f: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable(f) without importing torch._dynamo, which is slow."""
    made: list[Callable[P, R]] = []

    @wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if "torch._dynamo" not in sys.modules:
            return f(*args, **kwargs)
        if not made:
            made.append(torch.compiler.disable(f))
        return made[0](*args, **kwargs)

    # Dynamo stops here, and prints why.
    vars(call).update(_torchdynamo_disable=True, _torchdynamo_disable_msg=(
        "no graph can hold it: take another attention backend, or fullgraph=False"))
    return call
