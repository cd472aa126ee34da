"""Triton's kernels beyond test_attention.py: unread tiles, dropout, 64-bit offsets, other backward
kernels; compiled for other GPUs.

Without CUDA they run in the interpreter: shapes are small.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from conftest import few
from torch import Tensor

from attention import Machine, Spec, get
from attention.check import matrix
from attention.check.matrix import Case
from attention.masks import mask
from attention.names import timed
from attention.proof import run
from attention.triton_flash import BACKWARD_TILES, attend
from attention.truth import truth

pytest.importorskip("triton", reason="package 'triton' is not installed")
import ptxas

from attention.triton import flash_kernels as triton_kernels

HAS_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if HAS_CUDA else "cpu"  # where the kernels run
pytestmark = [pytest.mark.gpu] * HAS_CUDA
CI = [pytest.mark.slow, pytest.mark.ci]


def both_passes(tensors: list[Tensor], spec: Spec, call: Any = attend) -> list[Tensor]:
    leaves = [t.detach().requires_grad_() for t in tensors[:3]]
    out = call(*leaves, spec)
    return [out.detach(), *torch.autograd.grad(out, leaves, tensors[3])]


@pytest.mark.skipif(HAS_CUDA, reason="sets the interpreter's tiles; CUDA has its own")
@pytest.mark.parametrize("case", [
    pytest.param(case, id=case.name, marks=CI if n else []) for n, case in enumerate(matrix.cases(
        "window16-48, 48, many-64", "H1 Hkv1 D16 B1"))])
def test_tiles_that_no_row_sees_are_not_read(case: Case, monkeypatch) -> None:
    """0 * NaN is NaN: a read would show."""
    T, b, spec, given = case.Tk, 16, case.spec("float32"), matrix.inputs(case, "float32")
    tiles = dict.fromkeys(triton_kernels.KERNELS, (b, b, 1, 1))
    monkeypatch.setattr(triton_kernels, "INTERPRETED", tiles)
    want = run(attend, given, spec)
    sees = mask(T, T, case.window, given.segments, given.q.device)[0, 0]
    skipped = sees.view(T // b, b, -1, b).any(3).any(1).logical_not().repeat_interleave(b, dim=1)
    for row, unseen in enumerate(skipped):
        rows, v = slice(row * b, row * b + b), given.v.clone()
        v[:, unseen] = torch.nan
        got = run(attend, given._replace(v=v), spec, times=0)
        assert torch.equal(got.out[:, rows], want.out[:, rows])
    assert skipped.any()
    dout = given.dout.clone()
    dout[:, -b:] = torch.nan  # these rows' gradient reaches only the tiles that they see
    got = run(attend, given._replace(dout=dout), spec)
    for name in ("dk", "dv"):
        assert torch.equal(got.tensors[name][:, skipped[-1]], want.tensors[name][:, skipped[-1]])


def test_offsets_beyond_32_bits() -> None:
    """By 32-bit strides batch 2 begins 2^31 numbers after batch 0, or row 256 does. Of the 4 GB few
    pages are touched (on a CPU)."""
    room = torch.empty(2**31 + 2**24, dtype=torch.float16, device=DEVICE)
    far_batch = [room[n * 512 :].as_strided((3, 16, 1, 16), (2**30, 16, 16, 1)) for n in range(4)]
    far_rows = [room[n * 512 :].as_strided((1, 258, 1, 16), (0, 2**23, 16, 1)) for n in range(4)]
    spec = Spec(1, 1, 16, "float16", window=8)
    for tensors in (far_batch, far_rows):
        for t in tensors:
            t.copy_(torch.randn(t.shape))
        near = [t.contiguous() for t in tensors]
        got, want = both_passes(tensors, spec), both_passes(near, spec)
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_what_a_tile_has_past_the_last_query_overflows_nowhere() -> None:
    """ALiBi's scores grow for queries before every key, and slopes below 0."""
    case = Case("steep", 33, 17, right=9, alibi=True, B=1, H=2, Hkv=2, D=16)
    spec, given = case.spec("float32"), matrix.inputs(case, "float32", DEVICE)
    given = given._replace(alibi_slopes=torch.tensor([9.0, -9.0], device=DEVICE))
    found = both_passes([*given], spec, partial(attend, **given.options))
    for got, want in zip(found, truth(given, spec).tensors.values(), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device")
def test_on_cuda_a_large_grid_and_inductor_compute_the_same() -> None:
    q = torch.randn(70_000, 4, 1, 16, device="cuda", dtype=torch.float16)
    want = torch.nn.functional.scaled_dot_product_attention(
        *(q.transpose(1, 2) for _ in range(3)), is_causal=True).transpose(1, 2)
    got = attend(q, q, q, Spec(1, 1, 16, "float16"))
    torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
    for D in (64, 80, 128):
        q, dout = (torch.randn(2, 300, 4, D, device="cuda", dtype=torch.float16) for _ in range(2))
        tensors, spec = [q, q[:, :, :2], q[:, :, 2:], dout], Spec(4, 2, D, "float16")
        compiled = torch.compile(attend, fullgraph=True)
        results = [both_passes(tensors, spec, call) for call in (attend, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


# --- other backward kernels: tiles that "fastest" measures, and TMA descriptors ---

TO_TRAIN = Spec(12, 12, 64, "bfloat16")
H100 = Machine("cuda", "H100", (9, 0), "2.13.0", packages={"triton": "3.7.1"})
A100 = Machine("cuda", "A100", (8, 0), "2.13.0", packages={"triton": "3.7.1"})
NAMES = [n for n in timed(TO_TRAIN, H100) if n.startswith("triton:")] + ["triton:tma"]
CASES = matrix.cases("""97 B1 D64, gqa-packed-40x70 D40 B1, window9-softcap-70 D16,
    sinks-both-70x40 B1, mqa-alibi-window20-right9-33x70 B1""")


@pytest.mark.parametrize("case", few(CASES[::-1]), ids=lambda case: case.name)
@pytest.mark.parametrize("name", NAMES)
def test_other_backward_kernels_give_the_numbers_of_the_oracle(name, case) -> None:
    if why := get(name).why_not(case.spec("float16"), Machine.here(DEVICE)):
        pytest.skip("; ".join(why))
    matrix.check(get(name), case, "float16", DEVICE)


# --- compiled for other GPUs ---

PAGE = ptxas.PAGE.read_text(encoding="utf-8")
# One cell of the table for each GPU; features beside the causal mask; other tiles, TMA descriptors.
SHOWN: list[ptxas.Case] = [
    (75, "fp16", 128, "dq", ""), (80, "bf16", 128, "decode", ""), (86, "bf16", 64, "forward", ""),
    (89, "bf16", 64, "dq", ""), (90, "bf16", 64, "forward", ""), (100, "bf16", 128, "forward", ""),
    (120, "fp32", 128, "dkdv", "")]
FEATURED: list[ptxas.Case] = [
    (75, "fp16", 80, "combine", "sinks"), (75, "fp16", 80, "dkdv", "window run seed group"),
    (80, "bf16", 64, "forward", "seed"), (80, "bf16", 64, "dq", "softcap sinks"),
    (90, "bf16", 64, "forward", "softcap sinks"), (90, "bf16", 64, "forward", "window run seed"),
    (90, "bf16", 64, "forward", "slopes window"), (90, "bf16", 64, "dq", "slopes"),
    (90, "bf16", 64, "dkdv", "slopes group"), (90, "bf16", 128, "dkdv", "group"),
    (90, "fp16", 80, "dkdv", "window run seed group"),
    (90, "fp16", 80, "dkdv", "window run seed group softcap"),
    (90, "bf16", 256, "decode", "slopes group"), (90, "bf16", 256, "decode", "softcap group")]
BACKWARD = ("dq", "dkdv")
OTHERS: list[ptxas.Case] = [
    *((*case, "", tile) for *case, tile in itertools.product(
        (80, 86, 90, 100, 120), ["bf16"], [64], BACKWARD, BACKWARD_TILES)),
    *itertools.product((90, 100), ["bf16"], [64], BACKWARD, ("tma", "tma window run seed group"))]


def test_the_table_has_the_tiles_that_would_run_and_they_fit() -> None:
    bare = re.sub(r": \d+ registers, [^|]*?(?= \|)", "", PAGE)
    assert ptxas.table(lambda case: ptxas.words_of(ptxas.tile_of(case))) in bare
    rows = [row.split("|")[2:] for row in PAGE.splitlines() if "registers, " in row]
    assert len(rows) == len(ptxas.GPUS) * len(ptxas.SHAPES)
    for limit, *cells in rows:
        used = [int(kb) for kb in re.findall(r"(\d+) KB", " ".join(cells))]
        assert len(used) == len(ptxas.COLUMNS) and max(used) <= int(limit), cells


@pytest.mark.slow
def test_the_kernels_compile_for_real_gpus_and_fit_them() -> None:
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 3):
        pytest.skip(f"triton {triton.__version__} has another compiler interface, this is of 3.3")
    cases = [*SHOWN, *FEATURED, *OTHERS]
    done = subprocess.run(
        [sys.executable, ptxas.__file__, json.dumps(cases)], capture_output=True, text=True,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"})
    for case, line in zip(cases, done.stdout.splitlines(), strict=True):
        (capability, dtype, _, kernel, *_), got = case, json.loads(line)
        assert "error" not in got, (case, got)
        assert got["shared"] <= ptxas.SHARED[capability] << 10, (case, got)
        # Registers are dealt out by eights, and an SM has 65,536: one block at least must fit.
        assert -(-got["registers"] // 8) * 8 * 32 * got["tile"][2] <= 65536, (case, got)
        multiplies = dtype != "fp32" and capability >= 80 and kernel != "combine"
        assert case in OTHERS or bool(got["tensor_cores"]) == multiplies, (case, got)
        assert not got["atomics"] and (case not in FEATURED or got["spilled"] <= 1100), (case, got)
        if case in SHOWN and f"Triton {triton.__version__} " in PAGE:
            assert ptxas.text_of(got) in PAGE, (case, got)
