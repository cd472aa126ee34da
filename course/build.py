"""Write the generated parts of course/ and docs/PLAN.md, and notebooks/*.ipynb.

    python -m course.build            rewrite the pages
    python -m course.build --check    print each place that is out of date; exit code 1

In a page, the text between one of these comments and `<!-- end -->` is generated:

    <!-- code: attention/tiled.py forward_tiles -->
    <!-- code: attention/tiled.py forward_tiles from "S_ij = tau" to "m_i = m_new" -->
    <!-- code: attention/manual.py attend from "scores = (q" to "out = probs @" plain -->
    <!-- figure: mask --Tq=3 --Tk=5 -->

The first is the source of a function, class or method (`Tiled.forward`). The second is
a part of it, from the first line that contains the one text to the next that contains the other.
The third leaves out softcap, sinks, ALiBi, dropout and caches. The last is the output of
`python -m course.figures`.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from core.settings import UserError, exit_on_user_error
from course.figures import __main__ as figures
from course.notebook import notebooks
from course.source import ROOT, source

COURSE = ROOT / "course"
PLAN = ROOT / "docs" / "PLAN.md"
NOTEBOOKS = ROOT / "notebooks"
END = "<!-- end -->\n"
MARK = re.compile(r"^<!-- (code|figure): (.+?) -->\n", re.M)
CODE = re.compile(r'(\S+) (\S+)(?: from "(.+?)" to "(.+?)")?( plain)?')
# What plain() leaves out within a line.
OPTIONS = [(", alibi_slopes", ""), (r"\[\.\.\., :Tk\]", ""), (r"  # the sink has no value", ""),
           (r"\(Z_ij \* (\w+)\)", r"\1"), (r"Z_ij \* \((.+)\)", r"\1")]


def main(argv: Sequence[str]) -> int:
    """Rewrite the pages, or with --check only compare. Returns the exit code."""
    if list(argv) not in ([], ["--check"]):
        raise UserError(f"usage: python -m course.build [--check], got {' '.join(argv)}")
    stale = 0
    for page in (*sorted(COURSE.glob("*.md")), PLAN):
        text = page.read_text(encoding="utf-8")
        fresh, changed = rebuild(text, page)
        stale += len(changed)
        if not argv and changed:
            page.write_text(fresh, encoding="utf-8")
        for mark in changed:
            print(f"{page.name}: {'is out of date' if argv else 'written'}: {mark}")
    for name, text in notebooks().items():  # from the pages as they are now
        path = NOTEBOOKS / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale += 1
        print(f"{name}: {'is out of date' if argv else 'written'}")
        if not argv:
            path.write_text(text, encoding="utf-8")
    if argv and stale:
        print("run python -m course.build")
    return int(bool(argv) and stale > 0)


def rebuild(text: str, page: Path) -> tuple[str, list[str]]:
    """The page with everything regenerated, and the comments of the places that changed."""
    fresh, changed, at = [], [], 0
    for found in MARK.finditer(text):
        kind, what = found.groups()
        mark = found.group().strip()
        end = text.find(END, found.end())
        next_mark = MARK.search(text, found.end())
        if end < 0 or (next_mark and next_mark.start() < end):
            raise UserError(f"{page.name}: no {END.strip()} after {mark}")
        try:
            make = {"code": code, "figure": figure}[kind]
            made = make(what, page)
        except UserError as e:
            raise UserError(f"{page.name}: {mark}: {e}") from None
        if text[found.end() : end] != made:
            changed.append(mark)
        fresh += [text[at : found.end()], made]
        at = end
    return "".join([*fresh, text[at:]]), changed


def figure(what: str, page: Path) -> str:
    return figures.draw(shlex.split(what)) + "\n"


def code(what: str, page: Path) -> str:
    """The fenced block for "FILE NAME" or 'FILE NAME from "TEXT" to "TEXT"', with a link above."""
    parsed = CODE.fullmatch(what)
    if not parsed:
        raise UserError('expected: FILE NAME, or FILE NAME from "TEXT" to "TEXT"')
    file, name, first, last, short = parsed.groups()
    path = ROOT / file
    if not path.is_file():
        raise UserError(f"file not found: {file}")
    link = Path(os.path.relpath(path, page.parent)).as_posix()
    lines = source(path.read_text(encoding="utf-8"), name)
    if first:
        lines = cut(lines, first, last)
    of = ", without softcap, sinks, ALiBi, dropout and caches" if short else ""
    lines = plain(lines) if short else lines
    return f"[{file}]({link}), `{name}`{of}:\n\n```python\n{lines}```\n"


def plain(text: str) -> str:
    """The lines without those of softcap, sinks, ALiBi, dropout and caches alone."""
    lines: list[str | None] = [*text.splitlines(keepends=True)]

    def drop(first: int, last: int) -> None:
        lines[first - 1 : last] = [None] * (last - first + 1)

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.If) and re.search("softcap|sinks|alibi", ast.unparse(node.test)):
            drop(node.lineno, node.end_lineno or 0)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "cache is None":
            inside = [*range(node.body[0].lineno, (node.body[-1].end_lineno or 0) + 1)]
            kept = [(n, (lines[n - 1] or "").removeprefix("    ")) for n in inside]
            drop(node.lineno, node.end_lineno or 0)
            for n, line in kept:
                lines[n - 1] = line
        elif isinstance(node, ast.Assign) and re.search(r"\bdropout\(", ast.unparse(node.value)):
            drop(node.lineno, node.end_lineno or 0)
    kept_text = "".join(line for line in lines if line is not None)
    for option, instead in OPTIONS:
        kept_text = re.sub(option, instead, kept_text)
    return kept_text


def cut(text: str, first: str, last: str) -> str:
    """The lines from the one that contains `first` to the next that contains `last`, dedented."""
    lines = text.splitlines(keepends=True)
    start = next((n for n, line in enumerate(lines) if first in line), None)
    if start is None:
        raise UserError(f"no line there holds {first!r}")
    stop = next((n for n in range(start, len(lines)) if last in lines[n]), None)
    if stop is None:
        raise UserError(f"no line from there on holds {last!r}")
    return textwrap.dedent("".join(lines[start : stop + 1]))


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
