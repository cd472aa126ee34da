"""Faster matrix products on CPUs by oneDNN, and when bfloat16 is faster. PyTorch gives float32
products to MKL, slow on AMD with AVX-512; its switch, set for all, would slow attention."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from attention.function import once
from attention.machine.system import bfloat16_units, cpu_name
from core.loss import Head

# oneDNN; only for four rows or more in decoding; or PyTorch's choice.
Float32 = Literal["onednn", "few", "mkl"]
_compiling = torch.compiler.is_compiling


def convert(model: nn.Module, float32: Float32, decoding: bool = False) -> None:
    """float32: kind of its products; decoding: with a packed copy of small weights. Once."""
    layers: list[Any] = [m for m in model.modules() if type(m) in (nn.Linear, Head)]
    weights = [m.weight for m in layers if m.weight is not None]
    slow = any(w.dtype == torch.bfloat16 for w in weights) and not bfloat16_units()
    packed = decoding and not slow and sum(w.nbytes for w in weights) <= MOST_BYTES
    for module in layers:
        module.__class__ = Linear if type(module) is nn.Linear else OneDNNHead
        module.float32, module.packed = float32, packed
    if len(weights) < len(layers):  # the head is tied
        model.get_submodule("transformer.wte").__class__ = Embedding


class Linear(nn.Linear):
    float32: Float32
    packed: bool

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.float32, self.packed)


class Embedding(nn.Embedding):
    """A tied wte: the gradient of few tokens is sparse, and added to the head's."""

    def forward(self, idx: Tensor) -> Tensor:
        few = idx.numel() < self.num_embeddings and not _compiling()
        return F.embedding(idx, self.weight, sparse=few)


class OneDNNHead(Head):
    float32: Float32
    packed: bool

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight, None, self.float32, self.packed)

    def loss(self, x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        plain = x.dtype != torch.float32 or torch.is_autocast_enabled("cpu") or _compiling()
        with nullcontext() if plain or self.float32 != "onednn" else onednn():
            return super().loss(x, weight, targets)


@contextmanager
def onednn() -> Iterator[None]:
    """Context in which float32 products go to oneDNN."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """By oneDNN: (M, K) and (K, N), float32 or bfloat16 -> (M, N)."""
    if _compiling():
        return torch.ops.nanoattn.linear(a, b.t(), None)
    with onednn():
        return a @ b


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, float32: Float32 = "onednn",
           packed: bool = False) -> Tensor:  # fmt: skip
    """F.linear; x (..., K), weight (N, K) -> (..., N); packed: in oneDNN's layout."""
    grad, compiling = torch.is_grad_enabled(), _compiling()
    if torch.is_autocast_enabled("cpu"):
        half = torch.get_autocast_dtype("cpu") == torch.bfloat16
        if not (half and grad) or compiling:
            return F.linear(x, weight, bias)
        return _Linear.apply(x.bfloat16(), weight, None if bias is None else bias.bfloat16())
    few = float32 == "few" and (grad or compiling or x.numel() < 4 * x.shape[-1])
    plain = x.dtype == torch.float32 and (few or float32 == "mkl")
    alike = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.bfloat16)
    packed = packed and alike and weight.is_cpu and not (plain or grad or compiling)
    if packed and not weight.is_inference():  # which a trace cannot ask
        return _pointwise(x, _packed_weight(weight), bias)
    if plain or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    return _Linear.apply(x, weight, bias) if grad else _linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if _compiling():
        return torch.ops.nanoattn.linear(x, weight, bias)
    if x.dtype == torch.float32:
        return _pointwise(x, weight, bias)
    y = half_product(x.reshape(-1, x.shape[-1]), weight.t())
    if bias is not None:
        y += bias
    return y.view(*x.shape[:-1], weight.shape[0])


