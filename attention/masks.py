"""visible() as tensors, read-only views of caches, and masked attention in blocks of queries.

A block of queries attends to the keys from the first to the last one that any of them sees. This is
a smaller attention problem, with an offset of its own:

             k0  k1  k2  k3  k4  k5  k6  k7
        q2   x   x   x   .   .   .   .   .      window=3, blocks of 2 queries: each block needs
        q3   .   x   x   x   .   .   .   .      4 keys, however long the sequence is
        q4   .   .   x   x   x   .   .   .
        q5   .   .   .   x   x   x   .   .

A window W costs time in T * (W + right + BLOCK) and memory in T; segments cost the sum of their
squares, since a block ends where a long segment ends, and a whole segment needs no mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import Parameter
from torch.utils.weak import WeakTensorKeyDictionary

from .machine.system import R
from .spec import Numbers, Spec, alibi_bias, visible

Pair = tuple[Tensor, Tensor] | None  # segments of the queries and of the keys
BLOCK = 256  # queries; 128 is a little faster on a CPU, with twice the calls (docs/LOG.md)
CUDA_BLOCK = 1024  # each block is a kernel launch; not measured


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


def alibi(slopes: Tensor, Tq: int, Tk: int, offset: Numbers, dtype: torch.dtype) -> Tensor:
    """alibi_bias() as (1 or B, H, Tq, Tk) of a dtype, rounded once; of slopes (H,) or (B, H). The
    offset is a number or (B, 1, 1, 1)."""
    slopes = slopes.to(torch.promote_types(dtype, slopes.dtype))
    i = torch.arange(Tq, device=slopes.device)[:, None]
    j = torch.arange(Tk, device=slopes.device)
    return alibi_bias(slopes.reshape(-1, slopes.shape[-1], 1, 1), i, j, offset).to(dtype)


def sees_all(Tq: int, Tk: int, window: int | None, offset: int, right: int | None) -> bool:
    """True if every query sees every key: the first the last one, and the last the first."""
    first = visible(0, Tk - 1, offset, window, right=right)
    return bool(first and visible(Tq - 1, 0, offset, window, right=right))


def maskless(Tq: int, Tk: int, window: int | None, offset: int, right: int | None) -> str:
    """ "causal" for as many queries as keys, each seeing those up to its own, "full" if every query
    sees every key: kernels compute both without a mask. "" needs a mask."""
    if sees_all(Tq, Tk, window, offset, right):
        return "full"
    square = Tq == Tk and offset == 0 and right == 0
    return "causal" if square and (window is None or window >= Tk) else ""


def sdpa_mask(q: Tensor, k: Tensor, spec: Spec, offset: int, segments: Pair = None,
              alibi_slopes: Tensor | None = None) -> tuple[Tensor | None, bool]:
    """attn_mask and is_causal of PyTorch's SDPA for q (B, Tq, H, D) and k (B, Tk, Hkv, D): None if
    none is needed, bool (1 or B, 1, Tq, Tk), or with ALiBi the biases (1 or B, H, Tq, Tk)."""
    Tq, Tk = q.shape[1], k.shape[1]
    if segments is None and alibi_slopes is None:
        if kind := maskless(Tq, Tk, spec.window, offset, spec.right):
            return None, kind == "causal"
    seen = mask(Tq, Tk, spec.window, segments, q.device, offset, spec.right)
    return seen if alibi_slopes is None else biased(seen, q, alibi_slopes, offset), False


def biased(seen: Tensor, q: Tensor, alibi_slopes: Tensor, offset: Numbers) -> Tensor:
    """ALiBi's biases, and -inf where nothing is seen, for PyTorch's SDPA. On the CPU a float32 mask
    goes with half precision; elsewhere a mask has q's dtype."""
    dtype = torch.promote_types(q.dtype, torch.float32) if q.is_cpu else q.dtype
    return alibi(alibi_slopes, *seen.shape[-2:], offset, dtype).masked_fill(~seen, -torch.inf)


# --- any shape, any stride ---


