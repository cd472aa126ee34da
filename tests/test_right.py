"""Attention that is not causal (Spec.right): every backend and flash-attn's functions against the
float64 oracle, at random lengths, windows, heads, segments and dtypes; and attention weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from conftest import few
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attention as nanoattn
from attention import BACKENDS, Caps, Machine, Ring, Spec
from attention.check import matrix
from attention.check.matrix import Case
from attention.proof import Inputs, Result, run

HERE = Machine.here("cpu")
sides = st.one_of(st.none(), st.integers(0, 40))


@pytest.fixture(autouse=True)
def auto() -> Iterator[None]:
    yield
    nanoattn.use("auto")


@st.composite
def cases(draw: Any, longest: int = 70, alibi: Any = (None,)) -> Case:
    Hkv, R = draw(st.sampled_from([(2, 1), (1, 3), (2, 2)]))
    window, right = draw(sides), draw(st.one_of(st.just(0), sides))
    Tq, Tk = draw(st.integers(1, longest)), draw(st.integers(1, longest))
    bias = draw(st.sampled_from(alibi))
    if bias and right != 0:  # refused with more queries than keys
        Tq = min(Tq, Tk)
    return Case(
        "random", Tq, Tk, Hkv * R, Hkv, D=16, B=draw(st.integers(1, 3)),
        window=None if window is None else window + 1, right=right,
        segments=draw(st.sampled_from([None, None, "packed", "many", "left"])),
        softcap=draw(st.sampled_from([None, None, 3.0])), sinks=draw(st.booleans()), alibi=bias,
        scale=draw(st.sampled_from([None, 0.5])) if bias else None,
    )


ALIBI = None, True, "rows"


def allowed(name: str, case: Case, dtype: str) -> Case:
    """The case without what the backend does not declare, which are other tests."""
    why = {w.kind for w in BACKENDS[name].why_not(case.spec(dtype), HERE)}
    changes: dict[str, Any] = {"softcap": None, "sinks": False, "segments": None, "alibi": None}
    return replace(case, **{n: x for n, x in changes.items() if n in why})


@pytest.mark.parametrize(
    "name", few(["tiled", "sdpa_flash", "sdpa", "manual", "sdpa_math", "sdpa_bmm"], 3))
@settings(max_examples=35, deadline=None)
@given(cases(alibi=ALIBI), st.sampled_from(["float32", "bfloat16", "float64"]))
def test_any_mask_by_every_backend(name: str, case: Case, dtype: str) -> None:
    dtype = "bfloat16" if name == "sdpa_bmm" else dtype
    matrix.check(BACKENDS[name], allowed(name, case, dtype), dtype)


@pytest.mark.parametrize("examples", [5, pytest.param(100, marks=pytest.mark.slow)])
def test_any_mask_by_our_triton_kernels(examples: int) -> None:
    if why := BACKENDS["triton"].why_not(Spec(2, 2, 16, "float32", right=None), HERE):
        pytest.skip(why[0])

    @settings(max_examples=examples, deadline=None)
    @given(cases(alibi=ALIBI))
    def check(case: Case) -> None:
        matrix.check(BACKENDS["triton"], case, "float32")

    check()


@pytest.mark.parametrize("name", ["tiled", "sdpa", "sdpa_flash", "triton"])
def test_keys_beyond_the_window_on_both_sides_are_not_read(name: str) -> None:
    """NaN there reaches no output, as it would through a masked product, and no gradient."""
    if why := BACKENDS[name].why_not(Spec(1, 1, 16, "float32", right=9), HERE):
        pytest.skip(why[0])
    T = 320 if name == "triton" else 640
    spec, far = Spec(1, 1, 16, "float32", window=5, right=9), slice(T // 2, T // 2 + 32)
    case = Case("far", T, T, 1, 1, D=16, B=1, window=5, right=9)
    given = Inputs(*(t if t is None else t.clone() for t in matrix.inputs(case, "float32")))
    want = run(BACKENDS[name].attend, given, spec)
    for t in (given.k, given.v):
        t[:, far] = torch.nan
    got = run(BACKENDS[name].attend, given, spec)
    block = 64 if name in ("tiled", "triton") else 256
    # Blocks of rows whose keys end before `far`, and those whose keys begin after its tile.
    before = slice(0, (far.start - 9) // block * block)
    after = slice(-(-(-(-far.stop // 64) * 64 + 4) // block) * block, T)
    assert before.stop > 0 and after.start < T
    for a, b in ((got.out, want.out), (got.dq, want.dq)):
        assert a is not None and b is not None
        for rows in (before, after):
            assert torch.equal(a[:, rows], b[:, rows])


@pytest.mark.parametrize("name", ["tiled", "sdpa", "sdpa_flash", "triton"])
def test_later_segments_are_not_read(name: str) -> None:
    if why := BACKENDS[name].why_not(Spec(1, 1, 16, "float32", segments=True, right=None), HERE):
        pytest.skip(why[0])
    T = 128 if name == "triton" else 640
    spec = Spec(1, 1, 16, "float32", segments=True, right=None, grad=False)
    q, k, v = (torch.randn(1, T, 1, 16) for _ in "qkv")
    seg = (torch.arange(T) >= T // 2).int()[None]
    want = BACKENDS[name].attend(q, k, v, spec, segments=seg)[:, : T // 2]
    for t in (k, v):
        t[:, T // 2 :] = torch.nan
    assert torch.equal(BACKENDS[name].attend(q, k, v, spec, segments=seg)[:, : T // 2], want)


# --- declared, or refused ---


def test_a_kernel_that_does_not_declare_it_is_refused() -> None:
    row = Caps()
    for right in (1, None):
        why = row.why_not(Spec(2, 2, 16, "float32", right=right), HERE)
        assert [w.kind for w in why] == ["right"] and str(right) in why[0]
    assert not row.why_not(Spec(2, 2, 16, "float32"), HERE)
    whole = Caps(right=True, window=False)  # all keys or none, but no number of them
    assert not whole.why_not(Spec(2, 2, 16, "float32", right=None), HERE)
    assert [w.kind for w in whole.why_not(Spec(2, 2, 16, "float32", right=3), HERE)] == ["window"]
    with pytest.raises(ValueError, match="-1"):
        Spec(2, 2, 16, "float32", right=-1)


@pytest.mark.parametrize("right", [1, None])
def test_a_ring_is_causal(right: int | None) -> None:
    q = torch.randn(1, 8, 2, 16)
    with pytest.raises(ValueError, match=str(right)):
        Ring().attend(BACKENDS["tiled"])(q, q, q, Spec(2, 2, 16, "float32", lse=True, right=right))


# --- flash-attn's functions ---


def window_size(case: Case) -> tuple[int, int]:
    left = -1 if case.window is None else case.window - 1
    return left, -1 if case.right is None else case.right


def truth(case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Result:
    """By flash-attn's docstring: the query at position i sees the keys between i + Tk - Tq - left
    and i + Tk - Tq + right."""
    Tq, Tk = q.shape[1], k.shape[1]
    options = {"window": case.window, "right": case.right}
    if not (Tq and Tk):
        return Result(*(torch.zeros_like(t).double() for t in (q, q, k, v)))
    found = oracle.attention(q, k, v, dout, **options)
    left, right = window_size(case)
    seen = torch.zeros(Tq, Tk, dtype=torch.bool)
    for i in range(Tq):
        first = 0 if left < 0 else max(0, i + Tk - Tq - left)
        seen[i, first : Tk if right < 0 else max(0, i + Tk - Tq + right + 1)] = True
    blind = ~seen.any(1)
    assert not found.out[:, blind].any()
    scores = torch.einsum("bihd,bjhd->bhij", q.double(),
                          k.double().repeat_interleave(case.H // case.Hkv, 2)) * case.D**-0.5
    P = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    values = v.double().repeat_interleave(case.H // case.Hkv, 2)
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", P, values), found.out)
    return found


def same(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=2e-4, atol=2e-4)


@settings(max_examples=30, deadline=None)
@given(cases(), st.booleans())
def test_flash_attn_func(case: Case, causal: bool) -> None:
    """Also with the log-sum-exp; causal=True sets the right side to 0."""
    q, k, v, dout = (t.clone() for t in matrix.inputs(case, "float32")[:4])
    want = truth(replace(case, right=0) if causal else case, q, k, v, dout)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"causal": causal, "window_size": window_size(case)}
    out, L, _ = nanoattn.flash_attn_func(*leaves, return_attn_probs=True, **options)
    plain = nanoattn.flash_attn_func(*leaves, **options)
    for found in (out, plain):
        same(found, want.out)
        for grad, exact in zip(torch.autograd.grad(found, leaves, dout),
                               (want.dq, want.dk, want.dv), strict=True):
            assert exact is not None
            same(grad, exact)
    # The weights by L are those of the formula: P v is the output.
    spec = Spec(case.H, case.Hkv, case.D, "float32", window=case.window,
                right=0 if causal else case.right)
    P = nanoattn.weights(q, k, spec, L=L)
    values = v.repeat_interleave(case.H // case.Hkv, 2)
    same(torch.einsum("bhij,bjhd->bihd", P, values), want.out)
    assert torch.equal(L.isneginf(), ~P.sum(-1).bool())
    some = torch.arange(case.Tq) % 3 == 1
    with torch.autocast("cpu", torch.bfloat16):
        same(nanoattn.weights(q, k, spec, rows=some, L=L), P[:, :, some].double())


def test_weights_of_some_rows_in_a_graph_and_in_int8() -> None:
    q, spec = torch.randn(1, 300, 2, 8), Spec(2, 2, 8, "float32")  # 300 is no int8
    want = nanoattn.weights(q, q, spec)[:, :, [1, 99]]
    few = partial(nanoattn.weights, q, q, spec)
    traced = torch.compile(lambda: few(rows=[1, 99]), fullgraph=True, backend="eager")
    for P in (few(rows=torch.tensor([1, 99], dtype=torch.int8)), traced()):
        torch.testing.assert_close(P, want)


def test_weights_of_rows_that_are_none() -> None:
    q, spec = torch.randn(1, 5, 2, 8), Spec(2, 2, 8, "float32", segments=True)
    ids = torch.zeros(1, 5, dtype=torch.int32)
    for rows in ([1.7], [5], [[1]], [True], torch.ones(4, dtype=torch.bool), ["1"]):
        with pytest.raises((ValueError, IndexError)):
            nanoattn.weights(q, q, spec, rows=rows, segments=ids)
    assert nanoattn.weights(q, q[:, :0], spec, segments=ids[:, :0]).shape == (1, 2, 5, 0)
    assert nanoattn.weights(q, q, spec, rows=[], segments=ids).shape == (1, 2, 0, 5)


@settings(max_examples=20, deadline=None)
@given(cases(), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5),
       st.booleans())
def test_texts_of_any_lengths(case: Case, lengths: list[tuple[int, int]], equal: bool) -> None:
    """NaN in one text reaches no other."""
    lengths = [(b, b) if equal else (a, b) for a, b in lengths]
    chance = torch.Generator().manual_seed(len(lengths))
    total_q, total_k = (sum(ns) for ns in zip(*lengths, strict=True))
    q, k, v, dout = (torch.randn(n, h, 16, generator=chance) for n, h in (
        (total_q, case.H), (total_k, case.Hkv), (total_k, case.Hkv), (total_q, case.H)))
    cu = [torch.tensor([0, *ns]).cumsum(0).int() for ns in zip(*lengths, strict=True)]
    leaves = [t.requires_grad_() for t in (q, k, v)]
    options: dict[str, Any] = {"window_size": window_size(case)}
    out = nanoattn.flash_attn_varlen_func(*leaves, *cu, 30, 30, **options)
    grads = torch.autograd.grad(out, leaves, dout)
    for n, (a, b) in enumerate(lengths):
        I, J = (slice(int(c[n]), int(c[n]) + m) for c, m in zip(cu, (a, b), strict=True))
        want = truth(case, *(t.detach()[None] for t in (q[I], k[J], v[J], dout[I])))
        same(out[I], want.out[0])
        for grad, at, exact in zip(grads, (I, J, J), (want.dq, want.dk, want.dv), strict=True):
            assert exact is not None
            same(grad[at], exact[0])
    at = slice(int(cu[1][0]), int(cu[1][1]))
    with torch.no_grad():
        k[at], v[at] = torch.nan, torch.nan
        again = nanoattn.flash_attn_varlen_func(q, k, v, *cu, 30, 30, **options)
    assert torch.equal(again[int(cu[0][1]) :], out[int(cu[0][1]) :])


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cases(longest=24), st.integers(0, 24), st.booleans(), st.sampled_from(["auto", "manual"]))
def test_new_queries_in_a_cache_see_one_another(
    case: Case, past: int, paged: bool, name: str
) -> None:
    """Rows of two lengths, in a cache or in pages that hold NaN where nothing was written."""
    nanoattn.use("auto" if paged else name)
    chance, size, B = torch.Generator().manual_seed(case.Tq), 4, 2
    ends = [past + case.Tq, max(0, past - 3) + case.Tq]
    q, k, v = (torch.randn(B, n, h, 16, generator=chance)
               for n, h in ((case.Tq, case.H), (ends[0], case.Hkv), (ends[0], case.Hkv)))
    n = -(-ends[0] // size)
    table = torch.randperm(B * n, generator=chance).view(B, n).int() if paged else None
    shape = (B * n, size) if paged else (B, n * size)
    caches = [torch.full((*shape, case.Hkv, 16), torch.nan) for _ in "kv"]
    for kept, t in zip(caches, (k, v), strict=True):
        whole = kept[table.long()].flatten(1, 2) if table is not None else kept
        for b in range(B):
            whole[b, : ends[b] - case.Tq] = t[b, : ends[b] - case.Tq]
        if table is not None:
            kept[table.long()] = whole.unflatten(1, (n, size))
    new = [torch.stack([t[b, end - case.Tq : end] for b, end in enumerate(ends)]) for t in (k, v)]
    lengths = torch.tensor([end - case.Tq for end in ends]).int()
    out, _ = nanoattn.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths, block_table=table, window_size=window_size(case),
        return_softmax_lse=True)
    again = nanoattn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=lengths + case.Tq, block_table=table,
        window_size=window_size(case))
    for b, end in enumerate(ends):
        one = q[b : b + 1], k[b : b + 1, :end], v[b : b + 1, :end], q[b : b + 1]
        want = truth(case, *one).out[0]
        same(out[b], want)
        same(again[b], want)


@pytest.mark.parametrize("name, size", [("manual", None), ("sdpa", None), ("paged", 8)])
@settings(max_examples=15, deadline=None)
@given(cases(longest=30), st.lists(st.integers(0, 30), min_size=3, max_size=3),
       st.lists(st.integers(1, 30), min_size=3, max_size=3))
def test_views_of_a_cache(
    name: str, size: int | None, case: Case, start: list[int], count: list[int]
) -> None:
    """Rows with fewer tokens than queries: the real ones see up to the row's end."""
    from attention.masks import filled_cache

    Tq, T = max(count), 60
    spec = Spec(case.H, case.Hkv, 16, "float32", window=case.window, right=case.right, grad=False,
                cache="paged" if size else "static", page_size=size)
    chance = torch.Generator().manual_seed(Tq)
    q, k, v = (torch.randn(3, n, h, 16, generator=chance)
               for n, h in ((Tq, case.H), (T, case.Hkv), (T, case.Hkv)))
    held_k, held_v, view = filled_cache(k, v, spec)
    out = BACKENDS[name].attend(q, held_k, held_v, spec, cache=view(start, count))
    for b, (a, n) in enumerate(zip(start, count, strict=True)):
        one = q[b : b + 1, :n], k[b : b + 1, : a + n], v[b : b + 1, : a + n], q[b : b + 1, :n]
        same(out[b : b + 1, :n], truth(case, *one).out)


