"""Arguments of attend() and of FlashAttention's functions that contradict one another: ValueError,
and nothing is written. And surroundings that must not change a result: memory written by NumPy, NaN
in another text, autocast, tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attention as nanoattn
from attention import BACKENDS, Caps, Machine, Spec
from attention.masks import PagedView, StaticView

B, SIZE, H, HKV = 3, 4, 4, 2  # SIZE of a page
Call = dict[str, Any]
Break = Callable[[Call], Any]


@pytest.fixture(autouse=True)
def auto() -> Iterator[None]:
    yield
    nanoattn.use("auto")


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


@pytest.mark.parametrize("name, value", [
    ("causal", torch.tensor([True, False])), ("causal", torch.ones((), device="meta")),
    ("causal", np.array([True, False])), ("causal", None),
    ("alibi_slopes", np.ones(H)), ("softmax_scale", torch.ones((), device="meta")),
    ("softmax_scale", 10**400), ("softcap", 1e-46), ("window_size", torch.ones(2, device="meta"))])
def test_an_option_of_another_kind_is_refused(name, value) -> None:
    q = torch.randn(1, 4, H, 16)
    with pytest.raises(ValueError, match=name):
        nanoattn.flash_attn_func(q, q, q, **{name: value})


@pytest.mark.parametrize("kind", ["sparse", "mkldnn", "nested"])
def test_only_dense_tensors_are_taken(kind) -> None:
    q = torch.randn(2, 4, H, 16)
    to = {"sparse": Tensor.to_sparse, "mkldnn": Tensor.to_mkldnn,
          "nested": lambda t: torch.nested.nested_tensor([*t])}[kind]
    spec = Spec(H, H, 16, "float32", grad=False)
    for call in (
        lambda t: nanoattn.flash_attn_func(t, t, t), lambda t: nanoattn.flash_attn_func(q, t, t),
        lambda t: nanoattn.flash_attn_with_kvcache(q, q.clone(), q.clone(), t, t, cache_seqlens=0),
        lambda t: BACKENDS["manual"].attend(t, t, t, spec),
    ):
        with pytest.raises(ValueError, match=kind):
            call(to(q))
    if kind == "sparse":
        more = replace(spec, segments=True)
        with pytest.raises(ValueError, match="segments"):
            BACKENDS["manual"].attend(q, q, q, more, segments=torch.zeros(2, 4).int().to_sparse())


@pytest.mark.parametrize("arguments", [(None,), (5,), ("auto", None)])
def test_only_names_and_policies_are_used(arguments) -> None:
    with pytest.raises(ValueError, match=repr(arguments[-1])):
        nanoattn.use(*arguments)


WANTED = {"window": 3, "right": 2, "segments": True, "scale": 0.3, "softcap": 2.0, "sinks": True,
          "dropout": 0.5, "cache": "static"}


@pytest.mark.parametrize("option", WANTED)
def test_an_option_that_a_kernel_lacks_is_refused_by_its_call(option) -> None:
    here, refused = Machine.here("cpu"), []
    for name, backend in BACKENDS.items():
        dtype = "float32" if name != "sdpa_bmm" else "bfloat16"
        spec = Spec(2, 2, 16, dtype, grad=False, **{option: WANTED[option]})
        if {why.kind for why in backend.why_not(spec, here)} == {option}:
            q = torch.randn(1, 4, 2, 16).to(getattr(torch, dtype))
            given_ = {"segments": ints([0, 0, 1, 1]), "sinks": torch.zeros(2),
                      "cache": StaticView(ints(0), ints(4), 4)}
            more = {option: given_[option]} if option in given_ else {}
            with pytest.raises(ValueError, match=name + " cannot"):
                backend.attend(q, q, q, spec, **more)
            refused.append(name)
    assert refused or option in ("window", "right", "scale")  # which all have on a CPU


def test_options_are_refused_by_rows_of_caps_together() -> None:
    """A row for each dtype, and one option only of two; a device without a row has none of both."""
    rows = (Caps(("cpu",), ("float16",), softcap=True), Caps(("cpu",), ("float32",)),
            Caps(("cpu",), ("float64",), softcap=True, dropout=False),
            Caps(("cpu",), ("float64",), sinks=True))
    backend = replace(BACKENDS["manual"], name="rows", caps=rows)
    for dtype, options, right in (
        ("float16", {"softcap": 2.0}, True), ("float32", {"softcap": 2.0}, False),
        ("float64", {"softcap": 2.0}, True), ("float64", {"softcap": 2.0, "dropout": 0.5}, False),
        ("float64", {"dropout": 0.5}, True),
    ):
        q = torch.randn(1, 4, 2, 16).to(getattr(torch, dtype))
        spec = Spec(2, 2, 16, dtype, grad=False, **options)
        assert right == (not backend.why_not(spec, Machine.here("cpu")))
        for elsewhere in (backend, replace(backend, caps=tuple(
                replace(row, devices=("mps",)) for row in rows if dtype in row.dtypes))):
            if right:
                elsewhere.attend(q, q, q, spec)
                continue
            with pytest.raises(ValueError, match="rows cannot"):
                elsewhere.attend(q, q, q, spec)


def test_a_wrapper_of_a_kernel_is_called() -> None:
    @wraps(BACKENDS["manual"].attend)
    def doubled(*args: Any, **options: Any) -> Tensor:
        return 2 * BACKENDS["manual"].attend(*args, **options)

    q, spec = torch.randn(1, 4, 2, 16), Spec(2, 2, 16, "float32", grad=False)
    backend = replace(BACKENDS["manual"], name="doubled", attend=doubled)
    for made in (backend, replace(backend, name="again")):
        assert torch.equal(made.attend(q, q, q, spec), doubled(q, q, q, spec))


# --- valid calls ---


def tensors(names: str, dtype: torch.dtype, D: int, *shapes: tuple[int, ...]) -> Call:
    draws = (torch.randn(*shape, D).to(dtype) for shape in shapes)
    return dict(zip(names.split(), draws, strict=True))


def dense(*a: Any) -> Call:
    return tensors("q k v", *a, (B, 5, H), (B, 7, HKV), (B, 7, HKV))


def varlen(*a: Any) -> Call:
    ends = {"cu_seqlens_q": ints(0, 2, 4, 9), "cu_seqlens_k": ints(0, 3, 7, 12)}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    return tensors("q k v", *a, (9, H), (12, HKV), (12, HKV)) | ends | longest


def paged_varlen(*a: Any) -> Call:
    pages = tensors("k v", *a, (7, SIZE, HKV), (7, SIZE, HKV))
    return varlen(*a) | pages | {"block_table": ints([0, -1], [5, 2], [1, 4])}


def cached(*a: Any) -> Call:
    caches = tensors("k_cache v_cache", *a, (B + 1, 8, HKV), (B + 1, 8, HKV))
    rows = {"cache_seqlens": ints(0, 6, 3), "cache_batch_idx": ints(2, 3, 0)}
    return tensors("q k v", *a, (B, 2, H), (B, 2, HKV), (B, 2, HKV)) | caches | rows


def paged(*a: Any) -> Call:
    pages = tensors("k_cache v_cache", *a, (7, SIZE, HKV), (7, SIZE, HKV))
    table = {"block_table": ints([6, -1], [5, 2], [1, 4]), "cache_batch_idx": None}
    return cached(*a) | pages | table


def attend(cache: str, *a: Any) -> Call:
    dtype, D = a
    plain = cache == "none"
    call = dense(*a) | {"segments": ints(*[[0] * 7] * B), "sinks": torch.randn(H)} if plain else {}
    view = ints(2, 0, 1), ints(5, 5, 5)
    if cache == "static":
        call = dense(*a) | {"cache": StaticView(*view, 7)}
    elif cache == "paged":
        pages = tensors("k v", *a, (9, SIZE, HKV), (9, SIZE, HKV))
        call = dense(*a) | pages | {"cache": PagedView(ints([1, 2], [3, 4], [5, 6]), *view)}
    options = {"segments": plain, "sinks": plain, "grad": False, "cache": cache}
    size = SIZE if cache == "paged" else None
    spec = Spec(H, HKV, D, str(dtype).removeprefix("torch."), page_size=size, **options)
    return call | {"spec": spec}


def run_attend(spec: Spec, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    name = "paged" if spec.cache == "paged" else "manual"
    return BACKENDS[name].attend(q, k, v, spec, **options)


# --- one thing of a valid call changes ---


def change(names: str, *ways: Callable[[Any], Any]) -> list[Break]:
    return [
        lambda call, n=n, way=way: call.update({n: way(call.get(n))})
        for n in names.split()
        for way in ways
    ]


def put(name: str, *places: tuple[int, ...]) -> list[Break]:
    """The last number at the others."""

    def written(t: Tensor, place: tuple[int, ...]) -> Tensor:
        (t := t.clone())[place[:-1]] = place[-1]
        return t

    return change(name, *(lambda t, place=place: written(t, place) for place in places))


def become(name: str, *values: Any) -> list[Break]:
    return change(name, *(lambda _, x=x: x for x in values))


SHAPES: list[Callable[[Tensor], Any]] = [
    lambda t: t[:-1], lambda t: t[None], lambda t: t[..., 0], lambda t: t.half(),
    lambda t: t.to("meta"), lambda t: t.tolist(),
]
SPARSE = lambda t: t.to_sparse()  # noqa: E731
HEADS = [lambda t: t[..., :-1], lambda t: t[..., :1, :], lambda t: t[..., :0, :]]
ONE_HEAD = change("v", HEADS[1])  # k may have one head: v then not
FLOATS = [-1.0, torch.nan, torch.inf, "1", True]
OPTIONS = [*become("window_size", 3, (1,), (1, 0, 0), (1.5, 0), "ab", None, (True, 0)),
           *become("softmax_scale", 0.0, 10**400, *FLOATS), *become("softcap", 10**400, *FLOATS),
           *become("causal", (3, 0), "False", 2)]


def beside(t: Tensor) -> list[Tensor]:
    """t twice in one tensor, a head apart."""
    memory, D = t.new_zeros(t.numel() + t.shape[-1]), t.shape[-1]
    return [memory[at : at + t.numel()].view_as(t) for at in (0, D)]


SHARED: list[Break] = [  # caches whose rows, or which, are one memory
    *change("k_cache v_cache", lambda t: t[:1].expand_as(t)),
    lambda call: call.update(k_cache=call["v_cache"]),
    lambda call: call.update(zip(("k_cache", "v_cache"), beside(call["k_cache"]))),
    *change("k_cache v_cache", torch.inference_mode()(torch.clone)),
]
DROPOUT = [*become("dropout_p", 1.0, *FLOATS),
           *become("softmax_scale", torch.tensor(0.3, requires_grad=True))]
BOTH: list[Break] = [
    lambda call: call.update(k=call["k"][:1], v=call["v"][:1]),
    lambda call: call.update({n: torch.cat((call[n], call[n][..., :1, :]), -2) for n in "kv"}),
]
ONES = ints(1, 1, 1)
LENGTHS = become("cache_seqlens", -1, 7, 2.0, True, None, *map(torch.tensor, (
    [-1, 0, 0], [0, 7, 0], [0, 0], [[0, 0, 0]], [1.0, 2.0, 3.0], [True] * 3)))
CALLS: list[tuple[Any, Callable[..., Call], list[Break]]] = [
    (nanoattn.flash_attn_func, dense, [
        *change("q k v", *SHAPES, SPARSE, HEADS[0], HEADS[2]), *ONE_HEAD, *OPTIONS, *DROPOUT,
        *BOTH]),
    (nanoattn.flash_attn_varlen_func, varlen, [
        *change("q k v", *SHAPES, HEADS[0], HEADS[2]), *ONE_HEAD, *OPTIONS, *DROPOUT, *BOTH,
        *change("cu_seqlens_q cu_seqlens_k", *SHAPES, lambda t: t[:0], lambda t: t[[0, 3]],
                lambda t: t.long(), lambda t: t + 1, lambda t: t.flip(0)),
        *put("cu_seqlens_k", (1, 8), (1, -1), (0, 1), (3, 11), (3, 13))]),
    (nanoattn.flash_attn_varlen_func, paged_varlen, [
        *change("q k v", *SHAPES[1:], HEADS[0]), *change("block_table", *SHAPES),
        *put("block_table", (0, 0, -1), (1, 0, 7), (2, 1, -1)), *put("cu_seqlens_k", (3, 16))]),
    (nanoattn.flash_attn_with_kvcache, cached, [
        *change("q k_cache v_cache k v", *SHAPES, HEADS[0], HEADS[2]), *change("k v", HEADS[1]),
        *change("cache_batch_idx", *SHAPES), *put("cache_batch_idx", (0, -1), (0, 4), (0, 3)),
        *change("cache_seqlens", *SHAPES), *become("k", None), *LENGTHS, *OPTIONS, *BOTH, *SHARED]),
    (nanoattn.flash_attn_with_kvcache, paged, [
        *change("block_table", *SHAPES), *LENGTHS, *become("cache_batch_idx", ints(0, 1, 2)),
        *SHARED,
        *put("block_table", *((*at, x) for at in ((0, 0), (1, 1), (2, 1)) for x in (-1, 7, 5)))]),
    *((run_attend, lambda *a, kind=kind: attend(kind, *a), [
        *change("q", *SHAPES[:5], *HEADS), *change("k v", *SHAPES[1:5], *HEADS),
        *become("cache", *([object()] if kind == "none" else [None, object()])), *more])
      for kind, more in (
        ("none", [*change("segments", *SHAPES), *change("sinks", *SHAPES[:3], *SHAPES[4:]),
                  *become("segments", None, torch.zeros(B, 7)),
                  *become("sinks", None, ints(*[1] * H)), *change("k v", SHAPES[0]), *BOTH]),
        ("static", [*become("cache", StaticView(ints(1), ints(1), 7), StaticView(ONES, ONES, 6)),
                    *change("k v", SHAPES[0]), *BOTH]),
        ("paged", [*become("cache", PagedView(ints([1, 2]), ONES, ONES)),
                   *become("segments", ints(*[[0] * 7] * B))]))),
]


@given(st.sampled_from([torch.float32, torch.float64]), st.sampled_from([8, 16]), st.booleans())
@settings(max_examples=3, deadline=None)
def test_every_contradiction_is_refused_before_anything_is_written(dtype, D, lse) -> None:
    for number, (function, make, breaks) in enumerate(CALLS):
        options = {} if function is run_attend else {"causal": True, "return_softmax_lse": lse}
        function(**{**options, **make(dtype, D)})
        for i, change_one in enumerate(breaks):
            call = {**options, **make(dtype, D)}
            change_one(call)
            before = {n: t.clone() for n, t in call.items() if isinstance(t, Tensor)}
            with pytest.raises(ValueError):
                function(**call)
                pytest.fail(f"call {number}, change {i} is accepted")
            for n, t in before.items():
                same = t.is_meta or t.is_sparse or torch.equal(call[n].nan_to_num(), t.nan_to_num())
                assert same, (number, i, n)


def test_a_compiled_call_refuses_the_same() -> None:
    for function, make, breaks in (CALLS[0], CALLS[5]):
        for i, change_one in enumerate(breaks):
            change_one(call := make(torch.float32, 8))
            if i % 9 or any(x == 10**400 for x in call.values() if isinstance(x, int)):
                continue  # some of them: each is traced
            torch._dynamo.reset()
            with pytest.raises(ValueError):
                torch.compile(partial(function, **call), backend="eager")()
                pytest.fail(f"change {i} is accepted")


@given(
    st.sampled_from(CALLS), st.integers(7, 2**70), st.integers(7, 2**70), st.sampled_from(CALLS[:5])
)
@settings(max_examples=30, deadline=None)
def test_a_window_past_every_key_is_none(attending, left, right, flash) -> None:
    """Whatever integers hold positions: int32 in a cache."""
    function, make, _ = flash
    call = make(torch.float32, 8) | {"causal": False}
    torch.testing.assert_close(
        function(**call, window_size=(left, right)), function(**call, window_size=(-1, -1)))
    _, make, _ = attending
    call = make(torch.float32, 8)
    if spec := call.pop("spec", None):
        wide, all_ = (replace(spec, window=w, right=r) for w, r in ((left, right), (None, None)))
        torch.testing.assert_close(run_attend(wide, **call), run_attend(all_, **call))


@pytest.mark.parametrize("ids", [[0, 1, 1, 0, 2, 2, 2], [-1, 5, 5, 5, 5, -1, -1]])
def test_an_id_that_comes_again_after_others_is_refused(ids) -> None:
    """Kernels go by runs or by ids: each would compute something else."""
    call = attend("none", torch.float32, 8)
    for row in range(B):
        segments = call["segments"].clone()
        segments[row] = ints(*ids)
        with pytest.raises(ValueError, match="segments"):
            run_attend(**{**call, "segments": segments})


def test_tokens_that_lie_in_the_cache_are_read_before_it_is_written() -> None:
    kv = torch.randn(2, 1, 8, 2, 8)
    outs = []
    for apart in (True, False):
        k_cache, v_cache = kv.clone()
        q_k_v = k_cache[:, 1:4], k_cache[:, 4:7], v_cache[:, 2:5]
        q, *new = (t.clone() for t in q_k_v) if apart else q_k_v
        outs.append(nanoattn.flash_attn_with_kvcache(
            q, k_cache, v_cache, *new, cache_seqlens=1, causal=True))
    assert torch.equal(*outs)


LAYOUTS = st.tuples(st.permutations(range(4)), st.tuples(*[st.integers(0, 2)] * 4))


@settings(max_examples=200, deadline=None)
@given(LAYOUTS, LAYOUTS, st.booleans(), st.integers(0, 400))
def test_caches_that_share_memory_are_refused_and_others_written(a, b, alike, offset) -> None:
    """Views of one tensor: dimensions in any order, with gaps, or one within another."""
    memory, sizes, views = torch.zeros(20_000), (2, 4, 2, 8), []
    for (order, gaps), at in ((a, 0), (a if alike else b, offset)):
        strides, step = [0] * 4, 1
        for d in order:
            strides[d] = step  # gaps of 2: the last element is the next one's first
            step *= sizes[d] - (gaps[d] == 2)
            step += gaps[d] % 2
        views.append(memory.as_strided(sizes, strides, at))
    places = [set(torch.arange(20_000).as_strided(sizes, t.stride(), t.storage_offset())
                  .flatten().tolist()) for t in views]
    shared = len(places[0] | places[1]) < 2 * 128
    new = torch.randn(2, 2, 1, 2, 8)
    try:
        nanoattn.flash_attn_with_kvcache(new[0], *views, *new, cache_seqlens=1)
    except ValueError:  # also within one another in different orders
        assert not memory.any() and (shared or (not alike and max(places[0]) > min(places[1])))
        return
    assert not shared and all(map(torch.equal, (t[:, 1:2] for t in views), new))


def test_caches_may_alternate_in_one_tensor() -> None:
    pair = torch.zeros(2, 8, 2, 2, 8)  # (B, tokens, k or v, heads, head_dim)
    new = torch.randn(2, 3, 2, 2, 8)
    nanoattn.flash_attn_with_kvcache(torch.randn(2, 3, 2, 8), *pair.unbind(2), *new.unbind(2),
                                     cache_seqlens=4)
    assert torch.equal(pair[:, 4:7], new) and not pair[:, 7:].any()


# --- surroundings that change nothing ---

NAMES = ["manual", "tiled", "sdpa", "sdpa_flash", "sdpa_math",
         pytest.param("triton", marks=pytest.mark.slow)]  # in the interpreter


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lse", [False, True])
def test_nan_in_one_text_reaches_no_other(name, lse) -> None:
    """Neither from q, k, v nor from the output's gradient, forward and backward."""
    nanoattn.use(name)
    lengths = [40, 1, 37, 0, 5]
    ends = ints(0, *lengths).cumsum(0).int()
    clean, got = [torch.randn(sum(lengths), 2, 8) for _ in range(4)], []
    for value in (1.0, torch.nan):
        *leaves, dout = (t.clone().index_fill(0, torch.arange(41, 78), value) for t in clean)
        leaves = [t.requires_grad_() for t in leaves]
        out = nanoattn.flash_attn_varlen_func(
            *leaves, ends, ends, 40, 40, causal=True, return_softmax_lse=lse)
        out, L = out if lse else (out, torch.zeros(2, 83))
        got.append([out, L.T, *torch.autograd.grad(out, leaves, dout)])
    for a, b in zip(*got, strict=True):
        assert torch.equal(a[:41], b[:41]) and torch.equal(a[78:], b[78:])


