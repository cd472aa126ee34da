"""int8 weights: the product within its bound, the same tokens from every cache, clear refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import bench_mfu
from core.cpu import int8
from core.runtime import Decision, Setup
from core.settings import UserError
from inference import engine
from model import GPT, GPTConfig

CONFIG = GPTConfig(block_size=48, vocab_size=96, n_layer=2, n_head=4, n_embd=64, n_kv_head=2)
LLAMA = replace(CONFIG, position="rope", norm="rms", mlp="swiglu", qk_norm=True, tied=False)


def model(dtype: torch.dtype = torch.float32, config: GPTConfig = CONFIG) -> GPT:
    torch.manual_seed(0)
    made = GPT(config).to(dtype).eval()
    for p in made.parameters():
        if p.dim() == 2:
            p.data *= 8  # lively: the likeliest token is likelier by far
    return made


def converted(dtype: torch.dtype = torch.float32, config: GPTConfig = CONFIG) -> GPT:
    made = model(dtype, config)
    int8.convert(made, made.transformer.wte.weight)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_is_off_by_half_a_step_at_most(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = (torch.randn(40, 32) * torch.logspace(-6, 3, 40)[:, None]).to(dtype)
    w[3] = 0
    q, scale = int8.quantize(w)
    assert q.dtype == torch.int8 and scale.dtype == torch.bfloat16
    step = scale.double()[:, None]
    assert torch.isfinite(step).all() and not q[3].any()
    assert ((q * step - w.double()).abs() <= step / 2).all()
    assert (q.abs().amax(1)[[0, 1, 2, *range(4, 40)]] == 127).all()  # all of the range is used


@pytest.mark.parametrize("rows", [1, 3, int8.FEW_ROWS, int8.FEW_ROWS + 1, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_is_that_of_the_widened_weights(
    rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the error of plain bfloat16, which rounds the same inputs and outputs."""
    kernel, read = torch.ops.aten._weight_int8pack_mm, []
    monkeypatch.setattr(
        torch.ops.aten, "_weight_int8pack_mm", lambda x, *a: read.append(len(x)) or kernel(x, *a)
    )
    torch.manual_seed(0)
    x = torch.randn(rows, 1, 256).to(dtype)
    q, scale = int8.quantize(torch.randn(100, 256))
    wide = q.double() * scale.double()[:, None]
    bias = torch.randn(100).to(dtype)
    truth = x.double() @ wide.t()
    got = int8.int8_linear(x, q, scale, bias)
    assert got.dtype == dtype and got.shape == (rows, 1, 100)
    assert read == ([rows] if rows <= 16 else [])  # no weight is widened for a decode step
    plain = x.bfloat16() @ wide.bfloat16().t()
    allowed = 2 * (plain.double() - truth).abs().max() + 2**-8 * truth.abs().max()
    assert (got.double() - bias.double() - truth).abs().max() <= allowed


class OnCuda(torch.Tensor):
    """It says that it is on a GPU, and computes here."""

    device = torch.device("cuda")  # type: ignore[assignment]


@pytest.mark.parametrize("rows, compiling", [(1, True), (1, False), (3, True)])
def test_the_product_on_a_gpu_is_exact_in_float32(rows, compiling, monkeypatch) -> None:
    torch.manual_seed(0)
    x, bias = torch.randn(1, rows, 64), torch.randn(24)
    q, scale = int8.quantize(torch.randn(24, 64))
    truth = x.double() @ (q.double() * scale.double()[:, None]).t() + bias.double()
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    got = int8.int8_linear(x.as_subclass(OnCuda), q, scale, bias).as_subclass(torch.Tensor)
    assert got.dtype == torch.float32 and got.shape == truth.shape
    assert (got.double() - truth).abs().max() <= 1e-6 * truth.abs().max()


def test_few_rows_and_many_agree() -> None:
    """One kernel decodes, another reads prompts: in float32 they differ by one rounding at most."""
    torch.manual_seed(0)
    x = torch.randn(int8.FEW_ROWS + 1, 64)
    q, scale = int8.quantize(torch.randn(96, 64))
    many = int8.int8_linear(x, q, scale)
    few = int8.int8_linear(x[:-1], q, scale)
    assert (many[:-1] == few).float().mean() > 0.98
    assert (many[:-1] - few).abs().max() <= 2**-7 * many.abs().max()


