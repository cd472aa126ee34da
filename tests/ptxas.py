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
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # as a script
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
    options: dict[str, Any] = {"enable_fp_fusion": True}
    group = 4 if "group" in features else 1
    types = {"L": "*fp32", "Delta": "*fp32", "Run": "*i32", "Seed": "*i64", "Sinks": "*fp32",
             "Slopes": "*fp32", "tau": "fp32", "softcap": "fp32", "keep": "fp32"}
    types |= {name: "*" + dtype for name in ("Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "Out")}
    padded = max(16, triton.next_power_of_2(head_dim))
    given: dict[str, Any] = {"HEAD_DIM": head_dim, "BLOCK_D": padded}
    optional = ["Run", "Seed", "Sinks", "Slopes", "window", "softcap"]
    tile = tile_of(case)
    if kernel in flash.KERNELS:
        fn = flash.KERNELS[kernel]
        given |= {"BLOCK_M": tile[0], "BLOCK_N": tile[1], "GROUP": group}
        given |= {"TMA": "tma" in features} if "TMA" in fn.arg_names else {}
    else:
        fn = paged.decode_kernel if kernel == "decode" else paged.combine_kernel
        types |= dict.fromkeys(("Table", "Start", "Count"), "*i32")
        types |= dict.fromkeys(("Partial", "M"), "*fp32")
        optional.remove("window")  # a number, there
        given |= {"R": group, "BLOCK_R": tile[0], "BLOCK_N": tile[1], "BLOCK_S": tile[1]}
        given = {name: x for name, x in given.items() if name in fn.arg_names}
    options |= {"num_warps": tile[2], "num_stages": tile[3]}
    given |= {name: None for name in optional
              if name in fn.arg_names and name.lower() not in features}
    signature = {name: types.get(name, "i32") for name in fn.arg_names}
    # What the launcher finds out: pointers and strides are multiples of 16.
    aligned = [n for n, name in enumerate(fn.arg_names)
               if signature[name][0] == "*" or re.fullmatch("[a-z]+_[a-z]+", name)]
    signature |= dict.fromkeys(given, "constexpr")
    attrs = {(n,): [["tt.divisibility", 16]] for n in aligned
             if signature[fn.arg_names[n]] != "constexpr"}
    source = ASTSource(fn, signature, constexprs=given, attrs=attrs)
    done = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
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
        target = re.search(r"\.target (\w+)", ptx)[1]  # type: ignore[index]
        options = ["-v", f"--gpu-name={target}", f.name, "-o", os.devnull]
        said = subprocess.run([tool, *options], capture_output=True, text=True).stderr
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spills and registers, said
    return int(registers[1]), sum(map(int, spills.groups()))


def table(cell: Callable[[Case], str]) -> str:
    head = ("compiled for", "KB a block", "dtype", "head_dim", *COLUMNS.values())
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for capability, gpu in GPUS.items():
        for dtype, head_dim in SHAPES:
            kind = {"half": "fp16" if capability == 75 else "bf16"}.get(dtype, dtype)
            place = f"{capability / 10} ({gpu})", str(SHARED[capability]), kind, str(head_dim)
            cells = (cell((capability, kind, head_dim, kernel, "")) for kernel in COLUMNS)
            lines.append(f"| {' | '.join((*place, *cells))} |")
    return "\n".join(lines)


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
        import support_tables

        support_tables.put(PAGE, table(lambda case: text_of(compiled(case))))
    for case in json.loads(words[0]) if words else ():
        try:
            got = compiled(case)
        except Exception as e:
            got = {"error": f"{type(e).__name__}: {e}"[:500]}
        print(json.dumps(got), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
