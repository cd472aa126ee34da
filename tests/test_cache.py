"""The dynamic and the static cache: stored keys and values, and attention over them."""

from __future__ import annotations

import itertools
from dataclasses import replace

import oracle
import pytest
import torch
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Machine, Spec
from attention.spec import DTYPES
from inference.cache import DynamicCache, StaticCache, StaticStep

HERE = Machine.here("cpu")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- dynamic ---


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30), st.one_of(st.none(), st.integers(1, 12))
)
@settings(max_examples=100, deadline=None)
def test_a_dynamic_cache_gives_back_what_later_tokens_can_see(counts, window) -> None:
    """Against all keys kept in one tensor, for chunks of any lengths, in two layers."""
    total = sum(counts)
    k, v = random(2, 2, total, 3, 4), random(2, 2, total, 3, 4, seed=1)  # (layer, B, T, H, D)
    cache, n = DynamicCache(2, max_len=total, windows=[window] * 2), 0
    for T in counts:
        step = cache.reserve(T)
        assert step.positions(T).tolist() == list(range(n, n + T)) and step.segments is None
        seen_from = 0 if window is None else max(0, n - window + 1)
        for layer in range(2):
            new = k[layer, :, n : n + T].clone(), v[layer, :, n : n + T].clone()
            *got, reads = step.layer(layer).append(*new)
            assert reads is None
            assert torch.equal(got[0], k[layer, :, seen_from : n + T])
            assert torch.equal(got[1], v[layer, :, seen_from : n + T])
        step.advance()
        n += T


def test_padding_on_the_left_is_a_segment_and_has_no_positions() -> None:
    cache = DynamicCache(1, max_len=8, pad=[2, 0, 3])
    step = cache.reserve(4)
    assert step.positions(4).tolist() == [[0, 0, 0, 1], [0, 1, 2, 3], [0, 0, 0, 0]]
    assert step.segments is not None and step.segments.dtype == torch.int32
    assert step.segments.tolist() == [[0, 0, 1, 1], [1, 1, 1, 1], [0, 0, 0, 1]]
    step.layer(0).append(random(3, 4, 1, 2), random(3, 4, 1, 2))
    step.advance()
    step = cache.reserve(2)
    assert step.positions(2).tolist() == [[2, 3], [4, 5], [1, 2]]
    assert step.segments is not None
    assert step.segments.tolist() == [[0, 0, 1, 1, 1, 1], [1] * 6, [0, 0, 0, 1, 1, 1]]
    assert DynamicCache(1, max_len=8, pad=[0, 0]).reserve(1).segments is None


# --- static ---


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_a_static_cache_holds_each_rows_tokens_from_its_start(steps) -> None:
    """0 to 7 tokens of each row a step, and 0 to 2 columns of padding."""
    cache = StaticCache(2, 2, 100, 1, 2)
    buffers = [t.data_ptr() for t in (*cache.k, *cache.v, cache.start, cache.count)]
    rows: list[list[Tensor]] = [[], []]
    for n, (a, b, more) in enumerate(steps):
        T = max(a, b) + more
        if T == 0:
            continue
        step = cache.reserve(T, (a, b))
        for row, count, at in zip(rows, (a, b), step.positions(T).tolist(), strict=True):
            assert at[:count] == [len(row) + i for i in range(count)]
        k, v = random(2, T, 1, 2, seed=n), random(2, T, 1, 2, seed=n + 1000)
        for layer in (0, 1):
            got_k, got_v, reads = step.layer(layer).append(k + layer, v + layer)
            assert (reads is None) == (step.kind == "none")
            if reads is not None:
                assert got_k.shape[1] == got_v.shape[1] == step.length == 100
        step.advance()
        for row, count in ((0, a), (1, b)):
            rows[row] += list(k[row, :count])
        assert cache.lengths == [len(row) for row in rows] == cache.start.tolist()
    for layer, buffer in enumerate(cache.k):
        for row, want in enumerate(rows):
            if want:
                assert torch.equal(buffer[row, : len(want)], torch.stack(want) + layer)
            assert not buffer[row, len(want) : 100].any()  # and padding went to the last place
    assert buffers == [t.data_ptr() for t in (*cache.k, *cache.v, cache.start, cache.count)]


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2)), max_size=12),
    st.integers(1, 9),
)
@settings(max_examples=50, deadline=None)
def test_a_windowed_layer_of_a_static_cache_keeps_its_window_only(steps, window) -> None:
    """Attention over it against attention over all tokens, for steps of any lengths."""
    cache = StaticCache(1, 2, 100, 1, 4, windows=[window])
    assert cache.k[0].shape[1] == window + 1
    spec, rows = Spec(1, 1, 4, "float32", window=window, grad=False), [random(0, 1, 4)] * 2
    for n, (a, b, more) in enumerate(steps):
        T = max(a, b) + more
        if T == 0:
            continue
        step, k = cache.reserve(T, (a, b)), random(2, T, 1, 4, seed=n)
        q = random(2, T, 1, 4, seed=n + 1000)
        got_k, got_v, reads = step.layer(0).append(k, k + 1)
        how = replace(spec, cache=step.kind)
        out = BACKENDS["manual"].attend(q, got_k, got_v, how, cache=reads)
        step.advance()
        for row, count in ((0, a), (1, b)):
            rows[row] = all_k = torch.cat([rows[row], k[row, :count]])
            if count:
                own = q[row : row + 1, :count], all_k[None], all_k[None] + 1
                want = BACKENDS["manual"].attend(*own, spec)
                torch.testing.assert_close(out[row : row + 1, :count], want)


