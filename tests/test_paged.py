"""Attention over pages, and their cache, against the oracle: every page not in use holds NaN.

The gather path runs on any device. The Triton kernels run where CUDA is, else in the interpreter.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from attention import (
    BACKENDS,
    BackendUnavailable,
    Machine,
    Policy,
    Spec,
    oracle,
    packages,
    probe,
    select,
)
from attention import paged as kernels
from attention.paged import gather
from attention.spec import DTYPES
from attention.views import PagedView, filled_cache
from inference.cache import PagedCache
from inference.pages import OutOfPages

STRICT = Policy(fallback=False)
ROOT = Path(__file__).parents[1]
HAS_CUDA = torch.cuda.is_available()
KERNEL_DEVICE = "cuda" if HAS_CUDA else "cpu"
pytestmark = [pytest.mark.gpu] * HAS_CUDA
SPEC = Spec(4, 2, 32, "float32", grad=False, cache="paged", page_size=4)
Attend = Callable[..., Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, **more: Any) -> Tensor:
    """What a model does in a layer: store k and v, and read the pages."""
    k_pages, v_pages, reads = cache.append(k, v)
    return kernels.attend(q, k_pages, v_pages, spec, cache=reads, **more)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, splits: int = 0,
              sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """attend(), with the kernels for one query a row wherever it runs."""
    if q.shape[1] > 1:
        return attend(q, k, v, spec, cache=cache, sinks=sinks)
    from attention.paged_kernels import decode

    k_pages, v_pages, view = cache.append(k, v)
    table = (view.page_table, view.start, view.count)
    return decode(q, k_pages, v_pages, *table, sinks, spec.window or 0, spec.softmax_scale,
                  spec.softcap, splits)  # fmt: skip


def by_formula(*args: Any, **kw: Any) -> Tensor:
    """attend(), as it gathers on other devices than the CPU."""
    paged = sys.modules["attention.paged"]
    with mock.patch.object(paged, "_sdpa", paged._formula):
        return attend(*args, **kw)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="package 'triton' is not installed"
)
PATHS = [
    pytest.param(attend, "cpu", id="gather"),
    pytest.param(by_kernel, KERNEL_DEVICE, id="kernel", marks=needs_triton),
    pytest.param(attend, "cuda", id="cuda", marks=[
        pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")]),
]  # fmt: skip


def poisoned(spec: Spec, n_pages: int, device: str = "cpu", n_layer: int = 1) -> PagedCache:
    """A cache full of NaN, whose pages are handed out in a scattered order."""
    assert spec.page_size is not None
    cache = PagedCache(n_layer, spec.n_kv_head, spec.head_dim, n_pages=n_pages, device=device,
                       page_size=spec.page_size, dtype=getattr(torch, spec.dtype))  # fmt: skip
    for t in (cache.k, cache.v):
        assert not t.any()
        t.fill_(torch.nan)
    taken = [cache.pool.new() for _ in range(n_pages - 1)]
    cache.pool.grow(dict.fromkeys(taken, spec.page_size))
    for n in torch.randperm(n_pages - 1, generator=torch.Generator().manual_seed(3)).tolist():
        cache.pool.free(taken[n])
    return cache


def draw(spec: Spec, lengths: Sequence[int], seed: int = 0) -> list[list[Tensor]]:
    """q, k and v, (T, heads, D), of each row."""
    rng = torch.Generator().manual_seed(seed)
    heads = (spec.n_head, spec.n_kv_head, spec.n_kv_head)
    return [[torch.randn(T, h, spec.head_dim, generator=rng).to(getattr(torch, spec.dtype))
             for h in heads] for T in lengths]  # fmt: skip


def run_step(run: Attend, spec: Spec, cache: PagedCache, rows: Sequence[int],
             new: Sequence[Sequence[Tensor]], layer: int = 0,
             pad: tuple[float, float] = (50.0, torch.nan),
             nan: bool = False) -> list[Tensor]:  # fmt: skip
    """One step of one layer: each row's new q, k and v in, its output out; not advanced.

    Padding on the right is pad[0] in q, and pad[1] in k and v; `nan` allows NaN in the output.
    """
    counts = [len(q) for q, _, _ in new]
    step = cache.reserve(rows, counts)
    device, padded = cache.k.device, []
    for n, value in enumerate((pad[0], pad[1], pad[1])):
        shape = (len(rows), max(counts), *new[0][n].shape[1:])
        padded.append(torch.full(shape, value, dtype=new[0][n].dtype))
        for b, row in enumerate(new):
            padded[-1][b, : counts[b]] = row[n]
    out = run(*(t.to(device) for t in padded), spec, cache=step.layer(layer)).cpu()
    assert out.shape == padded[0].shape and out.dtype == padded[0].dtype
    assert nan or out.isfinite().all(), "something, maybe padding, is not finite"
    return [out[b, :n] for b, n in enumerate(counts)]


def serve(run: Attend, spec: Spec, schedule: Sequence[Sequence[int]], device: str = "cpu",
          inputs: list[list[Tensor]] | None = None, **kw: Any) -> list[Tensor]:  # fmt: skip
    """Rows that grow as `schedule` says, counts[row] a step; all outputs of each row, (T, H, D)."""
    lengths = [sum(counts) for counts in zip(*schedule, strict=True)]
    inputs = inputs or draw(spec, lengths)
    assert spec.page_size is not None
    n_pages = sum(-(-T // spec.page_size) for T in lengths) + 3
    cache = poisoned(spec, n_pages, device)
    rows = [cache.pool.new() for _ in lengths]
    out: list[list[Tensor]] = [[] for _ in rows]
    for counts in schedule:
        spans = [slice(cache.pool.length(r), cache.pool.length(r) + n)
                 for r, n in zip(rows, counts, strict=True)]  # fmt: skip
        new = [[x[at] for x in row] for row, at in zip(inputs, spans, strict=True)]
        for b, got in enumerate(run_step(run, spec, cache, rows, new, **kw)):
            out[b].append(got)
        cache.pool.advance(dict(zip(rows, counts, strict=True)))
    return [torch.cat(parts) for parts in out]


def check(got: Tensor, row: Sequence[Tensor], spec: Spec, sinks: Tensor | None = None) -> None:
    """One row's outputs, (Tq, H, D), against the oracle; row is its q, k and v from the start."""
    q, k, v = (t[None] for t in row)
    q = q[:, len(row[0]) - len(got) :]
    more: dict[str, Any] = {"window": spec.window, "scale": spec.scale, "softcap": spec.softcap}
    truth = oracle.attention(q, k, v, q, **more, sinks=sinks)
    plain = oracle.plain(q, k, v, q, **more, sinks=sinks)
    oracle.check(oracle.Result(got[None]), plain, truth, q.dtype)


