"""What each backend declares, as the tables of README.md and docs/SUPPORT.md.

python -m attention.support        writes both anew; a test says when that is due
"""

from __future__ import annotations

import re
from pathlib import Path

from attention.select import BACKENDS
from attention.spec import DTYPES, Backend, Caps, dotted

ROOT = Path(__file__).resolve().parent.parent


def overview() -> str:
    """A row for each backend, with the devices of all its rows of Caps."""
    lines = ["| name | what | runs on | falls back to |", "|---|---|---|---|"]
    for backend in BACKENDS.values():
        rows = [caps for caps in backend.caps if not caps.hub_kernels]
        spread = dict.fromkeys(device for caps in rows for device in caps.devices)
        places = [place(device, [c for c in rows if device in c.devices]) for device in spread]
        after = f"`{backend.fallback}`" if backend.fallback else "nothing"
        lines.append(f"| {names(backend)} | {backend.title} | {', '.join(places)} | {after} |")
    return "\n".join(lines)


def place(device: str, rows: list[Caps]) -> str:
    """A device, with the compute capabilities of all its rows together."""
    lows = [caps.min_capability for caps in rows if caps.min_capability]
    highs = [caps.max_capability for caps in rows]
    if lows and all(highs):
        last = max(high for high in highs if high)
        device += f" {dotted(min(lows))}" + (f" to {dotted(last)}" if last != min(lows) else "")
    elif lows:
        device += f" >= {dotted(min(lows))}"
    return device + (" (interpreter)" if all(caps.interpreted for caps in rows) else "")


def names(backend: Backend) -> str:
    return " ".join(f"`{n}`" for n in (backend.name, *backend.aliases))


def table() -> str:
    """A row for each row of Caps, less those that only say "the same with a kernel of the hub"."""
    titles = ("name", "device", "packages", "dtypes", "head_dim", "window", "segments", "dropout",
              "backward", "caches")  # fmt: skip
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for backend in BACKENDS.values():
        for caps in backend.caps:
            if not caps.hub_kernels:
                cells = (f"`{backend.name}`", where(caps), *abilities(caps))
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def where(caps: Caps) -> str:
    """The devices of a row, with the compute capabilities."""
    device = ", ".join(caps.devices)
    low, high = caps.min_capability, caps.max_capability
    if low:
        last = f" to {dotted(high)}" if high and high != low else ""
        device += f" {'' if high else '>= '}{dotted(low)}{last}"
    return device + (" (Triton's interpreter)" if caps.interpreted else "")


def abilities(caps: Caps) -> tuple[str, ...]:
    """The cells of a row from "packages" to "caches"."""

    def yes(has: bool) -> str:
        return "yes" if has else "no"

    head_dim = f"up to {caps.head_dim_max}" if caps.head_dim_max else "any"
    if caps.head_dim_multiple > 1:
        head_dim += f", multiple of {caps.head_dim_multiple}"
    dropout = f"multiples of {caps.dropout_step:g}" if caps.dropout_step else yes(caps.dropout)
    backward = yes(caps.grad)
    if caps.grad and not caps.deterministic:
        backward = "yes, not deterministic"
    caches = ", ".join(c for c in caps.caches if c != "none") or "no"
    if caps.page_multiple > 1:
        caches = caches.replace("paged", f"paged (pages of {caps.page_multiple} n tokens)")
    if "none" not in caps.caches:
        caches = f"only {caches}"
    return (
        ", ".join(p.replace(">=", " >= ") for p in caps.packages) or "none",
        "all" if caps.dtypes == DTYPES else ", ".join(caps.dtypes),
        head_dim,
        yes(caps.window),
        yes(caps.segments),
        dropout,
        backward,
        caches,
    )


def write() -> None:
    """Put both tables into their pages, in place of the ones that are there; the README may have
    none."""
    for page, made in ((ROOT / "README.md", overview()), (ROOT / "docs" / "SUPPORT.md", table())):
        head = re.escape(" | ".join(made.split(" | ")[:2]))
        text = page.read_text(encoding="utf-8")
        parts = re.split(rf"^({head}.*(?:\n\|.*)*)", text, maxsplit=1, flags=re.M)
        if len(parts) == 3:
            page.write_text(parts[0] + made + parts[2], encoding="utf-8")


if __name__ == "__main__":
    write()
