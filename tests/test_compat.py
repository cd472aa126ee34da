"""FlashAttention's API: signatures, rotary embeddings, padded caches, ALiBi, and the report."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_flash_api import SIZE, ints, run_program
from torch import Tensor

import attention as nanoattn

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


def public(name: str) -> Any:
    room = nanoattn.compat.rotary if name.startswith("rotary.") else nanoattn
    return getattr(room, name.removeprefix("rotary."))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_flash_attns_and_ours_come_after(name) -> None:
    got = [p for p in inspect.signature(public(name)).parameters.values()
           if p.kind is p.POSITIONAL_OR_KEYWORD]
    shown = [p.name + ("" if p.default is p.empty else f"={p.default}") for p in got]
    assert " ".join(shown).replace(", ", ",") == SIGNATURES[name]


# --- the same in float64, with autograd's gradients ---


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: Any, interleaved: bool) -> Tensor:
    """x (T, H, D) of the tokens at positions `at` (T,): pairs of dimensions are complex numbers."""
    R = cos.shape[1]
    a = torch.arange(R) * 2 if interleaved else torch.arange(R)
    b = a + 1 if interleaved else a + R
    c, s = (t.double()[torch.as_tensor(at, dtype=torch.long)][:, None] for t in (cos, sin))
    z = torch.complex(x.double()[..., a], x.double()[..., b]) * torch.complex(c, s)
    return x.double().index_copy(-1, a, z.real).index_copy(-1, b, z.imag)


def attended(q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None,
             slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out (Tq, H, D) and the log-sum-exp (H, Tq) of q (Tq, H, D), k and v (Tk, Hkv, D)."""
    (Tq, H, D), (Tk, Hkv, _) = q.shape, k.shape
    k, v = (t.double().repeat_interleave(H // Hkv, dim=1) for t in (k, v))
    ahead = torch.arange(Tk) - (torch.arange(Tq)[:, None] + Tk - Tq)
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    hidden |= False if left is None else ahead < -left
    hidden |= False if right is None else ahead > right
    scores = torch.einsum("ihd,jhd->hij", q.double(), k) / math.sqrt(D)
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * ahead.abs()
    blind = hidden.all(1)
    weights = scores.masked_fill(hidden & ~blind[:, None], -math.inf).softmax(-1)
    L = scores.detach().masked_fill(hidden, -math.inf).logsumexp(-1)
    return torch.einsum("hij,jhd->ihd", weights.masked_fill(blind[:, None], 0), v), L


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


def same_gradients(got: Tensor, want: Tensor, leaves: list[Tensor], like: list[Tensor]) -> None:
    dout = torch.randn_like(want)
    pairs = zip(torch.autograd.grad(got, leaves, dout.to(got.dtype)),
                torch.autograd.grad(want, like, dout), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a.double(), b.double(), atol=3e-5, rtol=1e-3)


S, D = 24, 8
SIDES = [(None, None, {}), (None, 0, {"causal": True}), (3, 2, {"window_size": (3, 2)}),
         (None, 4, {"window_size": (-1, 4)}), (2, None, {"window_size": (2, -1)}),
         (4, 0, {"causal": True, "window_size": (4, 9)})]
sides = st.sampled_from(SIDES)
heads = st.sampled_from([(4, 2), (2, 2), (3, 1)])


def some_slopes(data: Any, H: int, B: int) -> Any:
    return data.draw(st.sampled_from([None, torch.rand(H), torch.rand(B, H)]))


def of_row(slopes: Tensor | None, b: int) -> Tensor | None:
    return slopes if slopes is None or slopes.dim() == 1 else slopes[b]


def strided(data: Any, *shape: int) -> Tensor:
    """A leaf of this shape, whose memory has another order or gaps."""
    t = torch.randn(*shape)
    orders = [t, t.transpose(0, -2).contiguous().transpose(0, -2),
              torch.stack((t, t), dim=-1)[..., 0], torch.cat((t, t), dim=-2)[..., : shape[-2], :]]
    return data.draw(st.sampled_from(orders)).detach().requires_grad_()


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 12), st.integers(0, 12), st.integers(1, 2), heads, sides, st.data())
def test_any_dense_call(Tq, Tk, B, heads, sides, data) -> None:
    """Also packed: lengths 0 and 1, more queries than keys, layouts, ALiBi, gradients."""
    (H, Hkv), (left, right, options) = heads, sides
    q, k, v = (strided(data, B, n, h, D) for n, h in ((Tq, H), (Tk, Hkv), (Tk, Hkv)))
    slopes = some_slopes(data, H, B)
    options = options | {"alibi_slopes": slopes}
    out, L, none = nanoattn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    want = [attended(*row, left, right, of_row(slopes, b)) for b, row in enumerate(zip(q, k, v))]
    exact = torch.stack([row for row, _ in want])
    close(out, exact)
    close(L, torch.stack([row for _, row in want]))
    assert none is None and not L.requires_grad
    same_gradients(out, exact, [q, k, v], [q, k, v])
    plain = nanoattn.flash_attn_func(q, k, v, **options)
    close(plain, exact)
    kv = torch.stack((k, v), dim=2)
    close(nanoattn.flash_attn_kvpacked_func(q, kv, **options), exact)
    if q.shape == k.shape:
        qkv = torch.stack((q, k, v), dim=2)
        close(nanoattn.flash_attn_qkvpacked_func(qkv, **options), exact)


