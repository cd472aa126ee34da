"""sdpa.py on CUDA, as far as a machine without a GPU can tell: by tensors without data, and by
calls that need no kernel. The numbers of what runs here are in test_attention.py.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from test_flash import varlen as varlen_stand_in
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from attention import BACKENDS, Spec, blocks
from attention.caps import Partial
from attention.check import matrix
from attention.check.matrix import CASES
from attention.function import attention
from attention.masks import StaticView, loadable
from attention.sdpa_flash import varlen


def allowed_on_cuda(monkeypatch: pytest.MonkeyPatch, name: str, spec: Spec, Tq: int,
                    Tk: int) -> set[str]:
    """The kernels that are switched on when `name` asks PyTorch, for tensors on CUDA."""
    asked: list[set[str]] = []

    def record(q: Tensor, *_: Any, **__: Any) -> Tensor:
        asked.append({kernel.name for kernel in torch.nn.attention._cur_sdpa_kernel_backends()})
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    monkeypatch.setattr(blocks, "mask", lambda Tq, Tk, *_: torch.empty(Tq, Tk, dtype=torch.bool))
    on_card(monkeypatch, 9)
    with FakeTensorMode():
        q, k = (torch.empty(2, T, h, spec.head_dim, device="cuda", dtype=torch.bfloat16)
                for T, h in ((Tq, spec.n_head), (Tk, spec.n_kv_head)))
        BACKENDS[name].attend(q, k, k, spec)
    return asked[0]


def on_card(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    card = SimpleNamespace(major=major)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)


@pytest.mark.parametrize("major, dtype, repeated", [
    (7, torch.float16, True), (9, torch.float32, True), (9, torch.bfloat16, False)])
def test_grouped_heads_never_end_in_the_math_kernel(monkeypatch, major, dtype, repeated) -> None:
    """Where only the efficient kernel can run, which takes equal heads (transformers#48633)."""
    shapes: list[tuple[int, bool]] = []

    def record(q: Tensor, k: Tensor, *_: Any, enable_gqa: bool = False, **__: Any) -> Tensor:
        shapes.append((k.shape[1], enable_gqa))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    on_card(monkeypatch, major)
    with FakeTensorMode():
        q, k = (torch.empty(2, 8, h, 64, device="cuda", dtype=dtype) for h in (4, 2))
        BACKENDS["sdpa"].attend(q, k, k, Spec(4, 2, 64, str(dtype).removeprefix("torch.")))
    assert shapes == [(4, False) if repeated else (2, True)]


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


@pytest.mark.parametrize("change, Tq, Tk", [({"window": 8}, 64, 64), ({}, 63, 64)])
def test_sdpa_leaves_cudnn_out_where_a_mask_has_gradients(monkeypatch, change, Tq, Tk) -> None:
    """There its dq may be NaN (PyTorch issue 196678)."""
    spec = replace(Spec(4, 2, 64, "bfloat16"), **change)
    assert "CUDNN_ATTENTION" not in allowed_on_cuda(monkeypatch, "sdpa", spec, Tq, Tk)
    assert allowed_on_cuda(monkeypatch, "sdpa_cudnn", spec, Tq, Tk) == {"CUDNN_ATTENTION"}


@pytest.mark.parametrize("Tq, Tk, window", [(64, 64, 9), (300, 320, None), (5, 129, 40)])
@pytest.mark.parametrize("segments", [False, True])
def test_named_cudnn_with_a_mask_and_gradients_has_whole_tiles(
    monkeypatch, Tq, Tk, window, segments
) -> None:
    original = torch.nn.functional.scaled_dot_product_attention
    lengths: list[int] = []

    def record(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, *rest: Any,
               **how: Any) -> Tensor:
        lengths.extend([] if attn_mask is None else [k.shape[2]])
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return original(q, k, v, attn_mask, *rest, **how)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", record)
    spec = Spec(4, 2, 16, "float32", window=window, segments=segments)
    draw = torch.Generator().manual_seed(0)
    qkv = [torch.randn(2, T, h, 16, generator=draw, requires_grad=True)
           for T, h in ((Tq, 4), (Tk, 2), (Tk, 2))]
    seg = (torch.arange(Tk) > Tk // 3).int().expand(2, Tk).contiguous() if segments else None
    outs = [BACKENDS[name].attend(*qkv, spec, segments=seg) for name in ("sdpa_cudnn", "manual")]
    assert lengths and all(T % 128 == 0 for T in lengths)
    grads = [torch.autograd.grad(out.square().sum(), qkv) for out in outs]
    for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("Tq", [1, 5])
@pytest.mark.parametrize("H, Hkv, window", [(2, 2, None), (4, 2, 3), (4, 1, 1)])
def test_of_one_key_sdpa_cudnn_gives_v_without_the_kernel(Tq, H, Hkv, window) -> None:
    """PyTorch refuses such a call to cuDNN (sdp_utils.cpp): a prompt of one token, 5 x 1."""
    draw = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, T, h, 32, generator=draw).half()
              for T, h in ((Tq, H), (1, Hkv), (1, Hkv), (Tq, H))]
    truth = oracle.attention(*inputs, window=window)
    leaves = [t.detach().requires_grad_() for t in inputs[:3]]
    out = BACKENDS["sdpa_cudnn"].attend(*leaves, Spec(H, Hkv, 32, "float16", window=window))
    got = oracle.Result(out.detach(), *torch.autograd.grad(out, leaves, inputs[3]))
    oracle.check(got, oracle.plain(*inputs, window=window), truth, torch.float16)
    assert not out[:, : Tq - 1].any() and torch.equal(out[:, -1, ::H], inputs[2][:, 0, ::Hkv])


