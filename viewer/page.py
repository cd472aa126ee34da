"""Views of a document: one HTML file, safe for any prompt (inserted as text, and the content
security policy allows only the page's own script), and 80 columns of text."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import textwrap
from pathlib import Path

import numpy as np

from viewer.document import Document, unpack

WIDTH = 80
SHADES = ((0.7, "@"), (0.4, "#"), (0.2, "*"), (0.1, "+"), (0.05, "="), (0.02, "-"), (0.0, "."))
SCRIPTS = ("page_common.js", "page_tiles.js", "page_maps.js")


def render(document: Document) -> str:
    """HTML, to be written as UTF-8."""
    css, template = _read("page.css"), _read("page.html")
    js = "\n".join(map(_read, SCRIPTS))
    # No "<": it could end the script block.
    data = json.dumps(document, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {
        "title": html.escape(" ".join(document["about"]["prompt"].split())[:80]),
        "policy": f"default-src 'none'; img-src data:; style-src {_hash(css)}; "
        f"script-src {_hash(js)}; base-uri 'none'; form-action 'none'",
        "css": css,
        "document": data,
        "js": js,
    }
    # In one pass: inserted text may contain a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark[1]], template)


def _read(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# --- in a terminal ---


def as_text(document: Document) -> str:
    """One layer and head in 80 columns."""
    lines = [*head(document), "", *attention_map(document), ""]
    return "\n".join(line[:WIDTH].rstrip() for line in lines)


def head(document: Document) -> list[str]:
    a, layers = document["about"], document["maps"]["layers"]
    shared = "" if a["n_kv_head"] == a["n_head"] else f" ({a['n_kv_head']} for keys and values)"
    wrong = [n for n, layer in enumerate(layers) if not layer["agrees"]]
    lines = [
        f"{a['source']}: {a['n_layer']} layers, {a['n_head']} heads{shared} of {a['head_dim']} "
        f"numbers, {a['n_params']:,} parameters, {a['dtype']} on {a['device']}.",
        f"{a['announced']}.",
        *(f"{r['name']} was refused: {'; '.join(r['why'])}." for r in a["refused"]),
        f"It agrees with manual in float64 in {len(layers) - len(wrong)} of {len(layers)} layers: "
        f"error up to {max(x['error'] for x in layers):.2g}.",
    ]
    if wrong:
        names = ", ".join(map(str, wrong))
        lines.append(f"WARNING: does NOT agree in layer {names}: the maps show manual.")
    return wrap(*lines, *a["notes"])


def attention_map(document: Document) -> list[str]:
    a, maps = document["about"], document["maps"]
    layer, head = a["layer"], a["head"]
    labels, T = [t["label"] for t in a["tokens"]], len(a["tokens"])
    P = np.zeros((T, T))
    P[np.tril_indices(T)] = unpack(maps["weights"])[layer, head] / maps["levels"]
    wide, n = min(8, max(map(len, labels))), len(str(T - 1))
    group = -(-T // (WIDTH - 2 * (n + wide + 4)))  # tokens a column
    shades = ", ".join(f"{c} from {low:g}" for low, c in SHADES[::-1])
    title = f"MAP of layer {layer}, head {head}: entropy {maps['entropy'][layer][head]:.2f} nats"
    lines = [title, "-" * len(title)]
    lines += wrap(f"A row is a query; each row sums to 1. {shades}. Blank: masked.")
    if group > 1:
        lines += wrap(f"Every {group}th of {T} rows; a column is the sum over {group} tokens.")
    starts = range(0, T, group)
    axis = "".join(labels[j][0] for j in starts) if group == 1 else ""
    lines += ["", f"{'':{n + wide + 2}}{axis:<{len(starts)}} most"]
    for i in range(group - 1, T, group):
        first, stop = maps["seen"][layer][i]
        sums = {j: P[i, j : j + group].sum() for j in starts if j < stop and first < j + group}
        shown = (sums.get(j, -1.0) for j in starts)
        cells = "".join(next((c for low, c in SHADES if x >= low), " ") for x in shown)
        j = int(P[i].argmax())
        query, key = f"{i:>{n}} {labels[i][:wide]:>{wide}}", f"{j:>{n}} {labels[j][:wide]:<{wide}}"
        lines.append(f"{query} {cells} {key} {P[i, j]:.2f}")
    return lines


def wrap(*texts: str) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)]
