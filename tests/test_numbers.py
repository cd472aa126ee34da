"""Every kernel on any input: shapes without queries or keys, strides, contexts, derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Machine, Ring, Spec
from attention.function import attention
from attention.masks import filled_cache
from attention.spec import visible

HERE, D = Machine.here("cpu"), 8


def kernels(spec: Spec) -> dict[str, Callable[..., Any]]:
    """Those that take a Spec on this CPU, and those that also return the log-sum-exp. Not flex,
    which compiles for seconds and has no gradient here."""
    found: dict[str, Callable[..., Any]] = {}
    for name, backend in BACKENDS.items():
        if name != "flex" and not backend.why_not(spec, HERE):
            found[name] = backend.attend
        if not backend.why_not(replace(spec, lse=True), HERE):
            found[f"{name}, lse"] = partial(attention, kernel=backend.partial)
    return found


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS: list[Callable[[], Any]] = [
    nullcontext,
    partial(default_dtype, torch.float64),
    partial(default_dtype, torch.bfloat16),
    partial(torch.device, "meta"),
    partial(torch.autocast, "cpu", torch.bfloat16),
    torch.autograd.graph.save_on_cpu,
]
LAYOUTS: list[Callable[[Tensor], Tensor]] = [
    lambda t: t,
    lambda t: torch.stack([t, t], dim=-1).flatten(-2)[..., ::2],
    lambda t: t.transpose(1, 3).contiguous().transpose(1, 3),
    lambda t: t[..., :1].expand_as(t),
    lambda t: t[:, :, :1].expand_as(t),
]


@st.composite
def calls(draw: st.DrawFn) -> tuple[Spec, list[Tensor], dict[str, Tensor]]:
    """Spec, [q, k, v, dout], and segments and sinks.

    Half precision is left to the matrix: of a few numbers plain PyTorch, which sets the tolerance,
    is often exact by luck.
    """
    Hkv = draw(st.integers(1, 2))
    spec = Spec(
        Hkv * draw(st.integers(1, 3)), Hkv, draw(st.sampled_from([1, 4, 16])),
        draw(st.sampled_from(["float32", "float64"])), window=draw(st.none() | st.integers(1, 12)),
        segments=draw(st.booleans()), softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=draw(st.sampled_from([False, False, True])),
    )
    B, Tq, Tk = draw(st.sampled_from([1, 2, 2, 0])), *(draw(st.integers(0, 12)) for _ in "qk")
    noise = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    inputs = [
        draw(st.sampled_from(LAYOUTS))(
            torch.randn(B, T, H, spec.head_dim, generator=noise).to(getattr(torch, spec.dtype))
        )
        for T, H in ((Tq, spec.n_head), (Tk, Hkv), (Tk, Hkv), (Tq, spec.n_head))
    ]
    options = {}
    if spec.segments:
        options["segments"] = torch.randint(2, (B, Tk), generator=noise).cumsum(1).int()
    if spec.sinks:
        options["sinks"] = torch.randn(spec.n_head, generator=noise).to(inputs[0])
    return spec, inputs, options


@given(calls(), st.data(), st.sampled_from(CONTEXTS))
@settings(max_examples=80, deadline=None)
def test_every_kernel_is_right_for_any_shape_stride_and_context(call, data, context) -> None:
    spec, (q, k, v, dout), options = call
    able = kernels(spec)
    name = data.draw(st.sampled_from(sorted(able)))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    own = dict(options)
    if spec.sinks:
        own["sinks"] = options["sinks"].clone().requires_grad_()
        leaves.append(own["sinks"])
    with context():
        out = able[name](*leaves[:3], spec, **own)
        out, L = out if name.endswith("lse") else (out, None)
        with torch.autocast("cpu", enabled=False):  # PyTorch's own backward obeys it, too
            grads = torch.autograd.grad(out, leaves, dout)
    got = oracle.Result(out.detach(), *grads)
    if not (q.numel() and k.numel()):
        for g, t in zip((out, *grads), (q, *leaves), strict=True):
            assert g.dtype == t.dtype and g.shape == t.shape and not g.any()
        assert L is None or bool(L.isneginf().all())
        return
    asked = {"window": spec.window, "softcap": spec.softcap, **options}
    truth, plain = (f(q, k, v, dout, **asked) for f in (oracle.attention, oracle.plain))
    oracle.check(got, plain, truth, getattr(torch, spec.dtype))


# --- derivatives ---

SPECS = {
    "plain": Spec(2, 2, D, "float32"),
    "window": Spec(4, 2, D, "float32", window=3),
    "segments": Spec(4, 1, D, "float32", segments=True),
    "sinks": Spec(4, 2, D, "float32", sinks=True),
    "long": Spec(1, 1, D, "float32", window=260),  # several blocks of queries
}


def some(spec: Spec, T: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, T, H, D, generator=noise) for H in (spec.n_head, *[spec.n_kv_head] * 2)
    )
    options = {"segments": (torch.arange(T) // 3).int().expand(2, T)} if spec.segments else {}
    return q, k, v, options | ({"sinks": torch.arange(4.0)} if spec.sinks else {})


def formula(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
            sinks: Tensor | None = None) -> Tensor:
    """The contract in six lines that autograd differentiates as often as needed."""
    i = torch.arange(q.shape[-3])
    k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=-2) for t in (k, v))
    seg = () if segments is None else (segments[..., None, :, None], segments[..., None, None, :])
    seen = visible(i[:, None], i, 0, spec.window, *seg)
    weights = (torch.einsum("...ihd,...jhd->...hij", q, k) * D**-0.5).exp() * seen
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("...hij,...jhd->...ihd", weights / total, v)


def derivable(spec: Spec) -> dict[str, Callable[..., Tensor]]:
    found = {name: attend for name, attend in kernels(spec).items() if "lse" not in name}
    if not spec.sinks:
        found["ring"] = Ring().attend(BACKENDS["tiled"])
    if not (spec.sinks or spec.segments):  # the interpreter is slow
        found.pop("triton", None)
    return found


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize("case", SPECS)
def test_a_second_derivative_is_right_or_an_error(case, behind: bool) -> None:
    """W is in front of the kernel and of its gradient, or only of its gradient: a zero of one path
    is a wrong sum."""
    spec = SPECS[case]
    *qkv, options = some(spec, 300 if case == "long" else 6)
    leaves, W = [t.requires_grad_() for t in qkv], torch.eye(D).requires_grad_()

    def penalty(attend: Callable[..., Tensor]) -> Tensor:
        before, after = (torch.eye(D), W) if behind else (W, torch.eye(D))
        out = attend(*(x @ before for x in leaves), spec, **options) @ after
        dx = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in dx) + W.sum(), W)[0]

    want = penalty(formula)
    for name, attend in derivable(spec).items():
        if name in ("manual", "sdpa_math"):
            torch.testing.assert_close(penalty(attend), want, rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(RuntimeError, match="derivative"):
                penalty(attend)


@pytest.mark.parametrize("case", SPECS)
def test_torch_func_differentiates_every_kernel(case) -> None:
    spec = SPECS[case]
    q, k, v, options = some(spec, 300 if case == "long" else 6)

    def grads(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def loss(q: Tensor, k: Tensor) -> Tensor:
            return attend(q, k, v, spec, **options).square().sum()

        return torch.func.grad(loss, argnums=(0, 1))(q, k)

    want = grads(formula)
    for attend in derivable(spec).values():
        torch.testing.assert_close(grads(attend), want, rtol=1e-3, atol=1e-4)


# --- single cases ---


@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_scores_past_the_range_of_float16(sign, softcap) -> None:
    """All scores are +-72,408 or the softcap: each output is the mean of the visible values."""
    for cache in ("none", "static", "paged"):
        paged = {"cache": cache, "page_size": 4 if cache == "paged" else None}
        spec = Spec(1, 1, 128, "float16", softcap=softcap, grad=False, **paged)
        q = torch.full((1, 4, 1, 128), 80.0).half()
        v = torch.arange(4.0).view(1, 4, 1, 1).expand(1, 4, 1, 128).half().contiguous()
        held_k, held_v, view = filled_cache(sign * q, v, spec)
        options = {} if cache == "none" else {"cache": view([0], [4])}
        for name, backend in BACKENDS.items():
            if name != "flex" and not backend.why_not(spec, HERE):
                out = backend.attend(q, held_k, held_v, spec, **options)
                assert out[0, :, 0, 0].tolist() == [0, 0.5, 1, 1.5], (name, cache)


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_gradients_past_the_range_of_float16(softcap) -> None:
    """dO V^T is about 460,000 and the gradients a few hundred: rounding O moves them."""
    noise = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8, 2, 128, generator=noise) for _ in range(4))

    def gradients(attend: Callable[..., Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.to(dtype).requires_grad_() for t in (q, k, 60 + v)]
        spec = Spec(2, 2, 128, str(dtype)[6:], softcap=softcap)
        return torch.autograd.grad(attend(*leaves, spec), leaves, (60 + dout).to(dtype))

    want = gradients(BACKENDS["manual"].attend, torch.float64)
    for name, backend in BACKENDS.items():
        if name == "flex" or backend.why_not(Spec(2, 2, 128, "float16", softcap=softcap), HERE):
            continue
        for got, exact in zip(gradients(backend.attend, torch.float16), want, strict=True):
            assert (got - exact).abs().max() < 0.2 * exact.abs().max(), name


def test_a_part_with_queries_before_every_key_has_their_zero_gradients() -> None:
    spec = Spec(4, 2, D, "float32", window=3, lse=True)
    q, k, v, _ = some(spec, 7)
    k, v, dout = k[:, :4], v[:, :4], torch.ones_like(q)
    for name, backend in BACKENDS.items():
        if backend.partial is None or backend.why_not(spec, HERE):
            continue
        out, L = backend.partial.forward(q, k, v, spec, -3, None)
        assert L[:, :, :3].isneginf().all() and L[:, :, 3:].isfinite().all(), name
        got = oracle.Result(out, *backend.partial.backward(dout, q, k, v, out, L, spec, -3, None))
        truth, plain = (f(q, k, v, dout, window=3) for f in (oracle.attention, oracle.plain))
        oracle.check(got, plain, truth, torch.float32)


def test_flex_takes_no_queries_no_keys_and_no_batch() -> None:
    spec = Spec(2, 2, 16, "float32", grad=False)
    for B, Tq, Tk in ((2, 0, 5), (2, 5, 0), (0, 5, 5)):
        q, k = torch.randn(B, Tq, 2, 16), torch.randn(B, Tk, 2, 16)
        out = BACKENDS["flex"].attend(q, k, k, spec)
        assert out.shape == q.shape and not out.any()
