"""A made-up "NVIDIA H200", so that the CUDA branches of every command run where there is no GPU.

install(), before anything asks torch.cuda, makes a process believe in one device. Its tensors say
that they are on "cuda:0" (`is_cuda` is true, autocast and autograd take CUDA's ways), and hold
their numbers in a tensor of the CPU, on which every operator is run. What is no hardware fact is as
strict as on a GPU:

- an operator with tensors of both devices is an error;
- a copy to pinned memory that is not waited for holds nonsense until somebody synchronizes, and an
  event has no time before that;
- memory is counted, and there is an end to it: torch.OutOfMemoryError;
- scaled_dot_product_attention takes CUDA's operators by CUDA's rules, and the profiler shows a
  kernel for every operator that would launch one (none with FAKE_CUDA_CUPTI=0).

What is made up: every time, the kernels' names, and what tensors of 64 MB or more hold: they have a
shape only, so that a measured peak takes no minutes. torch.compile returns what it is given.
Triton's kernels run in its interpreter, bfloat16 (which it cannot) in float32.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent, Kernel

NAME, CAPABILITY = "NVIDIA H200", (9, 0)
HUGE = 64 * 2**20  # bytes, from which on a tensor is a shape without numbers
DEVICES = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))  # all of a process's tensors say cuda:0
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
NONSENSE = -77  # what pinned memory holds before a copy to it is there
aten = torch.ops.aten


# ----------------------------------------------------------------------------- memory and time


class Memory:
    """Bytes that tensors hold; and that the allocator keeps, which only empty_cache() returns."""

    total = 139 * 2**30
    allocated = reserved = peak = 0
    blocks: ClassVar[weakref.WeakValueDictionary[int, Block]] = weakref.WeakValueDictionary()

    @classmethod
    def block(cls, numbers: Tensor, size: int) -> Block:
        """That of a tensor's storage, which views share."""
        key = numbers.untyped_storage()._cdata
        found = cls.blocks.get(key)
        if found is None or size > found.size:
            found = cls.blocks[key] = Block(size)
        return found


class Block:
    def __init__(self, size: int) -> None:
        self.size = 0
        if Memory.allocated + size > Memory.total:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {size / 2**30:.2f} GiB. GPU 0 has a total "
                f"capacity of {Memory.total / 2**30:.2f} GiB"
            )
        self.size = size
        Memory.allocated += size
        Memory.peak = max(Memory.peak, Memory.allocated)
        Memory.reserved = max(Memory.reserved, Memory.allocated)

    def __del__(self) -> None:
        if Memory is not None:  # the process ends
            Memory.allocated -= self.size


pending: list[tuple[Tensor, Tensor]] = []  # copies to pinned memory that nobody has waited for
done = 0  # events up to this number are known to be over


def synchronize(device: Any = None) -> None:
    global done
    done = Event.recorded
    for host, numbers in pending:
        host.copy_(numbers)
    pending.clear()


class Stream:
    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = CUDA

    def synchronize(self) -> None:
        synchronize()

    def wait_stream(self, other: Any) -> None:
        pass

    wait_event = record_event = wait_stream


class Event:
    recorded = 0

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.timing, self.number = enable_timing, 0

    def record(self, stream: Any = None) -> None:
        Event.recorded += 1
        self.number, self.at = Event.recorded, time.perf_counter()

    def query(self) -> bool:
        return self.number <= done

    def synchronize(self) -> None:
        synchronize()

    wait = synchronize

    def elapsed_time(self, end: Event) -> float:
        if not (self.timing and end.timing and self.number and end.number):
            raise ValueError("both events must have been recorded, and made with enable_timing")
        if max(self.number, end.number) > done:
            raise RuntimeError("CUDA error: device not ready (nobody has synchronized)")
        return max(1e3 * (end.at - self.at), 1e-6)


# ----------------------------------------------------------------------------- tensors


