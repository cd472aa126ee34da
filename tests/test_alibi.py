"""ALiBi: every backend and the model against the truth, and the truth against loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_right import allowed, cases

import checkpoint
from attention import BACKENDS, Machine, Ring, Spec, get, resolve, select
from attention.check import matrix
from attention.check.matrix import Case
from attention.function import attention
from attention.masks import filled_cache
from attention.proof import truth
from core.settings import UserError
from inference import engine
from inference.engine import KV_CACHES
from model import GPT, GPTConfig, alibi_slopes
from viewer.maps import maps, scores, watched, weights

HERE = Machine.here("cpu")


@pytest.mark.parametrize("name", ["sdpa", "sdpa_flash", "tiled"])
def test_blocks_of_long_texts(name: str) -> None:
    """Rows with segments of their own are computed apart, each with its slopes."""
    for segments, right in (("packed", 0), (None, 0), ("many", None), (None, None)):
        case = Case("long", 300, 330, segments=segments, right=right, alibi="rows")
        matrix.check(BACKENDS[name], case, "float32")


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(cases(40, (True, "rows")))
def test_random_calls_by_flex(case: Case) -> None:
    spec = replace(allowed("flex", case, "float32").spec("float32"), grad=False)
    if why := BACKENDS["flex"].why_not(spec, HERE):
        pytest.skip(why[0])
    matrix.check(BACKENDS["flex"], replace(case, sinks=False), "float32", grad=False)


@pytest.mark.parametrize("rows", [False, True])
def test_the_truth_is_the_formula(rows: bool) -> None:
    """By loops over pairs: out, and the gradients by autograd."""
    case = Case("loops", 5, 8, H=4, Hkv=2, D=4, window=6, softcap=1.5,
                alibi="rows" if rows else True)
    inputs = matrix.inputs(case, "float64")
    q, k, v = leaves = [t.clone().requires_grad_() for t in inputs[:3]]
    m = inputs.alibi_slopes
    assert m is not None
    out = []
    for b in range(2):
        for i in range(5):
            for h in range(4):
                scores, values = [], []
                for j in range(max(0, i + 3 - 5), i + 3 + 1):
                    score = 1.5 * torch.tanh(q[b, i, h] @ k[b, j, h // 2] / 2 / 1.5)
                    scores.append(score - float(m[b, h] if rows else m[h]) * abs(i + 3 - j))
                    values.append(v[b, j, h // 2])
                out.append(torch.stack(scores).softmax(0) @ torch.stack(values))
    whole = torch.stack(out).view(2, 5, 4, 4)
    want = [whole, *torch.autograd.grad(whole, leaves, inputs.dout)]
    exact = truth(inputs, case.spec("float64"))
    for got, t in zip((exact.out, exact.dq, exact.dk, exact.dv), want, strict=True):
        torch.testing.assert_close(got, t)


@pytest.mark.parametrize("name", ["tiled", "sdpa_flash", "triton"])
def test_the_log_sum_exp(name: str) -> None:
    """Of all keys equal it is the logarithm of a geometric sum. In a ring the distances go on."""
    spec = Spec(2, 2, 16, "float32", alibi=True, lse=True)
    if why := BACKENDS[name].why_not(spec, HERE):
        pytest.skip(why[0])
    q, m = torch.zeros(1, 40, 2, 16), torch.tensor([0.5, 0.01])
    kernel = BACKENDS[name].partial
    assert kernel is not None
    _, L = attention(q, q, q, spec, kernel=kernel, alibi_slopes=m)
    n = torch.arange(1, 41.0)
    want = torch.log((1 - torch.exp(-m[:, None] * n)) / (1 - torch.exp(-m[:, None])))
    torch.testing.assert_close(L[0], want)
    x = torch.randn(3, 2, 40, 2, 16)
    ring = Ring().attend(BACKENDS[name])(*x, spec, alibi_slopes=m)
    plain = BACKENDS["manual"].attend(*x, replace(spec, lse=False), alibi_slopes=m)
    torch.testing.assert_close(ring, plain, rtol=1e-4, atol=1e-5)


# --- honoured or refused ---


def test_who_takes_it() -> None:
    spec = Spec(4, 4, 64, "bfloat16", alibi=True)
    for name, backend in BACKENDS.items():
        takes = any(row.alibi for row in backend.caps)
        other = name in ("sdpa_bmm", "flex_flash", "flash_attn_3", "flash_attn_4")
        assert takes == (not other), name
        if other:
            assert "alibi" in {w.kind for row in backend.caps for w in row.why_not(spec, HERE)}
            q = torch.zeros(1, 3, 4, 64, dtype=torch.bfloat16)
            with pytest.raises(ValueError, match="ALiBi"):
                backend.attend(q, q, q, spec, alibi_slopes=torch.ones(4))
    assert spec.kind != replace(spec, alibi=False).kind and "alibi" in str(spec)
    assert select("sdpa_bmm", spec, "cpu").backend.name in ("sdpa", "sdpa_flash")


@pytest.mark.parametrize("packages, best", [
    ({"flash_attn": "2.8.3", "triton": "3.6"}, "flash_attn_2"), ({"triton": "3.6"}, "triton"),
    ({}, "sdpa")])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_auto_takes_a_kernel_that_stores_no_bias(packages: Any, best: str, capability: Any) -> None:
    machine = Machine("cuda", "a GPU", capability, "2.13.0", packages=packages)
    spec = Spec(8, 2, 64, "bfloat16", alibi=True)
    for asked in (spec, replace(spec, window=9, segments=True)):
        assert resolve("auto", asked, machine).backend.name == best


def test_slopes_that_contradict_the_call_are_refused() -> None:
    q, spec = torch.randn(2, 5, 4, 16), Spec(4, 4, 16, "float32", alibi=True)
    ones = torch.ones(4)
    for slopes, value in (
        (None, "None"), (ones[:3], "3"), (ones.double(), "float64"), (ones.view(1, 4), "1"),
        (ones.expand(3, 4), "3"), (ones.view(1, 1, 4), "1, 1, 4"), (0.5, "0.5"),
        (ones.clone().requires_grad_(), "requires_grad"), (ones.to("meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=value):
            get("manual").attend(q, q, q, spec, alibi_slopes=slopes)
    with pytest.raises(ValueError, match="alibi"):
        get("manual").attend(q, q, q, replace(spec, alibi=False), alibi_slopes=ones)


@settings(max_examples=15, deadline=None)
@given(cases(30, (True, "rows")), st.lists(st.integers(0, 30), min_size=3, max_size=3),
       st.lists(st.integers(1, 30), min_size=3, max_size=3),
       st.sampled_from([("manual", None), ("sdpa", None), ("paged", 8)]))
def test_views_of_a_cache(case: Case, start: list[int], count: list[int], by: Any) -> None:
    """Query i of row b stands at start[b] + i; rows with fewer tokens than queries."""
    (name, size), Tq, T = by, max(count), 60
    spec = Spec(case.H, case.Hkv, 16, "float32", window=case.window, right=case.right, grad=False,
                cache="paged" if size else "static", page_size=size, alibi=True)
    shapes = ((Tq, case.H), (T, case.Hkv), (T, case.Hkv))
    q, k, v = (torch.randn(3, n, h, 16) for n, h in shapes)
    m = torch.rand((3, case.H) if case.alibi == "rows" else (case.H,))
    held_k, held_v, view = filled_cache(k, v, spec)
    reads = view(start, count)
    out = BACKENDS[name].attend(q, held_k, held_v, spec, cache=reads, alibi_slopes=m)
    plain = replace(spec, cache="none", page_size=None)
    for b, (a, n) in enumerate(zip(start, count, strict=True)):
        one = q[b : b + 1, :n], k[b : b + 1, : a + n], v[b : b + 1, : a + n]
        own = m[b] if m.dim() == 2 else m
        want = truth(matrix.Inputs(*one, one[0], None, None, own), plain).out
        torch.testing.assert_close(out[b : b + 1, :n].double(), want, rtol=1e-4, atol=1e-4)


# --- the model ---

SIZES: dict[str, Any] = {"block_size": 24, "vocab_size": 37, "n_layer": 2, "n_head": 4,
                         "n_embd": 32, "position": "alibi"}


def build(**changes: Any) -> GPT:
    torch.manual_seed(1)
    model = GPT(GPTConfig(**{**SIZES, **changes}))
    for p in model.parameters():
        p.data += 0.4 * torch.randn(p.shape)
    return model.eval()


def test_the_slopes_are_the_papers() -> None:
    """Section 3: for 8 heads 1/2 to 1/256; for 12, by its code, every second one of 16 follows."""
    device = torch.device("cpu")
    eight = [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(8, device).tolist() == eight
    twelve = [*eight, *(2.0 ** -(n - 0.5) for n in range(1, 5))]
    torch.testing.assert_close(alibi_slopes(12, device), torch.tensor(twelve))
    for n in (1, 2, 3, 7, 16, 40):
        slopes = alibi_slopes(n, device)
        assert slopes.shape == (n,) and slopes.dtype == torch.float32
        assert slopes.unique().numel() == n and 2**-8 <= slopes.min() <= slopes.max() < 1


def test_a_model_has_no_positions_but_in_its_scores() -> None:
    """Without a bias a first layer could not tell the order of earlier tokens."""
    model, x = build(n_layer=1), torch.arange(10)[None]
    assert not [name for name, _ in model.named_parameters() if "wpe" in name]
    assert {*model.state_dict()} == {*build(n_layer=1, position="rope").state_dict()}
    swapped = x[:, [1, 0, *range(2, 10)]]
    assert not torch.allclose(model(x)[0][:, -1], model(swapped)[0][:, -1])
    half = build().bfloat16()  # whose slopes are not rounded
    torch.testing.assert_close(half(x)[0].float(), build()(x)[0], rtol=0.1, atol=0.5)


@pytest.mark.parametrize("kv", KV_CACHES)
@pytest.mark.parametrize("window", [None, 5, (4, None)])
def test_every_cache_gives_the_same_tokens(kv: str, window: Any) -> None:
    """Also past block_size, where texts slide, and with prompts of several lengths."""
    model = build(n_kv_head=2, attention_window=window)
    plain = build(n_kv_head=2, attention_window=window, attention_backend="manual")
    prompts = [torch.arange(T) * 7 % 37 for T in (9, 1, 4)]
    texts = engine.generate(model, prompts, 20, temperature=0, kv_cache=kv)
    for text, prompt in zip(texts, prompts, strict=True):
        assert torch.equal(text, plain.generate(prompt[None], 20, temperature=0)[0])
        assert len(text.unique()) > 3


def test_compiled_and_exported() -> None:
    model, x = build(attention_backend="sdpa"), torch.arange(20)[None]
    want = model(x)[0]
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x)[0], want)
    program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x)[0], want)
    torch._dynamo.reset()


def test_the_maps_of_explain_are_of_its_scores() -> None:
    """Weights times v are what the kernel gave, and the softmax of the tiles' scores."""
    model, x = build(attention_backend="sdpa"), torch.arange(20)[None]
    with watched(model) as calls, torch.no_grad():
        model.hidden(x)
    assert len(calls) == 2
    for call in calls:
        P = weights(call)
        torch.testing.assert_close(scores(call, 20).softmax(-1), P, rtol=1e-4, atol=1e-5)
        out = torch.einsum("hij,jhd->ihd", P, call.v[0])
        torch.testing.assert_close(out, call.out[0], rtol=1e-4, atol=1e-5)
    assert all(layer["agrees"] for layer in maps(calls)["layers"])


def test_no_format_of_other_libraries_has_it(tmp_path: Any) -> None:
    for more in ({"bias": True}, {"norm": "rms", "mlp": "swiglu", "bias": False}):
        with pytest.raises(UserError, match="position"):
            checkpoint.save_hf(build(**more), tmp_path / "out")
    assert not (tmp_path / "out").exists()
