"""sdpa.py on CUDA, as far as a machine without a GPU can tell: by tensors without data, and by
calls that need no kernel. The numbers of what runs here are in test_attention.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import BACKENDS, Spec
from attention.check import oracle


def allowed_on_cuda(monkeypatch: pytest.MonkeyPatch, name: str, spec: Spec, Tq: int,
                    Tk: int) -> set[str]:  # fmt: skip
    """The kernels that are switched on when `name` asks PyTorch, for tensors on CUDA."""
    asked: list[set[str]] = []

    def record(q: Tensor, *_: Any, **__: Any) -> Tensor:
        asked.append({kernel.name for kernel in torch.nn.attention._cur_sdpa_kernel_backends()})
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    with FakeTensorMode():
        q, k = (torch.empty(2, T, h, spec.head_dim, device="cuda", dtype=torch.bfloat16)
                for T, h in ((Tq, spec.n_head), (Tk, spec.n_kv_head)))  # fmt: skip
        BACKENDS[name].attend(q, k, k, spec)
    return asked[0]


def test_without_a_gradient_sdpa_leaves_cudnn_out(monkeypatch) -> None:
    """It builds a plan for each new length: each token of a text would wait for one."""
    before = torch.nn.attention._cur_sdpa_kernel_backends()
    train = Spec(4, 2, 64, "bfloat16")
    for Tq, Tk in ((64, 64), (1, 64)):
        got = allowed_on_cuda(monkeypatch, "sdpa", replace(train, grad=False), Tq, Tk)
        assert got == {"FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"}
    assert "CUDNN_ATTENTION" in allowed_on_cuda(monkeypatch, "sdpa", train, 64, 64)
    named = allowed_on_cuda(monkeypatch, "sdpa_cudnn", replace(train, grad=False), 64, 64)
    assert named == {"CUDNN_ATTENTION"}  # who names it gets it
    assert torch.nn.attention._cur_sdpa_kernel_backends() == before


@pytest.mark.parametrize("p, exact", [(0.0, True), (0.125, True), (0.1, False), (0.2, False)])
def test_sdpa_leaves_cudnn_out_where_it_may_round_the_dropout(monkeypatch, p, exact) -> None:
    spec = Spec(4, 4, 64, "bfloat16", dropout=p)
    got = allowed_on_cuda(monkeypatch, "sdpa", spec, 64, 64)
    assert ("CUDNN_ATTENTION" in got) == exact


@pytest.mark.parametrize("Tq", [1, 5])
@pytest.mark.parametrize("H, Hkv, window", [(2, 2, None), (4, 2, 3), (4, 1, 1)])
def test_of_one_key_sdpa_cudnn_gives_v_without_the_kernel(Tq, H, Hkv, window) -> None:
    """PyTorch refuses such a call to cuDNN (sdp_utils.cpp): a prompt of one token, 5 x 1."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, T, h, 32, generator=draw).half()
              for T, h in ((Tq, H), (1, Hkv), (1, Hkv), (Tq, H))]  # fmt: skip
    truth = oracle.attention(*inputs, window=window)
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = BACKENDS["sdpa_cudnn"].attend(*leaves, Spec(H, Hkv, 32, "float16", window=window))
    got = oracle.Result(out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
    oracle.check(got, oracle.plain(*inputs, window=window), truth, torch.float16)
    assert not out[:, : Tq - 1].any() and torch.equal(out[:, -1, ::H], inputs[2][:, 0, ::Hkv])
