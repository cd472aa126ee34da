"""triton with other backward kernels: tiles that "fastest" measures, and TMA descriptors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="package 'triton' is not installed")
import ptxas
import torch

from attention import Machine, Policy, Spec, get, is_code, resolve
from attention.check.matrix import cases, check
from attention.names import timed
from attention.triton_flash import BACKWARD_TILES

TO_TRAIN = Spec(12, 12, 64, "bfloat16")
H100 = Machine("cuda", "H100", (9, 0), "2.13.0", packages={"triton": "3.7.1"})
A100 = Machine("cuda", "A100", (8, 0), "2.13.0", packages={"triton": "3.7.1"})
NAMES = [n for n in timed(TO_TRAIN, H100) if n.startswith("triton:")] + ["triton:tma"]
CASES = cases("""97 B1 D64, gqa-packed-40x70 D40 B1, window9-softcap-70 D16, sinks-both-70x40 B1,
    mqa-alibi-window20-right9-33x70 B1""")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", NAMES)
def test_other_backward_kernels_give_the_numbers_of_the_oracle(name, case) -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if why := get(name).why_not(case.spec("float16"), Machine.here(device)):
        pytest.skip("; ".join(why))
    check(get(name), case, "float16", device)


@pytest.mark.parametrize("name", NAMES)
def test_they_run_where_they_fit_else_triton_does(name, monkeypatch) -> None:
    assert not is_code(name)
    assert resolve(name, TO_TRAIN, H100).backend.name == name
    assert (resolve(name, TO_TRAIN, A100).backend.name == name) == (name != "triton:tma")
    for spec in (Spec(12, 12, 136, "bfloat16"), Spec(12, 12, 64, "float32")):
        assert resolve(name, spec, H100).backend.name != name
    monkeypatch.setenv("NANOATTN_DISABLE", "triton")
    assert resolve(name, TO_TRAIN, H100, Policy()).backend.name not in ("triton", name)


def test_only_where_they_run_and_to_train_there_is_more_to_time() -> None:
    few = timed(replace(TO_TRAIN, grad=False), H100)
    assert {*timed(TO_TRAIN, H100)} - {*few} == {*NAMES} - {"triton:tma"}
    assert timed(replace(TO_TRAIN, head_dim=80), H100) == few
    assert timed(TO_TRAIN, Machine("cpu", "cpu")) == few


@pytest.mark.slow
def test_they_compile_and_fit_the_shared_memory_and_registers_of_gpus() -> None:
    of_tiles = [(c, "bf16", 64, kernel, "", tile) for c in (80, 86, 90, 100, 120)
                for kernel in ("dq", "dkdv") for tile in BACKWARD_TILES]
    by_tma = [(c, "bf16", 64, kernel, features) for c in (90, 100) for kernel in ("dq", "dkdv")
              for features in ("tma", "tma window run seed group")]
    done = subprocess.run(
        [sys.executable, ptxas.__file__, json.dumps(of_tiles + by_tma)], capture_output=True,
        text=True, env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for case, got in zip(of_tiles + by_tma, results, strict=True):
        assert "error" not in got, (case, got)
        assert got["shared"] <= ptxas.SHARED[case[0]] << 10, (case, got)
        assert -(-got["registers"] // 8) * 8 * 32 * got["tile"][2] <= 65536, (case, got)
