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

from attention import BACKENDS, Spec, matrix, oracle, sdpa_bmm
from attention.matrix import Case


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


def test_of_one_key_sdpa_cudnn_drops_whole_rows() -> None:
    spec = Spec(2, 2, 8, "float32", dropout=0.5)
    q, v = torch.randn(200, 1, 2, 8), torch.ones(200, 1, 2, 8)
    out = BACKENDS["sdpa_cudnn"].attend(q, q, v, spec)
    assert torch.equal(out, out[..., :1].expand_as(out))
    assert set(out.unique().tolist()) == {0.0, 2.0}


@pytest.mark.parametrize("elements", [1, 3 * 97 * 97])
def test_the_backward_of_products_takes_as_many_heads_as_fit_and_one_at_least(
    elements, monkeypatch
) -> None:
    monkeypatch.setattr(sdpa_bmm, "ELEMENTS", elements)
    real, heads = torch.bmm, []

    def bmm(*args: Tensor, out: Tensor) -> Tensor:
        heads.append(len(out))
        return real(*args, out=out)

    monkeypatch.setattr(torch, "bmm", bmm)
    matrix.check(sdpa_bmm.BACKEND, Case("gqa", 97, 97, H=4, window=16), "bfloat16")
    assert heads == [n for n in ([1] * 8 if elements == 1 else [3, 3, 2]) for _ in range(3)]
