"""sdpa.py on CUDA, as far as tensors without data and calls without a kernel can tell. The numbers
of what runs here are in test_attention.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import BACKENDS, Partial, Spec, blocks
from attention.function import attention

SAFE = {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"}
CUDNN = {"CUDNN_ATTENTION"}


@pytest.mark.parametrize("name, changes, Tq, Tk, allowed", [
    ("sdpa", {}, 64, 64, None),
    # cuDNN builds a plan for each new length: each token of a text would wait for one.
    ("sdpa", {"grad": False}, 64, 64, SAFE), ("sdpa", {"grad": False}, 1, 64, SAFE),
    ("sdpa_cudnn", {"grad": False}, 1, 64, CUDNN),  # who names it gets it
    # It rounds dropout to sixteenths.
    ("sdpa", {"dropout": 0.125}, 64, 64, None), ("sdpa", {"dropout": 0.1}, 64, 64, SAFE),
    # With a mask its dq may be NaN where keys do not fill a tile of 128 (PyTorch issue 196678).
    ("sdpa", {"window": 8}, 64, 64, SAFE), ("sdpa", {}, 63, 64, SAFE),
    ("sdpa_cudnn", {"window": 8}, 64, 64, CUDNN), ("sdpa_cudnn", {}, 63, 129, CUDNN),
])
def test_the_kernels_that_pytorch_may_choose_from(monkeypatch, name, changes, Tq, Tk,
                                                  allowed) -> None:
    before, asked = torch.nn.attention._cur_sdpa_kernel_backends(), []

    def record(q: Tensor, k: Tensor, v: Tensor, mask: Any = None, *_: Any, **__: Any) -> Tensor:
        kernels = {kernel.name for kernel in torch.nn.attention._cur_sdpa_kernel_backends()}
        asked.append((kernels, mask is not None, k.shape[2]))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(major=9))
    # Without a GPU arange() makes no fake tensor on one.
    monkeypatch.setattr(blocks, "mask", lambda Tq, Tk, *_: torch.empty(Tq, Tk, dtype=torch.bool))
    spec = Spec(4, 2, 64, "bfloat16", **changes)
    with FakeTensorMode():
        q, k = (torch.empty(2, T, h, 64, device="cuda", dtype=torch.bfloat16)
                for T, h in ((Tq, 4), (Tk, 2)))
        BACKENDS[name].attend(q, k, k, spec)
    for kernels, masked, keys in asked:
        assert kernels == allowed if allowed else kernels >= SAFE | CUDNN
        assert kernels != CUDNN or not (masked and spec.grad) or not keys % 128
    assert asked and torch.nn.attention._cur_sdpa_kernel_backends() == before


@pytest.mark.parametrize("Tq", [1, 5])
@pytest.mark.parametrize("H, Hkv, window", [(2, 2, None), (4, 2, 3), (4, 1, 1)])
def test_of_one_key_sdpa_cudnn_gives_v_without_the_kernel(Tq, H, Hkv, window) -> None:
    """PyTorch refuses such a call to cuDNN (sdp_utils.cpp): a prompt of one token, 5 x 1."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, T, h, 32, generator=draw).half()
              for T, h in ((Tq, H), (1, Hkv), (1, Hkv), (Tq, H))]
    exact, rough = (f(*inputs, window=window) for f in (oracle.attention, oracle.plain))
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = BACKENDS["sdpa_cudnn"].attend(*leaves, Spec(H, Hkv, 32, "float16", window=window))
    got = oracle.Result(out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
    oracle.check(got, rough, exact, torch.float16)


def test_a_single_key_is_dropped_for_each_query_alone() -> None:
    q, k = torch.randn(2, 64, 4, 16), torch.randn(2, 1, 2, 16)
    spec = Spec(4, 2, 16, "float32", dropout=0.5, right=None)
    out = BACKENDS["sdpa_cudnn"].attend(q, k, k, spec)
    kept = out.abs().sum(-1) > 0  # (2, 64, 4)
    want = 2 * k.repeat_interleave(2, dim=2).expand_as(out)
    torch.testing.assert_close(out[kept], want[kept])
    assert 0.3 < kept.float().mean() < 0.7 and (kept != kept[:, :1]).any()


def same_tensor(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return (q * 2).contiguous(), q[..., 0]


def three_gradients(dout: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return dout * 2, dout * 3, dout * 4


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_gradients_where_a_kernel_changes_nothing_at_its_end(backend) -> None:
    """`contiguous` of what is so gives the same tensor: torch 2.11 sent the gradient to one that
    nobody has, and dq, dk and dv were zeros."""
    torch._dynamo.reset()
    leaves = [torch.randn(1, 4, 2, 8, requires_grad=True) for _ in range(3)]
    spec, kernel = Spec(2, 2, 8, "float32"), Partial(same_tensor, three_gradients)
    out, _ = torch.compile(attention, backend=backend, fullgraph=True)(
        *leaves, spec, kernel=kernel)
    for n, grad in enumerate(torch.autograd.grad(out.sum(), leaves), 2):
        assert grad.eq(n).all()
