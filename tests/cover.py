"""README's picture, as SVG: attention of a model, and a record's speed, MFU and memory.

    make train
    python explain.py --prompt="To be, or not to be" --json=numbers.json
    python tests/cover.py numbers.json bench/records/NAME > docs/cover.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # as a script

from core.settings import UserError, exit_on_user_error
from viewer.document import Document, unpack

HEADS = 4
CELL = 7  # pixels
LEFT, TOP = 34, 58  # of the first map
NAMES = {"nanogpt": "nanoGPT"}
CHARTS = (  # title, figure of a row, its unit, format
    ("MFU, %: higher is better", "mfu", 0.01, "{:.1f}"),
    ("tokens per second", "tokens_per_s", 1, "{:,.0f}"),
    ("memory, GB: lower is better", "memory_bytes", 1e9, "{:.1f}"),
)
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {height}" role="img">
<title>{title}</title>
<style>
text {{ font: 13px ui-sans-serif, system-ui, sans-serif; fill: #1f2328 }}
.bold {{ font-weight: 600 }} .small {{ font-size: 11px; fill: #59636e }}
.mono {{ font: 7.5px ui-monospace, monospace }} .end {{ text-anchor: end }}
.middle {{ text-anchor: middle }}
.cell {{ fill: #0969da }} .ours {{ fill: #0969da }} .other {{ fill: #afb8c1 }}
.frame {{ fill: none; stroke: #d1d9e0 }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3 }} .small {{ fill: #9198a1 }} .frame {{ stroke: #3d444d }}
  .cell, .ours {{ fill: #58a6ff }} .other {{ fill: #656c76 }}
}}
</style>"""


def text(x: float, y: float, words: str, kind: str = "") -> str:
    safe = words.replace("&", "&amp;").replace("<", "&lt;")
    return f'<text x="{x:g}" y="{y:g}" class="{kind}">{safe}</text>'


def maps(document: Document) -> list[str]:
    found, labels = document["maps"], [token["label"] for token in document["about"]["tokens"]]
    T, weights = len(labels), unpack(found["weights"]) / found["levels"]  # (L, H, T (T + 1) / 2)
    lines = []
    for n, entropy in enumerate(found["entropy"][:HEADS]):
        head = int(np.argmin(entropy))
        x0, y0 = LEFT + n % 2 * (T * CELL + 40), TOP + n // 2 * (T * CELL + 40)
        lines.append(text(x0, y0 - 15, f"layer {n}, head {head}", "bold"))
        for i, label in enumerate(labels):
            lines.append(text(x0 - 5, y0 + i * CELL + 6, label, "mono end"))
            lines.append(text(x0 + i * CELL + 4, y0 - 4, label, "mono middle"))
        for row, column, p in zip(*np.tril_indices(T), weights[n, head]):
            size = f'width="{CELL}" height="{CELL}" fill-opacity="{p**0.5:.2f}"'
            at = f'x="{x0 + column * CELL}" y="{y0 + row * CELL}"'
            lines += [f'<rect {at} {size} class="cell"/>'] if p >= 0.02 else []
        lines.append(f'<path d="M{x0} {y0}v{T * CELL}h{T * CELL}z" class="frame"/>')
    return lines


def bars(record: dict[str, Any], x0: float) -> list[str]:
    rows = [row for row in record["rows"] if row["status"] == "ok"]
    lines, y = [], TOP
    for title, key, unit, shown in CHARTS:
        lines.append(text(x0, y - 10, title, "bold"))
        largest = max(row[key] for row in rows)
        for row in rows:
            name = NAMES.get(row["backend"], row["backend"])
            width = 300 * row[key] / largest
            size = f'width="{width:.1f}" height="16" rx="2"'
            kind = "ours" if name == row["backend"] else "other"
            lines.append(f'<rect x="{x0 + 92}" y="{y + 2}" {size} class="{kind}"/>')
            lines.append(text(x0, y + 14, name))
            lines.append(text(x0 + 98 + width, y + 14, shown.format(row[key] / unit)))
            y += 21
        y += 36
    return lines


def draw(document: Document, record: dict[str, Any]) -> str:
    settings, machine = record["settings"], record["machine"]
    side = len(document["about"]["tokens"]) * CELL
    x0, height = LEFT + 2 * side + 100, TOP + 2 * side + 54
    what = f"batch {settings['batch_size']}, {settings['block_size']:,} tokens, {machine['dtype']}"
    return "\n".join([
        HEAD.format(height=height, title="Attention of a small GPT; its kernels next to nanoGPT"),
        text(LEFT, 22, "A minute of make train: attention of its model", "bold"),
        text(x0, 22, f"Training GPT-2 124M, {machine['name']}", "bold"),
        *maps(document), *bars(record, x0),
        text(x0, height - 12, f"{what}, compiled; interleaved rounds, medians", "small"),
        "</svg>",
    ])  # fmt: skip


def main(argv: list[str]) -> int:
    if len(argv) != 2:
        raise UserError("expected explain.py's JSON file and a record's folder")
    numbers, record = Path(argv[0]), Path(argv[1]) / "record.json"
    print(draw(*(json.loads(path.read_text(encoding="utf-8")) for path in (numbers, record))))
    return 0


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