class Generator(torch.Generator):
    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != "cuda":
            return REAL["Generator"](device)
        return torch.Generator.__new__(cls, "cpu")

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        return CUDA


REAL: dict[str, Any] = {
    "Generator": torch.Generator,
    "empty": torch.empty,
    "join": torch.distributed.init_process_group,
    "tensor": torch.tensor,
    "as_tensor": torch.as_tensor,
    "sdpa": F.scaled_dot_product_attention,
}
GENERATOR: Any = None  # the device's own


class CudaTensor(torch.Tensor):
    """A tensor that says that it is on the GPU; `numbers` are on the CPU."""

    numbers: Tensor
    block: Block

    @staticmethod
    def __new__(cls, numbers: Tensor) -> CudaTensor:
        made: Any = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, numbers.size(), strides=numbers.stride(), dtype=numbers.dtype, device=CUDA,
            storage_offset=numbers.storage_offset(),
        )
        made.numbers = numbers
        made.block = Memory.block(numbers, numbers.untyped_storage().nbytes())
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaTensor({self.numbers})"

    def __format__(self, how: str) -> str:
        return format(self.item(), how) if self.dim() == 0 else repr(self)

    def untyped_storage(self) -> Any:
        return self.numbers.untyped_storage()

    def data_ptr(self) -> int:
        return self.numbers.data_ptr()

    def __reduce_ex__(self, protocol: Any) -> Any:  # in a file it is a tensor of the CPU
        return self.numbers.__reduce_ex__(protocol)

    def record_stream(self, stream: Any) -> None:
        pass

    def tolist(self) -> Any:
        return self.cpu().tolist()

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(op, *args, **(kwargs or {}))


def tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors(value)


def inner(value: Any) -> Any:
    if isinstance(value, CudaTensor):
        return value.numbers
    if isinstance(value, (list, tuple)):
        return type(value)(map(inner, value))
    return value


@functools.cache
def facts(op: Any) -> tuple[dict[int, int], bool, bool, list[str]]:
    """Of an operator: which returns are which arguments, written to; whether it draws; whether it
    gives views only; and the names of its arguments."""
    schema = op._schema
    written = {
        i: j
        for i, returned in enumerate(schema.returns)
        for j, argument in enumerate(schema.arguments)
        if (a := argument.alias_info) and (r := returned.alias_info) and a.is_write
        and a.before_set == r.before_set
    }
    names = [a.name for a in schema.arguments]
    views = all(r.alias_info and not r.alias_info.is_write for r in schema.returns)
    return written, "generator" in names, views, names


inside = threading.local()


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """One operator: on the CPU, its results back on the device that they belong to."""
    if getattr(inside, "an_operator", False):
        return carry_out(op, args, kwargs)
    inside.an_operator = True
    recorded = torch._C._autograd._enable_record_function  # type: ignore[attr-defined]
    recorded(False)  # a profiler sees what a GPU would run, not how it is done here
    try:
        return carry_out(op, args, kwargs)
    finally:
        recorded(True)
        inside.an_operator = False


def carry_out(op: Any, args: Any, kwargs: Any) -> Any:
    if op in OWN:
        return OWN[op](*args, **kwargs)
    written, draws, views, names = facts(op)
    given = list(tensors((*args, *kwargs.values())))
    on_cuda = [t for t in given if isinstance(t, CudaTensor)]
    target = kwargs.get("device")
    stays = target is None or torch.device(target).type == "cuda"
    if on_cuda and op not in MIXED:
        foreign = [t for t in given if not isinstance(t, CudaTensor) and t.dim()]
        if foreign:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found cuda:0 and cpu ({op})"
            )
    if "device" in kwargs:
        kwargs["device"] = CPU
    if kwargs.get("pin_memory"):
        kwargs["pin_memory"] = False
    if (
        draws
        and stays
        and kwargs.get("generator") is None
        and len(args) <= names.index("generator")
    ):
        kwargs["generator"] = GENERATOR
    if not views:
        launches.add(op._schema.name)
    if any(map(is_huge, on_cuda)):
        return without_numbers(op, args, kwargs, written)
    if stays and "size" in names and not on_cuda:  # a factory: it may be huge
        shape = args[0] if args else kwargs["size"]
        width = (kwargs.get("dtype") or torch.float32).itemsize
        if size_of(shape) * width >= HUGE:
            return without_numbers(op, args, kwargs, written)
    # In inference mode a view of a normal tensor is a normal tensor.
    normal = views and not any(t.is_inference() for t in given)
    with torch.inference_mode(torch.is_inference_mode_enabled() and not normal):
        found = compute(op, inner(args), {k: inner(v) for k, v in kwargs.items()})
        return wrap(found, written, args, kwargs, names, stays)


