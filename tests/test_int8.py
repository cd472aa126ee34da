"""int8 weights: the product within its bound, clear refusals."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_generate import lively

import bench_mfu
from core.cpu import int8
from core.settings import UserError
from inference import engine

model = partial(lively, block_size=48, vocab_size=96, n_embd=64, n_kv_head=2, tied=False)
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    w = (torch.randn(40, 32) * torch.logspace(-6, 3, 40)[:, None]).to(dtype)
    w[3] = 0
    q, scale = int8.quantize(w)
    assert q.dtype == torch.int8 and scale.dtype == torch.bfloat16
    step = scale.double()[:, None]
    assert torch.isfinite(step).all() and not q[3].any()
    assert ((q * step - w.double()).abs() <= step / 2).all()
    assert (q.abs().amax(1)[[0, 1, 2, *range(4, 40)]] == 127).all()  # all of the range is used


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), K=st.sampled_from([64, 256]), bias=st.booleans(),
       dtype=st.sampled_from(DTYPES))
def test_the_product_is_that_of_the_widened_weights(rows, K, bias, dtype) -> None:
    """Within twice plain bfloat16's error; in float32 few and many rows rarely differ."""
    x = torch.randn(rows, 1, K).to(dtype)
    q, scale = int8.quantize(torch.randn(100, K))
    b, wide = torch.randn(100).to(dtype) * bias, q.double() * scale.double()[:, None]
    truth = x.double() @ wide.t()
    got = int8.int8_linear(x, q, scale, b if bias else None)
    assert got.dtype == dtype and got.shape == (rows, 1, 100)
    plain = x.bfloat16() @ wide.bfloat16().t()
    allowed = 2 * (plain.double() - truth).abs().max() + 2**-8 * truth.abs().max()
    assert (got.double() - b.double() - truth).abs().max() <= allowed
    first = int8.int8_linear(x[:1], q, scale, b if bias else None)
    assert dtype != torch.float32 or (got[:1] == first).float().mean() > 0.95
    assert (first.double() - b.double() - truth[:1]).abs().max() <= allowed


@pytest.mark.slow
def test_the_compiler_gives_the_same_tokens() -> None:
    made, prompt = model(), torch.arange(14).view(2, 7)
    int8.convert(made, made.head_weight)
    how = {"temperature": 0.0, "kv_cache": "static"}
    plain = engine.generate(made, prompt, 12, **how)
    assert engine.generate(made, prompt, 12, compile=True, **how).tolist() == plain.tolist()


def test_the_model_is_nearly_what_it_was() -> None:
    x, made = torch.arange(40).view(1, 40), model()
    layer = made.transformer.h[0].mlp.c_fc
    layer.bias.data.normal_()
    layer.weight.data[1] = 0
    before, plain = made(x)[0], F.linear(torch.ones(1, 64), layer.weight, layer.bias)
    matrices = made.get_num_params() - sum(p.numel() for p in made.parameters() if p.dim() == 1)
    int8.convert(made, made.head_weight)
    with pytest.raises(ValueError, match=r"got torch\.int8"):  # a second time loses the scales
        int8.convert(made, made.head_weight)
    assert int8.parameters(made) == matrices
    after, found = made(x)[0], layer(torch.ones(1, 64))
    assert found[0, 1] == layer.bias[1] and (found - plain).abs().max() < 0.1 * plain.abs().max()
    assert 0 < (before - after).abs().max() < 0.1 * before.abs().max()
    ratio = (before * after).sum() / before.square().sum()
    torch.testing.assert_close(ratio, torch.tensor(1.0), atol=4e-3, rtol=0)  # unbiased
    targets = x.masked_fill(x % 3 == 0, -1)  # which count for nothing
    want = -after.log_softmax(-1)[0, x[0], x[0]][targets[0] >= 0].mean()
    torch.testing.assert_close(made(x, targets)[1], want)


def test_refusals() -> None:
    odd = model(n_embd=24)
    head = model().head_weight
    for made, weight, got in ((odd, odd.head_weight, "24"), (model(), head.half(), "float16"),
                              (model(), head.to("meta"), "meta")):  # fmt: skip
        with pytest.raises(ValueError, match=got):
            int8.convert(made, weight)
        assert not int8.parameters(made)
    with pytest.raises(UserError, match="--weights"):  # int8 is for decoding only
        bench_mfu.main(["train", "--weights=int8"])