# --- attention weights ---


@settings(max_examples=30, deadline=None)
@given(cases(), st.data())
def test_weights_of_some_rows(case: Case, data: Any) -> None:
    """They are the softmax of visible scores, have its gradients, and times v are the output."""
    inputs = matrix.inputs(case, "float64")
    q, k, spec, more = inputs.q, inputs.k, case.spec("float64"), inputs.options
    whole = nanoattn.weights(q, k, spec, **more)
    rows = data.draw(st.lists(st.integers(-case.Tq, case.Tq - 1), min_size=1, max_size=4))
    torch.testing.assert_close(nanoattn.weights(q, k, spec, rows=rows, **more), whole[:, :, rows])
    values = inputs.v.repeat_interleave(case.H // case.Hkv, dim=2)
    out = torch.einsum("bhij,bjhd->bihd", whole, values)
    torch.testing.assert_close(out, matrix.truth(case, "float64").out)
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    P = nanoattn.weights(*leaves, spec, **more)
    got = torch.autograd.grad(torch.einsum("bhij,bjhd->bihd", P, values), leaves, inputs.dout)
    want = matrix.truth(case, "float64")
    for grad, exact in zip(got, (want.dq, want.dk), strict=True):
        torch.testing.assert_close(grad, exact)


def test_weights_refuse_what_contradicts_itself() -> None:
    q, spec = torch.randn(2, 5, 2, 16), Spec(2, 2, 16, "float32")
    for wrong, value in (
        ({"L": torch.zeros(2, 2, 4)}, "L"), ({"segments": torch.zeros(2, 5).int()}, "segments"),
    ):
        with pytest.raises(ValueError, match=value):
            nanoattn.weights(q, q, spec, **wrong)
    with pytest.raises(ValueError, match="k and v"):
        nanoattn.weights(q, q[:, :, :1], spec)