def compute(op: Any, args: Any, kwargs: Any) -> Any:
    if op.namespace != "nanoattn":
        return op(*args, **kwargs)
    widened = [t for t in tensors(args) if t.dtype == torch.bfloat16]

    def lift(value: Any) -> Any:
        is_half = isinstance(value, Tensor) and value.dtype == torch.bfloat16
        return value.float() if is_half else value

    found = op(*map(lift, args), **{k: lift(v) for k, v in kwargs.items()})
    if not widened:
        return found
    lower = [0] if "forward" in op._schema.name else range(99)  # L stays in float32
    if isinstance(found, Tensor):
        return found.bfloat16()
    return tuple(t.bfloat16() if i in lower else t for i, t in enumerate(found))


def wrap(found: Any, written: Any, args: Any, kwargs: Any, names: Any, stays: bool) -> Any:
    if isinstance(found, (list, tuple)) and not written:
        return type(found)(wrap(x, {}, args, kwargs, names, stays) for x in found)
    if isinstance(found, (list, tuple)):
        whose = [argument(written[i], args, kwargs, names) if i in written else None
                 for i in range(len(found))]
        return type(found)(
            wrap(x, {}, args, kwargs, names, stays) if w is None else w
            for x, w in zip(found, whose, strict=True)
        )
    if written:
        return argument(written[0], args, kwargs, names)
    return CudaTensor(found) if isinstance(found, Tensor) and stays else found


def argument(j: int, args: Any, kwargs: Any, names: Any) -> Any:
    return args[j] if j < len(args) else kwargs[names[j]]


def size_of(shape: Sequence[int]) -> int:
    return functools.reduce(lambda a, b: a * b, shape, 1)


def is_huge(t: Tensor) -> bool:
    return getattr(t, "numbers", t).device.type == "meta"


