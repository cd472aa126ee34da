"""What is specific to a processor: matrix products by the faster path, and when bfloat16 pays.

On x86 PyTorch gives float32 products to MKL, which on AMD's AVX-512 processors runs at half the
rate of oneDNN, although both are part of PyTorch (measured: docs/LOG.md). PyTorch has one public
switch to oneDNN, set_float32_matmul_precision("medium"): the permission to round the inputs to
bfloat16. oneDNN makes use of that permission only on processors with bfloat16 matrix units (AMX);
elsewhere the products stay float32 through and through.

So the switch is turned on around single products only, and only on AMD's AVX-512 processors, after
a look at the error on this very machine. (Not after a stopwatch: a resumed run must come to the
same decision.) It must not stay on for a whole step: PyTorch's CPU attention kernel multiplies tiny
tiles, for which oneDNN's set-up costs several times the product.

In bfloat16 all products are oneDNN's; some shapes it takes twice as long for as for two halves of
them. And the gradient of an embedding, mostly zeros, is kept as its rows.

The model knows nothing of this: convert(model) swaps its linear layers, its embeddings and its head
from outside.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from attention.system import cpu_name, matrix_units
from core.loss import Head, linear_cross_entropy


def convert(model: nn.Module, float32: bool = True) -> None:
    """Make `model` take what is faster on the CPU; `float32`: float32 products by oneDNN, too.

    Only the forward of its layers changes: parameters, names and hooks stay. In other dtypes, and
    in a compiled training step, they are what they were.
    """
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear if float32 else HalfLinear
        elif type(module) is nn.Embedding and name.endswith("wte"):
            module.__class__ = Embedding
        elif type(module) is Head and float32:
            module.__class__ = OneDNNHead


class HalfLinear(nn.Linear):
    """nn.Linear whose bfloat16 products under autocast are half_product()'s."""

    def forward(self, x: Tensor) -> Tensor:
        half = torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
        if not half or torch.get_autocast_dtype("cpu") != torch.bfloat16 or _compiling():
            return super().forward(x)
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        return _HalfLinear.apply(x.to(torch.bfloat16), self.weight, bias)


class Linear(HalfLinear):
    """nn.Linear by linear()."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if _plain(x) else linear(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """nn.Embedding whose gradient, where it has more rows than tokens, holds those of the tokens.

    For wte alone, which has a dense gradient too, the tied head's: autograd adds the rows to that
    one, and no zeros are written. The sum is dense, as the optimizer needs it.
    """

    def forward(self, idx: Tensor) -> Tensor:
        few = idx.numel() < self.num_embeddings and not _compiling()
        return F.embedding(idx, self.weight, sparse=few)


class OneDNNHead(Head):
    """The head by linear(), and the loss with the switch on around its products."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, None)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        switch = nullcontext if _plain(x) or _compiling() else onednn
        return linear_cross_entropy(x.flatten(0, 1), weight, targets.flatten(), switch)


_compiling = torch.compiler.is_compiling


def _plain(x: Tensor) -> bool:
    """Whether oneDNN's float32 products have no place here."""
    return x.dtype != torch.float32 or torch.is_autocast_enabled("cpu")


class onednn:
    """Matrix products inside `with onednn():` go to oneDNN."""

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("medium")

    def __exit__(self, *error: object) -> None:
        torch.set_float32_matmul_precision(self.before)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by oneDNN; (M, K) and (K, N) float32 -> (M, N)."""
    with onednn():
        return a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear by oneDNN, with its gradients; x (..., K), weight (N, K), float32 -> (..., N).

    In a graph of torch.compile it is an operator that is called as it is here, without gradients;
    with gradients it is F.linear there.
    """
    if _plain(x):
        return F.linear(x, weight, bias)
    if not torch.is_grad_enabled():
        if _compiling():
            return torch.ops.nanoattn.linear(x, weight, bias)
        return _linear(x, weight, bias)
    if _compiling():
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    shape = *x.shape[:-1], weight.shape[0]
    if x.numel() == x.shape[-1]:
        return gemv(x, weight, bias).view(shape)
    y = matmul(x.reshape(-1, x.shape[-1]), weight.t())
    if bias is not None:
        y += bias
    return y.view(shape)


