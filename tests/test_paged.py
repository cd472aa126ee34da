"""Attention over pages against the oracle: unused pages hold NaN."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Spec
from attention.masks import StaticView, filled_cache
from inference.cache import PagedCache, StaticCache

HAS_CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if HAS_CUDA else "cpu"
pytestmark = [pytest.mark.gpu] * HAS_CUDA
SPEC = Spec(4, 2, 32, "float32", grad=False, cache="paged", page_size=4)
Attend = Callable[..., Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, splits: int = 0,
           **more: Any) -> Tensor:
    """Store k and v, and read the pages."""
    k_pages, v_pages, reads = cache.append(k, v)
    return BACKENDS["paged"].attend(q, k_pages, v_pages, spec, cache=reads, **more)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, splits: int = 0,
              sinks: Tensor | None = None, alibi_slopes: Tensor | None = None) -> Tensor:
    """The kernels for one query a row wherever possible."""
    if q.shape[1] > 1:
        return attend(q, k, v, spec, cache=cache, sinks=sinks, alibi_slopes=alibi_slopes)
    from attention.triton.paged_kernels import decode

    k_pages, v_pages, view = cache.append(k, v)
    view = view.as_pages() if isinstance(view, StaticView) else view
    table = (view.page_table, view.start, view.count)
    slopes = None if alibi_slopes is None else alibi_slopes.expand(len(q), -1).contiguous()
    return decode(q, k_pages, v_pages, *table, sinks, slopes, spec.window or 0, spec.softmax_scale,
                  spec.softcap, splits)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="package 'triton' is not installed"
)
PATHS = [
    pytest.param(attend, "cpu", id="gather"),
    pytest.param(by_kernel, KERNEL_DEVICE, id="kernel", marks=needs_triton),
    pytest.param(attend, "cuda", id="cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")]),
]


def poisoned(spec: Spec, n_pages: int, device: str = "cpu") -> PagedCache:
    """Full of NaN, pages in scattered order."""
    cache = PagedCache(1, spec.n_kv_head, spec.head_dim, device=device,
                       n_pages={spec.window: n_pages}, windows=[spec.window],
                       page_size=spec.page_size, dtype=getattr(torch, spec.dtype))
    for t in (*cache.k, *cache.v):
        assert not t.any()
        t.fill_(torch.nan)
    taken = [cache.pool.new() for _ in range(n_pages - 1)]
    cache.pool.grow(dict.fromkeys(taken, spec.page_size))
    for n in torch.randperm(n_pages - 1, generator=torch.Generator().manual_seed(3)).tolist():
        cache.pool.free(taken[n])
    return cache


def draw(spec: Spec, lengths: Sequence[int], seed: int = 0) -> list[list[Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    heads = (spec.n_head, spec.n_kv_head, spec.n_kv_head)
    return [[torch.randn(T, h, spec.head_dim, generator=rng).to(getattr(torch, spec.dtype))
             for h in heads] for T in lengths]


def run_step(run: Attend, spec: Spec, cache: PagedCache, rows: Sequence[int],
             new: Sequence[Sequence[Tensor]], pad: tuple[float, float] = (50.0, torch.nan),
             nan: bool = False, **more: Any) -> list[Tensor]:
    """A step of each row, not advanced. Right padding is pad[0] in q, pad[1] in k and v; `nan`
    allows NaN in the output."""
    counts = [len(q) for q, _, _ in new]
    step = cache.reserve(max(counts), counts, rows)
    device, padded = cache.k[0].device, []
    for n, value in enumerate((pad[0], pad[1], pad[1])):
        shape = (len(rows), max(counts), *new[0][n].shape[1:])
        padded.append(torch.full(shape, value, dtype=new[0][n].dtype))
        for b, row in enumerate(new):
            padded[-1][b, : counts[b]] = row[n]
    out = run(*(t.to(device) for t in padded), spec, cache=step.layer(0), **more).cpu()
    assert out.shape == padded[0].shape and out.dtype == padded[0].dtype
    assert not out[(step.start + step.count == 0).cpu()].any(), "a row that sees no key"
    new_tokens = torch.tensor(counts) > 0  # the window of another row may have left its last page
    assert nan or out[new_tokens].isfinite().all(), "something, maybe padding, is not finite"
    return [out[b, :n] for b, n in enumerate(counts)]


def serve(run: Attend, spec: Spec, schedule: Sequence[Sequence[int]], device: str = "cpu",
          inputs: list[list[Tensor]] | None = None, **kw: Any) -> list[Tensor]:
    """Rows grow by counts[row] a step; return all outputs (T, H, D)."""
    lengths = [sum(counts) for counts in zip(*schedule, strict=True)]
    inputs = inputs or draw(spec, lengths)
    n_pages = sum(-(-T // spec.page_size) for T in lengths) + 3
    cache = poisoned(spec, n_pages, device)
    rows = [cache.pool.new() for _ in lengths]
    out: list[list[Tensor]] = [[] for _ in rows]
    for counts in schedule:
        spans = [slice(cache.pool.length(r), cache.pool.length(r) + n)
                 for r, n in zip(rows, counts, strict=True)]
        new = [[x[at] for x in row] for row, at in zip(inputs, spans, strict=True)]
        for b, got in enumerate(run_step(run, spec, cache, rows, new, **kw)):
            out[b].append(got)
        cache.pool.advance(dict(zip(rows, counts, strict=True)))
    return [torch.cat(parts) for parts in out]


def check(got: Tensor, row: Sequence[Tensor], spec: Spec, sinks: Tensor | None = None,
          **more: Any) -> None:
    """Outputs (Tq, H, D) against the oracle; row: q, k and v from the start."""
    q, k, v = (t[None] for t in row)
    q = q[:, len(row[0]) - len(got) :]
    more |= {"window": spec.window, "scale": spec.scale, "softcap": spec.softcap}
    truth = oracle.attention(q, k, v, q, **more, sinks=sinks)
    plain = oracle.plain(q, k, v, q, **more, sinks=sinks)
    oracle.check(oracle.Result(got[None]), plain, truth, q.dtype)


# --- numbers ---

# Three rows: chunks of different lengths, one row that comes later, then single tokens, and a row
# that sits out a step.
SCHEDULE = [(13, 4, 0), (3, 1, 6), (1, 1, 1), (1, 0, 1), (1, 1, 1)]
HALF = {"gather": ("bfloat16", "float16", "float64"), "kernel": ("float16",)}  # tl.dot: no bfloat16
steps = st.lists(st.tuples(*[st.integers(0, 1)] * 3) | st.tuples(*[st.integers(0, 6)] * 3),
                 min_size=1, max_size=4)


@pytest.mark.parametrize("run, device", PATHS)
def test_any_schedule(run, device, request) -> None:
    """Prefill, chunks, decode. No bit depends on padding, other rows, later tokens, or tokens
    outside the window."""
    name = request.node.callspec.id

    @settings(max_examples=6 if name == "kernel" else 60, deadline=None)
    @given(st.tuples(*[st.integers(0, 13)] * 3), steps, st.sampled_from([(4, 2), (4, 4), (3, 1)]),
           st.fixed_dictionaries({
               "page_size": st.sampled_from([1, 4, 5, 16]), "head_dim": st.sampled_from([20, 32]),
               "window": st.sampled_from([None, 1, 4, 7, 500]),
               "scale": st.sampled_from([None, 0.5]), "softcap": st.sampled_from([None, 1.5]),
               "sinks": st.booleans(), "alibi": st.booleans(),
               "dtype": st.sampled_from(["float32", *HALF.get(name, HALF["kernel"])])}),
           st.integers(0, 2), st.integers(0, 20))
    def check_schedule(first, later, heads, changes, b, at) -> None:
        schedule = [counts for counts in (first, *later, (1, 1, 1)) if any(counts)]
        spec = replace(SPEC, n_head=heads[0], n_kv_head=heads[1], **changes)
        more: dict[str, Tensor] = {}
        if spec.sinks:
            more["sinks"] = torch.tensor([1.0, 4.0, -torch.inf, 2.5])[: heads[0]]
        if spec.alibi:
            more["alibi_slopes"] = torch.exp2(-torch.arange(3.0 * heads[0]).view(3, -1))
        inputs = draw(spec, [sum(counts) for counts in zip(*schedule)])
        moved = {n: t.to(device) for n, t in more.items()}
        outs = serve(run, spec, schedule, device, inputs, **moved)
        for row_number, (out, row) in enumerate(zip(outs, inputs, strict=True)):
            own = {n: t[row_number] if n == "alibi_slopes" else t.to(row[0].dtype)
                   for n, t in more.items()}
            check(out, row, spec, **own)
        at %= len(outs[b])
        others = [[x * (1 if n == b else torch.nan) for x in row] for n, row in enumerate(inputs)]
        for x in others[b]:
            x[at] *= 3000
        after = serve(run, spec, schedule, device, others, pad=(-3.0, 3000.0), nan=True, **moved)[b]
        changed = (outs[b] != after).any(-1).any(-1).nonzero().flatten().tolist()
        assert changed and set(changed) <= {*range(at, at + (spec.window or 99))}

    check_schedule()


@pytest.mark.parametrize("more", [{}, {"window": 5}, {"n_kv_head": 1, "head_dim": 20}])
@pytest.mark.parametrize("run, device", PATHS)
def test_one_query_over_a_static_cache(run, device, more) -> None:
    """Other lengths, a row that sits out, rings; unused slots hold 1e4."""
    spec, lengths = replace(SPEC, cache="static", page_size=None, **more), [13, 4, 9]
    inputs = draw(spec, [n + 8 for n in lengths])
    cache = StaticCache(1, 3, 24, spec.n_kv_head, spec.head_dim, windows=[spec.window],
                        device=device)
    cache.in_buckets = False
    for t in (*cache.k, *cache.v):
        t.fill_(1e4)
    at, counts = [0, 0, 0], lengths
    for n in range(9):
        new = [torch.stack([F.pad(row[i][a : a + c], (0, 0, 0, 0, 0, max(counts) - c))
                            for row, a, c in zip(inputs, at, counts)]) for i in range(3)]
        step = cache.reserve(max(counts), counts)
        layer = step.layer(0)
        if n == 0:
            layer.append(*(t.to(device) for t in new[1:]))
        else:
            out = run(*(t.to(device) for t in new), spec, cache=layer).cpu()
            for got, row, a, c in zip(out, inputs, at, counts):
                if c:
                    check(got[:c], [t[: a + c] for t in row], spec)
        step.advance()
        at = [a + c for a, c in zip(at, counts)]
        counts = [1, int(n != 2), 1]


@needs_triton
@pytest.mark.parametrize("splits", [1, 8])
def test_sinks_join_the_runs_once(splits) -> None:
    spec = replace(SPEC, page_size=16, sinks=True, softcap=3.0)
    sinks = torch.tensor([6.0, 3.0, 0.0, 9.0])
    inputs = draw(spec, [200, 65, 1])
    outs = serve(by_kernel, spec, [(199, 64, 0), (1, 1, 0), (0, 0, 1)], KERNEL_DEVICE, inputs,
                 sinks=sinks.to(KERNEL_DEVICE), splits=splits)
    for out, row in zip(outs, inputs, strict=True):
        check(out[-1:], row, spec, sinks)


@needs_triton
@pytest.mark.parametrize("run, device", PATHS)
def test_a_hidden_key_has_no_weight_however_low_the_scores_that_are_seen(run, device) -> None:
    """All are -60,000: a mask of -1e4 would be the largest."""
    T, spec = 7, replace(SPEC, n_head=2, n_kv_head=1, head_dim=4, sinks=True)
    q = torch.full((1, T, 2, 4), -30_000.0, device=device)
    v = torch.arange(T, device=device)[None, :, None, None].expand(1, T, 1, 4).float()
    k_pages, v_pages, view = filled_cache(torch.ones_like(v), v, spec)
    sinks = torch.full((2,), -60_000.0, device=device)
    for i in range(T):
        reads = k_pages, v_pages, view([i], [1])
        stored = SimpleNamespace(append=lambda *_, reads=reads: reads)
        out = run(q[:, :1], v[:, :1], v[:, :1], spec, cache=stored, sinks=sinks)
        want = i * (i + 1) / 2 / (i + 2)  # 0 to i, and the sink without a value
        # Compiled, a score less the maximum is one instruction, and is not rounded as the sink is.
        assert out.flatten().tolist() == pytest.approx([want] * 8, rel=4e-3 if HAS_CUDA else 1e-6)


@needs_triton
@pytest.mark.parametrize("splits", [1, 2])
def test_the_sums_of_half_precision_are_kept_in_float32(splits) -> None:
    """Sums above float16's range; scores 128 and 128.5, equal in float16."""
    from attention.triton import paged_kernels

    v = torch.full((1, 256, 1, 16), 800.0, dtype=torch.float16, device=KERNEL_DEVICE)
    v[:, 128:] = 400
    k = torch.where(v == 800, 1.0, 1 + 2**-8).half()
    spec = replace(SPEC, n_head=2, n_kv_head=1, head_dim=16, page_size=64, dtype="float16")
    k_pages, v_pages, view = filled_cache(k, v, spec)
    at = view([255], [1])
    reads = at.page_table, at.start, at.count, None, None, 0, 8.0, None, splits
    q = torch.ones(1, 1, 2, 16, dtype=torch.float16, device=KERNEL_DEVICE)
    got = paged_kernels.decode(q, k_pages, v_pages, *reads).flatten().tolist()
    assert got == pytest.approx([(800 + 400 * math.e**0.5) / (1 + math.e**0.5)] * 32, rel=1e-3)


@needs_triton
def test_opcheck() -> None:
    from attention.triton import paged_kernels

    q, pages, spec = torch.randn(2, 1, 4, 16), torch.randn(5, 4, 2, 16), (3, 0.5, 2.0, 2)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    start, count = torch.tensor([5, 2], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for more in ((torch.randn(4), torch.rand(2, 4), *spec), (None, None, 0, 0.25, None, 0)):
        args = [x.to(KERNEL_DEVICE) if isinstance(x, Tensor) else x
                for x in (q, pages, pages.flip(0), table, start, count, *more)]
        torch.library.opcheck(paged_kernels.decode, args)


@pytest.mark.parametrize("run, device", [PATHS[0], PATHS[2]])
def test_torch_compile_takes_it_into_one_graph(run, device) -> None:
    """Writes to pages survive functionalization."""
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    schedule = [(5, 3), (1, 1)]
    inputs = draw(SPEC, [6, 4])
    with torch.no_grad():
        eager = serve(run, SPEC, schedule, device, inputs)
        traced = serve(compiled, SPEC, schedule, device, inputs)
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))