def documented(query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor,
               max_q: int, max_k: int, *, scale: float | None = None,
               window_size: tuple[int, int] = (-1, -1),
               enable_gqa: bool = False) -> Tensor:
    """torch.nn.attention.varlen.varlen_attn as PyTorch 2.12 documents it, without a GPU."""
    kernels = torch.nn.attention._cur_sdpa_kernel_backends()
    assert [kernel.name for kernel in kernels] == ["FLASH_ATTENTION"]  # else 2.14 takes cuDNN's
    assert enable_gqa or query.shape[1] == key.shape[1]
    assert query.shape[-1] % 8 == 0, "query should have a headdim multiple of 8"
    left, right = (None if side < 0 else side for side in window_size)
    lengths = cu_seq_q, cu_seq_k, max_q, max_k
    return varlen_stand_in(query, key, value, *lengths, False, left, right, scale, 0.0)


MASKED = [c for c in CASES if (c.window or c.segments) and c.Tq <= c.Tk <= 250]


@pytest.mark.parametrize(
    "case", [c for c in MASKED if not (c.softcap or c.sinks or c.alibi)], ids=lambda c: c.name
)
def test_sdpa_flash_takes_windows_and_segments_on_cuda(case, monkeypatch) -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
    *qkv, dout = (t.detach() for t in matrix.inputs(case, "float16")[:4])
    leaves = [t.requires_grad_() for t in qkv]
    segments = matrix.inputs(case, "float16").segments
    out = varlen(*leaves, case.spec("float16"), segments=segments)
    got = oracle.Result(out.detach(), *torch.autograd.grad(out, leaves, dout))
    matrix.compare(got, case, "float16", "cpu")


@pytest.mark.parametrize("window", [None, 30])
def test_a_long_prompt_into_a_static_cache(window) -> None:
    """Rows begin at different positions, and the prompt is longer than a block of queries."""
    spec = Spec(4, 2, 16, "float32", window=window, cache="static", grad=False)
    q, k, v = (torch.randn(2, T, h, 16) for T, h in ((300, 4), (400, 2), (400, 2)))
    cache = StaticView(torch.tensor([0, 90]).int(), torch.tensor([300, 300]).int(), 400)
    got, want = (BACKENDS[name].attend(q, k, v, spec, cache=cache) for name in ("sdpa", "manual"))
    torch.testing.assert_close(got, want)