@pytest.mark.parametrize("kv", ["dynamic", "static", "paged"])
@pytest.mark.parametrize("lengths", [(7, 7), (3, 20)])
def test_every_cache_gives_the_same_tokens(kv: str, lengths: tuple[int, ...]) -> None:
    # an untied head, too
    lively = converted(config=CONFIG if lengths[0] == 7 else LLAMA)
    prompts = [torch.arange(n) % 96 for n in lengths]
    plain = engine.generate(lively, prompts, 12, temperature=0.0, kv_cache="none")
    found = engine.generate(lively, prompts, 12, temperature=0.0, kv_cache=kv)
    assert [t.tolist() for t in found] == [t.tolist() for t in plain]


@pytest.mark.slow
def test_the_compiler_gives_the_same_tokens() -> None:
    lively, prompt = converted(), torch.arange(14).view(2, 7)
    how = {"temperature": 0.0, "kv_cache": "static"}
    plain = engine.generate(lively, prompt, 12, **how)
    assert engine.generate(lively, prompt, 12, compile=True, **how).tolist() == plain.tolist()


def test_the_model_is_nearly_what_it_was() -> None:
    x = torch.arange(40).view(1, 40)
    before, after = model()(x)[0], converted()(x)[0]
    assert 0 < (before - after).abs().max() < 0.1 * before.abs().max()
    targets = x.masked_fill(x % 3 == 0, -1)  # which count for nothing
    loss = converted()(x, targets)[1]
    want = -after.log_softmax(-1)[0, x[0], x[0]][targets[0] >= 0].mean()
    torch.testing.assert_close(loss, want)


def test_refusals() -> None:
    odd = model(config=GPTConfig(block_size=8, vocab_size=96, n_layer=1, n_head=2, n_embd=24))
    cpu = torch.device("cpu")
    assert "multiple of 16 inputs, got 24" in (int8.why_not(odd, cpu, torch.float32) or "")
    assert "not with torch.float16" in (int8.why_not(model(), cpu, torch.float16) or "")
    assert "this is mps" in (int8.why_not(model(), torch.device("mps"), torch.float32) or "")
    with pytest.raises(ValueError, match="multiple of 16"):
        int8.convert(odd, odd.transformer.wte.weight)


def test_int8_is_for_decoding_only() -> None:
    with pytest.raises(UserError, match="--weights"):
        bench_mfu.main(["train", "--weights=int8"])


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() != "AVX512", reason="no AVX-512")
def test_a_few_rows_of_float32_are_exact_and_by_onednn_in_inference_only(monkeypatch) -> None:
    calls = []
    product = torch.ops.mkldnn._linear_pointwise
    monkeypatch.setattr(
        torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(a) or product(*a)
    )
    setup = replace(Setup.of(torch.device("cpu"), "float32"), onednn=Decision(False, "as on Intel"))
    for made, rows, few in ((setup, 3, False), (setup, 9, True),
                            (replace(setup, few_rows=False), 9, False)):
        layer = made.place(torch.nn.Sequential(torch.nn.Linear(64, 96)), cast=True)
        x = torch.randn(rows, 1, 64)
        truth = x.double() @ layer[0].weight.double().t() + layer[0].bias.double()
        with torch.no_grad():
            y = layer(x)
        assert (y.double() - truth).abs().max() <= 2e-6 * truth.abs().max()
        assert bool(calls) == few
        calls.clear()
        layer(x)  # with gradients
        assert not calls


def test_a_layer_keeps_its_bias_and_a_row_of_zeros_is_one() -> None:
    layer, head = torch.nn.Linear(16, 3), torch.randn(5, 16)
    with torch.no_grad():
        layer.weight[1] = 0
    weight, bias, x = layer.weight.detach().clone(), layer.bias.detach(), torch.randn(40, 16)
    int8.convert(layer, head)
    got = layer(x)
    assert (got[:, 1] == bias[1]).all()
    torch.testing.assert_close(got, F.linear(x, weight, bias), rtol=0, atol=0.1)
