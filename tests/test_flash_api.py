"""FlashAttention's functions against the float64 oracle: numbers, effects on caches, refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from conftest import every, few
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import as_file, wrong_beyond
from torch import Tensor
from torch._subclasses import FakeTensorMode

import attention as nanoattn
from attention import BACKENDS
from attention.check import matrix
from attention.check.matrix import CASES
from attention.masks import PagedView

SIZE = 8  # of a page


@pytest.fixture(autouse=True, params=["auto", "manual"])
def backend(request, remembered_probes) -> Iterator[str]:
    nanoattn.use(request.param)
    yield request.param
    nanoattn.use("auto")


def truth(q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None, **options: Any) -> Any:
    """The oracle on (T, H, D) or (B, T, H, D)."""
    one = q.dim() == 3
    dout = torch.zeros_like(q) if dout is None else dout
    given = [t[None] if one else t for t in (q, k, v, dout)]
    got = oracle.attention(*(t.detach() for t in given), **options)
    return got.out[0] if one else got.out


def same(got: Tensor, want: Tensor, largest: float = 0.0) -> None:
    """Equal up to rounding; `largest` true value of all gradients, as in probing.allowed_error:
    with a window of 1 those of q and k are 0, and what is left is the rounding of those of v."""
    atol = max(2e-6, 32 * torch.finfo(torch.float32).eps * largest)
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=2e-5)


def side(window: int | None, right: int | None = 0) -> tuple[int, int]:
    left = -1 if window is None else window - 1
    return left, -1 if right is None else right


PLAIN = [c for c in CASES if not (c.segments or c.sinks or getattr(c, "alibi", False))]
LONG = [c for c in PLAIN if max(c.Tq, c.Tk) >= 300]
SHORT = [c for c in PLAIN if c not in LONG]


@pytest.mark.parametrize("case", [*every(3, SHORT), *few(LONG, 0)], ids=lambda c: c.name)
def test_flash_attn_func_and_its_gradients(case, backend) -> None:
    *qkv, dout = (t.detach() for t in matrix.inputs(case, "float32")[:4])
    leaves = [t.requires_grad_() for t in qkv]
    out = nanoattn.flash_attn_func(*leaves, 0.0, case.scale, case.right == 0,
                                   side(case.window, case.right), case.softcap or 0.0)
    got = oracle.Result(out.detach(), *torch.autograd.grad(out, leaves, dout))
    matrix.compare(got, case, "float32", "cpu")


def cache(B: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """Caches that hold NaN where nothing was written."""
    n = -(-S // SIZE)
    k, v = (torch.full((B * n, SIZE, 2, 16), torch.nan) for _ in range(2))
    return k, v, torch.randperm(B * n).view(B, n).int()


@pytest.mark.parametrize("window, right", few([(50, 30), (None, 0), (50, 0), (None, None)]))
def test_a_long_prompt_in_pages(window, right) -> None:
    """Longer than the queries that `paged` takes at a time, into rows of different lengths."""
    nanoattn.use("paged")
    q, k, v = (torch.randn(2, 400, h, 16) for h in (4, 2, 2))
    k_cache, v_cache, table = cache(2, 400)
    rows = torch.arange(2)[:, None], torch.arange(40)[None]
    at = table[rows[0], rows[1] // SIZE].long(), rows[1] % SIZE
    for pages, t in ((k_cache, k), (v_cache, v)):
        pages[at] = t[:, :40]
    before = [0, 40]
    new = [torch.stack([t[b, n : n + 320] for b, n in enumerate(before)]) for t in (q, k, v)]
    out = nanoattn.flash_attn_with_kvcache(
        new[0], k_cache, v_cache, *new[1:], cache_seqlens=torch.tensor(before).int(),
        block_table=table, causal=right == 0, window_size=side(window, right))
    for b, n in enumerate(before):
        want = truth(q[b, n : n + 320], k[b, : n + 320], v[b, : n + 320], window=window,
                     right=right)
        same(out[b], want)


@pytest.mark.parametrize("integer", (torch.tensor, np.int64))
def test_a_window_may_be_any_integer(integer: Any) -> None:
    """As in flash-attention's own tests, which draw it with torch.randint."""
    q = torch.randn(1, 9, 2, 16)
    out = nanoattn.flash_attn_func(q, q, q, window_size=(integer(3), integer(2)))
    assert torch.equal(out, nanoattn.flash_attn_func(q, q, q, window_size=(3, 2)))
    for wrong in ((3.5, 2), (3,), (3, 2, 1), 3):
        with pytest.raises(TypeError, match="window_size"):
            nanoattn.flash_attn_func(q, q, q, window_size=wrong)


