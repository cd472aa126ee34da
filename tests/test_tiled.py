"""tiled.py beyond the matrix of test_attention.py: tile sizes, memory, skipping, trace, dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import BACKENDS, Spec, oracle, probe, tiled, visible
from attention.spec import DTYPES
from attention.tiled import Tiled
from viewer import tiles as shown

# Tq, Tk, H, Hkv, window, whether there are segments
SHAPES = {
    "square": (37, 37, 2, 2, None, False),
    "chunk-gqa-window-packed": (21, 50, 4, 2, 11, True),
    "blind-mqa-packed": (40, 23, 3, 1, None, True),
    "decode-window": (1, 40, 2, 1, 9, False),
}
MORE = {"scale": 0.5, "softcap": 1.5, "sinks": True}
SIZES = [(1, 1), (3, 3), (16, 16), (64, 64), (5, 16), (16, 7), (1, 64)]


def draw(shape: str, dtype: torch.dtype = torch.float64, B: int = 2, D: int = 8) -> Any:
    """q, k, v, the gradient of out; segments; Spec."""
    Tq, Tk, H, Hkv, window, segmented = SHAPES[shape]
    generator = torch.Generator().manual_seed(Tq)
    inputs = [
        torch.randn(B, T, h, D, generator=generator, dtype=torch.float64).to(dtype)
        for T, h in ((Tq, H), (Tk, Hkv), (Tk, Hkv), (Tq, H))
    ]
    borders = torch.arange(B)[:, None] + torch.tensor([Tk // 3, Tk // 2])
    seg = (torch.arange(Tk) >= borders[:, :, None]).sum(dim=1).int() if segmented else None
    spec = Spec(H, Hkv, D, str(dtype).removeprefix("torch."), window=window, segments=segmented)
    return inputs, seg, spec


def sinks_of(spec: Spec, dtype: torch.dtype = torch.float64) -> Tensor:
    """As large as the logsumexp of some ten scores."""
    draw_ = torch.Generator().manual_seed(1)
    return (2 + torch.randn(spec.n_head, generator=draw_, dtype=torch.float64)).to(dtype)


def both_passes(inputs: list[Tensor], seg: Tensor | None, spec: Spec, B_r: int, B_c: int,
                sinks: Tensor | None = None) -> list[Tensor]:  # fmt: skip
    leaves = [t.detach().requires_grad_() for t in (*inputs[:3], sinks) if t is not None]
    q, k, v, sink = *leaves, *[None] * (sinks is None)
    out = Tiled.apply(q, k, v, sink, seg, spec, 0, B_r, B_c)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


def trace_of(inputs: list[Tensor], seg: Tensor | None, spec: Spec, B_r: int,
             B_c: int) -> list[SimpleNamespace]:  # fmt: skip
    """The whole grid of tiles, with the bytes of one sequence."""
    q, k, v = inputs[:3]
    trace, _ = shown.trace_of(q, k, v, spec, seg, B_r=B_r, B_c=B_c)
    grid = shown.steps(trace, spec, q.shape[1], k.shape[1], B_r, B_c)
    return [SimpleNamespace(**step) for step in grid]


def causal(Tq: int, Tk: int, window: int | None = None) -> Any:
    q, k = torch.randn(1, Tq, 2, 4), torch.randn(1, Tk, 2, 4)
    return [q, k, k, q], None, Spec(2, 2, 4, "float32", window=window)


# --- numbers ---


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile_size_gives_the_numbers_of_the_oracle(shape, dtype) -> None:
    inputs, seg, spec = draw(shape, getattr(torch, dtype))
    truth = oracle.attention(*inputs, window=spec.window, segments=seg)
    plain = oracle.plain(*inputs, window=spec.window, segments=seg)
    for B_r, B_c in SIZES:
        got = oracle.Result(*both_passes(inputs, seg, spec, B_r, B_c))
        oracle.check(got, plain, truth, getattr(torch, dtype))


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_scale_softcap_and_sinks_at_every_tile_size(dtype) -> None:
    shape = "blind-mqa-packed"
    inputs, seg, spec = draw(shape, getattr(torch, dtype))
    sinks = sinks_of(spec, getattr(torch, dtype))
    options = {"segments": seg, "scale": 0.5, "softcap": 1.5, "sinks": sinks}
    truth, plain = (f(*inputs, **options) for f in (oracle.attention, oracle.plain))
    for B_r, B_c in SIZES:
        got = oracle.Result(*both_passes(inputs, seg, replace(spec, **MORE), B_r, B_c, sinks))
        oracle.check(got, plain, truth, getattr(torch, dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("more", [{}, MORE], ids=["", "more"])
def test_gradients_against_finite_differences(shape, p, more) -> None:
    """With dropout too: the seed is fixed, so the forward passes and the backward share a mask."""
    inputs, seg, spec = draw(shape, B=1, D=2)
    spec = replace(spec, head_dim=2, dropout=p, **more)
    leaves = [t.requires_grad_() for t in (*inputs[:3], *([sinks_of(spec)] if more else []))]

    def call(seg: Tensor | None, *tiles: int) -> Any:
        def tiled_(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            return Tiled.apply(q, k, v, sinks, seg, spec, 7, *tiles)

        return tiled_

    assert torch.autograd.gradcheck(call(seg, 16, 9), leaves, fast_mode=True)
    # Every entry of the Jacobian.
    short = [(t[:, -6:] if t.dim() == 4 else t).detach().requires_grad_() for t in leaves]
    assert torch.autograd.gradcheck(call(seg if seg is None else seg[:, -6:], 4, 3), short)


@pytest.mark.parametrize("shape", ["square", "blind-mqa-packed"])
def test_a_sink_of_minus_infinity_is_none_and_rows_that_see_nothing_move_none(shape) -> None:
    inputs, seg, spec = draw(shape, torch.float32)
    without, spec = both_passes(inputs, seg, spec, 8, 8), replace(spec, sinks=True)
    none = torch.full((spec.n_head,), -torch.inf)
    *same, dsinks = both_passes(inputs, seg, spec, 8, 8, none)
    assert all(torch.equal(a, b) for a, b in zip(same, without, strict=True)) and not dsinks.any()
    blind = max(inputs[0].shape[1] - inputs[1].shape[1], 0)
    inputs[3][:, blind:] = 0
    assert not both_passes(inputs, seg, spec, 8, 8, sinks_of(spec))[4].any()


@pytest.mark.parametrize("of_q, of_sinks", [("bfloat16", "float32"), ("float32", "bfloat16"),
                                            ("float64", "float16")])  # fmt: skip
def test_sinks_of_another_dtype_are_used_in_the_precision_of_the_softmax(of_q, of_sinks) -> None:
    inputs, seg, spec = draw("square", getattr(torch, of_q))
    spec, inside = replace(spec, sinks=True), torch.promote_types(inputs[0].dtype, torch.float32)
    sinks = sinks_of(spec, getattr(torch, of_sinks)) + 2**-7
    got = both_passes(inputs, seg, spec, 16, 16, sinks)
    want = both_passes(inputs, seg, spec, 16, 16, sinks.to(inside))
    assert torch.equal(got[4], want[4].to(sinks.dtype)) and got[4].dtype == sinks.dtype
    assert all(torch.equal(g, w) for g, w in zip(got[:4], want[:4], strict=True))


def test_the_probe_passes_it_with_scale_softcap_and_sinks() -> None:
    for dtype in DTYPES:
        for spec in (Spec(4, 2, 32, dtype, **MORE), Spec(4, 2, 32, dtype, grad=False, **MORE)):
            assert probe(BACKENDS["tiled"], spec, "cpu").why == ()


def test_half_precision_is_summed_in_float32() -> None:
    """256 key blocks, or query blocks, of one row differ from a single one by a rounding or two."""
    draw_ = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 256, 1, 8, generator=draw_).bfloat16() for _ in range(4)]
    spec, eps = Spec(1, 1, 8, "bfloat16"), torch.finfo(torch.bfloat16).eps
    whole = both_passes(inputs, None, spec, 256, 256)
    for B_r, B_c in ((256, 1), (1, 256)):
        for many, one in zip(both_passes(inputs, None, spec, B_r, B_c), whole, strict=True):
            torch.testing.assert_close(many, one, rtol=eps, atol=0.4 * eps)


def test_p_and_ds_are_rounded_to_the_dtype_of_the_inputs() -> None:
    """As by kernels on tensor cores. By the formulas, with and without: few of 256 may differ."""
    draw_ = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 32, 1, 8, generator=draw_).bfloat16() for _ in range(4)]
    got = [t[0, :, 0] for t in both_passes(inputs, None, Spec(1, 1, 8, "bfloat16"), 32, 32)]
    q, k, v, dout = (t[0, :, 0].float() for t in inputs)
    i = torch.arange(32)
    s = (q @ k.T / 8**0.5).masked_fill(~visible(i[:, None], i), -torch.inf)
    e = torch.exp(s - s.amax(dim=1, keepdim=True))
    p = torch.exp(s - torch.logsumexp(s, dim=1, keepdim=True))
    ds = p * (dout @ v.T - (dout * got[0].float()).sum(dim=1, keepdim=True))
    different = {}
    for rounded in (True, False):
        e_, p_, ds_ = (t.bfloat16().float() if rounded else t for t in (e, p, ds))
        want = [e_ @ v / e.sum(dim=1, keepdim=True), ds_ @ k / 8**0.5, ds_.T @ q / 8**0.5,
                p_.T @ dout]  # fmt: skip
        different[rounded] = [int((g != w.bfloat16()).sum()) for g, w in zip(got, want)]
    assert max(different[True]) <= 5 and min(different[False]) > 20


def test_float32_products_stay_float32_under_autocast() -> None:
    inputs, seg, spec = draw("square", torch.float32)
    want = both_passes(inputs, seg, spec, 16, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = both_passes(inputs, seg, spec, 16, 16)
    assert all(torch.equal(g, w) for g, w in zip(got, want))


# --- memory ---


class Recorder(TorchDispatchMode):
    """The largest tensor that any operator gives, and how many products there are."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.products = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        self.products += func is torch.ops.aten.bmm.default
        return result


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_no_tensor_is_larger_than_the_inputs(p) -> None:
    """O(T): out and dq have T * H * D entries, and no intermediate has more."""
    for T in (128, 256, 512):
        qkv = [torch.randn(1, T, 2, 4, requires_grad=True) for _ in range(3)]
        spec = Spec(2, 2, 4, "float32", dropout=p)
        with Recorder() as forward:
            out = Tiled.apply(*qkv, None, None, spec, 0, 16, 16)
        with Recorder() as backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert forward.largest == backward.largest == T * 2 * 4 < T * T


