"""tiled.py beyond the matrix of test_attention.py: finite differences and memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention import BACKENDS, Partial, Spec, tiled
from attention.check import matrix
from attention.function import attention


def by_tiles(B_r: int, B_c: int, seed: Tensor | None = None) -> Any:
    """tiled's attend() with other tiles."""
    passes = (tiled.forward_tiles, tiled.backward_tiles)
    kernel = Partial(*(partial(f, B_r=B_r, B_c=B_c) for f in passes))
    return lambda q, k, v, spec, **more: attention(
        q, k, v, spec, kernel=kernel, seed=seed, **more)[0]


@pytest.mark.slow
@pytest.mark.parametrize("text", [
    "9 D2 B1", "window5-packed-6x11 H4 D2 B1", "packed-9x6 H3 mqa D2 B1", "window4-1x9 mqa D2 B1"])
@pytest.mark.parametrize("more", [{}, {"scale": 0.5, "softcap": 1.5, "sinks": True}])
def test_gradients_against_finite_differences(text: str, more: dict[str, Any]) -> None:
    """With dropout too: the seed is fixed, so forward and backward share a mask."""
    (case,) = matrix.cases(text)
    case = replace(case, **more)
    x = matrix.inputs(case, "float64")
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, x.sinks) if t is not None]
    for dropout in (0.0, 0.4):
        spec, attend = case.spec("float64", dropout=dropout), by_tiles(4, 3, torch.tensor(7))

        def call(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
            options = {} if x.segments is None else {"segments": x.segments}
            return attend(q, k, v, spec, sinks=sinks, **options)  # noqa: B023

        assert torch.autograd.gradcheck(call, leaves)


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
    for T in (128, 256):
        qkv = [torch.randn(1, T, 2, 64, requires_grad=True) for _ in range(3)]
        spec = Spec(2, 2, 64, "float32", dropout=p)
        with Recorder() as forward:
            out = BACKENDS["tiled"].attend(*qkv, spec)
        with Recorder() as backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert forward.largest == backward.largest == T * 2 * 64
