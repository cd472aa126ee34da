"""Properties besides accuracy: tests that raise AssertionError, and their cases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import proof
from ..caps import Caps
from ..function import attention, whole
from ..masks import mask
from ..proof import Inputs, Result, run
from . import matrix
from .matrix import Item, accuracy, cases, require
from .mistakes import cast, program


def on_cuda(item: Item) -> bool:
    return torch.device(item.device).type == "cuda"


HUGE = 3000.0  # finite in float16, times a value too


def unseen(item: Item) -> None:
    """HUGE times a position of q, k or v changes outputs that see it, and no bit of others. With
    dout 0 in the second half, what the first does not see has gradient 0."""
    if item.case.Tk > 2000 and on_cuda(item):  # a kernel may take another path
        item = replace(item, case=replace(item.case, Tq=8193, Tk=8193))
    given, spec, (B, Tq), Tk = item.given, item.spec, item.given.q.shape[:2], item.case.Tk
    seen = mask(Tq, Tk, spec.window, given.segments, given.q.device, None, spec.right)[:, 0]
    seen = seen.expand(B, Tq, Tk)
    own = torch.eye(Tk, device=seen.device).bool()[Tk - Tq :].expand(seen.shape)
    several = seen.sum(2) > 1  # a single key has weight 1
    before = item.run(given, spec, times=0).out
    places = {0, Tk - Tq + 1, Tk - Tq // 2, Tk - 1} if Tk < 100 else {Tk - 500}
    for at, name in itertools.product(sorted(places & {*range(Tk)}), "qkv"):
        louder, row = getattr(given, name).clone(), at - (Tk - Tq) * (name == "q")
        if row < 0:
            continue
        louder[:, row] *= HUGE
        free = (own if name == "q" else seen)[:, :, at]
        for _ in range(3):  # libraries may round differently under load
            got = item.run(given._replace(**{name: louder}), spec, times=0).out
            moved = (got != before).flatten(2).any(2)  # (B, Tq)
            if not moved[~free].any():
                break
        expected = moved[free & several].any() == (free & several).any()
        rows = moved.any(0).nonzero().flatten().tolist()
        text = f"{name} changed at {at}; outputs that moved: {rows[:9] or 'none'}"
        require(expected and not moved[~free].any(), text)
    if not spec.grad:
        return
    early = torch.arange(Tq, device=seen.device).expand(B, Tq) < Tq // 2
    back = item.run(given._replace(dout=given.dout * early[..., None, None]), spec)
    heard = seen[:, : Tq // 2].any(1)  # (B, Tk)
    for name, reached in (("dq", early), ("dk", heard), ("dv", heard)):
        grad = back.tensors[name]
        require(not grad[~reached].any(), f"{name} of a token that is not seen is not zero")
        require(grad[reached].any(), f"{name} is zero")


def weights(item: Item, dropout: float, seed: int = 0) -> Tensor:
    """P after dropout, (B, Tq, H, Tk): outputs for v = identity."""
    given, spec, found = item.given, replace(item.spec, grad=False, dropout=dropout), []
    Tk, D = item.case.Tk, item.case.D
    eye = F.pad(torch.eye(Tk, device=given.v.device, dtype=given.v.dtype), (0, -Tk % D))
    for columns in eye.split(D, dim=1):
        v = columns[None, :, None].expand(given.v.shape).contiguous()
        torch.manual_seed(seed)
        found.append(item.run(given._replace(v=v), spec).out)
    return torch.cat(found, dim=3)[..., :Tk]


def autocorrelation(x: Tensor) -> Tensor:
    sizes = [2 * n for n in x.shape]  # zero padding: no shift wraps around
    return torch.fft.irfftn(torch.fft.rfftn(x, sizes).abs().square(), sizes)


def rate(item: Item) -> None:
    """Each entry is dropped at rate p, independently; the rest is divided by 1 - p."""
    p, B, P = item.spec.dropout, item.case.B, weights(item, 0.0)
    there, eps = P != 0, torch.finfo(P.dtype).eps
    n = math.ceil(40 * (1 - p) / p / B) if B > 1 else 1  # calls: 6 sigma
    got = torch.stack([weights(item, p, seed) for seed in range(n)])
    left = (got != 0) & there
    off, as_before = ((got - want)[left].abs().max() for want in (P / (1 - p), P))
    require(as_before > 8 * eps, "the kept probabilities are not divided by 1 - p")
    require(off <= 8 * eps / (1 - p), f"what is kept is off by up to {off:.3g}")
    x = (got.eq(0).float() - p) * there  # (n, B, Tq, H, Tk) of mean 0
    variance, total = p * (1 - p), n * int(there.sum())
    share = float(x.sum()) / total
    require(abs(share) < 6 * (variance / total) ** 0.5, f"{p + share:.4f} are dropped, not {p}")
    uneven = x.mean((0, 1)).abs() > 6 * (variance / (n * B)) ** 0.5
    require(not uneven.any(), "some probabilities are dropped more often than others")

    product = autocorrelation(x)
    pairs = autocorrelation(there.float().expand(x.shape)).clamp(min=0)
    # Bernstein's inequality: one false alarm in a million tests.
    tail = math.log(1e6 * product.numel())
    most = max(p, 1 - p) ** 2 * tail / 3
    bound = most + (most**2 + 2 * tail * variance**2 * pairs).sqrt() + 1e-6 * total
    excess = product.abs() - bound
    excess.view(-1)[0] = 0  # not shifted
    axes = zip(("calls", "rows of the batch", "queries", "heads", "keys"), excess.shape)
    shift = zip(torch.unravel_index(excess.argmax(), excess.shape), axes)
    apart = ", ".join(f"{int(i) - n * (i > n // 2)} {name}" for i, (name, n) in shift if i)
    require(excess.max() <= 0, f"entries {apart} apart are dropped together")


def replay(item: Item) -> None:
    """One seed, one mask, forward and backward; another call, another mask."""
    given, spec, p = item.given, item.spec, item.spec.dropout
    kept = weights(item, p, 5) != 0  # (B, Tq, H, Tk)
    require(kept.equal(weights(item, p, 5) != 0), "one seed gives different masks")
    require(not kept.equal(weights(item, 0.0) != 0), "dropout is ignored")
    torch.manual_seed(5)
    got, second = item.run(given, spec), item.run(given, replace(spec, grad=False))
    require(not got.out.equal(second.out), "two calls have the same dropout mask")
    by = partial(program, keep=kept.transpose(1, 2).double() / (1 - p))
    truth = run(by, cast(given, "float64"), replace(spec, dtype="float64", dropout=0.0))
    for name, want in truth.tensors.items():
        off = (got.tensors[name].double() - want).abs().max()
        allowed = 40 * max(1.0, float(want.abs().max())) * torch.finfo(got.out.dtype).eps
        require(off <= allowed, f"{name} with the mask of the forward pass is off by {off:.3g}")


def empty(item: Item) -> None:
    q, k, v, dout, segments, *_ = item.given
    for B, Tq, Tk in ((0, 5, 5), (2, 0, 5), (2, 5, 0)):
        ids = segments if segments is None else segments[:B, :Tk]
        given = Inputs(q[:B, :Tq], k[:B, :Tk], v[:B, :Tk], dout[:B, :Tq], ids)
        for name, t in item.run(given, item.spec).tensors.items():
            fits = t.shape == getattr(given, "q" if name == "out" else name[1:]).shape
            require(fits and not t.any(), f"batch {B}, {Tq} queries, {Tk} keys: {name} is {t}")


def some_gradients(item: Item) -> None:
    names = ["q", "k", "v", *["sinks"] * item.spec.sinks]
    for wrt in (w for n in (1, len(names) - 1) for w in itertools.combinations(names, n)):
        got = item.run(item.given, item.spec, wrt=wrt, times=2)
        matrix.compare(got, item.case, item.dtype, item.device)


def again(item: Item) -> None:
    """Other values in the same memory; on the CPU PyTorch does not see the change (masks.kept)."""

    def random_states() -> list[Tensor]:
        cuda = [torch.cuda.get_rng_state(item.device)] if on_cuda(item) else []
        return [torch.get_rng_state(), *cuda]

    spec = item.spec
    given = Inputs(**{name: t.clone() for name, t in item.given.tensors.items()})
    first = item.run(given, spec).tensors.values()
    before, states = [t.clone() for t in first], random_states()
    for t in given.tensors.values():
        (t.data if t.device.type == "cpu" else t).copy_(t.flip(min(1, t.dim() - 1)))
    got = item.run(given, spec)
    matrix.agree(got, proof.plain(given, spec), proof.truth(given, spec), item.dtype)
    require(all(map(torch.equal, first, before)), "a second call changed the first result")
    require(all(map(torch.equal, states, random_states())), "a random number was drawn")


def compiled(item: Item) -> None:
    torch.compiler.reset()
    attend = item.backend.attend
    compiler = "inductor" if on_cuda(item) else "aot_eager"
    accuracy(item, torch.compile(lambda *args, **more: attend(*args, **more), dynamic=False,
                                 backend=compiler, fullgraph=item.backend.fullgraph))
    torch.compiler.reset()


def same_bits(item: Item) -> None:
    if on_cuda(item):
        item = replace(item, case=replace(item.case, Tq=1024, Tk=1024))
    was, found = torch.are_deterministic_algorithms_enabled(), list[Result]()
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            torch.manual_seed(0)
            found.append(item.run(item.given, item.spec))
    finally:
        torch.use_deterministic_algorithms(was)
    for name, first in found[0].tensors.items():
        same = all(first.equal(got.tensors[name]) for got in found)
        require(same, f"{name} differs between runs")


def probed(item: Item, long: bool = False) -> None:
    of, Tk = (item.backend, item.spec, item.device), item.case.Tk
    why = proof.probe_long(*of, (1, item.case.Tq, Tk)) if long else proof.probe(*of, Tk).why
    require(not why, "; ".join(why))


def log_sum_exp(item: Item) -> None:
    """Join rows by L (B, H, Tq) to a key of score a and value 0, which is a sink a."""
    kernel = item.backend.partial
    got = run(whole(item.backend), item.given, item.spec)
    matrix.compare(got, item.case, item.dtype, item.device)
    joined = replace(item.case, sinks=True, grad=False)
    q, k, v, _, segments, sinks, slopes = matrix.inputs(joined, item.dtype, item.device)
    assert sinks is not None
    options = {} if slopes is None else {"alibi_slopes": slopes}
    with torch.no_grad():
        out, L = attention(q, k, v, item.spec, segments=segments, kernel=kernel, **options)
    share = torch.sigmoid(L - sinks.to(L.dtype)[:, None]).mT[..., None]  # (B, Tq, H, 1)
    matrix.compare(Result((out * share).to(q.dtype)), joined, item.dtype, item.device)
    masked = (matrix.truth(item.case, item.dtype).out == 0).all(3).mT.to(L.device)
    require(masked.equal(L.isneginf()), "L must be -inf in fully masked rows only")


Row = tuple[Any, ...]  # cases in --quick, title, row of the report, test, texts
SIDES = (", window9, packed, both, right5, window9-right5, window9-both, window9-packed,"
         "window9-both-packed, both-packed")
SOME = ", packed, sinks, both"
CACHED = (", window9, both, sinks-scale-softcap4, alibi-window9, window9-right5, window9-both,"
          "alibi-both")
PROPERTIES: list[Row] = [
    (2, "the same bits", "determinism", same_bits, "97-mqa, 97-gqa", ", dropout.25"),
    (4, "causality", "causality", unseen, "33-gqa", SIDES),
    (4, "causality", "causality", unseen, "20x33-gqa-inference, 33-gqa-inference", SIDES),
    (1, "causality", "causality", unseen, "1x33-gqa-inference", SIDES),
    (1, "causality", "causality", unseen, "33, 33-inference, 33-window9, 33-inference-window9,"
     "20x33-inference, 20x33-inference-window9, 2049-H1-Hkv1, 2049-H1-Hkv1-inference"),
    (3, "empty", "lengths", empty, "5-gqa", ", packed, inference, inference-packed"),
    (2, "gradients of some inputs", "gradients", some_gradients, "17-gqa", ", sinks, packed, both"),
    (2, "other values in the same memory", "repeated calls", again, "33-gqa", SOME),
    (1, "autocast", "surroundings", lambda item: accuracy(item, torch.autocast(
        torch.device(item.device).type, torch.bfloat16)(item.backend.attend)), "33-gqa", SOME),
    (1, "inference mode", "surroundings", lambda item: accuracy(
        item, torch.inference_mode()(item.backend.attend)), "33-gqa-inference"),
    (2, "dropout rate", "dropout", rate,  # A mask may repeat in tiles of 128 queries and keys
     "16-gqa-B8-D16-dropout.25, 300-B1-D128-dropout.5, 20x128-gqa-B8-D128-dropout.5"),
    (6, "the same mask again", "dropout", replay,
     "9x16-gqa-D16-dropout.25, 16-gqa-B4-D16-dropout.25",
     ", window5, packed, sinks, scale-softcap4, both"),
    (1, "the same mask again", "dropout", replay, "9x150-mqa-B1-D64-dropout.25,"
     "150x190-gqa-B1-D64-dropout.25, 150x190-gqa-B1-D64-dropout.25-window70,"
     "150x190-gqa-B1-D64-dropout.25-window70-packed"),
    (1, "one graph", "torch.compile", compiled, "65-gqa-compiled", ", window9-right5",
     ", inference"),
    (1, "in a cache", "caches", accuracy, "3x24-gqa-dynamic", ", window6"),
    (2, "left padding", "caches", accuracy, "3x24-left-gqa-B3-dynamic,"
     "24-left-gqa-B3-dynamic, 1x24-left-gqa-B3-dynamic", ", window6"),
    (5, "in a cache", "caches", probed, "64-gqa-static", CACHED),
    (5, "in a cache", "caches", probed,
     "64-gqa-inference-page_size16, 300-gqa-inference-page_size256", CACHED),
    (2, "in parts, merged by L", "parts", probed, "50-mqa-lse, 50-gqa-lse",
     ", window9-packed, window9, packed, scale-softcap4, alibi-packed"),
    *((2, "log-sum-exp", "parts", log_sum_exp, texts, f"{SIDES}, scale-softcap4, alibi, alibi-both")
      for texts in ("33-mqa-lse, 20x33-mqa-lse", "40x33-mqa-lse"))]


def properties(dtype: str, length: int = 0, caps: Sequence[Caps] = (),
               quick: bool = False) -> Iterator[Item]:
    rows = [*PROPERTIES]
    if length:
        rows.append((4, f"{length:,} tokens", "long sequences", partial(probed, long=True),
                     f"{length}-mqa-D64", ", window100", ", inference"))
    for row in caps:
        size = row.page_multiple
        pages = f"{300 if size >= 64 else 64}-gqa-inference-page_size{size}"
        if "paged" in row.caches:
            rows.append((1, "smallest pages", "caches", probed, pages))
        if row.head_dim_max:
            test: Any = probed
            text = pages if row.caches[0] == "paged" else f"64-gqa-{row.caches[0]}"
            if "none" in row.caches:
                test, text = accuracy, "33-gqa" if row.grad else "33-gqa-inference"
            rows.append((1, "largest head_dim", "causal", test, f"{text}-D{row.head_dim_max}"))
    named = set[str]()
    for some, title, feature, test, *texts in rows:
        for case in cases(*texts)[: some if quick else None]:
            item = Item(case, dtype, test, (feature,), title, deterministic=test is same_bits)
            if item.name not in named:
                named.add(item.name)
                yield item
