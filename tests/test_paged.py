"""Attention to stored tokens, in pages and static buffers, against the oracle: unused pages hold
NaN, unused slots of buffers loud numbers."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Spec
from attention.masks import StaticView
from inference.cache import PagedCache, StaticCache

HAS_CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if HAS_CUDA else "cpu"
pytestmark = [pytest.mark.gpu] * HAS_CUDA
SPEC = Spec(4, 2, 32, "float32", grad=False, cache="paged", page_size=4)
Rows = Sequence[Sequence[Tensor]]  # q, k and v (T, H or Hkv, D) of each


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, splits: int = 0,
           **more: Any) -> Tensor:
    """Store k and v, and read by a backend; "kernel": by Triton's for one query a row."""
    k, v, view = cache.append(0, k, v)
    if view is None:  # nothing is stored yet
        bare = replace(spec, cache="none", page_size=None)
        return BACKENDS["manual"].attend(q, k, v, bare, **more)
    if name != "kernel" or q.shape[1] > 1:
        backend = BACKENDS["paged" if name == "kernel" else name]
        return backend.attend(q, k, v, spec, cache=view, **more)
    from attention.triton.paged_kernels import decode

    view = view.as_pages() if isinstance(view, StaticView) else view
    slopes = more.get("alibi_slopes")
    slopes = None if slopes is None else slopes.expand(len(q), -1).contiguous()
    return decode(q, k, v, view.page_table, view.start, view.count, more.get("sinks"), slopes,
                  spec.window or 0, spec.softmax_scale, spec.softcap, splits)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="package 'triton' is not installed"
)
cuda = [pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")]
PATHS = [
    pytest.param("paged", "cpu", id="gather"),
    pytest.param("kernel", KERNEL_DEVICE, id="kernel", marks=needs_triton),
    pytest.param("paged", "cuda", id="cuda", marks=cuda),
]


def empty(spec: Spec, lengths: Sequence[int], device: str) -> Any:
    """A cache for rows of these lengths; pages in scattered order."""
    shape, dtype = (spec.n_kv_head, spec.head_dim), getattr(torch, spec.dtype)
    if spec.page_size is None:
        slots = min(spec.window or max(lengths) + 3, max(lengths) + 3)
        cache: Any = StaticCache([spec.window], len(lengths), max(lengths) + 3, *shape,
                                 in_order=spec.alibi, dtype=dtype, device=device)
        assert cache.nbytes == 2 * len(lengths) * (slots + 1) * math.prod(shape) * dtype.itemsize
    else:
        n_pages = sum(-(-T // spec.page_size) for T in lengths) + 3
        cache = PagedCache([spec.window], *shape, n_pages={spec.window: n_pages},
                           page_size=spec.page_size, dtype=dtype, device=device)
        taken = [cache.pool.new() for _ in range(n_pages - 1)]
        cache.pool.grow(dict.fromkeys(taken, spec.page_size))
        for n in torch.randperm(n_pages - 1, generator=torch.Generator().manual_seed(3)).tolist():
            cache.pool.free(taken[n])
    for t in (*cache.k, *cache.v):
        assert not t.any()
        t.fill_(torch.nan if spec.page_size else 1e4)
    return cache


def draw(spec: Spec, lengths: Sequence[int]) -> Rows:
    rng = torch.Generator().manual_seed(0)
    heads = (spec.n_head, spec.n_kv_head, spec.n_kv_head)
    return [[torch.randn(T, h, spec.head_dim, generator=rng).to(getattr(torch, spec.dtype))
             for h in heads] for T in lengths]


def serve(run: Callable[..., Tensor], spec: Spec, schedule: Sequence[Sequence[int]], device: str,
          inputs: Rows, pad: tuple[float, float] = (50.0, torch.nan), **more: Any) -> list[Tensor]:
    """Outputs (T, H, D) of rows that grow by counts[row] a step, padded on the right by pad[0] in
    q, pad[1] in k and v."""
    cache, at = empty(spec, [len(q) for q, *_ in inputs], device), [0] * len(inputs)
    rows = [cache.pool.new() for _ in inputs] if cache.pool else None
    outs = [q[:0] for q, *_ in inputs]
    for counts in schedule:
        T, padded = max(counts), []
        for n, value in enumerate((pad[0], pad[1], pad[1])):
            t = torch.full((len(inputs), T, *inputs[0][n].shape[1:]), value).to(inputs[0][n])
            for b, row in enumerate(inputs):
                t[b, : counts[b]] = row[n][at[b] : at[b] + counts[b]]
            padded.append(t)
        step = cache.reserve(counts, rows)
        for b, positions in enumerate(step.positions(T).tolist()):
            assert positions[: counts[b]] == [*range(at[b], at[b] + counts[b])]
        out = run(*(t.to(device) for t in padded), spec, cache=step, **more).cpu()
        assert out.shape == padded[0].shape and out.dtype == padded[0].dtype
        # Another row's tokens, or NaN, may fill the pages that such a row has given back.
        idle = [b for b, n in enumerate(counts) if n == 0 and spec.page_size]
        assert not out[idle].any(), "a row without new tokens"
        step.advance()
        at = [a + n for a, n in zip(at, counts)]
        outs = [torch.cat((done, out[b, :n])) for b, (done, n) in enumerate(zip(outs, counts))]
    return outs


def check(got: Tensor, row: Sequence[Tensor], spec: Spec, **more: Any) -> None:
    """Outputs (Tq, H, D) against the oracle; row: q, k and v from the start."""
    q, k, v = (t[None] for t in row)
    q = q[:, len(row[0]) - len(got) :]
    more |= {"window": spec.window, "scale": spec.scale, "softcap": spec.softcap}
    oracle.right(got[None], q, k, v, **more)


# --- numbers ---

counts = st.tuples(*[st.integers(0, 1)] * 3) | st.tuples(*[st.integers(0, 6)] * 3)
SOME = [pytest.param("manual", "cpu", id="manual"), pytest.param("sdpa", "cpu", id="sdpa")]


@pytest.mark.parametrize("kind", ["static", "paged"])
@pytest.mark.parametrize("name, device", [*PATHS, *SOME])
def test_any_schedule(name, device, kind, request) -> None:
    """Prefill, chunks, decode, rings. No bit depends on padding, other rows, later tokens, or
    tokens outside the window."""
    if (name, kind) in (("manual", "paged"), ("sdpa", "paged")):
        pytest.skip(f"{name} reads no pages")
    dtypes = ["float32", "float16"]  # tl.dot: no bfloat16
    dtypes += ["bfloat16", "float64"] if name != "kernel" and device == "cpu" else []

    @settings(max_examples=5 if name == "kernel" else 25, deadline=None)
    @given(st.tuples(*[st.integers(0, 13)] * 3), st.lists(counts, min_size=1, max_size=4),
           st.sampled_from([(4, 2), (4, 4), (3, 1)]), st.sampled_from([1, 4, 5, 16]),
           st.fixed_dictionaries({
               "head_dim": st.sampled_from([20, 32]),
               "window": st.sampled_from([None, 1, 4, 7, 500]),
               "scale": st.sampled_from([None, 0.5]), "softcap": st.sampled_from([None, 1.5]),
               "sinks": st.booleans(), "alibi": st.booleans(), "dtype": st.sampled_from(dtypes)}),
           st.integers(0, 2), st.integers(0, 20))
    def check_schedule(first, later, heads, size, changes, b, at) -> None:
        if name == "sdpa":
            changes |= {"softcap": None, "sinks": False, "alibi": False}
        schedule = [counts for counts in (first, *later, (1, 1, 1)) if any(counts)]
        spec = replace(SPEC, n_head=heads[0], n_kv_head=heads[1], cache=kind,
                       page_size=size if kind == "paged" else None, **changes)
        more: dict[str, Tensor] = {}
        if spec.sinks:
            more["sinks"] = torch.tensor([1.0, 4.0, -torch.inf, 2.5])[: heads[0]]
        if spec.alibi:
            more["alibi_slopes"] = torch.exp2(-torch.arange(3.0 * heads[0]).view(3, -1))
        inputs = draw(spec, [sum(counts) for counts in zip(*schedule)])
        dtype, moved = inputs[0][0].dtype, {n: t.to(device) for n, t in more.items()}
        if spec.sinks and name != "kernel":
            moved["sinks"] = moved["sinks"].to(dtype)
        quiet, loud = ((50.0, torch.nan), (-3.0, 3000.0)) if kind == "paged" else (
            (0.0, 0.0), (-3.0, 3000.0))
        run = partial(attend, name)
        outs = serve(run, spec, schedule, device, inputs, quiet, **moved)
        for n, (out, row) in enumerate(zip(outs, inputs, strict=True)):
            own = {m: t[n] if m == "alibi_slopes" else t.to(dtype) for m, t in more.items()}
            check(out, row, spec, **own)
        at %= len(outs[b])
        others = [[x * (1 if n == b else torch.nan) for x in row] for n, row in enumerate(inputs)]
        for x in others[b]:
            x[at] *= 3000
        after = serve(run, spec, schedule, device, others, loud, **moved)[b]
        changed = (outs[b] != after).any(-1).any(-1).nonzero().flatten().tolist()
        assert changed and {*changed} <= {*range(at, at + (spec.window or 99))}

    check_schedule()


@settings(max_examples=40, deadline=None)
@given(oracle.cases(30), oracle.views(),
       st.sampled_from([("manual", None), ("sdpa", None), ("paged", 8), ("paged", 1)]))
def test_any_view_of_a_cache(case: Any, view: Any, by: Any) -> None:
    name, size = by
    spec = Spec(case.H, case.Hkv, 16, "float32", window=case.window, right=case.right, grad=False,
                cache="paged" if size else "static", page_size=size, alibi=bool(case.alibi))
    shape = (3, case.H) if case.alibi == "rows" else (case.H,)
    slopes = {"alibi_slopes": torch.rand(shape)} if case.alibi else {}
    oracle.check_view(name, spec, *view, **slopes)


@needs_triton
@pytest.mark.parametrize("splits", [1, 2, 8])
def test_runs_are_joined_in_float32_and_sinks_once(splits) -> None:
    """Sums above float16's range; scores 128 and 128.5."""
    sinks = torch.tensor([6.0, 3.0, 0.0, 9.0])
    v = torch.full((256, 1, 16), 800.0).index_fill(0, torch.arange(128, 256), 400).half()
    row = [torch.ones(256, 2, 16).half(), torch.where(v == 800, 1.0, 1 + 2**-8).half(), v]
    half = replace(SPEC, n_head=2, n_kv_head=1, head_dim=16, dtype="float16", scale=8.0)
    sunk = replace(SPEC, sinks=True, softcap=3.0)
    for spec, inputs, schedule, more in (
        (half, [row], [(255,), (1,)], {}),
        (sunk, draw(sunk, [200, 65, 1]), [(199, 64, 0), (1, 1, 1)], {"sinks": sinks})):
        moved = {name: t.to(KERNEL_DEVICE) for name, t in more.items()}
        outs = serve(partial(attend, "kernel", splits=splits), replace(spec, page_size=16),
                     schedule, KERNEL_DEVICE, inputs, **moved)
        for out, row in zip(outs, inputs, strict=True):
            check(out[-1:], row, spec, **more)


@needs_triton
@pytest.mark.parametrize("name, device", PATHS)
def test_a_hidden_key_has_no_weight_however_low_the_scores_that_are_seen(name, device) -> None:
    """All are -60,000: a mask of -1e4 would be the largest."""
    spec = replace(SPEC, n_head=2, n_kv_head=1, head_dim=4, alibi=True)  # no call of SDPA
    v, slopes = torch.arange(7.0)[:, None, None].expand(7, 1, 4), torch.zeros(2)
    row = torch.full((7, 2, 4), -30_000.0), torch.ones(7, 1, 4), v
    [out] = serve(partial(attend, name), spec, [(1,)] * 7, device, [row],
                  alibi_slopes=slopes.to(device))
    check(out, row, spec, alibi_slopes=slopes)


@needs_triton
def test_opcheck() -> None:
    from attention.triton import paged_kernels

    q, pages, numbers = torch.randn(2, 1, 4, 16), torch.randn(5, 4, 2, 16), (3, 0.5, 2.0, 2)
    rows = ((1, 2), (3, 4)), (5, 2), (1, 1)  # page_table, start, count
    for more in ((torch.randn(4), torch.rand(2, 4), *numbers), (None, None, 0, 0.25, None, 0)):
        args = [q, pages, pages.flip(0), *(torch.tensor(x, dtype=torch.int32) for x in rows), *more]
        torch.library.opcheck(paged_kernels.decode, [
            x.to(KERNEL_DEVICE) if isinstance(x, Tensor) else x for x in args])


@pytest.mark.parametrize("name, device", [PATHS[0], PATHS[2]])
def test_torch_compile_takes_it_into_one_graph(name, device) -> None:
    """Writes to pages survive functionalization."""
    compiled = torch.compile(partial(attend, name), backend="aot_eager", fullgraph=True,
                             dynamic=False)
    inputs, schedule = draw(SPEC, [6, 4]), [(5, 3), (1, 1)]
    with torch.no_grad():
        eager, traced = (serve(run, SPEC, schedule, device, inputs)
                         for run in (partial(attend, name), compiled))
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
