"""Tests besides accuracy: causality, dropout, determinism, compilation, caches, partial attention.

A property is a function of (backend, spec, device) that raises AssertionError.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

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
from .matrix import Fields, case_of, close, require


@dataclass(frozen=True)
class Item:
    """One test of a backend that supports `spec`; `ask` raises AssertionError if it fails."""

    name: str
    features: tuple[str, ...]  # rows of the table in command.py
    spec: Spec
    ask: Callable[[Backend, Spec, str], None]  # (backend, spec, device)
    deterministic: bool = False  # runs under torch.use_deterministic_algorithms(True)
    case: matrix.Case | None = None  # None: a property


def properties(dtype: str, length: int = 0, caps: Sequence[Caps] = ()) -> Iterator[Item]:
    """All properties; the last are those at `length` tokens (0: none) and at the limits of `caps`."""

    def item(name: str, feature: str, ask: Callable[..., None], H: int = 4, Hkv: int = 2,
             D: int = 32, deterministic: bool = False, **options: object) -> Item:
        spec = Spec(H, Hkv, D, dtype, **options)  # type: ignore[arg-type]
        name = f"{name}, {spec}".replace(f", {dtype}", "")
        return Item(name, (feature,), spec, ask, deterministic)

    causal, windowed, ahead, between, later, full = (
        {"window": w, "right": r}
        for w, r in ((None, 0), (9, 0), (None, 5), (9, 5), (9, None), (None, None))
    )
    scaled: Fields = {"scale": 0.5, "softcap": 4.0}
    for p in (0.0, 0.25):  # first: other tests compare bits
        yield item("the same bits", "determinism", same_bits, deterministic=True, dropout=p)
    for phase, (Tq, Tk, grad) in PHASES.items():
        for has in (
            *({"Hkv": n, **sides} for n in (4, 2) for sides in (causal, windowed)),
            *(ahead, between, later),
            *({"segments": True, **sides} for sides in (causal, windowed, later, full)),
        ):
            ask = partial(unseen, Tq, Tk)
            yield item(f"causality, {phase}", "causality", ask, grad=grad, **has)
    for w, Tq in itertools.product((None, 5), (20, 7, 1)):
        name, ask = f"huge negative scores, {Tq} of 20", partial(negative, Tq)
        yield item(name, "causality", ask, 2, 1, window=w, grad=Tq == 20)
    for sides in (causal, windowed, ahead, between):
        yield item("no gradient to later tokens", "causality", later_gradient, **sides)
    for grad, seg in itertools.product((True, False), (False, True)):
        yield item("empty", "lengths", empty, segments=seg, grad=grad)
    autocast = partial(surrounded, partial(torch.autocast, dtype=torch.bfloat16))
    for has in ({}, {"segments": True}, {"sinks": True}, {"right": None}):
        yield item("gradients of some inputs", "gradients", some_gradients, **has)
        yield item("other values in the same memory", "repeated calls", again, **has)
        yield item("autocast", "surroundings", autocast, **has)
    inference = partial(surrounded, lambda device: torch.inference_mode())
    yield item("inference mode", "surroundings", inference, grad=False)
    # A mask may repeat in tiles of 128 queries and keys; each entry needs many calls.
    for p, Tq, Tk, B, H, D in ((0.25, 16, 16, 8, 4, 16), (0.5, 20, 128, 8, 4, 128),
                               (0.5, 300, 300, 1, 2, 128)):
        ask = partial(rate, Tq, Tk, B)
        yield item(f"dropout rate, {Tq} of {Tk}", "dropout", ask, H, D=D, dropout=p)
    alone = {}, {"window": 5}, {"segments": True}, {"sinks": True}, scaled, full
    for has, Tq in itertools.product(alone, (16, 9)):
        name, ask = f"the same mask again, {Tq} of 16", partial(replay, Tq, 16)
        yield item(name, "dropout", ask, D=16, dropout=0.25, **has)
    for has in ({}, {"window": 70}, {"segments": True, "window": 70}):  # several tiles
        ask = partial(replay, 150, 190)
        yield item("the same mask again, 150 of 190", "dropout", ask, D=64, dropout=0.25, **has)
    for grad, sides in itertools.product((True, False), (causal, between)):
        yield item("one graph", "torch.compile", compiled, grad=grad, compiled=True, **sides)
    for w, Tq in itertools.product((None, 6), (24, 3, 1)):
        name, ask = f"left padding, {Tq} of 24", partial(padded, Tq)
        yield item(name, "caches", ask, window=w, segments=True, grad=False, cache="dynamic")
    kinds: list[Fields] = [{"cache": "static"}]
    kinds += [{"cache": "paged", "page_size": n} for n in (16, 256)]
    for has, kind in itertools.product(
            (causal, windowed, between, later, full, {"sinks": True, **scaled},
             {"alibi": True, "window": 9}, {"alibi": True, **full}), kinds):
        yield item("in a cache", "caches", cached, grad=False, **has, **kind)
    for w, seg in itertools.product((None, 9), (False, True)):
        yield item("in parts", "parts", in_parts, window=w, segments=seg, lse=True)
    yield item("in parts", "parts", in_parts, lse=True, **scaled)
    yield item("in parts", "parts", in_parts, lse=True, alibi=True, segments=True)
    for sides, seg in itertools.product((ahead, between, later, full), (False, True)):
        yield item("log-sum-exp", "parts", log_sum_exp, segments=seg, lse=True, **sides)
    for grad in (True, False):
        yield item("causality, long text", "causality", unseen_in_long, 1, 1, grad=grad)
    for w, grad in itertools.product((None, 100), (True, False)) if length else ():
        name, ask = f"{length:,} tokens", partial(right_at, length)
        yield item(name, "long sequences", ask, 2, 1, 64, window=w, grad=grad)
    for row in caps:
        size = row.page_multiple if "paged" in row.caches else None
        if size:
            has = {"cache": "paged", "page_size": size}
            yield item("smallest pages", "caches", cached, grad=False, **has)
        if D := row.head_dim_max:
            has = {} if "none" in row.caches else {"cache": row.caches[0], "page_size": size}
            grad, ask = row.grad and not has, cached if has else right
            yield item("largest head_dim", "causal", ask, D=D, grad=grad, **has)


def right(backend: Backend, spec: Spec, device: str) -> None:
    matrix.check(backend, case_of(spec, 33), spec.dtype, device, grad=spec.grad)


def right_at(length: int, backend: Backend, spec: Spec, device: str) -> None:
    why = proof.probe_long(backend, spec, device, (1, length, length))
    require(not why, "; ".join(why))


# --- what a query does not see ---

PHASES = {  # Tq, Tk, whether autograd records
    "training": (33, 33, True),
    "evaluation": (33, 33, False),
    "chunked prefill": (20, 33, False),
    "decode": (1, 33, False),
}
HUGE = 3000.0  # finite in float16, as are its products with values of size 1


def draw(spec: Spec, device: str, Tk: int, Tq: int = 0, B: int = 2) -> Inputs:
    """Random inputs, with two segments; Tq 0: as many queries as keys."""
    shape, chance = (B, Tq or Tk, Tk), torch.Generator().manual_seed(7)
    return proof.draw_inputs(spec, torch.device(device), shape, chance)


def unseen(Tq: int, Tk: int, backend: Backend, spec: Spec, device: str) -> None:
    """Multiply one position of q, k or v by HUGE: outputs that do not see it keep their bits, and
    of the others some change. So keys before every window change nothing."""
    given, first = draw(spec, device, Tk), Tk - Tq

    def output(given: Inputs) -> Tensor:
        return run(backend.attend, given._replace(q=given.q[:, first:]), spec, times=0).out

    seen = mask(Tq, Tk, spec.window, given.segments, given.q.device, None, spec.right)[0, 0]
    own = torch.eye(Tk, device=seen.device).bool()[first:]
    several = seen.sum(1) > 1  # one key has weight 1, whatever q and k are
    before = output(given)
    places = {0, first + 1, first + Tq // 2, Tk - 1} if Tk < 100 else {Tk - 500}
    for at, name in itertools.product(sorted(places & {*range(Tk)}), "qkv"):
        louder, free = getattr(given, name).clone(), (own if name == "q" else seen)[:, at]
        louder[:, at] *= HUGE
        for _ in range(3):  # a library may round differently once, under load
            moved = (output(given._replace(**{name: louder})) != before).any(3).any(2).any(0)
            if not moved[~free].any():
                break
        expected = moved[free & several].any() == (free & several).any()
        rows = moved.nonzero().flatten().tolist()
        text = f"{name} changed at {at}; outputs that moved: {rows[:9] or 'none'}"
        require(expected and not moved[~free].any(), text)


def unseen_in_long(backend: Backend, spec: Spec, device: str) -> None:
    """In a long text a kernel may take another path."""
    T = 8193 if torch.device(device).type == "cuda" else 2049
    unseen(T, T, backend, spec, device)


def negative(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    """All scores are -12,000 sqrt(D), -67,882 for 32: with a finite float16 as mask value, masked
    keys would have the largest."""
    Tk, dtype, D = 20, getattr(torch, spec.dtype), spec.head_dim
    q = torch.full((1, Tq, spec.n_head, D), -12000.0, dtype=dtype, device=device)
    k = torch.ones(1, Tk, spec.n_kv_head, D, dtype=dtype, device=device)
    v = torch.arange(Tk, dtype=dtype, device=device)[None, :, None, None].expand(k.shape)
    given = Inputs(q, k, v.contiguous(), q)
    out = run(backend.attend, given, spec).out[0, :, 0, 0].double().cpu()
    last = torch.arange(Tk - Tq, Tk)  # each output is the mean index of the visible keys
    first = (last - (spec.window or Tk) + 1).clamp(min=0)
    close(out, (first + last) / 2, 0.02, "the mean of the visible values")


def later_gradient(backend: Backend, spec: Spec, device: str) -> None:
    given = matrix.inputs(case_of(spec, 33), spec.dtype, device)
    early = (torch.arange(33, device=device) < 20)[:, None, None]
    given = given._replace(dout=given.dout * early)
    for name, grad in list(run(backend.attend, given, spec).tensors.items())[1:]:
        last = 19 if name == "dq" else 19 + (spec.right or 0)
        require(not grad[:, last + 1 :].any(), f"{name} of a later token is not zero")
        require(grad[:, last].any(), f"{name} of token {last} is zero")


# --- dropout: where v is the identity, the output is the matrix P after dropout ---


def dropped(backend: Backend, given: Inputs, spec: Spec, seed: int | None = None) -> proof.Result:
    """run(), in which an error of the kernel is a failure of the property."""
    if seed is not None:
        torch.manual_seed(seed)
    try:
        return run(backend.attend, given, spec)
    except RuntimeError as e:
        if loses_device(e):
            raise
        raise AssertionError(f"{type(e).__name__}: {first_line(e)}") from e


def weights(backend: Backend, given: Inputs, spec: Spec, seed: int) -> Tensor:
    """P after dropout, (B, Tq, H, Tk): under one seed v is D columns of the identity at a time."""
    Tk, D = given.k.shape[1], spec.head_dim
    eye = F.pad(torch.eye(Tk, device=given.v.device, dtype=given.v.dtype), (0, -Tk % D))
    columns = (t[None, :, None].expand(given.v.shape).contiguous() for t in eye.split(D, dim=1))
    found = [dropped(backend, given._replace(v=v), spec, seed).out for v in columns]
    return torch.cat(found, dim=3)[..., :Tk]


AXES = ("calls", "rows of the batch", "queries", "heads", "keys")


def together(x: Tensor) -> Tensor:
    """The sum of x times x shifted, for each shift along all axes: its autocorrelation."""
    sizes = [2 * n for n in x.shape]  # as zeros follow, no shift wraps around
    return torch.fft.irfftn(torch.fft.rfftn(x, sizes).abs().square(), sizes)


def rate(Tq: int, Tk: int, B: int, backend: Backend, spec: Spec, device: str) -> None:
    """A fraction p of the probabilities is dropped; the rest is divided by 1 - p. Each entry is
    dropped as often. Two entries any number of calls, texts, queries, heads and keys apart are
    dropped together as often as by chance."""
    p, quiet, given = spec.dropout, replace(spec, grad=False), draw(spec, device, Tk, Tq, B)
    P = weights(backend, given, replace(quiet, dropout=0.0), 0)
    there, eps = P != 0, torch.finfo(P.dtype).eps
    # An entry that is never dropped is off by 6 sigma.
    n = math.ceil(40 * (1 - p) / p / B) if B > 1 else 1
    calls = []
    for seed in range(n):
        got = weights(backend, given, quiet, seed)
        left = (got != 0) & there
        close(got[left], P[left] / (1 - p), 8 * eps, "what was kept")
        calls.append(got == 0)
    x = (torch.stack(calls).float() - p) * there  # (n, B, Tq, H, Tk) of mean 0
    variance, total = p * (1 - p), n * int(there.sum())
    share = float(x.sum()) / total
    text = f"{p + share:.4f} are dropped, expected {p}"
    require(abs(share) < 6 * (variance / total) ** 0.5, text)
    uneven = x.mean((0, 1)).abs() > 6 * (variance / (n * B)) ** 0.5
    require(not uneven.any(), "some probabilities are dropped more often than others")

    product, pairs = together(x), together(there.float().expand(x.shape)).clamp(min=0)
    # Bernstein's inequality: a sum of independent products is past this once in a million tests.
    tail = math.log(1e6 * product.numel())
    most = max(p, 1 - p) ** 2 * tail / 3
    bound = most + (most**2 + 2 * tail * variance**2 * pairs).sqrt() + 1e-6 * total
    bound.view(-1)[0] = torch.inf  # not shifted
    if (found := (product.abs() - bound).argmax()) and product.view(-1)[found].abs() > bound.view(-1)[found]:
        shift = zip(torch.unravel_index(found, bound.shape), bound.shape, AXES)
        apart = [f"{int(i) - n * (i > n // 2)} {name}" for i, n, name in shift if i]
        require(False, f"entries {', '.join(apart)} apart are dropped together")


def replay(Tq: int, Tk: int, backend: Backend, spec: Spec, device: str) -> None:
    """The same seed gives the same mask M, forward and backward; the results match P M / (1 - p).
    Two calls have different masks."""
    given = draw(spec, device, Tk, Tq, B=4 if Tk < 64 else 1)
    quiet = replace(spec, grad=False)
    kept = weights(backend, given, quiet, 5) != 0  # (B, Tq, H, Tk)
    require(kept.equal(weights(backend, given, quiet, 5) != 0), "one seed gives different masks")
    first = dropped(backend, given, quiet, 5).out
    same = first.equal(dropped(backend, given, quiet).out)
    require(not same, "two calls have the same dropout mask")
    got = dropped(backend, given, spec, 5)

    inputs = (t for t in (*given[:3], given.sinks) if t is not None)
    leaves = [t.detach().double().requires_grad_() for t in inputs]
    group = spec.n_head // spec.n_kv_head
    q, k, v = leaves[0], *(t.repeat_interleave(group, dim=2) for t in leaves[1:3])
    scores = torch.einsum("bihd,bjhd->bihj", q, k) * spec.softmax_scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    seen = mask(Tq, Tk, spec.window, given.segments, q.device, None, spec.right).transpose(1, 2)
    scores = scores.masked_fill(~seen, float("-inf"))
    if spec.sinks:
        scores = torch.cat([scores, leaves[3][:, None].expand(*scores.shape[:-1], 1)], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :Tk] * kept / (1 - spec.dropout)
    want = torch.einsum("bihj,bjhd->bihd", probs, v)
    truth = [want, *torch.autograd.grad(want, leaves, given.dout.double())]
    for (name, t), w in zip(got.tensors.items(), truth):
        tolerance = 20 * max(1.0, float(w.detach().abs().max())) * torch.finfo(t.dtype).eps
        close(t, w, tolerance, f"{name} with the mask of the forward pass")


# --- empty inputs, gradients of some inputs, repeated calls, surroundings ---


def empty(backend: Backend, spec: Spec, device: str) -> None:
    """Without batch, queries or keys, the output and the gradients are zeros, if anything."""
    for B, Tq, Tk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (t[:B] for t in draw(spec, device, 5)[:3])
        seg = torch.zeros(B, Tk, dtype=torch.int32, device=device) if spec.segments else None
        given = Inputs(q[:, :Tq], k[:, :Tk], v[:, :Tk], q[:, :Tq], seg)
        for name, t in run(backend.attend, given, spec).tensors.items():
            like = getattr(given, "q" if name == "out" else name[1:])
            zeros = t.shape == like.shape and not t.any()
            require(zeros, f"batch {B}, {Tq} queries, {Tk} keys: {name} is {t}")


def some_gradients(backend: Backend, spec: Spec, device: str) -> None:
    """Gradients of each input alone, and of all but it; a graph that is kept gives them again."""
    case = case_of(spec, 17)
    given = matrix.inputs(case, spec.dtype, device)
    names = [name for name in ("q", "k", "v", "sinks") if getattr(given, name) is not None]
    for wrt in (w for n in (1, len(names) - 1) for w in itertools.combinations(names, n)):
        got = run(backend.attend, given, spec, wrt, times=2)
        matrix.compare(got, case, spec.dtype, device)


def again(backend: Backend, spec: Spec, device: str) -> None:
    """A second call with other values in the same memory draws no random number and does not change
    the first result. On the CPU PyTorch does not know of the change (masks.kept)."""

    def states() -> list[Tensor]:
        cuda = torch.device(device).type == "cuda"
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
    given, results = matrix.inputs(case_of(spec, T), spec.dtype, device), []
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            torch.manual_seed(0)
            results.append(run(backend.attend, given, spec).tensors)
    finally:
        torch.use_deterministic_algorithms(was)
    for name, result in itertools.product(results[0], results[1:]):
        require(torch.equal(result[name], results[0][name]), f"{name} differs between runs")


def compiled(backend: Backend, spec: Spec, device: str) -> None:
    torch.compiler.reset()
    compiler = "inductor" if torch.device(device).type == "cuda" else "aot_eager"
    eager = backend.attend

    def attend(*args: object, **more: object) -> Tensor:
        return eager(*args, **more)

    traced = torch.compile(attend, backend=compiler, fullgraph=backend.fullgraph, dynamic=False)
    backend, case = replace(backend, attend=traced), case_of(spec, 65)
    matrix.check(backend, case, spec.dtype, device, grad=spec.grad, compiled=True)
    torch.compiler.reset()


def padded(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    case = case_of(spec, 24, Tq, segments="left", B=3)
    matrix.check(backend, case, spec.dtype, device, grad=False, cache=spec.cache)


def cached(backend: Backend, spec: Spec, device: str) -> None:
    """With a cache the output equals that of each chunk with the keys up to its end, and is
    causal."""
    case = case_of(spec, 64 if (spec.page_size or 0) < 64 else 300)
    given, way = matrix.inputs(case, spec.dtype, device), partial(run_cached, backend.attend)
    got = way(given, spec)
    if spec.right == 0:
        matrix.compare(got, case, spec.dtype, device)
    else:  # a chunk's queries see no key of a later chunk
        rough, exact = proof.by_chunks(given, spec)
        matrix.agree(got, rough, exact, spec.dtype)
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
    """Partial attention over blocks, merged by its log-sum-exp L, equals full attention."""
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
        L = L.masked_fill(torch.finfo(acc).min == L, -torch.inf)
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