# One switch of oneDNN around a whole graph would be thrown for the attention in it too.
_LIBRARY = torch.library.Library("nanoattn", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("linear", _linear, "CPU")
_LIBRARY.impl("linear", lambda x, w, b: x.new_empty(*x.shape[:-1], w.shape[0]), "Meta")


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x (..., K), one row, times weight.T, (N, K), and the bias, float32 -> (N,).

    What a decode step consists of. The weights are read once and used once, so the speed is that of
    memory, and one core alone does not reach it. MKL gives the product of one row to one thread; as
    a batch of as many products as there are threads, each of a part of the weights, all of them
    read. oneDNN uses all threads too, and reads more slowly.
    """
    (N, K), parts = weight.shape, torch.get_num_threads()
    plain = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if parts == 1 or N % parts or not plain:
        x = x.reshape(1, K)
        y = x @ weight.t() if parts == 1 else matmul(x, weight.t())
        return y if bias is None else y + bias
    # Views made in one call each: a step has 49 of these products in GPT-2, and each call counts.
    n = N // parts
    w = weight.as_strided((parts, K, n), (n * K, 1, K))
    rows = x.contiguous().as_strided((parts, 1, K), (0, K, 1))
    if bias is None:
        return torch.bmm(rows, w)
    return torch.baddbmm(bias.as_strided((parts, 1, n), (n, n, 1)), rows, w)


# --- a few rows, without gradients: a decode step of several texts ---


def for_inference(model: nn.Module) -> None:
    """Make the layers of `model` take what is fastest for the few rows of a decode step.

    Where convert() has come before, its layers stay: they know one row and many.
    """
    if why_not_few():
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = FewLinear
        elif type(module) is Head:
            module.__class__ = FewHead


def why_not_few() -> str | None:
    """Why few_rows() should not be taken on this machine; None: it should."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512"
    if not torch.backends.mkldnn.is_available() or not hasattr(torch.ops.mkldnn, _FEW):
        return "this PyTorch has no such product"
    return None


_FEW = "_linear_pointwise"


class FewLinear(nn.Linear):
    """nn.Linear by few_rows()."""

    def forward(self, x: Tensor) -> Tensor:
        return few_rows(x, self.weight, self.bias)


class FewHead(Head):
    """The head by few_rows()."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return few_rows(x, weight, None)


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear, in float32 by oneDNN from four rows on; x (..., K), weight (N, K) -> (..., N).

    MKL takes 2.7 times as long for eight rows as for one, where the weights, which are all that
    there is to read, are the same; oneDNN 1.6 times. This is the operator that Inductor calls, and
    unlike the switch above it never rounds to bfloat16.
    """
    few = x.numel() < 4 * x.shape[-1] or _plain(x) or torch.is_grad_enabled()
    if few or torch.compiler.is_compiling():
        return F.linear(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W,  dW = dy^T x,  db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _gradients(ctx, dy, matmul, matmul)


def _gradients(
    ctx: Any, dy: Tensor, for_x: Callable[..., Tensor], for_w: Callable[..., Tensor]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dx, dw and db of a linear layer that saved x and its weight, by these two products."""
    x, weight = ctx.saved_tensors
    want_x, want_w, want_b = ctx.needs_input_grad
    dy = dy.reshape(-1, dy.shape[-1])
    dx = for_x(dy, weight).view(x.shape) if want_x else None
    dw = for_w(dy.t(), x.reshape(-1, x.shape[-1])) if want_w else None
    return dx, dw, dy.sum(0) if want_b else None


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in bfloat16, (M, K) and (K, N): in two halves of rows where that is faster.

    With two threads oneDNN divides a product of about 0.6 to 1 million numbers badly: (1024, 3072)
    times (3072, 768) takes 1.7 times as long as its halves (docs/LOG.md).
    """
    M, N = a.shape[0], b.shape[1]
    if torch.get_num_threads() != 2 or not 2**19 < M * N <= 2**20:
        return a @ b
    out = a.new_empty(M, N)
    for half in (slice(0, M // 2), slice(M // 2, M)):
        torch.mm(a[half], b, out=out[half])
    return out


class _HalfLinear(torch.autograd.Function):
    """_Linear in bfloat16: x and bias are, weight and its gradient are float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        w = weight.to(x.dtype)
        ctx.save_for_backward(x, w)
        y = half_product(x.reshape(-1, x.shape[-1]), w.t())
        if bias is not None:
            y += bias
        return y.view(*x.shape[:-1], w.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return _gradients(ctx, dy, half_product, lambda a, b: (a @ b).float())


@lru_cache(maxsize=1)
def errors() -> tuple[float, float]:
    """The errors of oneDNN and of PyTorch's choice: the largest over the largest float64 value."""
    own = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 1024, generator=own), torch.randn(1024, 512, generator=own)
    truth = a.double() @ b.double()
    ours, plain = (
        float((m(a, b) - truth).abs().max() / truth.abs().max()) for m in (matmul, torch.mm)
    )
    return ours, plain


def exact() -> bool:
    """Whether oneDNN's error is float32's: another order of summation, but no shorter numbers."""
    ours, plain = errors()
    return ours <= 8 * plain


def why_not() -> str | None:
    """Why oneDNN should not be taken on this machine; None: it should."""
    name = cpu_name() or platform.processor()
    if not name.startswith("AMD") and "AuthenticAMD" not in name:
        return "it is faster on AMD's processors only"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512"
    if not exact():
        ours, plain = errors()
        return f"its products are not exact here: error {ours:.1e} against {plain:.1e}"
    return None


WHY_BFLOAT16 = "this processor has bfloat16 matrix units (AMX)"
LEAST_WIDTH = 128  # n_embd of the smallest model that was measured


def why_not_bfloat16(n_embd: int) -> str | None:
    """Why a training should not begin in bfloat16 on this processor; None: it should.

    By what the processor has and the model's width: a resumed run comes to the same answer.
    Bfloat16 without matrix units (AVX512_BF16) was not measured, and is not taken.
    """
    if not matrix_units():
        return "this processor has no bfloat16 matrix units (AMX)"
    if n_embd < LEAST_WIDTH:
        return f"measured to be faster from n_embd={LEAST_WIDTH} on, this is {n_embd}"
    return None
