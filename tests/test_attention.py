"""Every backend against the oracle: the whole matrix, the causality canary, dropout, refusals.

Backends come from the registry, so a kernel that is added later is tested with no edit here. What a
backend supports is checked number by number; what it does not support, it must refuse. CUDA cases
carry the marker `gpu` and skip naming what is missing, unless REQUIRE_BACKENDS (names, separated by
commas) says that this machine must run them.
"""

from __future__ import annotations

import ast
import itertools
import math
import os
import traceback
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from attention import (
    BACKENDS,
    BackendUnavailable,
    Machine,
    Policy,
    Spec,
    matrix,
    oracle,
    packages,
    probe,
    resolve,
    views,
    visible,
)
from attention.matrix import CASES, HUGE, PHASES, Case, call, canaries, canary, check, qkv
from attention.spec import DTYPES, Caps

STRICT = Policy(fallback=False)
REQUIRED = [name for name in os.environ.get("REQUIRE_BACKENDS", "").split(",") if name]
HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


assert len({c.name for c in CASES}) == len(CASES)


# Triton's interpreter takes up to seconds a case: these are always run, `slow` runs the others.
FAST = {
    "float32": ("1", "2", "97", "113x203", "1x97", "64x17", "mqa-64x17", "gqa", "window16",
                "window64-113x203", "window10-64x17", "padded-43x97", "packed-97x43",
                "packed-window16-gqa", "D20", "D80-mqa-window-17x33", "split",
                "BHTD-31x64-window-packed", "large", "scale-1x97", "sinks-gqa-window16-padded",
                "softcap-large-window16-packed", "scale-softcap-sinks-packed-window20"),
    "float16": ("64", "63x64", "packed", "D128", "large-gqa-window-packed", "softcap",
                "sinks-64x17"),
}  # fmt: skip


def _grid() -> Iterator[Any]:
    """(backend, device, case, dtype); where there is no CUDA one case a backend says so."""
    for name, case, dtype in itertools.product(BACKENDS, CASES, DTYPES):
        long = name == "triton" and dtype in FAST and case.name not in FAST[dtype]
        yield pytest.param(name, "cpu", case, dtype, id=f"{name}-cpu-{case.name}-{dtype}",
                           marks=pytest.mark.slow if long else ())  # fmt: skip
    cases = CASES if HAS_CUDA else CASES[:1]
    for name, case, dtype in itertools.product(BACKENDS, cases, DTYPES if HAS_CUDA else DTYPES[:1]):
        id_ = f"{name}-cuda-{case.name}-{dtype}"
        yield pytest.param(name, "cuda", case, dtype, marks=pytest.mark.gpu, id=id_)


@cache
def _machine(device: str) -> Machine:
    return Machine.here(device, packages())


def _need(device: str, name: str) -> Machine:
    """The machine; where the device is missing the test skips, or fails if `name` is required."""
    if device == "cuda" and not HAS_CUDA:
        if name in REQUIRED:
            pytest.fail(f"REQUIRE_BACKENDS names {name}, but there is no CUDA device")
        pytest.skip("no CUDA device")
    return _machine(device)


def _assert_refused(name: str, spec: Spec, machine: Machine) -> None:
    """Asked for by name it is an error with every reason; with fallback another one runs."""
    why = BACKENDS[name].why_not(spec, machine)
    with pytest.raises(BackendUnavailable) as e:
        resolve(name, spec, machine, STRICT)
    assert all(reason in str(e.value) for reason in why)
    chosen = resolve(name, spec, machine)
    assert chosen.backend.name != name and chosen.rejected[name] == tuple(why)


def _dtypes(name: str, device: str) -> tuple[str, ...]:
    """Those of a canary: flex compiles for each, and Triton's interpreter is slow."""
    slow = device == "cpu" and name in ("flex", "triton")
    return ("float32", "float64") if slow else DTYPES


