"""tiled.py beyond the matrix of test_attention.py: tile sizes, memory, skipping, trace, dropout."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import Partial, Spec, tiled
from attention.function import attention
from attention.spec import DTYPES

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


def tiled_(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, B_r: int, B_c: int, **more: Any
) -> Tensor:
    passes = (tiled.forward_tiles, tiled.backward_tiles)
    kernel = Partial(*(partial(f, B_r=B_r, B_c=B_c) for f in passes))
    return attention(q, k, v, spec, kernel=kernel, **more)[0]


def both_passes(inputs: list[Tensor], seg: Tensor | None, spec: Spec, B_r: int, B_c: int,
                sinks: Tensor | None = None) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in (*inputs[:3], sinks) if t is not None]
    q, k, v, sink = *leaves, *[None] * (sinks is None)
    out = tiled_(q, k, v, spec, B_r, B_c, segments=seg, sinks=sink)
    return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]


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


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("p", [0.0, 0.4])
@pytest.mark.parametrize("more", [{}, MORE], ids=["", "more"])
def test_gradients_against_finite_differences(shape, p, more) -> None:
    """With dropout too: the seed is fixed, so the forward passes and the backward share a mask."""
    inputs, seg, spec = draw(shape, B=1, D=2)
    spec = replace(spec, head_dim=2, dropout=p, **more)
    leaves = [t.requires_grad_() for t in (*inputs[:3], *([sinks_of(spec)] if more else []))]

    def call(seg: Tensor | None, *tiles: int) -> Any:
        def with_seed(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            seed = torch.tensor(7)
            return tiled_(q, k, v, spec, *tiles, segments=seg, sinks=sinks, seed=seed)

        return with_seed

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


def test_half_precision_is_summed_in_float32() -> None:
    """256 key blocks, or query blocks, of one row differ from a single one by a rounding or two."""
    draw_ = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 256, 1, 8, generator=draw_).bfloat16() for _ in range(4)]
    spec, eps = Spec(1, 1, 8, "bfloat16"), torch.finfo(torch.bfloat16).eps
    whole = both_passes(inputs, None, spec, 256, 256)
    for B_r, B_c in ((256, 1), (1, 256)):
        for many, one in zip(both_passes(inputs, None, spec, B_r, B_c), whole, strict=True):
            torch.testing.assert_close(many, one, rtol=eps, atol=0.4 * eps)


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
    for T in (64, 128, 256):
        qkv = [torch.randn(1, T, 2, 4, requires_grad=True) for _ in range(3)]
        spec = Spec(2, 2, 4, "float32", dropout=p)
        with Recorder() as forward:
            out = tiled_(*qkv, spec, 16, 16, seed=torch.tensor(0))
        with Recorder() as backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert forward.largest == backward.largest == T * 2 * 4 < T * T


# --- dropout ---


def test_each_tile_drops_by_a_mask_of_its_own() -> None:
    """v is the identity, so that out is P with its dropped entries zero."""
    T, size = 32, 8
    q, eye = torch.zeros(1, T, 1, T).double(), torch.eye(T).double()[None, :, None]
    spec = Spec(1, 1, T, "float64", dropout=0.4)
    with torch.no_grad():
        out = tiled_(q, q, eye, spec, size, size, seed=torch.tensor(11))[0, :, 0]
    kept = out != 0
    want = kept.double() / 0.6 / (torch.arange(T)[:, None] + 1)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=0)
    tiles = [kept[I, J] for I, J in product(tiled.blocks(T, size), repeat=2)
             if J.start < I.start]
    assert len({tuple(t.flatten().tolist()) for t in tiles}) == len(tiles) == 6
    assert all(18 <= int(t.sum()) <= 58 for t in tiles)  # 60 % of 64, 5 standard deviations
