"""All records of bench/records/, verified, as one page.

python -m bench.board             write docs/BOARD.md
python -m bench.board --check     verify every record; exit code 1 with a line for each problem
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from itertools import groupby
from pathlib import Path

from bench import ROOT, Json, report, tables
from bench.record import verify
from bench.tables import Row, heads

FOLDER = ROOT / "bench" / "records"
PAGE = ROOT / "docs" / "BOARD.md"
INTRO = """All records in [bench/records](../bench/records), written by `python -m bench.board`. \
`--check` verifies them ([MEASURE.md](MEASURE.md)). Each line is one machine and kernel; lines \
compare the same work where heading and columns left of "machine" are equal. "~" is noisy, "*" has \
a remark below. A column "peak" names the source of a peak that was not measured there."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        "python -m bench.board", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="verify, write nothing")
    parser.add_argument("--records_dir", type=Path, help="verify another folder's, write nothing")
    given = parser.parse_args(argv)
    folder: Path = given.records_dir or FOLDER
    found: dict[str, Json] = {}
    problems = []
    for path in sorted(p for p in folder.glob("*") if p.is_dir()):
        try:
            found[path.name] = json.loads((path / "record.json").read_text(encoding="utf-8"))
            problems += [f"{path.name}: {why}" for why in verify(found[path.name])]
        except (OSError, ValueError) as e:
            problems.append(f"{path.name}: cannot read record.json ({e})")
    problems = problems or [f"no records in {folder}"] * (not found)
    if not problems and not given.records_dir:
        text = page(found)
        if not given.check:
            PAGE.write_text(text, encoding="utf-8")
        elif not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
            problems.append(f"{PAGE.name} is out of date; run python -m bench.board")
    print("\n".join(problems) or f"{len(found)} records are correct", file=sys.stderr)
    return 1 if problems else 0


def page(found: dict[str, Json]) -> str:
    machines: dict[str, str] = {}
    remarks, links, made, modes = [], [], [], [*report.MODES]
    for number, (name, content) in enumerate(found.items(), 1):
        ours = bool({"rows", "stages"} & content.keys())
        links.append(f"[{number}]: ../bench/records/{name}/README.md")
        if doubt := doubts(content) if ours else "other work":
            remarks.append(f"- [{name}][{number}]: {doubt}")
        for part in report.sections_of(content) if ours else ():
            short = machines.setdefault(part["machine"]["about"], f"M{len(machines) + 1}")
            link = f"[{part['date'][:10]}{'*' if doubt else ''}][{number}]"
            for row in (r for r in part["rows"] if r["status"] == "ok"):
                what, at = work(row, part), (modes.index(row["mode"]), heading(row, part))
                line = {**what, "machine": short, **figures(row, part), "record": link}
                made.append((at, [*map(by_value, what.values())], short, row["ms"], line))
    named = "; ".join(f"{short}: {about}" for about, short in machines.items())
    text = ["# The board", INTRO, f"Machines: {named}."]
    made.sort(key=lambda one: one[:-1])
    for (n, title), group in groupby(made, lambda one: one[0]):
        lines = [line for *_, line in group]
        head = [name for name in lines[0] if any(line[name] != "-" for line in lines)]
        cells = [[line[name] for name in head] for line in lines]
        mode = f"## {report.MODES[modes[n]].title}"
        text += [mode] * (mode not in text)
        text += [f"### {title}", tables.markdown((head, cells))]
    text += ["## Remarks", "\n".join(remarks)] if remarks else []
    return "\n\n".join([*text, "\n".join(links)]) + "\n"


def by_value(cell: str) -> tuple[float, str]:
    digits = cell.replace(",", "")
    return (float(digits), "") if digits.isdecimal() else (0.0, cell)


def doubts(content: Json) -> str:
    if content["format"] == 1:
        return "old: causality not tested"
    found = [] if content.get("complete", True) else ["incomplete"]
    found += ["uncommitted code"] if content["dirty"] else ["no commit"] * (not content["commit"])
    return ", ".join(found)


def heading(row: Row, part: Json) -> str:
    p = row["point"]
    if row["mode"] != "kernel":
        return report.work(part)
    window = f", window {p['window']}" if p["window"] else ""
    return heads(p["H"], p["Hkv"], f" heads of {p['D']}") + f"{window}, {part['machine']['dtype']}"


def work(row: Row, part: Json) -> dict[str, str]:
    mode, sizes = row["mode"], tables.sizes(row, part["settings"])
    compiled = row.get("compiled", part["settings"].get("compile") is True)
    return {
        "tokens": f"{sizes['T']:,}" if mode != "decode" else "-",
        "prompt": str(sizes.get("P", "-")),
        "new": str(sizes.get("new_tokens", "-")),
        "sequences": str(sizes["B"]),
        "cache": tables.cache(row) if mode == "decode" else "-",
        "compiled": ("yes" if compiled else "no") if mode in ("train", "decode") else "-",
        "with": tables.named(row, part["settings"])[1] or "-",
    }


def figures(row: Row, part: Json) -> dict[str, str]:
    name, _ = tables.named(row, part["settings"])
    made = {"kernel": f"{name}: {tables.kernel_names(row)}".removesuffix(" (CPU)")}
    for title in report.MODES[row["mode"]].board.split(", "):
        made[title] = tables.cell(title, row).replace(" to ", "-").replace("noisy", "~")
    source = re.split("[: ]", part["machine"]["peak_source"])[0]
    error = row.get("error_out", (row.get("proof") or {}).get("error"))
    made["peak"] = re.sub("^(not|measured,?)", "-", source)
    return made | {"error": "-" if error is None else tables.error(error)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