# --- numbers ---

# Three rows: chunks of different lengths, one row that comes later, then single tokens, and a row
# that sits out a step.
SCHEDULE = [(13, 4, 0), (3, 1, 6), (1, 1, 1), (1, 0, 1), (1, 1, 1)]
SHAPES = {
    "page1": {"page_size": 1}, "page4": {}, "page16": {"page_size": 16}, "page5": {"page_size": 5},
    "mha": {"n_kv_head": 4}, "mqa": {"n_kv_head": 1}, "three-groups": {"n_head": 6},
    "D20": {"head_dim": 20}, "D80": {"head_dim": 80, "page_size": 16}, "D128": {"head_dim": 128},
    "window1": {"window": 1}, "window4": {"window": 4},
    "window5-page1": {"window": 5, "page_size": 1},
    "window7-mqa-D20": {"window": 7, "n_kv_head": 1, "head_dim": 20}, "window19": {"window": 19},
    "window500": {"window": 500}}  # fmt: skip


def _grid() -> Iterator[Any]:
    """(run, device, shape, dtype). float64 always goes by the gather path.

    In the interpreter tl.dot is wrong in bfloat16, and a few shapes must do in float16.
    """
    for path, (shape, changes), dtype in itertools.product(PATHS, SHAPES.items(), DTYPES):
        if path.id == "kernel":
            few = shape in ("page4", "D80", "window7-mqa-D20")
            if dtype not in (("float32", "float16") if few else ("float32",)):
                continue
        if path.id == "cuda" and not HAS_CUDA and (shape, dtype) != ("page4", "float32"):
            continue  # one says that it is missing
        spec = replace(SPEC, dtype=dtype, **changes)
        id_ = f"{path.id}-{shape}-{dtype}"
        yield pytest.param(*path.values, spec, marks=path.marks, id=id_)
        if path.id == "gather" and (shape == "three-groups" or dtype == "float32"):
            yield pytest.param(by_formula, "cpu", spec, id=id_.replace("gather", "formula"))


