"""python -m attention: the table, one decision explained, JSON, mistakes told in one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attention import BACKENDS, Machine, Spec
from attention import __main__ as cli
from settings import UserError

ROOT = Path(__file__).parent.parent
SMALL = ["--device=cpu", "--seq_len=32", "--n_head=2", "--head_dim=16"]
needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(cli, "median_ms", lambda call, device: call() or 1.25)  # runs it once


def test_the_table_has_every_backend(capsys) -> None:
    cli.main(SMALL)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "(cpu), torch " in lines[0]
    assert lines[1].strip() == "batch 1, 32 tokens, 2 heads of 16, float32, causal"
    rows = {line.split()[0]: line for line in lines[2:] if line.strip() and line[0] != " "}
    assert set(rows) == {"runs", "does", *BACKENDS}
    assert rows["sdpa_math"].split()[1:4] == ["math", "1.25", "1.25"]
    assert float(rows["sdpa_math"].split()[4]) < 1e-6
    assert rows["sdpa_cudnn"].split(maxsplit=1)[1].strip() == "it runs on cuda, not on cpu"


def test_every_option_reaches_the_backends(capsys) -> None:
    cli.main([*SMALL, "--dtype=bfloat16", "--n_kv_head=1", "--window=8", "--dropout=0.1",
              "--segments", "--batch_size=3"])  # fmt: skip
    out = capsys.readouterr().out
    assert " ".join(line.strip() for line in out.splitlines()[1:3]) == (
        "batch 3, 32 tokens, 2 heads over 1 key/value heads of 16, bfloat16, causal, window 8, "
        "dropout 0.1, 2 segments"
    )
    assert "it has no dropout, and 0.1 is asked (--dropout=0)" in out


def test_json_is_one_object_with_every_reason(capsys) -> None:
    cli.main([*SMALL, "--json", "--dropout=0.5"])
    found = json.loads(capsys.readouterr().out)
    assert found["seq_len"] == 32 and found["batch_size"] == 1
    assert Spec(**found["spec"]) == Spec(2, 2, 16, "float32", dropout=0.5)
    assert found["machine"]["device"] == "cpu"
    rows = {row["name"]: row for row in found["backends"]}
    assert list(rows) == list(BACKENDS)
    assert rows["sdpa_flash"]["why"] == ["it has no dropout, and 0.5 is asked (--dropout=0)"]
    assert rows["sdpa_math"]["kernels"] == ["math"] and rows["sdpa_math"]["why"] == []
    assert rows["sdpa_math"]["error"] < 1e-6 and rows["sdpa_math"]["forward_backward_ms"] == 1.25


def test_one_decision_explained(capsys) -> None:
    cli.main(["sdpa_flash", *SMALL, "--dropout=0.1"])
    assert capsys.readouterr().out == (
        "WARNING: sdpa_flash requested but it has no dropout, and 0.1 is asked (--dropout=0).\n"
        "         Falling back to 'sdpa'.\n"
        "INFO: Attention backend: sdpa (PyTorch scaled_dot_product_attention; kernel: math)\n"
    )
    cli.main(["--json", "eager", *SMALL])
    assert json.loads(capsys.readouterr().out) == {
        "requested": "eager", "backend": "manual", "rejected": {}, "kernels": []}  # fmt: skip
    cli.main(["--dtype", "float32", "auto", *SMALL])
    assert capsys.readouterr().out.startswith("INFO: Attention backend: sdpa")


@pytest.mark.parametrize("argv, words", [
    (["sdpa_flsh"], "unknown attention backend 'sdpa_flsh'; did you mean 'sdpa_flash'?"),
    (["manual", "sdpa"], "give one backend, or none for all of them, got manual sdpa"),
    (["--hed_dim=8"], "unknown setting '--hed_dim'; did you mean '--head_dim'?"),
    (["--head_dim=wide"], "--head_dim must be an integer, got 'wide'"),
    (["--n_head"], "--n_head needs a value"),
    (["--n_head=3", "--n_kv_head=2"], "n_head must be a positive multiple of n_kv_head"),
    (["--batch_size=0"], "batch_size must be at least 1, got 0"),
    (["--seq_len=-1"], "seq_len must be at least 1, got -1"),
    (["--window=0"], "window must be None or at least 1, got 0"),
    (["--dtype=int8"], "--dtype must be one of float16, bfloat16, float32, float64"),
    (["--device=gpu"], "--device must be cpu, mps, cuda or cuda:N, got 'gpu'"),
    (["--device=cuda:99"], "device 'cuda:99' is not there (torch ")])  # fmt: skip
def test_a_mistake_is_one_sentence(argv, words, capsys) -> None:
    with pytest.raises(UserError) as e:
        cli.main(argv)
    assert words in str(e.value) and "\n" not in str(e.value)
    assert capsys.readouterr().out == ""


def test_long_reasons_stand_below_one_another_and_are_not_cut(capsys) -> None:
    path = "/usr/lib/python3/dist-packages/flash_attn_2_cuda.cpython-310-x86_64-linux-gnu.so"
    why = (f"package 'flash_attn' is installed but does not import ({path}: undefined symbol: _Z)",
           "it takes float16 and bfloat16, not float32 (--dtype=bfloat16)")  # fmt: skip
    rows = [cli.Row("flash_attn_2", "", why), cli.Row("sdpa", "", (), ("flash",), 1.0, 2.0, 1e-3)]
    cli.show(
        rows, Spec(2, 2, 16, "float32"), Machine("cuda", "GPU", (9, 0)), cli.Options(batch_size=1)
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert path in "".join(line[14:].strip() for line in lines)
    assert f"{'':14}{why[1]}" in [line.rstrip() for line in lines]
    assert "compute capability 9.0" in lines[0]


def test_running_out_of_memory_is_a_reason(monkeypatch, capsys) -> None:
    def boom(call: object, device: str) -> float:
        raise RuntimeError("CUDA out of memory. Tried to allocate 1 GiB\nmore")

    monkeypatch.setattr(cli, "median_ms", boom)
    cli.main([*SMALL, "--json"])
    why = json.loads(capsys.readouterr().out)["backends"][0]["why"]
    assert why == ["at this shape: CUDA out of memory. Tried to allocate 1 GiB"]


def test_help_names_every_option_and_backend(capsys) -> None:
    cli.main(["--help"])
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m attention [backend] [--name=value ...]\n")
    assert all(name in out for name in BACKENDS)
    assert all(f"--{name}=" in out for name in cli.Options.__dataclass_fields__)


@needs_no_cuda
def test_as_a_user_runs_it() -> None:
    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "attention", *argv]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    gone = run("sdpa_flash", "--dtype=float32", "--device=cuda")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert gone.stderr.startswith("error: device 'cuda' is not there (torch ")
    assert gone.stderr.count("\n") == 1
    good = run(*SMALL, "--json")
    assert good.returncode == 0 and good.stderr == ""
    rows = json.loads(good.stdout)["backends"]
    assert all(row["forward_ms"] > 0 for row in rows if not row["why"])