def without_numbers(op: Any, args: Any, kwargs: Any, written: Any) -> Any:
    """The shape of a result that nobody computes."""
    if op is aten._local_scalar_dense.default:
        return 0.0

    def meta(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(map(meta, value))
        return value.to("meta") if isinstance(value, Tensor) else value

    how = {k: meta(inner(v)) for k, v in kwargs.items() if k not in ("device", "generator")}
    if "device" in kwargs:
        how["device"] = "meta"
    found = op(*meta(inner(args)), **how)
    if op is aten.mm.default:
        time.sleep(2 * args[0].numel() * args[1].shape[1] / 700e12)
    return wrap(found, written, args, kwargs, facts(op)[3], True)


def copy(to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    launches.add("aten::copy_")
    if is_huge(to) or is_huge(source):
        time.sleep(2 * to.nbytes / 4e12)
        return to
    if isinstance(to, CudaTensor):
        to.numbers.copy_(inner(source))
    elif non_blocking and getattr(to, "pinned", False):
        pending.append((to, inner(source).clone()))
        to.fill_(NONSENSE)
    else:
        synchronize()
        to.copy_(inner(source))
    return to


def to_copy(t: Tensor, *, dtype: Any = None, layout: Any = None, device: Any = None,
            pin_memory: Any = None, non_blocking: bool = False,
            memory_format: Any = None) -> Tensor:
    launches.add("aten::_to_copy")
    stays = torch.device(device or t.device).type == "cuda"
    if is_huge(t):
        found = inner(t).to("meta", dtype or t.dtype)
    else:
        if not stays:
            synchronize()
        found = inner(t).to(dtype or t.dtype, copy=True, memory_format=memory_format
                            or torch.preserve_format)
    return CudaTensor(found) if stays else found


def softmax(op: Any, x: CudaTensor, dim: int, to_float: bool) -> Tensor:
    """On CUDA in one kernel from half precision to float32; on the CPU in two."""
    launches.add(op._schema.name)
    numbers = inner(x)
    return CudaTensor(op(numbers.float() if to_float else numbers, dim, False))


def softmax_backward(op: Any, dout: Any, out: Any, dim: int, dtype: torch.dtype) -> Tensor:
    launches.add(op._schema.name)
    return CudaTensor(op(inner(dout), inner(out), dim, dout.dtype).to(dtype))


def scalar(t: CudaTensor) -> Any:
    synchronize()
    return 0.0 if is_huge(t) else t.numbers.item()


def drop(x: CudaTensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    launches.add("aten::native_dropout")
    keep = torch.rand(x.shape, generator=GENERATOR) >= (p if train else 0.0)
    kept = inner(x) * keep / (1 - p if train and p < 1 else 1.0)
    return CudaTensor(kept.to(x.dtype)), CudaTensor(keep)


# ----------------------------------------------------------------------------- attention

MATH, FLASH, EFFICIENT, CUDNN = 0, 1, 2, 3  # at::SDPBackend


def choice(q: Tensor, k: Tensor, attn_mask: Tensor | None) -> int:
    """What PyTorch takes on Hopper: cuDNN, flash, efficient, math, as far as they are allowed."""
    half, on = q.dtype in (torch.float16, torch.bfloat16), torch.backends.cuda
    equal_heads = q.shape[1] == k.shape[1]
    if on.cudnn_sdp_enabled() and half and q.shape[-1] <= 128 and k.shape[2] > 1:
        return CUDNN
    if on.flash_sdp_enabled() and half and attn_mask is None:
        return FLASH
    if on.mem_efficient_sdp_enabled() and q.dtype != torch.float64 and equal_heads:
        return EFFICIENT
    if on.math_sdp_enabled():
        return MATH
    raise RuntimeError("No available kernel. Aborting execution.")


def weights(q: Tensor, k: Tensor, mask: Tensor | None, p: float, causal: bool, scale: Any,
            seed: int) -> tuple[Tensor, Tensor, Tensor, float]:
    """P (B, H, Tq, Tk), the kept entries over 1 - p, L (B, H, Tq), all float32; and the scale."""
    scale = scale or q.shape[-1] ** -0.5
    s = q @ k.transpose(-1, -2) * scale
    if causal:
        s = s.masked_fill(
            ~torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).tril(), -torch.inf
        )
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else s + mask
    L = s.logsumexp(-1)
    draw = torch.Generator().manual_seed(seed)
    kept = (torch.rand(s.shape, generator=draw) >= p) / (1 - p) if p else torch.ones(())
    return s.softmax(-1).nan_to_num(0.0), kept, L, scale


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float, causal: bool, scale: Any) -> Any:
    dtype, groups = q.dtype, q.shape[1] // k.shape[1]
    q, k, v = (inner(t).float() for t in (q, k, v))
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    seed = int(torch.randint(2**31, (), generator=GENERATOR)) if p else 0
    P, kept, L, _ = weights(q, k, inner(mask), p, causal, scale, seed)
    out = ((P * kept) @ v).transpose(1, 2).contiguous().transpose(1, 2).to(dtype)
    return CudaTensor(out), CudaTensor(L), CudaTensor(torch.tensor(seed))


def attend_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Any, p: float,
                    causal: bool, scale: Any, seed: Any,
                    of_row: tuple[Tensor, Tensor] | None = None) -> list[Tensor]:
    """of_row: out and L of the whole rows, of which k and v may be a part."""
    dtype, heads = q.dtype, k.shape[1]
    groups = q.shape[1] // heads
    dout, q, k, v = (inner(t).float() for t in (dout, q, k, v))
    k, v = (t.repeat_interleave(groups, 1) for t in (k, v))
    seed = int(inner(seed)) if p else 0
    P, kept, L_here, scale = weights(q, k, inner(mask), p, causal, scale, seed)
    dP = dout @ v.transpose(-1, -2) * kept
    D = (dP * P).sum(-1, keepdim=True)
    if of_row is not None:
        out, L = (inner(t).float() for t in of_row)
        P, D = P * (L_here - L).exp().nan_to_num(0.0)[..., None], (dout * out).sum(-1, keepdim=True)
    dS = P * (dP - D) * scale
    dk, dv = dS.transpose(-1, -2) @ q, (P * kept).transpose(-1, -2) @ dout
    dk, dv = (t.unflatten(1, (heads, groups)).sum(2) for t in (dk, dv))
    # as the kernels give them: (B, T, H, D) in memory
    return [CudaTensor(t.to(dtype).transpose(1, 2).contiguous().transpose(1, 2))
            for t in (dS @ k, dk, dv)]


