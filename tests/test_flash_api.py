"""FlashAttention's functions, modules and programs: numbers, caches, refusals."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import oracle
import pytest
import torch
import torch.nn.functional as F
from checkout import ROOT, python
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attention as nanoattn
from attention import BACKENDS
from attention.masks import PagedView

SIZE, S, D = 8, 24, 8  # of a page; slots of a cache; head_dim


@pytest.fixture(autouse=True)
def auto(remembered_probes) -> Iterator[None]:
    nanoattn.use("auto")
    yield
    nanoattn.use("auto")


# flash_attn/flash_attn_interface.py and layers/rotary.py of flash-attn 2.8.3.
OPTIONS = ("dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
           "alibi_slopes=None deterministic=False return_attn_probs=False")
ENDS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {ENDS} {OPTIONS} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {ENDS} {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_with_kvcache":
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False "
        "window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
        "return_softmax_lse=False",
    "rotary.apply_rotary_emb":
        "x cos sin interleaved=False inplace=False seqlen_offsets=0 cu_seqlens=None "
        "max_seqlen=None",
    "rotary.apply_rotary_emb_qkv_":
        "qkv cos sin cos_k=None sin_k=None interleaved=False seqlen_offsets=0 num_heads_q=None",
    "rotary.apply_rotary_emb_kv_": "kv cos sin interleaved=False seqlen_offsets=0",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns_and_ours_come_after(name) -> None:
    room = nanoattn.compat.rotary if name.startswith("rotary.") else nanoattn
    function = getattr(room, name.removeprefix("rotary."))
    got = [p for p in inspect.signature(function).parameters.values()
           if p.kind is p.POSITIONAL_OR_KEYWORD]
    shown = [p.name + ("" if p.default is p.empty else f"={p.default}") for p in got]
    assert " ".join(shown).replace(", ", ",") == SIGNATURES[name]


# --- the same in float64, with autograd's gradients ---


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: Any, interleaved: bool) -> Tensor:
    """x (T, H, D) at positions `at` (T,): pairs of dimensions are complex numbers."""
    R = cos.shape[1]
    a = torch.arange(R) * 2 if interleaved else torch.arange(R)
    b = a + 1 if interleaved else a + R
    c, s = (t.double()[torch.as_tensor(at, dtype=torch.long)][:, None] for t in (cos, sin))
    z = torch.complex(x.double()[..., a], x.double()[..., b]) * torch.complex(c, s)
    return x.double().index_copy(-1, a, z.real).index_copy(-1, b, z.imag)


def close(got: Tensor, want: Tensor, atol: float = 1e-5, rtol: float = 1e-4) -> None:
    torch.testing.assert_close(got.double(), want, atol=atol, rtol=rtol, equal_nan=True)


def ints(*numbers: Any) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


# flash-attn's options by (window, right) of a Spec.
SIDES = [(None, None, {}), (None, 0, {"causal": True}),
         (4, 2, {"window_size": (torch.tensor(3), np.int64(2))}),
         (None, 4, {"window_size": (-1, 4)}), (3, None, {"window_size": (2, -1)}),
         (1, 0, {"window_size": (0, 0)}), (5, 0, {"causal": True, "window_size": (4, 9)})]
numbers = st.floats(0.05, 1.0)


class Options:
    """Random options, and the oracle by them."""

    def __init__(self, draw: Any, H: int, B: int) -> None:
        self.window, self.right, self.given = draw(st.sampled_from(SIDES))
        kinds = st.none() | numbers | numbers.map(np.float32) | numbers.map(torch.tensor)
        self.scale, self.softcap = draw(kinds), draw(st.just(0.0) | st.floats(0.5, 50.0))
        self.slopes = draw(st.sampled_from([None, None, torch.rand(H), torch.rand(B, H)]))
        self.given = self.given | {"softmax_scale": self.scale, "softcap": self.softcap,
                                   "alibi_slopes": self.slopes}

    def attended(self, q: Tensor, k: Tensor, v: Tensor, b: int) -> tuple[Tensor, Tensor]:
        """out (Tq, H, D) and the log-sum-exp (Tq, H) of row b: q (Tq, H, D), k (Tk, Hkv, D)."""
        slopes = self.slopes if self.slopes is None or self.slopes.dim() == 1 else self.slopes[b]
        spec = nanoattn.Spec(
            q.shape[1], k.shape[1], D, "float64", self.window, right=self.right,
            scale=None if self.scale is None else float(self.scale), softcap=self.softcap or None)
        out, L = oracle.formula(*(t.double() for t in (q, k, v)), spec, alibi_slopes=slopes)
        return out, L.T


def strided(data: Any, *shape: int) -> Tensor:
    t = torch.randn(*shape)
    orders = [t, t.transpose(0, -2).contiguous().transpose(0, -2),
              torch.stack((t, t), dim=-1)[..., 0], torch.cat((t, t), dim=-2)[..., : shape[-2], :]]
    return data.draw(st.sampled_from(orders)).detach().requires_grad_()


def paged(t: Tensor, table: Tensor) -> Tensor:
    """Rows (B, S, Hkv, D) as pages."""
    pages = t.new_empty(table.numel(), SIZE, *t.shape[2:])
    pages[table.long()] = t.unflatten(1, (-1, SIZE))
    return pages


def in_pages(t: Tensor, lengths: list[int], table: Tensor) -> Tensor:
    """Concatenated rows as pages; unused slots are NaN."""
    slots = SIZE * table.shape[1]
    rows = [F.pad(row, (0, 0, 0, 0, 0, slots - len(row)), value=math.nan)
            for row in t.split(lengths)]
    return paged(torch.stack(rows), table)


length = st.integers(0, 10).map(lambda n: n if n < 10 else 41)


@pytest.mark.parametrize("name", ["auto", "manual", "tiled", "sdpa_flash"])
def test_any_call(name: str) -> None:
    """Dense, varlen, packed and paged; empty rows, more queries than keys, strides, gradients, NaN
    in one text."""
    nanoattn.use(name)

    @settings(max_examples=50 if name == "auto" else 15, deadline=None)
    @given(st.lists(st.tuples(*[length] * 4), min_size=1, max_size=4),
           st.sampled_from([(4, 2), (2, 2), (3, 1)]),
           st.sampled_from(["dense", "dense", "long", "tokens", "used", "pages"]), st.data())
    def check(rows, heads, layout, data) -> None:
        if dense := layout in ("dense", "long"):
            first = rows[0] if layout == "dense" else (1 + rows[0][0], 0, 301, 0)  # proved again
            rows = [first] * min(2, len(rows))
        (H, Hkv), n_q, n_k = heads, [row[0] for row in rows], [row[2] for row in rows]
        options, used_q, used_k, more = Options(data.draw, H, len(rows)), n_q, n_k, {}
        if layout == "used":
            used_q, used_k = [min(a, b) for a, b, *_ in rows], [min(c, d) for *_, c, d in rows]
            more = {"seqused_q": ints(*used_q), "seqused_k": ints(*used_k)}
        q, k, v = (strided(data, sum(n), h, D) for n, h in ((n_q, H), (n_k, Hkv), (n_k, Hkv)))
        sick = data.draw(st.sampled_from([None, *range(len(rows))]))
        well_q, well_k = (torch.arange(len(rows)).repeat_interleave(torch.tensor(n)) != (
            -1 if sick is None else sick) for n in (n_q, n_k))
        for t, well in ((q, well_q), (k, well_k), (v, well_k)):
            t.data[~well] = torch.nan
        shaped, kind, heads_at = [q, k, v], "flash_attn_varlen_", 1
        ends = [ints(0, *n).cumsum(0).int() for n in (n_q, n_k)] + [max(n_q), max(n_k)]
        if dense:
            shaped = [t.unflatten(0, (len(rows), -1)) for t in (q, k, v)]
            kind, heads_at, ends = "flash_attn_", 2, []
        if layout == "pages":
            pages = -(-max(1, *n_k) // SIZE)
            table = torch.randperm(pages * len(rows)).view(-1, pages).int()
            shaped, more = [q, *(in_pages(t, n_k, table) for t in (k, v))], {"block_table": table}

        def call(form: str, *tensors: Tensor, ends: Any = ends, **others: Any) -> Any:
            function = getattr(nanoattn, f"{kind}{form}")
            return function(*tensors, *ends, **others, **options.given, **more)

        found = [options.attended(q[: used_q[b]], k[: used_k[b]], v[: used_k[b]], b)
                 for b, (q, k, v) in enumerate(zip(q.split(n_q), k.split(n_k), v.split(n_k)))]
        exact, exact_L = (
            torch.cat([F.pad(x, (0, 0) * (x.dim() - 1) + (0, n - len(x)), value=value)
                       for x, n in zip(t, n_q)]) for t, value in zip(zip(*found), (0, -math.inf)))
        out, L, none = call("func", *shaped, return_attn_probs=True)
        assert none is None and not L.requires_grad
        close((L.mT.flatten(0, 1) if dense else L.T)[well_q], exact_L[well_q])
        plain = call("func", *shaped, num_splits=4, pack_gqa=True)  # hints
        dout = torch.randn_like(exact)
        for got in (t.flatten(0, 1) if dense else t for t in (out, plain)):
            close(got[well_q], exact[well_q])
            if layout != "pages":
                grads = torch.autograd.grad(got, [q, k, v], dout.to(got.dtype))
                wanted = torch.autograd.grad(exact, [q, k, v], dout, retain_graph=True)
                for a, b, well in zip(grads, wanted, (well_q, well_k, well_k), strict=True):
                    close(a[well], b[well].double(), atol=1e-4, rtol=1e-3)
        if dense or layout == "tokens":
            q, k, v = shaped
            close(call("kvpacked_func", q, torch.stack((k, v), heads_at)), out.double())
            if n_q == n_k and Hkv == H:
                packed = torch.stack((q, k, v), heads_at)
                close(call("qkvpacked_func", packed, ends=ends[::2]), out.double())

    check()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=3),
       st.integers(1, 4), st.integers(0, 6), st.integers(0, 4),
       st.sampled_from(["rows", "pads", "pages"]), st.data())
def test_any_call_with_a_cache(rows, Tq, n_new, R, layout, data) -> None:
    """Other lengths, first slots, positions and slopes; nothing else is written, and what is not
    seen may be NaN."""
    B = len(rows)
    lengths, pads = [n for n, _ in rows], [min(pad, n) * (layout == "pads") for n, pad in rows]
    q, k, v = (torch.randn(B, n, h, D) for n, h in ((Tq, 4), (n_new, 2), (n_new, 2)))
    cos, sin = torch.randn(2, 40, max(R, 1))
    interleaved, lse = data.draw(st.booleans()), data.draw(st.booleans())
    own = data.draw(st.sampled_from([None, [7] * B, [*range(3, 3 + B)]]))
    where, options = [*range(B)], Options(data.draw, 4, B)
    given = options.given | {"cache_seqlens": ints(*lengths), "return_softmax_lse": lse}
    if rotate := bool(R and n_new):
        given |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved,
                  "rotary_seqlens": None if own is None else ints(*own)}
    if layout == "pads":
        given["cache_leftpad"] = ints(*pads)
    if layout == "rows":
        where = data.draw(st.permutations(range(B + 1)))[:B]
        given["cache_batch_idx"] = ints(*where)
    caches = [torch.full((B + 1, S, 2, D), math.nan) for _ in range(2)]
    for t in caches:
        for b, row in enumerate(where):
            t[row, pads[b] : lengths[b]] = torch.randn(lengths[b] - pads[b], 2, D)
    written, table = [t.clone() for t in caches], torch.randperm(3 * B).view(B, 3)
    if layout == "pages":
        written = [paged(t[:B], table) for t in caches]
        given["block_table"] = seen = table.int()
        for b, n in enumerate(lengths if options.window else ()):
            seen[b, : max(0, min(n, n + n_new - Tq - options.window + 1)) // SIZE] = -1
    got = nanoattn.flash_attn_with_kvcache(q, *written, *((k, v) if n_new else ()), **given)
    out, L = got if lse else (got, None)
    if layout == "pages":
        written = [t[table].flatten(1, 2) for t in written]
    for b, row in enumerate(where):
        ks, vs = (t[row].double() for t in caches)
        first, new, queries = lengths[b] if own is None else own[b], k[b].double(), q[b].double()
        if rotate:
            moves = (options.window, options.right) != (None, None)
            new, queries = (turned(t, cos, sin, [first + n * step for n in range(len(t))],
                                   interleaved) for t, step in ((k[b], 1), (q[b], moves)))
        end = lengths[b] + n_new
        ks[lengths[b] : end], vs[lengths[b] : end] = new, v[b].double()
        want, want_L = options.attended(queries, ks[pads[b] : end], vs[pads[b] : end], b)
        close(out[b], want)
        if L is not None:
            close(L[b].T, want_L)
        for got_cache, exact in ((written[0], ks), (written[1], vs)):
            close(got_cache[row], exact, rtol=1e-5)


@pytest.mark.parametrize("name", ["auto", "sdpa_flash", "tiled", "triton"])
def test_dropout_with_the_log_sum_exp(name) -> None:
    """L is of all keys; kept weights are doubled, also in the gradient."""
    nanoattn.use(name)
    q, k = torch.randn(2, 1, 40, 1, 40).unbind(0)
    v = torch.eye(40)[None, :, None].requires_grad_()
    out, L, _ = nanoattn.flash_attn_func(q, k, v, 0.5, causal=True, return_attn_probs=True)
    want, want_L, _ = nanoattn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(L, want_L)
    kept = out != 0
    torch.testing.assert_close(out, 2 * want * kept)
    assert 0.3 < kept.sum() / (want > 1e-6).sum() < 0.7
    (dv,) = torch.autograd.grad(out, v, torch.ones_like(out))
    torch.testing.assert_close(dv[0, :, 0, 0], out.detach()[0, :, 0].sum(0))
    assert f"backend: {name if name in ('tiled', 'triton') else 'tiled'} (" in nanoattn.report()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=3),
       st.booleans(), st.integers(1, 4), st.booleans(), st.booleans())
def test_apply_rotary_emb(rows, interleaved, R, inplace, leaf) -> None:
    """Different lengths and offsets, the gradient, a leaf in place."""
    rotary, lengths = nanoattn.compat.rotary, [n for n, _ in rows]
    x = torch.randn(sum(lengths), 3, D, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(30, R, dtype=torch.float64) * 6
    cos, sin, offsets = angle.cos(), angle.sin(), ints(*(start for _, start in rows))
    at = [start + n for many, start in rows for n in range(many)]
    want = turned(x, cos, sin, at, interleaved)
    given, root = (x.detach().clone().requires_grad_(),) * 2
    if not leaf:  # a part of a split tensor, which PyTorch lets nobody write to
        root = torch.cat((x.detach(), x.detach()), dim=1).requires_grad_()
        given = (root * 1).split(3, dim=1)[0]
    ends = ints(0, *lengths).cumsum(0).int()
    out = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets, ends, 6)
    close(out, want)
    close(given, want if inplace else x)
    dout = torch.randn_like(want)
    (grad,), (exact,) = torch.autograd.grad(out, root, dout), torch.autograd.grad(want, x, dout)
    close(grad[:, :3], exact)
    back = rotary.apply_rotary(out, cos, sin, offsets, ends, 6, interleaved, conjugate=True)
    close(back, x)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 9), st.booleans(), st.sampled_from([None, 64.0]),
       st.sampled_from(["qkv", "heads", "q and kv"]), st.integers(0, 5) | st.none())
def test_rotary_embedding(T, interleaved, scale_base, layout, offset) -> None:
    """Growing tables, offsets of rows, in place, and xPos."""
    H, Hkv = (2, 2) if layout == "qkv" else (4, 2)
    module = nanoattn.compat.rotary.RotaryEmbedding(6, 100.0, interleaved, scale_base)
    first, length = ([1, 4], T + 4) if offset is None else ([offset] * 2, T + offset)
    options = {"seqlen_offset": ints(*first) if offset is None else offset}
    options |= {"max_seqlen": T + 4} if offset is None else {}
    x = torch.randn(2, T, H + 2 * Hkv, D)
    leaf = x.clone().requires_grad_()
    if layout == "heads":
        out = module(leaf, num_heads_q=H, **options)
    elif layout == "qkv":
        module(leaf[:, :1].detach().clone().unflatten(2, (3, H)), **options)
        out = module(leaf.unflatten(2, (3, H)), **options).flatten(2, 3)
    else:
        q, kv = leaf.split((H, 2 * Hkv), dim=2)
        q, kv = module(q, kv.unflatten(2, (2, Hkv)), **options)
        out = torch.cat((q, kv.flatten(2, 3)), dim=2)
    angle = torch.outer(torch.arange(length), 100.0 ** -(torch.arange(3) / 3))
    scale = torch.ones(length, 1)
    if scale_base:
        power = (torch.arange(length) - length // 2) / scale_base
        scale = ((torch.arange(3) / 3 + 0.4) / 1.4) ** power[:, None]
    q, k, v = x.split((H, Hkv, Hkv), dim=2)
    for b in range(2):
        want = [turned(t[b], angle.cos() * m, angle.sin() * m, torch.arange(T) + first[b],
                       interleaved) for t, m in ((q, scale), (k, 1 / scale))]
        close(out[b], torch.cat([*want, v[b].double()], dim=1))
    close(leaf, out.detach().double())
    assert torch.autograd.grad(out.sum(), leaf)[0][:, :, -Hkv:].eq(1).all()


# --- contradictions ---

Call = dict[str, Any]


def tensors(names: str, *shapes: tuple[int, ...]) -> Call:
    return {name: torch.randn(*shape, 16) for name, shape in zip(names.split(), shapes)}


def attend(name: str, spec: nanoattn.Spec, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
    return BACKENDS[name].attend(q, k, v, spec, **more)


SPEC = nanoattn.Spec(4, 2, 16, "float32", grad=False)
DENSE = tensors("q k v", (3, 5, 4), (3, 7, 2), (3, 7, 2))
VARLEN = tensors("q k v", (9, 4), (12, 2), (12, 2)) | {
    "cu_seqlens_q": ints(0, 2, 4, 9), "cu_seqlens_k": ints(0, 3, 7, 12), "max_seqlen_q": 5,
    "max_seqlen_k": 5}
CACHED = tensors("q k_cache v_cache k v", (3, 2, 4), (4, 8, 2), (4, 8, 2), (3, 2, 2), (3, 2, 2)) | {
    "cache_seqlens": ints(0, 6, 3)}
PAGES = (7, 4, 2)
SCORED = {"sinks": torch.randn(4), "alibi_slopes": torch.ones(4), "segments": ints(*[[0] * 7] * 3)}
VIEW = PagedView(ints([1, 2], [3, 4], [5, 6]), ints(2, 0, 1), ints(5, 5, 5))


# Changes of an argument: a shape, a dtype, a device, heads; None; the last number at a place.
SHAPES = (lambda t: t[:-1], lambda t: t[None], lambda t: t.to("meta"), lambda t: t.double())
FEWER = (*SHAPES[:3], lambda t: t.float())
HEADS = (lambda t: t[..., :-1], lambda t: t[..., :0, :],
         lambda t: t.repeat_interleave(2, -2)[..., :3, :])


def of(names: str, *changes: Any) -> list[Call]:
    return [{name: change} for name in names.split() for change in changes]


def write(*places: tuple[int, ...]) -> list[Callable[[Tensor], Tensor]]:
    def change(t: Tensor, place: tuple[int, ...]) -> Tensor:
        return t.index_put(tuple(map(torch.tensor, place[:-1])), torch.tensor(place[-1]).to(t))

    return [partial(change, place=place) for place in places]


ROTARY = {"rotary_cos": torch.ones(9, 4), "rotary_sin": torch.ones(9, 4)}
# Each change is a contradiction. Where its value is no function, the message names the argument.
CALLS: list[tuple[Any, Call, list[Call]]] = [
    (nanoattn.flash_attn_func, DENSE, [
        *of("q k v", *SHAPES, *HEADS),
        *of("dropout_p softmax_scale softcap window_size", lambda _: "abc", lambda _: [0.5]),
        *of("a_typo qv", 1), *of("alibi_slopes", torch.ones(3))]),
    (nanoattn.flash_attn_varlen_func, VARLEN, [
        *of("q k v", *SHAPES, *HEADS),
        *of("cu_seqlens_q", *FEWER, lambda t: t + 1, lambda t: t.flip(0)),
        *of("cu_seqlens_k", *FEWER, *write((1, 8), (1, -1), (0, 1), (3, 11), (3, 13)))]),
    (nanoattn.flash_attn_varlen_func, VARLEN | {
        "block_table": ints([0, -1], [5, 2], [1, 4]), **tensors("k v", PAGES, PAGES)}, [
        *of("k", *SHAPES[1:], *HEADS), *of("cu_seqlens_k", *write((3, 16))),
        *of("block_table", *FEWER, *write((0, 0, -1), (1, 0, 7), (2, 1, -1)))]),
    (nanoattn.flash_attn_with_kvcache, CACHED | {"cache_batch_idx": ints(2, 3, 0)}, [
        *of("q k_cache v_cache k v", *SHAPES[1:], *HEADS), *of("k", None),
        *of("cache_batch_idx", *FEWER, *write((0, -1), (0, 4), (0, 3))),
        *of("cache_seqlens", *FEWER, *write((0, -1), (1, 7)), 7),
        *of("cache_leftpad", ints(0, 7, 0), ints(0, 0)), *of("attention_chunk", 4),
        *of("alibi_slopes", torch.ones(3), torch.ones(4).double(), torch.rand(4).requires_grad_()),
        *of("k_descale", torch.ones(3, 2)), *of("cu_seqlens_q", ints(0, 1)),
        ROTARY | {"k": None, "v": None}, *of("rotary_cos rotary_sin", torch.ones(6, 4)),
        ROTARY | {"rotary_sin": torch.ones(9, 3)}, dict.fromkeys(ROTARY, torch.ones(9, 9)),
        dict.fromkeys(ROTARY, torch.ones(7, 4))]),
    (nanoattn.flash_attn_with_kvcache, CACHED | {
        "block_table": ints([6, -1], [5, 2], [1, 4]), **tensors("k_cache v_cache", PAGES, PAGES)}, [
        *of("cache_batch_idx cache_leftpad", ints(0, 1, 2)), *of("cache_seqlens", None),
        *of("block_table", *FEWER, *write((0, 0, -1), (1, 1, 7), (2, 1, -1)))]),
    (attend, DENSE | SCORED | {
        "name": "manual", "spec": replace(SPEC, segments=True, sinks=True, alibi=True)}, [
        *of("q k v", *SHAPES, *HEADS), *of("sinks", *SHAPES[:3], None),
        *of("alibi_slopes", *SHAPES, None, 0.5, torch.ones(1, 4), torch.rand(4).requires_grad_()),
        *of("segments", *FEWER, None, torch.zeros(3, 7), ints(*[[0, 1, 1, 0, 2, 2, 2]] * 3))]),
    (attend, DENSE | tensors("k v", PAGES, PAGES) | {
        "cache": VIEW, "name": "paged", "spec": replace(SPEC, cache="paged", page_size=4)}, [
        *of("q", *SHAPES[:3]), *of("k", *SHAPES[1:]), *of("segments", ints(*[[0] * 7] * 3)),
        *of("cache", None, lambda t: PagedView(t.page_table[:1], t.start, t.count))]),
    (nanoattn.bert_padding.unpad_input, {
        "hidden_states": torch.randn(2, 5, 3), "attention_mask": ints(*[[1, 1, 0, 0, 0]] * 2)}, [
        *of("attention_mask", torch.ones(2, 4), ints([1, 1, 2, 0, 0], [3, 0, 0, 0, 0]),  # packed
            torch.tensor([[0.0, -1e4, -1e4, -1e4, -1e4]] * 2)),  # to be added to scores
        *of("unused_mask", ints(*[[0, 0, 2, 0, 0]] * 2)),
        {"unused_mask": ints(*[[0, 1, 1, 0, 0]] * 2), "attention_mask": lambda t: t}]),
]


@pytest.mark.parametrize("backend", ["auto", "manual"])
def test_contradictions_are_errors_before_anything_is_written(backend) -> None:
    nanoattn.use(backend)
    for function, right, changes in CALLS:
        if backend == "manual" and "block_table" in right:
            continue  # it reads no pages
        function(**deepcopy(right))
        for change in changes:
            call = deepcopy(right)
            call |= {n: x(call.get(n)) if callable(x) else x for n, x in change.items()}
            before = {n: t.clone() for n, t in call.items() if isinstance(t, Tensor)}
            with pytest.raises((ValueError, TypeError)) as e:
                function(**call)
                pytest.fail(f"it accepts {change}")
            named = any(n in str(e.value) for n, x in change.items() if not callable(x))
            assert named or any(map(callable, change.values())), (change, e.value)
            for n, t in before.items():
                assert t.is_meta or torch.equal(call[n], t), (change, n)


def test_lengths_and_segments_that_numpy_writes_are_read_again() -> None:
    q, spec = torch.randn(600, 2, 8), nanoattn.Spec(2, 2, 8, "float32", segments=True)
    for run, host, place, value in (
        (lambda t: nanoattn.flash_attn_varlen_func(q, q, q, t, t, 600, 600, causal=True),
         np.array([0, 20, 600], np.int32), 1, 400),
        (lambda t: attend("sdpa", spec, q[None], q[None], q[None], segments=t[None]),
         np.array([0] * 20 + [1] * 580, np.int32), 19, 1)):
        t = torch.from_numpy(host)
        before = run(t)
        host[place] = value
        again = run(t)
        assert torch.equal(again, run(t.clone())) and not torch.equal(again, before)


# --- programs that import flash_attn ---


def test_the_report_names_each_kind_its_kernel_and_what_was_refused() -> None:
    x = torch.randn(2, 6, 2, D)
    assert "sdpa" in str(nanoattn.use("sdpa"))
    assert "sdpa" not in nanoattn.report()
    for _ in range(2):
        nanoattn.flash_attn_func(x, x, x, softmax_scale=0.3)
    nanoattn.flash_attn_with_kvcache(x, x, x, softmax_scale=0.3)
    nanoattn.flash_attn_func(x, x, x, causal=True, return_attn_probs=True)
    torch.compile(nanoattn.flash_attn_func, backend="eager")(x, x, x)
    plain, lse, traced = nanoattn.report().split("\nheads")
    assert "sdpa" in plain and "3 calls" in plain
    assert "sdpa requested" in lse and "lse" in lse and "traced" in traced


def test_padding_at_the_left_of_a_cache_is_read_in_a_trace() -> None:
    def f(q: Tensor, k: Tensor, v: Tensor, left: Tensor) -> Tensor:
        return nanoattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=7, cache_leftpad=left)

    compiled, cache = torch.compile(f, backend="eager"), torch.randn(2, 2, 12, 2, D)
    for left in torch.tensor([[1, 2], [3, 0]], dtype=torch.int32):
        x = torch.randn(2, 1, 2, D), *cache, left
        torch.testing.assert_close(compiled(*x), f(*x))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_function_has_calls_of_several_kinds(dynamic: bool | None) -> None:
    """torch.compile makes a symbol of a float's second value, dynamic=True of its first."""
    cos, sin = torch.randn(2, 40, 3)

    def f(x: Tensor, slopes: Tensor, first: Tensor, **numbers: float) -> Tensor:
        x = nanoattn.compat.rotary.apply_rotary_emb(x, cos, sin, inplace=True, seqlen_offsets=first)
        some = nanoattn.flash_attn_func(x, x[:, :4], x[:, :4], alibi_slopes=slopes,
                                        window_size=(3, 2), **numbers)
        return some + nanoattn.flash_attn_qkvpacked_func(torch.stack((x, x, x), 2), causal=True)

    compiled = torch.compile(f, backend="eager", fullgraph=True, dynamic=dynamic)
    for B, T, scale, softcap in ((2, 5, 0.3, 0.0), (2, 5, 0.5, 0.0), (3, 9, 0.7, 2.0),
                                 (3, 9, 0.9, 5.0)):
        x, slopes, first = torch.randn(B, T, 2, D), torch.rand(B, 2), torch.arange(B)
        other, numbers = x.clone(), {"softmax_scale": scale, "softcap": softcap}
        torch.testing.assert_close(compiled(x, slopes, first, **numbers),
                                   f(other, slopes, first, **numbers))
        assert torch.equal(x, other)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=4), left=st.booleans(),
    dtype=st.sampled_from([torch.bool, torch.int32, torch.int64]), unused=st.booleans(),
)
def test_padding_is_removed_and_put_back(lengths, left, dtype, unused) -> None:
    """Unused places are counted apart."""
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
    dout = torch.randn_like(x)
    for got, full in ((back, x), (torch.autograd.grad(back, x, dout)[0], dout)):
        assert torch.equal(got, torch.where(kept[..., None, None], full, 0))


