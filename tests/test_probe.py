"""Available means that it ran: good backends pass the probe, broken ones are found out, loudly."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attention import (
    BACKENDS,
    Backend,
    BackendUnavailable,
    DeviceLost,
    Machine,
    Policy,
    Spec,
    announce,
    manual,
    probe,
    select,
)
from attention.__main__ import main
from attention.check.command import check
from attention.proof import wrong_at

SPEC = Spec(4, 2, 32, "float32")
STRICT = Policy(fallback=False)


@pytest.fixture(autouse=True)
def said_nothing_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    sys.modules["attention.select"]._once.cache_clear()  # attention.select is the function


# --- good ones ---


SPECS = [
    SPEC, Spec(4, 4, 80, "bfloat16"), Spec(3, 1, 20, "float16", window=9),
    Spec(4, 2, 32, "float32", window=1), Spec(2, 2, 16, "float32", window=1000),
    Spec(2, 2, 32, "float64", segments=True), Spec(2, 2, 32, "float32", dropout=0.2),
    Spec(4, 1, 64, "bfloat16", window=16, segments=True, grad=False)]
HERE = Machine.here("cpu")


@pytest.mark.parametrize("name, spec", [
    pytest.param(name, spec, id=f"{name}-{n}", marks=[pytest.mark.slow] * (
        name == "flex" or (name == "triton" and n not in (2, 6))))
    for name, b in BACKENDS.items()
    for n, spec in enumerate(SPECS) if not b.why_not(spec, HERE)])
def test_a_backend_that_may_run_here_passes(name, spec) -> None:
    tried = probe(BACKENDS[name], spec, "cpu")
    assert tried.why == ()
    assert tried.error is not None and tried.error < 4 * torch.finfo(getattr(torch, spec.dtype)).eps
    assert tried.events


@given(
    st.sampled_from(["tiled", "sdpa", "sdpa_flash"]), st.sampled_from([1, 8, 32, 64, 128]),
    st.sampled_from(["float16", "bfloat16"]), st.none() | st.sampled_from([0.5, 1.0, 2.0]),
    st.none() | st.integers(1, 30), st.sampled_from([0, 0, None, 3]), st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_a_right_kernel_in_half_precision_passes(name, D, dtype, scale, window, right, lse) -> None:
    """Its rounded output moves dQ and dK where plain PyTorch, of one key, is exact."""
    spec = Spec(4, 2, D, dtype, window, scale=scale, right=right, lse=lse)
    if not BACKENDS[name].why_not(spec, HERE):
        assert probe(BACKENDS[name], spec, "cpu").why == ()


def test_the_kernels_are_what_ran() -> None:
    """PyTorch's flash kernel on the CPU has no dropout. test_attention.py has the other kernels."""
    for dropout, kernel in (0.0, "flash (CPU)"), (0.1, "math"):
        spec = dataclasses.replace(SPEC, dropout=dropout)
        assert probe(BACKENDS["sdpa"], spec, "cpu").kernels == (kernel,)


@pytest.mark.parametrize("name, other", [("sdpa_flash", "sdpa_math"), ("sdpa_math", "sdpa_flash")])
def test_a_pinned_kernel_that_is_another_one_is_refused(name, other) -> None:
    spec = Spec(2, 2, 16, "float32")
    assert not probe(BACKENDS[name], spec, "cpu").why
    swapped = dataclasses.replace(BACKENDS[name], attend=BACKENDS[other].attend)
    (why,) = probe(swapped, spec, "cpu").why
    assert other.removeprefix("sdpa_") in why


def test_the_random_state_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    for spec in (SPEC, dataclasses.replace(SPEC, dropout=0.3)):
        for name in ("manual", "sdpa", "sdpa_math"):
            probe(BACKENDS[name], spec, "cpu")
    select("sdpa", SPEC, "cpu")
    assert torch.equal(before, torch.get_rng_state())


# --- broken ones: each is right but for one thing ---


def raises(q: Tensor, *_: Any, **__: Any) -> Tensor:
    raise RuntimeError("CUDA error: no kernel image is available\nsecond line of the trace")


