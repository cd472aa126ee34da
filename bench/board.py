"""The board: every record in bench/records/, verified, as one page.

    python -m bench.board             write docs/BOARD.md and docs/board.html anew
    python -m bench.board --check     verify every record; exit code 1 with a line for each problem

What is compared stands together: a table a kind of work, a line a machine and kernel. Two lines are
of the same work where all columns left of "machine" agree; a machine is never put above another for
having done something else. What lost, failed or was refused is there, too.
"""

from __future__ import annotations

import argparse
import html
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench import records, tables
from bench.rows import Row
from bench.verify import OLD, model_of, sequences_of, source_state, verify
from core import flops

FOLDER = records.ROOT / "bench" / "records"
PAGE, SITE = records.ROOT / "docs" / "BOARD.md", records.ROOT / "docs" / "board.html"
INTRO = f"""Every record in [bench/records](../bench/records), as `python -m bench.board` writes \
it. `--check` verifies each: hashes, medians, MFU, kernels, peaks, errors, source \
([MEASURE.md](MEASURE.md)). A line is one machine and kernel; two are of the same work where what \
stands left of "machine" is the same, under the same heading. Machines that did different work are \
not ranked. "{OLD}": a record of the time before errors and canaries were kept in it; the file is \
the very one of that day, but little in it can be checked."""
Table = dict[str, tables.Cells]  # by what is done


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.board", description=__doc__,
                                     formatter_class=argparse.RawTextHelpFormatter)  # fmt: skip
    parser.add_argument("--check", action="store_true", help="verify, write nothing")
    check = parser.parse_args(argv).check
    found, problems = load(FOLDER)
    for name, content in found.items():
        problems += [f"{name}: {why}" for why in verify(content, FOLDER / name)]
        if content.get("format") == records.FORMAT and source_state(content) == "unverifiable":
            print(f"note: {name}: its commit is not in this history: its source is not verifiable")
    if not problems:
        made = {PAGE: markdown(found), SITE: page(found)}
        for path, text in made.items():
            if not check:
                path.write_text(text, encoding="utf-8")
            elif not path.exists() or path.read_text(encoding="utf-8") != text:
                problems.append(f"{path.name} is out of date: python -m bench.board writes it anew")
    print("\n".join(problems) or f"{len(found)} records are what they say", file=sys.stderr)
    return 1 if problems else 0


def load(folder: Path) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The contents of all records by folder name, and what cannot be read."""
    found, problems = {}, []
    for path in sorted(p for p in folder.iterdir() if p.is_dir()):
        try:
            content = json.loads((path / "record.json").read_text(encoding="utf-8"))
            if not isinstance(content, dict):
                raise ValueError("no object")
            found[path.name] = content
        except (OSError, ValueError) as e:
            problems.append(f"{path.name}: it has no record.json that can be read ({e})")
    return found, problems


# ----------------------------------------------------------------------------- the tables


def share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def percent(value: float | None, machine: dict[str, Any]) -> str:
    """A share of the peak, and the peak's source."""
    if value is None:
        return "-"
    source = machine["peak_source"]
    of = "of measured" if source.startswith("measured") else "of datasheet"
    return f"{value:.1%} {'of a given peak' if source.startswith('--') else of}"


def error(row: Row) -> str:
    """The error from its proof; for attention alone, at this shape."""
    proof = row.get("proof", {})
    off = row.get("error_out", proof.get("error"))
    return "-" if off is None else f"{off:.1e}"


def model_name(part: dict[str, Any]) -> str:
    """The sizes of the model, and its precision."""
    m = model_of(part)
    heads = f"{m.n_head} heads" + f" ({m.kv_heads} for keys)" * (m.kv_heads != m.n_head)
    window = f", window {m.attention_window}" if m.attention_window else ""
    s = part["settings"]
    more = {"biases": m.bias, f"dropout {m.dropout:g}": m.dropout,
            "gradient checkpointing": s.get("gradient_checkpointing"),
            "residual in autocast": s.get("residual_dtype") == "autocast"}  # fmt: skip
    return (
        f"{m.n_layer} layers, {m.n_embd} wide, {heads}, vocabulary {m.vocab_size:,}{window}, "
        f"{part['machine']['dtype']}{''.join(f', {name}' for name, on in more.items() if on)}"
    )


def compiled(row: Row, part: dict[str, Any]) -> str:
    asked = part["settings"].get("compile") is True
    return "yes" if row.get("compiled", asked and row["mode"] == "decode") else "no"


