"""The Triton kernels compiled for GPUs that are not here (ptxas.py), and the table of that."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="package 'triton' is not installed")
import ptxas

PAGE = ptxas.PAGE.read_text(encoding="utf-8")
# Features beside the causal mask, and the bytes that they may spill by the ptxas of Triton 3.7.1.
SPILLS: dict[ptxas.Case, int] = {
    (90, "bf16", 64, "forward", "softcap sinks"): 0,
    (90, "bf16", 64, "forward", "window run seed"): 0,
    (90, "bf16", 64, "forward", "slopes window"): 0,
    (90, "bf16", 64, "dq", "slopes"): 0,
    (90, "bf16", 64, "dkdv", "slopes group"): 104,
    (90, "bf16", 256, "decode", "slopes group"): 0,
    (80, "bf16", 64, "forward", "seed"): 820,
    (80, "bf16", 64, "dq", "softcap sinks"): 16,
    (90, "bf16", 128, "dkdv", "group"): 176,
    (90, "fp16", 80, "dkdv", "window run seed group"): 652,
    (90, "fp16", 80, "dkdv", "window run seed group softcap"): 992,
    (75, "fp16", 80, "dkdv", "window run seed group"): 72,
    (90, "bf16", 256, "decode", "softcap group"): 0,
    (75, "fp16", 80, "combine", "sinks"): 0,
}
SHOWN: list[ptxas.Case] = [  # one cell of the table for each GPU
    (75, "fp16", 128, "dq", ""), (80, "bf16", 128, "decode", ""), (86, "bf16", 64, "forward", ""),
    (89, "bf16", 64, "dq", ""), (90, "bf16", 64, "forward", ""), (100, "bf16", 128, "forward", ""),
    (120, "fp32", 128, "dkdv", "")]


def test_the_table_has_the_tiles_that_would_run_and_they_fit() -> None:
    """python tests/ptxas.py writes it."""
    bare = re.sub(r": \d+ registers, [^|]*?(?= \|)", "", PAGE)
    assert ptxas.table(lambda case: ptxas.words_of(ptxas.tile_of(case))) in bare
    rows = [row.split("|")[2:] for row in PAGE.splitlines() if "registers, " in row]
    assert len(rows) == len(ptxas.GPUS) * len(ptxas.SHAPES)
    for limit, *cells in rows:
        used = [int(kb) for kb in re.findall(r"(\d+) KB", " ".join(cells))]
        assert len(used) == len(ptxas.COLUMNS) and max(used) <= int(limit), cells


@pytest.mark.slow
def test_the_kernels_compile_for_real_gpus() -> None:
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 3):
        pytest.skip(f"triton {triton.__version__} has another compiler interface, this is of 3.3")
    cases = [*SHOWN, *SPILLS]
    done = subprocess.run(
        [sys.executable, ptxas.__file__, json.dumps(cases)], capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for case, got in zip(cases, results, strict=True):
        assert "error" not in got, (case, got)
        capability, dtype, _, kernel, features = case
        assert got["shared"] <= ptxas.SHARED[capability] << 10 and got["cubin"], (case, got)
        assert not got["atomics"], case
        multiplies = dtype != "fp32" and capability >= 80 and kernel != "combine"
        assert bool(got["tensor_cores"]) == multiplies, case
        # Registers are dealt out by eights, and an SM has 65,536: one block at least must fit.
        assert -(-got["registers"] // 8) * 8 * 32 * got["tile"][2] <= 65536, (case, got)
        if features:
            assert got["spilled"] <= SPILLS[case], (case, got)
        elif f"Triton {triton.__version__} " in PAGE:
            assert ptxas.text_of(got) in PAGE, (case, got)