def paged(t: Tensor, table: Tensor) -> Tensor:
    """Rows (B, S, Hkv, D) as pages, of which each row of the table names its own."""
    pages = t.new_empty(table.numel(), SIZE, *t.shape[2:])
    pages[table.long()] = t.unflatten(1, (-1, SIZE))
    return pages


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=4),
       heads, sides, st.sampled_from(["tokens", "used", "pages"]), st.data())
def test_any_varlen_call(rows, heads, sides, layout, data) -> None:
    (H, Hkv), (left, right, options) = heads, sides
    n_q, n_k = [a for a, *_ in rows], [c for _, _, c, _ in rows]
    used_q, used_k, more = n_q, n_k, {}
    if layout == "used":
        used_q, used_k = [min(a, b) for a, b, *_ in rows], [min(c, d) for *_, c, d in rows]
        more = {"seqused_q": ints(*used_q), "seqused_k": ints(*used_k)}
    q, k, v = (strided(data, sum(n), h, D) for n, h in ((n_q, H), (n_k, Hkv), (n_k, Hkv)))
    slopes, given = some_slopes(data, H, len(rows)), [k, v]
    if layout == "pages":
        more = {"block_table": torch.randperm(2 * len(rows)).view(-1, 2).int()}
        given = [paged(torch.stack([F.pad(row, (0, 0, 0, 0, 0, 2 * SIZE - len(row)), value=math.nan)
                                    for row in t.split(n_k)]), more["block_table"]) for t in given]
    ends = ints(0, *n_q).cumsum(0).int(), ints(0, *n_k).cumsum(0).int(), 9, 9
    options = options | more | {"alibi_slopes": slopes}
    out, L, _ = nanoattn.flash_attn_varlen_func(q, *given, *ends, return_attn_probs=True, **options)
    wants, parts = [], zip(q.split(n_q), k.split(n_k), v.split(n_k), strict=True)
    for b, (Q, K, V) in enumerate(parts):
        n, m = used_q[b], used_k[b]
        want, want_L = attended(Q[:n], K[:m], V[:m], left, right, of_row(slopes, b))
        want_L = F.pad(want_L, (0, len(Q) - n), value=-math.inf)
        wants.append((F.pad(want, (0, 0, 0, 0, 0, len(Q) - n)), want_L))
    exact = torch.cat([want for want, _ in wants])
    close(out, exact)
    close(L, torch.cat([want for _, want in wants], dim=1))
    if layout != "pages":
        same_gradients(out, exact, [q, k, v], [q, k, v])
        packed = torch.stack((k, v), dim=1)
        if layout == "tokens":
            close(nanoattn.flash_attn_varlen_kvpacked_func(q, packed, *ends, **options), exact)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=3),
       st.integers(1, 4), st.integers(0, 6), st.integers(0, 4), sides,
       st.sampled_from(["rows", "pads", "pages"]), st.data())
