"""The proof: right kernels pass, wrong ones are refused, and it costs about one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import kernels
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_check import BUGS, HONEST, planted
from torch import Tensor

from attention import BACKENDS, manual, select
from attention.caps import BackendUnavailable, DeviceLost
from attention.proof import probe, probe_long
from attention.spec import DTYPES, Machine, Policy, Spec

SPEC = Spec(4, 2, 32, "float32")
STRICT = Policy(fallback=False)
HERE = Machine.here("cpu")
EPS = torch.finfo(torch.float32).eps


# --- right kernels ---

NAMES = [n for n in BACKENDS if n not in ("flex", "triton")]


@settings(max_examples=50, deadline=None)
@given(
    st.sampled_from(NAMES), st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    st.sampled_from([1, 8, 20, 32, 64, 80, 128]), st.sampled_from(DTYPES),
    st.none() | st.integers(1, 30) | st.just(1000), st.sampled_from(["none", "static", "paged"]),
    st.fixed_dictionaries({
        "right": st.sampled_from([0, 0, None, 3]), "scale": st.sampled_from([None, 0.3, 2.0]),
        "softcap": st.sampled_from([None, 9.0]), "dropout": st.sampled_from([0.0, 0.0, 0.2]),
        **dict.fromkeys(("segments", "sinks", "lse", "grad"), st.booleans())}))
def test_a_right_kernel_passes(name, heads, D, dtype, window, cache, changes) -> None:
    """Also where its rounded output moves dQ and dK; the random state stays."""
    for lacks in ({}, {"softcap": None}, {"sinks": False}, {"lse": False}, {"dropout": 0.0}):
        changes |= lacks if cache == "none" else lacks | {"segments": False, "grad": False}
        spec = Spec(*heads, D, dtype, window, cache=cache,
                    page_size=16 if cache == "paged" else None, **changes)
        if not BACKENDS[name].why_not(spec, HERE):
            before = torch.get_rng_state()
            tried = probe(BACKENDS[name], spec, "cpu")
            assert tried.why == () and tried.proof and tried.proof["canary"]
            assert probe_long(BACKENDS[name], spec, "cpu", (2, 300, 300)) == ()
            assert torch.equal(before, torch.get_rng_state())
            return


# --- wrong kernels: each is right but for one thing ---


def of(**changes: Any) -> Callable[..., Tensor]:
    return lambda q, k, v, spec, **more: manual.attend(q, k, v, replace(spec, **changes), **more)


def on(change: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    return lambda q, k, v, spec, **more: manual.attend(*change(q, k, v), spec, **more)


def after(change: Callable[..., Any]) -> Callable[..., Any]:
    return lambda q, k, v, spec, **more: change(manual.attend(q, k, v, spec, **more), v)


def moved(by: int) -> Callable[..., Tensor]:
    return lambda q, k, v, spec, cache: manual.attend(
        q, k, v, spec, cache=replace(cache, start=cache.start + by))


def raises(error: BaseException) -> Callable[..., Tensor]:
    def attend(*_: Any, **__: Any) -> Tensor:
        raise error

    return attend


def scaled(x: Tensor, factor: float) -> Tensor:
    """The identity, whose gradient is a little too large."""
    same = x.view_as(x)
    if x.requires_grad:
        same.register_hook(lambda grad: grad * factor)
    return same


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


QUIET = replace(SPEC, grad=False)
STATIC = replace(QUIET, window=9, cache="static")
BROKEN: dict[str, tuple[Callable[..., Any], Spec, str]] = {  # and a word of the reason
    "raises": (raises(RuntimeError("no kernel image\nsecond line")), SPEC, "no kernel image"),
    "exits": (raises(SystemExit(0)), SPEC, "SystemExit"),
    "unprintable": (raises(Unprintable()), SPEC, "Unprintable"),
    "a NaN": (after(lambda out, v: out + 0 / (torch.arange(32) != 3)), SPEC, "out"),
    "no view": (lambda q, k, v, s, cache: manual.attend(q, k, v, replace(s, cache="none")),
                STATIC, "out"),
    "a place late": (moved(1), STATIC, "out"), "a place early": (moved(-1), STATIC, "out"),
    "dk off": (on(lambda q, k, v: (q, scaled(k, 1.01), v)), SPEC, "dk"),
    "no gradient": (after(lambda out, v: out.detach()), SPEC, "requires_grad"),
    "transposed": (after(lambda out, v: out.transpose(1, 2)), QUIET, "(2, 4, "),
    "another dtype": (after(lambda out, v: out.half()), SPEC, "float16"),
    "no tensor": (after(lambda out, v: None), QUIET, "None"),
    # Within the tolerance: only the canary tells.
    "leaks little": (after(lambda out, v: out * (1 + 4 * EPS * v[:, -1:].mean())), SPEC, "later"),
    **{f"leaks to two rows, {spec.cache}": (after(lambda out, v: torch.cat((
        out[:, :-2], out[:, -2:] * (1 + v.mean() * 64 * EPS)), 1)), spec, "later")
       for spec in (QUIET, replace(QUIET, cache="static"))},
    "leaks NaN": (after(lambda out, v: out + torch.where(v[:, -1].mean() > 1.5, torch.nan, 0.0)),
                  SPEC, "later"),
    "NaN by dropout": (lambda q, k, v, s, **o: manual.attend(q, k, v, s, **o) / (s.dropout == 0),
                       replace(SPEC, dropout=0.1), "dropout"),
    # Right with the numbers of the first call alone, as a kernel that keeps what it has compiled.
    **{f"first {name} {value}, {dtype}": (
        of(**{name: min(value, 32) if name in ("window", "right") else value}),
        Spec(4, 2, 32, dtype, **{name: value}), "out")
       for name, values in (("window", (1, 4, 9, 1000)), ("right", (1, 4, 9, 1000)),
                            ("scale", (0.05, 2.0)), ("softcap", (2.0, 1000.0)))
       for value in values for dtype in ("float32", "bfloat16")},
    # A few percent, where the roundings are a percent.
    **{f"{name}, {dtype}": (attend, replace(SPEC, dtype=dtype), word)
       for dtype in ("bfloat16", "float16") for name, word, attend in (
        ("3 % too large", "out", on(lambda q, k, v: (q, k, v * 1.03))),
        ("scale 6 % off", "out", on(lambda q, k, v: (q * 1.06, k, v))),
        ("0.02 too large", "out", after(lambda out, v: out + 0.02)),
        ("a lost key", "out", on(lambda q, k, v: (q, k, torch.cat((0 * v[:, :1], v[:, 1:]), 1)))),
        ("dv 4 % off", "dv", on(lambda q, k, v: (q, k, scaled(v, 1.04)))),
        ("dq 4 % off", "dq", on(lambda q, k, v: (scaled(q, 1.04), k, v))))},
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_kernel_is_refused_with_a_reason(fault: str, tmp_path: Path) -> None:
    attend, spec, word = BROKEN[fault]
    chosen = select(kernels.as_file(tmp_path, attend), spec, "cpu")
    [reason] = chosen.rejected["mine"]
    assert chosen.backend.name == "manual" and word in reason and "\n" not in reason


# Rows of `check` (test_check.py), and the kind of call whose proof finds their bugs.
PROVED: dict[str, dict[str, Any]] = {
    "causal": {}, "large scores": {}, "grouped heads": {}, "window": {"window": 9},
    "right": {"right": 5}, "segments": {"segments": True}, "sinks": {"sinks": True},
    "softcap": {"softcap": 2.0}, "lengths": {"grad": False}}
# What few shapes cannot show: order, size and rows of ids; other dtypes, sizes, an empty batch.
BLIND = ("segments by order", "segments as float32", "segments of the first row", "no empty batch",
         "sinks refused in another dtype", "head dimensions in fours")


@pytest.mark.parametrize("bug", ["", *(
    b for b in BUGS if BUGS[b][2] in PROVED and b not in BLIND)])
def test_a_planted_bug_is_refused_in_the_kind_that_has_it(bug: str, tmp_path: Path) -> None:
    path, row = planted(bug, tmp_path) if bug else (HONEST, "")
    for kind in [row] if bug else PROVED:
        chosen = select(str(path), replace(SPEC, **PROVED[kind]), "cpu")
        assert (chosen.backend.name != "planted") == bool(bug), kind


# --- at the length of a call ---


LATE = {  # wrong from the 700th key on
    "out": lambda q, k, v: (q, k, torch.cat((v[:, :700], 2 * v[:, 700:]), 1)),
    "dk": lambda q, k, v: (q, torch.cat((k[:, :700], scaled(k[:, 700:], 1.1)), 1), v)}


@pytest.mark.parametrize("fault, Tq, changes", [
    ("out", 1, {"grad": False}), ("out", 900, {"window": 50}), ("dk", 900, {}),
    ("out", 900, {"segments": True, "dtype": "bfloat16"}),
    ("out", 1, {"grad": False, "cache": "dynamic"}),
    ("out", 900, {"grad": False, "cache": "static"}), ("out", 900, {"right": None, "sinks": True})])
def test_a_kernel_wrong_beyond_some_keys_is_refused_where_they_are_used(
    fault, Tq, changes, tmp_path
) -> None:
    spec, file = replace(SPEC, **changes), kernels.as_file(tmp_path, on(LATE[fault]))
    shape = 2, min(Tq, 700), 700
    assert select(file, spec, "cpu", STRICT, shape=shape).backend.name == "mine"
    with pytest.raises(BackendUnavailable, match=rf"1,000 .*{fault}"):
        select(file, spec, "cpu", STRICT, shape=(2, Tq, 1000))
    assert select(file, spec, "cpu", shape=(2, Tq, 1000)).backend.name == "manual"


@pytest.mark.parametrize("changes", [
    {"grad": False}, {"window": 100, "sinks": True}, {"softcap": 9.0, "right": None},
    {"segments": True, "dtype": "bfloat16"}])
def test_no_proof_makes_a_tensor_of_keys_times_keys(changes) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor, spec: Spec, sinks: Any = None, **_: Any) -> Tensor:
        return q + 0 * (k.sum() + v.sum() + (0 if sinks is None else sinks.sum()))

    spec, T = replace(SPEC, head_dim=16, **changes), 2048
    for Tq in (1, T):
        with kernels.Largest() as made:
            assert probe_long(kernels.backend(attend), spec, "cpu", (8, Tq, T))  # it is wrong
        assert made.numbers <= 2 * 64 * T


@pytest.mark.parametrize("Tq, Tk, changes", [
    (1, 16_384, {"grad": False}), (1, 16_384, {"grad": False, "cache": "static"}),
    (5, 16_384, {"window": 99}), (1024, 1024, {}), (1024, 1024, {"scale": 0.1, "grad": False})])
def test_a_proof_costs_about_one_call(Tq, Tk, changes, tmp_path) -> None:
    """One group's shape, and short calls."""
    mine, spec = kernels.Recorder(), Spec(8, 2, 8, "float32", **changes)
    chosen = select(kernels.as_file(tmp_path, mine), spec, "cpu", shape=(8, Tq, Tk))
    assert chosen.backend.name == "mine"
    assert [shape for shape in mine.shapes if shape[2] > 256] == [(1, Tq, Tk, 4)]
    assert max(B * Tk for B, _, Tk, _ in mine.shapes if Tk <= 256) <= 2 * 64


