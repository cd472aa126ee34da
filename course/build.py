"""Write the generated parts of course/ and docs/PLAN.md, and notebooks/*.ipynb.

    python -m course.build            rewrite them
    python -m course.build --check    print each place that is out of date; exit code 1

Text from such a comment to `<!-- end -->` is generated; from, to: its first and last line:

    <!-- code: attention/tiled.py forward_tiles -->
    <!-- code: attention/tiled.py forward_tiles from "S_ij = tau" to "m_i = m_new" -->
    <!-- code: attention/manual.py attend from "scores = (q" to "out = probs @" plain -->
    <!-- figure: mask --Tq=3 --Tk=5 -->
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from core.settings import UserError, exit_on_user_error, user_errors
from course import ROOT
from course.figures.__main__ import draw
from course.notebook import NOTEBOOKS, notebook

PLAN = ROOT / "docs" / "PLAN.md"
END = "<!-- end -->\n"
MARK = r"^(<!-- (code|figure): (.+?) -->\n)"
PART = MARK + rf"((?:(?!<!-- (?:code|figure): ).*\n)*?){END}"
CODE = r'(\S+) (\S+)(?: from "(.+?)" to "(.+?)")?( plain)?'
# plain() leaves these out.
OPTIONS = r".*dropout\(.*\n|, alibi_slopes|\[\.\.\., :Tk\]|  # the sink has no value"
FACTOR = r"\(Z_ij \* (\w+)\)|Z_ij \* \((.+)\)"  # of dropout


def main(argv: Sequence[str]) -> int:
    if list(argv) not in ([], ["--check"]):
        raise UserError(f"usage: python -m course.build [--check], got {' '.join(argv)}")
    stale = 0
    for path, text, changed in fresh():
        for place in changed:
            print(f"{path.name}: {'is out of date' if argv else 'written'}: {place}")
        if changed and not argv:
            path.write_text(text, encoding="utf-8")
        stale += len(changed)
    if argv and stale:
        print("run python -m course.build")
    return int(bool(argv) and stale > 0)


def fresh() -> Iterator[tuple[Path, str, list[str]]]:
    """Each file, its new text, and the places that differ."""
    for path in (*sorted((ROOT / "course").glob("*.md")), PLAN):
        yield path, *rebuild(path.read_text(encoding="utf-8"), path)
    for name in NOTEBOOKS:
        path, text = ROOT / "notebooks" / f"{name}.ipynb", notebook(name)
        same = path.exists() and path.read_text(encoding="utf-8") == text
        yield path, text, [] if same else ["the notebook"]


def rebuild(text: str, page: Path) -> tuple[str, list[str]]:
    """The new page, and the changed comments."""
    changed = []

    def fill(part: re.Match[str]) -> str:
        mark, kind, what, old = part.groups()
        with user_errors(f"{page.name}: {mark.strip()}: "):
            made = code(what, page) if kind == "code" else draw(shlex.split(what)) + "\n"
        if made != old:
            changed.append(mark.strip())
        return f"{mark}{made}{END}"

    made, parts = re.subn(PART, fill, text, flags=re.M)
    if parts != len(re.findall(MARK, text, re.M)):
        raise UserError(f"{page.name}: a comment without {END.strip()}")
    return made, changed


def code(what: str, page: Path) -> str:
    """The fenced block of a `code:` comment, with a link above."""
    parsed = re.fullmatch(CODE, what)
    if not parsed:
        raise UserError('expected: FILE NAME, or FILE NAME from "TEXT" to "TEXT"')
    file, name, first, last, short = parsed.groups()
    link = Path(os.path.relpath(ROOT / file, page.parent)).as_posix()
    lines = source((ROOT / file).read_text(encoding="utf-8"), name)
    if first:
        lines = cut(lines, first, last)
    of = ", without softcap, sinks, ALiBi, dropout and caches" if short else ""
    return f"[{file}]({link}), `{name}`{of}:\n\n```python\n{plain(lines) if short else lines}```\n"


def source(text: str, name: str) -> str:
    """The lines of a function, class or Class.method."""
    node: ast.AST | None = ast.parse(text)
    for part in name.split("."):
        body = getattr(node, "body", [])
        node = next((n for n in body if getattr(n, "name", None) == part), None)
    if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        raise UserError(f"{name} not found in that file")
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return textwrap.dedent("".join(text.splitlines(keepends=True)[start - 1 : node.end_lineno]))


def cut(text: str, first: str, last: str) -> str:
    lines = text.splitlines(keepends=True)

    def find(words: str, start: int) -> int:
        for n in range(start, len(lines)):
            if words in lines[n]:
                return n
        raise UserError(f"no line contains {words!r}")

    start = find(first, 0)
    return textwrap.dedent("".join(lines[start : find(last, start) + 1]))


def plain(text: str) -> str:
    """The lines without softcap, sinks, ALiBi, dropout and caches."""
    lines = text.splitlines(keepends=True)
    for node in ast.walk(ast.parse(text)):
        test = ast.unparse(node.test) if isinstance(node, ast.If) else ""
        if isinstance(node, ast.If) and re.search("softcap|sinks|alibi|^cache is None$", test):
            first, last = node.body[0].lineno, node.body[-1].end_lineno or 0
            for n in range(node.lineno, (node.end_lineno or 0) + 1):
                stays = test == "cache is None" and first <= n <= last
                lines[n - 1] = lines[n - 1].removeprefix("    ") if stays else ""
    return re.sub(FACTOR, r"\1\2", re.sub(OPTIONS, "", "".join(lines)))


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