def for_any_shape(attend: Callable[..., R], lse: bool = False) -> Callable[..., R]:
    """Make an attend() for 0 < Tq <= Tk and loadable tensors take all shapes and strides. With
    `lse` it also returns the log-sum-exp (B, H, Tq), -inf where no key is seen."""

    @wraps(attend)
    def wrapped(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Any:
        (B, Tq), Tk = q.shape[:2], k.shape[1]
        if options.get("cache") is not None:  # k is the cache's buffer, not Tk long
            Tk = max(Tq, 1)
        if B == 0 or Tq == 0 or Tk == 0:
            return nothing(q, k, v, options.get("sinks"), lse)
        if Tq > Tk and (options.get("segments") is not None
                        or not sees_all(Tq, Tk, spec.window, Tk - Tq, spec.right)):
            return queries_before_keys(wrapped, q, k, v, spec, options, lse)
        if q.is_cuda or not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
            q, k, v = loadable(q), loadable(k), loadable(v)
        return attend(q, k, v, spec, **options)

    return wrapped


def queries_before_keys(attend: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
                        options: dict[str, Any], lse: bool) -> Any:
    """Two calls. The first Tq - Tk queries come before every key: they see the first `right` keys,
    and none with segments, since no id is theirs. The rest are as many as the keys."""
    n, Tk = q.shape[1] - k.shape[1], k.shape[1]
    n_seen = Tk if spec.right is None else min(spec.right, Tk)
    if options.get("segments") is not None:
        n_seen = 0
    if spec.alibi and n_seen:  # the first call would measure distances from another place
        got = f"{q.shape[1]} queries, {Tk} keys, right={spec.right}"
        raise ValueError(f"ALiBi with more queries than keys must be causal, got {got}")
    early = replace(spec, window=None, right=None if spec.right is None else spec.right - n_seen)
    alone = {**options, "segments": None}
    first = attend(q[:, :n], k[:, :n_seen], v[:, :n_seen], early, **alone)
    rest = attend(q[:, n:], k, v, spec, **options)
    if lse:
        return torch.cat((first[0], rest[0]), dim=1), torch.cat((first[1], rest[1]), dim=2)
    return torch.cat((first, rest), dim=1)


def nothing(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, lse: bool) -> Any:
    """The result without a batch, a query or a key: zeros, which keep the graph."""
    used = (t for t in (q, k, v, sinks) if t is not None)
    out = torch.zeros_like(q) + sum(t[:0].sum().to(q.dtype) for t in used)
    if not lse:
        return out
    acc = torch.promote_types(q.dtype, torch.float32)
    return out, q.new_full((q.shape[0], q.shape[2], q.shape[1]), -torch.inf, dtype=acc)


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
    # torch.compile traces no address, and functorch's and fake tensors have none.
    traced = torch.compiler.is_compiling() or type(t) not in (Tensor, Parameter)
    if traced or torch._C._functorch.is_functorch_wrapped_tensor(t):
        aside = t.storage_offset() % n
    else:
        aside = t.data_ptr() % 16
    if aside or any(step % n for size, step in zip(t.shape[:-1], t.stride()) if size > 1):
        return t.clone(memory_format=torch.contiguous_format)
    return t


# --- what depends on the values of segments ---


def symbolic(t: Tensor) -> bool:
    """True where tensors have no values: while torch.compile or torch.export traces, among fake
    tensors, and for a meta or a fake tensor."""
    return (torch.compiler.is_compiling() or t.is_meta or isinstance(t, FakeTensor)
            or torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None)


def kept(make: Callable[..., R]) -> Callable[..., R]:
    """Cache make(t, *args) for the tensor t, which all layers share, until its values or the
    arguments change, or it dies. The result must not refer to t.

    On the CPU a copy is compared, which costs little next to attention. Elsewhere the host would
    wait for the device, so t's version is compared: a write through .data is not seen.
    """
    known = WeakTensorKeyDictionary()

    @wraps(make)
    def call(t: Tensor, *args: object) -> R:
        on_host = t.device.type == "cpu"  # where NumPy and .data write without a new version
        if symbolic(t) or (not on_host and t.is_inference()):  # which has no version
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


def begins(segments: Tensor) -> Tensor:
    """True (B, T) where a segment begins; its cumsum(1) numbers them from the left."""
    return F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)


