"""triton_flash.py beyond the matrix of test_attention.py: tiles, masks at their borders, dropout,
the operators under torch.compile, offsets beyond 32 bits. What a compiler says of the kernels, and
the table of tiles, are in test_triton_compiled.py.

Without CUDA the kernels run in Triton's interpreter, slowly: the shapes here are small.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from conftest import every, few
from torch import Tensor

from attention import Spec, visible
from attention.triton_flash import attend, borders

pytest.importorskip("triton", reason="package 'triton' is not installed")
import triton
import triton.language as tl

from attention.triton import flash_kernels as triton_kernels
from attention.triton.flash_kernels import KERNELS, tanh

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"  # where the kernels run
pytestmark = [pytest.mark.gpu] * HAS_CUDA
interpreted = pytest.mark.skipif(HAS_CUDA, reason="sets the interpreter's tiles; CUDA has its own")

# BLOCK_M, BLOCK_N: square, wide, tall
SHAPES = [(16, 16), (16, 64), (64, 16)]
# Tq, Tk, H, Hkv, D, window, whether there are segments
CASES = {
    "square": (49, 49, 2, 1, 16, None, False),
    "whole-tiles": (64, 64, 1, 1, 16, None, False),
    "chunk": (33, 66, 1, 1, 20, None, False),
    "blind": (70, 35, 1, 1, 16, None, False),
    "window-of-a-tile": (64, 64, 1, 1, 8, 16, False),
    "window-of-a-tile-and-1": (64, 64, 1, 1, 16, 17, False),
    "window-1-chunk": (20, 66, 1, 1, 16, 1, False),
    "segments": (65, 65, 1, 1, 16, None, True),
    "segments-window-chunk-mqa": (40, 70, 2, 1, 16, 21, True),
    "segments-blind": (50, 34, 1, 1, 16, None, True),
}

MORE = {"scale": 0.5, "softcap": 1.5, "sinks": True}


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(M: int, N: int) -> None:
        monkeypatch.setattr(triton_kernels, "INTERPRETED", dict.fromkeys(KERNELS, (M, N, 1, 1)))

    return use


def draw(case: str, dtype: str = "float32", B: int = 1) -> tuple[list[Tensor], Any, Spec]:
    """q, k, v, the gradient of out; segments; Spec."""
    Tq, Tk, H, Hkv, D, window, segmented = CASES[case]
    generator = torch.Generator().manual_seed(Tq)
    inputs = [
        torch.randn(B, T, h, D, generator=generator).to(DEVICE, getattr(torch, dtype))
        for T, h in ((Tq, H), (Tk, Hkv), (Tk, Hkv), (Tq, H))
    ]
    at = torch.arange(Tk, device=DEVICE)
    seg = at.div(23, rounding_mode="floor").int().expand(B, Tk) if segmented else None
    return inputs, seg, Spec(H, Hkv, D, dtype, window=window, segments=segmented)


def sinks_of(spec: Spec) -> Tensor:
    """As large as the logsumexp of some ten scores."""
    return 2 + torch.randn(spec.n_head, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def both_passes(inputs: list[Tensor], seg: Tensor | None, spec: Spec, call: Any = attend,
                sinks: Tensor | None = None) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (*inputs[:3], sinks) if t is not None]
    more = {} if sinks is None else {"sinks": leaves[3]}
    out = call(*leaves[:3], spec, segments=seg, **more)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


# --- numbers ---


@interpreted
@pytest.mark.parametrize("case", every(2, [*CASES]))
def test_every_tile_shape_gives_the_numbers_of_the_oracle(tiles, case) -> None:
    inputs, seg, spec = draw(case)
    truth = oracle.attention(*inputs, window=spec.window, segments=seg)
    plain = oracle.plain(*inputs, window=spec.window, segments=seg)
    for M, N in SHAPES:
        tiles(M, N)
        oracle.check(oracle.Result(*both_passes(inputs, seg, spec)), plain, truth, torch.float32)


@interpreted
@pytest.mark.parametrize("M, N", SHAPES)
def test_scale_softcap_and_sinks_at_every_tile_shape(tiles, M, N) -> None:
    for case in ("segments-blind", "window-1-chunk"):
        inputs, seg, spec = draw(case)
        sinks = sinks_of(spec)
        options = {"window": spec.window, "segments": seg, "sinks": sinks, "scale": 0.5}
        truth, plain = (
            f(*inputs, **options, softcap=1.5) for f in (oracle.attention, oracle.plain)
        )
        tiles(M, N)
        got = oracle.Result(*both_passes(inputs, seg, replace(spec, **MORE), sinks=sinks))
        oracle.check(got, plain, truth, torch.float32)


def test_tanh_of_small_and_large_numbers() -> None:
    x = torch.cat([torch.logspace(-6, 2, 500, dtype=torch.float64), torch.tensor([3e4])])
    x = torch.cat([x, -x]).float().to(DEVICE)
    want = torch.tanh(x.double())
    off = float(((_tanh(x) - want) / want).abs().max())
    assert off < (6 if HAS_CUDA else 4) * torch.finfo(torch.float32).eps
    assert _tanh(torch.tensor([torch.nan, 0.0], device=DEVICE)).isnan().tolist() == [True, False]


def _tanh(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    _tanh_kernel[(1,)](x, out, len(x), BLOCK=1024)
    return out


@triton.jit
def _tanh_kernel(X, Out, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(Out + i, tanh(tl.load(X + i, mask=i < n, other=0.0)), mask=i < n)


@interpreted
@pytest.mark.parametrize("more", [{"sinks": True}, {"softcap": 1.5, "sinks": True, "scale": 0.5}])
def test_gradients_with_dropout_are_those_of_the_formula_with_the_same_mask(more) -> None:
    """The sinks' too. The mask is read off where v is the identity."""
    D, p = 32, 0.4
    spec = Spec(2, 1, D, "float32", dropout=p, **more)
    generator = torch.Generator().manual_seed(4)
    q, k, v, dout = (torch.randn(2, D, h, D, generator=generator) for h in (2, 1, 1, 2))
    sinks, eye = sinks_of(spec), torch.eye(D)[None, :, None].expand(2, D, 1, D)
    torch.manual_seed(9)
    mask = attend(q, k, eye, spec, sinks=sinks) != 0
    torch.manual_seed(9)
    got = both_passes([q, k, v, dout], None, spec, sinks=sinks)
    leaves = [t.double().requires_grad_() for t in (q, k, v, sinks)]
    scores = torch.einsum("bihd,bjgd->bihj", *leaves[:2]) * spec.softmax_scale
    if spec.softcap:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    i = torch.arange(D)
    scores = scores.masked_fill(~visible(i[:, None], i)[None, :, None], -torch.inf)
    scores = torch.cat([scores, leaves[3][:, None].expand(2, D, 2, 1)], dim=-1)
    probs = torch.softmax(scores, dim=-1)[..., :-1] * mask / (1 - p)
    out = torch.einsum("bihj,bjgd->bihd", probs, leaves[2])
    for g, w in zip(got, [out, *torch.autograd.grad(out, leaves, dout.double())], strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)