def test_a_cache_with_rotary_and_padding(rows, Tq, n_new, R, sides, layout, data) -> None:
    """Rows of other lengths, first slots, places, positions and slopes; nothing else is written,
    and what is not seen may be NaN, and its page absent."""
    left, right, options = sides
    B, draw = len(rows), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    lengths, pads = [n for n, _ in rows], [min(pad, n) * (layout == "pads") for n, pad in rows]
    q, k, v = (torch.randn(B, n, h, D, generator=draw)
               for n, h in ((Tq, 4), (n_new, 2), (n_new, 2)))
    cos, sin = torch.randn(2, 40, max(R, 1), generator=draw)
    interleaved, lse = data.draw(st.booleans()), data.draw(st.booleans())
    own = data.draw(st.sampled_from([None, [7] * B, [*range(3, 3 + B)]]))
    where, slopes = [*range(B)], some_slopes(data, 4, B)
    options = options | {"cache_seqlens": ints(*lengths), "return_softmax_lse": lse}
    options |= {"alibi_slopes": slopes}
    if rotate := bool(R and n_new):
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": interleaved,
                    "rotary_seqlens": None if own is None else ints(*own)}
    if layout == "pads":
        options["cache_leftpad"] = ints(*pads)
    if layout == "rows":
        where = data.draw(st.permutations(range(B + 1)))[:B]
        options["cache_batch_idx"] = ints(*where)
    caches = [torch.full((B + 1, S, 2, D), math.nan) for _ in range(2)]
    for t in caches:
        for b, row in enumerate(where):
            t[row, pads[b] : lengths[b]] = torch.randn(lengths[b] - pads[b], 2, D, generator=draw)
    written, table = [t.clone() for t in caches], torch.randperm(3 * B, generator=draw).view(B, 3)
    if layout == "pages":
        written = [paged(t[:B], table) for t in caches]
        options["block_table"] = seen = table.int()
        for b, n in enumerate(lengths if left is not None else ()):
            seen[b, : max(0, min(n, n + n_new - Tq - left)) // SIZE] = -1
    got = nanoattn.flash_attn_with_kvcache(q, *written, *((k, v) if n_new else ()), **options)
    out, L = got if lse else (got, None)
    if layout == "pages":
        written = [t[table].flatten(1, 2) for t in written]
    for b, row in enumerate(where):
        ks, vs = (t[row].double() for t in caches)
        first, new, queries = lengths[b] if own is None else own[b], k[b].double(), q[b].double()
        if rotate:
            new = turned(k[b], cos, sin, [first + n for n in range(n_new)], interleaved)
            moves = (left, right) != (None, None)
            queries = turned(q[b], cos, sin, [first + n * moves for n in range(Tq)], interleaved)
        end = lengths[b] + n_new
        ks[lengths[b] : end], vs[lengths[b] : end] = new, v[b].double()
        keys = slice(pads[b], end)
        want, want_L = attended(queries, ks[keys], vs[keys], left, right, of_row(slopes, b))
        close(out[b], want)
        if L is not None:
            close(L[b], want_L)
        for got_cache, exact in ((written[0], ks), (written[1], vs)):
            torch.testing.assert_close(got_cache[row].double(), exact, atol=1e-5, rtol=1e-5,
                                       equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=3),
       st.booleans(), st.integers(1, 4), st.booleans(), st.booleans())
def test_apply_rotary_emb(rows, interleaved, R, inplace, leaf) -> None:
    """Sequences of different lengths and offsets, and the gradient, also of a leaf in place."""
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


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), heads, st.booleans(), st.sampled_from([None, 64.0]),
       st.sampled_from(["qkv", "heads", "q and kv"]), st.integers(0, 5) | st.none())