# As a new user writes it: a layer with rotary embeddings and a cache.
PROGRAM = """
import attention as nanoattn
nanoattn.as_flash_attn()
nanoattn.as_flash_attn()
import importlib.util, torch
import flash_attn, flash_attn.flash_attn_interface
from flash_attn import flash_attn_func, flash_attn_varlen_qkvpacked_func, flash_attn_with_kvcache
from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.ops.triton.rotary import apply_rotary
assert int(flash_attn.__version__[0]) == 2 and importlib.util.find_spec("flash_attn")
for name in ("flash_attn.layers.linear", "flash_attn.ops.rms_norm", "flash_attn.cute"):
    try: __import__(name)
    except ModuleNotFoundError as e: assert name.startswith(e.name)
    else: raise SystemExit(name)
here = nanoattn.Machine.here("cpu")
assert not any(here.version_of(p) for p in ("flash_attn", "flash_attn.cute"))

rotary, x = RotaryEmbedding(16), torch.randn(2, 12, 8, 16)
full = flash_attn_func(*rotary(x.clone(), num_heads_q=4).split((4, 2, 2), dim=2), causal=True)
rotary._update_cos_sin_cache(64, device=x.device, dtype=x.dtype)
q, k, v = x.split((4, 2, 2), dim=2)
cached = flash_attn_with_kvcache(
    q, *torch.zeros(2, 2, 64, 2, 16), k, v, rotary_cos=rotary._cos_cached,
    rotary_sin=rotary._sin_cached, cache_seqlens=0, causal=True, rotary_interleaved=False)
torch.testing.assert_close(cached, full, atol=1e-5, rtol=1e-4)
print("ran")
"""


@pytest.mark.slow
def test_a_program_that_imports_flash_attn_and_an_installed_one_is_not_hidden(tmp_path) -> None:
    ran = python("-c", PROGRAM)
    assert ran.stdout == "ran\n", ran.stderr
    (tmp_path / "flash_attn").mkdir()
    (tmp_path / "flash_attn" / "__init__.py").write_text("")
    for program in (PROGRAM, f"import flash_attn\n{PROGRAM}"):
        ran = python("-c", program, PYTHONPATH=f"{tmp_path}:{ROOT}")
        assert "ImportError: flash-attn is installed" in ran.stderr