def lower_right(q: Tensor, k: Tensor, is_causal: bool) -> Tensor | None:
    """Where the flash operator lets a query look: the last one at every key."""
    Tq, Tk = q.shape[2], k.shape[2]
    return CudaTensor(torch.ones(Tq, Tk, dtype=torch.bool).tril(Tk - Tq)) if is_causal else None


def flash(q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
          return_debug_mask: bool = False, *, scale: Any = None) -> Any:
    launches.add("aten::_scaled_dot_product_flash_attention")
    out, L, seed = attend(q, k, v, lower_right(q, k, is_causal), dropout_p, False, scale)
    return out, L, None, None, q.shape[2], k.shape[2], seed, seed, out


def flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor,
                   cum_q: Any, cum_k: Any, max_q: int, max_k: int, dropout_p: float,
                   is_causal: bool, seed: Any, offset: Any, *,
                   scale: Any = None) -> Any:
    launches.add("aten::_scaled_dot_product_flash_attention_backward")
    mask = lower_right(q, k, is_causal)
    return tuple(attend_backward(dout, q, k, v, mask, dropout_p, False, scale, seed, (out, L)))


def efficient(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, compute_log_sumexp: bool,
              dropout_p: float = 0.0, is_causal: bool = False, *,
              scale: Any = None) -> Any:
    launches.add("aten::_scaled_dot_product_efficient_attention")
    out, L, seed = attend(q, k, v, attn_bias, dropout_p, is_causal, scale)
    return out, L, seed, seed


def efficient_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, out: Tensor,
                       L: Tensor, seed: Any, offset: Any, dropout_p: float, mask: Any,
                       is_causal: bool = False, *, scale: Any = None) -> Any:
    launches.add("aten::_scaled_dot_product_efficient_attention_backward")
    found = attend_backward(dout, q, k, v, attn_bias, dropout_p, is_causal, scale, seed)
    return (*found, None)


def cudnn(q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, compute_log_sumexp: bool,
          dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False, *,
          scale: Any = None) -> Any:
    launches.add("aten::_scaled_dot_product_cudnn_attention")
    out, L, seed = attend(q, k, v, attn_bias, dropout_p, is_causal, scale)
    return out, L, None, None, q.shape[2], k.shape[2], seed, seed, None


def cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, L: Tensor, seed: Any,
                   offset: Any, attn_bias: Any, cum_q: Any, cum_k: Any, max_q: int, max_k: int,
                   dropout_p: float, is_causal: bool, *, scale: Any = None) -> Any:
    launches.add("aten::_scaled_dot_product_cudnn_attention_backward")
    return tuple(attend_backward(dout, q, k, v, attn_bias, dropout_p, is_causal, scale, seed))


def scaled_dot_product_attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: Any = None, enable_gqa: bool = False,
) -> Tensor:
    """F.scaled_dot_product_attention, which else knows CUDA where PyTorch was built for it only."""
    if not isinstance(q, CudaTensor):
        return REAL["sdpa"](q, k, v, attn_mask, dropout_p, is_causal, scale=scale,
                            enable_gqa=enable_gqa)
    if type(attn_mask).__name__ == "CausalBias":
        if q.dtype in (torch.float16, torch.bfloat16) and torch.backends.cuda.flash_sdp_enabled():
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, True,
                                                            scale=scale)[0]
        attn_mask = attn_mask._materialize(CUDA)
    kernel = choice(q, k, attn_mask)
    how: Any = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if kernel == FLASH:
        return aten._scaled_dot_product_flash_attention(q, k, v, **how)[0]
    if kernel in (CUDNN, EFFICIENT):
        op = "cudnn" if kernel == CUDNN else "efficient"
        op = getattr(aten, f"_scaled_dot_product_{op}_attention")
        return op(q, k, v, attn_mask, torch.is_grad_enabled(), **how)[0]
    return aten._scaled_dot_product_attention_math(q, k, v, attn_mask, enable_gqa=enable_gqa,
                                                   **how)[0]