@pytest.mark.parametrize("run, device, spec", list(_grid()))
def test_prefill_chunks_and_decode_against_the_oracle(run, device, spec) -> None:
    inputs = draw(spec, [sum(c) for c in zip(*SCHEDULE, strict=True)])
    outs = serve(run, spec, SCHEDULE, device, inputs)
    for out, row in zip(outs, inputs, strict=True):
        check(out, row, spec)


MORE = [
    {"scale": 0.5},
    {"softcap": 1.5},
    {"sinks": True},
    {"scale": 0.02, "softcap": 2.0, "sinks": True, "window": 7, "dtype": "float16"},
]


@pytest.mark.parametrize("more", MORE, ids=lambda m: "-".join(m))
@pytest.mark.parametrize("run, device", [*PATHS, pytest.param(by_formula, "cpu", id="formula")])
def test_scale_softcap_and_sinks(run, device, more) -> None:
    """Sinks about as large as the logsumexp of a row's scores, one none at all; a row of no key."""
    spec = replace(SPEC, **more)
    sinks = torch.tensor([1.0, 4.0, -torch.inf, 2.5], device=device) if spec.sinks else None
    inputs = draw(spec, [sum(c) for c in zip(*SCHEDULE, strict=True)])
    outs = serve(with_sinks(run, sinks), spec, SCHEDULE, device, inputs)
    for out, row in zip(outs, inputs, strict=True):
        check(out, row, spec, None if sinks is None else sinks.cpu().to(row[0].dtype))


def with_sinks(run: Attend, sinks: Tensor | None, **more: Any) -> Attend:
    def run_(*args: Any, **kw: Any) -> Tensor:
        out, step = run(*args, **kw, **more, sinks=sinks), kw["cache"].step
        assert not out[step.start + step.count == 0].any(), "a row that sees no key"
        return out

    return run_


@needs_triton
@pytest.mark.parametrize("splits", [1, 8])
def test_sinks_join_the_runs_once(splits) -> None:
    spec = replace(SPEC, page_size=16, sinks=True, softcap=3.0)
    sinks = torch.tensor([6.0, 3.0, 0.0, 9.0], device=KERNEL_DEVICE)
    inputs = draw(spec, [200, 65, 1])
    run = with_sinks(by_kernel, sinks, splits=splits)
    outs = serve(run, spec, [(199, 64, 0), (1, 1, 0), (0, 0, 1)], KERNEL_DEVICE, inputs)
    for out, row in zip(outs, inputs, strict=True):
        check(out[-1:], row, spec, sinks.cpu())


@needs_triton
@pytest.mark.parametrize("run, device", [*PATHS, pytest.param(by_formula, "cpu", id="formula")])
def test_a_hidden_key_has_no_weight_however_low_the_scores_that_are_seen(run, device) -> None:
    """All of them and the sink are -60,000: a mask of, say, -1e4 would be the largest."""
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
        assert out.flatten().tolist() == pytest.approx([want] * 8)


@needs_triton
@pytest.mark.parametrize("splits", [1, 2])
def test_the_sums_of_half_precision_are_kept_in_float32(splits) -> None:
    """Values that add up to more than float16 holds before they are divided by their weights, and
    scores of 128 and 128.5, which it does not tell apart in units of log 2."""
    from attention import paged_kernels

    v = torch.full((1, 256, 1, 16), 800.0, dtype=torch.float16, device=KERNEL_DEVICE)
    v[:, 128:] = 400
    k = torch.where(v == 800, 1.0, 1 + 2**-8).half()
    spec = replace(SPEC, n_head=2, n_kv_head=1, head_dim=16, page_size=64, dtype="float16")
    k_pages, v_pages, view = filled_cache(k, v, spec)
    at = view([255], [1])
    reads = at.page_table, at.start, at.count, None, 0, 8.0, None, splits
    q = torch.ones(1, 1, 2, 16, dtype=torch.float16, device=KERNEL_DEVICE)
    got = paged_kernels.decode(q, k_pages, v_pages, *reads).flatten().tolist()
    assert got == pytest.approx([(800 + 400 * math.e**0.5) / (1 + math.e**0.5)] * 32, rel=1e-3)


