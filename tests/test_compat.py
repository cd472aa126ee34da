"""FlashAttention's API: signatures, rotary embeddings, padded caches, ALiBi, and the report."""

from __future__ import annotations

import inspect
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
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


# --- the same in float64, a token at a time ---


def turned(x: Tensor, cos: Tensor, sin: Tensor, position: int, interleaved: bool) -> Tensor:
    """x (H, D) of the token at a position: pairs of dimensions are complex numbers."""
    R, x = cos.shape[1], x.double().clone()
    a = torch.arange(R) * 2 if interleaved else torch.arange(R)
    b = a + 1 if interleaved else a + R
    z = torch.complex(x[:, a], x[:, b])
    z = z * torch.complex(cos[position].double(), sin[position].double())
    x[:, a], x[:, b] = z.real, z.imag
    return x


def attended(q: Tensor, ks: Tensor, vs: Tensor, left: int | None, right: int | None,
             slopes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """out (Tq, H, D) and the log-sum-exp (H, Tq) of q (Tq, H, D), ks and vs (Tk, Hkv, D)."""
    (Tq, H, D), (Tk, Hkv, _) = q.shape, ks.shape
    out, L = torch.zeros(Tq, H, D).double(), torch.full((H, Tq), -math.inf).double()
    for i in range(Tq):
        at = i + Tk - Tq
        seen = [j for j in range(Tk) if (left is None or j >= at - left)
                and (right is None or j <= at + right)]
        for h in range(H if seen else 0):
            scores = ks[seen, h // (H // Hkv)].double() @ q[i, h].double() / math.sqrt(D)
            if slopes is not None:
                scores = scores - float(slopes[h]) * (at - torch.tensor(seen)).abs()
            L[h, i] = scores.logsumexp(0)
            out[i, h] = scores.softmax(0) @ vs[seen, h // (H // Hkv)].double()
    return out, L


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-4)


S, D = 24, 8
SIDES = [(None, None, {}), (None, 0, {"causal": True}), (3, 2, {"window_size": (3, 2)}),
         (4, 0, {"causal": True, "window_size": (4, 0)})]
ALIBI = nanoattn.BACKENDS["manual"].caps[0].alibi
rows = st.lists(st.tuples(st.integers(0, 14), st.integers(0, 14)), min_size=1, max_size=3)


def some_slopes(B: int) -> Any:
    return st.sampled_from([None, torch.rand(4), torch.rand(B, 4)] if ALIBI else [None])


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(1, 4), st.integers(0, 6), st.integers(0, 4), st.sampled_from(SIDES),
       st.sampled_from(["", "rows", "pads", "pages"]), st.data())
def test_a_cache_with_rotary_and_padding(rows, Tq, n_new, R, sides, layout, data) -> None:
    """Rows of other lengths, first slots, places, positions and slopes; nothing else is written."""
    nanoattn.use("auto")
    left, right, options = sides
    B, draw = len(rows), torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    lengths, pads = [n for n, _ in rows], [min(pad, n) * (layout == "pads") for n, pad in rows]
    q, k, v = (torch.randn(B, n, h, D, generator=draw)
               for n, h in ((Tq, 4), (n_new, 2), (n_new, 2)))
    caches = [torch.randn(B + 1, S, 2, D, generator=draw) for _ in range(2)]
    cos, sin = torch.randn(2, 40, max(R, 1), generator=draw)
    interleaved, lse = data.draw(st.booleans()), data.draw(st.booleans())
    own = data.draw(st.sampled_from([None, [7] * B, [*range(3, 3 + B)]]))
    where, slopes = [*range(B)], data.draw(some_slopes(B))
    # Between causal and full, ALiBi has no queries before every key.
    assume(slopes is None or right != 2 or min(lengths) + n_new - max(pads) >= Tq)
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
    written, table = [t.clone() for t in caches], torch.randperm(3 * B, generator=draw).view(B, 3)
    if layout == "pages":
        options["block_table"] = table.int()
        order = table.flatten().argsort()
        written = [t[:B].unflatten(1, (3, SIZE)).flatten(0, 1)[order] for t in caches]
    got = nanoattn.flash_attn_with_kvcache(q, *written, *((k, v) if n_new else ()), **options)
    out, L = got if lse else (got, None)
    if layout == "pages":
        written = [t[table].flatten(1, 2) for t in written]
    for b, row in enumerate(where):
        ks, vs = (t[row].double() for t in caches)
        first, queries = lengths[b] if own is None else own[b], q[b].double()
        for n in range(n_new):
            new = turned(k[b, n], cos, sin, first + n, interleaved) if rotate else k[b, n].double()
            ks[lengths[b] + n], vs[lengths[b] + n] = new, v[b, n].double()
        if rotate:
            moves = (left, right) != (None, None)
            queries = torch.stack([turned(x, cos, sin, first + i * moves, interleaved)
                                   for i, x in enumerate(q[b])])
        seen = slice(pads[b], lengths[b] + n_new)
        m = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        want, want_L = attended(queries, ks[seen], vs[seen], left, right, m)
        close(out[b], want)
        if L is not None:
            close(L[b], want_L)
        close(written[0][row], ks)
        close(written[1][row], vs)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=4),
       st.sampled_from(SIDES), st.data())