def test_rotary_embedding(T, heads, interleaved, scale_base, layout, offset) -> None:
    """Tables that grow, offsets of each row, in place, and xPos, where tables of k are inverse."""
    H, Hkv = (heads[1], heads[1]) if layout == "qkv" else heads
    module = nanoattn.compat.rotary.RotaryEmbedding(6, 100.0, interleaved, scale_base)
    first = ints(1, 4) if offset is None else ints(offset, offset)
    options = {"seqlen_offset": first if offset is None else offset}
    options |= {"max_seqlen": T + 4} if offset is None else {}
    for n in (1, T):
        x = torch.randn(2, n, H + 2 * Hkv, D)
        leaf = x.clone().requires_grad_()
        if layout == "heads":
            out = module(leaf, num_heads_q=H, **options)
        elif layout == "qkv":
            out = module(leaf.unflatten(2, (3, H)), **options).flatten(2, 3)
        else:
            q, kv = leaf.split((H, 2 * Hkv), dim=2)
            q, kv = module(q, kv.unflatten(2, (2, Hkv)), **options)
            out = torch.cat((q, kv.flatten(2, 3)), dim=2)
        length = T + 4 if offset is None else n + offset
        angle = torch.outer(torch.arange(length), 100.0 ** -(torch.arange(3) / 3))
        scale = torch.ones(length, 1)
        if scale_base:
            power = (torch.arange(length) - length // 2) / scale_base
            scale = ((torch.arange(3) / 3 + 0.4) / 1.4) ** power[:, None]
        q, k, v = x.split((H, Hkv, Hkv), dim=2)
        for b in range(2):
            at = torch.arange(n) + first[b]
            want = [turned(t[b], angle.cos() * m, angle.sin() * m, at, interleaved)
                    for t, m in ((q, scale), (k, 1 / scale))]
            close(out[b], torch.cat([*want, v[b].double()], dim=1))
        close(leaf, out.detach().double())
        assert torch.autograd.grad(out.sum(), leaf)[0][:, :, -Hkv:].eq(1).all()


X = torch.randn(2, 6, 2, D)
C = torch.ones(6, 4)


@pytest.mark.parametrize("name, options", [
    ("rotary_cos", {"rotary_cos": C, "rotary_sin": C}),  # nothing new to rotate
    ("rotary_sin", {"k": X[:, :1], "v": X[:, :1], "rotary_cos": C}),
    ("rotary_sin", {"k": X[:, :1], "v": X[:, :1], "rotary_cos": C, "rotary_sin": C[:, :3]}),
    ("rotary_cos", {"k": X[:, :1], "v": X[:, :1], "rotary_cos": torch.ones(6, 5),
                    "rotary_sin": torch.ones(6, 5)}),
    ("rotary_cos", {"k": X[:, :2], "v": X[:, :2], "rotary_cos": C[:4], "rotary_sin": C[:4]}),
    ("cache_leftpad", {"cache_leftpad": ints(0, 4)}),
    ("cache_leftpad", {"cache_leftpad": ints(0, 1), "block_table": ints([0], [1])}),
    ("alibi_slopes", {"alibi_slopes": torch.ones(3)}),
    ("alibi_slopes", {"alibi_slopes": torch.ones(2, dtype=torch.float64)}),
    ("alibi_slopes", {"alibi_slopes": torch.ones(2, requires_grad=True)}),
    ("qv", {"qv": X}), ("k_descale", {"k_descale": torch.ones(2, 2)}),
    ("attention_chunk", {"attention_chunk": 4}), ("cu_seqlens_q", {"cu_seqlens_q": ints(0, 1)}),
])
def test_what_a_cache_cannot_is_refused_by_name_and_nothing_is_written(name, options) -> None:
    caches, options = (X.clone(), X.clone()), {"cache_seqlens": ints(3, 3)} | options
    with pytest.raises(ValueError, match=name):
        nanoattn.flash_attn_with_kvcache(X, *caches, causal=True, **options)
    assert torch.equal(caches[0], X) and torch.equal(caches[1], X)


@pytest.mark.parametrize("name", ["auto", "sdpa_flash", "tiled", "triton"])
def test_dropout_with_the_log_sum_exp(name) -> None:
    """L is that of all keys; kept weights are doubled, and the gradient has the same mask."""
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
    with pytest.raises(ValueError, match="dropout_p"):
        nanoattn.use("sdpa_flash", nanoattn.Policy(fallback=False))
        nanoattn.flash_attn_func(q, k, v, 0.5, causal=True, return_attn_probs=True)


@pytest.mark.parametrize("Tq, Tk", [(1, 300), (301, 301), (300, 280)])
def test_the_log_sum_exp_of_a_long_causal_call(Tq, Tk) -> None:
    """A kernel is proved at such a length, too, where a ring has no parts."""
    nanoattn.use("auto")
    q, k = torch.randn(1, Tq, 1, 8), torch.randn(1, Tk, 1, 8)
    out, L, _ = nanoattn.flash_attn_func(q, k, k, causal=True, return_attn_probs=True)
    want, want_L = attended(q[0], k[0], k[0], None, 0)
    close(out[0], want)
    close(L[0], want_L)


def test_the_report_names_each_kind_its_kernel_and_what_was_refused() -> None:
    assert "sdpa" in str(nanoattn.use("sdpa"))
    assert "no call" in nanoattn.report()
    for _ in range(2):
        nanoattn.flash_attn_func(X, X, X, softmax_scale=np.float32(0.3))
    nanoattn.flash_attn_with_kvcache(X, X, X, softmax_scale=0.3)
    nanoattn.flash_attn_func(X, X, X, causal=True, return_attn_probs=True)
    torch.compile(nanoattn.flash_attn_func, backend="eager")(X, X, X)
    plain, lse, traced = nanoattn.report().split("\nheads")
    assert "sdpa" in plain and "3 calls" in plain
    assert "sdpa requested" in lse and "lse" in lse
    assert "traced" in traced


def test_a_compiled_function_has_calls_of_several_kinds() -> None:
    """In one graph, with sizes that change; rotated in place with offsets in a tensor."""
    nanoattn.use("auto")
    cos, sin = torch.randn(2, 40, 3)

    def f(x: Tensor, slopes: Tensor, first: Tensor) -> Tensor:
        x = nanoattn.compat.rotary.apply_rotary_emb(x, cos, sin, inplace=True, seqlen_offsets=first)
        some = nanoattn.flash_attn_func(x, x[:, :4], x[:, :4], alibi_slopes=slopes,
                                        window_size=(3, 2))
        return some + nanoattn.flash_attn_qkvpacked_func(torch.stack((x, x, x), 2), causal=True)

    compiled = torch.compile(f, backend="eager", fullgraph=True)
    for B, T in ((2, 5), (2, 7), (3, 9)):
        x, slopes, first = torch.randn(B, T, 2, D), torch.rand(B, 2), torch.arange(B)
        other = x.clone()
        torch.testing.assert_close(compiled(x, slopes, first), f(other, slopes, first))
        assert torch.equal(x, other)


# As a new user writes it: an attention layer with rotary embeddings, ALiBi in another, a cache.
PROGRAM = """
import nanoattn
nanoattn.as_flash_attn()
import math, torch
from torch import nn
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.ops.triton.rotary import apply_rotary

class RotaryAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        self.rotary = RotaryEmbedding(self.head_dim)

    def forward(self, x):
        qkv = self.rotary(self.wqkv(x).unflatten(2, (-1, self.head_dim)), num_heads_q=self.heads)
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        return self.wo(flash_attn_func(q, k, v, causal=True).flatten(2))

    def decode(self, x, cache, lengths):
        qkv = self.wqkv(x).unflatten(2, (-1, self.head_dim))
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=2)
        self.rotary._update_cos_sin_cache(cache.shape[2], device=x.device, dtype=x.dtype)
        out = flash_attn_with_kvcache(
            q, *cache, k, v, rotary_cos=self.rotary._cos_cached, rotary_sin=self.rotary._sin_cached,
            cache_seqlens=lengths, causal=True, rotary_interleaved=False)
        lengths += x.shape[1]
        return self.wo(out.flatten(2))

class AlibiAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.wqkv = heads, nn.Linear(dim, 3 * dim)
        self.register_buffer("slopes", 2.0 ** (-8 / heads * torch.arange(1, heads + 1)))

    def forward(self, x):
        qkv = self.wqkv(x).unflatten(2, (3, self.heads, -1))
        return flash_attn_qkvpacked_func(qkv, causal=True, alibi_slopes=self.slopes).flatten(2)

torch.manual_seed(0)
layer, alibi, x = RotaryAttention(64, 4, 2), AlibiAttention(64, 4), torch.randn(2, 12, 64)
full = layer(x)
full.square().sum().backward()
cache, lengths = torch.zeros(2, 2, 64, 2, 16), torch.zeros(2, dtype=torch.int32)
steps = [layer.decode(t, cache, lengths) for t in x.split([5, 1, 1, 5], dim=1)]
torch.testing.assert_close(torch.cat(steps, 1), full.detach(), atol=1e-5, rtol=1e-4)
q, k, v = alibi.wqkv(x).unflatten(2, (3, 4, -1)).permute(2, 0, 3, 1, 4)
i = torch.arange(12)
bias = (-alibi.slopes[:, None, None] * (i[:, None] - i)).masked_fill(i > i[:, None], -math.inf)
want = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
torch.testing.assert_close(alibi(x), want.transpose(1, 2).flatten(2), atol=1e-5, rtol=1e-4)
print("ran")
"""


@pytest.mark.slow
def test_a_module_written_for_flash_attn_runs_unchanged(tmp_path) -> None:
    ran = run_program(PROGRAM, tmp_path)
    assert ran.stdout == "ran\n", ran.stderr
