"""Every backend against the oracle: all that `python -m attention check` asks, and refusals.

Backends come from the registry, so a kernel that is added later is tested with no edit here. What a
backend supports is checked number by number; what it does not support, it must refuse. CUDA cases
carry the marker `gpu` and skip naming what is missing, unless REQUIRE_BACKENDS (names, separated by
commas) says that this machine must run them.
"""

from __future__ import annotations

import itertools
import math
import os
import re
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
    promises,
    resolve,
    views,
    visible,
)
from attention.check import FEATURES, Item, items, judge
from attention.matrix import CASES, SAMPLE, Case
from attention.promises import HUGE, qkv
from attention.spec import DTYPES, Caps

STRICT = Policy(fallback=False)
REQUIRED = [name for name in os.environ.get("REQUIRE_BACKENDS", "").split(",") if name]
HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


# Triton's interpreter takes up to seconds an item: these are always run, `slow` runs the others.
FAST = {
    "float32": ("1", "2", "113x203", "1x97", "64x17", "mqa-64x17", "window16", "window64-113x203",
                "window10-64x17", "padded-43x97", "packed-97x43", "packed-window16-gqa", "D20",
                "D80-mqa-window-17x33", "split", "mixed", "BHTD-31x64-window-packed", "large",
                "dominant", "equal", "scale-1x97", "sinks-gqa-window16-padded",
                "softcap-large-window16-packed", "scale-softcap-sinks-packed-window20"),
    "float16": ("64", "63x64", "packed", "D128", "large-gqa-window-packed", "overflow", "softcap",
                "sinks-64x17"),
}  # fmt: skip
FLEX = ("97", "gqa", "113x203", "packed-window16-gqa")  # it compiles for each
TAKES_SECONDS = ("canary, evaluation", "share dropped", "the same bits", "compiled", "in parts, 4",
                 "in parts, scale")  # fmt: skip
ITEMS = list(items(DTYPES))


def _long(name: str, item: Item) -> bool:
    """Whether it is left to the slow tests: in the interpreter, where flex compiles for each, and
    in other dtypes than float32 torch.compile and all cases but a sample."""
    if item.dtype != "float32" and ("compiled" in item.name or name == "flex"):
        return True
    if item.case and item.dtype != "float32" and item.name not in (*SAMPLE, *FAST["float16"]):
        return True
    if item.case:
        if name == "flex":
            return item.name not in FLEX
        return name == "triton" and item.name not in FAST.get(item.dtype, (item.name,))
    if "long text" in item.name:
        return name in ("triton", "flex") or item.dtype != "float32" or item.spec.grad
    if name == "triton":  # all heads without a window, grouped ones with it
        halved = item.name.startswith(("canary", "in parts, segments"))
        half = halved and (item.spec.window is None) == (item.spec.n_kv_head == 2)
        return item.dtype == "float16" or half or item.name.startswith(TAKES_SECONDS)
    return False


@cache
def _machine(device: str) -> Machine:
    return Machine.here(device, packages())


def _refuses(name: str, item: Item, device: str) -> bool:
    """A kernel without a backward pass is asked the cases all the same, forward only."""
    machine = replace(_machine(device), deterministic=item.deterministic)
    why = [refusal.kind for refusal in BACKENDS[name].why_not(item.spec, machine)]
    return bool(why) and not (item.case and why == ["grad"])


def _grid() -> Iterator[Any]:
    """(backend, device, item) of what a backend says that it can."""
    for device in ("cpu", "cuda") if HAS_CUDA else ("cpu",):
        for item, name in itertools.product(ITEMS, BACKENDS):  # the oracle runs once for all
            if _refuses(name, item, device):
                continue
            slow_here = device == "cpu" and name in ("triton", "flex") and "long text" in item.name
            if slow_here and (item.dtype != "float32" or item.spec.grad):
                continue  # a dozen seconds each: one is asked here, all by attention check
            on_cuda, long = device == "cuda", device == "cpu" and _long(name, item)
            marks = [pytest.mark.gpu] * on_cuda + [pytest.mark.slow] * long
            id_ = f"{name}-{device}-{item.name}-{item.dtype}"
            yield pytest.param(name, device, item, marks=marks, id=id_)


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


