"""All records of bench/records/, verified, as one page.

    python -m bench.board             write docs/BOARD.md
    python -m bench.board --check     verify every record; exit code 1 with a line for each problem

A table for each kind of work, a line for each machine and kernel. Lines compare the same work where
the columns left of "machine" are equal.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

from bench import ROOT, Json, record, tables
from bench.hf import model_of
from bench.record import MODES
from bench.tables import Row
from bench.verify import verify
from core.runtime import decide_residual

FOLDER = ROOT / "bench" / "records"
PAGE = ROOT / "docs" / "BOARD.md"
INTRO = """All records in [bench/records](../bench/records), written by `python -m bench.board`. \
`--check` verifies them ([MEASURE.md](MEASURE.md)). Each line is one machine and kernel; lines \
compare the same work where heading and columns left of "machine" are equal. "~" is noisy, "*" has \
a remark below. A column "peak" names the source of a peak that was not measured there."""
Part = Json  # a record, or a stage of one
Table = dict[str, tables.Cells]  # by what is done


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.board", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="verify, write nothing")
    check = parser.parse_args(argv).check
    found, problems = load(FOLDER)
    for name, content in found.items():
        problems += [f"{name}: {why}" for why in verify(content)]
    if not problems:
        text = page(found)
        if not check:
            PAGE.write_text(text, encoding="utf-8")
        elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            problems.append(f"{PAGE.name} is out of date; run python -m bench.board")
    print("\n".join(problems) or f"{len(found)} records are correct", file=sys.stderr)
    return 1 if problems else 0


def load(folder: Path) -> tuple[dict[str, Part], list[str]]:
    """Return the records by folder name, and a sentence for each unreadable one."""
    found, problems = {}, []
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        try:
            content = json.loads((path / "record.json").read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("not an object")
            found[path.name] = content
        except (OSError, ValueError) as e:
            problems.append(f"{path.name}: cannot read record.json ({e})")
    return found, problems


# ----------------------------------------------------------------------------- the tables


def heading(row: Row, part: Part) -> str:
    """Return the title of a row's table: sizes and dtype."""
    m, p, s = model_of(part), row["point"], part["settings"]
    if row["mode"] == "kernel":
        H, Hkv, window = p["H"], p["Hkv"], p["window"]
        words = [f"{H} heads of {p['D']}"]
    else:
        H, Hkv = m.n_head, m.kv_heads
        window = ", ".join(str(w or "none") for w in dict.fromkeys(m.windows))
        window = "" if window == "none" else window
        words = [part["hf"]["name"]] if "hf" in part else []
        words += [f"{m.n_layer} layers", f"{m.n_embd} wide", f"{H} heads"]
    words[-1] += f" ({Hkv} for keys)" if Hkv != H else ""
    more = {f"window {window}": window, part["machine"]["dtype"]: True}
    if row["mode"] != "kernel":
        at = part["machine"]
        wanted = s.get("residual_dtype", "float32")
        between = decide_residual(wanted, at["kind"], at["dtype"])
        more = {
            f"vocabulary {m.vocab_size:,}": True,
            **more,
            "biases": m.bias,
            f"dropout {m.dropout:g}": m.dropout,
            "gradient checkpointing": s.get("gradient_checkpointing"),
            "residual in autocast": between == "autocast",
            f"{s.get('steps')} steps": row["mode"] == "converge",
        }
    return ", ".join(words + [name for name, on in more.items() if on])


def work(row: Row, part: Part) -> list[str]:
    """The cells under WORK."""
    mode, p, s = row["mode"], row["point"], part["settings"]
    compiled = "yes" if row.get("compiled", s.get("compile") is True) else "no"
    if mode == "kernel":
        return [f"{p['T']:,}", str(p["B"])]
    if mode == "decode":
        return [str(p["P"]), str(p["new_tokens"]), str(p["B"]), tables.cache(row), compiled]
    sequences = row.get("batch_size", s["batch_size"]) * s["gradient_accumulation_steps"]
    made = [f"{s['block_size']:,}", str(sequences)]
    return [*made, compiled] if mode == "train" else made


