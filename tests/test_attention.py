"""Every backend against the oracle: all tests of `python -m attention check`, and refusals.

Backends come from the registry, so a new kernel is tested without an edit here. What a backend
declares must be right, and the rest refused. CUDA tests carry the marker `gpu`; without a GPU they
skip, or fail for the backends that REQUIRE_BACKENDS (names separated by commas) lists.
"""

from __future__ import annotations

import itertools
import os
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from torch import Tensor

from attention import BACKENDS, BackendUnavailable, Machine, Policy, Spec, probe, resolve, visible
from attention.check import matrix
from attention.check.command import fitted, items, judge
from attention.check.matrix import CASES, SAMPLE, Item
from attention.proof import Inputs
from attention.spec import DTYPES

STRICT = Policy(fallback=False)
REQUIRED = [name for name in os.environ.get("REQUIRE_BACKENDS", "").split(",") if name]
HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


ITEMS = list(items(DTYPES, length=600))
# make test runs everything in float32 on the kernels that are fast. In other dtypes it runs these
# cases, which have every feature, and in bfloat16 other properties, too. make test-all runs all of
# these kernels' cases.
FEW = ("1x97", "64x17", "packed-window16-gqa", "D80-mqa-window7-17x33",
       "BHTD-31x64-window20-packed", "large", "overflow", "dominant",
       "softcap50-large-window16-packed", "sinks-gqa-window16-padded",
       "scale-softcap-sinks-packed-window20-43x97")
# make test runs only these cases of the slow kernels (flex compiles, Triton interprets).
FEWER = {
    "flex": (),
    "triton": ("1", "2", "1x97", "64x17", "mqa-64x17", "window10-64x17", "packed-97x43", "k BHTD",
               "D80-mqa-window7-17x33", "scale-softcap-sinks-packed-window20-43x97",
               "negative-20", "causality, 1x33-gqa-inference-w", "causality, 33-gqa-window9-packed",
               "beyond the view", "left padding, 3x24-left"),
}
# Cases of flex in make test-all; test_flex.py covers more shapes and dtypes.
FLEX = ("1x97", "packed-window16-gqa", "softcap50-large-window16-packed", "beyond the view",
        "causality, 33-gqa-inference-packed", "causality, 2049", "negative-7x20",
        "causality, 20x33-gqa-inference-w", "left padding, 3x24", "one graph",
        "causality, 1x33-gqa-inference-w")
# Further cases of triton in float16 there.
HALF = ("D128", "in parts, 50-gqa-lse-packed", "the same mask again", "one graph",
        "causality, 33-gqa")


def _among(names: tuple[str, ...], item: Item) -> bool:
    return item.name.startswith(names) if item.title else item.name in names


def _left_to_check(name: str, item: Item, device: str) -> bool:
    """True if only `attention check` runs this item: it takes seconds, and others are like it. Of
    Triton's further cases in float32 every third one runs here."""
    if device == "cuda" or name not in FEWER:
        return False
    if name == "flex":
        return item.spec.dtype != "float32" or not _among(FLEX, item)
    if "causality, 2049" in item.name:
        return item.spec.dtype != "float32" or item.spec.grad
    if item.spec.dtype == "float32" and not _among((*FEW, *FEWER[name]), item):
        return zlib.crc32(item.name.encode()) % 3 > 0
    return item.spec.dtype == "float16" and not _among((*FEW, *FEWER[name], *HALF), item)


def _long(name: str, item: Item) -> bool:
    """True if only make test-all runs this item on the CPU."""
    if name in FEWER and (name, item.spec.dtype, item.name) != ("triton", "float16", "overflow"):
        return item.spec.dtype != "float32" or not _among(FEWER[name], item)
    if item.spec.dtype == "float32":
        if item.name == "1025" or item.name.startswith("long"):
            return item.name != "long-600"
        if item.name.startswith("one graph"):
            return name != "sdpa"
        return item.spec.page_size == 256 or ("causality, 2049" in item.name and item.spec.grad)
    if name in ("sdpa", "sdpa_math") and item.spec.dtype != "float64":
        return True  # PyTorch's own numbers
    heavy = item.name.startswith(("one graph", "causality, 2049")) or item.spec.page_size == 256
    own = item.spec.dtype == "bfloat16" and not heavy
    return not own if item.title else item.name not in FEW


@cache
def _machine(device: str) -> Machine:
    return Machine.here(device)


def _refuses(name: str, item: Item, device: str) -> bool:
    machine = replace(_machine(device), deterministic=item.deterministic)
    return bool(fitted(item, BACKENDS[name], machine)[1])


def _grid() -> Iterator[Any]:
    """(backend, device, item) of what a backend says that it can."""
    for device in ("cpu", "cuda") if HAS_CUDA else ("cpu",):
        for item, name in itertools.product(ITEMS, BACKENDS):  # the oracle runs once for all
            if _refuses(name, item, device) or _left_to_check(name, item, device):
                continue
            on_cuda, long = device == "cuda", device == "cpu" and _long(name, item)
            marks = [pytest.mark.gpu] * on_cuda + [pytest.mark.slow] * long
            id_ = f"{name}-{device}-{item.name}-{item.spec.dtype}"
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
    q, k, v, dout, *_ = matrix.inputs(case, spec.dtype)

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


