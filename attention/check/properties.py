"""Tests of causality, dropout, determinism, compilation, caches and partial attention."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from .. import proof
from ..caps import Backend
from ..machine.system import first_line, loses_device
from ..masks import mask
from ..proof import Inputs, leakage, run, run_cached
from ..spec import Spec
from . import matrix
from .matrix import close, require
from .parts import in_parts, log_sum_exp


@dataclass(frozen=True)
class Item:
    """One test of a backend that supports `spec`; `ask` raises AssertionError if it fails."""

    name: str
    features: tuple[str, ...]  # rows of the table in command.py
    spec: Spec
    ask: Callable[[Backend, Spec, str], None]  # (backend, spec, device)
    deterministic: bool = False  # runs under torch.use_deterministic_algorithms(True)
    case: matrix.Case | None = None  # None: a property
    length: int = 0  # of a long sequence, in tokens


def properties(dtype: str) -> Iterator[Item]:
    def item(
        name: str, feature: str, spec: Spec, ask: Callable[..., None], deterministic: bool = False
    ) -> Item:
        heads = f", {spec.n_head} heads over {spec.n_kv_head}" * (spec.n_head > spec.n_kv_head)
        sides = f", window {spec.window}" if spec.window else ""
        if spec.right != 0:
            sides += f", right {spec.right}"
        return Item(name + heads + sides, (feature,), spec, ask, deterministic)

    heads = partial(Spec, 4, 2, 32, dtype)
    windows = (None, 9)
    all_sides = (*((w, 0) for w in windows), (None, 5), (9, 5), (9, None), (None, None))
    for p in (0.0, 0.25):  # first: other tests compare bits
        name = "the same bits" + ", with dropout" * bool(p)
        yield item(name, "determinism", heads(dropout=p), same_bits, deterministic=True)
    for phase, (_, _, grad) in PHASES.items():
        for (w, right), Hkv in itertools.product(all_sides[:-1], (4, 2)):
            if right == 0 or Hkv == 2:
                spec = Spec(4, Hkv, 32, dtype, window=w, right=right, grad=grad)
                yield item(f"causality, {phase}", "causality", spec, partial(causality, phase))
        if phase != "decode":
            for w, right in (*all_sides[:2], *all_sides[-2:]):
                spec = heads(window=w, right=right, segments=True, grad=grad)
                yield item(f"segments, {phase}", "causality", spec, partial(segments, phase))
    for w, Tq in itertools.product((None, 5), (20, 7, 1)):
        spec = Spec(2, 1, 32, dtype, window=w, grad=Tq == 20)
        yield item(f"huge negative scores, {Tq} of 20", "causality", spec, partial(negative, Tq))
    for w, right in all_sides[:4]:
        spec = heads(window=w, right=right)
        yield item("no gradient to later tokens", "causality", spec, later_gradient)
    for grad, seg in itertools.product((True, False), (False, True)):
        name = "empty" + (", segments" if seg else "") + ("" if grad else ", no gradients")
        yield item(name, "lengths", heads(segments=seg, grad=grad), empty)
    autocast = partial(surrounded, partial(torch.autocast, dtype=torch.bfloat16))
    for given in (heads(), heads(segments=True), heads(sinks=True), heads(right=None)):
        has = ", segments" if given.segments else ", sinks" if given.sinks else ""
        yield item("gradients of some inputs" + has, "gradients", given, some_gradients)
        yield item("other values in the same memory" + has, "repeated calls", given, again)
        yield item("autocast" + has, "surroundings", given, autocast)
    inference = partial(surrounded, lambda device: torch.inference_mode())
    yield item("inference mode", "surroundings", heads(grad=False), inference)
    for p, Tq, D in ((0.125, 16, 16), (0.5, 20, 128)):  # of 128 keys: a mask may repeat in tiles
        spec = Spec(4, 2, D, dtype, dropout=p)
        yield item(f"dropout rate, {p}", "dropout", spec, partial(rate, Tq))
    dropping = Spec(4, 2, 16, dtype, dropout=0.25)
    with_options = replace(dropping, segments=True), replace(dropping, sinks=True)
    for spec in (dropping, replace(dropping, window=5), *with_options):
        has = ", segments" * spec.segments + ", sinks" * spec.sinks
        for Tq in (16, 9):
            name = f"the same mask again{has}, {Tq} of 16"
            yield item(name, "dropout", spec, partial(replay, Tq))

    for grad, (w, right) in itertools.product((True, False), ((None, 0), (9, 5))):
        name, spec = "compiled", heads(window=w, right=right, grad=grad, compiled=True)
        if not grad:
            name += ", no gradients"
        yield item(name, "torch.compile", spec, compiled)
    for w, Tq in itertools.product((None, 6), (24, 3, 1)):
        spec = heads(window=w, segments=True, grad=False, cache="dynamic")
        yield item(f"dynamic, left padding, {Tq} of 24", "caches", spec, partial(padded, Tq))
    cached_sides = (*all_sides[:2], *all_sides[3:])
    for (w, right), size in itertools.product(cached_sides, (None, 16, 256)):
        kind, name = ("paged", f"paged by {size}") if size else ("static", "static")
        spec = heads(window=w, right=right, grad=False, cache=kind, page_size=size)
        yield item(name, "caches", spec, cached)
        if w is None and right == 0:
            more = replace(spec, scale=0.5, softcap=4.0, sinks=True)
            yield item(f"{name}, scale, softcap and sinks", "caches", more, cached)
    for w, seg in itertools.product(windows, (False, True)):
        name = "in parts" + ", segments" * seg
        yield item(name, "parts", heads(window=w, segments=seg, lse=True), in_parts)
    spec = heads(scale=0.5, softcap=4.0, lse=True)
    yield item("in parts, scale and softcap", "parts", spec, in_parts)
    for (w, right), seg in itertools.product(all_sides[2:], (False, True)):
        spec = heads(window=w, right=right, segments=seg, lse=True)
        yield item("log-sum-exp" + (", segments" if seg else ""), "parts", spec, log_sum_exp)
    for grad in (True, False):
        name = f"causality, long text, {'training' if grad else 'evaluation'}"
        yield item(name, "causality", Spec(1, 1, 32, dtype, grad=grad), long_causality)


# --- causality and segments ---

PHASES = {  # Tq, Tk, whether autograd records
    "training": (33, 33, True),
    "evaluation": (33, 33, False),
    "chunked prefill": (20, 33, False),
    "decode": (1, 33, False),
}
HUGE = 3000.0  # finite in float16, as are its products with values of size 1


def call(backend: Backend, q: Tensor, k: Tensor, v: Tensor, spec: Spec, **more: Tensor) -> Tensor:
    """Return the output; autograd records if spec.grad."""
    with torch.set_grad_enabled(spec.grad):
        q, k, v = (t.detach().requires_grad_(spec.grad) for t in (q, k, v))
        return backend.attend(q, k, v, spec, **more).detach()


def qkv(spec: Spec, T: int, device: str) -> list[Tensor]:
    """Return random q, k and v, (2, T, H or Hkv, D)."""
    chance, dtype = torch.Generator().manual_seed(7), getattr(torch, spec.dtype)
    heads = spec.n_head, spec.n_kv_head, spec.n_kv_head
    shapes = ((2, T, h, spec.head_dim) for h in heads)
    return [torch.randn(shape, generator=chance).to(device, dtype) for shape in shapes]


def moved(
    output: Callable[..., Tensor], quiet: Sequence[Tensor], louder: Sequence[Tensor], since: int
) -> list[int]:
    """Rows in which output(*louder) differs from output(*quiet). Repeated if one precedes `since`:
    a library may round differently once under load."""
    for _ in range(3):
        found: list[int] = (
            (output(*quiet) != output(*louder)).any(dim=(0, 2, 3)).nonzero().flatten().tolist()
        )
        if not found or found[0] >= since:
            break
    return found


def causality(phase: str, backend: Backend, spec: Spec, device: str) -> None:
    """Multiply one position of q, k or v by HUGE: outputs that do not see it, since it is beyond
    their `right`, keep their bits, and some output changes. Keys before every window change
    nothing."""
    Tq, Tk, _ = PHASES[phase]
    q, k, v = qkv(spec, Tk, device)
    first, ahead = Tk - Tq, Tk if spec.right is None else spec.right

    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return call(backend, q[:, first:], k, v, spec)

    places = {first + 1, (first + Tk) // 2, Tk - 1}
    for changed in sorted(places & set(range(first + 1, Tk))):
        for which, name in enumerate("qkv"):
            Q, K, V = (t.clone() for t in (q, k, v))
            (Q, K, V)[which][:, changed] *= HUGE
            since = changed - first - (0 if name == "q" else ahead)
            found = moved(output, (q, k, v), (Q, K, V), since=since)
            text = f"{name} changed at {changed}; moved: {found or 'nothing'} ({spec})"
            require(bool(found) and found[0] >= since, text)
    if spec.window is not None:
        K, V = k.clone(), v.clone()
        for t in (K, V):
            t[:, : max(first - spec.window + 1, 0)] *= HUGE
        none = not moved(output, (q, k, v), (q, K, V), since=Tk)
        require(none, f"keys before the window of every query moved an output ({spec})")


def long_causality(backend: Backend, spec: Spec, device: str) -> None:
    """Causality in a long sequence, for which a kernel may take another path."""
    T = 8193 if torch.device(device).type == "cuda" else 2049
    quiet = [t[:1] for t in qkv(spec, T, device)]
    louder, changed = [t.clone() for t in quiet], T - 500
    for t in louder:
        t[:, changed] *= HUGE / 30  # q . k grows by the square
    found = moved(lambda q, k, v: call(backend, q, k, v, spec), quiet, louder, since=changed)
    text = f"token {changed} changed; the outputs that moved: {found[:5] or 'none'}, ..."
    require(bool(found) and found[0] >= changed, text)


def segments(phase: str, backend: Backend, spec: Spec, device: str) -> None:
    """Multiply one of three segments: the outputs of the others must keep their bits."""
    Tq, Tk, _ = PHASES[phase]
    q, k, v = qkv(spec, Tk, device)
    seg = (torch.arange(Tk) // 11).int().expand(2, Tk).contiguous().to(device)  # 3 times 11
    first = Tk - Tq
    before = call(backend, q[:, first:], k, v, spec, segments=seg)
    for changed in (0, 1, 2):
        inside = seg[0] == changed
        other = ~inside[first:]
        factor = torch.where(inside, HUGE / 30, 1)[:, None, None].to(q.dtype)  # squared in q . k
        after = call(backend, (q * factor)[:, first:], k * factor, v * factor, spec, segments=seg)
        same = torch.equal(before[:, other], after[:, other])
        require(same, f"segment {changed} changed, and an output of another segment moved")
        moved = not torch.equal(before[:, ~other], after[:, ~other])
        require(bool(other.all()) or moved, f"segment {changed} changed, and nothing moved")


def negative(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    """All scores are -67,882: with a finite float16 as mask value, masked keys would have the
    largest."""
    Tk, dtype = 20, getattr(torch, spec.dtype)
    q = torch.full((1, Tq, 2, 32), -12000.0, dtype=dtype, device=device)
    k = torch.ones(1, Tk, 1, 32, dtype=dtype, device=device)
    v = torch.arange(Tk, dtype=dtype, device=device)[None, :, None, None].expand(k.shape)
    out = call(backend, q, k, v.contiguous(), spec)[0, :, 0, 0].double().cpu()
    last = torch.arange(Tk - Tq, Tk)  # each output is the mean index of the visible keys
    first = (last - (spec.window or Tk) + 1).clamp(min=0)
    close(out, (first + last) / 2, 0.02, "the mean of the visible values")


def later_gradient(backend: Backend, spec: Spec, device: str) -> None:
    given = matrix.inputs(matrix.case_of(spec, 33), spec.dtype, device)
    early = (torch.arange(33, device=device) < 20)[:, None, None]
    given = given._replace(dout=given.dout * early)
    for name, grad in list(run(backend.attend, given, spec).tensors.items())[1:]:
        last = 19 if name == "dq" else 19 + (spec.right or 0)
        require(not grad[:, last + 1 :].any(), f"{name} of a later token is not zero")
        require(grad[:, last].any(), f"{name} of token {last} is zero")


# --- dropout: if v is the identity, the output is the matrix P after dropout ---


def revealing(spec: Spec, Tq: int, B: int, device: str) -> Inputs:
    """Random inputs whose v is the identity, with Tk = D: out[b, i, h] is row i of P."""
    D, draw = spec.head_dim, torch.Generator().manual_seed(3)
    dtype = getattr(torch, spec.dtype)

    def tensor(T: int, H: int) -> Tensor:
        return torch.randn(B, T, H, D, generator=draw).to(device, dtype)

    q, k, dout = tensor(Tq, spec.n_head), tensor(D, spec.n_kv_head), tensor(Tq, spec.n_head)
    v = torch.eye(D, device=device, dtype=dtype)[None, :, None].expand(k.shape).contiguous()
    seg = (torch.arange(D, device=device) >= D // 3).int().expand(B, D).contiguous()
    sinks = torch.randn(spec.n_head, generator=draw).to(device, dtype)
    return Inputs(q, k, v, dout, seg if spec.segments else None, sinks if spec.sinks else None)


def dropped(backend: Backend, given: Inputs, spec: Spec) -> proof.Result:
    """run(), in which an error of the kernel is a failure of the property."""
    try:
        return run(backend.attend, given, spec)
    except RuntimeError as e:
        if loses_device(e):
            raise
        raise AssertionError(f"{type(e).__name__}: {first_line(e)}") from e


def rate(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    """A fraction p of the probabilities is dropped; the rest is divided by 1 - p. Each entry is
    dropped as often, and two entries of other heads, queries, keys or rows of the batch together
    as often as by chance."""
    B, p, quiet = 8, spec.dropout, replace(spec, grad=False)
    given = revealing(spec, Tq, B, device)
    P = run(backend.attend, given, replace(quiet, dropout=0.0)).out  # (B, Tq, H, Tk)
    there, eps = P != 0, torch.finfo(P.dtype).eps
    torch.manual_seed(0)
    n = math.ceil(40 * (1 - p) / p / B)  # calls: an entry that is never dropped is off by 6 sigma
    zeros = torch.empty(n, *P.shape, dtype=torch.bool, device=device)
    for i in range(n):
        got = dropped(backend, given, quiet).out
        zeros[i] = got == 0
        left = ~zeros[i] & there
        close(got[left], P[left] / (1 - p), 8 * eps, "what was kept")
    x = (zeros.float() - p) * there  # (n, B, Tq, H, Tk) of mean 0
    variance, total = p * (1 - p), n * int(there.sum())
    share = float(x.sum()) / total
    text = f"{p + share:.4f} are dropped, expected {p}"
    require(abs(share) < 6 * (variance / total) ** 0.5, text)
    uneven = x.mean((0, 1)).abs() > 6 * (variance / (n * B)) ** 0.5
    require(not uneven.any(), "some probabilities are dropped more often than others")
    for axis, name in enumerate(("rows of the batch", "queries", "heads", "keys"), 1):
        for step in range(1, x.shape[axis]):
            both = n * int((there & there.roll(step, axis - 1)).sum())
            product = float((x * x.roll(step, axis)).sum())  # of independent ones the mean is 0
            text = f"two {name}, {step} apart, are dropped together"
            require(abs(product) <= 6 * variance * both**0.5, text)


def replay(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    """The same seed gives the same mask M, forward and backward; the results match P M / (1 - p).
    Two calls have different masks."""
    reveals = revealing(spec, Tq, 4, device)
    quiet, masks = replace(spec, grad=False), []
    for seeded in (True, True, False):
        if seeded:
            torch.manual_seed(5)
        masks.append(dropped(backend, reveals, quiet).out != 0)  # (B, Tq, H, Tk)
    require(torch.equal(masks[0], masks[1]), "the dropout mask differs under the same seed")
    require(not torch.equal(masks[0], masks[2]), "two calls have the same dropout mask")

    draw = torch.Generator().manual_seed(1)
    v = torch.randn(reveals.v.shape, generator=draw).to(reveals.v)
    torch.manual_seed(5)
    got = dropped(backend, reveals._replace(v=v), spec)

    exact = [t.detach().double().requires_grad_() for t in (reveals.q, reveals.k, v)]
    group, (D, D_k) = spec.n_head // spec.n_kv_head, (spec.head_dim, v.shape[1])
    q, k, v = exact[0], *(t.repeat_interleave(group, dim=2) for t in exact[1:])
    scores = torch.einsum("bihd,bjhd->bihj", q, k) / D**0.5
    seen = mask(Tq, D_k, spec.window, reveals.segments, q.device).transpose(1, 2)
    scores, leaves = scores.masked_fill(~seen, float("-inf")), exact
    if reveals.sinks is not None:
        leaves = [*exact, reveals.sinks.double().requires_grad_()]
        column = leaves[3][:, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :D_k] * masks[0] / (1 - spec.dropout)
    want = torch.einsum("bihj,bjhd->bihd", probs, v)
    truth = [want, *torch.autograd.grad(want, leaves, reveals.dout.double())]
    for (name, t), w in zip(got.tensors.items(), truth):
        what = f"{name} with the mask of the forward pass"
        scale = max(1.0, float(w.detach().abs().max()))
        close(t, w, 20 * scale * torch.finfo(t.dtype).eps, what)


# --- empty inputs, gradients of some inputs, repeated calls, surroundings ---


def empty(backend: Backend, spec: Spec, device: str) -> None:
    """Without batch, queries or keys, the output and the gradients are zeros, if anything."""
    for B, Tq, Tk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        q, k, v = (t[:B] for t in qkv(spec, 5, device))
        seg = torch.zeros(B, Tk, dtype=torch.int32, device=device) if spec.segments else None
        given = Inputs(q[:, :Tq], k[:, :Tk], v[:, :Tk], q[:, :Tq], seg)
        for name, t in run(backend.attend, given, spec).tensors.items():
            like = getattr(given, "q" if name == "out" else name[1:])
            zeros = t.shape == like.shape and not t.any()
            require(zeros, f"batch {B}, {Tq} queries, {Tk} keys: {name} is {t}")


def some_gradients(backend: Backend, spec: Spec, device: str) -> None:
    """Gradients of each input alone, and of all but it; a graph that is kept gives them again."""
    case = matrix.case_of(spec, 17)
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

    drawn = matrix.inputs(matrix.case_of(spec, 33), spec.dtype, device)
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

    within = replace(backend, attend=attend)
    matrix.check(within, matrix.case_of(spec, 33), spec.dtype, device, grad=spec.grad)


# --- determinism, torch.compile, caches, partial attention ---


def same_bits(backend: Backend, spec: Spec, device: str) -> None:
    """Five runs give the same bits; on CUDA at a size of many thread blocks."""
    T = 1024 if torch.device(device).type == "cuda" else 97
    given, results = matrix.inputs(matrix.case_of(spec, T), spec.dtype, device), []
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            torch.manual_seed(0)
            results.append(run(backend.attend, given, spec))
    finally:
        torch.use_deterministic_algorithms(was)
    for result in results[1:]:
        for name, t in result.tensors.items():
            require(torch.equal(t, results[0].tensors[name]), f"{name} differs between runs")


def compiled(backend: Backend, spec: Spec, device: str) -> None:
    torch.compiler.reset()
    compiler = "inductor" if torch.device(device).type == "cuda" else "aot_eager"

    eager = backend.attend

    def attend(*args: object, **more: object) -> Tensor:
        return eager(*args, **more)

    traced = torch.compile(attend, backend=compiler, fullgraph=backend.fullgraph, dynamic=False)
    backend = replace(backend, attend=traced)
    case = matrix.case_of(spec, 65)
    matrix.check(backend, case, spec.dtype, device, grad=spec.grad, compiled=True)
    torch.compiler.reset()


def padded(Tq: int, backend: Backend, spec: Spec, device: str) -> None:
    case = replace(matrix.case_of(spec, 24, "left"), Tq=Tq, B=3)
    matrix.check(backend, case, spec.dtype, device, grad=False, cache=spec.cache)


def cached(backend: Backend, spec: Spec, device: str) -> None:
    """With a cache the output equals that of each chunk with the keys up to its end, and is
    causal."""
    T = 64 if (spec.page_size or 0) < 64 else 300
    case = matrix.case_of(spec, T)
    given = matrix.inputs(case, spec.dtype, device)
    way = partial(run_cached, backend.attend)
    got = way(given, spec)
    if spec.right == 0:
        matrix.compare(got, case, spec.dtype, device)
    else:  # a chunk's queries see no key of a later chunk
        rough, exact = proof.by_chunks(given, spec)
        matrix.agree(got, rough, exact, spec.dtype)
    leak = leakage(way, given, spec, 0)
    require(leak == 0, f"a later token moves earlier outputs, by up to {leak:.2g}")