def filled(spec: Spec, starts: list[int], max_len: int, dtype: torch.dtype,
           garbage: float = 0.0) -> tuple[StaticCache, Tensor, Tensor]:
    """A static cache with starts[b] tokens in each row and `garbage` elsewhere; k and v."""
    B, T = len(starts), max(starts)
    k, v = (random(B, T, spec.n_kv_head, spec.head_dim, seed=s).to(dtype) for s in (1, 2))
    cache = StaticCache(1, B, max_len, spec.n_kv_head, spec.head_dim, dtype=dtype)
    assert not cache.k[0].any() and not cache.v[0].any()
    for t in (cache.k[0], cache.v[0]):
        t += garbage
    step = cache.reserve(T, starts)
    step.layer(0).append(k, v)
    step.advance()
    return cache, k, v


def attend(name: str, q: Tensor, k: Tensor, v: Tensor, spec: Spec, step: StaticStep) -> Tensor:
    k, v, reads = step.layer(0).append(k, v)
    return BACKENDS[name].attend(q, k, v, spec, cache=reads)


ASKED = Spec(4, 2, 32, "float32", grad=False, cache="static")
READERS = [name for name, b in BACKENDS.items() if not b.why_not(ASKED, HERE)]


@pytest.mark.parametrize("Tq", [1, 17])
@pytest.mark.parametrize("window", few([6, None, 1], 2))
@pytest.mark.parametrize("name", READERS)
def test_attention_over_a_static_cache_is_each_rows_own(name, window, Tq) -> None:
    """Rows of different lengths, each against the oracle."""
    starts = [0, 30, 9]
    for dtype, Hkv in itertools.product(DTYPES, (4, 1)):
        spec = Spec(4, Hkv, 32, dtype, window=window, grad=False, cache="static")
        torch_dtype = getattr(torch, dtype)
        cache, k, v = filled(spec, starts, 300, torch_dtype, garbage=1e3)
        q = random(3, Tq, 4, 32, seed=3).to(torch_dtype)
        new = [random(3, Tq, Hkv, 32, seed=s).to(torch_dtype) for s in (4, 5)]
        step = cache.reserve(Tq)
        assert step.length == 128
        out = attend(name, q, *new, spec, step)
        for b, n in enumerate(starts):
            row = [torch.cat([old[b : b + 1, :n], t[b : b + 1]], 1) for old, t in zip((k, v), new)]
            args = (q[b : b + 1], *row, q[b : b + 1])
            truth = oracle.attention(*args, window=window)
            plain = oracle.plain(*args, window=window)
            oracle.check(oracle.Result(out[b : b + 1]), plain, truth, torch_dtype)
