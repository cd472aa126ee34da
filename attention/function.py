"""Kernels that compute their own gradient, as one function for autograd, torch.func and compile.

A kernel is a pair of functions of plain tensors (caps.Partial): forward() returns out and L, the
log-sum-exp, and backward() takes both. Only the inputs, out and L are saved, as tensors that
torch.autograd.graph.saved_tensors_hooks may move.

Second derivatives  Attention.backward() applies another Function, Gradient, to everything that the
        gradient depends on. Its own backward raises RuntimeError, so each path to a second
        derivative ends there, where once_differentiable would leave a zero.
torch.func  vmap makes the mapped dimension a part of the batch. Sinks and a dropout seed belong to
        one call: with them it is a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor

from .caps import Backend, Partial
from .machine.system import autocast_off
from .spec import Spec
from .views import Pair, for_any_shape, loadable

Options = tuple[Spec, int | None]


@partial(for_any_shape, lse=True)
def attention(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, kernel: Partial,
    segments: Tensor | Pair = None, sinks: Tensor | None = None, seed: Tensor | None = None,
    offset: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by a kernel: out (B, Tq, H, D) in q's dtype and the log-sum-exp (B, H, Tq), which
    has no gradient.

    Args:
        segments: of the keys (B, Tk), or a pair that the kernel receives as it is.
        sinks, seed: further arguments of the kernel, if there are any.
        offset: of the queries, as in visible(); None: Tk - Tq.
    """
    if isinstance(segments, Tensor):
        segments = segments[:, k.shape[1] - q.shape[1] :], segments
    how = kernel, (spec, offset), sinks, seed
    pair = (None, None) if segments is None else segments
    if torch.compiler.is_compiling():
        (q, k, v), link = torch.ops.nanoattn.enter([q, k, v])
        out, L = Traced.apply(*how, q, k, v, *pair)
        return torch.ops.nanoattn.leave(out, link), L
    if not torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
        return Attention.forward(*how, q, k, v, *pair)  # apply() would double the time of decoding
    return Attention.apply(*how, q, k, v, *pair)


def whole(backend: Backend) -> Callable[..., Tensor]:
    """An attend() by Backend.partial, as flash-attn's functions call it for the log-sum-exp."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: object) -> Tensor:
        return attention(q, k, v, spec, kernel=backend.partial, **options)[0]

    return attend


def _arguments(options: Options, sinks: Tensor | None, seed: Tensor | None, q: Tensor, k: Tensor,
               seg_q: Tensor | None, seg_k: Tensor | None) -> tuple[object, ...]:
    """The arguments of Partial's functions after the tensors."""
    (spec, offset), pair = options, None if seg_q is None else (seg_q, seg_k)
    more = () if sinks is None and seed is None else (sinks, seed)
    return spec, k.shape[1] - q.shape[1] if offset is None else offset, pair, *more