def test_the_recorder_sees_what_manual_holds() -> None:
    from attention import manual

    q = torch.randn(1, 64, 2, 4)
    with Recorder() as forward:
        manual.attend(q, q, q, Spec(2, 2, 4, "float32"))
    assert forward.largest == 2 * 64 * 64


def test_what_is_kept_for_the_backward_pass() -> None:
    inputs, _, spec = draw("square")
    q, k, v = (t.requires_grad_() for t in inputs[:3])
    out = tiled.attend(q, k, v, spec)
    *kept, L, sinks, segments = out.grad_fn.saved_tensors
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(kept, (q, k, v, out), strict=True))
    assert L.numel() == 2 * 37 * 2 and sinks is segments is None


# --- tiles that are skipped ---


@pytest.mark.parametrize("n", [1, 2, 5])
def test_causal_skips_all_above_the_diagonal(n) -> None:
    tiles = trace_of(*causal(n * 8, n * 8), 8, 8)
    assert len(tiles) == n * n and sum(t.skipped for t in tiles) == n * (n - 1) // 2
    assert all(t.skipped == (t.j > t.i) for t in tiles)


@pytest.mark.parametrize("w", [1, 2, 4])
def test_a_window_of_w_tiles_visits_w_plus_one_a_row(w) -> None:
    """A window of w * 8 keys: the first row of a block reaches into the w-th block before it."""
    tiles = trace_of(*causal(48, 48, window=w * 8), 8, 8)
    visited = [sum(not t.skipped for t in tiles if t.i == i) for i in range(6)]
    assert visited == [min(i, w) + 1 for i in range(6)]


