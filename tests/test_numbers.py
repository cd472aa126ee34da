"""Every kernel on any call: random masks, shapes, strides, contexts, caches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import oracle
import pytest
import test_model
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import Largest, default_dtype
from torch import Tensor

import attention as nanoattn
from attention import BACKENDS, Machine, Ring, Spec
from attention.check import matrix
from attention.check.matrix import Case
from attention.proof import Inputs, Result, run, truth
from model import alibi_slopes

HERE = Machine.here("cpu")


def able(spec: Spec) -> list[str]:  # not flex, which compiles for seconds
    return [n for n, b in BACKENDS.items() if n != "flex" and not b.why_not(spec, HERE)]


CONTEXTS: list[Callable[[], Any]] = [
    nullcontext, partial(default_dtype, torch.float64), partial(default_dtype, torch.bfloat16),
    partial(torch.device, "meta"), partial(torch.autocast, "cpu", torch.bfloat16),
    torch.autograd.graph.save_on_cpu,
]
SLOW = [pytest.param(*row, marks=pytest.mark.slow) for row in (
    ("sdpa_math", 40), ("sdpa_bmm", 40), ("flex", 3), ("triton", 30))]


@pytest.mark.parametrize("name, examples", [
    ("manual", 30), ("tiled", 40), ("sdpa", 40), ("sdpa_flash", 40), *SLOW])
def test_any_call(name: str, examples: int) -> None:
    grad = name != "flex"

    @settings(max_examples=examples, deadline=None)
    @given(oracle.cases(layouts=("contiguous", *matrix.LAYOUTS)),
           st.sampled_from(["float32", "bfloat16", "float64"]), st.sampled_from(CONTEXTS))
    def check(case: Case, dtype: str, context: Callable[[], Any]) -> None:
        dtype = {"sdpa_bmm": "bfloat16", "triton": "float32", "flex": "float32"}.get(name, dtype)
        without = {"softcap": None, "sinks": False, "segments": None, "alibi": False, "scale": None}
        for _ in without:  # one row of caps may lack what another has
            why = {w.kind for w in BACKENDS[name].why_not(case.spec(dtype, grad=grad), HERE)}
            case = replace(case, **{n: x for n, x in without.items() if n in why})
        if name == "flex" and BACKENDS[name].why_not(case.spec(dtype, grad=False), HERE):
            return
        spec, inputs = case.spec(dtype, grad=grad), matrix.inputs(case, dtype)
        leaves = oracle.leaves_of(inputs, grad)
        given = inputs._replace(**leaves)
        with context():
            out = BACKENDS[name].attend(given.q, given.k, given.v, spec, **given.options)
            with torch.autocast("cpu", enabled=False):  # PyTorch's own backward obeys it, too
                grads = torch.autograd.grad(out, [*leaves.values()], given.dout) if grad else ()
        assert {t.dtype for t in (out, *grads)} == {out.dtype} == {given.q.dtype}
        matrix.compare(Result(out.detach(), *grads), case, dtype, "cpu")

    check()


@pytest.mark.parametrize("name, block", [("tiled", 64), ("sdpa", 256), ("sdpa_flash", 256)])
def test_nan_that_no_query_sees_is_not_read(name: str, block: int) -> None:
    """Beyond a window, in another segment: 0 * NaN would be NaN."""
    T, far = 640, slice(320, 352)
    before = slice(0, (far.start - 9) // block * block)  # blocks whose keys end before `far`
    after = slice(-(-(-(-far.stop // 64) * 64 + 4) // block) * block, T)
    half = T // 2
    for spec, ids, hidden, rows in (
        (Spec(1, 1, 16, "float32", window=5, right=9), None, far, [before, after]),
        (Spec(1, 1, 16, "float32", segments=True, right=None),
         (torch.arange(T) >= half).int()[None], slice(half, T), [slice(0, half)])):
        draw = torch.Generator().manual_seed(0)
        given = Inputs(*torch.randn(4, 1, T, 1, 16, generator=draw), ids)
        want = run(BACKENDS[name].attend, given, spec)
        for t in (given.k, given.v):
            t[:, hidden] = torch.nan
        got = run(BACKENDS[name].attend, given, spec)
        for a, b in ((got.out, want.out), (got.dq, want.dq)):
            assert all(torch.equal(a[:, at], b[:, at]) for at in rows)


@pytest.mark.parametrize("name", ["tiled", "sdpa", "sdpa_flash"])
@pytest.mark.parametrize("case", matrix.cases(
    "padded-200 B8, padded-300x400 B3, window2-200 B1", "H1 Hkv1 D16"), ids=lambda case: case.name)
def test_tiles_and_blocks_at_the_borders_of_a_mask(name: str, case: Case) -> None:
    """Rows whose segments end in other tiles, queries in the middle of one, a single pair."""
    matrix.check(BACKENDS[name], case, "float32")


def test_sdpa_in_one_graph_with_symbolic_sizes() -> None:
    torch.compiler.reset()
    attend = torch.compile(BACKENDS["sdpa"].attend, dynamic=True, fullgraph=True, backend="eager")
    for case in matrix.cases("20x33-gqa", ", window5-right2, packed"):
        matrix.check(BACKENDS["sdpa"], case, "float32", attend=attend)


# --- derivatives ---

@pytest.mark.parametrize("case", matrix.cases(
    "6, 6-window3 gqa, 6-packed mqa, 6-sinks gqa, 300-window260 H1 Hkv1", "D8"),
    ids=lambda case: case.name)
def test_a_second_derivative_is_right_or_an_error_and_torch_func_has_the_first(case) -> None:
    """By q, k and v, or by the gradient of the output alone."""
    spec, given = case.spec("float32"), matrix.inputs(case, "float32")
    *leaves, dout = (t.clone().requires_grad_() for t in given[:4])

    def formula(*args: Any, **options: Any) -> Tensor:
        return oracle.formula(*args, **options)[0]

    def second(attend: Callable[..., Tensor], by: list[Tensor]) -> tuple[Tensor, ...]:
        out = attend(*leaves, spec, **given.options)
        dx = torch.autograd.grad(out, leaves, dout, create_graph=True)
        return torch.autograd.grad(sum(d.square().sum() for d in dx), by)

    def first(attend: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        def loss(q: Tensor, k: Tensor) -> Tensor:
            return attend(q, k, given.v, spec, **given.options).square().sum()

        return torch.func.grad(loss, argnums=(0, 1))(given.q, given.k)

    kernels = {n: BACKENDS[n].attend for n in able(spec) if n != "triton"}
    if not spec.sinks:
        kernels["ring"] = Ring().attend(BACKENDS["tiled"])
    for name, attend in kernels.items():
        torch.testing.assert_close(first(attend), first(formula), rtol=1e-3, atol=1e-4)
        for by in (leaves, [dout]):
            if name in ("manual", "sdpa_math"):
                torch.testing.assert_close(second(attend, by), second(formula, by),
                                           rtol=1e-4, atol=1e-4)
            else:
                with pytest.raises(RuntimeError, match="derivative"):
                    second(attend, by)


# --- single cases ---


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_tiled_stores_no_tensor_larger_than_its_inputs(dropout) -> None:
    """O(T): none exceeds T * H * D."""
    for T in (128, 256):
        qkv = [torch.randn(1, T, 2, 64, requires_grad=True) for _ in range(3)]
        with Largest() as forward:
            out = BACKENDS["tiled"].attend(*qkv, Spec(2, 2, 64, "float32", dropout=dropout))
        with Largest() as backward:
            torch.autograd.grad(out, qkv, torch.ones_like(out))
        assert forward.numbers == backward.numbers == T * 2 * 64


@pytest.mark.parametrize("softcap", [None, 50.0])
def test_gradients_past_the_range_of_float16(softcap) -> None:
    """dO V^T is 460,000, gradients hundreds: rounding O moves them."""
    noise = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 8, 2, 128, generator=noise) for _ in range(4))
    given = Inputs(*(t.half() for t in (q, k, 60 + v, 60 + dout)))
    spec = Spec(2, 2, 128, "float16", softcap=softcap)
    want = truth(given, spec)
    for name in able(spec):
        got = run(BACKENDS[name].attend, given, spec)
        for n in ("dq", "dk", "dv"):
            off = (got.tensors[n] - want.tensors[n]).abs().max()
            assert off < 0.2 * want.tensors[n].abs().max(), (name, n)


def test_a_sink_of_minus_infinity_is_none_and_rows_that_see_nothing_move_none() -> None:
    spec = Spec(3, 1, 16, "float32", segments=True)
    (case,) = matrix.cases("packed-40x23 H3 Hkv1 D16")
    given, sunk = matrix.inputs(case, "float32"), replace(spec, sinks=True)
    blind = given.dout * (torch.arange(40) < 17)[:, None, None]  # queries before the keys
    for name in able(sunk):
        attend = BACKENDS[name].attend
        without = run(attend, given, spec)
        got = run(attend, given._replace(sinks=torch.full((3,), -torch.inf)), sunk)
        for n, t in without.tensors.items():
            torch.testing.assert_close(got.tensors[n], t, rtol=1e-6, atol=1e-6)
        other = run(attend, given._replace(sinks=torch.ones(3), dout=blind), sunk)
        assert not got.dsinks.any() and not other.dsinks.any(), name


@pytest.mark.parametrize("H, Hkv, window", [(2, 2, None), (4, 2, 3), (4, 1, 1)])
def test_of_one_key_sdpa_cudnn_gives_v_without_the_kernel(H, Hkv, window) -> None:
    """PyTorch refuses it to cuDNN (sdp_utils.cpp); each query drops it alone."""
    attend = BACKENDS["sdpa_cudnn"].attend
    for Tq in (1, 5):
        case = Case("one key", Tq, 1, H, Hkv, window=window)
        got = run(attend, matrix.inputs(case, "float16"), case.spec("float16"))
        matrix.compare(got, case, "float16", "cpu")
    q, k = torch.randn(2, 64, H, 16), torch.randn(2, 1, Hkv, 16)
    out = attend(q, k, k, Spec(H, Hkv, 16, "float32", dropout=0.5, right=None))
    kept = out.abs().sum(-1) > 0  # (2, 64, H)
    want = 2 * k.repeat_interleave(H // Hkv, dim=2).expand_as(out)
    torch.testing.assert_close(out[kept], want[kept])
    assert 0.3 < kept.float().mean() < 0.7 and (kept != kept[:, :1]).any()


# --- attention weights ---


@settings(max_examples=40, deadline=None)
@given(oracle.cases(), st.data())
def test_weights_of_some_rows(case: Case, data: Any) -> None:
    """The softmax of visible scores, its gradients, and times v the output; also by
    flash_attn_func's log-sum-exp, under autocast."""
    inputs, exact = matrix.inputs(case, "float64"), matrix.truth(case, "float64")
    q, k, spec, more = inputs.q, inputs.k, case.spec("float64"), inputs.options
    leaves = [q.clone().requires_grad_(), k.clone().requires_grad_()]
    values = inputs.v.repeat_interleave(case.H // case.Hkv, dim=2)
    whole = nanoattn.weights(*leaves, spec, **more)
    out = torch.einsum("bhij,bjhd->bihd", whole, values)
    torch.testing.assert_close(out, exact.out)
    for got, want in zip(torch.autograd.grad(out, leaves, inputs.dout), (exact.dq, exact.dk)):
        torch.testing.assert_close(got, want)
    rows = data.draw(st.lists(st.integers(-case.Tq, case.Tq - 1), min_size=1, max_size=4))
    with torch.autocast("cpu", torch.bfloat16):
        some = nanoattn.weights(q, k, spec, rows=rows, **more)
    torch.testing.assert_close(some, whole[:, :, rows])
    if not (case.segments or case.sinks):
        left, right = (-1 if x is None else x for x in (case.window, case.right))
        _, L = nanoattn.flash_attn_func(
            q, k, inputs.v, 0.0, spec.softmax_scale, False, (left - 1 if left > 0 else -1, right),
            case.softcap or 0.0, inputs.alibi_slopes, return_softmax_lse=True)
        P = nanoattn.weights(q, k, spec, L=L, **more)
        torch.testing.assert_close(P, whole, rtol=1e-4, atol=1e-5)
        assert torch.equal(L.isneginf(), ~P.sum(-1).bool())


def test_weights_of_rows_in_a_graph_and_of_rows_that_are_none() -> None:
    q, spec = torch.randn(1, 300, 2, 8), Spec(2, 2, 8, "float32")  # 300 is no int8
    few = partial(nanoattn.weights, q, q, spec)
    traced = torch.compile(lambda: few(rows=[1, 99]), fullgraph=True, backend="eager")
    for P in (few(rows=torch.tensor([1, 99], dtype=torch.int8)), traced()):
        torch.testing.assert_close(P, few()[:, :, [1, 99]])
    for rows in ([1.7], [300], [[1]], [True], torch.ones(4, dtype=torch.bool), ["1"]):
        with pytest.raises((ValueError, IndexError)):
            few(rows=rows)
    for wrong in ({"L": torch.zeros(1, 2, 4)}, {"segments": torch.zeros(1, 300).int()}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            few(**wrong)
    assert nanoattn.weights(q, q[:, :0], spec).shape == (1, 2, 300, 0)
    assert few(rows=[]).shape == (1, 2, 0, 300)


# --- ALiBi in a model ---


def test_the_slopes_are_the_papers() -> None:
    """Section 3: for 8 heads 1/2 to 1/256; for 12, by its code, every second one of 16 follows."""
    twelve = [*(2.0**-n for n in range(1, 9)), *(2.0 ** -(n - 0.5) for n in range(1, 5))]
    for n in (1, 2, 3, 7, 8, 12, 16, 40):
        slopes = alibi_slopes(n, torch.device("cpu"))
        assert slopes.shape == (n,) and slopes.dtype == torch.float32
        assert slopes.unique().numel() == n and 2**-8 <= slopes.min() <= slopes.max() < 1
        if n in (8, 12):
            torch.testing.assert_close(slopes, torch.tensor(twelve[:n]))


def test_a_model_has_positions_in_its_scores_alone() -> None:
    """Without a bias a first layer could not tell the order of earlier tokens."""
    build = partial(test_model.build, position="alibi")
    model, x = build(n_layer=1).eval(), torch.arange(10)[None]
    assert {*model.state_dict()} == {*test_model.build(n_layer=1, position="rope").state_dict()}
    swapped = x[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(model(x)[0][:, -1], model(swapped)[0][:, -1])
    half = build().bfloat16()  # whose slopes are not rounded
    torch.testing.assert_close(half(x)[0].float(), build()(x)[0], rtol=0.1, atol=0.5)
