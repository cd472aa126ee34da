"""oneDNN's float32 products: the numbers and gradients of F.linear, and no switch left on."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from core.cpu import int8
from core.cpu import matmul as cpu_matmul
from core.runtime import Decision, Setup
from model import GPT, GPTConfig

# On processors with bfloat16 matrix units the switch means bfloat16: there nothing of this is used,
# and what is tested with plain products in place of oneDNN's is what is made of them.
NO_SWITCH = not cpu_matmul.exact()
needs_switch = pytest.mark.skipif(NO_SWITCH, reason="oneDNN rounds to bfloat16 on this processor")


@pytest.fixture(autouse=True)
def exact_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if NO_SWITCH:
        monkeypatch.setattr(cpu_matmul, "onednn", nullcontext)
    yield
    cpu_matmul.exact.cache_clear()  # what was found with it holds for no other test


def close(a: torch.Tensor, b: torch.Tensor, plain: torch.Tensor) -> bool:
    """The error of a against b (float64) is at most four times plain's, plus rounding."""
    eps = torch.finfo(torch.float32).eps
    allowed = 4 * (plain.double() - b).abs().max() + 8 * eps * b.abs().max()
    return bool((a.double() - b).abs().max() <= allowed)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 7), (2, 64, 128), (1, 1, 7)])
