"""The document in a terminal: 80 columns, no colour, one layer and head."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import groupby, product

import numpy as np

from viewer.document import Beside, Caches, CacheStep, Costs, Document, Played, TileStep, unpack

WIDTH = 80
SHADES = ((0.7, "@"), (0.4, "#"), (0.2, "*"), (0.1, "+"), (0.05, "="), (0.02, "-"), (0.0, "."))
STEPS = 80  # lines of the tile walk


def render(document: Document) -> str:
    """The whole document, lines of at most 80 characters."""
    about = document["about"]
    parts = [
        head(document),
        attention_map(document, about["layer"], about["head"]),
        tile_walk(document, about["layer"], about["head"]),
        caches(document["caches"]),
        costs(document["costs"], about["n_head"]),
        ring(document["ring"], len(about["tokens"])),
    ]
    return "\n".join(line[:WIDTH].rstrip() for part in parts for line in [*part, ""])


def head(document: Document) -> list[str]:
    """What is shown, and which kernel it was."""
    a = document["about"]
    shared = "" if a["n_kv_head"] == a["n_head"] else f" ({a['n_kv_head']} for keys and values)"
    lines = wrap(
        f"{a['source']}: {a['n_layer']} layers, {a['n_head']} heads{shared} of {a['head_dim']} "
        f"numbers, {a['n_params']:,} parameters, {a['dtype']} on {a['device']}."
    )
    lines += wrap(f"{a['announced']}.")
    lines += wrap(*(f"Refused: {r['name']}, since {'; '.join(r['why'])}." for r in a["refused"]))
    layers = document["maps"]["layers"]
    worst = max(layers, key=lambda x: x["error"] / x["allowed"] if x["allowed"] else x["error"])
    n = sum(x["agrees"] for x in layers)
    lines += wrap(
        f"Its output agrees with manual's formula in {n} of {len(layers)} layers. The worst is off "
        f"by {worst['error']:.2g}, allowed is {worst['allowed']:.2g} (layer "
        f"{layers.index(worst)}, the truth in float64)."
    )
    lines += wrap(*(
        f"WARNING: layer {layer} does NOT agree: off by {x['error']:.2g}, allowed is "
        f"{x['allowed']:.2g}. The maps below are the formula's, not what ran."
        for layer, x in enumerate(layers) if not x["agrees"]
    ))  # fmt: skip
    return lines + wrap(*a["notes"])


def attention_map(document: Document, layer: int, head: int) -> list[str]:
    """Where each token looks, as shades."""
    a, maps = document["about"], document["maps"]
    labels, T = [t["label"] for t in a["tokens"]], len(a["tokens"])
    P = np.zeros((T, T))
    P[np.tril_indices(T)] = unpack(maps["weights"])[layer, head] / maps["levels"]
    wide, n = min(8, max(map(len, labels))), len(str(T - 1))
    group = -(-T // (WIDTH - 2 * (n + wide + 4)))  # tokens a column
    lines = title(f"MAP of layer {layer}, head {head}")
    shades = ", ".join(f"{c} from {low:g}" for low, c in SHADES[::-1])
    lines += wrap(
        "A row is a token, and how it spreads its attention over itself and those before it: each "
        f"row sums to 1. Shades: {shades}; blank: hidden"
        + (f", by the window of {a['window']}" if a["window"] else "")
        + (", by the border of a document" if a["segments"] else "")
        + ", or later."
    )
    if group > 1:
        lines += wrap(
            f"Of {T} tokens every {group}th row; a column is the sum over {group} tokens."
        )
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
    """The character of a weight."""
    return next(c for low, c in SHADES if weight >= low)


def tile_walk(document: Document, layer: int, head: int) -> list[str]:
    """The tiles of one head in order, and its output beside manual's."""
    tiles, T = document["tiles"], len(document["about"]["tokens"])
    steps, visited = tiles["steps"], sum(not step["skipped"] for step in tiles["steps"])
    lines = title(f"TILES of layer {layer}, head {head}: FlashAttention in plain PyTorch")
    traced = next(h for h in tiles["heads"] if (h["layer"], h["head"]) == (layer, head))
    lines += wrap(
        f"{count(T, 'query', 'queries')} in blocks of {tiles['block_m']}, {count(T, 'key')} in "
        f"blocks of {tiles['block_n']}. A tile needs {amount(tiles['fast_memory'])} of fast "
        "memory. m: running maximum of a row's scores, l: running sum of exp(s - m), rescale: "
        "what the old output is multiplied by; of each the least and the largest of the tile's "
        f"rows. Bytes: all heads, so far. Of {count(len(steps), 'tile')} {visited:,} are computed "
        f"and {len(steps) - visited:,} skipped."
    )
    scores = unpack(traced["scores"])
    if tiles["n_cols"] <= (WIDTH - 12) // 5 and tiles["n_rows"] <= 16:  # grid() is so wide
        lines += ["", *grid(steps, tiles["n_cols"], scores)]
    lines += [
        "",
        f"{'tile':>7} {'queries':>9} {'keys':>9}{'m':>16}{'l':>14}{'rescale':>12}{'read':>9}",
    ]
    m, l, rescale = (unpack(traced[name]) for name in ("m", "l", "rescale"))
    # Adjacent skipped tiles of a row share a line.
    by_line = groupby(steps, lambda s: (s["i"], -1 if s["skipped"] else s["j"]))
    walked = [list(line) for _, line in by_line]
    for first, *rest in walked[:STEPS]:
        name, at = f"{first['i']},{first['j']}", first["at"]
        if at is None:
            to = f" to {rest[-1]['i']},{rest[-1]['j']}" if rest else ""
            lines.append(f"{name:>7} skipped{to}: wholly masked, nothing is read")
            continue
        lines.append(
            f"{name:>7} {span(first['rows']):>9} {span(first['cols']):>9}{between(m[at], 1):>16}"
            f"{between(l[at], 1):>14}{between(rescale[at], 2):>12}{amount(first['read_so_far']):>9}"
        )
    if len(walked) > STEPS:
        lines += wrap(f"... and {len(walked) - STEPS} lines more; the page has all of them.")
    lines += ["", f"{'':10}{'read':>12}{'written':>12}"]
    for name, end in (("tiled", steps[-1]), ("manual", tiles["manual"][-1])):
        read, written = amount(end["read_so_far"]), amount(end["written_so_far"])
        lines.append(f"{name:10}{read:>12}{written:>12}")
    return lines + beside("The output of tiled", traced) + wrap(*tiles["notes"])