X = torch.randn(2, 6, 2, 16)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(TypeError, match="a_typo"):
        nanoattn.flash_attn_func(X, X, X, causal=True, a_typo=None)
    with pytest.raises(TypeError, match="max_seqlen"):
        nanoattn.flash_attn_varlen_qkvpacked_func(X, ints(0, 2))
    with pytest.raises(ValueError, match="k and v"):
        nanoattn.flash_attn_with_kvcache(X, X, X, X[:, :1], cache_seqlens=3, causal=True)
    with pytest.raises(ValueError, match="nonsense"):
        nanoattn.use("nonsense")


def test_hints_change_nothing() -> None:
    want = nanoattn.flash_attn_func(X, X, X)
    assert torch.equal(nanoattn.flash_attn_func(X, X, X, num_splits=4, pack_gqa=True), want)


def test_a_longer_call_is_probed_at_its_length(tmp_path) -> None:
    """A kernel that is wrong beyond 700 keys is refused at the first long call."""
    nanoattn.use(as_file(tmp_path, wrong_beyond(700).compute))
    for T in (200, 1200):
        q, k, v = (torch.randn(1, T, h, 16) for h in (2, 1, 1))
        out = nanoattn.flash_attn_func(q, k, v, causal=True)
        want = BACKENDS["manual"].attend(q, k, v, nanoattn.Spec(2, 1, 16, "float32"))
        torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-4)


# --- contradictions, and numbers that change ---

Call = dict[str, Any]


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def tensors(names: str, *shapes: tuple[int, ...]) -> Call:
    return {name: torch.randn(*shape, 16) for name, shape in zip(names.split(), shapes)}


def dense_call() -> Call:
    return tensors("q k v", (3, 5, 4), (3, 7, 2), (3, 7, 2))


def varlen_call() -> Call:
    ends = {"cu_seqlens_q": ints(0, 2, 4, 9), "cu_seqlens_k": ints(0, 3, 7, 12)}
    longest = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    return tensors("q k v", (9, 4), (12, 2), (12, 2)) | ends | longest


def paged_varlen_call() -> Call:
    pages = tensors("k v", (7, 4, 2), (7, 4, 2))
    return varlen_call() | pages | {"block_table": ints([0, -1], [5, 2], [1, 4])}


def cached_call() -> Call:
    rows = {"cache_seqlens": ints(0, 6, 3), "cache_batch_idx": ints(2, 3, 0)}
    return rows | tensors("q k_cache v_cache k v", (3, 2, 4), (4, 8, 2), (4, 8, 2), (3, 2, 2),
                          (3, 2, 2))


def paged_call() -> Call:
    pages = tensors("k_cache v_cache", (7, 4, 2), (7, 4, 2))
    table = {"block_table": ints([6, -1], [5, 2], [1, 4]), "cache_batch_idx": None}
    return cached_call() | pages | table


