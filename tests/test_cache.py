"""The dynamic and the static cache by themselves: what they keep, and what a kernel makes of it."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Backend, Machine, Spec, oracle, packages, probe, visible
from attention.spec import DTYPES
from attention.views import StaticView
from inference.cache import DynamicCache, PagedCache, StaticCache, StaticStep, bucket

HERE = Machine.here("cpu", packages())


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- dynamic ---


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30), st.one_of(st.none(), st.integers(1, 12))
)
@settings(max_examples=200, deadline=None)
def test_a_dynamic_cache_gives_back_what_later_tokens_can_see(counts, window) -> None:
    """Against all keys kept in one tensor, for chunks of any lengths, in two layers."""
    total = sum(counts)
    k, v = random(2, 2, total, 3, 4), random(2, 2, total, 3, 4, seed=1)  # (layer, B, T, H, D)
    cache, n = DynamicCache(2, max_len=total, window=window), 0
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


def capacities(counts: list[int], **sizes: Any) -> list[int]:
    """The capacity after each step; that the buffers have it, and move only when it changes."""
    cache = DynamicCache(1, **sizes)
    found, places = [], set()
    for T in counts:
        step = cache.reserve(T)
        step.layer(0).append(random(1, T, 1, 2), random(1, T, 1, 2))
        step.advance()
        buffer = cache.k[0]
        assert buffer is not None and buffer.shape[1] == cache.capacity
        assert cache.nbytes == 2 * 4 * 2 * cache.capacity
        found.append(cache.capacity)
        places.add((buffer.data_ptr(), cache.capacity))
    assert len(places) == len(set(found))
    return found


def test_a_dynamic_cache_grows_by_doubling() -> None:
    grown = capacities([5] + [1] * 1000, max_len=4096)
    assert sorted(set(grown)) == [8, 16, 32, 64, 128, 256, 512, 1024]
    for tokens, capacity in enumerate(grown, 5):
        assert tokens <= capacity <= 2 * tokens
    assert max(capacities([5] + [1] * 95, max_len=100)) == 100  # and never beyond what it may need


@pytest.mark.parametrize("prompt", [1, 7, 100])
def test_a_window_cache_keeps_the_window_only(prompt) -> None:
    """At most twice the window, however long the prompt and the text are."""
    grown = capacities([prompt] + [1] * 500, max_len=4096, window=8)
    assert max(grown) <= 16 and len(set(grown)) <= 4


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


def test_the_segments_of_a_window_cache_are_those_of_the_keys_it_gives() -> None:
    cache = DynamicCache(1, max_len=20, window=3, pad=[4, 0])
    for T in (6, 1, 1, 3, 1):
        step = cache.reserve(T)
        k, _, _ = step.layer(0).append(random(2, T, 1, 2), random(2, T, 1, 2))
        assert step.segments is not None and step.segments.shape == k.shape[:2]
        first = cache.stored + T - k.shape[1]
        want = [[int(j >= pad) for j in range(first, cache.stored + T)] for pad in (4, 0)]
        assert step.segments.tolist() == want
        step.advance()


@pytest.mark.parametrize("window", [None, 3])
def test_a_dynamic_cache_ends_where_the_positions_end(window) -> None:
    cache = DynamicCache(1, max_len=6, window=window, pad=[0, 2])
    step = cache.reserve(6)
    step.layer(0).append(random(2, 6, 1, 2), random(2, 6, 1, 2))
    step.advance()
    with pytest.raises(ValueError, match="7 tokens do not fit into a cache of 6"):
        cache.reserve(1)
    # Row 1 has 4 tokens, and may go on; row 0, whose text has ended, stays at the last position.
    assert cache.reserve(2, (0, 2)).positions(2).tolist() == [[5, 5], [4, 5]]
    with pytest.raises(ValueError, match="7 tokens do not fit"):
        cache.reserve(3, (0, 3))
    with pytest.raises(ValueError, match="the cache has reserved 2 tokens, and 3 came"):
        cache.reserve(2, (0, 2)).positions(3)


def test_a_window_cache_grows_by_doubling_past_the_last_position() -> None:
    """As long as a row goes on whose padding leaves it room, though the others passed max_len."""
    cache, grown = DynamicCache(1, max_len=10, window=6, pad=[8, 0]), []
    for T in (9, *[1] * 9):
        step = cache.reserve(T, (T, 0) if cache.stored else None)
        step.layer(0).append(random(2, T, 1, 2), random(2, T, 1, 2))
        step.advance()
        grown.append(cache.capacity)
    assert sorted(set(grown)) == [8, 12]  # never 10 or 11, which would copy all for one more token


# --- static ---


def test_bucket() -> None:
    for n, want in ((1, 128), (127, 128), (128, 128), (129, 256), (256, 256), (257, 512)):
        assert bucket(n, 1024) == want
        assert bucket(n, 200) == min(want, 200)
    assert all(n <= bucket(n, 5000) < max(129, 2 * n) for n in range(1, 5001))


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7), st.integers(0, 2)), max_size=12))
@settings(max_examples=100, deadline=None)
def test_a_static_cache_holds_each_rows_tokens_from_its_start(steps) -> None:
    """Rows take 0 to 7 tokens a step, and 0 to 2 columns more are padding: those leave no trace."""
    cache = StaticCache(2, 2, 100, 1, 2)
    buffers = [t.data_ptr() for t in (*cache.k, *cache.v, cache.start, cache.count)]
    rows: list[list[Tensor]] = [[], []]
    for n, (a, b, more) in enumerate(steps):
        T = max(a, b) + more
        if T == 0:
            continue
        step = cache.reserve(T, (a, b))
        assert step.positions(T).tolist() == [[len(row) + i for i in range(T)] for row in rows]
        k, v = random(2, T, 1, 2, seed=n), random(2, T, 1, 2, seed=n + 1000)
        for layer in (0, 1):
            got_k, got_v, reads = step.layer(layer).append(k + layer, v + layer)
            assert (reads is None) == step.first
            if not step.first:
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


def test_a_static_cache_ends_where_its_places_end() -> None:
    cache = StaticCache(1, 2, 6, 1, 2)
    with pytest.raises(ValueError, match="7 tokens do not fit into a cache of 6"):
        cache.reserve(7)
    step = cache.reserve(6, (6, 3))
    step.layer(0).append(random(2, 6, 1, 2), random(2, 6, 1, 2))
    step.advance()
    before = cache.k[0].clone()
    with pytest.raises(ValueError, match="7 tokens do not fit"):
        cache.reserve(1)
    step = cache.reserve(1, (0, 1))
    assert step.positions(1).tolist() == [[5], [3]]
    step.layer(0).append(random(2, 1, 1, 2, seed=5), random(2, 1, 1, 2))
    assert torch.equal(cache.k[0][0, :6], before[0, :6])  # what ended stays as it is
    assert not torch.equal(cache.k[0][1, 3], before[1, 3])
    with pytest.raises(ValueError, match="the cache has reserved 1 tokens, and 2 came"):
        step.positions(2)


def test_the_first_tokens_see_only_one_another() -> None:
    """So any backend can do a prompt; afterwards only one that reads a static cache."""
    cache = StaticCache(1, 2, 200, 1, 2)
    step = cache.reserve(5, (5, 2))
    k, v = random(2, 5, 1, 2), random(2, 5, 1, 2, seed=1)
    got = step.layer(0).append(k, v)
    assert step.kind == "none" and got[0] is k and got[1] is v
    step.advance()
    assert cache.reserve(1).kind == "static" and cache.reserve(1).length == 128
    assert cache.reserve(123).length == 128 and cache.reserve(124).length == 200


def filled(spec: Spec, starts: list[int], max_len: int, dtype: torch.dtype,
           garbage: float = 0.0) -> tuple[StaticCache, Tensor, Tensor]:  # fmt: skip
    """A static cache whose rows hold so many tokens, with `garbage` everywhere else; k and v."""
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
    """As the model does: store, then read."""
    k, v, reads = step.layer(0).append(k, v)
    return BACKENDS[name].attend(q, k, v, spec, cache=reads)


ASKED = Spec(4, 2, 32, "float32", grad=False, cache="static")
READERS = [name for name, b in BACKENDS.items() if not b.why_not(ASKED, HERE)]


def test_manual_and_sdpa_read_a_static_cache_and_the_others_refuse() -> None:
    assert READERS == ["manual", "sdpa"]
    for name in ("tiled", "sdpa_flash", "sdpa_math"):
        assert BACKENDS[name].why_not(ASKED, HERE) == ["it has no 'static' cache"]


@pytest.mark.parametrize("Tq", [1, 4, 17])
@pytest.mark.parametrize("window", [None, 1, 6, 500])
@pytest.mark.parametrize("name", READERS)
def test_attention_over_a_static_cache_is_each_rows_own(name, window, Tq) -> None:
    """Each row, of another length, against the oracle on its real part."""
    starts = [0, 30, 9]
    for dtype, Hkv in itertools.product(DTYPES, (4, 2, 1)):
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


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("name", READERS)
def test_canary_what_a_row_has_not_stored_moves_nothing(name, window) -> None:
    """Not by a bit: places behind its length, its padding, other rows, and behind the window."""
    starts, counts = [20, 7], (3, 2)
    for dtype in DTYPES:
        spec = Spec(4, 2, 32, dtype, window=window, grad=False, cache="static")
        q, k, v = (random(2, 3, h, 32, seed=h).to(getattr(torch, dtype)) for h in (4, 2, 2))
        clean, _, _ = filled(spec, starts, 140, q.dtype)
        want = attend(name, q, k, v, spec, clean.reserve(3, counts))
        for what in ("behind", "padding", "other row", "before the window"):
            cache, _, _ = filled(spec, starts, 140, q.dtype)
            k2, v2 = k.clone(), v.clone()
            for t, new in ((cache.k[0], k2), (cache.v[0], v2)):
                if what == "behind":
                    t[0, 23:], t[1, 9:] = 300.0, 300.0
                elif what == "padding":
                    new[1, 2] = 300.0
                elif what == "other row":
                    t[0], new[0] = 300.0, 300.0
                elif window:
                    t[0, : 20 - window + 1], t[1, : 7 - window + 1] = 300.0, 300.0
            got = attend(name, q, k2, v2, spec, cache.reserve(3, counts))
            assert got.isfinite().all()
            if what != "other row":
                assert torch.equal(got[0], want[0]), (dtype, what)
            assert torch.equal(got[1, :2], want[1, :2]), (dtype, what)


@pytest.mark.parametrize("window", [None, 3])
def test_what_a_static_view_sees_is_visible(window) -> None:
    cache, _, _ = filled(Spec(1, 1, 2, "float32"), [0, 3, 12], 16, torch.float32)
    new = random(3, 4, 1, 2)
    _, _, view = cache.reserve(4).layer(0).append(new, new)
    seen = replace(view, length=16).seen(4, window)
    assert seen.shape == (3, 1, 4, 16)
    for b, start in enumerate((0, 3, 12)):
        for i, j in itertools.product(range(4), range(16)):
            assert bool(seen[b, 0, i, j]) == visible(start + i, j, 0, window)
    past = replace(view, length=8).seen(4, window)  # row 2 is padding here
    assert past.any(dim=-1).all()  # no query sees nothing at all


# --- paged ---


def test_padding_of_a_paged_step_has_position_0_and_lands_in_the_null_page() -> None:
    """Whose place in the embedding there is, however far the row has come."""
    cache = PagedCache(1, 1, 2, n_pages=9, page_size=4)
    a, b = cache.pool.new(), cache.pool.new()
    before = torch.zeros(4, 1, 2)
    for counts, want in (((3, 1), [[0, 1, 2], [0, 0, 0]]), ((1, 3), [[3, 0, 0], [1, 2, 3]])):
        step = cache.reserve([a, b], counts)
        assert step.positions(3).tolist() == want
        new = random(2, 3, 1, 2)
        k_pages, _, view = step.layer(0).append(new, new)
        stored = cache.pool.length(a)
        step.advance()
        # Padding of row a would stand at place 4, of a page that it has not: nothing moves.
        assert torch.equal(k_pages[cache.pool.pages(a)[0]][:stored], before[:stored])
        before = k_pages[cache.pool.pages(a)[0]].clone()
        used = {*cache.pool.pages(a), *cache.pool.pages(b)}
        assert {int(page) for page in view.page_table.flatten()} <= {0, *used}
        assert not k_pages[[p for p in range(1, 9) if p not in used]].any()
    assert torch.equal(cache.k[0, cache.pool.pages(a)[0], 3], new[0, 0])
    assert torch.equal(cache.k[0, cache.pool.pages(b)[0], 1:], new[1])


# --- the probe ---


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", READERS)
def test_a_cache_is_probed(name, kind) -> None:
    for window, Hkv, segments in ((None, 4, False), (9, 1, False), (None, 2, kind == "dynamic")):
        spec = Spec(4, Hkv, 32, "float32", window=window, segments=segments, grad=False, cache=kind)
        assert probe(BACKENDS[name], spec, "cpu").why == ()


@pytest.mark.parametrize("fault", ["one place off", "the whole buffer", "no window"])
def test_a_kernel_that_reads_a_static_cache_wrongly_is_found(fault) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Any = None,
               cache: StaticView | None = None) -> Tensor:  # fmt: skip
        assert cache is not None
        if fault == "one place off":
            cache = replace(cache, start=cache.start + 1)
        elif fault == "the whole buffer":
            spec, cache = replace(spec, window=None), None
        else:
            spec = replace(spec, window=None)
        return BACKENDS["manual"].attend(q, k, v, spec, cache=cache)

    wrong = Backend("wrong", "wrong", attend, BACKENDS["manual"].caps, fallback=None)
    spec = Spec(4, 4, 32, "float32", window=9, grad=False, cache="static")
    assert any("its numbers are wrong" in w for w in probe(wrong, spec, "cpu").why)
