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
from attention.check import matrix, properties
from attention.check.command import FEATURES, Item, items, judge
from attention.check.matrix import CASES, SAMPLE, Case
from attention.check.properties import HUGE, qkv
from attention.spec import DTYPES

STRICT = Policy(fallback=False)
REQUIRED = [name for name in os.environ.get("REQUIRE_BACKENDS", "").split(",") if name]
HAS_CUDA = torch.cuda.is_available()
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


ITEMS = list(items(DTYPES, length=600))
# make test runs everything in float32 on the kernels that are fast. In other dtypes it runs these
# cases, which have every feature, and in bfloat16 other properties, too. make test-all runs all of
# these kernels' cases.
FEW = ("1x97", "64x17", "packed-window16-gqa", "D80-mqa-window-17x33", "BHTD-31x64-window-packed",
       "large", "overflow", "dominant", "softcap-large-window16-packed",
       "sinks-gqa-window16-padded", "scale-softcap-sinks-packed-window20")
# make test runs only these cases of the slow kernels (flex compiles, Triton interprets).
FEWER = {
    "flex": (),
    "triton": ("1", "2", "1x97", "64x17", "mqa-64x17", "window10-64x17", "packed-97x43", "k BHTD",
               "D80-mqa-window-17x33", "scale-softcap-sinks-packed-window20", "causality, decode",
               "huge negative scores",
               "segments, evaluation, 4 heads over 2, window 9", "no gradient to later tokens",
               "no random number", "beyond the view", "dynamic, left padding, 3 of 24"),
}
# Cases of flex in make test-all; test_flex.py covers more shapes and dtypes.
FLEX = ("1x97", "packed-window16-gqa", "softcap-large-window16-packed", "segments, evaluation",
        "causality, chunked prefill, 4 heads over 2", "causality, long", "huge negative scores, 7",
        "dynamic, left padding, 3 of 24, 4 heads over 2", "compiled", "beyond the view",
        "causality, decode, 4 heads over 2")
# Further cases of triton in float16 there.
HALF = ("D128", "in parts, seg", "the same mask again", "compiled, 4 heads", "causality, training")


def _among(names: tuple[str, ...], item: Item) -> bool:
    return item.name in names if item.case else item.name.startswith(names)


def _left_to_check(name: str, item: Item, device: str) -> bool:
    """True if only `attention check` runs this item: it takes seconds, and others are like it. Of
    Triton's further cases in float32 every third one runs here."""
    if device == "cuda" or name not in FEWER:
        return False
    if name == "flex":
        return item.spec.dtype != "float32" or not _among(FLEX, item)
    if "long text" in item.name:
        return item.spec.dtype != "float32" or item.spec.grad
    if item.spec.dtype == "float32" and not _among((*FEW, *FEWER[name]), item):
        return zlib.crc32(item.name.encode()) % 3 > 0
    return item.spec.dtype == "float16" and not _among((*FEW, *FEWER[name], *HALF), item)


def _long(name: str, item: Item) -> bool:
    """True if only make test-all runs this item on the CPU."""
    if name in FEWER and (name, item.spec.dtype, item.name) != ("triton", "float16", "overflow"):
        return item.spec.dtype != "float32" or not _among(FEWER[name], item)
    if item.spec.dtype == "float32":
        if item.case and item.case.name.startswith("long"):
            return item.case.name != "long-window100"
        if item.name.startswith("compiled"):
            return name != "sdpa"
        pages = item.name.startswith("paged by 256") and item.spec.n_kv_head != item.spec.n_head
        return item.name == "1025" or pages or ("long text" in item.name and item.spec.grad)
    if name in ("sdpa", "sdpa_math") and item.spec.dtype != "float64":
        return True  # PyTorch's own numbers
    heavy = ("compiled", "causality, long", "paged by 256")
    own = item.spec.dtype == "bfloat16" and not item.name.startswith(heavy)
    return item.name not in FEW if item.case else not own


@cache
def _machine(device: str) -> Machine:
    return Machine.here(device)


def _refuses(name: str, item: Item, device: str) -> bool:
    """A kernel without a backward pass is asked the cases all the same, forward only."""
    machine = replace(_machine(device), deterministic=item.deterministic)
    why = [refusal.kind for refusal in BACKENDS[name].why_not(item.spec, machine)]
    return bool(why) and not (item.case and why == ["grad"])


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