@pytest.mark.parametrize("name, device, case, dtype", sorted(
    _grid(), key=lambda p: (p.values[1], p.values[2].name, p.values[3])))  # fmt: skip
def test_numbers_or_a_refusal(name: str, device: str, case: Case, dtype: str) -> None:
    """Sorted by case, so that the oracle runs once for all backends."""
    machine = _need(device, name)
    spec = case.spec(dtype)
    if BACKENDS[name].why_not(spec, machine):
        _assert_refused(name, spec, machine)
        return
    check(BACKENDS[name], case, dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_left_padded_rows_equal_the_same_rows_alone(name: str, device: str) -> None:
    """Padding is a segment of its own: each row is held against the truth of its real part."""
    machine = _need(device, name)
    pads, T = (0, 5, 20), 24
    lengths = (3,) if (name, device) == ("flex", "cpu") else (T, 3, 1)  # it compiles for each
    for dtype, Tq, window in itertools.product(_dtypes(name, device), lengths, (None, 6)):
        spec = Spec(4, 2, 32, dtype, window=window, segments=True, grad=False)
        if BACKENDS[name].why_not(spec, machine):
            _assert_refused(name, spec, machine)
            continue
        draw = torch.Generator().manual_seed(11)
        q, k, v = (torch.randn(len(pads), T, h, 32, generator=draw).to(getattr(torch, dtype))
                   for h in (4, 2, 2))  # fmt: skip
        seg = torch.stack([(torch.arange(T) >= pad).int() for pad in pads])
        on = [q.to(device)[:, T - Tq :], *(t.to(device) for t in (k, v, seg))]
        with torch.no_grad():
            out = BACKENDS[name].attend(*on[:3], spec, segments=on[3]).cpu()
        for b, pad in enumerate(pads):
            row = q[b : b + 1, max(pad, T - Tq) :], k[b : b + 1, pad:], v[b : b + 1, pad:]
            truth = oracle.attention(*row, row[0], window=window)
            plain = oracle.plain(*(t.to(device) for t in row), row[0].to(device), window=window)
            got = oracle.Result(out[b : b + 1, -row[0].shape[1] :])
            oracle.check(got, plain, truth, getattr(torch, dtype))


def test_a_device_gets_the_strides_of_the_model() -> None:
    """q, k and v are cut from the output of one product."""
    for case in CASES:
        here, there = (matrix.draw(case, "float16", device) for device in ("cpu", "meta"))
        for t, same in zip(here, there, strict=True):
            assert same.stride() == t.stride() and same.storage_offset() == t.storage_offset()
    split = next(c for c in CASES if c.name == "split")
    assert not any(t.is_contiguous() for t in matrix.draw(split, "float16", "meta")[:3])


@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash", "sdpa_math"])
def test_these_refuse_nothing_on_the_cpu(name: str) -> None:
    """Without this, a backend whose caps refuse everything would pass the matrix."""
    every = name in ("manual", "tiled")
    cases = [c for c in CASES if every or not (c.scale or c.softcap or c.sinks)]
    specs = [case.spec(dtype) for case in cases for dtype in DTYPES]
    assert [s for s in specs if BACKENDS[name].why_not(s, _machine("cpu"))] == []


@pytest.mark.parametrize("name", REQUIRED)
def test_required_backends_run(name: str) -> None:
    device = "cuda" if HAS_CUDA else "cpu"
    spec = Spec(4, 4, 64, "float16")
    assert resolve(name, spec, _machine(device), STRICT).backend.name == name
    assert probe(BACKENDS[name], spec, device).why == ()


# --- which kernel ran ---


@pytest.mark.parametrize("name, kernels", [
    ("sdpa_math", ("math",)), ("sdpa_flash", ("flash (CPU)",)), ("sdpa", ("flash (CPU)",)),
    ("manual", ()), ("tiled", ())])  # fmt: skip
@pytest.mark.parametrize("case", [c for c in CASES if c.name in
                         ("64", "113x203", "1x97", "gqa", "window16", "packed", "D20")],
                         ids=lambda c: c.name)  # fmt: skip
def test_on_the_cpu_the_kernel_that_was_named_runs(name, kernels, case) -> None:
    for dtype in DTYPES:
        assert probe(BACKENDS[name], case.spec(dtype), "cpu").kernels == kernels


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("window", [None, 16])
def test_on_cuda_the_kernel_that_was_named_runs(name, dtype, window) -> None:
    machine = _need("cuda", name)
    spec = Spec(4, 2, 64, dtype, window=window)
    if BACKENDS[name].why_not(spec, machine):
        _assert_refused(name, spec, machine)
    else:
        assert probe(BACKENDS[name], spec, "cuda").kernels == (name.removeprefix("sdpa_"),)


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
@pytest.mark.parametrize("Tk", [8, 5, 11])
def test_a_pinned_kernel_that_cannot_run_raises_and_nothing_else_runs(name, Tk) -> None:
    """Where there are more queries than keys, too."""
    q, k = torch.randn(1, 8, 2, 16), torch.randn(1, Tk, 2, 16)
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
        BACKENDS[name].attend(q, k, k, Spec(2, 2, 16, "float32"))


@pytest.mark.parametrize("name, kernel", [
    ("sdpa_math", "aten::_scaled_dot_product_attention_math"),
    ("sdpa_flash", "aten::_scaled_dot_product_flash_attention_for_cpu")])  # fmt: skip
@pytest.mark.parametrize("Tq, Tk", [(8, 8), (8, 5), (5, 8)])
def test_the_pin_holds_whatever_the_lengths(name, kernel, Tq, Tk) -> None:
    q, k = torch.randn(1, Tq, 2, 16), torch.randn(1, Tk, 2, 16)
    with torch.profiler.profile() as profiler:
        BACKENDS[name].attend(q, k, k, Spec(2, 2, 16, "float32"))
    ran = {e.key for e in profiler.key_averages() if "_scaled_dot_product" in e.key}
    assert kernel in ran and len(ran - {"aten::_scaled_dot_product_attention"}) == 1, ran


# --- deterministic by PyTorch's switch ---


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "sdpa_efficient"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_on_cuda_the_switch_gives_the_same_bits(name, dropout) -> None:
    machine = replace(_need("cuda", name), deterministic=True)
    spec = Spec(8, 4, 64, "float16", dropout=dropout)
    if BACKENDS[name].why_not(spec, machine):
        return _assert_refused(name, spec, machine)
    draw = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(4, 1024, h, 64, generator=draw).to("cuda", torch.float16)
                     for h in (8, 4, 4, 8))  # fmt: skip
    results = []
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            torch.manual_seed(0)
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = BACKENDS[name].attend(*leaves, spec)
            results.append([out, *torch.autograd.grad(out, leaves, dout)])
    finally:
        torch.use_deterministic_algorithms(False)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))