def test_the_sample_has_every_feature_and_names_are_unique() -> None:
    assert {*matrix.in_order()[: len(SAMPLE)]} == {*SAMPLE} and {*matrix.in_order()} == {*CASES}
    assert {f for c in SAMPLE for f in c.features} == {f for c in CASES for f in c.features}
    assert max(min(c.Tq, c.Tk) for c in SAMPLE) > 512
    assert len({(item.name, item.spec.dtype) for item in ITEMS}) == len(ITEMS)


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
    ("manual", ()), ("tiled", ())])
@pytest.mark.parametrize("case", [c for c in CASES if c.name in
                         ("113x203", "1x97", "packed-window16-gqa", "D20")],
                         ids=lambda c: c.name)
def test_on_the_cpu_the_kernel_that_was_named_runs(name, kernels, case) -> None:
    for dtype in ("float32", "bfloat16"):
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


# --- the truth, its tolerance, and the definition of masking ---


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


def formula(given: Inputs, spec: Spec) -> list[Tensor]:
    """out and the gradients of q, k, v and sinks: spec.py's formula row by row, by autograd."""
    leaves = [t.clone().requires_grad_() for t in (*given[:3], given.sinks) if t is not None]
    (q, k, v), rows = leaves[:3], []
    for b, i, h in itertools.product(*map(range, q.shape[:3])):
        place, g = i + k.shape[1] - q.shape[1], h // (spec.n_head // spec.n_kv_head)
        ids = [None] * k.shape[1] if given.segments is None else given.segments[b].tolist()
        keys = [j for j, id_ in enumerate(ids) if (id_ is None or place >= 0) and visible(
            i, j, place - i, spec.window, ids[place], id_, spec.right)]
        scores = k[b, keys, g] @ q[b, i, h] * spec.softmax_scale
        if spec.softcap:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if spec.sinks:
            scores = torch.cat([scores, leaves[3][h : h + 1]])
        rows.append(scores.softmax(0)[: len(keys)] @ v[b, keys, g])
    out = torch.stack(rows).view_as(q)
    return [out.detach(), *torch.autograd.grad(out, leaves, given.dout)]


@pytest.mark.parametrize("text", [
    "5 gqa D3", "window2-3x9 D3", "6x4 mqa H3 D3", "packed-9x12 D3", "both-packed-7x5 D3",
    "scale-softcap-sinks-5x7 gqa", "window2-right1-sinks-6x4 mqa H3", "right2-left-12x12 gqa"])
def test_the_truth_and_plain_pytorch_are_the_formula(text: str) -> None:
    """The error of plain PyTorch sets the tolerance, so a wrong one would hide errors."""
    (case,) = matrix.cases(text)
    given, spec = matrix.inputs(case, "float64"), case.spec("float64")
    wanted = formula(given, spec)
    for found in (matrix.truth(case, "float64"), matrix.plain(case, "float64")):
        for t, want in zip(found.tensors.values(), wanted, strict=True):
            torch.testing.assert_close(t, want, rtol=1e-11, atol=1e-12)


def test_the_truth_ignores_nan_in_keys_that_nothing_sees() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    segments = torch.arange(8).ge(4).int()[None]
    want = oracle.attention(q, k, k, q, segments=segments)
    k[:, :4] = torch.nan
    found = oracle.attention(q, k, k, q, segments=segments)
    for name, t in want.tensors.items():
        assert torch.equal(found.tensors[name], t), name


@pytest.mark.parametrize("case", [c for c in CASES if c.scale or c.softcap or c.sinks],
                         ids=lambda c: c.name)
def test_a_backend_that_drops_scale_softcap_or_sinks_is_off(case) -> None:
    """Without this the cases could be such that they change nothing."""
    truth, rough = matrix.truth(case, "bfloat16"), matrix.plain(case, "bfloat16")
    for name, nothing in (("scale", None), ("softcap", None), ("sinks", False)):
        if getattr(case, name):
            without = matrix.plain(replace(case, **{name: nothing}), "bfloat16")
            with pytest.raises(AssertionError):
                matrix.agree(without, rough, truth, "bfloat16")


def test_the_tolerance_refuses_nan_wrong_shapes_and_errors() -> None:
    (case,) = matrix.cases("97")
    truth, plain = matrix.truth(case, "bfloat16"), matrix.plain(case, "bfloat16")
    matrix.agree(plain, plain, truth, "bfloat16")
    nan, wrong = plain.out.clone(), plain.out.clone()
    nan[0, 0, 0, 0] = torch.nan
    wrong[1, 5, 1, 7] += 0.2
    for name, t, where in (("out", nan, "0, 0, 0, 0"), ("out", wrong, "1, 5, 1, 7"),
                           ("out", plain.out[:, :5], "5"), ("dk", truth.dk + 0.1, "")):
        with pytest.raises(AssertionError, match=rf"{name} .*{where}"):
            matrix.agree(replace(plain, **{name: t}), plain, truth, "bfloat16")
