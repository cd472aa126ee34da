"""The Triton kernels compiled for other GPUs, by the ptxas of Triton's package.

    python tests/ptxas.py           writes a table of docs/SUPPORT.md
    python tests/ptxas.py '[...]'   compiles cases given as JSON, and prints a line of JSON for each
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

from support_tables import ROOT, markdown, put

PAGE = ROOT / "docs" / "SUPPORT.md"
# Kilobytes of shared memory for a thread block, by compute capability (CUDA C++ Programming Guide),
# and a GPU that has it.
SHARED = {75: 64, 80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
GPUS = {75: "T4", 80: "A100", 86: "RTX 3090", 89: "RTX 4090", 90: "H100", 100: "B200",
        120: "RTX 5090"}
SHAPES = (("half", 64), ("half", 128), ("fp32", 128))
COLUMNS = {"forward": "forward", "dq": "dQ", "dkdv": "dK, dV", "decode": "paged decode"}
# capability, dtype, head_dim, kernel, features ("window softcap"), tile (else the one that would
# run).
Case = tuple[Any, ...]


def compiled(case: Case) -> dict[str, Any]:
    """The tile, registers of a thread, spilled bytes, ..."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from attention.triton import flash_kernels as flash
    from attention.triton import paged_kernels as paged

    capability, dtype, head_dim, kernel, features = case[:5]
    M, N, warps, stages = tile = tile_of(case)
    group = 4 if "group" in features else 1
    kernels = {**flash.KERNELS, "decode": paged.decode_kernel, "combine": paged.combine_kernel}
    names = kernels[kernel].arg_names
    types = dict.fromkeys(("Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "Out"), "*" + dtype)
    types |= dict.fromkeys(("L", "Delta", "Sinks", "Slopes", "Partial", "M"), "*fp32")
    types |= dict.fromkeys(("Run", "Table", "Start", "Count"), "*i32") | {"Seed": "*i64"}
    types |= dict.fromkeys(("tau", "softcap", "keep"), "fp32")
    given = {"HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
             "BLOCK_M": M, "BLOCK_R": M, "BLOCK_N": N, "BLOCK_S": N, "GROUP": group, "R": group,
             "TMA": "tma" in features}
    given |= {name: None for name in ("Run", "Seed", "Sinks", "Slopes", "window", "softcap")
              if name.lower() not in features}
    if kernel == "decode":
        given.pop("window", None)  # a number, there
    given = {name: x for name, x in given.items() if name in names}
    signature = {name: "constexpr" if name in given else types.get(name, "i32") for name in names}
    # What the launcher finds out: pointers and strides are multiples of 16.
    attrs = {(n,): [["tt.divisibility", 16]] for n, name in enumerate(names)
             if signature[name][0] == "*" or re.fullmatch("[a-z]+_[a-z]+", name)}
    source = ASTSource(kernels[kernel], signature, constexprs=given, attrs=attrs)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={
        "enable_fp_fusion": True, "num_warps": warps, "num_stages": stages})
    ptx: str = done.asm["ptx"]
    registers, spilled = assembled(ptx, capability)
    return {
        "tile": tile, "registers": registers, "spilled": spilled, "shared": done.metadata.shared,
        "cubin": len(done.asm["cubin"]), "atomics": bool(re.search(r"\b(atom|red)\.", ptx)),
        "tensor_cores": sum(map(ptx.count, ("mma.sync", "wgmma.mma_async", "tcgen05.mma"))),
    }


def assembled(ptx: str, capability: int) -> tuple[int, int]:
    """Registers of a thread, and bytes spilled (stores and loads)."""
    from triton.backends.nvidia.compiler import get_ptxas

    tool = get_ptxas(capability).path
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as f:
        f.write(ptx)
        f.flush()
        target = re.search(r"\.target (\w+)", ptx)[1]
        options = ["-v", f"--gpu-name={target}", f.name, "-o", os.devnull]
        said = subprocess.run([tool, *options], capture_output=True, text=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spills and registers, said
    return int(registers[1]), sum(map(int, spills.groups()))


def table(cell: Callable[[Case], str]) -> str:
    rows = []
    for capability, gpu in GPUS.items():
        for dtype, head_dim in SHAPES:
            kind = {"half": "fp16" if capability == 75 else "bf16"}.get(dtype, dtype)
            cells = {title: cell((capability, kind, head_dim, kernel, ""))
                     for kernel, title in COLUMNS.items()}
            rows.append({"compiled for": f"{capability / 10} ({gpu})",
                         "KB a block": str(SHARED[capability]), "dtype": kind,
                         "head_dim": str(head_dim), **cells})
    return markdown(rows)


def tile_of(case: Case) -> tuple[int, int, int, int]:
    from attention.triton import flash_kernels as flash
    from attention.triton import paged_kernels as paged

    capability, dtype, head_dim, kernel, _, tile = (*case, None)[:6]
    size = 4 if dtype == "fp32" else 2
    if kernel in flash.KERNELS:
        return tile or flash.default_tile(kernel, divmod(capability, 10), head_dim, size)
    columns = paged.block_sizes(head_dim, size)[0] if kernel == "decode" else 64
    return tile or (16, columns, 4, 2)  # in combine: 64 splits


def words_of(tile: tuple[int, int, int, int]) -> str:
    rows, columns, warps, stages = tile
    return f"{rows} x {columns}, {warps} warps, {stages} stage{'s' * (stages > 1)}"


def text_of(got: dict[str, Any]) -> str:
    spills = f", spills {got['spilled']} B" if got["spilled"] else ""
    used = f"{got['registers']} registers, {got['shared'] / 1024:.0f} KB{spills}"
    return f"{words_of(got['tile'])}: {used}"


def main(words: list[str]) -> None:
    if not words:
        put("docs/SUPPORT.md", table(lambda case: text_of(compiled(case))))
    for case in json.loads(words[0]) if words else ():
        try:
            got = compiled(case)
        except Exception as e:
            got = {"error": f"{type(e).__name__}: {e}"[:500]}
        print(json.dumps(got), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