def not_a_number(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    out = manual.attend(q, k, v, spec, **kw).clone()
    out[0, 3, 1, 2] = torch.nan
    return out


def forgotten_scale(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q * spec.head_dim**0.5, k, v, spec, **kw)


def leaking_future(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


def top_left(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def dropped_window(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, v, dataclasses.replace(spec, window=None), **kw)


def window_one_too_wide(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    assert spec.window is not None
    return manual.attend(q, k, v, dataclasses.replace(spec, window=spec.window + 1), **kw)


def dropped_segments(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **_: Any) -> Tensor:
    return manual.attend(q, k, v, spec)


def wrong_head(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    """g(h) = h % Hkv instead of h // (H / Hkv)."""
    order = torch.arange(spec.n_head) % spec.n_kv_head
    spec = dataclasses.replace(spec, n_kv_head=spec.n_head)
    return manual.attend(q, k[:, :, order], v[:, :, order], spec, **kw)


class _Scaled(torch.autograd.Function):
    """The identity, whose gradient is one hundredth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.01


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, _Scaled.apply(k), v, spec, **kw)


def no_gradient(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, v, spec, **kw).detach()


def transposed(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, v, spec, **kw).transpose(1, 2)


def silent_cast(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, v, spec, **kw).half()


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


def ends_with(error: BaseException, *args: object, **kw: object) -> Tensor:
    raise error


def changed_dtype(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    torch.set_default_dtype(torch.float64)
    return manual.attend(q, k, v, spec, **kw)


def nan_with_dropout(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, v, spec, **kw) / (1 if spec.dropout == 0 else 0)


def made_up(attend: Any) -> Backend:
    return dataclasses.replace(
        BACKENDS["manual"], name="made_up", title="made up", attend=attend, fallback="sdpa"
    )


def seen_scores(q: Tensor, k: Tensor, v: Tensor, spec: Spec) -> tuple[Tensor, Tensor]:
    """Scores (B, H, T, T), -inf where nothing is seen, and v (B, H, T, D), in float32."""
    k, v = (t.repeat_interleave(spec.n_head // spec.n_kv_head, dim=2) for t in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k).float() / spec.head_dim**0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf), v.transpose(1, 2).float()


def exp_without_the_maximum(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **_: Any) -> Tensor:
    """Right as long as no exp() overflows: from a score of 89 on."""
    scores, v_BHTD = seen_scores(q, k, v, spec)
    P = scores.exp()
    return (P @ v_BHTD / P.sum(dim=-1, keepdim=True)).transpose(1, 2).to(q.dtype)


def scores_cut_off_at_30(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **_: Any) -> Tensor:
    scores, v_BHTD = seen_scores(q, k, v, spec)
    return (scores.clamp(max=30).softmax(dim=-1) @ v_BHTD).transpose(1, 2).to(q.dtype)


def leaking_within_tolerance(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    """Right to a rounding, and the last token shows in every output."""
    seen = v[:, -1:].mean() * 4 * torch.finfo(v.dtype).eps
    return manual.attend(q, k, v, spec, **kw) * (1 + seen)


def nan_where_the_last_token_is_large(
    q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any
) -> Tensor:
    """As where a value that is not seen overflows before it is multiplied by zero."""
    large = v[:, -1].mean() > 1.5
    return manual.attend(q, k, v, spec, **kw) + torch.where(large, torch.nan, 0.0)


def off_by_little_everywhere(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    """By less than bfloat16's largest error, but in every number."""
    return manual.attend(q, k, v, spec, **kw) + 0.02


WINDOW = dataclasses.replace(SPEC, window=9)
BROKEN = [
    (raises, SPEC, r"it failed in the probe \(RuntimeError: CUDA error: no kernel image"),
    (not_a_number, SPEC, r"its numbers are wrong \(out is off by nan"),
    (forgotten_scale, SPEC, r"its numbers are wrong \(out is off by \d"),
    (leaking_future, SPEC, r"out is off by \d"),
    (top_left, dataclasses.replace(SPEC, grad=False), r"\(out after a prefix is off by \d"),
    (dropped_window, WINDOW, r"out is off by \d"),
    (dropped_window, dataclasses.replace(SPEC, window=1024), r"out is off by \d"),
    (window_one_too_wide, WINDOW, r"out is off by \d"),
    (dropped_segments, dataclasses.replace(SPEC, segments=True), r"out is off by \d"),
    (wrong_head, SPEC, r"out is off by \d"),
    (wrong_gradient, SPEC, r"^its numbers are wrong \(dk is off by 0\.\d+, .* is allowed\)$"),
    (no_gradient, SPEC, r"it failed in the probe \(RuntimeError: .*require grad"),
    (transposed, dataclasses.replace(SPEC, grad=False), r"\(TypeError: it returned \(2, 4, \d"),
    (silent_cast, SPEC, r"it failed in the probe \(TypeError: .*float16"),
    (exp_without_the_maximum, SPEC, r"\(out is off by nan.*, on large scores\)$"),
    (scores_cut_off_at_30, SPEC, r"\(out is off by \d.*, on large scores\)$"),
    (leaking_within_tolerance, SPEC,
     r"^its numbers are wrong \(a later token moves earlier outputs, by up to \de-0\d\)$"),
    (nan_where_the_last_token_is_large, SPEC, r"a later token moves .* by up to nan\)$"),
    (off_by_little_everywhere, dataclasses.replace(SPEC, dtype="bfloat16"),
     r"\(out is off by 0.02 in the mean, 0.00\d+ is allowed\)$"),
    *((partial(ends_with, e), SPEC, rf"\({type(e).__name__}: .*\)$") for e in (
        SystemExit(0), GeneratorExit(), Unprintable())),
    (changed_dtype, SPEC, r"changed PyTorch's default dtype"),
    (nan_with_dropout, dataclasses.replace(SPEC, dropout=0.1), r"not finite with dropout"),
]


# Wrong by a few percent, in the dtypes whose roundings are a percent.


def three_percent_too_large(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, v * 1.03, spec, **kw)


def scale_off(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q * 1.06, k, v, spec, **kw)


def one_key_too_few(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    """Of T keys the first is lost: 1.6 % of the last row's."""
    zeroed = torch.cat((v[:, :1] * 0, v[:, 1:]), dim=1)
    return manual.attend(q, k, zeroed, spec, **kw)


def wrong_far_from_the_largest(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    """Right in the first rows, whose outputs are largest, and 4 % too large in all the others."""
    factor = torch.where(torch.arange(q.shape[1]) < q.shape[1] // 4, 1.0, 1.04)
    out = manual.attend(q, k, v, spec, **kw)
    return (out * factor[None, :, None, None]).to(q.dtype)


class _FourPercent(_Scaled):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1.04


def gradient_of_v_off(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(q, k, _FourPercent.apply(v), spec, **kw)


def gradient_of_q_off(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
    return manual.attend(_FourPercent.apply(q), k, v, spec, **kw)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("attend", [
    three_percent_too_large, scale_off, one_key_too_few, wrong_far_from_the_largest,
    gradient_of_v_off, gradient_of_q_off])
def test_half_precision_does_not_excuse_a_few_percent(attend, dtype) -> None:
    spec = dataclasses.replace(SPEC, dtype=dtype)
    assert probe(made_up(manual.attend), spec, "cpu").why == ()
    tried = probe(made_up(attend), spec, "cpu")
    assert tried.why and "its numbers are wrong" in tried.why[0], tried


@pytest.mark.parametrize("attend, spec, words", BROKEN, ids=lambda x: getattr(x, "__name__", ""))
def test_a_broken_backend_is_refused_with_a_telling_reason(
    attend, spec, words, monkeypatch, caplog
):
    tried = probe(made_up(attend), spec, "cpu")
    assert tried.why and re.search(words, tried.why[0]), tried.why
    monkeypatch.setitem(sys.modules["attention.select"]._BY_ANY_NAME, "made_up", made_up(attend))

    with pytest.raises(BackendUnavailable) as e:
        select("made_up", spec, "cpu", STRICT)
    assert tried.why[0] in str(e.value)

    chosen = select("made_up", spec, "cpu")
    assert chosen.requested == "made_up" and chosen.backend.name == "sdpa"
    assert chosen.rejected["made_up"] == tried.why
    with caplog.at_level(logging.INFO, "nanoattn"):
        announce(chosen)
    warning, info = (r.getMessage() for r in caplog.records)
    assert warning.startswith("made_up requested but " + tried.why[0])
    assert warning.endswith("Falling back to 'sdpa'.")
    assert info.startswith(
        "Attention backend: sdpa (PyTorch scaled_dot_product_attention; kernel: "
    )


@pytest.mark.parametrize("text, lost", [
    ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...", True),
    ("CUDA error: device-side assert triggered", True), ("CUDA error: misaligned address", True),
    ("Triton Error [CUDA]: an illegal memory access was encountered", True),
    ("CUDA error: no kernel image is available for execution on the device", False),
    ("CUDA out of memory. Tried to allocate 2.00 GiB", False)])
@pytest.mark.parametrize("T", [100, 1000])  # in the first probe, and in that of the run's length
def test_no_kernel_is_tried_on_a_gpu_that_another_has_crashed(text, lost, T, monkeypatch) -> None:
    """CUDA refuses all work of a process after some errors: a fallback would get the blame."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Tensor:
        if k.shape[1] >= min(T, 1000) or T < 256:
            raise torch.AcceleratorError(text) if hasattr(torch, "AcceleratorError") else (
                RuntimeError(text))
        return manual.attend(q, k, v, spec, **options)

    monkeypatch.setitem(sys.modules["attention.select"]._BY_ANY_NAME, "made_up", made_up(attend))
    if lost:
        with pytest.raises(DeviceLost, match=r"made_up .*--attention_backend=sdpa") as e:
            select("made_up", SPEC, "cpu", shape=(1, T))
        assert "\n" not in str(e.value) and text.partition("\n")[0] in str(e.value)
    else:
        assert select("made_up", SPEC, "cpu", shape=(1, T)).backend.name == "sdpa"


def test_a_crash_on_the_gpu_is_one_line_of_a_command(tmp_path, capsys) -> None:
    file = tmp_path / "crash.py"
    file.write_text(
        "from attention import Backend, Caps\n"
        "def attend(*args, **options):\n"
        "    raise RuntimeError('CUDA error: an illegal memory access was encountered')\n"
        "BACKEND = Backend('crash', 'crashes', attend, (Caps(),), None)\n")
    with pytest.raises(SystemExit):
        main([str(file), "--device=cpu"])
    [line] = capsys.readouterr().err.splitlines()
    assert "illegal memory access" in line and "--attention_backend=manual" in line
    assert check(str(file), ["cpu"], ["float32"]).features["total"]["failed"] == 1


@pytest.mark.parametrize("cache", ["none", "static", "paged"])
def test_a_leak_of_the_future_is_found_however_small(cache) -> None:
    """In the last two rows alone, within the tolerance: only the canary tells."""

    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **kw: Any) -> Tensor:
        out = real.attend(q, k, v, spec, **kw).clone()
        out[:, -2:] *= 1 + v.mean() * 64 * torch.finfo(torch.float32).eps
        return out

    real = BACKENDS["paged" if cache == "paged" else "manual"]
    spec = Spec(4, 2, 32, "float32", grad=False, cache=cache,
                page_size=16 if cache == "paged" else None)
    honest, leaking = (probe(dataclasses.replace(real, attend=a), spec, "cpu")
                       for a in (real.attend, attend))
    assert honest.why == () and honest.proof and honest.proof["canary"]
    assert "a later token moves earlier outputs" in leaking.why[0] and len(leaking.why) == 1
    assert leaking.proof and not leaking.proof["canary"]
    assert leaking.proof["error"] <= leaking.proof["allowed"]


# --- a static cache ---


@pytest.mark.parametrize("name", ["manual", "sdpa"])
@pytest.mark.parametrize("window", [None, 9])
def test_a_static_cache_is_read_right(name, window) -> None:
    for dtype in ("float32", "bfloat16", "float64"):
        spec = Spec(4, 2, 32, dtype, window=window, grad=False, cache="static")
        assert probe(BACKENDS[name], spec, "cpu").why == ()


@pytest.mark.parametrize("name", ["manual", "sdpa"])
@pytest.mark.parametrize("fault", ["one place late", "one place early", "no view", "no window"])
def test_a_kernel_that_reads_a_static_cache_wrongly_is_found(name, fault) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, *, cache: Any, **kw: Any) -> Tensor:
        if fault == "no window":
            spec = dataclasses.replace(spec, window=None)
        elif fault == "no view":
            cache, spec = None, dataclasses.replace(spec, cache="none")
        else:
            off = 1 if fault == "one place late" else -1
            cache = dataclasses.replace(cache, start=cache.start + off)
        return BACKENDS[name].attend(q, k, v, spec, cache=cache)

    spec = Spec(4, 4, 32, "float32", window=9, grad=False, cache="static")
    tried = probe(made_up(attend), spec, "cpu")
    assert any("its numbers are wrong" in w for w in tried.why), tried


# --- at the length of the run, and with what comes in ---


def wrong_beyond(n: int) -> Backend:
    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, **options: Any) -> Tensor:
        v = v if k.shape[1] <= n else torch.cat((v[:, :n], 2 * v[:, n:]), dim=1)
        return manual.attend(q, k, v, spec, **options)

    caches = ("none", "dynamic", "static")
    caps = dataclasses.replace(BACKENDS["sdpa"].caps[0], caches=caches)
    return Backend("far", "right up to some length", attend, (caps,), None)


@pytest.mark.parametrize("changes", [
    {}, {"grad": False}, {"window": 50}, {"segments": True}, {"grad": False, "cache": "dynamic"},
    {"grad": False, "cache": "static"}, {"dtype": "bfloat16"}])
def test_a_kernel_wrong_beyond_some_keys_is_refused_where_they_are_used(
    changes, monkeypatch, caplog
) -> None:
    monkeypatch.setitem(sys.modules["attention.select"]._BY_ANY_NAME, "far", wrong_beyond(700))
    monkeypatch.setattr("attention.machine.system.bfloat16_units", lambda: False)
    spec = dataclasses.replace(SPEC, **changes)
    assert select("far", spec, "cpu", STRICT, shape=(2, 700)).backend.name == "far"
    with pytest.raises(BackendUnavailable, match="1,000 tokens"):
        select("far", spec, "cpu", STRICT, shape=(2, 1000))
    assert select("far", spec, "cpu", shape=(2, 1000)).backend.name == "sdpa"
    assert "far" in caplog.text and "1,000" in caplog.text  # select() itself warns


@pytest.mark.parametrize("T", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("name, cache", [
    ("manual", "none"), ("tiled", "none"), ("manual", "static"), ("paged", "paged")])
def test_a_short_length_has_all_its_rows_checked(name, cache, T) -> None:
    """As of `attention check --length`."""
    page_size = 16 if cache == "paged" else None
    spec = dataclasses.replace(SPEC, grad=cache == "none", cache=cache, page_size=page_size)
    assert wrong_at(BACKENDS[name], spec, "cpu", T) == ()


@pytest.mark.parametrize("wrong", [
    lambda q, k, v: (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)),
    lambda q, k, v: (q[..., :16], k[..., :16], v[..., :16]), lambda q, k, v: (q, k, v.double()),
    lambda q, k, v: (q.half(), k.half(), v.half()), lambda q, k, v: (q, q, q),
    lambda q, k, v: (q[0], k[0], v[0]), lambda q, k, v: (q, k, v[:, 1:])])
@pytest.mark.parametrize("name", ["manual", "tiled", "sdpa", "sdpa_flash"])
def test_tensors_that_contradict_the_spec_are_refused(name, wrong) -> None:
    q, k, v = (torch.randn(2, 10, h, 32) for h in (4, 2, 2))
    BACKENDS[name].attend(q, k, v, SPEC)
    with pytest.raises(ValueError):
        BACKENDS[name].attend(*wrong(q, k, v), SPEC)
