"""Backend x case x dtype, and refusals of all that a backend does not declare; the truth against
loops.

Backends come from the registry. `make test` takes the cases of `check --quick`, `make test-all`
all; of flex and Triton, which take seconds, CI runs those named here, and `make test-all` a share
by hash.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import oracle
import pytest
import torch
from hypothesis import given, settings

from attention import BACKENDS, Machine, Spec, probe, visible
from attention.check import matrix
from attention.check.command import fitted, items, judge
from attention.check.matrix import CASES, Case, Item
from attention.proof import truth
from attention.spec import DTYPES

HAS_CUDA = torch.cuda.is_available()
needs_cuda = pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
ITEMS = list(items(DTYPES, length=600))

QUICK = {item.name for item in items(["float32"], quick=True, length=600)}  # every feature
# What runs in bfloat16, too.
FEW = ("1x97", "64x17", "packed-window16-gqa", "D80-mqa-window7-17x33",
       "BHTD-31x64-window20-packed", "large", "overflow", "dominant",
       "softcap50-large-window16-packed", "sinks-gqa-window16-padded",
       "scale-softcap-sinks-packed-window20-43x97", "in a cache, 64-gqa-static",
       "in parts, merged by L, 50-mqa-lse", "log-sum-exp, 33-mqa-lse")
# The interpreter's 30 cases of CI in float32; the first nine are fast enough for `make test`.
TRITON = ("1", "2", "1x97", "17", "k BHTD", "beyond the view", "negative-window5-7x20", "D17",
          "equal", "64x17", "window10-64x17", "packed-97x43", "padded-43x97", "large",
          "D80-mqa-window7-17x33", "BHTD-31x64-window20-packed", "alibi-gqa-43x97", "both-97x43",
          "window16-right7-packed-gqa", "scale-softcap-sinks-packed-window20-43x97",
          "causality, 1x33-gqa-inference-window9-packed", "causality, 33-gqa-packed",
          "left padding, 3x24-left-gqa-B3-dynamic", "empty, 5-gqa", "one graph, 65-gqa-compiled",
          "the same mask again, 9x16-gqa-D16-dropout.25-sinks", "log-sum-exp, 33-mqa-lse",
          "dropout rate, 16-gqa-B8-D16-dropout.25", "in parts, merged by L, 50-mqa-lse",
          "gradients of some inputs, 17-gqa-sinks")
FLEX = ("1x97", "packed-window16-gqa", "empty, 5-gqa-inference",
        "causality, 20x33-gqa-inference-window9", "in a cache, 3x24-gqa-dynamic")
SLOW = {"flex": (FLEX, 0, 40), "triton": (TRITON, 9, 10)}  # CI's, the fast of them, one in so many


def tier(name: str, item: Item) -> str:
    """"fast", "ci", "slow" or only in `attention check`."""
    in_float32 = item.spec.dtype == "float32"
    if name not in SLOW:  # on the CPU sdpa_math differs from sdpa in one argument
        chosen = FEW if item.spec.dtype == "bfloat16" else ()
        chosen = (FEW if name == "sdpa_math" else QUICK) if in_float32 else chosen
        return "fast" if item.name in chosen else "slow"
    chosen, fast, one_in = SLOW[name]
    if in_float32 and item.name in chosen:
        return "fast" if item.name in chosen[:fast] else "ci"
    heavy = item.name.startswith(("one graph", "dropout")) or max(item.case.Tk, 0) > 700
    heavy |= item.spec.page_size == 256 or item.spec.dtype == "bfloat16"
    sampled = zlib.crc32(f"{item.name} {item.spec.dtype}".encode()) % one_in == 0
    return "slow" if sampled and not heavy else ""


MARKS = {"fast": (), "ci": (pytest.mark.slow, pytest.mark.ci), "slow": (pytest.mark.slow,),
         "gpu": (pytest.mark.gpu,)}


@cache
def machine(device: str) -> Machine:
    return Machine.here(device)


def grid() -> Iterator[Any]:
    """(backend, device, item) of what a backend declares."""
    for device in ("cpu", "cuda") if HAS_CUDA else ("cpu",):
        for item, name in itertools.product(ITEMS, BACKENDS):
            where = "gpu" if device == "cuda" else tier(name, item)
            there = replace(machine(device), deterministic=item.deterministic)
            if where and not fitted(item, BACKENDS[name], there)[1]:
                id_ = f"{name}-{device}-{item.name}-{item.spec.dtype}"
                yield pytest.param(name, device, item, marks=MARKS[where], id=id_)


@pytest.mark.parametrize("name, device, item", list(grid()))
def test_right(name: str, device: str, item: Item) -> None:
    answer = judge(BACKENDS[name], item, machine(device), device)
    assert answer.verdict == "right", answer.why


@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash", "sdpa_math"])
def test_these_refuse_nothing_on_the_cpu(name: str) -> None:
    """Else caps that refuse everything would pass the matrix."""
    every = name in ("manual", "tiled")
    cases = [c for c in CASES if every or not (c.softcap or c.sinks)]
    specs = [case.spec(dtype) for case in cases for dtype in DTYPES]
    assert [s for s in specs if BACKENDS[name].why_not(s, machine("cpu"))] == []


def test_names_and_lists_are_of_the_matrix() -> None:
    assert len({(item.name, item.spec.dtype) for item in ITEMS}) == len(ITEMS)
    assert {*FEW, *TRITON, *FLEX} <= {item.name for item in ITEMS}
    sample = {*matrix.SAMPLE}
    assert {f for c in sample for f in c.features} == {f for c in CASES for f in c.features}


# --- which kernel ran ---


@pytest.mark.parametrize("name, kernels", [
    ("sdpa_math", ("math",)), ("sdpa_flash", ("flash (CPU)",)), ("sdpa", ("flash (CPU)",)),
    ("manual", ()), ("tiled", ())])
def test_on_the_cpu_the_kernel_that_was_named_runs(name, kernels) -> None:
    for case in matrix.cases("113x203", "1x97", "packed-window16-gqa", "D20"):
        for dtype in ("float32", "bfloat16"):
            assert probe(BACKENDS[name], case.spec(dtype), "cpu").kernels == kernels


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("name", ["sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("window", [None, 16])
def test_on_cuda_the_kernel_that_was_named_runs(name, dtype, window) -> None:
    spec = Spec(4, 2, 64, dtype, window=window)
    if not BACKENDS[name].why_not(spec, machine("cuda")):
        assert probe(BACKENDS[name], spec, "cuda").kernels == (name.removeprefix("sdpa_"),)


@pytest.mark.parametrize("name", ["sdpa_cudnn", "sdpa_efficient"])
@pytest.mark.parametrize("Tk", [8, 5, 11])
def test_a_pinned_kernel_that_cannot_run_raises_and_nothing_else_runs(name, Tk) -> None:
    """Also with more queries than keys."""
    q, k = torch.randn(1, 8, 2, 16), torch.randn(1, Tk, 2, 16)
    with pytest.raises(RuntimeError, match=r"No (available kernel|viable backend)"):
        BACKENDS[name].attend(q, k, k, Spec(2, 2, 16, "float32"))


# --- the definition of masking, the truth, its tolerance ---


def test_visible_against_a_table_by_hand() -> None:
    def table(Tq: int, Tk: int, window: int | None = None, seg: str | None = None,
              right: int | None = 0) -> list[str]:
        rows = []
        for i in range(Tq):
            seg_i = seg[i + Tk - Tq] if seg and i + Tk >= Tq else None
            row = [visible(i, j, Tk - Tq, window, seg_i, seg and seg[j], right) for j in range(Tk)]
            assert {type(x) for x in row} == {bool}
            rows.append("".join(".x"[x] for x in row))
        return rows

    assert table(3, 3) == ["x..", "xx.", "xxx"]
    assert table(3, 5) == ["xxx..", "xxxx.", "xxxxx"]
    assert table(3, 5, window=2) == [".xx..", "..xx.", "...xx"]
    assert table(5, 3) == ["...", "...", "x..", "xx.", "xxx"]
    assert table(5, 3, window=1) == ["...", "...", "x..", ".x.", "..x"]
    assert table(3, 5, window=2, right=1) == [".xxx.", "..xxx", "...xx"]
    assert table(2, 3, window=1, right=None) == [".xx", "..x"]
    assert table(4, 4, seg="aabb") == ["x...", "xx..", "..x.", "..xx"]
    assert table(2, 4, seg="aabb") == ["..x.", "..xx"]
    assert table(4, 4, window=2, seg="aaab") == ["x...", "xx..", ".xx.", "...x"]
    i, j = torch.arange(3)[:, None], torch.arange(5)
    assert visible(i, j, 2, 2).tolist() == [[c == "x" for c in r] for r in table(3, 5, window=2)]


@settings(max_examples=60, deadline=None)
@given(oracle.cases(longest=9))
def test_the_truth_and_plain_pytorch_are_the_formula(case: Case) -> None:
    """Plain PyTorch's error sets the tolerance. The truth ignores NaN in keys that nothing sees."""
    given, spec = matrix.inputs(case, "float64"), case.spec("float64")
    leaves = oracle.leaves_of(given)
    whole = given._replace(**leaves)
    out, _ = oracle.formula(*whole[:3], spec, **whole.options)
    every, some = torch.arange(case.Tq), torch.arange(0, case.Tq, 2)
    exact, plain = (of(case, "float64") for of in (matrix.truth, matrix.plain))
    unseen = ~exact.dv.any(3, keepdim=True).any(2, keepdim=True)
    k, v = (t.masked_fill(unseen, torch.nan) for t in (given.k, given.v))
    for found, rows in ((exact, every), (plain, every), (
        truth(given._replace(k=k, v=v), spec, some), some)):
        grads = torch.autograd.grad(
            out[:, rows], [*leaves.values()], given.dout[:, rows], retain_graph=True)
        for (name, t), want in zip(found.tensors.items(), (out[:, rows], *grads), strict=True):
            want = want[:, rows] if name == "dq" else want
            torch.testing.assert_close(t, want, rtol=1e-9, atol=1e-9)


def test_the_tolerance_refuses_nan_wrong_shapes_and_errors() -> None:
    """Twice the limit of docs/KERNEL.md fails, half of it passes."""
    (case,) = matrix.cases("97")
    exact, plain = matrix.truth(case, "bfloat16"), matrix.plain(case, "bfloat16")
    matrix.agree(plain, plain, exact, "bfloat16")
    nan, off = plain.out.clone(), float((plain.out - exact.out).abs().max())
    nan[0, 0, 0, 0] = torch.nan
    limit = 2 * off + 2**-7 * float(exact.out.abs().max())
    wrong, little = (exact.out.clone() for _ in range(2))
    wrong[1, 5, 1, 7] += 2 * limit
    little[1, 5, 1, 7] += limit / 2
    matrix.agree(replace(plain, out=little), plain, exact, "bfloat16")
    for name, t, where in (("out", nan, "0, 0, 0, 0"), ("out", wrong, "1, 5, 1, 7"),
                           ("out", plain.out[:, :5], "5"), ("dk", exact.dk + 0.1, "")):
        with pytest.raises(AssertionError, match=rf"{name} .*{where}"):
            matrix.agree(replace(plain, **{name: t}), plain, exact, "bfloat16")