def test_opcheck() -> None:
    from attention import paged_kernels

    q, pages, spec = torch.randn(2, 1, 4, 16), torch.randn(5, 4, 2, 16), (3, 0.5, 2.0, 2)
    table = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    start, count = torch.tensor([5, 2], dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    for more in ((torch.randn(4), *spec), (None, 0, 0.25, None, 0)):
        args = [x.to(KERNEL_DEVICE) if isinstance(x, Tensor) else x
                for x in (q, pages, pages.flip(0), table, start, count, *more)]  # fmt: skip
        torch.library.opcheck(paged_kernels.decode, args)


@pytest.mark.parametrize("schedule", [
    [(17, 5, 1)], [(9, 0, 4), (8, 7, 0), (3, 1, 2), (0, 0, 5)], [(1, 0, 1), (1, 1, 1), (0, 1, 1)]],
    ids=["whole", "chunks", "token by token"])  # fmt: skip
@pytest.mark.parametrize("run, device", PATHS)
def test_other_schedules(run, device, schedule) -> None:
    inputs = draw(SPEC, [sum(c) for c in zip(*schedule, strict=True)])
    for out, row in zip(serve(run, SPEC, schedule, device, inputs), inputs, strict=True):
        check(out, row, SPEC)


@needs_triton
def test_a_tile_of_keys_is_16_kb_at_most_and_16_keys_at_least() -> None:
    from attention.paged_kernels import block_sizes

    want = {(64, 2): (64, 64), (80, 2): (64, 128), (128, 4): (32, 128), (256, 4): (16, 256),
            (8, 2): (64, 16)}  # fmt: skip
    assert {asked: block_sizes(*asked) for asked in want} == want
    assert all(N * D * size <= 2**14 for (_, size), (N, D) in want.items())


@needs_triton
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("splits", [0, 1, 3, 8])
def test_however_many_runs_the_keys_are_split_into(splits, window, monkeypatch) -> None:
    """Rows of 200, 65 and 1 keys: runs of several blocks, and runs without any key. Who names their
    number gets it."""
    from attention import paged_kernels

    chosen: list[Any] = []
    choose = paged_kernels.choose_splits
    monkeypatch.setattr(
        paged_kernels, "choose_splits", lambda *of: chosen.append(of) or choose(*of)
    )
    spec = replace(SPEC, page_size=16, window=window)
    schedule = [(199, 64, 0), (1, 1, 1)]
    inputs = draw(spec, [200, 65, 1])

    def run(*args: Any, **kw: Any) -> Tensor:
        return by_kernel(*args, **kw, splits=splits)

    for out, row in zip(serve(run, spec, schedule, KERNEL_DEVICE, inputs), inputs, strict=True):
        check(out[-1:], row, spec)
    assert bool(chosen) == (splits == 0)
    for programs, keys in ((1, 1), (1, 10**6), (64, 4096), (10**5, 10**6)):
        n = paged_kernels.choose_splits(programs, keys)
        assert 1 <= n <= 64 and n & (n - 1) == 0, (programs, keys, n)
    assert paged_kernels.choose_splits(1, 100) == paged_kernels.choose_splits(600, 10**6) == 1
    assert paged_kernels.choose_splits(8, 10**6) == 64


def test_the_kernels_are_launched_on_the_device_of_the_query(monkeypatch) -> None:
    """Triton launches on the current device: cuda:0, also where the model is on another."""
    pytest.importorskip("triton", reason="package 'triton' is not installed")
    from attention import paged_kernels

    held: list[Tensor] = []
    launched: list[list[Tensor]] = []

    @contextlib.contextmanager
    def device_of(x: Tensor) -> Iterator[None]:
        held.append(x)
        yield
        held.pop()

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: launched.append(list(held))

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    for name in ("decode_kernel", "combine_kernel"):
        monkeypatch.setattr(paged_kernels, name, Kernel())
    q, pages = torch.randn(2, 1, 4, 16), torch.randn(3, 16, 2, 16)
    table = torch.ones(2, 1, dtype=torch.int32)
    paged_kernels.decode._init_fn(
        q, pages, pages, table, table[:, 0], table[:, 0], None, 0, 0.25, None, 0
    )
    assert [[x is q for x in on] for on in launched] == [[True], [True]]


# --- what a row does not depend on, to the bit ---


@pytest.mark.parametrize("run, device", PATHS)
def test_padding_and_other_rows_move_nothing_by_a_bit(run, device) -> None:
    inputs = draw(SPEC, [sum(c) for c in zip(*SCHEDULE, strict=True)])
    before = serve(run, SPEC, SCHEDULE, device, inputs)
    after = serve(run, SPEC, SCHEDULE, device, inputs, pad=(-3.0, 3000.0))
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    for b in range(3):
        others = [row if n == b else [x * torch.nan for x in row] for n, row in enumerate(inputs)]
        assert torch.equal(before[b], serve(run, SPEC, SCHEDULE, device, others, nan=True)[b])


@pytest.mark.parametrize("window", [pytest.param(None, marks=pytest.mark.slow), 6])
@pytest.mark.parametrize("run, device", PATHS)
def test_canary_a_later_token_moves_nothing_earlier(run, device, window) -> None:
    spec = replace(SPEC, n_head=2, n_kv_head=1, window=window)
    schedule = [(7, 2), (5, 3), (1, 1), (1, 1)]
    inputs = draw(spec, [14, 7])
    before = serve(run, spec, schedule, device, inputs)[0]
    for changed in (3, 6, 7, 12, 13):
        for which in range(3):
            moved = [[x.clone() for x in row] for row in inputs]
            moved[0][which][changed] *= 3000
            after = serve(run, spec, schedule, device, moved)[0]
            rows = (before != after).any(dim=(1, 2)).nonzero().flatten()
            assert rows.numel() and rows.min() == changed, (changed, which)
            if window is not None:  # and what has left the window moves nothing later
                assert rows.max() < changed + window, (changed, which)


# --- sharing ---


@pytest.mark.parametrize("run, device", PATHS)
def test_rows_that_share_a_page_keep_their_own_tokens_in_every_layer(run, device) -> None:
    spec, n_layer = replace(SPEC, page_size=4), 2
    cache = poisoned(spec, 12, device, n_layer)
    layers = [draw(spec, [6], seed=layer)[0] for layer in range(n_layer)]
    ids = list(range(6))
    a = cache.pool.new(ids)

    def go(rows: list[int], new: list[list[list[Tensor]]]) -> list[list[Tensor]]:
        """new[row][layer]; the outputs likewise."""
        out = [run_step(run, spec, cache, rows, [row[layer] for row in new], layer)
               for layer in range(n_layer)]  # fmt: skip
        cache.pool.advance({row: len(x[0][0]) for row, x in zip(rows, new, strict=True)})
        return [list(per_row) for per_row in zip(*out, strict=True)]

    go([a], [layers])
    cache.pool.remember(a, ids)
    rows = [a, cache.pool.new([*ids[:4], 90]), cache.pool.new([*ids[:4], 91])]
    assert cache.pool.n_used == 2 and [cache.pool.length(row) for row in rows] == [6, 4, 4]
    stored = {row: [[x[: cache.pool.length(row)] for x in layer] for layer in layers]
              for row in rows}  # fmt: skip
    for n, T in enumerate((1, 1, 3, 1)):
        tails = [[draw(spec, [T], seed=100 * n + 10 * b + layer)[0] for layer in range(n_layer)]
                 for b in range(3)]  # fmt: skip
        got = go(rows, tails)
        for b, row in enumerate(rows):
            for layer in range(n_layer):
                both = zip(stored[row][layer], tails[b][layer], strict=True)
                stored[row][layer] = [torch.cat(pair) for pair in both]
                check(got[b][layer], stored[row][layer], spec)
    assert cache.pool.n_used == 1 + 3 * 2  # the first page is still one for all
    for row in rows[:2]:
        cache.pool.free(row)
    assert cache.pool.n_used == 3


@pytest.mark.parametrize("run, device", PATHS)
def test_a_known_prompt_is_read_and_not_computed(run, device) -> None:
    cache = poisoned(SPEC, 10, device)
    ids = list(range(11))
    [prompt, tail] = draw(SPEC, [11, 3])
    a = cache.pool.new(ids)
    run_step(run, SPEC, cache, [a], [prompt])
    cache.pool.advance({a: 11})
    cache.pool.remember(a, ids)
    for gone in (False, True):
        if gone:
            cache.pool.free(a)
        b = cache.pool.new([*ids[:9], 77, 78])
        assert cache.pool.length(b) == 8
        row = [torch.cat((x[:8], y)) for x, y in zip(prompt, tail, strict=True)]
        [out] = run_step(run, SPEC, cache, [b], [tail])
        check(out, row, SPEC)
        cache.pool.free(b)


# --- the cache ---


def test_when_pages_run_out_everything_stays_as_it_was() -> None:
    cache = poisoned(SPEC, 4)
    a, b = cache.pool.new(), cache.pool.new()
    [first, second] = draw(SPEC, [6, 4])
    run_step(attend, SPEC, cache, [a], [first])
    cache.pool.advance({a: 6})
    k, v, held = cache.k.clone(), cache.v.clone(), cache.pool.pages(a)
    with pytest.raises(OutOfPages, match="2 needed, 1 free"):
        cache.reserve([a, b], [1, 5])
    assert cache.pool.n_free == 1 and cache.pool.length(b) == 0 and cache.pool.pages(b) == ()
    assert cache.pool.pages(a) == held and cache.pool.length(a) == 6
    for now, then in ((cache.k, k), (cache.v, v)):
        assert torch.equal(now.nan_to_num(7.0), then.nan_to_num(7.0))
    [out] = run_step(attend, SPEC, cache, [b], [second])  # there is room for this
    check(out, second, SPEC)


def test_a_step() -> None:
    cache = PagedCache(3, 2, 8, n_pages=9, page_size=4, dtype=torch.float16)
    assert cache.k.shape == cache.v.shape == (3, 9, 4, 2, 8)
    page = 2 * 3 * 4 * 2 * 8 * 2  # keys and values, layers, tokens, heads, numbers, bytes
    assert cache.nbytes == 9 * page and cache.nbytes_used == 0
    a, b = cache.pool.new(), cache.pool.new()
    step = cache.reserve([b, a], [9, 0])
    assert cache.nbytes_used == 3 * page
    assert step.page_table.tolist() == [list(cache.pool.pages(b)), [0, 0, 0]]
    assert (step.start.tolist(), step.count.tolist()) == ([0, 0], [9, 0])
    for t in (step.page_table, step.start, step.count):
        assert t.dtype == torch.int32 and t.is_contiguous()
    k_pages, v_pages, reads = step.layer(2).append(*torch.zeros(2, 2, 9, 2, 8).half())
    assert k_pages.data_ptr() == cache.k[2].data_ptr()
    assert v_pages.data_ptr() == cache.v[2].data_ptr()
    assert (reads.page_table, reads.start, reads.count) == (step.page_table, step.start, step.count)
    assert cache.pool.length(b) == 0
    step.advance()
    assert cache.pool.length(b) == 9
    assert cache.reserve([a, b], [1, 4]).start.tolist() == [0, 9]


def test_the_pages_are_written_where_they_lie_and_without_a_graph() -> None:
    cache = poisoned(SPEC, 9)
    a = cache.pool.new()
    q, k, v = (t[None].requires_grad_() for t in draw(SPEC, [6])[0])
    step = cache.reserve([a], [6])
    attend(q, k, v, SPEC, cache=step.layer(0))
    assert not cache.k.requires_grad and not cache.v.requires_grad
    for pages, x in ((cache.k, k), (cache.v, v)):
        stored = torch.cat([pages[0, page] for page in cache.pool.pages(a)])
        assert torch.equal(stored[:6], x[0]) and stored[6:].isnan().all()


@pytest.mark.parametrize("run, device", [PATHS[0], PATHS[2]])
def test_a_step_reads_nothing_back_from_the_device(run, device, monkeypatch) -> None:
    cache = poisoned(SPEC, 9, device)
    a, b = cache.pool.new(), cache.pool.new()
    cache.reserve([a, b], [5, 2]).advance()
    c = cache.pool.new()
    qkv = [torch.zeros(3, 1, h, 32, device=device) for h in (4, 2, 2)]
    if device == "cuda":
        run(*qkv, SPEC, cache=cache.reserve([a, b, c], [1, 1, 1]).layer(0))  # kernels compile
        torch.cuda.set_sync_debug_mode("error")
    else:

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a value was read back")

        for name in ("item", "tolist", "__bool__", "__int__", "__index__", "nonzero"):
            monkeypatch.setattr(Tensor, name, refuse)
    try:
        step = cache.reserve([a, b, c], [1, 1, 1])
        run(*qkv, SPEC, cache=step.layer(0))
        step.advance()
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


# --- the backend ---


@pytest.mark.parametrize("run, device", PATHS)
def test_torch_compile_takes_it_into_one_graph(run, device) -> None:
    """With aot_eager: the writes to the pages must survive functionalization."""
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=False)
    schedule = [(5, 3), (1, 1)]
    inputs = draw(SPEC, [6, 4])
    with torch.no_grad():
        eager = serve(run, SPEC, schedule, device, inputs)
        traced = serve(compiled, SPEC, schedule, device, inputs)
    assert all(torch.equal(a, b) for a, b in zip(eager, traced, strict=True))