@kept
def in_pieces(segments: Tensor) -> bool:
    """True if an id of segments (B, Tk) comes again after others; False where it cannot be read
    without waiting for a device."""
    if segments.device.type != "cpu" or symbolic(segments):
        return False
    return bool(begins(segments).sum() != begins(segments.sort(dim=1).values).sum())


@kept
def borders(segments: Tensor) -> list[list[int]]:
    """Where the segments of each row of (B, T) begin. The host waits for the device, once per
    tensor."""
    return [row.nonzero().flatten().tolist() for row in begins(segments).cpu()]


class Runs(NamedTuple):
    """Segments that hold queries, as varlen functions take them: each is a sequence."""

    cu_q: Tensor  # (runs + 1,) int32: where the queries of each begin, and the end of the last
    cu_k: Tensor  # (runs + 1,) int32: the same for its keys
    max_q: int  # the most queries in one
    max_k: int  # the most keys in one
    keys: Tensor | None  # indices of their keys among the B * Tk; None: all

    def pack(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        """q, k and v as (tokens, heads, head_dim)."""
        packed = [t.flatten(0, 1) for t in (q, k, v)]
        return packed if self.keys is None else [packed[0], *(t[self.keys] for t in packed[1:])]


@kept
def runs(segments: Tensor, Tq: int) -> Runs:
    """The runs of `segments` (B, Tk) that hold the last Tq positions."""
    B, Tk = segments.shape
    cu_k = F.pad(begins(segments).flatten().nonzero().flatten(), (0, 1), value=B * Tk)
    row, j = cu_k // Tk, cu_k % Tk
    cu_q = row * Tq + (j - (Tk - Tq)).clamp(min=0)
    keys = None
    if Tq < Tk:
        # Drop runs without queries: flash-attn 2 has a path for one query a sequence that mistakes
        # the batch size for the number of queries (csrc/flash_attn/flash_api.cpp of 2.8.3).
        with_queries = cu_q.diff() > 0
        lengths = cu_k.diff()
        keys = with_queries.repeat_interleave(lengths).nonzero().flatten()
        cu_q = F.pad(cu_q.diff()[with_queries].cumsum(0), (1, 0))
        cu_k = F.pad(lengths[with_queries].cumsum(0), (1, 0))
    max_q, max_k = torch.stack((cu_q.diff().max(), cu_k.diff().max())).tolist()
    return Runs(cu_q.int(), cu_k.int(), max_q, max_k, keys)


# --- blocks of queries ---


class Block(NamedTuple):
    """Queries that are computed together, and the keys that they see, by position: the first key of
    a row is at 0, its first query at the offset."""

    b: slice  # rows of the batch
    queries: slice
    keys: slice
    several: bool = False  # segments, whose ids mask


def block_size(q: Tensor) -> int:
    return CUDA_BLOCK if q.is_cuda else BLOCK


def blocks(queries: slice, keys: slice, spec: Spec, size: int,
           masked: bool) -> list[tuple[slice, slice]]:
    """Blocks of `size` queries with the keys that any of them sees; one block if neither the Spec
    nor the caller (`masked`) has a mask. A block that sees no key is left out."""
    n_queries, n_keys = queries.stop - queries.start, keys.stop - keys.start
    offset = queries.start - keys.start
    if not masked and maskless(n_queries, n_keys, spec.window, offset, spec.right):
        return [(queries, keys)]
    found = []
    for start in range(queries.start, queries.stop, size):
        stop = min(start + size, queries.stop)
        first = keys.start if spec.window is None else max(keys.start, start - spec.window + 1)
        last = keys.stop if spec.right is None else min(keys.stop, stop + spec.right)
        if first < last:
            found.append((slice(start, stop), slice(first, last)))
    return found


def blocks_of_segments(segments: Tensor, offset: int, spec: Spec, size: int) -> list[Block]:
    """The same for each row of segments (B, Tk). Short neighbors share a block."""
    starts, found = borders(segments), []
    alike = all(row == starts[0] for row in starts)
    for b, row in enumerate(starts[:1] if alike else starts):
        rows = slice(None) if alike else slice(b, b + 1)
        groups: list[tuple[int, int, bool]] = []  # begin, end, several segments
        for begin, end in zip(row, [*row[1:], segments.shape[1]]):
            if groups and end - max(groups[-1][0], offset) <= size:
                groups[-1] = groups[-1][0], end, True
            elif end > offset:  # it has queries
                groups.append((begin, end, False))
        for begin, end, several in groups:
            queries, keys = slice(max(begin, offset), end), slice(begin, end)
            parts = blocks(queries, keys, spec, size, spec.alibi)
            found += [Block(rows, *part, several) for part in parts]
    return found


def in_blocks(attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, spec: Spec,
              segments: Tensor | None = None, alibi_slopes: Tensor | None = None,
              **options: Any) -> Tensor:
    """Call attend(q, k, v, spec, offset=), which masks, for blocks of queries and the keys that they
    see. Segments are only masked in a call of one block and under torch.compile."""
    size = block_size(q)
    (Tq, Tk), offset = (q.shape[1], k.shape[1]), k.shape[1] - q.shape[1]
    if segments is None or Tq <= size or symbolic(segments):
        masked = spec.alibi or segments is not None
        parts = blocks(slice(offset, Tk), slice(0, Tk), spec, size, masked)
        found = [Block(slice(None), *part, segments is not None) for part in parts]
    else:
        found = blocks_of_segments(segments, offset, spec, size)
    qs = slices(q, [(b, slice(Q.start - offset, Q.stop - offset)) for b, Q, _, _ in found])
    ks, vs = (slices(t, [(b, K) for b, _, K, _ in found]) for t in (k, v))
    outs = []
    for (b, Q, K, several), *qkv in zip(found, qs, ks, vs):
        if segments is not None:
            options["segments"] = (segments[b, Q], segments[b, K]) if several else None
        if alibi_slopes is not None:
            options["alibi_slopes"] = alibi_slopes if alibi_slopes.dim() == 1 else alibi_slopes[b]
        outs.append(attend(*qkv, spec, offset=Q.start - K.start, **options))
    return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1).view(q.shape)


