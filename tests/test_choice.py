"""Which backend runs, and why not another, on machines by name."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import kernels
import pytest
import torch
from checkout import python
from hypothesis import assume, given
from hypothesis import strategies as st

from attention import BACKENDS, get, packages, resolve, select
from attention.__main__ import main
from attention.caps import Backend, BackendUnavailable, Caps, version
from attention.spec import CACHES, DTYPES, Machine, Policy, Spec

STRICT = Policy(fallback=False)
TITAN = Machine("cuda", "NVIDIA TITAN RTX", (7, 5), "2.13.0", "12.8")
A100, RTX3050, RTX4090, H100, B200 = (
    replace(TITAN, name=name, capability=capability) for name, capability in (
        ("NVIDIA A100-SXM4-80GB", (8, 0)), ("NVIDIA GeForce RTX 3050", (8, 6)),
        ("NVIDIA GeForce RTX 4090", (8, 9)), ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA B200", (10, 0))))
APPLE = Machine("mps", "Apple M3", None, "2.13.0")
CPU = Machine("cpu", "AMD EPYC", None, "2.13.0+cpu")
AMX = replace(CPU, bfloat16_units=True)
BF16, FP32 = (Spec(12, 12, 64, dtype) for dtype in ("bfloat16", "float32"))
ANY, WIDE = Spec(4, 4, 64, "float32"), Spec(8, 8, 256, "bfloat16", dropout=0.1)
FLASH2, TRITON = {"flash_attn": "2.8.3"}, {"triton": "3.6"}
ALL = dict.fromkeys(packages(), "99.0")


@pytest.mark.parametrize("machine, spec, installed, best", [  # and docs/ATTENTION.md's table
    (RTX3050, BF16, ALL, "flash_attn_2"), (RTX4090, BF16, ALL, "flash_attn_2"),
    (B200, replace(BF16, segments=True), {}, "sdpa_flash"),
    # sdpa_flash takes windows from torch 2.12 on, and by segments it breaks a compiled graph.
    *((replace(H100, torch="2.11.0"), replace(BF16, **more), TRITON, best) for more, best in (
        ({"window": 64}, "triton"), ({"segments": True}, "triton"), ({}, "sdpa"))),
    (H100, replace(BF16, segments=True, compiled=True), TRITON, "triton"),
    # ALiBi: sdpa stores the bias of all pairs.
    *((machine, replace(BF16, alibi=True, **more), installed, best)
      for machine in (A100, H100) for more in ({}, {"window": 9, "segments": True})
      for installed, best in ((FLASH2 | TRITON, "flash_attn_2"), (TRITON, "triton"), ({}, "sdpa"))),
    # Where 4 uses the instructions of Ampere; 2's backward needs 144 KB a block with dropout.
    (A100, replace(BF16, grad=False), {"flash_attn.cute": "4.0.0b26"}, "flash_attn_4"),
    (A100, WIDE, FLASH2, "flash_attn_2"), (RTX3050, WIDE, FLASH2, "sdpa"),
    (AMX, BF16, {}, "sdpa_bmm"), (AMX, FP32, {}, "sdpa"),
    (AMX, replace(BF16, grad=False), {}, "sdpa"), (AMX, replace(BF16, compiled=True), {}, "sdpa"),
])
def test_auto_by_machine_and_packages(machine, spec, installed, best) -> None:
    chosen = resolve("auto", spec, replace(machine, packages=installed), STRICT)
    assert chosen.backend.name == best and not chosen.rejected


SUNK, CAPPED = replace(BF16, sinks=True), replace(BF16, softcap=9.0)


@pytest.mark.parametrize("machine, spec, installed, bare", [
    (H100, CAPPED, "flash_attn_4", "flex"), (B200, CAPPED, "flash_attn_2", "flex"),
    (B200, SUNK, "flash_attn_4", "flex"), (RTX4090, SUNK, "flex", "flex"),
    (H100, replace(SUNK, cache="static", grad=False), "paged", "manual"),
    (H100, replace(SUNK, dtype="float64"), "manual", "manual"),
    (CPU, replace(FP32, softcap=50.0), "manual", "manual"),
    (CPU, replace(FP32, sinks=True, grad=False), "manual", "manual"),
    (H100, replace(BF16, lse=True), "sdpa_flash", "sdpa_flash"),
    (H100, replace(FP32, lse=True, window=9), "triton", "tiled"),
    (CPU, replace(FP32, lse=True), "sdpa_flash", "sdpa_flash"),
    (CPU, replace(FP32, lse=True, softcap=9.0), "tiled", "tiled"),
])
def test_a_feature_goes_to_the_first_kernel_that_has_it(machine, spec, installed, bare) -> None:
    """Also after a named backend that lacks it."""
    for there, best in ((replace(machine, packages=ALL), installed), (machine, bare)):
        assert resolve("auto", spec, there, STRICT).backend.name == best
        for name in ("sdpa", "sdpa_cudnn"):
            chosen = resolve(name, spec, there)
            assert chosen.backend.name == best and list(chosen.rejected) == [name]
            assert best in str(chosen)
            with pytest.raises(BackendUnavailable) as e:
                resolve(name, spec, there, STRICT)
            assert all(reason in str(e.value) for reason in get(name).why_not(spec, there))


@pytest.mark.parametrize("torch, change, issue", [  # the pages of pytorch/pytorch give the releases
    ("2.12.1", {"dtype": "bfloat16"}, "195910"), ("2.11.0", {"dtype": "float16"}, "195910"),
    ("2.12.1", {"segments": True}, "184180"), ("2.11.0", {"scale": 0.1}, "184122"),
    ("2.12.1", {}, None), ("2.13.0", {"dtype": "bfloat16"}, None)])
@pytest.mark.parametrize("name", ["auto", "sdpa", "sdpa_flash", "sdpa_math"])
def test_sdpa_on_apples_metal_has_to_be_allowed_where_it_is_wrong(
    name, torch, change, issue
) -> None:
    spec, there = replace(FP32, **change), replace(APPLE, torch=torch)
    chosen = resolve(name, spec, there)
    guarded = "sdpa_math" if name == "sdpa_math" else "sdpa"
    assert chosen.backend.name == ("manual" if issue else guarded)
    assert not issue or (issue in str(chosen) and "--allow_mps_sdpa=True" in str(chosen))
    assert resolve(name, spec, there, Policy(mps_sdpa=True)).backend.name == guarded


@given(st.sampled_from(["auto", *BACKENDS]), st.sampled_from([{}, ALL]),
       st.sampled_from([TITAN, A100, H100, B200, APPLE, CPU]), st.fixed_dictionaries({
           "dtype": st.sampled_from(DTYPES), "cache": st.sampled_from(CACHES),
           "head_dim": st.sampled_from([20, 64, 320]), "window": st.sampled_from([None, 9]),
           "right": st.sampled_from([0, 3, None]), "dropout": st.sampled_from([0.0, 0.1]),
           "softcap": st.sampled_from([None, 9.0]),
           **dict.fromkeys(("segments", "sinks", "lse", "grad"), st.booleans())}))
def test_what_is_chosen_can_run_and_what_is_refused_cannot(
    name, installed, machine, fields
) -> None:
    assume(fields["cache"] in ("none", "dynamic") or not fields["segments"])
    spec = Spec(4, 4, page_size=256 if fields["cache"] == "paged" else None, **fields)
    there = replace(machine, packages=installed)
    able = {n for n, b in BACKENDS.items() if not b.why_not(spec, there)}
    try:
        chosen = resolve(name, spec, there)
    except BackendUnavailable as e:
        assert not able & {"manual", "tiled", "paged"} and name in str(e)
        return
    assert chosen.backend.name in able and all(n == name for n in chosen.rejected)
    assert (chosen.backend.name == name) == (name in able) or name == "auto"


# --- what is declared ---

ASKS: dict[str, Any] = {  # fields of Spec and, as booleans, of Caps
    "softcap": 5, "scale": 2, "sinks": True, "alibi": True, "lse": True, "segments": True,
    "window": 4, "right": 3, "dropout": 0.5, "grad": True}


@pytest.mark.parametrize("can, cannot, changes", [
    *(({name: True}, {name: False}, {name: value}) for name, value in ASKS.items()),
    ({"devices": ("cuda",)}, {"devices": ("cpu", "mps")}, {}), ({}, {"dtypes": ("float16",)}, {}),
    ({"min_capability": (9, 0)}, {"min_capability": (10, 0)}, {}),
    ({"min_capability": (8, 0), "max_capability": (9, 0)}, {"max_capability": (8, 9)}, {}),
    ({"min_torch": "2.13.0"}, {"min_torch": "2.14"}, {}), ({}, {"interpreted": True}, {}),
    ({"head_dim_max": 64}, {"head_dim_max": 63}, {}),
    ({"head_dim_multiple": 32}, {"head_dim_multiple": 24}, {}),
    ({}, {"dropout_step": 1 / 16}, {"dropout": 0.7}), ({}, {"deterministic": False}, {}),
    ({"caches": ("none", "static")}, {"caches": ("dynamic",)}, {"cache": "static"}),
    ({"caches": ("paged",)}, {"caches": ("paged",), "page_multiple": 256},
     {"cache": "paged", "page_size": 128}),
    ({"packages": ("there",)}, {"packages": ("broken",)}, {}),
    ({"packages": ("there>=1.0",)}, {"packages": ("there>=1.1",)}, {}),
    ({}, {"packages": ("gone",)}, {})])
def test_each_field_of_caps_decides(can, cannot, changes) -> None:
    there = {"there": "1.0", "broken": "ImportError: x"}
    machine = replace(H100, packages=there, deterministic=True)
    made = [Backend("mine", "mine", print, (Caps(**of),), None) for of in (can, cannot)]
    assert [len(b.why_not(replace(ANY, **changes), machine)) for b in made] == [0, 1]


@pytest.mark.parametrize("changes, got", [
    ({"n_head": 0}, "0"), ({"n_kv_head": 5}, "5"), ({"n_kv_head": 24}, "24"),
    ({"head_dim": 0}, "0"), ({"dtype": "bf16"}, "bf16"), ({"window": 0}, "0"),
    ({"dropout": 1.0}, "1.0"), ({"dropout": -0.1}, "-0.1"), ({"dropout": float("nan")}, "nan"),
    ({"scale": 0.0}, "0.0"), ({"softcap": -1.0}, "-1.0"), ({"softcap": float("inf")}, "inf"),
    ({"cache": "paged"}, "None"), ({"cache": "static", "segments": True}, "static"),
    ({"page_size": 16}, "16"), ({"cache": "ring"}, "ring"), ({"head_dim": 8.5}, "8.5"),
    ({"n_kv_head": True}, "True"), ({"window": 2.5}, "2.5"), ({"right": -1}, "-1"),
    ({"right": "1"}, "'1'"), ({"page_size": 2.0, "cache": "paged"}, "2.0"),
])
def test_a_spec_out_of_range_is_an_error(changes, got) -> None:
    with pytest.raises(ValueError, match=re.escape(got)):
        replace(BF16, **changes)


def test_caps_that_no_spec_can_have_are_an_error() -> None:
    for field, value in (("dtypes", ("float32", "fp16")), ("dtypes", "float32"),
                         ("caches", ("pages",)), ("dropout_step", 0.1)):  # a kind has sixteenths
        with pytest.raises(ValueError, match=re.escape(repr(value))):
            Caps(**{field: value})
    for caps in ((), Caps()):
        with pytest.raises(ValueError, match="caps"):
            replace(BACKENDS["manual"], caps=caps)


def test_names_aliases_and_versions() -> None:
    assert get("eager") is get("manual") is BACKENDS["manual"]
    with pytest.raises(ValueError, match=r"'sdpa_flsh'.*'sdpa_flash'") as e:
        resolve("sdpa_flsh", FP32, CPU)
    assert all(name in str(e.value) for name in ("auto", "fastest", "eager", *BACKENDS))
    ordered = ["3.9", "4.0.0b9", "4.0.0.beta13", "4.0.0b26", "4.0.0", "4.0.1b1", "4.0.1"]
    assert sorted(ordered[::-1], key=version) == ordered
    assert version("2.13.0+cpu") == (2, 13, 0) and version("ImportError: 4.0") == ()


def test_a_broken_import_keeps_its_words(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    here = Machine.here("cpu")
    assert here.torch == torch.__version__ == here.version_of("torch")
    assert here.version_of("no.kernels") is None
    for name, text, word in (("broken_kernels", "raise ImportError('_ZN3c104impl')", "_ZN3c104"),
                             ("half_kernels", "import no_such_package", "no_such_package"),
                             ("plain_kernels", "", "")):
        (tmp_path / f"{name}.py").write_text(text)
        why = Backend("mine", "mine", print, (Caps(packages=(name,)),), None).why_not(ANY, here)
        assert len(why) == bool(word) and all(name in w and word in w for w in why)


@pytest.mark.slow
def test_imports_leave_the_compiler_and_transformers_alone() -> None:
    """torch._dynamo takes a second to import."""
    heavy = "not {'torch._dynamo', 'transformers'} & set(sys.modules)"
    script = f"import sys, attention, train; attention.hf.names(); assert {heavy}"
    assert python("-c", script).returncode == 0


# --- what a user sees ---


def test_a_refusal_is_a_warning_once_a_process(tmp_path, monkeypatch, caplog) -> None:
    file = kernels.as_file(tmp_path, print)
    for rank, n in (("1", 0), ("0", 1), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        assert select(file, FP32, "cpu").backend.name == "manual"
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(said) == n
    assert "mine" in said[0] and "manual" in said[0]


# --- python -m attention ---

SMALL = ["--seq_len=16", "--n_head=2", "--head_dim=16", "--device=cpu"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return capsys.readouterr().out


def test_another_machine_is_known_by_its_distinctive_part(capsys) -> None:
    for name, machine, takes, about in (
        ("auto", "4090", "flash_attn_2", "NVIDIA GeForce RTX 4090 (cuda), compute capability 8.9"),
        ("auto", "titan rtx", "sdpa", "NVIDIA TITAN RTX (cuda), compute capability 7.5"),
        ("flash_attn_3", "h100", "flash_attn_3", "NVIDIA H100 (cuda), compute capability 9.0"),
        ("manual", "RTX4090", "manual", "NVIDIA GeForce RTX 4090 (cuda)"),
        ("auto", "cpu", "sdpa", "cpu (cpu)")):
        found = said(capsys, name, f"--as={machine}")
        assert f"INFO: Attention backend: {takes} (" in found and found.startswith(about)


def test_a_refusal_is_printed_once(capsys) -> None:
    found = said(capsys, "sdpa", *SMALL, "--softcap=9")
    assert found.count("softcap") == 1 and "INFO: Attention backend: manual (" in found


@pytest.mark.parametrize("words, wrong", [
    (["nope"], "'nope'"), (["--n_head=0"], "got 0"), (["--window=0"], "got 0"), ([""], "empty"),
    (["--as=abacus"], "abacus"), (["--as=h100", "--device=cpu"], "--device"), (["--as="], "--as"),
    (["fastest", "--as=h100"], "fastest"), (["--seq_len=0"], "--seq_len"),
    (["--page_size=16"], "page_size"), (["--device=cuda:99"], "cuda:99"),
    (["sdpa", "--kv_cache=paged", "--page_size=0"], "got 0"), (["--device=xpu"], "xpu"),
    (["--as=titan"], "NVIDIA TITAN V"), (["--as=rtx 4900"], "NVIDIA GeForce RTX 4090"),
    (["--dtype=int8"], "int8"), (["--sinks=maybe"], "maybe"), (["--colour=red"], "--colour"),
    *((["check", *words.split()], word) for words, word in (
        ("none.py", "none.py"), ("no_such_backend", "no_such_backend"), ("auto", "auto"),
        ("manual --dtype=float8", "float8"), ("manual --device=tpu", "tpu"),
        ("manual --length=-1", "-1"), ("manual --test=none", "none"))),
])
def test_a_mistake_is_named_and_ends_with_2(words, wrong, capsys) -> None:
    with pytest.raises(SystemExit) as e:
        raise SystemExit(main(words))
    assert e.value.code == 2 and wrong in capsys.readouterr().err