def test_varlen_with_used_lengths_and_slopes(rows, sides, data) -> None:
    nanoattn.use("auto")
    left, right, options = sides
    qs, ks = ([a for a, *_ in rows], [c for _, _, c, _ in rows])
    used_q, used_k = [min(a, b) for a, b, *_ in rows], [min(c, d) for *_, c, d in rows]
    slopes = data.draw(some_slopes(len(rows)))
    assume(slopes is None or right != 2 or all(n <= m for n, m in zip(used_q, used_k)))
    q, k, v = (torch.randn(sum(n), h, D) for n, h in ((qs, 4), (ks, 2), (ks, 2)))
    out, L, _ = nanoattn.flash_attn_varlen_func(
        q, k, v, ints(0, *qs).cumsum(0).int(), ints(0, *ks).cumsum(0).int(), 9, 9,
        seqused_q=ints(*used_q), seqused_k=ints(*used_k), alibi_slopes=slopes,
        return_attn_probs=True, **options)
    parts = zip(out.split(qs), L.split(qs, 1), q.split(qs), k.split(ks), v.split(ks), strict=True)
    for b, (got, got_L, *qkv) in enumerate(parts):
        n, m = used_q[b], used_k[b]
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        want = attended(qkv[0][:n], qkv[1][:m], qkv[2][:m], left, right, own)
        close(got[:n], want[0])
        close(got_L[:, :n], want[1])
        assert not got[n:].any() and (got_L[:, n:] == -math.inf).all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 20)), min_size=1, max_size=3),
       st.booleans(), st.integers(1, 4), st.booleans())
def test_apply_rotary_emb(rows, interleaved, R, inplace) -> None:
    """Sequences of different lengths and offsets, and the gradient: the rotation backwards."""
    rotary, lengths = nanoattn.compat.rotary, [n for n, _ in rows]
    x, dout = torch.randn(2, sum(lengths), 3, D, dtype=torch.float64)
    angle = torch.rand(30, R, dtype=torch.float64) * 6
    cos, sin, offsets = angle.cos(), angle.sin(), ints(*(start for _, start in rows))
    at = [start + n for many, start in rows for n in range(many)]
    leaf = x.clone().requires_grad_()
    given = leaf * 1
    out = rotary.apply_rotary_emb(given, cos, sin, interleaved, inplace, offsets,
                                  ints(0, *lengths).cumsum(0).int(), 6)
    assert (out is given) == inplace
    want = [turned(t, cos, sin, p, interleaved) for t, p in zip(x, at, strict=True)]
    back = [turned(t, cos, -sin, p, interleaved) for t, p in zip(dout, at, strict=True)]
    (grad,) = torch.autograd.grad(out, leaf, dout)
    for got, right in ((out.detach(), want), (grad, back)):
        torch.testing.assert_close(got, torch.stack(right) if right else got)
    qkv = torch.randn(2, 5, 8, D, dtype=torch.float64)  # 4 query heads, 2 key and value heads
    q, k = (rotary.apply_rotary_emb(t, cos, sin, interleaved, seqlen_offsets=3)
            for t in (qkv[:, :, :4], qkv[:, :, 4:6]))
    got = rotary.apply_rotary_emb_qkv_(qkv.clone(), cos, sin, interleaved=interleaved,
                                       seqlen_offsets=3, num_heads_q=4)
    assert torch.equal(got, torch.cat((q, k, qkv[:, :, 6:]), dim=2))


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
    assert f": {name if name in ('tiled', 'triton') else 'tiled'} (" in nanoattn.report()
    with pytest.raises(ValueError, match="dropout_p"):
        nanoattn.use("sdpa_flash", nanoattn.Policy(fallback=False))
        nanoattn.flash_attn_func(q, k, v, 0.5, causal=True, return_attn_probs=True)


def test_the_report_names_each_kind_its_kernel_and_what_was_refused() -> None:
    assert "sdpa" in str(nanoattn.use("sdpa"))
    assert "no call" in nanoattn.report()
    for _ in range(2):
        nanoattn.flash_attn_func(X, X, X, softmax_scale=np.float32(0.3))
    nanoattn.flash_attn_with_kvcache(X, X, X, softmax_scale=0.3)
    nanoattn.flash_attn_func(X, X, X, causal=True, return_attn_probs=True)
    torch.compile(nanoattn.flash_attn_func, backend="eager")(X, X, X)
    plain, lse, traced = nanoattn.report().split("\n")
    assert "sdpa" in plain and "3 calls" in plain
    assert "sdpa refused" in lse and "lse" in lse
    assert "traced" in traced


# As a new user writes it: an attention layer with rotary embeddings, ALiBi in another, a cache.
PROGRAM = """
import nanoattn
nanoattn.as_flash_attn()
import math, torch
from torch import nn
from flash_attn import flash_attn_func, flash_attn_with_kvcache
from flash_attn.flash_attn_interface import flash_attn_qkvpacked_func
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_

class RotaryAttention(nn.Module):
    def __init__(self, dim, heads, kv_heads, max_len=64):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wqkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        freqs = 10000 ** -(torch.arange(0, self.head_dim, 2) / self.head_dim)
        angles = torch.outer(torch.arange(max_len).float(), freqs)
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())

    def split(self, x):
        sizes = self.heads, self.kv_heads, self.kv_heads
        return self.wqkv(x).unflatten(2, (-1, self.head_dim)).split(sizes, dim=2)

    def forward(self, x):
        q, k, v = self.split(x)
        q = apply_rotary_emb(q, self.cos, self.sin)
        k = apply_rotary_emb(k, self.cos, self.sin)
        return self.wo(flash_attn_func(q, k, v, causal=True).flatten(2))

    def decode(self, x, cache, lengths):
        q, k, v = self.split(x)
        out = flash_attn_with_kvcache(
            q, *cache, k, v, rotary_cos=self.cos, rotary_sin=self.sin, cache_seqlens=lengths,
            causal=True, rotary_interleaved=False)
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
@pytest.mark.skipif(not ALIBI, reason="no kernel has ALiBi")
def test_a_module_written_for_flash_attn_runs_unchanged(tmp_path) -> None:
    ran = run_program(PROGRAM, tmp_path)
    assert ran.stdout == "ran\n", ran.stderr