def slices(t: Tensor, at: list[tuple[slice, slice]]) -> tuple[Tensor, ...]:
    """t[b, J] for each (b, J). Autograd of plain slices would make a gradient of t's size for
    each."""
    if len(at) > 1 and t.requires_grad and not torch.compiler.is_compiling():
        return Slices.apply(t, at)
    return tuple(t if J == slice(0, t.shape[1]) and b == slice(None) else t[b, J] for b, J in at)


class Slices(torch.autograd.Function):
    @staticmethod
    def forward(t: Tensor, at: list[tuple[slice, slice]]) -> tuple[Tensor, ...]:
        return tuple(t[b, J] for b, J in at)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: object) -> None:
        ctx.shape, ctx.at = inputs[0].shape, inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].new_zeros(ctx.shape)
        for (b, J), grad in zip(ctx.at, grads):
            total[b, J] += grad
        return total, None


# --- views of caches ---


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

    def view(*rows: Numbers) -> StaticView | PagedView | None:
        start, count = (torch.as_tensor(x, dtype=torch.int32, device=k.device) for x in rows)
        if spec.cache == "static":
            return StaticView(start, count, T)
        return PagedView(table.int(), start, count) if spec.cache == "paged" else None

    if spec.page_size is None:
        return k, v, view
    size, n = spec.page_size, -(-T // spec.page_size)  # n pages of a row
    order = torch.randperm(B * n, generator=torch.Generator().manual_seed(0)) + 1
    table = order.view(B, n).to(k.device)
    pages = [x.new_zeros(1 + B * n, size, *x.shape[2:]) for x in (k, v)]
    for buffer, x in zip(pages, (k, v)):
        buffer[table] = F.pad(x, (0, 0, 0, 0, 0, n * size - T)).unflatten(1, (n, size))
    return pages[0], pages[1], view