def test_a_sink_of_minus_infinity_is_none_and_rows_that_see_nothing_move_none() -> None:
    inputs, seg, spec = draw("segments-blind")
    without, spec = both_passes(inputs, seg, spec), replace(spec, sinks=True)
    none = torch.full((1,), -torch.inf, device=DEVICE)
    *same, dsinks = both_passes(inputs, seg, spec, sinks=none)
    assert all(torch.equal(a, b) for a, b in zip(same, without, strict=True)) and not dsinks.any()
    inputs[3][:, 16:] = 0  # 50 queries, 34 keys
    assert not both_passes(inputs, seg, spec, sinks=sinks_of(spec))[4].any()


@interpreted
@pytest.mark.parametrize("case", ["window-of-a-tile", "segments", "whole-tiles"])
def test_tiles_that_no_row_sees_are_not_read(tiles, case) -> None:
    """0 * NaN is NaN: a masked V, or dO, that is read shows in the result."""
    T, b = CASES[case][0], 16
    inputs, seg, spec = draw(case)
    tiles(b, b)
    out, _, dk, dv = both_passes(inputs, seg, spec)
    i = torch.arange(T)
    of_i, of_j = (None, None) if seg is None else (seg[0, :, None], seg[0])
    sees = visible(i[:, None], i, 0, spec.window, of_i, of_j)
    skipped = 0
    for block in range(0, T, b):
        rows = slice(block, block + b)
        tile = [bool(sees[rows, j : j + b].any()) for j in range(0, T, b)]
        unseen = torch.tensor([not tile[j // b] for j in range(T)])
        skipped += tile.count(False)
        poisoned = [t.clone() for t in inputs]
        poisoned[2][:, unseen] = torch.nan
        got = attend(*poisoned[:3], spec, segments=seg)
        assert torch.equal(got[:, rows], out[:, rows])
    assert skipped == {"whole-tiles": 6, "window-of-a-tile": 9, "segments": 15}[case]
    poisoned = [t.clone() for t in inputs]
    last = slice(T // b * b - b, T)  # these rows' gradient reaches only the keys that they see
    poisoned[3][:, last] = torch.nan
    _, _, dk_, dv_ = both_passes(poisoned, seg, spec)
    far = torch.tensor([not sees[last, j // b * b : j // b * b + b].any() for j in range(T)])
    assert torch.equal(dk_[:, far], dk[:, far]) and torch.equal(dv_[:, far], dv[:, far])
    assert far.any() or case == "whole-tiles"


def test_borders_of_segments_by_hand() -> None:
    segments = torch.tensor([[5, 5, 5, 2, 2], [0, 1, 1, 1, 0]], dtype=torch.int32)
    found = borders(segments)
    assert found[:, 0].tolist() == [[0, 0, 0, 3, 3], [0, 1, 1, 1, 4]]
    assert found[:, 1].tolist() == [[2, 2, 2, 4, 4], [0, 3, 3, 3, 4]]
    assert found.dtype == torch.int32 and found.is_contiguous()


def test_the_same_bits_each_time_in_any_layout_of_the_inputs() -> None:
    (q, k, v, dout), _, spec = draw("square")
    q, dout = (t.transpose(1, 3).contiguous().transpose(1, 3) for t in (q, dout))  # D strided
    assert q.stride(3) != 1
    first, second = (both_passes([q, k, v, dout], None, spec) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    plain = both_passes([t.contiguous() for t in (q, k, v, dout)], None, spec)
    assert all(torch.equal(a, b) for a, b in zip(first, plain, strict=True))


def test_the_gradients_are_the_projections_gradient_in_its_layout() -> None:
    """q, k and v are views of one tensor; so are their gradients, which need no concatenation."""
    qkv = torch.randn(2, 40, 6 * 16, device=DEVICE, requires_grad=True)
    rows = [t.unflatten(2, (-1, 16)) for t in qkv.split([64, 16, 16], dim=2)]
    out = attend(*rows, Spec(4, 1, 16, "float32"))
    grads = torch.autograd.grad(out, rows, torch.randn_like(out))
    assert len({t.untyped_storage().data_ptr() for t in grads}) == 1
    assert [t.stride()[:2] for t in grads] == [t.stride()[:2] for t in rows]
    assert [t.storage_offset() for t in grads] == [t.storage_offset() for t in rows]


def test_offsets_beyond_32_bits() -> None:
    """Batch 1 begins 2^31 numbers after batch 0; and rows so far apart that row 256 does.

    The 4 GB are reserved and, but for the pages written, never touched (on a CPU).
    """
    room = torch.empty(2**31 + 2**24, dtype=torch.float16, device=DEVICE)
    far_batch = [room[n * 512 :].as_strided((2, 16, 1, 16), (2**31, 16, 16, 1)) for n in range(4)]
    far_rows = [room[n * 512 :].as_strided((1, 258, 1, 16), (0, 2**23, 16, 1)) for n in range(4)]
    spec = Spec(1, 1, 16, "float16", window=8)
    for tensors in (far_batch, far_rows):
        for t in tensors:
            t.copy_(torch.randn(t.shape))
        near = [t.contiguous() for t in tensors]
        got, want = both_passes(tensors, None, spec), both_passes(near, None, spec)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_a_second_derivative_is_refused() -> None:
    (q, k, v, dout), _, spec = draw("window-1-chunk")
    q.requires_grad_()
    (dq,) = torch.autograd.grad(attend(q, k, v, spec), q, dout, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        dq.sum().backward()


# --- dropout ---


def revealed(spec: Spec, B: int, seed: int) -> Tensor:
    """M, (B, T, H, T) bool: with q = k = 0 and v the identity, out is M / (1 - p) / (i + 1)."""
    D = spec.head_dim
    zeros = torch.zeros(B, D, spec.n_head, D, device=DEVICE)
    eye = torch.eye(D, device=DEVICE)[None, :, None].expand(B, D, spec.n_head, D)
    torch.manual_seed(seed)
    with torch.no_grad():
        return (attend(zeros, zeros, eye, spec) != 0).cpu()


def test_no_two_sequences_heads_rows_or_seeds_share_a_mask() -> None:
    spec = Spec(2, 2, 64, "float32", dropout=0.5)
    mask = torch.cat([revealed(spec, 2, seed) for seed in (1, 2)])  # (4, 64, 2, 64)
    full = mask[:, 32:, :, :32]  # rows that see at least these 32 keys
    rows = {tuple(r.tolist()) for r in full.transpose(1, 2).reshape(-1, 32)}
    assert len(rows) == 4 * 32 * 2  # 256 rows of 32 fair bits: two alike once in 10^5
    share = full.float().mean(dim=(0, 1, 2))  # of each key: 256 draws, 5 standard deviations
    assert ((share - 0.5).abs() < 5 * 0.5 / 256**0.5).all()
    neighbours = (full[..., 1:] == full[..., :-1]).float().mean()
    assert abs(float(neighbours) - 0.5) < 5 * 0.5 / (256 * 31) ** 0.5


# --- the operators ---


@pytest.mark.parametrize("case, p", few([
    ("segments-window-chunk-mqa", 0.3), ("square", 0.0), ("square", 0.3),
    ("segments-window-chunk-mqa", 0.0)], 2))
def test_compile_takes_the_call_whole_and_computes_the_same(case, p) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    inputs, seg, spec = draw(case)
    spec = replace(spec, dropout=p, compiled=True, **(MORE if p else {}))

    def layer(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **more: Any) -> Tensor:
        return 3 * attend(2 * q, k, v, spec, **more)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    results = []
    for call in (layer, compiled):
        torch.manual_seed(0)
        results.append(both_passes(inputs, seg, spec, call, sinks_of(spec) if p else None))
    assert counter.frame_count == 1
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    torch._dynamo.reset()


@pytest.mark.slow
def test_opcheck() -> None:
    inputs, seg, _ = draw("segments-window-chunk-mqa")
    q, k, v, dout = inputs
    runs = borders(seg)
    own = runs[:, :, k.shape[1] - q.shape[1] :].contiguous()
    seed = torch.tensor([7], device=DEVICE)
    sinks = torch.tensor([1.0, -torch.inf], device=DEVICE)
    slopes = torch.rand(len(q), q.shape[2], device=DEVICE)
    whole = (own, runs, seed, sinks, slopes, 21, 3, 0.5, 0.3, 2.0, None)
    for more in ((None, None, None, None, None, None, None, 0.0, 0.25, None, None), whole):
        torch.library.opcheck(triton_kernels.flash_forward, (q, k, v, *more))
    out, L = triton_kernels.flash_forward(q, k, v, *whole)
    kept = [dout, q, k, v, out, L]
    args = (*kept, own, runs, seed, slopes, 21, 3, 0.5, 0.3, 2.0, None)
    torch.library.opcheck(triton_kernels.flash_backward, args)
    half = *(t.half() for t in kept[:-1]), L  # whose gradients are float16
    for op, given in ((triton_kernels.flash_backward, (*half, *args[6:])),
                      (triton_kernels.flash_forward, (*half[1:4], *whole))):
        torch.library.opcheck(op, given, test_utils="test_faketensor")


# --- on CUDA ---


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
class TestOnCuda:
    def test_more_heads_than_a_grid_has_rows(self) -> None:
        q = torch.randn(70_000, 4, 1, 16, device="cuda", dtype=torch.float16)
        want = torch.nn.functional.scaled_dot_product_attention(
            *(q.transpose(1, 2) for _ in range(3)), is_causal=True).transpose(1, 2)
        got = attend(q, q, q, Spec(1, 1, 16, "float16"))
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("D", [64, 80, 128])
    def test_inductor_computes_the_same(self, D: int) -> None:
        q, dout = (torch.randn(2, 300, 4, D, device="cuda", dtype=torch.float16) for _ in range(2))
        k, v = q[:, :, :2], q[:, :, 2:]
        spec = Spec(4, 2, D, "float16")
        compiled = torch.compile(attend, fullgraph=True)
        results = [both_passes([q, k, v, dout], None, spec, call) for call in (attend, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