@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash", "sdpa_math", "triton"])
def test_torchs_default_dtype_changes_nothing(name: str) -> None:
    case = next(case for case in CASES if case.name == "64")
    spec = case.spec("float32")
    if why := BACKENDS[name].why_not(spec, _machine("cpu")):
        pytest.skip(why[0])
    q, k, v, dout = matrix.draw(case, spec.dtype, "cpu")

    def results() -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = BACKENDS[name].attend(*leaves, spec)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    want, was = results(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert all(map(torch.equal, results(), want))
    finally:
        torch.set_default_dtype(was)


@pytest.mark.parametrize("name, device, item", list(_grid()))
def test_right(name: str, device: str, item: Item) -> None:
    """What python -m attention check asks, in any dtype."""
    answer = judge(BACKENDS[name], item, _machine(device), device)
    assert answer.verdict == "right", answer.why


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_refused(name: str, device: str) -> None:
    """All other questions; resolve() refuses them too."""
    machine = _need(device, name)
    for item in ITEMS:
        if _refuses(name, item, device):
            assert judge(BACKENDS[name], item, machine, device).verdict == "refused"
            _assert_refused(name, item.spec, replace(machine, deterministic=item.deterministic))


def test_every_item_has_a_name_of_its_own() -> None:
    assert len({(item.name, item.dtype) for item in ITEMS}) == len(ITEMS)
    assert {f for item in ITEMS for f in item.features} | {"gradients"} == set(FEATURES)


def facets(case: Case) -> set[Any]:
    """What sets a case apart: its features, and on which side of each border it lies."""
    D, window, order = case.D, case.window, (case.Tq > case.Tk) - (case.Tq < case.Tk)
    return {
        *case.features, case.segments, case.layout, case.kind, ("heads", case.H // case.Hkv > 1),
        ("head_dim", D > 64, D & (D - 1) == 0), ("one query", case.Tq == 1),
        ("order", order, case.Hkv < case.H), ("window", window and order),
        ("capped", bool(case.softcap), case.size > 2),
        *(("tiles of 64", n, T % 64 == 0, T < 64) for n, T in enumerate((case.Tq, case.Tk))),
    }  # fmt: skip


def test_the_cases_have_what_is_promised_and_the_sample_every_kind() -> None:
    by_name = {case.name: case for case in CASES}
    assert len(by_name) == len(CASES)
    ordered = [case.name for case in matrix.in_order()]
    assert ordered[: len(SAMPLE)] == [*SAMPLE] and sorted(ordered) == sorted(by_name)
    lengths = {(case.Tq, case.Tk) for case in CASES}
    assert {(T, T) for T in (1, 2, 17, 64, 97, 192, 1025)} | {(113, 203), (128, 217)} <= lengths
    windows = {(c.window, c.Tk) for c in CASES if c.Tq == c.Tk}
    assert {(w, 97) for w in (1, 2, 16, 64, 96, 97, 98, 500)} <= windows
    assert {16, 20, 32, 64, 80, 96, 128} == {case.D for case in CASES}
    every = set().union(*map(facets, CASES))
    lost = every - set().union(*(facets(by_name[name]) for name in SAMPLE))
    assert not lost


def test_a_case_is_what_its_name_says() -> None:
    for c in CASES:
        name = f"{c.name}x{c.name}" if c.name.isdigit() else c.name
        lengths = re.search(r"\d+x\d+", name)
        assert not lengths or lengths[0] == f"{c.Tq}x{c.Tk}", c
        for word, there in (("gqa", 1 < c.Hkv < c.H), ("mqa", c.Hkv == 1 < c.H)):
            assert there or word not in c.name, c
        for word in ("packed", "padded", "split", "BHTD", "mixed", "equal", "dominant"):
            assert word in (c.segments, c.layout, c.kind) or word not in c.name, c
        for word in ("window", "scale", "softcap", "sinks"):
            assert bool(getattr(c, word)) == (word in c.name), c
        for word, value in (("window", c.window), ("D", c.D), ("large", c.size)):
            number = re.search(rf"\b{word}(\d+)", c.name)
            assert not number or int(number[1]) == value, c
        assert c.size >= 4 or "large" not in c.name, c


def test_the_draws_are_the_same_each_time() -> None:
    """So the script of a failure fails as the check did."""
    for spec in (Spec(4, 2, 32, "float32"), Spec(3, 1, 8, "float16")):
        first, second = ([t.clone() for t in qkv(spec, 9, "cpu")] for _ in range(2))
        assert all(map(torch.equal, first, second))
        heads = spec.n_head, spec.n_kv_head, spec.n_kv_head
        assert [t.shape for t in first] == [(2, 9, h, spec.head_dim) for h in heads]
        assert not torch.equal(first[1], first[2])


def test_what_is_kept_is_not_what_another_thread_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(dict[Any, Any]):
        def __setitem__(self, t: Any, found: Any) -> None:
            super().__setitem__(t, found)
            if found[1] == 1:
                kept(t, 2)

    monkeypatch.setattr(views, "WeakTensorKeyDictionary", Busy)
    kept, t = views.kept(lambda t, n: n), torch.ones(1)
    assert [kept(t, n) for n in (1, 2, 1)] == [1, 2, 1]


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


# --- the harness itself ---


def test_the_canary_would_catch_a_leak() -> None:
    """The same question to a call that is not causal, and to one that is aligned top-left."""
    q, k, v = (t.transpose(1, 2) for t in qkv(Spec(4, 4, 32, "float32"), 33, "cpu"))
    louder = v.clone()
    louder[:, :, 32] *= HUGE
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert not torch.equal(sdpa(q, k, v)[:, :, 0], sdpa(q, k, louder)[:, :, 0])
    chunk = q[:, :, 13:]  # a top-left mask lets the last of these see 20 keys of 33
    assert torch.equal(sdpa(chunk, k, v, is_causal=True), sdpa(chunk, k, louder, is_causal=True))


def test_a_mask_that_is_only_a_small_number_would_be_caught() -> None:
    """-1e4 in place of -inf: right on all usual scores, and a leak where all are below it."""

    def leaky(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **_: Any) -> Tensor:
        hidden = ~views.mask(q.shape[1], k.shape[1], spec.window, None, q.device)
        k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * spec.softmax_scale
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -1e4).softmax(-1), v)

    backend = replace(BACKENDS["manual"], attend=leaky)
    matrix.check(backend, Case("113x203", 113, 203, B=1, size=4), "float32")
    spec = Spec(2, 1, 32, "float32", window=5)
    promises.negative(7, BACKENDS["manual"], spec, "cpu")
    with pytest.raises(AssertionError, match="the mean of the values that are seen is off"):
        promises.negative(7, backend, spec, "cpu")


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
    for near in (0.3, 0.2501, 0.2499, 1e-3):
        assert Spec(2, 2, 16, "float32", scale=near).softmax_scale == near