def grid(
    steps: Sequence[TileStep], n_cols: int, scores: Sequence[np.ndarray] | np.ndarray
) -> list[str]:
    """Which tiles are visited: / masked in part, x wholly visible, . skipped."""
    lines = [" " * 12 + "".join(f"{f'K_{j}':>5}" for j in range(n_cols))]
    for row in range(0, len(steps), n_cols):
        cells = [
            "." if (at := step["at"]) is None else "/" if np.isneginf(scores[at]).any() else "x"
            for step in steps[row : row + n_cols]
        ]
        lines.append(f"{f'Q_{row // n_cols}':>12}" + "".join(f"{c:>5}" for c in cells))
    return [*lines, "", "            x wholly visible   / masked in part   . skipped"]


def ring(found: Played, T: int) -> list[str]:
    """Whose keys and values are where at each step, and how (O, L) of the last query grows."""
    n, c, visits = found["n"], found["chunk"], found["tiles"]
    many = count(n, "process", "processes")
    lines = title(f"RING of layer {found['layer']}, head {found['head']}: {many}")
    lines += wrap(
        f"{count(T, 'token')} in {2 * n} chunks of {c}; what is behind the last one is filling. "
        "Queries stay, keys and values go round. A pair is a chunk of queries and one of keys, "
        "with / where entries are masked; pairs that are not named are skipped."
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
    """How far an output is from the formula and from manual's."""
    agrees = "agrees" if found["error"] <= found["allowed"] else "does NOT agree"
    return wrap(
        f"{name} {agrees} with the formula: off by {found['error']:.2g}, allowed is "
        f"{found['allowed']:.2g}; from manual's in the same dtype by {found['difference']:.2g}."
    )


def caches(found: Caches) -> list[str]:
    """One decode step with each cache."""
    token, n = found["token"], len(found["prompt"])
    what = "the model's likeliest next token" if found["predicted"] else "the prompt's last token"
    lines = title("CACHES: one decode step")
    lines += wrap(
        f"{count(n, 'token')} stored; token {found['position']} ({token['label']!r}, {what}) is "
        f"decoded. A token takes {amount(found['bytes_per_token'])} of keys and values "
        "in all layers. W written now, r read and attended to, m read and masked, s stored and not "
        "read, . empty."
    )
    for step in found["steps"]:
        refused = [f"{r['name']} was refused: {'; '.join(r['why'])}." for r in step["refused"]]
        lines += ["", *wrap(
            f"{step['kind']}, by {step['backend']}: {amount(step['bytes_allocated'])} allocated, "
            f"{amount(step['bytes_used'])} of it used. {' '.join(refused)}"
        )]  # fmt: skip
        lines += cells(step)
    said = "agree" if found["agree"] else "do NOT agree"
    worst = max(step["error"] for step in found["steps"])
    lines += ["", *wrap(
        f"The logits of the three {said} with those without a cache: off by {worst:.2g} at most, "
        f"allowed is {found['allowed']:.2g}."
    )]  # fmt: skip
    return lines + wrap(*found["notes"])


def cells(step: CacheStep) -> list[str]:
    """The cells of one cache, a character each; of a paged one a page a line."""
    signs = ["s" if position >= 0 else "." for position in step["holds"]]
    for sign, places in (("m", step["read"]), ("r", step["seen"]), ("W", step["written"])):
        for c in places:
            signs[c] = sign
    drawn, size = "".join(signs), step["page_size"]
    if size is None:
        return [f"  {at:>4} {drawn[at : at + 64]}" for at in range(0, len(drawn), 64)]
    lines = []
    for page in range(len(drawn) // size):
        what = "free"
        if page in step["page_table"]:
            first = step["page_table"].index(page) * size
            what = f"tokens {first} to {min(first + size, step['length_after']) - 1}"
        elif page == 0:
            what = "the null page: padding is written here"
        lines.append(f"  page {page:<3} {drawn[page * size : (page + 1) * size]}  {what}")
    table = " ".join(map(str, step["page_table"]))
    return [*lines, *wrap(f"page table [{table}]")]


def costs(found: Costs, n_head: int) -> list[str]:
    """FLOPs, bytes and the roofline as T grows."""
    lines = title(f"COST on one {found['gpu']}, {found['dtype']}")
    lines += wrap(
        f"One layer forward, batch 1, {n_head} heads, tiles of {found['block_m']} x "
        f"{found['block_n']}, the largest that fit into {amount(found['fast_memory'])}. Peak "
        f"{found['peak'] / 1e12:,.4g} TFLOP/s ({found['peak_source']}), "
        f"{found['bandwidth'] / 1e9:,.4g} GB/s ({found['bandwidth_source']}). Below "
        f"{found['ridge']:.0f} FLOPs a byte (F/B) memory is the limit, above it arithmetic. "
        "Computing and moving so much takes at least that time."
    )
    lines += ["", f"{'':8}{'manual':^36}{'tiled':^36}",
              f"{'T':>7} " + f"{'FLOPs':>9}{'bytes':>9}{'F/B':>6}{'time':>10}  " * 2]  # fmt: skip
    for row in found["rows"]:
        line = f"{row['T']:>7,} "
        for c in (row["manual"], row["tiled"]):
            mark = "m" if c["bound"] == "memory" else "c"
            line += (
                f"{scaled(c['flops']):>9}{scaled(c['bytes']):>9}{c['intensity']:>6.0f}"
                f"{duration(c['seconds']):>8} {mark}  "
            )
        lines.append(line)
    return [*lines, "", "m: memory is the limit, c: arithmetic is"]


# --- words and numbers ---


def title(text: str) -> list[str]:
    return [text, "-" * min(len(text), WIDTH)]


def wrap(*texts: str) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, WIDTH)]


def count(n: int, one: str, many: str = "") -> str:
    """ "1 token", "4,096 tokens"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"


def scaled(n: float, units: Sequence[str] = ("", "k", "M", "G", "T")) -> str:
    """Three figures and a unit: "12.3 M"."""
    for unit in units:
        if n < 999.5 or unit == units[-1]:
            break
        n /= 1000
    return f"{n:.3g} {unit}" if unit else f"{n:.0f}  "


def amount(n: int) -> str:
    """Bytes: "12.3 kB"."""
    return f"{scaled(n).rstrip()}{'B' if n >= 999.5 else ' B'}"


def duration(seconds: float) -> str:
    """ "12.3 us": three figures."""
    return scaled(seconds * 1e9, ("ns", "us", "ms", "s"))


def span(ends: Sequence[int]) -> str:
    return f"{ends[0]}..{ends[1] - 1}"


def between(values: np.ndarray, digits: int) -> str:
    """The least and the largest of a tile's rows; those beyond a short block are NaN."""
    there = values[~np.isnan(values)]
    low, high = (f"{v:.{digits}f}" for v in (there.min(), there.max()))
    return f"{low}..{high}"
