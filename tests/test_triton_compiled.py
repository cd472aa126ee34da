"""The Triton kernels compiled for GPUs that are not here: their tiles, shared memory, registers.

Triton and the ptxas in its package make machine code for any GPU on any machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="package 'triton' is not installed")
from attention.triton.flash_kernels import KERNELS, default_tile

# Kilobytes of shared memory for a thread block, by compute capability (CUDA C++ Programming Guide).
SHARED = {(7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227, (10, 0): 227, (12, 0): 99}
# Compiled to machine code: capability, dtype, D, kernel, features.
Compiled = tuple[int, str, int, str, str]
QUICK: list[Compiled] = [
    (90, "bf16", 64, "forward", ""),
    (90, "fp16", 80, "dkdv", "window run seed group"),
    (100, "bf16", 128, "forward", ""),
    (90, "bf16", 64, "forward", "softcap sinks"),
]
SLOW: list[Compiled] = [
    *((c, "bf16", 128, k, "") for c, k in product((80, 86, 90, 100), KERNELS)),
    *((c, "bf16", 64, k, "softcap sinks") for c, k in product((80, 90), KERNELS)),
    (80, "bf16", 64, "forward", "seed"),
    (75, "fp16", 64, "forward", ""),
    (75, "fp16", 128, "dkdv", ""),
    (80, "fp32", 64, "dq", ""),
    (90, "bf16", 128, "dkdv", "group"),
    (90, "bf16", 64, "forward", "window run seed"),
    (90, "fp16", 80, "dkdv", "window run seed group softcap"),
]
# Bytes of registers that a thread puts into memory, stores and loads together, by the ptxas of
# Triton 3.7.1. What is not here spills nothing; what is may spill so much, and not more.
SPILLS: dict[Compiled, int] = {
    (75, "fp16", 128, "dkdv", ""): 3468,
    (80, "fp32", 64, "dq", ""): 8,
    (80, "bf16", 64, "forward", "seed"): 820,
    (80, "bf16", 128, "forward", ""): 76,
    (80, "bf16", 128, "dkdv", ""): 416,
    (86, "bf16", 128, "forward", ""): 12,
    (90, "bf16", 128, "dkdv", ""): 172,
    (90, "bf16", 128, "dkdv", "group"): 176,
    (90, "fp16", 80, "dkdv", "window run seed group"): 636,
    (80, "bf16", 64, "dq", "softcap sinks"): 16,
    (90, "fp16", 80, "dkdv", "window run seed group softcap"): 992,
}
COMPILER = r"""
import json, re, subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from attention.triton.flash_kernels import KERNELS, _padded as padded, default_tile

def ptxas(ptx, capability):
    # Registers of a thread, and the bytes that it spills.
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    names = ("ptxas-blackwell", "ptxas") if capability >= 100 else ("ptxas",)
    found = [tools / name for name in names if (tools / name).exists()]
    if not found:
        return None
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        target = re.search(r"\.target (\w+)", ptx)[1]
        options = ["-v", f"--gpu-name={target}", f.name, "-o", "/dev/null"]
        said = subprocess.run([found[0], *options], capture_output=True, text=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    return int(re.search(r"Used (\d+) registers", said)[1]), sum(map(int, spills.groups()))

for capability, dtype, head_dim, kernel, features in json.loads(sys.argv[1]):
    fn = KERNELS[kernel]
    M, N, warps, stages = default_tile(
        kernel, divmod(capability, 10), head_dim, 4 if dtype == "fp32" else 2)
    given = {"HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_M": M, "BLOCK_N": N,
             "GROUP": 4 if "group" in features else 1}
    given |= {name: None for name in ("Run", "Seed", "Sinks", "window", "softcap")
              if name in fn.arg_names and name.lower() not in features}
    types = {"L": "*fp32", "D": "*fp32", "Run": "*i32", "Seed": "*i64",
             "Sinks": "*fp32", "tau": "fp32", "softcap": "fp32", "keep": "fp32"}
    types |= {name: "*" + dtype for name in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV")}
    signature = {name: types.get(name, "i32") for name in fn.arg_names}
    # What the launcher finds out: pointers and strides are multiples of 16.
    aligned = [n for n, name in enumerate(fn.arg_names)
               if signature[name][0] == "*" or name[-2:] in ("_b", "_t", "_h")]
    signature |= dict.fromkeys(given, "constexpr")
    aligned = {(n,): [["tt.divisibility", 16]] for n in aligned
               if signature[fn.arg_names[n]] != "constexpr"}
    source = ASTSource(fn, signature, constexprs=given, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = done.asm["ptx"]
    print(json.dumps({"ptxas": ptxas(ptx, capability),
                      "shared": done.metadata.shared, "cubin": len(done.asm["cubin"]),
                      "atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
                      "tensor_cores": sum(ptx.count(x) for x in (
                          "mma.sync", "wgmma.mma_async", "tcgen05.mma"))}), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("cases", [
    pytest.param(QUICK, id="four"),
    pytest.param(SLOW, id="others", marks=pytest.mark.slow)])
def test_the_kernels_compile_for_real_gpus(cases) -> None:
    import triton

    if tuple(int(n) for n in triton.__version__.split(".")[:2]) < (3, 3):
        pytest.skip(f"triton {triton.__version__} has another compiler interface, this is of 3.3")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    root = str(Path(__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", COMPILER, json.dumps(cases)],
        capture_output=True, text=True, cwd=root, env=environment | {"PYTHONPATH": root},
    )
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (cases[len(results)], done.stderr[-2000:])
    if results[0]["ptxas"] is None:
        pytest.skip("this triton brings no ptxas: registers and spills are unknown")
    for case, got in zip(cases, results, strict=True):
        capability, dtype, head_dim, kernel, _ = case
        at = divmod(capability, 10)
        tile = default_tile(kernel, at, head_dim, 4 if dtype == "fp32" else 2)
        assert 0 < got["shared"] <= SHARED[at] << 10, (capability, dtype, head_dim, kernel, got)
        assert got["cubin"] and not got["atomics"]
        assert bool(got["tensor_cores"]) == (dtype != "fp32" and capability >= 80), (at, dtype)
        registers, spilled = got["ptxas"]
        assert spilled <= SPILLS.get(case, 0), (case, tile, spilled)
        # Registers are dealt out by eights, and an SM has 65,536: one block at least must fit.
        assert -(-registers // 8) * 8 * 32 * tile[2] <= 65536, (case, tile, registers)