@pytest.mark.parametrize("option", [{"scale": 0.0}, {"scale": -1.0}, {"softcap": float("inf")},
                                    {"softcap": 0.0}, {"scale": float("nan")}])  # fmt: skip
def test_a_scale_or_cap_that_cannot_be_is_refused(option) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Spec(2, 2, 16, "float32", **option)


def test_the_condition_of_one_key_and_a_sink_by_hand() -> None:
    """All numbers are scalars: s = c tanh(tau q k / c), p = 1 / (1 + e^(a - s)), out = p v."""
    q, k, v, g, a, tau, c = 1.5, -0.8, 2.5, -0.6, 0.4, 0.7, 1.2
    one = (torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (q, k, v, g))
    sinks = torch.tensor([a], dtype=torch.float64)
    got = oracle.attention(*one, scale=tau, softcap=c, sinks=sinks)
    s = c * math.tanh(tau * q * k / c)
    p, slope, gv = 1 / (1 + math.exp(a - s)), 1 - (s / c) ** 2, abs(g * v)
    of_s = abs(tau * q * k) * slope + abs(s)  # a sum of products, then the tanh
    assert of_s > abs(a)
    of_ds = p * gv * (2 * of_s * (1 - p) + 1 + p)  # p's, then dp's and sum p dp's
    of_dt = of_ds * slope + p * (1 - p) * gv * (1 + 2 * abs(s) * of_s / c**2)
    assert dict(got.condition) == pytest.approx({
        "out": 2 * of_s * p * (1 - p) * abs(v), "dv": 2 * of_s * p * abs(g),
        "dq": of_dt * tau * abs(k), "dk": of_dt * tau * abs(q),
        "dsinks": p * (1 - p) * gv * (2 * of_s + 1)})  # fmt: skip
    alone = (torch.full((1, 1, 1, 1), x, dtype=torch.float64) for x in (q, k, v, g))
    without = oracle.attention(*alone, scale=tau).condition  # p is 1 whatever s is
    assert dict(without) == pytest.approx({
        "out": 0, "dv": 2 * abs(tau * q * k * g), "dq": 2 * gv * tau * abs(k),
        "dk": 2 * gv * tau * abs(q), "dsinks": 0})  # fmt: skip