def varlen_attn(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *_: int, scale: float,
                window_size: tuple[int, int], enable_gqa: bool) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn, a sequence at a time."""
    outs, (left, right) = [], window_size
    for (a, b), (c, d) in zip(*(pairwise(cu.tolist()) for cu in (cu_q, cu_k)), strict=True):
        at, j = torch.arange(b - a)[:, None] + (d - c) - (b - a), torch.arange(d - c)
        seen = (j <= at + right) if right >= 0 else torch.ones(len(at), len(j), dtype=torch.bool)
        seen = CudaTensor(seen & (j >= at - left if left >= 0 else True))
        qkv = (t.transpose(0, 1)[None] for t in (q[a:b], k[c:d], v[c:d]))
        grad = torch.is_grad_enabled()
        out = aten._scaled_dot_product_efficient_attention(*qkv, seen, grad, scale=scale)[0]
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


MIXED = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}  # host's indices
OWN: dict[Any, Callable[..., Any]] = {
    aten.copy_.default: copy,
    aten._to_copy.default: to_copy,
    aten._local_scalar_dense.default: scalar,
    aten.native_dropout.default: drop,
    **{op: functools.partial(softmax, op)
       for op in (aten._softmax.default, aten._log_softmax.default)},
    **{op: functools.partial(softmax_backward, op)
       for op in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)},
    aten._scaled_dot_product_flash_attention.default: flash,
    aten._scaled_dot_product_flash_attention_backward.default: flash_backward,
    aten._scaled_dot_product_efficient_attention.default: efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: efficient_backward,
    aten._scaled_dot_product_cudnn_attention.default: cudnn,
    aten._scaled_dot_product_cudnn_attention_backward.default: cudnn_backward,
}


# ----------------------------------------------------------------------------- the profiler

launches: set[str] = set()  # names of the operators that were run and are no views
KERNELS = (  # a part of an operator's name, that of its kernel
    (
        "flash_attention_backward",
        "pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>",
    ),
    ("flash_attention", "pytorch_flash::flash_fwd_kernel<...>"),
    ("efficient_attention_backward", "fmha_cutlassB_bf16_aligned_64x64_k64_sm80(...)"),
    ("efficient_attention", "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(...)"),
    ("cudnn_attention", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7"),
    ("nanoattn::flash_forward", "forward_kernel"),
    ("nanoattn::flash_backward", "dkdv_kernel"),
    ("nanoattn::paged_decode", "decode_kernel"),
    ("mm", "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"),
    ("copy", "Memcpy DtoD (Device -> Device)"),
    ("", "void at::native::vectorized_elementwise_kernel<4, ...>"),
)


class Profile(torch.profiler.profile):
    def __init__(self, *, activities: Any = None, **how: Any) -> None:
        cuda = torch.profiler.ProfilerActivity.CUDA
        asked = activities is None or cuda in activities
        self.sees = asked and os.environ.get("FAKE_CUDA_CUPTI") != "0"
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **how)

    def __exit__(self, *why: Any) -> None:
        super().__exit__(*why)
        if self.sees:
            events = self.profiler.function_events  # type: ignore[union-attr]
            for op in list(events):
                if op.name in launches and not any(c.name in launches for c in op.cpu_children):
                    name = next(name for part, name in KERNELS if part in op.name)
                    span = op.time_range
                    op.kernels.append(Kernel(name, 0, span.end - span.start))
                    events.append(FunctionEvent(
                        id=op.id, name=name, thread=0, start_us=span.start, end_us=span.end,
                        device_type=DeviceType.CUDA, stack=[],
                    ))


# ----------------------------------------------------------------------------- torch.cuda


class CudaGuard(torch._C._acc.DeviceGuard):  # type: ignore[name-defined, misc]
    def type_(self) -> Any:
        return DeviceType.CUDA


def guard_devices() -> None:
    """Tell autograd's engine that CUDA is there, and has one device.

    For a device type of one's own PyTorch lets Python say so; its entry becomes CUDA's. And the
    hooks of a build without CUDA get a table of virtual functions that say it is built and there.
    """
    folder = Path(torch.__file__).parent / "lib"
    REAL["guard"] = CudaGuard()
    torch._C._acc.register_python_privateuseone_device_guard(REAL["guard"])  # type: ignore[attr-defined]
    library = ctypes.CDLL(str(folder / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    entries = (ctypes.c_void_p * 21).in_dll(library, name)  # by c10::DeviceType
    entries[1], entries[20] = entries[20], None

    library = ctypes.CDLL(str(folder / "libtorch_cpu.so"))
    hooks = library._ZN2at6detail12getCUDAHooksEv
    hooks.restype = ctypes.POINTER(ctypes.c_void_p)
    says_yes = REAL["yes"] = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda hooks: True)
    # Two entries of the type, two destructors, isBuilt(), isAvailable(), hasPrimaryContext(), ...
    table = REAL["table"] = (ctypes.c_void_p * 50)()
    ctypes.memmove(table, hooks()[0] - 16, ctypes.sizeof(table))
    table[4] = table[5] = table[6] = ctypes.cast(says_yes, ctypes.c_void_p).value
    hooks()[0] = ctypes.addressof(table) + 16
    if str(torch.accelerator.current_accelerator()) != "cuda":
        raise NotImplementedError(f"torch {torch.__version__} has other hooks than are known here")


class DeviceContext:
    def __init__(self, device: Any = None) -> None:
        pass

    def __enter__(self) -> None:
        pass

    def __exit__(self, *why: Any) -> None:
        pass


def compile(model: Any = None, **how: Any) -> Any:
    return (lambda f: f) if model is None else model


def empty(*size: Any, pin_memory: bool = False, **how: Any) -> Tensor:
    made = REAL["empty"](*size, **how)
    return pinned(made) if pin_memory else made


def placed(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """torch.tensor or as_tensor, which copy from the host in ways of their own."""

    def placed_(values: Any, *, device: Any = None, requires_grad: bool = False, **how: Any) -> Any:
        on = getattr(values, "device", CPU) if device is None else torch.device(device)
        if isinstance(values, CudaTensor):
            made = values.to(on, how.get("dtype"), copy=make is REAL["tensor"])
        else:
            made = make(values, **how).to(on)
        return made.requires_grad_() if requires_grad else made

    return placed_


def pinned(t: Tensor, device: Any = None) -> Tensor:
    if isinstance(t, CudaTensor):
        raise RuntimeError("cannot pin a tensor of the GPU: only dense CPU tensors can be pinned")
    made: Any = t if getattr(t, "pinned", False) else t.view_as(t)
    made.pinned = True
    return made


def index(device: Any) -> None:
    """Raises: an error where that device is not there."""
    number = torch.device(device).index if isinstance(device, (str, torch.device)) else device
    if number and number >= DEVICES:
        raise RuntimeError(f"CUDA error: invalid device ordinal ({number})")


def set_device(device: Any) -> None:
    """Raises ValueError for "cuda" without a number, as PyTorch does."""
    if not isinstance(device, int) and torch.device(device).index is None:
        raise ValueError(f"Expected a torch.device with a specified index, but got:{device}")
    index(device)


def join(backend: str, **how: Any) -> None:
    REAL["join"]("gloo" if backend == "nccl" else backend, **how)


class Logger(torch.distributed.Logger):
    """DistributedDataParallel's, whose statistics need CUDA's own timers."""

    def set_runtime_stats_and_log(self) -> None:
        pass


def seed(number: int) -> None:
    GENERATOR.manual_seed(number)


def give_back() -> None:
    Memory.reserved = Memory.allocated


def reset_peak(device: Any = None) -> None:
    Memory.peak = Memory.allocated


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    yield


def install() -> None:
    """Make this process believe in the device."""
    global GENERATOR
    if "cuda" in REAL:
        return
    REAL["cuda"] = True
    guard_devices()
    library = REAL["library"] = torch.library.Library("_", "IMPL")
    library.fallback(run, "CUDA")
    properties = SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=Memory.total, multi_processor_count=132,
        L2_cache_size=60 * 2**20, warp_size=32, regs_per_multiprocessor=65536,
        shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472,
    )
    fakes: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": lambda: DEVICES,
        "current_device": lambda: 0,
        "set_device": set_device,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "mem_get_info": lambda device=None: (Memory.total - Memory.reserved, Memory.total),
        "memory_allocated": lambda device=None: Memory.allocated,
        "max_memory_allocated": lambda device=None: Memory.peak,
        "memory_reserved": lambda device=None: Memory.reserved,
        "reset_peak_memory_stats": reset_peak,
        "empty_cache": give_back,
        "synchronize": synchronize,
        "manual_seed": seed,
        "manual_seed_all": seed,
        "get_rng_state": lambda device="cuda": GENERATOR.get_state(),
        "set_rng_state": lambda state, device="cuda": GENERATOR.set_state(state),
        "Event": Event,
        "Stream": Stream,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": on_stream,
        "device": DeviceContext,
        "device_of": DeviceContext,
    }
    for name, fake in fakes.items():
        setattr(torch.cuda, name, fake)
    torch.distributed.init_process_group = join  # type: ignore[assignment]
    torch.distributed.Logger = Logger  # type: ignore[misc]
    torch.version.cuda = "13.0"
    torch.Generator = Generator  # type: ignore[misc]
    GENERATOR = Generator("cuda")
    F.scaled_dot_product_attention = scaled_dot_product_attention  # type: ignore[assignment]
    torch.nn.attention.varlen.varlen_attn = varlen_attn  # type: ignore[assignment]
    torch.tensor, torch.as_tensor = placed(REAL["tensor"]), placed(REAL["as_tensor"])
    torch.empty, torch.compile = empty, compile  # type: ignore[assignment]
    torch.Tensor.pin_memory = pinned  # type: ignore[method-assign, assignment]
    torch.profiler.profile = Profile  # type: ignore[misc]
    torch.__future__.set_swap_module_params_on_conversion(True)  # a tied weight stays one