def attend(name: str, spec: nanoattn.Spec, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return BACKENDS[name].attend(q, k, v, spec, **more)


def attend_call() -> Call:
    spec = nanoattn.Spec(4, 2, 16, "float32", segments=True, sinks=True, grad=False)
    more = {"segments": ints(*[[0] * 7] * 3), "sinks": torch.randn(4), "spec": spec}
    return dense_call() | more | {"name": "manual"}


def paged_attend_call() -> Call:
    spec = nanoattn.Spec(4, 2, 16, "float32", grad=False, cache="paged", page_size=4)
    view = PagedView(ints([1, 2], [3, 4], [5, 6]), ints(2, 0, 1), ints(5, 5, 5))
    pages = tensors("k v", (9, 4, 2), (9, 4, 2))
    return dense_call() | pages | {"cache": view, "spec": spec, "name": "paged"}


# What of a call may be changed, and to what: a shape, a dtype, a device, heads, a number.
SHAPES = (lambda t: t[:-1], lambda t: t[None], lambda t: t.to("meta"), lambda t: t.double())
THREE = lambda t: t.repeat_interleave(2, -2)[..., :3, :]  # noqa: E731
HEADS = (lambda t: t[..., :-1], lambda t: t[..., :0, :], THREE)
FEWER = (lambda t: t[:-1], lambda t: t[None], lambda t: t.to("meta"), lambda t: t.float())


def written(*places: tuple[int, ...]) -> tuple[Any, ...]:
    """The last number at the place of the others."""

    def write(t: Tensor, place: tuple[int, ...]) -> Tensor:
        t = t.clone()
        t[place[:-1]] = place[-1]
        return t

    return tuple(partial(write, place=place) for place in places)


IDS = [ints(*[[0, 1, 1, 0, 2, 2, 2]] * 3), torch.zeros(3, 7)]
CALLS: list[tuple[Any, Callable[[], Call], dict[str, tuple[Any, ...]]]] = [
    (nanoattn.flash_attn_func, dense_call, dict.fromkeys("qkv", SHAPES + HEADS)),
    (nanoattn.flash_attn_varlen_func, varlen_call, {
        **dict.fromkeys("qkv", SHAPES + HEADS),
        "cu_seqlens_q": (*FEWER, lambda t: t + 1, lambda t: t.flip(0)),
        "cu_seqlens_k": (*FEWER, *written((1, 8), (1, -1), (0, 1), (3, 11), (3, 13)))}),
    (nanoattn.flash_attn_varlen_func, paged_varlen_call, {
        "k": (*SHAPES[1:], *HEADS), "cu_seqlens_k": written((3, 16)),
        "block_table": (*FEWER, *written((0, 0, -1), (1, 0, 7), (2, 1, -1)))}),
    (nanoattn.flash_attn_with_kvcache, cached_call, {
        **dict.fromkeys(("q", "k_cache", "v_cache", "k", "v"), SHAPES[1:] + HEADS),
        "cache_batch_idx": (*FEWER, *written((0, -1), (0, 4), (0, 3))),
        "cache_seqlens": (*FEWER, *written((0, -1), (1, 7)), lambda t: 7), "k": (lambda t: None,)}),
    (nanoattn.flash_attn_with_kvcache, paged_call, {
        "cache_batch_idx": (lambda t: ints(0, 1, 2),), "cache_seqlens": (lambda t: None,),
        "block_table": (*FEWER, *written((0, 0, -1), (1, 1, 7), (2, 1, -1)))}),
    (attend, attend_call, {
        **dict.fromkeys("qkv", SHAPES + HEADS), "sinks": (*SHAPES[:3], lambda t: None),
        "segments": (*FEWER, lambda t: None, *(lambda t, ids=ids: ids for ids in IDS))}),
    (attend, paged_attend_call, {
        "q": SHAPES[:3], "k": SHAPES[1:], "segments": (lambda t: IDS[0],),
        "cache": (lambda t: None, lambda t: PagedView(t.page_table[:1], t.start, t.count))}),
]


def test_contradictions_raise_value_errors_before_anything_is_written(backend) -> None:
    """Of batch, heads, dtypes, devices, segments, sinks, lengths and pages: one a call."""
    for function, make, changes in CALLS:
        if backend == "manual" and "block_table" in make():
            continue  # it reads no pages
        function(**make())
        for name, change in ((n, change) for n, many in changes.items() for change in many):
            call = make()
            call[name] = change(call.get(name))
            before = {n: t.clone() for n, t in call.items() if isinstance(t, Tensor)}
            with pytest.raises(ValueError):
                function(**call)
                pytest.fail(f"{function.__name__} accepts {name}={call[name]}")
            for n, t in before.items():
                assert t.is_meta or torch.equal(call[n], t), (name, n)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash"])
def test_nan_in_one_text_reaches_no_other(name, lse) -> None:
    """Neither from q, k, v nor from the output's gradient, forward and backward."""
    nanoattn.use(name)
    lengths = [40, 1, 37, 0, 5, 40]
    ends = ints(0, *lengths).cumsum(0).int()
    clean, got = [torch.randn(sum(lengths), 2, 8) for _ in range(4)], []
    for value in (1.0, torch.nan):
        *leaves, dout = (t.clone().index_fill(0, torch.arange(41, 78), value) for t in clean)
        leaves = [t.requires_grad_() for t in leaves]
        out = nanoattn.flash_attn_varlen_func(
            *leaves, ends, ends, 40, 40, causal=True, return_softmax_lse=lse)
        out, L = out if lse else (out, torch.zeros(2, sum(lengths)))
        got.append([out, L.T, *torch.autograd.grad(out, leaves, dout)])
    for a, b in zip(*got, strict=True):
        assert torch.equal(a[:41], b[:41]) and torch.equal(a[78:], b[78:])


def test_nan_in_one_row_of_a_cache_reaches_no_other() -> None:
    nanoattn.use("auto")
    for make in (cached_call, paged_call):
        clean = make()
        dirty = {n: t.clone() if isinstance(t, Tensor) else t for n, t in clean.items()}
        for name in "qkv":
            dirty[name][1] = torch.nan
        a, b = (nanoattn.flash_attn_with_kvcache(**call, causal=True) for call in (clean, dirty))
        assert torch.equal(a[::2], b[::2]) and b[1].isnan().any()


def test_lengths_and_segments_that_numpy_writes_are_read_again() -> None:
    q, spec = torch.randn(600, 2, 8), nanoattn.Spec(2, 2, 8, "float32", segments=True)
    runs = {
        "lengths": lambda t: nanoattn.flash_attn_varlen_func(q, q, q, t, t, 600, 600, causal=True),
        "segments": lambda t: attend("sdpa", spec, q[None], q[None], q[None], segments=t[None])}
    for (run, host, place, value) in (
        (runs["lengths"], np.array([0, 20, 600], np.int32), 1, 400),
        (runs["segments"], np.array([0] * 20 + [1] * 580, np.int32), 19, 1)):
        t = torch.from_numpy(host)
        before = run(t)
        host[place] = value
        again = run(t)
        assert torch.equal(again, run(t.clone())) and not torch.equal(again, before)


@pytest.mark.parametrize("fake", [False, True])
def test_tensors_without_values_give_shapes(fake) -> None:
    mode = FakeTensorMode()
    for function, make, _ in CALLS[:5]:
        call = {n: t if not isinstance(t, Tensor) else mode.from_tensor(t) if fake else t.to("meta")
                for n, t in make().items()}
        out, L = function(**call, causal=True, return_softmax_lse=True)
        plain = function(**call, causal=True)
        assert out.shape == plain.shape == call["q"].shape and out.dtype == plain.dtype
        *batch, T, H, _ = out.shape
        assert L.shape == (*batch, H, T) and out.device == L.device == call["q"].device


NUMBERS = st.tuples(
    st.integers(1, 40), st.integers(1, 40), st.none() | st.floats(0.01, 3.0), st.booleans(),
    st.integers(-1, 50), st.integers(-1, 50), st.just(0.0) | st.floats(0.5, 50.0),
    st.just(0.0) | st.integers(1, 900).map(lambda n: n / 1001))


def test_calls_of_one_kind_share_a_plan_and_each_has_its_own_numbers(backend) -> None:
    """Scales, windows, softcaps, dropouts and lengths that change: few plans, and the truth."""
    nanoattn.use(backend)

    @given(NUMBERS)
    @settings(max_examples=1000 if backend == "auto" else 100, deadline=None)
    def check(numbers: Any) -> None:
        Tq, Tk, scale, causal, left, right, softcap, dropout = numbers
        q, k, v = (torch.randn(1, n, h, 8) for n, h in ((Tq, 4), (Tk, 2), (Tk, 2)))
        q.requires_grad_(backend == "auto")
        out = nanoattn.flash_attn_func(q, k, v, dropout, scale, causal, (left, right), softcap)
        if not dropout:
            sides = {"window": None if left < 0 else left + 1,
                     "right": 0 if causal else None if right < 0 else right}
            want = truth(q, k, v, scale=scale, softcap=softcap or None, **sides)
            torch.testing.assert_close(out.detach().double(), want, atol=1e-5, rtol=1e-4)

    check()
    plans = sys.modules["attention.compat.calls"]._plans[False].known
    assert len(plans) <= 64, [*plans]


# --- programs that import flash_attn ---


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), left=st.booleans(),
    dtype=st.sampled_from([torch.bool, torch.int32, torch.int64]), unused=st.booleans(),
)
def test_padding_is_removed_and_put_back(lengths, left, dtype, unused) -> None:
    """Also with its gradient; places that are kept but unused are counted apart."""
    B, T = len(lengths), 10
    j = torch.arange(T).flip(0) if left else torch.arange(T)
    mask = (j < torch.tensor(lengths)[:, None]).to(dtype)
    spare = (j == 9).expand(B, T).to(dtype) if unused else None
    kept = mask.bool() | (spare is not None and spare.bool())
    x = torch.randn(B, T, 2, 3, dtype=torch.float64, requires_grad=True)
    rows, indices, cu_seqlens, longest, used = nanoattn.bert_padding.unpad_input(x, mask, spare)
    assert torch.equal(rows, x[kept]) and torch.equal(rows, x.flatten(0, 1)[indices])
    totals = [n + unused for n in lengths]
    assert cu_seqlens.tolist() == [sum(totals[:b]) for b in range(B + 1)]
    assert (longest, used.tolist()) == (max(totals), lengths)
    back = nanoattn.bert_padding.pad_input(rows, indices, B, T)
    want = torch.where(kept[..., None, None], x.detach(), 0)
    assert torch.equal(back, want)
    dout = torch.randn_like(x)
    (dx,) = torch.autograd.grad(back, x, dout)
    assert torch.equal(dx, torch.where(kept[..., None, None], dout, 0))