def test_nan_in_one_row_of_a_cache_reaches_no_other() -> None:
    for make in (cached, paged):
        call = make(torch.float32, 8)
        calls = [call, {n: t.clone() if isinstance(t, Tensor) else t for n, t in call.items()}]
        for name in "qkv":
            calls[1][name][1] = torch.nan
        clean, dirty = (nanoattn.flash_attn_with_kvcache(**c, causal=True) for c in calls)
        assert torch.equal(clean[::2], dirty[::2]) and dirty[1].isnan().any()
    q = torch.full((1, 2, 2, 8), torch.nan)
    assert not nanoattn.flash_attn_func(q, q[:, :0], q[:, :0], causal=True).any()


def test_lengths_and_segments_that_numpy_writes_are_read_again() -> None:
    q = torch.randn(600, 2, 8)
    for function in ("lengths", "segments"):
        host = np.array([0, 20, 600] if function == "lengths" else [0] * 20 + [1] * 580, np.int32)
        t = torch.from_numpy(host)

        def run(t: Tensor, function: str = function) -> Tensor:
            if function == "lengths":
                return nanoattn.flash_attn_varlen_func(q, q, q, t, t, 600, 600, causal=True)
            spec = Spec(2, 2, 8, "float32", segments=True)
            return BACKENDS["sdpa"].attend(q[None], q[None], q[None], spec, segments=t[None])

        before = run(t)
        host[1 if function == "lengths" else 19] = 400 if function == "lengths" else 1
        again = run(t)
        assert torch.equal(again, run(t.clone())) and not torch.equal(again, before)


