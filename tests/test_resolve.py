"""Which backend runs, and why not another: decided on machines that exist only here."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention import (
    BACKENDS,
    Backend,
    BackendUnavailable,
    Caps,
    Machine,
    Policy,
    Spec,
    get,
    packages,
    resolve,
)
from attention.caps import version
from attention.select import math_note

ROOT = Path(__file__).parent.parent
STRICT = Policy(fallback=False)

TITAN = Machine("cuda", "NVIDIA TITAN RTX", (7, 5), "2.13.0", "12.8")
RTX4090 = Machine("cuda", "NVIDIA GeForce RTX 4090", (8, 9), "2.13.0", "12.8")
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "2.13.0", "12.8")
B200 = Machine("cuda", "NVIDIA B200", (10, 0), "2.13.0", "12.8")
APPLE = Machine("mps", "Apple M3", None, "2.13.0")
CPU = Machine("cpu", "AMD EPYC", None, "2.13.0+cpu")
OLD = Machine("cpu", "Intel Xeon", None, "1.13.1")

H100_2_11, COMPILED = replace(H100, torch="2.11.0"), {"compiled": True}

BF16 = Spec(12, 12, 64, "bfloat16")
FP16 = replace(BF16, dtype="float16")
FP32 = replace(BF16, dtype="float32")


def runs(name: str, spec: Spec, machine: Machine, policy: Policy = Policy()) -> str:
    return resolve(name, spec, machine, policy).backend.name


def why(name: str, spec: Spec, machine: Machine) -> list[str]:
    return get(name).why_not(spec, machine)


# --- with every package installed ---


def full(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, packages=dict.fromkeys(packages(), "99.0"), **changes)


RTX3050 = Machine("cuda", "NVIDIA GeForce RTX 3050", (8, 6), "2.13.0", "12.8")
A100 = Machine("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), "2.13.0", "12.8")


SUNK = replace(BF16, sinks=True)
CAPPED = replace(BF16, softcap=50.0)


# --- names ---


def test_names_and_aliases() -> None:
    assert get("eager") is get("manual") is BACKENDS["manual"]
    assert resolve("eager", FP32, CPU).requested == "eager"
    with pytest.raises(ValueError) as e:
        get("sdpa_flsh")
    assert "unknown attention backend 'sdpa_flsh'; did you mean 'sdpa_flash'?" in str(e.value)
    assert all(name in str(e.value) for name in ("auto", "eager", *BACKENDS))
    with pytest.raises(ValueError) as e:
        get("xyzzy")
    assert "did you mean" not in str(e.value) and "known: auto, fastest, manual" in str(e.value)


# --- caps, field by field ---

ANY = Spec(4, 4, 64, "float32")


def made_up(*caps: Caps, **changes: Any) -> Backend:
    return Backend("made_up", "made up", lambda *a, **k: None, caps, fallback="sdpa", **changes)


# --- packages, and the lines that a user sees ---


def test_a_beta_comes_before_its_release_and_after_earlier_betas() -> None:
    ordered = ["3.9", "4.0.0b9", "4.0.0.beta13", "4.0.0b26", "4.0.0", "4.0.1b1", "4.0.1"]
    assert sorted(ordered[::-1], key=version) == ordered
    assert version("2.13.0+cpu") == (2, 13, 0) and version("2.13.0a0+git") == (2, 13, 0)
    assert version("4.0.0b13") > version("4.0") and version("ImportError: 4.0") == ()


# --- Spec and Machine ---


def test_this_machine() -> None:
    here = Machine.here("cpu")
    assert here.device == "cpu" and here.name and here.capability is None
    assert here.torch == sys.modules["torch"].__version__
    assert here.version_of("numpy") == sys.modules["numpy"].__version__
    assert here.version_of("no_such_package_anywhere") is None


def test_a_broken_import_keeps_its_words(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "broken_kernels_cuda.so: undefined symbol: _ZN3c104impl"
    (tmp_path / "broken_kernels.py").write_text(f"raise ImportError({text!r})\n")
    (tmp_path / "half_kernels.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "plain_kernels.py").write_text("")
    (tmp_path / "no_driver.py").write_text("raise RuntimeError('no driver')\n")
    (tmp_path / "like_kernels.py").write_text("import like\n")
    here = Machine.here("cpu")
    expected = {
        "broken_kernels": f"ImportError: {text}",
        "half_kernels": "ModuleNotFoundError: No module named 'no_such_package_anywhere'",
        "plain_kernels": "unknown version",
        "like_kernels": "ModuleNotFoundError: No module named 'like'",
        "no_driver": "RuntimeError: no driver",
        "no.kernels": None,
    }
    assert {name: here.version_of(name) for name in expected} == expected
    for name, reason in (("broken_kernels", text), ("half_kernels", "No module named")):
        [got] = made_up(Caps(packages=(name,))).why_not(ANY, here)
        assert f"'{name}' is installed but does not import" in got and reason in got
    assert made_up(Caps(packages=("plain_kernels",))).why_not(ANY, here) == []


def test_import_attention_leaves_the_compiler_and_transformers_alone() -> None:
    """torch._dynamo takes a second or more to import, for a run that may compile nothing."""
    heavy = "not {'torch._dynamo', 'transformers'} & set(sys.modules)"
    script = f"import sys, attention; attention.hf.names(); assert {heavy}"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("machine, best", [
    (TITAN, "sdpa"), (A100, "flash_attn_2"), (RTX3050, "flash_attn_2"), (RTX4090, "flash_attn_2"),
    (H100, "flash_attn_4"), (B200, "flash_attn_4"), (CPU, "sdpa"), (APPLE, "sdpa"),
], ids=lambda x: getattr(x, "name", ""))
def test_auto_takes_the_latest_flash_attention_that_runs_there(machine, best) -> None:
    spec = FP16 if machine is TITAN else BF16
    chosen = resolve("auto", spec, full(machine), STRICT)
    assert chosen.backend.name == best
    assert not chosen.rejected and runs("auto", spec, machine) == "sdpa"


@pytest.mark.parametrize("machine, change, installed, best", [
    (H100, {}, "flash_attn", "sdpa"), (A100, {}, "flash_attn", "flash_attn_2"),
    (H100, {"window": 64}, "", "sdpa_flash"), (A100, {"segments": True}, "", "sdpa_flash"),
    (A100, {"window": 64}, "flash_attn", "flash_attn_2"), (TITAN, {"window": 64}, "", "sdpa"),
    (B200, {}, "", "sdpa"), (B200, {"segments": True}, "", "sdpa_flash"),
    *((m, {**mask, **how}, "triton", "triton") for m, how in ((H100_2_11, {}), (H100, COMPILED))
      for mask in ({"window": 64}, {"segments": True})),
    (H100_2_11, {"window": 64}, "", "sdpa"), (H100_2_11, {}, "triton", "sdpa"),
])
def test_auto_by_compute_capability_and_mask(machine, change, installed, best) -> None:
    """DESIGN.md: cuDNN by sdpa before FlashAttention-2 from 9.0 on; what skips tiles first."""
    spec = replace(FP16 if machine is TITAN else BF16, **change)
    there = replace(machine, packages={installed: "3.6"} if installed else {})
    assert runs("auto", spec, there, STRICT) == best


@pytest.mark.parametrize("machine, installed, best", [
    (A100, {"flash_attn": "2.8.3", "flash_attn.cute": "4.0.0b26"}, "flash_attn_2"),
    (A100, {"flash_attn.cute": "4.0.0b26"}, "flash_attn_4"),
    (replace(B200, capability=(12, 0)), {"flash_attn.cute": "4.0.0b26"}, "sdpa"),
])
def test_auto_where_4_uses_the_instructions_of_ampere(machine, installed, best) -> None:
    there = replace(machine, packages=installed)
    assert runs("auto", replace(BF16, grad=False), there, STRICT) == best
    assert runs("flash_attn_4", replace(BF16, grad=False), there, STRICT) == "flash_attn_4"


@pytest.mark.parametrize("machine, change, words", [
    (A100, {}, ["to train", "9.0 to 11.0", "8.0", "--inference"]),
    (RTX4090, {}, ["to train", "9.0 to 11.0", "8.9", "--inference"]),
    (A100, {"softcap": 30.0}, ["capability 9.0,", "8.0"]),
    (replace(B200, capability=(13, 0)), {}, ["12.0 to 12.1", "13.0"]),
    (A100, {"head_dim": 512}, ["128", "512"]),
])
def test_a_capability_is_that_of_the_row_nearest_to_the_request(machine, change, words) -> None:
    (first, *_) = reasons = why("flash_attn_4", replace(BF16, **change), full(machine))
    assert all(word in " ".join(reasons) for word in words)
    assert ("--inference" in first) == ("--inference" in words)


@pytest.mark.parametrize("machine, change, runs_", [
    (H100, {}, True), (B200, {}, True), (A100, {}, False), (H100, {"softcap": 9.0}, True),
    (B200, {"softcap": 9.0}, False), (B200, {"softcap": 9.0, "grad": False}, True),
    (H100, {"head_dim": 256}, False), (replace(H100, torch="2.10.0"), {}, False),
])
def test_flex_on_flash_attention_4(machine, change, runs_) -> None:
    spec = replace(BF16, segments=True, window=9, **change)
    assert runs("flex_flash", spec, full(machine)) == ("flex_flash" if runs_ else "flex")
    assert "flash_attn.cute" in " ".join(why("flex_flash", spec, machine))


def test_auto_trains_with_batched_products_where_a_cpu_has_bfloat16_units() -> None:
    there = replace(CPU, bfloat16_units=True)
    assert runs("auto", BF16, there, STRICT) == "sdpa_bmm"
    for other in (FP32, replace(BF16, grad=False), replace(BF16, compiled=True)):
        assert runs("auto", other, there, STRICT) == "sdpa"


@pytest.mark.parametrize("machine, spec, installed, bare", [
    (H100, CAPPED, "flash_attn_4", "flex"),
    (B200, CAPPED, "flash_attn_2", "flex"),
    (B200, SUNK, "flash_attn_4", "flex"),
    (RTX4090, SUNK, "flex", "flex"),
    (H100, replace(SUNK, cache="static", grad=False), "flash_attn_4", "manual"),
    (H100, replace(SUNK, dtype="float64"), "manual", "manual"),
    (CPU, replace(FP32, softcap=50.0), "manual", "manual"),
    (CPU, replace(FP32, sinks=True, grad=False), "manual", "manual"),
    (H100, replace(BF16, lse=True), "flash_attn_4", "sdpa_flash"),
    (H100, replace(FP32, lse=True, window=9), "triton", "tiled"),
    (CPU, replace(FP32, lse=True), "sdpa_flash", "sdpa_flash"),
    (CPU, replace(FP32, lse=True, softcap=9.0), "tiled", "tiled"),
], ids=lambda x: getattr(x, "name", ""))
def test_a_feature_goes_to_the_first_kernel_that_has_it(machine, spec, installed, bare) -> None:
    """Also from a named backend that lacks it: what falls back ends where auto begins."""
    for there, best in ((full(machine), installed), (machine, bare)):
        assert resolve("auto", spec, there, STRICT).backend.name == best
        for name in ("sdpa", "sdpa_cudnn"):
            chosen = resolve(name, spec, there)
            assert chosen.backend.name == best and list(chosen.rejected) == [name]
            assert f"Falling back to '{best}'" in str(chosen)


@pytest.mark.parametrize("torch, change, issue", [  # the pages of pytorch/pytorch give the releases
    ("2.12.1", {"dtype": "bfloat16"}, "195910"), ("2.10.0", {"dtype": "float16"}, "195910"),
    ("2.12.1", {"segments": True}, "184180"), ("2.11.0", {"scale": 0.1}, "184122"),
    ("2.8.0", {}, "163597"), ("2.12.1", {}, None), ("2.13.0", {"dtype": "bfloat16"}, None)])
@pytest.mark.parametrize("name", ["auto", "sdpa", "sdpa_flash", "sdpa_math"])
def test_sdpa_on_apples_metal_has_to_be_allowed_where_it_is_wrong(
    name, torch, change, issue
) -> None:
    spec, there = replace(FP32, **change), replace(APPLE, torch=torch)
    guarded = "sdpa_math" if name == "sdpa_math" else "sdpa"
    if issue:
        chosen = resolve(name, spec, there)
        assert chosen.backend.name == "manual"
        assert issue in str(chosen) and "--allow_mps_sdpa=True" in str(chosen)
        assert runs(name, spec, there, Policy(mps_sdpa=True)) == guarded
    else:
        assert runs(name, spec, there) == guarded


def test_what_failed_is_reported_and_the_search_ends() -> None:
    failed: dict[str, tuple[str, ...]] = {}
    with pytest.raises(BackendUnavailable, match="manual: broken"):
        for _ in range(2 * len(BACKENDS)):
            chosen = resolve("auto", CAPPED, full(H100), failed=failed)
            assert list(chosen.rejected) == list(failed)
            failed[chosen.backend.name] = ("broken",)
    assert next(iter(failed)) == "flash_attn_4" and [*failed][-2:] == ["manual", "tiled"]


@given(
    name=st.sampled_from(["auto", *BACKENDS]),
    machine=st.sampled_from([TITAN, A100, H100, B200, APPLE, CPU, OLD]),
    installed=st.booleans(),
    dtype=st.sampled_from(["float16", "bfloat16", "float32", "float64"]),
    cache=st.sampled_from(["none", "dynamic", "static", "paged"]),
    flags=st.fixed_dictionaries(dict.fromkeys(("segments", "sinks", "lse", "grad"), st.booleans())),
    softcap=st.sampled_from([None, 30.0]), window=st.sampled_from([None, 9]),
    dropout=st.sampled_from([0.0, 0.1]), head_dim=st.sampled_from([20, 64, 320]),
)
def test_what_is_chosen_can_run_and_what_is_refused_cannot(
    name, machine, installed, dtype, cache, flags, softcap, window, dropout, head_dim
) -> None:
    spec = Spec(4, 4, head_dim, dtype, window, dropout, cache=cache, softcap=softcap, **flags,
                page_size=256 if cache == "paged" else None)
    there = full(machine) if installed else machine
    able = {n for n, b in BACKENDS.items() if not b.why_not(spec, there)}
    try:
        chosen = resolve(name, spec, there)
    except BackendUnavailable as e:
        assert not able & {"manual", "tiled", "paged"} and f"{name!r}" in str(e)
        return
    assert chosen.backend.name in able
    assert (chosen.backend.name == name) == (name in able) or name == "auto"
    assert all(n == name for n in chosen.rejected)


SETUPS: list[tuple[dict[str, Any], dict[str, Any], Spec]] = [  # caps that can, that cannot
    ({"devices": ("cuda",)}, {"devices": ("cpu", "mps")}, ANY),
    ({}, {"dtypes": ("float16",)}, ANY),
    ({"min_capability": (9, 0)}, {"min_capability": (10, 0)}, ANY),
    ({"min_capability": (8, 0), "max_capability": (9, 0)},
     {"min_capability": (8, 0), "max_capability": (8, 9)}, ANY),
    ({"min_torch": "2.13"}, {"min_torch": "2.14"}, ANY),
    ({"scale": True}, {}, replace(ANY, scale=0.3)),
    ({"softcap": True}, {}, replace(ANY, softcap=50.0)),
    ({"sinks": True}, {}, replace(ANY, sinks=True)),
    ({"lse": True}, {}, replace(ANY, lse=True)),
    ({"lse": True}, {"lse": True, "lse_segments": False}, replace(ANY, lse=True, segments=True)),
    ({"head_dim_max": 64}, {"head_dim_max": 63}, ANY),
    ({"head_dim_multiple": 32}, {"head_dim_multiple": 24}, ANY),
    ({}, {"window": False}, replace(ANY, window=4)),
    ({}, {"dropout": False}, replace(ANY, dropout=0.5)),
    ({"dropout_step": 0.25}, {"dropout_step": 0.2}, replace(ANY, dropout=0.75)),
    ({}, {"segments": False}, replace(ANY, segments=True)),
    ({}, {"grad": False}, ANY),
    ({}, {"deterministic": False}, ANY),  # on that machine
    ({"caches": ("none", "static")}, {"caches": ("dynamic",)}, replace(ANY, cache="static")),
    ({"caches": ("paged",), "page_multiple": 16}, {"caches": ("paged",), "page_multiple": 256},
     replace(ANY, cache="paged", page_size=128)),
    ({}, {"interpreted": True}, ANY),
    ({"packages": ("there>=1.0",)}, {"packages": ("gone",)}, ANY),
    ({"packages": ("there>=1.0",)}, {"packages": ("there>=1.1",)}, ANY),
    ({"packages": ("there",)}, {"packages": ("broken",)}, ANY),
]


@pytest.mark.parametrize("can, cannot, spec", SETUPS)
def test_each_field_of_caps_decides(can, cannot, spec) -> None:
    machine = replace(
        H100, packages={"there": "1.0", "broken": "ImportError: x"}, deterministic=True
    )
    assert made_up(Caps(**can)).why_not(spec, machine) == []
    assert len(made_up(Caps(**cannot)).why_not(spec, machine)) == 1


@pytest.mark.parametrize("changes, got", [
    ({"n_head": 0}, "got 0"), ({"n_kv_head": 5}, "n_kv_head=5"), ({"n_kv_head": 24}, "24"),
    ({"head_dim": 0}, "got 0"), ({"dtype": "bf16"}, "'bf16'"), ({"window": 0}, "got 0"),
    ({"dropout": 1.0}, "got 1.0"), ({"dropout": -0.1}, "got -0.1"), ({"scale": 0.0}, "got 0.0"),
    ({"dropout": float("nan")}, "got nan"), ({"softcap": -1.0}, "got -1.0"),
    ({"cache": "paged"}, "None"), ({"page_size": 16}, "16"), ({"cache": "ring"}, "'ring'"),
    ({"n_head": 4.0}, "4.0"), ({"head_dim": 8.5}, "8.5"), ({"n_kv_head": True}, "True"),
    ({"window": 2.5}, "2.5"), ({"window": float("nan")}, "nan"), ({"right": 1.0}, "1.0"),
    ({"right": "1"}, "'1'"), ({"scale": True}, "True"), ({"scale": "1"}, "'1'"),
    ({"softcap": float("inf")}, "inf"), ({"dropout": True}, "True"), ({"dropout": "0"}, "'0'"),
    ({"page_size": 2.0, "cache": "paged"}, "2.0"),
])
def test_a_spec_out_of_range_is_an_error(changes, got) -> None:
    with pytest.raises(ValueError, match=re.escape(got)):
        replace(BF16, **changes)


@pytest.mark.parametrize("changes", [
    {"dtypes": "float32"}, {"dtypes": ("float8",)}, {"devices": "cpu"}, {"caches": ("ring",)}])
def test_caps_that_mean_nothing_are_an_error(changes) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Caps(**changes)


@pytest.mark.parametrize("changes", [
    {"name": ""}, {"name": 3}, {"name": "a\nb"}, {"attend": None}, {"caps": Caps()}, {"caps": ()}])
def test_a_backend_that_means_nothing_is_an_error(changes) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        replace(BACKENDS["manual"], **changes)


def test_numbers_in_the_words_of_a_spec_are_whole() -> None:
    words = str(replace(BF16, window=1048577, right=2000001, softcap=30.0, scale=0.25))
    assert "window 1048577, right 2000001, scale 0.25, softcap 30," in words


def test_a_device_without_kernels_is_refused() -> None:
    with pytest.raises(BackendUnavailable, match="xpu"):
        resolve("auto", BF16, Machine("xpu", "an Intel GPU", None, "2.13.0"))


def test_a_large_math_kernel_is_warned_about() -> None:
    """Scores and softmax of 8 query heads, 8192 x 8192 each, in float32: 4.3 GB."""
    note = math_note(BACKENDS["sdpa"], Spec(8, 2, 64, "bfloat16"), (1, 8192))
    assert "4.3 GB" in note
    assert math_note(BACKENDS["sdpa"], Spec(8, 2, 64, "bfloat16"), (1, 2048)) == ""


@pytest.mark.parametrize(
    "machine, runs", [(A100, True), (RTX3050, False), (RTX4090, False), (H100, True), (B200, True)]
)
def test_flash_attn_2_with_dropout_and_wide_heads_needs_shared_memory(machine, runs) -> None:
    """144 KB a block in the backward pass (flash_bwd_launch_template.h of flash-attn 2.8.3)."""
    machine = replace(machine, packages={"flash_attn": "2.8.3"})
    spec = Spec(8, 8, 256, "bfloat16", dropout=0.1)
    assert (not get("flash_attn_2").why_not(spec, machine)) == runs