# --- the causality canary ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", BACKENDS)
def test_canary_a_later_token_moves_nothing_earlier(name, phase, device) -> None:
    _canary(name, phase, device, _dtypes(name, device))


@pytest.mark.slow
@pytest.mark.parametrize("phase", PHASES)
def test_canary_of_triton_in_float16(phase) -> None:
    _canary("triton", phase, "cpu", ("float16",))


def _canary(name: str, phase: str, device: str, dtypes: tuple[str, ...]) -> None:
    machine = _need(device, name)
    # Grouped heads with the window, all heads without: in the interpreter that must do.
    slow = name == "triton" and device == "cpu" and dtypes != ("float16",)
    for dtype in dtypes:
        for spec in canaries(dtype, phase):
            if slow and (spec.window is None) == (spec.n_kv_head == 2):
                continue
            if BACKENDS[name].why_not(spec, machine):
                _assert_refused(name, spec, machine)
            else:
                canary(BACKENDS[name], spec, phase, device, few=slow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_canary_huge_negative_scores(name, device) -> None:
    """All scores are -59,397: a mask of, say, -1e4 would be the largest of them, and leak."""
    machine, Tk = _need(device, name), 20
    lengths = (7,) if (name, device) == ("flex", "cpu") else (20, 7, 1)
    for dtype, window, Tq in itertools.product(_dtypes(name, device), (None, 5), lengths):
        spec = Spec(2, 1, 32, dtype, window=window, grad=Tq == Tk)
        if BACKENDS[name].why_not(spec, machine):
            _assert_refused(name, spec, machine)
            continue
        q = torch.full((1, Tq, 2, 32), -10500.0, dtype=getattr(torch, dtype), device=device)
        k = torch.ones(1, Tk, 1, 32, dtype=q.dtype, device=device)
        v = torch.arange(Tk, dtype=q.dtype, device=device)[None, :, None, None].expand(k.shape)
        out = call(BACKENDS[name], q, k, v.contiguous(), spec)[0, :, 0, 0].double().cpu()
        last = torch.arange(Tk - Tq, Tk)  # the mean of the numbers of the keys that are seen
        first = torch.zeros_like(last) if window is None else (last - window + 1).clamp(min=0)
        torch.testing.assert_close(out, (first + last) / 2, rtol=0.02, atol=0.02, check_dtype=False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_canary_decode_reads_nothing_behind_its_view(name, device) -> None:
    """Keys in a longer buffer, as a cache holds them: NaN behind the last one must not be read."""
    machine = _need(device, name)
    for dtype in _dtypes(name, device):
        spec = Spec(4, 2, 32, dtype, grad=False)
        if BACKENDS[name].why_not(spec, machine):
            _assert_refused(name, spec, machine)
            continue
        q, k, v = qkv(4, 2, 40, dtype, device)
        T = 33
        clean = call(BACKENDS[name], q[:, T - 1 : T], k[:, :T].clone(), v[:, :T].clone(), spec)
        k[:, T:], v[:, T:] = float("nan"), float("nan")
        got = call(BACKENDS[name], q[:, T - 1 : T], k[:, :T], v[:, :T], spec)
        assert got.isfinite().all()
        torch.testing.assert_close(got, clean)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_canary_earlier_outputs_send_no_gradient_to_later_tokens(name, device) -> None:
    machine = _need(device, name)
    for dtype, window in itertools.product(_dtypes(name, device), (None, 9)):
        spec = Spec(4, 2, 32, dtype, window=window)
        if BACKENDS[name].why_not(spec, machine):
            _assert_refused(name, spec, machine)
            continue
        q, k, v = (t.requires_grad_() for t in qkv(4, 2, 33, dtype, device))
        out = BACKENDS[name].attend(q, k, v, spec)
        dout = torch.randn_like(out)
        dout[:, 20:] = 0
        for grad in torch.autograd.grad(out, (q, k, v), dout):
            assert not grad[:, 20:].any() and grad[:, 19].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("phase", ["training", "evaluation", "chunked prefill"])
@pytest.mark.parametrize("name", BACKENDS)
def test_canary_another_segment_moves_nothing(name, phase, device) -> None:
    machine = _need(device, name)
    Tq, Tk, grad = PHASES[phase]
    for dtype, window in itertools.product(_dtypes(name, device), (None, 9)):
        spec = Spec(4, 2, 32, dtype, window=window, segments=True, grad=grad)
        if BACKENDS[name].why_not(spec, machine):
            _assert_refused(name, spec, machine)
            continue
        q, k, v = qkv(4, 2, Tk, dtype, device)
        seg = (torch.arange(Tk) // 11).int().expand(2, Tk).contiguous().to(device)  # 3 times 11
        first = Tk - Tq
        before = call(BACKENDS[name], q[:, first:], k, v, spec, segments=seg)
        for changed in (0, 1, 2):
            inside = seg[0] == changed
            other = ~inside[first:]
            louder = [t.clone() for t in (q, k, v)]
            for t in louder:
                t[:, inside] *= HUGE / 30  # q . k grows by the square
            after = call(BACKENDS[name], louder[0][:, first:], *louder[1:], spec, segments=seg)
            assert torch.equal(before[:, other], after[:, other])
            assert other.all() or not torch.equal(before[:, ~other], after[:, ~other])


def test_the_canary_would_catch_a_leak() -> None:
    """The same question to a call that is not causal, and to one that is aligned top-left."""
    q, k, v = (t.transpose(1, 2) for t in qkv(4, 4, 33, "float32", "cpu"))
    louder = v.clone()
    louder[:, :, 32] *= HUGE
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert not torch.equal(sdpa(q, k, v)[:, :, 0], sdpa(q, k, louder)[:, :, 0])
    chunk = q[:, :, 13:]  # a top-left mask lets the last of these see 20 keys of 33
    assert torch.equal(sdpa(chunk, k, v, is_causal=True), sdpa(chunk, k, louder, is_causal=True))


# --- dropout: not comparable number by number, but P can be read off ---


def _dropping(name: str, device: str, p: float, **changes: Any) -> Spec | None:
    machine = _need(device, name)
    spec = Spec(2, 2, 16, "float32", dropout=p, **changes)
    if BACKENDS[name].why_not(spec, machine):
        spec = replace(spec, dtype="float16")
    if BACKENDS[name].why_not(spec, machine):
        _assert_refused(name, spec, machine)
        return None
    return spec


def _revealing(spec: Spec, device: str, B: int) -> tuple[Tensor, Tensor, Tensor]:
    """q and k at random and v the identity: T = D, so that out[b, i, h] is row i of P."""
    draw = torch.Generator().manual_seed(3)
    D, dtype = spec.head_dim, getattr(torch, spec.dtype)
    q, k = (torch.randn(1, D, 2, D, generator=draw).expand(B, D, 2, D) for _ in range(2))
    v = torch.eye(D)[None, :, None, :].expand(B, D, 2, D)
    q, k, v = (t.to(device, dtype).contiguous() for t in (q, k, v))
    return q, k, v


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name, p", [
    pytest.param(name, p, marks=pytest.mark.slow if (name, p) == ("triton", 0.125) else ())
    for name in BACKENDS for p in (0.125, 0.5)])  # fmt: skip
def test_dropout_drops_a_share_p_and_scales_what_stays(name, device, p) -> None:
    if not (spec := _dropping(name, device, p)):
        return
    B = 16
    q, k, v = _revealing(spec, device, B)
    probs = call(BACKENDS[name], q, k, v, replace(spec, dropout=0.0)).cpu()  # (B, T, H, T)
    torch.manual_seed(0)
    total, n, shares = torch.zeros_like(probs[:1]), 0, []
    # An entry that is never dropped is p / (1 - p) too large: with so many draws that is 6 sigma.
    for _ in range(math.ceil(40 * (1 - p) / p / B)):
        got = call(BACKENDS[name], q, k, v, spec).cpu()
        kept = got != 0
        tolerance = 8 * torch.finfo(got.dtype).eps
        torch.testing.assert_close(
            got[kept], probs[kept] / (1 - p), rtol=tolerance, atol=tolerance / 100
        )
        total, n = total + got.sum(dim=0, keepdim=True), n + len(got)
        shares.append(kept.sum() / (probs != 0).sum())
    # The mean of n draws of P M / (1 - p), with M Bernoulli, has this standard deviation.
    probs, mean = probs[:1].double(), total.double() / n
    sigma = probs * (p / ((1 - p) * n)) ** 0.5
    assert ((mean - probs).abs() <= 6 * sigma + 1e-3 * probs).all()
    draws = n * int((probs != 0).sum())
    assert abs(float(torch.stack(shares).mean()) - (1 - p)) < 6 * (p * (1 - p) / draws) ** 0.5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_repeats_with_the_seed_and_backward_uses_the_same_mask(name, device) -> None:
    """With v the identity the output is P M / (1 - p); M then gives out and gradients of any v."""
    if not (spec := _dropping(name, device, 0.25)):
        return
    q, k, eye = _revealing(spec, device, B=4)
    v = torch.randn(q.shape, generator=torch.Generator().manual_seed(1)).to(eye)
    dout = torch.randn(q.shape, generator=torch.Generator().manual_seed(2)).to(eye)
    torch.manual_seed(5)
    mask = (call(BACKENDS[name], q, k, eye, spec) != 0).double()  # (B, T, H, T)
    torch.manual_seed(5)
    assert torch.equal(mask, (call(BACKENDS[name], q, k, eye, spec) != 0).double())
    assert not torch.equal(
        mask, (call(BACKENDS[name], q, k, eye, spec) != 0).double()
    )  # the seed moved on

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    torch.manual_seed(5)
    out = BACKENDS[name].attend(*leaves, spec)
    got = [out, *torch.autograd.grad(out, leaves, dout)]

    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    i = torch.arange(q.shape[1], device=q.device)
    scores = torch.einsum("bihd,bjhd->bihj", *exact[:2]) / spec.head_dim**0.5
    scores = scores.masked_fill(~visible(i[:, None], i)[None, :, None], float("-inf"))
    probs = torch.softmax(scores, dim=-1) * mask / (1 - spec.dropout)
    want = torch.einsum("bihj,bjhd->bihd", probs, exact[2])
    for g, w in zip(got, [want, *torch.autograd.grad(want, exact, dout.double())], strict=True):
        tolerance = 20 * torch.finfo(g.dtype).eps
        torch.testing.assert_close(g.double(), w, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_without_dropout_no_random_number_is_drawn(name, device) -> None:
    machine = _need(device, name)
    q = torch.randn(2, 33, 2, 32)
    for dtype, window in itertools.product(_dtypes(name, device), (None, 9)):
        spec = Spec(2, 2, 32, dtype, window=window)
        if BACKENDS[name].why_not(spec, machine):
            continue  # the matrix asserts the refusal
        x = q.to(device, getattr(torch, dtype)).requires_grad_()
        before = torch.get_rng_state(), torch.cuda.get_rng_state() if device == "cuda" else None
        BACKENDS[name].attend(x, x, x, spec).sum().backward()
        assert torch.equal(before[0], torch.get_rng_state())
        if before[1] is not None:
            assert torch.equal(before[1], torch.cuda.get_rng_state())


# --- the oracle itself, and the definition of masking ---


def test_visible_against_a_table_by_hand() -> None:
    def table(Tq: int, Tk: int, window: int | None = None, seg: str | None = None) -> list[str]:
        rows = []
        for i in range(Tq):
            seg_i = seg[i + Tk - Tq] if seg and i + Tk >= Tq else None
            row = [visible(i, j, Tk - Tq, window, seg_i, seg and seg[j]) for j in range(Tk)]
            assert {type(x) for x in row} == {bool}
            rows.append("".join(".x"[x] for x in row))
        return rows

    assert table(3, 3) == ["x..", "xx.", "xxx"]
    assert table(3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert table(3, 5, window=2) == [".xx..", "..xx.", "...xx"]
    assert table(5, 3) == ["...", "...", "x..", "xx.", "xxx"]
    assert table(5, 3, window=1) == ["...", "...", "x..", ".x.", "..x"]
    assert table(4, 4, seg="aabb") == ["x...", "xx..", "..x.", "..xx"]
    assert table(2, 4, seg="aabb") == ["..x.", "..xx"]
    assert table(4, 4, window=2, seg="aaab") == ["x...", "xx..", ".xx.", "...x"]
    assert table(1, 4) == ["xxxx"]
    i, j = torch.arange(3)[:, None], torch.arange(5)
    assert visible(i, j, 2, 2).tolist() == [[c == "x" for c in r] for r in table(3, 5, window=2)]


def test_the_oracle_against_torch_softmax() -> None:
    q, k, v = torch.randn(3, 1, 3, 1, 4, dtype=torch.float64)
    bias = torch.tensor([[0, -torch.inf, -torch.inf], [0, 0, -torch.inf], [0, 0, 0]])
    want = torch.softmax(q[0, :, 0] @ k[0, :, 0].T / 2 + bias, dim=-1) @ v[0, :, 0]
    torch.testing.assert_close(oracle.attention(q, k, v, q).out[0, :, 0], want)


@pytest.mark.parametrize("case", [
    Case("gqa", 5, 5, H=4, D=3), Case("long", 3, 6, D=3, window=2),
    Case("blind", 6, 4, H=3, Hkv=1, D=3), Case("packed", 9, 12, D=3, segments="packed"),
    Case("capped", 5, 7, H=4, D=3, scale=0.9, softcap=1.5, sinks=True),
    Case("sinks", 6, 4, H=3, Hkv=1, D=3, window=2, sinks=True)],
    ids=lambda c: c.name)  # fmt: skip
def test_the_oracle_gradients_against_finite_differences(case) -> None:
    truth, options = matrix.truth(case, "float64"), matrix.options(case, "float64")
    q, k, v, dout = (t.clone() for t in matrix.draw(case, "float64"))

    def loss() -> float:
        return float((oracle.attention(q, k, v, dout, **options).out * dout).sum())

    h = 1e-5
    leaves = [(q, truth.dq), (k, truth.dk), (v, truth.dv)]
    if case.sinks:
        leaves.append((options["sinks"], truth.dsinks))
    for x, grad in leaves:
        assert grad is not None
        for n in range(0, x.numel(), 5 if x.dim() > 1 else 1):
            at = torch.unravel_index(torch.tensor(n), x.shape)
            kept = float(x[at])
            x[at] = kept + h
            up = loss()
            x[at] = kept - h
            down = loss()
            x[at] = kept
            assert abs((up - down) / (2 * h) - float(grad[at])) < 1e-8


@pytest.mark.parametrize("case", [c for c in CASES if c.scale or c.softcap or c.sinks],
                         ids=lambda c: c.name)  # fmt: skip
def test_a_backend_that_drops_scale_softcap_or_sinks_is_off(case) -> None:
    """Without this the cases could be such that they change nothing."""
    truth, rough = matrix.truth(case, "bfloat16"), matrix.plain(case, "bfloat16")
    for name, nothing in (("scale", None), ("softcap", None), ("sinks", False)):
        if getattr(case, name):
            without = matrix.plain(replace(case, **{name: nothing}), "bfloat16")
            with pytest.raises(AssertionError, match="is off"):
                oracle.check(without, rough, truth, torch.bfloat16)


@pytest.mark.parametrize("option", [{"scale": 0.1}, {"softcap": 20.0}, {"sinks": True}])
def test_what_a_backend_does_not_declare_is_refused(option) -> None:
    undeclared = replace(BACKENDS["manual"], caps=(Caps(),))
    (why,) = undeclared.why_not(Spec(2, 2, 16, "float32", **option), _machine("cpu"))
    assert [why.kind] == list(option)


def test_the_default_scale_is_no_request() -> None:
    assert Spec(2, 2, 20, "float32", scale=20**-0.5) == Spec(2, 2, 20, "float32")
    assert Spec(2, 2, 16, "float32").softmax_scale == 0.25
    assert Spec(2, 2, 16, "float32", scale=0.3).softmax_scale == 0.3


@pytest.mark.parametrize("option", [{"scale": 0.0}, {"scale": -1.0}, {"softcap": float("inf")},
                                    {"softcap": 0.0}, {"scale": float("nan")}])  # fmt: skip
def test_a_scale_or_cap_that_cannot_be_is_refused(option) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Spec(2, 2, 16, "float32", **option)


def test_the_oracle_reads_the_right_key_value_head() -> None:
    """Four query heads over two key/value heads: 0 and 1 read the first, 2 and 3 the second."""
    q, k = torch.randn(1, 3, 4, 2), torch.randn(1, 3, 2, 2)
    v = torch.stack([torch.full((1, 3, 2), 10.0), torch.full((1, 3, 2), 20.0)], dim=2)
    assert oracle.attention(q, k, v, q).out[0, 2, :, 0].round().tolist() == [10, 10, 20, 20]


def test_the_policy_refuses_nan_and_errors_beyond_it() -> None:
    case = next(c for c in CASES if c.name == "97")
    truth, plain = matrix.truth(case, "bfloat16"), matrix.plain(case, "bfloat16")
    oracle.check(plain, plain, truth, torch.bfloat16)
    nan = plain.out.clone()
    nan[0, 0, 0, 0] = torch.nan
    wrong = plain.out.clone()
    wrong[1, 5, 1, 7] += 0.2
    for out, words in ((nan, "out is not finite"), (plain.out.float(), "out is torch.float32"),
                       (wrong, r"out is off by 0.\d+ at \[1, 5, 1, 7\]"),
                       (plain.out[:, :5], "out has shape")):  # fmt: skip
        with pytest.raises(AssertionError, match=words):
            oracle.check(oracle.Result(out), plain, truth, torch.bfloat16)
    with pytest.raises(AssertionError, match="dk is off"):
        dk = truth.dk + 0.1
        got = oracle.Result(plain.out, plain.dq, dk.bfloat16(), plain.dv)
        oracle.check(got, plain, truth, torch.bfloat16)


# --- the layout ---

ROOT = Path(__file__).parent.parent
FILES = {"manual", "tiled", "sdpa", "flex", "triton_flash", "flash", "paged"}  # of the backends


def _imports(path: Path) -> set[str]:
    """The modules that a file imports, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def test_attention_imports_nothing_of_the_project_but_itself() -> None:
    """Only its command line reads core's settings; and no backend knows another."""
    rooms = {p.name for p in ROOT.iterdir() if p.is_dir()} | {p.stem for p in ROOT.glob("*.py")}
    for path in (ROOT / "attention").glob("*.py"):
        above = {name.partition(".")[0] for name in _imports(path)} & rooms - {"attention"}
        assert above <= ({"core"} if path.name == "__main__.py" else set()), (path.name, above)
        others = FILES & {n.split(".")[1] for n in _imports(path) if n.startswith("attention.")}
        if path.stem in FILES:
            assert others <= {path.stem}, (path.name, others)


@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash", "paged"])
@pytest.mark.parametrize("Tq, Tk", [(20, 20), (9, 20), (20, 9)])
def test_at_the_kernel_one_file_stands_beside_the_backends_own(name, Tq, Tk) -> None:
    """Of the files of attention/ on the stack, at each operator that computes attention."""
    stacks = []

    class Stacks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:  # fmt: skip
            if any(word in str(func) for word in ("softmax", "attention", "bmm", "exp.")):
                frames = {Path(f.filename) for f in traceback.extract_stack()}
                stacks.append({f.name for f in frames if f.parent.name == "attention"})
            return func(*args, **(kwargs or {}))

    spec = Spec(2, 2, 16, "float32", window=5, grad=False)
    q, k, v = torch.randn(1, Tq, 2, 16), *torch.randn(2, 1, Tk, 2, 16)
    cache: dict[str, Any] = {}
    if name == "paged":
        spec = replace(spec, cache="paged", page_size=4)
        k, v, view = views.filled_cache(k, v, spec)
        cache = {"cache": view([max(Tk - Tq, 0)], [min(Tq, Tk)])}
    with Stacks(), torch.no_grad():
        BACKENDS[name].attend(q, k, v, spec, **cache)
    own = f"{name.partition('_')[0]}.py"
    assert stacks and all(files <= {own, "views.py"} for files in stacks), stacks
    assert any(own in files for files in stacks)