@pytest.mark.parametrize("bias", [True, False])
def test_linear_and_its_gradients_are_f_linear_s(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(shape), torch.randn(9, shape[-1])
    b = torch.randn(9) if bias else None
    dy = torch.randn(*shape[:-1], 9)

    def run(linear: object, dtype: torch.dtype) -> list[torch.Tensor]:
        ts = [t.detach().to(dtype).requires_grad_() for t in (x, w, b) if t is not None]
        y = linear(ts[0], ts[1], ts[2] if bias else None)  # type: ignore[operator]
        assert (linear is cpu_matmul.linear) == ("_Linear" in y.grad_fn.name())
        return [y.detach(), *torch.autograd.grad(y, ts, dy.to(dtype))]

    fast, plain = run(cpu_matmul.linear, torch.float32), run(F.linear, torch.float32)
    for got, other, truth in zip(fast, plain, run(F.linear, torch.float64), strict=True):
        assert got.shape == truth.shape
        assert close(got, truth, other)


def test_a_second_derivative_is_refused() -> None:
    def function(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return cpu_matmul.linear(x * x, w * w, b * b).pow(2).sum()

    leaves = [torch.randn(n, requires_grad=True) for n in ((3, 7), (9, 7), (9,))]
    for leaf in leaves:
        (grad,) = torch.autograd.grad(function(*leaves), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(grad.sum(), leaves)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_graph_takes_the_same_products(grad: bool, bias: bool) -> None:
    """By an operator: one product forward, and two of the gradients."""
    products: list[object] = []

    def look(graph: torch.fx.GraphModule, inputs: object) -> object:
        products.extend(n for n in graph.graph.nodes if "nanoattn.linear" in str(n.target))
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=look)
    compiled = torch.compile(cpu_matmul.linear, backend=backend, fullgraph=True)
    ts = [torch.randn(2, 3, 7), torch.randn(9, 7), *([torch.randn(9)] if bias else [])]
    dy, results = torch.randn(2, 3, 9), []
    for linear in (compiled, F.linear):
        own = [t.clone().requires_grad_(grad) for t in ts]
        y = linear(*own) if bias else linear(*own, None)
        results.append([y, *(torch.autograd.grad(y, own, dy) if grad else ())])
    torch.testing.assert_close(*results)
    assert len(products) == (3 if grad else 1)


@pytest.mark.parametrize("shape", [(1, 1, 70), (70,), (0, 70), (3, 70)])
def test_layouts_of_a_few_rows(shape: tuple[int, ...]) -> None:
    """Strided rows, weights and biases."""
    torch.manual_seed(0)
    x, w, b = torch.randn(shape), torch.randn(9, 70), torch.randn(9)
    truth = F.linear(x.double(), w.double(), b.double())
    for i in range(4):
        x_, w_, b_ = (
            torch.stack([t, t], -1)[..., 0] if i == n else t for n, t in enumerate((x, w, b))
        )
        for float32 in ("onednn", "few", "mkl"):
            with torch.no_grad():
                got = cpu_matmul.linear(x_, w_, b_, float32)
            assert got.shape == truth.shape
            assert not got.numel() or close(got, truth, F.linear(x, w, b))


@pytest.mark.parametrize("onednn", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_for_inference_follows_its_weights(dtype: str, onednn: bool) -> None:
    """Written in place, also past autograd, replaced, moved, copied; and with gradients."""
    config = GPTConfig(block_size=16, vocab_size=96, n_layer=1, n_head=2, n_embd=64)
    idx = torch.arange(12).view(2, 6)
    setup = replace(Setup.of(torch.device("cpu"), dtype), onednn=Decision(onednn))
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
    loss = model(idx, idx)[1]
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_the_switch_is_off_again_after_a_product_and_after_an_error() -> None:
    before = torch.get_float32_matmul_precision()
    cpu_matmul.matmul(torch.ones(2, 3), torch.ones(3, 2))
    assert torch.get_float32_matmul_precision() == before
    with pytest.raises(RuntimeError):
        cpu_matmul.matmul(torch.ones(2, 3), torch.ones(2, 3))
    assert torch.get_float32_matmul_precision() == before


@needs_switch
def test_a_model_gives_the_same_loss_and_gradients() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=33, n_layer=2, n_head=2, n_embd=32))
    idx = torch.randint(33, (2, 16))
    results = []
    for on in (False, True):
        if on:
            cpu_matmul.convert(model)
        model.zero_grad()
        loss = model(idx, idx)[1]
        assert loss is not None
        loss.backward()
        results.append(
            (loss.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None])
        )
    (plain, plain_grads), (fast, fast_grads) = results
    torch.testing.assert_close(fast, plain, rtol=1e-6, atol=0)
    assert len(fast_grads) == len(plain_grads) > 0
    for got, expected in zip(fast_grads, plain_grads, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 8), (2, 3, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_the_operator_is_what_it_says_to_the_compiler(shape: tuple[int, ...], bias: bool) -> None:
    args = torch.randn(shape), torch.randn(6, 8), torch.randn(6) if bias else None
    torch.library.opcheck(torch.ops.nanoattn.linear, args)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
def test_products_and_gradients_under_autocast_are_its_own(bias, threads, monkeypatch) -> None:
    """Also in halves (two threads, 2**19 to 2**20 outputs), whose rows are the same products."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(24, 800, bias=bias))
    x, dy = torch.randn(3, 243, 24), torch.randn(3, 243, 800)
    results = []
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


@pytest.mark.parametrize("V, kept", [(48, False), (200, True)])
def test_the_gradient_of_a_tied_embedding_is_the_same_and_dense(V: int, kept: bool) -> None:
    """Where there are more rows than the 48 tokens, only theirs are made."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=16, vocab_size=V, n_layer=1, n_head=1, n_embd=8))
    idx = torch.randint(V, (3, 16))
    grads = []
    for n in range(4):  # twice as it is, once for each micro-batch; then converted
        if n == 2:
            cpu_matmul.convert(model, "mkl")
            found = model.transformer.wte(idx)
            (rows,) = torch.autograd.grad(found.sum(), model.transformer.wte.weight)
            assert rows.is_sparse == kept
        if n % 2 == 0:
            model.zero_grad()
        loss = model(idx, idx)[1]
        assert loss is not None
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    for plain, half in zip(grads[1], grads[3], strict=True):
        assert not half.is_sparse
        torch.testing.assert_close(half, plain)


def test_a_gradient_is_never_left_sparse_for_the_optimizer() -> None:
    """Also where a text is shorter than the context, so that positions have rows to spare."""
    from core.runtime import Setup

    config = GPTConfig(block_size=64, vocab_size=512, n_layer=1, n_head=2, n_embd=32)
    model = Setup.of(torch.device("cpu"), "float32").place(GPT(config))
    x = torch.randint(512, (2, 10))
    model(x, x)[1].backward()
    assert all(p.grad.layout == torch.strided for p in model.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("head", ["onednn", "int8"])
def test_targets_of_another_shape_are_refused(head: str) -> None:
    """As many as tokens too: flattened they would fit."""
    model = GPT(GPTConfig(block_size=16, vocab_size=33, n_layer=1, n_head=1, n_embd=16))
    if head == "int8":
        int8.convert(model, model.head_weight)
    else:
        cpu_matmul.convert(model)
    idx = torch.randint(33, (2, 16))
    with pytest.raises(ValueError, match="16, 2"):
        model(idx, idx.t())
