"""oneDNN's float32 products: the numbers and gradients of F.linear, and no switch left on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import assert_within
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from core.cpu import matmul as cpu_matmul
from core.options import TrainConfig
from core.runtime import Setup
from model import GPT, GPTConfig

# With bfloat16 matrix units the switch means bfloat16: plain products stand in for oneDNN's.
NO_SWITCH = not cpu_matmul.exact()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if NO_SWITCH:
        monkeypatch.setattr(cpu_matmul, "onednn", nullcontext)
    yield
    cpu_matmul.exact.cache_clear()  # what was found with it holds for no other test


@settings(max_examples=80, deadline=None)
@given(st.sampled_from([(5,), (2, 3), (1, 1), (), (0,), (2, 64)]), st.sampled_from([7, 70, 128]),
       st.booleans(), st.sampled_from(["onednn", "few", "mkl"]), st.integers(0, 3), st.booleans())
def test_linear_and_its_gradients_are_f_linear_s(rows, K, bias, float32, strided, grad) -> None:
    ts = [torch.randn(*rows, K), torch.randn(9, K), *([torch.randn(9)] if bias else [])]
    ts = [torch.stack([t, t], -1)[..., 0] if n == strided else t for n, t in enumerate(ts)]
    dy = torch.randn(*rows, 9)

    def run(linear: Any, dtype: torch.dtype, *how: str) -> list[Tensor]:
        own = [t.detach().to(dtype).requires_grad_(grad) for t in ts]
        y = linear(*own[:2], own[2] if bias else None, *how)
        return [y.detach(), *(torch.autograd.grad(y, own, dy.to(dtype)) if grad else ())]

    fast, plain = run(cpu_matmul.linear, torch.float32, float32), run(F.linear, torch.float32)
    for got, truth, other in zip(fast, run(F.linear, torch.float64), plain, strict=True):
        assert_within(got, other, truth, torch.float32, 4, 8)


@pytest.mark.parametrize("grad, packed", [(True, True), (False, True), (False, False)])
def test_a_graph_takes_the_same_products(grad: bool, packed: bool) -> None:
    products: list[object] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        products.extend(n for n in graph.graph.nodes if "nanoattn.linear" in str(n.target))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    compiled = torch.compile(partial(cpu_matmul.linear, packed=packed), fullgraph=True,
                             backend=aot_autograd(fw_compiler=look))
    ts, dy, results = [torch.randn(2, 3, 7), torch.randn(9, 7), torch.randn(9)], [], []
    for linear in (compiled, F.linear):
        own = [t.clone().requires_grad_(grad) for t in ts]
        y = linear(*own)
        dy = dy or [torch.randn_like(y)]
        results.append([y, *(torch.autograd.grad(y, own, dy) if grad else ())])
    torch.testing.assert_close(*results)
    assert len(products) == (3 if grad else 1)
    for bias in (ts[2], None):
        torch.library.opcheck(torch.ops.nanoattn.linear, (ts[0], ts[1], bias))


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_for_inference_follows_its_weights(dtype: str, onednn: bool) -> None:
    """Written in place, also past autograd, replaced, moved, copied."""
    config = GPTConfig(block_size=16, vocab_size=96, n_layer=1, n_head=2, n_embd=64)
    idx = torch.arange(12).view(2, 6)
    setup = Setup(CPU, TrainConfig(dtype=dtype))
    setup.onednn = onednn
    model, other = setup.place(GPT(config), cast=True).eval(), GPT(config)

    def check(model: GPT) -> None:
        plain = GPT(config)
        plain.load_state_dict(model.state_dict())
        truth = plain.double().eval()(idx)[0]
        with torch.no_grad():
            for T in (1, 6):  # two rows, twelve
                error = (model(idx[:, :T])[0] - truth[:, :T]).abs().max()
                digits = 1e-5 if dtype == "float32" else 0.03
                assert error <= digits * truth.abs().max()

    check(model)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3)
    check(model)
    for p in model.parameters():
        p.data.div_(3)
    check(model)
    model.load_state_dict(other.to(setup.dtype).state_dict(), assign=True)
    check(model)
    check(model.half().to(setup.dtype))
    check(copy.deepcopy(model))
    model(idx, idx)[1].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_switch_is_off_again_after_a_product_and_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    for rows, outcome in ((3, nullcontext()), (2, pytest.raises(RuntimeError))):
        with outcome:
            cpu_matmul.matmul(torch.ones(2, 3), torch.ones(rows, 3))
        assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_and_gradients_under_autocast_are_its_own(bias, threads, monkeypatch) -> None:
    """Also in halves (two threads, 2**19 to 2**20 outputs)."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    layer = torch.nn.Sequential(torch.nn.Linear(24, 800, bias=bias))
    x, dy, results = torch.randn(3, 243, 24), torch.randn(3, 243, 800), []
    for _ in range(2):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = layer(own)
        layer.zero_grad()
        y.backward(dy.to(y.dtype))
        results.append([y.detach(), own.grad, *(p.grad for p in layer.parameters())])
        cpu_matmul.convert(layer, "mkl")
    for plain, half in zip(*results, strict=True):
        assert plain.dtype == half.dtype
        torch.testing.assert_close(half, plain, rtol=2**-7, atol=2**-7 * float(plain.abs().max()))


@pytest.mark.parametrize("float32", ["mkl", pytest.param("onednn", marks=pytest.mark.skipif(
    NO_SWITCH, reason="oneDNN rounds to bfloat16 on this processor"))])
@pytest.mark.parametrize("V, T, sparse", [(48, 16, False), (200, 16, True), (512, 10, True)])
def test_a_model_gives_the_same_loss_and_gradients_none_of_them_sparse(
    V: int, T: int, sparse: bool, float32: Any
) -> None:
    """Of a tied embedding with more rows than tokens only theirs are made."""
    model = GPT(GPTConfig(block_size=16, vocab_size=V, n_layer=2, n_head=2, n_embd=32))
    idx, results = torch.randint(V, (3, T)), []
    for convert in (False, True):
        if convert:
            cpu_matmul.convert(model, float32)
            embedding = model.transformer.wte
            (rows,) = torch.autograd.grad(embedding(idx).sum(), embedding.weight)
            assert rows.is_sparse == sparse
        model.zero_grad()
        for _ in range(2):
            loss = model(idx, idx)[1]
            loss.backward()
        results.append([loss.detach(), *(p.grad.clone() for p in model.parameters())])
    for plain, fast in zip(*results, strict=True):
        assert fast.layout == torch.strided
        torch.testing.assert_close(fast, plain, rtol=1e-4, atol=1e-6)