@pytest.mark.parametrize("Tq, Tk, window", [
    (23, 23, None), (23, 23, 1), (23, 23, 6), (9, 31, None), (9, 31, 5), (31, 9, None), (31, 9, 4),
    (1, 31, 3)])  # fmt: skip
def test_skipped_is_what_has_no_visible_pair(Tq, Tk, window) -> None:
    """Nothing more and nothing less, in both passes: 2 products a tile forward, 5 backward."""
    for B_r, B_c in product((1, 5, 8, 40), repeat=2):
        inputs, seg, spec = causal(Tq, Tk, window)
        tiles = trace_of(inputs, seg, spec, B_r, B_c)
        assert len(tiles) == -(-Tq // B_r) * -(-Tk // B_c)
        for t in tiles:
            rows = range(t.i * B_r, min((t.i + 1) * B_r, Tq))
            cols = range(t.j * B_c, min((t.j + 1) * B_c, Tk))
            seen = any(visible(i, j, Tk - Tq, window) for i in rows for j in cols)
            assert t.skipped == (not seen)
        visited = sum(not t.skipped for t in tiles)
        with Recorder() as seen_by:
            both_passes(inputs, seg, spec, B_r, B_c)
        assert seen_by.products == (2 + 5) * visited


def test_masking_is_left_out_only_where_all_is_visible() -> None:
    for window in (None, 7):
        for I, J in product(tiled.blocks(23, 4), tiled.blocks(31, 3)):
            S_ij = torch.zeros(I.stop - I.start, J.stop - J.start)
            seen = tiled.masked(S_ij, I, J, 31 - 23, window, None) == 0
            want = [[visible(i, j, 8, window) for j in range(J.start, J.stop)]
                    for i in range(I.start, I.stop)]  # fmt: skip
            assert seen.tolist() == want


# --- the trace ---


def test_bytes_of_a_case_by_hand() -> None:
    """4 tokens in tiles of 2 x 2, two query heads of 8 over one key/value head, float16.

    Q_i and O_i are 2 rows * 2 heads * 8 numbers * 2 bytes = 64, K_j and V_j 32 each, L_i in
    float32 2 * 2 * 4 = 16.
    """
    q, k = torch.randn(1, 4, 2, 8).half(), torch.randn(1, 4, 1, 8).half()
    tiles = trace_of([q, k, k], None, Spec(2, 1, 8, "float16"), 2, 2)
    assert [(t.i, t.j, t.skipped, t.read, t.written) for t in tiles] == [
        (0, 0, False, 64 + 32 + 32, 64 + 16),
        (0, 1, True, 0, 0),
        (1, 0, False, 64 + 32 + 32, 0),
        (1, 1, False, 32 + 32, 64 + 16),
    ]
    # Four queries, the last two keys' own: the first block of queries sees nothing, reads nothing.
    tiles = trace_of([q, k[:, :2], k[:, :2]], None, Spec(2, 1, 8, "float16"), 2, 2)
    assert [(t.skipped, t.read, t.written) for t in tiles] == [(True, 0, 80), (False, 128, 80)]


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_bytes_of_a_causal_pass_in_closed_form(dtype) -> None:
    """n blocks: Q read and O and L written once, K and V n (n + 1) / 2 times 1/n of them."""
    B, n, block, H, Hkv, D = 3, 5, 8, 4, 2, 16
    q, k = (torch.randn(B, n * block, h, D).to(getattr(torch, dtype)) for h in (H, Hkv))
    tiles = trace_of([q, k, k], None, Spec(H, Hkv, D, dtype), block, block)
    size = q.element_size()
    kv_block = 2 * block * Hkv * D * size  # of one sequence
    assert sum(t.read for t in tiles) == q[0].numel() * size + n * (n + 1) // 2 * kv_block
    assert sum(t.written for t in tiles) == q[0].numel() * size + n * block * H * 4


@pytest.mark.parametrize("shape", SHAPES)
def test_m_and_l_end_at_the_row_maximum_and_the_row_sum(shape) -> None:
    (q, k, v, dout), seg, spec = draw(shape)
    Tq, Tk = q.shape[1], k.shape[1]
    tiles, out = shown.trace_of(q, k, v, spec, seg, B_r=8, B_c=5)
    L = tiled.forward_tiles(q, k, v, spec, segments=seg, B_r=8, B_c=5)[1]
    assert torch.equal(out, both_passes([q, k, v, dout], seg, spec, 8, 5)[0])
    m, l = torch.zeros(2, q.shape[0], spec.n_head, Tq, dtype=L.dtype)  # where nothing is seen: 0
    for t in tiles:  # the last tile of a row has the last word
        rows = slice(8 * t.i, 8 * t.i + t.m.shape[2])
        m[:, :, rows], l[:, :, rows] = t.m, t.l
    i, j = torch.arange(Tq)[:, None], torch.arange(Tk)
    seen = visible(i, j, Tk - Tq, spec.window).expand(2, Tq, Tk)
    if seg is not None:
        seg_i = seg[:, (i.flatten() + Tk - Tq).clamp(min=0)]
        seen = visible(i, j, Tk - Tq, spec.window, seg_i[:, :, None], seg[:, None])
    heads = torch.arange(spec.n_head) // (spec.n_head // spec.n_kv_head)
    scores = torch.einsum("bihd,bjhd->bhij", q, k[:, :, heads]) / 8**0.5
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    sees = seen.any(dim=-1)[:, None].expand(m.shape)
    torch.testing.assert_close(m[sees], scores.amax(dim=-1)[sees])
    sums = torch.exp(scores - scores.amax(dim=-1, keepdim=True)).sum(dim=-1)
    torch.testing.assert_close(l[sees], sums[sees])
    torch.testing.assert_close(L.reshape(m.shape)[sees], torch.logsumexp(scores, dim=-1)[sees])
    assert not l[~sees].any() and not out.transpose(1, 2)[~sees].any()
    for before, after in pairwise(tiles):
        if after.i == before.i:
            assert (after.m >= before.m).all()


# --- dropout ---


def test_each_tile_drops_by_a_mask_of_its_own() -> None:
    """v is the identity, so that out is P with its dropped entries zero."""
    T, size = 32, 8
    q, eye = torch.zeros(1, T, 1, T).double(), torch.eye(T).double()[None, :, None]
    spec = Spec(1, 1, T, "float64", dropout=0.4)
    with torch.no_grad():
        out = Tiled.apply(q, q, eye, None, None, spec, 11, size, size)[0, :, 0]
    kept = out != 0
    want = kept.double() / 0.6 / (torch.arange(T)[:, None] + 1)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=0)
    tiles = [kept[I, J] for I, J in product(tiled.blocks(T, size), repeat=2)
             if J.start < I.start]  # fmt: skip
    assert len({tuple(t.flatten().tolist()) for t in tiles}) == len(tiles) == 6
    assert all(18 <= int(t.sum()) <= 58 for t in tiles)  # 60 % of 64, 5 standard deviations


