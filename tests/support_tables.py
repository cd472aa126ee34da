"""Write the tables of README.md and docs/SUPPORT.md from Caps: python tests/support_tables.py."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script

from attention import BACKENDS
from attention.caps import Caps, dotted, version
from attention.select import DISABLE, resolve
from attention.spec import DTYPES, Machine, Spec

ROOT = Path(__file__).resolve().parent.parent

# Tried on a device; legend in docs/SUPPORT.md. The tests run the rest of the CPU's rows.
COMPILED = "compiled, interpreted"  # tests/ptxas.py, and conftest.py's interpreter
# On an H100 with torch 2.11 (docs/LOG.md, 2026-11-26 and 2026-11-28).
ON_H100 = (
    "manual", "tiled", "sdpa", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa_math", "flex",
    "triton", "paged",
)
TRIED = {
    ("triton", "cuda"): COMPILED, ("triton", "cpu"): "interpreted", ("paged", "cuda"): COMPILED,
    **{(f"flash_attn_{n}", "cuda"): "stand-in" for n in (2, 3)},  # tests/test_flash.py
    ("flash_attn_4", "cuda"): "compiled, stand-in",  # docs/LOG.md, 2026-11-26
}


SCORES = ("scale", "softcap", "sinks", "alibi")


def overview() -> str:
    lines = ["| name | runs on | what |", "|---|---|---|"]
    for backend in BACKENDS.values():
        spread = dict.fromkeys(d for caps in backend.caps for d in caps.devices)
        places = (place(d, [c for c in backend.caps if d in c.devices]) for d in spread)
        what = "; ".join([backend.title, *limits(backend.caps)])
        lines.append(f"| `{backend.name}` | {', '.join(places)} | {what} |")
    return "\n".join(lines)


def limits(rows: Sequence[Caps]) -> list[str]:
    found = []
    if not any(caps.grad for caps in rows):
        found.append("inference only")
    elif forward := [d for d in ("cuda", "cpu") if (of := [c for c in rows if d in c.devices])
                     and not any(c.grad for c in of)]:  # fmt: skip
        found.append(f"on {', '.join(forward)} forward only")
    if all(caps.dtypes == ("bfloat16",) for caps in rows):
        found.append("bfloat16 only")
    return found


def auto_order() -> str:
    """docs/ATTENTION.md: auto's order, if all can run."""
    packages = {"flash_attn": "2.8.3", "flash_attn_interface": "3.0.0", "triton": "3.7.1",
                "flash_attn.cute": "4.0.0b36"}  # fmt: skip
    base = {"torch": "2.13.0", "cuda": "13.0", "packages": packages}
    gpus = {"7.5 (T4)": (7, 5), "8.0 (A100)": (8, 0), "9.0 (H100)": (9, 0),
            "10.0 (B200)": (10, 0), "12.0 (RTX 5090)": (12, 0)}  # fmt: skip
    machines = {f"CUDA {name}": Machine(device="cuda", name=name, capability=capability, **base)
                for name, capability in gpus.items()}  # fmt: skip
    machines["CPU"] = Machine(device="cpu", name="CPU", capability=None, **base)
    plain = Spec(n_head=12, n_kv_head=12, head_dim=64, dtype="bfloat16")
    uses = {
        "training": plain,
        "with a window or segments": replace(plain, window=256),
        "compiled, with a window": replace(plain, window=256, compiled=True),
        "decoding, static cache": replace(plain, grad=False, cache="static"),
    }
    lines = [f"| | {' | '.join(uses)} |", "|---" * (1 + len(uses)) + "|"]
    for name, machine in machines.items():
        dtype = "float16" if machine.capability and machine.capability < (8, 0) else "bfloat16"
        cells = [first_of(replace(spec, dtype=dtype), machine) for spec in uses.values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def first_of(spec: Spec, machine: Machine, most: int = 3) -> str:
    """The first of auto's order, each if those before it cannot run."""
    found: list[str] = []
    before = os.environ.pop(DISABLE, None)
    try:
        while len(found) < most and (not found or found[-1] != "manual"):
            os.environ[DISABLE] = ",".join(found)
            found.append(resolve("auto", spec, machine).backend.name)
    finally:
        os.environ.pop(DISABLE, None)
        if before is not None:
            os.environ[DISABLE] = before
    return ", ".join(f"`{name}`" for name in found)


def place(device: str, rows: list[Caps]) -> str:
    lows = [caps.min_capability for caps in rows if caps.min_capability]
    highs = [caps.max_capability for caps in rows if caps.max_capability]
    if lows and len(highs) == len(rows):
        first, last = dotted(min(lows)), dotted(max(highs))
        device += f" {first}" if first == last else f" {first} to {last}"
    elif lows:
        device += f" >= {dotted(min(lows))}"
    return device + (" (interpreter)" if all(caps.interpreted for caps in rows) else "")


def table() -> str:
    rows = [
        {"name": f"`{backend.name}`", **abilities(caps), "tried": tried(backend.name, caps)}
        for backend in BACKENDS.values()
        for caps in backend.caps
    ]
    lines = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows)])


def tried(name: str, caps: Caps) -> str:
    """By device where the row has several."""
    usual = {"cpu": "ran"}
    found = {d: TRIED.get((name, d), usual.get(d, "not tried")) for d in caps.devices}
    newer = version(caps.min_torch or "0") > (2, 11)
    older = caps.min_capability and caps.min_capability < (8, 0) and caps.dtypes != ("float32",)
    if "cuda" in found and name in ON_H100 and not (newer or older):
        found["cuda"] = "H100"
    by_words: dict[str, list[str]] = {}
    for device, words in found.items():
        by_words.setdefault(words, []).append(device)
    if len(by_words) == 1:
        return next(iter(by_words))
    return "; ".join(f"{', '.join(devices)}: {words}" for words, devices in by_words.items())


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
        "window": yes[caps.window],
        "right": yes[caps.right],
        "segments": yes[caps.segments],
        "scores": ", ".join(n for n in SCORES if getattr(caps, n)) or "-",
        "dropout": f"multiples of {step:g}" if step else yes[caps.dropout],
        "backward": yes[caps.grad] + (", not deterministic" if unordered else ""),
        "parts": "yes" if caps.lse else "-",
        "caches": caches if "none" in caps.caches else f"only {caches}",
    }


def write() -> None:
    put(ROOT / "README.md", overview())
    put(ROOT / "docs" / "SUPPORT.md", table())
    put(ROOT / "docs" / "ATTENTION.md", auto_order())


def put(page: Path, made: str) -> None:
    head = re.escape(made.partition("\n")[0])
    before, _, after = re.split(rf"^({head}(?:\n\|.*)*)", page.read_text("utf-8"), maxsplit=1,
                                flags=re.M)
    page.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    write()