def ms(row: Row) -> str:
    return f"{row['ms']:.3g} ({tables.spread(row)})"


Columns = dict[str, Callable[[Row, dict[str, Any]], str]]


def _tflops(row: Row, part: dict[str, Any]) -> str:
    m = model_of(part)
    return f"{row['tokens_per_s'] * flops.flops_per_token(m, m.block_size) / 1e12:.3g}"


# The table's title and the columns left of "machine" define the work.
WORK: dict[str, tuple[Callable[[Row, dict[str, Any]], str], Columns, Columns]] = {
    "train": (
        lambda r, c: model_name(c),
        {
            "tokens": lambda r, c: f"{c['settings']['block_size']:,}",
            "sequences": lambda r, c: str(sequences_of(r, c)),
            "compiled": compiled,
        },
        {
            "tok/s": lambda r, c: f"{r['tokens_per_s']:,.0f}",
            "ms a step": lambda r, c: ms(r),
            "TFLOP/s": _tflops,
            "MFU": lambda r, c: percent(r["mfu"], c["machine"]),
            "causal": lambda r, c: share(r["mfu_causal"]),
        },
    ),
    "kernel": (
        lambda r, c: (
            f"{r['point']['H']} heads of {r['point']['D']}"
            + f" ({r['point']['Hkv']} for keys)" * (r["point"]["Hkv"] != r["point"]["H"])
            + f", window {r['point']['window']}" * bool(r["point"]["window"])
            + f", {c['machine']['dtype']}"
        ),
        {
            "tokens": lambda r, c: f"{r['point']['T']:,}",
            "sequences": lambda r, c: str(r["point"]["B"]),
        },
        {
            "TFLOP/s": lambda r, c: f"{r['tflops_causal']:.3g}",
            "of peak": lambda r, c: percent(r["share"], c["machine"]),
            "ms": lambda r, c: ms(r),
        },
    ),
    "decode": (
        lambda r, c: model_name(c),
        {
            "prompt": lambda r, c: str(r["point"]["P"]),
            "new": lambda r, c: str(r["point"]["new_tokens"]),
            "sequences": lambda r, c: str(r["point"]["B"]),
            "cache": lambda r, c: r["point"]["cache"],
            "processor": lambda r, c: "yes" if r["point"]["processor"] else "no",
            "compiled": compiled,
        },
        {
            "tok/s": lambda r, c: tables.rate(r["tokens_per_s"]),
            "ms a token": lambda r, c: ms(r),
            "MBU": lambda r, c: share(r["mbu"]),
        },
    ),
    "converge": (
        lambda r, c: model_name(c) + f", {c['settings']['steps']} steps",
        {
            "tokens": lambda r, c: f"{c['settings']['block_size']:,}",
            "sequences": lambda r, c: str(sequences_of(r, c)),
        },
        {
            "final loss": lambda r, c: f"{r['final_loss']:.4f}",
            "off": lambda r, c: f"{r['difference']:+.3%}",
            "verdict": lambda r, c: r["verdict"],
        },
    ),
}


def board(found: dict[str, dict[str, Any]]) -> tuple[dict[str, Table], tables.Cells, list[str]]:
    """The tables by mode and work; what was not measured; the records without rows."""
    lines: dict[tuple[str, str], list[tuple[Any, list[str]]]] = {}
    missing: dict[tuple[str, ...], list[str]] = {}
    others = []
    for name, content in found.items():
        if not {"rows", "stages"} & content.keys():
            others.append(link(name, name))
            continue
        for part in records.parts(content):
            machine = part["machine"]["about"]
            for row in part["rows"]:
                if row["status"] == "ok":
                    of, work, figures = WORK[row["mode"]]
                    at = [cell(row, part) for cell in work.values()]
                    made = [cell(row, part) for cell in figures.values()]
                    seen = f"{row['backend']}: {tables.kernel_names(row)}"
                    more = [error(row), state(part), link(part["date"][:10], name)]
                    order = ([number(cell) for cell in at], machine, row["ms"])
                    key = (row["mode"], of(row, part))
                    lines.setdefault(key, []).append((order, [*at, machine, seen, *made, *more]))
            for backend, status, why in tables.missing(part["rows"])[1]:
                links = missing.setdefault((machine, backend, status, why), [])
                links.append(link(str(len(links) + 1), name))
    made_: dict[str, Table] = {}
    for mode, (_, work, figures) in WORK.items():
        head = [*work, "machine", "kernel", *figures, "error", "record", "date"]
        for (of_mode, what), group in sorted(lines.items()):
            if of_mode == mode:
                sorted_ = [cells for _, cells in sorted(group, key=lambda one: one[0])]
                made_.setdefault(records.TITLES[mode], {})[what] = (head, sorted_)
    absent = [[*key, " ".join(links)] for key, links in sorted(missing.items())]
    return made_, (["machine", "backend", "status", "why", "records"], absent), others