def test_one_seed_a_call_from_the_global_generator() -> None:
    (q, k, v, _), _, spec = draw("square", torch.float32)
    loud = Spec(2, 2, 8, "float32", dropout=0.5)
    torch.manual_seed(3)
    first, second = tiled.attend(q, k, v, loud), tiled.attend(q, k, v, loud)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert torch.equal(first, tiled.attend(q, k, v, loud)) and not torch.equal(first, second)
    torch.manual_seed(3)
    for _ in range(2):
        torch.randint(2**62, ())
    assert torch.equal(state, torch.get_rng_state())
    tiled.attend(q, k, v, spec)
    assert torch.equal(state, torch.get_rng_state())  # without dropout nothing is drawn


# --- torch.compile ---


@pytest.fixture
def counted() -> Iterator[Any]:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_compile_breaks_the_graph_once_a_call_and_computes_the_same(counted, p) -> None:
    (q, k, v, dout), _, _ = draw("square", torch.float32)
    spec = Spec(2, 2, 8, "float32", dropout=p)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return 3 * tiled.attend(2 * q, k, v, spec)

    results = []
    for call in (layer, torch.compile(layer, backend=counted)):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        torch.manual_seed(0)
        out = call(*leaves)
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert counted.frame_count == 2  # what comes before it, and what comes after
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(layer, backend=counted, fullgraph=True)(q, k, v)