def test_the_sample_has_every_feature_and_names_are_unique() -> None:
    sample = matrix.in_order()[: len(SAMPLE)]
    assert {case.name for case in sample} == {*SAMPLE}
    assert {f for c in sample for f in c.features} == {f for c in CASES for f in c.features}
    assert len({(item.name, item.spec.dtype) for item in ITEMS}) == len(ITEMS)
    assert {f for item in ITEMS for f in item.features} | {"gradients"} == set(FEATURES)


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


# --- the harness itself ---


def test_the_causality_test_would_catch_a_leak() -> None:
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
        hidden = ~masks.mask(q.shape[1], k.shape[1], spec.window, None, q.device)
        k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
        scores = torch.einsum("bihd,bjhd->bhij", q, k) * spec.softmax_scale
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -1e4).softmax(-1), v)

    backend = replace(BACKENDS["manual"], attend=leaky)
    matrix.check(backend, Case("113x203", 113, 203, B=1, size=4), "float32")
    spec = Spec(2, 1, 32, "float32", window=5)
    properties.negative(7, BACKENDS["manual"], spec, "cpu")
    with pytest.raises(AssertionError, match="the mean of the visible values is off"):
        properties.negative(7, backend, spec, "cpu")


# --- the oracle itself, and the definition of masking ---


def test_the_oracle_ignores_nan_in_keys_that_nothing_sees() -> None:
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 8, 2, 8)
    segments = torch.arange(8).ge(4).int()[None]
    want = oracle.attention(q, k, k, q, segments=segments)
    k[:, :4] = torch.nan
    found = oracle.attention(q, k, k, q, segments=segments)
    for name, t in want.tensors.items():
        assert torch.equal(found.tensors[name], t), name


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
    ids=lambda c: c.name)
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
                         ids=lambda c: c.name)
def test_a_backend_that_drops_scale_softcap_or_sinks_is_off(case) -> None:
    """Without this the cases could be such that they change nothing."""
    truth, rough = matrix.truth(case, "bfloat16"), matrix.plain(case, "bfloat16")
    for name, nothing in (("scale", None), ("softcap", None), ("sinks", False)):
        if getattr(case, name):
            without = matrix.plain(replace(case, **{name: nothing}), "bfloat16")
            with pytest.raises(AssertionError, match="is off"):
                oracle.check(without, rough, truth, torch.bfloat16)


@pytest.mark.parametrize("name", SAMPLE)
def test_plain_pytorch_is_the_formula(name: str) -> None:
    """Its error sets the tolerance, so a wrong one would hide errors."""
    case = next(c for c in CASES if c.name == name)
    case = replace(case, sinks=bool(case.sinks))  # and their gradient not rounded to bfloat16
    if case.Tq * case.Tk * case.H > 10_000:  # the loops of the oracle take long
        few = {"B": 1, "Tq": -(-case.Tq // 4), "Tk": -(-case.Tk // 4)}
        case = replace(case, **few, window=case.window and -(-case.window // 4))
    rough, exact = matrix.plain(case, "float64"), matrix.truth(case, "float64")
    for what in ("out", "dq", "dk", "dv", "dsinks"):
        a, b = getattr(rough, what), getattr(exact, what)
        assert (a is None) == (b is None) == (what == "dsinks" and not case.sinks)
        if a is not None:
            assert float((a - b).abs().max()) <= 1e-11 * max(1, float(b.abs().max()))


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
                       (plain.out[:, :5], "out has shape")):
        with pytest.raises(AssertionError, match=words):
            oracle.check(oracle.Result(out), plain, truth, torch.bfloat16)
    with pytest.raises(AssertionError, match="plain PyTorch"):
        oracle.check(plain, oracle.Result(plain.out / 0), truth, torch.bfloat16)
    with pytest.raises(AssertionError, match="dk is off"):
        dk = truth.dk + 0.1
        got = oracle.Result(plain.out, plain.dq, dk.bfloat16(), plain.dv)
        oracle.check(got, plain, truth, torch.bfloat16)


# --- the layout ---