def test_the_path_is_chosen_by_device_dtype_and_size(monkeypatch) -> None:
    paged = sys.modules["attention.paged"]
    cases = [((7, 0), True, ()), ((9, 0), False, ()), ((7, 5), True, ("float16", "float32")),
             ((8, 0), True, ("float16", "bfloat16", "float32"))]  # fmt: skip
    for capability, triton, runs in cases:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, c=capability: c)
        monkeypatch.setattr(importlib.util, "find_spec", lambda _, t=triton: t or None)
        takes = [d for d in DTYPES if paged._has_kernel(getattr(torch, d), 64)]
        assert takes == list(runs)
        assert not paged._has_kernel(torch.float16, 257)


@pytest.mark.parametrize("run, device", PATHS)
def test_the_profiler_shows_which_path_ran(run, device) -> None:
    with torch.profiler.profile() as profiler:
        serve(run, SPEC, [(3, 2), (1, 1)], device)
    names = {event.key for event in profiler.key_averages()}
    assert ("nanoattn::paged_decode" in names) == (run is by_kernel or device == "cuda")


SPECS = [
    SPEC, replace(SPEC, dtype="bfloat16", page_size=1, n_kv_head=1), replace(SPEC, dtype="float64"),
    replace(SPEC, dtype="float16", head_dim=20, window=9, page_size=256),
    replace(SPEC, window=1, page_size=7), replace(SPEC, window=1000, page_size=16)]  # fmt: skip