# Columns left of "machine", which with the title define the work.
WORK = {
    "train": ("tokens", "sequences", "compiled"),
    "kernel": ("tokens", "sequences"),
    "decode": ("prompt", "new", "sequences", "cache", "compiled"),
    "converge": ("tokens", "sequences"),
}
# Columns right of it, of the records' own tables.
FIGURES = {
    "train": ("tok/s", "ms/step", "quartiles", "mfu", "causal"),
    "kernel": ("TFLOP/s", "of peak", "both ms", "quartiles"),
    "decode": ("tok/s", "ms/token", "quartiles", "mbu"),
    "converge": ("final loss", "off", "verdict"),
}


def trust(row: Row, part: Part) -> list[str]:
    """Return the source of the peak, and the error."""
    source = part["machine"]["peak_source"]
    peak = re.sub("^measured,?", "-", re.split("[: ]", source)[0])
    return [peak, tables.error(row.get("error_out", (row.get("proof") or {}).get("error")))]


def doubts(part: Part) -> str:
    if part["format"] != record.FORMAT:
        return "old: causality not tested"
    found = ["incomplete"] if not part.get("complete", True) else []
    found += (["uncommitted code"] if part["dirty"] else []) or (
        ["no commit"] if not part["commit"] else []
    )
    return ", ".join(found)


def board(found: dict[str, Part]) -> tuple[dict[str, Table], dict[str, str], dict[str, str]]:
    """Return the tables by mode and work, the machines by short name, and remarks on records."""
    machines: dict[str, str] = {}
    remarks: dict[str, str] = {}
    lines: dict[tuple[str, str], list[tuple[tuple[object, ...], list[str]]]] = {}
    for number, (name, content) in enumerate(found.items(), 1):
        if not {"rows", "stages"} & content.keys():
            remarks[f"[{name}][{number}]"] = "other work"
            continue
        if doubt := doubts(content):
            remarks[f"[{name}][{number}]"] = doubt
        for part in record.sections_of(content):
            about = part["machine"]["about"]
            link = f"[{part['date'][:10]}{'*' if doubt else ''}][{number}]"
            machine = machines.setdefault(about, f"M{len(machines) + 1}")
            for row in (r for r in part["rows"] if r["status"] == "ok"):
                mode, at = row["mode"], work(row, part)
                seen = f"{row['backend']}: {tables.kernel_names(row)}".removesuffix(" (CPU)")
                columns = dict(MODES[mode].COLUMNS)
                made = [
                    columns[title](row).replace(" to ", "-").replace("noisy", "~")
                    for title in FIGURES[mode]
                ]
                order = ([by_value(cell) for cell in at], machine, row["ms"])
                line = [*at, machine, seen, *made, *trust(row, part), link]
                lines.setdefault((mode, heading(row, part)), []).append((order, line))
    by_mode: dict[str, Table] = {}
    for mode, titles in WORK.items():
        head = [*titles, "machine", "kernel", *FIGURES[mode], "peak", "error", "record"]
        for (of_mode, what), group in sorted(lines.items()):
            if of_mode == mode:
                sorted_ = [cells for _, cells in sorted(group, key=lambda one: one[0])]
                by_mode.setdefault(MODES[mode].TITLE, {})[what] = with_content(head, sorted_)
    return by_mode, machines, remarks


def with_content(head: list[str], lines: list[list[str]]) -> tables.Cells:
    """Return a table without the columns that are empty in all lines."""
    full = [i for i in range(len(head)) if any(line[i] != "-" for line in lines)]
    return [head[i] for i in full], [[line[i] for i in full] for line in lines]


def by_value(cell: str) -> tuple[float, str]:
    """Return a sort key for cells: numbers by value."""
    digits = cell.replace(",", "")
    return (float(digits), "") if digits.isdecimal() else (0.0, cell)


def page(found: dict[str, Part]) -> str:
    sections, machines, remarks = board(found)
    named = "; ".join(f"{short}: {about}" for about, short in machines.items())
    text = ["# The board", INTRO, f"Machines: {named}."]
    for title, by_work in sections.items():
        text.append(f"## {title}")
        for what, cells in by_work.items():
            text += [f"### {what}", tables.markdown(cells)]
    if remarks:
        text += ["## Remarks", "\n".join(f"- {link}: {why}" for link, why in remarks.items())]
    links = (f"[{i}]: ../bench/records/{name}/README.md" for i, name in enumerate(found, 1))
    text.append("\n".join(links))
    return "\n\n".join(text) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
