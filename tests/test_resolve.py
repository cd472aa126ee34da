"""Which backend runs, and why not another: decided on machines that exist only here."""

from __future__ import annotations

import copy
import json
import platform
import subprocess
import sys
import textwrap
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

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
    system,
)
from attention.select import MPS_GUARD, math_note
from attention.spec import version

ROOT = Path(__file__).parent.parent
STRICT = Policy(fallback=False)

TITAN = Machine("cuda", "NVIDIA TITAN RTX", (7, 5), "2.13.0", "12.8")
RTX4090 = Machine("cuda", "NVIDIA GeForce RTX 4090", (8, 9), "2.13.0", "12.8")
H100 = Machine("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "2.13.0", "12.8")
B200 = Machine("cuda", "NVIDIA B200", (10, 0), "2.13.0", "12.8")
APPLE = Machine("mps", "Apple M3", None, "2.13.0")
CPU = Machine("cpu", "AMD EPYC", None, "2.13.0+cpu")
OLD = Machine("cpu", "Intel Xeon", None, "1.13.1")

BF16 = Spec(12, 12, 64, "bfloat16")
FP16 = replace(BF16, dtype="float16")
FP32 = replace(BF16, dtype="float32")


def runs(name: str, spec: Spec, machine: Machine, policy: Policy = Policy()) -> str:
    return resolve(name, spec, machine, policy).backend.name


def why(name: str, spec: Spec, machine: Machine) -> list[str]:
    return get(name).why_not(spec, machine)


# --- machines ---


def test_titan_rtx() -> None:
    assert why("sdpa_flash", FP16, TITAN) == [
        "it needs compute capability >= 8.0, NVIDIA TITAN RTX has 7.5"
    ]
    assert why("sdpa_efficient", FP16, TITAN) == why("sdpa_efficient", FP32, TITAN) == []
    assert why("sdpa_efficient", BF16, TITAN) == [
        "it takes float16, not bfloat16 (--dtype=float16)"
    ]
    assert why("sdpa_cudnn", FP16, TITAN) != []
    assert runs("sdpa_flash", FP16, TITAN) == "sdpa"
    assert runs("auto", FP16, TITAN) == "sdpa"


@pytest.mark.parametrize("machine", [RTX4090, H100, B200], ids=lambda m: m.name)
def test_later_gpus_run_every_sdpa_kernel_in_half_precision(machine) -> None:
    for name in (
        "auto",
        "sdpa",
        "sdpa_flash",
        "sdpa_efficient",
        "sdpa_cudnn",
        "sdpa_math",
        "tiled",
        "manual",
    ):
        for spec in (BF16, FP16, replace(BF16, n_kv_head=3)):
            assert runs(name, spec, machine, STRICT) == ("sdpa" if name == "auto" else name)


@pytest.mark.parametrize("name", ["auto", "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient",
                                  "sdpa_math"])  # fmt: skip
def test_the_guard_on_apples_metal(name) -> None:
    chosen = resolve(name, FP32, APPLE)
    assert chosen.backend.name == "manual"
    assert MPS_GUARD in chosen.rejected["sdpa_math" if name == "sdpa_math" else "sdpa"]
    warning = chosen.warnings()[-1]
    assert "NaN" in warning and "--allow_mps_sdpa=True" in warning
    assert warning.endswith("Falling back to 'manual'.")
    lifted = resolve(name, FP32, APPLE, Policy(mps_sdpa=True))
    assert lifted.backend.name == ("sdpa_math" if name == "sdpa_math" else "sdpa")


def test_a_strict_auto_on_apples_metal_is_no_error() -> None:
    """auto names no kernel, so it may go on; a named one may not."""
    assert runs("auto", FP32, APPLE, STRICT) == "manual"
    with pytest.raises(BackendUnavailable, match="Apple's Metal"):
        resolve("sdpa", FP32, APPLE, STRICT)
    assert runs("sdpa", FP32, APPLE, replace(STRICT, mps_sdpa=True)) == "sdpa"


def test_cpu() -> None:
    assert resolve("auto", FP32, CPU).rejected == {}
    assert runs("auto", FP32, CPU) == "sdpa"
    assert runs("sdpa_flash", FP32, CPU) == "sdpa_flash"
    assert runs("sdpa_flash", replace(FP32, dropout=0.1), CPU) == "sdpa"
    assert why("sdpa_cudnn", BF16, CPU) == ["it runs on cuda, not on cpu"]
    assert runs("sdpa_efficient", FP32, CPU) == "sdpa"


def test_auto_trains_with_batched_products_where_a_cpu_has_matrix_units() -> None:
    there, half = replace(CPU, matrix_units=True), replace(FP32, dtype="bfloat16")
    assert runs("auto", half, there, STRICT) == "sdpa_bmm" and runs("auto", half, CPU) == "sdpa"
    for other in (FP32, replace(half, grad=False), replace(half, compiled=True),
                  replace(half, segments=True), replace(half, dropout=0.1)):  # fmt: skip
        assert runs("auto", other, there, STRICT) == "sdpa"
        assert resolve("auto", other, there).rejected == {}


def test_torch_before_sdpa() -> None:
    assert runs("auto", FP32, OLD) == "manual"
    assert list(resolve("sdpa_flash", FP32, OLD).rejected) == ["sdpa_flash", "sdpa"]


# --- with every package installed ---


def full(machine: Machine, **changes: Any) -> Machine:
    return replace(machine, packages=dict.fromkeys(packages(), "99.0"), **changes)


RTX3050 = Machine("cuda", "NVIDIA GeForce RTX 3050", (8, 6), "2.13.0", "12.8")
A100 = Machine("cuda", "NVIDIA A100-SXM4-80GB", (8, 0), "2.13.0", "12.8")
FLASH = ("flash_attn_2", "flash_attn_3", "flash_attn_4")


@pytest.mark.parametrize("machine, run, auto", [
    (TITAN, (), "sdpa"),
    (A100, ("flash_attn_2",), "flash_attn_2"),
    (RTX3050, ("flash_attn_2",), "flash_attn_2"),
    (RTX4090, ("flash_attn_2",), "flash_attn_2"),
    (H100, FLASH, "flash_attn_4"),
    (B200, ("flash_attn_2", "flash_attn_4"), "flash_attn_4"),
], ids=lambda x: getattr(x, "name", ""))  # fmt: skip
def test_which_flash_attention_runs_where(machine, run, auto) -> None:
    spec = FP16 if machine is TITAN else BF16
    for name in FLASH:
        reasons = why(name, spec, full(machine))
        if name in run:
            assert reasons == []
            assert runs(name, spec, full(machine), STRICT) == name
        else:
            assert len(reasons) == 1 and "compute capability" in reasons[0], reasons
            assert reasons[0].endswith("{} has {}.{}".format(machine.name, *machine.capability))
    assert runs("auto", spec, full(machine), STRICT) == auto
    assert resolve("auto", spec, full(machine)).rejected == {}
    assert runs("auto", spec, machine) == "sdpa"  # nothing installed


SUNK = replace(BF16, sinks=True)
CAPPED = replace(BF16, softcap=50.0)


@pytest.mark.parametrize("machine, spec, installed, bare", [
    (H100, CAPPED, "flash_attn_4", "flex"),
    (H100, SUNK, "flash_attn_4", "flex"),
    (B200, CAPPED, "flash_attn_2", "flex"),
    (B200, SUNK, "flash_attn_4", "flex"),
    (RTX4090, CAPPED, "flash_attn_2", "flex"),
    (RTX4090, SUNK, "flex", "flex"),
    (TITAN, replace(SUNK, dtype="float16"), "flex", "flex"),
    (H100, replace(SUNK, cache="static", grad=False), "flash_attn_4", "manual"),
    (H100, replace(SUNK, dtype="float64"), "manual", "manual"),
    (CPU, replace(FP32, softcap=50.0), "manual", "manual"),
    (CPU, replace(FP32, sinks=True, grad=False), "manual", "manual"),
    (APPLE, replace(FP32, softcap=50.0, grad=False), "manual", "manual"),
], ids=lambda x: getattr(x, "name", ""))  # fmt: skip
def test_who_computes_a_softcap_or_sinks(machine, spec, installed, bare) -> None:
    """SDPA does not: a FlashAttention that does, else on CUDA flex, and manual elsewhere."""
    for there, best in ((full(machine), installed), (machine, bare)):
        chosen = resolve("auto", spec, there, STRICT)
        assert chosen.backend.name == best and chosen.rejected == {}
    for name in ("sdpa", "sdpa_flash", "sdpa_cudnn"):
        chosen = resolve(name, spec, machine)
        assert chosen.backend.name == bare
        asked = "it does not cap scores" if spec.softcap else "it has no attention sinks"
        assert asked in chosen.rejected["sdpa"]


def test_where_one_that_has_a_softcap_fails_it_goes_on_and_ends() -> None:
    """flex falls back to sdpa, and sdpa, without a softcap, to flex: not for ever."""
    failed: dict[str, tuple[str, ...]] = {}
    tried = []
    while True:
        try:
            chosen = resolve("auto", CAPPED, full(H100), failed=failed)
        except BackendUnavailable as e:
            assert "manual: broken" in str(e)
            break
        tried.append(chosen.backend.name)
        failed[chosen.backend.name] = ("broken",)
    assert [n for n in tried if n != "triton"] == [
        "flash_attn_4", "flash_attn_3", "flash_attn_2", "flex", "manual"]  # fmt: skip


def test_a_scale_is_for_sdpa_too() -> None:
    asked = replace(BF16, scale=0.2)
    for name in ("sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "flex", *FLASH):
        assert runs(name, asked, full(H100), STRICT) == name
    assert runs("auto", asked, H100) == runs("auto", replace(FP32, scale=0.2), CPU) == "sdpa"
    half = replace(FP32, dtype="bfloat16", scale=0.2)
    assert runs("auto", half, replace(CPU, matrix_units=True)) == "sdpa_bmm"


def test_titan_rtx_takes_half_precision_as_fp16() -> None:
    there = full(TITAN)
    assert runs("flash_attn_2", FP16, there) == "sdpa"
    assert runs("triton", FP16, there, STRICT) == "triton"
    assert "not bfloat16" in " ".join(why("triton", BF16, there))
    assert runs("flex", FP16, there, STRICT) == "flex"
    assert runs("sdpa", FP16, there, STRICT) == "sdpa"


def test_what_the_later_generations_do_not_have() -> None:
    there = full(H100)
    assert why("flash_attn_3", replace(BF16, dropout=0.1), there) == [
        "it has no dropout, and 0.1 is asked (--dropout=0)"]  # fmt: skip
    assert runs("flash_attn_3", replace(BF16, dropout=0.1), there) == "flash_attn_2"
    assert runs("flash_attn_4", replace(BF16, dropout=0.1), there) == "flash_attn_2"
    assert runs("auto", replace(BF16, dropout=0.1), there) == "flash_attn_2"
    for name in FLASH:
        assert "it takes float16 and bfloat16, not float32" in why(name, FP32, there)[0]
        assert "head_dim up to" in why(name, replace(BF16, head_dim=320), there)[0]
        assert runs(name, FP32, there) == runs(name, replace(BF16, head_dim=320), there) == "sdpa"
    assert runs("auto", FP32, there) == "sdpa"
    assert runs("triton", replace(BF16, head_dim=320), there) == "sdpa"


@pytest.mark.parametrize("name", [*FLASH, "triton", "sdpa_cudnn", "sdpa_efficient"])
def test_on_apples_metal_every_cuda_kernel_ends_at_manual(name) -> None:
    assert runs(name, FP32, full(APPLE)) == "manual"
    assert MPS_GUARD in resolve(name, FP32, full(APPLE)).rejected["sdpa"]
    assert runs(name, FP32, full(APPLE), Policy(mps_sdpa=True)) == "sdpa"


def test_versions_of_torch() -> None:
    old = full(H100, torch="2.4.1")
    assert "it needs torch >= 2.5, this is 2.4.1" in why("flex", BF16, old)
    assert runs("flex", BF16, old) == "sdpa"
    assert runs("auto", FP32, full(OLD)) == runs("flex", FP32, full(OLD)) == "manual"


SDPA = {"sdpa": "2.1", "sdpa_flash": "2.3", "sdpa_math": "2.3"}
CUDA = SDPA | {"sdpa_efficient": "2.3", "sdpa_cudnn": "2.5", "flex": "2.5", "triton": "2.5"}


@pytest.mark.parametrize("machine, spec, least", [
    (H100, BF16, CUDA), (H100, FP32, CUDA), (TITAN, FP16, CUDA), (TITAN, FP32, CUDA),
    (H100, SUNK, CUDA | {"flex": "2.9"}),
    (TITAN, replace(SUNK, dtype="float16"), CUDA | {"flex": "2.9"}),
    (CPU, FP16, SDPA | {"flex": "2.6", "triton": "2.5", "sdpa_bmm": "2.3"}),
    (CPU, BF16, SDPA | {"flex": "2.6", "triton": "2.5", "sdpa_bmm": "2.3"}),
    (APPLE, FP16, {"sdpa": "2.1", "sdpa_math": "2.3", "flex": "2.13"}),
], ids=lambda x: getattr(x, "name", ""))  # fmt: skip
def test_the_least_torch_of_each_kernel(machine, spec, least) -> None:
    """Of those that PyTorch brings, the release that brought them there."""
    old = replace(full(machine, torch="1.13"), interpreted=machine is CPU)
    refused = {name: [r for r in b.why_not(spec, old) if r.kind == "torch"]
               for name, b in BACKENDS.items()}  # fmt: skip
    assert {n: str(r[0]) for n, r in refused.items() if r} == {
        name: f"it needs torch >= {release}, this is 1.13" for name, release in least.items()
    }


def test_a_package_that_does_not_import_is_refused_in_its_own_words() -> None:
    text = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa"
    there = replace(A100, packages={"flash_attn": text})
    assert any(text in reason for reason in why("flash_attn_2", BF16, there))
    assert runs("flash_attn_2", BF16, there) == runs("auto", BF16, there) == "sdpa"


def test_paged_needs_its_cache_and_a_cache_needs_one_that_reads_it() -> None:
    asked = replace(BF16, cache="paged", page_size=16, grad=False)
    for machine in (CPU, APPLE, TITAN, H100):
        assert runs("paged", asked, full(machine), STRICT) == "paged"
        assert not resolve("auto", asked, full(machine)).rejected  # nothing else is tried first
    assert runs("paged", BF16, full(H100)) == "sdpa"  # training
    assert runs("paged_attention", FP32, full(CPU)) == "sdpa"


def test_deterministic_is_honoured_or_refused() -> None:
    """By PyTorch's switch, torch.use_deterministic_algorithms(True), which a Machine knows."""
    told = replace(full(H100), deterministic=True)
    for name in ("triton", "flash_attn_2", "flash_attn_3", "manual", "sdpa", "sdpa_flash",
                 "sdpa_efficient", "sdpa_math"):  # fmt: skip
        assert runs(name, BF16, told, STRICT) == name
    assert why("sdpa_cudnn", BF16, told) == [
        "its backward pass adds up in no fixed order (--deterministic=False)"
    ]
    assert runs("sdpa_cudnn", BF16, told) == "sdpa"
    assert why("sdpa_cudnn", BF16, full(H100)) == []
    assert why("sdpa_cudnn", replace(BF16, grad=False), told) == []  # a forward pass has one order


# --- one limit each ---


def test_dtype() -> None:
    assert why("sdpa_flash", FP32, H100) == [
        "it takes float16 and bfloat16, not float32 (--dtype=bfloat16)"
    ]
    assert runs("sdpa_flash", FP32, H100) == "sdpa"
    assert why("sdpa_efficient", replace(FP32, dtype="float64"), H100) != []
    assert why("sdpa_math", replace(FP32, dtype="float64"), H100) == []


def test_dropout() -> None:
    assert why("sdpa_cudnn", replace(BF16, dropout=0.1), H100) == [
        "dropout must be a multiple of 0.0625, not 0.1"
    ]
    assert why("sdpa_cudnn", replace(BF16, dropout=0.125), H100) == []
    assert why("sdpa_flash", replace(BF16, dropout=0.1), H100) == []
    assert why("sdpa_flash", replace(BF16, dropout=0.1), CPU) == [
        "it has no dropout, and 0.1 is asked (--dropout=0)"
    ]


def test_head_dim() -> None:
    wide = replace(BF16, head_dim=320)
    assert why("sdpa_flash", wide, H100) == ["it takes a head_dim up to 256, not 320"]
    assert why("sdpa_cudnn", wide, H100) == ["it takes a head_dim up to 128, not 320"]
    assert why("sdpa_efficient", replace(BF16, head_dim=20), H100) == [
        "head_dim must be a multiple of 8, not 20"
    ]
    assert why("sdpa_efficient", replace(FP32, head_dim=20), H100) == []
    assert why("sdpa_efficient", replace(FP32, head_dim=18), H100) == [
        "head_dim must be a multiple of 4, not 18"
    ]
    assert why("sdpa_efficient", wide, H100) == why("sdpa", wide, H100) == []


def test_masks() -> None:
    asked = replace(BF16, window=128, segments=True)
    assert why("sdpa_flash", asked, H100) == [
        "it has no sliding window", "it has no segments (packed or padded sequences)"]  # fmt: skip
    assert why("sdpa_flash", asked, CPU) == why("sdpa_efficient", asked, H100) == []


@pytest.mark.parametrize("name", ["manual", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn",
                                  "sdpa_math"])  # fmt: skip
def test_a_cache_that_nobody_has_is_an_error_that_lists_all(name) -> None:
    """Even with fallback: after manual, and paged for its own cache, nothing is left to try."""
    asked = replace(BF16, cache="paged", page_size=16, grad=False)
    assert runs(name, asked, H100) == "paged"
    with pytest.raises(BackendUnavailable) as e:
        resolve(name, replace(asked, segments=True), H100)
    for n in (name, "manual") if name == "manual" else (name, "sdpa", "manual"):
        assert f"{n}: it has no 'paged' cache" in str(e.value).replace(
            "it has no segments (packed or padded sequences); ", ""
        )
    assert "paged: it has no segments" in str(e.value)


def test_all_reasons_are_listed_at_once() -> None:
    asked = Spec(4, 4, 320, "float32", window=9, segments=True, cache="paged", page_size=16)
    with pytest.raises(BackendUnavailable) as e:
        resolve("sdpa_flash", asked, TITAN, STRICT)
    assert str(e.value) == (
        "attention backend 'sdpa_flash' cannot run here. sdpa_flash: it needs compute capability "
        ">= 8.0, NVIDIA TITAN RTX has 7.5; it takes float16 and bfloat16, not float32 "
        "(--dtype=bfloat16); it takes a head_dim up to 256, not 320; it has no sliding window; it "
        "has no segments (packed or padded sequences); it has no 'paged' cache"
    )


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


def test_every_backend_leads_to_manual() -> None:
    for backend in BACKENDS.values():
        seen = []
        while backend.fallback:
            assert backend.name not in seen, "a circle"
            seen.append(backend.name)
            backend = get(backend.fallback)
        assert backend.name == "manual"


# --- caps, field by field ---

ANY = Spec(4, 4, 64, "float32")
SETUPS: dict[str, tuple[dict[str, Any], dict[str, Any], Spec, str]] = {
    # field: (caps that can, caps that cannot, what is asked, words of the reason)
    "devices": ({"devices": ("cuda",)}, {"devices": ("cpu", "mps")}, ANY, "mps, not on cuda"),
    "dtypes": ({}, {"dtypes": ("float16",)}, ANY, "float16, not float32 (--dtype=float16)"),
    "min_capability": (
        {"min_capability": (9, 0)}, {"min_capability": (10, 0)}, ANY,
        ">= 10.0, NVIDIA H100 80GB HBM3 has 9.0"),
    "max_capability": (
        {"min_capability": (8, 0), "max_capability": (9, 0)},
        {"min_capability": (8, 0), "max_capability": (8, 9)}, ANY,
        "8.0 to 8.9, NVIDIA H100 80GB HBM3 has 9.0"),
    "min_torch": ({"min_torch": "2.13"}, {"min_torch": "2.14"}, ANY, ">= 2.14, this is 2.13.0"),
    "scale": ({"scale": True}, {}, replace(ANY, scale=0.3), "not by 0.3"),
    "softcap": ({"softcap": True}, {}, replace(ANY, softcap=50.0), "it does not cap scores"),
    "sinks": ({"sinks": True}, {}, replace(ANY, sinks=True), "it has no attention sinks"),
    "lse": ({"lse": True}, {}, replace(ANY, lse=True), "it does not return the log-sum-exp"),
    "lse_segments": (
        {"lse": True}, {"lse": True, "lse_segments": False},
        replace(ANY, lse=True, segments=True), "over a sequence in parts it has no segments"),
    "head_dim_max": ({"head_dim_max": 64}, {"head_dim_max": 63}, ANY, "up to 63, not 64"),
    "head_dim_multiple": (
        {"head_dim_multiple": 32}, {"head_dim_multiple": 24}, ANY, "a multiple of 24, not 64"),
    "window": ({}, {"window": False}, replace(ANY, window=4), "no sliding window"),
    "dropout": ({}, {"dropout": False}, replace(ANY, dropout=0.5), "no dropout, and 0.5 is asked"),
    "dropout_step": (
        {"dropout_step": 0.25}, {"dropout_step": 0.2}, replace(ANY, dropout=0.75),
        "a multiple of 0.2, not 0.75"),
    "segments": ({}, {"segments": False}, replace(ANY, segments=True), "no segments"),
    "grad": ({}, {"grad": False}, ANY, "no backward pass"),
    "caches": (
        {"caches": ("none", "static")}, {"caches": ("dynamic",)}, replace(ANY, cache="static"),
        "no 'static' cache"),
    "deterministic": ({}, {"deterministic": False}, ANY, "no fixed order"),  # on that machine
    "page_multiple": (
        {"caches": ("paged",), "page_multiple": 16}, {"caches": ("paged",), "page_multiple": 256},
        replace(ANY, cache="paged", page_size=128), "a multiple of 256, not 128"),
    "hub_kernels": ({}, {"hub_kernels": True}, ANY, "(--attention_hub_kernels=True)"),
    "interpreted": ({}, {"interpreted": True}, ANY, "(TRITON_INTERPRET=1)"),
    "packages": (
        {"packages": ("there>=1.0",)}, {"packages": ("gone",)}, ANY, "'gone' is not installed"),
}  # fmt: skip


def test_every_field_of_caps_is_in_the_table() -> None:
    assert set(SETUPS) == {f.name for f in fields(Caps)}


@pytest.mark.parametrize("field", SETUPS)
def test_each_field_of_caps_decides(field) -> None:
    can, cannot, spec, words = SETUPS[field]
    machine = replace(H100, packages={"there": "1.0"}, deterministic=True)
    assert made_up(Caps(**can)).why_not(spec, machine) == []
    reasons = made_up(Caps(**cannot)).why_not(spec, machine)
    assert len(reasons) == 1 and words in reasons[0]


@pytest.mark.parametrize("caps, spec", [
    ({"window": False}, ANY), ({"dropout": False}, ANY), ({"dropout_step": 0.3}, ANY),
    ({"segments": False}, ANY), ({"grad": False}, replace(ANY, grad=False)),
    ({"deterministic": False}, ANY)])  # fmt: skip
def test_what_is_not_asked_is_not_refused(caps, spec) -> None:
    assert made_up(Caps(**caps)).why_not(spec, H100) == []


def test_a_refusal_is_its_text_and_has_a_kind() -> None:
    (refusal,) = made_up(Caps(("cuda",), min_capability=(10, 0))).why_not(ANY, H100)
    assert refusal == f"{refusal}" == "it needs compute capability >= 10.0, " + (
        "NVIDIA H100 80GB HBM3 has 9.0")  # fmt: skip
    assert refusal.kind == "capability" and copy.deepcopy(refusal).kind == "capability"
    assert json.dumps([refusal]) == json.dumps([str(refusal)])


def test_of_two_rows_as_near_the_one_speaks_that_can_be_mended() -> None:
    """Another dtype rather than another GPU, in whichever order they stand."""
    rows = Caps(min_capability=(10, 0)), Caps(dtypes=("bfloat16",))
    for order in (rows, rows[::-1]):
        (refusal,) = made_up(*order).why_not(ANY, H100)
        assert refusal.kind == "dtype"


def made_up(*caps: Caps, **changes: Any) -> Backend:
    return Backend("made_up", "made up", lambda *a, **k: None, caps, fallback="sdpa", **changes)


def test_of_several_rows_the_nearest_speaks() -> None:
    rows = (
        Caps(("cuda",), ("float16",), window=False, segments=False),
        Caps(("cuda",), head_dim_max=32),
        Caps(("cpu",)),
    )
    asked = replace(ANY, window=4, segments=True)
    assert made_up(*rows).why_not(asked, H100) == ["it takes a head_dim up to 32, not 64"]
    assert made_up(*rows).why_not(asked, CPU) == []
    assert made_up(*rows).why_not(asked, APPLE) == ["it runs on cuda and cpu, not on mps"]


def test_a_machine_without_cuda_has_no_capability() -> None:
    assert made_up(Caps(min_capability=(8, 0))).why_not(ANY, CPU) == [
        "it needs compute capability >= 8.0, AMD EPYC has none"
    ]


# --- packages, and the lines that a user sees ---

INSTALL = "pip install flash-attn --no-build-isolation"
BROKEN = "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN3c104impl"


def flash() -> Backend:
    caps = Caps(("cuda",), ("float16", "bfloat16"), (8, 0), packages=("flash_attn",))
    return Backend("flash_attn_2", "flash-attn 2", lambda *a, **k: None, (caps,), "sdpa",
                   ("flash_attention_2",), INSTALL)  # fmt: skip


@pytest.fixture
def with_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    names = sys.modules["attention.select"]._BY_ANY_NAME  # attention.select is the function
    for name in ("flash_attn_2", "flash_attention_2"):
        monkeypatch.setitem(names, name, flash())


def test_package_not_installed(with_flash) -> None:
    chosen = replace(resolve("flash_attn_2", BF16, H100), kernels=("flash",))
    assert str(chosen) == textwrap.dedent("""\
        WARNING: flash_attn_2 requested but package 'flash_attn' is not installed (pip install flash-attn --no-build-isolation).
                 Falling back to 'sdpa'.
        INFO: Attention backend: sdpa (PyTorch scaled_dot_product_attention; kernel: flash)""")  # noqa: E501
    assert str(resolve("flash_attention_2", BF16, H100)).startswith("WARNING: flash_attn_2 req")


def test_package_that_does_not_import(with_flash) -> None:
    machine = replace(H100, packages={"flash_attn": BROKEN})
    assert flash().why_not(BF16, machine) == [
        f"package 'flash_attn' is installed but does not import ({BROKEN}) ({INSTALL})"
    ]
    with pytest.raises(BackendUnavailable, match="undefined symbol"):
        resolve("flash_attn_2", BF16, machine, STRICT)


@pytest.mark.parametrize("version", ["2.8.3", "2.8.3.post1", "unknown version"])
def test_package_that_imports(with_flash, version) -> None:
    machine = replace(H100, packages={"flash_attn": version})
    assert runs("flash_attn_2", BF16, machine) == "flash_attn_2"
    assert str(resolve("flash_attn_2", BF16, machine)) == (
        "INFO: Attention backend: flash_attn_2 (flash-attn 2)"
    )


def test_every_refused_name_is_one_warning(with_flash) -> None:
    """All reasons of a name stand in its warning; what is known to fail counts like the rest."""
    chosen = resolve("flash_attn_2", FP32, APPLE, failed={"sdpa": ("it crashed",)})
    assert str(chosen) == textwrap.dedent(f"""\
        WARNING: flash_attn_2 requested but it runs on cuda, not on mps.
                 Falling back to 'sdpa'.
        WARNING: sdpa refused: it crashed; {MPS_GUARD}.
                 Falling back to 'manual'.
        INFO: Attention backend: manual (softmax(QK^T)V written out, O(S^2) memory)""")
    assert str(resolve("auto", FP32, APPLE)).startswith("WARNING: sdpa refused: on Apple's Metal")
    with pytest.raises(BackendUnavailable, match="manual: broken"):
        resolve("manual", FP32, CPU, failed={"manual": ("broken",)})


def test_a_beta_comes_before_its_release_and_after_earlier_betas() -> None:
    ordered = ["3.9", "4.0.0b9", "4.0.0.beta13", "4.0.0b26", "4.0.0", "4.0.1b1", "4.0.1"]
    assert sorted(ordered[::-1], key=version) == ordered
    assert version("2.13.0+cpu") == (2, 13, 0) and version("2.13.0a0+git") == (2, 13, 0)
    assert version("4.0.0b13") > version("4.0") and version("ImportError: 4.0") == ()


# --- Spec and Machine ---


@pytest.mark.parametrize("changes, words", [
    ({"n_head": 0}, "n_head must be a positive multiple of n_kv_head, got n_head=0, n_kv_head=12"),
    ({"n_head": 12, "n_kv_head": 5}, "got n_head=12, n_kv_head=5"),
    ({"n_kv_head": 0}, "n_kv_head=0"), ({"n_kv_head": 24}, "n_kv_head=24"),
    ({"head_dim": 0}, "head_dim must be at least 1, got 0"),
    ({"dtype": "bf16"}, "dtype must be one of float16, bfloat16, float32, float64, got 'bf16'"),
    ({"window": 0}, "window must be at least 1, got 0"),
    ({"dropout": 1.0}, "dropout must be in [0, 1), got 1.0"),
    ({"dropout": -0.1}, "got -0.1"), ({"dropout": float("nan")}, "got nan"),
    ({"cache": "paged"}, "page_size belongs to the 'paged' cache, got page_size=None and"),
    ({"page_size": 16}, "got page_size=16 and cache='none'"),
    ({"cache": "paged", "page_size": 0}, "page_size must be at least 1, got 0"),
    ({"cache": "ring"}, "cache must be one of none, dynamic, static, paged, got 'ri")])  # fmt: skip
def test_a_spec_that_nobody_could_honour_is_an_error(changes, words) -> None:
    with pytest.raises(ValueError) as e:
        replace(BF16, **changes)
    assert words in str(e.value)


def test_this_machine() -> None:
    here = Machine.here("cpu", ["numpy", "no_such_package_anywhere", "no_such_parent.child"])
    assert here.device == "cpu" and here.name and here.capability is None
    assert here.torch == sys.modules["torch"].__version__
    assert here.packages == {"numpy": sys.modules["numpy"].__version__}


@pytest.mark.parametrize("mode, found", [("default", False), ("warn", False), ("error", True)])
def test_this_machine_knows_the_switch_for_deterministic_algorithms(mode, found) -> None:
    torch.set_deterministic_debug_mode(mode)
    try:
        assert Machine.here("cpu").deterministic is found
    finally:
        torch.set_deterministic_debug_mode("default")


def test_matrix_units_are_what_pytorch_says_of_the_processor(monkeypatch) -> None:
    for told, found in (({"amx_bf16": True}, True), ({"amx_bf16": False, "avx2": True}, False)):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda told=told: told, raising=False)
        assert Machine.here("cpu").matrix_units is found
    monkeypatch.delattr(torch.cpu, "get_capabilities")  # as in older releases
    assert Machine.here("cpu").matrix_units is False


def test_only_1_asks_for_tritons_interpreter(monkeypatch) -> None:
    for text, found in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TRITON_INTERPRET", text)
        assert Machine.here("cpu").interpreted is found
    monkeypatch.delenv("TRITON_INTERPRET")
    assert Machine.here("cpu").interpreted is False


def test_a_broken_import_keeps_its_words(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    text = "broken_kernels_cuda.so: undefined symbol: _ZN3c104impl"
    (tmp_path / "broken_kernels.py").write_text(f"raise ImportError({text!r})\n")
    (tmp_path / "half_kernels.py").write_text("import no_such_package_anywhere\n")
    (tmp_path / "plain_kernels.py").write_text("")
    (tmp_path / "no_driver.py").write_text("raise RuntimeError('no driver')\n")
    (tmp_path / "like_kernels.py").write_text("import like\n")
    names = ["broken_kernels", "half_kernels", "plain_kernels", "like_kernels", "no.kernels",
             "no_driver"]  # fmt: skip
    here = Machine.here("cpu", names)
    assert here.packages == {
        "broken_kernels": f"ImportError: {text}",
        "half_kernels": "ModuleNotFoundError: No module named 'no_such_package_anywhere'",
        "plain_kernels": "unknown version",
        "like_kernels": "ModuleNotFoundError: No module named 'like'",
        "no_driver": "RuntimeError: no driver",
    }
    for name, reason in (("broken_kernels", text), ("half_kernels", "No module named")):
        [got] = made_up(Caps(packages=(name,))).why_not(ANY, here)
        assert f"'{name}' is installed but does not import" in got and reason in got
    assert made_up(Caps(packages=("plain_kernels",))).why_not(ANY, here) == []


def test_the_contract_imports_no_torch() -> None:
    """spec.py alone decides on any machine; loaded by path, as `attention` itself needs torch."""
    path = sys.modules["attention.spec"].__file__
    code = f"""if True:
        import importlib.util, sys
        found = importlib.util.spec_from_file_location("spec", {path!r})
        module = sys.modules["spec"] = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
        assert "torch" not in sys.modules and module.visible(1, 0)"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_attention_leaves_the_compiler_and_transformers_alone() -> None:
    """torch._dynamo takes a second or more to import, for a run that may compile nothing."""
    heavy = "not {'torch._dynamo', 'transformers'} & set(sys.modules)"
    script = f"import sys, attention; attention.hf.names(); assert {heavy}"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_a_cpu_is_named_as_exactly_as_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cpu_name": "EPYC 9654", "processor": "x86_64", "machine": "amd64"}
    for of, name in names.items():
        module = system if of == "cpu_name" else platform
        monkeypatch.setattr(module, of, lambda name=name: name)
    for of, name in names.items():
        assert Machine.here("cpu").name == name
        monkeypatch.setattr(system if of == "cpu_name" else platform, of, lambda: "")


@pytest.mark.parametrize("dtype, size", [("float32", 4.3), ("bfloat16", 4.3), ("float64", 8.6)])
def test_what_the_math_kernel_holds(dtype: str, size: float) -> None:
    """Scores and softmax of 8 query heads, 8192 x 8192 each, in float32 at least."""
    spec = Spec(8, 2, 64, dtype)
    note = math_note(BACKENDS["sdpa"], spec, (1, 8192))
    assert f"sdpa runs PyTorch's math kernel here, which holds every score: {size} GB " in note
    assert "at batch size 1 and 8,192 tokens." in note
    assert math_note(BACKENDS["sdpa"], spec, (1, 2048)) == ""
    assert math_note(BACKENDS["sdpa"], spec, None) == ""