def _pointwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    bias = None if bias is None else bias.contiguous()  # the operator ignores its stride
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    """y = x W^T + b;  dx = dy W,  dW = dy^T x (float32),  db = the sum of dy's rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        return _linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        inputs = dy, *ctx.saved_tensors
        dy, x, weight = (t.detach() for t in inputs)
        want_x, want_w, want_b = ctx.needs_input_grad
        dy = dy.reshape(-1, dy.shape[-1])
        product = half_product if dy.dtype == torch.bfloat16 else matmul
        dx = product(dy, weight).view(x.shape) if want_x else None
        dw = matmul(dy.t(), x.reshape(-1, x.shape[-1])).float() if want_w else None
        return once(3, dx, dw, dy.sum(0) if want_b else None, *inputs)


def half_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in bfloat16, (M, K) and (K, N), for two threads in two halves."""
    M, N = a.shape[0], b.shape[1]
    if torch.get_num_threads() != 2 or not 2**19 < M * N <= 2**20:
        return a @ b
    out = a.new_empty(M, N)
    for half in (slice(0, M // 2), slice(M // 2, M)):
        torch.mm(a[half], b, out=out[half])
    return out


# A compiled graph has no switch inside.
_LIBRARY = torch.library.Library("nanoattn", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("linear", _linear, "CPU")
_LIBRARY.impl("linear", lambda x, w, b: x.new_empty(*x.shape[:-1], w.shape[0]), "Meta")


# --- without gradients: a packed copy of the weights ---

ROWS = 8  # of the layout, good for any number
MOST_BYTES = 2**31  # of a model's weights: the copy doubles them

# weight -> (version and address, view of its first numbers, their copy, packed)
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _packed_weight(weight: Tensor) -> Tensor:
    """In oneDNN's layout. A write through .data changes no version, but the view."""
    version = weight._version, weight.data_ptr(), weight.dtype
    none: Any = (None,) * 4
    before, view, copy, packed = _packed.get(weight, none)
    if before != version or not torch.equal(view, copy):
        view = weight.detach()[0, :16]  # also keeps the address from other tensors
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
        _packed[weight] = version, view, view.clone(), packed
    return packed


# --- which path is faster here ---


@cache
def exact() -> bool:
    """False if oneDNN rounds to bfloat16 here."""
    own = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 1024, generator=own), torch.randn(1024, 512, generator=own)
    truth = a.double() @ b.double()
    ours, plain = ((mm(a, b) - truth).abs().max() for mm in (matmul, torch.mm))
    return bool(ours <= 8 * plain)


def few_rows_pay() -> bool:
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return torch.backends.mkldnn.is_available() and avx512


def _amd() -> bool:
    name = cpu_name() or platform.processor()
    return name.startswith("AMD") or "AuthenticAMD" in name


def why_not(wanted: bool | None, device: torch.device, dtype: torch.dtype) -> str:
    """Why not to use oneDNN for float32 products, or ""."""
    if wanted is False:
        return "--onednn=False"
    if device.type != "cpu" or dtype != torch.float32:
        return f"not for {str(dtype).removeprefix('torch.')} on {device.type}"
    if not torch.backends.mkldnn.is_available():
        return "this PyTorch has no oneDNN"
    if wanted:
        return ""
    if not _amd():
        return "it is faster on AMD only"
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return "this processor has no AVX-512"
    return "" if exact() else "it is less exact here"


# n_embd (docs/SPEED.md)
LEAST_WIDTH = {"AMX": 128, "AVX512_BF16": 384}


def why_not_bfloat16(n_embd: int) -> str | None:
    """Why bfloat16 is slower here, or None."""
    if not (units := bfloat16_units()):
        return "this processor has neither AMX nor AVX512_BF16"
    if units == "AVX512_BF16" and not _amd():  # Intel's are as slow as float32
        return "AVX512_BF16 is faster on AMD only"
    if n_embd < LEAST_WIDTH[units]:
        return f"bfloat16 is faster from n_embd={LEAST_WIDTH[units]} on, this is {n_embd}"
    return None
