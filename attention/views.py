"""Masks, from visible() in spec.py, and read-only views of a cache.

The cache (inference/cache.py) stores a call's keys and values before the kernel runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from .machine.system import P, R, autocast_off
from .spec import Numbers, Spec, visible

Pair = tuple[Tensor, Tensor] | None  # segments of the queries and of the keys


def mask(
    Tq: int, Tk: int, window: int | None, segments: Tensor | tuple[Tensor, Tensor] | None,
    device: torch.device, offset: int | None = None, right: int | None = 0,
) -> Tensor:
    """visible() as bool (1, 1, Tq, Tk), or (B, 1, Tq, Tk) with segments: ids of the keys (B, Tk)
    for Tq <= Tk, or a pair for queries and keys. offset None: Tk - Tq."""
    i = torch.arange(Tq, device=device)[:, None]
    j = torch.arange(Tk, device=device)[None, :]
    offset = Tk - Tq if offset is None else offset
    if segments is None:
        return visible(i, j, offset, window, right=right)[None, None]
    if isinstance(segments, Tensor):
        segments = segments[:, Tk - Tq :], segments
    seg_i, seg_j = segments[0][:, :, None], segments[1][:, None, :]
    return visible(i, j, offset, window, seg_i, seg_j, right)[:, None]


def sees_all(Tq: int, Tk: int, window: int | None, offset: int, right: int | None) -> bool:
    """True if every query sees every key: the first the last one, and the last the first."""
    corners = (0, Tk - 1), (Tq - 1, 0)
    return all(visible(*corner, offset, window, right=right) for corner in corners)


def for_any_shape(attend: Callable[..., R], lse: bool = False) -> Callable[..., R]:
    """Make an attend() for 0 < Tq <= Tk, or where every query sees every key, and for contiguous
    head dimensions take all shapes and strides, and compute in q's dtype under autocast.

    The first Tq - Tk queries come before every key. They see the first `right` keys at most, and
    none with segments, which they do not have: a call of their own, of zeros if they see no key.

    Args:
        lse: attend() also returns the log-sum-exp (B, H, Tq), -inf where no key is seen.
    """

    @wraps(attend)
    def wrapped(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Any:
        (B, Tq, H, _), Tk = q.shape, k.shape[1]
        if options.get("cache") is not None:  # k is the cache's buffer, not Tk long
            Tk = max(Tq, 1)
        if B == 0 or Tq == 0 or Tk == 0:
            used = (t for t in (q, k, v, options.get("sinks")) if t is not None)
            out = torch.zeros_like(q) + sum(t[:0].sum().to(q.dtype) for t in used)  # in the graph
            acc = torch.promote_types(q.dtype, torch.float32)
            L = q.new_full((B, H, Tq), -torch.inf, dtype=acc)
            return (out, L) if lse else out
        before, apart = max(Tq - Tk, 0), options.get("segments") is not None
        if not before or (not apart and sees_all(Tq, Tk, spec.window, -before, spec.right)):
            with autocast_off(q):
                return attend(*map(loadable, (q, k, v)), spec, **options)
        n = 0 if apart else Tk if spec.right is None else min(spec.right, Tk)  # keys that they see
        right = None if spec.right is None else spec.right - n
        early = replace(spec, window=None, right=right)
        first = wrapped(q[:, :before], k[:, :n], v[:, :n], early, **{**options, "segments": None})
        rest = wrapped(q[:, before:], k, v, spec, **options)
        if lse:
            return torch.cat((first[0], rest[0]), dim=1), torch.cat((first[1], rest[1]), dim=2)
        return torch.cat((first, rest), dim=1)

    return wrapped


def loadable(t: Tensor) -> Tensor:
    """t, copied unless most kernels can load its rows: the last dimension is contiguous and, on
    CUDA, rows of a multiple of 16 bytes begin at one.

    The fused kernels load 16 bytes at once and check no address: what is not aligned is read wrong,
    or CUDA is lost to the process ("misaligned address").
    """
    if t.stride(-1) != 1:
        return t.contiguous()
    n = 16 // t.element_size()
    if not t.is_cuda or t.shape[-1] % n:
        return t
    if torch.compiler.is_compiling():  # which does not trace an address
        aside = False
    elif type(t) in (Tensor, Parameter) and not torch._C._functorch.is_functorch_wrapped_tensor(t):
        aside = bool(t.data_ptr() % 16)
    else:  # without an address
        aside = bool(t.storage_offset() % n)
    if aside or any(step % n for size, step in zip(t.shape[:-1], t.stride()) if size > 1):
        return t.clone(memory_format=torch.contiguous_format)
    return t


def not_compiled(f: Callable[P, R]) -> Callable[P, R]:
    """torch.compiler.disable(f), at the first call, since it imports torch._dynamo: 1 s or more."""
    made: list[Callable[P, R]] = []

    @wraps(f)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not made:
            made.append(torch.compiler.disable(f))
        return made[0](*args, **kwargs)

    return call


def symbolic(t: Tensor) -> bool:
    """True where tensors have no values: while torch.compile or torch.export traces, among fake
    tensors, and for a meta or a fake tensor."""
    if torch.compiler.is_compiling() or t.is_meta or isinstance(t, FakeTensor):
        return True
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def unreadable(t: Tensor) -> bool:
    """True if t's values cannot be read: as symbolic(), and where vmap may hold several."""
    return symbolic(t) or torch._C._functorch.is_functorch_wrapped_tensor(t)


