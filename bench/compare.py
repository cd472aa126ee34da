"""Comparison of two records, row by row, with the machine's drift divided out (docs/MEASURE.md).

Each rate is divided, round by round, by that of third-party code in the same record; the ratios are
compared, and their spread is the noise. Without a baseline drift is part of the result.
"""

from __future__ import annotations

import statistics

from bench import Json, records, tables
from bench.rows import Row, where
from bench.stats import Summary, exceeds_noise

SAME = ("kind", "name", "capability", "threads", "cpu")  # equal: the same machine
Key = tuple[str, str, str]  # mode, backend, point in words
Rows = dict[Key, Row]


def compare(a: Json, b: Json) -> tuple[list[str], tables.Cells]:
    """Return notes and the table of B against A."""
    apart = any(a["machine"].get(n) != b["machine"].get(n) for n in SAME)
    notes = different(a, b, apart)
    of_a, of_b = (
        {_key(r): r for part in records.parts(c) for r in part["rows"] if r["status"] == "ok"}
        for c in (a, b)
    )
    shared = [key for key in of_a if key in of_b]
    unit = " ratio" if apart else "/s"
    head = ["backend", "where", f"A{unit}", f"B{unit}", "B / A", "noise", "verdict"]
    lines, drifts = [], dict[str, list[float]]()
    for key in shared:
        base = baselines(key, shared, a, b)
        if base and not apart:
            was, now = (statistics.median(_together(rows, base)) for rows in (of_a, of_b))
            names = " and ".join(dict.fromkeys(k[1] for k in base))
            drifts.setdefault(f"{key[0]} by {names}", []).append(now / was)
        if key in base or (apart and not base):  # its own ratio is 1
            continue
        (x, by_x), (y, by_y) = (_ratios(key, rows, base) for rows in (of_a, of_b))
        ratio, sure = by_y.median / by_x.median, exceeds_noise(by_x, by_y)
        faster = "B faster" if ratio > 1 else "B slower"
        word = {None: "noise unknown", False: "within noise", True: faster}[sure]
        noise = "-" if sure is None else f"{(by_x.spread or 0) + (by_y.spread or 0):.1%}"
        shown = [tables.number(s.median) for s in ((by_x, by_y) if apart else (x, y))]
        lines.append([key[1], tables.name_of(of_a[key]), *shown, f"{ratio:.3f}", noise, word])
    for mode, found in drifts.items():
        ends = dict.fromkeys(f"{drift:.3f}" for drift in (min(found), max(found)))
        notes.append(f"divided out: the machine's drift, {' to '.join(ends)} in {mode}")
    for name, mine, other in (("A", of_a, of_b), ("B", of_b, of_a)):
        if only := sorted({k[1] for k in mine} - {k[1] for k in other}):
            notes.append(f"only in {name}: {', '.join(only)}")
    if not lines:
        notes.append("no row and its baseline are in both: there is nothing to compare")
    return notes, (head, lines)


def different(a: Json, b: Json, apart: bool) -> list[str]:
    """Return notes on machines, settings and versions that differ."""
    found = []
    for part, names in (("settings", a.get("settings", ())), ("machine", ("dtype", "packages"))):
        for name in names:
            x, y = a[part][name], b[part].get(name, a[part][name])
            if x != y and name not in ("record", "json"):
                found.append("versions" if name == "packages" else f"{name} ({x} / {y})")
    notes = [f"not only the code differs: {', '.join(found)}"] if found else []
    if apart:
        about = "; ".join(c["machine"]["about"] for c in (a, b))
        notes.insert(0, f"two machines ({about}): ratios to the baselines of both are compared")
    return notes


def baselines(key: Key, shared: list[Key], a: Json, b: Json) -> list[Key]:
    """Return the baselines of a row: third-party code at the same point, else at any point of the
    mode, else manual at the same point."""
    versions = [c["machine"]["packages"] for c in (a, b)]
    trusted = ["nanogpt"]
    if versions[0] == versions[1]:
        trusted += ["hf_eager", "hf_sdpa", "hf_flash_attention_2"]
    others = [k for k in shared if k[0] == key[0] and k[1] in trusted]
    plain = (key[0], "manual", key[2])
    return [k for k in others if k[2] == key[2]] or others or [plain] * (plain in shared)


def _ratios(key: Key, rows: Rows, base: list[Key]) -> tuple[Summary, Summary]:
    """Return a row's rate, and its ratio to the geometric mean of its baselines."""
    own = _speed(rows[key])
    ratios = [s / m for s, m in zip(own, _together(rows, base))] if base else own
    return Summary.of(own), Summary.of(ratios)


def _together(rows: Rows, base: list[Key]) -> list[float]:
    """Return the geometric mean of the baselines' rates in each round."""
    rates = zip(*(_speed(rows[key]) for key in base))
    return [statistics.geometric_mean(beside) for beside in rates]


def _key(row: Row) -> Key:
    return row["mode"], row["backend"], where(dict(sorted(row["point"].items())))


def _speed(row: Row) -> list[float]:
    """Return tokens or calls per second in each round."""
    size = row.get("tokens_a_step") or row["point"].get("B", 1) if row["mode"] != "kernel" else 1
    return [size / (r["ms"] / 1e3) for r in row["rounds"]]