def number(cell: str) -> tuple[float, str]:
    """A sort key for cells: numbers by value."""
    digits = cell.replace(",", "")
    return (float(digits), "") if digits.isdecimal() else (0.0, cell)


def state(part: dict[str, Any]) -> str:
    """How far a record can be trusted."""
    if part["format"] != records.FORMAT:
        return OLD
    return (
        "checked"
        + ", incomplete" * (not part.get("complete", True))
        + (", uncommitted code" if part["dirty"] else ", no commit" if not part["commit"] else "")
    )


def link(text: str, name: str) -> str:
    return f"[{text}](../bench/records/{name}/README.md)"


# ----------------------------------------------------------------------------- the pages


def markdown(found: dict[str, dict[str, Any]]) -> str:
    sections, absent, others = board(found)
    text = ["# The board", INTRO]
    for title, by_work in sections.items():
        text.append(f"## {title}")
        for what, cells in by_work.items():
            text += [f"### {what}", tables.markdown(cells)]
    text += ["## Not measured", tables.markdown(absent)] if absent[1] else []
    text += ["## Other records", "\n".join(f"- {one}" for one in others)] if others else []
    return "\n\n".join(text) + "\n"


STYLE = """body{font:15px/1.45 system-ui,sans-serif;margin:2rem auto;padding:0 1rem;max-width:76rem;
color:#1d2430;background:#fff}h2{margin-top:2.5rem}h3{margin-bottom:.3rem;font-size:1rem}
div{overflow-x:auto}table{border-collapse:collapse;font-size:.87rem}th,td{padding:.2rem .6rem;
text-align:left;border-bottom:1px solid #e3e6ea;vertical-align:top}th{cursor:pointer;
white-space:nowrap;border-bottom:2px solid #8a93a0}tr:hover td{background:#f3f6fa}a{color:#0b5cad}
td:last-child{white-space:nowrap}td{font-variant-numeric:tabular-nums}@media(prefers-color-scheme:dark){body{color:#dde3ea;
background:#14181d}th,td{border-color:#333b45}tr:hover td{background:#1d242c}a{color:#7db8f0}}"""
SORT = """document.querySelectorAll("th").forEach(th=>th.onclick=()=>{
const table=th.closest("table"),i=th.cellIndex,n=s=>parseFloat(s.replace(/,/g,""));
const key=r=>r.cells[i].textContent,up=th.dataset.up!=="1";th.dataset.up=up?"1":"";
const rows=[...table.tBodies[0].rows].sort((a,b)=>{const x=n(key(a)),y=n(key(b));
return (isNaN(x)||isNaN(y)?key(a).localeCompare(key(b)):x-y)*(up?1:-1)});
table.tBodies[0].append(...rows)})"""


def page(found: dict[str, dict[str, Any]]) -> str:
    """The same as one file of HTML; a click on a column's head sorts its table."""
    sections, absent, others = board(found)
    body = ["<h1>The board</h1>", f"<p>{rich(INTRO)}</p>"]
    for title, by_work in sections.items():
        body.append(f"<h2>{html.escape(title)}</h2>")
        for what, cells in by_work.items():
            body += [f"<h3>{html.escape(what)}</h3>", html_table(cells)]
    body += ["<h2>Not measured</h2>", html_table(absent)] if absent[1] else []
    listed = "".join(f"<li>{rich(one)}</li>" for one in others)
    body += ["<h2>Other records</h2>", f"<ul>{listed}</ul>"] if others else []
    return (
        '<!doctype html>\n<html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">\n<title>The board</title>'
        f"<style>{STYLE}</style>\n" + "\n".join(body) + f"\n<script>{SORT}</script></html>\n"
    )


def html_table(cells: tables.Cells) -> str:
    head, lines = cells
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    rows = ("<tr>" + "".join(f"<td>{rich(cell)}</td>" for cell in line) + "</tr>" for line in lines)
    return f"<div><table><thead><tr>{top}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def rich(text: str) -> str:
    """Links and code of a line of Markdown, as HTML."""
    text = html.escape(text)
    text = re.sub(r"\[([^\]]+)\]\(([^)]+)\)", r'<a href="\2">\1</a>', text)
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