def kept(make: Callable[..., R]) -> Callable[..., R]:
    """Cache make(t, *args) for the tensor t, which all layers share, until its values or the
    arguments change, or it dies. The result must not refer to t.

    On the CPU a copy is compared, of any size: that is little next to attention with t. Elsewhere
    the host would wait for the device in each layer, so only t's version is compared: a write
    through .data is not seen.
    """
    known = WeakTensorKeyDictionary()

    @wraps(make)
    def call(t: Tensor, *args: object) -> R:
        if unreadable(t):
            return make(t, *args)
        on_host = t.device.type == "cpu"  # where NumPy and .data write without a new version
        if not on_host and t.is_inference():  # it has no version
            return make(t, *args)
        found = known.get(t)
        same = found is not None and found[0] == args
        if same:
            same = torch.equal(found[1], t) if on_host else found[1] == t._version
        if not same:
            # Tensors made in inference mode could not be used in training.
            with torch.inference_mode(False):
                state = t.detach().clone() if on_host else t._version
                found = known[t] = args, state, make(t, *args)
        return found[2]  # not read again: another thread can replace it

    return call


@kept
def in_pieces(segments: Tensor) -> bool:
    """True if an id of segments (B, Tk) comes again after others; False where it cannot be read
    without waiting for a device."""
    if segments.device.type != "cpu" or unreadable(segments):
        return False
    runs, ids = ((t[:, 1:] != t[:, :-1]).sum() for t in (segments, segments.sort(dim=1).values))
    return bool(runs != ids)


@dataclass(frozen=True)
class StaticView:
    """View of a static cache, whose k and v are buffers (B, length, Hkv, D).

    Token i of row b in this call is at position ``start[b] + i`` and sees the positions up to its
    own, and those after it up to the row's last, ``start[b] + count[b] - 1``, as far as Spec.right
    allows. Tokens from ``count[b]`` on are padding: their outputs are meaningless.
    """

    start: Tensor  # (B,) int32, tokens of each row stored before this call
    count: Tensor  # (B,) int32, tokens of each row in this call, 0 .. Tq
    length: int  # positions that are read
    kind: ClassVar[str] = "static"  # Spec.cache

    def seen(self, Tq: int, window: int | None, right: int | None = 0) -> Tensor:
        """The mask of this call's queries: bool (B, 1, Tq, length)."""
        i = torch.arange(Tq, device=self.start.device)
        j = torch.arange(self.length, device=self.start.device)
        # Padding may lie past the positions that are read: it sees what the last of them sees.
        last: Numbers = self.length - 1
        if right != 0:
            last = (self.start + self.count).clamp(1, self.length)[:, None, None, None] - 1
        at = (self.start[:, None, None, None] + i[:, None]).clamp(max=last)
        seen = visible(at, j, 0, window, right=right)
        return seen if right == 0 else seen & (j <= last)


@dataclass(frozen=True)
class PagedView:
    """View of a paged cache, whose k and v are pages (n_pages, page_size, Hkv, D).

    The j-th token of row b is ``k[page_table[b, j // page_size], j % page_size]``. Token i of row b
    in this call is the row's token ``start[b] + i`` and sees the row's tokens up to itself, and
    later ones as in StaticView. Tokens from ``count[b]`` on are padding: their outputs are finite
    but meaningless.
    """

    page_table: Tensor  # (B, max_pages) int32, 0 (the null page) where a row has no page
    start: Tensor  # (B,) int32, tokens of each row stored before this call
    count: Tensor  # (B,) int32, tokens of each row in this call, 0 .. Tq
    kind: ClassVar[str] = "paged"  # Spec.cache


MakeView = Callable[[Numbers, Numbers], StaticView | PagedView | None]  # of start and count


def filled_cache(k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor, MakeView]:
    """k and v, (B, T, Hkv, D), as the cache of `spec` holds them, and a function that makes a view.

    Pages (n_pages, page_size, Hkv, D) are in random order; page 0 is the null page. view(start,
    count) takes the tokens of each row before a call and in it.
    """
    B, T = k.shape[:2]

    def view(start: Numbers, count: Numbers) -> StaticView | PagedView | None:
        start, count = (
            torch.as_tensor(n, dtype=torch.int32, device=k.device) for n in (start, count)
        )
        if spec.cache == "static":
            return StaticView(start, count, T)
        return PagedView(table.int(), start, count) if spec.cache == "paged" else None

    if spec.page_size is None:
        return k, v, view
    size, n = spec.page_size, -(-T // spec.page_size)  # n pages of a row
    order = torch.randperm(B * n, generator=torch.Generator().manual_seed(0)) + 1
    table = order.view(B, n).to(k.device)
    pages = [x.new_zeros(1 + B * n, size, *x.shape[2:]) for x in (k, v)]
    for held, x in zip(pages, (k, v), strict=True):
        held[table] = F.pad(x, (0, 0, 0, 0, 0, n * size - T)).unflatten(1, (n, size))
    return pages[0], pages[1], view