# --- a kernel that loses the GPU ---


@pytest.mark.parametrize("text, lost", [
    ("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be", True),
    ("CUDA error: device-side assert triggered", True), ("CUDA error: misaligned address", True),
    ("Triton Error [CUDA]: an illegal memory access was encountered", True),
    ("CUDA error: no kernel image is available for execution on the device", False),
    ("CUDA out of memory. Tried to allocate 2.00 GiB", False)])
@pytest.mark.parametrize("least", [1, 1000])  # in the first probe, or at the call's length
def test_no_kernel_is_tried_on_a_gpu_that_another_has_crashed(text, lost, least, tmp_path) -> None:
    """A fallback would get the blame."""

    def change(*qkv: Tensor) -> tuple[Tensor, ...]:
        if qkv[1].shape[1] >= least:
            raise torch.AcceleratorError(text)
        return qkv

    file = kernels.as_file(tmp_path, on(change), fallback="sdpa")
    if not lost:
        assert select(file, SPEC, "cpu", shape=(1, 1000, 1000)).backend.name == "sdpa"
        return
    with pytest.raises(DeviceLost, match=r"mine .*--attention_backend=sdpa") as e:
        select(file, SPEC, "cpu", shape=(1, 1000, 1000))
    assert "\n" not in str(e.value) and text.partition("\n")[0] in str(e.value)


def test_a_pinned_kernel_that_is_another_one_is_refused() -> None:
    spec = Spec(2, 2, 16, "float32")
    for name, other in (("sdpa_flash", "sdpa_math"), ("sdpa_math", "sdpa_flash")):
        assert not probe(BACKENDS[name], spec, "cpu").why
        (why,) = probe(replace(BACKENDS[name], attend=BACKENDS[other].attend), spec, "cpu").why
        assert other.removeprefix("sdpa_") in why
