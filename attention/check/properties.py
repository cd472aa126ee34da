"""Tests besides accuracy: causality, dropout, determinism, torch.compile, caches, parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import proof
from ..caps import Backend, Caps
from ..function import attention, whole
from ..machine.system import first_line, loses_device
from ..masks import Pair, alibi, mask
from ..proof import Inputs, leakage, run, run_cached
from ..spec import Spec
from . import matrix
from .matrix import Fields, Item, case_of, close, require
from .program import cast, program


def properties(dtype: str, length: int = 0, caps: Sequence[Caps] = ()) -> Iterator[Item]:
    """All; the last are those at `length` tokens (0: none) and the limits of `caps`."""

    def each(name: str, feature: str, ask: Callable[..., None], *several: Fields,
             deterministic: bool = False, **options: Any) -> Iterator[Item]:
        for has in several or ({},):
            sizes = {"n_head": 4, "n_kv_head": 2, "head_dim": 32, "dtype": dtype}
            spec = Spec(**{**sizes, **options, **has})
            text = f"{name}, {spec}".replace(f", {dtype}", "")
            yield Item(text, (feature,), spec, ask, deterministic)

    causal: Fields = {}
    windowed, ahead, between, later, full, segmented, sinks, scaled, alibi = (
        {"window": 9}, {"right": 5}, {"window": 9, "right": 5}, {"window": 9, "right": None},
        {"right": None}, {"segments": True}, {"sinks": True}, {"scale": 0.5, "softcap": 4.0},
        {"alibi": True})
    both: tuple[Fields, ...] = {"grad": True}, {"grad": False}
    kept = {"dropout": 0.0}, {"dropout": 0.25}  # first: other tests compare bits
    yield from each("the same bits", "determinism", same_bits, *kept, deterministic=True)
    sides = causal, windowed, ahead, between, later, {"n_kv_head": 4}, {"n_kv_head": 4, **windowed}
    within = [{**segmented, **side} for side in (causal, windowed, later, full)]
    for phase, Tq in (("training", 33), ("evaluation", 33), ("chunked prefill", 20), ("decode", 1)):
        yield from each(f"causality, {phase}", "causality", partial(unseen, Tq, 33), *sides,
                        *within, grad=phase == "training")
    for w, Tq in itertools.product((None, 5), (20, 7, 1)):
        yield from each(f"huge negative scores, {Tq} of 20", "causality", partial(negative, Tq),
                        n_head=2, n_kv_head=1, window=w, grad=Tq == 20)
    yield from each("no gradient to later tokens", "causality", later_gradient, causal, windowed,
                    ahead, between)
    for has in both:
        yield from each("empty", "lengths", empty, causal, segmented, **has)
    some: tuple[Fields, ...] = causal, segmented, sinks, full
    yield from each("gradients of some inputs", "gradients", some_gradients, *some)
    yield from each("other values in the same memory", "repeated calls", again, *some)
    ask = partial(surrounded, partial(torch.autocast, dtype=torch.bfloat16))
    yield from each("autocast", "surroundings", ask, *some)
    ask = partial(surrounded, lambda device: torch.inference_mode())
    yield from each("inference mode", "surroundings", ask, grad=False)
    # A mask may repeat in tiles of 128 queries and keys; each entry needs many calls.
    for p, Tq, Tk, B, H, D in ((0.25, 16, 16, 8, 4, 16), (0.5, 20, 128, 8, 4, 128),
                               (0.5, 300, 300, 1, 2, 128)):
        yield from each(f"dropout rate, {Tq} of {Tk}", "dropout", partial(rate, Tq, Tk, B),
                        n_head=H, head_dim=D, dropout=p)
    short = {"window": 5}, segmented, sinks, scaled, full
    long = {"window": 70}, {"window": 70, **segmented}
    for Tq, Tk, D, these in ((16, 16, 16, short), (9, 16, 16, short), (150, 190, 64, long)):
        yield from each(f"the same mask again, {Tq} of {Tk}", "dropout", partial(replay, Tq, Tk),
                        causal, *these, head_dim=D, dropout=0.25)
    for has in both:
        yield from each("one graph", "torch.compile", compiled, causal, between, compiled=True,
                        **has)
    for w, Tq in itertools.product((None, 6), (24, 3, 1)):
        ask = partial(right, Tk=24, Tq=Tq, segments="left", B=3)
        yield from each(f"left padding, {Tq} of 24", "caches", ask, window=w, segments=True,
                        grad=False, cache="dynamic")
    yield from each("3 of 24", "caches", partial(right, Tk=24, Tq=3), grad=False, cache="dynamic")
    caching = (causal, windowed, between, later, full, {**sinks, **scaled},
               {**alibi, "window": 9}, {**alibi, **full})
    for size in (None, 16, 256):
        yield from each("in a cache", "caches", cached, *caching, grad=False, page_size=size,
                        cache="paged" if size else "static")
    yield from each("in parts", "parts", in_parts, causal, windowed, *within[:2], scaled,
                    {**alibi, **segmented}, lse=True)
    for seg in (False, True):
        yield from each("log-sum-exp", "parts", log_sum_exp, ahead, between, later, full,
                        segments=seg, lse=True)
    yield from each("causality, long text", "causality", partial(unseen, 0, LONG), *both, n_head=1,
                    n_kv_head=1)
    for w in (None, 100) if length else ():
        yield from each(f"{length:,} tokens", "long sequences", partial(right_at, length), *both,
                        n_head=2, n_kv_head=1, head_dim=64, window=w)
    for row in caps:
        paged = {"cache": "paged", "page_size": row.page_multiple, "grad": False}
        if "paged" in row.caches:
            yield from each("smallest pages", "caches", cached, paged)
        if row.head_dim_max:
            plain, cache = "none" in row.caches, {"cache": row.caches[0], "grad": False}
            has = {"grad": row.grad} if plain else paged if "paged" in row.caches[:1] else cache
            yield from each("largest head_dim", "causal", right if plain else cached, has,
                            head_dim=row.head_dim_max)


def right(backend: Backend, spec: Spec, device: str, Tk: int = 33, Tq: int | None = None,
          **more: Any) -> None:
    case = case_of(spec, Tk, Tq, **more)
    matrix.check(backend, case, spec.dtype, device, grad=spec.grad, cache=spec.cache,
                 compiled=spec.compiled)


def right_at(length: int, backend: Backend, spec: Spec, device: str) -> None:
    why = proof.probe_long(backend, spec, device, (1, length, length))
    require(not why, "; ".join(why))


# --- what a query does not see ---

LONG = 2049  # tokens
HUGE = 3000.0  # finite in float16, as are its products with values of size 1


def draw(spec: Spec, device: str, Tk: int, Tq: int = 0, B: int = 2) -> Inputs:
    """Random inputs, with two segments; Tq 0: as many queries as keys."""
    shape, chance = (B, Tq or Tk, Tk), torch.Generator().manual_seed(7)
    return proof.draw_inputs(spec, torch.device(device), shape, chance)


def unseen(Tq: int, Tk: int, backend: Backend, spec: Spec, device: str) -> None:
    """Multiply one position of q, k or v by HUGE: outputs that do not see it keep their bits, and
    of the others some change. So keys before every window change nothing."""
    if Tk == LONG:  # a kernel may take another path
        Tq = Tk = 8193 if torch.device(device).type == "cuda" else LONG
    given, first = draw(spec, device, Tk), Tk - Tq

    def output(**louder: Tensor) -> Tensor:
        x = given._replace(**louder)
        return run(backend.attend, x._replace(q=x.q[:, first:]), spec, times=0).out

    seen = mask(Tq, Tk, spec.window, given.segments, given.q.device, None, spec.right)[0, 0]
    own = torch.eye(Tk, device=seen.device).bool()[first:]
    several = seen.sum(1) > 1  # one key has weight 1, whatever q and k are
    before = output()
    places = {0, first + 1, first + Tq // 2, Tk - 1} if Tk < 100 else {Tk - 500}
    for at, name in itertools.product(sorted(places & {*range(Tk)}), "qkv"):
        louder, free = getattr(given, name).clone(), (own if name == "q" else seen)[:, at]
        louder[:, at] *= HUGE
        for _ in range(3):  # a library may round differently once, under load
            moved = (output(**{name: louder}) != before).any(3).any(2).any(0)
            if not moved[~free].any():
                break
        expected = moved[free & several].any() == (free & several).any()
        rows = moved.nonzero().flatten().tolist()
        text = f"{name} changed at {at}; outputs that moved: {rows[:9] or 'none'}"
        require(expected and not moved[~free].any(), text)


def negative(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    """All scores are -12,000 sqrt(D), -67,882 for 32: with a finite float16 as mask value, masked
    keys would have the largest. Each output is the mean index of the visible keys."""
    Tk, to = 20, {"dtype": getattr(torch, spec.dtype), "device": device}
    q = torch.full((1, Tq, spec.n_head, spec.head_dim), -12000.0, **to)
    k = torch.ones(1, Tk, spec.n_kv_head, spec.head_dim, **to)
    v = torch.arange(Tk, **to)[None, :, None, None].expand(k.shape).contiguous()
    out = run(backend.attend, Inputs(q, k, v, q), spec).out[0, :, 0, 0].double().cpu()
    last = torch.arange(Tk - Tq, Tk)
    first = (last - (spec.window or Tk) + 1).clamp(min=0)
    close(out, (first + last) / 2, 0.02, "the mean of the visible values")


def later_gradient(backend: Backend, spec: Spec, device: str) -> None:
    given = matrix.inputs(case_of(spec, 33), spec.dtype, device)
    early = (torch.arange(33, device=device) < 20)[:, None, None]
    got = run(backend.attend, given._replace(dout=given.dout * early), spec)
    for name, last in (("dq", 19), ("dk", 19 + (spec.right or 0)), ("dv", 19 + (spec.right or 0))):
        grad = got.tensors[name]
        require(not grad[:, last + 1 :].any(), f"{name} of a later token is not zero")
        require(grad[:, last].any(), f"{name} of token {last} is zero")


# --- dropout: where v is the identity, the output is the matrix P after dropout ---


def seeded(seed: int, backend: Backend, given: Inputs, spec: Spec) -> proof.Result:
    torch.manual_seed(seed)
    try:
        return run(backend.attend, given, spec)
    except RuntimeError as e:  # these inputs are not a matrix's, which would report its error
        if loses_device(e):
            raise
        raise AssertionError(first_line(e)) from e


def weights(backend: Backend, given: Inputs, spec: Spec, seed: int) -> Tensor:
    """P after dropout, (B, Tq, H, Tk): under one seed v is D columns of the identity at a time."""
    Tk, D = given.k.shape[1], spec.head_dim
    eye = F.pad(torch.eye(Tk, device=given.v.device, dtype=given.v.dtype), (0, -Tk % D))
    columns = (t[None, :, None].expand(given.v.shape).contiguous() for t in eye.split(D, dim=1))
    found = [seeded(seed, backend, given._replace(v=v), spec).out for v in columns]
    return torch.cat(found, dim=3)[..., :Tk]


def together(x: Tensor) -> Tensor:
    """The sum of x times x shifted, for each shift along all axes: its autocorrelation."""
    sizes = [2 * n for n in x.shape]  # as zeros follow, no shift wraps around
    return torch.fft.irfftn(torch.fft.rfftn(x, sizes).abs().square(), sizes)


def rate(Tq: int, Tk: int, B: int, backend: Backend, spec: Spec, device: str) -> None:
    """Each entry is dropped at rate p, independent of all others; the rest is divided by 1 - p."""
    p, quiet, given = spec.dropout, replace(spec, grad=False), draw(spec, device, Tk, Tq, B)
    P = weights(backend, given, replace(quiet, dropout=0.0), 0)
    there, eps = P != 0, torch.finfo(P.dtype).eps
    # An entry that is never dropped is off by 6 sigma.
    n = math.ceil(40 * (1 - p) / p / B) if B > 1 else 1
    got = torch.stack([weights(backend, given, quiet, seed) for seed in range(n)])
    left = (got != 0) & there
    close(got[left], P.expand_as(got)[left] / (1 - p), 8 * eps, "what was kept")
    x = (got.eq(0).float() - p) * there  # (n, B, Tq, H, Tk) of mean 0
    variance, total = p * (1 - p), n * int(there.sum())
    share = float(x.sum()) / total
    require(abs(share) < 6 * (variance / total) ** 0.5, f"{p + share:.4f} are dropped, not {p}")
    uneven = x.mean((0, 1)).abs() > 6 * (variance / (n * B)) ** 0.5
    require(not uneven.any(), "some probabilities are dropped more often than others")

    product, pairs = together(x), together(there.float().expand(x.shape)).clamp(min=0)
    # Bernstein's inequality: a sum of independent products is past this once in a million tests.
    tail = math.log(1e6 * product.numel())
    most = max(p, 1 - p) ** 2 * tail / 3
    bound = most + (most**2 + 2 * tail * variance**2 * pairs).sqrt() + 1e-6 * total
    excess = product.abs() - bound
    excess.view(-1)[0] = 0  # not shifted
    axes = zip(("calls", "rows of the batch", "queries", "heads", "keys"), excess.shape)
    shift = zip(torch.unravel_index(excess.argmax(), excess.shape), axes)
    apart = ", ".join(f"{int(i) - n * (i > n // 2)} {name}" for i, (name, n) in shift if i)
    require(excess.max() <= 0, f"entries {apart} apart are dropped together")


def replay(Tq: int, Tk: int, backend: Backend, spec: Spec, device: str) -> None:
    """One seed gives one mask, forward and backward; two calls have different masks."""
    given = draw(spec, device, Tk, Tq, B=4 if Tk < 64 else 1)
    quiet = replace(spec, grad=False)
    kept = weights(backend, given, quiet, 5) != 0  # (B, Tq, H, Tk)
    require(kept.equal(weights(backend, given, quiet, 5) != 0), "one seed gives different masks")
    first, second = seeded(5, backend, given, quiet), run(backend.attend, given, quiet)
    require(not first.out.equal(second.out), "two calls have the same dropout mask")
    got = seeded(5, backend, given, spec)

    by = partial(program, keep=kept.transpose(1, 2).double() / (1 - spec.dropout))
    truth = run(by, cast(given, "float64"), replace(spec, dtype="float64", dropout=0.0))
    for name, want in truth.tensors.items():
        tolerance = 20 * max(1.0, float(want.abs().max())) * torch.finfo(first.out.dtype).eps
        close(got.tensors[name], want, tolerance, f"{name} with the mask of the forward pass")


# --- empty inputs, gradients of some inputs, repeated calls, surroundings ---


def empty(backend: Backend, spec: Spec, device: str) -> None:
    """Without batch, queries or keys, the output and the gradients are zeros, if anything."""
    for B, Tq, Tk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (t[:B] for t in draw(spec, device, 5)[:3])
        seg = torch.zeros(B, Tk, dtype=torch.int32, device=device) if spec.segments else None
        given = Inputs(q[:, :Tq], k[:, :Tk], v[:, :Tk], q[:, :Tq], seg)
        for name, t in run(backend.attend, given, spec).tensors.items():
            zeros = t.shape == getattr(given, "q" if name == "out" else name[1:]).shape
            text = f"batch {B}, {Tq} queries, {Tk} keys: {name} is {t}"
            require(zeros and not t.any(), text)


def some_gradients(backend: Backend, spec: Spec, device: str) -> None:
    """Gradients of each input alone, and of all but it; a graph that is kept gives them again."""
    case = case_of(spec, 17)
    given = matrix.inputs(case, spec.dtype, device)
    names = ["q", "k", "v", *["sinks"] * spec.sinks]
    for wrt in (w for n in (1, len(names) - 1) for w in itertools.combinations(names, n)):
        got = run(backend.attend, given, spec, wrt, times=2)
        matrix.compare(got, case, spec.dtype, device)


def again(backend: Backend, spec: Spec, device: str) -> None:
    """A second call with other values in the same memory draws no random number and does not change
    the first result. On the CPU PyTorch does not know of the change (masks.kept)."""
    cuda = torch.device(device).type == "cuda"

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    drawn = matrix.inputs(case_of(spec, 33), spec.dtype, device)
    given = Inputs(*(None if t is None else t.clone() for t in drawn))  # type: ignore[arg-type]
    first = run(backend.attend, given, spec)
    before, state = {name: t.clone() for name, t in first.tensors.items()}, states()
    for t in (t for t in given if t is not None):
        (t.data if t.device.type == "cpu" else t).copy_(t.flip(min(1, t.dim() - 1)))
    got = run(backend.attend, given, spec)
    matrix.agree(got, proof.plain(given, spec), proof.truth(given, spec), spec.dtype)
    same = all(map(torch.equal, first.tensors.values(), before.values()))
    require(same, "a second call changed the first result")
    require(all(map(torch.equal, state, states())), "a random number was drawn")


def surrounded(context: Callable[[str], AbstractContextManager[object]], backend: Backend,
               spec: Spec, device: str) -> None:
    """Right, in q's dtype, inside a context manager."""

    def attend(*args: object, **more: object) -> Tensor:
        with context(torch.device(device).type):
            return backend.attend(*args, **more)

    right(replace(backend, attend=attend), spec, device)


