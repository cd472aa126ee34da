"""Every kernel on any input: shapes without queries or keys, strides, contexts, derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import BACKENDS, Machine, Ring, Spec
from attention.check import oracle
from attention.function import attention
from attention.spec import DTYPES, visible

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
    """Spec, [q, k, v, dout], and segments and sinks."""
    Hkv = draw(st.integers(1, 2))
    spec = Spec(
        Hkv * draw(st.integers(1, 3)), Hkv, draw(st.sampled_from([1, 4, 16])),
        draw(st.sampled_from(DTYPES)), window=draw(st.none() | st.integers(1, 12)),
        segments=draw(st.booleans()), softcap=draw(st.sampled_from([None, None, 1.5])),
        sinks=draw(st.sampled_from([False, False, True])),
    )  # fmt: skip
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
@settings(max_examples=1500, deadline=None)
def test_every_kernel_is_right_for_any_shape_stride_and_context(call, data, context) -> None:
    spec, (q, k, v, dout), options = call
    able = kernels(spec)
    name = data.draw(st.sampled_from(sorted(able)))
    leaves = [
        t.detach().requires_grad_() for t in (q, k, v, *list(options.values())[-1:] * spec.sinks)
    ]
    given_ = options | ({"sinks": leaves[3]} if spec.sinks else {})
    with context():
        out = able[name](*leaves[:3], spec, **given_)
        out, L = out if name.endswith("lse") else (out, None)
        with torch.autocast("cpu", enabled=False):  # PyTorch's own backward obeys it, too
            grads = torch.autograd.grad(out, leaves, dout)
    got = oracle.Result(out.detach(), *grads)
    if not (q.numel() and k.numel()):
        for g, t in zip((out, *grads), (q, *leaves), strict=True):
            assert g.dtype == t.dtype and g.shape == t.shape and not g.any()
        assert L is None or bool((-torch.inf == L).all())
        return
    asked = {"window": spec.window, "softcap": spec.softcap, **options}
    truth, plain = (f(q, k, v, dout, **asked) for f in (oracle.attention, oracle.plain))
    half = spec.dtype in DTYPES[:2]  # of a few numbers plain PyTorch is often exact by luck
    oracle.check(got, plain, truth, getattr(torch, spec.dtype), factor=8 if half else 1)
    if L is not None:
        torch.testing.assert_close(
            L.double(), log_sum_exp(q, k, spec, options.get("segments")), rtol=0.02, atol=0.02
        )


def log_sum_exp(q: Tensor, k: Tensor, spec: Spec, segments: Tensor | None) -> Tensor:
    """(B, H, Tq) float64, by one row at a time."""
    (B, Tq, H, D), (Tk, Hkv) = q.shape, k.shape[1:3]
    L = torch.full((B, H, Tq), -torch.inf, dtype=torch.float64)
    for b, h, i, j in product(range(B), range(H), range(Tq), range(Tk)):
        seg = () if segments is None or i + Tk < Tq else (segments[b, i + Tk - Tq], segments[b, j])
        if visible(i, j, Tk - Tq, spec.window, *seg):
            s = float(q[b, i, h].double() @ k[b, j, h * Hkv // H].double()) / D**0.5
            s = s if spec.softcap is None else spec.softcap * math.tanh(s / spec.softcap)
            L[b, h, i] = torch.logaddexp(L[b, h, i], torch.tensor(s).double())
    return L


# --- derivatives ---

SPECS = {
    "plain": Spec(2, 2, D, "float32"),
    "window": Spec(4, 2, D, "float32", window=3),
    "segments": Spec(4, 1, D, "float32", segments=True),
    "sinks": Spec(4, 2, D, "float32", sinks=True),
    "long": Spec(1, 1, D, "float32", window=260),  # several blocks of queries
}
EXACT = ("manual", "sdpa_math")


def some(spec: Spec, T: int) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
    noise = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, T, H, D, generator=noise) for H in (spec.n_head, *[spec.n_kv_head] * 2)
    )
    options = {"segments": (torch.arange(T) // 3).int().expand(2, T)} if spec.segments else {}
    return q, k, v, options | ({"sinks": torch.arange(4.0)} if spec.sinks else {})


def formula(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, segments: Tensor | None = None,
            sinks: Tensor | None = None) -> Tensor:  # fmt: skip
    """The contract in six lines that autograd differentiates as often as needed."""
    i = torch.arange(q.shape[-3])
    k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=-2) for t in (k, v))
    seg = () if segments is None else (segments[..., None, :, None], segments[..., None, None, :])
    seen = visible(i[:, None], i, 0, spec.window, *seg)
    weights = (torch.einsum("...ihd,...jhd->...hij", q, k) * D**-0.5).exp() * seen
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp()[:, None, None])
    return torch.einsum("...hij,...jhd->...ihd", weights / total, v)


@pytest.mark.parametrize("case", SPECS)
def test_a_second_derivative_is_right_or_an_error(case) -> None:
    """W is behind q, k and v, and in front of their gradient: a lost path shows in the sum."""
    spec = SPECS[case]
    *qkv, options = some(spec, 300 if case == "long" else 6)
    W = torch.eye(D).requires_grad_()

    def norm(attend: Callable[..., Any]) -> Tensor:
        found = attend(*(x @ W for x in leaves), spec, **options)
        out = found if isinstance(found, Tensor) else found[0]
        dx = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in dx), W)[0]

    leaves = [t.requires_grad_() for t in qkv]
    able = kernels(spec)
    if not spec.sinks:
        able["ring"] = Ring().attend(BACKENDS["tiled"])
    want = norm(formula)
    for name, attend in able.items():
        if name in EXACT:
            torch.testing.assert_close(norm(attend), want, rtol=1e-4, atol=1e-4)
        else:
            with pytest.raises(RuntimeError):
                norm(attend)