@pytest.mark.parametrize("name", NAMES[:5])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_changes_no_dtype(name, compiled) -> None:
    q = torch.randn(2, 9, 2, 8)
    torch._dynamo.reset()
    for window in (None, 3):
        spec = Spec(2, 2, 8, "float32", window, compiled=compiled)
        want = BACKENDS[name].attend(q, q, q, spec)

        def run(q: Tensor, spec: Spec = spec) -> Tensor:
            return BACKENDS[name].attend(q, q, q, spec)

        whole = compiled and BACKENDS[name].fullgraph and name != "tiled"
        run = torch.compile(run, fullgraph=whole, backend="eager") if compiled else run
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(run(q), want)


@pytest.mark.parametrize("fake", [False, True])
def test_tensors_without_values_give_shapes(fake) -> None:
    for function, make, _ in CALLS[:5]:
        mode = FakeTensorMode()
        for dtype in (torch.float16, torch.float64):
            call = make(dtype, 8)
            for name, t in call.items():
                if isinstance(t, Tensor):
                    call[name] = mode.from_tensor(t) if fake else t.to("meta")
            out, L = function(**call, causal=True, return_softmax_lse=True)
            plain = function(**call, causal=True)
            assert out.shape == plain.shape == call["q"].shape and out.dtype == plain.dtype == dtype
            *batch, T, H, _ = out.shape
            assert L.shape == (*batch, H, T) and out.device == L.device == call["q"].device