@pytest.mark.parametrize("mask, spare, name", [
    ([[1, 1, 1, 1]] * 2, None, r"attention_mask must be \(2, 5\)"),
    ([[1, 1, 2, 0, 0], [3, 0, 0, 0, 0]], None, "attention_mask"),  # numbers of packed texts
    ([[0.0, 0.0, -1e4, -1e4, -1e4]] * 2, None, "attention_mask"),  # to be added to scores
    ([[1, 1, 0, 0, 0]] * 2, [[0, 1, 1, 0, 0]] * 2, "mask"),
    ([[1, 1, 0, 0, 0]] * 2, [[0, 0, 2, 0, 0]] * 2, "unused_mask"),
])
def test_a_padding_mask_that_is_none_is_refused(mask, spare, name) -> None:
    more = () if spare is None else (torch.tensor(spare),)
    with pytest.raises(ValueError, match=name):
        nanoattn.bert_padding.unpad_input(torch.randn(2, 5, 3), torch.tensor(mask), *more)


# As public models do: the names of flash-attn 2, a padded batch, a scale that is a tensor.
PROGRAM = """
import nanoattn
nanoattn.as_flash_attn()
nanoattn.as_flash_attn()
import flash_attn, flash_attn.flash_attn_interface, importlib.util, torch
from flash_attn import bert_padding, flash_attn_varlen_qkvpacked_func
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_varlen_func
assert int(flash_attn.__version__[0]) == 2 and importlib.util.find_spec("flash_attn")
for name in ("flash_attn.layers.linear", "flash_attn.ops.rms_norm", "flash_attn.cute"):
    try: __import__(name)
    except ModuleNotFoundError as e: assert name.startswith(e.name)
    else: raise SystemExit(name)
mask = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
qkv = torch.randn(2, 4, 3, 2, 8)
rows, indices, ends, longest, _ = unpad_input(qkv, mask)
out = flash_attn_varlen_qkvpacked_func(qkv=rows, cu_seqlens=ends, max_seqlen=longest,
                                       softmax_scale=1 / torch.tensor(8.0).sqrt())
q, k, v = qkv.transpose(1, 3).unbind(2)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, mask.bool()[:, None, None])
seen = mask == 1
torch.testing.assert_close(pad_input(out, indices, 2, 4)[seen], want.transpose(1, 2)[seen])
here = nanoattn.Machine.here("cpu")
assert not any(here.version_of(p) for p in ("flash_attn", "flash_attn.cute"))
print("ran")
"""


def run_program(program: str, folder: Any) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).resolve().parent.parent)
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{root}"}
    program = program.replace("import nanoattn\n", "import attention as nanoattn\n")
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto"], indirect=True)
def test_a_program_that_imports_flash_attn(tmp_path) -> None:
    ran = run_program(PROGRAM, tmp_path)
    assert ran.stdout == "ran\n", ran.stderr


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto"], indirect=True)
def test_an_installed_flash_attn_is_not_hidden(tmp_path) -> None:
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    for program in (PROGRAM, f"import flash_attn\n{PROGRAM}"):
        assert "ImportError: flash-attn is installed" in run_program(program, tmp_path).stderr
