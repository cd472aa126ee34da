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
from inference.cache import DynamicCache, StaticCache

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


# --- static ---


@given(
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2)), max_size=12),
    st.sampled_from([None, 1, 2, 5, 9]),
)
@settings(max_examples=100, deadline=None)
def test_a_static_cache_holds_what_each_rows_tokens_see(steps, window) -> None:
    """Attention over it against attention over all tokens, in steps of 0 to 7 tokens of each row
    and 0 to 2 columns of padding, whose numbers are huge."""
    cache = StaticCache(1, 2, 100, 1, 4, windows=[window])
    assert cache.nbytes <= 2 * 2 * ((window or 100) + 1) * 16
    spec, rows = Spec(1, 1, 4, "float32", window=window, grad=False), [random(0, 1, 4)] * 2
    for n, (a, b, more) in enumerate(steps):
        T = max(a, b) + more
        if T == 0:
            continue
        step, k = cache.reserve(T, (a, b)), random(2, T, 1, 4, seed=n)
        k[0, a:] = k[1, b:] = 1e4
        for row, count, at in zip(rows, (a, b), step.positions(T).tolist(), strict=True):
            assert at[:count] == [len(row) + i for i in range(count)]
        q = random(2, T, 1, 4, seed=n + 1000)
        got_k, got_v, reads = step.layer(0).append(k, k + 1)
        how = replace(spec, cache=step.kind)
        out = BACKENDS["manual"].attend(q, got_k, got_v, how, cache=reads)
        step.advance()
        for row, count in ((0, a), (1, b)):
            rows[row] = all_k = torch.cat([rows[row], k[row, :count]])
            assert cache.length(row) == len(all_k)
            if count:
                own = q[row : row + 1, :count], all_k[None], all_k[None] + 1
                want = BACKENDS["manual"].attend(*own, spec)
                torch.testing.assert_close(out[row : row + 1, :count], want)


ASKED = Spec(4, 2, 32, "float32", grad=False, cache="static")
READERS = [name for name, b in BACKENDS.items() if not b.why_not(ASKED, HERE)]


@pytest.mark.parametrize("Tq", [1, 17])
@pytest.mark.parametrize("window", few([6, None, 1], 2))
@pytest.mark.parametrize("name", READERS)
def test_attention_over_a_static_cache_is_each_rows_own(name, window, Tq) -> None:
    """Rows of different lengths, each against the oracle; slots that hold no token hold 1e3."""
    starts = [0, 30, 9]
    for dtype, Hkv in itertools.product(DTYPES, (4, 1)):
        spec = Spec(4, Hkv, 32, dtype, window=window, grad=False, cache="static")
        to = getattr(torch, dtype)
        k, v = (random(3, 30, Hkv, 32, seed=s).to(to) for s in (1, 2))
        q = random(3, Tq, 4, 32, seed=3).to(to)
        new = [random(3, Tq, Hkv, 32, seed=s).to(to) for s in (4, 5)]
        cache = StaticCache(1, 3, 300, Hkv, 32, dtype=to)
        for t in (cache.k[0], cache.v[0]):
            t += 1e3
        step = cache.reserve(30, starts)
        step.layer(0).append(k, v)
        step.advance()
        *read, view = cache.reserve(Tq).layer(0).append(*new)
        out = BACKENDS[name].attend(q, *read, spec, cache=view)
        for b, n in enumerate(starts):
            row = [torch.cat([old[b : b + 1, :n], t[b : b + 1]], 1) for old, t in zip((k, v), new)]
            args = (q[b : b + 1], *row, q[b : b + 1])
            truth = oracle.attention(*args, window=window)
            plain = oracle.plain(*args, window=window)
            oracle.check(oracle.Result(out[b : b + 1]), plain, truth, to)