@pytest.mark.parametrize("name", SAMPLE)
def test_the_yardstick_is_the_formula(name: str) -> None:
    """A wrong one would allow every error that is no larger than its own."""
    case = next(c for c in CASES if c.name == name)
    if case.Tq * case.Tk * case.H > 10_000:  # the loops of the oracle take long
        few = {"B": 1, "Tq": -(-case.Tq // 4), "Tk": -(-case.Tk // 4)}
        case = replace(case, **few, window=case.window and -(-case.window // 4))
    rough, exact = matrix.plain(case, "float64"), matrix.truth(case, "float64")
    for what in ("out", "dq", "dk", "dv", "dsinks"):
        a, b = getattr(rough, what), getattr(exact, what)
        assert (a is None) == (b is None) == (what == "dsinks" and not case.sinks)
        if a is not None:
            assert float((a - b).abs().max()) <= 1e-11 * max(1, float(b.abs().max()))


@pytest.mark.parametrize("name", ["equal", "equal-gqa-113x203", "dominant", "dominant-gqa-113x203",
                                  "overflow", "sinks", "sinks-large4", "97"])  # fmt: skip
def test_the_scores_of_a_case_are_of_its_kind(name: str) -> None:
    case = next(c for c in CASES if c.name == name)
    q, k = (t.double() for t in matrix.draw(case, "float16")[:2])
    dots = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(case.H // case.Hkv, dim=2))
    scores = dots / case.D**0.5
    one = scores[..., case.Tk // 2]
    if case.kind == "equal":
        assert torch.equal(scores, scores[..., :1].expand_as(scores)) and scores.std() > 0.5
    elif case.kind == "dominant":
        rest = torch.cat([scores[..., : case.Tk // 2], scores[..., case.Tk // 2 + 1 :]], dim=-1)
        assert one.min() > 200 and one.min() > 4 * rest.max() > 4
    elif name == "overflow":
        assert dots.abs().max() > torch.finfo(torch.float16).max > 2 * scores.abs().max()
    elif case.sinks:  # neither nothing nor all of a row
        found = torch.sigmoid(matrix.sinks(case, "float64") - scores[:, :, -1].logsumexp(-1))
        assert ((found > 1e-3) & (found < 0.9)).any()
    else:
        assert 0.9 < scores.std() < 1.1


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
    with pytest.raises(AssertionError, match="out of plain PyTorch is not finite: no yardstick"):
        oracle.check(plain, oracle.Result(plain.out / 0), truth, torch.bfloat16)
    with pytest.raises(AssertionError, match="dk is off"):
        dk = truth.dk + 0.1
        got = oracle.Result(plain.out, plain.dq, dk.bfloat16(), plain.dv)
        oracle.check(got, plain, truth, torch.bfloat16)


@pytest.mark.parametrize("name, m", [("out", 2), ("dq", 3), ("dk", 3), ("dv", 3), ("dsinks", 3)])
@pytest.mark.parametrize("factor", [1, 0.25, 0])
def test_the_tolerance_is_the_sum_of_its_three_terms(name: str, m: int, factor: float) -> None:
    def result(x: float, **more: Any) -> oracle.Result:
        tensors = dict.fromkeys(("out", "dq", "dk", "dv", "dsinks"), torch.tensor([4.0, -1e5]))
        return oracle.Result(**tensors | {name: torch.tensor([x, -1e5])}, **more)

    conditions = {"out": 0.0, "dq": 0.0, "dk": 0.0, "dv": 0.0, "dsinks": 0.0, name: 2e5}
    truth = result(4.0, condition=conditions)
    # m times plain's error, eps of the largest, eps of the condition
    allowed = factor * (m / 32 + 2**-23 * 1e5 + 2**-23 * 2e5)
    for off in (0.98, -0.98):
        oracle.check(result(4 + off * allowed), result(4 - 1 / 32), truth, torch.float32, factor)
    for off in (1.02 * allowed + 1e-5, -1.02 * allowed - 1e-5):
        with pytest.raises(AssertionError, match=rf"{name} is off by .* at \[0\]"):
            oracle.check(result(4 + off), result(4 - 1 / 32), truth, torch.float32, factor)


# --- the layout ---


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
