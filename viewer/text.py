"""Render a document for a terminal of 80 columns: one layer and head."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np

from viewer import document as doc
from viewer.document import unpack

WIDTH = 80
SHADES = ((0.7, "@"), (0.4, "#"), (0.2, "*"), (0.1, "+"), (0.05, "="), (0.02, "-"), (0.0, "."))
STEPS = 80  # lines of the tile walk


def render(document: doc.Document) -> str:
    """The whole document, lines of at most 80 characters."""
    about = document["about"]
    parts = (
        head(document),
        attention_map(document, about["layer"], about["head"]),
        tile_walk(document, about["layer"], about["head"]),
        caches(document["caches"]),
    )
    return "\n".join(line[:WIDTH].rstrip() for part in parts for line in [*part, ""])


def head(document: doc.Document) -> list[str]:
    a, layers = document["about"], document["maps"]["layers"]
    shared = "" if a["n_kv_head"] == a["n_head"] else f" ({a['n_kv_head']} for keys and values)"
    right = sum(x["agrees"] for x in layers)
    lines = wrap(
        f"{a['source']}: {a['n_layer']} layers, {a['n_head']} heads{shared} of {a['head_dim']} "
        f"numbers, {a['n_params']:,} parameters, {a['dtype']} on {a['device']}.",
        f"{a['announced']}.",
    )
    lines += refusals(a["refused"])
    lines += wrap(
        f"It agrees with manual in float64 in {right} of {len(layers)} layers: error up to "
        f"{max(x['error'] for x in layers):.2g}."
    )
    if right < len(layers):
        wrong = ", ".join(str(n) for n, x in enumerate(layers) if not x["agrees"])
        lines += wrap(f"WARNING: does NOT agree in layer {wrong}: the maps show manual.")
    return lines + wrap(*a["notes"])


def refusals(refused: list[doc.Refused]) -> list[str]:
    return wrap(*(f"{r['name']} was refused: {'; '.join(r['why'])}." for r in refused))


def attention_map(document: doc.Document, layer: int, head: int) -> list[str]:
    a, maps = document["about"], document["maps"]
    labels, T = [t["label"] for t in a["tokens"]], len(a["tokens"])
    P = np.zeros((T, T))
    P[np.tril_indices(T)] = unpack(maps["weights"])[layer, head] / maps["levels"]
    wide, n = min(8, max(map(len, labels))), len(str(T - 1))
    group = -(-T // (WIDTH - 2 * (n + wide + 4)))  # tokens a column
    shades = ", ".join(f"{c} from {low:g}" for low, c in SHADES[::-1])
    lines = title(f"MAP of layer {layer}, head {head}")
    lines += wrap(f"A row is a query; each row sums to 1. {shades}. Blank: masked.")
    if group > 1:
        lines += wrap(f"Every {group}th of {T} rows; a column is the sum over {group} tokens.")
    starts = range(0, T, group)
    axis = "".join(labels[j][0] for j in starts) if group == 1 else ""
    lines += ["", f"{'':{n + wide + 2}}{axis:<{len(starts)}} most"]
    for i in range(group - 1, T, group):
        first, stop = maps["seen"][i]
        cells = "".join(
            shade(float(P[i, j : j + group].sum())) if j < stop and first < j + group else " "
            for j in starts
        )
        j = int(P[i].argmax())
        query, key = f"{i:>{n}} {labels[i][:wide]:>{wide}}", f"{j:>{n}} {labels[j][:wide]:<{wide}}"
        lines.append(f"{query} {cells} {key} {P[i, j]:.2f}")
    return lines


def shade(weight: float) -> str:
    return next(c for low, c in SHADES if weight >= low)


def tile_walk(document: doc.Document, layer: int, head: int) -> list[str]:
    tiles, traced = document["tiles"], document["tiles"]["heads"][head]
    scores, m, l, rescale = map(
        unpack, (traced["scores"], traced["m"], traced["l"], traced["rescale"])
    )
    walked = [s for s in tiles["steps"] if not s["skipped"]]
    lines = title(f"TILES of layer {layer}, head {head}: FlashAttention in plain PyTorch")
    lines += wrap(
        f"{len(walked):,} of {len(tiles['steps']):,} tiles of {tiles['block_m']} queries by "
        f"{tiles['block_n']} keys are computed, each with {amount(tiles['fast_memory'])} on chip. "
        "m: largest score so far, l: sum of exp(s - m), rescale: factor of the old output, each "
        "from the smallest to the largest row. read: bytes so far."
    )
    if tiles["n_cols"] <= (WIDTH - 12) // 5:
        lines += ["", *grid(tiles["steps"], tiles["n_cols"], scores)]
    columns = f"{'tile':>7} {'queries':>9} {'keys':>9}{'m':>16}{'l':>14}{'rescale':>12}{'read':>9}"
    lines += ["", columns]
    for at, s in enumerate(walked[:STEPS]):
        lines.append(
            f"{s['i']:>4},{s['j']:<2} {span(s['rows']):>9} {span(s['cols']):>9}"
            f"{between(m[at], 1):>16}{between(l[at], 1):>14}{between(rescale[at], 2):>12}"
            f"{amount(s['read_so_far']):>9}"
        )
    if len(walked) > STEPS:
        lines += wrap(f"... and {len(walked) - STEPS} more; the HTML page has all.")
    lines += ["", f"{'':10}{'read':>12}{'written':>12}"]
    for name, end in (("tiled", tiles["steps"][-1]), ("manual", tiles["manual"][-1])):
        read, written = amount(end["read_so_far"]), amount(end["written_so_far"])
        lines.append(f"{name:10}{read:>12}{written:>12}")
    return lines + verdict("The output of tiled", traced)


def grid(
    steps: Sequence[doc.TileStep], n_cols: int, scores: Sequence[np.ndarray] | np.ndarray
) -> list[str]:
    """The grid of tiles: / partly masked, x wholly visible, . skipped."""
    signs = [
        "." if (at := step["at"]) is None else "/" if np.isneginf(scores[at]).any() else "x"
        for step in steps
    ]
    lines = [" " * 12 + "".join(f"{f'K_{j}':>5}" for j in range(n_cols))]
    for row in range(0, len(steps), n_cols):
        cells = "".join(f"{c:>5}" for c in signs[row : row + n_cols])
        lines.append(f"{f'Q_{row // n_cols}':>12}{cells}")
    return [*lines, "", "            x wholly visible   / partly masked   . skipped"]


def verdict(name: str, found: doc.Compared) -> list[str]:
    agrees = "agrees" if found["error"] <= found["allowed"] else "does NOT agree"
    return wrap(
        f"{name} {agrees} with float64: error {found['error']:.2g}, allowed "
        f"{found['allowed']:.2g}. Difference from manual: {found['difference']:.2g}."
    )


def caches(found: doc.Caches) -> list[str]:
    what = "the model's likeliest next token" if found["predicted"] else "the prompt's last token"
    lines = title("CACHES: one decode step")
    lines += wrap(
        f"Token {found['position']} ({found['token']['label']!r}, {what}) is decoded. A token "
        f"takes {amount(found['bytes_per_token'])} in all layers. W written, r read and attended "
        "to, m read but masked, s stored, not read, . empty."
    )
    for step in found["steps"]:
        sizes = amount(step["bytes_allocated"]), amount(step["bytes_used"])
        name = f"{step['kind']}, by {step['backend']}"
        lines += ["", *wrap(f"{name}: {sizes[0]} allocated, {sizes[1]} used.")]
        lines += [*refusals(step["refused"]), *cells(step)]
    agree = "agree" if found["agree"] else "do NOT agree"
    error = f"error {max(s['error'] for s in found['steps']):.2g}, allowed {found['allowed']:.2g}"
    return [*lines, "", *wrap(f"The logits {agree} with those without a cache: {error}.")]


def cells(step: doc.CacheStep) -> list[str]:
    """The cells of one cache, a character each; one line a page."""
    signs = ["s" if position >= 0 else "." for position in step["holds"]]
    for sign, places in (("m", step["read"]), ("r", step["seen"]), ("W", step["written"])):
        for c in places:
            signs[c] = sign
    drawn, size, table = "".join(signs), step["page_size"], step["page_table"]
    if size is None:
        return [f"  {at:>4} {drawn[at : at + 64]}" for at in range(0, len(drawn), 64)]
    uses = {0: "for padding"} | {page: f"page {n} of the text" for n, page in enumerate(table)}
    return [
        f"  page {page:<3} {drawn[page * size : (page + 1) * size]}  {uses.get(page, 'free')}"
        for page in range(len(drawn) // size)
    ]


# --- words and numbers ---


def title(text: str) -> list[str]:
    return [text, "-" * min(len(text), WIDTH)]


def wrap(*texts: str) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def amount(n: float) -> str:
    """Three digits and a unit: "12.3 MB"."""
    for unit in ("B", "kB", "MB"):
        if n < 999.5:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:.3g} GB"


def span(ends: Sequence[int]) -> str:
    return f"{ends[0]}..{ends[1] - 1}"


def between(values: np.ndarray, digits: int) -> str:
    """Smallest and largest value; NaN is padding."""
    return f"{np.nanmin(values):.{digits}f}..{np.nanmax(values):.{digits}f}"