@pytest.mark.parametrize("more", MORE, ids=lambda m: "-".join(m))
def test_the_probe_passes_it_with_scale_softcap_and_sinks(more) -> None:
    tried = probe(BACKENDS["paged"], replace(SPEC, **more), "cpu")
    assert tried.why == () and tried.kernels == (("flash (CPU)",) if len(more) == 1 and
                                                 "scale" in more else ())  # fmt: skip


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_the_probe_fills_a_paged_cache(spec) -> None:
    tried = probe(BACKENDS["paged"], spec, "cpu")
    assert tried.why == () and tried.kernels == ("flash (CPU)",)
    assert "aten::index_select" in tried.events
    assert tried.error is not None
    assert tried.error < 4 * torch.finfo(getattr(torch, spec.dtype)).eps
    assert select("paged", spec, "cpu", STRICT).backend.name == "paged"


def values_for_keys(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return gather(q, v, v, spec, kw["cache"])


def changed_view(**change: Callable[[PagedView], Tensor]) -> Attend:
    """Reads through a view that is wrong in one thing."""

    def run(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        cache = kw["cache"]
        return gather(q, k, v, spec, replace(cache, **{n: f(cache) for n, f in change.items()}))

    return run


def no_window(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return kernels.attend(q, k, v, replace(spec, window=None), **kw)


@pytest.mark.parametrize("broken, spec", [
    (values_for_keys, SPEC),
    (changed_view(start=lambda c: c.start + 1), SPEC),
    (changed_view(start=lambda c: c.start - 1), SPEC),
    (changed_view(start=lambda c: c.start[:1].expand(2)), SPEC),
    (changed_view(page_table=lambda c: c.page_table.sort(dim=1).values), SPEC),
    (changed_view(page_table=lambda c: c.page_table.flip(0)), SPEC),
    (no_window, replace(SPEC, window=9)),
    (no_window, replace(SPEC, window=1000))])  # fmt: skip
def test_the_probe_finds_out_a_broken_one(broken, spec) -> None:
    tried = probe(replace(BACKENDS["paged"], attend=broken), spec, "cpu")
    assert tried.why and "its numbers are wrong" in tried.why[0], tried


def test_what_it_refuses() -> None:
    here = Machine.here("cpu", packages())
    plain = replace(SPEC, cache="none", page_size=None)
    for spec, words in ((replace(plain, grad=True), "it has no backward pass"),
                        (plain, "it only reads a paged cache"),
                        (replace(SPEC, dropout=0.1), "it has no dropout"),
                        (replace(SPEC, segments=True), "it has no segments")):  # fmt: skip
        assert any(words in why for why in BACKENDS["paged"].why_not(spec, here)), spec
    for name in ("paged", "paged_attention"):  # training falls back, and says so
        chosen = select(name, replace(plain, grad=True), "cpu")
        assert chosen.backend.name == "sdpa" and "backward" in chosen.rejected["paged"][0]
    with pytest.raises(BackendUnavailable, match="it has no backward pass"):
        select("paged", replace(plain, grad=True), "cpu", STRICT)
    for name in ("manual", "tiled", "sdpa"):
        assert "it has no 'paged' cache" in BACKENDS[name].why_not(SPEC, here)


@pytest.mark.slow
def test_without_triton() -> None:
    """PyTorch itself may import Triton; so it is made impossible."""
    code = """if True:
        import sys
        sys.modules["triton"] = None
        import attention
        spec = attention.Spec(2, 2, 8, "float32", grad=False, cache="paged", page_size=4)
        assert attention.select("paged", spec, "cpu").backend.name == "paged"
        assert "attention.paged_kernels" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@needs_triton
@pytest.mark.slow
def test_the_kernels_compile_for_gpus_that_are_not_here(tmp_path) -> None:
    """The interpreter takes what the compiler may not."""
    code = """if True:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from attention.paged_kernels import block_sizes, combine_kernel, decode_kernel

        def compile(kernel, dtype, capability, **constants):
            kinds = {"tau": "fp32", "softcap": "fp32", "Sinks": "*fp32"}
            kinds |= dict.fromkeys(constants, "constexpr")
            kinds |= dict.fromkeys(("Q", "K", "V", "Out"), "*" + dtype)
            kinds |= dict.fromkeys(("Table", "Start", "Count"), "*i32")
            kinds |= dict.fromkeys(("Partial", "M", "L"), "*fp32")
            signature = {name: kinds.get(name, "i32") for name in kernel.arg_names}
            source = ASTSource(kernel, signature, constexprs=constants)
            made = triton.compile(source, target=GPUTarget("cuda", capability, 32))
            assert made.metadata.shared <= 64 * 1024, made.metadata.shared  # Turing's

        for none in (["softcap", "Sinks"], []):
            for capability, dtype, size, D in ((75, "fp16", 2, 80), (90, "bf16", 2, 256)):
                BLOCK_N, BLOCK_D = block_sizes(D, size)
                compile(decode_kernel, dtype, capability, R=4, HEAD_DIM=D, BLOCK_R=16,
                        BLOCK_N=BLOCK_N, BLOCK_D=BLOCK_D, **dict.fromkeys(none[:1]))
            compile(combine_kernel, "fp16", 75, HEAD_DIM=80, BLOCK_S=64, BLOCK_D=128,
                    **dict.fromkeys(none[1:]))
        """
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