class Mapped(torch.autograd.Function):
    @classmethod
    def vmap(
        cls, info: Any, in_dims: tuple[int | None, ...], *args: Any
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """apply() over one more dimension of the tensors, the first two of which are sinks and a
        seed; apply() itself never sees it."""
        how, tensors, dims, N = args[:2], args[2:], in_dims[2:], info.batch_size
        first = [t if t is None or d is None else t.movedim(d, 0) for t, d in zip(tensors, dims)]
        if tensors[0] is None and tensors[1] is None:
            rows = (  # contiguous: kernels read out and L as they wrote them
                t
                if t is None
                else (t.expand(N, *t.shape) if d is None else t).flatten(0, 1).contiguous()
                for t, d in zip(first, dims)
            )
            found = [out.unflatten(0, (N, -1)) for out in cls.apply(*how, *rows)]
        else:
            calls = zip(*([t] * N if d is None or t is None else t for t, d in zip(first, dims)))
            found = [torch.stack(outs) for outs in zip(*(cls.apply(*how, *call) for call in calls))]
        return tuple(found), (0,) * len(found)


class Attention(Mapped):
    @staticmethod
    def forward(
        kernel: Partial, options: Options, sinks: Tensor | None, seed: Tensor | None, q: Tensor,
        k: Tensor, v: Tensor, seg_q: Tensor | None, seg_k: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        # No *args: torch.compile takes these parameters for one less than there are.
        out, L = kernel.forward(q, k, v, *_arguments(options, sinks, seed, q, k, seg_q, seg_k))
        return out.to(q.dtype), L

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[object, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.kernel = inputs[:2]
        ctx.save_for_backward(*inputs[2:], *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        sinks, seed, *tensors = ctx.saved_tensors
        compiled = torch.compiler.is_compiling()
        gradient: Callable[..., Any] = Gradient.forward if compiled else Gradient.apply
        dq, dk, dv, *dsinks = gradient(*ctx.kernel, sinks, seed, dout, *tensors)
        return None, None, dsinks[0] if dsinks else None, None, dq, dk, dv, None, None


class Traced(torch.autograd.Function):
    """Attention in the older style, the only one that torch.compile traces before PyTorch 2.7."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        out, L = Attention.forward(*inputs)
        # Dynamo of torch 2.11 returns every intermediate tensor too. `to` without a cast, or
        # contiguous, gives the same tensor twice; dout goes to the other: dq, dk and dv are zeros.
        output = out.view_as(out), L
        Attention.setup_context(ctx, inputs, output)
        return output

    backward = Attention.backward


class Gradient(Mapped):
    @staticmethod
    def forward(
        kernel: Partial, options: Options, sinks: Tensor | None, seed: Tensor | None, dout: Tensor,
        q: Tensor, k: Tensor, v: Tensor, seg_q: Tensor | None, seg_k: Tensor | None, out: Tensor,
        L: Tensor,
    ) -> tuple[Tensor, ...]:
        more = _arguments(options, sinks, seed, q, k, seg_q, seg_k)
        # Dynamo of torch 2.5 traces no question for the gradient's layout.
        dout = dout.contiguous() if torch.compiler.is_compiling() else loadable(dout)
        with autocast_off(q):  # here autograd calls, in whatever context
            grads = kernel.backward(dout, q, k, v, out, L, *more)
        inputs = (q, k, v) if sinks is None else (q, k, v, sinks)
        return tuple(g.to(t.dtype) for g, t in zip(grads, inputs, strict=True))

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: object, *_: Tensor) -> NoReturn:
        raise RuntimeError(
            "no second derivative here; of the attention kernels, manual and sdpa_math have one"
        )


class Dense(torch.autograd.Function):
    """The identity; the gradient becomes contiguous and aligned."""

    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor) -> Tensor:
        return out.view_as(out)

    setup_context = Gradient.setup_context

    @staticmethod
    def backward(ctx: object, dout: Tensor) -> Tensor:
        return loadable(dout.contiguous())


def dense_gradient(out: Tensor) -> Tensor:
    """out of a library's own autograd function, (B, T, H, D) or (T, H, D), whose gradient is
    contiguous where the library receives it.

    Libraries load 16 bytes at once and check no address. cuDNN's plan in PyTorch (2.11) is kept for
    the layout of q, k and v alone: with a gradient in another layout than the first call's it
    gives wrong numbers.
    """
    if not (out.is_cuda and out.requires_grad):
        return out
    return torch.ops.nanoattn.dense(out) if torch.compiler.is_compiling() else Dense.apply(out)


# --- inside torch.compile ---
# Dynamo leaves these operators whole, and traces backward() of all other Functions without a
# gradient of its own. Its backend "eager" would then take a second derivative for zero.


class Once(torch.autograd.Function):
    """The first n tensors, which depend on all of them; without a second derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(n: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tuple(None if t is None else t.view_as(t) for t in tensors[:n])

    setup_context = Gradient.setup_context
    backward = Gradient.backward


def once(n: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """The first n tensors, gradients that depend on all others: their own derivative raises
    RuntimeError. While torch.compile traces, traced_once() sees to that."""
    return tensors[:n] if torch.compiler.is_compiling() else Once.apply(n, *tensors)


def traced_once(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """function(*tensors), which calls a Function without a second derivative."""
    if not torch.compiler.is_compiling():
        return function(*tensors)
    tensors, link = torch.ops.nanoattn.enter(list(tensors))
    return torch.ops.nanoattn.leave(function(*tensors), link)


class Enter(torch.autograd.Function):
    """The tensors, and an empty one whose gradient, from Leave, depends on that of the output."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return *(t.view_as(t) for t in tensors), tensors[0].new_empty(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return Once.apply(len(grads) - 1, *grads, *ctx.saved_tensors)


class Leave(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(out: Tensor, link: Tensor) -> Tensor:
        return out.view_as(out)

    setup_context = Gradient.setup_context

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor]:
        return dout, dout.flatten()[:0]


def enter(tensors: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    *inside, link = Enter.apply(*tensors)
    return inside, link


library = torch.library.Library("nanoattn", "FRAGMENT")
for schema, function in (
    ("dense(Tensor out) -> Tensor", Dense.apply),
    ("enter(Tensor[] tensors) -> (Tensor[], Tensor)", enter),
    ("leave(Tensor out, Tensor link) -> Tensor", Leave.apply),
):
    library.define(schema)
    library.impl(schema.partition("(")[0], function, "CompositeImplicitAutograd")
