"""Write the tables of README.md and docs/ from Caps: python tests/support_tables.py."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script

from attention import BACKENDS
from attention.caps import Caps, dotted, version
from attention.select import DISABLE, resolve
from attention.spec import DTYPES, Machine, Spec

ROOT = Path(__file__).resolve().parent.parent
# Tried on a device; legend in docs/SUPPORT.md. The tests run the rest of the CPU's rows.
COMPILED = "compiled, interpreted"  # tests/ptxas.py, and conftest.py's interpreter
TRIED = {
    ("triton", "cuda"): COMPILED, ("triton", "cpu"): "interpreted", ("paged", "cuda"): COMPILED,
    **{(f"flash_attn_{n}", "cuda"): "stand-in" for n in (2, 3)},  # tests/test_flash.py
    ("flash_attn_4", "cuda"): "compiled, stand-in",  # docs/LOG.md, 2026-11-26
}
# With torch 2.11 (docs/LOG.md, 2026-11-26 and 2026-11-28).
ON_H100 = ("manual", "tiled", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math",
           "flex", "triton", "paged")
MACHINES = {"CUDA 7.5 (T4)": (7, 5), "CUDA 8.0 (A100)": (8, 0), "CUDA 9.0 (H100)": (9, 0),
            "CUDA 10.0 (B200)": (10, 0), "CUDA 12.0 (RTX 5090)": (12, 0), "CPU": None}
PACKAGES = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "triton": "3.7.1",
            "flash_attn.cute": "4.0.0b36"}
USES = {"training": {}, "with a window or segments": {"window": 256},
        "compiled, with a window": {"window": 256, "compiled": True},
        "decoding, static cache": {"grad": False, "cache": "static"}}
SCORES = ("scale", "softcap", "sinks", "alibi")


def markdown(rows: Iterable[dict[str, str]]) -> str:
    first, *rest = rows
    lines = [f"| {' | '.join(cells)} |" for cells in (first, *(r.values() for r in (first, *rest)))]
    return "\n".join([lines[0], "|---" * len(first) + "|", *lines[1:]])


def overview() -> str:
    rows = []
    for backend in BACKENDS.values():
        by_device = {d: [c for c in backend.caps if d in c.devices]
                     for caps in backend.caps for d in caps.devices}
        limits = []
        if not any(caps.grad for caps in backend.caps):
            limits = ["inference only"]
        elif few := [d for d, of in by_device.items() if not any(caps.grad for caps in of)]:
            limits = [f"on {' and '.join(few)} forward only"]
        if all(caps.dtypes == ("bfloat16",) for caps in backend.caps):
            limits.append("bfloat16 only")
        rows.append({"name": f"`{backend.name}`",
                     "runs on": ", ".join(place(d, of) for d, of in by_device.items()),
                     "what": "; ".join([backend.title, *limits])})
    return markdown(rows)


def place(device: str, rows: Sequence[Caps]) -> str:
    lows = [caps.min_capability for caps in rows if caps.min_capability]
    highs = [caps.max_capability for caps in rows if caps.max_capability]
    if lows and len(highs) == len(rows):
        first, last = dotted(min(lows)), dotted(max(highs))
        device += f" {first}" if first == last else f" {first} to {last}"
    elif lows:
        device += f" >= {dotted(min(lows))}"
    return device + " (interpreter)" * all(caps.interpreted for caps in rows)


def auto_order() -> str:
    """docs/ATTENTION.md: the first three of auto's order, each if those before it cannot run."""
    rows = []
    for name, capability in MACHINES.items():
        machine = Machine(name.split()[0].lower(), name, capability, "2.13.0", "13.0", PACKAGES)
        plain = Spec(12, 12, 64, "float16" if capability == (7, 5) else "bfloat16")
        rows.append({"machine": name})
        for use, changes in USES.items():
            found: list[str] = []
            while len(found) < 3 and found[-1:] != ["manual"]:
                with patch.dict(os.environ, {DISABLE: ",".join(found)}):
                    chosen = resolve("auto", replace(plain, **changes), machine)
                found.append(chosen.backend.name)
            rows[-1][use] = ", ".join(f"`{name}`" for name in found)
    return markdown(rows)


def table() -> str:
    return markdown(
        {"name": f"`{backend.name}`", **abilities(caps), "tried": tried(backend.name, caps)}
        for backend in BACKENDS.values() for caps in backend.caps)


def tried(name: str, caps: Caps) -> str:
    """By device where the row has several."""
    found = {d: TRIED.get((name, d), "ran" if d == "cpu" else "not tried") for d in caps.devices}
    newer = version(caps.min_torch or "0") > (2, 11)
    older = caps.min_capability and caps.min_capability < (8, 0) and caps.dtypes != ("float32",)
    if "cuda" in found and name in ON_H100 and not (newer or older):
        found["cuda"] = "H100"
    if len({*found.values()}) == 1:
        return found[caps.devices[0]]
    return "; ".join(f"{device}: {words}" for device, words in found.items())


def abilities(caps: Caps) -> dict[str, str]:
    yes = {True: "yes", False: "-"}
    multiple = f", multiple of {caps.head_dim_multiple}" if caps.head_dim_multiple > 1 else ""
    step, unordered = caps.dropout_step, caps.grad and not caps.deterministic
    caches = ", ".join(c for c in caps.caches if c != "none") or "-"
    if caps.page_multiple > 1:
        caches = caches.replace("paged", f"paged (pages of {caps.page_multiple} n tokens)")
    return {
        "device": ", ".join(place(device, [caps]) for device in caps.devices),
        "packages": ", ".join(p.replace(">=", " >= ") for p in caps.packages) or "-",
        "dtypes": "all" if caps.dtypes == DTYPES else ", ".join(caps.dtypes),
        "head_dim": (f"up to {caps.head_dim_max}" if caps.head_dim_max else "any") + multiple,
        **{name: yes[getattr(caps, name)] for name in ("window", "right", "segments")},
        "scores": ", ".join(n for n in SCORES if getattr(caps, n)) or "-",
        "dropout": f"multiples of {step:g}" if step else yes[caps.dropout],
        "backward": yes[caps.grad] + ", not deterministic" * unordered,
        "parts": yes[caps.lse],
        "caches": caches if "none" in caps.caches else f"only {caches}",
    }


def put(page: str, made: str) -> None:
    """Replace the table with this head."""
    path, head = ROOT / page, re.escape(made.partition("\n")[0])
    before, _, after = re.split(rf"^({head}(?:\n\|.*)*)", path.read_text("utf-8"), maxsplit=1,
                                flags=re.M)
    path.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    put("README.md", overview())
    put("docs/SUPPORT.md", table())
    put("docs/ATTENTION.md", auto_order())
