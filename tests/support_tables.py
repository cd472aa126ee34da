"""Write the tables of README.md and docs/SUPPORT.md from Caps: python tests/support_tables.py."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script

from attention import BACKENDS
from attention.caps import Caps, dotted, version
from attention.spec import DTYPES

ROOT = Path(__file__).resolve().parent.parent

# What has been tried of a backend, by device; the legend is in docs/SUPPORT.md. The tests run the
# rest of the rows for a CPU.
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
    """Return the table of the README: a row for each backend."""
    lines = ["| name | what | runs on | falls back to |", "|---|---|---|---|"]
    for backend in BACKENDS.values():
        spread = dict.fromkeys(d for caps in backend.caps for d in caps.devices)
        places = (place(d, [c for c in backend.caps if d in c.devices]) for d in spread)
        names = " ".join(f"`{n}`" for n in (backend.name, *backend.aliases))
        after = f"`{backend.fallback}`" if backend.fallback else "the list below"
        lines.append(f"| {names} | {backend.title} | {', '.join(places)} | {after} |")
    return "\n".join(lines)


def place(device: str, rows: list[Caps]) -> str:
    """Return a device with the range of its compute capabilities."""
    lows = [caps.min_capability for caps in rows if caps.min_capability]
    highs = [caps.max_capability for caps in rows if caps.max_capability]
    if lows and len(highs) == len(rows):
        first, last = dotted(min(lows)), dotted(max(highs))
        device += f" {first}" if first == last else f" {first} to {last}"
    elif lows:
        device += f" >= {dotted(min(lows))}"
    return device + (" (interpreter)" if all(caps.interpreted for caps in rows) else "")


def table() -> str:
    """Return the table of docs/SUPPORT.md: a row for each row of Caps."""
    rows = [
        {"name": f"`{backend.name}`", **abilities(caps), "tried": tried(backend.name, caps)}
        for backend in BACKENDS.values()
        for caps in backend.caps
    ]
    lines = [f"| {' | '.join(rows[0])} |", "|---" * len(rows[0]) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row.values())} |" for row in rows)])


def tried(name: str, caps: Caps) -> str:
    """Return what has been tried of a row, for each device where the row has several."""
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
    """Return column title -> cell."""
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


def put(page: Path, made: str) -> None:
    """Replace the table with the same head in a page."""
    head = re.escape(made.partition("\n")[0])
    before, _, after = re.split(rf"^({head}(?:\n\|.*)*)", page.read_text("utf-8"), maxsplit=1,
                                flags=re.M)
    page.write_text(before + made + after, encoding="utf-8")


if __name__ == "__main__":
    write()
