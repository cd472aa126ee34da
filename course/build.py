"""Write the generated parts of course/ and docs/PLAN.md, and notebooks/*.ipynb.

    python -m course.build            rewrite them
    python -m course.build --check    print each place that is out of date; exit code 1

Text from such a comment to `<!-- end -->` is generated; from, to: its first and last line:

    <!-- code: attention/tiled.py forward_tiles -->
    <!-- code: attention/tiled.py forward_tiles from "S_ij = tau" to "m_i = m_new" -->
    <!-- code: attention/manual.py attend from "scores = (q" to "out = probs @" plain -->
    <!-- figure: mask --Tq=3 --Tk=5 -->

Notebooks are made of notebooks/*.md: a ```{code-cell} fence is a code cell; `<!-- include:
course/1_softmax.md -->` stands for a page, with pictures, figures and exercises as code cells.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from core.settings import UserError, exit_on_user_error, user_errors
from course import ROOT
from course.exercises import exercise
from course.figures.__main__ import draw
from course.lesson import bundle

PLAN = ROOT / "docs" / "PLAN.md"
END = "<!-- end -->\n"
MARK = r"^(<!-- (code|figure): (.+?) -->\n)"
PART = MARK + rf"((?:(?!<!-- (?:code|figure): ).*\n)*?){END}"
QUOTED = r'(\S+) (\S+)(?: from "(.+?)" to "(.+?)")?( plain)?'
# plain() leaves these out.
OPTIONS = r".*dropout\(.*\n|, alibi_slopes|\[\.\.\., :Tk\]|  # the sink has no value"
FACTOR = r"\(Z_ij \* (\w+)\)|Z_ij \* \((.+)\)"  # of dropout
REPOSITORY = re.findall(r'\nRepository = "(.+)"', (ROOT / "pyproject.toml").read_text("utf-8"))[0]
CODE_URL = f"{REPOSITORY}/blob/main"
COLAB = CODE_URL.replace("//github.com", "//colab.research.google.com/github")
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
NOTEBOOKS = ("attention", "qualify")
LEFT_OUT = "## Train on your own kernel"  # it needs files next to train.py
CELL = "```{code-cell}\n%s\n```"
FENCE = r"^```%s\n((?:.*\n)*?)```$"
Cell = dict[str, Any]


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
    parsed = re.fullmatch(QUOTED, what)
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


# --- notebooks ---


def notebook(name: str) -> str:
    text = (ROOT / "notebooks" / f"{name}.md").read_text(encoding="utf-8")
    text = re.sub(r"^<!-- include: (\S+) -->$", lambda m: included(ROOT / m[1]), text, flags=re.M)
    badge = f"{BADGE}({COLAB}/notebooks/{name}.ipynb)"
    for mark, words in (("repository", REPOSITORY), ("code", CODE_URL), ("badge", badge)):
        text = text.replace(f"{{{{{mark}}}}}", words)
    cells: list[Cell] = []
    for n, part in enumerate(re.split(FENCE % r"\{code-cell\}", text, flags=re.M)):
        if n % 2:
            cells.append(code_cell(part.strip()))
            continue
        sections = filter(None, map(str.strip, re.split(r"^(?=##+ )", part, flags=re.M)))
        cells += [{"cell_type": "markdown", "metadata": {}, "source": section.splitlines(True)}
                  for section in sections]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    about = {"accelerator": "GPU", "colab": {"gpuType": "T4"}, "kernelspec": kernel}
    content = {"cells": cells, "metadata": about, "nbformat": 4, "nbformat_minor": 4}
    return json.dumps(content, indent=1, ensure_ascii=False) + "\n"


def code_cell(lines: str) -> Cell:
    """A code cell; the output of a picture."""
    drawn = re.fullmatch(r'picture\("(\w+)"\)', lines)
    data = {k: v.splitlines(True) for k, v in bundle(drawn[1]).items()} if drawn else {}
    output = {"output_type": "display_data", "metadata": {}, "data": data}
    # Without Triton "run all" goes on.
    metadata = {"tags": ["raises-exception"]} if lines.startswith("import triton") else {}
    return {"cell_type": "code", "execution_count": None, "metadata": metadata,
            "outputs": [output] if drawn else [], "source": lines.splitlines(True)}


def included(path: Path) -> str:
    """A page with code cells, headings a level lower, and absolute links."""

    def absolute(link: re.Match[str]) -> str:
        target = (path.parent / link[1]).resolve()
        return f"]({CODE_URL}/{target.relative_to(ROOT).as_posix()})"

    page = without_marks(path.read_text(encoding="utf-8"))
    page = re.sub(FENCE % "math", lambda m: f"$$\n{m[1]}$$", page, flags=re.M)
    page = re.sub(r"\]\((?!http|#|pictures/)([^)]+)\)", absolute, page)
    page = re.sub(r"^!\[.+\]\(pictures/(\w+)\.svg\)$", CELL % r'picture("\1")', page, flags=re.M)
    page = re.sub(FENCE % "sh", figure_cells, page, flags=re.M)
    sections = re.split(r"^(?=## )", page, flags=re.M)
    kept = [exercise_cells(part) for part in sections if not part.startswith(LEFT_OUT)]
    return "".join(re.sub(r"\A#", "##", part) for part in kept)


def without_marks(page: str) -> str:
    """Drop the links to neighbors and the comments of course.build."""
    return re.sub(r"^\[Contents\].*\n\n|^<!-- .* -->\n", "", page, flags=re.M)


def figure_cells(commands: re.Match[str]) -> str:
    """A cell for the figures of these commands, if any."""
    drawn = re.findall(r"^python -m course\.figures (.+)$", commands[1], re.M)
    return CELL % "\n".join(f"figure({words!r})" for words in drawn) if drawn else commands[0]


def exercise_cells(section: str) -> str:
    """An exercise gets cells for its start and its check."""
    number = re.match(r"## Exercise ([\d.]+):", section)
    if not number:
        return section
    made = exercise(number[1])
    start = f"```python\n{made.start}```"
    assert start in section, section
    check = CELL % f"check({made.number}, {', '.join(made.names)})"
    section = section.replace(start, f"{CELL % made.start.strip()}\n\n{check}")
    return re.sub(r"^```sh\n(?:.*\n)*?```\n", "", section, flags=re.M)


if __name__ == "__main__":
    exit_on_user_error(lambda: main(sys.argv[1:]))