# --- determinism, torch.compile, caches, partial attention ---


def same_bits(backend: Backend, spec: Spec, device: str) -> None:
    """Five runs give the same bits; on CUDA at a size of many thread blocks."""
    T = 1024 if torch.device(device).type == "cuda" else 97
    given = matrix.inputs(case_of(spec, T), spec.dtype, device)
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        results = [seeded(0, backend, given, spec).tensors for _ in range(5)]
    finally:
        torch.use_deterministic_algorithms(was)
    for name, result in itertools.product(results[0], results[1:]):
        require(torch.equal(result[name], results[0][name]), f"{name} differs between runs")


def compiled(backend: Backend, spec: Spec, device: str) -> None:
    torch.compiler.reset()
    compiler = "inductor" if torch.device(device).type == "cuda" else "aot_eager"
    attend = backend.attend
    traced = torch.compile(lambda *args, **more: attend(*args, **more), backend=compiler,
                           fullgraph=backend.fullgraph, dynamic=False)
    right(replace(backend, attend=traced), spec, device, 65)
    torch.compiler.reset()


def cached(backend: Backend, spec: Spec, device: str) -> None:
    """With a cache the output is that of each chunk with the keys up to its end, and causal."""
    case = case_of(spec, 64 if (spec.page_size or 0) < 64 else 300)
    given, way = matrix.inputs(case, spec.dtype, device), partial(run_cached, backend.attend)
    wants = proof.by_chunks(given, spec) if spec.right != 0 else (
        matrix.plain(case, spec.dtype, device), matrix.truth(case, spec.dtype))
    matrix.agree(way(given, spec), *wants, spec.dtype)
    leak = leakage(way, given, spec, 0)
    require(leak == 0, f"a later token moves earlier outputs, by up to {leak:.2g}")


