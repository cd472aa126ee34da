"""python -m attention: one choice explained, all backends measured, here and on another machine."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from checkout import ROOT

from attention import BACKENDS, Spec
from attention.__main__ import main
from attention.caps import version
from attention.machine import gpus

SMALL = ["--seq_len=16", "--n_head=2", "--head_dim=16", "--device=cpu"]


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    main(words)
    return capsys.readouterr().out


def test_every_backend_is_in_the_table_with_its_time_or_its_reason(capsys, monkeypatch) -> None:
    few = {n: BACKENDS[n] for n in ("manual", "tiled", "paged", "sdpa_cudnn")}
    monkeypatch.setattr("attention.__main__.BACKENDS", few)
    able, unable = said(capsys, *SMALL, "--window=4", "--segments").split("does not run")
    for name in ("manual", "tiled"):
        forward, both, error = map(float, able.split(f"\n{name} ")[1].split()[:3])
        assert 0 < forward < both and error < 1e-5
    assert "window 4" in able and "segments" in able
    assert "paged" in unable and "sdpa_cudnn" in unable and "cuda" in unable
    able, unable = said(capsys, *SMALL, "--kv_cache=paged", "--page_size=16").split("does not run")
    assert "1 queries" in able and "\npaged  " in able and "manual" in unable


@pytest.mark.slow
def test_one_choice_is_explained_and_a_refusal_is_printed_once() -> None:
    command = [sys.executable, "-m", "attention", "sdpa", *SMALL, "--softcap=9"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    warning, fallback, info = run.stdout.splitlines()
    assert not run.stderr and run.stdout.count("softcap") == 1
    assert warning.startswith("WARNING: sdpa ") and "softcap" in warning
    assert "'manual'" in fallback and info.startswith("INFO: Attention backend: manual (")


@pytest.mark.parametrize("words, takes", [
    (["auto", "--as=4090"], "flash_attn_2"), (["auto", "--as=titan rtx"], "sdpa"),
    (["flash_attn_3", "--as=h100"], "flash_attn_3"),
    (["sdpa_cudnn", "--as=h100", "--dropout=0.1"], "sdpa"),
    # On Metal with this machine's torch: older ones are wrong, some in half precision alone.
    (["auto", "--as=apple m3"], "sdpa" if version(torch.__version__) >= (2, 9) else "manual"),
    (["auto", "--as=apple m3", "--dtype=float16"],
     "sdpa" if version(torch.__version__) >= (2, 13) else "manual"),
    (["auto", "--as=cpu", "--softcap=30"], "manual"),
])
def test_another_machine_is_only_described(words, takes, capsys) -> None:
    assert f"INFO: Attention backend: {takes} (" in said(capsys, *words)


def test_every_backend_on_another_machine(capsys) -> None:
    out = said(capsys, "--as=NVIDIA A100")
    assert all(f"\n{name} " in out for name in BACKENDS)
    assert out.index("\nflash_attn_2 ") < out.index("does not run") < out.index("\nflash_attn_3 ")


@pytest.mark.parametrize("words, wrong", [
    (["nope"], "'nope'"), (["--n_head=0"], "got 0"), (["--window=0"], "got 0"), ([""], "empty"),
    (["--as=abacus"], "abacus"), (["--as=h100", "--device=cpu"], "--device"), (["--as="], "--as"),
    (["fastest", "--as=h100"], "fastest"), (["--seq_len=0"], "--seq_len"),
    (["--page_size=16"], "page_size"), (["--device=cuda:99"], "cuda:99"),
    (["sdpa", "--kv_cache=paged", "--page_size=0"], "got 0"), (["--device=xpu"], "xpu"),
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


# --- machines by name ---


@pytest.mark.parametrize("text, name, capability", [
    ("titan rtx", "NVIDIA TITAN RTX", (7, 5)), ("RTX4090", "NVIDIA GeForce RTX 4090", (8, 9)),
    ("h100", "NVIDIA H100", (9, 0)), ("B200", "NVIDIA B200", (10, 0)), ("cpu", "cpu", None),
])
def test_a_machine_is_known_by_its_distinctive_part(text, name, capability) -> None:
    machine = gpus.describe(text, "2.13.0", ["flash_attn"])
    assert (machine.name, machine.capability) == (name, capability)
    assert not BACKENDS["manual"].why_not(Spec(2, 2, 16, "float32"), machine)


@pytest.mark.parametrize("text, named", [
    ("titan", "NVIDIA TITAN V"), ("rtx", "RTX"), ("foo", "NVIDIA H100"), ("H10", "NVIDIA H100"),
    ("rtx 4900", "NVIDIA GeForce RTX 4090"),
])
def test_an_ambiguous_or_unknown_name_lists_a_few_candidates(text: str, named: str) -> None:
    with pytest.raises(ValueError, match=repr(text)) as e:
        gpus.describe(text, "2.13.0", [])
    assert named in str(e.value) and sum(m.name in str(e.value) for m in gpus.KNOWN) < 12
