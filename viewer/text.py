"""Render a document for a terminal of 80 columns: one layer and head."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import product

import numpy as np

from viewer.document import (
    Beside,
    Caches,
    CacheStep,
    Costs,
    Document,
    Played,
    Refused,
    TileStep,
    unpack,
)

WIDTH = 80
SHADES = ((0.7, "@"), (0.4, "#"), (0.2, "*"), (0.1, "+"), (0.05, "="), (0.02, "-"), (0.0, "."))
STEPS = 80  # lines of the tile walk


def render(document: Document) -> str:
    """The whole document, lines of at most 80 characters."""
    about = document["about"]
    parts = (
        head(document),
        attention_map(document, about["layer"], about["head"]),
        tile_walk(document, about["layer"], about["head"]),
        caches(document["caches"]),
        costs(document["costs"], about["n_head"]),
        ring(document["ring"], len(about["tokens"])),
    )
    return "\n".join(line[:WIDTH].rstrip() for part in parts for line in [*part, ""])


def head(document: Document) -> list[str]:
    a = document["about"]
    shared = "" if a["n_kv_head"] == a["n_head"] else f" ({a['n_kv_head']} for keys and values)"
    lines = wrap(
        f"{a['source']}: {a['n_layer']} layers, {a['n_head']} heads{shared} of {a['head_dim']} "
        f"numbers, {a['n_params']:,} parameters, {a['dtype']} on {a['device']}."
    )
    lines += wrap(f"{a['announced']}.")
    lines += refusals(a["refused"])
    layers = document["maps"]["layers"]
    wrong = [str(layer) for layer, x in enumerate(layers) if not x["agrees"]]
    lines += wrap(
        f"It agrees with manual in float64 in {len(layers) - len(wrong)} of {len(layers)} layers: "
        f"error up to {max(x['error'] for x in layers):.2g}."
    )
    if wrong:
        lines += wrap(f"WARNING: does NOT agree in layer {', '.join(wrong)}: the maps show manual.")
    return lines + wrap(*a["notes"])


def refusals(refused: list[Refused]) -> list[str]:
    return wrap(*(f"{r['name']} was refused: {'; '.join(r['why'])}." for r in refused))


def attention_map(document: Document, layer: int, head: int) -> list[str]:
    a, maps = document["about"], document["maps"]
    labels, T = [t["label"] for t in a["tokens"]], len(a["tokens"])
    P = np.zeros((T, T))
    P[np.tril_indices(T)] = unpack(maps["weights"])[layer, head] / maps["levels"]
    wide, n = min(8, max(map(len, labels))), len(str(T - 1))
    group = -(-T // (WIDTH - 2 * (n + wide + 4)))  # tokens a column
    lines = title(f"MAP of layer {layer}, head {head}")
    shades = ", ".join(f"{c} from {low:g}" for low, c in SHADES[::-1])
    hidden = f", outside the window of {a['window']}" if a["window"] else ""
    hidden += ", in another document" if a["segments"] else ""
    lines += wrap(f"A row is a query; each row sums to 1. {shades}. Blank: later{hidden}.")
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


def tile_walk(document: Document, layer: int, head: int) -> list[str]:
    tiles, T = document["tiles"], len(document["about"]["tokens"])
    traced = tiles["heads"][head]
    steps, scores = tiles["steps"], unpack(traced["scores"])
    walked = [s for s in steps if not s["skipped"]]
    lines = title(f"TILES of layer {layer}, head {head}: FlashAttention in plain PyTorch")
    lines += wrap(
        f"{count(T, 'query', 'queries')} in blocks of {tiles['block_m']}, {count(T, 'key')} in "
        f"blocks of {tiles['block_n']}; {len(walked):,} of {count(len(steps), 'tile')} are "
        f"computed, each with {amount(tiles['fast_memory'])} on chip. m: largest score of a row so "
        "far, l: sum of exp(s - m), rescale: factor of the old output, from the smallest to the "
        "largest row. read: bytes so far, all heads."
    )
    if tiles["n_cols"] <= (WIDTH - 12) // 5:
        lines += ["", *grid(steps, tiles["n_cols"], scores)]
    lines += [
        "",
        f"{'tile':>7} {'queries':>9} {'keys':>9}{'m':>16}{'l':>14}{'rescale':>12}{'read':>9}",
    ]
    m, l, rescale = (unpack(traced[name]) for name in ("m", "l", "rescale"))
    for at, s in enumerate(walked[:STEPS]):
        lines.append(
            f"{s['i']:>4},{s['j']:<2} {span(s['rows']):>9} {span(s['cols']):>9}"
            f"{between(m[at], 1):>16}{between(l[at], 1):>14}{between(rescale[at], 2):>12}"
            f"{amount(s['read_so_far']):>9}"
        )
    if len(walked) > STEPS:
        lines += wrap(f"... and {len(walked) - STEPS} more lines; the HTML page has all of them.")
    lines += ["", f"{'':10}{'read':>12}{'written':>12}"]
    for name, end in (("tiled", steps[-1]), ("manual", tiles["manual"][-1])):
        read, written = amount(end["read_so_far"]), amount(end["written_so_far"])
        lines.append(f"{name:10}{read:>12}{written:>12}")
    return lines + beside("The output of tiled", traced)


def grid(
    steps: Sequence[TileStep], n_cols: int, scores: Sequence[np.ndarray] | np.ndarray
) -> list[str]:
    """The grid of tiles: / partly masked, x wholly visible, . skipped."""
    lines = [" " * 12 + "".join(f"{f'K_{j}':>5}" for j in range(n_cols))]
    for row in range(0, len(steps), n_cols):
        cells = [
            "." if (at := step["at"]) is None else "/" if np.isneginf(scores[at]).any() else "x"
            for step in steps[row : row + n_cols]
        ]
        lines.append(f"{f'Q_{row // n_cols}':>12}" + "".join(f"{c:>5}" for c in cells))
    return [*lines, "", "            x wholly visible   / partly masked   . skipped"]


def ring(found: Played, T: int) -> list[str]:
    n, c, visits = found["n"], found["chunk"], found["tiles"]
    many = count(n, "process", "processes")
    lines = title(f"RING of layer {found['layer']}, head {found['head']}: {many}")
    lines += wrap(
        f"{count(T, 'token')} in {2 * n} chunks of {c}. Queries stay, keys and values move. "
        "A pair is a chunk of queries and one of keys; /: partly masked; others are skipped."
    )
    lines += ["", f"{'step':>4}{'process':>9}{'K, V of':>9}  {'pairs':38}{'sent so far':>12}"]
    for step, rank in product(range(n), range(n)):
        mine = (t for t in visits if (t["step"], t["rank"]) == (step, rank))
        pairs = " ".join(f"{t['queries']},{t['keys']}{'/' * t['masked']}" for t in mine)
        sent = amount(sum(at[rank] for at in found["sent"][: step + 1]))
        lines.append(f"{step:>4}{rank:>9}{found['homes'][step][rank]:>9}  {pairs:38}{sent:>12}")
    lines += ["", f"The last query, {T - 1}, tile by tile:", ""]
    lines.append(f"{'step':>4}{'keys':>13}{'L of these':>12}{'L so far':>12}{'|O|':>12}")
    part, L, O = (unpack(found[name])[:, (T - 1) % c] for name in ("part", "L", "O"))
    for n_, t in enumerate(visits):
        if t["queries"] == (T - 1) // c:
            keys, size = span([t["keys"] * c, (t["keys"] + 1) * c]), float(np.linalg.norm(O[n_]))
            lines.append(f"{t['step']:>4}{keys:>13}{part[n_]:>12.4f}{L[n_]:>12.4f}{size:>12.4f}")
    return lines + beside("The ring's output", found)


def beside(name: str, found: Beside) -> list[str]:
    agrees = "agrees" if found["error"] <= found["allowed"] else "does NOT agree"
    return wrap(
        f"{name} {agrees} with float64: error {found['error']:.2g}, allowed "
        f"{found['allowed']:.2g}. Difference from manual: {found['difference']:.2g}."
    )


def caches(found: Caches) -> list[str]:
    token, n = found["token"], len(found["prompt"])
    what = "the model's likeliest next token" if found["predicted"] else "the prompt's last token"
    lines = title("CACHES: one decode step")
    lines += wrap(
        f"{count(n, 'token')} stored; token {found['position']} ({token['label']!r}, {what}) is "
        f"decoded. A token takes {amount(found['bytes_per_token'])} in all layers. W written, r "
        "read and attended to, m read but masked, s stored, not read, . empty."
    )
    for step in found["steps"]:
        lines += ["", *wrap(
            f"{step['kind']}, by {step['backend']}: {amount(step['bytes_allocated'])} allocated, "
            f"{amount(step['bytes_used'])} used."
        ), *refusals(step["refused"])]  # fmt: skip
        lines += cells(step)
    said = "agree" if found["agree"] else "do NOT agree"
    worst = max(step["error"] for step in found["steps"])
    lines += ["", *wrap(
        f"The logits {said} with those without a cache: error {worst:.2g}, allowed "
        f"{found['allowed']:.2g}."
    )]  # fmt: skip
    return lines


def cells(step: CacheStep) -> list[str]:
    """The cells of one cache, a character each; one line a page."""
    signs = ["s" if position >= 0 else "." for position in step["holds"]]
    for sign, places in (("m", step["read"]), ("r", step["seen"]), ("W", step["written"])):
        for c in places:
            signs[c] = sign
    drawn, size = "".join(signs), step["page_size"]
    if size is None:
        return [f"  {at:>4} {drawn[at : at + 64]}" for at in range(0, len(drawn), 64)]
    lines = []
    for page in range(len(drawn) // size):
        what = "for padding" if page == 0 else "free"
        if page in step["page_table"]:
            first = step["page_table"].index(page) * size
            what = f"tokens {first} to {min(first + size, max(step['holds']) + 1) - 1}"
        lines.append(f"  page {page:<3} {drawn[page * size : (page + 1) * size]}  {what}")
    table = " ".join(map(str, step["page_table"]))
    return [*lines, *wrap(f"page table [{table}]")]


def costs(found: Costs, n_head: int) -> list[str]:
    lines = title(f"COST on one {found['gpu']}, {found['dtype']}")
    lines += wrap(
        f"One layer forward, batch 1, {n_head} heads, tiles of {found['block_m']} x "
        f"{found['block_n']}, the largest that fit into {amount(found['fast_memory'])}. Peak "
        f"{found['peak'] / 1e12:,.4g} TFLOP/s ({found['peak_source']}), "
        f"{found['bandwidth'] / 1e9:,.4g} GB/s ({found['bandwidth_source']}). Ridge: "
        f"{found['ridge']:.0f} FLOPs a byte (F/B). time: the least possible."
    )
    lines += ["", f"{'':8}{'manual':^36}{'tiled':^36}",
              f"{'T':>7} " + f"{'FLOPs':>9}{'bytes':>9}{'F/B':>6}{'time':>10}  " * 2]  # fmt: skip
    for row in found["rows"]:
        cells = (
            f"{scaled(c['flops']):>9}{scaled(c['bytes']):>9}{c['intensity']:>6.0f}"
            f"{duration(c['seconds']):>8} {c['bound'][0]}  "
            for c in (row["manual"], row["tiled"])
        )
        lines.append(f"{row['T']:>7,} {''.join(cells)}")
    return [*lines, "", "m: memory-bound, c: compute-bound"]


# --- words and numbers ---


def title(text: str) -> list[str]:
    return [text, "-" * min(len(text), WIDTH)]


def wrap(*texts: str) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def count(n: int, one: str, many: str = "") -> str:
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def scaled(n: float, units: Sequence[str] = ("", "k", "M", "G", "T")) -> str:
    """Three digits and a unit: "12.3 M"."""
    for unit in units:
        if n < 999.5 or unit == units[-1]:
            break
        n /= 1000
    return f"{n:.3g} {unit}" if unit else f"{n:.0f}  "


def amount(n: int) -> str:
    return f"{scaled(n).rstrip()}{'B' if n >= 999.5 else ' B'}"


def duration(seconds: float) -> str:
    return scaled(seconds * 1e9, ("ns", "us", "ms", "s"))


def span(ends: Sequence[int]) -> str:
    return f"{ends[0]}..{ends[1] - 1}"


def between(values: np.ndarray, digits: int) -> str:
    """Smallest and largest value; NaN is padding."""
    there = values[~np.isnan(values)]
    low, high = (f"{v:.{digits}f}" for v in (there.min(), there.max()))
    return f"{low}..{high}"