def require_L(L: Tensor, out: Tensor, q: Tensor, k: Tensor, spec: Spec, pair: Pair,
              offset: int, slopes: Tensor | None = None) -> None:
    """L (B, H, Tq) is the log-sum-exp of the rows; where it is -inf they see no key: out is 0."""
    keys = k.double().repeat_interleave(spec.n_head // spec.n_kv_head, dim=2)
    scores = torch.einsum("bihd,bjhd->bhij", q.double(), keys) * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if slopes is not None:
        scores = scores + alibi(slopes, q.shape[1], k.shape[1], offset, scores.dtype)
    sides = spec.window, pair, q.device, offset, spec.right
    want = scores.masked_fill(~mask(q.shape[1], k.shape[1], *sides), -torch.inf).logsumexp(dim=3)
    masked = want.isneginf()
    require(masked.equal(L.isneginf()), "L must be -inf in fully masked rows only")
    require(not out.transpose(1, 2)[masked].any(), "a fully masked row must give zeros")
    tolerance = 20 * max(torch.finfo(q.dtype).eps, torch.finfo(torch.float32).eps)
    close(L[~masked], want[~masked], tolerance, "L")


def in_parts(backend: Backend, spec: Spec, device: str) -> None:
    """Blocks of attention, merged by their log-sum-exp L, equal full attention."""
    assert backend.partial is not None, "it declares lse but has no partial"
    Tq, Tk = 50, 41  # the first 9 queries see no key
    case = case_of(spec, Tk, Tq)
    q, k, v, dout, seg, _, slopes = matrix.inputs(case, spec.dtype, device)
    more = {} if slopes is None else {"alibi_slopes": slopes}
    acc, parts = torch.promote_types(q.dtype, torch.float32), []
    # In rows 16 to 37 and keys 13 to 30 the mask hides a few pairs.
    borders = itertools.pairwise((0, 16, 37, Tq)), itertools.pairwise((0, 13, 30, Tk))
    for I, J in ((slice(*i), slice(*j)) for i, j in itertools.product(*borders)):
        pair = None if seg is None else (F.pad(seg, (Tq - Tk, 0))[:, I], seg[:, J])
        parts.append((I, J, I.start - J.start + Tk - Tq, pair))
    out, *sums = (torch.zeros(t.shape, dtype=acc, device=device) for t in (q, q, k, v))
    L = out.new_full((q.shape[0], q.shape[2], Tq), torch.finfo(acc).min)
    with torch.no_grad():
        for I, J, offset, pair in parts:
            tile = q[:, I], k[:, J], v[:, J], spec, offset, pair
            O_ij, L_ij = backend.partial.forward(*tile, **more)
            require(O_ij.dtype == L_ij.dtype == acc, f"out is {O_ij.dtype}, L is {L_ij.dtype}")
            require_L(L_ij, O_ij, q[:, I], k[:, J], spec, pair, offset, slopes)
            L_new = torch.logaddexp(L[..., I], L_ij)
            old, new = (torch.exp(x - L_new).mT[..., None] for x in (L[..., I], L_ij))
            out[:, I], L[..., I] = old * out[:, I] + new * O_ij, L_new
        L = L.masked_fill(L.eq(torch.finfo(acc).min), -torch.inf)
        merged = out.to(q.dtype)
        for I, J, offset, pair in parts:
            of_row = dout[:, I], q[:, I], k[:, J], v[:, J], merged[:, I], L[..., I]
            grads = backend.partial.backward(*of_row, spec, offset, pair, **more)
            for total, rows, grad in zip(sums, (I, J, J), grads, strict=True):
                require(grad.dtype == acc, f"a gradient is {grad.dtype}")
                total[:, rows] += grad
    got = proof.Result(merged, *(t.to(q.dtype) for t in sums))
    matrix.compare(got, case, spec.dtype, device)


def log_sum_exp(backend: Backend, spec: Spec, device: str) -> None:
    """L of whole rows that see later keys, and the gradients by it."""
    for Tq, Tk in ((33, 33), (20, 33), *([] if spec.segments else [(40, 33)])):
        case = case_of(spec, Tk, Tq)
        given = matrix.inputs(case, spec.dtype, device)
        matrix.compare(run(whole(backend), given, spec), case, spec.dtype, device)
        q, k, v, _, seg, *_ = given
        with torch.no_grad():
            out, L = attention(q, k, v, spec, segments=seg, kernel=backend.partial)
        pair = None if seg is None else (seg[:, Tk - Tq :], seg)
        require_L(L, out, q, k, spec, pair, Tk - Tq)