def test_strides_that_the_operators_do_not_take() -> None:
    """The head dimension is not the last one in memory."""
    qkv = [torch.randn(1, 300, 16, 2).transpose(2, 3).requires_grad_() for _ in range(3)]
    spec = Spec(2, 2, 16, "float32", window=20)
    outs = [BACKENDS[name].attend(*qkv, spec) for name in ("sdpa", "manual")]
    grads = [torch.autograd.grad(out.square().sum(), qkv) for out in outs]
    for got, want in zip((outs[0], *grads[0]), (outs[1], *grads[1]), strict=True):
        torch.testing.assert_close(got, want)


def test_a_single_key_is_dropped_for_each_query_alone() -> None:
    """cuDNN takes no single key, so none of its kernels runs: this is PyTorch on any device."""
    q, k = torch.randn(2, 64, 4, 16), torch.randn(2, 1, 2, 16)
    spec = Spec(4, 2, 16, "float32", dropout=0.5, right=None)
    out = BACKENDS["sdpa_cudnn"].attend(q, k, k, spec)
    want = 2 * k.repeat_interleave(2, dim=2).expand_as(out)
    kept = out.abs().sum(-1) > 0  # (2, 64, 4)
    torch.testing.assert_close(out[kept], want[kept])
    assert 0.3 < kept.float().mean() < 0.7 and (kept != kept[:, :1]).any()


class OnCuda(Tensor):
    is_cuda = True


def test_what_begins_between_16_bytes_is_copied_on_cuda() -> None:
    """Fused kernels read it wrong there, or CUDA is lost ("misaligned address", on an H100)."""
    wide = torch.randn(2, 10, 4, 66).bfloat16()
    late = torch.randn(2 * 10 * 4 * 64 + 1).bfloat16()[1:].view(2, 10, 4, 64)
    for t in (wide[..., 1:65], wide[..., :64], wide[..., ::2], late):
        copy = loadable(t.as_subclass(OnCuda))
        assert copy.is_contiguous() and copy.data_ptr() % 16 == 0 and copy.equal(t)
    qkv = torch.randn(2, 10, 12, 64).bfloat16().as_subclass(OnCuda)
    q, k, v = qkv.split(4, dim=2)
    odd = torch.randn(2, 10, 4, 17).as_subclass(OnCuda)  # its rows are nowhere aligned
    for t in (q, k, v, q.transpose(1, 2), q[:, 3:], q[:1].expand(2, -1, -1, -1), odd):
        assert loadable(t) is t
    assert loadable(late) is late  # the CPU reads it as it is


class Library(torch.autograd.Function):
    """A kernel that notes the layout of the gradient it receives."""

    strides: tuple[int, ...] = ()

    @staticmethod
    def forward(ctx: Any, q: Tensor) -> Tensor:
        return q.clone()

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> Tensor:
        Library.strides = dout.stride()
        return dout


@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn"])
def test_every_gradient_of_a_library_is_contiguous(name, monkeypatch) -> None:
    """cuDNN's plan is kept for the layout of q, k and v: with a gradient in another one than the
    first call's its dq, dk and dv were wrong (torch 2.11)."""
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, *_, **__: Library.apply(q).as_subclass(OnCuda))
    q = torch.randn(2, 8, 4, 64).as_subclass(OnCuda).requires_grad_()
    out = BACKENDS[name].attend(q, q, q, Spec(4, 4, 64, "float32"))
    for dout in (torch.randn(2, 8, 4, 64), torch.randn(2, 4, 8, 64).transpose(1, 2)):
        (dq,) = torch.autograd.grad(out, q, dout, retain_graph=True)
        # the library has (B, H, T, D)
        assert dq.equal(dout) and Library.strides == (2048, 64, 256, 1)


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
    call = torch.compile(attention, backend=backend, fullgraph=True)
    out, _ = call(*leaves, spec, kernel=kernel)
    for n, grad in enumerate(torch.autograd.grad(out.sum(), leaves), 2):
        assert grad.eq(n).all()
